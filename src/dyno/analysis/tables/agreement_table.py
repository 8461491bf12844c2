"""The tables of `dyno agree`: every trial's outputs against the first one's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.markup import escape
from rich.table import Table

from dyno.analysis.formatting import console, markdown, markdown_table
from dyno.analysis.metrics import agreement
from dyno.analysis.records import results
from dyno.analysis.records.results import TrialResult
from dyno.worker.spec import UserError

FORMATS = ("text", "markdown", "csv", "json")


def compare(folders: Sequence[Path], rtol: float, atol: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows (one per trial after the first good one), and one line for each trial without outputs.

    `close` is the share of values with |a - b| <= atol + rtol |b|, `ranks` the top-10 table of a classifier.
    """
    trials = [trial for folder in folders for trial in results.load(folder)]
    good = [t for t in trials if t.good]
    bad = [f"{_name(t)}: {t.status}, {t.reason}" for t in trials if not t.good]
    if len(good) < 2:
        raise UserError("agreement needs two ways of running that work" + (f"; {bad[0]}" if bad else ""))
    reference, *others = good
    return [_row(other, reference, rtol, atol) for other in others], bad


def _name(trial: TrialResult) -> str:
    return f"{trial.model} {trial.backend} {trial.precision}"


def _row(trial: TrialResult, reference: TrialResult, rtol: float, atol: float) -> dict[str, Any]:
    # Files name their outputs as they like; what counts is their order.
    own, other = list(trial.outputs().values()), list(reference.outputs().values())
    if len(own) != len(other):
        raise UserError(f"{_name(trial)} has {len(own)} outputs, {_name(reference)} has {len(other)}")
    numbered = [{str(i): array for i, array in enumerate(arrays)} for arrays in (own, other)]
    found = agreement.agree(numbered[0], numbered[1], rtol, atol)
    ranks = agreement.ranks(trial.answers, reference.answers)
    return {
        "trial": _name(trial),
        "reference": _name(reference),
        "inputs": found.samples,
        "values": found.count,
        "close": found.close,
        "max_abs": found.max_abs,
        "mean_abs": found.mean_abs,
        "max_rel": found.max_rel,
        "nonfinite": found.nonfinite,
        "ranks": [{"rank": r.rank, "mae": r.mae, "disagreement": r.disagreement} for r in ranks],
    }


def show(folders: Sequence[Path], rtol: float, atol: float, least: float, format: str) -> int:
    """Print the tables; 1 when a share is below `least`, 3 when a trial left no outputs, else 0."""
    if format not in FORMATS:
        raise UserError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    rows, bad = compare(folders, rtol, atol)
    if format == "json":
        print(json.dumps({"rows": rows, "without_outputs": bad, "rtol": rtol, "atol": atol}, indent=1))
    elif format == "text":
        _print(rows, bad, rtol, atol)
    else:
        flat = pd.DataFrame(rows).drop(columns="ranks")
        print(flat.to_csv(index=False) if format == "csv" else _markdown(flat), end="")
    if any(row["close"] < least for row in rows):
        return 1
    return 3 if bad else 0


def _markdown(frame: pd.DataFrame) -> str:
    rows = [[markdown(cell) for cell in row] for row in frame.to_numpy()]
    return markdown_table([*map(str, frame.columns)], rows, [frame[c].dtype.kind in "if" for c in frame.columns])


def _print(rows: list[dict[str, Any]], bad: list[str], rtol: float, atol: float) -> None:
    out = console()
    first = rows[0]
    out.print(
        f"against {escape(first['reference'])}: {first['inputs']} inputs, {first['values']} values; "
        f"close is |a - b| <= {atol:g} + {rtol:g} |b|",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("trial", "close", "max abs", "mean abs", "max rel", "not finite"):
        table.add_column(heading, justify="left" if heading == "trial" else "right", no_wrap=True)
    for row in rows:
        numbers = (f"{row[key]:.3g}" for key in ("max_abs", "mean_abs", "max_rel"))
        table.add_row(escape(row["trial"]), f"{row['close']:.2%}", *numbers, str(row["nonfinite"]))
    out.print(table)
    for row in rows:
        if row["ranks"]:
            out.print(f"\n{escape(row['trial'])}: scores and classes by rank", soft_wrap=True)
            out.print(_rank_table(row))
    for line in bad:
        out.print(f"no outputs from {escape(line)}", style="red", soft_wrap=True)


def _rank_table(row: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "mean abs error", "other class"):
        table.add_column(heading, justify="right")
    for rank in row["ranks"]:
        table.add_row(str(rank["rank"]), f"{rank['mae']:.3g}", f"{rank['disagreement']:.2%}")
    return table
