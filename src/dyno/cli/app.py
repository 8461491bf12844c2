"""The command line: each command is one call into a module; what is heavy is imported when a command needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from dyno import __version__
from dyno.cli import commands, data_commands, exits, options, run_folders
from dyno.layers import commands as layers_commands
from dyno.regression import commands as regression_commands
from dyno.serving import commands as serving_commands
from dyno.study.defaults import DEMO_MINUTES
from dyno.study.options import ComparisonOptions, DataOptions, ModelOptions, RuntimeOptions
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
@options.takes(*commands.ONE, omit=f"{options.NOT_FOR_FILES} shapes threads", device="cpu, cuda:0 for TensorRT")
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


command(MEASURE)(commands.run)
command(READ)(commands.show)
command(READ)(commands.report)
command(MEASURE)(commands.time)
command(MEASURE)(commands.stress)
command(MEASURE)(commands.agree)
command(MEASURE)(commands.eval)
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
command(MACHINE)(commands.calibrate)


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
