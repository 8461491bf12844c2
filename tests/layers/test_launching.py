"""Whether a GPU worked or waited for the host, in words and figures, and the table of the critical path."""

from __future__ import annotations

import numpy as np
import pytest

from dyno.layers import times
from dyno.layers.times import LaunchTimes, Path, Times
from dyno.report.export import export
from dyno.worker.facts.job import LAYERS, Function, Layer, LayerGraph

NONE = np.empty(0)


def seen(busy: float) -> LaunchTimes:
    return LaunchTimes(np.array([0.9e-3]), np.array([0.8e-3]), np.full(5, busy), np.full(5, 0.3e-3), np.full(5, 61))


@pytest.mark.parametrize(
    ("busy", "sentence"),
    [
        (0.4e-3, "launch-bound: the GPU ran no kernel in 60 % of the latency; it waits for the host "
                 "between 61 kernels"),
        (0.7e-3, "launch-bound in part: the GPU ran no kernel in 30 % of the latency"),
        (0.9e-3, "compute-bound: the GPU ran kernels in 90 % of the latency"),
        (1.1e-3, "compute-bound: the GPU ran kernels in 100 % of the latency"),
    ],
)  # fmt: skip
def test_by_the_kernels(busy: float, sentence: str) -> None:
    assert seen(busy).sentence(1e-3) == sentence


def test_by_the_clocks_where_nobody_saw_the_kernels() -> None:
    launched = LaunchTimes(np.array([1e-3]), np.array([0.95e-3]), NONE, NONE, NONE)
    assert launched.sentence(1e-3).startswith("launch-bound: run() returns after 950 µs")
    replayed = LaunchTimes(np.array([0.99e-3]), np.array([0.01e-3]), NONE, NONE, NONE)
    assert replayed.sentence(1e-3) == (
        "not launch-bound: of 1.00 ms the GPU needs 990 µs from its first kernel to its last"
    )
    assert replayed.cells(1e-3) == {"queueing_ms": pytest.approx(0.01)}
    assert LaunchTimes(NONE, NONE, NONE, NONE, NONE).sentence(1e-3) == ""


def test_the_arrays_of_a_job() -> None:
    assert times.of_samples({"unprofiled_model": np.ones(3), "layers": np.ones((3, 1))}) is None
    found = times.of_samples({"unprofiled_model_gpu": np.ones(3), "gpu_busy": np.ones(2)})
    assert found is not None and found.latency.size == 3 and found.busy.size == 2 and not found.enqueue.size


def test_figures_and_words_stand_beside_the_latency() -> None:
    form = LayerGraph(form=LAYERS, library="E", layers=(Layer(name="a"),))
    each = Times(np.full(5, 1e-3), np.full(5, 2e-3), np.full((5, 1), 0.4e-3), gpu=seen(0.4e-3))
    table = times.reconcile([form, form], {0: each, 1: Times(*(np.full(5, 1e-3),) * 2, np.full((5, 1), 1e-3))})
    on_gpu, on_cpu = table.rows
    assert (on_gpu["idle"], on_gpu["kernels"]) == (pytest.approx(60), 61)
    assert [on_gpu[name] for name in ("queueing_ms", "busy_ms", "calls_ms")] == pytest.approx([0.8, 0.4, 0.3])
    assert "idle" not in on_cpu and len(table.notes) == 2
    assert table.notes[1].startswith("E: launch-bound: the GPU ran no kernel in 60 % of the latency")


FUNCTIONS = (
    Function(name="outside of CUDA", where="host", time=60e-6, path=60e-6),
    Function(name="cudaLaunchKernel", where="CUDA call", calls=12, time=30e-6, path=28e-6),
    Function(name="conv", where="GPU", calls=3, time=40e-6, path=10e-6, waiting=5e-6),
    Function(name="relu", where="GPU", calls=2, time=4e-6, path=2e-6),
)


def test_shares_add_up_and_the_rest_is_one_row() -> None:
    found = times.make_path_table({"PyTorch": Path(FUNCTIONS)}, 2)
    assert [row["function"] for row in found.rows] == ["outside of CUDA", "cudaLaunchKernel", "2 more functions"]
    assert sum(row["share"] for row in found.rows) == pytest.approx(100)
    assert found.rows[2]["time_us"] == pytest.approx(44)
    assert len(times.make_path_table({"PyTorch": Path(FUNCTIONS)}, 0).rows) == 4
    assert len(times.make_path_table({"PyTorch": Path(FUNCTIONS)}, 3).rows) == 4, "a row for one isn't worth it"


def test_words_and_cells() -> None:
    text = export([times.make_path_table({"PyTorch": Path(FUNCTIONS), "other": Path(FUNCTIONS[:1])}, 0)])
    assert "PyTorch: the critical path is 60 % the host outside of CUDA, 28 % calls of CUDA, 12 % the GPU." in text
    assert "conv" in text and "\nother\n" in text


def test_what_watching_leaves_open_is_said() -> None:
    (divided,) = Path(FUNCTIONS, slowed=1.05, idle=0.2).sentences
    assert divided == "the critical path is 60 % the host outside of CUDA, 28 % calls of CUDA, 12 % the GPU"
    _, bounds = Path(FUNCTIONS, slowed=2.28, idle=0.132).sentences
    assert bounds.startswith("watching made the run 2.3 times as long: unwatched, the host with its calls has")
    assert "at least 13 % of the path" in bounds and bounds.endswith("at most 88 %")
