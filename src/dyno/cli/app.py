"""The command line: each command is one call into a module; what is heavy is imported when a command needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from dyno import __version__
from dyno.cli import data_commands, exits, hints, options, run_folders, take, train
from dyno.worker.spec import UserError

# Groups in which `dyno --help` lists commands.
MEASURE, READ, MAKE, MACHINE = "Measure", "Read results", "Make files and data", "This machine"


class Commands(typer.core.TyperGroup):
    """The commands; a name that is none is told what may have been meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click's; a `UserError` for a name that is no command's."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UserError(hints.no_command(args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="dyno",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_commands.app, name="data", rich_help_panel=MAKE)


def _version(asked: bool) -> None:
    if asked:
        print(f"dyno {__version__}")
        raise typer.Exit


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A dynamometer for inference engines: which way of running a model is fastest here, and is it still accurate?"""


@app.command(rich_help_panel=MEASURE)
def demo(
    out: Annotated[str, typer.Option("--out", "-o", help="Run folder.")] = "runs/demo",
    rounds: options.Rounds = 3,
    quick: Annotated[bool, typer.Option("--quick", help="One short round, without torch.compile.")] = False,
) -> None:
    """The whole job on handwritten digits: train, export, quantise, measure, compare, report."""
    from dyno.cli import demo as module

    raise typer.Exit(module.demo(Path(out), rounds=rounds, quick=quick))


@app.command(rich_help_panel=MEASURE)
def run(
    ctx: typer.Context,
    models: options.Studied,
    backends: options.Backends = "",
    precision: options.Precision = "fp32",
    batch: options.Batch = "1",
    size: options.Size = "",
    shapes: options.Shapes = [],  # noqa: B006  (typer copies it)
    inputs: options.Inputs = [],  # noqa: B006
    weights: options.Weights = "",
    pretrained: options.Pretrained = False,
    classes: options.Classes = 0,
    channels: options.Channels = 3,
    mean: options.Mean = "",
    std: options.Std = "",
    task: options.Task = "",
    seed: options.Seed = 0,
    data: options.Data = "",
    calibration: options.Calibration = "",
    unreadable: options.Unreadable = "refuse",
    compared: options.Compared = 32,
    budget: options.Budget = [],  # noqa: B006
    confirm: options.Confirm = 0,
    search: options.Search = True,
    routes: options.Routes = "",
    reference: options.Reference = "",
    device: options.Device = "cpu",
    threads: options.Threads = 0,
    rounds: options.Rounds = 3,
    seconds: options.Seconds = 3.0,
    warmup: options.Warmup = 1.0,
    samples: options.Samples = 0,
    timeout: options.Timeout = 600.0,
    peak: options.Peak = False,
    python: options.Pythons = [],  # noqa: B006
    out: options.Out = "",
    retry_failed: options.RetryFailed = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List the trials and why any is refused.", rich_help_panel=options.MEASUREMENT),
    ] = False,
) -> None:
    """Measure models every way that is asked for; the same command again resumes."""
    from dyno.cli import commands

    study = commands.study(ctx, models)
    if dry_run:
        raise typer.Exit(commands.dry_run(study))
    raise typer.Exit(commands.run(study, commands.folder(ctx, study), retry_failed=retry_failed))


@app.command(rich_help_panel=READ)
def show(
    run: Annotated[Path | None, typer.Argument(help="A run folder.", metavar="RUN")] = None,
    format: options.Format = "text",
    by: Annotated[str, typer.Option(help="Columns to group by, e.g. backend,batch.")] = "",
    table: Annotated[str, typer.Option(help="One table: frontier, break-even, latency-model, sizes…; or all.")] = "",
    every: Annotated[bool, typer.Option("--list", help="Name every table, with a sentence on each.")] = False,
    reference: options.Reference = "",
    budget: options.Budget = [],  # noqa: B006
) -> None:
    """Print the table of a run's trials and the verdict, or another table."""
    from dyno.cli import commands

    if every:
        commands.list_tables(format)
    elif run is None:
        raise UserError("give the run folder to show, such as runs/demo")
    else:
        commands.show(run, format, by, reference, budget, table)


@app.command(rich_help_panel=READ)
def compare(
    run_a: Annotated[Path, typer.Argument(help="The run to compare with.", metavar="RUN_A")],
    run_b: Annotated[Path, typer.Argument(help="The run to judge.", metavar="RUN_B")],
    fail_on: Annotated[
        str,
        typer.Option(help="Exit 1 on any of: slower, less-accurate, disagree (needs --least), status, wrong-outputs."),
    ] = "slower,less-accurate,status,wrong-outputs",
    tolerance: Annotated[float, typer.Option(help="Relative slow-down that is still fine.")] = 0.02,
    least: options.Least = 0.0,
    rtol: options.Rtol = 1e-3,
    format: options.Format = "text",
) -> None:
    """Judge each trial that two runs share: speed, accuracy, outputs, status; exit 1 when B got worse."""
    from dyno.cli import commands

    raise typer.Exit(commands.compare(run_a, run_b, format, fail_on, tolerance, least, rtol))


