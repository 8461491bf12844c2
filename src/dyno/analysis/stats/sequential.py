"""Looking again after every round without crying wolf more often: how much of the error each look may spend."""

from __future__ import annotations


def share(rounds: int, first: int) -> float:
    """Return the share of the error that the look after `rounds` rounds may spend, 1 / (k (k + 1)) for look k.

    Where `first` is 0 the only look spends all of it.

    The first look comes after `first` rounds, and every further round counts as one, whether anybody looked or not, so
    that a run may be read or stopped at any time. The shares sum to 1 over any number of looks, so by Bonferroni's
    inequality the chance of a false claim at any look is at most the shared error, with Student's t exact at each look
    however few its rounds. A union bound over looks with a convergent series: Darling and Robbins 1967. Half goes to
    the first look, where the few degrees of freedom make a small share most expensive.
    """
    if not first:
        return 1.0
    look = max(1, rounds - first + 1)
    return 1 / (look * (look + 1))
