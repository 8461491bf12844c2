"""`dyno inspect`: what a model is made of, in one form or in several side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.analysis.inside import tables
from dyno.analysis.presentation.table import Table
from dyno.engine.execute import Files
from dyno.engine.gpu_lock import launch_in_turn
from dyno.jobs.progress import Progress
from dyno.planning.images import prepared
from dyno.planning.interpreters import missing, placed, runtime_of
from dyno.planning.model_info import file_shapes, inspect_model, model_spec, sizes
from dyno.sources import input_options
from dyno.study import Choice, Study, parse_size
from dyno.worker import registry, system
from dyno.worker.extras import install
from dyno.worker.facts.inside import Inside
from dyno.worker.record import Record
from dyno.worker.spec import PRECISIONS, Artifact, DataSpec, Dims, Job, Recipe, Trial, UserError, check_known

if TYPE_CHECKING:
    import pandas as pd

ONNX, MODULE = "onnx", "pytorch"  # the forms that no engine is needed for
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Inspected:
    """Forms of a model: the indices of those that were asked for are in `shown`; the others are the ONNX graphs behind
    engines, by which those are aligned, and `graph_of` has the index of each engine's."""

    forms: tuple[Inside, ...]
    shown: tuple[int, ...]
    graph_of: Mapping[int, int]

    @cached_property
    def tables(self) -> list[Table]:
        """The layers of one form, or several side by side and the conversions that engines put in."""
        if len(self.shown) == 1:
            return [tables.one(self.forms[self.shown[0]])]
        each = [tables.aligned(self.forms, self.shown, self.graph_of), tables.conversions(self.forms, self.shown)]
        return [table for table in each if table.rows]

    def to_pandas(self) -> pd.DataFrame:
        """The first table's rows."""
        return self.tables[0].to_pandas()


@dataclass(frozen=True)
class Side:
    """One form as the user asked for it: of which model, whose ("onnx": its graph), and in which precision."""

    source: str
    choice: Choice
    precision: str


def inspect(model: Any, *others: Any, batch: int = 1, quiet: bool = True, **settings: Any) -> Inspected:
    """The layers of a model, beside those of others or of its own other forms.

    `model` is whatever a study takes: of a module its parts' calls are listed, of an ONNX file its nodes, of an engine
    its layers. Each of `others` is the same again, or a form of the first: `onnx`, or a backend as in a study with a
    precision behind a slash, `openvino` or `onnxruntime@optimization=basic/int8`. `settings` are fields of
    `dyno.Study`. Raises `UserError` where something can't be read.
    """
    if batch < 1:
        raise UserError(f"batch is {batch}; it must be at least 1")
    study = Study(models=(model,), **settings)
    asked = [_first(study.models[0])]
    for other in others:
        asked.append(_form(str(other), study.models[0]) or _first(Study(models=(other,)).models[0]))
    reading = _Reading(study, batch, Progress(quiet=quiet))
    for side in asked:
        reading.read(side)
    return reading.result()


def _first(source: str) -> Side:
    """A model in the form that it has already."""
    kind = registry.format_of(source)
    if kind is None:
        return Side(source, Choice(MODULE), "fp32")
    path = Path(source)
    name = ONNX if kind.name == ONNX else kind.usual(path) if path.is_file() else kind.backend
    return Side(source, Choice(name), "")


def _form(text: str, source: str) -> Side | None:
    """A form of the first model, None for text that is another model."""
    named, _, precision = text.partition("/")
    name = named.partition("@")[0]
    if Path(text).exists() or ":" in named or registry.format_of(text):
        return None
    check_known("form", name, (ONNX, *registry.names()))
    if name == MODULE and registry.format_of(source):
        raise UserError(f"there is no PyTorch module in {source}; give the model that it was exported from first")
    if precision:
        check_known("precision", precision, PRECISIONS)
    return Side(source, Choice.parse(named), precision or "fp32")


