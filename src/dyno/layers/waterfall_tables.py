"""The waterfall from A to B as tables: a row for each cause, and one for each part of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dyno.formatting import counting, short, significant
from dyno.layers import pairs
from dyno.layers.tables import names_cell
from dyno.layers.waterfall import Waterfall, WaterfallStep
from dyno.report.style import INK, WIDTH, styled
from dyno.report.table_kind import TableKind
from dyno.table import COUNT, PERCENT, TEXT, Column, Row, Table

WATERFALL = TableKind("waterfall", "From A to B", "The steps from the latency of A to that of B, a row for each cause.",
                      command="dyno explain")  # fmt: skip
PARTS = TableKind("explained", "Part by part", "What each part of the model takes in A and in B, and why that differs.",
                  command="dyno explain")  # fmt: skip


def signed(value: float) -> str:
    """Format a number with its sign: +310, −12.4, 0."""
    return significant(value) if not value or value != value else ("+" if value > 0 else "−") + significant(abs(value))


def _format_difference(row: Row) -> str:
    value, low, high = (row.get(name) for name in ("difference_us", "difference_us_low", "difference_us_high"))
    if value is None:
        return ""
    return signed(value) if low is None or high is None else f"{signed(value)} [{signed(low)}, {signed(high)}]"


TIMES = (
    Column("a_us", "seconds in A, in microseconds", "µs", title="A, µs"),
    Column("b_us", "seconds in B, in microseconds", "µs", title="B, µs"),
    Column("difference_us", "B less A with its 95 % interval", "µs", title="B − A, µs", cell=_format_difference),
    Column("difference_us_low", "lower end of the interval", "µs", cell=lambda row: ""),
    Column("difference_us_high", "upper end of the interval", "µs", cell=lambda row: ""),
    Column("share", "share of the whole difference", "%", PERCENT, title="share, %"),
)


def list_waterfall_tables(waterfall: Waterfall, top: int) -> list[Table]:
    """Build tables of the causes and of the `top` parts (0: all) with the largest differences, the rest in one row."""
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
    last = {"cause": f"B: {title_b}", **_make_time_cells(waterfall, gap), "reached_us": 1e6 * gap.b}
    rows.append({**last, "a_us": None})
    columns = (
        Column("cause", "why these parts take another time", kind=TEXT),
        Column("key", "the cause's name for programs", kind=TEXT, cell=lambda row: ""),
        Column("parts", "parts of the model with this cause", kind=COUNT, rank=2),
        *TIMES,
        Column("reached_us", "the latency after this step", "µs", title="latency, µs", rank=1),
    )
    return WATERFALL.of(columns, rows, notes=_write_notes(waterfall))


def _write_notes(waterfall: Waterfall) -> tuple[str, ...]:
    rounds = len(waterfall.pair.a.processes)
    process, spread = (
        ("one process", "repeats within it; another process may differ")
        if rounds == 1
        else (f"{rounds} processes", "processes")
    )
    sides = list(zip(waterfall.pair.titles, waterfall.pair.sides, strict=True))
    notes = [f"Medians over {process} of each side; the intervals are from the {spread}.", *waterfall.pair.notes]
    notes += [f"{title} in the run: {significant(1e3 * side.stored)} ms." for title, side in sides if side.stored]
    notes += [note for side in waterfall.pair.sides for note in waterfall.pair.forms[side.form].notes]
    notes += [f"{title}: {warning}" for title, side in sides for warning in pairs.list_pair_warnings(side)]
    return tuple(dict.fromkeys(notes))


def _make_time_cells(waterfall: Waterfall, step: WaterfallStep) -> Row:
    value = step.difference
    return {
        "a_us": 1e6 * step.a, "b_us": 1e6 * step.b, "difference_us": 1e6 * value.value,
        "difference_us_low": 1e6 * value.low, "difference_us_high": 1e6 * value.high,
        "share": _compute_share(waterfall, value.value),
    }  # fmt: skip


def _compute_share(waterfall: Waterfall, seconds: float) -> float | None:
    """Return the seconds as percent of the difference; None where no difference is shown."""
    return 100 * waterfall.share(seconds) + 0.0 if waterfall.gap.proven else None


def by_part(waterfall: Waterfall, top: int) -> Table:
    """Build rows for the `top` parts of the model (0: all), the largest differences first, and one for the rest."""
    order = sorted(range(len(waterfall.parts)), key=lambda k: -abs(waterfall.steps[k].difference.value))
    rows = [_make_row(waterfall, k) for k in order[: top or None]]
    if rest := order[len(rows) :]:
        steps = [waterfall.steps[k] for k in rest]
        a, b = sum(s.a for s in steps), sum(s.b for s in steps)
        rows.append({"modules": counting(len(rest), "more part"), "modules_names": [counting(len(rest), "more part")],
                     "a_us": 1e6 * a, "b_us": 1e6 * b, "difference_us": 1e6 * (b - a),
                     "share": _compute_share(waterfall, b - a)})  # fmt: skip
    columns = (
        Column("modules", "the model's own modules, else nodes or layers", kind=TEXT, cell=names_cell("modules")),
        Column("cause", "why it takes another time", kind=TEXT),
        Column(
            "layers_a", "kinds of its layers in A, and the type that they compute in", kind=TEXT, title="in A", rank=2
        ),
        Column(
            "layers_b", "kinds of its layers in B, and the type that they compute in", kind=TEXT, title="in B", rank=2
        ),
        *TIMES,
        Column("kernels_a", "kernels or providers in A", kind=TEXT, title="kernel in A", rank=4),
        Column("kernels_b", "kernels or providers in B", kind=TEXT, title="kernel in B", rank=3),
    )
    return PARTS.of(columns, rows)


def _make_row(waterfall: Waterfall, k: int) -> Row:
    part, step = waterfall.parts[k], waterfall.steps[k]
    row: Row = {"modules": " ".join(part.names), "modules_names": list(part.names), "cause": part.cause.title}
    if part.before:
        row["modules_names"] = [f"{part.names[0]} before {part.before}"]
    for name, side, own, kind in zip("ab", waterfall.pair.sides, (part.a, part.b), part.types, strict=True):
        layers = [waterfall.pair.forms[side.form].layers[i] for i in own]
        row[f"layers_{name}"] = " ".join(filter(None, (_format_counts([each.type for each in layers]), kind)))
        row[f"kernels_{name}"] = _format_counts([each.tactic for each in layers if each.tactic])
    return row | _make_time_cells(waterfall, step)


def _format_counts(names: Sequence[str]) -> str:
    """Return the names, each with its count: `2 Mul, Conv`."""
    counted: Callable[[str, int], str] = lambda name, n: f"{n} {name}" if n > 1 else name  # noqa: E731
    return ", ".join(counted(name.rpartition(".")[2], n) for name, n in Counter(names).items())


# The waterfall from A to B as a chart: both latencies, and between them a bar for each cause.

ROW, EDGE = 0.34, 0.9  # inches of a bar, and of what is above and below the bars
LONGEST = 52  # characters of a name on the axis
LESS, MORE, REST = "#009E73", "#D55E00", "#8A8A8A"  # shorter, longer, and time outside the layers


def draw_waterfall(waterfall: Waterfall) -> Any:
    """Draw a matplotlib Figure: microseconds from A's latency (above) to B's, green where B takes less.

    Hatched steps aren't layers of the model; whiskers are the 95 % intervals of a step's own difference.
    """
    steps = [step for step in waterfall.causes if step.a or step.b]
    with styled() as figure_class:
        figure = figure_class((WIDTH, ROW * (len(steps) + 2) + EDGE), layout="constrained")
        axes = figure.add_subplot()
        names = [
            f"A: {waterfall.pair.titles[0]}",
            *(step.cause.title for step in steps),
            f"B: {waterfall.pair.titles[1]}",
        ]
        texts = [_draw_whole(axes, 0, waterfall.gap.a)]
        reached = 1e6 * waterfall.gap.a
        corners = [reached]
        for y, step in enumerate(steps, 1):
            value = 1e6 * step.difference.value
            tone = REST if not step.cause.region else LESS if value < 0 else MORE
            hatch = "" if step.cause.region else "//"
            axes.barh(y, value, 0.66, left=reached, color=tone, hatch=hatch, edgecolor="white", linewidth=0)
            limits = [reached + 1e6 * end for end in (step.difference.low, step.difference.high)]
            axes.plot(limits, [y, y], color=INK, lw=1.1, marker="|", ms=5)
            axes.plot([reached, reached], [y - 1, y], color=INK, lw=0.6)
            texts.append(signed(value))
            reached += value
            corners.append(reached)
        axes.plot([reached, reached], [len(steps), len(steps) + 1], color=INK, lw=0.6)
        texts.append(_draw_whole(axes, len(steps) + 1, waterfall.gap.b))
        axes.set_yticks(range(len(names)), [short(name, LONGEST) for name in names])
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
    return signed(1e6 * seconds).removeprefix("+")
