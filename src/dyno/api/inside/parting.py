"""`dyno agree --layers`: the first layer where two runtimes part, and the few that make most of the error."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.analysis.numerics import calls, tables
from dyno.analysis.numerics.tables import ORDERS, Compared
from dyno.analysis.presentation.table import Table
from dyno.analysis.ranking.correctness import TOLERANCES
from dyno.api.inside import forms
from dyno.engine.gpu_lock import launch_in_turn
from dyno.jobs.progress import Progress
from dyno.study import Choice, Study
from dyno.worker import registry
from dyno.worker.closeness import ATOL, RTOL
from dyno.worker.facts.inside import LAYERS, Inside
from dyno.worker.facts.numerics import Parting
from dyno.worker.record import Record
from dyno.worker.spec import Artifact, Job, Trial, UserError, check_known

if TYPE_CHECKING:
    import pandas as pd

RUNS, TOP = 4, 20
NODE_BY_NODE = Choice("onnxruntime", {"optimization": "disable"})  # runs a graph as it is written


@dataclass(frozen=True)
class Parted:
    """Engines against the first model, layer by layer; values are close by `rtol` and `atol`; `top` rows of each are
    listed in one of ORDERS."""

    compared: tuple[Compared, ...]
    rtol: float = RTOL
    atol: float = ATOL
    order: str = ORDERS[0]
    top: int = TOP

    @cached_property
    def tables(self) -> list[Table]:
        """A row for each layer of each engine, and one for each engine with what was found."""
        rows = tables.layers(self.compared, self.order, self.top)
        return [rows, tables.findings(self.compared, self.rtol, self.atol)]

    @property
    def close(self) -> float:
        """The smallest share of output values that are close in any engine as it is; 0 for outputs of other shapes."""
        return min(each.found.whole.close if each.found.whole else 0.0 for each in self.compared)

    def to_pandas(self) -> pd.DataFrame:
        """The rows of all layers."""
        return tables.layers(self.compared, self.order, 0).to_pandas()


def agree_layers(
    model: Any,
    *others: Any,
    batch: int = 1,
    runs: int = RUNS,
    rtol: float = RTOL,
    atol: float = ATOL,
    order: str = ORDERS[0],
    top: int = TOP,
    quiet: bool = True,
    **settings: Any,
) -> Parted:
    """Compare every layer of a model in other forms with the same layer of the first: where they part.

    `model` is a module or an ONNX file, and `others` are forms of it as in `dyno.inspect`, such as `openvino/int8`, or
    other ONNX files of the same graph. Tensors are compared on `runs` batches, of the data where `settings`, fields
    of `dyno.Study`, have some. `top` rows of each engine are listed (0: all), in one of ORDERS. Raises `UserError` for
    what isn't a graph, and for graphs that have no tensors in common.
    """
    for name, value, least in (("batch", batch, 1), ("runs", runs, 1), ("top", top, 0)):
        if value < least:
            raise UserError(f"{name} is {value}; it must be at least {least}")
    check_known("order", order, ORDERS)
    study = Study(models=(model,), **settings)
    asked = [_runnable(side, place > 0) for place, side in enumerate(forms.sides(study, others))]
    if len(asked) < 2:
        raise UserError("layers are compared with something: give a form, such as openvino or onnxruntime/int8, or "
                        "another ONNX file")  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        reading = _Parting(study, batch, Progress(quiet=quiet), Path(scratch), runs)
        for side in asked:
            reading.read(side)
        compared = tuple(reading.compared(side, place, rtol, atol) for place, side in enumerate(asked) if place)
    return Parted(compared, rtol, atol, order, top)


def _runnable(side: forms.Side, later: bool) -> forms.Side:
    """The form with the engine that runs it; a `UserError` for one whose graph can't be cut."""
    kind = registry.format_of(side.source)
    if kind is not None and kind.name != forms.ONNX:
        raise UserError(f"{side.source} is no ONNX graph, whose tensors could be compared; give the ONNX file that it "
                        f"was made from, and {kind.usual(Path(side.source))} behind it")  # fmt: skip
    if side.choice.name == forms.ONNX:  # a file behind the first runs as ever, a form of the first as it is written
        return replace(side, choice=Choice(NODE_BY_NODE.name) if later and not side.precision else NODE_BY_NODE)
    if side.choice.name != forms.MODULE and not registry.find(side.choice.name).cuts:
        able = [name for name in registry.names() if registry.find(name).cuts]
        raise UserError(f"{side.choice.name} runs no parts of a graph, so its layers can't be compared; these do: "
                        f"{', '.join(able)}")  # fmt: skip
    return side


def _title(trial: Trial) -> str:
    return "node by node" if Choice(trial.backend, trial.options) == NODE_BY_NODE else trial.backend


