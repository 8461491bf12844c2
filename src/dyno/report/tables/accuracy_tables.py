"""Tables of accuracy: intervals and budgets, changes against the reference, classes, and evaluation speed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from dyno.formatting import format_number
from dyno.report.tables import TableKind
from dyno.report.tables.trial_table import EVALUATION_STAGES
from dyno.results import metrics
from dyno.results.correctness import other_inputs
from dyno.results.metrics import accuracy, agreement, mean_ap
from dyno.results.metrics.accuracy import PairedChange
from dyno.results.metrics.agreement import Agreement, Rank
from dyno.results.metrics.metric import Metric
from dyno.results.run_data import RunData
from dyno.results.trial_result import Results, TrialResult
from dyno.table import (
    COUNT,
    PERCENT,
    POINTS,
    TEXT,
    Column,
    Row,
    Table,
    keep_printed,
    limit_cells,
    limits_of,
    with_limits,
)
from dyno.worker.numerics.closeness import ATOL, RTOL
from dyno.worker.spec import UserError

MAX_CLASSES, MAX_COLUMNS = 200, 8  # rows and trials of a class table
MAX_FLIPS = 200  # images per configuration in the table of flips
OF_COLUMN = Column("of", "what is scored: boxes, masks or keypoints", kind=TEXT)
IMAGES_COLUMN = Column("images", "that the accuracy is from", kind=COUNT)
PAIRED_COLUMNS = (
    Column("gained", "images that only this trial has right, not the reference", kind=COUNT),
    Column("lost", "images that only the reference has right", kind=COUNT),
)
COPIED_COLUMNS = ("images", "budget", "more_images")
LABEL_COLUMN = Column("label", "the trial: model, configuration, batch and size", kind=TEXT, title="trial")
DECISION_COLUMNS = (
    Column("budget", "within, over or undecided", kind=TEXT),
    Column("more_images", "about how many more would decide it", kind=COUNT, title="images to settle"),
)


def _format_shift(row: Row) -> str:
    values = [row.get(f"score_shift{end}", math.nan) for end in ("", "_low", "_high")]
    if math.isnan(values[0]):
        return ""
    value, low, high = (f"{each:+.3g}" for each in values)
    return value if math.isnan(values[1]) else f"{value} [{low}, {high}]"


SHIFT_COLUMNS = (
    Column("score_shift", "mean difference of the first answer's score from the reference's, paired, in the network's "
           "own unit", title="shift of scores", cell=_format_shift),
    *limits_of("score_shift", ""),
)  # fmt: skip


def copy_columns(run: RunData, row: Any, names: Iterable[str]) -> Row:
    """Return these columns of a trial's row, after its label."""
    return {"label": run.trials[row["trial"]].label, **{name: row[name] for name in names}}


def _make_score_table(kind: TableKind, run: RunData, labels: str) -> Table | None:
    """Build rows of trials with such labels: each metric with its interval, and the first metric's change."""
    rows: list[Row] = []
    by_name: dict[str, Metric] = {}
    for _, r in run.frame.iterrows():
        trial, reference = run.trials[r["trial"]], run.trials.get(r["reference"])
        if trial.task.labels != labels or not (scores := metrics.list_measured(trial)):
            continue
        by_name |= {metric.name: metric for metric, _ in scores}
        names = [column.name for metric, _ in scores for column in metric.columns]
        row = copy_columns(run, r, (*names, *COPIED_COLUMNS)) | {"of": scores[0][1].subject}
        change = scores[0][0].change(trial, reference) if reference is not None and reference is not trial else None
        if isinstance(change, PairedChange):
            row |= {"gained": change.gained, "lost": change.lost}
        if change and reference is not None and labels == "classes":
            row |= limit_cells("score_shift", accuracy.compute_score_shift(trial, reference))
        rows.append(row if change else row | {metric.diff: None for metric, _ in scores})
    if not rows:
        return None
    sorted_metrics = sorted(by_name.values(), key=lambda metric: metric.position)
    changes = [m.change_columns[0] for m in sorted_metrics if m.diff in m.printed_columns]
    shifts = SHIFT_COLUMNS if labels == "classes" else ()
    columns = (
        LABEL_COLUMN,
        OF_COLUMN,
        IMAGES_COLUMN,
        *(m.value_column for m in sorted_metrics),
        *PAIRED_COLUMNS,
        *changes,
        *shifts,
        *DECISION_COLUMNS,
    )
    return kind.build(columns, rows, printed=keep_printed(columns))


