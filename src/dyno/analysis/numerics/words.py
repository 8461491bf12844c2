"""What a comparison of layers found, in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dyno.analysis.formatting import counting, significant
from dyno.worker.facts.numerics import Apart, Parting, Point

HALF, MOSTLY = 0.5, 0.8  # of what it was: an error that falls below the first has fallen, below the second in part
NAMED = 4  # suspects that a sentence names
Labels = Mapping[str, str]  # the layer's name of each tensor


def first_beyond(points: Sequence[Point], limit: float) -> Point | None:
    """The first layer, in the graph's order, whose output is further off than the limit."""
    return next((point for point in points if not point.apart.error <= limit), None)


def label(tensor: str, labels: Labels) -> str:
    """The layer that writes the tensor, else the tensor's own name."""
    return labels.get(tensor, tensor)


def sentences(found: Parting, limit: float, precision: str, labels: Labels) -> list[str]:
    """Whether outputs agree, where they part first, whose error it is, and whether the engine as it is confirms it."""
    return [
        _outputs(found, limit, precision),
        *_mismatched(found),
        *_not_finite(found.points, labels),
        *_first(found, limit, labels),
        *_border(found, labels),
        *_suspects(found, labels),
        *_tested(found, limit),
    ]


def _outputs(found: Parting, limit: float, precision: str) -> str:
    runs, layers = counting(found.runs, "run"), counting(len(found.points), "layer")
    parts = f", marked in {found.parts} parts" if found.parts > 1 else ""
    agrees = "agree" if found.whole is not None and found.whole.error <= limit else "disagree"
    return (f"outputs {agrees}: {_off(found.whole)} ({precision} agrees up to {limit:g}); {runs}, {layers} compared"
            f"{parts}.")  # fmt: skip


def _mismatched(found: Parting) -> list[str]:
    if not found.mismatched:
        return []
    tensors = counting(found.mismatched, "tensor")
    return [f"{tensors} left out: off, while what reads {'it' if found.mismatched == 1 else 'them'} is right, so the "
            "reference has something else there."]  # fmt: skip


def _off(apart: Apart | None) -> str:
    if apart is None:
        return "of another shape"
    return f"off by {_size(apart.error)} of their size" if math.isfinite(apart.error) else "not finite"


def _size(error: float) -> str:
    return significant(error, 2) if math.isfinite(error) else "infinite"


def _not_finite(points: Sequence[Point], labels: Labels) -> list[str]:
    lines = []
    theirs = next((point for point in points if point.apart.reference_nonfinite), None)
    if theirs is not None:
        count = f"{theirs.apart.reference_nonfinite:,} values"
        lines.append(f"the reference itself has NaN or infinity from {label(theirs.tensor, labels)} on: {count}.")
    own = next((point for point in points if point.apart.nonfinite), None)
    if own is not None:
        made = "on the reference's values too" if own.added.nonfinite else "but not on the reference's values"
        lines.append(f"first layer with NaN or infinity: {label(own.tensor, labels)}, {own.apart.nonfinite:,} values, "
                     f"{made}.")  # fmt: skip
    return lines


def _first(found: Parting, limit: float, labels: Labels) -> list[str]:
    first = first_beyond(found.points, limit)
    agrees = found.whole is not None and found.whole.error <= limit
    if first is None:
        return [] if agrees else ["with tensors marked as outputs, every layer agrees."]
    before = max((point.apart.error for point in found.points if point.tensor in first.reads), default=0.0)
    own = first.added.error
    whose = "made here" if not own <= HALF * first.apart.error else "added up over the layers before"
    line = (f"first layer that disagrees: {label(first.tensor, labels)}, off by {_size(first.apart.error)}; its own "
            f"error is {_size(own)}, that of its inputs {_size(before)}: {whose}.")  # fmt: skip
    return [line, *(["nothing of that reaches the outputs of the engine as it is."] if agrees else [])]


def _border(found: Parting, labels: Labels) -> list[str]:
    if not found.border:
        return []
    before, after = found.border
    good = f"the one that ends at {label(before, labels)} agrees" if before else "even the first layer's disagrees"
    bad = f"the one that ends at {label(after, labels)} doesn't" if after else "the whole network's doesn't"
    return ["the error vanishes when tensors are marked. Of graphs with one layer's output and nothing marked, "
            f"{good}, {bad}: look at what is fused there."]  # fmt: skip


def _suspects(found: Parting, labels: Labels) -> list[str]:
    if not found.suspects:
        return []
    effects = {point.tensor: point.effect or 0.0 for point in found.points}
    total = sum(effect**2 for effect in effects.values())
    listed = ", ".join(label(name, labels) for name in found.suspects[:NAMED])
    more = f" and {len(found.suspects) - NAMED} more" if len(found.suspects) > NAMED else ""
    which = f"{counting(len(found.suspects), 'layer')} of {len(found.points):,}"
    if not total or not math.isfinite(total):
        return [f"suspected: {which}, {listed}{more}."]
    share = sum(effects[name] ** 2 for name in found.suspects) / total
    makes = "makes" if len(found.suspects) == 1 else "make"
    return [f"{which} {makes} {share:.0%} of the error that layers add by themselves: {listed}{more}."]


def _tested(found: Parting, limit: float) -> list[str]:
    if not found.suspects:
        return []
    if found.mended is None or found.cut is None:
        return ["not tested again: the reference has no graph with these layers, to be put in their place."]
    place = "its place" if len(found.suspects) == 1 else "their place"
    return [f"{verdict(found, limit)}: nothing marked and the reference in {place}, outputs are {_off(found.mended)}; "
            f"cut there and nothing else, {_off(found.cut)}."]  # fmt: skip


def verdict(found: Parting, limit: float) -> str:
    """Whether the engine, cut around the suspects alone, confirms that they make the error; "" where there are none."""
    if found.whole is None or found.cut is None or found.mended is None:
        return "not tested" if found.suspects else ""
    whole, cut, mended = found.whole.error, found.cut.error, found.mended.error
    if whole > limit >= cut or (math.isfinite(whole) and cut < HALF * whole):
        return "vanishes when the graph is cut there"
    if mended <= limit < cut or mended < HALF * cut:
        return "confirmed"
    return "confirmed in part" if mended < MOSTLY * cut else "not confirmed"
