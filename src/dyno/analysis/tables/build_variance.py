"""What a build is worth as a measurement: several builds of one engine, each timed in several processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dyno.analysis.formatting import significant
from dyno.analysis.presentation.table import Table, TableKind
from dyno.analysis.records.results import Results, TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.analysis.tables import trial_table
from dyno.analysis.tables.trial_columns import COLUMNS, IDENTITY

SURE = 0.05  # chance of seeing such a difference between builds that are all alike
BUILD = "build"
PRINTED = (*IDENTITY, "layers", "parameters", "size_mb", "build_s", "latency_model_ms_median", "latency_model_ms_p95")


@dataclass(frozen=True)
class Spread:
    """Whether builds differ in speed: `ratio` is the slowest over the fastest, `p` the chance of it by noise alone."""

    ratio: float
    p: float

    @property
    def real(self) -> bool:
        return self.p < SURE


def good(results: Results) -> list[TrialResult]:
    """The builds that could be made and timed, in order."""
    return sorted((t for t in results if t.good), key=lambda t: int(t.options.get(BUILD, 0)))


def _builds(run: RunData) -> Table | None:
    if not any(BUILD in t.options for t in run.records):
        return None
    rows, notes = run.frame.to_dict("records"), tuple(sentences(run.records))
    return BUILDS.of(COLUMNS, rows, notes=notes, group=("model", "size", "batch"), printed=PRINTED,
                     below=trial_table.below)  # fmt: skip


def spread(builds: Sequence[TrialResult]) -> Spread | None:
    """One-way analysis of variance of the processes' log medians between builds; None with fewer than two of either."""
    groups = [np.log(t.medians("model")) for t in builds if len(t.medians("model")) > 1]
    if len(groups) < 2:
        return None
    from scipy.stats import f_oneway

    centres = [float(np.median(group)) for group in groups]
    p = float(f_oneway(*groups).pvalue) if max(map(np.ptp, groups)) > 0 else 0.0
    return Spread(math.exp(max(centres) - min(centres)), p)


def fastest(results: Results) -> TrialResult | None:
    """The build with the lowest median over processes."""
    timed = [t for t in good(results) if t.medians("model")]
    return min(timed, key=lambda t: float(np.median(t.medians("model"))), default=None)


def sentences(results: Results) -> list[str]:
    """What the builds have in common and what not, and whether they differ in speed beyond noise."""
    builds = good(results)
    if len(builds) < 2:
        return ["fewer than two builds could be timed, so nothing can be said of their differences"]
    found = [_counted("layers", builds), _counted("parameters", builds)]
    if (between := spread(builds)) is None:
        return [*found, "a build needs two processes or more before differences between builds can be told from noise"]
    gap = f"the slowest build takes {significant((between.ratio - 1) * 100)} % longer than the fastest"
    chance = f"analysis of variance between {len(builds)} builds, p = {significant(between.p, 2)}"
    verdict = "builds differ in speed beyond noise" if between.real else "that is not distinguishable from noise"
    return [*found, f"{gap}: {verdict} ({chance})"]


def _counted(tag: str, builds: Sequence[TrialResult]) -> str:
    counts = [count for t in builds if (count := t.count(tag)) is not None]
    if not counts:
        return f"{tag}: not told by these engines"
    if len(set(counts)) == 1:
        return f"{tag}: {counts[0]:,} in every build"
    return f"{tag} differ: " + ", ".join(f"{count:,}" for count in counts)


BUILDS = TableKind(
    "builds",
    "Builds of one engine",
    "A row per build: layers, parameters, file size, build time and latency, and whether builds differ beyond noise.",
    _builds,
    "this run has one build of each engine; `dyno build --repeat` makes several",
)
