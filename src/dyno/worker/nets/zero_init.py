"""Undo, in networks with random weights, the initial values that keep parts of them silent.

Many networks begin to train with branches that add nothing: the last batch norm of a block has weight 0 (timm's
ResNets), a layer scale is 1e-6 (ConvNeXt), a head is all zeros (MLP-Mixer, torchvision's vision transformers). As
drawn, what an engine computes there never reaches the outputs: a wrong graph would pass every comparison.
"""

from __future__ import annotations

from typing import Any

SEED = 0
SPREAD = 0.02  # standard deviation, as vision transformers draw their weights
SMALL = 0.1  # a scale below this is a start, not what training ends with
SCALE = 0.25  # of a branch beside the way around it, as `batch_norm` damps branches
SCALES = ("weight", "gain")


def undo_zero_init(torch: Any, module: Any) -> None:
    """Give what is silent a value, in place: zero matrices noise, zero or tiny scales `SCALE`.

    The weight of a batch norm becomes 1, because `batch_norm.settle` damps those that end a branch. Biases stay 0.
    """
    draw = torch.Generator().manual_seed(SEED)
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    with torch.no_grad():
        for owner in module.modules():
            for name, value in owner.named_parameters(recurse=False):
                if not value.is_floating_point() or not value.numel() or value.min() != value.max():
                    continue
                start = float(value.flatten()[0])
                if value.numel() != max(value.shape, default=1):
                    if start == 0:
                        value.copy_(torch.randn(value.shape, generator=draw) * SPREAD)
                elif 0 < start <= SMALL or (start == 0 and name in SCALES):
                    value.fill_(1.0 if isinstance(owner, batch_norm) else SCALE)
