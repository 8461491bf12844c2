"""`dyno demo`: the whole workflow on scikit-learn's handwritten digits, with no download and no GPU needed."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from dyno import data
from dyno.cli import commands
from dyno.jobs.progress import stderr_console
from dyno.runner.run_folder import RUNS_DIR, choose_folder
from dyno.store import cache_dir, check_own, find_versions
from dyno.study.defaults import QUICK_SETTINGS
from dyno.study.model_info import model_spec
from dyno.study.study import Study
from dyno.training.session import TrainingResult, train
from dyno.worker import system
from dyno.worker.extras import name_lacking
from dyno.worker.record import lock
from dyno.worker.spec import Runtime, UserError, digest
from dyno.worker.training.options import TrainOptions

DEMO_DIR = RUNS_DIR / "demo"
DEMO_MODEL = "dyno.worker.nets.digits:resnet18"
IMAGE_SIZE = 64
TRAINING_SETTINGS: dict[str, Any] = {"epochs": 8, "lr": 0.005, "augment": "shift"}
REQUIRED_MODULES = ("torch", "torchvision", "scikit-learn")
RECOMMENDED_MODULES = ("onnxruntime", "openvino", "matplotlib")  # otherwise there is little to compare, and no report
BACKENDS = (
    "pytorch@precision=fp32",
    "onnxruntime@precision=fp32+int8",
    "openvino@precision=fp32+bf16+int8",  # bf16 only on a processor that computes in it: see `_list_backends`
    # Without `compile` and `aoti`: they compile for two minutes on two cores, as long as all these measure.
)
# Only the boundaries shown in the tables: "all" would take a third of the measuring time. Three confirmations would
# take a sixth; without them, intervals allow for the selection. Processes differ more than their blocks, so that short
# blocks are enough (the table `variance` advises 0.3 s).
EFFORT_SETTINGS: dict[str, Any] = {"seconds": 0.5, "warmup": 0.2, "boundaries": ("model", "throughput"), "confirm": 0}


def train_once() -> TrainingResult:
    """Return the digits network, trained once and then cached; wait for another demo that trains it."""
    key_data = [
        model_spec(Study(models=(DEMO_MODEL,), channels=1), DEMO_MODEL),
        data.prepare_digits(cache_dir() / "datasets", IMAGE_SIZE).sha256,
        dataclasses.asdict(TrainOptions()) | TRAINING_SETTINGS,
        find_versions(Runtime(), ("torch", "torchvision")),
    ]
    folder = cache_dir() / "trained" / digest(key_data)[:24]
    with lock(folder.with_suffix(".lock"), _say_waiting):
        return train(
            "digits", model=DEMO_MODEL, size=IMAGE_SIZE, channels=1, out=folder, advise=False, **TRAINING_SETTINGS
        )


def _say_waiting(owner: str) -> None:
    print(f"dyno: waiting for process {owner}, another demo that trains the network", file=sys.stderr)


def _list_backends() -> tuple[str, ...]:
    """Return the demo's backends; emulated bf16 is left out, as it took a fifth of the demo's time."""
    return BACKENDS if system.has_arithmetic("bf16") else tuple(each.replace("+bf16", "") for each in BACKENDS)


def demo(out: Path, *, rounds: int | None, minutes: float, quick: bool) -> int:
    """Train, then compare PyTorch, ONNX Runtime and OpenVINO at batches 1 and 8; return the exit code."""
    if rounds is not None and rounds < 1:  # checked before the training, not after it
        raise UserError(f"rounds is {rounds}; it must be at least 1")
    if not minutes > 0:
        raise UserError(f"minutes is {minutes}; it must be more than 0")
    if out != DEMO_DIR:  # used as given; the default gets another name if it is in use
        check_own(out)
    if missing_names := [name for name in REQUIRED_MODULES if name not in find_versions(Runtime(), REQUIRED_MODULES)]:
        raise UserError(name_lacking(missing_names, RECOMMENDED_MODULES))
    console = stderr_console()
    result = train_once()
    study = Study(
        models=(DEMO_MODEL,),
        backends=_list_backends(),
        batches=(1, 8),
        sizes=(str(IMAGE_SIZE),),
        channels=1,
        weights=str(result.weights),
        data="digits",
        budget={"top1": 1.0},
        **(QUICK_SETTINGS if quick else {"rounds": rounds, "minutes": minutes, **EFFORT_SETTINGS}),
    )
    if out == DEMO_DIR:
        out, notice = choose_folder(study, out)
        console.print(notice, soft_wrap=True, end="\n" if notice else "")
    return commands.run_study(study, out)
