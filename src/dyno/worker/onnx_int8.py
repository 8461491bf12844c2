"""INT8 ONNX graphs: Q/DQ by onnxruntime.quantization's static post-training quantisation, calibrated on real images.

The scheme (Jacob et al., 2018) depends on the engine that will read the file: see `SCHEMES`.
"""

from __future__ import annotations

import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyno.worker.calibration import SAMPLES, CalibrationImages, reader
from dyno.worker.spec import Artifact, Recipe, UserError

METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
METHOD = "minmax"
PERCENTILE = 99.99

# The same holds for eight bits, where they bring no speed either; what selects by index must not be rounded at all.
NOT_QUANTISED = set(
    "Softmax LayerNormalization InstanceNormalization BatchNormalization EmbedLayerNormalization CumSum TopK ArgMax "
    "Where".split()
)
# Q/DQ nodes have a scale per channel from this opset on.
PER_CHANNEL_OPSET = 13


@dataclass(frozen=True)
class Scheme:
    """How an engine wants its Q/DQ nodes: signed or unsigned activations, their symmetry, and INT32 or float biases."""

    unsigned: bool
    symmetric: bool
    quantise_bias: bool

    @property
    def text(self) -> str:
        """The scheme in the field's short form, e.g. `U8S8, asymmetric activations, …`."""
        kind = "symmetric" if self.symmetric else "asymmetric"
        bias = "INT32" if self.quantise_bias else "float"
        return f"{'U' if self.unsigned else 'S'}8S8, {kind} activations, symmetric per-channel weights, {bias} bias"


# Chosen by measuring: ONNX Runtime's x86 kernels want unsigned activations (S8S8 fuses half the convolutions and gains
# nothing); OpenVINO's CPU plugin fuses every scheme, unsigned asymmetric is the fastest and most accurate of them;
# TensorRT takes symmetric S8S8 alone and rejects an INT32 bias.
SCHEMES = {
    "onnxruntime": Scheme(unsigned=True, symmetric=False, quantise_bias=True),
    "openvino": Scheme(unsigned=True, symmetric=False, quantise_bias=False),
    "tensorrt": Scheme(unsigned=False, symmetric=True, quantise_bias=False),
}


def to_int8(model: Any, recipe: Recipe, parent: Artifact, path: Path) -> dict[str, Any]:
    """Write the quantised graph; returns what shaped it: scheme, target, calibration and warnings."""
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    target, method = str(recipe.options.get("target", "")), str(recipe.options.get("method", METHOD))
    scheme = _known(target, SCHEMES, "int8 target")
    images = CalibrationImages(recipe, parent)
    narrow = target == "onnxruntime" and _saturates()
    kinds = quantization.QuantType
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        source, prepared = Path(scratch) / "source.onnx", Path(scratch) / "prepared.onnx"
        if next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")) < PER_CHANNEL_OPSET:
            model = onnx.version_converter.convert_version(model, PER_CHANNEL_OPSET)
        onnx.save(model, source)
        quant_pre_process(source, prepared, skip_symbolic_shape=True)
        quantization.quantize_static(
            prepared,
            path,
            reader(images.feeds, len(images)),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=_quantised_types(),
            activation_type=kinds.QUInt8 if scheme.unsigned else kinds.QInt8,
            weight_type=kinds.QInt8,
            per_channel=True,
            reduce_range=narrow,
            calibrate_method=quantization.CalibrationMethod[_known(method, METHODS, "calibration method")],
            extra_options=_extra_options(scheme, method, recipe, len(images)),
        )
    onnx.checker.check_model(str(path))
    few = f"calibrated on {images.count} images, all that {images.data.name} has for it"
    return {
        "scheme": scheme.text + (", weights in 7 bits because this CPU has no VNNI" if narrow else ""),
        "target": target,
        "calibration": {"samples": images.count, "method": method, "data_sha256": images.data.sha256},
        "warnings": [few] if images.found < int(recipe.options.get("samples", SAMPLES)) else [],
    }


def _known(name: str, choices: dict[str, Any], what: str) -> Any:
    if name not in choices:
        raise UserError(f"unknown {what} {name!r}; known: {', '.join(choices)}")
    return choices[name]


def _extra_options(scheme: Scheme, method: str, recipe: Recipe, batches: int) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "ActivationSymmetric": scheme.symmetric,
        "WeightSymmetric": True,
        "QuantizeBias": scheme.quantise_bias,
    }
    if method == "minmax":
        return extra
    # Histograms need every intermediate tensor: a few images at a time, or they fill the memory.
    stride = next(size for size in range(min(8, batches), 0, -1) if batches % size == 0)
    extra |= {"CalibStridedMinMax": stride}
    if method == "percentile":
        extra |= {"CalibPercentile": float(recipe.options.get("percentile", PERCENTILE))}
    return extra


def _quantised_types() -> list[str]:
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    return sorted((set(QDQRegistry) | set(QLinearOpsRegistry)) - NOT_QUANTISED)


def _saturates() -> bool:
    """Whether this x86 CPU sums products of U8 and S8 in 16 bits, which overflows: all before VNNI do."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True
    return not any(flag in flags for flag in ("avx512_vnni", "avx_vnni", "amx_int8"))
