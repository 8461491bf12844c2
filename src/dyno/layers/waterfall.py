"""From the latency of A to that of B in steps, a step for each cause and each part, with intervals; it closes exactly.

A layer's time is the median over processes of its median over repeats, as is the latency. Where a form's layers add up
to more than its latency, watching slowed them, and all are scaled down alike (`scaled`); what they leave of it is a
step of its own. So all steps add up to the difference of the latencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dyno.layers import causes
from dyno.layers.causes import BETWEEN, INTERRUPTED, WAITING, WHOLE, Cause, CausePart
from dyno.layers.pairs import FormPair, PairSide
from dyno.layers.times import Times
from dyno.results.stats import CONFIDENCE, Interval

RESAMPLES = 1000
SEED = 0
HALVINGS = 40  # of what is taken off each layer: to a trillionth of the slowest
TINY = 1e-12  # seconds that are none


@dataclass(frozen=True)
class WaterfallStep:
    """Seconds in A and in B of what has one cause, and the difference with its interval; `parts` are its places in the
    waterfall's parts."""

    cause: Cause
    a: float
    b: float
    difference: Interval
    parts: tuple[int, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.difference.low > 0 or self.difference.high < 0


@dataclass(frozen=True)
class Estimates:
    """Seconds of one side, first the estimate and behind it resamples of it [1 + resamples]: of the latency, of each
    layer [1 + resamples, layers], and of what the layers leave of the latency.

    `watched` is what the layers add up to by themselves. Where that is more than the latency, `layers` are scaled down
    alike, and of `even` the same was taken off each; else both are the same.
    `interrupted` is by how much the layers of a watched run take longer together than their medians add up to: an
    interruption hits any layer, each in few runs, and some layer in every run. `waiting` is what is left of the
    latency in which a GPU, whose kernels were seen, ran none. `between` is the rest.
    """

    latency: np.ndarray
    layers: np.ndarray
    even: np.ndarray
    interrupted: np.ndarray
    waiting: np.ndarray
    between: np.ndarray
    watched: float

    @property
    def excess(self) -> float:
        """Seconds by which watching slowed the layers, as far as it shows."""
        return max(0.0, self.watched - float(self.latency[0]))


@dataclass(frozen=True)
class Waterfall:
    """The steps from A to B: `steps` has one for each part, `causes` one for each cause; both add up to `gap`."""

    pair: FormPair
    parts: tuple[CausePart, ...]
    a: Estimates
    b: Estimates

    @cached_property
    def gap(self) -> WaterfallStep:
        """The whole: the latencies with nothing switched on."""
        return _make_step(WHOLE, self.a.latency, self.b.latency)

    @cached_property
    def steps(self) -> list[WaterfallStep]:
        """A step for each part, then `remainders`."""
        return [self.step(part.cause, (k,)) for k, part in enumerate(self.parts)] + self.remainders

    @property
    def on_gpu(self) -> bool:
        """Whether the kernels of a GPU were seen on either side."""
        return any(each.waiting.any() for each in (self.a, self.b))

    @cached_property
    def remainders(self) -> list[WaterfallStep]:
        """What the layers leave of the latency."""
        return [
            _make_step(INTERRUPTED, self.a.interrupted, self.b.interrupted),
            *([_make_step(WAITING, self.a.waiting, self.b.waiting)] if self.on_gpu else []),
            _make_step(BETWEEN, self.a.between, self.b.between),
        ]

    @cached_property
    def causes(self) -> list[WaterfallStep]:
        """A step for each cause, in the order of CAUSES, then `remainders`."""
        return [self.step(cause, own) for cause, own in causes.by_cause(self.parts).items()] + self.remainders

    def step(self, cause: Cause, places: Sequence[int]) -> WaterfallStep:
        """Return the step of these parts together.

        Where watching slowed layers, the interval covers both ways of correcting for it.
        """
        a, b = [k for p in places for k in self.parts[p].a], [k for p in places for k in self.parts[p].b]
        step = _make_step(cause, self.a.layers[:, a].sum(axis=1), self.b.layers[:, b].sum(axis=1), tuple(places))
        if not self.a.excess and not self.b.excess:
            return step
        even = _make_step(cause, self.a.even[:, a].sum(axis=1), self.b.even[:, b].sum(axis=1)).difference
        low, high = min(step.difference.low, even.low), max(step.difference.high, even.high)
        return replace(step, difference=Interval(step.difference.value, low, high))

    def share(self, seconds: float) -> float:
        """Return the difference as a share of the gap; NaN where the gap is 0."""
        whole = self.gap.difference.value
        return seconds / whole if whole else math.nan

    @property
    def named(self) -> float:
        """The share of the gap that is in named parts; more than 1 where other steps go the other way."""
        return self.share(sum(step.difference.value for step in self.causes if step.cause.region))

    @property
    def attributed(self) -> float:
        """How much of the gap the named parts explain: all but what they miss it by."""
        return max(0.0, 1 - abs(1 - self.named)) if self.named == self.named else math.nan


def make_waterfall(pair: FormPair) -> Waterfall:
    """Build the pair's steps, with intervals by percentile bootstrap (1,000 resamples).

    With one process a side its repeats are resampled, which tells nothing about another process; with several the
    processes are resampled.
    """
    rng = np.random.default_rng(SEED)
    return Waterfall(pair, tuple(causes.parts(pair)), *(_make_estimates(side, rng) for side in pair.sides))


def _make_estimates(side: PairSide, rng: np.random.Generator) -> Estimates:
    latency, layers, (sums, working) = (_resample_repeats if len(side.processes) == 1 else _resample_processes)(
        side.processes, rng
    )
    watched = float(layers[0].sum())
    layers, even = scaled(latency, layers), lowered(latency, layers)
    left = np.maximum(0.0, latency - layers.sum(axis=1))
    left[left < TINY] = 0.0  # rounding, where the layers were scaled down
    interrupted = np.clip(sums - layers.sum(axis=1), 0.0, left)
    interrupted[interrupted < TINY] = 0.0  # what rounding leaves
    waiting = np.clip(latency - working, 0.0, left - interrupted)
    return Estimates(latency, layers, even, interrupted, waiting, left - interrupted - waiting, watched)


Resample = tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]


