"""The command `dyno cold-start`: from the start of a process to the first answer."""

from __future__ import annotations

from typing import Annotated

import typer

from dyno.cli import exits, options
from dyno.cli.inside.inspection import ModelAndForms
from dyno.cli.inside.profiling import UNUSED
from dyno.study_options import ComparisonOptions, DataOptions, MeasurementOptions, ModelOptions, RuntimeOptions


@options.takes(
    ComparisonOptions,
    ModelOptions,
    DataOptions,
    MeasurementOptions,
    RuntimeOptions,
    omit=f"{UNUSED} timeout seconds warmup",
)
def cold_start(
    overrides: options.Overrides,
    models: ModelAndForms,
    batch: Annotated[int, typer.Option(help="Batch.")] = 1,
    rounds: Annotated[int, typer.Option(help="Starts of each form, a process each.")] = 5,
    files: Annotated[
        str, typer.Option(help="Where code and model lie before a start: memory, disk, or both.")
    ] = "both",
    format: options.Format = "text",
) -> None:
    """Time everything from the start of a process to the first answer: imports, loading, the first call."""
    from dyno.analysis.presentation.export import export
    from dyno.api.inside import cold_start
    from dyno.planning.checks import check_format

    check_format(format)
    starts = cold_start.cold_start(*models, batch=batch, rounds=rounds, files=files, quiet=False, **overrides)
    print(export([starts.table], format), end="")
    raise typer.Exit(exits.left_out(starts.left_out))
