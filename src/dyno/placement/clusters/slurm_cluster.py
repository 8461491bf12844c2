"""A Slurm cluster as places: each is a job that holds one device for as long as the study lasts."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from typing import Any

from dyno.jobs.progress import Progress
from dyno.placement import places as devices
from dyno.placement.clusters import slurm_host, slurm_job
from dyno.placement.clusters.remote import SILENT_S, NodeLost, check_device, distinct, gpu, processors, same_dyno
from dyno.placement.clusters.slurm_host import JOB_NAME, SlurmHost, cancel
from dyno.placement.clusters.slurm_job import BEAT_S, DRIVER, OVER, Mail
from dyno.placement.clusters.slurm_options import SlurmRequest, parse
from dyno.placement.clusters.slurm_queue import Queue
from dyno.placement.places import Place
from dyno.store import SLURM
from dyno.worker import system
from dyno.worker.extras import install
from dyno.worker.record import refuse_links
from dyno.worker.spec import UserError, plain

ID = "id"  # the job's in Slurm
END_S = 20.0  # that jobs have to end by themselves


def expected(spec: str, device: str) -> list[Place]:
    """Return the expected places, as far as a plan needs to know them, without starting a job."""
    check_device(device)
    parse(spec)
    return [Place("slurm", "cuda:0" if device == "cuda" else "cpu", "", threads=system.physical_cores())]


@contextmanager
def places(spec: str, device: str, folder: Path, progress: Progress) -> Iterator[list[Place]]:
    """Hold a place for each job that has started while the block runs; then end the jobs.

    `folder` is the study's run folder, used by no other program, on a file system that the nodes share. Raises
    `UserError`, one line.
    """
    check_device(device)
    wanted, submitit = parse(spec), _import_submitit()
    base = folder.resolve() / SLURM
    refuse_links(base.parent, [SLURM])
    try:
        _end_earlier(base)
        base.mkdir(parents=True, exist_ok=True)  # a job that ends may have written once more while it was removed
        mail = Path(tempfile.mkdtemp(prefix="jobs-", dir=base))
    except OSError as e:
        raise UserError(f"{base} can't be made: {e.strerror}; remove what is there, or give another --out") from e
    jobs: list[SlurmHost] = []
    try:
        with _keep_beating(mail):
            for number in range(wanted.jobs):
                jobs.append(_submit_job(submitit, wanted, device, mail, number))
            yield _list_places(Queue(jobs, progress).started(wanted.minutes["wait"] * 60), device, progress)
    finally:
        _end_jobs(jobs, mail)
        shutil.rmtree(base, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()  # where nothing came of it, and so nothing lies there


def _end_earlier(base: Path) -> None:
    """End the jobs of a command that died: running jobs end without its files, and others leave the queue."""
    found = [path.read_text(errors="replace").strip() for path in base.glob(f"*/*/{ID}") if path.is_file()]
    cancel([one for one in found if one.isascii() and one.isdecimal()])  # a folder from elsewhere may hold anything
    shutil.rmtree(base, ignore_errors=True)


def _import_submitit() -> Any:
    """Import and return submitit, the library that submits jobs."""
    try:
        import submitit.helpers
    except ImportError as e:
        raise UserError(f"--on slurm needs submitit: {e}; {install('submitit')}") from e
    return submitit


@contextmanager
def _keep_beating(mail: Path) -> Iterator[None]:
    """Give a sign of life, while the block is entered."""
    over = Event()

    def write_beats() -> None:
        count = 0
        while not over.is_set():
            with suppress(OSError):  # a full disk, or a file system that is away for a moment
                slurm_job.write(mail / DRIVER, {"beat": (count := count + 1)})
            over.wait(BEAT_S)

    thread = Thread(target=write_beats, name="dyno-slurm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _submit_job(submitit: Any, wanted: SlurmRequest, device: str, mail: Path, number: int) -> SlurmHost:
    """Hand one job in."""
    folder = mail / str(number)
    folder.mkdir()
    setting: dict[str, Any] = {"silent_s": slurm_host.DEAD_S}
    executor: Any
    if wanted.local:
        setting |= {"driver": os.getpid(), **_reserve_share(wanted, device, number)}
        executor = submitit.LocalExecutor(mail / "logs")
        executor.update_parameters(timeout_min=wanted.minutes["time"])
    else:
        executor = _make_executor(submitit, wanted, device, mail / "logs")
    try:
        # This command may be in a job of Slurm itself, which its jobs aren't.
        with submitit.helpers.clean_env(), _interrupts_ignored() if wanted.local else nullcontext():
            job = executor.submit(slurm_job.main, str(folder), device, setting)
    except submitit.core.utils.FailedJobError as e:
        raise UserError(f"Slurm refuses the job: {plain(str(e).strip().splitlines()[-1])}") from e
    host = SlurmHost(job, Mail(folder), local=wanted.local)
    if not wanted.local:
        (folder / ID).write_text(host.id)
    return host


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore interrupts while the block runs, so that processes started in it outlive a Ctrl-C.

    A terminal sends Ctrl-C to all processes there; this command then ends its jobs in order.
    """
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _reserve_share(wanted: SlurmRequest, device: str, number: int) -> dict[str, Any]:
    """Return what a job on this host reserves: a share of the processors, or a GPU."""
    if device == "cuda":
        return {"visible": devices.places(f"cuda:{number}")[0].env[devices.VISIBLE]}
    devices.places(",".join(f"cpu:{k}" for k in range(wanted.jobs)))  # a `UserError` where there are fewer
    return {"share": [number, wanted.jobs]}


