"""`dyno diff --layers`: the first layer where two runtimes diverge, and the few that make most of the error."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.jobs.progress import Progress
from dyno.layers import agreement_tables, forms
from dyno.layers.agreement_tables import ORDERS, EngineComparison
from dyno.results.correctness import TOLERANCES
from dyno.runner.device_lock import launch_in_turn
from dyno.study.defaults import one_model
from dyno.study.model_names import model_name
from dyno.study.study import Choice, Study
from dyno.table import Table
from dyno.worker import registry
from dyno.worker.facts.job import LAYERS, LayerErrors, LayerGraph
from dyno.worker.numerics.closeness import ATOL, RTOL
from dyno.worker.option_values import at_least
from dyno.worker.record import Record
from dyno.worker.spec import Artifact, Job, Trial, UserError, check_known

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_INPUTS, DEFAULT_TOP = 4, 20
NODE_BY_NODE = Choice("onnxruntime", {"optimization": "disable"})  # runs a graph as it is written


@dataclass(frozen=True)
class LayerAgreement:
    """Engines compared with the first model, layer by layer. `rtol` and `atol` are the tolerances of close values;
    `top` rows per engine are listed in one of ORDERS. `left_out` lists the forms that failed, with reasons."""

    compared: tuple[EngineComparison, ...]
    rtol: float = RTOL
    atol: float = ATOL
    order: str = ORDERS[0]
    top: int = DEFAULT_TOP
    left_out: tuple[str, ...] = ()

    @cached_property
    def tables(self) -> list[Table]:
        """Two tables: a row per compared layer, and a row per engine with its findings."""
        rows = agreement_tables.list_compared_layers(self.compared, self.order, self.top)
        return [rows, agreement_tables.list_findings(self.compared, self.rtol, self.atol)]

    @property
    def close(self) -> float:
        """Smallest share of close output values over the unmodified engines; 0 if output shapes differ."""
        return min(each.errors.unmodified.close if each.errors.unmodified else 0.0 for each in self.compared)

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows of all layers."""
        return agreement_tables.list_compared_layers(self.compared, self.order, 0).to_pandas()


