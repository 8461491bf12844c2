"""One formatter for every printed number, chosen by a measurement's hint and nothing else."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from dyno.worker.spec import clean_text as clean_text
from dyno.worker.system import can_draw

MAX_LINE_LENGTH = 100_000  # characters of a line in a file or a pipe
DURATION_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
MAX_INTERVAL_RATIO = 2.0  # largest ratio of limits; of wider intervals only the useful limit is printed
UNCLEAR_WORD = "unclear"
FORMULA_PREFIXES = ("=", "+", "-", "@")  # prefixes that a spreadsheet evaluates as a formula
TRAILING_COMMAND = re.compile(r"(?<=: )dyno .+$")  # a command at the end of a sentence
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
NUMERAL = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)
BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def find_width() -> int:
    """Return the characters per line: COLUMNS, the terminal's width, or MAX_LINE_LENGTH in a file or a pipe."""
    is_known = os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_known else MAX_LINE_LENGTH


def format_bold(text: str) -> str:
    """Return the text in bold for a terminal; unchanged for a file or a pipe, or with NO_COLOR."""
    return f"\x1b[1m{text}\x1b[0m" if can_draw(sys.stdout) and not os.environ.get("NO_COLOR") else text


def wrap_text(text: str) -> str:
    """Wrap the text between words into lines that fit; later lines are indented by two more than the first.

    A command at its end stays in one piece, to be copied.
    """
    indent = read_indentation(text)
    content = TRAILING_COMMAND.sub(lambda match: match[0].replace(" ", NO_BREAK_SPACE), clean_text(text))
    return textwrap.fill(content, find_width(), initial_indent=indent, subsequent_indent=f"{indent}  ",
                         break_long_words=False, break_on_hyphens=False).replace(NO_BREAK_SPACE, " ")  # fmt: skip


def read_indentation(text: str) -> str:
    """Return the spaces in front of a text."""
    return text[: len(text) - len(text.lstrip(" "))]


def make_console() -> Any:
    """Return a rich console as wide as `find_width()`."""
    from rich.console import Console

    return Console(width=find_width())


def format_number(value: float, digits: int = 3) -> str:
    """Format a number to `digits` significant digits, in powers of ten below 1e-4 and from 1e12 on: 0.813, 1,020."""
    if not math.isfinite(value):
        return "" if math.isnan(value) else str(value)
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    if not 1e-4 <= abs(rounded) < 1e12:
        return f"{rounded:.{digits - 1}e}"
    # Rounding may have carried into the next decade (0.9996 -> 1.00), which costs a decimal place.
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(0, places)}f}"


def show(value: float | None, hint: str, digits: int = 3) -> str:
    """Format a value in SI units with a unit that suits its size; `hint` as in Measurement, "" for None or NaN.

    `percentage` takes a share (0.5 is 50 %).
    """
    if value is None or math.isnan(value):
        return ""
    if hint == "duration":
        return _format_minutes(value) if value >= 120 else _format_scaled(value, DURATION_UNITS, digits)
    if hint == "bytes":
        return _format_scaled(value, BYTE_UNITS, digits)
    if hint == "percentage":
        return f"{format_number(100 * value, digits)} %"
    if hint == "count":
        return f"{value:,.0f}"
    return format_number(value, digits) + ("/s" if hint == "rate" else "")


def _format_scaled(value: float, units: tuple[tuple[float, str], ...], digits: int) -> str:
    scale, unit = next(((s, u) for s, u in units if abs(value) >= s), units[-1])
    return f"{format_number(value / scale, digits)} {unit}"


def _format_minutes(seconds: float) -> str:
    total = round(seconds)
    return f"{total // 60} min {total % 60} s" if total < 7200 else f"{total / 3600:.1f} h"


def is_bounded(low: float, high: float) -> bool:
    """Return whether an interval of a positive value (a ratio, a time, a rate) spans at most a factor of two."""
    return 0 < low <= high <= MAX_INTERVAL_RATIO * low


def format_limits(low: float, high: float, format_value: Callable[[float], str]) -> str:
    """Return a suffix for a value: ` [1.9, 2.3]`, ` [at least 1.9]` for a wide interval, "" without one."""
    if math.isnan(low) or math.isnan(high):
        return ""
    if is_bounded(low, high):
        return f" [{format_value(low)}, {format_value(high)}]"
    return f" [at least {format_value(low)}]" if low > 0 else f" [{UNCLEAR_WORD}]"


def format_ratio(value: float, low: float, high: float) -> str:
    """Return `2.10x [1.90, 2.30]`, `2.10x` without an interval, the limit of a wide one, and UNCLEAR_WORD for NaN."""
    if value != value:
        return UNCLEAR_WORD
    if low == low and not is_bounded(low, high):
        return format_bound(low, high)
    return f"{value:.2f}x{format_limits(low, high, lambda v: f'{v:.2f}')}"


