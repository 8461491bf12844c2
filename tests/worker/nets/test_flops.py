"""Operations equal a count by hand, and are the same for a module and its exported file."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torchvision import ops

import onnx_text
from dyno.worker.nets import flops

FLOAT = TensorProto.FLOAT


def stored(path: Path, nodes: list[Any], weights: dict[str, tuple[int, ...]], shape: tuple[Any, ...]) -> str:
    """Write an ONNX file of these nodes from `x` to `y`."""
    ones = {name: np.ones(s, np.float32) for name, s in weights.items()}
    onnx.save(onnx_text.of_nodes(nodes, {"x": shape}, {"y": None}, ones, domains=["own"]), path)
    return str(path)


@pytest.mark.parametrize(
    ("first", "second", "result", "length"),
    [
        ((4, 3), (3, 5), (4, 5), 3),
        ((2, 4, 3), (5, 3), (2, 4, 5), 3),  # the second transposed, as OpenVINO stores it
        ((2, 4, 3), (), (2, 4, 5), 3),  # packed weights
        ((3, 4), (3, 5), (4, 5), 3),  # the first transposed
        ((5, 1, 2, 3), (5, 1, 2, 3), (1, 2, 5, 5), 3),  # the batch moved, as in ONNX Runtime's FusedMatMul
        ((6, 3), (2, 3, 5), (2, 6, 5), 3),  # no batch in the first
        ((4, 3), (7, 5), (4, 5), 0),
        ((4, 0), (), (4, 5), 0),
        ((3,), (3, 5), (5,), 0),
    ],
)
def test_a_matrix_product_is_counted_from_shapes_alone(first: Any, second: Any, result: Any, length: int) -> None:
    expected = 2 * int(np.prod(result)) * length if length else None
    assert flops.of_product(first, second, result) == expected


def test_convolution_and_linear_counts_match_hand_calculation() -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, groups=8),
        torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 10),
    )  # fmt: skip
    by_hand = 2 * (8 * 16 * 16 * 3 * 9 + 8 * 14 * 14 * 9 + 8 * 14 * 14 * 10)
    assert flops.of_module(net, torch.zeros(1, 3, 32, 32)) == by_hand


def test_fused_attention_is_counted() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True).eval()
    tokens, width = 10, 16
    projections = 4 * tokens * width * width
    products = 2 * tokens * tokens * width
    feed = 2 * tokens * width * 32
    assert flops.of_module(layer, torch.zeros(1, tokens, width)) == 2 * (projections + products + feed)
    assert torch.backends.mha.get_fastpath_enabled(), "the setting is as it was"


@pytest.mark.parametrize(
    ("node", "weight", "shape", "expected"),
    [
        (helper.make_node("Conv", ["x", "w"], ["y"], strides=[2, 2], pads=[1] * 4), (8, 3, 3, 3), (1, 3, 8, 8),
         2 * 8 * 16 * 27),
        (helper.make_node("Conv", ["x", "w"], ["y"], group=4), (4, 1, 3, 3), (1, 4, 8, 8), 2 * 4 * 36 * 9),
        (helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2]), (4, 6, 2, 2), (1, 4, 8, 8),
         2 * 4 * 64 * 6 * 4),
        (helper.make_node("Gemm", ["x", "w"], ["y"], transA=1), (5, 7), (5, 2), 2 * 2 * 7 * 5),
        (helper.make_node("MatMul", ["x", "w"], ["y"]), (2, 6, 7), (2, 5, 6), 2 * 2 * 5 * 7 * 6),
    ],
    ids=["conv", "depthwise", "transposed", "gemm", "matmul"],
)  # fmt: skip
def test_products_in_an_onnx_graph_are_counted(
    node: Any, weight: tuple[int, ...], shape: tuple[int, ...], expected: int, tmp_path: Path
) -> None:
    path = stored(tmp_path / "net.onnx", [node], {"w": weight}, shape)
    assert flops.of_onnx(path, {"x": shape}) == expected


def test_a_dynamic_batch_is_counted_at_the_requested_batch(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = stored(tmp_path / "net.onnx", [node], {"w": (6, 7)}, ("batch", 6))
    assert flops.of_onnx(path, {"x": (4, 6)}) == 2 * 4 * 7 * 6


def test_an_uninferable_shape_gives_no_count_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    nodes = [helper.make_node("Custom", ["x"], ["h"], domain="own"), helper.make_node("MatMul", ["h", "w"], ["y"])]
    assert flops.of_onnx(stored(tmp_path / "net.onnx", nodes, {"w": (6, 7)}, (1, 6)), {"x": (1, 6)}) == 0
    assert not [*(tmp_path / "here").iterdir()], "ONNX Runtime's inference writes the model where it gives up"


@pytest.mark.parametrize("name", ["squeezenet1_1", "shufflenet_v2_x0_5"])
def test_a_network_and_its_export_count_the_same(tmp_path: Path, name: str) -> None:
    """The second takes half of its channels by shape arithmetic, beyond ONNX's own inference."""
    from torchvision import models

    net, image = getattr(models, name)().eval(), torch.zeros(1, 3, 64, 64)
    torch.onnx.export(net, (image,), tmp_path / "net.onnx", dynamo=False, input_names=["x"],
                      dynamic_axes={"x": {0: "batch"}})  # fmt: skip
    one = flops.of_module(net, image)
    assert one > 5e6
    assert [flops.of_onnx(str(tmp_path / "net.onnx"), {"x": (n, 3, 64, 64)}) for n in (1, 4)] == [one, 4 * one]


class Pairs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Bilinear(6, 5, 7)

    def forward(self, x: torch.Tensor) -> Any:
        return self.both(x, x[:, :5])


