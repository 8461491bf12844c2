"""A study becomes trials: models inspected, images decoded, every combination listed, refusals given a reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno.analysis.ranking import references
from dyno.datasets import meta
from dyno.planning.checks import check_kind, check_threads, check_weights
from dyno.planning.images import prepared
from dyno.planning.inspections import InspectedModel, inspect_models
from dyno.planning.interpreters import installed, missing, placed, runtime_of
from dyno.planning.model_info import InspectionFailed, batches, model_spec, refuse_sizes, sizes
from dyno.planning.planned import PlannedTrial
from dyno.planning.routes import routed
from dyno.planning.sides import paired
from dyno.study import Choice, Study, model_name, parse_size, runtimes
from dyno.worker import registry, system, tasks
from dyno.worker.backend import Backend
from dyno.worker.extras import install
from dyno.worker.inspection import Inspection
from dyno.worker.spec import (
    BUILD,
    DataSpec,
    Dims,
    ModelSpec,
    Trial,
    UserError,
    check_known,
    to_json,
)

STEPS = ("modelopt",)  # steps of making a file that may use a separate interpreter


def expand(study: Study, sources: Collection[str] = ()) -> list[PlannedTrial]:
    """Return every trial of the study in a fixed order; raise `UserError` for unusable input before anything runs.

    For a comparison, return the trials of both sides, with at least one pair. With `sources`, return only those of
    these models, of a study that was planned as a whole before: checks over all models are not repeated.
    """
    if sources:
        return _expand_models(study, [source for source in study.models if source in sources])
    for side in study.sides.values():
        check_weights(side, [source for each in study.sides.values() for source in each.models])
    if study.baseline:
        planned = paired({side: _expand_models(own, own.models) for side, own in study.sides.items()})
    else:
        planned = _expand_models(study, study.models)
    _check_builds(study, planned)
    return planned


def _expand_models(study: Study, sources: Sequence[str]) -> list[PlannedTrial]:
    """Return the trials of these models of the study."""
    check_threads(study)
    choices = [Choice.parse(text) for text in study.backends] or [Choice(name) for name in installed(study.device)]
    check_kind(study)
    if not choices:
        packages = install("torch", "onnx", "openvino")
        raise UserError(f"no backend that is installed here runs on {study.device}; {packages}, or see `dyno doctor`")
    for choice in choices:
        registry.find(choice.name).check_options(choice.options)
        runtimes(study, choice)
    for name in study.runtime:
        users = {n for choice in choices for n in (choice.runtime, choice.name) if n}
        check_known("backend of a runtime", name, {*users, *STEPS, *registry.names()})
    failed = []
    inspected = _inspect_sources(study, sources)
    if len(sources) == len(study.models):
        _check_sizes(study, inspected)
    by_id: dict[str, PlannedTrial] = {}
    for source in sources:
        try:
            planned = _of_model(study, inspected[source], choices)
        except UserError as e:
            failed.append(e)
            if len(failed) == len(sources):
                raise failed[0] from e
            planned = _of_uninspected(study, source, choices, e)
        for entry in planned:
            by_id.setdefault(entry.trial.id, replace(entry, source=source))
    if study.reference and len(sources) == len(study.models):
        _check_reference(study.reference, list(by_id.values()))
    return list(by_id.values())


def _inspect_sources(study: Study, sources: Sequence[str]) -> dict[str, InspectedModel | UserError]:
    """Inspect these models of the study; return the results, or why a model can't be used."""
    models: dict[str, ModelSpec] = {}
    wrong: dict[str, UserError] = {}
    for source in sources:
        try:
            models[source] = _name_model(study, source, model_spec(study, source))
        except UserError as e:
            wrong[source] = e
    return {**wrong, **inspect_models(study, models)}


def _of_model(study: Study, inspected: InspectedModel | UserError, choices: list[Choice]) -> list[PlannedTrial]:
    """Return the trials of one model, after decoding its images."""
    if isinstance(inspected, UserError):
        raise inspected
    model, inspection = inspected
    try:
        pairs, counts = sizes(study, inspection), batches(study, inspection)
    except UserError as e:
        raise UserError(f"{model.name}: {e}") from e
    planned = []
    for height, width in pairs:
        data = prepared(study, model, (height, width), inspection.outputs)
        _check_budget(study, model, data, inspection.outputs)
        for batch in counts:
            dims = Dims(batch, height, width, inspection.shapes)
            model_facts = _model_facts(study, inspection, dims, model)
            planned += [
                replace(
                    _check_trial(study, _build_trial(study, choice, model, precision, dims, data)),
                    model_facts=model_facts,
                )
                for choice, precision in _list_configurations(study, choices, model)
            ]
    return planned


def _of_uninspected(study: Study, source: str, choices: list[Choice], error: UserError) -> list[PlannedTrial]:
    """Return rows for a model whose inspection failed, so that the study's other models are measured anyway."""
    try:
        model = _name_model(study, source, model_spec(study, source))
    except UserError:  # there is no such file
        model = _name_model(study, source, ModelSpec(model_name(source), source, channels=study.channels))
    status, reason = (error.status, error.reason) if isinstance(error, InspectionFailed) else ("failed", str(error))
    reason = reason.removeprefix(f"{model.name}: ")
    pairs = [parse_size(size) for size in study.sizes] or [(0, 0)]
    rows = []
    for pair in pairs:
        for batch in study.batches or (1,):
            for choice, precision in _list_configurations(study, choices, model):
                trial = _build_trial(study, choice, model, precision, Dims(batch, *pair), DataSpec())
                rows.append(PlannedTrial(trial, reason, status, uninspected=True))
    return rows


