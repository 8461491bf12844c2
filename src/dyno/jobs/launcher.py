"""Launcher of jobs: each is started in its own process, watched, killed at its time limit, and its end recorded."""

from __future__ import annotations

import atexit
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from threading import Event
from typing import BinaryIO
from uuid import uuid4

from dyno.jobs.telemetry import Telemetry
from dyno.worker import system
from dyno.worker.record import (
    CLOSE_STAGE,
    OUT_OF_MEMORY,
    Record,
    describe_close,
    read_json,
    read_record,
    write_json,
    write_record,
)
from dyno.worker.spec import STARTED_VARIABLE, Job, Runtime, UserError, check_readable, from_json, shorten

WORKER_MAIN = Path(__file__).parents[1] / "worker" / "main.py"
POLL_S = 0.05
TOOL_SHUTDOWN_S = 30.0  # time for a wrapping tool (a profiler) to write its files
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Errors of this process: another program could not start either
OF_THIS_PROCESS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
LAST_LINES_B = 10_000
LOGS = ("stdout.log", "stderr.log")
KEPT_HEAD_B, KEPT_TAIL_B = 1 << 18, 3 << 18  # bytes kept of each log
COPY_CHUNK_B = 1 << 20  # bytes copied at once
TRUNCATION_MARK = "\n[Dyno left out about {:,} bytes here]\n"  # approximate, as output continues
MAX_SWEEPS = 20  # repeated, as processes may start others while they are killed
TF32_VARIABLE = "NVIDIA_TF32_OVERRIDE"  # environment variable that switches TF32 off
# environment variable of a job and its children: id of this process's jobs, and the job's own
JOB_VARIABLE = "DYNO_JOB"
# Script of a shell that outlives this process: if this process was killed, it kills the rest of its jobs.
SWEEP = """
exec 3<&0
(
  read _ <&3 && exit
  for _ in 1 2 3; do
    for f in $(grep -lsF "$0" /proc/[0-9]*/environ); do f=${f#/proc/}; kill -9 "${f%/environ}"; done
    sleep 0.1
  done
) &
"""

UNCOMPILED_KINDS = ("train", "take")  # kinds of jobs without compilation, in folders of the user

Tick = Callable[[str, float], None]


class Interrupted(KeyboardInterrupt):
    """The user's interrupt after a job that ended well; `record` is the job's."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record


def make_environment(runtime: Runtime, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Build the job's environment: equal threads for all BLAS and OpenMP, no telemetry, the runtime's own on top."""
    env = dict(os.environ if base is None else base)
    if runtime.python:
        env = {key: value for key, value in env.items() if key not in system.PYTHON_VARIABLES}
    env.update(system.missing_variables(env))
    env.update(system.SILENCING_VARIABLES)
    env.update({name: str(runtime.threads) for name in THREAD_VARIABLES})
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONFAULTHANDLER"] = "1"
    env.update(runtime.env)
    return env


def _choose_compiler_cache(kind: str, folder: Path) -> dict[str, str]:
    """Return a compiler cache shared by the rounds of one trial, so that a study's first build is always cold."""
    return {} if kind in UNCOMPILED_KINDS else {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent.resolve() / "compiler")}


def _forbid_tf32(job: Job) -> dict[str, str]:
    """Return the variable that keeps NVIDIA's libraries from using TF32, for a job in fp32.

    An engine may use TF32 by default, and ONNX Runtime's TensorRT provider has no option against it.
    """
    spec = job.trial or job.recipe
    is_fp32 = spec is not None and spec.precision == "fp32" and TF32_VARIABLE not in dict(job.runtime.env)
    return {TF32_VARIABLE: "0"} if is_fp32 else {}


def launch(
    job: Job,
    folder: Path,
    timeout_s: float,
    tick: Tick | None = None,
    extra: Mapping[str, str] | None = None,
    *,
    fds: Sequence[int] = (),
    patience_s: float = 0.0,
    tool: Sequence[str] = (),
) -> Record:
    """Run the job in the folder and return its record; a crash, a hang or an out-of-memory kill gives a record too.

    `tick` is called about twenty times a second with the job's stage and elapsed seconds. `extra` is added to the job's
    environment, and the job inherits the open files `fds`. An interrupt kills the job. With `patience_s` the job
    is interrupted instead and has that many seconds to end well; then `Interrupted` is raised with its record. `tool`
    is a command that starts and watches the job's process, such as a profiler; at the time limit it is interrupted
    first, so that it can write its data.
    """
    job_process = start(job, folder, extra, fds, tool=tool)
    try:
        has_timed_out = _watch_process(job_process.process, folder, timeout_s, tick)
        if has_timed_out and tool:
            _let_end(job_process.process)
    except KeyboardInterrupt:
        record = _interrupt_job(job_process, patience_s) if patience_s else None
        abandon(job_process)
        if record is None:
            raise
        raise Interrupted(record) from None
    except BaseException:
        abandon(job_process)
        raise
    return finish(job_process, timeout_s, has_timed_out)


