"""The tables of videos: a row for each trial, one for each stage of each, and one for each number of streams."""

from __future__ import annotations

from collections.abc import Iterator

from dyno.analysis import stats
from dyno.analysis.formatting import counting, show, significant
from dyno.analysis.presentation.limits import duration, limited, limits_of, printed
from dyno.analysis.presentation.table import COUNT, RATIO, TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.analysis.records.run_data import RunData
from dyno.analysis.stats import Speedup
from dyno.analysis.video import runs, streams, words
from dyno.analysis.video.figures import PERCENTILES, Stage, Video, inverse
from dyno.analysis.video.runs import VideoRun

STREAMS = (1, 2, 4, 8, 16, 32)


def _make_video_table(run: RunData) -> Table | None:
    filmed = runs.of_run(run)
    if not filmed:
        return None
    rows = [_make_row(each) for each in filmed]
    if len(filmed) > 1:
        rows = [row | _make_speedup_cells(gain) for row, gain in zip(rows, runs.speedups(filmed, run), strict=True)]
    return VIDEO.of(VIDEO_COLUMNS, rows, notes=tuple(_video_notes(filmed)), printed=printed(VIDEO_COLUMNS))


def _make_speedup_cells(gain: Speedup | None) -> Row:
    """Return the columns against the reference, of which None is the reference's own."""
    return {**limited("speedup", gain), "verdict": gain.verdict} if gain else {"speedup": 1.0, "verdict": "reference"}


def _make_row(filmed: VideoRun) -> Row:
    video = filmed.typical
    known = video.latencies("known")
    return {
        "label": filmed.trial.label, "trial": filmed.trial.id, "rounds": len(filmed.videos),
        "frames": video.facts.frames,
        "streams": video.facts.streams if video.facts.streams > 1 else None,
        "dropped": video.facts.dropped if video.facts.live else None,
        "objects": sum(video.facts.objects.values()) if video.facts.tracker else None,
        "inference_fps": video.inference_rate, "beside_fps": video.inference_beside,
        **limited("fps", filmed.rate), "bound_fps": video.bound.rate.value, "bound_by": video.bound.name,
        "reached": 100 * video.bound.share(video.rate),
        **{f"p{100 * q:g}_s": stats.percentile_of(known, q) if len(known) >= least else None for q, least in LEAST},
    }  # fmt: skip


LEAST = tuple((q, 1 if q == PERCENTILES[0] else stats.samples_for(q)) for q in PERCENTILES)


def _video_notes(filmed: list[VideoRun]) -> Iterator[str]:
    yield (
        "fps: end to end, from the first frame's reading to the closed file. inference alone and beside: with nothing "
        "else running, and while the other stages run. bound: the lower of the slowest stage's rate and that of the "
        "processors, from the stages alone. p50 to p99: from a frame's reading until its boxes are known."
    )
    if len(filmed) > 1:
        yield f"speedup: fps over that of {runs.reference(filmed).trial.label}."


def _make_stages_table(run: RunData) -> Table | None:
    rows = [_stage_row(f, stage) for f in runs.of_run(run) for stage in f.typical.stages]
    if not rows:
        return None
    return STAGES.of(STAGE_COLUMNS, rows, group=("label",), below=_stage_notes, printed=printed(STAGE_COLUMNS))


def _stage_row(filmed: VideoRun, stage: Stage) -> Row:
    return {
        "label": filmed.trial.label, "trial": filmed.trial.id, "stage": stage.name,
        **limited("alone_s", stage.alone), "alone_fps": inverse(stage.alone).value,
        **limited("beside_s", stage.beside), "cpu_s": stage.cpu, "crowded_s": stage.crowded,
        "working": 100 * stage.working,
        "starved": 100 * stage.starved, "blocked": 100 * stage.blocked, "queue": stage.queue,
    }  # fmt: skip


def _stage_notes(rows: list[Row]) -> list[str]:
    return [
        "alone and in the pipeline: time per frame. working, starved and blocked: shares of the pipeline's time in "
        "which the stage worked, waited for something to do, and waited for room behind it."
    ]


def _make_streams_table(run: RunData) -> Table | None:
    filmed = runs.of_run(run)
    rows = [_stream_row(f, count) for f in filmed for count in sorted({*STREAMS, f.typical.facts.streams})]
    videos = {f.trial.label: f for f in filmed}

    def write_notes(part: list[Row]) -> list[str]:
        return stream_sentences(videos[part[0]["label"]].typical, part)

    if not rows:
        return None
    return STREAM_TABLE.of(STREAM_COLUMNS, rows, group=("label",), below=write_notes, printed=printed(STREAM_COLUMNS))


def _stream_row(filmed: VideoRun, count: int) -> Row:
    video = filmed.typical
    predicted = streams.predict(video, count)
    row = {
        "label": filmed.trial.label, "trial": filmed.trial.id, "streams": count, "fps": predicted.rate,
        "each_fps": predicted.each, "p99_s": predicted.p99, "bound_by": predicted.bound,
    }  # fmt: skip
    if count != video.facts.streams:
        return row
    known = video.latencies("known")
    p99 = stats.percentile_of(known, PERCENTILES[-1]) if len(known) >= stats.samples_for(PERCENTILES[-1]) else None
    return row | {"reached_fps": video.rate, "error": 100 * (predicted.rate / video.rate - 1), "reached_p99_s": p99}


