"""A Slurm cluster as places: each is a job that holds one device during the study."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from typing import Any

from dyno.devices import places as devices
from dyno.devices.clusters import node as nodes
from dyno.devices.clusters import slurm_job
from dyno.devices.clusters.node import NodeDescription, NodeLost, RemoteHost
from dyno.devices.clusters.slurm_job import ANSWER, ASK, DRIVER, HEARTBEAT_INTERVAL_S, LEFT, STOP, Mail
from dyno.devices.places import Place
from dyno.jobs.progress import Progress
from dyno.store import SLURM_DIR
from dyno.worker import system
from dyno.worker.extras import load_library
from dyno.worker.record import refuse_links
from dyno.worker.spec import UserError, check_known, clean_text

# Parser of `--cluster slurm=…`: number and kind of jobs.

CLUSTER_EXAMPLE = "--cluster slurm=4,partition=gpu,time=60"
# Options passed to sbatch unchanged.
OF_SBATCH = (
    "partition", "account", "qos", "constraint", "gres", "mem", "cpus-per-task", "nodelist", "exclude", "reservation",
)  # fmt: skip
# limits of a job's duration, and of the wait for further jobs once one runs
DEFAULT_MINUTES = {"time": 240, "wait": 10}
CLUSTER_KINDS = ("slurm", "local")


@dataclass(frozen=True)
class SlurmRequest:
    """Number of jobs, in Slurm or on this host; minutes by name, and sbatch's options."""

    jobs: int = 1
    cluster: str = CLUSTER_KINDS[0]
    minutes: dict[str, int] = field(default_factory=lambda: dict(DEFAULT_MINUTES))
    sbatch: dict[str, str] = field(default_factory=dict)

    @property
    def local(self) -> bool:
        return self.cluster == "local"


def parse(spec: str) -> SlurmRequest:
    """Parse the text after `slurm=`, e.g. `4,partition=gpu`; raise `UserError`, one line, if it is invalid."""
    items = [item.strip() for item in spec.split(",")] if spec.strip() else []
    jobs = items.pop(0) if items and "=" not in items[0] else "1"
    if not _is_count(jobs):
        requirement = "a whole number of jobs of at least 1"
        raise UserError(f"--cluster slurm needs {requirement}, not {jobs!r}; write e.g. {CLUSTER_EXAMPLE}")
    options: dict[str, str] = {}
    for item in items:
        name, _, value = (text.strip() for text in item.partition("="))
        if not value:
            raise UserError(f"{item!r} of --cluster slurm is not NAME=VALUE; write e.g. {CLUSTER_EXAMPLE}")
        check_known("option", name, ("cluster", *DEFAULT_MINUTES, *OF_SBATCH), " of --cluster slurm")
        if name in options:
            raise UserError(f"{name} is given twice for --cluster slurm; give it once")
        options[name] = value
    cluster = options.pop("cluster", CLUSTER_KINDS[0])
    check_known("cluster", cluster, CLUSTER_KINDS, " of --cluster slurm")
    minutes = {}
    for name, default in DEFAULT_MINUTES.items():
        if not _is_count(value := options.pop(name, str(default))):
            raise UserError(f"{name} of --cluster slurm must be a whole number of minutes, not {value!r}")
        minutes[name] = int(value)
    if options and cluster == "local":
        raise UserError(f"cluster=local runs the jobs on this host, where {', '.join(options)} has no meaning; omit it")
    return SlurmRequest(int(jobs), cluster, minutes, options)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) > 0


# A Slurm job as a host: called through files, and lost if it or Slurm reports its end, or if it stays silent.

JOB_NAME = "dyno"
HEARTBEAT_TIMEOUT_S = 120.0  # time without a heartbeat of the command after which a job ends
QUEUE_POLL_INTERVAL_S = 10.0  # silence of a job before Slurm is asked about it, and interval between questions
COMMAND_TIMEOUT_S = 60.0  # limit for a command of Slurm
WAITING_STATES = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ALIVE_STATES = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


