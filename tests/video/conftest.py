"""`dyno bench video` with a detector of the marker of `moving_photos`."""

from pathlib import Path
from typing import Any

import pytest

import moving_photos as videos


@pytest.fixture
def run(call: Any, tmp_path: Path) -> Any:
    """The command with that detector and short measurements; returns (exit code, stdout, stderr), like `call`."""
    (tmp_path / "marker.py").write_text(videos.MARKER_NET)
    return lambda *words, **more: call("bench", "video", *words, *videos.NET, *videos.QUICK, **more)
