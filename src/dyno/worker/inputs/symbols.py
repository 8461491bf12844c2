"""Axes of a model file by their names: which is the batch, and the lengths of the others, solved together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Union

from dyno.worker.inputs.specs import axes, image_of, is_image, is_length, is_side
from dyno.worker.spec import BATCH, Tensor, UserError

NAMED = re.compile("batch|^(n|b|bs|bsz)$", re.IGNORECASE)
OPERATOR = re.compile(r"[+*/()]| - ")
TERM = re.compile(r"\s*([+-]?)\s*(?:(\d+)\s*\*\s*)?([^\s+*/()]+)")
MADE_UP = re.compile(r"unk__|[sud]\d+$|.*(dynamic_axes|dim)_\d+$")  # names that exporters give to axes without one
WHOLE = re.compile("total|mask", re.IGNORECASE)  # an axis as long as the past and what is new together
PAST = re.compile("past", re.IGNORECASE)

Axis = Union[int, str]
Shape = tuple[Axis, ...]


def batch_axes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, int | None]:
    """Return which axis of each input is the batch, None for an input without one.

    It is the axis that is named after the batch. In a file without such a name it is the first, unless that is named
    after a length or a side of an image, or the outputs begin with another axis of the input and have nothing of its
    first.
    """
    if any(names_batch(axis) for tensor in inputs for axis in tensor.shape):
        return {tensor.name: _named_axis(tensor) for tensor in inputs}
    return {tensor.name: _assumed_axis(tensor, outputs) for tensor in inputs}


def names_batch(axis: Axis) -> bool:
    """Return whether the axis is named after the batch."""
    return isinstance(axis, str) and bool(NAMED.search(axis)) and not OPERATOR.search(axis) and not is_length(axis)


def _named_axis(tensor: Tensor) -> int | None:
    named = next((k for k, axis in enumerate(tensor.shape) if names_batch(axis)), None)
    return 0 if named is None and tensor.shape and _has_no_name(tensor, 0) else named


def _has_no_name(tensor: Tensor, k: int) -> bool:
    """Return whether an axis is free and was not named by a person."""
    axis = tensor.shape[k]
    return isinstance(axis, str) and (axis in ("", "?", f"{tensor.name}_{k}") or bool(MADE_UP.match(axis)))


def _assumed_axis(tensor: Tensor, outputs: Sequence[Tensor]) -> int | None:
    if not tensor.shape:
        return None
    first, later = tensor.shape[0], range(1, len(tensor.shape))
    if isinstance(first, str):
        free = {axis for output in outputs for axis in output.shape if isinstance(axis, str) and axis}
        leading = {output.shape[0] for output in outputs if output.shape} & free
        other = next((k for k in later if tensor.shape[k] in leading and not is_length(tensor.shape[k])), None)
        if is_length(first) or is_side(first):
            return other
        return 0 if other is None or first in free else other
    lengths = {axis for output in outputs for axis in output.shape}
    if first < 2 or not all(isinstance(n, int) for n in lengths) or any(int(n) % first == 0 for n in lengths):
        return 0
    if len(tensor.shape) > 3:
        return None if outputs else 0  # the frames of one clip, for example
    return next((k for k in later if all(output.shape[:1] == (tensor.shape[k],) for output in outputs)), None)


def fixed_batch(inputs: Sequence[Tensor], batched: Mapping[str, int | None], given: Mapping[str, Shape]) -> int:
    """Return the batch that the user's shapes or the file fix, 0 where it is free and 1 where no input has one."""
    found = []
    for tensor in inputs:
        if (k := batched[tensor.name]) is not None:
            own = given.get(tensor.name, tensor.shape)[k]
            if isinstance(own, int) and tensor.name in given:
                return own
            found.append(own if isinstance(own, int) else 0)
    return min(found, default=1)