class SlurmHost(RemoteHost):
    """A job and its device; `local` for a process on this host, as submitit runs it without Slurm."""

    def __init__(self, job: Any, mail: Mail, device: str, *, local: bool) -> None:
        super().__init__()
        self.job, self.mail, self.local = job, mail, local
        self.description: NodeDescription | None = None  # once it has started
        self._request_id = 0
        self._last_contact = time.monotonic()
        self.ask("describe", device)

    @property
    def id(self) -> str:
        return str(self.job.job_id)

    @property
    def name(self) -> str:
        return f"job {self.id}"

    @property
    def gone(self) -> bool:
        if not self._gone:
            with suppress(NodeLost):
                self._check_job()
        return self._gone

    @gone.setter
    def gone(self, gone: bool) -> None:
        self._gone = gone

    @property
    def dead(self) -> bool:
        """Whether it is an ended process on this host; for other jobs Slurm is asked."""
        return self.local and bool(self.job.done())

    @property
    def has_ended(self) -> bool:
        """Whether it has nothing more to do, also if it never started."""
        return self.dead if self.local else self.description is None or self.mail.read(LEFT) is not None

    def ask(self, call: str, *args: Any) -> None:
        self._request_id += 1
        try:
            self.mail.send(ASK, self._request_id, (call, args))
        except OSError as e:
            raise UserError(f"the run folder can't be written to: {e}") from e

    def answer(self) -> tuple[Any] | None:
        message = self.mail.receive(ANSWER, self._request_id)
        if message is None:
            self._check_job()
            return None
        self._last_contact = time.monotonic()
        if isinstance(message[0], Exception):
            raise self._end_job(" ".join(str(message[0]).split()))
        return message

    def _check_job(self) -> None:
        """Raise `NodeLost` if the job has ended."""
        is_dead = self.dead  # read before looking for its last message
        if message := self.mail.read(LEFT):
            raise self._end_job(message[0])
        if is_dead:
            raise self._end_job("its process was killed")
        if not self.local and self.description and time.monotonic() - self._last_contact > QUEUE_POLL_INTERVAL_S:
            self._last_contact = time.monotonic()
            state, _ = read_states([self]).get(self.id, ("", ""))
            if is_over(state):
                raise self._end_job(f"Slurm says that it is {state.lower()}")

    def _end_job(self, reason: str) -> NodeLost:
        """End the job, even if it no longer exists, and return the error."""
        self.gone = True
        with suppress(OSError):
            (self.mail.folder / STOP).touch()
        self.cancel()
        return NodeLost(f"{self.name}: {reason}" + ("" if self.description else f" ({self.last_words()})"))

    def cancel(self) -> None:
        """Cancel the job."""
        if not self.local:
            cancel([self.id])
        elif not self.dead:  # submitit would interrupt it, and its process print a trace
            with suppress(ProcessLookupError):
                os.kill(int(self.id), signal.SIGTERM)

    def last_words(self) -> str:
        """Return the last line of the job's log, or a hint if it wrote none."""
        for path in (self.job.paths.stderr, self.job.paths.stdout):
            with suppress(OSError):
                if lines := path.read_text(encoding="utf-8", errors="replace").strip().splitlines():
                    return clean_text(lines[-1])
        return "it wrote no log; is the run folder on a file system shared with the nodes?"


def cancel(ids: Sequence[str]) -> None:
    """Cancel the jobs in Slurm; submitit's own method prints scancel's messages on ended jobs."""
    if ids:
        with suppress(OSError, subprocess.SubprocessError):
            command = ["scancel", "--quiet", f"--name={JOB_NAME}", *ids]
            subprocess.run(command, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)


def is_over(state: str) -> bool:
    """Return whether this state means that a job is over; "" is an unknown state."""
    return state not in ("", *WAITING_STATES, *ALIVE_STATES)


def read_states(hosts: Iterable[SlurmHost]) -> dict[str, tuple[str, str]]:
    """Return Slurm's state of each job with its reason; `FORGOTTEN` for an unknown job, {} if Slurm doesn't answer.

    `squeue` is asked, as `sacct` needs accounting and never tells why a job waits.
    """
    ids = [host.id for host in hosts]
    command = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(ids)}", "--format=%i|%T|%r"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return {}
    if process.returncode and "Invalid job id" not in process.stderr:
        return {}
    states = {}
    for line in process.stdout.splitlines():
        job_id, state, reason = (cell.strip() for cell in line.split("|", 2))
        states[job_id] = state, reason
    return {job_id: states.get(job_id, ("FORGOTTEN", "")) for job_id in ids}


# Waiting for Slurm jobs to start, with messages; jobs that fail to start are left out.

POLL_S = 0.2
MINUTE_S = 60.0


