"""Commands that write files: `dyno export`, packs, and `dyno data imagenet-val`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dyno.cli import options, run_folders
from dyno.cli.exits import UNFINISHED, left_out
from dyno.cli.options import Overrides
from dyno.formatting import format_count, show, wrap_text
from dyno.store import check_writable, copy
from dyno.study.defaults import check_weights, one_model
from dyno.study.options import MODEL_HELP
from dyno.study.study import Choice, Study
from dyno.table import Table
from dyno.worker import registry, system
from dyno.worker.backend import Backend, FileFormat
from dyno.worker.nets import huggingface
from dyno.worker.option_values import option
from dyno.worker.record import Record
from dyno.worker.registry import find
from dyno.worker.spec import (
    BUILD_OPTIONS,
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
    check_known,
    clean_text,
    usual_name,
)

LAYER_TARGETS = ("onnxruntime", "openvino", "tensorrt")


@dataclass(frozen=True)
class ExportedFile:
    """A file that `dyno export` wrote: what it is in one line, and of a run's trial the script that runs it."""

    file: str
    bytes: int
    text: str
    notes: tuple[str, ...] = ()
    script: str = ""


@dataclass(frozen=True)
class WrittenFiles:
    """The files that `dyno pack` wrote, the pack first."""

    files: tuple[str, ...]


def _parse_format(format: str) -> str:
    check_known("format", format, ("text", "json"))
    return format


TextFormat = Annotated[str, typer.Option(help="text or json.", callback=_parse_format)]


def _print_json(result: Any) -> None:
    print(json.dumps(result, ensure_ascii=False, indent=1))


@dataclass(frozen=True)
class ExportOptions:
    """How a model is written as a file."""

    precision: str = option("fp32", "fp32, tf32, fp16, bf16, int8 or fp8.", common=True)
    batch: str = option("", "Fixed batch of the file, or dynamic.", "dynamic; of an engine 1", common=True)
    low: int = option(0, "Smallest batch of a dynamic engine.", "1 with --max", flags="--min")
    opt: int = option(0, "Batch to tune a dynamic engine for.", "as --max")
    high: int = option(0, "Largest batch of a dynamic engine.", "none: one batch", flags="--max", common=True)
    shapes: tuple[str, ...] = option(
        (),
        "For an ONNX file an input's shape NAME:1x3x224x224, or batch, channels and size as N,C,H,W (-1: any batch). "
        "For an engine NAME:MIN,OPT,MAX, e.g. x:1x3x224x224,8x3x224x224,16x3x224x224.",
        flags="--shapes --shape",
    )
    target: str = option("onnxruntime", f"Engine to write an ONNX file for: {', '.join(LAYER_TARGETS)}.")
    opset: int = option(0, "Opset of an ONNX file.", "18, or 17 for tensorrt")
    backend: str = option("", "Backend to build an engine for, e.g. tensorrt_rtx.", "by the suffix")
    repeat: int = option(1, "Number of builds of an engine; they are compared.")
    settings: tuple[str, ...] = option((), "NAME=VALUE of the backend, e.g. optimization=5.", flags="--option")


# Options of ONNX files only, and of engines only: fields and flags.
ONLY_ONNX = {"target": "--target", "opset": "--opset"}
ONLY_ENGINES = {
    "backend": "--backend", "low": "--min", "opt": "--opt", "high": "--max", "settings": "--option",
    "repeat": "--repeat", "device": "--device", "runtime": "--python",
}  # fmt: skip


