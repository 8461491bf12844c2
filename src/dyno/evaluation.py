"""`dyno eval`: each model over labelled images, and its printed summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno.api import run
from dyno.formatting import (
    clean_text,
    escape_markdown,
    format_count,
    format_number,
    images_tested,
    markdown_table,
    show,
)
from dyno.report.tables.trial_table import EVALUATION_STAGES, FEW_SAMPLES_NOTE, has_few_samples, mark_doubtful
from dyno.results import metrics, remarks, stats
from dyno.results.metrics import accuracy, mean_ap
from dyno.results.metrics.mean_ap import MeanAP
from dyno.results.rounds import LATENCIES
from dyno.results.stats import Interval
from dyno.results.trial_result import TrialResult
from dyno.study.defaults import EVALUATION_SETTINGS, folder_for, study_of
from dyno.study.study import Study, name_fields
from dyno.worker.spec import UserError
from dyno.worker.tasks.classify import NO_ACCURACY

if TYPE_CHECKING:
    from dyno.api import Result


def evaluate(
    model: Any, data: str | Path, out: str | Path | None = None, *, quiet: bool = True, **settings: Any
) -> Result:
    """Measure the accuracy and speed of one model on the images of a data set; return the stored result.

    `settings` are fields of `Study`. By default the model runs in its file format's default backend, in one round of
    batches of 8 (a file: its own batch, else 1). The run folder is `out`, or a new one below runs/eval.
    `Result.confusion` and `Result.per_class` describe single classes. Raises `UserError`, one line.
    """
    settings = name_fields(settings)
    source_settings = {name: settings[name] for name in ("shapes", "inputs", "sizes", "channels") if name in settings}
    (source,) = Study(models=(model,), **source_settings).models
    folder = folder_for(out, "eval", [source])
    return run(study_of(source, EVALUATION_SETTINGS, {"data": data, **settings}), folder, quiet=quiet)


def show_evaluation(folders: Sequence[Path], format: str, per_class: bool) -> int:
    """Print the tables of evaluated runs and a section per trial, write confusions; return the exit code.

    Raises `UserError` if no trial of a model has readable scores or boxes: the requested accuracy is missing.
    """
    from dyno.report.export import export
    from dyno.report.tables import trial_table
    from dyno.report.tables.trial_table import TRIALS
    from dyno.report.verdict import findings
    from dyno.report.verdict.verdict import describe_run
    from dyno.results.metrics import accuracy
    from dyno.table import join_tables

    runs = [trial_table.read_trials(folder) for folder in folders]
    table = join_tables([TRIALS.table(data) for data in runs])
    print(export([table], format, head=describe_run(runs[0]) if len(runs) == 1 else {}), end="")
    for data in runs:
        if format in ("text", "markdown"):
            for t in (t for t in data.records if t.good):
                run_warnings = [text] if (text := findings.describe_guess(t, data.records)) else []
                print("\n" + describe_evaluation(t, format, per_class, run_warnings).rstrip("\n"))
        accuracy.write_confusion(data.records, data.records.folder)
    for data in runs:
        reasons = [findings.list_unscored(t) for t in data.records if t.good]
        if reasons and all(reasons):
            raise UserError(reasons[0])
    return trial_table.exit_code(table.to_pandas())


# Sections of `dyno eval` on each trial, below the table: accuracy, classes, latencies, stages and size.

STATISTICS = ("mean", "median", "p90", "p95", "p99", "max")
LISTED_WORST = 5  # classes and confusions named

Rows = list[list[str]]


def describe_evaluation(
    trial: TrialResult, format: str = "text", per_class: bool = False, run_warnings: Sequence[str] = ()
) -> str:
    """Describe a trial in a separate section as text or Markdown; `per_class` lists every class instead of the worst.

    `run_warnings` are warnings in addition to the trial's own.
    """
    matrix = mean_ap.read_any_confusion(trial)
    order_note = matrix.describe_other_order() if matrix else ""
    sentences = filter(None, (order_note, *run_warnings, *remarks.list_warnings(trial)))
    warnings = (f"warning: {sentence}" for sentence in sentences)
    lines = [*_describe_accuracy(trial), *_describe_speed(trial), *_describe_classes(trial, per_class), *warnings]
    blocks: list[Sequence[Any]] = [lines, *_iter_tables(trial, per_class)]
    parts = [part for part in blocks if part]
    if format == "markdown":
        return f"### {escape_markdown(trial.label)}\n\n" + "\n".join(map(_format_markdown, parts))
    return f"{clean_text(trial.label)}\n" + "\n".join(map(_format_text, parts))


def _describe_accuracy(trial: TrialResult) -> Iterator[str]:
    from dyno.report.verdict import findings

    scores = metrics.list_measured(trial)
    if not scores and not findings.list_unscored(trial):
        yield f"{NO_ACCURACY}: the images of {trial.spec.data.name} have no labels"
    for index, (metric, score) in enumerate(scores):
        images = "" if index else f" on {images_tested(score.images, accuracy.set_aside(trial))}"
        subject = f" of {score.subject}" if score.subject else ""
        yield f"{metric.label}{subject} {_format_percent(score.interval)}{images}"


def _format_percent(share: Interval) -> str:
    limits = "" if share.low != share.low else f" [{100 * share.low:.2f}, {100 * share.high:.2f}]"
    return f"{100 * share.value:.2f} %{limits}"


def _describe_speed(trial: TrialResult) -> Iterator[str]:
    if rate := trial.value("pipeline"):
        evaluation = trial.facts.evaluation
        count = f" ({evaluation.images:,} images, after {evaluation.warm_up:,} of warm-up)" if evaluation else ""
        yield f"pipeline, from decoded images, {show(rate, 'rate').removesuffix('/s')} images/s{count}"
    stages = [
        f"{name} {show(seconds, 'duration')}"
        for name in EVALUATION_STAGES
        if (seconds := _find_stage_seconds(trial, name)) is not None
    ]
    if stages:
        yield "per image: " + ", ".join(stages)
    size = trial.value("file_size")
    parts = [
        f"{size / 1e6:.1f} MB" if size else "",
        format_count(layers, "layer") if (layers := trial.count("layers")) else "",
        format_count(parameters, "parameter") if (parameters := trial.count("parameters")) else "",
    ]
    if any(parts):
        yield "model: " + ", ".join(part for part in parts if part)


def _find_stage_seconds(trial: TrialResult, name: str) -> float | None:
    samples = trial.samples(name, "")
    return float(np.median(samples)) if samples.size else trial.value(name)


def _describe_classes(trial: TrialResult, per_class: bool) -> Iterator[str]:
    matrix = accuracy.read_confusion(trial)
    if matrix is None:
        return
    classes = matrix.per_class()
    rows = classes[classes["correct"] < classes["images"]]
    if len(rows) and not per_class:
        worst = [
            f"{r['class']} ({r['top1']:.1f} % of {r['images']:,})" for r in rows.head(LISTED_WORST).to_dict("records")
        ]
        yield "worst classes: " + "; ".join(worst)
    if pairs := matrix.list_largest(LISTED_WORST):
        yield "most common confusions: " + "; ".join(f"{a} for {b} ({n:,} of {total:,})" for a, b, n, total in pairs)


def _iter_tables(trial: TrialResult, per_class: bool) -> Iterator[Sequence[Any]]:
    """Yield the rows of each table, after its heading, and the note below a table."""
    latencies = [
        [f"latency, {b}, ms", *_format_latency(trial, b)] for b in LATENCIES if trial.samples("latency", b).size
    ]
    if latencies:
        yield [["", *STATISTICS], *latencies]
        if any(cell.startswith("(") for row in latencies for cell in row):
            yield [FEW_SAMPLES_NOTE]
    if per_class and (matrix := accuracy.read_confusion(trial)):
        rows = [[r["class"], f"{r['images']:,}", f"{r['top1']:.2f}", f"[{r['top1_low']:.2f}, {r['top1_high']:.2f}]",
                 r["taken_for"], str(r["times"] or "")] for r in matrix.per_class().to_dict("records")]  # fmt: skip
        yield [["class", "images", "top-1 %", "95 % interval", "taken for", "times"], *rows]
    if per_class and (scores := mean_ap.read_detections(trial)):
        yield ap_rows(scores)


def ap_rows(scores: MeanAP) -> Rows:
    """Return the average precision of each class, after a heading."""
    rows = [[name, f"{100 * ap50:.2f}", f"{100 * ap:.2f}"] for name, ap50, ap in scores.own.by_class()]
    return [["class", "AP50 %", "AP50-95 %"], *rows]


def _format_latency(trial: TrialResult, boundary: str) -> list[str]:
    rounds = trial.parts("latency", boundary)
    s, samples = stats.over_rounds(rounds), min(map(len, rounds))
    return [mark_doubtful(format_number(1e3 * getattr(s, name)), has_few_samples(name, samples)) for name in STATISTICS]


def _format_text(rows: Sequence[Any]) -> str:
    if rows and isinstance(rows[0], str):
        return "".join(f"  {clean_text(row)}\n" for row in rows).rstrip("\n")
    cells = [[clean_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
             for row in cells]  # fmt: skip
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def _format_markdown(rows: Sequence[Any]) -> str:
    if rows and isinstance(rows[0], str):
        return "".join(f"- {escape_markdown(row)}\n" for row in rows)
    head, *body = [[escape_markdown(cell) for cell in row] for row in rows]
    return markdown_table(head, body, [False, *[True] * (len(head) - 1)])
