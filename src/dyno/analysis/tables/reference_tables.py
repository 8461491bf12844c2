"""The tables that published comparisons print: a row per model, size and batch, a column per way of running it.

Each is a `Sheet`: a DataFrame of plain numbers, which is the CSV, and how it is printed. docs/tables.md says what each
one holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.analysis.formatting import UNBOUNDED, bounded, markdown, markdown_table, significant
from dyno.analysis.metrics import agreement, work
from dyno.analysis.ranking.frontier import SATURATED, SERIES, fps, saturation, throughput, usable, way
from dyno.analysis.ranking.references import references
from dyno.analysis.records.results import Results
from dyno.analysis.tables.cells import Cell, Table
from dyno.analysis.tables.render import json_text, json_texts, missing
from dyno.worker.spec import UserError

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("model", "size", "batch")
STATISTIC = "statistic"
LIMITS = ("interval from", "interval to")  # of the speed-up
TEXTS = ("model", "way", "verdict", "in words", "ran mostly in")  # columns of text; all others are numbers
MOST_PAIRS = 300  # trials whose raw outputs are compared
LEAD = (
    "A row per model, size and batch, a column per way of running it; times are in milliseconds per batch. Where a "
    "trial has no number, the table says how it ended. Each table lies in `tables/` as CSV too."
)
LATENCIES = ("mean", "median", "p90", "p95", "p99", "max", "trimmed", "trimmed_std")


def _plain(value: float) -> str:
    return significant(float(value))


def _whole(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else significant(float(value))


def _hundredths(value: float) -> str:
    return f"{value:.2f}"


@dataclass(frozen=True)
class Sheet:
    """One table: `data` is its machine twin; with a column STATISTIC each statistic is printed as a table of its own.

    `marks` holds what is printed where there is no number, by row and column: how the trial ended. `shown` prints a
    number; columns of KEYS and of text are printed as they are. `wide` are the limits, by row and column, of intervals
    that are printed in words because they bound nothing.
    """

    name: str
    title: str
    data: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    marks: Mapping[tuple[int, str], str] = field(default_factory=dict)
    shown: Callable[[float], str] = _plain
    wide: AbstractSet[tuple[int, str]] = frozenset()

    def parts(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """The printed tables: a title, the heads and the rows as text."""
        split = STATISTIC in self.data
        for value in dict.fromkeys(self.data[STATISTIC]) if split else [""]:
            chosen = self.data[self.data[STATISTIC] == value] if split else self.data
            heads = [str(c) for c in chosen.columns if c != STATISTIC]
            rows = [[self._cell(i, c, r[c]) for c in heads] for i, r in chosen.iterrows()]
            yield f"{self.title}: {value}" if split else self.title, heads, rows

    def _cell(self, row: int, column: str, value: Any) -> str:
        if missing(value) or value == "":
            return self.marks.get((row, column), "")
        if (row, column) in self.wide:
            return UNBOUNDED
        return str(value) if isinstance(value, str) or column in KEYS else self.shown(value)


def sheets(results: Results, frame: pd.DataFrame) -> list[Sheet]:
    """Every table that has something to say, in the order a reader wants them."""
    model, whole = ({name.replace("_", " "): f"latency_{b}_ms_{name}" for name in LATENCIES} for b in ("model", "all"))
    rows = frame.assign(fps=fps(frame), equal=_equal(results, frame))
    accuracy = {"top-1, %": "top1", "top-5, %": "top5", "mAP50, %": "map50", "mAP50-95, %": "map50_95"}
    engine = {"file, MB": "size_mb", "layers": "layers", "parameters": "parameters"}
    memory = {"on the GPU, MB": "gpu_memory_mb", "of the process, MB": "memory_mb"}
    ratio = {"times as fast": "speedup", LIMITS[0]: "speedup_low", LIMITS[1]: "speedup_high"}
    rates = {"throughput, images/s": "throughput_ips", "FPS, one batch after another": "fps"}
    found = [
        _pivot("latency-model", "Latency/model, ms per batch", rows, model),
        _pivot("latency-all", "Latency/all, ms per batch", rows, whole),
        _pivot("throughput", "Images per second", rows, rates),
        _pivot("speedup", "Speed-up over the reference", rows, ratio, shown=_hundredths),
        _pivot("accuracy", "Accuracy", rows, accuracy, shown=_hundredths),
        _pivot("equality", f"Outputs equal to the reference's (rtol {agreement.RTOL:g}, atol {agreement.ATOL:g})", rows,
               {"values, %": "equal"}, shown=_hundredths),
        _pivot("layers", "What the engine is", rows, engine, shown=_whole),
        _pivot("memory", "Peak memory", rows, memory),
        _sizes(rows), _flops(results, rows), _saturation(frame), _best(frame),
    ]  # fmt: skip
    return [sheet for sheet in found if sheet is not None]


def named(results: Results, frame: pd.DataFrame, name: str) -> list[Sheet]:
    """The table of that name, or all of them for `all`; UserError for one that isn't known or has no content."""
    every = sheets(results, frame)
    chosen = [sheet for sheet in every if name in (sheet.name, "all")]
    if not chosen:
        have = ", ".join(sheet.name for sheet in every)
        raise UserError(
            f"{results.folder} has no table {name!r}; it has {have or 'none'}" + (", or all" if have else "")
        )
    return chosen


