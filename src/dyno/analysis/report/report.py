"""The report: one HTML page that needs nothing beside it, with PNG charts and results.csv for other uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.analysis import style
from dyno.analysis.charts import charts, gpu_charts, reference_charts
from dyno.analysis.metrics import confusion
from dyno.analysis.records.results import Results
from dyno.analysis.report import sections, task_sections
from dyno.analysis.tables import reference_tables, views
from dyno.analysis.tables import trial_table as tables
from dyno.analysis.tables.cells import Table
from dyno.analysis.verdict import verdict
from dyno.analysis.verdict.findings import Finding
from dyno.worker.spec import UserError

if TYPE_CHECKING:
    import pandas as pd

CAPTIONS = {
    "latency": "Latency per batch. Bars are medians over the rounds, whiskers the 95 % interval between processes. "
    "None is drawn that is wider than a factor of two.",
    "speedup": "Speed-up over the reference of the same model, size and batch, with its 95 % interval. "
    "None is drawn that is wider than a factor of two.",
    "accuracy-latency": "Accuracy against latency, with 95 % intervals on both axes. Ringed: nothing is both "
    "faster and more accurate.",
    "accuracy-throughput": "Accuracy against throughput at every batch, with 95 % intervals on both axes.",
    "throughput-batch": "Throughput (batches overlap) and FPS (one batch after another) against the batch.",
    "throughput-size": "Throughput and FPS against the image size.",
    "inference-time": "Latency per batch of all models, on a logarithmic axis.",
    "speedup-size": "Speed-up over the reference of the same size, against the image size; shaded: 95 % interval.",
    "speedup-batch": "Speed-up over the reference of the same batch, against the batch; shaded: 95 % interval.",
    "tflops-batch": "Operations per second against the batch, under the peaks that were measured; logarithmic axis.",
    "tflops-size": "Operations per second against the image size, under the peaks; logarithmic axis.",
    "gpu": "The GPU while each job ran (its first round), from outside the job: memory above what was used before, and "
    "SM utilisation. Shaded: timing.",
}


@dataclass(frozen=True)
class Chart:
    """A chart inside the page: its caption and the <svg> element, which matplotlib has escaped."""

    caption: str
    svg: Any


@dataclass(frozen=True)
class Section:
    """All that the page says about one run."""

    results: Results
    findings: list[Finding]
    method: list[tuple[str, str]]
    machine: list[tuple[str, str]]
    tables: list[Table]
    charts: list[Chart]
    views: list[Table]
    saturation: Table | None
    pivots: list[Table]
    accuracy: Table | None
    tasks: list[Table]
    agreement: list[Table]
    complaints: list[tuple[str, str, str]]
    gpu: Table | None
    details: list[sections.Detail]


def write(results: list[Results], out: Path) -> Path:
    """Write OUT/report.html, charts/*.png, tables.md and every table as CSV; returns the page's path.

    Several runs become sections of one page. UserError when the folder can't be written.
    """
    import pandas as pd

    out = Path(out)
    frames = [tables.frame(r) for r in results]
    every = [reference_tables.sheets(r, f) for r, f in zip(results, frames, strict=True)]
    try:
        (out / "charts").mkdir(parents=True, exist_ok=True)
        parts = [
            _section(r, f, e, out / "charts", i, len(results))
            for i, (r, f, e) in enumerate(zip(results, frames, every, strict=True))
        ]
        together = frames[0] if len(frames) == 1 else pd.concat(_named(results, frames), ignore_index=True)
        together.to_csv(out / "results.csv", index=False)
        reference_tables.write(list(zip(results, every, strict=True)), out)
        page = out / "report.html"
        page.write_text(_html(parts), encoding="utf-8")
    except OSError as e:
        raise UserError(f"the report can't be written to {out}: {e.strerror or e}; give another folder") from e
    return page


def _named(results: Sequence[Results], frames: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    return [frame.assign(run=r.name) for r, frame in zip(results, frames, strict=True)]


def _section(
    results: Results, frame: pd.DataFrame, every: list[reference_tables.Sheet], folder: Path, index: int, runs: int
) -> Section:
    others = _views(results, frame, folder.parent, results.name if runs > 1 else "")
    return Section(
        results=results,
        findings=verdict.findings(results, frame),
        method=sections.method(results),
        machine=sections.machine(results.environment),
        tables=sections.results_tables(frame),
        charts=_charts(results, frame, folder, f"r{index}", results.name if runs > 1 else ""),
        views=[table for made in others.values() for table in made],
        saturation=sections.saturation_table(frame),
        pivots=reference_tables.pages(every, frame),
        accuracy=sections.accuracy_table(results, frame),
        tasks=task_sections.everything(results, frame),
        agreement=sections.agreement_tables(results),
        complaints=sections.complaints(results),
        gpu=sections.gpu_table(results),
        details=sections.details(results),
    )


def _views(results: Results, frame: pd.DataFrame, out: Path, run: str) -> dict[str, list[Table]]:
    """The other tables of the run, each with its CSV twin beside the page."""
    found = {}
    for name, view in views.VIEWS.items():
        made = view.table(results, frame)
        made.to_csv(out / f"{_file(f'{run}-{name}' if run else name)}.csv", index=False)
        found[name] = sections.results_tables(made, view.by, view.printed, view.title)
        if found[name]:
            found[name][-1].notes.extend(view.notes)
    return found


def _file(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def _charts(results: Results, frame: pd.DataFrame, folder: Path, prefix: str, run: str) -> list[Chart]:
    from markupsafe import Markup

    found = []
    drawn = {**charts.everything(frame), **reference_charts.everything(frame), **gpu_charts.everything(results, frame)}
    for name, figure in drawn.items():
        file = _file(f"{run}-{name}" if run else name)
        style.save(figure, folder / f"{file}.png")
        found.append(Chart(CAPTIONS[name], Markup(style.svg(figure, f"{prefix}-{name}"))))
    for name, (figure, caption) in confusion.everything(results).items():
        style.save(figure, folder / f"{name}.png")
        found.append(Chart(caption, Markup(style.svg(figure, f"{prefix}-{name}"))))
    confusion.write(results, folder)
    return found


def _html(parts: list[Section]) -> str:
    from importlib import resources

    from jinja2 import BaseLoader, Environment, StrictUndefined

    environment = Environment(
        loader=BaseLoader(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("dyno.analysis.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(sections=parts, most_details=sections.MOST_DETAILS)
