"""`dyno show --over-time`: a stored run's trials on one time axis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dyno import Study
from dyno.jobs import telemetry
from dyno.jobs.progress import Progress
from dyno.runner.execute import execute

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")


@pytest.fixture
def run(fake_study: Callable[..., Study], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(telemetry, "PERIOD_S", 0.01)
    backends = ("fake@latency_ms=2", "fake@latency_ms=3", "fake@latency_ms=4")
    execute(fake_study(backends=backends, samples=20), tmp_path / "run", Progress(quiet=True))
    return tmp_path / "run"


def test_trials_are_written_over_time(
    run: Path, call: Callable[..., Any], refused: Callable[..., str], tmp_path: Path
) -> None:
    assert call("show", run, "--over-time", "two.csv") == (0, "", "saved two.csv\n")
    rows = pd.read_csv(tmp_path / "two.csv")
    assert rows["trial"].nunique() == 2 and "model" in set(rows["timed"])
    assert (rows["rss"].groupby(rows["trial"]).max() > 0.001).all()
    chosen = "fake@latency_ms=2, fake@latency_ms=3,fake@latency_ms=4"
    assert call("show", run, "--over-time", "all.svg", "--trials", chosen)[0] == 0
    drawn = (tmp_path / "all.svg").read_text(encoding="utf-8")
    assert all(f"latency_ms={k}" in drawn for k in (2, 3, 4)) and "since the job began" in drawn
    assert refused("show", run, "--trials", "fake").endswith("add --over-time FILE.svg")
    assert "a name that ends in .svg, .png, .csv" in refused("show", run, "--over-time", "a.txt")
    assert "no trial of" in refused("show", run, "--over-time", "a.svg", "--trials", "openvino")
    assert "can't be written" in refused("show", run, "--over-time", "nowhere/a.svg")
