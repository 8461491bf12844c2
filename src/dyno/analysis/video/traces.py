"""A video's pipeline as a trace for Perfetto: a track for each stage, and one for each frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dyno.analysis.presentation import trace_events
from dyno.analysis.presentation.trace_events import Event
from dyno.analysis.video.figures import Video
from dyno.analysis.video.runs import VideoRun

HOW = (
    "The times of the run itself, as the stages took them: work, and waiting until the next stage had room. A frame "
    "lasts from the beginning of its reading until its boxes are known. Of several streams the first."
)


def chrome(filmed: Sequence[VideoRun], exporter: str) -> dict[str, Any]:
    """Build a process for each trial's typical round, with a track for each stage and each frame; microseconds."""
    events = [event for pid, each in enumerate(filmed, 1) for event in _iter_events(each, pid)]
    return trace_events.document(events, exporter, HOW)


def _iter_events(filmed: VideoRun, pid: int) -> Iterator[Event]:
    video = filmed.typical
    yield from trace_events.process(pid, filmed.trial.label)
    for tid, stage in enumerate(video.stages, 1):
        yield trace_events.track(pid, tid, stage.name)
        yield from _iter_stage_events(video, stage.name, {"pid": pid, "tid": tid})
    frames = zip(video.arrays["frame_began"], video.arrays["frame_known"], video.arrays["frame_boxes"], strict=True)
    for number, (began, known, boxes) in enumerate(frames):
        one = {"cat": "frame", "name": f"frame {number}", "id": number, "pid": pid, "tid": 0}
        yield {"ph": "b", **one, "ts": 1e6 * began, "args": {"boxes": int(boxes)}}
        yield {"ph": "e", **one, "ts": 1e6 * known}


def _iter_stage_events(video: Video, name: str, track: Event) -> Iterator[Event]:
    """Yield each piece of work, and the waiting for room behind it."""
    began, ended, handed = (video.arrays[f"{name}_{key}"] for key in ("began", "ended", "handed"))
    waiting = video.arrays[f"{name}_waiting"]
    for number in range(len(began)):
        about = {"args": {"waiting": int(waiting[number])}}
        for what, begin, end in ((f"{name} {number}", began, ended), ("no room", ended, handed)):
            yield {"ph": "B", "name": what, "cat": "stage", **track, "ts": 1e6 * begin[number], **about}
            yield {"ph": "E", "name": what, "cat": "stage", **track, "ts": 1e6 * end[number]}
