"""Scripts that run a trial's model in its own library, with the trial's settings, without Dyno.

All have the same parts: constants for the settings, `load()` and `run(model, feeds)`; for a model with one image input
also `prepare(path)`, which preprocesses a photograph as in the measurement.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pprint import pformat
from typing import Any

from dyno.worker import plugins, tasks
from dyno.worker.inputs import input_data, specs
from dyno.worker.inputs.specs import static_shapes
from dyno.worker.spec import BATCH_AXIS, Artifact, Tensor, Trial, UserError

ENTRY_POINT_GROUP = "dyno.scripts"


def write(trial: Trial, artifact: Artifact | None, facts: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """Write script.py into the folder, with a module's files: state.pt, and model.py for copied code.

    `facts` has `script` and `file` (names of both), the trial's `outputs` by name, the `options` in the engine's run,
    the weights' `weights_sha256`, and the `story` for the script's docstring. Return the names of the written files.
    Raise a `UserError` for a backend without scripts.
    """
    scripts = plugins.list_declared(sys.modules[__name__], Script, ENTRY_POINT_GROUP)
    if trial.backend not in scripts:
        raise UserError(f"there is no script for {trial.backend}; one can be written for {', '.join(scripts)}")
    part = scripts[trial.backend].write_part(trial, artifact, facts, folder)
    text = write_script(part, trial, inputs_of(trial, artifact), facts)
    (folder / "script.py").write_text(text, encoding="utf-8")
    return tuple(sorted(path.name for path in folder.iterdir() if path.name in ("script.py", "state.pt", "model.py")))


PREPARED = '''

def prepare(path):
    """A photograph as the network's input, channels x height x width, as it was for the measurement."""
    from PIL import Image{more}

    _, {axes} = INPUTS[{name!r}][0]
    with Image.open(path) as picture:
{upright}        if picture.mode in ("I", "F"):
            sys.exit(f"{{path}}: its pixels have no known range; save it in 8 bits")
        if picture.mode.startswith("I;16"):  # its upper 8 bits: `convert` makes what is above 255 white
            picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
        picture = picture.convert("L" if channels == 1 else "RGB")
'''
CROPPED = """        size = width, height
        if RESIZE:  # this times the crop, one side in proportion or (SQUASH) neither; then the centre
            wide, high = int(width * RESIZE + 1e-6), int(height * RESIZE + 1e-6)
            if SQUASH:
                size = wide, high
            elif picture.width * high <= picture.height * wide:
                size = wide, wide * picture.height // picture.width
            else:
                size = high * picture.width // picture.height, high
        picture = picture.resize(size, Image.Resampling[INTERPOLATION])
        left, top = round((picture.width - width) / 2), round((picture.height - height) / 2)
        picture = picture.crop((left, top, left + width, top + height))
    pixels = np.asarray(picture).reshape(height, width, channels).transpose(2, 0, 1)
"""
LETTERBOXED = """        scale = min(height / picture.height, width / picture.width)
        high, wide = max(round(picture.height * scale), 1), max(round(picture.width * scale), 1)
        top, left = round((height - high) / 2 - 0.1), round((width - wide) / 2 - 0.1)
        steps = (picture.width / wide, 0, 0, 0, picture.height / high, 0)  # between four pixels, as OpenCV's resize
        picture = picture.transform((wide, high), Image.Transform.AFFINE, steps, Image.Resampling.BILINEAR)
    pixels = np.full((channels, height, width), 114, np.uint8)
    inner = np.asarray(picture).reshape(high, wide, channels).transpose(2, 0, 1)
    pixels[:, top : top + high, left : left + wide] = inner
"""
NORMALISED = """    values = pixels.astype(np.float32)
    values /= 255
    values -= np.array(MEAN, np.float32).reshape(-1, 1, 1)
    values /= np.array(STD, np.float32).reshape(-1, 1, 1)
    return values
"""
FED = '''

