"""The report: one self-contained HTML page, with PNG charts and results.csv for other uses."""

from __future__ import annotations

import base64
import os
import re
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dyno.formatting import escape_markdown, format_count, format_moment
from dyno.report import charts, sections, self_test, style, tables
from dyno.report.export import export, page_part, render_page
from dyno.report.style import Chart
from dyno.report.tables.trial_table import TRIALS
from dyno.report.verdict import verdict
from dyno.report.verdict.findings import BEST, FAILURE, NOTE, WARNING, Finding
from dyno.report.verdict.verdict import read_start
from dyno.results.metrics import accuracy
from dyno.results.run_data import RunData
from dyno.table import TEXT, Column, Table, join_tables
from dyno.worker.extras import name_lacking
from dyno.worker.record import refuse_links, write_text
from dyno.worker.spec import UserError

# Notebook cell of a run: decisions, trials and one chart, as plain HTML without scripts.

MAX_GROUPS = 6  # groups in the first chart
BATCH_CHARTS = ("speedup", "latency")  # charts with a panel for each batch
HEADLINE_CHARTS = ("serve-latency", "video-timeline", *BATCH_CHARTS)  # candidates for the chart at the top, by priority


def keep_leading(run: RunData) -> RunData:
    """Return the run restricted to the rows of its first chart: the smallest batch of the first MAX_GROUPS groups.

    A group is a model, size and device; the verdict starts with its smallest batch. More rows would be illegible.
    """
    groups = run.frame.groupby(["model", "size", "device"], sort=False)
    is_leading = (run.frame["batch"] == groups["batch"].transform("min")) & (groups.ngroup() < MAX_GROUPS)
    return replace(run, frame=run.frame[is_leading])


def make_cell(run: RunData) -> str:
    """Return an HTML fragment with everything from the run escaped; without matplotlib it has no chart."""
    leaders, summary = tables.list_leading(run)
    if leaders:
        return "\n".join(
            [*(f"<p>{escape(line)}</p>" for line in summary), *_write_chart(run), *chain(*map(_write_rows, leaders))]
        )
    return "\n".join([*_write_decisions(run), *_write_chart(run), *_write_rows(TRIALS.table(run))])


def _write_decisions(run: RunData) -> Iterator[str]:
    run_verdict = verdict.read_verdict(run)
    for finding in run_verdict.wrong:
        yield f"<p><strong>Wrong: {escape(finding.text)}</strong></p>"
    for decision in run_verdict.decisions:
        text = decision.text[:1].upper() + decision.text[1:]
        answers = "".join(f"<br>{escape(name)}: {escape(answer)}" for name, answer in decision.answers)
        yield f"<p>{escape(decision.where)}<br><strong>{escape(text)}</strong>{answers}</p>"


def _write_chart(run: RunData) -> Iterator[str]:
    if find_spec("matplotlib") is None:
        return
    by_name = {chart.name: chart for chart in charts.list_charts()}
    lead_run = keep_leading(run)
    drawings = ((name, by_name[name].draw(lead_run if name in BATCH_CHARTS else run)) for name in HEADLINE_CHARTS)
    name, figure = next(((name, figure) for name, figure in drawings if figure is not None), ("", None))
    if figure is not None:
        image = base64.b64encode(
            style.render_svg(figure, "cell", style.laid_out(figure), on_paper=True).encode()
        ).decode()
        css = "width: 100%; max-width: 860px; background: #fff"
        yield f'<img style="{css}" alt="{name}" src="data:image/svg+xml;base64,{image}">'


def _write_rows(table: Table) -> Iterator[str]:
    import pandas as pd

    for part in table.parts():
        cells = [[column.text(row) for column in part.columns] for row in part.rows]
        if part.title:
            yield f"<p>{escape(part.title)}</p>"
        yield pd.DataFrame(cells, columns=[c.heading for c in part.columns]).to_html(index=False, border=0)
        yield from (f"<p><small>{escape(note)}</small></p>" for note in part.notes)


