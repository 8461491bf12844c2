"""typer's application: the commands listed in `app`, each a call into a module, and help by groups of options."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from dyno import __version__
from dyno.cli import exits, options
from dyno.cli.options import ACCURACY, EFFORT, WHAT, WHERE
from dyno.study.defaults import DEMO_MINUTES
from dyno.worker.spec import DEFAULT_ROUNDS, UserError

# Order of the groups in help; a command's other groups follow "Options". Examples need all their options shown.
PANEL_ORDER = ("Arguments", "Options", "", WHAT, ACCURACY, EFFORT, WHERE)
GROUP_EXAMPLES = {
    WHAT: "--backend pytorch,onnxruntime --batch 1,8",
    ACCURACY: "--data photos --budget top1=0.5",
    EFFORT: "--rounds 5 --seconds 1",
    WHERE: "--device cuda:0 --out runs/mine",
}
METAVARS: dict[Any, str] = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT"}
HELP_ALL = "--help-all"
# Commands that measure: they have --verbose.
MEASURING_COMMANDS = "run time eval compare demo video serve cold-start stress reproduce profile explain diff".split()
MAX_SUMMARY_LENGTH = 80  # characters of a command's summary

Functions = Mapping[str, "str | Mapping[str, str]"]


class LongHelp:
    """Mixin for help with options by group: common options only, all with `--help-all`."""

    callback: Any
    get_params: Any

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse as click does, and note `--help-all`, which is a name of the help option."""
        ctx.meta[HELP_ALL] = HELP_ALL in args
        return super().parse_args(ctx, args)  # type: ignore[misc]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options by group."""
        rare = () if ctx.meta.get(HELP_ALL) else getattr(self.callback, "rare", ())
        groups: dict[str, list[Any]] = {}
        parameters: list[Any] = self.get_params(ctx)
        for param in parameters:
            if param.name not in rare and HELP_ALL not in param.opts:
                heading = "Arguments" if param.param_type_name == "argument" else param.rich_help_panel or "Options"
                groups.setdefault(heading, []).append(param)
        order = {name: PANEL_ORDER.index(name if name in PANEL_ORDER else "") for name in groups}
        for heading in sorted(groups, key=order.__getitem__):
            example = GROUP_EXAMPLES.get(heading, "")
            flags = {flag for param in groups[heading] for flag in param.opts}
            is_complete = example and flags.issuperset(word for word in example.split() if word.startswith("--"))
            with formatter.section(f"{heading}, e.g. {example}" if is_complete else heading):
                formatter.write_dl([_describe(param, ctx) for param in groups[heading]])
        count = len([param for param in parameters if param.name in rare])
        if count:
            formatter.write_paragraph()
            formatter.write_text(f"{HELP_ALL} shows {count} more option{'s' * (count > 1)}.")


class Command(LongHelp, typer.core.TyperCommand):
    """A command with a short and a long help."""


def _describe(parameter: Any, ctx: Any) -> tuple[str, str]:
    """Return a parameter's flags, without its aliases, and its help."""
    param = copy.copy(parameter)
    long_flags = [flag for flag in parameter.opts if flag.startswith("--")]
    param.opts = [flag for flag in parameter.opts if flag not in long_flags[1:]]
    if parameter.metavar is None:
        kind = typing.get_type_hints(ctx.command.callback).get(parameter.name)
        param.metavar = METAVARS.get(next(iter(typing.get_args(kind)), kind), "TEXT")
    name, help = param.get_help_record(ctx)
    if parameter.param_type_name == "argument":
        name = param.metavar
    return name, re.sub(r"\[default: \((.*)\)(?=[\];])", r"[default: \1", help)


