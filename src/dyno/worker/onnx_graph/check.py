"""What an ONNX file gives on a CPU, to be held against what it was made from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from dyno.worker.onnx_graph.bf16 import EMULATION, emulated
from dyno.worker.spec import UserError
from dyno.worker.system import physical_cores

Feeds = Mapping[str, np.ndarray]
# ONNX Runtime 1.30 dies of this one with SIGSEGV on a CPU in half-precision graphs of vision transformers.
HALF_CRASHES = ("NchwcTransformer",)


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

    bf16 = precision == "bf16"
    model = emulated(onnx.load(path)).SerializeToString() if bf16 else path
    ready = session(model, optimised=optimised and not bf16)
    found = [np.asarray(output, np.float64) for output in ready.run(None, dict(feeds))]
    return found, EMULATION if bf16 else "as it is"


def session(model: str | bytes, *, optimised: bool = True, threads: int = 0) -> Any:
    """A file or its bytes in ONNX Runtime on the CPU, by a thread per physical core that this process may use.

    Without a number the library ties a thread to each core of the machine, other programs' cores among them.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised too
    options.intra_op_num_threads = threads or physical_cores()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=[*HALF_CRASHES]
        )
    except MemoryError:
        raise
    except Exception as e:  # the library's errors have no base of their own
        raise UserError(f"ONNX Runtime, which checks and calibrates the graph, refuses it: {said(e)}") from e


def said(error: Exception) -> str:
    """ONNX Runtime's error in one line, without its codes, the file's name and where in its source that is."""
    text = " ".join(str(error).split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"^Load model from .*? failed: ?", "", text)
    return re.sub(r"^\S+\.(?:cc|h):\d+ .*?\) (?=\S)", "", text)[:300]
