"""Fixtures for tests on a GPU: Pythons with its libraries, and a small network that builds in seconds.

DYNO_TENSORRT_PYTHON and DYNO_ORTGPU_PYTHON name interpreters other than this one.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NET = """
from torch import nn

def net(num_classes=10, channels=3):
    stem = [nn.Conv2d(channels, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    body = [nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU()]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))

def gray(): return net(10, 1)
"""
SIZE = 64


def python_with(module: str, variable: str) -> str:
    """Return the interpreter that has the module, named in `variable` or this one; skip without any."""
    python = os.environ.get(variable, sys.executable)
    tried = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True, timeout=1200)
    if tried.returncode:
        pytest.skip(f"{module} is not in {python}; name a Python that has it in {variable}")
    return python


@pytest.fixture(scope="session")
def tensorrt_python() -> str:
    return python_with("tensorrt", "DYNO_TENSORRT_PYTHON")


@pytest.fixture(scope="session")
def ortgpu_python() -> str:
    python = python_with("onnxruntime", "DYNO_ORTGPU_PYTHON")
    code = "import onnxruntime as o, sys; sys.exit('CUDAExecutionProvider' not in o.get_available_providers())"
    if subprocess.run([python, "-c", code], timeout=1200).returncode:
        pytest.skip("no onnxruntime with CUDA; name a Python that has it in DYNO_ORTGPU_PYTHON")
    return python


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("net") / "small.py"
    path.write_text(NET)
    return f"{path}:net"


@pytest.fixture(scope="session")
def onnx(dyno: Any, net: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ONNX file of the network with a free batch."""
    path = tmp_path_factory.mktemp("onnx") / "small.onnx"
    done = dyno("export", net, "-o", path, "--size", SIZE)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def trt(dyno: Any, tensorrt_python: str) -> Any:
    """Run the command line with TensorRT's Python."""

    def run(*words: object, timeout: float = 1200.0) -> Any:
        return dyno(*words, "--python", f"tensorrt={tensorrt_python}", timeout=timeout)

    return run


@pytest.fixture(scope="session")
def engine(trt: Any, onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dynamic FP16 engine for batches 1 to 8."""
    path = tmp_path_factory.mktemp("engine") / "small.engine"
    done = trt("export", onnx, "-o", path, "--precision", "fp16", "--min", 1, "--opt", 4, "--max", 8)
    assert done.returncode == 0, done.stderr
    return path
