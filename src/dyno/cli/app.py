"""The command line: each command is one call into a module; what is heavy is imported when a command needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from dyno import __version__
from dyno.cli import data_commands, exits, options, run_folders
from dyno.layers import commands as layers_commands
from dyno.regression import commands as regression_commands
from dyno.serving import commands as serving_commands
from dyno.study.defaults import DEMO_MINUTES, EVALUATION, ONE_ROUND, SELF_TEST_MINUTES
from dyno.study.options import (
    MODEL_HELP,
    ClusterOptions,
    ComparisonOptions,
    DataOptions,
    MeasurementOptions,
    ModelOptions,
    RuntimeOptions,
)
from dyno.training import commands as training_commands
from dyno.videos import commands as video_commands
from dyno.worker.spec import ROUNDS, UserError

# Groups in which `dyno --help` lists commands.
MEASURE, READ, MAKE, MACHINE = "Measure", "Read results", "Make files and data", "This machine"


class Commands(typer.core.TyperGroup):
    """The commands; an unknown name is answered with what may have been meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click's; a `UserError` for an unknown command."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UserError(exits.no_command(args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="dyno",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_commands.app, name="data", rich_help_panel=MAKE)

ONE = (ComparisonOptions, ModelOptions, DataOptions, RuntimeOptions)
# Defaults that go by the kind of file.
FIXED = "the file's fixed batch"
BY_FILE = {**ONE_ROUND, "backends": "the one for this kind of file", "device": "cpu, cuda:0 for TensorRT's engines"}
# Options for studies of several configurations, which a command doesn't have.
NOT_FOR_ONE = "routes reference search confirm peak energy turns block equivalent until minutes"


def command(panel: str, name: str | None = None) -> Callable[[options.F], options.F]:
    """Add a command below that heading of `dyno --help`."""
    register = app.command(name, cls=options.Command, rich_help_panel=panel)

    def register_command(function: options.F) -> options.F:
        register(options.takes_verbose(function) if panel == MEASURE else function)
        return function

    return register_command


def _print_version(show: bool) -> None:
    if show:
        print(f"dyno {__version__}")
        raise typer.Exit


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A dynamometer for inference engines: which configuration of a model is fastest here, and is it still accurate?"""


@command(MEASURE)
def demo(
    out: Annotated[str, typer.Option("--out", "-o", help="Run folder.")] = "runs/demo",
    rounds: Annotated[
        int | None,
        typer.Option(help="Exactly this many rounds.", show_default=f"{ROUNDS}, then more until decided"),
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="Minutes of measuring after which no further round begins, until decided.")
    ] = DEMO_MINUTES,
    quick: Annotated[bool, typer.Option("--quick", help="One short round, without torch.compile.")] = False,
) -> None:
    """The whole workflow on handwritten digits: train, export, quantise, measure, compare, report."""
    from dyno.cli import demo as module

    raise typer.Exit(module.demo(Path(out), rounds=rounds, minutes=minutes, quick=quick))


@command(MEASURE)
@options.takes(ComparisonOptions, ModelOptions, DataOptions, MeasurementOptions, RuntimeOptions, ClusterOptions)
def run(
    overrides: options.Overrides,
    models: options.Studied,
    out: options.Out = "",
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Measure failed trials again.", rich_help_panel=options.OUTPUT)
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List the trials and why any is refused.", rich_help_panel=options.OUTPUT),
    ] = False,
) -> None:
    """Measure models in every configuration that is asked for; the same command again resumes."""
    from dyno.cli import commands

    study = commands.study(overrides, models)
    if dry_run:
        raise typer.Exit(commands.dry_run(study))
    raise typer.Exit(commands.run(study, commands.folder(study, models, out), retry_failed=retry_failed))


@command(READ)
@options.takes(ComparisonOptions, DataOptions, MeasurementOptions, only="reference budget equivalent")
def show(
    overrides: options.Overrides,
    run: Annotated[Path | None, typer.Argument(help="A run folder.", metavar="RUN")] = None,
    format: options.Format = "text",
    by: Annotated[str, typer.Option(help="Columns to group by, e.g. backend,batch.")] = "",
    table: Annotated[str, typer.Option(help="One table: frontier, break-even, latency-model, sizes…; or all.")] = "",
    list_all: Annotated[bool, typer.Option("--list", help="Name every table, with a sentence on each.")] = False,
    over_time: Annotated[
        str,
        typer.Option(
            help="Instead write memory, utilisation, power and clock of trials over time, on one axis.",
            metavar="FILE.svg|png|csv",
        ),
    ] = "",
    trials: Annotated[
        str,
        typer.Option(
            help="With --over-time: ids or BACKEND/PRECISION, with commas.", show_default="the reference, the fastest"
        ),
    ] = "",
) -> None:
    """Print the table of a run's trials and the verdict, or another table."""
    from dyno.cli import commands

    if list_all:
        commands.list_tables(format)
    elif run is None:
        raise UserError("give the run folder to show, such as runs/demo")
    elif over_time or trials:
        commands.over_time(run, over_time, trials, overrides)
    else:
        commands.show(run, format, by, table, overrides)


