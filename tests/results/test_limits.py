"""Limits: the winner under them, trials not shown to keep them, and the message when no trial does."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import synthetic
from dyno import Study, UserError
from dyno.report.charts import charts
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.report.verdict.findings import FAILURE
from dyno.results import limits
from dyno.results.run_data import RunData
from dyno.results.trial_result import load_run
from synthetic import Way

GOLDEN = Path(__file__).parents[1] / "golden/run"
ENOUGH = 700  # samples of a round; a 99th percentile needs 662


def judged(path: Path, *ways: Way, limit: dict[str, str], samples: int = ENOUGH, **more: Any) -> RunData:
    folder = synthetic.write_run(path / "run", list(ways), samples=samples)
    return trial_table.read_trials(load_run(folder), limit=limit, **more)


def outcomes(run: RunData) -> dict[str, str]:
    names = run.frame["backend"] + " " + run.frame["precision"] + "/" + run.frame["batch"].astype(str)
    return dict(zip(names, run.frame["limit"], strict=True))


def percentile(run: RunData, way: Way, q: float) -> float:
    """Return the percentile in milliseconds over rounds, from the stored samples alone."""
    files = sorted((run.records.folder / "trials" / way.trial.id).glob("r*/samples.npz"))
    return 1e3 * float(np.exp(np.mean([np.log(np.percentile(np.load(f)["latency_model"], q)) for f in files])))


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ({"p99": "5ms"}, 5e-3), ({"p50": "250 us"}, 250e-6), ({"p90": "250µs"}, 250e-6), ({"load": "1.5s"}, 1.5),
        ({"size": "20MB"}, 20e6), ({"memory": "1GiB"}, 2**30), ({"gpu_memory": "500kB"}, 5e5), ({"size": "8B"}, 8.0),
        ({"energy": "3mJ"}, 3e-3), ({"energy": "1e-2J"}, 1e-2),
    ],
)  # fmt: skip
def test_limit_units_match_the_quantity(text: dict[str, str], most: float) -> None:
    (limit,) = limits.make_limits(text)
    assert limit.maximum == pytest.approx(most)


def test_the_fastest_is_chosen_within_the_limits(tmp_path: Path) -> None:
    """A is the fastest by its median, and has the larger file."""
    ways = Way("pytorch", seconds=0.020), Way("a", seconds=0.005), Way("b", "int8", 0.008)
    run = judged(tmp_path, *ways, limit={"size": "2MB", "p99": "15ms"})
    assert outcomes(run) == {"pytorch fp32/1": "over size, p99", "a fp32/1": "over size", "b int8/1": "within"}
    (one,) = verdict.read_verdict(run).decisions
    assert one.text.startswith("fastest within the limits size=2MB, p99=15ms is b int8, 8.")
    assert [run.trials[id].configuration for id in one.candidates] == ["b int8"]
    (left_out,) = (each.text for each in one.findings if each.text.startswith("a fp32 is faster"))
    assert left_out.endswith("but doesn't keep its limits: size 2.90 MB, 45 % over.")  # 2.9 / 2 = 1.45


def test_a_limit_inside_the_interval_is_undecided(tmp_path: Path) -> None:
    ways = Way("pytorch", seconds=0.010), Way("a", seconds=0.005, spread=0.15), Way("b", seconds=0.008)
    steady = judged(tmp_path, *ways, limit={"p99": "1s"})
    row = steady.frame.set_index("backend").loc["a"]
    low, high = row["latency_model_ms_p99_low"], row["latency_model_ms_p99_high"]
    middle = percentile(steady, ways[1], 99)
    assert low < middle < high and row["latency_model_ms_p99"] == pytest.approx(middle)
    run = trial_table.read_trials(steady.records, limit={"p99": f"{(middle + high) / 2}ms"})
    assert outcomes(run)["a fp32/1"] == "undecided p99"
    assert outcomes(trial_table.read_trials(steady.records, limit={"p99": f"{1.01 * high}ms"}))["a fp32/1"] == "within"
    assert outcomes(trial_table.read_trials(steady.records, limit={"p99": f"{0.99 * low}ms"}))["a fp32/1"] == "over p99"
    (one,) = verdict.read_verdict(run).decisions
    assert all(run.trials[id].backend != "a" for id in one.candidates)


def test_a_percentile_of_too_few_samples_proves_no_limit(tmp_path: Path) -> None:
    run = judged(tmp_path, Way("pytorch"), Way("a", seconds=0.005), limit={"p99": "1s"}, samples=50)
    assert set(outcomes(run).values()) == {"undecided p99"}
    (one,) = verdict.read_verdict(run).decisions
    assert one.kind == FAILURE and one.text == (
        "no trial is within the limit p99=1s; the closest is a fp32 at batch 1: "
        f"p99 {percentile(run, Way('a', seconds=0.005), 99):.2f} ms from 50 samples a round, of 662 needed."
    )
    assert re.fullmatch(r"measure longer, with --seconds \d+", dict(one.answers)["next"])
    assert outcomes(trial_table.read_trials(run.records, limit={"p90": "1s"}))["a fp32/1"] == "undecided p90", "64"


def test_the_closest_miss_is_named_where_no_trial_keeps_the_limits(tmp_path: Path) -> None:
    ways = Way("pytorch", seconds=0.010), Way("a", seconds=0.005), Way("b", seconds=0.008)
    run = judged(tmp_path, *ways, limit={"p50": "4ms"})
    (one,) = verdict.read_verdict(run).decisions
    over = 100 * (percentile(run, ways[1], 50) / 4 - 1)
    assert one.kind == FAILURE and not one.candidates
    assert one.text.startswith("no trial is within the limit p50=4ms; the closest is a fp32 at batch 1: p50 ")
    assert one.text.endswith(f" ms], {over:.0f} % over.")


def test_the_best_batch_is_chosen_within_the_limits(tmp_path: Path) -> None:
    ways = [Way(name, seconds=s, batch=b) for name, s in (("pytorch", 0.010), ("a", 0.004)) for b in (1, 4, 8)]
    free = judged(tmp_path, *ways, limit={"p99": "10s"})
    of_four, of_eight = (percentile(free, way, 99) for way in ways[-2:])
    run = trial_table.read_trials(free.records, limit={"p99": f"{(of_four + of_eight) / 2:.3f}ms"})
    assert outcomes(run)["a fp32/4"] == "within" and outcomes(run)["a fp32/8"] == "over p99"
    _, most = verdict.read_verdict(run).decisions
    assert re.match(r"most images per second within the limit p99=[\d.]+ms with a fp32 at batch 4: ", most.text)
    assert any(
        re.match(r"a fp32 at batch 8 reaches .* but doesn't keep its limits: p99 ", f.text) for f in most.findings
    )
    _, most = verdict.read_verdict(free).decisions
    assert "with a fp32 at batch 8: " in most.text


def test_a_budget_and_limits_must_both_hold(tmp_path: Path) -> None:
    ways = (
        Way("pytorch", seconds=0.010), Way("a", seconds=0.005), Way("b", "int8", 0.003, flips=0.2),
        Way("c", "int8", 0.008),
    )  # fmt: skip
    run = judged(tmp_path, *ways, limit={"size": "2MB"}, budget={"top1": 3.0})
    (one,) = verdict.read_verdict(run).decisions
    assert one.text.startswith("fastest within the budget top1=3 and the limit size=2MB is c int8, 8.")


def test_an_unmeasured_value_does_not_keep_a_limit(tmp_path: Path) -> None:
    run = trial_table.read_trials(GOLDEN, limit={"size": "1GB"})
    by_name = run.frame.set_index(["backend", "precision", "options"])["limit"]
    assert by_name["pytorch", "fp32", ""] == "unmeasured size" and by_name["onnxruntime", "int8", ""] == "within"
    assert by_name["pytorch", "int8", ""] == "", "it was skipped"


def test_the_table_shows_the_limited_quantities(call: Any) -> None:
    rows = pd.read_csv(GOLDEN.parent / "results.csv")
    stored = dict(zip(zip(rows["backend"], rows["precision"], strict=True), rows["size_mb"], strict=True))
    assert stored["onnxruntime", "int8"] < 1 < stored["onnxruntime", "fp32"]
    _, out, _ = call("show", GOLDEN, "--limit", "size=1MB,memory=2GB", "--budget", "top1=50", code=0)
    rows = {tuple(line.split()[:2]): line for line in out.splitlines() if line[:1].isalpha()}
    assert "memory MB" in rows["backend", "precision"] and "size MB" in rows["backend", "precision"]
    assert "over size" in rows["onnxruntime", "fp32"] and "faster" in rows["onnxruntime", "int8"]
    assert "reference, no size" in rows["pytorch", "fp32"]
    assert "  pytorch fp32: size was not measured (the engine reads no file)" in out
    assert "fastest within the budget top1=50 and the limits size=1MB, memory=2GB is onnxruntime int8, " in out


def test_charts_show_the_limit_of_the_median(tmp_path: Path) -> None:
    ways = Way("pytorch", seconds=0.010), Way("a", "int8", 0.005, flips=0.012)
    (axes,) = charts.draw_accuracy(judged(tmp_path, *ways, limit={"p50": "8ms", "load": "3s"})).axes
    assert [text.get_text().strip() for text in axes.texts].count("limit p50=8ms") == 1
    assert [8.0, 8.0] in [list(line.get_xdata()) for line in axes.lines]


def test_limits_are_set_in_study_files_and_python(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('models = ["torchvision:resnet18"]\n[limit]\np99 = "5ms"\nsize = "20 MB"\n')
    study = Study.from_toml(tmp_path / "s.toml")
    assert study == Study(models="torchvision:resnet18", limit={"p99": "5ms", "size": "20 MB"})
    (tmp_path / "again.toml").write_text(study.to_toml())
    assert Study.from_toml(tmp_path / "again.toml") == study
    with pytest.raises(UserError, match=r"limit size=20 parsecs is not a number with a unit \(B, kB, "):
        Study(models="torchvision:resnet18", limit={"size": "20 parsecs"})
