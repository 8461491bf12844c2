"""Parts of the verdict: a decision, a sentence about it, and the words for numbers in them."""

from __future__ import annotations

from dataclasses import dataclass

from dyno.formatting import limits, show, significant
from dyno.report.tables.trial_table import rounds_needed, within
from dyno.results.stats import MOST_ROUNDS, Interval, Rule, Speedup

BEST, NOTE, WARNING, FAILURE = "best", "note", "warning", "failure"
PROBLEMS = "problems"  # the report's part with every warning and failure


@dataclass(frozen=True)
class Finding:
    """One sentence and what kind it is: best, note, warning or failure; `part` of the report has more on it."""

    kind: str
    text: str
    part: str = ""


@dataclass(frozen=True)
class Figure:
    """A number on a decision's card: what it is, its value, and a line below it."""

    name: str
    value: str
    below: str


@dataclass(frozen=True)
class Decision:
    """One sentence on what wins and by how much, of which model and size (`where`), and its kind as a finding's.

    `answers` are short ones, by what they answer: whether it is real, whether it is right, what to do next. `findings`
    are what else there is to say of it, `figures` its numbers for a card.
    """

    kind: str
    where: str
    text: str
    answers: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()
    figures: tuple[Figure, ...] = ()

    @property
    def sentence(self) -> str:
        """The decision with what it is about."""
        return f"{self.where}: {self.text}" if self.where else self.text


def ms(value: float) -> str:
    """Format milliseconds as a duration."""
    return show(value * 1e-3, "duration")


def equivalent(name: str, rule: Rule) -> str:
    """Return the verdict of being as fast as `name`, within the rule's margin."""
    return within(100 * rule.margin).replace("equivalent", f"equivalent to {name}")


def settled(speedup: Speedup) -> str:
    """Describe how many more rounds, or builds, would decide an undecided pair."""
    more = MOST_ROUNDS + 1 if speedup.more is None else speedup.more
    needed = rounds_needed(more, speedup.builds > 0)
    return f"{needed} would settle it" if more <= MOST_ROUNDS else f"it would take {needed}"


def spread(interval: Interval, latency: bool) -> str:
    """Format a latency in seconds or a rate in images/s, with its interval where it has one."""
    text = (lambda v: show(v, "duration")) if latency else significant
    unit = "" if latency else " images/s"
    return f"{text(interval.value)}{unit}{limits(interval.low, interval.high, text)}"
