"""Studies end with every trial measured once, despite kills, failures, damaged files and concurrent studies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dyno import Study, UserError
from dyno.jobs.progress import Progress
from dyno.results import timeline
from dyno.runner import ensemble, run_folder
from dyno.runner.execute import Files, execute
from dyno.store import Cache, Run
from dyno.study.plan import PlannedTrial, expand
from dyno.worker import registry
from dyno.worker.record import Record, read_record, write_record
from dyno.worker.spec import Artifact, DataSpec, Dims, ModelSpec, Trial
from logged import Log
from waiting import until


def run(study: Study, folder: Path) -> Log:
    log = Log()
    execute(study, folder, log)
    return log


def rebuild_reasons(log: Log) -> list[str]:
    """Return the reason why each file was made again, or ""."""
    return [wrong for _, wrong in log.files]


def records(folder: Path) -> dict[str, tuple[int, str]]:
    """Return modification time and text of every record, by path."""
    found = sorted((folder / "trials").glob("*/*/record.json"))
    return {str(f.relative_to(folder)): (f.stat().st_mtime_ns, f.read_text()) for f in found}


def statuses(folder: Path) -> dict[str, list[str]]:
    """Return the statuses of each trial's rounds, by the option `fail` or the precision."""
    found: dict[str, list[str]] = {}
    for path in sorted((folder / "trials").glob("*/*/record.json")):
        job = json.loads(path.with_name("job.json").read_text())
        key = str(job["trial"]["options"].get("fail", "")) or str(job["trial"]["precision"])
        found.setdefault(key, []).append(json.loads(path.read_text())["status"])
    return {key: sorted(each) for key, each in found.items()}


def test_a_second_run_measures_nothing(fake_study: Any, tmp_path: Path) -> None:
    study = fake_study(backends=("fake@noise=0.1", "fake@fail=exception"), precisions=("fp32", "fp8"), rounds=2)
    assert len(run(study, tmp_path).began) == 3, "two rounds of the good one, one of the failing one"
    assert statuses(tmp_path) == {"fp32": ["ok", "ok"], "exception": ["failed", "skipped"], "fp8": ["skipped"]}
    before = records(tmp_path)
    assert run(study, tmp_path).began == []
    assert records(tmp_path) == before


