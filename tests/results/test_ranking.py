"""Rankings, the frontier, the fastest within the budget, saturation, and no winner where most jobs were disturbed."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import synthetic
from dyno.report.charts import charts
from dyno.report.tables import trial_table
from dyno.report.tables.frontier_table import FRONTIER
from dyno.report.verdict import decisions, verdict
from dyno.results import ranking, stats
from dyno.results import ranking as rankings_module
from dyno.results.blocks import RoundRatios
from dyno.results.correctness import OUTPUTS_WRONG
from dyno.results.metrics import choose_metric
from dyno.results.ranking import LATENCY, THROUGHPUT, compare_rows, cpu_contention, rank_goals
from dyno.results.stats import IN_TURNS, Speedup
from dyno.results.trial_result import Results, TrialResult, load_run
from synthetic import Way

BIG, SMALL = 64, 32


def sized(path: Path, *, flips: float = 0.0, first: int = BIG, count: int = 900) -> Results:
    """Return a run with two sizes of one network; the smaller size is twice as fast."""
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
    run = trial_table.read_trials(sized(tmp_path), budget={"top1": 1.0})
    (contest,) = rank_goals(run)
    assert contest.sizes
    text = "\n".join(verdict.list_sentences(run))
    assert text.startswith("digits: fastest within the budget top1=1 is a fp32 at size 32, 3.")
    assert "as fast as pytorch fp32 at size 64." in text.splitlines()[0]
    assert "x [3." in text.splitlines()[0] or ": 3." in text.splitlines()[0]
    assert "against the reference at size 64 on the same images" in text


def test_a_size_over_the_budget_is_so_in_every_backend(tmp_path: Path) -> None:
    frame = trial_table.read_trials(sized(tmp_path, flips=0.1), budget={"top1": 1.0}).frame
    assert set(frame[frame["size"] == "32"]["budget"]) == {"over"}
    assert set(frame[frame["size"] == "64"]["budget"]) == {"within"}
    first = frame.set_index(["backend", "size"])["budget_reference"]
    assert (
        first.nunique() == 1 and first.iloc[0] == frame.set_index(["backend", "size"]).loc[("pytorch", "64"), "trial"]
    )


def test_the_first_given_size_is_the_accuracy_reference(tmp_path: Path) -> None:
    frame = trial_table.read_trials(sized(tmp_path, first=SMALL), budget={"top1": 1.0}).frame
    there = frame.set_index(["backend", "size"])
    assert set(frame["budget_reference"]) == {there.loc[("pytorch", "32"), "trial"]}


def test_without_a_budget_sizes_do_not_compete(tmp_path: Path) -> None:
    assert [c.scope for c in rank_goals(trial_table.read_trials(sized(tmp_path)))] == [
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
def test_accuracy_is_shown_in_the_metric_of_the_budget(tmp_path: Path, budget: dict[str, float], key: str) -> None:
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch"), Way("a", flips=0.01)], samples=5)
    run = trial_table.read_trials(folder, budget=budget)
    ((frame, metric),) = ((contest.group, contest.metric) for contest in rank_goals(run))
    assert metric.name == key
    low, value, high = metric.change_in(frame.set_index("backend").loc["a"])
    assert low <= value <= high


def test_accuracy_columns_of_other_tasks_are_used(tmp_path: Path) -> None:
    loaded = load_run(synthetic.write_run(tmp_path / "run", [Way("pytorch", labelled=False)], samples=5))
    run = trial_table.read_trials(loaded)
    frame = run.frame.assign(map50_95=41.5, map50_95_low=40.0, map50_95_high=43.0)
    metric = choose_metric(frame)
    assert (metric.name, metric.interval(frame.iloc[0])) == ("mAP", (40.0, 43.0))
    assert [row["accuracy"] for row in FRONTIER.table(replace(run, frame=frame)).rows] == [41.5]


def test_interleaved_trials_are_ranked_by_their_own_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By speed-ups over an unsteady reference b would be first, but in turns a is faster than b."""
    ways = [Way(name, seconds=0.001, size=BIG) for name in ("pytorch", "a", "b")]
    run = trial_table.read_trials(load_run(synthetic.write_run(tmp_path / "run", ways, samples=40)))
    (contest,) = rank_goals(run)
    ids = {str(row["backend"]): str(row["trial"]) for _, row in run.frame.iterrows()}
    group = contest.group.assign(
        speedup=contest.group["backend"].map({"pytorch": 1.0, "a": 10.0, "b": 12.0}),
        measured=contest.group["backend"].map({"pytorch": "", "a": IN_TURNS, "b": IN_TURNS}),
    )
    contest = replace(contest, group=group)
    seconds = {run.trials[ids[name]].id: value for name, value in {"pytorch": 10.0, "a": 0.8, "b": 1.0}.items()}

    def find_rounds(a: TrialResult, b: TrialResult, *_: Any) -> list[RoundRatios]:
        ratio = math.log(seconds[a.id] / seconds[b.id])
        return [RoundRatios(None, np.full(4, log), log == ratio, True) for log in (ratio, -4 * ratio)]

    monkeypatch.setattr(rankings_module, "block_ratios", find_rounds)
    assert [*contest.fastest["backend"]] == ["a", "b", "pytorch"], (
        "a disturbed round decides nothing beside a quiet one"
    )
    monkeypatch.setattr(rankings_module, "block_ratios", lambda a, b, *_: [])
    assert [*replace(contest).fastest["backend"]] == ["b", "a", "pytorch"], "never side by side: their speed-ups decide"


