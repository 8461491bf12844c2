"""Alignment of a network's forms: by names, tensors and data flow; unaligned layers are reported."""

from dataclasses import replace
from typing import Any

import pytest

from dyno.layers import align, tables
from dyno.layers.align import FormSet
from dyno.worker.facts.job import LAYERS, MODULES, NODES, Layer, LayerGraph, Port
from made_layers import form, layer

# A residual block: relu(bn2(conv2(relu(bn1(conv1(x))))) + x), then pooling. Both ReLUs are one module.
BLOCK = form(
    MODULES,
    layer("b.conv1", "Conv2d", "", "0", parameters=144, flops=9),
    layer("b.bn1", "BatchNorm2d", "0", "1", parameters=8),
    layer("b.relu", "ReLU", "1", "2"),
    layer("b.conv2", "Conv2d", "2", "3", parameters=144, flops=9),
    layer("b.bn2", "BatchNorm2d", "3", "4", parameters=8),
    layer("b.drop", "Dropout", "4", "4", skipped=True),
    layer("b.relu", "ReLU", "4", "5"),
    layer("b", "Block", "", "5"),
    layer("pool", "AvgPool2d", "5", "6"),
)
GRAPH = form(
    NODES,
    layer("n1", "Conv", "x", "t1", parameters=148, flops=9, modules=("b.conv1",)),
    layer("n2", "Relu", "t1", "t2", modules=("b.relu",)),
    layer("n3", "Conv", "t2", "t3", parameters=148, flops=9, modules=("b.conv2",)),
    layer("n4", "Add", "t3 x", "t4", modules=("b",)),
    layer("n5", "Relu", "t4", "t5", modules=("b.relu",)),
    layer("n6", "Shape", "t5", "s"),
    layer("n7", "AveragePool", "t5 s", "y", modules=("pool",)),
)


def names(*forms: LayerGraph) -> list[tuple[list[str], ...]]:
    """Return the names of each region's members, form by form."""
    return [
        tuple([forms[k].layers[i].name for i in own] for k, own in enumerate(region.members))
        for region in align.find_regions(forms, align.find_pivots(FormSet(forms)))
    ]


def rows(*forms: LayerGraph) -> list[dict[str, Any]]:
    """Return the rows of the forms' side-by-side table."""
    return tables.align_forms(FormSet(forms), range(len(forms))).rows


def test_modules_align_with_nodes() -> None:
    found = names(BLOCK, GRAPH)
    assert (["b.conv1", "b.bn1"], ["n1"]) in found and (["b.relu"], ["n2"]) in found
    assert (["b.relu"], ["n5"]) in found and (["b"], ["n4"]) in found and (["pool"], ["n6", "n7"]) in found
    assert [node for _, nodes in found for node in nodes] == [x.name for x in GRAPH.layers]


def test_calls_numbered_by_an_exporter_are_aligned() -> None:
    numbered = [replace(x, modules=("b.relu_1",)) if x.name == "n5" else x for x in GRAPH.layers]
    forms = [BLOCK, form(NODES, *numbered)]
    regions = align.find_regions(forms, align.find_pivots(FormSet(forms)))
    assert [r.members for r in regions if 2 in r.members[0] or 6 in r.members[0]] == [((2,), (1,)), ((6,), (4,))]


def test_operations_are_counted_once_at_the_graph_node() -> None:
    """An outer module's own products appear in one place and must not be counted twice."""
    outer = [replace(x, flops=18) if x.name == "b" else replace(x, flops=0) for x in BLOCK.layers]
    found = rows(form(MODULES, *outer), GRAPH)
    assert {row["b"]: row["flops"] for row in found if row["flops"]} == {"n1": 9, "n3": 9}


