"""ONNX graphs in a lower precision: mixed FP16 and BF16, and INT8 as Q/DQ calibrated on images.

The conversions are in `onnx_graph.half_precision` and `onnx_graph.int8`.
"""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import Maker, make_derived
from dyno.worker.extras import install
from dyno.worker.facts.engine import QUANTISED_PRECISIONS
from dyno.worker.facts.files import OutputCheck, PixelInput
from dyno.worker.inputs import input_data
from dyno.worker.inputs.calibration import DEFAULT_SAMPLES, NO_DATA, calibration_data, make_example
from dyno.worker.inputs.input_data import INPUT_TYPES, pixel_scale, wants_pixels
from dyno.worker.inputs.specs import find_axes, static_shapes
from dyno.worker.makers.export import EXPORTERS, OPSET_ADVICE, OPSET_RANGE, export_recipe
from dyno.worker.makers.modelopt_quantise import CALIBRATION_METHODS as MODELOPT_METHODS
from dyno.worker.makers.modelopt_quantise import quantise_recipe
from dyno.worker.makers.sensitivity import layers_to_keep, rank_recipe
from dyno.worker.onnx_graph.check import compare_outputs, compute_outputs
from dyno.worker.onnx_graph.file import import_onnx, read_io
from dyno.worker.onnx_graph.fold import fold_graph, lift_constants
from dyno.worker.onnx_graph.graph_facts import add_weight, graphs_of, list_files_beside, read_graph_facts, set_nodes
from dyno.worker.onnx_graph.half_precision import to_bf16, to_fp16
from dyno.worker.onnx_graph.int8 import CALIBRATION_METHODS, DEFAULT_METHOD, to_int8
from dyno.worker.onnx_graph.placement import JOINTS_OPTION
from dyno.worker.onnx_graph.repair import to_fp32, with_metadata
from dyno.worker.option_values import Check, flag, number, one_of, whole
from dyno.worker.spec import (
    Artifact,
    DataSpec,
    Option,
    Recipe,
    Runtime,
    Tensor,
    Trial,
    Unavailable,
    UserError,
    add_noun,
    check_known,
    shorten,
)

# ONNX files for one trial's shapes: every size fixed, and computations on shapes folded
#
# TensorRT 8.6 needs this for the class token of a vision transformer; with a free batch, ConvNeXt crashes its builder.


class OnnxStatic(Maker):
    """A maker that fixes every shape of an ONNX file for one trial and folds computations on shapes."""

    name = "onnx_static"
    requires = ("onnx", "onnxruntime", "onnxslim")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.onnx with the recipe's shapes; its outputs on random inputs are unchanged.

        Raise a `UserError` for shapes that don't fit the file, and for a graph over 2 GiB.
        """
        onnx, started = import_onnx(), time.perf_counter()
        assert parent is not None
        if list_files_beside(Path(parent.path)):
            raise UserError("a graph with its weights in other files can't be folded here; give the option fold=false")
        model, path = lift_constants(onnx.load(parent.path)), folder / "model.onnx"
        shapes = static_shapes(parent.inputs, recipe.dims)
        for value in model.graph.input:
            for axis, size in enumerate(shapes[value.name]):
                value.type.tensor_type.shape.dim[axis].dim_value = size
        _forget_shapes(model.graph)
        model_inputs, preprocess = recipe.model.inputs, recipe.model.preprocess
        feeds = next(input_data.read_batches(DataSpec(), preprocess, parent.inputs, recipe.dims, 1, model_inputs))
        typed_feeds = {tensor.name: feeds[tensor.name].astype(tensor.dtype) for tensor in parent.inputs}
        folded_model, fold_warnings = fold_graph(model, typed_feeds, folder)
        onnx.save(with_metadata(folded_model, model), path)
        inputs, outputs = read_io(str(path))
        warnings = (*parent.made_by.warnings, *fold_warnings)
        made_by = replace(parent.made_by, steps=(), backend=self.name, folded=not fold_warnings, warnings=warnings)
        return replace(make_derived(parent, path, parent.precision, made_by, started), inputs=inputs, outputs=outputs)


ONNX_STATIC = OnnxStatic()


def _forget_shapes(graph: Any) -> None:
    """Clear the intermediate and output shapes of the free batch; they are inferred again."""
    del graph.value_info[:]
    for value in graph.output:
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                dim.Clear()


def static_of(parent: Recipe, trial: Trial) -> Recipe:
    """Return the recipe of the parent's file with this trial's shapes, folded. Pure."""
    return replace(
        parent, maker=OnnxStatic.name, options={}, data=None, parent=parent, dims=trial.dims, runtime=Runtime()
    )


# ONNX files for raw pixels: the normalisation is a part of the graph, and feeds have a quarter of the size


def reading_pixels(parent: Recipe) -> Recipe:
    """Return the recipe of the parent's file with an image input of uint8 pixels. Pure."""
    return replace(
        parent, maker=OnnxInput.name, options={"input": "uint8"}, data=None, parent=parent, runtime=Runtime()
    )


