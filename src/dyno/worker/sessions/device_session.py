"""A session with inputs and outputs in GPU memory: copies, slots and their order, for every engine that only enqueues.

Three streams (in, compute, out) and one set of buffers per slot, so that a slot's copies overlap with another's work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from dyno.worker.backend import Arrays, DeviceBinding, Session
from dyno.worker.inputs.specs import Shape, fitted
from dyno.worker.sessions.gpu import Device, Stopwatch, call
from dyno.worker.spec import PARTS, Tensor, Trial, UserError

SLOTS = 3  # one batch computes, one is on its way to the GPU, one on its way back


def slots_of(trial: Trial) -> int:
    """Return the trial's option `slots`; raise a `UserError` unless it is a whole number of at least 1."""
    slots = trial.options.get("slots", SLOTS)
    if not isinstance(slots, int) or slots < 1:
        raise UserError(f"slots is {slots!r}; it must be a whole number of batches in flight, at least 1")
    return slots


class Slot:
    """Memory of one batch: device addresses and page-locked host arrays by tensor name, and its events."""

    def __init__(self, device: Device) -> None:
        self.addresses: dict[str, int] = {}
        self.hosts: dict[str, np.ndarray] = {}
        self.bound, self.done = device.event(), device.event()
        self.fresh = False  # whether a copy to the device was queued since the last run


