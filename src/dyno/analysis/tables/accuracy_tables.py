"""Tables of accuracy: with intervals and budget, against the reference, class by class, and how evaluation went."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dyno.analysis import metrics
from dyno.analysis.metrics import confusion, detection
from dyno.analysis.metrics.hits import PairedChange
from dyno.analysis.metrics.metric import Metric
from dyno.analysis.presentation.table import COUNT, PERCENT, TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.analysis.records.run_data import RunData
from dyno.analysis.tables.trial_columns import STAGES

MOST_CLASSES, MOST_COLUMNS = 200, 8  # rows and trials of a table of classes
OF = Column("of", "what is scored: boxes, masks or keypoints", kind=TEXT)
IMAGES = Column("images", "that the accuracy is from", kind=COUNT)
PAIRED = (
    Column("gained", "images that only this trial has right, not the reference", kind=COUNT),
    Column("lost", "images that only the reference has right", kind=COUNT),
)
COPIED = ("images", "budget", "more_images")
LABEL = Column("label", "the trial: model, configuration, batch and size", kind=TEXT, title="trial")
DECISION = (
    Column("budget", "within, over or undecided", kind=TEXT),
    Column("more_images", "about how many more would decide it", kind=COUNT, title="images to settle"),
)


def _copy_columns(run: RunData, row: Any, names: Iterable[str]) -> Row:
    return {"label": run.trials[row["trial"]].label, **{name: row[name] for name in names}}


def _make_score_table(kind: TableKind, run: RunData, labels: str) -> Table | None:
    """Build rows of the trials with such labels: each metric with its interval, and the first metric's change."""
    rows: list[Row] = []
    shown: dict[str, Metric] = {}
    for _, r in run.frame.iterrows():
        t, reference = run.trials[r["trial"]], run.trials.get(r["reference"])
        if t.task.labels != labels or not (scores := metrics.measured(t)):
            continue
        shown |= {metric.name: metric for metric, _ in scores}
        columns = [column.name for metric, _ in scores for column in metric.columns]
        row = _copy_columns(run, r, (*columns, *COPIED)) | {"of": scores[0][1].of}
        change = scores[0][0].change(t, reference) if reference is not None and reference is not t else None
        if isinstance(change, PairedChange):
            row |= {"gained": change.gained, "lost": change.lost}
        rows.append(row if change else row | {metric.diff: None for metric, _ in scores})
    if not rows:
        return None
    ordered = sorted(shown.values(), key=lambda metric: metric.place)
    changes = [m.change_columns[0] for m in ordered if m.diff in m.printed_columns]
    return kind.of((LABEL, OF, IMAGES, *(m.value_column for m in ordered), *PAIRED, *changes, *DECISION), rows)


def _make_classification_table(run: RunData) -> Table | None:
    return _make_score_table(CLASSIFICATION, run, "classes")


def _make_detection_table(run: RunData) -> Table | None:
    return _make_score_table(DETECTION, run, "objects")


def _make_classes_table(run: RunData) -> Table | None:
    """Build rows of the classes: top-1 in each configuration, sorted from the first one's worst class."""
    shown = [(t, matrix) for t in confusion.chosen(run.records)[:MOST_COLUMNS] if (matrix := confusion.of(t))]
    if not shown or not metrics.measured(shown[0][0]):
        return None
    tables = [matrix.per_class() for _, matrix in shown]
    top1 = {
        t.id: dict(zip(table["class"], table["top1"], strict=True)) for (t, _), table in zip(shown, tables, strict=True)
    }
    rows = [
        {"class": r["class"], "images": r["images"], **{id: matrix.get(r["class"]) for id, matrix in top1.items()},
         "taken_for": r["taken_for"], "times": r["times"] or None}
        for r in tables[0].head(MOST_CLASSES).to_dict("records")
    ]  # fmt: skip
    columns = (
        Column("class", "of the label", kind=TEXT),
        Column("images", "with that label", kind=COUNT),
        *(Column(t.id, f"top-1 of {t.label}", "%", PERCENT, f"top-1 %, {t.label}") for t, _ in shown),
        Column("taken_for", "the class that the first trial takes it for most", kind=TEXT, title="taken for"),
        Column("times", "how often", kind=COUNT),
    )
    return CLASSES.of(columns, rows, notes=("The report's charts/confusion-ID.csv has each whole confusion matrix.",))


def _average_precision(run: RunData) -> Table | None:
    """Build rows of the classes: AP50-95 in each configuration."""
    scored = [(t, scores) for t in run.records if t.good and (scores := detection.of(t))][:MOST_COLUMNS]
    by_trial = {t.id: {name: 100 * ap for name, _, ap in scores.own.by_class()} for t, scores in scored}
    names = list(dict.fromkeys(name for scores in by_trial.values() for name in scores))[:MOST_CLASSES]
    rows = [{"class": name, **{id: scores.get(name) for id, scores in by_trial.items()}} for name in names]
    columns = [Column(t.id, f"AP50-95 of {t.label}", "%", PERCENT, t.label) for t, _ in scored]
    return AVERAGE_PRECISION.of((Column("class", "of the objects", kind=TEXT), *columns), rows) if rows else None


def _make_evaluation_table(run: RunData) -> Table | None:
    rows = [
        _copy_columns(run, r, EVALUATION_COPIED) for _, r in run.frame[run.frame["pipeline_ips"].notna()].iterrows()
    ]
    return EVALUATION.of(EVALUATION_COLUMNS, rows, notes=(EVALUATION_NOTE,)) if rows else None


CLASSIFICATION = TableKind(
    "classification",
    "Accuracy",
    "Top-1 and its like with intervals, what was gained and lost against the reference, and the budget's decision.",
    _make_classification_table,
    "no trial answered labelled images",
    "accuracy",
    1,
)
DETECTION = TableKind(
    "detection",
    "Accuracy of detection",
    "mAP with its interval, the change against the reference, and the budget's decision.",
    _make_detection_table,
    "no trial has a mAP",
    "accuracy",
    3,
)
CLASSES = TableKind(
    "classes",
    "Top-1 by class",
    "A row per class: top-1 of each configuration, and what the class is taken for.",
    _make_classes_table,
    "no trial answered labelled images",
    "accuracy",
    5,
)
AVERAGE_PRECISION = TableKind(
    "average-precision",
    "AP50-95 by class, %",
    "A row per class: average precision of each configuration.",
    _average_precision,
    "no trial has a mAP",
    "accuracy",
    4,
)
EVALUATION_COPIED = ("pipeline_ips", *(f"{stage}_ms" for stage in STAGES), "throughput_ips")
EVALUATION_COLUMNS = (
    LABEL,
    Column(
        "pipeline_ips",
        "of the whole evaluation, decoding left out",
        "images/s",
        title="pipeline from decoded images, images/s",
    ),
    *(Column(f"{stage}_ms", f"{stage} of an image", "ms", title=f"{stage}, ms per image") for stage in STAGES),
    Column("throughput_ips", "with batches queued", "images/s", title="throughput, images/s"),
)
EVALUATION_NOTE = (
    "The pipeline reads, normalises, runs and ranks or post-processes every image, overlapped. The stages are timed "
    "one after the other; decoding was timed when the data set was decoded, and is not in the rate."
)
EVALUATION = TableKind(
    "evaluation",
    "Evaluation",
    "Images per second of the whole evaluation, and the time of each stage.",
    _make_evaluation_table,
    "nothing was evaluated",
    "accuracy",
    2,
)
