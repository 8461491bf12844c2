"""The command line: each command is one call into a module; what is heavy is imported when a command needs it."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer

from dyno.worker.spec import UserError

app = typer.Typer(
    name="dyno",
    help="A dynamometer for inference engines: which way of running a model is fastest here, and is it still accurate?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MODEL_HELP = "torchvision:NAME, timm:NAME, MODULE:FUNCTION, FILE.py:FUNCTION, FILE.onnx or FILE.xml"
Models = Annotated[list[str], typer.Argument(help=MODEL_HELP, metavar="MODEL...")]
Model = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
Backends = Annotated[str, typer.Option(help="Comma-separated, NAME@option=value for options. Default: all found here.")]
Precision = Annotated[str, typer.Option(help="Comma-separated: fp32, tf32, fp16, bf16, int8, fp8.")]
Batch = Annotated[str, typer.Option(help="Comma-separated batch sizes.")]
Size = Annotated[str, typer.Option(help="Comma-separated image sizes: 224, or HEIGHTxWIDTH.")]
Shapes = Annotated[list[str], typer.Option(help="NAME:1x3x224x224, for inputs that batch and size can't describe.")]
Weights = Annotated[str, typer.Option(help="Checkpoint: .safetensors, or .pt/.pth read without running code.")]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="The library's published weights.")]
Classes = Annotated[int, typer.Option(help="Number of classes to build the model with (0: its own).")]
Channels = Annotated[int, typer.Option(help="Channels of the input image.")]
Mean = Annotated[str, typer.Option(help="Per channel, of pixels in 0..1: 0.485,0.456,0.406 (default: the model's).")]
Std = Annotated[str, typer.Option(help="Per channel, like --mean.")]
Seed = Annotated[int, typer.Option(help="Of random weights and random inputs.")]
Data = Annotated[str, typer.Option(help="Folder of class folders, or 'digits'.")]
Calibration = Annotated[str, typer.Option(help="Images that INT8 is calibrated on; never tested on.")]
Unreadable = Annotated[str, typer.Option(help="Images that can't be read: refuse or skip.")]
Compared = Annotated[int, typer.Option("--inputs", help="Random inputs to compare outputs on, without --data.")]
Budget = Annotated[list[str], typer.Option(help="Points of accuracy that may be lost, e.g. top1=0.5.")]
Reference = Annotated[str, typer.Option(help="Trial that speed-ups are against (its id, or BACKEND/PRECISION).")]
Device = Annotated[str, typer.Option(help="Where to run.")]
Threads = Annotated[int, typer.Option(help="Threads of every backend (0: one per physical core).")]
Rounds = Annotated[int, typer.Option(help="Fresh processes per trial.")]
Seconds = Annotated[float, typer.Option(help="Most seconds of sampling per trial, round and boundary.")]
Warmup = Annotated[float, typer.Option(help="Most seconds of warm-up per boundary.")]
Samples = Annotated[int, typer.Option(help="Exactly this many samples (0: until the interval is narrow enough).")]
Timeout = Annotated[float, typer.Option(help="Seconds after which a job is killed.")]
Pythons = Annotated[list[str], typer.Option("--python", help="Another interpreter for one backend: NAME=PATH.")]
Out = Annotated[str, typer.Option("--out", "-o", help="Run folder (default: runs/NAME).")]
Format = Annotated[str, typer.Option("--format", help="text, markdown, csv or json.")]
Rtol = Annotated[float, typer.Option(help="Relative tolerance.")]
Atol = Annotated[float, typer.Option(help="Absolute tolerance.")]
Least = Annotated[float, typer.Option(help="Exit 1 when a smaller share of values agrees (0 to 1).")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]


@app.command()
def demo(
    out: Out = "runs/demo",
    rounds: Rounds = 3,
    quick: Annotated[bool, typer.Option("--quick", help="One short round, without torch.compile.")] = False,
) -> None:
    """The whole job on handwritten digits: train, export, quantise, measure, compare, report."""
    from dyno import demo as module

    raise typer.Exit(module.demo(Path(out), rounds=rounds, quick=quick))


@app.command()
def run(
    ctx: typer.Context,
    models: Annotated[list[str], typer.Argument(help=MODEL_HELP + "; or STUDY.toml", metavar="MODEL...|STUDY.toml")],
    backends: Backends = "",
    precision: Precision = "fp32",
    batch: Batch = "1",
    size: Size = "",
    shapes: Shapes = [],  # noqa: B006  (typer copies it)
    weights: Weights = "",
    pretrained: Pretrained = False,
    classes: Classes = 0,
    channels: Channels = 3,
    mean: Mean = "",
    std: Std = "",
    seed: Seed = 0,
    data: Data = "",
    calibration: Calibration = "",
    unreadable: Unreadable = "refuse",
    compared: Compared = 32,
    budget: Budget = [],  # noqa: B006
    reference: Reference = "",
    device: Device = "cpu",
    threads: Threads = 0,
    rounds: Rounds = 3,
    seconds: Seconds = 3.0,
    warmup: Warmup = 1.0,
    samples: Samples = 0,
    timeout: Timeout = 600.0,
    python: Pythons = [],  # noqa: B006
    out: Out = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the trials and why any is refused.")] = False,
) -> None:
    """Measure models every way that is asked for; the same command again resumes."""
    from dyno import commands

    study = commands.study(ctx, models)
    raise typer.Exit(commands.dry_run(study) if dry_run else commands.run(study, commands.folder(ctx, study)))


@app.command()
def show(
    run: RunFolder,
    format: Format = "text",
    by: Annotated[str, typer.Option(help="Columns to group by, e.g. backend,batch.")] = "",
    reference: Reference = "",
    budget: Budget = [],  # noqa: B006
) -> None:
    """Print the tables of a run."""
    from dyno import commands

    commands.show(run, format, by, reference, budget)


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(help="The run to compare with.", metavar="RUN_A")],
    run_b: Annotated[Path, typer.Argument(help="The run to judge.", metavar="RUN_B")],
    fail_on: Annotated[
        str, typer.Option(help="Exit 1 on any of: slower, less-accurate, disagree (needs --least), status.")
    ] = "slower,less-accurate,status",
    tolerance: Annotated[float, typer.Option(help="Relative slow-down that is still fine.")] = 0.02,
    least: Least = 0.0,
    rtol: Rtol = 1e-3,
    format: Format = "text",
) -> None:
    """Judge each trial that two runs share: speed, accuracy, outputs, status; exit 1 when B got worse."""
    from dyno import commands

    raise typer.Exit(commands.compare(run_a, run_b, format, fail_on, tolerance, least, rtol))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder to write into (default: the first run's own).")] = "",
) -> None:
    """Write one self-contained HTML page, PNG charts and results.csv."""
    from dyno import commands

    commands.report(runs, Path(out) if out else runs[0])


@app.command()
def export(
    ctx: typer.Context,
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .onnx")],
    batch: Annotated[str, typer.Option(help="A number, or 'dynamic'.")] = "dynamic",
    size: Annotated[str, typer.Option(help="Image size: 224, or HEIGHTxWIDTH.")] = "",
    shape: Annotated[str, typer.Option(help="The input as N,C,H,W instead; -1 for a dynamic batch.")] = "",
    precision: Annotated[str, typer.Option(help="fp32, fp16 or int8.")] = "fp32",
    target: Annotated[
        str, typer.Option(help="Which engine int8 is for: onnxruntime, openvino or tensorrt.")
    ] = "onnxruntime",
    weights: Weights = "",
    pretrained: Pretrained = False,
    classes: Classes = 0,
    channels: Channels = 3,
    mean: Mean = "",
    std: Std = "",
    seed: Seed = 0,
    data: Data = "",
    calibration: Calibration = "",
    unreadable: Unreadable = "refuse",
) -> None:
    """Export a model to ONNX, checked against the module at other batches; quantise it on real images for int8."""
    from dyno import files

    files.export(ctx, model, out, batch=batch, shape=shape, precision=precision, target=target)


@app.command()
def build(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="An ONNX file, or any model.", metavar="FILE.onnx")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .xml (OpenVINO)")],
    precision: Annotated[str, typer.Option(help="fp32, fp16 or int8.")] = "fp32",
    size: Size = "",
    weights: Weights = "",
    pretrained: Pretrained = False,
    classes: Classes = 0,
    channels: Channels = 3,
    mean: Mean = "",
    std: Std = "",
    seed: Seed = 0,
    data: Data = "",
    calibration: Calibration = "",
    unreadable: Unreadable = "refuse",
) -> None:
    """Build an engine's own file from ONNX (OpenVINO IR)."""
    from dyno import files

    files.build(ctx, model, out, precision=precision)


