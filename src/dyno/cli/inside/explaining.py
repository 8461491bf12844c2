"""The command `dyno explain`: why one engine is faster than another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dyno.cli import options
from dyno.cli.inside.profiling import UNUSED
from dyno.study_options import ComparisonOptions, DataOptions, MeasurementOptions, ModelOptions, RuntimeOptions

WHAT = (
    "A model and two forms of it, such as onnxruntime openvino/int8; a run folder and two of its trials; two models as "
    "they are; or a file that --save wrote."
)


@options.takes(ComparisonOptions, ModelOptions, DataOptions, MeasurementOptions, RuntimeOptions, omit=UNUSED)
def explain(
    overrides: options.Overrides,
    what: Annotated[list[str], typer.Argument(help=WHAT, metavar="MODEL|RUN A B|FILE.json")],
    batch: Annotated[int, typer.Option(help="Batch.")] = 1,
    rounds: Annotated[int, typer.Option(help="Processes in which each side is measured, in turn.")] = 5,
    runs: Annotated[int, typer.Option(help="Watched runs in each process.")] = 50,
    top: Annotated[int, typer.Option(help="Parts that are listed one by one; 0 is all.")] = 20,
    save: Annotated[
        list[Path],
        typer.Option(help="File to write: .json keeps what was measured, .svg and .png draw it, .html is a page. "
                     "May be repeated.",
                     metavar="FILE", rich_help_panel=options.OUTPUT),
    ] = [],  # noqa: B006  (typer copies it)
    try_: Annotated[
        bool, typer.Option("--try", help="Then measure variants of B that may cure what costs it time.")
    ] = False,
    format: options.Format = "text",
) -> None:  # fmt: skip
    """Say why B is faster or slower than A: a waterfall in microseconds by parts of the model, and sentences."""
    from dyno.api.inside import explaining
    from dyno.api.inside.explaining import ExplanationResult
    from dyno.planning.checks import check_format

    check_format(format)
    model, *sides = what
    at_once = try_ and format in ("text", "markdown")  # of the others one document is expected

    def print_first(known: ExplanationResult) -> None:
        if at_once:
            print(known.export(format), flush=True)

    explained = explaining.explain(
        model,
        *sides,
        batch=batch,
        rounds=rounds,
        runs=runs,
        top=top,
        save=save,
        prescriptions=try_,
        first=print_first,
        quiet=False,
        **overrides,
    )
    print(explained.tried.export(format) if at_once and explained.tried else explained.export(format), end="")
