"""Trials that measure in turns, scripted and with real engines."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

from dyno import Study
from dyno.formatting import MAX_INTERVAL_RATIO
from dyno.jobs import nvml
from dyno.jobs.launcher import read_stage
from dyno.jobs.progress import Progress
from dyno.report.tables.trial_table import read_trials
from dyno.report.verdict.verdict import list_sentences
from dyno.results import correctness
from dyno.results.blocks import find_drift, log_ratios
from dyno.results.ranking import gather_evidence, list_pending, rank_goals
from dyno.results.run_data import RunData
from dyno.results.trial_result import load_run
from dyno.runner import ensemble, turns
from dyno.runner.execute import Files, Rounds, execute
from dyno.store import Run
from dyno.study.plan import expand
from dyno.worker.record import Record, write_json, write_record
from dyno.worker.spec import BOUNDARIES, Dims, Job, ModelSpec, Plan, Runtime, Trial, to_json
from refusals import refuses
from waiting import until

SLOW, FAST = "fake@latency_ms=4", "fake@latency_ms=2"


@pytest.fixture
def study(fake_study: Any) -> Any:
    def make(*backends: str, **fields: Any) -> Study:
        return fake_study(
            **{"backends": backends or (SLOW, FAST), "turns": True, "seconds": 0.15, "block": 0.05, **fields}
        )

    return make


def run(study: Study, folder: Path) -> None:
    execute(study, folder, Progress(quiet=True))


def stored(folder: Path, pattern: str = "r*") -> dict[tuple[str, str], dict[str, Any]]:
    """Return the records by the trial's options and the round's folder."""
    found = {}
    for path in sorted((folder / "trials").glob(f"*/{pattern}/record.json")):
        options = json.loads(path.with_name("job.json").read_text())["trial"]["options"]
        key = str(options.get("hang") or options.get("after") or options["latency_ms"])
        found[key, path.parent.name] = json.loads(path.read_text())
    return found


def test_a_first_answer_comes_with_the_first_batch(study: Any, tmp_path: Path) -> None:
    printed = StringIO()
    execute(study(batches=(1, 2), rounds=2), tmp_path / "run", Progress(console=Console(file=printed, width=200)))
    answers = [line for line in printed.getvalue().splitlines() if " round " in line and "ahead after" in line]
    assert [re.match(r"\w+ round \d( of \d)?", line)[0] for line in answers] == ["in round 1", "after round 1 of 2"]  # type: ignore[index]
    assert "at batch 1" in answers[0] or "at batch 2" in answers[0]


def test_ready_trials_are_measured_before_the_last_file_is_built(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third trial's file is slow: the two others give an answer first, and measure beside it later."""
    made: list[str] = []
    late = "fake@latency_ms=1"
    monkeypatch.setattr("dyno.runner.execute.FIRST_ANSWER_AFTER_S", 0.0)
    monkeypatch.setattr(Files, "has_file", lambda _, trial: trial.options["latency_ms"] != 1 or "1" in made)
    monkeypatch.setattr(
        Files, "make_files", lambda _, trials: made.extend(str(t.options["latency_ms"]) for t in trials)
    )
    printed, folder = StringIO(), tmp_path / "run"
    execute(
        study(SLOW, late, FAST, rounds=2, until="decided"), folder, Progress(console=Console(file=printed, width=500))
    )
    lines = printed.getvalue().splitlines()
    assert made[:3] == ["4", "2", "1"]
    assert lines[0].startswith("1 trial still without a file") and lines[1].startswith("in round 1")
    sets = {key: record["facts"]["turns"]["set"] for key, record in stored(folder).items()}
    assert sets["4", "r0"] == sets["2", "r0"] != sets["1", "r0"]
    beside = {key: record["facts"]["turns"]["set"] for (key, _), record in stored(folder, "t*").items()}
    assert beside == {"4": sets["1", "r0"], "2": sets["1", "r0"]}
    assert sets["4", "r1"] == sets["2", "r1"] == sets["1", "r1"]
    result = {t.options["latency_ms"]: t for t in load_run(folder)}
    for pair in ((4, 1), (2, 1), (4, 2)):  # the set that both accompanied isn't one of theirs
        a, b = (result[each] for each in pair)
        assert len(log_ratios(a, b, "model", keep_disturbed=True)) == min(len(a.rounds), len(b.rounds))


