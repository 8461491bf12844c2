"""Timelines of layers as nested calls, written as graphs, notes and traces for other tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from dyno.formatting import format_count
from dyno.layers import align
from dyno.layers.align import Flow, FormSet
from dyno.layers.tables import WHOLE_MODEL, format_names, format_shape
from dyno.layers.times import Times, find_origins, invert_link
from dyno.report import export
from dyno.worker.facts.job import LAYERS, MODULES, Layer, LayerGraph, Port

CONVERSIONS_NAME = "(conversions)"
MODULE_SEPARATOR = "."  # separator in a module's name


@dataclass(frozen=True)
class TimelineStep:
    """One layer that runs, below the modules around it.

    `index` is the layer's index in the form. `stack` has full names, outermost first: modules, then the layer, unless
    the layer is a module's call. A layer without known modules is grouped by operator. `modules` are its origins.
    """

    index: int
    layer: Layer
    stack: tuple[str, ...]
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """Steps of one form in execution order; `seconds` [repeats, steps] is empty for an untimed form.

    A repeat is the mean of `runs_each` runs. With `is_exclusive`, a step's seconds exclude its submodules' steps.
    """

    title: str
    steps: tuple[TimelineStep, ...]
    seconds: np.ndarray
    runs_each: int = 1
    is_exclusive: bool = False

    @cached_property
    def medians(self) -> np.ndarray:
        """Median seconds of each step; their sum is the time of all layers."""
        return np.median(self.seconds, axis=0) if len(self.seconds) else np.zeros(len(self.steps))

    def describe_step(self, index: int) -> dict[str, str]:
        """Describe a step: its layer, type, modules, computing type, kernel, output and time, as far as known."""
        step, layer = self.steps[index], self.steps[index].layer
        head = {
            "layer": layer.name or self.steps[index].stack[-1],
            "type": layer.type,
            "modules": " ".join(step.modules),
        }
        engine = {"computes in": layer.computes_in, "kernel": layer.tactic, "output": format_output(layer)}
        remark = {"remark": "only changes type or layout" if layer.moves else ""}
        return {name: text for name, text in {**head, **engine, **remark, **self.describe_time(index)}.items() if text}

    def describe_time(self, index: int) -> dict[str, str]:
        """Return the step's median and its share of the medians' sum, as text; {} if nothing was timed."""
        if not len(self.seconds):
            return {}
        median, total = float(self.medians[index]), float(self.medians.sum()) or 1.0
        name = "own median, µs" if self.is_exclusive else "median, µs"
        return {name: f"{1e6 * median:.3f}", "share, %": f"{100 * median / total:.2f}"}


def build_timelines(form_set: FormSet, times: Mapping[int, Times], requested: Sequence[int]) -> list[Timeline]:
    """Build the timelines of the forms `requested` (indices); `times` has the times of the timed forms."""
    timelines = []
    for k in requested:
        form, origin, timing = form_set.forms[k], find_origins(form_set, k), times.get(k)
        seconds = timing.layers if timing else np.zeros((0, len(form.layers)))
        indices = [i for i, layer in enumerate(form.layers) if not layer.skipped or seconds[:, i].any()]
        steps = tuple(_make_step(form, i, origin[i][0]) for i in indices)
        runs_each = len(timing.profiled) // len(timing.layers) if timing else 1
        timelines.append(Timeline(form.library, steps, seconds[:, indices], runs_each, form.form == MODULES))
    return timelines


def _make_step(form: LayerGraph, index: int, modules: list[str]) -> TimelineStep:
    layer = form.layers[index]
    outer_modules = _find_shared_modules(modules)
    if form.form == MODULES:
        return TimelineStep(index, layer, (WHOLE_MODEL, *outer_modules), tuple(modules))
    if not modules:
        group = CONVERSIONS_NAME if layer.moves else f"({layer.type})"
        return TimelineStep(index, layer, (WHOLE_MODEL, group, layer.name or layer.type))
    label = layer.type
    if len(modules) > 1:
        label = format_names(modules)
    if form.form == LAYERS and len(modules) > 1:
        label = f"{label}: {layer.type}"
    return TimelineStep(index, layer, (WHOLE_MODEL, *outer_modules, label), tuple(modules))


def _find_shared_modules(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the full names of the modules around all of these; a single module is its own last one."""
    if not modules or WHOLE_MODEL in modules:
        return ()
    paths = [name.split(MODULE_SEPARATOR) for name in modules]
    prefix = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    return tuple(accumulate(prefix, lambda path, name: f"{path}{MODULE_SEPARATOR}{name}"))


