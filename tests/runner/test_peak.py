"""Machine properties measured once: peak and idle power; and `dyno bench stress` on a real dynamic file."""

import json
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno import Study
from dyno.jobs import telemetry
from dyno.jobs.progress import Progress
from dyno.report.tables import trial_table
from dyno.results import energy
from dyno.results.trial_result import load_run
from dyno.runner import execute as execute_module
from dyno.runner import peak
from dyno.runner.execute import execute
from dyno.worker.facts.job import Facts, PeakOfType
from dyno.worker.record import Record, write_record
from dyno.worker.spec import Job

GOOD = Record("ok", "done", facts=Facts(peak={"fp32": PeakOfType(1e11, 512)}))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Record]:
    """Results of the peak jobs, consumed in order as jobs run; the cache is the test's own."""
    left: list[Record] = []

    def launch(job: Job, folder: Path, *_: Any) -> Record:
        assert job.kind == "peak"
        folder.mkdir(parents=True)
        write_record(folder, left[0])
        return left.pop(0)

    monkeypatch.setattr(peak, "launch_in_turn", launch)
    monkeypatch.setenv("DYNO_CACHE", str(tmp_path / "cache"))
    return left


def find(study: Study, folder: Path) -> Record:
    return peak.find_peak(study, folder / "peak", Progress(quiet=True))


def test_a_second_study_reads_the_peak_from_the_cache(fake_study: Any, tmp_path: Path, jobs: list[Record]) -> None:
    jobs.append(GOOD)
    assert [find(fake_study(), tmp_path / name).facts for name in "aba"] == [GOOD.facts] * 3
    assert jobs == []
    assert (tmp_path / "b" / "peak" / "record.json").is_file()


def test_the_peak_depends_on_the_number_of_threads(fake_study: Any, tmp_path: Path, jobs: list[Record]) -> None:
    jobs.extend([GOOD, GOOD])
    find(fake_study(threads=1), tmp_path / "a")
    find(fake_study(threads=2), tmp_path / "b")
    assert jobs == []


@pytest.mark.parametrize("bad", [Record("skipped", "peak", "no torch"), Record("ok", "done", warnings=("a crowd",))])
def test_failed_or_disturbed_peaks_are_not_cached(
    bad: Record, fake_study: Any, tmp_path: Path, jobs: list[Record]
) -> None:
    jobs.extend([bad, GOOD])
    assert find(fake_study(), tmp_path / "a") == bad
    assert find(fake_study(), tmp_path / "b").facts == GOOD.facts


def test_a_study_runs_without_a_peak_and_may_add_it_later(fake_study: Any, tmp_path: Path, jobs: list[Record]) -> None:
    execute(fake_study(), tmp_path, Progress(quiet=True))
    assert not (tmp_path / "peak").exists()
    jobs.append(Record("skipped", "peak", "no torch"))
    execute(fake_study(peak=True), tmp_path, Progress(quiet=True))
    assert [p.name for p in tmp_path.glob("peak/*")] == ["record.json"]
    assert jobs == []


