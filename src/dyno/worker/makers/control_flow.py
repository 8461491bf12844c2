"""Detection of value-dependent control flow: a graph would hold only the branch taken at export."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dyno.worker.spec import NoRoute

INPUT_ATTRIBUTE = "_dyno_from_input"
MAX_RELEVANT_BATCH = 4096  # larger limits come from memory, not from branches
BRANCH_REMEDY = "compute both branches and choose with torch.where, or measure it with --backend pytorch,compile"


class ReadsValue(Exception):
    """A module converted a value that depends on its input to a Python number."""


def check_control_flow(torch: Any, module: Any, example: tuple[Any, ...]) -> bool:
    """Run the module and track values computed from its inputs; return True if none decides the control flow.

    Return False if unknown: a result's length depends on values, the module doesn't run this way, or it reads a value
    (`if x.mean() > 0`, `range(int(n))`, `.item()`) but not during an export, as transformers' attention masks do. Raise
    a `NoRoute` that names the line if it reads a value during an export too. Weights and shapes may be read: they are
    the same for every input.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return True  # TorchScript keeps both branches, in its graph too
    try:
        return not _lengths_depend(torch, module, example)
    except ReadsValue:
        pass
    except Exception:  # unknown: another PyTorch, or a module that fails under the modes
        return False
    try:
        with _pretend_exporting(torch):
            _lengths_depend(torch, module, example)
    except ReadsValue as e:
        raise NoRoute(
            f"a graph would hold one branch only: {_find_line(torch, e)} depends on values; {BRANCH_REMEDY}"
        ) from e
    except Exception:  # unknown; the exported file is compared with the module anyway
        return False
    return False


def _lengths_depend(torch: Any, module: Any, example: tuple[Any, ...]) -> bool:
    """Return whether a result's length depends on values; raise `ReadsValue` if the module reads one."""
    inputs = tuple(tensor.clone() for tensor in example)
    for tensor in inputs:
        setattr(tensor, INPUT_ATTRIBUTE, True)
    tracker, guard = _make_modes(torch)
    with torch.no_grad(), warnings.catch_warnings(), guard, tracker:
        warnings.simplefilter("ignore")
        module(*inputs)
    return bool(tracker.lengths)


@contextlib.contextmanager
def _pretend_exporting(torch: Any) -> Iterator[None]:
    """Make `torch.compiler.is_exporting()` return True during the block, as in torch.export."""
    flags = [flag for flag in ("_is_compiling_flag", "_is_exporting_flag") if hasattr(torch.compiler, flag)]
    before = {flag: getattr(torch.compiler, flag) for flag in flags}
    try:
        for flag in flags:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)


def _make_modes(torch: Any) -> tuple[Any, Any]:
    """Return a mode that marks the results of marked tensors, and one that detects their use as arrays or lists."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def has_mark(values: Any) -> bool:
        return any(isinstance(v, torch.Tensor) and getattr(v, INPUT_ATTRIBUTE, False) for v in tree_leaves(values))

    def by_number(func: Any, args: Any) -> bool:
        """Return whether it indexes by numbers (their count is a shape) rather than by a mask."""
        mask_types = (torch.bool, torch.uint8)
        return func is torch.ops.aten.index.Tensor and not any(i is not None and i.dtype in mask_types for i in args[1])

    class TensorTracker(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
        supports_higher_order_operators = True  # torch.cond
        lengths = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_marked = has_mark((args, kwargs or {}))
            if is_marked and torch.Tag.data_dependent_output in func.tags:
                raise ReadsValue
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._pack_padded_sequence.default:
                # Recurrent layers read the other result, the number of sequences per step, which tracing supports.
                setattr(result[0], INPUT_ATTRIBUTE, is_marked)
                return result
            self.lengths |= is_marked and torch.Tag.dynamic_output_shape in func.tags and not by_number(func, args)
            for value in tree_leaves(result) if is_marked else ():
                if isinstance(value, torch.Tensor):
                    setattr(value, INPUT_ATTRIBUTE, True)
            return result

    class ReadGuard(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__) and has_mark(args):
                raise ReadsValue
            return func(*args, **(kwargs or {}))

    return TensorTracker(), ReadGuard()


def _find_line(torch: Any, e: BaseException) -> str:
    """Return the innermost line outside PyTorch."""
    torch_folder = Path(torch.__file__).parent
    this_file = Path(__file__)
    frames = [f for f in traceback.extract_tb(e.__traceback__) if torch_folder not in Path(f.filename).parents]
    last = next((f for f in reversed(frames) if Path(f.filename) != this_file), None)
    return f"`{(last.line or '').strip()}` ({Path(last.filename).name}, line {last.lineno})" if last else "its forward"


def traced_values(torch: Any, caught_warnings: Sequence[warnings.WarningMessage]) -> str:
    """Return a tracing warning: the module's line that made a tensor a constant; "" without one."""
    for warning in caught_warnings:
        if issubclass(warning.category, torch.jit.TracerWarning):
            return f"{Path(warning.filename).name}, line {warning.lineno}: {str(warning.message).split('.')[0]}"
    return ""


def follow_batch(torch: Any, module: Any, example: Sequence[Any], batch_axes: Sequence[int | None]) -> Any:
    """Return `torch.export`'s program of the module, with a free batch on the axis `batch_axes` of each input.

    Return None if the export fails.
    """
    free_dim = getattr(torch.export.Dim, "AUTO", None)
    shapes = tuple(None if axis is None else {axis: free_dim} for axis in batch_axes)
    is_variadic = type(module).__name__ == "Positional"
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(
                module, tuple(example), dynamic_shapes=(shapes,) if is_variadic else shapes, strict=False
            )
    except Exception:  # unknown: an unsupported module or another PyTorch
        return None


def batch_limit(program: Any) -> int | None:
    """Return the largest batch for which an exported program equals its module; None without a limit.

    A module with `if x.shape[0] > 4` has a limit: the program holds the example's path. With `len(x)` the batch is a
    constant in the program, which shows no limit.
    """
    try:
        inputs = [n for n in program.graph.nodes if n.name in program.graph_signature.user_inputs]
        lengths = [getattr(length, "node", None) for n in inputs for length in n.meta["val"].shape]
        ranges = [program.range_constraints.get(length.expr) for length in lengths if length is not None]
        limits = [int(bounds.upper) for bounds in ranges if bounds is not None and bounds.upper <= MAX_RELEVANT_BATCH]
    except (AttributeError, KeyError, TypeError):  # another PyTorch
        return None
    return min(limits, default=None)
