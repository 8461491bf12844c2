"""A Ray cluster as places: one per GPU, or one per node for its processors."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dyno import __version__
from dyno.devices.clusters import node as nodes
from dyno.devices.clusters.node import Node, NodeDescription, NodeLost, NodeSilent, RemoteHost
from dyno.devices.places import Place
from dyno.worker.extras import load_library
from dyno.worker.spec import UserError, shorten

START_TIMEOUT_S = 120.0  # limit for a node to start Ray's process with Dyno
CONNECT_TIMEOUT_S = 10.0  # limit for a connection to the head node
LAST_PORT = 2**16 - 1
LOCAL_ADDRESSES = ("", "auto", "local")  # addresses of this host's own cluster
NICENESS_ADVICE = "; set RAY_worker_niceness=0 before `ray start`"
# Variables for a cluster started here: no usage statistics, and measuring processes keep their priority.
RAY_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


@contextmanager
def hold_places(address: str, device: str) -> Iterator[list[Place]]:
    """Hold the cluster's places for a device, `cpu` or `cuda`, during the `with` block.

    `address` is a head node's (HOST:PORT or ray://…), or "" for this host's cluster; without one, Ray is started here
    and ended afterwards. Raises `UserError`, one line.
    """
    nodes.check_device(device)
    os.environ |= {**RAY_VARIABLES, **os.environ}
    ray = load_library("ray", "--cluster ray", UserError)
    _check_reachable(address)
    handler = signal.getsignal(signal.SIGTERM)  # Ray's own handler prints the trace of its C++
    try:
        ray.init(address=address or None, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=None)
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    except SystemExit as e:  # Ray turns SIGTERM during its start into this
        ray.shutdown()
        raise KeyboardInterrupt from e
    except (ConnectionError, RuntimeError, ValueError, OSError) as e:
        location = f"at {address}" if address else "here"
        raise UserError(f"no Ray cluster answers {location}: {shorten(e, 200)}") from e
    try:
        yield _list_places(device)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise `UserError` for a malformed or unreachable address: Ray would retry for minutes."""
    if address in LOCAL_ADDRESSES:
        return
    scheme, _, netloc = address.rpartition("://")
    host, _, port = netloc.rpartition(":")
    if scheme not in ("", "ray") or not host or not port.isdecimal() or int(port) > LAST_PORT:
        advice = "write --cluster ray=HOST:PORT of its head node"
        raise UserError(f"{address!r} is not the address of a Ray cluster; {advice}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as e:
        raise UserError(f"no Ray cluster answers at {address}: {e.strerror or e}") from e


def _list_places(device: str) -> list[Place]:
    """Return a place for each device, with an actor that reserves it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(Node)
    actors = []
    for node in sorted(_list_alive().values(), key=lambda n: (n["NodeManagerHostname"], n["NodeID"])):
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        count = int(node["Resources"].get("GPU" if device == "cuda" else "CPU", 0))
        requests = [{"num_gpus": 1, "num_cpus": 0}] * count if device == "cuda" else [{"num_cpus": count}] * (count > 0)
        actors += [
            (node, count, remote.options(scheduling_strategy=strategy, **request).remote(NICENESS_ADVICE))
            for request in requests
        ]
    if not actors:
        kind = "GPU" if device == "cuda" else "processor"
        raise UserError(f"no node of the Ray cluster has a {kind}; see `ray status`")
    used_cores, places = Counter[str](), []
    for node, count, actor in actors:
        host = RayHost(actor)
        info = _describe_node(host, node, device)
        if info is not None and device == "cuda":
            places.append(nodes.make_gpu_place(info, f"cuda:{info.gpu}", host))
        elif info is not None:
            places.append(_choose_processors(info, count, used_cores, host))
    if not places:
        raise UserError("every node of the Ray cluster was lost before it answered; see `ray status`")
    return nodes.number_names(places)


def _list_alive() -> dict[str, dict[str, Any]]:
    """Return the nodes that Ray considers alive, by their identifiers."""
    import ray

    cluster: Any = ray  # untyped list of nodes
    return {node["NodeID"]: node for node in cluster.nodes() if node["Alive"]}


def _describe_node(host: RayHost, node: dict[str, Any], device: str) -> NodeDescription | None:
    """Return the node's description; None if it had died, which Ray notices late.

    Raises `UserError` if it can't take part.
    """
    name = node["NodeManagerHostname"]
    try:
        info: NodeDescription = host.call("describe", device, timeout_s=START_TIMEOUT_S)
    except NodeSilent as e:
        raise UserError(f"{name} did not answer within {START_TIMEOUT_S:g} s; is it busy with other Ray tasks?") from e
    except NodeLost as e:
        if node["NodeID"] not in _list_alive():
            return None
        raise UserError(f"{name} can't take part: {e}; install Dyno {__version__} there as here") from e
    return nodes.same_dyno(name, info)


def _choose_processors(info: NodeDescription, count: int, used_cores: Counter[str], host: RayHost) -> Place:
    """Return a node's processors: all physical cores of its host, or Ray's count of them if that is lower.

    Two nodes of one host share no core if there are enough.
    """
    start = used_cores[info.host]
    cores = info.cores[start : start + count] if count < len(info.cores) else info.cores
    if not cores:
        raise UserError(f"the Ray nodes of {info.host} count more processors than it has physical cores")
    used_cores[info.host] += count
    return nodes.make_core_place(info, cores, host)


class RayHost(RemoteHost):
    """A Ray actor that holds a device."""

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self._actor = actor
        self._pending: Any = None

    def ask(self, call: str, *args: Any) -> None:
        self._pending = getattr(self._actor, call).remote(*args)

    def answer(self) -> tuple[Any] | None:
        import ray

        if not ray.wait([self._pending], timeout=0)[0]:
            return None
        try:
            return (ray.get(self._pending),)
        except ray.exceptions.ActorUnavailableError as e:
            raise NodeLost("it does not answer any more") from e
        except ray.exceptions.RayActorError as e:
            raise NodeLost(" ".join(str(e).split())) from e
        except ray.exceptions.RayError as e:  # raised on the node: a trace with the error at its end
            raise NodeLost(str(e).strip().splitlines()[-1]) from e