@options.accept_options(
    ExportOptions,
    "sizes inputs weights pretrained classes channels mean std task seed data calibration unreadable device runtime",
    device="cpu, cuda:0 for TensorRT",
)
def export(
    overrides: Overrides,
    source: Annotated[str, typer.Argument(help=f"{MODEL_HELP}; or a run folder.", metavar="MODEL|RUN")],
    trial: Annotated[
        str,
        typer.Argument(help="A trial's id, or BACKEND/PRECISION.", metavar="TRIAL", show_default="the winner"),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o",
            help="File to write: .onnx, .xml (OpenVINO), .engine (TensorRT), .pt2 (AOTInductor), .tflite or .pte.",
            show_default="of a run MODEL-BACKEND-PRECISION",
        ),
    ] = None,
    format: TextFormat = "text",
) -> None:  # fmt: skip
    """Write an ONNX file or an engine, or a run's winner with a script. An ONNX file is checked against the model."""
    user_options = dict(overrides)
    export_options = options.take_options(ExportOptions, overrides)
    path = Path(source)
    is_model = ":" in source or path.exists() or registry.format_of(source)
    is_run = path.is_dir() and not huggingface.split_folder(source)[1]
    if is_run or trial or not (out or is_model):
        _print_export(_export_winner(path, trial, out, user_options), None, format)
        return
    if out is None:
        raise UserError(
            f"give the file to write {source} to: -o FILE, which ends in {', '.join(registry.list_suffixes())}"
        )
    file_format = registry.format_of(out)
    if file_format is None:
        raise UserError(f"export writes {', '.join(registry.list_suffixes())}, not {out.name}")
    other_flags = ONLY_ONNX if file_format.builders else ONLY_ENGINES
    if flag := next((other_flags[name] for name in other_flags if name in user_options), ""):
        raise UserError(f"{flag} is not for {out.suffix} files; omit it")
    if file_format.builders and path.suffix == out.suffix:
        raise UserError(f"{source} is already a {out.suffix} file; give the model to build it from")
    if path.is_file() and out.exists() and out.samefile(path):
        raise UserError(f"{out} is the model itself; give another file to write to")
    check_writable(out, parents=True)
    write = _export_engine if file_format.builders else _export_onnx
    _print_export(*write(source, out, file_format, export_options, overrides), format)


def _print_export(written: ExportedFile, builds: Table | None, format: str) -> None:
    from dyno.report.export import export as export_tables

    if format == "json":
        if builds:
            print(export_tables([builds], format, head=asdict(written)), end="")
        else:
            _print_json(asdict(written))
        return
    print((export_tables([builds]) if builds else "") + written.text)
    for note in written.notes:
        print(note, file=sys.stderr)
    if written.script:
        print(f"run it: python {shlex.quote(written.script)}")


def _export_winner(run: Path, trial: str, out: Path | None, flags: Mapping[str, object]) -> ExportedFile:
    """Write the file of a run's trial (its winner), and a script next to it that runs it as measured."""
    from dyno import winner
    from dyno.report.tables import trial_table

    if reason := run_folders.why_no_run(Path(os.path.realpath(run))):
        raise UserError(f"{run} {reason}" + ("" if run.exists() else "; give a model or a run folder"))
    if flags:
        raise UserError("a run's trial is exported as it was measured; omit every option but -o")
    result = winner.export_winner(trial_table.read_trials(run), trial, out)
    text = f"{result.label}: {result.file} ({show(result.bytes, 'bytes')})"
    notes = tuple(f"warning: {note}" for note in result.notes)
    return ExportedFile(str(result.file), result.bytes, text, notes, str(result.script))


Exported = tuple[ExportedFile, Table | None]  # a table of builds if there are several


def _export_onnx(
    model: str, out: Path, file_format: FileFormat, options: ExportOptions, overrides: Overrides
) -> Exported:
    check_known("target", options.target, LAYER_TARGETS)
    if options.opset and (allowed := find("onnxruntime").values["opset"](options.opset)):
        raise UserError(f"--opset {options.opset} can't be written; an export's opset must be {allowed}")
    batch, full_shapes = options.batch or "dynamic", [text for text in options.shapes if ":" not in text]
    if full_shapes and "sizes" in overrides:
        raise UserError("--shapes N,C,H,W and --size both set the image size; give one of them")
    if full_shapes:
        batch, overrides["channels"], overrides["sizes"] = _parse_shape(full_shapes[-1])
    input_shapes = tuple(text for text in options.shapes if ":" in text)
    study = one_model(model, {**overrides, "precisions": (options.precision,), "shapes": input_shapes})
    trial = _build_trial(study, options.precision, _parse_batch(batch))
    if trial.model.file and registry.format_of(trial.model.file) is not file_format:
        raise UserError(f"{Path(model).name} can't be made an ONNX file; give the model that it was made from")
    settings: dict[str, Option] = {"target": options.target, **({"opset": options.opset} if options.opset else {})}
    return _make_file(file_format.recipe(replace(trial, options=settings)), out), None


