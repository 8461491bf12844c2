"""A YOLO that was trained for a moment, evaluated as a trial is: its mAP is the one that its own library finds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import yolo_small
from dyno.analysis import tables
from dyno.analysis.results import load
from dyno.launch import launch
from dyno.worker import ultralytics_models
from dyno.worker.spec import Dims, Job, ModelSpec, Plan, Runtime, Trial
from yolo_small import SIZE, Trained

pytestmark = pytest.mark.slow


def test_masks_and_boxes_of_a_run(yolo: Callable[[str], Trained], tmp_path: Path) -> None:
    """ultralytics interpolates precision in its own way; its masks are coarse, which the strict thresholds punish."""
    pytest.importorskip("pycocotools")
    trained = yolo("segment")
    data = yolo_small.decoded(trained.data.parent, "segment")
    preprocess = ultralytics_models.preprocess("segment")
    weights = str(trained.weights)
    model = ModelSpec("y", trained.source, weights=weights, task="segment", classes=3, preprocess=preprocess)
    plan = Plan(boundaries=(), rounds=1)
    trial = Trial(model, "pytorch", "fp32", Dims(5, SIZE, SIZE), data=data, runtime=Runtime(threads=1), plan=plan)
    for each in (trial, replace(trial, dims=replace(trial.dims, batch=8))):
        record = launch(Job("run", each.runtime, each), tmp_path / "trials" / each.id / "r0", 300)
        assert record.status == "ok", record.reason
        assert {"preprocess", "inference", "postprocess", "pipeline"} <= {m.tag for m in record.measurements}
    (tmp_path / "truth").mkdir()
    shutil.copy(Path(data.folder) / "truth.json", tmp_path / "truth" / f"{data.sha256[:12]}.json")
    frame = tables.frame(load(tmp_path))
    said = trained.metrics
    for _, row in frame.iterrows():
        assert row["images"] == yolo_small.COUNTS["val"] and row["map50"] > 20
        pairs = (("map50", "mAP50(M)", 5), ("box_map50", "mAP50(B)", 5), ("box_map50_95", "mAP50-95(B)", 8))
        for name, key, nearly in pairs:
            assert row[name] == pytest.approx(100 * said[f"metrics/{key}"], abs=nearly)
        assert row["map50_95"] > 100 * said["metrics/mAP50-95(M)"] - 8
    assert frame["map50_95"].iloc[0] == pytest.approx(frame["map50_95"].iloc[1], abs=0.5), "whatever the batch"
