"""What a worker says to its conductor, and that none of its measurements holds what it waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dyno.worker import journal, measure
from dyno.worker.jobs import turns
from dyno.worker.jobs.turns import Interleaved
from dyno.worker.journal import Journal
from dyno.worker.main import perform
from dyno.worker.spec import Job, Trial

AGES = 1e6  # seconds, for which the conductor lets the worker wait


class Slow:
    """A conductor that answers from a list, and whose answers take ages by the worker's clock."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.heard, self.waited = words, list[str](), 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self.waited

    def write(self, text: str) -> None:
        self.heard += text.split()

    def readline(self) -> str:
        self.waited += AGES
        return self.words.pop(0) + "\n" if self.words else ""


@pytest.fixture
def conducted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Slow, Interleaved]]:
    ends = os.pipe()

    def make(*words: str) -> tuple[Slow, Interleaved]:
        slow = Slow([*words])
        clock = SimpleNamespace(**{**vars(time), "perf_counter": slow.perf_counter})
        for module in (turns, journal, measure):
            monkeypatch.setattr(module, "time", clock)
        made = Interleaved(*ends)
        monkeypatch.setattr(made, "_heard", slow)
        monkeypatch.setattr(made, "_said", slow)
        return slow, made

    return make


def test_waiting_is_in_no_measurement(
    fake_trial: Callable[..., Trial], tmp_path: Path, conducted: Callable[..., tuple[Slow, Interleaved]]
) -> None:
    slow, made = conducted("go", "go", "end", "end")
    trial = fake_trial()
    trial = replace(trial, plan=replace(trial.plan, blocks=3))
    job = Job("run", trial.runtime, trial, options={"turns": {"set": "s", "place": 0}})
    record = perform(job, Journal(tmp_path, job), made)
    assert record.status == "ok", record.reason
    *words, delay, before_last, last = slow.heard
    assert [*words, before_last, last] == "ready import ready model done ready all".split() and float(delay) >= 0
    assert made.waited_s >= 4 * AGES
    seconds = {m.tag: m.value for m in record.measurements if m.unit == "s" and m.value is not None}
    assert {"import", "load", "first_call"} <= {*seconds}
    assert all(value < AGES for value in seconds.values()), seconds


def test_who_has_no_conductor_any_more_does_not_load(
    fake_trial: Callable[..., Trial], tmp_path: Path, conducted: Callable[..., tuple[Slow, Interleaved]]
) -> None:
    _, made = conducted()
    trial = fake_trial()
    job = Job("run", trial.runtime, trial, options={"turns": {"set": "s", "place": 0}})
    record = perform(job, Journal(tmp_path, job), made)
    assert (record.status, record.stage) == ("failed", "import")
    assert [m.tag for m in record.measurements] == ["import"]
