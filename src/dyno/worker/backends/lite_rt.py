"""LiteRT, formerly TensorFlow Lite, on the CPU (`litert`): .tflite files made by litert-torch or given by the user."""

from __future__ import annotations

import base64
import importlib
import re
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    refuse_requantising,
)
from dyno.worker.backends.aot_package import numbered_names
from dyno.worker.backends.pytorch import module_inputs
from dyno.worker.extras import load_library
from dyno.worker.facts.engine import EngineFacts, Probe, precision_truth
from dyno.worker.facts.files import ONE_OF, MakerFacts
from dyno.worker.inputs import calibration
from dyno.worker.inputs.specs import fit_feed, image_of, static_shapes
from dyno.worker.nets import file_facts, models
from dyno.worker.option_values import Check, flag, one_of, whole
from dyno.worker.sessions import torch_support
from dyno.worker.spec import BATCH_AXIS, Artifact, Preprocess, Recipe, Tensor, Trial, UserError

ENGINE_NAME, DELEGATE_NAME = "LiteRT", "XNNPACK"
CONVERTER_NAME = "litert_torch"  # runtime name for making files
CONVERTER_ADVICE = "pass a Python that has it: --python litert_torch=PATH (there: pip install litert-torch torchvision)"
STATIC, DYNAMIC = "static", "dynamic"
# XNNPACK has these only for floats: as integers they run in LiteRT's reference kernels (ViT-Tiny: 30 ms, not 5.6).
KEPT_FLOAT = "BATCH_MATMUL DIV GELU HARD_SWISH MAXIMUM RSQRT SOFTMAX SQRT SQUARED_DIFFERENCE SUM".split()
QUANTISER_RECIPES = {STATIC: "static_wi8_ai8", DYNAMIC: "dynamic_wi8_afp32"}  # recipes of ai-edge-quantizer
COMPUTE_OPERATORS = re.compile("CONV|FULLY_CONNECTED|MATMUL|LSTM|RNN|SVDF")  # operators that multiply
WEIGHTS_FIRST = {"TRANSPOSE_CONV", "CONV_3D_TRANSPOSE"}  # operators with the output's shape as the first input
INTEGER_TYPES = {"int8": "int8", "uint8": "int8", "int4": "int8", "int2": "int8", "int16": "int16"}

# A file that adds a vector of two numbers to itself, compressed.
ADDITION_MODEL = (
    "eNpNjzsOwjAQRJ/BoEixIooUKbkDOUMqCgoKrkATKBKJ41JyCzN2Np+1xtbufLRugHt3vUBFzYlAoYlXhzpohJ+wF1xm4BxjdMaH"
    "xeV1T7NbyhQe5qlJVeU3actNvqqcfR/LTdixltsA41rb5StPYf6j8BqH9zisGcF+hO03aw/Cs8/SReuM9/nAH5vpFNE="
)


class TfliteFormat(FileFormat):
    """A .tflite file of graph and weights, for one batch unless its first axes are free."""

    name = "tflite"
    suffixes = (".tflite",)
    backend = "litert"
    builders = ("litert",)
    on_device = True

    def read(self, path: str, trial: Trial) -> FileContents:
        """Read the file; it is int8 or fp16 if most of its operators that multiply have weights of that type."""
        interpreter = open_file(path)
        inputs, outputs = list_ports(interpreter)
        types = count_types(interpreter)
        integers = sum(types[kind] for kind in types if kind in INTEGER_TYPES)
        halves = count_half_weights(interpreter)
        precision = next((name for name, n in (("int8", integers), ("fp16", halves)) if 2 * n > types.total()), "fp32")
        ports = tuple(p.tensor for p in inputs), tuple(p.tensor for p in outputs)
        metadata = file_facts.read_attached(path)
        purpose = file_facts.read_purpose(metadata)
        purpose = purpose if metadata else replace(purpose, preprocess=find_range(inputs))
        return FileContents(*ports, precision, task=purpose, image=file_facts.read_image_facts(metadata))


TFLITE = TfliteFormat()


