"""The process that measures a block."""

from __future__ import annotations

from pathlib import Path

from dyno.devices import blocks
from dyno.worker.record import write_json


def test_files_in_the_current_folder_do_not_disturb_a_block_s_process(tmp_path: Path) -> None:
    for name in ("json", "dataclasses"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the current folder')")
    write_json(tmp_path / blocks.ORDER, {})
    blocks.popen(tmp_path, {}, cwd=str(tmp_path)).wait(600)
    log = (tmp_path / blocks.LOG).read_text()
    assert "of the current folder" not in log and "KeyError" in log, "it read its order, which is empty here"
