"""`dyno compare`: two stored runs, two sides measured here, or versions of a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from dyno.cli import options
from dyno.formatting import format_bullet, wrap_text
from dyno.worker.option_values import option
from dyno.worker.spec import UserError, clean_text

if TYPE_CHECKING:
    from dyno.regression.comparison import Comparison

GATE_PANEL = "Gate"
# Options shared by both sides of a comparison.
SHARED_OPTIONS = (
    f"{options.CONFIGURATION_FIELDS} {options.MODEL_FIELDS} {options.IMAGE_FIELDS} {options.EFFORT_FIELDS} boundaries "
    f"block timeout build_timeout {options.RUNTIME_FIELDS}"
)
DEFAULTS: dict[str, Any] = {"rounds": 5, "boundaries": "model", "backends": "the one for this kind of file"}

Junit = Annotated[
    str, typer.Option(help="Write the verdicts as JUnit's XML into this file.", rich_help_panel=GATE_PANEL)
]
Summary = Annotated[
    str, typer.Option(help="Append a Markdown summary to this file: $GITHUB_STEP_SUMMARY.", rich_help_panel=GATE_PANEL)
]


@dataclass(frozen=True)
class BisectOptions:
    """Which versions of a library are tried."""

    bisect: bool = option(False, "Find the first version of a library with which A is worse.", common=True)
    by: str = option("", "What is worse: speed, accuracy (needs --data), or agreement of outputs.", "speed")
    library: str = option("", "Distribution whose versions are tried, e.g. onnxruntime.")
    versions: str = option("", "Its versions in order, the good one first: 1.20.1,1.22.1,1.23.2. uv installs them.")
    add: tuple[str, ...] = option((), "Another package to install beside each.", flags="--with")
    pythons: str = option("", "Or interpreters in order: good=PATH,bad=PATH.")


@dataclass(frozen=True)
class SideOptions:
    """Sides of a comparison."""

    remeasure: bool = option(False, "Measure stored runs again, here and in turns.", common=True)
    baseline_python: tuple[str, ...] = option((), "A is the same model with this BACKEND=PYTHON.", common=True)
    commits: str = option("", "Git commits of A and B, A..B; without B the file as it is now.", common=True)


@dataclass(frozen=True)
class GateOptions:
    """When a comparison fails."""

    fail_on: str = option(
        "",
        "Exit 1 on any of: slower, less-accurate, disagree (needs --least), status, wrong-outputs. slower=2% is a gate "
        "(exit 3: undecided); less-accurate=0.5 accepts a loss in points.",
        "slower,less-accurate,status,wrong-outputs; with --bisect slower=5%, less-accurate or disagree",
        common=True,
    )
    tolerance: float = option(0.02, "Relative slow-down that is still accepted.")
    least: float = option(0.0, "Exit 1 when a smaller share of values agrees (0 to 1).")
    rtol: float = option(1e-3, "Relative difference of two outputs that still agree.")
    any_outputs: bool = option(False, "Judge the speed even if B's outputs are wrong.")


options.PANELS[GateOptions] = GATE_PANEL


@options.accept_options(BisectOptions, SideOptions, GateOptions, SHARED_OPTIONS, rare="junit summary", **DEFAULTS)
def compare(
    overrides: options.Overrides,
    a: Annotated[str, typer.Argument(help="What to compare with: a run folder, or a model.", metavar="A")],
    b: Annotated[str, typer.Argument(help="What to judge: a run folder, or a model.", metavar="B")] = "",
    junit: Junit = "",
    summary: Summary = "",
    out: options.NewOut = "",
    format: options.Format = "text",
) -> None:
    """Say whether B is slower than A: runs, files, commits, versions. Exit 1 if it is, 3 if a gate is undecided."""
    from dyno.regression import comparison

    versions = options.take_options(BisectOptions, overrides)
    fail_on = overrides.pop("fail_on", "")
    if versions.bisect:
        refused_options = {"B": b, "junit": junit, "summary": summary, "format": format != "text"}
        refused_options |= {f.name: f.name in overrides for kind in (GateOptions, SideOptions) for f in fields(kind)}
        if versions.by == "agreement":
            refused_options |= {"least": False, "rtol": False}
        _refuse_beside_bisect([name for name, given in refused_options.items() if given], overrides)
        raise typer.Exit(_bisect(a, versions, fail_on, out, overrides))
    if given := next((f.name for f in fields(versions) if getattr(versions, f.name)), ""):
        raise UserError(f"--{given.replace('add', 'with')} is for --bisect; add that, or omit it")
    check_files(junit, summary)
    if fail_on:
        overrides["fail_on"] = tuple(_parse_items(fail_on))
    result = comparison.compare(a, b or None, out=out or None, quiet=False, **overrides)
    raise typer.Exit(write_output(result, format, junit, summary))


def check_files(junit: str, summary: str) -> None:
    """Raise `UserError`, before measuring, for a file that can't be written.

    A summary is appended to an existing file, so no temporary file is created for it.
    """
    from dyno.store import check_writable

    if junit:
        check_writable(Path(junit), parents=True)
    if summary and Path(summary).is_dir():
        raise UserError(f"{summary} is a folder; give the file to write")


# `dyno compare --bisect`: the first version of a library with which a model is worse.


def _refuse_beside_bisect(names: Sequence[str], overrides: options.Overrides) -> None:
    if "runtime" in overrides:
        raise UserError("--bisect chooses the interpreters; omit --python, or give them as --pythons NAME=PATH,…")
    if names:
        flag = names[0] if names[0] == "B" else f"--{names[0].replace('_', '-')}"
        raise UserError(f"--bisect compares versions with one model; omit {flag}")


def _bisect(model: str, search: BisectOptions, fail_on: str, out: str, overrides: options.Overrides) -> int:
    """Find and print the first bad version; return 0 without one, 1 with one, 3 if undecided."""
    from dyno.regression import bisection

    result = bisection.bisect(
        model, library=search.library, versions=_parse_items(search.versions),
        pythons=_parse_interpreters(search.pythons), add=search.add, by=search.by or "speed", fail_on=fail_on,
        out=out or None, quiet=False, **overrides,
    )  # fmt: skip
    print("\n".join(map(wrap_text, result.verdicts)))
    return result.exit_code


def _parse_items(text: str) -> list[str]:
    names = [item.strip() for item in text.split(",") if item.strip()]
    if len(set(names)) < len(names):
        raise UserError(f"{text!r} has an item twice; give each one once")
    return names


def _parse_interpreters(text: str) -> dict[str, str]:
    interpreters: dict[str, str] = {}
    for item in _parse_items(text):
        name, path = options.parse_interpreter(item, "--pythons", "NAME=PATH, e.g. old=/opt/old/bin/python")
        if name in interpreters:
            raise UserError(f"--pythons uses the name {name!r} twice; give each interpreter its own name")
        interpreters[name] = path
    return interpreters


# Output of `dyno compare`.


def write_output(comparison: Comparison, format: str, junit: str, summary: str) -> int:
    """Write the files, print the table and the sentences; return the exit code."""
    from dyno.report.export import export

    if junit:  # first of all, as the reader of a pipe may be gone
        comparison.junit(junit)
    if summary:
        comparison.summary(summary)
    sentences = format in ("text", "markdown")
    table = replace(comparison.table, notes=()) if sentences else comparison.table
    print(export([table, *([comparison.video] if comparison.video else [])], format), end="")
    if sentences:
        print("\n" + "\n".join(map(wrap_text if format == "text" else format_bullet, comparison.verdicts)))
        if comparison.folder and format == "text":
            print(f"\nrun folder: {clean_text(Path(comparison.folder))}")
    for note in comparison.notes:
        Console(stderr=True).print(f"dyno: {escape(clean_text(note))}", style="yellow", soft_wrap=True)
    return comparison.exit_code