class LiteRT(Backend):
    """LiteRT's interpreter on the CPU; fp16 stores weights in float16 and computes in float32.

    Options: `xnnpack` (bool, default on: use the delegate), and for int8 `scheme` (static: calibrated; dynamic:
    activations quantised at run time) and `samples` of the calibration.
    """

    name = "litert"
    requires = ("ai-edge-litert",)
    precisions = ("fp32", "fp16", "int8")
    options = ("xnnpack", "scheme", "samples")
    values: Mapping[str, Check] = {"xnnpack": flag, "scheme": one_of(*QUANTISER_RECIPES), "samples": whole(1)}
    files = TfliteFormat.suffixes

    def refuse(self, trial: Trial) -> str:
        """See `Backend.refuse`; a static scheme needs calibration data."""
        if reason := super().refuse(trial) or refuse_requantising(trial):
            return reason
        if trial.model.precision == "fp16" != trial.precision:  # the quantizer skips float16 weights
            return f"the file's weights are fp16 already; run it as fp16, or give the float file for {trial.precision}"
        option = next((name for name in ("scheme", "samples") if name in trial.options), "")
        if option and (trial.precision != "int8" or trial.model.precision == "int8"):
            return f"{option} is for a float model that Dyno quantises to int8; omit it"
        if trial.options.get("scheme", STATIC) == STATIC:
            return calibration.missing_data(trial)
        return "" if "samples" not in trial.options else "samples is for scheme=static, which is calibrated"

    def recipe(self, trial: Trial) -> Recipe:
        """Return the recipe of the file at the trial's batch; a given file of that precision is used unchanged."""
        is_own = bool(trial.model.file) and trial.precision == trial.model.precision
        options = {name: value for name, value in trial.options.items() if name != "xnnpack"}
        is_static = trial.precision == "int8" and not is_own and options.setdefault("scheme", STATIC) == STATIC
        data = calibration.calibration_data(trial) if is_static else None
        runtime = replace(trial.runtime, name=trial.runtime.name if is_own else CONVERTER_NAME, device="cpu", threads=1)
        return Recipe(
            self.name, TFLITE.name, trial.precision, trial.model, trial.dims, options, data, runtime=runtime
        )  # fmt: skip

    def probe(self) -> Probe:
        """Add two numbers, in a file of a few bytes; report if this Python can't make files."""
        interpreter = _import_module("ai_edge_litert.interpreter").Interpreter(
            model_content=zlib.decompress(base64.b64decode(ADDITION_MODEL))
        )
        interpreter.allocate_tensors()
        (operand,), (result,) = list_ports(interpreter)
        interpreter.set_tensor(operand.index, np.array([1, 2], np.float32))
        interpreter.invoke()
        is_correct = [*interpreter.get_tensor(result.index)] == [2, 4]
        return Probe(
            version=system.find_versions(self.requires).get("ai-edge-litert", ""),
            devices=("cpu",) if is_correct else (),
            detail=""
            if find_spec(CONVERTER_NAME)
            else f"runs .tflite files, makes none without litert-torch; {CONVERTER_ADVICE}",
        )

    def prepare(self, trial: Trial) -> None:
        """Import the interpreter."""
        _import_module("ai_edge_litert.interpreter")

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Open the file with the trial's threads and shapes; XNNPACK packs the weights here."""
        if artifact is None:
            raise UserError(f"{self.name} runs a .tflite file that was made before")
        return LiteRTSession(artifact.path, trial)


LITERT = LiteRT()


def _import_module(module: str, cure: str = "") -> Any:
    with torch_support.silence_warnings():
        return load_library(module, cure=cure)


def open_file(path: str, threads: int = 1, has_delegate: bool = False) -> Any:
    """Return LiteRT's interpreter of the file; raise a `UserError` for a missing or damaged file."""
    library = _import_module("ai_edge_litert.interpreter")
    kinds = library.OpResolverType
    resolver = kinds.AUTO if has_delegate else kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    with torch_support.raise_refusals(f"{path} can't be read by {ENGINE_NAME}"):
        return library.Interpreter(path, num_threads=threads, experimental_op_resolver_type=resolver)


