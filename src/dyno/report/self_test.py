"""Sentences on a self-test, for its own command and for every run on the same machine."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import Any, TypedDict

from dyno.formatting import format_count, format_number
from dyno.results import stats
from dyno.results.ranking import make_rule
from dyno.results.self_test import (
    GRADES,
    POWER_CURVE_ROUNDS,
    TARGET_POWER,
    WORST_GRADE,
    SelfTest,
    Verdicts,
    find_visible,
)
from dyno.results.trial_result import Results
from dyno.table import COUNT, Column, Row, Table, is_missing, limit_cells, limits_of

MAX_FALSE_ALARMS = 0.05  # intervals are unreliable if the false-alarm rate is certainly higher
SELF_TEST_HINT = "not known: `dyno selftest` tests the instrument on this machine"
BOUND_NOTE = {
    "process": "The process bounds it: two fresh ones differ, however long they measure. More rounds help.",
    "neighbours": "Neighbours bound it: other programs, or other guests of the host, use the processors. A quieter "
                  "machine helps, or more seconds and rounds.",
    "clocks": "Clocks bound it: processes ran at different ones. A fixed clock helps (the performance governor).",
    "block": "Noise within a process bounds it, and neither other programs, nor steal, nor clocks explain it. More "
             "seconds help.",
}  # fmt: skip
OF_BUILDS = "Builds and processes bound it: fresh ones differ, however long they measure. More builds help."


def show_percent(share: float) -> str:
    """Format a share: `1.4 %`; above 1, where digits mean nothing, `> 100 %`."""
    return f"{format_number(100 * share, 2)} %" if share <= 1 else "> 100 %"


def with_range(value: float, low: float, high: float) -> str:
    """Format a share with its limits: `1.4 % [1.1, 2]`; without them if they are unknown."""
    if math.isnan(low) or math.isnan(high):
        return show_percent(value)
    return f"{show_percent(value)} [{', '.join(show_percent(each).removesuffix(' %') for each in (low, high))}]"


def grade_self_test(test: SelfTest) -> str:
    """Describe the grade in one sentence."""
    rounds = test.stored.study_rounds
    visible = test.find_visible(rounds)
    worst = f"more than {show_percent(max(GRADES.values()))}"
    limit = f"{show_percent(GRADES[test.grade])} or less" if test.grade != WORST_GRADE else worst
    build_note = ", each with separate builds," if test.stored.builds else ""
    return (
        f"Grade {test.grade} ({limit}): a study of {rounds} rounds in turns{build_note} sees a difference of "
        f"{with_range(visible.value, visible.low, visible.high)} or more here, four times out of five."
    )


def list_sentences(test: SelfTest) -> list[str]:
    """Return the self-test's findings as sentences, starting with the grade."""
    bound = OF_BUILDS if test.stored.builds and test.bound_by == "process" else BOUND_NOTE[test.bound_by]
    return [grade_self_test(test), bound, _describe_spread(test), _describe_load(test), *_describe_apart(test),
            *_describe_sessions(test), _describe_equal(test), *_describe_surprises(test)]  # fmt: skip


class SelfTestDescription(TypedDict):
    """The head of a self-test's tables in JSON; shares and standard deviations of logs, None if unknown."""

    date: str
    machine: dict[str, Any]
    device: str
    versions: dict[str, str]
    configuration: str
    threads: int | None
    seconds: float
    builds: bool
    rounds: int
    grade: str
    bound_by: str
    equal: float | None
    equal_low: float | None
    equal_high: float | None
    spread: float | None
    spread_low: float | None
    spread_high: float | None
    spread_process: float | None
    spread_block: float | None
    spread_apart: float | None
    false_alarms: float | None
    false_alarms_at_most: float | None
    coverage: float | None
    sentences: list[str]


