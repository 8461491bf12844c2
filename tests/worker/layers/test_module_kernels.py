"""Times of kernels from a trace in which each operator has one, and what is said where a profiler sees none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dyno.worker.layers import module
from dyno.worker.spec import Unavailable

NET = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()).eval()
X = torch.zeros(1, 3, 8, 8)


@torch.inference_mode()
def once() -> None:
    NET(X)


def measure(monkeypatch: pytest.MonkeyPatch, kernels: dict[str, float]) -> Any:
    """As on a GPU: each operator of that name launches a kernel of so many microseconds."""
    traced = module.trace_kernels

    def with_kernels(*args: Any) -> Any:
        events, whole = traced(*args)
        operators = [e for e in events if e.get("cat") == "cpu_op" and e["name"] in kernels]
        for k, operator in enumerate(operators):
            numbers = {"External id": operator["args"]["External id"], "correlation": k}
            base = {"ph": "X", "pid": 1, "tid": 1, "args": numbers}
            events.append({**base, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": operator["ts"], "dur": 2.0})
            events.append({**base, "cat": "kernel", "name": f"k_{operator['name']}", "ts": operator["ts"] + 1e5 * k,
                           "dur": kernels[operator["name"]]})  # fmt: skip
        return events, whole

    monkeypatch.setattr(module, "trace_kernels", with_kernels)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return module.measure_kernels(NET, once, lambda: NET(X), 5)


def test_layers_have_their_kernels_and_the_gpu_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(monkeypatch, {"aten::conv2d": 7.0, "aten::relu": 3.0})
    assert [layer.name for layer in found.inside.layers[:2]] == ["0", "1"]
    assert [layer.tactic for layer in found.inside.layers[:2]] == ["k_aten::conv2d", "k_aten::relu"]
    assert found.layers.shape == (5, len(found.inside.layers)) and found.whole.shape == (5,)
    assert found.layers[:, :2] == pytest.approx(np.tile([7e-6, 3e-6], (5, 1))) and not found.layers[:, 2:].any()
    assert found.work.busy == pytest.approx(np.full(5, 10e-6)) and found.work.calls == pytest.approx(np.full(5, 4e-6))
    assert found.work.kernels.tolist() == [2] * 5


def test_a_profiler_without_kernels_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="saw no kernel on the GPU"):
        measure(monkeypatch, {})
