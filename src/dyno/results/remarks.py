"""Remarks on a trial from its records: warnings, and reasons for its speed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dyno.formatting import show
from dyno.results import timeline
from dyno.results.trial_result import TrialResult
from dyno.worker.facts.engine import OUTSIDE_NOTE

# Remarks from the GPU's clock and telemetry.

# smallest launch gaps to mention: share of the host's median, and seconds
MIN_GAP_SHARE, MIN_GAP_S = 0.05, 10e-6
HOST_BOUND_SHARE = 0.9  # share of GPU time: launching longer than this keeps the GPU waiting
OCCUPIED_MEMORY_B = 5e8  # GPU memory in use before the job; a display uses less


@dataclass(frozen=True)
class Launch:
    """Median seconds of one inference by the host's clock and by the GPU's, and inside `run` (`enqueue`).

    `queued` is the GPU's time of a run queued behind another, without its launch (None: unknown). CUDA events enclose
    the first and last kernel, so `gpu` includes gaps between kernels.
    """

    host: float
    gpu: float
    enqueue: float | None
    queued: float | None = None

    @property
    def outside(self) -> float:
        """Seconds of an inference outside the GPU's work."""
        return self.host - self.gpu

    @property
    def share(self) -> float:
        """Least share of an inference spent launching: outside the GPU's work, or inside `run`."""
        enqueue = self.enqueue or 0.0
        return max(self.outside, enqueue if enqueue >= HOST_BOUND_SHARE * self.gpu else 0.0) / self.host

    @property
    def sentence(self) -> str:
        """Remark on the launch overhead, or "" if negligible."""
        if self.enqueue is not None and self.enqueue >= HOST_BOUND_SHARE * self.gpu:
            return (
                f"launch-bound: run() returns after {_format_time(self.enqueue)}, the GPU needs "
                f"{_format_time(self.gpu)} from its first kernel to its last: "
                "it waits for the host between kernels, unless run() itself waits for it"
            )
        if self.outside > max(MIN_GAP_SHARE * self.host, MIN_GAP_S):
            return (
                f"launch-bound: {_format_time(self.outside)} of {_format_time(self.host)} is spent outside the GPU's "
                "work, on launching and waiting (gaps between kernels count as its work)"
            )
        return ""


def describe_launch(trial: TrialResult) -> Launch | None:
    """Return a trial's launch times at latency/model; None unless measured by both clocks."""
    host, gpu = trial.medians("model", "host"), trial.medians("model", "gpu")
    if not host or not gpu:
        return None
    sample_arrays = [trial.samples("enqueue", "all"), trial.samples("queued", "model")]
    enqueue, queued = (float(np.median(samples)) if samples.size else None for samples in sample_arrays)
    return Launch(float(np.median(host)), float(np.median(gpu)), enqueue, queued)


# Copies overlap the model's work on other batches: they bound throughput only if they take nearly all its time.
COPY_BOUND_SHARE = 0.85  # share of a batch's time at full throughput


@dataclass(frozen=True)
class CopyTimes:
    """Seconds per batch: at full throughput, inside the model, and copying from and to host memory."""

    batch: float
    model: float
    copies: float

    @property
    def is_bound(self) -> bool:
        """Whether copies, not the model, bound the throughput."""
        return self.copies >= COPY_BOUND_SHARE * self.batch and self.model < COPY_BOUND_SHARE * self.batch

    @property
    def sentence(self) -> str:
        """Remark that copies bound the throughput."""
        return (
            f"copies bound the throughput: of {_format_time(self.batch)} a batch, copying inputs and outputs takes "
            f"{_format_time(self.copies)} and the model {_format_time(self.model)}"
        )


def describe_copies(trial: TrialResult) -> CopyTimes | None:
    """Return a trial's copy times on a GPU; None unless all three boundaries were measured there."""
    model, total = trial.medians("model", "host"), trial.medians("all", "host")
    rates = [rate for r in trial.good if (rate := r.value("throughput", "throughput"))]
    if trial.device == "cpu" or not (model and total and rates):
        return None
    model_time = float(np.median(model))
    return CopyTimes(trial.batch / float(np.median(rates)), model_time, float(np.median(total)) - model_time)


@dataclass(frozen=True)
class ThrottleCounts:
    """Counts of a boundary's latencies over good rounds: taken, under a throttled GPU (`hit`), and dropped.

    Throttled samples are kept if too few would be left of a round. `reason` is the reason for throttling.
    """

    boundary: str
    taken: int
    hit: int
    dropped: int
    reason: str

    @property
    def sentence(self) -> str:
        """The warning."""
        text = f"{self.boundary}: {self.hit:,} of {self.taken:,} samples were taken while the GPU was throttled"
        if not self.dropped:
            return f"{text} ({self.reason}) and are kept, since too few would be left"
        kept_text = f", {self.hit - self.dropped:,} kept since too few would be left" if self.dropped < self.hit else ""
        return f"{text} ({self.reason}): {self.dropped:,} dropped{kept_text}"


