"""ONNX files: read, copied with their external weights, and exported by `dyno export`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dyno.worker.backend import FileContents, FileFormat
from dyno.worker.inputs.specs import find_largest_pixel, image_of
from dyno.worker.makers.precision import OPTION_CHECKS, convert_recipe
from dyno.worker.nets import file_facts, flops
from dyno.worker.onnx_graph import file, graph_facts
from dyno.worker.option_values import check_values
from dyno.worker.spec import Option, Recipe, Tensor, Trial


class OnnxFormat(FileFormat):
    """An ONNX graph, with external files of its larger weights."""

    name = "onnx"
    suffixes = (".onnx",)
    backend = "onnxruntime"

    def companions(self, path: Path) -> list[Path]:
        return graph_facts.list_files_beside(path) if path.is_file() else []

    def copy(self, file: Path, out: Path) -> None:
        graph_facts.copy_with_weights(file, out)

    def recipe(self, trial: Trial) -> Recipe:
        """Return the file's recipe for the engine in the option `target`, with a free batch if the trial's is 0."""
        check_values(self.name, trial.options, OPTION_CHECKS)
        return convert_recipe(trial, str(trial.options.get("target", "onnxruntime")), trial.dims.batch)

    def read(self, path: str, trial: Trial) -> FileContents:
        """Read the file; raise a `UserError` also for a graph that ONNX's checker refuses."""
        inputs, outputs = file.read_io(path)
        if inputs:
            file.check(path)
        model = file.read_model(path)
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        facts, image = graph_facts.read_graph_facts(model), image_of(inputs)
        return FileContents(
            inputs,
            outputs,
            facts.precision,
            parameters=facts.parameters,
            task=file_facts.read_purpose(metadata),
            image=file_facts.read_image_facts(metadata),
            flops=partial(flops.of_onnx, path),
            lengths=_find_lengths(model, inputs),
            largest_pixel=find_largest_pixel(graph_facts.list_first_steps(model, image.name)) if image else 0.0,
        )


def _find_lengths(model: Any, inputs: Sequence[Tensor]) -> dict[str, int]:
    """Return free channel axes, as Hugging Face's exporter writes them, with the length that a convolution fixes."""
    free_axes = [(t.name, t.shape[1]) for t in inputs if len(t.shape) > 2 and t.shape.count(t.shape[1]) == 1]
    lengths = {axis: graph_facts.find_channels(model, name) for name, axis in free_axes if isinstance(axis, str)}
    return {axis: length for axis, length in lengths.items() if length}


ONNX = OnnxFormat()


# Routes from a model to an engine's ONNX file: exporter, opset, free or fixed batch, folded or not
#
# A route may fail, or give a slower graph, depending on network and engine. So the usual route has fallbacks, tried in
# order.

ROUTE_OPTIONS = ("exporter", "opset", "static", "fold")  # trial options that name a route
Options = dict[str, Option]
FOLDED_ROUTE: Options = {"fold": True}
TRACED_ROUTE: Options = {"exporter": "torchscript"}
STATIC_ROUTE: Options = {"static": True}


def route_recipe(trial: Trial, target: str, finish: Callable[[Recipe], Recipe], *, static: bool = False) -> Recipe:
    """Return the recipe by `finish` from the trial's ONNX file by the usual route, with fallbacks. Pure.

    The other routes are the fallbacks. `static`: the engine takes only this trial's shapes, so they are fixed and
    folded into the graph. A trial whose options name a route has no fallbacks.
    """
    recipe: Recipe | None = None
    for options in reversed(_list_candidates(trial, static)):
        route_trial = replace(trial, options={**options, **trial.options})
        recipe = replace(finish(convert_recipe(route_trial, target)), fallback=recipe)
    assert recipe is not None
    return recipe


def _list_candidates(trial: Trial, static: bool) -> tuple[Options, ...]:
    """Return the options of each route, the usual one first."""
    default_route = FOLDED_ROUTE if static else {}
    if any(name in trial.options for name in ROUTE_OPTIONS):
        return (default_route,)
    if trial.model.file:
        return (FOLDED_ROUTE, {}) if static else ({},)
    if static:
        return (FOLDED_ROUTE, {**TRACED_ROUTE, **STATIC_ROUTE, **FOLDED_ROUTE}, STATIC_ROUTE)
    return ({}, TRACED_ROUTE, STATIC_ROUTE)
