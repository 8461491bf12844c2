"""A study on two shares of the processor: each block stays on one share, even after kills."""

import json
from pathlib import Path
from typing import Any

import pytest

import spreading
from dyno import UserError
from dyno.devices import blocks, spread
from dyno.devices.places import RunningBlock
from dyno.jobs.progress import Progress
from dyno.report.tables.trial_table import read_trials
from dyno.report.verdict import verdict
from dyno.results import remarks
from dyno.results.trial_result import load_run
from dyno.runner.execute import execute
from dyno.worker import system
from logged import Log
from refusals import refuses
from spreading import kill_a_driver, records

pytestmark = pytest.mark.skipif(system.physical_cores() < 2, reason="two shares need two physical cores")
DEVICES = "cpu:0,cpu:1"


def test_a_study_on_two_devices_differs_only_in_its_places(fake_study: Any, tmp_path: Path) -> None:
    """A second run measures nothing, and the verdict mentions the devices."""
    spreading.run_twice(fake_study, tmp_path / "two", device=DEVICES)
    run = read_trials(tmp_path / "two")
    assert set(run.frame["status"]) == {"ok"}
    assert (run.frame.groupby("batch")["place"].nunique() == 1).all(), "a block is on one device"
    measured = json.loads((tmp_path / "two" / "devices.json").read_text())
    assert [len(device[how]) for device in measured["devices"] for how in ("alone", "beside", "ratios")] == [3] * 6
    said = " ".join(verdict.list_sentences(run))
    assert "Cards differ by" in said
    assert ("Devices worked side by side" in said) is measured["side_by_side"]
    for trial in run.records:
        own = {cpu for r in trial.rounds for cpu in r.facts.affinity}
        assert trial.placement is not None
        assert trial.placement.card.endswith(f"processors {','.join(map(str, sorted(own)))}")


@pytest.mark.usefixtures("undisturbed")
def test_the_block_of_a_killed_process_moves_and_its_rows_say_so(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RunningBlock] = []
    start = blocks.start_process

    def noted(*arguments: Any, **named: Any) -> RunningBlock:
        started.append(start(*arguments, **named))
        return started[-1]

    def kill(place: str, line: str) -> None:
        if started and place == started[0].place.name and "after round 1" in line:
            started[0].process.kill()

    monkeypatch.setattr(blocks, "start_process", noted)
    log = Log(kill)
    # Enough rounds to kill the process before its end.
    spread.run(fake_study(device=DEVICES, batches=(1, 2), rounds=4), tmp_path, log)
    first = started[0]
    moved = spreading.find_moved(tmp_path, 4)
    assert moved.placement is not None and moved.placement.place != first.place.name
    said = f"restarted on {moved.placement.place}, as its process was lost on {first.place.name}: killed by SIGKILL"
    assert said in remarks.list_warnings(moved)
    assert {r.facts.affinity for r in moved.rounds} == {tuple(started[1].place.cores)}, "all rounds are of one device"
    assert any("it goes to" in line for line in log.said)


@pytest.mark.usefixtures("undisturbed")
def test_processes_end_with_a_killed_driver_and_the_study_resumes(fake_study: Any, tmp_path: Path) -> None:
    study, folder = fake_study(device=DEVICES, batches=(1, 2), rounds=4), tmp_path / "run"

    def refused(_: object) -> None:
        refuses("is in use by another dyno", spread.run, study, folder, Progress(quiet=True))

    before = kill_a_driver(study, folder, refused)
    spread.run(study, folder, Progress(quiet=True))
    assert before.items() <= records(folder).items(), "what was measured is kept"
    assert len(records(folder)) == 8
    assert not [*folder.glob("blocks/*")]


def test_single_device_settings_are_refused_on_several(fake_study: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="energy is for a study on one device"):
        spread.run(fake_study(device=DEVICES, energy=True), tmp_path, Progress(quiet=True))
    refuses("give one --device here", execute, fake_study(device=DEVICES), tmp_path, Progress(quiet=True))


@pytest.mark.usefixtures("undisturbed")
def test_a_block_of_a_removed_device_is_restarted(fake_study: Any, tmp_path: Path) -> None:
    """All rounds of a block come from one device, and earlier measurements are kept."""
    fields = {"device": DEVICES, "batches": (1, 2)}
    spread.run(fake_study(**fields), tmp_path, Log())
    before = records(tmp_path)
    path = sorted((tmp_path / "placements").glob("*.json"))[0]
    note = json.loads(path.read_text())
    path.write_text(json.dumps({**note, "card": "another processor"}))
    log = Log()
    spread.run(fake_study(rounds=2, **fields), tmp_path, log)
    (row,) = note["trials"]
    assert [path.name for path in (tmp_path / "archive" / "elsewhere").iterdir()] == [row]
    after = records(tmp_path)
    assert {name for name in before if after[name] != before[name]} == {f"{row}/r0"} and len(after) == 4
    (moved,) = [t for t in load_run(tmp_path) if t.placement and t.placement.lost]
    assert any("the device is no longer one of the study's" in warning for warning in remarks.list_warnings(moved))
    assert len([line for line in log.said if "restarted, as" in line]) == 1
