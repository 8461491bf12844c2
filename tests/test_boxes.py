"""Detectors with any output layout, or with suppression inside, through the command line."""

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx import helper as h
from PIL import Image

import drawn
import onnx_text
import planted_backends
import suppressing_net

SIDE, MARGIN, CLASSES = 64, 8, 3
# Class, left, top, width and height of objects in images of 48 x 64, which a 64 x 64 letterbox moves down by 8.
OBJECTS = ((0, 4, 6, 20, 16), (2, 34, 20, 24, 22), (1, 8, 28, 14, 18))
BOXES = np.array([[x, y + MARGIN, x + w, y + h + MARGIN] for _, x, y, w, h in OBJECTS], np.float32)
LABELS, SCORES = np.array([o[0] for o in OBJECTS]), np.array([0.9, 0.8, 0.7], np.float32)
CENTRES = np.concatenate([(BOXES[:, :2] + BOXES[:, 2:]) / 2, BOXES[:, 2:] - BOXES[:, :2]], 1)
QUICK = "--rounds 1 --seconds 0.03 --block 0.01 --warmup 0.01 --boundaries model --backend onnxruntime".split()


def write(path: Path, metadata: dict[str, str], **outputs: np.ndarray) -> Path:
    """Write a network of batch 1 with the same outputs for every image."""
    nodes = [h.make_node("ReduceMean", ["images"], ["mean"], keepdims=0), h.make_node("Mul", ["mean", "no"], ["none"])]
    stored = [numpy_helper.from_array(np.float32(0), "no")]
    values = []
    for name, array in outputs.items():
        kind = h.np_dtype_to_tensor_dtype(array.dtype)
        stored.append(numpy_helper.from_array(array, f"{name}_stored"))
        nodes += [h.make_node("Cast", ["none"], [f"{name}_none"], to=kind),
                  h.make_node("Add", [f"{name}_stored", f"{name}_none"], [name])]  # fmt: skip
        values.append(h.make_tensor_value_info(name, kind, array.shape))
    image = h.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, SIDE, SIDE])
    model = h.make_model(h.make_graph(nodes, "g", [image], values, stored), opset_imports=[h.make_opsetid("", 17)],
                         ir_version=8)  # fmt: skip
    h.set_model_props(model, metadata)
    onnx.save(model, path)
    return path


def rows(count: int = 20) -> np.ndarray:
    """Return a fixed number of boxes: the objects', then zeros."""
    found = np.concatenate([BOXES, SCORES[:, None], LABELS[:, None]], 1)
    return np.concatenate([found, np.zeros((count - len(found), 6))])[None].astype(np.float32)


def objectness(anchors: int) -> np.ndarray:
    """Return YOLOv5's predictions; anchors without an object have a near-zero objectness and high class scores."""
    table = np.full((1, anchors, 5 + CLASSES), 0.9, np.float32)
    table[..., :4], table[..., 4] = 20, 1e-4
    table[0, :3] = np.concatenate([CENTRES, SCORES[:, None] / 0.95, np.eye(CLASSES)[LABELS] * 0.95], 1)
    return table


ULTRALYTICS = {"task": "detect", "stride": "32", "batch": "1", "imgsz": "[64, 64]", "args": "{'nms': True, 'batch': 1}",
               "names": "{0: 'a', 1: 'b', 2: 'c'}"}  # fmt: skip


