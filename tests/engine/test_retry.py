"""What a failed round was made with is kept beside it, step by step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from dyno.engine import retry
from dyno.worker import registry
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Trial


def test_what_a_failure_was_made_with_names_every_step(tmp_path: Path) -> None:
    data = DataSpec("photos", "/photos", "ab")
    trial = Trial(ModelSpec("net", "torchvision:resnet18"), "openvino", "int8", Dims(1, 32, 32), data=data)
    retry.note(tmp_path, replace(trial, recipe=registry.find("openvino").recipe(trial)))
    known = json.loads((tmp_path / retry.MADE_WITH).read_text())
    assert {"openvino", "onnx_precision", "onnx_export"} <= known.keys()
    assert "numpy" in known["onnx_export"]
