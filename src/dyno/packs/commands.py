"""The commands `dyno pack`, `dyno verify` and `dyno reproduce`: a run as one file, which others can check."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dyno.cli import options, run_folders
from dyno.worker.spec import UserError, check_known, plain

Pack = Annotated[Path, typer.Argument(help="A file that dyno pack wrote.", metavar="FILE")]


def pack(
    run: options.SomeRun = None,
    out: Annotated[
        str, typer.Option("--out", "-o", help="File to write.", metavar="FILE", show_default="NAME.pack.zip")
    ] = "",
    with_names: Annotated[bool, typer.Option("--with-names", help="Keep the host's name.")] = False,
) -> None:
    """Write a run with its samples and its verdict into one file. It names no folder, user or host."""
    from dyno.packs import pack as module

    print(plain(module.pack(run or run_folders.find_latest(), out or None, with_names=with_names)))


def verify(file: Pack) -> None:
    """Check that a pack's verdict follows from its samples. Exit 1 if not, 2 if it can't be read."""
    from dyno.packs import pack as module

    result = module.verify(file)
    print("\n".join(map(plain, result.sentences)))
    raise typer.Exit(result.exit_code)


def reproduce(
    file: Pack,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Your own file of its model, checked by hash.", metavar="PATH")
    ] = None,
    data: Annotated[str, typer.Option(help="Your folder of its images, checked by hash.", metavar="DIR")] = "",
    out: Annotated[str, typer.Option("--out", "-o", help="Run folder.", show_default="runs/NAME-reproduced")] = "",
    minutes: Annotated[
        float | None, typer.Option(help="Minutes of measuring after which no further round begins.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Run without asking.")] = False,
    format: Annotated[str, typer.Option(help="text or json.")] = "text",
) -> None:
    """Run a pack's study here, and compare the answers. Exit 1 if they differ, 3 if trials didn't finish."""
    from dyno.packs import reproduction as module

    check_known("format", format, ("text", "json"))
    if not (yes or sys.stdin.isatty()):
        raise UserError("nobody can be asked here whether to run the study; add -y")
    result = module.reproduce(
        file, model=model or (), data=data, out=out or None, minutes=minutes, quiet=False,
        confirm=None if yes else lambda plan: typer.confirm(f"{plain(plan)} Go on?", err=True),
    )  # fmt: skip
    if format == "json":
        print(json.dumps(result.to_dict(), ensure_ascii=False, indent=1))
    else:
        print("\n".join([*map(plain, result.sentences), "", f"run folder: {plain(result.folder)}"]))
    raise typer.Exit(result.exit_code)