def _make_classes_table(run: RunData) -> Table | None:
    """Build rows of classes: top-1 in each configuration, sorted by the first one's accuracy, lowest first."""
    pairs = [
        (t, matrix) for t in accuracy.choose_trials(run.records)[:MAX_COLUMNS] if (matrix := accuracy.read_confusion(t))
    ]
    if not pairs or not metrics.list_measured(pairs[0][0]):
        return None
    tables = [matrix.per_class() for _, matrix in pairs]
    top1 = {
        t.id: dict(zip(table["class"], table["top1"], strict=True)) for (t, _), table in zip(pairs, tables, strict=True)
    }
    rows = [
        {"class": r["class"], "images": r["images"], **{id: matrix.get(r["class"]) for id, matrix in top1.items()},
         "taken_for": r["taken_for"], "times": r["times"] or None}
        for r in tables[0].head(MAX_CLASSES).to_dict("records")
    ]  # fmt: skip
    columns = (
        Column("class", "of the label", kind=TEXT),
        Column("images", "with that label", kind=COUNT),
        *(Column(t.id, f"top-1 of {t.label}", "%", PERCENT, f"top-1 %, {t.label}") for t, _ in pairs),
        Column("taken_for", "the class that the first trial most often takes it for", kind=TEXT, title="taken for"),
        Column("times", "how often", kind=COUNT),
    )
    return CLASSES.build(
        columns, rows, notes=("The report's charts/confusion-ID.csv has each whole confusion matrix.",)
    )


def _make_flips_table(run: RunData) -> Table | None:
    """Build rows of images that a configuration lost or gained against its reference."""
    rows: list[Row] = []
    for t, reference in _list_pairs(run, accuracy.choose_trials(run.records)):
        photographs = accuracy.open_photographs(t)
        rows += [
            {
                "label": t.label, "trial": t.id, "change": "lost" if flip.is_lost else "gained", "image": flip.image,
                "file": photographs.name(flip.image) if photographs else "", "class": flip.label,
                "reference": flip.reference, "reference_score": flip.reference_score, "answer": flip.answer,
                "score": flip.score,
            }
            for flip in accuracy.list_flips(t, reference)[:MAX_FLIPS]
        ]  # fmt: skip
    note = f"At most {MAX_FLIPS} images of a configuration, the lost ones first, each by the reference's score."
    columns = FLIP_COLUMNS
    return FLIPS.build(columns, rows, group=("label",), notes=(note,), printed=keep_printed(columns)) if rows else None


def _make_box_flips_table(run: RunData) -> Table | None:
    """Build rows of images with different detections in a detector and its reference."""
    rows: list[Row] = []
    notes = [f"Of detections with a score of {agreement.SURE_SCORE:g} or more; at most {MAX_FLIPS} images of a trial."]
    for trial, reference in _list_pairs(run, accuracy.choose_trials(run.records, "objects")):
        if (box_flips := agreement.list_box_flips(trial, reference)) is None:
            continue
        photographs = accuracy.open_photographs(trial)
        notes.append(f"{trial.label}: {box_flips.describe()}.")
        rows += [
            {
                "label": trial.label, "trial": trial.id, "image": flip.image, "lost": flip.lost, "gained": flip.gained,
                "file": photographs.name(flip.image) if photographs else "", "renamed": flip.renamed,
            }
            for flip in box_flips.flips[:MAX_FLIPS]
        ]  # fmt: skip
    columns = BOX_FLIP_COLUMNS
    return (
        BOX_FLIPS.build(columns, rows, group=("label",), notes=notes, printed=keep_printed(columns)) if rows else None
    )


def _average_precision(run: RunData) -> Table | None:
    """Build rows of classes: AP50-95 in each configuration."""
    trial_scores = [(t, scores) for t in run.records if t.good and (scores := mean_ap.read_detections(t))][:MAX_COLUMNS]
    by_trial = {t.id: {name: 100 * ap for name, _, ap in scores.own.by_class()} for t, scores in trial_scores}
    names = list(dict.fromkeys(name for scores in by_trial.values() for name in scores))[:MAX_CLASSES]
    rows = [{"class": name, **{id: scores.get(name) for id, scores in by_trial.items()}} for name in names]
    columns = [Column(t.id, f"AP50-95 of {t.label}", "%", PERCENT, t.label) for t, _ in trial_scores]
    return AVERAGE_PRECISION.build((Column("class", "of the objects", kind=TEXT), *columns), rows) if rows else None


