"""FP8 and INT8 Q/DQ graphs for TensorRT by NVIDIA's Model Optimizer, in a separate environment.

nvidia-modelopt pins older onnx and onnxruntime versions than Dyno's, so this step runs in the study's interpreter named
`modelopt` (`--python modelopt=PATH`). It needs no GPU.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from dyno.worker.backend import Maker, make_derived
from dyno.worker.extras import ONNX_RUNTIME_BUILDS, load_library
from dyno.worker.facts.engine import Calibration
from dyno.worker.facts.files import OutputCheck
from dyno.worker.inputs.calibration import CalibrationImages, make_example
from dyno.worker.onnx_graph.check import compare_outputs, compute_outputs
from dyno.worker.onnx_graph.placement import list_decoding_nodes
from dyno.worker.onnx_graph.repair import with_metadata
from dyno.worker.spec import Artifact, DataSpec, Option, Recipe, Runtime, UserError

RUNTIME_NAME = "modelopt"  # name of this step's interpreter
CALIBRATION_METHODS = {"minmax": "max", "entropy": "entropy"}
REST_PRECISION = "fp16"  # of unquantised layers: TensorRT 10 takes types from the graph, and FP16 is fast
DETECTOR_REST_PRECISION = "fp32"  # the whole rest has one type, and decoding boxes needs FP32
INSTALL_ADVICE = "give a Python that has it, --python modelopt=PATH (there: pip install nvidia-modelopt[onnx])"


def quantise_recipe(parent: Recipe, precision: str, data: DataSpec, options: dict[str, Option]) -> Recipe:
    """Return the recipe of the parent's file in fp8 or int8; options `samples` and `method`. Pure."""
    return replace(
        parent,
        maker=OnnxModelopt.name,
        precision=precision,
        options=options,
        data=data,
        parent=parent,
        runtime=Runtime(name=RUNTIME_NAME),
    )


class OnnxModelopt(Maker):
    """A maker of Q/DQ files for TensorRT 10 and later: products and convolutions in FP8 or INT8, the rest in FP16.

    In detectors the rest is in FP32.
    """

    name = "onnx_modelopt"
    requires = ("nvidia-modelopt", "onnx", ONNX_RUNTIME_BUILDS)

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Quantise the parent's file, calibrated on the recipe's data, and compare one run with the parent's.

        Raise `Unavailable` without nvidia-modelopt, a `UserError` for missing or unsuitable calibration data and for a
        result that isn't finite.
        """
        started = time.perf_counter()
        assert parent is not None
        method = str(recipe.options.get("method", "minmax"))
        if method not in CALIBRATION_METHODS:
            raise UserError(
                f"nvidia-modelopt has no calibration method {method!r}; it has {', '.join(CALIBRATION_METHODS)}"
            )
        images, path = CalibrationImages(recipe, parent), folder / "model.onnx"
        count = _quantise_file(parent, recipe, CALIBRATION_METHODS[method], images, path)
        made_by = replace(
            self.describe(recipe),
            scheme=f"nvidia-modelopt: Q/DQ in {recipe.precision} as it places them, the rest in "
            + (f"{DETECTOR_REST_PRECISION}: {count} nodes that decode boxes among it" if count else REST_PRECISION),
            target="tensorrt",
            calibration=Calibration(images.count, method, images.data.sha256),
            check=_check_outputs(path, recipe, parent),
            warnings=tuple(images.warnings),
        )
        return make_derived(parent, path, recipe.precision, made_by, started)


ONNX_MODELOPT = OnnxModelopt()


def _quantise_file(parent: Artifact, recipe: Recipe, method: str, images: CalibrationImages, path: Path) -> int:
    """Write the file; return the number of a detector's decoding nodes left unquantised."""
    quantize = load_library("modelopt.onnx.quantization", cure=INSTALL_ADVICE).quantize
    import onnx

    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        # It writes files next to its source, and needs node names, which not every exporter gives.
        source, model = Path(scratch) / "source.onnx", onnx.load(parent.path)
        head = list_decoding_nodes(model.graph, recipe.model)
        onnx.save(model, source)
        quantize(
            str(source),
            quantize_mode=recipe.precision,
            calibration_data_reader=Feeds(images),
            calibration_method=method,
            calibration_eps=["cpu"],
            high_precision_dtype=DETECTOR_REST_PRECISION if head else REST_PRECISION,
            nodes_to_exclude=[re.escape(name) + "$" for name in sorted(head)],
            output_path=str(Path(scratch) / "made.onnx"),
            log_level="ERROR",
        )
        shutil.move(Path(scratch) / "made.onnx", path)
    onnx.save(with_metadata(onnx.load(path, load_external_data=False), model), path)
    return len(head)


class Feeds:
    """The calibration images in nvidia-modelopt's interface: batches in order, rewindable."""

    def __init__(self, images: CalibrationImages) -> None:
        self.images = images
        self.pending: Iterator[dict[str, np.ndarray]] = iter(())
        self.rewind()

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next batch; None after the last."""
        return next(self.pending, None)

    def get_first(self) -> dict[str, np.ndarray]:
        """Return the first batch, regardless of the position."""
        return next(self.images.feeds(0, 1))

    def rewind(self) -> None:
        """Start from the first batch again."""
        self.pending = self.images.feeds(0, len(self.images))


def _check_outputs(path: Path, recipe: Recipe, parent: Artifact) -> OutputCheck:
    """Compare parent and result on one batch.

    Graph optimisation is off, because ONNX Runtime's changes the results of such graphs.
    """
    feeds = make_example(recipe, parent)
    before, _ = compute_outputs(parent.path, feeds)
    after, runtime = compute_outputs(str(path), feeds, recipe.precision, optimised=False)
    return compare_outputs(
        before, after, f"{recipe.model.name} in {recipe.precision}", f"{runtime}, without graph optimisation"
    )
