"""The trial options that shape an engine, with their values and defaults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dyno.worker.inputs.specs import Shape, static_shapes
from dyno.worker.option_values import Check, flag, whole
from dyno.worker.spec import Dims, Option, Tensor, UserError

RUNNER_OPTIONS = ("graph", "slots")  # runner options without effect on the engine
QUANTISATION_ROUTES = ("auto", "graph", "flags", "calibrator")
CALIBRATORS = ("entropy", "minmax")
STATIC_OPTION = "static"


@dataclass(frozen=True)
class Settings:
    """The settings of a build, with their defaults.

    `profile`: see `parse_profiles`. `optimization` 0-5 is the builder's level, `workspace_mb` its scratch memory (0:
    all of the GPU's), `tactics` its tactic sources joined by `+` ("": TensorRT 10's default, `none`: none). `route` is
    the source of types: the graph, builder flags, or flags and a calibrator. `build` distinguishes builds with equal
    settings.
    """

    profile: str = STATIC_OPTION
    optimization: int = 3
    workspace_mb: int = 0
    tactics: str = ""
    timing_cache: bool = True
    version_compatible: bool = False
    hardware_compatible: str = ""
    refit: bool = False
    weight_streaming: bool = False
    route: str = "auto"
    calibrator: str = "entropy"
    allow_mixed: bool = False
    build: int = 0

    @classmethod
    def from_options(cls, options: Mapping[str, Option]) -> Settings:
        """Return the settings among a trial's or a recipe's options; raise a `UserError` for an invalid value."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name in options:
                values[field.name] = _convert_value(field.name, options[field.name], field.default)
        settings = cls(**values)
        _check_choice("route", settings.route, QUANTISATION_ROUTES)
        _check_choice("calibrator", settings.calibrator, CALIBRATORS)
        if not 0 <= settings.optimization <= 5:
            raise UserError(f"optimization must be a level from 0 to 5, not {settings.optimization}")
        if settings.workspace_mb < 0:
            raise UserError(f"workspace_mb must be a size in MiB, not {settings.workspace_mb}")
        return settings

    def options(self) -> dict[str, Option]:
        """Return the settings that differ from the defaults, as options of a recipe."""
        defaults = Settings()
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(defaults, field.name)
        }


SETTING_NAMES = tuple(field.name for field in dataclasses.fields(Settings))


def _convert_value(name: str, value: Option, default: Any) -> Option:
    if name == "hardware_compatible" and isinstance(value, bool):
        return "ampere_plus" if value else ""
    if isinstance(default, str):
        return str(value)  # the command line parses `profile=8` as a number
    if type(value) is not type(default):
        kind = {bool: "true or false", int: "a whole number"}[type(default)]
        raise UserError(f"{name} must be {kind}, not {value!r}")
    return value


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"unknown {name} {value!r}; known: {', '.join(choices)}")


# Shapes of an engine: static, or optimisation profiles of min, opt and max
#
# Text forms: `static` (the trial's own shapes), a batch range `1:8:16` (min:opt:max; `8` is `8:8:8`), or shapes
# `x:1x3x224x224,8x3x224x224,16x3x224x224` (min,opt,max; one shape for all three), `;` between inputs. `|` separates
# profiles in both forms.

Range = tuple[Shape, Shape, Shape]
Profile = dict[str, Range]
BATCH_RANGE = re.compile(r"\d+(:\d+)*")
SHAPE_TEXT = re.compile(r"\d+(x\d+)*")


def parse_profiles(text: str, inputs: Sequence[Tensor], dims: Dims) -> list[Profile]:
    """Parse the profiles in the text, with a range for every input.

    Sizes missing in the text come from `dims`, a free batch (`dims.batch` 0) from the file. Raise a `UserError` for
    text that isn't a profile, min > opt or opt > max, the wrong rank, an unknown input, or another size for a fixed
    dimension.
    """
    if text == STATIC_OPTION:
        return [_make_static_profile(inputs, dims)]
    profiles = []
    for profile in text.split("|"):
        batches = batch_range(profile)
        profiles.append(_of_batches(batches, inputs, dims) if batches else _of_shapes(profile, inputs))
    return profiles


def batch_range(text: str) -> tuple[int, int, int] | None:
    """Return min, opt and max of one profile in the batch form; None for other forms."""
    if not BATCH_RANGE.fullmatch(text):
        return None
    sizes = [int(size) for size in text.split(":")]
    if len(sizes) == 1:
        sizes *= 3
    if len(sizes) != 3:
        raise UserError(f"profile {text!r} is not MIN:OPT:MAX, three batches such as 1:8:16")
    low, opt, high = sizes
    if not 1 <= low <= opt <= high:
        raise UserError(f"profile {text!r} is out of order: it must be 1 <= min <= opt <= max")
    return low, opt, high


def explain_outside(text: str, batch: int) -> str:
    """Return why no profile in the text takes the batch; "" if one does, or if only the engine knows them. Pure."""
    if text == STATIC_OPTION:
        return ""
    ranges = [batch_range(profile) for profile in text.split("|")]
    batches = [r for r in ranges if r is not None]
    if len(batches) < len(ranges) or any(low <= batch <= high for low, _, high in batches):
        return ""
    limits = " or ".join(str(low) if low == high else f"{low} to {high}" for low, _, high in batches)
    return f"batch {batch} is outside the engine's profile (batches {limits})"


def find_fixed_size(profiles: Sequence[Profile], name: str) -> tuple[int, ...]:
    """Return the input's shape in the network: sizes on which all profiles agree, else -1."""
    ends = [shape for profile in profiles for shape in profile[name]]
    return tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*ends, strict=True))


