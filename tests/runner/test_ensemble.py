"""What measures in turns is held against the same trial while it is measured and in the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dyno.results import correctness
from dyno.results.trial_result import load_run
from dyno.runner import ensemble
from dyno.worker.record import Record, write_json, write_record
from dyno.worker.spec import Dims, Job, ModelSpec, Runtime, Trial, UserError, to_json

MODEL = ModelSpec("net", "torchvision:resnet18")
EAGER = Trial(MODEL, "pytorch", "fp32", Dims(1, 64, 64))
ELSEWHERE = Runtime("other", "elsewhere/bin/python")


def made(backend: str, precision: str = "fp32", batch: int = 1, **more: Any) -> Trial:
    return Trial(MODEL, backend, precision, Dims(batch, 64, 64), **more)


STUDY = (
    made("openvino"), made("onnxruntime", "int8"), made("onnxruntime"),
    made("onnxruntime", options={"b": 2, "a": "x/y"}), made("onnxruntime", "int8", options={"b": 2, "a": "x/y"}),
    made("pytorch", "bf16"), made("pytorch", options={"threads": 1}), EAGER,
    made("module:NAME"), made("pytorch", runtime=ELSEWHERE), made("onnxruntime", batch=8),
    made("onnxruntime", "int8", batch=8), made("pytorch", "fp16", batch=8), made("module:NAME", batch=8),
    made("onnxruntime", "int8", batch=8, options={"b": 2, "a": "x/y"}),
)  # fmt: skip
SIDES = tuple(replace(t, side=side) for t in (EAGER, made("onnxruntime"), made("openvino", "int8")) for side in "ba")
ASKED = (
    "", "onnxruntime", "onnxruntime/int8", "onnxruntime:int8", "onnxruntime int8", "onnxruntime@a=x/y@b=2",
    "onnxruntime@b=2@a=x/y", "onnxruntime@b=2@a=x/y/int8", "onnxruntime/int8@b=2@a=x/y", "module:NAME",
    "module:NAME/fp32", "pytorch@runtime=other", EAGER.id[:8], STUDY[4].id, STUDY[12].id[:4],
)  # fmt: skip


def in_tables(folder: Path, trials: tuple[Trial, ...], requested: str) -> dict[str, str]:
    """The reference of each trial in a stored run of them, by id."""
    for trial in trials:
        place = folder / "trials" / trial.id / "r0"
        place.mkdir(parents=True)
        write_json(place / "job.json", to_json(Job("run", trial=trial)))
        write_record(place, Record("ok", "done", trial=trial.id))
    return {id: chosen.id for id, chosen in correctness.find_references(load_run(folder), requested).items()}


def in_turns(trials: tuple[Trial, ...], requested: str) -> dict[str, str]:
    """The reference of each trial where they measure in turns, by id."""
    mixed = Random(1).sample(trials, len(trials))
    fits = correctness.make_matcher(requested, mixed) if requested else None
    chosen = [(group, ensemble.reference(group, fits)) for group in ensemble.groups(mixed)]
    return {t.id: reference.id for group, reference in chosen if reference for t in group}


@pytest.mark.parametrize("requested", ASKED)
def test_tables_and_turns_choose_the_same_reference(tmp_path: Path, requested: str) -> None:
    assert (chosen := in_tables(tmp_path, STUDY, requested)) == in_turns(STUDY, requested)
    assert chosen


@pytest.mark.parametrize("requested", ["", SIDES[0].id])
def test_so_they_do_in_a_comparison(tmp_path: Path, requested: str) -> None:
    assert (chosen := in_tables(tmp_path, SIDES, requested)) == in_turns(SIDES, requested)
    baselines = {SIDES[0].id} if requested else {t.id for t in SIDES if t.side == "a"}
    assert set(chosen.values()) == baselines


def test_each_way_to_name_a_reference_finds_its_trial(tmp_path: Path) -> None:
    found = {requested: in_turns(STUDY, requested).get(EAGER.id) for requested in ASKED}
    whole, eight = STUDY[3].id, STUDY[4].id
    assert list(found.values()) == [
        EAGER.id, STUDY[2].id, *[STUDY[1].id] * 3, whole, whole, eight, eight, STUDY[8].id,
        STUDY[8].id, STUDY[9].id, EAGER.id, eight, None,
    ]  # fmt: skip


@pytest.mark.parametrize("requested", ["tensorrt", "onnxruntime/bf16", "onnxruntime@b=2", "pytorch/fp99", "fp32"])
def test_what_no_trial_is_is_refused(tmp_path: Path, requested: str) -> None:
    with pytest.raises(UserError, match="fits the reference"):
        in_tables(tmp_path, STUDY, requested)
    assert not in_turns(STUDY, requested)
