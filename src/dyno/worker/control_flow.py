"""Does a module take a way that depends on its input's values? A graph would hold the one way that was taken."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dyno.worker.spec import UserError

REMEDY = "compute both ways and choose with torch.where, or measure it with --backends pytorch,compile"


def check_control_flow(torch: Any, module: Any, example: tuple[Any, ...]) -> bool:
    """Run the module on tensors without values; True when that shows that no value decides what is computed.

    False where it can't be told: the module doesn't run so. A module that reads a value (`if x.mean() > 0`,
    `range(int(n))`, `.item()`) is a `UserError` that names the line.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return True  # keeps its branches, and its graph has them
    try:
        from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

        # Results whose length the values decide (nonzero) are no branch yet, and have a form in ONNX.
        shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True)
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    except (ImportError, TypeError):  # another PyTorch's
        return False
    try:
        with torch.no_grad(), warnings.catch_warnings(), mode:
            warnings.simplefilter("ignore")
            module(*(mode.from_tensor(tensor, static_shapes=True) for tensor in example))
    except (DataDependentOutputException, GuardOnDataDependentSymNode) as e:
        raise UserError(f"a graph would hold one branch only: {_where(torch, e)} depends on values; {REMEDY}") from e
    except Exception:  # a module that runs on real tensors need not run on these; then nothing is known of it
        return False
    return True


def _where(torch: Any, e: BaseException) -> str:
    """The innermost line outside PyTorch."""
    own = Path(torch.__file__).parent
    here = Path(__file__)
    frames = [f for f in traceback.extract_tb(e.__traceback__) if own not in Path(f.filename).parents]
    last = next((f for f in reversed(frames) if Path(f.filename) != here), None)
    return f"`{(last.line or '').strip()}` ({Path(last.filename).name}, line {last.lineno})" if last else "its forward"


def traced_values(torch: Any, caught: Sequence[warnings.WarningMessage]) -> str:
    """What tracing warned of: the line of the module that turned a tensor into a number, which the graph now holds."""
    for warning in caught:
        if issubclass(warning.category, torch.jit.TracerWarning):
            return f"{Path(warning.filename).name}, line {warning.lineno}: {str(warning.message).split('.')[0]}"
    return ""
