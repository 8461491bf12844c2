"""Whether a GPU worked or waited for the host, in words and figures."""

from __future__ import annotations

import numpy as np
import pytest

from dyno.layers import launching, times
from dyno.layers.launching import LaunchTimes
from dyno.layers.times import Times
from dyno.worker.facts.job import LAYERS, Layer, LayerGraph

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
    assert launching.of_samples({"unprofiled_model": np.ones(3), "layers": np.ones((3, 1))}) is None
    found = launching.of_samples({"unprofiled_model_gpu": np.ones(3), "gpu_busy": np.ones(2)})
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
