"""Records are written whole or not at all, and read back unchanged."""

import dataclasses
import json
import math
import os
import random
import types
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

import numpy as np
import pytest

from dyno.jobs.launcher import launch
from dyno.worker import record as module
from dyno.worker.facts.engine import precision_truth, sum_operations, why_not_faster
from dyno.worker.facts.job import Facts
from dyno.worker.inspection import Inspection
from dyno.worker.record import Measurement, Record, read_record, save_arrays, write_json, write_record
from dyno.worker.spec import Artifact, InputSpec, Job, Runtime, Tensor, to_json
from refusals import refuses

RECORD = Record(
    "ok",
    "done",
    trial="ab12",
    round=2,
    seconds=1.25,
    measurements=(
        Measurement("load", "s", "duration", 0.5, clock="host"),
        Measurement("latency", "s", "duration", None, "latency_model", "model", "host", "interval"),
        Measurement("throughput", "1/s", "rate", 812.0, "throughput", "throughput", "host", "seconds"),
    ),
    warnings=("hot",),
    facts=Facts(layers_by_type={"float32": 21}),
    artifact=Artifact("onnx", "m.onnx", "ab", 5, "fp32", (Tensor("input", "float32", ("n", 3)),), (), 0.5),
)


def test_a_record_survives_a_round_trip(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    assert read_record(tmp_path) == RECORD
    assert [f.name for f in tmp_path.iterdir()] == ["record.json"]


def test_renamed_fields_are_read_by_the_old_name_and_written_by_the_new(tmp_path: Path) -> None:
    facts = {"others_bearable": 0.2, "precision_truth": {"asked": "fp16", "ok": False}}
    write_json(tmp_path / "record.json", {"status": "ok", "facts": facts})
    record = read_record(tmp_path)
    assert record is not None and record.facts.precision_truth is not None
    assert (record.facts.contention_threshold, record.facts.precision_truth.requested) == (0.2, "fp16")
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    text = (tmp_path / "record.json").read_text()
    assert "contention_threshold" in text and "others_bearable" not in text


ODD = [True, None, 2**64, np.bool_(True), np.float32(1), "text", 1.5, b"bytes", ("a", 1), {1: 2}]
USUAL: dict[Any, list[Any]] = {
    bool: [True, False], str: ["", "a", "\udcff"], int: [0, -(2**63), 2**64 - 1, np.int64(3)],
    float: [0.5, 7, np.float32(0.25), math.inf], Any: [None, [1, "a"]], type(None): [None],
}  # fmt: skip


def any_value(kind: Any, rng: random.Random, odd: float = 0.0) -> Any:
    """Draw a value of the annotation; each part has any other type with the probability `odd`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if rng.random() < odd:
        return rng.choice(ODD)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [f.name for f in dataclasses.fields(kind) if f.name not in ("other", "schema", "status")]
        status = {"status": rng.choice(module.STATUSES)} if kind is Record else {}
        return kind(**{name: any_value(hints[name], rng, odd) for name in names}, **status)
    if origin in (Union, types.UnionType):
        return any_value(rng.choice(args), rng, odd)
    if origin is tuple:
        count = rng.randrange(3) if args[-1] is Ellipsis else len(args)
        return tuple(any_value(args[0], rng, odd) for _ in range(count))
    if origin is dict:
        return {f"key {k}": any_value(args[1], rng, odd) for k in range(rng.randrange(3))}
    return rng.choice(USUAL[kind])


@pytest.mark.parametrize("seed", range(8))
def test_every_field_survives_a_round_trip_with_any_value_of_its_type(tmp_path: Path, seed: int) -> None:
    record = any_value(Record, random.Random(seed))
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record


@pytest.mark.parametrize("seed", range(40))
def test_values_of_a_wrong_type_never_make_a_record_unreadable(tmp_path: Path, seed: int) -> None:
    record = any_value(Record, random.Random(seed), odd=0.003)
    if not isinstance(record, Record):
        return
    write_record(tmp_path, record)
    back = read_record(tmp_path)
    assert back is not None
    if "please report it: Record." in back.reason:
        assert back.status == "failed" and back.measurements in (record.measurements, ())
    else:
        assert to_json(back) == json.loads(json.dumps(to_json(record)))


def test_a_value_of_a_wrong_type_loses_only_its_field(tmp_path: Path) -> None:
    write_record(tmp_path, replace(RECORD, inspection=Inspection(inputs=(InputSpec("flag", low=True),))))
    back = read_record(tmp_path)
    assert back is not None and back.measurements == RECORD.measurements and back.facts == RECORD.facts
    assert back.status == "failed" and "Record.inspection.inputs.low is of type bool" in back.reason


def test_an_unreadable_job_is_refused_before_it_starts(tmp_path: Path) -> None:
    job = Job("probe", Runtime(threads=True), backend="fake")
    refuses(r"Job\.runtime.threads is of type bool, which is wrong here", launch, job, tmp_path / "job", 60)
    assert not (tmp_path / "job" / "job.json").exists()


def test_a_missing_record_reads_as_none(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    assert read_record(tmp_path / "nowhere") is None


def test_values_are_found_by_tag_and_boundary() -> None:
    assert RECORD.value("load") == 0.5
    assert RECORD.value("throughput", "throughput") == 812.0
    assert RECORD.value("throughput") is None
    assert RECORD.value("latency", "model") is None


@pytest.mark.parametrize("text", ["", '{"status": "o', "\0\0\0", "[1]", "{}", '{"status": "odd"}', '{"status": 1}'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text)
    refuses(r"record.json is damaged \(.*\); the same `dyno run` measures this round again", read_record, tmp_path)


def test_a_record_of_another_version_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"status": "ok", "colour": 1}')
    refuses("unknown key 'colour'", read_record, tmp_path)


def test_a_failed_write_keeps_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(tmp_path, RECORD)
    save_arrays(tmp_path / "a.npz", {"x": np.arange(3)})
    with pytest.raises(TypeError):
        write_json(tmp_path / "record.json", {"x": object()})
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", lambda f, **_: (f.write(b"half"), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            save_arrays(tmp_path / "a.npz", {"x": np.arange(4)})
    assert read_record(tmp_path) == RECORD
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["x"].tolist() == [0, 1, 2]


def test_a_file_is_flushed_to_disk_before_it_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []  # sizes as each file is flushed, then as it is renamed
    monkeypatch.setattr(module.os, "fsync", lambda number: done.append(os.fstat(number).st_size))
    monkeypatch.setattr(module.os, "replace", lambda part, _: done.append(part.stat().st_size))
    write_json(tmp_path / "a.json", {})
    save_arrays(tmp_path / "a.npz", {"x": np.arange(3)})
    assert len(done) == 4 and done[0] == done[1] > 0 and done[2] == done[3] > 0


def test_text_is_utf8(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"class": "猫 Ωμέγα"})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"class": "猫 Ωμέγα"}


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
def test_fp32_needs_every_layer_and_lower_precisions_half(asked: str, layers: dict[str, int], ok: bool) -> None:
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
def test_precision_is_judged_by_operations_rather_than_layers(operations: dict[str, int], ok: bool, share: str) -> None:
    layers = {"int8": 1, "float32": 9} if ok else {"int8": 9, "float32": 1}
    truth = precision_truth("int8", layers, "an engine", operations)
    assert (truth.ok, truth.refuted) == (ok, not ok)
    assert truth.share["int8"] == operations["int8"] / sum(operations.values())
    assert truth.sentence.endswith(f": {share} of the arithmetic in int8")


def test_fp32_is_refuted_by_any_operation_in_another_type() -> None:
    assert not precision_truth("fp32", {"float32": 9, "bfloat16": 1}, "an engine", {"float32": 999, "bfloat16": 1}).ok


def test_operations_are_summed_only_if_all_are_known() -> None:
    assert sum_operations([("int8", 4), ("float32", 2), ("int8", 1), ("unknown", None)]) == {"int8": 5, "float32": 2}
    assert sum_operations([("int8", 4), ("float32", None)]) == {}


def test_an_unknown_precision_is_not_confirmed() -> None:
    assert "not confirmed" in precision_truth("fp16", {}, "an engine").sentence


def test_opaque_parts_neither_confirm_nor_refute_a_precision() -> None:
    opened = precision_truth("fp32", {"float32": 70, "unknown": 6}, "TensorRT")
    assert opened.sentence == (
        "asked for fp32: TensorRT ran 70 of 70 compute layers in float32; parts of the graph that it doesn't open: 6"
    )
    closed = precision_truth("fp16", {"float16": 1, "unknown": 2}, "TensorRT")
    assert not closed.refuted and closed.sentence.endswith("doesn't open: 2, so fp16 is not confirmed")
    assert not precision_truth("fp16", {"unknown": 2}, "TensorRT").refuted
    assert precision_truth("fp32", {"float16": 1, "unknown": 9}, "TensorRT").refuted


def test_reasons_name_operators_and_shares_and_omit_small_ones() -> None:
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
