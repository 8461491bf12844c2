"""Layer errors: how far the output of each layer of an engine is from the reference's, and which layers make that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dyno.worker.facts.sparse import Sparse

MANY = 16  # labels, of which one may differ by chance


@dataclass(frozen=True)
class Difference:
    """A tensor of an engine (a) against the reference's (b): |a - b| / |b| of the input where that is largest
    (infinite: not finite), the share of values that are close, the largest differences, and values of a and of b that
    are not finite."""

    error: float
    close: float
    max_abs: float
    max_rel: float
    nonfinite: int
    reference_nonfinite: int


@dataclass(frozen=True)
class LayerError:
    """The output of one layer, by its tensor's name in the graph.

    `reads` are the compared tensors that it is computed from. `total` is the difference when the layer reads what the
    engine computed, `own` when it reads the reference's values. `effect` is the error of the network's outputs when
    nothing but `own` is added to the reference (None: not tried).
    """

    tensor: str
    reads: tuple[str, ...]
    total: Difference
    own: Difference
    effect: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerErrors(Sparse):
    """The layers of an engine against a reference, and the network's outputs under four conditions.

    The outputs are those of the unmodified engine (`unmodified`), with every compared tensor marked as an output
    (`marked`), of the graph cut around the `suspects` (`cut`), and cut there with the reference computing the suspects
    (`substituted`). Where marking hides the error, `boundary` is the last tensor at which a graph that ends there
    agrees, and the first at which it doesn't. `runs` are the batches that were compared, `unmatched` the tensors that
    the reference doesn't have, or that change their shape, `mismatched` those that it has with another meaning,
    `reference_layers` how many tensors the reference has, and `parts` how many pieces the marked graph was run in.
    """

    layers: tuple[LayerError, ...] = ()
    unmodified: Difference | None = None
    marked: Difference | None = None
    cut: Difference | None = None
    substituted: Difference | None = None
    suspects: tuple[str, ...] = ()
    boundary: tuple[str, ...] = ()
    runs: int = 0
    unmatched: int = 0
    mismatched: int = 0
    reference_layers: int = 0
    parts: int = 0


def is_labels(array: Any) -> bool:
    """Return whether an output's values are labels (equal or not) rather than quantities (near or far apart).

    Booleans and integers are labels, except those of one byte with several channels (N x C, or N x C x H x W in either
    order): pixels, or scores that a quantised network doesn't convert back.
    """
    kind, shape = array.dtype.kind, array.shape
    if kind not in "iu" or array.dtype.itemsize > 1:
        return bool(kind in "biu")
    return not (len(shape) in (2, 4) and min(shape[1], shape[-1]) > 1)