class Clock(threading.local):
    """The clock of the telemetry, with each thread's last reading."""

    at = 0.0

    def monotonic(self) -> float:
        """See `time.monotonic`."""
        self.at = time.monotonic()
        return self.at


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with a constant 30 W up to each reading; readings are frequent."""
    clock, constant, begin = Clock(), telemetry.Rapl([]), time.monotonic()
    monkeypatch.setattr(telemetry, "time", clock)
    monkeypatch.setattr(constant, "joules", lambda: 30 * (clock.at - begin))
    monkeypatch.setattr(telemetry, "find_rapl", lambda: constant)
    monkeypatch.setattr(telemetry, "PERIOD_S", 0.02)
    monkeypatch.setattr(peak, "IDLE_S", 1.5)
    monkeypatch.setattr(execute_module, "ENERGY_LOAD_S", 1.5)


@pytest.mark.usefixtures("counter", "preloaded")
@pytest.mark.parametrize("turns", [False, True])
def test_each_planned_round_also_runs_at_full_load(fake_study: Any, tmp_path: Path, turns: bool) -> None:
    backends = ("fake@latency_ms=2", "fake@latency_ms=4")
    study = fake_study(energy=True, backends=backends, turns=turns, rounds=2, until="rounds", batches=(5,))
    for _ in range(2):  # the second time everything is known
        execute_module.execute(study, tmp_path / "run", Progress(quiet=True))
    with np.load(tmp_path / "run" / "idle" / "telemetry.npz") as stored:
        assert stored["at"][-1] >= 1.0 and stored["cpu_energy"].min() > 0
    found = load_run(tmp_path / "run")
    for t in found:
        assert t.status == "ok", t.reason
        for r in t.good:
            sustained = r.facts.sustained
            assert sustained is not None and sustained.window[1] - sustained.window[0] >= 1.4
            assert sustained.window[0] > r.facts.timed["model"][1], "after what is timed"
            assert 0 < sustained.images_per_s <= 5 / (0.002 if "2" in t.variant else 0.004)
            stored = dict(np.load(r.folder / "telemetry.npz"))
            assert energy.estimate_power(stored, "cpu_energy", sustained.window) == pytest.approx(30)
    # Constant power is no more than idle power; a busy machine is reported first.
    assert set(trial_table.read_trials(found).frame["energy_missing"]) <= {
        energy.NO_MORE,
        energy.OTHERS_BUSY,
        energy.NOT_IDLE,
        "",
    }


def test_idle_power_is_recorded_where_a_run_was_stopped(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak, "IDLE_S", 0.0)
    (tmp_path / "idle").mkdir()
    peak.keep_idle(fake_study(), tmp_path, Progress(quiet=True))
    assert (tmp_path / "idle/telemetry.npz").is_file()


@pytest.mark.usefixtures("preloaded")
def test_without_energy_no_idle_or_sustained_load_is_measured(fake_study: Any, tmp_path: Path) -> None:
    execute_module.execute(fake_study(), tmp_path / "run", Progress(quiet=True))
    assert not (tmp_path / "run" / "idle").exists()
    (t,) = load_run(tmp_path / "run")
    assert t.good[0].facts.sustained is None


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    folder, nn = tmp_path_factory.mktemp("stress"), torch.nn
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    names: dict[str, Any] = {"input_names": ["input"], "output_names": ["output"], "dynamo": False}
    free = {"input": {0: "batch"}, "output": {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.zeros(2, 3, 16, 16),), folder / "small.onnx", dynamic_axes=free, **names)
        torch.onnx.export(net, (torch.zeros(2, 3, 16, 16),), folder / "fixed.onnx", **names)
    return folder / "small.onnx"


@pytest.mark.usefixtures("preloaded", "unreported")
def test_stress_checks_every_output(dyno: Any, onnx: Path, tmp_path: Path) -> None:
    words = ("--phases", "1,4,random", "--iterations", 50, "--size", 16, "--threads", 1)
    done = dyno("bench", "stress", onnx, *words, cwd=tmp_path, code=0)
    assert done.stdout.count("every output right") == 3 and " 1-4 " in done.stdout
    assert done.stdout.startswith("small onnxruntime fp32 16\n"), "its batch is free"
    words = ("--phases", "1,2", "--iterations", 3, "--size", 16, "--threads", 1, "--format", "json")
    found = json.loads(dyno("bench", "stress", onnx, *words, cwd=tmp_path, code=0).stdout)
    assert [(row["phase"], row["count"]) for row in found["tables"]["stress"]["rows"]] == [("1", 3), ("2", 3)]
    assert found["sentences"] == ["1: every output right", "2: every output right"]


@pytest.mark.usefixtures("preloaded", "unreported")
def test_stress_uses_default_batches_unless_the_file_fixes_its_batch(dyno: Any, onnx: Path, tmp_path: Path) -> None:
    words = ("--phases", "min,max", "--iterations", 5, "--size", 16)
    usual = dyno("bench", "stress", onnx, *words, cwd=tmp_path)
    rows = [line.split()[:3] for line in usual.stdout.splitlines()]
    assert usual.returncode == 0 and ["min", "1", "5"] in rows and ["max", "8", "5"] in rows
    fixed = dyno("bench", "stress", onnx.with_name("fixed.onnx"), "--phases", "2,3", "--size", 16, cwd=tmp_path)
    assert fixed.returncode == 2 and "takes only batch 2" in fixed.stderr  # before any job runs


@pytest.mark.usefixtures("preloaded", "unreported")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--phases", "some"), "--phases takes min, opt, max, random and numbers of at least 1, not some"),
        (("--phases", ","), "--phases is empty"),
        (("--rounds", "4"), "no such option: --rounds"),
        (("--phases", "2", "--iterations", "0"), "--iterations is 0; it must be at least 1"),
    ],
)
def test_invalid_stress_options_are_refused_in_one_line(
    dyno: Any, tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    done = dyno("bench", "stress", "fake:net", *words, cwd=tmp_path)
    assert done.returncode == 2 and line in done.stderr and "Traceback" not in done.stderr
