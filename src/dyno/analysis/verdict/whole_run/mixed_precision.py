"""Lowered precisions that fail the budget, and the effect of keeping a few of their layers higher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dyno.analysis.formatting import UNCLEAR, points, ratio
from dyno.analysis.metrics import accuracy, known, quality, speedups
from dyno.analysis.metrics.accuracy import OVER, UNDECIDED, WITHIN
from dyno.analysis.ranking.frontier import LATENCY
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.analysis.stats import Speedup
from dyno.analysis.verdict.findings import NOTE, WARNING, Finding, ms

if TYPE_CHECKING:
    import pandas as pd

KEEP = "keep"
LOWERED = ("int8", "fp16")
HIGHER = ("fp32", "tf32")
NAMED = 3  # kept layers that a sentence names


def failing(run: RunData) -> list[str]:
    """Return ids of the trials whose lowered precision is not within the budget with confidence although it could be.

    One per configuration and size, at the smallest batch that ran. Failures that no layer could change are left out:
    too few images for any trial to be within, or a size at which the higher precisions fail the budget too.
    """
    frame = run.frame
    rows = {row["trial"]: row for _, row in frame.iterrows()}
    smallest: dict[Any, TrialResult] = {}
    for t in sorted(run.records, key=lambda t: t.batch):
        if t.precision in LOWERED and KEEP not in t.options and t.status == "ok":
            smallest.setdefault(_make_series_key(t), t)
    chosen = []
    for t in smallest.values():
        row = rows[t.id]
        others = frame[(frame["model"] == t.model) & (frame["size"] == t.size) & (frame["device"] == t.device)]
        higher = others[others["precision"].isin(HIGHER) & (others["status"] == "ok")]
        if (
            row["budget"] in (OVER, UNDECIDED)
            and (higher["budget"] == WITHIN).any()
            and _has_enough_images(row, run.budgets)
        ):
            chosen.append(t.id)
    return chosen


def _has_enough_images(row: pd.Series, budgets: Sequence[accuracy.Budget]) -> bool:
    """Return whether a trial with all the reference's answers would be within the budget on that number of images."""
    return all(known()[limit.metric].unchanged(row["images"]).low >= limit.limit for limit in budgets)


def _make_series_key(t: TrialResult) -> tuple[Any, ...]:
    """Return everything that must be equal, except the batch and the number of layers kept."""
    options = tuple(sorted((k, str(v)) for k, v in t.options.items() if k != KEEP))
    return t.model, t.backend, t.precision, t.size, t.device, t.runtime, options


def findings(run: RunData) -> Iterator[Finding]:
    """Yield the layers that were kept higher for each lowered precision, and their cost."""
    mixed: dict[Any, list[TrialResult]] = {}
    for t in run.records:
        if KEEP in t.options:
            mixed.setdefault(_make_series_key(t), []).append(t)
    plain = {(_make_series_key(t), t.batch): t for t in run.records if KEEP not in t.options}
    rows = {row["trial"]: row for _, row in run.frame.iterrows()} if run.budgets and mixed else {}
    for series, trials in mixed.items() if rows else ():
        batch = min(t.batch for t in trials)
        candidates = [t for t in trials if t.batch == batch]
        if (lowered := plain.get((series, batch))) is not None and rows[lowered.id]["budget"] in (OVER, UNDECIDED):
            within = [t for t in candidates if rows[t.id]["budget"] == WITHIN and t.status == "ok"]
            best = min(within, key=_count_kept, default=None)
            yield (
                _report_success(lowered, best, rows, run) if best else _report_failure(lowered, candidates, run.budget)
            )


def _count_kept(t: TrialResult) -> int:
    return int(t.options[KEEP])


def _report_success(plain: TrialResult, mixed: TrialResult, rows: dict[str, pd.Series], run: RunData) -> Finding:
    row, without = rows[mixed.id], rows[plain.id]
    change = quality(row.to_frame().T, run.budget_metrics).change_in(without)[1]
    loss = f" ({points(change / 100)} points)" if change == change else ""
    fails = "loses more than it allows" if without["budget"] == OVER else "is undecided"
    layers = mixed.made_by.kept
    names = ", ".join(layer.node for layer in layers[:NAMED]) + (", …" if len(layers) > NAMED else "")
    boundary, clock = str(row["boundary"]), str(row["clock"])
    cost = speedups.speedup(mixed, plain, boundary, clock, run.rule)
    return Finding(
        NOTE,
        f"{plain.label} {fails} under {run.budget}{loss}; with {_count_kept(mixed)} of {mixed.made_by.ranked} "
        f"layers in a higher precision ({names}) it is within: {ms(row[LATENCY])}, "
        f"{_as_fast(cost)}. How many to keep was chosen on the test images "
        "themselves.",
    )


def _as_fast(cost: Speedup) -> str:
    shown = ratio(cost.value, cost.low, cost.high)
    return f"what that costs is {UNCLEAR}" if shown == UNCLEAR else f"{shown} as fast as without"


def _report_failure(plain: TrialResult, tried: Sequence[TrialResult], budget: str) -> Finding:
    most = max(map(_count_kept, tried))
    total = next((n for t in tried if (n := t.made_by.ranked)), "?")
    return Finding(
        WARNING, f"{plain.label}: up to {most} of {total} layers in a higher precision don't bring it within {budget}."
    )
