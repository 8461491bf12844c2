"""How long the kernels of each call of a PyTorch module's parts run on a GPU, by PyTorch's own profiler."""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import GpuWork, LayerTimes
from dyno.worker.layers import critical_path, kernel_trace
from dyno.worker.layers.module import hooked
from dyno.worker.layers.module_times import DISCARDED, rows_of, watched_whole
from dyno.worker.sessions.torch_support import import_torch
from dyno.worker.spec import Unavailable

NOTE = (
    "PyTorch's rows have the time of the kernels and copies that a module launched itself, by torch.profiler; while "
    "none ran is in no row."
)


def measure(
    module: Any,
    once: Callable[[], None],
    plainly: Callable[[], Any],
    runs: int,
    restore: Callable[[], None] = lambda: None,
) -> LayerTimes:
    """Measure the seconds of the kernels of each call of a part, without its own parts', in `runs` runs of `once`.

    `once` returns when the GPU is done; `plainly` and `restore` are as in `module_times.measure`. Raises `UserError` as
    `layers.module.watched` does, and `Unavailable` where the profiler sees no kernel.
    """
    inside = watched_whole(module, plainly, restore)
    import_torch().cuda.synchronize()
    events, whole = traced(module, once, DISCARDED + runs, restore)
    traced_runs = kernel_trace.read(events, rows_of(inside), len(inside.layers))[DISCARDED:]
    if len(traced_runs) != runs or not any(run.kernels for run in traced_runs):
        raise Unavailable("torch.profiler saw no kernel on the GPU; CUPTI may be missing or forbidden here")
    labels = kernel_trace.labels(traced_runs, len(inside.layers))
    layers = tuple(replace(layer, tactic=label) for layer, label in zip(inside.layers, labels, strict=True))
    work = GpuWork(*(np.array([getattr(run, name) for run in traced_runs]) for name in ("busy", "calls", "kernels")))
    seconds = np.array([run.seconds for run in traced_runs])
    return LayerTimes(replace(inside, layers=layers), seconds, np.array(whole[DISCARDED:]), NOTE, work,
                      critical_path.functions(events, DISCARDED))  # fmt: skip


def traced(
    module: Any, once: Callable[[], None], runs: int, restore: Callable[[], None] = lambda: None
) -> tuple[list[dict[str, Any]], list[float]]:
    """Trace `runs` runs; return the trace's events and the host's seconds of each run.

    The events include the ranges of `kernel_trace`.
    """
    torch = import_torch()
    from torch.profiler import ProfilerActivity, profile, record_function

    calling: list[Any] = []

    def make_enter_hook(name: str) -> Callable[..., None]:
        def enter_part(*_: Any) -> None:
            scope = record_function(f"{kernel_trace.CALL}{name}")
            scope.__enter__()
            calling.append(scope)

        return enter_part

    def leave_part(*_: Any) -> None:
        calling.pop().__exit__(None, None, None)

    whole = []
    with hooked(torch, module, make_enter_hook, lambda _: leave_part), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of what other uses of it need
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(runs):
                restore()
                start = time.perf_counter()
                with record_function(kernel_trace.RUN):
                    once()
                whole.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"), strict=False)["traceEvents"], whole
