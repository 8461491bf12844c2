"""ncnn on the CPU (`ncnn`): graphs of .param and .bin, made by pnnx or given by the user."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import system
from dyno.worker.backend import (
    Arrays,
    Backend,
    FileContents,
    FileFormat,
    Maker,
    Session,
    artifact_of,
    describe_given,
    refuse_requantising,
)
from dyno.worker.backends.pytorch import module_inputs
from dyno.worker.extras import install, load_library
from dyno.worker.facts.engine import EngineFacts, Probe, precision_truth
from dyno.worker.facts.files import MakerFacts
from dyno.worker.facts.job import LAYERS, Layer, LayerGraph, Port
from dyno.worker.inputs.specs import fit_feed, static_shapes
from dyno.worker.makers.control_flow import check_control_flow, traced_values
from dyno.worker.makers.export import make_source, silence_exporters
from dyno.worker.makers.verify import WrongGraph, compare_results, list_doubts
from dyno.worker.nets import file_facts, models
from dyno.worker.onnx_graph import file as onnx_file
from dyno.worker.onnx_graph import graph_facts
from dyno.worker.sessions import torch_support
from dyno.worker.spec import BATCH_AXIS, Artifact, Recipe, Tensor, Trial, Unavailable, UserError

ENGINE_NAME, CONVERTER_NAME = "ncnn", "pnnx"
Tensors = tuple[Tensor, ...]
PARAM_MAGIC = "7767517"  # first line of a .param file
COMPUTE_LAYERS = re.compile("Convolution|InnerProduct|Gemm|MatMul|MultiHeadAttention|SDPA|LSTM|GRU|RNN|Einsum")
# Number of a layer's parameter that is 0 unless its weights have eight bits
INT8_TERMS = {"Gemm": 18, "MultiHeadAttention": 18, "SDPA": 18}
INT8_TERM = 8  # that number for the other compute layers
KEEPS_CHANNELS = {"Split", "BinaryOp", "UnaryOp", "Scale", "BatchNorm", "Padding", "Interp", "ReLU", "Clip", "Noop"}
PNNX_TYPES = {"float32": "f32", "float16": "f16", "float64": "f64", "int64": "i64", "int32": "i32", "bool": "bool"}
BLOB_NAME = re.compile(r"(?:in|out)(\d+)")
PRECISION_FLAGS = {"fp16": ("use_fp16_storage", "use_fp16_packed", "use_fp16_arithmetic"),
                   "bf16": ("use_bf16_storage", "use_bf16_packed")}  # fmt: skip


@dataclass(frozen=True)
class ParamLayer:
    """A line of a .param file: a layer, its input and output blobs, and its parameters by number."""

    type: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: dict[int, str] = field(default_factory=dict)

    def read_int(self, key: int, default: int = 0) -> int:
        """Return a parameter as a whole number."""
        return int(self.parameters.get(key, default))


def read_layers(path: str) -> list[ParamLayer]:
    """Return the layers of a .param file; raise a `UserError` if it is damaged."""
    with torch_support.raise_refusals(f"{path} is not a graph of {ENGINE_NAME}, or was cut short"):
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        return [_read_layer(line.split()) for line in lines[2:] if line.strip()]


def _read_layer(fields: Sequence[str]) -> ParamLayer:
    """Return the layer of a line: type, name, counts of inputs and outputs, their names, then `number=value`."""
    first, middle = 4, 4 + int(fields[2])
    last = middle + int(fields[3])
    if len(fields) < last:
        raise ValueError(f"the line of {fields[1]} lacks names of its inputs or outputs")
    parameters = {int(key): value for key, _, value in (text.partition("=") for text in fields[last:])}
    return ParamLayer(fields[0], fields[1], tuple(fields[first:middle]), tuple(fields[middle:last]), parameters)


def describe_inputs(path: str, layers: Sequence[ParamLayer]) -> tuple[Tensor, ...]:
    """Return the inputs with a free batch; raise a `UserError` for an input of unknown shape.

    Its Input layer has width, height and channels; else the channels follow from the first convolution.
    """
    readers = {blob: layer for layer in layers for blob in layer.inputs}
    inputs = []
    for layer in (layer for layer in layers if layer.type == "Input"):
        sizes = tuple(size for key in (2, 11, 1, 0) if (size := layer.read_int(key)))  # channels, depth, height, width
        name, reader = layer.outputs[0], readers.get(layer.outputs[0])
        for _ in layers:  # bounded: a damaged graph may have cycles
            if reader and reader.type in KEEPS_CHANNELS:
                reader = readers.get(reader.outputs[0])
        dtype = "int32" if reader and reader.type == "Embed" else "float32"
        if not sizes and reader and reader.type in ("Convolution", "ConvolutionDepthWise"):
            kernel = reader.read_int(1) * reader.read_int(11, reader.read_int(1))
            channels = reader.read_int(6) * reader.read_int(7, 1) // max(reader.read_int(0) * kernel, 1)
            inputs.append(Tensor(name, dtype, (BATCH_AXIS, channels, "height", "width")))
        elif sizes or dtype == "int32":
            inputs.append(Tensor(name, dtype, (BATCH_AXIS, *(sizes or ("length",)))))
        else:
            advice = f"write its width, height and channels at its Input layer: 0=224 1=224 2=3 after {name}"
            raise UserError(f"{path} doesn't say the shape of its input {name!r}; {advice}")
    return tuple(sorted(inputs, key=lambda tensor: _find_number(tensor.name)))


def _find_number(name: str) -> float:
    """Return the number in a blob's name by pnnx, such as 2 of `out2`; infinity for other names."""
    match = BLOB_NAME.fullmatch(name)
    return int(match[1]) if match else math.inf


