"""The cross-check with trtexec: a trial in its terms, the command that repeats it, and both results side by side."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dyno.analysis.records import timeline
from dyno.analysis.records.results import TrialResult, load
from dyno.analysis.trtexec import command, differences, log, terms
from dyno.engine.device_lock import held
from dyno.jobs.telemetry import Telemetry
from dyno.worker.spec import Runtime, UserError

LOAD_S = 300.0  # what trtexec may take besides warming up and timing: an engine of some GB, a slow disk


def cross_check(
    records: Path | TrialResult | Sequence[TrialResult], trtexec_file: Path | None = None, run: bool = True
) -> list[str]:
    """Return sentences that cross-check every TensorRT trial of a run folder, or of `records`, with trtexec.

    Each trial is explained in trtexec's terms, followed by the commands that should give the same. `trtexec_file` is a
    log or exported times to compare with; without one, trtexec is run if it is on the PATH and `run` allows it. Raises
    `UserError` for a file that trtexec didn't write and for records without a TensorRT trial.
    """
    log_times = log.read(trtexec_file) if trtexec_file else None
    trials = _choose_trials(records)
    sentences: list[str] = []
    for trial in trials:
        sentences += [f"{trial.label}:"] if len(trials) > 1 else []
        sentences += [*terms.explain(trial), *command_lines(trial)]
        sentences += differences.compare(trial, log_times) if log_times else _run_all(trial) if run else []
    return sentences


def _choose_trials(records: Path | TrialResult | Sequence[TrialResult]) -> list[TrialResult]:
    if isinstance(records, TrialResult):
        records = [records]
    trials = load(records).trials if isinstance(records, Path) else list(records)
    engines = [t for t in trials if is_engine(t)]
    if not engines:
        raise UserError("no TensorRT trial succeeded, and trtexec runs only TensorRT engines; time an .engine file")
    return engines


def is_engine(trial: TrialResult) -> bool:
    """Return whether the trial ran a TensorRT engine file, which trtexec can run too."""
    return bool(trial.good) and trial.artifact is not None and trial.artifact.format == "engine"


def boundaries(trial: TrialResult) -> list[str]:
    """Return the trial's boundaries that a trtexec run can repeat; `all` also gives its throughput."""
    measured = trial.spec.get("plan", {}).get("boundaries") or ("model", "all")
    return [b for b in ("model", "all") if b in measured] or ["all"]


def command_lines(trial: TrialResult) -> list[str]:
    """Return the shell commands that should reproduce the trial's numbers, and its engine if Dyno built it."""
    purposes = [(command.timing(trial, boundary), f"latency/{boundary}") for boundary in boundaries(trial)]
    if build := command.built(trial):
        purposes.append((build.command(), "such an engine"))
    return ["The same by hand:", *(f"  {shlex.join(arguments)}    # for {purpose}" for arguments, purpose in purposes)]


def _run_all(trial: TrialResult) -> Iterator[str]:
    """Compare with a run per boundary; a failure of trtexec is a sentence, as Dyno's own numbers are still valid."""
    tool = command.tool(trial)
    if shutil.which(tool) is None:
        yield f"{tool} is not on the PATH; run the command where it is, and give its log or times.json with --trtexec."
        return
    for boundary in boundaries(trial):
        yield f"{tool} was run for latency/{boundary}:"
        try:
            yield from differences.compare(trial, measure(trial, boundary))
        except UserError as e:
            yield str(e)


def measure(trial: TrialResult, boundary: str = "model") -> log.TrtexecReport:
    """Run the command of `timing` and read its log, with the GPU's clock sampled meanwhile; UserError when it fails.

    It holds the GPU lock, as Dyno's own jobs do.
    """
    with held(Runtime(device=trial.device), _print_waiting):
        return _measure_trial(trial, boundary)


def _print_waiting(owner: str) -> None:
    print(f"trtexec is waiting for process {owner}, another dyno on this GPU", file=sys.stderr)


def _measure_trial(trial: TrialResult, boundary: str) -> log.TrtexecReport:
    plan = trial.spec.get("plan") or {}
    measuring_s = float(plan.get("warmup_s", 1.0)) + float(plan.get("seconds", 3.0))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        arguments = command.timing(trial, boundary, str(folder / command.TIMES))
        telemetry = Telemetry(trial.device)
        try:
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as e:
            raise UserError(f"{arguments[0]} can't be started ({e.strerror})") from e
        telemetry.watch(process.pid)
        try:
            output, _ = process.communicate(timeout=LOAD_S + 2 * measuring_s)
        except subprocess.TimeoutExpired as e:
            raise UserError(f"{arguments[0]} was stopped: not finished after {LOAD_S + 2 * measuring_s:.0f} s") from e
        finally:
            ended = time.monotonic()
            process.kill()
            process.wait()
            telemetry.stop(folder / "telemetry.npz")
        report = log.parse(output.decode(errors="replace"), f"{arguments[0]}'s output")
        trace = timeline.read(folder)
        timed = ended - float(plan.get("seconds", 3.0)), ended
        return replace(report, clock=terms.clock(trace, timed) if trace else None)
