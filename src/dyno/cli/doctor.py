"""`dyno doctor`: every backend in every configured Python, after one real operation in a separate process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypedDict

from rich.text import Text

from dyno.data import data_format
from dyno.data.data_format import DataFormat
from dyno.formatting import wrap_text
from dyno.jobs.launcher import Tick, launch, stop_jobs_on_error
from dyno.jobs.progress import stderr_console
from dyno.layers.cold_start import without_byte_code
from dyno.report import charts, tables
from dyno.report.export import export
from dyno.report.style import Chart
from dyno.report.tables import TableKind
from dyno.results import metrics
from dyno.results.metrics.metric import Metric
from dyno.runner import self_test
from dyno.table import TEXT, Column, Table
from dyno.worker import extras, plugins, registry, snippets, system, tasks
from dyno.worker.facts.engine import Probe
from dyno.worker.record import Record
from dyno.worker.snippets import Script
from dyno.worker.spec import Job, Runtime
from dyno.worker.tasks import Task

TIMEOUT_S = 120.0
ENGINE_EXTRAS = ("torch", "onnx", "openvino")  # extras with the libraries of engines
ALL_EXTRAS = (*ENGINE_EXTRAS, "report", "data", "video")  # extras included in `all`
REFRESH_INTERVAL_S = 0.25  # updates of the line on a terminal
# Types that plug-ins may provide, by group of entry points.
KINDS: dict[str, type] = {
    **registry.ENTRY_POINT_GROUPS, tasks.ENTRY_POINT_GROUP: Task, metrics.ENTRY_POINT_GROUP: Metric,
    snippets.ENTRY_POINT_GROUP: Script, tables.ENTRY_POINT_GROUP: TableKind, charts.ENTRY_POINT_GROUP: Chart,
    data_format.ENTRY_POINT_GROUP: DataFormat,
}  # fmt: skip


class SelfTestState(TypedDict):
    """The self-test of a device: its grade and date, "" without a valid one, and its state in words."""

    device: str
    grade: str
    date: str
    state: str


class MachineDescription(TypedDict):
    """The head of the backends' table in JSON."""

    self_tests: list[SelfTestState]


COLUMNS = tuple(
    Column(name, meaning, kind=TEXT)
    for name, meaning in {
        "backend": "backend, or a plug-in's entry point", "python": "version, and interpreter if it is another",
        "status": "ok, skipped, failed or broken", "version": "of its library", "devices": "that the backend can use",
        "detail": "or why it can't be used",
    }.items()
)  # fmt: skip


def examine(runtimes: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Probe every backend in every interpreter and return a row for each.

    A row has backend, python, status, version, devices and detail. An unusable plug-in has a row with the status
    `broken`.
    """
    threads = system.physical_cores()
    targets = [(name, Runtime(threads=threads)) for name in registry.list_backends()]
    for name, table in runtimes.items():
        runtime = Runtime(name=name, python=table["python"], threads=threads)
        targets += [
            (backend, runtime) for backend in ([name] if name in registry.list_backends() else registry.list_backends())
        ]
    # In parallel, as nothing is timed, and a probe mostly imports a library.
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(threads) as pool,
        stop_jobs_on_error(pool) as tick,
    ):
        probes = {}
        for index, (name, runtime) in enumerate(targets):
            probe = pool.submit(_probe_backend, name, runtime, Path(scratch) / str(index), tick)
            probes[probe] = f"{name} in {runtime.python}" if runtime.python else name
        _show_progress(probes)
        return [*(probe.result() for probe in probes), *_iter_broken()]


def _show_progress(probes: Mapping[Future[dict[str, Any]], str]) -> None:
    """Show the running probes on standard error: one line on a terminal, elsewhere a line per answer."""
    console, start = stderr_console(), time.monotonic()
    pending = set(probes)
    with console.status("") as status:
        while pending:
            done, pending = wait(pending, REFRESH_INTERVAL_S, FIRST_COMPLETED)
            count, seconds = len(probes) - len(pending), time.monotonic() - start
            for position, probe in enumerate(done, count - len(done) + 1):
                if not console.is_terminal:
                    line = f"{position}/{len(probes)} {probes[probe]}: {probe.result()['status']}, {seconds:.0f} s"
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
            names = ", ".join(name for probe, name in probes.items() if probe in pending)
            status.update(
                Text(f"{count}/{len(probes)} answered in {seconds:.0f} s{names and f'; waiting for {names}'}")
            )


def _probe_backend(name: str, runtime: Runtime, folder: Path, tick: Tick) -> dict[str, Any]:
    record: Record = launch(Job("probe", runtime, backend=name), folder, TIMEOUT_S, tick)
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
    byte_code_note = without_byte_code(of.get("modules", 0), of.get("uncompiled", 0))
    return "; ".join(filter(None, (probe.detail, byte_code_note)))


def _iter_broken() -> Iterator[dict[str, Any]]:
    """Yield a row per entry point without anything that Dyno can use."""
    for group, kind in KINDS.items():
        for name, reason in plugins.list_broken(group, kind).items():
            detail = f"an entry point of {group} that {reason}"
            yield {"backend": name, "python": "", "status": "broken", "version": "", "devices": "", "detail": detail}


def _describe_libraries() -> Iterator[str]:
    """Yield a sentence on the installed libraries, and one on missing ones with a command to install them."""
    extras_by_name = {name: extra for name, extra in extras.EXTRAS.items() if extra in ALL_EXTRAS}
    groups = {"onnxruntime": extras.ONNX_RUNTIME_BUILDS, "opencv-python": "opencv-python|opencv-python-headless"}
    versions = {name: system.find_versions((groups.get(name, name),)) for name in extras_by_name}
    texts = (
        f"{each} {version}"
        for name in extras_by_name
        if extras_by_name[name] in ENGINE_EXTRAS
        for each, version in versions[name].items()
    )
    yield f"libraries here: {', '.join(texts) or 'none'}"
    if missing_names := [name for name in extras_by_name if not versions[name]]:
        yield f"not installed: {', '.join(missing_names)}; {extras.install(*missing_names)}"


def doctor(runtimes: dict[str, dict[str, Any]], format: str) -> int:
    """Print the rows; return 0 if at least one backend works, else 3."""
    rows = examine(runtimes)
    tests = self_test.list_states()
    head = {"self_tests": tests}
    print(export([Table("doctor", "Backends", "What works here, and why not.", COLUMNS, rows)], format, head=head),
          end="")  # fmt: skip
    if format == "text":
        for line in _describe_libraries():
            print(wrap_text(line))
        machine = system.describe()
        line = (
            f"{machine['cpu']}, {machine['cores']} logical processors, {machine['memory_bytes'] / 2**30:.0f} GiB, "
            f"{' '.join(machine['cpu_flags'])}; {machine['os']}"
        )
        print(wrap_text(line))
        for test in tests:
            print(wrap_text(f"self-test of {test['device']}: {test['state']}"))
    return 0 if any(row["status"] == "ok" for row in rows) else 3
