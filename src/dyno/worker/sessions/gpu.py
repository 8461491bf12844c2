"""NVIDIA GPUs through CUDA's driver API: memory, streams, events and graphs.

The driver API works with any CUDA runtime of an engine: all resources here belong to the device's primary context,
which TensorRT, ONNX Runtime and PyTorch use too. Needs cuda-bindings, from Python 3.10 on.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from dyno.worker.backend import Arrays, DeviceBinding, Session
from dyno.worker.extras import load_library
from dyno.worker.inputs.specs import Shape, fit_feed
from dyno.worker.spec import INFERENCE_PARTS, Tensor, Trial, Unavailable, UserError

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class CudaError(RuntimeError):
    """A failed call of the CUDA driver."""


@lru_cache(maxsize=1)
def load_driver() -> Any:
    """Return the driver API, initialised; raise `Unavailable` without cuda-bindings, a driver or a GPU."""
    cuda = load_library("cuda.bindings.driver")
    try:
        (error,) = cuda.cuInit(0)
    except RuntimeError as e:  # no libcuda
        raise Unavailable("there is no NVIDIA driver on this machine") from e
    if error:
        raise Unavailable(f"the NVIDIA driver finds no GPU it can use ({_describe_error(cuda, error)})")
    return cuda


def _describe_error(cuda: Any, error: Any) -> str:
    name, text = cuda.cuGetErrorName(error)[1], cuda.cuGetErrorString(error)[1]
    return f"{name.decode()}: {text.decode()}" if name and text else f"error {int(error)}"


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the driver and return its results; raise `MemoryError` if the GPU's memory ran out, else `CudaError`."""
    error, *values = function(*arguments)
    if error:
        text = f"{function.__name__}: {_describe_error(load_driver(), error)}"
        raise MemoryError(f"the GPU's memory ran out ({text})") if int(error) == OUT_OF_MEMORY else CudaError(text)
    return values[0] if len(values) == 1 else values


@contextmanager
def profiler_on() -> Iterator[None]:
    """Run the block between start and stop of the profiler, if this process runs under one."""
    call(load_driver().cuProfilerStart)
    try:
        yield
    finally:
        call(load_driver().cuProfilerStop)


