"""`dyno inspect` and `dyno profile`: the layers of a model's forms, and how long each takes in each engine."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dyno.jobs.progress import Progress
from dyno.layers import counters as hardware
from dyno.layers import files, forms, graph_page, tables, times
from dyno.layers.counters import NcuReport
from dyno.layers.files import FormsResult
from dyno.layers.roofline import MEMORY_CEILING, Ceilings, Rates, list_types, parse_data_sheet
from dyno.layers.times import ROW_ORDERS, Times
from dyno.results import timeline
from dyno.results.files import read_npz
from dyno.runner.peak import find_ceilings
from dyno.study.defaults import one_model
from dyno.study.interpreters import runtime_of
from dyno.study.model_names import model_name
from dyno.study.study import Choice, Study
from dyno.table import Table
from dyno.worker import registry, system
from dyno.worker.facts.job import LayerGraph
from dyno.worker.option_values import at_least
from dyno.worker.record import Record
from dyno.worker.spec import Artifact, Job, Plan, Trial, UserError, check_known

DEFAULT_RUNS, DEFAULT_TOP = 50, 20  # profiled runs; listed rows per form


class InspectionResult(FormsResult):
    """Forms of a model with their layers, listed or aligned."""

    @cached_property
    def tables(self) -> list[Table]:
        """The layers of one form, or several forms side by side and the conversions inserted by engines."""
        if len(self.requested) == 1:
            return [tables.list_layers(self.forms[self.requested[0]])]
        aligned = tables.align_forms(self, self.requested)
        return [table for table in (aligned, tables.describe_conversions(self.forms, self.requested)) if table.rows]


def inspect(
    model: Any,
    *others: Any,
    batch: int = 1,
    save: str | Path | Sequence[str | Path] = (),
    quiet: bool = True,
    **settings: Any,
) -> InspectionResult:
    """List the layers of a model, beside those of other models or of its other forms.

    `model` is any model that a study takes: the listed layers are calls of a module's submodules, nodes of an ONNX
    file, or layers of an engine. `others` are further models, or forms of the first: `onnx`, or a backend as in a study
    with an optional precision, such as `openvino` or `onnxruntime@optimization=basic/int8`. `save` names files to write
    (see `InspectionResult.save`), checked first. `settings` are fields of `dyno.Study`. Forms that can't be made or
    read are left out; raises `UserError` if no form is left.
    """
    (batch,) = at_least(1, batch=batch)
    study = one_model(model, settings)
    reader = forms.FormReader(study, batch, Progress(quiet=quiet))
    requests = forms.list_forms(study, others)
    paths = files.list_paths(save)
    files.check(paths, requests, timed=False)
    requests = reader.read_all(requests)
    if not any(reader.forms[k].layers for k in reader.requested):
        raise UserError(f"{model_name(study.models[0])} has no layers: it has no part that can run")
    result = InspectionResult(**reader.describe(requests))
    files.save_all(result, paths, quiet)
    return result


@dataclass(frozen=True)
class ProfileResult(FormsResult):
    """Forms of a model with the times of their layers.

    `records` are the jobs' records in the order of `times`; they have no latency. `counters` has the hardware counters
    of each form's kernels by index of the form, if requested. `top` layers are listed, in one of ROW_ORDERS.
    """

    records: tuple[Record, ...] = ()
    order: str = ROW_ORDERS[0]
    top: int = DEFAULT_TOP
    counters: Mapping[int, NcuReport] = field(default_factory=dict)

    @cached_property
    def tables(self) -> list[Table]:
        """Times of each form's layers, and the share of the latency that they explain; then, if measured, the critical
        path (GPU), the ceilings and the hardware counters."""
        paths = {self.forms[k].library: timing.path for k, timing in self.times.items() if timing.functions}
        listing = (self.order, self.top)
        return [
            times.profile_table(self, self.times, *listing, self.ceilings),
            times.reconcile(self, self.times, self.ceilings),
            *([times.make_path_table(paths, self.top)] if paths else []),
            *([self.ceilings.table()] if self.ceilings else []),
            *([hardware.make_counters_table(self, self.counters, *listing)] if self.counters else []),
        ]

    @property
    def html(self) -> str:
        """A tree map of each form's time by module, then the tables, as an HTML fragment."""
        return graph_page.profile_fragment(files.make_timelines(self), self.tables)


def profile(
    model: Any,
    *others: Any,
    batch: int = 1,
    runs: int = DEFAULT_RUNS,
    top: int = DEFAULT_TOP,
    order: str = ROW_ORDERS[0],
    save: str | Path | Sequence[str | Path] = (),
    roofline: bool = False,
    sheet: Sequence[str] = (),
    counters: bool = False,
    quiet: bool = True,
    **settings: Any,
) -> ProfileResult:
    """Measure how long each layer of a model takes: as a module in PyTorch, and in each of its other forms.

    `model` and `others` are as in `dyno.inspect`. An ONNX file or an IR is profiled in its usual backend; if it comes
    first and forms of it are given, only in these. One process per form measures the latency first, then `runs`
    profiled runs. `top` layers are listed (0: all) in one of ROW_ORDERS. `save` names files to write (see
    `ProfileResult.save`), checked first. With `roofline` the device's ceilings are measured too; the layers are rated
    by them and by the data sheet's (`sheet`: texts such as `fp16=989` in TFLOPS, `memory=4800` in GB/s). With
    `counters` (GPU only), NVIDIA's ncu reads the kernels' hardware counters in another run of each form. `settings` are
    fields of `dyno.Study`; `warmup` and `seconds` apply to the latency. On a GPU `Times.gpu` has its idle time. Forms
    that can't be made or timed are left out; raises `UserError` if no form is left, or if layers have no times.
    """
    (batch,), (runs,), (top,) = at_least(1, batch=batch), at_least(5, runs=runs), at_least(0, top=top)
    check_known("order", order, ROW_ORDERS)
    rates = parse_data_sheet(sheet)
    if sheet and not roofline:
        raise UserError("--data-sheet needs measured ceilings; add --roofline")
    study = one_model(model, settings)
    requests = choose_engines(forms.list_forms(study, others))
    for request in requests:
        check(request, study.device, counters)
    profiler = FormProfiler(study, batch, Progress(quiet=quiet), runs, hardware.find_tool() if counters else "")
    paths = files.list_paths(save)
    files.check(paths, requests, timed=True, rated=roofline)
    requests = profiler.read_all(requests)
    result = ProfileResult(
        **profiler.describe(requests),
        times=dict(zip(profiler.requested, profiler.times, strict=True)),
        ceilings=profiler.measure_ceilings(study, rates) if roofline else None,
        records=tuple(profiler.records),
        order=order,
        top=top,
        counters=dict(zip(profiler.requested, profiler.counted, strict=True)) if counters else {},
    )
    files.save_all(result, paths, quiet)
    return result


