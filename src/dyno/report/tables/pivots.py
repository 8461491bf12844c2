"""The tables that published comparisons print: a row per model, size and batch, a column per configuration.

docs/tables.md says what each one holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dyno.formatting import UNCLEAR, bound, bounded
from dyno.report.table_kind import TableKind
from dyno.report.tables.accuracy_tables import MOST_PAIRS
from dyno.report.tables.trial_table import FEW, STATISTICS, few, parenthesised, pick
from dyno.results import metrics
from dyno.results.metrics import agreement
from dyno.results.ranking import configuration_of, read_fps
from dyno.results.run_data import RunData
from dyno.table import COUNT, NUMBER, PERCENT, SHOWN, TEXT, Column, Row, Table, missing
from dyno.worker.numerics.closeness import ATOL, RTOL

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("model", "size", "batch")
STATISTIC = Column("statistic", "which statistic of the trials it is", kind=TEXT)
LIMITS = ("interval from", "interval to")  # of the speed-up
NAMES = {**{name: name for name in STATISTICS if name != "std"}, "trimmed std": "trimmed_std"}


def pivot(
    kind: TableKind, run: RunData, columns: Mapping[str, str], shown: str = NUMBER, samples: str = "", **more: Any
) -> Table | None:
    """Build one row per statistic, model, size and batch, with a column per configuration; None without numbers.

    `columns` maps a statistic's name to the frame's column, or to one of `more`, and `shown` is the kind of its
    numbers. `samples` is the frame's column of the number of samples.

    A trial without a number is printed as its status, which is empty in CSV and JSON.
    """
    frame = run.frame.assign(**more)
    columns = {k: c for k, c in columns.items() if frame[c].notna().any()}
    if not columns:
        return None
    rows = frame.assign(
        configuration=[configuration_of(r) for _, r in frame.iterrows()], **frame[list(columns.values())].astype(float)
    )
    counts = rows.groupby("configuration", sort=False)[list(columns.values())].count().sum(axis=1) > 0
    refused = rows.groupby("configuration", sort=False)["status"].agg(lambda s: set(s) <= {"ok", "skipped"})
    configurations = sorted(
        (name for name in counts.index if counts[name] or not refused[name]), key=_make_sort_key(rows)
    )
    pivoted: list[Row] = []
    for statistic, column in columns.items():
        for key, group in rows.groupby(list(KEYS), sort=False):
            values = dict(zip(group["configuration"], group[column], strict=True))
            names = list(group["configuration"])
            instead = {
                name: _choose_substitute(r, statistic) for name, (_, r) in zip(names, group.iterrows(), strict=True)
            }
            counted = zip(names, group[samples], strict=True) if samples else ()
            doubts = {name for name, count in counted if few(statistic, count)}
            row = {"statistic": statistic, **dict(zip(KEYS, key, strict=True)), "instead": instead, "few": doubts}
            pivoted.append(row | {name: values.get(name) for name in configurations})
    columns_ = (
        STATISTIC,
        *pick(*KEYS),
        *(
            Column(name, "of this configuration", kind=shown, cell=_make_formatter(name, shown))
            for name in configurations
        ),
    )
    return kind.of(columns_, pivoted, group=("statistic",), notes=_left_out(rows, configurations), below=_find_doubts)


def _find_doubts(rows: list[Row]) -> list[str]:
    return [FEW] if any(row["few"] for row in rows) else []


def _make_formatter(name: str, kind: str) -> Callable[[Row], str]:
    def format_cell(row: Row) -> str:
        instead: str = row["instead"].get(name, "")
        number = "" if missing(row[name]) else parenthesised(SHOWN[kind](row[name]), name in row["few"])
        return instead or number

    return format_cell


def _choose_substitute(row: pd.Series, statistic: str) -> str:
    """Return the text in place of a number: the trial's status, or the useful limit of an interval that is wide."""
    low, high = row["speedup_low"], row["speedup_high"]
    if statistic in LIMITS and not missing(low) and not bounded(low, high):
        return bound(low, high) if statistic == LIMITS[0] else UNCLEAR
    return str(row["status"]) if row["status"] != "ok" else ""


