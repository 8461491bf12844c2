"""What a command refuses before anything is trained, measured or written."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence

from dyno.sources.model_files import keeps_weights
from dyno.store import gpu_identity
from dyno.study import Choice, Study
from dyno.worker import registry
from dyno.worker.spec import UserError, check_known

FORMATS = ("text", "markdown", "csv", "json", "html")


def check_format(format: str) -> None:
    """Raise `UserError` for a format in which no table can be printed."""
    check_known("format", format, FORMATS)


def check_threads(study: Study) -> None:
    """Refuse more threads than this process may use processors: they would wait for each other."""
    here = len(os.sched_getaffinity(0))
    if study.threads > here:
        raise UserError(f"threads is {study.threads}, but there are {here} processors here; give at most {here}")


def check_weights(study: Study, models: Sequence[str]) -> None:
    """Refuse weights if all models are files with their own weights: they would be ignored."""
    flag = "weights" if study.weights else "pretrained"
    if (study.weights or study.pretrained) and all(map(keeps_weights, models)):
        raise UserError(f"{models[0]} contains its weights, which {flag} can't replace; omit {flag}")


def check_device(study: Study) -> None:
    """Refuse unusable devices.

    These are unknown devices, missing GPUs, one share of the processor alone, and several devices if blocks aren't
    spread over them.
    """
    if study.device.startswith("cpu:") and "," not in study.device:
        raise UserError(
            f"{study.device} alone is not a device: write cpu, or for `dyno run` cpu:0,cpu:1, two shares of its cores"
        )
    if "," in study.device:
        raise UserError(f"several devices ({study.device}) are for `dyno run` alone; give one --device here")
    if study.on:
        raise UserError(f"a cluster (--on {study.on}) is for `dyno run` alone; omit it here")
    check_kind(study)
    if missing_gpu(study.device):
        raise UserError(
            f"there is no {study.device} here: neither NVML nor CUDA's driver sees such a GPU; omit --device to run on "
            "the CPU"
        )


def check_kind(study: Study) -> None:
    """Refuse a kind of device on which no backend runs."""
    names = {*registry.names(), *(Choice.parse(text).name for text in study.backends)}
    if study.device.partition(":")[0] not in {kind for name in names for kind in registry.find(name).devices}:
        raise UserError(f"unknown device {study.device!r}; write cpu, or cuda:0 for the first GPU")


def missing_gpu(device: str) -> bool:
    """Return whether the device is a GPU unknown to NVML and CUDA's driver; raise `UserError` for a bad number."""
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
    """Refuse to compare a single configuration."""
    if sum(map(_count_configurations, studies)) < 2:
        raise UserError("there is only one configuration to compare; give another model or file, or --backends A,B")


def _count_configurations(study: Study) -> int:
    """Return the least number of rows that the study has."""
    default = len(study.precisions) or 1
    configurations = sum(len(choice.precisions) or default for choice in map(Choice.parse, study.backends))
    return configurations * _count_values(study.batches) * _count_values(study.sizes)


def _count_values(values: Iterable[object]) -> int:
    return len(list(values)) or 1
