"""Where a difference between Dyno's numbers and trtexec's comes from: each gap split into causes, or refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath, PureWindowsPath

from dyno.analysis.records.results import TrialResult
from dyno.analysis.trtexec import command
from dyno.analysis.trtexec.log import TrtexecReport
from dyno.analysis.trtexec.terms import TrialMedians, ms, own, signed

CLOSE = 0.02  # medians this close agree: two runs of one tool differ by about as much
UNEXPLAINED, GRAPH = "unexplained", "CUDA graph"
NOTHING = 5e-8  # seconds: a tenth of what CUDA events resolve
NO_CLOCKS = "clocks are not known on both sides; a log doesn't hold the one it ran at"


@dataclass(frozen=True)
class GapPart:
    """A share of a gap in seconds (positive: it makes Dyno's number the longer one), and its reason."""

    name: str
    seconds: float
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} {signed(self.seconds)}{f' ({self.why})' if self.why else ''}"


@dataclass(frozen=True)
class Gap:
    """Two medians of one quantity in seconds, and the parts that their difference falls into."""

    what: str
    ours: float
    theirs: float
    parts: tuple[GapPart, ...]

    @property
    def seconds(self) -> float:
        return self.ours - self.theirs

    @property
    def agree(self) -> bool:
        return abs(self.seconds) <= CLOSE * self.theirs

    def __str__(self) -> str:
        share = f"{100 * self.seconds / self.theirs:+.1f} %".replace("-", "−") if self.theirs else "no ratio"
        head = f"{self.what}: Dyno {ms(self.ours)}, trtexec {ms(self.theirs)}: {signed(self.seconds)} ({share})"
        if self.agree:
            return f"{head}; they agree within {100 * CLOSE:g} %."
        causes = [str(part) for part in self.parts if abs(part.seconds) >= NOTHING or part.name == GRAPH]
        return f"{head} = {', '.join(causes)}."


def compare(trial: TrialResult, report: TrtexecReport) -> list[str]:
    """Compare trtexec's numbers with the trial's: each gap split into its parts, or one sentence on why not."""
    if refusal := unlike(trial, report):
        return [refusal]
    differences = list(gaps(own(trial), report))
    if not differences:
        return ["Not compared: the record and trtexec have no measurement in common."]
    return [*map(str, differences), *_find_notes(trial, report)]


def unlike(trial: TrialResult, report: TrtexecReport) -> str:
    """Return the reason why the two measured different things, one sentence; "" when they seem alike from the file."""
    engine = command.engine(trial)
    if report.onnx and not report.engine:
        return (
            f"Not compared: trtexec built a separate engine from {_parse_file_name(report.onnx)}, and two builds "
            f"differ; time the same file with --loadEngine={engine or 'ENGINE'}."
        )
    if engine and report.engine and _parse_file_name(engine) != _parse_file_name(report.engine):
        ran = f"trtexec ran {_parse_file_name(report.engine)}, Dyno {_parse_file_name(engine)}"
        return f"Not compared: {ran}; time one engine file with both."
    if report.streams > 1:
        return f"Not compared: trtexec ran {report.streams} inferences side by side; run it without --infStreams."
    device = own(trial).device
    if device and report.device and device != report.device:
        return f"Not compared: trtexec ran on {report.device}, Dyno on {device}."
    return _other_shapes(command.shapes(trial), report.shapes)