@command(READ)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder to write into (default: the run's own).")] = "",
) -> None:
    """Write one self-contained HTML page, PNG charts and results.csv."""
    from dyno.cli import commands

    raise typer.Exit(commands.report(runs, Path(out) if out else runs[0]))


@command(MAKE)
@options.takes(ComparisonOptions, ModelOptions, DataOptions, omit=options.NOT_FOR_FILES)
def export(
    overrides: options.Overrides,
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .onnx")],
    batch: Annotated[str, typer.Option(help="A number, or 'dynamic'.")] = "dynamic",
    shape: Annotated[str, typer.Option(help="Batch, channels and size in one: N,C,H,W; -1 for a dynamic batch.")] = "",
    precision: Annotated[str, typer.Option(help="fp32, fp16, bf16 or int8.")] = "fp32",
    target: Annotated[
        str, typer.Option(help="Which engine the file is for: onnxruntime, openvino or tensorrt.")
    ] = "onnxruntime",
    opset: Annotated[int, typer.Option(help="ONNX opset.", show_default="18, or 17 for tensorrt")] = 0,
) -> None:
    """Export a model to ONNX, checked against the module at other batches; quantise it on real images for int8."""
    from dyno.cli import files

    files.export(overrides, model, out, batch=batch, shape=shape, precision=precision, target=target, opset=opset)


