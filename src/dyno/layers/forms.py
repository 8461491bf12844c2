"""Forms of a model: parsed from a command's arguments and read, with the graphs behind engines."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dyno.jobs.progress import Progress
from dyno.runner.device_lock import launch_in_turn
from dyno.runner.execute import Files
from dyno.store import cache_dir
from dyno.study import input_options
from dyno.study.defaults import check_weights
from dyno.study.images import prepare_images
from dyno.study.interpreters import explain_missing, place_recipe, runtime_of
from dyno.study.model_info import inspect_model, list_sizes, model_spec
from dyno.study.model_names import model_name, parse_form
from dyno.study.study import Choice, Study, parse_size
from dyno.worker import registry, system
from dyno.worker.facts.job import MODULES, UNWATCHED_ERROR, LayerGraph
from dyno.worker.record import Record
from dyno.worker.spec import PRECISIONS, Artifact, DataSpec, Dims, Job, Recipe, Runtime, Trial, UserError, check_known

ONNX_FORM, MODULE_FORM = "onnx", "pytorch"  # forms that need no engine
TIMEOUT_S = 1800.0


class NoForm(UserError):
    """Error: one form of a model can't be made or read; other forms may be."""


@dataclass(frozen=True)
class FormRequest:
    """Requested form: a model's source, an engine ("onnx": the graph itself), and a precision ("": the file's own).
    `is_named` is true for a form of the first model given by name, false for a model in its own form."""

    source: str
    choice: Choice
    precision: str
    is_named: bool = False


@dataclass(frozen=True)
class GraphFile:
    """The path of an ONNX graph's file, and the runtime that reads it."""

    path: str
    runtime: Runtime


def list_forms(study: Study, other_forms: Sequence[Any]) -> list[FormRequest]:
    """Return the study's model in its own form, then the others: its named forms, or other models in theirs."""
    source = study.models[0]
    requests = [
        request_own_form(source),
        *(_parse_form(str(o), source) or request_own_form(Study(models=(o,)).models[0]) for o in other_forms),
    ]
    check_weights(study, [request.source for request in requests])
    return requests


def request_own_form(source: str) -> FormRequest:
    """Return a model in the form that it already has."""
    kind = registry.format_of(source)
    if kind is None:
        return FormRequest(source, Choice(MODULE_FORM), "fp32")
    path = Path(source)
    name = ONNX_FORM if kind.name == ONNX_FORM else kind.default_backend(path) if path.is_file() else kind.backend
    return FormRequest(source, Choice(name), "")


def is_form(text: Any) -> bool:
    """Return whether the text names a form of a model rather than a model."""
    return parse_form(str(text), _list_form_names()) is not None


def _list_form_names() -> tuple[str, ...]:
    return (ONNX_FORM, *registry.list_backends())


def _parse_form(text: str, source: str) -> FormRequest | None:
    """Return the named form of the first model; None if the text names another model."""
    form = parse_form(text, _list_form_names())
    if form is None:
        name = text.partition("/")[0]
        if not (Path(text).is_file() or ":" in name or registry.format_of(text)):
            check_known("form", name.partition("@")[0], _list_form_names())
        return None
    choice, precision = Choice.parse(form[0]), form[1]
    if choice.name == MODULE_FORM and registry.format_of(source):
        raise UserError(f"there is no PyTorch module in {source}; give the model that it was exported from first")
    if precision:
        check_known("precision", precision, PRECISIONS)
    default = "" if registry.format_of(source) else "fp32"  # a file's own precision is known only after reading it
    return FormRequest(source, choice, precision or default, is_named=True)