class OnnxInput(Maker):
    """A maker that inserts `(pixel / 255 - mean) / std` before an ONNX file's image input, which then takes uint8."""

    name = "onnx_input"
    requires = ("onnx", "onnxruntime")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.onnx and compare it with its parent on one picture.

        Raise a `UserError` for a file without exactly one image input, or with a uint8 input.
        """
        import onnx

        started = time.perf_counter()
        assert parent is not None
        image = _find_image(parent)
        channel = find_axes(image.shape)[0]
        shape = [-1 if axis == channel else 1 for axis in range(4)]
        scale, offset = (v.reshape(shape) for v in pixel_scale(recipe.model.preprocess, int(image.shape[channel])))
        model, path = onnx.load(parent.path), folder / "model.onnx"
        _prepend_nodes(model.graph, image.name, scale, offset)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, path)
        made_by = replace(
            parent.made_by,
            steps=(),
            backend=self.name,
            options={**parent.made_by.options, **recipe.options},
            input=PixelInput("uint8", tuple(scale.ravel().tolist()), tuple(offset.ravel().tolist())),
            input_check=_check_outputs(path, recipe, parent, image),
        )
        artifact = make_derived(parent, path, parent.precision, made_by, started)
        return replace(artifact, inputs=(replace(image, dtype="uint8"),))


ONNX_INPUT = OnnxInput()


def _find_image(parent: Artifact) -> Tensor:
    inputs = parent.inputs
    is_image = len(inputs) == 1 and len(inputs[0].shape) == 4
    if not is_image or not isinstance(inputs[0].shape[find_axes(inputs[0].shape)[0]], int):
        names = ", ".join(tensor.name for tensor in inputs) or "none"
        raise UserError(f"input=uint8 needs a model with one image input (N x C x H x W); this one has {names}")
    if not inputs[0].dtype.startswith("float"):
        description = f"{inputs[0].name!r} is {inputs[0].dtype} already"
        raise UserError(f"the file's input {description}, not normalised pixels; drop input=uint8")
    return inputs[0]


def _prepend_nodes(graph: Any, name: str, scale: np.ndarray, offset: np.ndarray) -> None:
    """Insert a Cast, a multiplication and an addition before the input, in float32 whatever the graph's type.

    FP16 would add two roundings that normalisation on a host doesn't have.
    """
    import onnx

    (value,) = (value for value in graph.input if value.name == name)
    element_type, types = value.type.tensor_type.elem_type, onnx.TensorProto
    normalised = f"{name}_normalised"
    for node in graph.node:
        for k, input_name in enumerate(node.input):
            if input_name == name:
                node.input[k] = normalised
    value.type.tensor_type.elem_type = types.UINT8
    scale_name, offset_name = (
        add_weight(graph, f"{name}_scale_of_pixels", scale),
        add_weight(graph, f"{name}_offset_of_pixels", offset),
    )
    node = onnx.helper.make_node
    float_output = normalised if element_type == types.FLOAT else f"{normalised}_float32"
    nodes = [
        node("Cast", [name], [f"{name}_pixels"], f"{name}_cast", to=types.FLOAT),
        node("Mul", [f"{name}_pixels", scale_name], [f"{name}_scaled"], f"{name}_scale"),
        node("Add", [f"{name}_scaled", offset_name], [float_output], f"{name}_offset"),
    ]
    if float_output != normalised:
        nodes.append(node("Cast", [float_output], [normalised], f"{name}_to_graph", to=element_type))
    set_nodes(graph, [*nodes, *graph.node])


def _check_outputs(path: Path, recipe: Recipe, parent: Artifact, image: Tensor) -> OutputCheck:
    """Compare both files on one random picture, for the effect of normalising in the graph."""
    before, runtime = compute_outputs(parent.path, _make_feeds(recipe, parent, image), recipe.precision)
    after, _ = compute_outputs(str(path), _make_feeds(recipe, parent, replace(image, dtype="uint8")), recipe.precision)
    return compare_outputs(before, after, f"{recipe.model.name} with input=uint8", runtime)


def _make_feeds(recipe: Recipe, parent: Artifact, image: Tensor) -> dict[str, np.ndarray]:
    feeds = make_example(replace(recipe, data=None), replace(parent, inputs=(image,)))
    return {name: array.astype(image.dtype) for name, array in feeds.items()}


# Trial options that shape its file
QUANTIZER_NAMES = ("onnxruntime", "modelopt")
OPTION_CHECKS: dict[str, Check] = {
    "samples": whole(1),
    "method": one_of(*{**CALIBRATION_METHODS, **MODELOPT_METHODS}),
    "percentile": number(50, 100),
    "quantizer": one_of(*QUANTIZER_NAMES),
    "exporter": one_of(*EXPORTERS),
    "opset": lambda value: whole(OPSET_RANGE[0], OPSET_RANGE[-1])(value) and OPSET_ADVICE,
    "static": flag,
    "fold": flag,
    "input": one_of(*INPUT_TYPES),
    "keep": whole(0),
}
PREPARATION_OPTIONS = tuple(OPTION_CHECKS)
HALF_PRECISIONS = ("fp16", "bf16")  # other precisions of such a file are made via FP32
# Newest opset of an engine's oldest supported parser (TensorRT 8.6's); other engines read every exported opset
BACKEND_OPSETS: dict[str, Option] = {"tensorrt": 17}
# Facts of an engine's file inherited from its ONNX file
INHERITED_FACTS = ("parameters", "weights_sha256", "scheme", "target", "calibration", "check", "kept", "ranked")


def convert_recipe(trial: Trial, target: str, batch: int = 0) -> Recipe:
    """Return the recipe of this trial's ONNX file: exported, then converted to its precision for the target engine.

    The export has a free batch unless `batch` is given, so that all batches of a study share one file and one
    calibration; engines fix it. With the option `static` it has the trial's batch; with `fold` the trial's shapes are
    folded in before the conversion. Options `samples`, `method`, `percentile` and `quantizer` apply to the calibration;
    `keep` (number of the most sensitive layers kept in float32) to the conversion to fp16 or int8; `exporter` and
    `opset` (17 for TensorRT) to the export; `joints` (Q/DQ between layers, too) to int8 for TensorRT. With
    `input=uint8` the file takes raw pixels. Pure; raise a `UserError` for int8 or fp8 without data.
    """
    # Files are made in the model's Python, even if the trial runs in another one.
    options = {"opset": BACKEND_OPSETS[target], **trial.options} if target in BACKEND_OPSETS else trial.options
    dims = replace(trial.dims, batch=batch or (trial.dims.batch if trial.options.get("static") else 0))
    parent = export_recipe(trial.model, dims, Runtime(), options, trial.data)
    parent = static_of(parent, trial) if trial.options.get("fold") else parent
    recipe = _lower_recipe(trial, target, parent)
    return reading_pixels(recipe) if wants_pixels(trial.options) else recipe


def _lower_recipe(trial: Trial, target: str, parent: Recipe) -> Recipe:
    precision, quantizer = trial.precision, str(trial.options.get("quantizer", QUANTIZER_NAMES[0]))
    check_known("quantizer", quantizer, QUANTIZER_NAMES)
    if precision == trial.model.precision:
        return replace(parent, precision=precision)
    if trial.model.precision in HALF_PRECISIONS:
        parent = replace(parent, precision=trial.model.precision)
        parent = replace(parent, maker=OnnxPrecision.name, precision="fp32", options={}, data=None, parent=parent)
    elif precision in ("fp32", "tf32"):
        return replace(parent, precision=trial.model.precision or "fp32")
    if precision in ("fp32", "tf32"):
        return parent
    keep = _read_keep_option(trial)
    if precision not in ("int8", "fp8"):
        data = DataSpec(trial.data.name, trial.data.folder, trial.data.sha256, split="calibration")
        parent = rank_recipe(parent, precision, data if data.folder else None, {}) if keep else parent
        return replace(parent, maker=OnnxPrecision.name, precision=precision, options=keep, data=None, parent=parent)
    data = calibration_data(trial)
    calibration = {key: value for key, value in trial.options.items() if key in ("samples", "method", "percentile")}
    options: dict[str, Option] = {"samples": DEFAULT_SAMPLES, "method": DEFAULT_METHOD, **calibration}
    if precision == "fp8" or quantizer == "modelopt":
        if keep:
            raise UserError("keep=N is for files that Dyno quantises itself, not for nvidia-modelopt's")
        if target != "tensorrt":
            raise UserError(f"{precision} by nvidia-modelopt is for TensorRT, not for {target}")
        if not data.folder:
            raise UserError(NO_DATA.replace("int8", precision))
        return quantise_recipe(parent, precision, data, options)
    check_known("calibration method", str(options["method"]), CALIBRATION_METHODS)
    options = {"target": target, **options, **({JOINTS_OPTION: True} if trial.options.get(JOINTS_OPTION) else {})}
    if keep:
        parent = rank_recipe(parent, precision, data, options)
        options = {**options, **keep}
    return replace(parent, maker=OnnxPrecision.name, precision=precision, options=options, data=data, parent=parent)


def _read_keep_option(trial: Trial) -> dict[str, Option]:
    """Return the conversion's option `keep`; {} if no layer is kept in a higher type."""
    count = trial.options.get("keep", 0)
    if count and trial.precision == "bf16":
        raise UserError("keep=N is for fp16 and int8; bf16 has the range of fp32")
    return {"keep": count} if count else {}


