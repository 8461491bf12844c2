"""Cross-check with trtexec: a trial in its terms, commands that repeat it, and both results side by side."""

from __future__ import annotations

import math
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath, PureWindowsPath

from dyno.jobs.telemetry import Telemetry
from dyno.results import stats, timeline
from dyno.results.rounds import GPU, HOST
from dyno.results.trial_result import TrialResult
from dyno.runner.device_lock import hold_device
from dyno.trtexec import command, log
from dyno.trtexec.log import TrtexecReport, has_defaults_of_11
from dyno.worker.spec import Runtime, UserError

# A trial's numbers in trtexec's terms.
#
# Terms are from NVIDIA's "Command-Line Programs" (section trtexec). Enqueue Time is the host's time to queue a query;
# H2D Latency, GPU Compute Time and D2H Latency are the GPU's, by events; Latency is the sum of these three; Throughput
# is queries over the host's time. trtexec queues one query ahead; Dyno starts a query after the previous one has ended,
# and `latency/all` is the host's time from memory to memory.

ENQUEUE_BOUND_SHARE = 0.8  # share of GPU Compute Time from which trtexec warns about Enqueue Time


@dataclass(frozen=True)
class TrialMedians:
    """Medians over the samples of all good rounds, in seconds; None: not measured.

    `model` is `latency/model` by the GPU's clock; `model_host` and `total` (`latency/all`) are by the host's. `rate` is
    in queries/s, with one batch per query. `clock` is the GPU's in MHz while `latency/model` was sampled.
    """

    model: float | None
    model_host: float | None
    total: float | None
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
        """Sum of the copies in both directions."""
        return None if self.h2d is None or self.d2h is None else self.h2d + self.d2h

    @property
    def latency(self) -> float | None:
        """trtexec's Latency: the sum of H2D, compute and D2H."""
        return None if self.copies is None or self.compute is None else self.copies + self.compute

    @property
    def waiting(self) -> float | None:
        """Host's time beyond the GPU's: the launching call and the wait for the end."""
        return None if self.model is None or self.model_host is None else max(0.0, self.model_host - self.model)


def read_medians(trial: TrialResult) -> TrialMedians:
    """Return the trial's medians."""

    def compute_median(tag: str, boundary: str, clock: str) -> float | None:
        samples = trial.parts(tag, boundary, clock)
        return stats.over_rounds(samples).median if samples else None

    images = trial.value("throughput", "throughput")
    names = (str(r.read_arrays("telemetry.npz", ("gpu_name",)).get("gpu_name", "")) for r in trial.good)
    return TrialMedians(
        model=compute_median("latency", "model", GPU),
        model_host=compute_median("latency", "model", HOST),
        total=compute_median("latency", "all", HOST),
        enqueue=compute_median("enqueue", "all", HOST),
        h2d=compute_median("h2d", "all", GPU),
        compute=compute_median("compute", "all", GPU),
        d2h=compute_median("d2h", "all", GPU),
        rate=images / trial.batch if images else None,
        graph=bool(trial.facts.options.get("graph", True)),
        clock=_find_clock(trial),
        device=next(filter(None, names), ""),
    )


def _find_clock(trial: TrialResult) -> float | None:
    clocks = [find_clock(r.trace, r.facts.timed.get("model")) for r in trial.good]
    known_clocks = [clock for clock in clocks if clock]
    return statistics.median(known_clocks) if known_clocks else None


def find_clock(trace: timeline.Trace | None, window: timeline.Window | None) -> float | None:
    """Return the median GPU clock in MHz in the window; None without samples."""
    clock = timeline.summarise_timeline(trace, [window]).clock if trace and window else math.nan
    return None if math.isnan(clock) else clock


def format_ms(seconds: float) -> str:
    """Format seconds as milliseconds to a microsecond, or finer for small numbers."""
    return f"{1e3 * seconds:.3f} ms" if abs(seconds) >= 1e-5 else f"{1e3 * seconds:.4f} ms"


def signed_ms(seconds: float) -> str:
    """Format seconds like `format_ms`, with a sign."""
    return ("+" if seconds >= 0 else "−") + format_ms(abs(seconds))