class FormReader:
    """Reader of forms one after the other, with the graphs behind engines.

    With `runs_all`, a module or an engine file is inspected for a run, like any other form.
    """

    runs_all = False

    def __init__(self, study: Study, batch: int, progress: Progress) -> None:
        self._study, self._batch, self._progress = study, batch, progress
        self._files = Files(progress, study.build_timeout_s)
        self.forms: list[LayerGraph] = []
        self.requested: list[int] = []
        self.graph_of: dict[int, int] = {}
        self.graphs: dict[int, GraphFile] = {}
        self._graphs: dict[str, int] = {}  # by the file's hash
        self.left_out: list[str] = []  # one reason for each missing form
        self.trials: list[tuple[Trial, Artifact | None]] = []  # trials read, each with its file

    def read_all(self, requests: Sequence[FormRequest]) -> list[FormRequest]:
        """Read these forms and return the readable ones; list the others in `left_out`. Raise an error if all fail.

        An unwatchable first form is dropped silently if others were requested.
        """
        readable, errors = [], list[UserError]()
        for index, request in enumerate(requests):
            try:
                self.read(request)
                readable.append(request)
            except NoForm as e:
                if UNWATCHED_ERROR not in str(e):
                    errors.append(e)
                elif index or len(requests) == 1:
                    errors.append(_reword_error(request, e))
        if not readable:
            raise errors[0]
        self.left_out += map(str, errors)
        return readable

    def read(self, request: FormRequest) -> None:
        """Read the form, and the graph that it was made from."""
        study = replace(self._study, models=(request.source,))
        model = model_spec(study, request.source)
        runtime = replace(runtime_of(study, request.choice), threads=study.threads or system.physical_cores())
        engine = None if request.choice.name in (ONNX_FORM, MODULE_FORM) else registry.find(request.choice.name)
        if engine and runtime.device == "cpu" and "cpu" not in engine.devices:
            runtime = replace(runtime, device=f"{engine.devices[0]}:0")
        if engine and (reason := explain_missing(engine.name, runtime)):
            raise UserError(f"{engine.name}: {reason}")
        trial = Trial(model, request.choice.name, request.precision or "fp32", Dims(self._batch, 0, 0),
                      request.choice.options, runtime=runtime)  # fmt: skip
        file_format = registry.format_of(model.file)
        on_device = bool(file_format and file_format.on_device)
        if self.runs_all:
            self.read_engine(replace(study, device=runtime.device) if on_device else study, request, trial)
        elif request.choice.name == MODULE_FORM:
            # The module is read without inspecting its inputs first.
            options = {"sizes": [list(parse_size(size)) for size in study.sizes],
                     "overrides": input_options.parse_overrides(study.inputs, study.shapes)}  # fmt: skip
            self._add_form(self._launch_job(trial, None, options), "")
        elif on_device:
            self._add_form(self.read_form(trial, None), "")
        else:
            self.read_engine(study, request, trial)

    def describe(self, requests: Sequence[FormRequest]) -> dict[str, Any]:
        """Return the fields of a `FormsResult`; `requests` are the forms read, in this order."""
        sources = {k: request.source for k, request in zip(self.requested, requests, strict=True)}
        return {
            "forms": number_titles(self.forms, sources), "requested": tuple(self.requested), "graph_of": self.graph_of,
            "module_of": self.module_of(sources), "graphs": self.graphs, "name": model_name(self._study.models[0]),
            "left_out": tuple(self.left_out),
        }  # fmt: skip

    def module_of(self, sources: Mapping[int, str]) -> dict[int, int]:
        """Map each form to the index of its module, if that is shown too; `sources` maps shown forms to models."""
        modules = {source: k for k, source in sources.items() if self.forms[k].form == MODULES}
        return {k: modules[source] for k, source in sources.items() if source in modules}

    def read_form(self, trial: Trial, artifact: Artifact | None) -> LayerGraph:
        """Return the form that an engine runs."""
        return self._launch_job(trial, artifact)

    def read_engine(self, study: Study, request: FormRequest, trial: Trial) -> None:
        """Make the file of an engine's form; read the form and the graph behind it."""
        model, inspection = inspect_model(trial.model, study)
        size = list_sizes(study, inspection)[0]
        batch = inspection.batch or self._batch
        precision = request.precision or model.precision or "fp32"
        study = replace(study, precisions=(precision,))
        data = prepare_images(study, model, size) if study.data or study.calibration else DataSpec(count=1)
        dims = Dims(batch, *size, inspection.shapes)
        trial = replace(trial, model=model, precision=precision, dims=dims, data=data)
        file_format, reason = registry.format_of(model.file), ""
        if request.choice.name != ONNX_FORM:
            reason = registry.find(request.choice.name).refuse(trial)
        elif file_format and file_format.name != ONNX_FORM:
            reason = f"there is no ONNX graph in {model.file}"
        if reason:
            raise no_form(trial, reason)
        recipe = self._make_recipe(study, trial)
        artifact = self._make_file(recipe, trial) if recipe else None
        if request.choice.name == ONNX_FORM:
            index = self._add_form(self._read_graph_form(trial, artifact), artifact.sha256 if artifact else "")
            self.graphs[index] = _make_graph_file(trial, artifact)
            return
        self.read_trial(trial, recipe, artifact)

    def read_trial(self, trial: Trial, recipe: Recipe | None, artifact: Artifact | None) -> None:
        """Read the trial's form, made by the recipe, and the graph behind it."""
        form_index = self._add_form(self.give_title(self.read_form(trial, artifact), trial), "")
        self.trials.append((trial, artifact))
        graph_file = self._find_onnx_file(recipe, artifact)
        if graph_file is not None:
            with suppress(NoForm):  # the engine's own layers don't need it
                self.graph_of[form_index] = self.find_graph(trial, graph_file)

    def give_title(self, form: LayerGraph, trial: Trial) -> LayerGraph:
        """Return the form with its precision (unless fp32) and its options in its title."""
        precisions = (trial.precision,) if trial.precision != "fp32" else ()
        options = [f"{name}={value}" for name, value in trial.options.items()]
        return replace(form, library=" ".join((form.library, *precisions, *options)))

    def _make_recipe(self, study: Study, trial: Trial) -> Recipe | None:
        if trial.backend == ONNX_FORM:  # the file shared by engines of any batch, if there is one
            fixed, free = (registry.list_formats()[ONNX_FORM].recipe(replace(trial, dims=replace(trial.dims, batch=n)))
                           for n in (trial.dims.batch, 0))  # fmt: skip
            return replace(free, fallback=fixed) if free else None
        engine = registry.find(trial.backend)
        engine.check_options(trial.options)
        return place_recipe(engine.recipe(trial), study)

    def _make_file(self, recipe: Recipe, trial: Trial) -> Artifact:
        with self._progress.show_study([]):
            artifact = self._files.make_file(recipe)
        if isinstance(artifact, Record):
            raise no_form(trial, artifact.reason)
        return artifact

    def _find_onnx_file(self, recipe: Recipe | None, artifact: Artifact | None) -> Artifact | None:
        """Return the ONNX file that the engine reads or was made from; None without one."""
        while recipe is not None and artifact is not None:
            if artifact.format == ONNX_FORM:
                return artifact
            parent = self._files.make_file(recipe.parent) if recipe.parent else None
            if isinstance(parent, Artifact) and parent.sha256 == artifact.parent_sha256:
                return parent
            recipe = recipe.fallback
        return None

    def find_graph(self, trial: Trial, file: Artifact) -> int:
        """Return the index of the engine's graph; each file is read once."""
        if file.sha256 not in self._graphs:
            form = self._read_graph_form(trial, file)
            self.graphs[len(self.forms)] = _make_graph_file(trial, file)
            self._graphs[file.sha256] = len(self.forms)
            self.forms.append(replace(form, library=f"{form.library} for {trial.backend}"))
        return self._graphs[file.sha256]

    def _read_graph_form(self, trial: Trial, file: Artifact | None) -> LayerGraph:
        """Return the form of an ONNX file (None: the trial's model), read in Dyno's own Python."""
        return self.give_title(self._launch_job(replace(trial, backend="", runtime=_make_runtime(trial)), file), trial)

    def _add_form(self, form: LayerGraph, graph: str) -> int:
        self.forms.append(form)
        self.requested.append(len(self.forms) - 1)
        if graph:
            self._graphs.setdefault(graph, self.requested[-1])
        return self.requested[-1]

    def _launch_job(self, trial: Trial, artifact: Artifact | None, options: dict[str, Any] | None = None) -> LayerGraph:
        job = Job("layers", trial.runtime, trial, artifact=artifact, options=options or {})
        with tempfile.TemporaryDirectory() as scratch:
            return self.run_job(job, Path(scratch) / "job")[1]

    def run_job(self, job: Job, folder: Path) -> tuple[Record, LayerGraph]:
        """Run the job in the folder; return its record and form, or raise `NoForm` without a form."""
        record = launch_in_turn(job, folder, TIMEOUT_S, self._progress)
        assert job.trial is not None
        if record.status != "ok" or record.facts.inside is None:
            raise no_form(job.trial, record.reason)
        return record, record.facts.inside


