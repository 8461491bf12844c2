"""The command `dyno take`: take the winner home."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dyno.cli import options


def take(
    run: options.RunFolder,
    trial: Annotated[
        str,
        typer.Argument(help="A trial's id, or BACKEND/PRECISION (default: the verdict's winner).", metavar="[TRIAL]"),
    ] = "",
    out: Annotated[
        str, typer.Option("--out", "-o", help="File to write (default: MODEL-BACKEND-PRECISION here).")
    ] = "",
) -> None:
    """Write the winning file, and a script beside it that runs it in its own library as it was measured."""
    from dyno.analysis.tables import trial_table
    from dyno.api import take as module

    taken = module.take(trial_table.read(run), trial, Path(out) if out else None)
    print(f"{taken.label}: {taken.file} ({taken.bytes / 1e6:.2f} MB)")
    for note in taken.notes:
        print(f"warning: {note}", file=sys.stderr)
    print(f"run it: python {taken.script}")
