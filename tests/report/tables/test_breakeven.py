"""When a preparation has paid off: exact where everything is known, never where nothing is gained."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

import synthetic
from dyno.report.tables import frontier_table, trial_table
from synthetic import Way


def made(path: Path, *ways: Way) -> pd.DataFrame:
    run = trial_table.read_trials(synthetic.write_run(path / "run", list(ways), samples=400, count=20))
    return frontier_table.BREAK_EVEN.table(run).to_pandas().set_index("backend")


def test_seconds_over_gain(tmp_path: Path) -> None:
    found = made(tmp_path, Way("pytorch", seconds=0.010, spread=0), Way("a", seconds=0.005, spread=0, build=10.0))
    row = found.loc["a"]
    assert row["extra_s"] == pytest.approx(10.0)
    assert row["gain_us_per_image"] == pytest.approx(5000, rel=0.1)
    assert row["images"] == pytest.approx(2000, rel=0.1)
    assert row["images_low"] <= row["images"] <= row["images_high"]
    assert row["export_s"] == pytest.approx(0.9) and row["engine_s"] == pytest.approx(9.1)


def test_a_batch_is_divided_by_its_images(tmp_path: Path) -> None:
    ways = [Way("pytorch", seconds=0.01, spread=0, batch=8), Way("a", seconds=0.005, spread=0, build=10.0, batch=8)]
    row = made(tmp_path, *ways).loc["a"]
    assert row["images"] == pytest.approx(10 / (0.005 * 5.9 / 8), rel=0.1)


def test_never_perhaps_and_at_once(tmp_path: Path) -> None:
    found = made(
        tmp_path,
        Way("pytorch", seconds=0.010),
        Way("slow", seconds=0.020, build=5.0),
        Way("same", seconds=0.0101, spread=0.2, build=5.0),
        Way("free", seconds=0.005),
        Way("failed", statuses=("failed",)),
    )
    assert found.loc["slow", "pays_off"] == "never" and math.isnan(found.loc["slow", "images"])
    assert found.loc["free", "pays_off"] == "at once" and found.loc["free", "images"] == 0
    same = found.loc["same"]
    assert math.isinf(same["images_high"])
    assert same["pays_off"] == "no gain is shown" or same["pays_off"].endswith("images, or never")
    assert "failed" not in found.index and "pytorch" not in found.index


def test_no_limit_gains_more_than_the_reference_takes(tmp_path: Path) -> None:
    found = made(tmp_path, Way("pytorch", seconds=0.010), Way("a", seconds=0.001, spread=0.9, build=10.0))
    assert found.loc["a", "images_low"] >= 10.0 / 0.012


def test_the_csv_twin_has_every_column(tmp_path: Path) -> None:
    found = made(tmp_path, Way("pytorch"), Way("a", seconds=0.005, build=2.0)).reset_index()
    assert set(found.columns) == {column.name for column in frontier_table.BREAKEVEN_COLUMNS}


def test_nothing_pays_off_at_once_that_is_not_shown_to_be_faster(tmp_path: Path) -> None:
    ways = [Way("pytorch", seconds=0.010, build=5.0), Way("same", seconds=0.0099, spread=0.2)]
    same = made(tmp_path, *ways).loc["same"]
    assert same["extra_s"] < 0
    assert same["pays_off"] in ("never", "no gain is shown")
