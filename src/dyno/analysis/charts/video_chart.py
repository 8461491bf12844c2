"""The stages of a video's pipeline over time: who works, who waits, and how frames overlap."""

from __future__ import annotations

from typing import Any

import numpy as np

from dyno.analysis.presentation.chart import Chart
from dyno.analysis.records.run_data import RunData
from dyno.analysis.style import COLORS, FAINT, WIDTH, styled, tip
from dyno.analysis.video import runs
from dyno.analysis.video.figures import Video
from dyno.analysis.video.runs import VideoRun

MOST_TRIALS, FRAMES = 4, 12  # that are drawn: trials, and frames of each from the middle of the video
HEIGHT = 0.8  # of a stage's row
PALETTE = [color for name, color in COLORS.items() if name != "fake"]


def timeline(run: RunData) -> Any:
    """Draw a row for each stage, with a bar for each frame's work in the frame's colour; None if the run has no video.

    A pale bar follows where the next stage had no room for the frame.
    """
    filmed = runs.of_run(run)[:MOST_TRIALS]
    if not filmed:
        return None
    rows = [len(each.typical.stages) for each in filmed]
    with styled() as figure_class:
        figure = figure_class(figsize=(WIDTH, 0.8 * len(filmed) + 0.3 * sum(rows)), layout="constrained")
        places = figure.subplots(len(filmed), 1, squeeze=False, height_ratios=rows)[:, 0]
        for axes, each in zip(places, filmed, strict=True):
            _draw_panel(axes, each)
        places[-1].set_xlabel("ms")
    return figure


def _draw_panel(axes: Any, filmed: VideoRun) -> None:
    video = filmed.typical
    begin, end = _choose_window(video)
    axes.set_title(filmed.trial.label, fontsize=9)
    for row, stage in enumerate(video.stages):
        began, ended, handed = (video.arrays[f"{stage.name}_{key}"] for key in ("began", "ended", "handed"))
        for k in np.flatnonzero((handed > begin) & (began < end)):
            at = [1e3 * (times[k] - begin) for times in (began, ended, handed)]
            axes.barh(row, at[2] - at[1], HEIGHT, at[1], color=FAINT)
            (bar,) = axes.barh(row, at[1] - at[0], HEIGHT, at[0], color=PALETTE[k % len(PALETTE)])
            tip(bar, f"{stage.name} {k}: {at[1] - at[0]:.3g} ms, then {at[2] - at[1]:.3g} ms without room behind it")
    axes.set(xlim=(0, 1e3 * (end - begin)), ylim=(len(video.stages) - 0.5, -0.5))
    axes.set_yticks(range(len(video.stages)), [stage.name for stage in video.stages])
    axes.grid(axis="y", visible=False)


def _choose_window(video: Video) -> tuple[float, float]:
    """Return the window to draw, in seconds: FRAMES frames around the middle of the video.

    It runs from the start of reading its first frame until the result of the last is known.
    """
    began, known = video.arrays["frame_began"], video.arrays["frame_known"]
    first = max(0, len(began) // 2 - FRAMES // 2)
    return float(began[first]), float(known[min(len(known) - 1, first + FRAMES)])


TIMELINE = Chart(
    "video-timeline",
    "The stages of a video over time, some frames from its middle: a bar is the work on one frame or batch, each in a "
    "different colour; pale bars wait for room in the next stage; gaps wait for the previous stage.",
    timeline,
    18,
)
