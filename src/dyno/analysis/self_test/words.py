"""A self-test in sentences: for whoever ran it, and for every run on the same machine."""

from __future__ import annotations

import math
import statistics
from typing import Any

from dyno.analysis import stats
from dyno.analysis.formatting import counting, significant
from dyno.analysis.records.results import Results
from dyno.analysis.self_test.figures import CURVE, GRADES, WORST, SelfTest, Summary, Verdicts, visible
from dyno.analysis.self_test.power import POWER
from dyno.worker.spec import UserError, from_json

POOR = 0.05  # of false alarms; beyond it for certain, and the intervals can't be trusted
HINT = "not known: `dyno calibrate` tests the instrument on this machine"
BOUND = {
    "process": "The process bounds it: two fresh ones differ, however long they measure. More rounds help.",
    "neighbours": "Neighbours bound it: other programs, or other guests of the host, use the processors. A quieter "
                  "machine helps, or more seconds and rounds.",
    "clocks": "Clocks bound it: processes ran at different ones. A fixed clock helps (the performance governor).",
    "block": "Noise within a process bounds it, and neither other programs, nor steal, nor clocks explain it. More "
             "seconds help.",
}  # fmt: skip


def percent(share: float) -> str:
    """A share as text: `1.4 %`; beyond the whole, where digits mean nothing, `> 100 %`."""
    return f"{significant(100 * share, 2)} %" if share <= 1 else "> 100 %"


def with_range(value: float, low: float, high: float) -> str:
    """A share with its limits: `1.4 % [1.1, 2]`; without them where they are not known."""
    if math.isnan(low) or math.isnan(high):
        return percent(value)
    return f"{percent(value)} [{', '.join(percent(each).removesuffix(' %') for each in (low, high))}]"


def grade(found: SelfTest) -> str:
    """The grade, in one sentence."""
    rounds = found.stored.study_rounds
    seen = found.visible(rounds)
    worst = f"more than {percent(max(GRADES.values()))}"
    limit = f"{percent(GRADES[found.grade])} or less" if found.grade != WORST else worst
    return (
        f"Grade {found.grade} ({limit}): a study of {rounds} rounds in turns sees a difference of "
        f"{with_range(seen.value, seen.low, seen.high)} or more here, four times out of five."
    )


def sentences(found: SelfTest) -> list[str]:
    """What the self-test found, the grade first."""
    return [grade(found), BOUND[found.bound_by], _spread(found), _meanwhile(found), *_apart(found), _equal(found),
            *_surprises(found)]  # fmt: skip


def about(found: SelfTest) -> dict[str, Any]:
    """What stands in front of a self-test's tables in JSON; shares and standard deviations of logs, None if unknown."""
    kept, spread, alarms = found.stored, found.spread, found.false_alarms()
    figures = {
        "equal": found.equal.value, "equal_low": found.equal.low, "equal_high": found.equal.high,
        "spread": spread.value, "spread_low": spread.low, "spread_high": spread.high,
        "spread_process": math.sqrt(found.levels.process), "spread_block": math.sqrt(found.levels.block),
        "spread_apart": found.apart, "false_alarms": alarms.interval.value, "false_alarms_at_most": alarms.at_most,
        "coverage": found.coverage.interval.value,
    }  # fmt: skip
    return {
        "date": kept.date, "machine": kept.machine, "device": kept.device, "way": kept.way, "versions": kept.versions,
        "threads": kept.threads, "seconds": kept.seconds, "rounds": len(found.rounds), "grade": found.grade,
        "bound_by": found.bound_by,
        **{name: value if math.isfinite(value) else None for name, value in figures.items()},
        "sentences": sentences(found),
    }  # fmt: skip


def _spread(found: SelfTest) -> str:
    spread, parts = found.spread, found.levels
    total = parts.process + parts.block or math.nan
    return (
        f"Two equal processes differ by {with_range(spread.value, spread.low, spread.high)} (standard deviation of the "
        f"log ratio in a round); of its variance {percent(parts.process / total)} comes from fresh processes and "
        f"{percent(parts.block / total)} from the blocks within them."
    )


def _meanwhile(found: SelfTest) -> str:
    others, steal = (statistics.fmean(getattr(one, name) for one in found.rounds) for name in ("others", "steal"))
    clock = f", and clocks differed by {percent(found.clock_spread)}" if any(one.clock for one in found.rounds) else ""
    return (
        f"Meanwhile other programs kept {significant(others, 2)} processors busy, the host gave {percent(steal)} of "
        f"their time to other guests{clock}."
    )


def _apart(found: SelfTest) -> list[str]:
    if not found.spread.value:
        return []
    gain = significant(found.apart / found.spread.value, 2)
    return [f"Measured one after the other they would differ by {percent(found.apart)}: {gain} times as much."]


def _equal(found: SelfTest) -> str:
    same, alarms, held = found.equal, found.false_alarms(), found.coverage
    return (
        f"Equal processes over all {counting(len(found.rounds), 'round')}: {same.value:.4f}x [{same.low:.4f}, "
        f"{same.high:.4f}], {same.verdict}. In studies of {CURVE[0]} rounds {alarms.hits} of {alarms.count} raised a "
        f"false alarm (at most {percent(alarms.at_most)}), and {held.hits} of {held.count} intervals hold the truth."
    )


def _surprises(found: SelfTest) -> list[str]:
    """What the self-test contradicts of what Dyno promises."""
    said = []
    for one in found.verdicts:
        studies = f"of {one.slower.count} studies of {one.rounds} rounds"
        if not one.slowdown and one.false.interval.low > POOR:
            said.append(f"{one.false.hits} {studies} raised a false alarm: verdicts are not to be trusted here.")
        elif one.slowdown and _unlike(one):
            said.append(
                f"A slow-down of {percent(one.slowdown)} was seen by {one.slower.hits} {studies}, and going by the "
                f"noise it should be {percent(one.predicted)}: rounds here depend on each other."
            )
    return said


def _unlike(one: Verdicts) -> bool:
    """Whether the power that was predicted lies outside the interval of what was seen."""
    seen = one.slower.interval
    return not seen.low <= one.predicted <= seen.high


def of_run(results: Results) -> str:
    """What a run can see, by the self-test that it keeps; "" where it keeps none."""
    try:
        summary = from_json(Summary, results.self_test)
    except UserError:  # there is none, or another Dyno's
        return ""
    timed = [t for t in results if t.good]
    rounds = max((len(t.good) for t in timed), default=0)
    in_turns = any(r.turns for t in timed for r in t.good)
    seconds = min((float((t.spec.get("plan") or {}).get("seconds", 0)) for t in timed), default=0.0)
    tested = f"self-test of {summary.date[:10]}, grade {summary.grade}"
    if rounds < 2:
        return f"This run can't tell a difference from noise: it has one round ({tested})."
    seen = visible(summary, rounds, seconds, in_turns)
    how = f"{rounds} rounds {stats.TURNS if in_turns else stats.ALONE}"
    if math.isnan(seen):
        return f"Which differences this run can see isn't known: the self-test was too short for {how} ({tested})."
    if seen > 1:
        return f"This run can see no difference below a factor of two ({how}; {tested})."
    return f"This run can see differences of ≥ {percent(seen)} ({how}, {round(100 * POWER)} % power; {tested})."
