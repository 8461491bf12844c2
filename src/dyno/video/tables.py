"""Tables of videos: a row for each trial, for each of its stages, and for each number of streams."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dyno.formatting import clean_text, describe_time, format_count, format_number, format_ratio, show
from dyno.report.style import COLORS, FAINT, WIDTH, Chart, add_tooltip, apply_style
from dyno.report.tables import TableKind
from dyno.results import stats
from dyno.results.run_data import RunData
from dyno.results.trial_result import TrialResult
from dyno.table import (
    COUNT,
    FINE,
    LABEL_COLUMN,
    RATIO,
    TEXT,
    TRIAL_COLUMN,
    Column,
    Row,
    Table,
    compare_cells,
    duration_column,
    keep_printed,
    limit_cells,
    with_limits,
)
from dyno.video import figures, words
from dyno.video.figures import PERCENTILES, StageTimeline, Video, VideoRun

STREAM_COUNTS = (1, 2, 4, 8, 16, 32)


def _make_video_table(run: RunData) -> Table | None:
    runs = figures.list_runs(run)
    if not runs:
        return None
    rows = [_make_row(video_run) for video_run in runs]
    if len(runs) > 1:
        gains = figures.list_speedups(runs, run.rule)
        rows = [row | compare_cells(gain, gain is None) for row, gain in zip(rows, gains, strict=True)]
    return VIDEO.build(VIDEO_COLUMNS, rows, notes=tuple(_write_notes(runs)), printed=keep_printed(VIDEO_COLUMNS))


def _make_row(run: VideoRun) -> Row:
    video = run.typical
    return {
        "label": run.trial.label, "trial": run.trial.id, "rounds": len(run.videos),
        "frames": video.facts.frames,
        "streams": video.facts.streams if video.facts.streams > 1 else None,
        "dropped": video.facts.dropped if video.facts.live else None,
        "objects": sum(video.facts.objects.values()) if video.facts.tracker else None,
        "inference_fps": video.inference_rate, "beside_fps": video.inference_beside,
        **limit_cells("fps", run.rate), "bound_fps": video.bound.rate, "bound_by": video.bound.name,
        "reached": 100 * video.bound.share(video.rate),
        **{f"p{100 * q:g}_s": video.find_percentile(q) for q in PERCENTILES},
    }  # fmt: skip


def _write_notes(runs: list[VideoRun]) -> Iterator[str]:
    yield (
        "fps: end to end, from reading the first frame to closing the file. inference alone and beside: with nothing "
        "else running, and while the other stages run. bound: the lower of the slowest stage's rate and that of the "
        "processors, from the stages alone. p50 to p99: from a frame's reading until its boxes are known."
    )
    if len(runs) > 1:
        yield f"speedup: fps over that of {figures.find_reference(runs).trial.label}."


def _make_stages_table(run: RunData) -> Table | None:
    note = (
        "alone and in the pipeline: time per frame. working, starved and blocked: shares of the pipeline's time in "
        "which the stage worked, waited for something to do, and waited for room behind it."
    )
    rows: list[Row] = [
        {
            "label": video_run.trial.label, "trial": video_run.trial.id, "stage": stage.name,
            **limit_cells("alone_s", stage.alone), "alone_fps": 1 / stage.alone.value,
            **limit_cells("beside_s", stage.in_pipeline), "cpu_s": stage.cpu, "crowded_s": stage.cpu_under_load,
            "working": 100 * stage.working, "starved": 100 * stage.starved, "blocked": 100 * stage.blocked,
            "queue": stage.queue,
        }
        for video_run in figures.list_runs(run) for stage in video_run.typical.stages
    ]  # fmt: skip
    if not rows:
        return None
    printed = keep_printed(STAGE_COLUMNS)
    return STAGES.build(STAGE_COLUMNS, rows, group=("label",), below=lambda part: [note], printed=printed)


def _make_streams_table(run: RunData) -> Table | None:
    runs = figures.list_runs(run)
    rows = [_make_stream_row(f, count) for f in runs for count in sorted({*STREAM_COUNTS, f.typical.facts.streams})]
    videos = {f.trial.label: f for f in runs}
    if not rows:
        return None
    return STREAM_TABLE.build(
        STREAM_COLUMNS, rows, group=("label",), printed=keep_printed(STREAM_COLUMNS),
        below=lambda part: describe_streams(videos[part[0]["label"]].typical, part),
    )  # fmt: skip


def _make_stream_row(run: VideoRun, count: int) -> Row:
    video = run.typical
    prediction = figures.predict_streams(video, count)
    row = {
        "label": run.trial.label, "trial": run.trial.id, "streams": count, "fps": prediction.rate,
        "each_fps": prediction.stream_rate, "p99_s": prediction.p99, "bound_by": prediction.bound,
    }  # fmt: skip
    if count != video.facts.streams:
        return row
    error, p99 = 100 * (prediction.rate / video.rate - 1), video.find_percentile(PERCENTILES[-1])
    return row | {"reached_fps": video.rate, "error": error, "reached_p99_s": p99}


def describe_streams(video: Video, rows: list[Row]) -> list[str]:
    """Describe the prediction's error for the measured number of streams, and how many fit at the source's rate."""
    error = next(row["error"] for row in rows if row["streams"] == video.facts.streams) / 100
    sentences = [
        f"Predicted from the stages alone, with one engine for all streams and videos read as fast as they are taken. "
        f"For {format_count(video.facts.streams, 'stream')}, which ran, it is {show(abs(error), 'percentage')} "
        f"{'above' if error >= 0 else 'below'} the measured rate."
    ]
    if video.facts.rate > 0:
        stream_count = figures.count_fitting(video, video.facts.rate)
        text = f"{stream_count} or more" if stream_count == figures.MAX_STREAMS else str(stream_count)
        sentences.append(
            f"Streams that fit at this video's own {format_number(video.facts.rate)} frames/s, by the bounds: {text}."
        )
    return sentences


VIDEO_COLUMNS = (
    LABEL_COLUMN,
    TRIAL_COLUMN,
    Column("rounds", "times that the video was run", kind=COUNT, rank=8),
    Column("frames", "that were answered", kind=COUNT, rank=7),
    Column("streams", "that ran at once, where it was more than one", kind=COUNT),
    Column("dropped", "frames of a live source that came too fast", kind=COUNT),
    Column("objects", "that were followed through the video", kind=COUNT, rank=6),
    Column("inference_fps", "of inference alone, host to host", "1/s", title="inference alone, fps", rank=3),
    Column("beside_fps", "of inference while the other stages run", "1/s", title="beside, fps", rank=5),
    *with_limits(Column("fps", "end to end", "1/s", title="fps")),
    Column("bound_fps", "what the stages allow at most", "1/s", title="bound, fps", rank=4),
    Column("bound_by", "the stage that bounds the pipeline, or the processors", kind=TEXT, title="bound by", rank=2),
    Column("reached", "share of the bound", "%", rank=4),
    *(duration_column(f"p{100 * q:g}_s", "from a frame's reading to its boxes", rank=6) for q in PERCENTILES),
    *with_limits(Column("speedup", "fps over the reference's", kind=RATIO, rank=1)),
    Column("verdict", "end to end, against the reference", kind=TEXT, rank=1),
)
STAGE_COLUMNS = (
    LABEL_COLUMN,
    TRIAL_COLUMN,
    Column("stage", "of the pipeline, in its order", kind=TEXT),
    *with_limits(duration_column("alone_s", "per frame, with nothing beside it")),
    Column("alone_fps", "what it allows", "1/s", title="alone, fps", rank=3),
    *with_limits(duration_column("beside_s", "per frame, in the pipeline", "in the pipeline")),
    duration_column("cpu_s", "processor time per frame, alone, of all threads", "processor time", rank=2),
    duration_column("crowded_s", "the same with all processors busy", "processor time, all busy", rank=3),
    Column("working", "share of the pipeline's time in which it worked", "%"),
    Column("starved", "share in which it had nothing to do", "%", rank=1),
    Column("blocked", "share in which the next queue was full", "%", rank=1),
    Column("queue", "mean number that waited for it, itself included", rank=4),
)
STREAM_COLUMNS = (
    LABEL_COLUMN,
    TRIAL_COLUMN,
    Column("streams", "at once, each like this one, through one engine", kind=COUNT),
    Column("fps", "of all together, predicted", "1/s", title="fps in all"),
    Column("each_fps", "of one of them, predicted", "1/s", title="fps of each"),
    duration_column("p99_s", "from a frame's reading to its boxes, predicted"),
    Column("bound_by", "what bounds them", kind=TEXT, title="bound by"),
    Column("reached_fps", "of all together, where that many ran", "1/s", title="reached, fps"),
    Column("error", "how far the predicted fps is above the measured fps", "%"),
    duration_column("reached_p99_s", "from a frame's reading to its boxes, where that many ran", "reached, p99"),
)
VIDEO = TableKind(
    "video", "Video", "Frames per second of a video end to end and of inference, what bounds it, and latency.",
    _make_video_table, "this run measured no video; `dyno bench video` does", "tables", 15,
    leads=True, sentences=lambda run: words.describe_runs(figures.list_runs(run)),
)  # fmt: skip
STAGES = TableKind(
    "video-stages", "Stages of the video", "Each stage of a video's pipeline, alone and with the others.",
    _make_stages_table, VIDEO.nothing, "tables", 16, leads=True,
)  # fmt: skip
STREAM_TABLE = TableKind(
    "video-streams", "Predicted streams", "Frames per second that several streams would reach through one engine.",
    _make_streams_table, VIDEO.nothing, "tables", 17, leads=True,
)  # fmt: skip


# Timeline of a video's pipeline: working and waiting stages, and overlapping frames.

MAX_DRAWN_TRIALS, DRAWN_FRAMES = 4, 12  # trials drawn, and middle frames of each
STAGE_HEIGHT = 0.8  # height of a stage's row
PALETTE = [color for name, color in COLORS.items() if name != "fake"]


def draw_timeline(run: RunData) -> Any:
    """Draw a row for each stage, with a bar in the frame's colour for its work; None if the run has no video.

    A pale bar follows if the next stage had no room for the frame.
    """
    runs = figures.list_runs(run)[:MAX_DRAWN_TRIALS]
    if not runs:
        return None
    rows = [len(video_run.typical.stages) for video_run in runs]
    with apply_style() as figure_class:
        figure = figure_class(figsize=(WIDTH, 0.8 * len(runs) + 0.3 * sum(rows)), layout="constrained")
        panels = figure.subplots(len(runs), 1, squeeze=False, height_ratios=rows)[:, 0]
        for axes, video_run in zip(panels, runs, strict=True):
            _draw_panel(axes, video_run)
        panels[-1].set_xlabel("ms")
    return figure


def _draw_panel(axes: Any, run: VideoRun) -> None:
    video = run.typical
    begin, end = _choose_window(video)
    axes.set_title(run.trial.label, fontsize=9)
    for row, stage in enumerate(video.stages):
        timeline = video.read_timeline(stage.name)
        for k in np.flatnonzero((timeline.handed > begin) & (timeline.began < end)):
            ms = [1e3 * (times[k] - begin) for times in (timeline.began, timeline.ended, timeline.handed)]
            axes.barh(row, ms[2] - ms[1], STAGE_HEIGHT, ms[1], color=FAINT)
            (bar,) = axes.barh(row, ms[1] - ms[0], STAGE_HEIGHT, ms[0], color=PALETTE[k % len(PALETTE)])
            add_tooltip(
                bar, f"{stage.name} {k}: {ms[1] - ms[0]:.3g} ms, then {ms[2] - ms[1]:.3g} ms without room behind it"
            )
    axes.set(xlim=(0, 1e3 * (end - begin)), ylim=(len(video.stages) - 0.5, -0.5))
    axes.set_yticks(range(len(video.stages)), [stage.name for stage in video.stages])
    axes.grid(axis="y", visible=False)


def _choose_window(video: Video) -> tuple[float, float]:
    """Return the window to draw, in seconds: DRAWN_FRAMES frames around the middle of the video.

    It extends from reading its first frame until the result of the last is known.
    """
    began, known = video.arrays["frame_began"], video.arrays["frame_known"]
    first = max(0, len(began) // 2 - DRAWN_FRAMES // 2)
    return float(began[first]), float(known[min(len(known) - 1, first + DRAWN_FRAMES)])


TIMELINE = Chart(
    "video-timeline",
    "The stages of a video over time, some frames from its middle: a bar is the work on one frame or batch, each in a "
    "different colour; pale bars wait for room in the next stage; gaps wait for the previous stage.",
    draw_timeline,
    18,
)


# Critical path of a video's pipeline: each stage's contribution to the run's duration. It is traced back from the last
# piece of work that ended (Kelley & Walker, Critical-Path Planning and Scheduling, 1959). Work begins when its stage is
# free and an item is in its queue; a stage is free when the next one has taken an item from a full queue.

HAND_OVER = "between stages"
NO_ROOM_S = 1e-4  # a piece of work handed on later than this waited for room


def compute_critical_path(video: Video) -> dict[str, float]:
    """Return the seconds on the critical path by stage and between stages; their sum is the end of the last work."""
    tracks = [video.read_timeline(stage.name) for stage in video.stages]
    path_seconds = dict.fromkeys((*(track.name for track in tracks), HAND_OVER), 0.0)
    for name, seconds in _walk_path(tracks):
        path_seconds[name] += seconds
    return path_seconds


def _walk_path(tracks: list[StageTimeline]) -> Iterator[tuple[str, float]]:
    """Yield the pieces of the path, from its end back to the start of the run."""
    stage_index = max((k for k, track in enumerate(tracks) if len(track.ended)), key=lambda k: tracks[k].ended.max())
    piece = int(tracks[stage_index].ended.argmax())
    while True:
        track = tracks[stage_index]
        begin = float(track.began[piece])
        yield track.name, float(track.ended[piece]) - begin
        stage_index, piece, end = _find_enabler(tracks, stage_index, piece, begin)
        if piece < 0:
            yield HAND_OVER, end
            return
        yield HAND_OVER, end - float(tracks[stage_index].ended[piece])


def _find_enabler(tracks: list[StageTimeline], stage_index: int, piece: int, begin: float) -> tuple[int, int, float]:
    """Find the piece of work whose end allowed this one to begin.

    Returns its stage, its index (-1: the run's start), and the end of the path's part between stages.
    """
    end = begin
    while True:
        track = tracks[stage_index]
        free_piece = track.find_last(track.handed, begin, piece)
        source = _find_source(tracks[stage_index - 1], track, piece) if stage_index else -1
        free_time = float(track.handed[free_piece]) if free_piece >= 0 else -1.0
        source_time = min(float(tracks[stage_index - 1].handed[source]), begin) if source >= 0 else -1.0
        if free_piece < 0 and source < 0:
            return stage_index, -1, end
        enabler = (stage_index, free_piece) if free_time >= source_time else (stage_index - 1, source)
        enabler_track = tracks[enabler[0]]
        has_waited = float(enabler_track.handed[enabler[1]] - enabler_track.ended[enabler[1]]) > NO_ROOM_S
        if not has_waited or enabler[0] + 1 >= len(tracks):
            return *enabler, end
        # It waited for room, which the next stage made by beginning a piece: follow that one.
        next_track = tracks[enabler[0] + 1]
        taker = next_track.find_last(next_track.began, float(enabler_track.handed[enabler[1]]), len(next_track.began))
        if taker < 0 or float(next_track.began[taker]) >= begin:
            return *enabler, end
        stage_index, piece, begin = enabler[0] + 1, taker, float(next_track.began[taker])


def _find_source(before: StageTimeline, track: StageTimeline, piece: int) -> int:
    """Return the previous stage's piece for this one: the last frame of a batch, or the batch of a frame."""
    return math.ceil((piece + 1) * len(before.began) / len(track.began)) - 1


def _make_table(run: RunData) -> Table | None:
    rows = [row for video_run in figures.list_runs(run) for row in _iter_rows(video_run.trial.label, video_run.typical)]
    return PATH_TABLE.build(PATH_COLUMNS, rows, notes=(TABLE_NOTE,), group=("label",)) if rows else None


def _iter_rows(label: str, video: Video) -> Iterator[Row]:
    """Yield a row for each stage and for the time between; empty with several streams, as times are the first one's."""
    if video.facts.streams > 1:
        return
    path_seconds, stages = compute_critical_path(video), {stage.name: stage for stage in video.stages}
    total, frames = sum(path_seconds.values()) or 1.0, max(1, video.facts.frames)
    for name, seconds in path_seconds.items():
        row: Row = {"label": label, "stage": name, "path_ms": 1e3 * seconds / frames, "share": 100 * seconds / total}
        if stage := stages.get(name):
            row |= {
                "work_ms": 1e3 * stage.in_pipeline.value,
                "starved": 100 * stage.starved,
                "blocked": 100 * stage.blocked,
            }
        yield row


PATH_COLUMNS = (
    LABEL_COLUMN,
    Column("stage", "of the pipeline, or between two stages: queues and waking threads", kind=TEXT),
    Column("work_ms", "its time per frame in the pipeline", "ms", title="work, ms"),
    Column("path_ms", "its time on the critical path, per frame", "ms", title="on the path, ms"),
    Column("share", "share of the path", "%", title="share, %"),
    Column("starved", "share of the run in which it waited for something to do", "%", title="waiting for work, %"),
    Column("blocked", "share of the run in which it waited for room behind it", "%", title="waiting for room, %"),
)
TABLE_NOTE = (
    "The critical path is the work that would end the run earlier if it took less time. A stage with a small share has "
    "time to spare; between stages are queues and threads that wake up."
)
PATH_TABLE = TableKind(
    "video-critical-path", "Critical path of the video",
    "Critical path of a video's pipeline: the time of each stage on it, and what the stage waits for.", _make_table,
    "this run measured no video of one stream; `dyno bench video` does", "tables", 18,
)  # fmt: skip


# Comparison of two runs of a video, B with A, end to end and by stage.

END_TO_END = "end to end"
COMPARISON_TABLE = TableKind("video-comparison", "Videos, B against A",
                             "Time per frame of two runs of one video, end to end and in each stage.",
                             command="dyno compare RUN RUN")  # fmt: skip
COMPARISON_COLUMNS = (
    LABEL_COLUMN,
    Column("part", "the whole pipeline, or one of its stages while the others run", kind=TEXT),
    Column("a_ms", "A's time per frame", "ms", title="A ms"),
    Column("b_ms", "B's", "ms", title="B ms"),
    *with_limits(Column("ratio", "B's time over A's: above 1 is slower", kind=FINE, title="B / A")),
    Column("verdict", "whether that is real: end to end over all trials as one family, and so the stages", kind=TEXT),
    Column("rounds_a", "of A", rank=2),
    Column("rounds_b", "of B", rank=2),
)  # fmt: skip
OTHER_VIDEO = "not comparable: another video, or another number of streams"
Pair = tuple[VideoRun, VideoRun]


def make_comparison_table(trials: Sequence[tuple[TrialResult, TrialResult]]) -> Table | None:
    """Build rows of the videos of the pairs (A's trial, B's); None if no pair has videos on both sides."""
    pairs = [(a, b) for x, y in trials if (a := figures.list_videos(x)) and (b := figures.list_videos(y))]
    if not pairs:
        return None
    matches = [pair for pair in pairs if _make_shot_key(pair[0]) == _make_shot_key(pair[1])]
    totals = [(pair, END_TO_END, pair[0].seconds, pair[1].seconds) for pair in matches]
    rows = [*_judge_parts(totals), *_judge_parts([part for pair in matches for part in _iter_stages(pair)])]
    rows += [
        {"label": b.trial.label, "part": END_TO_END, "verdict": OTHER_VIDEO} for a, b in pairs if (a, b) not in matches
    ]
    order = [b.trial.label for _, b in pairs]
    rows.sort(key=lambda row: order.index(row["label"]))
    notes, printed = tuple(_write_sentences(rows)), keep_printed(COMPARISON_COLUMNS)
    return COMPARISON_TABLE.build(COMPARISON_COLUMNS, rows, notes=notes, group=("label",), printed=printed)


def _make_shot_key(run: VideoRun) -> tuple[int, ...]:
    """Return the facts that must be equal in comparable videos."""
    facts = run.typical.facts
    return facts.frames, facts.height, facts.width, facts.streams


def _iter_stages(pair: Pair) -> Iterator[tuple[Pair, str, list[float], list[float]]]:
    """Yield the times per frame of each stage common to both pipelines, by round."""
    a, b = ([{stage.name: stage.in_pipeline.value for stage in video.stages} for video in run.videos] for run in pair)
    for name in a[0]:
        if all(name in seconds_of for seconds_of in (*a, *b)):
            yield pair, name, [seconds_of[name] for seconds_of in a], [seconds_of[name] for seconds_of in b]


def _judge_parts(parts: Sequence[tuple[Pair, str, list[float], list[float]]]) -> list[Row]:
    """Return a row for each part, all judged as one family."""
    speedups = stats.decide_family([stats.collect_evidence(b, a) for _, _, a, b in parts])
    return [
        {
            "label": pair[1].trial.label, "part": name, "a_ms": 1e3 * stats.find_center(a).value,
            "b_ms": 1e3 * stats.find_center(b).value, "ratio": 1 / speedup.value, "ratio_low": 1 / speedup.high,
            "ratio_high": 1 / speedup.low, "verdict": speedup.verdict, "rounds_a": len(a), "rounds_b": len(b),
        }
        for (pair, name, a, b), speedup in zip(parts, speedups, strict=True)
    ]  # fmt: skip


def _write_sentences(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["part"] == END_TO_END and "ratio" in row:
            ratio = format_ratio(row["ratio"], row["ratio_low"], row["ratio_high"])
            yield f"{clean_text(row['label'])} end to end: {describe_time(ratio, 'time per frame')}: {row['verdict']}."
    yield "A stage's time is that in the pipeline. The gate's conditions are on inference alone."
