"""The table as text: for a terminal, as Markdown, CSV or JSON."""

from __future__ import annotations

import io
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from dyno.analysis import formatting
from dyno.analysis.formatting import (
    NO_IMAGE,
    images_tested,
    limits,
    markdown,
    markdown_table,
    plain,
    points,
    short,
    significant,
)
from dyno.analysis.metrics.precision import named
from dyno.worker.spec import UserError

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("text", "markdown", "csv", "json")
IDENTITY = ("model", "size", "batch", "device", "backend", "precision", "runtime", "options")
GROUPS = ("model", "size", "batch")
NEAREST = 3  # columns that may have been meant by a misspelt one
LONGEST = 32  # characters of a name in a terminal cell

Row = dict[str, Any]
Table = tuple[str, "list[Column]", list[Row]]


@dataclass(frozen=True)
class Column:
    """A printed column: `rank` 0 always stays, higher ones are the first to go when the terminal is too narrow."""

    title: str
    cell: Callable[[Row], str]
    rank: int = 0
    right: bool = True
    sort: str = ""  # the frame's column with the number behind the text


def _name(column: str) -> Column:
    cell = _precision if column == "precision" else lambda r: str(r[column])
    return Column(column, cell, right=column == "batch", sort=column)


def number(title: str, column: str, rank: int, digits: int = 3) -> Column:
    """A column of numbers to that many significant digits."""
    return Column(title, lambda r: _significant(r[column], digits), rank, sort=column)


def _significant(value: float, digits: int = 3) -> str:
    return "" if missing(value) else significant(float(value), digits)


def _accuracy(r: Row) -> str:
    if missing(r["top1"]):
        return ""
    return f"{r['top1']:.2f} [{r['top1_low']:.1f}, {r['top1_high']:.1f}]"


def change(r: Row) -> str:
    """The paired difference of top-1 or mAP in points, with its interval."""
    name = "map_diff" if missing(r["top1_diff_low"]) else "top1_diff"
    if missing(r[f"{name}_low"]):
        return ""
    low, value, high = (points(r[f"{name}{x}"] / 100) for x in ("_low", "", "_high"))
    return f"{value} [{low}, {high}]"


def ratio(r: Row, column: str, places: int = 2) -> str:
    """A ratio with its interval, from the columns NAME, NAME_low and NAME_high."""
    if missing(r[column]):
        return ""
    value, low, high = (r[column + end] for end in ("", "_low", "_high"))
    return f"{value:.{places}f}x" + ("" if missing(low) else limits(low, high, lambda v: f"{v:.{places}f}"))


def _precision(r: Row) -> str:
    return named(r) if "precision_ok" in r else str(r["precision"])


def _percent(value: float) -> str:
    return "" if missing(value) else f"{value:.2f}"


def _verdict(r: Row) -> str:
    return str(r["verdict"] if r["status"] == "ok" else r["status"])


PRINTED = (
    number("median ms", "latency_model_ms_median", 0),
    number("p95 ms", "latency_model_ms_p95", 4),
    number("all ms", "latency_all_ms_median", 3),
    number("images/s", "throughput_ips", 1),
    number("pipeline images/s", "pipeline_ips", 3),
    Column("speed-up", lambda r: ratio(r, "speedup"), 0, sort="speedup"),
    Column("verdict", _verdict, 0, right=False, sort="verdict"),
    Column("top-1 %", lambda r: _percent(r["top1"]), 0, sort="top1"),
    Column("mAP50-95 %", lambda r: _percent(r["map50_95"]), 0, sort="map50_95"),
    Column("mAP50 %", lambda r: _percent(r["map50"]), 4, sort="map50"),
    Column("change, points", change, 6, sort="top1_diff"),
    Column("budget", lambda r: r["budget"], 0, right=False, sort="budget"),
    number("size MB", "size_mb", 5),
    number("build s", "build_s", 5),
    number("GPU MB", "gpu_memory_mb", 6),
    number("GPU %", "gpu_util", 8),
    Column("clock limited by", lambda r: str(r["throttle"]), 9, right=False, sort="throttle"),
    Column("ran as", lambda r: r["ran_as"], 7, right=False, sort="ran_as"),
)


