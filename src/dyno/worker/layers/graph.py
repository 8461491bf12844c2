"""The nodes of an ONNX graph: inferred shapes, weights, operations, and each node's modules."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dyno.worker.facts.job import LAYERS, NODES, Layer, LayerGraph, Port
from dyno.worker.inputs import modules
from dyno.worker.nets import flops, models, saved_modules
from dyno.worker.onnx_graph.file import import_onnx, read_io
from dyno.worker.onnx_graph.graph_facts import check_files_beside, open_graph
from dyno.worker.onnx_graph.repair import read_opset
from dyno.worker.sessions.onnx_runtime_session import Kernel, Profile
from dyno.worker.sessions.torch_support import import_torch, walk_tensors
from dyno.worker.spec import Dims, InputSpec, ModelSpec

SCOPES_KEY = "pkg.torch.onnx.name_scopes"  # node metadata of PyTorch's newer exporter: modules, outermost first
CLASSES_KEY = "pkg.torch.onnx.class_hierarchy"  # the classes of these modules
# Dyno's wrapper of modules with described inputs at export, and its name of the inner module
WRAPPED, WRAPPER = "dyno.worker.sessions.torch_support.make_positional.", "model"
LOST_MODULE = "_empty_nn_module_stack_from_metadata_hook"  # the exporter's name of a lost module
UNKNOWN_SHAPE = (-1,)  # not even the number of dimensions is known


def read_graph(path: str, shapes: Mapping[str, tuple[int, ...]]) -> LayerGraph:
    """Read the file's nodes for inputs of these shapes, in the file's order; constants aren't nodes.

    A node's type is its operator, or `domain.Operator` outside the standard domain. Raise a `UserError` for a file that
    is missing, damaged, or lacks its external weights.
    """
    read_io(path)
    check_files_beside(path)
    return read_nodes(path, shapes)


def read_nodes(path: str, shapes: Mapping[str, tuple[int, ...]]) -> LayerGraph:
    """Read the nodes like `read_graph`, of a complete file; its weights may be in other files."""
    onnx = import_onnx()
    model = onnx.load(path, load_external_data=False)
    inferred = flops.with_shapes(model, shapes)
    graph, inferred_shapes = inferred if inferred else (model.graph, {})
    reader = _GraphReader(onnx, graph, model, inferred_shapes)
    layers = tuple(reader.read_layer(node) for node in graph.node if node.op_type != "Constant")
    unknowns = sum(any(-1 in port.shape or not port.dtype for port in layer.outputs) for layer in layers)
    notes: tuple[str, ...] = (f"the shapes of {unknowns} of {len(layers)} nodes can't be inferred",) * bool(unknowns)
    if uncounted := sum(layer.flops is None for layer in layers):
        reason = "their shapes, or how often a branch or a loop runs, aren't known"
        notes += (f"the operations of {uncounted} of {len(layers)} nodes are not counted: {reason}",)
    title = f"ONNX opset {read_opset(model)}"
    return LayerGraph(form=NODES, library=title, parameters=reader.weight_count, layers=layers, notes=notes)


class _GraphReader:
    """A reader of a graph's nodes as layers, with its constants, types and shapes."""

    def __init__(self, onnx: Any, graph: Any, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes, self._scope = dict(shapes), open_graph(model)
        self._types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
        types = {*self._types.values()}
        self._type_names = {kind: str(onnx.helper.tensor_dtype_to_np_dtype(kind)) if kind else "" for kind in types}
        self._readers = Counter(name for node in graph.node for name in node.input)
        self._wrapped = any(
            WRAPPED in e.value for node in graph.node for e in node.metadata_props if e.key == CLASSES_KEY
        )
        self._counted: set[str] = set()
        self.weight_count = 0

    def read_layer(self, node: Any) -> Layer:
        """Return the node as a layer, and add its new weights, which no earlier node has, to `self.stored`."""
        weights = self._scope.list_weights(node)
        pairs = (pair for scope in self._scope.list_inner(node) for pair in scope.walk())
        inner_weights = (weight for scope, inner_node in pairs for weight in scope.list_weights(inner_node))
        sizes = {weight.key: weight.count for weight in (*weights, *inner_weights)}
        new_keys = sizes.keys() - self._counted
        self._counted |= new_keys
        self.weight_count += sum(sizes[key] for key in new_keys)
        kind = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
        name = name_node(node)
        operator = node.op_type.removeprefix("Fused")
        count = flops.of_node(node, self._shapes) if operator in flops.PRODUCT_OPERATORS else 0
        return Layer(
            name=name,
            type=kind,
            inputs=tuple(self._make_port(n) for n in node.input if n and n not in self._scope.constants),
            outputs=tuple(self._make_port(n) for n in node.output if n),
            parameters=sum(sizes.values()),
            shared=sum(sizes[key] for key in sizes.keys() - new_keys),
            flops=None if flops.has_products_inside(node) else count,
            modules=self._find_modules(node, [weight.name for weight in weights if self._readers[weight.name] == 1]),
            nodes=(name,),
        )

    def _find_modules(self, node: Any, weights: list[str]) -> tuple[str, ...]:
        owners = _find_owners(node, weights)
        if not self._wrapped:
            return owners
        names = [name for name in owners if name]  # the wrapper's own nodes are a program's, which has lost its names
        return tuple("" if name == WRAPPER else name.removeprefix(f"{WRAPPER}.") for name in names)

    def _make_port(self, name: str) -> Port:
        shape = tuple(length or -1 for length in self._shapes.get(name, UNKNOWN_SHAPE))
        return Port(name, shape, self._type_names.get(self._types.get(name, 0), ""))


def name_node(node: Any) -> str:
    """Return the node's name; a nameless node is named after its operator and output."""
    return node.name or f"{node.op_type} to {next(iter(node.output), '')}"


def _find_owners(node: Any, weights: list[str]) -> tuple[str, ...]:
    """Return the modules that a node came from, by their innermost names.

    They are from PyTorch's own metadata, else from the path in the node's name, and from the names of weights that no
    other node has, as for a convolution with a folded batch norm.
    """
    owners = [name.rpartition(".")[0] for name in weights if "." in name and "::" not in name]
    scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES_KEY), "")
    if scopes and node.op_type not in flops.PRODUCT_OPERATORS:  # a shared weight has one name
        owners = []
    if scopes:
        try:
            parts = ast.literal_eval(scopes)
        except (ValueError, SyntaxError):
            parts = []
        owners += [str(part) for part in parts[:-1][-1:] if part != LOST_MODULE]  # the last is the operator's own name
    elif node.name.startswith("/"):  # /layer1/layer1.0/conv1/Conv, by the older exporter
        owners.append(_join_scopes(node.name.split("/")[1:-1]))
    return tuple(dict.fromkeys(owners))


