"""Model sources, named before a model's colon: an object in a module of this package for each kind of source."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dyno.worker import plugins
from dyno.worker.extras import load_library
from dyno.worker.inspection import Purpose, order_class_names
from dyno.worker.nets import local_code, random_weights
from dyno.worker.spec import Dims, ModelSpec, Preprocess, UserError

ImageConfig = tuple[Preprocess | None, tuple[int, int] | None]  # preparation, height and width; None where unknown


@dataclass(frozen=True)
class BuildCode:
    """Code that builds a network without Dyno: the distributions that it needs, imports, constants, and the body of a
    function that returns the network."""

    needs: tuple[str, ...]
    imports: str
    body: str
    constants: Mapping[str, Any] = field(default_factory=dict)


class ModelSource(ABC):
    """One kind of model source, `name` before the colon; methods get what is behind it as `rest`.

    `form` is how users write one, and `library` the distribution that has such networks by their names. Networks that
    `takes_image` take one image and nothing else, unless the user describes other inputs. With `says_purpose` a network
    itself says what it is for; with `stores_preprocess` what is stored may say how images are normalised.
    """

    name: str = ""
    form: str = ""
    library: str = ""
    takes_image: bool = False
    says_purpose: bool = False
    stores_preprocess: bool = False

    @abstractmethod
    def build(self, model: ModelSpec, rest: str, dims: Dims | None, state: Mapping[str, Any] | None) -> Any:
        """Build the module, into which `state` is loaded afterwards if the model names weights."""

    def init_random(self, model: ModelSpec, rest: str, module: Any, dims: Dims | None) -> None:
        """Give a network without weights, in place, branches that contribute and batch norm statistics of noise."""
        if size := self.read_image_config(model, rest)[1]:
            torch = load_library("torch")
            random_weights.undo_zero_init(torch, module)
            random_weights.init_batch_norm(torch, module, model.channels, size)

    def has_weights(self, rest: str) -> bool:
        """Return whether the source brings its weights."""
        return False

    def read_image_config(self, model: ModelSpec, rest: str) -> ImageConfig:
        """Return how the network's images are prepared, and their size, without a download."""
        return None, None

    def check_images(self, model: ModelSpec, rest: str, letterboxed: bool) -> tuple[str, str]:
        """Return how the library prepares images where Dyno can't do it alike, and why that wasn't checked; of
        letterboxed ones, what the library does with them instead."""
        return "", ""

    def make_examples(self, model: ModelSpec, rest: str) -> Any:
        """Return example inputs; None where the source has none."""
        return None

    def read_purpose(self, model: ModelSpec, rest: str, module: Any) -> Purpose:
        """Return the task, the classes and the images of the module."""
        return Purpose(class_names=name_classes(module))

    def write_code(
        self, model: ModelSpec, rest: str, network: Any, dims: Dims, classes: int | None
    ) -> BuildCode | None:
        """Return the code that builds the network without its weights; None where its file is stored instead."""
        return None


@cache
def list_sources() -> dict[str, ModelSource]:
    """Return every kind of source by its name."""
    return plugins.list_declared(sys.modules[__package__], ModelSource)  # type: ignore[type-abstract]


def name_classes(module: Any) -> tuple[str, ...]:
    """Return the class names that a network of transformers or ultralytics carries; () where it has none."""
    if type(module).__module__.startswith("ultralytics."):
        return order_class_names(getattr(module, "names", ()))
    return order_class_names(getattr(getattr(module, "config", None), "id2label", ()))


def check_unchanged(path: str, sha256: str, what: str) -> None:
    """Raise a `UserError` for a file whose content isn't what the study was planned with."""
    if sha256 and Path(path).is_file() and local_code.hash_file(path) != sha256:
        raise UserError(f"{what} {path} changed since the study was planned; run the same command again")
