"""`dyno explain`: a waterfall that closes, by module name, for forms, files and trials of a run."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dyno
import preloaded as forked
from drawn import photographs
from dyno.layers import causes, cures

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

QUICK = ("--rounds", 2, "--runs", 6, "--seconds", 0.03, "--warmup", 0.02, "--threads", 1)
# Every engine folds the batch norm and fuses the ReLU; the convolution "3" has most of the operations.
NET = """
from torch import nn

def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 17), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )
"""


def explained(call: Any, *words: object) -> dict[str, Any]:
    """Return the JSON of both tables after asserting that their steps close."""
    _, out, _ = call("explain", *words, "--format", "json", code=0)
    found: dict[str, Any] = json.loads(out)
    first, *steps, last = found["tables"]["waterfall"]["rows"]
    assert first["a_us"] + sum(step["difference_us"] for step in steps) == pytest.approx(last["b_us"])
    assert sum(step["a_us"] for step in steps) == pytest.approx(first["a_us"])
    assert sum(step["b_us"] for step in steps) == pytest.approx(last["b_us"])
    parts = found["tables"]["explained"]["rows"]
    measured = [step for step in steps if step["key"] not in ("interrupted", "between")]
    assert sum(part["difference_us"] for part in parts) == pytest.approx(sum(s["difference_us"] for s in measured))
    assert found["reasons"][0]["key"] == "gap" and found["reasons"][0]["text"].endswith(".")
    return found


def causes_of(found: dict[str, Any]) -> dict[str, str]:
    """Return the cause of each part, by the part's names."""
    return {part["modules"]: part["cause"] for part in found["tables"]["explained"]["rows"]}


@pytest.mark.parametrize(
    ("model", "size", "engine"),
    [("torchvision:resnet18", 64, "onnxruntime"), ("timm:test_vit", 160, "openvino")],
    ids=["resnet", "vit"],
)
def test_a_module_and_an_engine_are_explained(call: Any, model: str, size: int, engine: str) -> None:
    pytest.importorskip(model.partition(":")[0])
    causes = causes_of(explained(call, model, "pytorch", engine, "--size", size, "--top", 0, *QUICK))
    assert set(causes.values()) <= {
        "another kernel", "fused or left out in B", "a separate layer in B", "conversions of types and layouts",
        "the model's own code, and calling its parts",
    }  # fmt: skip
    assert causes["(model)"] == "the model's own code, and calling its parts"
    if engine == "onnxruntime":  # every batch norm and activation is fused into the convolution before it
        norms = {name for names in causes for name in names.split() if ".bn" in name or name == "bn1"}
        assert norms and all(causes[n] == "fused or left out in B" for n in causes if norms & set(n.split()))
        assert causes["conv1"] == causes["maxpool"] == causes["fc"] == "another kernel"


