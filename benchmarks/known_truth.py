"""Is a whole default study right? Seven rows whose speeds are known, disturbed rounds, rounds until decided.

    python benchmarks/known_truth.py [--studies 400] [--spread 0.003,0.01,0.02] [--calm] [--csv FILE --run NAME]
    python benchmarks/known_truth.py --minutes 5 --store FOLDER

Latencies are drawn; all that follows is the code of `dyno run`: which rows need further rounds, whether those fit into
the default number of minutes, speed-ups with their intervals, what is fastest, and the difference that a run says it
can see. In a tenth of the rounds another program slows one row down, and the counters of the system don't show it
(--calm: in none). Each rate has its exact 95 % limits (Clopper and Pearson 1934). With --store what was simulated stays
in a folder, and the same command goes on.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dyno.formatting import markdown_table
from dyno.jobs.progress import Progress
from dyno.report.self_test import of_run, percent
from dyno.report.tables.trial_table import read_trials
from dyno.results.ranking import LATENCY, compare_first, pending, rank_goals
from dyno.results.run_data import RunData
from dyno.results.self_test import ProcessPair, SelfTest, StoredSelfTest, TestRound
from dyno.results.stats import EQUIVALENT, FASTER, SLOWER
from dyno.results.trial_result import SELF_TEST
from dyno.runner.execute import go_on
from dyno.store import Run
from dyno.study.study import Study
from dyno.worker.facts.job import Facts, Turns
from dyno.worker.record import Measurement, Record, write_json, write_record
from dyno.worker.spec import ROUNDS, Dims, Job, ModelSpec, Plan, Runtime, Trial, from_json, to_json

# How many times as fast as the first each row is; VISIBLE stands for the difference that the run says it can see.
VISIBLE = math.nan
CASES = {
    "seven different": (1.0, 1.0, 1.02, 1.05, 1.5, 3.0, 13.0),
    "seven equal": (1.0,) * 7,
    "one visible": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, VISIBLE),
}
BLOCKS, BLOCK_NOISE = 20, 0.02  # of a process, and the spread of a block's log ratio
DRIFT = 0.05  # of the machine, from round to round, which changes all rows alike
DISTURBED, DISTURBANCE = 0.1, 0.8  # share of rounds, and the mean of the exponential that one row's log is raised by
JOB_S = 4.0  # of a process, which starts, loads and measures
LATENCY_S = 0.01  # of the first row
SET = 8  # studies that are simulated and kept together
TEST_ROUNDS, TEST_SLOWDOWNS = 30, (0.0, 0.0, 0.01, 0.02, 0.05)  # of the self-test: about ten minutes


@dataclass(frozen=True)
class Machine:
    """How latencies vary: `spread` is that of a round's log ratio between processes, `disturbed` a share of rounds."""

    spread: float
    disturbed: float

    def draw_round(self, rows: int, draw: np.random.Generator) -> np.ndarray:
        """Return how far the log latency of each row and block is from the true one, float64 [rows, BLOCKS]."""
        logs = draw.normal(0, DRIFT) + draw.normal(0, BLOCK_NOISE / math.sqrt(2), (rows, BLOCKS))
        logs += draw.normal(0, self.spread / math.sqrt(2), (rows, 1))
        if draw.random() < self.disturbed:
            logs[draw.integers(rows)] += draw.exponential(DISTURBANCE)
        return logs

    def test(self, draw: np.random.Generator) -> SelfTest:
        """Return a self-test of this machine."""
        rounds = []
        for _ in range(TEST_ROUNDS):
            logs = self.draw_round(len(TEST_SLOWDOWNS), draw) + np.log1p(TEST_SLOWDOWNS)[:, None]
            pairs = zip(TEST_SLOWDOWNS[1:], logs[0] - logs[1:], strict=True)
            first_s = LATENCY_S * math.exp(float(np.median(logs[0])))
            rounds.append(TestRound(first_s, tuple(ProcessPair(share, tuple(each)) for share, each in pairs)))
        return SelfTest(StoredSelfTest("2026-01-01", "", {}, "cpu", "", 1, 2.0, 0.1, ROUNDS, tuple(rounds)))


@dataclass(frozen=True)
class StudyOutcome:
    """What one study came to.

    `visible` is the difference that the run said it can see after its first rounds (NaN: none), and `seen` whether the
    row with that difference was then called faster. `rounds` are those of the row with the most; the study is `decided`
    if it asked for no further round. `wrong_row` and
    `wrong_equal` say whether the table has a wrong direction or a wrong "equivalent", `wrong_winner` whether a row was
    called faster than one that is as fast, `missed_winner` whether the fastest row is not among those named. `covered`
    has for each printed interval whether it holds the truth; `verdicts` are the rows' in words.
    """

    visible: float
    seen: bool
    rounds: int
    decided: bool
    wrong_row: bool
    wrong_equal: bool
    wrong_winner: bool
    missed_winner: bool
    covered: tuple[bool, ...]
    verdicts: tuple[str, ...]