def test_two_interleaved_rounds_decide_and_lost_rounds_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs disturbed the third of three rounds."""
    a, b = load_run(synthetic.write_run(tmp_path / "run", [Way("a"), Way("b")], samples=40))
    quiet = [RoundRatios(None, np.full(4, log), True, True) for log in (0.1, 0.2)]
    monkeypatch.setattr(rankings_module, "block_ratios", lambda *_: quiet)
    monkeypatch.setattr(rankings_module, "log_ratios", lambda *_, **__: [0.1, 0.2, 3.0])
    found = ranking.gather_evidence(a, b, "model")
    assert found is not None and (found.measured, found.rounds, found.disturbed) == (IN_TURNS, 2, 1)
    assert found.difference == pytest.approx(0.15) and found.unfiltered == pytest.approx(1.1)
    assert [ranking._is_short(replace(found, rounds_seen=looked), target=3) for looked in (3, 5, 6)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("speed", [LATENCY, THROUGHPUT])
def test_separately_measured_trials_are_compared_at_one_core_distance(tmp_path: Path, speed: str) -> None:
    """Alone, each trial would keep another distance: near in two of five rounds, and in four of five."""
    ways = [Way(name, seconds=0.001, batch=batch, statuses=("ok",) * 5) for name, batch in (("a", 1), ("b", 8))]
    folder = synthetic.write_run(tmp_path / "run", ways, samples=40)
    near = {ways[0].trial.id: 2, ways[1].trial.id: 4}
    costs: dict[str, list[float]] = {}
    for path in sorted(folder.glob("trials/*/r*/record.json")):
        record = json.loads(path.read_text())
        is_near = record["round"] < near[record["trial"]]
        boundaries = ("model", "throughput")
        record["facts"]["core_latencies"] = dict.fromkeys(boundaries, [170 if is_near else 580] * 4)
        record["facts"]["delays"] = dict.fromkeys(boundaries, [0.0] * 4)
        path.write_text(json.dumps(record))
        samples = dict(np.load(path.with_name("samples.npz")))
        if not is_near:
            samples = {name: each * (0.5 if name == "throughput" else 2) for name, each in samples.items()}
            np.savez(path.with_name("samples.npz"), **samples)
        else:
            found = samples["latency_model"] if speed == LATENCY else 1 / samples["throughput"]
            costs.setdefault(record["trial"], []).append(float(np.log(np.median(found))))
    run = trial_table.read_trials(load_run(folder))
    a, b = (next(row for _, row in run.frame.iterrows() if row["backend"] == name) for name in "ab")
    found = compare_rows(run.trials[b["trial"]], run.trials[a["trial"]], b, a, speed, None)
    assert found is not None and found.rounds == 2
    own, other = (costs[way.trial.id] for way in ways[::-1])
    assert found.difference == pytest.approx(np.mean(other) - np.mean(own), abs=2e-3)


def test_a_median_below_that_of_the_winner_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose speed changes between rounds, medians over different rounds can't be compared."""
    ways = [Way(name, seconds=ms / 1e3, size=BIG) for name, ms in (("pytorch", 10.0), ("a", 1.05), ("b", 1.0))]
    run = trial_table.read_trials(load_run(synthetic.write_run(tmp_path / "run", ways, samples=40)))
    (contest,) = rank_goals(run)
    group = contest.group.assign(
        measured=contest.group["backend"].map({"pytorch": "", "a": IN_TURNS, "b": IN_TURNS}),
        rounds=contest.group["backend"].map({"pytorch": 3, "a": 3, "b": 2}),
    )
    contest = replace(contest, group=group)
    seconds = {"pytorch": 10.0, "a": 0.8, "b": 1.0}

    def find_rounds(a: TrialResult, b: TrialResult, *_: Any) -> list[RoundRatios]:
        return [RoundRatios(None, np.full(4, math.log(seconds[a.backend] / seconds[b.backend])), True, True)]

    monkeypatch.setattr(rankings_module, "block_ratios", find_rounds)
    assert [*contest.fastest["backend"]] == ["a", "b", "pytorch"]
    pair = Speedup(1.07, 1.02, 1.12, "faster", IN_TURNS)
    monkeypatch.setattr(decisions, "_compare_pair", lambda *_: pair)
    (said,) = decisions.Winner(contest, run).explain_lower_latency()
    assert said.text == (
        "b fp32 has a lower latency, 1.02 ms over 2 rounds, but in turns a fp32 is 1.07x [1.02, 1.12] as fast."
    )


POINTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=25)


@given(POINTS, st.sampled_from([LATENCY, THROUGHPUT]))
def test_frontier_points_are_exactly_the_undominated_ones(points: list[tuple[int, int]], speed: str) -> None:
    sign = 1 if speed == THROUGHPUT else -1
    frame = pd.DataFrame({"status": "ok", "outputs": "", speed: [float(p[0]) for p in points]})
    frame["top1"] = [float(p[1]) for p in points]
    edge = {(sign * r[speed], r["top1"]) for _, r in ranking.find_pareto(frame, speed).iterrows()}
    every = {(sign * x, float(y)) for x, y in points}

    def beaten(p: tuple[float, float]) -> bool:
        return any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in every)

    assert edge == {p for p in every if not beaten(p)}


def test_only_successful_trials_can_be_chosen(demo: Results) -> None:
    frame = trial_table.read_trials(demo, budget={"top1": 1.2}).frame
    assert set(ranking.list_usable(frame)["status"]) == {"ok"}
    assert set(ranking.keep_within_budget(frame)["budget"]) == {"within"}
    first = ranking.rank_trials(ranking.keep_within_budget(frame[frame["batch"] == 1])).iloc[0]
    assert ranking.configuration_of(first) == "openvino bf16"
    assert (
        ranking.configuration_of(ranking.rank_trials(ranking.list_usable(frame), THROUGHPUT).iloc[0]) == "openvino int8"
    )


def saturating(path: Path, batches: tuple[int, ...], fixed: float) -> pd.DataFrame:
    """Return the table of trials with latency fixed + b at batch b, so that b / (fixed + b) saturates."""
    ways = [
        Way("a", batch=b, seconds=0.001 * (fixed + b) / (0.3 + 0.7 * b), spread=0.0, statuses=("ok",)) for b in batches
    ]
    return trial_table.read_trials(load_run(synthetic.write_run(path / "run", ways, samples=20, count=5))).frame


def test_saturation_is_the_smallest_batch_near_the_best(tmp_path: Path) -> None:
    (found,) = ranking.find_saturation(saturating(tmp_path, (1, 8, 32, 128, 256), fixed=1))
    assert (found.batch, found.largest) == (32, 256)  # 32/33 is 97 %, 8/9 is 89 % of the best
    assert "saturates at batch 32 (9" in found.description
    assert found.images_per_s >= 0.95 * found.best_images_per_s


def test_still_rising_throughput_is_reported(tmp_path: Path) -> None:
    (found,) = ranking.find_saturation(saturating(tmp_path, (1, 2, 4), fixed=50))
    assert found.description == "throughput still rises at batch 4, the largest tried"


def test_a_best_batch_below_the_largest_is_stated_once() -> None:
    found = ranking.Saturation("net", "a", "64", 8, 9.0, best_batch=8, best_images_per_s=9.0, largest=16)
    assert found.description == "throughput is highest at batch 8, of up to 16"


