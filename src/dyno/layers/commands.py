"""Commands on a network's layers: inspect, profile, explain, cold-start, diff --layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from dyno.cli import exits, options
from dyno.study.options import MODEL_HELP
from dyno.worker.option_values import option
from dyno.worker.spec import UserError

if TYPE_CHECKING:
    from dyno.table import Table

# `dyno inspect`: the layers of a model, in one form or in several side by side.

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


@dataclass(frozen=True)
class InspectOptions:
    """How a model is inspected."""

    batch: int = option(1, "Batch of the shapes.", common=True)


@options.accept_options(
    InspectOptions,
    f"sizes {options.MODEL_FIELDS} {options.IMAGE_FIELDS} {options.RUNTIME_FIELDS}",
    device="cpu, cuda:0 for TensorRT's engines",
)
def inspect(
    overrides: options.Overrides,
    models: ModelAndForms,
    save: Save = [],  # noqa: B006
    format: options.Format = "text",
) -> None:
    """Show the layers of modules, ONNX graphs and engines side by side."""
    from dyno.layers import profiling

    result = profiling.inspect(*models, save=save, quiet=False, **overrides)
    print_tables(result.tables, result.left_out, format)


def print_tables(tables: Sequence[Table], left_out: Sequence[str], format: str) -> NoReturn:
    """Print the tables, and end with the exit code for the forms that were left out."""
    from dyno.report.export import export

    print(export(tables, format), end="")
    raise typer.Exit(exits.left_out(left_out))


# `dyno profile`: the time of each layer of a model.


@dataclass(frozen=True)
class ProfileOptions:
    """What is timed, and which layers are listed."""

    batch: int = option(1, "Batch.", common=True)
    runs: int = option(50, "Watched runs.", common=True)
    top: int = option(20, "Number of layers to list; 0: all.", common=True)
    order: str = option("time", "time: the slowest first; graph: as they run.", common=True)
    roofline: bool = option(False, "Also measure the device's ceilings, and rate the layers by them.", common=True)
    sheet: tuple[str, ...] = option(
        (),
        "With --roofline: the data sheet's ceilings too, such as fp16=989 (TFLOPS) or memory=4800 (GB/s).",
        flags="--data-sheet",
        common=True,
    )
    counters: bool = option(
        False, "On a GPU: also read hardware counters of each kernel, by NVIDIA's ncu.", common=True
    )


@options.accept_options(ProfileOptions, f"{options.FORM_FIELDS} seconds warmup")
def profile(
    overrides: options.Overrides,
    models: ModelAndForms,
    save: Save = [],  # noqa: B006
    format: options.Format = "text",
) -> None:
    """Time every layer in PyTorch and in each engine. Layers have the model's own names."""
    from dyno.layers import files, profiling
    from dyno.report.export import make_page

    if format == "html":
        files.check_library(files.LAYOUT_LIBRARY)
    result = profiling.profile(*models, save=save, quiet=False, **overrides)
    if format != "html":
        print_tables(result.tables, result.left_out, format)
    print(make_page(f"Time by layer: {result.name}", result.html))
    raise typer.Exit(exits.left_out(result.left_out))


# `dyno explain`: why one engine is faster than another.

WHAT = (
    "A model and two forms of it, such as onnxruntime openvino/int8; a run folder and two of its trials; two models as "
    "they are; or a file that --save wrote."
)


@dataclass(frozen=True)
class ExplainOptions:
    """How two forms are compared."""

    batch: int = option(1, "Batch.", common=True)
    rounds: int = option(5, "Number of processes per side, which take turns.", common=True)
    runs: int = option(50, "Watched runs in each process.", common=True)
    top: int = option(20, "Number of parts to list; 0: all.", common=True)
    prescriptions: bool = option(False, "Then measure variants of B that may be faster.", flags="--try", common=True)


@options.accept_options(ExplainOptions, f"{options.FORM_FIELDS} seconds warmup timeout")
def explain(
    overrides: options.Overrides,
    what: Annotated[list[str], typer.Argument(help=WHAT, metavar="MODEL|RUN A B|FILE.json")],
    save: Annotated[
        list[Path],
        typer.Option(help="File to write: .json keeps the measurements, .svg and .png draw them, .html is a page. "
                     "May be repeated.",
                     metavar="FILE", rich_help_panel=options.WHERE),
    ] = [],  # noqa: B006  (typer copies it)
    format: options.Format = "text",
) -> None:  # fmt: skip
    """Say why B is faster or slower than A. Print a waterfall in microseconds by parts of the model, and sentences."""
    from dyno.layers import explaining
    from dyno.layers.explaining import ExplanationResult

    is_early = "prescriptions" in overrides and format in ("text", "markdown")  # other formats print one document

    def print_first(result: ExplanationResult) -> None:
        if is_early:
            print(result.export(format), flush=True)

    result = explaining.explain(*what, save=save, report=print_first, quiet=False, **overrides)
    print(result.tried.export(format) if is_early and result.tried else result.export(format), end="")


# `dyno bench cold-start`: from the start of a process to the first answer.


@dataclass(frozen=True)
class ColdStartOptions:
    """How often, and from where, a form starts."""

    batch: int = option(1, "Batch.", common=True)
    rounds: int = option(5, "Starts of each form, one process per start.", common=True)
    files: str = option("both", "Where code and model lie before a start: memory, disk, or both.", common=True)


@options.accept_options(ColdStartOptions, options.FORM_FIELDS)
def cold_start(overrides: options.Overrides, models: ModelAndForms, format: options.Format = "text") -> None:
    """Time the start of a process up to its first answer. The parts are imports, loading and the first call."""
    from dyno.layers import cold_start

    starts = cold_start.bench_cold_start(*models, quiet=False, **overrides)
    print_tables([starts.table], starts.left_out, format)


# `dyno diff --layers`: the first layer that disagrees, and the few that make most of the error.


@dataclass(frozen=True)
class LayerOptions:
    """Layers that are compared."""

    layers: bool = option(
        False, "Compare layer by layer: MODEL, then its forms such as openvino/int8, or other ONNX files.", common=True
    )
    top: int = option(20, "Number of layers to list, those with the largest own errors; 0: all.", common=True)
    order: str = option("graph", "graph: in execution order; error: largest own error first.", common=True)


options.PANELS[LayerOptions] = "Layers"
# Options of `dyno diff` that --layers rejects, by field: flag and replacement
INSTEAD = {
    "backends": ("--backend", "forms behind the model, such as openvino/int8"),
    "precisions": ("--precision", "forms behind the model, such as openvino/int8"),
    "routes": ("--routes", "the exported file"),
}


def diff_layers(
    overrides: options.Overrides, models: Sequence[str], out: str, rtol: float, atol: float, least: float, format: str
) -> int:
    """Print the layers and findings; return 1 if the share of close output values is below `least`."""
    from dyno.layers import agreement as layers_agreement
    from dyno.report.export import export

    if out:
        raise UserError("--layers keeps no run folder; omit --out")
    for flag, replacement in (INSTEAD[name] for name in INSTEAD if name in overrides):
        raise UserError(f"--layers takes no {flag}; give {replacement}")
    batches = overrides.pop("batches", (1,))
    if len(batches) != 1:
        raise UserError("--layers compares one batch; give one, e.g. --batch 1")
    model, *other_models = models
    agreement = layers_agreement.diff_layers(
        model, *other_models, batch=batches[0], rtol=rtol, atol=atol, quiet=False, **overrides
    )
    print(export(agreement.tables, format), end="")
    exit_code = exits.left_out(agreement.left_out)
    return int(bool(least) and not agreement.close >= least) or exit_code
