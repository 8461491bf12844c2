"""ONNX graphs in a lower precision: FP16 and BF16 by mixed-precision conversion, INT8 as Q/DQ calibrated on images.

The conversions themselves are in `onnx_fp16`, `onnx_bf16` and `onnx_int8`.
"""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno.worker.backend import Maker, derived
from dyno.worker.extras import install
from dyno.worker.facts.precision import QUANTISED
from dyno.worker.inputs.calibration import NO_DATA, SAMPLES, calibration_data, example
from dyno.worker.inputs.input_data import READ, wants_pixels
from dyno.worker.makers.export import EXPORTERS, OPSET_RANGE, WRITTEN, exported
from dyno.worker.makers.modelopt_quantise import METHODS as MODELOPT_METHODS
from dyno.worker.makers.modelopt_quantise import quantised
from dyno.worker.makers.pixels import reading_pixels
from dyno.worker.makers.sensitivity import layers_to_keep, ranked
from dyno.worker.makers.static import static_of
from dyno.worker.onnx_graph.bf16 import to_bf16
from dyno.worker.onnx_graph.check import compared, outputs
from dyno.worker.onnx_graph.file import import_onnx, read_io
from dyno.worker.onnx_graph.fold import lifted
from dyno.worker.onnx_graph.fp16 import to_fp16
from dyno.worker.onnx_graph.graph_facts import read_graph_facts
from dyno.worker.onnx_graph.int8 import METHOD, METHODS, to_int8
from dyno.worker.onnx_graph.opset import keep_metadata
from dyno.worker.onnx_graph.placement import JOINTS
from dyno.worker.onnx_graph.repair import to_fp32
from dyno.worker.option_values import Check, flag, number, one_of, whole
from dyno.worker.spec import (
    Artifact,
    DataSpec,
    Option,
    Recipe,
    Runtime,
    Trial,
    Unavailable,
    UserError,
    numbered,
    shorten,
)

# Options of a trial on which its file depends.
PREPARATION = ("samples", "method", "percentile", "quantizer", "exporter", "opset", "static", "fold", "input", "keep")
QUANTIZERS = ("onnxruntime", "modelopt")
VALUES: dict[str, Check] = {
    "samples": whole(1),
    "method": one_of(*{**METHODS, **MODELOPT_METHODS}),
    "percentile": number(50, 100),
    "quantizer": one_of(*QUANTIZERS),
    "exporter": one_of(*EXPORTERS),
    "opset": lambda value: whole(OPSET_RANGE[0], OPSET_RANGE[-1])(value) and WRITTEN,
    "static": flag,
    "fold": flag,
    "input": one_of(*READ),
    "keep": whole(0),
}
HALVES = ("fp16", "bf16")  # of a file from the user: the other precisions are made from it in FP32
# The newest opset of an engine's oldest supported parser: TensorRT 8.6's. The others read every opset that is exported.
OPSETS: dict[str, Option] = {"tensorrt": 17}
# Facts that an engine's file takes from the ONNX file that it was made from.
INHERITED = ("parameters", "weights_sha256", "scheme", "target", "calibration", "check", "kept", "ranked")


def converted(trial: Trial, target: str, batch: int = 0) -> Recipe:
    """Return the recipe of this trial's ONNX file: exported, then converted to its precision for the target engine.

    The export has a free batch unless one is given, so that all batches of a study share one file and one calibration;
    engines fix it; with the option `static` it has the trial's, and with `fold` the trial's shapes are folded into the
    file before it is converted. Trial options `samples`, `method`, `percentile` and `quantizer` reach the calibration,
    `keep` (the number of most sensitive layers that stay in float32) the conversion to fp16 or int8, `exporter` and
    `opset` (17 for TensorRT) the export, `joints` (Q/DQ between layers, too) int8 for TensorRT; `input=uint8` makes the
    file read raw pixels. Pure; int8 or fp8 without data is a `UserError`.
    """
    # Files are made in the Python that has the model, even if the trial runs in another one.
    options = {"opset": OPSETS[target], **trial.options} if target in OPSETS else trial.options
    dims = replace(trial.dims, batch=batch or (trial.dims.batch if trial.options.get("static") else 0))
    parent = exported(trial.model, dims, Runtime(), options, trial.data)
    parent = static_of(parent, trial) if trial.options.get("fold") else parent
    recipe = _lower_recipe(trial, target, parent)
    return reading_pixels(recipe) if wants_pixels(trial.options) else recipe


