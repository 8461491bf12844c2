"""`dyno doctor`: every backend in every Python it was told of, after one real operation in a process of its own."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dyno.analysis.formatting import console, markdown, markdown_table
from dyno.datasets.data_format import GROUP, DataFormat
from dyno.jobs.launcher import launch
from dyno.planning.checks import check_format
from dyno.worker import plugins, registry, system, tasks
from dyno.worker.record import Record
from dyno.worker.spec import Job, Runtime
from dyno.worker.tasks.task import Task

TIMEOUT_S = 120.0
# What plug-ins may bring, by the group of entry points.
KINDS: dict[str, type] = {**registry.GROUPS, tasks.GROUP: Task, GROUP: DataFormat}


def examine(others: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per backend and interpreter: name, python, status, version, devices, detail or reason.

    A plug-in that can't be used has a row too, with the status `broken`.
    """
    threads = system.physical_cores()
    places = [(name, Runtime(threads=threads)) for name in registry.names()]
    for name, table in others.items():
        there = Runtime(name=name, python=table["python"], threads=threads)
        places += [(one, there) for one in ([name] if name in registry.names() else registry.names())]
    asked = _Asked(len(places))
    # Side by side: nothing is timed here, and most of a probe is spent importing a library.
    with tempfile.TemporaryDirectory() as scratch, asked.shown(), ThreadPoolExecutor(threads) as pool:
        folders = [Path(scratch) / str(i) for i in range(len(places))]
        found = pool.map(lambda place, folder: _row(place[0], place[1], folder, asked), places, folders)
        return [*found, *_broken()]


class _Asked:
    """Who is being asked and for how long, on standard error: one line on a terminal, elsewhere one per answer."""

    def __init__(self, total: int) -> None:
        self.console = Console(stderr=True)
        self.total, self.answered = total, 0
        self.waiting: dict[str, float] = {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it while the block runs."""
        with Live(get_renderable=self._line, console=self.console, refresh_per_second=4, transient=True):
            yield

    def tick(self, who: str, seconds: float) -> None:
        """It has been asked that long ago."""
        self.waiting[who] = seconds

    def done(self, who: str, status: str) -> None:
        """It has answered."""
        seconds = self.waiting.pop(who, 0.0)
        self.answered += 1
        if not self.console.is_terminal:
            line = f"{self.answered}/{self.total} {who}: {status}, {seconds:.0f} s"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> Text:
        asking = ", ".join(f"{who} {seconds:.0f} s" for who, seconds in self.waiting.copy().items())
        return Text(f"{self.answered}/{self.total} answered; asking {asking}")


def _row(name: str, runtime: Runtime, folder: Path, asked: _Asked) -> dict[str, Any]:
    who = f"{name} in {runtime.python}" if runtime.python else name
    asked.tick(who, 0.0)
    job = Job("probe", runtime, backend=name)
    record: Record = launch(job, folder, TIMEOUT_S, lambda _, seconds: asked.tick(who, seconds))
    asked.done(who, record.status)
    return {
        "backend": name,
        "python": record.system.get("python", "") + (f" ({runtime.python})" if runtime.python else ""),
        "status": record.status,
        "version": record.facts.get("version", ""),
        "devices": ", ".join(record.facts.get("devices", ())),
        "detail": record.facts.get("detail", "") if record.status == "ok" else record.reason,
    }


def _broken() -> Iterator[dict[str, Any]]:
    """A row for each entry point that gives nothing Dyno can use."""
    for group, kind in KINDS.items():
        for name, reason in plugins.broken(group, kind).items():
            detail = f"an entry point of {group} that {reason}"
            yield {"backend": name, "python": "", "status": "broken", "version": "", "devices": "", "detail": detail}


def doctor(others: dict[str, dict[str, Any]], format: str) -> int:
    """Print the rows; 0 when at least one backend works, 3 when none does."""
    check_format(format)
    rows = examine(others)
    if format == "text":
        _show(rows)
    else:
        print(_written(rows, format), end="")
    return 0 if any(row["status"] == "ok" for row in rows) else 3


def _written(rows: list[dict[str, Any]], format: str) -> str:
    """The rows as JSON, CSV or Markdown."""
    if format == "json":
        return json.dumps(rows, indent=1) + "\n"
    if format == "markdown":
        cells = [[markdown(value) for value in row.values()] for row in rows]
        return markdown_table([*rows[0]], cells, [False] * len(rows[0]))
    made = io.StringIO()
    writer = csv.DictWriter(made, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return made.getvalue()


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in rows[0]:
        table.add_column(heading, overflow="fold")
    for row in rows:
        colour = {"ok": "green", "skipped": "yellow"}.get(row["status"], "red")
        table.add_row(
            *(f"[{colour}]{value}[/]" if key == "status" else escape(str(value)) for key, value in row.items())
        )
    out = console()
    out.print(table)
    found = system.describe()
    out.print(
        f"{found['cpu']}, {found['cores']} logical processors, {found['memory_bytes'] / 2**30:.0f} GiB, "
        f"{' '.join(found['cpu_flags'])}; {found['os']}"
    )
