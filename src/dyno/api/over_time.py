"""`dyno show RUN --over-time FILE`: trials of a run over time, as a chart or as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dyno.analysis import style
from dyno.analysis.charts import over_time as chart
from dyno.analysis.charts.over_time import Shown
from dyno.analysis.formatting import sized
from dyno.analysis.presentation.export import export
from dyno.analysis.presentation.table import COUNT, TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.analysis.records.run_data import RunData
from dyno.analysis.telemetry.over_time import quantities
from dyno.api.take import find
from dyno.store import check_writable
from dyno.worker.record import write_text
from dyno.worker.spec import UserError

SERIES = TableKind("over-time", "Over time", "A row for each look at a job: memory, utilisation, power and clock.",
                   command="dyno show RUN --over-time FILE.csv")  # fmt: skip
ENDINGS = (".svg", ".png", ".csv")


def save(run: RunData, path: Path, choices: Sequence[str] = ()) -> Path:
    """Write the telemetry of the trials' first rounds on one time axis: .svg and .png are drawn, .csv has each sample.

    `choices` are trials by their ids, or as BACKEND/PRECISION; without any, the report's are taken: the reference and
    the fastest other trial of each group. Raises `UserError` for a file that can't be written, and if nothing was
    recorded.
    """
    if path.suffix not in ENDINGS:
        raise UserError(f"{path} would be no chart over time; give a name that ends in {', '.join(ENDINGS)}")
    check_writable(path)
    trials = [find(run.records, choice) for choice in choices]
    if choices:
        title = ", ".join(dict.fromkeys(f"{t.model}{sized(t.size)}, batch {t.batch}, {t.device}" for t in trials))
        groups = [(title, chart.series_of(list({t.id: t for t in trials}.values())))]
    else:
        groups = chart.groups(run)
    lacking = [t.label for t in trials if t.id not in {shown.id for _, group in groups for shown, _ in group}]
    if lacking:
        raise UserError(f"nothing was recorded over time of {lacking[0]}; choose another trial")
    if not groups:
        raise UserError(f"{run.records.folder} has no two trials with a recording over time; choose some with --trials")
    if path.suffix == ".csv":
        write_text(path, export([table([shown for _, group in groups for shown in group])], "csv"))
    elif path.suffix == ".png":
        style.save(chart.draw(groups), path)
    else:
        write_text(path, style.svg(chart.draw(groups), "over-time", on_paper=True))
    return path


def table(shown: Sequence[Shown]) -> Table:
    """Return a table with one row per telemetry sample of each trial, with the boundary timed at that moment."""
    wanted = quantities(series for _, series in shown)
    columns = (
        Column("trial", "the id", kind=TEXT),
        Column("label", "of the trial", kind=TEXT),
        Column("look", "number, from 1", kind=COUNT),
        Column("seconds", "since the job began, without pauses", "s"),
        Column("timed", "the boundary that was timed then", kind=TEXT),
        *(Column(each.column, each.name, each.unit) for each in wanted),
    )
    rows: list[Row] = []
    for t, series in shown:
        for k, seconds in enumerate(series.seconds.tolist()):
            timed = next((name for name, (begin, end) in series.timed.items() if begin <= seconds <= end), "")
            values = {each.column: float(found[k]) for each, found in series.values.items()}
            rows.append({"trial": t.id, "label": t.label, "look": k + 1, "seconds": seconds, "timed": timed, **values})
    return SERIES.of(columns, rows)