def networks(folder: Path) -> list[Path]:
    unit = BOXES / SIDE
    given = np.arange(20)[None] < 3
    lists = {"labels": LABELS[None], "boxes": unit[None], "scores": SCORES[None]}
    efficient = {"num_dets": np.int32([[3]]), "det_boxes": rows()[..., :4],
                 "det_scores": np.where(given, rows()[..., 4], 0.9).astype(np.float32),
                 "det_classes": rows()[..., 5].astype(np.int32)}  # fmt: skip
    logits = np.where(np.eye(CLASSES)[LABELS] > 0, np.log(SCORES / (1 - SCORES))[:, None], -9).astype(np.float32)
    y_first = [1, 0, 3, 2]  # order of TensorFlow's box coordinates, for any output names
    efficientdet = np.concatenate([np.zeros((3, 1)), BOXES[:, y_first], SCORES[:, None], LABELS[:, None] + 1], 1)
    lite = {"output_0": unit[None, :, y_first], "output_1": LABELS[None].astype(np.float32), "output_2": SCORES[None]}
    return [
        write(folder / "efficientdet.onnx", {}, detections=efficientdet[None].astype(np.float32)),
        write(folder / "lite.onnx", {}, **lite),
        write(folder / "metadata.onnx", ULTRALYTICS, output0=rows()),
        write(folder / "v5.onnx", {}, output=objectness(252)),
        write(folder / "lists.onnx", {}, **lists),
        write(folder / "torchvision.onnx", {}, boxes=BOXES, labels=LABELS + 1, scores=SCORES),
        write(folder / "efficient.onnx", {}, **efficient),
        write(folder / "detr.onnx", {}, pred_logits=logits[None], pred_boxes=CENTRES[None] / SIDE),
    ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Data set of three images with the same objects."""
    for kind in ("images", "labels"):
        (tmp_path / "data" / kind / "val").mkdir(parents=True)
    lines = [f"{label} {(x + w / 2) / 64} {(y + hh / 2) / 48} {w / 64} {hh / 48}" for label, x, y, w, hh in OBJECTS]
    for k in range(3):
        pixels = np.random.default_rng(k).integers(0, 256, (48, 64, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"data/images/val/{k}.png")
        (tmp_path / f"data/labels/val/{k}.txt").write_text("\n".join(lines) + "\n")
    path = tmp_path / "data/data.yaml"
    path.write_text(f"path: {path.parent}\nval: images/val\nnames:\n  0: a\n  1: b\n  2: c\n")
    return path


@pytest.mark.usefixtures("preloaded")
def test_every_box_layout_gives_its_accuracy(call: Any, data: Path, tmp_path: Path, unreported: None) -> None:
    files = networks(tmp_path)
    _, out, _ = call("run", *files, "--task", "detect", "--data", data, *QUICK, "--out", tmp_path / "run", code=0)
    guessed = "images were letterboxed and normalised by mean 0,0,0 and std 1,1,1, as the file doesn't specify them"
    assert f"v5: {guessed}" in " ".join(out.split()) and f"metadata: {guessed}" not in " ".join(out.split()), out
    assert "for BGR turn the channels in the file" in " ".join(out.split())
    with open(tmp_path / "run/results.csv", newline="") as f:
        scored = {row["model"]: float(row["map50_95"] or "nan") for row in csv.DictReader(f)}
    assert scored == {file.stem: pytest.approx(100) for file in files}


@pytest.mark.usefixtures("preloaded")
def test_misplaced_boxes_are_reported(call: Any, data: Path, tmp_path: Path, unreported: None) -> None:
    """The boxes are scaled as for an image of 32 pixels."""
    file = write(tmp_path / "half.onnx", ULTRALYTICS, output0=rows() * np.float32([0.5, 0.5, 0.5, 0.5, 1, 1]))
    out = call("run", file, "--data", data, *QUICK, "--out", tmp_path / "run", code=0)[1]
    line = "half: the boxes, read as left, top, right and bottom in pixels, hardly overlap the annotated objects"
    assert line in " ".join(out.split())


@pytest.mark.usefixtures("preloaded")
def test_ties_rank_by_image_id_as_in_pycocotools(call: Any, data: Path, tmp_path: Path) -> None:
    """Every image has the same boxes and scores; only the image with the lowest id, listed last, has objects."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    size = {"height": 48, "width": 64}
    images = [{"id": 30 - 10 * k, "file_name": f"{k}.png", **size} for k in range(3)]
    objects = [{"id": k + 1, "image_id": 10, "category_id": label, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
               for k, (label, *box) in enumerate(OBJECTS)]  # fmt: skip
    categories = [{"id": k, "name": name} for k, name in enumerate("abc")]
    truth = {"images": images, "annotations": objects, "categories": categories}
    (file := data.parent / "images/val/instances.json").write_text(json.dumps(truth))
    found = [{"image_id": image["id"], "category_id": label, "bbox": box, "score": float(score)}
             for image in images for (label, *box), score in zip(OBJECTS, SCORES, strict=True)]  # fmt: skip
    own = COCO(file)
    evaluation = COCOeval(own, own.loadRes(found), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    network = write(tmp_path / "net.onnx", ULTRALYTICS, output0=rows())
    call("run", network, "--data", file, *QUICK, "--out", tmp_path / "run", code=0)
    with open(tmp_path / "run/results.csv", newline="") as f:
        (row,) = csv.DictReader(f)
    assert float(row["map50_95"]) == pytest.approx(100 * evaluation.stats[0])


@pytest.mark.usefixtures("preloaded")
def test_additional_inputs_take_a_value(call: Any, data: Path, tmp_path: Path, unreported: None) -> None:
    """RT-DETR as exported by its authors: boxes are scaled to each image's size, an input."""
    nodes = """none = ReduceMean<axes = [1, 2, 3], keepdims = 1>(images) zero = Mul(none, no) flat = Squeeze(zero, two)
        scores = Add(flat, sure) kinds = Add(flat, found) labels = Cast<to = 7>(kinds)
        sizes = Cast<to = 1>(orig_target_sizes) both = Concat<axis = 1>(sizes, sizes) sides = Unsqueeze(both, one)
        boxes = Mul(sides, unit)"""
    graph = f"""(float[N, 3, {SIDE}, {SIDE}] images, int64[N, 2] orig_target_sizes)
        => (int64[N, 3] labels, float[N, 3, 4] boxes, float[N, 3] scores) {{ {nodes} }}"""
    stored = {"no": np.float32(0), "two": np.array([2, 3]), "one": np.array([1]), "sure": SCORES[None],
              "found": LABELS[None].astype(np.float32), "unit": BOXES[None] / SIDE}  # fmt: skip
    onnx_text.write(tmp_path / "detr.onnx", graph, **stored)
    words = ("detr.onnx", "--task", "detect", "--data", data, "--seconds", 0.03, "--batch", 2)
    code, out, _ = call("eval", *words, "--out", "unfed")
    assert code == 3 and "give --input orig_target_sizes=VALUE" in " ".join(out.split()), out
    _, out, _ = call("eval", *words, "--input", f"orig_target_sizes={SIDE}", "--out", "fed", code=0)
    assert "mAP50-95 of boxes 100.00 %" in out, out


@pytest.mark.usefixtures("preloaded")
def test_the_data_gives_the_keypoint_count_the_file_lacks(
    call: Any, data: Path, tmp_path: Path, unreported: None
) -> None:
    """16 values per anchor fit 3 classes and 3 keypoints; 225 values of 16 anchors would fit keypoints alone."""
    for file in (data.parent / "labels/val").glob("*.txt"):
        objects = [line.split() for line in file.read_text().splitlines()]
        file.write_text("".join(" ".join([*one, *[*one[1:3], "2"] * 3]) + "\n" for one in objects))
    data.write_text(data.read_text() + "kpt_shape: [3, 3]\n")
    table = np.zeros((225, 16), np.float32)
    table[:, :4] = 20
    kept = np.concatenate([CENTRES[:, :2], np.full((3, 1), 0.9)], 1)
    table[:3] = np.concatenate([CENTRES, np.eye(CLASSES)[LABELS] * SCORES[:, None], kept, kept, kept], 1)
    file = write(tmp_path / "pose.onnx", {}, output=np.ascontiguousarray(table.T[None]))
    model = onnx.load(file)
    for axis in model.graph.output[0].type.tensor_type.shape.dim[1:]:
        axis.dim_param = f"free{axis.dim_value}"
    onnx.save(model, file)
    call("run", file, "--task", "pose", "--data", data, *QUICK, "--out", tmp_path / "run", code=0)
    with open(tmp_path / "run/results.csv", newline="") as f:
        (row,) = csv.DictReader(f)
    assert [float(row[column]) for column in ("map50_95", "box_map50_95")] == [pytest.approx(100)] * 2


@pytest.mark.usefixtures("preloaded")
def test_pose_models_with_several_classes_need_their_number(call: Any, data: Path, tmp_path: Path) -> None:
    """Nine values fit two keypoints (of three values) and three classes, or four keypoints (of two) and a class."""
    for file in (data.parent / "labels/val").glob("*.txt"):
        objects = [line.split() for line in file.read_text().splitlines()]
        file.write_text("".join(" ".join([*one, *[*one[1:3], "2"] * 2]) + "\n" for one in objects))
    data.write_text(data.read_text() + "kpt_shape: [2, 3]\n")
    file = write(tmp_path / "pose.onnx", {}, output=np.zeros((1, 13, 8400), np.float32))
    words = ("run", file, "--task", "pose", "--data", data, "--backend", "onnxruntime", "--dry-run")
    code, _, error = call(*words)
    assert code == 2 and "has 2 keypoints" in error and error.rstrip().endswith(f"or --classes {CLASSES}")
    call(*words, "--classes", CLASSES, code=0)


@pytest.mark.usefixtures("preloaded")
def test_unknown_layouts_are_timed_but_refused_where_boxes_are_needed(
    call: Any, data: Path, tmp_path: Path, unreported: None
) -> None:
    """Predictions lack a sigmoid in a file with detection metadata; `run` only times, the others need boxes."""
    raw = np.random.default_rng(0).normal(0, 40, (1, 7, 84)).astype(np.float32)
    file = write(tmp_path / "raw.onnx", ULTRALYTICS, output0=raw)
    _, out, _ = call("run", file, *QUICK, "--out", tmp_path / "run", code=0)
    assert "raw: no boxes are read from the outputs (output0 1x7x84): the values read as scores go from " in out
    with open(tmp_path / "run/results.csv", newline="") as f:
        (row,) = csv.DictReader(f)
    assert row["status"] == "ok"
    assert float(row["latency_model_ms_median"]) > 0
    reason = "no boxes are read from the outputs (output0 1x7x84)"
    code, out, errors = call(
        "eval", file, "--data", data, "--seconds", 0.03, "--warmup", 0.02, "--out", tmp_path / "eval"
    )
    assert code == 2 and errors.splitlines()[-1].startswith(f"dyno: {reason}") and "onnxruntime" in out
    assert "have no labels" not in out
    words = (
        "--json", tmp_path / "boxes.jsonl", "--backend", "onnxruntime", "--rounds", 1, "--out", tmp_path / "video",
    )  # fmt: skip
    code, _, errors = call("bench", "video", data.parent / "images/val", "--model", file, *words)
    assert code == 2 and reason in errors.splitlines()[-1]


@pytest.mark.usefixtures("preloaded")
def test_a_class_count_that_contradicts_the_outputs_is_refused(refused: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "v8.onnx", {}, output0=np.zeros((1, 7, 84), np.float32))
    line = refused("run", file, "--task", "detect", "--classes", 9, "--dry-run")
    assert "gives 1x7x84, which has 3 classes for detect, not 9; check --task and --classes" in line


@pytest.mark.usefixtures("preloaded")
def test_videos_have_the_boxes_left_after_suppression(call: Any, data: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "net.onnx", ULTRALYTICS, output0=rows(300))
    words = ("--json", tmp_path / "boxes.jsonl", "--rounds", 1, "--backend", "onnxruntime", "--out", tmp_path / "run")
    call("bench", "video", data.parent / "images/val", "--model", file, *words, code=0)
    frames = [json.loads(line) for line in (tmp_path / "boxes.jsonl").read_text().splitlines()]
    assert len(frames) == 3
    for frame in frames:
        found = [(box["class"], *box["box"]) for box in frame["boxes"]]
        assert found == [(label, x, y, x + w, y + hh) for label, x, y, w, hh in OBJECTS]


Arrays = dict[str, np.ndarray]
QUICK_SUPPRESSED = "--rounds 1 --seconds 0.03 --block 0.01 --warmup 0.01 --boundaries model --routes usual".split()
ENGINES = ("--backend", "onnxruntime,openvino")


def rows_of(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with open(folder / "results.csv", newline="") as f:
        return {(row["model"], row["backend"]): row for row in csv.DictReader(f)}


def stored(folder: Path, model: str, backend: str) -> Path:
    return folder / "trials" / rows_of(folder)[model, backend]["trial"] / "r0" / "outputs.npz"


@pytest.fixture
def run(call: Any, tmp_path: Path, unreported: None) -> Path:
    """Run of both kinds of outputs, with ONNX Runtime and OpenVINO, on random photographs."""
    files = [suppressing_net.write(tmp_path / f"{kind}.onnx", kind) for kind in suppressing_net.OUTPUTS]
    drawn.photographs(tmp_path / "photos", count=5, height=64, width=64, block=8)
    call("run", *files, *QUICK_SUPPRESSED, *ENGINES, "--data", tmp_path / "photos", "--out", tmp_path / "run", code=0)
    return tmp_path / "run"


def changed(run: Path, change: Callable[[Arrays], Arrays]) -> Path:
    """Copy the run, with changed OpenVINO outputs of the file "separate"."""
    copy = run.with_name(f"{run.name}-{change.__name__}")
    shutil.copytree(run, copy)
    path = stored(copy, "separate", "openvino")
    np.savez(path, **change(dict(np.load(path))))
    return copy


def other_order(arrays: Arrays) -> Arrays:
    """Reverse the order of each image's boxes."""
    ends = np.cumsum(arrays["rows:boxes"])
    order = np.concatenate([np.arange(a, b)[::-1] for a, b in zip([0, *ends[:-1]], ends, strict=True)])
    return {name: a[order] if name.startswith("output:") else a for name, a in arrays.items()}


def moved(arrays: Arrays) -> Arrays:
    """Move every box two pixels to the right."""
    return {name: a + np.float32([2, 0, 2, 0]) if name == "output:boxes" else a for name, a in arrays.items()}


def renamed(arrays: Arrays) -> Arrays:
    """Change every box's label."""
    return {name: (a + 1) % suppressing_net.CLASSES if name == "output:labels" else a for name, a in arrays.items()}


def lost(arrays: Arrays) -> Arrays:
    """Remove the last image's boxes."""
    last = int(arrays["rows:boxes"][-1])
    kept = {name: a[:-last] if name.startswith("output:") else a for name, a in arrays.items()}
    return kept | {name: np.r_[a[:-1], 0] for name, a in arrays.items() if name.startswith("rows:")}


def empty(arrays: Arrays) -> Arrays:
    """Remove all boxes."""
    kept = {name: a[:0] if name.startswith("output:") else a for name, a in arrays.items()}
    return kept | {name: a * 0 for name, a in arrays.items() if name.startswith("rows:")}


@pytest.mark.usefixtures("preloaded")
def test_tied_boxes_may_be_reordered_and_wrong_boxes_are_detected(run: Path, call: Any) -> None:
    table = rows_of(run)
    assert {key: row["outputs"] for key, row in table.items() if row["outputs"]} == {
        ("separate", "openvino"): "agree", ("one", "openvino"): "agree",
    }  # fmt: skip
    both = [dict(np.load(stored(run, "separate", backend))) for backend in ("onnxruntime", "openvino")]
    scores = both[0]["output:scores"]
    assert len(np.unique(scores)) <= 3 and len(scores) > 50  # nearly every box has a tie
    assert not any(name.startswith("topk") for arrays in both for name in arrays)  # boxes are not read as classes
    assert dict(np.load(stored(run, "one", "openvino")))["rows:boxes6"].sum() == len(scores)
    for change, verdict in [(other_order, "agree"), *((f, "wrong outputs") for f in (moved, renamed, lost, empty))]:
        copy = changed(run, change)
        code, out, _ = call("show", copy, "--format", "csv", "--table", "trials")
        by_trial = {(r["model"], r["backend"]): r for r in csv.DictReader(out.splitlines())}
        row = by_trial["separate", "openvino"]
        assert (code, row["outputs"]) == (0, verdict), change.__name__
        assert (row["verdict"].startswith("wrong outputs: ") and not row["speedup"]) == (verdict != "agree")
        code, out, _ = call("show", copy, "--format", "csv", "--table", "agreement")
        shares = {r["trial"].split()[0]: float(r["close"]) for r in csv.DictReader(out.splitlines())}
        assert shares["one"] == 1 and (shares["separate"] == 1) == (verdict == "agree"), change.__name__


@pytest.mark.usefixtures("preloaded")
def test_torchvision_detectors_run_single_images_and_as_onnx(
    call: Any, refused: Any, tmp_path: Path, unreported: None
) -> None:
    name = "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn"
    assert "one image at a time; omit the batch, 8" in refused("run", name, "--batch", "1,8", "--dry-run")
    drawn.photographs(tmp_path / "photos", count=5, height=64, width=64, block=8)
    words = [*QUICK_SUPPRESSED, "--size", 96, "--batch", 1, "--data", tmp_path / "photos", "--out", tmp_path / "run"]
    call("run", name, *words, "--backend", "pytorch,onnxruntime", code=0)
    table = {backend: row for (_, backend), row in rows_of(tmp_path / "run").items()}
    assert table["onnxruntime"]["outputs"] == "agree" and table["pytorch"]["status"] == "ok"
    assert table["onnxruntime"]["route"].startswith("torchscript")
    arrays = np.load(stored(tmp_path / "run", "fasterrcnn_mobilenet_v3_large_320_fpn", "onnxruntime"))
    assert arrays["rows:output"].sum() > 20  # the random weights are scaled to detect something


PLANTED = ("ChangedWeight", "ChangedBlob", "OtherBranch")
TESTS = Path(__file__).parent


@pytest.mark.usefixtures("preloaded", "unreported")
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_planted_wrong_graphs_come_first_and_are_never_ranked(dyno: Any, tmp_path: Path, precision: str) -> None:
    (tmp_path / "net.py").write_text(planted_backends.NET)
    photos = drawn.photographs(tmp_path / "photos", count=80, height=32, width=32, block=16)
    planted = [
        f"planted_backends:{name}@precision={'fp32' if name == 'OtherBranch' else precision}" for name in PLANTED
    ]
    honest = ["pytorch@precision=fp32", f"onnxruntime@precision={precision}", f"openvino@precision={precision}"]
    words = ("--data", photos, "--size", 32, "--rounds", 1, "--seconds", 0.05, "--block", 0.01,
             "--warmup", 0.02, "--routes", "usual", "--out", tmp_path / "r")  # fmt: skip
    environment = {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    done = dyno(
        "run", f"{tmp_path / 'net.py'}:net", "--backend", ",".join([*honest, *planted]), *words, env=environment, code=3
    )
    shown = dyno("show", tmp_path / "r", "--format", "csv", env=environment)
    import csv
    import io

    rows = {row["backend"]: row for row in csv.DictReader(io.StringIO(shown.stdout))}
    for name in PLANTED:
        row = rows[f"planted_backends:{name}"]
        assert row["status"] == "ok" and row["outputs"] == "wrong outputs", row
        assert row["speedup"] == "" and row["verdict"].startswith("wrong outputs: off by")
    assert {rows[name]["outputs"] for name in ("onnxruntime", "openvino")} == {"agree"}
    verdict = done.stdout[done.stdout.index("gave wrong outputs") :]
    assert not any(f"fastest is planted_backends:{name}" in verdict for name in PLANTED)
