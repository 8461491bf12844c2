"""Facts of an ONNX graph: its weights wherever they are stored, their type, and whether it is quantised.

Weights are initialisers (dense or sparse) and Constant nodes of the graph, its branches and loops, and the file's own
functions. Casts, transpositions and dequantisations may stand between a weight and its layer.
"""

from __future__ import annotations

import math
import mmap
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dyno.worker.facts.engine import COMPUTE_LAYER, QUANTISED_PRECISIONS
from dyno.worker.inputs.specs import MAX_IMAGE_CHANNELS
from dyno.worker.record import refuse_pointer
from dyno.worker.spec import UserError

# Inputs that are weights, for operators with other constants too: scales, statistics, limits, shapes
WEIGHT_INPUTS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2), "QuantizeLinear": (0,), "DequantizeLinear": (0,), "Clip": (0,), "Pad": (0,),
    "Resize": (0,), "Slice": (0,), "Expand": (0,), "Tile": (0,), "OneHot": (), "QLinearConv": (0, 3, 8),
    "QLinearMatMul": (0, 3), "QGemm": (0, 3, 6), "QLinearAdd": (0, 3), "QLinearMul": (0, 3), "MatMulInteger": (0, 1),
    "MatMulIntegerToFloat": (0, 1, 6), "DynamicQuantizeMatMul": (0, 1, 4), "ConvInteger": (0, 1),
    "QLinearGlobalAveragePool": (0,), "QLinearAveragePool": (0,), "QLinearSigmoid": (0,), "QLinearConcat": (),
    "QLinearSoftmax": (0,), "QLinearLeakyRelu": (0,), "MatMulNBits": (1, 5), "MatMulBnb4": (1,),
    "GatherBlockQuantized": (0,), "QAttention": (1, 2), "DynamicQuantizeLSTM": (1, 2, 3, 7),
    "QMoE": (2, 4, 5, 7, 8, 10), "QEmbedLayerNormalization": (2, 3, 4, 5, 6),
}  # fmt: skip
# Operators that multiply or look up weights of few bits; a file with them is quantised
QUANTISED_OPERATORS = {
    "QLinearConv", "QLinearMatMul", "QGemm", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits",
    "MatMulBnb4", "GatherBlockQuantized", "QAttention", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "QMoE",
    "QEmbedLayerNormalization",
}  # fmt: skip
# Operators with several weights per byte: inputs, and the attribute with a weight's number of bits
PACKED_INPUTS = {
    "MatMulNBits": ((1,), "bits"), "GatherBlockQuantized": ((0,), "bits"), "QMoE": ((2, 5, 8), "expert_weight_bits"),
}  # fmt: skip
PASSED_ON = {"Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}  # operators that keep values
RECODING_OPERATORS = {"Cast", "Identity", "QuantizeLinear", "DequantizeLinear"}  # change the form of values
SCALING_OPERATORS = {"Mul", "Div", "Sub", "Add"}  # operators after a Cast that dequantise packed weights
BIASED_OPERATORS = {"DequantizeLinear", "QLinearConv", "QGemm"}  # operators with biases of 32 bits
# operators that broadcast a single constant number
SCALAR_OPERATORS = {"Add", "Sub", "Mul", "Div", "Pow", "Where", "Max", "Min"}


@dataclass(frozen=True)
class Constant:
    """A stored tensor: `key` is the same for all readers, `kind` its type's name (after casts, theirs).

    `count` is the number of values; `dims` are the stored dimensions.
    """

    key: str
    kind: str
    dims: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.dims)


@dataclass(frozen=True)
class Weight:
    """A constant read by a node as a weight, by its name there; a packed constant's `count` is its number of values."""

    name: str
    key: str
    kind: str
    count: int


