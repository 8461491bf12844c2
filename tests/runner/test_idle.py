"""A study with --energy: the machine is watched while idle, once, and each planned round also runs at full load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dyno import Study
from dyno.jobs import telemetry
from dyno.jobs.progress import Progress
from dyno.report.tables import trial_table
from dyno.results import energy
from dyno.results.trial_result import load_run
from dyno.runner import execute, peak

Studies = Callable[..., Study]


class Clock(threading.local):
    """The clock of what looks at the machine, and when each thread has looked at it last."""

    at = 0.0

    def monotonic(self) -> float:
        """See `time.monotonic`."""
        self.at = time.monotonic()
        return self.at


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that draws 30 W, whatever it does, up to the time of each look; looks are frequent."""
    clock, constant, begin = Clock(), telemetry.Rapl([]), time.monotonic()
    monkeypatch.setattr(telemetry, "time", clock)
    monkeypatch.setattr(constant, "joules", lambda: 30 * (clock.at - begin))
    monkeypatch.setattr(telemetry, "find_rapl", lambda: constant)
    monkeypatch.setattr(telemetry, "PERIOD_S", 0.02)
    monkeypatch.setattr(peak, "IDLE_S", 1.5)
    monkeypatch.setattr(execute, "SUSTAINED_S", 1.5)


@pytest.mark.usefixtures("counter", "preloaded")
@pytest.mark.parametrize("turns", [False, True])
def test_each_planned_round_also_runs_at_full_load(fake_study: Studies, tmp_path: Path, turns: bool) -> None:
    backends = ("fake@latency_ms=2", "fake@latency_ms=4")
    study = fake_study(energy=True, backends=backends, turns=turns, rounds=2, until="rounds", batches=(5,))
    for _ in range(2):  # the second time nothing is left to do
        execute.execute(study, tmp_path / "run", Progress(quiet=True))
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
            assert energy.power(stored, "cpu_energy", sustained.window) == pytest.approx(30)
    # Always the same power is no more than while idle; a busy machine is said first.
    assert set(trial_table.read_trials(found).frame["energy_missing"]) <= {
        energy.NO_MORE,
        energy.OTHERS,
        energy.NOT_IDLE,
        "",
    }


@pytest.mark.usefixtures("preloaded")
def test_without_it_nothing_is_run_or_watched(fake_study: Studies, tmp_path: Path) -> None:
    execute.execute(fake_study(), tmp_path / "run", Progress(quiet=True))
    assert not (tmp_path / "run" / "idle").exists()
    (t,) = load_run(tmp_path / "run")
    assert t.good[0].facts.sustained is None
