"""History of several runs: each trial's latency from run to run, and the facts that changed."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dyno.formatting import clean_text, format_moment, format_number, shorten_text
from dyno.report import style
from dyno.report.charts import charts
from dyno.report.export import make_page, make_parts
from dyno.report.report import list_missing, names_of
from dyno.report.tables import TableKind, trial_table
from dyno.report.tables.trial_table import IDENTITY, pick
from dyno.report.verdict.verdict import read_start
from dyno.results.blocks import CACHE_DISTANCE_RATIO, list_core_latencies
from dyno.results.correctness import OUTPUTS_WRONG
from dyno.results.ranking import LATENCY
from dyno.results.run_data import RunData
from dyno.results.trial_result import TrialResult
from dyno.table import FINE, TEXT, Column, Row, Table, is_missing
from dyno.worker.extras import name_lacking
from dyno.worker.option_values import check_types
from dyno.worker.record import write_text
from dyno.worker.spec import UserError

HASH_LENGTH = 8  # characters of a hash
MACHINE_FACTS = ("cpu", "gpu", "cores", "governor")  # facts of the environment that may affect latencies
AT_COMMIT = re.compile(r"(.+)@([^@/\s()]+)")  # a model's name and its commit
MAX_STEPS_NAMED = 3  # steps named in sentences
MAX_NAME_LENGTH = 24  # characters of a run's name below the chart
COLUMNS = (
    *pick(*IDENTITY),
    Column("run", "its folder's name", kind=TEXT),
    Column("date", "start of the run's first job", kind=TEXT),
    *pick("status", "reason", "latency_ms", "latency_ms_low", "latency_ms_high"),
    Column("step", "latency over that of the run before: above 1 is slower", kind=FINE, title="over the last"),
    Column("changed", "versions, weights, code, commit or machine that differ from the run before", kind=TEXT, rank=1),
    Column("commit", "of the model's file, else of the folder that the run started in (+: changed)", kind=TEXT, rank=3),
    Column("weights", "beginning of their sha256", kind=TEXT, rank=4),
    Column("dyno", "version of Dyno that began the run", kind=TEXT, rank=5),
    Column("versions", "of the libraries in the trial's process", kind=TEXT, rank=6),
    *pick("boundary", "clock", "verdict", "trial"),
)
PRINTED = (*IDENTITY, "run", "date", "status", "latency_ms", "step", "changed")
HISTORY = TableKind(
    "history", "History", "Several runs: a row per trial and run, by date, with what changed.",
    command="dyno show RUN RUN …",
)  # fmt: skip


def read_history(*folders: str | Path) -> Table:
    """Return the trials of several run folders as one table, as `dyno show RUN RUN …` prints it: see `make_history`."""
    for folder in folders:
        check_types({"folders": folder}, {"folders": str | Path})
    if len(folders) < 2:
        raise UserError(f"a history is of two runs or more, not of {len(folders)}")
    return make_history([trial_table.read_trials(Path(folder)) for folder in folders])


def make_history(runs: Sequence[RunData]) -> Table:
    """Return the trials of all runs as a table, by configuration and date; its notes name the largest steps.

    A `step` is a trial's latency over that of its previous measurement at the same boundary and clock; failed trials
    and wrong outputs have no step. Raises `UserError` for a run that is named twice, or without a common trial.
    """
    dated_runs = sorted(zip(names_of(runs), runs, strict=True), key=lambda pair: read_start(pair[1].records))
    series: dict[tuple[str, ...], list[tuple[Row, dict[str, str]]]] = {}
    min_latency = min((n for run in runs for t in run.trials.values() for n in list_core_latencies(t)), default=0.0)
    for run_index, (name, run) in enumerate(dated_runs):
        cells = run.frame.to_dict("records")
        counts = Counter(map(_make_key, cells))
        for row in cells:
            trial, key = run.trials[row["trial"]], _make_key(row)
            key = key if counts[key] == 1 else (*key, trial.id)  # rows with equal keys are matched by id
            facts = _read_facts(trial, row, run, min_latency)
            extra = {"run": name, "#place": run_index, "date": format_moment(read_start(run.records)), "model": key[0]}
            extra |= {column: facts.get(column, "") for column in ("commit", "dyno")}
            extra |= {"weights": facts.get("weights", ""), "versions": trial.described_versions}
            series.setdefault(key, []).append((row | extra, facts))
    if not any(len(rows) > 1 for rows in series.values()):
        raise UserError(f"the {len(runs)} runs have no trial in common; `dyno report` shows them side by side")
    rows = [row for entries in series.values() for row in _add_steps(entries)]
    device_key = ("device",) if len({row["device"] for row in rows}) > 1 else ()
    notes = tuple(_list_steps(rows, dict(dated_runs)))
    return HISTORY.build(COLUMNS, rows, notes=notes, group=("model", "size", "batch", *device_key), printed=PRINTED)


def _make_key(row: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return a trial's key across runs: its identity, without the commit of its model."""
    model = AT_COMMIT.fullmatch(str(row["model"]))
    return (model[1] if model else str(row["model"]), *(str(row[name]) for name in IDENTITY if name != "model"))


