"""Defaults for a single model, as in `dyno time`, `dyno eval` and `dyno diff`: its settings, and its run folder."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from dyno.store import gpu_identity
from dyno.study.model_names import keeps_weights, model_name, parse_form
from dyno.study.study import Choice, Study, name_fields
from dyno.worker import registry
from dyno.worker.extras import name_lacking
from dyno.worker.option_values import check_types
from dyno.worker.spec import ENDPOINT_PREFIX, FIXED, SAVED_SUFFIXES, UserError, check_known

# Checks of a command before anything is trained, measured or written.

TEXT_FORMATS = ("text", "markdown", "csv", "json", "html")
PARQUET_FORMAT = "parquet"
SUFFIX_FORMATS = {
    ".txt": "text",
    ".md": "markdown",
    ".csv": "csv",
    ".json": "json",
    ".html": "html",
    ".parquet": PARQUET_FORMAT,
}
TRACKERS = ("mlflow", "wandb", "tensorboard")  # also the names of their libraries


def is_installed(library: str) -> bool:
    """Return whether a library can be imported; a folder of its name, as left behind by trackers, doesn't count."""
    spec = find_spec(library)
    return spec is not None and spec.origin is not None


def find_format(file: str, format: str = "") -> str:
    """Return the format for writing a table into the file: as given, or by the file's suffix.

    Raises `UserError` for an unknown suffix, Parquet without a file, and a missing library.
    """
    suffix = Path(file).suffix
    result = format or SUFFIX_FORMATS.get(suffix, "" if file else "text")
    if not result:
        raise UserError(
            f"{file} has an unknown ending {suffix!r}; known: {', '.join(SUFFIX_FORMATS)}, or give --format"
        )
    check_known("format", result, (*TEXT_FORMATS, PARQUET_FORMAT))
    if result == PARQUET_FORMAT and not file:
        raise UserError("Parquet is not for a terminal; give a file: -o FILE.parquet")
    if result == PARQUET_FORMAT and not is_installed("pyarrow"):
        raise UserError(f"Parquet: {name_lacking(['pyarrow'])}")
    return result


def parse_trackers(text: str) -> list[str]:
    """Parse tracker names separated by commas; `UserError` for an unknown tracker, and for one that isn't installed."""
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    for name in names:
        check_known("tracker", name, TRACKERS)
        if not is_installed(name):
            raise UserError(f"--log {name}: {name_lacking([name])}")
    return names


def check_threads(study: Study) -> None:
    """Raise `UserError` for more threads than processors: they would wait for each other."""
    processors = len(os.sched_getaffinity(0))
    if study.threads > processors:
        phrase = "is 1 processor" if processors == 1 else f"are {processors} processors"
        raise UserError(f"threads is {study.threads}, but there {phrase} here; give at most {processors}")


def check_weights(study: Study, models: Sequence[str]) -> None:
    """Raise `UserError` for weights if all models are files with their own weights, which would ignore them."""
    flag = "weights" if study.weights else "pretrained"
    if (study.weights or study.pretrained) and all(map(keeps_weights, models)):
        raise UserError(f"{models[0]} contains its weights, which {flag} can't replace; omit {flag}")


def check_device(study: Study) -> None:
    """Raise `UserError` for unusable devices.

    They are the devices refused by `check_kind`, missing GPUs, and several devices or a cluster outside `dyno run`.
    """
    if "," in study.device:
        raise UserError(f"several devices ({study.device}) are for `dyno run` alone; give one --device here")
    if study.on:
        raise UserError(f"a cluster (--cluster {study.on}) is for `dyno run` alone; omit it here")
    check_kind(study)
    if missing_gpu(study.device):
        raise UserError(
            f"there is no {study.device} here: neither NVML nor CUDA's driver sees such a GPU; omit --device to run on "
            "the CPU"
        )


