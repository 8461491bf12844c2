"""Commands on the inside of a network: inspect, profile, explain, cold-start, diff --layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dyno.cli import exits, options
from dyno.study.options import MODEL_HELP
from dyno.worker.spec import UserError

# The command `dyno inspect`: look inside a model, in one form or in several side by side.

Save = Annotated[
    list[Path],
    typer.Option(help="File for another tool, by its name's ending: see docs/layer-files.md.", metavar="FILE",
                 rich_help_panel=options.WHERE),
]  # fmt: skip
ModelAndForms = Annotated[
    list[str],
    typer.Argument(help=f"{MODEL_HELP}; then more models, or forms of the first: onnx, or BACKEND/PRECISION such as "
                        "openvino/int8.",
                   metavar="MODEL|FORM"),
]  # fmt: skip


@options.takes(f"sizes {options.MODEL} {options.IMAGES} {options.RUNTIME}", device="cpu, cuda:0 for TensorRT's engines")
def inspect(
    overrides: options.Overrides,
    models: ModelAndForms,
    batch: Annotated[int, typer.Option(help="Batch of the shapes.")] = 1,
    save: Save = [],  # noqa: B006
    format: options.Format = "text",
) -> None:
    """Show the layers of modules, ONNX graphs and engines side by side."""
    from dyno.layers import inspection
    from dyno.report.export import export
    from dyno.study.defaults import check_format

    check_format(format)
    inspected = inspection.inspect(*models, batch=batch, save=save, quiet=False, **overrides)
    print(export(inspected.tables, format), end="")
    raise typer.Exit(exits.left_out(inspected.left_out))


# The command `dyno profile`: how long each layer of a model takes.


@options.takes(f"{options.FORMS} seconds warmup")
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
    """Time every layer in PyTorch and in each engine. By the model's own names, beside the latency."""
    from dyno.layers import files, profiling
    from dyno.report.export import export
    from dyno.study.defaults import check_format

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


# The command `dyno explain`: why one engine is faster than another.

WHAT = (
    "A model and two forms of it, such as onnxruntime openvino/int8; a run folder and two of its trials; two models as "
    "they are; or a file that --save wrote."
)


@options.takes(f"{options.FORMS} seconds warmup timeout")
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
                     metavar="FILE", rich_help_panel=options.WHERE),
    ] = [],  # noqa: B006  (typer copies it)
    try_: Annotated[
        bool, typer.Option("--try", help="Then measure variants of B that may cure what costs it time.")
    ] = False,
    format: options.Format = "text",
) -> None:  # fmt: skip
    """Say why B is faster or slower than A. A waterfall in microseconds by parts of the model, and sentences."""
    from dyno.layers import explaining
    from dyno.layers.explaining import ExplanationResult
    from dyno.study.defaults import check_format

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


# The command `dyno bench cold-start`: from the start of a process to the first answer.


@options.takes(options.FORMS)
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
    """Time the start of a process up to its first answer. Imports, loading, the first call."""
    from dyno.layers import cold_start
    from dyno.report.export import export
    from dyno.study.defaults import check_format

    check_format(format)
    starts = cold_start.cold_start(*models, batch=batch, rounds=rounds, files=files, quiet=False, **overrides)
    print(export([starts.table], format), end="")
    raise typer.Exit(exits.left_out(starts.left_out))


# `dyno diff --layers`: which layer of an engine is off, and which few make most of the error.

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
        help="Layers that are listed, those with the largest own errors; 0 is all.",
        rich_help_panel=LAYERS,
        show_default="20",
    ),
]
Order = Annotated[
    str | None,
    typer.Option(
        help="graph: in execution order; error: largest own error first.",
        rich_help_panel=LAYERS,
        show_default="graph",
    ),
]
# Options of `dyno diff` by the names of their fields: as they are written, and what to give instead.
INSTEAD = {
    "backends": ("--backend", "forms behind the model, such as openvino/int8"),
    "precisions": ("--precision", "forms behind the model, such as openvino/int8"),
    "routes": ("--routes", "the exported file"),
}


def diff_layers(
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
    from dyno.layers import agreement as layers_agreement
    from dyno.report.export import export
    from dyno.study.defaults import check_format

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
    agreement = layers_agreement.agree_layers(
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
