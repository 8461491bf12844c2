"""What the layer errors of an engine say, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from dyno.analysis.formatting import counting, significant
from dyno.worker.facts.job import Difference, LayerError, LayerErrors

FEW = 0.5  # of the reference's layers: where fewer are compared a sentence says so
HALF, MOSTLY = 0.5, 0.8  # of what it was: an error that falls below the first has fallen, below the second in part
NOTEWORTHY = 0.1  # of the error that is left: a layer that does less to the outputs isn't worth a sentence
NAMED = 4  # suspects that a sentence names
Labels = Mapping[str, str]  # the layer's name of each tensor


def first_divergence(layers: Sequence[LayerError], limit: float) -> LayerError | None:
    """Return the first layer, in the graph's order, whose output error exceeds the limit; None without one."""
    return next((layer for layer in layers if not layer.total.error <= limit), None)


def label(tensor: str, labels: Labels) -> str:
    """Return the layer that writes the tensor, else the tensor's own name."""
    return labels.get(tensor, tensor)


def layers_of(tensors: Iterable[str], labels: Labels) -> list[str]:
    """Return the layers that write the tensors, in order; one with several outputs is one layer."""
    return [*dict.fromkeys(label(tensor, labels) for tensor in tensors)]


def of(result: LayerErrors, limit: float, precision: str, labels: Labels) -> list[str]:
    """Describe whether outputs agree, where they diverge first, which layers cause it, and whether a test confirms it.

    The test runs the engine without marked outputs.
    """
    return [
        _describe_outputs(result, limit, precision, labels),
        *_describe_few(result),
        *_describe_mismatched(result),
        *_not_finite(result.layers, labels),
        *_describe_first(result, limit, labels),
        *_describe_border(result, labels),
        *_describe_suspects(result, labels),
        *_describe_retest(result, limit, labels),
    ]


def _describe_outputs(result: LayerErrors, limit: float, precision: str, labels: Labels) -> str:
    compared = layers_of((layer.tensor for layer in result.layers), labels)
    runs, layers = counting(result.runs, "run"), counting(len(compared), "layer")
    parts = f", marked in {result.parts} parts" if result.parts > 1 else ""
    agrees = "agree" if result.unmodified is not None and result.unmodified.error <= limit else "disagree"
    size = _describe_difference(result.unmodified)
    return f"outputs {agrees}: {size} ({precision} agrees up to {limit:g}); {runs}, {layers} compared{parts}."


def _describe_few(result: LayerErrors) -> list[str]:
    found, theirs = len(result.layers), result.reference_layers
    if found >= FEW * theirs:
        return []
    have = "has" if found == 1 else "have"
    return [f"only {found:,} of the reference's {counting(theirs, 'tensor')} {have} a counterpart; what lies between "
            "two of them counts as the later one's own."]  # fmt: skip


def _describe_mismatched(result: LayerErrors) -> list[str]:
    if not result.mismatched:
        return []
    differ, them = ("it differs", "it") if result.mismatched == 1 else ("they differ", "them")
    return [f"{counting(result.mismatched, 'tensor')} left out: {differ} from the reference, but what reads {them} is "
            "right, so the reference has something else there."]  # fmt: skip


def _describe_difference(difference: Difference | None) -> str:
    if difference is None:
        return "of another shape"
    return (
        f"off by {_format_error(difference.error)} of their size" if math.isfinite(difference.error) else "not finite"
    )


def _format_error(error: float) -> str:
    return significant(error, 2) if math.isfinite(error) else "infinite"


def _not_finite(layers: Sequence[LayerError], labels: Labels) -> list[str]:
    lines = []
    theirs = next((layer for layer in layers if layer.total.reference_nonfinite), None)
    if theirs is not None:
        count = f"{theirs.total.reference_nonfinite:,} values"
        lines.append(f"the reference itself has NaN or infinity from {label(theirs.tensor, labels)} on: {count}.")
    own = next((layer for layer in layers if layer.total.nonfinite), None)
    if own is not None:
        made = "on the reference's values too" if own.own.nonfinite else "but not on the reference's values"
        lines.append(f"first layer with NaN or infinity: {label(own.tensor, labels)}, {own.total.nonfinite:,} values, "
                     f"{made}.")  # fmt: skip
    return lines


