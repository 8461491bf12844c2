"""Given files are repaired, and each change is a warning."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper as h
from onnx import numpy_helper

import onnx_text
from dyno.worker.onnx_graph.check import make_session
from dyno.worker.onnx_graph.file import check, prepare_given, read_io
from dyno.worker.onnx_graph.repair import find_free_axes, retype
from refusals import refuses

FEEDS = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)


def linear(dtype: Any = np.float32, ir: int = 8, inputs: bool = False, opset: int = 17) -> Any:
    """Build y = x w; with `inputs` the weights are among the graph's inputs."""
    weight = numpy_helper.from_array(np.arange(12).reshape(4, 3).astype(dtype) / 8, "w")
    taken = {"x": ["n", 4], **({"w": [4, 3]} if inputs else {})}
    nodes, settings = [h.make_node("MatMul", ["x", "w"], ["y"])], {"kind": weight.data_type, "opset": opset, "ir": ir}
    return onnx_text.of_nodes(nodes, taken, {"y": ["n", 3]}, {"w": weight}, **settings)


def prepared(model: Any, folder: Path) -> tuple[Any, list[str]]:
    """Return the prepared graph and its warnings."""
    onnx.save(model, folder / "given.onnx")
    (folder / "made").mkdir()
    artifact = prepare_given(str(folder / "given.onnx"), None, folder / "made")
    return onnx.load(artifact.path), artifact.made_by.warnings


def output(model: Any, feeds: np.ndarray = FEEDS) -> np.ndarray:
    return np.asarray(make_session(model.SerializeToString()).run(None, {"x": feeds})[0])


@pytest.mark.parametrize("stored", [-1, 0, None])
def test_a_batch_stored_as_less_than_1_is_free(tmp_path: Path, stored: int | None) -> None:
    model = linear()
    for value in (*model.graph.input, *model.graph.output):
        dim = value.type.tensor_type.shape.dim[0]
        dim.Clear()
        if stored is not None:
            dim.dim_value = stored
    onnx.save(model, tmp_path / "file.onnx")
    assert isinstance(read_io(str(tmp_path / "file.onnx"))[0][0].shape[0], str)
    repaired, warnings = prepared(model, tmp_path)
    assert len(warnings) == (stored is not None)
    if warnings:
        assert warnings[0].startswith(f"axes stored as less than 1 are read as free axes: x axis 0 ({stored})")
        assert repaired.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    np.testing.assert_allclose(output(repaired), FEEDS @ (np.arange(12).reshape(4, 3) / 8), rtol=1e-5)


@pytest.mark.parametrize(("name", "shape", "free"), [
    ("past", (1, 2, 0, 4), []), ("tokens", (1, 0), []), ("x", (0, 3, 0, 0), [0, 2, 3]), ("x", (-1, -1), [0, 1]),
    ("x", ("n", None, 4), [0, 1]),
])  # fmt: skip
def test_an_axis_of_0_is_free_only_for_batches_and_images(
    name: str, shape: tuple[int | str | None, ...], free: list[int]
) -> None:
    assert find_free_axes(h.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)) == free


@pytest.mark.parametrize(("ir", "opset", "changed"), [(3, 8, False), (8, 17, True)])
def test_weights_listed_as_inputs_are_not_inputs(tmp_path: Path, ir: int, opset: int, changed: bool) -> None:
    repaired, warnings = prepared(linear(ir=ir, inputs=True, opset=opset), tmp_path)
    assert [value.name for value in repaired.graph.input] == (["x"] if changed else ["x", "w"])
    assert (
        warnings
        == ("1 weights were listed as inputs too and no longer are: ONNX Runtime doesn't fold inputs",) * changed
    )
    assert [tensor.name for tensor in read_io(str(tmp_path / "given.onnx"))[0]] == ["x"]


def test_float64_is_computed_in_float32(tmp_path: Path) -> None:
    repaired, warnings = prepared(linear(np.float64), tmp_path)
    assert warnings == ("the graph was in float64, in part or as a whole, and is computed in float32",)
    assert output(repaired).dtype == np.float32


def test_a_correct_file_stays_in_place(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "right.onnx")
    repaired = prepare_given(str(tmp_path / "right.onnx"), None, tmp_path)
    assert repaired.path == str(tmp_path / "right.onnx")
    assert repaired.made_by.warnings == ()