def test_a_stored_pair_gives_the_same_explanation_unmeasured(
    call: Any, net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = explained(
        call, net, "onnxruntime", "openvino", "--size", 32, *QUICK, "--save", "p.json", "--save", "p.svg", "--save",
        "p.png",
    )  # fmt: skip
    assert (tmp_path / "p.svg").read_text().startswith("<svg") and (tmp_path / "p.png").read_bytes()[1:4] == b"PNG"
    monkeypatch.setattr("dyno.runner.device_lock.launch", lambda *_, **__: pytest.fail("it measured"))
    again = explained(call, "p.json")
    assert causes_of(again) == causes_of(first)
    assert [r["key"] for r in again["reasons"]] == [r["key"] for r in first["reasons"]]
    code, text, _ = call("explain", "p.json", "--top", 1)
    assert code == 0 and "more parts" in text and "A: ONNX Runtime" in text and "B: OpenVINO" in text
    page = call("explain", "p.json", "--format", "html")[1]
    assert page.startswith("<!doctype html>") and "<svg" in page and "<li>OpenVINO takes" in page and "<table" in page
    assert call("explain", "p.json", "--format", "csv")[1].startswith("cause,key,parts,")
    assert "\n- OpenVINO takes" in call("explain", "p.json", "--format", "markdown")[1]


def test_two_files_and_two_builds_are_explained_from_python(
    call: Any, net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("export", net, "--size", "32", "-o", "n.onnx")[0] == 0
    (tmp_path / "copy.onnx").write_bytes((tmp_path / "n.onnx").read_bytes())
    monkeypatch.chdir(tmp_path)
    short = {"rounds": 2, "runs": 5, "seconds": 0.03, "warmup": 0.02, "threads": 1}
    files = dyno.explain("n.onnx", "copy.onnx", **short)
    assert {part.cause.key for part in files.waterfall.parts} == {"same", "conversion"}
    assert len(files.pair.a.processes) == len(files.pair.b.processes) == 2
    builds = dyno.explain("n.onnx", "onnxruntime", "onnxruntime@optimization=disable", top=3, **short)
    keys = {name: part.cause.key for part in builds.waterfall.parts for name in part.names}
    assert keys["2"] == "split"  # the ReLU is a separate node again
    assert list(builds.to_pandas().columns)[:2] == ["modules", "cause"] and len(builds.to_pandas()) == 4
    assert all(reason.text for reason in builds.reasons)


def test_int8_is_explained_by_types(call: Any, net: str, tmp_path: Path) -> None:
    photographs(tmp_path / "images", count=8, height=32, width=32)
    sides = ("onnxruntime", "onnxruntime/int8", "--size", 32, "--calibration", "images", "--top", 0)
    causes = causes_of(explained(call, net, *sides, *QUICK))
    assert next(causes[names] for names in causes if "3" in names.split()) == "a narrower type in B"
    assert "conversions of types and layouts" in causes.values()


def test_two_trials_of_a_run_are_explained(call: Any, refused: Any, dyno: Any, net: str) -> None:
    call("run", net, "--backend", "pytorch,onnxruntime,onnxruntime@optimization=basic", "--size", 32,
                        "--rounds", 1, "--seconds", 0.05, "--block", 0.01, "--warmup", 0.02, "--threads", 1,
                        "-o", "r", code=0)  # fmt: skip
    found = explained(call, "r", "pytorch", "onnxruntime", "--rounds", 1, "--runs", 5)
    assert sum(note.endswith(" ms.") and " in the run: " in note for note in found["tables"]["waterfall"]["notes"]) == 2
    assert causes_of(found)["1 2"] == "fused or left out in B"
    builds = explained(call, "r", "onnxruntime", "onnxruntime@optimization=basic", "--rounds", 1, "--runs", 5)
    assert builds["b"].endswith("optimization=basic")
    assert len(list(Path("r/explained").glob("*--*.json"))) == 2
    Path("r/explained/gone--never.json").write_text("of trials that were removed", encoding="utf-8")
    whole = {forked.UNREPORTED: ""}
    done = dyno("report", "r", env=whole)
    page = Path("r/report.html").read_text(encoding="utf-8")
    assert done.returncode == 0 and "Why is it faster, or not: 2 explained" in page, done.stderr
    assert page.count('<details class="layer-graph">') == 2 and page.count("cytoscape.js-dagre") == 1
    next(Path("r/explained").glob("*--*.json")).write_text("{", encoding="utf-8")
    assert dyno("report", "r", env=whole).returncode == 0
    assert "can&#39;t be read" in Path("r/report.html").read_text(encoding="utf-8")
    said = refused("explain", "r", "pytorch", "openvino")
    assert said.startswith("no trial of r is 'openvino'; there are pytorch/fp32")
    assert "are the same trial of r" in refused("explain", "r", "pytorch", "pytorch/fp32")
    said = refused("explain", "r", "pytorch", "onnxruntime", "--seconds", 1)
    assert said.startswith("seconds can't be given for a run")


def test_invalid_input_is_refused_in_one_line(refused: Any, net: str, tmp_path: Path) -> None:
    assert refused("explain", net).startswith("give a model and the two forms to explain")
    assert refused("explain", net, "a", "b", "c").startswith("give a model and the two forms to explain")
    assert refused("explain", net, "openvino/int8").startswith("give a model and the two forms to explain")
    assert refused("explain", net, "pytorch", "opnvino") == "unknown form 'opnvino'; did you mean 'openvino'?"
    assert refused("explain", net, "compile", "openvino").startswith("compile reports no layer times on cpu")
    assert refused("explain", net, "onnx", "openvino").startswith("an ONNX graph doesn't run by itself")
    assert refused("explain", net, "pytorch", "openvino", "--rounds", 0) == "rounds is 0; it must be at least 1"
    assert refused("explain", net, "pytorch", "openvino", "--runs", 4) == "runs is 4; it must be at least 5"
    assert refused("explain", net, "pytorch", "openvino", "--save", "x.pdf").startswith(
        "'x.pdf' can't be saved; end its name in one of .json"
    )
    (tmp_path / "folder").mkdir()
    assert refused("explain", "folder", "a", "b").startswith("folder is not a run folder")
    assert refused("explain", "no.json").startswith("no.json can't be read")
    for words in (("abc12", "def34"), ("pytorch", "openvino"), ("pytorch", "openvino", "--try"), ("a.onnx", "b.onnx")):
        for run in ("runs/demoo", "demoo"):
            said = refused("explain", run, *words)
            assert said.startswith(f"there is no file or folder {run}; give a model such as torchvision:resnet18")
            assert said.endswith("or a run's folder, such as runs/demo")
    assert refused("compare", "runs/demoo", "runs/other").startswith("there is no file or folder runs/demoo; give")
    (tmp_path / "odd.json").write_text("[1]", encoding="utf-8")
    assert refused("explain", "odd.json") == "odd.json can't be read: it is not a JSON object"


def test_forms_refused_by_a_library_are_reported_in_one_line(call: Any, half_known: Path) -> None:
    code, out, err = call("explain", half_known, "onnxruntime", "openvino", "--rounds", 1, "--runs", 5)
    said = err.splitlines()[-1]
    assert (code, out) == (2, "") and said.startswith("dyno: half openvino fp32: ") and said.endswith("Det-17")


def test_prescriptions_are_measured_against_b(call: Any, net: str, tmp_path: Path) -> None:
    photographs(tmp_path / "photos", count=6, height=32, width=32)
    asked = (net, "onnxruntime", "onnxruntime/int8", "--size", 32, "--calibration", "photos", *QUICK, "--try")
    found = explained(call, *asked)
    rows = found["tables"]["prescriptions"]["rows"]
    assert rows, "small layers have conversions around them"
    (folder,) = (tmp_path / "runs" / "explain").iterdir()
    assert len(dyno.load(folder).to_pandas()) >= len(rows) + 2, "A, B and each variant"
    for row in rows:
        assert row["cost_us"] > 0 and (row["speedup"] or row["verdict"]), row
        assert (row["kept"] == "yes") == (row["verdict"] == "faster" and row["outputs"] == "agree"), row
    kept = sum(row["kept"] == "yes" for row in rows)
    assert found["tried"][0] == f"{kept or 'None'} of {len(rows)} prescription{'s' * (len(rows) > 1)} helped."


def test_raw_pixels_are_tried_including_copies(call: Any, net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw pixels are for GPUs; a CPU also copies its inputs, and shows which boundary is measured."""
    (pixels,) = (one for one in cures.PRESCRIPTIONS if one.causes == (causes.COPYING,))
    assert pixels.fits("tensorrt", "fp16", "cuda:0", {}) and pixels.fits("pytorch", "fp16", "cuda:1", {"graph": True})
    assert not pixels.fits("tensorrt", "fp16", "cuda:0", {"input": "uint8"})
    assert not pixels.fits("onnxruntime", "fp32", "cpu", {})
    monkeypatch.setattr(cures, "PRESCRIPTIONS", (replace(pixels, devices=("cpu",)),))
    found = explained(call, net, "pytorch", "onnxruntime", "--size", 32, *QUICK, "--try")
    (row,) = found["tables"]["prescriptions"]["rows"]
    assert row["engine"] == "onnxruntime@input=uint8@precision=fp32" and row["outputs"] == "agree", row
    (folder,) = Path("runs/explain").iterdir()
    (b,) = (t for t in dyno.load(folder).records if t.backend == "onnxruntime" and not t.options)
    medians = {boundary: statistics.median(b.medians(boundary, "host")) for boundary in ("model", "all")}
    assert row["cost_us"] == pytest.approx(max(0.0, 1e6 * (medians["all"] - medians["model"])))
    assert row["speedup"] and {t.backend: len(t.medians("all")) for t in dyno.load(folder).records} == {
        "pytorch": 2, "onnxruntime": 2,
    }  # fmt: skip


def test_the_explanation_is_shown_and_saved_before_prescriptions_run(
    call: Any, net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(*asked: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dyno.layers.cures.try_cures", broken_off)
    asked = (
        net, "onnxruntime", "onnxruntime@optimization=disable", "--size", 32, *QUICK, "--try", "--save",
        "pair.json",
    )  # fmt: skip
    code, out, err = call("explain", *asked)
    assert code == 130 and "From A to B" in out and "prescription" not in out
    assert "the same command" not in err, "it would begin anew"
    assert dyno.explain(tmp_path / "pair.json").reasons


def test_forms_without_variants_are_refused_in_one_line(refused: Any, net: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    for words in (("m.onnx", "onnxruntime", "openvino"), (net, net), ("p.json",)):
        assert "--try makes variants" in refused("explain", *words, "--try")