def describe_time(ratio: str, time: str = "time") -> str:
    """Return a clause on B's `time` against A's, with the ratio as formatted by `format_ratio`."""
    return (
        f"the ratio of B's {time} to A's is {UNCLEAR_WORD}" if ratio == UNCLEAR_WORD else f"B takes {ratio} A's {time}"
    )


def in_brackets(ratio: str) -> str:
    """Return ` (2.10x)` as the end of a sentence; "" for UNCLEAR_WORD."""
    return "" if ratio == UNCLEAR_WORD else f" ({ratio})"


def format_bound(low: float, high: float, low_prefix: str = "at least ", high_prefix: str = "at most ") -> str:
    """Return the useful limit of a ratio's wide interval: `at least 3.10x`, `at most 0.40x`, or UNCLEAR_WORD."""
    if low > 1 or (low >= 1 / MAX_INTERVAL_RATIO and high > MAX_INTERVAL_RATIO):
        return f"{low_prefix}{_round_down(low):.2f}x"
    if high < 1 or high <= MAX_INTERVAL_RATIO:
        return f"{high_prefix}{-_round_down(-high):.2f}x"
    return UNCLEAR_WORD


def short_bound(low: float, high: float) -> str:
    """Return `format_bound` for a table's cell: `≥3.10x`."""
    return format_bound(low, high, "≥", "≤")


def _round_down(value: float) -> float:
    """Round down to hundredths, so that a printed limit still holds."""
    return math.floor(value * 100) / 100


def format_moment(iso: str) -> str:
    """Format an ISO 8601 time as the reader's local date and time, to the minute; other text is returned unchanged."""
    try:
        return f"{datetime.fromisoformat(iso).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError):
        return iso


def format_points(share: float) -> str:
    """Format a difference of shares in signed percentage points: -0.28."""
    value = 100 * share
    return "0.00" if abs(value) < 0.005 else f"{value:+.2f}"


def images_tested(count: int, set_aside: int) -> str:
    """Describe the images behind an accuracy, and those left out: `42,872 of 43,000 images: 128 were …`."""
    if not set_aside:
        return format_count(count, "image")
    verb = "was" if set_aside == 1 else "were"
    return f"{count:,} of {count + set_aside:,} images: {set_aside:,} {verb} set aside for calibration"


def join_names(names: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), *names[-1:]] if len(names) > 1 else names)


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun: `1 trial`, `2,300 trials`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def shorten_text(text: object, max_length: int) -> str:
    """Return plain text of at most `max_length` characters; an ellipsis replaces the rest."""
    clean = clean_text(text)
    return clean if len(clean) <= max_length else clean[: max_length - 1] + "…"


def csv_cell(value: Any) -> Any:
    """Return a value for a cell of a CSV file; numbers are unchanged.

    Text that a spreadsheet would evaluate as a formula gets an apostrophe in front; control characters become spaces.
    """
    if not isinstance(value, str):
        return value
    text = clean_text(value)
    return f"'{text}" if text.startswith(FORMULA_PREFIXES) and not NUMERAL.fullmatch(text) else text


def escape_markdown(text: object) -> str:
    """Escape text for a Markdown table cell, so that nothing in it becomes a column, emphasis, a link or HTML."""
    escaped = re.sub(r"([\\`*\[\]|])", r"\\\1", clean_text(text))
    escaped = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", escaped)  # an underscore inside a word means nothing in Markdown
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("$", "&#36;")


def format_bullet(text: object) -> str:
    """Return a sentence as a Markdown list item; an indented sentence is nested below the previous item."""
    return f"{read_indentation(str(text))}- {escape_markdown(text)}"


NO_IMAGE = "0"  # size of a trial without image inputs; not shown


def format_size(size: str, prefix: str = ", size ") -> str:
    """Return the size after `prefix`; "" if inputs aren't images."""
    return "" if size == NO_IMAGE else f"{prefix}{size}"


def name_items(*sizes: str) -> str:
    """Return the unit of a throughput at these sizes: images, or inputs if some aren't images."""
    return "inputs" if NO_IMAGE in sizes else "images"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool]) -> str:
    """Build a table from cells in Markdown, padded for reading in a terminal; it ends with a line break."""
    lines = [list(head), *map(list, rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * (w - 1) + ":" if side else "-" * w for w, side in zip(widths, right, strict=True)]
    lines = [
        [c.rjust(w) if side else c.ljust(w) for c, w, side in zip(line, widths, right, strict=True)] for line in lines
    ]
    return "".join("| " + " | ".join(line) + " |\n" for line in (lines[0], rule, *lines[1:]))