# Charts of a run, drawn in parallel: with many trials, matplotlib takes a second for each.

SMALLEST_BATCH_NOTE = "At the smallest batch; the chart of all is among the charts below."
PHONE_WIDTH = 3.4  # inches of a chart on a phone, with text of 12 pixels
MIN_PARALLEL_TRIALS = 12  # from here on drawn in parallel; fewer charts are finished before processes have started


_one: partial[ChartDrawing | None]  # in a drawing process: draws the chart with that index


@dataclass(frozen=True)
class ChartDrawing:
    """A chart in the page: its name, caption, and <svg> element (escaped by matplotlib).

    The chart at the top has a `narrow` drawing for phones.
    """

    name: str
    caption: str
    svg: Any
    narrow: Any = None


def draw_charts(run: RunData, folder: Path, prefix: str, name: str) -> list[ChartDrawing]:
    """Draw every chart for which the run has data, and write each to FOLDER as PNG.

    `prefix` starts the ids in the drawings; `name`, unless empty, starts the file names.
    """
    draw = partial(_draw_kind, run, folder, prefix, name)
    indices = range(len(charts.list_charts()))
    max_processes = min(len(os.sched_getaffinity(0)), len(indices))
    # A fork copies only the current thread: a lock held by another would stay locked.
    if len(run.frame) >= MIN_PARALLEL_TRIALS and max_processes > 1 and threading.active_count() == 1:
        try:
            return _filter_present(_side_by_side(draw, indices, max_processes))
        except BrokenProcessPool:  # a process was killed, e.g. for lack of memory
            pass
    return _filter_present(map(draw, indices))


def draw_headline(run: RunData, drawings: Sequence[ChartDrawing], prefix: str) -> ChartDrawing | None:
    """Return the chart for the top of the page: one of those drawn, or one of the `keep_leading` rows; else None."""
    lead_run, kinds = keep_leading(run), {kind.name: kind for kind in charts.list_charts()}
    for drawing in (chart for name in HEADLINE_CHARTS for chart in drawings if chart.name == name):
        if drawing.name not in BATCH_CHARTS:
            return drawing
        narrow = _draw_chart(lead_run, kinds[drawing.name], f"{prefix}-narrow", "", width=PHONE_WIDTH)
        if narrow is None:
            continue
        if len(lead_run.frame) == len(run.frame):
            return replace(drawing, narrow=narrow.svg)
        wide = _draw_chart(lead_run, kinds[drawing.name], f"{prefix}-first", f"{drawing.caption} {SMALLEST_BATCH_NOTE}")
        return wide and replace(wide, narrow=narrow.svg)
    return None


def file_name(name: str) -> str:
    """Replace characters that some file systems forbid."""
    return re.sub(r"[^\w.-]+", "_", name)


def _draw_kind(run: RunData, folder: Path, prefix: str, name: str, index: int) -> ChartDrawing | None:
    chart: Chart = charts.list_charts()[index]
    file = folder / f"{file_name(f'{name}-{chart.name}' if name else chart.name)}.png"
    return _draw_chart(run, chart, prefix, chart.caption, file)


def _draw_chart(
    run: RunData, chart: Chart, prefix: str, caption: str, file: Path | None = None, width: float = 0
) -> ChartDrawing | None:
    from markupsafe import Markup

    figure = chart.draw(run)
    if figure is None:
        return None
    if width:
        figure.set_figwidth(width)
    box = style.laid_out(figure)
    if file is not None:
        style.save(figure, file, box)
    svg = Markup(style.render_svg(figure, f"{prefix}-{chart.name}", box))
    return ChartDrawing(chart.name, caption, svg)


