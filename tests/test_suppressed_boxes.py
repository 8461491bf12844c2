"""Detectors with non-maximum suppression inside: boxes of equal scores come in any order, and wrong boxes are wrong."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import suppressing_net

pytestmark = pytest.mark.usefixtures("preloaded")

Call = Callable[..., tuple[int, str, str]]
Arrays = dict[str, np.ndarray]
QUICK = "--rounds 1 --seconds 0.03 --block 0.01 --warmup 0.01 --boundaries model --routes usual".split()
ENGINES = ("--backends", "onnxruntime,openvino")


def rows(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with open(folder / "results.csv", newline="") as f:
        return {(row["model"], row["backend"]): row for row in csv.DictReader(f)}


def stored(folder: Path, model: str, backend: str) -> Path:
    return folder / "trials" / rows(folder)[model, backend]["trial"] / "r0" / "outputs.npz"


def photos(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for k in range(5):
        pixels = np.kron(rng.integers(0, 256, (8, 8, 3)), np.ones((8, 8, 1))).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{k}.png")


@pytest.fixture
def run(call: Call, tmp_path: Path, unreported: None) -> Path:
    """Both kinds of outputs, with ONNX Runtime and OpenVINO, on random photographs."""
    files = [suppressing_net.write(tmp_path / f"{kind}.onnx", kind) for kind in suppressing_net.OUTPUTS]
    photos(tmp_path / "photos")
    code, _, errors = call("run", *files, *QUICK, *ENGINES, "--data", tmp_path / "photos", "--out", tmp_path / "run")
    assert code == 0, errors
    return tmp_path / "run"


def changed(run: Path, change: Callable[[Arrays], Arrays]) -> Path:
    """A copy of the run where OpenVINO's outputs of the file with separate outputs are others."""
    copy = run.with_name(f"{run.name}-{change.__name__}")
    shutil.copytree(run, copy)
    path = stored(copy, "separate", "openvino")
    np.savez(path, **change(dict(np.load(path))))
    return copy


def other_order(arrays: Arrays) -> Arrays:
    """The boxes of each image from the last to the first, as with labels or without."""
    ends = np.cumsum(arrays["rows:boxes"])
    order = np.concatenate([np.arange(a, b)[::-1] for a, b in zip([0, *ends[:-1]], ends, strict=True)])
    return {name: a[order] if name.startswith("output:") else a for name, a in arrays.items()}


def moved(arrays: Arrays) -> Arrays:
    """Every box a little to the right."""
    return {name: a + np.float32([2, 0, 2, 0]) if name == "output:boxes" else a for name, a in arrays.items()}


def renamed(arrays: Arrays) -> Arrays:
    """Every box with another label."""
    return {name: (a + 1) % suppressing_net.CLASSES if name == "output:labels" else a for name, a in arrays.items()}


def lost(arrays: Arrays) -> Arrays:
    """No boxes of the last image."""
    last = int(arrays["rows:boxes"][-1])
    kept = {name: a[:-last] if name.startswith("output:") else a for name, a in arrays.items()}
    return kept | {name: np.r_[a[:-1], 0] for name, a in arrays.items() if name.startswith("rows:")}


def empty(arrays: Arrays) -> Arrays:
    """No boxes at all."""
    kept = {name: a[:0] if name.startswith("output:") else a for name, a in arrays.items()}
    return kept | {name: a * 0 for name, a in arrays.items() if name.startswith("rows:")}


def test_ties_may_come_in_any_order_and_wrong_boxes_are_wrong(run: Path, call: Call) -> None:
    table = rows(run)
    assert {key: row["outputs"] for key, row in table.items() if row["outputs"]} == {
        ("separate", "openvino"): "agree", ("one", "openvino"): "agree",
    }  # fmt: skip
    both = [dict(np.load(stored(run, "separate", backend))) for backend in ("onnxruntime", "openvino")]
    scores = both[0]["output:scores"]
    assert len(np.unique(scores)) <= 3 and len(scores) > 50  # so nearly every box has a tie
    assert not any(name.startswith("topk") for arrays in both for name in arrays)  # boxes are no classes
    assert dict(np.load(stored(run, "one", "openvino")))["rows:boxes6"].sum() == len(scores)
    for change, verdict in [(other_order, "agree"), *((f, "wrong outputs") for f in (moved, renamed, lost, empty))]:
        copy = changed(run, change)
        code, out, _ = call("show", copy, "--format", "csv", "--table", "trials")
        by_trial = {(r["model"], r["backend"]): r for r in csv.DictReader(out.splitlines())}
        row = by_trial["separate", "openvino"]
        assert (code, row["outputs"]) == (0, verdict), change.__name__
        assert (row["verdict"].startswith("wrong outputs: ") and not row["speedup"]) == (verdict != "agree")
        code, out, _ = call("show", copy, "--format", "csv", "--table", "agreement")
        shares = {r["trial"].split()[0]: float(r["close"]) for r in csv.DictReader(out.splitlines())}
        assert shares["one"] == 1 and (shares["separate"] == 1) == (verdict == "agree"), change.__name__


def test_torchvision_s_detectors_run_one_image_at_a_time_and_as_onnx(
    call: Call, refused: Callable[..., str], tmp_path: Path, unreported: None
) -> None:
    name = "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn"
    line = refused("run", name, "--batch", "1,8", "--dry-run")
    assert "one image at a time; omit the batch, 8" in line
    photos(tmp_path / "photos")
    words = [*QUICK, "--size", 96, "--batch", 1, "--data", tmp_path / "photos", "--out", tmp_path / "run"]
    code, out, errors = call("run", name, *words, "--backends", "pytorch,onnxruntime")
    assert code == 0, out + errors
    table = {backend: row for (_, backend), row in rows(tmp_path / "run").items()}
    assert table["onnxruntime"]["outputs"] == "agree" and table["pytorch"]["status"] == "ok"
    assert table["onnxruntime"]["route"].startswith("torchscript")
    arrays = np.load(stored(tmp_path / "run", "fasterrcnn_mobilenet_v3_large_320_fpn", "onnxruntime"))
    assert arrays["rows:output"].sum() > 20  # random weights are made such that they find something
