"""Identity of a model: source, weights and code by their hashes, and an inspection in a separate process."""

from __future__ import annotations

import math
import os
import shlex
import tempfile
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno.formatting import format_count
from dyno.jobs.launcher import Tick, launch, stop_jobs_on_error
from dyno.jobs.nvml import DEFAULT_PROCESS_B, HEADROOM, read_available
from dyno.store import (
    beside_its_parts,
    cache_dir,
    code_file,
    find_remembered,
    find_versions,
    good_record,
    list_plugin_modules,
    remember,
    sha256_of,
    worker_code_sha256,
)
from dyno.study import commits, input_options
from dyno.study.interpreters import explain_missing, runtime_of
from dyno.study.model_names import explain_unknown_model, find_file, keeps_weights, model_name, stored_source
from dyno.study.study import Choice, Study, parse_size
from dyno.worker import registry, system
from dyno.worker.inspection import METADATA_FILE, Inspection
from dyno.worker.nets import huggingface
from dyno.worker.nets.local_code import hash_file, sha256_with_imports
from dyno.worker.record import Record, check_regular
from dyno.worker.spec import (
    ENDPOINT_PREFIX,
    NETWORK_FILES,
    SAVED_SUFFIXES,
    TIMM_FOLDER,
    Dims,
    Job,
    ModelSpec,
    Preprocess,
    Runtime,
    Trial,
    UserError,
    digest,
    make_absolute,
)

LIBRARY_FOLDER = "site-packages"  # packages there are identified by version
INSPECTION_LIBRARIES = ("torch", "torchvision", "timm", "ultralytics", "transformers", "onnx", "openvino")


class InspectionFailed(UserError):
    """Error of a model inspection that crashed, timed out or ran out of memory."""

    def __init__(self, name: str, record: Record) -> None:
        self.status, self.reason = record.status, f"model inspection: {record.reason}"
        super().__init__(f"{name}: model inspection: {record.reason}")


def model_spec(study: Study, source: str) -> ModelSpec:
    """Return the model as named by the user, with the hashes of all files that define it."""
    original, source = source, stored_source(commits.checked_out(source))
    first, *rest = source.partition("(")[0].split(",")
    if rest and (":" in first or registry.format_of(first)) and not Path(source).exists():
        raise UserError(f"models are given one by one, without commas: {shlex.join([first, *rest])}")
    fields: dict[str, Any] = {
        "name": model_name(original if commits.split_commit(original)[1] else source),
        "pretrained": study.pretrained and not keeps_weights(source),
        "seed": study.seed,
        "classes": study.classes,
        "channels": study.channels,
        "preprocess": apply_normalisation(Preprocess(), study, len(study.mean) or study.channels),
    }
    if study.weights:
        path = find_file(study.weights, "weights file")
        if study.pretrained:
            raise UserError("--weights and --pretrained can't be used together")
        if not keeps_weights(source):
            fields |= {"weights": str(make_absolute(path)), "weights_sha256": sha256_of(path)}
    if registry.format_of(source):
        sha256 = sha256_of(path := make_absolute(find_file(source, "model file")))
        return ModelSpec(source=f"file:{beside_its_parts(path, sha256)}", source_sha256=sha256, **fields)
    prefix, folder = huggingface.split_folder(source)
    if prefix:
        return _of_folder(prefix, folder, fields)
    if source.endswith(SAVED_SUFFIXES) or source.startswith("saved:"):
        path = find_file(source.removeprefix("saved:"), "saved module")
        # Dyno's own files are in folders named after their content, independent of PyTorch's writer.
        is_own = path.resolve().parent.parent == (cache_dir() / "modules").resolve()
        sha256 = path.resolve().parent.name if is_own else sha256_of(path)
        return ModelSpec(source=f"saved:{make_absolute(path)}", source_sha256=sha256, **fields)
    if ":" not in source:
        raise UserError(explain_unknown_model(source))
    return ModelSpec(
        source=_make_absolute(source), source_sha256=_source_sha256(source, fields.get("weights", "")), **fields
    )


