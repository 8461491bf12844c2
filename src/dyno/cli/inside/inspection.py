"""The command `dyno inspect`: look inside a model, in one form or in several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dyno.cli import exits, options
from dyno.study_options import MODEL_HELP, ComparisonOptions, DataOptions, ModelOptions, RuntimeOptions

Save = Annotated[
    list[Path],
    typer.Option(help="File for another tool, by its name's ending: see docs/layer-files.md.", metavar="FILE",
                 rich_help_panel=options.OUTPUT),
]  # fmt: skip
ModelAndForms = Annotated[
    list[str],
    typer.Argument(help=f"{MODEL_HELP}; then more models, or forms of the first: onnx, or BACKEND/PRECISION such as "
                        "openvino/int8.",
                   metavar="MODEL [FORM...]"),
]  # fmt: skip


@options.takes(
    ComparisonOptions,
    ModelOptions,
    DataOptions,
    RuntimeOptions,
    omit=options.NOT_FOR_FILES,
    device="cpu, cuda:0 for TensorRT's engines",
)
def inspect(
    overrides: options.Overrides,
    models: ModelAndForms,
    batch: Annotated[int, typer.Option(help="Batch of the shapes.")] = 1,
    save: Save = [],  # noqa: B006
    format: options.Format = "text",
) -> None:
    """Show the layers of a module, an ONNX graph or an engine, or several side by side, aligned."""
    from dyno.analysis.presentation.export import export
    from dyno.api.inside import inspection
    from dyno.planning.checks import check_format

    check_format(format)
    inspected = inspection.inspect(*models, batch=batch, save=save, quiet=False, **overrides)
    print(export(inspected.tables, format), end="")
    raise typer.Exit(exits.left_out(inspected.left_out))