class NcnnFormat(FileFormat):
    """A graph as text in .param, with its weights in a .bin of the same name."""

    name = "ncnn"
    suffixes = (".param",)
    backend = "ncnn"
    builders = ("ncnn",)
    on_device = True

    def fits(self, path: Path) -> bool:
        """See `FileFormat.fits`: other programs use the suffix too."""
        if not path.is_file():
            return True
        with open(path, "rb") as file:
            return file.read(len(PARAM_MAGIC)) == PARAM_MAGIC.encode()

    def companions(self, path: Path) -> list[Path]:
        """Return the file of weights."""
        return [path.with_suffix(".bin")]

    def read(self, path: str, trial: Trial) -> FileContents:
        """Read the graph and run it for its outputs' shapes; it is int8 if most compute layers are."""
        layers, metadata = read_layers(path), file_facts.read_attached(path)
        with torch_support.raise_refusals(f"{path} is a damaged graph of {ENGINE_NAME}"):
            inputs = describe_inputs(path, layers)
            int8_flags = [_has_int8_weights(layer) for layer in layers if COMPUTE_LAYERS.match(layer.type)]
        height, width = file_facts.find_size(metadata) or (file_facts.DEFAULT_SIZE, file_facts.DEFAULT_SIZE)
        dims = replace(trial.dims, batch=1, height=trial.dims.height or height, width=trial.dims.width or width)
        graph = OpenGraph(path, "fp32", 1)
        arrays: list[np.ndarray] = []
        if not any("length" in t.shape for t in inputs):
            shapes = static_shapes(inputs, dims)
            graph.feed_inputs(inputs, [np.zeros(shapes[t.name], t.dtype) for t in inputs])
            arrays = [graph.read(value) for value in graph.run()]
        pairs = zip(graph.outputs, arrays, strict=False)
        outputs = tuple(Tensor(name, "float32", (BATCH_AXIS, *array.shape[1:])) for name, array in pairs)
        purpose, images = file_facts.read_purpose(metadata), file_facts.read_image_facts(metadata)
        precision = "int8" if 2 * sum(int8_flags) > len(int8_flags) else "fp32"
        return FileContents(inputs, outputs, precision, task=purpose, image=images)


def _has_int8_weights(layer: ParamLayer) -> bool:
    return layer.read_int(INT8_TERMS.get(layer.type, INT8_TERM)) != 0


NCNN_FORMAT = NcnnFormat()