def describe_self_test(test: SelfTest) -> SelfTestDescription:
    """Return the head of a self-test's tables in JSON."""
    stored, spread, alarms = test.stored, test.spread, test.false_alarms()
    return {
        "date": stored.date, "machine": stored.machine, "device": stored.device, "versions": stored.versions,
        "configuration": stored.configuration, "threads": stored.threads, "seconds": stored.seconds,
        "builds": stored.builds, "rounds": len(test.rounds), "grade": test.grade, "bound_by": test.bound_by,
        "equal": _drop_infinite(test.equal.value), "equal_low": _drop_infinite(test.equal.low),
        "equal_high": _drop_infinite(test.equal.high),
        "spread": _drop_infinite(spread.value), "spread_low": _drop_infinite(spread.low),
        "spread_high": _drop_infinite(spread.high), "spread_process": _drop_infinite(math.sqrt(test.levels.process)),
        "spread_block": _drop_infinite(math.sqrt(test.levels.block)), "spread_apart": _drop_infinite(test.apart),
        "false_alarms": _drop_infinite(alarms.interval.value), "false_alarms_at_most": _drop_infinite(alarms.at_most),
        "coverage": _drop_infinite(test.coverage.interval.value), "sentences": list_sentences(test),
    }  # fmt: skip


def _drop_infinite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _describe_spread(test: SelfTest) -> str:
    spread, levels = test.spread, test.levels
    total = levels.process + levels.block or math.nan
    sources = "builds and processes" if test.stored.builds else "processes"
    return (
        f"Two equal processes differ by {with_range(spread.value, spread.low, spread.high)} (standard deviation of the "
        f"log ratio in a round); of its variance {show_percent(levels.process / total)} comes from fresh {sources} and "
        f"{show_percent(levels.block / total)} from the blocks within them."
    )


def _describe_load(test: SelfTest) -> str:
    others, steal = (statistics.fmean(getattr(one, name) for one in test.rounds) for name in ("others", "steal"))
    clock = (
        f", and clocks differed by {show_percent(test.clock_spread)}" if any(one.clock for one in test.rounds) else ""
    )
    return (
        f"Meanwhile other programs kept {format_number(others, 2)} processors busy, the host gave "
        f"{show_percent(steal)} of their time to other guests{clock}."
    )


def _describe_apart(test: SelfTest) -> list[str]:
    if not test.spread.value:
        return []
    gain = format_number(test.apart / test.spread.value, 2)
    return [f"Measured one after the other they would differ by {show_percent(test.apart)}: {gain} times as much."]


def _describe_sessions(test: SelfTest) -> list[str]:
    if (count := len(test.sessions)) < stats.MIN_SESSIONS:
        return []
    return [
        f"The {count} self-tests of this kind differ by {show_percent(test.session_spread)}: two stored runs may, too."
    ]


def _describe_equal(test: SelfTest) -> str:
    equal, alarms, coverage = test.equal, test.false_alarms(), test.coverage
    return (
        f"Equal processes over all {format_count(len(test.rounds), 'round')}: {equal.value:.4f}x [{equal.low:.4f}, "
        f"{equal.high:.4f}], {equal.verdict}. In studies of {POWER_CURVE_ROUNDS[0]} rounds {alarms.hits} of "
        f"{alarms.count} raised a false alarm (at most {show_percent(alarms.at_most)}), and {coverage.hits} of "
        f"{coverage.count} intervals hold the truth."
    )


def _describe_surprises(test: SelfTest) -> list[str]:
    """Describe contradictions between the self-test and Dyno's promises."""
    surprises = []
    for case in test.verdicts:
        studies = f"of {case.slower.count} studies of {case.rounds} rounds"
        if not case.slowdown and case.false.interval.low > MAX_FALSE_ALARMS:
            surprises.append(f"{case.false.hits} {studies} raised a false alarm: verdicts are not to be trusted here.")
        elif case.slowdown and _is_unlike(case):
            surprises.append(
                f"A slow-down of {show_percent(case.slowdown)} was seen by {case.slower.hits} {studies}, and the noise "
                f"predicts {show_percent(case.predicted)}: rounds here depend on each other."
            )
    return surprises


def _is_unlike(case: Verdicts) -> bool:
    """Return whether the predicted power is outside the interval of the observed power."""
    interval = case.slower.interval
    return not interval.low <= case.predicted <= interval.high


