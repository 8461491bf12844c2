"""Prescriptions that may make an engine faster: their causes, their variants of B, and the trial of these."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.formatting import format_count, format_ratio
from dyno.jobs.progress import Progress
from dyno.layers import causes
from dyno.layers.causes import Cause
from dyno.layers.forms import FormRequest
from dyno.layers.waterfall import Waterfall, WaterfallStep
from dyno.report.export import with_sentences
from dyno.report.tables import TableKind, trial_table
from dyno.results import ranking, stats
from dyno.results.correctness import OUTPUTS_AGREE
from dyno.results.run_data import RunData
from dyno.results.stats import FASTER, Speedup
from dyno.results.trial_result import TrialResult
from dyno.runner.execute import execute
from dyno.study.defaults import new_folder
from dyno.study.study import Choice, Study
from dyno.table import RATIO, TEXT, Column, Table, keep_printed, limit_cells, with_limits
from dyno.worker import registry
from dyno.worker.spec import FIXED, Option, UserError

MIN_CAUSE_SHARE = 0.05  # share of B's time below which a cause gets no prescription
# causes that B might avoid altogether; of other causes only the time beyond A's counts
OVERHEAD_CAUSES = (causes.STAYED, causes.SPLIT, causes.CONVERSION, causes.CALLS, causes.WAITING, causes.BETWEEN)
ONNX_BACKENDS = ("onnxruntime", "openvino", "tensorrt", "tensorrt_rtx")
TENSORRT_BACKENDS = ("tensorrt", "tensorrt_rtx")


@dataclass(frozen=True)
class Prescription:
    """Change of an engine: further `options`, or another `backend` or `precision`.

    It applies to engines of these `backends`, `precisions` (empty: any) and kinds of `devices` with options in
    `required` (None: not set), if one of the `causes` costs time. `boundary` is the latency that it may improve.
    """

    text: str
    causes: tuple[Cause, ...]
    backends: tuple[str, ...]
    options: Mapping[str, Option] = field(default_factory=dict)
    backend: str = ""
    precision: str = ""
    precisions: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    required: Mapping[str, tuple[Option | None, ...]] = field(default_factory=dict)
    boundary: str = "model"

    def fits(self, backend: str, precision: str, device: str, options: Mapping[str, Option]) -> bool:
        """Return whether the prescription applies to an engine, and changes its precision if it asks for one."""
        is_listed = backend in self.backends and (not self.precisions or precision in self.precisions)
        has_options = all(options.get(name) in values for name, values in self.required.items())
        return is_listed and has_options and device.partition(":")[0] in self.devices and precision != self.precision


PRESCRIPTIONS = (
    Prescription("newer opset, where one operator replaces several",
                 (causes.SPLIT, causes.CONVERSION, causes.KERNEL), ("onnxruntime", "openvino"), {"opset": 20}),
    Prescription("PyTorch's other exporter", (causes.SPLIT, causes.KERNEL), ONNX_BACKENDS, {"exporter": "torchscript"}),
    Prescription("fixed shapes and folded constants", (causes.SPLIT, causes.CONVERSION), ("onnxruntime", "openvino"),
                 {"static": True, "fold": True}),
    Prescription("no conversion to blocked layouts", (causes.CONVERSION,), ("onnxruntime",),
                 {"optimization": "extended"}, devices=("cpu",)),
    Prescription("fewer layers in a narrow type: the four most sensitive ones in FP32",
                 (causes.NARROWER, causes.CONVERSION), ONNX_BACKENDS, {"keep": 4}, precisions=("int8", "fp16")),
    Prescription("OpenVINO in place of ONNX Runtime",
                 (causes.KERNEL, causes.NARROWER, causes.STAYED, causes.CONVERSION, causes.SPLIT), ("onnxruntime",),
                 backend="openvino", devices=("cpu",)),
    Prescription("ONNX Runtime in place of OpenVINO", (causes.KERNEL, causes.NARROWER, causes.CONVERSION, causes.SPLIT),
                 ("openvino",), backend="onnxruntime", precisions=("fp32", "int8"), devices=("cpu",)),
    Prescription("BF16 in place of INT8", (causes.NARROWER, causes.STAYED, causes.CONVERSION), ("openvino",),
                 precision="bf16", precisions=("int8",), devices=("cpu",)),
    Prescription("FP16 in place of INT8", (causes.NARROWER, causes.STAYED, causes.CONVERSION), TENSORRT_BACKENDS,
                 precision="fp16", precisions=("int8",)),
    Prescription("code compiled by inductor", (causes.CALLS, causes.BETWEEN, causes.KERNEL, causes.SPLIT), ("pytorch",),
                 backend="compile"),
    Prescription("a CUDA graph of compiled code", (causes.WAITING,), ("pytorch", "compile"),
                 {"mode": "reduce-overhead"}, backend="compile", devices=("cuda",)),
    Prescription("channels-last layout", (causes.KERNEL, causes.CONVERSION), ("pytorch", "compile"),
                 {"channels_last": True}),
    Prescription("cuDNN's fastest algorithms, by trying them", (causes.KERNEL,), ("pytorch", "compile"),
                 {"cudnn_benchmark": True}, devices=("cuda",)),
    Prescription("eight bits between layers, too: Q/DQ at sums, splits and concatenations",
                 (causes.CONVERSION, causes.SPLIT), TENSORRT_BACKENDS, {"joints": True}, precisions=("int8",),
                 required={"route": (None, "auto", "graph"), "quantizer": (None, "onnxruntime"),
                           "joints": (None, False)}),
    Prescription("types that the builder chooses, from a calibrator's ranges",
                 (causes.NARROWER, causes.STAYED, causes.CONVERSION, causes.SPLIT, causes.KERNEL), ("tensorrt",),
                 {"route": "calibrator"}, precisions=("int8",), required={"route": (None, "auto", "graph")}),
    Prescription("the builder's usual level", (causes.KERNEL, causes.CONVERSION, causes.SPLIT), TENSORRT_BACKENDS,
                 {"optimization": 3}, required={"optimization": (0, 1, 2)}),
    Prescription("the builder's highest level", (causes.KERNEL, causes.CONVERSION), TENSORRT_BACKENDS,
                 {"optimization": 5}, required={"optimization": (None, 3, 4)}),
    Prescription("raw pixels as input, a quarter of the bytes to copy (latency/all)", (causes.COPYING,),
                 ("pytorch", "compile", "onnxruntime", *TENSORRT_BACKENDS), {"input": "uint8"}, devices=("cuda",),
                 required={"input": (None, "float32")}, boundary="all"),
    Prescription("another build, without timings of earlier ones", (causes.KERNEL, causes.SAME), ("tensorrt",),
                 {"timing_cache": False, "build": 1}),
)  # fmt: skip


@dataclass(frozen=True)
class IndicatedPrescription:
    """A prescription, the most expensive of the causes that it may cure, and that cause's cost in seconds."""

    prescription: Prescription
    cause: Cause
    seconds: float


