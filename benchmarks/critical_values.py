"""Simulate the t statistic of rounds of which disturbed ones were rejected, and write the table of critical values.

python benchmarks/critical_values.py --write   # src/dyno/results/stats/rejection.json, about half an hour on one core
python benchmarks/critical_values.py           # levels and smallest visible differences of the rule beside Student's t
python benchmarks/critical_values.py --looks   # the error of looking after every round, and the rounds to a decision
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.special import stdtr

from dyno.results.stats import rejection, t_quantile
from dyno.results.stats.decisions import share_error

FILE = Path(rejection.__file__).with_suffix(".json")
SPREAD, HIT = 0.02, 0.8  # standard deviation of a round's log ratio, and the mean effect of a disturbance on it
MIN_TAIL = 50  # simulated studies beyond a value of t that are needed to estimate its exceedance


def reject_each(studies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return t and the number of rejected rounds of each study; `studies` is float [studies, rounds]."""
    count = studies.shape[1]
    most = rejection.most_rejected(count)
    distance = np.abs(studies - np.median(studies, axis=1, keepdims=True))
    order = np.argsort(distance, axis=1)
    nearest, distance = np.take_along_axis(studies, order, 1), np.take_along_axis(distance, order, 1)
    far = distance > rejection.REJECTION_DEVIATIONS * rejection.MAD_TO_DEVIATION * np.median(
        distance, axis=1, keepdims=True
    )
    far[:, : count - most] = False
    rejected = far.sum(axis=1)
    t = np.empty(len(studies))
    for number in range(most + 1):
        kept = nearest[rejected == number, : count - number]
        with np.errstate(divide="ignore"):
            t[rejected == number] = kept.mean(1) / (kept.std(1, ddof=1) / np.sqrt(count - number))
    return t, rejected


def simulate_row(count: int, studies: int, rng: np.random.Generator) -> list[dict[str, object]]:
    """Return for each number of rejected rounds its probability, and on the grid of t how much likelier a larger |t| is
    than under Student's t; rounds are normal and undisturbed."""
    at_once = 500_000
    parts = [reject_each(rng.standard_normal((at_once, count), np.float32)) for _ in range(studies // at_once)]
    t, rejected = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    row = []
    for number in range(1, rejection.most_rejected(count) + 1):
        own = np.sort(np.abs(t[rejected == number]))
        factors: list[float] = []
        for value in rejection.T_GRID:
            beyond = len(own) - int(np.searchsorted(own, value))
            if beyond < MIN_TAIL:
                break
            factors.append(float(f"{beyond / len(own) / (2 * stdtr(count - number - 1, -value)):.4g}"))
        # Three hits more than seen: the upper limit for zero hits.
        row.append({"chance": float(f"{(len(own) + 3) / len(t):.4g}"), "factors": factors})
    return row


def write_table(studies: int) -> None:
    """Write the table for every number of rounds."""
    rng = np.random.default_rng(20261126)
    table: dict[str, list[dict[str, object]]] = {}
    for count in range(rejection.MIN_ROUNDS, rejection.MAX_TABLED_ROUNDS + 1):
        table[str(count)] = simulate_row(count, studies, rng)
        print(count, table[str(count)], flush=True)
    FILE.write_text(json.dumps(table, indent=0) + "\n", encoding="utf-8")


def disturb(shape: tuple[int, int], chance: float, rng: np.random.Generator) -> np.ndarray:
    """Draw log ratios of equal speeds in units of their spread; disturbances add an exponential effect."""
    hits = rng.random(shape) < chance
    return rng.standard_normal(shape) + hits * rng.exponential(HIT / SPREAD, shape)


def judge(studies: np.ndarray, level: float, is_robust: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the low and high ends of each study's interval, by the rejection rule or Student's t alone."""
    count = studies.shape[1]
    if not is_robust:
        half = t_quantile(count - 1, level) * studies.std(1, ddof=1) / np.sqrt(count)
        return studies.mean(1) - half, studies.mean(1) + half
    lows, highs = np.empty(len(studies)), np.empty(len(studies))
    for k, study in enumerate(studies):
        kept = rejection.keep_undisturbed(study)
        half = rejection.critical_value(count, count - len(kept), level) * kept.std(ddof=1) / np.sqrt(len(kept))
        lows[k], highs[k] = kept.mean() - half, kept.mean() + half
    return lows, highs


def compare_rules(cases: Sequence[tuple[int, float]], studies: int) -> None:
    """Print false alarms and interval widths of each case, for the rejection rule and for Student's t."""
    rng = np.random.default_rng(7)
    print("rounds  level  disturbed  rule       false alarms  median width  90 % of widths below")
    for count, level in cases:
        for chance in (0.0, 0.1, 0.2):
            drawn = disturb((studies, count), chance, rng)
            for is_robust in (False, True):
                low, high = judge(drawn, level, is_robust)
                width = np.expm1(SPREAD * (high - low))
                name = "rejection" if is_robust else "Student's t"
                print(
                    f"{count:6}  {level:<6g} {chance:8.0%}   {name:12} {np.mean((low > 0) | (high < 0)):10.2%}"
                    f"  {np.median(width):11.1%}  {np.quantile(width, 0.9):12.1%}"
                )


def draw_looks(first: int, more: int, effect: float, rng: np.random.Generator) -> np.ndarray:
    """Return |t| of 100,000 studies of normal rounds at each look, float64 [studies, looks]; `effect` in deviations."""
    rounds = rng.standard_normal((100_000, first + more)) + effect
    n = np.arange(first, first + more + 1)
    total, squares = (np.cumsum(each, 1)[:, first - 1 :] for each in (rounds, rounds**2))
    return np.asarray(np.abs(total) / np.sqrt((n * squares - total**2) / (n - 1)))


def compare_looks(studies: int, more: int = 200) -> None:
    """Print the share of the error that all looks together spend, and the rounds until a difference is decided. The
    other rule spends 1 / (k (k + 1)) at look k, which sums to 1 (Bonferroni)."""
    rng = np.random.default_rng(11)
    rules = {"Bonferroni": lambda n, first: 1 / ((n - first + 1) * (n - first + 2)), "as used": share_error}
    print(
        "first round  error    rule        spent of the error   mean rounds to decide 1, 1.5, 2 deviations, 30 at most"
    )
    for first in (2, 3, 5, 10, 20, 50):
        for level in (0.05, 0.0125, 0.005, 0.001, 0.0005):
            for name, rule in rules.items():
                limits = [t_quantile(n - 1, level * rule(n, first)) for n in range(first, first + more + 1)]
                draws = [draw_looks(first, more, 0.0, rng) > limits for _ in range(max(1, studies // 100_000))]
                spent = np.mean([draw.any(1).mean() for draw in draws])
                rounds = []
                for effect in (1.0, 1.5, 2.0) if first < 30 else ():
                    over = draw_looks(first, 30 - first, effect, rng) > limits[: 31 - first]
                    rounds.append(float(np.where(over.any(1), over.argmax(1) + first, 30).mean()))
                shown = "  ".join(f"{each:5.1f}" for each in rounds)
                print(f"{first:11}  {level:<7g}  {name:10}  {spent / level:18.2f}   {shown}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="simulate and write the table")
    parser.add_argument("--studies", type=int, default=20_000, help="simulated studies of each case")
    parser.add_argument("--looks", action="store_true", help="simulate looking after every round")
    given = parser.parse_args()
    if given.write:
        write_table(given.studies)
    elif given.looks:
        compare_looks(given.studies)
    else:
        compare_rules([(5, 0.05), (5, 0.0036), (7, 0.05), (10, 0.0036)], given.studies)