def no_form(trial: Trial, reason: str) -> NoForm:
    """Return the error for a form that can't be made, in one line.

    It names a PyTorch module's model alone, as the module's faults affect all its forms.
    """
    form = "" if trial.backend == MODULE_FORM else f" {trial.variant if trial.backend else ONNX_FORM} {trial.precision}"
    return NoForm(f"{trial.model.name}{form}: {reason}")


def number_titles(forms: Sequence[LayerGraph], sources: Mapping[int, str]) -> tuple[LayerGraph, ...]:
    """Return the forms with unique titles: numbered, and with the model's name if there are several models."""
    titles: Counter[str] = Counter()
    titled_forms = list(forms)
    for k, source in sources.items():
        title = forms[k].library
        if len(set(sources.values())) > 1:
            title = f"{title}, {Path(source).name}"
        titles[title] += 1
        titled_forms[k] = replace(forms[k], library=f"{title} ({titles[title]})" if titles[title] > 1 else title)
    return tuple(titled_forms)


def _reword_error(request: FormRequest, error: UserError) -> UserError:
    """Return the error, reworded for a module given in memory, which Dyno stored as a program."""
    if cache_dir() not in Path(request.source).parents:
        return error
    name = model_name(request.source)
    return UserError(f"{name}: a module in memory is passed on as a program, {UNWATCHED_ERROR}; name it as "
                     'FILE.py:FUNCTION, or look at its other forms: dyno.inspect(module, "onnx")')  # fmt: skip


def _make_runtime(trial: Trial) -> Runtime:
    """Return the runtime that reads ONNX files: this Python, as an engine's own may lack onnx."""
    return Runtime(threads=trial.runtime.threads)


def _make_graph_file(trial: Trial, artifact: Artifact | None) -> GraphFile:
    return GraphFile(artifact.path if artifact else trial.model.file, _make_runtime(trial))
