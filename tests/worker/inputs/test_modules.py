"""A module's inputs are derived from examples, its signature and a test run; fed values stay in that range."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dyno.worker.inputs.input_data import hash_feeds, read_batches
from dyno.worker.inputs.modules import ModuleInputs, describe_inputs, signature_of, verify_inputs
from dyno.worker.inputs.specs import make_arguments
from dyno.worker.jobs.inspect_model import inspect_model
from dyno.worker.spec import DataSpec, Dims, InputSpec, ModelSpec, Preprocess, Tensor, Trial, UserError
from refusals import refuses

MODEL = ModelSpec("net", "net.py:build")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.kinds = nn.Embedding(70, 4), nn.Embedding(3, 4)

    def forward(self, ids: Any, attention_mask: Any, kinds: Any = None, *, scale: float = 1.0) -> Any:
        found = self.embed(ids) * attention_mask[..., None] * scale
        return found if kinds is None else found + self.kinds(kinds)


class Image(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.mean((2, 3))


def described(module: nn.Module, examples: Any, asked: Any = None) -> ModuleInputs:
    inputs = describe_inputs(module, MODEL, examples, asked or {})
    return verify_inputs(module, MODEL, inputs, Dims(inputs.batch, *inputs.size))[0]


def fed(specs: tuple[InputSpec, ...], batch: int = 8, count: int = 4) -> list[dict[str, np.ndarray]]:
    dims = Dims(batch, 0, 0)
    return list(read_batches(DataSpec(), Preprocess(), (), dims, count, specs))


def test_ids_cover_the_embedding_and_masks_end_with_zeros() -> None:
    zeros, ones = torch.zeros(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64)
    found = described(Words(), {"ids": zeros, "attention_mask": ones, "kinds": zeros})
    ids, mask, kinds = found.inputs
    assert (ids.low, ids.high, kinds.high) == (0, 69, 2) and ids.shape == ("batch", 16) and found.batch == 2
    feeds = fed(found.inputs)
    drawn = np.concatenate([feed["ids"] for feed in feeds])
    assert drawn.dtype == np.int64 and drawn.min() >= 0 and 50 < drawn.max() <= 69
    masks = np.concatenate([feed["attention_mask"] for feed in feeds])
    assert set(np.unique(masks)) == {0, 1} and (np.diff(masks, axis=1) <= 0).all() and masks[:, :8].all()
    assert mask.low is None


def test_a_user_defined_range_overrides_that_of_the_embedding() -> None:
    examples = (torch.zeros(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64))
    found = described(Words(), examples, {"ids": {"low": 3, "high": 5}})
    assert (found.inputs[0].low, found.inputs[0].high) == (3, 5)
    assert not any(spec.keyword for spec in found.inputs)


def test_embedding_bag_offsets_are_not_drawn_at_random() -> None:
    """PyTorch may run for ever on offsets that aren't ascending."""
    examples = (torch.arange(12), torch.tensor([0, 4, 8]))
    refuses(r"'offsets' are the offsets of an EmbeddingBag, which", described, nn.EmbeddingBag(50, 8), examples)
    (ids,) = described(nn.EmbeddingBag(50, 8), torch.arange(12).reshape(3, 4)).inputs
    assert (ids.low, ids.high) == (0, 49)


def test_dropped_inputs_do_not_change_the_others() -> None:
    specs = (InputSpec("a", "float32", ("batch", 3)), InputSpec("b", "int64", ("batch", 2), 0, 9))
    one = fed(specs)
    dropped = list(read_batches(DataSpec(), Preprocess(), (Tensor("b", "int64", (8, 2)),), Dims(8, 0, 0), 4, specs))
    assert hash_feeds(one) == hash_feeds(dropped)
    assert not np.array_equal(one[0]["a"], one[1]["a"])


