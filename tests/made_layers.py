"""Made-up layers and model forms."""

from typing import Any

from dyno.worker.facts.job import Layer, LayerGraph, Port


def layer(name: str, type: str, reads: str = "", writes: str = "", dtype: str = "float32", **more: Any) -> Layer:
    """Return a layer; `reads` and `writes` are tensor names separated by spaces, all 1x4x8x8."""
    inputs, outputs = (tuple(Port(n, (1, 4, 8, 8), dtype) for n in each.split()) for each in (reads, writes))
    return Layer(name=name, type=type, inputs=inputs, outputs=outputs, **more)


def form(kind: str, *layers: Layer, library: str = "") -> LayerGraph:
    return LayerGraph(form=kind, library=library or kind, parameters=sum(x.added for x in layers), layers=layers)