def render(
    frame: pd.DataFrame,
    format: str = "text",
    by: str | Sequence[str] | None = None,
    width: int | None = None,
    printed: Sequence[Column] = PRINTED,
) -> str:
    """The frame in one of FORMATS; `csv` and `json` hold every column, `text` and `markdown` those that are `printed`.

    `by` names the columns (comma-separated, or a sequence) that make one table each; text drops its least important
    columns until it fits `width` characters (default: those that the terminal has), then breaks cells between words.
    UserError for an unknown format or column.
    """
    if format not in FORMATS:
        raise UserError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    if format == "csv":
        return str(frame.to_csv(index=False))
    if format == "json":
        return json_text(frame)
    tables = list(grouped(frame, by, printed))
    if format == "markdown":
        return "\n".join(_markdown(*t) for t in tables)
    return "\n".join(_text(*t, width=width or formatting.width()) for t in tables)


def json_text(frame: pd.DataFrame) -> str:
    """A list of objects, one per trial; null where a value doesn't apply, text as UTF-8."""
    return _json(_rows(frame))


def json_texts(frames: Mapping[str, pd.DataFrame]) -> str:
    """Several such lists as one object, by name."""
    return _json({name: _rows(frame) for name, frame in frames.items()})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{k: _json_value(v) for k, v in r.items()} for r in frame.to_dict("records")]


def _json_value(value: Any) -> Any:
    if missing(value) or value == "" or (isinstance(value, float) and math.isinf(value)):
        return None
    return value.item() if hasattr(value, "item") else value


def grouped(
    frame: pd.DataFrame, by: str | Sequence[str] | None = None, printed: Sequence[Column] = PRINTED
) -> Iterator[Table]:
    """The tables to print: a title, the columns that hold anything, and the rows as dicts."""
    keys = _keys(frame, by)
    tables: dict[tuple[Any, ...], list[Row]] = {}
    for r in frame.to_dict("records"):
        tables.setdefault(tuple(r[k] for k in keys), []).append(r)
    shown = [k for k in IDENTITY if k not in keys and (k in ("backend", "precision") or frame[k].nunique() > 1)]
    for values, rows in tables.items():
        named = [(k, v) for k, v in zip(keys, values, strict=True) if (k, v) != ("size", NO_IMAGE)]
        title = ", ".join(plain(v) if k == "model" else f"{k} {plain(v)}" for k, v in named)
        columns = [_name(k) for k in shown] + [c for c in printed if any(c.cell(r) for r in rows)]
        yield title, columns, rows


def _keys(frame: pd.DataFrame, by: str | Sequence[str] | None) -> list[str]:
    if not by:
        return [*GROUPS, "device"] if frame["device"].nunique() > 1 else list(GROUPS)
    keys = [k.strip() for k in by.split(",")] if isinstance(by, str) else list(by)
    unknown = [k for k in keys if k not in frame.columns]
    if unknown:
        raise UserError(_no_column(unknown[0], [str(c) for c in frame.columns]))
    return keys


def _no_column(name: str, columns: list[str]) -> str:
    near = list(dict.fromkeys([*get_close_matches(name, columns, NEAREST), *(c for c in columns if name in c)]))
    meant = f"did you mean {' or '.join(near[:NEAREST])}? " if near and name else ""
    return f"there is no column {name!r} to group by; {meant}the first line of --format csv names all columns"


def failures(rows: list[Row]) -> list[tuple[str, str]]:
    """The way and the reason of every row that isn't ok."""
    return [
        (f"{r['backend']} {r['precision']}", f"{r['status']}: {r['reason']}")
        for r in rows
        if r.get("status", "ok") != "ok"
    ]


def notes(rows: list[Row]) -> list[str]:
    """What is printed below a table: images that its accuracies are not of, and the reason of every failure."""
    judged = [r for r in rows if not (missing(r.get("top1")) and missing(r.get("map50_95")))]
    tested = [(r["images"], r["set_aside"]) for r in judged if not missing(r.get("set_aside")) and r["set_aside"]]
    said = [f"accuracy is on {images_tested(*each)}" for each in dict.fromkeys(tested)]
    return [*said, *(f"{way} {why}" for way, why in failures(rows))]


