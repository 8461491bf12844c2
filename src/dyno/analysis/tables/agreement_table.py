"""Outputs against a reference's: of a run's trials against their own, and what `dyno agree` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dyno.analysis.formatting import significant
from dyno.analysis.metrics import agreement
from dyno.analysis.metrics.agreement import Agreement, Rank
from dyno.analysis.presentation.table import COUNT, PERCENT, TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.analysis.ranking.references import other_inputs
from dyno.analysis.records.results import Results, TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.worker.numerics.closeness import ATOL, RTOL
from dyno.worker.spec import UserError

MOST_PAIRS = 300  # trials whose raw outputs are compared


def _list_pairs(run: RunData) -> list[tuple[TrialResult, TrialResult]]:
    pairs = ((t, run.references.get(t.id)) for t in run.records if t.good)
    return [(t, other) for t, other in pairs if other is not None and other is not t][:MOST_PAIRS]


def _make_agreement_table(run: RunData) -> Table:
    compared = ((t, other, agreement.of(t, other)) for t, other in _list_pairs(run))
    rows = [_make_row(t.label, other.configuration, result) for t, other, result in compared if result]
    return AGREEMENT.of(columns(RTOL, ATOL), rows)


def _make_ranks_table(run: RunData) -> Table:
    compared = ((t.label, agreement.ranks(t.answers, other.answers)) for t, other in _list_pairs(run))
    return ranks([(label, result) for label, result in compared if result])


def ranks(by_trial: Sequence[tuple[str, list[Rank]]]) -> Table:
    """Build the table of the first ten ranks of classifiers, each by its name (R8)."""
    rows = [
        {"trial": name, "mae": {r.rank: r.mae for r in own}} | {f"rank_{r.rank}": 100 * r.disagreement for r in own}
        for name, own in by_trial
    ]
    longest = max((len(own) for _, own in by_trial), default=0)
    return RANKS.of((NAME, *(_make_rank_column(n) for n in range(1, longest + 1))), rows)


def _make_rank_column(number: int) -> Column:
    name = f"rank_{number}"

    def format_cell(row: Row) -> str:
        return f"{significant(row['mae'][number], 2)} / {row[name]:.2f} %" if name in row else ""

    meaning = "share of inputs whose class at that rank differs; printed behind the mean absolute error of the score"
    return Column(name, meaning, "%", PERCENT, f"rank {number}", cell=format_cell)


def compare(runs: Sequence[Results], rtol: float, atol: float) -> tuple[Table, Table, list[str]]:
    """Compare every good trial after the first with the first one; return tables of values and ranks, and failures.

    The failures are a line for each trial without outputs. UserError with fewer than two good trials, or where their
    outputs have other shapes or are of other inputs.

    `close` is the share of values with |a - b| <= atol + rtol |b|.
    """
    trials = [trial for run in runs for trial in run]
    good = [t for t in trials if t.good]
    failed = [f"{_name_trial(t)}: {t.status}, {t.reason}" for t in trials if not t.good]
    if len(good) < 2:
        raise UserError("agreement needs two configurations that run" + (f"; {failed[0]}" if failed else ""))
    reference, *others = good
    for t in others:
        if t.batch == reference.batch and other_inputs(t, reference):
            raise UserError(
                f"{_name_trial(t)} was fed other inputs than {_name_trial(reference)}, so their outputs can't be "
                "compared; give both the same: --input NAME=LOW..HIGH or --input FILE.npz, "
                "and for images --mean and --std"
            )
    rows = [
        _make_row(_name_trial(t), _name_trial(reference), agreement.compare(t, reference, rtol, atol)) for t in others
    ]
    by_trial = [(_name_trial(t), agreement.ranks(t.answers, reference.answers)) for t in others]
    notes = (
        f"against {_name_trial(reference)}: {rows[0]['inputs']} inputs; close is |a - b| <= {atol:g} + {rtol:g} |b|",
        *(f"{_name_trial(t)}: {t.oddity}" for t in good if t.oddity),
        *(f"no outputs from {line}" for line in failed),
    )
    table = AGREEMENT.of(columns(rtol, atol), rows, notes=notes)
    return table, ranks([(name, trial_ranks) for name, trial_ranks in by_trial if trial_ranks]), failed


def _name_trial(trial: TrialResult) -> str:
    return f"{trial.model} {trial.configuration}"


def _make_row(name: str, reference: str, result: Agreement) -> dict[str, Any]:
    return {
        "trial": name, "reference": reference, "inputs": result.samples, "values": result.count, "close": result.close,
        "max_abs": result.max_abs, "mean_abs": result.mean_abs, "max_rel": result.max_rel,
        "nonfinite": result.nonfinite,
        **({} if math.isnan(result.labels_changed) else {"labels_changed": 100 * result.labels_changed}),
    }  # fmt: skip


NAME = Column("trial", "model and configuration", kind=TEXT)


def columns(rtol: float, atol: float) -> tuple[Column, ...]:
    """Return the columns of a comparison by these tolerances."""
    return (
        NAME,
        Column("reference", "the trial that it is compared with", kind=TEXT, title="against", rank=2),
        Column("inputs", "that both answered", kind=COUNT, rank=3),
        Column("values", "that were compared", kind=COUNT, rank=1),
        Column("close", "share of values with |a - b| <= atol + rtol |b|, of labels of the same, 0 to 1",
               title=f"close, % (rtol {rtol:g}, atol {atol:g})", cell=lambda row: f"{100 * row['close']:.2f}"),
        Column("max_abs", "largest |a - b|", title="max abs"),
        Column("mean_abs", "mean |a - b|", title="mean abs"),
        Column("max_rel", "largest |a - b| / |b|", title="max rel"),
        Column("nonfinite", "values that are NaN or infinite where the reference's are not", kind=COUNT,
               title="not finite"),
        Column("labels_changed", "share of the whole numbers and booleans that differ", "%", PERCENT,
               title="labels that differ"),
    )  # fmt: skip


AGREEMENT = TableKind(
    "agreement",
    "Outputs against the reference",
    "A row per trial: share of output values close to the reference's, and the errors.",
    _make_agreement_table,
    "no two trials left outputs to compare",
    "accuracy",
    6,
)
RANKS = TableKind(
    "ranks",
    "Ranks: mean absolute error of the score / inputs whose class at that rank differs",
    "A row per classifier: how the first ten ranks differ from the reference's.",
    _make_ranks_table,
    "no two trials left a classifier's answers",
    "accuracy",
    7,
)
