"""The 1,000 classes of ImageNet in their usual order: sorted by synset, as torchvision and timm number them."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from pathlib import Path

from dyno.worker.extras import install
from dyno.worker.spec import Unavailable

COUNT = 1000
SYNSET = re.compile(r"n\d{8}")


@lru_cache(maxsize=1)
def synsets() -> dict[str, str]:
    """Return the first name of each of the 1,000 classes by its synset, in order; raise `Unavailable` without timm.

    The lists that come with timm are read as files: importing timm would load torch for a table of names.
    """
    spec = importlib.util.find_spec("timm")
    folders = [Path(place) / "data" / "_info" for place in (spec.submodule_search_locations or [])] if spec else []
    lists = next((folder for folder in folders if (folder / "imagenet_synsets.txt").is_file()), None)
    if lists is None:
        raise Unavailable(f"ImageNet's list of classes comes with timm; {install('timm')}")
    lemmas = (lists / "imagenet_synset_to_lemma.txt").read_text(encoding="utf-8").splitlines()
    named = dict(line.split("\t", 1) for line in lemmas if "\t" in line)
    order = (lists / "imagenet_synsets.txt").read_text(encoding="utf-8").split()
    return {synset: named.get(synset, synset).split(",")[0] for synset in order}


def all_known(names: list[str]) -> bool:
    """Return whether these are all synsets of the standard classes; nothing is read unless they look like synsets."""
    return bool(names) and all(SYNSET.fullmatch(name) for name in names) and set(names) <= synsets().keys()


def readable(synset: str) -> str:
    """Return the class's name beside its synset: two of the 1,000 are called crane."""
    return f"{synsets()[synset]} ({synset})"
