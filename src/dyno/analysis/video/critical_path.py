"""The critical path of a video's pipeline: what each stage contributes to the end of the run, by its own times.

Followed back from the last piece of work that ended (Kelley & Walker, Critical-Path Planning and Scheduling, 1959):
work begins when the stage is free and something lies in its queue, whichever is later; a stage is free when the next
one has taken something from a full queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dyno.analysis.presentation.table import TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.analysis.records.run_data import RunData
from dyno.analysis.video import runs
from dyno.analysis.video.figures import Video

HAND_OVER = "between stages"
NO_ROOM_S = 1e-4  # later than this after its end, a piece of work waited for room


@dataclass(frozen=True)
class StageTimeline:
    """A stage's pieces of work in the order of their beginning: when each began, ended, and found room behind it."""

    name: str
    began: np.ndarray
    ended: np.ndarray
    handed: np.ndarray

    @classmethod
    def of(cls, video: Video, name: str) -> StageTimeline:
        """Build the track of a stage from the times that the run stored, sorted by their beginnings."""
        began, ended, handed = (video.arrays[f"{name}_{key}"] for key in ("began", "ended", "handed"))
        order = np.argsort(began, kind="stable")
        return cls(name, began[order], ended[order], handed[order])

    def last(self, times: np.ndarray, limit: float, before: int) -> int:
        """Return the index below `before` of the latest of these times that is not after the limit; -1 for none."""
        earlier = np.where(times[:before] <= limit, times[:before], -np.inf)
        return int(earlier.argmax()) if len(earlier) and np.isfinite(earlier.max()) else -1


def shares(video: Video) -> dict[str, float]:
    """Return the seconds on the critical path by stage and between stages; they sum to the end of the last work."""
    tracks = [StageTimeline.of(video, stage.name) for stage in video.stages]
    found = dict.fromkeys((*(track.name for track in tracks), HAND_OVER), 0.0)
    for name, seconds in _walk_path(tracks):
        found[name] += seconds
    return found


def _walk_path(tracks: list[StageTimeline]) -> Iterator[tuple[str, float]]:
    """Yield the pieces of the path, from its end back to the beginning of the run."""
    place = max((k for k, track in enumerate(tracks) if len(track.ended)), key=lambda k: tracks[k].ended.max())
    piece = int(tracks[place].ended.argmax())
    while True:
        track = tracks[place]
        begin = float(track.began[piece])
        yield track.name, float(track.ended[piece]) - begin
        place, piece, now = _enabled_by(tracks, place, piece, begin)
        if piece < 0:
            yield HAND_OVER, now
            return
        yield HAND_OVER, now - float(tracks[place].ended[piece])


def _enabled_by(tracks: list[StageTimeline], place: int, piece: int, begin: float) -> tuple[int, int, float]:
    """Find the piece of work whose end let this one begin.

    Return its stage, its index (-1: the run's beginning), and until when the path is between stages.
    """
    now = begin
    while True:
        track = tracks[place]
        free = track.last(track.handed, begin, piece)
        came = _find_source(tracks[place - 1], track, piece) if place else -1
        free_at = float(track.handed[free]) if free >= 0 else -1.0
        came_at = min(float(tracks[place - 1].handed[came]), begin) if came >= 0 else -1.0
        if free < 0 and came < 0:
            return place, -1, now
        earlier = (place, free) if free_at >= came_at else (place - 1, came)
        own = tracks[earlier[0]]
        waited = float(own.handed[earlier[1]] - own.ended[earlier[1]]) > NO_ROOM_S
        if not waited or earlier[0] + 1 >= len(tracks):
            return *earlier, now
        # It waited for room, which the next stage made when it began something: that is what to follow.
        following = tracks[earlier[0] + 1]
        taker = following.last(following.began, float(own.handed[earlier[1]]), len(following.began))
        if taker < 0 or float(following.began[taker]) >= begin:
            return *earlier, now
        place, piece, begin = earlier[0] + 1, taker, float(following.began[taker])


def _find_source(before: StageTimeline, track: StageTimeline, piece: int) -> int:
    """Return the piece of the stage before that the piece works on: the last one of a batch, the batch of a frame."""
    return math.ceil((piece + 1) * len(before.began) / len(track.began)) - 1


def _make_table(run: RunData) -> Table | None:
    rows = [row for filmed in runs.of_run(run) for row in _iter_rows(filmed.trial.label, filmed.typical)]
    return PATH.of(COLUMNS, rows, notes=(NOTE,), group=("label",)) if rows else None


def _iter_rows(label: str, video: Video) -> Iterator[Row]:
    """Yield a row for each stage and the time between; none with several streams, whose times are the first one's."""
    if video.facts.streams > 1:
        return
    found, stages = shares(video), {stage.name: stage for stage in video.stages}
    whole, frames = sum(found.values()) or 1.0, max(1, video.facts.frames)
    for name, seconds in found.items():
        row: Row = {"label": label, "stage": name, "path_ms": 1e3 * seconds / frames, "share": 100 * seconds / whole}
        if stage := stages.get(name):
            row |= {"work_ms": 1e3 * stage.beside.value, "starved": 100 * stage.starved, "blocked": 100 * stage.blocked}
        yield row


COLUMNS = (
    Column("label", "model, backend with its options, precision, batch, size", kind=TEXT, title="trial"),
    Column("stage", "of the pipeline, or what is between two: threads that wake up, queues", kind=TEXT),
    Column("work_ms", "its time per frame in the pipeline", "ms", title="work, ms"),
    Column("path_ms", "its time on the critical path, per frame", "ms", title="on the path, ms"),
    Column("share", "share of the path", "%", title="share, %"),
    Column("starved", "share of the run in which it waited for something to do", "%", title="waiting for work, %"),
    Column("blocked", "share of the run in which it waited for room behind it", "%", title="waiting for room, %"),
)
NOTE = (
    "On the critical path is what would end the run earlier if it took less time. A stage with a small share has "
    "time to spare; between stages are queues and threads that wake up."
)
PATH = TableKind(
    "video-critical-path", "Critical path of the video",
    "What each stage of a video's pipeline contributes to the end of the run, and what it waits for.", _make_table,
    "this run is of no video of one stream; `dyno video` makes one", "tables", 18,
)  # fmt: skip
