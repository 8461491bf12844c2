"""Every option of every backend says what it may be, and says it before anything runs."""

from __future__ import annotations

import pytest

from dyno.worker import registry
from dyno.worker.option_values import Check, check_values, flag, number, one_of, whole
from dyno.worker.spec import Option, UserError

EVERY = [*registry.names(), "fake"]
# Text of no fixed form: tactic sources by name, and what hardware an engine is compatible with.
FREE = {"tactics", "hardware_compatible"}


@pytest.mark.parametrize("name", EVERY)
def test_every_option_says_what_it_may_be(name: str) -> None:
    found = registry.find(name)
    assert set(found.options) == set(found.values), "declare `values` beside `options`"
    for option in set(found.options) - FREE:
        said = found.values[option]("no such value")
        assert said and "\n" not in said, option
        with pytest.raises(UserError, match=f"^{option}=no such value: {name}'s {option} must be "):
            found.check_options({option: "no such value"})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("onnxruntime", {"optimization": "basic", "spinning": False, "opset": 17, "keep": 0, "input": "uint8"}),
        ("openvino", {"streams": 2, "pinning": True, "method": "percentile", "percentile": 99.9}),
        ("compile", {"mode": "max-autotune", "freeze": False, "channels_last": True}),
        ("tensorrt", {"profile": "1:8:16|17:32:64", "optimization": 5, "hardware_compatible": True, "tactics": "none"}),
        ("tensorrt", {"profile": 8, "graph": False, "slots": 2, "route": "flags", "timing_cache": False}),
        ("tensorrt", {"profile": "x:1x3x8x8,2x3x8x8,4x3x8x8"}),
        ("torch_tensorrt", {"ir": "dynamo", "profile": "1:2:4", "optimization": 0}),
    ],
)
def test_what_may_be_passes(name: str, options: dict[str, Option]) -> None:
    registry.find(name).check_options(options)


@pytest.mark.parametrize(
    ("check", "value", "kind"),
    [
        (one_of("all", "basic"), "basik", "one of all, basic; did you mean basic?"),
        (flag, 1, "true or false"),
        (whole(1), 0, "a whole number of at least 1"),
        (whole(1), True, "a whole number of at least 1"),
        (whole(0, 5), 6, "a whole number from 0 to 5"),
        (whole(0, 5), 2.5, "a whole number from 0 to 5"),
        (number(50, 100), 101, "a number from 50 to 100"),
    ],
)
def test_checks_in_words(check: Check, value: Option, kind: str) -> None:
    with pytest.raises(UserError) as e:
        check_values("engine", {"name": value, "other": "anything"}, {"name": check})
    assert str(e.value).endswith(f"engine's name must be {kind}")
