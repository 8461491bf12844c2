"""OpenVINO's files, an IR of .xml and .bin: made from an ONNX file, or given by the user."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import FileContents, FileFormat, Maker
from dyno.worker.backends.open_vino import TYPE_NAMES, import_library, read_model, tensors_of, to_plain
from dyno.worker.facts.engine import PRECISION_TYPES, QUANTISED_PRECISIONS
from dyno.worker.facts.files import OTHER_SHAPE, OTHER_VALUES
from dyno.worker.inputs import input_data
from dyno.worker.inputs.specs import MAX_IMAGE_CHANNELS, find_axes, find_largest_pixel, image_of
from dyno.worker.makers.precision import INHERITED_FACTS
from dyno.worker.nets import file_facts
from dyno.worker.onnx_graph.check import make_session
from dyno.worker.spec import Artifact, DataSpec, Preprocess, Recipe, Tensor, Trial, UserError, to_json

COMPUTE_LAYER = re.compile("Convolution|MatMul|LSTM|GRU|RNN|ScaledDotProduct|Einsum")
DEQUANTISING_LAYERS = "Convert Multiply Subtract Reshape Transpose Unsqueeze Squeeze FakeQuantize".split()
FULL_TYPES = ("f32", "f64")
TRUE_WORDS = ("yes", "true", "1")
NUMBER_LIST = re.compile(r"[\d.eE+-]+")
TYPE_PRECISIONS = {type_: precision for precision, type_ in reversed(PRECISION_TYPES.items())} | {"float64": "fp32"}
ONNX_METADATA_KEY = "framework"  # IR entry with an ONNX file's metadata
COMPARE_ADVICE = "one of the two is wrong: compare its outputs with those of onnxruntime"  # if two readings differ
AFFINE_OPERATORS = {"Add": "Add", "Subtract": "Sub", "Multiply": "Mul", "Divide": "Div"}  # by their names in ONNX
FREE_ADVICE = " only while axes are free: trials fix the shapes and agree, so call reshape() before compiling the file"
MAX_OUTPUT_ERROR = 0.2  # share of an output's norm, far above rounding
MAX_CHECKED_BYTES = 1 << 30  # larger files aren't compared after conversion
MODEL_INFO_KEY = "model_info"  # entry of OpenVINO's Model API, also in ultralytics' files


class IRFormat(FileFormat):
    """An IR: the graph in .xml, its weights in a .bin of the same name."""

    name = "openvino"
    suffixes = (".xml",)
    backend = "openvino"
    builders = ("openvino",)

    def companions(self, path: Path) -> list[Path]:
        return [path.with_suffix(".bin")]

    def read(self, path: str, trial: Trial) -> FileContents:
        """Read the IR; its precision is its weights' stored type, or int8 if activations are quantised.

        OpenVINO keeps the metadata of the IR's ONNX file; other programs write their own.
        """
        model = read_model(import_library(), path)
        precision, parameters = read_weights(model)
        inputs, outputs = tensors_of(model.inputs), tensors_of(model.outputs)
        metadata = (
            _read_model_info(model, inputs) | _read_entry(model, ONNX_METADATA_KEY) | file_facts.read_attached(path)
        )
        return FileContents(
            inputs, outputs, precision, task=file_facts.read_purpose(metadata),
            image=file_facts.read_image_facts(metadata),
            parameters=parameters, largest_pixel=find_largest_pixel(_list_first_steps(model, inputs)),
        )  # fmt: skip


def _list_first_steps(model: Any, inputs: Sequence[Tensor]) -> list[tuple[str, np.ndarray]]:
    """Return the steps of the first image's graph for `find_largest_pixel`, as `graph_facts.list_first_steps` does.

    OpenVINO's converter writes them with its options mean_values and scale_values.
    """
    image, steps = image_of(inputs), list[tuple[str, np.ndarray]]()
    output = model.inputs[inputs.index(image)] if image else None
    while output is not None:
        readers = [r for r in output.get_target_inputs() if r.get_node().get_type_name() != "ShapeOf"]
        if len(readers) != 1:
            break
        node = readers[0].get_node()
        kind = node.get_type_name()
        if kind in AFFINE_OPERATORS:
            value = _read_constant(node.input_value(1 - readers[0].get_index()).get_node())
            if value is None or (readers[0].get_index() and kind in ("Subtract", "Divide")):
                return []
            steps.append((AFFINE_OPERATORS[kind], value))
        elif kind not in ("Convert", "Transpose"):
            break
        output = node.output(0)
    return steps


def _read_constant(node: Any) -> np.ndarray | None:
    """Return a small constant, flat in float64, also one stored in another type; None for anything else."""
    node = node.input_value(0).get_node() if node.get_type_name() == "Convert" else node
    if node.get_type_name() != "Constant" or not 0 < math.prod(node.get_output_shape(0)) <= MAX_IMAGE_CHANNELS:
        return None
    value: np.ndarray = node.get_data().astype(np.float64).reshape(-1)
    return value


def _read_entry(model: Any, key: str) -> dict[str, str]:
    entry = model.get_rt_info([key]).value if model.has_rt_info([key]) else {}
    return {name: str(to_plain(value)) for name, value in entry.items()}


def _read_model_info(model: Any, inputs: Sequence[Tensor]) -> dict[str, str]:
    """Return class names and normalisation from Model API's entry, by the keys of `file_facts.read_purpose`.

    There an image is (pixel - mean) / scale with pixels in 0..255; with `embedded_processing` the graph does that.
    """
    info = _read_entry(model, MODEL_INFO_KEY)
    metadata = {"class_names": str(info["labels"].split())} if "labels" in info else {}
    numbers = {key: [*map(float, NUMBER_LIST.findall(info.get(key, "")))] for key in ("mean_values", "scale_values")}
    image = image_of(inputs)
    channels = image.shape[find_axes(image.shape)[0]] if image else 0
    if (
        any(numbers.values())
        and isinstance(channels, int)
        and info.get("embedded_processing", "").lower() not in TRUE_WORDS
    ):
        mean, std = (
            tuple(n / 255 for n in (values or defaults) * (channels if len(values) < 2 else 1))
            for values, defaults in ((numbers["mean_values"], [0.0]), (numbers["scale_values"], [1.0]))
        )
        resize = 0.0 if info.get("resize_type") == "standard" else 1.0
        metadata["preprocess"] = json.dumps(to_json(Preprocess(mean, std, resize=resize)))
    return metadata


def read_weights(model: Any) -> tuple[str, int]:
    """Return the precision of a model's layers, the type of most of their weights, and the number of parameters.

    Compressed weights are constants of few bits followed by conversions, shifts and scales, which aren't parameters. A
    model with quantised activations (FakeQuantize) is int8, whatever the type of its weights.
    """
    constants, layers, scales, is_quantised = dict[str, tuple[str, int]](), set[str](), set[str](), False
    for prefix, op in _ops_in(model):
        kind = op.get_type_name()
        is_quantised = is_quantised or kind == "FakeQuantize"
        if kind == "Constant":
            count = math.prod(op.get_output_shape(0))
            precision = TYPE_PRECISIONS.get(TYPE_NAMES.get(op.get_element_type().get_type_name(), ""), "")
            constants |= {prefix + op.get_friendly_name(): (precision, count)} if precision and count > 1 else {}
        for port in op.inputs() if COMPUTE_LAYER.search(kind) else op.inputs()[:1] if kind == "Gather" else ():
            node, scale_nodes = _constant_behind(port)
            if node is not None and not (kind == "Gather" and node.get_element_type().get_type_name() in FULL_TYPES):
                layers.add(prefix + node.get_friendly_name())
            scales |= {prefix + each.get_friendly_name() for each in scale_nodes}
    counts = Counter[str]()
    for name in layers & constants.keys():
        counts[constants[name][0]] += constants[name][1]
    low_counts = Counter({kind: count for kind, count in counts.items() if kind in QUANTISED_PRECISIONS})
    kinds = low_counts or (Counter(int8=1) if is_quantised else counts) or Counter(fp32=1)
    main_kind = max(kinds, key=lambda kind: kinds[kind])
    floats = {name for name, (kind, _) in constants.items() if kind not in QUANTISED_PRECISIONS} - scales
    return main_kind, sum(constants[name][1] for name in floats | (layers & constants.keys()))


def _ops_in(model: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each operation of a model and its nested models, with a text that identifies its model."""
    for op in model.get_ops():
        yield prefix, op
        kind = op.get_type_name()
        bodies = (op.get_then_body(), op.get_else_body()) if kind == "If" else ()
        for index, body in enumerate(bodies or ((op.get_function(),) if kind in ("Loop", "TensorIterator") else ())):
            yield from _ops_in(body, f"{prefix}{op.get_friendly_name()}/{index}/")


