"""Sources of spread: builds of an engine, rounds, blocks of a round, samples of a block."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from dyno.formatting import format_number, show
from dyno.report.tables import TableKind, trial_table
from dyno.report.tables.accuracy_tables import LABEL_COLUMN
from dyno.report.tables.trial_table import COLUMNS, IDENTITY
from dyno.results import stats
from dyno.results.blocks import block_ratios
from dyno.results.rounds import Round
from dyno.results.run_data import RunData
from dyno.results.trial_result import Results, TrialResult
from dyno.table import COUNT, TEXT, Column, Row, Table
from dyno.worker.spec import BUILD_OPTIONS

PARTS_PER_ROUND = 10  # equal parts of a round without blocks
OTHER_LENGTH = 2.0  # least factor between lengths for advice on a round's length
LATENCY, RATIO = "latency", "ratio to the reference"
SIGNIFICANCE_LEVEL = 0.05  # significance level of a difference between builds
PRINTED = (*IDENTITY, "layers", "parameters", "size_mb", "build_s", "latency_ms", "latency_model_ms_p95")


@dataclass(frozen=True)
class BuildSpread:
    """Difference between builds: `ratio` is slowest over fastest, `p` its probability by noise alone."""

    ratio: float
    p: float

    @property
    def real(self) -> bool:
        return self.p < SIGNIFICANCE_LEVEL


def list_good_builds(results: Results) -> list[TrialResult]:
    """Return the successful, timed builds in order."""
    return sorted((t for t in results if t.good), key=lambda t: int(t.options.get(BUILD_OPTIONS, 0)))


def _make_builds_table(run: RunData) -> Table | None:
    if not any(BUILD_OPTIONS in t.options for t in run.records):
        return None
    rows = run.frame.to_dict("records")
    notes = (*describe_builds(run.records), *trial_table.make_footnote(rows))
    return BUILDS.build(COLUMNS, rows, notes=notes, group=("model", "size", "batch"), printed=PRINTED,
                     below=trial_table.list_reasons)  # fmt: skip


def analyse_spread(builds: Sequence[TrialResult]) -> BuildSpread | None:
    """Analyse the variance of log medians between builds (one-way); None unless two builds have two processes each."""
    groups = [np.log(t.medians("model")) for t in builds if len(t.medians("model")) > 1]
    if len(groups) < 2:
        return None
    from scipy.stats import f_oneway

    centres = [float(np.median(group)) for group in groups]
    p = float(f_oneway(*groups).pvalue) if max(map(np.ptp, groups)) > 0 else 0.0
    return BuildSpread(math.exp(max(centres) - min(centres)), p)


def find_fastest(results: Results) -> TrialResult | None:
    """Return the build with the lowest median over processes."""
    timed = [t for t in list_good_builds(results) if t.medians("model")]
    return min(timed, key=lambda t: float(np.median(t.medians("model"))), default=None)


def describe_builds(results: Results) -> list[str]:
    """Describe differences between the builds' counts, and whether their speeds differ beyond noise."""
    builds = list_good_builds(results)
    if len(builds) < 2:
        return ["fewer than two builds could be timed, so their differences are unknown"]
    counts = [_count_of("layers", builds), _count_of("parameters", builds)]
    if (builds_spread := analyse_spread(builds)) is None:
        return [*counts, "a build needs two processes or more to distinguish differences between builds from noise"]
    difference = f"the slowest build takes {format_number((builds_spread.ratio - 1) * 100)} % longer than the fastest"
    chance = f"analysis of variance between {len(builds)} builds, p = {format_number(builds_spread.p, 2)}"
    verdict = "builds differ in speed beyond noise" if builds_spread.real else "that is not distinguishable from noise"
    return [*counts, f"{difference}: {verdict} ({chance})"]


def _count_of(tag: str, builds: Sequence[TrialResult]) -> str:
    counts = [count for t in builds if (count := t.count(tag)) is not None]
    if not counts:
        return f"{tag}: not reported by these engines"
    if len(set(counts)) == 1:
        return f"{tag}: {counts[0]:,} in every build"
    return f"{tag} differ: " + ", ".join(f"{count:,}" for count in counts)


BUILDS = TableKind(
    "builds", "Builds of one engine",
    "A row per build: layers, parameters, file size, build time and latency, and whether builds differ beyond noise.",
    _make_builds_table, "this run has one build of each engine; `dyno export --repeat` makes several",
)  # fmt: skip


def _make_variance_table(run: RunData) -> Table | None:
    rows = []
    for row in run.frame.to_dict("records"):
        trial, boundary, clock = run.trials[row["trial"]], str(row["boundary"]), str(row["clock"])
        if boundary and len(trial.good) > 1:
            round_blocks = [(r.build, blocks) for r in trial.good if (blocks := _split_blocks(r, boundary, clock))]
            rows += _make_row(trial, boundary, LATENCY, _estimate_levels(round_blocks))
            reference = run.references.get(trial.id)
            if reference is not None and reference is not trial:
                ratios = block_ratios(reference, trial, boundary, clock)
                rows += _make_row(
                    trial, boundary, RATIO, _estimate_levels([(each.builds, [*each.logs[:, None]]) for each in ratios])
                )
    return VARIANCE.build(VARIANCE_COLUMNS, rows, notes=(VARIANCE_NOTE,)) if rows else None


