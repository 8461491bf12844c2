"""Sizes compete where a budget says what a size may cost, the frontier has intervals on both axes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import synthetic
from dyno.report.charts import charts
from dyno.report.tables import trial_table
from dyno.report.tables.frontier_table import FRONTIER
from dyno.report.verdict import answers, verdict
from dyno.results import ranking as rankings_module
from dyno.results.metrics import quality
from dyno.results.ranking import rank_goals
from dyno.results.stats import TURNS, Speedup
from dyno.results.trial_result import Results, load_run
from synthetic import Way

BIG, SMALL = 64, 32


def sized(path: Path, *, flips: float = 0.0, first: int = BIG, count: int = 900) -> Results:
    """Two sizes of one network; the smaller one is twice as fast."""
    ways = [
        Way("pytorch", seconds=0.010, size=BIG),
        Way("a", seconds=0.006, size=BIG),
        Way("pytorch", seconds=0.005, size=SMALL, flips=flips),
        Way("a", seconds=0.003, size=SMALL, flips=flips),
    ]
    folder = synthetic.write_run(path / "run", ways, samples=40, count=count)
    sizes = [first, SMALL if first == BIG else BIG]
    (folder / "study.toml").write_text(f'models = ["digits"]\nsizes = {[str(s) for s in sizes]}\n'.replace("'", '"'))
    return load_run(folder)


def test_a_smaller_size_wins_when_it_keeps_the_budget(tmp_path: Path) -> None:
    results = sized(tmp_path)
    run = trial_table.read_trials(results, budget={"top1": 1.0})
    (contest,) = rank_goals(run)
    assert contest.sizes
    text = "\n".join(verdict.list_sentences(run))
    assert text.startswith("digits: fastest within the budget top1=1 is a fp32 at size 32, 3.")
    assert "as fast as pytorch fp32 at size 64." in text.splitlines()[0]
    assert "x [3." in text.splitlines()[0] or ": 3." in text.splitlines()[0]
    assert "against the reference at size 64 on the same images" in text


def test_a_size_that_costs_too_much_is_over_budget_in_every_backend(tmp_path: Path) -> None:
    frame = trial_table.read_trials(sized(tmp_path, flips=0.1), budget={"top1": 1.0}).frame
    assert set(frame[frame["size"] == "32"]["budget"]) == {"over"}
    assert set(frame[frame["size"] == "64"]["budget"]) == {"within"}
    first = frame.set_index(["backend", "size"])["budget_reference"]
    assert (
        first.nunique() == 1 and first.iloc[0] == frame.set_index(["backend", "size"]).loc[("pytorch", "64"), "trial"]
    )


def test_the_first_size_that_was_given_is_the_accuracy_reference(tmp_path: Path) -> None:
    frame = trial_table.read_trials(sized(tmp_path, first=SMALL), budget={"top1": 1.0}).frame
    there = frame.set_index(["backend", "size"])
    assert set(frame["budget_reference"]) == {there.loc[("pytorch", "32"), "trial"]}


def test_without_a_budget_sizes_do_not_compete(tmp_path: Path) -> None:
    assert [c.where for c in rank_goals(trial_table.read_trials(sized(tmp_path)))] == [
        "digits at size 32",
        "digits at size 64",
    ]


def test_other_photographs_are_not_paired(tmp_path: Path) -> None:
    results = sized(tmp_path)
    for path in results.folder.glob("trials/*/r*/outputs.npz"):
        with np.load(path) as file:
            arrays = dict(file)
        if f'"height": {SMALL}' in (path.parent / "job.json").read_text():
            np.savez(path, **{**arrays, "label": np.roll(arrays["label"], 1)})
    frame = trial_table.read_trials(load_run(results.folder), budget={"top1": 1.0}).frame
    assert set(frame[frame["size"] == "32"]["budget"]) == {""}
    assert frame[frame["size"] == "32"]["top1_diff"].isna().all()


def test_the_frontier_has_intervals_on_both_axes(tmp_path: Path) -> None:
    ways = [
        Way("pytorch", seconds=0.010), Way("a", seconds=0.005), Way("b", "int8", seconds=0.002, flips=0.05),
        Way("slow", seconds=0.02, flips=0.2),
    ]  # fmt: skip
    run = trial_table.read_trials(synthetic.write_run(tmp_path / "run", ways, samples=40))
    found = FRONTIER.table(run).to_pandas().set_index("backend")
    assert "slow" not in found.index and "b" in found.index
    for name in ("latency_ms", "throughput", "accuracy"):
        value = "throughput_ips" if name == "throughput" else name
        assert (found[f"{name}_low"] < found[value]).all() and (found[value] < found[f"{name}_high"]).all()
    assert found.loc["b", "frontier"] == "latency and throughput"
    figure = charts.draw_accuracy(run, "throughput_ips")
    assert "95 % interval between processes" in figure.axes[0].get_xlabel()


@pytest.mark.parametrize(("budget", "key"), [({}, "top1"), ({"top5": 1.0}, "top5"), ({"top1": 1.0}, "top1")])
def test_accuracy_is_shown_by_the_budget_s_metric(tmp_path: Path, budget: dict[str, float], key: str) -> None:
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch"), Way("a", flips=0.01)], samples=5)
    run = trial_table.read_trials(folder, budget=budget)
    ((frame, metric),) = ((contest.group, contest.metric) for contest in rank_goals(run))
    assert metric.name == key
    low, value, high = metric.change_in(frame.set_index("backend").loc["a"])
    assert low <= value <= high


def test_columns_of_another_task_serve_as_well(tmp_path: Path) -> None:
    loaded = load_run(synthetic.write_run(tmp_path / "run", [Way("pytorch", labelled=False)], samples=5))
    run = trial_table.read_trials(loaded)
    frame = run.frame.assign(map50_95=41.5, map50_95_low=40.0, map50_95_high=43.0)
    metric = quality(frame)
    assert (metric.name, metric.interval(frame.iloc[0])) == ("mAP", (40.0, 43.0))
    assert [row["accuracy"] for row in FRONTIER.table(replace(run, frame=frame)).rows] == [41.5]


def test_of_two_in_turns_their_own_ratio_says_which_is_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their speed-ups over a reference that jumps, b would be first, but in turns a is faster than b."""
    ways = [Way(name, seconds=0.001, size=BIG) for name in ("pytorch", "a", "b")]
    run = trial_table.read_trials(load_run(synthetic.write_run(tmp_path / "run", ways, samples=40)))
    (contest,) = rank_goals(run)
    ids = {str(row["backend"]): str(row["trial"]) for _, row in run.frame.iterrows()}
    group = contest.group.assign(
        speedup=contest.group["backend"].map({"pytorch": 1.0, "a": 10.0, "b": 12.0}),
        measured=contest.group["backend"].map({"pytorch": "", "a": TURNS, "b": TURNS}),
    )
    contest = replace(contest, group=group)
    seconds = {run.trials[ids[name]].id: value for name, value in {"pytorch": 10.0, "a": 0.8, "b": 1.0}.items()}
    monkeypatch.setattr(rankings_module, "log_ratios", lambda a, b, *_: [math.log(seconds[a.id] / seconds[b.id])])
    assert [*contest.fastest["backend"]] == ["a", "b", "pytorch"]
    monkeypatch.setattr(rankings_module, "log_ratios", lambda a, b, *_: [])
    assert [*replace(contest).fastest["backend"]] == ["b", "a", "pytorch"], "never side by side: their speed-ups decide"