class DeviceSession(Session):
    """Copies and order of `slots` batches in flight; a subclass implements `enqueue`.

    `bind` copies straight from arrays that `stage` made, through page-locked memory from all others. Outputs are read
    by `fetch` into page-locked memory.
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

    def place(self, inputs: Mapping[str, Shape], room: Mapping[str, int]) -> None:
        """Allocate every slot's memory: `inputs` are the shapes that are fed, `room` the bytes of every tensor."""
        self._shapes = dict(inputs)
        for slot in self._slots:
            slot.addresses = {name: self.device.allocate(size) for name, size in room.items()}
            slot.hosts = {}

    def stage(self, feeds: Arrays) -> Arrays:
        """Return the feeds in page-locked memory and in the engine's types."""
        return {name: self._lock_feed(t, feeds[name]) for t in self.inputs if (name := t.name) in feeds}

    def _lock_feed(self, tensor: Tensor, feed: np.ndarray) -> np.ndarray:
        locked = self.device.pinned(feed.shape, tensor.dtype)
        np.copyto(locked, feed)
        self._staged.append(locked)
        return locked

    def _is_staged(self, feed: np.ndarray) -> bool:
        begin = feed.ctypes.data
        return any(0 <= begin - one.ctypes.data <= one.nbytes - feed.nbytes for one in self._staged)

    def _find_feed(self, tensor: Tensor, feeds: Arrays) -> np.ndarray:
        if tensor.name not in feeds:
            raise UserError(f"input {tensor.name!r} was not fed, only {', '.join(feeds) or 'nothing'}")
        return fitted(feeds[tensor.name], tensor, self._shapes[tensor.name])

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Queue the copies to the device; the next `run` of the slot waits for them."""
        self._send_inputs(slot, self._list_sources(feeds, slot))

    def _list_sources(self, feeds: Arrays, slot: int) -> list[tuple[int, int, int]]:
        """Return the device address, host address and bytes of every copy to the device."""
        place, copies = self._slots[slot], []
        for tensor in self.inputs:
            feed = self._find_feed(tensor, feeds)
            if not self._is_staged(feed):
                locked = self._reserve_memory(place, tensor.name, feed.nbytes)
                np.copyto(locked.view(feed.dtype).reshape(feed.shape), feed)
                feed = locked
            copies.append((place.addresses[tensor.name], feed.ctypes.data, feed.nbytes))
        return copies

    def _send_inputs(self, slot: int, sources: list[tuple[int, int, int]]) -> None:
        place = self._slots[slot]
        for device, host, size in sources:
            call(self._cuda.cuMemcpyHtoDAsync, device, host, size, self._in)
        call(self._cuda.cuEventRecord, place.bound, self._in)
        place.fresh = True

    def on_device(self) -> DeviceBinding | None:
        """See `Session.on_device`; None where this Python has no PyTorch with CUDA."""
        if find_spec("torch") is None:
            return None
        import torch

        if not torch.cuda.is_available():
            return None
        return DeviceBinding(torch, torch.device("cuda", self.device.index), self._bind_tensors, self._output_tensors)

    def _bind_tensors(self, tensors: Mapping[str, Any], ready: Any, slot: int) -> None:
        """Bind PyTorch tensors on the device, as `bind` does arrays, once the event has come."""
        call(self._cuda.cuStreamWaitEvent, self._in, self._cuda.CUevent(ready.cuda_event), 0)
        place = self._slots[slot]
        for tensor in self.inputs:
            given = tensors[tensor.name]
            if tuple(given.shape) != self._shapes[tensor.name] or str(given.dtype) != f"torch.{tensor.dtype}":
                raise UserError(f"input {tensor.name!r} wants {self._shapes[tensor.name]} {tensor.dtype}")
            size = given.numel() * given.element_size()
            call(self._cuda.cuMemcpyDtoDAsync, place.addresses[tensor.name], given.data_ptr(), size, self._in)
        call(self._cuda.cuEventRecord, place.bound, self._in)
        place.fresh = True

    def _output_tensors(self, slot: int) -> dict[str, Any]:
        """Return the outputs in place, as PyTorch tensors."""
        import torch

        place = torch.device("cuda", self.device.index)
        return {name: torch.as_tensor(_CudaArray(*result), device=place) for name, result in self.results(slot).items()}

    def run(self, slot: int = 0) -> None:
        """Queue one inference, after the slot's copies."""
        place = self._slots[slot]
        if place.fresh:
            call(self._cuda.cuStreamWaitEvent, self._compute, place.bound, 0)
            place.fresh = False
        self.enqueue(slot)
        if self.slots > 1:
            self._cuda.cuEventRecord(place.done, self._compute)

    def wait(self, slot: int = 0) -> None:
        """Return when the slot's work is done; a fault on the GPU is raised here."""
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
        place, targets = self._slots[slot], {}
        for name, (shape, dtype, address) in self.results(slot).items():
            host = self._reserve_memory(place, name, math.prod(shape) * np.dtype(dtype).itemsize)
            targets[name] = (host.view(dtype).reshape(shape), address)
        return targets

    def _receive_outputs(self, targets: Mapping[str, tuple[np.ndarray, int]]) -> None:
        for array, address in targets.values():
            if array.nbytes:
                call(self._cuda.cuMemcpyDtoHAsync, array.ctypes.data, address, array.nbytes, self._out)

    def _reserve_memory(self, place: Slot, name: str, size: int) -> np.ndarray:
        """Return the tensor's host memory, allocated on first use and again when it needs more."""
        if name not in place.hosts or place.hosts[name].nbytes < size:
            place.hosts[name] = self.device.pinned((size,), np.uint8)
        return place.hosts[name][:size]

    def results(self, slot: int) -> dict[str, tuple[Shape, str, int]]:
        """Return the shape, type and device address of every output of the slot's last run."""
        addresses = self._slots[slot].addresses
        return {t.name: (tuple(map(int, t.shape)), t.dtype, addresses[t.name]) for t in self.outputs}

    def parts(self, feeds: Arrays) -> dict[str, float]:
        """Return the seconds of one inference from host to host, part by part as trtexec names them: see `PARTS`.

        `enqueue` is the host's time to queue the inference; the others are the GPU's, by CUDA events.
        """
        h2d, compute, d2h = self._watches
        sources = self._list_sources(feeds, 0)
        h2d.start()
        self._send_inputs(0, sources)
        h2d.stop()
        h2d.seconds()
        compute.start()
        begin = time.perf_counter_ns()
        self.run()
        enqueue = (time.perf_counter_ns() - begin) / 1e9
        compute.stop()
        self.wait()
        targets = self._list_targets(0)
        d2h.start()
        self._receive_outputs(targets)
        d2h.stop()
        return dict(zip(PARTS, (enqueue, h2d.seconds(), compute.seconds(), d2h.seconds()), strict=True))

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
    """Memory on the GPU as other libraries read it (Numba's CUDA array interface, version 3)."""

    def __init__(self, shape: Shape, dtype: str, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(shape), "typestr": np.dtype(dtype).str, "data": (address, False), "version": 3,
        }  # fmt: skip
