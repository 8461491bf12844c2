"""An engine for graphs made on the way, and tensors stored on disk."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import Session, answer_feeds
from dyno.worker.onnx_graph.file import import_onnx, read_io
from dyno.worker.onnx_graph.fold import lift_constants
from dyno.worker.onnx_graph.graph_facts import check_files_beside, copy_message, graphs_of, reads_of, set_nodes
from dyno.worker.spec import Artifact, Tensor, Trial, UserError

Feeds = Mapping[str, np.ndarray]
Load = Callable[[Trial, Artifact | None], Session]
INDEX_FILE = "values.json"


class GraphEngine:
    """One backend with a trial's settings, for one graph after another."""

    def __init__(self, load: Load, trial: Trial, folder: Path) -> None:
        self._load, self._trial, self._path = load, trial, folder / "part.onnx"

    @property
    def threads(self) -> int:
        """Number of the engine's threads."""
        return self._trial.runtime.threads

    def run(self, model: Any, feeds: Iterable[Feeds], dtypes: Mapping[str, np.dtype[Any]]) -> list[list[np.ndarray]]:
        """Return the model's outputs, in order, for each of the feeds, cast to the inputs' types.

        Raise a `UserError` for a model over protobuf's 2 GiB.
        """
        import onnx

        try:
            onnx.save(model, self._path)
        except ValueError as e:  # protobuf's limit of 2 GiB
            raise UserError(f"a part of {self._trial.model.name} is too large for one ONNX file ({e})") from e
        first, *rest = ({name: cast(array, dtypes[name]) for name, array in feed.items()} for feed in feeds)
        inputs = tuple(Tensor(value.name, str(first[value.name].dtype), first[value.name].shape)
                       for value in model.graph.input)  # fmt: skip
        artifact = Artifact("onnx", str(self._path), "", 0, self._trial.precision, inputs, (), 0.0)
        shapes = {tensor.name: tensor.shape for tensor in inputs}
        trial = replace(self._trial, dims=replace(self._trial.dims, shapes=shapes))
        session = self._load(trial, artifact)
        try:
            return [run_once(session, feed) for feed in (first, *rest)]
        finally:
            session.close()


def run_once(session: Session, feed: Feeds) -> list[np.ndarray]:
    """Return the session's outputs for the feed, in order."""
    return [*answer_feeds(session, feed).values()]