def _join_scopes(parts: list[str]) -> str:
    """Return a module's name from its scopes; a container's element repeats the container's name (layer1, layer1.0)."""
    path: list[str] = []
    for part in parts:
        if path and part.startswith(f"{path[-1]}."):
            path.pop()
        path.append(part)
    return ".".join(path)


# ONNX Runtime's optimised graph: the nodes actually run, with a profile's shapes and types

PROFILE_TYPES = {"float": "float32", "double": "float64"}
COPY_OPERATORS = ("MemcpyFromHost", "MemcpyToHost")
MOVE_OPERATORS = ("Cast", "ReorderInput", "ReorderOutput", *COPY_OPERATORS)


def read_optimised_graph(path: str, source: str, profile: Profile, library: str) -> LayerGraph:
    """Read the optimised file's nodes as an engine's layers; a Transpose missing in the source is a conversion.

    Nodes without an event in the profile were not run. Raise a `UserError` for an unreadable file.
    """
    graph = read_nodes(path, {})
    source_names = {name_node(node) for node in _read_nodes(source)}
    layers, blocked_names = [], set[str]()
    for layer, kernel in zip(graph.layers, list_kernels(graph.layers, profile.outer, source), strict=True):
        operator = _name_operator(layer)
        is_move = operator in MOVE_OPERATORS or (operator == "Transpose" and layer.name not in source_names)
        layer = replace(layer, moves=is_move, computes_in=profile.computed_in.get(kernel, "") if kernel else "")
        layer = _apply_profile(layer, profile.outer[kernel] if kernel else None)
        # Only a reordering ends the layout; elementwise operators keep it.
        is_blocked = ".nchwc." in layer.type or any(port.name in blocked_names for port in layer.inputs)
        if is_blocked and operator != "ReorderOutput":
            blocked_names |= {port.name for port in layer.outputs}
            layer = replace(layer, outputs=tuple(replace(port, format="nchwc") for port in layer.outputs))
        layers.append(layer)
    return replace(graph, form=LAYERS, library=library, layers=tuple(layers), notes=())


