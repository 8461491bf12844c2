"""The waterfall from A to B on made-up layers: every cause by name, closing steps, and unclaimed differences."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import made_layers
from dyno.layers import causes, cures, pairs, reasons, waterfall
from dyno.layers.cures import PRESCRIPTIONS, IndicatedPrescription, Outcome, Prescription
from dyno.layers.pairs import FormPair, PairSide
from dyno.layers.times import LaunchTimes, Times
from dyno.layers.waterfall import Waterfall
from dyno.report.export import export
from dyno.results.stats import FASTER, UNDECIDED, Speedup
from dyno.worker import registry
from dyno.worker.facts.job import LAYERS, MODULES, NODES, Layer, Port
from made_layers import form
from refusals import refuses

NAMES = ("conv", "bn", "relu", "pool", "fc")
FLOAT, BYTE = "float32", "int8"


def layer(name: str, k: int, kind: str, dtype: str = FLOAT, **more: Any) -> Layer:
    return made_layers.layer(name, kind, f"t{k}", f"t{k + 1}", dtype, **more)


KINDS = ("Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Linear")
MODULE = form(
    MODULES, *(layer(name, k, kind, modules=(name,), flops=100 * (kind in ("Conv2d", "Linear")))
               for k, (name, kind) in enumerate(zip(NAMES, KINDS, strict=True))),
    Layer(type="Net", modules=("",)), library="PyTorch 2.0",
)  # fmt: skip
GRAPH = form(NODES, *(layer(f"n_{name}", k, "Node", modules=(name,)) for k, name in enumerate(NAMES)))
POOL = layer("n_pool", 3, "MaxPool", nodes=("n_pool",))
FC = layer("n_fc", 4, "Gemm", computes_in=FLOAT, nodes=("n_fc",))
FAST = form(
    LAYERS, layer("fused", 0, "Conv", computes_in=FLOAT, nodes=("n_conv", "n_bn", "n_relu")),
    layer("ReorderOutput_token_7", 10, "ReorderOutput", moves=True), POOL, FC, library="ONNX Runtime 1.0",
)  # fmt: skip
INT8 = form(
    LAYERS, layer("fused", 0, "QConv", BYTE, computes_in=BYTE, nodes=("n_conv", "n_bn", "n_relu")), POOL, FC,
    layer("dq", 20, "DequantizeLinear"), library="ONNX Runtime 1.0 int8",
)  # fmt: skip
SLOW_US = (100.0, 20, 10, 50, 30, 5)
FAST_US = (60.0, 8, 5, 30)
INT8_US = (20.0, 5, 31, 40)


def times(each_us: tuple[float, ...], latency_us: float, seed: int, noise: float = 0.01) -> Times:
    """Return twenty repeats with the given time per layer plus noise."""
    rng = np.random.default_rng(seed)
    layers = 1e-6 * np.array(each_us) * (1 + noise * rng.standard_normal((20, len(each_us))))
    return Times(1e-6 * latency_us * (1 + noise * rng.standard_normal(50)), layers.sum(axis=1), layers)


def side(
    form: int, each_us: tuple[float, ...], latency_us: float, rounds: int = 5, precision: str = "fp32"
) -> PairSide:
    found = tuple(times(each_us, latency_us, seed) for seed in range(10 * form, 10 * form + rounds))
    return PairSide(form, precision, found, graph=None if form == 0 else 1)


def pair(latency_a: float = 220, latency_b: float = 108, rounds: int = 5) -> FormPair:
    a, b = side(0, SLOW_US, latency_a, rounds), side(2, FAST_US, latency_b, rounds)
    return FormPair((MODULE, GRAPH, FAST), a, b, "net")


def to_int8(*, quicker: float = 20) -> FormPair:
    a, b = side(0, FAST_US, 105), side(2, (quicker, *INT8_US[1:]), quicker + 80, precision="int8")
    return FormPair((FAST, GRAPH, INT8), replace(a, graph=1), b, "net")


def by_key(found: Waterfall) -> dict[str, waterfall.WaterfallStep]:
    return {step.cause.key: step for step in found.causes}


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize(("latency_a", "latency_b"), [(220, 108), (180, 80), (215, 300)])
def test_steps_sum_to_the_gap(latency_a: float, latency_b: float, rounds: int) -> None:
    found = waterfall.make_waterfall(pair(latency_a, latency_b, rounds))
    for steps in (found.steps, found.causes):
        assert sum(s.a for s in steps) == pytest.approx(found.gap.a, rel=1e-12)
        assert sum(s.b for s in steps) == pytest.approx(found.gap.b, rel=1e-12)
        assert sum(s.difference.value for s in steps) == pytest.approx(found.gap.difference.value, rel=1e-12)
    kept = [k for k in range(rounds) if k not in found.left_out]
    medians = [np.median([np.median(s.processes[k].unprofiled) for k in kept]) for s in found.pair.sides]
    assert [found.gap.a, found.gap.b] == pytest.approx(medians)
    assert all(s.difference.low <= s.difference.value <= s.difference.high for s in found.causes)


def test_rounds_are_paired_and_disturbed_ones_left_out() -> None:
    def shift(side: PairSide, shifts_us: list[float]) -> PairSide:
        moved = zip(side.processes, shifts_us, strict=True)
        return replace(side, processes=tuple(replace(t, unprofiled=t.unprofiled + 1e-6 * us) for t, us in moved))

    together = [0.0, 60, 10, 35, 20]  # added by the machine to both processes of a round
    found = waterfall.make_waterfall(replace(pair(), a=shift(pair().a, together), b=shift(pair().b, together)))
    assert 1e6 * found.gap.difference.low > -116 and 1e6 * found.gap.difference.high < -108 and not found.left_out
    hit = waterfall.make_waterfall(replace(pair(), b=shift(pair().b, [0.0, 0, 9000, 0, 0])))
    assert hit.left_out == (2,) and hit.gap.proven
    assert (1e6 * hit.gap.a, 1e6 * hit.gap.b) == pytest.approx((220, 108), rel=0.01)
    assert reasons.list_reasons_why(hit)[0].text.endswith("1 of 5 rounds left out: other programs disturbed them.")


def test_each_part_has_its_cause() -> None:
    found = waterfall.make_waterfall(pair())
    assert [(part.cause.key, part.names) for part in found.parts] == [
        ("kernel", ("conv",)), ("fused", ("bn", "relu")), ("conversion", ("ReorderOutput_token_7",)),
        ("kernel", ("pool",)), ("kernel", ("fc",)), ("calls", ("(model)",)),
    ]  # fmt: skip
    steps = by_key(found)
    assert 1e6 * steps["fused"].difference.value == pytest.approx(-30, rel=0.02)
    assert 1e6 * steps["conversion"].difference.value == pytest.approx(8, rel=0.02)
    assert 1e6 * steps["kernel"].difference.value == pytest.approx(95 - 180, rel=0.02)
    assert 1e6 * (steps["between"].b + steps["interrupted"].b) == pytest.approx(5, abs=1)
    assert found.named_share == pytest.approx(1, abs=0.03) and found.attributed == pytest.approx(
        found.named_share, abs=0.06
    )


def test_types_decide_in_engines_of_one_library() -> None:
    found = waterfall.make_waterfall(to_int8())
    assert {part.names[0]: part.cause.key for part in found.parts} == {
        "conv": "narrower", "ReorderOutput_token_7": "conversion", "pool": "same", "fc": "stayed", "dq": "conversion",
    }  # fmt: skip
    back = waterfall.make_waterfall(replace(to_int8(), a=to_int8().b, b=to_int8().a))
    keys = {part.names[0]: part.cause.key for part in back.parts}
    assert keys["conv"] == "wider" and keys["fc"] == "same"
    forward, backward = by_key(found), by_key(back)
    assert backward["wider"].difference.value == pytest.approx(-forward["narrower"].difference.value)


def test_the_product_decides_the_type_of_a_region() -> None:
    """ONNX Runtime lacks an FP16 kernel for a convolution and casts around it, but not around the following layer."""
    kinds, shared = (("Conv", FLOAT), ("Max", "float16")), (("n_conv", "n_bn"), ("n_bn", "n_relu"))
    forms = [
        replace(FAST, library=f"ONNX Runtime 1.0{title}", layers=tuple(
            layer(f"l{k}", k, kind, dtype if title else FLOAT, computes_in=FLOAT if kind == "Conv" else "", nodes=nodes)
            for k, ((kind, dtype), nodes) in enumerate(zip(kinds, shared, strict=True))
        ))
        for title in ("", " fp16")
    ]  # fmt: skip
    a, b = side(0, (50, 10), 60), side(2, (30, 90), 120, precision="fp16")
    found = waterfall.make_waterfall(FormPair((forms[0], GRAPH, forms[1]), replace(a, graph=1), b, "net"))
    assert [(part.cause.key, part.types) for part in found.parts] == [("stayed", (FLOAT, FLOAT))]


def test_unaligned_layers_are_not_attributed() -> None:
    forms = FAST, GRAPH, replace(FAST, layers=(*FAST.layers, layer("odd", 30, "Odd")))
    given = FormPair(forms, replace(side(0, FAST_US, 108), graph=1), side(2, (*FAST_US, 50), 158))
    found = waterfall.make_waterfall(given)
    assert [part.names for part in found.parts if part.cause == causes.UNALIGNED] == [("odd",)]
    assert found.attributed < 0.1


def test_two_unrelated_networks_are_reported() -> None:
    forms = FAST, GRAPH, form(LAYERS, layer("odd", 30, "Odd"), layer("odder", 31, "Odd"), library="Other 1.0")
    strangers = FormPair(forms, replace(side(0, FAST_US, 108), graph=1), side(2, (50, 9), 60))
    told = [[r.key for r in reasons.list_reasons_why(waterfall.make_waterfall(p))] for p in (strangers, pair())]
    assert told[0][1] == "strangers" and "strangers" not in told[1]


def test_interruptions_are_separated_from_work_outside_the_layers() -> None:
    """Every run has an interruption of 100 µs in some layer, and 20 µs outside the layers."""
    quiet = times(FAST_US, 103, 0, 0.0)
    layers = quiet.layers.copy()
    for k, row in enumerate(layers):
        row[k % len(row)] += 100e-6
    busy = Times(np.full(50, 223e-6), quiet.profiled, layers)
    forms = (FAST, GRAPH, replace(FAST, library="ONNX Runtime 2.0"))
    found = waterfall.make_waterfall(FormPair(forms, PairSide(0, "fp32", (quiet,), 1), PairSide(2, "fp32", (busy,), 1)))
    steps = by_key(found)
    assert 1e6 * steps["interrupted"].b == pytest.approx(100) and 1e6 * steps["between"].b == pytest.approx(20)
    assert steps["same"].difference.value == pytest.approx(0, abs=1e-9)
    texts = [reason.text for reason in reasons.list_reasons_why(found) if reason.key == "interrupted"]
    assert len(texts) == 1 and "measure again when the machine is quiet" in texts[0]


def on_gpu(found: PairSide, busy_us: float) -> PairSide:
    """Return the side as if a GPU had run its layers, busy for `busy_us` in each run."""
    count = np.empty(0)
    gpu = LaunchTimes(count, count, np.full(20, 1e-6 * busy_us), np.full(20, 5e-6), np.full(20, 4.0))
    return replace(found, processes=tuple(replace(each, gpu=gpu) for each in found.processes))


@pytest.mark.parametrize("rounds", [1, 5])
def test_gpu_waits_for_the_host_are_a_separate_cause(rounds: int, tmp_path: Path) -> None:
    given = pair(latency_a=900, rounds=rounds)
    pairs.write_pair(tmp_path / "pair.json", replace(given, a=on_gpu(given.a, 210)))
    found = waterfall.make_waterfall(pairs.read_pair(tmp_path / "pair.json"))
    steps = by_key(found)
    assert 1e6 * steps["waiting"].a == pytest.approx(690, abs=10) and steps["waiting"].b == 0
    assert steps["between"].a == pytest.approx(0, abs=2e-6) and found.attributed > 0.97
    assert sum(s.difference.value for s in found.causes) == pytest.approx(found.gap.difference.value, rel=1e-12)
    texts = {reason.key: reason.text for reason in reasons.list_reasons_why(found)}
    assert "ran no kernel" in texts["waiting"] and "named layers and launch gaps" in texts["attributed"]
    assert "waiting" not in by_key(waterfall.make_waterfall(given)), "no kernels were recorded"


def test_layers_slowed_by_profiling_are_scaled_with_wider_intervals() -> None:
    found, plain = waterfall.make_waterfall(pair(latency_b=50)), waterfall.make_waterfall(pair())
    assert found.b.excess == pytest.approx(53e-6, rel=0.02)
    for layers in (found.b.layers[0], found.b.watch_overhead_removed[0]):
        assert layers.sum() == pytest.approx(50e-6, rel=0.02) and layers.min() >= 0
    # 22 µs less each, but never below 0
    assert 1e6 * found.b.watch_overhead_removed[0] == pytest.approx([38, 0, 0, 8], abs=5)
    conversion = by_key(found)["conversion"]  # of 8 µs, perhaps 4 µs or none
    assert 1e6 * conversion.difference.value == pytest.approx(3.9, rel=0.1) and not conversion.proven
    assert by_key(plain)["conversion"].proven
    assert any(reason.key == "watched" and "took 10" in reason.text for reason in reasons.list_reasons_why(found))


def test_unproven_differences_are_reported_and_noise_is_not_a_cause() -> None:
    forms = (FAST, GRAPH, replace(FAST, library="ONNX Runtime 1.0 (2)"))
    same = FormPair(forms, replace(side(0, FAST_US, 108), graph=1), side(2, FAST_US, 108))
    told = reasons.list_reasons_why(waterfall.make_waterfall(same))
    assert [reason.key for reason in told] == ["gap"]
    assert "no difference is shown" in told[0].text and (told[0].low or 0) < 0 < (told[0].high or 0)
    conversions = [part for part in waterfall.make_waterfall(same).parts if part.cause == causes.CONVERSION]
    assert [(part.a, part.b) for part in conversions] == [((1,), (1,))]  # present in both


def test_rounding_errors_make_no_difference() -> None:
    rounded = np.full(4, 0.1) + 0.2 - 0.3  # 5.6e-17 seconds
    step = waterfall._make_step(causes.SAME, np.zeros(4), rounded)
    assert step.difference == waterfall.Interval(0.0, 0.0, 0.0) and not step.proven


def test_rounding_errors_make_no_interruption() -> None:
    """The mean of two processes' sums differs in its last bits from the sum of their layers' means."""
    up, down = [1.1e-6 * k for k in range(1, 8)], [1.3e-6 * k for k in range(7, 0, -1)]
    quiet = [Times(np.full(50, 1e-3), np.full(50, 1e-3), np.tile(layers, (50, 1))) for layers in (up, down)]
    assert not waterfall._make_estimates(quiet).interrupted.any()


def test_sentences_name_the_layers_to_act_on() -> None:
    told = {reason.key: reason for reason in reasons.list_reasons_why(waterfall.make_waterfall(pair()))}
    assert told["gap"].text.startswith("ONNX Runtime takes ") and "112 µs less" in told["gap"].text
    assert told["kernel"].names == ("pool", "conv", "fc") and (told["kernel"].high or 0) < 0
    assert "2 layers of PyTorch are fused or left out in ONNX Runtime (1 BatchNorm2d, 1 ReLU)" in told["fused"].text
    assert "0 in PyTorch and 1 in ONNX Runtime, the longest before" not in told["conversion"].text
    assert "against the difference" in told["conversion"].text
    assert told["alone"].names == ("pool",) and "23% of PyTorch's latency" in told["alone"].text
    last = reasons.list_reasons_why(waterfall.make_waterfall(pair(latency_a=230)))[-1]
    assert last.key == "attributed" and last.text.startswith("Attributed to named layers: 91.")
    assert "outside the layers: 8." in last.text


def test_the_costliest_conversion_is_named_with_its_reader() -> None:
    moved = made_layers.layer("Reformatting CopyNode", "Reformat", "t3", "u3", moves=True)
    engine = replace(FAST, layers=(FAST.layers[0], moved, replace(POOL, inputs=(Port("u3"),)), FC))
    found = waterfall.make_waterfall(replace(pair(), forms=(MODULE, GRAPH, engine), b=side(2, (60, 400, 5, 30), 500)))
    told = {reason.key: reason for reason in reasons.list_reasons_why(found)}
    assert "The largest part is the conversion before pool (Reformatting CopyNode): 0 µs in" in told["alone"].text


def test_int8_without_a_gain_names_the_layers_that_kept_their_type() -> None:
    told = [r for r in reasons.list_reasons_why(waterfall.make_waterfall(to_int8(quicker=70))) if r.key == "not_faster"]
    stayed, slower = told
    assert stayed.names == ("fc",) and "int8 was requested, but 1 layer computed in a wider type" in stayed.text
    assert slower.names == ("conv",) and "1 layer took longer in the narrower type: +" in slower.text


def test_tables_add_up_and_the_rest_is_one_row() -> None:
    found = waterfall.make_waterfall(pair())
    by_cause, by_part = waterfall.list_waterfall_tables(found, 2)
    first, *steps, last = by_cause.rows
    assert first["cause"] == "A: PyTorch 2.0" and last["cause"] == "B: ONNX Runtime 1.0"
    assert first["a_us"] + sum(row["difference_us"] for row in steps) == pytest.approx(last["b_us"])
    assert steps[-1]["reached_us"] == pytest.approx(last["reached_us"])
    assert sum(row["share"] for row in steps) == pytest.approx(100)
    assert [row["modules"] for row in by_part.rows] == ["pool", "conv", "4 more parts"]
    every = waterfall.by_part(found, 0)
    (unnamed,) = (row for row in every.rows if row["modules"] == "(model)")
    assert every.columns[0].text(unnamed) == "(model): Net", "rows without names are told apart at any width"
    assert sum(r["difference_us"] for r in every.rows) == pytest.approx(sum(r["difference_us"] for r in by_part.rows))
    assert every.rows[-1]["modules"] != "more" and len(every.rows) == len(found.parts)


def test_stored_pairs_are_read_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    pairs.write_pair(path, pair())
    before, after = (waterfall.make_waterfall(each) for each in (pair(), pairs.read_pair(path)))
    assert [s.cause for s in after.steps] == [s.cause for s in before.steps]
    assert [s.a for s in after.steps] == pytest.approx([s.a for s in before.steps], abs=2e-9)
    assert pairs.read_pair(path).titles == pair().titles


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "holds no explained pair"),
        ('{"kind": "explained pair", "schema": 2}', "is damaged: it isn.t in Dyno's format"),
        ('{"kind": "explained pair", "schema": 99}', "99"),
    ],
)
def test_files_without_a_pair_are_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "pair.json"
    path.write_text(text, encoding="utf-8")
    refuses(said, pairs.read_pair, path)


def test_two_modules_are_aligned_by_their_calls() -> None:
    a, b = side(0, SLOW_US, 220), side(0, (50.0, *SLOW_US[1:]), 170)
    found = waterfall.make_waterfall(FormPair((MODULE, replace(MODULE, library="PyTorch 2.1")), a, replace(b, form=1)))
    assert [len(part.a) == len(part.b) == 1 for part in found.parts] == [True] * 6
    assert 1e6 * found.steps[0].difference.value == pytest.approx(-50, rel=0.05)


def test_the_own_code_of_a_module_is_one_part() -> None:
    """`attn` multiplies before and after it calls `attn.fc`; the model adds something at the end."""
    owners = ("attn", "attn.fc", "attn", "")
    module = form(
        MODULES, made_layers.layer("attn.fc", "Linear", "", "0:0", modules=("attn.fc",), flops=9),
        made_layers.layer("attn", "Attention", "", "1:0", modules=("attn",), flops=9),
        Layer(type="Net", modules=("",)), library="PyTorch 2.0",
    )  # fmt: skip
    graph = replace(GRAPH, layers=tuple(layer(f"n{k}", k, "MatMul", modules=(o,)) for k, o in enumerate(owners)))
    engine = replace(FAST, layers=tuple(layer(f"n{k}", k, "MatMul", nodes=(f"n{k}",)) for k in range(4)))
    a, b = side(0, (30, 50, 5), 90), side(2, (10.0, 20, 11, 1), 45)
    found = waterfall.make_waterfall(FormPair((module, graph, engine), a, b))
    assert {part.names: (part.cause.key, part.a, part.b) for part in found.parts} == {
        ("attn.fc",): ("kernel", (0,), (1,)), ("attn",): ("kernel", (1,), (0, 2)), ("(model)",): ("calls", (2,), (3,)),
    }  # fmt: skip
    assert sum(s.a for s in found.steps) == pytest.approx(found.gap.a, rel=1e-12)


def named(text: str) -> Prescription:
    (found,) = [one for one in PRESCRIPTIONS if text in one.text]
    return found


@pytest.mark.parametrize("one", PRESCRIPTIONS, ids=lambda one: one.text)
def test_each_prescription_uses_known_backend_options(one: Prescription) -> None:
    assert one.options or one.backend or one.precision, "it changes something"
    for name in [one.backend] if one.backend else one.backends:
        backend = registry.find(name)
        assert set(one.options) <= set(backend.options), name
        assert not one.precision or one.precision in backend.precisions
        for option, value in one.options.items():
            if option in backend.values:
                assert not backend.values[option](value), (name, option)


TENSORRT, PAIRS = ("tensorrt", "fp16", "cuda:0"), "eight bits between layers"
# Prescription, engine, options, and whether it would change that engine.
FITS: list[tuple[str, tuple[str, str, str], dict[str, Any], bool]] = [
    ("fewer layers", ("onnxruntime", "int8", "cpu"), {}, True),
    ("fewer layers", ("onnxruntime", "fp32", "cpu"), {}, False),
    ("BF16", ("openvino", "int8", "cpu"), {}, True),
    ("BF16", ("openvino", "bf16", "cpu"), {}, False),
    ("a CUDA graph", ("pytorch", "fp16", "cuda:1"), {}, True),
    ("a CUDA graph", ("pytorch", "fp16", "cpu"), {}, False),
    ("a CUDA graph", ("onnxruntime", "fp32", "cuda:0"), {}, False),
    ("usual level", TENSORRT, {}, False),  # already set
    ("highest level", TENSORRT, {}, True),
    *(("usual level", TENSORRT, {"optimization": n}, n < 3) for n in (0, 2, 3, 5)),
    *(("highest level", TENSORRT, {"optimization": n}, n == 3) for n in (0, 2, 3, 5)),
    ("a calibrator", ("tensorrt", "int8", "cuda:0"), {"route": "graph"}, True),
    ("a calibrator", ("tensorrt", "int8", "cuda:0"), {"route": "calibrator"}, False),
    ("a calibrator", TENSORRT, {}, False),
    *((PAIRS, (name, "int8", "cuda:0"), {}, True) for name in ("tensorrt", "tensorrt_rtx")),
    *((PAIRS, ("tensorrt", "int8", "cuda:0"), options, False)
      for options in ({"joints": True}, {"route": "calibrator"}, {"quantizer": "modelopt"})),
    (PAIRS, TENSORRT, {}, False),
    (PAIRS, ("openvino", "int8", "cpu"), {}, False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "engine", "options", "fits"), FITS)
def test_prescriptions_fit_engines_they_would_change(
    text: str, engine: tuple[str, str, str], options: dict[str, Any], fits: bool
) -> None:
    assert named(text).fits(*engine, options) is fits


def test_proven_and_correct_prescriptions_are_kept() -> None:
    called = IndicatedPrescription(named("newer opset"), causes.SPLIT, 12e-6)
    measured = ((1.2, FASTER, True), (1.5, FASTER, True), (2.0, FASTER, False), (1.3, UNDECIDED, True))
    outcomes = (
        *(Outcome(called, f"x@n={value}", Speedup(value, value - 0.1, value + 0.1, verdict), "agree", right)
          for value, verdict, right in measured),
        Outcome(called, "x@n=0", None, "", True, "failed: no opset 20"),
    )  # fmt: skip
    assert [one.is_kept for one in outcomes] == [True, True, False, False, False]
    assert cures.PrescriptionResult("x", outcomes).sentences == [
        "2 of 5 prescriptions helped.",
        f"The best is {outcomes[1].called.prescription.text}: 1.50x [1.40, 1.60] as fast, by --backend x@n=1.5.",
    ]
    assert cures.PrescriptionResult("x", outcomes[2:]).sentences == ["None of 3 prescriptions helped."]
    assert cures.PrescriptionResult("x", ()).sentences == ["No cause of x's time has a known cure."]
    text = export([cures.PrescriptionResult("x", outcomes).table], "markdown")
    assert "1.20x [1.10, 1.30]" in text and "failed: no opset 20" in text and "a separate layer in B" in text
