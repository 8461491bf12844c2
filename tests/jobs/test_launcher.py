"""Every way a job can end becomes a record, and no process of the job survives."""

import io
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import psutil
import pytest

from dyno.jobs import launcher, telemetry
from dyno.jobs.launcher import launch, make_environment, read_stage
from dyno.jobs.telemetry import ProcessTree, Telemetry
from dyno.worker.record import Record, read_record, write_json
from dyno.worker.spec import SCHEMA, Job, Runtime, Trial, UserError, to_json
from dyno.worker.system import SILENCING_VARIABLES

SIGKILLED = "killed by SIGKILL"

# Scripted end -> status and reason; a hang needs a separate time limit.
ENDS = {
    "exception": ("failed", "RuntimeError: scripted failure"),
    "skip": ("skipped", "scripted: this machine lacks it; install nothing"),
    "segfault": ("crashed", "killed by SIGSEGV"),
    "exit": ("crashed", "exited with code 7 without a record"),
    "oom": ("oom", r"out of memory: Unable to allocate .*"),
    "killed": ("crashed", SIGKILLED),
    "hang": ("timeout", "not finished after 1.5 s; killed; --timeout SECONDS allows more"),
    "nan": ("failed", r"the outputs are not finite .*"),
}
STAGES = {"import": "import", "load": "load", "run": "first call", "fetch": "warm up all"}
AT_RUN = [(kind, "run") for kind in ENDS]
ELSEWHERE = [(kind, at) for kind in ENDS for at in ("import", "load", "fetch") if kind != "nan"]
ELSEWHERE.remove(("skip", "import"))  # missing parts are reported in `load`
QUICKLY = [("exception", "load"), ("segfault", "fetch")]


def run(trial: Trial, folder: Path, timeout_s: float = 1200.0, number: int = 0) -> Record:
    return launch(Job("run", trial.runtime, trial, number), folder, timeout_s)


class Clock:
    """Launcher's clock: nearly stands still until `over` is true, then jumps past any time limit."""

    def __init__(self, over: Callable[[], bool]) -> None:
        self.over, self.begun = over, time.monotonic()

    def monotonic(self) -> float:
        return 1e-6 * (time.monotonic() - self.begun) + (1e6 if self.over() else 0.0)


