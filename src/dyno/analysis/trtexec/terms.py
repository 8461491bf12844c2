"""Dyno's numbers of a trial in trtexec's terms.

The terms are those of NVIDIA's "Command-Line Programs" (section trtexec): Enqueue Time is the host's time to queue a
query; H2D Latency, GPU Compute Time and D2H Latency are the GPU's, by events; Latency is the sum of these three;
Throughput is queries over the host's time. trtexec keeps one query queued ahead; Dyno starts one when the one before
has ended, and `latency/all` is the host's time from memory to memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dyno.analysis import stats
from dyno.analysis.records import timeline
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.rounds import GPU, HOST, Round
from dyno.analysis.trtexec import command

BOUND = 0.8  # from this share of GPU Compute Time on trtexec too reports that Enqueue Time may be the limit


@dataclass(frozen=True)
class TrialMedians:
    """Medians over the samples of all good rounds, in seconds; None where nothing was measured.

    `model` is `latency/model` by the GPU's clock, `model_host` and `whole` (`latency/all`) are by the host's. `rate` is
    in queries/s, a query being one batch. `clock` is the GPU's in MHz while `latency/model` was sampled.
    """

    model: float | None
    model_host: float | None
    whole: float | None
    enqueue: float | None
    h2d: float | None
    compute: float | None
    d2h: float | None
    rate: float | None
    graph: bool
    clock: float | None
    device: str

    @property
    def copies(self) -> float | None:
        """Both directions together."""
        return None if self.h2d is None or self.d2h is None else self.h2d + self.d2h

    @property
    def latency(self) -> float | None:
        """trtexec's Latency: H2D, compute and D2H added up."""
        return None if self.copies is None or self.compute is None else self.copies + self.compute

    @property
    def waiting(self) -> float | None:
        """What the host's clock adds to the GPU's: the call that launches and the wait for the end."""
        return None if self.model is None or self.model_host is None else max(0.0, self.model_host - self.model)


def own(trial: TrialResult) -> TrialMedians:
    """Return the trial's medians."""

    def compute_median(tag: str, boundary: str, by: str) -> float | None:
        samples = trial.parts(tag, boundary, by)
        return stats.over_rounds(samples).median if samples else None

    images = trial.value("throughput", "throughput")
    return TrialMedians(
        model=compute_median("latency", "model", GPU),
        model_host=compute_median("latency", "model", HOST),
        whole=compute_median("latency", "all", HOST),
        enqueue=compute_median("enqueue", "all", HOST),
        h2d=compute_median("h2d", "all", GPU),
        compute=compute_median("compute", "all", GPU),
        d2h=compute_median("d2h", "all", GPU),
        rate=images / trial.batch if images else None,
        graph=bool(trial.facts.options.get("graph", True)),
        clock=_find_clock(trial),
        device=next(filter(None, map(_gpu_name, trial.good)), ""),
    )


def _gpu_name(one: Round) -> str:
    return str(one.arrays("telemetry.npz", ("gpu_name",)).get("gpu_name", ""))


def _find_clock(trial: TrialResult) -> float | None:
    clocks = []
    for one in trial.good:
        window = one.facts.timed.get("model")
        if one.trace and window and (rate := clock(one.trace, window)):
            clocks.append(rate)
    return float(np.median(clocks)) if clocks else None


def clock(trace: timeline.Trace, window: timeline.Window) -> float | None:
    """Return the median of the GPU's clock in MHz in the window; None where it wasn't sampled there."""
    samples = trace.column("clock")[trace.inside([window])]
    samples = samples[np.isfinite(samples)]
    return float(np.median(samples)) if samples.size else None


def ms(seconds: float) -> str:
    """Format seconds as milliseconds to a microsecond, or finer where the number is small."""
    return f"{1e3 * seconds:.3f} ms" if abs(seconds) >= 1e-5 else f"{1e3 * seconds:.4f} ms"


def signed(seconds: float) -> str:
    """Format seconds as `ms` does, with a sign."""
    return ("+" if seconds >= 0 else "−") + ms(abs(seconds))


def explain(trial: TrialResult) -> list[str]:
    """Explain the trial's numbers in trtexec's terms, sentence by sentence, with those that weren't measured."""
    measured = own(trial)
    flag = command.graph_flag(trial)
    return [
        *_explain_terms(measured),
        *_explain_model(measured, flag),
        *_explain_whole(measured),
        *_explain_throughput(measured, trial),
        _run_mode(measured, flag),
    ]


def _explain_terms(measured: TrialMedians) -> Iterator[str]:
    values = {
        "Enqueue Time": measured.enqueue,
        "H2D Latency": measured.h2d,
        "GPU Compute Time": measured.compute,
        "D2H Latency": measured.d2h,
        "Latency (H2D + GPU Compute + D2H)": measured.latency,
    }
    listed = ", ".join(f"{name} {ms(value)}" for name, value in values.items() if value is not None)
    if listed:
        yield f"In trtexec's terms (medians): {listed}."
    else:
        yield "The record has no enqueue, H2D, compute and D2H times, so latency/all can't be split into them."


def _explain_model(measured: TrialMedians, flag: str) -> Iterator[str]:
    if measured.model is None:
        return
    like = f"--noDataTransfers {flag}" if measured.graph else "--noDataTransfers"
    text = f"latency/model, {ms(measured.model)} by the GPU's clock, is what trtexec calls GPU Compute Time with {like}"
    if measured.waiting is not None:
        text += f"; the host's clock adds {ms(measured.waiting)} of launching and waiting, which trtexec doesn't count"
    yield text + "."
    if measured.enqueue is not None and measured.enqueue > BOUND * measured.model:
        advice = "" if measured.graph else f"; a CUDA graph ({flag}) would help"
        yield f"Enqueue Time is {measured.enqueue / measured.model:.0%} of that, so the host may set the pace{advice}."


def _explain_whole(measured: TrialMedians) -> Iterator[str]:
    if measured.whole is None or measured.latency is None:
        return
    rest = measured.whole - measured.latency
    if rest >= 0:
        than, why = "more", "trtexec adds up GPU times and leaves out the host's calls and waits"
    else:
        than, why = "less", "copies and launches overlap, and trtexec adds them up"
    yield (
        f"latency/all, {ms(measured.whole)} by the host's clock, is {ms(abs(rest))} {than} than trtexec's Latency "
        f"would be: {why}."
    )


def _explain_throughput(measured: TrialMedians, trial: TrialResult) -> Iterator[str]:
    if measured.rate is None:
        return
    slots = trial.facts.options.get("slots")
    flight = f"{slots} batches in flight and " if slots else ""
    yield (
        f"Throughput is {measured.rate:,.1f} qps (a query is a batch of {trial.batch}), with {flight}copies included; "
        "trtexec keeps two queries in flight."
    )


def _run_mode(measured: TrialMedians, flag: str) -> str:
    launches = f"replayed a CUDA graph ({flag})" if measured.graph else f"launched kernel by kernel (no {flag})"
    return (
        f"Dyno {launches} and waited by spinning (--useSpinWait; without it trtexec's host thread sleeps, and waking "
        "it can leave the GPU idle between queries)."
    )