@dataclass(frozen=True)
class TflitePort:
    """An input or output of a file: its index, its tensor for Dyno, and its stored type.

    A quantised port has the value `scale * (stored - zero_point)`, float32 to the outside.
    """

    index: int
    tensor: Tensor
    storage_type: str
    scale: float
    zero_point: int

    def store_values(self, values: np.ndarray) -> np.ndarray:
        """Return the values as the file stores them."""
        if not self.scale:
            return values
        limits = np.iinfo(self.storage_type)
        steps = np.rint(values / self.scale) + self.zero_point
        return np.asarray(np.clip(steps, limits.min, limits.max), self.storage_type)

    def read_values(self, array: np.ndarray) -> np.ndarray:
        """Return the stored values as numbers, floating-point ones as float32."""
        if self.scale:
            return np.asarray((array.astype(np.float32) - self.zero_point) * np.float32(self.scale))
        return np.asarray(array, np.float32) if array.dtype.kind == "f" else array


def list_ports(interpreter: Any) -> tuple[list[TflitePort], list[TflitePort]]:
    """Return inputs and outputs in order, named by the file's signature if it has exactly one, else by its tensors."""
    keys = list(interpreter.get_signature_list())
    signature = interpreter.get_signature_runner(keys[0]) if len(keys) == 1 else None
    sides = []
    for name in ("get_input_details", "get_output_details"):
        names = {p["index"]: key for key, p in getattr(signature, name)().items()} if signature else {}
        sides.append([_read_port(p, names.get(p["index"], p["name"])) for p in getattr(interpreter, name)()])
    return sides[0], sides[1]


def _read_port(details: Mapping[str, Any], name: str) -> TflitePort:
    kind, (scale, zero_point) = np.dtype(details["dtype"]).name, details["quantization"]
    if not kind.startswith(("float", "int", "uint", "bool")):
        raise UserError(f"{name!r} is {'text' if kind.startswith('bytes') else kind}, not an array of numbers")
    signature = details["shape_signature"] if len(details["shape_signature"]) else details["shape"]
    shape = tuple(int(n) if n >= 0 else "" if axis else BATCH_AXIS for axis, n in enumerate(signature))
    scale = float(scale) if kind in INTEGER_TYPES else 0.0
    dtype = "float32" if scale or kind == "float16" else kind
    return TflitePort(int(details["index"]), Tensor(name, dtype, shape), kind, scale, int(zero_point))


def find_range(inputs: Sequence[TflitePort]) -> Preprocess | None:
    """Return the normalisation of a quantised image with a usual range (0 to 255, 0 to 1, -1 to 1); None for others."""
    image = image_of([port.tensor for port in inputs])
    scale, low = next(((p.scale, float(p.read_values(np.array(np.iinfo(p.storage_type).min))))
                       for p in inputs if p.tensor == image and p.scale), (0.0, 0.0))  # fmt: skip
    steps = np.iinfo("uint8").max
    for minimum, maximum in ((0, 255), (0, 1), (-1, 1)):
        step = (maximum - minimum) / steps
        if abs(scale - step) <= step / steps and abs(low - minimum) <= step:
            return Preprocess((-minimum / (maximum - minimum),) * 3, (1 / (maximum - minimum),) * 3)
    return None


def count_types(interpreter: Any) -> Counter[str]:
    """Return the number of operators by the type of their products; quantised weights mean integers.

    LiteRT quantises floating-point activations at run time if the weights are quantised.
    """
    types = {tensor["index"]: np.dtype(tensor["dtype"]).name for tensor in interpreter.get_tensor_details()}
    counts = Counter[str]()
    for operator in interpreter._get_ops_details():
        if COMPUTE_OPERATORS.search(operator["op_name"]):
            inputs = [*operator["inputs"]]
            data, weights = (inputs[2], inputs[1]) if operator["op_name"] in WEIGHTS_FIRST else inputs[:2]
            data_type, weight_type = types.get(data, "float32"), types.get(weights, "float32")
            counts[INTEGER_TYPES.get(data_type) or INTEGER_TYPES.get(weight_type) or data_type] += 1
    return counts


