"""Ranks the layers of an ONNX graph by what they cost in a lower type: once, for every `keep=N` made from it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import Maker, derived
from dyno.worker.facts.files import MakerFacts, RankedLayer
from dyno.worker.inputs.calibration import calibration_of, example
from dyno.worker.makers.ranking import IMAGES, Changed, fp16_changes, int8_changes, rank
from dyno.worker.onnx_graph.fold import lifted
from dyno.worker.onnx_graph.fp16 import sensitive
from dyno.worker.onnx_graph.head import named
from dyno.worker.onnx_graph.int8 import observed
from dyno.worker.spec import Artifact, DataSpec, Option, Recipe, UserError


def ranked(parent: Recipe, precision: str, data: DataSpec | None, options: dict[str, Option]) -> Recipe:
    """Return the recipe of the parent's file with its layers ranked for the precision.

    The options are those of the conversion.
    """
    return replace(parent, maker=OnnxSensitivity.name, precision=precision, options=options, data=data, parent=parent)


class OnnxSensitivity(Maker):
    """Makes the same ONNX file with every node named and, in `made_by`, its layers by sensitivity."""

    name = "onnx_sensitivity"
    requires = ("onnx", "onnxruntime", "onnxconverter-common", "onnxslim")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write the FP32 graph that the ranking's names are of; `made_by.ranking` lists them.

        FOLDER/stage says how far it is. Raises `UserError` without a parent and for calibration data that is missing or
        of another shape than the model reads.
        """
        started = time.perf_counter()
        if parent is None:
            raise UserError("layers are ranked in an ONNX file: give one, or a PyTorch model")
        model, changes = _prepare_graph(recipe, parent, folder)
        feeds = _load_feeds(recipe, parent)

        def report_progress(done: int, total: int) -> None:
            (folder / "stage").write_text(f"rank layers for {recipe.precision}: {done} of {total}")

        ranking = rank(model, changes, feeds, recipe.runtime.threads, report_progress)
        path = folder / "model.onnx"
        path.write_bytes(model.SerializeToString())
        made_by = MakerFacts(
            backend=self.name,
            options=dict(recipe.options),
            ranking=tuple(ranking),
            ranked_on=sum(len(next(iter(feed.values()))) for feed in feeds),
        )
        return derived(parent, path, parent.precision, made_by, started)


ONNX_SENSITIVITY = OnnxSensitivity()


def _prepare_graph(recipe: Recipe, parent: Artifact, folder: Path) -> tuple[Any, dict[str, Changed]]:
    """Return the graph with named nodes, and for each layer a function that lowers its precision alone."""
    import onnx

    model = lifted(onnx.load(parent.path))
    if recipe.precision == "fp16":
        named(model.graph)
        return model, fp16_changes(model, sensitive())
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        seen = observed(model, recipe, calibration_of(recipe, parent), Path(scratch))
    return seen.model, int8_changes(seen)


def _load_feeds(recipe: Recipe, parent: Artifact) -> Sequence[dict[str, np.ndarray]]:
    """Return inputs for the ranking, spread over the calibration's data; one random batch without data."""
    if recipe.data is None:
        return [example(recipe, parent)]
    fewer = replace(recipe, options={**recipe.options, "samples": IMAGES})
    data = calibration_of(fewer, parent)
    return list(data.feeds(0, len(data)))


def layers_to_keep(recipe: Recipe, parent: Artifact) -> tuple[RankedLayer, ...]:
    """Return the layers that the recipe's option `keep` keeps higher: the most sensitive ones of the parent's ranking.

    Raises a `UserError` if there are fewer layers.
    """
    count = recipe.options.get("keep", 0)
    ranking = parent.made_by.ranking
    if count > len(ranking):  # type: ignore[operator]
        raise UserError(f"keep={count}: {recipe.model.name} has {len(ranking)} layers that {recipe.precision} touches")
    return ranking[: int(count)]
