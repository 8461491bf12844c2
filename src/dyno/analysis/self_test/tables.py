"""The tables of a self-test: which differences it sees, and what it said of those that are known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dyno.analysis.presentation.table import COUNT, Column, Row, Table
from dyno.analysis.self_test.figures import CURVE, Rate, SelfTest, Verdicts
from dyno.analysis.self_test.words import percent, with_range

LOW, HIGH = "_low", "_high"


def _format_cell(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    low, high = row.get(name + LOW), row.get(name + HIGH)
    return percent(value) if low is None or high is None else with_range(value, low, high)


def _make_share_columns(name: str, title: str, meaning: str) -> Iterator[Column]:
    """Yield a column of shares (0.02 is 2 %) and those of its limits."""
    yield Column(name, meaning, "1", title=title, cell=lambda row: _format_cell(row, name))
    for end in (LOW, HIGH):
        yield Column(name + end, f"limit of the 95 % interval of {name}", "1")


VISIBLE = (
    Column("rounds", "of a study", kind=COUNT),
    *_make_share_columns("turns", "in turns", "smallest slow-down that is seen with 80 % power, measured in turns"),
    Column("apart", "the same, measured one after the other", "1", title="one after the other",
           cell=lambda row: _format_cell(row, "apart")),
)  # fmt: skip
VERDICTS = (
    Column("slowdown", "the share by which the second process was slowed down", "1", title="slowed by",
           cell=lambda row: percent(row["slowdown"])),
    Column("rounds", "of each study", kind=COUNT),
    Column("studies", "that the rounds of the self-test make, each round used once", kind=COUNT),
    *_make_share_columns("slower", "called slower", "share called slower"),
    *_make_share_columns("faster", "called faster", "share called faster"),
    Column("expected", "share to be called slower (equal ones: slower or faster), going by all noise seen", "1",
           title="expected", cell=lambda row: _format_cell(row, "expected")),
    *_make_share_columns("covered", "intervals right", "share of the intervals that hold the true ratio"),
)  # fmt: skip


def tables(test: SelfTest) -> list[Table]:
    """Build the tables of the visible difference by rounds, and of verdicts on equal and slowed-down processes."""
    rows = [_make_visible_row(test, rounds) for rounds in CURVE]
    every = [
        Table("visible", "The smallest difference that can be seen (80 % power)", "By the rounds of a study.", VISIBLE,
              rows, printed=("rounds", "turns", "apart")),
        Table("verdicts", "Verdicts on known differences", "A row for each slow-down and number of rounds.", VERDICTS,
              [_make_verdict_row(one) for one in test.verdicts],
              printed=("slowdown", "rounds", "studies", "slower", "faster", "expected", "covered")),
    ]  # fmt: skip
    return [table for table in every if table.rows]


def _make_visible_row(test: SelfTest, rounds: int) -> Row:
    seen = test.visible(rounds)
    return {"rounds": rounds, **_make_limit_cells("turns", seen.value, seen.low, seen.high),
            "apart": test.visible_apart(rounds)}  # fmt: skip


def _make_verdict_row(one: Verdicts) -> Row:
    return {
        "slowdown": one.slowdown, "rounds": one.rounds, "studies": one.slower.count, "expected": one.predicted,
        **_make_rate_cells("slower", one.slower), **_make_rate_cells("faster", one.faster),
        **_make_rate_cells("covered", one.covered),
    }  # fmt: skip


def _make_rate_cells(name: str, rate: Rate) -> dict[str, Any]:
    return _make_limit_cells(name, rate.interval.value, rate.interval.low, rate.interval.high)


def _make_limit_cells(name: str, value: float, low: float, high: float) -> dict[str, Any]:
    row = {name: value, name + LOW: low, name + HIGH: high}
    return {key: None if math.isnan(each) else each for key, each in row.items()}
