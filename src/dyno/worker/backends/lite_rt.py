"""LiteRT, formerly TensorFlow Lite, on the CPU (`litert`): .tflite files, made by litert-torch or the user's own."""

from __future__ import annotations

import base64
import importlib
import importlib.metadata
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    derived,
    refuse_requantising,
)
from dyno.worker.backends.aot_package import numbered_names
from dyno.worker.backends.pytorch import module_inputs
from dyno.worker.extras import install
from dyno.worker.facts.engine import EngineFacts, Probe, precision_truth
from dyno.worker.facts.files import MakerFacts
from dyno.worker.inputs.calibration import (
    CalibrationImages,
    CalibrationInputs,
    calibration_data,
    calibration_of,
    missing_data,
)
from dyno.worker.inputs.specs import fitted, static_shapes
from dyno.worker.nets import models
from dyno.worker.option_values import Check, flag, one_of, whole
from dyno.worker.sessions.torch_support import (
    first_line,
    import_torch,
    is_memory_error,
    memory_errors,
    positional,
    silenced,
)
from dyno.worker.spec import BATCH, Artifact, Option, Recipe, Runtime, Tensor, Trial, Unavailable, UserError

ENGINE, DELEGATE = "LiteRT", "XNNPACK"
CONVERTER = "litert_torch"  # the name that an interpreter is given for making files
HERE = "give a Python that has it, --python litert_torch=PATH (there: pip install litert-torch torchvision)"
STATIC, DYNAMIC = "static", "dynamic"
SCHEMES = {STATIC: "static_wi8_ai8", DYNAMIC: "dynamic_wi8_afp32"}  # recipes of ai-edge-quantizer
# Operators that multiply; a quantised tensor's type is one of these.
COMPUTE = {
    "CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D", "TRANSPOSE_CONV", "CONV_3D_TRANSPOSE", "FULLY_CONNECTED", "BATCH_MATMUL",
    "LSTM", "UNIDIRECTIONAL_SEQUENCE_LSTM", "BIDIRECTIONAL_SEQUENCE_LSTM", "RNN", "UNIDIRECTIONAL_SEQUENCE_RNN", "SVDF",
}  # fmt: skip
WEIGHTS_FIRST = {"TRANSPOSE_CONV", "CONV_3D_TRANSPOSE"}  # the shape of the output comes before the weights
INTEGERS = {"int8": "int8", "uint8": "int8", "int4": "int8", "int2": "int8", "int16": "int16"}

# A file that adds a vector of two numbers to itself, compressed.
ADDITION = (
    "eNpNjzsOwjAQRJ/BoEixIooUKbkDOUMqCgoKrkATKBKJ41JyCzN2Np+1xtbufLRugHt3vUBFzYlAoYlXhzpohJ+wF1xm4BxjdMaH"
    "xeV1T7NbyhQe5qlJVeU3actNvqqcfR/LTdixltsA41rb5StPYf6j8BqH9zisGcF+hO03aw/Cs8/SReuM9/nAH5vpFNE="
)


class TfliteFormat(FileFormat):
    """A .tflite file: graph and weights in one, for one batch unless its first axes are free."""

    name = "tflite"
    suffixes = (".tflite",)
    backend = "litert"
    builders = ("litert",)
    on_device = True

    def read(self, path: str, trial: Trial) -> FileContents:
        """Read the file; it is int8 if most of its operators that multiply have quantised weights."""
        opened = open_file(path)
        inputs, outputs = list_ports(opened)
        types = count_types(opened)
        integers = sum(types[kind] for kind in types if kind in INTEGERS)
        precision = "int8" if 2 * integers > types.total() else "fp32"
        return FileContents(tuple(p.tensor for p in inputs), tuple(p.tensor for p in outputs), precision)


TFLITE = TfliteFormat()


