"""What reads and writes a video: PyAV where it is new enough, else OpenCV, and it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

import moving_photos as videos
from dyno.worker.video.media import opening
from dyno.worker.video.media.decoding import VideoSource
from dyno.worker.video.media.encoding import VideoSink
from dyno.worker.video.media.opencv import CaptureSource, WriterSink
from dyno.worker.video.options import VideoOptions

pytest.importorskip("cv2")
pytest.importorskip("av")


def test_a_pyav_that_is_too_old_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip, out = videos.write(tmp_path / "clip.mp4", videos.pictures(3)), tmp_path / "out.avi"
    source = opening.source_of(str(clip), VideoOptions())
    assert isinstance(source, VideoSource) and isinstance(opening.sink_of(out, source, ""), VideoSink)
    assert not opening.old_pyav()
    monkeypatch.setattr(opening.metadata, "version", lambda name: "17.0.1")
    source = opening.source_of(str(clip), VideoOptions())
    assert isinstance(source, CaptureSource) and isinstance(opening.sink_of(out, source, ""), WriterSink)
    assert len(list(source.read())) == 3
    said = opening.old_pyav()
    assert said.startswith("PyAV 17.0.1 is too old, so OpenCV reads and writes; ") and said.endswith("17.1 or newer")