NO_MAX = "a dynamic engine needs --max, its largest batch (--min is 1 and --opt is --max unless given)"


def _make_profile(shapes: str, low: int, opt: int, high: int) -> str:
    """Return an engine's `profile` option from `--shapes`, or from the batches of `--min --opt --max`; else ""."""
    if shapes and (low or opt or high):
        raise UserError("--shapes and --min, --opt, --max both set the batches; give one or the other")
    if not (low or opt or high):
        return shapes
    if not high:
        raise UserError(NO_MAX)
    batches = (low or 1, opt or high, high)
    if min(batches) < 1 or sorted(batches) != list(batches):
        raise UserError(
            f"--min, --opt and --max are {batches[0]}, {batches[1]} and {batches[2]}; they must ascend, from at least 1"
        )
    return ":".join(map(str, batches))


def _export_engine(
    model: str, out: Path, file_format: FileFormat, options: ExportOptions, overrides: Overrides
) -> Exported:
    from dyno.study.interpreters import explain_missing, place_recipe, runtime_of

    shapes = _make_profile(",".join(options.shapes), options.low, options.opt, options.high)
    if options.batch == "dynamic" and not shapes:
        raise UserError(NO_MAX)
    fixed_batch = _parse_batch(options.batch) if options.batch else 0
    if options.repeat < 1:
        raise UserError(f"--repeat is {options.repeat}; it must be at least 1")
    engine = find(usual_name(options.backend) or file_format.builders[0])
    if engine.name not in file_format.builders:
        raise UserError(f"{engine.name} doesn't build {out.suffix} files; {' or '.join(file_format.builders)} does")
    choice = Choice.parse("@".join((engine.name, *options.settings)))
    engine.check_options(choice.options)
    precision, on_gpu = options.precision, "cuda" in engine.devices
    study = one_model(model, {**overrides, "precisions": (precision,)}, {"device": "cuda:0" if on_gpu else "cpu"})
    settings = {**choice.options, **({"profile": shapes} if shapes else {})}
    runtime = runtime_of(study, choice)
    if reason := explain_missing(engine.name, runtime):
        raise UserError(reason)
    if options.repeat > 1:
        return _compare_builds(study, engine, settings, fixed_batch or 1, options.repeat, out)
    if not on_gpu and precision in ("fp16", "bf16"):
        raise UserError(
            f"{engine.name} chooses {precision} when it runs a file, not when it makes one; omit --precision"
        )
    has_batch = on_gpu or file_format.on_device  # an IR takes any batch
    if shapes and not on_gpu:
        raise UserError(f"{engine.name}'s files have no range of batches; omit --min, --opt, --max and --shapes")
    if fixed_batch and not has_batch:
        raise UserError(f"{engine.name}'s files take any batch; omit --batch")
    trial = _build_trial(study, precision, (fixed_batch or 1) if has_batch and not shapes else 0)
    runtime = replace(runtime, threads=trial.runtime.threads)
    trial = replace(trial, backend=engine.name, options=settings, runtime=runtime)
    if refusal := engine.refuse(trial):
        raise UserError(refusal)
    return _make_file(place_recipe(engine.recipe(trial), study), out), None


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
    """Return the batch to export with; 0 if dynamic."""
    if batch != "dynamic" and (not batch.isdecimal() or int(batch) < 1):
        raise UserError(f"batch {batch!r} must be 'dynamic' or a whole number of at least 1")
    return 0 if batch == "dynamic" else int(batch)


