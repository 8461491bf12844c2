"""Measuring a pack's study again: requirements, and agreement of both verdicts."""

import dataclasses
import hashlib
import json
import math
import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dyno
import synthetic
from dyno import Study, api
from dyno.packs.reproduction import KEPT_FIELDS, REPLACED_FIELDS, RatioPair
from dyno.study.defaults import QUICK_SETTINGS
from dyno.worker.record import write_json
from synthetic import Way

PYTORCH, ONNX = Way("pytorch", seconds=0.004), Way("onnxruntime", seconds=0.002)
STUDY = 'models = ["torchvision:digits"]\nbackends = ["pytorch", "onnxruntime"]\nsizes = ["64"]\n'


def stored(folder: Path, ways: Sequence[Way], seed: int = 0, study: str = STUDY) -> Path:
    synthetic.write_run(folder, list(ways), seed)
    (folder / "study.toml").write_text(study)
    return folder


@pytest.fixture
def reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Pack the trials `pack`, reproduce with `here` as the measurement; returns exit code and answer."""

    def run(pack: Sequence[Way], here: Sequence[Way], **environment: Any) -> tuple[int, dict[str, Any]]:
        file = dyno.pack(stored(tmp_path / "net", pack), tmp_path / "net.zip")
        measured = stored(tmp_path / "there", here, seed=1)
        write_json(measured / "environment.json", {**synthetic.ENVIRONMENT, **environment})
        monkeypatch.setattr(api, "run", lambda *_, **__: api.Result(measured))
        code, out, _ = call("reproduce", file, "-y", "--format", "json", "--out", tmp_path / "there")
        return code, json.loads(out)

    return run


def test_the_same_answer_is_reproduced(reproduced: Any) -> None:
    other = {"cpu": "Another CPU", "memory_bytes": 16e9, "versions": {"torch": "2.11.0"}}
    code, answer = reproduced([PYTORCH, ONNX], [PYTORCH, ONNX], **other)
    assert (code, answer["outcome"]) == (0, "reproduced")
    (pair,) = answer["ratios"]
    assert pair["configuration"] == "onnxruntime fp32" and pair["reference"] == "pytorch fp32"
    for low, value, high in (pair["pack"], pair["here"]):
        assert low <= value <= high and math.isclose(value, 2, rel_tol=0.05), "0.004 s over 0.002 s"
    (ranking,) = [each for each in answer["rankings"] if each["by"] == "latency"]
    assert ranking["pack"] == ranking["here"] == ["onnxruntime fp32"] and ranking["agrees"]
    assert answer["differences"] == {
        "cpu": {"pack": "Synthetic CPU", "here": "Another CPU"},
        "memory_bytes": {"pack": 8 << 30, "here": 16e9},
        "inference-dyno": {"pack": "0.1.0", "here": None},
    }
    what = (
        "cpu Synthetic CPU (here Another CPU); memory 8.59 GB (here 16.0 GB); inference-dyno 0.1.0 (here not installed)"
    )
    assert answer["sentences"][-1] == f"What differs: {what}."
    assert answer["sentences"][0].startswith("reproduced: ")


def test_another_winner_is_not_reproduced(reproduced: Any) -> None:
    code, answer = reproduced([PYTORCH, ONNX], [PYTORCH, Way("onnxruntime", seconds=0.006)])
    assert (code, answer["outcome"]) == (1, "not reproduced")
    assert not answer["rankings"][0]["agrees"] and answer["rankings"][0]["here"] == ["pytorch fp32"]


def test_another_ratio_is_not_reproduced(reproduced: Any) -> None:
    code, answer = reproduced([PYTORCH, ONNX], [PYTORCH, Way("onnxruntime", seconds=0.001)])
    assert code == 1 and answer["rankings"][0]["agrees"] and not answer["ratios"][0]["agrees"]
    assert any("a difference larger than the noise of both" in sentence for sentence in answer["sentences"])


def test_unavailable_trials_are_listed(reproduced: Any) -> None:
    openvino = Way("openvino", seconds=0.003)
    skipped = Way("openvino", statuses=("skipped",), reason="openvino isn't installed")
    code, answer = reproduced([PYTORCH, ONNX, openvino], [PYTORCH, ONNX, skipped])
    assert code == 0 and "openvino isn't installed" in next(iter(answer["unavailable"].values()))


def test_a_failed_trial_is_unfinished(reproduced: Any) -> None:
    failed = Way("onnxruntime", statuses=("crashed",), reason="killed by SIGSEGV")
    code, answer = reproduced([PYTORCH, ONNX], [PYTORCH, failed])
    assert code == 3 and "SIGSEGV" in next(iter(answer["failed"].values()))


ONCE = [Way("pytorch", statuses=("ok",)), Way("onnxruntime", seconds=0.002, statuses=("ok",))]


def test_one_round_is_too_little_evidence(reproduced: Any) -> None:
    code, answer = reproduced([PYTORCH, ONNX], ONCE)
    assert (code, answer["outcome"]) == (3, "undecided")
    assert answer["rankings"][0]["agrees"] is None and "not both runs name one winner" in " ".join(answer["sentences"])
    assert answer["ratios"][0]["agrees"] is None and "too little evidence" in " ".join(answer["sentences"])


@pytest.mark.parametrize(
    ("here", "agrees"),
    [((0.2, 1.5, 12.0), None), ((1.9, 2.0, 2.1), True), ((3.0, 8.0, 20.0), False), ((0.1, 0.4, 1.7), False)],
)
def test_a_wide_interval_agrees_with_nothing(here: tuple[float, float, float], agrees: bool | None) -> None:
    assert RatioPair("net", "onnxruntime fp32", "pytorch fp32", (1.8, 2.0, 2.2), here).agrees is agrees


def test_two_runs_without_a_winner_are_undecided(reproduced: Any) -> None:
    """Two ties agree about nothing, and ratios of one round can't be compared."""
    code, answer = reproduced(ONCE, ONCE)
    assert (code, answer["outcome"]) == (3, "undecided")
    assert re.fullmatch(
        r"undecided: 0 of \d rankings? and 0 of 1 ratio agree, \d can't be compared; pack a run of 3 or more rounds, "
        r"and reproduce it on an idle machine\.",
        answer["sentences"][0],
    )
    assert all(each["agrees"] is None for each in (*answer["rankings"], *answer["ratios"]))


