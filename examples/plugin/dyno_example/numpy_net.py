"""A backend with a file format of its own: small convolutional networks in NumPy, and such a network to try it on.

`.npnet` is an npz file: the layers as JSON under `about`, their weights under NUMBER.weight and NUMBER.bias.
"""

from __future__ import annotations

import json
import time
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dyno.worker.backend import Arrays, Backend, FileContents, FileFormat, Maker, Session, artifact_of
from dyno.worker.facts.engine import EngineFacts, Probe, precision_truth
from dyno.worker.inputs.specs import fit_feed, static_shapes
from dyno.worker.option_values import one_of
from dyno.worker.record import save_arrays
from dyno.worker.spec import Artifact, Dims, Recipe, Runtime, Tensor, Trial, UserError

TYPES = {"fp32": np.float32, "fp16": np.float16}
COMPUTE = ("conv", "linear")
SLOW = "NumPy has no BLAS for float16: it multiplies element by element"


class NpnetFormat(FileFormat):
    """A network as this backend keeps it: `dyno export NET -o FILE.npnet` writes, `dyno time FILE.npnet` runs one."""

    name = "npnet"
    suffixes = (".npnet",)
    backend = "numpy_net"
    builders = ("numpy_net",)

    def read(self, path: str, trial: Trial) -> FileContents:
        """Inputs and outputs with a free batch; a file that is none is a `UserError`."""
        about, _ = _read(path)
        return FileContents(*_ends(about))


class NumpyNet(Backend):
    """Runs `nn.Sequential` classifiers. Option: `order` (C or F), how the weights lie in memory."""

    name = "numpy_net"
    requires = ("numpy",)
    precisions = tuple(TYPES)
    options = ("order",)
    values = MappingProxyType({"order": one_of("C", "F")})
    files = NpnetFormat.suffixes

    def recipe(self, trial: Trial) -> Recipe:
        """One file in fp32 serves every precision and batch (0: free), so it is made once."""
        dims = Dims(0, trial.dims.height, trial.dims.width)
        # `Runtime()`: the file is made in Dyno's own Python, which has the model, whichever the trial runs in.
        return Recipe(NumpyNetMaker.name, NpnetFormat.name, "fp32", trial.model, dims, runtime=Runtime())

    def probe(self) -> Probe:
        """Multiply two matrices."""
        product = np.ones((2, 3), np.float32) @ np.ones((3, 2), np.float32)
        return Probe(version=np.__version__, devices=("cpu",) if (product == 3).all() else (), detail="matmul")

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """The weights in memory in the trial's type, ready to multiply."""
        self.check_options(trial.options)
        assert artifact is not None  # `recipe` is never None, so there is a file
        return NumpySession(trial, artifact, trial.options.get("order", "C"))


class NumpyNetMaker(Maker):
    """Writes a module's layers into a .npnet file, or points to the model's own."""

    name = "numpy_net"
    requires = ("numpy",)

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.npnet; a layer that isn't known is a `UserError`."""
        started = time.perf_counter()
        path = Path(recipe.model.file) if recipe.model.file else _written(recipe, folder / "model.npnet")
        about, weights = _read(str(path))
        made_by = replace(
            self.describe(recipe),
            parameters=sum(value.size for value in weights.values()),
            weights_sha256=about["weights_sha256"],  # trials of the same weights are compared
        )
        return artifact_of(path, recipe.format, recipe.precision, _ends(about), made_by, started)


NPNET = NpnetFormat()
NUMPY_NET = NumpyNet()
MAKER = NumpyNetMaker()


class NumpySession(Session):
    """Layer after layer; threads are the BLAS library's, which Dyno sets before NumPy is imported."""

    def __init__(self, trial: Trial, artifact: Artifact, order: Any) -> None:
        self._trial, self._order = trial, order
        about, weights = _read(artifact.path)
        self._steps: list[dict[str, Any]] = about["steps"]
        kind = TYPES[trial.precision]
        self._weights = {name: np.asarray(value, kind, order=order) for name, value in weights.items()}
        self._shapes = static_shapes(artifact.inputs, trial.dims)
        self.inputs = tuple(Tensor(t.name, t.dtype, self._shapes[t.name]) for t in artifact.inputs)
        self.outputs = tuple(Tensor(t.name, t.dtype, (trial.dims.batch, *t.shape[1:])) for t in artifact.outputs)

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Take the input in the network's type. A cast is a copy: it counts in latency/all, not in latency/model."""
        (tensor,) = self.inputs
        feed = fit_feed(feeds, tensor, self._shapes[tensor.name])
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

    def facts(self) -> EngineFacts:
        """Layers by the type of the arrays that came out of them, which is the type NumPy multiplied in."""
        x, kinds = self._x, Counter[str]()
        for step in self._steps:
            x = _apply(step, self._weights, x)
            if step["op"] in COMPUTE:
                kinds[str(x.dtype)] += 1
        return EngineFacts(
            layers=len(self._steps),
            layers_by_type=dict(kinds),
            precision_truth=precision_truth(self._trial.precision, kinds, "NumPy"),
            threads=self._trial.runtime.threads,
            options={"order": self._order},
            notes=(SLOW,) if kinds["float16"] else (),
        )


def _written(recipe: Recipe, path: Path) -> Path:
    """The file of the recipe's module."""
    import torch

    from dyno.worker.nets import models

    module = models.load(recipe.model, recipe.dims)
    steps, weights = _translated(module, recipe)
    image = (recipe.model.channels, recipe.dims.height, recipe.dims.width)
    with torch.inference_mode():
        classes = int(module(torch.zeros(1, *image)).shape[1])
    about = {"steps": steps, "image": image, "classes": classes, "weights_sha256": models.weights_sha256(module)}
    save_arrays(path, {"about": json.dumps(about), **weights})
    return path


def _read(path: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What the file says of the network, and its weights."""
    try:
        with np.load(path) as stored:
            about: dict[str, Any] = json.loads(str(stored["about"]))
            return about, {name: stored[name] for name in stored.files if name != "about"}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as e:
        raise UserError(f"{path} is not a whole .npnet file; build it again") from e


def _ends(about: dict[str, Any]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Inputs and outputs with a free batch."""
    image, scores = ("batch", *about["image"]), ("batch", about["classes"])
    return (Tensor("input", "float32", image),), (Tensor("output", "float32", scores),)


def _translated(module: Any, recipe: Recipe) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """The module's layers as steps, and their weights under `NUMBER.weight` and `NUMBER.bias`."""
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
        weights |= {f"{number}.{name}": value for name, value in found.items()}
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
