"""Video on a GPU: preparing and decoding frames there gives the same boxes as on the host."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moving_photos as videos

pytest.importorskip("cv2")
pytest.importorskip("av")
pytestmark = [pytest.mark.gpu, pytest.mark.slow]
COUNT = 50


@pytest.fixture
def filmed(dyno: Any, tmp_path: Path) -> Any:
    """Run `dyno bench video` of a moving marker on the GPU; returns the boxes and standard output."""
    (tmp_path / "marker.py").write_text(videos.MARKER_NET)
    video = videos.write(tmp_path / "video.mp4", videos.pictures(COUNT))

    def run(*words: object) -> tuple[list[dict[str, Any]], str]:
        boxes = tmp_path / "boxes.jsonl"
        fixed = ("--model", f"{tmp_path / 'marker.py'}:net", "--task", "detect", "--classes", 1, "--size", "288x384")
        quick = ("--device", "cuda:0", "--batch", 8, "--seconds", 0.05, "--warmup", 0.02, "--json", boxes)
        done = dyno("bench", "video", video, *words, *fixed, *quick)
        # No decoder, or no OpenCV or PyTorch in the engine's Python.
        if any(why in done.stderr for why in ("can't be used", "needs OpenCV", "PyTorch can't reach")):
            pytest.skip(done.stderr.strip().splitlines()[-1])
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in boxes.read_text().splitlines()], done.stdout

    return run


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other) == COUNT
    for k, (a, b) in enumerate(zip(one, other, strict=True)):
        assert len(a["boxes"]) == len(b["boxes"]) == 1
        assert round(b["boxes"][0]["box"][0] / videos.CELL) == k % videos.PLACES, "boxes are of their own frame"
        np.testing.assert_allclose(a["boxes"][0]["box"], b["boxes"][0]["box"], atol=1)
        assert abs(a["boxes"][0]["score"] - b["boxes"][0]["score"]) < 0.05


def test_tensorrt_detections_match_pytorch(filmed: Any, tensorrt_python: str) -> None:
    there, _ = filmed("--backend", "pytorch", "--prepare", "host")
    words = ("--backend", "tensorrt@optimization=0", "--python", f"tensorrt={tensorrt_python}")
    found, _ = filmed(*words)
    same(there, found)
    slots, _ = filmed(*words, "--streams", 2)
    same(there, slots)


@pytest.mark.parametrize("backend", ["pytorch", "pytorch@precision=fp16", "onnxruntime", "tensorrt@optimization=0"])
def test_frames_prepared_on_the_gpu_give_the_same_boxes(
    filmed: Any, request: pytest.FixtureRequest, backend: str
) -> None:
    more: tuple[object, ...] = ()
    if backend == "onnxruntime":
        more = ("--python", f"onnxruntime={request.getfixturevalue('ortgpu_python')}")
    if backend.startswith("tensorrt"):
        more = ("--python", f"tensorrt={request.getfixturevalue('tensorrt_python')}")
    host, _ = filmed("--backend", backend, "--prepare", "host", *more)
    asked = ("--prepare", "device") if backend.startswith("tensorrt") else ()
    device, said = filmed("--backend", backend, *asked, *more)
    same(host, device)
    assert "Frames are prepared where the network computes" in said


def test_frames_decoded_on_the_gpu_give_the_same_boxes(filmed: Any, tmp_path: Path) -> None:
    host, _ = filmed("--backend", "pytorch", "--prepare", "host")
    device, _ = filmed("--backend", "pytorch", "--decode", "device")
    same(host, device)
    drawn, _ = filmed(tmp_path / "out.mp4", "--backend", "pytorch", "--decode", "device")
    same(host, drawn)
    frames, _ = videos.read(tmp_path / "out.mp4")
    assert [videos.place_of(frame) for frame in frames] == [k % videos.PLACES for k in range(COUNT)]