def test_fp16_is_cast_to_float32_with_its_values_kept() -> None:
    model = linear(np.float16)
    model.graph.node[0].input[0] = "x16"
    model.graph.node.insert(0, h.make_node("Cast", ["x"], ["x16"], to=onnx.TensorProto.FLOAT16))
    retype(model, (onnx.TensorProto.FLOAT16,), onnx.TensorProto.FLOAT)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_allclose(output(model), FEEDS @ (np.arange(12).reshape(4, 3) / 8), rtol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_operators_in_training_mode_cause_a_warning(tmp_path: Path, training: bool) -> None:
    model, flags = linear(), {"share": np.float32(0.5), "on": np.bool_(training)}
    model.graph.node[0].output[0] = "made"
    model.graph.node.extend([
        h.make_node("BatchNormalization", ["made", *"bbbb"], ["n", *(["m", "v"] * training)], training_mode=training),
        h.make_node("Dropout", ["n", "share", "on"], ["y"]),
    ])  # fmt: skip
    values = {"b": np.ones(3, np.float32), **flags}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in values.items())
    _, warnings = prepared(model, tmp_path)
    said = "the graph runs as in training (BatchNormalization and Dropout)"
    assert [w.partition(":")[0] for w in warnings] == [said] * training


@pytest.mark.parametrize("training", [True, False])
def test_before_opset_14_extra_batch_norm_outputs_mean_training_mode(tmp_path: Path, training: bool) -> None:
    outputs = ["mean", "var", "saved_mean", "saved_var"] * training
    model = linear(opset=13)
    model.graph.node[0].output[0] = "made"
    model.graph.node.append(h.make_node("BatchNormalization", ["made", *"bbbb"], ["y", *outputs]))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "b"))
    assert [w.partition(":")[0] for w in prepared(model, tmp_path)[1]] == [
        "the graph runs as in training (BatchNormalization)"
    ] * training


def test_missing_weights_and_broken_graphs_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "sub"
    place.mkdir()
    onnx.save(linear(), tmp_path / "m.onnx", save_as_external_data=True, location="sub/w.bin", size_threshold=0)
    check(str(tmp_path / "m.onnx"))
    (place / "w.bin").unlink()
    refuses(r"keeps weights in .*sub/w.bin, which doesn't exist; put it back", check, str(tmp_path / "m.onnx"))
    outside = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    outside.graph.initializer[0].external_data[0].value = "../w.bin"
    (tmp_path.parent / "w.bin").write_bytes(bytes(48))
    (tmp_path / "m.onnx").write_bytes(outside.SerializeToString())
    refuses(r"keeps weights in \.\./w\.bin, outside its folder", check, str(tmp_path / "m.onnx"))
    model = linear()
    model.graph.node[0].input[1] = "nowhere"
    onnx.save(model, tmp_path / "n.onnx")
    refuses(r"not a valid ONNX graph: .*'nowhere'", check, str(tmp_path / "n.onnx"))


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    model = linear()
    twice = h.make_function("acme", "Twice", ["a"], ["b"], [h.make_node("Add", ["a", "a"], ["b"])], model.opset_import)
    model.graph.node[0].output[0] = "half"
    model.graph.node.append(h.make_node("Twice", ["half"], ["y"], domain="acme"))
    model.functions.append(twice)
    model.opset_import.append(h.make_opsetid("acme", 1))
    repaired, warnings = prepared(model, tmp_path)
    assert not repaired.functions and len(warnings) == 1 and "acme.Twice" in warnings[0]
    np.testing.assert_array_equal(output(repaired), output(model))


