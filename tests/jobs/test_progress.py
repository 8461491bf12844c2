"""What a study says where nothing is drawn anew."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console

from dyno.jobs.progress import Progress
from dyno.worker.spec import Trial


def test_a_wait_gets_a_line_where_nothing_is_drawn_anew(fake_trial: Callable[..., Trial]) -> None:
    told = io.StringIO()
    progress = Progress(console=Console(file=told, width=200))
    progress.start(fake_trial(), 0)
    progress.tick("load", 0.1)
    progress.waiting("7")
    said = "net fake@latency_ms=0.1 fp32 b2 4  round 1: waits for process 7, another dyno on this GPU\n"
    assert told.getvalue() == said
