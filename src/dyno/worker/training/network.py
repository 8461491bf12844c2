"""Network to be trained: built for the data's classes, from random, published or stored weights."""

from __future__ import annotations

import copy
import csv
import io
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.inputs.input_data import read_normalisation
from dyno.worker.inputs.specs import INPUT_ERRORS
from dyno.worker.nets import models
from dyno.worker.nets.checkpoint import apply, by_own_names, head_classes, read_checkpoint
from dyno.worker.record import write_bytes
from dyno.worker.sessions.torch_support import first_line, walk_tensors
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Preprocess, UserError, add_noun
from dyno.worker.training.options import TrainOptions

AUXILIARY_WEIGHT = 0.3  # loss weight of an auxiliary classifier (Szegedy et al., Going deeper with convolutions, 2014)


def build_network(model: ModelSpec, dims: Dims, *, freeze: bool = False) -> tuple[Any, list[str]]:
    """Build the module with `model.classes` classes; return it with notes on its weights.

    It starts from the weights of a checkpoint or the library's own; if only the number of classes differs, the
    classifier is initialised at random. With `freeze` only the classifier is trained. Raises `UserError`.
    """
    module = models.build(replace(model, weights="", pretrained=False), dims)
    notes = []
    state, origin = _initial_weights(model, dims)
    if state is not None:
        notes = _apply_state(module, state, origin)
    _check_network(module, model, dims)
    if freeze:
        notes.append(_freeze_layers(module, model, dims))
    return module, notes


def _initial_weights(model: ModelSpec, dims: Dims) -> tuple[Mapping[str, Any] | None, str]:
    if model.weights:
        return read_checkpoint(model.weights), model.weights
    if model.pretrained:
        return models.load(replace(model, classes=None), dims).state_dict(), f"the published weights of {model.source}"
    return None, ""


def _apply_state(module: Any, state: Mapping[str, Any], origin: str) -> list[str]:
    module_state, state = module.state_dict(), by_own_names(module, state, origin)
    classes = head_classes(module, state)
    if classes is None:
        apply(module, state, origin)
        return []
    head = [name for name in module_state if name in state and state[name].shape != module_state[name].shape]
    apply(module, {**state, **{name: module_state[name] for name in head}}, origin)
    data_classes = module_state[head[0]].shape[0]
    return [f"{origin} has {classes} classes and the data {data_classes}: {', '.join(head)} begin from random values"]


def _check_network(module: Any, model: ModelSpec, dims: Dims) -> None:
    """Raise a `UserError` unless the network takes the images and returns a score per class, trained or evaluated."""
    import torch

    module_copy = copy.deepcopy(module)  # a pass in training mode changes the statistics of batch norm
    image = torch.zeros(2, model.channels, dims.height, dims.width)
    for training in (False, True):
        try:
            with torch.no_grad():
                output = module_copy.train(training)(image)
        except INPUT_ERRORS as e:
            raise UserError(f"the model refuses images of {dims.size} pixels: {first_line(e)}") from e
        main = next(iter(walk_tensors(output)), None)
        if main is None or main.dim() != 2 or (not training and not isinstance(output, torch.Tensor)):
            raise UserError(f"{model.source} doesn't return [batch, classes]; only classifiers can be trained")
        if main.shape[1] != model.classes:
            raise UserError(
                f"{model.source} has {main.shape[1]} classes and the data has {model.classes}; "
                "let the function take num_classes"
            )


def _freeze_layers(module: Any, model: ModelSpec, dims: Dims) -> str:
    """Leave only the classifier (parameters shaped by the number of classes) trainable; return a note on it."""
    assert model.classes is not None
    state = models.build(replace(model, weights="", pretrained=False, classes=model.classes + 1), dims).state_dict()
    head = [name for name, value in module.named_parameters() if state[name].shape != value.shape]
    if not head:
        raise UserError(f"{model.source} has no layer whose size follows the number of classes; omit freeze")
    for name, value in module.named_parameters():
        value.requires_grad_(name in head)
    return f"only {', '.join(head)} are trained"


def compute_loss(outputs: Any, labels: Any, smoothing: float) -> Any:
    """Return the cross-entropy of the scores, plus auxiliary classifiers' (GoogLeNet, Inception) at a fixed weight."""
    from torch.nn.functional import cross_entropy

    main, *auxiliaries = walk_tensors(outputs)
    total = cross_entropy(main, labels, label_smoothing=smoothing)
    for auxiliary in auxiliaries:
        total = total + AUXILIARY_WEIGHT * cross_entropy(auxiliary, labels, label_smoothing=smoothing)
    return total