def test_default_attributes_of_functions_are_applied(tmp_path: Path) -> None:
    """Files of PyTorch's first dynamo exporter use them; ONNX Runtime knows them too."""
    model, node = linear(), partial(h.make_node, domain="acme")
    sloped = h.make_node("LeakyRelu", ["a"], ["b"])
    sloped.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="alpha", type=onnx.AttributeProto.FLOAT))
    opsets = [*model.opset_import, h.make_opsetid("acme", 1)]
    default = [h.make_attribute("alpha", 0.5)]
    inner = h.make_function("acme", "Inner", ["a"], ["b"], [sloped], opsets, attribute_protos=default)
    branch = h.make_graph([node("Inner", ["a"], ["b"])], "branch", [], [h.make_tensor_value_info("b", 1, None)])
    yes = h.make_node("Constant", [], ["yes"], value=h.make_tensor("yes", onnx.TensorProto.BOOL, [], [True]))
    chosen = h.make_node("If", ["yes"], ["c"], then_branch=branch, else_branch=branch)
    outer = h.make_function("acme", "Outer", ["a"], ["c"], [yes, chosen], opsets)
    model.graph.node[0].output[0] = "first"
    model.graph.node.extend(
        [node("Inner", ["first"], ["t"], alpha=2.0), node("Inner", ["t"], ["u"]), node("Outer", ["u"], ["y"])]
    )
    model.functions.extend([outer, inner])
    model.opset_import.append(h.make_opsetid("acme", 1))
    repaired, _ = prepared(model, tmp_path)
    assert not repaired.functions
    feeds = -np.abs(FEEDS)
    np.testing.assert_array_equal(output(repaired, feeds), output(model, feeds))


def test_attributes_missing_in_outer_functions_use_the_inner_default(tmp_path: Path) -> None:
    model, node = linear(), partial(h.make_node, domain="acme")

    def pass_on(made: onnx.NodeProto) -> onnx.NodeProto:
        passed = {"name": "alpha", "ref_attr_name": "alpha", "type": onnx.AttributeProto.FLOAT}
        made.attribute.append(onnx.AttributeProto(**passed))
        return made

    opsets = [*model.opset_import, h.make_opsetid("acme", 1)]
    leaky = [pass_on(h.make_node("LeakyRelu", ["a"], ["b"]))]
    default = [h.make_attribute("alpha", 0.5)]
    inner = h.make_function("acme", "Inner", ["a"], ["b"], leaky, opsets, attribute_protos=default)
    twice = [pass_on(node("Inner", ["a"], ["t"])), pass_on(h.make_node("LeakyRelu", ["t"], ["b"]))]
    middle = h.make_function("acme", "Middle", ["a"], ["b"], twice, opsets, ["alpha"])
    calls = [pass_on(node("Middle", ["a"], ["t"])), node("Inner", ["t"], ["b"])]
    outer = h.make_function("acme", "Outer", ["a"], ["b"], calls, opsets, ["alpha"])
    model.graph.node[0].output[0] = "first"
    model.graph.node.extend([node("Outer", ["first"], ["t"]), node("Outer", ["t"], ["y"], alpha=0.25)])
    model.functions.extend([inner, middle, outer])
    model.opset_import.append(h.make_opsetid("acme", 1))
    repaired, _ = prepared(model, tmp_path)
    assert not repaired.functions
    feeds = -np.abs(FEEDS)
    below = feeds @ numpy_helper.to_array(model.graph.initializer[0])
    for slope in (0.5, 0.01, 0.5, 0.25, 0.25, 0.5):  # 0.01 is ONNX's default of LeakyRelu
        below = slope * below
    np.testing.assert_allclose(output(repaired, feeds), below, rtol=1e-5)


