"""Programs of torch.export, whose modules are watched again."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dyno.worker.layers import graph, module
from dyno.worker.nets import saved_modules
from dyno.worker.spec import Dims, InputSpec, ModelSpec

IMAGES = tuple(InputSpec(name, "float32", ("batch", 3, 8, 8)) for name in "xy")
DIMS = Dims(2, 8, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.bn(self.conv(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two inputs and two outputs, a part under two names, one called twice, one never, a buffer and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.block = self.alias = Block()
        self.seq = nn.Sequential(Block(), nn.Dropout())
        self.fc = nn.Linear(3, 4)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(3, 1, 1))
        self.constant = torch.full((3, 1, 1), 0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        z = self.seq(self.block(x) + self.alias(y) * self.scale + self.constant)
        features = self.block(z).mean((2, 3))
        return {"a": self.fc(features), "b": self.fc(2 * features)}


def saved(net: nn.Module, path: Path, count: int = 2) -> ModelSpec:
    batch = torch.export.Dim("batch")
    images = tuple(torch.zeros(2, 3, 8, 8) for _ in range(count))
    torch.export.save(torch.export.export(net.eval(), images, dynamic_shapes=({0: batch},) * count), path)
    return ModelSpec("net", f"saved:{path}", inputs=IMAGES[:count])


def test_a_program_has_the_rows_of_its_module(tmp_path: Path) -> None:
    net, images = Net(), (torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8))
    found = graph.list_program_parts(saved(net, tmp_path / "net.pt2"), DIMS)
    rows, own = module.read(found, *images), module.read(net, *images)
    assert rows.parameters == own.parameters
    for one, other in zip(rows.layers, own.layers, strict=True):
        assert one.name in other.modules
        same = [(r.parameters, r.flops, r.skipped, [p.shape for p in r.outputs]) for r in (one, other)]
        assert same[0] == same[1]
        assert one.type == other.type or one.name == "unused"  # of what never ran a program has no class
    assert "constant" in dict(found.named_buffers())  # so that it goes to a GPU with the weights


def test_attention_is_counted_as_in_its_module(tmp_path: Path) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            words = x.flatten(1, 2)
            return self.attention(words, words, words, need_weights=False)[0]  # type: ignore[no-any-return]

    net, image = Attending(), torch.rand(2, 3, 8, 8)
    found = graph.list_program_parts(saved(net, tmp_path / "net.pt2", 1), DIMS)
    (row,), (own,) = (
        [layer for layer in module.read(each, image).layers if layer.name == "attention"] for each in (found, net)
    )
    assert (row.type, row.parameters, row.flops) == ("MultiheadAttention", own.parameters, own.flops)


def test_a_module_that_writes_into_its_input_has_parts(tmp_path: Path) -> None:
    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x.sub_(0.5))  # type: ignore[no-any-return]

    found = graph.list_program_parts(saved(Shifting(), tmp_path / "net.pt2", 1), DIMS)
    assert found is not None and "conv" in dict(found.named_modules())


def test_operators_of_libraries_are_looked_for(tmp_path: Path) -> None:
    """In another process, which imports no library before."""
    (tmp_path / "save.py").write_text(
        "import torch, torchvision\n\n"
        "@torch.library.custom_op('strange::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return 2 * x\n\n"
        "@twice.register_fake\ndef _(x):\n    return torch.empty_like(x)\n\n"
        "class Rolls(torch.nn.Module):\n    def forward(self, x, boxes):\n"
        "        return torchvision.ops.roi_align(x, boxes, 2)\n\n"
        "class Twice(torch.nn.Module):\n    def forward(self, x):\n        return twice(x)\n\n"
        "x, boxes = torch.rand(1, 3, 8, 8), torch.tensor([[0.0, 0, 0, 4, 4]])\n"
        "torch.export.save(torch.export.export(Rolls(), (x, boxes)), 'rolls.pt2')\n"
        "torch.export.save(torch.export.export(Twice(), (x,)), 'twice.pt2')\n"
    )
    load = (
        "import sys\nfrom dyno.worker.nets import saved_modules\nfrom dyno.worker.spec import UserError\n"
        "assert 'torchvision' not in sys.modules\nsaved_modules.load('rolls.pt2')\n"
        "try:\n    saved_modules.load('twice.pt2')\nexcept UserError as e:\n    print(e)\n"
    )
    for program_text in (["save.py"], ["-c", load]):
        command, env = (
            [sys.executable, *program_text],
            {**os.environ, "PYTHONPATH": str(Path(graph.__file__).parents[3])},
        )
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("twice.pt2 needs the operator strange::twice, which another library registers; name")


def test_parts_that_give_other_outputs_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = saved(Net(), tmp_path / "net.pt2"), saved_modules.unflattened

    def other(path: str) -> Any:
        found = read(path)
        found.fc.bias.data += 1
        return found

    monkeypatch.setattr(saved_modules, "unflattened", other)
    assert graph.list_program_parts(model, DIMS) is None
    assert graph.list_program_parts(ModelSpec("net", "torchvision:resnet18"), DIMS) is None