def is_static(profiles: Sequence[Profile]) -> bool:
    """Return whether every size is fixed; the engine then needs no profile."""
    return all(-1 not in find_fixed_size(profiles, name) for name in profiles[0])


def format_profiles(profiles: Sequence[Profile]) -> list[dict[str, list[list[int]]]]:
    """Return the profiles for a record: min, opt and max by input."""
    return [{name: [list(shape) for shape in ends] for name, ends in profile.items()} for profile in profiles]


def _make_static_profile(inputs: Sequence[Tensor], dims: Dims) -> Profile:
    if not dims.batch:
        dims = replace(dims, batch=_own_batch(inputs, dims))
    return {name: (shape, shape, shape) for name, shape in static_shapes(inputs, dims).items()}


def _own_batch(inputs: Sequence[Tensor], dims: Dims) -> int:
    axes = {tensor.name: dims.batch_axis(tensor.name, tensor.shape) for tensor in inputs}
    for tensor in inputs:
        if (axis := axes[tensor.name]) is not None and isinstance(tensor.shape[axis], str):
            raise UserError(
                f"the batch of {tensor.name!r} is free; give a batch, or a range MIN:OPT:MAX such as 1:8:16"
            )
    described = [t for t in inputs if t.shape and (t.name not in dims.shapes or axes[t.name] is not None)]
    return next((int(t.shape[axes[t.name] or 0]) for t in described), 1)


def _of_batches(batches: tuple[int, int, int], inputs: Sequence[Tensor], dims: Dims) -> Profile:
    low, opt, high = (static_shapes(inputs, replace(dims, batch=batch)) for batch in batches)
    return {name: (low[name], opt[name], high[name]) for name in opt}


def _of_shapes(text: str, inputs: Sequence[Tensor]) -> Profile:
    ranges = dict(_parse_named_profile(part) for part in text.split(";"))
    names = ", ".join(tensor.name for tensor in inputs)
    if unknown_name := next((name for name in ranges if name not in {t.name for t in inputs}), None):
        raise UserError(f"the model has no input {unknown_name!r}; its inputs: {names}")
    return {
        tensor.name: _check_range(tensor, ranges.get(tensor.name) or _make_fixed_range(tensor)) for tensor in inputs
    }


def _parse_named_profile(text: str) -> tuple[str, Range]:
    name, _, shapes = text.rpartition(":")
    sizes = [tuple(map(int, s.split("x"))) for s in shapes.split(",") if SHAPE_TEXT.fullmatch(s)]
    if not name or len(sizes) != shapes.count(",") + 1 or len(sizes) not in (1, 3):
        raise UserError(
            f"profile {text!r} is neither MIN:OPT:MAX batches nor NAME:MIN,OPT,MAX shapes like x:1x3,8x3,16x3"
        )
    low, opt, high = sizes if len(sizes) == 3 else sizes * 3
    return name, (low, opt, high)


def _make_fixed_range(tensor: Tensor) -> Range:
    shape = tuple(size for size in tensor.shape if isinstance(size, int))
    if len(shape) < len(tensor.shape):
        raise UserError(f"no shape is given for input {tensor.name!r}, which is {_format_shape(tensor.shape)}")
    return shape, shape, shape


def _check_range(tensor: Tensor, ends: Range) -> Range:
    for shape in ends:
        if len(shape) != len(tensor.shape):
            raise UserError(
                f"input {tensor.name!r} has {len(tensor.shape)} dimensions, {_format_shape(shape)} has {len(shape)}"
            )
        if any(isinstance(axis, int) and axis != size for axis, size in zip(tensor.shape, shape, strict=True)):
            raise UserError(
                f"the file has input {tensor.name!r} fixed at {_format_shape(tensor.shape)}, "
                f"not {_format_shape(shape)}; export it again with --batch dynamic"
            )
    low, opt, high = ends
    if not all(1 <= a <= b <= c for a, b, c in zip(low, opt, high, strict=True)):
        text = ",".join(map(_format_shape, ends))
        raise UserError(f"profile {tensor.name}:{text} is out of order: it must be 1 <= min <= opt <= max everywhere")
    return ends


def _format_shape(shape: Sequence[int | str]) -> str:
    return "x".join(str(size) for size in shape)


# Checks of the TensorRT options' values by name, for planning

SHAPE_RANGE = re.compile(r".+:\d[\dx,]*")  # NAME:MIN,OPT,MAX for one or more inputs


def _make_check(name: str) -> Check:
    """Return a check of this option alone, with the message of `Settings.of`."""

    def check_value(value: Option) -> str:
        try:
            settings = Settings.from_options({name: value})
            if name == "profile":
                for text in settings.profile.split("|"):
                    if settings.profile != STATIC_OPTION and not batch_range(text) and not SHAPE_RANGE.fullmatch(text):
                        return SETTING_KINDS[name]
        except UserError as e:
            return SETTING_KINDS.get(name) or str(e)
        return ""

    return check_value


SETTING_KINDS = {
    "route": f"one of {', '.join(QUANTISATION_ROUTES)}",
    "calibrator": f"one of {', '.join(CALIBRATORS)}",
    "optimization": "a level from 0 to 5",
    "workspace_mb": "a size in MiB",
    "profile": f"{STATIC_OPTION}, batches MIN:OPT:MAX such as 1:8:16, or NAME:MIN,OPT,MAX shapes",
    **{field.name: "true or false" for field in dataclasses.fields(Settings) if isinstance(field.default, bool)},
    "build": "a whole number",
}
OPTION_CHECKS: dict[str, Check] = {
    **{name: _make_check(name) for name in SETTING_NAMES},
    "graph": flag,
    "slots": whole(1),
}