@contextmanager
def stop_jobs_on_error(pool: ThreadPoolExecutor) -> Iterator[Tick]:
    """Yield a `tick` for jobs launched by the pool's threads: an error or interrupt in the block kills them."""
    stop_event = Event()

    def check_stopped(stage: str, seconds: float) -> None:
        if stop_event.is_set():
            raise KeyboardInterrupt  # raised in the job's thread, which then kills the job's process

    try:
        yield check_stopped
    except BaseException:
        stop_event.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _interrupt_job(job_process: JobProcess, patience_s: float) -> Record | None:
    """Interrupt the job; return its record if it ends well within `patience_s` seconds, else None."""
    with suppress(ProcessLookupError):
        os.kill(job_process.process.pid, signal.SIGINT)
    try:
        job_process.process.wait(patience_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second interrupt by the user
        return None
    record = read_record(job_process.folder)
    return record if record is not None and record.status == "ok" else None


def _let_end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the process and its children, as a terminal does, and give them time to end."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGINT)
        process.wait(TOOL_SHUTDOWN_S)


@dataclass(frozen=True)
class JobProcess:
    """A job that runs, or has ended unexamined; `kills` is the kernel's number of out-of-memory kills before it."""

    job: Job
    folder: Path
    process: subprocess.Popen[bytes]
    telemetry: Telemetry
    kills: int
    id: str


def start(
    job: Job,
    folder: Path,
    extra: Mapping[str, str] | None = None,
    fds: Sequence[int] = (),
    mates: Collection[int] = (),
    tool: Sequence[str] = (),
) -> JobProcess:
    """Start the job's process in the folder, with `extra` in its environment and the open files `fds`.

    `mates` are the processes that are interleaved with it; `tool` is as in `launch`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Files of an earlier job must not be taken for this one's.
    for name in ("record.json", "partial.json", "stage", *LOGS):
        (folder / name).unlink(missing_ok=True)
    write_json(folder / "job.json", check_readable(job))
    python = job.runtime.python or sys.executable
    kills = _kernel_kills()
    telemetry = Telemetry(job.runtime.device, make_environment(job.runtime), mates, partial(read_stage, folder))
    launcher = system.UNDER_TOOL if tool else os.getpid()
    job_id = f"{_id_of_jobs()}-{uuid4().hex[:12]}"
    with open(folder / LOGS[0], "ab") as out, open(folder / LOGS[1], "ab") as err:  # append
        try:
            process = subprocess.Popen(
                [*tool, python, str(WORKER_MAIN), str(folder.resolve())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**_choose_compiler_cache(job.kind, folder), **make_environment(job.runtime), **_forbid_tf32(job),
                     **(extra or {}),
                     "DYNO_LAUNCHER": str(launcher), STARTED_VARIABLE: repr(time.monotonic()),
                     JOB_VARIABLE: " ".join(filter(None, (os.environ.get(JOB_VARIABLE), job_id)))},
                start_new_session=True,
                pass_fds=fds,
            )  # fmt: skip
        except OSError as e:
            if e.errno in OF_THIS_PROCESS:
                raise
            if tool:
                raise UserError(f"{tool[0]} can't be started ({e.strerror})") from e
            raise UserError(f"the interpreter {python} can't be started ({e.strerror}); give another --python") from e
    telemetry.watch(process.pid)
    return JobProcess(job, folder, process, telemetry, kills, job_id)


def abandon(job_process: JobProcess) -> None:
    """Kill the job with all its processes, whether it runs, is stopped or has ended."""
    _kill_group(job_process.process)
    _kill_strays(job_process.id)
    trim_logs(job_process.folder, max_bytes=KEPT_HEAD_B + KEPT_TAIL_B + len(TRUNCATION_MARK))
    job_process.telemetry.stop(job_process.folder / "telemetry.npz")


def finish(job_process: JobProcess, timeout_s: float, has_timed_out: bool) -> Record:
    """End the job, kill its remaining processes, and return its record; one is written if it left none."""
    abandon(job_process)
    job, folder, code = job_process.job, job_process.folder, job_process.process.returncode
    record = read_record(folder)
    if record is None and code == os.EX_CANTCREAT:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    if record is None:
        record = _ended_without(job, folder, code, has_timed_out, timeout_s, _kernel_kills() > job_process.kills)
        write_record(folder, record)
        (folder / "partial.json").unlink(missing_ok=True)
    return record


def _watch_process(process: subprocess.Popen[bytes], folder: Path, timeout_s: float, tick: Tick | None) -> bool:
    """Wait for the process; return True if it reaches the time limit."""
    begin = time.monotonic()
    while True:
        try:
            process.wait(POLL_S)
            return False
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - begin
            trim_logs(folder)
            if tick is not None:
                tick(read_stage(folder), elapsed)
            if elapsed > timeout_s:
                return True


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # A library's child may outlive the group's leader, so the group is always killed.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _kill_strays(job_id: str) -> None:
    """Kill processes of the job that left its group, and their new children."""
    for _ in range(MAX_SWEEPS):
        pids = list(_find_processes(job_id.encode()))
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.01)


def _find_processes(text: bytes) -> Iterator[int]:
    """Yield the ids of other processes with the text in their initial environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if text in path.read_bytes() and int(path.parent.name) != os.getpid():
                yield int(path.parent.name)


@lru_cache(maxsize=1)
def _id_of_jobs() -> str:
    """Return the id of this process's jobs; from the first call on, a shell waits to clean up after this process."""
    id = uuid4().hex
    read_fd, write_fd = os.pipe()
    with suppress(OSError):
        subprocess.Popen(
            ["/bin/sh", "-c", SWEEP, id], stdin=read_fd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).wait()  # fmt: skip
        atexit.register(_dismiss_shell, write_fd)
    os.close(read_fd)
    return id


def _dismiss_shell(write_fd: int) -> None:
    """Tell the shell that there is nothing to kill: all jobs have ended."""
    with suppress(OSError):
        os.write(write_fd, b"\n")


def trim_logs(folder: Path, max_bytes: int = 2 * (KEPT_HEAD_B + KEPT_TAIL_B)) -> None:
    """Keep the beginning and the end of the job's output if it is longer than `max_bytes` bytes."""
    for path in (folder / name for name in LOGS):
        with suppress(OSError):
            if path.stat().st_size > max_bytes:
                with open(path, "r+b") as f:
                    _trim_log(f)


def _trim_log(f: BinaryIO) -> None:
    size = f.seek(0, os.SEEK_END)
    f.seek(KEPT_HEAD_B)
    pattern = re.escape(TRUNCATION_MARK).replace(re.escape("{:,}"), "([0-9,]+)")
    mark = re.match(pattern.encode(), f.read(100))
    begin = KEPT_HEAD_B + (mark.end() if mark else 0)
    if size - begin <= KEPT_TAIL_B:
        return
    omitted_bytes = size - begin - KEPT_TAIL_B + (int(mark[1].replace(b",", b"")) if mark else 0)
    f.seek(-KEPT_TAIL_B, os.SEEK_END)
    tail = f.read(KEPT_TAIL_B)
    f.seek(KEPT_HEAD_B)
    end = KEPT_HEAD_B + f.write(TRUNCATION_MARK.format(omitted_bytes).encode() + tail)
    while os.fstat(f.fileno()).st_size > size:  # a job's last line, the reason for its end, often arrives here
        f.seek(size)
        chunk = f.read(COPY_CHUNK_B)
        size += len(chunk)
        f.seek(end)
        end += f.write(chunk)
        f.flush()
    f.seek(end)
    f.truncate()


def read_end(path: Path, max_bytes: int) -> str:
    """Return the last `max_bytes` bytes of a file as text; "" without the file."""
    try:
        with open(path, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - max_bytes))
            return f.read(max_bytes).decode("utf-8", "replace")
    except OSError:
        return ""


