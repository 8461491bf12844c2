"""What a comparison with these rounds and this spread would have caught."""

from __future__ import annotations

import math

from dyno.analysis import stats

POWER = 0.8


def smallest_slowdown(error: float, freedom: float, level: float, tolerance: float) -> float:
    """Return the smallest relative slow-down that would fail in 80 % of such comparisons; NaN where that is unknown.

    `error` is the standard error of the mean log ratio with `freedom` degrees of freedom. A comparison fails where the
    interval of 1 - `level` lies wholly above 1 + `tolerance`: the slow-down is the one at which the t statistic, which
    then has a noncentral t distribution, exceeds its critical value with that probability.
    """
    from scipy.special import nctdtrinc

    if not freedom > 0:
        return math.nan
    critical = stats.t_quantile(freedom, level)
    return (1 + tolerance) * math.exp(error * float(nctdtrinc(freedom, 1 - POWER, critical))) - 1
