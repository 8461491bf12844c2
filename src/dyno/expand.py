"""A study becomes trials: models looked at, images decoded, every combination listed, refusals given a reason."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from dyno.datasets import meta
from dyno.interpreters import installed, missing, placed, runtime_of
from dyno.model_info import Died, batches, file_shapes, look, model_spec, sizes
from dyno.prepare import prepared
from dyno.study import Choice, Study, model_name, parse_size, runtimes
from dyno.worker import backend, system
from dyno.worker.spec import (
    DataSpec,
    Dims,
    ModelSpec,
    Trial,
    UserError,
    check_known,
)

STEPS = ("modelopt",)  # what a file is made with on its way may have an interpreter too


@dataclass(frozen=True)
class Planned:
    """A trial, and why it will not be run ("" when it will)."""

    trial: Trial
    refusal: str = ""
    status: str = "skipped"  # of a trial that will not run
    seen: dict[str, int] = field(default_factory=dict)  # what the look at the model counted: flops, parameters


def expand(study: Study) -> list[Planned]:
    """Every trial of the study in a fixed order; input that can't be used is a `UserError` before anything runs."""
    choices = [Choice.parse(text) for text in study.backends] or [Choice(name) for name in installed(study.device)]
    names = {*backend.names(), *(choice.name for choice in choices)}
    if study.device.partition(":")[0] not in {kind for name in names for kind in backend.find(name).devices}:
        raise UserError(f"unknown device {study.device!r}; write cpu, or cuda:0 for the first GPU")
    if not choices:
        raise UserError(f"no backend that is installed here runs on {study.device}; `dyno doctor` lists them")
    for choice in choices:
        known = backend.find(choice.name).options
        for option in choice.options:
            check_known(f"option of {choice.name}", option, known)
        runtimes(study, choice)
    for name in study.runtime:
        users = {n for choice in choices for n in (choice.runtime, choice.name) if n}
        check_known("backend of a runtime", name, {*users, *STEPS, *backend.names()})
    planned = []
    for source in study.models:
        try:
            planned += _of_model(study, source, choices)
        except Died as e:
            if len(study.models) == 1:
                raise
            planned += _of_none(study, source, choices, e)
    if study.reference:
        _check_reference(study.reference, planned)
    return list({p.trial.id: p for p in planned}.values())


def _of_model(study: Study, source: str, choices: list[Choice]) -> list[Planned]:
    """The trials of one model, which is looked at and whose images are decoded."""
    model, found = look(_named(study, source, model_spec(study, source)), study)
    try:
        pairs, counts = sizes(study, found), batches(study, found)
    except UserError as e:
        raise UserError(f"{model.name}: {e}") from e
    planned = []
    for height, width in pairs:
        data = prepared(study, model, (height, width), found.get("outputs", 0))
        _check_budget(study, model, data, found.get("outputs", 0))
        for batch in counts:
            dims = Dims(batch, height, width, file_shapes(study, model, batch))
            planned += [
                replace(_checked(study, _trial(study, choice, model, precision, dims, data)), seen=_seen(found, dims))
                for choice, precision in _ways(study, choices, model)
            ]
    return planned


def _of_none(study: Study, source: str, choices: list[Choice], died: Died) -> list[Planned]:
    """Rows for a model that died when it was looked at: the other models of the study are measured all the same."""
    model = _named(study, source, model_spec(study, source))
    pairs = [parse_size(size) for size in study.sizes] or [(0, 0)]
    rows = []
    for pair in pairs:
        for batch in study.batches or (1,):
            for choice, precision in _ways(study, choices, model):
                trial = _trial(study, choice, model, precision, Dims(batch, *pair), DataSpec())
                rows.append(Planned(trial, died.reason, died.status))
    return rows


def _named(study: Study, source: str, model: ModelSpec) -> ModelSpec:
    """Two models of one name would share a table and a reference: they go by their whole source."""
    return replace(model, name=source) if [*map(model_name, study.models)].count(model.name) > 1 else model


def _ways(study: Study, choices: list[Choice], model: ModelSpec) -> list[tuple[Choice, str]]:
    """Every backend in every precision that is asked of it."""
    usual = study.precisions or (model.precision or "fp32",)
    return [(choice, precision) for choice in choices for precision in choice.precisions or usual]


def _check_reference(wanted: str, planned: list[Planned]) -> None:
    """Refuse a reference that no trial can be, before anything is measured; see `analysis.references.references`."""
    name, _, precision = wanted.replace("/", ":").replace(" ", ":").partition(":")
    for t in (one.trial for one in planned):
        if name in (t.backend, t.variant) and precision in ("", t.precision):
            return
        if len(wanted) >= 4 and t.id.startswith(wanted):
            return
    ways = sorted({f"{one.trial.backend}/{one.trial.precision}" for one in planned})
    raise UserError(f"no trial fits the reference {wanted!r}; there are {', '.join(ways)}")


def _check_budget(study: Study, model: ModelSpec, data: DataSpec, outputs: int) -> None:
    """Refuse a budget that nothing here could be held against: everything would seem to be within it."""
    fitting = ("top1", "top5") if model.task == "classify" else ("mAP",)
    for metric in study.budget:
        if metric not in fitting:
            raise UserError(f"{model.name} is for {model.task}, which {metric} says nothing of; {fitting[0]} does")
        if metric == "top5" and 0 < outputs < 5:
            raise UserError(f"top5 says nothing of {outputs} classes; give a budget of top1")
    if study.budget and not meta(data)["classes"]:
        raise UserError(f"a budget needs labels, and {study.data} has none; put the images into a folder per class")


def _seen(found: dict[str, Any], dims: Dims) -> dict[str, int]:
    """Operations of one image at that size, and parameters, where the look could count them."""
    counts = {"flops": found.get("flops", {}).get(dims.size, 0), "parameters": found.get("parameters", 0)}
    return {name: int(count) for name, count in counts.items() if count}


def _trial(study: Study, choice: Choice, model: ModelSpec, precision: str, dims: Dims, data: DataSpec) -> Trial:
    runtime = replace(runtime_of(study, choice), threads=study.threads or system.physical_cores())
    plan = replace(study.plan, rounds=choice.rounds or study.rounds)
    return Trial(model, choice.name, precision, dims, choice.options, None, data, runtime, plan)


def _checked(study: Study, trial: Trial) -> Planned:
    """The trial with the recipe of its file, or why it will not be run."""
    engine, python = backend.find(trial.backend), trial.runtime.python
    if lacks := missing(trial.backend, trial.runtime):
        return Planned(trial, f"{lacks} is not installed in {python or 'this Python'}; pip install {lacks}")
    if refusal := engine.refuse(trial):
        return Planned(trial, refusal)
    return Planned(replace(trial, recipe=placed(engine.recipe(trial), study)))