class Ncnn(Backend):
    """ncnn's interpreter on the CPU; fp16 and bf16 are the types of weights and activations if kernels support them.

    A module is traced by TorchScript and converted by pnnx; an ONNX file is converted by pnnx.
    """

    name = "ncnn"
    requires = ("ncnn",)
    precisions = ("fp32", "bf16", "fp16")
    file_precisions = ("int8",)
    files = (*NcnnFormat.suffixes, ".onnx")

    def refuse(self, trial: Trial) -> str:
        """See `Backend.refuse`; loading changes a file's precision, except to int8."""
        if trial.model.file.endswith(".onnx") and trial.model.precision not in ("", "fp32"):
            return f"{CONVERTER_NAME} reads float32 weights, and the file's are {trial.model.precision}"
        return super().refuse(trial) or refuse_requantising(trial)

    def recipe(self, trial: Trial) -> Recipe:
        """Return the recipe of the graph at the trial's batch, in float32; a given graph is used unchanged."""
        precision = "int8" if trial.precision == "int8" else "fp32"
        runtime = replace(trial.runtime, device="cpu", threads=1)
        return Recipe(self.name, NCNN_FORMAT.name, precision, trial.model, trial.dims, runtime=runtime)

    def probe(self) -> Probe:
        """Run a layer; report if this Python can't make files."""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "relu.param"
            path.write_text(f"{PARAM_MAGIC}\n2 2\nInput in0 0 1 in0 0=2\nReLU relu 1 1 in0 out0\n", encoding="utf-8")
            path.with_suffix(".bin").write_bytes(b"")
            graph = OpenGraph(str(path), "fp32", 1)
            graph.feed_inputs([Tensor("in0", "float32", (1, 2))], [np.array([[-1, 2]], np.float32)])
            is_correct = graph.run()[0].numpy().ravel().tolist() == [0, 2]
        cure = f"runs .param files, makes none without {CONVERTER_NAME}: {install(CONVERTER_NAME)}"
        version = system.find_versions(self.requires).get("ncnn", "")
        detail = "" if find_spec(CONVERTER_NAME) else cure
        return Probe(version=version, devices=("cpu",) if is_correct else (), detail=detail)

    def prepare(self, trial: Trial) -> None:
        """Import the library."""
        load_library("ncnn")

    def layer_graph(self, trial: Trial, artifact: Artifact | None) -> LayerGraph:
        """Return the layers of the graph file."""
        layers = read_layers(artifact.path if artifact else trial.model.file)
        library = f"{ENGINE_NAME} {system.find_versions(self.requires).get('ncnn', '')}"
        return LayerGraph(form=LAYERS, library=library, layers=tuple(_describe_layer(layer, trial) for layer in layers))

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Load the graph with the trial's threads and precision, packing the weights for the CPU."""
        if artifact is None:
            raise UserError(f"{self.name} runs a .param file that was made before")
        return NcnnSession(trial, artifact)


NCNN = Ncnn()


def _describe_layer(layer: ParamLayer, trial: Trial) -> Layer:
    # else the type is known only after a run
    kind = "int8" if _has_int8_weights(layer) else "float32" if trial.precision == "fp32" else ""
    computes_in = kind if COMPUTE_LAYERS.match(layer.type) else ""
    inputs, outputs = (tuple(map(Port, names)) for names in (layer.inputs, layer.outputs))
    moves = layer.type in ("Split", "Noop")
    return Layer(
        name=layer.name, type=layer.type, inputs=inputs, outputs=outputs, computes_in=computes_in, moves=moves
    )  # fmt: skip


def _has_batches(library: Any) -> bool:
    """Return whether this version runs several images at once; versions before 1.0.20261020 don't."""
    return hasattr(library.Mat, "batch")


def refuse_batch(batch: int) -> None:
    """Raise `Unavailable` for a batch that this version of ncnn can't run."""
    library = load_library("ncnn")
    if batch > 1 and not _has_batches(library):
        version = library.__version__
        raise Unavailable(
            f"{ENGINE_NAME} {version} runs one image at a time; for batches: pip install --upgrade ncnn pnnx"
        )


