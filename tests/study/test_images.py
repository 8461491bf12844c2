"""A study's data fits the model or is refused in one line; slow decoding shows its progress."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import onnx_text
from drawn import photographs as photos
from dyno import Study
from dyno import data as dyno_data
from dyno.study import images
from dyno.study.images import prepare_images, report_decoding
from dyno.worker.inspection import Inspection
from dyno.worker.spec import DataSpec, ModelSpec, UserError
from refusals import refuses

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

SYNSETS = {"n01440764": 0, "n01751748": 65, "n15075141": 999}


def data_for(folder: Path | str, outputs: int = 0, task: str = "classify", **more: Any) -> DataSpec:
    study = Study(models=("fake:net",), backends=("pytorch",), data=str(folder))
    return prepare_images(study, ModelSpec("net", "fake:net", task=task, **more), (16, 16), outputs)


def test_synsets_have_the_standard_classes_numbers(tmp_path: Path) -> None:
    folder = photos(tmp_path / "val", *SYNSETS)
    data = data_for(folder, 1000)
    about, labels = dyno_data.read_meta(data), np.load(Path(data.folder, "labels.npy"))
    assert sorted(set(labels.tolist())) == [0, 65, 999]
    assert (len(about["classes"]), about["label_source"]) == (1000, "imagenet1k")
    assert about["classes"][0] == "tench (n01440764)"
    assert about["classes"][65] == "sea snake (n01751748)"
    assert len(set(about["classes"])) == 1000
    few = dyno_data.read_meta(data_for(folder, 3))
    assert (few["classes"], few["label_source"]) == (sorted(SYNSETS), "folders"), "a model of these three"
    assert (
        dyno_data.read_meta(data_for(photos(tmp_path / "all", *SYNSETS, "n99999999"), 4))["label_source"] == "folders"
    )


def test_the_synset_list_matches_timm() -> None:
    from timm.data import ImageNetInfo

    from dyno.data import photos as data_photos

    assert list(data_photos.list_synsets()) == ImageNetInfo("imagenet-1k").label_names()
    assert not data_photos.are_known_synsets(["n01440764", "cat"])
    assert not data_photos.are_known_synsets([])


def test_labels_unsuitable_for_the_model_are_refused(tmp_path: Path) -> None:
    folder = photos(tmp_path / "pets", "cat", "dog", "猫")
    assert data_for(folder, 3).count == data_for(folder).count == data_for(folder, classes=3).count == 9
    for outputs, line in {
        1000: f"{folder} has 3 class folders, but net has 1000 classes; build it with --cl",
        2: f"{folder} has 3 class folders, but net has 2 classes; give the data that it was trained for,",
    }.items():
        with pytest.raises(UserError) as e:
            data_for(folder, outputs)
        assert str(e.value).startswith(line)
        assert "\n" not in str(e.value)
    refuses("one has 1 class folder, but net has 2 classes", data_for, photos(tmp_path / "one", "cat"), 2)
    refuses("digits has 10 classes, but net has 1000 classes", data_for, "digits", 1000)
    refuses("digits are grey, but net takes 3 channels; give a model of one", data_for, "digits", 10)


def test_remedies_fit_the_model_and_the_folder(tmp_path: Path) -> None:
    """A file keeps its classes, only networks of ImageNet's 1,000 classes know synsets, and classes may lie deeper."""
    folder = photos(tmp_path / "pets", "cat", "dog")
    about = {"classes": ["cat", "dog"], "label_source": "folders"}

    def remedy(classes: int, source: str, **more: Any) -> str:
        with pytest.raises(UserError) as e:
            images._check_labels(str(folder), {**about, **more}, ModelSpec("net", source), classes)
        return str(e.value).partition("; ")[2]

    table = "give a table of path,label with the network's numbers as labels"
    alone = "or put the images into one folder to use them without labels"
    assert remedy(3, "net.onnx") == f"{table}, {alone}"
    assert remedy(1001, "net.onnx") == f"{table}, {alone}"
    assert remedy(3, "torchvision:resnet18") == f"build it with --classes 2, {table}, {alone}"
    assert remedy(1000, "net.onnx") == f"{table}, name the folders by their ImageNet synsets (n01440764), {alone}"
    assert remedy(1, "net.onnx") == "give the data that it was trained for"
    for kind in "abc":
        (folder / "dog" / kind).mkdir()
    assert remedy(3, "net.onnx") == f"give {folder}/dog, which has 3"


