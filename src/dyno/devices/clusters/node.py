"""Program on a cluster's node: it starts a block's process there and sends back the files that it writes.

A cluster only places and moves blocks. The measuring process is the same as on one host, in an environment like that of
the host where the command was given.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import Any

from dyno import __version__
from dyno.devices import blocks, places
from dyno.devices.places import LOG_FILE, Place, RunningBlock, describe_share
from dyno.worker import system
from dyno.worker.record import LOCK_FILE, write_bytes
from dyno.worker.spec import UserError

# Clusters and their sites set these for their processes. A block gets the values of the host of the command.
FORWARDED_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
)  # fmt: skip

RECORD_FILE = "record.json"
FOLDER_PREFIX = "dyno-block-"  # prefix of block folders on a node
Files = dict[str, bytes]  # contents by path below the block's folder


def carry_environment(device: str) -> dict[str, str | None]:
    """Return this host's environment variables for a block of the device; None for an unset variable."""
    names = (*FORWARDED_VARIABLES, places.VISIBLE_DEVICES) if device == "cpu" else FORWARDED_VARIABLES
    return {name: os.environ.get(name) for name in names}


@dataclass(frozen=True)
class NodeDescription:
    """A node: host name, Dyno's version, card of its device for a block, number of the GPU on the host ("" for a CPU),
    and the usable logical processors of each physical core."""

    host: str
    version: str
    card: str
    gpu: str
    cores: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FolderUpdate:
    """Changes in a block's folder since the last poll: changed files, names of all files, and the process's exit code
    (None while it runs)."""

    changed: Files
    names: tuple[str, ...]
    code: int | None


class Node:
    """One device of one node; its methods are called from the host where `dyno run` was started.

    `nice` is advice for a cluster that lowers its processes' priority and may not undo it.
    """

    def __init__(self, nice: str = "") -> None:
        self._nice = nice
        self._folder: Path | None = None
        self._lock_file = -1
        self._process: Popen[bytes] | None = None
        self._sent: dict[str, tuple[int, int]] = {}

    def describe(self, device: str) -> NodeDescription:
        """Return the node's description for the device `cpu` or `cuda`."""
        host, cores = platform.node(), tuple(tuple(core) for core in system.core_threads())
        if device == "cpu":
            return NodeDescription(host, __version__, system.describe()["cpu"], "", cores)
        visible = os.environ.get(places.VISIBLE_DEVICES, "0")
        return NodeDescription(host, __version__, places.parse_places("cuda:0")[0].card, visible, cores)

    def begin(self, files: Files, env: Mapping[str, str], user_env: Mapping[str, str | None], cwd: str) -> None:
        """Start the block with these files in its folder, `env` added, and the user's own variables `user_env`.

        Paths in the study are relative to `cwd`, if this host has that folder.
        """
        self.end()
        self._folder, self._lock_file = _own_folder()
        write_files(files, self._folder)
        self._sent = _list_stamps(self._folder)
        places.set_variables(user_env)
        with suppress(PermissionError):  # children inherit niceness; Ray raises it
            os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))
        if (nice := os.getpriority(os.PRIO_PROCESS, 0)) > 0:
            with open(self._folder / LOG_FILE, "a", encoding="utf-8") as log:
                log.write(f"processes of the cluster give way to others here (niceness {nice}){self._nice}\n")
        self._process = blocks.start_block(self._folder, env, cwd if Path(cwd).is_dir() else None)

    def read_news(self) -> FolderUpdate:
        """Return the changes since the last call."""
        assert self._folder is not None and self._process is not None
        code = self._process.poll()  # before reading files: an ended process has written all of them
        stamps = _list_stamps(self._folder)
        changed = [name for name, stamp in stamps.items() if self._sent.get(name) != stamp]
        self._sent = stamps
        return FolderUpdate(read_files(self._folder, changed), tuple(stamps), code)

    def end(self) -> None:
        """End the block's process, if there is one, and remove its folder."""
        if self._process is not None:
            blocks.end_process(self._process)
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock_file)
            self._folder = None


def _own_folder() -> tuple[Path, int]:
    """Create a folder and lock it while this process lives; return it with the descriptor of its lock.

    Folders left by killed processes are removed first.
    """
    for stale_folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):  # in use, or owned by another user
            descriptor = _lock_folder(stale_folder, fcntl.LOCK_NB)
            shutil.rmtree(stale_folder, ignore_errors=True)
            os.close(descriptor)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        with suppress(FileNotFoundError):  # a stale folder removed before it was locked
            descriptor = _lock_folder(folder)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def _lock_folder(folder: Path, flags: int = 0) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _list_stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return each file's time and size."""
    stamps = {}
    for path in sorted(folder.rglob("*")):
        try:
            status = path.stat()
        except FileNotFoundError:  # just removed
            continue
        if path.is_file() and path.name != LOCK_FILE:
            stamps[path.relative_to(folder).as_posix()] = (status.st_mtime_ns, status.st_size)
    return stamps


def read_files(folder: Path, names: Iterable[str]) -> Files:
    """Return these files of the folder; files that have just disappeared are left out."""
    files = {}
    for name in names:
        with suppress(FileNotFoundError):
            files[name] = (folder / name).read_bytes()
    return files


def write_files(files: Files, folder: Path) -> None:
    """Write the files into the folder; raise `UserError` for a path that leaves it.

    This process may be killed at any time: files are written atomically, records after the files that they describe.
    """
    for name in sorted(files, key=lambda name: Path(name).name == RECORD_FILE):
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"a node's files can't be written: {name} is not a file of its block's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, files[name])


