"""The one line of a `UserError`."""

from collections.abc import Callable
from typing import Any

import pytest

from dyno.worker.spec import UserError


def refuses(pattern: str, action: Callable[..., object], *given: Any, **more: Any) -> str:
    """The line with which the action refuses what it is given, in which the pattern must be found."""
    with pytest.raises(UserError, match=pattern) as caught:
        action(*given, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)