# Snapshots of a training after each epoch: its state for resuming, the weights, the curves.
#
# state.pt is written first and atomically; the other files are derived from it, so that the next start repairs an
# interruption between two writes. It holds tensors, numbers and text only, and is read without running code.

STATE_FILE, BEST_FILE, LAST_FILE, HISTORY_FILE = "state.pt", "best.safetensors", "last.safetensors", "history.csv"
HISTORY_COLUMNS = ("epoch", "lr", "train_loss", "test_loss", "top1", "seconds", "images_per_s")
START_ANEW_ADVICE = "give another --out, or remove that folder to start anew"


@dataclass
class State:
    """The progress of a training: its settings, the finished epochs' rows, and the best epoch (0: none)."""

    settings: dict[str, Any]
    history: list[dict[str, float]] = field(default_factory=list)
    best: int = 0

    @property
    def epoch(self) -> int:
        """The number of finished epochs."""
        return len(self.history)

    def add(self, row: dict[str, float]) -> None:
        """Add a finished epoch; the best has the highest top-1 and, at equal top-1, the lowest loss."""
        self.history.append(row)
        if not self.best or _rank_epoch(row) > _rank_epoch(self.history[self.best - 1]):
            self.best = self.epoch


def _rank_epoch(row: Mapping[str, float]) -> tuple[float, float]:
    return row["top1"], -row["test_loss"]


def store_state(folder: Path, state: State, parts: Mapping[str, Any]) -> None:
    """Write the state with the state dicts of `parts` (including `module`), then the files derived from it."""
    import torch

    content = io.BytesIO()
    metadata = {"settings": state.settings, "history": state.history, "best": state.best}
    torch.save({"about": json.dumps(metadata), **{name: part.state_dict() for name, part in parts.items()}}, content)
    write_bytes(folder / STATE_FILE, content.getbuffer())
    publish_files(folder, state, parts["module"])


