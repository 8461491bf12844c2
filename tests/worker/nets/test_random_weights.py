"""Random networks have no silent parts, and activations as in trained networks, the same on every machine."""

from typing import Any

import pytest
import torch
from torch import nn

from dyno.worker.nets import models
from dyno.worker.nets.random_weights import init_batch_norm, undo_zero_init
from dyno.worker.spec import Dims, ModelSpec

FLOAT16_MAX = 65504.0


def largest(module: nn.Module) -> float:
    """Return the largest output of any layer on noise."""
    seen = [0.0]

    def look(_: nn.Module, given: Any, out: Any) -> None:
        seen.append(float(out.abs().max()))

    hooks = [layer.register_forward_hook(look) for layer in module.modules()]
    with torch.no_grad():
        module.eval()(torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(1)) * 4 - 2)
    for hook in hooks:
        hook.remove()
    return max(seen)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    # The second norm's means are zero but for rounding, which depends on the order of summation.
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.Conv2d(64, 96, 1), nn.BatchNorm2d(96))


def test_a_deep_random_network_fits_float16():
    deep = ModelSpec("r", "torchvision:resnet101")
    assert largest(models.build(deep)) > FLOAT16_MAX
    assert largest(models.load(deep)) < FLOAT16_MAX / 4


@pytest.mark.parametrize("source", ["", pytest.param("timm:levit_128", marks=pytest.mark.slow)])
def test_batch_norm_statistics_do_not_depend_on_threads(source):
    def settled(threads: int) -> str:
        torch.set_num_threads(threads)
        module = models.build(ModelSpec("m", source)) if source else small()
        init_batch_norm(torch, module, 3, (224, 224))
        assert torch.get_num_threads() == threads
        return models.weights_sha256(module)

    before = torch.get_num_threads()
    try:
        assert len({settled(threads) for threads in (1, 2)}) == 1
    finally:
        torch.set_num_threads(before)


def test_each_norm_gives_unit_variance_and_is_otherwise_unchanged():
    module = small().train()
    init_batch_norm(torch, module, 3, (64, 64))
    for norm in (module[1], module[3]):
        assert norm.momentum == 0.1 and int(norm.num_batches_tracked) == 0 and not norm.training
        assert norm.running_var.dtype is torch.float32 and not norm._forward_hooks and not norm._forward_pre_hooks
    assert module[0].padding_mode == "zeros"
    with torch.no_grad():
        spread = module(torch.randn(8, 3, 96, 96)).std()
    assert 0.7 < float(spread) < 1.4


class Block(nn.Module):
    """A residual block; the shortcut comes first in the sum, added in place as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.wide, self.back = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.last(self.back(self.first(self.wide(x)).relu()))
        return x.relu_()


def test_a_small_error_stays_small_through_residual_branches(monkeypatch):
    def settled() -> nn.Sequential:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), *(Block() for _ in range(30)))
        init_batch_norm(torch, module, 3, (64, 64))
        return module

    module = settled()
    weights = {(float(b.first.weight[0].detach()), float(b.last.weight[0].detach())) for b in module[2:]}
    assert weights == {(1.0, 0.25)} and float(module[1].weight[0].detach()) == 1
    kept = error(module)
    monkeypatch.setattr("dyno.worker.nets.random_weights.BRANCH_SCALE", 1.0)
    assert kept < error(settled()) / 2


def error(module: nn.Module) -> float:
    """Return the amplification of an input error, with both errors relative to the signal's variation."""
    draw = torch.Generator().manual_seed(2)
    x, off = (torch.randn(2, 3, 48, 48, generator=draw, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        exact = module.double()(x.clone())
        moved = module(x + 1e-6 * off) - exact
    return float(moved.std() / exact.std() / 1e-6)


class Only(nn.Module):
    """A network for images of one size only."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side, self.net = side, small()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net[0](x)
        if x.shape[-1] != self.side:
            raise AssertionError(f"{self.side} wanted")
        return self.net[1:](found)


def test_a_fixed_size_network_is_initialised_at_its_own_size():
    module = Only(40)
    init_batch_norm(torch, module, 3, (40, 40))
    assert float((module.net[1].running_var - 1).abs().max()) > 0.1


def test_a_network_that_rejects_the_size_keeps_its_random_weights():
    module = Only(40)
    drawn = models.weights_sha256(module)
    init_batch_norm(torch, module, 3, (50, 50))
    assert models.weights_sha256(module) == drawn
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_networks_from_user_functions_are_never_modified():
    module = models.load(ModelSpec("d", "dyno.worker.nets.digits:resnet18", channels=1))
    assert all(float(m.running_mean.abs().max()) == 0 for m in module.modules() if isinstance(m, nn.BatchNorm2d))


class Scaled(nn.Module):
    """A ConvNeXt-like block; its batch norm and its head begin at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.gamma = nn.Parameter(torch.full((4,), 1e-6))
        for parameter in (self.norm.weight, self.head.weight, self.head.bias):
            nn.init.zeros_(parameter)

    def forward(self, x):
        x = x + self.gamma * self.branch(x)
        return self.head(x + self.norm(x))


def test_only_zero_and_tiny_weights_are_enlarged():
    net, before = Scaled(), Scaled()
    before.load_state_dict(net.state_dict())
    undo_zero_init(torch, net)
    state = net.state_dict()
    assert float(state["gamma"].min()) >= 0.1 and float(state["norm.weight"].min()) >= 0.05
    assert float(state["head.weight"].std()) > 0.01 and not net.head.bias.any()
    assert torch.equal(net.branch.weight, before.branch.weight)
    again = Scaled()
    undo_zero_init(torch, again)
    assert torch.equal(again.head.weight, net.head.weight), "the same on every machine"


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


def test_caches_of_the_initialisation_run_are_cleared():
    net = models.load(ModelSpec("m", "timm:efficientformer_l1"), Dims(1, 224, 224))
    for module in net.modules():
        assert not getattr(module, "attention_bias_cache", None)
