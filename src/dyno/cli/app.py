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
from dyno.training import commands as training_commands
from dyno.videos import commands as video_commands
from dyno.worker.spec import ROUNDS, UserError

# Groups in which `dyno --help` lists commands.
MEASURE, RESULTS, FILES, INSPECT = "Measure", "Results", "Files", "Inspect"
EXAMPLES = (
    "dyno run torchvision:resnet18                # every engine that is installed",
    "dyno run net.py:build --data photos --precision fp32,int8 --budget top1=1",
    "dyno report                                  # the latest run, in the browser",
    "dyno export runs/resnet18 -o best            # its winner, and a script for it",
)


class Commands(options.LongHelp, typer.core.TyperGroup):
    """The commands by group; an unknown name is answered with what may have been meant, an old one with the new one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click's; a `UserError` for an unknown command."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UserError(exits.no_command(args[0], self.list_commands(ctx), ctx.command_path))
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """See click's."""
        if ctx.parent is None:
            with formatter.section("Examples"):
                formatter.write_dl([(line, "") for line in EXAMPLES])
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, each in self.commands.items():
            groups.setdefault(getattr(each, "rich_help_panel", "") or "Commands", []).append(
                (name, (each.help or "").partition(". ")[0].partition("\n")[0].removesuffix("."))
            )
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
        if ctx.meta.get(options.ALL):
            super().format_options(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(f"{ctx.command_path} COMMAND --help shows its common options, {options.ALL} all.")


def group(name: str, panel: str, help: str) -> typer.Typer:
    """Add a group of commands below that heading of `dyno --help`."""
    commands = typer.Typer(cls=Commands, no_args_is_help=True, help=help)
    app.add_typer(commands, name=name, rich_help_panel=panel)
    return commands


def add(function: Callable[..., None], panel: str = "", name: str | None = None, to: typer.Typer | None = None) -> None:
    """Add a command to a group, or below that heading of `dyno --help`."""
    (to or app).command(name, cls=options.Command, rich_help_panel=panel or None)(function)


app = typer.Typer(
    name="dyno",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help", options.ALL]},
)


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
    """Find the fastest way to run your model on this machine, and prove it."""


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
    """Train, quantise, measure and compare on handwritten digits. No download, and a processor is enough."""
    from dyno.cli import demo as module

    raise typer.Exit(module.demo(Path(out), rounds=rounds, minutes=minutes, quick=quick))


@options.takes("runtime", show_all=True)
def doctor(
    overrides: options.Overrides,
    format: options.Format = "text",
) -> None:
    """Check every backend here, and in the Pythons of --python. Each does a real operation."""
    from dyno.cli import doctor as module

    raise typer.Exit(module.doctor(overrides.get("runtime", {}), format))


measures = options.takes_verbose
add(measures(commands.run), MEASURE)
add(measures(commands.time), MEASURE)
add(measures(commands.eval), MEASURE)
add(measures(regression_commands.compare), MEASURE)
bench = group("bench", MEASURE, "Measure a video, requests, cold starts or changing batches.")
add(measures(video_commands.video), to=bench)
add(measures(serving_commands.serve), to=bench)
add(measures(layers_commands.cold_start), name="cold-start", to=bench)
add(measures(commands.stress), to=bench)
add(measures(demo), MEASURE)
add(commands.show, RESULTS)
add(commands.report, RESULTS)
runs = group("runs", RESULTS, "List runs, or remove them.")
add(run_folders.list_runs, name="list", to=runs)
add(run_folders.remove, name="rm", to=runs)
add(files.export, FILES)
add(files.pack, FILES)
add(files.verify, FILES)
add(measures(files.reproduce), FILES)
data = group("data", FILES, "Train on class folders, or sort images into them.")
add(training_commands.train, to=data)
add(files.imagenet_val, name="imagenet-val", to=data)
add(measures(layers_commands.profile), INSPECT)
add(measures(layers_commands.explain), INSPECT)
add(layers_commands.inspect, INSPECT)
add(measures(commands.diff), INSPECT)
add(doctor, INSPECT)
add(commands.selftest, INSPECT)


def main() -> None:
    """Run the command line; a user's error becomes one line and exit code 2, an interrupt exit code 130."""
    exits.end(app)


if __name__ == "__main__":
    main()
