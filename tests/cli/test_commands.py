"""Small commands: `dyno data`, `dyno demo` and `dyno doctor`."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dyno import data
from dyno.cli import commands, demo, doctor
from dyno.jobs import telemetry
from dyno.worker import plugins, registry, system


def test_other_images_or_options_start_another_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(**changes: Any) -> Path:
        found: list[Path] = []
        with monkeypatch.context() as patch:
            patch.setattr(demo, "train", lambda *_, out, **__: found.append(out))
            for name, value in changes.items():
                patch.setattr(demo, name, value)
            demo.train_once()
        return found[0]

    usual = folder()
    assert folder() == usual
    assert folder(TRAINING_SETTINGS={"epochs": 9}) != usual
    # As decoded by another version of Dyno or Pillow.
    other = replace(data.prepare_digits(demo.cache_dir() / "datasets", demo.IMAGE_SIZE), sha256="another")
    monkeypatch.setattr(data, "prepare_digits", lambda *_: other)
    assert folder() != usual


def test_the_demo_tries_bf16_where_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, has_bf16 in (({"avx2", "avx512_bf16"}, True), ({"avx2"}, False), (set(), True)):
        monkeypatch.setattr(system, "cpu_flags", lambda flags=flags: flags)
        chosen = demo._list_backends()
        assert len(chosen) == len(demo.BACKENDS) and any("bf16" in each for each in chosen) == has_bf16
        assert "int8" in " ".join(chosen)


EXTENDING = Path(__file__).parents[2] / "docs/extending.md"


def test_doctor_prints_a_line_per_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(registry, "list_backends", lambda: ["fake"])
    assert doctor.doctor({}, "json") == 0
    said = capsys.readouterr()
    assert [row["backend"] for row in json.loads(said.out)["tables"]["doctor"]["rows"]] == ["fake"]
    assert said.err.startswith("1/1 fake: ok, ")


def test_an_interrupt_stops_all_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dyno doctor` once went on for 37 s after Ctrl-C."""

    def launch_endless_job(job: Any, folder: Path, timeout_s: float, tick: Any) -> None:
        while True:
            tick("import", 0.0)

    def interrupt(probes: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "list_backends", lambda: ["fake"] * 9)
    monkeypatch.setattr(doctor, "launch", launch_endless_job)
    monkeypatch.setattr(doctor, "_show_progress", interrupt)
    with pytest.raises(KeyboardInterrupt):
        doctor.examine({})


def test_a_library_without_byte_code_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "list_backends", lambda: ["fake"])
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert doctor.doctor({}, "json") == 0
    (row,) = json.loads(capsys.readouterr().out)["tables"]["doctor"]["rows"]
    assert row["detail"].startswith("scripted; ") and "have no byte-code" in row["detail"]


def test_libraries_are_listed_with_one_command_for_the_missing_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "list_backends", lambda: ["fake"])
    here = {"torch": "2.8.0+cpu", "timm": "1.0.20", "onnxruntime-gpu": "1.23.0", "opencv-python-headless": "4.12.0"}
    here |= dict.fromkeys(
        "jinja2 matplotlib squarify pillow pycocotools pyyaml scikit-learn av safetensors".split(), "1"
    )

    def versions(names: Iterable[str]) -> dict[str, str]:
        return {name: here[name] for each in names for name in each.split("|") if name in here}

    for module in (doctor.system, doctor.extras):
        monkeypatch.setattr(module, "find_versions", versions)
    assert doctor.doctor({}, "text") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "libraries here: torch 2.8.0+cpu, timm 1.0.20, safetensors 1, onnxruntime-gpu 1.23.0" in said
    missing = "not installed: torchvision, onnx, onnxscript, onnxconverter-common, onnxslim, openvino;"
    assert f"{missing} pip install 'inference-dyno[onnx_files,openvino,torch]' torch==2.8.0" in said