class Device:
    """One GPU by name (`cuda:0`) with its primary context current; `close` frees all its allocations."""

    def __init__(self, name: str) -> None:
        self.cuda = load_driver()
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
        enum = self.cuda.CUdevice_attribute
        attributes = (
            enum.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            enum.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
        return ".".join(str(call(self.cuda.cuDeviceGetAttribute, attribute, self._handle)) for attribute in attributes)

    @property
    def model(self) -> str:
        """The GPU's product name, e.g. `NVIDIA H200`."""
        name: bytes = call(self.cuda.cuDeviceGetName, 256, self._handle)
        return name.split(b"\0")[0].decode()

    def memory(self) -> tuple[int, int]:
        """Return the free and total bytes of the GPU's memory; other programs' use counts."""
        free, total = call(self.cuda.cuMemGetInfo)
        return int(free), int(total)

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes on the GPU."""
        pointer = call(self.cuda.cuMemAlloc, max(size, 1))
        self._freed_by.append((self.cuda.cuMemFree, pointer))
        return int(pointer)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array in page-locked host memory, accessible to the GPU directly."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        address = int(call(self.cuda.cuMemHostAlloc, max(size, 1), 0))
        self._freed_by.append((self.cuda.cuMemFreeHost, address))
        buffer = (ctypes.c_byte * size).from_address(address)
        return np.frombuffer(buffer, dtype=dtype).reshape(shape)

    def stream(self) -> Any:
        """Return a stream that doesn't wait for the legacy default stream."""
        stream = call(self.cuda.cuStreamCreate, int(self.cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._freed_by.append((self.cuda.cuStreamDestroy, stream))
        return stream

    def event(self) -> Any:
        """Return an event without timing: cheaper, and enough to order streams."""
        flags = self.cuda.CUevent_flags
        event = call(self.cuda.cuEventCreate, int(flags.CU_EVENT_DISABLE_TIMING))
        self._freed_by.append((self.cuda.cuEventDestroy, event))
        return event

    def synchronize(self) -> None:
        """Wait for all of this process's work on the GPU."""
        call(self.cuda.cuCtxSynchronize)

    def close(self) -> None:
        """Free all allocations, newest first, and release the context."""
        while self._freed_by:
            function, resource = self._freed_by.pop()
            function(resource)  # after a fault all calls fail; the process's end frees the memory
        self.cuda.cuDevicePrimaryCtxRelease(self._handle)


class Stopwatch:
    """GPU time between two points of a stream, by CUDA events (resolution about 0.5 us)."""

    def __init__(self, stream: int) -> None:
        self._cuda = load_driver()
        self._stream = self._cuda.CUstream(int(stream))
        flags = int(self._cuda.CUevent_flags.CU_EVENT_DEFAULT)
        self._begin, self._end = call(self._cuda.cuEventCreate, flags), call(self._cuda.cuEventCreate, flags)
        self._record = self._cuda.cuEventRecord

    def start(self) -> None:
        """Mark the start on the stream."""
        self._record(self._begin, self._stream)

    def stop(self) -> None:
        """Mark the end on the stream."""
        self._record(self._end, self._stream)

    def seconds(self) -> float:
        """Return the seconds between start and end; wait for the end."""
        call(self._cuda.cuEventSynchronize, self._end)
        return float(call(self._cuda.cuEventElapsedTime, self._begin, self._end)) / 1e3


class CudaGraph:
    """A CUDA graph of all work that `work` queues on a stream, captured once and replayed as one launch."""

    def __init__(self, stream: Any, work: Callable[[], None]) -> None:
        self._cuda = load_driver()
        self._stream = stream
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(self._cuda.cuStreamBeginCapture, stream, mode)
        try:
            work()
        finally:
            graph = call(self._cuda.cuStreamEndCapture, stream)
        self._executable = call(self._cuda.cuGraphInstantiate, graph, 0)
        call(self._cuda.cuGraphDestroy, graph)
        self._launch = self._cuda.cuGraphLaunch

    def launch(self) -> None:
        """Queue the whole graph."""
        (error,) = self._launch(self._executable, self._stream)
        if error:
            raise CudaError(f"cuGraphLaunch: {_describe_error(self._cuda, error)}")

    def close(self) -> None:
        """Free the graph."""
        self._cuda.cuGraphExecDestroy(self._executable)


# A session with inputs and outputs in GPU memory: copies, slots and their order, for engines that only enqueue
#
# Three streams (in, compute, out) and a set of buffers per slot let a slot's copies overlap with another's work.

DEFAULT_SLOTS = 3  # one batch computes, one is copied in, one is copied out


def slots_of(trial: Trial) -> int:
    """Return the trial's option `slots`."""
    return int(trial.options.get("slots", DEFAULT_SLOTS))


class Slot:
    """Memory and events of one batch: device addresses and page-locked host arrays by tensor name."""

    def __init__(self, device: Device) -> None:
        self.addresses: dict[str, int] = {}
        self.hosts: dict[str, np.ndarray] = {}
        self.bound, self.done = device.event(), device.event()
        self.fresh = False  # whether a copy to the device was queued since the last run


class DeviceSession(Session):
    """A session with `slots` batches in flight in GPU memory; a subclass implements `enqueue`.

    `bind` copies staged arrays directly and others through page-locked memory. `fetch` reads outputs into page-locked
    memory.
    """

    def __init__(self, device: Device, slots: int) -> None:
        self.device, self.slots = device, slots
        self._cuda = device.cuda
        self._in, self._compute, self._out = device.stream(), device.stream(), device.stream()
        self.stream = int(self._compute)
        self._slots = [Slot(device) for _ in range(slots)]
        self._staged: list[np.ndarray] = []
        self._shapes: dict[str, Shape] = {}

    def enqueue(self, slot: int) -> None:
        """Queue one inference of the slot on the compute stream."""
        raise NotImplementedError

    def allocate(self, inputs: Mapping[str, Shape], sizes: Mapping[str, int]) -> None:
        """Allocate every slot's memory: `inputs` are the shapes of the feeds, `sizes` the bytes of each tensor."""
        self._shapes = dict(inputs)
        for slot in self._slots:
            slot.addresses = {name: self.device.allocate(size) for name, size in sizes.items()}
            slot.hosts = {}

    def stage(self, feeds: Arrays) -> Arrays:
        """Return the feeds in page-locked memory, in the engine's types."""
        return {name: self._lock_feed(t, feeds[name]) for t in self.inputs if (name := t.name) in feeds}

    def _lock_feed(self, tensor: Tensor, feed: np.ndarray) -> np.ndarray:
        buffer = self.device.pinned(feed.shape, tensor.dtype)
        np.copyto(buffer, feed)
        self._staged.append(buffer)
        return buffer

    def _is_staged(self, feed: np.ndarray) -> bool:
        address = feed.ctypes.data
        return any(0 <= address - array.ctypes.data <= array.nbytes - feed.nbytes for array in self._staged)

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Queue the copies to the device; the next `run` of the slot waits for them."""
        self._send_inputs(slot, self._list_sources(feeds, slot))

    def _list_sources(self, feeds: Arrays, slot: int) -> list[tuple[int, int, int]]:
        """Return the device address, host address and bytes of every copy to the device."""
        state, copies = self._slots[slot], []
        for tensor in self.inputs:
            feed = fit_feed(feeds, tensor, self._shapes[tensor.name])
            if not self._is_staged(feed):
                buffer = self._reserve_memory(state, tensor.name, feed.nbytes)
                np.copyto(buffer.view(feed.dtype).reshape(feed.shape), feed)
                feed = buffer
            copies.append((state.addresses[tensor.name], feed.ctypes.data, feed.nbytes))
        return copies

    def _send_inputs(self, slot: int, sources: list[tuple[int, int, int]]) -> None:
        state = self._slots[slot]
        for device, host, size in sources:
            call(self._cuda.cuMemcpyHtoDAsync, device, host, size, self._in)
        call(self._cuda.cuEventRecord, state.bound, self._in)
        state.fresh = True

    def on_device(self) -> DeviceBinding | None:
        """See `Session.on_device`; None if this Python has no PyTorch with CUDA."""
        if find_spec("torch") is None:
            return None
        import torch

        if not torch.cuda.is_available():
            return None
        return DeviceBinding(torch, torch.device("cuda", self.device.index), self._bind_tensors, self._output_tensors)

    def _bind_tensors(self, tensors: Mapping[str, Any], ready: Any, slot: int) -> None:
        """Bind PyTorch tensors on the device, as `bind` does with arrays, after the event `ready`."""
        call(self._cuda.cuStreamWaitEvent, self._in, self._cuda.CUevent(ready.cuda_event), 0)
        state = self._slots[slot]
        for tensor in self.inputs:
            source = tensors[tensor.name]
            if tuple(source.shape) != self._shapes[tensor.name] or str(source.dtype) != f"torch.{tensor.dtype}":
                raise UserError(f"input {tensor.name!r} wants {self._shapes[tensor.name]} {tensor.dtype}")
            size = source.numel() * source.element_size()
            call(self._cuda.cuMemcpyDtoDAsync, state.addresses[tensor.name], source.data_ptr(), size, self._in)
        call(self._cuda.cuEventRecord, state.bound, self._in)
        state.fresh = True

    def _output_tensors(self, slot: int) -> dict[str, Any]:
        import torch

        gpu = torch.device("cuda", self.device.index)
        return {name: torch.as_tensor(_CudaArray(*result), device=gpu) for name, result in self.results(slot).items()}

    def run(self, slot: int = 0) -> None:
        """Queue one inference, after the slot's copies."""
        state = self._slots[slot]
        if state.fresh:
            call(self._cuda.cuStreamWaitEvent, self._compute, state.bound, 0)
            state.fresh = False
        self.enqueue(slot)
        if self.slots > 1:
            self._cuda.cuEventRecord(state.done, self._compute)

    def wait(self, slot: int = 0) -> None:
        """Return when the slot's work is done; raise a fault of the GPU."""
        if self.slots > 1:
            call(self._cuda.cuEventSynchronize, self._slots[slot].done)
        else:
            call(self._cuda.cuStreamSynchronize, self._compute)

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """Return the outputs in page-locked memory, valid until the slot is fetched again."""
        targets = self._list_targets(slot)
        self._receive_outputs(targets)
        call(self._cuda.cuStreamSynchronize, self._out)
        return {name: array for name, (array, _) in targets.items()}

    def _list_targets(self, slot: int) -> dict[str, tuple[np.ndarray, int]]:
        """Return the host array and the device address of every output."""
        state, targets = self._slots[slot], {}
        for name, (shape, dtype, address) in self.results(slot).items():
            host = self._reserve_memory(state, name, math.prod(shape) * np.dtype(dtype).itemsize)
            targets[name] = (host.view(dtype).reshape(shape), address)
        return targets

    def _receive_outputs(self, targets: Mapping[str, tuple[np.ndarray, int]]) -> None:
        for array, address in targets.values():
            if array.nbytes:
                call(self._cuda.cuMemcpyDtoHAsync, array.ctypes.data, address, array.nbytes, self._out)

    def _reserve_memory(self, state: Slot, name: str, size: int) -> np.ndarray:
        """Return the tensor's host memory, allocated on first use and whenever it must grow."""
        if name not in state.hosts or state.hosts[name].nbytes < size:
            state.hosts[name] = self.device.pinned((size,), np.uint8)
        return state.hosts[name][:size]

    def results(self, slot: int) -> dict[str, tuple[Shape, str, int]]:
        """Return the shape, type and device address of every output of the slot's last run."""
        addresses = self._slots[slot].addresses
        return {t.name: (tuple(map(int, t.shape)), t.dtype, addresses[t.name]) for t in self.outputs}

    def parts(self, feeds: Arrays) -> dict[str, float]:
        """Return the seconds of each part of one inference, host to host (`INFERENCE_PARTS`, as in trtexec).

        `enqueue` is the host's time to queue the inference; the others are GPU times, by CUDA events.
        """
        h2d, compute, d2h = self._watches
        sources = self._list_sources(feeds, 0)
        h2d.start()
        self._send_inputs(0, sources)
        h2d.stop()
        h2d.seconds()
        compute.start()
        start = time.perf_counter_ns()
        self.run()
        enqueue = (time.perf_counter_ns() - start) / 1e9
        compute.stop()
        self.wait()
        targets = self._list_targets(0)
        d2h.start()
        self._receive_outputs(targets)
        d2h.stop()
        return dict(zip(INFERENCE_PARTS, (enqueue, h2d.seconds(), compute.seconds(), d2h.seconds()), strict=True))

    @cached_property
    def _watches(self) -> tuple[Stopwatch, ...]:
        return tuple(Stopwatch(int(stream)) for stream in (self._in, self._compute, self._out))

    def device_memory(self) -> int:
        """Return the bytes in use on the GPU, by all processes."""
        free, total = self.device.memory()
        return total - free

    def close(self) -> None:
        """Free the device's memory; a subclass frees its engine first."""
        self._staged.clear()
        self._slots.clear()
        self.device.close()


class _CudaArray:
    """GPU memory in Numba's CUDA array interface, version 3, for other libraries."""

    def __init__(self, shape: Shape, dtype: str, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(shape), "typestr": np.dtype(dtype).str, "data": (address, False), "version": 3,
        }  # fmt: skip