def describe_throttling(trial: TrialResult) -> list[ThrottleCounts]:
    """Return the throttled samples at each boundary of a trial that has any."""
    if not any(r.trace is not None and r.trace.throttled for r in trial.good):
        return []
    boundaries = (_count_throttled(trial, boundary) for boundary in ("model", "all"))
    return [counts for counts in boundaries if counts.hit]


def _count_throttled(trial: TrialResult, boundary: str) -> ThrottleCounts:
    taken, hit, lost = (
        sum(counts) for counts in zip((0, 0, 0), *(r.count_throttled(boundary) for r in trial.good), strict=True)
    )
    return ThrottleCounts(boundary, taken, hit, lost, _join_reasons(trial, boundary))


def _join_reasons(trial: TrialResult, boundary: str) -> str:
    windows = [(r.trace, r.facts.timed.get(boundary)) for r in trial.good]
    reasons = [timeline.throttle_reasons(trace, window) for trace, window in windows if trace and window]
    return ", ".join(dict.fromkeys(w for w in reasons if w))


def describe_meanwhile(other_processes: int) -> str:
    """Describe the number of other processes on the GPU."""
    subject = "another process was" if other_processes == 1 else f"{other_processes} other processes were"
    return f"{subject} on the GPU meanwhile"


def describe_others(trial: TrialResult) -> str:
    """Describe other users of the GPU; "" without any."""
    gpu = trial.gpu
    if gpu is None:
        return ""
    busy = (
        f"it was {gpu.busy_before:.0f} % busy before the job began" if gpu.busy_before > timeline.BUSY_PERCENT else ""
    )
    if gpu.other_processes:
        return describe_meanwhile(gpu.other_processes) + (f"; {busy}" if busy else "")
    return f"others used the GPU: {busy}" if busy else ""


def list_gpu_warnings(trial: TrialResult) -> list[str]:
    """Return reasons to doubt a trial's numbers: throttling, and other users of the GPU."""
    if trial.gpu is None:
        return []
    return [*(each.sentence for each in describe_throttling(trial)), *filter(None, [describe_others(trial)])]


def list_gpu_notes(trial: TrialResult) -> list[str]:
    """Return explanations of a trial's numbers: launching, copies, a power cap, occupied memory."""
    launch, copies = describe_launch(trial) if trial.device != "cpu" else None, describe_copies(trial)
    sentences = [launch.sentence] if launch and launch.sentence else []
    sentences += [copies.sentence] if copies and copies.is_bound else []
    if trial.gpu is None:
        return sentences
    if cap_share := trial.gpu.reasons.get(timeline.POWER_CAP, 0.0):
        sentences.append(f"the GPU's clock was limited by its power cap for {100 * cap_share:.0f} % of the time")
    first = [r.trace for r in trial.good if r.trace is not None and (not r.facts.turns or not r.facts.turns.place)]
    memory_before = max(
        (trace.before_memory for trace in first), default=0.0
    )  # later processes of a set see Dyno's own memory
    if memory_before > OCCUPIED_MEMORY_B:
        sentences.append(f"{show(memory_before, 'bytes')} of the GPU's memory were in use before the job began")
    return sentences


def _format_time(seconds: float) -> str:
    return show(seconds, "duration")


def list_warnings(trial: TrialResult) -> list[str]:
    """Return the distinct warnings of all rounds and of the file's makers, in order."""
    warnings = [w for r in trial.rounds for w in r.warnings] + [*trial.made_by.warnings]
    placement_warnings = trial.placement.warnings if trial.placement else []
    return list(dict.fromkeys([*warnings, *placement_warnings, *list_gpu_warnings(trial)]))


def list_notes(trial: TrialResult) -> list[str]:
    """Return explanations of the numbers: the engine's, and INT8's calibration data unless it is real images."""
    calibration = trial.facts.calibration
    return [
        *([calibration.note] if calibration and calibration.note else []),
        *trial.facts.notes,
        *list_gpu_notes(trial),
    ]


def list_reasons(trial: TrialResult) -> list[str]:
    """Return explanations of the speed: the engine's own notes, and remarks from the GPU's clock and telemetry."""
    return [*(note for note in trial.facts.notes if not note.startswith(OUTSIDE_NOTE)), *list_gpu_notes(trial)]
