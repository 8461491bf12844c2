"""Model sources, named before a model's colon: an object in this package for each kind."""

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

ImageConfig = tuple[Preprocess | None, tuple[int, int] | None]  # preprocessing, (height, width); None if unknown


@dataclass(frozen=True)
class BuildCode:
    """Code that builds a network without Dyno: needed distributions, imports, constants, and a function's body.

    The function returns the network.
    """

    needs: tuple[str, ...]
    imports: str
    body: str
    constants: Mapping[str, Any] = field(default_factory=dict)


class ModelSource(ABC):
    """One kind of model source, named `name` before the colon; methods get the text after it as `rest`.

    `form` is the user's notation, and `library` the distribution with such networks by name. With `takes_image`,
    networks take one image and nothing else, unless the user describes other inputs. With `says_purpose` the network
    knows its task. With `stores_preprocess` no library knows the normalisation of images: stored files may have it.
    """

    name: str = ""
    form: str = ""
    library: str = ""
    takes_image: bool = False
    says_purpose: bool = False
    stores_preprocess: bool = False

    @abstractmethod
    def build(self, model: ModelSpec, rest: str, dims: Dims | None, state: Mapping[str, Any] | None) -> Any:
        """Build the module; `state` is loaded into it afterwards if the model names weights."""

    def init_random(self, model: ModelSpec, rest: str, module: Any, dims: Dims | None) -> None:
        """Initialise a network without weights, in place: contributing branches, and batch norm statistics of noise."""
        if size := self.read_image_config(model, rest)[1]:
            torch = load_library("torch")
            random_weights.undo_zero_init(torch, module)
            random_weights.init_batch_norm(torch, module, model.channels, size)

    def has_weights(self, rest: str) -> bool:
        """Return whether the source includes weights."""
        return False

    def read_image_config(self, model: ModelSpec, rest: str) -> ImageConfig:
        """Return the preprocessing and the size of the network's images, without a download."""
        return None, None

    def check_images(self, model: ModelSpec, rest: str, is_letterboxed: bool) -> tuple[str, str]:
        """Return the library's preparation of images if Dyno can't match it, and why that wasn't checked; else "".

        For letterboxed images, the second text describes the library's method.
        """
        return "", ""

    def make_examples(self, model: ModelSpec, rest: str) -> Any:
        """Return example inputs; None if the source has none."""
        return None

    def read_purpose(self, model: ModelSpec, rest: str, module: Any) -> Purpose:
        """Return the module's task, classes and images."""
        return Purpose(class_names=name_classes(module))

    def write_code(
        self, model: ModelSpec, rest: str, network: Any, dims: Dims, classes: int | None
    ) -> BuildCode | None:
        """Return code that builds the network without its weights; None if its file is stored instead."""
        return None


@cache
def list_sources() -> dict[str, ModelSource]:
    """Return every kind of source by name."""
    return plugins.list_declared(sys.modules[__package__], ModelSource)  # type: ignore[type-abstract]


def name_classes(module: Any) -> tuple[str, ...]:
    """Return a transformers or ultralytics network's class names; () if it has none."""
    if type(module).__module__.startswith("ultralytics."):
        return order_class_names(getattr(module, "names", ()))
    return order_class_names(getattr(getattr(module, "config", None), "id2label", ()))


def check_unchanged(path: str, sha256: str, noun: str) -> None:
    """Raise a `UserError` for a file with other content than at the study's planning."""
    if sha256 and Path(path).is_file() and local_code.hash_file(path) != sha256:
        raise UserError(f"{noun} {path} changed since the study was planned; run the same command again")
