"""Which images of a folder count, and messages about other files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dyno import data as dyno_data
from dyno.worker.spec import DataSpec, Preprocess, UserError

NAMES = [f"img_{k:03}.jpg" for k in range(6)]


def fill(folder: Path, names: list[str] = NAMES, shade: int = 0) -> Path:
    """Write an image of each name, all different."""
    for k, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (20 * k, shade, 0)).save(folder / name)
    return folder


def beside(folder: Path, suffix: str, text: str) -> None:
    for name in NAMES:
        (folder / name).with_suffix(suffix).write_text(text.format(name))


# Label files of other tools next to images, keyed by the expected message.
OTHERS: dict[str, Callable[[Path], object]] = {
    "img_000.xml (Pascal VOC's or CVAT's format); convert": lambda d: beside(d, ".xml", "<annotation></annotation>"),
    "img_000.json (labels of one image); convert": lambda d: beside(d, ".json", '{{"imagePath": "{}"}}'),
    "img_000.txt (a text for each image); write": lambda d: beside(d, ".txt", "cat"),
    "annotations.xml (Pascal VOC's or CVAT's format)": lambda d: (d / "annotations.xml").write_text(
        f"<?xml version='1.0'?>\n<annotations><image name='{NAMES[0]}'/></annotations>"
    ),
    "_annotations.createml.json (CreateML's format)": lambda d: (d / "_annotations.createml.json").write_text(
        json.dumps([{"image": name, "annotations": []} for name in NAMES])
    ),
    "_annotations.csv (a table of boxes); convert": lambda d: (d / "_annotations.csv").write_text(
        "filename,width,height,class,xmin,ymin,xmax,ymax\n" + "".join(f"{n},40,30,a,1,1,9,9\n" for n in NAMES)
    ),
    "metadata.jsonl (a table that names the images)": lambda d: (d / "metadata.jsonl").write_text(
        "".join(json.dumps({"file_name": name, "label": 1}) + "\n" for name in NAMES)
    ),
    "val.txt (a table that names the images); write": lambda d: (d / "val.txt").write_text(
        "".join(f"{name} {k}\n" for k, name in enumerate(NAMES))
    ),
    "ILSVRC2012_validation_ground_truth.txt (a label for each image); sort ImageNet's images": lambda d: (
        d / "ILSVRC2012_validation_ground_truth.txt"
    ).write_text("490\n361\n171\n822\n297\n482\n"),
    "imagelabels.mat (labels in .mat)": lambda d: (d / "imagelabels.mat").write_bytes(b"MATLAB 5.0"),
}


@pytest.mark.parametrize("place", ["", "valid", "images"])
@pytest.mark.parametrize("named", OTHERS)
def test_unreadable_label_files_are_named(tmp_path: Path, named: str, place: str) -> None:
    """They are read neither as plain images nor as a class."""
    folder = tmp_path / "d"
    OTHERS[named](fill(folder / place))
    if place == "valid":
        fill(folder / "train", shade=9)
    with pytest.raises(UserError, match="holds labels that can't be read there") as e:
        dyno_data.format_of(folder)
    assert named in str(e.value) and "a folder of the images alone" in str(e.value) and "\n" not in str(e.value)


def test_other_files_are_not_taken_for_labels(tmp_path: Path) -> None:
    folder = fill(tmp_path / "d")
    (folder / "README.txt").write_text("img_001.jpg is the best")
    (folder / "all.txt").write_text("\n".join(NAMES))
    (folder / "notes.txt").write_text("hello\nworld")
    (folder / "settings.json").write_text('{"a": [1, 2]}')
    for name in (".DS_Store", "Thumbs.db", ".labels.csv"):
        (folder / name).write_bytes(b"img_000.jpg,1")
    (folder / "__MACOSX").mkdir()
    assert dyno_data.format_of(folder).name == "images"


def test_class_folders_are_found_among_stray_files(tmp_path: Path) -> None:
    """Folder names are the labels; a label table is mentioned, and system folders are no classes."""
    folder = tmp_path / "d"
    for k, name in enumerate(("cat", "dog")):
        fill(folder / name, shade=40 * k + 9)
        fill(folder / name / "@eaDir", ["thumb.jpg"], shade=200 + k)
    (folder / "__MACOSX").mkdir()
    (folder / "noisy.csv").write_text("path,noisy\n" + "".join(f"cat/{name},dog\n" for name in NAMES))
    data = dyno_data.load(folder, tmp_path / "cache", (16, 20), Preprocess(resize=0))
    about = dyno_data.read_meta(data)
    assert (about["classes"], data.count) == (["cat", "dog"], 12)
    assert about["warnings"] == ["labels are the folders' names; noisy.csv (a table that names the images) is not read"]


@pytest.mark.parametrize("names", [("Train", "Test"), ("Training", "Testing"), ("TRAIN", "Validation")])
def test_split_names_in_any_case_are_not_classes(tmp_path: Path, names: tuple[str, str]) -> None:
    for part, shade in zip(names, (0, 100), strict=True):
        for k, name in enumerate(("cat", "dog")):
            fill(tmp_path / "d" / part / name, shade=shade + k)
    about = dyno_data.read_meta(dyno_data.load(tmp_path / "d", tmp_path / "cache", (16, 20), Preprocess()))
    assert (about["classes"], about["splits"]) == (["cat", "dog"], {"test": 12, "calibration": 12})


def test_split_like_folders_are_refused_and_similar_class_names_are_not(tmp_path: Path) -> None:
    for names, refused in ((("training_set", "test_set"), True), (("seg_train", "seg_test"), True),
                           (("test_set", "trains"), False)):  # fmt: skip
        folder = tmp_path / names[0]
        for k, part in enumerate(names):
            fill(folder / part / "inner", shade=k)
        if refused:
            with pytest.raises(UserError, match=r"which hold class folders and seem to be parts of a data set; name"):
                dyno_data.load(folder, tmp_path / "cache", (16, 20), Preprocess())
        else:
            assert dyno_data.load(folder, tmp_path / "cache", (16, 20), Preprocess()).count == 12


def test_numbered_folders_sorted_as_text_have_a_warning(tmp_path: Path) -> None:
    def warnings(*names: str) -> list[str]:
        folder = tmp_path / "-".join(names)
        for k, name in enumerate(names):
            fill(folder / name, NAMES[:2], shade=30 * k)
        return dyno_data.read_meta(dyno_data.load(folder, tmp_path / "cache", (16, 20), Preprocess())).get(
            "warnings", []
        )

    (line,) = warnings("0", "2", "10")
    assert "so class 1 is '10'; for a network that was trained in the order of their numbers" in line
    assert warnings("00", "02", "10") == warnings("0", "1", "2") == warnings("a", "10", "2") == []


def test_parts_of_a_data_set_are_not_classes(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    for k, part in enumerate(("test", "train", "valid")):
        fill(folder / part, shade=k)
    with pytest.raises(UserError, match="has test, train, valid, which are parts of a data set, not classes"):
        dyno_data.format_of(folder)
    for part, shade in (("train", 100), ("valid", 200)):
        for k, name in enumerate(("cat", "dog")):
            fill(folder / part / name, shade=shade + k)
    shutil.rmtree(folder / "test")
    data = dyno_data.load(folder, tmp_path / "cache", (16, 20), Preprocess(resize=0))
    assert dyno_data.read_meta(data)["splits"] == {"test": 12, "calibration": 12}
    assert np.load(Path(data.folder, "labels.npy"))[:12].tolist() == [0] * 6 + [1] * 6


@pytest.mark.parametrize(
    "parts", ["image mask", "JPEGImages SegmentationClass", "train trainannot", "test_images test_masks", "img gt"]
)
def test_image_and_mask_folders_are_not_classes(parts: str, tmp_path: Path) -> None:
    for part in parts.split():
        fill(tmp_path / "d" / part)
    with pytest.raises(UserError, match=r"which are parts of a data set, .* such as \S*(images?|Images|img|train), to"):
        dyno_data.format_of(tmp_path / "d")
    fill(tmp_path / "d" / "unmasked")
    assert dyno_data.format_of(tmp_path / "d").name == "classes", "one of the names is a class's"


def test_images_in_unsupported_formats_are_counted(tmp_path: Path) -> None:
    def load(folder: Path) -> DataSpec:
        return dyno_data.load(folder, tmp_path / "cache", (16, 20), Preprocess(resize=0))

    folder, picture = tmp_path / "photos", Image.new("RGB", (40, 30), "orange")
    for k, name in enumerate("aabb"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (60 * k, 0, 0)).save(folder / name / f"{k}.jpg")
    before = load(folder)
    assert not dyno_data.read_meta(before).get("warnings")
    picture.save(folder / "a" / "moving.gif")
    (folder / "b" / "phone.HEIC").write_bytes(b"x")
    picture.save(folder / "b" / "one.jfif", format="JPEG")
    data = load(folder)
    assert data.count == before.count + 1
    (warning,) = dyno_data.read_meta(data)["warnings"]
    assert warning == "2 images are left out: unsupported formats (.gif, .heic), e.g. a/moving.gif"
    picture.save(folder / "loose.jpg")
    assert dyno_data.read_meta(load(folder))["warnings"][1:] == [
        "1 image is left out: it is in no class folder, e.g. loose.jpg"
    ]
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(folder / "a" / "0.jpg", plain)
    picture.save(plain / "moving.gif")
    assert dyno_data.read_meta(load(plain))["warnings"][0].startswith("1 image is left out")


def test_linked_folders_and_images_keep_their_own_names(tmp_path: Path) -> None:
    """As in the hub's cache, with linked classes: another folder, the same folder, and a parent folder."""
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
    data = dyno_data.load(tmp_path / "data", tmp_path / "cache", (16, 20), Preprocess(resize=0))
    assert (data.name, data.count, dyno_data.read_meta(data)["classes"]) == ("data", 4, ["a", "b"])


def test_photograph_names_are_stored_with_their_pixels(tmp_path: Path) -> None:
    fill(tmp_path / "photos", [f"{kind}/{name}" for kind in ("cat", "dog") for name in NAMES[:3]])
    (tmp_path / "photos/cat/bad.jpg").write_bytes(b"none")
    data = dyno_data.load(
        tmp_path / "photos", tmp_path / "cache", (30, 40), Preprocess(resize=0.0), on_unreadable="skip"
    )
    names = json.loads(Path(data.folder, "names.json").read_text())["names"]
    pixels, labels = (np.load(Path(data.folder, f"{kind}.npy")) for kind in ("images", "labels"))
    assert len(names) == len(pixels) == 6 and "cat/bad.jpg" not in names
    for name, image, label in zip(names, pixels, labels, strict=True):
        shade = np.asarray(Image.open(tmp_path / "photos" / name))[0, 0, 0]
        assert abs(int(image[0, 0, 0]) - int(shade)) < 4 and name.startswith(("cat", "dog")[label])