class Scope:
    """The constants readable by one graph's nodes: its own, the enclosing graphs', and a call's arguments."""

    def __init__(
        self,
        graph: Any,
        functions: Mapping[tuple[str, str, str], Any],
        prefix: str = "",
        outer: Mapping[str, Constant] | None = None,
        arguments: Mapping[str, Constant] | None = None,
    ) -> None:
        self.graph, self._functions, self._prefix = graph, functions, prefix
        self.constants = {**(outer or {}), **{c.key.removeprefix(prefix): c for c in _iter_constants(graph, prefix)}}
        self._behind = dict(arguments or {})  # constants by casted, reshaped or dequantised tensor
        for node in graph.node:
            if node.output and (source := self._trace_constant(node)) is not None:
                self._behind[node.output[0]] = source

    def list_weights(self, node: Any, *, deep: bool = False) -> list[Weight]:
        """Return a node's constant inputs that are weights: with dimensions, and no indices, scales or limits.

        With `deep`, also those before casts, transpositions and dequantisations, as a compute layer multiplies them.
        """
        weights = []
        for index, name in enumerate(node.input):
            constant = self.find_constant(name) if deep else self.constants.get(name)
            weight = _match_weight(node, index, name, constant) if constant is not None else None
            weights += [weight] if weight is not None else []
        return weights

    def list_inner(self, node: Any) -> Iterator[Scope]:
        """Yield the scopes of a node's branches or loop, and of the function that it calls."""
        outer = {**self.constants, **self._behind}
        for index, graph in enumerate(graphs_of(node)):
            prefix = f"{self._prefix}{next(iter(node.output), node.name)}/{index}/"
            yield Scope(graph, self._functions, prefix, outer)
        key = (node.domain, node.op_type, getattr(node, "overload", ""))
        if (function := self._functions.get(key)) is not None:
            functions = {name: each for name, each in self._functions.items() if name != key}  # functions can't recurse
            arguments = {
                formal: outer[name] for formal, name in zip(function.input, node.input, strict=False) if name in outer
            }
            yield Scope(function, functions, f"{':'.join(key)}/", {}, arguments)

    def walk(self) -> Iterator[tuple[Scope, Any]]:
        """Yield each node of the graph and its inner graphs, with its scope."""
        for node in self.graph.node:
            yield self, node
            for scope in self.list_inner(node):
                yield from scope.walk()

    def find_constant(self, name: str) -> Constant | None:
        """Return the constant of that name, or the constant before casts, transpositions and dequantisations."""
        return self._behind.get(name) or self.constants.get(name)

    def _trace_constant(self, node: Any) -> Constant | None:
        """Return the constant from which the node's result comes, with its type there; None for another result."""
        sources = [self.find_constant(name) for name in node.input]
        first = next(iter(sources), None)
        if node.op_type in SCALING_OPERATORS and all(sources):
            return next((each for each in sources if each is not None and each.kind in QUANTISED_PRECISIONS), None)
        if first is None:
            return None
        if node.op_type in PASSED_ON or node.op_type == "DequantizeLinear":
            return first
        if node.op_type == "Cast":
            return (
                first
                if first.kind in QUANTISED_PRECISIONS
                else replace(first, kind=type_name(_read_attribute(node, "to", 0)))
            )
        if node.op_type == "QuantizeLinear":
            zero = sources[2].kind if len(sources) > 2 and sources[2] is not None else "int8"
            return replace(first, kind=type_name(_read_attribute(node, "output_dtype", 0)) or zero)
        return None


@dataclass(frozen=True)
class GraphFacts:
    """The facts of a graph: parameters, precision, and the compute layers by the type of their weights.

    `quantised_by` is one of its quantised operators, "" without any. `enclosed` counts compute layers with weights
    inside branches, loops or functions, and `enclosing` names the operators around them.
    """

    parameters: int
    precision: str
    layers: Mapping[str, int]
    quantised_by: str
    enclosed: int
    enclosing: tuple[str, ...]


def read_graph_facts(model: Any) -> GraphFacts:
    """Return the facts of a model loaded by `onnx.load`, with or without external data."""
    counts: dict[str, int] = {}
    all_weights, factors, low_bit = dict[str, Weight](), dict[str, Weight](), dict[str, Weight]()
    layers, operators, enclosed = Counter[str](), list[str](), Counter[str]()
    main = open_graph(model)
    for outer in main.graph.node:
        for scope, node in [(main, outer), *(pair for inner in main.list_inner(outer) for pair in inner.walk())]:
            weights = scope.list_weights(node)
            counts |= {weight.key: weight.count for weight in weights}
            all_weights |= {weight.key: weight for weight in weights if weight.kind}
            match = COMPUTE_LAYER.search(node.op_type)
            layer_weights = [weight for weight in scope.list_weights(node, deep=True) if weight.kind] if match else []
            factors |= {weight.key: weight for weight in layer_weights}
            if layer_weights:
                layers[max(layer_weights, key=lambda weight: weight.count).kind] += 1
                enclosed[outer.op_type] += scope is not main
            low_weights = [weight for weight in layer_weights or weights if weight.kind in QUANTISED_PRECISIONS]
            if low_weights and (layer_weights or node.op_type in QUANTISED_OPERATORS):
                low_bit |= {weight.key: weight for weight in low_weights}
                operators.append(node.op_type if node.op_type in QUANTISED_OPERATORS else "DequantizeLinear")
    precision = (
        _find_main_type(low_bit)
        or _find_main_type(factors)
        or _find_main_type(all_weights)
        or _type_of_ends(model.graph)
    )
    enclosing = tuple(name for name, count in enclosed.items() if count)
    parameters, operator = sum(counts.values()), next(iter(operators), "")
    return GraphFacts(parameters, precision, layers, operator, enclosed.total(), enclosing)


