"""A PyTorch module run once for a profiler of kernels, with an NVTX range around each call of a part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from dyno.worker.facts.kernels import range_name
from dyno.worker.layers.module import hooked
from dyno.worker.sessions.torch_support import import_torch


def run(module: Any, once: Callable[[], None]) -> None:
    """Call `once`, which returns when the GPU is done, between the start and the stop of CUDA's profiler.

    Ranges are named by `range_name`. A part of TorchScript has none: its hooks would not be called.
    """
    torch = import_torch()
    seen: Counter[str] = Counter()

    def make_enter_hook(name: str) -> Callable[..., None]:
        def enter_part(*_: Any) -> None:
            seen[name] += 1
            torch.cuda.nvtx.range_push(range_name(name, seen[name]))

        return enter_part

    def leave_part(*_: Any) -> None:
        torch.cuda.nvtx.range_pop()

    with hooked(torch, module, make_enter_hook, lambda _: leave_part), torch.cuda.profiler.profile():
        once()