def stream_sentences(video: Video, rows: list[Row]) -> list[str]:
    """Describe the error of the prediction where it was tried, and how many streams fit at the source's rate."""
    off = next(row["error"] for row in rows if row["streams"] == video.facts.streams) / 100
    said = [
        "Predicted from the stages alone, with one engine for all streams and videos that are read as fast as they are "
        f"taken. For {counting(video.facts.streams, 'stream')}, which ran, it is {show(abs(off), 'percentage')} "
        f"{'above' if off >= 0 else 'below'} what was reached."
    ]
    if video.facts.rate > 0:
        fit = streams.fitting(video, video.facts.rate)
        most = f"{fit} or more" if fit == streams.MOST_STREAMS else str(fit)
        said.append(
            f"Streams that fit at this video's own {significant(video.facts.rate)} frames/s, by the bounds: {most}."
        )
    return said


LABEL = Column("label", "model, backend with its options, precision, batch, size", kind=TEXT, title="trial")
TRIAL = Column("trial", "the trial's id", kind=TEXT)
VIDEO_COLUMNS = (
    LABEL,
    TRIAL,
    Column("rounds", "times that the video was run", kind=COUNT, rank=8),
    Column("frames", "that were answered", kind=COUNT, rank=7),
    Column("streams", "that ran at once, where it was more than one", kind=COUNT),
    Column("dropped", "frames of a live source that came too fast", kind=COUNT),
    Column("objects", "that were followed through the video", kind=COUNT, rank=6),
    Column("inference_fps", "of inference alone, host to host", "1/s", title="inference alone, fps", rank=3),
    Column("beside_fps", "of inference while the other stages run", "1/s", title="beside, fps", rank=5),
    Column("fps", "end to end", "1/s", title="fps", interval=True),
    Column("fps_low", "lower limit over rounds", "1/s"),
    Column("fps_high", "upper limit over rounds", "1/s"),
    Column("bound_fps", "what the stages allow at most", "1/s", title="bound, fps", rank=4),
    Column("bound_by", "the stage that bounds the whole, or the processors", kind=TEXT, title="bound by", rank=2),
    Column("reached", "share of the bound", "%", rank=4),
    duration("p50_s", "from a frame's reading to its boxes", rank=6),
    duration("p95_s", "from a frame's reading to its boxes", rank=6),
    duration("p99_s", "from a frame's reading to its boxes", rank=6),
    Column("speedup", "fps over the reference's", kind=RATIO, interval=True, rank=1),
    *limits_of("speedup", "", RATIO),
    Column("verdict", "end to end, against the reference", kind=TEXT, rank=1),
)
STAGE_COLUMNS = (
    LABEL,
    TRIAL,
    Column("stage", "of the pipeline, in its order", kind=TEXT),
    duration("alone_s", "per frame, with nothing beside it"),
    *limits_of("alone_s", "s"),
    Column("alone_fps", "what it allows", "1/s", title="alone, fps", rank=3),
    duration("beside_s", "per frame, in the pipeline", "in the pipeline"),
    *limits_of("beside_s", "s"),
    duration("cpu_s", "processor time per frame, alone, of all threads", "processor time", rank=2),
    duration("crowded_s", "the same with every processor at work", "processor time, all busy", rank=3),
    Column("working", "share of the pipeline's time in which it worked", "%"),
    Column("starved", "share in which it had nothing to do", "%", rank=1),
    Column("blocked", "share in which the next queue was full", "%", rank=1),
    Column("queue", "mean number that waited for it, itself included", rank=4),
)
STREAM_COLUMNS = (
    LABEL,
    TRIAL,
    Column("streams", "at once, each like this one, through one engine", kind=COUNT),
    Column("fps", "of all together, predicted", "1/s", title="fps in all"),
    Column("each_fps", "of one of them, predicted", "1/s", title="fps of each"),
    duration("p99_s", "from a frame's reading to its boxes, predicted"),
    Column("bound_by", "what bounds them", kind=TEXT, title="bound by"),
    Column("reached_fps", "of all together, where that many ran", "1/s", title="reached, fps"),
    Column("error", "how far the predicted fps is above what was reached", "%"),
    duration("reached_p99_s", "from a frame's reading to its boxes, where that many ran", "reached, p99"),
)
VIDEO = TableKind(
    "video", "Video", "Frames per second of a video end to end and of inference, what bounds it, and latency.",
    _make_video_table, "this run is of no video; `dyno video` makes one", "tables", 15,
    leads=True, sentences=lambda run: words.of_run(runs.of_run(run)),
)  # fmt: skip
STAGES = TableKind(
    "video-stages", "Stages of the video", "Each stage of a video's pipeline, alone and beside the others.",
    _make_stages_table, VIDEO.nothing, "tables", 16, leads=True,
)  # fmt: skip
STREAM_TABLE = TableKind(
    "video-streams", "Predicted streams", "How many frames per second several streams would reach through one engine.",
    _make_streams_table, VIDEO.nothing, "tables", 17, leads=True,
)  # fmt: skip
