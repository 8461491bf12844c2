"""Sentences on the figures of a video."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dyno.formatting import format_count, format_number, show
from dyno.report import export
from dyno.report.export import Event
from dyno.video.figures import PERCENTILES, PROCESSORS, Bound, Run, Video, VideoRun
from dyno.worker.facts.job import DEVICE

MAJORITY = 0.5
LATENCY_NOTE = (
    "A file is read as fast as the pipeline takes it, so its queues are full and latency is mostly waiting in them; a "
    "live source that is slower than the bound waits less."
)
BOUND_REACHED_SHARE = 0.95  # share of the bound at which there is nothing left to gain


def describe_each(runs: Sequence[Run], describe: Callable[[Run], Iterable[str]]) -> list[str]:
    """Return the sentences of each trial, under its name if there are several."""
    entries = [(run, [f"{run.trial.label}:"] if len(runs) > 1 else []) for run in runs]
    return [line for run, name in entries for line in (*name, *describe(run))]


def describe_runs(runs: Sequence[VideoRun]) -> list[str]:
    """Return the sentences of each trial."""
    sentences = describe_each(runs, lambda run: [*list_sentences(run.typical), *(f"{w}." for w in run.warnings)])
    return [*sentences, LATENCY_NOTE]


def list_sentences(video: Video) -> list[str]:
    """Describe speed, bound, effect of changing the bound, and latency per frame."""
    return [
        _describe_rates(video),
        *_describe_set_up(video),
        *_describe_bounds(video),
        *_describe_changes(video),
        *_describe_latencies(video),
        *_describe_objects(video),
    ]


def _describe_rates(video: Video) -> str:
    facts = video.facts
    end = " until it was stopped" if facts.stopped else ""
    per_stream = "each at " if facts.streams > 1 else ""
    realtime = f" ({per_stream}{video.rate / facts.streams / facts.rate:.2f} times its own speed)" if facts.rate else ""
    prefix = f"{facts.streams} streams at once, the first of " if facts.streams > 1 else ""
    return (
        f"{prefix}{format_count(facts.frames, 'frame')} of {facts.width} x {facts.height} in "
        f"{show(facts.seconds, 'duration')}{end}: {_format_rate(video.rate)} end to end{realtime}; inference alone "
        f"{_format_rate(video.inference_rate)}, and {_format_rate(video.inference_beside)} beside the other stages."
    )


def _describe_set_up(video: Video) -> Iterator[str]:
    """Describe an unusual set-up: threads, and the source of frames."""
    facts = video.facts
    if facts.prepared == DEVICE:
        threads = format_count(facts.lanes, "thread")
        yield (
            f"Frames are prepared where the network computes, and only predictions above the score threshold come "
            f"back; {threads} {'copies' if facts.lanes == 1 else 'copy'} frames, and as many post-process."
        )
    elif facts.lanes > 1:
        yield f"{facts.lanes} threads prepare frames, and as many post-process them."
    if facts.preloaded:
        yield (
            f"{format_count(facts.preloaded, 'frame')} at most were decoded in advance and replayed: no figure "
            f"includes decoding."
        )


def _describe_bounds(video: Video) -> Iterator[str]:
    stage = video.by_stage
    # Number of processors over the processor time of a frame under full load.
    processors = Bound(PROCESSORS, video.find_limits(video.facts.streams)[PROCESSORS])
    yield (
        f"The slowest stage, {stage.name}, allows {_format_rate(stage.rate)}: {_format_share(stage, video)} of that "
        f"was reached. {_format_processors(video)} at {show(video.cpu_under_load, 'duration')} of processor time per "
        f"frame {'allows' if video.facts.processors == 1 else 'allow'} {_format_rate(processors.rate)}: "
        f"{_format_share(processors, video)}."
    )
    slowdown = video.cpu_under_load / (sum(s.cpu for s in video.stages) or math.inf)
    if slowdown > 2 - BOUND_REACHED_SHARE:
        yield (
            f"With all processors busy a frame takes {slowdown:.2f} times the processor time that its "
            "stages take one at a time: processors share caches and memory, and often two share a core."
        )


def _describe_changes(video: Video) -> Iterator[str]:
    bound = video.bound
    if bound.name == PROCESSORS:
        stage = max(video.stages, key=lambda each: each.cpu_under_load)
        share = stage.cpu_under_load / video.cpu_under_load
        sentence = (
            f"The processors bound the pipeline: the stages share them, and {stage.name} takes "
            f"{show(share, 'percentage')} of the processor time."
        )
    else:
        stage = video.slowest
        sentence = f"{stage.name.capitalize()} bounds the whole."
    new_bound = video.find_bound(stage.name, MAJORITY)
    gain = new_bound.rate / bound.rate
    limit = "the processors bound it" if new_bound.name == PROCESSORS else f"{new_bound.name} bounds it"
    limit_text = f", and then {limit}" if new_bound.name != bound.name else ""
    rate_text = f"{_format_rate(new_bound.rate)} would be possible ({gain:.2f}x)"
    yield f"{sentence} If {stage.name} took half the time, {rate_text}{limit_text}."
    reached_share = bound.share(video.rate)
    if reached_share > 1 / BOUND_REACHED_SHARE:
        yield (
            "More than the bound was reached, so something held up the stages while they were measured alone; measure "
            "again when nothing else runs."
        )
    if reached_share < BOUND_REACHED_SHARE:
        yield f"{show(reached_share, 'percentage')} of the bound was reached: {_explain_loss(video)}."


def _explain_loss(video: Video) -> str:
    facts = video.facts
    cpu_ratio = facts.cpu_whole / video.cpu_under_load if video.cpu_under_load else 1.0
    parts = []
    if video.other_load > (1 - BOUND_REACHED_SHARE) * facts.processors:
        parts.append(f"other programs kept {format_number(video.other_load)} of {_format_processors(video)} busy")
    if cpu_ratio > 1 + (1 - BOUND_REACHED_SHARE):
        parts.append(f"a frame took {cpu_ratio:.2f} times the processor time that the bound counts on")
    if video.bound.name == PROCESSORS and video.utilization < BOUND_REACHED_SHARE:
        parts.append(f"the stages kept {show(video.utilization, 'percentage')} of the processors' time busy")
    return (
        ", and ".join(parts) or "the rest is filling and emptying the pipeline, and stages that waited for each other"
    )


def _describe_latencies(video: Video) -> Iterator[str]:
    for event, description in (("known", "its boxes are known"), ("written", "it is written")):
        values = {q: value for q in PERCENTILES if (value := video.find_percentile(q, event)) is not None}
        if values and (event == "known" or video.facts.output):
            parts = [f"p{100 * q:g} {show(value, 'duration')}" for q, value in values.items()]
            yield f"From the beginning of a frame's reading until {description}: {', '.join(parts)}."


def _describe_objects(video: Video) -> Iterator[str]:
    facts = video.facts
    if facts.tracker:
        counts_text = ", ".join(f"{count} of class {kind}" for kind, count in facts.objects.items())
        total = format_count(sum(facts.objects.values()), "object")
        yield f"{facts.tracker} followed {total}{f': {counts_text}' if len(facts.objects) > 1 else ''}."


def _format_rate(value: float) -> str:
    return f"{format_number(value)} frames/s"


def _format_share(bound: Bound, video: Video) -> str:
    return show(bound.share(video.rate), "percentage")


def _format_processors(video: Video) -> str:
    return format_count(video.facts.processors, "processor")


# Perfetto trace of a video's pipeline: a track for each stage and each frame.

HOW_MEASURED = (
    "The times of the run itself, as the stages took them: work, and waiting until the next stage had room. A frame "
    "lasts from the beginning of its reading until its boxes are known. Of several streams the first."
)


def chrome_trace(runs: Sequence[VideoRun]) -> dict[str, Any]:
    """Build a process for each trial's typical round, with a track for each stage and frame; microseconds."""
    events = [event for pid, run in enumerate(runs, 1) for event in _iter_events(run, pid)]
    return export.trace_document(events, "dyno", HOW_MEASURED)


