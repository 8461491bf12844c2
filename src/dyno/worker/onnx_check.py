"""What an ONNX file gives on a CPU, to be held against what it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dyno.worker.onnx_bf16 import EMULATION, emulated
from dyno.worker.spec import UserError

Feeds = Mapping[str, np.ndarray]


def compared(before: list[np.ndarray], after: list[np.ndarray], what: str, ran: str) -> dict[str, Any]:
    """How far outputs are apart, beside their largest, and how they were had; overflow is a `UserError`."""
    if all(np.isfinite(b).all() for b in before) and not all(np.isfinite(a).all() for a in after):
        raise UserError(f"{what}: outputs are not finite; use bf16 or fp32")
    apart = max(float(np.abs(a - b).max(initial=0)) for a, b in zip(after, before, strict=True))
    return {"max_difference": apart, "max_output": max(float(np.abs(b).max(initial=0)) for b in before), "ran": ran}


def outputs(
    path: str, feeds: Feeds, precision: str = "fp32", *, optimised: bool = True
) -> tuple[list[np.ndarray], str]:
    """The file's outputs as float64, and how it was run: as it is, or a BF16 one emulated."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    bf16 = precision == "bf16"
    if bf16 or not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = emulated(onnx.load(path)).SerializeToString() if bf16 else path
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    found = [np.asarray(output, np.float64) for output in session.run(None, dict(feeds))]
    return found, EMULATION if bf16 else "as it is"
