"""Layers of a model as one HTML page that works offline."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from types import MappingProxyType
from typing import Any

from dyno.formatting import format_count, show
from dyno.layers import pairs, reasons
from dyno.layers.align import Flow
from dyno.layers.graph_files import Timeline, build_timelines
from dyno.layers.pairs import PairSide
from dyno.layers.waterfall import Estimates, Waterfall, draw_waterfall, list_waterfall_tables, make_waterfall
from dyno.report.export import make_list, make_page, make_parts
from dyno.report.sections import ExplanationSection
from dyno.report.style import COLORS, laid_out, render_svg
from dyno.results.trial_result import Results
from dyno.table import Table
from dyno.worker.facts.job import MODULES, LayerGraph
from dyno.worker.spec import UserError

# Graphs of one or two forms in a page: a box per layer, coloured by its share of the time.
#
# Cytoscape.js draws them and dagre lays them out (both MIT). The page holds both scripts and the graphs as JSON, and
# loads nothing.

SCRIPTS = ("cytoscape.min.js", "cytoscape-dagre.min.js", "layer_graph.js")
GRAPH_STYLE, TREE_STYLE = "layer_graph.css", "tree_map.css"
MAX_LAYERS = 3000  # layers that a browser lays out within seconds
NO_PARTS: Mapping[int, int] = MappingProxyType({})


def draw_graph(form: LayerGraph, timeline: Timeline, parts: Mapping[int, int] = NO_PARTS) -> dict[str, Any]:
    """Build a form's graph for the page: a node per step of its timeline, and an edge to each reader.

    `parts` maps layers to parts of the model; the numbers are shared with the graph next to it.
    """
    total, largest = float(timeline.medians.sum()), float(timeline.medians.max(initial=0.0))
    nodes: list[dict[str, Any]] = []
    for index, (step, seconds) in enumerate(zip(timeline.steps, timeline.medians.tolist(), strict=True)):
        node = {
            "id": step.index, "type": step.layer.type.rpartition(".")[2] or step.stack[-1],
            "name": step.modules[0] if step.modules else "", "about": timeline.describe_step(index),
        }  # fmt: skip
        if step.index in parts:
            node["part"] = parts[step.index]
        if total:
            node |= {"heat": round(seconds / largest, 4), "share": round(100 * seconds / total, 2)}
        nodes.append(node)
    return {"title": timeline.title, "nodes": nodes, "edges": _find_edges(form, {node["id"] for node in nodes})}


def _find_edges(form: LayerGraph, visible: set[int]) -> list[tuple[int, int]]:
    """Return pairs of layers, writer and reader, connected directly or through hidden layers."""
    flow = Flow(form.layers)
    sources: list[list[int]] = []
    for index in flow.forwards:
        writers = [source for before in flow.before[index] for source in
                   ([before] if before in visible else sources[before] if before < index else [])]  # fmt: skip
        sources.append(list(dict.fromkeys(writers)))
    edges = [(source, index) for index in flow.forwards if index in visible for source in sources[index]]
    return edges + _find_return_edges(form, {source for source, _ in edges}) if form.form == MODULES else edges


def _find_return_edges(form: LayerGraph, read_calls: set[int]) -> list[tuple[int, int]]:
    """Return edges from calls with unread results to the call around them, as its own code uses the results."""
    index_of = {layer.name: index for index, layer in enumerate(form.layers)}
    pairs = ((index, index_of.get(layer.name.rpartition(".")[0])) for index, layer in enumerate(form.layers))
    return [(index, call) for index, call in pairs if call is not None and index not in read_calls and index != call]


def draw_graphs(graphs: Sequence[Mapping[str, Any]]) -> str:
    """Draw the graphs side by side, laid out when opened. The page needs `graph_scripts` once."""
    drawable = [graph for graph in graphs if graph["nodes"] and len(graph["nodes"]) <= MAX_LAYERS]
    if not drawable:
        return ""
    counts = ", ".join(f"{graph['title']}, {format_count(len(graph['nodes']), 'layer')}" for graph in drawable)
    content = json.dumps(drawable, separators=(",", ":")).replace("<", "\\u003c")  # no text may end the element
    return (
        f'<details class="layer-graph"><summary>{html.escape(f"Graph of the layers: {counts}")}</summary>\n'
        '<p class="tools"><input type="search" placeholder="conv, layer1.0 …" aria-label="Show layers that contain '
        'these words"> <button type="button" data-do="slowest">to the slowest</button> <button type="button" '
        'data-do="whole">the whole graph</button></p>\n<div class="graphs"></div>\n'
        '<p class="about">The more time a layer takes, the darker it is. Select one to see what is known of it'
        f"{', and its counterpart' if len(drawable) > 1 else ''}; drag to move, turn the wheel to zoom.</p>\n"
        f'<script type="application/json">{content}</script>\n</details>'
    )


def graph_scripts() -> str:
    """Return the style and scripts for graphs; a page needs them once, at its end."""
    elements = "\n".join(f"<script>\n{_read_file(name)}</script>" for name in SCRIPTS)
    return f"<style>{_read_file(GRAPH_STYLE)}</style>\n{elements}"


def _read_file(name: str) -> str:
    return (resources.files("dyno.layers") / "graph" / name).read_text(encoding="utf-8")


# Tree map of a form: nested modules, each as large as its share of the time.

PAGE_WIDTH, PAGE_HEIGHT = 1200.0, 560.0  # layout size in pixels; a browser scales it
HEADING_HEIGHT, BORDER = 20.0, 2.0  # pixels of a module's heading and border
MIN_WIDTH, MIN_HEIGHT = 34.0, 44.0  # smaller modules stay closed
PALETTE = tuple(
    COLORS[name] for name in ("onnxruntime", "compile", "openvino", "torch_tensorrt", "tensorrt", "pytorch")
)
OTHER_COLOUR = COLORS["fake"]
OWN_LAYERS = "itself"


@dataclass
class TreeMapNode:
    """A module, or a layer if it has no parts; `seconds` include the parts' seconds, `type` is a layer's operator."""

    name: str
    seconds: float = 0.0
    type: str = ""
    title: str = ""
    parts: list[TreeMapNode] = field(default_factory=list)


def build_tree(timeline: Timeline) -> TreeMapNode:
    """Build the tree of the model's parts; a module's own code is a part named `itself`."""
    root = TreeMapNode("(model)")
    by_name: dict[tuple[str, ...], TreeMapNode] = {(): root}
    for index, (step, seconds) in enumerate(zip(timeline.steps, timeline.medians.tolist(), strict=True)):
        path = step.stack[1:]
        for depth in range(1, len(path) + 1):
            if path[:depth] not in by_name:
                by_name[path[:depth]] = TreeMapNode(path[depth - 1])
                by_name[path[: depth - 1]].parts.append(by_name[path[:depth]])
        title = "\n".join(f"{name}: {text}" for name, text in timeline.describe_step(index).items())
        leaf = TreeMapNode(OWN_LAYERS, seconds, step.layer.type, title)
        by_name[path].parts.append(leaf)
        for depth in range(len(path) + 1):
            by_name[path[:depth]].seconds += seconds
    return _simplify_node(root)


def _simplify_node(node: TreeMapNode) -> TreeMapNode:
    """Drop the parts that took no time, and merge a node with its only part: the result has both names."""
    node.parts = [_simplify_node(part) for part in node.parts if part.seconds > 0]
    if all(part.name == OWN_LAYERS for part in node.parts):  # several calls of a module without parts
        node.parts = [replace(part, name=part.type) for part in node.parts]
    if len(node.parts) != 1:
        return node
    (child,) = node.parts
    name = node.name if child.name in (OWN_LAYERS, child.type) else child.name
    return TreeMapNode(name, child.seconds, child.type, child.title, child.parts)


def draw_tree_maps(timelines: Sequence[Timeline]) -> str:
    """Return the tree map of each form as self-contained HTML; hovering over a box shows its details."""
    figures = "\n".join(_draw_figure(timeline) for timeline in timelines)
    return f"<style>{_read_file(TREE_STYLE)}</style>\n{figures}"


def _draw_figure(timeline: Timeline) -> str:
    root = build_tree(timeline)
    by_type: Counter[str] = Counter()
    for step, seconds in zip(timeline.steps, timeline.medians.tolist(), strict=True):
        by_type[step.layer.type] += seconds
    kinds = {name: color for (name, _), color in zip(by_type.most_common(), PALETTE, strict=False)}
    legend = "".join(_write_entry(name, by_type[name], root.seconds, color) for name, color in kinds.items())
    if rest := root.seconds - sum(by_type[name] for name in kinds):
        legend += _write_entry("others", rest, root.seconds, OTHER_COLOUR) if len(by_type) > len(kinds) else ""
    steps = format_count(len(timeline.steps), "layer")
    groups = "module" if any(step.modules for step in timeline.steps) else "operator"
    caption = f"{timeline.title}: time by {groups}, {show(root.seconds, 'duration')} in {steps}"
    area = _draw_area(root.parts, "", PAGE_WIDTH, PAGE_HEIGHT, root.seconds, kinds)
    return (
        f'<figure class="tree-map"><figcaption>{html.escape(caption)}<div class="legend">{legend}</div></figcaption>\n'
        f'<div class="scroll"><div class="area">{area}</div></div></figure>'
    )


def _write_entry(name: str, seconds: float, total: float, color: str) -> str:
    share = f"{100 * seconds / (total or 1.0):.1f} %"
    return f'<b style="--kind: {color}; font-weight: 400"><i></i>{html.escape(name)} {share}</b>'


def lay_out_boxes(
    nodes: Sequence[TreeMapNode], width: float, height: float
) -> Iterator[tuple[TreeMapNode, dict[str, float]]]:
    """Yield the nodes, largest first, each with its near-square box in an area of `width` by `height` pixels.

    A box has the corner `x`, `y` and the lengths `dx`, `dy` in pixels. Method: Bruls, Huizing and van Wijk, "Squarified
    treemaps" (2000); library: squarify.
    """
    import squarify

    ordered = sorted((node for node in nodes if node.seconds > 0), key=lambda node: -node.seconds)
    sizes = squarify.normalize_sizes([node.seconds for node in ordered], width, height)
    yield from zip(ordered, squarify.squarify(sizes, 0, 0, width, height), strict=True)


def _draw_area(
    nodes: Sequence[TreeMapNode], parent: str, width: float, height: float, total: float, kinds: Mapping[str, str]
) -> str:
    """Draw the nodes inside the module `parent` in an area of `width` by `height` pixels."""
    boxes = []
    for node, box in lay_out_boxes(nodes, width, height):
        share = f"{show(node.seconds, 'duration')}, {100 * node.seconds / total:.1f} %"
        title = html.escape("\n".join(filter(None, (f"{node.name}: {share}", node.title))))
        x, y = 100 / width, 100 / height
        style = f"left:{x * box['x']:.3f}%;top:{y * box['y']:.3f}%;width:{x * box['dx']:.3f}%"
        style += f";height:{y * box['dy']:.3f}%"
        name = html.escape(node.name.removeprefix(f"{parent}."))
        if node.parts and box["dx"] >= MIN_WIDTH and box["dy"] >= MIN_HEIGHT:
            inner_size = box["dx"] - 2 * BORDER, box["dy"] - HEADING_HEIGHT - BORDER
            content = f'<div class="inside">{_draw_area(node.parts, node.name, *inner_size, total, kinds)}</div>'
            label = f"<span>{name}: {share}</span>{content}"
            boxes.append(f'<div class="module" style="{style}" title="{title}">{label}</div>')
        else:
            color = "" if node.parts else f";--kind:{kinds.get(node.type, OTHER_COLOUR)}"
            boxes.append(f'<div style="{style}{color}" title="{title}"><span>{name}</span><span>{share}</span></div>')
    return "".join(boxes)


def profile_fragment(timelines: Sequence[Timeline], tables: Sequence[Table]) -> str:
    """Return the tree maps, then the tables."""
    return f"{draw_tree_maps(timelines)}\n{make_parts(tables)}"


def profile_html(name: str, forms: Sequence[LayerGraph], timelines: Sequence[Timeline], tables: Sequence[Table]) -> str:
    """Return the whole page of times by layer: the fragment, and the graph of each form."""
    graphs = [draw_graph(form, timeline) for form, timeline in zip(forms, timelines, strict=True)]
    figures = "\n".join(draw_graphs([graph]) for graph in graphs)
    body = f"{profile_fragment(timelines, tables)}\n{figures}"
    return make_page(f"Time by layer: {name}", body, graph=graph_scripts())


# Explanation of a pair as a section and as a separate page.

ID_PREFIX = "waterfall"  # prefix of a chart's ids, unique on a page with several charts


def draw_explained_chart(waterfall: Waterfall, prefix: str = ID_PREFIX) -> str:
    """Return the waterfall as an <svg> element."""
    figure = draw_waterfall(waterfall)
    return render_svg(figure, prefix, laid_out(figure))


def make_explained_fragment(
    waterfall: Waterfall, tables: Sequence[Table], sentences: Sequence[str], prefix: str = ID_PREFIX
) -> str:
    """Return the chart, the tables and the sentences as a part of a page."""
    return f"{draw_explained_chart(waterfall, prefix)}\n{make_parts(tables)}\n{make_list(sentences)}"


def draw_explained_graphs(waterfall: Waterfall) -> str:
    """Draw the layers of both forms side by side, coloured by time; selecting one shows its counterpart.

    The page needs `graph_scripts` once.
    """
    sides, estimates = waterfall.pair.sides, (waterfall.a, waterfall.b)
    parts = [{layer: part_index for part_index, part in enumerate(waterfall.parts) for layer in (part.a, part.b)[k]}
             for k in range(2)]  # fmt: skip
    return draw_graphs([_build_graph(waterfall, *each) for each in zip(sides, estimates, parts, strict=True)])


def _build_graph(waterfall: Waterfall, side: PairSide, times: Estimates, parts: dict[int, int]) -> dict[str, object]:
    (timeline,) = build_timelines(waterfall.pair.form_set, {}, [side.form])
    seconds = times.layers[:1, [step.index for step in timeline.steps]]
    form = waterfall.pair.forms[side.form]
    return draw_graph(form, replace(timeline, seconds=seconds, is_exclusive=True), parts)


def make_explained_page(waterfall: Waterfall, tables: Sequence[Table], sentences: Sequence[str]) -> str:
    """Return the whole page: the fragment and the graphs."""
    a, b = waterfall.pair.titles
    fragment, graphs = make_explained_fragment(waterfall, tables, sentences), draw_explained_graphs(waterfall)
    return make_page(f"From {a} to {b}", f"{fragment}\n{graphs}", graph=graph_scripts())


# Pairs explained by `dyno explain RUN A B`, as sections of the run's page.

LISTED_PARTS = 20  # parts of the model listed


def explained_section(results: Results, prefix: str) -> list[ExplanationSection]:
    """Return the sections of stored pairs that are still in the run; `prefix` begins the ids in their charts."""
    from markupsafe import Markup

    names = {trial.id: f"{trial.configuration}, {trial.model} at batch {trial.batch}" for trial in results}
    sections = []
    for pair_index, (path, a, b) in enumerate(pairs.list_stored_pairs(results.folder)):
        if a not in names or b not in names:
            continue
        title = f"from {names[a]} to {names[b]}"
        try:
            waterfall = make_waterfall(pairs.read_pair(path))
        except (OSError, ValueError, UserError) as e:
            sections.append(ExplanationSection(title, "", f"{path.name} can't be read ({e}); explain the pair again"))
            continue
        sentences = [reason.text for reason in reasons.list_reasons_why(waterfall)]
        tables = list_waterfall_tables(waterfall, LISTED_PARTS)
        fragment = make_explained_fragment(waterfall, tables, sentences, f"{prefix}-why{pair_index}")
        sections.append(ExplanationSection(title, Markup(f"{fragment}\n{draw_explained_graphs(waterfall)}")))
    return sections