NET = "import torch\n\n\ndef build():\n    return torch.nn.ReLU()\n"


def test_a_model_file_comes_from_the_user(refused: Any, tmp_path: Path) -> None:
    """A pack has only the model's hash; a missing or different file is refused before measuring."""
    folder = stored(tmp_path / "net", [PYTORCH, ONNX], study=STUDY.replace("torchvision:digits", "/nets/net.py:build"))
    (tmp_path / "net.py").write_text(NET)
    for path in folder.rglob("job.json"):
        job = json.loads(path.read_text())
        job["trial"]["model"] |= {
            "source": "/nets/net.py:build", "source_sha256": hashlib.sha256(NET.encode()).hexdigest(),
        }  # fmt: skip
        path.write_text(json.dumps(job))
    file = dyno.pack(folder, tmp_path / "net.zip")
    assert "'net.py:build' with sha256 " in refused("reproduce", file, "-y")
    (tmp_path / "other.py").write_text(NET + "#")
    said = refused("reproduce", file, "-y", "--model", tmp_path / "other.py")
    assert re.search(r"other\.py has [0-9a-f]{12}…: give it with --model", said)
    assert "is not a model of the pack" in refused(
        "reproduce", file, "-y", "--model", tmp_path / "net.py", "--model", tmp_path / "other.py"
    )
    with pytest.raises(dyno.UserError, match="nothing was run"):
        dyno.reproduce(file, model=tmp_path / "net.py", confirm=lambda plan: "net.py:build with pytorch" not in plan)