class SimulatedStudy:
    """A study in a folder whose processes don't run: their latencies are drawn."""

    def __init__(self, ratios: Sequence[float], machine: Machine, seed: Sequence[int], folder: Path) -> None:
        self.draw = np.random.default_rng(seed)
        self.ratios, self.machine, self.run = list(ratios), machine, Run(folder)
        self.study = Study(models=("file.onnx",), turns=True)
        self.trials = [
            Trial(ModelSpec("network", "torchvision:network"), "fake" if row else "pytorch", "fp32", Dims(1, 64, 64),
                  options={"row": row} if row else {}, runtime=Runtime(),
                  plan=Plan(("model",), seconds=self.study.seconds, blocks=BLOCKS))
            for row in range(len(ratios))
        ]  # fmt: skip
        folder.mkdir(parents=True)
        (folder / "study.toml").write_text(self.study.to_toml(), encoding="utf-8")
        write_json(folder / SELF_TEST, to_json(machine.test(self.draw).summary()))

    def measure(self, trials: Sequence[Trial], number: int, _: Sequence[str] = ()) -> None:
        """Write what one round of these trials would have measured."""
        logs = self.machine.draw_round(len(trials), self.draw)
        for trial, log in zip(trials, logs, strict=True):
            self._write_round(trial, number, LATENCY_S / self.ratios[self.trials.index(trial)] * np.exp(log))

    def _write_round(self, trial: Trial, number: int, seconds: np.ndarray) -> None:
        folder = self.run.fresh(trial, number)
        write_json(folder / "job.json", to_json(Job("run", trial.runtime, trial, round=number)))
        arrays = {"latency_model": seconds, "latency_model_block": np.arange(BLOCKS)}
        np.savez(folder / "samples.npz", **arrays)  # type: ignore[arg-type]
        facts = Facts(turns=Turns(f"round {number}"), delays={"model": (0.0,) * BLOCKS})
        latency = Measurement("latency", "s", "duration", None, "latency_model", "model", "host", "seconds")
        record = Record("ok", "done", "", trial.id, number, "2026-01-01T00:00:00", JOB_S, (latency,), facts=facts)
        write_record(folder, record)

    def execute(self) -> StudyOutcome:
        """Measure as `dyno run` does by default, and compare the result with the truth."""
        before, state = self.ratios, self.draw.bit_generator.state
        self.ratios = [1.0 if math.isnan(ratio) else ratio for ratio in before]
        for number in range(ROUNDS):
            self.measure(self.trials, number)
        seen = re.search(r"≥ ([\d.]+) %", of_run(read_trials(self.run.folder).records))
        visible = float(seen[1]) / 100 if seen else math.nan
        self.ratios = [1 + visible if math.isnan(ratio) else ratio for ratio in before]
        if math.isnan(sum(self.ratios)):
            self.ratios = [2.0 if math.isnan(ratio) else ratio for ratio in self.ratios]
        if self.ratios != before:  # the same rounds, of the row as fast as it is
            self.draw.bit_generator.state = state
            for number in range(ROUNDS):
                self.measure(self.trials, number)
        first = self._read_verdicts(read_trials(self.run.folder))
        go_on(self.study, self.run, self.trials, self.measure, Progress(quiet=True))
        return self._judge(read_trials(self.run.folder), visible, first[-1] == FASTER)

    def _read_verdicts(self, run: RunData) -> list[str]:
        rows = run.frame.set_index("trial")
        return [str(rows["verdict"][trial.id]) for trial in self.trials[1:]]

    def _judge(self, run: RunData, visible: float, seen: bool) -> StudyOutcome:
        truth = dict(zip((trial.id for trial in self.trials), self.ratios, strict=True))
        rows = run.frame[run.frame["verdict"] != "reference"].to_dict("records")
        (ranking,) = rank_goals(run)
        contest = compare_first(ranking.ranked(LATENCY), LATENCY, run)
        first, *others = (truth[str(id)] for id in contest.ranked["trial"])
        leads = [(lead, first / other) for lead, other in zip(contest.leads, others, strict=True)]
        verdicts = self._read_verdicts(run)
        return StudyOutcome(
            visible, seen, int(run.frame["rounds"].max()),
            not pending(run),
            any(_is_wrong(row["verdict"], truth[row["trial"]]) for row in rows),
            any(_is_wrongly_equal(row["verdict"], truth[row["trial"]]) for row in rows),
            any(_is_wrong(lead.verdict, ratio) for lead, ratio in leads),
            not any(truth[id] == max(self.ratios) for id in contest.candidates),
            tuple(row["speedup_low"] <= truth[row["trial"]] <= row["speedup_high"] for row in rows), tuple(verdicts),
        )  # fmt: skip


def _is_wrong(verdict: str, ratio: float) -> bool:
    return (verdict == FASTER and ratio <= 1) or (verdict == SLOWER and ratio >= 1)


