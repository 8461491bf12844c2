"""`dyno export` and `dyno build`: the files a study makes on its way, made by themselves."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dyno import commands
from dyno.execute import Files
from dyno.expand import look, model_spec, prepared
from dyno.progress import Progress
from dyno.store import parts
from dyno.study import Study, parse_size
from dyno.worker import system
from dyno.worker.backend import find
from dyno.worker.record import Record
from dyno.worker.spec import Artifact, DataSpec, Dims, Recipe, Runtime, Trial, UserError

if TYPE_CHECKING:
    import typer

TARGETS = ("onnxruntime", "openvino", "tensorrt")
ENGINES = {".xml": "openvino"}


def export(
    ctx: typer.Context, model: str, out: Path, *, batch: str, shape: str, precision: str, target: str
) -> Artifact:
    """Write the model as ONNX; `shape` "N,C,H,W" says batch (-1: dynamic), channels and size in one."""
    if out.suffix != ".onnx":
        raise UserError(f"export writes .onnx files, not {out.name}; `dyno build` writes engines")
    if target not in TARGETS:
        raise UserError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
    flags = {key: value for key, value in commands.given(ctx).items() if key != "batches"}
    if shape:
        batch, flags["channels"], flags["sizes"] = _shape(shape)
    study = Study(models=(model,), **{**flags, "precisions": (precision,)})
    trial = _trial(study, precision)
    dims = replace(trial.dims, batch=_number(batch))
    return _make(find("onnx_precision").recipe(replace(trial, dims=dims, options={"target": target})), out)


def build(ctx: typer.Context, model: str, out: Path, *, precision: str) -> Artifact:
    """Write an engine's own file, named by what the engine reads (.xml: OpenVINO IR)."""
    if out.suffix not in ENGINES:
        raise UserError(f"build writes {', '.join(ENGINES)} (OpenVINO IR), not {out.name}; `dyno export` writes .onnx")
    study = Study(models=(model,), **{**commands.given(ctx), "precisions": (precision,)})
    engine = find(ENGINES[out.suffix])
    trial = replace(_trial(study, precision), backend=engine.name)
    if refusal := engine.refuse(trial):
        raise UserError(refusal)
    if Path(trial.model.file).suffix == out.suffix:
        raise UserError(f"{model} is what build would write already")
    return _make(engine.recipe(trial), out)


def _shape(text: str) -> tuple[str, int, tuple[str]]:
    """Batch, channels and size from `-1,3,224,224` (commas, spaces or x between the numbers)."""
    try:
        n, c, h, w = (int(part) for part in text.replace(",", " ").replace("x", " ").split())
    except ValueError:
        raise UserError(f"shape {text!r} is not four numbers N,C,H,W such as -1,3,224,224") from None
    if n == 0 or n < -1 or min(c, h, w) < 1:
        raise UserError(f"shape {text!r} needs a batch from 1 on (or -1 for dynamic) and sizes from 1 on")
    return ("dynamic" if n < 0 else str(n)), c, (f"{h}x{w}",)


def _number(batch: str) -> int:
    """The batch to export with, 0 for a dynamic one."""
    if batch != "dynamic" and (not batch.isdecimal() or int(batch) < 1):
        raise UserError(f"batch {batch!r} is neither 'dynamic' nor a whole number from 1 on")
    return 0 if batch == "dynamic" else int(batch)


def _trial(study: Study, precision: str) -> Trial:
    model, found = look(model_spec(study, study.models[0]), study)
    size = parse_size(study.sizes[0]) if study.sizes else (int(found["size"][0]), int(found["size"][1]))
    data = prepared(study, model, size) if study.data else DataSpec(count=1)
    runtime = Runtime(threads=system.physical_cores())
    return Trial(model, "", precision, Dims(0, *size), data=data, runtime=runtime)


def _make(recipe: Recipe | None, out: Path) -> Artifact:
    """Make the file through the cache and copy it, with all its parts, to where the user wants it."""
    assert recipe is not None
    made = Files(None, Progress()).file(recipe)
    if isinstance(made, Record):
        raise UserError(f"{recipe.model.name}: {made.reason}")
    out.parent.mkdir(parents=True, exist_ok=True)
    for part in parts(Path(made.path)):
        shutil.copyfile(part, out.with_suffix(part.suffix))
    print(f"{out}  {_story(made)}")
    for warning in made.made_by.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)
    return made


def _story(made: Artifact) -> str:
    steps = ", ".join(f"{s['maker']} {s['precision']} {s['seconds']:.1f} s" for s in made.made_by.get("steps", ()))
    ends = "; ".join(f"{t.name} {t.dtype} {'x'.join(map(str, t.shape))}" for t in (*made.inputs, *made.outputs))
    return f"{made.bytes / 1e6:.2f} MB  {ends}  ({steps})"
