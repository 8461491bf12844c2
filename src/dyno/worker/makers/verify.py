"""Comparison of an exported graph's outputs with its module's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dyno.worker.extras import install
from dyno.worker.facts.files import ExportCheck
from dyno.worker.facts.job import MIN_LABELS, have_labels
from dyno.worker.onnx_graph.check import make_session
from dyno.worker.sessions.torch_support import first_line, import_torch, named_outputs, one_thread
from dyno.worker.spec import Tensor

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-3, 1e-4  # absolute one as a share of the largest output
OWN_ERRORS = 10  # allowed multiple of the module's own FP32 error against FP64 …
MAX_LOST_SHARE = 0.01  # of boxes or labels: scores near a threshold may change places
MAX_DOUBT_SHARE = 1e-2  # … up to this share of the largest output


class WrongGraph(Exception):
    """An exported graph with other outputs than the module's; the message says how."""


class RefusedGraph(WrongGraph):
    """An exported graph that ONNX Runtime refuses."""


class UndecidedGraph(WrongGraph):
    """A module with outputs too sensitive to its own rounding for judging a graph's outputs."""


class Case(NamedTuple):
    """A batch's inputs by name, in the module's order, and its expected outputs."""

    batch: int
    feeds: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


@dataclass(frozen=True)
class ExportSource:
    """The module, an example of each input, its outputs' names, and test cases for its graph.

    With `free_batch`, `batched` has the inputs with a batch and its axis. With `rows`, outputs are boxes after
    suppression, one per row; rounding may slightly change their order and number.
    """

    module: Any
    example: tuple[Any, ...]
    outputs: tuple[str, ...]
    expected: tuple[Case, ...]
    free_batch: bool
    batched: Mapping[str, int] = field(default_factory=lambda: {"input": 0})
    rows: bool = False

    @property
    def following(self) -> dict[str, int]:
        """The outputs with an axis that is the batch in every case, and that axis."""
        output_axes = {}
        for name in self.outputs:
            shapes = [case.outputs[name].shape for case in self.expected]
            axes = range(min(map(len, shapes)))
            batches = [case.batch for case in self.expected]
            axis = next((k for k in axes if [shape[k] for shape in shapes] == batches), None)
            if axis is not None and (axis == 0 or len({*batches}) > 1):
                output_axes[name] = axis
        return output_axes


def verify_graph(path: Path, outputs: Sequence[Tensor], source: ExportSource) -> ExportCheck | None:
    """Compare the graph with the module; raise `WrongGraph` if they differ, return None without ONNX Runtime.

    Rounding alone can move a deep random network's outputs beyond the usual tolerance. So before a graph is called
    wrong, the module is run in FP64, to get the rounding error of its own FP32 outputs.
    """
    _check_signature(outputs, source)
    try:
        session = make_session(str(path))
        input_names = {tensor.name for tensor in session.get_inputs()}  # an exporter may drop unused inputs
        all_feeds = [
            {name: array for name, array in case.feeds.items() if name in input_names} for case in source.expected
        ]
        results = [session.run(list(source.outputs), feeds) for feeds in all_feeds]
    except ImportError:
        return None
    except Exception as e:  # ONNX Runtime's errors have no other common base
        raise RefusedGraph(f"wrote a graph that ONNX Runtime refuses, {first_line(e)}") from e
    return compare_results(source, results)


def compare_results(source: ExportSource, results: Sequence[Sequence[np.ndarray]]) -> ExportCheck:
    """Compare the outputs of each case, in order, with the module's; raise `WrongGraph` if they differ."""
    if source.rows:
        return _compare_rows(source, results)
    pairs = [(name, case.outputs[name], result[i]) for case, result in zip(source.expected, results, strict=True)
             for i, name in enumerate(source.outputs)]  # fmt: skip
    own_errors: dict[str, float] = {}
    try:
        max_error = max(_compute_difference(*pair, 0.0) for pair in pairs)
    except WrongGraph:
        own_errors = _own_errors(source)
        max_error = _find_worst_difference(pairs, own_errors)
    max_output = max(_find_largest_value(a) for case in source.expected for a in case.outputs.values())
    return ExportCheck(
        batches=tuple(case.batch for case in source.expected),
        max_abs_error=max_error,
        max_abs_output=max_output,
        rtol=RELATIVE_TOLERANCE,
        atol=ABSOLUTE_TOLERANCE * max_output,
        own_error=max(own_errors.values()) if own_errors else None,
    )


def _compare_rows(source: ExportSource, results: Sequence[Sequence[np.ndarray]]) -> ExportCheck:
    """Compare boxes as sets; raise `WrongGraph` if over 1 % have no close counterpart, or if there are no boxes.

    Both sides count. A close counterpart is close in all values.
    """
    count, lost_count = 0, 0
    for case, result in zip(source.expected, results, strict=True):
        matches = _close_rows([*case.outputs.values()], result)
        count += sum(matches.shape)
        lost_count += int((~matches.any(axis=1)).sum() + (~matches.any(axis=0)).sum())
    if not count:
        raise WrongGraph("wrote a graph that can't be checked: no image has boxes; give trained weights (--weights)")
    if lost_count > MAX_LOST_SHARE * count:
        raise WrongGraph(f"wrote a graph in which {lost_count} of {count} boxes differ from the module's")
    batches = tuple(case.batch for case in source.expected)
    return ExportCheck(batches=batches, boxes=count, boxes_apart=lost_count, rtol=RELATIVE_TOLERANCE)


