"""The result of inspecting a model before anything is planned: its inputs, outputs, parameters, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dyno.worker.facts.json_values import Sparse
from dyno.worker.spec import InputSpec, Preprocess, Tensor

METADATA_FILE = "metadata.yaml"  # file in ultralytics' export folders


@dataclass(frozen=True, kw_only=True)
class Purpose(Sparse):
    """A network's task, as far as its file, its library or the user names it.

    `task` is "" and `classes` None if unknown. `keypoints` is the number of points of a pose and of values per point.
    `class_names` is () if they are unknown or only numbers. `inputs` are the inputs that Dyno wrote into a file; the
    image's sides must be multiples of `stride`.
    """

    task: str = ""
    classes: int | None = None
    class_names: tuple[str, ...] = ()
    keypoints: tuple[int, ...] = ()
    preprocess: Preprocess | None = None
    inputs: tuple[InputSpec, ...] = ()
    stride: int | None = None


def order_class_names(names: Any) -> tuple[str, ...]:
    """Return class names in the order of their numbers, from a list or a dict by number; () for placeholders.

    Placeholders end with their own number: `3`, `class3`, `LABEL_3`.
    """
    if isinstance(names, dict):
        try:
            numbered = {int(key): name for key, name in names.items()}
        except (TypeError, ValueError):
            return ()
        names = [numbered[k] for k in sorted(numbered)] if sorted(numbered) == list(range(len(numbered))) else ()
    texts = tuple(map(str, names)) if isinstance(names, (list, tuple)) else ()
    return () if all(text.endswith(str(k)) for k, text in enumerate(texts)) else texts


@dataclass(frozen=True, kw_only=True)
class Inspection(Purpose):
    """The facts on a model that Dyno needs before it lists trials.

    `size` [h, w] is the model's default, (0, 0) without an image; with `fixed_size` its file takes no other, and with
    `size_guessed` the file has a free size and names no default. `batch` is the only batch that it takes (0: any) and
    `batch_reason` why; `usual_batch` is the batch of its example inputs or its file's metadata, `batches` the smallest,
    best and largest of an engine or a program. `inputs` are as `ModelSpec.inputs`, `shapes` as `Dims.shapes`,
    `declared` as `ModelSpec.outputs`.

    `outputs` is the number of classes of a classifier's scores (else 0), `flops` the operations of one image by size
    (empty if uncountable). `parameters` belong to the module or file, `channels` and `precision` to a file; `signature`
    has the shapes of a file's inputs and outputs. With `preprocess_guessed`, images are normalised by an unknown mean
    and standard deviation; `largest_pixel` is 1 or 255 if the file normalises them itself. `unsupported_images`
    describes a preparation of images that Dyno lacks, and `unchecked_images` why it couldn't be checked ("": neither).
    `files` has the sha256 of each file read by the user's code while it made the network.
    """

    size: tuple[int, int] = (0, 0)
    fixed_size: bool = False
    size_guessed: bool = False
    batch: int = 0
    batch_reason: str = ""
    usual_batch: int | None = None
    batches: tuple[int, int, int] | None = None
    shapes: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    declared: tuple[Tensor, ...] = ()
    outputs: int = 0
    flops: dict[str, int] = field(default_factory=dict)
    parameters: int | None = None
    channels: int | None = None
    precision: str = ""
    signature: tuple[tuple[tuple[int | str, ...], ...], ...] = ()
    preprocess_guessed: bool = False
    largest_pixel: float = 0.0
    unsupported_images: str = ""
    unchecked_images: str = ""
    files: dict[str, str] = field(default_factory=dict)