def of_run(results: Results) -> str:
    """Describe the differences visible to a run, by its stored self-test; "" without one."""
    summary = results.self_test
    if summary is None:
        return ""
    trials = [t for t in results if t.good]
    rounds = max((len(t.good) for t in trials), default=0)
    is_in_turns = any(r.turns for t in trials for r in t.good)
    seconds = min((t.spec.plan.seconds for t in trials), default=0.0)
    source = f"self-test of {summary.date[:10]}, grade {summary.grade}"
    if rounds < 2:
        return f"This run can't tell a difference from noise: it has one round ({source})."
    rule = make_rule(results.settings)
    row_count = max(1, max(Counter(t.group for t in trials).values()) - 1)  # the rows of a reference are one family
    visible = find_visible(summary, rounds, seconds, is_in_turns, stats.ALPHA * rule.share(rounds) / row_count)
    setting = f"{rounds} rounds {stats.IN_TURNS if is_in_turns else stats.ONE_AFTER_ANOTHER}"
    setting += f", {row_count} rows judged together" if row_count > 1 else ""
    if math.isnan(visible):
        return f"Which differences this run can see isn't known: the self-test was too short for {setting} ({source})."
    if visible > 1:
        return f"This run can see no difference below a factor of two ({setting}; {source})."
    return (
        f"This run can see differences of ≥ {show_percent(visible)} ({setting}, "
        f"{round(100 * TARGET_POWER)} % power; {source})."
    )


# Tables of a self-test: visible differences, and verdicts on known differences.


def _format_cell(row: Row, name: str) -> str:
    value, low, high = (row.get(name + end, math.nan) for end in ("", "_low", "_high"))
    return "" if is_missing(value) else with_range(value, low, high)


def _make_share_columns(name: str, title: str, meaning: str) -> tuple[Column, ...]:
    """Return a column of shares (0.02 is 2 %) and the columns of its limits."""
    return Column(name, meaning, "1", title=title, cell=lambda row: _format_cell(row, name)), *limits_of(name, "1")


VISIBLE_DIFFERENCE = (
    Column("rounds", "of a study", kind=COUNT),
    *_make_share_columns("turns", "in turns", "smallest slow-down that is seen with 80 % power, measured in turns"),
    Column("apart", "the same, measured one after the other", "1", title="one after the other",
           cell=lambda row: _format_cell(row, "apart")),
)  # fmt: skip
VERDICTS = (
    Column("slowdown", "the share by which the second process was slowed down", "1", title="slowed by",
           cell=lambda row: show_percent(row["slowdown"])),
    Column("rounds", "of each study", kind=COUNT),
    Column("studies", "that the rounds of the self-test make, each round used once", kind=COUNT),
    *_make_share_columns("slower", "called slower", "share called slower"),
    *_make_share_columns("faster", "called faster", "share called faster"),
    Column("expected", "expected share called slower (equal ones: slower or faster), given all noise seen", "1",
           title="expected", cell=lambda row: _format_cell(row, "expected")),
    *_make_share_columns("covered", "intervals right", "share of the intervals that hold the true ratio"),
)  # fmt: skip


def make_tables(test: SelfTest) -> list[Table]:
    """Build the tables of visible differences by rounds, and of verdicts on equal and slowed-down processes."""
    rows = [_make_visible_row(test, rounds) for rounds in POWER_CURVE_ROUNDS]
    tables = [
        Table("visible", "The smallest difference that can be seen (80 % power)", "By the rounds of a study.",
              VISIBLE_DIFFERENCE, rows, printed=("rounds", "turns", "apart")),
        Table("verdicts", "Verdicts on known differences", "A row for each slow-down and number of rounds.", VERDICTS,
              [_make_verdict_row(case) for case in test.verdicts],
              printed=("slowdown", "rounds", "studies", "slower", "faster", "expected", "covered")),
    ]  # fmt: skip
    return [table for table in tables if table.rows]


def _make_visible_row(test: SelfTest, rounds: int) -> Row:
    return {"rounds": rounds, **limit_cells("turns", test.find_visible(rounds)), "apart": test.visible_apart(rounds)}


def _make_verdict_row(case: Verdicts) -> Row:
    return {
        "slowdown": case.slowdown, "rounds": case.rounds, "studies": case.slower.count, "expected": case.predicted,
        **limit_cells("slower", case.slower.interval), **limit_cells("faster", case.faster.interval),
        **limit_cells("covered", case.covered.interval),
    }  # fmt: skip