def _markdown(title: str, columns: list[Column], rows: list[Row]) -> str:
    names = len([c for c in columns if c.title in IDENTITY])
    cells = [[markdown(c.cell(r)) if i < names else c.cell(r) for i, c in enumerate(columns)] for r in rows]
    table = markdown_table([c.title for c in columns], cells, [c.right for c in columns])
    below = "".join(f"\n- {markdown(note)}" for note in notes(rows))
    return f"### {markdown(title)}\n\n{table}" + (below + "\n" if below else "")


def _text(title: str, columns: list[Column], rows: list[Row], width: int) -> str:
    cells = {c.title: [c.title, *(short(c.cell(r), LONGEST) for r in rows)] for c in columns}
    widths = {name: max(map(_cells, column)) for name, column in cells.items()}
    kept = list(columns)
    while sum(widths[c.title] + 2 for c in kept) - 2 > width and any(c.rank for c in kept):
        kept.remove(max(reversed(kept), key=lambda c: c.rank))
    hidden = ", ".join(c.title for c in columns if c not in kept)
    below = [*map(plain, notes(rows)), *([f"not shown at this width: {hidden}"] if hidden else [])]
    below = [textwrap.fill(note, width, initial_indent="  ", subsequent_indent="    ") for note in below]
    whole = sum(widths[c.title] + 2 for c in kept) - 2
    if whole > width:
        return "\n".join([title, _folded([(c, cells[c.title]) for c in kept], width), *below]) + "\n"
    lines = ["  ".join(_pad(cells[c.title][i], widths[c.title], c.right) for c in kept).rstrip()
             for i in range(len(rows) + 1)]  # fmt: skip
    rule = "─" * whole
    return "\n".join([title, rule, lines[0], rule, *lines[1:], rule, *below]) + "\n"


GAP, LEAST = 2, 6  # between columns; characters to which a word may be broken where nothing else helps
NAMES = 2  # columns that say which row it is


def _folded(columns: Sequence[tuple[Column, list[str]]], width: int) -> str:
    """The table with cells broken between words, so that it fits the width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Folded
    from rich.text import Text

    table = Folded(box=box.HORIZONTALS, show_edge=True, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    widths = _widths([texts for _, texts in columns], width - GAP * len(columns) - 1)
    for (column, texts), cells in zip(columns, widths, strict=True):
        table.add_column(Text(texts[0]), justify="right" if column.right else "left", overflow="fold", width=cells)
    for row in zip(*(texts[1:] for _, texts in columns), strict=True):
        table.add_row(*map(Text, row))
    printed = io.StringIO()
    Console(width=width, file=printed, color_system=None).print(table)
    return printed.getvalue().rstrip("\n")


def _widths(columns: Sequence[list[str]], whole: int) -> list[int]:
    """Each column's width: its longest word at least, and what is left to those that lack least."""
    wanted = [max(map(_cells, texts)) for texts in columns]
    widths = [max((_cells(word) for text in texts for word in text.split()), default=1) for texts in columns]
    while sum(widths) > whole and (broken := [i for i, width in enumerate(widths) if width > LEAST]):
        # Names stand first; their words are broken last.
        widths[max(broken, key=lambda i: (i >= NAMES, widths[i]))] -= 1
    for index in sorted(range(len(widths)), key=lambda i: wanted[i] - widths[i]):
        widths[index] += max(0, min(wanted[index] - widths[index], whole - sum(widths)))
    return widths


def _cells(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _pad(text: str, width: int, right: bool) -> str:
    gap = " " * (width - _cells(text))
    return gap + text if right else text + gap


def missing(value: Any) -> bool:
    """Whether a value of a frame is none: None, NaN or pandas' NA."""
    # pandas' NA compares as NA, so it is told by its type; NaN is the value that isn't itself.
    return value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and math.isnan(value))
