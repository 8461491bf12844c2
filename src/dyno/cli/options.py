"""Options of commands, made from the fields of dataclasses: type, default and help stand at the field, nowhere else."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import typer.core

from dyno.study import options as study_options
from dyno.study.defaults import TEXT_FORMATS, parse_trackers
from dyno.study.options import MODEL_HELP
from dyno.study.study import Study, parse_budget, parse_limits
from dyno.worker.serving.options import ServeOptions
from dyno.worker.spec import UserError, check_known
from dyno.worker.video.options import VideoOptions

WHAT, ACCURACY, EFFORT, WHERE = "What", "Accuracy", "Effort", "Where"
PANELS: dict[type, str] = {
    VideoOptions: "Video",
    ServeOptions: "Requests",
    study_options.ComparisonOptions: WHAT,
    study_options.ModelOptions: WHAT,
    study_options.DataOptions: ACCURACY,
    study_options.MeasurementOptions: EFFORT,
    study_options.RuntimeOptions: WHERE,
    study_options.ClusterOptions: WHERE,
}
# Fields of a study that are options of several commands.
CONFIGURATION_FIELDS = "backends precisions batches sizes"
MODEL_FIELDS = "shapes inputs weights pretrained classes channels mean std task seed"
IMAGE_FIELDS = "data calibration unreadable"
EFFORT_FIELDS = "rounds builds seconds warmup samples interval"
RUNTIME_FIELDS = "device threads runtime"
# commands on several forms of a model
FORM_FIELDS = f"sizes {MODEL_FIELDS} {IMAGE_FIELDS} builds build_timeout {RUNTIME_FIELDS}"
# Fields of repeatable options, with a value per use.
REPEATABLE = ("shapes", "inputs", "budget", "limit", "runtime", "settings", "add", "sheet", "baseline_python")

Studied = Annotated[list[str], typer.Argument(help=MODEL_HELP + "; or STUDY.toml", metavar="MODEL|STUDY.toml")]
Models = Annotated[list[str], typer.Argument(help=MODEL_HELP, metavar="MODEL")]
Model = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]
SomeRuns = Annotated[
    list[Path] | None, typer.Argument(help="Run folders.", metavar="RUN", show_default="the latest run")
]
SomeRun = Annotated[Path | None, typer.Argument(help="A run folder.", metavar="RUN", show_default="the latest run")]
Out = Annotated[str, typer.Option("--out", "-o", help="Run folder.", rich_help_panel=WHERE, show_default="runs/NAME")]
NEW_RUN_FOLDER = "a new one below runs/COMMAND"
NewOut = Annotated[
    str, typer.Option("--out", "-o", help="Run folder.", rich_help_panel=WHERE, show_default=NEW_RUN_FOLDER)
]


def _parse_format(format: str) -> str:
    """Return the format; raise `UserError` for an unknown one, before measuring."""
    check_known("format", format, TEXT_FORMATS)
    if format == "html":
        import_module("jinja2")  # fail before measuring
    return format


Format = Annotated[
    str, typer.Option(help="text, markdown, csv, json or html.", rich_help_panel=WHERE, callback=_parse_format)
]


def _parse_log(log: str) -> str:
    """Return the trackers; raise `UserError` for an unknown one or a missing library, before measuring."""
    parse_trackers(log)
    return log


Log = Annotated[
    str, typer.Option(help="Also log to mlflow, wandb or tensorboard.", rich_help_panel=WHERE, callback=_parse_log)
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="Measure one short round, for a first look. A build is stopped after 3 minutes.",
        rich_help_panel=EFFORT,
    ),
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Wait until other programs leave the processors free.", rich_help_panel=EFFORT)
]

F = TypeVar("F", bound=Callable[..., None])
Options = TypeVar("Options")


class Overrides(dict[str, Any]):
    """Options given by the user to a command, by field name, without defaults."""


def accept_options(*declared: type | str, rare: str = "", show_all: bool = False, **defaults: Any) -> Callable[[F], F]:
    """Give a command the options that it declares: all fields of a dataclass, or fields of `Study` by name.

    The command gets the user's options as `overrides`, and its own parameters as usual. Only `--help-all` shows its own
    `rare` parameters and, unless `show_all`, fields that aren't common. `defaults` are the command's own, for help, if
    they differ from the field's; `...` makes an option required.
    """
    options = [option for each in declared for option in _list_options(each)]
    rare_fields = {option.name for option in options if not (show_all or option.about.get("common"))}

    def decorate_command(command: F) -> F:
        params = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "overrides"]

        def call_command(ctx: typer.Context, **values: Any) -> None:
            overrides = Overrides(
                (option.name, option.read(values[option.name])) for option in options if is_given(ctx, option.name)
            )
            command(overrides=overrides, **{p.name: values[p.name] for p in params})

        field_params = [option.make_parameter(defaults.get(option.name)) for option in options]
        required = [p for p in params if p.default is p.empty]
        optional = [p for p in params if p.default is not p.empty]
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*required, *field_params, *optional)]
        signature = inspect.Signature([_make_parameter("ctx", typer.Context), *parameters])
        hints = {p.name: p.annotation for p in signature.parameters.values()}
        vars(call_command).update(__signature__=signature, rare=rare_fields | set(rare.split()))
        call_command.__name__, call_command.__doc__, call_command.__annotations__ = (
            command.__name__,
            command.__doc__,
            hints,
        )
        return typing.cast(F, call_command)

    return decorate_command


def takes_verbose(command: F) -> F:
    """Give a measuring command the option `--verbose`, which sets `Progress.is_verbose`."""

    @functools.wraps(command)
    def call_command(*args: Any, verbose: bool, **values: Any) -> None:
        from dyno.jobs.progress import Progress

        Progress.is_verbose = verbose
        command(*args, **values)

    help_text = "Without a terminal, print a line for each job."
    option = typer.Option("--verbose", "-v", help=help_text, rich_help_panel=WHERE)
    return add_flag(call_command, command, "verbose", option)


def add_flag(call_command: Any, command: F, name: str, option: Any) -> F:
    """Give the wrapper `call_command` the command's parameters, and one for a rare flag."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [*signature.parameters.values(), _make_parameter(name, Annotated[bool, option], False)]
    rare = {*getattr(command, "rare", ()), name}
    vars(call_command).update(__signature__=signature.replace(parameters=parameters), rare=rare)
    call_command.__annotations__ = {p.name: p.annotation for p in parameters}
    return typing.cast(F, call_command)


