"""What became of each node of an ONNX graph, as notes at the node: its layer, the types it ran in, and its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dyno.analysis.formatting import counting
from dyno.analysis.inside import align
from dyno.analysis.inside.times import turned
from dyno.analysis.layer_files.steps import Timeline
from dyno.worker.facts.job import LayerGraph

UNITS = ("µs", "%")
UNKNOWN = "no layer is known for it: folded, or not run by itself"


@dataclass
class Note:
    """The notes on one node: a line for each layer that it became, and its facts by name."""

    lines: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def add(self, title: str, about: Mapping[str, str], nodes: int) -> None:
        """Add a layer of the form of that title, which stands for `nodes` nodes.

        Facts of a form's further layers are behind those of its first.
        """
        stands = {"stands for": counting(nodes, "node")} if nodes > 1 else {}
        for name, text in {**about, **stands}.items():
            key = f"{title}: {name}"
            self.facts[key] = f"{self.facts[key]}; {text}" if key in self.facts else text
        parts = [about.get("layer", ""), about.get("type", ""), about.get("computes in", "")]
        parts += [f"{name.removesuffix(f', {unit}')} {about[name]} {unit}" for unit in UNITS for name in about
                  if name.endswith(f", {unit}")]  # fmt: skip
        parts += [f"for {text}" for text in stands.values()]
        self.lines.append(f"{title}: {', '.join(filter(None, parts))}")


def notes(
    forms: Sequence[LayerGraph], graph: int, timelines: Mapping[int, Timeline], module: int | None = None
) -> list[Note]:
    """Build a note for each node of the graph.

    It describes the forms in `timelines` that were made from the graph, and the `module` that the graph was made from.
    A layer that stands for several nodes has its whole time at each of them, with their number.
    """
    notes_of = [Note() for _ in forms[graph].layers]
    for k, timeline in timelines.items():
        if k == module:
            layers_of = turned(align.link(forms, k, graph))
        else:
            layers_of = {node: sorted(own) for node, own in align.link(forms, graph, k).pairs.items()}
        place = {step.index: at for at, step in enumerate(timeline.steps)}
        nodes = Counter(i for own in layers_of.values() for i in own)
        for node, note in enumerate(notes_of):
            ran = [i for i in layers_of.get(node, ()) if i in place]
            for i in ran:
                note.add(timeline.title, timeline.about(place[i]), nodes[i])
            if not ran:
                note.lines.append(f"{timeline.title}: {UNKNOWN}")
    return notes_of
