"""Decoded pixels are those of other libraries, and a damaged cache of them is made again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dyno.data import cache
from dyno.data.decode import Transform
from dyno.worker.inputs.specs import geometry
from dyno.worker.spec import DataSpec, Preprocess

BOX = Preprocess(letterbox=True)


@pytest.mark.parametrize("size", [(320, 320), (256, 384), (640, 640), (33, 47)])
@pytest.mark.parametrize("shape", [(300, 500), (512, 200), (120, 90), (77, 33), (640, 640)])
def test_pixels_are_ultralytics_within_a_grey_level(
    tmp_path: Path, shape: tuple[int, int], size: tuple[int, int]
) -> None:
    from skimage import data
    from ultralytics.data.augment import LetterBox
    from ultralytics.utils.patches import imread

    path = tmp_path / "photo.jpg"
    Image.fromarray(data.astronaut()).resize(shape[::-1]).save(path, quality=95)
    theirs = LetterBox(size, auto=False, scaleup=True, center=True)(image=imread(str(path)))[..., ::-1].transpose(
        2, 0, 1
    )
    mine = Transform(size, BOX, 3, upright=True).read(path)
    assert isinstance(mine, np.ndarray)
    assert mine.shape == theirs.shape
    assert np.abs(mine.astype(int) - theirs).max() <= 1


def test_grey_lies_evenly_around() -> None:
    pixels = Transform((20, 30), BOX, 1).pixels(Image.new("L", (10, 10), 255))
    assert pixels.shape == (1, 20, 30)
    assert pixels[0, 0].tolist() == [114] * 5 + [255] * 20 + [114] * 5
    assert geometry(10, 10, 20, 30) == (2.0, 20, 20, 0, 5)
    assert geometry(1, 500, 64, 64)[1:3] == (1, 64), "no side is shrunk to nothing"


def test_a_turned_image_is_only_turned_when_asked(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg", exif=exif)
    for upright, size in ((True, (40, 20)), (False, (20, 40))):
        assert Transform((8, 8), BOX, 3, upright=upright).size_of(tmp_path / "a.jpg") == size
    (tmp_path / "b.jpg").write_text("no image")
    assert Transform((8, 8), BOX, 3).size_of(tmp_path / "b.jpg") is None


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
