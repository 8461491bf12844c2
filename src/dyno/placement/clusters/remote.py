"""Blocks on other hosts: each one's folder here follows the one there, whatever carries questions and answers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno import __version__
from dyno.placement.clusters.node import FolderUpdate, NodeDescription, carried, mirror, whole
from dyno.placement.places import Place, RunningBlock, share
from dyno.worker.spec import UserError

POLL_S = 1.0  # between two questions to a node: each has it look through the block's files
SILENT_S = 60.0  # without an answer, after which a node is taken for lost
GONE = 70


class NodeLost(Exception):
    """Why there will be no answer from a node."""


class NodeSilent(NodeLost):
    """It did not answer in time."""


class RemoteHost(ABC):
    """A device on another host, where a `Node` answers one call after another; `gone` once nothing can be asked."""

    def __init__(self) -> None:
        self.gone = False

    @abstractmethod
    def ask(self, call: str, *given: Any) -> None:
        """Have that method of the node called; an answer that is still to come to an earlier call is forgotten."""

    @abstractmethod
    def answer(self) -> tuple[Any] | None:
        """Return the answer to the last call, or None until it has arrived; raise `NodeLost` if it never will."""

    def call(self, call: str, *given: Any, within: float) -> Any:
        """Call the method and return its answer; raise `NodeLost` if there is none, also after `within` seconds."""
        self.ask(call, *given)
        until = time.monotonic() + within
        while (answer := self.answer()) is None:
            if time.monotonic() > until:
                raise NodeSilent(f"no answer for {within:g} s")
            time.sleep(0.05)
        return answer[0]

    def begin(self, folder: Path, place: Place) -> RunningBlock:
        """Send the block's folder there, and start."""
        return RemoteBlock(folder, place, self)


class RemoteBlock(RunningBlock):
    """A block's process on another host; its folder here follows the one there."""

    def __init__(self, folder: Path, place: Place, host: RemoteHost) -> None:
        super().__init__(folder, place)
        self._host = host
        self._code: int | None = None
        self._why = ""
        host.ask("begin", whole(folder), place.env, carried(place.device), str(Path.cwd()))
        self._waits = True
        self._asked = time.monotonic()

    @property
    def code(self) -> int | None:
        if self._code is None:
            try:
                self._read_answer()
            except NodeLost as e:
                self._host.gone, self._code, self._why = True, GONE, str(e)
        return self._code

    @property
    def lost(self) -> str:
        return f"lost with its node: {self._why}" if self._code == GONE else super().lost

    def end(self) -> None:
        if not self._host.gone:
            with suppress(NodeLost):
                self._host.call("end", within=SILENT_S)

    def _read_answer(self) -> None:
        """Take the answer to the last question if there is one, and ask the next when it is time."""
        now = time.monotonic()
        if not self._waits:
            if now - self._asked < POLL_S:
                return
            self._host.ask("news")
            self._waits, self._asked = True, now
        answer = self._host.answer()
        if answer is None:
            if now - self._asked > SILENT_S:
                raise NodeSilent(f"no answer for {SILENT_S:g} s")
            return
        self._waits = False
        news: FolderUpdate | None = answer[0]
        if news is not None:  # begun, and this isn't an answer to that
            mirror(news, self.folder)
            if news.code is not None:
                self.end()
                self._code = news.code


def check_device(device: str) -> None:
    """Raise `UserError` for a single device of a host."""
    if device not in ("cpu", "cuda"):
        raise UserError(f"on a cluster every device of a kind takes part; give --device cpu or cuda, not {device!r}")


def same_dyno(name: str, about: NodeDescription) -> NodeDescription:
    """Return `about` unchanged; raise `UserError` if that host has another version of Dyno."""
    if about.version != __version__:
        raise UserError(f"{name} has Dyno {about.version}, and this is {__version__}; install the same on all hosts")
    return about


def gpu(about: NodeDescription, name: str, host: RemoteHost) -> Place:
    """Return the GPU of a node as a place, by its name on that host."""
    where = f"{about.host}/{name}"
    return Place(where, "cuda:0", about.card, threads=len(about.cores), machine=about.host, host=host)


def processors(about: NodeDescription, own: Sequence[tuple[int, ...]], host: RemoteHost) -> Place:
    """Return these physical cores of a node as a place."""
    cores = tuple(cpu for core in own for cpu in core)
    return Place(about.host, "cpu", share(about.card, cores), cores, threads=len(own), machine=about.host, host=host)


def distinct(places: Sequence[Place]) -> list[Place]:
    """Return the places with distinct names: the second one of a name is NAME#2."""
    names, named = Counter[str](), []
    for place in places:
        names[place.name] += 1
        number = names[place.name]
        named.append(replace(place, name=f"{place.name}#{number}") if number > 1 else place)
    return named
