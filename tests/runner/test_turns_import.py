"""Compared trials import their libraries in parallel and load one after the other, whatever happens meanwhile."""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dyno import Study
from dyno.jobs import nvml
from dyno.jobs.progress import Progress
from dyno.runner import turns
from dyno.runner.execute import execute
from dyno.runner.turns import InterleavedGroup, InterleavedJob
from dyno.study.plan import expand
from dyno.worker.jobs.turns import IMPORTED
from dyno.worker.spec import Job, Runtime

# `importing` and `loading` processes must have come that far at one time, else the process waits for ever.
BACKENDS = """
import os, time
from pathlib import Path
from dyno.worker.backends.fake import Fake, FakeSession

MARKS = Path(os.environ["MARKS"])

class Met(Fake):
    name = "met"
    options = (*Fake.options, "importing", "loading")
    def prepare(self, trial):
        super().prepare(trial)
        self._meet(trial, "importing")
    def load(self, trial, artifact):
        self._meet(trial, "loading")
        return FakeSession(trial)
    def _meet(self, trial, what):
        mark = MARKS / f"{what}.{trial.options['latency_ms']}"
        began = time.monotonic()
        mark.touch()
        while len(list(MARKS.glob(f"{what}.*"))) < trial.options.get(what, 1):
            time.sleep(0.01)
        time.sleep(0.5)
        mark.write_text(f"{began} {time.monotonic()}")

MET = Met()
"""
SLOW, FAST = "fake@latency_ms=4", "fake@latency_ms=2"


