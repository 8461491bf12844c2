"""The command `dyno profile`: how long each layer of a model takes."""

from __future__ import annotations

from typing import Annotated

import typer

from dyno.cli import exits, options
from dyno.cli.inside.inspection import ModelAndForms, Save
from dyno.study_options import ComparisonOptions, DataOptions, MeasurementOptions, ModelOptions, RuntimeOptions

UNUSED = (
    f"{options.NOT_FOR_FILES} rounds samples interval confirm boundaries turns block until minutes equivalent peak "
    "energy"
)


@options.takes(
    ComparisonOptions, ModelOptions, DataOptions, MeasurementOptions, RuntimeOptions, omit=f"{UNUSED} timeout"
)
def profile(
    overrides: options.Overrides,
    models: ModelAndForms,
    batch: Annotated[int, typer.Option(help="Batch.")] = 1,
    runs: Annotated[int, typer.Option(help="Watched runs.")] = 50,
    top: Annotated[int, typer.Option(help="Layers that are listed one by one; 0 is all.")] = 20,
    order: Annotated[str, typer.Option(help="time: the slowest first; graph: as they run.")] = "time",
    save: Save = [],  # noqa: B006
    roofline: Annotated[
        bool, typer.Option(help="Also measure the device's ceilings, and rate the layers by them.")
    ] = False,
    data_sheet: Annotated[
        list[str],
        typer.Option(
            help="With --roofline: the data sheet's ceilings too, such as fp16=989 (TFLOPS) or memory=4800 "
            "(GB/s). May be repeated.",
            metavar="NAME=RATE",
        ),
    ] = [],  # noqa: B006
    counters: Annotated[
        bool, typer.Option(help="On a GPU: also read hardware counters of each kernel, by NVIDIA's ncu.")
    ] = False,
    format: options.Format = "text",
) -> None:
    """Time every layer in PyTorch and in each engine, by the model's own names, beside the latency."""
    from dyno.analysis.presentation.export import export
    from dyno.api.inside import files, profiling
    from dyno.planning.checks import check_format

    check_format(format)
    if format == "html":
        files.check_library(files.LAYOUT)
    profiled = profiling.profile(
        *models,
        batch=batch,
        runs=runs,
        top=top,
        order=order,
        save=save,
        roofline=roofline,
        sheet=data_sheet,
        counters=counters,
        quiet=False,
        **overrides,
    )
    print(profiled.html if format == "html" else export(profiled.tables, format), end="")
    raise typer.Exit(exits.left_out(profiled.left_out))
