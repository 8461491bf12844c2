"""`dyno export`, `dyno build` and `dyno data`: make one file as a study would, or a folder of images ready."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dyno.cli import commands, options
from dyno.cli.exits import UNFINISHED
from dyno.cli.options import Overrides
from dyno.store import check_writable, copy
from dyno.study.defaults import check_weights, one_model
from dyno.study.options import ComparisonOptions, DataOptions, ModelOptions
from dyno.study.study import Choice, Study
from dyno.worker import registry, system
from dyno.worker.backend import Backend
from dyno.worker.extras import install
from dyno.worker.record import Record
from dyno.worker.registry import find
from dyno.worker.spec import (
    BUILD,
    FIXED,
    TIMING_CACHE,
    Artifact,
    DataSpec,
    Dims,
    Option,
    Recipe,
    Runtime,
    Trial,
    UserError,
)

TARGETS = ("onnxruntime", "openvino", "tensorrt")


@options.takes(ComparisonOptions, ModelOptions, DataOptions, omit=options.NOT_FOR_FILES)
def export(
    overrides: Overrides,
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .onnx")],
    batch: Annotated[str, typer.Option(help="A number, or 'dynamic'.")] = "dynamic",
    shape: Annotated[str, typer.Option(help="Batch, channels and size in one: N,C,H,W; -1 for a dynamic batch.")] = "",
    precision: Annotated[str, typer.Option(help="fp32, fp16, bf16 or int8.")] = "fp32",
    target: Annotated[
        str, typer.Option(help="Which engine the file is for: onnxruntime, openvino or tensorrt.")
    ] = "onnxruntime",
    opset: Annotated[int, typer.Option(help="ONNX opset.", show_default="18, or 17 for tensorrt")] = 0,
) -> None:
    """Export a model to ONNX, checked against the module at other batches; quantise it on real images for int8."""
    file_format = registry.format_of(out)
    if file_format is None or file_format.builders:
        raise UserError(
            f"export writes {_list_suffixes(built=False)} files, not {out.name}; `dyno build` writes engines"
        )
    if Path(model).is_file() and out.exists() and out.samefile(model):
        raise UserError(f"{out} is the model itself; give another file to write to")
    check_writable(out, making=True)
    if target not in TARGETS:
        raise UserError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    if opset and (allowed := find("onnxruntime").values["opset"](opset)):
        raise UserError(f"--opset {opset} can't be written; an export's opset must be {allowed}")
    if shape and "sizes" in overrides:
        raise UserError("--shape and --size both set the image size; give one of them")
    if shape:
        batch, overrides["channels"], overrides["sizes"] = _parse_shape(shape)
    study = one_model(model, {**overrides, "precisions": (precision,)})
    trial = _build_trial(study, precision, _parse_batch(batch))
    chosen: dict[str, Option] = {"target": target, **({"opset": opset} if opset else {})}
    _make_file(file_format.recipe(replace(trial, options=chosen)), out)


def _make_profile(shapes: str, low: int, opt: int, high: int) -> str:
    """Return an engine's `profile` option from `--shapes`, or from the batches of `--min --opt --max`; else ""."""
    if shapes and (low or opt or high):
        raise UserError("--shapes and --min, --opt, --max both set the batches; give one or the other")
    if not (low or opt or high):
        return shapes
    if not high:
        raise UserError("a dynamic engine needs --max, its largest batch (--min is 1 and --opt is --max unless given)")
    batches = (low or 1, opt or high, high)
    if min(batches) < 1 or sorted(batches) != list(batches):
        raise UserError(
            f"--min, --opt and --max are {batches[0]}, {batches[1]} and {batches[2]}; they must ascend, from at least 1"
        )
    return ":".join(map(str, batches))