class OnnxPrecision(Maker):
    """A maker of an ONNX file in lower precision from an FP32 one, or in FP32 from an FP16 or BF16 one."""

    name = "onnx_precision"
    requires = ("onnx", "onnxruntime", "onnxconverter-common", "onnxslim")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Convert the parent's file and check it: by ONNX's checker, and one run in ONNX Runtime with finite outputs.

        Raise a `UserError` for a quantised model, missing or unsuitable calibration data, an unknown method or target,
        and a result that overflows.
        """
        started = time.perf_counter()
        versions, onnx = _read_versions(self.requires), import_onnx()
        conversions = {"fp32": to_fp32, "fp16": to_fp16, "bf16": to_bf16, "int8": to_int8}
        convert = conversions.get(recipe.precision)
        if convert is None:
            raise UserError(
                f"an ONNX graph can't be made {recipe.precision} here (it can be made {', '.join(conversions)})"
            )
        assert parent is not None
        model, path = lift_constants(_read_model(parent.path)), folder / "model.onnx"
        parents_count = parent.made_by.parameters
        parameters = read_graph_facts(model).parameters if parents_count is None else parents_count
        before, _ = compute_outputs(parent.path, make_example(recipe, parent), parent.precision)
        kept_layers = layers_to_keep(recipe, parent)
        keywords = {"higher": [layer.node for layer in kept_layers]} if kept_layers else {}
        new_model, facts = convert(model, recipe, parent, folder, **keywords)
        _check_valid(new_model, model, recipe.precision, recipe.model.name)
        onnx.save(with_metadata(new_model, model), path)
        warnings = _check_conversion(new_model, recipe.precision, recipe.model.name)
        made_by = replace(
            facts,
            backend=self.name,
            options=dict(recipe.options),
            versions=versions,
            warnings=(*facts.warnings, *warnings),
            parameters=parameters,
            kept=tuple(kept_layers),
            ranked=len(parent.made_by.ranking) if kept_layers else None,
        )
        inputs, outputs = read_io(str(path))  # types may differ from the parent's
        artifact = replace(
            make_derived(parent, path, recipe.precision, made_by, started), inputs=inputs, outputs=outputs
        )
        # Same input for both: outputs must stay finite, and their difference is recorded.
        after, runtime = compute_outputs(artifact.path, make_example(recipe, artifact), recipe.precision)
        check = compare_outputs(before, after, f"{recipe.model.name} overflows in {recipe.precision}", runtime)
        return replace(artifact, made_by=replace(made_by, check=check))


ONNX_PRECISION = OnnxPrecision()


def _read_versions(distributions: tuple[str, ...]) -> dict[str, str]:
    try:
        return {name: importlib.metadata.version(name) for name in distributions}
    except importlib.metadata.PackageNotFoundError as e:
        raise Unavailable(f"{e.name} is not installed in this Python; {install(str(e.name))}") from e


def _read_model(path: str) -> Any:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = import_onnx().load(path)
    except (OSError, DecodeError) as e:
        raise UserError(f"{path} is not a readable ONNX file: {shorten(e, 200)}") from e
    facts = read_graph_facts(model)
    if facts.precision in QUANTISED_PRECISIONS:
        raise UserError(
            f"{path} is quantised already (it has {facts.quantised_by} nodes): "
            f"run it as {facts.precision}, which doesn't change the file, or give the float model"
        )
    return model


def _check_valid(new_model: Any, model: Any, precision: str, name: str) -> None:
    """Raise a `UserError` for a graph that a conversion broke; converters overlook graphs inside nodes."""
    import onnx

    try:
        onnx.checker.check_model(new_model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as e:
        operators = sorted({node.op_type for node in model.graph.node if graphs_of(node)})
        text = f"what the graphs inside its {' and '.join(operators)} operators read" if operators else "its graph"
        reason = shorten(str(e))[:160]
        raise UserError(
            f"{name} can't be made {precision}: the conversion breaks {text} ({reason}); run it in the file's precision"
        ) from e


def _check_conversion(model: Any, precision: str, name: str) -> list[str]:
    """Return a warning on layers with unlowered weights; raise a `UserError` if no layer was lowered."""
    facts = read_graph_facts(model)
    total, lowered = sum(facts.layers.values()), facts.layers.get(precision, 0)
    location = f" ({facts.enclosed} are inside {' and '.join(facts.enclosing)} operators)" if facts.enclosed else ""
    if total and not lowered:
        raise UserError(
            f"nothing in {name} can be made {precision}: all of its {add_noun(total, 'layer')} with weights stay in "
            f"{max(facts.layers, key=lambda kind: facts.layers[kind])}{location}; run it in the file's own precision"
        )
    is_partial = facts.enclosed and lowered < total
    return [f"{total - lowered} of {total} layers with weights are not in {precision}{location}"] if is_partial else []
