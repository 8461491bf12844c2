"""The table of the critical path: shares, the rest in one row, and how the path is divided."""

from __future__ import annotations

import pytest

from dyno.layers import launching
from dyno.layers.launching import Path
from dyno.report.export import export
from dyno.worker.facts.job import Function

FUNCTIONS = (
    Function(name="outside of CUDA", where="host", time=60e-6, path=60e-6),
    Function(name="cudaLaunchKernel", where="CUDA call", calls=12, time=30e-6, path=28e-6),
    Function(name="conv", where="GPU", calls=3, time=40e-6, path=10e-6, waiting=5e-6),
    Function(name="relu", where="GPU", calls=2, time=4e-6, path=2e-6),
)


def test_shares_add_up_and_the_rest_is_one_row() -> None:
    found = launching.make_path_table({"PyTorch": Path(FUNCTIONS)}, 2)
    assert [row["function"] for row in found.rows] == ["outside of CUDA", "cudaLaunchKernel", "2 more functions"]
    assert sum(row["share"] for row in found.rows) == pytest.approx(100)
    assert found.rows[2]["time_us"] == pytest.approx(44)
    assert len(launching.make_path_table({"PyTorch": Path(FUNCTIONS)}, 0).rows) == 4
    assert len(launching.make_path_table({"PyTorch": Path(FUNCTIONS)}, 3).rows) == 4, "a row for one isn't worth it"


def test_words_and_cells() -> None:
    text = export([launching.make_path_table({"PyTorch": Path(FUNCTIONS), "other": Path(FUNCTIONS[:1])}, 0)])
    assert "PyTorch: the critical path is 60 % the host outside of CUDA, 28 % calls of CUDA, 12 % the GPU." in text
    assert "conv" in text and "\nother\n" in text


def test_what_watching_leaves_open_is_said() -> None:
    (divided,) = Path(FUNCTIONS, slowed=1.05, idle=0.2).sentences
    assert divided == "the critical path is 60 % the host outside of CUDA, 28 % calls of CUDA, 12 % the GPU"
    _, bounds = Path(FUNCTIONS, slowed=2.28, idle=0.132).sentences
    assert bounds.startswith("watching made the run 2.3 times as long: unwatched, the host with its calls has")
    assert "at least 13 % of the path" in bounds and bounds.endswith("at most 88 %")