@app.command()
def time(
    ctx: typer.Context,
    models: Models,
    backends: Backends = "",
    precision: Precision = "fp32",
    batch: Batch = "1",
    size: Size = "",
    shapes: Shapes = [],  # noqa: B006
    weights: Weights = "",
    pretrained: Pretrained = False,
    classes: Classes = 0,
    channels: Channels = 3,
    mean: Mean = "",
    std: Std = "",
    seed: Seed = 0,
    data: Data = "",
    calibration: Calibration = "",
    device: Device = "cpu",
    threads: Threads = 0,
    rounds: Rounds = 1,
    seconds: Seconds = 3.0,
    warmup: Warmup = 1.0,
    samples: Samples = 0,
    timeout: Timeout = 600.0,
    python: Pythons = [],  # noqa: B006
    out: Out = "",
    format: Format = "text",
) -> None:
    """Time any module, ONNX file or OpenVINO IR on generated or real data."""
    from dyno import commands

    raise typer.Exit(commands.time(ctx, models, format))


@app.command()
def agree(
    ctx: typer.Context,
    models: Models,
    backends: Backends = "",
    precision: Precision = "fp32",
    batch: Batch = "1",
    size: Size = "",
    shapes: Shapes = [],  # noqa: B006
    weights: Weights = "",
    pretrained: Pretrained = False,
    classes: Classes = 0,
    channels: Channels = 3,
    mean: Mean = "",
    std: Std = "",
    seed: Seed = 0,
    data: Data = "",
    calibration: Calibration = "",
    compared: Compared = 32,
    device: Device = "cpu",
    threads: Threads = 0,
    rtol: Rtol = 1e-3,
    atol: Atol = 1e-8,
    least: Least = 0.0,
    python: Pythons = [],  # noqa: B006
    out: Out = "",
    format: Format = "text",
) -> None:
    """Compare the outputs of several files or backends with the first: errors, share that agrees, top-10 table."""
    from dyno import commands

    raise typer.Exit(commands.agree(ctx, models, rtol, atol, least, format))


