"""A complete backend in one file: small convolutional networks in NumPy, and such a network to try it on.

From outside, as MODULE:CLASS (its folder must be on PYTHONPATH, so that Dyno and its workers can import it):

    PYTHONPATH=examples dyno run examples/numpy_backend.py:net --channels 1 --size 8 \\
        --backends pytorch,numpy_backend:NumpyNet

Copied to src/dyno/worker/backends/, it is found by its name: `--backends numpy_net`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dyno.worker.backend import Arrays, Backend, Maker, Session
from dyno.worker.inputs.shapes import fitted, static_shapes
from dyno.worker.option_values import one_of
from dyno.worker.record import save_arrays
from dyno.worker.spec import Artifact, Dims, Recipe, Runtime, Tensor, Trial, UserError
from dyno.worker.truth import precision_truth

TYPES = {"fp32": np.float32, "fp16": np.float16}
COMPUTE = ("conv", "linear")
SLOW = "NumPy has no BLAS for float16: it multiplies element by element"


class NumpyNet(Backend, Maker):
    """Runs `nn.Sequential` classifiers. Option: `order` (C or F), how the weights lie in memory."""

    name = "numpy_net"
    requires = ("numpy",)
    precisions = tuple(TYPES)
    options = ("order",)
    values = MappingProxyType({"order": one_of("C", "F")})

    def refuse(self, trial: Trial) -> str:
        """See `Backend.refuse`; besides, there is no reader for model files here."""
        if trial.model.file:
            return f"{self.name} runs PyTorch modules, not {Path(trial.model.file).name}"
        return super().refuse(trial)

    def recipe(self, trial: Trial) -> Recipe:
        """Weights as an npz file. Batch 0 (free): one file serves every batch, so it is made once."""
        dims = Dims(0, trial.dims.height, trial.dims.width)
        # `trial.backend` is what the user wrote, numpy_net or MODULE:CLASS: the worker finds the maker by it.
        # `Runtime()`: the file is made in Dyno's own Python, which has the model, whichever the trial runs in.
        return Recipe(trial.backend, "npz", trial.precision, trial.model, dims, runtime=Runtime())

    def probe(self) -> dict[str, Any]:
        """Multiply two matrices."""
        product = np.ones((2, 3), np.float32) @ np.ones((3, 2), np.float32)
        return {"version": np.__version__, "devices": ["cpu"] if (product == 3).all() else [], "detail": "matmul"}

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.npz from the module; a layer that isn't known is a `UserError`."""
        import torch

        from dyno.worker.nets import models

        started = time.perf_counter()
        module = models.load(recipe.model, recipe.dims)
        steps, weights = _translated(module, recipe)
        path = folder / "model.npz"
        save_arrays(path, {"steps": json.dumps(steps), **weights})
        image = (recipe.model.channels, recipe.dims.height, recipe.dims.width)
        with torch.inference_mode():
            classes = int(module(torch.zeros(1, *image)).shape[1])
        return Artifact(
            format="npz",
            path=str(path),
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            bytes=path.stat().st_size,
            precision=recipe.precision,
            inputs=(Tensor("input", "float32", ("batch", *image)),),
            outputs=(Tensor("output", "float32", ("batch", classes)),),
            seconds=time.perf_counter() - started,
            made_by={
                "backend": self.name,
                "options": {},
                "versions": {"numpy": np.__version__},
                "parameters": sum(p.numel() for p in module.parameters()),
                "weights_sha256": models.weights_sha256(module),  # before the cast: which weights were given
                "warnings": [],
            },
        )

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """The weights in memory, ready to multiply."""
        self.check_options(trial.options)
        order = trial.options.get("order", "C")
        assert artifact is not None  # `recipe` is never None, so there is a file
        return NumpySession(trial, artifact, order)


NUMPY_NET = NumpyNet()


