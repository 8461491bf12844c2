"""The frontier, the fastest within the budget, and saturation."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import synthetic
from dyno.report.tables import trial_table
from dyno.results import ranking, stats
from dyno.results.ranking import LATENCY, THROUGHPUT
from dyno.results.trial_result import Results, load_run
from synthetic import Way

POINTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=25)


@given(POINTS, st.sampled_from([LATENCY, THROUGHPUT]))
def test_no_point_of_the_frontier_is_beaten_and_every_other_one_is(points: list[tuple[int, int]], speed: str) -> None:
    sign = 1 if speed == THROUGHPUT else -1
    frame = pd.DataFrame({"status": "ok", "outputs": "", speed: [float(p[0]) for p in points]})
    frame["top1"] = [float(p[1]) for p in points]
    edge = {(sign * r[speed], r["top1"]) for _, r in ranking.find_pareto(frame, speed).iterrows()}
    every = {(sign * x, float(y)) for x, y in points}

    def beaten(p: tuple[float, float]) -> bool:
        return any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in every)

    assert edge == {p for p in every if not beaten(p)}


def test_only_trials_that_ended_well_can_be_chosen(demo: Results) -> None:
    frame = trial_table.read_trials(demo, budget={"top1": 1.2}).frame
    assert set(ranking.list_usable(frame)["status"]) == {"ok"}
    assert set(ranking.keep_within_budget(frame)["budget"]) == {"within"}
    first = ranking.rank_trials(ranking.keep_within_budget(frame[frame["batch"] == 1])).iloc[0]
    assert ranking.configuration_of(first) == "openvino bf16"
    assert (
        ranking.configuration_of(ranking.rank_trials(ranking.list_usable(frame), THROUGHPUT).iloc[0]) == "openvino int8"
    )


def saturating(path: Path, batches: tuple[int, ...], fixed: float) -> pd.DataFrame:
    """Latency per batch of b images is fixed + b, so throughput b / (fixed + b) saturates."""
    ways = [
        Way("a", batch=b, seconds=0.001 * (fixed + b) / (0.3 + 0.7 * b), spread=0.0, statuses=("ok",)) for b in batches
    ]
    return trial_table.read_trials(load_run(synthetic.write_run(path / "run", ways, samples=20, count=5))).frame


def test_saturation_is_the_smallest_batch_near_the_best(tmp_path: Path) -> None:
    (found,) = ranking.find_saturation(saturating(tmp_path, (1, 8, 32, 128, 256), fixed=1))
    assert (found.batch, found.largest) == (32, 256)  # 32/33 is 97 %, 8/9 is 89 % of the best
    assert "saturates at batch 32 (9" in found.description
    assert found.images_per_s >= 0.95 * found.best_images_per_s


def test_throughput_that_still_rises_is_said_so(tmp_path: Path) -> None:
    (found,) = ranking.find_saturation(saturating(tmp_path, (1, 2, 4), fixed=50))
    assert found.description == "throughput still rises at batch 4, the largest tried"


def test_a_best_below_the_largest_is_said_once() -> None:
    found = ranking.Saturation("net", "a", "64", 8, 9.0, best_batch=8, best_images_per_s=9.0, largest=16)
    assert found.description == "throughput is highest at batch 8, of up to 16"


def test_one_batch_says_nothing_of_saturation(tmp_path: Path) -> None:
    assert ranking.find_saturation(saturating(tmp_path, (8,), fixed=2)) == []


def test_throughput_falls_back_on_latency(demo: Results) -> None:
    frame = trial_table.read_trials(demo).frame.assign(throughput_ips=float("nan"))
    r = frame.iloc[0]
    assert ranking.read_throughput(frame).iloc[0] == pytest.approx(1e3 * r["batch"] / r["latency_ms"])


def test_trials_in_turns_are_in_the_order_of_their_ratios(demo: Results) -> None:
    frame = trial_table.read_trials(demo).frame.iloc[:3].assign(
        latency_ms=[2.0, 1.0, 1.1], speedup=[1.0, 1.9, 2.1], trial=["a", "b", "c"], reference="a",
        measured=["", stats.TURNS, stats.TURNS],
    )  # fmt: skip
    assert [*ranking.rank_trials(frame)["trial"]] == ["c", "b", "a"]
    assert [*ranking.rank_trials(frame.assign(measured=["", stats.TURNS, stats.ALONE]))["trial"]] == ["b", "c", "a"]
    assert [*ranking.rank_trials(frame.assign(reference=["a", "a", "b"]))["trial"]] == ["b", "c", "a"]