class OpenGraph:
    """A loaded graph and its feeds; blobs are ncnn's `Mat`, with the batch in addition to up to four axes."""

    def __init__(self, path: str, precision: str, threads: int, name: str = "") -> None:
        self.library = load_library("ncnn")
        self.has_batches = _has_batches(self.library)
        self.layers = read_layers(path)
        missing_types = {layer.type for layer in self.layers if self.library.layer_to_index(layer.type) < 0}
        if missing_types:
            raise Unavailable(
                f"{ENGINE_NAME} has no layer for {', '.join(sorted(missing_types))}, which {name or path} needs"
            )
        self.net = self.library.Net()
        flags = {flag: kind == precision for kind, names in PRECISION_FLAGS.items() for flag in names}
        options = {"num_threads": threads, "use_vulkan_compute": False, **flags}
        self.set_options = {name: value for name, value in options.items() if hasattr(self.net.opt, name)}
        for name, value in self.set_options.items():
            setattr(self.net.opt, name, value)
        weights = str(NCNN_FORMAT.companions(Path(path))[0])
        if not Path(weights).is_file():
            raise UserError(f"{path} needs its weights in {weights}, which is not there")
        if self.net.load_param(path) or self.net.load_model(weights):
            raise UserError(f"{path} with {weights} can't be loaded by {ENGINE_NAME}; one of them is damaged")
        self.inputs = {layer.outputs[0] for layer in self.layers if layer.type == "Input"}
        names = (name for name in self.net.output_names() if name not in self.inputs)  # unread blobs
        self.outputs = sorted(names, key=_find_number)
        self._feeds: dict[str, Any] = {}

    def feed_inputs(self, tensors: Sequence[Tensor], arrays: Sequence[np.ndarray]) -> None:
        """Copy the inputs' arrays; whole numbers become int32, ncnn's type."""
        self._feeds = {}
        for index, (tensor, array) in enumerate(zip(tensors, arrays, strict=True)):
            values = array.astype(np.int32 if array.dtype.kind in "iub" else np.float32, copy=False)
            if tensor.dtype.startswith(("int", "uint")) and (values != array).any():
                raise UserError(f"{ENGINE_NAME} reads int32, and {tensor.name!r} has numbers beyond it")
            mat = self.library.Mat(values, batch_index=0) if self.has_batches else self.library.Mat(values[0])
            self._feeds[self.name_input(tensor.name, index)] = mat.clone()

    def name_input(self, name: str, index: int) -> str:
        """Return the blob of an input: its name, or pnnx's name by its place."""
        return name if name in self.inputs else f"in{index}"

    def run(self, blob_indices: Sequence[int] | None = None) -> list[Any]:
        """Return the outputs of a run, or the blobs of the numbers in `blob_indices`, in the engine's inner format."""
        extractor = self.net.create_extractor()
        extractor.set_light_mode(blob_indices is None)
        if any(extractor.input(name, value) for name, value in self._feeds.items()):
            raise UserError(f"the graph has no inputs {', '.join(self._feeds)}; it has {', '.join(self.inputs)}")
        if blob_indices is None:
            results = [extractor.extract(name) for name in self.outputs]
        else:
            blobs = self.net.blobs()
            results = [extractor.extract(blobs[index].name, 1) for index in blob_indices]
        if any(code for code, _ in results):
            raise UserError(f"{ENGINE_NAME} stopped in the graph: its layers don't fit these inputs, or memory ran out")
        return [value for _, value in results]

    def read(self, value: Any, tensor: Tensor | None = None) -> np.ndarray:
        """Return a blob as an array, batch first; cast and, if the sizes agree, reshaped to the tensor.

        ncnn drops axes of length one.
        """
        array = np.array(value.numpy(batch_index=0) if self.has_batches else value.numpy()[None])
        if tensor is None:
            return array
        shape = [len(array) if axis == BATCH_AXIS else int(axis) for axis in tensor.shape]
        array = array.astype(tensor.dtype, copy=False)
        return array.reshape(shape) if array.size == math.prod(shape) else array

    def answer(self, inputs: Sequence[Tensor], arrays: Sequence[np.ndarray], output_count: int) -> list[Any]:
        """Return the output blobs of one run; raise a `UserError` if their number isn't `output_count`."""
        self.feed_inputs(inputs, arrays)
        if len(self.outputs) != output_count:
            raise UserError(f"{CONVERTER_NAME} made {len(self.outputs)} outputs of {output_count}")
        return self.run()

    def count_types(self) -> Counter[str]:
        """Count compute layers by type: int8 by their weights, others by the type of their outputs."""
        layers = [layer for layer in self.net.layers() if COMPUTE_LAYERS.match(layer.type)]
        by_name = {layer.name: layer for layer in self.layers}
        half = "bfloat16" if self.net.opt.use_bf16_storage else "float16"
        bits = (value.elembits() for value in self.run([layer.tops[0] for layer in layers]))
        return Counter(
            "int8" if _has_int8_weights(by_name[layer.name]) else {16: half, 8: "int8"}.get(width, "float32")
            for layer, width in zip(layers, bits, strict=True)
        )


