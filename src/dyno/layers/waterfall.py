"""Waterfall from A's latency to B's: a step per cause and per part, with intervals; it closes exactly.

A layer's time is the median over processes of its median over repeats; so is the latency. If a form's layers add up to
more than its latency, profiling slowed them, and all are scaled by one factor (`scale_layers`). The rest of the latency
is a separate step, so that all steps add up to the difference of the latencies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dyno.formatting import format_count, format_number, shorten_text
from dyno.layers import causes, pairs
from dyno.layers.causes import BETWEEN, INTERRUPTED, WAITING, WHOLE, Cause, CausePart
from dyno.layers.pairs import FormPair
from dyno.layers.tables import MODULE_NAMES, WHOLE_MODEL
from dyno.layers.times import Times
from dyno.report.style import INK, WIDTH, apply_style
from dyno.report.tables import TableKind
from dyno.results.stats import CONFIDENCE, Interval, find_rejected
from dyno.table import COUNT, PERCENT, TEXT, Column, Row, Table, limit_cells

RESAMPLES = 1000
SEED = 0
ZERO_S = 1e-12  # shorter times are rounding errors


@dataclass(frozen=True)
class WaterfallStep:
    """A difference with one cause: seconds in A and in B, and the difference with its interval. `parts` are indices of
    the waterfall's parts."""

    cause: Cause
    a: float
    b: float
    difference: Interval
    parts: tuple[int, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether the interval excludes zero."""
        return self.difference.low > 0 or self.difference.high < 0


@dataclass(frozen=True)
class Estimates:
    """Seconds of one side: index 0 is the estimate, the others are its resamples.

    `latency` is [1 + resamples]; `layers` is [1 + resamples, layers]. `watched` is the sum of the layers as measured.
    If it exceeds the latency, `layers` are scaled down by one factor, and in `watch_overhead_removed` each layer is
    reduced by the same time; otherwise both are equal. The rest of the latency has three parts. `interrupted` is the
    excess of the layers' sum in a profiled run over the sum of their medians: an interruption hits each layer in few
    runs, but some layer in every run. `waiting` is the time without a kernel on a GPU with recorded kernels. `between`
    is the remainder.
    """

    latency: np.ndarray
    layers: np.ndarray
    watch_overhead_removed: np.ndarray
    interrupted: np.ndarray
    waiting: np.ndarray
    between: np.ndarray
    watched: float

    @property
    def excess(self) -> float:
        """Seconds by which profiling visibly slowed the layers."""
        return max(0.0, self.watched - float(self.latency[0]))


@dataclass(frozen=True)
class Waterfall:
    """Steps from A to B: `steps` by part and `causes` by cause; each list adds up to `gap`.

    `left_out` has the indices of rounds disturbed by other programs.
    """

    pair: FormPair
    parts: tuple[CausePart, ...]
    a: Estimates
    b: Estimates
    left_out: tuple[int, ...] = ()

    @cached_property
    def gap(self) -> WaterfallStep:
        """Difference of the unprofiled latencies."""
        return _make_step(WHOLE, self.a.latency, self.b.latency)

    @cached_property
    def steps(self) -> list[WaterfallStep]:
        """A step per part, then `remainders`."""
        return [self.step(part.cause, (k,)) for k, part in enumerate(self.parts)] + self.remainders

    @property
    def on_gpu(self) -> bool:
        """Whether kernels of a GPU were recorded on either side."""
        return any(side.waiting.any() for side in (self.a, self.b))

    @cached_property
    def remainders(self) -> list[WaterfallStep]:
        """Steps for the latency outside the layers."""
        return [
            _make_step(INTERRUPTED, self.a.interrupted, self.b.interrupted),
            *([_make_step(WAITING, self.a.waiting, self.b.waiting)] if self.on_gpu else []),
            _make_step(BETWEEN, self.a.between, self.b.between),
        ]

    @cached_property
    def causes(self) -> list[WaterfallStep]:
        """A step per cause, in the order of CAUSES, then `remainders`."""
        return [self.step(cause, indices) for cause, indices in causes.by_cause(self.parts).items()] + self.remainders

    def step(self, cause: Cause, indices: Sequence[int]) -> WaterfallStep:
        """Return the common step of the parts with these indices.

        If profiling slowed layers, the interval covers both ways of correcting for it.
        """
        a, b = [k for p in indices for k in self.parts[p].a], [k for p in indices for k in self.parts[p].b]
        step = _make_step(cause, self.a.layers[:, a].sum(axis=1), self.b.layers[:, b].sum(axis=1), tuple(indices))
        if not self.a.excess and not self.b.excess:
            return step
        totals = (side.watch_overhead_removed[:, k].sum(axis=1) for side, k in ((self.a, a), (self.b, b)))
        corrected = _make_step(cause, *totals).difference
        low, high = min(step.difference.low, corrected.low), max(step.difference.high, corrected.high)
        return replace(step, difference=Interval(step.difference.value, low, high))

    def share(self, seconds: float) -> float:
        """Return the seconds as a share of the gap; NaN if the gap is 0."""
        gap = self.gap.difference.value
        return seconds / gap if gap else math.nan

    @property
    def named_share(self) -> float:
        """Share of the gap in named parts; above 1 if other steps have the opposite sign."""
        return self.share(sum(step.difference.value for step in self.causes if step.cause.region))

    @property
    def attributed(self) -> float:
        """Share of the gap that the named parts explain: 1 minus their absolute error, at least 0."""
        return max(0.0, 1 - abs(1 - self.named_share)) if self.named_share == self.named_share else math.nan


def make_waterfall(pair: FormPair) -> Waterfall:
    """Build the pair's steps, with intervals by percentile bootstrap (1,000 resamples).

    With one process per side its repeats are resampled; this tells nothing about other processes. With several, rounds
    are resampled, each with its process of A and of B. Rounds with a ratio of latencies rejected by `find_rejected`
    count as disturbed, and are left out.
    """
    latencies = np.array([[np.median(times.unprofiled) for times in side.processes] for side in pair.sides])
    left_out = find_rejected(np.log(latencies[1] / latencies[0]))
    rounds = [round_index for round_index in range(latencies.shape[1]) if round_index not in left_out]
    a, b = (_make_estimates([side.processes[round_index] for round_index in rounds]) for side in pair.sides)
    return Waterfall(pair, tuple(causes.split_regions(pair)), a, b, tuple(sorted(left_out)))


def _make_estimates(processes: Sequence[Times]) -> Estimates:
    rng = np.random.default_rng(SEED)  # equal seed, so that both sides draw the same rounds
    medians = np.hstack([_resample_medians(samples, rng) for samples in _list_samples(processes)])
    latency, layers, sums, busy = medians[:, 0], medians[:, 1:-2], medians[:, -2], medians[:, -1]
    watched = float(layers[0].sum())
    layers, removed = scale_layers(latency, layers), lower_layers(latency, layers)
    remainder = np.maximum(0.0, latency - layers.sum(axis=1))
    remainder[remainder < ZERO_S] = 0.0  # rounding errors of scaled layers
    interrupted = np.clip(sums - layers.sum(axis=1), 0.0, remainder)
    interrupted[interrupted < ZERO_S] = 0.0  # rounding errors
    waiting = np.clip(latency - busy, 0.0, remainder - interrupted)
    return Estimates(latency, layers, removed, interrupted, waiting, remainder - interrupted - waiting, watched)


def _list_samples(processes: Sequence[Times]) -> list[np.ndarray]:
    """Return samples with a column for the latency, each layer, the layers' sum, and the GPU's busy time.

    One process gives three arrays of repeats, resampled separately; several give one array of medians with a row each.
    """
    # Without recorded kernels no GPU waits, so its busy time is infinite.
    busy = [t.gpu.busy if t.gpu and t.gpu.busy.size else np.array([np.inf]) for t in processes]
    samples = [(t.unprofiled[:, None], np.column_stack([t.layers, t.layers.sum(axis=1)]), busy_times[:, None])
            for t, busy_times in zip(processes, busy, strict=True)]  # fmt: skip
    if len(samples) == 1:
        return [*samples[0]]
    return [np.array([np.concatenate([np.median(array, axis=0) for array in arrays]) for arrays in samples])]


def _resample_medians(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the medians of the rows and of resamples of the rows [1 + resamples, columns]."""
    count = len(samples)
    resamples = [samples] + [samples[rng.integers(count, size=count)] for _ in range(RESAMPLES)]
    return np.array([np.median(each, axis=0) for each in resamples])


def scale_layers(latency: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Return the layers' seconds [draws, layers], scaled by one factor if their sum exceeds the latency [draws]."""
    factors = np.minimum(1.0, latency / np.maximum(layers.sum(axis=1), ZERO_S))
    scaled: np.ndarray = layers * factors[:, None]
    return scaled


def lower_layers(latency: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Return the layers' seconds [draws, layers], lowered if their sum exceeds the latency [draws].

    Each layer loses the same time, but stays at 0 or more, so that the sum equals the latency. It is the projection
    onto a simplex (Duchi et al., ICML 2008, figure 1).
    """
    if not layers.size:
        return layers
    descending = -np.sort(-layers, axis=1)
    cuts = (descending.cumsum(axis=1) - latency[:, None]) / np.arange(1, layers.shape[1] + 1)
    last = np.maximum(0, (descending > cuts).sum(axis=1) - 1)
    lowered: np.ndarray = np.maximum(0.0, layers - np.maximum(0.0, np.take_along_axis(cuts, last[:, None], axis=1)))
    return lowered


def _make_step(cause: Cause, a: np.ndarray, b: np.ndarray, indices: tuple[int, ...] = ()) -> WaterfallStep:
    tail = 50 * (1 - CONFIDENCE)
    difference = b - a
    values = [float(difference[0]), *map(float, np.percentile(difference[1:], [tail, 100 - tail]))]
    # sums of floats are rarely equal
    value, low, high = (seconds if abs(seconds) >= ZERO_S else 0.0 for seconds in values)
    return WaterfallStep(cause, float(a[0]), float(b[0]), Interval(value, low, high), indices)


# Waterfall tables: a row per cause, and a row per part of the model.

WATERFALL = TableKind("waterfall", "From A to B", "The steps from the latency of A to that of B, a row for each cause.",
                      command="dyno explain")  # fmt: skip
PART_TABLE = TableKind("explained", "Part by part",
                       "Time of each part of the model in A and in B, and why it differs.",
                       command="dyno explain")  # fmt: skip


def format_signed(value: float) -> str:
    """Format a number with its sign: +310, −12.4, 0."""
    return (
        format_number(value) if not value or value != value else ("+" if value > 0 else "−") + format_number(abs(value))
    )


def _format_difference(row: Row) -> str:
    value, low, high = (row.get(name) for name in ("difference_us", "difference_us_low", "difference_us_high"))
    if value is None:
        return ""
    return (
        format_signed(value)
        if low is None or high is None
        else f"{format_signed(value)} [{format_signed(low)}, {format_signed(high)}]"
    )


TIME_COLUMNS = (
    Column("a_us", "seconds in A, in microseconds", "µs", title="A, µs"),
    Column("b_us", "seconds in B, in microseconds", "µs", title="B, µs"),
    Column("difference_us", "B less A with its 95 % interval", "µs", title="B − A, µs", cell=_format_difference),
    *(
        Column(f"difference_us_{end}", f"{end}er end of the interval", "µs", cell=lambda row: "")
        for end in ("low", "high")
    ),
    Column("share", "share of the whole difference", "%", PERCENT, title="share, %"),
)


def list_waterfall_tables(waterfall: Waterfall, top: int) -> list[Table]:
    """Build a table of causes, and one of the `top` parts (0: all) by difference with the rest in one row."""
    return [by_cause(waterfall), by_part(waterfall, top)]


def by_cause(waterfall: Waterfall) -> Table:
    """Build rows for A's latency, each cause's step and B's latency; `reached` is the latency after the step."""
    gap, (title_a, title_b) = waterfall.gap, waterfall.pair.titles
    rows: list[Row] = [{"cause": f"A: {title_a}", "a_us": 1e6 * gap.a, "reached_us": 1e6 * gap.a}]
    reached = gap.a
    for step in waterfall.causes:
        reached += step.difference.value
        parts = len(step.parts) or None
        rows.append({"cause": step.cause.title, "key": step.cause.key, "parts": parts,
                     **_make_time_cells(waterfall, step), "reached_us": 1e6 * reached})  # fmt: skip
    last_row = {"cause": f"B: {title_b}", **_make_time_cells(waterfall, gap), "reached_us": 1e6 * gap.b}
    rows.append({**last_row, "a_us": None})
    columns = (
        Column("cause", "why these parts take another time", kind=TEXT),
        Column("key", "the cause's name for programs", kind=TEXT, cell=lambda row: ""),
        Column("parts", "parts of the model with this cause", kind=COUNT, rank=2),
        *TIME_COLUMNS,
        Column("reached_us", "the latency after this step", "µs", title="latency, µs", rank=1),
    )
    return WATERFALL.build(columns, rows, notes=_write_notes(waterfall))


def _write_notes(waterfall: Waterfall) -> tuple[str, ...]:
    rounds = len(waterfall.pair.a.processes)
    process, spread = f"{rounds} processes", "processes"
    if rounds == 1:
        process, spread = "one process", "repeats within it; another process may differ"
    sides = list(zip(waterfall.pair.titles, waterfall.pair.sides, strict=True))
    notes = [f"Medians over {process} of each side; the intervals are from the {spread}.", *waterfall.pair.notes]
    notes += [f"{title} in the run: {format_number(1e3 * side.stored)} ms." for title, side in sides if side.stored]
    notes += [note for side in waterfall.pair.sides for note in waterfall.pair.forms[side.form].notes]
    notes += [f"{title}: {warning}" for title, side in sides for warning in pairs.list_pair_warnings(side)]
    return tuple(dict.fromkeys(notes))


def _make_time_cells(waterfall: Waterfall, step: WaterfallStep) -> Row:
    difference, share = (
        limit_cells("difference_us", step.difference, 1e6),
        _compute_share(waterfall, step.difference.value),
    )
    return {"a_us": 1e6 * step.a, "b_us": 1e6 * step.b, **difference, "share": share}


def _compute_share(waterfall: Waterfall, seconds: float) -> float | None:
    """Return the seconds as percent of the difference; None if no difference is proven."""
    return 100 * waterfall.share(seconds) + 0.0 if waterfall.gap.proven else None


def by_part(waterfall: Waterfall, top: int) -> Table:
    """Build rows for the `top` parts of the model (0: all), the largest differences first, and one for the rest."""
    order = sorted(range(len(waterfall.parts)), key=lambda k: -abs(waterfall.steps[k].difference.value))
    rows = [_make_row(waterfall, k) for k in order[: top or None]]
    if rest := order[len(rows) :]:
        steps = [waterfall.steps[k] for k in rest]
        a, b = sum(s.a for s in steps), sum(s.b for s in steps)
        label = format_count(len(rest), "more part")
        rows.append({"modules": label, "modules_names": [label], "a_us": 1e6 * a, "b_us": 1e6 * b,
                     "difference_us": 1e6 * (b - a), "share": _compute_share(waterfall, b - a)})  # fmt: skip
    columns = (
        Column("modules", "the model's own modules, else nodes or layers", kind=TEXT, cell=MODULE_NAMES),
        Column("cause", "why it takes another time", kind=TEXT),
        *(Column(f"layers_{side}", f"kinds of its layers in {side.upper()}, and the type that they compute in",
                 kind=TEXT, title=f"in {side.upper()}", rank=2) for side in "ab"),
        *TIME_COLUMNS,
        Column("kernels_a", "kernels or providers in A", kind=TEXT, title="kernel in A", rank=4),
        Column("kernels_b", "kernels or providers in B", kind=TEXT, title="kernel in B", rank=3),
    )  # fmt: skip
    return PART_TABLE.build(columns, rows)


MAX_KINDS_LENGTH = 32  # characters of the kinds of layers after "(model)"


def _make_row(waterfall: Waterfall, k: int) -> Row:
    part, step = waterfall.parts[k], waterfall.steps[k]
    row: Row = {"modules": " ".join(part.names), "modules_names": list(part.names), "cause": part.cause.title}
    if part.before:
        row["modules_names"] = [f"{part.names[0]} before {part.before}"]
    elif part.names == (WHOLE_MODEL,):  # several parts may share this name
        indices = part.a or part.b
        form = waterfall.pair.forms[waterfall.pair.sides[0 if part.a else 1].form]
        row["modules_names"] = [
            f"{WHOLE_MODEL}: {shorten_text(_format_counts([form.layers[i].type for i in indices]), MAX_KINDS_LENGTH)}"
        ]
    for name, side, indices, dtype in zip("ab", waterfall.pair.sides, (part.a, part.b), part.types, strict=True):
        layers = [waterfall.pair.forms[side.form].layers[i] for i in indices]
        row[f"layers_{name}"] = " ".join(filter(None, (_format_counts([layer.type for layer in layers]), dtype)))
        row[f"kernels_{name}"] = _format_counts([layer.tactic for layer in layers if layer.tactic])
    return row | _make_time_cells(waterfall, step)


def _format_counts(names: Sequence[str]) -> str:
    """Format the names with their counts: `2 Mul, Conv`."""
    counts = Counter(names).items()
    return ", ".join(f"{f'{n} ' if n > 1 else ''}{name.rpartition('.')[2]}" for name, n in counts)


# Waterfall chart: both latencies, and a bar per cause between them.

ROW_HEIGHT, MARGIN_HEIGHT = 0.34, 0.9  # inches per bar, and above and below the bars
MAX_NAME_LENGTH = 52  # characters of a name on the axis
# colours of shorter, longer, and outside the layers
SHORTER_COLOUR, LONGER_COLOUR, REST_COLOUR = "#009E73", "#D55E00", "#8A8A8A"


def draw_waterfall(waterfall: Waterfall) -> Any:
    """Draw a matplotlib Figure: microseconds from A's latency (above) to B's, green where B takes less.

    Hatched steps aren't layers of the model; whiskers are the 95 % intervals of each step's difference.
    """
    steps = [step for step in waterfall.causes if step.a or step.b]
    with apply_style() as figure_class:
        figure = figure_class((WIDTH, ROW_HEIGHT * (len(steps) + 2) + MARGIN_HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        a, b = waterfall.pair.titles
        names = [f"A: {a}", *(step.cause.title for step in steps), f"B: {b}"]
        texts = [_draw_whole(axes, 0, waterfall.gap.a)]
        reached = 1e6 * waterfall.gap.a
        corners = [reached]
        for y, step in enumerate(steps, 1):
            value = 1e6 * step.difference.value
            color = REST_COLOUR if not step.cause.region else SHORTER_COLOUR if value < 0 else LONGER_COLOUR
            hatch = "" if step.cause.region else "//"
            axes.barh(y, value, 0.66, left=reached, color=color, hatch=hatch, edgecolor="white", linewidth=0)
            limits = [reached + 1e6 * end for end in (step.difference.low, step.difference.high)]
            axes.plot(limits, [y, y], color=INK, lw=1.1, marker="|", ms=5)
            axes.plot([reached, reached], [y - 1, y], color=INK, lw=0.6)
            texts.append(format_signed(value))
            reached += value
            corners.append(reached)
        axes.plot([reached, reached], [len(steps), len(steps) + 1], color=INK, lw=0.6)
        texts.append(_draw_whole(axes, len(steps) + 1, waterfall.gap.b))
        axes.set_yticks(range(len(names)), [shorten_text(name, MAX_NAME_LENGTH) for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_xlim(min(0.0, *corners), 1.02 * max(corners))  # a wide interval must not squeeze the bars
        for y, text in enumerate(texts):
            axes.text(1.015, y, text, transform=axes.get_yaxis_transform(), va="center", fontweight="bold")
        axes.set_xlabel("latency, µs")
    return figure


def _draw_whole(axes: Any, y: float, seconds: float) -> str:
    axes.barh(y, 1e6 * seconds, 0.66, color=INK)
    return format_signed(1e6 * seconds).removeprefix("+")