def choose_prescriptions(
    waterfall: Waterfall, backend: str, precision: str, device: str, options: Mapping[str, Option]
) -> list[IndicatedPrescription]:
    """Return the prescriptions for B, an engine with this configuration, the most expensive cause first.

    The cost of copies is NaN until they are measured, as the waterfall covers the model alone.
    """
    costs = {step.cause: _estimate_saving(waterfall, step) for step in waterfall.causes}
    min_cost = MIN_CAUSE_SHARE * waterfall.gap.b
    indications = []
    for prescription in PRESCRIPTIONS:
        if not prescription.fits(backend, precision, device, options):
            continue
        cause = max(prescription.causes, key=lambda cause: costs.get(cause, 0.0))
        if cause is causes.COPYING or costs.get(cause, 0.0) >= min_cost:
            indications.append(IndicatedPrescription(prescription, cause, costs.get(cause, math.nan)))
    return sorted(indications, key=lambda indication: (math.isnan(indication.seconds), -indication.seconds))


def _estimate_saving(waterfall: Waterfall, step: WaterfallStep) -> float:
    if step.cause in OVERHEAD_CAUSES:
        return step.b
    parts = [waterfall.step(step.cause, (k,)) for k in step.parts] or [step]
    return sum(max(0.0, part.difference.value) for part in parts)


# Outcomes of prescriptions, as a table and in sentences.

