"""Trials over time: telemetry with known contents on one axis, and `dyno show --over-time`."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import synthetic
from dyno.jobs import telemetry
from dyno.jobs.progress import Progress
from dyno.report.charts import over_time
from dyno.report.charts import over_time as chart
from dyno.report.charts.over_time import save
from dyno.report.tables import trial_table
from dyno.results.rounds import Round
from dyno.results.trial_result import Results, load_run
from dyno.runner.execute import execute
from dyno.worker.facts.job import Facts
from dyno.worker.record import Record
from refusals import refuses
from synthetic import Way
from synthetic_card import Card


@pytest.fixture
def found(tmp_path: Path) -> Results:
    ways = [Way(b, seconds=s, batch=8, card=Card(before=5e9)) for b, s in
            (("pytorch", 0.004), ("onnxruntime", 0.003), ("tensorrt", 0.002))]  # fmt: skip
    return load_run(synthetic.write_run(tmp_path / "run", ways, samples=50, count=20))


def recorded(folder: Path, at: np.ndarray, timed: dict[str, tuple[float, float]], **columns: np.ndarray) -> Round:
    np.savez(folder / "telemetry.npz", at=at, epoch=100.0, **columns)
    return Round(folder, 0, Record("ok", facts=Facts(timed=timed)))


def test_the_reference_and_the_fastest_are_on_one_axis(found: Results) -> None:
    figure = chart.over_time(trial_table.read_trials(found))
    memory, use, power, clock, strip = figure.axes
    names = ["GPU memory, GB", "SM utilisation, %", "GPU power, W", "SM clock, MHz", "timed"]
    assert [axes.get_ylabel() for axes in figure.axes] == names
    for axes in (memory, use, power, clock):
        assert [line.get_label() for line in axes.lines] == ["pytorch fp32", "tensorrt fp32", "onnxruntime fp32"]
    for line in memory.lines:
        assert (line.get_ydata().min(), line.get_ydata().max()) == (0, 2.5), "above the level before the job"
    assert max(power.lines[0].get_ydata()) == 412.5
    windows = load_run(found.folder).trials
    begin, end = next(t for t in windows if t.backend == "pytorch").good[0].facts.timed["model"]
    bar = strip.patches[0]
    assert (bar.get_x(), bar.get_width()) == (pytest.approx(begin % 100), pytest.approx(end - begin))


def test_pauses_are_left_out_and_windows_move_with_them(tmp_path: Path) -> None:
    at = np.array([1.0, 2.0, 3.0, 53.0, 54.0, 55.0])
    r = recorded(tmp_path, at, {"model": (102.0, 154.0)}, rss=np.full(6, 2e9), cpu=np.arange(6.0))
    series = over_time.read_over_time(r)
    assert series is not None and series.paused
    assert series.seconds.tolist() == [1, 2, 3, 5, 6, 7], "of a pause as much as two looks take"
    assert series.timed == {"model": (2.0, 6.0)}


def test_cpu_power_is_the_counter_rate_and_missing_columns_have_no_line(tmp_path: Path) -> None:
    at, nan = np.arange(1.0, 5.0), np.full(4, np.nan)
    r = recorded(tmp_path, at, {}, rss=np.ones(4), frequency=nan, cpu_energy=np.array([7.0, 17.0, 37.0, 67.0]))
    series = over_time.read_over_time(r)
    assert series is not None and not series.paused
    values = {each.column: found.tolist()[1:] for each, found in series.values.items()}
    assert values == {"rss": [1e-9] * 3, "cpu_power": [10, 20, 30]}


@pytest.mark.parametrize("content", [None, b"PK"])
def test_a_round_without_a_recording_has_no_series(tmp_path: Path, content: bytes | None) -> None:
    if content:
        (tmp_path / "telemetry.npz").write_bytes(content)
    assert over_time.read_over_time(Round(tmp_path, 0, Record("ok"))) is None


def test_chosen_trials_are_written_as_csv_and_images(found: Results, tmp_path: Path) -> None:
    run = trial_table.read_trials(found)
    rows = pd.read_csv(save(run, tmp_path / "a.csv", ["onnxruntime"]))
    assert set(rows["label"]) == {"digits onnxruntime fp32 b8 64"} and set(rows["timed"].dropna()) >= {"model", "all"}
    assert rows["gpu_memory"].max() == 2.5 and (np.diff(rows["seconds"]) > 0).all()
    assert pd.read_csv(save(run, tmp_path / "b.csv"))["trial"].nunique() == 3
    svg = save(run, tmp_path / "c.svg", ["onnxruntime", "pytorch"]).read_text(encoding="utf-8")
    assert svg.startswith("<svg") and "onnxruntime fp32" in svg and "tensorrt" not in svg
    assert save(run, tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


def test_charts_without_recordings_are_refused_in_one_line(found: Results, tmp_path: Path) -> None:
    run = trial_table.read_trials(found)
    refuses(r"a name that ends in \.svg, \.png, \.csv", save, run, tmp_path / "a.pdf")
    for t in found:
        for r in t.rounds:
            (r.folder / "telemetry.npz").unlink()
    refuses("nothing was recorded over time of digits tensorrt", save, run, tmp_path / "a.svg", ["tensorrt"])
    refuses("no two trials with a recording", save, run, tmp_path / "a.svg")


@pytest.fixture
def stored_run(fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(telemetry, "PERIOD_S", 0.01)
    backends = ("fake@latency_ms=2", "fake@latency_ms=3", "fake@latency_ms=4")
    execute(fake_study(backends=backends, samples=20), tmp_path / "run", Progress(quiet=True))
    return tmp_path / "run"


@pytest.mark.usefixtures("preloaded", "unreported")
def test_trials_are_written_over_time(stored_run: Path, call: Any, refused: Any, tmp_path: Path) -> None:
    assert call("show", stored_run, "--over-time", "t.csv") == (0, "", "saved t.csv\n")
    rows = pd.read_csv(tmp_path / "t.csv")
    assert rows["trial"].nunique() == 3 and "model" in set(rows["timed"])
    assert (rows["rss"].groupby(rows["trial"]).max() > 0.001).all()
    chosen = "fake@latency_ms=2, fake@latency_ms=3,fake@latency_ms=4"
    assert call("show", stored_run, "--over-time", "all.svg", "--trials", chosen)[0] == 0
    drawn = (tmp_path / "all.svg").read_text(encoding="utf-8")
    assert all(f"latency_ms={k}" in drawn for k in (2, 3, 4)) and "since the job began" in drawn
    assert refused("show", stored_run, "--trials", "fake").endswith("add --over-time FILE.svg")
    assert "a name that ends in .svg, .png, .csv" in refused("show", stored_run, "--over-time", "a.txt")
    assert "no trial of" in refused("show", stored_run, "--over-time", "a.svg", "--trials", "openvino")
    assert "can't be written" in refused("show", stored_run, "--over-time", "nowhere/a.svg")