def accuracy_levels(path: str) -> dict[str, int] | None:
    """Return the `accuracy_level` of a file's MatMulNBits nodes, by name or operator and place; None without onnx."""
    try:
        import onnx
    except ImportError:
        return None
    graphs = graphs_in(onnx.load(path, load_external_data=False).graph)
    return {
        node.name or f"{node.op_type}_{index}": _read_attribute(node, "accuracy_level", 0)
        for graph in graphs
        for index, node in enumerate(graph.node)
        if node.op_type == "MatMulNBits"
    }


def kernel_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's convolution kernels, by node name or operator and place; {} without onnx."""
    try:
        import onnx
    except ImportError:
        return {}
    model = onnx.load(path, load_external_data=False)
    scope = open_graph(model)
    return {
        node.name or f"{node.op_type}_{index}": constant.dims
        for index, node in enumerate(model.graph.node)
        if "Conv" in node.op_type
        for name in node.input
        if (constant := scope.find_constant(name)) is not None and len(constant.dims) > 2
    }


def find_channels(model: Any, name: str) -> int:
    """Return the number of channels that a convolution of the input needs; 0 without a convolution."""
    scope, names = open_graph(model), {name}
    makers = {output: node for node in model.graph.node for output in node.output}
    for node in model.graph.node:
        if not node.input or node.input[0] not in names:
            continue
        if node.op_type == "Conv":
            kernel = node.input[1]
            while (maker := makers.get(kernel)) is not None and maker.op_type in RECODING_OPERATORS:
                kernel = maker.input[0]
            if (constant := scope.constants.get(kernel)) is not None and len(constant.dims) > 2:
                return constant.dims[1] * _read_attribute(node, "group", 1)
        elif node.op_type in RECODING_OPERATORS | SCALING_OPERATORS:
            names.add(node.output[0])
    return 0


def list_first_steps(model: Any, name: str) -> list[tuple[str, np.ndarray]]:
    """Return the operators by which a graph first adds or multiplies constants to an input, for `find_largest_pixel`.

    A constant is flat, in float64: one number per channel or one for all. [] if a step can't be read.
    """
    constants, steps = _read_small_constants(model.graph), []
    while len(readers := [n for n in model.graph.node if name in n.input and n.op_type != "Shape"]) == 1:
        (node,) = readers
        if node.op_type in SCALING_OPERATORS:
            others = [constants.get(each) for each in node.input if each != name]
            is_reversed = node.op_type in ("Sub", "Div") and node.input[0] != name
            if len(others) != 1 or others[0] is None or is_reversed:
                return []
            steps.append((node.op_type, others[0]))
        elif node.op_type not in ("Cast", "Identity", "Transpose"):
            break
        name = node.output[0]
    return steps


def _read_small_constants(graph: Any) -> dict[str, np.ndarray]:
    """Return the floating-point constants of up to MAX_IMAGE_CHANNELS numbers, flat in float64, by name."""
    from onnx.numpy_helper import to_array

    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                tensors[node.output[0]] = attribute.t
    return {
        name: to_array(tensor).astype(np.float64).reshape(-1)
        for name, tensor in tensors.items()
        if 0 < math.prod(tensor.dims) <= MAX_IMAGE_CHANNELS
        and type_name(tensor.data_type) in ("fp32", "fp16", "bf16")
        and not tensor.external_data
    }


def open_graph(model: Any) -> Scope:
    """Return the scope of a model's graph, with the model's functions."""
    functions = {(f.domain, f.name, getattr(f, "overload", "")): f for f in model.functions}
    return Scope(model.graph, functions)


def graphs_of(node: Any) -> list[Any]:
    """Return the graphs of a node's branches or loop, in the order of their attributes' names."""
    return [
        graph
        for a in sorted(node.attribute, key=lambda a: str(a.name))
        for graph in ([a.g] if a.HasField("g") else [*a.graphs])
    ]