@pytest.fixture
def times_out_when(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Expire jobs' time limits when the condition holds, at any machine speed."""
    return lambda over: monkeypatch.setattr("dyno.jobs.launcher.time", Clock(over))


def gone(pid: int, within_s: float = 600.0) -> bool:
    """Return whether the process ends in that time; a zombie counts as ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_a_successful_job_stores_all_its_files(fake_trial: Any, tmp_path: Path) -> None:
    trial = fake_trial()
    record = run(trial, tmp_path / "r0")
    assert (record.status, record.stage, record.reason) == ("ok", "done", "")
    assert (record.trial, record.round) == (trial.id, 0)
    assert record == read_record(tmp_path / "r0")
    assert {f.name for f in (tmp_path / "r0").iterdir()} == {
        "job.json", "record.json", "samples.npz", "outputs.npz", "telemetry.npz", "stage", "stdout.log", "stderr.log",
    }  # fmt: skip
    assert None not in [record.value(tag) for tag in ("import", "load", "first_call")]
    assert (record.value("peak_memory") or 0) > 5e6
    assert (len(record.facts.affinity), record.facts.threads) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "at"),
    [*AT_RUN, *QUICKLY, *(pytest.param(*e, marks=pytest.mark.slow) for e in ELSEWHERE if e not in QUICKLY)],
)
def test_every_job_outcome_is_recorded(
    fake_trial: Any, tmp_path: Path, times_out_when: Any, kind: str, at: str
) -> None:
    if kind == "hang":
        times_out_when(lambda: read_stage(tmp_path) == STAGES[at])
    record = run(fake_trial(fail=kind, at=at), tmp_path, 1.5 if kind == "hang" else 1200.0)
    status, reason = ENDS[kind]
    assert record.status == status
    assert re.fullmatch(reason, record.reason), record.reason
    assert record.stage == ("evaluate" if kind == "nan" else STAGES[at])
    assert record == read_record(tmp_path)


@pytest.mark.parametrize("kind", ["exception", "segfault", pytest.param("hang", marks=pytest.mark.slow)])
def test_a_failure_during_close_keeps_the_measurement(
    fake_trial: Any, tmp_path: Path, times_out_when: Any, kind: str
) -> None:
    """ONNX Runtime on a GPU aborts as it closes some networks' sessions (CUDA failure 800 in cudaFreeHost)."""
    if kind == "hang":
        times_out_when(lambda: read_stage(tmp_path) == "close")
    record = run(fake_trial(fail=kind, at="close"), tmp_path, 1.5 if kind == "hang" else 1200.0)
    assert (record.status, record.reason) == ("ok", "")
    (warning,) = [text for text in record.warnings if "closed" in text]
    assert re.fullmatch(f"the engine failed as it was closed, after everything was measured: {ENDS[kind][1]}", warning)
    assert {m.tag for m in record.measurements} >= {"latency", "peak_memory"}
    names = {f.name for f in tmp_path.iterdir()}
    assert {"samples.npz", "outputs.npz"} <= names and "partial.json" not in names
    assert record == read_record(tmp_path)


@pytest.mark.parametrize(("kernel", "status"), [(False, "crashed"), pytest.param(True, "oom", marks=pytest.mark.slow)])
def test_a_kill_during_close_is_marked_for_another_measurement(
    fake_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bool, status: str
) -> None:
    kills = count() if kernel else repeat(0)
    monkeypatch.setattr(launcher, "_kernel_kills", lambda: next(kills))
    record = run(fake_trial(fail="killed", at="close"), tmp_path)
    assert (record.status, record.stage, record.was_killed) == (status, "close", not kernel)
    assert record.value("peak_memory") and not (tmp_path / "partial.json").exists()


@pytest.mark.slow
def test_an_interrupt_ends_the_job(fake_trial: Any, tmp_path: Path) -> None:
    """In a notebook this process lives on."""
    trial, jobs = fake_trial(fail="hang", at="load"), list[psutil.Process]()

    def interrupt(stage: str, _: float) -> None:
        if stage == "load":
            jobs.extend(psutil.Process().children(recursive=True))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(Job("run", trial.runtime, trial), tmp_path, 1200.0, interrupt)
    assert jobs and not any(job.is_running() for job in jobs)


def test_measurements_before_a_crash_are_kept(fake_trial: Any, tmp_path: Path) -> None:
    trial = fake_trial(fail="segfault", at="fetch")
    record = run(trial, tmp_path)
    assert (record.status, record.trial) == ("crashed", trial.id)
    assert record.value("load") is not None and record.value("first_call") is not None
    (latency,) = [m for m in record.measurements if m.tag == "latency"]
    assert (latency.boundary, latency.samples) == ("model", "latency_model")
    with np.load(tmp_path / "samples.npz") as samples:
        assert len(samples["latency_model"]) >= 3
        assert (samples["latency_model"] >= 0.1e-3).all()
    assert record.system["python"] and record.facts.inputs_sha256


def test_nan_outputs_are_a_warning(fake_trial: Any, tmp_path: Path) -> None:
    record = run(fake_trial(fail="nan"), tmp_path)
    (warning,) = [line for line in record.warnings if "not finite" in line]
    assert warning.startswith("output output has values that are not finite: 100.00% are NaN")
    assert [m.tag for m in record.measurements if m.samples] == ["latency", "latency"]


def test_stage_and_telemetry_are_seen_from_outside(
    fake_trial: Any, tmp_path: Path, times_out_when: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking: list[Telemetry] = []

    class Watched(Telemetry):
        def watch(self, pid: int) -> None:
            looking.append(self)
            super().watch(pid)

    monkeypatch.setattr("dyno.jobs.launcher.Telemetry", Watched)
    seen: list[tuple[str, float]] = []
    times_out_when(lambda: "load" in [stage for stage, _ in seen] and len(looking[0]._rows) >= 3)
    trial = fake_trial(fail="hang", at="load")
    launch(Job("run", trial.runtime, trial), tmp_path, 1.2, lambda stage, seconds: seen.append((stage, seconds)))
    assert seen[-1][0] == "load"
    assert [s for _, s in seen] == sorted(s for _, s in seen)
    assert read_stage(tmp_path / "nowhere") == "start"
    with np.load(tmp_path / "telemetry.npz") as columns:
        assert set(columns) == {"at", "rss", "cpu", "others", "frequency", "cpu_energy", "epoch"}
        assert len(columns["at"]) >= 2 and (np.diff(columns["at"]) > 0).all()
        assert np.nanmax(columns["rss"]) > 5e6


def test_idle_processors_and_guests_counted_twice_are_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"user": 16.0, "nice": 8, "system": 4, "idle": 500, "iowait": 100, "steal": 2, "guest": 7, "guest_nice": 3}
    monkeypatch.setattr(psutil, "cpu_times", lambda: namedtuple("Times", times)(**times))  # as on Linux
    assert telemetry._busy_seconds() == 30


def test_the_memory_of_an_ended_process_is_nan(tmp_path: Path) -> None:
    """Its memory was once drawn as 0 at the end of a line."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    telemetry = Telemetry()
    telemetry.watch(ended.pid)
    ended.wait()
    seen = len(telemetry._rows)
    while len(telemetry._rows) < seen + 2:
        time.sleep(0.05)
    telemetry.stop(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz") as columns:
        assert np.isnan(columns["rss"][-1]) and not (columns["rss"] == 0).any()


def test_child_processes_are_not_searched_while_a_job_times(tmp_path: Path) -> None:
    """Searching reads all of /proc, once 2 % of a block on two processors."""
    stage, resident = "time model", list[float]()
    script = "import subprocess, time; subprocess.Popen(['sleep', '600']); print(flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", "input();" + script], stdin=-1, stdout=-1, start_new_session=True)
    telemetry = Telemetry(read_stage=lambda: stage)
    tree = ProcessTree(parent.pid)
    tree.find_children()
    try:
        telemetry.watch(parent.pid)
        assert parent.stdin and parent.stdout
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        parent.stdout.readline()
        assert tree.measure()[2] == {parent.pid}, "the child is younger than the last look"
        tree.find_children()
        assert len(tree.measure()[2]) == 2
        for timed in (True, False):
            stage = "time model" if timed else "warm up all"
            seen = len(telemetry._rows)
            while len(telemetry._rows) < seen + 2:
                time.sleep(0.05)
            resident.append(telemetry._rows[-1][1])
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        telemetry.stop(tmp_path / "t.npz")
        parent.communicate()
    assert resident[1] > resident[0] > 0, "the child's memory counts once the job times no more"
    with np.load(tmp_path / "t.npz") as columns:
        assert columns["cpu"][-1] < 0.1, "both sleep"


BACKEND = """
import errno, os, subprocess, sys, time
from dyno.worker.backends.fake import Fake

class Scripted(Fake):
    name = "scripted"
    def load(self, trial, artifact):
{lines}
        return super().load(trial, artifact)
"""


def scripted(fake_trial: Any, folder: Path, lines: str, **options: Any) -> Trial:
    """Return a trial of a backend that runs these lines before loading."""
    (folder / "scripted_backend.py").write_text(BACKEND.format(lines=indent(lines.strip(), " " * 8)))
    runtime = Runtime(threads=1, env={"PYTHONPATH": str(folder)})
    return fake_trial("scripted_backend:Scripted", runtime=runtime, **options)


# Writes the id of a started process to the trial's file.
NOTE = 'open(trial.options["pids"], "w").write(str(child))'
CHILD = f'child = subprocess.Popen(["sleep", "600"]).pid\n{NOTE}'


@pytest.mark.parametrize("fail", ["killed", *(pytest.param(f, marks=pytest.mark.slow) for f in ("", "hang"))])
def test_child_processes_end_with_their_job(fake_trial: Any, tmp_path: Path, times_out_when: Any, fail: str) -> None:
    if fail == "hang":
        times_out_when(lambda: read_stage(tmp_path / "job") == STAGES["run"])
    trial = scripted(fake_trial, tmp_path, CHILD, pids=str(tmp_path / "pid"), fail=fail)
    assert run(trial, tmp_path / "job").status == {"": "ok", "killed": "crashed", "hang": "timeout"}[fail]
    assert gone(int((tmp_path / "pid").read_text()))


STARTING = {
    "a session": 'child = subprocess.Popen(["sleep", "600"], start_new_session=True).pid',
    "two forks": """
read, write = os.pipe()
if not os.fork():
    os.setsid()
    if not (grandchild := os.fork()):
        time.sleep(600)
    os.write(write, str(grandchild).encode())
    os._exit(0)
os.wait()
child = int(os.read(read, 20))
""",
}


def leaving(fake_trial: Any, folder: Path, how: str, **options: Any) -> Trial:
    """Return a trial with an engine process that leaves the job's group; its id is in the file `pid`."""
    lines = f"{STARTING[how].strip()}\n{NOTE}"
    return scripted(fake_trial, folder, lines, pids=str(folder / "pid"), **options)


@pytest.mark.parametrize("how", STARTING)
def test_processes_outside_the_process_group_end_with_their_job(fake_trial: Any, tmp_path: Path, how: str) -> None:
    assert run(leaving(fake_trial, tmp_path, how), tmp_path / "job").status == "ok"
    assert gone(int((tmp_path / "pid").read_text()), within_s=120)


FORKS = """
import os
from dyno.worker.backends.fake import Fake, FakeSession

class Forking(Fake):
    name = "forking"
    def load(self, trial, artifact): return Session(trial)

class Session(FakeSession):
    runs = 0
    def run(self, slot=0):
        super().run(slot)
        Session.runs += 1
        if Session.runs in (1, 4, 40):
            os.fork()
    def fetch(self, slot=0):
        with open(self.options["pids"], "a") as f:
            f.write(f"{os.getpid()}\\n")
        return super().fetch(slot)
"""


def test_a_forked_copy_stops_at_the_next_measurement(fake_trial: Any, tmp_path: Path) -> None:
    """Both processes once continued: they measured in parallel and wrote the same files."""
    (tmp_path / "forks.py").write_text(FORKS)
    runtime = Runtime(threads=1, env={"PYTHONPATH": str(tmp_path)})
    record = run(fake_trial("forks:Forking", runtime=runtime, pids=str(tmp_path / "pids")), tmp_path / "job")
    assert record.status == "ok", record
    first, *copies = Counter((tmp_path / "pids").read_text().split()).most_common()
    assert first[1] > 5 and all(count == 1 for _, count in copies), "a copy ends where it comes back to the clock"


PRINTS = """
shortened = []
for stream in (sys.stdout, sys.stderr):
    print("the first line", file=stream)
    for _ in range(trial.options["megabytes"]):
        print("x" * 999_999, file=stream)
    end = time.monotonic() + 30
    while os.fstat(stream.fileno()).st_size > 3e6 and time.monotonic() < end:
        time.sleep(0.01)
    shortened.append(time.monotonic() < end)
    print("the last line", file=stream, flush=True)
os._exit(7 if all(shortened) else 8)
"""


def test_job_output_is_limited_in_length(fake_trial: Any, tmp_path: Path) -> None:
    trial = scripted(fake_trial, tmp_path, PRINTS, megabytes=40)
    tracemalloc.start()
    try:
        record = run(trial, tmp_path / "job")
        assert tracemalloc.get_traced_memory()[1] < 20e6, "the launcher keeps nothing in memory"
    finally:
        tracemalloc.stop()
    assert record.reason == "exited with code 7 without a record: the last line"
    for name in ("stdout.log", "stderr.log"):
        text = (tmp_path / "job" / name).read_text()
        assert text.startswith("the first line\n") and text.endswith("x\nthe last line\n")
        before, left_out, after = re.split(r"\n\[Dyno left out about ([\d,]+) bytes here\]\n", text)
        assert len(text) < 1.1e6
        assert len(before) + int(left_out.replace(",", "")) + len(after) == pytest.approx(40e6, rel=0.3)


def test_lines_printed_while_a_log_is_shortened_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(b"x" * (launcher.KEPT_HEAD_B + 3 * launcher.KEPT_TAIL_B))

    class Printing(io.BufferedRandom):
        """File that grows by a line after its end is read, and by another after that line is read."""

        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            line = b"\nthe last but one" if size == launcher.KEPT_TAIL_B else b"\nthe last line\n"
            if size == launcher.KEPT_TAIL_B or found == b"\nthe last but one":
                with open(path, "ab") as job:
                    job.write(line)
            return found

    with Printing(io.FileIO(path, "r+")) as log:
        launcher._trim_log(log)
    assert launcher.read_end(path, 35) == "xxxx\nthe last but one\nthe last line\n"[-35:]
    assert launcher.read_end(path, 32) == "\nthe last but one\nthe last line\n"[-32:]
    assert path.stat().st_size < launcher.KEPT_HEAD_B + 1.1 * launcher.KEPT_TAIL_B


LAUNCHER = """
import sys
from pathlib import Path
from dyno.jobs.launcher import launch
from dyno.worker.spec import Job, from_json
import io
import json
job = from_json(Job, json.loads(Path(sys.argv[1]).read_text()))
print("ready", flush=True)
launch(job, Path(sys.argv[2]), 3600.0)
"""


@pytest.mark.parametrize("how", STARTING)
def test_detached_processes_die_with_the_launcher(fake_trial: Any, tmp_path: Path, how: str) -> None:
    trial = leaving(fake_trial, tmp_path, how, fail="hang")
    write_json(tmp_path / "job", to_json(Job("run", trial.runtime, trial)))
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path / "job"), str(tmp_path / "r0")]) as launcher:
        deadline = time.monotonic() + 600
        while read_stage(tmp_path / "r0") != STAGES["run"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(launcher.pid, signal.SIGKILL)
    assert gone(int((tmp_path / "pid").read_text()), within_s=120)


@pytest.mark.parametrize("wait_for", ["spawn", "first call"])
def test_a_job_dies_with_its_launcher(fake_trial: Any, tmp_path: Path, wait_for: str) -> None:
    trial = fake_trial(fail="hang")
    write_json(tmp_path / "job", to_json(Job("run", trial.runtime, trial)))
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path / "job"), str(tmp_path / "r0")]) as launcher:
        deadline = time.monotonic() + 600
        while not (jobs := psutil.Process(launcher.pid).children()) or (
            wait_for != "spawn" and read_stage(tmp_path / "r0") != wait_for
        ):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(launcher.pid, signal.SIGKILL)
    assert gone(jobs[0].pid)
    assert read_record(tmp_path / "r0") is None


