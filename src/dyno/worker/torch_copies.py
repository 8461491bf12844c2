"""Copies between host and GPU around PyTorch's compute stream, so that a slot's copies overlap with another's work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dyno.worker.spec import PARTS


class Copies:
    """Brings inputs to the slots' tensors on the device and outputs back, on a stream for each way.

    Page-locked memory on both ends; types and layouts change on the device, where it costs least. Inputs come as
    float32, or as uint8 where that is what the tensors are.
    """

    def __init__(self, torch: Any, bound: list[Any]) -> None:
        cuda, first = torch.cuda, bound[0]
        self._torch, self._bound = torch, bound
        self._in, self.compute, self._out = (cuda.Stream(first.device) for _ in range(3))
        self._there, self._done = ([cuda.Event() for _ in bound] for _ in range(2))
        self._fresh = [False for _ in bound]
        self._fed = torch.uint8 if first.dtype == torch.uint8 else torch.float32
        as_fed = first.dtype == self._fed and first.is_contiguous()
        self._landed = bound if as_fed else [torch.empty(b.shape, dtype=self._fed, device=b.device) for b in bound]
        self._hosts: list[Any] = [None for _ in bound]
        self._staged: dict[int, Any] = {}
        self._fetched: list[dict[str, Any]] = [{} for _ in bound]
        cuda.synchronize(first.device)  # weights and buffers were made on the default stream, which no other waits for

    def stage(self, feed: np.ndarray) -> np.ndarray:
        """A copy of the array in page-locked memory, which `bind` reads without another copy; kept as long as this."""
        host = self._locked(feed.shape, self._fed)
        array: np.ndarray = host.numpy()
        np.copyto(array, feed)
        self._staged[array.ctypes.data] = host
        return array

    def _locked(self, shape: Any, dtype: Any) -> Any:
        return self._torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def bind(self, feed: np.ndarray, slot: int) -> None:
        """Queue the copy to the device; the slot's next run waits for it."""
        host = self._staged.get(feed.ctypes.data) if feed.flags.c_contiguous else None
        if host is None or tuple(host.shape) != feed.shape:
            host = self._through(feed, slot)
        with self._torch.cuda.stream(self._in):
            self._landed[slot].copy_(host, non_blocking=True)
            if self._landed is not self._bound:
                self._bound[slot].copy_(self._landed[slot])
            self._there[slot].record(self._in)
        self._fresh[slot] = True

    def _through(self, feed: np.ndarray, slot: int) -> Any:
        """The slot's page-locked memory with the feed in it."""
        if self._hosts[slot] is None:
            self._hosts[slot] = self._locked(feed.shape, self._fed)
        self._there[slot].synchronize()  # an earlier copy may still read from there
        np.copyto(self._hosts[slot].numpy(), feed)
        return self._hosts[slot]

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
        """The tensors as float32 arrays in page-locked memory, valid until the slot is fetched again."""
        found = self._read(outputs, slot)
        self._out.synchronize()
        return found

    def _read(self, outputs: Mapping[str, Any], slot: int) -> dict[str, np.ndarray]:
        with self._torch.cuda.stream(self._out):
            self._out.wait_event(self._done[slot])
            for name, tensor in outputs.items():
                self._room(name, tensor.shape, slot).copy_(tensor.float().contiguous(), non_blocking=True)
        return {name: self._fetched[slot][name].numpy() for name in outputs}

    def _room(self, name: str, shape: Any, slot: int) -> Any:
        have = self._fetched[slot].get(name)
        if have is None or have.shape != shape:
            have = self._fetched[slot][name] = self._locked(shape, self._torch.float32)
        return have

    def parts(
        self, bind: Callable[[], None], run: Callable[[], None], outputs: Callable[[], Mapping[str, Any]]
    ) -> dict[str, float]:
        """Seconds of one inference in slot 0 by `PARTS`: `enqueue` is the host's time to queue it, the others are the
        GPU's by CUDA events; changes of type and layout belong to the copies."""
        _, h2d = self._timed(self._in, bind)
        enqueue, compute = self._timed(self.compute, run)
        found = outputs()
        _, d2h = self._timed(self._out, lambda: self._read(found, 0))
        return dict(zip(PARTS, (enqueue, h2d, compute, d2h), strict=True))

    def _timed(self, stream: Any, action: Callable[[], Any]) -> tuple[float, float]:
        """Seconds by the host's clock until it is queued, and by the GPU's until it is done."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        start = time.perf_counter_ns()
        action()
        queued = (time.perf_counter_ns() - start) / 1e9
        end.record(stream)
        end.synchronize()
        return queued, begin.elapsed_time(end) / 1e3
