"""`dyno bench video` from input to output: frames, order, boxes, sound, and reported speed."""

import csv
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dyno
import moving_photos as videos
from moving_photos import NET, QUICK, expected

pytest.importorskip("cv2")
av = pytest.importorskip("av")
pytestmark = pytest.mark.usefixtures("preloaded")

COUNT = 30


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short video with sound."""
    return videos.write(tmp_path_factory.mktemp("clip") / "clip.mp4", videos.pictures(COUNT), sound=True)


def places(boxes: list[dict[str, Any]]) -> list[int]:
    """Return the marker's place by each frame's only box."""
    assert all(len(line["boxes"]) == 1 for line in boxes)
    return [round(line["boxes"][0]["box"][0] / videos.CELL) for line in boxes]


def has_box(frame: np.ndarray, place: int) -> bool:
    """Return whether a box is drawn around that place: its label is orange, the marker red."""
    left = place * videos.CELL
    return bool(frame[4:12, left + 2 : left + 28, 1].mean() > 60)


def test_frames_are_written_in_order_with_their_own_boxes(run: Any, clip: Path, tmp_path: Path) -> None:
    _, out, _ = run(clip, "out.mp4", "--json", "boxes.jsonl", "--batch", 4, "-o", "run", code=0)
    frames, times = videos.read(tmp_path / "out.mp4")
    assert [videos.place_of(frame) for frame in frames] == expected(COUNT)
    assert all(has_box(frame, k % videos.PLACES) for k, frame in enumerate(frames))
    np.testing.assert_allclose(times, videos.read(clip)[1], atol=1e-3)
    boxes = videos.boxes(tmp_path / "boxes.jsonl")
    assert [line["frame"] for line in boxes] == list(range(COUNT))
    assert places(boxes) == expected(COUNT)
    np.testing.assert_allclose([line["seconds"] for line in boxes], times, atol=1e-3)
    with av.open(str(clip)) as before, av.open(str(tmp_path / "out.mp4")) as after:
        sound = [sum(packet.size for packet in each.demux(audio=0)) for each in (before, after)]
    assert sound[0] == sound[1] > 0
    assert "bound" in out and "frames/s end to end" in out


def test_preloaded_frames_are_repeated(run: Any, clip: Path, tmp_path: Path) -> None:
    _, out, _ = run(clip, "out.mp4", "--json", "b.jsonl", "--preload", 4, "--frames", 10, "--batch", 3, code=0)
    again = [k % 4 for k in range(10)]
    assert videos.places(tmp_path / "out.mp4") == again
    assert places(videos.boxes(tmp_path / "b.jsonl")) == again
    assert "4 frames at most were decoded in advance" in out


def test_frames_are_prepared_on_the_requested_device(run: Any, clip: Path, tmp_path: Path) -> None:
    words = (clip, "out.mp4", "--backend", "pytorch", "--batch", 4, "--json")
    for place in ("host", "device"):
        _, out, _ = run(*words, f"{place}.jsonl", "--prepare", place, code=0)
        assert ("Frames are prepared where the network computes" in out) == (place == "device")
    host, device = (videos.boxes(tmp_path / f"{place}.jsonl") for place in ("host", "device"))
    assert places(device) == expected(COUNT)
    for one, other in zip(host, device, strict=True):
        for box, again in zip(one["boxes"], other["boxes"], strict=True):
            np.testing.assert_allclose(box["box"], again["box"], atol=1)
            assert abs(box["score"] - again["score"]) < 0.05


def test_engines_without_pytorch_inputs_refuse_device_preparation(run: Any, clip: Path) -> None:
    code, _, errors = run(clip, "--prepare", "device", "--backend", "onnxruntime")
    assert code == 3 and "PyTorch can't reach this engine's inputs" in errors and "omit --prepare" in errors
    code, _, errors = run(clip, "--prepare", "cloud")
    assert code == 2 and "cloud" in errors and len(errors.splitlines()) == 1


def test_engines_are_compared_in_rounds(run: Any, call: Any, clip: Path, tmp_path: Path) -> None:
    _, out, _ = run(
        clip, "out.mp4", "--json", "b.jsonl", "--backend", "pytorch,onnxruntime", "--rounds", 2, "-o", "run",
        "--format", "csv", code=0)  # fmt: skip
    for name in ("pytorch-fp32", "onnxruntime-fp32"):
        assert len(videos.read(tmp_path / f"out-{name}.mp4")[0]) == COUNT
        assert places(videos.boxes(tmp_path / f"b-{name}.jsonl")) == expected(COUNT)
    assert not list(tmp_path.glob("run/**/scratch*"))  # the second round keeps no files
    whole, stages, streams = (list(csv.DictReader(io.StringIO(part))) for part in out.split("\n\n"))
    assert [row["rounds"] for row in whole] == ["2", "2"]
    assert {row["frames"] for row in whole} == {str(COUNT)}
    assert whole[0]["verdict"] == "reference" and whole[1]["verdict"]
    for row in whole:
        reached, bound = float(row["fps"]), float(row["bound_fps"])
        assert reached > 0 and bound > 0
    assert [row["stage"] for row in stages[:6]] == "decode preprocess inference postprocess draw encode".split()
    for row in stages:
        shares = [float(row[name]) for name in ("working", "starved", "blocked")]
        assert all(share >= 0 for share in shares) and sum(shares) <= 101
    assert [row["streams"] for row in streams[:6]] == "1 2 4 8 16 32".split()
    _, out, _ = call("show", "run", "--table", "video-critical-path", "--format", "csv", code=0)
    path = list(csv.DictReader(io.StringIO(out)))
    assert [row["stage"] for row in path[:7]] == [row["stage"] for row in stages[:6]] + ["between stages"]
    assert all(float(row["path_ms"]) >= 0 for row in path)
    assert sum(float(row["share"]) for row in path) == pytest.approx(200), "of two trials"


def test_two_runs_are_compared_end_to_end(run: Any, call: Any, clip: Path, tmp_path: Path) -> None:
    for name, others in (("a", ()), ("b", ()), ("other", ("--frames", 10))):
        run(clip, *others, "--backend", "onnxruntime", "--rounds", 2, "-o", name, code=0)
    _, out, errors = call("compare", "a", "b", "--format", "csv", code=0)
    inference, parts = (list(csv.DictReader(io.StringIO(part))) for part in out.split("\n\n"))
    assert len(inference) == 1
    assert [row["part"] for row in parts] == ["end to end", "decode", "preprocess", "inference", "postprocess"]
    for row in parts:
        assert float(row["ratio"]) == pytest.approx(float(row["b_ms"]) / float(row["a_ms"]))
        assert float(row["ratio_low"]) <= float(row["ratio"]) <= float(row["ratio_high"]) and row["verdict"]
        assert (row["rounds_a"], row["rounds_b"]) == ("2", "2")
    code, out, errors = call("compare", "a", "other")
    assert code == 0 and "not comparable: another video" in " ".join(out.split()), errors


def test_several_streams_share_one_engine(run: Any, clip: Path, tmp_path: Path) -> None:
    _, out, _ = run(
        clip, "out.mp4", "--streams", 3, "--json", "b.jsonl", "--backend", "onnxruntime@streams=2", "--threads", 2,
        "-o", "run", "--format", "json", code=0)  # fmt: skip
    tables = json.loads(out)["tables"]
    (row,) = tables["video"]["rows"]
    assert (row["frames"], row["streams"]) == (COUNT, 3)
    predicted = {row["streams"]: row for row in tables["video-streams"]["rows"]}
    assert list(predicted) == [1, 2, 3, 4, 8, 16, 32]
    ran = predicted[3]
    assert ran["reached_fps"] == pytest.approx(row["fps"])
    assert ran["error"] == pytest.approx(100 * (ran["fps"] / row["fps"] - 1))
    assert videos.places(tmp_path / "out.mp4") == expected(COUNT)
    assert places(videos.boxes(tmp_path / "b.jsonl")) == expected(COUNT)
    assert not list(tmp_path.glob("run/**/stream*.mp4"))


def test_video_runs_are_shown_like_other_runs(run: Any, call: Any, clip: Path, tmp_path: Path) -> None:
    _, out, _ = run(clip, "-o", "run", "--format", "json", "--save", "clip.trace.json", code=0)
    events = json.loads((tmp_path / "clip.trace.json").read_text())["traceEvents"]
    tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert tracks == "decode preprocess inference postprocess".split()
    begins = [event for event in events if event["ph"] == "b"]
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert [event["id"] for event in begins] == list(range(COUNT))
    assert all(event["args"] == {"boxes": 1} and event["ts"] < ends[event["id"]] for event in begins)
    for tid in range(1, 5):  # pieces of a track are sequential, so every end belongs to the last begin
        own = [event for event in events if event.get("tid") == tid and event["ph"] in "BE"]
        assert [event["ph"] for event in own] == ["B", "E"] * (len(own) // 2)
        assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(own))
    assert list(json.loads(out)["tables"]) == ["video", "video-stages", "video-streams"]
    (row,) = dyno.load("run").to_pandas().to_dict("records")
    assert row["latency_all_ms_median"] > 0 and row["throughput_ips"] > 0
    _, shown, errors = call("show", "run", "--table", "video", "--format", "json", code=0)
    assert json.loads(shown)["tables"]["video"]["rows"] == json.loads(out)["tables"]["video"]["rows"]
    assert json.loads(call("show", "run", "--format", "json")[1])["tables"] == json.loads(out)["tables"]
    code, again, errors = run(clip, "-o", "run", "--format", "json")  # nothing is measured twice
    assert (code, again) == (0, out), errors
    _, _, errors = call("report", "run", code=0)
    assert "video-timeline" in (tmp_path / "run" / "report.html").read_text()
    assert (tmp_path / "run" / "charts" / "video-timeline.png").is_file()


def test_without_an_output_nothing_is_drawn_or_written(run: Any, clip: Path, tmp_path: Path) -> None:
    _, out, _ = run(clip, "-o", "run", "--frames", 10, code=0)
    assert "10 frames of 384 x 288" in out and "encode" not in out
    assert {path.name for path in tmp_path.iterdir()} <= {"__pycache__", "marker.py", "run"}


def test_outputs_not_written_by_a_stored_run_are_reported(run: Any, clip: Path, tmp_path: Path) -> None:
    (tmp_path / "own.mp4").write_bytes(clip.read_bytes())
    assert run("own.mp4", "one.mp4", "-o", "run", "--frames", 3)[0] == 0
    code, out, errors = run("own.mp4", "two.mp4", "-o", "run", "--frames", 3)
    assert code == 3 and out
    assert "two.mp4 is not written, as its round was measured before; give another --out" in errors
    videos.write(tmp_path / "own.mp4", videos.pictures(5))
    code, _, errors = run("own.mp4", "one.mp4", "-o", "run", "--frames", 3)
    assert code == 2 and "run is of another video" in errors


def test_images_and_folders(run: Any, tmp_path: Path) -> None:
    import cv2

    folder = tmp_path / "photos"
    folder.mkdir()
    for k, picture in enumerate(videos.pictures(5)):
        cv2.imwrite(str(folder / f"{k}.png"), picture[..., ::-1])
    run(folder, "drawn", "--json", "b.jsonl", "-o", "run", code=0)
    drawn = [cv2.imread(str(tmp_path / "drawn" / f"{k}.png"))[..., ::-1] for k in range(5)]
    assert all(has_box(image, k) for k, image in enumerate(drawn))
    assert [line["name"] for line in videos.boxes(tmp_path / "b.jsonl")] == [f"{k}.png" for k in range(5)]
    run(folder / "3.png", "one.png", "-o", "run1", code=0)
    assert has_box(cv2.imread(str(tmp_path / "one.png"))[..., ::-1], 3)
    run(folder, "film.mkv", "-o", "run2", code=0)
    assert videos.places(tmp_path / "film.mkv") == expected(5)


@pytest.mark.parametrize("suffix", [".mkv", ".avi", ".webm", ".mov"])
def test_other_containers(run: Any, clip: Path, tmp_path: Path, suffix: str) -> None:
    codec = ("--codec", "vp8") if suffix == ".webm" else ()
    run(clip, f"out{suffix}", *codec, "--frames", 6, "-o", "run", code=0)
    assert videos.places(tmp_path / f"out{suffix}") == expected(6)


def test_invalid_input_is_refused_in_one_line(refused: Any, clip: Path, tmp_path: Path) -> None:
    (tmp_path / "marker.py").write_text(videos.MARKER_NET)
    assert "missing.mp4 does not exist; give a video" in refused("bench", "video", "missing.mp4", *NET)
    assert "is the source" in refused("bench", "video", clip, clip, *NET)
    assert "must be between 0 and 1" in refused("bench", "video", clip, *NET, "--confidence", 2)
    assert "--frame-size" in refused("bench", "video", "-", *NET)
    assert "end its name in .trace.json" in refused("bench", "video", clip, *NET, "--save", "trace.txt")
    assert "omit --streams" in refused("bench", "video", "camera:0", *NET, "--streams", 2)


def test_unwritable_outputs_are_refused_before_starting(refused: Any, clip: Path, tmp_path: Path) -> None:
    (tmp_path / "marker.py").write_text(videos.MARKER_NET)
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "link.mp4").symlink_to(clip)
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("a.png", "b.png"):
        (photos / name).write_bytes(b"read by nobody")
    for source, words, says in (
        (clip, ["out.xyz"], "out.xyz can't be written: .xyz is not a video container; give .mp4, .mkv"),
        (clip, ["out"], "out can't be written: a name without a suffix is not a video container; give .mp4"),
        (clip, ["out.png"], ".png is not a video container"),
        (clip, ["marker.py/out.mp4"], "marker.py/out.mp4 can't be written (Not a directory)"),
        (clip, ["/proc/none/out.mp4"], "/proc/none/out.mp4 can't be written"),
        (clip, ["folder.mp4"], "folder.mp4 is a folder"),
        (clip, ["link.mp4"], "link.mp4 is the source itself"),
        (clip, ["out.mp4", "--json", "marker.py/boxes.jsonl"], "marker.py/boxes.jsonl can't be written"),
        (clip, ["out.mp4", "--save", "/proc/none/t.trace.json"], "t.trace.json can't be written"),
        ("photos", ["out.xyz"], ".xyz is not a video container; give a folder, .png, .jpg, .mp4"),
        ("photos", ["out.png"], "photos has 2 images; give a folder or a video, not out.png"),
        ("photos", ["marker.py"], ".py is not a video container"),
        ("photos/a.png", ["photos"], "a.png lies in photos, and would be overwritten"),
    ):  # fmt: skip
        assert says in refused("bench", "video", source, *words, *NET)
    assert not (tmp_path / "runs").exists() and (photos / "a.png").read_bytes() == b"read by nobody"


@pytest.mark.parametrize("method", ["bytetrack", "botsort"])
def test_objects_keep_their_identity(call: Any, tmp_path: Path, method: str) -> None:
    pytest.importorskip("trackers")
    hidden = range(30, 36)
    videos.write(tmp_path / "two.mp4", videos.two_squares(60, hidden))
    (tmp_path / "rows.py").write_text(videos.ROWS_NET)
    _, out, errors = call(
        "bench", "video", "two.mp4", "out.mp4", "--model", "rows.py:net", *NET[2:],
        "--confidence", 0.6, "--iou", 0.2, "--track", method, "--json", "b.jsonl", "--backend", "onnxruntime", *QUICK,
        "-o", "run", "--format", "json", code=0,
    )  # fmt: skip
    names: dict[bool, set[int]] = {True: set(), False: set()}  # thread ids of the square on top and of the other square
    for k, line in enumerate(videos.boxes(tmp_path / "b.jsonl")):
        assert len(line["boxes"]) == (1 if k in hidden else 2)
        for box in line["boxes"]:
            if k >= 3:
                names[box["box"][1] < videos.CELL].add(box["identity"])
    assert sorted(names[True] | names[False]) == [0, 1] and len(names[True]) == len(names[False]) == 1
    tables = json.loads(out)["tables"]
    assert tables["video"]["rows"][0]["objects"] == 2
    stages = [row["stage"] for row in tables["video-stages"]["rows"]]
    assert stages == "decode preprocess inference postprocess track draw encode".split()
    code, out, errors = call("show", "run")
    assert code == 0 and f"{method} followed 2 objects." in out, errors
    frame = videos.read(tmp_path / "out.mp4")[0][-1]
    assert len({tuple(frame[row * videos.CELL, ::8].reshape(-1)) for row in (0, 3)}) == 2, "each in its own colour"


def test_tracker_options_are_checked_before_starting(run: Any, clip: Path) -> None:
    for words, says in (
        (("--track", "bytetracks"), "unknown tracker 'bytetracks'; did you mean 'bytetrack'?"),
        (("--track-confidence", 0.5), "give --track with one of"),
        (("--track", "sort", "--track-confidence", 2), "must be between 0 and 1"),
    ):
        code, _, errors = run(clip, *words)
        assert code == 2 and says in errors and errors.count("\n") == 1