def count_half_weights(interpreter: Any) -> int:
    """Return the number of compute operators with float16 weights, which another operator widens to float32."""
    types = {each["index"]: np.dtype(each["dtype"]).name for each in interpreter.get_tensor_details()}
    operators = [*interpreter._get_ops_details()]
    widened = {
        int(tensor)
        for each in operators
        if each["op_name"] == "DEQUANTIZE" and types.get(each["inputs"][0]) == "float16"
        for tensor in each["outputs"]
    }
    return sum(
        bool(COMPUTE_OPERATORS.search(each["op_name"])) and not widened.isdisjoint(each["inputs"]) for each in operators
    )


def find_delegated(operators: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the positions of operators run by a delegate: those between its inputs and its outputs."""
    indices = [k for k, operator in enumerate(operators) if operator["op_name"] != "DELEGATE"]
    producers = {int(tensor): k for k in indices for tensor in operators[k]["outputs"]}
    delegated: set[int] = set()
    for operator in operators:
        if operator["op_name"] == "DELEGATE":
            ends, pending = {*map(int, operator["inputs"])}, [*map(int, operator["outputs"])]
            while pending:
                tensor = pending.pop()
                if tensor not in ends and (index := producers.get(tensor)) is not None and index not in delegated:
                    delegated.add(index)
                    pending += map(int, operators[index]["inputs"])
    return delegated


class LiteRTSession(Session):
    """An interpreter with its tensors allocated for the trial's shapes; inputs and outputs are copied."""

    def __init__(self, path: str, trial: Trial) -> None:
        self._trial = trial
        self._has_delegate = bool(trial.options.get("xnnpack", True))
        self._opened = open_file(path, trial.runtime.threads, self._has_delegate)
        self._ports, self._results = list_ports(self._opened)
        self._shapes = static_shapes([port.tensor for port in self._ports], trial.dims)
        self.inputs = tuple(replace(port.tensor, shape=self._shapes[port.tensor.name]) for port in self._ports)
        for port, tensor in zip(self._ports, self.inputs, strict=True):
            if tensor.shape != port.tensor.shape:
                self._opened.resize_tensor_input(port.index, list(tensor.shape), strict=True)
        with torch_support.raise_refusals(f"{trial.model.name} can't be loaded by {ENGINE_NAME}"):
            self._opened.allocate_tensors()
        _, allocated = list_ports(self._opened)
        self.outputs = tuple(port.tensor for port in allocated if BATCH_AXIS not in port.tensor.shape)

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Copy the feeds into the interpreter, quantised if the file's inputs are."""
        arrays = [fit_feed(feeds, tensor, self._shapes[tensor.name]) for tensor in self.inputs]
        for port, values in zip(self._ports, arrays, strict=True):
            self._opened.set_tensor(port.index, port.store_values(values))

    def run(self, slot: int = 0) -> None:
        """Run all operators."""
        self._opened.invoke()

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """Return copies of the outputs by name."""
        return {port.tensor.name: port.read_values(self._opened.get_tensor(port.index)) for port in self._results}

    def facts(self) -> EngineFacts:
        """Return operators, the types of their products by the file, and the number run by the delegate."""
        operators = [*self._opened._get_ops_details()]  # no public function for this
        delegated = find_delegated(operators)
        names = [operator["op_name"] for operator in operators if operator["op_name"] != "DELEGATE"]
        rest = Counter(name for k, name in enumerate(names) if k not in delegated)
        types = dict(count_types(self._opened))
        sentence = f"{DELEGATE_NAME} runs {len(delegated)} of {len(names)} operators"
        if rest and delegated:
            sentence += (
                f", {ENGINE_NAME}'s own kernels the others ({', '.join(f'{n} {name}' for name, n in rest.items())})"
            )
        truth = precision_truth(self._trial.precision, types, f"{ENGINE_NAME} by the file's types")
        is_unchanged = self._trial.model.file and self._trial.precision == self._trial.model.precision
        # float16 is only the storage type of weights
        if is_unchanged and truth.refuted and self._trial.precision != "fp16":
            type_counts = ", ".join(f"{count} in {kind}" for kind, count in types.items())
            truth = replace(
                truth, ok=True, refuted=False, sentence=f"the file mixes types, and they were kept: {type_counts}"
            )
        if halves := count_half_weights(self._opened):
            truth = replace(truth, sentence=f"{truth.sentence}; {halves} have weights stored in float16")
        return EngineFacts(
            layers=len(names), layers_by_type=types, operators=dict(Counter(names).most_common()),
            nodes_by_provider={DELEGATE_NAME: len(delegated), ENGINE_NAME: rest.total()},
            precision_truth=truth,
            threads=self._trial.runtime.threads, options={"xnnpack": self._has_delegate},
            fallback=sentence if self._has_delegate and 2 * len(delegated) < len(names) else "",
            notes=(sentence,) if self._has_delegate and rest else (),
        )  # fmt: skip


class LiteRTMaker(Maker):
    """A maker that converts a module with litert-torch, or changes a given file's weights, to fp32, fp16 or int8."""

    name = "litert"
    requires = ("litert-torch", "ai-edge-litert", "ai-edge-quantizer", "torch", "torchvision", "timm", "ultralytics")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.tflite; raise `Unavailable` without the libraries, a `UserError` for their refusals."""
        began, path, file = time.perf_counter(), folder / "model.tflite", recipe.model.file
        facts = self.describe(recipe)
        if not file:
            source = folder / "float.tflite" if recipe.precision != "fp32" else path
            facts = _convert_module(recipe, facts, source)
        artifact = _describe_file(Path(file or source), recipe, facts, began)
        if file:
            facts = replace(facts, weights_sha256=artifact.sha256, warnings=_warn_of_signatures(file))
        if recipe.precision != artifact.precision:
            facts = (_cast_weights if recipe.precision == "fp16" else _quantise_file)(artifact, recipe, facts, path)
            (folder / "float.tflite").unlink(missing_ok=True)
            artifact = _describe_file(path, recipe, facts, began)
        elif file:
            artifact = replace(artifact, seconds=0.0)
        return replace(artifact, precision=recipe.precision, made_by=facts)


LITERT_MAKER = LiteRTMaker()


def _warn_of_signatures(file: str) -> tuple[str, ...]:
    """Return a warning on a file with several functions: the interpreter runs the first."""
    interpreter = open_file(file)
    names = list(interpreter.get_signature_list())
    inputs = ", ".join(port.tensor.name for port in list_ports(interpreter)[0])
    sentence = f"{ONE_OF}: the one with the input {inputs}, of {', '.join(names)}; convert another alone to measure it"
    return (sentence,) if len(names) > 1 else ()


def _describe_file(path: Path, recipe: Recipe, facts: MakerFacts, began: float) -> Artifact:
    contents = TFLITE.read(str(path), Trial(recipe.model, LITERT.name, recipe.precision, recipe.dims))
    return artifact_of(path, TFLITE.name, contents.precision, (contents.inputs, contents.outputs), facts, began)


def _convert_module(recipe: Recipe, facts: MakerFacts, path: Path) -> MakerFacts:
    """Write the module as a file; its signature names the inputs and outputs."""
    torch, library = torch_support.import_torch(), _import_module("litert_torch", CONVERTER_ADVICE)
    nn = torch.nn
    names = [spec.name for spec in recipe.model.inputs if spec.dtype] or ["input"]
    with torch_support.memory_errors(), torch.no_grad(), torch_support.silence_warnings():
        module = torch_support.refuse_script(torch, models.load(recipe.model, recipe.dims))
        flat_module = torch_support.make_positional(torch, module, recipe.model.inputs, flat=True)

        class Named(nn.Module):  # type: ignore[misc, name-defined]  # torch has no types here
            def __init__(self) -> None:
                super().__init__()
                self.model = flat_module

            def forward(self, **values: Any) -> dict[str, Any]:
                outputs = self.model(*(values[name] for name in names))
                return dict(zip(numbered_names("output", len(outputs)), outputs, strict=True))

        inputs = module_inputs(recipe.model, recipe.dims)
        example = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in inputs}
        with torch_support.raise_refusals(f"litert-torch can't convert {recipe.model.name}"):
            library.convert(Named().eval(), sample_kwargs=example).export(str(path))
    return replace(facts, **models.describe_weights(module))


def _cast_weights(artifact: Artifact, recipe: Recipe, facts: MakerFacts, path: Path) -> MakerFacts:
    """Write the file with float16 weights, each followed by an operator that widens them."""
    library, managers = (
        _import_module(f"ai_edge_quantizer.{name}", CONVERTER_ADVICE) for name in ("quantizer", "recipe_manager")
    )
    names = _import_module("ai_edge_quantizer.algorithm_manager", CONVERTER_ADVICE).AlgorithmName
    operators = _import_module("ai_edge_quantizer.qtyping", CONVERTER_ADVICE).TFLOperationName.ALL_SUPPORTED
    manager, engine = managers.RecipeManager(), library.Quantizer(artifact.path)
    manager.add_weight_only_config(".*", operators, num_bits=16, algorithm_key=names.FLOAT_CASTING)
    engine.load_quantization_recipe(manager.get_quantization_recipe())
    with torch_support.raise_refusals(f"ai-edge-quantizer can't store weights of {recipe.model.name} in float16"):
        engine.quantize().export_model(str(path), overwrite=True)
    return facts


def _quantise_file(artifact: Artifact, recipe: Recipe, facts: MakerFacts, path: Path) -> MakerFacts:
    """Write the quantised file; a static scheme is calibrated on the recipe's data. Inputs and outputs stay floats."""
    scheme = QUANTISER_RECIPES[str(recipe.options["scheme"])]
    library, recipes = (
        _import_module(f"ai_edge_quantizer.{name}", CONVERTER_ADVICE) for name in ("quantizer", "recipe")
    )
    engine, ranges = library.Quantizer(artifact.path), None
    engine.load_quantization_recipe(getattr(recipes, scheme)())
    with torch_support.raise_refusals(f"ai-edge-quantizer can't quantise {recipe.model.name}"):
        if recipe.data is not None:
            data = calibration.calibration_of(recipe, artifact)
            ranges = _find_ranges(engine, artifact.path, [*data.feeds(0, len(data))], recipe.runtime.threads)
            calibration_facts = replace(data.facts, method="minmax")
            facts = replace(facts, calibration=calibration_facts, warnings=tuple(data.warnings))
        engine.quantize(ranges).export_model(str(path), overwrite=True)
    return replace(facts, scheme=scheme)


def _find_ranges(engine: Any, path: str, feeds: Sequence[Arrays], threads: int) -> Any:
    """Keep inputs, outputs and `KEPT_FLOAT` in float, and return the ranges of all tensors over the feeds.

    `Quantizer.calibrate` weights each batch after the first with 0.05: after 24 photos the ranges were almost those of
    the first, and outputs were off by 95 %, not 12 % (0.10). LiteRT refuses divisors that are zero as integers.
    """
    library = importlib.import_module("ai_edge_quantizer")
    kinds, no_quantisation = library.qtyping.TFLOperationName, library.algorithm_manager.AlgorithmName.NO_QUANTIZE
    for kind in (kinds.INPUT, kinds.OUTPUT, *(kinds[name] for name in KEPT_FLOAT if name in kinds.__members__)):
        engine.update_quantization_recipe(".*", kind, algorithm_key=no_quantisation)
    manager = library.recipe_manager.RecipeManager()
    manager.load_quantization_recipe(engine.get_quantization_recipe())
    update_range = library.utils.qsv_utils.min_max_update
    calibrator = library.calibrator.Calibrator(path, num_threads=threads, qsv_update_func=update_range)
    key = next(iter(open_file(path).get_signature_list()), None)
    calibrator.calibrate({key: feeds}, manager)
    return calibrator.get_model_qsvs()
