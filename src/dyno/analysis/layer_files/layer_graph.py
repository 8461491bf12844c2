"""The layers of one or two forms as graphs in a page: a box for each layer, coloured by its share of the time.

Drawn by Cytoscape.js and laid out by dagre (both MIT), which lie in the page: it loads nothing. What is drawn is JSON.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

from dyno.analysis.formatting import counting
from dyno.analysis.inside.place import Flow
from dyno.analysis.layer_files.steps import Timeline
from dyno.worker.facts.job import MODULES, LayerGraph

SCRIPTS = ("cytoscape.min.js", "cytoscape-dagre.min.js", "layer_graph.js")
STYLE = "layer_graph.css"
MOST = 3000  # layers that a browser lays out in seconds
NO_PARTS: Mapping[int, int] = MappingProxyType({})


def graph(form: LayerGraph, timeline: Timeline, parts: Mapping[int, int] = NO_PARTS) -> dict[str, Any]:
    """Build a form's graph for the page: a node for each step of its timeline, an edge from each one to its readers.

    `parts` has the part of the model of each layer of the form: a number that the graphs beside it share.
    """
    total, most = float(timeline.medians.sum()), float(timeline.medians.max(initial=0.0))
    nodes: list[dict[str, Any]] = []
    for at, (step, seconds) in enumerate(zip(timeline.steps, timeline.medians.tolist(), strict=True)):
        module = step.modules[0] if step.modules else ""
        node = {
            "id": step.index,
            "type": step.layer.type.rpartition(".")[2] or step.stack[-1],
            "name": module,
            "about": timeline.about(at),
        }
        if step.index in parts:
            node["part"] = parts[step.index]
        if total:
            node |= {"heat": round(seconds / most, 4), "share": round(100 * seconds / total, 2)}
        nodes.append(node)
    return {"title": timeline.title, "nodes": nodes, "edges": _find_edges(form, {node["id"] for node in nodes})}


def _find_edges(form: LayerGraph, shown: set[int]) -> list[tuple[int, int]]:
    """Return pairs of layers of which the second reads the output of the first, directly or through hidden layers."""
    flow = Flow(form.layers)
    sources: list[list[int]] = []
    for index in flow.forwards:
        reached = [source for before in flow.before[index] for source in
                   ([before] if before in shown else sources[before] if before < index else [])]  # fmt: skip
        sources.append(list(dict.fromkeys(reached)))
    edges = [(source, index) for index in flow.forwards if index in shown for source in sources[index]]
    return edges + _find_return_edges(form, {source for source, _ in edges}) if form.form == MODULES else edges


def _find_return_edges(form: LayerGraph, read: set[int]) -> list[tuple[int, int]]:
    """Return edges from calls whose results no other call reads to the call around them, whose own code uses them."""
    around = {layer.name: index for index, layer in enumerate(form.layers)}
    pairs = ((index, around.get(layer.name.rpartition(".")[0])) for index, layer in enumerate(form.layers))
    return [(index, call) for index, call in pairs if call is not None and index not in read and index != call]


def figure(graphs: Sequence[Mapping[str, Any]]) -> str:
    """Draw the graphs side by side, folded: they are laid out when they are opened. The page needs `scripts` once."""
    shown = [each for each in graphs if each["nodes"] and len(each["nodes"]) <= MOST]
    if not shown:
        return ""
    counts = ", ".join(f"{each['title']}, {counting(len(each['nodes']), 'layer')}" for each in shown)
    return (
        f'<details class="layer-graph"><summary>{html.escape(f"Graph of the layers: {counts}")}</summary>\n'
        '<p class="tools"><input type="search" placeholder="conv, layer1.0 …" aria-label="Show layers that contain '
        'these words"> <button type="button" data-do="slowest">to the slowest</button> <button type="button" '
        'data-do="whole">the whole graph</button></p>\n<div class="graphs"></div>\n'
        '<p class="about">The more time a layer takes, the darker it is. Select one to see what is known of it'
        f"{', and its counterpart' if len(shown) > 1 else ''}; drag to move, turn the wheel to zoom.</p>\n"
        f'<script type="application/json">{_inside_script(shown)}</script>\n</details>'
    )


def scripts() -> str:
    """Return the style and scripts that a page with such figures needs once, at its end."""
    elements = "\n".join(f"<script>\n{_read_file(name)}</script>" for name in SCRIPTS)
    return f"<style>{_read_file(STYLE)}</style>\n{elements}"


def _inside_script(content: Any) -> str:
    """Encode JSON so that nothing in it ends the element around it."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def _read_file(name: str) -> str:
    return (resources.files("dyno.analysis.layer_files") / "graph" / name).read_text(encoding="utf-8")
