"""Cold starts of a model's forms: from the start of a process to the first answer, by part, beside each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dyno.analysis import stats
from dyno.analysis.presentation.limits import limited, limits_of, printed
from dyno.analysis.presentation.table import COUNT, RATIO, TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.worker.facts.job import ColdStart

STARTS = TableKind("cold-start", "Cold start",
                   "What passes from the start of a process to the first answer of an engine, part by part.",
                   command="dyno cold-start MODEL")  # fmt: skip
WARM, COLD = "in memory", "on disk"  # where the files are that a process reads
PARTS = {
    "start": "start of Python and of Dyno's worker",
    "imports": "import of libraries",
    "context": "making the GPU's context",
    "load": "loading the engine, without imports",
    "inputs": "reading or drawing the inputs",
    "first_call": "the first call, from host to host",
}


COLUMNS = (
    Column("form", "which engine", kind=TEXT, identity=True),
    Column("files", "where code and model lie when the process starts", kind=TEXT, title="files are"),
    Column("first_answer_ms", "from the start of the process to its first answer: the mean over rounds", "ms",
           title="first answer, ms", interval=True),
    *limits_of("first_answer_ms", "ms"),
    *(Column(f"{name}_ms", f"{meaning}, in the round in the middle", "ms", title=name.replace("_", " "), rank=1)
      for name, meaning in PARTS.items()),
    Column("rest_ms", "what lies between the parts", "ms", title="rest", rank=2),
    Column("later_ms", "a later call, from host to host: the median", "ms", title="later call"),
    Column("read_mb", "read from disk for the process, in the round in the middle", "MB", title="read, MB", rank=1),
    Column("speedup", "the first form's first answer over this one's, by rounds", kind=RATIO, title="speed-up",
           interval=True),
    *limits_of("speedup", "", RATIO),
    Column("verdict", "whether that is real", kind=TEXT),
    Column("rounds", "processes", kind=COUNT, rank=3),
)  # fmt: skip
PRINTED = printed(COLUMNS)
NOTE = "Parts, in ms, are those of the round in the middle, and with the rest they sum to its first answer."
NAMED = 2  # parts that a sentence names
MANY_UNCOMPILED = 0.1  # of the modules: a program's own few files say nothing of its libraries


@dataclass(frozen=True)
class ColdStartSamples:
    """A form's cold starts, a process each, in the order of rounds; `files` says where its files were: WARM or COLD."""

    title: str
    files: str
    rounds: tuple[ColdStart, ...]

    @property
    def wholes(self) -> list[float]:
        """Seconds to the first answer, by round."""
        return [one.first_answer for one in self.rounds]

    @property
    def middle(self) -> ColdStart:
        """The round whose first answer is the median, the later one of two."""
        return sorted(self.rounds, key=lambda one: one.first_answer)[len(self.rounds) // 2]


def table(starts: Sequence[ColdStartSamples]) -> Table:
    """Build a row for each form and place of its files.

    Each is compared with the first form of the same place, all as one family.
    """
    first = {one.files: one for one in reversed(starts)}
    evidence = [None if one is first[one.files] else _compute_evidence(one, first[one.files]) for one in starts]
    decided = stats.decide_family(evidence)
    rows = [_make_row(one, speedup if e else None) for one, e, speedup in zip(starts, evidence, decided, strict=True)]
    return STARTS.of(COLUMNS, rows, notes=(NOTE, *sentences(starts)), printed=PRINTED)


def sentences(starts: Sequence[ColdStartSamples]) -> list[str]:
    """Return sentences on the longest part before the first answer, a later call, and starts that compile libraries."""
    return [_describe_starts(one) for one in starts] + [line for one in starts if (line := _describe_uncompiled(one))]


def without_byte_code(modules: int, uncompiled: int) -> str:
    """Describe how many of a process's modules have no byte-code; "" where only a few have none."""
    few = uncompiled <= MANY_UNCOMPILED * modules
    return (
        "" if few else f"{uncompiled:,} of {modules:,} Python modules have no byte-code, so each process compiles them"
    )


def _describe_uncompiled(one: ColdStartSamples) -> str:
    """Return a sentence on libraries without byte-code and the remedy; "" where they have it."""
    if found := without_byte_code(one.middle.modules, one.middle.uncompiled):
        ends = "omit PYTHONDONTWRITEBYTECODE, or run python -m compileall on the libraries once"
        return f"{one.title}, files {one.files}: {found}; {ends}."
    return ""


def _describe_starts(one: ColdStartSamples) -> str:
    middle = one.middle
    largest = sorted(middle.parts.items(), key=lambda item: -item[1])[:NAMED]
    named = " and ".join(f"{PARTS[name]} ({100 * s / middle.first_answer:.0f} %)" for name, s in largest)
    times = middle.first_answer / statistics.median(middle.later)
    return f"{one.title}, files {one.files}: most of it is {named}; a later call takes 1/{times:,.0f} of it."


def _compute_evidence(own: ColdStartSamples, other: ColdStartSamples) -> stats.Evidence | None:
    return stats.paired([math.log(a / b) for a, b in zip(other.wholes, own.wholes, strict=True)])


def _make_row(one: ColdStartSamples, speedup: stats.Speedup | None) -> Row:
    whole, middle = stats.center(one.wholes), one.middle
    parts = {f"{name}_ms": 1e3 * seconds for name, seconds in middle.parts.items()}
    row: Row = {
        "form": one.title, "files": one.files, "first_answer_ms": 1e3 * whole.value,
        "first_answer_ms_low": 1e3 * whole.low, "first_answer_ms_high": 1e3 * whole.high, **parts,
        "rest_ms": 1e3 * (middle.first_answer - sum(middle.parts.values())),
        "later_ms": 1e3 * statistics.median(value for each in one.rounds for value in each.later),
        "read_mb": None if middle.read_bytes is None else middle.read_bytes / 1e6, "rounds": len(one.rounds),
    }  # fmt: skip
    if speedup is None:
        return {**row, "verdict": "reference"}
    return {**row, **limited("speedup", speedup), "verdict": speedup.verdict}
