"""The options of a video, as Python may give them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from dyno.worker.spec import UserError
from dyno.worker.video.options import VideoOptions


def test_numbers_of_numpy_are_numbers() -> None:
    options = VideoOptions(streams=np.int64(2), confidence=np.float32(0.5))  # type: ignore[arg-type]
    assert json.loads(json.dumps(dataclasses.asdict(options)))["streams"] == 2
    assert options.confidence == 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"streams": "2"}, "streams is '2'; it must be a whole number"),
        ({"confidence": None}, "confidence is None; it must be a number"),
        ({"frame_size": 960}, "frame_size is 960; it must be text"),
        ({"confidence": 1.5}, "confidence is 1.5; it must be between 0 and 1"),
    ],
)
def test_a_wrong_option_is_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        VideoOptions(**options)
    assert str(caught.value) == said