class _Reading:
    """Reads one form after the other, and the graphs behind engines."""

    def __init__(self, study: Study, batch: int, progress: Progress) -> None:
        self._study, self._batch, self._progress = study, batch, progress
        self._files = Files(progress)
        self._forms: list[Inside] = []
        self._shown: list[int] = []
        self._graph_of: dict[int, int] = {}
        self._graphs: dict[str, int] = {}  # by the file's hash

    def result(self) -> Inspected:
        return Inspected(tuple(self._forms), tuple(self._shown), self._graph_of)

    def read(self, side: Side) -> None:
        """Read that form, and the graph that it was made from."""
        study = replace(self._study, models=(side.source,))
        model = model_spec(study, side.source)
        runtime = replace(runtime_of(study, side.choice), threads=study.threads or system.physical_cores())
        engine = None if side.choice.name in (ONNX, MODULE) else registry.find(side.choice.name)
        if engine and runtime.device == "cpu" and "cpu" not in engine.devices:
            runtime = replace(runtime, device=f"{engine.devices[0]}:0")
        if engine and (lacks := missing(engine.name, runtime)):
            raise UserError(f"{engine.name}: {lacks} is not installed; {install(lacks)}, or give its Python")
        trial = Trial(model, side.choice.name, side.precision or "fp32", Dims(self._batch, 0, 0),
                      side.choice.options, runtime=runtime)  # fmt: skip
        kind = registry.format_of(model.file)
        if side.choice.name == MODULE:
            options = {
                "sizes": [list(parse_size(size)) for size in study.sizes],
                "overrides": input_options.overrides(study.inputs, study.shapes),
            }
            self._add(_launched(trial, None, options, self._progress), "")
        elif kind and kind.on_device:
            self._add(_launched(trial, None, {}, self._progress), "")
        else:
            self._engine(study, side, trial)

    def _engine(self, study: Study, side: Side, trial: Trial) -> None:
        model, inspection = inspect_model(trial.model, study)
        size = sizes(study, inspection)[0]
        batch = inspection.batch or self._batch
        precision = side.precision or model.precision or "fp32"
        study = replace(study, precisions=(precision,))
        data = prepared(study, model, size) if study.data or study.calibration else DataSpec(count=1)
        dims = Dims(batch, *size, file_shapes(study, model, batch))
        trial = replace(trial, model=model, precision=precision, dims=dims, data=data)
        recipe = self._recipe(study, trial)
        artifact = self._made(recipe, trial) if recipe else None
        if side.choice.name == ONNX:
            graph = replace(trial, backend="")
            self._add(self._titled(_launched(graph, artifact, {}, self._progress), trial),
                      artifact.sha256 if artifact else "")  # fmt: skip
            return
        form = self._add(self._titled(_launched(trial, artifact, {}, self._progress), trial), "")
        behind = self._behind(recipe, artifact)
        if behind is not None:
            self._graph_of[form] = self._graph(trial, behind)

    def _titled(self, form: Inside, trial: Trial) -> Inside:
        """The form with its precision in its title, where that isn't the usual one."""
        lowered = trial.precision if trial.precision != "fp32" else ""
        return replace(form, library=" ".join(filter(None, (form.library, lowered))))

    def _recipe(self, study: Study, trial: Trial) -> Recipe | None:
        if trial.backend == ONNX:  # the file that engines of any batch share, where there is one
            fixed, free = (registry.formats()[ONNX].recipe(replace(trial, dims=replace(trial.dims, batch=n)))
                           for n in (trial.dims.batch, 0))  # fmt: skip
            return replace(free, fallback=fixed) if free else None
        engine = registry.find(trial.backend)
        engine.check_options(trial.options)
        return placed(engine.recipe(trial), study)

    def _made(self, recipe: Recipe, trial: Trial) -> Artifact:
        with self._progress.running([]):
            artifact = self._files.file(recipe)
        if isinstance(artifact, Record):
            raise UserError(f"{trial.model.name}: {artifact.reason}")
        return artifact

    def _behind(self, recipe: Recipe | None, artifact: Artifact | None) -> Artifact | None:
        """The ONNX file that the engine was made from, or that it reads."""
        while recipe is not None and artifact is not None:
            if artifact.format == ONNX:
                return artifact
            parent = self._files.file(recipe.parent) if recipe.parent else None
            if isinstance(parent, Artifact) and parent.sha256 == artifact.parent_sha256:
                return parent
            recipe = recipe.fallback
        return None

    def _graph(self, trial: Trial, file: Artifact) -> int:
        """The form of the engine's graph, read once."""
        if file.sha256 not in self._graphs:
            graph = replace(trial, backend="")
            form = self._titled(_launched(graph, file, {}, self._progress), trial)
            form = replace(form, library=f"{form.library} for {trial.backend}")
            self._forms.append(form)
            self._graphs[file.sha256] = len(self._forms) - 1
        return self._graphs[file.sha256]

    def _add(self, form: Inside, graph: str) -> int:
        self._forms.append(form)
        self._shown.append(len(self._forms) - 1)
        if graph:
            self._graphs.setdefault(graph, self._shown[-1])
        return self._shown[-1]


def _launched(trial: Trial, artifact: Artifact | None, options: Mapping[str, Any], progress: Progress) -> Inside:
    with tempfile.TemporaryDirectory() as scratch:
        job = Job("layers", trial.runtime, trial, artifact=artifact, options=dict(options))
        record = launch_in_turn(job, Path(scratch) / "job", TIMEOUT_S, progress)
    if record.status != "ok" or record.facts.inside is None:
        raise UserError(f"{trial.model.name}: {record.reason}")
    return record.facts.inside
