"""Hardware counters of an engine's kernels: one inference in a job under NVIDIA's ncu."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dyno.analysis.inside.gpu import ncu
from dyno.analysis.inside.gpu.ncu import NcuReport
from dyno.engine.device_lock import launch_in_turn
from dyno.jobs.progress import Progress
from dyno.worker.record import Record
from dyno.worker.spec import Artifact, Job, Trial, UserError

TOOL = "ncu"
TIMEOUT_S = 900.0
# What ncu says (the beginning of its sentences, which go on with links) and what is to be done about it.
CAUSES = {
    "ERR_NVGPUCTRPERM": "this user may not read the GPU's counters (ERR_NVGPUCTRPERM); run as root, give a container "
    "--cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
    "driver resource was unavailable": "another program uses the GPU's counters, such as DCGM or another profiler; end "
    "it, or pause it with `dcgmi profile --pause`",
    "lock file": "the lock file of another user's ncu is in the way; set TMPDIR to a folder of your own",
    "InterprocessLockFailed": "the lock file of another user's ncu is in the way; set TMPDIR to a folder of your own",
    "not compatible with Nsight Compute": "the driver is too old for this ncu; install the ncu of the driver's CUDA",
}  # fmt: skip
FAILED = "Failed to profile"


def find_tool() -> str:
    """Return the path of ncu; raise `UserError` if it is not installed."""
    if found := shutil.which(TOOL):
        return found
    raise UserError(
        f"there is no {TOOL} on the PATH, which reads hardware counters; install NVIDIA Nsight Compute, "
        "or add its folder, such as /usr/local/cuda/bin"
    )


def command(tool: str, log: Path) -> list[str]:
    """Return ncu's part of the command line: it counts between the start and the stop of CUDA's profiler.

    It leaves the GPU's clocks as they are, and empties the caches before each kernel, so that its runs are alike.
    """
    return [tool, "--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off", "--nvtx",
            "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(ncu.METRICS.values()),
            "--log-file", str(log)]  # fmt: skip


def count(
    tool: str, trial: Trial, artifact: Artifact | None, progress: Progress, timeout_s: float = TIMEOUT_S
) -> NcuReport:
    """Read the hardware counters of the kernels in one inference of the trial's engine, without other jobs on its GPU.

    If ncu fails or times out, the counters read until then are returned with the reason; raises `UserError` with the
    reason if there are no counters.
    """
    progress.other(f"counters of {trial.label} under {TOOL}")
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = Path(scratch) / "job", Path(scratch) / "ncu.csv"
        job = Job("counters", trial.runtime, trial, artifact=artifact)
        record = launch_in_turn(job, folder, timeout_s, progress, tool=command(tool, log))
        report = ncu.read(_read_text(log))
        printed = [ncu.read(_read_text(folder / name)).errors for name in ("stdout.log", "stderr.log")]
    return outcome(record, replace(report, errors=(*report.errors, *printed[0], *printed[1])), timeout_s)


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def outcome(record: Record, report: NcuReport, timeout_s: float) -> NcuReport:
    """Return the report, with the reason if it is incomplete; raise `UserError` if it is empty."""
    if report.kernels and record.status == "ok" and not any(FAILED in error for error in report.errors):
        return report
    reason = _find_reason(record, report.errors, timeout_s)
    if report.kernels:
        return replace(report, cut_short=reason)
    raise UserError(f"no hardware counters: {reason}")


def _find_reason(record: Record, errors: Sequence[str], timeout_s: float) -> str:
    """Return why not all kernels were counted; ncu's reason comes before the job's, which ncu may have ended."""
    known = next((said for sign, said in CAUSES.items() if any(sign in error for error in errors)), "")
    if known:
        return known
    if record.status == "timeout":
        return f"{TOOL} wasn't done after {timeout_s:g} s"
    if record.status == "ok" and not errors:
        return f"{TOOL} saw no kernel between the start and the stop of its profiling"
    if record.status in ("failed", "skipped", "oom"):
        return record.reason
    failed = next((error for error in errors if FAILED in error), "")
    if failed:
        other = next((error for error in errors if error != failed), "")
        said = f" ({other.rstrip(':.')})" if other else ""
        return f"{TOOL} {failed[0].lower()}{failed[1:]}{said}; other programs may be using the GPU"
    return f"{TOOL} says: {errors[0]}" if errors else record.reason