@dataclass(frozen=True)
class _Ran:
    """A form as its engine runs it: the index of its own form, its trial and file, and the graph's file behind it."""

    trial: Trial
    artifact: Artifact | None


class _Parting(forms.Reading):
    """Reads forms and the graphs behind them, then compares their values."""

    def __init__(self, study: Study, batch: int, progress: Progress, folder: Path, runs: int) -> None:
        super().__init__(study, batch, progress)
        self._jobs, self._folder, self._runs = 0, folder, runs
        self._ran: list[_Ran] = []
        self._float: Artifact | None = None
        self._graph_files: dict[int, Artifact] = {}
        self._kept: dict[tuple[calls.Call, ...], Path] = {}

    def module(self, study: Study, side: forms.Side, trial: Trial) -> None:
        """A module is inspected as for a run, so that it gets the same inputs."""
        self.engine(study, side, trial)

    def ran(self, trial: Trial, artifact: Artifact | None) -> Inside:
        """The form's own layers where it is a module; an engine's are those of its graph."""
        if reason := registry.find(trial.backend).refuse(trial):
            raise UserError(reason)
        self._ran.append(_Ran(trial, artifact))
        return super().ran(trial, None) if trial.backend == forms.MODULE else Inside(form=LAYERS, library=_title(trial))

    def titled(self, form: Inside, trial: Trial) -> Inside:
        """The form with its title; a graph that runs node by node has no engine's."""
        plain = form.form == LAYERS and Choice(trial.backend, trial.options) == NODE_BY_NODE
        return super().titled(form, replace(trial, options={}) if plain else trial)

    def graph(self, trial: Trial, file: Artifact) -> int:
        """The index of the graph's form, and the graph's file kept by it."""
        index = super().graph(trial, file)
        self._graph_files.setdefault(index, file)
        return index

    def compared(self, side: forms.Side, place: int, rtol: float, atol: float) -> Compared:
        """The engine at that place of those that were asked for, against the first."""
        shown, own = self.shown[place], self._ran[place]
        graph = self.graph_of[shown]
        first, module = self._ran[0], self._ran[0].trial.backend == forms.MODULE
        found_calls = tuple(calls.tensors_of(self.forms[self.shown[0]], self.forms[graph])) if module else ()
        other = self._float_graph() if module else self._graph_files[self.graph_of[self.shown[0]]]
        values = self._values(first, other, found_calls if module else None)
        precision = max(own.trial.precision, first.trial.precision, key=lambda name: TOLERANCES[name].limit)
        limit = TOLERANCES[precision].close
        options = {
            "graph": self._graph_files[graph].path, "other": other.path, "values": str(values),
            "limits": [limit, rtol, atol], "always": own.trial.precision != first.trial.precision,
        }  # fmt: skip
        record = self._finished(Job("part", own.trial.runtime, own.trial, artifact=own.artifact, options=options))
        parting = record.facts.parting
        assert isinstance(parting, Parting)
        titles = [self.forms[self.shown[k]].library for k in (place, 0)]
        names = [self._name(k, title) for k, title in zip((place, 0), titles, strict=True)]
        return Compared(names[0], names[1], self.forms[graph], parting, precision, limit)

    def _name(self, place: int, title: str) -> str:
        """The form's title, with the model where there are several."""
        sources = [ran.trial.model.source or ran.trial.model.name for ran in self._ran]
        return f"{Path(sources[place]).name} {title}" if len({*sources}) > 1 else title

    def _float_graph(self) -> Artifact:
        """The graph of the module in FP32, whose nodes stand for the module's own where a layer is put in place."""
        if self._float is None:
            self.read(forms.Side(self._ran[0].trial.model.source, NODE_BY_NODE, "fp32"))
            self._float = self._graph_files[self.graph_of[self.shown[-1]]]
        return self._float

    def _values(self, first: _Ran, graph: Artifact, found: tuple[calls.Call, ...] | None) -> Path:
        """The folder of the reference's values, kept once for each list of calls."""
        key = found or ()
        if key not in self._kept:
            options: dict[str, Any] = {"runs": self._runs}
            if found is not None:
                options["calls"] = [list(call) for call in found]
            artifact = None if found is not None else graph
            self._finished(Job("values", first.trial.runtime, first.trial, artifact=artifact, options=options))
            self._kept[key] = self._folder / str(self._jobs) / "values"
        return self._kept[key]

    def _finished(self, job: Job) -> Record:
        """The record of the job; a `UserError` where it failed."""
        self._jobs += 1
        record = launch_in_turn(job, self._folder / str(self._jobs), forms.TIMEOUT_S, self._progress)
        assert job.trial is not None
        if record.status != "ok":
            raise UserError(f"{job.trial.model.name}: {record.reason}")
        return record
