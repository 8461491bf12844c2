"""COCO's files become letterboxed images and ground truth by row and class; errors in them give one line."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask
from pycocotools.coco import COCO

import drawn
from drawn import truth
from dyno import data as dyno_data
from dyno.study import images
from dyno.worker.spec import ModelSpec, UserError
from refusals import refuses


def test_the_ground_truth_matches_the_file(coco: Any, make: Any) -> None:
    folder = coco()
    data = make(folder)
    about, found = dyno_data.read_meta(data), truth(data)
    assert (dyno_data.format_of(folder).name, data.name) == ("coco", "coco")
    assert (about["classes"], about["has"]) == (["disc", "triangle"], ["boxes", "masks"])
    assert about["splits"] == {"test": 6, "calibration": 8}, "calibration images come out of train2017"
    assert [category["id"] for category in found["categories"]] == [0, 1]
    before = drawn.coco_file(6)
    for image, one, was in zip(found["images"], found["annotations"], before["annotations"], strict=True):
        assert one["image_id"] == image["id"] == was["image_id"] - 100
        assert one["category_id"] == (7, 90).index(was["category_id"])
        assert (one["bbox"], one["area"], one["segmentation"]) == (was["bbox"], was["area"], was["segmentation"])
    assert min(one["id"] for one in found["annotations"]) == 1, "pycocotools takes 0 for no match"
    read = COCO(Path(data.folder, "truth.json"))
    assert read.annToMask(read.anns[1]).sum() == pytest.approx(0.2 * 96 * 64 * np.pi / 4, rel=0.1)
    assert make(folder / "annotations/instances_val2017.json").sha256 == data.sha256


def test_keypoints(coco: Any, make: Any) -> None:
    found = make(coco(keypoints=True, name="person_keypoints_val2017"))
    about = dyno_data.read_meta(found)
    assert (about["has"], about["keypoints"]) == (["boxes", "masks", "keypoints"], [3, 3])
    one = truth(found)
    assert one["annotations"][0]["num_keypoints"] == 2
    assert one["categories"][0]["keypoints"] == ["a", "b", "c"]


def test_the_task_selects_the_annotation_file(coco: Any, make: Any) -> None:
    coco(name="captions_val2017")
    coco(name="instances_train2017")
    coco(keypoints=True, name="person_keypoints_val2017")
    folder = coco()
    assert dyno_data.read_meta(make(folder))["has"] == ["boxes", "masks"]
    assert dyno_data.read_meta(make(folder, needs="keypoints"))["has"][-1] == "keypoints"
    (folder / "annotations/instances_val2017.json").rename(folder / "annotations/mine_val.json")
    coco(name="yours_val")
    (folder / "annotations/person_keypoints_val2017.json").unlink()
    refuses(r"several files \(mine_val.json, yours_val.json\); give the path", make, folder)


def test_the_annotation_file_may_be_in_the_top_folder(coco: Any, make: Any) -> None:
    folder = coco()
    sha256 = make(folder).sha256
    (folder / "annotations/instances_val2017.json").rename(folder / "instances_val2017.json")
    assert dyno_data.format_of(folder).name == "coco" and make(folder).sha256 == sha256
    (folder / "instances_val2017.json").rename(folder / "instances.json")
    (folder / "val2017").rename(folder / "images")
    assert dyno_data.read_meta(make(folder))["splits"] == {"test": 6}
    (folder / "annotations/captions_val2017.json").write_text("{}")
    refuses(r"annotations has no file with objects, only captions_val2017.json; give", make, folder)


def roboflow(folder: Path) -> Path:
    """Write Roboflow's export: a file in each split's folder, and a supercategory as the first category."""
    tables = drawn.coco_file(6)
    root = {"id": 0, "name": "shapes", "supercategory": "none"}
    tables["categories"] = [root, *({**one, "supercategory": "shapes"} for one in tables["categories"])]
    for split in ("train", "valid", "test"):
        for number in range(6):
            drawn.draw(folder / split / f"{number:03}.jpg", number)
            if split != "valid":  # else they would be copies of the test images
                with (folder / split / f"{number:03}.jpg").open("ab") as file:
                    file.write(split.encode())
        (folder / split / "_annotations.coco.json").write_text(json.dumps(tables))
    return folder


def test_boxes_in_corner_coordinates_are_refused(coco: Any, make: Any) -> None:
    folder = coco()
    file = folder / "annotations/instances_val2017.json"
    tables = json.loads(file.read_text())

    def write(*boxes: list[float], areas: list[float]) -> None:
        objects = [{**tables["annotations"][0], "id": k, "bbox": box, "area": area, "segmentation": []}
                   for k, (box, area) in enumerate(zip(boxes, areas, strict=True))]  # fmt: skip
        file.write_text(json.dumps({**tables, "annotations": objects}))

    write([0.1, 0.2, 0.5, 0.5], [0.3, 0.2, 0.4, 0.4], areas=[0.25, 0.16])
    refuses("instances_val2017.json: all boxes lie within 0 and 1, as shares of the image; give pixels", make, folder)
    write([5, 5, 25, 25], [10, 10, 40, 30], areas=[400, 600])
    refuses("by their areas all boxes are two corners; give", make, folder)
    write([5, 5, 25, 25], [10, 10, 40, 30], areas=[625, 1200])
    assert len(truth(make(folder))["annotations"]) == 2
    write([0, 0, 20, 20], [0, 0, 40, 30], areas=[400, 1200])
    assert len(truth(make(folder))["annotations"]) == 2, "a corner at 0: both readings are the same"


def test_duplicate_annotations_have_a_warning(coco: Any, make: Any) -> None:
    folder = coco()
    file = folder / "annotations/instances_val2017.json"
    tables = json.loads(file.read_text())
    tables["annotations"].append({**tables["annotations"][0], "id": 999})
    file.write_text(json.dumps(tables))
    assert "1 of 7 annotations are duplicates, and each counts" in dyno_data.read_meta(make(folder))["warnings"]


@pytest.mark.parametrize("given", ["", "valid", "valid/_annotations.coco.json"])
def test_roboflow_layouts_are_read_without_the_root_category(tmp_path: Path, make: Any, given: str) -> None:
    data = make(roboflow(tmp_path / "set") / given, outputs=2)
    about, found = dyno_data.read_meta(data), truth(data)
    assert about["splits"] == {"test": 6, "calibration": 6} and about["classes"] == drawn.NAMES
    assert [one["category_id"] for one in found["annotations"]] == [drawn.shape(k)[0] for k in range(6)]
    (warning,) = about["warnings"]
    assert warning.startswith("'shapes' of _annotations.coco.json is left out: it has no annotation")


def test_unused_categories_keep_their_number(tmp_path: Path, make: Any) -> None:
    """Every category keeps its number if the network has a class for each, or if the unused one is no supercategory."""
    folder = roboflow(tmp_path / "set")
    assert dyno_data.read_meta(make(folder, outputs=3))["classes"] == ["shapes", *drawn.NAMES]
    with pytest.raises(UserError, match=r"has 3 classes, but net has 4 classes; .* \(without annotation: shapes\)"):
        images._check_labels(
            "set", dyno_data.read_meta(make(folder, outputs=4)), ModelSpec("net", "net.py:net", task="detect"), 4
        )
    file = folder / "valid/_annotations.coco.json"
    tables = json.loads(file.read_text())
    tables["categories"][0] = {"id": 0, "name": "circle", "supercategory": "round"}
    file.write_text(json.dumps(tables))
    about = dyno_data.read_meta(make(folder, outputs=2))
    assert (about["classes"], about["unused"]) == (["circle", *drawn.NAMES], ["circle"])


def test_the_root_category_may_share_the_name_of_a_class(tmp_path: Path, make: Any) -> None:
    folder = roboflow(tmp_path / "set")
    file = folder / "valid/_annotations.coco.json"
    tables = json.loads(file.read_text())
    for category in tables["categories"]:
        category["name" if category["id"] in (0, 7) else "supercategory"] = "disc"
        category["supercategory"] = "none" if category["id"] == 0 else "disc"
    file.write_text(json.dumps(tables))
    assert dyno_data.read_meta(make(folder, outputs=2))["classes"] == drawn.NAMES


@pytest.mark.parametrize(("name", "place"), [("labels.json", "data"), ("result.json", "images")])
def test_exports_of_other_tools(coco: Any, make: Any, name: str, place: str) -> None:
    """FiftyOne's export, and Label Studio's on Windows: the file is recognised by its content."""
    folder = coco(train=0)
    tables = json.loads((folder / "annotations/instances_val2017.json").read_text())
    before = make(folder).sha256
    (folder / "val2017").rename(folder / place)
    for image in tables["images"] if name == "result.json" else ():
        image["file_name"] = f"images\\{image['file_name']}"
    (folder / name).write_text(json.dumps({"info": {}, **tables}))
    (folder / "annotations/instances_val2017.json").rename(folder / "annotations/._instances_val2017.json")
    data = make(folder)
    assert truth(data)["annotations"] and (name == "result.json" or data.sha256 == before)


def test_labels_of_exif_rotated_images_refer_to_the_upright_image(coco: Any, make: Any) -> None:
    """Labels refer to the upright image; a file with the stored image's sizes is refused."""
    folder, exif = coco(), Image.Exif()
    exif[0x112] = 6
    photo = folder / "val2017/000.jpg"
    with Image.open(photo) as image:
        image.load()
    image.rotate(90, expand=True).save(photo, exif=exif, quality=95)
    assert make(folder).count == 6
    image.save(photo, exif=exif, quality=95)
    refuses(r"is 64 x 96 pixels, but .* says 96 x 64; its EXIF orientation turns it", make, folder)