def explain_terms(trial: TrialResult) -> list[str]:
    """Explain the trial's numbers in trtexec's terms, in sentences that also name missing measurements."""
    medians = read_medians(trial)
    flag, version = command.choose_graph_flag(trial), command.read_version(trial)
    return [
        *_explain_terms(medians),
        *_explain_model(medians, flag),
        *_explain_whole(medians),
        *_explain_throughput(medians, trial),
        _describe_run_mode(medians, flag, "--noCudaGraph" if has_defaults_of_11(version) else f"no {flag}"),
    ]


def _explain_terms(medians: TrialMedians) -> Iterator[str]:
    values = {
        "Enqueue Time": medians.enqueue,
        "H2D Latency": medians.h2d,
        "GPU Compute Time": medians.compute,
        "D2H Latency": medians.d2h,
        "Latency (H2D + GPU Compute + D2H)": medians.latency,
    }
    text = ", ".join(f"{name} {format_ms(value)}" for name, value in values.items() if value is not None)
    if text:
        yield f"In trtexec's terms (medians): {text}."
    else:
        yield "The record has no enqueue, H2D, compute and D2H times, so latency/all can't be split into them."


def _explain_model(medians: TrialMedians, flag: str) -> Iterator[str]:
    if medians.model is None:
        return
    flags = f"--noDataTransfers {flag}" if medians.graph else "--noDataTransfers"
    text = f"latency/model, {format_ms(medians.model)} by the GPU's clock, is what trtexec calls GPU Compute Time with "
    text += flags
    if medians.waiting is not None:
        waiting = format_ms(medians.waiting)
        text += f"; the host's clock adds {waiting} of launching and waiting, which trtexec doesn't count"
    yield text + "."
    if medians.enqueue is not None and medians.enqueue > ENQUEUE_BOUND_SHARE * medians.model:
        advice = "" if medians.graph else f"; a CUDA graph ({flag}) would help"
        yield f"Enqueue Time is {medians.enqueue / medians.model:.0%} of that, so the host may set the pace{advice}."


def _explain_whole(medians: TrialMedians) -> Iterator[str]:
    if medians.total is None or medians.latency is None:
        return
    rest = medians.total - medians.latency
    if rest >= 0:
        comparison, reason = "more", "trtexec adds up GPU times and leaves out the host's calls and waits"
    else:
        comparison, reason = "less", "copies and launches overlap, and trtexec adds them up"
    yield (
        f"latency/all, {format_ms(medians.total)} by the host's clock, is {format_ms(abs(rest))} {comparison} than "
        f"trtexec's Latency would be: {reason}."
    )


def _explain_throughput(medians: TrialMedians, trial: TrialResult) -> Iterator[str]:
    if medians.rate is None:
        return
    slots = trial.facts.options.get("slots")
    flight = f"{slots} batches in flight and " if slots else ""
    yield (
        f"Throughput is {medians.rate:,.1f} qps (a query is a batch of {trial.batch}), with {flight}copies included; "
        "trtexec keeps two queries in flight."
    )


def _describe_run_mode(medians: TrialMedians, flag: str, no_graph_flag: str) -> str:
    launches = f"replayed a CUDA graph ({flag})" if medians.graph else f"launched kernel by kernel ({no_graph_flag})"
    return (
        f"Dyno {launches} and waited by spinning (--useSpinWait; without it trtexec's host thread sleeps, and waking "
        "it can leave the GPU idle between queries)."
    )


# Causes of gaps between Dyno's and trtexec's numbers.

CLOSE_SHARE = 0.02  # about the difference between two runs of one tool
UNEXPLAINED, CUDA_GRAPH = "unexplained", "CUDA graph"
EVENT_RESOLUTION_S = 5e-8  # a tenth of the resolution of CUDA events
NO_CLOCKS = "clocks are not known on both sides; a log doesn't hold the one it ran at"


@dataclass(frozen=True)
class GapPart:
    """A share of a gap in seconds (positive: it makes Dyno's number the longer one), and its reason."""

    name: str
    seconds: float
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} {signed_ms(self.seconds)}{f' ({self.reason})' if self.reason else ''}"