def _of_folder(prefix: str, name: str, fields: dict[str, Any]) -> ModelSpec:
    """Return the model of a Hugging Face or timm folder: a local one with its weights, the hub's only if pretrained."""
    folder = huggingface.locate(prefix, name, fields["pretrained"])
    weights = huggingface.weight_files(folder)
    has_weights = Path(name).is_dir() and bool(weights) and not fields.get("weights")
    fields["pretrained"] = fields["pretrained"] or has_weights
    files = [*sorted(folder.glob("*.json")), *(weights if fields["pretrained"] else ())]
    sha256 = digest([(path.name, sha256_of(path)) for path in files])
    source_prefix = TIMM_FOLDER if prefix in huggingface.TIMM_HUB else prefix
    return ModelSpec(source=f"{source_prefix}{folder}", source_sha256=sha256, **fields)


def apply_normalisation(preprocess: Preprocess, study: Study, channels: int) -> Preprocess:
    """Return the preprocessing with the study's own mean and std, if given.

    Raises `UserError` if they don't fit the channels. Without a value for every channel, one that all share counts,
    else 0.5, so that pixels are in -1..1.
    """
    if study.mean and len(study.mean) != channels:
        raise UserError(
            f"mean and std are {len(study.mean)} numbers each, but the image has {format_count(channels, 'channel')}; "
            "give one for each channel"
        )
    if study.mean:
        return replace(preprocess, mean=study.mean, std=study.std)
    if len(preprocess.mean) == channels:
        return preprocess
    mean, std = (0.5, 0.5) if differs_by_channel(preprocess) else (preprocess.mean[0], preprocess.std[0])
    return replace(preprocess, mean=(mean,) * channels, std=(std,) * channels)


def differs_by_channel(preprocess: Preprocess) -> bool:
    """Return whether the channels have different means or standard deviations."""
    return len({*preprocess.mean}) > 1 or len({*preprocess.std}) > 1


def _make_absolute(source: str) -> str:
    path, _, function = source.rpartition(":")
    if path in NETWORK_FILES:
        return (
            f"{path}:{make_absolute(Path(function))}"
            if check_regular(Path(function), "checkpoint").is_file()
            else source
        )
    return f"{make_absolute(find_file(path, 'Python file'))}:{function}" if path.endswith(".py") else source


def _source_sha256(source: str, weights: str) -> str:
    """Return the hash of the code of a `MODULE:FUNCTION` or `FILE.py:FUNCTION` source, with the files it imports.

    For a library only the module's own file is hashed, because its version identifies the rest; "" without such a file.
    A timm network is identified by the configuration next to its weights.
    """
    config = Path(weights).parent / huggingface.CONFIG_FILE
    if source.startswith("timm:") and weights and config.is_file():
        return sha256_of(config)
    module, _, name = source.rpartition(":")
    if module in NETWORK_FILES:
        return sha256_of(Path(name)) if Path(name).is_file() else ""
    if module.endswith(".py"):
        return sha256_with_imports(Path(module))
    # Finding a module inside a package imports the package, which may be slow for a user's.
    file = code_file(module) if "." not in module or module.startswith("dyno.") else None
    if file is None:
        return ""
    return sha256_of(file) if LIBRARY_FOLDER in file.parts else sha256_with_imports(file)