class NcnnSession(Session):
    """A loaded graph; each run begins with the inputs and allocates its outputs."""

    def __init__(self, trial: Trial, artifact: Artifact) -> None:
        refuse_batch(trial.dims.batch)
        self._trial = trial
        self._opened = OpenGraph(artifact.path, trial.precision, trial.runtime.threads)
        self.inputs = artifact.inputs
        self._shapes = static_shapes(artifact.inputs, trial.dims)
        self._outputs = artifact.outputs
        # the shapes of other outputs are known only after a run
        self.outputs = tuple(t for t in artifact.outputs if BATCH_AXIS not in t.shape)
        self._results: list[Any] = []

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Copy the feeds into blobs."""
        self._opened.feed_inputs(self.inputs, [fit_feed(feeds, t, self._shapes[t.name]) for t in self.inputs])

    def run(self, slot: int = 0) -> None:
        """Run all layers."""
        self._results = self._opened.run()

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """Return copies of the outputs by name; whole numbers in the module's types."""
        pairs = zip(self._outputs, self._results, strict=True)
        return {tensor.name: self._opened.read(value, tensor) for tensor, value in pairs}

    def facts(self) -> EngineFacts:
        """Return the layers, and the types of the compute layers' outputs."""
        types = dict(self._opened.count_types())
        kinds = Counter(layer.type for layer in self._opened.layers if layer.type != "Input")
        return EngineFacts(
            layers=kinds.total(), layers_by_type=types, operators=dict(kinds.most_common()),
            precision_truth=precision_truth(self._trial.precision, types, f"{ENGINE_NAME} by the types of its blobs"),
            threads=self._opened.net.opt.num_threads,
        )  # fmt: skip


