"""Darknet's files from the command line: measured on several engines, exported, taken, and refused in one line."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from darknet_files import write

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")
QUICK = "--rounds 1 --seconds 0.05 --block 0.01 --warmup 0.02 --routes usual".split()


def test_a_detector_gives_the_same_boxes_on_every_engine_and_can_be_taken(dyno: Any, tmp_path: Path) -> None:
    cfg, weights = write(tmp_path, "yolov4-tiny")
    backends = "pytorch,onnxruntime,openvino"
    done = dyno("run", cfg.name, "--weights", weights, "--backend", backends, *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "runs/yolov4-tiny/results.csv").open(newline="") as file:
        rows = {row["backend"]: row for row in csv.DictReader(file)}
    assert [row["status"] for row in rows.values()] == ["ok"] * 3 and {row["size"] for row in rows.values()} == {
        "64x96"
    }
    assert all(row["outputs"] == "agree" for name, row in rows.items() if name != "pytorch")
    done = dyno("export", "runs/yolov4-tiny", "pytorch/fp32", "-o", "best", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    script = subprocess.run([sys.executable, "best.py"], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert "output float32 1x6x" in script.stdout, script.stderr


def test_what_can_t_be_is_one_line(dyno: Any, tmp_path: Path) -> None:
    cfg, weights = write(tmp_path, "yolov3-tiny")
    weights.write_bytes(weights.read_bytes()[:-400])
    for words, message in (
        ((cfg.name, "--weights", weights.name), "where 572 are left"),
        ((cfg.name, "--size", "100"), "multiples of 16, not 100x100; try --size 96"),
        (("absent.cfg",), "absent.cfg can't be read"),
        (("torchvision:resnet18", "--weights", weights.name), "need the .cfg"),
    ):
        done = dyno("run", *words, *QUICK, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
