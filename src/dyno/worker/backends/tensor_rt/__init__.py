"""TensorRT and TensorRT-RTX: an ONNX file becomes an engine, built for the trial's shapes, precision and GPU.

The route is the source of types: `graph` (the ONNX file's own types, in every version), `flags` (builder flags on an
FP32 graph) or `calibrator` (INT8 flags and TensorRT's calibration); the last two end with TensorRT 10.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from dyno.worker.backend import Backend, Maker, Session, refuse_requantising
from dyno.worker.backends.onnx_runtime import ONE_ADD
from dyno.worker.backends.tensor_rt import library, settings
from dyno.worker.backends.tensor_rt.build import build
from dyno.worker.backends.tensor_rt.given import ENGINE_FORMAT as ENGINE_FORMAT
from dyno.worker.backends.tensor_rt.given import ENGINE_SUFFIXES, describe_given, list_layers, product_of
from dyno.worker.backends.tensor_rt.settings import Settings
from dyno.worker.facts.engine import Probe
from dyno.worker.facts.job import LayerGraph
from dyno.worker.inputs.calibration import NO_DATA
from dyno.worker.makers.onnx_format import route_recipe
from dyno.worker.makers.precision import OPTION_CHECKS, PREPARATION_OPTIONS
from dyno.worker.onnx_graph.placement import JOINTS_OPTION
from dyno.worker.option_values import Check, flag
from dyno.worker.spec import (
    Artifact,
    DataSpec,
    Dims,
    ModelSpec,
    Option,
    Recipe,
    Runtime,
    Tensor,
    Trial,
    Unavailable,
    UserError,
)


class TensorRT(Backend):
    """Backend for engines of TensorRT 8.6 to 11. Options: see `settings.Settings` and `run.TensorRTSession`."""

    name = "tensorrt"
    product = "tensorrt"
    requires: tuple[str, ...] = ("tensorrt",)
    precisions = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")
    devices = ("cuda",)
    profiled = ("cuda",)
    builds_slowly = True
    options = (*settings.SETTING_NAMES, *settings.RUNNER_OPTIONS, *PREPARATION_OPTIONS, JOINTS_OPTION)
    values: Mapping[str, Check] = {**settings.OPTION_CHECKS, **OPTION_CHECKS, JOINTS_OPTION: flag}
    files = (".onnx", *ENGINE_SUFFIXES)

    def refuse(self, trial: Trial) -> str:
        """See `Backend.refuse`; also invalid options and batches, and int8 or fp8 without data."""
        if reason := super().refuse(trial):
            return reason
        if trial.model.file.endswith(ENGINE_SUFFIXES):
            return ""
        if reason := refuse_requantising(trial):
            return reason
        try:
            build_settings = Settings.from_options(trial.options)
            if reason := settings.explain_outside(build_settings.profile, trial.dims.batch) if trial.dims.batch else "":
                return reason
            self._choose_route(trial, build_settings)
        except UserError as e:
            return str(e)
        is_quantised = trial.precision in ("int8", "fp8") and trial.precision != trial.model.precision
        return NO_DATA.replace("int8", trial.precision) if is_quantised and not trial.data.folder else ""

    def reads(self, path: str) -> bool:
        """Return whether the file is readable; an engine only if it is this product's."""
        return product_of(Path(path)) == self.product if path.endswith(ENGINE_SUFFIXES) else super().reads(path)

    def _choose_route(self, trial: Trial, build_settings: Settings) -> str:
        """Return the source of types; raise a `UserError` if it doesn't fit the precision.

        `auto` is `graph`: the building version is unknown here, and all versions read the graph.
        """
        route = "graph" if build_settings.route == "auto" else build_settings.route
        if route == "calibrator" and trial.precision != "int8":
            raise UserError(f"route=calibrator is for int8, not {trial.precision}")
        is_converted = trial.precision == "int8" != trial.model.precision and route == "graph"
        if trial.options.get(JOINTS_OPTION) and (not is_converted or trial.options.get("quantizer") == "modelopt"):
            raise UserError(f"{JOINTS_OPTION} is for int8 graphs that Dyno quantises; omit it here")
        if route == "flags" and trial.precision in ("int8", "fp8") and trial.precision != trial.model.precision:
            raise UserError(
                f"route=flags has no ranges for {trial.precision}; give route=graph or, for int8, calibrator"
            )
        return "graph" if trial.precision in ("fp32", "tf32") else route

    def recipe(self, trial: Trial) -> Recipe:
        """Return the recipe from ONNX to engine, built where it runs; an engine as model is used unchanged.

        With a dynamic profile the trial's batch is left out, so that all batches share one engine.
        """
        if trial.model.file.endswith(ENGINE_SUFFIXES):
            dims = replace(trial.dims, batch=0)
            return Recipe(self.name, "engine", trial.precision, trial.model, dims, runtime=trial.runtime)
        build_settings = Settings.from_options(trial.options)
        route = self._choose_route(trial, build_settings)
        options = replace(build_settings, route="auto" if route == "graph" else route).options()
        data = None
        if route == "calibrator":
            if not trial.data.folder:
                raise UserError(NO_DATA)
            options |= {key: trial.options[key] for key in ("samples",) if key in trial.options}
            data = DataSpec(trial.data.name, trial.data.folder, trial.data.sha256, split="calibration")
        is_static = build_settings.profile == settings.STATIC_OPTION
        engine = Recipe(
            maker=self.name,
            format="engine",
            precision=trial.precision,
            model=trial.model,
            dims=trial.dims if is_static else replace(trial.dims, batch=0),
            options=options,
            data=data,
            runtime=trial.runtime,
        )
        parent_trial = trial if route == "graph" else replace(trial, precision="fp32")
        return route_recipe(parent_trial, "tensorrt", lambda file: replace(engine, parent=file), static=is_static)

    def prepare(self, trial: Trial) -> None:
        """Load the product's library."""
        library.load(self.product)

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Return a session with a context per slot on the trial's GPU; see `run.TensorRTSession` for its errors."""
        from dyno.worker.backends.tensor_rt.run import TensorRTSession

        return TensorRTSession(trial, artifact, self.product)

    def layer_graph(self, trial: Trial, artifact: Artifact | None) -> LayerGraph:
        """Return the layers listed at the build, without a GPU; else the layers that the engine reports.

        Raise a `UserError` for an engine that doesn't report its layers, and the errors of `describe_given`.
        """
        return list_layers(self.product, artifact.path if artifact else trial.model.file, trial.runtime.device)

    def probe(self) -> Probe:
        """Build y = x + x and, if the library supports the GPU, run it."""
        trt = library.load(self.product)
        with tempfile.TemporaryDirectory() as scratch:
            trial, parent = _write_addition(self.name, Path(scratch))
            engine = build(self.product, self.recipe(trial), parent, Path(scratch))
            gpu = engine.made_by.gpu
            detail = f"{gpu.model}, compute capability {gpu.capability}" if gpu else ""
            try:
                devices = ("cuda",) if _can_double(self.load(trial, engine)) else ()
            except (Unavailable, UserError) as e:
                devices, detail = (), f"builds engines but can't run them here: {e}"
        return Probe(version=trt.__version__, devices=devices, detail=detail)


