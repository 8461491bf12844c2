"""The commands `dyno pack`, `dyno verify` and `dyno reproduce`: a run as one file, which others can check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dyno.cli import options, run_folders
from dyno.worker.spec import plain

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