def _make_sort_key(rows: pd.DataFrame) -> Callable[[str], tuple[bool, int]]:
    """Return the sort key of the columns: PyTorch first, then as in the run."""
    names = list(dict.fromkeys(rows["configuration"]))
    return lambda name: (not name.startswith("pytorch"), names.index(name))


def _left_out(rows: pd.DataFrame, configurations: list[str]) -> tuple[str, ...]:
    """Return the configurations without a column, each with the reason for its refusal."""
    refused = rows[~rows["configuration"].isin(configurations) & (rows["status"] == "skipped")]
    refused = refused.drop_duplicates(["configuration", "reason"])
    return tuple(f"{r['configuration']} was skipped: {r['reason']}" for _, r in refused.iterrows())


def _compute_equal(run: RunData) -> list[float | None]:
    """Return the percentage of output values that agree with the reference's, for each row of the frame."""
    shares: list[float | None] = []
    for index, name in enumerate(run.frame["trial"]):
        t, other = run.trials[name], run.references.get(name)
        applies = index < MOST_PAIRS and other is not None and other is not t and bool(t.good)
        result = agreement.read_agreement(t, other) if applies and other is not None else None
        shares.append(100 * result.close if result else None)
    return shares


def _make_kind(
    name: str,
    title: str,
    description: str,
    place: int,
    columns: Mapping[str, str],
    shown: str = NUMBER,
    samples: str = "",
    **more: Callable[[RunData], Any],
) -> TableKind:
    """Return the kind of a `pivot`; `more` compute further columns of the frame."""

    def make(run: RunData) -> Table | None:
        return pivot(kind, run, columns, shown, samples, **{key: compute(run) for key, compute in more.items()})

    kind = TableKind(name, title, description, make, f"no trial has a number for {name}", "side", place)
    return kind


LATENCY_MODEL = _make_kind(
    "latency-model",
    "Latency/model, ms per batch",
    "Milliseconds per batch with inputs and outputs on the device, side by side.",
    1,
    {name: f"latency_model_ms_{column}" for name, column in NAMES.items()},
    samples="samples_model",
)
LATENCY_ALL = _make_kind(
    "latency-all",
    "Latency/all, ms per batch",
    "Milliseconds per batch from host memory to host memory, side by side.",
    2,
    {name: f"latency_all_ms_{column}" for name, column in NAMES.items()},
    samples="samples_all",
)
THROUGHPUT = _make_kind(
    "throughput",
    "Images per second",
    "Images per second with batches queued, and of one batch after another, side by side.",
    3,
    {"throughput, images/s": "throughput_ips", "FPS, one batch after another": "fps"},
    fps=lambda run: read_fps(run.frame),
)
SPEEDUP = _make_kind(
    "speedup",
    "Speed-up over the reference",
    "Times as fast as the reference with the ends of the 95 % interval, side by side.",
    4,
    {"times as fast": "speedup", LIMITS[0]: "speedup_low", LIMITS[1]: "speedup_high"},
    PERCENT,
)
ACCURACY = _make_kind(
    "accuracy",
    "Accuracy",
    "The metrics of the task in percent, side by side.",
    5,
    {f"{metric.label}, %": metric.column for metric in metrics.known().values()},
    PERCENT,
)
EQUALITY = _make_kind(
    "equality",
    f"Outputs equal to the reference's (rtol {RTOL:g}, atol {ATOL:g})",
    "Share of output values that are close to the reference's, side by side.",
    6,
    {"values, %": "equal"},
    PERCENT,
    equal=_compute_equal,
)
LAYERS = _make_kind(
    "layers",
    "What the engine is",
    "File size, layers and parameters, side by side.",
    7,
    {"file, MB": "size_mb", "layers": "layers", "parameters": "parameters"},
    COUNT,
)
MEMORY = _make_kind(
    "memory",
    "Peak memory",
    "Most memory of the GPU and of the process, side by side.",
    8,
    {"on the GPU, MB": "gpu_memory_mb", "of the process, MB": "memory_mb"},
)