def _side_by_side(draw: partial[ChartDrawing | None], indices: range, max_processes: int) -> list[ChartDrawing | None]:
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_svg
    import matplotlib.figure  # noqa: F401 - imported once, here

    # The function is inherited, not sent: before Python 3.11.5, a process that dies with a full pipe ends nothing.
    with (
        warnings.catch_warnings(),
        ProcessPoolExecutor(max_processes, get_context("fork"), _prepare_process, (draw,)) as pool,
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # libraries' threads survive a fork
        return [*pool.map(_draw_inherited, indices)]


def _prepare_process(draw: partial[ChartDrawing | None]) -> None:
    """Prepare a drawing process.

    It ignores interrupts, because the command handles them and ends its processes; here they would print a traceback.
    """
    global _one
    _one = draw
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _draw_inherited(index: int) -> ChartDrawing | None:
    return _one(index)


def _filter_present(drawings: Iterable[ChartDrawing | None]) -> list[ChartDrawing]:
    return [drawing for drawing in drawings if drawing is not None]


LEAD_NOTE = (
    "Every table of the run with rows; times are in milliseconds per batch. Where a trial has no number, "
    "the table shows its status. Each table is in `tables/` as CSV too."
)

EXPLANATION_MODULE = "dyno.layers.graph_page"  # imported by name, as it belongs to a higher layer
REQUIRED_MODULES = ("jinja2", "matplotlib")
MAX_CARDS = 2  # open decisions shown as cards; the rest are folded
# badge text of each kind of decision
STATE_WORDS = {BEST: "decided", NOTE: "not compared", WARNING: "open", FAILURE: "no winner"}


def write_report(runs: Sequence[RunData], out: Path) -> Path:
    """Write OUT/report.html, charts/*.png, tables.md and every table as CSV; return the page's path.

    Several runs become sections of one page. UserError if the folder can't be written, or a library is missing.
    """
    if libraries := list_missing():
        raise UserError(name_lacking(libraries))
    out, page = Path(out), Path(out) / "report.html"
    names = names_of(runs)
    all_tables = [tables.make_tables(run, "all") for run in runs]
    refuse_links(out, ("charts", "tables"))
    try:
        (out / "charts").mkdir(parents=True, exist_ok=True)
        parts = [
            _make_section(run, run_tables, out, i, name, len(runs) > 1)
            for i, (run, run_tables, name) in enumerate(zip(runs, all_tables, names, strict=True))
        ]
        write_tables(runs, all_tables, out)
        write_text(page, _format_html(parts, export([_all_trials(runs, names)], "csv")))
    except OSError as e:
        raise UserError(f"the report can't be written to {out}: {e.strerror or e}; give another folder") from e
    return page


def list_missing() -> list[str]:
    """Return the libraries required for the page and its charts that can't be imported."""
    missing_names = []
    for name in REQUIRED_MODULES:
        try:
            import_module(name)
        except ImportError:
            missing_names.append(name)
    return missing_names


def names_of(runs: Sequence[RunData]) -> list[str]:
    """Return names for several runs: their folders' names, with enough of the paths to be unique.

    File names made from them are unique, too. UserError for a run given twice, and for paths that differ only in
    characters that file names can't have.
    """
    paths = [run.records.folder.resolve().parts for run in runs]
    if len(set(paths)) < len(paths):
        raise UserError("a run is named twice; name each once")
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len({file_name(name) for name in names}) == len(names):
            return names
    raise UserError("the runs' folders differ only in punctuation; rename one of them")


def write_tables(runs: Sequence[RunData], all_tables: Sequence[list[Table]], out: Path) -> None:
    """Write OUT/results.csv, tables.md and tables/*.csv; for several runs, CSV file names begin with the run's name."""
    refuse_links(out, ("tables",))
    (out / "tables").mkdir(parents=True, exist_ok=True)
    parts, names, page_names = [], names_of(runs), {kind.name for kind in tables.list_kinds() if kind.section}
    for name, run_tables in zip(names, all_tables, strict=True):
        for table in run_tables:
            file = file_name(f"{name}-{table.name}" if len(runs) > 1 else table.name)
            write_text(out / "tables" / f"{file}.csv", export([table], "csv"))
        page_tables = [table for table in run_tables if table.name in page_names]  # other tables are too long to read
        parts.append(f"# Tables of {escape_markdown(name)}\n\n{LEAD_NOTE}\n\n{export(page_tables, 'markdown')}")
    write_text(out / "tables.md", "\n".join(parts))
    write_text(out / "results.csv", export([_all_trials(runs, names)], "csv"))


def _all_trials(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    """Build a table of the trials of all runs, with the run's name if there are several."""
    run_tables = [TRIALS.table(run) for run in runs]
    if len(runs) == 1:
        return run_tables[0]
    for name, table in zip(names, run_tables, strict=True):
        for row in table.rows:
            row["run"] = name
    all_trials = join_tables(run_tables)
    return TRIALS.build((*all_trials.columns, Column("run", "its name", kind=TEXT)), all_trials.rows)


def _make_section(
    run: RunData, run_tables: Sequence[Table], out: Path, index: int, name: str, is_multi_run: bool
) -> dict[str, Any]:
    """Return the page content of one run, by template variable.

    For a run that isn't a study, its leading tables and their `summary` replace the decisions.
    """
    from markupsafe import Markup

    table_sections = {kind.name: kind.section for kind in tables.list_kinds()}
    leaders, summary = tables.list_leading(run)
    names = {TRIALS.name, *(table.name for table in leaders)}
    run_verdict = verdict.read_verdict(run)
    # With a single model, size and batch, the trials' table already has the side-by-side values.
    skipped_sections = {"", "side"} if len(run.frame[["model", "size", "batch"]].drop_duplicates()) < 2 else {""}
    folded_tables = [
        (f"{table.title}: {part.title}" if part.title else table.title, Markup(page_part(table, part, heading="")))
        for table in run_tables
        if table.name not in names and table_sections[table.name] not in skipped_sections
        for part in table.parts()
    ]
    drawings = draw_charts(run, out / "charts", f"r{index}", name if is_multi_run else "")
    accuracy.write_confusion(run.records, out / "charts")
    headline = draw_headline(run, drawings, f"r{index}")
    return {
        "name": name,
        "results": run.records,
        "date": format_moment(read_start(run.records)),
        "about": sections.about_run(run.records),
        "visible": self_test.of_run(run.records),
        "verdict": replace(run_verdict, decisions=()) if leaders else run_verdict,
        "method": sections.list_terms(run),
        "machine": sections.describe_machine(run.records.environment),
        "summary": summary,
        "leading": [Markup(page_part(table, part)) for table in leaders for part in table.parts()],
        "trials": [Markup(page_part(t, part)) for t in run_tables if t.name == TRIALS.name for part in t.parts()],
        "tables": folded_tables,
        "headline": headline,
        "charts": [chart for chart in drawings if headline is None or chart.svg is not headline.svg],
        "complaints": sections.list_complaints(run.records),
        "details": sections.list_details(run.records, out),
        "explained": import_module(EXPLANATION_MODULE).explained_section(run.records, f"r{index}"),
    }


def _count_findings(findings: Sequence[Finding]) -> str:
    """Count findings by kind: `2 warnings, 1 note`."""
    kinds = Counter(each.kind for each in findings)
    return ", ".join(format_count(kinds[kind], kind) for kind in (WARNING, NOTE) if kinds[kind])


def _format_html(parts: list[dict[str, Any]], results: str) -> str:
    return render_page(
        "page.html.j2",
        title=f"Dyno: {', '.join(part['name'] for part in parts)}",
        sections=parts,
        names=list(dict.fromkeys(f.name for part in parts for d in part["verdict"].decisions for f in d.figures)),
        most_cards=MAX_CARDS,
        most_details=sections.MAX_DETAILS,
        pills=STATE_WORDS,
        counted=_count_findings,
        csv=base64.b64encode(results.encode()).decode(),
        graph=import_module(EXPLANATION_MODULE).graph_scripts() if any(part["explained"] for part in parts) else "",
    )
