"""Kernels of a trace and their launching calls: a small trace as from a GPU, and real traces."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dyno.worker.facts import engine
from dyno.worker.facts.job import Function
from dyno.worker.layers import kernel_trace

CONV = (
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_16x6_tn_align4>"
    "(cutlass_80_tensorop_s1688gemm_128x64_16x6_tn_align4::Params)"
)
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)


def event(kind: str, name: str, begin: float, microseconds: float, **details: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 7, "tid": 7, "ts": begin, "dur": microseconds, "args": details}


def within(name: str, begin: float, end: float, number: int) -> dict[str, Any]:
    details = {"External id": number, "Record function id": 0, "Ev Idx": number}
    return event("user_annotation", name, begin, end - begin, **details)


def launched(
    kind: str, name: str, at: float, begin: float, microseconds: float, operator: int, correlation: int
) -> list[dict[str, Any]]:
    """Return the host's call and the GPU's later work."""
    numbers = {"External id": operator, "correlation": correlation}
    call = "cudaLaunchKernel" if kind == "kernel" else "cudaMemcpyAsync"
    placed = {"device": 0, "context": 1, "stream": 7, **numbers}
    return [event("cuda_runtime", call, at, 2, cbid=211, **numbers), event(kind, name, begin, microseconds, **placed)]


def one_run(begin: float, first: int) -> list[dict[str, Any]]:
    """Build a run: the model calls `a`, which calls `b` twice; `a` and the model also run kernels themselves."""
    names = [("dyno run", 0, 100), ("dyno call ", 1, 90), ("dyno call a", 2, 60), ("dyno call b", 5, 20),
             ("dyno call b", 30, 40)]  # fmt: skip
    ranges = [within(name, begin + low, begin + high, first + k) for k, (name, low, high) in enumerate(names)]
    operators = [event("cpu_op", "aten::x", begin + at, 4, **{"External id": first + 10 + k, "Ev Idx": 0})
                 for k, at in enumerate((6, 31, 50, 70))]  # fmt: skip
    works = [
        # The clocks of host calls and ranges differ by microseconds, so operators identify the owner.
        launched("kernel", CONV, begin + 22, begin + 40, 10, first + 10, first),
        launched("kernel", CONV, begin + 33, begin + 50, 6, first + 11, first + 1),
        launched("kernel", ADD, begin + 51, begin + 55, 3, first + 12, first + 2),  # overlaps the kernel before
        launched("gpu_memcpy", "Memcpy DtoD (Device -> Device)", begin + 71, begin + 80, 4, first + 13, first + 3),
    ]
    own = launched("kernel", ADD, begin + 86, begin + 95, 1, 0, first + 4)  # launched by an unknown operator
    waits = [event("cuda_runtime", "cudaStreamSynchronize", begin + 91, 8, cbid=131, correlation=first + 5)]
    seen_by_gpu = [event("gpu_user_annotation", "dyno call b", begin + 40, 10, **{"External id": first + 3})]
    return [*ranges, *operators, *(e for work in works for e in work), *own, *waits, *seen_by_gpu]


ROWS = {("b", 0): 0, ("b", 1): 1, ("a", 0): 2, ("", 0): 3}
NOISE = [{"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
         {"ph": "s", "id": 3, "cat": "ac2g", "name": "ac2g", "pid": 7, "tid": 7, "ts": 3},
         event("Trace", "PyTorch Profiler (0)", 0, 400)]  # fmt: skip


def test_kernels_belong_to_the_innermost_call_that_launched_them() -> None:
    runs = kernel_trace.read_runs([*NOISE, *one_run(0, 100), *one_run(200, 200)], ROWS, 4)
    assert len(runs) == 2
    for run in runs:
        assert run.seconds == pytest.approx([10e-6, 6e-6, 3e-6, 5e-6])
        assert run.kernels == 4, "a copy is none"
        assert run.busy == pytest.approx(23e-6), "two overlap by a microsecond"
        assert run.calls == pytest.approx(10e-6), "a wait is no work"
    names = kernel_trace.list_kernels(runs, 4)
    assert names[0] == "cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_16x6_tn_align4>"
    assert names[3].startswith("Memcpy DtoD + vectorized_elementwise_kernel<4, CUDAFunctor_add<float>")


def test_a_call_without_a_row_counts_for_its_caller() -> None:
    rows = {("a", 0): 0, ("", 0): 1}
    (run,) = kernel_trace.read_runs(one_run(0, 100), rows, 2)
    assert run.seconds == pytest.approx([19e-6, 5e-6])


def test_kernels_outside_of_runs_are_not_counted() -> None:
    warm_up = launched("kernel", ADD, 500, 510, 9, 0, 999)
    (run,) = kernel_trace.read_runs([*one_run(0, 100), *warm_up], ROWS, 4)
    assert sum(run.seconds) == pytest.approx(24e-6) and run.kernels == 4


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("sm80_xmma_fprop_implicit_gemm_f32f32", "sm80_xmma_fprop_implicit_gemm_f32f32"),
        ("void at::native::(anonymous namespace)::max_pool<float, int>(int, float*)", "max_pool<float, int>"),
        ("void f<g(h)>(int)", "f<g(h)>"),
        ("k" * 200, "k" * engine.MAX_KERNEL_LENGTH + "…"),
    ],
)
def test_kernel_names_are_shortened(name: str, short: str) -> None:
    assert engine.shorten_kernel(name) == short


# Batch 1 in FP16: PyTorch's eager calls, and torch.compile with a CUDA graph; one run each, with its clock from 0.
TRACES = Path(__file__).parent / "data/h200-resnet18.json.gz"


def piece(kind: str, name: str, begin: float, end: float, correlation: int, stream: int = 7) -> dict[str, Any]:
    details = {"correlation": correlation, **({"stream": stream} if kind != "cuda_runtime" else {})}
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "args": details}


def run(end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": "dyno run", "ts": 0.0, "dur": end, "args": {}}


def path(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return microseconds on the critical path by name; check that they add up to the run."""
    found = {one.name: 1e6 * one.path for one in kernel_trace.list_functions(events, 0) if one.path}
    (whole,) = [e["dur"] for e in events if e["name"] == "dyno run"]
    assert sum(found.values()) == pytest.approx(whole), found
    return found


