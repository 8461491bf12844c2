"""Graphs of PyTorch's dynamo exporter, in forms that engines fuse: the same outputs, fewer and larger operators."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from dyno.worker.makers.export import fusible

# PyTorch's exporter knows for ever only the operators that there were when it first ran: other tests need these.
pytest.importorskip("torchvision")

torch.manual_seed(0)


class Swap(nn.Module):
    """Attention's keys: the last two axes of four are swapped."""

    def forward(self, x: Any) -> Any:
        heads = x.reshape(x.shape[0], 5, 2, 4).permute(0, 2, 1, 3)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)


def exported(module: nn.Module) -> Any:
    example = torch.randn(2, 5, 8)
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        program = torch.onnx.export(
            module.eval(), (example,), dynamo=True, opset_version=18, verbose=False,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )  # fmt: skip
    assert program is not None
    return program.model_proto


def ran(model: Any, feed: np.ndarray, scratch: Path) -> tuple[np.ndarray, Counter[str]]:
    """The outputs, and the operators that ONNX Runtime makes of the graph."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = str(scratch / "optimised.onnx"), 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: feed})
    return output, Counter(node.op_type for node in onnx.load(scratch / "optimised.onnx").graph.node)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "gone", "there"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)), "Erf", "BiasGelu"),
        (nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.LayerNorm(8)), "Erf", "Gelu"),
        (Swap(), "Reshape", "FusedMatMul"),
    ],
    ids=["gelu after a bias", "gelu by itself", "keys of attention"],
)
def test_what_engines_fuse(module: nn.Module, gone: str, there: str, tmp_path: Path) -> None:
    model, feed = exported(module), np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)
    before, written = ran(model, feed, tmp_path)
    after, fused = ran(fusible(model), feed, tmp_path)
    assert fused[gone] < written[gone] and fused[there] >= max(1, written[there])
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_another_function_with_an_erf_stays_as_it_is(tmp_path: Path) -> None:
    class Other(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * (0.25 * (torch.erf(x / 3.0) + 2.0))

    model, feed = exported(Other()), np.ones((1, 5, 8), np.float32)
    written = Counter(node.op_type for node in model.graph.node)
    rewritten = fusible(model)
    assert Counter(node.op_type for node in rewritten.graph.node) == written
    assert ran(rewritten, feed, tmp_path)[1]["Erf"] == 1
