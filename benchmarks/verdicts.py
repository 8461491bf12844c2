"""Are verdicts right? Studies of processes whose difference is known: equal ones, and some slowed down by 2 and 5 %.

    python benchmarks/verdicts.py [--minutes 10] [--backends onnxruntime,openvino] [--csv verdicts.csv --run NAME]
    python benchmarks/verdicts.py --until 5 --minutes 60 [--threads 2]
    python benchmarks/verdicts.py --short

The same as `dyno calibrate`, for longer, with more equal pairs, and twice for each backend: as the machine is, and
beside a neighbour that keeps one core busy at random. Prints how many studies of three, five and ten rounds called
equal processes faster or slower (with the one-sided upper 95 % limit), how many intervals hold the true ratio, and in
how many studies a slow-down was seen.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dyno.analysis.formatting import markdown_table
from dyno.analysis.self_test.figures import Rate, SelfTest, Verdicts
from dyno.analysis.self_test.until import studies
from dyno.analysis.self_test.words import percent, with_range
from dyno.analysis.stats import EQUIVALENT, FASTER, SLOWER, UNDECIDED
from dyno.api.calibrate import Layout, calibrate

# Two equal pairs that share no process, and one pair for each slow-down.
LAYOUT = Layout((0.0, 0.0, 0.0, 0.0, 0.02, 0.05), ((0, 1), (2, 3), (0, 4), (2, 5)))
# Three pairs that share no process: an equal one, and two of 2 %.
UNTIL = Layout((0.0, 0.0, 0.0, 0.02, 0.0, 0.02), ((0, 1), (2, 3), (4, 5)))
UNTIL_S = 3.0  # of each process and round, as `dyno run` has them
FIRST = 3  # rounds before a study is first looked at
SHORT: dict[str, Any] = {"rounds": 3, "seconds": 0.2, "warmup": 0.1}
BURST_S = 0.5  # of the neighbour, on average; between two of them as long
ALONE, BESIDE = "the machine as it is", "beside a neighbour"


def bursts(seed: int) -> None:
    """Keep a core busy for random times with random rests, for ever."""
    draw = random.Random(seed)
    while True:
        end = time.monotonic() + draw.expovariate(1 / BURST_S)
        while time.monotonic() < end:
            pass
        time.sleep(draw.expovariate(1 / BURST_S))


@contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    """A process that is busy at random while the block runs."""
    if not wanted:
        yield
        return
    beside = multiprocessing.Process(target=bursts, args=(0,), daemon=True)
    beside.start()
    try:
        yield
    finally:
        beside.terminate()
        beside.join()


def row(backend: str, condition: str, one: Verdicts) -> dict[str, str]:
    """A row of the table: what studies of so many rounds said of one difference."""
    rate, wrong, held = one.slower.interval, one.false, one.covered.interval
    return {
        "backend": backend, "measured": condition, "slowed by": percent(one.slowdown), "rounds": str(one.rounds),
        "studies": str(one.slower.count), "called slower": with_range(rate.value, rate.low, rate.high),
        "called faster": percent(one.faster.interval.value),
        "wrong": f"{wrong.hits} of {wrong.count}, at most {percent(wrong.at_most)}",
        "intervals that hold the truth": with_range(held.value, held.low, held.high),
        "expected to be called different": percent(one.predicted),
    }  # fmt: skip


def spreads(backend: str, condition: str, found: SelfTest, load: float) -> dict[str, str]:
    """A row of the second table: the noise."""
    return {
        "backend": backend, "measured": condition, "rounds": str(len(found.rounds)),
        "spread in turns": with_range(found.spread.value, found.spread.low, found.spread.high),
        "one after the other": percent(found.apart), "bounded by": found.bound_by, "grade": found.grade,
        "visible in 3, 5, 10 rounds": ", ".join(percent(found.visible(n).value) for n in (3, 5, 10)),
        "equal processes over all rounds": f"{found.equal.value:.4f} [{found.equal.low:.4f}, {found.equal.high:.4f}]",
        "load average": f"{load:.1f}",
    }  # fmt: skip


def endings(backend: str, condition: str, found: SelfTest, round_s: float, minutes: float) -> list[dict[str, str]]:
    """Rows of the third table: how studies of two processes end that go on until they are decided."""
    pair_s = round_s * 2 / len(UNTIL.slowdowns)  # a study of its own has no other processes
    rows = []
    for slowdown in found.slowdowns:
        places = range(sum(pair.slowdown == slowdown for pair in found.rounds[0].pairs))
        logs = [[[p.log for p in one.pairs if p.slowdown == slowdown][k] for one in found.rounds] for k in places]
        ended = [one for each in logs for one in studies(each, FIRST, int(minutes * 60 / pair_s))]
        if not ended:
            continue
        rows.append({
            "backend": backend, "measured": condition, "slowed by": percent(slowdown), "studies": str(len(ended)),
            **{word: with_range(rate.value, rate.low, rate.high) for word in (SLOWER, FASTER, EQUIVALENT, UNDECIDED)
               for rate in [Rate(sum(one.verdict == word for one in ended), len(ended)).interval]},
            "rounds, median and most": quantiles([float(one.rounds) for one in ended], "g"),
            "minutes, median and most": quantiles([one.rounds * pair_s / 60 for one in ended], ".1f"),
        })  # fmt: skip
    return rows


def quantiles(values: list[float], style: str) -> str:
    """The median and the largest of the values."""
    return f"{statistics.median(values):{style}}, {max(values):{style}}" if values else ""


def printed(rows: list[dict[str, str]]) -> None:
    """Print the rows as a table."""
    print(markdown_table([*rows[0]], [[*each.values()] for each in rows], [False, False, *[True] * (len(rows[0]) - 2)]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of measuring, over all backends and conditions")
    parser.add_argument("--backends", default="onnxruntime")
    parser.add_argument("--short", action="store_true", help="three short rounds: does it run at all?")
    parser.add_argument("--csv", type=Path, help="beginning of the names of two files for docs/measured/data")
    parser.add_argument("--run", default="", help="the run's name there")
    parser.add_argument("--until", type=float, default=0.0, help="studies of so many minutes at most, until decided")
    parser.add_argument("--threads", type=int, default=0, help="of each process (default: as in a study)")
    asked = parser.parse_args()
    backends = asked.backends.split(",")
    fields: dict[str, Any] = {"seconds": UNTIL_S} if asked.until else {}
    fields |= {"threads": asked.threads} if asked.threads else {}
    fields |= SHORT if asked.short else {}
    verdicts, noise, ends = [], [], []
    for backend in backends:
        for condition in (ALONE, BESIDE):
            minutes = asked.minutes / len(backends) / 2
            with neighbour(condition == BESIDE):
                since = time.monotonic()
                layout = UNTIL if asked.until else LAYOUT
                found = calibrate(backend=backend, minutes=minutes, layout=layout, keep=False, **fields)
                round_s = (time.monotonic() - since) / len(found.rounds)
            verdicts += [row(backend, condition, one) for one in found.verdicts]
            ends += endings(backend, condition, found, round_s, asked.until) if asked.until else []
            noise.append(spreads(backend, condition, found, os.getloadavg()[0]))
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors\n")
    tables = {"": verdicts, "-noise": noise} | ({"-until": ends} if ends else {})
    for rows in tables.values():
        printed(rows)
    for name, rows in tables.items() if asked.csv else ():
        with asked.csv.with_name(f"{asked.csv.stem}{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], "run"], lineterminator="\n")
            writer.writeheader()
            writer.writerows({**each, "run": asked.run} for each in rows)


if __name__ == "__main__":
    main()
