"""What devices of several hosts do to each other: asked only of those that share a host, and mended only there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dyno import Study
from dyno.devices import blocks, one_host, places, spread
from dyno.devices.places import Place, RunningBlock
from dyno.report.verdict.whole_run import list_device_findings
from dyno.results.trial_result import Results
from spreading import Log

Studies = Callable[..., Study]


class Near:
    """A host of a cluster that is this one."""

    gone = False

    def begin(self, folder: Path, place: Place) -> RunningBlock:
        return blocks.BlockProcess(folder, place)


def places_of(*names: str) -> list[Place]:
    """Places HOST/NUMBER."""
    return [Place(name, "cpu", "a card", threads=1, machine=name.partition("/")[0], host=Near()) for name in names]


def measure(study: Study, folder: Path, found: list[Place], log: Log) -> one_host.StudyPlaces:
    return one_host.measure_devices(places.at_one(study, found), folder, found, log)


@pytest.mark.slow
def test_a_device_with_a_host_of_its_own_has_none_beside_it(
    fake_study: Studies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_host, "ROUNDS", 1)
    assert not measure(fake_study(), tmp_path, places_of("a/0", "a/1", "b/0"), Log()).in_turn
    rows = json.loads((tmp_path / "devices.json").read_text())["devices"]
    assert [(len(row["alone"]), len(row["beside"])) for row in rows] == [(1, 1), (1, 1), (1, 0)]

    assert not measure(fake_study(), tmp_path, places_of("a/0", "b/0"), Log()).in_turn
    assert len([*tmp_path.glob("anchors/*/*-alone")]) == 5 and len([*tmp_path.glob("anchors/*/*-beside")]) == 2
    said = " ".join(finding.text for finding in list_device_findings(Results(tmp_path, [])))
    assert "each is on a different host" in said and "Cards differ by" in said


def test_only_the_host_whose_devices_disturb_each_other_is_named(
    fake_study: Studies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def medians(folder: Path) -> tuple[float, ...]:
        slow = folder.name == "a_1-beside"
        return (1.2, 1.201) if slow else (1.0, 1.001)

    monkeypatch.setattr(one_host, "_measure_together", lambda *asked: None)
    monkeypatch.setattr(one_host, "_read_medians", medians)
    log = Log()
    found = places_of("a/0", "a/1", "b/0", "b/1", "c/0")
    assert measure(fake_study(), tmp_path, found, log).in_turn == {"a"}
    assert any(line.startswith("a/1 is 20 % slower beside") and "one at a time on a, and" in line for line in log.said)
    assert measure(fake_study(), tmp_path, found, log).in_turn == {"a"}, "as it is stored"


@pytest.mark.slow
def test_blocks_are_measured_one_at_a_time_on_that_host_only(
    fake_study: Studies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_host, "measure_devices", lambda *asked: one_host.StudyPlaces(asked[2], {"a"}))
    busy: list[list[str]] = []

    class Counted(spread.BlockScheduler):
        def _begin_block(self, *asked: Any) -> None:
            super()._begin_block(*asked)
            busy.append(sorted(one.place.machine for _, one in self.running.values()))

    monkeypatch.setattr(spread, "BlockScheduler", Counted)
    study, log = fake_study(batches=(1, 2, 3, 4, 5, 6), rounds=1), Log()
    spread._run_blocks(study, tmp_path, places_of("a/0", "a/1", "b/0", "b/1"), log, retry_failed=False)
    assert len(busy) == 6 and all(machines.count("a") <= 1 for machines in busy)
    assert ["a", "b", "b"] in busy, "the other host has both of its devices at work"
    assert len([*tmp_path.glob("trials/*/r0/record.json")]) == 6
