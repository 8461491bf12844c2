"""`dyno doctor`: every backend in every configured Python, after one real operation in a separate process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dyno.data import data_format
from dyno.data.data_format import DataFormat
from dyno.formatting import wrapped
from dyno.jobs.launcher import launch
from dyno.layers.cold_start import without_byte_code
from dyno.report import charts, tables
from dyno.report.export import export
from dyno.report.style import Chart
from dyno.report.table_kind import TableKind
from dyno.results import metrics
from dyno.results.metrics.metric import Metric
from dyno.runner import self_test
from dyno.study.defaults import check_format
from dyno.table import TEXT, Column, Table
from dyno.worker import plugins, registry, snippets, system, tasks
from dyno.worker.facts.engine import Probe
from dyno.worker.record import Record
from dyno.worker.snippets.parts import Script
from dyno.worker.spec import Job, Runtime
from dyno.worker.tasks.task import Task

TIMEOUT_S = 120.0
# What plug-ins may bring, by the group of entry points.
KINDS: dict[str, type] = {
    **registry.GROUPS, tasks.GROUP: Task, metrics.GROUP: Metric, snippets.GROUP: Script, tables.GROUP: TableKind,
    charts.GROUP: Chart, data_format.GROUP: DataFormat,
}  # fmt: skip
COLUMNS = tuple(
    Column(name, meaning, kind=TEXT)
    for name, meaning in {
        "backend": "backend, or a plug-in's entry point", "python": "version, and interpreter where it is another",
        "status": "ok, skipped, failed or broken", "version": "of its library", "devices": "that the backend can use",
        "detail": "or why it can't be used",
    }.items()
)  # fmt: skip


def examine(others: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Probe every backend in every interpreter and return one row for each.

    A row has name, python, status, version, devices, detail or reason. A plug-in that can't be used has a row too, with
    the status `broken`.
    """
    threads = system.physical_cores()
    places = [(name, Runtime(threads=threads)) for name in registry.names()]
    for name, table in others.items():
        runtime = Runtime(name=name, python=table["python"], threads=threads)
        places += [(backend, runtime) for backend in ([name] if name in registry.names() else registry.names())]
    pending = _ProbeProgress(len(places))
    # Side by side: nothing is timed here, and most of a probe is spent importing a library.
    with tempfile.TemporaryDirectory() as scratch, pending.shown(), ThreadPoolExecutor(threads) as pool:
        folders = [Path(scratch) / str(i) for i in range(len(places))]
        rows = pool.map(lambda place, folder: _probe_backend(place[0], place[1], folder, pending), places, folders)
        return [*rows, *_iter_broken()]


class _ProbeProgress:
    """Which backends have yet to answer, on standard error: one line on a terminal, elsewhere one per answer."""

    def __init__(self, total: int) -> None:
        self.console = Console(stderr=True)
        self.total, self.answered = total, 0
        self.waiting: dict[str, float] = {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it while the block runs."""
        with Live(get_renderable=self._format_line, console=self.console, refresh_per_second=4, transient=True):
            yield

    def tick(self, who: str, seconds: float) -> None:
        """Note how many seconds `who` has been running."""
        self.waiting[who] = seconds

    def done(self, who: str, status: str) -> None:
        """Note that `who` has answered."""
        seconds = self.waiting.pop(who, 0.0)
        self.answered += 1
        if not self.console.is_terminal:
            line = f"{self.answered}/{self.total} {who}: {status}, {seconds:.0f} s"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _format_line(self) -> Text:
        running = ", ".join(f"{who} {seconds:.0f} s" for who, seconds in self.waiting.copy().items())
        return Text(f"{self.answered}/{self.total} answered; waiting for {running}")


def _probe_backend(name: str, runtime: Runtime, folder: Path, pending: _ProbeProgress) -> dict[str, Any]:
    who = f"{name} in {runtime.python}" if runtime.python else name
    pending.tick(who, 0.0)
    job = Job("probe", runtime, backend=name)
    record: Record = launch(job, folder, TIMEOUT_S, lambda _, seconds: pending.tick(who, seconds))
    pending.done(who, record.status)
    probe = record.facts.probe or Probe()
    return {
        "backend": name,
        "python": record.system.get("python", "") + (f" ({runtime.python})" if runtime.python else ""),
        "status": record.status,
        "version": probe.version,
        "devices": ", ".join(probe.devices),
        "detail": _format_detail(probe, record.system) if record.status == "ok" else record.reason,
    }


def _format_detail(probe: Probe, of: Mapping[str, Any]) -> str:
    without = without_byte_code(of.get("modules", 0), of.get("uncompiled", 0))
    return "; ".join(filter(None, (probe.detail, without)))


def _iter_broken() -> Iterator[dict[str, Any]]:
    """Yield a row for each entry point that provides nothing that Dyno can use."""
    for group, kind in KINDS.items():
        for name, reason in plugins.broken(group, kind).items():
            detail = f"an entry point of {group} that {reason}"
            yield {"backend": name, "python": "", "status": "broken", "version": "", "devices": "", "detail": detail}


def doctor(others: dict[str, dict[str, Any]], format: str) -> int:
    """Print the rows; 0 when at least one backend works, 3 when none does."""
    check_format(format)
    rows = examine(others)
    tests = self_test.states()
    about = {"self_tests": tests}
    print(export([Table("doctor", "Backends", "What works here, and why not.", COLUMNS, rows)], format, about=about),
          end="")  # fmt: skip
    if format == "text":
        machine = system.describe()
        line = (
            f"{machine['cpu']}, {machine['cores']} logical processors, {machine['memory_bytes'] / 2**30:.0f} GiB, "
            f"{' '.join(machine['cpu_flags'])}; {machine['os']}"
        )
        print(wrapped(line))
        for test in tests:
            print(wrapped(f"self-test of {test['device']}: {test['state']}"))
    return 0 if any(row["status"] == "ok" for row in rows) else 3
