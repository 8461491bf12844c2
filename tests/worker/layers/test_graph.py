"""Nodes of ONNX graphs: shapes, weights, operations, and their source modules."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import onnx_text
from dyno.layers import tables
from dyno.worker.layers import graph, module
from dyno.worker.nets import saved_modules
from dyno.worker.spec import Dims, InputSpec, ModelSpec, UserError

FLOAT = TensorProto.FLOAT


def stored(path: Path, nodes: list[Any], weights: dict[str, Any], shape: tuple[Any, ...] = (1, 3, 8, 8)) -> str:
    """Write an ONNX file of these nodes from `x` to `y`."""
    onnx.save(onnx_text.of_nodes(nodes, {"x": shape}, {"y": None}, weights, domains=["mine"]), path)
    return str(path)


def of(shape: tuple[int, ...], kind: Any = np.float32) -> Any:
    return np.ones(shape, kind)


def test_weights_are_distinguished_from_other_constants(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", kernel_shape=[3, 3]),
        helper.make_node("BatchNormalization", ["c", "s", "t", "mean", "var"], ["n"], "norm"),
        helper.make_node("Clip", ["n", "low"], ["l"], "clip"),
        helper.make_node("Mul", ["l", "half"], ["m"], "halve"),
        helper.make_node("Reshape", ["m", "flat"], ["y"], "flatten"),
    ]
    weights = {
        "w": of((4, 3, 3, 3)), "b": of((4,)), "s": of((4,)), "t": of((4,)), "mean": of((4,)), "var": of((4,)),
        "low": np.float32(0), "half": of((1,)), "flat": np.array([1, -1]),
    }  # fmt: skip
    found = graph.read_graph(stored(tmp_path / "m.onnx", nodes, weights, ("n", 3, 8, 8)), {"x": (1, 3, 8, 8)})
    rows = {layer.name: layer for layer in found.layers}
    assert {name: layer.parameters for name, layer in rows.items() if layer.parameters} == {"conv": 112, "norm": 8}
    assert found.parameters == 120 and not found.notes
    assert rows["conv"].flops == 2 * 4 * 6 * 6 * 27 and [p.name for p in rows["conv"].inputs] == ["x"]
    assert rows["flatten"].outputs[0].shape == (1, 144)


def test_a_weight_shared_by_two_nodes_is_counted_once(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", [a, "w"], [b], a) for a, b in (("x", "h"), ("h", "y"))]
    found = graph.read_graph(stored(tmp_path / "m.onnx", nodes, {"w": of((8, 8))}), {})
    assert [layer.parameters for layer in found.layers] == [64, 64] and found.parameters == 64


def test_quantised_weights_count_and_scales_do_not(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["f"], "weights"),
        helper.make_node("DequantizeLinear", ["b", "sb"], ["g"], "bias"),
        helper.make_node("Conv", ["x", "f", "g"], ["y"], "conv", kernel_shape=[3, 3]),
    ]
    weights = {"w": of((4, 3, 3, 3), np.int8), "s": np.float32(1), "z": np.int8(0), "b": of((4,), np.int32),
               "sb": np.float32(1)}  # fmt: skip
    found = graph.read_graph(stored(tmp_path / "m.onnx", nodes, weights), {})
    assert [layer.parameters for layer in found.layers] == [108, 4, 0]


def test_a_custom_operator_is_named_and_its_shape_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = [helper.make_node("Strange", ["x"], ["y"], domain="mine")]
    found = graph.read_graph(stored(tmp_path / "m.onnx", nodes, {}), {})
    assert (found.layers[0].name, found.layers[0].type) == ("Strange to y", "mine.Strange")
    assert found.notes == ("the shapes of 1 of 1 nodes can't be inferred",)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"], "ONNX Runtime leaves a copy where it gives up"


@pytest.mark.parametrize(
    ("name", "scopes", "module"),
    [
        ("node_1", "['', 'layer1', 'layer1.0', 'layer1.0.relu', 'relu_1']", ("layer1.0.relu",)),
        ("node_1", "['', 'flatten']", ("",)),
        ("node_1", "not a list", ()),
        ("/layer1/layer1.0/conv1/Conv", "", ("layer1.0.conv1",)),
        ("/Add", "", ("",)),
        ("node_1", "", ()),
    ],
)
def test_nodes_are_assigned_to_modules(tmp_path: Path, name: str, scopes: str, module: tuple[str, ...]) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], name)
    if scopes:
        node.metadata_props.add(key=graph.SCOPES_KEY, value=scopes)
    assert graph.read_graph(stored(tmp_path / "m.onnx", [node], {}), {}).layers[0].modules == module


def test_missing_weights_are_reported(tmp_path: Path) -> None:
    path = stored(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": of((8, 8))})
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.data", size_threshold=0)
    (tmp_path / "w.data").unlink()
    with pytest.raises(UserError, match=r"keeps weights in .*w\.data, which doesn't exist"):
        graph.read_graph(path, {})


def test_branch_weights_are_counted_but_branch_flops_are_unknown(tmp_path: Path) -> None:
    def branch(name: str, *weights: Any) -> Any:
        node = helper.make_node("MatMul", ["x", name], ["out_" + name], name)
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info("out_" + name, FLOAT, None)], weights)

    inner = branch("inner", numpy_helper.from_array(of((8, 8)), "inner"))
    nodes = [
        helper.make_node("MatMul", ["x", "outer"], ["h"], "first"),
        helper.make_node("If", ["yes"], ["y"], "choice", then_branch=inner, else_branch=branch("outer")),
    ]
    weights = {"outer": of((8, 8)), "yes": np.asarray(True)}
    found = graph.read_graph(stored(tmp_path / "m.onnx", nodes, weights, (1, 8)), {})
    assert [(layer.parameters, layer.flops) for layer in found.layers] == [(64, 128), (128, None)]
    assert found.parameters == 128 and any("1 of 2 nodes are not counted" in note for note in found.notes)
    assert "at least 128 FLOPs" in tables.summarise_layers(found)


IMAGES = tuple(InputSpec(name, "float32", ("batch", 3, 8, 8)) for name in "xy")
DIMS = Dims(2, 8, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.bn(self.conv(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two inputs and two outputs; parts with two names, called twice or never; a buffer and a constant."""

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


