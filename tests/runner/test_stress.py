"""`dyno stress` on a real dynamic file, by the command line."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    folder, nn = tmp_path_factory.mktemp("stress"), torch.nn
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    names: dict[str, Any] = {"input_names": ["input"], "output_names": ["output"], "dynamo": False}
    free = {"input": {0: "batch"}, "output": {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.zeros(2, 3, 16, 16),), folder / "small.onnx", dynamic_axes=free, **names)
        torch.onnx.export(net, (torch.zeros(2, 3, 16, 16),), folder / "fixed.onnx", **names)
    return folder / "small.onnx"


@pytest.mark.slow
def test_every_output_right(dyno: Any, onnx: Path, tmp_path: Path) -> None:
    words = ("--batches", "1,4,random", "--iterations", 50, "--size", 16, "--threads", 1)
    done = dyno("stress", onnx, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every output right") == 3 and " 1-4 " in done.stdout


@pytest.mark.slow
def test_a_test_that_can_t_be_done(dyno: Any, onnx: Path, tmp_path: Path) -> None:
    nothing = dyno("stress", onnx, "--batches", "min,opt", "--size", 16, cwd=tmp_path)
    assert nothing.returncode == 3 and "give numbers such as --batches 1,8,random" in " ".join(nothing.stdout.split())
    fixed = dyno("stress", onnx.with_name("fixed.onnx"), "--batches", "2,3", "--size", 16, cwd=tmp_path)
    assert fixed.returncode == 2 and "takes only batch 2" in fixed.stderr  # before anything runs


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--batches", "some"), "--batches takes min, opt, max, random and numbers of at least 1, not some"),
        (("--batches", ","), "not nothing"),
        (("--rounds", "4"), "no such option: --rounds"),
        (("--batches", "2", "--iterations", "0"), "--iterations is 0; it must be at least 1"),
    ],
)
def test_nonsense_is_one_line(dyno: Any, tmp_path: Path, words: tuple[str, ...], line: str) -> None:
    done = dyno("stress", "fake:net", *words, cwd=tmp_path)
    assert done.returncode == 2 and line in done.stderr and "Traceback" not in done.stderr