@options.takes(*commands.ONE, omit=f"{options.NOT_FOR_FILES} shapes threads", device="cpu, cuda:0 for TensorRT")
def build(
    overrides: Overrides,
    model: Annotated[str, typer.Argument(help="An ONNX file, or any model.", metavar="FILE.onnx")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .engine (TensorRT) or .xml (OpenVINO)")],
    backend: Annotated[
        str, typer.Option(help="Backend to build for, e.g. tensorrt_rtx.", show_default="by the suffix")
    ] = "",
    precision: Annotated[str, typer.Option(help="fp32, tf32, fp16, bf16, int8 or fp8.")] = "fp32",
    static: Annotated[
        int | None, typer.Option("--batch", help="The one batch of a static engine.", show_default="1")
    ] = None,
    low: Annotated[
        int, typer.Option("--min", help="Smallest batch of a dynamic engine.", show_default="1 with --max")
    ] = 0,
    opt: Annotated[
        int, typer.Option(help="The batch that a dynamic engine is tuned for.", show_default="as --max")
    ] = 0,
    high: Annotated[int, typer.Option("--max", help="Largest batch of a dynamic engine.", show_default=False)] = 0,
    profile: Annotated[str, typer.Option("--shapes", help="NAME:MIN,OPT,MAX, e.g. x:1x3x224x224,8x3x224x224,…")] = "",
    option: Annotated[list[str], typer.Option(help="NAME=VALUE of the backend, e.g. optimization=5.")] = [],  # noqa: B006
    repeat: Annotated[int, typer.Option(help="Number of builds; the engines are compared.")] = 1,
) -> None:
    """Build an engine's own file from ONNX or any model: a TensorRT engine, an OpenVINO IR."""
    from dyno.study.interpreters import missing, runtime_of

    shapes = _make_profile(profile, low, opt, high)
    for name, value in (("--batch", static), ("--repeat", repeat)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    engine = _find_engine(model, out, backend)
    choice = Choice.parse("@".join((engine.name, *option)))
    engine.check_options(choice.options)
    on_gpu = "cuda" in engine.devices
    device = "cuda:0" if on_gpu else "cpu"
    study = one_model(model, {**overrides, "precisions": (precision,)}, {"device": device})
    chosen = {**choice.options, **({"profile": shapes} if shapes else {})}
    runtime = runtime_of(study, choice)
    if library := missing(engine.name, runtime):
        raise UserError(f"{library} is not installed; {install(library)}, or give its Python with --python")
    if repeat > 1:
        _compare_builds(study, engine, chosen, static or 1, repeat, out)
        return
    if not on_gpu and precision in ("fp16", "bf16"):
        raise UserError(
            f"{engine.name} chooses {precision} when it runs a file, not when it makes one; omit --precision"
        )
    if not on_gpu and (shapes or static is not None):
        raise UserError(f"{engine.name}'s files take any batch; omit --batch, --min, --opt, --max and --shapes")
    trial = _build_trial(study, precision, (static or 1) if on_gpu and not shapes else 0)
    runtime = replace(runtime, threads=trial.runtime.threads)
    trial = replace(trial, backend=engine.name, options=chosen, runtime=runtime)
    if refusal := engine.refuse(trial):
        raise UserError(refusal)
    _make_file(engine.recipe(trial), out)


def _find_engine(model: str, out: Path, backend: str) -> Backend:
    """Return the backend that builds the file, by its suffix unless one is named; raise `UserError` if none does."""
    file_format = registry.format_of(out)
    if file_format is None or not file_format.builders:
        raise UserError(
            f"build writes {_list_suffixes(built=True)}, not {out.name}; "
            f"`dyno export` writes {_list_suffixes(built=False)}"
        )
    if Path(model).suffix == out.suffix:
        raise UserError(f"{model} is already a {out.suffix} file; give the model to build it from")
    check_writable(out, making=True)
    engine = find(backend or file_format.builders[0])
    if engine.name not in file_format.builders:
        raise UserError(f"{engine.name} doesn't build {out.suffix} files; {' or '.join(file_format.builders)} does")
    return engine


def _list_suffixes(*, built: bool) -> str:
    """Return the suffixes of files that a backend builds, or of those that are exported."""
    return ", ".join(
        suffix for kind in registry.formats().values() if bool(kind.builders) == built for suffix in kind.suffixes
    )


def _parse_shape(text: str) -> tuple[str, int, tuple[str]]:
    """Return batch, channels and size from `-1,3,224,224` (commas, spaces or x between the numbers)."""
    try:
        n, c, h, w = (int(part) for part in text.replace(",", " ").replace("x", " ").split())
    except ValueError:
        raise UserError(f"shape {text!r} is not four numbers N,C,H,W such as -1,3,224,224") from None
    if n == 0 or n < -1 or min(c, h, w) < 1:
        raise UserError(
            f"shape {text!r} needs a batch of at least 1 (or -1 for a dynamic one), and sizes of at least 1"
        )
    return ("dynamic" if n < 0 else str(n)), c, (f"{h}x{w}",)


def _parse_batch(batch: str) -> int:
    """Return the batch to export with, 0 for a dynamic one."""
    if batch != "dynamic" and (not batch.isdecimal() or int(batch) < 1):
        raise UserError(f"batch {batch!r} must be 'dynamic' or a whole number of at least 1")
    return 0 if batch == "dynamic" else int(batch)


def _build_trial(study: Study, precision: str, batch: int) -> Trial:
    """Build a trial of the model at this batch; raise `UserError` for a free batch (0) of a module with a fixed one."""
    from dyno.study.images import prepared
    from dyno.study.model_info import inspect_model, model_spec, sizes

    if len(study.sizes) > 1:
        raise UserError(f"a file is for one image size, not for {', '.join(study.sizes)}")
    check_weights(study, study.models)
    model, inspection = inspect_model(model_spec(study, study.models[0]), study)
    if not batch and inspection.batch and not model.file:
        reason = inspection.batch_reason or f"{model.name} takes a batch of {inspection.batch} alone"
        raise UserError(f"{reason}; export with a fixed batch (--batch {inspection.batch})")
    size = sizes(study, inspection)[0]
    data = prepared(study, model, size) if study.data or study.calibration else DataSpec(count=1)
    runtime = Runtime(threads=system.physical_cores())
    return Trial(model, "", precision, Dims(batch, *size), data=data, runtime=runtime)


def _make_file(recipe: Recipe | None, out: Path) -> None:
    """Make the file through the cache and copy it, with all its parts, to `out`."""
    from dyno.jobs.progress import Progress
    from dyno.runner.execute import Files

    assert recipe is not None
    progress = Progress()
    files = Files(progress)
    with progress.running([]):
        artifact = files.file(recipe)
    if isinstance(artifact, Record):
        raise UserError(f"{recipe.model.name}: {artifact.reason}")
    copy(Path(artifact.path), out)
    print(f"{out}  {_format_summary(artifact, files.built)}")
    calibration = artifact.made_by.calibration
    if calibration and calibration.note:
        print(f"note: {calibration.note}", file=sys.stderr)
    for warning in artifact.made_by.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _format_summary(artifact: Artifact, built: int) -> str:
    """Return the file's size, inputs, outputs and the steps that made it: the last `built` now, others earlier."""
    steps = artifact.made_by.steps
    cached = len(steps) - built
    listed = ", ".join(
        f"{s.maker} {s.precision} {'cached' if i < cached else f'{s.seconds:.1f} s'}" for i, s in enumerate(steps)
    )
    tensors = (*artifact.inputs, *artifact.outputs)
    described = "; ".join(f"{t.name} {t.dtype} {'x'.join(map(str, t.shape))}" for t in tensors)
    return f"{artifact.bytes / 1e6:.2f} MB  {described}  ({listed})"


# `dyno build --repeat`: the same engine built several times, to show how much builds differ.

ROUNDS = 3


def _compare_builds(
    study: Study, engine: Backend, options: Mapping[str, Option], batch: int, repeat: int, out: Path
) -> None:
    """Build `repeat` times, each from nothing, time every build in fresh processes, write the fastest to `out`.

    Prints a row per build (layers, parameters, size, build seconds, latency) and whether builds differ beyond noise.
    The records stay beside `out`, in a folder with the suffix .builds.
    """
    from dyno.api import run
    from dyno.report.export import export as export_tables
    from dyno.report.tables import variance_tables

    if BUILD not in engine.options:
        raise UserError(
            f"{engine.name} makes the same file every time; --repeat is for engines that are tuned by timing"
        )
    fresh = {**options, TIMING_CACHE: False}
    suffix = "".join(f"@{key}={value}" for key, value in fresh.items())
    builds = tuple(f"{engine.name}{suffix}@{BUILD}={k}" for k in range(1, repeat + 1))
    rounds = max(ROUNDS, study.rounds)
    repeated = replace(
        study, backends=builds, batches=(batch,), rounds=rounds, until=FIXED, turns=False, boundaries=("model",)
    )
    data = run(repeated, out.with_suffix(".builds")).data
    print(export_tables([variance_tables.BUILDS.table(data)]), end="")
    best = variance_tables.fastest(data.records)
    if best is None or best.artifact is None:
        raise UserError(f"no build could be timed; `dyno show {out.with_suffix('.builds')}` has the reasons")
    copy(Path(best.artifact.path), out)
    print(f"{out}  the fastest, {best.backend}")


data_commands = typer.Typer(help="Make folders of images ready.", no_args_is_help=True)
SHOWN = 3


@data_commands.callback()
def _group_commands() -> None:
    """Make folders of images ready."""  # a callback makes typer keep the command's name though there is only one


@data_commands.command("imagenet-val")
def imagenet_val(
    flat: Annotated[Path, typer.Argument(help="Folder of ILSVRC2012_val_*.JPEG files.", metavar="FLAT")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder that gets val/<synset>/ inside.")],
    labels: Annotated[
        str, typer.Option(help="LOC_val_solution.csv, lines of a name and a synset, or a synset or number per line.")
    ] = "",
    order: Annotated[
        str, typer.Option(help="How --labels numbers the sorted synsets: synset, synset-0 or synset-1.")
    ] = "",
    copy: Annotated[bool, typer.Option("--copy", help="Copy instead of hard links.")] = False,
    move: Annotated[bool, typer.Option("--move", help="Move instead of hard links.")] = False,
) -> None:
    """Sort ImageNet's flat validation images into class folders; the same command again continues."""
    from dyno.data import flat as module
    from dyno.formatting import counting
    from dyno.study.images import decoding

    if copy and move:
        raise UserError("--copy and --move can't be used together")
    with decoding(verbs=("sorting", "sorted")) as progress:
        transfer: module.Transfer = "copy" if copy else "move" if move else "link"
        result = module.sort(flat, out, Path(labels) if labels else None, order, transfer, progress)
    earlier = f", {result.there:,} of them before" if result.there else ""
    print(f"{result.images:,} images of {result.classes:,} classes are in {out / 'val'}{earlier}")
    if result.unlabelled:
        names = ", ".join(result.unlabelled[:SHOWN]) + (", …" if len(result.unlabelled) > SHOWN else "")
        print(
            f"dyno: left {counting(len(result.unlabelled), 'image')} without a label in {flat}: {names}",
            file=sys.stderr,
        )
        raise typer.Exit(UNFINISHED)
