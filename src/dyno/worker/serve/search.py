"""The highest rate that holds, by trying rates."""

from __future__ import annotations

import math
from collections.abc import Callable

LOWEST = 256  # the capacity over this: a rate below it isn't tried
MOST_LOWER = 16  # steps down from a result that didn't hold again


def highest(holds: Callable[[float], bool], capacity: float, resolution: float, lowest: float = 0.0) -> float:
    """Return the highest of the tried rates that holds, 0 if none; the next is less than `resolution` higher.

    The search begins at half the `capacity`, goes up or down by two until one rate holds and one doesn't, halves the
    distance between them on a logarithmic scale, and tries the result once more: of many tries one holds by luck. If
    that fails it goes down step by step, until a rate has held twice. No rate below `lowest` is tried.
    """
    floor = max(lowest, capacity / LOWEST)
    low, high = 0.0, math.inf
    rate = max(capacity / 2, floor)
    while not low or high == math.inf:
        if holds(rate):
            low, rate = rate, 2 * rate
        elif low or rate > floor:
            high, rate = rate, max(rate / 2, floor)
        else:
            return 0.0
    while high / low > 1 + resolution:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    confirmed, left = holds(low), MOST_LOWER
    while not confirmed and left and low > floor:
        low, left = max(low / (1 + resolution), floor), left - 1
        confirmed = holds(low) and holds(low)
    return low if confirmed else 0.0
