"""Do two configurations of a model give the same outputs: isclose share, errors, and the table of ten ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dyno.analysis.metrics import box_agreement
from dyno.analysis.metrics.accuracy import matching
from dyno.analysis.records.results import TrialResult
from dyno.worker.numerics.closeness import ATOL, RTOL, Closeness, closeness
from dyno.worker.spec import UserError

RANKS = 10


@dataclass(frozen=True)
class Agreement(Closeness):
    """Differences between A's values and B's (the reference) over all outputs of `inputs` inputs."""

    samples: int = 0


@dataclass(frozen=True)
class Rank:
    """One row of the top-10 table: mean absolute error of the score, and share of inputs whose class there differs."""

    rank: int
    mae: float
    disagreement: float


def agree(
    own: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], rtol: float = RTOL, atol: float = ATOL
) -> Agreement:
    """Compare outputs by name, each [N, ...]; UserError when names or shapes differ, N apart (the shorter counts)."""
    if set(own) != set(reference) or not own:
        raise UserError(f"outputs differ in name: {', '.join(own) or 'none'} against {', '.join(reference) or 'none'}")
    found = closeness([_cut_arrays(name, own[name], reference[name]) for name in reference], rtol, atol)
    samples = min(min(len(own[n]), len(reference[n])) for n in reference)
    return Agreement(**vars(found), samples=samples)


def _cut_arrays(name: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if a.shape[1:] != b.shape[1:]:
        raise UserError(f"output {name!r} differs in shape: {list(a.shape)} against {list(b.shape)}")
    n = min(len(a), len(b))
    return a[:n], b[:n]


def of(trial: TrialResult, reference: TrialResult, rtol: float = RTOL, atol: float = ATOL) -> Agreement | None:
    """Return the agreement of two stored trials over common inputs; None when either lacks outputs of that shape."""
    try:
        return compare(trial, reference, rtol, atol)
    except UserError:  # other shapes: that trial has a row and a reason of its own
        return None


def compare(trial: TrialResult, reference: TrialResult, rtol: float = RTOL, atol: float = ATOL) -> Agreement:
    """Compare as `of` does; UserError where there is nothing to compare.

    Outputs are matched by position, since files name them as they like. Boxes that the network has suppressed itself
    are paired first, and one without a partner counts as close to nothing.
    """
    if rows := box_agreement.pair_rows(trial, reference):
        return replace(agree(rows.own, rows.reference, rtol, atol), samples=rows.images)
    own, other, apart = paired_outputs(trial, reference)
    if len(own) != len(other):
        raise UserError(f"{trial.model} {trial.backend} {trial.precision} has {len(own)} outputs, "
                        f"{reference.model} {reference.backend} {reference.precision} has {len(other)}")  # fmt: skip
    if apart:
        raise UserError(
            f"the outputs differ in their number of rows for {apart:.1%} of the inputs, so no row has a partner"
        )
    return agree(dict(_by_position(own)), dict(_by_position(other)), rtol, atol)


def paired_outputs(trial: TrialResult, reference: TrialResult) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Return the raw outputs of both by position, and the share of the batches or inputs that were left out.

    Left out are those for which one trial produced another number of rows than the other. A network may return any
    number of rows, as `nonzero` does: such outputs can be compared row by row only where both have the same number.
    """
    own, other = trial.outputs(), reference.outputs()
    arrays, others = list(own.values()), list(other.values())
    if len(own) != len(other) or trial.batch != reference.batch:
        return arrays, others, 0.0
    counts, other_counts = trial.output_rows(own), reference.output_rows(other)
    apart = 0.0
    for i, (a, b) in enumerate(zip(own, other, strict=True)):
        if (a in counts or b in other_counts) and own[a].shape[1:] == other[b].shape[1:]:
            rows = counts.get(a, _one_each(len(own[a]), trial.batch))
            other_rows = other_counts.get(b, _one_each(len(other[b]), trial.batch))
            n = min(len(rows), len(other_rows))
            same = rows[:n] == other_rows[:n]
            arrays[i], others[i] = _keep_rows(own[a], rows[:n], same), _keep_rows(other[b], other_rows[:n], same)
            apart = max(apart, float(1 - same.mean())) if n else apart
    return arrays, others, apart


def _one_each(images: int, batch: int) -> np.ndarray:
    return np.diff(np.minimum(np.arange(0, images + batch, batch), images))


def _keep_rows(array: np.ndarray, rows: np.ndarray, keep: np.ndarray) -> np.ndarray:
    kept: np.ndarray = array[: rows.sum()][np.repeat(keep, rows)]
    return kept


def _by_position(outputs: Iterable[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    return ((f"output {i}", array) for i, array in enumerate(outputs))


def ranks(own: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> list[Rank]:
    """Compute the top-10 table (R8) of two classifiers' `topk_index` and `topk_score` [N, k], over common images."""
    if not {"topk_index", "topk_score"} <= set(own) & set(reference):
        return []
    here, there = matching(dict(own), dict(reference))
    k = min(RANKS, own["topk_index"].shape[1], reference["topk_index"].shape[1])
    if not len(here):
        return []
    error = np.abs(own["topk_score"][here, :k].astype(np.float64) - reference["topk_score"][there, :k])
    differs = own["topk_index"][here, :k] != reference["topk_index"][there, :k]
    return [Rank(i + 1, float(error[:, i].mean()), float(differs[:, i].mean())) for i in range(k)]
