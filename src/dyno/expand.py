"""A study becomes trials: models looked at, images decoded, every combination listed, refusals given a reason."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dyno.datasets import meta
from dyno.launch import launch
from dyno.prepare import prepared
from dyno.store import cache_dir, code_sha256, makers, sha256_of, versions
from dyno.study import Choice, Study, model_name, parse_shapes, parse_size, runtimes
from dyno.worker import backend, system
from dyno.worker.record import Record, read_record
from dyno.worker.spec import (
    ENGINE_FILES,
    MODEL_FILES,
    DataSpec,
    Dims,
    Job,
    ModelSpec,
    Preprocess,
    Recipe,
    Runtime,
    Trial,
    UserError,
    check_known,
    digest,
    from_json,
)

CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")  # weights, which alone are no model
LOOK_LIBRARIES = ("torch", "torchvision", "timm", "ultralytics", "onnx", "openvino")
HERE = Runtime()
STEPS = ("modelopt",)  # what a file is made with on its way may have an interpreter too


class Died(UserError):
    """The process that looked at a model came to its end: no word of its own, but a crash, no memory or no time."""

    def __init__(self, name: str, record: Record) -> None:
        self.status, self.reason = record.status, f"looking at the model: {record.reason}"
        super().__init__(f"{name}: {record.reason}, when it was looked at")


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
    asked = study if source.endswith(MODEL_FILES) else _sized(study)
    model, found = look(_named(study, source, model_spec(asked, source)), asked)
    try:
        pairs, batches = sizes(asked, found), _batches(study, found)
    except UserError as e:
        raise UserError(f"{model.name}: {e}") from e
    planned = []
    for height, width in pairs:
        data = prepared(study, model, (height, width), found.get("outputs", 0))
        _check_budget(study, model, data, found.get("outputs", 0))
        for batch in batches:
            dims = Dims(batch, height, width, parse_shapes(study.shapes))
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


def _sized(study: Study) -> Study:
    """With the image size that `shapes` gives a module's input: its operations are counted at that."""
    shape = parse_shapes(study.shapes).get("input", ())
    if len(shape) != 4:
        return study
    height, width = shape[2:]
    if any(parse_size(size) != (height, width) for size in study.sizes):
        raise UserError(
            f"shapes give the input {height}x{width} pixels, and sizes {study.sizes[0]}; leave one of them out"
        )
    return replace(study, sizes=(f"{height}x{width}",))


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


def installed(device: str) -> list[str]:
    """The backends that run on the device and whose libraries this Python has."""
    kind = device.split(":")[0]
    return [name for name in backend.names() if kind in backend.find(name).devices and not missing(name)]


def missing(name: str, runtime: Runtime = HERE) -> str:
    """The first library that the backend needs and that runtime lacks, or ""."""
    requires = backend.find(name).requires
    have = versions(runtime, requires)
    return next((either.split("|")[0] for either in requires if not have.keys() & set(either.split("|"))), "")


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


def placed(recipe: Recipe | None, study: Study) -> Recipe | None:
    """The recipe with each step in the interpreter that the study has for the name of its runtime."""
    if recipe is None:
        return None
    place = recipe.runtime
    if place.name in study.runtime:
        named = runtime_of(study, Choice(place.name))
        place = replace(place, python=named.python, env=named.env)
    return replace(recipe, parent=placed(recipe.parent, study), runtime=place)


def runtime_of(study: Study, choice: Choice) -> Runtime:
    """The interpreter, environment and device that the study has for a backend."""
    table = runtimes(study, choice)
    return Runtime(
        name=choice.runtime or "main",
        python=str(table.get("python", "")),
        env={str(k): str(v) for k, v in table.get("env", {}).items()},
        device=study.device,
    )


def _no_model(source: str) -> str:
    """What is wrong with a name that says not where the model comes from."""
    if source.endswith((".yaml", ".yml")):
        return f"model {source!r} says not where it comes from; write ultralytics:{source}"
    if "/" in source or Path(source).is_file() or Path(source).suffix in CHECKPOINTS:
        return (
            f"{source} is no model file ({', '.join(MODEL_FILES)}); weights go with their network "
            f"(torchvision:resnet50 --weights {source}), and a function is FILE.py:FUNCTION"
        )
    return f"model {source!r} says not where it comes from; write torchvision:{source} or timm:{source}"


def model_spec(study: Study, source: str) -> ModelSpec:
    """The model as the user named it, with the hashes of every file that decides what it is."""
    common: dict[str, Any] = {
        "name": model_name(source),
        "pretrained": study.pretrained,
        "seed": study.seed,
        "classes": study.classes,
        "channels": study.channels,
        "preprocess": _normalised(Preprocess(), study),
    }
    if study.weights:
        path = _existing(study.weights, "weights file")
        common |= {"weights": str(path.resolve()), "weights_sha256": sha256_of(path)}
        if study.pretrained:
            raise UserError("--weights and --pretrained are two different sets of weights; give one of them")
    if source.endswith(MODEL_FILES):
        path = _existing(source, "model file")
        return ModelSpec(source=f"file:{path.resolve()}", source_sha256=sha256_of(path), **common)
    if ":" not in source:
        raise UserError(_no_model(source))
    return ModelSpec(source=_absolute(source), source_sha256=_code_sha256(source), **common)


