"""Repairs of the user's ONNX files that engines would read differently or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from graphlib import CycleError, TopologicalSorter
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dyno.worker.facts.files import AS_IN_TRAINING, DRAWN_STEPS, IN_SINGLE, MakerFacts
from dyno.worker.inputs.specs import is_image
from dyno.worker.onnx_graph.graph_facts import (
    add_weight,
    copy_message,
    drop_weight_inputs,
    graphs_in,
    graphs_of,
    read_graph_facts,
    reads_of,
    set_nodes,
    tensors_in,
)
from dyno.worker.spec import Artifact, Recipe, Tensor, UserError, shorten

Functions = Mapping[tuple[str, str, str], Any]

MAX_INLINE_B = 2**31 - 2**26  # bytes of weights in a protobuf file
STEP_INPUTS = {"Loop": 0, "LSTM": 4, "GRU": 4, "RNN": 4}  # by operator: the input that sets how many steps run
UNCHANGED = {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"}  # operators that keep such a number


def repair_graph(model: Any) -> tuple[Any, list[str]]:
    """Return a copy of the graph, and one line per change; no lines for a valid graph.

    Nodes are sorted after their inputs' nodes; ONNX's own domain gets its one name; axes stored as -1 or 0 become free
    (see `find_free_axes`); initialisers are removed from the inputs; the file's own functions are inlined; and a
    float64 graph becomes float32. External weights are not changed.
    """
    copy = copy_message(model)
    return copy, [
        line
        for change in (order, name_domain, _free_axes, _remove_weight_inputs, _inline_functions, _convert_doubles)
        if (line := change(copy))
    ]


def warn_training(model: Any) -> list[str]:
    """Return a warning if nodes run in training mode: outputs are random or depend on the rest of the batch."""
    from onnx.numpy_helper import to_array

    constants = {tensor.name: tensor for graph in graphs_in(model.graph) for tensor in graph.initializer}
    nodes = [node for graph in graphs_in(model.graph) for node in graph.node]
    constants |= {n.output[0]: a.t for n in nodes if n.op_type == "Constant" for a in n.attribute if a.HasField("t")}

    is_old = read_opset(model) < 14

    def is_training(node: Any) -> bool:
        if node.op_type == "BatchNormalization":
            # Up to opset 13, further named outputs (the batch's statistics) mean training.
            return any(a.name == "training_mode" and a.i for a in node.attribute) or (is_old and any(node.output[1:]))
        flag = constants.get(node.input[2]) if node.op_type == "Dropout" and len(node.input) > 2 else None
        return flag is not None and bool(to_array(flag).any())

    operators = sorted({node.op_type for node in nodes if is_training(node)})
    remedy = "its outputs may be random or depend on the rest of the batch; export it after model.eval()"
    return [f"{AS_IN_TRAINING} ({' and '.join(operators)}): {remedy}"] if operators else []


def warn_steps(model: Any, described: Set[str]) -> list[str]:
    """Return a warning if inputs without a description set the steps of a loop or the lengths of a recurrent layer."""
    names: set[str] = set()
    for node in reversed(model.graph.node):  # readers first
        if node.op_type in UNCHANGED and node.output[0] in names:
            names.add(node.input[0])
        elif len(node.input) > STEP_INPUTS.get(node.op_type, len(node.input)):
            names.add(node.input[STEP_INPUTS[node.op_type]])
    step_inputs = [value.name for value in model.graph.input if value.name in names and value.name not in described]
    if not step_inputs:
        return []
    return [f"{DRAWN_STEPS} ({', '.join(step_inputs)}): give it with --input {step_inputs[0]}=VALUE"]


def order(model: Any) -> str:
    """Sort each graph's nodes topologically, as ONNX requires; nodes in a cycle keep their place.

    ONNX Runtime's conversion to FP16 leaves them unsorted.
    """
    graphs = [graph for graph in graphs_in(model.graph) if _order_nodes(graph)]
    return "nodes stood before their inputs' nodes, and were sorted" if graphs else ""


def _order_nodes(graph: Any) -> bool:
    makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    sources = [{makers[name] for name in reads_of(node) if name in makers} for node in graph.node]
    if all(i > max(before, default=-1) for i, before in enumerate(sources)):
        return False
    try:
        indices = [*TopologicalSorter(dict(enumerate(sources))).static_order()]
    except CycleError:
        return False
    set_nodes(graph, [graph.node[i] for i in indices])
    return True


def name_domain(model: Any) -> str:
    """Rename the domain ai.onnx, which only ONNX Runtime reads, to the empty name; return what changed."""
    nodes = [node for graph in graphs_in(model.graph) for node in graph.node if node.domain == ONNX_DOMAINS[1]]
    for entry in (*nodes, *model.opset_import):
        entry.domain = "" if entry.domain == ONNX_DOMAINS[1] else entry.domain
    return "nodes named ONNX's own domain, which not every engine reads, and no longer do" if nodes else ""


def hide_foreign_operators(model: Any) -> bool:
    """Move operators that ONNX does not define, such as TensorRT's plug-ins, into a domain ignored by the checker.

    Return whether any was moved: operators in ONNX's own domain, or in a domain without a version in the file.
    """
    import onnx

    domains = {entry.domain for entry in model.opset_import} - {*ONNX_DOMAINS}
    functions = {(function.domain, function.name) for function in model.functions}
    nodes = [
        node
        for graph in graphs_in(model.graph)
        for node in graph.node
        if (node.domain, node.op_type) not in functions
        and node.domain not in domains
        and isinstance(node.op_type, str)  # the checker reports names that are no text
        and not (node.domain in ONNX_DOMAINS and onnx.defs.has(node.op_type))
    ]
    for node in nodes:
        node.domain = HIDDEN_DOMAIN
    if nodes:
        model.opset_import.add(domain=HIDDEN_DOMAIN, version=1)
    return bool(nodes)


def save(model: Any, path: Path) -> None:
    """Write the graph, with external weights if they are too large for one file."""
    import onnx

    is_large = sum(len(tensor.raw_data) for tensor in tensors_in(model.graph)) > MAX_INLINE_B
    onnx.save(model, path, save_as_external_data=is_large, location=f"{path.name}.data")


def to_fp32(model: Any, recipe: Recipe, parent: Artifact, folder: Path) -> tuple[Any, MakerFacts]:
    """Return an FP16 or BF16 graph in FP32, the source of other precisions, and facts with a warning."""
    import onnx

    kinds, precision = onnx.TensorProto, read_graph_facts(model).precision
    retype(model, (kinds.FLOAT16, kinds.BFLOAT16), kinds.FLOAT)
    warning = f"made from a file in {precision}: its weights have that file's rounding in every precision"
    facts = MakerFacts(scheme="FP32, weights as rounded before", warnings=(warning,))
    return onnx.shape_inference.infer_shapes(model), facts


def retype(model: Any, kinds: tuple[int, ...], target: int, weights: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Convert everything of the types `kinds` to type `target`: weights, constants, inputs, outputs and casts.

    `weights` has the unrounded weights by name.
    """
    import onnx

    dtype = onnx.helper.tensor_dtype_to_np_dtype(target)
    for tensor in tensors_in(model.graph):
        if tensor.data_type in kinds:
            values = onnx.numpy_helper.to_array(weights.get(tensor.name, tensor)).astype(dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for graph in graphs_in(model.graph):
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type in kinds:
                value.type.tensor_type.elem_type = target
        del graph.value_info[:]  # to be inferred again
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name in ("to", "dtype") and attribute.i in kinds:
                    attribute.i = target


def find_free_axes(value: Any) -> list[int]:
    """Return the axes of an input or output without a length, or with a placeholder.

    Some tools store -1 for free axes, or 0 for the batch (PaddlePaddle) and an image's sides. Elsewhere 0 is a length,
    as of an initially empty cache.
    """
    dims = value.type.tensor_type.shape.dim
    shape = tuple(dim.dim_value if dim.dim_value > 0 else dim.dim_param for dim in dims)
    is_image_input = is_image(Tensor(value.name, "float32", shape))
    return [
        axis
        for axis, dim in enumerate(dims)
        if dim.dim_value < 0 or (dim.dim_value == 0 and (is_image_input or not axis or not dim.HasField("dim_value")))
    ]


def _free_axes(model: Any) -> str:
    values = [v for v in (*model.graph.input, *model.graph.output) if v.type.HasField("tensor_type")]
    weights = {tensor.name for tensor in model.graph.initializer}
    changes = []
    for value in values:
        for axis in find_free_axes(value):
            dim = value.type.tensor_type.shape.dim[axis]
            if value.name not in weights and dim.HasField("dim_value"):
                changes.append(f"{value.name} axis {axis} ({dim.dim_value})")
                dim.dim_param = "batch" if axis == 0 else f"{value.name}_{axis}"
    if not changes:
        return ""
    del model.graph.value_info[:]  # with the same wrong lengths
    return f"axes stored as less than 1 are read as free axes: {', '.join(changes)}"


def _remove_weight_inputs(model: Any) -> str:
    """Remove weights from the inputs: from IR version 4 on they could be fed, so ONNX Runtime wouldn't fold them."""
    import onnx

    if model.ir_version <= onnx.IR_VERSION_2017_11_3 or not (count := drop_weight_inputs(model.graph)):
        return ""
    return f"{count} weights were listed as inputs too and no longer are: ONNX Runtime doesn't fold inputs"


def _inline_functions(model: Any) -> str:
    """Inline the file's own functions, unsupported by OpenVINO and TensorRT; ONNX Runtime treats both forms alike."""
    if not model.functions:
        return ""
    names = ", ".join(f"{function.domain}.{function.name}" for function in model.functions)
    model.CopyFrom(_in_line(model))
    return f"the file's own functions were inlined, as not every engine reads them: {names[:200]}"


def _in_line(model: Any) -> Any:
    """Return the model with its functions inlined.

    Nodes of a call `a` are named `a/…`; else two calls of a function would differ only by a number.
    """
    import onnx.inliner

    functions = {_make_key(f, f.name): f for f in model.functions}
    inlined, remaining = copy_message(model), len(functions) + 1
    while 0 < len(inlined.functions) < remaining:  # outer functions first: their calls' attributes are known
        remaining = len(inlined.functions)
        _give_defaults(inlined)
        callees = {(node.domain, node.op_type) for f in inlined.functions for node in _nodes_of(f)}
        outer = [(f.domain, f.name) for f in inlined.functions if (f.domain, f.name) not in callees]
        inlined = onnx.inliner.inline_selected_functions(inlined, outer)
    inlined = onnx.inliner.inline_local_functions(inlined)
    _rename_nodes(
        model.graph.node,
        inlined.graph.node,
        functions,
        "",
        {node.name for graph in graphs_in(inlined.graph) for node in graph.node},
    )
    return inlined


def _make_key(message: Any, name: str) -> tuple[str, str, str]:
    return message.domain, name, getattr(message, "overload", "")


def _nodes_of(function: Any) -> list[Any]:
    """Return a function's nodes, including those of its inner graphs."""
    nodes = list(function.node)
    for node in function.node:
        nodes += [inner for outer in graphs_of(node) for graph in graphs_in(outer) for inner in graph.node]
    return nodes


def _give_defaults(model: Any) -> None:
    """Write functions' default attributes into calls that lack them: onnx's inliner drops them."""
    functions = {_make_key(f, f.name): f for f in model.functions}
    for node in (node for graph in graphs_in(model.graph) for node in graph.node):
        if function := functions.get(_make_key(node, node.op_type)):
            names = {attribute.name for attribute in node.attribute}
            node.attribute.extend(attribute for attribute in function.attribute_proto if attribute.name not in names)


def _rename_nodes(
    before: Sequence[Any], after: Sequence[Any], functions: Functions, prefix: str, names: set[str]
) -> None:
    """Name the nodes of an inlined graph; names stay if the operators' order has changed."""
    entries = [*_iter_called_nodes(before, functions, prefix)]
    if [node.op_type for node, *_ in entries] != [node.op_type for node in after]:
        return
    for (node, call, name), new_node in zip(entries, after, strict=True):
        if call:
            new_node.name = next(label for k in count(1) if (label := f"{name}_{k}" if k > 1 else name) not in names)
            names.add(new_node.name)
        for graph, inner in zip(graphs_of(node), graphs_of(new_node), strict=False):
            _rename_nodes(graph.node, inner.node, functions, call, names)


def _iter_called_nodes(nodes: Sequence[Any], functions: Functions, call: str) -> Iterator[tuple[Any, str, str]]:
    """Yield each remaining node, its enclosing calls ("" if none), and its name with theirs."""
    names = {""}
    for k, node in enumerate(nodes):
        name = node.name if node.name not in names else f"{node.name or node.op_type}_{k}"
        names.add(name)
        name = call + name
        function = functions.get(_make_key(node, node.op_type))
        if function is None:
            yield node, call, name
        else:
            yield from _iter_called_nodes(function.node, functions, f"{name}/")


def _convert_doubles(model: Any) -> str:
    import onnx

    kinds, graph = onnx.TensorProto, model.graph
    sizes = dict.fromkeys((kinds.DOUBLE, kinds.FLOAT), 0)
    for tensor in tensors_in(graph):
        if tensor.data_type in sizes:
            sizes[tensor.data_type] += int(np.prod(tensor.dims))
    has_double_input = any(value.type.tensor_type.elem_type == kinds.DOUBLE for value in graph.input)
    if not has_double_input and sizes[kinds.DOUBLE] <= sizes[kinds.FLOAT]:
        return ""
    if any(tensor.external_data for tensor in tensors_in(graph) if tensor.data_type == kinds.DOUBLE):
        return ""
    retype(model, (kinds.DOUBLE,), kinds.FLOAT)
    return IN_SINGLE


# ONNX graphs in another opset, for engines with an older parser or for newer types
#
# Rewriting must keep the nodes' metadata, which name their modules.

ONNX_DOMAINS = ("", "ai.onnx")
SPLIT_SIZES_OPSET = 13  # first opset with Split's sizes as an input; from 18 on also with their number
HIDDEN_DOMAIN = "dyno.hidden"  # domain ignored by ONNX's converter and checker


def read_opset(model: Any) -> int:
    """Return the graph's opset of ONNX's own operators; 0 if it doesn't use them."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ONNX_DOMAINS), 0)


def convert_opset(model: Any, opset: int) -> Any:
    """Return the graph in the wanted opset, checked; raise a `UserError` if an operator has no form there."""
    import onnx
    import onnx.version_converter

    if read_opset(model) == opset:
        return model
    _drop_defaults(model.graph)
    _spell_out_axes(model.graph)
    try:
        with _splits_hidden(model) if read_opset(model) > opset >= SPLIT_SIZES_OPSET else nullcontext():
            converted = _unhide_nodes(onnx.version_converter.convert_version(model, opset))
        onnx.checker.check_model(converted, full_check=True)
    except (RuntimeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as e:
        reason = shorten(e, 200)
        raise UserError(f"the graph can't be written in opset {opset} instead of {read_opset(model)}: {reason}") from e
    return with_metadata(converted, model)


def with_metadata(rewritten: Any, model: Any) -> Any:
    """Return the `rewritten` model with the metadata of the original nodes of equal names.

    Libraries that rewrite graphs drop it.
    """
    metadata = {node.name: node.metadata_props for node in model.graph.node if node.name and node.metadata_props}
    for node in rewritten.graph.node:
        if node.name in metadata and not node.metadata_props:
            node.metadata_props.extend(metadata[node.name])
    return rewritten


def lower_file(path: Path, opset: int) -> None:
    """Rewrite the file in the wanted opset if its own is later; raise a `UserError` if that is impossible."""
    import onnx

    if read_opset(onnx.load(path, load_external_data=False)) <= opset:
        return
    try:
        onnx.save(convert_opset(onnx.load(path), opset), path)
    except ValueError as e:  # protobuf's limit, with external weights
        raise UserError(f"a graph over 2 GiB can't be brought down to opset {opset}") from e


def _drop_defaults(graph: Any) -> None:
    """Remove `noop_with_empty_axes=0`, a default that ONNX's converter keeps in opsets without it."""
    for node in graph.node:
        for attribute in list(node.attribute):
            if attribute.name == "noop_with_empty_axes" and attribute.i == 0:
                node.attribute.remove(attribute)


def _spell_out_axes(graph: Any) -> None:
    """Store int64 lists as numbers: onnx's converter below 1.22 makes axes stored as bytes an empty list."""
    from onnx import TensorProto, helper, numpy_helper

    values = [attribute.t for node in graph.node if node.op_type == "Constant" for attribute in node.attribute]
    for tensor in (*graph.initializer, *values):
        if tensor.data_type == TensorProto.INT64 and len(tensor.dims) == 1 and tensor.HasField("raw_data"):
            numbers = numpy_helper.to_array(tensor).tolist()
            tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.INT64, tensor.dims, numbers))


