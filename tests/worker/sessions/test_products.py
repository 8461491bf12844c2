"""The numeric sentinel: engines in each type keep as many bits of a factor as the type has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dyno.worker.backends.onnx_runtime import OnnxRuntime
from dyno.worker.facts.engine import precision_truth
from dyno.worker.sessions import products


def multiplied(factors: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return both results in float64, without rounding."""
    a, m, i, k = (factors[name].astype(np.float64) for name in "amik")
    return [a @ m, np.einsum("bchw,oc->bohw", i, k[:, :, 0, 0])]


@pytest.mark.parametrize(("kept", "bits"), [(24, 24), (11, 11), (8, 8)])
def test_product_bits_reveal_the_rounding_of_factors(kept: int, bits: int) -> None:
    factors = products.make_factors()
    words = {name: array.view(np.uint32) for name, array in factors.items()}
    rounded = {name: ((w + (1 << (23 - kept))) >> (24 - kept) << (24 - kept) if kept < 24 else w).view(np.float32)
               for name, w in words.items()}  # fmt: skip
    assert products.count_bits(multiplied(rounded)) == bits
    one = [multiplied(factors)[0], multiplied(rounded)[1]]
    assert products.count_bits(one) == bits, "the worse of a product and a convolution"


def test_too_few_product_bits_refute_the_reported_layer_types() -> None:
    layers = {"float32": 4}
    right, wrong = (precision_truth("fp32", layers, "an engine", bits=bits) for bits in (24, 11))
    assert right.ok and right.sentence.endswith("4 of 4 compute layers in float32; measured: products keep 24 bits")
    assert not wrong.ok and wrong.refuted and wrong.sentence.endswith("measured: products keep 11 bits of 24")
    assert precision_truth("tf32", layers, "an engine", bits=11).ok
    assert precision_truth("bf16", {"bfloat16": 4}, "an engine", bits=8).ok
    assert precision_truth("int8", {"int8": 4}, "an engine", bits=8).ok


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("bfloat16", 8), ("float16", 11)])
def test_pytorch_keeps_the_bits_of_its_type(dtype: str, bits: int) -> None:
    torch = pytest.importorskip("torch")
    factors = {
        name: torch.from_numpy(array).to(getattr(torch, dtype)) for name, array in products.make_factors().items()
    }
    results = factors["a"] @ factors["m"], torch.nn.functional.conv2d(factors["i"], factors["k"])
    assert products.count_bits(each.float().numpy() for each in results) == bits


def test_reduced_precision_in_onnx_runtime_is_detected(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = OnnxRuntime().load(digits.trial("onnxruntime"), digits.artifact)
    assert session.facts().product_bits == 24
    factors = {name: array.astype(np.float16).astype(np.float32) for name, array in products.make_factors().items()}
    monkeypatch.setattr(products, "make_factors", lambda: factors)
    facts = session.facts()
    assert facts.precision_truth.refuted and facts.product_bits == 11
    session.close()