class NcnnMaker(Maker):
    """A maker that converts a traced module or an ONNX file with pnnx, or describes a given graph."""

    name = "ncnn"
    requires = ("pnnx", "ncnn", "torch", "torchvision", "timm", "ultralytics")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.param and model.bin; the sha256 is over both, .param first."""
        began, path, facts = time.perf_counter(), folder / "model.param", self.describe(recipe)
        if recipe.model.file.endswith(NcnnFormat.suffixes):
            return describe_given(NCNN_FORMAT, recipe, facts)
        refuse_batch(recipe.dims.batch)
        convert = _convert_onnx if recipe.model.file else _convert_module
        inputs, outputs, facts = convert(recipe, facts, path)
        companions = NCNN_FORMAT.companions(path)
        return artifact_of(
            path, NCNN_FORMAT.name, recipe.precision, (inputs, outputs), facts, began, companions=companions
        )  # fmt: skip


NCNN_MAKER = NcnnMaker()


def _convert_onnx(recipe: Recipe, facts: MakerFacts, path: Path) -> tuple[Tensors, Tensors, MakerFacts]:
    inputs, declared = onnx_file.read_io(recipe.model.file)
    shapes = static_shapes(inputs, recipe.dims)
    inputs = tuple(replace(t, shape=shapes[t.name]) for t in inputs)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "model.onnx"  # pnnx writes a file next to its source
        graph_facts.copy_with_weights(Path(recipe.model.file), source)
        _convert(source, inputs, path, recipe.model.name)
    graph = OpenGraph(str(path), "fp32", 1, recipe.model.name)
    zeros = [np.zeros([*map(int, t.shape)], t.dtype) for t in inputs]
    arrays = [graph.read(value) for value in graph.answer(inputs, zeros, len(declared))]
    outputs = []
    for tensor, array in zip(declared, arrays, strict=True):
        sizes = [axis if isinstance(axis, int) else size for axis, size in zip(tensor.shape, array.shape, strict=False)]
        if [*array.shape] != sizes or array.ndim != len(tensor.shape):
            shape = "x".join(map(str, tensor.shape))
            raise UserError(
                f"{CONVERTER_NAME} made {tensor.name!r} {'x'.join(map(str, array.shape))} instead of {shape}"
            )
        kind = "float32" if tensor.dtype.startswith(("float", "bfloat")) else tensor.dtype
        outputs.append(Tensor(tensor.name, kind, array.shape))
    return inputs, tuple(outputs), facts


def _convert_module(recipe: Recipe, facts: MakerFacts, path: Path) -> tuple[Tensors, Tensors, MakerFacts]:
    """Convert the module's trace and compare it with the module; return inputs, outputs and facts."""
    torch, name = torch_support.import_torch(), recipe.model.name
    with torch_support.memory_errors(), torch.no_grad():
        module = models.load(recipe.model, recipe.dims)
        inputs, source = module_inputs(recipe.model, recipe.dims), make_source(torch, module, recipe)
        is_static = check_control_flow(torch, source.module, source.example)
        with tempfile.TemporaryDirectory() as scratch:
            trace = Path(scratch) / "model.pt"
            with torch_support.raise_refusals(f"TorchScript can't trace {name}"), silence_exporters() as caught:
                torch.jit.trace(source.module, source.example, check_trace=False).save(str(trace))
            if (constants := traced_values(torch, caught)) and not is_static:
                raise UserError(f"{name} can't be traced: a value of its example became a constant ({constants})")
            _convert(trace, inputs, path, name)
    graph = OpenGraph(str(path), "fp32", recipe.runtime.threads, name)
    outputs = torch_support.describe_outputs({k: torch.from_numpy(v) for k, v in source.expected[0].outputs.items()})
    results = []
    for case in source.expected:
        blobs = graph.answer(inputs, [*case.feeds.values()], len(outputs))
        results.append([graph.read(value, tensor) for value, tensor in zip(blobs, outputs, strict=True)])
    try:
        comparison = compare_results(source, results)
    except WrongGraph as e:
        raise UserError(f"{CONVERTER_NAME} can't convert {name} correctly: it {e}") from e
    warnings = (*facts.warnings, *list_doubts(comparison))
    return inputs, outputs, replace(facts, **models.describe_weights(module), warnings=warnings, verified=comparison)


def _convert(source: Path, inputs: Sequence[Tensor], path: Path, name: str) -> None:
    """Write the graph of a trace or an ONNX file, with its weights; `name` is the model's, for errors."""
    spec = find_spec(CONVERTER_NAME)
    if spec is None or spec.origin is None:
        raise Unavailable(
            f"{CONVERTER_NAME}, which makes .param files, is not in this Python; {install(CONVERTER_NAME)}"
        )
    if unknown_types := [t.dtype for t in inputs if t.dtype not in PNNX_TYPES]:
        raise UserError(f"{CONVERTER_NAME} takes no inputs of {unknown_types[0]}")
    shapes = ",".join(f"[{','.join(map(str, t.shape))}]{PNNX_TYPES[t.dtype]}" for t in inputs)
    with tempfile.TemporaryDirectory() as scratch:
        files = {key: Path(scratch) / key for key in ("pnnxparam", "pnnxbin", "pnnxpy", "pnnxonnx", "ncnnpy")}
        files |= {"ncnnparam": path, "ncnnbin": path.with_suffix(".bin")}
        arguments = [f"{key}={file}" for key, file in files.items()]
        command = [str(Path(spec.origin).with_name("pnnx")), str(source.absolute()), f"inputshape={shapes}", "fp16=0"]
        process = subprocess.run([*command, *arguments], cwd=scratch, capture_output=True, text=True, errors="replace")
    output = process.stderr + process.stdout
    if process.returncode or not path.is_file():
        last_line = next((line for line in reversed(output.splitlines()) if line.strip()), "")
        raise UserError(f"{CONVERTER_NAME} can't convert {name} (exit code {process.returncode}): {last_line.strip()}")
