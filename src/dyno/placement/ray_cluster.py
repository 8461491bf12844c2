"""A Ray cluster as places: one for each GPU of its nodes, or one for each node's processors."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dyno import __version__
from dyno.placement.places import Place, share
from dyno.placement.ray_node import OF_RAY, Described, News, Node, mirror, whole
from dyno.placement.running import Running
from dyno.worker.extras import install
from dyno.worker.spec import UserError

POLL_S = 1.0  # between two questions to a node: each has it look through the block's files
START_S = 120.0  # that a node has to start Ray's process with Dyno in it
CONNECT_S = 10.0  # for a connection to the head node
SILENT_S = 60.0  # without an answer, after which a node is taken for lost
GONE = 70
# Of a cluster that is started here: nothing is sent to Ray's makers, and what measures gives way to nobody.
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


@contextmanager
def places(address: str, device: str) -> Iterator[list[Place]]:
    """The places of the cluster for a device, `cpu` or `cuda`, while the block is entered.

    `address` is a head node's (HOST:PORT or ray://…), "" for the cluster of this host; where there is none Ray is
    started here and ended afterwards. Raises `UserError`, one line.
    """
    if device not in ("cpu", "cuda"):
        raise UserError(f"on a cluster every device of a kind takes part; give --device cpu or cuda, not {device!r}")
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    try:
        import ray
    except ImportError as e:
        raise UserError(f"--on ray needs Ray: {e}; {install('ray')}") from e
    _check_reachable(address)
    try:
        ray.init(address=address or None, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=None)
    except (ConnectionError, RuntimeError, ValueError, OSError) as e:
        where = f"at {address}" if address else "here"
        raise UserError(f"there is no Ray cluster {where} that answers: {' '.join(str(e).split())[:200]}") from e
    try:
        yield _places(device)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """A `UserError` where nobody listens at HOST:PORT: Ray would go on trying for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as e:
        raise UserError(f"there is no Ray cluster at {address} that answers: {e.strerror or e}") from e


def _places(device: str) -> list[Place]:
    """A place for each device, with an actor that has it for itself."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(Node)
    actors = []
    for node in sorted(_alive().values(), key=lambda n: (n["NodeManagerHostname"], n["NodeID"])):
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        count = int(node["Resources"].get("GPU" if device == "cuda" else "CPU", 0))
        wanted = [{"num_gpus": 1, "num_cpus": 0}] * count if device == "cuda" else [{"num_cpus": count}] * (count > 0)
        actors += [(node, count, remote.options(scheduling_strategy=there, **each).remote()) for each in wanted]
    if not actors:
        kind = "GPU" if device == "cuda" else "processor"
        raise UserError(f"no node of the Ray cluster has a {kind}; see `ray status`")
    names, taken, found = Counter[str](), Counter[str](), []
    for node, count, actor in actors:
        about = _described(actor, node, device)
        if about is None:
            continue
        if device == "cuda":
            place = Place(
                f"{about.host}/cuda:{about.gpu}",
                "cuda:0",
                about.card,
                threads=len(about.cores),
                machine=about.host,
                host=RayHost(actor),
            )
        else:
            place = _processors(about, count, taken, RayHost(actor))
        names[place.name] += 1
        found.append(replace(place, name=f"{place.name}#{names[place.name]}") if names[place.name] > 1 else place)
    if not found:
        raise UserError("every node of the Ray cluster was lost while it was asked; see `ray status`")
    return found


def _alive() -> dict[str, dict[str, Any]]:
    """The nodes that Ray takes for alive, by their identifiers."""
    import ray

    cluster: Any = ray  # its list of nodes has no types
    return {node["NodeID"]: node for node in cluster.nodes() if node["Alive"]}


def _described(actor: Any, node: dict[str, Any], device: str) -> Described | None:
    """What the node says of itself; None where it was dead already, which Ray notices late. A `UserError` where it
    can't take part."""
    import ray

    name = node["NodeManagerHostname"]
    try:
        about: Described = ray.get(actor.describe.remote(device), timeout=START_S)
    except ray.exceptions.GetTimeoutError as e:
        raise UserError(f"{name} did not answer within {START_S:g} s; is it busy with other work of Ray?") from e
    except ray.exceptions.RayError as e:
        if node["NodeID"] not in _alive():
            return None
        last = str(e).strip().splitlines()[-1]
        raise UserError(f"{name} can't take part: {last}; install Dyno {__version__} there as here") from e
    if about.version != __version__:
        raise UserError(f"{name} has Dyno {about.version}, and this is {__version__}; install the same on all hosts")
    return about


def _processors(about: Described, count: int, taken: Counter[str], host: RayHost) -> Place:
    """A node's processors: all physical cores of its host, or as many as Ray counts where those are fewer; two nodes of
    one host have no core in common while there are enough."""
    first = taken[about.host]
    own = about.cores[first : first + count] if count < len(about.cores) else about.cores
    if not own:
        raise UserError(f"the Ray nodes of {about.host} count more processors than it has physical cores")
    taken[about.host] += count
    cores = tuple(cpu for core in own for cpu in core)
    return Place(about.host, "cpu", share(about.card, cores), cores, threads=len(own), machine=about.host, host=host)


@dataclass
class RayHost:
    """Where a Ray actor begins blocks; `gone` once it doesn't answer any more."""

    actor: Any
    gone: bool = False

    def begin(self, folder: Path, place: Place) -> Running:
        """Send the block's folder there, and start."""
        return RayBlock(folder, place, self)


class RayBlock(Running):
    """A block's process on a node of the cluster; its folder here follows the one there."""

    def __init__(self, folder: Path, place: Place, host: RayHost) -> None:
        super().__init__(folder, place)
        self._host = host
        self._code: int | None = None
        self._why = ""
        own = [name for name in OF_RAY if name in os.environ]
        self._pending: Any = host.actor.begin.remote(whole(folder), place.env, own, str(Path.cwd()))
        self._heard = self._asked = time.monotonic()

    @property
    def code(self) -> int | None:
        if self._code is None:
            self._listen()
        return self._code

    @property
    def lost(self) -> str:
        return f"lost with its node: {self._why}" if self._code == GONE else super().lost

    def end(self) -> None:
        import ray

        if not self._host.gone:
            with suppress(ray.exceptions.RayError):
                ray.get(self._host.actor.end.remote(), timeout=SILENT_S)

    def _listen(self) -> None:
        """Take the answer to the last question if there is one, and ask the next when it is time."""
        import ray

        now = time.monotonic()
        if self._pending is None:
            if now - self._asked < POLL_S:
                return
            self._pending, self._asked = self._host.actor.news.remote(), now
        if not ray.wait([self._pending], timeout=0)[0]:
            if now - self._heard > SILENT_S:
                self._gone(f"no answer for {SILENT_S:g} s")
            return
        try:
            answer: News | None = ray.get(self._pending)
        except ray.exceptions.RayActorError as e:
            self._gone(" ".join(str(e).split()))
            return
        self._pending, self._heard = None, now
        if answer is not None:  # begun, and this is no answer to that
            mirror(answer, self.folder)
            if answer.code is not None:
                self.end()
                self._code = answer.code

    def _gone(self, why: str) -> None:
        self._host.gone, self._code = True, GONE
        self._why = why
