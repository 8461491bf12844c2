"""What `dyno compare` prints and writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from dyno.analysis.formatting import bullet
from dyno.analysis.presentation.export import export
from dyno.api.comparison import Comparison
from dyno.worker.spec import plain


def output(found: Comparison, format: str, junit: str, summary: str) -> int:
    """Write the files, print the table and the sentences; the exit code."""
    if junit:  # before anything is printed: whoever reads it may be gone
        found.junit(junit)
    if summary:
        found.summary(summary)
    sentences = format in ("text", "markdown")
    table = replace(found.table, notes=()) if sentences else found.table
    print(export([table], format), end="")
    if sentences:
        print("\n" + "\n".join(map(plain if format == "text" else bullet, found.verdicts)))
        if found.folder and format == "text":
            print(f"\nrun folder: {plain(Path(found.folder))}")
    for note in found.notes:
        Console(stderr=True).print(f"dyno: {escape(plain(note))}", style="yellow", soft_wrap=True)
    return found.exit_code