def diff_layers(
    model: Any,
    *others: Any,
    batch: int = 1,
    compared: int = DEFAULT_INPUTS,
    rtol: float = RTOL,
    atol: float = ATOL,
    order: str = ORDERS[0],
    top: int = DEFAULT_TOP,
    quiet: bool = True,
    **settings: Any,
) -> LayerAgreement:
    """Compare other forms of a model with the first one layer by layer, to find where they diverge.

    `model` is a module or an ONNX file. `others` are forms of it as in `dyno.inspect`, such as `openvino/int8`, or
    other ONNX files of the same graph. Tensors are compared on `compared` inputs. `settings` are fields of
    `dyno.Study`; inputs come from its data, if given. `top` rows per engine are listed (0: all), in one of ORDERS.
    Forms that can't be made or compared are left out. Raises `UserError` if no form is left, if a form has no graph, or
    if no graphs share tensors.
    """
    batch, compared = at_least(1, batch=batch, compared=compared)
    (top,), (rtol, atol) = at_least(0, top=top), at_least(0, float, rtol=rtol, atol=atol)
    check_known("order", order, ORDERS)
    study = one_model(model, settings)
    requests = [_make_runnable(request, index > 0) for index, request in enumerate(forms.list_forms(study, others))]
    if len(requests) < 2:
        raise UserError("nothing to compare the layers with: give a form, such as openvino or onnxruntime/int8, or "
                        "another ONNX file")  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        comparer = _FormComparer(study, batch, Progress(quiet=quiet), Path(scratch), -(-compared // batch))
        comparer.read(requests[0])
        comparer.read_all(requests[1:])
        engines = tuple(comparer.compare_all(rtol, atol))
    return LayerAgreement(engines, rtol, atol, order, top, tuple(comparer.left_out))


def _make_runnable(form: forms.FormRequest, is_later: bool) -> forms.FormRequest:
    """Return the form with its engine; raise `UserError` if that engine can't run parts of a graph."""
    if is_later and form.choice.name == forms.MODULE_FORM:
        raise UserError(f"{model_name(form.source)} is a PyTorch module, not a graph whose layers can be compared; "
            f"give a form of the first model, such as openvino, or an ONNX file")  # fmt: skip
    file_format = registry.format_of(form.source)
    is_engine = file_format is not None and file_format.name != forms.ONNX_FORM
    engine = (
        file_format.default_backend(Path(form.source)) if file_format is not None and is_engine else form.choice.name
    )
    if engine not in (forms.ONNX_FORM, forms.MODULE_FORM) and not registry.find(engine).loads_onnx:
        backends = [name for name in registry.list_backends() if registry.find(name).loads_onnx]
        raise UserError(f"{engine} runs no parts of a graph, so its layers can't be compared; these do: "
                        f"{', '.join(backends)}")  # fmt: skip
    if is_engine:
        raise UserError(f"{form.source} is not an ONNX graph; give the ONNX file that it was made from, and {engine} "
            f"behind it")  # fmt: skip
    # a later file runs with default options, the first file and its forms node by node
    if form.choice.name == forms.ONNX_FORM:
        is_default = is_later and not form.is_named and not form.precision
        return replace(form, choice=Choice(NODE_BY_NODE.name) if is_default else NODE_BY_NODE)
    return form


class _FormComparer(forms.FormReader):
    """Reader of forms and their graphs that then compares their values."""

    runs_all = True  # a module gets the same inputs

    def __init__(self, study: Study, batch: int, progress: Progress, folder: Path, runs: int) -> None:
        super().__init__(study, batch, progress)
        self._jobs, self._folder, self._runs = 0, folder, runs
        self._graph_files: dict[int, Artifact] = {}
        self._tensor_folders: dict[int, Path] = {}  # folders by the index of the reference's graph
        self._float = -1

    def read_form(self, trial: Trial, artifact: Artifact | None) -> LayerGraph:
        """Return a module's own layers, or an empty form for an engine, as its graph has the layers."""
        is_module = trial.backend == forms.MODULE_FORM
        return super().read_form(trial, None) if is_module else LayerGraph(form=LAYERS, library=trial.backend)

    def give_title(self, form: LayerGraph, trial: Trial) -> LayerGraph:
        """Return the form with its title; "node by node" replaces the options of an unoptimised graph."""
        if form.form == LAYERS and Choice(trial.backend, trial.options) == NODE_BY_NODE:
            form, trial = replace(form, library="node by node"), replace(trial, options={})
        return super().give_title(form, trial)

    def find_graph(self, trial: Trial, file: Artifact) -> int:
        """Return the index of the graph's form, and keep the graph's file under that index."""
        try:
            index = super().find_graph(trial, file)
        except forms.NoForm as e:
            raise UserError(str(e)) from None  # without the reference there is nothing to compare
        self._graph_files.setdefault(index, file)
        return index

    def compare_all(self, rtol: float, atol: float) -> list[EngineComparison]:
        """Compare each engine with the first; leave out failures, but raise the first one if all fail."""
        comparisons, errors = [], list[forms.NoForm]()
        for index in range(1, len(self.requested)):
            try:
                comparisons.append(self.compare_engine(index, rtol, atol))
            except forms.NoForm as e:
                errors.append(e)
        if not comparisons:
            raise errors[0]
        self.left_out += map(str, errors)
        return comparisons

    def compare_engine(self, index: int, rtol: float, atol: float) -> EngineComparison:
        """Compare the engine at index `index` of the requested forms with the first."""
        (trial, artifact), (reference, _) = self.trials[index], self.trials[0]
        graph = self.graph_of[self.requested[index]]
        reference_graph = self._find_reference_graph(trial, graph)
        precision = max(trial.precision, reference.precision, key=lambda name: TOLERANCES[name].limit)
        limit = TOLERANCES[precision].close
        options = {
            "graph": self._graph_files[graph].path, "reference_graph": self._graph_files[reference_graph].path,
            "reference": str(self._store_reference(reference, reference_graph)), "limits": [limit, rtol, atol],
            "always": trial.precision != reference.precision,
        }  # fmt: skip
        job = Job("layer_errors", trial.runtime, trial, artifact=artifact, options=options)
        errors = self._run_job(job).facts.layer_errors
        assert isinstance(errors, LayerErrors)
        names = self._format_name(index), self._format_name(0)
        return EngineComparison(*names, self.forms[graph], errors, precision, limit)

    def _format_name(self, index: int) -> str:
        """Return the form's title, with the model's name if there are several models."""
        sources, title = ([t.model.source or t.model.name for t, _ in self.trials], self.forms[self.requested[index]])
        return f"{Path(sources[index]).name} {title.library}" if len({*sources}) > 1 else title.library

    def _find_reference_graph(self, trial: Trial, graph: int) -> int:
        """Return the index of the reference's graph; for a module its FP32 export, the engine's own if possible."""
        reference, _ = self.trials[0]
        if reference.backend != forms.MODULE_FORM:
            return self.graph_of[self.requested[0]]
        if trial.precision == "fp32" and trial.model.source == reference.model.source:
            return graph
        if self._float < 0:
            self.read(forms.FormRequest(reference.model.source, NODE_BY_NODE, "fp32"))
            self._float = self.graph_of[self.requested[-1]]
        return self._float

    def _store_reference(self, reference: Trial, graph: int) -> Path:
        """Return the folder of the reference's tensors, named as in the graph; store them once per graph."""
        if graph not in self._tensor_folders:
            file, options = self._graph_files[graph], dict[str, Any](runs=self._runs)
            if is_module := reference.backend == forms.MODULE_FORM:
                calls = agreement_tables.list_tensors(self.forms[self.requested[0]], self.forms[graph])
                options |= {"graph": file.path, "calls": [list(call) for call in calls]}
            artifact = None if is_module else file
            self._run_job(Job("reference", reference.runtime, reference, artifact=artifact, options=options))
            self._tensor_folders[graph] = self._folder / str(self._jobs) / "tensors"
        return self._tensor_folders[graph]

    def _run_job(self, job: Job) -> Record:
        """Run the job and return its record; raise `NoForm` if it failed."""
        self._jobs += 1
        record = launch_in_turn(job, self._folder / str(self._jobs), forms.TIMEOUT_S, self._progress)
        assert job.trial is not None
        if record.status != "ok":
            raise forms.no_form(job.trial, record.reason)
        return record
