"""A table of labels gives each image its class, with any column names, or is refused in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dyno import data as dyno_data
from dyno.worker.spec import DataSpec, Preprocess
from refusals import refuses

NAMES = [f"img_{k:03}" for k in range(6)]
COLOURS = ["red", "blue", "red", "green", "blue", "red"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of images in a subfolder, for a table next to it."""
    (tmp_path / "d/images").mkdir(parents=True)
    for k, name in enumerate(NAMES):
        Image.new("RGB", (40, 30), (20 * k, 0, 0)).save(tmp_path / f"d/images/{name}.jpg")
    return tmp_path / "d"


def load(path: Path, **more: Any) -> DataSpec:
    return dyno_data.load(path, path.parent / "cache", (16, 20), Preprocess(resize=0), **more)


def labels(data: DataSpec) -> dict[int, str]:
    """Return each image's class by image number, read from the red value."""
    found, pixels = np.load(Path(data.folder, "labels.npy")), np.load(Path(data.folder, "images.npy"))
    classes = dyno_data.read_meta(data)["classes"]
    return {round(image[0].mean() / 20): classes[label] for image, label in zip(pixels, found, strict=True)}


@pytest.mark.parametrize(
    ("head", "row"),
    [
        ("", "images/{name}.jpg,{colour}"),
        ("path,label", "images/{name}.jpg,{colour}"),
        ("filename,class", "{name}.jpg,{colour}"),
        (",File Name,width,Category", "7,{name}.jpg,40,{colour}"),
        ("id;label", "{name};{colour}"),
        ("id|label", "{name}|{colour}"),
        ("label\tImage-Path", "{colour}\timages\\{name}.jpg"),
        ("filename, red, green, blue", "{name}.jpg, {red}, {green}, {blue}"),
    ],
)
def test_columns_are_found(folder: Path, head: str, row: str) -> None:
    rows = []
    for name, colour in zip(NAMES, COLOURS, strict=True):
        marks = {other: int(other == colour) for other in ("red", "green", "blue")}
        rows.append(row.format(name=name, colour=colour, **marks))
    file = folder / ("labels.tsv" if "\t" in row else "labels.csv")
    file.write_text("\n".join([*([head] if head else []), *rows]), encoding="utf-8-sig")
    data = load(folder)
    assert labels(data) == dict(enumerate(COLOURS))
    order = ["red", "green", "blue"] if "{red}" in row else ["blue", "green", "red"]
    assert dyno_data.read_meta(data)["classes"] == order and dyno_data.read_meta(data)["label_source"] == "table"
    assert load(file).sha256 == data.sha256
    file.write_text(file.read_text(encoding="utf-8-sig"), encoding="utf-16")
    assert labels(load(folder)) == dict(enumerate(COLOURS))


@pytest.mark.parametrize("head", ["filename,label,label_id", "filename,class_name,class", "filename,label,category id"])
def test_numbers_next_to_names_are_class_numbers(folder: Path, head: str) -> None:
    number = {"red": 0, "green": 1, "blue": 3}
    rows = [f"{name}.jpg,{colour},{number[colour]}" for name, colour in zip(NAMES, COLOURS, strict=True)]
    (folder / "labels.csv").write_text("\n".join([head, *rows]))
    data = load(folder, outputs=5)
    assert labels(data) == dict(enumerate(COLOURS)), "the names remain"
    assert dyno_data.read_meta(data)["classes"] == ["red", "green", "2", "blue", "4"]
    rows[0] = rows[0].replace(",0", ",1")
    (folder / "labels.csv").write_text("\n".join([head, *rows]))
    assert "red" in dyno_data.read_meta(load(folder))["classes"] or head.startswith("filename,class_name"), (
        "another meaning"
    )


def test_image_folders_next_to_a_table_are_not_classes(folder: Path) -> None:
    """As in Kaggle's competitions: `train.csv` next to `train_images/` and `test_images/`."""
    (folder / "images").rename(folder / "train_images")
    (folder / "test_images").mkdir()
    Image.new("RGB", (40, 30)).save(folder / "test_images/other.jpg")
    rows = [f"{name}.jpg,{colour}" for name, colour in zip(NAMES, COLOURS, strict=True)]
    (folder / "train.csv").write_text("\n".join(["image_id,label", *rows]))
    assert labels(load(folder)) == labels(load(folder / "train.csv")) == dict(enumerate(COLOURS))


def test_the_image_folder_named_like_the_table_is_chosen(tmp_path: Path) -> None:
    """As in competitions that number both folders' images from 0."""
    for part, shade in (("test_images", 200), ("train_images", 10)):
        (tmp_path / part).mkdir()
        for k in range(2):
            Image.new("RGB", (40, 30), (shade + k, 0, 0)).save(tmp_path / part / f"{k}.png")
    (tmp_path / "train.csv").write_text("id,label\n0.png,a\n1.png,b\n")
    assert sorted(np.load(Path(load(tmp_path).folder) / "images.npy")[:, 0, 0, 0].tolist()) == [10, 11]
    (tmp_path / "train.csv").rename(tmp_path / "labels.csv")
    line = "image 0.png of labels.csv may be test_images/0.png and train_images/0.png; write it in labels.csv as one of"
    refuses(line, load, tmp_path / "labels.csv")
    refuses(line, load, tmp_path)
    (tmp_path / "labels.csv").write_text("id,label\ntrain_images/0.png,a\ntrain_images/1.png,b\n")
    assert load(tmp_path).count == 2