class LiteRT(Backend):
    """LiteRT's interpreter on the CPU.

    Options: `xnnpack` (bool, default on: the delegate, which runs what it can), and for int8 `scheme` (static:
    calibrated; dynamic: activations as they come) and `samples` of the calibration.
    """

    name = "litert"
    requires = ("ai-edge-litert",)
    precisions = ("fp32", "int8")
    options = ("xnnpack", "scheme", "samples")
    values: Mapping[str, Check] = {"xnnpack": flag, "scheme": one_of(*SCHEMES), "samples": whole(1)}
    files = TfliteFormat.suffixes

    def refuse(self, trial: Trial) -> str:
        """See `Backend.refuse`; a static scheme needs calibration data."""
        if reason := super().refuse(trial) or refuse_requantising(trial):
            return reason
        own = next((name for name in ("scheme", "samples") if name in trial.options), "")
        if own and (trial.precision != "int8" or trial.model.precision == "int8"):
            return f"{own} is for a float model that Dyno quantises to int8; omit it"
        if trial.options.get("scheme", STATIC) == STATIC:
            return missing_data(trial)
        return "" if "samples" not in trial.options else "samples is for scheme=static, which is calibrated"

    def recipe(self, trial: Trial) -> Recipe:
        """Return the recipe of the file at the trial's batch; a file that was given is used as it is."""
        here = Runtime(name=trial.runtime.name, python=trial.runtime.python, env=trial.runtime.env)
        maker = here if trial.model.file else replace(here, name=CONVERTER)
        own = trial.precision if trial.model.file and trial.precision == trial.model.precision else "fp32"
        made = Recipe(self.name, TFLITE.name, own, trial.model, trial.dims, runtime=maker)
        if trial.precision == own:
            return made
        scheme: dict[str, Option] = {"scheme": STATIC, **trial.options}
        scheme.pop("xnnpack", None)
        data = calibration_data(trial) if scheme["scheme"] == STATIC else None
        quantised = replace(made, maker=LiteRTQuantiser.name, precision="int8", options=scheme, data=data, parent=made)
        return replace(quantised, runtime=replace(here, name=CONVERTER))

    def probe(self) -> Probe:
        """Add two numbers, in a file of a few bytes."""
        opened = _import_interpreter().Interpreter(model_content=zlib.decompress(base64.b64decode(ADDITION)))
        opened.allocate_tensors()
        (given,), (result,) = list_ports(opened)
        opened.set_tensor(given.index, np.array([1, 2], np.float32))
        opened.invoke()
        works = [*opened.get_tensor(result.index)] == [2, 4]
        return Probe(version=version(), devices=("cpu",) if works else ())

    def prepare(self, trial: Trial) -> None:
        """Import the interpreter."""
        _import_interpreter()

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Open the file with the trial's threads and shapes; XNNPACK packs the weights here."""
        if artifact is None:
            raise UserError(f"{self.name} runs a .tflite file that was made before")
        return LiteRTSession(artifact.path, trial)


LITERT = LiteRT()


def version() -> str:
    """Return the version of the interpreter."""
    return importlib.metadata.version("ai-edge-litert")


def _import_interpreter() -> Any:
    try:
        from ai_edge_litert import interpreter
    except (ImportError, OSError) as e:
        raise Unavailable(f"ai-edge-litert can't be imported ({first_line(e)}); {install('ai-edge-litert')}") from e
    return interpreter


def open_file(path: str, threads: int = 1, has_delegate: bool = False) -> Any:
    """Return LiteRT's interpreter of the file; raise a `UserError` for a missing or damaged file."""
    library = _import_interpreter()
    kinds = library.OpResolverType
    resolver = kinds.AUTO if has_delegate else kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    try:
        return library.Interpreter(path, num_threads=threads, experimental_op_resolver_type=resolver)
    except (ValueError, RuntimeError) as e:
        raise UserError(f"{path} can't be read by {ENGINE}: {first_line(e)}") from e


@dataclass(frozen=True)
class TflitePort:
    """An input or output of a file: where it lies, how Dyno sees it, and how it is stored.

    A quantised one is `scale * (stored - zero_point)`, and float32 to the outside.
    """

    index: int
    tensor: Tensor
    stored: str
    scale: float
    zero_point: int

    def store(self, values: np.ndarray) -> np.ndarray:
        """Return the values as the file stores them."""
        if not self.scale:
            return values
        kind = np.iinfo(self.stored)
        counted = np.rint(values / self.scale) + self.zero_point
        return np.asarray(np.clip(counted, kind.min, kind.max), self.stored)

    def read(self, stored: np.ndarray) -> np.ndarray:
        """Return the stored values as numbers, those of floating point as float32."""
        if self.scale:
            return np.asarray((stored.astype(np.float32) - self.zero_point) * np.float32(self.scale))
        return np.asarray(stored, np.float32) if stored.dtype.kind == "f" else stored