def test_a_broken_entry_point_of_every_documented_group_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    groups = re.findall(r"^\| `(dyno\.\w+)` \|", EXTENDING.read_text(), re.MULTILINE)
    assert len(groups) > 8
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    points = [f"[{group}]\ngone_{i} = no_such_module:X\nother_{i} = math:pi" for i, group in enumerate(groups)]
    (info / "entry_points.txt").write_text("\n".join(points))
    monkeypatch.syspath_prepend(tmp_path)
    for cached in ("_load_group", "_read_entry_points"):
        monkeypatch.setattr(plugins, cached, getattr(plugins, cached).__wrapped__)
    monkeypatch.setattr(registry, "list_backends", lambda: ["fake"])
    assert doctor.doctor({}, "json") == 0
    rows = {row["backend"]: row for row in json.loads(capsys.readouterr().out)["tables"]["doctor"]["rows"]}
    for i, group in enumerate(groups):
        gone, other = rows[f"gone_{i}"], rows[f"other_{i}"]
        assert gone["status"] == other["status"] == "broken"
        assert gone["detail"].startswith(f"an entry point of {group} that can't be loaded: ")
        assert other["detail"].startswith(f"an entry point of {group} that is float, not ")


# Last: commands below are forked.


@pytest.mark.usefixtures("preloaded", "unreported")
def test_imagenet_val(tmp_path: Path, dyno) -> None:
    (tmp_path / "flat").mkdir()
    for name in ("ILSVRC2012_val_00000001_n01751748.JPEG", "ILSVRC2012_val_00000002_n01440764.JPEG"):
        (tmp_path / "flat" / name).write_bytes(b"an image")
    done = dyno("data", "imagenet-val", "flat", "-o", "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "2 images of 2 classes are in out/val\n"
    assert (tmp_path / "out/val/n01440764/ILSVRC2012_val_00000002_n01440764.JPEG").read_bytes() == b"an image"
    (tmp_path / "flat/ILSVRC2012_val_00000003.JPEG").write_bytes(b"another")
    done = dyno("data", "imagenet-val", "flat", "-o", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "2 images of 2 classes are in out/val, 2 of them before\n")
    assert done.stderr == "dyno: left 1 image without a label in flat: ILSVRC2012_val_00000003.JPEG\n"
    done = dyno("data", "imagenet-val", "flat", "-o", "out", "--copy", "--move", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "dyno: --copy and --move can't be used together\n")


@pytest.mark.usefixtures("unreported")
def test_run_prints_its_answer_as_json(call: Any) -> None:
    words = ("run", "fake:net", "--channels", 1, "--backend", "fake", "--quick", "--out", "r")
    _, out, err = call(*words, "--format", "json", code=0)
    assert json.loads(out) == json.loads(call("show", "r", "--format", "json", code=0)[1])
    assert "dyno: report: r/report.html" in err
    assert call(*words, "--format", "csv", code=0)[1] == call("show", "r", "--format", "csv", code=0)[1]
    assert "fake fp32" in call(*words, code=0)[1], "and in words as ever"
    said = call(*words, "--dry-run", "--format", "json", code=2)[2]
    assert said == "dyno: --dry-run lists the trials in text alone; omit --format and --log, or --dry-run\n"


def test_run_checks_for_other_programs_first(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("run", "fake:net", "--channels", 1, "--backend", "fake", "--quick", "--out", "r")
    monkeypatch.setattr(commands, "run_study", lambda *_, **__: 0)
    assert call(*words) == (0, "", ""), "off a terminal nothing is looked at"
    looks = iter([1.6, 1.2, 0.1])
    monkeypatch.setattr(telemetry, "count_busy", lambda seconds: next(looks))
    monkeypatch.setattr(commands, "POLL_INTERVAL_S", 0.0)
    lines = call(*words, "--wait", code=0)[2].splitlines()
    assert len(lines) == 2 and lines[0].startswith("dyno: 1.6 of ") and "waiting, for 10 minutes at most" in lines[0]
    monkeypatch.setattr(telemetry, "count_busy", lambda seconds: 1.6)
    monkeypatch.setattr(commands, "MAX_WAIT_S", 0.0)
    assert call(*words, "--wait", code=0)[2].splitlines()[-1].endswith("so latencies may differ from a quiet machine's")
