"""Outputs of an ONNX file on a CPU, compared with its source file's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from dyno.worker.facts.files import OutputCheck
from dyno.worker.onnx_graph.half_precision import EMULATION_NOTE, emulate_bfloat16
from dyno.worker.spec import UserError, shorten
from dyno.worker.system import physical_cores

Feeds = Mapping[str, np.ndarray]
# Optimiser in which ONNX Runtime 1.30 crashes (SIGSEGV) on a CPU, for half-precision vision transformers
HALF_CRASHES = ("NchwcTransformer",)


def compare_outputs(before: list[np.ndarray], after: list[np.ndarray], subject: str, note: str) -> OutputCheck:
    """Return the largest difference and value over finite outputs, and `note`; raise a `UserError` for overflow.

    Overflow means that only the values afterwards are not finite.
    """
    pairs = list(zip(after, before, strict=True))
    mismatch = next((f"{a.shape} instead of {b.shape}" for a, b in pairs if a.shape != b.shape), "")
    masks = [np.isfinite(b) if not mismatch else np.bool_(True) for _, b in pairs]
    if any((mask & ~np.isfinite(a)).any() for (a, _), mask in zip(pairs, masks, strict=True)):
        raise UserError(f"{subject}: outputs are not finite; use bf16 or fp32")
    if mismatch:
        raise UserError(f"the graph that was made gives outputs of shape {mismatch}")
    finite_pairs = [(a[f], b[f]) for a, b in pairs for f in [np.isfinite(b)]]
    difference = max(float(np.abs(a - b).max(initial=0)) for a, b in finite_pairs)
    return OutputCheck(difference, max(float(np.abs(b).max(initial=0)) for _, b in finite_pairs), note)


def compute_outputs(
    path: str, feeds: Feeds, precision: str = "fp32", *, optimised: bool = True
) -> tuple[list[np.ndarray], str]:
    """Return the file's outputs as float64, and how it ran: unchanged, or emulated for BF16."""
    import onnx

    is_bf16 = precision == "bf16"
    model = emulate_bfloat16(onnx.load(path)).SerializeToString() if is_bf16 else path
    session = make_session(model, optimised=optimised and not is_bf16)
    arrays = [np.asarray(output, np.float64) for output in session.run(None, dict(feeds))]
    return arrays, EMULATION_NOTE if is_bf16 else "as it is"


def make_session(model: str | bytes, *, optimised: bool = True, threads: int = 0) -> Any:
    """Load a file or its bytes in ONNX Runtime on the CPU, with a thread per usable physical core by default.

    The library's own default pins a thread to each core of the machine, including other programs' cores.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised too
    options.intra_op_num_threads = threads or physical_cores()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=[*HALF_CRASHES]
        )
    except MemoryError:
        raise
    except Exception as e:  # the library's errors have no common base
        raise UserError(f"ONNX Runtime, which checks and calibrates the graph, refuses it: {error_line(e)}") from e


def error_line(error: Exception) -> str:
    """Return ONNX Runtime's error in one line, without codes, the file's name and source locations."""
    text = " ".join(str(error).split())
    if match := re.search(r"Opset (\d+) is under development.* domain (\S+) is till opset (\d+)", text):
        opset, domain, newest = match.groups()
        return f"it is in opset {opset} of {domain}, and this version reads up to {newest}; export it for that one"
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"^Load model from .*? failed: ?", "", text)
    return shorten(re.sub(r"^\S+\.(?:cc|h):\d+ .*?\) (?=\S)", "", text))