def test_batches_without_a_rate_give_no_saturation(tmp_path: Path) -> None:
    """After disturbed throughput, batch / latency is only a lower bound of the rate."""
    frame = saturating(tmp_path, (1, 8, 32), fixed=1)
    assert ranking.find_saturation(frame.assign(throughput_ips=[100.0, math.nan, math.nan])) == []
    assert len(ranking.find_saturation(frame.assign(throughput_ips=math.nan))) == 1


def test_one_batch_gives_no_saturation(tmp_path: Path) -> None:
    assert ranking.find_saturation(saturating(tmp_path, (8,), fixed=2)) == []


def test_throughput_falls_back_on_latency(demo: Results) -> None:
    frame = trial_table.read_trials(demo).frame.assign(throughput_ips=float("nan"))
    r = frame.iloc[0]
    assert ranking.read_throughput(frame).iloc[0] == pytest.approx(1e3 * r["batch"] / r["latency_ms"])


def test_interleaved_trials_are_ordered_by_their_ratios(demo: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = trial_table.read_trials(demo).frame.iloc[:3].assign(
        latency_ms=[2.0, 1.0, 1.1], speedup=[1.0, 1.9, 2.1], trial=["a", "b", "c"], reference="a",
        measured=["", stats.IN_TURNS, stats.IN_TURNS],
    )  # fmt: skip
    assert [*ranking.rank_trials(frame)["trial"]] == ["c", "b", "a"]
    monkeypatch.setattr(ranking, "block_ratios", lambda *_: [])  # as if two trials had measured only with the reference
    assert [*ranking.sort_rows(frame, dict.fromkeys("abc"))["trial"]] == ["c", "b", "a"]
    assert [*ranking.rank_trials(frame.assign(measured=["", stats.IN_TURNS, stats.ONE_AFTER_ANOTHER]))["trial"]] == [
        "b",
        "c",
        "a",
    ]
    assert [*ranking.rank_trials(frame.assign(reference=["a", "a", "b"]))["trial"]] == ["b", "c", "a"]


BUSY, QUIET = ({"others_busy": {"model": busy}, "contention_threshold": 0.2} for busy in (1.5, 0.1))


def run(path: Path, *facts: dict[str, object]) -> Results:
    ways = [Way(f"way{k}", seconds=0.01 / (k + 1), facts=dict(each)) for k, each in enumerate(facts)]
    return load_run(synthetic.write_run(path / "run", ways, samples=50))


def said(results: Results) -> list[str]:
    return verdict.list_sentences(trial_table.read_trials(results))


def printed(results: Results) -> list[str]:
    return verdict.read_verdict(trial_table.read_trials(results)).lines


def test_a_quiet_study_reports_no_contention(tmp_path: Path) -> None:
    results = run(tmp_path, QUIET, QUIET)
    assert cpu_contention(results) is None
    assert "fastest is way1" in said(results)[0]
    assert f"  next: take it: dyno export {results.folder}" in printed(results)
    few, more = ({**QUIET, "others_busy": {"model": busy}} for busy in (0.2, 0.21))
    assert cpu_contention(run(tmp_path / "few", few, few)) is None, "at the threshold"
    assert cpu_contention(run(tmp_path / "more", more, more)) is not None


def test_a_few_disturbed_jobs_are_a_warning(tmp_path: Path) -> None:
    lines = said(run(tmp_path, BUSY, QUIET, QUIET))
    assert "fastest is" in lines[0]
    assert any(
        "during 3 of 9 jobs: those latencies and their order may differ from a quiet machine's" in line
        for line in lines
    )


def test_contention_is_reported_above_its_thresholds(tmp_path: Path) -> None:
    def disturb(count: int, rounds: int, trials: int, same: bool = False) -> tuple[int, int] | None:
        folder = tmp_path / f"{count}-{rounds}-{trials}-{same}"
        ways = [
            Way(f"way{k}", seconds=0.01 / (k + 1), facts=dict(QUIET), statuses=("ok",) * rounds) for k in range(trials)
        ]
        synthetic.write_run(folder, ways, samples=5)
        records = sorted(folder.glob("trials/*/r*/record.json"), key=lambda p: (p.parent.name, p.parent.parent.name))
        chosen = [p for p in records if p.parent.parent == records[0].parent.parent] if same else records
        for path in chosen[:count]:
            record = json.loads(path.read_text())
            record["facts"] |= BUSY
            path.write_text(json.dumps(record))
        found = cpu_contention(load_run(folder))
        return None if found is None else (found.disturbed, found.jobs)

    assert disturb(2, rounds=5, trials=11) is None, "2 of 55 in two trials, each with 4 more rounds"
    assert disturb(2, rounds=5, trials=11, same=True) is None
    assert disturb(3, rounds=5, trials=11, same=True) == (3, 55), "most rounds of that trial"
    assert disturb(5, rounds=5, trials=11) is None and disturb(6, rounds=5, trials=11) == (6, 55)
    assert disturb(1, rounds=1, trials=11) == (1, 11), "its only round"


def test_mostly_disturbed_jobs_leave_no_winner(tmp_path: Path) -> None:
    results = run(tmp_path, BUSY, BUSY, QUIET)
    lines = said(results)
    assert lines[0].startswith("No winner is named: other programs kept up to 1.5 processors busy during 6 of 9 jobs, ")
    assert lines[1].startswith("real: the table's verdicts hold beside those programs")
    text = "\n".join(lines[2:])
    assert not any(word in text for word in ("fastest", "runner-up", "most images", "Other programs", "faster"))
    assert "Precision: " in text
    next_step = f"  next: measure again on a quiet machine, or choose: dyno export {results.folder} BACKEND/PRECISION"
    assert next_step in printed(results)


def test_a_lone_configuration_has_no_winner_to_withhold(tmp_path: Path) -> None:
    """Holds at any number of batches."""
    text = "\n".join(said(run(tmp_path, BUSY)))
    assert "way0 fp32 takes 10." in text and "winner" not in text
    assert "during 3 of 3 jobs: those latencies may differ from a quiet machine's; measure again on one." in text
    ways = [Way("way0", batch=batch, seconds=0.01 * batch, facts=dict(BUSY)) for batch in (1, 2)]
    text = "\n".join(said(load_run(synthetic.write_run(tmp_path / "batches", ways, samples=50))))
    assert "way0 fp32 takes 10." in text and "No winner" not in text and "during 6 of 6 jobs" in text


def test_interleaved_trials_have_a_winner_despite_contention(tmp_path: Path) -> None:
    in_turns = {**BUSY, "turns": {"set": "abc", "place": 0}}
    results = run(tmp_path, in_turns, in_turns, in_turns)
    contention = cpu_contention(results)
    assert contention is not None and (contention.disturbed, contention.alone) == (9, 0)
    lines = said(results)
    assert "fastest is way2" in lines[0]
    assert lines[1].endswith("; on a busy machine.")
    held = "9 of 9 jobs: rankings were measured interleaved and hold under this load, which may slow engines unequally"
    held += "; absolute latencies may differ from a quiet machine's."
    assert any(held in line for line in lines)
    (one,) = verdict.read_verdict(trial_table.read_trials(results)).decisions
    assert (one.kind, one.badge) == ("warning", "busy machine")


def test_failures_are_reported_despite_contention(tmp_path: Path) -> None:
    ways = [Way("a", facts=dict(BUSY)), Way("b", statuses=("crashed",), reason="killed by SIGSEGV")]
    text = "\n".join(said(load_run(synthetic.write_run(tmp_path / "run", ways, samples=50))))
    assert "a fp32 takes" in text and "No winner" not in text, "nothing is left to compare it with"
    assert "1 of 2 trials did not finish: 1 crashed" in text


def test_wrong_outputs_come_before_contention(tmp_path: Path) -> None:
    read = trial_table.read_trials(run(tmp_path, BUSY, BUSY, BUSY))
    read.frame.loc[1, ["outputs", "verdict"]] = [OUTPUTS_WRONG, f"{OUTPUTS_WRONG}: off by 1"]
    first, second, *_ = verdict.list_sentences(read)
    assert "way1" in first and f"gave {OUTPUTS_WRONG}: off by 1" in first and second.startswith("No winner is named")


def test_the_page_names_no_winner_under_contention(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from dyno.report import report

    text = report.write_report([trial_table.read_trials(run(tmp_path, BUSY, BUSY))], tmp_path / "page").read_text(
        encoding="utf-8"
    )
    assert "No winner is named" in text and "fastest is" not in text