def list_ports(opened: Any) -> tuple[list[TflitePort], list[TflitePort]]:
    """Return inputs and outputs in order, by the names of the file's only signature, else by those of its tensors."""
    keys = list(opened.get_signature_list())
    signature = opened.get_signature_runner(keys[0]) if len(keys) == 1 else None
    sides = []
    for name in ("get_input_details", "get_output_details"):
        named = {each["index"]: key for key, each in getattr(signature, name)().items()} if signature else {}
        sides.append([_read_port(each, named.get(each["index"], each["name"])) for each in getattr(opened, name)()])
    return sides[0], sides[1]


def _read_port(details: Mapping[str, Any], name: str) -> TflitePort:
    stored, (scale, zero_point) = np.dtype(details["dtype"]).name, details["quantization"]
    if not stored.startswith(("float", "int", "uint", "bool")):
        raise UserError(f"{name!r} is {'text' if stored.startswith('bytes') else stored}, and no array of numbers")
    signature = details["shape_signature"] if len(details["shape_signature"]) else details["shape"]
    shape = tuple(int(n) if n >= 0 else "" if axis else BATCH for axis, n in enumerate(signature))
    scale = float(scale) if stored in INTEGERS else 0.0
    seen = "float32" if scale or stored == "float16" else stored
    return TflitePort(int(details["index"]), Tensor(name, seen, shape), stored, scale, int(zero_point))


def list_operators(opened: Any) -> list[dict[str, Any]]:
    """Return the operators in order, delegates at the end: `op_name`, and indices of `inputs` and `outputs`."""
    return [*opened._get_ops_details()]  # the library has no other way to them


def count_types(opened: Any) -> Counter[str]:
    """Return how many operators multiply in each type: where weights are quantised, in integers.

    Of floating-point activations and quantised weights LiteRT quantises the activations as they come.
    """
    types = {each["index"]: np.dtype(each["dtype"]).name for each in opened.get_tensor_details()}
    found = Counter[str]()
    for operator in list_operators(opened):
        if operator["op_name"] in COMPUTE:
            inputs = [*operator["inputs"]]
            data, weights = (inputs[2], inputs[1]) if operator["op_name"] in WEIGHTS_FIRST else inputs[:2]
            data_type, weight_type = types.get(data, "float32"), types.get(weights, "float32")
            found[INTEGERS.get(data_type) or INTEGERS.get(weight_type) or data_type] += 1
    return found


