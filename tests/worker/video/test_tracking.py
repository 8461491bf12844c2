"""Identities of boxes from frame to frame."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from dyno.worker.spec import Unavailable
from dyno.worker.tasks.postprocess import Detections
from dyno.worker.video.drawing import NOBODY, Tracker
from dyno.worker.video.media import Frame, Rgb
from dyno.worker.video.options import TRACKERS

RATE = 25.0


def seen(
    k: int, places: list[float], kinds: list[int] | None = None, scores: list[float] | None = None, timed: bool = True
) -> Frame:
    """Frame k with a box of 40 x 40 at each of those places, from the left."""
    boxes = np.array([[left, 10, left + 40, 50] for left in places], np.float32).reshape(-1, 4)
    found = Detections(
        boxes, np.array(scores or [0.9] * len(places)), np.array(kinds or [0] * len(places), int), None, None
    )
    image = np.zeros((100, 900, 3), np.uint8)
    return Frame(k, Rgb(image), 0, seconds=k / RATE if timed else None, detections=found)


def followed(tracker: Tracker, frames: list[Frame]) -> list[list[int]]:
    for frame in frames:
        tracker.identify(frame)
    return [frame.identities.tolist() for frame in frames if frame.identities is not None]


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_boxes_in_any_order(name: str) -> None:
    pytest.importorskip("trackers")
    tracker = Tracker(name, RATE, 0.25)
    frames = [seen(k, [5 * k, 800 - 5 * k][:: 1 if k % 2 else -1], [3, 7][:: 1 if k % 2 else -1]) for k in range(12)]
    last = followed(tracker, frames)[-4:]
    assert NOBODY not in last[-1] and len(set(last[-1])) == 2
    assert last == [last[0], last[0][::-1]] * 2
    assert tracker.counts == {"3": 1, "7": 1}


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_frames_without_boxes_or_times(name: str) -> None:
    pytest.importorskip("trackers")
    tracker = Tracker(name, 0.0, 0.25)
    assert followed(tracker, [seen(k, []) for k in range(3)]) == [[], [], []]
    late = followed(tracker, [seen(k, [5 * k], timed=False) for k in range(3, 12)])
    again = followed(tracker, [seen(k, [5 * k + 45]) for k in range(3)])  # times that go back
    assert late[-1] == again[-1] and late[-1] != [NOBODY]


def test_a_gap_in_time_is_more_than_a_frame() -> None:
    pytest.importorskip("trackers")
    for pause, same in ((5, True), (100, False)):
        tracker = Tracker("bytetrack", RATE, 0.25)
        before = followed(tracker, [seen(k, [50]) for k in range(10)])[-1]
        after = followed(tracker, [seen(k, [50]) for k in range(10 + pause, 20 + pause)])[-1]
        assert (before == after) is same


def test_an_object_is_of_the_class_of_most_of_its_boxes() -> None:
    pytest.importorskip("trackers")
    tracker = Tracker("bytetrack", RATE, 0.25)
    followed(tracker, [seen(k, [5 * k], [1 if k == 5 else 2]) for k in range(12)])
    assert tracker.counts == {"2": 1}


def test_weak_boxes_carry_an_object_on_and_begin_none() -> None:
    pytest.importorskip("trackers")
    tracker = Tracker("bytetrack", RATE, 0.5)
    scores = [0.9] * 5 + [0.3] * 5
    frames = [seen(k, [5 * k, 600], scores=[scores[k], 0.3]) for k in range(10)]
    assert followed(tracker, frames)[-1] == [0, NOBODY]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackers", None)
    with pytest.raises(Unavailable, match=r"inference-dyno\[track\]"):
        Tracker("sort", RATE, 0.5)