def read_stage(folder: Path) -> str:
    """Return the current or last stage of the job in the folder."""
    try:
        return (folder / "stage").read_text(encoding="utf-8")
    except OSError:
        return "start"


def _ended_without(job: Job, folder: Path, code: int, has_timed_out: bool, timeout_s: float, is_oom: bool) -> Record:
    """Build a record for a job without one: its measurements so far, and how it ended.

    A trial that crashed or hung while closing its engine has all its measurements, and counts.
    """
    stage = read_stage(folder)
    record = Record("crashed", trial=job.trial.id if job.trial else "", round=job.round)
    if (folder / "partial.json").exists():
        with suppress(UserError, ValueError):
            record = from_json(Record, read_json(folder / "partial.json"))
    if has_timed_out:
        hint = "; --timeout SECONDS allows more" if job.kind == "run" else ""
        status, reason = "timeout", f"not finished after {timeout_s:g} s; killed{hint}"
    elif is_oom and code == -signal.SIGKILL:
        status, reason = "oom", OUT_OF_MEMORY
    elif code < 0:
        status, reason = "crashed", f"killed by {signal.Signals(-code).name}"
    else:
        status, reason = "crashed", f"exited with code {code} without a record"
    last_line = _last_line(folder / "stderr.log") if code > 0 else ""
    reason = f"{reason}: {last_line}" if last_line else reason
    failure = replace(record, status=status, stage=stage, reason=reason)
    is_measured = job.kind == "run" and stage == CLOSE_STAGE and record.stage == CLOSE_STAGE
    if is_measured and status != "oom" and not failure.was_killed:
        return replace(record, status="ok", warnings=(*record.warnings, describe_close(reason)))
    return failure


def _last_line(path: Path) -> str:
    lines = read_end(path, LAST_LINES_B).strip().splitlines()
    return shorten(lines[-1]) if lines else ""


def _kernel_kills() -> int:
    """Return the number of processes that the kernel has killed since boot for lack of memory."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)
