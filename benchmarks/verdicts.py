"""Are verdicts right? Studies of processes whose difference is known: equal ones, and some slowed down by 2 and 5 %.

    python benchmarks/verdicts.py [--minutes 10] [--backend onnxruntime,openvino] [--csv verdicts.csv --run NAME]
    python benchmarks/verdicts.py --until 5 --minutes 60 [--threads 2] [--slowdown 0.01] [--beside]
    python benchmarks/verdicts.py --device cuda:0 --backend pytorch,tensorrt --python tensorrt=PATH --alone
    python benchmarks/verdicts.py --store FOLDER [...]; python benchmarks/verdicts.py --read FOLDER
    python benchmarks/verdicts.py --short

Runs `dyno selftest` for longer, with more equal pairs, twice per backend: on the machine as it is, and beside a
person's programs as played by `beside.py`. Prints, for studies of three, five and ten rounds, how many called equal
processes faster or slower (with the one-sided upper 95 % limit), how many intervals hold the true ratio, and how many
studies saw a slow-down. --store keeps the self-tests; --read prints the tables of a folder, with copies on separate
cores pooled.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.beside import SHARE, company
from benchmarks.until import studies

from dyno.formatting import markdown_table
from dyno.regression.selftest import Layout, selftest
from dyno.report.self_test import show_percent, with_range
from dyno.results.self_test import Rate, SelfTest, Verdicts, read
from dyno.results.stats import EQUIVALENT, FASTER, SLOWER, UNDECIDED
from dyno.worker.spec import DEFAULT_ROUNDS, to_json

# Two equal pairs without a common process, and one pair for each slow-down.
LAYOUT = Layout((0.0, 0.0, 0.0, 0.0, 0.02, 0.05), ((0, 1), (2, 3), (0, 4), (2, 5)))
# Three pairs without a common process: an equal one, and two whose second process is slowed down.
UNTIL_PAIRS = ((0, 1), (2, 3), (4, 5))
UNTIL_S = 2.0  # seconds of each process and round, as in `dyno run`
SHORT: dict[str, Any] = {"rounds": 3, "seconds": 0.2, "warmup": 0.1}
ALONE, BESIDE = "the machine as it is", "beside a person's programs"


@dataclass(frozen=True)
class ConditionSelfTest:
    """A self-test with its condition, the duration of a round (s), and the load average at its end."""

    backend: str
    condition: str
    test: SelfTest
    round_s: float
    load: float

    @classmethod
    def read(cls, path: Path) -> ConditionSelfTest:
        """Return a self-test that `store` wrote."""
        about = json.loads(path.read_text(encoding="utf-8"))
        stored = read(about.pop("stored"))
        assert stored is not None, f"{path} is not a self-test of this Dyno"
        return cls(test=SelfTest(stored), **about)

    def store(self, folder: Path) -> None:
        """Write it to the folder, under a name unique among concurrent copies."""
        about = {"backend": self.backend, "condition": self.condition, "round_s": self.round_s, "load": self.load}
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.backend}-{'beside' if self.condition == BESIDE else 'alone'}-{os.getpid()}.json"
        text = json.dumps({**about, "stored": to_json(self.test.stored)})
        (folder / name).write_text(text, encoding="utf-8")


def pooled(rates: Iterable[Rate]) -> Rate:
    """Return the rate over all copies."""
    rates = list(rates)
    return Rate(sum(one.hits for one in rates), sum(one.count for one in rates))


def verdict_rows(copies: list[ConditionSelfTest]) -> list[dict[str, str]]:
    """Return rows of the first table: verdicts of N-round studies of a difference, over a condition's copies."""
    by_kind: dict[tuple[float, int], list[Verdicts]] = {}
    for copy in copies:
        for one in copy.test.verdicts:
            by_kind.setdefault((one.slowdown, one.rounds), []).append(one)
    return [_verdict_row(copies[0], ones) for _, ones in sorted(by_kind.items())]


def _verdict_row(about: ConditionSelfTest, ones: list[Verdicts]) -> dict[str, str]:
    slower, faster, wrong, held = (
        pooled(getattr(one, name) for one in ones) for name in ("slower", "faster", "false", "covered")
    )
    return {
        "backend": about.backend, "measured": about.condition, "slowed by": show_percent(ones[0].slowdown),
        "rounds": str(ones[0].rounds), "studies": str(slower.count), "called slower": ranged(slower),
        "called faster": show_percent(faster.interval.value),
        "wrong": f"{wrong.hits} of {wrong.count}, at most {show_percent(wrong.at_most)}",
        "intervals that hold the truth": ranged(held),
        "expected to be called different": show_percent(statistics.fmean(one.predicted for one in ones)),
    }  # fmt: skip


def ranged(rate: Rate) -> str:
    """Format a share with its interval."""
    return with_range(rate.interval.value, rate.interval.low, rate.interval.high)


def noise_row(copy: ConditionSelfTest) -> dict[str, str]:
    """Return a row of the second table: one self-test's noise."""
    test = copy.test
    return {
        "backend": copy.backend, "measured": copy.condition, "rounds": str(len(test.rounds)),
        "spread in turns": with_range(test.spread.value, test.spread.low, test.spread.high),
        "one after the other": show_percent(test.apart), "bounded by": test.bound_by, "grade": test.grade,
        "visible in 3, 5, 10 rounds": ", ".join(show_percent(test.find_visible(n).value) for n in (3, 5, 10)),
        "equal processes over all rounds": f"{test.equal.value:.4f} [{test.equal.low:.4f}, {test.equal.high:.4f}]",
        "load average": f"{copy.load:.1f}",
    }  # fmt: skip


