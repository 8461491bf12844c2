"""Which images of a folder count, and what is said of the others."""

from __future__ import annotations

import shutil
from pathlib import Path

from PIL import Image

from dyno import datasets
from dyno.worker.spec import DataSpec, Preprocess


def test_images_of_formats_that_are_not_read_are_counted(tmp_path: Path) -> None:
    def load(folder: Path) -> DataSpec:
        return datasets.load(folder, tmp_path / "cache", (16, 20), Preprocess(resize=0))

    folder, picture = tmp_path / "photos", Image.new("RGB", (40, 30), "orange")
    for k, name in enumerate("aabb"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (60 * k, 0, 0)).save(folder / name / f"{k}.jpg")
    before = load(folder)
    assert not datasets.meta(before).get("warnings")
    picture.save(folder / "a" / "moving.gif")
    (folder / "b" / "phone.HEIC").write_bytes(b"x")
    picture.save(folder / "b" / "one.jfif", format="JPEG")
    data = load(folder)
    assert data.count == before.count + 1
    (warning,) = datasets.meta(data)["warnings"]
    assert warning == "2 images are left out, of formats that aren't read (.gif, .heic), e.g. a/moving.gif"
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(folder / "a" / "0.jpg", plain)
    picture.save(plain / "moving.gif")
    assert datasets.meta(load(plain))["warnings"][0].startswith("1 image is left out")


def test_linked_folders_and_images_count_under_their_own_names(tmp_path: Path) -> None:
    """As the hub's cache has them, with classes that are links to folders, one to the same folder, and one back."""
    blobs, folder = tmp_path / "blobs", tmp_path / "hub" / "photos"
    (folder / "a").mkdir(parents=True)
    for k in range(3):
        Image.new("RGB", (40, 30), (60 * k, 0, 0)).save(tmp_path / "one.png")
        blobs.mkdir(exist_ok=True)
        shutil.move(tmp_path / "one.png", blobs / f"{k}")
        (folder / "a" / f"{k}.png").symlink_to(blobs / f"{k}")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Image.new("RGB", (40, 30), "green").save(elsewhere / "green.png")
    (folder / "b").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    (tmp_path / "data").symlink_to(folder)
    data = datasets.load(tmp_path / "data", tmp_path / "cache", (16, 20), Preprocess(resize=0))
    assert (data.name, data.count, datasets.meta(data)["classes"]) == ("data", 4, ["a", "b"])
