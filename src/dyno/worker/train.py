"""A small training loop: cross-entropy on a decoded data set, weights out."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import models
from dyno.worker.spec import DataSpec, ModelSpec, Preprocess, UserError

WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Options:
    """How to train. `lr` is the peak of the one-cycle schedule; `shift` the largest random shift in pixels, and -1
    stands for a tenth of the image. The defaults are those that the digits are trained with."""

    epochs: int = 10
    batch: int = 32
    lr: float = 0.005
    weight_decay: float = 0.01
    optimizer: str = "adamw"
    momentum: float = 0.9
    smoothing: float = 0.1
    shift: int = -1
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "sgd"):
            raise UserError(f"unknown optimizer {self.optimizer!r}; it is adamw or sgd")
        for name, least in (("epochs", 1), ("batch", 2), ("lr", 1e-12), ("weight_decay", 0.0), ("shift", -1)):
            if not getattr(self, name) >= least:
                raise UserError(f"training option {name} is {getattr(self, name)}; it must be at least {least:g}")


@dataclass(frozen=True)
class Images:
    """One split of a data set: memory-mapped pixels (uint8 N x C x H x W), labels, and the split's indices."""

    pixels: np.ndarray
    labels: np.ndarray
    index: np.ndarray
    preprocess: Preprocess

    def batches(self, size: int, order: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Indices into the data set, `size` at a time; a last batch of one is left to the one before it."""
        index = self.index if order is None else self.index[order]
        edges = list(range(0, len(index), size))
        if len(edges) > 1 and len(index) - edges[-1] == 1:  # batch norm can't train on a single image
            edges.pop()
        for start, end in zip(edges, [*edges[1:], len(index)], strict=True):
            yield index[start:end]

    def scaled(self, pixels: np.ndarray) -> np.ndarray:
        """8-bit pixels as the model's input: (pixel / 255 - mean) / std, float32."""
        mean = np.asarray(self.preprocess.mean, np.float32).reshape(1, -1, 1, 1)
        std = np.asarray(self.preprocess.std, np.float32).reshape(1, -1, 1, 1)
        return (pixels.astype(np.float32) / 255 - mean) / std


def train(
    options: Mapping[str, Any],
    data: DataSpec,
    model: ModelSpec,
    folder: Path,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train on the data set's `train` split, evaluate on `test`, write FOLDER/weights.safetensors.

    AdamW or SGD with a one-cycle learning rate and random shifts; the same seed gives the same batches. Returns top1
    (a share of 1), epochs, seconds, images (those trained on), weights (the path) and sha256 (of the file). `progress`
    is called with one line per epoch. Raises `UserError` for data, options or a model that don't fit together.
    """
    import torch

    chosen = _options(options)
    training, test = (_images(data, split, model) for split in ("train", "test"))
    folder.mkdir(parents=True, exist_ok=True)
    module = models.load(model).to(chosen.device, memory_format=torch.channels_last)
    _check_fit(module, training, chosen)
    started = time.perf_counter()
    _fit(module, training, chosen, progress or (lambda text: None))
    seconds = time.perf_counter() - started
    weights = folder / WEIGHTS
    return {
        "top1": _top1(module, test, chosen),
        "epochs": chosen.epochs,
        "seconds": seconds,
        "images": len(training.index),
        "weights": str(weights),
        "sha256": _save(module, weights),
    }


def _options(options: Mapping[str, Any]) -> Options:
    known = [f.name for f in dataclasses.fields(Options)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)
            raise UserError(f"unknown training option {name!r}; {hint}")
    return Options(**options)


def _images(data: DataSpec, split: str, model: ModelSpec) -> Images:
    folder = Path(data.folder)
    for name in ("images.npy", "labels.npy", f"{split}.npy", "meta.json"):
        if not data.folder or not (folder / name).is_file():
            raise UserError(f"data set {data.folder or data.name!r} has no {name}; training needs images with labels")
    pixels = np.load(folder / "images.npy", mmap_mode="r")
    images = Images(pixels, np.load(folder / "labels.npy"), np.load(folder / f"{split}.npy"), model.preprocess)
    if len(images.index) < 2:
        raise UserError(f"data set {data.name} has {len(images.index)} images in split {split!r}; it takes at least 2")
    channels = pixels.shape[1]
    if channels != model.channels or len(model.preprocess.mean) not in (1, channels):
        raise UserError(
            f"data set {data.name} has {channels} channels; the model takes {model.channels} and its mean and std "
            f"have {len(model.preprocess.mean)}"
        )
    classes = len(json.loads((folder / "meta.json").read_text(encoding="utf-8"))["classes"])
    if model.classes is not None and model.classes != classes:
        raise UserError(f"data set {data.name} has {classes} classes and the model {model.classes}; they must be equal")
    return images


def _check_fit(module: Any, images: Images, options: Options) -> None:
    import torch

    x = images.scaled(images.pixels[images.index[:2]])
    try:
        with torch.inference_mode():
            out = module(torch.from_numpy(x).to(options.device))
    except (RuntimeError, ValueError, AssertionError) as e:
        raise UserError(f"the model refuses images of {list(x.shape[1:])}: {str(e).splitlines()[0]}") from e
    if not isinstance(out, torch.Tensor) or out.dim() != 2:
        raise UserError("the model doesn't return [batch, classes]; only classifiers can be trained")
    highest = int(images.labels[images.index].max())
    if highest >= out.shape[1]:
        raise UserError(f"the model has {out.shape[1]} classes and the data labels up to {highest}; set classes")


def _fit(module: Any, images: Images, options: Options, progress: Callable[[str], None]) -> None:
    import torch

    rng = np.random.default_rng(options.seed)
    torch.manual_seed(options.seed)  # dropout
    steps = options.epochs * sum(1 for _ in images.batches(options.batch))
    optimizer = _optimizer(module, options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=steps)
    started = time.perf_counter()
    module.train()
    for epoch in range(1, options.epochs + 1):
        loss = 0.0
        for index in images.batches(options.batch, rng.permutation(len(images.index))):
            x, y = _batch(images, index, options, rng)
            loss = _step(module, x, y, optimizer, options.smoothing)
            schedule.step()
        if not math.isfinite(loss):
            raise UserError(f"training diverged in epoch {epoch} (loss {loss}); lower lr, now {options.lr:g}")
        progress(f"epoch {epoch}/{options.epochs}, loss {loss:.4f}, {time.perf_counter() - started:.1f} s")
    module.eval()


def _optimizer(module: Any, options: Options) -> Any:
    import torch

    parameters = [p for p in module.parameters() if p.requires_grad]
    if options.optimizer == "adamw":
        return torch.optim.AdamW(parameters, options.lr, weight_decay=options.weight_decay)
    return torch.optim.SGD(
        parameters, options.lr, momentum=options.momentum, weight_decay=options.weight_decay, nesterov=True
    )


def _batch(images: Images, index: np.ndarray, options: Options, rng: np.random.Generator) -> tuple[Any, Any]:
    import torch

    pixels = np.asarray(images.pixels[index])
    shift = pixels.shape[-1] // 10 if options.shift < 0 else options.shift
    x = torch.from_numpy(images.scaled(_shifted(pixels, shift, rng))).to(options.device)
    y = torch.from_numpy(images.labels[index].astype(np.int64)).to(options.device)
    return x.contiguous(memory_format=torch.channels_last), y


def _shifted(pixels: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Each image moved by up to `most` pixels both ways; its border is repeated into the gap."""
    if not most:
        return pixels
    height, width = pixels.shape[-2:]
    padded = np.pad(pixels, ((0, 0), (0, 0), (most, most), (most, most)), mode="edge")
    moves = rng.integers(0, 2 * most + 1, (len(pixels), 2))
    return np.stack([image[:, y : y + height, x : x + width] for image, (y, x) in zip(padded, moves, strict=True)])


def _step(module: Any, x: Any, y: Any, optimizer: Any, smoothing: float) -> float:
    import torch

    loss = torch.nn.functional.cross_entropy(module(x), y, label_smoothing=smoothing)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _top1(module: Any, images: Images, options: Options) -> float:
    import torch

    right = 0
    with torch.inference_mode():
        for index in images.batches(256):
            x = torch.from_numpy(images.scaled(images.pixels[index])).to(options.device)
            right += int((module(x).argmax(1).cpu().numpy() == images.labels[index]).sum())
    return right / len(images.index)


def _save(module: Any, path: Path) -> str:
    from safetensors.torch import save

    # safetensors refuses tensors that share memory, so each gets its own
    content = save({k: v.detach().cpu().clone().contiguous() for k, v in module.state_dict().items()})
    beside = path.with_name(path.name + ".part")
    with open(beside, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(beside, path)
    return hashlib.sha256(content).hexdigest()