def choose_engines(requests: Sequence[forms.FormRequest]) -> list[forms.FormRequest]:
    """Return the forms with each file's usual backend; without the first file if only its named forms are requested."""
    first, *other_requests = requests
    has_forms_only = _is_file(first) and any(
        other.source == first.source and not _is_file(other) for other in other_requests
    )
    engines = []
    for request in other_requests if has_forms_only else requests:
        file_format = registry.format_of(request.source) if _is_file(request) else None
        engines.append(
            replace(request, choice=Choice(file_format.default_backend(Path(request.source))))
            if file_format
            else request
        )
    return engines


def _is_file(request: forms.FormRequest) -> bool:
    return not request.precision and not request.is_named


def check(request: forms.FormRequest, device: str, counters: bool = False) -> None:
    """Raise `UserError` for a form without layer times on the device, or for `counters` on a CPU.

    An engine file runs on its format's device if `device` is the CPU.
    """
    file_format = registry.format_of(request.source)
    if file_format and file_format.on_device and device == "cpu":
        device = file_format.device
    name, device_kind = request.choice.name, device.split(":")[0]
    if name == forms.ONNX_FORM or device_kind not in registry.find(name).profiled:
        problem = f"{name} reports no layer times on {device_kind}"
        if name == forms.ONNX_FORM:
            problem = "an ONNX graph doesn't run by itself"
        backends = [
            f"{backend} ({', '.join(devices)})"
            for backend in registry.list_backends()
            if (devices := registry.find(backend).profiled)
        ]
        raise UserError(f"{problem}; these report layer times: {', '.join(backends)}")
    if counters and device_kind != "cuda":
        raise UserError("hardware counters are those of an NVIDIA GPU; add --device cuda:0")


class FormProfiler(forms.FormReader):
    """Reader of forms that also times their layers."""

    runs_all = True

    def __init__(self, study: Study, batch: int, progress: Progress, runs: int, tool: str = "") -> None:
        super().__init__(study, batch, progress)
        self._runs, self._tool = runs, tool
        self._plan = Plan(("model",), study.warmup, study.seconds, rounds=1)
        self.times: list[Times] = []
        self.records: list[Record] = []
        self.counted: list[NcuReport] = []
        self._devices: set[str] = set()

    def read_form(self, trial: Trial, artifact: Artifact | None) -> LayerGraph:
        """Return the form after storing its times, all from one process."""
        # Counters come first: if they fail, no time is wasted on measuring.
        reports = [hardware.count_kernels(self._tool, trial, artifact, self._progress)] if self._tool else []
        job = Job("profile", trial.runtime, replace(trial, plan=self._plan), artifact=artifact,
                  options={"runs": self._runs})  # fmt: skip
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "job"
            record, form = self.run_job(job, folder)
            samples = read_npz(folder / "samples.npz")
            clock = _read_clock(folder, *record.facts.timed.values())
        self.records.append(record)
        self.counted += reports
        self.times.append(Times(samples["unprofiled_model"], samples["profiled"], samples["layers"], record.warnings,
                                times.read_launches(samples), clock, trial.backend, trial.precision,
                                record.facts.functions))  # fmt: skip
        self._devices.add(trial.runtime.device)
        return form

    def measure_ceilings(self, study: Study, sheet: Rates) -> Ceilings:
        """Measure with PyTorch the ceilings of the forms' common device, for their layers' data types."""
        device, *other_devices = self._devices
        if other_devices:
            raise UserError("the forms ran on several devices, which have no common ceilings; profile them one by one")
        runtime = replace(runtime_of(study, Choice(forms.MODULE_FORM)), device=device)
        runtime = replace(runtime, threads=study.threads or system.physical_cores())
        types = {kind for k, timing in zip(self.requested, self.times, strict=True)
                 for kind in list_types(self.forms[k], timing.precision)}  # fmt: skip
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "job"
            record = find_ceilings(runtime, types, folder, self._progress)
            copy = record.facts.copy
            if record.status != "ok" or copy is None:
                raise UserError(f"the ceilings of {device} can't be measured: {record.reason}")
            windows = {**{name: peak.window for name, peak in record.facts.peak.items()}, MEMORY_CEILING: copy.window}
            clocks = {name: _read_clock(folder, window) for name, window in windows.items()}
        return Ceilings(record.facts.peak, copy, record.warnings, sheet, clocks)


def _read_clock(folder: Path, *windows: timeline.Window) -> float:
    """Return the GPU's median SM clock in MHz within the job's timed windows; NaN without a GPU."""
    trace = timeline.read_timeline(folder)
    return timeline.summarise_timeline(trace, windows).clock if trace else math.nan