def check_kind(study: Study) -> None:
    """Raise `UserError` for a kind of device that no backend supports, and for a single share of the processor."""
    if study.device.startswith("cpu:") and "," not in study.device:
        raise UserError(
            f"{study.device} alone is not a device: write cpu, or for `dyno run` cpu:0,cpu:1, two shares of its cores"
        )
    names = {*registry.list_backends(), *(Choice.parse(text).name for text in study.backends)}
    if study.device.partition(":")[0] not in {kind for name in names for kind in registry.find(name).devices}:
        raise UserError(f"unknown device {study.device!r}; write cpu, or cuda:0 for the first GPU")


def missing_gpu(device: str) -> bool:
    """Return whether the device is a GPU unknown to NVML and CUDA's driver; raise `UserError` for a bad index."""
    kind, _, index = device.partition(":")
    if kind == "cuda" and index and not index.isdecimal():
        raise UserError(f"device {device!r} has no number after the colon; write cuda:0 for the first GPU")
    return kind == "cuda" and not gpu_identity(device) and int(index or 0) >= _driver_count()


def _driver_count() -> int:
    """Count the CUDA driver's GPUs, for systems without NVML (containers, small boards)."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return count.value if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def check_several(studies: Sequence[Study]) -> None:
    """Raise `UserError` if there is only one configuration to compare."""
    if sum(map(_count_configurations, studies)) < 2:
        raise UserError("there is only one configuration to compare; give another model or file, or --backend A,B")


def _count_configurations(study: Study) -> int:
    """Return the least number of rows of the study."""
    default = len(study.precisions) or 1
    configurations = sum(len(choice.precisions) or default for choice in map(Choice.parse, study.backends))
    return configurations * _count_values(study.batches) * _count_values(study.sizes)


def _count_values(values: Iterable[object]) -> int:
    return len(list(values)) or 1


T = TypeVar("T")
BACKEND_PREFIXES = (ENDPOINT_PREFIX, "fake:")  # prefixes of models that only the backend of that name runs
ONE_ROUND: dict[str, Any] = {"rounds": 1, "turns": False}
SELF_TEST_MINUTES = 5.0
DEMO_MINUTES = 4.5
QUICK_SETTINGS: dict[str, Any] = {
    "rounds": 1,
    "confirm": 0,
    "sustained": 0,
    "search": False,
    "routes": ("usual",),
    "seconds": 0.3,
    "warmup": 0.3,
    "build_timeout": 180.0,  # not for measuring: an evaluation may take longer
}
# The evaluation itself measures throughput, including reading and ranking; latencies are for orientation.
EVALUATION_SETTINGS: dict[str, Any] = {
    "batches": (8,), "seconds": 1.0, "warmup": 0.5, "boundaries": ("model", "all"), "confirm": 0, "search": False,
    "sustained": 0,
}  # fmt: skip
# Video and request jobs are not interleaved but run one after the other.
OWN_JOBS: dict[str, Any] = {
    "seconds": 1.0, "warmup": 0.5, "boundaries": ("all", "throughput"), "turns": False, "until": FIXED, "confirm": 0,
    "search": False, "sustained": 0,
}  # fmt: skip
COMPARED_ROUNDS = 3  # default rounds for comparing engines


def study_of(model: str, defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> Study:
    """Build a one-round study of the model in its format's default backend; `settings` override `defaults`."""
    backend, device = default_runner(model)
    fields = {"backends": (backend,), "device": device, **ONE_ROUND, **defaults}
    if registry.format_of(model) or str(model).endswith(SAVED_SUFFIXES):  # a file's batch may be fixed
        fields.pop("batches", None)
    return one_model(model, settings, fields)


