"""The tree map of a form: modules inside modules, each as large as its share of the time."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dyno.analysis.formatting import counting, show
from dyno.analysis.layer_files.steps import Timeline
from dyno.analysis.style import COLORS

WIDTH, HEIGHT = 1200.0, 560.0  # pixels for which boxes are laid out; a browser scales them
HEAD, EDGE = 20.0, 2.0  # pixels of a module's line with its name, and around what it holds
LEAST_WIDTH, LEAST_HEIGHT = 34.0, 44.0  # a smaller module isn't opened
PALETTE = tuple(
    COLORS[name] for name in ("onnxruntime", "compile", "openvino", "torch_tensorrt", "tensorrt", "pytorch")
)
OTHER = COLORS["fake"]
ITSELF = "itself"
STYLE = """
.tree-map { --card: #fff; --line: #b9c1cc; --ink: #1c2430; margin: 0 0 1.4rem; color: var(--ink);
  font: 12px/1.25 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { .tree-map { --card: #1b222b; --line: #4a5666; --ink: #e6eaf0; } }
.tree-map { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .7rem; }
.tree-map figcaption { font-size: 14px; margin: 0 0 .5rem; overflow-wrap: anywhere; }
.tree-map .legend { display: flex; flex-wrap: wrap; gap: .2rem .9rem; font-size: 12px; margin-top: .3rem; }
.tree-map .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; background: var(--kind); }
.tree-map .scroll { overflow-x: auto; }
.tree-map .area { position: relative; min-width: 640px; aspect-ratio: 1200 / 560; }
.tree-map .area div { position: absolute; box-sizing: border-box; overflow: hidden; white-space: nowrap;
  border: 1px solid var(--line); background: color-mix(in srgb, var(--kind, var(--card)) 38%, var(--card)); }
.tree-map .area div.module { background: var(--card); border-width: 2px; }
.tree-map .area div.inside { border: 0; background: none; inset: 20px 2px 2px 2px; }
.tree-map .area span { display: block; padding: 1px 4px; text-overflow: ellipsis; overflow: hidden; }
.tree-map .area div.module > span { font-weight: 600; }
"""


@dataclass
class TreeMapNode:
    """A module, or a layer where it has no parts; `seconds` includes those of its parts, `type` is a layer's."""

    name: str
    seconds: float = 0.0
    type: str = ""
    title: str = ""
    parts: list[TreeMapNode] = field(default_factory=list)


@dataclass(frozen=True)
class Box:
    """Where a node lies in its parent's area, in percent of it."""

    node: TreeMapNode
    left: float
    top: float
    width: float
    height: float


def tree(timeline: Timeline) -> TreeMapNode:
    """Build the tree of the model's parts; a module's own code, beside its parts, is a part named `itself`."""
    root = TreeMapNode("(model)")
    by_name: dict[tuple[str, ...], TreeMapNode] = {(): root}
    for at, (step, seconds) in enumerate(zip(timeline.steps, timeline.medians.tolist(), strict=True)):
        path = step.stack[1:]
        for depth in range(1, len(path) + 1):
            if path[:depth] not in by_name:
                by_name[path[:depth]] = TreeMapNode(path[depth - 1])
                by_name[path[: depth - 1]].parts.append(by_name[path[:depth]])
        about = "\n".join(f"{name}: {text}" for name, text in timeline.about(at).items())
        own = TreeMapNode(ITSELF, seconds, step.layer.type, about)
        by_name[path].parts.append(own)
        for depth in range(len(path) + 1):
            by_name[path[:depth]].seconds += seconds
    return _simplify_node(root)


def _simplify_node(node: TreeMapNode) -> TreeMapNode:
    """Drop the parts that took no time, and merge a node with its only part: the result has both names."""
    node.parts = [_simplify_node(part) for part in node.parts if part.seconds > 0]
    if all(part.name == ITSELF for part in node.parts):  # several calls of one that has no parts
        node.parts = [replace(part, name=part.type) for part in node.parts]
    if len(node.parts) != 1:
        return node
    (only,) = node.parts
    name = node.name if only.name in (ITSELF, only.type) else only.name
    return TreeMapNode(name, only.seconds, only.type, only.title, only.parts)


def figures(timelines: Sequence[Timeline]) -> str:
    """Return the tree map of each form as self-contained HTML; hovering over a box shows all that is known of it."""
    drawn = "\n".join(_draw_figure(timeline) for timeline in timelines)
    return f"<style>{STYLE}</style>\n{drawn}"


def _draw_figure(timeline: Timeline) -> str:
    root = tree(timeline)
    by_type: Counter[str] = Counter()
    for step, seconds in zip(timeline.steps, timeline.medians.tolist(), strict=True):
        by_type[step.layer.type] += seconds
    kinds = {name: color for (name, _), color in zip(by_type.most_common(), PALETTE, strict=False)}
    legend = "".join(_write_entry(name, by_type[name], root.seconds, color) for name, color in kinds.items())
    if rest := root.seconds - sum(by_type[name] for name in kinds):
        legend += _write_entry("others", rest, root.seconds, OTHER) if len(by_type) > len(kinds) else ""
    steps = counting(len(timeline.steps), "layer")
    groups = "module" if any(step.modules for step in timeline.steps) else "operator"
    caption = f"{timeline.title}: time by {groups}, {show(root.seconds, 'duration')} in {steps}"
    area = "".join(_draw_box(box, "", WIDTH, HEIGHT, root.seconds, kinds) for box in boxes(root.parts, WIDTH, HEIGHT))
    return (
        f'<figure class="tree-map"><figcaption>{html.escape(caption)}<div class="legend">{legend}</div></figcaption>\n'
        f'<div class="scroll"><div class="area">{area}</div></div></figure>'
    )


def _write_entry(name: str, seconds: float, total: float, color: str) -> str:
    share = f"{100 * seconds / (total or 1.0):.1f} %"
    return f'<b style="--kind: {color}; font-weight: 400"><i></i>{html.escape(name)} {share}</b>'


def boxes(nodes: Sequence[TreeMapNode], width: float, height: float) -> Iterator[Box]:
    """Yield the nodes, largest first, as near-square boxes that fill an area of `width` by `height` pixels.

    Bruls, Huizing and van Wijk, "Squarified treemaps" (2000), by the library squarify.
    """
    import squarify

    ordered = sorted((node for node in nodes if node.seconds > 0), key=lambda node: -node.seconds)
    sizes = squarify.normalize_sizes([node.seconds for node in ordered], width, height)
    for node, place in zip(ordered, squarify.squarify(sizes, 0, 0, width, height), strict=True):
        x, y = 100 / width, 100 / height
        yield Box(node, x * place["x"], y * place["y"], x * place["dx"], y * place["dy"])


def _draw_box(box: Box, around: str, width: float, height: float, total: float, kinds: Mapping[str, str]) -> str:
    """Draw a box in the module `around` it, whose area is `width` by `height` pixels."""
    node = box.node
    across, down = box.width / 100 * width, box.height / 100 * height
    share = f"{show(node.seconds, 'duration')}, {100 * node.seconds / total:.1f} %"
    title = html.escape("\n".join(filter(None, (f"{node.name}: {share}", node.title))))
    where = f"left:{box.left:.3f}%;top:{box.top:.3f}%;width:{box.width:.3f}%;height:{box.height:.3f}%"
    name = html.escape(node.name.removeprefix(f"{around}."))
    if node.parts and across >= LEAST_WIDTH and down >= LEAST_HEIGHT:
        inner = across - 2 * EDGE, down - HEAD - EDGE
        parts = "".join(_draw_box(part, node.name, *inner, total, kinds) for part in boxes(node.parts, *inner))
        head = f"<span>{name} {share}</span>"
        return f'<div class="module" style="{where}" title="{title}">{head}<div class="inside">{parts}</div></div>'
    color = "" if node.parts else f";--kind:{kinds.get(node.type, OTHER)}"
    return f'<div style="{where}{color}" title="{title}"><span>{name}</span><span>{share}</span></div>'