def test_partial_masks_and_empty_classes_have_warnings(coco: Any, make: Any) -> None:
    tables = drawn.coco_file(6)
    tables["annotations"][0]["segmentation"] = []
    tables["categories"].append({"id": 91, "name": "square"})
    about = dyno_data.read_meta(make(coco(**tables)))
    assert (about["has"], about["classes"]) == (["boxes"], ["disc", "triangle", "square"])
    assert about["warnings"] == [
        "1 of 6 objects have no mask, so the masks of the others are not used",
        "class 'square' is in no image",
    ]


def test_run_lengths_and_crowds(coco: Any, make: Any) -> None:
    tables = drawn.coco_file(6)
    one = tables["annotations"][0]
    one |= {"segmentation": {"size": [64, 96], "counts": [100, 50, 64 * 96 - 150]}, "iscrowd": 1}
    del one["area"]
    found = truth(make(coco(**tables)))["annotations"][0]
    assert (found["area"], found["iscrowd"], found["segmentation"]) == (50.0, 1, one["segmentation"])
    one["area"] = 0  # as a placeholder
    assert truth(make(coco(**tables)))["annotations"][0]["area"] == 50
    whole = np.zeros((64, 96), np.uint8, order="F")
    whole[3:10, 5:9] = 1
    one["segmentation"] = {"size": [64, 96], "counts": mask.encode(whole)["counts"].decode()}
    assert truth(make(coco(**tables)))["annotations"][0]["area"] == 28
    one["segmentation"] = {"size": [64, 96], "counts": [99, 50, 64 * 96 - 150]}
    refuses(r"annotation 0 of 000.jpg: the mask's run lengths don't fit an image of 96 x 64", make, coco(**tables))