def _name_model(study: Study, source: str, model: ModelSpec) -> ModelSpec:
    """Return the model, named by its whole source if another one has its name: they would share a reference."""
    return replace(model, name=source) if [*map(model_name, study.models)].count(model.name) > 1 else model


def _list_configurations(study: Study, choices: list[Choice], model: ModelSpec) -> list[tuple[Choice, str]]:
    """Return every backend in each of its precisions."""
    default = study.precisions or (model.precision or "fp32",)
    readers = choices if study.backends else [choice for choice in choices if _can_read(choice.name, model)] or choices
    by_route = routed(readers, study.routes, file=bool(model.file))
    return [(choice, precision) for choice in by_route for precision in choice.precisions or default]


def _can_read(name: str, model: ModelSpec) -> bool:
    """Return whether the backend can run the model at all; one that declares no file formats may."""
    return not model.file or registry.find(name).reads(model.file)


def _check_reference(reference: str, planned: list[PlannedTrial]) -> None:
    """Refuse a reference that no trial can be, before anything is measured."""
    trials = [entry.trial for entry in planned]
    if not any(map(references.matcher(reference, trials), trials)):
        configurations = sorted({f"{t.backend}/{t.precision}" for t in trials})
        raise UserError(f"no trial fits the reference {reference!r}; there are {', '.join(configurations)}")


def _check_sizes(study: Study, inspected: dict[str, InspectedModel | UserError]) -> None:
    """Refuse sizes if no model takes an image; beside one that does, the others run without a size."""
    known = [each for each in inspected.values() if not isinstance(each, UserError)]
    if known and not any(any(inspection.size) for _, inspection in known):
        refuse_sizes(study, *known[0])


def _check_builds(study: Study, planned: list[PlannedTrial]) -> None:
    """Refuse several builds if nothing is built, or of a backend whose own number of rounds is smaller."""
    if study.builds == 1:
        return
    if not any(one.trial.plan.builds or _has_builds(one) for one in planned):
        names = ", ".join(dict.fromkeys(one.trial.backend for one in planned))
        raise UserError(
            f"builds is {study.builds}, but what is measured here ({names}) is made the same every time, or was built "
            "already; omit --builds, which is for engines that are tuned by timing (tensorrt)"
        )
    for trial in (one.trial for one in planned):
        if trial.plan.builds > trial.plan.rounds:
            raise UserError(
                f"{trial.backend} has rounds={trial.plan.rounds}, too few for --builds {study.builds}; omit its rounds="
            )


def _has_builds(entry: PlannedTrial) -> bool:
    """Return whether the trial is only refused here, and its backend has builds."""
    return bool(entry.refusal) and BUILD in registry.find(entry.trial.backend).options


def _check_budget(study: Study, model: ModelSpec, data: DataSpec, outputs: int) -> None:
    """Refuse a budget that can't be checked: every trial would seem to be within it."""
    task = tasks.find(model.task)
    for metric in study.budget:
        if metric not in task.metrics:
            other = f"give a budget of {task.metrics[0]}" if task.metrics else "no budget can be checked"
            raise UserError(f"{model.name} is for {model.task}, which has no {metric}; {other}")
        if 0 < outputs < task.least_outputs.get(metric, 0):
            raise UserError(f"{metric} is always met with {outputs} classes; give a budget of {task.metrics[0]}")
    if study.budget and not meta(data)["classes"]:
        raise UserError(f"a budget needs labels, and {study.data} has none; put the images into a folder per class")


def _model_facts(study: Study, inspection: Inspection, dims: Dims, model: ModelSpec) -> dict[str, Any]:
    """Return facts about the model, where known.

    They are the operations of one image at this size, the parameters, a file's name and signature, and whether the
    normalisation of images is a guess.
    """
    counts = {"flops": inspection.flops.get(dims.size, 0), "parameters": inspection.parameters or 0}
    file_facts = (
        {"file": Path(model.file).name, "signature": to_json(inspection.signature)} if inspection.signature else {}
    )
    guessed = (study.data or study.calibration) and not study.mean and inspection.preprocess_guessed
    counted = {name: int(count) for name, count in counts.items() if count}
    return {**counted, **file_facts, **({"preprocess_guessed": True} if guessed else {})}


def _build_trial(study: Study, choice: Choice, model: ModelSpec, precision: str, dims: Dims, data: DataSpec) -> Trial:
    runtime = replace(runtime_of(study, choice), threads=study.threads or system.physical_cores())
    plan = replace(study.plan, rounds=choice.rounds or study.rounds)
    return Trial(model, choice.name, precision, dims, choice.options, None, data, runtime, plan)


def _check_trial(study: Study, trial: Trial) -> PlannedTrial:
    """Return the trial with the recipe of its file, or with the reason why it is refused."""
    engine, python = registry.find(trial.backend), trial.runtime.python
    if library := missing(trial.backend, trial.runtime):
        return PlannedTrial(trial, f"{library} is not installed in {python}; pip install {library}" if python else
                       f"{library} is not installed in this Python; {install(library)}")  # fmt: skip
    if refusal := engine.refuse(trial):
        return PlannedTrial(trial, refusal)
    plan = replace(trial.plan, builds=_count_builds(study, engine, trial))
    return PlannedTrial(replace(trial, recipe=placed(engine.recipe(trial), study), plan=plan))


def _count_builds(study: Study, engine: Backend, trial: Trial) -> int:
    """Return how many builds of its engine a trial goes through.

    That is one if a build was named, else all of the study's, or 0 if the recipe has no build, as for a model that is
    an engine already.
    """
    if BUILD not in engine.options or BUILD in trial.options:
        return int(BUILD in trial.options)
    again = engine.recipe(replace(trial, options={**trial.options, BUILD: 1}))
    return study.builds if again != engine.recipe(trial) else 0