class Queue:
    """Jobs that wait for a node."""

    def __init__(self, jobs: Sequence[SlurmHost], progress: Progress) -> None:
        self.jobs, self.progress = jobs, progress
        self._waiting = list(jobs)
        self._states: dict[str, tuple[str, str]] = {}
        self._polled_at = self._first_start = 0.0
        self._awaited = dict[str, float]()  # time since when a job outside the queue is awaited, by id
        self._failure_reason, self._reported = "", list[str]()

    def wait_for_start(self, wait_s: float) -> list[SlurmHost]:
        """Wait until each job has started or failed to start, and return the started ones.

        After the first start, other jobs have `wait_s` seconds. So has each job that left Slurm's queue, or has no
        state from Slurm. Raises `UserError` if no job starts.
        """
        while self._waiting:
            if not self._waiting[0].local and time.monotonic() - self._polled_at > QUEUE_POLL_INTERVAL_S:
                self._polled_at, self._states = time.monotonic(), read_states(self._waiting)
            for host in list(self._waiting):
                self._look_at(host, wait_s)
            if self._waiting:
                self._show_reasons()
                time.sleep(POLL_S)
        if not (hosts := [host for host in self.jobs if host.description]):
            raise UserError(f"no job of --cluster slurm can take part: {self._failure_reason}")
        return hosts

    def _look_at(self, host: SlurmHost, wait_s: float) -> None:
        """Check whether the job has started, or never will."""
        now, (state, reason) = time.monotonic(), self._states.get(host.id, ("", ""))
        try:
            if answer := host.answer():
                host.description = nodes.same_dyno(host.name, answer[0])
                self._first_start = self._first_start or now
                self._waiting.remove(host)
                return
        except NodeLost as e:  # with the reason
            self._leave_out(host, str(e))
            return
        if state in WAITING_STATES:
            self._awaited.pop(host.id, None)
        waited_s = now - self._awaited.setdefault(host.id, now) if state not in WAITING_STATES else 0.0
        if is_over(state):
            self._leave_out(host, f"{host.name} did not start: it is {state.lower()} ({host.last_words()})")
        elif waited_s > wait_s:
            text = f"did not respond within {wait_s / MINUTE_S:g} min"
            self._leave_out(host, f"{host.name} {text} ({host.last_words()})")
        elif self._first_start and now - self._first_start > wait_s:
            self._leave_out(host, f"{host.name} did not start in time" + (f" ({reason})" if reason else ""))

    def _leave_out(self, host: SlurmHost, reason: str) -> None:
        self._waiting.remove(host)
        host.gone = True
        host.cancel()
        self._failure_reason = reason
        self.progress.note(f"{reason}; the study continues without it")

    def _show_reasons(self) -> None:
        """Show why the jobs wait, as reported by Slurm, whenever that changes."""
        parts = []
        for host in self._waiting:
            state, reason = self._states.get(host.id, ("", ""))
            if state in WAITING_STATES:
                parts.append(f"{host.name} waits in the queue ({state.lower() if reason in ('', 'None') else reason})")
        if parts and parts != self._reported:
            self._reported = parts
            count = sum(host.description is not None for host in self.jobs)
            self.progress.show_step(f"{count} of {len(self.jobs)} jobs have started; {', '.join(parts)}")


ID_FILE = "id"  # file with the job's id in Slurm
SHUTDOWN_TIMEOUT_S = 20.0  # grace period for jobs to end by themselves


def count_expected(spec: str, device: str) -> list[Place]:
    """Return the expected places with the facts that a plan needs, without starting a job."""
    nodes.check_device(device)
    parse(spec)
    return [Place("slurm", "cuda:0" if device == "cuda" else "cpu", "", threads=system.physical_cores())]


