"""The critical path through traces: small ones whose path is known, and two of ResNet-18 on an H200."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dyno.worker.facts.job import Function
from dyno.worker.layers import kernel_trace

# Batch 1 in FP16: PyTorch's eager calls, and torch.compile with a CUDA graph; one run of each, its clock from 0.
TRACES = Path(__file__).parent / "data/h200-resnet18.json.gz"


def event(kind: str, name: str, begin: float, end: float, correlation: int, stream: int = 7) -> dict[str, Any]:
    details = {"correlation": correlation, **({"stream": stream} if kind != "cuda_runtime" else {})}
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "args": details}


def run(end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": "dyno run", "ts": 0.0, "dur": end, "args": {}}


def path(events: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds on the path by name."""
    found = {one.name: 1e6 * one.path for one in kernel_trace.list_functions(events, 0) if one.path}
    (whole,) = [e["dur"] for e in events if e["name"] == "dyno run"]
    assert sum(found.values()) == pytest.approx(whole), found
    return found


def test_queued_kernels_are_the_path_and_the_host_before_the_first() -> None:
    found = path([
        run(100), event("cuda_runtime", "cudaLaunchKernel", 5, 10, 1), event("kernel", "a", 12, 52, 1),
        event("cuda_runtime", "cudaLaunchKernel", 20, 25, 2), event("kernel", "b", 53, 90, 2),
        event("cuda_runtime", "cudaStreamSynchronize", 30, 92, 3),
    ])  # fmt: skip
    assert found == pytest.approx({
        "a": 40, "b": 37, kernel_trace.GAP: 1, kernel_trace.LAUNCHING: 2, "cudaLaunchKernel": 5,
        "cudaStreamSynchronize": 2, kernel_trace.OUTSIDE: 8 + 5,
    })  # fmt: skip


def test_a_gpu_that_waits_for_the_host_leaves_its_kernels_off_the_path() -> None:
    events = [
        run(100), event("cuda_runtime", "cudaLaunchKernel", 0, 10, 1), event("kernel", "early", 11, 20, 1),
        event("cuda_runtime", "cudaLaunchKernel", 80, 90, 2), event("kernel", "late", 88, 95, 2),
        event("cuda_runtime", "cudaDeviceSynchronize", 91, 100, 3),
    ]  # fmt: skip
    assert path(events) == pytest.approx({
        "late": 7, "cudaLaunchKernel": 8 + 10, "cudaDeviceSynchronize": 5, kernel_trace.OUTSIDE: 70,
    })  # fmt: skip
    by_name = {one.name: one for one in kernel_trace.list_functions(events, 0)}
    assert by_name["early"].time == pytest.approx(9e-6) and by_name["early"].waiting == pytest.approx(1e-6)
    assert by_name["cudaDeviceSynchronize"].waiting == pytest.approx(4e-6) and not by_name["cudaLaunchKernel"].waiting


def test_a_copy_that_returns_when_it_is_done_waits_and_one_that_does_not_doesn_t() -> None:
    blocking = [run(50), event("cuda_runtime", "cudaMemcpyAsync", 10, 40, 1), event("gpu_memcpy", "DtoH", 20, 38, 1)]
    assert path(blocking)["DtoH"] == pytest.approx(18)
    later = [run(50), event("cuda_runtime", "cudaMemcpyAsync", 10, 15, 1), event("gpu_memcpy", "DtoH", 20, 38, 1)]
    assert "DtoH" not in path(later), "nobody waited for it"


def test_calls_inside_of_calls_and_work_of_other_streams() -> None:
    found = path([
        run(60), event("cuda_runtime", "cudaGraphLaunch", 0, 10, 1), event("cuda_runtime", "cuLaunch", 2, 8, 2),
        event("kernel", "one", 12, 30, 2, stream=7), event("kernel", "two", 12, 50, 1, stream=9),
        event("cuda_runtime", "cudaDeviceSynchronize", 10, 55, 3),
    ])  # fmt: skip
    assert found == pytest.approx({
        "two": 38, kernel_trace.LAUNCHING: 2, "cudaGraphLaunch": 10, "cudaDeviceSynchronize": 5,
        kernel_trace.OUTSIDE: 5,
    })  # fmt: skip


def test_only_the_runs_that_count() -> None:
    first = [run(10), event("cuda_runtime", "cudaFree", 1, 9, 1)]
    second = [{**e, "ts": e["ts"] + 100} for e in (run(30), event("cuda_runtime", "cudaLaunchKernel", 5, 10, 2))]
    names = {one.name for one in kernel_trace.list_functions([*first, *second], 1)}
    assert names == {"cudaLaunchKernel", kernel_trace.OUTSIDE}


@pytest.fixture(scope="module")
def real() -> dict[str, list[dict[str, Any]]]:
    traces: dict[str, list[dict[str, Any]]] = json.loads(gzip.decompress(TRACES.read_bytes()))
    return traces


def share(found: tuple[Function, ...], where: str) -> float:
    return sum(one.path for one in found if one.where == where) / sum(one.path for one in found)


def test_eager_pytorch_at_batch_1_is_the_host_s(real: dict[str, list[dict[str, Any]]]) -> None:
    found = kernel_trace.list_functions(real["eager1"], 0)
    path(real["eager1"])
    assert share(found, kernel_trace.GPU) < 0.05
    launch = next(one for one in found if one.name == "cudaLaunchKernel")
    assert launch.calls > 100 and launch.path == pytest.approx(launch.time, rel=0.05)


def test_in_a_cuda_graph_the_kernels_are_the_path(real: dict[str, list[dict[str, Any]]]) -> None:
    found = kernel_trace.list_functions(real["graph1"], 0)
    path(real["graph1"])
    kernels = [one for one in found if one.where == kernel_trace.GPU and one.calls]
    assert share(found, kernel_trace.GPU) > 0.2 and sum(one.path for one in kernels) > 150e-6
    assert next(one for one in found if "Synchronize" in one.name).waiting > 100e-6