@dataclass(frozen=True)
class Gap:
    """Two medians of one quantity in seconds, and the parts of their difference."""

    quantity: str
    dyno_s: float
    trtexec_s: float
    parts: tuple[GapPart, ...]

    @property
    def seconds(self) -> float:
        return self.dyno_s - self.trtexec_s

    @property
    def agree(self) -> bool:
        return abs(self.seconds) <= CLOSE_SHARE * self.trtexec_s

    def __str__(self) -> str:
        share = f"{100 * self.seconds / self.trtexec_s:+.1f} %".replace("-", "−") if self.trtexec_s else "no ratio"
        ours, theirs = format_ms(self.dyno_s), format_ms(self.trtexec_s)
        head = f"{self.quantity}: Dyno {ours}, trtexec {theirs}: {signed_ms(self.seconds)} ({share})"
        if self.agree:
            return f"{head}; they agree within {100 * CLOSE_SHARE:g} %."
        causes = [
            str(part) for part in self.parts if abs(part.seconds) >= EVENT_RESOLUTION_S or part.name == CUDA_GRAPH
        ]
        return f"{head} = {', '.join(causes)}."


def compare_results(trial: TrialResult, report: TrtexecReport) -> list[str]:
    """Compare trtexec's numbers with the trial's: each gap split into parts, or one sentence on why not."""
    if refusal := list_differences(trial, report):
        return [refusal]
    gaps = list(list_gaps(read_medians(trial), report))
    if not gaps:
        return ["Not compared: the record and trtexec have no measurement in common."]
    return [*map(str, gaps), *_find_notes(trial, report)]


def list_differences(trial: TrialResult, report: TrtexecReport) -> str:
    """Return why the two measured different things, in one sentence; "" if they seem comparable."""
    engine = command.find_engine(trial)
    if report.onnx and not report.engine:
        return (
            f"Not compared: trtexec built a separate engine from {_parse_file_name(report.onnx)}, and two builds "
            f"differ; time the same file with --loadEngine={engine or 'ENGINE'}."
        )
    if engine and report.engine and _parse_file_name(engine) != _parse_file_name(report.engine):
        text = f"trtexec ran {_parse_file_name(report.engine)}, Dyno {_parse_file_name(engine)}"
        return f"Not compared: {text}; time one engine file with both."
    if report.streams > 1:
        return f"Not compared: trtexec ran {report.streams} inferences side by side; run it without --infStreams."
    device = read_medians(trial).device
    if device and report.device and device != report.device:
        return f"Not compared: trtexec ran on {report.device}, Dyno on {device}."
    shapes, trtexec_shapes, describe = command.read_shapes(trial), report.shapes, command.make_spec
    if not shapes or not trtexec_shapes or shapes == trtexec_shapes:
        return ""
    return f"Not compared: trtexec ran {describe(trtexec_shapes)}, Dyno {describe(shapes)}; give both the same shapes."


def _parse_file_name(path: str) -> str:
    """Return the file's name from a path of any operating system."""
    return PureWindowsPath(path).name if "\\" in path else PurePath(path).name


def list_gaps(dyno: TrialMedians, report: TrtexecReport) -> Iterator[Gap]:
    """Yield the gaps of GPU time, latency and throughput that both sides measured."""
    compute = report.compute
    if dyno.model is not None:
        parts = _split_gpu_gap(dyno, report, dyno.model - compute)
        yield Gap("GPU time (latency/model against GPU Compute Time)", dyno.model, compute, tuple(parts))
    if report.transfers is not False and report.latency and dyno.total is not None:
        latency = report.latency
        parts = _split_latency_gap(dyno, report, dyno.total - latency)
        yield Gap("Latency (latency/all against Latency)", dyno.total, latency, tuple(parts))
    if report.rate and dyno.rate:
        period, ref = 1 / dyno.rate, 1 / report.rate
        yield Gap("Time per query at full throughput", period, ref, tuple(_split_rate_gap(dyno, report, period - ref)))


def _split_gpu_gap(dyno: TrialMedians, report: TrtexecReport, gap: float) -> Iterator[GapPart]:
    """Split a gap between two GPU times: each cause in turn takes the most that it can account for."""
    rest = gap
    for cause in (_explain_graph, _explain_clocks, _explain_launch):
        if part := cause(dyno, report, rest):
            rest -= part.seconds
            yield part
    reason = "" if abs(rest) < CLOSE_SHARE * report.compute or (dyno.clock and report.clock) else NO_CLOCKS
    yield GapPart(UNEXPLAINED, rest, reason)


def _compute_share(rest: float, expected: float) -> float:
    """Return the part of the rest that the cause can account for; 0 if it has the opposite sign."""
    return math.copysign(min(abs(rest), abs(expected)), rest) if rest * expected > 0 else 0.0