@command(MAKE)
@options.takes(*ONE, omit=f"{options.NOT_FOR_FILES} shapes threads", device="cpu, cuda:0 for TensorRT")
def build(
    overrides: options.Overrides,
    model: Annotated[str, typer.Argument(help="An ONNX file, or any model.", metavar="FILE.onnx")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .engine (TensorRT) or .xml (OpenVINO)")],
    backend: Annotated[
        str, typer.Option(help="Backend to build for, e.g. tensorrt_rtx.", show_default="by the suffix")
    ] = "",
    precision: Annotated[str, typer.Option(help="fp32, tf32, fp16, bf16, int8 or fp8.")] = "fp32",
    static: Annotated[
        int | None, typer.Option("--batch", help="The one batch of a static engine.", show_default="1")
    ] = None,
    low: Annotated[
        int, typer.Option("--min", help="Smallest batch of a dynamic engine.", show_default="1 with --max")
    ] = 0,
    opt: Annotated[
        int, typer.Option(help="The batch that a dynamic engine is tuned for.", show_default="as --max")
    ] = 0,
    high: Annotated[int, typer.Option("--max", help="Largest batch of a dynamic engine.", show_default=False)] = 0,
    profile: Annotated[str, typer.Option("--shapes", help="NAME:MIN,OPT,MAX, e.g. x:1x3x224x224,8x3x224x224,…")] = "",
    option: Annotated[list[str], typer.Option(help="NAME=VALUE of the backend, e.g. optimization=5.")] = [],  # noqa: B006
    repeat: Annotated[int, typer.Option(help="Number of builds; the engines are compared.")] = 1,
) -> None:
    """Build an engine's own file from ONNX or any model: a TensorRT engine, an OpenVINO IR."""
    from dyno.cli import files

    request = files.BuildOptions(
        backend, precision, static, files.profile(profile, low, opt, high), tuple(option), repeat
    )
    raise typer.Exit(files.build(overrides, model, out, request))


@command(MEASURE)
@options.takes(*ONE, MeasurementOptions, omit=f"{NOT_FOR_ONE} compared budget", **BY_FILE)
def time(
    overrides: options.Overrides,
    models: options.Models,
    out: options.Out = "",
    format: options.Format = "text",
    trtexec: Annotated[str, typer.Option(help="A trtexec log, or its exported times, to compare with.")] = "",
) -> None:
    """Time any module, ONNX file, engine or OpenVINO IR on generated or real data."""
    from dyno.cli import commands

    raise typer.Exit(commands.time(overrides, models, out, format, Path(trtexec) if trtexec else None))


@command(MEASURE)
@options.takes(*ONE, omit=f"{NOT_FOR_ONE} batches compared budget", **BY_FILE)
def stress(
    overrides: options.Overrides,
    models: options.Models,
    batches: Annotated[
        str, typer.Option(help="A phase for each: min, opt or max of the engine's profile, random, or a number.")
    ] = "min,opt,max,random",
    iterations: Annotated[int, typer.Option(help="Batches in each phase.")] = 10_000,
    out: options.Out = "",
) -> None:
    """Run a dynamic engine or ONNX file at changing batch sizes for long: every output checked, memory watched."""
    from dyno.cli import commands

    raise typer.Exit(commands.stress(overrides, models, out, batches, iterations))


@command(MEASURE)
@options.takes(*ONE, omit=f"{NOT_FOR_ONE} budget", **BY_FILE)
def agree(
    overrides: options.Overrides,
    models: options.Models,
    layers: layers_commands.Layers = False,
    top: layers_commands.Top = None,
    order: layers_commands.Order = None,
    rtol: options.Rtol = 1e-3,
    atol: options.Atol = 1e-8,
    least: options.Least = 0.0,
    out: options.Out = "",
    format: options.Format = "text",
) -> None:
    """Compare the outputs of several files or backends with the first: errors, share that agrees, top-10 table."""
    from dyno.cli import commands

    rows = {"top": top, "order": order}
    if layers:
        raise typer.Exit(layers_commands.agree_layers(overrides, models, rows, out, rtol, atol, least, format))
    layers_commands.refuse_without_layers(rows)
    raise typer.Exit(commands.agree(overrides, models, out, rtol, atol, least, format))


@command(MEASURE)
@options.takes(
    *ONE,
    MeasurementOptions,
    omit=f"{NOT_FOR_ONE} compared",
    data=...,
    **{**BY_FILE, **EVALUATION, "batches": f"8, or {FIXED}"},
)
def eval(
    overrides: options.Overrides,
    models: options.Models,
    per_class: Annotated[bool, typer.Option("--per-class", help="Show every class, not only the worst.")] = False,
    out: options.Out = "",
    format: options.Format = "text",
) -> None:
    """Accuracy on labelled images with intervals, classes and confusions, beside latency and the pipeline's rate."""
    from dyno.cli import commands

    raise typer.Exit(commands.evaluate(overrides, models, out, format, per_class))


command(MEASURE)(regression_commands.compare)
command(MEASURE)(regression_commands.bisect)
command(MEASURE)(video_commands.video)
command(MEASURE, "serve-test")(serving_commands.serve_test)
command(MAKE)(training_commands.train)
command(MAKE)(run_folders.take)
command(READ)(layers_commands.inspect)
command(MEASURE)(layers_commands.profile)
command(MEASURE, "cold-start")(layers_commands.cold_start)
command(MEASURE)(layers_commands.explain)
command(READ, "list")(run_folders.list_runs)
command(READ, "rm")(run_folders.remove)
command(READ, "open")(run_folders.open_report)


@command(MACHINE)
@options.takes(ComparisonOptions, ModelOptions, RuntimeOptions, omit="backends routes reference")
def calibrate(
    overrides: options.Overrides,
    model: Annotated[
        str, typer.Argument(help=f"{MODEL_HELP} (default: a small network of Dyno's).", metavar="[MODEL]")
    ] = "",
    minutes: Annotated[
        float, typer.Option(help="Minutes to measure for; the longer, the more certain the figures.")
    ] = SELF_TEST_MINUTES,
    rounds: Annotated[int, typer.Option(help="Rounds at most; at least 3.", show_default="as many as fit")] = 0,
    backend: Annotated[
        str, typer.Option(help="Backend, with options as NAME@option=value.", show_default="one that is installed")
    ] = "",
    builds: Annotated[
        bool, typer.Option("--builds", help="Fresh builds of the engine in each round, as part of the noise.")
    ] = False,
    format: options.Format = "text",
) -> None:
    """Test the instrument on this machine: false alarms, the smallest difference it can see, and a grade."""
    from dyno.cli import commands

    commands.calibrate(overrides, model, minutes, rounds, backend, builds, format)


@command(MACHINE)
@options.takes(RuntimeOptions, only="runtime")
def doctor(
    overrides: options.Overrides,
    format: options.Format = "text",
) -> None:
    """Check every backend, in this Python and those of --python: its version after a real operation, or the error."""
    from dyno.cli import doctor as module

    raise typer.Exit(module.doctor(overrides.get("runtime", {}), format))


def main() -> None:
    """Run the command line; a user's error becomes one line and exit code 2, an interrupt exit code 130."""
    exits.end(app)


if __name__ == "__main__":
    main()
