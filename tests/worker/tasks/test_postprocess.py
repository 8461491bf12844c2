"""Post-processing equals the reference libraries: the same boxes, scores, masks and keypoints."""

from typing import Any

import numpy as np
import pytest

from dyno.worker.inputs.specs import fit_geometry
from dyno.worker.spec import UserError
from dyno.worker.tasks.detect import DETECT, BoxReader, Detect
from dyno.worker.tasks.pose import POSE
from dyno.worker.tasks.postprocess import Detections, encode_mask, suppress_overlaps
from dyno.worker.tasks.segment import SEGMENT

SIZE = (320, 256)
IMAGES = np.array([[480, 640], [333, 127], [320, 256], [50, 41]])
CLASSES = 5


def predictions(seed: int, extra: int = 0, anchors: int = 400, classes: int = CLASSES, images: int = 4) -> np.ndarray:
    """Draw clusters of boxes around a few places, so that much is suppressed, with scores of all sizes."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(0, SIZE[1], (images, 2, 12))[:, :, rng.integers(0, 12, anchors)]
    centres = centres + rng.normal(0, 4, centres.shape)
    sides = np.exp(rng.normal(3.5, 0.4, centres.shape))
    scores = rng.beta(0.3, 3, (images, classes, anchors))
    return np.concatenate([centres, sides, scores, rng.normal(0, 1, (images, extra, anchors))], 1).astype(np.float32)


def reference(raw: np.ndarray, classes: int, **settings: float) -> list[np.ndarray]:
    """Return ultralytics' NMS results, in input pixels: corners, score, class, then the anchors' other values."""
    torch = pytest.importorskip("torch")
    nms = pytest.importorskip("ultralytics.utils.nms")
    options = {"conf_thres": 0.001, "iou_thres": 0.7, "max_det": 300, **settings}
    found = nms.non_max_suppression(torch.from_numpy(raw), nc=classes, multi_label=True, **options)
    return [rows.numpy() for rows in found]


def detections(
    task: Detect, outputs: list[np.ndarray], images: np.ndarray, classes: int, keypoints: tuple[int, ...] = (),
    **settings: Any,
) -> list[Detections]:  # fmt: skip
    named = {f"output{number}": array for number, array in enumerate(outputs)}
    return BoxReader(task, classes, keypoints, **settings).read_detections(named, images, SIZE)


def decode(counts: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.repeat(np.arange(len(counts)) % 2, counts).reshape(width, height).T.astype(bool)


@pytest.mark.parametrize("seed", range(5))
def test_suppression_matches_torchvision(seed: int) -> None:
    torch, ops = pytest.importorskip("torch"), pytest.importorskip("torchvision").ops
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 100, (500, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(0, 60, (500, 2))], 1).astype(np.float32)
    labels = rng.integers(0, 4, 500)
    scores = np.sort(rng.uniform(0, 1, 500))[::-1].astype(np.float32).copy()
    want = ops.batched_nms(*map(torch.from_numpy, (boxes, scores, labels)), 0.5).numpy()
    np.testing.assert_array_equal(suppress_overlaps(boxes, labels, 0.5, 500), want)
    np.testing.assert_array_equal(suppress_overlaps(boxes, labels, 0.5, 7), want[:7])


def test_suppression_handles_touching_equal_and_flat_boxes() -> None:
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 10], [10, 0, 20, 10], [5, 5, 5, 5], [5, 5, 5, 5]], np.float32)
    same, other = np.zeros(5, int), np.array([0, 1, 0, 0, 0])
    assert suppress_overlaps(boxes, same, 0.7, 9).tolist() == [0, 2, 3, 4]
    assert suppress_overlaps(boxes, other, 0.7, 9).tolist() == [0, 1, 2, 3, 4]
    assert suppress_overlaps(boxes[:0], same[:0], 0.7, 9).tolist() == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{}, {"confidence": 0.25, "iou": 0.45, "max_detections": 20}])
def test_boxes_match_ultralytics(seed: int, settings: dict[str, float]) -> None:
    torch, ops = pytest.importorskip("torch"), pytest.importorskip("ultralytics.utils.ops")
    raw = predictions(seed)
    names = {"confidence": "conf_thres", "iou": "iou_thres", "max_detections": "max_det"}
    wanted = reference(raw, CLASSES, **{names[key]: value for key, value in settings.items()})
    found = detections(DETECT, [raw], IMAGES, classes=CLASSES, **settings)
    assert len(found) == 4
    for got, want, image in zip(found, wanted, IMAGES, strict=True):
        assert len(got.scores) == len(want) > 5
        np.testing.assert_array_equal(got.scores, want[:, 4])
        np.testing.assert_array_equal(got.classes, want[:, 5])
        boxes = ops.scale_boxes(SIZE, torch.from_numpy(want[:, :4].copy()), tuple(image.tolist())).numpy()
        np.testing.assert_allclose(got.boxes, boxes, atol=1e-3)
        assert got.boxes.dtype == np.float32
        assert got.classes.dtype == np.int32


def test_single_class_and_fp16_outputs_are_read() -> None:
    raw = predictions(1, classes=1)
    found = detections(DETECT, [raw], IMAGES, classes=1)
    assert [len(d.scores) for d in found] == [len(rows) for rows in reference(raw, 1)]
    half = detections(DETECT, [raw.astype(np.float16)], IMAGES, classes=1, confidence=0.3)
    assert all(d.boxes.dtype == np.float32 and (np.diff(d.scores) <= 0).all() for d in half)


def test_masks_match_ultralytics() -> None:
    torch, ops = pytest.importorskip("torch"), pytest.importorskip("ultralytics.utils.ops")
    raw = predictions(3, extra=8, anchors=60)
    coarse = np.random.default_rng(5).normal(0, 1, (4, 8, 10, 8)).astype(np.float32)
    smooth = torch.nn.functional.interpolate(torch.from_numpy(coarse), (80, 64), mode="bicubic")  # like a network's
    found = detections(SEGMENT, [raw, smooth.numpy()], IMAGES, classes=CLASSES, confidence=0.1)
    for k, (want, image) in enumerate(zip(reference(raw, CLASSES, conf_thres=0.1), IMAGES.tolist(), strict=True)):
        boxes = ops.scale_boxes(SIZE, torch.from_numpy(want[:, :4].copy()), tuple(image))
        masks = ops.process_mask_native(smooth[k], torch.from_numpy(want[:, 6:].copy()), boxes, tuple(image)).numpy()
        got = np.stack([decode(counts, *image) for counts in found[k].masks or []])
        both, either = (got & (masks > 0)).sum((1, 2)), (got | (masks > 0)).sum((1, 2))
        assert both.sum() / either.sum() > 0.999
        assert (both[either > 300] / either[either > 300]).min(initial=1) > 0.99


def test_keypoints_match_ultralytics() -> None:
    torch, ops = pytest.importorskip("torch"), pytest.importorskip("ultralytics.utils.ops")
    raw = predictions(4, extra=12)
    raw[:, 4 + CLASSES :] = raw[:, 4 + CLASSES :] * 90 + 100
    found = detections(POSE, [raw], IMAGES, classes=CLASSES, keypoints=(4, 3), confidence=0.05)
    for got, want, image in zip(found, reference(raw, CLASSES, conf_thres=0.05), IMAGES.tolist(), strict=True):
        points = torch.from_numpy(want[:, 6:].reshape(-1, 4, 3).copy())
        np.testing.assert_allclose(got.keypoints, ops.scale_coords(SIZE, points, tuple(image)).numpy(), atol=1e-3)


def test_run_lengths_match_pycocotools() -> None:
    coco = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    for _ in range(60):
        height, width = rng.integers(1, 9, 2).tolist()
        top, left = rng.integers(0, height), rng.integers(0, width)
        part = rng.uniform(size=(rng.integers(0, height - top + 1), rng.integers(0, width - left + 1))) < 0.7
        image = np.zeros((height, width), np.uint8)
        image[top : top + part.shape[0], left : left + part.shape[1]] = part
        counts = encode_mask(part, top, left, height, width)
        assert counts.dtype == np.uint32
        assert counts.sum() == height * width
        np.testing.assert_array_equal(decode(counts, height, width), image)
        ours = coco.frPyObjects({"size": [height, width], "counts": counts.tolist()}, height, width)
        assert ours["counts"] == coco.encode(np.asfortranarray(image))["counts"]


def test_no_detections_give_empty_arrays() -> None:
    raw = np.zeros((1, 4 + CLASSES + 12, 10), np.float32)
    pose = detections(POSE, [raw], IMAGES[:1], classes=CLASSES, keypoints=(4, 3))[0]
    assert pose.boxes.shape == (0, 4)
    assert pose.keypoints is not None
    assert pose.keypoints.shape == (0, 4, 3)
    prototypes = np.zeros((1, 12, 80, 64), np.float32)
    assert detections(SEGMENT, [raw, prototypes], IMAGES[:1], classes=CLASSES)[0].masks == []


def test_non_finite_values_are_not_detections() -> None:
    raw = predictions(0, images=1)
    raw[0, 4:, :50] = np.nan
    raw[0, :2, 50:80] = np.inf
    found: Detections = detections(DETECT, [raw], IMAGES[:1], classes=CLASSES)[0]
    assert np.isfinite(found.scores).all()
    assert np.isfinite(found.boxes).all()
    assert len(found.scores)


def test_outputs_of_another_network_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"4x9x400.*no known layout with 80 classes.*batch x anchors x .5 . classes"):
        detections(DETECT, [predictions(0)], IMAGES, classes=80)
    with pytest.raises(UserError, match="prototypes"):
        detections(SEGMENT, [predictions(0)], IMAGES, classes=CLASSES)
    with pytest.raises(UserError, match="no known layout with 5 classes"):
        detections(POSE, [predictions(0)], IMAGES, classes=CLASSES, keypoints=(17, 3))


def test_boxes_are_mapped_back_through_the_letterbox() -> None:
    for height, width in IMAGES.tolist():
        _, new_height, new_width, top, left = fit_geometry(height, width, *SIZE)
        whole = np.array([left + new_width / 2, top + new_height / 2, new_width, new_height, 1.0], np.float32)
        found = detections(DETECT, [whole.reshape(1, 5, 1)], np.array([[height, width]]), classes=1)[0]
        np.testing.assert_allclose(found.boxes, [[0, 0, width, height]], atol=1e-3)


def test_detections_are_limited_to_the_best_300() -> None:
    """8,400 anchors and 80 classes, all scored above the threshold as by an untrained network."""
    raw = predictions(0, anchors=8400, classes=80, images=1)
    raw[:, 4:] = raw[:, 4:].clip(0.002)
    assert len(detections(DETECT, [raw], IMAGES[:1], classes=80)[0].scores) == 300