def test_an_engine_is_aligned_by_its_node_names() -> None:
    engine = form(
        LAYERS,
        layer("r", "Reformat", "x", "x'", moves=True),
        layer("n1 + n2", "CaskConvolution", "x'", "t2", nodes=("n1", "n2")),
        layer("n3 + n4 + n5", "CaskConvolution", "t2 x'", "t5", nodes=("n3", "n4", "n5")),
        layer("n7", "Pooling", "t5", "y", nodes=("n7",)),
    )
    forms = [BLOCK, GRAPH, engine]
    links = align.find_pivots(FormSet(forms))
    found = names(*forms)
    assert found[0] == ([], [], ["r"])
    assert found[1] == (["b.conv1", "b.bn1", "b.relu"], ["n1", "n2"], ["n1 + n2"])
    assert found[2] == (["b.conv2", "b.bn2", "b.relu", "b"], ["n3", "n4", "n5"], ["n3 + n4 + n5"])
    assert {index for own in links[1].pairs.values() for index in own} == {1, 2, 3}


def test_an_engine_is_aligned_by_its_output_names() -> None:
    """As in ONNX Runtime's blocked layouts: one tensor name per fused layer, and other tensors."""
    engine = form(
        LAYERS,
        layer("t2_nchwc", "Conv", "x", "r0"),
        layer("t3_nchwc", "Conv", "r0 x", "r1"),
        layer("out", "ReorderOutput", "r1", "r2", moves=True),
        layer("n7", "AveragePool", "r2", "y"),
    )
    forms = [GRAPH, engine]
    (link,) = align.find_pivots(FormSet(forms))
    found = names(*forms)
    assert (["n1", "n2"], ["t2_nchwc"]) in found and (["n3", "n4", "n5"], ["t3_nchwc"]) in found
    said = tables.describe_coverage(forms, link)
    assert said.endswith("7 in all: 3 by name, 3 by what flows between those, 1 computed before the first run.")


