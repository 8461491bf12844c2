"""Times of layers from a profiler that reports as the library's does; tests/gpu has the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dyno.worker.backends.tensor_rt import layers
from dyno.worker.facts.engine import SlowLayer

CONV = layers.EngineLayer("conv1", "CaskConvolution", (), (), "sm80_xmma", layers.Weights("int8", 9408))
MOVE = layers.EngineLayer("to int8", "Reformat", (), (), "0x3e8")


class Profiler:
    """What `IProfiler` is to a subclass."""

    def __init__(self) -> None:
        pass


def context_of(runs: list[dict[str, float]]) -> tuple[Any, Any]:
    """A context that reports these milliseconds, one dictionary a run, and its launch."""
    context, left = SimpleNamespace(profiler=None), iter(runs)

    def launch() -> None:
        for name, milliseconds in next(left).items():
            context.profiler.report_layer_time(name, milliseconds)

    return context, launch


def test_the_median_of_a_layer_leaves_the_first_run_out() -> None:
    runs = [{"conv1": 900.0, "to int8": 900.0}, *({"conv1": 3.0 + i, "to int8": 1.0} for i in range(5))]
    found = layers.profile_layers(SimpleNamespace(IProfiler=Profiler), *context_of(runs))
    assert found == {"conv1": pytest.approx(5e-3), "to int8": pytest.approx(1e-3)}


def test_a_run_has_each_layer_once_and_those_nobody_listed_stand_at_the_end() -> None:
    listed = layers.inside([CONV, MOVE, layers.EngineLayer("folded", "Constant", (), (), "")], "TensorRT 10")
    reports = [{"conv1": 3.0, "to int8": 1.0}, {"conv1": 4.0, "new": 0.5}]
    runs = layers.watch_layers(SimpleNamespace(IProfiler=Profiler), *context_of(reports), 2)
    inside, seconds = layers.read_layer_times(listed, runs)
    assert [layer.name for layer in inside.layers] == ["conv1", "to int8", "folded", "new"]
    assert [layer.skipped for layer in inside.layers] == [False, False, True, False]
    assert [layer.moves for layer in inside.layers] == [False, True, False, False]
    assert (inside.layers[0].computes_in, inside.layers[0].tactic) == ("int8", "sm80_xmma")
    assert seconds == pytest.approx(np.array([[3e-3, 1e-3, 0, 0], [4e-3, 0, 0, 0.5e-3]]))


def test_a_layer_reported_several_times_in_a_run_is_their_sum() -> None:
    context = SimpleNamespace(profiler=None)

    def launch() -> None:
        for _ in range(3):
            context.profiler.report_layer_time("body of a loop", 2.0)

    runs = layers.watch_layers(SimpleNamespace(IProfiler=Profiler), context, launch, 2)
    assert runs == [{"body of a loop": pytest.approx(6e-3)}] * 2


def test_of_layers_of_one_name_the_first_has_the_time() -> None:
    inside, seconds = layers.read_layer_times(layers.inside([CONV, CONV], "TensorRT 10"), [{"conv1": 1e-3}])
    assert [layer.skipped for layer in inside.layers] == [False, True]
    assert seconds == pytest.approx(np.array([[1e-3, 0]]))


def test_shares_go_by_kind_and_by_layer_largest_first() -> None:
    seconds = {"to int8": 1e-3, "conv1": 2e-3, "a kernel without a listing": 1e-3}
    assert layers.share_by_operator([MOVE, CONV], seconds) == {
        "CaskConvolution": 0.5,
        "Reformat": 0.25,
        "unknown": 0.25,
    }
    first, *rest = layers.list_slowest([MOVE, CONV], seconds)
    assert first == SlowLayer("conv1", "CaskConvolution", "int8", "sm80_xmma", 0.5)
    assert [one.name for one in rest] == ["to int8", "a kernel without a listing"]


def test_a_library_that_reports_nothing_gives_nothing() -> None:
    seconds = layers.profile_layers(SimpleNamespace(IProfiler=Profiler), *context_of([{}] * layers.RUNS))
    assert (seconds, layers.share_by_operator([CONV], {}), layers.list_slowest([CONV], {})) == ({}, {}, ())


def test_time_spent_on_types_and_layouts_is_a_note() -> None:
    said = layers.notes([CONV, MOVE, *[CONV] * 10], "int8", {"CaskConvolution": 0.7, "Reformat": 0.3})
    assert said == ["30% of the time goes into changing types and layouts (Reformat)"]
