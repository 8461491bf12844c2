"""Tiny networks that differ in speed alone, and what they lie in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SLOW = """
import onnxruntime

class Slow(onnxruntime.InferenceSession):
    def run_with_iobinding(self, *given, **how):
        for _ in range(3):
            super().run_with_iobinding(*given, **how)

onnxruntime.InferenceSession = Slow
"""


@pytest.fixture
def chain() -> Callable[..., Path]:
    """`chain(path, length)`: as many products with a matrix that is its own inverse: all even lengths agree."""
    onnx = pytest.importorskip("onnx")

    def write(path: Path, length: int, width: int = 64) -> Path:
        import numpy as np

        swap = np.eye(width, dtype=np.float32)[::-1].copy()
        nodes = [onnx.helper.make_node("MatMul", [f"x{k}", "swap"], [f"x{k + 1}"]) for k in range(length)]
        shape = ["batch", 3, width, width]
        ends = [
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in ("x0", f"x{length}")
        ]
        graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], [onnx.numpy_helper.from_array(swap, "swap")])
        path.parent.mkdir(parents=True, exist_ok=True)
        opset = [onnx.helper.make_opsetid("", 17)]
        onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)
        return path

    return write


@pytest.fixture
def git() -> Callable[[Path], None]:
    """Make a repository of a folder, with one commit of all that lies there."""

    def commit(folder: Path) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        for words in (["init", "-q"], ["add", "-A"], [*names, "commit", "-qm", "first"]):
            subprocess.run(["git", *words], cwd=folder, check=True)

    return commit


@pytest.fixture
def script() -> Callable[[Path, str], Path]:
    """Write an executable shell script."""

    def write(path: Path, line: str) -> Path:
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def slow_python(tmp_path: Path, script: Callable[[Path, str], Path]) -> Path:
    """This Python, in which ONNX Runtime's sessions run three times as long."""
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SLOW)
    return script(folder / "python", f'PYTHONPATH="{folder}" exec "{sys.executable}" "$@"')
