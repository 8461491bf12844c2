"""Settings of arrivals and batches of requests, checked before anything is started."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dyno.worker.option_values import at_least, option, settle
from dyno.worker.spec import UserError

TIME_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
DURATION_TEXT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-zµ]+)")
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
MAX_WAIT_S, WAIT_SHARE = 2e-3, 0.25  # default wait for a full batch: seconds, and share of the latency bound
BOUND_HELP = "Latency limit (SLO) at this percentile, with its unit"


@dataclass(frozen=True)
class ServeOptions:
    """Requests."""

    p99: str = option("", f"{BOUND_HELP}: 20ms.", "none", common=True)
    p50: str = option("", f"{BOUND_HELP}.", "none")
    p90: str = option("", f"{BOUND_HELP}.", "none")
    p999: str = option("", f"{BOUND_HELP} (the 99.9th percentile).", "none")
    rate: tuple[float, ...] = option(
        (), "Requests per second to try: 50,100,200.", "search for the highest within the limit", common=True
    )
    trace: str = option("", "File of arrival times in seconds, one per line, instead of random ones.", "none")
    loadgen: bool = option(
        False, "MLPerf's LoadGen (mlcommons-loadgen) sends the requests, in its server scenario, and keeps its logs."
    )
    endpoint: str = option(
        "",
        "Server of KServe's protocol v2 that has MODEL, a name there or a model here: http://HOST:PORT or "
        "grpc://HOST:PORT.",
        "none: an engine here",
    )
    max_wait: str = option(
        "", "Longest wait of a request for others to fill the batch (0ms: none).", "2ms, or a quarter of the limit"
    )
    instances: int = option(1, "Sessions that answer in parallel, each with its own copy of the model.", common=True)
    queue: int = option(0, "Maximum number of waiting requests; further ones are refused (0: no limit).", "no limit")
    duration: str = option(
        "",
        "How long requests come at each rate, with its unit: 30s.",
        "10 s, longer where the percentile needs it; in a search 2 min at most",
    )
    resolution: float = option(0.05, "The search ends when the next rate would be less than this share higher.")
    engine_batches: tuple[int, ...] = option(
        (), "Batches that the engine is loaded for; others are padded to the next.", "powers of two up to --batch"
    )

    def __post_init__(self) -> None:
        for name in (*PERCENTILES, "duration", "max_wait"):  # numbers lack a unit
            if getattr(self, name) != "":
                parse_seconds(getattr(self, name), name)
        settle(self)
        bounds = [name for name in PERCENTILES if getattr(self, name)]
        if len(bounds) > 1:
            raise UserError(f"{' and '.join(bounds)} are two bounds; give one")
        for name in (*bounds, *(["duration"] if self.duration else [])):
            if parse_seconds(getattr(self, name), name) <= 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be more than 0")
        at_least(1, instances=self.instances)
        at_least(0, queue=self.queue)
        if any(not 0 < rate < 1e7 for rate in self.rate):
            raise UserError("rate must be more than 0 requests per second, and less than ten million")
        if self.duration and (slow := [rate for rate in self.rate if rate * self.duration_s < 1]):
            raise UserError(
                f"at {slow[0]:g} requests per second, {self.duration} bring no request; give {1 / slow[0]:.3g}s or more"
            )
        if any(size < 1 for size in self.engine_batches):
            raise UserError("engine_batches must be at least 1 each")
        if not 0.001 <= self.resolution <= 1:
            raise UserError(f"resolution is {self.resolution:g}; it must be between 0.001 and 1")
        if self.trace and (self.rate or self.duration):
            raise UserError("a trace says when requests come; omit --rate and --duration")
        if self.loadgen and (self.trace or self.queue):
            raise UserError("LoadGen says when requests come, and waits for every answer; omit --trace and --queue")
        if not (bounds or self.rate or self.trace):
            raise UserError("a search needs a bound; give --p99 20ms, or a --rate or a --trace to measure")

    @property
    def bounded(self) -> str:
        """The bounded percentile, p99 without a bound."""
        return next((name for name in PERCENTILES if getattr(self, name)), "p99")

    @property
    def quantile(self) -> float:
        """The share of requests that must be within the bound."""
        return PERCENTILES[self.bounded]

    @property
    def bound_s(self) -> float:
        """The bound in seconds, 0 without a bound."""
        text = getattr(self, self.bounded)
        return parse_seconds(text, self.bounded) if text else 0.0

    @property
    def max_wait_s(self) -> float:
        """Longest wait of a request for others, in seconds."""
        if self.max_wait:
            return parse_seconds(self.max_wait, "max_wait")
        return min(MAX_WAIT_S, WAIT_SHARE * self.bound_s) if self.bound_s else MAX_WAIT_S

    @property
    def duration_s(self) -> float:
        """Duration of each rate in seconds; 0 if unset."""
        return parse_seconds(self.duration, "duration") if self.duration else 0.0


def parse_seconds(text: Any, name: str) -> float:
    """Return `20ms` in seconds; raise a `UserError` for a number without its unit."""
    match = DURATION_TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match[2] not in TIME_UNITS:
        raise UserError(f"{name} is {text!r}; write a number with its unit, such as 20ms or 1.5s")
    return float(match[1]) * TIME_UNITS[match[2]]