def _describe_first(result: LayerErrors, limit: float, labels: Labels) -> list[str]:
    first = first_divergence(result.layers, limit)
    agrees = result.unmodified is not None and result.unmodified.error <= limit
    if first is None:
        return [] if agrees else ["with the layers' outputs marked, every layer agrees."]
    before = max((layer.total.error for layer in result.layers if layer.tensor in first.reads), default=0.0)
    own = first.own.error
    made = not math.isfinite(own) or own > HALF * first.total.error
    whose = "made here" if made else "added up over the layers before"
    far = f"off by {_format_error(first.total.error)}" if math.isfinite(first.total.error) else "not finite"
    line = (f"first layer that disagrees: {label(first.tensor, labels)}, {far}; its own error is {_format_error(own)}, "
            f"that of its inputs {_format_error(before)}: {whose}.")  # fmt: skip
    return [line, *(["the outputs of the unmodified engine agree all the same."] if agrees else [])]


def _describe_border(result: LayerErrors, labels: Labels) -> list[str]:
    if not result.boundary:
        return []
    before, after = result.boundary
    good = f"the one that ends at {label(before, labels)} agrees" if before else "even the first layer's disagrees"
    bad = f"the one that ends at {label(after, labels)} doesn't" if after else "the whole network's doesn't"
    return ["the error vanishes when tensors are marked. Of graphs that end at a layer, with nothing else marked, "
            f"{good}, {bad}: look at what is fused there."]  # fmt: skip


def _describe_suspects(result: LayerErrors, labels: Labels) -> list[str]:
    if not result.suspects:
        return []
    effects = {layer.tensor: layer.effect or 0.0 for layer in result.layers}
    total = sum(effect**2 for effect in effects.values())
    suspects, every = layers_of(result.suspects, labels), layers_of(effects, labels)
    listed = ", ".join(suspects[:NAMED])
    more = f" and {len(suspects) - NAMED} more" if len(suspects) > NAMED else ""
    which = f"{counting(len(suspects), 'layer')} of {len(every):,}"
    if not total or not math.isfinite(total):
        return [f"suspected: {which}, {listed}{more}."]
    share = sum(effects[name] ** 2 for name in result.suspects) / total
    makes = "makes" if len(suspects) == 1 else "make"
    return [f"{which} {makes} {share:.0%} of the error that layers add by themselves: {listed}{more}."]


def _describe_retest(result: LayerErrors, limit: float, labels: Labels) -> list[str]:
    if not result.suspects:
        return []
    if result.substituted is None or result.cut is None:
        return ["not tested again: the reference has no graph with these layers, to be put in their place."]
    place = "its place" if len(layers_of(result.suspects, labels)) == 1 else "their place"
    line = (f"{verdict(result, limit)}: with no tensor marked and the reference in {place}, the outputs are "
            f"{_describe_difference(result.substituted)}; with the graph only cut there, "
            f"{_describe_difference(result.cut)}.")  # fmt: skip
    return [line, *_describe_rest(result, limit, labels)]


def _describe_rest(result: LayerErrors, limit: float, labels: Labels) -> list[str]:
    """Name the other layer that makes most of the remaining error, where outputs disagree even without the suspects."""
    others = [layer for layer in result.layers if layer.tensor not in result.suspects and layer.effect is not None]
    most = max(others, key=lambda layer: layer.effect or 0.0, default=None)
    left = result.substituted.error if result.substituted else 0.0
    if most is None or not limit < left < math.inf or not (most.effect or 0.0) >= NOTEWORTHY * left:
        return []
    return [f"the outputs disagree even then: of the other layers, {label(most.tensor, labels)} does most to them, "
            f"{_format_error(most.effect or 0.0)} of their size."]  # fmt: skip


def verdict(result: LayerErrors, limit: float) -> str:
    """Return whether the engine, cut around the suspects alone, confirms them as the cause; "" where there are none."""
    if result.unmodified is None or result.cut is None or result.substituted is None:
        return "not tested" if result.suspects else ""
    unmodified, cut, substituted = result.unmodified.error, result.cut.error, result.substituted.error
    if cut <= limit if math.isinf(unmodified) else _is_gone(unmodified, cut, limit):
        return "vanishes when the graph is cut there"
    if _is_gone(cut, substituted, limit):
        return "confirmed"
    return "confirmed in part" if substituted < MOSTLY * cut else "not confirmed"


def _is_gone(before: float, after: float, limit: float) -> bool:
    """Return whether an error is more than halved, or now within the limit by more than a hair's breadth."""
    return after < HALF * before or (after <= limit < before and after < MOSTLY * before)