def find_delegated(operators: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the places of operators that a delegate runs: those between its inputs and its outputs."""
    own = [k for k, each in enumerate(operators) if each["op_name"] != "DELEGATE"]
    made_by = {int(tensor): k for k in own for tensor in operators[k]["outputs"]}
    found: set[int] = set()
    for each in operators:
        if each["op_name"] == "DELEGATE":
            ends, pending = {*map(int, each["inputs"])}, [*map(int, each["outputs"])]
            while pending:
                tensor = pending.pop()
                if tensor not in ends and (place := made_by.get(tensor)) is not None and place not in found:
                    found.add(place)
                    pending += map(int, operators[place]["inputs"])
    return found


class LiteRTSession(Session):
    """An interpreter with its tensors allocated for the trial's shapes; inputs and outputs are copied."""

    def __init__(self, path: str, trial: Trial) -> None:
        self._trial = trial
        self._has_delegate = bool(trial.options.get("xnnpack", True))
        self._opened = open_file(path, trial.runtime.threads, self._has_delegate)
        self._ports, results = list_ports(self._opened)
        self._shapes = static_shapes([port.tensor for port in self._ports], trial.dims)
        self.inputs = tuple(replace(port.tensor, shape=self._shapes[port.tensor.name]) for port in self._ports)
        for port, tensor in zip(self._ports, self.inputs, strict=True):
            if tensor.shape != port.tensor.shape:
                self._opened.resize_tensor_input(port.index, list(tensor.shape), strict=True)
        try:
            self._opened.allocate_tensors()
        except (ValueError, RuntimeError) as e:
            raise UserError(f"{trial.model.name} can't be loaded by {ENGINE}: {first_line(e)}") from e
        self._results = results
        _, allocated = list_ports(self._opened)
        self.outputs = tuple(port.tensor for port in allocated if BATCH not in port.tensor.shape)

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Copy the feeds into the interpreter, quantised where the file's inputs are."""
        typed = [fitted(feeds[tensor.name], tensor, self._shapes[tensor.name]) for tensor in self.inputs]
        for port, values in zip(self._ports, typed, strict=True):
            self._opened.set_tensor(port.index, port.store(values))

    def run(self, slot: int = 0) -> None:
        """Run the operators, to their end."""
        self._opened.invoke()

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """Return copies of the outputs by name."""
        return {port.tensor.name: port.read(self._opened.get_tensor(port.index)) for port in self._results}

    def facts(self) -> EngineFacts:
        """Return operators, the types that they multiply in by the file, and which of them the delegate runs."""
        operators = list_operators(self._opened)
        delegated = find_delegated(operators)
        own = [each["op_name"] for each in operators if each["op_name"] != "DELEGATE"]
        left = Counter(name for k, name in enumerate(own) if k not in delegated)
        types = dict(count_types(self._opened))
        sentence = f"{DELEGATE} runs {len(delegated)} of {len(own)} operators"
        if left and delegated:
            sentence += f", {ENGINE}'s own kernels the others ({', '.join(f'{n} {name}' for name, n in left.items())})"
        return EngineFacts(
            layers=len(own),
            layers_by_type=types,
            operators=dict(Counter(own).most_common()),
            nodes_by_provider={DELEGATE: len(delegated), ENGINE: left.total()},
            precision_truth=precision_truth(self._trial.precision, types, f"{ENGINE} by the file's types"),
            threads=self._trial.runtime.threads,
            options={"xnnpack": self._has_delegate},
            fallback=sentence if self._has_delegate and 2 * len(delegated) < len(own) else "",
            notes=(sentence,) if self._has_delegate and left else (),
        )

    def close(self) -> None:
        """Free the interpreter."""
        del self._opened


class LiteRTMaker(Maker):
    """Converts a module with litert-torch, or points to the file that was given."""

    name = "litert"
    requires = ("litert-torch", "torch", "torchvision", "timm", "ultralytics")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.tflite; `Unavailable` without litert-torch, `UserError` for what can't be converted."""
        began = time.perf_counter()
        if recipe.model.file:
            return _describe_given(recipe)
        torch, library = import_torch(), _import_converter()
        path, dims = folder / "model.tflite", recipe.dims
        torch.set_num_threads(recipe.runtime.threads)
        with memory_errors(), torch.no_grad(), silenced():
            module = models.load(recipe.model, dims)
            weights, parameters = models.weights_sha256(module), sum(p.numel() for p in module.parameters())
            inputs = module_inputs(recipe.model, dims)
            example = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in inputs}
            try:
                library.convert(_name_outputs(torch, module, recipe), sample_kwargs=example).export(str(path))
            except Exception as e:  # its errors have no common type
                if is_memory_error(e):
                    raise
                raise UserError(f"litert-torch can't convert {recipe.model.name}: {first_line(e)}") from e
        read = TFLITE.read(str(path), Trial(recipe.model, self.name, recipe.precision, dims))
        made_by = MakerFacts(
            backend=self.name, options=dict(recipe.options), versions=system.versions(self.requires),
            weights_sha256=weights, parameters=parameters,
        )  # fmt: skip
        return artifact_of(path, TFLITE.name, recipe.precision, (read.inputs, read.outputs), made_by, began)


LITERT_MAKER = LiteRTMaker()


def _import_converter() -> Any:
    try:
        with silenced():
            import litert_torch
    except (ImportError, OSError, AttributeError) as e:
        raise Unavailable(f"litert-torch can't be imported in this Python ({first_line(e)}); {HERE}") from e
    return litert_torch


