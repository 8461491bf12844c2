"""Letterboxed pixels are those of ultralytics' LetterBox; the geometry serves both directions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dyno.data.decode import Transform
from dyno.worker.inputs.specs import geometry
from dyno.worker.spec import Preprocess

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


def test_grey_lies_evenly_around(tmp_path: Path) -> None:
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