def described_shapes(
    inputs: Sequence[Tensor], batched: Mapping[str, int | None], given: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Return the shapes of the inputs that a trial's batch and image size alone don't decide, with `batch`, `height`
    and `width` at the axes that follow them.

    `given` are the user's. Axes of one name have one length, and `past + new` is a sum. A `UserError` lists the axes
    whose length isn't known, and says which lengths contradict each other.
    """
    lengths = _Lengths(inputs, batched, given)
    shapes = {tensor.name: lengths.shape(tensor) for tensor in inputs}
    lengths.refuse_unknown()
    return {t.name: shapes[t.name] for t in inputs if t.name in given or shapes[t.name] != lengths.usual(t)}


class _Lengths:
    """The lengths of axes by their names, from the shapes that are given and the sums that they must fit."""

    def __init__(self, inputs: Sequence[Tensor], batched: Mapping[str, int | None], given: Mapping[str, Shape]) -> None:
        self._inputs, self._batched, self._given = inputs, batched, given
        self._image = image_of(inputs)
        self._known: dict[str, Axis] = {}
        for tensor in inputs:
            for k, axis in enumerate(tensor.shape):
                name, length = self._name_axis(tensor, k), self._given_length(tensor, k)
                if isinstance(axis, str) and length is not None:
                    self._known.setdefault(name, length)
        self._solve_sums()

    def shape(self, tensor: Tensor) -> Shape:
        """Return the input's shape, with the name of every axis whose length isn't known."""
        return tuple(self._find_length(tensor, k) for k in range(len(tensor.shape)))

    def usual(self, tensor: Tensor) -> Shape:
        """Return the shape that the input has without a description: the batch first, the size of an image."""
        sides = self._find_sides(tensor)
        return tuple(
            axis if isinstance(axis, int) else BATCH if not k else sides.get(k, axis)
            for k, axis in enumerate(tensor.shape)
        )

    def refuse_unknown(self) -> None:
        """Raise a `UserError` for axes without a length, with the fewest shapes from which all of them follow."""
        unknown: dict[str, list[str]] = {}
        for tensor in self._inputs:
            for k, axis in enumerate(tensor.shape):
                if isinstance(axis, str) and self._find_length(tensor, k) == self._name_axis(tensor, k):
                    for name in self._parse_terms(axis) or {self._name_axis(tensor, k): 1}:
                        if name and name not in self._known:
                            unknown.setdefault(name, []).append(tensor.name)
        if not unknown:
            return
        shown, wanted = [], dict[str, str]()
        for name, places in unknown.items():
            few = ", ".join(dict.fromkeys(places[:3])) + (", …" if len(places) > 3 else "")
            shown.append(few if name.endswith("]") else f"{name} ({few})")
            place = next((t for t in self._inputs if name in t.shape and t.name in wanted), None) or next(
                (t for t in self._inputs if name in t.shape or name.startswith(f"{t.name}[")), None
            )
            if place is not None:
                wanted[place.name] = "x".join(map(self._format_axis, self.shape(place)))
        options = " ".join(f"--shapes {name}:{shape}" for name, shape in wanted.items())
        what = "an axis" if len(unknown) == 1 else "axes"
        raise UserError(
            f"the inputs have {what} of unknown length: {'; '.join(shown)}; give numbers for the names in {options}"
        )

    def _format_axis(self, axis: Axis) -> str:
        return str(axis) if isinstance(axis, int) or axis in (BATCH, "height", "width") else f"<{axis}>"

    def _find_sides(self, tensor: Tensor) -> dict[int, str]:
        """Return the axes of height and width, of an input that is an image beside another or the model's own."""
        if self._image is None or not is_image(tensor):
            return {}
        _, height, width = axes(tensor.shape)
        return {height: "height", width: "width"}

    def _name_axis(self, tensor: Tensor, k: int) -> str:
        axis = tensor.shape[k]
        return axis if isinstance(axis, str) and axis not in ("", "?") else f"{tensor.name}[{k}]"

    def _given_length(self, tensor: Tensor, k: int) -> Axis | None:
        """Return what the user, the batch and the image's size make of the axis; None where they don't."""
        own = self._given.get(tensor.name)
        if own is not None and len(own) == len(tensor.shape):
            return BATCH if k == self._batched[tensor.name] else own[k]
        return BATCH if k == self._batched[tensor.name] else self._find_sides(tensor).get(k)

    def _find_length(self, tensor: Tensor, k: int) -> Axis:
        axis, given = tensor.shape[k], self._given.get(tensor.name)
        if given is not None and len(given) == len(tensor.shape):
            return BATCH if k == self._batched[tensor.name] else given[k]
        if isinstance(axis, int):  # a fixed first axis is compared with the batch where it is fed
            return BATCH if k and k == self._batched[tensor.name] else axis
        if (length := self._given_length(tensor, k)) is not None:
            return length
        name = self._name_axis(tensor, k)
        if name in self._known:
            return self._known[name]
        terms = self._parse_terms(axis)
        values = {term: self._known.get(term, 0) if term else 1 for term in terms}
        if not terms or any(term and not isinstance(self._known.get(term), int) for term in terms):
            return name
        length = sum(terms[term] * int(values[term]) for term in terms)
        if length < 0:
            raise UserError(f"the shapes give {axis} of {tensor.name!r} a length of {length}; give others")
        return length

    def _parse_terms(self, axis: str) -> dict[str, int]:
        """Return the names in a sum with their factors, a number's under ""; {} where the axis isn't a sum."""
        terms: dict[str, int] = {}
        if not OPERATOR.search(axis) or re.sub(TERM, "", axis).strip():
            return {}
        for sign, factor, name in TERM.findall(axis):
            value = (-1 if sign == "-" else 1) * int(factor or 1)
            key, value = ("", value * int(name)) if name.isdecimal() else (name, value)
            terms[key] = terms.get(key, 0) + value
        return terms

    def _solve_sums(self) -> None:
        """Work out names of which the given lengths, and the sums, leave one value."""
        sums = self._find_sums()
        for _ in sums:
            for terms, length in sums:
                missing = [name for name in terms if name and name not in self._known]
                values = [self._known.get(name, 0) for name in terms if name]
                if any(isinstance(value, str) for value in values):
                    continue
                rest = length - sum(n * (int(self._known.get(name, 0)) if name else 1) for name, n in terms.items())
                if not missing and rest:
                    known = ", ".join(f"{name} {self._known[name]}" for name in terms if name)
                    whole = f", for a sum of {length}" if length else ""
                    raise UserError(f"the lengths in the shapes don't add up: {known}{whole}; give lengths that fit")
                if len(missing) == 1:
                    value, odd = divmod(rest, terms[missing[0]])
                    if odd or value < 0:
                        left = rest / terms[missing[0]]
                        raise UserError(f"the lengths in the shapes leave {left:g} for {missing[0]}; give others")
                    self._known[missing[0]] = value

    def _find_sums(self) -> list[tuple[dict[str, int], int]]:
        """Return the sums whose result is given; an axis named after the whole is that of the past and the new."""
        found = []
        for tensor in self._inputs:
            for k, axis in enumerate(tensor.shape):
                length = self._given_length(tensor, k)
                terms = self._parse_terms(axis) if isinstance(axis, str) else {}
                if terms and isinstance(length, int):
                    found.append((terms, length))
        return found + self._find_whole_sums()

    def _find_whole_sums(self) -> list[tuple[dict[str, int], int]]:
        names = {axis for t in self._inputs for axis in t.shape if isinstance(axis, str) and not OPERATOR.search(axis)}
        whole = [name for name in names if WHOLE.search(name) and is_length(name)]
        past = [name for name in names if PAST.search(name) and name not in whole]
        new = [name for name in names if is_length(name) and name not in (*whole, *past)]
        if len(past) != 1 or len(new) != 1:
            return []
        return [({past[0]: 1, new[0]: 1, name: -1}, 0) for name in sorted(whole)]
