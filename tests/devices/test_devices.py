"""Interference between devices of several hosts, blocks of compared trials, and a block's process."""

import json
from pathlib import Path
from typing import Any

import pytest

from dyno import Study, UserError
from dyno.devices import blocks, one_host, places, spread
from dyno.devices.blocks import find_anchor, split_blocks
from dyno.devices.places import Place, RunningBlock
from dyno.report.verdict.findings import list_device_findings
from dyno.results.trial_result import Results
from dyno.study.plan import expand
from dyno.worker import system
from dyno.worker.record import write_json
from logged import Log


class Near:
    """Host of a cluster: this machine."""

    gone = False

    def begin(self, folder: Path, place: Place) -> RunningBlock:
        return blocks.BlockProcess(folder, place)


def places_of(*names: str) -> list[Place]:
    """Return places named HOST/NUMBER."""
    return [Place(name, "cpu", "a card", threads=1, machine=name.partition("/")[0], host=Near()) for name in names]


def measure(study: Study, folder: Path, found: list[Place], log: Log) -> one_host.StudyPlaces:
    return one_host.measure_devices(places.at_one(study, found), folder, found, log)


def test_devices_on_separate_hosts_are_not_measured_together(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_host, "DEFAULT_ROUNDS", 1)
    assert not measure(fake_study(), tmp_path, places_of("a/0", "a/1", "b/0"), Log()).in_turn
    rows = json.loads((tmp_path / "devices.json").read_text())["devices"]
    assert [(len(row["alone"]), len(row["beside"])) for row in rows] == [(1, 1), (1, 1), (1, 0)]

    assert not measure(fake_study(), tmp_path, places_of("a/0", "b/0"), Log()).in_turn
    assert len([*tmp_path.glob("anchors/*/*-alone")]) == 5 and len([*tmp_path.glob("anchors/*/*-beside")]) == 2
    said = " ".join(finding.text for finding in list_device_findings(Results(tmp_path, [])))
    assert "each is on a different host" in said and "Cards differ by" in said


def test_only_hosts_with_mutually_disturbing_devices_are_named(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_blocks_run_one_at_a_time_only_on_a_disturbed_host(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_block_has_one_model_batch_and_size(fake_study: Any) -> None:
    backends = ("fake", "fake@fail=skip")
    planned = expand(fake_study(models=("fake:one", "fake:two"), backends=backends, batches=(1, 2), sizes=("4", "8")))
    found = split_blocks(planned)
    assert len(found) == len({block.id for block in found}) == 8
    for block in found:
        assert len({(t.model.name, t.dims.batch, t.dims.size) for t in block.trials}) == 1
        assert {str(t.options.get("fail", "")) for t in block.trials} == {"", "skip"}
    assert sorted(t.id for block in found for t in block.trials) == sorted(entry.trial.id for entry in planned)


def test_a_block_keeps_its_id_when_a_backend_is_added(fake_study: Any) -> None:
    both = ("fake", "fake@latency_ms=2")
    few, more = (split_blocks(expand(fake_study(backends=names))) for names in (both[:1], both))
    assert [block.id for block in few] == [block.id for block in more]
    assert len(more[0].trials) == 2


def test_the_anchor_is_the_reference_of_the_first_block(fake_study: Any) -> None:
    planned = expand(fake_study(batches=(2, 1), precisions=("fp8", "fp32")))
    chosen: Any = find_anchor(planned)
    assert (chosen.trial.dims.batch, chosen.trial.precision) == (2, "fp32"), "fp8 is refused"
    assert find_anchor([entry for entry in planned if entry.refusal]) is None


def test_files_in_the_current_folder_do_not_disturb_block_processes(tmp_path: Path) -> None:
    for name in ("json", "dataclasses"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the current folder')")
    write_json(tmp_path / blocks.BLOCK_FILE, {})
    blocks.start_block(tmp_path, {}, cwd=str(tmp_path)).wait(600)
    log = (tmp_path / blocks.LOG_FILE).read_text()
    assert "of the current folder" not in log and "KeyError" in log, "it read its order, which is empty here"


CORES = [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "core_threads", lambda: CORES)


def test_cpu_shares_have_disjoint_whole_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    found = places.parse_places("cpu:1,cpu:0")
    assert {place.name: place.cores for place in found} == {"cpu:0": (0, 4, 1, 5), "cpu:1": (2, 6, 3, 7)}
    assert {(place.device, place.threads) for place in found} == {("cpu", 2)}
    assert [place.cores for place in places.parse_places("cpu:0,cpu:1,cpu:2")] == [(0, 4), (1, 5), (2, 6)]
    monkeypatch.setattr(system, "core_threads", lambda: [(k,) for k in range(12)])
    found = places.parse_places(",".join(f"cpu:{k}" for k in range(12)))
    assert [place.cores for place in found] == [(k,) for k in range(12)]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpu:0,cpu:0", "named twice"),
        ("cpu:0,cuda:0", "devices of one kind"),
        ("cpu:0,cpu:2", "2 of them are cpu:0,cpu:1"),
        ("cpu,cpu:1", "numbered from 0"),
        ("cpu:0,cpu:1,cpu:2,cpu:3,cpu:4", "as many physical cores, and there are 4 here"),
        ("cuda:98,cuda:99", "there is no cuda:98 here"),
        ("cuda:0,cuda:x", "cuda:"),
    ],
)
def test_invalid_devices_are_refused(device: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        places.parse_places(device)


def test_gpus_have_their_own_cores_where_threads_leave_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs' jobs would otherwise share cores, as a job pins itself to its first allowed processors."""
    monkeypatch.setattr(places, "missing_gpu", lambda _: False)
    monkeypatch.setattr(places, "find_gpu", lambda *_: None)
    found = places.parse_places("cuda:1,cuda:0", threads=2)
    assert {place.name: place.cores for place in found} == {"cuda:0": (0, 4, 1, 5), "cuda:1": (2, 6, 3, 7)}
    assert [place.env for place in found] == [{places.VISIBLE_DEVICES: "1"}, {places.VISIBLE_DEVICES: "0"}]
    assert [place.cores for place in places.parse_places("cuda:0,cuda:1", threads=3)] == [(), ()]
    assert [place.cores for place in places.parse_places("cuda:0,cuda:1")] == [(), ()]
