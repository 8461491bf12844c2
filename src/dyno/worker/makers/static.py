"""ONNX files for one trial's shapes: every size fixed, and what only the shapes decide computed beforehand.

TensorRT 8.6 reads the class token of a vision transformer only so; of a ConvNeXt with a free batch its builder dies.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno.worker.backend import Maker, derived
from dyno.worker.inputs import input_data
from dyno.worker.inputs.shapes import static_shapes
from dyno.worker.onnx_graph.file import import_onnx, read_io
from dyno.worker.onnx_graph.fold import folded, lifted
from dyno.worker.onnx_graph.opset import with_metadata
from dyno.worker.onnx_graph.weights import beside
from dyno.worker.spec import Artifact, DataSpec, Recipe, Runtime, Trial, UserError


class OnnxStatic(Maker):
    """Fixes every shape of an ONNX file for one trial and folds what only those shapes decide."""

    name = "onnx_static"
    requires = ("onnx", "onnxruntime", "onnxslim")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.onnx with the recipe's shapes; the same outputs on random inputs as before.

        Raises `UserError` for shapes that the file can't have, and for a graph over 2 GiB.
        """
        onnx, started = import_onnx(), time.perf_counter()
        assert parent is not None
        if beside(Path(parent.path)):
            raise UserError("a graph with its weights in other files can't be folded here; give the option fold=false")
        model, path = lifted(onnx.load(parent.path)), folder / "model.onnx"
        shapes = static_shapes(parent.inputs, recipe.dims)
        for value in model.graph.input:
            for axis, size in enumerate(shapes[value.name]):
                value.type.tensor_type.shape.dim[axis].dim_value = size
        _forget_shapes(model.graph)
        model_inputs, preprocess = recipe.model.inputs, recipe.model.preprocess
        feeds = next(input_data.batches(DataSpec(), preprocess, parent.inputs, recipe.dims, 1, model_inputs))
        typed = {name: feeds[name].astype(_find_dtype(parent, name)) for name in shapes}
        slim, fold_warnings = folded(model, typed, folder)
        onnx.save(with_metadata(slim, model), path)
        read, written = read_io(str(path))
        warnings = (*parent.made_by.warnings, *fold_warnings)
        made_by = replace(parent.made_by, steps=(), backend=self.name, folded=not fold_warnings, warnings=warnings)
        return replace(derived(parent, path, parent.precision, made_by, started), inputs=read, outputs=written)


ONNX_STATIC = OnnxStatic()


def _find_dtype(parent: Artifact, name: str) -> str:
    return next(tensor.dtype for tensor in parent.inputs if tensor.name == name)


def _forget_shapes(graph: Any) -> None:
    """Clear the intermediate and output shapes of the free batch, which no longer hold; they are inferred again."""
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
