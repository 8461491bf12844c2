"""The tables of videos: a row for each trial, and one for each stage of each."""

from __future__ import annotations

from collections.abc import Mapping

from dyno.analysis import stats
from dyno.analysis.formatting import limits, show, significant
from dyno.analysis.presentation.table import COUNT, NUMBER, RATIO, TEXT, Column, Row, Table, TableKind
from dyno.analysis.records.arrays import read_npz
from dyno.analysis.records.run_data import RunData
from dyno.analysis.video.figures import PERCENTILES, Video, inverse

ARRAYS = "video.npz"


def of_run(run: RunData) -> dict[str, Video]:
    """The run's videos, by the trial's id, in the order of the trials."""
    found = {}
    for trial in run.records:
        for each in trial.rounds:
            path = each.folder / ARRAYS
            if each.facts.video is not None and path.is_file():
                found[trial.id] = Video(each.facts.video, read_npz(path))
    return found


def _video(run: RunData) -> Table | None:
    videos = of_run(run)
    if not videos:
        return None
    named = {t.id: t for t in run.records}
    first = next((v for key, v in videos.items() if named[key].trial["backend"] == "pytorch"), None)
    return VIDEO.of(RUN_COLUMNS, [{**_identity(named[key]), **_row(v, first)} for key, v in videos.items()])


def _identity(trial: object) -> Row:
    return {}


def _row(video: Video, reference: Video | None) -> Row:
    known = video.latencies("known")
    return {
        "frames": video.facts.frames,
        "inference_fps": video.inference_rate, "inference_beside_fps": video.inference_beside, "fps": video.rate,
        "speedup": video.rate / reference.rate if reference is not None else None,
        "kept": video.rate / video.inference_rate,
        "bound_fps": video.bound.rate.value, "bound_by": video.bound.name, "reached": video.bound.share(video.rate),
        **{f"latency_p{100 * q:g}_s": _percentile(known, q) for q in PERCENTILES},
    }  # fmt: skip


def _percentile(samples: object, q: float) -> float | None:
    return None


def _stages(run: RunData) -> Table | None:
    return None