def test_other_settings_are_refused(fake_study: Any, tmp_path: Path) -> None:
    run(fake_study(), tmp_path)
    before = records(tmp_path)
    with pytest.raises(UserError, match=r"was measured with seconds=0\.04, this command says seconds=0\.5; give"):
        run(fake_study(seconds=0.5), tmp_path)
    with pytest.raises(UserError, match=r"was measured with no data, this command says data=digits; give another"):
        run(fake_study(data="digits"), tmp_path)
    assert records(tmp_path) == before


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that succeed without running."""

    def end(job: Any, folder: Path, *_: Any) -> Record:
        made = Record("ok", trial=job.trial.id, round=job.round)
        write_record(folder, made)
        return made

    monkeypatch.setattr("dyno.runner.execute.launch_in_turn", end)


@pytest.mark.usefixtures("at_once")
def test_rounds_are_interleaved_and_shuffled(fake_study: Any, tmp_path: Path) -> None:
    study = fake_study(batches=tuple(range(1, 9)), rounds=3)
    began = run(study, tmp_path).began
    assert [number for number, _ in began] == [0] * 8 + [1] * 8 + [2] * 8
    orders = [[trial.id for k, trial in began if k == number] for number in range(3)]
    assert len({tuple(order) for order in orders}) == 3 and len({frozenset(order) for order in orders}) == 1
    assert began == run(study, tmp_path / "again").began, "the order is the same on every machine"


@pytest.mark.usefixtures("at_once")
def test_a_model_is_finished_before_files_of_the_next_are_built(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = fake_study(models=("fake:one", "fake:two"), batches=(1, 2), rounds=2)
    log, seen = Log(), []

    def made(files: Files, trials: list[Trial]) -> dict[str, Any]:
        seen.append((len(log.began), {t.model.name for t in trials}))
        return {}

    monkeypatch.setattr(Files, "make_files", made)
    execute(study, tmp_path, log)
    assert seen == [(0, {"one"})] * 2 + [(4, {"two"})] * 2
    assert [(number, trial.model.name) for number, trial in log.began] == [
        (number, name) for name in ("one", "two") for number in (0, 0, 1, 1)
    ]


def test_a_refusal_is_a_row_until_its_reason_is_gone(fake_study: Any, tmp_path: Path, monkeypatch: Any) -> None:
    study = fake_study()
    (planned,) = expand(study)
    with monkeypatch.context() as patch:
        patch.setattr(
            "dyno.runner.execute.expand", lambda *_: [PlannedTrial(planned.trial, "x is not installed; pip install x")]
        )
        assert run(study, tmp_path).began == []
        record = Run(tmp_path).record(planned.trial, 0)
        assert record is not None
        assert (record.status, record.stage, record.seconds) == ("skipped", "plan", 0.0)
        assert record.reason == "x is not installed; pip install x"
    assert len(run(study, tmp_path).began) == 1
    assert statuses(tmp_path) == {"fp32": ["ok"]}


def test_the_run_folder_describes_its_content(fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = fake_study(backends=("fake@noise=0.1",), batches=(1, 2))
    run(study, tmp_path)
    assert Study.from_toml(tmp_path / "study.toml") == study
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["versions"]["numpy"] and environment["cpu"] and "gpu" not in environment
    assert not list(tmp_path.rglob("*.part"))
    monkeypatch.setattr(run_folder, "gpu_identity", lambda device: f"the card {device}")
    run_folder.prepare_folder(replace(study, device="cuda:0"), Run(tmp_path / "gpu"), [])
    assert json.loads((tmp_path / "gpu/environment.json").read_text())["gpu"] == "the card cuda:0"


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start `dyno run` on four fake trials of two rounds, in a separate process."""
    usual = "run fake:net --channels 1 --backend fake@latency_ms=1 --batch 1,2,3,4 --rounds 2 --seconds 0.05"
    command = [sys.executable, "-m", "dyno", *usual.split(), "--warmup", "0.05", "--threads", "1", *words]
    return subprocess.Popen(
        [*command, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background passes on its ignored interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def jobs_in(folder: Path) -> list[psutil.Process]:
    """Return the processes that work on a job below the folder."""
    return [p for p in psutil.process_iter(["cmdline"]) if any(str(folder) in w for w in p.info["cmdline"] or ())]


def test_sigkill_at_any_moment_loses_no_measurement(tmp_path: Path) -> None:
    """Killed in the first job, then ever later; the last run finishes the rest."""
    folder = tmp_path / "run"
    seen: dict[str, tuple[int, str]] = {}
    for kill in range(4):
        dyno = started(folder)
        target = len(seen) + 1
        until(lambda: (folder / "trials").is_dir() and len(list(folder.glob("trials/*/r*"))) >= target)  # noqa: B023
        time.sleep(0.12 * kill)  # from the worker's fork through its imports to its measurements
        os.kill(dyno.pid, signal.SIGKILL)
        dyno.communicate()
        until(lambda: not jobs_in(folder))  # an orphan would continue
        now = records(folder)
        assert seen.items() <= now.items(), "a finished record was touched"
        seen = now
    last = started(folder)
    last.communicate(timeout=1200)
    assert last.returncode == 0
    now = records(folder)
    assert seen.items() <= now.items()
    assert len(now) == 8 and statuses(folder) == {"fp32": ["ok"] * 8}


def test_a_run_resumes_after_sigkill_at_the_start(tmp_path: Path) -> None:
    dyno = started(tmp_path / "run", "--rounds", "1")
    until(lambda: (tmp_path / "run" / "lock").exists())
    os.kill(dyno.pid, signal.SIGKILL)
    dyno.communicate()
    dyno = started(tmp_path / "run", "--rounds", "1")
    dyno.communicate(timeout=1200)
    assert dyno.returncode == 0
    assert statuses(tmp_path / "run") == {"fp32": ["ok"] * 4}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_run_is_refused_and_an_interrupt_shows_results_so_far(tmp_path: Path, number: int) -> None:
    first = started(tmp_path, "--rounds", "50")
    until(lambda: len(list(tmp_path.glob("trials/*/r0/record.json"))) >= 1)
    second = started(tmp_path, "--rounds", "50")
    _, err = second.communicate(timeout=1200)
    assert second.returncode == 2
    assert err == (
        f"dyno: {tmp_path} is in use by another dyno (process {first.pid}); wait for it or give another --out\n"
    )
    first.send_signal(number)
    out, err = first.communicate(timeout=1200)
    assert first.returncode == 130
    assert "fake@latency_ms" in out and "Not all rounds are measured: this is the answer after " in out
    assert err.splitlines()[-1].startswith("dyno: stopped; what was measured is stored")
    assert "Traceback" not in err
    until(lambda: not jobs_in(tmp_path), 60.0)


MAKER = """
from pathlib import Path
import hashlib
from dyno.worker.backend import Maker
from dyno.worker.backends.fake import Fake
from dyno.worker.spec import Artifact, Recipe, Tensor

class Made(Maker):
    name = "maker_for_tests:Made"
    def make(self, recipe, parent, folder):
        if recipe.options.get("fail"):
            raise ValueError("this graph can't be written")
        path = Path(folder) / "made.bin"
        path.write_bytes(b"made of " + (Path(parent.path).read_bytes() if parent else b"nothing"))
        content = path.read_bytes()
        ends = (Tensor("input", "float32", (1, 1, 8, 8)),)
        sha256 = hashlib.sha256(content).hexdigest()
        return Artifact("bin", str(path), sha256, len(content), recipe.precision, ends, ends, 0.0)

class Reader(Fake):
    name = "maker_for_tests:Reader"
    options = (*Fake.options, "broken")
    def recipe(self, trial):
        options = {"fail": True} if trial.options.get("broken") else {}
        first = Recipe("maker_for_tests:Made", "bin", "fp32", trial.model, trial.dims, options)
        return Recipe("maker_for_tests:Made", "bin", trial.precision, trial.model, trial.dims, parent=first)
    def load(self, trial, artifact):
        assert Path(artifact.path).read_bytes() == b"made of made of nothing", artifact
        return super().load(trial, artifact)
"""


@pytest.fixture
def cache(tmp_path: Path, importable: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh cache, and a backend outside Dyno with a file made in two steps."""
    importable("maker_for_tests", MAKER)
    monkeypatch.setenv("DYNO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/artifacts"


def made_of(path: Path) -> tuple[str, int]:
    """Return a cached file's precision and its number of steps."""
    record = read_record(path.parent)
    assert record is not None and record.artifact is not None
    return record.artifact.precision, len(record.artifact.made_by.steps)


def test_a_file_built_on_a_shared_gpu_has_a_warning(
    fake_study: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = {"gpu_processes": np.array([1.0, 2.0, 1.0]), "gpu_own": np.array([1.0, 1.0, 1.0])}
    seen = timeline.Trace(np.arange(3.0), looks, 0.0, 0.0, 0.0)
    monkeypatch.setattr(timeline, "read_timeline", lambda folder: seen)
    recipe = registry.find("maker_for_tests:Reader").recipe(expand(fake_study())[0].trial)
    assert recipe is not None
    for _ in ("made", "from the cache"):
        made = Files(Progress(quiet=True)).make_file(recipe)
        assert isinstance(made, Artifact)
        assert made.made_by.warnings == (
            "another process was on the GPU meanwhile: kernels were timed meanwhile and may not be the fastest",
        )


def test_a_failure_stores_the_versions_of_every_step(tmp_path: Path) -> None:
    data = DataSpec("photos", "/photos", "ab")
    trial = Trial(ModelSpec("net", "torchvision:resnet18"), "openvino", "int8", Dims(1, 32, 32), data=data)
    ensemble.note_retry(tmp_path, replace(trial, recipe=registry.find("openvino").recipe(trial)))
    known = json.loads((tmp_path / ensemble.MADE_WITH).read_text())
    assert {"openvino", "onnx_precision", "onnx_export"} <= known.keys()
    assert "numpy" in known["onnx_export"]


def test_a_round_with_a_damaged_record_is_archived_and_measured_again(fake_study: Any, tmp_path: Path) -> None:
    run(fake_study(), tmp_path)
    (path,) = tmp_path.glob("trials/*/r0/record.json")
    path.write_text(cut := path.read_text()[:50])
    assert len(run(fake_study(), tmp_path).began) == 1
    assert json.loads(path.read_text())["status"] == "ok"
    (kept,) = tmp_path.glob("archive/damaged/*/r0/record.json")
    assert kept.read_text() == cut
    assert run(fake_study(), tmp_path).began == []


def test_a_record_of_a_newer_dyno_is_not_overwritten(fake_study: Any, tmp_path: Path) -> None:
    run(fake_study(), tmp_path)
    (path,) = tmp_path.glob("trials/*/r0/record.json")
    path.write_text(newer := json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(UserError, match="was written by a newer Dyno"):
        run(fake_study(), tmp_path)
    assert path.read_text() == newer


# Last: later jobs of this file are forked.


@pytest.mark.usefixtures("preloaded")
def test_more_rounds_are_added_and_fewer_change_nothing(fake_study: Any, tmp_path: Path) -> None:
    run(fake_study(), tmp_path)
    before = records(tmp_path)
    assert [number for number, _ in run(fake_study(rounds=3), tmp_path).began] == [1, 2]
    assert before.items() <= records(tmp_path).items()
    assert len(records(tmp_path)) == 3
    assert run(fake_study(rounds=2), tmp_path).began == []


@pytest.mark.usefixtures("preloaded")
def test_a_backend_may_have_rounds_of_its_own(fake_study: Any, tmp_path: Path) -> None:
    study = fake_study(backends=("fake@latency_ms=0.1", "fake@latency_ms=0.2@rounds=1"), rounds=3)
    assert [number for number, _ in run(study, tmp_path).began] == [0, 0, 1, 2]
    assert run(study, tmp_path).began == []


@pytest.mark.usefixtures("preloaded")
def test_files_are_built_once_and_damage_is_detected(fake_study: Any, tmp_path: Path, cache: Path) -> None:
    study = fake_study(backends=("maker_for_tests:Reader@latency_ms=0.1",), precisions=("fp32", "fp16"))
    assert rebuild_reasons(run(study, tmp_path / "a")) == ["", "", ""], "two precisions share the first step"
    assert statuses(tmp_path / "a") == {"fp32": ["ok"], "fp16": ["ok"]}
    assert run(study, tmp_path / "b").files == []
    one = fake_study(backends=("maker_for_tests:Reader@latency_ms=0.1",))
    (path,) = [f for f in cache.glob("*/made.bin") if made_of(f) == ("fp32", 2)]
    harm: list[tuple[Callable[[], Any], str]] = [
        (lambda: path.write_bytes(path.read_bytes()[:-1]), "made.bin in the cache was changed or cut short"),
        (lambda: path.write_bytes(b"made of made of nothinG"), "made.bin in the cache was changed or cut short"),
        (lambda: path.unlink(), "made.bin is missing from the cache"),
        (lambda: path.with_name("record.json").write_text("{"), "the record in the cache is damaged"),
        (lambda: path.with_name("record.json").unlink(), ""),
    ]
    for number, (damage, reason) in enumerate(harm):
        damage()
        (wrong,) = rebuild_reasons(run(one, tmp_path / f"c{number}"))
        assert wrong.startswith(reason)
        assert statuses(tmp_path / f"c{number}") == {"fp32": ["ok"]}
    assert all(not f.name.startswith(".") for f in cache.iterdir() if f.is_dir()), "scratch folders are left"


@pytest.mark.usefixtures("preloaded")
def test_a_changed_file_is_rebuilt(fake_study: Any, tmp_path: Path, cache: Path) -> None:
    study = fake_study(backends=("maker_for_tests:Reader@latency_ms=0.1",))
    assert rebuild_reasons(run(study, tmp_path / "a")) == ["", ""]
    (path,) = [f for f in cache.glob("*/made.bin") if made_of(f)[1] == 2]
    path.write_bytes(path.read_bytes()[:-1])
    assert rebuild_reasons(run(study, tmp_path / "b")) == [
        "made.bin in the cache was changed or cut short after it was built"
    ]
    assert statuses(tmp_path / "b") == {"fp32": ["ok"]}


@pytest.mark.usefixtures("preloaded")
def test_a_failed_build_is_a_row_of_every_trial(fake_study: Any, tmp_path: Path, cache: Path) -> None:
    backends = ("maker_for_tests:Reader@broken=true", "fake@latency_ms=0.1")
    log = run(fake_study(backends=backends, precisions=("fp32", "int8")), tmp_path / "run")
    assert rebuild_reasons(log) == [""], "it is tried once"
    found = [r for f in sorted((tmp_path / "run/trials").glob("*/r0")) if (r := read_record(f))]
    failed = [r for r in found if r.status == "failed"]
    assert len(failed) == 2 and len(found) == 4
    assert {(r.stage, r.reason) for r in failed} == {("make bin fp32", "ValueError: this graph can't be written")}
    logs = [log.read_text() for log in (tmp_path / "run/trials").glob("*/r0/stderr.log") if log.stat().st_size]
    assert len(logs) == 2 and all("Traceback" in log and "this graph can't be written" in log for log in logs)
    assert not [place for place in cache.iterdir() if place.is_dir()]


@pytest.mark.usefixtures("preloaded")
def test_a_file_built_by_another_study_is_kept(fake_study: Any, tmp_path: Path, cache: Path) -> None:
    run(fake_study(backends=("maker_for_tests:Reader@latency_ms=0.1",)), tmp_path / "a")
    (path,) = [f for f in cache.glob("*/made.bin") if made_of(f)[1] == 2]
    before = path.stat().st_ino
    assert registry.find("maker_for_tests:Reader").recipe(expand(fake_study())[0].trial) is not None
    with Cache().making(path.parent.name) as scratch:
        for file in path.parent.iterdir():
            (scratch / file.name).write_bytes(file.read_bytes())
    assert path.stat().st_ino == before
