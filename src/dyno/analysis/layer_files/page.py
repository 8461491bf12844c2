"""What was seen inside a model as one HTML page that is readable without a network."""

from __future__ import annotations

import html as escaping
from collections.abc import Sequence

from dyno.analysis.layer_files import layer_graph, tree_map
from dyno.analysis.layer_files.steps import Timeline
from dyno.analysis.presentation.export import export
from dyno.analysis.presentation.table import Table
from dyno.worker.facts.job import LayerGraph

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #dde2e9; --page: #f5f7f9; --card: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --soft: #a3adba; --line: #333d4a; --page: #12171d; --card: #1b222b; } }
body { margin: 0 auto; max-width: 1340px; padding: 1.2rem 1rem 3rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.box { background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .55rem; text-align: left; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; white-space: nowrap; } th button { all: unset; font-weight: 600; }
p.note { color: var(--soft); font-size: .88rem; margin: .3rem 0; overflow-wrap: anywhere; }
"""


def fragment(timelines: Sequence[Timeline], tables: Sequence[Table]) -> str:
    """Return the tree maps, then the tables."""
    return f"{tree_map.figures(timelines)}\n{export(tables, 'html')}"


def html(name: str, forms: Sequence[LayerGraph], timelines: Sequence[Timeline], tables: Sequence[Table]) -> str:
    """Return the whole page of times by layer: `fragment`, and a graph of the form of each timeline."""
    graphs = [layer_graph.graph(form, timeline) for form, timeline in zip(forms, timelines, strict=True)]
    figures = "\n".join(layer_graph.figure([each]) for each in graphs)
    return whole(f"Time by layer: {name}", f"{fragment(timelines, tables)}\n{figures}\n{layer_graph.scripts()}")


def whole(heading: str, body: str) -> str:
    """Return a page with that heading around the HTML of its body."""
    title = escaping.escape(heading)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<h1>{title}</h1>\n{body}\n</body></html>"
    )
