"""Without a GPU, or its driver, it is said; what a GPU does is tested in tests/gpu."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from dyno.worker.sessions import gpu
from dyno.worker.spec import Unavailable


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    gpu.driver.cache_clear()
    yield
    gpu.driver.cache_clear()


class Driver:
    """As much of the driver API as finding a GPU needs."""

    def __init__(self, error: int = 0, count: int = 1) -> None:
        self.error, self.count = error, count

    def cuInit(self, flags: int) -> tuple[int]:  # noqa: N802
        return (self.error,)

    def cuGetErrorName(self, error: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"CUDA_ERROR_NO_DEVICE"

    def cuGetErrorString(self, error: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"no CUDA-capable device is detected"

    def cuDeviceGetCount(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.count


def installed(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))


def test_no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(Unavailable, match="pip install cuda-bindings"):
        gpu.driver()


def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Driver(error=100))
    with pytest.raises(Unavailable, match="CUDA_ERROR_NO_DEVICE: no CUDA-capable device"):
        gpu.driver()


def test_fewer_gpus_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Driver(count=1))
    with pytest.raises(Unavailable, match=r"there is no cuda:1: this machine has 1 GPU$"):
        gpu.Device("cuda:1")


def test_an_error_says_which_call_and_memory_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Driver())

    def cuMemAlloc(code: int) -> tuple[int]:  # noqa: N802
        return (code,)

    with pytest.raises(MemoryError, match=r"the GPU's memory ran out \(cuMemAlloc"):
        gpu.call(cuMemAlloc, gpu.OUT_OF_MEMORY)
    with pytest.raises(gpu.CudaError, match="cuMemAlloc: CUDA_ERROR_NO_DEVICE"):
        gpu.call(cuMemAlloc, 1)


def test_the_profiler_is_stopped_whatever_happened_between(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    driver: Any = Driver()
    driver.cuProfilerStart = lambda: done.append("start") or (0,)  # type: ignore[func-returns-value]
    driver.cuProfilerStop = lambda: done.append("stop") or (0,)  # type: ignore[func-returns-value]
    installed(monkeypatch, driver)
    with suppress(ZeroDivisionError), gpu.profiler_on():
        done.append(f"run {1 // 0}")
    assert done == ["start", "stop"]
