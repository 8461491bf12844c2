"""The anchor trial on two shares of the processor: interleaved alone and side by side, and killed jobs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from dyno import Study
from dyno.devices import one_host, places, spread
from dyno.jobs import nvml
from dyno.jobs.progress import Progress
from dyno.results.notes import AnchorDevice
from dyno.runner.turns import InterleavedGroup, InterleavedJob
from dyno.worker import system
from dyno.worker.record import read_record
from logged import Log

pytestmark = pytest.mark.skipif(system.physical_cores() < 2, reason="two shares need two physical cores")
DEVICES = "cpu:0,cpu:1"


def measure(study: Study, folder: Path, progress: Progress) -> one_host.StudyPlaces:
    folder.mkdir(exist_ok=True)
    found = places.parse_places(DEVICES)
    return one_host.measure_devices(places.at_one(study, found), folder, found, progress)


def wrap(
    monkeypatch: pytest.MonkeyPatch,
    around: Callable[[InterleavedGroup, Sequence[InterleavedJob], Callable[[], float]], float],
) -> None:
    """Call `around` for each block, with the group, its members and the measuring function."""
    block = InterleavedGroup._measure_block
    wrapped = lambda self, members: around(self, members, lambda: block(self, members))  # noqa: E731
    monkeypatch.setattr(InterleavedGroup, "_measure_block", wrapped)


def place_of(member: InterleavedJob) -> str:
    return member.folder.parent.name


def process(member: InterleavedJob) -> psutil.Process:
    assert member.started is not None
    return psutil.Process(member.started.process.pid)


def overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def test_devices_are_measured_alone_and_together_across_an_interrupt(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[tuple[str, float]] = []

    def seen(group: InterleavedGroup, members: Sequence[InterleavedJob], go: Callable[[], float]) -> float:
        if members[0].round_index == 1 and killed:
            raise KeyboardInterrupt
        others = [process(p) for p in group.alive if p not in members]
        before = [sum(p.cpu_times()[:2]) for p in others]
        seconds = go()
        waited.extend((p.status(), sum(p.cpu_times()[:2]) - b) for p, b in zip(others, before, strict=True))
        return seconds

    killed = True
    wrap(monkeypatch, seen)
    study = fake_study(threads=0, equivalent=90)
    with pytest.raises(KeyboardInterrupt):
        measure(study, tmp_path, Log())
    assert not [p for p in psutil.Process().children() if "main.py" in " ".join(p.cmdline())]
    (folder,) = (tmp_path / "anchors").iterdir()
    assert not list(folder.glob("r*.json")), "all rounds are under way"

    killed = False
    company = measure(study, tmp_path, Log())
    kept = (folder / "cpu0" / "r0" / "record.json").stat().st_mtime_ns
    assert [place.name for place in company.places] == ["cpu:0", "cpu:1"]
    assert len(waited) >= 3 * 3 * 2 * 5 and {status for status, _ in waited} == {psutil.STATUS_STOPPED}
    # The kernel counts in ticks of 10 ms, and one may predate the signal.
    assert sum(seconds for _, seconds in waited) <= 0.0005 * len(waited) + 0.011, "a waiting job is frozen"

    for number in range(3):
        records = {name: read_record(folder / name / f"r{number}") for name in ("cpu0", "cpu1")}
        one, other = (record.facts for record in records.values() if record is not None)
        assert {*one.affinity} == {*places.parse_places(DEVICES)[0].cores} and not {*one.affinity} & {*other.affinity}
        kinds = json.loads((folder / f"r{number}.json").read_text())["company"]
        for kind, together in ((1, False), (2, True)):
            own, others = (
                [w for w, k in zip(facts.blocks["model"], kinds[name], strict=True) if k == kind]
                for facts, name in ((one, "cpu:0"), (other, "cpu:1"))
            )
            assert len(own) == len(others) >= 3
            pairs = [overlap(a, b) for a, b in zip(own, others, strict=True)]
            assert any(pairs) if together else not any(pairs)  # any, as one of two may start late on a busy machine
            assert not any(overlap(a, b) for k, a in enumerate(own) for j, b in enumerate(others) if k != j)
    stored = json.loads((tmp_path / "devices.json").read_text())
    assert [len(row[key]) for row in stored["devices"] for key in ("alone", "beside", "ratios")] == [3] * 6
    assert stored["side_by_side"] is (not company.in_turn)

    (tmp_path / "devices.json").unlink()  # as after a kill before writing, or with another --equivalent
    (folder / "cpu1" / "r1" / "record.json").write_text("{")  # as on a full disk
    waited.clear()
    measure(study, tmp_path, Log())
    again = json.loads((tmp_path / "devices.json").read_text())
    assert again["devices"][0]["alone"][::2] == stored["devices"][0]["alone"][::2]
    assert 0 < len(waited) <= 2 * one_host.BLOCKS_PER_KIND, "one round"
    assert (folder / "cpu0" / "r0" / "record.json").stat().st_mtime_ns == kept, "nothing is measured twice"


def test_short_of_memory_rounds_run_one_after_another(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []

    def seen(group: InterleavedGroup, members: Sequence[InterleavedJob], go: Callable[[], float]) -> float:
        alive.append(len(group.alive))
        return go()

    wrap(monkeypatch, seen)
    monkeypatch.setattr(nvml, "read_available", lambda: nvml.DEFAULT_PROCESS_B)
    assert len(measure(fake_study(threads=0), tmp_path, Log()).places) == 2 and set(alive) == {2}


def test_a_study_continues_without_a_device_whose_process_dies(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(group: InterleavedGroup, members: Sequence[InterleavedJob], go: Callable[[], float]) -> float:
        for member in members:
            if place_of(member) == "cpu1":
                process(member).kill()
        return go()

    wrap(monkeypatch, killed)
    log = Log()
    company = measure(fake_study(), tmp_path, log)
    assert [place.name for place in company.places] == ["cpu:0"] and not company.in_turn
    assert any("cpu:1" in line and "killed by SIGKILL" in line for line in log.said)
    assert "the study continues without cpu:1" in log.said
    assert not (tmp_path / "devices.json").exists(), "the same command tries it again"


def test_a_trial_that_fails_everywhere_drops_no_device(fake_study: Any, tmp_path: Path) -> None:
    log = Log()
    company = measure(fake_study(backends=("fake@fail=exception",)), tmp_path, log)
    assert [place.name for place in company.places] == ["cpu:0", "cpu:1"] and not company.in_turn
    assert any("interference between the devices is unknown" in line for line in log.said)


@pytest.mark.parametrize(("later", "side_by_side"), [(1.0, True), (1.05, False)])
def test_a_device_slowed_by_others_is_remeasured_before_that_counts(
    later: float, side_by_side: bool, fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def read(folder: Path, of: Sequence[places.Place], rounds: int) -> list[AnchorDevice]:
        ratios = (1.029, 1.03, 1.031, later - 0.001, later, later + 0.001)[:rounds]
        one, other = ((place.name, place.card, (1.0,) * rounds, (1.0,) * rounds) for place in of)
        return [AnchorDevice(*one, ratios), AnchorDevice(*other, (1.0,) * rounds)]

    monkeypatch.setattr(one_host, "measure", lambda *words: asked.append(words[3]))
    monkeypatch.setattr(one_host, "read", read)
    log = Log()
    assert (not measure(fake_study(), tmp_path, log).in_turn) is side_by_side
    assert asked == [3, 6] and any("cpu:0 is 3 % slower beside the other" in line for line in log.said)
    slow = [line for line in log.said if "blocks are measured one at a time" in line]
    expected = (
        "cpu:0 is 4 % slower beside the other devices than alone; blocks are measured one at a time, and side by side "
        "with --equivalent 4"
    )
    assert slow == ([] if side_by_side else [expected])
    assert (not measure(fake_study(), tmp_path, log).in_turn) is side_by_side and asked == [3, 6], "as it is stored"
    assert not measure(fake_study(equivalent=4), tmp_path, log).in_turn, "the line is true"


def test_disturbing_devices_take_turns(fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn = lambda *asked: one_host.StudyPlaces(asked[2], {place.machine for place in asked[2]})  # noqa: E731
    monkeypatch.setattr(one_host, "measure_devices", in_turn)
    running: list[int] = []

    class Counted(spread.BlockScheduler):
        def _begin_block(self, *asked: Any) -> None:
            super()._begin_block(*asked)
            running.append(len(self.running))

    monkeypatch.setattr(spread, "BlockScheduler", Counted)
    spread.run(fake_study(device=DEVICES, batches=(1, 2, 4)), tmp_path, Log())
    notes = [json.loads(path.read_text())["place"] for path in (tmp_path / "placements").glob("*.json")]
    assert sorted(notes) in (["cpu:0", "cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:1"])
    assert running == [1, 1, 1]
