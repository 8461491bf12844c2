"""Charts that several processes draw are those that one draws, and a process that dies costs none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dyno.report import charts, report
from dyno.report.report import ChartDrawing
from dyno.report.tables import trial_table
from dyno.results.run_data import RunData
from dyno.results.trial_result import Results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors"),
]
DRAW, HERE = report._draw_kind, os.getpid()


@pytest.fixture
def run(demo: Results, monkeypatch: pytest.MonkeyPatch) -> RunData:
    monkeypatch.setattr(report, "MANY", 2)
    few = charts.kinds()[:3]
    monkeypatch.setattr(charts, "kinds", lambda: few)
    return trial_table.read_trials(demo)


def pictures(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def dies(run: RunData, folder: Path, prefix: str, name: str, number: int) -> ChartDrawing | None:
    if os.getpid() != HERE:
        (folder.parent / "died").touch()
        os._exit(9)
    return DRAW(run, folder, prefix, name, number)


def test_processes_draw_what_one_draws(run: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = report.draw_charts(run, folder(tmp_path, "several"), "r0", "")
    monkeypatch.setattr(report, "_draw_kind", dies)
    after_a_death = report.draw_charts(run, folder(tmp_path, "death"), "r0", "")
    assert (tmp_path / "died").exists()
    monkeypatch.setattr(report, "MANY", 1_000)
    alone = report.draw_charts(run, folder(tmp_path, "alone"), "r0", "")
    assert len(alone) == 3
    for other, name in ((several, "several"), (after_a_death, "death")):
        assert [(one.name, one.caption) for one in other] == [(one.name, one.caption) for one in alone]
        assert pictures(tmp_path / name) == pictures(tmp_path / "alone")