def inspect_model(model: ModelSpec, study: Study, tick: Tick | None = None) -> tuple[ModelSpec, Inspection]:
    """Build the model once in a separate process, to check that it exists, its weights fit, and it takes these sizes.

    Returns the model with its own preprocessing, and the inspection's result. Cached. `tick` is as in `launch`.
    """
    if model.source.startswith(("fake:", ENDPOINT_PREFIX)):
        apply_normalisation(model.preprocess, study, study.channels)  # raises UserError for a misfit
        # A server describes its inputs when it is used.
        size = (8, 8) if model.source.startswith("fake:") else parse_size(study.sizes[0]) if study.sizes else (0, 0)
        return model, Inspection(size=size)
    options = {
        "sizes": [list(parse_size(size)) for size in study.sizes],
        "overrides": input_options.parse_overrides(study.inputs, study.shapes),
        "task": study.task,
    }
    file_format = registry.format_of(model.file)
    reader = file_format.default_backend(Path(model.file)) if file_format and file_format.on_device else ""
    runtime = _inspection_runtime(model, reader, study)
    libraries = registry.find(reader).requires if reader else INSPECTION_LIBRARIES
    key_runtime = replace(runtime, threads=1)  # the number of threads doesn't change the facts
    metadata_file = Path(model.source.partition(":")[2]).parent / METADATA_FILE
    key_parts = [
        model,
        options,
        key_runtime,
        worker_code_sha256(*list_plugin_modules(file_format)),
        find_versions(runtime, libraries),
    ]
    key = digest([*key_parts, sha256_of(metadata_file) if metadata_file.is_file() else ""])[:24]
    record = good_record(find_remembered("inspections", key))
    if record is None or (record.inspection and _have_changed(record.inspection.files)):
        with tempfile.TemporaryDirectory() as scratch:
            trial = Trial(model, reader, "fp32", Dims(1, 0, 0), runtime=runtime)
            job = Job("inspect", runtime, trial, options=options)
            record = launch(job, Path(scratch) / "job", study.timeout, tick)
            if record.status in ("failed", "skipped"):
                raise UserError(f"{model.name}: {record.reason}")
            if record.status != "ok":
                raise InspectionFailed(model.name, record)
            remember(Path(scratch) / "job", "inspections", key)
    inspection = record.inspection or Inspection()
    files = inspection.files
    channels = study.channels if inspection.channels is None else inspection.channels
    _refuse_settings(model, study, inspection, channels)
    return replace(
        model,
        preprocess=apply_normalisation(_choose_preprocess(inspection, study), study, channels),
        channels=channels,
        precision=inspection.precision,
        task=inspection.task or model.task,
        classes=model.classes if inspection.classes is None else inspection.classes,
        keypoints=inspection.keypoints,
        inputs=inspection.inputs,
        outputs=inspection.declared,
        files_sha256=digest(sorted([Path(name).name, sha] for name, sha in files.items())) if files else "",
    ), inspection


def _choose_preprocess(inspection: Inspection, study: Study) -> Preprocess:
    """Return the model's preprocessing; of a file that normalises images itself, one to pixels in its range.

    Random images keep the usual one, so that the file is comparable with the network that it was exported from.
    """
    preprocess = inspection.preprocess or Preprocess()
    if inspection.preprocess_guessed and inspection.largest_pixel and (study.data or study.calibration):
        return replace(preprocess, mean=(0.0,) * 3, std=(1 / inspection.largest_pixel,) * 3)
    return preprocess


def _refuse_settings(model: ModelSpec, study: Study, inspection: Inspection, channels: int) -> None:
    """Raise `UserError` for classes, sizes or channels that the model doesn't have."""
    if model.classes and inspection.outputs not in (0, model.classes):
        raise UserError(
            f"{model.name} has {inspection.outputs} classes, not {model.classes}; omit --classes, which shapes the "
            "libraries' models and functions that take num_classes"
        )
    if len(study.models) == 1:
        refuse_sizes(study, model, inspection)
        if study.channels not in (channels, Study.channels):
            expected = format_count(channels, "channel")
            raise UserError(f"{model.name} takes images of {expected}, not {study.channels}; omit --channels")


def _have_changed(files: Mapping[str, str]) -> bool:
    """Return whether a file read by the model's code has changed or is gone."""
    return any(not Path(name).is_file() or hash_file(name) != sha256 for name, sha256 in files.items())


def _inspection_runtime(model: ModelSpec, name: str, study: Study) -> Runtime:
    """Return the runtime for inspecting a model: this one, or for an engine its backend `name`'s, on its GPU."""
    threads = system.physical_cores()
    if not name:
        return Runtime(threads=threads)
    choice = next((choice for choice in map(Choice.parse, study.backends) if choice.name == name), Choice(name))
    if reason := explain_missing(name, runtime := replace(runtime_of(study, choice), threads=threads)):
        raise UserError(f"{model.name} is an engine of {name}: {reason}")
    if runtime.device == "cpu" and "cpu" not in registry.find(name).devices:
        raise UserError(f"{model.name} is an engine for a GPU; choose the GPU with --device cuda:0")
    return runtime


