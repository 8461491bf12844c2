"""Which run and which layer an event of ONNX Runtime's profile belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from dyno.worker.facts.job import Layer
from dyno.worker.layers.graph import list_kernels
from dyno.worker.sessions.onnx_runtime_session import by_run, events_in


def event(name: str, at: int, dur: int, index: str = "", cat: str = "Node") -> dict[str, Any]:
    return {"name": name, "cat": cat, "ts": at, "dur": dur, "args": {"node_index": index}}


def test_kernels_are_told_apart_by_run_and_by_node() -> None:
    # The file isn't in order, two nodes have one name, and a kernel runs before the first run, as the session begins.
    events = [
        event("c_kernel_time", 5, 9, "0"),
        event("c_kernel_time", 31, 3, "0"), event("c_kernel_time", 35, 4, "1"),
        event("model_run", 30, 10, cat="Session"),
        event("c_kernel_time", 11, 1, "0"), event("c_fence_before", 12, 7, "0"), event("c_kernel_time", 15, 2, "1"),
        event("model_run", 10, 10, cat="Session"),
    ]  # fmt: skip
    first, second = by_run(events)
    zero, one = ("c_kernel_time", "0"), ("c_kernel_time", "1")
    assert first == pytest.approx({zero: 1e-6, one: 2e-6}) and second == pytest.approx({zero: 3e-6, one: 4e-6})
    layers = [Layer(name="c"), Layer(name="idle"), Layer(name="c")]
    assert list_kernels(layers, [one, zero]) == [zero, None, one]


def test_what_runs_in_a_loop_is_no_node_of_the_graph_around_it() -> None:
    loop, inside = event("Loop_2_kernel_time", 20, 9, "2"), event("Add_1_kernel_time", 22, 3, "1")
    loop["args"]["op_name"] = "Loop"
    events = [event("model_run", 10, 30, cat="Session"), event("Add_1_kernel_time", 12, 8, "1"), inside, loop,
              event("Add_3_kernel_time", 29, 0, "3")]  # fmt: skip
    assert by_run(events) == [
        {("Add_1_kernel_time", "1"): 8e-6, ("Loop_2_kernel_time", "2"): 9e-6, ("Add_3_kernel_time", "3"): 0.0}
    ]


def test_names_are_read_as_the_library_writes_them() -> None:
    """It escapes nothing, so that a quote in a node's name ends a string of JSON."""
    text = '[{"cat" : "Node","dur" :1,"ts" :2,"name" :"a"b \\n c,\t{d}_kernel_time","args" : {"op_name" : "Relu"}}]'
    (found,) = events_in(text)
    assert found["name"] == 'a"b \\n c,\t{d}_kernel_time' and found["args"] == {"op_name": "Relu"}
