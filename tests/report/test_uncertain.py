"""Of an interval wider than a factor of two only the useful limit is printed; CSV and JSON keep both."""

import io
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

import printed
import synthetic
from dyno import formatting
from dyno.regression import compare_table
from dyno.report.export import export
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results.trial_result import Results, load_run
from synthetic import Way

BOUND = re.compile(r"(at least |≥|at most |≤)[\d.]+x|unclear")
BRACKETS = re.compile(r"\[([\d.,]+)(?: \S+)?, ([\d.,]+)(?: \S+)?\]")


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Trials at two batches with far larger variation between processes than between backends."""
    at = {"spread": 0.9, "build": 1.0}
    ways = [
        Way(name, seconds=s, batch=b, **at)
        for b in (1, 8)
        for name, s in (("pytorch", 0.01), ("a", 0.002), ("b", 0.001))
    ]
    return load_run(synthetic.write_run(tmp_path_factory.mktemp("wild") / "run", ways, samples=50))


def wide(text: str) -> list[str]:
    """Return the printed intervals of ratios and times that are wider than a factor of two."""
    found = []
    for match in BRACKETS.finditer(text):
        low, high = (float(each.replace(",", "")) for each in match.groups())
        found += [match.group()] if low <= 0 or high > 2 * low else []
    return found


def test_an_unclear_ratio_of_times_is_a_sentence() -> None:
    assert formatting.describe_time(formatting.format_ratio(1.0, 0.1, 9.0)) == "the ratio of B's time to A's is unclear"
    assert formatting.describe_time(formatting.format_ratio(2.0, 1.9, 2.1), "time per frame").startswith(
        "B takes 2.00x [1.90, "
    )


def test_the_check_detects_a_wide_interval() -> None:
    assert wide("59.41x [0.00, 14451332363415.70]") and wide("5 ms [1.0 ms, 3.0 ms]")
    assert not wide("2.1x [1.90, 2.30]") and not wide("1.5 ms [1.2 ms, 1.7 ms]")


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.9, 2.3, " [1.9, 2.3]"),
        (1.0, 2.0, " [1.0, 2.0]"),
        (1.0, 2.1, " [at least 1.0]"),
        (0.0, 1e12, " [unclear]"),
        (float("nan"), float("nan"), ""),
    ],
)
def test_limits_in_digits_or_words(low: float, high: float, text: str) -> None:
    assert formatting.format_limits(low, high, lambda v: f"{v:.1f}") == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.9, 2.3, "2.00x [1.90, 2.30]"),
        (8.6099, 34.8, "at least 8.60x"),
        (0.92, 2.7, "at least 0.92x"),
        (0.05, 0.3951, "at most 0.40x"),
        (0.1, 1.7, "at most 1.70x"),
        (0.3, 4.0, "unclear"),
        (float("nan"), float("nan"), "2.00x"),
    ],
)
def test_ratios_are_written_with_their_useful_limit(low: float, high: float, text: str) -> None:
    assert formatting.format_ratio(2.0, low, high) == text


def test_ratios_contradicted_by_the_medians_are_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = trial_table._fit_latencies
    monkeypatch.setattr(trial_table, "_fit_latencies", lambda s, _: fit(s, 1e9))
    ways = [Way("pytorch"), Way("a", seconds=0.005), Way("b", seconds=0.004)]
    run = trial_table.read_trials(load_run(synthetic.write_run(tmp_path / "run", ways)))
    texts = [*verdict.list_sentences(run), printed.trials(run, "text")]
    assert "one of b fp32 and pytorch fp32 (undecided)" in texts[0] and "nan" not in " ".join(texts)


def test_no_wide_interval_is_printed(wild: Results, tmp_path: Path) -> None:
    for path in shutil.copytree(wild.folder, tmp_path / "again").glob("trials/*/*/record.json"):
        path.write_text(path.read_text().replace('"seconds": 3.2', '"seconds": 3.3'))
    again = load_run(tmp_path / "again")
    run = trial_table.read_trials(wild)
    loose = run.frame["speedup_high"] > 2 * run.frame["speedup_low"]
    assert loose.any(), "the fixture is too tame"
    texts = {format: printed.trials(run, format) for format in ("text", "markdown")}
    texts["verdict"] = "\n".join(verdict.list_sentences(run))
    texts |= {name: export([table], "markdown") for name, table in printed.every(run).items()}
    texts["compare"] = export([compare_table.compare_runs(wild, again)], "markdown")
    for name, text in texts.items():
        assert not wide(text), (name, wide(text))
    assert all(BOUND.search(texts[name]) for name in ("text", "markdown", "compare"))


def test_machine_readable_tables_keep_wide_intervals(wild: Results) -> None:
    run = trial_table.read_trials(wild)
    read = pd.read_csv(io.StringIO(printed.trials(run, "csv")))
    assert read["speedup_high"].max() == pytest.approx(run.frame["speedup_high"].max())
    assert read["speedup_high"].max() > 10
    widest = f"{run.frame['speedup_high'].max():.2f}"
    for name in ("speedup", "sizes"):
        table = printed.every(run)[name]
        assert BOUND.search(export([table])) and widest not in export([table])
        assert table.to_pandas().select_dtypes("number").max().max() > 10


def test_the_page_prints_no_wide_interval(wild: Results, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from dyno.report import report

    text = re.sub(
        r"<[^>]*>", " ", report.write_report([trial_table.read_trials(wild)], tmp_path).read_text(encoding="utf-8")
    )
    assert BOUND.search(text) and not wide(text), wide(text)