class Commands(LongHelp, typer.core.TyperGroup):
    """Group of commands; for an unknown name the error suggests the nearest command.

    `write_help` returns the help, if that isn't the list of the group's commands.
    """

    write_help: Callable[[], str] | None = None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve as click does, but raise `UserError` for an unknown command."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UserError(exits.no_command(args[0], self.list_commands(ctx), ctx.command_path))
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, by `write_help` if there is one."""
        if self.write_help is None:
            super().format_help(ctx, formatter)
            return
        formatter.write(self.write_help())
        if ctx.meta.get(HELP_ALL):
            super().format_options(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands; with `--help-all` the options too."""
        with formatter.section("Commands"):
            rows = self.commands.items()
            formatter.write_dl(
                [(name, command.get_short_help_str(MAX_SUMMARY_LENGTH).removesuffix(".")) for name, command in rows]
            )
        if ctx.meta.get(HELP_ALL):
            super().format_options(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(f"{ctx.command_path} COMMAND --help shows its common options, {HELP_ALL} all.")


def _print_version(show: bool) -> None:
    if show:
        print(f"dyno {__version__}")
        raise typer.Exit


def take_version(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take `--version` in place of a command."""


def demo(
    out: Annotated[str, typer.Option("--out", "-o", help="Run folder.")] = "runs/demo",
    rounds: Annotated[
        int | None,
        typer.Option(help="Exactly this many rounds.", show_default=f"{DEFAULT_ROUNDS}, then more until decided"),
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="Minutes of measuring after which undecided speeds get no further round.")
    ] = DEMO_MINUTES,
    quick: Annotated[bool, typer.Option("--quick", help="One short round, without torch.compile.")] = False,
) -> None:
    """Train, quantise, measure and compare on handwritten digits. No download, and a processor is enough."""
    from dyno.cli import demo as module

    raise typer.Exit(module.demo(Path(out), rounds=rounds, minutes=minutes, quick=quick))


@options.accept_options("runtime", show_all=True)
def doctor(overrides: options.Overrides, format: options.Format = "text") -> None:
    """Check every backend here, and in the Pythons of --python. Each does a real operation."""
    from dyno.cli import doctor as module

    raise typer.Exit(module.doctor(overrides.get("runtime", {}), format))


def make_app(
    groups: Mapping[str, Functions], descriptions: Mapping[str, str], write_help: Callable[[], str]
) -> typer.Typer:
    """Build the application from functions by heading, with the help of each group and of the whole."""
    group_class = type("Application", (Commands,), {"write_help": staticmethod(write_help)})
    app = typer.Typer(
        name="dyno",
        cls=group_class,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help", HELP_ALL]},
    )
    app.callback()(take_version)
    for functions in groups.values():
        for name, target in functions.items():
            if isinstance(target, str):
                _add_command(app, name, target)
                continue
            group = typer.Typer(cls=Commands, no_args_is_help=True, help=descriptions[name])
            app.add_typer(group, name=name)
            for command_name, location in target.items():
                _add_command(group, command_name, location)
    return app


def _take_schema(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that has `--format` the option `--schema`, which prints the schema of its JSON."""
    if "format" not in inspect.signature(command).parameters:
        return command

    def call_command(*args: Any, schema: bool, **values: Any) -> None:
        command(*args, **values)

    option = typer.Option(
        "--schema", help="Print the JSON Schema of --format json.", rich_help_panel=WHERE, is_eager=True,
        callback=_print_schema,
    )  # fmt: skip
    return options.add_flag(functools.wraps(command)(call_command), command, "schema", option)


def _print_schema(ctx: typer.Context, show: bool) -> None:
    if show:
        from dyno.cli import schemas

        print(json.dumps(schemas.describe_command(ctx.command_path.partition(" ")[2]), ensure_ascii=False, indent=1))
        raise typer.Exit


def _add_command(group: typer.Typer, name: str, location: str) -> None:
    module, _, function = location.partition(":")
    command = getattr(importlib.import_module(module), function)
    command = options.takes_verbose(command) if name in MEASURING_COMMANDS else command
    group.command(name, cls=Command)(_take_schema(command))
