"""What tests of layers share: the module's own network as a file."""

from pathlib import Path

import pytest


@pytest.fixture
def net(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The function `net` of the test module's NET, as a model is named."""
    (tmp_path / "net.py").write_text(request.module.NET, encoding="utf-8")
    return "net.py:net"
