"""Precision truth by arithmetic: a network with most of the work in its one INT8 layer, and the reverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_text
from dyno.worker.backends.onnx_runtime import OnnxRuntime
from dyno.worker.backends.open_vino import OpenVino
from dyno.worker.spec import Dims, ModelSpec, Runtime, Trial

LARGE, SMALL = ["large"], ["small", "smaller", "smallest"]
# A multiply-add is two operations: places x channels x (kernel x input channels). All channels are multiples of 16:
# ONNX Runtime pads other counts to 8 or 16, depending on the processor.
OF_LARGE = 2 * (8 * 8) * 64 * (25 * 8)
OF_SMALL = 2 * ((8 * 8) * 16 * (1 * 64) + (4 * 4) * 16 * (9 * 16) + 4 * (16 * 4 * 4))
SHARE = OF_LARGE / (OF_LARGE + OF_SMALL)  # 1638400 of 1845248


@pytest.fixture(scope="module")
def quantise(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Quantise these nodes of the network to INT8."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Values(CalibrationDataReader):
        def __init__(self) -> None:
            rng = np.random.default_rng(1)
            self._feeds = iter([{"x": rng.standard_normal((1, 8, 8, 8), np.float32)} for _ in range(4)])

        def get_next(self) -> Any:
            return next(self._feeds, None)

    def write(names: list[str]) -> Path:
        folder, rng = tmp_path_factory.mktemp("mixed"), np.random.default_rng(0)
        text = """(float[1, 8, 8, 8] x) => (float[1, 4] y) {
            [large] a = Conv <pads = [2, 2, 2, 2]> (x, kernel) b = Relu(a)
            [small] c = Conv (b, first) d = Relu(c)
            [smaller] e = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (d, second) f = Relu(e)
            g = Flatten(f) [smallest] y = Gemm(g, third, bias) }"""
        shapes = {
            "kernel": (64, 8, 5, 5),
            "first": (16, 64, 1, 1),
            "second": (16, 16, 3, 3),
            "third": (256, 4),
            "bias": 4,
        }
        weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        plain = onnx_text.write(folder / "plain.onnx", text, **weights)
        kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        quantize_static(plain, folder / "mixed.onnx", Values(), nodes_to_quantize=names, **kinds)
        return folder / "mixed.onnx"

    return write


@pytest.mark.parametrize("backend", [OnnxRuntime(), OpenVino()], ids=lambda b: b.name)
@pytest.mark.parametrize(("names", "share", "ok"), [(LARGE, SHARE, True), (SMALL, 1 - SHARE, False)])
def test_int8_is_confirmed_by_its_share_of_the_arithmetic(
    quantise: Any, backend: Any, names: list[str], share: float, ok: bool
) -> None:
    path = quantise(names)
    model = ModelSpec("mixed", f"file:{path}", precision="int8")
    trial = Trial(model, backend.name, "int8", Dims(1, 8, 8, {"x": (1, 8, 8, 8)}), runtime=Runtime(threads=1))
    session = backend.load(trial, None)
    facts = session.facts()
    session.close()
    assert facts.layers_by_type == {"int8": len(names), "float32": 4 - len(names)}
    operations = {"int8": OF_LARGE, "float32": OF_SMALL} if ok else {"int8": OF_SMALL, "float32": OF_LARGE}
    assert facts.operations_by_type == operations
    truth = facts.precision_truth
    assert (truth.ok, truth.refuted) == (ok, not ok)
    assert truth.share["int8"] == pytest.approx(share)
    assert truth.sentence.endswith(f"{89 if ok else 11}% of the arithmetic in int8")
