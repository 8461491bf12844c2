"""Dyno, a dynamometer for inference engines: `Study(...).run()` measures, `load(folder)` reads what was measured.

This file is also imported inside workers, under other Pythons: it imports nothing until a name is asked for.
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from dyno.analysis.self_test.figures import SelfTest as SelfTest
    from dyno.api.bisection import bisect as bisect
    from dyno.api.calibrate import calibrate as calibrate
    from dyno.api.comparison import Comparison as Comparison
    from dyno.api.comparison import compare as compare
    from dyno.api.evaluation import evaluate as evaluate
    from dyno.api.inside.cold_start import ColdStarts as ColdStarts
    from dyno.api.inside.cold_start import cold_start as cold_start
    from dyno.api.inside.explaining import ExplanationResult as ExplanationResult
    from dyno.api.inside.explaining import explain as explain
    from dyno.api.inside.inspection import InspectionResult as InspectionResult
    from dyno.api.inside.inspection import inspect as inspect
    from dyno.api.inside.layer_agreement import LayerAgreement as LayerAgreement
    from dyno.api.inside.layer_agreement import agree_layers as agree_layers
    from dyno.api.inside.profiling import ProfileResult as ProfileResult
    from dyno.api.inside.profiling import profile as profile
    from dyno.api.result import Result as Result
    from dyno.api.result import load as load
    from dyno.api.runnable import Study as Study
    from dyno.api.runnable import run as run
    from dyno.api.serve.session import ServingResult as ServingResult
    from dyno.api.serve.session import serve_test as serve_test
    from dyno.api.video.session import VideoResult as VideoResult
    from dyno.api.video.session import video as video
    from dyno.training.session import TrainingResult as TrainingResult
    from dyno.training.session import train as train
    from dyno.worker.spec import UserError as UserError

__version__ = "0.2.0"
__all__ = [
    "ColdStarts",
    "Comparison",
    "ExplanationResult",
    "InspectionResult",
    "LayerAgreement",
    "ProfileResult",
    "Result",
    "SelfTest",
    "ServingResult",
    "Study",
    "TrainingResult",
    "UserError",
    "VideoResult",
    "agree_layers",
    "bisect",
    "calibrate",
    "cold_start",
    "compare",
    "evaluate",
    "explain",
    "inspect",
    "load",
    "profile",
    "run",
    "serve_test",
    "train",
    "video",
]

_HOMES = {
    "Study": "dyno.api.runnable",
    "run": "dyno.api.runnable",
    "Result": "dyno.api.result",
    "UserError": "dyno.worker.spec",
    "bisect": "dyno.api.bisection",
    "Comparison": "dyno.api.comparison",
    "compare": "dyno.api.comparison",
    "calibrate": "dyno.api.calibrate",
    "SelfTest": "dyno.analysis.self_test.figures",
    "evaluate": "dyno.api.evaluation",
    "ColdStarts": "dyno.api.inside.cold_start",
    "cold_start": "dyno.api.inside.cold_start",
    "ExplanationResult": "dyno.api.inside.explaining",
    "explain": "dyno.api.inside.explaining",
    "LayerAgreement": "dyno.api.inside.layer_agreement",
    "agree_layers": "dyno.api.inside.layer_agreement",
    "InspectionResult": "dyno.api.inside.inspection",
    "inspect": "dyno.api.inside.inspection",
    "ProfileResult": "dyno.api.inside.profiling",
    "profile": "dyno.api.inside.profiling",
    "video": "dyno.api.video.session",
    "VideoResult": "dyno.api.video.session",
    "serve_test": "dyno.api.serve.session",
    "ServingResult": "dyno.api.serve.session",
    "load": "dyno.api.result",
    "train": "dyno.training.session",
    "TrainingResult": "dyno.training.session",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dyno' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
