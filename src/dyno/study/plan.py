"""Plan of a study: models inspected, images decoded, all combinations listed as trials, refusals with a reason."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dyno.data import read_meta
from dyno.results import correctness
from dyno.results.notes import ModelFacts
from dyno.study.defaults import check_kind, check_threads, check_weights
from dyno.study.images import check_images, prepare_images, remove_crop
from dyno.study.interpreters import explain_missing, list_installed, place_recipe, runtime_of
from dyno.study.model_info import (
    InspectedModel,
    InspectionFailed,
    differs_by_channel,
    inspect_models,
    list_batches,
    list_sizes,
    model_spec,
    refuse_sizes,
)
from dyno.study.model_names import model_name
from dyno.study.study import Choice, Study, find_runtime, parse_size
from dyno.worker import registry, system, tasks
from dyno.worker.backend import Backend
from dyno.worker.extras import install
from dyno.worker.facts.files import MakerFacts
from dyno.worker.inspection import Inspection
from dyno.worker.spec import (
    BUILD_OPTIONS,
    DataSpec,
    Dims,
    ModelSpec,
    Option,
    Recipe,
    Trial,
    UserError,
    check_known,
    digest,
)

# A planned trial, and a part of a plan.


@dataclass(frozen=True)
class PlannedTrial:
    """A trial, and the reason for its refusal ("" if it isn't refused)."""

    trial: Trial
    refusal: str = ""
    status: str = "skipped"  # status of a refused trial
    model_facts: ModelFacts = field(default_factory=ModelFacts)
    uninspected: bool = False  # the model's inspection failed
    source: str = ""  # its model, as in the study


@dataclass(frozen=True)
class TrialSelection:
    """The requested trials of a study, by id.

    `sources` are their models as in the study; if given, no other model is planned.
    """

    trials: Collection[str]
    sources: Collection[str] = ()


# Routes to an ONNX file in the command line's notation: `--routes dynamo,torchscript+static`.

ROUTE_OPTIONS = ("exporter", "opset", "static", "fold")  # options that name a route
ROUTE_PARTS = ("dynamo", "torchscript", "static", "fold", "opsetN")
ALL_ROUTES = ("dynamo", "torchscript", "dynamo+static+fold", "torchscript+static+fold")
USUAL_ROUTE = "usual"  # the default route alone
# Operators that all exporters write alike: a graph of only these is the same by every route. Exporters differ in
# attention, normalisation, and everything that depends on shapes.
MERGED_COMBINATIONS = frozenset(
    "Add AveragePool BatchNormalization Clip Concat Constant Conv ConvTranspose Div Elu Flatten Gemm GlobalAveragePool "
    "GlobalMaxPool HardSigmoid HardSwish Identity LeakyRelu MaxPool Mul PRelu ReduceMean Relu Reshape Sigmoid Softmax "
    "Squeeze Sub Tanh Unsqueeze".split()
)


def options_of(text: str) -> dict[str, Option]:
    """Parse a route, `torchscript+opset17+static+fold`, into backend options; `UserError` for an unknown route."""
    options: dict[str, Option] = {}
    if text == USUAL_ROUTE:
        return options
    for part in text.split("+"):
        if part in ("dynamo", "torchscript"):
            options["exporter"] = part
        elif part in ("static", "fold"):
            options[part] = True
        elif part.startswith("opset") and part[len("opset") :].isdecimal():
            options["opset"] = int(part[len("opset") :])
        else:
            notation = f"{', '.join(ROUTE_PARTS)}, joined by +, or is {USUAL_ROUTE} or all"
            raise UserError(f"unknown route {text!r}; a route is made of {notation}")
    return options


def add_routes(choices: list[Choice], routes: tuple[str, ...], *, file: bool = False) -> list[Choice]:
    """Return each backend that reads ONNX once per route (`all`: the most different ones), others unchanged.

    For a `file`, which is already exported, only routes without an exporter apply.
    """
    names = [name for route in routes for name in (ALL_ROUTES if route == "all" else (route,))]
    if file:
        names = [name for name in names if not {"dynamo", "torchscript"} & set(name.split("+"))]
        names = ["fold", *names] if "all" in routes else names
    by_route = []
    for choice in choices:
        can_read = "exporter" in registry.find(choice.name).options
        by_route += (
            [replace(choice, options={**choice.options, **options_of(name)}) for name in names]
            if can_read and names
            else [choice]
        )
    return by_route


def list_other_routes(made_by: MakerFacts, is_folded: bool, program: bool = False) -> tuple[str, ...]:
    """Return the routes that may give an engine another graph than the one exported first.

    `is_folded` tells whether the engine's usual route fixes and folds shapes anyway, `program` whether the model is a
    torch.export program: PyTorch can't trace its free batch.
    """
    if made_by.operators.keys() <= MERGED_COMBINATIONS:
        return ()
    exporters = () if program or made_by.exporter == "torchscript" else ("torchscript",)
    if is_folded:
        return tuple(f"{name}+static+fold" for name in exporters)
    return (*exporters, f"{made_by.exporter}+static+fold")


# Two sides of a comparison: trials distinguished by side and name, and their pairs.


def pair_sides(sides: Mapping[str, Sequence[PlannedTrial]]) -> list[PlannedTrial]:
    """Return the trials of both sides, each with its side; two models of the same name are named by their files.

    Raises `UserError` if the sides have no pair.
    """
    names: dict[str, set[str]] = {}
    for entry in (entry for entries in sides.values() for entry in entries):
        names.setdefault(entry.trial.model.name, set()).add(digest(entry.trial.model))
    shared_names = {name for name, models in names.items() if len(models) > 1}
    _check_sides(sides)
    trials = []
    for side, entries in sides.items():
        for entry in entries:
            model = entry.trial.model
            trial = rename_model(entry.trial, place_of(model)) if model.name in shared_names else entry.trial
            trials.append(replace(entry, trial=replace(trial, side=side)))
    return trials


def rename_model(trial: Trial, name: str) -> Trial:
    """Return the trial with its model renamed, also in the recipes of its files."""

    def rename_recipe(old: Recipe | None) -> Recipe | None:
        if old is None:
            return None
        model = replace(old.model, name=name)
        return replace(old, model=model, parent=rename_recipe(old.parent), fallback=rename_recipe(old.fallback))

    return replace(trial, model=replace(trial.model, name=name), recipe=rename_recipe(trial.recipe))


def place_of(model: ModelSpec) -> str:
    """Return what distinguishes models of the same name: the file, or the whole source."""
    return os.path.relpath(model.file) if model.file else model.source


def _check_sides(sides: Mapping[str, Sequence[PlannedTrial]]) -> None:
    """Raise `UserError` if the sides share no batch and size, or no configuration."""
    a, b = sides.values()
    dims = [{(entry.trial.dims.batch, entry.trial.dims.label) for entry in side} for side in (a, b)]
    if not dims[0] & dims[1]:
        in_a, in_b = (", ".join(f"batch {n}{f', size {size}' * bool(size)}" for n, size in sorted(d)) for d in dims)
        raise UserError(f"A runs at {in_a} and B at {in_b}, so nothing can be compared; give --batch and --size")
    configurations = [{f"{entry.trial.variant} {entry.trial.precision}" for entry in side} for side in (a, b)]
    if not configurations[0] & configurations[1]:
        in_a, in_b = (", ".join(sorted(names)) for names in configurations)
        raise UserError(f"A runs as {in_a} and B as {in_b}; give the --backend and --precision of both")


SEPARATE_STEPS = ("modelopt", "litert_torch")  # steps with their own interpreter


def expand(study: Study, sources: Collection[str] = ()) -> list[PlannedTrial]:
    """Return every trial of the study in a fixed order; raise `UserError` for unusable input before anything runs.

    For a comparison, return the trials of both sides, with at least one pair. With `sources`, return only the trials of
    these models, for a study already planned as a whole: checks over all models are not repeated.
    """
    if sources:
        return _expand_models(study, [source for source in study.models if source in sources])
    for side in study.sides.values():
        check_weights(side, [source for each in study.sides.values() for source in each.models])
    if study.baseline:
        entries = pair_sides(
            {side: _expand_models(side_study, side_study.models) for side, side_study in study.sides.items()}
        )
    else:
        entries = _expand_models(study, study.models)
    _check_builds(study, entries)
    return entries


def _expand_models(study: Study, sources: Sequence[str]) -> list[PlannedTrial]:
    check_threads(study)
    # Backends with their own Python run even if the library is missing here.
    choices = [Choice.parse(text) for text in study.backends or list_installed(study.device, study.runtime)]
    check_kind(study)
    if not choices:
        packages = install("torch", "onnx", "openvino")
        raise UserError(f"no backend that is installed here runs on {study.device}; {packages}, or see `dyno doctor`")
    for choice in choices:
        registry.find(choice.name).check_options(choice.options)
        find_runtime(study, choice)
    for name in study.runtime:
        users = {n for choice in choices for n in (choice.runtime, choice.name) if n}
        check_known("backend of a runtime", name, {*users, *SEPARATE_STEPS, *registry.list_backends()})
    errors = []
    inspections = _inspect_sources(study, sources)
    if len(sources) == len(study.models):
        _check_sizes(study, inspections)
    by_id: dict[str, PlannedTrial] = {}
    for source in sources:
        try:
            entries = _of_model(study, inspections[source], choices)
        except UserError as e:
            errors.append(e)
            if len(errors) == len(sources):
                raise errors[0] from e
            entries = _of_uninspected(study, source, choices, e)
        for entry in entries:
            by_id.setdefault(entry.trial.id, replace(entry, source=source))
    if study.reference and len(sources) == len(study.models):
        _check_reference(study.reference, list(by_id.values()))
    return list(by_id.values())


def _inspect_sources(study: Study, sources: Sequence[str]) -> dict[str, InspectedModel | UserError]:
    """Inspect these models of the study; return the results, or why a model can't be used."""
    models: dict[str, ModelSpec] = {}
    errors: dict[str, UserError] = {}
    for source in sources:
        try:
            models[source] = _name_model(study, source, model_spec(study, source))
        except UserError as e:
            errors[source] = e
    return {**errors, **inspect_models(study, models)}


def _of_model(study: Study, result: InspectedModel | UserError, choices: list[Choice]) -> list[PlannedTrial]:
    """Return the trials of one model, after decoding its images."""
    if isinstance(result, UserError):
        raise result
    model, inspection = result
    try:
        sizes, batches = list_sizes(study, inspection), list_batches(study, inspection)
    except UserError as e:
        raise UserError(f"{model.name}: {e}") from e
    accepted: list[PlannedTrial] = []
    refusals: list[PlannedTrial] = []
    original = model
    for height, width in sizes:
        model = remove_crop(study, original, inspection, (height, width))
        data = prepare_images(study, model, (height, width), inspection.outputs)
        check_images(study, model, inspection, data)
        _check_budget(study, model, data, inspection.outputs)
        for batch in batches:
            dims = Dims(batch, height, width, inspection.shapes)
            model_facts = _model_facts(study, inspection, dims, model)
            for choice, precision in _list_configurations(study, choices, model, data):
                entry = _check_trial(study, _build_trial(study, choice, model, precision, dims, data))
                is_unsupported = precision not in registry.find(choice.name).precisions
                is_unasked = study.adds_precisions and (is_unsupported or precision != _own_precision(model))
                rows = refusals if entry.refusal and is_unasked else accepted
                rows.append(replace(entry, model_facts=model_facts))
    return accepted or refusals  # the reasons, for a model that nothing here can run


def _of_uninspected(study: Study, source: str, choices: list[Choice], error: UserError) -> list[PlannedTrial]:
    """Return rows for a model whose inspection failed, so that the study's other models are still measured."""
    try:
        model = _name_model(study, source, model_spec(study, source))
    except UserError:  # no such file
        model = _name_model(study, source, ModelSpec(model_name(source), source, channels=study.channels))
    status, reason = (error.status, error.reason) if isinstance(error, InspectionFailed) else ("failed", str(error))
    reason = reason.removeprefix(f"{model.name}: ")
    sizes = [parse_size(size) for size in study.sizes] or [(0, 0)]
    rows = []
    for size in sizes:
        for batch in study.batches or (1,):
            for choice, precision in _list_configurations(study, choices, model):
                trial = _build_trial(study, choice, model, precision, Dims(batch, *size), DataSpec())
                rows.append(PlannedTrial(trial, reason, status, uninspected=True))
    return rows


def _name_model(study: Study, source: str, model: ModelSpec) -> ModelSpec:
    """Return the model, named by its whole source if another model has its name: they would share a reference."""
    return replace(model, name=source) if [*map(model_name, study.models)].count(model.name) > 1 else model


def _list_configurations(
    study: Study, choices: list[Choice], model: ModelSpec, data: DataSpec | None = None
) -> list[tuple[Choice, str]]:
    """Return every backend in each of its precisions.

    If the study names neither, an fp32 model also runs in fp16 on a GPU, in bf16 on a CPU with bf16 arithmetic, and in
    int8 if `data` has calibration images.
    """
    default = study.precisions or (_own_precision(model),)
    if study.adds_precisions and default == ("fp32",):
        is_cpu = study.device.partition(":")[0] == "cpu"
        half_precision = ("bf16",) if is_cpu and system.has_arithmetic("bf16") else () if is_cpu else ("fp16",)
        has_calibration = data is not None and data.folder and read_meta(data)["splits"].get("calibration")
        default += half_precision + (("int8",) if has_calibration else ())
    compatible = [choice for choice in choices if study.backends or _can_read(choice.name, model)]
    kind = registry.format_of(model.file) if model.file else None
    # Another Python may have the backend that reads the file.
    readers = compatible or ([Choice(kind.default_backend(Path(model.file)))] if kind else choices)
    by_route = add_routes(readers, study.routes, file=bool(model.file))
    return [(choice, precision) for choice in by_route for precision in choice.precisions or default]


def _own_precision(model: ModelSpec) -> str:
    return model.precision or "fp32"


def _can_read(name: str, model: ModelSpec) -> bool:
    """Return whether the backend can run the model; backends without declared file formats may."""
    return not model.file or registry.find(name).reads(model.file)


def _check_reference(reference: str, entries: list[PlannedTrial]) -> None:
    """Raise `UserError` for a reference that fits no trial, before anything is measured."""
    trials = [entry.trial for entry in entries]
    if not any(map(correctness.make_matcher(reference, trials), trials)):
        configurations = sorted({f"{t.backend}/{t.precision}" for t in trials})
        raise UserError(f"no trial fits the reference {reference!r}; there are {', '.join(configurations)}")


def _check_sizes(study: Study, inspections: dict[str, InspectedModel | UserError]) -> None:
    """Raise `UserError` for sizes if no model takes an image; if any does, the others run without a size."""
    results = [each for each in inspections.values() if not isinstance(each, UserError)]
    if results and not any(any(inspection.size) for _, inspection in results):
        refuse_sizes(study, *results[0])


def _check_builds(study: Study, entries: list[PlannedTrial]) -> None:
    """Raise `UserError` for several builds if nothing is built, or if a backend's own number of rounds is smaller."""
    if study.builds == 1:
        return
    if not any(entry.trial.plan.builds or _has_builds(entry) for entry in entries):
        names = ", ".join(dict.fromkeys(entry.trial.backend for entry in entries))
        raise UserError(
            f"builds is {study.builds}, but the engines here ({names}) are the same in every build, or built already; "
            f"omit --builds, which is for engines tuned by timing (tensorrt)"
        )
    for trial in (entry.trial for entry in entries):
        if trial.plan.builds > trial.plan.rounds:
            raise UserError(
                f"{trial.backend} has rounds={trial.plan.rounds}, too few for --builds {study.builds}; omit its rounds="
            )


def _has_builds(entry: PlannedTrial) -> bool:
    """Return whether the trial is only refused here, and its backend has builds."""
    return bool(entry.refusal) and BUILD_OPTIONS in registry.find(entry.trial.backend).options


def _check_budget(study: Study, model: ModelSpec, data: DataSpec, outputs: int) -> None:
    """Raise `UserError` for a budget that can't be checked: every trial would seem to be within it."""
    task = tasks.find_task(model.task)
    for metric in study.budget:
        if metric not in task.metrics:
            advice = f"give a budget of {task.metrics[0]}" if task.metrics else "no budget can be checked"
            raise UserError(f"{model.name} is for {model.task}, which has no {metric}; {advice}")
        if 0 < outputs < task.least_outputs.get(metric, 0):
            raise UserError(f"{metric} is always met with {outputs} classes; give a budget of {task.metrics[0]}")
    if study.budget and not read_meta(data)["classes"]:
        raise UserError(f"a budget needs labels, and {study.data} has none; put the images into a folder per class")


def _model_facts(study: Study, inspection: Inspection, dims: Dims, model: ModelSpec) -> ModelFacts:
    has_images = bool(study.data or study.calibration)
    # Functions' networks learn digits by `dyno demo` and `dyno data train`, from pixels prepared like these.
    by_training = study.data == "digits" and not model.file and not model.source.startswith("saved:")
    preprocess, is_guess = inspection.preprocess, inspection.preprocess_guessed
    if preprocess and not model.file and len(preprocess.mean) != model.channels:  # a library's, of colours, for grey
        is_guess = is_guess or differs_by_channel(preprocess)
    return ModelFacts(
        flops=int(inspection.flops.get(dims.size, 0)),
        parameters=int(inspection.parameters or 0),
        file=Path(model.file).name if inspection.signature else "",
        signature=inspection.signature,
        preprocess_guessed=(
            has_images and not study.mean and is_guess and not by_training and not inspection.largest_pixel
        ),
        size_guessed=not study.sizes and inspection.size_guessed,
        images_unchecked=inspection.unchecked_images if has_images else "",
    )


def _build_trial(study: Study, choice: Choice, model: ModelSpec, precision: str, dims: Dims, data: DataSpec) -> Trial:
    runtime = replace(runtime_of(study, choice), threads=study.threads or system.physical_cores())
    plan = replace(study.plan, rounds=choice.rounds or study.rounds)
    return Trial(model, choice.name, precision, dims, choice.options, None, data, runtime, plan)


def _check_trial(study: Study, trial: Trial) -> PlannedTrial:
    """Return the trial with its file's recipe, or with the reason for its refusal."""
    engine = registry.find(trial.backend)
    if refusal := explain_missing(trial.backend, trial.runtime) or engine.refuse(trial):
        return PlannedTrial(trial, refusal)
    plan = replace(trial.plan, builds=_count_builds(study, engine, trial))
    return PlannedTrial(replace(trial, recipe=place_recipe(engine.recipe(trial), study), plan=plan))


def _count_builds(study: Study, engine: Backend, trial: Trial) -> int:
    """Return the number of builds of its engine that a trial goes through.

    1 if a build was named, else all of the study's; 0 if the recipe has no build, as for a model that already is an
    engine.
    """
    if BUILD_OPTIONS not in engine.options or BUILD_OPTIONS in trial.options:
        return int(BUILD_OPTIONS in trial.options)
    build_recipe = engine.recipe(replace(trial, options={**trial.options, BUILD_OPTIONS: 1}))
    return study.builds if build_recipe != engine.recipe(trial) else 0