def _read_facts(trial: TrialResult, row: Mapping[Any, Any], run: RunData, min_latency: float) -> dict[str, str]:
    """Return facts that may explain a changed latency, by name; `min_latency` is the least core-to-core latency."""
    model, environment = trial.spec.model, run.records.environment
    commit = AT_COMMIT.fullmatch(str(row["model"]))
    facts = {
        "commit": commit[2] if commit else environment.get("commit"),
        "code": model.source_sha256[:HASH_LENGTH],
        "weights": (trial.facts.weights_sha256 or model.weights_sha256)[:HASH_LENGTH],
        "dyno": (environment.get("versions") or {}).get("inference-dyno", ""),
        **trial.versions,
        "threads": trial.facts.threads,
        "processors": _name_distance(list_core_latencies(trial), min_latency),
        **{name: environment.get(name) for name in MACHINE_FACTS},
    }
    return {name: clean_text(value) for name, value in facts.items() if value not in (None, "", [])}


def _name_distance(latencies: Sequence[float], min_latency: float) -> str:
    """Return how far apart the processors were; "" without a core-to-core latency."""
    if not latencies:
        return ""
    return "far apart" if median(latencies) > CACHE_DISTANCE_RATIO * min_latency else "near each other"


def _add_steps(series: Sequence[tuple[Row, dict[str, str]]]) -> Iterator[Row]:
    """Yield one trial's rows, each with its step from the last measured row and the facts that changed."""
    last: tuple[Row, dict[str, str]] | None = None
    for row, facts in series:
        if not _has_speed(row):
            yield row
            continue
        if last is not None:
            before, base = last
            names = dict.fromkeys((*base, *facts))
            changes = [
                f"{n} {base.get(n, 'none')} to {facts.get(n, 'none')}" for n in names if base.get(n) != facts.get(n)
            ]
            row["changed"] = "; ".join(changes)
            if all(before[name] == row[name] for name in ("boundary", "clock")):
                step = row[LATENCY] / before[LATENCY]
                row |= {"step": step, "#before": before, "#seen": _is_seen(before, row)}
        last = row, facts
        yield row


def _has_speed(row: Row) -> bool:
    return row["status"] == "ok" and not is_missing(row[LATENCY]) and not str(row["verdict"]).startswith(OUTPUTS_WRONG)


def _is_seen(before: Row, row: Row) -> bool:
    """Return whether a step exceeds both runs' uncertainty: their intervals don't overlap."""
    return bool(row["latency_ms_low"] > before["latency_ms_high"] or row["latency_ms_high"] < before["latency_ms_low"])