def test_unlabelled_images_suit_any_model(tmp_path: Path) -> None:
    folder = photos(tmp_path / "loose", "", count=10)
    assert dyno_data.format_of(folder).name == "images"
    data = data_for(folder, 1000)
    about = dyno_data.read_meta(data)
    assert set(np.load(Path(data.folder, "labels.npy"))) == {-1}
    assert (about["label_source"], about["classes"]) == ("none", [])
    assert about["splits"] == {"test": 10}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, True),
        ({"precisions": ("fp32", "fp16", "bf16")}, False),
        ({"backends": ("onnxruntime",)}, False),
        ({"precisions": ("fp32", "int8")}, True),
        ({"backends": ("onnxruntime@precision=fp32+int8",)}, True),
        ({"backends": ("pytorch", "compile"), "precisions": ("fp32", "int8")}, False),
        ({"backends": ("tensorrt",), "precisions": ("fp8",)}, True),
        ({"backends": ("onnxruntime@keep=3",), "precisions": ("fp16",)}, True),
        ({"backends": ("onnxruntime",), "precisions": ("fp16",), "budget": {"top1": 1.0}}, True),
        ({"backends": ("onnxruntime",), "precisions": ("fp16",), "budget": {"top1": 1.0}, "search": False}, False),
        ({"backends": ("pytorch",), "precisions": ("fp16",), "budget": {"top1": 1.0}}, False),
        ({"backends": ("onnxruntime",), "precisions": ("bf16",), "budget": {"top1": 1.0}}, False),
    ],
)
def test_images_are_set_aside_only_for_calibration(settings: dict[str, Any], wanted: bool) -> None:
    assert images.calibrates(Study(models=("fake:net",), data="d", **settings)) is wanted


def annotated(folder: Path, line: str = "0 0.5 0.5 0.2 0.2") -> Path:
    photos(folder / "images/val", "", count=3)
    (folder / "labels/val").mkdir(parents=True)
    for i in range(3):
        (folder / f"labels/val/{i}.txt").write_text(line)
    return folder


def test_data_for_another_task_is_refused(tmp_path: Path) -> None:
    boxes = annotated(tmp_path / "boxes")
    (boxes / "data.yaml").write_text("val: images/val\nnames: [one, two]\n")
    folder = photos(tmp_path / "pets", "cat", "dog")
    assert dyno_data.read_meta(data_for(boxes, task="detect", classes=2))["has"] == ["boxes"]
    for task, data, more, line in (
        ("detect", folder, {}, "is in class folders, but net is for detect; give annotations in COCO's"),
        (
            "classify",
            boxes,
            {},
            "is in YOLO's format, but net is for classify; give class folders .*, or --task detect if",
        ),
        ("segment", boxes, {"classes": 2}, "net is for segment, but .* has no masks for all objects; give data with m"),
        ("pose", boxes, {"classes": 2}, "net is for pose, but .* has no keypoints for all objects; give data with"),
        ("detect", boxes, {"classes": 80}, "has 2 classes, but net has 80 classes; give the data"),
    ):
        refuses(line, data_for, data, task=task, **more)
    (tmp_path / "labels.json").write_text('{"a.jpg": "cat"}')
    said = "labels.json is read in COCO's format as a .json file, but net is for classify; give class folders"
    refuses(said, data_for, tmp_path / "labels.json", task="classify")
    pose = annotated(tmp_path / "pose", "0 0.5 0.5 0.2 0.2 0.5 0.5 2 0.4 0.4 1")
    (pose / "data.yaml").write_text("val: images/val\nnames: [one]\nkpt_shape: [2, 3]\n")
    assert data_for(pose, task="pose", classes=1, keypoints=(2, 3)).count == 3
    with pytest.raises(UserError, match="has 2 keypoints, but net gives 17; give data with 17, or a network of 2"):
        data_for(pose, task="pose", classes=1, keypoints=(17, 3))


def test_decoding_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, quiet, wanted in (
        (True, 0.0, r"decoding images .* 2/2 .*decoded 2 images in"),
        (False, 0.0, r"^decoded 2 images in 0.\d s\n$"),
        (True, 60.0, r"^$"),
    ):
        monkeypatch.setattr(images, "QUIET_S", quiet)
        written = io.StringIO()
        with report_decoding(Console(file=written, force_terminal=terminal, width=100)) as progress:
            progress(1, 2)
            progress(2, 2)
        assert re.search(wanted, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue()), re.S)


