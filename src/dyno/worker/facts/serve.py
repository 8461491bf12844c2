"""What a job found out about requests that came at given times."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServeStep:
    """One rate that was tried: requests/s asked for, whether it holds the bound (see `worker/serve/judging.py`), the
    number of the first request that counts, whether more came than were answered, and how many processors other
    programs kept busy."""

    rate: float
    verdict: str = ""
    first: int = 0
    unstable: bool = False
    others_busy: float = 0.0


@dataclass(frozen=True)
class ServeFacts:
    """Requests and how they were answered.

    `percentile` of the latencies must be within `bound_s` seconds (0: there is no bound), for which `least` requests
    are needed. At most `most` are a batch, for which the first waits at most `max_wait_s`; engines were loaded for
    the `rungs`. `lanes` batches are answered at once, by `instances` sessions. `capacity` is how many requests per
    second full batches allow. `highest` is the highest rate that holds, 0 for none, None where none was searched.
    Rates below `lowest` weren't tried, as the time that was asked for brings too few requests (0: any time).
    `trace` is the name of the file that says when requests came, and `endpoint` the server.
    """

    percentile: float = 0.99
    bound_s: float = 0.0
    least: int = 0
    most: int = 1
    max_wait_s: float = 0.0
    queue: int = 0
    instances: int = 1
    lanes: int = 1
    rungs: tuple[int, ...] = ()
    capacity: float = 0.0
    searched: bool = False
    resolution: float = 0.0
    highest: float | None = None
    lowest: float = 0.0
    trace: str = ""
    endpoint: str = ""
    steps: tuple[ServeStep, ...] = field(default=())
