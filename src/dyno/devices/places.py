"""Places: a study's devices, each with the environment and processors of its processes, and their running blocks."""

from __future__ import annotations

import os
import platform
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from dyno.jobs.nvml import find_gpu
from dyno.jobs.progress import Progress
from dyno.study.defaults import missing_gpu
from dyno.study.study import Study
from dyno.worker import system
from dyno.worker.spec import Unfinished, UserError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
LOG_FILE = "block.log"
BAD_INPUT = 2  # exit code of a block's process for bad input


class Host(Protocol):
    """Another host, with a place of the study; `gone`: nothing can be started there any more."""

    gone: bool

    def begin(self, folder: Path, place: Place) -> RunningBlock:
        """Start measuring the folder's request."""
        ...


@dataclass(frozen=True)
class Place:
    """A device under the user's name for it, with the settings that confine a process to it.

    `device` is its name inside the process, which sees no other GPU. `cores` are the logical processors that it may use
    (empty: all). `card` is the GPU's model, driver and UUID, or the processor's model and share. `threads` is the
    number of threads per backend (0: one per physical core that the process may use). `machine` is its host's name;
    `host` begins blocks there (None: this host).
    """

    name: str
    device: str
    card: str
    cores: tuple[int, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    threads: int = 0
    machine: str = field(default_factory=platform.node)
    host: Host | None = None

    @property
    def gone(self) -> bool:
        """Whether nothing can be started there any more."""
        return self.host is not None and self.host.gone


class RunningBlock(ABC):
    """The process that measures a block's trials into `folder`; files from another host are mirrored there."""

    def __init__(self, folder: Path, place: Place) -> None:
        self.folder, self.place = folder, place
        self._read = 0

    @property
    @abstractmethod
    def code(self) -> int | None:
        """Exit code; minus the signal's number if a signal killed it; None while it runs."""

    @abstractmethod
    def end(self) -> None:
        """Interrupt it, and kill it if it doesn't end; its jobs die with it."""

    @property
    def has_ended(self) -> bool:
        return self.code is not None

    @property
    def loss_reason(self) -> str:
        """Reason for its death before its work was done; "" if it ended by itself. Raises `UserError` for bad input."""
        code = self.code or 0
        if code == 0:
            return ""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = (self.folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1] if lines else "no message"
        if code == BAD_INPUT:
            raise UserError(last)
        return f"exit code {code}: {last}"

    def pass_on(self, progress: Progress) -> None:
        """Print the complete lines that it has written since the last call."""
        text = (self.folder / LOG_FILE).read_bytes()
        end = text.rfind(b"\n") + 1
        for line in text[self._read : end].decode("utf-8", "replace").splitlines():
            progress.relay(self.place.name, line)
        self._read = max(self._read, end)


@contextmanager
def confine_to(place: Place) -> Iterator[None]:
    """Confine processes started in the `with` block to the place, like the processes of its blocks."""
    cores, before = os.sched_getaffinity(0), {name: os.environ.get(name) for name in place.env}
    os.environ.update(place.env)
    try:
        if place.cores:
            os.sched_setaffinity(0, place.cores)
        yield
    finally:
        os.sched_setaffinity(0, cores)
        set_variables(before)


def set_variables(values: Mapping[str, str | None]) -> None:
    """Set these variables of this process's environment; None removes one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def is_several(study: Study) -> bool:
    """Return whether the study is spread over devices or a cluster rather than measured by this process."""
    return bool(study.on) or len(split_devices(study.device)) > 1


def split_devices(device: str) -> list[str]:
    """Split a study's `device` option into devices; `cuda:0,cuda:1` are two."""
    return device.split(",")


def parse_places(device: str, threads: int = 0) -> list[Place]:
    """Return the places of a study's devices, for jobs with `threads` threads (0: unspecified).

    Raises `UserError` for a missing device, a name given twice, or devices of two kinds.
    """
    names = split_devices(device)
    if len(set(names)) < len(names):
        raise UserError(f"a device is named twice in {device!r}; name each once")
    kinds = {name.partition(":")[0] for name in names}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        example = "cuda:0,cuda:1 or cpu:0,cpu:1"
        raise UserError(f"a study is spread over devices of one kind, e.g. {example}, not {device!r}")
    return _split_cores(names) if kinds == {"cpu"} else _list_gpus(names, threads)


def _list_gpus(names: list[str], threads: int) -> list[Place]:
    """Return the GPUs, each with a share of the physical cores if a share has enough cores for the threads.

    Jobs pin themselves to the first processors that they may use; without shares all jobs would use the same ones.
    """
    cores = system.core_threads()
    share_size = len(cores) // len(names)
    places = [_make_gpu_place(name) for name in names]
    if not 0 < threads <= share_size:
        return places
    sorted_names = sorted(names)
    return [replace(place, cores=list_share(cores, share_size, sorted_names.index(place.name))) for place in places]


def list_share(cores: Sequence[Sequence[int]], share_size: int, index: int) -> tuple[int, ...]:
    """Return the logical processors of the k-th share of `share_size` physical cores."""
    return tuple(cpu for core in cores[index * share_size : (index + 1) * share_size] for cpu in core)


def _make_gpu_place(name: str) -> Place:
    """Return the GPU of this name as a place; its processes see no other GPU."""
    if missing_gpu(name):
        raise UserError(f"there is no {name} here: neither NVML nor CUDA's driver sees such a GPU; omit it")
    index = int(name.partition(":")[2] or 0)
    visible_gpus = [item.strip() for item in os.environ.get(VISIBLE_DEVICES, "").split(",") if item.strip()]
    gpu = find_gpu(name, os.environ)
    if gpu is None:
        return Place(name, "cuda:0", name, env={VISIBLE_DEVICES: visible_gpus[index] if visible_gpus else str(index)})
    gpu.close()
    return Place(name, "cuda:0", f"{gpu.name}, driver {gpu.driver}, {gpu.uuid}", env={VISIBLE_DEVICES: gpu.uuid})


def _split_cores(names: list[str]) -> list[Place]:
    """Return equal, disjoint shares of the physical cores that this process may use, `cpu:0` first."""
    count = len(names)
    if set(names) != {f"cpu:{k}" for k in range(count)}:
        example = ",".join(f"cpu:{k}" for k in range(count)) if count < 5 else f"cpu:0,cpu:1,…,cpu:{count - 1}"
        raise UserError(f"shares of the processor are numbered from 0, so {count} of them are {example}")
    all_cores, share_size = system.core_threads(), len(system.core_threads()) // count
    if not share_size:
        requirement = f"{count} shares of the processor need as many physical cores"
        raise UserError(f"{requirement}, and there are {len(all_cores)} here")
    model = system.describe()["cpu"]
    places = []
    for name in names:
        cores = list_share(all_cores, share_size, int(name.partition(":")[2]))
        places.append(Place(name, "cpu", describe_share(model, cores), cores, threads=share_size))
    return places


def describe_share(model: str, cores: Sequence[int]) -> str:
    """Return the card of a share of a processor."""
    return f"{model}, processors {','.join(map(str, cores))}"


def list_left(places: Sequence[Place]) -> list[Place]:
    """Return the places that can still begin a block; raise `Unfinished` if all are gone."""
    live_places = [place for place in places if not place.gone]
    if not live_places:
        raise Unfinished("every device of the study was lost; the same command measures what is missing")
    return live_places


def at_one(study: Study, places: Sequence[Place]) -> Study:
    """Return the study as measured by the process of each place."""
    core_count = len(os.sched_getaffinity(0))  # of this process, which makes the plan
    threads = min(core_count, *(place.threads for place in places))
    return replace(study, device=places[0].device, threads=study.threads or threads, on="")