def test_slow_builds_follow_the_first_answer(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow build is known beforehand, so no time passes, and other trials' files come first."""
    made: list[int] = []
    slowly, quickly = "fake@latency_ms=1", "fake@latency_ms=3"
    monkeypatch.setattr("dyno.runner.execute._builds_slowly", lambda trial: trial.options["latency_ms"] == 1)
    monkeypatch.setattr(
        Files, "has_file", lambda _, t: t.options["latency_ms"] not in (1, 3) or t.options["latency_ms"] in made
    )
    monkeypatch.setattr(Files, "make_files", lambda _, trials: made.extend(t.options["latency_ms"] for t in trials))
    printed, folder = StringIO(), tmp_path / "run"
    progress = Progress(console=Console(file=printed, width=500))
    execute(study(SLOW, slowly, quickly, rounds=2, until="decided"), folder, progress)
    assert made[:3] == [4, 3, 1]
    lines = printed.getvalue().splitlines()
    assert lines[0].startswith("1 trial still without a file") and lines[1].startswith("in round 1")
    sets = {key: record["facts"]["turns"]["set"] for key, record in stored(folder).items()}
    assert sets["4", "r0"] == sets["3", "r0"] != sets["1", "r0"]


@pytest.mark.parametrize("rounds", [1, 2])
def test_fixed_rounds_answer_before_a_long_build_and_lack_no_pair(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """One of five is built slowly; the slowest of the others (5 ms) is no finalist, so one round doesn't pair them."""
    events: list[Any] = []
    monkeypatch.setattr("dyno.runner.execute._builds_slowly", lambda trial: trial.options["latency_ms"] == 1)
    monkeypatch.setattr(Files, "has_file", lambda _, trial: trial.options["latency_ms"] != 1 or 1 in events)
    monkeypatch.setattr(Files, "make_files", lambda _, trials: events.extend(t.options["latency_ms"] for t in trials))
    monkeypatch.setattr(
        Progress, "show_answer", lambda self, title, *_: events.append((title, self.estimate_remaining()))
    )
    backends = (SLOW, "fake@latency_ms=1", FAST, *(f"fake@latency_ms={ms}" for ms in (3, 5)))
    study = study(*backends, rounds=rounds, reference=SLOW)
    execute(study, tmp_path / "run", Progress(console=Console(file=StringIO())))
    assert events[:6] == [4, 2, 3, 5, ("in round 1", None), 1]  # the build's duration isn't known
    assert [title for title, _ in events[6:]] == ["after round 1 of 2"][: rounds - 1]
    result = {t.options["latency_ms"]: t for t in load_run(tmp_path / "run")}
    paired = {ms: len(log_ratios(result[1], result[ms], "model", keep_disturbed=True)) for ms in (2, 3, 4, 5)}
    assert paired == {2: rounds, 3: rounds, 4: rounds, 5: 2 if rounds == 2 else 0}
    assert len(log_ratios(result[5], result[4], "model", keep_disturbed=True)) == rounds


def test_an_answer_precedes_each_delay(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One trial is ready, one compiles in loading, one is built slowly: ready results are shown before each delay."""
    events, made = list[Any](), set[int]()

    def make(_: Files, trials: Sequence[Trial]) -> None:
        events.extend(t.options["latency_ms"] for t in trials)
        made.update(events[-len(trials) :])

    monkeypatch.setattr("dyno.runner.execute._compiles", lambda trial: trial.options["latency_ms"] == 2)
    monkeypatch.setattr("dyno.runner.execute._builds_slowly", lambda trial: trial.options["latency_ms"] in (1, 3))
    monkeypatch.setattr(Files, "has_file", lambda _, trial: trial.options["latency_ms"] not in {1, 3} - made)
    monkeypatch.setattr(Files, "make_files", make)
    monkeypatch.setattr(Progress, "show_answer", lambda self, title, *_: events.append(title))
    monkeypatch.setattr(Progress, "note", lambda self, line: events.append(line.partition(":")[0]))
    backends = ("fake@latency_ms=1", FAST, SLOW)
    execute(study(*backends, rounds=1, reference=SLOW), tmp_path / "run", Progress(console=Console(file=StringIO())))
    assert events == [4, "2 trials still to compile", "in round 1", 2, "1 trial still without a file", "in round 1", 1]
    result = {t.options["latency_ms"]: t for t in load_run(tmp_path / "run")}
    pairs = ((1, 2), (1, 4), (2, 4))
    assert [len(log_ratios(result[a], result[b], "model", keep_disturbed=True)) for a, b in pairs] == [1, 1, 1]
    events.clear()
    compilers = [trial.rounds[0].folder.parent / "compiler" for trial in load_run(tmp_path / "run")]
    for folder in compilers:
        folder.mkdir()
    more = study(*backends, "fake@latency_ms=3", rounds=1, reference=SLOW)
    execute(more, tmp_path / "run", Progress(console=Console(file=StringIO())))
    assert {*events} <= {1, 2, 3, 4} and events[-1] == 3, "what was measured is not measured again"
    assert len(compilers) == 3 and not any(folder.exists() for folder in compilers)


def test_a_lone_trial_answers_before_a_slow_build(dyno: Any, tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    (tmp_path / "own.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Conv2d(3, 4, 3)\n", encoding="utf-8"
    )
    words = ("--backend", "pytorch,aoti", "--precision", "fp32", "--size", 16, "--rounds", 1, "--seconds", 0.1)
    said = dyno("run", "own.py:net", *words, "--out", "r", "--verbose", cwd=tmp_path, code=0).stderr
    told = [said.index(text) for text in ("1 trial still without a file", "in round 1: ", "export net aoti")]
    assert told == sorted(told), said


def test_fixed_rounds_also_pair_a_late_trial_with_the_fastest(study: Any, tmp_path: Path) -> None:
    """The slowest is neither the reference nor a finalist, and isn't measured again."""
    before = (SLOW, FAST, "fake@latency_ms=50")
    for backends in (before, (*before, "fake@latency_ms=1")):
        run(study(*backends, rounds=2, reference=SLOW), tmp_path / "run")
    result = {t.options["latency_ms"]: t for t in load_run(tmp_path / "run")}
    paired = {ms: len(log_ratios(result[1], result[ms], "model", keep_disturbed=True)) for ms in (2, 4, 50)}
    assert paired == {2: 2, 4: 2, 50: 0}


def test_trials_that_compile_on_load_follow_the_first_answer(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three trials compiles, so the two others answer first; the reference doesn't wait."""
    monkeypatch.setattr("dyno.runner.execute._compiles", lambda trial: trial.options["latency_ms"] == compiling)
    compiling = 4
    printed, folder = StringIO(), tmp_path / "run"
    progress = Progress(console=Console(file=printed, width=500))
    execute(study(SLOW, "fake@latency_ms=1", FAST, rounds=2, until="decided"), folder, progress)
    lines = printed.getvalue().splitlines()
    assert lines[0].startswith("1 trial still to compile") and lines[1].startswith("in round 1")
    sets = {key: record["facts"]["turns"]["set"] for key, record in stored(folder).items()}
    assert sets["1", "r0"] == sets["2", "r0"] != sets["4", "r0"]
    assert {record["facts"]["turns"]["set"] for record in stored(folder, "t*").values()} == {sets["4", "r0"]}
    assert sets["4", "r1"] == sets["2", "r1"] == sets["1", "r1"]
    compiling = 1
    run(study(SLOW, "fake@latency_ms=1", FAST, rounds=2, until="decided"), tmp_path / "reference")
    sets = {key: record["facts"]["turns"]["set"] for key, record in stored(tmp_path / "reference").items()}
    assert sets["4", "r0"] == sets["2", "r0"] == sets["1", "r0"]
    compiling, grown = 2, tmp_path / "grown"  # the reference has its rounds already
    run(study("fake@latency_ms=1", rounds=2), grown)
    run(study("fake@latency_ms=1", FAST, "fake@latency_ms=3", SLOW, rounds=2, until="decided"), grown)
    sets = {key: record["facts"]["turns"]["set"] for key, record in stored(grown).items() if key[0] != "1"}
    assert sets["3", "r0"] == sets["4", "r0"] != sets["2", "r0"]


def test_interleaved_and_sequential_runs_give_the_same_rows(study: Any, tmp_path: Path) -> None:
    every = ("model", "all", "throughput")
    run(study(boundaries=every, rounds=2, seconds=0.1), tmp_path / "turns")
    run(study(boundaries=every, rounds=2, seconds=0.1, turns=False, block=0.1), tmp_path / "alone")
    inside, alone = (stored(tmp_path / name) for name in ("turns", "alone"))
    assert inside.keys() == alone.keys()
    for key, record in inside.items():
        assert record["status"] == "ok" and record["stage"] == "done"
        told = [[(m["tag"], m["boundary"], m["clock"]) for m in r["measurements"]] for r in (record, alone[key])]
        assert told[0] == told[1]
    assert (tmp_path / "turns" / "trials").is_dir() and not list(tmp_path.glob("turns/trials/*/t*"))


def test_blocks_alternate_without_overlap(study: Any, tmp_path: Path) -> None:
    run(study(SLOW, FAST, "fake@latency_ms=1", boundaries=("model", "all")), tmp_path)
    records = stored(tmp_path)
    assert len({r["facts"]["turns"]["set"] for r in records.values()}) == 1
    assert sorted(r["facts"]["turns"]["place"] for r in records.values()) == [0, 1, 2]
    for boundary in ("model", "all"):
        counts = {len(r["facts"]["blocks"][boundary]) for r in records.values()}
        assert len(counts) == 1 and counts.pop() >= 3, "the same number of blocks each"
        windows = sorted((*w, key) for key, r in records.items() for w in r["facts"]["blocks"][boundary])
        assert all(a[1] <= b[0] for a, b in pairwise(windows)), "one at a time"
        orders = [tuple(w[2] for w in windows[i : i + 3]) for i in range(0, len(windows), 3)]
        assert all(len(set(order)) == 3 for order in orders), "everyone has a block before anyone has the next"
    result = load_run(tmp_path)
    for trial in result:
        numbers = trial.rounds[0].read_arrays("samples.npz")["latency_model_block"]
        assert (np.diff(numbers) >= 0).all()
        assert [*trial.rounds[0].block_medians("latency", "model")] == [*range(numbers[-1] + 1)]
    slow, fast = (next(t for t in result if t.options["latency_ms"] == ms) for ms in (4, 1))
    (logs,) = log_ratios(slow, fast, "model", keep_disturbed=True)
    assert logs > 0


def test_later_rounds_load_in_parallel_and_warm_up_in_turn(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    monkeypatch.setattr(Progress, "tick", lambda _, stage, elapsed: stages.append(stage))
    monkeypatch.setattr(turns.CoreLatency, "measure", lambda _: 170)
    run(study(SLOW, FAST, rounds=2), tmp_path)
    assert {stage.partition(" in turns")[0] for stage in stages if " in turns" in stage} == {"model"}, "all are warm"
    assert {"start", "import"} <= {*stages}, "loading is shown"
    records = stored(tmp_path)
    for facts in (record["facts"] for record in records.values()):
        assert facts["core_latencies"] == {name: [170] * len(blocks) for name, blocks in facts["blocks"].items()}
    assert {key[1]: r["facts"]["turns"]["together"] for key, r in records.items()} == {"r0": 1, "r1": 2}
    windows = sorted((*w, key) for key, r in records.items() if key[1] == "r1" for w in r["facts"]["blocks"]["model"])
    assert len(windows) >= 6 and all(a[1] <= b[0] for a, b in pairwise(windows)), "one at a time"
    for trial in load_run(tmp_path):
        first = next(r for r in trial.rounds if r.round_index == 0)
        assert trial.value("load") == first.value("load") is not None, "loading beside others is no load time"
        assert trial.value("peak_memory") is not None


class Frozen(Progress):
    """Measures the processor time that waiting members use during another member's turn."""

    def __init__(self, seconds: float) -> None:
        super().__init__(quiet=True)
        self.span, self.ticks_used = seconds, []

    def tick(self, stage: str, elapsed: float) -> None:
        """See `Progress.tick`."""
        if "in turns" in stage and not self.ticks_used:
            workers = [p for p in psutil.Process().children() if "main.py" in " ".join(p.cmdline())]
            until(lambda: all(p.status() == psutil.STATUS_STOPPED for p in workers), 300)  # once the signal has arrived
            before = [_ticks(p.pid) for p in workers]
            time.sleep(self.span)
            self.ticks_used = [_ticks(p.pid) - b for p, b in zip(workers, before, strict=True)]
            self.states = [p.status() for p in workers]


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_telemetry_rests_while_a_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    telemetry = SimpleNamespace(pause=lambda: events.append("pause"), resume=lambda: events.append("resume"))
    member: Any = SimpleNamespace(
        started=SimpleNamespace(telemetry=telemetry),
        group=SimpleNamespace(largest=0),
        used_s=1.0,
        last_message="done 0",
    )
    monkeypatch.setattr(turns, "_send_signal", lambda _, number: events.append(number.name))
    turns._wake_member(member)
    turns.InterleavedGroup._stop_member(SimpleNamespace(), member, 0.5, False)  # type: ignore[arg-type]
    assert events == ["SIGCONT", "resume", "SIGSTOP", "pause"] and (member.used_s, member.group.largest) == (1.5, 0)


def test_an_interrupt_ends_the_processes_of_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def stop() -> None:
        raise KeyboardInterrupt

    member = SimpleNamespace(job=SimpleNamespace(runtime=Runtime(threads=1)))
    groups = [SimpleNamespace(members=[member], run=stop, end=lambda k=k: ended.append(k)) for k in range(2)]
    monkeypatch.setattr(ensemble, "load_in_parallel", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        ensemble._run_groups(groups, Progress(quiet=True))  # type: ignore[arg-type]
    assert ended == [0, 1]


def test_waiting_jobs_use_no_cpu(study: Any, tmp_path: Path) -> None:
    seen = Frozen(1.0)
    execute(study(SLOW, FAST, "fake@latency_ms=1"), tmp_path, seen)
    assert seen.ticks_used == [0, 0, 0] and set(seen.states) == {psutil.STATUS_STOPPED}


BACKENDS = """
import os, sys, time
from pathlib import Path
import psutil
from dyno.worker.backends.fake import Fake, FakeSession
from dyno.worker import jobs

class Late(Fake):
    name = "late"
    options = (*Fake.options, "hang", "after", "most")
    def load(self, trial, artifact):
        workers = [p for p in psutil.Process(os.getppid()).children() if "main.py" in " ".join(p.cmdline())]
        if len(workers) > trial.options.get("most", 99):
            raise MemoryError
        return Session(trial)

class Session(FakeSession):
    def run(self, slot=0):
        super().run(slot)
        if "after" not in self.options or "time" not in Path(sys.argv[1], "stage").read_text():
            return
        self.runs = getattr(self, "runs", 0) + 1
        if self.runs > self.options["after"]:
            if self.options.get("hang"):
                Path(sys.argv[1], "hangs").touch()
                time.sleep(3600)
            os.abort()

LATE = Late()
"""


@pytest.fixture
def late(importable: Any) -> str:
    """A backend in a separate module that crashes or hangs after N timed runs."""
    importable("late_backend", BACKENDS)
    return "late_backend:LATE"


def test_a_crash_in_a_block_fails_only_its_own_row(study: Any, tmp_path: Path, late: str) -> None:
    # A block has at least two runs, the first uncounted, and there are three blocks regardless of duration.
    run(study(SLOW, FAST, f"{late}@latency_ms=2@after=3"), tmp_path / "run")
    records = stored(tmp_path / "run")
    assert {key[0]: r["status"] for key, r in records.items()} == {"4": "ok", "2": "ok", "3": "crashed"}
    crashed = records["3", "r0"]
    assert crashed["stage"] == "time model" and "SIGABRT" in crashed["reason"]
    counts = {len(r["facts"]["blocks"]["model"]) for r in records.values() if r["status"] == "ok"}
    assert len(counts) == 1 and counts.pop() >= 3


def test_jobs_that_run_out_of_memory_are_retried_alone(
    study: Any, tmp_path: Path, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Started last, while the others are alive.
    monkeypatch.setattr(
        turns.InterleavedGroup, "_shuffle_items", lambda self, what, members: sorted(members, key=_memory_bound)
    )
    crowded, never = f"{late}@latency_ms=1@most=1", f"{late}@latency_ms=3@most=0"
    run(study(SLOW, FAST, crowded, never, reference=SLOW), tmp_path / "run")
    records = stored(tmp_path / "run")
    assert {key[0]: r["status"] for key, r in records.items()} == {"4": "ok", "2": "ok", "1": "ok", "3": "oom"}
    assert records["4", "r0"]["facts"]["turns"]["set"] == records["2", "r0"]["facts"]["turns"]["set"]
    assert not records["1", "r0"]["facts"].get("turns")


def _memory_bound(member: turns.InterleavedJob | list[turns.InterleavedJob]) -> int:
    return int("most" in (member[0] if isinstance(member, list) else member).trial.options)


class Card:
    """A GPU with 10 GB; each loaded process takes 4 GB."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.imported: list[int] = []

    def free(self) -> float:
        """See `nvml.Gpu`."""
        workers = [p for p in psutil.Process().children() if "main.py" in " ".join(p.cmdline())]
        stages = [read_stage(Path(p.cmdline()[-1])) for p in workers]
        self.loaded.append(sum(stage not in ("start", "import") for stage in stages))
        self.imported.append(stages.count("import"))
        return 10e9 - 4e9 * self.loaded[-1]

    def close(self) -> None:
        """See `nvml.Gpu`."""


@pytest.mark.parametrize("processors", [1, 3])
def test_gpu_memory_limits_the_number_of_live_jobs(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    card = Card()
    monkeypatch.setattr(turns.InterleavedGroup, "_at_once", lambda _: processors)
    monkeypatch.setattr(turns, "find_gpu", lambda *_: card)
    monkeypatch.setattr(nvml, "read_available", lambda: 1e12)
    run(study(SLOW, FAST, "fake@latency_ms=1", reference=SLOW), tmp_path)
    # A second process needs 6, 1.5 times 4: 10 - 4 is enough, 10 - 8 is not.
    assert max(card.loaded) == 2 and {r["status"] for r in stored(tmp_path).values()} == {"ok"}
    assert max(card.imported) == processors, "importing takes no room there"
    assert stored(tmp_path, "t*"), "the reference measured beside the one that had no room"


def test_trials_added_later_are_interleaved_with_the_reference(study: Any, tmp_path: Path) -> None:
    progress = Progress(quiet=True)
    trials = {str(one.trial.options["latency_ms"]): one.trial for one in expand(study(rounds=2))}
    rounds = Rounds(Run(tmp_path), Files(progress), progress, lambda trial: trial.options["latency_ms"] == 4, {})
    rounds.measure_rounds([trials["4"]])
    rounds.measure_rounds([trials["2"]], [trials["4"]])
    assert [len(each) for each in (stored(tmp_path), stored(tmp_path, "t*"))] == [4, 2]
    slow, fast = (next(t for t in load_run(tmp_path) if t.options["latency_ms"] == ms) for ms in (4, 2))
    assert len(log_ratios(slow, fast, "model", keep_disturbed=True)) == 2


def test_a_hang_fails_only_its_own_row_by_its_own_time(
    study: Any, tmp_path: Path, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hours pass for the conductor once a member hangs, however long the others take until then.
    def monotonic() -> float:
        return time.monotonic() + 1e4 * any(tmp_path.glob("run/trials/*/r0/hangs"))

    monkeypatch.setattr(turns, "time", SimpleNamespace(sleep=time.sleep, monotonic=monotonic))
    monkeypatch.setattr(turns, "MAX_POLL_GAP_S", 1e5)
    run(study(SLOW, FAST, f"{late}@latency_ms=2@after=3@hang=true", timeout=1200.0), tmp_path / "run")
    assert {key[0]: r["status"] for key, r in stored(tmp_path / "run").items()} == {
        "4": "ok", "2": "ok", "True": "timeout",
    }  # fmt: skip


def test_suspending_dyno_causes_no_timeouts(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z stops Dyno, not its jobs."""
    stages: list[str] = []

    def monotonic() -> float:
        if not stages:
            stages.extend(p.read_text() for p in tmp_path.glob("run/trials/*/r0/stage") if "model" in p.read_text())
        return time.monotonic() + 1e4 * bool(stages)

    monkeypatch.setattr(turns, "time", SimpleNamespace(sleep=time.sleep, monotonic=monotonic))
    run(study(timeout=1200.0), tmp_path / "run")
    assert stages and {r["status"] for r in stored(tmp_path / "run").values()} == {"ok"}


KILLED = """
import sys
from pathlib import Path
from dyno import Study
from dyno.runner.execute import execute
from dyno.jobs.progress import Progress
backends = "fake@latency_ms=4", "fake@latency_ms=2"
study = Study(models=("fake:net",), channels=1, boundaries=("model",), backends=backends,
              rounds=2, seconds=600.0, warmup=0.02, threads=1, turns=True)
execute(study, Path(sys.argv[1]), Progress(quiet=True))
"""


def test_killing_the_parent_leaves_no_process(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "run")])
    try:
        workers = until(lambda: _workers(parent.pid, psutil.STATUS_STOPPED), 300)
        everyone = psutil.Process(parent.pid).children(recursive=True)
        assert workers and len(everyone) >= 2
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until(lambda: not any(map(_runs, everyone)), 300)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it may end between the two calls
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _workers(parent: int, status: str) -> list[psutil.Process]:
    children = psutil.Process(parent).children()
    return [p for p in children if p.status() == status] if len(children) == 2 else []


def test_missing_parts_of_a_round_are_measured_with_the_reference(study: Any, tmp_path: Path) -> None:
    asked = study(SLOW, FAST, rounds=2, reference=f"{SLOW}")
    run(asked, tmp_path)
    before = stored(tmp_path)
    gone = next(p for p in tmp_path.glob("trials/*/r1/record.json")
                if json.loads(p.read_text())["trial"] == before["2", "r1"]["trial"])  # fmt: skip
    gone.unlink()
    run(asked, tmp_path)
    after, companions = stored(tmp_path), stored(tmp_path, "t*")
    assert [key for key in before if before[key] != after[key]] == [("2", "r1")]
    assert list(companions) == [("4", "t0")]
    assert companions["4", "t0"]["facts"]["turns"]["set"] == after["2", "r1"]["facts"]["turns"]["set"]
    slow, fast = (next(t for t in load_run(tmp_path) if t.options["latency_ms"] == ms) for ms in (4, 2))
    assert len(log_ratios(slow, fast, "model", keep_disturbed=True)) == 2, "a pair for each round all the same"
    assert len(slow.rounds) == 2
    run(asked, tmp_path)
    assert stored(tmp_path) == after and stored(tmp_path, "t*") == companions


def test_memory_limits_the_number_of_live_jobs(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    advance = turns.InterleavedGroup._advance_members

    def seen(self: turns.InterleavedGroup, members: list[turns.InterleavedJob], word: str = "") -> None:
        alive.append(len(self.alive))
        advance(self, members, word)

    monkeypatch.setattr(turns.InterleavedGroup, "_advance_members", seen)
    # A machine with room for two processes: each has the rest of its group's memory.
    monkeypatch.setattr(turns.InterleavedGroup, "_has_room", lambda self, member, count: len(self.alive) + count <= 2)
    run(study(SLOW, FAST, "fake@latency_ms=1", reference=SLOW), tmp_path)
    assert max(alive) == 2
    sets = {key[0]: r["facts"]["turns"]["set"] for key, r in stored(tmp_path).items()}
    assert set(sets) == {"4", "2", "1"} and sets["2"] != sets["1"]
    companions = {r["facts"]["turns"]["set"] for r in stored(tmp_path, "t*").values()}
    assert {sets["4"], *companions} >= {sets["2"], sets["1"]}, "the reference is in every group"


def test_with_memory_for_one_job_measurement_is_sequential(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns.InterleavedGroup, "_has_room", lambda *_: False)
    said: list[str] = []
    progress = Progress(quiet=True)
    monkeypatch.setattr(progress, "note", said.append)
    execute(study(reference=SLOW), tmp_path, progress)
    records = stored(tmp_path)
    assert {r["status"] for r in records.values()} == {"ok"} and len(records) == 2
    assert any("one after the other" in line for line in said)
    assert all(len(r["facts"]["blocks"]["model"]) >= 3 for r in records.values())


def test_settings_that_contradict_interleaving_are_refused(study: Any) -> None:
    refuses("turns", study, samples=10)
    refuses("block", study, block=0.0)


@pytest.mark.parametrize(
    ("delays", "blocks"),
    [((), 3), ((0.5, 0.0, 0.3), 5), ((0.0, 0.5), 4), ((0.5,) * 9, 6)],
    ids=["quiet", "two of three", "one of two", "all"],
)
def test_all_trials_repeat_disturbed_blocks(
    delays: tuple[float, ...], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks of 0.05 s are planned for each of two members, so at most three may be repeated."""
    plan = Plan(("model",), seconds=0.15, blocks=3, block_s=0.05)
    job = SimpleNamespace(plan=plan, trial=SimpleNamespace(plan=plan, label=""))
    members: Any = [turns.InterleavedJob(job, Path(), 0, last_message="ready model") for _ in range(2)]  # type: ignore[arg-type]
    members[1].delays.append(0.5)  # of the boundary before
    group = turns.InterleavedGroup(members, "seed", Progress(quiet=True), lambda member: None, alive=members)
    measured: list[int] = []

    def block(measuring: list[turns.InterleavedJob]) -> float:
        (member,) = measuring
        number = len(member.delays)
        measured.append(number)
        is_hit = member is members[0] and number < len(delays)
        member.delays.append(delays[number] if is_hit else 0.0)
        return 0.05

    monkeypatch.setattr(group, "_measure_block", block)
    monkeypatch.setattr(group, "_advance_members", lambda *_: None)
    group._measure_boundary()
    assert sorted(measured) == sorted([*range(blocks)] * 2)


@pytest.mark.parametrize(("counter", "moved"), [("delays", 0), ("core_latencies", 2), ("core_latencies", 6)])
def test_disturbed_blocks_and_rounds_are_left_out_of_the_ratio(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counter: str, moved: int
) -> None:
    """Judged by the counters alone: the rest gives the median of the blocks' ratios, as in NumPy."""
    monkeypatch.setattr(turns, "find_disturbed", lambda delays: [False] * len(delays))
    run(study(rounds=4, seconds=0.5, boundaries=("model", "throughput")), tmp_path)
    quiet = {0: 0.0, 1: 0.0, 2: 0.0}
    for path in tmp_path.glob("trials/*/r*/record.json"):
        record = json.loads(path.read_text())
        count = len(record["facts"]["blocks"]["model"])
        is_slow = json.loads(path.with_name("job.json").read_text())["trial"]["options"]["latency_ms"] == 4
        # Disturbed in the slow trial: round 1's second block, all but two of round 2, all but one of round 3.
        hit = [quiet, {1: 0.3}, dict.fromkeys(range(2, count), 0.5), dict.fromkeys(range(1, count), 0.5)]
        delays = hit[record["round"]] if is_slow else {}
        usual, rare = (580, 170) if moved == 6 else (170, 580)
        record["facts"] |= {"delays": {"model": [0.0] * count}, "core_latencies": {"model": [usual] * count}}
        values = [rare if delays.get(k) else usual for k in range(count)]
        values = [delays.get(k, 0.0) for k in range(count)] if counter == "delays" else values
        record["facts"][counter] = {"model": values}
        path.write_text(json.dumps(record))
    slow, fast = sorted(load_run(tmp_path), key=lambda trial: -float(trial.options["latency_ms"]))
    logs = []
    for a, b in zip(slow.rounds, fast.rounds, strict=True):
        samples = [dict(np.load(r.folder / "samples.npz")) for r in (a, b)]
        medians = [
            [np.median(s["latency_model"][s["latency_model_block"] == k]) for k in np.unique(s["latency_model_block"])]
            for s in samples
        ]
        logs.append([*np.log(np.divide(*medians))])
    expected = [np.median(logs[0]), np.median([*logs[1][:1], *logs[1][2:]]), np.median(logs[2][:2])]
    assert log_ratios(slow, fast, "model") == pytest.approx(expected)
    latencies = read_trials(load_run(tmp_path)).frame.set_index("trial")["latency_ms"]
    medians = [np.median(np.load(r.folder / "samples.npz")["latency_model"]) for r in slow.rounds[:2]]
    assert latencies[slow.id] == pytest.approx(1e3 * np.exp(np.mean(np.log(medians))))
    evidence = gather_evidence(slow, fast, "model")
    assert evidence is not None and evidence.undisturbed and (evidence.rounds, evidence.disturbed) == (3, 1)
    evidence = gather_evidence(slow, fast, "throughput")
    assert evidence is not None and not evidence.undisturbed, "without counters nothing is known"
    everything = log_ratios(slow, fast, "model", keep_disturbed=True)
    assert everything == pytest.approx([np.median(each) for each in logs])
    sentences = " ".join(list_sentences(read_trials(load_run(tmp_path))))
    # Round 1 has one such block of many; in rounds 2 and 3 of the slow trial almost all are.
    text = f"The processors were further apart during {moved} of 8 jobs (a signal from one to another and back took 580"
    assert (text in sentences) == bool(moved)


def test_one_undisturbed_round_of_five_gives_latencies_and_the_best_estimate(study: Any, tmp_path: Path) -> None:
    """The slow trial is far more disturbed, so the mean of all rounds' ratios is many times the real ratio."""
    run(study(rounds=5, seconds=0.3, boundaries=BOUNDARIES), tmp_path)
    noise = np.random.default_rng(0)
    for path in tmp_path.glob("trials/*/r*/record.json"):
        record = json.loads(path.read_text())
        usual = json.loads(path.with_name("job.json").read_text())["trial"]["options"]["latency_ms"] / 1e3
        seconds = usual * ((1, 3, 3, 120, 90)[record["round"]] if usual == 4e-3 else 1)
        with np.load(path.with_name("samples.npz")) as stored:
            samples = dict(stored)
        for name in ("latency_model", "latency_all"):
            samples[name] = seconds * noise.lognormal(0, 0.01, len(samples[name]))
        np.savez(path.with_name("samples.npz"), **samples)
        for measured in record["measurements"]:
            if measured["tag"] == "throughput":
                measured["value"] = 1 / (60 * usual if usual == 4e-3 else usual)
        waited = {"model": 0.5 if record["round"] else 0.0, "all": 0.5, "throughput": 0.5}
        counts = {name: len(record["facts"]["blocks"][name]) for name in BOUNDARIES}
        record["facts"]["delays"] = {name: [waited[name]] * count for name, count in counts.items()}
        record["facts"]["core_latencies"] = {name: [170] * count for name, count in counts.items()}
        path.write_text(json.dumps(record))
    results = read_trials(load_run(tmp_path))
    fast, slow = (row for _, row in results.frame.sort_values("latency_ms").iterrows())
    assert (fast["latency_ms"], slow["latency_ms"]) == pytest.approx((2, 4), rel=0.02)
    assert (fast["latency_all_ms_median"], fast["throughput_ips"]) == pytest.approx((2, 500), rel=0.02)
    assert np.isnan(slow["latency_all_ms_median"]) and np.isnan(slow["throughput_ips"])
    row, ratio = (fast, 2.0) if slow["verdict"] == "reference" else (slow, 0.5)
    assert row["speedup"] == pytest.approx(ratio, rel=0.05) and row["measured"] == "in turns"
    assert row["speedup_low"] <= ratio <= row["speedup_high"]
    logs = log_ratios(results.trials[slow["trial"]], results.trials[fast["trial"]], "model")
    assert np.exp(np.mean(logs)) > 4 * MAX_INTERVAL_RATIO


@pytest.mark.parametrize(("lost", "is_short"), [((), False), ((2,), True), ((0, 1, 2), False)])
def test_rounds_lost_to_other_programs_are_replaced(
    study: Any, tmp_path: Path, lost: tuple[int, ...], is_short: bool
) -> None:
    """Four equal engines: the runner-up gets rounds, and every rival while rounds are missing. Without any quiet round
    all rounds count, and none is missing."""
    found = _run_equal(study(*(f"fake@latency_ms={2 + k / 100}" for k in range(4)), rounds=3), tmp_path, lost)
    winner, runner_up, *others = rank_goals(found)[0].fastest["trial"]
    asked = {id for pair in list_pending(found) if winner in pair.trials for id in pair.trials}
    behind = {*others} - {found.frame["reference"].iloc[0]}
    assert runner_up in asked and behind
    assert asked & behind == (behind if is_short else set())


@pytest.mark.parametrize("lost", [(), (2,)])
def test_a_backend_with_its_own_rounds_only_replaces_lost_ones(
    study: Any, tmp_path: Path, lost: tuple[int, ...]
) -> None:
    equal = [f"fake@latency_ms={2 + k / 100}@rounds=3" for k in range(3)]
    found = _run_equal(study(*equal, rounds=4), tmp_path, lost)
    winner, *others = rank_goals(found)[0].fastest["trial"]
    asked = {id for pair in list_pending(found) if winner in pair.trials for id in pair.trials}
    assert asked == ({winner, *others} if lost else set())


def _run_equal(equal: Study, folder: Path, lost: tuple[int, ...]) -> RunData:
    """Measure equal engines and mark the rounds `lost` as disturbed by other programs."""
    run(replace(equal, seconds=0.3, until="rounds"), folder)
    rng = np.random.default_rng(1)
    for trial in load_run(folder):
        for number, each in enumerate(trial.rounds):
            arrays = dict(np.load(each.folder / "samples.npz"))
            arrays["latency_model"] = np.full(len(arrays["latency_model"]), 2e-3 * rng.normal(1, 0.02))
            np.savez(each.folder / "samples.npz", **arrays)
            record = json.loads((each.folder / "record.json").read_text())
            blocks = len(record["facts"]["blocks"]["model"])
            record["facts"]["delays"] = {"model": [0.0] + [0.5 * (number in lost)] * (blocks - 1)}
            (each.folder / "record.json").write_text(json.dumps(record))
    text = (folder / "study.toml").read_text()
    (folder / "study.toml").write_text(text.replace('until = "rounds"', 'until = "decided"'))
    return read_trials(folder)


@pytest.mark.parametrize("cold", [0.0, 0.3])
def test_an_engine_still_warming_up_is_a_warning(study: Any, tmp_path: Path, cold: float) -> None:
    """Its latencies start 30 % too high and fall from block to block, in every round."""
    run(study(rounds=4, seconds=0.5), tmp_path)
    rng = np.random.default_rng(0)
    for trial in load_run(tmp_path):
        excess = cold if trial.options["latency_ms"] == 4 else 0.0
        for each in trial.rounds:
            arrays = dict(np.load(each.folder / "samples.npz"))
            block = arrays["latency_model_block"]
            seconds = trial.options["latency_ms"] / 1e3 * (1 + excess * np.exp(-block / 4))
            arrays["latency_model"] = seconds * rng.normal(1, 0.005, len(block))
            np.savez(each.folder / "samples.npz", **arrays)
            path = each.folder / "record.json"
            record = json.loads(path.read_text())
            record["facts"]["delays"] = {}  # a busy machine would leave blocks out
            path.write_text(json.dumps(record))
    fast, slow = sorted(load_run(tmp_path), key=lambda trial: trial.options["latency_ms"])
    change = find_drift(fast, slow, "model")
    assert change is not None and change.low < change.value < change.high
    text = " ".join(list_sentences(read_trials(load_run(tmp_path))))
    warning = f"gets slower against {slow.configuration}, by {change.value:.0%} from the first block to the last"
    assert (warning in text) == bool(cold)
    # The cold trial's ten blocks fall from 1.3 to 1.03: the ratio rises by 26 %, by the Theil-Sen line by less.
    assert (0.1 < change.value < 0.26) if cold else abs(change.value) < 0.02


@pytest.mark.usefixtures("preloaded")
def test_real_engines_are_interleaved_from_the_command_line(dyno: Any, tmp_path: Path) -> None:
    for name in ("onnx", "onnxruntime", "openvino"):
        pytest.importorskip(name)
    import onnx

    weights = ", ".join(f"{(k % 7 - 3) / 9:.3f}" for k in range(8 * 3 * 9))
    graph = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> small (float[n, 3, 32, 32] image) => (float[n, 8, 30, 30] y) '
        f"<float[8, 3, 3, 3] w = {{{weights}}}> {{ y = Conv(image, w) }}"
    )
    onnx.save(graph, tmp_path / "small.onnx")
    words = "small.onnx --backend openvino,onnxruntime --rounds 2 --seconds 0.3 --warmup 0.1"
    boundaries = "--boundaries model,throughput --threads 1 --turns"
    dyno("run", *words.split(), *boundaries.split(), "--out", tmp_path / "run", cwd=tmp_path, code=0)
    shown = dyno("show", tmp_path / "run", "--format", "json")
    rows = {row["backend"]: row for row in json.loads(shown.stdout)["tables"]["trials"]["rows"]}
    assert {row["status"] for row in rows.values()} == {"ok"}
    other = rows["openvino"]
    assert other["measured"] == "in turns" and other["speedup_low"] < other["speedup"] < other["speedup_high"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "log ratios, paired, each the median over blocks" in page, "the report says how these were compared"
    again = dyno("run", *words.split(), *boundaries.split(), "--out", tmp_path / "run", cwd=tmp_path)
    assert again.returncode == 0 and not list(tmp_path.glob("run/trials/*/t*")), "nothing is measured twice"


MODEL = ModelSpec("net", "torchvision:resnet18")
EAGER = Trial(MODEL, "pytorch", "fp32", Dims(1, 64, 64))
ELSEWHERE = Runtime("other", "elsewhere/bin/python")


def made(backend: str, precision: str = "fp32", batch: int = 1, **more: Any) -> Trial:
    return Trial(MODEL, backend, precision, Dims(batch, 64, 64), **more)


STUDY = (
    made("openvino"), made("onnxruntime", "int8"), made("onnxruntime"),
    made("onnxruntime", options={"b": 2, "a": "x/y"}), made("onnxruntime", "int8", options={"b": 2, "a": "x/y"}),
    made("pytorch", "bf16"), made("pytorch", options={"threads": 1}), EAGER,
    made("module:NAME"), made("pytorch", runtime=ELSEWHERE), made("onnxruntime", batch=8),
    made("onnxruntime", "int8", batch=8), made("pytorch", "fp16", batch=8), made("module:NAME", batch=8),
    made("onnxruntime", "int8", batch=8, options={"b": 2, "a": "x/y"}),
)  # fmt: skip
SIDES = tuple(replace(t, side=side) for t in (EAGER, made("onnxruntime"), made("openvino", "int8")) for side in "ba")
ASKED = (
    "", "onnxruntime", "onnxruntime/int8", "onnxruntime:int8", "onnxruntime int8", "onnxruntime@a=x/y@b=2",
    "onnxruntime@b=2@a=x/y", "onnxruntime@b=2@a=x/y/int8", "onnxruntime/int8@b=2@a=x/y", "module:NAME",
    "module:NAME/fp32", "pytorch@runtime=other", EAGER.id[:8], STUDY[4].id, STUDY[12].id[:4],
)  # fmt: skip


def in_tables(folder: Path, trials: tuple[Trial, ...], requested: str) -> dict[str, str]:
    """Store a run of the trials; return each trial's reference, by id."""
    for trial in trials:
        place = folder / "trials" / trial.id / "r0"
        place.mkdir(parents=True)
        write_json(place / "job.json", to_json(Job("run", trial=trial)))
        write_record(place, Record("ok", "done", trial=trial.id))
    return {id: chosen.id for id, chosen in correctness.find_references(load_run(folder), requested).items()}


def in_turns(trials: tuple[Trial, ...], requested: str) -> dict[str, str]:
    """Return each trial's reference where the trials measure in turns, by id."""
    mixed = Random(1).sample(trials, len(trials))
    fits = correctness.make_matcher(requested, mixed) if requested else None
    chosen = [(group, ensemble.choose_reference(group, fits)) for group in ensemble.group_trials(mixed)]
    return {t.id: reference.id for group, reference in chosen if reference for t in group}


@pytest.mark.parametrize("requested", ASKED)
def test_tables_and_turns_choose_the_same_reference(tmp_path: Path, requested: str) -> None:
    assert (chosen := in_tables(tmp_path, STUDY, requested)) == in_turns(STUDY, requested)
    assert chosen


@pytest.mark.parametrize("requested", ["", SIDES[0].id])
def test_tables_and_turns_choose_the_same_baseline_in_a_comparison(tmp_path: Path, requested: str) -> None:
    assert (chosen := in_tables(tmp_path, SIDES, requested)) == in_turns(SIDES, requested)
    baselines = {SIDES[0].id} if requested else {t.id for t in SIDES if t.side == "a"}
    assert set(chosen.values()) == baselines


def test_every_spelling_of_a_reference_finds_its_trial() -> None:
    found = {requested: in_turns(STUDY, requested).get(EAGER.id) for requested in ASKED}
    whole, eight = STUDY[3].id, STUDY[4].id
    assert list(found.values()) == [
        EAGER.id, STUDY[2].id, *[STUDY[1].id] * 3, whole, whole, eight, eight, STUDY[8].id,
        STUDY[8].id, STUDY[9].id, EAGER.id, eight, None,
    ]  # fmt: skip


@pytest.mark.parametrize("requested", ["tensorrt", "onnxruntime/bf16", "onnxruntime@b=2", "pytorch/fp99", "fp32"])
def test_references_without_a_trial_are_refused(tmp_path: Path, requested: str) -> None:
    refuses("fits the reference", in_tables, tmp_path, STUDY, requested)
    assert not in_turns(STUDY, requested)