def _explain_graph(dyno: TrialMedians, report: TrtexecReport, rest: float) -> GapPart | None:
    """Return a CUDA graph's part: a graph on one side saves at most the difference of both enqueue times."""
    if report.graph is None or report.graph == dyno.graph:
        return None
    reason = f"only {'Dyno' if dyno.graph else 'trtexec'} used one"
    if dyno.enqueue is None or report.enqueue is None:
        return GapPart(CUDA_GRAPH, 0.0, f"{reason}, and without enqueue times its share is unknown")
    saving = abs(dyno.enqueue - report.enqueue)
    return GapPart(CUDA_GRAPH, _compute_share(rest, -saving if dyno.graph else saving), reason)


def _explain_clocks(dyno: TrialMedians, report: TrtexecReport, rest: float) -> GapPart | None:
    """Return the clocks' part: the time of compute-bound work is inversely proportional to the clock."""
    if not dyno.clock or not report.clock:
        return None
    expected = report.compute * (report.clock / dyno.clock - 1)
    return GapPart("clocks", _compute_share(rest, expected), f"{dyno.clock:.0f} MHz here, {report.clock:.0f} MHz there")


def _explain_launch(dyno: TrialMedians, report: TrtexecReport, rest: float) -> GapPart | None:
    """Return the launch's part: trtexec launches a query during the previous one; Dyno's GPU waits for the launch.

    trtexec's start event is reached when the previous query ends.
    """
    if dyno.enqueue is None or rest <= 0:
        return None
    reason = "at most one enqueue, which trtexec hides by queueing ahead"
    return GapPart("launch", _compute_share(rest, dyno.enqueue), reason)


def _split_latency_gap(dyno: TrialMedians, report: TrtexecReport, gap: float) -> Iterator[GapPart]:
    """Yield copies and GPU time as measured by both sides, and the rest, covered only by the host's clock."""
    if dyno.copies is None or dyno.compute is None or report.h2d is None or report.d2h is None:
        yield GapPart(UNEXPLAINED, gap, "H2D, compute and D2H are not measured on both sides")
        return
    copies, gpu = dyno.copies - report.h2d - report.d2h, dyno.compute - report.compute
    yield GapPart("copies", copies, "H2D and D2H by the GPU's clock")
    *causes, unexplained = _split_gpu_gap(dyno, report, gpu)
    yield from causes
    rest = gap - copies - gpu
    if dyno.waiting is not None:
        waiting = _compute_share(rest, dyno.waiting)
        rest -= waiting
        yield GapPart("synchronisation", waiting, "the host's launch and spinning wait, which trtexec's sum leaves out")
    yield GapPart(UNEXPLAINED, rest + unexplained.seconds, "the host's calls for the copies are in it")


def _split_rate_gap(dyno: TrialMedians, report: TrtexecReport, gap: float) -> Iterator[GapPart]:
    """Yield the parts of the time per query: the slowest stage (compute or a copy) and its idle time."""
    compute = min((t for t in (dyno.model, dyno.compute) if t is not None), default=None)
    if compute is None:
        yield GapPart(UNEXPLAINED, gap, "the record has no GPU time")
        return
    trtexec_compute = report.compute
    gpu = compute - trtexec_compute
    copies = max(0.0, max(dyno.h2d or 0.0, dyno.d2h or 0.0) - compute)
    copies -= max(0.0, max(report.h2d or 0.0, report.d2h or 0.0) - trtexec_compute)
    yield GapPart("GPU compute", gpu)
    yield GapPart("copies", copies, "trtexec made none" if report.transfers is False else "where they outlast compute")
    reason = "the GPU's idle time" + ("; trtexec's host sleeps while it waits" if report.spin is False else "")
    yield GapPart("launch and synchronisation", gap - gpu - copies, reason)


def _find_notes(trial: TrialResult, report: TrtexecReport) -> Iterator[str]:
    version, trtexec_version = command.read_version(trial), report.version
    if version and trtexec_version and version.split(".")[:2] != trtexec_version.split(".")[:2]:
        yield f"trtexec is of TensorRT {trtexec_version}, Dyno ran {version}: kernels and launch costs may differ."
    if not report.engine and not report.shapes:
        yield "The file names neither engine nor shapes nor flags; they are assumed to be the same."
    if report.spin is False:
        advice = "without --noSpinWait" if has_defaults_of_11(trtexec_version) else "with --useSpinWait"
        yield f"trtexec's host slept while it waited; {advice} both wait alike."
    for warning in report.warnings:
        yield f"trtexec warns: {warning}"


