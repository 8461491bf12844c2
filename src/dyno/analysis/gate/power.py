"""What a comparison with these rounds and this spread would have caught."""

from __future__ import annotations

import math

from dyno.analysis import stats

POWER = 0.8


def smallest_slowdown(low: float, high: float, rounds: int, tolerance: float) -> float:
    """The smallest relative slow-down that would fail in 80 % of such comparisons; NaN where that is unknown.

    `low` and `high` are the limits of the ratio's 95 % interval over so many `rounds`, and what fails is an interval
    wholly above 1 + `tolerance`. The interval gives the standard error of the mean log ratio; the slow-down is that by
    which the t statistic, which then has a noncentral t distribution, exceeds its critical value with that chance.
    """
    from scipy.special import nctdtrinc

    if rounds < 2 or not (0 < low <= high < math.inf):
        return math.nan
    critical = stats.t_quantile(rounds - 1)
    error = (math.log(high) - math.log(low)) / 2 / critical
    return (1 + tolerance) * math.exp(error * float(nctdtrinc(rounds - 1, 1 - POWER, critical))) - 1
