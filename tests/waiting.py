"""Waiting for what happens soon on a quiet machine, and within minutes on any."""

import time
from collections.abc import Callable
from typing import Any


def until(found: Callable[[], Any], within_s: float = 600.0) -> Any:
    """Wait until the function returns something that is true, and return that."""
    end = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < end, "it didn't happen in time"
        time.sleep(0.005)
    return value