@app.command()
def eval(
    ctx: typer.Context,
    models: Models,
    data: Annotated[str, typer.Option(help="Folder of class folders, or 'digits'.")],
    backends: Backends = "",
    precision: Precision = "fp32",
    batch: Batch = "8",
    size: Size = "",
    weights: Weights = "",
    pretrained: Pretrained = False,
    classes: Classes = 0,
    channels: Channels = 3,
    mean: Mean = "",
    std: Std = "",
    calibration: Calibration = "",
    unreadable: Unreadable = "refuse",
    budget: Budget = [],  # noqa: B006
    threads: Threads = 0,
    seconds: Seconds = 2.0,
    python: Pythons = [],  # noqa: B006
    out: Out = "",
    format: Format = "text",
) -> None:
    """Accuracy on labelled images with intervals, beside latency and throughput."""
    from dyno import commands

    raise typer.Exit(commands.evaluate(ctx, models, format))


@app.command()
def doctor(
    python: Pythons = [],  # noqa: B006
    format: Format = "text",
) -> None:
    """Every backend in every Python it was told of: its version after a real operation, or why not."""
    from dyno import doctor as module

    raise typer.Exit(module.doctor(python, format))


INTERRUPTED = 130
OS_ERRORS = {
    errno.ENOSPC: "the disk is full; free some space and run again, what was measured is stored",
    errno.EDQUOT: "the disk quota is used up; free some space and run again, what was measured is stored",
    errno.EROFS: "the file system is read-only; give a folder that can be written with --out",
    errno.EACCES: "permission denied; give a folder that can be written with --out",
    errno.EEXIST: "is a file where a folder is needed; give another --out",
    errno.EISDIR: "is a folder where a file is needed; give another --out",
    errno.ENOTDIR: "is a file where a folder is needed; give another --out",
}


def main() -> None:
    """Entry point: the user's errors become one line and exit code 2, an interrupt 130."""
    try:
        app()
    except UserError as e:
        _fail(str(e))
    except (KeyboardInterrupt, SystemExit) as e:
        if isinstance(e, SystemExit) and e.code != INTERRUPTED:  # what typer makes of an interrupt
            raise
        print("dyno: stopped; what was measured is stored, the same command goes on from there", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except OSError as e:
        if e.errno not in OS_ERRORS:
            raise
        _fail(f"{e.filename or 'output'}: {OS_ERRORS[e.errno]}")


def _fail(line: str) -> None:
    print("dyno: " + " ".join(line.splitlines()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