def _make_parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def is_given(ctx: typer.Context, name: str) -> bool:
    """Return whether the user gave the option, even if its value equals the default."""
    source = ctx.get_parameter_source(name)
    # Compared by name, as typer's own click has another enumeration than click.
    return source is not None and source.name == "COMMANDLINE"


@functools.cache
def _list_options(declared: type | str) -> list[_Option]:
    if isinstance(declared, str):
        by_name = {option.name: option for option in _list_options(Study)}
        return [by_name[name] for name in declared.split()]
    hints, fields = typing.get_type_hints(declared), dataclasses.fields(declared)
    return [_Option(f, hints[f.name], declared) for f in fields if f.metadata.get("flags", "") is not None]


def _strip_none(hint: Any) -> Any:
    return next((kind for kind in typing.get_args(hint) if kind is not type(None)), hint)


class _Option:
    """A dataclass's field as an option: typer's parameter for it, and the parser of its text."""

    def __init__(self, field: dataclasses.Field[Any], hint: Any, kind: type) -> None:
        self.name, self.default, self.about, self.hint = field.name, field.default, field.metadata, hint
        owners = (owner for owner in kind.__mro__ if owner in PANELS and self.name in owner.__annotations__)
        self.panel = next((PANELS[owner] for owner in owners), None)
        flags: str = self.about.get("flags") or "--" + self.name.replace("_", "-")
        self.flag, *self.aliases = flags.split()

    def make_parameter(self, default: Any) -> inspect.Parameter:
        """Return typer's parameter; `default` overrides the field's, and a text describes a default decided later."""
        described = default if isinstance(default, str) else self.about.get("usual", "") if default is None else ""
        value = self.default if default is None else default
        kind, help, metavar = _strip_none(self.hint), self.about["help"], None
        if self.name in REPEATABLE:
            kind, value, help, metavar = list[str], [], f"{help} May be repeated.", "TEXT"
        elif typing.get_origin(self.hint) is tuple:
            kind, metavar = list[str], "A,B,…"
            described = described or (",".join(map(str, value)) if isinstance(value, tuple) else "")
            value = []
        elif described or value == "":
            value = None
        flags = f"{self.flag}/--no-{self.flag[2:]}" if self.hint == bool | None else self.flag
        option = typer.Option(
            flags, *self.aliases, help=help, rich_help_panel=self.panel, show_default=described or True, metavar=metavar
        )
        annotation = Annotated[kind | None if value is None else kind, option]  # type: ignore[valid-type]
        return _make_parameter(self.name, annotation, inspect.Parameter.empty if default is ... else value)

    def read(self, value: Any) -> Any:
        if self.name in VALUE_READERS:
            return VALUE_READERS[self.name](value)
        if typing.get_origin(self.hint) is not tuple or self.name in REPEATABLE:
            return value
        item = typing.get_args(self.hint)[0]
        parts = (part.strip() for text in value for part in text.split(","))  # A,B is like the option given twice
        return tuple(self._parse_item(item, part) for part in parts if part)

    def _parse_item(self, kind: type, text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            type_name = "a whole number" if kind is int else "a number"
            example = VALUE_EXAMPLES.get(self.flag) or VALUE_EXAMPLES[kind]
            raise UserError(f"{self.flag} {text!r} is not {type_name}; write e.g. {self.flag} {example}") from None


def take_options(kind: type[Options], overrides: Overrides) -> Options:
    """Take the fields of a command's own dataclass out of the user's options."""
    names: Any = vars(kind)["__dataclass_fields__"]
    return kind(**{name: overrides.pop(name) for name in names if name in overrides})


def parse_pythons(texts: Sequence[str], flag: str = "--python") -> dict[str, dict[str, Any]]:
    """Return `[runtime]` tables from texts like `BACKEND=/path/to/python`."""
    pairs = (parse_interpreter(text, flag, "BACKEND=PATH, e.g. onnxruntime=/usr/bin/python3.10") for text in texts)
    return {name: {"python": path} for name, path in pairs}


def parse_interpreter(text: str, flag: str, form: str) -> tuple[str, str]:
    """Return the name and the absolute path of `NAME=PATH`; raise `UserError` for a wrong `form` or a missing file."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise UserError(f"{flag} {text!r} is not {form}")
    if not Path(path).is_file():
        raise UserError(f"no Python interpreter at {path}; correct the path in {flag} {text}")
    return name, str(Path(path).absolute())


VALUE_READERS: dict[str, Callable[[Any], Any]] = {
    "budget": parse_budget,
    "limit": parse_limits,
    "runtime": parse_pythons,
    "baseline_python": lambda texts: parse_pythons(texts, "--baseline-python"),
}
VALUE_EXAMPLES: dict[Any, str] = {int: "1,8,32", float: "0.485,0.456,0.406", "--rate": "20,40,80"}
