"""Where two runtimes part: how far every layer's output is from the reference's, and what was found on the way."""

from __future__ import annotations

from dataclasses import dataclass

from dyno.worker.facts.sparse import Sparse


@dataclass(frozen=True)
class Apart:
    """One tensor of two runtimes: |a - b| / |b| of the input where that is largest (infinite: not finite), the share of
    values that are close, the largest differences, and values of a and of b that are not finite."""

    error: float
    close: float
    max_abs: float
    max_rel: float
    nonfinite: int
    reference_nonfinite: int


@dataclass(frozen=True)
class Point:
    """The output of a layer in both runtimes, by its tensor's name in the graph.

    `reads` are the compared tensors that it is computed from. `apart` is with what the engine computed before it,
    `added` with the reference's values of `reads` instead. `effect` is how far the network's outputs move when nothing
    but `added` happens to the reference (None: not tried).
    """

    tensor: str
    reads: tuple[str, ...]
    apart: Apart
    added: Apart
    effect: float | None = None


@dataclass(frozen=True, kw_only=True)
class Parting(Sparse):
    """The network's outputs and its layers in an engine, against a reference.

    The outputs are those of the engine as it is (`whole`), with tensors marked as outputs (`marked`), cut around the
    `suspects` (`cut`), and cut there with the reference in the suspects' place (`mended`). `border` is the last tensor
    that agrees and the first that doesn't where a graph that ends there shows what the marked one hides. `runs` are
    the batches that were compared, `skipped` the tensors that are in one graph alone or change their shape,
    `mismatched` those that stand for something else there, and `parts` how many pieces the marked graph was run in.
    """

    points: tuple[Point, ...] = ()
    whole: Apart | None = None
    marked: Apart | None = None
    cut: Apart | None = None
    mended: Apart | None = None
    suspects: tuple[str, ...] = ()
    border: tuple[str, ...] = ()
    runs: int = 0
    skipped: int = 0
    mismatched: int = 0
    parts: int = 0