def test_a_program_has_the_same_rows_as_its_module(tmp_path: Path) -> None:
    net, images = Net(), (torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8))
    found = graph.list_program_parts(saved(net, tmp_path / "net.pt2"), DIMS)
    rows, own = module.read(found, *images), module.read(net, *images)
    assert rows.parameters == own.parameters
    for one, other in zip(rows.layers, own.layers, strict=True):
        assert one.name in other.modules
        same = [(r.parameters, r.flops, r.skipped, [p.shape for p in r.outputs]) for r in (one, other)]
        assert same[0] == same[1]
        assert one.type == other.type or one.name == "unused"  # a program knows no class of parts that never ran
    assert "constant" in dict(found.named_buffers())  # goes to a GPU with the weights


def test_attention_in_a_program_counts_as_in_its_module(tmp_path: Path) -> None:
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


def test_library_operators_are_imported_and_unknown_ones_named(tmp_path: Path) -> None:
    """Run in another process without earlier imports of the libraries."""
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
    env = {**os.environ, "PYTHONPATH": str(Path(graph.__file__).parents[3])}
    for words in (["save.py"], ["-c", load]):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("twice.pt2 needs the operator strange::twice, which another library registers; name")


def test_parts_with_different_outputs_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = saved(Net(), tmp_path / "net.pt2"), saved_modules.load_unflattened

    def other(path: str) -> Any:
        found = read(path)
        found.fc.bias.data += 1
        return found

    monkeypatch.setattr(saved_modules, "load_unflattened", other)
    assert graph.list_program_parts(model, DIMS) is None
    assert graph.list_program_parts(ModelSpec("net", "torchvision:resnet18"), DIMS) is None