def test_queued_kernels_are_on_the_critical_path() -> None:
    found = path([
        run(100), piece("cuda_runtime", "cudaLaunchKernel", 5, 10, 1), piece("kernel", "a", 12, 52, 1),
        piece("cuda_runtime", "cudaLaunchKernel", 20, 25, 2), piece("kernel", "b", 53, 90, 2),
        piece("cuda_runtime", "cudaStreamSynchronize", 30, 92, 3),
    ])  # fmt: skip
    assert found == pytest.approx({
        "a": 40, "b": 37, kernel_trace.GAP: 1, kernel_trace.LAUNCHING: 2, "cudaLaunchKernel": 5,
        "cudaStreamSynchronize": 2, kernel_trace.OUTSIDE: 8 + 5,
    })  # fmt: skip


def test_a_gpu_waiting_for_the_host_keeps_kernels_off_the_critical_path() -> None:
    events = [
        run(100), piece("cuda_runtime", "cudaLaunchKernel", 0, 10, 1), piece("kernel", "early", 11, 20, 1),
        piece("cuda_runtime", "cudaLaunchKernel", 80, 90, 2), piece("kernel", "late", 88, 95, 2),
        piece("cuda_runtime", "cudaDeviceSynchronize", 91, 100, 3),
    ]  # fmt: skip
    assert path(events) == pytest.approx({
        "late": 7, "cudaLaunchKernel": 8 + 10, "cudaDeviceSynchronize": 5, kernel_trace.OUTSIDE: 70,
    })  # fmt: skip
    by_name = {one.name: one for one in kernel_trace.list_functions(events, 0)}
    assert by_name["early"].time == pytest.approx(9e-6) and by_name["early"].waiting == pytest.approx(1e-6)
    assert by_name["cudaDeviceSynchronize"].waiting == pytest.approx(4e-6) and not by_name["cudaLaunchKernel"].waiting


def test_only_a_blocking_copy_is_on_the_critical_path() -> None:
    blocking = [run(50), piece("cuda_runtime", "cudaMemcpyAsync", 10, 40, 1), piece("gpu_memcpy", "DtoH", 20, 38, 1)]
    assert path(blocking)["DtoH"] == pytest.approx(18)
    later = [run(50), piece("cuda_runtime", "cudaMemcpyAsync", 10, 15, 1), piece("gpu_memcpy", "DtoH", 20, 38, 1)]
    assert "DtoH" not in path(later), "no call waited for it"


def test_nested_calls_and_parallel_streams_are_resolved() -> None:
    found = path([
        run(60), piece("cuda_runtime", "cudaGraphLaunch", 0, 10, 1), piece("cuda_runtime", "cuLaunch", 2, 8, 2),
        piece("kernel", "one", 12, 30, 2, stream=7), piece("kernel", "two", 12, 50, 1, stream=9),
        piece("cuda_runtime", "cudaDeviceSynchronize", 10, 55, 3),
    ])  # fmt: skip
    assert found == pytest.approx({
        "two": 38, kernel_trace.LAUNCHING: 2, "cudaGraphLaunch": 10, "cudaDeviceSynchronize": 5,
        kernel_trace.OUTSIDE: 5,
    })  # fmt: skip


def test_warm_up_runs_are_left_out() -> None:
    first = [run(10), piece("cuda_runtime", "cudaFree", 1, 9, 1)]
    second = [{**e, "ts": e["ts"] + 100} for e in (run(30), piece("cuda_runtime", "cudaLaunchKernel", 5, 10, 2))]
    names = {one.name for one in kernel_trace.list_functions([*first, *second], 1)}
    assert names == {"cudaLaunchKernel", kernel_trace.OUTSIDE}


@pytest.fixture(scope="module")
def real() -> dict[str, list[dict[str, Any]]]:
    traces: dict[str, list[dict[str, Any]]] = json.loads(gzip.decompress(TRACES.read_bytes()))
    return traces


def share(found: tuple[Function, ...], where: str) -> float:
    return sum(one.path for one in found if one.where == where) / sum(one.path for one in found)


def test_eager_pytorch_at_batch_1_is_host_bound(real: dict[str, list[dict[str, Any]]]) -> None:
    found = kernel_trace.list_functions(real["eager1"], 0)
    path(real["eager1"])
    assert share(found, kernel_trace.GPU) < 0.05
    launch = next(one for one in found if one.name == "cudaLaunchKernel")
    assert launch.calls > 100 and launch.path == pytest.approx(launch.time, rel=0.05)


def test_kernels_of_a_cuda_graph_are_on_the_critical_path(real: dict[str, list[dict[str, Any]]]) -> None:
    found = kernel_trace.list_functions(real["graph1"], 0)
    path(real["graph1"])
    kernels = [one for one in found if one.where == kernel_trace.GPU and one.calls]
    assert share(found, kernel_trace.GPU) > 0.2 and sum(one.path for one in kernels) > 150e-6
    assert next(one for one in found if "Synchronize" in one.name).waiting > 100e-6
