"""The explanation why one form of a model is faster than another, as a section and as a separate page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from dyno.analysis.inside import waterfall_chart
from dyno.analysis.inside.pairs import PairSide
from dyno.analysis.inside.waterfall import Estimates, Waterfall
from dyno.analysis.layer_files import layer_graph, page
from dyno.analysis.layer_files.steps import timelines
from dyno.analysis.presentation.export import export
from dyno.analysis.presentation.table import Table
from dyno.analysis.style import laid_out, svg

PREFIX = "waterfall"  # of the ids in a chart, which may stand in a page with others


def chart(waterfall: Waterfall, prefix: str = PREFIX) -> str:
    """Return the waterfall as an <svg> element."""
    figure = waterfall_chart.draw(waterfall)
    return svg(figure, prefix, laid_out(figure))


def fragment(waterfall: Waterfall, tables: Sequence[Table], sentences: Sequence[str], prefix: str = PREFIX) -> str:
    """Return the chart, the tables and the sentences as a part of a page."""
    listed = "".join(f"<li>{escape(sentence)}</li>\n" for sentence in sentences)
    return f"{chart(waterfall, prefix)}\n{export(tables, 'html')}\n<ul>\n{listed}</ul>\n"


def graphs(waterfall: Waterfall) -> str:
    """Draw the layers of both forms side by side, by their times in the waterfall; selecting one shows its counterpart.

    The page needs `layer_graph.scripts` once.
    """
    sides, estimates = waterfall.pair.sides, (waterfall.a, waterfall.b)
    parts = [{layer: number for number, part in enumerate(waterfall.parts) for layer in (part.a, part.b)[k]}
             for k in range(2)]  # fmt: skip
    return layer_graph.figure([_build_graph(waterfall, *each) for each in zip(sides, estimates, parts, strict=True)])


def _build_graph(waterfall: Waterfall, side: PairSide, times: Estimates, parts: dict[int, int]) -> dict[str, object]:
    modules = {side.form: side.module} if side.module is not None else {}
    (bare,) = timelines(waterfall.pair.forms, waterfall.pair.graph_of, modules, {}, [side.form])
    seconds = times.layers[:1, [step.index for step in bare.steps]]
    form = waterfall.pair.forms[side.form]
    return layer_graph.graph(form, replace(bare, seconds=seconds, own=True), parts)


def html(waterfall: Waterfall, tables: Sequence[Table], sentences: Sequence[str]) -> str:
    """Return the whole page: the fragment and the graphs."""
    a, b = waterfall.pair.titles
    body = f"{fragment(waterfall, tables, sentences)}\n{graphs(waterfall)}\n{layer_graph.scripts()}"
    return page.whole(f"From {a} to {b}", body)
