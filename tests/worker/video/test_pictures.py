"""Pictures of frames: a decoder's planes, drawn on and written, look like the same pictures in RGB."""

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import moving_photos as videos
from dyno.worker.spec import UserError
from dyno.worker.tasks.postprocess import Detections, encode_mask
from dyno.worker.video import opening
from dyno.worker.video.alone import CHUNK_FRAMES, StageCopy
from dyno.worker.video.decoding import VideoSource
from dyno.worker.video.drawing import TRACK_COLOURS, draw_detections
from dyno.worker.video.encoding import VideoSink
from dyno.worker.video.media import Batch, Frame, Picture, Planes, Rgb
from dyno.worker.video.opening import CaptureSource, WriterSink
from dyno.worker.video.options import VideoOptions
from refusals import refuses

pytest.importorskip("cv2")
av = pytest.importorskip("av")


LOSSLESS = {"crf": "0", "preset": "ultrafast"}
ITU_709, FULL = 1, 2


def written(path: Path, height: int, width: int, pixels: str, codec: str, tag: int = 0, full: bool = False) -> Path:
    """Write two frames in that format, tagged with a matrix if `tag` is set."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options=LOSSLESS if codec == "libx264" else {})
        stream.height, stream.width, stream.pix_fmt = height, width, pixels
        if tag:
            stream.codec_context.colorspace = tag
        if full:
            stream.codec_context.color_range = FULL
        colours = ({"dst_colorspace": tag} if tag else {}) | ({"dst_color_range": FULL} if full else {})
        for image in videos.pictures(2, height, width):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(format=pixels, **colours)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def found(height: int, width: int) -> Detections:
    """Return a box in the middle with a mask and a keypoint, and a box that crosses a corner."""
    boxes = np.array([[width / 4 + 0.3, height / 3, width * 0.7, height * 0.8], [-9, -7, 30, 40]], np.float32)
    masks = [encode_mask(np.ones((20, 30), np.int8), height // 2, width // 2, height, width),
             encode_mask(np.zeros((4, 4), np.int8), 0, 0, height, width)]  # fmt: skip
    points = np.array([[[width / 3, height / 2, 1.0]], [[3.0, 3.0, 0.1]]], np.float32)
    return Detections(boxes, np.array([0.9, 0.6]), np.array([0, 2]), masks, points)


def drawn(picture: Picture) -> np.ndarray:
    frame = Frame(0, picture, 0, detections=found(picture.height, picture.width))
    draw_detections(frame)
    return np.array(frame.picture.rgb()).astype(int)


def decoded(path: Path) -> list[Any]:
    with av.open(str(path)) as container:
        return list(container.decode(video=0))


@pytest.mark.parametrize("tag", [0, ITU_709])
@pytest.mark.parametrize("size", [(270, 480), (271, 481)])
def test_drawing_on_planes_matches_drawing_on_rgb(tmp_path: Path, size: tuple[int, int], tag: int) -> None:
    written(tmp_path / "clip.mkv", *size, "yuv420p", "libx264" if size[0] % 2 == 0 else "ffv1", tag)
    first, second = (frame.picture for frame in VideoSource(str(tmp_path / "clip.mkv"), live=False).read())
    assert isinstance(first, Planes)
    before = first.rgb().copy()
    on_planes, on_rgb = drawn(first), drawn(Rgb(before.copy()))
    difference = np.abs(on_planes - on_rgb)
    assert on_planes.shape == on_rgb.shape == (*size, 3) and difference.mean() < 3
    row, column = size[0] // 2 // 2 * 2, int(size[1] / 4 + 0.3) // 2 * 2  # on the left edge of the box
    np.testing.assert_allclose(on_planes[row - 9, column], TRACK_COLOURS[0], atol=6)
    assert difference[(on_rgb == before).all(2)].mean() < 2
    assert second.rgb().shape == (*size, 3), "the decoder's own memory is not drawn on"


@pytest.mark.parametrize("container", [".mp4", ".mkv", ".avi"])
@pytest.mark.parametrize(("pixels", "codec", "size", "tag", "full"), [
    ("yuv420p", "libx264", (270, 480), 0, False), ("yuv420p", "libx264", (270, 480), ITU_709, False),
    ("yuv420p", "libx264", (270, 480), 0, True), ("yuv420p", "ffv1", (271, 481), 0, False),
    ("yuv444p", "ffv1", (271, 481), 0, False), ("yuv422p10le", "ffv1", (270, 480), 0, False),
    ("gray", "ffv1", (270, 480), 0, False), ("rgb24", "png", (270, 480), 0, False),
    ("yuva420p", "ffv1", (270, 480), 0, False),
])  # fmt: skip
def test_every_pixel_format_is_written_without_colour_shift(
    tmp_path: Path, container: str, pixels: str, codec: str, size: tuple[int, int], tag: int, full: bool
) -> None:
    path = written(tmp_path / f"clip{'.mov' if codec == 'png' else '.mkv'}", *size, pixels, codec, tag, full)
    source = VideoSource(str(path), live=False)
    sink = VideoSink(tmp_path / f"out{container}", source, "mpeg4" if container == ".avi" else "")
    images = []
    for frame in source.read():
        images.append(frame.picture.rgb().copy())
        frame.detections = Detections(np.empty((0, 4), np.float32), np.empty(0), np.empty(0, int))
        draw_detections(frame)
        sink.write(frame)
    sink.close()
    frames = decoded(tmp_path / f"out{container}")
    assert len(frames) == len(images) == 2
    assert (frames[0].height, frames[0].width) == tuple(side + side % 2 for side in size)
    assert frames[0].format.name == "yuv420p" and int(frames[0].color_range) != FULL
    for frame, image in zip(frames, images, strict=True):
        change = frame.to_ndarray(format="rgb24")[: size[0], : size[1]].astype(int) - image
        assert np.abs(change).mean() < 8 and np.abs(change.mean((0, 1))).max() < 2, "no tint, nothing is moved"


UNEVEN_MS = [0, 40, 80, 400, 410, 420, 1000, 1040, 1500, 1510, 3000, 5000]


def copy_video(path: Path, out: Path, codec: str) -> list[str]:
    """Write the frames of a video into another; return the sentences on differences."""
    source = VideoSource(str(path), live=False)
    assert len(list(source.read())) == len(UNEVEN_MS)  # its average rate is then known
    sink = VideoSink(out, source, codec)
    for frame in source.read():
        sink.write(frame)
    return sink.close(source.left)


@pytest.mark.parametrize("suffix", [".mkv", ".ts"])
@pytest.mark.parametrize(
    ("codec", "container"), [("", ".mp4"), ("mpeg4", ".mp4"), ("mpeg4", ".mkv"), ("mjpeg", ".mov")]
)
def test_uneven_times_are_kept_by_every_codec(tmp_path: Path, suffix: str, codec: str, container: str) -> None:
    """A transport stream's clock has 90,000 ticks per second, MPEG-4's at most 65,535."""
    frames, out = videos.pictures(len(UNEVEN_MS), 64, 96), tmp_path / f"out{container}"
    uneven = videos.write(tmp_path / f"uneven{suffix}", frames, times=UNEVEN_MS, options={"bf": "0"})
    assert copy_video(uneven, out, codec) == []
    seconds = np.array(videos.read(out)[1])
    np.testing.assert_allclose(seconds - seconds[0], np.array(UNEVEN_MS) / 1000, atol=0.001)


@pytest.mark.parametrize("container", [".ts", ".mpg", ".y4m", ".ogv"])
@pytest.mark.parametrize("suffix", [".mkv", ".ts"])
def test_codecs_and_containers_of_constant_rate_are_written(tmp_path: Path, suffix: str, container: str) -> None:
    frames = videos.pictures(len(UNEVEN_MS), 64, 96)
    even = videos.write(tmp_path / f"even{suffix}", frames, options={"bf": "0"})
    assert copy_video(even, tmp_path / f"out{container}", "") == []
    seconds = np.array(videos.read(tmp_path / f"out{container}")[1])
    np.testing.assert_allclose(seconds - seconds[0], np.arange(len(UNEVEN_MS)) / videos.RATE, atol=0.002)


def test_frames_that_a_codec_cant_encode_are_refused(tmp_path: Path) -> None:
    uneven = videos.write(tmp_path / "uneven.mkv", videos.pictures(len(UNEVEN_MS), 64, 96), times=UNEVEN_MS)
    said = "mpeg1video can't encode 96 x 64 at 2.2 frames/s; give .mp4, or --codec h264"
    refuses(said, copy_video, uneven, tmp_path / "out.mpg", "")


def test_a_container_of_constant_rate_says_how_far_frames_were_moved(tmp_path: Path) -> None:
    uneven = videos.write(tmp_path / "uneven.mkv", videos.pictures(len(UNEVEN_MS), 64, 96), times=UNEVEN_MS)
    assert copy_video(uneven, tmp_path / "out.avi", "") == [
        ".avi has a constant rate: frames were moved by up to 2.58 s; .mkv and .mp4 keep the times of the source"
    ]
    even = videos.write(tmp_path / "even.mkv", videos.pictures(len(UNEVEN_MS), 64, 96))
    assert copy_video(even, tmp_path / "even.avi", "") == []


def test_a_video_without_a_picture_is_refused(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "none.mkv"), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height = 64, 48
        container.start_encoding()
    refuses("none.mkv is not a video that FFmpeg can read", VideoSource, str(tmp_path / "none.mkv"), live=False)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("quarters", range(4))
def test_frames_are_turned_upright_by_their_display_matrix(tmp_path: Path, quarters: int, mirrored: bool) -> None:
    """All eight: counter-clockwise by quarters, then mirrored; pixels of 4:3 lie on their side after one or three."""

    def set_up(stream: Any) -> None:
        stream.codec_context.sample_aspect_ratio = Fraction(4, 3)
        if quarters or mirrored:
            stream.set_display_rotation(90 * quarters, hflip=mirrored)

    stored = next(videos.pictures(1, 64, 96))
    clip = videos.write(tmp_path / "turned.mp4", [stored], set_up=set_up, options=LOSSLESS)
    expected = np.rot90(stored, quarters)
    (frame,) = VideoSource(str(clip), live=False).read()
    picture = frame.picture.rgb()
    assert picture.shape == expected.shape
    assert np.abs(picture.astype(int) - (expected[:, ::-1] if mirrored else expected)).mean() < 6
    assert frame.picture.aspect == (Fraction(3, 4) if quarters % 2 else Fraction(4, 3))


def test_a_rotation_by_an_odd_angle_is_reported(tmp_path: Path) -> None:
    def set_up(stream: Any) -> None:
        stream.set_display_rotation(30)

    clip = videos.write(tmp_path / "tilted.mp4", videos.pictures(1, 64, 96), set_up=set_up)
    source = VideoSource(str(clip), live=False)
    assert [frame.size for frame in source.read()] == [(64, 96)]
    assert source.notes == ["the file turns its frames by 30 degrees, not a right angle: not turned"]


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


def test_opencv_refuses_cover_art_and_keeps_the_pixel_aspect_ratio(tmp_path: Path) -> None:
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


def test_a_truncated_video_is_reported(tmp_path: Path) -> None:
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
def test_images_are_turned_upright_and_only_the_first_frame_is_used(tmp_path: Path, suffix: str) -> None:
    exif, photo = Image.Exif(), Image.fromarray(next(videos.pictures(1, 64, 96)))
    exif[0x112] = 6  # turned clockwise by 90 degrees
    photo.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    others = [Image.new("RGB", (96, 64), colour) for colour in ("white", "red")]
    photo.save(tmp_path / f"moving{suffix}", save_all=True, append_images=others)
    source = opening.open_source(str(tmp_path), VideoOptions())
    pictures = {frame.name: frame.picture.rgb().astype(int) for frame in source.read()}
    assert np.abs(pictures["turned.jpg"] - np.asarray(photo.rotate(-90, expand=True))).mean() < 5
    assert np.abs(pictures[f"moving{suffix}"] - np.asarray(photo)).mean() < 8
    assert source.notes == [f"moving{suffix} holds 3 pictures; the first is used"]


def test_images_are_in_natural_order_of_their_names(tmp_path: Path) -> None:
    names = ["0.png", "2.png", "10.png", "a1b2.png", "a1b10.png", "a01c.png", "b.png"]
    for name in names[::-1]:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    assert [frame.name for frame in opening.open_source(str(tmp_path), VideoOptions()).read()] == names


def test_numpy_numbers_are_accepted_as_options() -> None:
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
def test_an_invalid_option_is_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        VideoOptions(**options)
    assert str(caught.value) == said


@pytest.mark.parametrize("once", [False, True])
def test_isolated_stages_draw_masks_on_images_of_several_sizes(once: bool) -> None:
    """Results of the first image are given for all; a mask of 60 x 80 doesn't fit one of 90 x 50."""
    frames = [Frame(k, Rgb(np.zeros((*size, 3), np.uint8)), 0) for k, size in enumerate([(60, 80), (90, 50)])]
    source = SimpleNamespace(is_single_pass=once, read=lambda: iter([dataclasses.replace(frame) for frame in frames]))
    preparation = SimpleNamespace(
        batch=1, size=(64, 64), new_feed=dict, write=lambda *_: None, complete=lambda *_: None
    )
    reader = SimpleNamespace(read_detections=lambda *_: [found(60, 80)])
    shown: list[tuple[int, int]] = []
    sink = SimpleNamespace(write=lambda frame: shown.append(frame.size))
    copy: Any = StageCopy
    copy(source, preparation, reader, None, sink, Batch(frames[:1], {})).turn()
    assert shown == [(60, 80)] * CHUNK_FRAMES
