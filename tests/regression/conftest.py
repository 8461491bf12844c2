"""Tiny networks that differ only in speed, and fixtures for their surroundings."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import onnx_text

SLOW = """
import onnxruntime

class Slow(onnxruntime.InferenceSession):
    def run_with_iobinding(self, *given, **how):
        for _ in range(10):
            super().run_with_iobinding(*given, **how)

onnxruntime.InferenceSession = Slow
"""


@pytest.fixture
def chain() -> Callable[..., Path]:
    """Factory `chain(path, length)`: `length` products with a self-inverse matrix, so all even lengths agree."""
    pytest.importorskip("onnx")

    def write(path: Path, length: int, width: int = 64) -> Path:
        text = " ".join(f"x{k + 1} = MatMul(x{k}, swap)" for k in range(length))
        ends = [f"(float[batch, 3, {width}, {width}] {name})" for name in ("x0", f"x{length}")]
        path.parent.mkdir(parents=True, exist_ok=True)
        swap = np.eye(width, dtype=np.float32)[::-1].copy()
        return onnx_text.write(path, f"{ends[0]} => {ends[1]} {{ {text} }}", swap=swap)

    return write


@pytest.fixture
def git() -> Callable[[Path], None]:
    """Make a folder a repository with one commit of all its files."""

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
    """This Python with ONNX Runtime sessions that run ten times as long."""
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SLOW)
    return script(folder / "python", f'PYTHONPATH="{folder}" exec "{sys.executable}" "$@"')