def graphs_in(graph: Any) -> Iterator[Any]:
    """Yield the graph and all graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for inner in graphs_of(node):
            yield from graphs_in(inner)


def reads_of(node: Any) -> list[str]:
    """Return the tensors read by a node and the graphs inside it."""
    names = [name for name in node.input if name]
    for graph in graphs_of(node):
        inner_names = {name for inner in graph.node for name in inner.output}
        inner_names |= {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        names += [name for inner in graph.node for name in reads_of(inner) if name not in inner_names]
        names += [value.name for value in graph.output if value.name not in inner_names]
    return names


def copy_message(message: Any) -> Any:
    """Return a copy of a protobuf message, such as a model or a node."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def set_nodes(graph: Any, nodes: Iterable[Any]) -> None:
    """Replace the graph's nodes; the new nodes may include old ones."""
    nodes = [*nodes]
    del graph.node[:]
    graph.node.extend(nodes)


def add_weight(graph: Any, name: str, values: Any) -> str:
    """Add an initialiser with these values to the graph; return its name."""
    import onnx

    graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values), name))
    return name


def drop_weight_inputs(graph: Any) -> int:
    """Remove initialisers from the graph's inputs; return their number."""
    weights = {tensor.name for tensor in graph.initializer}
    inputs, count = [value for value in graph.input if value.name not in weights], len(graph.input)
    del graph.input[:]
    graph.input.extend(inputs)
    return count - len(inputs)