def feeds_of(paths):
    """The inputs by name: a batch of photographs, repeated where they are fewer, or random numbers without any."""
    rng = np.random.default_rng(0)
    feeds = {{}}
    for name, (shape, kind) in INPUTS.items():
        if name not in RANGES:
            feeds[name] = rng.standard_normal(shape).astype(kind)
        elif kind.startswith("float"):
            feeds[name] = rng.uniform(*RANGES[name], shape).astype(kind)
        else:
            feeds[name] = rng.integers(*RANGES[name], shape, endpoint=True).astype(kind)
{photographs}    return feeds
'''
PHOTOGRAPHS = """    if paths:
        (batch, *_), kind = INPUTS[{name!r}]
        feeds[{name!r}] = np.stack([prepare(paths[k % len(paths)]) for k in range(batch)]).astype(kind){arranged}
"""
NO_PHOTOGRAPHS = """    if paths:
        sys.exit("it takes no photographs: omit them, or put your own values into feeds")
"""
MAIN = """

if __name__ == "__main__":
    model, paths = load(), sys.argv[1:]
    for first in range(0, len(paths) or 1, {batch}):
        shown = paths[first : first + {batch}]
        feeds = feeds_of(shown)
        if len(paths) > {batch}:
            print(*shown)
        batches = {{len(values) for values in feeds.values() if np.ndim(values)}}
        for name, values in run(model, feeds).items():
            print(name, values.dtype, "x".join(map(str, values.shape)))
            if values.ndim == 2 and values.size and len(values) in batches:
                print("  class with the highest score:", *values.argmax(axis=1)[: len(shown) or None])
"""


@dataclass(frozen=True)
class ScriptPart:
    """One library's part of a script: its distributions, imports, constants by name, and code."""

    needs: tuple[str, ...]
    imports: str
    constants: Mapping[str, Any]
    code: str


@dataclass(frozen=True)
class Script:
    """A backend's scripts; `write_part(trial, artifact, facts, folder)` returns its part, see `snippets.write`."""

    name: str  # the backend's
    write_part: Callable[[Trial, Artifact | None, dict[str, Any], Path], ScriptPart]


def inputs_of(trial: Trial, artifact: Artifact | None) -> tuple[Tensor, ...]:
    """Return every input with its shape in the trial, from the file or the module's description."""
    if artifact is not None:
        shapes = static_shapes(artifact.inputs, trial.dims)
        return tuple(Tensor(t.name, t.dtype, shapes[t.name]) for t in artifact.inputs)
    dims = trial.dims
    shape = dims.resolve(dims.shapes.get("input", (BATCH_AXIS, trial.model.channels, "height", "width")))
    tensors = specs.list_tensors(trial.model.inputs, dims) or (Tensor("input", "float32", tuple(shape)),)
    return tuple(replace(t, dtype="uint8") for t in tensors) if input_data.wants_pixels(trial.options) else tensors


def write_script(part: ScriptPart, trial: Trial, tensors: tuple[Tensor, ...], facts: Mapping[str, Any]) -> str:
    """Return the whole script."""
    image = _find_image(trial, tensors)
    constants = {
        "INPUTS": {t.name: (tuple(t.shape), t.dtype) for t in tensors},
        "RANGES": _find_ranges(trial, tensors),
        **part.constants,
    }
    if image is not None:
        constants |= _collect_preparation(trial, image)
    photographs = NO_PHOTOGRAPHS
    if image is not None:
        suffix = ".transpose(0, 2, 3, 1)" if specs.channels_last(image.shape) else ""
        photographs = PHOTOGRAPHS.format(name=image.name, arranged=suffix)
    return "".join(
        (
            _write_head(part, trial, facts, image is not None),
            f"import sys\nfrom pathlib import Path\n\nimport numpy as np\n{part.imports}\n",
            *(
                f"{name} = {value if name == 'FILE' else pformat(value, width=110)}\n"
                for name, value in constants.items()
            ),
            part.code,
            _write_preparation(trial, image) if image is not None else "",
            FED.format(photographs=photographs),
            MAIN.format(batch=1 if image is None else image.shape[0]),
        )
    )


def _write_head(part: ScriptPart, trial: Trial, facts: Mapping[str, Any], has_image: bool) -> str:
    script = shlex.quote(facts["script"])
    lines = [f'"""{facts["story"]}', "", f"    python {script}                # random numbers"]
    lines += [f"    python {script} PHOTO.jpg …    # photographs, prepared as for the measurement"] if has_image else []
    needs = ", ".join((*part.needs, *(("Pillow for photographs",) if has_image else ())))
    lines += ["", f"Needs {needs}. Written by `dyno export`, but runs without Dyno."]
    lines += [note] if (note := tasks.find_task(trial.model.task).note) else []
    return "\n".join(lines).replace("\\", "/") + '\n"""\n\n'


def _find_image(trial: Trial, tensors: tuple[Tensor, ...]) -> Tensor | None:
    """Return the image input if all other inputs have fixed values, else None."""
    fixed_names = {spec.name for spec in trial.model.inputs if spec.low is not None and spec.low == spec.high}
    free = [tensor for tensor in tensors if tensor.name not in fixed_names]
    is_image = len(free) == 1 and len(free[0].shape) == 4 and free[0].shape[specs.find_axes(free[0].shape)[0]] in (1, 3)
    return free[0] if is_image else None


def _find_ranges(trial: Trial, tensors: tuple[Tensor, ...]) -> dict[str, tuple[float, float]]:
    """Return the range of each input's random values, if not standard normal."""
    spec_ranges = {s.name: (s.low, s.high) for s in trial.model.inputs if s.low is not None and s.high is not None}
    integers = {t.name: (0, 255) if t.dtype == "uint8" else (0, 1) for t in tensors if not t.dtype.startswith("float")}
    masks = {name: (1, 1) for name in integers if "mask" in name.lower()}
    ranges = {**integers, **masks, **spec_ranges}
    return {t.name: ranges[t.name] for t in tensors if t.name in ranges}


def _collect_preparation(trial: Trial, image: Tensor) -> dict[str, Any]:
    preprocess, channels = trial.model.preprocess, int(image.shape[specs.find_axes(image.shape)[0]])
    constants: dict[str, Any] = {}
    if image.dtype != "uint8":
        mean, std = preprocess.mean, preprocess.std
        constants = {"MEAN": _for_each(mean, channels), "STD": _for_each(std, channels)}
    if not preprocess.letterbox:
        constants |= {"RESIZE": preprocess.resize, "INTERPOLATION": preprocess.interpolation.upper()}
        constants["SQUASH"] = preprocess.squash
    return constants


def _for_each(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return tuple(values[k % len(values)] for k in range(channels))


def _write_preparation(trial: Trial, image: Tensor) -> str:
    letterbox = trial.model.preprocess.letterbox
    more_imports = ", ImageOps" if letterbox else ""
    transpose = "        picture = ImageOps.exif_transpose(picture)\n" if letterbox else ""
    body = LETTERBOXED if letterbox else CROPPED
    end = "    return np.ascontiguousarray(pixels)\n" if image.dtype == "uint8" else NORMALISED
    axes = "height, width, channels" if specs.channels_last(image.shape) else "channels, height, width"
    return PREPARED.format(more=more_imports, upright=transpose, axes=axes, name=image.name) + body + end