def _build_trial(study: Study, precision: str, batch: int) -> Trial:
    """Build a trial of the model at this batch; raise `UserError` if it is free (0) but the module's is fixed."""
    from dyno.study.images import prepare_images
    from dyno.study.model_info import inspect_model, list_sizes, model_spec

    if len(study.sizes) > 1:
        raise UserError(f"a file is for one image size, not for {', '.join(study.sizes)}")
    check_weights(study, study.models)
    model, inspection = inspect_model(model_spec(study, study.models[0]), study)
    if not batch and inspection.batch and not model.file:
        reason = inspection.batch_reason or f"{model.name} takes only batch {inspection.batch}"
        raise UserError(f"{reason}; export with a fixed batch (--batch {inspection.batch})")
    size = list_sizes(study, inspection)[0]
    data = prepare_images(study, model, size) if study.data or study.calibration else DataSpec(count=1)
    runtime = Runtime(threads=system.physical_cores())
    return Trial(model, "", precision, Dims(batch, *size, inspection.shapes), data=data, runtime=runtime)


def _make_file(recipe: Recipe | None, out: Path) -> ExportedFile:
    """Make the file through the cache and copy it, with all its parts, to `out`."""
    from dyno.jobs.progress import Progress
    from dyno.runner.execute import Files

    assert recipe is not None
    progress = Progress()
    files = Files(progress)
    with progress.show_study([]):
        artifact = files.make_file(recipe)
    if isinstance(artifact, Record):
        raise UserError(f"{recipe.model.name}: {artifact.reason}")
    copy(Path(artifact.path), out)
    calibration = artifact.made_by.calibration
    notes = [f"note: {calibration.note}"] if calibration and calibration.note else []
    notes += [f"warning: {warning}" for warning in artifact.made_by.warnings]
    return ExportedFile(str(out), artifact.bytes, f"{out}  {_format_summary(artifact, files.built)}", tuple(notes))


def _format_summary(artifact: Artifact, built: int) -> str:
    """Format the file's size, inputs, outputs and making steps; all but the last `built` steps were cached."""
    steps = artifact.made_by.steps
    cached_count = len(steps) - built
    steps_text = ", ".join(
        f"{s.maker} {s.precision} {'cached' if i < cached_count else f'{s.seconds:.1f} s'}" for i, s in enumerate(steps)
    )
    tensors = (*artifact.inputs, *artifact.outputs)
    tensors_text = "; ".join(f"{t.name} {t.dtype} {'x'.join(map(str, t.shape))}" for t in tensors)
    return f"{show(artifact.bytes, 'bytes')}  {tensors_text}  ({steps_text})"


# `dyno export --repeat`: the same engine built several times, to show how much builds differ.

EXPORT_ROUNDS = 3


def _compare_builds(
    study: Study, engine: Backend, options: Mapping[str, Option], batch: int, repeat: int, out: Path
) -> Exported:
    """Build `repeat` times from scratch, time every build in fresh processes, write the fastest to `out`.

    The table has a row per build (layers, parameters, size, seconds, latency), and whether builds differ beyond noise.
    The records stay next to `out`, in a folder with the suffix .builds.
    """
    from dyno.api import run
    from dyno.report.tables import variance_tables

    if BUILD_OPTIONS not in engine.options:
        raise UserError(
            f"{engine.name} makes the same file every time; --repeat is for engines that are tuned by timing"
        )
    settings = {**options, TIMING_CACHE: False}
    suffix = "".join(f"@{key}={value}" for key, value in settings.items())
    builds = tuple(f"{engine.name}{suffix}@{BUILD_OPTIONS}={k}" for k in range(1, repeat + 1))
    rounds = max(EXPORT_ROUNDS, study.rounds)
    build_study = replace(
        study, backends=builds, batches=(batch,), rounds=rounds, until=FIXED, turns=False, boundaries=("model",)
    )
    data = run(build_study, out.with_suffix(".builds")).data
    fastest = variance_tables.find_fastest(data.records)
    if fastest is None or fastest.artifact is None:
        raise UserError(
            f"no build could be timed; `dyno show {shlex.quote(str(out.with_suffix('.builds')))}` has the reasons"
        )
    copy(Path(fastest.artifact.path), out)
    text = f"{out}  the fastest, {fastest.backend}"
    return ExportedFile(str(out), fastest.artifact.bytes, text), variance_tables.BUILDS.table(data)


