"""Prescriptions: what they are made of exists, each fits where it should, and only what is proven is kept."""

from __future__ import annotations

import pytest

from dyno.layers import causes, cures
from dyno.layers.cures import PRESCRIPTIONS, IndicatedPrescription, Outcome, Prescription
from dyno.report.export import export
from dyno.results.stats import FASTER, UNDECIDED, Speedup
from dyno.worker import registry


def named(text: str) -> Prescription:
    (found,) = [one for one in PRESCRIPTIONS if text in one.text]
    return found


@pytest.mark.parametrize("one", PRESCRIPTIONS, ids=lambda one: one.text)
def test_each_makes_a_variant_that_backends_know(one: Prescription) -> None:
    assert one.options or one.backend or one.precision, "it changes something"
    for name in [one.backend] if one.backend else one.backends:
        backend = registry.find(name)
        assert set(one.options) <= set(backend.options), name
        assert not one.precision or one.precision in backend.precisions
        for option, value in one.options.items():
            if option in backend.values:
                assert not backend.values[option](value), (name, option)


def test_it_fits_engines_that_it_would_change() -> None:
    fewer, bf16, graph = named("fewer layers"), named("BF16"), named("a CUDA graph")
    assert fewer.fits("onnxruntime", "int8", "cpu", {}) and not fewer.fits("onnxruntime", "fp32", "cpu", {})
    assert bf16.fits("openvino", "int8", "cpu", {}) and not bf16.fits("openvino", "bf16", "cpu", {})
    assert graph.fits("pytorch", "fp16", "cuda:1", {}) and not graph.fits("pytorch", "fp16", "cpu", {})
    assert not graph.fits("onnxruntime", "fp32", "cuda:0", {})


def test_the_builder_goes_to_its_usual_level_before_its_highest() -> None:
    usual, highest = named("usual level"), named("highest level")
    levels = (0, 2, 3, 5)
    assert [usual.fits("tensorrt", "fp16", "cuda:0", {"optimization": n}) for n in levels] == [True, True, False, False]
    assert [highest.fits("tensorrt", "fp16", "cuda:0", {"optimization": n}) for n in levels] == [
        False,
        False,
        True,
        False,
    ]
    assert highest.fits("tensorrt", "fp16", "cuda:0", {}) and not usual.fits("tensorrt", "fp16", "cuda:0", {})


def test_a_calibrator_is_for_int8_whose_types_come_from_the_graph() -> None:
    calibrator = named("a calibrator")
    assert calibrator.fits("tensorrt", "int8", "cuda:0", {"route": "graph"})
    assert not calibrator.fits("tensorrt", "int8", "cuda:0", {"route": "calibrator"})
    assert not calibrator.fits("tensorrt", "fp16", "cuda:0", {})


def test_pairs_between_layers_are_for_int8_graphs_that_have_none_there() -> None:
    joints = named("eight bits between layers")
    assert joints.fits("tensorrt", "int8", "cuda:0", {}) and joints.fits("tensorrt_rtx", "int8", "cuda:0", {})
    for options in ({"joints": True}, {"route": "calibrator"}, {"quantizer": "modelopt"}):
        assert not joints.fits("tensorrt", "int8", "cuda:0", options)
    assert not joints.fits("tensorrt", "fp16", "cuda:0", {}) and not joints.fits("openvino", "int8", "cpu", {})


def outcome(value: float, verdict: str, right: bool = True) -> Outcome:
    called = IndicatedPrescription(named("newer opset"), causes.SPLIT, 12e-6)
    return Outcome(called, f"x@n={value}", Speedup(value, value - 0.1, value + 0.1, verdict), "agree", right)


def test_what_is_proven_and_right_is_kept() -> None:
    failed = Outcome(
        IndicatedPrescription(named("newer opset"), causes.SPLIT, 1e-6), "x@n=0", None, "", True, "failed: no opset 20"
    )
    outcomes = (
        outcome(1.2, FASTER),
        outcome(1.5, FASTER),
        outcome(2.0, FASTER, right=False),
        outcome(1.3, UNDECIDED),
        failed,
    )
    assert [one.kept for one in outcomes] == [True, True, False, False, False]
    assert cures.describe_tried(outcomes, "x") == [
        "2 of 5 prescriptions helped.",
        f"The best is {outcomes[1].called.prescription.text}: 1.50x [1.40, 1.60] as fast, by --backends x@n=1.5.",
    ]
    assert cures.describe_tried(outcomes[2:], "x") == ["None of 3 prescriptions helped."]
    assert cures.describe_tried((), "x") == ["Nothing of what costs x time calls for a prescription."]
    text = export([cures.make_tried_table(outcomes, "x")], "markdown")
    assert "1.20x [1.10, 1.30]" in text and "failed: no opset 20" in text and "a separate layer in B" in text