def render(chosen: list[Sheet], format: str = "text") -> str:
    """The tables as Markdown whose columns are aligned (text too), as CSV, or as JSON."""
    if format in ("text", "markdown"):
        return "\n".join(_markdown(sheet) for sheet in chosen)
    if format == "csv":
        return "\n".join(sheet.data.to_csv(index=False) for sheet in chosen)
    if format == "json":
        return json_text(chosen[0].data) if len(chosen) == 1 else json_texts({s.name: s.data for s in chosen})
    raise UserError(f"unknown format {format!r}; known: text, markdown, csv, json")


def write(runs: Sequence[tuple[Results, list[Sheet]]], out: Path) -> None:
    """Write OUT/tables.md and OUT/tables/*.csv; with several runs the CSV files begin with the run's name."""
    (out / "tables").mkdir(parents=True, exist_ok=True)
    parts = []
    for results, every in runs:
        prefix = re.sub(r"[^\w.-]+", "_", results.name) + "-" if len(runs) > 1 else ""
        for sheet in every:
            sheet.data.to_csv(out / "tables" / f"{prefix}{sheet.name}.csv", index=False)
        parts.append(f"# Tables of {markdown(results.name)}\n\n{LEAD}\n\n{render(every)}")
    (out / "tables.md").write_text("\n".join(parts), encoding="utf-8")


def pages(every: list[Sheet], frame: pd.DataFrame) -> list[Table]:
    """The same tables for the report; none for a run of a single model, size and batch, whose own table says it all."""
    if len(frame[list(KEYS)].drop_duplicates()) < 2:
        return []
    found = []
    for sheet in every:
        parts = list(sheet.parts())
        for title, heads, rows in parts:
            left = ["" if head in TEXTS else "number" for head in heads]
            cells = [[_sorted(text, bool(side)) for text, side in zip(row, left, strict=True)] for row in rows]
            found.append(Table(title, heads, cells, sheet.notes if title == parts[-1][0] else []))
    return found


def _sorted(text: str, number: bool) -> Cell:
    plain = text.replace(",", "")
    return Cell(text, plain if number else text, number)


def _pivot(
    name: str, title: str, frame: pd.DataFrame, columns: Mapping[str, str], shown: Callable[[float], str] = _plain
) -> Sheet | None:
    """One row per statistic, model, size and batch; `columns` maps a statistic's name to the frame's column."""
    import pandas as pd

    columns = {k: c for k, c in columns.items() if c in frame and frame[c].notna().any()}
    if not columns:
        return None
    rows = frame.assign(way=[way(r) for _, r in frame.iterrows()], **frame[list(columns.values())].astype(float))
    useful = rows.groupby("way", sort=False)[list(columns.values())].count().sum(axis=1) > 0
    silent = rows.groupby("way", sort=False)["status"].agg(lambda s: set(s) <= {"ok", "skipped"})
    ways = sorted((w for w in useful.index if useful[w] or not silent[w]), key=_place(rows))
    made: list[dict[str, Any]] = []
    marks: dict[tuple[int, str], str] = {}
    for statistic, column in columns.items():
        for key, group in rows.groupby(list(KEYS), sort=False):
            cells = dict(zip(group["way"], group[column], strict=True))
            ended = dict(zip(group["way"], group["status"], strict=True))
            marks |= {(len(made), w): ended[w] for w in ways if ended.get(w, "ok") != "ok"}
            made.append({STATISTIC: statistic, **dict(zip(KEYS, key, strict=True)), **{w: cells.get(w) for w in ways}})
    data = pd.DataFrame(made, columns=[STATISTIC, *KEYS, *ways])
    return Sheet(name, title, data, _left_out(rows, ways), marks, shown, _wide(rows, data))