def cast(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return a copy in that type, readable in place by an engine; overflow gives infinity, as in an engine."""
    with np.errstate(over="ignore"):
        return np.array(array, dtype, order="C")


def match_inputs(names: Sequence[str], inputs: Sequence[str]) -> dict[str, str]:
    """Return the reference's input for each name: by equal name, else by position.

    Raise a `UserError` for a name without a counterpart.
    """
    pairs = {name: name if name in inputs else candidate for name, candidate in zip_longest(names, inputs)}
    if unmatched := [name for name in names if pairs[name] is None]:
        raise UserError(f"input {unmatched[0]!r} has no counterpart; the reference has {', '.join(inputs)}")
    return {name: pairs[name] for name in names}


class StoredTensors:
    """Arrays by name in a folder, [runs, ...] each, with the feeds and outputs of those runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        self._files: dict[str, int] = index["tensors"]
        self._feeds: list[str] = index["feeds"]
        self.runs: int = index["runs"]
        self.outputs: list[np.ndarray] = [self._load_array(f"output{k}") for k in range(index["outputs"])]
        self.shapes = {name: tuple(self[name].shape[1:]) for name in self._files}

    def _load_array(self, name: str) -> np.ndarray:
        array: np.ndarray = np.load(self._folder / f"{name}.npy", mmap_mode="r")
        return array

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> np.ndarray:
        return self._load_array(str(self._files[name]))

    def feeds(self, names: Sequence[str]) -> list[dict[str, np.ndarray]]:
        """Return the inputs of each run under these names; see `match_inputs`."""
        pairs = match_inputs(names, self._feeds)
        arrays = {name: self._load_array(f"feed{self._feeds.index(input_name)}") for name, input_name in pairs.items()}
        return [{name: array[run] for name, array in arrays.items()} for run in range(self.runs)]


class TensorWriter:
    """A writer for `StoredTensors`: `add` each tensor with the values of all runs, then `end`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._files = folder, dict[str, int]()

    def add(self, name: str, runs: Sequence[np.ndarray]) -> None:
        """Store a tensor, unless its shape differs between runs."""
        if len({array.shape for array in runs}) == 1:
            index = self._files.setdefault(name, len(self._files))
            np.save(self._folder / f"{index}.npy", np.stack(runs))

    def end(self, feeds: Sequence[Feeds], outputs: Sequence[Sequence[np.ndarray]]) -> None:
        """Store the feeds and the outputs of the runs, [output][run]."""
        for k, name in enumerate(feeds[0]):
            np.save(self._folder / f"feed{k}.npy", np.stack([feed[name] for feed in feeds]))
        for k, runs in enumerate(outputs):
            if len({array.shape for array in runs}) > 1:
                raise UserError("the outputs have another shape for every input, so nothing can be compared")
            np.save(self._folder / f"output{k}.npy", np.stack(runs))
        if outputs and not any(array.size for runs in outputs for array in runs):
            raise UserError("the outputs have no values for any input, so nothing can be compared")
        index = {"tensors": self._files, "feeds": [*feeds[0]], "runs": len(feeds), "outputs": len(outputs)}
        (self._folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


# An ONNX graph that can be marked and cut into pieces, which are separate graphs for an engine

UNQUANTISED_SUFFIX = "/unquantised"  # suffix of a tensor before quantisation
ISOLATED_SUFFIX = "/isolated"  # suffix of a tensor written by a layer alone
DELTA_SUFFIX = "/delta"  # suffix of the input added to a tensor
Shapes = Mapping[str, tuple[int, ...]]


class Graph:
    """The graph of an ONNX file, with constants as initialisers; an unreadable file raises a `UserError`."""

    def __init__(self, path: str) -> None:
        self._onnx = import_onnx()
        read_io(path)
        check_files_beside(path)
        self.model = lift_constants(self._onnx.load(path))
        graph = self.model.graph
        self.inputs = [value.name for value in graph.input]
        self.outputs = [value.name for value in graph.output]
        self.nodes = _behind_quantisation([*graph.node], {*self.outputs})
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        self._writer = {name: k for k, node in enumerate(self.nodes) for name in node.output if name}
        self._reads = [reads_of(node) for node in self.nodes]
        self._types = self._infer_types()
        self.float_tensors = self._float_tensors()

    def _infer_types(self) -> dict[str, int]:
        """Return each tensor's element type, as far as ONNX's inference knows it."""
        try:
            graph = self._onnx.shape_inference.infer_shapes(self.model).graph
        except (self._onnx.shape_inference.InferenceError, ValueError):
            graph = self.model.graph
        values = (*graph.input, *graph.value_info, *graph.output)
        types = {value.name: value.type.tensor_type.elem_type for value in values}
        sequences = {value.name for value in values if value.type.WhichOneof("value") not in ("tensor_type", None)}
        types |= dict.fromkeys(sequences, self._onnx.TensorProto.STRING)  # sequences aren't tensors, so not compared
        return types | {name: tensor.data_type for name, tensor in self._weights.items()}

    def _float_tensors(self) -> list[str]:
        """Return the floating-point tensors computed from the inputs, in the graph's order."""
        enum = self._onnx.TensorProto
        float_types = (enum.FLOAT, enum.FLOAT16, enum.DOUBLE, enum.UNDEFINED)
        dependents, tensors = {*self.inputs}, []
        for node, reads in zip(self.nodes, self._reads, strict=True):
            if dependents.isdisjoint(reads):
                continue
            outputs = [name for name in node.output if name]
            dependents.update(outputs)
            tensors += [name for name in outputs if self._types.get(name, 0) in float_types]
        return tensors

    def read_dtype(self, tensor: str) -> np.dtype[Any]:
        """Return the tensor's NumPy type; float32 if unknown."""
        kind = self._types.get(tensor) or self._onnx.TensorProto.FLOAT
        dtype: np.dtype[Any] = self._onnx.helper.tensor_dtype_to_np_dtype(kind)
        return dtype

    def read_dtypes(self, tensors: Iterable[str]) -> dict[str, np.dtype[Any]]:
        """Return the tensors' NumPy types by name."""
        return {name: self.read_dtype(name) for name in tensors}

    def walk(self, targets: Iterable[str], stops: Collection[str]) -> tuple[list[int], list[str]]:
        """Return the nodes, in order, that compute the wanted tensors, and the tensors that they start from.

        These are `stops` and the graph's inputs. A wanted tensor is computed even if it is a stop.
        """
        targets = {*targets}
        names, indices, sources = [*targets], set[int](), dict[str, None]()
        while names:
            name = names.pop()
            is_end = name in stops and name not in targets
            if name in self._writer and not is_end:
                k = self._writer[name]
                if k not in indices:
                    indices.add(k)
                    names += self._reads[k]
            elif is_end or name in self.inputs:
                sources[name] = None
        return sorted(indices), [*sources]

    def reads(self, tensor: str, stops: Collection[str]) -> tuple[str, ...]:
        """Return the stops and graph inputs from which a tensor is computed."""
        return tuple(self.walk([tensor], stops)[1])

    def mark(self, tensors: Sequence[str], shapes: Shapes) -> Any:
        """Return the whole graph with the tensors as further outputs."""
        return self._make_part(range(len(self.nodes)), self.inputs, [*self.outputs, *tensors], shapes)

    def extract_piece(self, outputs: Sequence[str], stops: Collection[str], shapes: Shapes) -> tuple[Any, list[str]]:
        """Return the part of the graph that computes the outputs, and the tensors that it reads.

        It starts from the stops and the graph's inputs.
        """
        nodes, inputs = self.walk(outputs, stops)
        return self._make_part(nodes, inputs, outputs, shapes), inputs

    def _make_part(self, indices: Iterable[int], inputs: Sequence[str], outputs: Sequence[str], shapes: Shapes) -> Any:
        return self._build_model(
            [self.nodes[k] for k in indices], inputs, outputs, shapes, {name: name for name in outputs}
        )

    def isolate(self, tensors: Sequence[str], stops: Collection[str], shapes: Shapes) -> tuple[Any, list[str]]:
        """Return a graph that computes each tensor separately from the stops before it, and the tensors that it reads.

        Outputs are named TENSOR/isolated. These layers don't read each other, so an engine fuses nothing across their
        borders.
        """
        nodes, reads = [], dict[str, None]()
        for index, tensor in enumerate(tensors):
            indices, inputs = self.walk([tensor], stops)
            reads.update(dict.fromkeys(inputs))
            inner_names = {name for k in indices for name in self.nodes[k].output if name}
            names = {name: f"{name}/{index}" for name in inner_names} | {tensor: tensor + ISOLATED_SUFFIX}
            nodes += [_rename_tensors(self.nodes[k], names, {*inputs}, f"/{index}") for k in indices]
        outputs = [tensor + ISOLATED_SUFFIX for tensor in tensors]
        return self._build_model(nodes, [*reads], outputs, shapes, dict(zip(outputs, tensors, strict=True))), [*reads]

    def with_deltas(self, tensors: Sequence[str]) -> Any:
        """Return the graph with an input TENSOR/delta, added to the tensor, for each of the tensors."""
        model = copy_message(self.model)
        sources = {name: f"{name}/before" for name in tensors}
        nodes = []
        for node in self.nodes:
            copy = copy_message(node)
            names = [name for name in node.output if name in sources]
            copy.output[:] = [sources.get(name, name) for name in node.output]
            nodes += [copy, *(self._onnx.helper.make_node("Add", [sources[n], n + DELTA_SUFFIX], [n]) for n in names)]
        set_nodes(model.graph, nodes)
        for name in tensors:  # a single zero serves as no delta
            kind = self._types.get(name) or self._onnx.TensorProto.FLOAT
            model.graph.input.append(self._onnx.helper.make_tensor_value_info(name + DELTA_SUFFIX, kind, None))
        del model.graph.value_info[:]
        return model

    def _build_model(
        self, nodes: Sequence[Any], read: Sequence[str], outputs: Sequence[str], shapes: Shapes, own: Mapping[str, str]
    ) -> Any:
        """Return a model of the nodes; `own` maps its outputs to the graph's tensors of equal types and shapes."""
        model = type(self.model)()
        for attribute in ("ir_version", "producer_name"):
            setattr(model, attribute, getattr(self.model, attribute))
        model.opset_import.extend(self.model.opset_import)
        model.functions.extend(self.model.functions)
        model.graph.name = self.model.graph.name or "part"
        model.graph.node.extend(nodes)
        used_names = {name for node in nodes for name in reads_of(node)} | {*outputs}
        model.graph.initializer.extend(tensor for name, tensor in self._weights.items() if name in used_names)
        model.graph.input.extend(self._make_value(name, name, shapes) for name in read)
        model.graph.output.extend(self._make_value(name, own[name], shapes) for name in outputs)
        return model

    def _make_value(self, name: str, tensor: str, shapes: Shapes) -> Any:
        """Return a tensor's name, type and shape; unknown ones are inferred by ONNX Runtime and OpenVINO."""
        declaration = next((v for v in (*self.model.graph.input, *self.model.graph.output) if v.name == tensor), None)
        if tensor not in shapes and declaration is not None:
            value = copy_message(declaration)
            value.name = name
            return value
        kind = self._types.get(tensor) or self._onnx.TensorProto.FLOAT
        return self._onnx.helper.make_tensor_value_info(name, kind, shapes.get(tensor))


def _behind_quantisation(nodes: Sequence[Any], outputs: set[str]) -> list[Any]:
    """Return the nodes, with each quantised tensor's name moved to its dequantised output.

    Only tensors without other readers are moved. An activation's rounding then belongs to the layer that writes it, as
    does a ReLU replaced by the quantiser's clamping at 0.
    """
    readers: dict[str, list[Any]] = defaultdict(list)
    for node in nodes:
        for name in reads_of(node):
            readers[name].append(node)
    node_outputs, names = {name for node in nodes for name in node.output}, dict[str, str]()
    for node in nodes:
        users = readers[node.output[0]] if node.op_type == "QuantizeLinear" else []
        if len(users) != 1 or users[0].op_type != "DequantizeLinear" or {node.output[0], *users[0].output} & outputs:
            continue
        tensor, output = node.input[0], users[0].output[0]
        if len(readers[tensor]) == 1 and tensor in node_outputs - outputs:
            names |= {tensor: tensor + UNQUANTISED_SUFFIX, output: tensor}
    return [_rename_tensors(node, names, (), "") for node in nodes]


def _rename_tensors(node: Any, names: Mapping[str, str], outer_names: Collection[str], suffix: str) -> Any:
    """Return a copy with renamed tensors, except those read from outside; also in its inner graphs."""
    copy = copy_message(node)
    copy.name = node.name and node.name + suffix  # ONNX Runtime refuses equal names, but not nameless nodes
    copy.input[:] = [name if name in outer_names else names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    for graph in graphs_of(copy):
        set_nodes(graph, [_rename_tensors(inner_node, names, outer_names, suffix) for inner_node in graph.node])
    return copy