def test_exit_handlers_of_libraries_are_skipped(fake_trial: Any, tmp_path: Path) -> None:
    late = tmp_path / "late"
    register = f"atexit.register(open, {str(late)!r}, 'w')"
    lines = ("import atexit", "from dyno.worker.backends.fake import Fake", register)
    (tmp_path / "lingering.py").write_text("\n".join([*lines, "class Lingering(Fake):", "    pass"]))
    trial = fake_trial("lingering:Lingering", runtime=Runtime(threads=1, env={"PYTHONPATH": str(tmp_path)}))
    assert run(trial, tmp_path / "job").status == "ok"
    assert not late.exists()


def test_a_missing_interpreter_is_a_user_error(fake_trial: Any, tmp_path: Path) -> None:
    trial = fake_trial(runtime=Runtime(python=str(tmp_path / "python9")))
    with pytest.raises(UserError, match=r"python9 can't be started \(No such file or directory\); give another"):
        run(trial, tmp_path / "r0")


def test_an_invalid_interpreter_is_a_crash_with_its_message(fake_trial: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho first >&2\necho this is no Python >&2\nexit 3\n")
    python.chmod(0o755)
    record = run(fake_trial(runtime=Runtime(python=str(python))), tmp_path / "r0")
    assert record.reason == "exited with code 3 without a record: this is no Python"
    assert (record.status, record.stage) == ("crashed", "start")


def test_the_environment_fixes_threads_and_silences_telemetry() -> None:
    env = make_environment(Runtime(threads=3), {"OMP_NUM_THREADS": "64", "PATH": "/bin", "PYTHONPATH": "/ours"})
    assert [env[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")] == ["3", "3", "3"]
    assert SILENCING_VARIABLES.items() <= env.items()
    assert (env["PATH"], env["PYTHONPATH"]) == ("/bin", "/ours")


@pytest.mark.parametrize(("kind", "shared"), [("run", True), ("train", False), ("take", False)])
def test_only_rounds_of_a_trial_share_a_compiler_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, shared: bool
) -> None:
    """A training once left a folder `compiler` next to its own."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nenv\n")
    python.chmod(0o755)
    launch(Job(kind, Runtime(python=str(python))), tmp_path / "out" / "job", 60)
    seen = (tmp_path / "out/job/stdout.log").read_text()
    assert (f"TORCHINDUCTOR_CACHE_DIR={tmp_path}/out/compiler" in seen) == shared
    assert ("TORCHINDUCTOR_CACHE_DIR" in seen) == shared


def test_another_interpreter_does_not_inherit_our_python_settings() -> None:
    ours = {"PYTHONPATH": "/ours", "PYTHONHOME": "/ours", "VIRTUAL_ENV": "/ours", "HOME": "/home"}
    assert make_environment(Runtime(python="/opt/python3"), ours).keys() & ours.keys() == {"HOME"}
    given = Runtime(python="/opt/python3", env={"PYTHONPATH": "/theirs", "OMP_NUM_THREADS": "7"})
    env = make_environment(given, ours)
    assert (env["PYTHONPATH"], env["OMP_NUM_THREADS"]) == ("/theirs", "7")


def test_only_the_first_round_evaluates(fake_trial: Any, tmp_path: Path) -> None:
    record = run(fake_trial(), tmp_path, number=1)
    assert (record.status, record.round) == ("ok", 1)
    assert not (tmp_path / "outputs.npz").exists()


def test_a_full_disk_is_not_recorded_as_a_failed_trial(fake_trial: Any, tmp_path: Path) -> None:
    trial = scripted(fake_trial, tmp_path, "raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))")
    with pytest.raises(OSError, match="No space left on device"):
        run(trial, tmp_path / "r0")
    assert read_record(tmp_path / "r0") is None


def test_reasons_are_one_line(fake_trial: Any, tmp_path: Path) -> None:
    trial = scripted(fake_trial, tmp_path, r"raise ValueError('\n\n  first line\nsecond line')")
    assert run(trial, tmp_path / "r0").reason == "ValueError: first line"
    assert "second line" in (tmp_path / "r0/stderr.log").read_text()


def test_an_unknown_schema_is_rejected(fake_trial: Any, tmp_path: Path) -> None:
    trial = fake_trial()
    record = launch(replace(Job("run", trial.runtime, trial), schema=99), tmp_path, 1200.0)
    wanted = f"job.json has schema 99, this worker reads {SCHEMA}"
    assert (record.status, record.reason.endswith(wanted)) == ("crashed", True)


def test_a_record_left_by_an_earlier_job_is_ignored(fake_trial: Any, tmp_path: Path) -> None:
    assert run(fake_trial(), tmp_path).status == "ok"
    (tmp_path / "stage").write_text("close")
    (tmp_path / "stderr.log").write_text("the earlier line\n")
    record = run(fake_trial(fail="exit", at="load"), tmp_path)
    assert (record.status, record.stage, record.value("latency")) == ("crashed", "load", None)
    assert record.reason == "exited with code 7 without a record"


SAYS_TF32 = 'print("override:", os.environ.get("NVIDIA_TF32_OVERRIDE", "none"))'


@pytest.mark.parametrize(
    ("precision", "own", "given"),
    [("fp32", {}, "0"), ("tf32", {}, "1"), ("fp16", {}, "1"), ("fp32", {"NVIDIA_TF32_OVERRIDE": "1"}, "1")],
)
def test_fp32_is_never_tf32(
    precision: str, own: dict[str, str], given: str, fake_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's libraries may use TF32 for fp32 unless the variable forbids it; here the user's shell enables it."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    trial = replace(scripted(fake_trial, tmp_path, SAYS_TF32), precision=precision)
    trial = replace(trial, runtime=replace(trial.runtime, env={**trial.runtime.env, **own}))
    launch(Job("run", trial.runtime, trial), tmp_path / "job", 600.0)
    assert f"override: {given}\n" in (tmp_path / "job/stdout.log").read_text()