def test_a_lower_median_than_the_winner_s_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that changes its speed between rounds makes medians over other rounds incomparable."""
    ways = [Way(name, seconds=ms / 1e3, size=BIG) for name, ms in (("pytorch", 10.0), ("a", 1.05), ("b", 1.0))]
    run = trial_table.read_trials(load_run(synthetic.write_run(tmp_path / "run", ways, samples=40)))
    (contest,) = rank_goals(run)
    group = contest.group.assign(
        measured=contest.group["backend"].map({"pytorch": "", "a": TURNS, "b": TURNS}),
        rounds=contest.group["backend"].map({"pytorch": 3, "a": 3, "b": 2}),
    )
    contest = replace(contest, group=group)
    seconds = {"pytorch": 10.0, "a": 0.8, "b": 1.0}
    monkeypatch.setattr(
        rankings_module, "log_ratios", lambda a, b, *_: [math.log(seconds[a.backend] / seconds[b.backend])]
    )
    assert [*contest.fastest["backend"]] == ["a", "b", "pytorch"]
    pair = Speedup(1.07, 1.02, 1.12, "faster", TURNS)
    monkeypatch.setattr(answers, "_compare_pair", lambda *_: pair)
    said = answers.describe_reality(contest, pair, None, run, False)
    assert (
        "b fp32 has a lower median, 1.02 ms over 2 rounds, but in turns the winner is 1.07x [1.02, 1.12] as fast"
        in said
    )
