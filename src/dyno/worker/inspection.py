"""The result of inspecting a model before anything is planned: its inputs, outputs, parameters, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dyno.worker.facts.json_values import Sparse
from dyno.worker.spec import InputSpec, Preprocess, Tensor

METADATA_FILE = "metadata.yaml"  # written by ultralytics into its export folders


@dataclass(frozen=True, kw_only=True)
class Purpose(Sparse):
    """A network's task, as far as its file, its library or the user names it.

    `task` is "" and `classes` None where unknown; `keypoints` are how many points a pose has and the values of
    each. `class_names` are () where they are unknown or only numbers. `inputs` are those that Dyno wrote into a file,
    `stride` is what the image's sides must be multiples of.
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

    Placeholders end in their own number, as `3`, `class3` and `LABEL_3` do.
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
    """A model's facts that Dyno needs before it lists trials.

    `size` [h, w] is the model's own, (0, 0) without an image; `fixed_size` says that its file takes no other, and
    `size_guessed` that the file leaves it free and names none.
    `batch` is the one that it takes (0: any) and `batch_reason` why, `usual_batch` that of its example inputs or of
    its file's metadata, and `batches` an engine's or a program's smallest, best and largest. `inputs` are as
    `ModelSpec.inputs`. `shapes` are as `Dims.shapes`, and `declared` as `ModelSpec.outputs`.
    `outputs` is how many classes a classifier's scores are of (else 0), `flops` the operations of one image by size
    (nothing where they can't be counted), `parameters` a module's or a file's, `channels` and `precision` a file's, and
    `signature` the shapes of the inputs and outputs of a file. `preprocess_guessed` says that images are normalised,
    and nothing says by which mean and standard deviation. `unsupported_images` says how the model wants its images
    prepared where Dyno can't, and `unchecked_images` why that couldn't be checked ("" elsewhere). `files` has the
    sha256 of each file that the user's code read while it made the network.
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
    unsupported_images: str = ""
    unchecked_images: str = ""
    files: dict[str, str] = field(default_factory=dict)
