"""A numeric test: how many bits of a factor an engine's products keep.

A factor 1 + 2^-k, multiplied by 1/2, keeps its last bit if the engine multiplies in a type of more than k bits: IEEE
FP32 has 24, TF32 and FP16 have 11, bfloat16 has 8. Sums don't round, because all other weights are 0. Matrix product
and convolution are large enough for a network's usual kernels, and take some milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

SUM_LENGTH, SIDE_PX, MAX_EXPONENT = 256, 16, 23  # length of the sums, pixels of a side, bits of float32's mantissa
# An ONNX file of two nodes, p = MatMul(a, m) and c = Conv(i, k) in float32, so that engines need no onnx.
NETWORK_BYTES = bytes.fromhex(
    "08083ac7010a110a01610a016d12017022064d61744d756c0a0f0a01690a016b1201632204436f6e761201675a150a016112100a0e0801120a"
    "0a030880020a030880025a150a016d12100a0e0801120a0a030880020a030880025a1c0a016912170a15080112110a0208010a030880020a02"
    "08100a0208105a1d0a016b12180a16080112120a030880020a030880020a0208010a02080162150a017012100a0e0801120a0a030880020a03"
    "088002621c0a016312170a15080112110a0208010a030880020a0208100a02081042040a00100d"
)


def make_factors() -> dict[str, np.ndarray]:
    """Return the inputs, float32, N = SUM_LENGTH: `a` [N, N], `m` [N, N], `i` [1, N, SIDE_PX, SIDE_PX], kernel `k`."""
    values = 1 + 2.0 ** -_find_places()
    halves = (0.5 * np.eye(SUM_LENGTH)[::-1]).astype(np.float32)
    rows = np.tile(values.astype(np.float32), (SUM_LENGTH, 1))
    image = np.ascontiguousarray(rows.T.reshape(1, SUM_LENGTH, SIDE_PX, SIDE_PX))
    return {"a": rows, "m": halves, "i": image, "k": halves.reshape(SUM_LENGTH, SUM_LENGTH, 1, 1)}


def count_bits(results: Iterable[np.ndarray]) -> int:
    """Return the number of bits kept by the results `p` and `c`: 24 for products in IEEE FP32."""
    exponents = _find_places()
    is_exact = np.ones(SUM_LENGTH, bool)
    for result in results:
        values = np.asarray(result, np.float64)
        values = np.moveaxis(values, 1, -1).reshape(-1, SUM_LENGTH)[:, ::-1]
        is_exact &= (2 * values == 1 + 2.0**-exponents).all(axis=0)
    lost_exponents = exponents[~is_exact]
    return int(lost_exponents.min()) if lost_exponents.size else MAX_EXPONENT + 1


def _find_places() -> np.ndarray:
    """Return the exponent k of each factor."""
    return 1 + np.arange(SUM_LENGTH) % MAX_EXPONENT