def _close_rows(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> np.ndarray:
    """Return whether each expected row is close to each actual one in every output; integers must be equal.

    The result is [expected rows, actual rows]. Raise `WrongGraph` for rows of another shape.
    """
    matches = np.ones((len(expected[0]), len(actual[0])), bool)
    for expected_array, actual_array in zip(expected, actual, strict=True):
        shape, expected_shape = list(actual_array.shape[1:]), list(expected_array.shape[1:])
        if shape != expected_shape:
            raise WrongGraph(f"wrote a graph whose rows are {shape} where the module's are {expected_shape}")
        limit = 0.0 if expected_array.dtype.kind in "iu" else RELATIVE_TOLERANCE * _find_largest_value(expected_array)
        for index in np.ndindex(expected_array.shape[1:]):
            a, b = (array[(slice(None), *index)].astype(np.float64) for array in (expected_array, actual_array))
            matches &= np.abs(a[:, None] - b[None, :]) <= limit
    return matches


def list_doubts(check: ExportCheck | None) -> list[str]:
    """Return warnings on a missing comparison, or on rounding beyond the usual tolerance."""
    if check is None:
        return [f"the graph was not verified: onnxruntime is not installed ({install('onnxruntime')})"]
    if check.own_error is None:
        return []
    own, off, max_output = (f"{n:.2g}" for n in (check.own_error, check.max_abs_error, check.max_abs_output))
    return [
        f"this network amplifies rounding: its outputs in FP32 are off by {own} from FP64, and the graph's by {off} "
        f"from those, where the largest is {max_output}; lower precisions will differ by far more"
    ]


def _check_signature(outputs: Sequence[Tensor], source: ExportSource) -> None:
    names = tuple(output.name for output in outputs)
    if names != source.outputs:
        raise WrongGraph(f"wrote the outputs {', '.join(names)} instead of {', '.join(source.outputs)}")
    if source.free_batch:
        following = source.following
        for output in outputs:
            length = output.shape[following[output.name]] if output.name in following and output.shape else ""
            if isinstance(length, int):
                raise WrongGraph(f"wrote the batch {length} into {output.name}, which follows the input's")


def _find_largest_value(array: np.ndarray) -> float:
    return float(np.abs(array.astype(np.float64)).max(initial=0))


def _find_worst_difference(pairs: Sequence[tuple[str, np.ndarray, np.ndarray]], errors: Mapping[str, float]) -> float:
    """Return the largest difference; raise `UndecidedGraph` if only outputs decided by rounding differ.

    For example, a detector with random weights chooses among nearly equal scores.
    """
    max_error, doubt = 0.0, ""
    for name, want, got in pairs:
        error, scale = errors.get(name, 0.0), _find_largest_value(want[np.isfinite(want)])
        try:
            max_error = max(max_error, _compute_difference(name, want, got, OWN_ERRORS * error))
        except WrongGraph:
            if error <= MAX_DOUBT_SHARE * scale or want.shape != got.shape:
                raise
            doubt = f"the module's own {name} in FP32 is off by {error:.3g} from FP64, where the largest is {scale:.3g}"
    if doubt:
        raise UndecidedGraph(doubt)
    return max_error


def _compute_difference(name: str, want: np.ndarray, got: np.ndarray, own_error: float) -> float:
    if want.shape != got.shape:
        raise WrongGraph(f"wrote a graph whose {name} is {list(got.shape)} where the module's is {list(want.shape)}")
    if have_labels(got, want):
        count = int((want != got).sum())
        if count > max(MAX_LOST_SHARE * want.size, want.size >= MIN_LABELS):
            raise WrongGraph(f"wrote a graph in whose {name} {count} of {want.size} labels differ from the module's")
        return 0.0
    want, got = want.astype(np.float64), got.astype(np.float64)
    finite = want[np.isfinite(want)]
    scale = float(np.abs(finite).max(initial=0.0))
    error = float(np.abs(want - got)[np.isfinite(want)].max(initial=0.0))
    tolerance = max(ABSOLUTE_TOLERANCE * scale, min(own_error, MAX_DOUBT_SHARE * scale))
    if not np.allclose(got, want, RELATIVE_TOLERANCE, tolerance, equal_nan=True):
        raise WrongGraph(f"wrote a graph whose {name} is off by {error:.3g} where the module's largest is {scale:.3g}")
    return error


def _own_errors(source: ExportSource) -> dict[str, float]:
    """Return each output's distance from the module's FP64 output; {} for a module that can't run in FP64."""
    torch = import_torch()
    errors = dict.fromkeys(source.outputs, 0.0)
    try:
        fp64_module = copy.deepcopy(source.module).double()
        for case in source.expected:
            inputs = [torch.from_numpy(array) for array in case.feeds.values()]
            with one_thread(torch):
                outputs = named_outputs(fp64_module(*(x.double() if x.is_floating_point() else x for x in inputs)))
            for name, expected in case.outputs.items():
                difference = np.abs(outputs[name].numpy() - expected.astype(np.float64))
                errors[name] = max(errors[name], float(difference[np.isfinite(difference)].max(initial=0.0)))
    except MemoryError:
        raise
    except Exception:  # unknown: a user's module may raise anything
        return {}
    return errors
