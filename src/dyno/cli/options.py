"""The flags that several commands share: each with its type and its help, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL_HELP = (
    "torchvision:NAME, timm:NAME, ultralytics:NAME.yaml, MODULE:FUNCTION, FILE.py:FUNCTION, FILE.onnx, FILE.xml, "
    "FILE.pt2, FILE.torchscript or FILE.engine"
)
Studied = Annotated[list[str], typer.Argument(help=MODEL_HELP + "; or STUDY.toml", metavar="MODEL...|STUDY.toml")]
Models = Annotated[list[str], typer.Argument(help=MODEL_HELP, metavar="MODEL...")]
Model = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
Backends = Annotated[str, typer.Option(help="Comma-separated, NAME@option=value for options. Default: all found here.")]
OneBackend = Annotated[
    str, typer.Option(help="NAME@option=value for options. Default: the one that the kind of model asks for.")
]
Precision = Annotated[
    str, typer.Option(help="Comma-separated: fp32, tf32, fp16, bf16, int8, fp8.", show_default="the model's own")
]
Batch = Annotated[str, typer.Option(help="Comma-separated batch sizes.")]
Size = Annotated[str, typer.Option(help="Comma-separated image sizes: 224, or HEIGHTxWIDTH.")]
Shapes = Annotated[
    list[str], typer.Option(help="NAME:batchx128:int64, for inputs that batch and size can't describe; the type last.")
]
Inputs = Annotated[
    list[str],
    typer.Option("--input", help="What an input is fed: ids=0..30521 (a range), sr=16000 (a constant), or feeds.npz."),
]
Weights = Annotated[str, typer.Option(help="Checkpoint: .safetensors, or .pt/.pth read without running code.")]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="The library's published weights.")]
Classes = Annotated[int, typer.Option(help="Number of classes to build the model with (0: its own).")]
Channels = Annotated[int, typer.Option(help="Channels of the input image.")]
Mean = Annotated[str, typer.Option(help="Per channel, of pixels in 0..1: 0.485,0.456,0.406 (default: the model's).")]
Std = Annotated[str, typer.Option(help="Per channel, like --mean.")]
Seed = Annotated[int, typer.Option(help="Of random weights and random inputs.")]
Task = Annotated[str, typer.Option(help="classify, detect, segment or pose, for a file that doesn't say it.")]
DATA_HELP = "Folder of class folders, of images, or in COCO's or YOLO's format; or 'digits'."
Data = Annotated[str, typer.Option(help=DATA_HELP)]
Calibration = Annotated[str, typer.Option(help="Images that INT8 is calibrated on; never tested on.")]
Unreadable = Annotated[str, typer.Option(help="Images that can't be read: refuse or skip.")]
Compared = Annotated[int, typer.Option("--inputs", help="Random inputs to compare outputs on, without --data.")]
Budget = Annotated[list[str], typer.Option(help="Points of accuracy that may be lost, e.g. top1=0.5 or mAP=0.5.")]
Confirm = Annotated[int, typer.Option(help="Rounds of the winners after the selection (default: 2 with a budget).")]
Search = Annotated[
    bool, typer.Option("--search/--no-search", help="Try mixed precisions where int8 or fp16 fails the budget.")
]
ROUTES_HELP = (
    "Ways to the ONNX file, a row each: dynamo, torchscript, static, fold, opset17 joined by +; or all. Default: the "
    "usual one, others where it fails."
)
Routes = Annotated[str, typer.Option(help=ROUTES_HELP)]
Reference = Annotated[str, typer.Option(help="Trial that speed-ups are against (its id, or BACKEND/PRECISION).")]
Device = Annotated[str, typer.Option(help="Where to run.")]
EngineDevice = Annotated[str, typer.Option(help="Where to run.", show_default="cpu, cuda:0 for TensorRT's engines")]
Threads = Annotated[int, typer.Option(help="Threads of every backend (0: one per physical core).")]
Rounds = Annotated[int, typer.Option(help="Fresh processes per trial.")]
Seconds = Annotated[float, typer.Option(help="Most seconds of sampling per trial, round and boundary.")]
Warmup = Annotated[float, typer.Option(help="Most seconds of warm-up per boundary.")]
Samples = Annotated[int, typer.Option(help="Exactly this many samples (0: until the interval is narrow enough).")]
Peak = Annotated[bool, typer.Option("--peak", help="Measure the device's most TFLOPS in each type first, once.")]
Timeout = Annotated[float, typer.Option(help="Seconds after which a job is killed.")]
Pythons = Annotated[list[str], typer.Option("--python", help="Another interpreter for one backend: NAME=PATH.")]
Out = Annotated[str, typer.Option("--out", "-o", help="Run folder (default: runs/NAME).")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="Measure what failed once more.")]
PerClass = Annotated[bool, typer.Option("--per-class", help="Every class, not only the worst.")]
Format = Annotated[str, typer.Option("--format", help="text, markdown, csv or json.")]
Rtol = Annotated[float, typer.Option(help="Relative tolerance.")]
Atol = Annotated[float, typer.Option(help="Absolute tolerance.")]
Least = Annotated[float, typer.Option(help="Exit 1 when a smaller share of values agrees (0 to 1).")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]