def _normalised(preprocess: Preprocess, study: Study) -> Preprocess:
    """The study's own mean and std; one that does not fit the channels becomes 0.5, so that pixels lie in -1..1."""
    if study.mean:
        return replace(preprocess, mean=study.mean, std=study.std)
    if len(preprocess.mean) == study.channels:
        return preprocess
    return replace(preprocess, mean=(0.5,) * study.channels, std=(0.5,) * study.channels)


def _existing(text: str, what: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise UserError(f"there is no {what} {text}")
    return path


def _absolute(source: str) -> str:
    path, _, function = source.rpartition(":")
    if path == "ultralytics":  # a name of the library's, or the user's own file
        return f"{path}:{Path(function).resolve()}" if Path(function).is_file() else source
    return f"{_existing(path, 'Python file').resolve()}:{function}" if path.endswith(".py") else source


def _code_sha256(source: str) -> str:
    """Hash of the code of a `MODULE:FUNCTION` or `FILE.py:FUNCTION` source; libraries are known by their version."""
    place, _, name = source.rpartition(":")
    if place == "ultralytics":
        return sha256_of(Path(name)) if Path(name).is_file() else ""
    if place.endswith(".py"):
        return sha256_of(Path(place))
    # Looking for a module inside a package runs the package, and a user's may be heavy.
    return code_sha256(place) if "." not in place or place.startswith("dyno.") else ""


def look(model: ModelSpec, study: Study) -> tuple[ModelSpec, dict[str, Any]]:
    """Build the model once in a process of its own: does it exist, do its weights fit, does it take these sizes?

    Returns the model with its own preprocessing, and what was found: `size` [h, w], `batch` (0: any). Cached.
    """
    if model.source.startswith("fake:"):
        return model, {"size": [8, 8], "batch": 0}
    options = {
        "sizes": [list(parse_size(size)) for size in study.sizes],
        "shapes": {name: list(shape) for name, shape in parse_shapes(study.shapes).items()},
        "task": study.task,
    }
    reader = engine_backend(Path(model.file)) if model.file.endswith(ENGINE_FILES) else ""
    where = _looking(model, reader, study)
    libraries = backend.find(reader).requires if reader else LOOK_LIBRARIES
    key = digest([model, options, where, makers(), versions(where, libraries)])[:24]
    folder = cache_dir() / "looks" / key
    record = read_record(folder)
    if record is None or record.status != "ok":
        with tempfile.TemporaryDirectory() as scratch:
            trial = Trial(model, reader, "fp32", Dims(1, 0, 0), runtime=where)
            record = launch(Job("look", where, trial, options=options), Path(scratch) / "look", study.timeout)
            if record.status in ("failed", "skipped"):
                raise UserError(f"{model.name}: {record.reason}")
            if record.status != "ok":
                raise Died(model.name, record)
            _keep(Path(scratch) / "look", folder)
    found = record.facts
    preprocess = _normalised(from_json(Preprocess, found["preprocess"]), study)
    task, points = found.get("task", "classify"), tuple(found.get("keypoints", ()))
    model = replace(model, task=task, classes=found.get("classes", model.classes), keypoints=points)
    return replace(model, preprocess=preprocess, precision=found.get("precision", "")), found


def _looking(model: ModelSpec, name: str, study: Study) -> Runtime:
    """Where a model is looked at: here, but for an engine, which only the backend of that name on its GPU can read."""
    threads = study.threads or system.physical_cores()
    if not name:
        return Runtime(threads=threads)
    named = next((choice for choice in map(Choice.parse, study.backends) if choice.name == name), Choice(name))
    if lacks := missing(name, runtime := replace(runtime_of(study, named), threads=threads)):
        raise UserError(f"{model.name} is an engine of {name}: {lacks} is not installed; give its Python with --python")
    if runtime.device == "cpu":
        raise UserError(f"{model.name} is an engine for a GPU; say which with --device cuda:0")
    return runtime


def engine_backend(path: Path) -> str:
    """The backend whose engine the file is, by its first bytes; TensorRT's where they say nothing."""
    with open(path, "rb") as f:
        return "tensorrt_rtx" if f.read(4) == b"vtrt" else "tensorrt"


def _keep(made: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_bytes((made / "record.json").read_bytes())


def sizes(study: Study, found: dict[str, Any]) -> list[tuple[int, int]]:
    """Heights and widths that the study asks for, or the model's own; one that its file can't take is a `UserError`."""
    fixed = tuple(found["size"]) if found.get("fixed_size") else None
    asked = [parse_size(size) for size in study.sizes]
    wrong = [size for size in asked if fixed and size != fixed]
    if wrong and fixed:
        raise UserError(
            f"the file's image size is fixed at {fixed[0]}x{fixed[1]}; {wrong[0][0]}x{wrong[0][1]} needs another export"
        )
    return asked or [(int(found["size"][0]), int(found["size"][1]))]


def _batches(study: Study, found: dict[str, Any]) -> tuple[int, ...]:
    low, best, high = found.get("batches", (1, 1, math.inf))
    outside = [batch for batch in study.batches if not low <= batch <= high]
    if outside:
        raise UserError(
            f"batch {outside[0]} is outside the engine's profile, {low} to {high}; build it with a wider one"
        )
    fixed = int(found.get("batch", 0))
    wrong = [batch for batch in study.batches if fixed and batch != fixed]
    if wrong:
        raise UserError(f"the file's batch is fixed at {fixed}, not {wrong[0]}; export it again with --batch dynamic")
    return study.batches or (fixed or best,)
