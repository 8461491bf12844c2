"""What many tests share: a second interpreter, and a reason to skip where a GPU is missing."""

from __future__ import annotations

import os
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's folder."""
    return ROOT


@pytest.fixture(scope="session")
def other_python() -> str:
    """Another CPython that has numpy and ONNX Runtime: `.venv-other`, or the one in DYNO_OTHER_PYTHON."""
    python = os.environ.get("DYNO_OTHER_PYTHON", str(ROOT / ".venv-other/bin/python"))
    if not Path(python).exists():
        pytest.skip("no second CPython with numpy and onnxruntime (`make setup` makes .venv-other where it finds one)")
    tried = subprocess.run([python, "-c", "import numpy, onnxruntime"], capture_output=True, text=True, timeout=120)
    if tried.returncode:
        pytest.skip(f"{python} lacks a library: {tried.stderr.strip().splitlines()[-1]}")
    return python


@lru_cache(maxsize=1)
def _no_gpu() -> str:
    """Why tests marked `gpu` can't run here, or ""."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return "" if pynvml.nvmlDeviceGetCount() else "no NVIDIA GPU"
    except pynvml.NVMLError as e:
        return f"no NVIDIA GPU ({e})"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and _no_gpu():
            item.add_marker(pytest.mark.skip(reason=_no_gpu()))
