"""NVIDIA GPUs by way of CUDA's driver API: memory, streams, events and graphs.

The driver API works beside whatever CUDA runtime an engine brings along: everything here lies in the device's primary
context, which TensorRT, ONNX Runtime and PyTorch use too. Needs cuda-bindings, from Python 3.10 on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from dyno.worker.extras import install
from dyno.worker.spec import Unavailable

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class CudaError(RuntimeError):
    """A call of the CUDA driver that failed."""


@lru_cache(maxsize=1)
def driver() -> Any:
    """Return the driver API, initialised; raise `Unavailable` without cuda-bindings, a driver or a GPU."""
    try:
        from cuda.bindings import driver as cuda
    except ImportError as e:
        raise Unavailable(f"cuda-bindings is not installed in this Python; {install('cuda-bindings')}") from e
    try:
        (error,) = cuda.cuInit(0)
    except RuntimeError as e:  # there is no libcuda to load
        raise Unavailable("there is no NVIDIA driver on this machine") from e
    if error:
        raise Unavailable(f"the NVIDIA driver finds no GPU it can use ({_describe_error(cuda, error)})")
    return cuda


def _describe_error(cuda: Any, error: Any) -> str:
    name, text = cuda.cuGetErrorName(error)[1], cuda.cuGetErrorString(error)[1]
    return f"{name.decode()}: {text.decode()}" if name and text else f"error {int(error)}"


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the driver and return its results; `MemoryError` when the GPU's memory ran out, else `CudaError`."""
    error, *values = function(*arguments)
    if error:
        text = f"{function.__name__}: {_describe_error(driver(), error)}"
        raise MemoryError(f"the GPU's memory ran out ({text})") if int(error) == OUT_OF_MEMORY else CudaError(text)
    return values[0] if len(values) == 1 else values


@contextmanager
def profiler_on() -> Iterator[None]:
    """Run the block between the start and the stop of the profiler, if this process runs under one."""
    call(driver().cuProfilerStart)
    try:
        yield
    finally:
        call(driver().cuProfilerStop)


class Device:
    """One GPU by its name (`cuda:0`), its primary context made current; `close` frees all that it allocated."""

    def __init__(self, name: str) -> None:
        self.cuda = driver()
        self.index = int(name.partition(":")[2] or 0)
        count = call(self.cuda.cuDeviceGetCount)
        if self.index >= count:
            raise Unavailable(f"there is no {name}: this machine has {count} GPU{'s' * (count != 1)}")
        self._handle = call(self.cuda.cuDeviceGet, self.index)
        call(self.cuda.cuCtxSetCurrent, call(self.cuda.cuDevicePrimaryCtxRetain, self._handle))
        self._freed_by: list[tuple[Callable[..., Any], Any]] = []

    @property
    def capability(self) -> str:
        """Compute capability, e.g. 9.0."""
        wanted = self.cuda.CUdevice_attribute
        parts = (
            wanted.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            wanted.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
        return ".".join(str(call(self.cuda.cuDeviceGetAttribute, part, self._handle)) for part in parts)

    @property
    def model(self) -> str:
        """The GPU's product name, e.g. `NVIDIA H200`."""
        name: bytes = call(self.cuda.cuDeviceGetName, 256, self._handle)
        return name.split(b"\0")[0].decode()

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the GPU's memory, other programs' use counted."""
        free, total = call(self.cuda.cuMemGetInfo)
        return int(free), int(total)

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes on the GPU."""
        pointer = call(self.cuda.cuMemAlloc, max(size, 1))
        self._freed_by.append((self.cuda.cuMemFree, pointer))
        return int(pointer)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array in page-locked host memory, which the GPU reads and writes directly."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        address = int(call(self.cuda.cuMemHostAlloc, max(size, 1), 0))
        self._freed_by.append((self.cuda.cuMemFreeHost, address))
        raw = (ctypes.c_byte * size).from_address(address)
        return np.frombuffer(raw, dtype=dtype).reshape(shape)

    def stream(self) -> Any:
        """Return a stream that doesn't wait for the legacy default stream."""
        stream = call(self.cuda.cuStreamCreate, int(self.cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._freed_by.append((self.cuda.cuStreamDestroy, stream))
        return stream

    def event(self) -> Any:
        """Return an event without timing, which is cheaper and orders streams all the same."""
        flags = self.cuda.CUevent_flags
        event = call(self.cuda.cuEventCreate, int(flags.CU_EVENT_DISABLE_TIMING))
        self._freed_by.append((self.cuda.cuEventDestroy, event))
        return event

    def synchronize(self) -> None:
        """Wait for everything queued on the GPU by this process."""
        call(self.cuda.cuCtxSynchronize)

    def close(self) -> None:
        """Free all that was allocated, newest first, and release the context."""
        while self._freed_by:
            function, resource = self._freed_by.pop()
            function(resource)  # after a fault every call fails; the memory is freed when the process ends
        self.cuda.cuDevicePrimaryCtxRelease(self._handle)


class Stopwatch:
    """GPU time between two points of a stream, by CUDA events (resolution about 0.5 us)."""

    def __init__(self, stream: int) -> None:
        self._cuda = driver()
        self._stream = self._cuda.CUstream(int(stream))
        kind = int(self._cuda.CUevent_flags.CU_EVENT_DEFAULT)
        self._begin, self._end = call(self._cuda.cuEventCreate, kind), call(self._cuda.cuEventCreate, kind)
        self._record = self._cuda.cuEventRecord

    def start(self) -> None:
        """Mark the point from which to measure."""
        self._record(self._begin, self._stream)

    def stop(self) -> None:
        """Mark the point up to which to measure."""
        self._record(self._end, self._stream)

    def seconds(self) -> float:
        """Return the seconds between the two points; wait for the second."""
        call(self._cuda.cuEventSynchronize, self._end)
        return float(call(self._cuda.cuEventElapsedTime, self._begin, self._end)) / 1e3


class CudaGraph:
    """What `work` queues on a stream, captured once and replayed as one launch."""

    def __init__(self, stream: Any, work: Callable[[], None]) -> None:
        self._cuda = driver()
        self._stream = stream
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(self._cuda.cuStreamBeginCapture, stream, mode)
        try:
            work()
        finally:
            graph = call(self._cuda.cuStreamEndCapture, stream)
        self._made = call(self._cuda.cuGraphInstantiate, graph, 0)
        call(self._cuda.cuGraphDestroy, graph)
        self._launch = self._cuda.cuGraphLaunch

    def launch(self) -> None:
        """Queue the whole graph."""
        (error,) = self._launch(self._made, self._stream)
        if error:
            raise CudaError(f"cuGraphLaunch: {_describe_error(self._cuda, error)}")

    def close(self) -> None:
        """Free the graph."""
        self._cuda.cuGraphExecDestroy(self._made)
