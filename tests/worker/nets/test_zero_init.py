"""Random networks have no silent parts: a change anywhere in the graph changes the outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dyno.worker.nets import models
from dyno.worker.nets.zero_init import undo_zero_init
from dyno.worker.spec import Dims, ModelSpec


class Scaled(nn.Module):
    """A block as ConvNeXt has it, a batch norm that begins at 0, and a head that does."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.gamma = nn.Parameter(torch.full((4,), 1e-6))
        for parameter in (self.norm.weight, self.head.weight, self.head.bias):
            nn.init.zeros_(parameter)

    def forward(self, x):
        x = x + self.gamma * self.branch(x)
        return self.head(x + self.norm(x))


def test_zero_and_tiny_values_are_given_weight_and_others_are_left():
    net, before = Scaled(), Scaled()
    before.load_state_dict(net.state_dict())
    undo_zero_init(torch, net)
    state = net.state_dict()
    assert float(state["gamma"].min()) >= 0.1 and float(state["norm.weight"].min()) == 1.0
    assert float(state["head.weight"].std()) > 0.01 and not net.head.bias.any()
    assert torch.equal(net.branch.weight, before.branch.weight)
    again = Scaled()
    undo_zero_init(torch, again)
    assert torch.equal(again.head.weight, net.head.weight), "the same on every machine"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "layer"),
    [
        ("timm:resnet18", "layer2.0.conv2"),
        ("timm:mixer_s32_224", "blocks.3.mlp_tokens.fc1"),
        ("timm:convnext_atto", "stages.1.blocks.0.mlp.fc1"),
        ("torchvision:vit_b_32", "encoder.layers.encoder_layer_3.mlp.0"),
        ("timm:efficientformer_l1", "stages.3.blocks.4.token_mixer.proj"),
    ],
)
def test_a_change_in_any_block_changes_the_outputs(source, layer):
    net = models.load(ModelSpec("m", source), Dims(1, 224, 224))
    images = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        want = net(images)
        assert want.isfinite().all() and float((want[0] - want[1]).norm()) > 1e-3 * float(want.norm())
        net.get_submodule(layer).weight.data.neg_()
        changed = float((net(images) - want).norm() / want.norm())
    assert changed > 1e-3, f"a wrong layer moves the outputs by {changed:.1e}: no tolerance could see it"


@pytest.mark.slow
def test_what_a_network_keeps_of_its_first_run_does_not_outlive_it():
    net = models.load(ModelSpec("m", "timm:efficientformer_l1"), Dims(1, 224, 224))
    for module in net.modules():
        assert not getattr(module, "attention_bias_cache", None)
