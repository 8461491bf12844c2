"""Rounds go on for what is undecided and for nothing else, within the time, and a killed study goes on where it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno import Study
from dyno.analysis import stats
from dyno.analysis.ranking.pending import pending
from dyno.analysis.records.blocks import log_ratios
from dyno.analysis.records.results import load
from dyno.analysis.tables import trial_table
from dyno.engine import further_rounds
from dyno.engine.execute import execute
from dyno.jobs.progress import Progress
from dyno.worker.record import Measurement, Record, write_json, write_record
from dyno.worker.spec import Job, Trial, UserError, to_json

Studies = Callable[..., Study]
# The reference, one clearly slower, and one so like the reference that no run of this length tells them apart.
REFERENCE, CLEAR, LIKE = "fake@latency_ms=2", "fake@latency_ms=9", "fake@latency_ms=2@noise=0.1"
FIRST = 2


def launch(job: Job, folder: Path, *rest: Any) -> Record:
    """What a job would have measured: seconds by the trial's options that differ from round to round as scripted."""
    assert job.trial is not None
    options, number = job.trial.options, job.round
    odd = options.get("noise", 0.001) * (-1) ** (number + number // 2)
    seconds = options["latency_ms"] / 1e3 * (1 + odd) * np.linspace(0.999, 1.001, 40)
    write_json(folder / "job.json", to_json(job))
    np.savez(folder / "samples.npz", latency_model=seconds)
    latency = Measurement("latency", "s", "duration", None, "latency_model", "model", "host", "seconds")
    record = Record("ok", "done", trial=job.trial.id, round=number, seconds=30.0, measurements=(latency,))
    write_record(folder, record)
    return record


class Stopped(Progress):
    """Notes what begins and what is said, and ends the study at the job that would begin one round too many."""

    def __init__(self, rounds: int = 1000) -> None:
        super().__init__(quiet=True)
        self.rounds, self.began, self.said = rounds, Counter[int](), list[str]()

    def start(self, trial: Trial, number: int, what: str = "round") -> None:
        """See `Progress.start`."""
        if number >= self.rounds:
            raise KeyboardInterrupt
        self.began[number] += 1

    def note(self, line: str) -> None:
        """See `Progress.note`."""
        self.said.append(line)


@pytest.fixture
def study(fake_study: Studies) -> Studies:
    def make(**fields: Any) -> Study:
        # With no margin to speak of nothing is equivalent.
        usual = {
            "rounds": FIRST,
            "until": "decided",
            "minutes": 1e6,
            "equivalent": 1e-9,
            "reference": "fake@latency_ms=2",
        }
        return fake_study(**{"backends": (REFERENCE, LIKE, CLEAR), **usual, **fields})

    return make


def rounds(folder: Path) -> dict[str, list[str]]:
    """The rounds that each trial has, by its backend and options."""
    return {trial.variant: sorted(r.folder.name for r in trial.rounds) for trial in load(folder)}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno.engine.execute.launch_in_turn", launch)


def test_rounds_go_on_for_what_is_undecided(study: Studies, tmp_path: Path, scripted: None) -> None:
    with pytest.raises(KeyboardInterrupt):
        execute(study(), tmp_path, Stopped(4))
    seen = {key: len(each) for key, each in rounds(tmp_path).items()}
    assert seen == {REFERENCE: 4, LIKE: 4, CLEAR: FIRST}
    frame = (run := trial_table.read(tmp_path)).frame
    assert run.rule.first == FIRST
    assert dict(zip(frame["options"], frame["verdict"], strict=True)) == {
        "latency_ms=2": "reference", "latency_ms=9": stats.SLOWER, "latency_ms=2 noise=0.1": stats.UNDECIDED,
    }  # fmt: skip
    execute(study(minutes=5.0), tmp_path, progress := Stopped())  # ten jobs of half a minute
    assert not progress.began and "2 trials are left in pairs that 5 minutes could not decide" in progress.said[-1]
    execute(study(minutes=6.0), tmp_path, progress := Stopped())  # a killed study goes on where it was
    assert progress.began == {4: 2}
    execute(study(equivalent=500.0), tmp_path, progress := Stopped())
    assert not progress.began and not progress.said, "with that margin everything is decided"


def test_in_turns_the_reference_and_what_is_left_go_on_together(
    study: Studies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(folder: Path, trials: Sequence[Trial]) -> list[Trial]:
        return [t for t in trials if t.options["latency_ms"] == 2] if len(rounds(tmp_path)[LIKE]) < 4 else []

    monkeypatch.setattr(further_rounds, "_pending", left)
    execute(study(turns=True, block=0.02), tmp_path, progress := Stopped())
    assert progress.began == {0: 6, 1: 6, 2: 4, 3: 4}, "each begins twice: to warm up, and to end"
    reference, clear, like = (next(t for t in load(tmp_path) if t.variant == name) for name in (REFERENCE, CLEAR, LIKE))
    assert [len(log_ratios(reference, t, "model")) for t in (clear, like)] == [FIRST, 4]
    assert not reference.companions
    found = trial_table.read(tmp_path).frame.set_index("trial")
    assert found["measured"][clear.id] == stats.TURNS and found["speedup"][clear.id] < 0.5


def test_without_it_nothing_more_is_measured(study: Studies, tmp_path: Path, scripted: None) -> None:
    execute(study(until=""), tmp_path, progress := Stopped())
    assert progress.began == {0: 3, 1: 3}
    assert trial_table.read(tmp_path).rule.first == 0
    # The first look may be followed by others, but what was looked at often is never again judged as if it were not.
    with pytest.raises(KeyboardInterrupt):
        execute(study(), tmp_path, Stopped(FIRST))
    with pytest.raises(UserError, match="until=decided, this command says no until"):
        execute(study(until=""), tmp_path, Stopped())
    with pytest.raises(UserError, match="rounds=2, this command says rounds=3"):
        execute(study(rounds=3), tmp_path, Stopped())


def test_the_verdict_is_the_same_when_it_is_shown_later(study: Studies, tmp_path: Path, scripted: None) -> None:
    execute(study(backends=(REFERENCE, CLEAR)), tmp_path, progress := Stopped())
    assert progress.began == {0: 2, 1: 2} and not pending(trial_table.read(tmp_path))
    frame = trial_table.read(tmp_path).frame
    (row,) = frame[frame["verdict"] == stats.SLOWER].to_dict("records")
    slow, fast = (t.medians("model") for t in sorted(load(tmp_path), key=lambda t: -int(t.options["latency_ms"])))
    look = stats.speedup(slow, fast, stats.Rule(first=FIRST))
    assert (row["speedup_low"], row["speedup_high"]) == pytest.approx((look.low, look.high))
    assert look.low < stats.speedup(slow, fast).low, "a look costs a part of the error"


def test_bad_input_is_one_line(study: Studies) -> None:
    for fields, words in (
        ({"until": "done"}, "unknown until 'done'"),
        ({"rounds": 1}, "give --rounds 2 or more"),
        ({"minutes": 0.0}, "minutes is 0.0; it must be more than 0"),
        ({"equivalent": 0.0}, "equivalent is 0.0; it must be more than 0"),
    ):
        with pytest.raises(UserError, match=words):
            study(**fields)
