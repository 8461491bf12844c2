"""Copies between host and GPU around PyTorch's compute stream, so that a slot's copies overlap with another's work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dyno.worker.spec import PARTS


class Copies:
    """Copies inputs to the slots' tensors on the device and outputs back, on a stream for each direction.

    Page-locked memory on both ends; types and layouts change on the device, where it costs least. `bound` are each
    slot's input tensors by name.
    """

    def __init__(self, torch: Any, bound: list[dict[str, Any]]) -> None:
        first = next(iter(bound[0].values()))
        self._torch, self._bound = torch, bound
        self._in, self.compute, self._out = (torch.cuda.Stream(first.device) for _ in range(3))
        self._there, self._done = ([torch.cuda.Event() for _ in bound] for _ in range(2))
        self._fresh = [False for _ in bound]
        # Floating-point inputs come as float32, whatever the module computes in; others as they are.
        self._fed = {n: torch.float32 if t.is_floating_point() else t.dtype for n, t in bound[0].items()}
        self._landed = [{name: self._choose_target(name, tensor) for name, tensor in slot.items()} for slot in bound]
        self._hosts: list[dict[str, Any]] = [{} for _ in bound]
        self._staged: dict[int, Any] = {}
        self._fetched: list[dict[str, Any]] = [{} for _ in bound]
        torch.cuda.synchronize(first.device)  # weights and buffers were made on the default stream, no other waits

    def _choose_target(self, name: str, tensor: Any) -> Any:
        """Return the target of a copy from the host: the module's own tensor if it has a feed's type and layout."""
        if tensor.dtype == self._fed[name] and tensor.is_contiguous():
            return tensor
        return self._torch.empty(tensor.shape, dtype=self._fed[name], device=tensor.device)

    def stage(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return copies of the arrays in page-locked memory, which `bind` reads without another copy.

        They are kept as long as this object.
        """
        return {name: self._stage_feed(feed, self._fed[name]) for name, feed in feeds.items() if name in self._fed}

    def _stage_feed(self, feed: np.ndarray, dtype: Any) -> np.ndarray:
        host = self._allocate_locked(feed.shape, dtype)
        array: np.ndarray = host.numpy()
        np.copyto(array, feed)
        self._staged[array.ctypes.data] = host
        return array

    def _allocate_locked(self, shape: Any, dtype: Any) -> Any:
        return self._torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def bind(self, feeds: Mapping[str, np.ndarray], slot: int) -> None:
        """Queue the copies to the device; the slot's next run waits for them."""
        hosts = {name: self._find_host_tensor(name, feeds[name], slot) for name in self._bound[slot]}
        with self._torch.cuda.stream(self._in):
            for name, host in hosts.items():
                landed, bound = self._landed[slot][name], self._bound[slot][name]
                landed.copy_(host, non_blocking=True)
                if landed is not bound:
                    bound.copy_(landed)
            self._there[slot].record(self._in)
        self._fresh[slot] = True

    def bind_tensors(self, feeds: Mapping[str, Any], ready: Any, slot: int) -> None:
        """Bind tensors on the device, as `bind` does arrays, after the event `ready`."""
        with self._torch.cuda.stream(self._in):
            self._in.wait_event(ready)
            for name, bound in self._bound[slot].items():
                bound.copy_(feeds[name])
            self._there[slot].record(self._in)
        self._fresh[slot] = True

    def _find_host_tensor(self, name: str, feed: np.ndarray, slot: int) -> Any:
        host = self._staged.get(feed.ctypes.data) if feed.flags.c_contiguous else None
        return host if host is not None and tuple(host.shape) == feed.shape else self._copy_to_locked(name, feed, slot)

    def _copy_to_locked(self, name: str, feed: np.ndarray, slot: int) -> Any:
        """Return the slot's page-locked memory with the feed in it."""
        if name not in self._hosts[slot]:
            self._hosts[slot][name] = self._allocate_locked(feed.shape, self._fed[name])
        self._there[slot].synchronize()  # an earlier copy may still read from there
        np.copyto(self._hosts[slot][name].numpy(), feed)
        return self._hosts[slot][name]

    def arrive(self, slot: int) -> None:
        """Let the compute stream wait for the slot's input, if it is new."""
        if self._fresh[slot]:
            self.compute.wait_event(self._there[slot])
            self._fresh[slot] = False

    def leave(self, slot: int) -> None:
        """Mark the end of the slot's work on the compute stream."""
        self._done[slot].record(self.compute)

    def wait(self, slot: int) -> None:
        """Return when the slot's work is done."""
        self._done[slot].synchronize()

    def fetch(self, outputs: Mapping[str, Any], slot: int) -> dict[str, np.ndarray]:
        """Return the tensors as float32 arrays in page-locked memory, valid until the slot is fetched again."""
        arrays = self._read_outputs(outputs, slot)
        self._out.synchronize()
        return arrays

    def _read_outputs(self, outputs: Mapping[str, Any], slot: int) -> dict[str, np.ndarray]:
        with self._torch.cuda.stream(self._out):
            self._out.wait_event(self._done[slot])
            for name, tensor in outputs.items():
                self._reserve_buffer(name, tensor.shape, slot).copy_(tensor.float().contiguous(), non_blocking=True)
        return {name: self._fetched[slot][name].numpy() for name in outputs}

    def _reserve_buffer(self, name: str, shape: Any, slot: int) -> Any:
        buffer = self._fetched[slot].get(name)
        if buffer is None or buffer.shape != shape:
            buffer = self._fetched[slot][name] = self._allocate_locked(shape, self._torch.float32)
        return buffer

    def parts(
        self, bind: Callable[[], None], run: Callable[[], None], outputs: Callable[[], Mapping[str, Any]]
    ) -> dict[str, float]:
        """Return the seconds of one inference in slot 0 by `PARTS`.

        `enqueue` is the host's time to queue it, the others are the GPU's by CUDA events; changes of type and layout
        belong to the copies.
        """
        _, h2d = self._time_action(self._in, bind)
        enqueue, compute = self._time_action(self.compute, run)
        tensors = outputs()
        _, d2h = self._time_action(self._out, lambda: self._read_outputs(tensors, 0))
        return dict(zip(PARTS, (enqueue, h2d, compute, d2h), strict=True))

    def _time_action(self, stream: Any, action: Callable[[], Any]) -> tuple[float, float]:
        """Return the seconds by the host's clock until it is queued, and by the GPU's until it is done."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        start = time.perf_counter_ns()
        action()
        queued = (time.perf_counter_ns() - start) / 1e9
        end.record(stream)
        end.synchronize()
        return queued, begin.elapsed_time(end) / 1e3