def _make_thresholds_table(run: RunData) -> Table | None:
    """Build rows of score thresholds: precision, recall and F1 of each detector, and the paired change of F1."""
    trial_scores = [(t, scores) for t in run.records if t.good and (scores := mean_ap.read_detections(t))][:MAX_COLUMNS]
    pairs = {t.id: (t, reference) for t, reference in _list_pairs(run, [t for t, _ in trial_scores])}
    rows: list[Row] = []
    for t, scores in trial_scores:
        changes = mean_ap.compute_f1_changes(*pairs[t.id]) if t.id in pairs else None
        for k, threshold in enumerate(mean_ap.SCORE_THRESHOLDS.tolist()):
            row: Row = {"label": t.label, "trial": t.id, "score": threshold}
            for name, values in scores.own.rates.items():
                row |= limit_cells(name, mean_ap.jackknife_ap(values[k]), 100)
            rows.append(row | (limit_cells("f1_diff", changes[k], 100) if changes else {}))
    columns = THRESHOLD_COLUMNS
    return THRESHOLDS.build(columns, rows, group=("label",), printed=keep_printed(columns)) if rows else None


def _make_evaluation_table(run: RunData) -> Table | None:
    rows = [copy_columns(run, r, EVALUATION_COPIED) for _, r in run.frame[run.frame["pipeline_ips"].notna()].iterrows()]
    return EVALUATION.build(EVALUATION_COLUMNS, rows, notes=(EVALUATION_NOTE,)) if rows else None


CLASSIFICATION: TableKind = TableKind(
    "classification",
    "Accuracy",
    "Classification accuracy with intervals, gains and losses against the reference, and the budget's decision.",
    lambda run: _make_score_table(CLASSIFICATION, run, "classes"),
    "no trial answered labelled images",
    "accuracy",
    1,
)
DETECTION: TableKind = TableKind(
    "detection",
    "Accuracy of detection",
    "mAP with its interval, the change against the reference, and the budget's decision.",
    lambda run: _make_score_table(DETECTION, run, "objects"),
    "no trial has a mAP",
    "accuracy",
    3,
)
CLASSES = TableKind(
    "classes", "Top-1 by class", "A row per class: top-1 of each configuration, and the most frequent confusion.",
    _make_classes_table, "no trial answered labelled images", "accuracy", 5,
)  # fmt: skip
FLIP_COLUMNS = (
    LABEL_COLUMN,
    Column("trial", "the trial's id", kind=TEXT),
    Column("change", "lost: the reference alone is right; gained: this trial alone", kind=TEXT),
    Column("image", "its row in the decoded data", kind=COUNT),
    Column("file", "the photograph, if the cache still names it", kind=TEXT),
    Column("class", "of the label", kind=TEXT),
    Column("reference", "the reference's first answer", kind=TEXT),
    Column("reference_score", "its score", title="its score", rank=1),
    Column("answer", "this trial's first answer", kind=TEXT),
    Column("score", "of this trial's first answer", rank=1),
)
FLIPS = TableKind(
    "flips", "Images that flip", "A row per image that only a configuration, or only its reference, has right.",
    _make_flips_table, "no image is right in only one trial", "accuracy", 2,
)  # fmt: skip
BOX_FLIP_COLUMNS = (
    *(column for column in FLIP_COLUMNS if column.name in ("label", "trial", "image", "file")),
    Column("lost", "detections of the reference that this trial lacks, matched at an overlap of 0.5", kind=COUNT),
    Column("gained", "detections of this trial that the reference lacks", kind=COUNT),
    Column("renamed", "objects that both find, in different classes", kind=COUNT, title="of another class"),
)
BOX_FLIPS = TableKind(
    "box-flips", "Images whose detections differ", "A row per image in which a detector and its reference differ.",
    _make_box_flips_table, "no detections differ from the reference's", "accuracy", 4,
)  # fmt: skip
AVERAGE_PRECISION = TableKind(
    "average-precision", "AP50-95 by class, %", "A row per class: average precision of each configuration.",
    _average_precision, "no trial has a mAP", "accuracy", 4,
)  # fmt: skip
THRESHOLD_COLUMNS = (
    LABEL_COLUMN,
    Column("trial", "the trial's id", kind=TEXT),
    Column("score", "that a detection has at least", title="least score"),
    *with_limits(Column("precision", "share of those detections that are right, at an overlap of 0.5", "%", PERCENT)),
    *with_limits(Column("recall", "share of the objects that they find", "%", PERCENT)),
    *with_limits(Column("f1", "the harmonic mean of both", "%", PERCENT, "F1, %")),
    *with_limits(Column("f1_diff", "F1 less the reference's, paired over images", "points", POINTS, "change of F1, "
                        "points")),
)  # fmt: skip
THRESHOLDS = TableKind(
    "thresholds", "Precision, recall and F1",
    "A row per score threshold: precision, recall and F1 of each detector, with the jackknife's intervals.",
    _make_thresholds_table, "no trial has a mAP", "accuracy", 4,
)  # fmt: skip
EVALUATION_COPIED = ("pipeline_ips", *(f"{stage}_ms" for stage in EVALUATION_STAGES), "throughput_ips")
EVALUATION_COLUMNS = (
    LABEL_COLUMN,
    Column(
        "pipeline_ips",
        "of the whole evaluation, without decoding",
        "images/s",
        title="pipeline from decoded images, images/s",
    ),
    *(
        Column(f"{stage}_ms", f"{stage} of an image", "ms", title=f"{stage}, ms per image")
        for stage in EVALUATION_STAGES
    ),
    Column("throughput_ips", "with batches queued", "images/s", title="throughput, images/s"),
)
EVALUATION_NOTE = (
    "The pipeline reads, normalises, runs and ranks or post-processes every image, overlapped. The stages are timed "
    "one after the other; decoding was timed when the data set was decoded, and is not in the rate."
)
EVALUATION = TableKind(
    "evaluation", "Evaluation", "Images per second of the whole evaluation, and the time of each stage.",
    _make_evaluation_table, "nothing was evaluated", "accuracy", 2,
)  # fmt: skip


