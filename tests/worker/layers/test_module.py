"""The calls of a module's parts: shapes, parameters and operations, and their sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dyno.worker.layers import module
from dyno.worker.nets import flops
from dyno.worker.spec import UserError

IMAGE = torch.zeros(1, 3, 224, 224)


def checked(net: Any, *args: Any) -> Any:
    """What was read of the net, whose sums are PyTorch's own."""
    found = module.read(net, *args)
    count = sum(p.numel() for p in net.parameters())
    assert found.parameters == count == sum(layer.added for layer in found.layers)
    assert sum(layer.flops or 0 for layer in found.layers) == flops.of_module(net, *args)
    return found


def test_resnet18_has_the_rows_of_the_reference() -> None:
    torchvision = pytest.importorskip("torchvision")
    found = checked(torchvision.models.resnet18().eval().to("meta"), IMAGE.to("meta"))
    assert len(found.layers) == 68 and found.parameters == 11_689_512
    first, relu = found.layers[0], found.layers[2]
    assert (first.name, first.type, first.parameters) == ("conv1", "Conv2d", 9408)
    assert first.outputs[0].shape == (1, 64, 112, 112) and first.outputs[0].dtype == "float32"
    assert first.flops == 2 * 64 * 112 * 112 * 3 * 7 * 7
    assert relu.inputs[0].name == found.layers[1].outputs[0].name  # which it overwrites


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_the_sums_are_pytorch_s(name: str) -> None:
    timm = pytest.importorskip("timm")
    checked(timm.create_model(name).eval().to("meta"), IMAGE.to("meta"))


def test_the_sums_of_a_yolo_are_pytorch_s() -> None:
    pytest.importorskip("ultralytics")
    from ultralytics.nn.tasks import ClassificationModel

    checked(ClassificationModel("yolov8n-cls.yaml", verbose=False).eval(), torch.zeros(1, 3, 64, 64))


class Residual(nn.Module):
    """A part that is called twice, one that does nothing, one that is never called, and a sum of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Dropout()
        self.unused, self.scale = nn.Linear(5, 6), nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.drop(self.relu(self.conv(x))) + x)


def test_calls_are_told_apart_and_nothing_is_lost() -> None:
    found = checked(nn.Sequential(Residual(), nn.Conv2d(4, 2, 1)).eval(), torch.zeros(2, 4, 8, 8))
    rows = {layer.name: layer for layer in found.layers}
    assert [layer.name for layer in found.layers] == ["0.conv", "0.relu", "0.drop", "0.relu", "0", "1", "0.unused"]
    assert rows["0.drop"].skipped and rows["0.unused"].skipped and not rows["0.unused"].outputs
    assert rows["0"].parameters == 7 and not rows["0"].skipped
    # The sum is behind the second ReLU, which reads what the first one wrote, through the dropout.
    first, second = found.layers[1], found.layers[3]
    assert second.inputs[0].name == first.outputs[0].name


def test_a_shared_weight_counts_once() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    found = checked(nn.Sequential(one, other), torch.zeros(1, 4))
    assert [layer.added for layer in found.layers] == [20, 4]
    assert [layer.parameters for layer in found.layers] == [20, 20]  # each reads its weight


def test_a_part_that_is_called_again_reads_its_weights_again() -> None:
    one = nn.Linear(4, 4)
    found = checked(nn.Sequential(one, nn.ReLU(), one), torch.zeros(1, 4))
    assert [(layer.parameters, layer.added) for layer in found.layers] == [(20, 20), (0, 0), (20, 0)]


def test_attention_s_own_weights_are_its_own() -> None:
    found = checked(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.zeros(1, 5, 16))
    rows = {layer.name: layer for layer in found.layers}
    assert rows["self_attn"].parameters == 3 * 16 * 17 and rows["self_attn"].flops


def test_what_has_no_parts_to_watch_is_a_line() -> None:
    net, image = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval(), torch.zeros(1, 2)
    with pytest.raises(UserError, match=r"it is TorchScript, .* dyno inspect MODEL onnx"):
        module.read(torch.jit.script(net), image)
    with pytest.raises(UserError, match=r"it is a program of torch.export, .* dyno inspect MODEL onnx"):
        module.read(torch.export.export(net, (image,)).module(), image)


def test_a_scripted_part_is_its_caller_s() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
            self.body = torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()).eval())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.body(self.first(x)).mean((2, 3)))

    found = checked(Outer().eval(), torch.zeros(1, 3, 8, 8))
    rows = {layer.name: layer for layer in found.layers}
    assert [*rows] == ["first", "last", "", "body.0"] and rows[""].flops == 2 * 16 * 4 * 4 * 9
    assert (rows["body.0"].type, rows["body.0"].parameters, rows["body.0"].skipped) == ("Conv2d", 148, True)


def test_a_module_of_one_part_is_a_row_of_its_own() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1)

    assert [(layer.type, layer.skipped) for layer in module.read(Mean(), IMAGE).layers] == [("Mean", False)]
    assert [(layer.type, layer.skipped) for layer in module.read(nn.Identity(), IMAGE).layers] == [("Identity", True)]
    net = nn.Sequential(nn.ReLU())
    net.again = net[0]
    assert [layer.modules for layer in module.read(net, IMAGE).layers] == [("0", "again")] * 2