def study_of_own_jobs(model: str, batch: int, settings: Mapping[str, Any]) -> tuple[Study, bool]:
    """Build the study of a command with its own kind of job; return it, and whether it compares engines.

    `batch` is the default batch.
    """
    settings = name_fields(settings)
    study = study_of(model, {**OWN_JOBS, "batches": (batch,)}, settings)
    is_comparison = len(study.backends) * max(1, len(study.precisions)) * max(1, len(study.batches)) > 1
    if "rounds" not in settings:
        study = replace(study, rounds=COMPARED_ROUNDS if is_comparison else 1)
    return study, is_comparison


def one_model(model: Any, settings: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Study:
    """Build the model's study, with `settings` over the `defaults` ones.

    Raises `UserError` for a missing device, and for several devices.
    """
    study = Study(models=(model,), **{**(defaults or {}), **name_fields(settings)})
    if "device" in settings or study.on:  # callers decide whether a file's default device must exist
        check_device(study)
    return study


def each_with(models: Sequence[str], settings: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return each of several models with the settings that apply to it.

    A form after the first model, such as openvino/int8, is the first model in that backend and precision. Files have
    their own weights, so weight settings apply only to other models.
    """
    forms = [_parse_form(model) if index else {} for index, model in enumerate(models)]
    sources = [models[0] if form else model for model, form in zip(models, forms, strict=True)]
    excluded = () if all(map(keeps_weights, sources)) else ("weights", "pretrained")
    return [
        (source, {name: v for name, v in settings.items() if not (keeps_weights(source) and name in excluded)} | form)
        for source, form in zip(sources, forms, strict=True)
    ]


def _parse_form(text: str) -> dict[str, Any]:
    """Return the settings of a form; empty for a model."""
    backend, precision = parse_form(text, registry.list_backends()) or ("", "")
    settings = {"backends": backend, "precisions": precision}
    return {name: (value,) for name, value in settings.items() if value}


def default_runner(model: str) -> tuple[str, str]:
    """Return the default backend and device of a model, by its file format."""
    kind = registry.format_of(model)
    if kind is None:
        return "pytorch", "cpu"
    return (kind.default_backend(Path(model)) if Path(model).is_file() else kind.backend), kind.device


def reference_of(study: Study) -> Study | None:
    """Return the untimed study that provides the reference outputs for one model's trials, or None.

    It runs eager PyTorch in fp32, or a file's default backend. None if that is among the trials, or if no other backend
    can run the model.
    """
    (model,) = study.models
    kind = registry.format_of(model)
    if model.startswith(BACKEND_PREFIXES) or (kind and kind.on_device):
        return None
    backend, _ = default_runner(model)
    precisions = study.precisions or ("fp32",)
    choices = map(Choice.parse, study.backends)
    if any(choice.name == backend and "fp32" in (choice.precisions or precisions) for choice in choices):
        return None
    return replace(study, backends=(backend,), precisions=(), boundaries=(), rounds=1, builds=1)


def folder_for(out: str | Path | None, command: str, models: Sequence[str]) -> Path:
    """Return the folder given by the user, or a new path."""
    check_types({"out": out}, {"out": str | Path | None})
    return Path(out) if out else new_folder(command, models)


def new_folder(command: str, models: Sequence[str]) -> Path:
    """Return the path of a new folder for a command that always measures again."""
    name = "-".join(map(model_name, models))[:60]
    base = Path("runs") / command / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, index = base, 1
    while path.exists():  # another one began in the same second
        index += 1
        path = base.with_name(f"{base.name}-{index}")
    return path


def each_of(models: Sequence[str], measure: Callable[[int, str], T], required_count: int = 0) -> list[T]:
    """Call `measure` for each model and return the results; other models continue after a failure (a line on stderr).

    Raises the `UserError` of the first `required_count` models, and the first error if every model fails.
    """
    results: list[T] = []
    errors: list[UserError] = []
    for index, model in enumerate(models):
        try:
            results.append(measure(index, model))
        except UserError as e:
            if index < required_count:
                raise
            errors.append(e)
    if not results:
        raise errors[0]
    for error in errors:
        print(f"dyno: {error}", file=sys.stderr)
    return results