def test_inlined_layers_are_named_after_their_call(tmp_path: Path) -> None:
    opsets = [h.make_opsetid("", 17), h.make_opsetid("acme", 1)]
    kinds, node = onnx.TensorProto, partial(h.make_node, domain="acme")
    branches = [
        h.make_graph([h.make_node("Neg", ["a"], [side], name=side)], side, [],
                     [h.make_tensor_value_info(side, kinds.FLOAT, None)]) for side in ("left", "right")
    ]  # fmt: skip
    inner = h.make_function("acme", "Inner", ["a"], ["b"], [
        h.make_node("Relu", ["a"], ["t"]), h.make_node("Relu", ["t"], ["b"], name="last"),
    ], opsets)  # fmt: skip
    outer = h.make_function("acme", "Outer", ["a"], ["b"], [
        node("Inner", ["a"], ["t"], name="part"), node("Inner", ["t"], ["u"], name="part"),
        h.make_node("Constant", [], ["yes"], name="yes", value=h.make_tensor("yes", kinds.BOOL, [], [True])),
        h.make_node("If", ["yes"], ["v"], name="choice", then_branch=branches[0], else_branch=branches[1]),
        h.make_node("Add", ["u", "v"], ["b"], name="sum"),
    ], opsets)  # fmt: skip
    model = linear()
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    model.functions.extend([outer, inner])
    (first,) = model.graph.node
    first.name, first.output[0] = "first/sum", "half"
    model.graph.node.extend([
        node("Outer", ["half"], ["more"], name="first"), node("Outer", ["more"], ["some"], name="second"),
        node("Outer", ["some"], ["y"]),
    ])  # fmt: skip
    repaired, _ = prepared(model, tmp_path)
    within = "part/Relu_0 part/last part_1/Relu_0 part_1/last yes choice sum".split()
    named = [f"{call}/{name}" for call in ("first", "second", "Outer_3") for name in within]
    named[named.index("first/sum")] = "first/sum_2"  # the name belongs to another node
    assert [node.name for node in repaired.graph.node] == ["first/sum", *named]
    branch = {attribute.name: attribute.g.node[0].name for attribute in repaired.graph.node[6].attribute}
    assert branch == {"then_branch": "first/left", "else_branch": "first/right"}
    expected = FEEDS @ numpy_helper.to_array(model.graph.initializer[0])
    for _ in range(3):  # inlined by hand: ONNX Runtime refuses two calls with one name
        expected = np.maximum(expected, 0) - expected
    np.testing.assert_allclose(output(repaired), expected, rtol=1e-5)


def test_non_numeric_inputs_and_outputs_are_refused_with_advice(tmp_path: Path) -> None:
    path, kinds = tmp_path / "file.onnx", onnx.TensorProto
    x, text = h.make_tensor_value_info("x", kinds.FLOAT, ["n", 4]), h.make_tensor_value_info("x", kinds.STRING, ["n"])
    parts = h.make_tensor_sequence_value_info("parts", kinds.FLOAT, None)
    maps = h.make_value_info(
        "maps",
        h.make_sequence_type_proto(h.make_map_type_proto(kinds.INT64, h.make_tensor_type_proto(kinds.FLOAT, []))),
    )
    maybe = h.make_value_info("m", h.make_optional_type_proto(h.make_tensor_type_proto(kinds.FLOAT, [2])))
    flag = h.make_tensor_value_info("y", kinds.BOOL, [])
    labels = h.make_node("ZipMap", ["x"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2, 3])
    for node, taken_, given_, named in (
        (h.make_node("SplitToSequence", ["x"], ["parts"]), x, parts, "output 'parts' is a sequence"),
        (labels, x, maps, "zipmap"),
        (h.make_node("OptionalHasElement", ["m"], ["y"]), maybe, flag, "input 'm' is optional; export"),
        (
            h.make_node("Identity", ["x"], ["y"]),
            text,
            h.make_tensor_value_info("y", kinds.STRING, ["n"]),
            "'x' is text",
        ),
    ):
        graph = h.make_graph([node], "graph", [taken_], [given_])
        ops = [h.make_opsetid("", 17), h.make_opsetid("ai.onnx.ml", 3)]
        onnx.save(h.make_model(graph, opset_imports=ops, ir_version=8), path)
        refuses(named, check, str(path))


def test_unordered_nodes_are_sorted(tmp_path: Path) -> None:
    model = linear()
    then, other = (
        h.make_graph(
            [h.make_node(kind, ["a"], [f"{kind}_a"])], kind, [], [h.make_tensor_value_info(f"{kind}_a", 1, None)]
        )
        for kind in ("Neg", "Abs")
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "flag"))
    del model.graph.node[:]
    choice = h.make_node("If", ["flag"], ["y"], then_branch=then, else_branch=other)
    model.graph.node.extend([choice, h.make_node("MatMul", ["x", "w"], ["a"])])
    repaired, warnings = prepared(model, tmp_path)
    assert [node.op_type for node in repaired.graph.node] == ["MatMul", "If"]
    assert warnings == ("nodes stood before their inputs' nodes, and were sorted",)
    np.testing.assert_allclose(output(repaired), -FEEDS @ (np.arange(12).reshape(4, 3) / 8), rtol=1e-5)
    model.graph.node[1].input[0] = "y"
    onnx.save(model, tmp_path / "circle.onnx")
    refuses(r"circle\.onnx is not a valid ONNX graph", check, str(tmp_path / "circle.onnx"))