@pytest.fixture
def marks(importable: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the processes of the scripted backend `met_backend:MET` record imports and loads."""
    folder = importable("met_backend", BACKENDS) / "marks"
    folder.mkdir()
    monkeypatch.setenv("MARKS", str(folder))
    return folder


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets how many processes may import at once, whatever the number of processors."""
    return lambda number: monkeypatch.setattr(InterleavedGroup, "_at_once", lambda _: number)


@pytest.fixture
def study(fake_study: Any) -> Any:
    def make(*backends: str, **fields: Any) -> Study:
        return fake_study(**{"backends": backends, "turns": True, "seconds": 0.15, "block": 0.05, **fields})

    return make


def met(latency_ms: int, **options: int) -> str:
    return "@".join(["met_backend:MET", f"latency_ms={latency_ms}", *(f"{k}={v}" for k, v in options.items())])


def run(study: Study, folder: Path) -> dict[str, dict[str, Any]]:
    """Run the study; return its records by their trials' first option, all with a known duration."""
    execute(study, folder, progress := Progress(quiet=True))
    found = {}
    for path in (folder / "trials").glob("*/r0/record.json"):
        options = json.loads(path.with_name("job.json").read_text())["trial"]["options"]
        found[str(options.get("fail") or options["latency_ms"])] = json.loads(path.read_text())
        assert path.parents[1].name in progress.seconds
    return found


def windows(marks: Path, what: str) -> dict[str, tuple[float, float]]:
    """Return the start and end of `what` in each process, by its latency."""
    found = {}
    for path in marks.glob(f"{what}.*"):
        began, ended = map(float, path.read_text().split())
        found[path.suffix[1:]] = (began, ended)
    return found


def seconds(record: dict[str, Any], tag: str) -> float:
    return float(next(m["value"] for m in record["measurements"] if m["tag"] == tag))


def test_imports_overlap_and_loads_are_sequential(
    study: Any, tmp_path: Path, marks: Path, processors: Callable[[int], None]
) -> None:
    processors(3)
    records = run(study(*(met(ms, importing=3) for ms in (1, 2, 3)), timeout=120.0), tmp_path / "run")
    assert {r["status"] for r in records.values()} == {"ok"}
    importing, loading = windows(marks, "importing"), windows(marks, "loading")
    assert max(began for began, _ in importing.values()) < min(ended for _, ended in importing.values())
    order = sorted(loading, key=lambda name: loading[name][0])
    assert all(loading[a][1] <= loading[b][0] for a, b in pairwise(order)), "one at a time"
    assert max(ended for _, ended in importing.values()) <= loading[order[0]][0]
    assert [records[name]["facts"]["turns"]["place"] for name in order] == [0, 1, 2]
    last = order[-1]
    waited = loading[last][0] - importing[last][1]
    assert waited > 1.0, "two others loaded for 0.5 s each"
    for tag, windows_ in (("import", importing), ("load", loading)):
        own = windows_[last][1] - windows_[last][0]
        assert own <= seconds(records[last], tag) < own + waited, "what it waited for isn't in it"


def test_an_import_failure_fails_only_its_own_row(
    study: Any, tmp_path: Path, processors: Callable[[int], None]
) -> None:
    processors(4)
    wrong = (f"fake@fail={kind}@at=import@latency_ms=1" for kind in ("segfault", "exception"))
    records = run(study(SLOW, FAST, *wrong), tmp_path / "run")
    assert {name: (r["status"], r["stage"]) for name, r in records.items()} == {
        "4": ("ok", "done"), "2": ("ok", "done"),
        "segfault": ("crashed", "import"), "exception": ("failed", "import"),
    }  # fmt: skip
    assert records["4"]["facts"]["turns"]["set"] == records["2"]["facts"]["turns"]["set"]
    assert not [m for name in ("segfault", "exception") for m in records[name]["measurements"]]


def test_a_hanging_import_fails_only_its_own_row(
    study: Any, tmp_path: Path, processors: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    processors(3)
    imported: list[InterleavedJob] = []
    stop = InterleavedGroup._stop_member

    def stopped(self: InterleavedGroup, member: InterleavedJob, elapsed: float, timed_out: bool) -> None:
        imported.extend([member] if member.last_message == IMPORTED else [])
        stop(self, member, elapsed, timed_out)

    monkeypatch.setattr(InterleavedGroup, "_stop_member", stopped)
    # Hours pass for the conductor once the two others have imported, however long that takes.
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + 1e4 * (len(imported) == 2))
    monkeypatch.setattr(turns, "time", clock)
    monkeypatch.setattr(turns, "MAX_POLL_GAP_S", math.inf)  # else it would count as time in which Dyno was stopped
    records = run(study(SLOW, FAST, "fake@fail=hang@at=import@latency_ms=1", timeout=1200.0), tmp_path / "run")
    assert {name: (r["status"], r["stage"]) for name, r in records.items()} == {
        "4": ("ok", "done"), "2": ("ok", "done"), "hang": ("timeout", "import"),
    }  # fmt: skip


def test_imports_that_run_out_of_memory_are_retried_alone(
    study: Any, tmp_path: Path, processors: Callable[[int], None]
) -> None:
    processors(3)
    records = run(study(SLOW, FAST, "fake@fail=oom@at=import@latency_ms=1"), tmp_path / "run")
    assert {name: (r["status"], r["stage"]) for name, r in records.items()} == {
        "4": ("ok", "done"), "2": ("ok", "done"), "oom": ("oom", "import"),
    }  # fmt: skip
    assert not records["oom"]["facts"].get("turns"), "alone, after it failed beside others"


def test_imported_processes_count_with_their_measured_memory(
    study: Any, tmp_path: Path, processors: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    processors(3)
    # Room for two processes of unknown size, and for many of the measured size.
    monkeypatch.setattr(nvml, "read_available", lambda: 2 * nvml.HEADROOM * nvml.DEFAULT_PROCESS_B + 1)
    monkeypatch.setattr(InterleavedGroup, "_shuffle_items", lambda self, what, listed: list(listed))
    together, named = list[tuple[int, bool]](), list[bool]()
    advance = InterleavedGroup._advance_members

    def seen(self: InterleavedGroup, members: Sequence[InterleavedJob], word: str = "") -> None:
        named.extend([self.progress.current == f"{members[0].trial.label}  round 1 of 1"] if word == turns.END else [])
        advance(self, members, word)
        together.extend([(len(members), self.largest > 0)] if not word else [])

    monkeypatch.setattr(InterleavedGroup, "_advance_members", seen)
    records = run(study(SLOW, FAST, "fake@latency_ms=1", reference=SLOW), tmp_path / "run")
    assert together == [(2, False), (1, True)], "what an import takes isn't what a process needs"
    assert named == [True] * 3, "who ends is shown"
    assert len({r["facts"]["turns"]["set"] for r in records.values()}) == 1, "all have room in the end"


def test_parallel_imports_are_limited_by_processors(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (planned,) = expand(study("fake@latency_ms=1", threads=1))

    def at_once(processors: int, threads: int, **how: bool) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
        job = Job("run", Runtime(threads=threads), planned.trial)
        members = [InterleavedJob(job, Path(), 0) for _ in range(5)]
        return InterleavedGroup(members, "", Progress(quiet=True), lambda _: None, **how)._at_once()

    assert [at_once(16, 16), at_once(16, 4), at_once(2, 16), at_once(1, 1)] == [16, 4, 2, 1]
    assert at_once(1, 1, apart=True) == 5, "each has its own processors"


def test_jobs_on_separate_processors_import_and_load_in_parallel(study: Any, tmp_path: Path, marks: Path) -> None:
    planned = expand(study(*(met(ms, importing=2, loading=2) for ms in (1, 2)), timeout=120.0))
    members = [
        InterleavedJob(Job("run", entry.trial.runtime, entry.trial, 1), tmp_path / entry.trial.id, 0)
        for entry in planned
    ]
    began = time.monotonic()
    InterleavedGroup(
        members, "", Progress(quiet=True), lambda _: None, turns=turns.list_single_and_joint_turns, apart=True
    ).run()
    assert all(0 < member.used_s < time.monotonic() - began for member in members)
    records = [member.record for member in members if member.record]
    assert [record.status for record in records] == ["ok", "ok"]
    assert all(len(windows(marks, what)) == 2 for what in ("importing", "loading"))
    blocks = [len(record.facts.blocks["model"]) for record in records]
    assert [len(member.active_counts) for member in members] == blocks, "they are warm before the first turn"


def _groups(study: Study, folder: Path, ended: list[str]) -> list[InterleavedGroup]:
    """Return two groups of two jobs with known memory."""
    members = [
        InterleavedJob(Job("run", e.trial.runtime, e.trial, 1), folder / e.trial.id, 0, memory=1 << 20)
        for e in expand(study)
    ]
    return [
        InterleavedGroup(some, "", Progress(quiet=True), lambda member: ended.append(member.trial.id))
        for some in (members[:2], members[2:])
    ]


def test_groups_load_in_parallel_before_any_measures(study: Any, tmp_path: Path, marks: Path) -> None:
    ended: list[str] = []
    meeting = [met(ms, importing=4, loading=4) for ms in (1, 2, 3, 4)]
    groups = _groups(study(*meeting, timeout=120.0), tmp_path, ended)
    turns.load_in_parallel(groups)
    assert len(windows(marks, "loading")) == 4 and not ended
    assert groups[0].progress.stage == "first call"
    for group in groups:
        group.run()
    members = [member for group in groups for member in group.members]
    assert ended[:2] and {*ended[:2]} == {m.trial.id for m in groups[0].members}, "the first group ends first"
    records = {m.trial.id: json.loads((m.folder / "record.json").read_text()) for m in members}
    assert [r["status"] for r in records.values()] == ["ok"] * 4
    for group in groups:
        found = [records[m.trial.id]["facts"]["turns"] for m in group.members]
        assert {each["set"] for each in found} == {group.name} and {each["together"] for each in found} == {4}


def test_failures_while_groups_load_are_rows_of_their_group(study: Any, tmp_path: Path) -> None:
    ended: list[str] = []
    wrong = ["fake@fail=exception@at=load@latency_ms=1", "fake@fail=segfault@at=import@latency_ms=1"]
    groups = _groups(study("fake@latency_ms=1", wrong[0], wrong[1], "fake@latency_ms=2"), tmp_path, ended)
    turns.load_in_parallel(groups)
    assert [[m.trial.options.get("fail") for m in group.alive] for group in groups] == [[None], [None]]
    for group in groups:
        group.run()
    statuses = [m.record.status for group in groups for m in group.members if m.record]
    assert statuses == ["ok", "failed", "crashed", "ok"] and len(ended) == 4


def test_groups_too_large_for_memory_load_in_turn(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "read_available", lambda: 4 << 20)
    groups = _groups(study(*(f"fake@latency_ms={ms}" for ms in (1, 2, 3, 4))), tmp_path, [])
    turns.load_in_parallel(groups)
    assert not any(group.is_loaded or group.alive for group in groups)
