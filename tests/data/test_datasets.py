"""Decoded data sets: right pixels, labels and splits, found again by content; errors give one line."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dyno import data as dyno_data
from dyno.data import cache as store
from dyno.data import photos
from dyno.data.decode import Transform
from dyno.data.photos import stratified_order
from dyno.worker.nets import models
from dyno.worker.spec import DataSpec, ModelSpec, Preprocess, UserError
from refusals import refuses

STRAIGHT = Preprocess(resize=0)


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Return a smooth random image, which JPEG keeps recognisable."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def fill(folder: Path, classes: dict[str, int], suffix: str = ".jpg", seed: int = 0) -> Path:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            seed += 1
            picture(seed).save(folder / name / f"{i:03}{suffix}")
    return folder


def arrays(data: DataSpec) -> dict[str, np.ndarray]:
    return {path.stem: np.load(path) for path in Path(data.folder).glob("*.npy")}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def made(folder: Path, size: tuple[int, int] = (16, 20), preprocess: Preprocess = STRAIGHT, **more) -> DataSpec:
        return dyno_data.load(folder, tmp_path / "cache", size, preprocess, **more)

    return made


def test_labels_follow_the_folders_in_any_script(tmp_path: Path, make: Any) -> None:
    folder = fill(tmp_path / "фото", {"яблоко": 3, "груша": 2, "猫": 4, "apple": 5, "Zebra": 1})
    data = make(folder, calibration=0)
    found, about = arrays(data), dyno_data.read_meta(data)
    assert about["classes"] == ["Zebra", "apple", "груша", "яблоко", "猫"]
    assert (data.name, data.split, data.count, about["count"], about["size"]) == ("фото", "test", 15, 15, [16, 20])
    assert np.bincount(found["labels"]).tolist() == [1, 5, 2, 3, 4]
    assert found["images"].shape == (15, 3, 16, 20)
    assert found["images"].dtype == np.uint8
    assert sorted(found["test"]) == list(range(15))
    assert "calibration" not in found


def test_test_images_are_set_aside_only_on_request(tmp_path: Path, make: Any) -> None:
    folder = fill(tmp_path / "d", {"a": 20, "b": 20, "c": 1})
    data, every = make(folder, set_aside=True), make(folder)
    found, whole = arrays(data), arrays(every)
    assert (every.count, "calibration" in whole, "set_aside" in dyno_data.read_meta(every)) == (41, False, False)
    assert (data.count, dyno_data.read_meta(data)["set_aside"]) == (33, 8)
    assert np.array_equal(found["images"], whole["images"]), "a row is the same photograph, so that runs can be paired"
    assert dyno_data.read_meta(data)["photographs"] == dyno_data.read_meta(every)["photographs"]
    assert data.sha256 != every.sha256
    assert len(found["calibration"]) == 8
    assert not set(found["calibration"]) & set(found["test"])
    assert sorted([*found["calibration"], *found["test"]]) == list(range(41))
    assert np.bincount(found["labels"][found["calibration"]]).tolist() == [4, 4]
    assert make(folder, calibration=3, set_aside=True).count == 38
    assert make(folder, calibration=fill(tmp_path / "other", {"x": 3}, seed=100), set_aside=True).count == 41


def test_split_layout(tmp_path: Path, make: Any) -> None:
    folder = tmp_path / "d"
    fill(folder / "train", {"a": 12, "b": 4, "only in train": 2})
    fill(folder / "val", {"a": 3, "b": 3}, seed=100)
    data = make(folder, calibration=8)
    found = arrays(data)
    assert dyno_data.read_meta(data)["classes"] == ["a", "b", "only in train"]
    assert (data.count, len(found["calibration"]), len(found["images"])) == (6, 8, 14)
    assert np.bincount(found["labels"][found["calibration"]])[0] >= 5
    fill(folder / "test", {"b": 2}, seed=200)
    assert make(folder).count == 2, "test/ goes before val/"
    fill(folder / "test", {"strange": 1}, seed=300)
    refuses(r"'strange' is in .*test but not in .*train", make, folder)
    shutil.rmtree(folder / "test")
    shutil.rmtree(folder / "val")
    refuses("neither test/ nor val/", make, folder)


def test_training_images_are_decoded_on_request(tmp_path: Path, make: Any) -> None:
    folder = tmp_path / "d"
    fill(folder / "train", {"a": 12, "b": 4})
    fill(folder / "test", {"a": 3, "b": 3}, seed=100)
    shutil.copy(folder / "test/a/001.jpg", folder / "train/a/copy of a test image.jpg")
    found = arrays(make(folder, calibration=6, train=True))
    assert (len(found["test"]), len(found["train"]), len(found["calibration"]), len(found["images"])) == (6, 16, 6, 22)
    assert not set(found["test"]) & set(found["train"])
    assert set(found["calibration"]) < set(found["train"])
    assert np.bincount(found["labels"][found["train"]]).tolist() == [12, 4]
    assert sorted(found["labels"][found["train"][:4]]) == [0, 0, 0, 1], "any beginning holds the classes in proportion"
    without = arrays(make(folder, calibration=6))
    assert "train" not in without
    assert len(without["images"]) == 12
    found = arrays(make(folder, calibration=fill(tmp_path / "other", {"": 5}, seed=50), train=True))
    assert (len(found["train"]), len(found["calibration"])) == (16, 5)
    assert not set(found["calibration"]) & set(found["train"])
    refuses("has no train/; put the training images there", make, folder / "train", train=True)


def test_calibration_excludes_test_images(tmp_path: Path, make: Any) -> None:
    folder = fill(tmp_path / "d", {"a": 4, "b": 4})
    other = fill(tmp_path / "other", {"": 5}, seed=50)
    shutil.copy(folder / "a/001.jpg", other / "copy of a test image.jpg")
    found = arrays(make(folder, calibration=other))
    assert (len(found["test"]), len(found["calibration"])) == (8, 5)
    assert set(found["labels"][found["calibration"]]) == {-1}
    refuses("every calibration image is also a test image", make, folder, calibration=folder)
    refuses("no calibration folder", make, folder, calibration=tmp_path / "none")


def test_a_whole_disk_is_not_searched_for_images(tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, disk = fill(tmp_path / "d", {"a": 4}), fill(tmp_path / "disk", {"": 2}, seed=50)
    for number in range(21):
        (disk / f"{number}.so").touch()
    assert len(arrays(make(folder, calibration=disk))["calibration"]) == 2
    monkeypatch.setattr(photos, "MAX_OTHER_FILES", 20)
    refuses("disk holds more than 20 files that are not images; give the folder of", make, folder, calibration=disk)
    monkeypatch.setattr(photos, "MAX_OTHERS_PER_IMAGE", 11)  # labels beside images
    assert len(arrays(make(folder, calibration=disk))["calibration"]) == 2


@pytest.mark.parametrize(
    ("width", "height", "crop", "resize"),
    [(500, 375, 224, 256 / 224), (333, 500, 224, 256 / 224), (100, 80, 96, 1.0), (64, 64, 64, 1.0), (31, 97, 24, 1.3)],
)
def test_pixels_match_torchvision(tmp_path: Path, width: int, height: int, crop: int, resize: float) -> None:
    from torchvision import transforms

    path = tmp_path / "a.jpg"
    picture(1, width, height).save(path)
    theirs = transforms.Compose([transforms.Resize(int(crop * resize + 1e-6)), transforms.CenterCrop(crop)])
    with Image.open(path) as image:
        wanted = np.asarray(theirs(image.convert("RGB"))).transpose(2, 0, 1)
    assert np.array_equal(Transform((crop, crop), Preprocess(resize=resize), 3).read(path), wanted)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet50", "inception_v3", "dm_nfnet_f0"])
def test_pixels_match_timm(name: str) -> None:
    data = pytest.importorskip("timm.data")
    source = ModelSpec(name=name, source=f"timm:{name}")
    config = pytest.importorskip("timm").get_pretrained_cfg(name).to_dict()
    prepare = data.create_transform(**data.resolve_data_config(pretrained_cfg=config))
    preprocess, size = models.preprocess(source), models.image_size(source)
    assert size is not None
    mean, std = (np.reshape(values, (3, 1, 1)) for values in (preprocess.mean, preprocess.std))
    for shape in ((533, 400), (301, 477)):
        image = picture(1, *shape)
        mine = (Transform(size, preprocess, 3).pixels(image) / 255 - mean) / std
        assert np.abs(mine - prepare(image).numpy()).max() < 1e-5


@pytest.mark.parametrize("size", [(20, 50), (50, 20), (33, 33)])
@pytest.mark.parametrize("resize", [0.0, 1.0, 1.143])
def test_every_crop_ratio_is_supported(size: tuple[int, int], resize: float) -> None:
    for width, height in ((60, 41), (41, 60), (7, 300)):
        white = Image.new("RGB", (width, height), "white")
        pixels = Transform(size, Preprocess(resize=resize), 3).pixels(white)
        assert pixels.shape == (3, *size)
        assert pixels.min() == 255, "nothing is padded with black"


def test_formats_and_colours(tmp_path: Path, make: Any) -> None:
    (tmp_path / "d/a").mkdir(parents=True)
    red = Image.new("RGB", (30, 30), (200, 30, 30))
    for suffix in ("JPEG", "png", "bmp", "webp", "tiff", "ppm"):
        red.save(tmp_path / f"d/a/{suffix}.{suffix}")
    red.convert("CMYK").save(tmp_path / "d/a/cmyk.jpg")
    red.convert("RGBA").save(tmp_path / "d/a/rgba.png")
    red.convert("P").save(tmp_path / "d/a/palette.png", transparency=b"\x80" * 256)
    (tmp_path / "d/a/.hidden.jpg").write_bytes(b"resource fork")
    (tmp_path / "d/a/notes.txt").write_text("not an image")
    images = arrays(make(tmp_path / "d", calibration=0))["images"]
    assert len(images) == 9
    assert np.abs(images.astype(int) - np.array([200, 30, 30]).reshape(1, 3, 1, 1)).max() <= 12


def test_grey_images(tmp_path: Path) -> None:
    Image.fromarray(np.full((20, 20), 0x8040, np.uint16)).save(tmp_path / "deep.png")
    Image.new("RGB", (20, 20), (0, 255, 0)).save(tmp_path / "green.png")
    Image.fromarray(np.ones((20, 20), np.float32)).save(tmp_path / "float.tiff")
    grey, colour = Transform((8, 8), STRAIGHT, 1), Transform((8, 8), STRAIGHT, 3)
    assert np.unique(colour.read(tmp_path / "deep.png")).tolist() == [0x80]
    assert np.unique(grey.read(tmp_path / "green.png")).tolist() == [150]
    assert grey.read(tmp_path / "green.png").shape == (1, 8, 8)
    assert "no known range" in grey.read(tmp_path / "float.tiff")


def spoil(folder: Path) -> None:
    """Truncate a JPEG, write text into another, and empty a third."""
    whole = (folder / "a/002.jpg").read_bytes()
    (folder / "a/002.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "b/001.jpg").write_text("<html>not found</html>")
    (folder / "b/002.jpg").write_bytes(b"")


def test_unreadable_images_are_refused_or_skipped(tmp_path: Path, make: Any) -> None:
    folder = fill(tmp_path / "d", {"a": 5, "b": 5})
    whole = arrays(make(folder, calibration=0))
    spoil(folder)
    for _ in range(2):
        refuses(r"^3 of 10 images can't be read: a/002.jpg \(.*[Tt]runcated.*b/001.jpg", make, folder, calibration=0)
        data = make(folder, calibration=0, on_unreadable="skip")
    found, about = arrays(data), dyno_data.read_meta(data)
    assert [line.split(" ")[0] for line in about["unreadable"]] == ["a/002.jpg", "b/001.jpg", "b/002.jpg"]
    assert (data.count, about["count"], len(found["images"])) == (7, 7, 7)
    kept = [0, 1, 3, 4, 5, 8, 9]
    assert np.array_equal(found["images"], whole["images"][kept])
    assert np.array_equal(found["labels"], whole["labels"][kept])
    assert sorted(found["test"]) == list(range(7))
    for path in (folder / "b").iterdir():
        path.write_bytes(b"gone")
    refuses("no test image of class 'b' can be read", make, folder, on_unreadable="skip")


def test_second_call_decodes_nothing(tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "d", {"a": 5, "b": 5})
    seen: list[tuple[int, int]] = []
    first = make(folder, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, 10) for i in range(10)]
    monkeypatch.setattr(Transform, "read", lambda *_: pytest.fail("decoded again"))
    assert make(folder) == first
    moved = folder.rename(tmp_path / "renamed")
    assert (make(moved).folder, make(moved).name) == (first.folder, "renamed"), "the same content is found elsewhere"


def test_changes_that_affect_pixels_make_another_data_set(tmp_path: Path, make: Any) -> None:
    folder = fill(tmp_path / "d", {"a": 5, "b": 5})
    first = make(folder)
    path, old = folder / "a/003.jpg", (folder / "a/003.jpg").stat()
    content = bytearray(path.read_bytes())
    content[-40] ^= 0x55
    path.write_bytes(content)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    changed = make(folder)
    assert changed.folder != first.folder, "same name, size and time of change, other content"
    others = [make(folder, size=(8, 8)), make(folder, channels=1), make(folder, preprocess=Preprocess(resize=1.2))]
    others.append(make(folder, preprocess=Preprocess(resize=0, interpolation="bicubic")))
    assert len({data.folder for data in [first, changed, *others]}) == 6
    assert len({data.sha256 for data in [first, *others]}) == 5
    assert len({dyno_data.read_meta(data)["photographs"] for data in [changed, *others]}) == 1, "the same photographs"
    assert dyno_data.read_meta(changed)["photographs"] != dyno_data.read_meta(first)["photographs"]
    assert make(folder, preprocess=Preprocess(mean=(0.0,), resize=0)) == changed, "the mean changes no pixel"


def test_known_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "a.jpg").write_bytes(b"content")
    monkeypatch.setattr(store, "UNSURE_NS", -(10**18))
    first = store.hash_contents([path, tmp_path / "none.jpg"], tmp_path, tmp_path)
    assert first == ["ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73", ""]
    with monkeypatch.context() as patched:
        patched.setattr(store.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
        assert store.hash_contents([path], tmp_path, tmp_path) == first[:1]
    path.write_bytes(b"another")
    os.utime(path, ns=(0, 0))  # else a coarse file clock may give the same time
    assert store.hash_contents([path], tmp_path, tmp_path) != first[:1]


def test_two_processes_at_once(tmp_path: Path) -> None:
    folder = fill(tmp_path / "d", {"a": 40, "b": 40})
    code = (
        "import sys; from pathlib import Path; from dyno.data import load\n"
        "from dyno.worker.spec import Preprocess\n"
        "sys.stdin.readline()\n"
        "d = load(Path(sys.argv[1]), Path(sys.argv[2]), (64, 64), Preprocess())\n"
        "print(d.folder, d.sha256, d.count)"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=1200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1] != ""
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(
        [Path(said[0].split()[0]).name, "hashes"]
    )


def test_a_damaged_cache_is_rebuilt(tmp_path: Path, make: Any) -> None:
    folder = fill(tmp_path / "d", {"a": 5, "b": 5})
    data = make(folder)
    whole = arrays(data)
    images = Path(data.folder, "images.npy")
    images.write_bytes(images.read_bytes()[:-100])
    assert make(folder) == data
    assert np.array_equal(np.load(images), whole["images"])
    Path(data.folder, "meta.json").write_text("{")
    assert make(folder) == data


@pytest.mark.parametrize(
    ("classes", "line"),
    [
        (None, "no data folder"),
        ({}, "no class folders in"),
        ({"a": 0, "b": 0}, "no images in"),
        ({"a": 2, "пусто": 0, "z": 0}, r"class 'z' has no images in .* \(and 1 more\)"),
    ],
)
def test_bad_folders(tmp_path: Path, make: Any, classes: dict[str, int] | None, line: str) -> None:
    if classes is not None:
        (tmp_path / "d").mkdir()
        fill(tmp_path / "d", classes)
        if classes:
            (tmp_path / "d/loose.jpg").write_bytes(b"images beside the class folders are no class")
    refuses(line, make, tmp_path / "d")


def test_bad_arguments(tmp_path: Path, make: Any) -> None:
    folder = fill(tmp_path / "d", {"a": 2})
    for line, more in {
        "is not a folder": {"folder": folder / "a/000.jpg"},
        "unknown interpolation 'cubic'": {"preprocess": Preprocess(interpolation="cubic")},
        "less than the crop": {"preprocess": Preprocess(resize=0.5)},
        "can't become 0 x 8": {"size": (0, 8)},
        "4 channels": {"channels": 4},
        "can't be -1": {"calibration": -1},
    }.items():
        refuses(line, make, **{"folder": folder, **more})
    refuses("can't be shrunk to 7", dyno_data.prepare_digits, tmp_path, 7)


def test_full_disk_and_unwritable_cache(tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "d", {"a": 5})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store.rows, "write_rows", full)
        refuses(r"need 7 MB in .* the disk has too little room", make, folder, size=(700, 700))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["hashes"], "nothing half-made stays"
    refuses("the disk has too little room", make, fill(tmp_path / "many", {"a": 3}), size=(2_000_000, 2_000_000))
    (tmp_path / "file").write_text("in the way")
    refuses(r"image cache .* can't be written", dyno_data.load, folder, tmp_path / "file", (8, 8), STRAIGHT)


def test_abandoned_temporary_folders_are_removed(tmp_path: Path, make: Any) -> None:
    for name, age in ((".part-old", 8 * 24 * 3600), (".part-new", 24 * 3600)):
        (tmp_path / "cache" / name).mkdir(parents=True)
        then = (tmp_path / "cache" / name).stat().st_mtime - age
        os.utime(tmp_path / "cache" / name, (then, then))
    make(fill(tmp_path / "d", {"a": 5}))
    assert [path.name for path in (tmp_path / "cache").glob(".part-*")] == [".part-new"]


def test_names_are_shown_on_one_line(tmp_path: Path, make: Any) -> None:
    folder = fill(tmp_path / "d", {"a": 2})
    for name in (b"two\nlines.jpg", b"latin-\xe9.jpg"):
        Path(os.fsdecode(os.fsencode(folder / "a") + b"/" + name)).write_bytes(b"no image")
    with pytest.raises(UserError) as e:
        make(folder, calibration=0)
    assert r"two\nlines.jpg" in str(e.value)
    str(e.value).encode("utf-8")


def test_digits(tmp_path: Path) -> None:
    data = dyno_data.prepare_digits(tmp_path)
    found, about = arrays(data), json.loads(Path(data.folder, "meta.json").read_text())
    assert found["images"].shape == (1797, 1, 64, 64)
    assert (len(found["test"]), len(found["train"]), len(found["calibration"]), data.count) == (900, 897, 128, 900)
    assert not set(found["test"]) & set(found["train"])
    assert set(found["calibration"]) <= set(found["train"])
    for split in ("test", "train", "calibration"):
        share = np.bincount(found["labels"][found[split]]) / np.bincount(found["labels"]) * 1797
        assert np.allclose(share, len(found[split]), rtol=0.1), "classes keep their proportions"
    assert (found["images"].min(), found["images"].max(), about["classes"][3]) == (0, 255, "3")
    assert dyno_data.prepare_digits(tmp_path) == data
    assert dyno_data.prepare_digits(tmp_path, 32).folder != data.folder


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(0, 2**32), st.data())
def test_every_prefix_of_a_split_is_stratified(labels: list[int], seed: int, data: st.DataObject) -> None:
    order = stratified_order(np.array(labels), seed)
    assert sorted(order) == list(range(len(labels)))
    n = data.draw(st.integers(1, len(labels)))
    counts, taken = np.bincount(labels), np.bincount(np.array(labels)[order[:n]], minlength=max(labels) + 1)
    # Each class's share differs at most by the rounding of its count and of the threshold's.
    assert np.all(np.abs(taken - counts * n / len(labels)) <= 1 + counts * len(np.unique(labels)) / len(labels))
