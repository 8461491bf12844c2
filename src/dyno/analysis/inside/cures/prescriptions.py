"""What may make an engine faster, as data: which cause calls for it, and which variant of the engine it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dyno.analysis.inside import causes
from dyno.analysis.inside.causes import Cause
from dyno.analysis.inside.waterfall import Waterfall, WaterfallStep
from dyno.worker.spec import Option

LEAST = 0.05  # of B's latency: a cause that costs less calls for nothing
# What B would be rid of without them; of the other causes only what B takes longer than A counts.
OVERHEADS = (causes.STAYED, causes.SPLIT, causes.CONVERSION, causes.CALLS, causes.WAITING, causes.BETWEEN)
ONNX = ("onnxruntime", "openvino", "tensorrt", "tensorrt_rtx")
TENSORRT = ("tensorrt", "tensorrt_rtx")


@dataclass(frozen=True)
class Prescription:
    """A change of an engine: `options` beside its own, or another `backend` or `precision` in place of its own.

    It is for engines of these `backends` in these `precisions` (none: any) on these kinds of `devices`, whose options
    have one of the values in `only` (None: not set), where one of the `causes` costs time.
    """

    text: str
    causes: tuple[Cause, ...]
    backends: tuple[str, ...]
    options: Mapping[str, Option] = field(default_factory=dict)
    backend: str = ""
    precision: str = ""
    precisions: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    only: Mapping[str, tuple[Option | None, ...]] = field(default_factory=dict)

    def fits(self, backend: str, precision: str, device: str, options: Mapping[str, Option]) -> bool:
        """Return whether the prescription is for such an engine and asks for another precision, if it asks for one."""
        of_these = backend in self.backends and (not self.precisions or precision in self.precisions)
        so_set = all(options.get(name) in values for name, values in self.only.items())
        return of_these and so_set and device.partition(":")[0] in self.devices and precision != self.precision


PRESCRIPTIONS = (
    Prescription("newer opset, in which one operator stands for several",
                 (causes.SPLIT, causes.CONVERSION, causes.KERNEL), ("onnxruntime", "openvino"), {"opset": 20}),
    Prescription("PyTorch's other exporter", (causes.SPLIT, causes.KERNEL), ONNX, {"exporter": "torchscript"}),
    Prescription("fixed shapes and folded constants", (causes.SPLIT, causes.CONVERSION), ("onnxruntime", "openvino"),
                 {"static": True, "fold": True}),
    Prescription("no conversion to blocked layouts", (causes.CONVERSION,), ("onnxruntime",),
                 {"optimization": "extended"}, devices=("cpu",)),
    Prescription("fewer layers in a narrow type: the four most sensitive ones in FP32",
                 (causes.NARROWER, causes.CONVERSION), ONNX, {"keep": 4}, precisions=("int8", "fp16")),
    Prescription("OpenVINO in place of ONNX Runtime",
                 (causes.KERNEL, causes.NARROWER, causes.STAYED, causes.CONVERSION, causes.SPLIT), ("onnxruntime",),
                 backend="openvino", devices=("cpu",)),
    Prescription("ONNX Runtime in place of OpenVINO", (causes.KERNEL, causes.NARROWER, causes.CONVERSION, causes.SPLIT),
                 ("openvino",), backend="onnxruntime", precisions=("fp32", "int8"), devices=("cpu",)),
    Prescription("BF16 in place of INT8", (causes.NARROWER, causes.STAYED, causes.CONVERSION), ("openvino",),
                 precision="bf16", precisions=("int8",), devices=("cpu",)),
    Prescription("FP16 in place of INT8", (causes.NARROWER, causes.STAYED, causes.CONVERSION), TENSORRT,
                 precision="fp16", precisions=("int8",)),
    Prescription("code compiled by inductor", (causes.CALLS, causes.BETWEEN, causes.KERNEL, causes.SPLIT), ("pytorch",),
                 backend="compile"),
    Prescription("a CUDA graph of compiled code", (causes.WAITING,), ("pytorch", "compile"),
                 {"mode": "reduce-overhead"}, backend="compile", devices=("cuda",)),
    Prescription("channels-last layout", (causes.KERNEL, causes.CONVERSION), ("pytorch", "compile"),
                 {"channels_last": True}),
    Prescription("cuDNN's fastest algorithms, by trying them", (causes.KERNEL,), ("pytorch", "compile"),
                 {"cudnn_benchmark": True}, devices=("cuda",)),
    Prescription("eight bits between layers, too: Q/DQ at sums, splits and concatenations",
                 (causes.CONVERSION, causes.SPLIT), TENSORRT, {"joints": True}, precisions=("int8",),
                 only={"route": (None, "auto", "graph"), "quantizer": (None, "onnxruntime"), "joints": (None, False)}),
    Prescription("types that the builder chooses, from a calibrator's ranges",
                 (causes.NARROWER, causes.STAYED, causes.CONVERSION, causes.SPLIT, causes.KERNEL), ("tensorrt",),
                 {"route": "calibrator"}, precisions=("int8",), only={"route": (None, "auto", "graph")}),
    Prescription("the builder's usual level", (causes.KERNEL, causes.CONVERSION, causes.SPLIT), TENSORRT,
                 {"optimization": 3}, only={"optimization": (0, 1, 2)}),
    Prescription("the builder's highest level", (causes.KERNEL, causes.CONVERSION), TENSORRT, {"optimization": 5},
                 only={"optimization": (None, 3, 4)}),
    Prescription("another build, without timings of earlier ones", (causes.KERNEL, causes.SAME), ("tensorrt",),
                 {"timing_cache": False, "build": 1}),
)  # fmt: skip


@dataclass(frozen=True)
class IndicatedPrescription:
    """A prescription, the cause that costs most of those that call for it, and what that costs in seconds."""

    prescription: Prescription
    cause: Cause
    seconds: float


def called_for(
    waterfall: Waterfall, backend: str, precision: str, device: str, options: Mapping[str, Option]
) -> list[IndicatedPrescription]:
    """Return the prescriptions for B, an engine of that backend and options, the most expensive cause first."""
    costs = {step.cause: _estimate_saving(waterfall, step) for step in waterfall.causes}
    least = LEAST * waterfall.gap.b
    called = []
    for each in PRESCRIPTIONS:
        cause = max(each.causes, key=lambda cause: costs.get(cause, 0.0))
        if each.fits(backend, precision, device, options) and costs.get(cause, 0.0) >= least:
            called.append(IndicatedPrescription(each, cause, costs[cause]))
    return sorted(called, key=lambda one: -one.seconds)


def _estimate_saving(waterfall: Waterfall, step: WaterfallStep) -> float:
    """Return the seconds that B might save."""
    if step.cause in OVERHEADS:
        return step.b
    return sum(_iter_slowdowns(waterfall, step)) if step.parts else max(0.0, step.difference.value)


def _iter_slowdowns(waterfall: Waterfall, step: WaterfallStep) -> Iterator[float]:
    """Yield the seconds by which each slower part is slower in B."""
    for k in step.parts:
        if (more := waterfall.step(step.cause, (k,)).difference.value) > 0:
            yield more
