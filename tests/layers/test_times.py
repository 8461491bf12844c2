"""Layers' times as tables, and stored pairs of them: read back as they were, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.layers import pairs, times
from dyno.layers.times import Times
from dyno.worker.facts.job import LAYERS, MODULES, NODES, Layer, LayerGraph, Port
from dyno.worker.spec import UserError

MODULE = LayerGraph(
    form=MODULES,
    library="P",
    layers=tuple(Layer(name=name, type="Conv2d", modules=(name,)) for name in ("a", "b", "c")),
)
GRAPH = LayerGraph(
    form=NODES,
    library="O",
    layers=tuple(
        Layer(name=f"n{k}", type="Conv", inputs=(Port(f"t{k}"),), outputs=(Port(f"t{k + 1}"),), modules=(name,))
        for k, name in enumerate(("a", "b", "c"))
    ),
)
ENGINE = LayerGraph(
    form=LAYERS,
    library="E",
    layers=(
        Layer(name="reorder", type="Reorder", moves=True),
        Layer(name="fused", type="Conv", nodes=("n0", "n1")),
        Layer(name="x", type="Conv", nodes=("n2",)),
        Layer(name="gone", type="Relu", skipped=True),
    ),
)
# The second repeat was interrupted in the first layer.
SECONDS = np.array([[1e-6, 2e-6, 5e-6], [90e-6, 2e-6, 5e-6], [1e-6, 2e-6, 5e-6]])


def test_shares_of_medians_add_up_and_the_rest_is_one_row() -> None:
    found = {0: Times(np.array([9e-6]), np.array([9e-6]), SECONDS)}
    first, rest = times.profile_table([MODULE], {}, {}, found, "time", 1).rows
    assert (first["modules"], first["time_us"], first["share"]) == ("c", pytest.approx(5), pytest.approx(62.5))
    assert (rest["modules"], rest["time_us"], rest["cumulative"]) == (
        "2 more layers",
        pytest.approx(3),
        pytest.approx(100),
    )
    assert first["time_us_low"] == first["time_us_high"] == pytest.approx(5) and np.isnan(rest["time_us_low"])
    rows = times.profile_table([MODULE], {}, {}, found, "graph", 2).rows
    assert [row["modules"] for row in rows] == ["b", "c", "1 more layer"]


def test_an_engine_s_layers_have_the_modules_names() -> None:
    forms = [MODULE, ENGINE, GRAPH]
    assert times.modules_of(forms, 1, 2, 0) == [[], ["a", "b"], ["c"], []]
    assert times.modules_of(forms, 1, 2, None) == [[], ["a", "b"], ["c"], []]  # without the module: what the graph says
    seconds = np.array([[1e-6, 6e-6, 3e-6, 0.0]])
    rows = times.profile_table(forms, {1: 2}, {1: 0}, {1: Times(seconds[0], seconds[0], seconds)}, "time", 0).rows
    assert [(row["layer"], row["remark"]) for row in rows] == [
        ("fused", ""), ("x", ""), ("reorder", "only changes type or layout"),
    ]  # fmt: skip


def test_the_remainder_is_negative_where_watching_costs_more() -> None:
    found = {0: Times(np.full(5, 6e-6), np.full(3, 12e-6), SECONDS)}
    (line,) = times.reconcile([MODULE], found).rows
    assert (line["unprofiled_ms"], line["layers_ms"]) == (pytest.approx(0.006), pytest.approx(0.008))
    assert line["remainder_ms"] == pytest.approx(-0.002) and line["profiled_ms"] == pytest.approx(0.012)


def test_a_layer_is_not_named_after_who_shares_what_shapes_decide_with_it() -> None:
    """An LSTM and a GRU both ask one node for the batch, to make their first states."""
    module = LayerGraph(form=MODULES, layers=tuple(Layer(name=n, type=n, modules=(n,)) for n in ("lstm", "gru")))
    nodes = [Layer(name="batch", type="Shape", inputs=(Port("x"),), outputs=(Port("s"),))] + [
        Layer(name=f"{name}_node", type=name, inputs=(Port(read), Port("s")), outputs=(Port(name),), modules=(name,))
        for name, read in (("lstm", "x"), ("gru", "lstm"))
    ]
    engine = [Layer(name="L", type="L", nodes=("batch", "lstm_node")), Layer(name="G", type="G", nodes=("gru_node",))]
    forms = [module, LayerGraph(form=NODES, layers=tuple(nodes)), LayerGraph(form=LAYERS, layers=tuple(engine))]
    assert times.modules_of(forms, 2, 1, 0) == [["lstm"], ["gru"]]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    times = Times(np.full(4, 3e-6), np.full(2, 4e-6), np.full((2, 1), 1e-6), ("a warning",), None)
    forms = tuple(LayerGraph(form="nodes", library=name, layers=(Layer(name="n", type="Conv"),)) for name in "ab")
    pairs.write_pair(
        tmp_path / "p.json",
        pairs.FormPair(forms, pairs.PairSide(0, "fp32", (times,)), pairs.PairSide(1, "fp32", (times,))),
    )
    return tmp_path / "p.json"


def test_a_pair_is_read_back(stored: Path) -> None:
    found = pairs.read_pair(stored)
    assert found.titles == ("a", "b") and found.a.processes[0].layers.tolist() == [[1e-6], [1e-6]]


NONE = [
    ("unprofiled", []), ("unprofiled", [[1]]), ("profiled", 5), ("profiled", [-1]), ("layers", [[1e308]]),
    ("layers", [[float("nan")]]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NONE)
def test_times_that_are_none_are_refused(stored: Path, name: str, value: Any) -> None:
    content = json.loads(stored.read_text())
    content["b"]["processes"][0][name] = value
    stored.write_text(json.dumps(content))
    with pytest.raises(UserError, match="is damaged"):
        pairs.read_pair(stored)
