"""Which routes to the ONNX file were tried beside the usual one, and what came of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyno.analysis.records.shapes import ROUTES_TRIED
from dyno.analysis.records.stored import read_table
from dyno.worker.record import write_json
from dyno.worker.spec import SCHEMA, to_json

FILE = "routes.json"  # in a run folder
KEPT, BEATEN, NOT_FASTER = "kept", "slower than another", "not proven faster"
WRONG, FAILED = "other outputs", "failed"


@dataclass(frozen=True)
class RouteAttempt:
    """A route by its name, the usual one's latency over its own (0: none was measured), what came of it, and why it
    failed."""

    route: str
    ratio: float
    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Attempt:
    """The routes that were tried for a configuration of a model: `key` is of the model's content, `configuration` is
    the backend with its options and the precision, as in tables."""

    key: str
    model: str
    configuration: str
    batch: int
    routes: tuple[RouteAttempt, ...] = ()

    @property
    def kept(self) -> RouteAttempt | None:
        """The route with separate rows; None where the usual one is as good."""
        return next((one for one in self.routes if one.outcome == KEPT), None)


def attempts(run: Path) -> tuple[Attempt, ...]:
    """Read the attempts in a run folder; empty where nothing was tried, and where the file is damaged."""
    stored = read_table(run / FILE, [], ROUTES_TRIED)
    return tuple(map(_parse_attempt, stored.get("attempts", ()))) if stored is not None else ()


def store(run: Path, attempts: tuple[Attempt, ...]) -> None:
    """Write the attempts into a run folder."""
    write_json(run / FILE, {"schema": SCHEMA, "attempts": [to_json(one) for one in attempts]})


def _parse_attempt(row: dict[str, Any]) -> Attempt:
    routes = (
        RouteAttempt(one.get("route", ""), one.get("ratio", 0.0), one.get("outcome", ""), one.get("reason", ""))
        for one in row.get("routes", ())
    )
    key, model, configuration = (row.get(name, "") for name in ("key", "model", "configuration"))
    return Attempt(key, model, configuration, row.get("batch", 0), tuple(routes))
