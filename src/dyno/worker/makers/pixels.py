"""ONNX files that read raw pixels: the normalisation becomes a part of the graph, and a feed a quarter of its size."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import Maker, derived
from dyno.worker.facts.files import Check, PixelInput
from dyno.worker.inputs.calibration import example
from dyno.worker.inputs.input_data import pixel_scale
from dyno.worker.inputs.layout import axes
from dyno.worker.onnx_graph.check import compared, outputs
from dyno.worker.spec import Artifact, Recipe, Runtime, Tensor, UserError


def reading_pixels(parent: Recipe) -> Recipe:
    """Return the recipe of the parent's file with an image input of uint8 pixels. Pure."""
    return replace(
        parent, maker=OnnxInput.name, options={"input": "uint8"}, data=None, parent=parent, runtime=Runtime()
    )


class OnnxInput(Maker):
    """Puts `(pixel / 255 - mean) / std` in front of an ONNX file's image input, which then reads uint8."""

    name = "onnx_input"
    requires = ("onnx", "onnxruntime")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.onnx and run it beside its parent on the same picture.

        Raises `UserError` for a file without exactly one image input, or one that reads uint8 already.
        """
        import onnx

        started = time.perf_counter()
        if parent is None:
            raise UserError("input=uint8 is made from an ONNX file: give one, or a PyTorch model")
        image = _find_image(parent)
        channel = axes(image.shape)[0]
        beside = [-1 if axis == channel else 1 for axis in range(4)]
        scale, offset = (v.reshape(beside) for v in pixel_scale(recipe.model.preprocess, int(image.shape[channel])))
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
        artifact = derived(parent, path, parent.precision, made_by, started)
        return replace(artifact, inputs=(replace(image, dtype="uint8"),))


ONNX_INPUT = OnnxInput()


def _find_image(parent: Artifact) -> Tensor:
    inputs = parent.inputs
    one = len(inputs) == 1 and len(inputs[0].shape) == 4
    if not one or not isinstance(inputs[0].shape[axes(inputs[0].shape)[0]], int):
        names = ", ".join(tensor.name for tensor in inputs) or "none"
        raise UserError(f"input=uint8 needs a model with one image input (N x C x H x W); this one has {names}")
    if not inputs[0].dtype.startswith("float"):
        read = f"{inputs[0].name!r} is {inputs[0].dtype} already"
        raise UserError(f"the file's input {read}, not normalised pixels; drop input=uint8")
    return inputs[0]


def _prepend_nodes(graph: Any, name: str, scale: np.ndarray, offset: np.ndarray) -> None:
    """Cast, multiply and add in front of the input, in float32 whatever the graph computes in.

    In FP16 they would round twice more than a host that normalises the pixels does.
    """
    import onnx

    (value,) = (value for value in graph.input if value.name == name)
    wanted, kinds = value.type.tensor_type.elem_type, onnx.TensorProto
    normalised = f"{name}_normalised"
    for node in graph.node:
        for k, read in enumerate(node.input):
            if read == name:
                node.input[k] = normalised
    value.type.tensor_type.elem_type = kinds.UINT8
    graph.initializer.extend(
        [
            onnx.numpy_helper.from_array(scale, f"{name}_scale_of_pixels"),
            onnx.numpy_helper.from_array(offset, f"{name}_offset_of_pixels"),
        ]
    )
    node = onnx.helper.make_node
    last = normalised if wanted == kinds.FLOAT else f"{normalised}_float32"
    front = [
        node("Cast", [name], [f"{name}_pixels"], f"{name}_cast", to=kinds.FLOAT),
        node("Mul", [f"{name}_pixels", f"{name}_scale_of_pixels"], [f"{name}_scaled"], f"{name}_scale"),
        node("Add", [f"{name}_scaled", f"{name}_offset_of_pixels"], [last], f"{name}_offset"),
    ]
    if last != normalised:
        front.append(node("Cast", [last], [normalised], f"{name}_to_graph", to=wanted))
    nodes = [*front, *(type(n).FromString(n.SerializeToString()) for n in graph.node)]
    del graph.node[:]
    graph.node.extend(nodes)


def _check_outputs(path: Path, recipe: Recipe, parent: Artifact, image: Tensor) -> Check:
    """Compare both files on one random picture, for the effect of normalising in the graph."""
    before, ran = outputs(parent.path, _make_feeds(recipe, parent, image), recipe.precision)
    after, _ = outputs(str(path), _make_feeds(recipe, parent, replace(image, dtype="uint8")), recipe.precision)
    return compared(before, after, f"{recipe.model.name} with input=uint8", ran)


def _make_feeds(recipe: Recipe, parent: Artifact, image: Tensor) -> dict[str, np.ndarray]:
    feeds = example(replace(recipe, data=None), replace(parent, inputs=(image,)))
    return {name: array.astype(image.dtype) for name, array in feeds.items()}
