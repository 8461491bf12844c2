"""Options of an engine: read once, refused in one line, and only what differs from the default shapes the engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dyno.worker.backends.tensor_rt.settings import RUNNING, Settings
from dyno.worker.spec import UserError


def test_nothing_said_is_the_default() -> None:
    assert Settings.of({}) == Settings()
    assert Settings().options() == {}


def test_only_what_differs_is_kept() -> None:
    options: dict[str, Any] = {"optimization": 5, "refit": False, "profile": "static", "samples": 8, "graph": False}
    assert Settings.of(options).options() == {"optimization": 5}


def test_options_and_settings_say_the_same() -> None:
    made = Settings.of({"profile": 8, "hardware_compatible": True, "build": 2, "timing_cache": False})
    assert (made.profile, made.hardware_compatible) == ("8", "ampere_plus")
    assert Settings.of(made.options()) == made


def test_the_runner_s_options_are_none_of_the_builder_s() -> None:
    assert not {field.name for field in dataclasses.fields(Settings)} & set(RUNNING)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimization": 6}, "optimization must be a level from 0 to 5, not 6"),
        ({"optimization": "high"}, "optimization must be a whole number, not 'high'"),
        ({"optimization": True}, "optimization must be a whole number, not True"),
        ({"refit": 1}, "refit must be true or false, not 1"),
        ({"workspace_mb": -1}, "workspace_mb must be a size in MiB, not -1"),
        ({"route": "magic"}, "unknown route 'magic'; known: auto, graph, flags, calibrator"),
        ({"calibrator": "mse"}, "unknown calibrator 'mse'; known: entropy, minmax"),
    ],
)
def test_a_value_that_can_t_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        Settings.of(options)
    assert str(caught.value) == said