FEED_FORWARD = [
    layer("fc1", "Conv", "x", "a", flops=9), layer("erf", "Erf", "a", "e"), layer("mul", "Mul", "a e", "g"),
    layer("fc2", "Conv", "g", "b", flops=9), layer("scale", "Mul", "b", "y"),
]  # fmt: skip
GELU = [
    layer("conv", "Conv", "x", "c", flops=9), layer("div", "Div", "c", "d"), layer("erf", "Erf", "d", "e"),
    layer("mul", "Mul", "c e", "g"), layer("tail", "Identity", "g", "y"),
]  # fmt: skip
# Nodes of a graph, layers of an engine, and regions of both that must be found.
ENGINES: dict[str, tuple[list[Layer], list[Layer], list[tuple[str, str]]]] = {
    "a layer that nothing names does what lies between its neighbours": (
        [*GRAPH.layers],
        [layer("n1", "FullyConnected", "x", "n1", nodes=("n1",)),
         layer("MVN_9", "MVN", "n1", "MVN_9", nodes=("MVN_9",)),
         layer("n3", "FullyConnected", "MVN_9", "n3", nodes=("n3",))],
        [("n2", "MVN_9")],
    ),
    "a convolution goes with the ReLU behind its batch norm, not with the layer before": (
        [layer("stem", "Conv", "x", "s", flops=9), layer("conv", "Conv", "s", "c", flops=9),
         layer("norm", "BatchNormalization", "c", "n"), layer("relu", "Relu", "n", "r")],
        [layer("s_nchwc", "Conv", "x", "s_nchwc"), layer("r_nchwc", "Conv", "s_nchwc", "r_nchwc")],
        [("stem", "s_nchwc"), ("conv norm relu", "r_nchwc")],
    ),
    "a product is in no layer of which the engine says that it multiplies nothing": (
        FEED_FORWARD,
        [layer("a_nchwc", "Conv", "x", "p", computes_in="float32"), layer("Gelu", "Gelu", "p", "q"),
         layer("scale_nchwc", "Conv", "q", "y_nchwc", computes_in="float32")],
        [("fc1", "a_nchwc"), ("erf mul", "Gelu"), ("fc2 scale", "scale_nchwc")],
    ),
    "what follows a tensor that a layer writes as it is belongs to the next layer": (
        GELU, [layer("conv", "Conv", "x", "c"), layer("Gelu", "Gelu", "c", "g")],
        [("conv", "conv"), ("div erf mul tail", "Gelu")],
    ),
    "OpenVINO calls tensors by their layers: what they hold isn't known": (
        GELU, [layer("c", "Convolution", "x", "c"), layer("g", "Eltwise", "c", "g")], [("conv div erf", "c")],
    ),
    "a layer without a name works for the reader that is known, whatever else it writes": (
        [layer("lstm", "LSTM", "x", "h"), layer("fc", "Gemm", "h", "y")],
        [layer("sequence_64", "RNNSeq", "x", "states last"), layer("states", "Reshape", "states", "unread"),
         layer("lstm", "Reshape", "last", "l", skipped=True), layer("fc", "FullyConnected", "l", "y")],
        [("lstm", "sequence_64 lstm")],
    ),
    # ONNX Runtime names an unnamed node after its output; before a conversion that is a separate tensor.
    "a layer before a conversion is known by what that writes": (
        [layer("Conv to c", "Conv", "x", "c", flops=9), layer("Add to y", "Add", "c x", "y")],
        [layer("c_nchwc", "Conv", "x", "r0"), layer("Add to r1", "Add", "r0 x", "r1"),
         layer("ReorderOutput", "ReorderOutput", "r1", "y", moves=True)],
        [("Conv to c", "c_nchwc"), ("Add to y", "Add to r1")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "own", "expected"), ENGINES.values(), ids=ENGINES)
def test_an_engine_aligns_with_its_graph(nodes: list[Layer], own: list[Layer], expected: list[tuple[str, str]]) -> None:
    forms = [form(NODES, *nodes), form(LAYERS, *own)]
    found = [tuple(map(" ".join, region)) for region in names(*forms)]
    assert [region for region in found if region in expected] == expected


def test_two_engines_that_place_a_node_differently_are_not_merged() -> None:
    """One engine assigns the Q/DQ pair to the convolution before it; for the other, a guess puts it elsewhere. The
    difference must not merge both layers into one region."""
    nodes = [
        layer("c1", "Conv", "x", "a", flops=9), layer("q", "QuantizeLinear", "a", "b"),
        layer("d", "DequantizeLinear", "b", "c"), layer("c2", "Conv", "c", "y", flops=9),
    ]  # fmt: skip
    says = form(LAYERS, layer("c1", "Conv", "x", "b", nodes=("c1", "q", "d")),
                layer("c2", "Conv", "b", "y", nodes=("c2",)), library="says")  # fmt: skip
    silent = form(LAYERS, layer("c1", "Conv", "x", "p"), layer("c2", "Conv", "p", "y"), library="silent")
    forms = [form(NODES, *nodes), says, silent]
    assert names(*forms) == [(["c1", "q", "d"], ["c1"], ["c1"]), (["c2"], ["c2"], ["c2"])]


def test_unrelated_forms_are_reported_as_unaligned() -> None:
    other = form(LAYERS, layer("k1", "Kernel", "i", "j"), layer("k2", "Kernel", "j", "o"), library="stranger")
    forms = [GRAPH, other]
    said = tables.describe_coverage(forms, *align.find_pivots(FormSet(forms)))
    assert said == "nodes aligned with stranger, 7 in all: 7 unaligned (100.0%)."
    assert {row["remark"] for row in rows(*forms)} == {"nothing runs for it", "counterpart unknown"}


def totals(forms: list[LayerGraph], first: int = 0, graph_of: dict[int, int] | None = None) -> list[str]:
    """Return the sentences about the parameters of the form after `first`."""
    found = FormSet(forms, graph_of or {})
    return tables.describe_totals(found, [first, first + 1], align.find_regions(forms, align.find_pivots(found)))


def test_the_sum_explains_folded_batch_norms() -> None:
    assert totals([BLOCK, GRAPH]) == [
        "nodes has 8 fewer parameters than modules: 2 batch norms folded into the layers before them, whose 16 "
        "parameters became 8 biases."
    ]


def test_padding_zeros_are_distinguished_from_folded_batch_norms() -> None:
    blocked = (Port("r", (1, 8, 8, 8), "float32", "nchwc"),)
    padded = [
        replace(x, outputs=blocked if x.flops else x.outputs, parameters=296 if x.flops else 0) for x in GRAPH.layers
    ]
    engine = form(LAYERS, *(replace(x, flops=None) for x in padded), library="engine")
    assert totals([BLOCK, engine, GRAPH], graph_of={1: 2}) == [
        "engine has 288 more parameters than modules: 2 batch norms folded into the layers before them, whose 16 "
        "parameters became 8 biases; 296 zeros fill up blocks of channels in its layout."
    ]


def test_a_parameter_difference_names_its_largest_part() -> None:
    less = [replace(x, parameters=140) if x.name == "n3" else x for x in GRAPH.layers]
    said = totals([GRAPH, form(NODES, *less, library="smaller")])
    assert said == ["smaller has 8 fewer parameters than nodes: all of them in n3."]


def test_weights_of_a_part_called_twice_count_once_in_every_form() -> None:
    module = form(
        MODULES,
        layer("conv", "Conv2d", "", "0", parameters=10),
        layer("conv", "Conv2d", "0", "1", parameters=10, shared=10),
        Layer(name="unused", type="Linear", parameters=5, skipped=True, modules=("unused",)),
    )
    graph = form(
        NODES,
        layer("c1", "Conv", "x", "t1", parameters=10, modules=("conv",)),
        layer("c2", "Conv", "t1", "t2", parameters=10, shared=10, modules=("conv",)),
    )
    table = tables.align_forms(FormSet([module, graph]), [0, 1])
    assert [(row["parameters_a"], row["parameters_b"]) for row in table.rows] == [(10, 10), (None, None), (5, None)]
    assert "nodes has 5 fewer parameters than modules: all of them in unused." in table.notes


def test_weights_stored_once_for_several_layers_are_explained() -> None:
    norms = layer("a", "LayerNorm", "", "0", parameters=8), layer("b", "LayerNorm", "0", "1", parameters=8)
    module = form(MODULES, *norms)
    nodes = [
        layer("n1", "LayerNormalization", "x", "t1", parameters=8, modules=("a",)),
        layer("n2", "LayerNormalization", "t1", "t2", parameters=8, shared=8, modules=("b",)),
    ]
    once = "nodes has 8 fewer parameters than modules: 8 are stored once for several layers that have the same values."
    assert totals([module, form(NODES, *nodes)]) == [once]
    # Called twice, with the first call's weight folded: the second call's weight is counted first.
    module = form(MODULES, *(replace(x, name="a", shared=s) for x, s in zip(module.layers, (0, 8), strict=True)))
    folded = [replace(nodes[0], parameters=3), replace(nodes[1], shared=0)]
    forms = [module, *(form(NODES, *(replace(x, modules=("a",)) for x in each)) for each in (nodes, folded))]
    assert totals(forms, 1) == ["nodes has 3 more parameters than nodes: all of them in a."]


def test_conversions_name_their_writer_and_reader() -> None:
    before, after = Port("a", (1, 4, 8, 8), "float32", "abcd"), Port("b", (1, 4, 8, 8), "int8", "acdb")
    engine = LayerGraph(form=LAYERS, library="engine", layers=(
        Layer(name="conv", type="Conv", outputs=(before,)),
        Layer(name="r", type="Reorder", inputs=(before,), outputs=(after,), moves=True),
        Layer(name="pool", type="Pool", inputs=(after,)),
    ))  # fmt: skip
    (row,) = tables.describe_conversions([engine], [0]).rows
    assert (row["writer"], row["reader"], row["bytes"]) == ("conv", "pool", 256)
    assert (row["before"], row["after"]) == ("float32 abcd", "int8 acdb")


def test_unknown_shapes_have_no_bytes() -> None:
    assert tables.count_activation_bytes(layer("a", "A", "", "x")) == 4 * 4 * 64
    assert tables.count_activation_bytes(Layer(outputs=(Port("x", (-1, 4), "float32"),))) is None
    assert tables.count_activation_bytes(Layer(outputs=(Port("x", (2, 4), ""),))) is None


def test_early_shape_nodes_do_not_reorder_rows() -> None:
    """An LSTM asks for the batch, for its first state, before anything runs: nodes that run earlier stay above it."""
    module = form(
        MODULES, layer("emb", "Linear", "", "0", flops=9), layer("lstm", "LSTM", "0", "1", flops=9), layer("", "Net")
    )
    graph = form(
        NODES,
        layer("shape", "Shape", "x", "s", modules=("lstm",)),
        layer("mean", "ReduceMean", "x", "m", modules=("",)),
        layer("mm", "MatMul", "m", "e", flops=9, modules=("emb",)),
        layer("l", "LSTM", "e s", "y", flops=9, modules=("lstm",)),
    )
    assert [row["b"] for row in rows(module, graph)] == ["mean", "mm", "shape l"]


def test_a_conversion_precedes_its_reader() -> None:
    module = form(MODULES, layer("conv", "Conv2d", "", "0", flops=9), layer("fc", "Linear", "1", "2", flops=9))
    graph = form(
        NODES, layer("n1", "Conv", "x", "a", flops=9, modules=("conv",)),
        layer("mean", "ReduceMean", "a", "m", modules=("",)), layer("n2", "Gemm", "m", "y", flops=9, modules=("fc",)),
    )  # fmt: skip
    engine = form(
        LAYERS, layer("n1", "Conv", "x", "r"), layer("out", "ReorderOutput", "r", "a", moves=True),
        layer("mean", "ReduceMean", "a", "m"), layer("n2", "Gemm", "m", "y"),
    )  # fmt: skip
    assert [row["c"] for row in rows(module, graph, engine)] == ["n1", "out", "mean", "n2"]


def test_a_conversion_inside_a_region_follows_it() -> None:
    module = form(MODULES, layer("conv", "Conv2d", "", "0", flops=9), layer("act", "PReLU", "0", "1"))
    graph = form(
        NODES, layer("n1", "Conv", "x", "a", flops=9, modules=("conv",)),
        layer("n2", "PRelu", "a", "y", modules=("act",)),
    )  # fmt: skip
    apart = form(
        LAYERS, layer("n1", "Conv", "x", "r"), layer("out", "ReorderOutput", "r", "a", moves=True),
        layer("n2", "PRelu", "a", "y"),
    )  # fmt: skip
    fused = form(LAYERS, layer("one", "Conv", "x", "y", nodes=("n1", "n2")), library="fused")
    assert [row["c"] for row in rows(module, graph, apart, fused)] == ["n1 n2", "out"]


def test_an_unnamed_multiplying_layer_is_aligned_with_the_unnamed_product() -> None:
    graph = form(
        NODES,
        layer("a", "Relu", "x", "ta", modules=("first",)), layer("r", "Reshape", "ta", "tr", modules=("first",)),
        layer("g", "GRU", "tr", "tg", flops=9, modules=("gru",)), layer("b", "Relu", "tg", "y", modules=("last",)),
    )  # fmt: skip
    module = form(MODULES, *(layer(name, "Part") for name in ("first", "gru", "last")))
    engine = form(
        LAYERS, layer("a", "Relu", "x", "a", nodes=("a",)), layer("seq", "GRU", "a", "k", computes_in="float32"),
        layer("b", "Relu", "k", "b", nodes=("b",)),
    )  # fmt: skip
    assert (["gru"], ["g"], ["seq"]) in names(module, graph, engine)


def test_a_layer_of_only_one_engine_has_an_unknown_counterpart() -> None:
    graph = form(NODES, layer("n", "Conv", "x", "y", flops=9))
    own = layer("odd", "Odd", "p", "q"), layer("n", "Conv", "x", "y")
    forms = [graph, form(LAYERS, *own, library="one"), form(LAYERS, own[1], library="two")]
    assert {row["b"]: row["remark"] for row in rows(*forms)}["odd"] == "counterpart unknown"


def test_a_module_used_only_for_its_weights_is_not_run_by_itself() -> None:
    module = form(MODULES, layer("a", "Attention", "", "0", flops=9),
                  Layer(name="a.out", type="Linear", parameters=9, skipped=True))  # fmt: skip
    graph = form(NODES, layer("n", "MatMul", "x", "y", flops=9, parameters=9, modules=("a",)))
    assert {row["a"]: row["remark"] for row in rows(module, graph)}["a.out"] == "not run by itself"
