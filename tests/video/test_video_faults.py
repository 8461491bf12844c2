"""Damaged, odd or truncated videos, full disks, and interrupts: each ends with one clear line, and leaves a playable
file."""

import functools
import http.server
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moving_photos as videos
from dyno.worker.facts.job import VideoFacts
from dyno.worker.record import Record, read_record
from moving_photos import NET, QUICK, expected, places

pytest.importorskip("cv2")
av = pytest.importorskip("av")
pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

COUNT = 40
WORDS = (*NET, *QUICK, "-o", "run")


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short video with a key frame every half second."""
    path = tmp_path_factory.mktemp("clip") / "clip.mkv"
    return videos.write(path, videos.pictures(COUNT), sound=True, options={"g": "12"})


@pytest.fixture
def run(run: Any) -> Any:
    """`dyno bench video` with the detector of the marker, into the folder `run`."""
    return lambda *words, **more: run(*words, "-o", "run", **more)


@pytest.fixture
def refused(run: Any) -> Any:
    """A command that fails on bad input; returns its error line."""
    return lambda *words, code=2: one_line(run(*words, code=code)[2])


def record(tmp_path: Path) -> Record:
    (path,) = (tmp_path / "run").glob("trials/*/r0")
    found = read_record(path)
    assert found is not None
    return found


def facts(tmp_path: Path) -> VideoFacts:
    found = record(tmp_path).facts.video
    assert found is not None
    return found


def one_line(errors: str) -> str:
    """Return the line of a failure, after checking that no traceback is printed."""
    (line,) = [line for line in errors.splitlines() if line.startswith("dyno: ")]
    assert "Traceback" not in errors
    return line


@pytest.mark.parametrize("suffix", [".mkv", ".avi"])
def test_truncated_videos_are_processed_up_to_the_cut(run: Any, clip: Path, tmp_path: Path, suffix: str) -> None:
    whole = (clip if suffix == ".mkv" else videos.write(tmp_path / "whole.avi", videos.pictures(COUNT))).read_bytes()
    (tmp_path / f"cut{suffix}").write_bytes(whole[: len(whole) * (6 if suffix == ".mkv" else 9) // 10])
    run(f"cut{suffix}", "out.mp4", code=0)
    found = places(tmp_path / "out.mp4")
    assert 5 < len(found) < COUNT and found[:20] == expected(len(found))[:20]
    assert facts(tmp_path).frames == len(found)
    said = f"cut.avi says that it has {COUNT} frames, and {len(found)} were found"  # the other kind has no count
    assert (said in record(tmp_path).warnings) == (suffix == ".avi")


def test_damaged_frames_are_counted_and_left_out(run: Any, clip: Path, tmp_path: Path) -> None:
    content = bytearray(clip.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4000] = bytes(4000)
    (tmp_path / "damaged.mkv").write_bytes(content)
    run("damaged.mkv", "out.mp4", code=0)
    assert len(places(tmp_path / "out.mp4")) == facts(tmp_path).frames > 5


@pytest.mark.parametrize(
    ("name", "content", "says", "ends"),
    [
        ("empty.mp4", b"", "is empty", 2),
        ("text.mp4", b"no video at all, but words " * 100, "is not a video that FFmpeg can read", 2),
        ("photo.png", b"no image", "can't be read as an image", 3),  # read like any frame of a video
    ],
)
def test_invalid_videos_are_refused(run: Any, tmp_path: Path, name: str, content: bytes, says: str, ends: int) -> None:
    (tmp_path / name).write_bytes(content)
    code, out, errors = run(name, "out.mp4")
    assert code == ends and says in one_line(errors) and not out
    assert not (tmp_path / "out.mp4").exists()


def test_files_with_only_sound_are_refused(refused: Any, clip: Path, tmp_path: Path) -> None:
    with av.open(str(clip)) as before, av.open(str(tmp_path / "sound.m4a"), "w") as after:
        voice = after.add_stream_from_template(before.streams.audio[0])
        for packet in before.demux(audio=0):
            if packet.dts is not None:
                packet.stream = voice
                after.mux(packet)
    assert "has no pictures, only audio" in refused("sound.m4a")


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_cover_art_is_not_taken_for_the_video(run: Any, tmp_path: Path, suffix: str) -> None:
    """In an MP4 it is marked as a cover; in the other file it is a one-frame stream like any other."""
    source = videos.write(tmp_path / f"plain{suffix}", videos.pictures(20), sound=True, still=suffix == ".mkv")
    if suffix == ".mp4":
        source = videos.with_cover(source, tmp_path / "cover.mp4")
    with av.open(str(source)) as container:
        assert container.streams[0].codec_context.name == "mjpeg"
    run(source, f"out{suffix}", "--json", "boxes.jsonl", code=0)
    assert places(tmp_path / f"out{suffix}") == expected(20)
    stored = videos.boxes(tmp_path / "boxes.jsonl")
    assert [round(line["boxes"][0]["box"][0] / videos.CELL) for line in stored] == expected(20)
    assert {(line["width"], line["height"]) for line in stored} == {(384, 288)}
    np.testing.assert_allclose([line["seconds"] for line in stored], np.arange(20) / videos.RATE, atol=1e-3)
    said = "plain.mkv has 2 videos: stream 2 (h264, 384 x 288) is used, the other is left out"
    assert (said in record(tmp_path).warnings) == (suffix == ".mkv")


def test_songs_with_cover_art_are_refused(refused: Any, tmp_path: Path) -> None:
    with av.open(str(tmp_path / "song.mp3"), "w") as container:
        cover = container.add_stream("mjpeg", rate=1)
        cover.height, cover.width, cover.pix_fmt = 64, 64, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        voice = container.add_stream("mp3", rate=videos.SOUND_RATE)
        picture = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 90, np.uint8), format="rgb24")
        container.mux([*cover.encode(picture), *cover.encode()])
        tone = av.AudioFrame.from_ndarray(np.zeros((1, 1152), np.float32), format="fltp", layout="mono")
        tone.sample_rate = videos.SOUND_RATE
        container.mux([*voice.encode(tone), *voice.encode()])
    assert "song.mp3 has no video: its only picture is cover art beside audio" in refused("song.mp3")


def with_square(left: int, top: int, width: int, height: int) -> list[np.ndarray]:
    """Return frames of 288 x 384 with a red rectangle."""
    frame = np.full((288, 384, 3), 40, np.uint8)
    frame[top : top + height, left : left + width] = (255, 0, 0)
    return [frame] * 8


@pytest.mark.parametrize(("suffix", "prepare"), [(".mp4", "host"), (".webm", "host"), (".avi", "device")])
def test_non_square_pixels_keep_their_aspect_ratio(call: Any, tmp_path: Path, suffix: str, prepare: str) -> None:
    """At 2:1 a frame of 384 x 288 is shown as 768 x 288; at half that size it fills rows 72 to 216 of the network's
    384 x 288, where a rectangle of 32 x 64 becomes the network's square of 32."""
    (tmp_path / "rows.py").write_text(videos.ROWS_NET)

    def wide(stream: Any) -> None:
        stream.codec_context.sample_aspect_ratio = Fraction(2)

    videos.write(tmp_path / "wide.mp4", with_square(128, 48, 32, 64), set_up=wide)
    words = ["rows.py:net" if word == "marker.py:net" else word for word in WORDS]
    words += ["--json", "boxes.jsonl", "--confidence", 0.8, "--prepare", prepare]
    call("bench", "video", "wide.mp4", f"out{suffix}", *words, code=0)
    stored = videos.boxes(tmp_path / "boxes.jsonl")
    assert {(line["width"], line["height"], line["pixel_aspect"]) for line in stored} == {(384, 288, 2.0)}
    np.testing.assert_allclose([line["boxes"][0]["box"] for line in stored], [[128, 48, 160, 112]] * 8, atol=2)
    with av.open(str(tmp_path / f"out{suffix}")) as container:
        written, frame = container.streams.video[0], next(container.decode(video=0))
        shape = frame.width, frame.height, written.sample_aspect_ratio
    assert shape == ((768, 288, 1) if suffix == ".webm" else (384, 288, 2))
    warnings = record(tmp_path).warnings
    assert any("not square (2:1): the network sees its 384 x 288 as 768 x 288" in line for line in warnings)
    assert any("were written as 768 x 288" in line for line in warnings) == (suffix == ".webm")


