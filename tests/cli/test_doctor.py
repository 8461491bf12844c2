"""`dyno doctor` says whom it asks while it asks, beside a table that stays clean."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dyno.cli import doctor
from dyno.worker import plugins, registry

EXTENDING = Path(__file__).parents[2] / "docs/extending.md"


def test_each_answer_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(registry, "names", lambda: ["fake"])
    assert doctor.doctor({}, "json") == 0
    said = capsys.readouterr()
    assert [row["backend"] for row in json.loads(said.out)["rows"]] == ["fake"]
    assert said.err.startswith("1/1 fake: ok, ")


def test_a_library_without_byte_code_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "names", lambda: ["fake"])
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert doctor.doctor({}, "json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["detail"].startswith("scripted; ") and "have no byte-code" in row["detail"]


def test_a_broken_entry_point_of_every_documented_group_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    groups = re.findall(r"^\| `(dyno\.\w+)` \|", EXTENDING.read_text(), re.MULTILINE)
    assert len(groups) > 8
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    points = [f"[{group}]\ngone_{i} = no_such_module:X\nother_{i} = math:pi" for i, group in enumerate(groups)]
    (info / "entry_points.txt").write_text("\n".join(points))
    monkeypatch.syspath_prepend(tmp_path)
    for cached in ("_load_group", "_read_entry_points"):
        monkeypatch.setattr(plugins, cached, getattr(plugins, cached).__wrapped__)
    monkeypatch.setattr(registry, "names", lambda: ["fake"])
    assert doctor.doctor({}, "json") == 0
    rows = {row["backend"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    for i, group in enumerate(groups):
        gone, other = rows[f"gone_{i}"], rows[f"other_{i}"]
        assert gone["status"] == other["status"] == "broken"
        assert gone["detail"].startswith(f"an entry point of {group} that can't be loaded: ")
        assert other["detail"].startswith(f"an entry point of {group} that is float, not ")