def _lower_recipe(trial: Trial, target: str, parent: Recipe) -> Recipe:
    precision, quantizer = trial.precision, str(trial.options.get("quantizer", QUANTIZERS[0]))
    if quantizer not in QUANTIZERS:
        raise UserError(f"unknown quantizer {quantizer!r}; it is one of {', '.join(QUANTIZERS)}")
    if precision == trial.model.precision:
        return replace(parent, precision=precision)
    if trial.model.precision in HALVES:
        parent = replace(parent, precision=trial.model.precision)
        parent = replace(parent, maker=OnnxPrecision.name, precision="fp32", options={}, data=None, parent=parent)
    elif precision in ("fp32", "tf32"):
        return replace(parent, precision=trial.model.precision or "fp32")
    if precision in ("fp32", "tf32"):
        return parent
    keep = _read_keep_option(trial)
    if precision not in ("int8", "fp8"):
        data = DataSpec(trial.data.name, trial.data.folder, trial.data.sha256, split="calibration")
        parent = ranked(parent, precision, data if data.folder else None, {}) if keep else parent
        return replace(parent, maker=OnnxPrecision.name, precision=precision, options=keep, data=None, parent=parent)
    data = calibration_data(trial)
    calibration = {key: value for key, value in trial.options.items() if key in ("samples", "method", "percentile")}
    options: dict[str, Option] = {"samples": SAMPLES, "method": METHOD, **calibration}
    if precision == "fp8" or quantizer == "modelopt":
        if keep:
            raise UserError("keep=N is for files that Dyno quantises itself, not for nvidia-modelopt's")
        if target != "tensorrt":
            raise UserError(f"{precision} by nvidia-modelopt is for TensorRT, not for {target}")
        if not data.folder:
            raise UserError(NO_DATA.replace("int8", precision))
        return quantised(parent, precision, data, options)
    if options["method"] not in METHODS:
        raise UserError(f"unknown calibration method {options['method']!r}; known: {', '.join(METHODS)}")
    options = {"target": target, **options, **({JOINTS: True} if trial.options.get(JOINTS) else {})}
    if keep:
        parent = ranked(parent, precision, data, options)
        options = {**options, **keep}
    return replace(parent, maker=OnnxPrecision.name, precision=precision, options=options, data=data, parent=parent)


def _read_keep_option(trial: Trial) -> dict[str, Option]:
    """Return the option `keep` of the conversion; {} if no layer is to be kept in a higher type."""
    count = trial.options.get("keep", 0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise UserError(f"keep is {count!r}; it must be the number of layers to keep in a higher type, 0 or more")
    if count and trial.precision == "bf16":
        raise UserError("keep=N is for fp16 and int8; bf16 has the range of fp32")
    return {"keep": count} if count else {}


class OnnxPrecision(Maker):
    """Makes an ONNX file of lower precision from one in FP32, or of FP32 from one in FP16 or BF16."""

    name = "onnx_precision"
    requires = ("onnx", "onnxruntime", "onnxconverter-common", "onnxslim")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Convert the parent's file and check it: ONNX's checker, then one run in ONNX Runtime with finite outputs.

        Raises `UserError` for a model that is quantised already, calibration data that is missing or of another shape,
        an unknown method or target, and a result that overflows.
        """
        started = time.perf_counter()
        versions = _read_versions(self.requires)
        conversions = {"fp32": to_fp32, "fp16": to_fp16, "bf16": to_bf16, "int8": to_int8}
        convert = conversions.get(recipe.precision)
        if convert is None:
            raise UserError(
                f"an ONNX graph can't be made {recipe.precision} here (it can be made {', '.join(conversions)})"
            )
        if parent is None:
            raise UserError(f"{recipe.precision} is made from an ONNX file in fp32: give one, or a PyTorch model")
        model, path = lifted(_read_model(parent.path)), folder / "model.onnx"
        parents_count = parent.made_by.parameters
        parameters = read_graph_facts(model).parameters if parents_count is None else parents_count
        before, _ = outputs(parent.path, example(recipe, parent), parent.precision)
        higher = layers_to_keep(recipe, parent)
        keywords = {"higher": [layer.node for layer in higher]} if higher else {}
        converted = convert(model, recipe, parent, path, **keywords)
        keep_metadata(path, model)
        left = _check_conversion(
            import_onnx().load(path, load_external_data=False), recipe.precision, recipe.model.name
        )
        made_by = replace(
            converted,
            backend=self.name,
            options=dict(recipe.options),
            versions=versions,
            warnings=(*converted.warnings, *left),
            parameters=parameters,
            kept=tuple(higher),
            ranked=len(parent.made_by.ranking) if higher else None,
        )
        inputs, outputs_ = read_io(str(path))  # their types differ from the parent's where that was cast up
        artifact = replace(derived(parent, path, recipe.precision, made_by, started), inputs=inputs, outputs=outputs_)
        # The same input for both: outputs must stay finite, and their distance is recorded.
        after, runtime = outputs(artifact.path, example(recipe, artifact), recipe.precision)
        check = compared(before, after, f"{recipe.model.name} overflows in {recipe.precision}", runtime)
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
    if facts.precision in QUANTISED:
        raise UserError(
            f"{path} is quantised already (it has {facts.quantised_by} nodes): "
            f"run it as {facts.precision}, which doesn't change the file, or give the float model"
        )
    return model


def _check_conversion(model: Any, precision: str, name: str) -> list[str]:
    """Return a warning on the layers whose weights were not lowered; a `UserError` where that is all of them."""
    facts = read_graph_facts(model)
    total, lowered = sum(facts.layers.values()), facts.layers.get(precision, 0)
    where = f" ({facts.enclosed} are inside {' and '.join(facts.enclosing)} operators)" if facts.enclosed else ""
    if total and not lowered:
        raise UserError(
            f"nothing in {name} can be made {precision}: all of its {numbered(total, 'layer')} with weights stay in "
            f"{max(facts.layers, key=lambda kind: facts.layers[kind])}{where}; run it in the file's own precision"
        )
    partly = facts.enclosed and lowered < total
    return [f"{total - lowered} of {total} layers with weights are not in {precision}{where}"] if partly else []