MAX_LISTED = 3


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
    """Sort ImageNet's flat validation images into class folders. The same command again continues."""
    from dyno.data import flat as module
    from dyno.study.images import report_decoding

    if copy and move:
        raise UserError("--copy and --move can't be used together")
    with report_decoding(verbs=("sorting", "sorted")) as progress:
        transfer: module.Transfer = "copy" if copy else "move" if move else "link"
        result = module.sort_images(flat, out, Path(labels) if labels else None, order, transfer, progress)
    earlier = f", {result.present:,} of them before" if result.present else ""
    print(f"{result.images:,} images of {result.classes:,} classes are in {out / 'val'}{earlier}")
    if result.unlabelled:
        names = ", ".join(result.unlabelled[:MAX_LISTED]) + (", …" if len(result.unlabelled) > MAX_LISTED else "")
        print(
            f"dyno: left {format_count(len(result.unlabelled), 'image')} without a label in {flat}: {names}",
            file=sys.stderr,
        )
        raise typer.Exit(UNFINISHED)


# Packs: a run as one file, which others can check.

Pack = Annotated[Path, typer.Argument(help="A file that dyno pack wrote.", metavar="FILE")]


def pack(
    run: options.SomeRun = None,
    out: Annotated[
        str, typer.Option("--out", "-o", help="File to write.", metavar="FILE", show_default="NAME.pack.zip")
    ] = "",
    with_names: Annotated[bool, typer.Option("--with-names", help="Keep the host's name.")] = False,
    card: Annotated[
        bool, typer.Option("--card", help="Also write a Markdown card and an SVG badge for a model's README.")
    ] = False,
    format: TextFormat = "text",
) -> None:
    """Write a run with its samples and its verdict into one file. It names no folder, user or host."""
    from dyno.packs import card as cards
    from dyno.packs import pack as module

    file = module.pack(run or run_folders.find_latest(), out or None, with_names=with_names, card=card)
    paths = [str(path) for path in (file, *(cards.card_paths(file) if card else ()))]
    if format == "json":
        _print_json(asdict(WrittenFiles(tuple(paths))))
    else:
        print("\n".join(map(clean_text, paths)))


def verify(file: Pack, format: TextFormat = "text") -> None:
    """Check that a pack's verdict follows from its samples. Exit 1 if not, 2 if it can't be read."""
    from dyno.packs import verification

    result = verification.verify(file)
    if format == "json":
        _print_json(result.to_dict())
    else:
        print("\n".join(map(wrap_text, result.sentences)))
    raise typer.Exit(result.exit_code)


def reproduce(
    file: Pack,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Your copy of the pack's model, checked by hash.", metavar="PATH"),
    ] = None,
    data: Annotated[str, typer.Option(help="Your folder of the pack's images, checked by hash.", metavar="DIR")] = "",
    out: Annotated[str, typer.Option("--out", "-o", help="Run folder.", show_default="runs/NAME-reproduced")] = "",
    minutes: Annotated[
        float | None, typer.Option(help="Minutes of measuring after which no further round begins.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Run without asking.")] = False,
    format: TextFormat = "text",
) -> None:
    """Run a pack's study here, and compare the answers. Exit 1 if they differ, 3 if trials didn't finish."""
    from dyno.packs import reproduction as module

    if not (yes or sys.stdin.isatty()):
        raise UserError("without a terminal, dyno reproduce can't ask before it runs the study; add -y")
    result = module.reproduce(
        file, model=model or (), data=data, out=out or None, minutes=minutes, quiet=False,
        confirm=None if yes else lambda plan: typer.confirm(f"{clean_text(plan)} Go on?", err=True),
    )  # fmt: skip
    if format == "json":
        _print_json(result.to_dict())
    else:
        print("\n".join([*map(wrap_text, result.sentences), "", f"run folder: {clean_text(result.folder)}"]))
    raise typer.Exit(result.exit_code)


def site(
    packs: Annotated[Path, typer.Argument(help="Folder of packs written by dyno pack.", metavar="PACKS")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write into.")] = Path("site"),
) -> None:
    """Write a static site of packs. Each has a row and a report, and is verified again. Exit 3 if one is broken."""
    from dyno.packs import static_site as module

    table = module.write_site(packs, out)
    print(clean_text(out / module.INDEX_PAGE))
    raise typer.Exit(left_out(f"{row['pack']}: {row['problem']}" for row in table.rows if row.get("problem")))
