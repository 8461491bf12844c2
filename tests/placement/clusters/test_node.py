"""A block's folder on a node: whose it is, and what becomes of one whose process was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dyno.placement.clusters.node import Node, whole

HOLDER = """
import sys, time; from dyno.placement.clusters import node
print(node._own_folder()[0], flush=True); time.sleep(600)
"""


def test_what_a_killed_process_left_goes_with_the_next_block_and_what_is_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    block, elsewhere = tmp_path / "block", tmp_path / "elsewhere"
    block.mkdir()
    elsewhere.mkdir()
    (block / "block.json").write_text("{}")
    (tmp_path / "dyno-block-link").symlink_to(elsewhere)
    code = [sys.executable, "-c", f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n{HOLDER}"]
    with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        try:
            ours = _after_a_block(block)
            assert theirs.is_dir() and not ours.exists()
        finally:
            other.kill()
    assert theirs.is_dir()
    _after_a_block(block)
    assert not theirs.exists() and elsewhere.is_dir()


def _after_a_block(block: Path) -> Path:
    """Begin a block, which fails as nothing is asked for, and end it; its folder."""
    node = Node()
    node.begin(whole(block), {}, {}, str(block))
    (folder,) = [path for path in Path(tempfile.gettempdir()).glob("dyno-block-*/block.json") if path.parent.is_dir()]
    node.end()
    return folder.parent
