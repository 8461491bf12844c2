"""A cold start: the time from a process's start to the first answer of a trial's engine, part by part."""

from __future__ import annotations

import builtins
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dyno.worker import measure, system
from dyno.worker.facts.job import ColdStart
from dyno.worker.inputs import input_data
from dyno.worker.journal import Journal
from dyno.worker.nets.local_code import list_shards
from dyno.worker.registry import find
from dyno.worker.spec import STARTED_VARIABLE, Artifact, Job, Trial, Unavailable, UserError

LATER_ANSWERS = 20  # answers after the first
START, IMPORTS, CONTEXT, LOAD, INPUTS, FIRST = "start", "imports", "context", "load", "inputs", "first_call"


def cold_start(job: Job, journal: Journal) -> None:
    """Load the trial's engine, answer once, then LATER_ANSWERS times, and record the time of each part.

    The clock starts when the launcher started this process; raise a `UserError` without a launcher.
    """
    assert job.trial is not None
    trial, clock = job.trial, ColdStartClock()
    if STARTED_VARIABLE not in os.environ:
        raise UserError(
            "the start time of this process is unknown; a cold start is measured by `dyno bench cold-start`"
        )
    start_time = float(os.environ[STARTED_VARIABLE])
    clock.parts[START] = time.monotonic() - start_time
    with clock.imports_apart():
        backend = find(trial.backend)
        with clock.time_part(CONTEXT):
            device = _create_context(trial.runtime.device)
        with clock.time_part(LOAD):
            session = backend.load(trial, job.artifact)
        with clock.time_part(INPUTS):
            feeds = [session.stage(feed) for feed in input_data.read_trial_batches(trial, session.inputs, 1)]
        with clock.time_part(FIRST):
            answer = measure.make_step(session, "all", feeds)
            answer()
    total_seconds = time.monotonic() - start_time
    later_seconds = tuple(measure.time_action(answer) for _ in range(LATER_ANSWERS))
    parts = {START: clock.parts.pop(START), IMPORTS: clock.imported, **clock.parts}
    if device is None:
        del parts[CONTEXT]
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    code_facts = _read_bytes(), _list_code_files(trial, job.artifact), *system.count_compiled()
    journal.facts(cold_start=ColdStart(parts, total_seconds, later_seconds, *code_facts))
    journal.stage("close")
    session.close()


@dataclass
class ColdStartClock:
    """Seconds by part, without import statements; these are `imported`."""

    parts: dict[str, float] = field(default_factory=dict)
    imported: float = 0.0
    _importing: bool = False

    @contextmanager
    def time_part(self, name: str) -> Iterator[None]:
        """Time the block as that part, without its imports."""
        begin, before = time.monotonic(), self.imported
        yield
        self.parts[name] = time.monotonic() - begin - (self.imported - before)

    @contextmanager
    def imports_apart(self) -> Iterator[None]:
        """Time every import during the block; nested imports count once."""
        originals = builtins.__import__, importlib.import_module
        builtins.__import__, importlib.import_module = (self._wrap_import(function) for function in originals)
        try:
            yield
        finally:
            builtins.__import__, importlib.import_module = originals

    def _wrap_import(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def time_import(*args: Any, **keywords: Any) -> Any:
            if self._importing:
                return function(*args, **keywords)
            self._importing, begin = True, time.monotonic()
            try:
                return function(*args, **keywords)
            finally:
                self.imported += time.monotonic() - begin
                self._importing = False

        return time_import


def _create_context(device: str) -> Any:
    """Return the GPU with its context created, independent of the library that loads an engine there.

    Return None for a CPU, or if the driver can't be called from this Python: the engine then creates the context.
    """
    if device == "cpu":
        return None
    from dyno.worker.sessions import gpu

    with suppress(Unavailable):
        gpu_device = gpu.Device(device)
        gpu_device.allocate(1)
        return gpu_device
    return None


def _read_bytes() -> int | None:
    """Return the bytes read from disk for this process; None without a counter in the kernel."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])
    return None


def _list_code_files(trial: Trial, artifact: Artifact | None) -> tuple[str, ...]:
    """Return the code files that this process has mapped or imported, and the model's own files."""
    paths = {artifact.path} if artifact else {trial.model.file, trial.model.weights}
    paths |= set() if artifact else {str(shard) for shard in list_shards(Path(trial.model.weights))}
    with suppress(OSError):
        mappings = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
        paths |= {fields[5] for fields in mappings if len(fields) == 6 and fields[5].startswith("/")}
    for module in [*sys.modules.values()]:  # some return an object for any attribute, or raise
        attributes = getattr(module, "__dict__", {})
        paths |= {path for name in ("__file__", "__cached__") if isinstance(path := attributes.get(name), str)}
    return tuple(sorted(path for path in paths if path.startswith("/") and Path(path).is_file()))
