"""The command line: each command is one call into a module; what is heavy is imported when a command needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from dyno import __version__
from dyno.cli import commands, exits, files, options, run_folders
from dyno.layers import commands as layers_commands
from dyno.regression import commands as regression_commands
from dyno.serving import commands as serving_commands
from dyno.study.defaults import DEMO_MINUTES
from dyno.study.options import RuntimeOptions
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
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help", options.ALL]},
)
app.add_typer(files.data_commands, name="data", rich_help_panel=MAKE)


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
command(MAKE)(files.export)
command(MAKE)(files.build)
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
