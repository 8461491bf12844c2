"""What became of each node of an ONNX graph, as notes at the node: its layer, the types it ran in, and its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dyno.analysis.formatting import counting
from dyno.analysis.inside import align
from dyno.analysis.inside.times import turned
from dyno.analysis.layer_files.steps import Timeline
from dyno.worker.facts.inside import MODULES, Inside

Notes = list[dict[str, str]]  # for each node of the graph, by the name of the note


def notes(forms: Sequence[Inside], graph: int, timelines: Mapping[int, Timeline], module: int | None = None) -> Notes:
    """The notes of the forms in `timelines` that were made from the graph, and of the `module` that it was made from.

    A layer that stands for several nodes has its whole time at each of them, and says for how many. A node of which no
    layer is known has only the note that says so.
    """
    found: Notes = [{} for _ in forms[graph].layers]
    for k, timeline in timelines.items():
        is_module = forms[k].form == MODULES
        if is_module and k != module:
            continue
        layers_of = turned(align.link(forms, k, graph)) if is_module else align.link(forms, graph, k).pairs
        place = {step.index: at for at, step in enumerate(timeline.steps)}
        many = {i: sum(i in own for own in layers_of.values()) for own in layers_of.values() for i in own}
        for node, entries in enumerate(found):
            for i in sorted(layers_of.get(node, ())):
                if i in place:
                    shared = {"of": f"{counting(many[i], 'node')} together"} if many[i] > 1 else {}
                    about = {**timeline.about(place[i]), **shared}
                    _add(entries, timeline.title, about)
            if not any(name.startswith(f"{timeline.title}: ") for name in entries):
                entries[f"{timeline.title}: layer"] = "none known: folded, or not run by itself"
    return found


def _add(entries: dict[str, str], title: str, about: Mapping[str, str]) -> None:
    """Notes of one more layer; those of further ones are behind those of the first."""
    for name, text in about.items():
        key = f"{title}: {name}"
        entries[key] = f"{entries[key]}; {text}" if key in entries else text
