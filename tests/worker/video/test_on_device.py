"""Frames prepared by PyTorch on the engine's device: the same pixels and boxes as on the host."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moving_photos
from dyno.worker.backend import DeviceBinding
from dyno.worker.spec import Dims, Preprocess, Tensor
from dyno.worker.tasks.detect import DETECT, BoxReader
from dyno.worker.video import media
from dyno.worker.video.decoding import VideoSource
from dyno.worker.video.media import Preparation, Surface
from dyno.worker.video.on_device import DevicePreparation, Feed, drop_low_scores
from refusals import refuses

torch, av = pytest.importorskip("torch"), pytest.importorskip("av")

NORMAL = Preprocess((0.1, 0.2, 0.3), (1.0, 0.5, 0.25), letterbox=True)
# Tolerated levels of 255: both interpolate and round, and FFmpeg's own conversion of planes is coarse.
ROUNDED, COARSE = 1.01, 4.01


def ends() -> DeviceBinding:
    return DeviceBinding(torch, torch.device("cpu"), lambda *_: None, lambda _: {})


def decoded(height: int, width: int, matrix: int) -> Any:
    rng = np.random.default_rng(height)
    frame = media.make_blank(height, width)
    for plane in media.read_planes(frame):  # smooth like photographs, and in range
        coarse = rng.integers(60, 190, (2 + plane.shape[0] // 16, 2 + plane.shape[1] // 16))
        plane[:] = np.kron(coarse, np.ones((16, 16)))[: plane.shape[0], : plane.shape[1]]
    frame.colorspace = matrix
    return frame


def picture(kind: str, height: int, width: int) -> media.Picture:
    if kind == "rgb":
        return media.Rgb(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))
    made = media.Planes(decoded(height, width, int(kind)), media.Converter())
    made.height, made.width = height, width
    return made


def surface(like: Any) -> Surface:
    """Return a frame of the same values as from a GPU's decoder, in the host's memory."""
    made = av.VideoFrame(like.width, like.height, "nv12")
    light, blue, red = media.read_planes(like)
    rows = [np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size) for plane in made.planes]
    rows[0][:, : like.width] = light
    rows[1][:, : like.width] = np.stack([blue, red], -1).reshape(len(blue), -1)
    made.colorspace, made.color_range = like.colorspace, like.color_range
    return Surface(made, media.Converter())


def both(shown: list[media.Picture], tensor: Tensor, size: int, preprocess: Preprocess = NORMAL) -> Any:
    """Return the pictures as prepared by the host and by PyTorch."""
    dims, results = Dims(tensor.shape[0], size, size), []
    for one in (Preparation(preprocess, [tensor], dims), DevicePreparation(preprocess, [tensor], dims, ends())):
        feed = one.new_feed()
        for place, each in enumerate(shown):
            one.write(each, feed, place)
        one.complete(feed, len(shown))
        one.settle(feed)
        results.append((feed.arrays() if isinstance(feed, Feed) else feed)[tensor.name][: len(shown)])
    return results


def image_of(channels: int, batch: int, size: int, dtype: str = "float32") -> Tensor:
    return Tensor("images", dtype, (batch, channels, size, size))


@pytest.mark.parametrize(("kind", "most"), [("rgb", ROUNDED), ("1", COARSE), ("5", COARSE), ("2", COARSE)])
@pytest.mark.parametrize(("height", "width"), [(54, 96), (97, 31), (64, 64), (13, 20), (31, 17)])
def test_device_pixels_match_the_host(kind: str, most: float, height: int, width: int) -> None:
    host, device = both([picture(kind, height, width) for _ in range(3)], image_of(3, 4, 64), 64)
    levels = 255 * np.asarray(NORMAL.std).reshape(1, 3, 1, 1)
    assert np.abs((host - device) * levels).max() <= most
    assert np.abs((host - device) * levels).mean() <= most / 2


@pytest.mark.parametrize("matrix", [1, 5, 2])
def test_frames_decoded_on_the_device_match_the_host(matrix: int) -> None:
    frame, convert = decoded(54, 96, matrix), media.Converter()
    there, here = surface(frame), media.Planes(frame, convert)
    made = DevicePreparation(NORMAL, [image_of(3, 2, 64)], Dims(2, 64, 64), ends())
    feed = made.new_feed()
    made.write(there, feed, 0)
    made.write(here, feed, 1)
    made.complete(feed, 2)
    first, second = feed.arrays()["images"]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(there.rgb(), here.rgb())
    assert there.planes().tags == here.tags and there.reopen().matrix == there.matrix


def test_device_frames_are_drawn_on_in_host_memory() -> None:
    shown = surface(decoded(54, 96, 1))
    before, untouched = shown.rgb().copy(), shown.reopen()
    for layer in shown.layers():
        layer.array[:] = 128 // layer.step
    assert np.abs(shown.rgb().astype(int) - before).max() > 20
    np.testing.assert_array_equal(shown.copy().rgb(), shown.rgb())
    np.testing.assert_array_equal(untouched.rgb(), before)


def test_mixed_image_formats_share_a_batch_without_leftovers() -> None:
    tensor = image_of(3, 3, 32)
    made = DevicePreparation(NORMAL, [tensor], Dims(3, 32, 32), ends())
    feed, host = made.new_feed(), Preparation(NORMAL, [tensor], Dims(3, 32, 32))
    for turn in ([("rgb", 9, 30), ("1", 30, 10), ("rgb", 20, 40)], [("rgb", 30, 9), ("rgb", 9, 30), ("5", 32, 32)]):
        shown = [picture(*what) for what in turn]
        expected = host.new_feed()
        for place, one in enumerate(shown):
            made.write(one, feed, place)
            host.write(one, expected, place)
        made.complete(feed, 3)
        assert np.abs(feed.arrays()["images"] - expected["images"]).max() * 255 * 0.5 <= 2 * COARSE


@pytest.mark.parametrize("tensor", [
    image_of(1, 2, 32), image_of(3, 2, 32, "uint8"), Tensor("images", "float32", (2, 32, 32, 3)),
    image_of(3, 2, 32, "float16"),
], ids=["grey", "raw", "channels last", "half"])  # fmt: skip
def test_other_input_types_and_layouts_match_the_host(tensor: Tensor) -> None:
    plain = Preprocess((0.0,) * 3, (1.0,) * 3, letterbox=True)
    host, device = both([picture("rgb", 20, 40), picture("rgb", 20, 40)], tensor, 32, plain)
    assert host.shape == device.shape and device.dtype == np.dtype(tensor.dtype)
    difference = np.abs(host.astype(np.float32) - device.astype(np.float32)).max()
    assert difference * (1 if tensor.dtype == "uint8" else 255) <= 1.2


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("confidence", [0.0, 0.25, 0.9, 1.0])
def test_dropping_low_scores_on_the_device_keeps_the_boxes(dtype: str, confidence: float) -> None:
    rng, classes = np.random.default_rng(1), 3
    scores = rng.random((4, classes, 200)) ** 4
    scores[1] = 0  # an empty image
    scores[0, 0, :5] = confidence  # exactly the threshold
    boxes = np.concatenate([rng.random((4, 2, 200)) * 64, 1 + rng.random((4, 2, 200)) * 20], 1)
    whole = np.concatenate([boxes, scores], 1).astype(dtype)
    reader = BoxReader(DETECT, classes, confidence=confidence)
    drop = drop_low_scores(torch, reader)
    everything = {"output": torch.from_numpy(whole), "more": torch.ones(2)}
    assert drop(everything) is everything, "no layout was chosen yet"
    sizes = np.full((4, 2), 64)
    first = reader.read_detections({"output": whole.astype(np.float32)}, sizes, (64, 64))
    seen = drop(everything)
    assert list(seen) == ["output", "more"]
    assert seen["output"].shape[2] < 200 or confidence == 0
    fewer = {"output": seen["output"].numpy().astype(np.float32)}
    found = [first, reader.read_detections(fewer, sizes, (64, 64))]
    for all_, few in zip(*found, strict=True):
        np.testing.assert_array_equal(all_.boxes, few.boxes)
        np.testing.assert_array_equal(all_.scores, few.scores)
        np.testing.assert_array_equal(all_.classes, few.classes)


def test_outputs_in_another_layout_are_unchanged() -> None:
    rng, reader = np.random.default_rng(1), BoxReader(DETECT, confidence=0.5)
    corners = rng.random((1, 300, 2)) * 30
    rows = np.concatenate([corners, corners + 20, rng.random((1, 300, 1)), rng.integers(0, 9, (1, 300, 1))], 2)
    everything = {"output0": torch.from_numpy(rows.astype(np.float32))}
    reader.read_detections({"output0": everything["output0"].numpy()}, np.full((1, 2), 64), (64, 64))
    assert drop_low_scores(torch, reader)(everything) is everything


def test_a_missing_device_decoder_is_reported_instead_of_the_video(tmp_path: Path) -> None:
    video = moving_photos.write(tmp_path / "video.mp4", moving_photos.pictures(3, 54, 96))
    if torch.cuda.is_available():
        pytest.skip("this machine may have the decoder")
    refuses(r"decoder of cuda:0 can't be used .*omit --decode", list, VideoSource(str(video), False, "cuda:0").read())
    (tmp_path / "none.mp4").write_bytes(b"none")
    refuses("is not a video", VideoSource, str(tmp_path / "none.mp4"), False, "cuda:0")
