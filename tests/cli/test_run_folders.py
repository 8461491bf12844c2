"""`dyno runs` and `dyno report`: their output, and removal of nothing but a run folder's files."""

import json
import os
import re
import shutil
import sys
import webbrowser
from pathlib import Path
from typing import Any

import pytest
import typer

import synthetic
from dyno import load
from dyno.cli import commands
from dyno.store import Run
from synthetic import Way


@pytest.fixture(scope="module")
def measured(fake_study: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder with two good trials, a failed and a skipped one."""
    backends = ("fake@latency_ms=0.1", "fake@latency_ms=5", "fake@fail=exception", "fake@precision=fp8")
    folder = tmp_path_factory.mktemp("measured") / "one"
    fake_study(backends=backends, models=("fake:[net]",)).run(folder, quiet=True)
    return folder


@pytest.fixture
def run(measured: Path, call: Any) -> Path:
    """Copy of the run at runs/one; the current folder holds runs/."""
    return Path(shutil.copytree(measured, "runs/one"))


def test_runs_are_listed(call: Any, refused: Any, run: Path) -> None:
    Path("runs/time/deep").mkdir(parents=True)
    run.rename("runs/time/deep/one")
    Path("runs/link").symlink_to(Path("runs/time").resolve())
    Path("runs/empty").mkdir()
    for words in ((), ("runs/time/deep",)):
        code, out, err = call("runs", "list", *words)
        assert (code, err) == (0, "")
        (line,) = [each for each in out.splitlines() if "[net]" in each]
        assert line.startswith("runs/time/deep/one") and "[net]" in line
        assert "2 ok, 1 failed, 1 skipped" in line and "fake@latency_ms=0.1 fp32 or 1 more, 0.1" in line, "of one round"
    (row,) = json.loads(call("runs", "list", "--format", "json")[1])["tables"]["runs"]["rows"]
    assert (row["run"], row["models"], row["trials"]) == ("runs/time/deep/one", "[net]", "2 ok, 1 failed, 1 skipped")
    assert call("runs", "list", "runs/empty") == (0, "no run folder below runs/empty\n", "")
    assert json.loads(call("runs", "list", "runs/empty", "--format", "json")[1])["tables"]["runs"]["rows"] == []
    assert refused("runs", "list", "nowhere").startswith("there is no folder nowhere; `dyno run` creates runs/")


def test_possible_winners_are_all_listed(call: Any, tmp_path: Path) -> None:
    """Equally fast or undecided trials are all named."""
    for name, others in (("alone", [0.008, 0.009]), ("several", [0.004, 0.00401, 0.009])):
        ways = [Way(f"x{k}", seconds=seconds) for k, seconds in enumerate([0.004, *others])]
        synthetic.write_run(tmp_path / "runs" / name, ways, samples=40, count=50)
    found = json.loads(call("runs", "list", "runs", "--format", "json")[1])["tables"]["runs"]["rows"]
    said = {row["run"]: row["fastest"].partition(",")[0] for row in found}
    assert said["runs/alone"] == "x0 fp32" and re.fullmatch(r"x\d fp32 or 2 more", said["runs/several"])


def test_unmeasured_trials_are_not_failures(call: Any, run: Path) -> None:
    waiting = next(t for t in load(run).records if t.status == "ok")
    for record in (run / "trials" / waiting.id).glob("*/record.json"):
        record.unlink()
    assert "1 ok, 1 failed, 1 skipped, 1 unfinished" in call("runs", "list")[1]
    out = call("show", run)[1]
    assert "not measured so far" in call("show", run, "--columns", "reason", "--format", "csv")[1]
    assert "unfinished: " not in out, "its verdict says so"
    assert "1 of 4 trials was not measured so far." in out and "1 of 4 trials did not finish: 1 failed (" in out


def test_models_not_started_are_named(call: Any, run: Path) -> None:
    """A stopped study has no rows of the remaining models."""
    assert "not started" not in call("show", run)[1]
    text = (run / "study.toml").read_text()
    (run / "study.toml").write_text(text.replace('models = ["fake:[net]"', 'models = ["fake:[net]", "fake:other"'))
    assert "1 of 2 models was not started: fake:other; the same command continues." in call("show", run)[1]


def test_unfinished_blocks_are_read(call: Any, refused: Any, run: Path) -> None:
    """A killed or running study on several devices has its trials in its blocks' folders."""
    shutil.copytree(run, run / "blocks/b0")
    shutil.rmtree(run / "trials")
    (run / "trials").mkdir()
    assert "2 ok, 1 failed, 1 skipped" in call("runs", "list")[1] and "blocks" not in call("runs", "list")[1]
    shown = load(run).records
    assert [t.status for t in shown].count("ok") == 2
    (log,) = [t.log for t in shown if t.log]
    assert (run / log).is_file()
    call("report", run)
    assert f'href="{Path(log).parents[1]}' in (run / "report.html").read_text()
    assert "was measured with" in refused("run", run / "study.toml", "--out", run, "--seconds", "3")
    shutil.rmtree(run / "blocks")
    assert "none yet" in call("runs", "list")[1]


def test_trials_are_removed_by_id_prefix(call: Any, refused: Any, run: Path) -> None:
    ids = [t.id for t in load(run).records]
    assert "no trials of runs/one have an id that begins with 'zz'; its ids are " in refused("runs", "rm", run, "zz")
    assert "4 trials" not in refused("runs", "rm", run, ids[0], "") and len(load(run).records.trials) == 4
    code, out, _ = call("runs", "rm", run, ids[0][:8], ids[1])
    assert code == 0 and out.startswith(f"removed runs/one/trials/{ids[0]}\n")
    assert {t.id for t in load(run).records} == set(ids[2:])


def test_a_trial_is_removed_by_its_backend_and_precision(call: Any, refused: Any, run: Path) -> None:
    trials = list(load(run).records)
    one = next(t for t in trials if [u.variant for u in trials].count(t.variant) == 1)
    code, out, _ = call("runs", "rm", run, f"{one.variant}/{one.precision}")
    assert code == 0 and out.startswith(f"removed runs/one/trials/{one.id}\n")
    assert {t.id for t in load(run).records} == {t.id for t in trials} - {one.id}
    said = refused("runs", "rm", run, "fake/fp32")
    assert said.startswith("'fake/fp32' fits several trials of runs/one; choose them by their ids: ")
    assert all(f"{t.id} ({t.label})" in said for t in trials if t is not one and t.precision == "fp32")


def test_only_files_written_by_dyno_are_removed(call: Any, refused: Any, run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "photo").write_text("mine")
    (run / "trials/aaaa").symlink_to(outside)
    Path("link").symlink_to(run.resolve())
    assert refused("runs", "rm", "link") == "link is a symbolic link, which is not followed; give the folder itself"
    assert refused("runs", "rm", "link/").startswith("link is a symbolic link")
    assert refused("runs", "rm", run, "aaaa").startswith("no trials of runs/one have an id that begins with 'aaaa'")
    assert refused("runs", "rm", "runs") == (
        "runs is not a run folder: study.toml or trials/ is missing; the run folders in it: runs/one"
    )
    assert refused("runs", "rm", "precious").startswith("precious is not a run folder") and (outside / "photo").exists()
    assert refused("runs", "rm", "nowhere") == "nowhere does not exist"
    assert refused("runs", "rm", run / "study.toml") == "runs/one/study.toml is not a folder"
    (run / "notes.txt").write_text("mine")
    code, out, _ = call("runs", "rm", run)
    assert (code, out) == (0, "removed what Dyno wrote into runs/one; kept files that Dyno did not write: notes.txt\n")
    assert [path.name for path in run.iterdir()] == ["notes.txt"] and (outside / "photo").read_text() == "mine"


def test_a_run_in_use_is_not_removed(call: Any, refused: Any, run: Path) -> None:
    with Run(run).hold_lock():
        said = refused("runs", "rm", run)
        assert said == f"runs/one is in use by another dyno (process {os.getpid()}); wait for it", "it has no --out"
    assert call("runs", "rm", run) == (0, "removed runs/one\n", "") and not run.exists()


def test_a_run_in_progress_is_reported(call: Any, refused: Any, run: Path) -> None:
    says = f"This is the answer so far: process {os.getpid()} is measuring this run."
    shutil.rmtree(run / "trials" / next((run / "trials").iterdir()).name)
    with Run(run).hold_lock():
        assert says in call("show", run)[1].splitlines()
        shutil.copytree(run / "trials", "kept")
        for record in run.glob("trials/*/*/record.json"):
            record.unlink()
        assert f"  next: wait: process {os.getpid()} is measuring this run" in call("show", run)[1].splitlines()
        shutil.rmtree(run / "trials")
        Path("kept").rename(run / "trials")
        assert says in json.loads(call("show", run, "--format", "json")[1])["verdict"]
        shutil.rmtree(run / "trials")
        (run / "trials").mkdir()
        assert refused("show", run) == f"runs/one has no trials yet; process {os.getpid()} is measuring this run"
    assert refused("show", run) == "runs/one has no trials yet; run the study first"


def test_the_latest_run_is_shown(call: Any, run: Path) -> None:
    shutil.copytree(run, "runs/two")
    os.utime(run / "study.toml", (2e9, 2e9))
    _, out, err = call("show", "--format", "csv", code=0)
    assert err.startswith("dyno: runs/one, the latest run\n") and out == call("show", run, "--format", "csv")[1]


def test_removal_asks_for_confirmation_on_a_terminal(call: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda question: next(answers))
    assert call("runs", "rm", run)[1] == "" and run.exists()
    assert call("runs", "rm", run)[1] == "removed runs/one\n"


def test_a_report_is_opened_on_a_terminal(call: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert call("report", run)[:2] == (0, "runs/one/report.html\n") and not opened
    monkeypatch.setattr(commands, "is_terminal", lambda: True)
    assert call("report", run, "--no-open")[0] == 0 and not opened
    assert call("report", code=0)[1] == "runs/one/report.html\n"
    assert opened == [(Path.cwd() / "runs/one/report.html").as_uri()]

    def none(url: str) -> bool:
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(webbrowser, "open", none)
    assert call("report", run)[:2] == (0, "runs/one/report.html\n")


def test_a_joint_report_does_not_replace_the_report_of_a_run(refused: Any, run: Path) -> None:
    shutil.copytree(run, "runs/two")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for words in (("runs/one", "runs/two"), ("runs/two", "-o", "runs/one")):
        assert refused("report", *words) == (
            "runs/one is a run folder with its own report and results.csv; give another folder with -o"
        )
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_failed_row_names_its_log(call: Any, run: Path) -> None:
    _, out, _ = call("show", run)
    line, _ = (line for line in out.splitlines() if "scripted failure" in line)  # once below the table, once at the end
    log = line.rpartition("; log: ")[2]
    assert log.startswith("trials/") and "RuntimeError: scripted failure" in (run / log).read_text()
    assert "log:" not in next(line for line in out.splitlines() if "has no fp8" in line)


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "serve", "nosuch.onnx", "--p99", "20ms", "-o", "new"),
        ("bench", "video", "frame.png", "out.png", "--model", "nosuch.onnx", "-o", "new"),
    ],
)
def test_a_mistyped_model_leaves_no_folder(call: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "frame.png").touch()
    (tmp_path / "old").mkdir()
    for folder in ("new", "old"):
        assert "there is no model file nosuch.onnx" in call(*words[:-1], folder, code=2)[2]
    assert not (tmp_path / "new").exists() and (tmp_path / "old").is_dir(), "what was there before is somebody's own"
