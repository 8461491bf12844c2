"""One-line messages of `UserError`."""

from collections.abc import Callable
from typing import Any

import pytest

from dyno.worker.spec import UserError


def refuses(pattern: str, action: Callable[..., object], *given: Any, **more: Any) -> str:
    """Assert that the action raises a one-line `UserError` that matches `pattern`; return the line."""
    with pytest.raises(UserError, match=pattern) as caught:
        action(*given, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)
