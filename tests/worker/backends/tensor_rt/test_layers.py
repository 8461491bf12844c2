"""Layer listings of every version in one form: JSON of the older and the newer inspector, and the log of RTX."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dyno.worker.backends.tensor_rt import layers
from dyno.worker.facts.engine import SlowLayer
from refusals import refuses

HALF = "Channel major FP16 format where channel % 8 == 0"
BYTE = "Thirty-two wide channel vectorized row major Int8 format"
PLAIN = "Row major linear FP32"


def tensor(name: str, form: str) -> dict[str, Any]:
    return {"Name": name, "Location": "Device", "Dimensions": [1, 64, 56, 56], "Format/Datatype": form}


def layer(name: str, kind: str, read: str, written: str, **more: Any) -> dict[str, Any]:
    return {"Name": name, "LayerType": kind, "Inputs": [tensor("a", read)], "Outputs": [tensor("b", written)], **more}


def convolution(name: str, form: str, kind: str) -> dict[str, Any]:
    more = {
        "ParameterType": "Convolution",
        "Weights": {"Type": kind, "Count": 9408},
        "Bias": {"Type": kind, "Count": 64},
    }
    return layer(name, "CaskConvolution", form, form, TacticName="sm80_xmma_fprop", **more)


OLDER = [
    layer("Reformatting CopyNode for Input Tensor 0", "Reformat", PLAIN, HALF, TacticValue="0x3e8"),
    convolution("conv1 + relu", HALF, "Half"),
    convolution("conv2", PLAIN, "Float"),
    convolution("conv3", BYTE, "Int8"),
    layer("pool", "CaskPooling", HALF, HALF),
]


def older(listed: list[Any]) -> list[layers.EngineLayer]:
    return layers.from_json(json.dumps({"Layers": listed, "Bindings": ["x", "y"]}))


def test_json_of_an_older_inspector_is_read() -> None:
    reformat, first, *_ = listed = older(OLDER)
    assert [one.computed_in for one in listed[1:4]] == ["float16", "float32", "int8"]
    assert (first.name, first.type, first.tactic) == ("conv1 + relu", "CaskConvolution", "sm80_xmma_fprop")
    assert first.inputs == (layers.Port("a", (1, 64, 56, 56), "float16", HALF),)
    assert first.weights == layers.Weights("float16", 9408) and first.bias == layers.Weights("float16", 64)
    assert reformat.moves and reformat.tactic == "0x3e8" and not reformat.computes


def test_the_summary_counts_compute_layers_and_those_kept_in_float32() -> None:
    found = layers.summarise_layers(older(OLDER), "fp16")
    assert found.layers == 5 and found.reformats == 1
    assert found.layers_by_type == {"float16": 1, "float32": 1, "int8": 1}
    assert found.kept_float32 == ("conv2",)
    assert found.engine_parameters == 3 * (9408 + 64)
    assert found.operators["CaskConvolution"] == 3
    assert not found.precision_truth.ok
    assert layers.summarise_layers(older(OLDER[2:3]), "fp32").kept_float32 == ()
    assert layers.summarise_layers(older(OLDER[2:3]), "fp32").precision_truth.ok


def test_mixed_type_operations_are_counted_from_shapes_and_weights() -> None:
    def sized(kind: str, form: str, *shapes: list[int], **more: Any) -> dict[str, Any]:
        *read, written = [tensor("t", form) | {"Dimensions": shape} for shape in shapes]
        return {"Name": kind, "LayerType": kind, "Inputs": read, "Outputs": [written], **more}

    def weights(count: int) -> dict[str, Any]:
        return {"Weights": {"Type": "Half", "Count": count}}

    listed = [
        sized("CaskConvolution", BYTE, [1, 3, 8, 8], [1, 64, 8, 8], Weights={"Type": "Int8", "Count": 64 * 3 * 9}),
        sized("CaskDeconvolution", HALF, [1, 64, 8, 8], [1, 3, 16, 16], **weights(64 * 3 * 4)),
        sized("MatrixMultiply", HALF, [2, 4, 5, 16], [2, 4, 16, 7], [2, 4, 5, 7]),
        sized("gemm", HALF, [2, 5, 16], [2, 5, 7], **weights(16 * 7)),
    ]
    found = layers.summarise_layers(older(listed), "int8")
    floats = 2 * (64 * 64 * 3 * 4 + 8 * 5 * 7 * 16 + 2 * 5 * 7 * 16)
    assert found.operations_by_type == {"int8": 2 * 64 * 64 * 27, "float16": floats}
    assert found.precision_truth.ok and found.precision_truth.sentence.endswith("67% of the arithmetic in int8")
    attention = sized("MultiHeadAttention", HALF, [2, 4, 5, 16], [2, 4, 16, 7], [2, 4, 5, 7])
    unknown = layers.summarise_layers(older([*listed, attention]), "int8")
    assert unknown.operations_by_type == {} and unknown.precision_truth.refuted, "one of five layers"


def test_a_convolution_without_bias_counts() -> None:
    bare = convolution("conv", HALF, "Half") | {"Bias": {"Type": "Half", "Count": 0}}
    assert layers.summarise_layers(older([bare]), "fp16").engine_parameters == 9408
    assert layers.summarise_layers(layers.from_log(LOG), "fp16").engine_parameters is None


def test_layers_known_only_by_name_do_not_confirm_a_precision() -> None:
    found = layers.summarise_layers(older(["conv1 + relu", "pool"]), "fp16")
    assert (found.layers, found.layers_by_type, found.precision_truth.ok) == (2, {}, False)


def test_control_characters_separate_node_names() -> None:
    (one,) = layers.from_json('{"Layers": [{"Name": "a", "Metadata": "[ONNX Layer: x]\x1e[ONNX Layer: y]"}]}')
    assert one.nodes == ("x", "y")


def test_an_opaque_subgraph_is_unknown() -> None:
    assert layers.by_type(older([layer("{ForeignNode[a...b]}", "Myelin", PLAIN, PLAIN)])) == {"unknown": 1}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (PLAIN, "float32"),
        (HALF, "float16"),
        (BYTE, "int8"),
        ("Two wide channel vectorized row major FP16 format", "float16"),
        ("Row major linear BOOL", "bool"),
        ("Row major linear INT32", "int32"),
        ("Row major linear BF16 format", "bfloat16"),
        ("Row major linear FP8 format", "float8"),
        ("BFloat16", "bfloat16"),
        ("UInt8", "uint8"),
        ("Float", "float32"),
        ("Half", "float16"),
        ("N/A due to dynamic shapes", ""),
    ],
)
def test_data_types_are_read_from_format_names(text: str, name: str) -> None:
    assert layers.dtype_of(text) == name


def port(name: str, shape: str, kind: str) -> str:
    form = "(NHWC) Channel major format"
    strides = "Strides: [8,1], StrideOrder: [1,0]"
    return f"{{ Name: {name}, Dimensions: [{shape}], {strides}, Datatype: {kind}, Format: {form} }}"


def line(name: str, kind: str, read: list[str], constants: list[str], written: list[str], nodes: str = "") -> str:
    parts = (f"[ {', '.join(ports)}]" if ports else "[]" for ports in (read, constants, written))
    told = dict(zip(("Inputs", "Constants", "Outputs"), parts, strict=True))
    middle = ", ".join(f"{key}: {value}" for key, value in told.items())
    return f"Name: {name}, LayerType: {kind}, {middle}, TacticName: __myl_{kind}_0x1, StreamId: 0, Metadata: {nodes}"


LOG = "\n".join(
    [
        "Layers:",
        line("__mye9_0_myl0_0", "shape_call", [], [], []),
        line("__myl_Move_myl0_1", "kgen", [port("x", "-1,3,8,8", "Float")], [], [port("a", "-1,3,8,8", "Float")]),
        line(
            "conv_myl0_2",
            "correlation",
            [port("a", "-1,3,8,8", "Half")],
            [port("bias", "1,64,1,1", "Float"), port("w, twice", "64,3,7,7", "Half"), port("pad", "1,1,8,8", "Float")],
            [port("b", "-1,64,8,8", "Half")],
            "[ONNX Layer: node_Conv_1][ONNX Layer: relu[0]]",
        ),
        line(
            "__myl_FcAddCast_myl0_3", "runtime_fusion", [port("b", "-1,64", "Half")], [], [port("y", "-1,10", "Float")]
        ),
        "",
        "I/O Tensors:",
        " Name: x, IOMode: Input, DataType: Float",
    ]
)


def test_layers_are_read_from_a_build_log() -> None:
    shape, move, conv, fused = listed = layers.from_log(LOG)
    assert [one.name for one in listed] == [
        "__mye9_0_myl0_0",
        "__myl_Move_myl0_1",
        "conv_myl0_2",
        "__myl_FcAddCast_myl0_3",
    ]
    assert shape.inputs == () and not shape.computes
    assert move.moves and move.inputs[0].shape == (-1, 3, 8, 8)
    assert conv.weights == layers.Weights("float16", 64 * 3 * 7 * 7), "neither bias nor padding"
    assert conv.outputs[0].format == "(NHWC) Channel major format" and conv.tactic == "__myl_correlation_0x1"
    assert conv.nodes == ("node_Conv_1", "relu[0]")
    assert fused.computes and fused.computed_in == "float16"
    assert layers.by_type(listed) == {"float16": 2}


def test_an_unknown_log_line_still_gives_the_layer_name() -> None:
    (odd,) = layers.from_log("Name: new_kind, LayerType: gemm, Inputs: none")
    assert (odd.name, odd.type) == ("new_kind", "")


def test_a_mixed_input_kernel_computes_in_the_wider_type() -> None:
    weights_only = line("g", "gemm", [port("a", "4,8", "Half")], [port("w", "8,8", "Int8")], [])
    cast_inside = line("g", "gemm", [port("a", "4,8", "Half")], [port("w", "8,8", "Float")], [])
    assert [layers.from_log(text)[0].computed_in for text in (weights_only, cast_inside)] == ["float16", "float32"]


def test_layers_are_serializable_as_json() -> None:
    told = json.loads(json.dumps(layers.as_json(older(OLDER))))
    assert told[1]["weights"] == {"dtype": "float16", "count": 9408}
    assert told[1]["inputs"][0]["shape"] == [1, 64, 56, 56]


def test_notes_say_what_keeps_an_engine_slow() -> None:
    said = layers.list_notes(older(OLDER), "fp16")
    assert said == [
        "1 of 3 compute layers stayed in float32 (1 CaskConvolution)",
        "1 of 5 layers only change types or layouts",
    ]
    assert layers.list_notes(older(OLDER[1:2]), "fp16") == []


def test_invalid_json_is_refused() -> None:
    refuses("not JSON", layers.from_json, "Layers: conv1")


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("/conv1/Conv + /relu/Relu", ("/conv1/Conv", "/relu/Relu")),
        ("node_a || node_b", ("node_a", "node_b")),
        ("PWN(PWN(/a/Sigmoid), /a/Mul)", ("/a/Sigmoid", "/a/Mul")),
        ("{ForeignNode[/norm/Constant + (Unnamed Layer* 4) [Shuffle].../head/Gemm]}", ("/norm/Constant", "/head/Gemm")),
        ("{ForeignNode[node_a...node_b]}", ("node_a", "node_b")),
        ("(Unnamed Layer* 12) [Constant]", ()),
    ],
)  # fmt: skip
def test_node_names_are_extracted_from_layer_names(name: str, nodes: tuple[str, ...]) -> None:
    assert layers.named_nodes(name) == nodes


def test_nodes_come_from_metadata_or_the_name_but_not_for_reformats() -> None:
    told = layer("a + b", "CaskConvolution", HALF, HALF, Metadata="[ONNX Layer: told]")
    moved = layer("Reformatting CopyNode for Input Tensor 0 to a + b", "Reformat", PLAIN, HALF)
    found = layers.list_layers(older([told, convolution("c + d", HALF, "Half"), moved]), "TensorRT 8.6").layers
    assert [each.nodes for each in found] == [("told",), ("c", "d"), ()]


CONV = layers.EngineLayer("conv1", "CaskConvolution", (), (), "sm80_xmma", layers.Weights("int8", 9408))
MOVE = layers.EngineLayer("to int8", "Reformat", (), (), "0x3e8")


class Profiler:
    """The base class `IProfiler` that subclasses see."""

    def __init__(self) -> None:
        pass


def context_of(runs: list[dict[str, float]]) -> tuple[Any, Any]:
    """Return a context that reports these milliseconds, one dictionary per run, and its launch function."""
    context, left = SimpleNamespace(profiler=None), iter(runs)

    def launch() -> None:
        for name, milliseconds in next(left).items():
            context.profiler.report_layer_time(name, milliseconds)

    return context, launch


def test_layer_medians_exclude_the_first_run() -> None:
    runs = [{"conv1": 900.0, "to int8": 900.0}, *({"conv1": 3.0 + i, "to int8": 1.0} for i in range(5))]
    found = layers.profile_layers(SimpleNamespace(IProfiler=Profiler), *context_of(runs))
    assert found == {"conv1": pytest.approx(5e-3), "to int8": pytest.approx(1e-3)}


def test_unlisted_layers_are_appended_to_the_layer_times() -> None:
    listed = layers.list_layers([CONV, MOVE, layers.EngineLayer("folded", "Constant", (), (), "")], "TensorRT 10")
    reports = [{"conv1": 3.0, "to int8": 1.0}, {"conv1": 4.0, "new": 0.5}]
    runs = layers.watch_layers(SimpleNamespace(IProfiler=Profiler), *context_of(reports), 2)
    inside, seconds = layers.read_layer_times(listed, runs)
    assert [layer.name for layer in inside.layers] == ["conv1", "to int8", "folded", "new"]
    assert [layer.skipped for layer in inside.layers] == [False, False, True, False]
    assert [layer.moves for layer in inside.layers] == [False, True, False, False]
    assert (inside.layers[0].computes_in, inside.layers[0].tactic) == ("int8", "sm80_xmma")
    assert seconds == pytest.approx(np.array([[3e-3, 1e-3, 0, 0], [4e-3, 0, 0, 0.5e-3]]))


def test_repeated_reports_of_a_layer_are_summed() -> None:
    context = SimpleNamespace(profiler=None)

    def launch() -> None:
        for _ in range(3):
            context.profiler.report_layer_time("body of a loop", 2.0)

    runs = layers.watch_layers(SimpleNamespace(IProfiler=Profiler), context, launch, 2)
    assert runs == [{"body of a loop": pytest.approx(6e-3)}] * 2


def test_the_first_of_several_layers_with_one_name_gets_the_time() -> None:
    inside, seconds = layers.read_layer_times(layers.list_layers([CONV, CONV], "TensorRT 10"), [{"conv1": 1e-3}])
    assert [layer.skipped for layer in inside.layers] == [False, True]
    assert seconds == pytest.approx(np.array([[1e-3, 0]]))


def test_time_shares_are_sorted_by_operator_and_by_layer() -> None:
    seconds = {"to int8": 1e-3, "conv1": 2e-3, "a kernel without a listing": 1e-3}
    assert layers.share_by_operator([MOVE, CONV], seconds) == {
        "CaskConvolution": 0.5,
        "Reformat": 0.25,
        "unknown": 0.25,
    }
    first, *rest = layers.list_slowest([MOVE, CONV], seconds)
    assert first == SlowLayer("conv1", "CaskConvolution", "int8", "sm80_xmma", 0.5)
    assert [one.name for one in rest] == ["to int8", "a kernel without a listing"]


def test_no_reported_times_give_empty_results() -> None:
    seconds = layers.profile_layers(SimpleNamespace(IProfiler=Profiler), *context_of([{}] * layers.PROFILED_CALLS))
    assert (seconds, layers.share_by_operator([CONV], {}), layers.list_slowest([CONV], {})) == ({}, {}, ())


def test_time_spent_on_conversions_is_noted() -> None:
    said = layers.list_notes([CONV, MOVE, *[CONV] * 10], "int8", {"CaskConvolution": 0.7, "Reformat": 0.3})
    assert said == ["30% of the time goes into changing types and layouts (Reformat)"]