def _is_wrongly_equal(verdict: str, ratio: float) -> bool:
    margin = math.log1p(Study(models=("file.onnx",)).equivalent / 100)
    return verdict == EQUIVALENT and abs(math.log(ratio)) >= margin * (1 - 1e-9)


def simulate_study(case: int, spread: float, disturbed: float, seed: int) -> StudyOutcome:
    """Run one simulated study in a folder that is then removed."""
    folder = Path(tempfile.mkdtemp(prefix="dyno-known-truth-"))
    ratios, seeds = [*CASES.values()][case], (seed, case, round(1e6 * spread))
    try:
        return SimulatedStudy(ratios, Machine(spread, disturbed), seeds, folder / "run").execute()
    finally:
        shutil.rmtree(folder)


def exact(hits: int, count: int) -> str:
    """Return a share with its exact 95 % interval (Clopper and Pearson 1934), as text."""
    from scipy.stats import binomtest

    if not count:
        return ""
    found = binomtest(hits, count).proportion_ci(method="exact")
    return f"{100 * hits / count:.1f} % [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def outcome_row(case: str, machine: Machine, outcomes: Sequence[StudyOutcome]) -> dict[str, str]:
    """Return the table's row for the studies of one case on one machine."""
    count = len(outcomes)

    def rate(is_hit: Callable[[StudyOutcome], bool], among: Sequence[StudyOutcome] = outcomes) -> str:
        return exact(sum(map(is_hit, among)), len(among))

    told = [one for one in outcomes if case == "one visible" and not math.isnan(one.visible)]
    rounds = sorted(one.rounds for one in outcomes)
    most = statistics.median(rounds), rounds[int(0.9 * (count - 1))], rounds[-1]
    covered = [each for one in outcomes for each in one.covered]
    return {
        "rows": case, "spread of rounds": percent(machine.spread), "disturbed rounds": percent(machine.disturbed),
        "studies": str(count), "a wrong direction": rate(lambda one: one.wrong_row),
        "a wrong equivalent": rate(lambda one: one.wrong_equal),
        "a wrong lead": rate(lambda one: one.wrong_winner), "fastest not named": rate(lambda one: one.missed_winner),
        "intervals that hold the truth": percent(statistics.fmean(covered)),
        "studies in which all do": rate(lambda one: all(one.covered)),
        "said to be visible": percent(statistics.median(one.visible for one in told)) if told else "",
        "seen in five rounds": rate(lambda one: one.seen, told),
        "seen when decided": rate(lambda one: one.verdicts[-1] == FASTER, told),
        "winner decided": rate(lambda one: one.decided),
        "rounds, median, 90 % and most": ", ".join(f"{each:g}" for each in most),
    }  # fmt: skip


def simulate(asked: argparse.Namespace, folder: Path) -> Iterator[dict[str, str]]:
    """Yield a row for each case and spread, until the minutes are over; every study is kept in the folder."""
    disturbed, ends = 0.0 if asked.calm else DISTURBED, time.monotonic() + 60 * asked.minutes
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(asked.processes) as pool:
        for (place, case), spread in product(enumerate(CASES), map(float, asked.spread.split(","))):
            if asked.case not in case:
                continue
            path = folder / f"{case.replace(' ', '-')}-{spread:g}-{disturbed:g}.jsonl"
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            outcomes = [from_json(StudyOutcome, json.loads(line)) for line in lines[: asked.studies]]
            one = partial(simulate_study, place, spread, disturbed)
            while len(outcomes) < asked.studies and time.monotonic() < ends:
                more = [*pool.map(one, range(len(outcomes), min(asked.studies, len(outcomes) + SET)))]
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(f"{json.dumps(to_json(each))}\n" for each in more)
                outcomes += more
            if outcomes:
                yield outcome_row(case, Machine(spread, disturbed), outcomes)


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--studies", type=int, default=400, help="of each case and spread")
    parser.add_argument("--spread", default="0.003,0.01,0.02", help="of a round's log ratio, between processes")
    parser.add_argument("--case", default="", help=f"part of a name: {', '.join(CASES)}")
    parser.add_argument("--calm", action="store_true", help="no disturbed rounds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="of simulating, after which the rest is left")
    parser.add_argument("--store", type=Path, help="folder to keep the outcomes in")
    parser.add_argument("--csv", type=Path, help="a file for benchmarks/results/data, which gets further rows")
    parser.add_argument("--run", default="", help="the run's name there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(simulate(asked, asked.store or Path(folder)))
    print(markdown_table([*rows[0]], [[*each.values()] for each in rows], [False, *[True] * (len(rows[0]) - 1)]))
    if asked.csv:
        is_new = not asked.csv.is_file()
        with asked.csv.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], "run"], lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows({**each, "run": asked.run} for each in rows)


if __name__ == "__main__":
    main()
