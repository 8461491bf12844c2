"""Which extra of Dyno's distribution brings a library: the one place that knows, for every hint of what to install."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

EXTRAS = {
    **dict.fromkeys(("torch", "torchvision", "timm", "safetensors"), "torch"),
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime", "onnxconverter-common", "onnxslim"), "onnx"),
    "openvino": "openvino",
    "tensorrt-rtx": "tensorrt_rtx",  # cuda-bindings is in it too, but others need that alone
    **dict.fromkeys(("jinja2", "matplotlib", "squarify"), "report"),
    **dict.fromkeys(("pillow", "pycocotools", "pyyaml", "scikit-learn"), "data"),
    **dict.fromkeys(("av", "opencv-python"), "video"),
    "ray": "ray",
    "submitit": "slurm",
    "trackers": "track",
    "tritonclient": "serve",
    "ultralytics": "ultralytics",
}
# What some libraries are called where they are imported, by themselves or by another.
IMPORTED = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "markupsafe": "jinja2",
}


def install(*libraries: str) -> str:
    """Return the command to install the libraries: by their extras, or by name where no extra has them."""
    names = [distribution(library) for library in libraries]
    extras = sorted({EXTRAS[name] for name in names if name in EXTRAS})
    alone = [name for name in dict.fromkeys(names) if name not in EXTRAS]
    return " ".join([_find_install_command(), *([f"'inference-dyno[{','.join(extras)}]'"] if extras else []), *alone])


def _find_install_command() -> str:
    """Return the install command for this interpreter.

    The `pip` on the PATH doesn't install into a tool's environment.
    """
    if (Path(sys.prefix) / "uv-receipt.toml").is_file():
        return f"uv pip install --python {shlex.quote(sys.prefix)}"
    if (Path(sys.prefix) / "pipx_metadata.json").is_file():
        return f"pipx inject {Path(sys.prefix).name}"
    return "pip install"


def distribution(library: str) -> str:
    """Return the distribution that contains a library, given its distribution name or its import name."""
    name = IMPORTED.get(library.partition(".")[0], library.partition(".")[0])
    return name if name in EXTRAS or name.replace("_", "-") not in EXTRAS else name.replace("_", "-")


def lacking(names: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return one line on missing libraries, with the command to install them and the useful ones in `also`."""
    named = [distribution(name) for name in names]
    listed = ", ".join(named[:-1]) + " and " * (len(named) > 1) + named[-1]
    return f"this needs {listed}, not installed here; {install(*named, *also)}"