def _name_outputs(torch: Any, module: Any, recipe: Recipe) -> Any:
    """Return the module with its inputs by keyword and its outputs by name: the file's signature takes both."""
    flat = positional(torch, module, recipe.model.inputs, flat=True)
    names = [spec.name for spec in recipe.model.inputs if spec.dtype] or ["input"]

    class Named(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.model = flat

        def forward(self, **values: Any) -> dict[str, Any]:
            outputs = self.model(*(values[name] for name in names))
            return dict(zip(numbered_names("output", len(outputs)), outputs, strict=True))

    return Named().eval()


def _describe_given(recipe: Recipe) -> Artifact:
    """Return the user's own file as an artifact."""
    path = recipe.model.file
    read = TFLITE.read(path, Trial(recipe.model, LITERT.name, recipe.precision, recipe.dims))
    made_by = MakerFacts(backend=LITERT.name, versions=system.versions(LITERT.requires))
    ends = (read.inputs, read.outputs)
    artifact = artifact_of(Path(path), TFLITE.name, read.precision, ends, made_by, time.perf_counter())
    return replace(artifact, seconds=0.0, made_by=replace(made_by, weights_sha256=artifact.sha256))


@dataclass(frozen=True)
class CalibrationFeeds:
    """Calibration data as ai-edge-quantizer reads it: from the start, once to count it and once more."""

    data: CalibrationImages | CalibrationInputs

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self.data.feeds(0, len(self.data))


class LiteRTQuantiser(Maker):
    """Quantises a float .tflite file with ai-edge-quantizer; inputs and outputs stay floats."""

    name = "litert_int8"
    requires = ("ai-edge-quantizer", "ai-edge-litert")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.tflite, for a static scheme calibrated on the recipe's data."""
        assert parent is not None
        began, scheme = time.perf_counter(), str(recipe.options["scheme"])
        library = _import_quantizer()
        engine = library.quantizer.Quantizer(parent.path)
        engine.load_quantization_recipe(getattr(library.recipe, SCHEMES[scheme])())
        path, data, ranges = folder / "model.tflite", None, None
        try:
            if scheme == STATIC:
                data = calibration_of(recipe, parent)
                ranges = _calibrate(library, engine, parent.path, data, recipe.runtime.threads)
            engine.quantize(ranges).export_model(str(path), overwrite=True)
        except (ValueError, RuntimeError, KeyError) as e:
            raise UserError(f"ai-edge-quantizer can't quantise {recipe.model.name}: {first_line(e)}") from e
        origin = parent.made_by
        made_by = MakerFacts(
            backend=self.name, options=dict(recipe.options), versions=system.versions(self.requires),
            weights_sha256=origin.weights_sha256, parameters=origin.parameters, scheme=SCHEMES[scheme],
            calibration=replace(data.facts, method="minmax") if data else None,
            warnings=tuple(data.warnings) if data else (),
        )  # fmt: skip
        return derived(parent, path, "int8", made_by, began)


LITERT_INT8 = LiteRTQuantiser()


def _import_quantizer() -> Any:
    try:
        for part in ("calibrator", "quantizer", "recipe"):  # which import the others
            importlib.import_module(f"ai_edge_quantizer.{part}")
    except (ImportError, OSError) as e:
        raise Unavailable(f"ai-edge-quantizer can't be imported in this Python ({first_line(e)}); {HERE}") from e
    return importlib.import_module("ai_edge_quantizer")


def _calibrate(library: Any, engine: Any, path: str, data: Any, threads: int) -> Any:
    """Keep the quantizer's inputs and outputs in float, and return the ranges of all tensors over the data.

    `Quantizer.calibrate` averages them with a weight of 0.05 for each batch after the first: after 24 photos the ranges
    were still almost those of the first, and outputs were off by 95 % in place of 12 % (0.10).
    """
    for end in (library.qtyping.TFLOperationName.INPUT, library.qtyping.TFLOperationName.OUTPUT):
        untouched = library.algorithm_manager.AlgorithmName.NO_QUANTIZE
        engine.update_quantization_recipe(".*", end, algorithm_key=untouched)
    manager = library.recipe_manager.RecipeManager()
    manager.load_quantization_recipe(engine.get_quantization_recipe())
    keys = [*open_file(path).get_signature_list()] or [None]
    widest = library.utils.qsv_utils.min_max_update
    calibrator = library.calibrator.Calibrator(path, num_threads=threads, qsv_update_func=widest)
    calibrator.calibrate({keys[0]: CalibrationFeeds(data)}, manager)
    return calibrator.get_model_qsvs()