@app.command(rich_help_panel=READ)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder to write into (default: the first run's own).")] = "",
) -> None:
    """Write one self-contained HTML page, PNG charts and results.csv."""
    from dyno.cli import commands

    commands.report(runs, Path(out) if out else runs[0])


@app.command(rich_help_panel=MAKE)
def export(
    ctx: typer.Context,
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .onnx")],
    batch: Annotated[str, typer.Option(help="A number, or 'dynamic'.")] = "dynamic",
    size: Annotated[str, typer.Option(help="Image size: 224, or HEIGHTxWIDTH.")] = "",
    shape: Annotated[str, typer.Option(help="The input as N,C,H,W instead; -1 for a dynamic batch.")] = "",
    shapes: options.Shapes = [],  # noqa: B006
    inputs: options.Inputs = [],  # noqa: B006
    precision: Annotated[str, typer.Option(help="fp32, fp16, bf16 or int8.")] = "fp32",
    target: Annotated[
        str, typer.Option(help="Which engine the file is for: onnxruntime, openvino or tensorrt.")
    ] = "onnxruntime",
    opset: Annotated[int, typer.Option(help="ONNX opset (0: 18, or 17 for tensorrt).")] = 0,
    weights: options.Weights = "",
    pretrained: options.Pretrained = False,
    classes: options.Classes = 0,
    channels: options.Channels = 3,
    mean: options.Mean = "",
    std: options.Std = "",
    task: options.Task = "",
    seed: options.Seed = 0,
    data: options.Data = "",
    calibration: options.Calibration = "",
    unreadable: options.Unreadable = "refuse",
) -> None:
    """Export a model to ONNX, checked against the module at other batches; quantise it on real images for int8."""
    from dyno.cli import files

    files.export(ctx, model, out, batch=batch, shape=shape, precision=precision, target=target, opset=opset)


@app.command(rich_help_panel=MAKE)
def build(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="An ONNX file, or any model.", metavar="FILE.onnx")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .engine (TensorRT) or .xml (OpenVINO)")],
    backend: Annotated[str, typer.Option(help="Whose engine (default: by the file's suffix), e.g. tensorrt_rtx.")] = "",
    precision: Annotated[str, typer.Option(help="fp32, tf32, fp16, bf16, int8 or fp8.")] = "fp32",
    static: Annotated[int, typer.Option("--batch", help="The one batch of a static engine.")] = 1,
    low: Annotated[int, typer.Option("--min", help="Smallest batch of a dynamic engine.")] = 0,
    opt: Annotated[int, typer.Option(help="The batch that a dynamic engine is tuned for.")] = 0,
    high: Annotated[int, typer.Option("--max", help="Largest batch of a dynamic engine.")] = 0,
    profile: Annotated[str, typer.Option("--shapes", help="NAME:MIN,OPT,MAX, e.g. x:1x3x224x224,8x3x224x224,…")] = "",
    option: Annotated[list[str], typer.Option(help="NAME=VALUE of the backend, e.g. optimization=5.")] = [],  # noqa: B006
    repeat: Annotated[int, typer.Option(help="Build so many times and compare the engines.")] = 1,
    inputs: options.Inputs = [],  # noqa: B006
    device: options.EngineDevice = "cpu",
    python: options.Pythons = [],  # noqa: B006
    size: options.Size = "",
    weights: options.Weights = "",
    pretrained: options.Pretrained = False,
    classes: options.Classes = 0,
    channels: options.Channels = 3,
    mean: options.Mean = "",
    std: options.Std = "",
    task: options.Task = "",
    seed: options.Seed = 0,
    data: options.Data = "",
    calibration: options.Calibration = "",
    unreadable: options.Unreadable = "refuse",
) -> None:
    """Build an engine's own file from ONNX or any model: a TensorRT engine, an OpenVINO IR."""
    from dyno.cli import files

    how = files.Build(backend, precision, static, files.profile(profile, low, opt, high), tuple(option), repeat)
    raise typer.Exit(files.build(ctx, model, out, how))