LOAD_TIMEOUT_S = 300.0  # in addition to warm-up and timing: for an engine of some GB on a slow disk


def cross_check(trials: Sequence[TrialResult], trtexec_file: Path | None = None) -> list[str]:
    """Return sentences that cross-check each TensorRT trial with trtexec.

    Each trial is explained in trtexec's terms, followed by the commands that should reproduce it. `trtexec_file` is a
    log or exported times to compare with; without one, trtexec is run if it is on the PATH. Raises `UserError` for a
    file that trtexec didn't write, and without trials.
    """
    report = log.read_log(trtexec_file) if trtexec_file else None
    if not trials:
        raise UserError("no TensorRT trial succeeded, and trtexec runs only TensorRT engines; time an .engine file")
    sentences: list[str] = []
    for trial in trials:
        sentences += [f"{trial.label}:"] if len(trials) > 1 else []
        sentences += [*explain_terms(trial), *list_command_lines(trial)]
        sentences += compare_results(trial, report) if report else _run_all(trial)
    return sentences


def is_engine(trial: TrialResult) -> bool:
    """Return whether the trial ran a TensorRT engine file, so that trtexec can run it too."""
    return bool(trial.good) and trial.artifact is not None and trial.artifact.format == "engine"


def list_boundaries(trial: TrialResult) -> list[str]:
    """Return the trial's boundaries that a trtexec run can repeat; `all` also gives its throughput."""
    return [b for b in ("model", "all") if b in trial.spec.plan.boundaries] or ["all"]


def list_command_lines(trial: TrialResult) -> list[str]:
    """Return the shell commands that should reproduce the trial's numbers, and its engine if Dyno built it."""
    purposes = [(command.read_timing(trial, boundary), f"latency/{boundary}") for boundary in list_boundaries(trial)]
    if build := command.read_build(trial):
        purposes.append((build, "such an engine"))
    return ["The same by hand:", *(f"  {shlex.join(arguments)}    # for {purpose}" for arguments, purpose in purposes)]


def _run_all(trial: TrialResult) -> Iterator[str]:
    """Compare with a run per boundary; a failure of trtexec is a sentence, as Dyno's numbers remain valid."""
    tool = command.name_tool(trial)
    if shutil.which(tool) is None:
        yield f"{tool} is not on the PATH; run the command where it is, and give its log or times.json with --trtexec."
        return
    for boundary in list_boundaries(trial):
        yield f"{tool} was run for latency/{boundary}:"
        try:
            yield from compare_results(trial, measure(trial, boundary))
        except UserError as e:
            yield str(e)


def measure(trial: TrialResult, boundary: str = "model") -> log.TrtexecReport:
    """Run the command of `command.read_timing` and read its log; sample the GPU's clock. Raise `UserError` on failure.

    It holds the GPU's lock, like Dyno's own jobs.
    """

    def print_waiting(owner: str) -> None:
        print(f"trtexec is waiting for process {owner}, another dyno on this GPU", file=sys.stderr)

    measuring_s = trial.spec.plan.warmup_s + trial.spec.plan.seconds
    with hold_device(Runtime(device=trial.device), print_waiting), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        arguments = command.read_timing(trial, boundary, str(folder / command.TIMES_FILE))
        telemetry = Telemetry(trial.device)
        try:
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as e:
            raise UserError(f"{arguments[0]} can't be started ({e.strerror})") from e
        telemetry.watch(process.pid)
        try:
            output, _ = process.communicate(timeout=LOAD_TIMEOUT_S + 2 * measuring_s)
        except subprocess.TimeoutExpired as e:
            raise UserError(
                f"{arguments[0]} was stopped: not finished after {LOAD_TIMEOUT_S + 2 * measuring_s:.0f} s"
            ) from e
        finally:
            end_time = time.monotonic()
            process.kill()
            process.wait()
            telemetry.stop(folder / "telemetry.npz")
        report = log.parse_log(output.decode(errors="replace"), f"{arguments[0]}'s output")
        window = end_time - trial.spec.plan.seconds, end_time
        return replace(report, clock=find_clock(timeline.read_timeline(folder), window))
