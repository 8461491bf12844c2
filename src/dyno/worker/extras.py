"""Dyno's extra for each library: the only source of install advice."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dyno.worker.spec import Unavailable
from dyno.worker.system import find_versions

EXTRAS = {
    **dict.fromkeys(("torch", "torchvision", "timm", "safetensors"), "torch"),
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime", "onnxconverter-common", "onnxslim"), "onnx"),
    "openvino": "openvino",
    "ai-edge-litert": "litert",
    **dict.fromkeys(("ncnn", "pnnx"), "ncnn"),
    "tensorrt-rtx": "tensorrt_rtx",  # has cuda-bindings too, but other users need only that
    **dict.fromkeys(("jinja2", "matplotlib", "squarify"), "report"),
    **dict.fromkeys(("pillow", "pycocotools", "pyyaml", "scikit-learn"), "data"),
    **dict.fromkeys(("av", "opencv-python"), "video"),
    "ray": "ray",
    "submitit": "slurm",
    "trackers": "track",
    "tritonclient": "serve",
    "ultralytics": "ultralytics",
    "transformers": "hf",
    **{name: name for name in ("mlflow", "wandb", "tensorboard")},
    "pyarrow": "parquet",
}
# Builds of ONNX Runtime. All install the same files, so an environment has at most one.
ONNX_RUNTIME_BUILDS = "|".join(
    ("onnxruntime", *(f"onnxruntime-{build}" for build in ("gpu", "openvino", "qnn", "migraphx", "rocm")))
)
# Extras and libraries that need a pinned PyTorch: pip would take the newest
NEED_TORCH = {"torch", "ultralytics", "torch_tensorrt"}
# torchao's version by PyTorch version, missing from torchao's metadata (pytorch/ao#2919); needed before 2.11
TORCHAO_VERSIONS = {"2.7": "0.12.0", "2.8": "0.13.0", "2.9.0": "0.14.1", "2.9": "0.15.0", "2.10": "0.16.0"}
# Distribution by import name, also of libraries imported by another one
IMPORT_NAMES = {
    "PIL": "pillow",
    "huggingface_hub": "transformers",
    "cuda": "cuda-bindings",
    "cv2": "opencv-python",
    "mlperf_loadgen": "mlcommons-loadgen",
    "modelopt": "nvidia-modelopt",
    "sklearn": "scikit-learn",
    "supervision": "trackers",
    "yaml": "pyyaml",
    "markupsafe": "jinja2",
}
# Advice by the loader's message about an installed library
INSTALL_ADVICE = {
    "object: operation not permitted": "its file system is mounted noexec: install it on another",
    "failed to map segment": "allow more memory (ulimit -v)",
    "cannot allocate memory": "allow more memory (ulimit -v)",
    "too many open files": "allow more open files (ulimit -n)",
}


def load_library(module: str, user: str = "", error: type[Exception] = Unavailable, cure: str = "") -> Any:
    """Import a module; raise the error with its library, its `user`, and the cure: how to install it."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, AttributeError, RuntimeError) as e:  # the last three: a broken library
        name = find_distribution(module)
        is_absent = isinstance(e, ModuleNotFoundError) and f"{module}.".startswith(f"{e.name}.")
        first, *_ = str(e).splitlines() or [type(e).__name__]
        reason = "is not installed in this Python" if is_absent else f"can't be imported ({first})"
        cure = next((cure for phrase, cure in INSTALL_ADVICE.items() if phrase in first.lower()), cure or install(name))
        raise error(f"{f'{user} needs {name}, which' if user else name} {reason}; {cure}") from e


def install(*libraries: str) -> str:
    """Return the command to install the libraries: by extra, or by name if no extra has them.

    It replaces no engine: its versions fit the installed PyTorch and build of ONNX Runtime.
    """
    names = [find_distribution(library) for library in libraries]
    extras = {EXTRAS[name] for name in names if name in EXTRAS}
    packages = [name for name in dict.fromkeys(names) if name not in EXTRAS]
    versions = find_versions(("torch", ONNX_RUNTIME_BUILDS))
    packages = [_fit_torchao(versions.get("torch", "")) if name == "torchao" else name for name in packages]
    if "torch" in versions and NEED_TORCH & {*extras, *packages}:
        packages.append(f"torch=={versions['torch'].partition('+')[0]}")
    if "onnxruntime" not in versions and versions.keys() - {"torch"}:
        extras = {"onnx_files" if extra == "onnx" else extra for extra in extras}
    requirements = [f"'inference-dyno[{','.join(sorted(extras))}]'"] if extras else []
    return " ".join([_find_install_command(), *requirements, *packages])


def _fit_torchao(torch: str) -> str:
    """Return the requirement of the torchao for this version of PyTorch; the newest if the version is unknown."""
    version = torch.partition("+")[0]
    torchao_version = TORCHAO_VERSIONS.get(version) or TORCHAO_VERSIONS.get(version.rpartition(".")[0])
    return f"torchao=={torchao_version}" if torchao_version else "'torchao>=0.17'"


def _find_install_command() -> str:
    """Return the install command for this interpreter.

    The `pip` on the PATH doesn't install into a tool's environment.
    """
    if (Path(sys.prefix) / "uv-receipt.toml").is_file():
        return f"uv pip install --python {shlex.quote(sys.prefix)}"
    if (Path(sys.prefix) / "pipx_metadata.json").is_file():
        return f"pipx inject {Path(sys.prefix).name}"
    return "pip install"


def find_distribution(library: str) -> str:
    """Return the distribution that contains a library, given its distribution name or its import name."""
    name = IMPORT_NAMES.get(library.partition(".")[0], library.partition(".")[0])
    return name if name in EXTRAS or name.replace("_", "-") not in EXTRAS else name.replace("_", "-")


def name_lacking(names: Iterable[str], extra_names: Iterable[str] = ()) -> str:
    """Return one line on missing libraries, with the command to install them and the libraries in `extra_names`."""
    distributions = [find_distribution(name) for name in names]
    text = ", ".join(distributions[:-1]) + " and " * (len(distributions) > 1) + distributions[-1]
    return f"this needs {text}, not installed here; {install(*distributions, *extra_names)}"