def test_packed_run_lengths_are_validated(coco: Any, make: Any) -> None:
    """An evaluation once hung in pycocotools on invalid run lengths."""
    tables = drawn.coco_file(6)
    one = tables["annotations"][0]
    whole = np.zeros((64, 96), np.uint8, order="F")
    whole[10:30, 20:50] = 1
    packed = mask.encode(whole)
    one |= {"segmentation": {"size": [64, 96], "counts": packed["counts"].decode()}}
    assert truth(make(coco(**tables)))["annotations"][0]["segmentation"] == one["segmentation"]
    for counts in ("zz??", "1", "", one["segmentation"]["counts"][:-1], [-5, 64 * 96 + 5], [1.5, 64 * 96 - 1.5]):
        one["segmentation"] = {"size": [64, 96], "counts": counts}
        refuses("the mask's run lengths don't fit an image of 96 x 64", make, coco(**tables))


BAD = {
    "annotation 2 of 002.jpg: the box [40, 10, 20, 25] lies outside its image of 50 x 50": {"bbox": [40, 10, 20, 25]},
    "annotation 2 of 002.jpg: the box [5, 10, 20, 0] has no area": {"bbox": [5, 10, 20, 0]},
    "annotation 2 of 002.jpg: bbox is [1, 2, 3], not": {"bbox": [1, 2, 3]},
    "annotation 2 of 002.jpg: bbox is None": {"bbox": None},
    "annotation 2: there is no category with id 3": {"category_id": 3},
    "annotation 2: there is no image with id 999": {"image_id": 999},
    "annotation 2: there is no category with id [7]": {"category_id": [7]},
    "annotation 2 of 002.jpg: a polygon has 2 points; it needs three": {"segmentation": [[1, 1, 5, 5]]},
    "annotation 2 of 002.jpg: the polygon's point (1, 88) lies outside": {"segmentation": [[1, 1, 5, 5, 1, 88]]},
    "annotation 2 of 002.jpg: segmentation is neither": {"segmentation": "none"},
    "annotation 2 of 002.jpg: area is -5, not a number": {"area": -5},
    "annotation 2 of 002.jpg: iscrowd is '0', not 0 or 1": {"iscrowd": "0"},
    "annotation 2 of 002.jpg: keypoint 1 at (3000, 1) lies outside": {"keypoints": [1, 1, 2, 3000, 1, 2, 1, 1, 2]},
    "annotation 2 of 002.jpg: keypoint 0 has visibility 7": {"keypoints": [1, 1, 7, 1, 1, 2, 1, 1, 2]},
    "annotation 2 of 002.jpg: keypoints has 6 values; 3 keypoints need 9": {"keypoints": [1, 1, 2, 3, 3, 2]},
}


