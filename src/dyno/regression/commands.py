"""Commands that compare with earlier results: compare and bisect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from dyno.cli import options
from dyno.formatting import bullet
from dyno.study.options import ComparisonOptions, DataOptions, MeasurementOptions, ModelOptions, RuntimeOptions
from dyno.worker.spec import UserError, plain

if TYPE_CHECKING:
    from dyno.regression.comparison import Comparison

# `dyno compare`: two stored runs, or two sides that are measured here.

GATE = "Gate"
# Options that a comparison sets itself, or that its two sides can't have.
OMITTED = "routes reference budget search confirm peak energy turns compared until minutes equivalent"
DEFAULTS: dict[str, Any] = {"rounds": 5, "boundaries": "model", "backends": "the one for this kind of file"}

Junit = Annotated[str, typer.Option(help="Write the verdicts as JUnit's XML into this file.", rich_help_panel=GATE)]
Summary = Annotated[
    str, typer.Option(help="Append a Markdown summary to this file: $GITHUB_STEP_SUMMARY.", rich_help_panel=GATE)
]


@options.takes(
    ComparisonOptions, ModelOptions, DataOptions, MeasurementOptions, RuntimeOptions, omit=OMITTED, **DEFAULTS,
)  # fmt: skip
def compare(
    overrides: options.Overrides,
    a: Annotated[str, typer.Argument(help="What to compare with: a run folder, or a model.", metavar="A")],
    b: Annotated[str, typer.Argument(help="What to judge: a run folder, or a model.", metavar="[B]")] = "",
    again: Annotated[bool, typer.Option("--again", help="Measure stored runs once more, here and in turns.")] = False,
    against: Annotated[
        list[str], typer.Option(help="A is the same model with this BACKEND=PYTHON. May be repeated.", metavar="TEXT")
    ] = [],  # noqa: B006
    commits: Annotated[str, typer.Option(help="Git commits of A and B, A..B; no B is the file as it is now.")] = "",
    fail_on: Annotated[
        str,
        typer.Option(
            help="Exit 1 on any of: slower, less-accurate, disagree (needs --least), status, wrong-outputs. "
            "slower=2% is a gate: exit 3 where it is undecided.",
            rich_help_panel=GATE,
        ),
    ] = "slower,less-accurate,status,wrong-outputs",
    tolerance: Annotated[
        float, typer.Option(help="Relative slow-down that is still accepted.", rich_help_panel=GATE)
    ] = 0.02,
    least: options.Least = 0.0,
    rtol: options.Rtol = 1e-3,
    any_outputs: Annotated[
        bool,
        typer.Option("--any-outputs", help="Judge the speed even where B's outputs are wrong.", rich_help_panel=GATE),
    ] = False,
    junit: Junit = "",
    summary: Summary = "",
    out: options.Out = "",
    format: options.Format = "text",
) -> None:
    """Is B slower than A? Two runs, files, commits or versions of a library; exit 1 if B got worse, 3 if undecided."""
    from dyno.regression import comparison
    from dyno.study.defaults import check_format

    check_format(format)
    check_files(junit, summary)
    conditions = tuple(name.strip() for name in fail_on.split(",") if name.strip())
    rules = {"fail_on": conditions, "tolerance": tolerance, "least": least, "rtol": rtol, "any_outputs": any_outputs}
    settings = {**rules, **overrides}
    if against:
        settings["against"] = options.pythons(against, "--against")
    result = comparison.compare(a, b or None, again=again, commits=commits, out=out or None, quiet=False, **settings)
    raise typer.Exit(output(result, format, junit, summary))


def check_files(junit: str, summary: str) -> None:
    """Raise `UserError`, before anything is measured, for a file that can't be written.

    A summary is appended to an existing file, so no temporary file is created beside it.
    """
    from dyno.store import check_writable

    if junit:
        check_writable(Path(junit), making=True)
    if summary and Path(summary).is_dir():
        raise UserError(f"{summary} is a folder; give the file to write")


# `dyno bisect`: the first version of a library with which a model is slower.


@options.takes(
    ComparisonOptions,
    ModelOptions,
    DataOptions,
    MeasurementOptions,
    RuntimeOptions,
    omit=f"{OMITTED} runtime",
    **DEFAULTS,
)
def bisect(
    overrides: options.Overrides,
    model: options.Model,
    library: Annotated[str, typer.Option(help="Distribution whose versions are tried, e.g. onnxruntime.")] = "",
    versions: Annotated[
        str, typer.Option(help="Its versions in order, the good one first: 1.20.1,1.22.1,1.23.2. uv installs them.")
    ] = "",
    add: Annotated[
        list[str], typer.Option("--with", help="Another package to install beside each. May be repeated.")
    ] = [],  # noqa: B006
    pythons: Annotated[
        str, typer.Option(help="Or interpreters in order: good=PATH,bad=PATH.", metavar="A=PATH,…")
    ] = "",
    fail_on: Annotated[str, typer.Option(help="The slow-down that makes a version bad.")] = "slower=5%",
    out: options.Out = "",
) -> None:
    """Find the first version of a library with which a model is slower: exit 1 with it, 0 if none, 3 if undecided."""
    from dyno.regression import bisection as module
    from dyno.worker.spec import plain

    result = module.bisect(
        model, library=library, versions=_parse_items(versions), pythons=_parse_interpreters(pythons), add=add,
        fail_on=fail_on, out=out or None, quiet=False, **overrides,
    )  # fmt: skip
    print("\n".join(map(plain, result.verdicts)))
    raise typer.Exit(result.exit_code)


def _parse_items(text: str) -> list[str]:
    names = [item.strip() for item in text.split(",") if item.strip()]
    if len(set(names)) < len(names):
        raise UserError(f"{text!r} names a version twice; give each one once")
    return names


def _parse_interpreters(text: str) -> dict[str, str]:
    interpreters: dict[str, str] = {}
    for item in _parse_items(text):
        name, path = options.interpreter(item, "--pythons", "NAME=PATH, e.g. old=/opt/old/bin/python")
        if name in interpreters:
            raise UserError(f"--pythons uses the name {name!r} twice; give each interpreter its own name")
        interpreters[name] = path
    return interpreters


# What `dyno compare` prints and writes.


def output(comparison: Comparison, format: str, junit: str, summary: str) -> int:
    """Write the files, print the table and the sentences; the exit code."""
    from dyno.report.export import export

    if junit:  # before anything is printed: the reader of the pipe may be gone
        comparison.junit(junit)
    if summary:
        comparison.summary(summary)
    sentences = format in ("text", "markdown")
    table = replace(comparison.table, notes=()) if sentences else comparison.table
    print(export([table, *([comparison.video] if comparison.video else [])], format), end="")
    if sentences:
        print("\n" + "\n".join(map(plain if format == "text" else bullet, comparison.verdicts)))
        if comparison.folder and format == "text":
            print(f"\nrun folder: {plain(Path(comparison.folder))}")
    for note in comparison.notes:
        Console(stderr=True).print(f"dyno: {escape(plain(note))}", style="yellow", soft_wrap=True)
    return comparison.exit_code