def test_a_constant_keyword_reaches_forward() -> None:
    module = Words()
    examples = {"ids": torch.zeros(1, 4, dtype=torch.int64), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    found = described(module, examples, {"scale": {"value": 2.0, "low": 2.0, "high": 2.0}})
    args, keywords = make_arguments(found.inputs, examples)
    assert args == [] and keywords["scale"] == 2.0


class Voice(nn.Module):
    """A voice for each row's tokens that varies from call to call; a lone row also varies in pace."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.calls = nn.Embedding(70, 4), 0

    def forward(self, ids: Any) -> Any:
        self.calls += 1
        spoken = self.embed(ids).flatten(1) + torch.randn(())
        return spoken if len(ids) > 1 else spoken[:, self.calls :]


def test_varying_outputs_do_not_change_the_batch_axis() -> None:
    found = described(Voice(), torch.randint(70, (1, 16)))
    assert (found.batch, found.inputs[0].shape) == (1, ("batch", 16))


def test_a_single_image_input_needs_no_description() -> None:
    for examples in (None, torch.randn(1, 3, 8, 12), {"x": torch.zeros(1, 3, 8, 12)}):
        assert describe_inputs(Image(), MODEL, examples, {}).inputs == ()
    assert describe_inputs(Image(), MODEL, torch.randn(4, 3, 8, 12), {}).size == (8, 12)
    assert describe_inputs(Image(), MODEL, None, {"input": {"shape": [2, 3, 8, 8]}}).batch == 2
    other = describe_inputs(Image(), MODEL, torch.randn(1, 5, 8, 8), {}).inputs
    assert other == (InputSpec("x", "float32", ("batch", 5, "height", "width")),)


def test_an_image_may_have_its_channels_last() -> None:
    class Last(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.permute(0, 3, 1, 2).float().mean((2, 3))

    for example in (torch.rand(1, 8, 12, 3), torch.randint(0, 256, (1, 8, 12, 3), dtype=torch.uint8)):
        found = described(Last(), example)
        assert found.inputs[0].shape == ("batch", "height", "width", 3)
        assert found.size == (8, 12) and found.has_free_batch


def test_a_scripted_module_may_have_any_name_for_self() -> None:
    class Net(nn.Module):
        def forward(this, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:  # noqa: N805
            return x * scale

    assert signature_of(torch.jit.script(Net())).required == {"x": True, "scale": False}


def test_non_tensor_examples_are_named() -> None:
    with pytest.raises(UserError, match="example of net's input 'x' is a object; it must be a tensor, an array"):
        describe_inputs(Image(), MODEL, {"x": object()}, {})
    with pytest.raises(UserError, match=r"'x' is a Tensor of torch\.complex64; it must be a tensor, an array of real"):
        describe_inputs(Image(), MODEL, {"x": torch.ones(2, dtype=torch.complex64)}, {})
    with pytest.raises(UserError, match="net has 2 example inputs, but its forward takes x"):
        describe_inputs(Image(), MODEL, (torch.ones(1), torch.ones(1)), {})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "raft_small",
            r"'image2'; describe its inputs with --shapes image1:SHAPE --shapes image2:SHAPE \(followed .*\)$",
        ),
        ("r3d_18", r"describe its inputs with --shapes x:SHAPE \(followed .*\)$"),
        ("inception_v3", r"the model refuses 1x3x8x8: (?!.*describe its inputs)"),
    ],
)
def test_a_library_model_without_image_input_asks_for_a_description(name: str, advice: str) -> None:
    with pytest.raises(UserError, match=advice):
        inspect_model(Trial(ModelSpec(name, f"torchvision:{name}"), "", "fp32", Dims(1, 0, 0)), [[8, 8]], {})


def test_a_module_that_rejects_its_inputs_gets_advice(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\n\ndef gray():\n    return torch.nn.Conv2d(1, 2, 3)\n\n\n"
        "def half():\n    return torch.nn.Conv2d(3, 2, 3).bfloat16()\n\n\n"
        "def bare():\n    return torch.nn.Conv2d(3, 2, 3, device='meta')\n\n\nclass Force(torch.nn.Module):\n"
        "    def forward(self, x):\n        x = x.clone().requires_grad_()\n"
        "        return torch.autograd.grad((x * x).sum(), x)[0]\n\n\nmade = gray()\n\n\nclass Ids(torch.nn.Module):\n"
        "    def forward(self, ids=None, mask=None):\n        batch, length = ids.shape\n        return ids\n\n\n"
        "def small():\n    return torch.nn.Sequential(torch.nn.Conv2d(3, 1, 3), torch.nn.Linear(2, 4))\n\n\n"
        "class Pair(torch.nn.Module):\n    def forward(self, x: dict[str, torch.Tensor]):\n        return x['a']\n\n\n"
        "class Words(torch.nn.Module):\n    def forward(self, x: 'list[torch.Tensor]'):\n        return x['a']\n\n\n"
        "def script():\n    return torch.jit.script(Pair())\n"
    )
    for name, advice in (
        ("gray", "give --channels 1, or describe its inputs with --shapes input:SHAPE"),
        ("small", "multiplied .*; give another --size, or describe its inputs with --shapes input:SHAPE"),
        ("Ids", r"expected 2\); describe its inputs with --shapes ids:SHAPE"),
        (
            "Pair",
            r"; it takes 'x' as a dict\[str, torch.Tensor\]: wrap it in a module whose forward takes tensors, and give",
        ),
        ("Words", r"; it takes 'x' as a list\[torch.Tensor\]: wrap it"),
        ("script", r"; it takes 'x' as a Dict\[str, Tensor\]: wrap it"),
        ("half", r"its weights are bfloat16: return module.float\(\), since precisions say in which type it runs"),
        ("bare", r"the model has no weights yet \(device meta\); give it some first"),
        ("Force", "it computes gradients, which are off"),
        ("made", "made is a Conv2d; it must be a function that returns a module"),
    ):
        model = ModelSpec(name, f"{tmp_path / 'net.py'}:{name}")
        with pytest.raises(UserError, match=advice):
            inspect_model(Trial(model, "", "fp32", Dims(1, 0, 0)), [[8, 8]], {})


def test_a_saved_module_that_rejects_its_inputs_gets_advice(tmp_path: Path) -> None:
    """Files of `yolo export format=torchscript half=True` are like this."""
    half = torch.nn.Linear(8, 4).half()
    torch.jit.script(half).save(tmp_path / "net.pt")
    torch.export.save(torch.export.export(half, (torch.randn(1, 8).half(),)), tmp_path / "net.pt2")
    for file in ("net.pt", "net.pt2"):
        trial = Trial(ModelSpec("net", f"saved:{tmp_path / file}"), "", "fp32", Dims(1, 0, 0))
        with pytest.raises(UserError, match=r"must have the same dtype.*; its weights are float16: save module\.float"):
            inspect_model(trial, [[8, 8]], {"input": {"shape": ("batch", 8), "dtype": "float32"}})