# Comparison of outputs: a run's trials with their references, and `dyno diff`.

MAX_PAIRS = 300  # trials with a comparison of raw outputs


def _list_pairs(run: RunData, trials: Iterable[TrialResult] = ()) -> list[tuple[TrialResult, TrialResult]]:
    """Return each good trial (of `trials`, or of the run) with its reference, unless it is the reference."""
    pairs = ((t, run.references.get(t.id)) for t in trials or run.records if t.good)
    return [(t, reference) for t, reference in pairs if reference is not None and reference is not t][:MAX_PAIRS]


def _make_agreement_table(run: RunData) -> Table:
    comparisons = ((t, reference, agreement.read_agreement(t, reference)) for t, reference in _list_pairs(run))
    rows = [_make_row(t.label, reference.configuration, result) for t, reference, result in comparisons if result]
    return AGREEMENT.build(make_columns(RTOL, ATOL), rows)


def _make_ranks_table(run: RunData) -> Table:
    comparisons = ((t.label, agreement.compare_answers(t, reference)) for t, reference in _list_pairs(run))
    return make_rank_table([(label, result) for label, result in comparisons if result])


def make_rank_table(by_trial: Sequence[tuple[str, list[Rank]]]) -> Table:
    """Build the table of the first ten ranks of classifiers, by trial name (R8)."""
    rows = [
        {"trial": name, "mae": {r.rank: r.mae for r in ranks}} | {f"rank_{r.rank}": 100 * r.disagreement for r in ranks}
        for name, ranks in by_trial
    ]
    rank_count = max((len(ranks) for _, ranks in by_trial), default=0)
    return RANKS.build((NAME_COLUMN, *(_make_rank_column(n) for n in range(1, rank_count + 1))), rows)


def _make_rank_column(rank: int) -> Column:
    name = f"rank_{rank}"

    def format_cell(row: Row) -> str:
        return f"{format_number(row['mae'][rank], 2)} / {row[name]:.2f} %" if name in row else ""

    meaning = "share of inputs whose class at that rank differs; printed behind the mean absolute error of the score"
    return Column(name, meaning, "%", PERCENT, f"rank {rank}", rank=rank - 1, cell=format_cell)