def _resample_repeats(processes: Sequence[Times], rng: np.random.Generator) -> Resample:
    """Return the medians over the repeats of one process, and over resamples of these.

    They are of the latency, of the layers, then of the layers' sum and the time in which a GPU worked.
    """
    (times,) = processes
    latency = _resample_medians(times.unprofiled[:, None], rng)[:, 0]
    both = _resample_medians(np.column_stack([times.layers, times.layers.sum(axis=1)]), rng)
    working = _resample_medians(_find_busy_seconds(times)[:, None], rng)[:, 0]
    return latency, both[:, :-1], (both[:, -1], working)


def _resample_processes(processes: Sequence[Times], rng: np.random.Generator) -> Resample:
    """Return the medians over processes, and over resamples of these, as `_resample_repeats` does over repeats."""
    found = np.array([
        [np.median(each.unprofiled), *np.median(each.layers, axis=0), np.median(each.layers.sum(axis=1)),
         np.median(_find_busy_seconds(each))]
        for each in processes
    ])  # fmt: skip
    medians = _resample_medians(found, rng)
    return medians[:, 0], medians[:, 1:-2], (medians[:, -2], medians[:, -1])


def _find_busy_seconds(times: Times) -> np.ndarray:
    """Return the seconds of a watched run in which a GPU ran kernels; infinite where none were seen: no GPU waits."""
    return times.gpu.busy if times.gpu and times.gpu.busy.size else np.array([np.inf])


def _resample_medians(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the medians of the rows, and of resamples of the rows [1 + resamples, columns]."""
    count = len(samples)
    drawn = [samples] + [samples[rng.integers(count, size=count)] for _ in range(RESAMPLES)]
    return np.array([np.median(each, axis=0) for each in drawn])


def scaled(latency: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Return the layers' seconds [draws, layers], scaled by one factor where their sum exceeds the latency [draws]."""
    factors = np.minimum(1.0, latency / np.maximum(layers.sum(axis=1), TINY))
    found: np.ndarray = layers * factors[:, None]
    return found


def lowered(latency: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Return the layers' seconds [draws, layers], lowered where their sum exceeds the latency [draws].

    The same time is taken off each layer, enough for them to add up to the latency; no layer falls below 0.
    """
    low, high = np.zeros(len(layers)), layers.max(axis=1, initial=0.0)
    if (layers.sum(axis=1) <= latency).all():
        return layers
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        more = np.maximum(0.0, layers - middle[:, None]).sum(axis=1) > latency
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    each = np.where(layers.sum(axis=1) > latency, high, 0.0)
    found: np.ndarray = np.maximum(0.0, layers - each[:, None])
    return found


def _make_step(cause: Cause, a: np.ndarray, b: np.ndarray, places: tuple[int, ...] = ()) -> WaterfallStep:
    tail = 50 * (1 - CONFIDENCE)
    apart = b - a
    ends = [float(apart[0]), *map(float, np.percentile(apart[1:], [tail, 100 - tail]))]
    value, low, high = (seconds if abs(seconds) >= TINY else 0.0 for seconds in ends)  # sums of floats are never equal
    return WaterfallStep(cause, float(a[0]), float(b[0]), Interval(value, low, high), places)
