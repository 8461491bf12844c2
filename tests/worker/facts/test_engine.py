"""Precision truth: what is asked, what ran, and one sentence that says both."""

from __future__ import annotations

import pytest

from dyno.worker.facts.engine import precision_truth, sum_operations, why_not_faster


@pytest.mark.parametrize(
    ("asked", "layers", "ok"),
    [
        ("fp32", {"float32": 21}, True),
        ("fp32", {"float32": 20, "bfloat16": 1}, False),
        ("tf32", {"float32": 21}, True),
        ("fp16", {"float16": 11, "float32": 10}, True),
        ("fp16", {"float32": 21}, False),
        ("int8", {"int8": 9, "float32": 12}, False),
        ("int8", {}, False),
        ("fp32", {"float32": 70, "unknown": 6}, True),
        ("fp32", {"float32": 69, "float16": 1, "unknown": 6}, False),
        ("fp16", {"float16": 1, "unknown": 1}, False),
    ],
)
def test_fp32_bears_no_exception_and_a_lowered_precision_needs_half(
    asked: str, layers: dict[str, int], ok: bool
) -> None:
    assert precision_truth(asked, layers, "an engine").ok is ok


def test_the_sentence_counts_every_type() -> None:
    truth = precision_truth("int8", {"int8": 19, "float32": 2}, "OpenVINO")
    ran = "asked for int8: OpenVINO ran 19 of 21 compute layers in int8, 2 in float32"
    assert truth.sentence == f"{ran} (each layer counted as one)"
    assert truth.share == {"float32": pytest.approx(2 / 21), "int8": pytest.approx(19 / 21)}


@pytest.mark.parametrize(
    ("operations", "ok", "share"),
    [
        ({"int8": 94, "float32": 6}, True, "94%"),
        ({"int8": 6, "float32": 94}, False, "6%"),
        ({"int8": 999, "float32": 1}, True, ">99%"),
    ],
)
def test_operations_decide_and_not_layers(operations: dict[str, int], ok: bool, share: str) -> None:
    layers = {"int8": 1, "float32": 9} if ok else {"int8": 9, "float32": 1}
    truth = precision_truth("int8", layers, "an engine", operations)
    assert (truth.ok, truth.refuted) == (ok, not ok)
    assert truth.share["int8"] == operations["int8"] / sum(operations.values())
    assert truth.sentence.endswith(f": {share} of the arithmetic in int8")


def test_fp32_bears_no_operation_in_another_type() -> None:
    assert not precision_truth("fp32", {"float32": 9, "bfloat16": 1}, "an engine", {"float32": 999, "bfloat16": 1}).ok


def test_operations_add_up_only_if_all_are_known() -> None:
    assert sum_operations([("int8", 4), ("float32", 2), ("int8", 1), ("unknown", None)]) == {"int8": 5, "float32": 2}
    assert sum_operations([("int8", 4), ("float32", None)]) == {}


def test_what_is_not_known_is_not_confirmed() -> None:
    assert "not confirmed" in precision_truth("fp16", {}, "an engine").sentence


def test_a_part_that_is_not_opened_neither_confirms_nor_refutes() -> None:
    opened = precision_truth("fp32", {"float32": 70, "unknown": 6}, "TensorRT")
    assert opened.sentence == (
        "asked for fp32: TensorRT ran 70 of 70 compute layers in float32; parts of the graph that it doesn't open: 6"
    )
    closed = precision_truth("fp16", {"float16": 1, "unknown": 2}, "TensorRT")
    assert not closed.refuted and closed.sentence.endswith("doesn't open: 2, so fp16 is not confirmed")
    assert not precision_truth("fp16", {"unknown": 2}, "TensorRT").refuted
    assert precision_truth("fp32", {"float16": 1, "unknown": 9}, "TensorRT").refuted


def test_reasons_name_operators_and_shares_and_leave_out_what_is_small() -> None:
    compute = [("Conv", "int8")] * 15 + [("Conv", "float32")] * 4 + [("Gemm", "float32")]
    time = {"Conv": 0.8, "QuantizeLinear": 0.15, "DequantizeLinear": 0.05}
    assert why_not_faster("int8", compute, time, ("QuantizeLinear", "DequantizeLinear")) == [
        "5 of 20 compute layers stayed in float32 (4 Conv, 1 Gemm)",
        "20% of the time goes into changing types and layouts (QuantizeLinear, DequantizeLinear)",
    ]
    assert why_not_faster("fp32", compute, time, ("QuantizeLinear",)) == []
    assert why_not_faster("tf32", compute, time, ("QuantizeLinear",)) == [
        "15% of the time goes into changing types and layouts (QuantizeLinear)"
    ], "float32 is what TF32 is stored as"
    assert why_not_faster("int8", compute[:16], {"Conv": 0.95, "Cast": 0.05}, ("Cast",)) == []
