"""Layers under measured ceilings; operations and bytes counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dyno.layers import files, times
from dyno.layers.align import FormSet
from dyno.layers.roofline import (
    Ceilings,
    LayerWork,
    Rates,
    RooflineRating,
    list_roofline_notes,
    list_types,
    parse_data_sheet,
    rate_layers,
)
from dyno.layers.times import Times
from dyno.worker.facts.job import LAYERS, MODULES, NODES, CopyRate, Layer, LayerGraph, PeakOfType, Port
from made_layers import form
from refusals import refuses

# 1 TFLOPS, and 100 GB/s: the ridge is at 10 operations per byte.
CEILINGS = Ceilings(
    {"fp32": PeakOfType(1e12, 1024), "fp16": PeakOfType(missing="no kernel")}, CopyRate(1e11, 10**8, cache=1000)
)
RATES = CEILINGS.rates


def port(name: str, count: int, dtype: str = "float32") -> Port:
    return Port(name, (1, count), dtype)


GRAPH = LayerGraph(form=NODES, library="O", layers=(
    Layer(name="n0", type="Conv", inputs=(port("x", 10),), outputs=(port("a", 100),), flops=8_000_000),
    Layer(name="n1", type="Relu", inputs=(port("a", 100),), outputs=(port("b", 100),), flops=0),
    Layer(name="n2", type="MatMul", inputs=(port("b", 100),), outputs=(port("y", 5),), flops=1000),
))  # fmt: skip


FUSED = Layer(name="f", type="Convolution", inputs=(port("x", 10),), outputs=(port("b", 100),), parameters=40,
              computes_in="float32", nodes=("n0", "n1"))  # fmt: skip
LAST = Layer(name="l", type="FullyConnected", inputs=(Port("b"),), outputs=(port("y", 5),), parameters=500,
             computes_in="float32", nodes=("n2",))  # fmt: skip
MOVE = Layer(name="m", type="Reorder", inputs=(port("y", 5),), outputs=(port("z", 5),), moves=True)
ENGINE = FormSet([form(LAYERS, FUSED, LAST, MOVE), GRAPH], {0: 1})
EACH = Times(np.full(3, 20e-6), np.full(3, 30e-6), np.tile([16e-6, 1e-6, 0.5e-6], (3, 1)), precision="fp32",
             backend="openvino")  # fmt: skip


def test_engine_layers_have_the_flops_of_their_nodes_and_each_byte_once() -> None:
    found = rate_layers(ENGINE, 0, "fp32", CEILINGS)
    assert found.work == [
        LayerWork(8_000_000, 4 * (10 + 100 + 40), "fp32"),
        LayerWork(1000, 4 * (100 + 5 + 500), "fp32"),  # the shape of `b` comes from the layer that writes it
        LayerWork(0, 4 * (5 + 5), ""),
    ]
    assert found.flops == 8_001_000


def test_the_more_limiting_ceiling_decides() -> None:
    arithmetic, memory, move = rate_layers(ENGINE, 0, "fp32", CEILINGS).work
    assert arithmetic.find_least(RATES) == (pytest.approx(8e-6), "arithmetic")
    assert memory.find_least(RATES) == (pytest.approx(2420 / 1e11), "memory")
    assert move.find_least(RATES) == (pytest.approx(40 / 1e11), "memory")
    assert LayerWork(10, 10, "fp16").find_least(RATES) is None, "a type without a ceiling"
    assert LayerWork(None, 10).find_least(RATES) is None and LayerWork(0, None).find_least(RATES) is None


def test_flops_of_layers_without_a_type_are_unrated() -> None:
    attention = Layer(name="s", type="Subgraph", outputs=(port("y", 5),), nodes=("n2",))
    idle = Layer(name="i", type="MatMul", outputs=(port("q", 5),), computes_in="float32", nodes=("elsewhere",))
    found = rate_layers(FormSet([form(LAYERS, FUSED, attention, idle), GRAPH], {0: 1}), 0, "fp32", CEILINGS)
    assert [work.flops for work in found.work] == [8_000_000, None, None]
    both = found.make_cells([0, 1], 1e-3)
    assert "tflops" not in both and both["reached"] == pytest.approx(100 * 8e-6 / 1e-3), "what is known is the least"
    assert "reached" not in found.make_cells([1], 1e-3)
    assert found.sentence([8e-6, 1e-6, 1e-6]).endswith(", 20 % in layers whose bound isn't known")
    assert found.of_latency([0, 1, 2], 1e-3)["tflops"] == pytest.approx(8_001_000 / 1e-3 / 1e12)


def test_modules_compute_in_their_output_type_and_tf32_has_its_own_ceiling() -> None:
    module = form(
        MODULES, Layer(name="a", type="Linear", outputs=(port("0:0", 4, "float16"),), parameters=8, flops=16),
        Layer(name="b", type="Linear", inputs=(port("0:0", 4, "float16"),), outputs=(port("1:0", 4),), flops=16),
        Layer(type="Net", flops=0),
    )  # fmt: skip
    work = rate_layers(FormSet([module]), 0, "tf32", CEILINGS).work
    assert work == [LayerWork(16, 2 * (4 + 8), "fp16"), LayerWork(16, 8 + 16, "tf32"), LayerWork(0, None, "")]
    assert list_types(module, "tf32") == {"fp16", "tf32"}


def test_rows_and_the_rest_show_their_share_of_the_roof() -> None:
    first, rest = times.profile_table(ENGINE, {0: EACH}, "time", 1, CEILINGS).rows
    assert (first["tflops"], first["intensity"]) == (pytest.approx(0.5), pytest.approx(8e6 / 600))
    assert (first["reached"], first["bound"]) == (pytest.approx(50), "arithmetic")
    assert first["gb_s"] == pytest.approx(600 / 16e-6 / 1e9)
    assert rest["reached"] == pytest.approx(100 * (2420 + 40) / 1e11 / 1.5e-6) and rest["bound"] == "neither"
    (line,) = times.reconcile(ENGINE, {0: EACH}, CEILINGS).rows
    least = 8e-6 + (2420 + 40) / 1e11
    assert line["roof_ms"] == pytest.approx(1e3 * least) and line["reached"] == pytest.approx(100 * least / 20e-6)
    assert line["tflops"] == pytest.approx(8_001_000 / 20e-6 / 1e12)
    without = times.profile_table(ENGINE, {0: EACH}, "time", 1)
    assert "tflops" not in without.rows[0] and "tflops" not in [c.name for c in without.columns]


def test_the_ceilings_table_reports_disturbances() -> None:
    table = replace(CEILINGS, warnings=("peak: others were busy",)).table()
    assert [row["ceiling"] for row in table.rows] == [
        "matrix product, fp32", "matrix product, fp16", "copy, read and written",
    ]  # fmt: skip
    assert table.rows[1]["remark"] == "no kernel" and table.rows[2]["gb_s"] == pytest.approx(100)
    assert table.notes[-1] == "peak: others were busy"


def test_the_chart_has_multiplying_layers_under_a_roof_per_type() -> None:
    figure = files.draw_roofline(ENGINE, {0: EACH}, CEILINGS)
    assert figure is not None
    (axes,) = figure.axes
    ((points,), (roof,)) = axes.collections, axes.lines
    assert points.get_offsets().data == pytest.approx(np.array([[8e6 / 600, 0.5], [1000 / 2420, 1e-3]]))
    x, y = roof.get_data()
    assert y == pytest.approx(np.minimum(x * 0.1, 1.0))
    moving = {0: Times(*(np.ones(3),) * 2, np.ones((3, 1)))}
    assert files.draw_roofline(FormSet([form(LAYERS, MOVE), GRAPH], {0: 1}), moving, CEILINGS) is None


def test_layers_are_bound_by_arithmetic_memory_or_neither() -> None:
    one = RooflineRating([LayerWork(8_000_000, 600, "fp32"), LayerWork(0, 10**6), LayerWork(0, None)], CEILINGS)
    assert [one.make_cells([0], t)["bound"] for t in (16e-6, 17e-6)] == ["arithmetic", "neither"]
    assert [one.make_cells([1], t)["bound"] for t in (20e-6, 21e-6)] == ["memory", "neither"]
    assert "bound" not in one.make_cells([2], 1e-6)
    assert one.sentence([16e-6, 40e-6, 4e-6, 0][:3]) == (
        "27 % of the time in layers bound by arithmetic, 0 % bound by memory, 67 % bound by neither, 7 % in layers "
        "whose bound isn't known"
    )
    assert one.sentence([]) == ""


def test_rates_above_the_roof_are_explained() -> None:
    one = RooflineRating([LayerWork(8_000_000, 600, "fp32"), LayerWork(0, 1000), LayerWork(0, 1001)], CEILINGS)
    rows = [
        one.make_cells([0], 8.1e-6),
        one.make_cells([0], 7e-6),
        one.make_cells([1], 9e-9),
        one.make_cells([2], 9e-9),
    ]
    words = ["", "fewer operations, or a better kernel", "may be in the cache", "faster than the copy"]
    assert [row["above"] for row in rows] == words
    assert rows[2]["reached"] == pytest.approx(100 * 10 / 9), "not clipped"
    assert [note.split(":")[0] for note in list_roofline_notes(rows)[1:]] == [
        f"Above the roof, {word}" for word in words[1:]
    ]
    disturbed = replace(one, ceilings=replace(CEILINGS, warnings=("others were busy",)))
    assert disturbed.make_cells([1], 9e-9)["above"] == "ceilings disturbed"


def test_data_sheet_rates_are_shown_with_measured_ones() -> None:
    sheet = parse_data_sheet(["fp32=2", "memory=400"])
    assert sheet == Rates({"fp32": 2e12}, 4e11)
    beside = replace(CEILINGS, sheet=sheet, clocks={"fp32": 1500.0, "memory": 1400.0})
    rows = {row["ceiling"]: row for row in beside.table().rows}
    shown = [rows[name] for name in ("matrix product, fp32", "copy, read and written")]
    assert [(r["sheet"], r["of_sheet"], r["clock"]) for r in shown] == [(2, 50, 1500), (400, 25, 1400)]
    one = RooflineRating([LayerWork(8_000_000, 600, "fp32")], beside, 8_000_000)
    assert one.make_cells([0], 16e-6)["of_sheet"] == pytest.approx(25)
    assert one.of_latency([0], 32e-6)["of_sheet"] == pytest.approx(12.5)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["fp64=1"], "unknown ceiling 'fp64'; give one of fp32, tf32, fp16, bf16, int8, memory"),
        (["fp32"], "give fp32 as a number of TFLOPS, such as fp32=100"),
        (["memory=-3"], "give memory as a number of GB/s"),
        (["fp32=nan"], "give fp32 as a number"),
        (["fp32=1", "fp32=2"], "fp32 twice"),
    ],
)
def test_invalid_data_sheets_are_refused(texts: list[str], said: str) -> None:
    refuses(said, parse_data_sheet, texts)