def format_output(layer: Layer) -> str:
    """Return the shape, type and layout of the first output; "" without outputs."""
    if not layer.outputs:
        return ""
    port = layer.outputs[0]
    return " ".join(filter(None, (format_shape(port), port.dtype, port.format)))


@dataclass(frozen=True)
class Mark:
    """The beginning or the end (`ends`) of a call, in nanoseconds; the end mark of a step has its number in `step`."""

    name: str
    time_ns: int
    ends: bool = False
    step: int | None = None


def iter_marks(steps: Sequence[TimelineStep], nanoseconds: Sequence[int], begin: int) -> Iterator[Mark]:
    """Yield the beginnings and ends of one repeat's calls, in order.

    Each step begins at the end of the previous one; a call around steps lasts from its first to its last step.
    """
    open_calls: list[str] = []
    time_ns = begin
    for step_index, (step, duration) in enumerate(zip(steps, nanoseconds, strict=True)):
        depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(open_calls, step.stack, strict=False)))
        yield from (Mark(name, time_ns, ends=True) for name in reversed(open_calls[depth:]))
        yield from (Mark(name, time_ns) for name in step.stack[depth:])
        time_ns += duration
        yield Mark(step.stack[-1], time_ns, ends=True, step=step_index)
        open_calls = [*step.stack[:-1]]  # steps are listed as their calls end
    yield from (Mark(name, time_ns, ends=True) for name in reversed(open_calls))


# Layers as graphs for Model Explorer, and their times as its node data (colours).
#
# JSON of the classes in `graph_builder.py` and `node_data_builder.py`,
# https://github.com/google-ai-edge/model-explorer.

# colours of the lowest and the highest median
COLOUR_SCALE = ({"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#e69f00"})


def build_explorer_graphs(forms: Sequence[LayerGraph], timelines: Sequence[Timeline], name: str) -> dict[str, Any]:
    """Build a collection with a graph per form; `timelines` has the form's timeline at the same index.

    A node is a layer, its namespace the modules around it, an edge a tensor from its writer to a reader.
    """
    graphs = [_build_graph(form, timeline) for form, timeline in zip(forms, timelines, strict=True)]
    return {"label": name, "graphs": graphs}


def _build_graph(form: LayerGraph, timeline: Timeline) -> dict[str, Any]:
    flow, step_of = Flow(form.layers), {step.index: index for index, step in enumerate(timeline.steps)}
    nodes = []
    for index, step in enumerate(timeline.steps):
        nodes.append({
            "id": str(step.index), "label": step.layer.type or step.stack[-1],
            "namespace": "/".join(name.replace("/", "|") for name in _list_modules(step)),
            "attrs": _list_pairs(timeline.describe_step(index)),
            "outputsMetadata": [_build_output(str(k), port) for k, port in enumerate(step.layer.outputs)],
            "incomingEdges": [{"sourceNodeId": str(source), "sourceNodeOutputId": "0", "targetNodeInputId": str(slot)}
                              for slot, source in enumerate(flow.before[step.index]) if source in step_of],
        })  # fmt: skip
    return {"id": timeline.title, "nodes": nodes}


def _build_output(name: str, port: Port) -> dict[str, Any]:
    attributes = {"tensor_name": port.name, "shape": format_shape(port), "type": port.dtype, "layout": port.format}
    return {"id": name, "attrs": _list_pairs(attributes)}


def _list_modules(step: TimelineStep) -> list[str]:
    """Return the short names of the modules around the layer; a module's call is not a separate group."""
    outer_modules = step.stack[1:-1]
    if not step.modules:  # a group by operator
        return [*outer_modules]
    return [name.removeprefix(f"{outer}.") for outer, name in zip(("", *outer_modules), outer_modules, strict=False)]


def _list_pairs(attributes: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in attributes.items() if value]