def _make_executor(submitit: Any, wanted: SlurmRequest, device: str, logs: Path) -> Any:
    """Return the executor that submits to Slurm."""
    try:
        # In place of the shell: Slurm kills what is left of a job as soon as its shell has ended, which a signal does.
        executor = submitit.SlurmExecutor(logs, python=f"exec {shlex.quote(sys.executable)}")
    except RuntimeError as e:
        raise UserError(
            "--on slurm needs Slurm's commands (sbatch, squeue, scancel), and there are none here; "
            "give the command on a host of the cluster, or try it with --on slurm=2,cluster=local"
        ) from e
    own = {"gres": "gpu:1"} if device == "cuda" else {} if "cpus-per-task" in wanted.sbatch else {"exclusive": True}
    # Without srun: where a version has it so, its step gets other processors than the job. A job that Slurm would start
    # a second time is lost to the study by then.
    executor.update_parameters(
        job_name=JOB_NAME, time=wanted.minutes["time"], use_srun=False,
        additional_parameters={"no-requeue": True, **own, **wanted.sbatch},
    )  # fmt: skip
    return executor


def _list_places(jobs: Sequence[SlurmHost], device: str, progress: Progress) -> list[Place]:
    """Return each job's device as a place."""
    places, owners, why = list[Place](), dict[tuple[str, int], SlurmHost](), ""
    for host in jobs:
        try:
            about = same_dyno(host.name, host.call("describe", device, within=SILENT_S))
        except NodeLost as e:
            host.gone, why = True, str(e)
            progress.note(f"{why}; the study goes on without it")
            continue
        if device == "cuda":
            unique = about.card.rpartition(", ")[2]
            places.append(gpu(about, unique[:12] if unique.startswith("GPU-") else f"cuda:{about.gpu}", host))
            continue
        places.append(processors(about, about.cores, host))
        for cpu in places[-1].cores:
            if (other := owners.setdefault((about.host, cpu), host)) is not host:
                raise UserError(
                    f"{other.name} and {host.name} have the same processors of {about.host}: Slurm binds none to a "
                    "job there; leave cpus-per-task out, so that each has a host for itself"
                )
    if not places:
        raise UserError(f"no job of --on slurm can take part: {why}")
    # The jobs of one host in an order of their own: the next command's may start in another.
    return distinct(sorted(places, key=lambda place: (place.name, place.cores)))


def _end_jobs(jobs: Sequence[SlurmHost], mail: Path) -> None:
    """End all jobs: those that have started by themselves, with their processes, and the others through Slurm."""
    with suppress(OSError):
        (mail / OVER).touch()
    until = time.monotonic() + END_S
    left = [host for host in jobs if host.started or host.local]
    while (
        left := [host for host in left if not (host.dead if host.local else host.ended)]
    ) and time.monotonic() < until:
        time.sleep(0.05)
    for host in jobs:
        if not host.dead:
            host.cancel()
