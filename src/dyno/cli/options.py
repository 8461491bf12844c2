"""The options that several commands share: each with its type, its group and its help, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

# Groups in which `--help` lists options.
COMPARED, MODEL, DATA, MEASUREMENT, RUNTIME, OUTPUT = (
    "What to compare", "Model", "Data and accuracy", "Measurement", "Where it runs", "Output"
)  # fmt: skip


def _option(group: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=group, **more)


MODEL_HELP = (
    "torchvision:NAME, timm:NAME, ultralytics:NAME.yaml, MODULE:FUNCTION, FILE.py:FUNCTION, FILE.onnx, FILE.xml, "
    "FILE.pt2, FILE.torchscript or FILE.engine"
)
Studied = Annotated[list[str], typer.Argument(help=MODEL_HELP + "; or STUDY.toml", metavar="MODEL...|STUDY.toml")]
Models = Annotated[list[str], typer.Argument(help=MODEL_HELP, metavar="MODEL...")]
Model = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]

Backends = Annotated[
    str,
    _option(
        COMPARED,
        "Comma-separated; options as NAME@option=value.",
        show_default="all that are installed for the device",
    ),
]
OneBackend = Annotated[
    str, _option(COMPARED, "Options as NAME@option=value.", show_default="the one for this kind of model")
]
Precision = Annotated[
    str,
    _option(COMPARED, "Comma-separated: fp32, tf32, fp16, bf16, int8, fp8.", show_default="the model's own"),
]
Batch = Annotated[str, _option(COMPARED, "Comma-separated batch sizes.")]
Size = Annotated[
    str, _option(COMPARED, "Comma-separated image sizes: 224, or HEIGHTxWIDTH.", show_default="the model's own")
]
ROUTES_HELP = (
    "Routes to the ONNX file to compare, a row each: dynamo, torchscript, static, fold, opset17 joined by +; or all."
)
Routes = Annotated[str, _option(COMPARED, ROUTES_HELP, show_default="the usual one; others where it fails")]
Reference = Annotated[
    str,
    _option(COMPARED, "Trial that speed-ups are against: its id, or BACKEND/PRECISION.", show_default="eager PyTorch"),
]

Shapes = Annotated[
    list[str],
    _option(MODEL, "Shape of an input that batch and size don't describe, the type last: NAME:batchx128:int64."),
]
Inputs = Annotated[
    list[str],
    _option(MODEL, "Values of an input: ids=0..30521 (a range), sr=16000 (a constant), or feeds.npz.", "--input"),
]
Weights = Annotated[str, _option(MODEL, "Checkpoint: .safetensors, or .pt/.pth read without running code.")]
Pretrained = Annotated[bool, _option(MODEL, "The library's published weights.", "--pretrained")]
Classes = Annotated[int, _option(MODEL, "Number of classes to build the model with (0: its own).")]
Channels = Annotated[int, _option(MODEL, "Channels of the input image.")]
Mean = Annotated[
    str, _option(MODEL, "Mean of each channel, of pixels in 0..1: 0.485,0.456,0.406.", show_default="the model's")
]
Std = Annotated[str, _option(MODEL, "Standard deviation of each channel, like --mean.", show_default="the model's")]
Seed = Annotated[int, _option(MODEL, "Seed of random weights and random inputs.")]
Task = Annotated[str, _option(MODEL, "Task of a file that doesn't say it: classify, detect, segment or pose.")]

DATA_HELP = "Folder of class folders, of images, or in COCO's or YOLO's format; or 'digits'."
Data = Annotated[str, _option(DATA, DATA_HELP)]
Calibration = Annotated[
    str, _option(DATA, "Images to calibrate INT8 on; no accuracy is measured on them.", show_default="some of --data")
]
Unreadable = Annotated[str, _option(DATA, "What to do about images that can't be read: refuse or skip.")]
Compared = Annotated[int, _option(DATA, "Random inputs to compare outputs on where there is no --data.", "--inputs")]
Budget = Annotated[list[str], _option(DATA, "Points of accuracy that may be lost, e.g. top1=0.5 or mAP=0.5.")]
Search = Annotated[
    bool,
    _option(DATA, "Try mixed precisions where int8 or fp16 fails the budget.", "--search/--no-search"),
]
PerClass = Annotated[bool, _option(DATA, "Show every class, not only the worst.", "--per-class")]
Rtol = Annotated[float, _option(DATA, "Relative tolerance.")]
Atol = Annotated[float, _option(DATA, "Absolute tolerance.")]
Least = Annotated[float, _option(DATA, "Exit 1 when a smaller share of values agrees (0 to 1).")]

Rounds = Annotated[int, _option(MEASUREMENT, "Rounds: fresh processes per trial, in shuffled order.")]
Seconds = Annotated[float, _option(MEASUREMENT, "Sampling time at most, per trial, round and boundary.")]
Warmup = Annotated[float, _option(MEASUREMENT, "Warm-up time at most, per boundary, in seconds.")]
Samples = Annotated[int, _option(MEASUREMENT, "Exactly this many samples (0: until the interval is narrow enough).")]
Confirm = Annotated[
    int,
    _option(MEASUREMENT, "Rounds that measure the winners again after the selection.", show_default="2 with a budget"),
]
Peak = Annotated[bool, _option(MEASUREMENT, "First measure the device's peak TFLOPS in each type.", "--peak")]
Timeout = Annotated[float, _option(MEASUREMENT, "Seconds after which a job is killed.")]
RetryFailed = Annotated[bool, _option(MEASUREMENT, "Measure failed trials again.", "--retry-failed")]

Device = Annotated[str, _option(RUNTIME, "Device: cpu, or cuda:N.")]
EngineDevice = Annotated[
    str, _option(RUNTIME, "Device: cpu, or cuda:N.", show_default="cpu, cuda:0 for TensorRT's engines")
]
Threads = Annotated[int, _option(RUNTIME, "Threads of every backend (0: one per physical core).")]
Pythons = Annotated[list[str], _option(RUNTIME, "Another interpreter for a backend: NAME=PATH.", "--python")]

Out = Annotated[str, _option(OUTPUT, "Run folder.", "--out", "-o", show_default="runs/NAME")]
Format = Annotated[str, _option(OUTPUT, "text, markdown, csv or json.", "--format")]
