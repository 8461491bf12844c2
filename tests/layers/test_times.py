"""Layers' times as tables, and stored pairs of them: read back unchanged, or refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.layers import pairs, times
from dyno.layers.align import FormSet
from dyno.layers.times import LaunchTimes, Times
from dyno.report.export import export
from dyno.worker.facts.job import LAYERS, MODULES, NODES, Function
from made_layers import form, layer
from refusals import refuses

MODULE = form(MODULES, *(layer(name, "Conv2d", modules=(name,)) for name in "abc"), library="P")
GRAPH = form(NODES, *(layer(f"n{k}", "Conv", f"t{k}", f"t{k + 1}", modules=(n,)) for k, n in enumerate("abc")))
ENGINE = form(
    LAYERS, layer("reorder", "Reorder", moves=True), layer("fused", "Conv", nodes=("n0", "n1")),
    layer("x", "Conv", nodes=("n2",)), layer("gone", "Relu", skipped=True), library="E",
)  # fmt: skip
# The second repeat was interrupted in the first layer.
SECONDS = np.array([[1e-6, 2e-6, 5e-6], [90e-6, 2e-6, 5e-6], [1e-6, 2e-6, 5e-6]])


def test_layer_shares_add_up_and_the_rest_is_one_row() -> None:
    found = {0: Times(np.array([9e-6]), np.array([9e-6]), SECONDS)}
    first, rest = times.profile_table(FormSet([MODULE]), found, "time", 1).rows
    assert (first["modules"], first["time_us"], first["share"]) == ("c", pytest.approx(5), pytest.approx(62.5))
    assert (rest["modules"], rest["time_us"], rest["cumulative"]) == ("2 more layers", *map(pytest.approx, (3, 100)))
    assert first["time_us_low"] == first["time_us_high"] == pytest.approx(5) and np.isnan(rest["time_us_low"])
    rows = times.profile_table(FormSet([MODULE]), found, "graph", 2).rows
    assert [row["modules"] for row in rows] == ["b", "c", "1 more layer"]


def test_engine_layers_have_module_names() -> None:
    forms = [MODULE, ENGINE, GRAPH]
    assert times.name_modules(FormSet(forms, {1: 2}, {1: 0}), 1) == [[], ["a", "b"], ["c"], []]
    by_graph = times.name_modules(FormSet(forms, {1: 2}), 1)
    assert by_graph == [[], ["a", "b"], ["c"], []], "without the module: what the graph says"
    seconds = np.array([[1e-6, 6e-6, 3e-6, 0.0]])
    rows = times.profile_table(
        FormSet(forms, {1: 2}, {1: 0}), {1: Times(seconds[0], seconds[0], seconds)}, "time", 0
    ).rows
    assert [(row["layer"], row["remark"]) for row in rows] == [
        ("fused", ""), ("x", ""), ("reorder", "only changes type or layout"),
    ]  # fmt: skip


def test_the_remainder_is_negative_where_profiling_overhead_dominates() -> None:
    found = {0: Times(np.full(5, 6e-6), np.full(3, 12e-6), SECONDS)}
    (line,) = times.reconcile(FormSet([MODULE]), found).rows
    assert (line["unprofiled_ms"], line["layers_ms"]) == (pytest.approx(0.006), pytest.approx(0.008))
    assert line["remainder_ms"] == pytest.approx(-0.002) and line["profiled_ms"] == pytest.approx(0.012)


def test_a_shared_shape_node_does_not_name_a_layer() -> None:
    """An LSTM and a GRU share a node that gives the batch for their first states."""
    module = form(MODULES, *(layer(n, n, modules=(n,)) for n in ("lstm", "gru")))
    nodes = [layer(f"{name}_node", name, f"{read} s", name, modules=(name,))
             for name, read in (("lstm", "x"), ("gru", "lstm"))]  # fmt: skip
    engine = form(LAYERS, layer("L", "L", nodes=("batch", "lstm_node")), layer("G", "G", nodes=("gru_node",)))
    forms = [module, form(NODES, layer("batch", "Shape", "x", "s"), *nodes), engine]
    assert times.name_modules(FormSet(forms, {2: 1}, {2: 0}), 2) == [["lstm"], ["gru"]]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    times = Times(np.full(4, 3e-6), np.full(2, 4e-6), np.full((2, 1), 1e-6), ("a warning",), None)
    forms = tuple(form(NODES, layer("n", "Conv"), library=name) for name in "ab")
    sides = [pairs.PairSide(k, "fp32", (times,)) for k in range(2)]
    pairs.write_pair(tmp_path / "p.json", pairs.FormPair(forms, *sides))
    return tmp_path / "p.json"


@pytest.mark.parametrize(("name", "value"), [
    ("unprofiled", []), ("unprofiled", [[1]]), ("profiled", 5), ("profiled", [-1]), ("layers", [[1e308]]),
    ("layers", [[float("nan")]]),
])  # fmt: skip
def test_invalid_times_are_refused(stored: Path, name: str, value: Any) -> None:
    content = json.loads(stored.read_text())
    content["b"]["processes"][0][name] = value
    stored.write_text(json.dumps(content))
    refuses("is damaged", pairs.read_pair, stored)


NO_TIMES = np.empty(0)


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
def test_launch_bounds_are_judged_by_the_kernels(busy: float, sentence: str) -> None:
    assert seen(busy).sentence(1e-3) == sentence


def test_without_kernel_times_launch_bounds_are_judged_by_clocks() -> None:
    launched = LaunchTimes(np.array([1e-3]), np.array([0.95e-3]), NO_TIMES, NO_TIMES, NO_TIMES)
    assert launched.sentence(1e-3).startswith("launch-bound: run() returns after 950 µs")
    replayed = LaunchTimes(np.array([0.99e-3]), np.array([0.01e-3]), NO_TIMES, NO_TIMES, NO_TIMES)
    said = "not launch-bound: of 1.00 ms the GPU needs 990 µs from its first kernel to its last"
    assert replayed.sentence(1e-3) == said
    assert replayed.cells(1e-3) == {"queueing_ms": pytest.approx(0.01)}
    assert LaunchTimes(NO_TIMES, NO_TIMES, NO_TIMES, NO_TIMES, NO_TIMES).sentence(1e-3) == ""


def test_launch_times_are_read_from_the_arrays_of_a_job() -> None:
    assert times.read_launches({"unprofiled_model": np.ones(3), "layers": np.ones((3, 1))}) is None
    found = times.read_launches({"unprofiled_model_gpu": np.ones(3), "gpu_busy": np.ones(2)})
    assert found is not None and found.latency.size == 3 and found.busy.size == 2 and not found.enqueue.size


def test_launch_figures_and_notes_are_shown_with_the_latency() -> None:
    one = form(LAYERS, layer("a", ""), library="E")
    each = Times(np.full(5, 1e-3), np.full(5, 2e-3), np.full((5, 1), 0.4e-3), gpu=seen(0.4e-3))
    table = times.reconcile(FormSet([one, one]), {0: each, 1: Times(*(np.full(5, 1e-3),) * 2, np.full((5, 1), 1e-3))})
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


def test_path_shares_add_up_and_the_rest_is_one_row() -> None:
    found, *others = (times.make_path_table({"PyTorch": times.Path(FUNCTIONS)}, top) for top in (2, 0, 3))
    assert [row["function"] for row in found.rows] == ["outside of CUDA", "cudaLaunchKernel", "2 more functions"]
    assert sum(row["share"] for row in found.rows) == pytest.approx(100)
    assert found.rows[2]["time_us"] == pytest.approx(44)
    assert [len(table.rows) for table in others] == [4, 4], "all, and a row for one isn't worth it"


def test_the_critical_path_has_a_sentence_and_cells() -> None:
    text = export([times.make_path_table({"PyTorch": times.Path(FUNCTIONS), "other": times.Path(FUNCTIONS[:1])}, 0)])
    assert "PyTorch: the critical path is 60 % the host outside of CUDA, 28 % calls of CUDA, 12 % the GPU." in text
    assert "conv" in text and "\nother\n" in text


def test_limits_due_to_profiling_overhead_are_reported() -> None:
    (divided,) = times.Path(FUNCTIONS, slowed=1.05, idle=0.2).sentences
    assert divided == "the critical path is 60 % the host outside of CUDA, 28 % calls of CUDA, 12 % the GPU"
    _, bounds = times.Path(FUNCTIONS, slowed=2.28, idle=0.132).sentences
    assert bounds.startswith("watching made the run 2.3 times as long: unwatched, the host with its calls has")
    assert "at least 13 % of the path" in bounds and bounds.endswith("at most 88 %")


def test_layer_types_are_shown_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without module names the type identifies a row; the cumulative share is the first column to go."""
    monkeypatch.setenv("COLUMNS", "80")
    fused = form(
        NODES, *(layer("", "FusedConv and its activation", modules=("a", "(model)")) for _ in "abc"), library="E"
    )
    text = export([times.profile_table(FormSet([fused]), {0: Times(SECONDS[0], SECONDS[0], SECONDS)}, "time", 0)])
    assert "FusedConv" in text and "time, µs" in text and text.splitlines()[2].count("cumulative, %") == 0
