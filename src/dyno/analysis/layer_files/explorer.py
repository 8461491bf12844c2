"""Layers as graphs for Model Explorer, and their times as the data that colours its nodes.

The classes of https://github.com/google-ai-edge/model-explorer, `graph_builder.py` and `node_data_builder.py`, as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dyno.analysis.inside.place import Flow
from dyno.analysis.inside.tables import shape
from dyno.analysis.layer_files.steps import Timeline, TimelineStep
from dyno.worker.facts.job import LayerGraph, Port

GRADIENT = ({"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#e69f00"})  # by the median, from least to most


def graphs(forms: Sequence[LayerGraph], timelines: Sequence[Timeline], name: str) -> dict[str, Any]:
    """Build a collection with a graph for each form; the timeline at the same index belongs to it.

    A node is a layer, its namespace the modules around it; an edge is a tensor that one writes and another reads.
    """
    drawn = [_build_graph(form, timeline) for form, timeline in zip(forms, timelines, strict=True)]
    return {"label": name, "graphs": drawn}


def _build_graph(form: LayerGraph, timeline: Timeline) -> dict[str, Any]:
    flow, place = Flow(form.layers), {step.index: at for at, step in enumerate(timeline.steps)}
    nodes = []
    for at, step in enumerate(timeline.steps):
        nodes.append({
            "id": str(step.index), "label": step.layer.type or step.stack[-1],
            "namespace": "/".join(name.replace("/", "|") for name in _list_modules(step)),
            "attrs": _list_pairs(timeline.about(at)),
            "outputsMetadata": [_build_output(str(k), port) for k, port in enumerate(step.layer.outputs)],
            "incomingEdges": [{"sourceNodeId": str(source), "sourceNodeOutputId": "0", "targetNodeInputId": str(number)}
                              for number, source in enumerate(flow.before[step.index]) if source in place],
        })  # fmt: skip
    return {"id": timeline.title, "nodes": nodes}


def _build_output(name: str, port: Port) -> dict[str, Any]:
    about = {"tensor_name": port.name, "shape": shape(port), "type": port.dtype, "layout": port.format}
    return {"id": name, "attrs": _list_pairs(about)}


def _list_modules(step: TimelineStep) -> list[str]:
    """Return the modules around the layer by the last part of their names; a module's call is not a separate group."""
    around = step.stack[1:-1]
    if not step.modules:  # a group by operator
        return [*around]
    return [name.removeprefix(f"{outer}.") for outer, name in zip(("", *around), around, strict=False)]


def _list_pairs(about: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in about.items() if value]


def node_data(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return each form's layer medians in microseconds, with a colour gradient from none to the most."""
    return {
        timeline.title: {
            "results": {
                str(step.index): {"value": round(1e6 * seconds, 3)}
                for step, seconds in zip(timeline.steps, timeline.medians.tolist(), strict=True)
            },
            "gradient": list(GRADIENT),
        }
        for timeline in timelines
    }
