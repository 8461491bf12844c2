"""`dyno compare`: two stored runs, or two sides that are measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dyno.cli import options
from dyno.study_options import ComparisonOptions, DataOptions, MeasurementOptions, ModelOptions, RuntimeOptions
from dyno.worker.spec import UserError

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
    from dyno.api import comparison
    from dyno.cli.comparison.printed import output
    from dyno.planning.checks import check_format

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