def test_models_with_one_file_name_are_distinguished(refused: Any, tmp_path: Path) -> None:
    """Models match by hash; once, half of the study was skipped and still counted as reproduced."""
    given = [str(tmp_path / name / "net.py") for name in "ab"]
    models = f"models = {json.dumps([f'{path}:build' for path in given])}\n"
    folder = stored(tmp_path / "net", [PYTORCH, ONNX], study=models + STUDY.partition("\n")[2])
    for path in folder.rglob("job.json"):
        job = json.loads(path.read_text())
        file = Path(given[job["trial"]["backend"] == "onnxruntime"])
        file.parent.mkdir(exist_ok=True)
        file.write_text(NET + f"# {file}")
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        job["trial"]["model"] |= {"source": f"{file}:build", "source_sha256": sha256}
        path.write_text(json.dumps(job))
    pack = dyno.pack(folder, tmp_path / "net.zip")
    for path in given:
        assert "'net.py:build' with sha256 " in refused("reproduce", pack, "-y", "--model", path)
    plans = list[str]()
    with pytest.raises(dyno.UserError, match="nothing was run"):
        dyno.reproduce(pack, model=given[::-1], confirm=lambda plan: bool(plans.append(plan)))
    assert all(f"{path}:build" in plans[0] for path in given)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('weights = "/x/w.pt"', "a study with weights can't be reproduced"),
        ('inputs = ["a=feeds.npz"]', "a study with inputs can't be reproduced"),
        ('data = "/x/photos"', "give their folder with --data"),
        ('models = ["os:system"]', "no hash of its model"),
        ('backends = ["nosuch"]', "this Dyno has no such backend"),
        ('backends = ["onnxruntime@provider=/x/lib.so"]', "its options name a file"),
        ('backends = ["pytorch"]\nruntime = {pytorch = {python = "/x/python"}}', "another Python"),
    ],
)
def test_untrusted_settings_are_refused(refused: Any, tmp_path: Path, change: str, said: str) -> None:
    name = change.partition(" ")[0]
    lines = [line for line in STUDY.splitlines() if not line.startswith(name)]
    folder = stored(tmp_path / "net", [PYTORCH, ONNX], study="\n".join([*lines, change]) + "\n")
    assert said in refused("reproduce", dyno.pack(folder, tmp_path / "net.zip"), "-y")


def test_other_images_are_refused_before_measuring(
    refused: Any, fake_study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One changed pixel makes them other images."""
    for name, value in (("photos", 10), ("changed", 11)):
        for label in ("cat", "dog"):
            (tmp_path / name / label).mkdir(parents=True)
            for number in range(2):
                image = np.full((8, 8, 3), 10 if (label, number) != ("dog", 1) else value, np.uint8)
                Image.fromarray(image).save(tmp_path / name / label / f"{number}.png")
    study = fake_study(backends=("fake@latency_ms=1",), rounds=1, samples=5, data=str(tmp_path / "photos"))
    dyno.run(study, tmp_path / "net", quiet=True)
    file = dyno.pack(tmp_path / "net", tmp_path / "net.zip")
    monkeypatch.setattr(api, "run", lambda *_, **__: pytest.fail("it ran"))
    said = refused("reproduce", file, "-y", "--data", tmp_path / "changed")
    hashes = re.fullmatch(
        r".*changed has other images \(sha256 ([0-9a-f]{12})…\) than the pack \(sha256 ([0-9a-f]{12})…\); .* --data",
        said,
    )
    assert hashes and hashes[1] != hashes[2]
    assert "give their folder with --data" in refused("reproduce", file, "-y")
    assert "no data folder" in refused("reproduce", file, "-y", "--data", tmp_path / "nowhere")


def test_only_settings_that_name_files_are_refused() -> None:
    names = {field.name for field in dataclasses.fields(Study)}
    assert names - {*KEPT_FIELDS, *REPLACED_FIELDS} == {"weights", "calibration", "inputs", "baseline"}


def test_unverified_packs_are_not_run(refused: Any, tmp_path: Path) -> None:
    file = dyno.pack(stored(tmp_path / "net", [PYTORCH, ONNX]), tmp_path / "net.zip")
    assert "omit --data" in refused("reproduce", file, "-y", "--data", tmp_path)
    assert "add -y" in refused("reproduce", file)
    with zipfile.ZipFile(file) as packed:
        content = {name: packed.read(name) for name in packed.namelist()}
    verdict = json.loads(content["verdict.json"])
    verdict["rows"][0]["latency_ms"] *= 2
    with zipfile.ZipFile(file, "w") as packed:
        for name, data in {**content, "verdict.json": json.dumps(verdict).encode()}.items():
            packed.writestr(name, data)
    assert "is not verified, so it isn't run" in refused("reproduce", file, "-y")


def test_reproduce_runs_the_study_again(
    fake_study: Callable[..., Study], call: Any, tmp_path: Path, unreported: None
) -> None:
    """Through the command line, with jobs and the pack's settings."""
    settings = QUICK_SETTINGS | {"rounds": 2, "samples": 5}
    study = fake_study(backends=("fake@latency_ms=1", "fake@latency_ms=4"), **settings)
    dyno.run(study, tmp_path / "net", quiet=True)
    code, out, err = call("reproduce", dyno.pack(tmp_path / "net", tmp_path / "net.zip"), "-y")
    assert code in (0, 1, 3), err
    assert Study.from_toml("runs/net-reproduced/study.toml") == study and "What differs: nothing" in out
    assert re.search(r"fake@latency_ms=4 fp32 over fake@latency_ms=1 fp32: ", out)