def compare_with_first(runs: Sequence[Results], rtol: float, atol: float) -> tuple[Table, Table, list[str]]:
    """Compare every good trial with the first good one; return tables of values and ranks, and failures.

    Failures are a line for each trial without outputs. `close` is the share of values with |a - b| <= atol + rtol |b|.
    UserError with fewer than two good trials, or for outputs of different shapes or from different inputs.
    """
    trials = [trial for run in runs for trial in run]
    good = [t for t in trials if t.good]
    failures = [f"{_name_trial(t)}: {t.status}, {t.reason}" for t in trials if not t.good]
    if len(good) < 2:
        raise UserError("agreement needs two configurations that run" + (f"; {failures[0]}" if failures else ""))
    reference, *candidates = good
    max_value = agreement.find_largest(reference)
    if 0 < max_value <= atol:
        raise UserError(
            f"no value of {_name_trial(reference)} is above {max_value:.2g}, so --atol {atol:g} would call any outputs "
            f"close; give e.g. --atol {max_value * ATOL:.0e}"
        )
    for t in candidates:
        if t.batch == reference.batch and other_inputs(t, reference):
            raise UserError(
                f"{_name_trial(t)} was fed other inputs than {_name_trial(reference)}, so their outputs can't be "
                "compared; give both the same, several under the same names: --input NAME=LOW..HIGH or --input "
                "FILE.npz, and for images --mean and --std"
            )
    rows = [
        _make_row(_name_trial(t), _name_trial(reference), agreement.compare_outputs(t, reference, rtol, atol))
        for t in candidates
    ]
    by_trial = [(_name_trial(t), agreement.compare_answers(t, reference)) for t in candidates]
    notes = (
        f"against {_name_trial(reference)}: {rows[0]['inputs']} inputs; close is |a - b| <= {atol:g} + {rtol:g} |b|",
        *dict.fromkeys(f"{_name_trial(t)}: {t.oddity}" for t in good if t.oddity),
        *(f"no outputs from {line}" for line in failures),
    )
    table = AGREEMENT.build(make_columns(rtol, atol), rows, notes=notes)
    return table, make_rank_table([(name, trial_ranks) for name, trial_ranks in by_trial if trial_ranks]), failures


def _name_trial(trial: TrialResult) -> str:
    return f"{trial.model} {trial.configuration}"


def _make_row(name: str, reference: str, result: Agreement) -> dict[str, Any]:
    relative = result.max_rel or (math.nan if result.max_abs else 0.0)  # unknown if the reference is zero there
    return {
        "trial": name, "reference": reference, "inputs": result.samples, "values": result.count, "close": result.close,
        "max_abs": result.max_abs, "mean_abs": result.mean_abs, "max_rel": relative,
        "nonfinite": result.nonfinite,
        **({} if math.isnan(result.labels_changed) else {"labels_changed": 100 * result.labels_changed}),
    }  # fmt: skip


NAME_COLUMN = Column("trial", "model and configuration", kind=TEXT)


def make_columns(rtol: float, atol: float) -> tuple[Column, ...]:
    """Return the columns of a comparison by these tolerances."""
    return (
        NAME_COLUMN,
        Column("reference", "trial that it is compared with", kind=TEXT, title="against", rank=2),
        Column("inputs", "that both answered", kind=COUNT, rank=3),
        Column("values", "that were compared", kind=COUNT, rank=1),
        Column("close", "share of values with |a - b| <= atol + rtol |b|, of labels of the same, 0 to 1",
               title=f"close, % (rtol {rtol:g}, atol {atol:g})",
               cell=lambda row: f"{100 * row['close']:.2f}" if row["values"] else ""),
        Column("max_abs", "largest |a - b|", title="max abs"),
        Column("mean_abs", "mean |a - b|", title="mean abs"),
        Column("max_rel", "largest |a - b| / |b|", title="max rel"),
        Column("nonfinite", "values that are NaN or infinite where the reference's are not", kind=COUNT,
               title="not finite"),
        Column("labels_changed", "share of the whole numbers and booleans that differ", "%", PERCENT,
               title="labels that differ"),
    )  # fmt: skip


AGREEMENT = TableKind(
    "agreement", "Outputs against the reference",
    "A row per trial: share of output values close to the reference's, and the errors.", _make_agreement_table,
    "no two trials left outputs to compare", "accuracy", 6,
)  # fmt: skip
RANKS = TableKind(
    "ranks", "Ranks: mean absolute error of the score / inputs whose class at that rank differs",
    "A row per classifier: how the first ten ranks differ from the reference's.", _make_ranks_table,
    "no two trials left a classifier's answers", "accuracy", 7,
)  # fmt: skip
