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


def output(comparison: Comparison, format: str, junit: str, summary: str) -> int:
    """Write the files, print the table and the sentences; the exit code."""
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
