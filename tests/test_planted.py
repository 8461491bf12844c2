"""A wrong graph planted in each backend is never ranked, however fast it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import planted_backends

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

PLANTED = ("ChangedWeight", "ChangedBlob", "OtherBranch")
TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_planted_graph_is_said_first_and_never_ranked(dyno: Any, tmp_path: Path, precision: str) -> None:
    (tmp_path / "net.py").write_text(planted_backends.NET)
    photos = tmp_path / "photos"
    photos.mkdir()
    rng = np.random.default_rng(0)
    for k in range(12):
        pixels = rng.integers(0, 256, (4, 4, 3), np.uint8).repeat(8, 0).repeat(8, 1)
        Image.fromarray(pixels).save(photos / f"{k}.png")
    planted = [
        f"planted_backends:{name}@precision={'fp32' if name == 'OtherBranch' else precision}" for name in PLANTED
    ]
    honest = ["pytorch@precision=fp32", f"onnxruntime@precision={precision}", f"openvino@precision={precision}"]
    words = ("--data", photos, "--size", 32, "--rounds", 1, "--seconds", 0.05, "--block", 0.01,
             "--warmup", 0.02, "--routes", "usual", "--out", tmp_path / "r")  # fmt: skip
    environment = {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    done = dyno(
        "run", f"{tmp_path / 'net.py'}:net", "--backends", ",".join([*honest, *planted]), *words, env=environment
    )
    assert done.returncode == 3, done.stderr
    shown = dyno("show", tmp_path / "r", "--format", "csv", env=environment)
    import csv
    import io

    rows = {row["backend"]: row for row in csv.DictReader(io.StringIO(shown.stdout))}
    for name in PLANTED:
        row = rows[f"planted_backends:{name}"]
        assert row["status"] == "ok" and row["outputs"] == "wrong outputs", row
        assert row["speedup"] == "" and row["verdict"].startswith("wrong outputs: off by")
    assert {rows[name]["outputs"] for name in ("onnxruntime", "openvino")} == {"agree"}
    verdict = done.stdout[done.stdout.index("gave wrong outputs") :]
    assert not any(f"fastest is planted_backends:{name}" in verdict for name in PLANTED)