TENSORRT = TensorRT()


class Builder(Maker):
    """A maker that builds engines with the product of that name."""

    def __init__(self, name: str, requires: tuple[str, ...]) -> None:
        self.name, self.requires = name, requires

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Build FOLDER/model.engine, or describe the model's own engine; see `build.build` for its errors.

        While it builds, FOLDER/stage has its progress.
        """
        if recipe.model.file.endswith(ENGINE_SUFFIXES):
            return describe_given(self.name, recipe)
        if parent is None:
            raise UserError("an engine is built from an ONNX file: give one, or a PyTorch model")
        stage = folder / "stage"
        return build(
            self.name, recipe, parent, folder, lambda text: _write_stage(stage, f"build {recipe.precision}: {text}")
        )


class TensorRTRTX(TensorRT):
    """Backend for engines of TensorRT-RTX, which builds without a GPU and runs on RTX GPUs."""

    name = "tensorrt_rtx"
    product = "tensorrt_rtx"
    requires = ("tensorrt-rtx",)


TENSORRT_RTX = TensorRTRTX()
BUILDER = Builder("tensorrt", TensorRT.requires)
RTX_BUILDER = Builder("tensorrt_rtx", TensorRTRTX.requires)


def _write_stage(path: Path, text: str) -> None:
    with suppress(OSError):  # called inside the library, which an exception would abort
        path.write_text(text)


def _write_addition(backend: str, folder: Path) -> tuple[Trial, Artifact]:
    path = folder / "add.onnx"
    path.write_bytes(ONE_ADD)
    boundary = (Tensor("x", "float32", ()),), (Tensor("y", "float32", ()),)
    parent = Artifact("onnx", str(path), hashlib.sha256(ONE_ADD).hexdigest(), len(ONE_ADD), "fp32", *boundary, 0.0)
    options: dict[str, Option] = {"timing_cache": False}
    runtime = Runtime(device="cuda:0")
    return Trial(ModelSpec("add", f"file:{path}"), backend, "fp32", Dims(1, 0, 0), options, runtime=runtime), parent


def _can_double(session: Session) -> bool:
    session.bind({"x": np.asarray(2, np.float32)})
    session.run()
    session.wait()
    is_correct = bool(session.fetch()["y"] == 4)
    session.close()
    return is_correct
