"""The trtexec commands that time an engine, or build it, as Dyno did.

Options are those of NVIDIA's documentation: "Command-Line Programs" of TensorRT 8.6 and 10, "Migrating trtexec Usage"
for what 10 and 11 dropped, and "Best Practices" of TensorRT for RTX, whose tool is `tensorrt_rtx`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np

from dyno.results import stats, timeline
from dyno.results.rounds import GPU, HOST, Round
from dyno.results.trial_result import TrialResult
from dyno.worker.spec import UserError

FP16, BF16, INT8, FP8 = "--fp16", "--bf16", "--int8", "--fp8"
# Weakly typed builds: what each precision switches on. INT8 alone would leave FP32 as its only alternative.
FLAGS = {"fp16": (FP16,), "bf16": (BF16,), "int8": (INT8, FP16), "fp8": (FP8, FP16)}
EXTERNAL = ("CUBLAS", "CUBLAS_LT", "CUDNN")  # tactic sources that TensorRT 8 may call and Dyno switches off
PERCENTILES = "90,95,99"
TIMES = "times.json"


def name_tool(trial: TrialResult) -> str:
    """Return the program's name: TensorRT for RTX has its own."""
    return "tensorrt_rtx" if is_rtx(trial) else "trtexec"


def is_rtx(trial: TrialResult) -> bool:
    """Return whether the engine is one of TensorRT for RTX."""
    return "rtx" in trial.backend


def graph_flag(trial: TrialResult) -> str:
    """Return the option that makes trtexec replay a CUDA graph."""
    return "--rtxCudaGraphStrategy=wholeGraph" if is_rtx(trial) else "--useCudaGraph"


def read_version(trial: TrialResult) -> str:
    """Return TensorRT's version in the job's record, "" where it isn't stored."""
    for one in trial.rounds:
        versions = one.record.system.get("versions") or {}
        if name := next((name for name in versions if name.startswith("tensorrt")), ""):
            return str(versions[name])
    return ""


def find_engine(trial: TrialResult) -> str:
    """Return the path of the engine that was run: the artifact's, else the file the user named."""
    source = str(trial.spec["model"].get("source", ""))
    named = source.removeprefix("file:") if source.startswith("file:") else ""
    return trial.artifact.path if trial.artifact else named


def read_shapes(trial: TrialResult) -> dict[str, tuple[int, ...]]:
    """Return the shapes that were fed, by input; empty where the record has neither shapes nor a described file."""
    dims = trial.spec["dims"]
    given = {
        name: tuple(int(dims[n] if isinstance(n, str) else n) for n in shape)
        for name, shape in (dims.get("shapes") or {}).items()
    }
    described = {t.name: t.shape for t in (trial.artifact.inputs if trial.artifact else ())}
    return {name: given.get(name) or _fill_shape(shape, dims) for name, shape in described.items()} or given


def _fill_shape(shape: tuple[int | str, ...], dims: Mapping[str, Any]) -> tuple[int, ...]:
    """Fill in free dimensions as a session does: batch first, height and width of images last."""
    values = {0: dims["batch"]} | ({2: dims["height"], 3: dims["width"]} if len(shape) == 4 else {})
    return tuple(int(n) if isinstance(n, int) else int(values.get(axis, 1)) for axis, n in enumerate(shape))


def dynamic(trial: TrialResult) -> bool:
    """Return whether the engine takes more than one shape."""
    option = trial.facts.options.get("dynamic")
    if option is not None:
        return bool(option)
    return any(isinstance(n, str) for t in (trial.artifact.inputs if trial.artifact else ()) for n in t.shape)


def read_timing(trial: TrialResult, boundary: str = "model", times: str = TIMES) -> list[str]:
    """Return the arguments of the command that times the same engine in the same way; `boundary` is `model` or `all`.

    UserError where the record names no engine file.
    """
    path = find_engine(trial)
    if not path:
        raise UserError(f"{trial.label}: the record names no engine file for trtexec to load; time an .engine file")
    plan, ran = trial.spec.get("plan") or {}, trial.facts.options
    arguments = [name_tool(trial), f"--loadEngine={path}"]
    if dynamic(trial):
        arguments.append(f"--shapes={make_spec(read_shapes(trial)) or 'INPUT:NxCxHxW'}")
    arguments.append(f"--device={trial.device.partition(':')[2] or 0}")
    if ran.get("graph", True):
        arguments.append(graph_flag(trial))
    if boundary == "model":
        arguments.append("--noDataTransfers")
    return [
        *arguments,
        "--useSpinWait",
        f"--warmUp={1e3 * plan.get('warmup_s', 1.0):.0f}",
        f"--duration={plan.get('seconds', 3.0):g}",
        f"--iterations={plan.get('min_samples', 30)}",
        f"--percentile={PERCENTILES}",
        f"--exportTimes={times}",
    ]


def make_spec(shapes_by_input: Mapping[str, Sequence[int]]) -> str:
    """Format shapes in trtexec's form: `x:8x3x224x224,y:8x2`."""
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes_by_input.items())


