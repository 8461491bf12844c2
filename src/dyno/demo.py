"""`dyno demo`: the whole job on scikit-learn's handwritten digits, with no download and no GPU needed."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from dyno import datasets
from dyno.commands import finish
from dyno.expand import model_spec
from dyno.launch import launch
from dyno.progress import Progress
from dyno.store import cache_dir, sha256_of, versions
from dyno.study import Study
from dyno.worker import system
from dyno.worker.record import read_record
from dyno.worker.spec import Dims, Job, Runtime, Trial, UserError, digest

MODEL = "dyno.worker.digits:resnet18"
SIZE = 64
TRAINING = {"epochs": 8, "seed": 0}
BACKENDS = (
    "pytorch@precision=fp32+bf16",
    "onnxruntime@precision=fp32+int8",
    "openvino@precision=fp32+bf16+int8",
    "compile@precision=fp32@rounds=2",  # one takes half a minute, most of it compilation
)
TIMEOUT_S = 600.0


def trained(progress: Progress) -> tuple[Path, float]:
    """The digits network's weights and their top-1 on the test half; trained once, then taken from the cache."""
    data = datasets.digits(cache_dir() / "datasets", SIZE)
    runtime = Runtime(threads=system.physical_cores())
    model = model_spec(Study(models=(MODEL,), channels=1), MODEL)
    trial = Trial(model, "", "fp32", Dims(1, SIZE, SIZE), data=data, runtime=runtime)
    key = digest([model, data, TRAINING, versions(Runtime(), ("torch", "torchvision"))])[:24]
    folder = cache_dir() / "trained" / key
    record = read_record(folder)
    weights = folder / "weights.safetensors"
    if record is None or record.status != "ok" or not weights.is_file() or sha256_of(weights) != record.facts["sha256"]:
        record = launch(Job("train", runtime, trial, options=TRAINING), folder, TIMEOUT_S, progress.tick)
    if record.status != "ok":
        raise UserError(f"the digits network could not be trained: {record.reason}")
    return weights, float(record.facts["top1"])


def demo(out: Path, *, rounds: int, quick: bool) -> int:
    """Train, then compare every backend found here at batches 1 and 8; returns the exit code."""
    console = Console(stderr=True)
    progress = Progress()
    console.print("training a narrow ResNet-18 on 897 of scikit-learn's handwritten digits (64x64) ...", soft_wrap=True)
    weights, top1 = trained(progress)
    console.print(f"trained: {top1:.2%} top-1 on the other 900 digits")
    study = Study(
        models=(MODEL,),
        backends=BACKENDS[:-1] if quick else BACKENDS,
        batches=(1, 8),
        sizes=(str(SIZE),),
        channels=1,
        weights=str(weights),
        data="digits",
        budget={"top1": 1.0},
        rounds=1 if quick else rounds,
        confirm=0 if quick else None,
        search=False if quick else None,
        seconds=0.3 if quick else 0.6,
        warmup=0.3 if quick else 0.4,
    )
    study.run(out)
    return finish(out)