def _wide(rows: pd.DataFrame, data: pd.DataFrame) -> AbstractSet[tuple[int, str]]:
    """Where `data` has the limits of speed-ups that are too uncertain to bound."""
    loose = {(*(r[k] for k in KEYS), r["way"]) for _, r in rows.iterrows() if _unbounded(r)}
    return {(i, key[-1]) for i, r in data[data[STATISTIC].isin(LIMITS)].iterrows() for key in loose
            if key[:-1] == tuple(r[k] for k in KEYS)}  # fmt: skip


def _unbounded(r: pd.Series) -> bool:
    return not missing(r["speedup_low"]) and not bounded(r["speedup_low"], r["speedup_high"])


def _place(rows: pd.DataFrame) -> Callable[[str], tuple[bool, int]]:
    """Where a way's column stands: PyTorch first, then as the ways come."""
    order = list(dict.fromkeys(rows["way"]))
    return lambda w: (not w.startswith("pytorch"), order.index(w))


def _left_out(rows: pd.DataFrame, ways: list[str]) -> list[str]:
    """Ways without a column, each with its reason, where they were refused."""
    gone = rows[~rows["way"].isin(ways) & (rows["status"] == "skipped")].drop_duplicates(["way", "reason"])
    return [f"{r['way']} was skipped: {r['reason']}" for _, r in gone.iterrows()]


def _equal(results: Results, frame: pd.DataFrame) -> list[float | None]:
    """Share of output values that agree with the reference's, in percent, for each row of the frame."""
    chosen, trials = references(results, frame.attrs["reference"]), {t.id: t for t in results}
    found: list[float | None] = []
    for place, name in enumerate(frame["trial"]):
        t, other = trials[name], chosen.get(name)
        compared = place < MOST_PAIRS and other is not None and other is not t and bool(t.good)
        known = agreement.of(t, other) if compared and other is not None else None
        found.append(100 * known.close if known else None)
    return found


def _long(frame: pd.DataFrame, columns: Mapping[str, Any]) -> pd.DataFrame:
    """A row per trial: what it is, then the columns."""
    import pandas as pd

    keys = {key: list(frame[key]) for key in KEYS}
    return pd.DataFrame({**keys, "way": [way(r) for _, r in frame.iterrows()], **columns})


def _sizes(frame: pd.DataFrame) -> Sheet | None:
    """Trimmed mean and deviation, FPS, memory and speed-up of each trial (R33, R34)."""
    rows = frame[frame["fps"].notna() | ~frame["status"].isin(["ok", "skipped"])]
    if frame["fps"].isna().all():
        return None
    where = "model" if frame["latency_model_ms_trimmed"].notna().any() else "all"
    on_card = bool(rows["gpu_memory_mb"].notna().any())
    columns = {
        "mean, ms": list(rows[f"latency_{where}_ms_trimmed"]), "std, ms": list(rows[f"latency_{where}_ms_trimmed_std"]),
        "FPS": list(rows["fps"]), "throughput, images/s": list(rows["throughput_ips"]),
        "memory, MB": list(rows["gpu_memory_mb" if on_card else "memory_mb"]), "speed-up": list(rows["speedup"]),
        "from": list(rows["speedup_low"]), "to": list(rows["speedup_high"]), "verdict": _words(rows),
    }  # fmt: skip
    whose = (
        "the GPU, above what was used before the job" if on_card else "the job's process, Python and library included"
    )
    notes = [
        f"Mean and std are of latency/{where} without the fastest and the slowest 10 % of the samples. FPS is the "
        f"batch over the median latency. Memory is the most of {whose}."
    ]
    wide = {(i, name) for i, (_, r) in enumerate(rows.iterrows()) if _unbounded(r) for name in ("from", "to")}
    return Sheet("sizes", "Sizes and batches", _long(rows, columns), notes, wide=wide)


def _words(rows: pd.DataFrame) -> list[str]:
    return [v if s == "ok" else s for v, s in zip(rows["verdict"], rows["status"], strict=True)]