def tensors_in(graph: Any) -> Iterator[Any]:
    """Yield every tensor in the graph and its inner graphs: initialisers, constants, both parts of sparse ones."""
    for inner in graphs_in(graph):
        yield from inner.initializer
        sparse = [*inner.sparse_initializer]
        for attribute in (a for node in inner.node for a in node.attribute):
            yield from (attribute.t,) if attribute.HasField("t") else attribute.tensors
            sparse += [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else attribute.sparse_tensors
        for tensor in sparse:
            yield from (tensor.values, tensor.indices)


@lru_cache(maxsize=1)
def _list_precisions() -> dict[int, str]:
    """Return the precision of each ONNX type; types of indices, shapes and masks are left out."""
    from onnx import TensorProto

    names = {"FLOAT": "fp32", "DOUBLE": "fp32", "FLOAT16": "fp16", "BFLOAT16": "bf16"}
    for bits in ("8", "4", "2"):
        names |= {f"INT{bits}": f"int{bits}", f"UINT{bits}": f"int{bits}"}
    kinds = dict(TensorProto.DataType.items())
    names |= {name: f"fp{name[5]}" for name in kinds if name.startswith(("FLOAT8E", "FLOAT4E"))}
    return {kinds[name]: precision for name, precision in names.items() if name in kinds}


def type_name(kind: int) -> str:
    """Return the precision of an ONNX type; "" for types of indices, shapes or masks."""
    return _list_precisions().get(kind, "")


def _iter_constants(graph: Any, prefix: str) -> Iterator[Constant]:
    """Yield the constants stored in one graph or function; quantised ones of 16 or 32 bits have the type `int32`."""
    from onnx import TensorProto

    wide = (TensorProto.INT32, TensorProto.INT16, TensorProto.UINT16)

    def make_constant(name: str, kind: int, dims: Sequence[int]) -> Constant:
        type_label = "int32" if kind in wide else type_name(kind)
        return Constant(prefix + name, type_label, tuple(dims))

    for tensor in getattr(graph, "initializer", ()):
        yield make_constant(tensor.name, tensor.data_type, tensor.dims)
    for sparse in getattr(graph, "sparse_initializer", ()):
        yield make_constant(sparse.values.name, sparse.values.data_type, sparse.dims)
    for node in graph.node:
        value = next(iter(node.attribute), None)
        if node.op_type != "Constant" or value is None:
            continue
        if value.HasField("t"):
            yield make_constant(node.output[0], value.t.data_type, value.t.dims)
        elif value.HasField("sparse_tensor"):
            yield make_constant(node.output[0], value.sparse_tensor.values.data_type, value.sparse_tensor.dims)
        else:
            kind = TensorProto.FLOAT if value.name in ("value_float", "value_floats") else TensorProto.INT64
            dims = [len(value.floats or value.ints)] if value.name in ("value_floats", "value_ints") else []
            yield make_constant(node.output[0], kind, dims)


def _match_weight(node: Any, index: int, name: str, constant: Constant) -> Weight | None:
    """Return the constant as the node's weight; None if it is an index, a scale or a limit."""
    indices, kind, count = WEIGHT_INPUTS.get(node.op_type), constant.kind, constant.count
    if (indices is not None and index not in indices) or not constant.dims:
        return None
    if (
        not kind
        or (kind == "int32" and node.op_type not in BIASED_OPERATORS)
        or (node.op_type in SCALAR_OPERATORS and count == 1)
    ):
        return None
    if node.op_type == "MatMulBnb4":
        return Weight(name, constant.key, "fp4", _read_attribute(node, "K", 0) * _read_attribute(node, "N", 0))
    packed_inputs, attribute = PACKED_INPUTS.get(node.op_type, ((), ""))
    if index in packed_inputs and kind == "int8":
        bits = max(_read_attribute(node, attribute, 4), 1)
        kind, count = next(f"int{b}" for b in (2, 4, 8, bits) if bits <= b), count * 8 // bits
        if node.op_type == "MatMulNBits":  # blocks may be longer than a row
            count = _read_attribute(node, "K", 0) * _read_attribute(node, "N", 0)
    return Weight(name, constant.key, "" if kind == "int32" else kind, count)


def _read_attribute(node: Any, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def _find_main_type(weights: Mapping[str, Weight]) -> str:
    """Return the type of most weights; "" without weights."""
    counts = Counter[str]()
    for weight in weights.values():
        counts[weight.kind] += weight.count
    return max(counts, key=lambda kind: counts[kind], default="")


def _type_of_ends(graph: Any) -> str:
    """Return the floating-point type of a graph without weights: its inputs', else its outputs'."""
    kinds = (type_name(value.type.tensor_type.elem_type) for value in (*graph.input, *graph.output))
    return next((kind for kind in kinds if kind and kind not in QUANTISED_PRECISIONS), "fp32")


# External files of an ONNX graph's larger weights

LOCATION_KEY = "location"  # key of an external file
EMPTY_GRAPH = SimpleNamespace(initializer=(), sparse_initializer=(), node=())  # a graph


def list_files_beside(path: Path) -> list[Path]:
    """Return the files of the graph's external weights, by name; [] if it has none or can't be read."""
    with open(path, "rb") as f:
        if not f.seek(0, 2):
            return []
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(LOCATION_KEY.encode()) < 0:  # nearly every graph; reading it may be slow
                return []
    return [path.parent / name for name in sorted({entry.value for entry in _find_entries(_load_graph(path))})]


def check_files_beside(path: str) -> None:
    """Raise a `UserError` if a file of the graph's external weights is missing or too short."""
    files = list_files_beside(Path(path))
    for file in files:
        name = file.relative_to(Path(path).parent) if file.is_relative_to(Path(path).parent) else file
        if name.is_absolute() or ".." in name.parts:
            raise UserError(f"{path} keeps weights in {name}, outside its folder; save it with its weights beside it")
        if not file.is_file():
            raise UserError(f"{path} keeps weights in {file}, which doesn't exist; put it back beside it")
    for tensor in tensors_in(_load_graph(Path(path))) if files else ():
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if LOCATION_KEY in entries:
            extents = {key: entries.get(key) or "0" for key in ("offset", "length")}
            if problem := next((f"{key} {text!r}" for key, text in extents.items() if not text.isdecimal()), ""):
                raise UserError(
                    f"{path} keeps {tensor.name} in another file, at an impossible {problem}; export it again"
                )
            file, end = Path(path).parent / entries[LOCATION_KEY], sum(int(text) for text in extents.values())
            if (size := file.stat().st_size) < end:
                refuse_pointer(file, "weights file")
                raise UserError(
                    f"{path} keeps weights in {file}, which is cut short at {size:,} bytes: {tensor.name} ends at "
                    f"{end:,}; copy it again"
                )


def copy_with_weights(path: Path, out: Path) -> None:
    """Copy the graph to `out` and its weights to OUT.data etc.: graphs in one folder must not share weight files."""
    files = list_files_beside(path)
    if not files:
        shutil.copyfile(path, out)
        return
    import onnx

    model = onnx.load(path, format="protobuf", load_external_data=False)
    names = {file: f"{out.name}.data{k or ''}" for k, file in enumerate(files)}
    for entry in _find_entries(model.graph):
        entry.value = names[path.parent / entry.value]
    for file, name in names.items():
        shutil.copyfile(file, out.with_name(name))
    out.write_bytes(model.SerializeToString())


def _load_graph(path: Path) -> Any:
    """Return the graph without external weights; an empty one if it can't be read."""
    try:
        import onnx
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    except ImportError:
        return EMPTY_GRAPH
    try:
        return onnx.load(path, format="protobuf", load_external_data=False).graph
    except DecodeError:
        return EMPTY_GRAPH


def _find_entries(graph: Any) -> Iterator[Any]:
    return (entry for tensor in tensors_in(graph) for entry in tensor.external_data if entry.key == LOCATION_KEY)