def publish_files(folder: Path, state: State, module: Any) -> None:
    """Write the curves, the last weights and, if the last epoch is the best, the best weights."""
    weights = _serialise_weights(module)
    if state.best == state.epoch:
        write_bytes(folder / BEST_FILE, weights)
    write_bytes(folder / LAST_FILE, weights)
    table = io.StringIO()
    writer = csv.DictWriter(table, HISTORY_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(state.history)
    write_bytes(folder / HISTORY_FILE, table.getvalue().encode())


def restore_state(folder: Path, settings: dict[str, Any], parts: Mapping[str, Any]) -> State:
    """Load the state of the training in the folder into its `parts`; return it, or a new state without a file.

    Raise a `UserError` for a damaged file, or for different settings or data, by name.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        return State(settings)
    content = _read_state(path)
    metadata = json.loads(content["about"])
    _check_settings(path, metadata["settings"], settings)
    for name, part in parts.items():
        part.load_state_dict(content[name])
    state = State(settings, metadata["history"], metadata["best"])
    publish_files(folder, state, parts["module"])
    return state


def _read_state(path: Path) -> dict[str, Any]:
    import torch

    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        json.loads(content["about"])
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is damaged or not the state of a training; {START_ANEW_ADVICE}") from e
    return content


def _check_settings(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a `UserError` that names changed settings with an effect on the result."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        changes = ", ".join(
            f"{name} {_format_value(before.get(name))} (now {_format_value(now.get(name))})" for name in names
        )
        raise UserError(f"the training in {path.parent} began with {changes}; {START_ANEW_ADVICE}")


def _format_value(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)


def _serialise_weights(module: Any) -> bytes:
    from safetensors.torch import save

    # safetensors refuses tensors that share memory, so each gets its own
    tensors = {k: v.detach().cpu().clone().contiguous() for k, v in module.state_dict().items()}
    content: bytes = save(tensors)
    return content


# Training data: batches of a decoded data set in seeded order, cropped and mirrored as they are read.
#
# Pixels stay uint8 until they are on the device, where they are normalised as everywhere else in Dyno.

EVALUATION_BATCH = 64  # fewest images per evaluation batch
SHIFT_DIVISOR = 10  # `shift` moves an image by at most a tenth

Key = tuple[int, np.ndarray]  # seed of a batch's augmentation, and rows of images.npy


@dataclass(frozen=True)
class Split:
    """Split of a decoded data set: memory-mapped pixels (uint8 N x C x H x W), labels, its rows, and class names."""

    pixels: np.ndarray
    labels: np.ndarray
    index: np.ndarray
    classes: tuple[str, ...]

    @classmethod
    def open(cls, data: DataSpec) -> Split:
        """Open the split named in the specification; raise a `UserError` if the folder lacks a part of it."""
        folder = Path(data.folder)
        for name in ("images.npy", "labels.npy", f"{data.split}.npy", "meta.json"):
            if not data.folder or not (folder / name).is_file():
                location = data.folder or data.name
                raise UserError(f"data set {location!r} has no {name}; training needs images with labels")
        metadata = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        pixels = np.load(folder / "images.npy", mmap_mode="r")
        index = np.load(folder / f"{data.split}.npy")
        if len(index) < 2:
            purpose = "test" if data.split == "test" else "train"
            raise UserError(
                f"data set {data.name} has {add_noun(len(index), 'image')} to {purpose} on; it takes 2 or more"
            )
        return cls(pixels, np.load(folder / "labels.npy"), index, tuple(metadata["classes"]))


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch's random numbers, independent of earlier epochs in this process."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])


def load_batches(split: Split, options: TrainOptions, epoch: int) -> list[Key]:
    """Return the batches of an epoch; a single last image joins the previous batch: batch norm can't train on one."""
    rng = np.random.default_rng(epoch_seed(options.seed, epoch))
    order = rng.permutation(split.index)
    edges = list(range(0, len(order), options.batch))
    if len(edges) > 1 and len(order) - edges[-1] == 1:
        edges.pop()
    seeds = rng.integers(0, 2**63 - 1, len(edges))
    ends = [*edges[1:], len(order)]
    return [(int(seed), order[a:b]) for seed, a, b in zip(seeds, edges, ends, strict=True)]


def plain_batches(split: Split, size: int) -> list[Key]:
    """Return all images of the split in their order, in batches of `size`."""
    return [(0, split.index[start : start + size]) for start in range(0, len(split.index), size)]


def make_augmentation(kind: str, size: tuple[int, int]) -> Callable[[Any], Any] | None:
    """Return torchvision's transforms from a cached image to a training image of `size` (height, width).

    Return None for `none`.
    """
    from torchvision.transforms import v2

    if kind == "none":
        return None
    if kind == "shift":
        padding = [max(1, size[1] // SHIFT_DIVISOR), max(1, size[0] // SHIFT_DIVISOR)]
        shift: Callable[[Any], Any] = v2.RandomCrop(size, padding=padding, padding_mode="edge")
        return shift
    crop = v2.RandomCrop(size) if kind == "light" else v2.RandomResizedCrop(size, antialias=True)
    transform: Callable[[Any], Any] = v2.Compose([crop, v2.RandomHorizontalFlip()])
    return transform


class BatchDataset:
    """A data set for torch's DataLoader with whole batches as items: pixels uint8 B x C x H x W, labels int64.

    An augmentation draws from the batch's own seed and restores torch's generator, so that neither the number of
    workers nor earlier batches change an image.
    """

    def __init__(self, split: Split, change: Callable[[Any], Any] | None = None) -> None:
        self._split, self._change = split, change

    def __getitem__(self, key: Key) -> tuple[Any, Any]:
        import torch

        seed, rows = key
        pixels = torch.from_numpy(np.asarray(self._split.pixels[rows]))
        labels = torch.from_numpy(self._split.labels[rows].astype(np.int64))
        if self._change is None:
            return pixels, labels
        generator = torch.default_generator
        rng_state = generator.get_state()
        generator.manual_seed(seed)
        images = torch.stack([self._change(image) for image in pixels])
        generator.set_state(rng_state)
        return images, labels


class BatchReader:
    """Batches of a split, read by torch's DataLoader (in its workers, if any) and normalised on the device."""

    def __init__(
        self, split: Split, preprocess: Preprocess, options: TrainOptions, change: Callable[[Any], Any] | None = None
    ) -> None:
        import torch

        self.split, self.options, self._device = split, options, torch.device(options.device)
        mean, std = read_normalisation(preprocess, split.pixels.shape[1])
        self._mean, self._std = (torch.from_numpy(v).to(self._device) for v in (mean, std))
        self._keys: list[Key] = []  # the loader's sampler, refilled for each epoch, so that workers persist
        self._loader = torch.utils.data.DataLoader(
            BatchDataset(split, change),
            batch_size=None,  # an item is a batch already
            sampler=self._keys,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
            pin_memory=self._device.type == "cuda",
            # The loader's own generator: it must not advance dropout's.
            generator=torch.Generator().manual_seed(options.seed),
        )

    def __call__(self, keys: list[Key]) -> Iterator[tuple[Any, Any]]:
        """Yield inputs as the network reads them (float32, channels last) and labels, batch by batch."""
        import torch

        self._keys[:] = keys
        for pixels, labels in self._loader:
            x = pixels.to(self._device, non_blocking=True)
            x = x.to(torch.float32, memory_format=torch.channels_last)
            x = x.div_(255).sub_(self._mean).div_(self._std)
            yield x, labels.to(self._device, non_blocking=True)
