"""What a session on a GPU can be asked for; what it does there is tested in tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest

from dyno.worker.sessions.device_session import SLOTS, slots_of
from dyno.worker.spec import Dims, ModelSpec, Trial, UserError


def trial(**options: Any) -> Trial:
    return Trial(ModelSpec("net", "fake:net"), "tensorrt", "fp16", Dims(1, 8, 8), options)


def test_batches_in_flight() -> None:
    assert slots_of(trial()) == SLOTS
    assert slots_of(trial(slots=1)) == 1


@pytest.mark.parametrize("slots", [0, -1, 1.5, "many"])
def test_slots_that_are_none(slots: Any) -> None:
    with pytest.raises(UserError, match="slots is"):
        slots_of(trial(slots=slots))