class NumpySession(Session):
    """Layer after layer; threads are the BLAS library's, which Dyno sets before NumPy is imported."""

    def __init__(self, trial: Trial, artifact: Artifact, order: Any) -> None:
        self._trial, self._order = trial, order
        with np.load(artifact.path) as stored:
            self._steps: list[dict[str, Any]] = json.loads(str(stored["steps"]))
            self._weights = {n: np.asarray(stored[n], order=order) for n in stored.files if n != "steps"}
        self._shapes = static_shapes(artifact.inputs, trial.dims)
        self.inputs = tuple(Tensor(t.name, t.dtype, self._shapes[t.name]) for t in artifact.inputs)
        self.outputs = tuple(Tensor(t.name, t.dtype, (trial.dims.batch, *t.shape[1:])) for t in artifact.outputs)

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Take the input in the network's type. A cast is a copy: it counts in latency/all, not in latency/model."""
        (tensor,) = self.inputs
        feed = fitted(feeds[tensor.name], tensor, self._shapes[tensor.name])
        self._x = feed.astype(TYPES[self._trial.precision], copy=False)

    def run(self, slot: int = 0) -> None:
        """Run to the end, so that there is nothing to wait for."""
        x = self._x
        for step in self._steps:
            x = _apply(step, self._weights, x)
        self._y = x

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """The scores as float32."""
        return {"output": self._y.astype(np.float32, copy=False)}

    def facts(self) -> dict[str, Any]:
        """Layers by the type of the arrays that came out of them, which is the type NumPy multiplied in."""
        x, kinds = self._x, Counter[str]()
        for step in self._steps:
            x = _apply(step, self._weights, x)
            if step["op"] in COMPUTE:
                kinds[str(x.dtype)] += 1
        return {
            "layers": len(self._steps),
            "layers_by_type": dict(kinds),
            "precision_truth": precision_truth(self._trial.precision, kinds, "NumPy"),
            "threads": self._trial.runtime.threads,
            "options": {"order": self._order},
            "notes": [SLOW] if kinds["float16"] else [],
        }


def _translated(module: Any, recipe: Recipe) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """The module's layers as steps, and their weights in the recipe's type under `NUMBER.weight` and `NUMBER.bias`."""
    from torch import nn

    steps: list[dict[str, Any]] = []
    weights: dict[str, np.ndarray] = {}
    simple = {nn.ReLU: "relu", nn.AdaptiveAvgPool2d: "average", nn.Flatten: "flatten", nn.Linear: "linear"}
    for number, layer in enumerate(module.children()):
        step: dict[str, Any] = {"op": simple.get(type(layer), ""), "name": str(number)}
        found = {name: value.detach().numpy() for name, value in layer.named_parameters()}
        if isinstance(layer, nn.Conv2d) and (layer.groups, layer.dilation) == (1, (1, 1)):
            step |= {"op": "conv", "stride": list(layer.stride), "padding": list(layer.padding)}
            found.setdefault("bias", np.zeros(layer.out_channels, np.float32))
        elif isinstance(layer, nn.BatchNorm2d):
            step["op"] = "scale"
            found["weight"] = found["weight"] / np.sqrt(layer.running_var.numpy() + layer.eps)
            found["bias"] = found["bias"] - layer.running_mean.numpy() * found["weight"]
        if not step["op"]:
            raise UserError(f"numpy_net doesn't know {type(layer).__name__}, which {recipe.model.name} has")
        steps.append(step)
        weights |= {f"{number}.{name}": value.astype(TYPES[recipe.precision]) for name, value in found.items()}
    return steps, weights


def _apply(step: dict[str, Any], weights: dict[str, np.ndarray], x: Any) -> Any:
    """One layer; see `_translated` for the steps."""
    if step["op"] == "relu":
        return np.maximum(x, 0)
    if step["op"] == "average":
        return x.mean((2, 3), keepdims=True)
    if step["op"] == "flatten":
        return x.reshape(len(x), -1)
    weight, bias = (weights[f"{step['name']}.{name}"] for name in ("weight", "bias"))
    if step["op"] == "linear":
        return x @ weight.T + bias
    if step["op"] == "scale":
        return x * weight[:, None, None] + bias[:, None, None]
    (top, left), (down, right) = step["padding"], step["stride"]
    padded = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[2:], (2, 3))[:, :, ::down, ::right]
    return np.tensordot(windows, weight, ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2) + bias[:, None, None]


def net(num_classes: int = 10, channels: int = 1) -> Any:
    """A network for grey images of 8 x 8 pixels, as in scikit-learn's digits."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes),
    )  # fmt: skip
