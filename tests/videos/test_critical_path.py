"""The critical path of pipelines whose every event is known."""

from __future__ import annotations

import numpy as np
import pytest

from dyno.videos.figures import Video
from dyno.videos.tables import HAND_OVER, shares
from dyno.worker.facts.job import VideoFacts

NAMES = ("decode", "preprocess", "inference", "postprocess")
COUNT = 200


def pipeline(*seconds: float, depth: int = 4, wake: float = 0.0, first: float = 0.0) -> Video:
    """Stages that work so long on each frame, with room for `depth` frames before each, whose threads take `wake` to
    begin; nothing happens before `first`."""
    began, ended, handed = (np.zeros((len(seconds), COUNT)) for _ in range(3))
    for k in range(COUNT):
        for s, each in enumerate(seconds):
            came = handed[s - 1, k] if s else first
            began[s, k] = max(came, handed[s, k - 1] if k else 0.0) + wake
            ended[s, k] = began[s, k] + each
            handed[s, k] = ended[s, k]
        for s in range(len(seconds) - 1):  # room: the next stage has begun the frame `depth` before
            if k >= depth:
                handed[s, k] = max(ended[s, k], began[s + 1, k - depth])
                began[s + 1, k] = max(handed[s, k], handed[s + 1, k - 1]) + wake
                ended[s + 1, k] = handed[s + 1, k] = began[s + 1, k] + seconds[s + 1]
    names = NAMES[: len(seconds)]
    arrays = {f"{name}_{key}": times[s] for s, name in enumerate(names)
              for key, times in (("began", began), ("ended", ended), ("handed", handed))}  # fmt: skip
    arrays |= {f"alone_{name}": np.full(COUNT, each) for name, each in zip(names, seconds, strict=True)}
    arrays |= {f"{name}_waiting": np.ones(COUNT, int) for name in names}
    arrays |= {"frame_began": began[0], "frame_known": ended[-1], "frame_boxes": np.zeros(COUNT, int)}
    return Video(VideoFacts(frames=COUNT, answered=COUNT, seconds=float(ended[-1, -1])), arrays)


@pytest.mark.parametrize("slow", range(4))
def test_the_slowest_stage_has_nearly_all_of_the_path(slow: int) -> None:
    seconds = [0.001] * 4
    seconds[slow] = 0.010
    video = pipeline(*seconds)
    found = shares(video)
    assert sum(found.values()) == pytest.approx(video.facts.seconds)
    assert found[NAMES[slow]] > 0.97 * video.facts.seconds
    assert all(value >= 0 for value in found.values()) and found[HAND_OVER] < 0.001


def test_the_ends_of_the_run_belong_to_the_stages_that_they_wait_for() -> None:
    found = shares(pipeline(0.001, 0.002, 0.010, 0.003))
    assert found["inference"] == pytest.approx(COUNT * 0.010)
    assert [found[name] for name in ("decode", "preprocess", "postprocess")] == pytest.approx([0.001, 0.002, 0.003])


def test_waking_up_and_a_late_beginning_are_between_stages() -> None:
    video = pipeline(0.001, 0.010, wake=0.002, first=0.5)
    found = shares(video)
    assert sum(found.values()) == pytest.approx(video.facts.seconds)
    assert found[HAND_OVER] == pytest.approx(0.5 + 0.002 * (COUNT + 1), rel=0.01)
    assert found["preprocess"] == pytest.approx(COUNT * 0.010)


def test_a_single_stage_is_the_path() -> None:
    assert shares(pipeline(0.004)) == {"decode": pytest.approx(COUNT * 0.004), HAND_OVER: pytest.approx(0, abs=1e-9)}
