"""The demo's network: a ResNet-18 of a quarter of the width, for grey images of 64 x 64 pixels."""

from __future__ import annotations

from typing import Any

WIDTH_DIVISOR = 4


def resnet18(num_classes: int = 10, channels: int = 1) -> Any:
    """Build torchvision's ResNet-18 with 16, 32, 64 and 128 channels: 0.7 M parameters; input [N, channels, 64, 64].

    One input channel by default: three equal channels take more time without more information.
    """
    from torch import nn
    from torchvision.models.resnet import BasicBlock, ResNet

    class Narrow(ResNet):  # type: ignore[misc]  # torchvision has no types
        def __init__(self) -> None:
            super().__init__(BasicBlock, [2, 2, 2, 2], num_classes=num_classes)
            stem = 64 // WIDTH_DIVISOR
            self.conv1 = nn.Conv2d(channels, stem, 7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.bn1 = nn.BatchNorm2d(stem)
            self.fc = nn.Linear(512 // WIDTH_DIVISOR, num_classes)

        def _make_layer(self, block: Any, planes: int, blocks: int, stride: int = 1, dilate: bool = False) -> Any:
            if planes == 64:  # first stage: torchvision assumes a stem of 64 channels
                self.inplanes = planes // WIDTH_DIVISOR
            return super()._make_layer(block, planes // WIDTH_DIVISOR, blocks, stride, dilate)

    return Narrow()
