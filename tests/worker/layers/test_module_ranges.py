"""Ranges around the calls of a module's parts: on a CPU, with CUDA's functions replaced by ones that take notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from dyno.layers.counters import Kernel, owners_of
from dyno.worker.layers import module

Notes = list[tuple[str, str]]


class Twice(nn.Module):
    """A part that is called twice, one that only calls others, and an operation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.relu = nn.ReLU()

    def forward(self, x: Any) -> Any:
        return self.relu(self.relu(self.stem(x)) + 1)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes: Notes = []

    @contextmanager
    def profile() -> Iterator[None]:
        notes.append(("start", ""))
        yield
        notes.append(("stop", ""))

    monkeypatch.setattr(torch.cuda.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: notes.append(("push", name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: notes.append(("pop", "")))
    return notes


def test_every_call_has_a_range_of_its_own_name_between_start_and_stop(noted: Notes) -> None:
    net, x = Twice().eval(), torch.zeros(1, 3, 8, 8)
    module.run_ranges(net, lambda: net(x))
    assert noted[0] == ("start", "") and noted[-1] == ("stop", "")
    names = [name for kind, name in noted if kind == "push"]
    assert names == ["(model)", "stem.0", "stem.1", "relu", "relu#2"]
    depth = [sum((kind == "push") - (kind == "pop") for kind, _ in noted[: k + 1]) for k in range(len(noted))]
    assert min(depth) == depth[-1] == 0 and max(depth) == 2
    noted.clear()
    net(x)
    assert noted == [], "nothing of it is left on the module"


def test_no_hook_is_left_after_a_call_that_failed(noted: Notes) -> None:
    net = nn.Sequential(nn.Linear(3, 4)).eval()
    with pytest.raises(RuntimeError):
        module.run_ranges(net, lambda: net(torch.zeros(1, 5)))
    noted.clear()
    net(torch.zeros(1, 3))
    assert noted == []


def resnet() -> tuple[Any, Any]:
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.resnet18().eval(), torch.zeros(1, 3, 32, 32)


def vit() -> tuple[Any, Any]:
    return pytest.importorskip("timm").create_model("test_vit").eval(), torch.zeros(1, 3, 160, 160)


def mobile() -> tuple[Any, Any]:
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.mobilenet_v3_small().eval(), torch.zeros(1, 3, 32, 32)


@pytest.mark.parametrize("made", [resnet, vit, mobile])
def test_every_layer_that_runs_has_its_range(made: Callable[[], tuple[Any, Any]], noted: Notes) -> None:
    net, x = made()
    with torch.no_grad():
        inside = module.add_whole(module.read(net, x), net)
        module.run_ranges(net, lambda: net(x))
    open_ranges: list[str] = []
    kernels = []
    for kind, name in noted:  # as if one kernel were launched at the end of each call
        if kind == "push":
            open_ranges.append(name)
        elif kind == "pop":
            kernels.append(Kernel("k", tuple(open_ranges)))
            open_ranges.pop()
    owners = owners_of(inside, kernels)
    ran = {k for k, layer in enumerate(inside.layers) if not layer.skipped}
    assert ran <= set(owners) and None not in owners