def mirror(update: FolderUpdate, folder: Path) -> None:
    """Update the folder to the node's state: write changed files and remove deleted ones."""
    write_files(update.changed, folder)
    for name in _list_stamps(folder).keys() - set(update.names):
        (folder / name).unlink(missing_ok=True)


# Blocks on other hosts: their folders here mirror those there, over any transport of calls and answers.

POLL_INTERVAL_S = 1.0  # each poll reads the block's files
NODE_TIMEOUT_S = 60.0  # time without an answer after which a node is lost
GONE_EXIT_CODE = 70


class NodeLost(Exception):
    """Error: a node will not answer; the message is the reason."""


class NodeSilent(NodeLost):
    """Error: a node did not answer in time."""


class RemoteHost(ABC):
    """A device on another host, with a `Node` that answers one call at a time; `gone` once it can't be called."""

    def __init__(self) -> None:
        self.gone = False

    @abstractmethod
    def ask(self, call: str, *args: Any) -> None:
        """Call this method of the node; a pending answer to an earlier call is dropped."""

    @abstractmethod
    def answer(self) -> tuple[Any] | None:
        """Return the answer to the last call; None until it arrives. Raise `NodeLost` if it never will."""

    def call(self, call: str, *args: Any, timeout_s: float) -> Any:
        """Call the method and return its answer; raise `NodeLost` without one, or after `timeout_s` seconds."""
        self.ask(call, *args)
        deadline = time.monotonic() + timeout_s
        while (answer := self.answer()) is None:
            if time.monotonic() > deadline:
                raise NodeSilent(f"no answer for {timeout_s:g} s")
            time.sleep(0.05)
        return answer[0]

    def begin(self, folder: Path, place: Place) -> RunningBlock:
        """Send the block's folder there, and start the block."""
        return RemoteBlock(folder, place, self)


class RemoteBlock(RunningBlock):
    """A block's process on another host; its folder here mirrors the folder there."""

    def __init__(self, folder: Path, place: Place, host: RemoteHost) -> None:
        super().__init__(folder, place)
        self._host = host
        self._code: int | None = None
        self._loss_reason = ""
        host.ask(
            "begin",
            read_files(folder, _list_stamps(folder)),
            place.env,
            carry_environment(place.device),
            str(Path.cwd()),
        )
        self._waits = True
        self._polled_at = time.monotonic()

    @property
    def code(self) -> int | None:
        if self._code is None:
            try:
                self._read_answer()
            except NodeLost as e:
                self._host.gone, self._code, self._loss_reason = True, GONE_EXIT_CODE, str(e)
        return self._code

    @property
    def loss_reason(self) -> str:
        return f"lost with its node: {self._loss_reason}" if self._code == GONE_EXIT_CODE else super().loss_reason

    def end(self) -> None:
        if not self._host.gone:
            with suppress(NodeLost):
                self._host.call("end", timeout_s=NODE_TIMEOUT_S)

    def _read_answer(self) -> None:
        """Take the answer to the last call if it has arrived; send the next call when it is due."""
        now = time.monotonic()
        if not self._waits:
            if now - self._polled_at < POLL_INTERVAL_S:
                return
            self._host.ask("read_news")
            self._waits, self._polled_at = True, now
        answer = self._host.answer()
        if answer is None:
            if now - self._polled_at > NODE_TIMEOUT_S:
                raise NodeSilent(f"no answer for {NODE_TIMEOUT_S:g} s")
            return
        self._waits = False
        update: FolderUpdate | None = answer[0]
        if update is not None:  # None is the answer to `begin`
            mirror(update, self.folder)
            if update.code is not None:
                self.end()
                self._code = update.code


def check_device(device: str) -> None:
    """Raise `UserError` for a device other than `cpu` or `cuda`, such as a single one of a host."""
    if device not in ("cpu", "cuda"):
        raise UserError(f"on a cluster every device of a kind takes part; give --device cpu or cuda, not {device!r}")


def same_dyno(name: str, info: NodeDescription) -> NodeDescription:
    """Return `info` unchanged; raise `UserError` if that host has another version of Dyno."""
    if info.version != __version__:
        raise UserError(f"{name} has Dyno {info.version}, and this is {__version__}; install the same on all hosts")
    return info


def make_gpu_place(info: NodeDescription, name: str, host: RemoteHost) -> Place:
    """Return the GPU of a node as a place, by its name on that host."""
    place_name = f"{info.host}/{name}"
    return Place(place_name, "cuda:0", info.card, threads=len(info.cores), machine=info.host, host=host)


def make_core_place(info: NodeDescription, core_cpus: Sequence[tuple[int, ...]], host: RemoteHost) -> Place:
    """Return these physical cores of a node as a place."""
    cores = tuple(cpu for core in core_cpus for cpu in core)
    return Place(
        info.host, "cpu", describe_share(info.card, cores), cores, threads=len(core_cpus), machine=info.host, host=host
    )


def number_names(places: Sequence[Place]) -> list[Place]:
    """Return the places with unique names: the second place of a name is NAME#2."""
    names, unique_places = Counter[str](), []
    for place in places:
        names[place.name] += 1
        count = names[place.name]
        unique_places.append(replace(place, name=f"{place.name}#{count}") if count > 1 else place)
    return unique_places