def test_earlier_decoded_images_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "QUIET_S", 0.0)
    written = io.StringIO()
    with report_decoding(Console(file=written)) as progress:
        progress(1001, 1002)
        progress(1002, 1002)
    assert re.fullmatch(r"decoded 2 images in 0.\d s, 1,000 before\n", written.getvalue())


def test_studies_check_the_classes_of_the_model(tmp_path: Path, dyno) -> None:
    code = "import torch\ndef build():\n    flat = torch.nn.Flatten()\n"
    (tmp_path / "net.py").write_text(code + "    return torch.nn.Sequential(flat, torch.nn.Linear(3 * 64, 1000))\n")
    words = "net.py:build --size 8 --backend pytorch --seconds 0.05 --warmup 0.02 --out r".split()
    photos(tmp_path / "pets", "cat", "dog")
    done = dyno("eval", *words, "--data", "pets", cwd=tmp_path, code=2)
    assert done.stderr.startswith("dyno: pets has 2 class folders, but net has 1000 classes; build it with")
    photos(tmp_path / "loose", "")
    done = dyno("eval", *words, "--data", "loose", "--format", "json", cwd=tmp_path, code=0)
    assert json.loads(done.stdout)["tables"]["trials"]["rows"][0]["top1"] is None


def test_unannotated_photographs_suit_a_detector(tmp_path: Path) -> None:
    folder = photos(tmp_path / "loose", "", count=5)
    for task in ("detect", "segment", "pose"):
        data = data_for(folder, task=task, classes=80, keypoints=(17, 3) if task == "pose" else ())
        about = dyno_data.read_meta(data)
        assert (data.count, about["classes"], about["preprocess"]["letterbox"], "truth" in about) == (
            5,
            [],
            True,
            False,
        )
        assert np.load(Path(data.folder, "sizes.npy")).tolist() == [[20, 30]] * 5
    study = Study(models=("fake:net",), data=str(folder), budget={"mAP": 1.0})
    with pytest.raises(UserError, match=r"a budget needs boxes, and .* has none; give annotations in COCO's"):
        prepare_images(study, ModelSpec("net", "fake:net", task="detect", classes=80), (16, 16))


def test_classes_numbered_unlike_the_network_are_refused(tmp_path: Path, dyno) -> None:
    onnx = pytest.importorskip("onnx")
    text = "(float[n, 3, 8, 8] x) => (float[n, 3] y) { p = GlobalAveragePool(x) \n y = Flatten(p) }"

    def eval_named(names: str, folder: Path, code: int) -> str:
        graph = onnx_text.model(text)
        onnx.helper.set_model_props(graph, {"names": names})
        onnx.save(graph, tmp_path / "net.onnx")
        return dyno("run", "net.onnx", "--backend", "onnxruntime", "--data", folder.name, "--dry-run", cwd=tmp_path,
                    code=code).stderr  # fmt: skip

    pets = photos(tmp_path / "pets", "cat", "dog", "sea_lion")
    line = "'cat' is class 0 of pets and class 1 of net, so its accuracy would be wrong; give a table of path,label"
    assert eval_named("{0: 'dog', 1: 'Cat', 2: 'sea lion'}", pets, 2).startswith(f"dyno: {line}")
    numbers = photos(tmp_path / "numbers", "1", "2", "10")
    assert "'10' is class 1 of numbers and class 2 of net" in eval_named("['1', '2', '10']", numbers, 2)
    eval_named("{0: 'cat', 1: 'dog', 2: 'Sea Lion'}", pets, 0)
    eval_named("{0: '0', 1: '1', 2: '2'}", numbers, 0)
    eval_named("{0: 'crane', 1: 'crane', 2: 'cat'}", pets, 0)


def test_boxes_with_classes_numbered_unlike_the_network_are_refused(tmp_path: Path) -> None:
    folder = annotated(tmp_path / "boxes")
    (folder / "data.yaml").write_text("val: images/val\nnames: [disc, triangle]\n")
    study, model = Study(models=("fake:net",), data=str(folder)), ModelSpec("net", "fake:net", task="detect")
    data = prepare_images(study, model, (16, 16))
    for names, refused in ((("triangle", "disc"), True), (("disc", "triangle"), False), (("a", "b"), False)):
        inspection = Inspection(task="detect", class_names=names)
        if refused:
            with pytest.raises(
                UserError, match=r"'disc' is class 0 of .* and class 1 of net, .* the network's numbers"
            ):
                images.check_images(study, model, inspection, data)
        else:
            images.check_images(study, model, inspection, data)