def _estimate_levels(round_blocks: Sequence[tuple[Hashable, Sequence[np.ndarray]]]) -> stats.VarianceComponents | None:
    return stats.estimate_levels([blocks for _, blocks in round_blocks], [build for build, _ in round_blocks])


def _split_blocks(r: Round, boundary: str, clock: str) -> list[np.ndarray]:
    """Return the logarithms of a round's latencies by block, or in equal parts if it has no blocks."""
    if blocks := r.block_samples("latency", boundary, clock):
        return [np.log(block) for block in blocks.values()]
    samples = r.samples("latency", boundary, clock)
    return (
        [np.log(block) for block in np.array_split(samples, PARTS_PER_ROUND)]
        if len(samples) >= 3 * PARTS_PER_ROUND
        else []
    )


def _make_row(trial: TrialResult, boundary: str, quantity: str, levels: stats.VarianceComponents | None) -> list[Row]:
    """Return the row of a trial's latency or ratio, as a list; empty with too few rounds."""
    if levels is None:
        return []
    total, (count, blocks, samples) = sum(levels.parts) or 1.0, levels.counts
    absent = {name for name, lacks in (("builds", levels.builds is None), ("samples", quantity == RATIO)) if lacks}
    names = [name for name in VARIANCE_LEVELS if name not in absent]  # a block has one ratio
    parts = dict(zip(VARIANCE_LEVELS, levels.parts, strict=True))
    durations = [sum(r.samples("latency", boundary)) for r in trial.good]
    seconds = float(np.median(durations))
    start = max(0.0, float(np.median([r.record.seconds for r in trial.good])) - seconds)
    best_seconds = levels.best_blocks(start, seconds / blocks) * seconds / blocks
    return [
        {"label": trial.label, "of": quantity, "rounds": count, "blocks": blocks, "samples": samples}
        | {f"{name}_share": 100 * parts[name] / total for name in names}
        | {f"{name}_spread": 100 * math.sqrt(getattr(levels, name)) for name in names}
        | {"seconds": seconds, "best_seconds": best_seconds}
        | {"advice": BUILDS_FIRST if parts["builds"] > total / 2 else _choose_advice(best_seconds, seconds)}
    ]


def _choose_advice(best_seconds: float, seconds: float) -> str:
    if math.isinf(best_seconds):
        return "longer rounds: rounds differ no more than their blocks and samples do"
    if best_seconds > OTHER_LENGTH * seconds:
        return f"longer rounds: about {show(best_seconds, 'duration', 2)}"
    if best_seconds * OTHER_LENGTH < seconds:
        return f"more and shorter rounds: about {show(best_seconds, 'duration', 2)}"
    return "more rounds of this length"


VARIANCE_LEVELS = ("builds", "rounds", "blocks", "samples")
BUILDS_FIRST = "more builds: builds differ by more than everything within them"
LEVEL_NAMES = {
    "builds": "builds of the engine",
    "rounds": "rounds, each a process",
    "blocks": "blocks of a round",
    "samples": "samples of a block",
}
VARIANCE_NOTE = (
    "Shares are of the variance of a round's mean; the level with the largest share is worth more repetitions. Where a "
    f"trial has no blocks, a round is cut into {PARTS_PER_ROUND}. Advice is on the narrowest interval in a given "
    "time, for this boundary."
)
VARIANCE_COLUMNS = (
    LABEL_COLUMN,
    Column("of", "latency, or in turns its ratio to the reference", kind=TEXT),
    Column("rounds", "how many", kind=COUNT),
    Column("blocks", "of a round"),
    Column("samples", "of a block", rank=2),
    *(Column(f"{name}_share", f"of the variance that comes from between {words}", "%", title=f"{name} %")
      for name, words in LEVEL_NAMES.items()),
    *(Column(f"{name}_spread", f"standard deviation between {words}", "%", title=f"{name} spread, %", rank=3)
      for name, words in LEVEL_NAMES.items()),
    Column("seconds", "sampled in a round now", "s", rank=1),
    Column("best_seconds", "sampling of a round that gives the narrowest interval in a given time", "s", rank=4),
    Column("advice", "what narrows the interval most", kind=TEXT),
)  # fmt: skip
VARIANCE = TableKind(
    "variance", "Where the spread comes from",
    "Shares of builds, rounds (processes), blocks and samples in the variance, and which of them to increase.",
    _make_variance_table, "levels of spread need two rounds or more, each of 30 samples or more", "tables", 6,
)  # fmt: skip