def ending_rows(copies: list[ConditionSelfTest], minutes: float) -> list[dict[str, str]]:
    """Return rows of the third table: endings of two-process studies that continue until decided."""
    rows = []
    for slowdown in copies[0].test.slowdowns:
        ended = [(one.verdict, one.rounds, one.rounds * copy.round_s / 3 / 60) for copy in copies  # 3 pairs
                 for logs in _pairs(copy.test, slowdown)
                 for one in studies(logs, DEFAULT_ROUNDS, int(minutes * 60 / (copy.round_s / 3)))]  # fmt: skip
        if not ended:
            continue
        rows.append({
            "backend": copies[0].backend, "measured": copies[0].condition, "slowed by": show_percent(slowdown),
            "studies": str(len(ended)),
            **{word: ranged(Rate(sum(verdict == word for verdict, _, _ in ended), len(ended)))
               for word in (SLOWER, FASTER, EQUIVALENT, UNDECIDED)},
            "rounds, median and most": quantiles([float(rounds) for _, rounds, _ in ended], "g"),
            "minutes, median and most": quantiles([took for _, _, took in ended], ".1f"),
        })  # fmt: skip
    return rows


def _pairs(test: SelfTest, slowdown: float) -> list[list[float]]:
    """Return the log ratios of every pair with that slow-down, round after round."""
    each = [[pair.log for pair in one.pairs if pair.slowdown == slowdown] for one in test.rounds]
    return [list(logs) for logs in zip(*each, strict=True)]


def quantiles(values: list[float], style: str) -> str:
    """Format the median and the largest of the values."""
    return f"{statistics.median(values):{style}}, {max(values):{style}}" if values else ""


def printed(rows: list[dict[str, str]]) -> None:
    """Print the rows as a table."""
    print(markdown_table([*rows[0]], [[*each.values()] for each in rows], [False, False, *[True] * (len(rows[0]) - 2)]))


def measured(asked: argparse.Namespace) -> Iterator[ConditionSelfTest]:
    """Yield a self-test for each backend and condition."""
    fields: dict[str, Any] = {"seconds": UNTIL_S} if asked.until else {}
    fields |= {"threads": asked.threads} if asked.threads else {}
    fields |= SHORT if asked.short else {}
    pythons = dict(pair.split("=", 1) for pair in asked.python)
    fields["runtime"] = {name: {"python": python} for name, python in pythons.items()}
    shares, backends = [float(share) for share in asked.slowdown.split(",")], asked.backends.split(",")
    layout = Layout((0.0, 0.0, 0.0, shares[0], 0.0, shares[-1]), UNTIL_PAIRS) if asked.until else LAYOUT
    conditions = [one for one, other in ((ALONE, asked.beside), (BESIDE, asked.alone)) if not other]
    for backend in backends:
        for condition in conditions:
            minutes = asked.minutes / len(backends) / len(conditions)
            with company(SHARE if condition == BESIDE else 0.0, os.getpid()):
                since = time.monotonic()
                test = selftest(asked.model, backend=backend, device=asked.device, minutes=minutes, layout=layout,
                                keep=False, **fields)  # fmt: skip
                round_s = (time.monotonic() - since) / len(test.rounds)
            yield ConditionSelfTest(backend, condition, test, round_s, os.getloadavg()[0])


def main() -> None:
    """Measure or read stored self-tests, and print the tables."""
    asked = _arguments()
    tests = [ConditionSelfTest.read(path) for path in sorted(asked.read.glob("*.json"))] if asked.read else []
    for test in measured(asked) if not asked.read else ():
        tests.append(test)
        if asked.store:
            test.store(asked.store)
    tests.sort(key=lambda one: (one.backend, one.condition == BESIDE))
    groups = [list(copies) for _, copies in groupby(tests, lambda one: (one.backend, one.condition))]
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors\n")
    tables = {
        "": [row for copies in groups for row in verdict_rows(copies)],
        "-noise": [noise_row(one) for one in tests],
    }
    if asked.until:
        tables["-until"] = [row for copies in groups for row in ending_rows(copies, asked.until)]
    tables = {name: rows for name, rows in tables.items() if rows}
    for rows in tables.values():
        printed(rows)
    for name, rows in tables.items() if asked.csv else ():
        with asked.csv.with_name(f"{asked.csv.stem}{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], "run"], lineterminator="\n")
            writer.writeheader()
            writer.writerows({**each, "run": asked.run} for each in rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of measuring, over all backends and conditions")
    parser.add_argument("--backend", dest="backends", default="onnxruntime")
    parser.add_argument("--model", default="", help="a source, as dyno selftest has it (default: the demo's network)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--python", action="append", default=[], help="NAME=PATH, as dyno run has it")
    conditions = parser.add_mutually_exclusive_group()
    conditions.add_argument("--alone", action="store_true", help="without the programs only")
    conditions.add_argument("--beside", action="store_true", help="beside the programs only")
    parser.add_argument("--short", action="store_true", help="three short rounds: does it run at all?")
    parser.add_argument("--csv", type=Path, help="beginning of the names of two files for benchmarks/results/data")
    parser.add_argument("--run", default="", help="the run's name there")
    parser.add_argument("--until", type=float, default=0.0, help="studies of at most N minutes, until decided")
    parser.add_argument("--slowdown", default="0.02", help="of the slower processes of --until, one share or two")
    parser.add_argument("--threads", type=int, default=0, help="of each process (default: as in a study)")
    parser.add_argument("--store", type=Path, help="folder to keep the self-tests in")
    parser.add_argument("--read", type=Path, help="print the tables of a folder's self-tests; measure nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
