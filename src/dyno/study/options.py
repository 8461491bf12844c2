"""Options of a study, in groups: each field has its help here, for the command line, study files and Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, dataclass_transform

from dyno.worker.option_values import option
from dyno.worker.spec import BOUNDARIES, DEFAULT_ROUNDS, PRECISIONS, Plan

Group = TypeVar("Group")
Kept = TypeVar("Kept", covariant=True)
Taken = TypeVar("Taken", contravariant=True)

if TYPE_CHECKING:

    class Field(Generic[Kept, Taken]):
        """A descriptor that accepts more types than it stores, the only such form that type checkers know."""

        def __get__(self, study: object, kind: type | None = None) -> Kept: ...
        def __set__(self, study: object, value: Taken) -> None: ...

else:

    class Field:
        """Annotation that stands for the stored type at run time: values are checked against it."""

        def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
            return types[0]


Models = Field[tuple[str, ...], Any]  # one or several sources, paths, modules, modules with inputs, functions
Strings = Field[tuple[str, ...], str | Iterable[str]]
Sizes = Field[tuple[str, ...], str | int | Iterable[str | int]]
Ints = Field[tuple[int, ...], int | Iterable[int]]
Floats = Field[tuple[float, ...], float | Iterable[float]]
Location = Field[str, str | Path]


# mypy loses the type of an inherited descriptor in a frozen dataclass.
@dataclass_transform()
def settings(group: type[Group]) -> type[Group]:
    """Make a frozen dataclass of options."""
    return dataclass(frozen=True)(group)


MODEL_HELP = (
    "torchvision:NAME, timm:NAME, hf:ORG/NAME, ultralytics:NAME.yaml, MODULE:FUNCTION, FILE.py:FUNCTION, FILE.onnx, "
    "FILE.xml, FILE.tflite, FILE.pte, FILE.cfg, FILE.pt2, FILE.torchscript, FILE.jit or FILE.engine"
)


@settings
class ComparisonOptions:
    """What to compare."""

    models: Models = option(dataclasses.MISSING, MODEL_HELP, flags=None)
    backends: Strings = option(
        (),
        "Backends, with options as NAME@option=value: pytorch,onnxruntime@optimization=basic.",
        usual="all that are installed for the device, or have a --python",
        flags="--backend --backends",
        common=True,
    )
    precisions: Strings = option(
        (),
        f"Precisions: {', '.join(PRECISIONS)}.",
        flags="--precision --precisions",
        usual="the file's own, or fp32; `dyno run` without --backend adds native bf16 or fp16, and int8 with --data",
        common=True,
    )
    batches: Ints = option(
        (),
        "Batch sizes: 1,8,32.",
        flags="--batch --batches --batch-size",
        usual="1, or that of the file or of example inputs",
        common=True,
    )
    sizes: Sizes = option(
        (),
        "Image sizes in pixels: 224, or HEIGHTxWIDTH.",
        flags="--size --sizes --imgsz",
        usual="the model's own, else 224",
        common=True,
    )
    routes: Strings = option(
        (),
        "Routes to the ONNX file, a row each: dynamo, torchscript, static, fold, opset17 joined by +; usual; or all.",
        usual="the usual one, and another if that fails or is slower",
    )
    baseline: dict[str, Any] = option(
        {},
        "Side A of a comparison, as the settings that differ: models, weights, pretrained, runtime.",
        usual="nothing: no comparison of two sides",
        flags=None,
    )
    reference: str = option(
        "",
        "Trial that speed-ups are relative to: its id, or BACKEND/PRECISION.",
        usual="eager PyTorch in fp32, else the first that ran, in fp32 if any",
    )
    limit: dict[str, str] = option(
        {},
        "Limits that the winner must keep, with commas: p50, p90, p95 or p99 of latency/model (p99=5ms), size=20MB, "
        "memory=500MB, gpu_memory=2GB, energy=50mJ an image, load=2s.",
        common=True,
    )


@settings
class ModelOptions:
    """Model."""

    shapes: Strings = option(
        (), "Shape of an input that batch and size don't describe, its type last: ids:batchx128:int64."
    )
    inputs: Strings = option(
        (),
        "Values of an input: ids=0..30521 (a range), sr=16000 (a constant), or feeds.npz.",
        flags="--input",
        usual="random",
    )
    weights: Location = option("", "Checkpoint: .safetensors, or .pt/.pth read without running code.", common=True)
    pretrained: bool = option(False, "Use the weights that the model's library publishes.", common=True)
    classes: int | None = option(None, "Number of classes to build the model with.", usual="the model's own")
    channels: int = option(3, "Channels of the input image.")
    mean: Floats = option(
        (), "Mean of each channel, of pixels in 0..1: 0.485,0.456,0.406.", usual="the library's, else ImageNet's"
    )
    std: Floats = option((), "Standard deviation of each channel, as for mean.", usual="as for mean")
    task: str = option(
        "",
        "Task of a file's network: classify, detect, segment, pose, or a plug-in's task.",
        usual="what the file says, else classify",
    )
    seed: int = option(0, "Seed of random weights (a model without a checkpoint) and of random inputs.")


@settings
class DataOptions:
    """Data and accuracy."""

    data: Location = option(
        "",
        "Images to measure accuracy on: a folder of class folders or images, in COCO's or YOLO's format, "
        "a CSV of path,label, or digits.",
        usual="none: random inputs, no accuracy",
        common=True,
    )
    calibration: Location = option(
        "", "Images to calibrate INT8 on; no accuracy is measured on them.", usual="some of the data"
    )
    unreadable: str = option("refuse", "Images that can't be read: refuse, or skip them.")
    compared: int = option(32, "Number of random inputs to compare outputs on if there is no data.")
    budget: dict[str, float] = option(
        {}, "Allowed loss of accuracy in percentage points: top1=0.5, top5=0.5 or mAP=0.5.", common=True
    )
    search: bool | None = option(
        None, "Try mixed precisions if int8 or fp16 fails the budget.", usual="yes with a budget, else no"
    )


@settings
class MeasurementOptions:
    """Measurement."""

    rounds: int = option(
        None,
        "Exactly this many rounds; in each, every trial runs in a fresh process.",
        usual=f"{DEFAULT_ROUNDS}, then more until decided",
        common=True,
    )
    builds: int = option(
        1, "Builds of each engine tuned by timing; the rounds rotate through them, and verdicts hold for builds."
    )
    seconds: float = option(2.0, "Maximum seconds of sampling per trial, round and boundary.", common=True)
    warmup: float = option(1.0, "Maximum seconds of warm-up per trial, round and boundary.")
    samples: int = option(
        0, "Exactly this many samples, however long that takes.", usual="until the interval is narrow enough"
    )
    interval: float = option(
        0.005, "Without turns, stop sampling when the median's 95 % interval is within this share of it on both sides."
    )
    confirm: int | None = option(
        None, "Rounds that measure the winners again after selection.", usual="3 with a budget, else 0"
    )
    sustained: float | None = option(
        None,
        "Seconds that the winner, its runner-up and its reference each run without a break, twice, after selection: "
        "shows whether heat or a power limit changes their ratio.",
        usual="5 on a GPU where --until is decided, else 0",
    )
    boundaries: Strings = option(
        BOUNDARIES, f"What is timed: {', '.join(BOUNDARIES)}.", flags="--boundaries --boundary", usual="all three"
    )
    turns: bool | None = option(
        None,
        "Measure compared trials in turns: one process runs a short block while the others are frozen.",
        usual="yes, unless --samples or --interval is given",
    )
    block: float = option(0.1, "Seconds of a block, in turns.")
    until: str = option(
        "",
        "When to stop. decided: the winner is compared with its reference and its runner-up until each is faster, "
        "slower or equivalent, or --minutes are over. every-row: so is each row with its reference. rounds: after "
        "--rounds.",
        usual="decided, or rounds where --rounds is given",
    )
    minutes: float = option(
        10.0,
        "Minutes of measuring, after which no round begins. Every trial still gets two rounds, and possible winners "
        "three; after half of the minutes only these get more than three.",
        common=True,
    )
    equivalent: float = option(2.0, "Percent within which two speeds count as equivalent.")
    peak: bool = option(False, "First measure the device's peak arithmetic (TFLOPS), so that tables show shares of it.")
    energy: bool = option(
        False, "Also run each trial at full load for its energy, in joules per image (3.75 s a round)."
    )
    timeout: float = option(600.0, "Seconds after which a measuring job is killed.")
    build_timeout: float | None = option(
        None,
        "Seconds after which an export, a conversion or a build is killed.",
        usual=f"those of --minutes, 60 at least, where --until is decided or every-row; else {Plan.build_timeout_s:g}",
    )


@settings
class ClusterOptions:
    """Over which hosts it is spread: an option of `dyno run` alone."""

    on: str = option(
        "", "A cluster to spread the study over: ray=ADDRESS of its head node, or slurm=4 for four jobs of Slurm.",
        usual="this host", flags="--cluster",
    )  # fmt: skip


@settings
class RuntimeOptions:
    """Where it runs."""

    device: str = option(
        "cpu", "Device: cpu, or cuda:0. Several, such as cuda:0,cuda:1, share the work of `dyno run`.", common=True
    )
    threads: int = option(0, "CPU threads of every backend.", usual="one per physical core")
    runtime: dict[str, dict[str, Any]] = option(
        {}, "Another interpreter for a backend: tensorrt=/path/to/python.", flags="--python", usual="this one"
    )


def describe_fields(kind: type) -> str:
    """Describe each field with its help and default, in lines for a docstring."""
    fields = [f for f in dataclasses.fields(kind) if "help" in f.metadata]
    return "\n    ".join(f"{f.name}: {f.metadata['help'].rstrip('.')}{_format_default(f)}." for f in fields)


def _format_default(field: dataclasses.Field[Any]) -> str:
    default_text = field.metadata.get("usual") or field.default
    is_silent = default_text in ("", (), None, dataclasses.MISSING) or default_text is False
    return "" if is_silent else f" (default: {default_text})"