@pytest.mark.parametrize("wrong", BAD)
def test_a_bad_annotation_is_named(coco: Any, make: Any, wrong: str) -> None:
    tables = drawn.coco_file(6, keypoints=True)
    tables["annotations"][2] |= copy.deepcopy(BAD[wrong])
    with pytest.raises(UserError) as e:
        make(coco(**tables))
    assert str(e.value).startswith("instances_val2017.json, " + wrong)
    assert "\n" not in str(e.value)


def test_ids_may_be_integral_floats(coco: Any, make: Any) -> None:
    tables = drawn.coco_file(6)
    expected = truth(make(coco(**tables)))
    for item in (*tables["images"], *tables["annotations"]):
        item |= {key: float(item[key]) for key in ("id", "image_id", "category_id") if key in item}
    assert truth(make(coco(**tables))) == expected


def test_mismatched_and_missing_images_are_named(coco: Any, make: Any) -> None:
    tables = drawn.coco_file(6)
    tables["images"][1]["width"] = 640
    refuses(r"001.jpg is 60 x 80 pixels, but instances_val2017.json says 640 x 80", make, coco(**tables))
    tables["images"][1] |= {"width": "60", "height": "80"}
    refuses(r"the size of 001.jpg is '60' x '80'; give numbers of pixels", make, coco(**tables))
    folder = coco()
    (folder / "val2017/004.jpg").unlink()
    refuses(r"1 of 6 images of instances_val2017.json are not in .*val2017, e.g. 004.jpg; leave", make, folder)
    rest = make(folder, on_unreadable="skip")
    assert rest.count == 5 and any(
        "e.g. 004.jpg; they were left out" in said for said in dyno_data.read_meta(rest)["warnings"]
    )
    for path in (folder / "val2017").iterdir():
        path.unlink()
    refuses(r"image 000.jpg of instances_val2017.json is not in any of ", make, folder)


def test_test_images_need_an_annotated_object(coco: Any, make: Any) -> None:
    refuses("no test image has an annotated object", make, coco(**{**drawn.coco_file(6), "annotations": []}))
    crowds = [annotation | {"iscrowd": 1} for annotation in drawn.coco_file(6)["annotations"]]
    refuses("no test image has an annotated object", make, coco(**{**drawn.coco_file(6), "annotations": crowds}))


def test_non_coco_files_are_refused(coco: Any, make: Any) -> None:
    folder = coco()
    file = folder / "annotations/instances_val2017.json"
    tables = drawn.coco_file(6)
    for text, wrong in {
        "{": "is not JSON",
        "[]": "has no list 'images'",
        '{"images": [], "annotations": [], "categories": []}': "lists no images",
        json.dumps({**tables, "annotations": {}}): "has no list 'annotations'",
        json.dumps({**tables, "images": [{"id": 3}]}): "entry 0 of 'images' lacks id or file_name",
        json.dumps({**tables, "images": [tables["images"][0]] * 2}): "two images have the same id",
        json.dumps(
            {**tables, "images": [tables["images"][0], {**tables["images"][0], "id": 77}]}
        ): "lists 000.jpg twice",
        json.dumps(
            {**tables, "images": [tables["images"][0], {"file_name": "./000.jpg", "id": 77}]}
        ): "lists 000.jpg twice",
        json.dumps({**tables, "images": [{"id": 1, "file_name": 3}]}): "a file_name among its images is not a string",
        json.dumps({**tables, "categories": [{"id": 1, "name": {}}]}): "a name among its categories is not a string",
        json.dumps({**tables, "categories": [{"id": 1, "name": "a"}, {"id": "x", "name": "b"}]}): "neither all numbers",
        "[" * 100_000: "is not JSON",
    }.items():
        file.write_text(text)
        refuses(wrong, make, folder)
    refuses("no data folder", make, folder / "none.json")


def test_formats_are_not_mixed(coco: Any, make: Any, tmp_path: Path) -> None:
    folder = coco()
    (folder / "data.yaml").write_text("names: [a]")
    refuses(r"is in COCO's format and YOLO's format; give the file of the one to use", make, folder)
    (tmp_path / "classes/cat").mkdir(parents=True)
    assert dyno_data.format_of(tmp_path / "classes").name == "classes"
    drawn.draw(tmp_path / "loose/a.jpg", 0)
    assert dyno_data.format_of(tmp_path / "loose").name == "images"
    refuses("is not a folder, nor a file in COCO's format", dyno_data.format_of, tmp_path / "loose/a.jpg")
