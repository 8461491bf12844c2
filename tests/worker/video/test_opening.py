"""What reads and writes a video: PyAV where it is new enough, else OpenCV, and it is said."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

import moving_photos as videos
from dyno.worker.spec import UserError
from dyno.worker.video import opening
from dyno.worker.video.decoding import VideoSource
from dyno.worker.video.encoding import VideoSink
from dyno.worker.video.opening import CaptureSource, WriterSink
from dyno.worker.video.options import VideoOptions

pytest.importorskip("cv2")
pytest.importorskip("av")


def test_a_pyav_that_is_too_old_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip, out = videos.write(tmp_path / "clip.mp4", videos.pictures(3)), tmp_path / "out.avi"
    source = opening.open_source(str(clip), VideoOptions())
    assert isinstance(source, VideoSource) and isinstance(opening.open_sink(out, source, ""), VideoSink)
    assert not opening.describe_old_pyav()
    monkeypatch.setattr(opening.metadata, "version", lambda name: "17.0.1")
    source = opening.open_source(str(clip), VideoOptions())
    assert isinstance(source, CaptureSource) and isinstance(opening.open_sink(out, source, ""), WriterSink)
    assert len(list(source.read())) == 3
    said = opening.describe_old_pyav()
    assert said.startswith("PyAV 17.0.1 is too old, so OpenCV reads and writes; ") and said.endswith("17.1 or newer")


def test_opencv_refuses_cover_art_and_keeps_the_shape_of_pixels(tmp_path: Path) -> None:
    clip = videos.write(tmp_path / "clip.mp4", videos.pictures(3))
    with pytest.raises(
        UserError, match=r"OpenCV reads the cover art of cover.mp4 in place of its video; PyAV .*install"
    ):
        CaptureSource(str(videos.with_cover(clip, tmp_path / "cover.mp4")), live=False)

    def wide(stream: Any) -> None:
        stream.codec_context.sample_aspect_ratio = Fraction(2)
        stream.set_display_rotation(90)

    source = CaptureSource(str(videos.write(tmp_path / "wide.mp4", videos.pictures(3), set_up=wide)), live=False)
    out = WriterSink(tmp_path / "out.avi", source)
    for frame in source.read():
        assert (frame.size, frame.picture.aspect) == ((384, 288), Fraction(1, 2))
        out.write(frame)
    out.close()
    assert {frame.shape for frame in videos.read(tmp_path / "out.avi")[0]} == {(384, 144, 3)}


def test_a_file_that_ends_before_its_end_seems_cut_short(tmp_path: Path) -> None:
    whole = tmp_path / "whole.mkv"
    with av.open(str(whole), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height = 64, 48
        noise = np.random.default_rng(0).integers(0, 255, (50, 48, 64, 3), np.uint8)
        for image in noise:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    (tmp_path / "cut.mkv").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    source, cut = VideoSource(str(whole), False), VideoSource(str(tmp_path / "cut.mkv"), False)
    assert (len(list(source.read())), source.notes) == (50, [])
    count = len(list(cut.read()))
    assert 10 < count < 30
    assert cut.notes == [f"cut.mkv ends after {count / 10:.1f} of 5.0 s: it seems to be cut short"]


@pytest.mark.parametrize("suffix", [".webp", ".png", ".tif"])
def test_images_are_upright_and_the_first_of_several(tmp_path: Path, suffix: str) -> None:
    exif, photo = Image.Exif(), Image.fromarray(next(videos.pictures(1, 64, 96)))
    exif[0x112] = 6  # to be turned clockwise by 90 degrees
    photo.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    others = [Image.new("RGB", (96, 64), colour) for colour in ("white", "red")]
    photo.save(tmp_path / f"moving{suffix}", save_all=True, append_images=others)
    source = opening.open_source(str(tmp_path), VideoOptions())
    pictures = {frame.name: frame.picture.rgb().astype(int) for frame in source.read()}
    assert np.abs(pictures["turned.jpg"] - np.asarray(photo.rotate(-90, expand=True))).mean() < 5
    assert np.abs(pictures[f"moving{suffix}"] - np.asarray(photo)).mean() < 8
    assert source.notes == [f"moving{suffix} holds 3 pictures; the first is used"]


def test_numbers_of_numpy_are_numbers() -> None:
    options = VideoOptions(streams=np.int64(2), confidence=np.float32(0.5))  # type: ignore[arg-type]
    assert json.loads(json.dumps(dataclasses.asdict(options)))["streams"] == 2
    assert options.confidence == 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"streams": "2"}, "streams is '2'; it must be a whole number"),
        ({"confidence": None}, "confidence is None; it must be a number"),
        ({"frame_size": 960}, "frame_size is 960; it must be text"),
        ({"confidence": 1.5}, "confidence is 1.5; it must be between 0 and 1"),
    ],
)
def test_a_wrong_option_is_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        VideoOptions(**options)
    assert str(caught.value) == said
