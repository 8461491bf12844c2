"""A damaged cache of decoded images is made again, and a damaged index of their hashes is not believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.data import cache
from dyno.worker.spec import DataSpec

Make = Callable[..., DataSpec]


@pytest.mark.parametrize("changed", [{"files": 3}, {"classes": None}, {"bytes": "many"}, {"splits": []}])
def test_a_description_of_other_types_is_written_anew(
    yolo: Callable[..., Path], make: Make, changed: dict[str, Any]
) -> None:
    folder = yolo()
    data = make(folder)
    about = Path(data.folder, "meta.json")
    whole = json.loads(about.read_text())
    about.write_text(json.dumps({**whole, **changed}))
    assert make(folder) == data
    assert {**json.loads(about.read_text()), "decode_s": 0} == {**whole, "decode_s": 0}


@pytest.mark.parametrize(
    "other", [np.array([99, 0]), np.array(["a"]), np.array(1), np.zeros(6, np.float32), b"no array"]
)
@pytest.mark.parametrize("name", ["labels.npy", "test.npy"])
def test_labels_and_places_that_are_none_are_written_anew(
    yolo: Callable[..., Path], make: Make, name: str, other: Any
) -> None:
    folder = yolo()
    data = make(folder)
    path = Path(data.folder, name)
    whole = path.read_bytes()
    path.write_bytes(other) if isinstance(other, bytes) else np.save(path, other)
    assert make(folder) == data and path.read_bytes() == whole


@pytest.mark.parametrize("damaged", [{"a.jpg": [1, 2, 3, 4, "5", 6]}, {"a.jpg": 5}, {"a.jpg": None}, ["a.jpg"], 5])
def test_an_index_of_other_types_is_made_anew(tmp_path: Path, damaged: Any) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"content")
    first = cache.content_hashes([path], tmp_path, tmp_path)
    (index,) = (tmp_path / "hashes").glob("*.json")
    index.write_text(json.dumps(damaged).replace("a.jpg", str(path)))
    assert cache.content_hashes([path], tmp_path, tmp_path) == first
    assert list(json.loads(index.read_text())) == [str(path)]
