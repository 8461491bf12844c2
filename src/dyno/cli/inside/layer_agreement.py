"""`dyno agree --layers`: which layer of an engine is off, and which few make most of the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from dyno.cli import exits, options
from dyno.worker.spec import UserError

LAYERS = "Layers"
Layers = Annotated[
    bool,
    typer.Option(
        "--layers",
        rich_help_panel=LAYERS,
        help="Compare layer by layer, in forms behind the first model such as openvino/int8, or other ONNX files.",
    ),
]
Top = Annotated[
    int | None,
    typer.Option(
        help="Layers that are listed, of the largest errors of their own; 0 is all.",
        rich_help_panel=LAYERS,
        show_default="20",
    ),
]
Order = Annotated[
    str | None,
    typer.Option(
        help="graph: as they run; error: the largest error of its own first.",
        rich_help_panel=LAYERS,
        show_default="graph",
    ),
]
# Options of `dyno agree` by the names of their fields: as they are written, and what to give instead.
INSTEAD = {
    "backends": ("--backends", "forms behind the model, such as openvino/int8"),
    "precisions": ("--precision", "forms behind the model, such as openvino/int8"),
    "routes": ("--routes", "the exported file"),
}


def agree_layers(
    overrides: options.Overrides,
    models: Sequence[str],
    rows: Mapping[str, Any],
    out: str,
    rtol: float,
    atol: float,
    least: float,
    format: str,
) -> int:
    """Print the layers and the finding: 1 when the share of close output values is below `least`."""
    from dyno.analysis.presentation.export import export
    from dyno.api.inside import layer_agreement
    from dyno.planning.checks import check_format

    check_format(format)
    if out:
        raise UserError("--layers keeps no run folder; omit --out")
    for flag, instead in (INSTEAD[name] for name in INSTEAD if name in overrides):
        raise UserError(f"--layers takes no {flag}; give {instead}")
    given = {name: value for name, value in rows.items() if value is not None}
    batches = overrides.pop("batches", (1,))
    if len(batches) != 1:
        raise UserError("--layers compares one batch; give one, e.g. --batch 1")
    model, *others = models
    agreement = layer_agreement.agree_layers(
        model, *others, batch=batches[0], rtol=rtol, atol=atol, quiet=False, **given, **overrides
    )
    print(export(agreement.tables, format), end="")
    missing = exits.left_out(agreement.left_out)
    return int(agreement.close < least) or missing


def refuse_without_layers(rows: Mapping[str, Any]) -> None:
    """Raise `UserError` for an option that requires `--layers`."""
    for name, value in rows.items():
        if value is not None:
            raise UserError(f"--{name} is for --layers; add that, or omit it")
