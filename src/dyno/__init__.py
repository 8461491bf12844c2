"""Dyno, a dynamometer for inference engines: `Study(...).run()` measures, `load(folder)` reads what was measured.

This file is also imported inside workers, under other Pythons: it imports nothing until a name is used.
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from dyno.api import Result as Result
    from dyno.api import Study as Study
    from dyno.api import load as load
    from dyno.api import run as run
    from dyno.evaluation import evaluate as evaluate
    from dyno.layers.agreement import LayerAgreement as LayerAgreement
    from dyno.layers.agreement import diff_layers as diff_layers
    from dyno.layers.cold_start import ColdStarts as ColdStarts
    from dyno.layers.cold_start import bench_cold_start as bench_cold_start
    from dyno.layers.explaining import ExplanationResult as ExplanationResult
    from dyno.layers.explaining import explain as explain
    from dyno.layers.profiling import InspectionResult as InspectionResult
    from dyno.layers.profiling import ProfileResult as ProfileResult
    from dyno.layers.profiling import inspect as inspect
    from dyno.layers.profiling import profile as profile
    from dyno.packs.pack import pack as pack
    from dyno.packs.reproduction import reproduce as reproduce
    from dyno.packs.static_site import write_site as write_site
    from dyno.packs.verification import verify as verify
    from dyno.regression.bisection import bisect as bisect
    from dyno.regression.comparison import Comparison as Comparison
    from dyno.regression.comparison import compare as compare
    from dyno.regression.history import read_history as read_history
    from dyno.regression.selftest import selftest as selftest
    from dyno.results.self_test import SelfTest as SelfTest
    from dyno.serving.session import ApplicationResult as ApplicationResult
    from dyno.serving.session import ServingResult as ServingResult
    from dyno.serving.session import bench_app as bench_app
    from dyno.serving.session import bench_serve as bench_serve
    from dyno.training.session import TrainingResult as TrainingResult
    from dyno.training.session import train as train
    from dyno.video.session import VideoResult as VideoResult
    from dyno.video.session import bench_video as bench_video
    from dyno.worker.spec import UserError as UserError

__version__ = "0.2.0"
_HOMES = {
    name: module
    for module, names in {
        "dyno.api": "Result Study load run",
        "dyno.evaluation": "evaluate",
        "dyno.layers.agreement": "LayerAgreement diff_layers",
        "dyno.layers.cold_start": "ColdStarts bench_cold_start",
        "dyno.layers.explaining": "ExplanationResult explain",
        "dyno.layers.profiling": "InspectionResult ProfileResult inspect profile",
        "dyno.packs.pack": "pack",
        "dyno.packs.reproduction": "reproduce",
        "dyno.packs.static_site": "write_site",
        "dyno.packs.verification": "verify",
        "dyno.regression.bisection": "bisect",
        "dyno.regression.history": "read_history",
        "dyno.regression.selftest": "selftest",
        "dyno.regression.comparison": "Comparison compare",
        "dyno.results.self_test": "SelfTest",
        "dyno.serving.session": "ApplicationResult ServingResult bench_app bench_serve",
        "dyno.training.session": "TrainingResult train",
        "dyno.video.session": "VideoResult bench_video",
        "dyno.worker.spec": "UserError",
    }.items()
    for name in names.split()
}
__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dyno' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