@contextmanager
def _splits_hidden(model: Any) -> Iterator[None]:
    """Move Split nodes to a domain that ONNX's converter ignores: it can't convert them to below opset 18.

    Their sizes are written out, which means the same in both opsets; nodes of unknown sizes stay.
    """
    import onnx

    nodes = [node for node in model.graph.node if node.op_type == "Split" and node.domain in ONNX_DOMAINS]
    if nodes:
        inferred = onnx.shape_inference.infer_shapes(model).graph
        shapes = {
            value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*inferred.value_info, *inferred.input)
        }
        nodes = [node for node in nodes if _with_sizes(model.graph, node, shapes.get(node.input[0], []))]
        model.opset_import.add(domain=HIDDEN_DOMAIN, version=1)
    for node in nodes:
        node.domain = HIDDEN_DOMAIN
    yield
    for node in nodes:
        node.domain = ""


def _with_sizes(graph: Any, node: Any, shape: Sequence[int]) -> bool:
    """Give the Split node its sizes as an input instead of their number; return whether they are known."""
    options = {attribute.name: attribute for attribute in node.attribute}
    if len(node.input) < 2:
        axis = options["axis"].i if "axis" in options else 0
        length = shape[axis] if -len(shape) <= axis < len(shape) else 0
        if not length:
            return False
        # Equal parts; the last may be shorter.
        part_length = -(-length // len(node.output))
        sizes = [min(part_length, length - start) for start in range(0, part_length * len(node.output), part_length)]
        node.input.append(add_weight(graph, f"{node.output[0]}_sizes", np.asarray(sizes, np.int64)))
    if "num_outputs" in options:
        node.attribute.remove(options["num_outputs"])
    return True


def _unhide_nodes(model: Any) -> Any:
    """Return the converted graph with its hidden nodes back in ONNX's own domain."""
    for node in model.graph.node:
        if node.domain == HIDDEN_DOMAIN:
            node.domain = ""
    entries = [entry for entry in model.opset_import if entry.domain != HIDDEN_DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(entries)
    return model
