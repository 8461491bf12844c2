"""A block's folder on a node: its owner, and cleaning up after a killed process."""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from dyno.devices.clusters import node as nodes
from dyno.devices.clusters.node import Files, FolderUpdate, Node, mirror, write_files
from refusals import refuses

HOLDER = """
import sys, time; from dyno.devices.clusters import node
print(node._own_folder()[0], flush=True); time.sleep(600)
"""


def test_stale_block_folders_are_removed_and_used_ones_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Begin an empty block, which fails, and end it; return its folder."""
    node = Node()
    node.begin(_read(block), {}, {}, str(block))
    (folder,) = [path for path in Path(tempfile.gettempdir()).glob("dyno-block-*/block.json") if path.parent.is_dir()]
    node.end()
    return folder.parent


def test_a_killed_command_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for name in ("r0/record.json", "r0/samples.npz", "block.log"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text(name)
    news, written, write = FolderUpdate(_read(there), (), None), list[str](), nodes.write_bytes

    def killed(path: Path, content: bytes) -> None:
        write(path, content)
        written.append(path.name)
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(nodes, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        mirror(news, here)
    assert written == ["block.log", "samples.npz"], "a record comes after what it is of"
    monkeypatch.setattr(nodes, "write_bytes", write)
    names = tuple(path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file())
    mirror(FolderUpdate(_read(there), names, None), here)
    assert {name: (here / name).read_text() for name in names} == {name: name for name in names}


def _read(folder: Path) -> Files:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["../beyond", "{folder}/beyond", "link/beyond"])
def test_no_file_is_written_outside_the_folder(name: str, tmp_path: Path) -> None:
    files = {name.format(folder=tmp_path): b""}
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path)
    for write in (partial(mirror, FolderUpdate(files, (), None)), partial(write_files, files)):
        refuses("is not a file of its block's folder", write, tmp_path / "here")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["here", "link"]
