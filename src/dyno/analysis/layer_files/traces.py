"""Times of layers as traces: Chrome's JSON, which Perfetto opens, and speedscope's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dyno.analysis.formatting import counting
from dyno.analysis.inside.tables import MODEL
from dyno.analysis.layer_files.steps import Timeline, marks
from dyno.analysis.presentation import trace_events

SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"
HOW = (
    "Durations were measured layer by layer, while the engine was watched; a layer is drawn where the one before it "
    "ended, so that what happens between layers is not in the trace. Its length is not a latency."
)


def chrome(timelines: Sequence[Timeline], exporter: str) -> dict[str, Any]:
    """Build a trace in the trace event format: a process for each form, with the repeats in sequence.

    Modules are around the layers that came from them. Times are microseconds, to the nanosecond. Begins and ends are
    separate events: readers add up begin and duration of an event, and a rounded sum no longer fits into the call
    around it.
    """
    events = [event for pid, each in enumerate(timelines, 1) for event in _iter_events(each, pid)]
    return trace_events.document(events, exporter, HOW)


def _iter_events(timeline: Timeline, pid: int) -> Iterator[dict[str, Any]]:
    thread = {"pid": pid, "tid": 1}
    yield from trace_events.process(pid, timeline.title)
    yield trace_events.track(pid, 1, "layers")
    about = [timeline.about(at) for at in range(len(timeline.steps))]
    of_runs = f", mean of {counting(timeline.runs_each, 'run')}" if timeline.runs_each > 1 else ""
    begin = 0
    for number, seconds in enumerate(timeline.seconds, 1):
        lasts = [round(each * 1e9) for each in seconds.tolist()]
        for mark in marks(timeline.steps, lasts, begin):
            name = f"repeat {number}{of_runs}" if mark.name == MODEL else mark.name
            event = {"ph": "E" if mark.ends else "B", "name": name, "cat": "layers", **thread, "ts": mark.at / 1e3}
            yield event if mark.step is None else {**event, "args": about[mark.step]}
        begin += sum(lasts)


def speedscope(timelines: Sequence[Timeline], name: str, exporter: str) -> dict[str, Any]:
    """Build a speedscope file: a profile for each form, in which every layer is a sample below the modules around it.

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
