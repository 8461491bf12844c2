"""Fixture for tests of layers: the test module's network as a file."""

from pathlib import Path

import pytest


@pytest.fixture
def net(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Write the test module's NET to a file; return its model name for the function `net`."""
    (tmp_path / "net.py").write_text(request.module.NET, encoding="utf-8")
    return "net.py:net"
