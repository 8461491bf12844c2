"""Shapes of an engine: static, or optimisation profiles of min, opt and max.

Text forms: `static` (the trial's own shapes), a batch range `1:8:16` (min:opt:max; `8` is `8:8:8`), or shapes
`x:1x3x224x224,8x3x224x224,16x3x224x224` (min,opt,max; one shape for all three), `;` between inputs. `|` separates
profiles in either form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from dyno.worker.backends.tensor_rt.settings import STATIC
from dyno.worker.inputs.shapes import Shape, static_shapes
from dyno.worker.spec import Dims, Tensor, UserError

Range = tuple[Shape, Shape, Shape]
Profile = dict[str, Range]
BATCHES = re.compile(r"\d+(:\d+)*")
SHAPE = re.compile(r"\d+(x\d+)*")


def profiles(text: str, inputs: Sequence[Tensor], dims: Dims) -> list[Profile]:
    """Parse the profiles in the text, with a range for every input.

    Sizes missing in the text come from `dims`, a free batch (`dims.batch` 0) from the file's own. Raises `UserError`
    for text that isn't a profile, min > opt or opt > max, the wrong rank, an unknown input, and another size for a
    fixed dimension.
    """
    if text == STATIC:
        return [_make_static_profile(inputs, dims)]
    parsed = []
    for part in text.split("|"):
        batches = batch_range(part)
        parsed.append(_of_batches(batches, inputs, dims) if batches else _of_shapes(part, inputs))
    return parsed


def batch_range(text: str) -> tuple[int, int, int] | None:
    """Return min, opt and max of one profile in the batch form, None for the other forms."""
    if not BATCHES.fullmatch(text):
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


def outside(text: str, batch: int) -> str:
    """Return why no profile of the text takes the batch, or "" if one does or only the engine has them. Pure."""
    if text == STATIC:
        return ""
    ranges = [batch_range(part) for part in text.split("|")]
    batches = [r for r in ranges if r is not None]
    if len(batches) < len(ranges) or any(low <= batch <= high for low, _, high in batches):
        return ""
    allowed = " or ".join(str(low) if low == high else f"{low} to {high}" for low, _, high in batches)
    return f"batch {batch} is outside the engine's profile (batches {allowed})"


def fixed(parsed: Sequence[Profile], name: str) -> tuple[int, ...]:
    """Return the input's shape in the network: a size where all profiles agree on one, else -1."""
    ends = [shape for profile in parsed for shape in profile[name]]
    return tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*ends, strict=True))


def is_static(parsed: Sequence[Profile]) -> bool:
    """Return whether every size is fixed, so that the engine needs no profile."""
    return all(-1 not in fixed(parsed, name) for name in parsed[0])


def as_text(parsed: Sequence[Profile]) -> list[dict[str, list[list[int]]]]:
    """Return the profiles for a record: min, opt and max by input."""
    return [{name: [list(shape) for shape in ends] for name, ends in profile.items()} for profile in parsed]


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
    by_name = dict(_parse_named_profile(part) for part in text.split(";"))
    names = ", ".join(tensor.name for tensor in inputs)
    if unknown := next((name for name in by_name if name not in {t.name for t in inputs}), None):
        raise UserError(f"the model has no input {unknown!r}; its inputs: {names}")
    return {
        tensor.name: _check_range(tensor, by_name.get(tensor.name) or _make_fixed_range(tensor)) for tensor in inputs
    }


def _parse_named_profile(part: str) -> tuple[str, Range]:
    name, _, shapes = part.rpartition(":")
    sizes = [tuple(map(int, s.split("x"))) for s in shapes.split(",") if SHAPE.fullmatch(s)]
    if not name or len(sizes) != shapes.count(",") + 1 or len(sizes) not in (1, 3):
        raise UserError(
            f"profile {part!r} is neither MIN:OPT:MAX batches nor NAME:MIN,OPT,MAX shapes like x:1x3,8x3,16x3"
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
        if any(isinstance(own, int) and own != size for own, size in zip(tensor.shape, shape, strict=True)):
            raise UserError(
                f"the file has input {tensor.name!r} fixed at {_format_shape(tensor.shape)}, "
                f"not {_format_shape(shape)}; export it again with --batch dynamic"
            )
    low, opt, high = ends
    if not all(1 <= a <= b <= c for a, b, c in zip(low, opt, high, strict=True)):
        wrong = ",".join(map(_format_shape, ends))
        raise UserError(f"profile {tensor.name}:{wrong} is out of order: it must be 1 <= min <= opt <= max everywhere")
    return ends


def _format_shape(shape: Sequence[int | str]) -> str:
    return "x".join(str(size) for size in shape)
