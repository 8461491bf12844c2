"""What is found out about a model before anything is planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from dyno.worker.jobs.inspect_model import inspect_model
from dyno.worker.spec import Dims, ModelSpec, Runtime, Trial, UserError

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("batch", "free"), [(1, False), (2, False), (2, True)])
def test_a_program_takes_the_batch_of_its_example_or_any(batch: int, free: bool, tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).eval()
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},) if free else None
    torch.export.save(torch.export.export(net, (torch.randn(batch, 3, 8, 8),), dynamic_shapes=shapes), path)
    model = ModelSpec("net", f"saved:{path}")
    found = inspect_model(Trial(model, "pytorch", "fp32", Dims(1, 0, 0), runtime=Runtime()), [], {})
    assert (found.size, found.usual_batch, found.batch) == ((8, 8), batch, 0 if free else batch)
    assert found.outputs == 4 and found.flops == {"8": 2 * 27 * 4 * 36}, "of one image"


def test_a_function_s_module_of_one_image(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class One(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.reshape(1, 3, -1).mean(-1) if len(x) == 1 else x.reshape(1, 3, 64)\n"
        "def one():\n"
        "    return One()\n"
    )
    model = ModelSpec("one", f"{tmp_path / 'net.py'}:one")
    found = inspect_model(Trial(model, "pytorch", "fp32", Dims(1, 0, 0), runtime=Runtime()), [[8, 8]], {})
    assert found.batch == 1


@pytest.mark.parametrize("described", [False, True])
def test_a_module_that_has_no_memory_for_two_images_is_not_fixed_at_one(described: bool, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Large(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.mean((2, 3)) + torch.empty(2**60 if len(x) > 1 else 1).sum()\n"
        "def large():\n"
        "    return Large()\n" + ("def large_inputs():\n    return torch.zeros(1, 3, 8, 8)\n" if described else "")
    )
    model = ModelSpec("large", f"{tmp_path / 'net.py'}:large")
    found = inspect_model(Trial(model, "pytorch", "fp32", Dims(1, 0, 0), runtime=Runtime()), [], {})
    assert found.batch == 0


def test_what_torchscript_refuses_is_said_with_its_reason(tmp_path: Path) -> None:
    """Its message begins with a traceback."""
    path = tmp_path / "net.torchscript"
    torch.jit.script(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(27, 4))).save(path)
    trial = Trial(ModelSpec("net", f"saved:{path}"), "pytorch", "fp32", Dims(1, 0, 0), runtime=Runtime())
    with pytest.raises(UserError, match="the model refuses 1x3x8x8: mat1 and mat2 shapes cannot be multiplied"):
        inspect_model(trial, [(8, 8)], {})