def _list_steps(rows: Sequence[Row], runs: Mapping[str, RunData]) -> Iterator[str]:
    """Yield a sentence on each of the largest slow-downs with disjoint intervals, and on what they prove."""
    rises = [row for row in rows if row.get("#seen") and row["step"] > 1]
    for row in sorted(rises, key=lambda row: row["step"], reverse=True)[:MAX_STEPS_NAMED]:
        name = " ".join(str(row[key]) for key in ("model", "backend", "options", "precision") if row[key])
        cause = f"with it changed {row['changed']}" if row["changed"] else "nothing that is recorded changed"
        before = row["#before"]
        yield (
            f"{name} at batch {row['batch']} took {row['step']:.2f}x as long from {row['run']} ({row['date']}) on: "
            f"{format_number(before[LATENCY])} to {format_number(row[LATENCY])} ms; {cause}."
        )
    if not rises:
        has_intervals = any("#before" in row and not is_missing(row["latency_ms_low"]) for row in rows)
        yield (
            "No latency rose beyond the intervals of two runs."
            if has_intervals
            else "Single rounds have no interval, so no step can be told from noise; measure more --rounds."
        )
        return
    first, second = (
        shlex.quote(str(runs[name].records.folder)) for name in (rises[0]["#before"]["run"], rises[0]["run"])
    )
    yield f"Runs of different sessions prove no cause; measured side by side: dyno compare {first} {second} --remeasure"


# History as a chart.


def write_chart(table: Table, path: Path) -> None:
    """Write a history as a chart, .svg or .png, or as an .html page with the chart and the table."""
    if libraries := list_missing():
        raise UserError(name_lacking(libraries))
    figure = draw_history(table)
    if path.suffix == ".png":
        style.save(figure, path)
        return
    drawing = style.render_svg(figure, "history", on_paper=path.suffix == ".svg")
    body = f'<div class="chart">{drawing}</div>\n{make_parts([table])}'
    write_text(path, drawing if path.suffix == ".svg" else make_page(table.title, body))


def draw_history(table: Table) -> Any:
    """Draw each configuration's latency from run to run, with its interval, in a panel per model, size and batch.

    Runs are named by their commit, if known. A ring marks a step with disjoint intervals. Raises `UserError` if no run
    has a latency.
    """
    import pandas as pd

    rows = pd.DataFrame([row for row in table.rows if _has_speed(row)])
    if rows.empty:
        raise UserError("no run has a latency, so there is no history to draw")
    names = {row["#place"]: shorten_text(row["commit"] or row["run"], MAX_NAME_LENGTH) for row in table.rows}
    keys = ["model", "size", "batch", "device"]
    groups = [
        (charts.title_of(keys, key), group) for key, group in charts.list_configurations(rows).groupby(keys, sort=False)
    ]
    panels = groups[: charts.MAX_PANELS]
    with style.apply_style() as figure_class:
        figure = figure_class((style.WIDTH, 2.9 * len(panels) + 0.8), layout="constrained")
        for axes, (title, group) in zip(figure.subplots(len(panels), squeeze=False).ravel(), panels, strict=True):
            axes.set(title=title, ylabel="latency, ms", xlim=(-0.5, max(names) + 0.5))
            axes.set_xticks(list(names), list(names.values()), rotation=30, ha="right")
            for _, line in group.groupby("configuration", sort=False):
                _draw_line(axes, line)
            axes.set_ylim(0)
        charts.draw_legend(figure, panels, len(groups) - len(panels))
    return figure


def _draw_line(axes: Any, line: Any) -> None:
    low, value, high = (line[f"latency_ms{end}"].astype(float) for end in ("_low", "", "_high"))
    stroke = charts.choose_stroke(line.iloc[0])
    axes.plot(line["#place"], value, **stroke)
    axes.vlines(line["#place"], low, high, color=stroke["color"], lw=4, alpha=0.35)
    for _, row in line.iterrows():
        if row.get("#seen") is True:
            (ring,) = axes.plot(row["#place"], row[LATENCY], "o", ms=14, mfc="none", mec=stroke["color"], mew=1.5)
            style.add_tooltip(ring, f"{row['configuration']}: {row['step']:.2f}x; {row['changed']}")
            text = {"xytext": (0, 11), "textcoords": "offset points", "ha": "center", "fontsize": 8.5}
            axes.annotate(f"{row['step']:.2f}x", (row["#place"], row[LATENCY]), **text)
