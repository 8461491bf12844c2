"""What a failed round was made with is kept beside it, step by step; damaged ones are measured again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dyno import Study, UserError
from dyno.jobs.progress import Progress
from dyno.runner import ensemble
from dyno.runner.execute import execute
from dyno.worker import registry
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Trial

Studies = Callable[..., Study]


def test_what_a_failure_was_made_with_names_every_step(tmp_path: Path) -> None:
    data = DataSpec("photos", "/photos", "ab")
    trial = Trial(ModelSpec("net", "torchvision:resnet18"), "openvino", "int8", Dims(1, 32, 32), data=data)
    ensemble.note_retry(tmp_path, replace(trial, recipe=registry.find("openvino").recipe(trial)))
    known = json.loads((tmp_path / ensemble.MADE_WITH).read_text())
    assert {"openvino", "onnx_precision", "onnx_export"} <= known.keys()
    assert "numpy" in known["onnx_export"]


def measured(study: Study, folder: Path) -> int:
    """Run the study; how many rounds were measured."""
    began = []

    class Log(Progress):
        def start(self, trial: Trial, number: int) -> None:
            began.append(number)
            super().start(trial, number)

    execute(study, folder, Log(quiet=True))
    return len(began)


def test_a_round_with_a_damaged_record_is_archived_and_measured_again(fake_study: Studies, tmp_path: Path) -> None:
    measured(fake_study(), tmp_path)
    (path,) = tmp_path.glob("trials/*/r0/record.json")
    path.write_text(cut := path.read_text()[:50])
    assert measured(fake_study(), tmp_path) == 1
    assert json.loads(path.read_text())["status"] == "ok"
    (kept,) = tmp_path.glob("archive/damaged/*/r0/record.json")
    assert kept.read_text() == cut
    assert measured(fake_study(), tmp_path) == 0


def test_a_record_of_a_newer_dyno_is_not_measured_over(fake_study: Studies, tmp_path: Path) -> None:
    measured(fake_study(), tmp_path)
    (path,) = tmp_path.glob("trials/*/r0/record.json")
    path.write_text(newer := json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(UserError, match="was written by a newer Dyno"):
        measured(fake_study(), tmp_path)
    assert path.read_text() == newer
