"""Where spread comes from: builds of one engine beyond noise, and rounds, blocks and samples of a trial."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import synthetic
from dyno.report import tables
from dyno.report.tables import trial_table, variance_tables
from dyno.worker.record import read_json, write_json
from synthetic import Way


def builds(*medians: list[float], layers: tuple[int, ...] = ()) -> list[Any]:
    counts = layers or (20,) * len(medians)
    return [
        SimpleNamespace(
            good=[1], options={"build": k + 1}, backend="tensorrt", medians=lambda boundary, ms=ms: ms,
            count=lambda tag, n=n: n if tag == "layers" else None,
        )
        for k, (ms, n) in enumerate(zip(medians, counts, strict=True))
    ]  # fmt: skip


def test_builds_that_differ() -> None:
    found = variance_tables.spread(builds([0.475, 0.476, 0.474], [0.577, 0.576, 0.578]))
    assert found is not None and found.real
    assert found.ratio == pytest.approx(0.577 / 0.475, rel=1e-3)


def test_builds_within_the_noise_of_their_processes() -> None:
    found = variance_tables.spread(builds([0.50, 0.53, 0.47], [0.51, 0.48, 0.54], [0.49, 0.52, 0.50]))
    assert found is not None and not found.real


def test_too_little_to_say() -> None:
    assert variance_tables.spread(builds([0.5], [0.6])) is None
    assert "could be timed" in variance_tables.sentences(builds([0.5, 0.5]))[0]  # type: ignore[arg-type]
    assert "two processes or more" in variance_tables.sentences(builds([0.5], [0.6]))[-1]  # type: ignore[arg-type]


def test_the_sentences_and_the_fastest() -> None:
    four = builds([0.60, 0.61], [0.50, 0.51], [0.60, 0.59], [0.62, 0.61], layers=(191, 221, 197, 185))
    said = variance_tables.sentences(four)  # type: ignore[arg-type]
    assert said[0] == "layers differ: 191, 221, 197, 185"
    assert said[1] == "parameters: not reported by these engines"
    assert "beyond noise" in said[2] and "p = " in said[2]
    assert variance_tables.fastest(four).options == {"build": 2}  # type: ignore[arg-type,union-attr]


def in_turns(folder: Path, rounds: float, blocks: float, both: float) -> list[dict[str, Any]]:
    """The table's rows of two trials that took turns, with those deviations of rounds and blocks, and of what a block
    does to `both`."""
    synthetic.write_run(folder, [Way("pytorch", statuses=("ok",) * 8), Way("a", statuses=("ok",) * 8)], samples=1)
    rng = np.random.default_rng(0)
    shared = both * rng.standard_normal((8, 12, 1))
    for trial in sorted((folder / "trials").iterdir()):
        own = 0.01 * np.exp(shared + rounds * rng.standard_normal((8, 1, 1)) + blocks * rng.standard_normal((8, 12, 1)))
        for number, taken in enumerate(own * np.exp(0.001 * rng.standard_normal((8, 12, 20)))):
            place = trial / f"r{number}"
            numbers = np.repeat(np.arange(12, dtype=np.int32), 20)
            np.savez(place / "samples.npz", latency_model=taken.ravel(), latency_model_block=numbers)
            record = read_json(place / "record.json")
            write_json(place / "record.json", {**record, "facts": {**record["facts"], "turns": {"set": f"s{number}"}}})
    (table,) = tables.named(trial_table.read_trials(folder), "variance")
    return [row for row in table.rows if "a fp32" in row["label"]]


def test_levels_of_a_trial_in_turns_and_what_they_advise(tmp_path: Path) -> None:
    latency, ratio = in_turns(tmp_path / "rounds", rounds=0.05, blocks=0.01, both=0.2)
    assert (latency["of"], ratio["of"]) == ("latency", "ratio to the reference")
    assert (latency["rounds"], latency["blocks"], latency["samples"]) == (8, 12, 20)
    assert latency["blocks_spread"] == pytest.approx(20, rel=0.3) and ratio["blocks_spread"] == pytest.approx(
        1.4, rel=0.3
    )
    assert ratio["rounds_share"] > 90 and "samples_share" not in ratio
    assert ratio["rounds_spread"] == pytest.approx(7, rel=0.6)
    assert latency["rounds_share"] + latency["blocks_share"] + latency["samples_share"] == pytest.approx(100)
    assert "more" in ratio["advice"]
    _, ratio = in_turns(tmp_path / "blocks", rounds=0.0005, blocks=0.2, both=0.0)
    assert ratio["blocks_share"] > 60 and ratio["advice"].startswith("longer rounds")


def test_a_round_without_blocks_is_cut_into_stretches(tmp_path: Path) -> None:
    run = trial_table.read_trials(
        synthetic.write_run(tmp_path / "run", [Way("pytorch", spread=0.1), Way("a", statuses=("ok",))])
    )
    (row,) = tables.named(run, "variance")[0].rows
    assert (row["rounds"], row["blocks"], row["of"]) == (3, 10, "latency") and row["rounds_share"] > 90