PRESCRIPTION_TABLE = TableKind("prescriptions", "Prescriptions",
                               "Variants tried to make B faster, and their results.",
                               command="dyno explain MODEL A B --try")  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Outcome of a prescription. `engine` is its configuration as in `--backend`, `speedup` B's latency over its own
    (None: not measured), `outputs` the state of its outputs, `reason` why it has no speed ("": it has)."""

    called: IndicatedPrescription
    engine: str
    speedup: Speedup | None
    outputs: str
    right: bool
    reason: str = ""

    @property
    def is_kept(self) -> bool:
        """Whether the variant is proven faster than B, with right outputs."""
        return self.speedup is not None and self.speedup.verdict == FASTER and self.right

    @property
    def verdict(self) -> str:
        """Outcome in a few words."""
        return self.reason or (self.speedup.verdict if self.speedup else "")


COLUMNS = (
    Column("prescription", "what was changed", kind=TEXT),
    Column("called_by", "the costliest of B's causes that it may cure", kind=TEXT, title="called for by"),
    Column("cost_us", "what that costs B", "µs", title="costs, µs"),
    Column("engine", "for --backend", kind=TEXT, rank=3),
    *with_limits(Column("speedup", "latency of B over its own", kind=RATIO, title="times as fast")),
    Column("verdict", "faster, slower, equivalent or undecided; or why it has no speed", kind=TEXT),
    Column("outputs", "against those of the study's reference", kind=TEXT, rank=1),
    Column("kept", "where it is proven faster, with the right outputs", kind=TEXT),
)


# Trial of prescriptions: each variant is measured interleaved with its engine, and kept if it is proven faster.


@dataclass(frozen=True)
class PrescriptionResult:
    """Outcomes of the prescriptions for B. `folder` is the run folder with their trials; None if no prescription was
    indicated."""

    title: str
    outcomes: tuple[Outcome, ...]
    folder: Path | None = None

    @property
    def table(self) -> Table:
        """A row per prescription tried."""
        rows = [
            {"prescription": result.called.prescription.text, "called_by": result.called.cause.title,
             "cost_us": 1e6 * result.called.seconds, "engine": result.engine, **limit_cells("speedup", result.speedup),
             "verdict": result.verdict, "outputs": result.outputs, "kept": "yes" if result.is_kept else "no"}
            for result in self.outcomes
        ]  # fmt: skip
        note = f"Each is a trial beside {self.title}, in turns; all are one family (Holm). Profiled runs are left out."
        return PRESCRIPTION_TABLE.build(COLUMNS, rows, notes=(note,) if rows else (), printed=keep_printed(COLUMNS))

    @property
    def sentences(self) -> list[str]:
        """Number of prescriptions that helped, and the best of them."""
        if not self.outcomes:
            return [f"No cause of {self.title}'s time has a known cure."]
        kept_outcomes = [(result.speedup, result) for result in self.outcomes if result.is_kept and result.speedup]
        sentences = [f"{len(kept_outcomes) or 'None'} of {format_count(len(self.outcomes), 'prescription')} helped."]
        if kept_outcomes:
            speedup, result = max(kept_outcomes, key=lambda pair: pair[0].value)
            gain = format_ratio(speedup.value, speedup.low, speedup.high)
            sentences.append(
                f"The best is {result.called.prescription.text}: {gain} as fast, by --backend {result.engine}."
            )
        return [*sentences, f"The trials are in {self.folder}."] if self.folder else sentences

    def export(self, format: str = "text") -> str:
        """Return the table and the sentences, in text or Markdown."""
        return with_sentences([self.table] if self.outcomes else [], self.sentences, format)


def check_cures(model: Any, sides: Sequence[Any]) -> None:
    """Raise `UserError` unless the arguments are a module and two forms of it, so that variants of B can be made."""
    if len(sides) != 2 or not isinstance(model, str) or registry.format_of(model) is not None or Path(model).is_dir():
        raise UserError("--try makes variants of an engine from its module; give the module and two forms of it: "
                        "torchvision:resnet18 onnxruntime onnxruntime/int8")  # fmt: skip


def try_cures(
    waterfall: Waterfall, requests: Sequence[FormRequest], study: Study, batch: int, rounds: int, progress: Progress
) -> PrescriptionResult:
    """Try the variants that the waterfall from A to B suggests: measure A, B and each variant interleaved.

    `study` has the model, the data and the measurement settings; `rounds` is the number of rounds. A prescription is
    kept if its variant is proven faster than B (tested as one family) with right outputs.
    """
    a, b = ((request.choice, request.precision) for request in requests[-2:])
    title = _format_choice(*b)
    indications = choose_prescriptions(waterfall, b[0].name, b[1], study.device, b[0].options)
    variants = {
        _format_choice(*variant): (variant, indication)
        for indication in indications
        if (variant := _apply_prescription(*b, indication)) not in (a, b)
    }
    if not variants:
        return PrescriptionResult(title, ())
    backends = tuple(dict.fromkeys((_format_choice(*a), _format_choice(*b), *variants)))
    boundaries = dict.fromkeys(("model", *(indication.prescription.boundary for _, indication in variants.values())))
    trial_study = replace(study, backends=backends, precisions=(), batches=(batch,), rounds=rounds, until=FIXED,
                  boundaries=tuple(boundaries))  # fmt: skip
    folder = new_folder("explain", study.models)
    texts = "; ".join(indication.prescription.text for _, indication in variants.values())
    progress.show_step(f"trying {format_count(len(variants), 'prescription')} for {title}, in {folder}: {texts}")
    execute(trial_study, folder, progress)
    data = trial_table.read_trials(folder)
    trials = {_make_key(t.backend, t.precision, t.options): t for t in data.records}
    reference = trials.get(_make_key(b[0].name, b[1], b[0].options))
    if reference is None or not reference.good:
        command = f"dyno show {shlex.quote(str(folder))}"
        raise UserError(f"{title} did not run beside its variants; `{command}` has the reason")
    pairs = [
        (indication, text, trials.get(_make_key(choice.name, precision, choice.options)))
        for text, ((choice, precision), indication) in variants.items()
    ]
    return PrescriptionResult(title, _decide_outcomes(pairs, reference, data), folder)


def _decide_outcomes(
    pairs: Sequence[tuple[IndicatedPrescription, str, TrialResult | None]], reference: TrialResult, data: RunData
) -> tuple[Outcome, ...]:
    """Return the outcome of each variant, all tested as one family."""
    rows = {row["trial"]: row for row in data.frame.to_dict("records")}
    evidence = [
        ranking.gather_evidence(t, reference, indication.prescription.boundary, rule=data.rule)
        if t is not None and t.good
        else None
        for indication, _, t in pairs
    ]
    decisions = stats.decide_family(evidence, data.rule)
    return tuple(
        Outcome(_add_copies(indication, reference), text, speedup if e else None, *_judge_trial(t, rows))
        for (indication, text, t), e, speedup in zip(pairs, evidence, decisions, strict=True)
    )


def _add_copies(indication: IndicatedPrescription, reference: TrialResult) -> IndicatedPrescription:
    if indication.cause is not causes.COPYING:
        return indication
    total, model = (float(np.median(reference.medians(boundary, "host"))) for boundary in ("all", "model"))
    return replace(indication, seconds=max(0.0, total - model))


def _judge_trial(result: TrialResult | None, rows: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool, str]:
    """Return the state of the trial's outputs, whether they are right, and the reason for a missing speed."""
    if result is None:
        return "", False, "no such engine was planned"
    outputs = str(rows[result.id]["outputs"] or "")
    return outputs, outputs in ("", OUTPUTS_AGREE), "" if result.good else f"{result.status}: {result.reason}"


def _apply_prescription(choice: Choice, precision: str, indication: IndicatedPrescription) -> tuple[Choice, str]:
    change = indication.prescription
    options = choice.options if change.backend in ("", choice.name) else {}
    return replace(
        choice, name=change.backend or choice.name, options={**options, **change.options}
    ), change.precision or precision


def _format_choice(choice: Choice, precision: str) -> str:
    """Return a configuration in the notation of `--backend`."""
    return replace(choice, precisions=(precision,), rounds=0).text


def _make_key(backend: str, precision: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
    return backend, precision, tuple(sorted((k, str(v)) for k, v in options.items()))