def _constant_behind(port: Any) -> tuple[Any, list[Any]]:
    """Return the constant at a layer's input (None without one) and its dequantisation scales.

    The search passes through the operations in `DEQUANTISING_LAYERS`.
    """
    scales = []
    node = port.get_source_output().get_node()
    while node.get_type_name() in DEQUANTISING_LAYERS:
        scales += [each for input_port in node.inputs()[1:] if (each := _constant_behind(input_port)[0]) is not None]
        node = node.input_value(0).get_node()
    return (node, scales) if node.get_type_name() == "Constant" else (None, [])


def _compare_shapes(model: Any, declared: Sequence[Tensor]) -> tuple[str, ...]:
    """Return a warning if OpenVINO's output shapes contradict the file's declared ones.

    Outputs without axes are left out: they may be numbers, or of a shape that the file leaves open.
    """
    ov, differences = import_library(), []
    for tensor in declared:
        shape = ov.PartialShape([axis if isinstance(axis, int) else -1 for axis in tensor.shape])
        for port in model.outputs:
            if tensor.shape and tensor.name in port.get_names() and not port.get_partial_shape().compatible(shape):
                differences.append(f"{tensor.name} {port.get_partial_shape()} for {shape}")
    return (f"{OTHER_SHAPE} ({', '.join(differences)}); {COMPARE_ADVICE}",) if differences else ()