class Bent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = ops.DeformConv2d(4, 6, 3, groups=2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.conv(x, x.new_zeros(1, 18, 6, 6))


@pytest.mark.parametrize(
    ("net", "shape", "by_hand"),
    [(Pairs(), (3, 6), 2 * 3 * 7 * 5 * (6 + 1)), (Bent(), (1, 4, 8, 8), 2 * 6 * 36 * 2 * 9)],
    ids=["bilinear", "deformable"],
)
def test_products_unknown_to_the_pytorch_counter_are_counted(
    net: torch.nn.Module, shape: tuple[int, ...], by_hand: int, tmp_path: Path
) -> None:
    example = torch.zeros(shape)
    assert flops.of_module(net, example) == by_hand
    try:
        torch.onnx.export(net, (example,), tmp_path / "net.onnx", dynamo=True, opset_version=20, verbose=False)
    except torch.onnx.OnnxExporterError as e:
        pytest.skip(f"PyTorch {torch.__version__} can't export it: {str(e).splitlines()[0]}")
    assert flops.of_onnx(str(tmp_path / "net.onnx"), {}) == by_hand


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_in_a_file_count_as_in_pytorch(tmp_path: Path, kind: str) -> None:
    gates = {"LSTM": 4, "GRU": 3}[kind]
    node = helper.make_node(kind, ["x", "w", "r"], ["y"], hidden_size=8)
    path = stored(tmp_path / "m.onnx", [node], {"w": (1, gates * 8, 6), "r": (1, gates * 8, 8)}, (5, 2, 6))
    net = getattr(torch.nn, kind)(6, 8, bias=False)
    assert flops.of_onnx(path, {}) == flops.of_module(net, torch.zeros(5, 2, 6)) == 2 * 10 * gates * 8 * (6 + 8)


def test_einsum_is_counted_only_where_it_sums(tmp_path: Path) -> None:
    for equation, weights, count in (
        ("bij,jk->bik", (8, 6), 2 * 2 * 3 * 8 * 6),
        ("bij,j->bij", (8,), 0),
        ("bij->bji", (), 0),
    ):
        node = helper.make_node("Einsum", ["x", "w"] if weights else ["x"], ["y"], equation=equation)
        assert flops.of_onnx(stored(tmp_path / "m.onnx", [node], {"w": weights}, (2, 3, 8)), {}) == count


@pytest.mark.parametrize(
    ("weight", "attributes", "expected"),
    [
        ((8, 24), {}, 2 * 2 * 3 * 8 * 24 + 2 * 2 * 3 * 3 * (8 + 8)),
        ((8, 20), {"qkv_hidden_sizes": [4, 4, 12]}, 2 * 2 * 3 * 8 * 20 + 2 * 2 * 3 * 3 * (4 + 12)),
    ],
)
def test_attention_of_onnx_runtime_includes_the_input_projection(weight: Any, attributes: Any, expected: int) -> None:
    node = helper.make_node("Attention", ["x", "w", "b"], ["y"], domain="com.microsoft", num_heads=2, **attributes)
    assert flops.of_node(node, {"x": (2, 3, 8), "w": weight, "y": (2, 3, 12)}) == expected
    node.input.extend(["", "past"])
    assert flops.of_node(node, {"x": (2, 3, 8), "w": weight, "y": (2, 3, 12)}) is None


def test_a_fused_product_sums_over_its_transposed_axis() -> None:
    node = helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft", transA=1)
    assert flops.of_node(node, {"x": (2, 9, 4), "w": (2, 9, 5), "y": (2, 4, 5)}) == 2 * 2 * 4 * 5 * 9


def test_sliced_shapes_are_inferred() -> None:
    """PyTorch's exporter reads only the batch of a shape, for a recurrent layer's first state."""
    lengths = {"two": 2, "five": 5, "rest": -1, "width": 8}
    weights = {name: np.array([n]) for name, n in lengths.items()}
    nodes = [
        helper.make_node("Shape", ["x"], ["batch"], start=0, end=1),
        helper.make_node("Div", ["batch", "two"], ["half"]),  # beyond ONNX's own inference
        helper.make_node("Concat", ["half", "five", "width"], ["state_shape"], axis=0),
        helper.make_node("Expand", ["w", "state_shape"], ["state"]),
        helper.make_node("MatMul", ["state", "m"], ["y"]),
    ]
    weights |= {name: np.ones(s, np.float32) for name, s in (("w", (1, 1, 8)), ("m", (8, 7)))}
    model = onnx_text.of_nodes(nodes, {"x": ("n", 3, 8)}, {"y": None}, weights)
    found = flops.with_shapes(model, {"x": (4, 3, 8)})
    assert found is not None and found[1]["state"] == (2, 5, 8) and found[1]["y"] == (2, 5, 7)


def test_both_shape_inferences_build_on_each_other(tmp_path: Path) -> None:
    """ONNX's inference stops at Tile by a computed number, ONNX Runtime's at ReduceL2, as in timm's xcit."""
    nodes = [
        helper.make_node("Shape", ["x"], ["batch"], start=0, end=1),
        helper.make_node("Concat", ["batch", "one"], ["times"], axis=0),
        helper.make_node("Tile", ["w", "times"], ["tiled"]),
        helper.make_node("ReduceL2", ["tiled", "one"], ["norm"]),
        helper.make_node("Div", ["tiled", "norm"], ["unit"]),
        helper.make_node("MatMul", ["unit", "m"], ["y"]),
    ]
    path = stored(tmp_path / "net.onnx", nodes, {"w": (1, 8), "m": (8, 7)}, ("batch", 3))
    model = onnx.load(path)
    model.opset_import[0].version = 18
    model.graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "one"))
    onnx.save(model, path)
    assert flops.of_onnx(path, {"x": (4, 3)}) == 2 * 4 * 8 * 7
