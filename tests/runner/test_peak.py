"""A study's peak: measured once for a machine, remembered unless it was disturbed, and never the study's end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dyno import Study
from dyno.jobs.progress import Progress
from dyno.runner import peak
from dyno.runner.execute import execute
from dyno.worker.facts.job import Facts, PeakOfType
from dyno.worker.record import Record, write_record
from dyno.worker.spec import Job

Studies = Callable[..., Study]
GOOD = Record("ok", "done", facts=Facts(peak={"fp32": PeakOfType(1e11, 512)}))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Record]:
    """What each peak's job will leave; taken from the front as jobs run. The cache is the test's own."""
    left: list[Record] = []

    def launch(job: Job, folder: Path, *_: Any) -> Record:
        assert job.kind == "peak"
        folder.mkdir(parents=True)
        write_record(folder, left[0])
        return left.pop(0)

    monkeypatch.setattr(peak, "launch_in_turn", launch)
    monkeypatch.setenv("DYNO_CACHE", str(tmp_path / "cache"))
    return left


def find(study: Study, folder: Path) -> Record:
    return peak.find_peak(study, folder / "peak", Progress(quiet=True))


def test_a_second_study_takes_it_from_the_cache(fake_study: Studies, tmp_path: Path, jobs: list[Record]) -> None:
    jobs.append(GOOD)
    assert [find(fake_study(), tmp_path / name).facts for name in "aba"] == [GOOD.facts] * 3
    assert jobs == []
    assert (tmp_path / "b" / "peak" / "record.json").is_file()


def test_other_threads_are_another_peak(fake_study: Studies, tmp_path: Path, jobs: list[Record]) -> None:
    jobs.extend([GOOD, GOOD])
    find(fake_study(threads=1), tmp_path / "a")
    find(fake_study(threads=2), tmp_path / "b")
    assert jobs == []


@pytest.mark.parametrize("bad", [Record("skipped", "peak", "no torch"), Record("ok", "done", warnings=("a crowd",))])
def test_what_failed_or_was_disturbed_is_not_remembered(
    bad: Record, fake_study: Studies, tmp_path: Path, jobs: list[Record]
) -> None:
    jobs.extend([bad, GOOD])
    assert find(fake_study(), tmp_path / "a") == bad
    assert find(fake_study(), tmp_path / "b").facts == GOOD.facts


def test_a_study_goes_on_without_it_and_may_ask_for_it_later(
    fake_study: Studies, tmp_path: Path, jobs: list[Record]
) -> None:
    execute(fake_study(), tmp_path, Progress(quiet=True))
    assert not (tmp_path / "peak").exists()
    jobs.append(Record("skipped", "peak", "no torch"))
    execute(fake_study(peak=True), tmp_path, Progress(quiet=True))
    assert [p.name for p in tmp_path.glob("peak/*")] == ["record.json"]
    assert jobs == []