@dataclass(frozen=True)
class TrtexecBuild:
    """An engine's build, as far as a command line can repeat it.

    `typed`: the types are in the graph (strongly typed, from TensorRT 10 on; always so in 11 and for RTX), else builder
    flags ask for them. `calibration` is a calibrator's cache for an INT8 graph without Q/DQ
    nodes. `profile` is (min, opt, max) per input, `workspace` in bytes, `tactics` the sources that were requested.
    """

    onnx: str
    out: str
    precision: str
    version: str = ""
    rtx: bool = False
    typed: bool = True
    profile: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    level: int | None = None
    workspace: int | None = None
    tactics: Sequence[str] = ()
    calibration: str = ""

    def command(self) -> list[str]:
        """Return the command's arguments."""
        arguments = ["tensorrt_rtx" if self.rtx else "trtexec", f"--onnx={self.onnx}", f"--saveEngine={self.out}"]
        arguments += self._list_precision_flags()
        for number, name in enumerate(("min", "opt", "max")):
            if self.profile:
                shapes = {key: ranges[number] for key, ranges in self.profile.items()}
                arguments.append(f"--{name}Shapes={make_spec(shapes)}")
        if self.level is not None and not self.rtx:
            arguments.append(f"--builderOptimizationLevel={self.level}")
        if self.workspace is not None:
            arguments.append(f"--memPoolSize=workspace:{self.workspace / 2**20:g}")  # in MiB where no unit is given
        if self._major < 10 and not self.rtx:
            arguments.append("--tacticSources=" + ",".join(("+" if n in self.tactics else "-") + n for n in EXTERNAL))
        return [*arguments, "--skipInference"]

    @property
    def _major(self) -> int:
        return int(self.version.partition(".")[0] or 10)

    def _list_precision_flags(self) -> list[str]:
        major = self._major
        exact = ["--noTF32"] if self.precision != "tf32" else []  # Dyno allows it only where it was requested
        if self.rtx or major >= 11:
            return exact  # every network is strongly typed, and the flags are gone
        if self.typed and major == 10:
            return [*exact, "--stronglyTyped"]
        calibrated = [f"--calib={self.calibration}"] if self.calibration else []
        return [*exact, *FLAGS.get(self.precision, ()), *calibrated]


def is_built(trial: TrialResult) -> TrtexecBuild | None:
    """Return the build of the trial's engine; None where Dyno didn't build it.

    Where the types are in the graph, `onnx` is the converted file, which lies in Dyno's cache: it gets the name that
    `converted` makes.
    """
    made_by = trial.made_by
    if not made_by.typed:
        return None
    options, source = made_by.options, str(trial.spec["model"].get("source", ""))
    source_file = source.removeprefix("file:") if source.endswith(".onnx") else ""
    same = made_by.route != "graph" or trial.precision in ("fp32", "tf32", trial.spec["model"].get("precision"))
    return TrtexecBuild(
        onnx=source_file if source_file and same else converted(trial, "fp32" if same else trial.precision),
        out=PurePath(find_engine(trial) or "model.engine").name,
        precision=trial.precision,
        version=read_version(trial) or next(iter(made_by.versions.values()), ""),
        rtx=is_rtx(trial),
        typed=made_by.typed == "strongly",
        profile=_choose_profile(trial, made_by.profiles),
        level=options.get("optimization"),
        workspace=int(options["workspace_mb"]) * 2**20 if options.get("workspace_mb") else None,
        tactics=str(options.get("tactics", "")).upper().split("+"),
        calibration="calibration.cache" if made_by.route == "calibrator" else "",
    )


def converted(trial: TrialResult, precision: str) -> str:
    """Return the name of the ONNX file that `dyno export --precision PRECISION --target tensorrt` writes."""
    return f"{trial.model}.{precision}.onnx"


def _choose_profile(trial: TrialResult, profiles: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the engine's first profile; none for a static ONNX file, for which trtexec takes no shapes."""
    if not profiles:
        return {}
    parent = (trial.spec.get("recipe") or {}).get("parent") or {}
    free = parent.get("dims", {}).get("batch") == 0
    return profiles[0] if free or any(low != high for low, _, high in profiles[0].values()) else {}


# Dyno's numbers of a trial in trtexec's terms.
#
# The terms are those of NVIDIA's "Command-Line Programs" (section trtexec): Enqueue Time is the host's time to queue a
# query; H2D Latency, GPU Compute Time and D2H Latency are the GPU's, by events; Latency is the sum of these three;
# Throughput is queries over the host's time. trtexec keeps one query queued ahead; Dyno starts one when the one before
# has ended, and `latency/all` is the host's time from memory to memory.

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


def read_medians(trial: TrialResult) -> TrialMedians:
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
        if one.trace and window and (rate := find_clock(one.trace, window)):
            clocks.append(rate)
    return float(np.median(clocks)) if clocks else None


def find_clock(trace: timeline.Trace, window: timeline.Window) -> float | None:
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


def explain_terms(trial: TrialResult) -> list[str]:
    """Explain the trial's numbers in trtexec's terms, sentence by sentence, with those that weren't measured."""
    measured = read_medians(trial)
    flag = graph_flag(trial)
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
