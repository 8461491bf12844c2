"""The stress test of an engine that takes several batches: a row per phase."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dyno.analysis import stats
from dyno.analysis.formatting import show
from dyno.analysis.presentation.table import COUNT, TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.worker.facts.job import StressPhase


def table(title: str, phases: Mapping[str, StressPhase], samples: Mapping[str, np.ndarray]) -> Table:
    """Build a row for each phase of a record, by its kind; the latencies are `latency_KIND` in seconds."""
    rows = [_make_row(kind, phase, samples[f"latency_{kind}"]) for kind, phase in phases.items()]
    return STRESS.of(COLUMNS, [{"title": title, **row} for row in rows], group=("title",))


def _make_row(kind: str, phase: StressPhase, seconds: np.ndarray) -> Row:
    latency = stats.summary(seconds)
    low, high = phase.batches
    return {
        "phase": kind, "batch": str(low) if low == high else f"{low}-{high}", "count": phase.iterations,
        "median_s": latency.median, "p99_s": latency.p99, "max_s": latency.max, "wrong": phase.wrong,
        "worst_error": phase.worst, "gpu_growth": float(phase.device_growth),
        "host_growth": float(phase.host_growth),
    }  # fmt: skip


def _make_column(name: str, meaning: str, unit: str, hint: str) -> Column:
    def format_cell(row: Row) -> str:
        return show(row[name], hint)

    return Column(name, meaning, unit, title=name.removesuffix("_s").replace("_", " "), cell=format_cell)


COLUMNS = (
    Column("title", "the trial", kind=TEXT),
    Column("phase", "min, opt, max, random or a number", kind=TEXT),
    Column("batch", "or from-to", kind=TEXT),
    Column("count", "of batches that ran", kind=COUNT),
    _make_column("median_s", "latency per batch", "s", "duration"),
    _make_column("p99_s", "latency per batch", "s", "duration"),
    _make_column("max_s", "latency per batch", "s", "duration"),
    Column("wrong", "batches whose outputs differ from the reference's", kind=COUNT),
    Column("worst_error", "largest difference, as a share of the reference's largest value", title="worst error"),
    _make_column("gpu_growth", "memory of the GPU at the end less that at the beginning", "B", "bytes"),
    _make_column("host_growth", "memory of the process at the end less that at the beginning", "B", "bytes"),
)
STRESS = TableKind(
    "stress",
    "Stress test",
    "A row per phase: latencies, wrong outputs, growth of memory.",
    command="dyno stress ENGINE",
)