@pytest.mark.parametrize("pixels", ["yuv420p10le", "yuv420p"])
def test_ten_bits_and_interlaced_frames(run: Any, tmp_path: Path, pixels: str) -> None:
    woven = {"x264-params": "tff=1"} if pixels == "yuv420p" else {}
    videos.write(tmp_path / "clip.mp4", videos.pictures(6), pixels=pixels, options=woven)
    run("clip.mp4", "out.mp4", code=0)
    assert places(tmp_path / "out.mp4") == expected(6)
    said = "the video is interlaced: each frame shows two moments at once and is used as it is"
    assert (said in record(tmp_path).warnings) == bool(woven)


def test_unfinished_recordings_are_reported(refused: Any, tmp_path: Path) -> None:
    boxes = [b"\0\0\0\x18ftypisom\0\0\2\0isomiso2", b"\0\0\0\x74moov", b"\0\0\0\x6cmvhd", bytes(100)]  # no tracks
    (tmp_path / "cut.mp4").write_bytes(b"".join(boxes))
    assert "has neither pictures nor sound: it is cut short" in refused("cut.mp4")


def test_truncated_headers_are_reported(refused: Any, tmp_path: Path) -> None:
    content = videos.write(tmp_path / "whole.mp4", videos.pictures(5)).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(content[: content.index(b"mdhd")])  # the track's kind is still unknown
    assert "has neither pictures nor sound: it is cut short" in refused("cut.mp4")


