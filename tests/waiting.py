"""Waiting for a condition that takes moments on an idle machine and minutes on a busy one."""

import time
from collections.abc import Callable
from typing import Any


def until(found: Callable[[], Any], within_s: float = 600.0) -> Any:
    """Wait until the function returns a true value, and return it."""
    end = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < end, "it didn't happen in time"
        time.sleep(0.005)
    return value
