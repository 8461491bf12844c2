"""Winners are measured again after the selection, once in any case, and stored beside the selecting rounds."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dyno import Study
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results import trial_result
from dyno.runner.execute import execute
from logged import Log
from refusals import refuses

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

# The third takes longer than a run of the others interrupted once by the scheduler.
THREE = tuple(f"fake@latency_ms={ms}" for ms in (0.5, 1.5, 30.0))


def run(study: Study, folder: Path) -> list[tuple[float, int]]:
    """Run the study; return latency and round of each started job."""
    execute(study, folder, log := Log())
    return [(float(trial.options["latency_ms"]), number) for number, trial in log.began]


def stored(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.glob("trials/*/*/record.json")}


def test_winner_runner_up_and_reference_are_confirmed_separately(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "cpu_contention", lambda *_, **__: None)  # ignores other programs on this machine
    study = fake_study(backends=(*THREE, "fake@latency_ms=40.0"), rounds=2, confirm=2, reference="fake@latency_ms=40.0")
    began = run(study, tmp_path)
    assert sorted(began[:8]) == [(ms, k) for ms in (0.5, 1.5, 30.0, 40.0) for k in (0, 1)]
    assert sorted(began[8:]) == [(ms, k) for ms in (0.5, 1.5, 40.0) for k in (0, 1)], "the third best is not confirmed"
    assert [number for _, number in began[8:]] == [0] * 3 + [1] * 3, "interleaved"
    loaded = trial_result.load_run(tmp_path)
    first = loaded.trials[0]
    assert [len(first.rounds), len(first.confirmations)] == [2, 2]
    assert len(first.medians("model")) == 2 and [r.ok for r in first.confirmations] == [True, True]
    assert all("outputs.npz" not in [f.name for f in r.folder.iterdir()] for r in first.confirmations)
    text = "\n".join(verdict.list_sentences(trial_table.read_trials(loaded)))
    again = text.partition("Measured again after the selection, in 2 fresh processes: ")[2].splitlines()
    assert "fake@latency_ms=40.0 fp32" in again[0], "beside the reference, bounded or not"


def test_an_interrupted_confirmation_is_completed(fake_study: Any, tmp_path: Path) -> None:
    study = fake_study(backends=THREE, confirm=1)
    assert len(run(study, tmp_path)) == 5, "the first one is the reference, and the fastest"
    before = stored(tmp_path)
    assert run(study, tmp_path) == []
    lost = next(iter(tmp_path.glob("trials/*/c0")))
    shutil.rmtree(lost)
    lost.mkdir()
    (lost / "job.json").write_text("{")
    assert len(run(study, tmp_path)) == 1
    assert stored(tmp_path).keys() == before.keys()
    assert sum(before[k] != v for k, v in stored(tmp_path).items()) == 1


def test_more_confirmations_are_added_and_a_single_trial_has_none(fake_study: Any, tmp_path: Path) -> None:
    run(fake_study(backends=THREE[:2], confirm=1), tmp_path / "two")
    assert [k for _, k in run(fake_study(backends=THREE[:2], confirm=3), tmp_path / "two")] == [1, 1, 2, 2]
    assert run(fake_study(backends=THREE[:1], confirm=2), tmp_path / "one") == [(0.5, 0)]


def test_interleaved_selections_are_confirmed_interleaved(fake_study: Any, tmp_path: Path) -> None:
    study = fake_study(backends=THREE[:2], confirm=2, turns=True, block=0.005, boundaries=("model", "throughput"))
    run(study, tmp_path)
    sets = [{r.turns for r in t.confirmations} for t in trial_result.load_run(tmp_path)]
    assert sets[0] == sets[1] and len(sets[0]) == 2 and "" not in sets[0]
    assert run(study, tmp_path) == []
    shutil.rmtree(next(iter(tmp_path.glob("trials/*/c1"))))
    run(study, tmp_path)
    assert [len(t.confirmations) for t in trial_result.load_run(tmp_path)] == [2, 2]
    read = trial_table.read_trials(tmp_path)
    assert "Measured again after the selection, in 2 fresh processes" in "\n".join(verdict.list_sentences(read))


@pytest.mark.parametrize("turns", [False, True])
def test_confirmations_time_only_the_selecting_boundary(fake_study: Any, tmp_path: Path, turns: bool) -> None:
    """The smallest batch has the lowest latency; a run takes equally long at any, so the largest has most images/s."""
    study = fake_study(backends=THREE[:2], confirm=1, turns=turns, block=0.005, batches=(1, 16),
                       boundaries=("model", "throughput"))  # fmt: skip
    run(study, tmp_path)
    timed = {
        (trial.batch, m.boundary)
        for trial in trial_result.load_run(tmp_path)
        for each in trial.confirmations
        for m in each.record.measurements
        if m.boundary
    }
    assert timed == {(1, "model"), (16, "throughput")}


def test_a_study_from_python_confirms_too(fake_study: Any, tmp_path: Path) -> None:
    result = fake_study(backends=THREE[:2], confirm=1).run(tmp_path, quiet=True)
    assert [len(t.confirmations) for t in result.records] == [1, 1]
    jobs = [json.loads((p / "job.json").read_text()) for p in tmp_path.glob("trials/*/c0")]
    assert [job["round"] for job in jobs] == [1, 1], "round 0 would answer all images once more"
    assert len(result.table("break-even").rows) == 1


def list_sustained(folder: Path) -> list[str]:
    sentences = verdict.list_sentences(trial_table.read_trials(trial_result.load_run(folder)))
    return [line for sentence in sentences for line in sentence.splitlines() if "without a break" in line]


@pytest.mark.parametrize("heat", [0.0, 0.5])
def test_sustained_load_contradicts_a_ratio_changed_by_heat(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heat: float
) -> None:
    monkeypatch.setattr(verdict, "cpu_contention", lambda *_, **__: None)  # ignores other programs on this machine
    backends = (f"fake@latency_ms=0.5@heat={heat}", "fake@latency_ms=1.5", "fake@latency_ms=9")
    study = fake_study(
        backends=backends, reference=backends[1], turns=True, rounds=3, block=0.02, sustained=0.8, boundaries=("model",)
    )
    execute(study, tmp_path, Log())
    assert sum(len(t.sustained) for t in trial_result.load_run(tmp_path)) == 2, "the slowest is no finalist"
    (line,) = list_sustained(tmp_path)
    words = line.partition("without a break, ")[2].split()
    ratio = float(next(word for word in words if word.endswith("x")).rstrip("x"))
    assert ratio == pytest.approx(3 / (1 + heat), rel=0.05)
    assert ("not 3.0" in line or "not 2.9" in line) is bool(heat), line
    before = stored(tmp_path)
    execute(study, tmp_path, Log())
    assert stored(tmp_path) == before, "measured once"


def test_sustained_load_is_measured_on_a_gpu_until_a_study_is_decided(fake_study: Any) -> None:
    assert fake_study(device="cuda:0", rounds=2, until="decided", turns=True).sustained_s == 5
    assert fake_study(device="cuda:0", until="rounds", turns=True).sustained_s == 0
    assert fake_study(rounds=2, until="decided", turns=True).sustained_s == 0
    assert fake_study(rounds=2, sustained=2.5, turns=True).sustained_s == 2.5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sustained": -1.0}, "sustained is -1; it must be 0 to 60 seconds"),
        ({"sustained": float("nan")}, "sustained is nan"),
        ({"sustained": 61.0}, "sustained is 61"),
        ({"sustained": 5.0, "turns": False}, "sustained load is compared with rounds in turns"),
        ({"sustained": 5.0, "rounds": 1}, "give --rounds 2 or more"),
    ],
)
def test_invalid_sustained_load_is_refused(fake_study: Any, fields: dict[str, Any], words: str) -> None:
    refuses(words, fake_study, **{"rounds": 2, "turns": True, **fields})