def _compare_values(model: Any, parent: Artifact, recipe: Recipe) -> tuple[str, ...]:
    """Return a warning if outputs for a random input are far from ONNX Runtime's; () if unknown. Reshape the model.

    It is unknown for whole numbers, outputs of another shape, random outputs, files that ONNX Runtime refuses, and huge
    files.
    """
    if recipe.precision in QUANTISED_PRECISIONS or parent.bytes > MAX_CHECKED_BYTES:
        return ()
    dims = replace(recipe.dims, batch=recipe.dims.batch or 1)
    try:
        feeds = next(
            input_data.read_batches(DataSpec(), recipe.model.preprocess, parent.inputs, dims, 1, recipe.model.inputs)
        )
        inputs = {tensor.name: feeds[tensor.name] for tensor in parent.inputs}
        runner = make_session(parent.path)
        expected, repeat = (runner.run([tensor.name for tensor in parent.outputs], inputs) for _ in range(2))
        free, fixed = _find_far(model, inputs, parent, expected), list[str]()
        if free:
            model.reshape({name: list(array.shape) for name, array in inputs.items()})  # as trials do
            fixed = _find_far(model, inputs, parent, expected)
    except MemoryError:
        raise
    except Exception:  # the errors have no common base; the engine's own run reports the fault
        return ()
    if not all(map(np.array_equal, expected, repeat)):
        return ()
    advice = f"; {COMPARE_ADVICE}" if fixed else FREE_ADVICE
    return (f"{OTHER_VALUES} ({', '.join(fixed or free)}){advice}",) if free else ()


def _find_far(model: Any, inputs: dict[str, np.ndarray], parent: Artifact, expected: Sequence[Any]) -> list[str]:
    """Return the names of the outputs that are far from the expected ones."""
    results = import_library().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(inputs)
    return [t.name for t, values in zip(parent.outputs, expected, strict=True) if _is_far(results[t.name], values)]


def _is_far(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether floating-point numbers differ by more than rounding, or in the positions of finite values."""
    if expected.dtype.kind != "f" or actual.shape != expected.shape:
        return False
    mask = np.isfinite(expected)
    if (mask != np.isfinite(actual)).any():
        return True
    a, b = actual[mask].astype(np.float64), expected[mask].astype(np.float64)
    return bool(np.linalg.norm(a - b) > MAX_OUTPUT_ERROR * np.linalg.norm(b))


class IRMaker(Maker):
    """A maker that converts an ONNX file with unchanged weights, or describes the model's own IR."""

    name = "openvino"
    requires = ("openvino",)

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.xml and model.bin; the sha256 covers both, .xml first.

        Raise a `UserError` for a file that OpenVINO can't read.
        """
        ov = import_library()
        made_by = self.describe(recipe)
        began = time.perf_counter()
        if recipe.model.file.endswith(".xml"):
            path, seconds, parent_sha256 = Path(recipe.model.file), 0.0, ""
            contents = IR.read(str(path), Trial(recipe.model, self.name, recipe.precision, recipe.dims))
            inputs, outputs = contents.inputs, contents.outputs
        elif parent is None:
            raise UserError("an OpenVINO IR is made from an ONNX file: give one, or a PyTorch model")
        else:
            path, parent_sha256 = folder / "model.xml", parent.sha256
            model = read_model(ov, parent.path)
            ov.save_model(model, path, compress_to_fp16=False)
            seconds = time.perf_counter() - began
            inputs, outputs = parent.inputs, parent.outputs
            warnings = _compare_shapes(model, outputs) or _compare_values(model, parent, recipe)
            made_by = replace(made_by, **parent.made_by.set_fields(INHERITED_FACTS), warnings=warnings)
        file_bytes = [path.read_bytes(), *(file.read_bytes() for file in IR.companions(path))]
        sha256 = hashlib.sha256(b"".join(file_bytes)).hexdigest()
        if parent is None:
            # Its source is unknown, so it is comparable only with itself.
            made_by = replace(made_by, weights_sha256=sha256)
        size = sum(map(len, file_bytes))
        return Artifact(
            IR.name, str(path), sha256, size, recipe.precision, inputs, outputs, seconds, parent_sha256, made_by
        )


IR = IRFormat()
IR_MAKER = IRMaker()
