"""YOLO's folders become letterboxed images and COCO's ground truth; errors in them give one line."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import drawn
from drawn import truth
from dyno import data as dyno_data
from refusals import refuses


def of_ultralytics(folder: Path, task: str) -> list[dict[str, Any]]:
    from ultralytics.data.dataset import YOLODataset

    about = {"names": {0: "disc", 1: "triangle"}, "nc": 2, "channels": 3, "kpt_shape": [3, 3]}
    return YOLODataset(img_path=str(folder / "images/val"), data=about, task=task, augment=False).labels


@pytest.mark.parametrize(
    ("kind", "task", "has"),
    [
        ("box", "detect", ["boxes"]),
        ("polygon", "segment", ["boxes", "masks"]),
        ("pose", "pose", ["boxes", "keypoints"]),
    ],
)
def test_the_ground_truth_matches_ultralytics(yolo: Any, make: Any, kind: str, task: str, has: list[str]) -> None:
    folder = yolo(kind)
    data = make(folder, calibration=5)
    about, found = dyno_data.read_meta(data), truth(data)
    assert (about["has"], about["classes"], about["truth"]) == (has, drawn.NAMES, "truth.json")
    assert about.get("keypoints") == ([3, 3] if kind == "pose" else None)
    assert (data.count, about["splits"]) == (6, {"test": 6, "calibration": 5})
    theirs = {Path(label["im_file"]).name: label for label in of_ultralytics(folder, task)}
    sizes = np.load(Path(data.folder, "sizes.npy"))
    assert (sizes.dtype, np.load(Path(data.folder, "labels.npy")).tolist()) == (np.int32, [-1] * 11)
    assert [image["id"] for image in found["images"]] == list(range(6))
    for image, mine in zip(found["images"], found["annotations"], strict=True):
        label = theirs[Path(image["file_name"]).name]
        assert (image["height"], image["width"]) == tuple(sizes[image["id"]]) == tuple(label["shape"])
        scale = np.array([image["width"], image["height"]] * 2)
        x, y, w, h = label["bboxes"][0] * scale
        assert np.allclose(mine["bbox"], [x - w / 2, y - h / 2, w, h], atol=1e-3)
        assert (mine["image_id"], mine["category_id"], mine["iscrowd"]) == (image["id"], int(label["cls"][0, 0]), 0)
        if kind == "polygon":
            assert np.allclose(mine["segmentation"][0], (label["segments"][0] * scale[:2]).ravel(), atol=1e-3)
        if kind == "pose":
            points = label["keypoints"][0] * [image["width"], image["height"], 1]
            points[points[:, 2] == 0] = 0
            assert np.allclose(mine["keypoints"], points.ravel(), atol=1e-3)
            assert mine["num_keypoints"] == 2


def test_a_folder_without_data_yaml_is_read(yolo: Any, make: Any) -> None:
    folder = yolo("polygon", yaml=False)
    data = make(folder)
    assert dyno_data.format_of(folder).name == "yolo"
    assert (dyno_data.read_meta(data)["classes"], dyno_data.read_meta(data)["has"]) == (["0", "1"], ["boxes", "masks"])
    named = dyno_data.read_meta(make(folder, outputs=3))
    assert named["classes"] == ["0", "1", "2"]
    assert named["warnings"] == ["class '2' is in no image"]
    (folder / "labels/val/classes.txt").write_text("disc\ntriangle\n")
    assert dyno_data.read_meta(make(folder))["classes"] == ["disc", "triangle"], "as labelling tools list them"
    assert dyno_data.read_meta(make(folder, outputs=3))["classes"] == ["0", "1", "2"], "the list is not the network's"


def test_splits_and_layouts(yolo: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = yolo(val=10)
    (folder / "data.yaml").write_text("val: images/val\nnames: [disc, triangle]\n")
    assert dyno_data.read_meta(make(folder))["splits"] == {"test": 10}
    found = make(folder, set_aside=True)
    assert dyno_data.read_meta(found)["splits"] == {"test": 8, "calibration": 2}, "set aside when there is no train"
    assert len(truth(found)["images"]) == len(truth(found)["annotations"]) == 8
    lines = ["./images/val/000.jpg", r"images\val\001.jpg", r".\images\val\002.jpg"]
    lines.append(f"{folder.name}/images/val/003.jpg")
    monkeypatch.chdir(folder.parent)
    (folder / "four.txt").write_text("\n".join(lines))
    (folder / "data.yaml").write_text("val: four.txt\ntrain: images/val\nnames: [disc, triangle]\n")
    found = make(folder / "data.yaml")
    assert dyno_data.read_meta(found)["splits"] == {"test": 4, "calibration": 6}, "an image to test on is no other"
    exported = tmp_path / "exported"
    for part in ("images", "labels"):
        shutil.copytree(folder / part / "val", exported / "valid" / part)
    (exported / "data.yaml").write_text("val: ../valid/images\nnc: 2\nnames: [disc, triangle]\n")
    assert make(exported, calibration=0).count == 10
    (exported / "data.yaml").write_text("path: C:\\data\nval: valid\\images\nnc: 2\nnames: [disc, triangle]\n")
    assert make(exported, calibration=0).count == 10
    (exported / "data.yaml").write_text("validation: exported/valid/images\nnc: 2\n")
    found = dyno_data.read_meta(make(exported, calibration=0))
    assert (found["splits"], found["classes"]) == ({"test": 10}, ["0", "1"])
    (exported / "data.yaml").unlink()
    assert make(exported, calibration=0).count == 10
    other = tmp_path / "other"
    shutil.copytree(folder / "images/val", other)
    refuses("every calibration image is also a test image", make, exported, calibration=other)


def test_a_missing_path_is_a_warning(yolo: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, names = yolo(val=10), "val: images/val\nnames: [disc, triangle]\n"
    monkeypatch.chdir(tmp_path)
    lost = "data.yaml: there is no folder C:/moved (path); the images are taken from the file's folder"
    for path, count, warning in (
        ("", 10, []),
        (".", 10, []),
        ("sets/night", 4, []),
        (r"sets\night", 4, []),
        ("C:/moved", 10, [lost]),
    ):
        if "night" in path and not (tmp_path / "sets").exists():
            for part in ("images/val", "labels/val"):
                (tmp_path / "sets/night" / part).mkdir(parents=True)
                for file in sorted((folder / part).iterdir())[:4]:
                    shutil.copy(file, tmp_path / "sets/night" / part)
        (folder / "data.yaml").write_text(f"path: {path}\n{names}")
        found = dyno_data.read_meta(make(folder, calibration=0))
        assert (found["splits"]["test"], found["warnings"]) == (count, warning), path


def test_missing_training_images_are_reported(yolo: Any, make: Any, tmp_path: Path) -> None:
    folder = yolo(val=10, train=4)
    (folder / "empty").mkdir()
    taken = "; calibration images are taken from the test images"
    for train, wrong, calibrated in (
        ("nowhere", f"there is no {folder}/nowhere{taken}", 2),
        ("empty", f"no images in empty{taken}", 2),
        ("[images/train, nowhere]", f"there is no {folder}/nowhere", 4),
    ):
        (folder / "data.yaml").write_text(f"val: images/val\ntrain: {train}\nnames: [disc, triangle]\n")
        about = dyno_data.read_meta(make(folder, set_aside=True))
        assert about["warnings"] == [f"data.yaml, train: {wrong}"]
        assert about["splits"]["calibration"] == calibrated
    (folder / "data.yaml").write_text("val: images/val\ntrain: nowhere\nnames: [disc, triangle]\n")
    other = tmp_path / "other"
    shutil.copytree(folder / "images/train", other)
    assert dyno_data.read_meta(make(folder))["warnings"] == [], "nothing is set aside"
    for calibration in (0, other):
        assert dyno_data.read_meta(make(folder, calibration=calibration))["warnings"] == [], "they are not needed"


def test_labels_are_part_of_the_data_set_hash(yolo: Any, make: Any) -> None:
    folder = yolo()
    first = make(folder)
    assert make(folder) == first
    (folder / "labels/val/000.txt").write_text("1 0.5 0.5 0.1 0.1\n")
    changed = make(folder)
    assert changed.folder != first.folder
    assert changed.sha256 != first.sha256
    Path(changed.folder, "truth.json").unlink()
    assert make(folder) == changed
    assert truth(changed)["annotations"][0]["category_id"] == 1


def test_background_images_and_duplicate_lines_have_warnings(yolo: Any, make: Any) -> None:
    folder = yolo()
    (folder / "labels/val/002.txt").unlink()
    (folder / "labels/val/001.txt").write_text("")
    text = (folder / "labels/val/000.txt").read_text()
    (folder / "labels/val/000.txt").write_text(text + "\n" + text)
    (folder / "labels/val/classes.txt").write_text("disc\ntriangle\n")
    data = make(folder)
    assert (data.count, len(truth(data)["annotations"])) == (6, 4)
    assert dyno_data.read_meta(data)["warnings"] == [
        "1 image without a label file counts as background",
        "1 line is a duplicate within a file: each counts once",
    ]


def test_exif_rotated_images_are_read_upright(yolo: Any, make: Any) -> None:
    folder = yolo()
    path = folder / "images/val/000.jpg"
    with Image.open(path) as image:
        exif = Image.Exif()
        exif[0x0112] = 6
        image.rotate(90, expand=True).save(path, exif=exif, quality=95)
    data = make(folder)
    assert np.load(Path(data.folder, "sizes.npy"))[0].tolist() == [64, 96]
    assert (np.load(Path(data.folder, "images.npy"))[0, :, 5] == 114).all(), "wider than high: grey above"


def test_corrupt_images_are_refused_or_skipped_with_their_labels(yolo: Any, make: Any) -> None:
    folder = yolo()
    whole = truth(make(folder))
    path = folder / "images/val/003.jpg"
    path.write_bytes(path.read_bytes()[:700])
    refuses(r"^1 of 14 images can't be read: images/val/003.jpg \(", make, folder)
    data = make(folder, on_unreadable="skip")
    found = truth(data)
    assert (data.count, [image["id"] for image in found["images"]]) == (5, [0, 1, 2, 3, 4])
    assert [i["file_name"][-7:-4] for i in found["images"]] == ["000", "001", "002", "004", "005"]
    assert [a["image_id"] for a in found["annotations"]] == [0, 1, 2, 3, 4]
    assert found["annotations"][3]["bbox"] == whole["annotations"][4]["bbox"]
    assert len(np.load(Path(data.folder, "sizes.npy"))) == dyno_data.read_meta(data)["count"] == 13


BAD = {
    "2 0.5 0.5 0.1 0.1": r"there is no class 2; the 2 classes are numbered from 0",
    "0.5 0.5 0.5 0.1 0.1": "there is no class 0.5",
    "0 0.9 0.5 0.4 0.1": r"the box \[67.2, 28.8, 38.4, 6.4\] lies outside its image of 96 x 64 pixels",
    "0 0.5 0.5 0 0.1": r"the box \[48, 28.8, 0, 6.4\] has no area",
    "0 0.5 nan 0.1 0.1": "has no area",
    "0 0.1 0.1 0.2 0.2 0.3": "6 numbers are a prediction with its confidence, not a label; give a class and a box",
    "0 0.1 0.1 0.2 0.2 0.3 0.4 0.5": "a polygon has 3.5 points",
    "0 0.1 0.1": "a polygon has 1 points; it needs three or more",
    "0 0.1 0.1 0.5 0.5 0.1 1.2": r"the polygon's point \(9.6, 76.8\) lies outside",
    "one 0.1 0.1 0.2 0.2": "'one 0.1 0.1 0.2 0.2' is not a row of numbers",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_line_is_named(yolo: Any, make: Any, text: str) -> None:
    folder = yolo()
    (folder / "labels/val/000.txt").write_text("0 0.5 0.5 0.1 0.1\n\n" + text)
    refuses("^labels/val/000.txt, line 3: .*" + BAD[text], make, folder)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("0 0.5 0.5 0.1 0.1 0.5 0.5 2", "3 values after the box; 3 keypoints of 3 are needed"),
        ("0 0.5 0.5 0.1 0.1 0.5 0.5 2 0.5 1.5 2 0 0 0", r"keypoint 1 at \(0.5, 1.5\) lies outside"),
    ],
)
def test_bad_keypoints_are_named(yolo: Any, make: Any, text: str, wrong: str) -> None:
    folder = yolo("pose")
    (folder / "labels/val/001.txt").write_text(text)
    refuses("^labels/val/001.txt, line 1: " + wrong, make, folder)


def test_boxes_within_rounding_of_the_edge_are_accepted(yolo: Any, make: Any) -> None:
    folder = yolo()
    (folder / "labels/val/000.txt").write_text("0 0.5 0.5 1.005 1.0\n")
    assert make(folder).count == 6


def test_classes_may_be_numbered_in_quotes(yolo: Any, make: Any) -> None:
    folder = yolo()
    (folder / "data.yaml").write_text('val: images/val\nnames: {"1": triangle, "0": disc}\n')
    assert dyno_data.read_meta(make(folder))["classes"] == ["disc", "triangle"]


def test_invalid_yolo_folders_are_refused(yolo: Any, make: Any, tmp_path: Path) -> None:
    folder = yolo()
    (folder / "labels/val/000.txt").write_text("0 0.1 0.1 0.5 0.5 0.1 0.9\n")
    refuses(r"mixed: labels/val/001.txt, line 1 is a box, labels/val/000.txt, line 1 a pol", make, folder)
    (folder / "images/val/003.jpg").unlink()
    refuses(r"there is no image for the label file labels/val/003.txt$", make, folder)
    shutil.rmtree(folder / "labels/val")
    refuses(r"the 5 images in .* have no label files, e.g. .*labels/val/000.txt", make, folder)
    shutil.rmtree(folder / "images/val")
    refuses(r"there is no .*images/val", make, folder)
    for text, wrong in {
        "names: [": "is not valid YAML",
        f"names: {'[' * 10_000}": "is not valid YAML",
        "names: 2026-13-45": "is not valid YAML",
        "val: images": "names no classes",
        "names: {1: a, 2: b}": "not numbered from 0 to 1",
        "names: [a]\nnc: 2": "nc is 2, but names has 1 class",
        "names: [a]\ntrain: images/train": "has neither val nor test",
        "names: [a]\nval: images/train\nkpt_shape: 17": "kpt_shape is 17",
        "names: [a]\nval: images\npath: nowhere/x\ntrain: no": "has a label file|no class 1",
    }.items():
        (folder / "data.yaml").write_text(text)
        refuses(wrong, make, folder)
    (folder / "data.yaml").unlink()
    refuses("training images but no test images", make, folder)
    refuses("no data folder", make, tmp_path / "none")
    refuses("is in class folders, which has no boxes", make, folder / "images")


def test_labels_of_linked_images_are_found_at_the_link_or_the_target(yolo: Any, make: Any, tmp_path: Path) -> None:
    folder = yolo("box", val=3)
    plain = make(folder)
    blobs, linked = tmp_path / "blobs", tmp_path / "linked"
    blobs.mkdir()
    for kind in ("images", "labels"):
        (linked / kind / "val").mkdir(parents=True)
        for file in (folder / kind / "val").iterdir():
            shutil.copy(file, blobs / f"{kind}{file.stem}")
            (linked / kind / "val" / file.name).symlink_to(blobs / f"{kind}{file.stem}")
    (linked / "data.yaml").write_text("val: images/val\nnames: [disc, triangle]\n")
    assert make(linked).sha256 == plain.sha256, "the same content is the same data"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data.yaml").write_text("val: images/val\nnames: [disc, triangle]\n")
    (outside / "images").symlink_to(folder / "images")
    assert make(outside).sha256 == plain.sha256


@pytest.mark.parametrize("place", ["images", "val/images", "beside"])
def test_labels_of_an_image_folder_are_found(yolo: Any, make: Any, tmp_path: Path, place: str) -> None:
    """An image folder given alone still finds its labels."""
    folder = yolo(yaml=False, val=6)
    if place == "val/images":
        for part in ("images", "labels"):
            (tmp_path / "set/val").mkdir(parents=True, exist_ok=True)
            (folder / part / "val").rename(tmp_path / "set/val" / part)
        given = tmp_path / "set/val/images"
    elif place == "beside":
        given = folder / "labels/val"
        for image in (folder / "images/val").iterdir():
            image.rename(given / image.name)
    else:
        given = folder / "images/val"
    found = truth(make(given, outputs=2))
    assert [one["category_id"] for one in found["annotations"]] == [drawn.shape(k)[0] for k in range(6)]