def test_empty_folders_and_missing_codecs_are_refused(refused: Any, clip: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert "has no images" in refused("none")
    assert "unknown codec 'h265x'; did you mean 'h26" in refused(clip, "out.mp4", "--codec", "h265x")
    assert ".webm can't hold libx264; give another --codec" in refused(clip, "out.webm", "--codec", "h264")


def test_odd_frame_sides_are_padded_by_a_pixel(run: Any, tmp_path: Path) -> None:
    videos.write(tmp_path / "odd.avi", videos.pictures(8, 289, 385), codec="mjpeg", pixels="yuvj444p")
    run("odd.avi", "out.mp4", code=0)
    frames, _ = videos.read(tmp_path / "out.mp4")
    assert {frame.shape for frame in frames} == {(290, 386, 3)}
    assert [videos.place_of(frame) for frame in frames] == expected(8)
    assert any("the codec needs even sides" in line for line in record(tmp_path).warnings)


def test_variable_frame_times_are_kept(run: Any, tmp_path: Path) -> None:
    times = np.cumsum([0, *np.random.default_rng(0).integers(20, 200, 19)]).tolist()
    videos.write(tmp_path / "vfr.mkv", videos.pictures(20), times=times)
    run("vfr.mkv", "out.mp4", "--json", "boxes.jsonl", code=0)
    assert facts(tmp_path).rate == pytest.approx(19 / (times[-1] / 1000)), "the file states the encoder's rate"
    frames, seconds = videos.read(tmp_path / "out.mp4")
    assert [videos.place_of(frame) for frame in frames] == expected(20)
    np.testing.assert_allclose(seconds, np.array(times) / 1000, atol=0.002)
    stored = [line["seconds"] for line in videos.boxes(tmp_path / "boxes.jsonl")]
    np.testing.assert_allclose(stored, np.array(times) / 1000, atol=0.002)


def test_the_resolution_may_change_in_the_middle(run: Any, tmp_path: Path) -> None:
    parts = [tmp_path / f"{k}.ts" for k in range(2)]
    videos.write(parts[0], videos.pictures(12), options={"g": "6"})
    videos.write(parts[1], videos.pictures(12, 432, 576, first=12), options={"g": "6"})
    (tmp_path / "both.ts").write_bytes(b"".join(part.read_bytes() for part in parts))
    run("both.ts", "out.mp4", "--json", "boxes.jsonl", code=0)
    frames, _ = videos.read(tmp_path / "out.mp4")
    assert len(frames) == 24 and {frame.shape for frame in frames} == {(288, 384, 3)}
    assert any("12 frames had another size than the first" in line for line in record(tmp_path).warnings)
    stored = videos.boxes(tmp_path / "boxes.jsonl")
    assert [line["width"] for line in stored] == [384] * 12 + [576] * 12  # boxes are in pixels of their own frame


@pytest.fixture
def going(clip: Path) -> Iterator[str]:
    """The URL of the clip on a server that hangs up half-way."""

    class Half(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = clip.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])

        log_message = functools.partialmethod(lambda *_: None)  # type: ignore[assignment]

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Half) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/clip.mkv"
        server.shutdown()