def _flops(results: Results, frame: pd.DataFrame) -> Sheet | None:
    """TFLOPS achieved and their share of the measured peak (R36)."""
    rows = frame[frame["tflops"].notna()]
    if not len(rows):
        return None
    trials, known = {t.id: t for t in results}, work.peaks(results)
    columns = {
        "GFLOP per image": list(rows["gflops"]), "TFLOPS": list(rows["tflops"]),
        "ran mostly in": [work.ran_in(trials[name]) or "not known" for name in rows["trial"]],
        "peak TFLOPS": list(rows["peak_tflops"]), "of the peak, %": list(100 * rows["peak_share"]),
    }  # fmt: skip
    notes = [
        "Operations are those of convolutions and matrix products in the model as PyTorch or ONNX has it, a "
        "multiplication with its addition as two; TFLOPS are over the median of latency/model."
    ]
    notes += [_peak(peak) for peak in known.values()] or [work.missing(results)]
    notes += [f"The peak is too low, perhaps: {warning}." for warning in results.peak.get("warnings") or ()]
    if any(share > 1 for share in rows["peak_share"].dropna()):
        notes.append(
            "More than 100 %: PyTorch's matrix product is not the most this device can do, or an engine did less than "
            "the model's operations (Winograd's convolutions)."
        )
    data = _long(rows, columns).dropna(axis=1, how="all")
    return Sheet("flops", "Arithmetic per second", data, notes)


def _peak(peak: work.Peak) -> str:
    clock = f", SM clock {peak.clock:,.0f} MHz" if peak.clock == peak.clock else ""
    return (
        f"Peak in {peak.type}: {significant(peak.flops_per_s / 1e12)} TFLOPS, measured with PyTorch's product of two "
        f"{peak.side:,} × {peak.side:,} matrices{clock}."
    )


def _saturation(frame: pd.DataFrame) -> Sheet | None:
    """From which batch on more buys next to nothing (R37)."""
    import pandas as pd

    rows = [
        {
            "model": s.model, "size": s.size, "way": s.way, f"{100 * SATURATED:.0f} % of the best at batch": s.batch,
            "images/s there": s.images_per_s, "best batch": s.best_batch, "best images/s": s.best_images_per_s,
            "in words": s.words,
        }
        for s in saturation(frame)
    ]  # fmt: skip
    return Sheet("saturation", "Where throughput saturates", pd.DataFrame(rows), shown=_whole) if rows else None


def _best(frame: pd.DataFrame) -> Sheet | None:
    """The best batch of each way at each size, in images and in pixels per second, and the best of all (R37)."""
    import pandas as pd

    rows = usable(frame).assign(ips=throughput(usable(frame))).dropna(subset=["ips"])
    if rows["size"].nunique() < 2 and rows["batch"].nunique() < 2:
        return None
    best = [group.loc[group["ips"].idxmax()] for _, group in rows.groupby(list(SERIES), sort=False)]
    made = [
        {"model": r["model"], "way": way(r), "size": r["size"], "best batch": int(r["batch"]), "images/s": r["ips"],
         "megapixels/s": r["ips"] * _pixels(r["size"]) / 1e6}
        for r in best
    ]  # fmt: skip
    data = pd.DataFrame(made)
    return Sheet("best", "The best batch at each size", data, list(_winners(data)), shown=_whole)


def _winners(best: pd.DataFrame) -> Iterator[str]:
    """For each model the combination with the most images per second and, across sizes, with the most pixels."""
    for model, rows in best.groupby("model", sort=False):
        for column in ("images/s", "megapixels/s") if rows["size"].nunique() > 1 else ("images/s",):
            r = rows.loc[rows[column].idxmax()]
            yield (
                f"{model}: most {column}, {significant(r[column])}, at size {r['size']}, batch {r['best batch']}, with "
                f"{r['way']}."
            )


def _pixels(size: str) -> float:
    height, _, width = size.partition("x")
    return float(height) * float(width or height)


def _markdown(sheet: Sheet) -> str:
    """The sheet's tables and notes under its name."""
    blocks = []
    for title, heads, rows in sheet.parts():
        head, *cells = [[markdown(text) for text in row] for row in (heads, *rows)]
        table = markdown_table(head, cells, [name not in TEXTS for name in heads])
        blocks.append(f"### {markdown(title)}\n\n{table}")
    notes = "\n".join(f"- {markdown(note)}" for note in sheet.notes if note)
    return f"## {sheet.name}\n\n" + "\n".join(blocks) + (f"\n{notes}\n" if notes else "")
