"""The report's tables of tasks: how evaluation went, mAP, and the classes one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dyno.analysis.formatting import points
from dyno.analysis.metrics import accuracy, confusion, detection
from dyno.analysis.metrics.detection import WORDS
from dyno.analysis.records.results import Results
from dyno.analysis.tables.cells import Cell, Table, number, text
from dyno.analysis.tables.trial_table import STAGES

if TYPE_CHECKING:
    import pandas as pd

MOST_CLASSES, MOST_COLUMNS = 200, 8  # rows and trials of a table of classes
EMPTY = Cell("", "", True)


def everything(results: Results, frame: pd.DataFrame) -> list[Table]:
    """All tables that have a row."""
    made = (
        evaluation_table(results, frame),
        mean_ap_table(results, frame),
        average_precisions(results),
        classes_table(results),
    )
    return [table for table in made if table is not None]


def evaluation_table(results: Results, frame: pd.DataFrame) -> Table | None:
    """Images a second of the whole evaluation, and the time of each stage."""
    columns = ["pipeline_ips", *(f"{stage}_ms" for stage in STAGES), "throughput_ips"]
    labels = {t.id: t.label for t in results}
    rows = [
        [text(labels[r["trial"]]), *(number(r[column]) for column in columns)]
        for _, r in frame[frame["pipeline_ips"].notna()].iterrows()
    ]
    head = [
        "trial",
        "whole pipeline, images/s",
        *(f"{stage}, ms per image" for stage in STAGES),
        "throughput, images/s",
    ]
    note = (
        "The pipeline reads, normalises, runs and ranks or post-processes every image, overlapped. The stages are "
        "timed one after the other; decoding was timed when the data set was decoded, and is not in the rate."
    )
    return Table("Evaluation", head, rows, [note]) if rows else None


def mean_ap_table(results: Results, frame: pd.DataFrame) -> Table | None:
    """mAP with its interval, the paired change against the reference, and the budget decision."""
    rows, trials = [], {t.id: t for t in results}
    for _, r in frame[frame["map50_95"].notna()].iterrows():
        t = trials[r["trial"]]
        spread = Cell(f"{r['map_low']:.2f} to {r['map_high']:.2f}", repr(r["map_low"]), True)
        own = [number(r["map50"], f"{r['map50']:.2f}"), number(r["map50_95"], f"{r['map50_95']:.2f}"), spread]
        boxes = [number(r[name], f"{r[name]:.2f}") for name in ("box_map50", "box_map50_95")]
        scored = detection.of(t)
        kind = WORDS[scored.kind] if scored else ""
        images = number(float(r["images"]), f"{r['images']:,}")
        rows.append([text(t.label), text(kind), images, *own, *boxes, *_change(r)])
    head = ["trial", "of", "images", "mAP50 %", "mAP50-95 %", "95 % interval", "boxes: mAP50 %", "boxes: mAP50-95 %",
            "change, points", "95 % interval", "budget"]  # fmt: skip
    return Table("Accuracy of detection", head, rows) if rows else None


def _change(r: pd.Series) -> list[Cell]:
    if r["map_diff_low"] != r["map_diff_low"]:
        return [EMPTY, EMPTY, text(r["budget"])]
    low, value, high = (points(r[f"map_diff{end}"] / 100) for end in ("_low", "", "_high"))
    return [number(r["map_diff"], value), Cell(f"{low} to {high}", repr(r["map_diff_low"]), True), text(r["budget"])]


def average_precisions(results: Results) -> Table | None:
    """AP50-95 of each class in each way of running the model; rows are classes."""
    scored = [(t, found) for t in results if t.good and (found := detection.of(t))][:MOST_COLUMNS]
    shown = [t for t, _ in scored]
    each = [{name: ap for name, _, ap in found.own.by_class()} for _, found in scored]
    names = list(dict.fromkeys(name for found in each for name in found))[:MOST_CLASSES]
    rows = [
        [text(name), *(number(found[name], f"{100 * found[name]:.2f}") if name in found else EMPTY for found in each)]
        for name in names
    ]
    return Table("AP50-95 by class, %", ["class", *(t.label for t in shown)], rows) if rows else None


def classes_table(results: Results) -> Table | None:
    """Top-1 of each class in each way of running the model, the worst of the first one first; rows are classes."""
    shown = [(t, found) for t in confusion.chosen(results)[:MOST_COLUMNS] if (found := confusion.of(t))]
    if not shown or accuracy.of(shown[0][0]) is None:
        return None
    tables = [found.per_class() for _, found in shown]
    each = [dict(zip(table["class"], table["top1"], strict=True)) for table in tables]
    rows = [
        [text(r["class"]), number(r["images"], f"{r['images']:,}"),
         *(number(found[r["class"]], f"{found[r['class']]:.1f}") if r["class"] in found else EMPTY for found in each),
         text(f"{r['taken_for']} ({r['times']})" if r["times"] else "")]
        for r in tables[0].head(MOST_CLASSES).to_dict("records")
    ]  # fmt: skip
    head = ["class", "images", *(f"top-1 %, {t.label}" for t, _ in shown), "the first takes it for"]
    note = "The whole confusion matrix of each is in confusion-ID.csv."
    return Table("Top-1 by class", head, rows, [note])