@app.command(rich_help_panel=MEASURE)
def time(
    ctx: typer.Context,
    models: options.Models,
    backends: options.OneBackend = "",
    precision: options.Precision = "fp32",
    batch: options.Batch = "1",
    size: options.Size = "",
    shapes: options.Shapes = [],  # noqa: B006
    inputs: options.Inputs = [],  # noqa: B006
    weights: options.Weights = "",
    pretrained: options.Pretrained = False,
    classes: options.Classes = 0,
    channels: options.Channels = 3,
    mean: options.Mean = "",
    std: options.Std = "",
    task: options.Task = "",
    seed: options.Seed = 0,
    data: options.Data = "",
    calibration: options.Calibration = "",
    device: options.EngineDevice = "cpu",
    threads: options.Threads = 0,
    rounds: options.Rounds = 1,
    seconds: options.Seconds = 3.0,
    warmup: options.Warmup = 1.0,
    samples: options.Samples = 0,
    timeout: options.Timeout = 600.0,
    python: options.Pythons = [],  # noqa: B006
    out: options.Out = "",
    format: options.Format = "text",
    kinds: Annotated[str, typer.Option("--batches", help="Stress test instead: min,opt,max,random or numbers.")] = "",
    iterations: Annotated[int, typer.Option(help="Batches of each kind of the stress test.")] = 10_000,
    trtexec: Annotated[str, typer.Option(help="A trtexec log, or its exported times, to compare with.")] = "",
) -> None:
    """Time any module, ONNX file, engine or OpenVINO IR on generated or real data."""
    from dyno.cli import commands

    if kinds:
        raise typer.Exit(commands.endure(ctx, models, kinds, iterations))
    raise typer.Exit(commands.time(ctx, models, format, Path(trtexec) if trtexec else None))


@app.command(rich_help_panel=MEASURE)
def agree(
    ctx: typer.Context,
    models: options.Models,
    backends: options.OneBackend = "",
    precision: options.Precision = "fp32",
    batch: options.Batch = "1",
    size: options.Size = "",
    shapes: options.Shapes = [],  # noqa: B006
    inputs: options.Inputs = [],  # noqa: B006
    weights: options.Weights = "",
    pretrained: options.Pretrained = False,
    classes: options.Classes = 0,
    channels: options.Channels = 3,
    mean: options.Mean = "",
    std: options.Std = "",
    task: options.Task = "",
    seed: options.Seed = 0,
    data: options.Data = "",
    calibration: options.Calibration = "",
    compared: options.Compared = 32,
    device: options.EngineDevice = "cpu",
    threads: options.Threads = 0,
    rtol: options.Rtol = 1e-3,
    atol: options.Atol = 1e-8,
    least: options.Least = 0.0,
    python: options.Pythons = [],  # noqa: B006
    out: options.Out = "",
    format: options.Format = "text",
) -> None:
    """Compare the outputs of several files or backends with the first: errors, share that agrees, top-10 table."""
    from dyno.cli import commands

    raise typer.Exit(commands.agree(ctx, models, rtol, atol, least, format))


@app.command(rich_help_panel=MEASURE)
def eval(
    ctx: typer.Context,
    models: options.Models,
    data: Annotated[str, typer.Option(help=options.DATA_HELP)],
    backends: options.OneBackend = "",
    precision: options.Precision = "fp32",
    batch: options.Batch = "8",
    size: options.Size = "",
    weights: options.Weights = "",
    pretrained: options.Pretrained = False,
    classes: options.Classes = 0,
    channels: options.Channels = 3,
    mean: options.Mean = "",
    std: options.Std = "",
    task: options.Task = "",
    calibration: options.Calibration = "",
    unreadable: options.Unreadable = "refuse",
    budget: options.Budget = [],  # noqa: B006
    per_class: options.PerClass = False,
    device: options.EngineDevice = "cpu",
    threads: options.Threads = 0,
    seconds: options.Seconds = 1.0,
    python: options.Pythons = [],  # noqa: B006
    out: options.Out = "",
    format: options.Format = "text",
) -> None:
    """Accuracy on labelled images with intervals, classes and confusions, beside latency and the pipeline's rate."""
    from dyno.cli import commands

    raise typer.Exit(commands.evaluate(ctx, models, format, per_class))


app.command(rich_help_panel=MAKE)(train.train)
app.command(rich_help_panel=MAKE)(take.take)
app.command("list", rich_help_panel=READ)(run_folders.list_runs)
app.command("rm", rich_help_panel=READ)(run_folders.remove)
app.command("open", rich_help_panel=READ)(run_folders.open_report)


@app.command(rich_help_panel=MACHINE)
def doctor(
    python: options.Pythons = [],  # noqa: B006
    format: options.Format = "text",
) -> None:
    """Every backend in every Python it was told of: its version after a real operation, or why not."""
    from dyno.cli import doctor as module

    raise typer.Exit(module.doctor(python, format))


def main() -> None:
    """Entry point: the user's errors become one line and exit code 2, an interrupt 130."""
    exits.end(app)


if __name__ == "__main__":
    main()
