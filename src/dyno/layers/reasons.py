"""Sentences on why B is faster or slower than A, each with its evidence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dyno.formatting import format_count, show
from dyno.layers import causes
from dyno.layers.causes import CausePart
from dyno.layers.waterfall import Waterfall, WaterfallStep

GAP, NO_COMMON_LAYERS, ALONE, ATTRIBUTED = "gap", "strangers", "alone", "attributed"
WATCHED, NOT_FASTER = "watched", "not_faster"
MIN_MENTIONED_SHARE = 0.05  # smaller shares of the gap (or of the latency if there is no gap) aren't mentioned
MIN_PART_SHARE = 0.1  # share of the gap that makes a single part worth mentioning
MAX_NAMES = 3  # names in a sentence
ZERO_S, ZERO_SHARE = 1e-9, 5e-4  # times and shares that round to zero
VERSION = re.compile(r" \d+(\.\d+)+\S*")


@dataclass(frozen=True)
class Reason:
    """A sentence of an explanation.

    `key` is its cause's key, or one of GAP, ALONE and the like; `names` are parts of the model; `seconds` is the
    difference that it explains, with its interval `low` to `high` (None: no difference).
    """

    key: str
    text: str
    names: tuple[str, ...] = ()
    seconds: float | None = None
    low: float | None = None
    high: float | None = None


def list_reasons_why(waterfall: Waterfall) -> list[Reason]:
    """Return sentences on the difference, on its causes (largest first), and on the share they explain.

    Causes are left out if their interval contains 0, or if they are under 5 % of the difference (of A's latency if no
    difference is proven).
    """
    writer = _ReasonWriter(waterfall)
    return [
        writer.state_gap(), *writer.find_strangers(), *writer.explain_causes(), *writer.explain_largest(),
        *writer.explain_types(), *writer.sum_attributed(), *writer.state_excess(),
    ]  # fmt: skip


class _ReasonWriter:
    """Writer of a waterfall's sentences."""

    def __init__(self, waterfall: Waterfall) -> None:
        self._waterfall, self._gap = waterfall, waterfall.gap
        names = [VERSION.sub("", title) for title in waterfall.pair.titles]
        # names without versions if they differ
        self._a, self._b = names if names[0] != names[1] else waterfall.pair.titles
        scale = abs(self._gap.difference.value) if self._gap.proven else self._gap.a
        self._min_mentioned, self._min_part = MIN_MENTIONED_SHARE * scale, MIN_PART_SHARE * scale

    def state_gap(self) -> Reason:
        times = f"{self._b} takes {_format_seconds(self._gap.b)}, {self._a} {_format_seconds(self._gap.a)}"
        if self._gap.proven:
            change = "less" if self._gap.difference.value < 0 else "more"
            text = f"{times}: {_format_seconds(abs(self._gap.difference.value))} {change} {_format_limits(self._gap)}."
        else:
            text = f"{times}: no difference is shown, the interval {_format_limits(self._gap)} holds 0."
        if left_out := len(self._waterfall.left_out):
            rounds = len(self._waterfall.pair.a.processes)
            text += f" {left_out} of {rounds} rounds left out: other programs disturbed them."
        return _make_reason(GAP, text, self._gap)

    def find_strangers(self) -> Iterator[Reason]:
        """Yield a reason if the two have no common layer, so that the causes below compare nothing."""
        parts = self._waterfall.parts
        if any(part.a and part.b for part in parts) or not any(part.a for part in parts):
            return
        text = f"No layer of {self._b} corresponds to one of {self._a}, so the networks may differ"
        yield Reason(NO_COMMON_LAYERS, f"{text}: only the latencies can be compared.")

    def explain_causes(self) -> Iterator[Reason]:
        """Yield the causes that are proven and large enough, the largest first."""
        large_steps = [s for s in self._waterfall.causes if s.proven and abs(s.difference.value) >= self._min_mentioned]
        for step in sorted(large_steps, key=lambda s: -abs(s.difference.value)):
            text = f"{self._describe_step(step)}: {self._describe_amount(step)}."
            yield _make_reason(step.cause.key, text, step, self._list_names(step))

    def explain_largest(self) -> Iterator[Reason]:
        """Yield the part with the largest difference, if it is a large share of the whole."""
        steps = [s for s in self._waterfall.steps if s.parts and s.cause.region and s.proven]
        largest = max(steps, key=lambda s: abs(s.difference.value), default=None)
        if largest is None or abs(largest.difference.value) < self._min_part or len(steps) < 2:
            return
        part = self._waterfall.parts[largest.parts[0]]
        share = f", {largest.a / self._gap.a:.0%} of {self._a}'s latency" if largest.a > largest.b else ""
        part_name = f"the conversion before {part.before} ({part.names[0]})" if part.before else _join_names(part.names)
        text = f"The largest part is {part_name}: {_format_seconds(largest.a)} in {self._a}{share}, "
        yield _make_reason(ALONE, f"{text}{_format_seconds(largest.b)} in {self._b}.", largest, part.names)

    def explain_types(self) -> Iterator[Reason]:
        """Yield why a narrower type isn't faster: layers that kept a wider type, or became slower."""
        precision = self._waterfall.pair.b.precision
        stayed_steps = [s for s in self._waterfall.steps if s.cause == causes.STAYED]
        if stayed_steps and sum(s.b for s in stayed_steps) >= MIN_MENTIONED_SHARE * self._gap.b:
            parts = [self._waterfall.parts[s.parts[0]] for s in sorted(stayed_steps, key=lambda s: -s.b)]
            names = tuple(name for part in parts for name in part.names[:1])
            time = _format_seconds(sum(s.b for s in stayed_steps))
            layer_count = format_count(len(stayed_steps), "layer")
            text = f"{precision} was requested, but {layer_count} computed in a wider type and took "
            yield Reason(NOT_FASTER, f"{text}{time} of {_format_seconds(self._gap.b)}: {_join_names(names)}.", names)
        losses = [s for s in self._waterfall.steps if s.cause == causes.NARROWER and s.difference.low > 0]
        total = self._waterfall.step(causes.NARROWER, [k for s in losses for k in s.parts])
        if losses and total.proven and total.difference.value >= self._min_mentioned:
            names = self._list_names(total)
            text = (
                f"{format_count(len(losses), 'layer')} took longer in the narrower type: {self._describe_amount(total)}"
            )
            yield _make_reason(NOT_FASTER, f"{text}, most of it in {_join_names(names[:1])}.", total, names)

    def sum_attributed(self) -> Iterator[Reason]:
        if not self._gap.proven:
            return
        extra = " and launch gaps" if self._waterfall.on_gpu else ""
        text = f"Attributed to named layers{extra}: {_format_percent(self._waterfall.attributed)} of the difference"
        if abs(self._waterfall.attributed - self._waterfall.named_share) >= ZERO_SHARE:
            text += f", since together they differ by {_format_percent(self._waterfall.named_share)} of it"
        shares = {s.cause.title: self._waterfall.share(s.difference.value) for s in self._waterfall.causes
                  if not s.cause.region}  # fmt: skip
        rest = [f"{title}: {_format_percent(share)}" for title, share in shares.items()]
        yield Reason(ATTRIBUTED, "; ".join([text, *rest]) + ".")

    def state_excess(self) -> Iterator[Reason]:
        """Yield each side's slow-down of layers by profiling, if it is considerable."""
        for title, side in zip((self._a, self._b), (self._waterfall.a, self._waterfall.b), strict=True):
            if side.excess >= MIN_MENTIONED_SHARE * side.latency[0]:
                share_text = f"took {side.excess / side.latency[0]:.0%} longer than its latency"
                text = f"Watched, the layers of {title} {share_text}: they are scaled down alike, and the intervals "
                text += "include the other extreme."
                yield Reason(WATCHED, text, seconds=side.excess)

    def _describe_amount(self, step: WaterfallStep) -> str:
        value = step.difference.value
        text = f"{_format_signed(value)} {_format_limits(step)}"
        if not self._gap.proven:
            return text
        share = self._waterfall.share(value)
        return f"{text}, {share:.0%} of the difference" if share > 0 else f"{text}, against the difference"

    def _describe_step(self, step: WaterfallStep) -> str:
        parts = [self._waterfall.parts[k] for k in step.parts]
        count_a, count_b = sum(len(part.a) for part in parts), sum(len(part.b) for part in parts)
        types_a, types_b = self._format_types(parts, 0), self._format_types(parts, 1)
        count, a, b = format_count(len(parts), "part"), self._a, self._b
        is_single = len(parts) == 1
        do, run, have, take = ("does", "runs", "has", "takes") if is_single else ("do", "run", "have", "take")
        verb_a = "is" if count_a == 1 else "are"
        times = f"{_format_seconds(step.a)} in {a} and {_format_seconds(step.b)} in {b}"
        predicate_b = "has no separate counterpart" if count_b == 1 else "have no separate counterparts"
        before = next((self._waterfall.parts[k].before for k in self._sort_parts(step)), "")
        reader_text = f", the longest before {before}" if before else ""
        precision = self._waterfall.pair.b.precision
        texts = {
            causes.NARROWER: f"{count} of the model {run} in a narrower type in {b} ({self._format_kinds(parts)})",
            causes.WIDER: f"{count} of the model {run} in a wider type in {b} ({self._format_kinds(parts)})",
            causes.STAYED: f"{count} of the model {do} not run in {precision} in {b} ({types_b})",
            causes.PROVIDER: f"{count} of the model {run} on another provider in {b} ({types_b})",
            causes.KERNEL: f"{count} of the model {have} another kernel: {types_a} in {a}, {types_b} in {b}",
            causes.SAME: f"{count} of the model {take} another time with the same kernel ({types_b})",
            causes.FUSED: f"{format_count(count_a, 'layer')} of {a} {verb_a} fused or left out in {b} ({types_a})",
            causes.SPLIT: f"{format_count(count_b, 'layer')} of {b} {predicate_b} in {a} ({types_b})",
            causes.CONVERSION: f"Conversions of types and layouts, {count_a} in {a} and {count_b} in {b}{reader_text}",
            causes.CALLS: f"The model's own code and calling its parts, {times}",
            causes.UNALIGNED: f"{count_a} layers of {a} and {count_b} of {b}, whose counterparts are not known",
            causes.INTERRUPTED: f"Interruptions by other programs, {times}; measure again when the machine is quiet",
            causes.WAITING: f"Launch gaps, in which the GPU ran no kernel and waited for the host, {times}; "
            "CUDA graphs or a larger batch shorten them",
            causes.BETWEEN: f"Time outside the layers, {times}",
        }
        return texts[step.cause]

    def _sort_parts(self, step: WaterfallStep) -> list[int]:
        return sorted(step.parts, key=lambda k: -abs(self._waterfall.steps[k].difference.value))

    def _format_types(self, parts: Sequence[CausePart], side_index: int) -> str:
        """Format the most common types of layers: `16 Convolution, 3 Add`."""
        layers = self._waterfall.pair.forms[self._waterfall.pair.sides[side_index].form].layers
        kinds = Counter(layers[k].type.rpartition(".")[2] for part in parts for k in (part.a, part.b)[side_index])
        suffix = f" and {format_count(len(kinds) - MAX_NAMES, 'more kind')}" if len(kinds) > MAX_NAMES else ""
        return ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(MAX_NAMES)) + suffix

    def _format_kinds(self, parts: Sequence[CausePart]) -> str:
        """Format the most common compute types of the parts in A and in B."""
        kinds = Counter(part.types for part in parts)
        before, after = max(kinds, key=lambda types: kinds[types], default=("", ""))
        return f"{before} in {self._a}, {after} in {self._b}"

    def _list_names(self, step: WaterfallStep) -> tuple[str, ...]:
        """Return a name for each part of the step, the largest difference first."""
        return tuple(dict.fromkeys(name for k in self._sort_parts(step) for name in self._waterfall.parts[k].names[:1]))


def _make_reason(key: str, text: str, step: WaterfallStep, names: Sequence[str] = ()) -> Reason:
    return Reason(key, text[0].upper() + text[1:], tuple(names), *vars(step.difference).values())


def _join_names(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + suffix


def _format_percent(share: float) -> str:
    """Format a share of the difference as percent; 0 has no sign."""
    return f"{share if abs(share) >= ZERO_SHARE else 0.0:.1%}"


def _format_seconds(seconds: float) -> str:
    return show(seconds, "duration") if abs(seconds) >= ZERO_S else "0 µs"


def _format_signed(seconds: float) -> str:
    return ("" if abs(seconds) < ZERO_S else "+" if seconds > 0 else "−") + _format_seconds(abs(seconds))


def _format_limits(step: WaterfallStep) -> str:
    return f"[{_format_signed(step.difference.low)}, {_format_signed(step.difference.high)}]"