@contextmanager
def slurm_places(spec: str, device: str, folder: Path, progress: Progress) -> Iterator[list[Place]]:
    """Hold a place for each started job during the `with` block; then end the jobs.

    `folder` is the study's run folder, on a file system shared by the nodes, not used by another program. Raises
    `UserError`, one line.
    """
    nodes.check_device(device)
    request, submitit = parse(spec), load_library("submitit", "--cluster slurm", UserError)
    base = folder.resolve() / SLURM_DIR
    refuse_links(base.parent, [SLURM_DIR])
    try:
        _end_earlier(base)
        base.mkdir(parents=True, exist_ok=True)  # an ending job may have written once more during removal
        mail = Path(tempfile.mkdtemp(prefix="jobs-", dir=base))
    except OSError as e:
        raise UserError(f"{base} can't be made: {e.strerror}; remove what is there, or give another --out") from e
    jobs: list[SlurmHost] = []
    try:
        with _keep_beating(mail):
            for index in range(request.jobs):
                jobs.append(_submit_job(submitit, request, device, mail, index))
            yield _list_places(Queue(jobs, progress).wait_for_start(request.minutes["wait"] * MINUTE_S), device)
    finally:
        _end_jobs(jobs, mail)
        shutil.rmtree(base, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()  # empty if nothing was measured


def _end_earlier(base: Path) -> None:
    """End the jobs of a command that died: running jobs end without their files, others leave the queue."""
    texts = [path.read_text(errors="replace").strip() for path in base.glob(f"*/*/{ID_FILE}") if path.is_file()]
    cancel([text for text in texts if text.isascii() and text.isdecimal()])  # a copied folder may hold anything
    shutil.rmtree(base, ignore_errors=True)


@contextmanager
def _keep_beating(mail: Path) -> Iterator[None]:
    stop_event = Event()

    def write_beats() -> None:
        count = 0
        while not stop_event.is_set():
            with suppress(OSError):  # a full disk, or an outage of the file system
                Mail(mail).send(DRIVER, 0, count := count + 1)
            stop_event.wait(HEARTBEAT_INTERVAL_S)

    thread = Thread(target=write_beats, name="dyno-slurm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()


def _submit_job(submitit: Any, request: SlurmRequest, device: str, mail: Path, index: int) -> SlurmHost:
    folder = mail / str(index)
    folder.mkdir()
    setting: dict[str, Any] = {"silent_s": HEARTBEAT_TIMEOUT_S}
    executor: Any
    if request.local:
        setting |= {"driver": os.getpid(), **_reserve_share(request, device, index)}
        executor = submitit.LocalExecutor(mail / "logs")
        executor.update_parameters(timeout_min=request.minutes["time"])
    else:
        executor = _make_executor(submitit, request, device, mail / "logs")
    try:
        # This command may run inside a Slurm job; its own jobs must not inherit that environment.
        with submitit.helpers.clean_env(), _interrupts_ignored() if request.local else nullcontext():
            job = executor.submit(slurm_job.main, str(folder), setting)
    except submitit.core.utils.FailedJobError as e:
        raise UserError(f"Slurm refuses the job: {clean_text(str(e).strip().splitlines()[-1])}") from e
    host = SlurmHost(job, Mail(folder), device, local=request.local)
    if not request.local:
        (folder / ID_FILE).write_text(host.id)
    return host


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore interrupts during the `with` block, so that processes started in it survive Ctrl-C.

    A terminal sends Ctrl-C to all its processes; this command then ends its jobs in order.
    """
    if current_thread() is not main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _reserve_share(request: SlurmRequest, device: str, index: int) -> dict[str, Any]:
    """Return the reservation of a job on this host: a share of the processors, or a GPU."""
    if device == "cuda":
        return {"visible": devices.parse_places(f"cuda:{index}")[0].env[devices.VISIBLE_DEVICES]}
    devices.parse_places(",".join(f"cpu:{k}" for k in range(request.jobs)))  # raises `UserError` if there are fewer
    return {"share": [index, request.jobs]}


def _make_executor(submitit: Any, request: SlurmRequest, device: str, logs: Path) -> Any:
    try:
        # It replaces the shell: a signal would end the shell, and then Slurm kills the rest of the job.
        executor = submitit.SlurmExecutor(logs, python=f"exec {shlex.quote(sys.executable)}")
    except RuntimeError as e:
        raise UserError(
            "--cluster slurm needs Slurm's commands (sbatch, squeue, scancel), which are missing here; run the "
            "command on a host of the cluster, or try it with --cluster slurm=2,cluster=local"
        ) from e
    option = {"gres": "gpu:1"} if device == "cuda" else {} if "cpus-per-task" in request.sbatch else {"exclusive": True}
    # Without srun: in some versions its step gets other processors than the job. Without requeue: the study has lost a
    # job by the time that Slurm starts it again.
    executor.update_parameters(
        job_name=JOB_NAME, time=request.minutes["time"], use_srun=False,
        additional_parameters={"no-requeue": True, **option, **request.sbatch},
    )  # fmt: skip
    return executor


def _list_places(jobs: Sequence[SlurmHost], device: str) -> list[Place]:
    places, owners = list[Place](), dict[tuple[str, int], SlurmHost]()
    for host in jobs:
        info = host.description
        assert info is not None
        if device == "cuda":
            uuid = info.card.rpartition(", ")[2]
            name = uuid[:12] if uuid.startswith("GPU-") else f"cuda:{info.gpu}"
            places.append(nodes.make_gpu_place(info, name, host))
            continue
        places.append(nodes.make_core_place(info, info.cores, host))
        for cpu in places[-1].cores:
            if (owner := owners.setdefault((info.host, cpu), host)) is not host:
                raise UserError(
                    f"{owner.name} and {host.name} have the same processors of {info.host}: Slurm does not bind jobs "
                    f"to processors there; omit cpus-per-task, so that each job gets its own host"
                )
    # Sorted, as the jobs of the next command may start in another order.
    return nodes.number_names(sorted(places, key=lambda place: (place.name, place.cores)))


def _end_jobs(jobs: Sequence[SlurmHost], mail: Path) -> None:
    """End all jobs: started ones end by themselves, with their processes, others through Slurm."""
    with suppress(OSError):
        (mail / STOP).touch()
    deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
    while not all(host.has_ended for host in jobs) and time.monotonic() < deadline:
        time.sleep(0.05)
    for host in jobs:
        if not host.dead:
            host.cancel()
