"""Tasks on TensorRT engines through the command line: detection, and the mixed-precision search."""

from pathlib import Path
from typing import Any

import pytest

from dyno.report.tables import trial_table
from dyno.results import trial_result
from yolo_small import SIZE

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
QUICK = "--device cuda:0 --rounds 1 --seconds 0.1 --warmup 0.1 --confirm 0".split()


# One engine each, as a build from level 1 on takes minutes.
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_a_detector_finds_the_same_on_every_engine(trt: Any, yolo: Any, tmp_path: Path, precision: str) -> None:
    trained = yolo("segment")
    words = (trained.source, "--weights", trained.weights, "--data", trained.data, "--size", SIZE, "--batch", 8)
    # Level 0 takes the first working kernel; types are enforced at any level.
    ways = f"pytorch@precision=fp32,tensorrt@optimization=0@precision={precision}"
    done = trt("run", *words, "--backend", ways, "--out", tmp_path / "run", *QUICK, timeout=1200)
    assert done.returncode == 0, done.stderr
    frame = trial_table.read_trials(trial_result.load_run(tmp_path / "run")).frame
    assert set(frame["status"]) == {"ok"}, frame[["backend", "precision", "status", "reason"]].to_string()
    want = frame[frame["backend"] == "pytorch"].iloc[0]
    for _, row in frame.iterrows():
        slack = 5 if row["precision"] == "int8" else 1
        for kind in ("map50", "map50_95", "box_map50", "box_map50_95"):
            assert row[kind] == pytest.approx(want[kind], abs=slack), (row["backend"], row["precision"], kind)


def test_the_layer_that_needs_higher_precision_is_found_on_engines(trt: Any, hostile: Path, tmp_path: Path) -> None:
    words = ("run", hostile, "--data", "digits", "--channels", 1, "--backend", "tensorrt", "--precision", "fp32,int8")
    done = trt(*words, "--batch", 4, "--budget", "top1=2", "--out", tmp_path / "run", *QUICK, timeout=1200)
    assert done.returncode == 0, done.stderr
    found = trial_result.load_run(tmp_path / "run")
    frame = trial_table.read_trials(found).frame.set_index(["precision", "options"])
    assert frame.loc[("int8", ""), "budget"] == "over"
    kept = next(t for t in found if t.options.get("keep"))
    assert frame.loc[("int8", f"keep={kept.options['keep']}"), "budget"] == "within"
    assert kept.made_by.kept[0].op == "Conv"