def list_kernels(layers: Sequence[Layer], kernels: Iterable[Kernel], source: str = "") -> list[Kernel | None]:
    """Return the kernel of each layer, None if it was not run; layers of equal name get theirs in order.

    ONNX Runtime names a nameless node by its operator and number: its place in the source file, if it comes from there.
    Other nodes, such as those of an inlined function, get theirs in order too.
    """
    pending: dict[str, list[Kernel]] = {}
    for kernel in sorted(kernels, key=lambda each: int(each[1] or 0)):
        pending.setdefault(kernel[0].removesuffix("_kernel_time"), []).append(kernel)
    names = {n.output[0]: f"{n.op_type}_{k}" for k, n in enumerate(_read_nodes(source)) if n.output and not n.name}
    layer_kernels: list[Kernel | None] = []
    for layer in layers:
        stems = (layer.name, names.get(layer.outputs[0].name, "") if layer.outputs else "")
        queue = next((pending[stem] for stem in stems if pending.get(stem)), None)
        layer_kernels.append(queue.pop(0) if queue else None)
    rest = sorted((one for each in pending.values() for one in each), key=lambda each: int(each[1] or 0))
    for k, layer in enumerate(layers):
        name = _name_operator(layer)
        if layer_kernels[k] is None and layer.outputs and layer.name == f"{name} to {layer.outputs[0].name}":
            layer_kernels[k] = next((each for each in rest if each[0] == f"{name}_{each[1]}_kernel_time"), None)
            rest = [each for each in rest if each != layer_kernels[k]]
    return layer_kernels


def _read_nodes(source: str) -> Sequence[Any]:
    nodes: Sequence[Any] = import_onnx().load(source, load_external_data=False).graph.node if source else ()
    return nodes


def _apply_profile(layer: Layer, event: Mapping[str, Any] | None) -> Layer:
    """Return the layer with its entry in the profile; shapes are the run's, which the file may lack."""
    layer = replace(layer, flops=None, modules=(), skipped=event is None)
    if event is None:
        return layer
    entries = event.get("output_type_shape") or ()
    tensors = [(PROFILE_TYPES.get(k, k), tuple(shape)) for entry in entries for k, shape in entry.items()]
    outputs = [replace(p, shape=s, dtype=d) for p, (d, s) in zip(layer.outputs, tensors, strict=False)]
    provider = str(event.get("provider", "")).removesuffix("ExecutionProvider")
    return replace(layer, outputs=tuple(outputs) or layer.outputs, tactic=provider)


def _name_operator(layer: Layer) -> str:
    return layer.type.rpartition(".")[2]


# A program of torch.export as its original modules, so that hooks can watch its parts


def list_program_parts(model: ModelSpec, dims: Dims) -> Any:
    """Return the stored program's modules under their own names; None for another model, or if PyTorch can't.

    Return None as well if the modules' outputs differ from the program's: both run once, on the CPU in float32.
    """
    kind, path = models.parse(model.source) if model.source else ("", "")
    if kind != "saved" or not path.endswith(saved_modules.PROGRAM_SUFFIX):
        return None
    specs = model.inputs or (InputSpec("input", "float32", ("batch", model.channels, "height", "width")),)
    try:
        module = _name_classes(saved_modules.load_unflattened(path))
        _check_same(models.build(model, dims), module, lambda: modules.make_example(model, specs, dims))
    except MemoryError:
        raise
    except Exception:  # torch's unflatten refuses some programs
        return None
    return module


def _name_classes(module: Any) -> Any:
    """Name the classes like the originals; torch would name them all InterpreterModule."""

    def list_inner_modules(self: Any, *args: Any, **keywords: Any) -> Any:
        """Return the `named_modules` inside Dyno's wrapper, which itself runs nothing."""
        return self.model.named_modules(*args, **keywords)

    is_wrapped, aten = module.type_name().startswith(WRAPPED), import_torch().ops.aten
    kinds = {part: part.type_name() for part in module.modules() if hasattr(part, "type_name")}
    for part, kind in kinds.items():
        attributes = {"named_modules": list_inner_modules} if is_wrapped and part is module else {}
        name = kinds[part.model] if attributes else kind
        if name:
            part.__class__ = type(name.rpartition(".")[2], (type(part),), attributes)
        part._run_with_interpreter = False  # the compiled program is faster than the interpreter
        constants = {key: value for key, value in vars(part).items() if hasattr(value, "detach")}
        for key, value in constants.items():  # else they wouldn't move to a GPU
            delattr(part, key)
            part.register_buffer(key, value, persistent=False)
        if hasattr(part, "finalize"):
            for node in part.graph.nodes:
                if node.target is aten.view.default:  # view rejects results of unfused attention
                    node.target = aten.reshape.default
            part.finalize()  # updates code that is older than the graph if a part is called twice
    module.check_input_constraints = False  # checks at every call cost time
    return module


def _check_same(program: Any, module: Any, example: Callable[[], tuple[Any, Any]]) -> None:
    """Raise an `AssertionError` if outputs differ; each run gets a fresh example, since it may overwrite it."""
    torch = import_torch()
    results = []
    with torch.no_grad():
        for model in (program, module):
            torch.manual_seed(0)  # the program may use random numbers
            args, keywords = example()
            results.append(list(walk_tensors(model(*args, **keywords))))
    torch.testing.assert_close(*results, equal_nan=True)
    args, keywords = example()
    with flops.count_operations():  # counting runs operators in other forms
        module(*args, **keywords)