def test_a_source_that_disconnects_ends_the_video(run: Any, going: str, tmp_path: Path) -> None:
    run(going, "out.mp4", code=0)
    found = places(tmp_path / "out.mp4")
    assert 5 < len(found) < COUNT and found == expected(len(found))


def test_a_missing_source_is_reported(run: Any) -> None:
    code, _, errors = run("http://127.0.0.1:9/none.mp4")
    assert code != 0 and "can't be read" in one_line(errors)


def test_a_full_disk(clip: Path, tmp_path: Path) -> None:
    """A limit on the size of files acts like a full disk for the writer."""
    (tmp_path / "marker.py").write_text(videos.MARKER_NET)
    videos.write(tmp_path / "long.mp4", videos.pictures(400))
    command = [sys.executable, "-m", "dyno", "bench", "video", "long.mp4", "out.mkv", *map(str, WORDS)]
    command += ["--codec", "mjpeg"]  # frame size independent of the scene

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, preexec_fn=limited, timeout=1200)
    assert done.returncode != 0
    assert "the disk is full" in done.stderr and "free some space" in done.stderr
    found = places(tmp_path / "out.mkv")
    assert len(found) > 5 and found == expected(len(found))


@pytest.fixture
def interrupted(tmp_path: Path) -> subprocess.Popen[bytes]:
    """`dyno bench video` interrupted after its first frames, with open standard input."""
    (tmp_path / "marker.py").write_text(videos.MARKER_NET)
    command = [sys.executable, "-m", "dyno", *"bench video - out.mp4 --frame-size 384x288 -v".split(), *map(str, WORDS)]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdin is not None
    for frame in videos.pictures(200):
        process.stdin.write(frame.tobytes())
    process.stdin.flush()  # stays open, so the job waits for more
    until = time.monotonic() + 600
    # All frames may be answered before the first check.
    while not any(re.match("frame [1-9]", path.read_text()) for path in tmp_path.glob("run/trials/*/r0/stage")):
        assert time.monotonic() < until and process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    return process


def test_an_interrupt_leaves_a_playable_file_and_a_rerun_measures_again(
    interrupted: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert interrupted.wait(600) == 130  # with open standard input
    out, errors = interrupted.communicate()
    assert b"1/1 ok " in errors, "the job ended well"
    found = places(tmp_path / "out.mp4")
    assert found and found == expected(len(found))
    assert facts(tmp_path).stopped and facts(tmp_path).frames == len(found)
    assert b"until it was stopped" in out
    raw = b"".join(frame.tobytes() for frame in videos.pictures(20))
    again = [subprocess.run(interrupted.args, cwd=tmp_path, input=raw, capture_output=True) for _ in range(2)]
    assert [done.returncode for done in again] == [0, 0], again[0].stderr
    assert b"is measured again" in again[0].stderr and b"is measured again" not in again[1].stderr
    assert not facts(tmp_path).stopped and facts(tmp_path).frames == 20
    assert places(tmp_path / "out.mp4") == expected(20)


def test_an_interrupt_that_also_ends_the_source_exits_with_130(interrupted: subprocess.Popen[bytes]) -> None:
    """A shell's pipe interrupts all of its programs: the job may have ended before its signal."""
    _, errors = interrupted.communicate(timeout=600)
    assert interrupted.returncode == 130, errors
