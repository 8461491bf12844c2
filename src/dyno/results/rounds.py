"""One round of a trial: its record in the run folder, and the arrays stored with it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from dyno.results import timeline
from dyno.results.files import NUMERIC_KINDS, read_answers, read_npz
from dyno.worker.facts.job import Facts
from dyno.worker.jobs.turns import find_disturbed
from dyno.worker.record import Measurement, Record

LATENCIES = ("model", "all")
LOADING_STEPS = ("import", "load", "first_call", "build")  # steps that parallel loading slows down
HOST, GPU = "host", "gpu"
ANY_LATENCY = (0.0, float("inf"))  # range of core-to-core latencies, ns


@dataclass
class Round:
    """One process that ran a trial: its record, and arrays that are read on first use.

    `loaded` holds samples that were read with the record.
    """

    folder: Path
    round_index: int
    record: Record
    device: str = "cpu"
    loaded: dict[str, np.ndarray] | None = field(default=None, repr=False, compare=False)
    _medians: dict[tuple[str, str], float | None] = field(default_factory=dict)
    _block_medians: dict[tuple[str, str, str, bool], Mapping[int, float]] = field(default_factory=dict)

    @property
    def status(self) -> str:
        return self.record.status

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def facts(self) -> Facts:
        return self.record.facts

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.record.warnings

    def find_measurement(self, tag: str, boundary: str = "", clock: str = "") -> Measurement | None:
        """Return the measurement with that tag and boundary, or None; without a `clock`, the GPU's is preferred."""
        by_host: Measurement | None = None
        for m in self.record.measurements:
            if m.tag == tag and m.boundary == boundary and clock in ("", m.clock or HOST):
                if m.clock == GPU:
                    return m
                by_host = by_host or m
        return by_host

    def value(self, tag: str, boundary: str = "") -> float | None:
        """Return the single value measured under this tag and boundary (SI units), or None.

        Loading times of jobs that loaded in parallel are None.
        """
        if tag in LOADING_STEPS and self.facts.turns and self.facts.turns.together > 1:
            return None
        measurement = self.find_measurement(tag, boundary)
        value = math.nan if measurement is None or measurement.value is None else float(measurement.value)
        return value if math.isfinite(value) else None

    def raw_samples(self, tag: str, boundary: str, clock: str = "") -> np.ndarray:
        """Return all samples (seconds for a latency, images/s for throughput) as float64; empty if not measured."""
        measurement = self.find_measurement(tag, boundary, clock)
        if measurement is None or not measurement.samples:
            return np.empty(0)
        return self._samples.get(measurement.samples, np.empty(0))

    def samples(self, tag: str, boundary: str, clock: str = "") -> np.ndarray:
        """Return the samples that count: `raw_samples`, without latencies taken while the GPU was throttled.

        If too few would be left, throttled samples stay in.
        """
        samples = self.raw_samples(tag, boundary, clock)
        if tag != "latency":
            return samples
        is_clean = self._mark_clean(samples, boundary)
        return samples if is_clean.sum() < timeline.MIN_SAMPLES or is_clean.all() else samples[is_clean]

    def _mark_clean(self, samples: np.ndarray, boundary: str) -> np.ndarray:
        window = self.facts.timed.get(boundary)
        if self.trace is None or window is None or not self.trace.throttled:
            return np.ones(len(samples), bool)
        # The host's samples fill the window; the GPU's omit the gaps between calls.
        host_s = self.raw_samples("latency", boundary, HOST)
        if (block_index := self._find_blocks("latency", boundary, len(samples))) is not None:
            return timeline.clean_blocks(samples, block_index, self.facts.blocks[boundary], self.trace.throttled)
        return timeline.find_clean(host_s if len(host_s) == len(samples) else samples, window, self.trace.throttled)

    def count_throttled(self, boundary: str) -> tuple[int, int, int]:
        """Count a boundary's latencies: all, taken under a throttled GPU, and dropped."""
        samples = self.raw_samples("latency", boundary)
        hit = len(samples) - int(self._mark_clean(samples, boundary).sum())
        return len(samples), hit, len(samples) - len(self.samples("latency", boundary))

    @cached_property
    def trace(self) -> timeline.Trace | None:
        """The GPU's telemetry during the round; None for a job on a CPU."""
        return timeline.read_timeline(self.folder) if self.device.startswith("cuda") else None

    def median(self, boundary: str, clock: str = "") -> float | None:
        """Return the median latency in seconds, None if the boundary wasn't measured (by that clock)."""
        key = boundary, clock
        if key not in self._medians:
            samples = self.samples("latency", boundary, clock)
            self._medians[key] = float(np.median(samples)) if samples.size else None
        return self._medians[key]

    def disturbed_blocks(
        self, boundary: str, quiet_delay: float | None = None, span: tuple[float, float] = ANY_LATENCY
    ) -> set[int]:
        """Return the indices of blocks disturbed by other programs or by moved processors.

        `quiet_delay`: the engine's own delay in its quietest round; `span`: accepted core-to-core latencies, ns.
        """
        delays = find_disturbed(self.facts.delays.get(boundary, ()), quiet_delay)
        moves = [n and not span[0] < n <= span[1] for n in self.facts.core_latencies.get(boundary, ())]
        return {index for flags in (delays, moves) for index, is_disturbed in enumerate(flags) if is_disturbed}

    @property
    def turns(self) -> str:
        """Name of the set of processes interleaved with this one, "" if it ran uninterleaved."""
        return self.facts.turns.set if self.facts.turns else ""

    @property
    def build(self) -> int:
        """Build number of the engine, 0 if all rounds ran the same build."""
        return self.facts.build or 0

    def block_medians(self, tag: str, boundary: str, clock: str = "", *, settled: bool = False) -> Mapping[int, float]:
        """Return the median of the samples that count of each block, by block index; empty if there are no blocks.

        `settled` takes the second half of each block, throttled or not: the speed under sustained load.
        """
        key = tag, boundary, clock, settled
        if key not in self._block_medians:
            blocks = self.block_samples(tag, boundary, clock, keep_throttled=settled)
            self._block_medians[key] = {
                k: float(np.median(samples[len(samples) // 2 * settled :])) for k, samples in blocks.items()
            }
        return self._block_medians[key]

    def block_samples(
        self, tag: str, boundary: str, clock: str = "", *, keep_throttled: bool = False
    ) -> dict[int, np.ndarray]:
        """Return the samples that count of each block, by block index; empty if there are no blocks."""
        samples = self.raw_samples(tag, boundary, clock)
        block_index = self._find_blocks(tag, boundary, len(samples))
        if block_index is None:
            return {}
        if tag == "latency" and not keep_throttled:
            is_clean = self._mark_clean(samples, boundary)
            samples, block_index = samples[is_clean], block_index[is_clean]
        return {int(k): samples[block_index == k] for k in np.unique(block_index)}

    def _find_blocks(self, tag: str, boundary: str, count: int) -> np.ndarray | None:
        """Return the block index of each of `count` samples, None if they are not in blocks."""
        measurement = self.find_measurement(tag, boundary, HOST)
        block_index = self._samples.get(f"{measurement.samples}_block") if measurement is not None else None
        return block_index if block_index is not None and count and len(block_index) == count else None

    @cached_property
    def _samples(self) -> dict[str, np.ndarray]:
        return self.read_arrays("samples.npz") if self.loaded is None else self.loaded

    def read_arrays(self, file: str, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Read all arrays, or only `names`, of an npz file of the round; empty if it is missing or damaged."""
        try:
            return read_npz(self.folder / file, names)
        except (OSError, ValueError):  # absent, truncated, or not an npz
            return {}

    @cached_property
    def answers(self) -> dict[str, np.ndarray]:
        """A classifier's answers: topk_index and topk_score [N, k], label and sample [N], and the class names."""
        try:
            return read_answers(self.folder / "outputs.npz")
        except (OSError, ValueError):  # absent or damaged
            return {}

    def outputs(self) -> dict[str, np.ndarray]:
        """Return raw model outputs by name, [N, ...], in input order; not cached, as they can be large."""
        arrays = self.read_arrays("outputs.npz")
        return {
            name.removeprefix("output:"): a
            for name, a in arrays.items()
            if name.startswith("output:") and a.dtype.kind in NUMERIC_KINDS and a.ndim
        }

    def output_rows(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return the rows per batch or input of each named output (its first axis isn't the inputs)."""
        arrays = self.read_arrays("outputs.npz", {f"rows:{name}" for name in names})
        return {name[len("rows:") :]: a for name, a in arrays.items()}