def _other_shapes(ours: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> str:
    if not ours or not theirs or ours == theirs:
        return ""
    return f"Not compared: trtexec ran {command.spec(theirs)}, Dyno {command.spec(ours)}; give both the same shapes."


def _parse_file_name(path: str) -> str:
    """Return the file's name, from a path of any system."""
    return PureWindowsPath(path).name if "\\" in path else PurePath(path).name


def gaps(mine: TrialMedians, report: TrtexecReport) -> Iterator[Gap]:
    """Yield the gaps of GPU time, latency and throughput, as far as both sides measured them."""
    theirs = report.compute.median
    if mine.model is not None:
        parts = _gpu_parts(mine, report, mine.model - theirs)
        yield Gap("GPU time (latency/model against GPU Compute Time)", mine.model, theirs, tuple(parts))
    if report.transfers is not False and report.latency and mine.whole is not None:
        latency = report.latency.median
        parts = _latency_parts(mine, report, mine.whole - latency)
        yield Gap("Latency (latency/all against Latency)", mine.whole, latency, tuple(parts))
    if report.rate and mine.rate:
        period, its = 1 / mine.rate, 1 / report.rate
        yield Gap("Time per query at full throughput", period, its, tuple(_rate_parts(mine, report, period - its)))


def _gpu_parts(mine: TrialMedians, report: TrtexecReport, gap: float) -> Iterator[GapPart]:
    """Split a gap between two GPU times: each cause takes the most that it can account for, in this order."""
    left = gap
    for cause in (_explain_graph, _explain_clocks, _explain_launch):
        if part := cause(mine, report, left):
            left -= part.seconds
            yield part
    why = "" if abs(left) < CLOSE * report.compute.median or (mine.clock and report.clock) else NO_CLOCKS
    yield GapPart(UNEXPLAINED, left, why)


def _compute_share(left: float, expected: float) -> float:
    """Return the part of the rest that the cause can account for, 0 where it points the other way."""
    return math.copysign(min(abs(left), abs(expected)), left) if left * expected > 0 else 0.0


def _explain_graph(mine: TrialMedians, report: TrtexecReport, left: float) -> GapPart | None:
    """Return a CUDA graph's part: a graph on one side saves at most the difference of the two enqueue times."""
    if report.graph is None or report.graph == mine.graph:
        return None
    why = f"only {'Dyno' if mine.graph else 'trtexec'} used one"
    if mine.enqueue is None or report.enqueue is None:
        return GapPart(GRAPH, 0.0, f"{why}, and without enqueue times its share is unknown")
    saved = abs(mine.enqueue - report.enqueue.median)
    return GapPart(GRAPH, _compute_share(left, -saved if mine.graph else saved), why)


def _explain_clocks(mine: TrialMedians, report: TrtexecReport, left: float) -> GapPart | None:
    """Return the clocks' part: compute-bound work takes longer in proportion as the clock is lower."""
    if not mine.clock or not report.clock:
        return None
    expected = report.compute.median * (report.clock / mine.clock - 1)
    return GapPart("clocks", _compute_share(left, expected), f"{mine.clock:.0f} MHz here, {report.clock:.0f} MHz there")


def _explain_launch(mine: TrialMedians, report: TrtexecReport, left: float) -> GapPart | None:
    """Return the launch's part: trtexec launches a query while the one before it runs; Dyno's GPU waits for the launch.

    trtexec's start event is reached when the query before ends.
    """
    if mine.enqueue is None or left <= 0:
        return None
    return GapPart(
        "launch", _compute_share(left, mine.enqueue), "at most one enqueue, which trtexec hides by queueing ahead"
    )


def _latency_parts(mine: TrialMedians, report: TrtexecReport, gap: float) -> Iterator[GapPart]:
    """Yield copies and GPU time as both sides measured them, and the rest, which only the host's clock covers."""
    if mine.copies is None or mine.compute is None or report.h2d is None or report.d2h is None:
        yield GapPart(UNEXPLAINED, gap, "H2D, compute and D2H are not measured on both sides")
        return
    copies, gpu = mine.copies - report.h2d.median - report.d2h.median, mine.compute - report.compute.median
    yield GapPart("copies", copies, "H2D and D2H by the GPU's clock")
    *causes, unexplained = _gpu_parts(mine, report, gpu)
    yield from causes
    left = gap - copies - gpu
    if mine.waiting is not None:
        waiting = _compute_share(left, mine.waiting)
        left -= waiting
        yield GapPart("synchronisation", waiting, "the host's launch and spinning wait, which trtexec's sum leaves out")
    yield GapPart(UNEXPLAINED, left + unexplained.seconds, "the host's calls for the copies are in it")


def _rate_parts(mine: TrialMedians, report: TrtexecReport, gap: float) -> Iterator[GapPart]:
    """Yield the parts of the time per query: that of the slowest stage (compute, or a copy) and its idle time."""
    compute = min((t for t in (mine.model, mine.compute) if t is not None), default=None)
    if compute is None:
        yield GapPart(UNEXPLAINED, gap, "the record has no GPU time")
        return
    theirs = report.compute.median
    gpu = compute - theirs
    copies = max(0.0, max(mine.h2d or 0.0, mine.d2h or 0.0) - compute)
    copies -= max(0.0, max(s.median if s else 0.0 for s in (report.h2d, report.d2h)) - theirs)
    yield GapPart("GPU compute", gpu)
    yield GapPart("copies", copies, "trtexec made none" if report.transfers is False else "where they outlast compute")
    why = "the GPU's idle time" + ("; trtexec's host sleeps while it waits" if report.spin is False else "")
    yield GapPart("launch and synchronisation", gap - gpu - copies, why)


def _find_notes(trial: TrialResult, report: TrtexecReport) -> Iterator[str]:
    ours, theirs = command.version(trial), report.version
    if ours and theirs and ours.split(".")[:2] != theirs.split(".")[:2]:
        yield f"trtexec is of TensorRT {theirs}, Dyno ran {ours}: kernels and launch costs may differ."
    if not report.engine and not report.shapes:
        yield "The file names neither engine nor shapes nor flags; they are assumed to be the same."
    if report.spin is False:
        yield "trtexec's host slept while it waited; with --useSpinWait both wait alike."
    for warning in report.warnings:
        yield f"trtexec warns: {warning}"