def refuse_sizes(study: Study, model: ModelSpec, inspection: Inspection) -> None:
    """Raise `UserError` for image sizes with a model that takes no image."""
    if study.sizes and not any(inspection.size):
        raise UserError(f"{model.name} takes no image, so a size doesn't apply to it; omit it")


def list_sizes(study: Study, inspection: Inspection) -> list[tuple[int, int]]:
    """Return the requested (height, width) pairs, or the model's own; (0, 0) if it takes no image.

    Raises `UserError` for a size that the model's file can't take.
    """
    if not any(inspection.size):
        return [inspection.size]
    fixed = inspection.size if inspection.fixed_size else None
    requested = [parse_size(size) for size in study.sizes]
    misfits = [size for size in requested if fixed and size != fixed]
    if misfits and fixed:
        raise UserError(
            f"the file's image size is fixed at {fixed[0]}x{fixed[1]}; {misfits[0][0]}x{misfits[0][1]} needs another "
            "export"
        )
    return requested or [inspection.size]


def list_batches(study: Study, inspection: Inspection) -> tuple[int, ...]:
    low, best, high = inspection.batches or (1, 1, math.inf)
    misfits = [batch for batch in study.batches if not low <= batch <= high]
    if misfits and inspection.batch_reason:
        raise UserError(f"{inspection.batch_reason}, not {misfits[0]}; export it with a wider range")
    if misfits:
        raise UserError(
            f"batch {misfits[0]} is outside the engine's profile, {low} to {high}; build it with a wider one"
        )
    fixed = inspection.batch
    wrong = [batch for batch in study.batches if fixed and batch != fixed]
    if wrong:
        if inspection.batch_reason:
            raise UserError(f"{inspection.batch_reason}; omit the batch, {wrong[0]}")
        if inspection.usual_batch is not None:
            raise UserError(f"the model takes only batch {fixed}, not {wrong[0]}; omit the batch")
        raise UserError(f"the file's batch is fixed at {fixed}, not {wrong[0]}; export it again with --batch dynamic")
    return study.batches or (fixed or (best if inspection.usual_batch is None else inspection.usual_batch),)


# Parallel inspection of a study's models: nothing is timed, and most time goes into importing libraries.

InspectedModel = tuple[ModelSpec, Inspection]


def inspect_models(study: Study, models: Mapping[str, ModelSpec]) -> dict[str, InspectedModel | UserError]:
    """Inspect each model; return by key the result, or the error that makes a model unusable.

    Models are inspected in parallel, as many as processors and memory allow, each on its share of the processors. After
    a failure beside others, a model is inspected again alone, because it may have lacked memory or time.
    """
    workers = min(len(models), len(os.sched_getaffinity(0)), int(read_available() / (HEADROOM * DEFAULT_PROCESS_B)))
    results: dict[str, InspectedModel | UserError] = {**_side_by_side(study, models, workers)} if workers > 1 else {}
    for key in models.keys() - results.keys():
        try:
            results[key] = inspect_model(models[key], study)
        except UserError as e:
            results[key] = e
    return results


def _side_by_side(study: Study, models: Mapping[str, ModelSpec], max_parallel: int) -> dict[str, InspectedModel]:
    """Inspect up to `max_parallel` models in parallel; return the successful ones. An interrupt stops all."""
    shares = deque(_split_processors(max_parallel))

    def keep_to_share() -> None:
        """Confine this thread's processes to a share: with threads for all cores, they would wait for each other."""
        os.sched_setaffinity(0, shares.popleft())

    results = {}
    with ThreadPoolExecutor(max_parallel, initializer=keep_to_share) as pool, stop_jobs_on_error(pool) as tick:
        pending = {key: pool.submit(inspect_model, model, study, tick) for key, model in models.items()}
        for key, future in pending.items():
            with suppress(UserError):
                results[key] = future.result()
    return results


def _split_processors(count: int) -> list[list[int]]:
    """Split this process's processors into `count` shares, keeping threads of a core adjacent."""
    order = [cpu for core in system.core_threads() for cpu in core]
    return [order[k * len(order) // count : (k + 1) * len(order) // count] for k in range(count)]
