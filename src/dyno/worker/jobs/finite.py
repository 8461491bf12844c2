"""A wrong result has no speed: NaN or infinite outputs fail the trial."""

from __future__ import annotations

import numpy as np

from dyno.worker.backend import Arrays
from dyno.worker.spec import UserError


def not_finite(arrays: Arrays) -> list[str]:
    """Return the names of the arrays with NaN or infinity; text has neither."""
    values = {name: np.asarray(array) for name, array in arrays.items()}
    return [name for name, array in values.items() if array.dtype.kind not in "OSU" and not np.isfinite(array).all()]


def failure() -> UserError:
    """Return the error for the row of an engine with outputs that are not finite."""
    return UserError(
        "the outputs are not finite (NaN or infinity): this engine is wrong, its precision overflows, or the model "
        "gives them itself: then let its forward replace them (torch.nan_to_num)"
    )