def test_a_name_without_suffix_must_match_one_image(folder: Path) -> None:
    (folder / "labels.csv").write_text("id,label\nimg_000,a\nimg_001,b\n")
    assert load(folder).count == 2
    Image.new("RGB", (40, 30)).save(folder / "images/img_000.png")
    Image.new("RGB", (40, 30)).save(folder / "images/img_001.png")
    refuses("image img_000 of labels.csv may be images/img_000.jpg and images/img_000.png", load, folder / "labels.csv")


def test_numeric_labels_are_network_classes(folder: Path) -> None:
    file = folder / "labels.csv"
    file.write_text("path,label\n" + "".join(f"{name}.jpg,{k % 3 + 1}\n" for k, name in enumerate(NAMES)))
    assert labels(load(folder, outputs=10)) == {k: str(k % 3 + 1) for k in range(6)}
    assert dyno_data.read_meta(load(folder, outputs=10))["classes"] == [str(k) for k in range(10)]
    refuses("has class 3, but the network has 3 classes, 0 to 2; the table counts from 1", load, folder, outputs=3)


def test_numbers_that_may_count_from_one_have_a_warning(folder: Path) -> None:
    """Where the last class has no image, the number of classes doesn't tell."""
    file = folder / "labels.csv"
    for first, warned in ((1, True), (0, False), (2, False)):
        file.write_text("path,label\n" + "".join(f"{name}.jpg,{k % 3 + first}\n" for k, name in enumerate(NAMES)))
        warnings = " ".join(dyno_data.read_meta(load(folder, outputs=5)).get("warnings", []))
        assert ("labels.csv has class 1 but not class 0" in warnings) == warned


def test_splits_select_test_and_calibration_images(folder: Path) -> None:
    """Images missing from the table are left out with a warning."""
    splits = ("train", "val", "train", "val", "train")
    rows = [f"{name}.jpg,{colour},{split}" for name, colour, split in zip(NAMES, COLOURS, splits, strict=False)]
    (folder / "labels.csv").write_text("\n".join(["path,label,split", *rows]))
    about = dyno_data.read_meta(load(folder))
    assert about["splits"] == {"test": 2, "calibration": 3}
    assert about["warnings"] == ["1 image is not in labels.csv and left out, e.g. img_005.jpg"]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("path,label\nimg_000.jpg,a\nimg_000.jpg,b\n", "lists img_000.jpg twice"),
        ("path,label\nimg_000.jpg,a\n./img_000.jpg,a\n", "lists ./img_000.jpg twice"),
        ("img_000.jpg,a,test\nimg_001.jpg,b,test\n", "has 3 columns without names; add a first row that names them"),
        ("path,label\nimg_000.jpg,a\nimg_001.jpg,\n", "row 3 has no label"),
        ("path,label\nimg_000.jpg,a,b\n", "row 2 has 3 cells, not 2"),
        ("path,label\nimg_000.jpg,a\nlost.jpg,b\n", "1 of 2 images of t.csv are not in .*images, e.g. lost.jpg"),
        ("path,label\nlost.jpg,b\n", "image lost.jpg of t.csv is not in any of"),
        ("path,a,b\nimg_000.jpg,1,1\nimg_001.jpg,0,1\n", "row 2: 2 classes are 1; each image needs one"),
        ("path,size,age\nimg_000.jpg,40,3\n", "has no column called label or class, only path, size, age"),
        ("path,label,xmin\nimg_000.jpg,a,1\n", "holds boxes"),
        ("a,b,c\n1,2,3\n", "has no column of image files"),
        ("path,label\n", "has no rows"),
        ("", "is not a table of labels"),
        ("path,label\nimg_000.jpg,-1\nimg_001.jpg,0\n", "has class -1; classes are numbered from 0"),
        ("path,label\nimg_000.jpg,9999999999\n", "has class 9999999999, but no class is so"),
        ("path,label\nimg_000.jpg,1.0\nimg_001.jpg,NaN\n", "has the label NaN, which is not a class; leave out rows"),
        (
            "path,age\nimg_000.jpg,3.5\nimg_001.jpg,4\n",
            "has the label 3.5, which is not a class; labels are names or whole",
        ),
    ],
)
def test_invalid_tables_are_refused_in_one_line(folder: Path, text: str, wrong: str) -> None:
    (folder / "t.csv").write_text(text)
    refuses(wrong, load, folder / "t.csv")


def test_several_tables_need_a_choice(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / f"{name}.csv").write_text("img_000.jpg,cat\nimg_001.jpg,dog\n")
    refuses(r"has several tables of labels \(a.csv, b.csv\); give the path of the one", load, folder)
    assert load(folder / "b.csv").count == 2
    refuses("training needs class folders", load, folder / "b.csv", train=True)


def test_invalid_data_lists_the_known_formats(folder: Path) -> None:
    refuses(
        r"nor a file in COCO's format \(.json\), a file in the format path,label \(.csv\), a file in YOLO's format",
        load, folder / "images" / f"{NAMES[0]}.jpg",
    )  # fmt: skip
