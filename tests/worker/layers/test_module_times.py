"""Whose the time between two readings of the clock is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dyno.worker.layers import module


def test_a_call_has_what_its_parts_don_t_have() -> None:
    # The model calls a, then b, which calls a again; b has no row, so that its own 4 ns are the model's.
    marks = [(None, 0), (None, 1), ("a", 11), (None, 20), (None, 22), ("a", 25), ("b", 27), ("", 30)]
    rows = {("a", 0): 0, ("a", 1): 1, ("", 0): 2}
    assert module.sum_own_seconds(marks, rows, 3) == pytest.approx([10e-9, 3e-9, 17e-9])


class Calls(nn.Module):
    """A part that is called twice, one that is never called, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.unused = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.relu(self.conv(x)) + x)


def test_every_call_is_timed_and_no_hook_stays() -> None:
    net, x = Calls().eval(), torch.zeros(1, 4, 8, 8)
    found = module.measure_modules(net, lambda: net(x), lambda: net(x), 5)
    assert [layer.name for layer in found.inside.layers] == ["conv", "relu", "relu", "unused", ""]
    assert found.layers.shape == (5, 5) and found.whole.shape == (5,)
    assert (found.layers[:, [0, 1, 2, 4]] > 0).all() and not found.layers[:, 3].any()
    assert (found.layers.sum(axis=1) <= found.whole).all()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