def _iter_events(run: VideoRun, pid: int) -> Iterator[Event]:
    video = run.typical
    yield from export.process_event(pid, run.trial.label)
    for tid, stage in enumerate(video.stages, 1):
        yield export.track_event(pid, tid, stage.name)
        yield from _iter_stage_events(video, stage.name, {"pid": pid, "tid": tid})
    frames = zip(video.arrays["frame_began"], video.arrays["frame_known"], video.arrays["frame_boxes"], strict=True)
    for frame_index, (began, known, boxes) in enumerate(frames):
        event = {"cat": "frame", "name": f"frame {frame_index}", "id": frame_index, "pid": pid, "tid": 0}
        yield {"ph": "b", **event, "ts": 1e6 * began, "args": {"boxes": int(boxes)}}
        yield {"ph": "e", **event, "ts": 1e6 * known}


def _iter_stage_events(video: Video, name: str, track: Event) -> Iterator[Event]:
    timeline = video.read_timeline(name)
    for index in range(len(timeline.began)):
        arguments = {"args": {"waiting": int(timeline.waiting[index])}}
        pieces = (f"{name} {index}", timeline.began, timeline.ended), ("no room", timeline.ended, timeline.handed)
        for label, begin, end in pieces:
            yield {"ph": "B", "name": label, "cat": "stage", **track, "ts": 1e6 * begin[index], **arguments}
            yield {"ph": "E", "name": label, "cat": "stage", **track, "ts": 1e6 * end[index]}