def build_node_data(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return each form's layer medians in microseconds, with a colour gradient from zero to the largest."""
    return {
        timeline.title: {
            "results": {
                str(step.index): {"value": round(1e6 * seconds, 3)}
                for step, seconds in zip(timeline.steps, timeline.medians.tolist(), strict=True)
            },
            "gradient": list(COLOUR_SCALE),
        }
        for timeline in timelines
    }


# Notes on each node of an ONNX graph: its layers in the engines, their types and times.

UNITS = ("µs", "%")
NO_TIME = "no layer known: folded, or not run by itself"


@dataclass
class Note:
    """Notes on one node: a line per layer that it became, and its facts by name."""

    lines: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def add(self, title: str, facts: Mapping[str, str], node_count: int) -> None:
        """Add a layer that stands for `node_count` nodes, from the form with this title.

        Facts of a form's further layers are appended to those of its first.
        """
        scope = {"stands for": format_count(node_count, "node")} if node_count > 1 else {}
        for name, text in {**facts, **scope}.items():
            key = f"{title}: {name}"
            self.facts[key] = f"{self.facts[key]}; {text}" if key in self.facts else text
        parts = [facts.get("layer", ""), facts.get("type", ""), facts.get("computes in", "")]
        parts += [f"{name.removesuffix(f', {unit}')} {facts[name]} {unit}" for unit in UNITS for name in facts
                  if name.endswith(f", {unit}")]  # fmt: skip
        parts += [f"for {text}" for text in scope.values()]
        self.lines.append(f"{title}: {', '.join(filter(None, parts))}")


def list_node_notes(
    forms: Sequence[LayerGraph], graph: int, timelines: Mapping[int, Timeline], module: int | None = None
) -> list[Note]:
    """Build a note per node of the graph.

    It describes the forms in `timelines` that were made from the graph, and the `module` behind the graph. A layer that
    stands for several nodes has its whole time, and their number, at each of them.
    """
    notes_of = [Note() for _ in forms[graph].layers]
    for k, timeline in timelines.items():
        if k == module:
            layers_of = invert_link(align.link_layers(forms, k, graph))
        else:
            layers_of = {node: sorted(group) for node, group in align.link_layers(forms, graph, k).pairs.items()}
        step_of = {step.index: index for index, step in enumerate(timeline.steps)}
        node_counts = Counter(i for group in layers_of.values() for i in group)
        for node, note in enumerate(notes_of):
            step_layers = [i for i in layers_of.get(node, ()) if i in step_of]
            for i in step_layers:
                note.add(timeline.title, timeline.describe_step(step_of[i]), node_counts[i])
            if not step_layers:
                note.lines.append(f"{timeline.title}: {NO_TIME}")
    return notes_of


# Times of layers as traces: Chrome's JSON, which Perfetto opens, and speedscope's.

SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"
HOW_TIMED = (
    "Durations were measured layer by layer, in watched runs. Each layer is drawn where the one before it ended, so "
    "gaps between layers are not in the trace, and its length is not a latency."
)


def chrome_trace(timelines: Sequence[Timeline], exporter: str) -> dict[str, Any]:
    """Build a trace in the trace event format: a process per form, with the repeats in sequence.

    Modules are around their layers. Times are in microseconds, to the nanosecond. Begin and end are separate events:
    readers add an event's begin and duration, and the rounded sum may exceed the call around it.
    """
    events = [event for pid, timeline in enumerate(timelines, 1) for event in _iter_events(timeline, pid)]
    return export.trace_document(events, exporter, HOW_TIMED)


def _iter_events(timeline: Timeline, pid: int) -> Iterator[dict[str, Any]]:
    thread = {"pid": pid, "tid": 1}
    yield from export.process_event(pid, timeline.title)
    yield export.track_event(pid, 1, "layers")
    descriptions = [timeline.describe_step(index) for index in range(len(timeline.steps))]
    runs_text = f", mean of {format_count(timeline.runs_each, 'run')}" if timeline.runs_each > 1 else ""
    begin = 0
    for repeat, seconds in enumerate(timeline.seconds, 1):
        durations = [round(duration * 1e9) for duration in seconds.tolist()]
        for mark in iter_marks(timeline.steps, durations, begin):
            name = f"repeat {repeat}{runs_text}" if mark.name == WHOLE_MODEL else mark.name
            event = {"ph": "E" if mark.ends else "B", "name": name, "cat": "layers", **thread, "ts": mark.time_ns / 1e3}
            yield event if mark.step is None else {**event, "args": descriptions[mark.step]}
        begin += sum(durations)


def build_speedscope_profile(timelines: Sequence[Timeline], name: str, exporter: str) -> dict[str, Any]:
    """Build a speedscope file: a profile per form, with a sample per layer below the modules around it.

    A sample's weight is the layer's median in microseconds.

    https://github.com/jlfwong/speedscope/wiki/Importing-from-custom-sources
    """
    frames: dict[str, int] = {}
    profiles = []
    for timeline in timelines:
        weights = [1e6 * seconds for seconds in timeline.medians.tolist()]
        samples = [[frames.setdefault(frame, len(frames)) for frame in step.stack] for step in timeline.steps]
        profiles.append({
            "type": "sampled", "name": timeline.title, "unit": "microseconds", "startValue": 0,
            "endValue": sum(weights), "samples": samples, "weights": weights,
        })  # fmt: skip
    return {
        "$schema": SPEEDSCOPE, "name": name, "exporter": exporter, "activeProfileIndex": 0,
        "shared": {"frames": [{"name": frame} for frame in frames]}, "profiles": profiles,
    }  # fmt: skip
