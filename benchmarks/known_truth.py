"""Is a whole default study right? Seven rows whose speeds are known, disturbed rounds, rounds until decided.

    python benchmarks/known_truth.py [--studies 400] [--spread 0.003,0.01,0.02] [--calm] [--short]
    python benchmarks/known_truth.py --real --minutes 4 --store FOLDER [--beside]

Latencies are drawn; everything else is the code of `dyno run`: the rows that need further rounds, whether those fit
into the default number of minutes, speed-ups with their intervals, the fastest row, and the smallest visible
difference that a run reports. In a tenth of the rounds another program slows one row down, unseen by the system's
counters (--calm: in none). With --short only contenders are measured after three rounds. Each rate has its exact 95 %
limits (Clopper and Pearson 1934). With --real the rows are processes of one engine, some slowed down by known shares.
With --store the outcomes stay in a folder, and the same command continues. With --csv the rows join a file.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.beside import SHARE, company

from dyno.formatting import markdown_table
from dyno.jobs.progress import Progress
from dyno.regression.selftest import OF_MODEL, TEST_MODEL
from dyno.report.self_test import of_run, show_percent
from dyno.report.tables.trial_table import read_trials
from dyno.results.ranking import LATENCY, compare_first, list_contenders, list_pending, rank_goals
from dyno.results.run_data import RunData
from dyno.results.self_test import ProcessPair, SelfTest, StoredSelfTest, TestRound
from dyno.results.stats import EQUIVALENT, FASTER, SLOWER
from dyno.results.trial_result import SELF_TEST_FILE
from dyno.runner.device_lock import hold_device
from dyno.runner.execute import FULL_ROUNDS, Files, go_on
from dyno.runner.turns import InterleavedGroup, InterleavedJob
from dyno.store import Run
from dyno.study.plan import expand
from dyno.study.study import Study
from dyno.worker.facts.job import Facts, Turns
from dyno.worker.record import Measurement, Record, write_json, write_record
from dyno.worker.spec import (
    DEFAULT_ROUNDS,
    SLOWDOWN_OPTION,
    Artifact,
    Dims,
    Job,
    ModelSpec,
    Plan,
    Runtime,
    Trial,
    from_json,
    to_json,
)

# Speed of each row relative to the first; VISIBLE stands for the smallest visible difference that the run reports.
VISIBLE = math.nan
CASES = {
    "seven different": (1.0, 1.0, 1.02, 1.05, 1.5, 3.0, 13.0),
    "seven equal": (1.0,) * 7,
    "one visible": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, VISIBLE),
}
BLOCKS, BLOCK_NOISE = 20, 0.02  # standard deviation of a process, and of a block's log ratio
DRIFT = 0.05  # standard deviation of the machine between rounds, common to all rows
DISTURBED, DISTURBANCE = 0.1, 0.8  # share of disturbed rounds, and the mean of the exponential added to one row's log
# Real studies: the slow-down of each process, and its measuring time.
SLOWDOWNS = (0.05, 0.05, 0.02, 0.0)
REAL: dict[str, Any] = {"seconds": 0.5, "warmup": 0.2, "timeout": 120.0, "minutes": 1.0}
ALONE, BESIDE = "the machine as it is", "beside a person's programs"
JOB_S = 4.0  # duration of a process: start, load, measurement
LATENCY_S = 0.01  # latency of the first row
SHORT = 2.5  # minutes of a study that leaves rows out after three of its rounds
SET = 32  # studies that are simulated and stored together
TEST_ROUNDS, TEST_SLOWDOWNS = 30, (0.0, 0.0, 0.01, 0.02, 0.05)  # rounds of the self-test: about ten minutes


@dataclass(frozen=True)
class Machine:
    """Latency variation: `spread` between processes of a round's log ratio, `disturbed` a share of rounds."""

    spread: float
    disturbed: float

    def draw_round(self, rows: int, draw: np.random.Generator) -> np.ndarray:
        """Return the log error of each row's and block's latency, float64 [rows, BLOCKS]."""
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
        return SelfTest(StoredSelfTest("2026-01-01", "", {}, "cpu", "", 1, 2.0, 0.1, DEFAULT_ROUNDS, tuple(rounds)))


@dataclass(frozen=True)
class StudyOutcome:
    """The outcome of one study.

    `rounds` is the largest number of rounds of a row; the study is `decided` if it asked for no further round.
    `wrong_row` and `wrong_equal`: the table has a wrong direction or a wrong "equivalent". `wrong_winner`: a row was
    called faster than an equally fast one. `missed_winner`: the fastest row is not among those named. `covered` says
    for each printed interval whether it holds the truth; `verdicts` are the rows' in words. `visible` is the smallest
    visible difference that the run reported after its first rounds (NaN: none), and `seen` whether the row with that
    difference was then called faster.
    """

    rounds: int
    decided: bool
    wrong_row: bool
    wrong_equal: bool
    wrong_winner: bool
    missed_winner: bool
    covered: tuple[bool, ...]
    verdicts: tuple[str, ...]
    visible: float = math.nan
    seen: bool = False


class KnownStudy:
    """A study of rows with known speed-ups over the first row."""

    def __init__(self, folder: Path, study: Study, trials: Sequence[Trial], ratios: Sequence[float]) -> None:
        self.run, self.study, self.trials, self.ratios = Run(folder), study, trials, list(ratios)
        folder.mkdir(parents=True)
        (folder / "study.toml").write_text(study.to_toml(), encoding="utf-8")

    def measure(self, trials: Sequence[Trial], number: int, boundaries: Sequence[str] = ()) -> None:
        """Store one round of these trials."""
        raise NotImplementedError

    def execute(self) -> StudyOutcome:
        """Measure by the defaults of `dyno run`; return the result compared with the truth."""
        trials = self.trials
        for number in range(DEFAULT_ROUNDS):
            if number == FULL_ROUNDS and self.study.minutes == SHORT:
                contenders = list_contenders(read_trials(self.run.folder))
                trials = [trial for trial in trials if trial.id in contenders]
            self.measure(trials, number)
        go_on(self.study, self.run, self.trials, {}, self.measure, Progress(quiet=True))
        return self.judge()

    def read_verdicts(self, run: RunData) -> list[str]:
        """Return the verdict on each row but the first."""
        rows = run.frame.set_index("trial")
        return [str(rows["verdict"][trial.id]) for trial in self.trials[1:]]

    def judge(self) -> StudyOutcome:
        """Compare the table and the ranking with the truth; return the outcome."""
        run = read_trials(self.run.folder)
        truth = dict(zip((trial.id for trial in self.trials), self.ratios, strict=True))
        rows = run.frame[run.frame["verdict"] != "reference"].to_dict("records")
        (ranking,) = rank_goals(run)
        contest = compare_first(ranking.rank_by(LATENCY), LATENCY, run)
        first, *others = (truth[str(id)] for id in contest.ranked["trial"])
        leads = [(lead, first / other) for lead, other in zip(contest.leads, others, strict=True)]
        return StudyOutcome(
            int(run.frame["rounds"].max()), not list_pending(run),
            any(_is_wrong(row["verdict"], truth[row["trial"]]) for row in rows),
            any(_is_wrongly_equal(row["verdict"], truth[row["trial"]]) for row in rows),
            any(_is_wrong(lead.verdict, ratio) for lead, ratio in leads),
            not any(truth[id] == max(self.ratios) for id in contest.candidates),
            tuple(row["speedup_low"] <= truth[row["trial"]] <= row["speedup_high"] for row in rows),
            tuple(self.read_verdicts(run)),
        )  # fmt: skip


class SimulatedStudy(KnownStudy):
    """A study with drawn latencies instead of running processes."""

    def __init__(
        self, folder: Path, ratios: Sequence[float], machine: Machine, seed: Sequence[int], minutes: float
    ) -> None:
        self.draw, self.machine = np.random.default_rng(seed), machine
        study = Study(models=("file.onnx",), turns=True, minutes=minutes)
        trials = [
            Trial(ModelSpec("network", "torchvision:network"), "fake" if row else "pytorch", "fp32", Dims(1, 64, 64),
                  options={"row": row} if row else {}, runtime=Runtime(),
                  plan=Plan(("model",), seconds=study.seconds, blocks=BLOCKS))
            for row in range(len(ratios))
        ]  # fmt: skip
        super().__init__(folder, study, trials, ratios)
        write_json(folder / SELF_TEST_FILE, to_json(machine.test(self.draw).summary()))

    def measure(self, trials: Sequence[Trial], number: int, boundaries: Sequence[str] = ()) -> None:
        """See `KnownStudy.measure`."""
        logs = self.machine.draw_round(len(trials), self.draw)
        for trial, log in zip(trials, logs, strict=True):
            self._write_round(trial, number, LATENCY_S / self.ratios[self.trials.index(trial)] * np.exp(log))

    def _write_round(self, trial: Trial, number: int, seconds: np.ndarray) -> None:
        folder = self.run.create_round(trial, number)
        write_json(folder / "job.json", to_json(Job("run", trial.runtime, trial, round=number)))
        arrays = {"latency_model": seconds, "latency_model_block": np.arange(BLOCKS)}
        np.savez(folder / "samples.npz", **arrays)  # type: ignore[arg-type]
        facts = Facts(turns=Turns(f"round {number}"), delays={"model": (0.0,) * BLOCKS})
        latency = Measurement("latency", "s", "duration", None, "latency_model", "model", "host", "seconds")
        record = Record("ok", "done", "", trial.id, number, "2026-01-01T00:00:00", JOB_S, (latency,), facts=facts)
        write_record(folder, record)

    def execute(self) -> StudyOutcome:
        """See `KnownStudy.execute`; VISIBLE becomes the smallest visible difference after the first rounds."""
        state, is_open = self.draw.bit_generator.state, [math.isnan(ratio) for ratio in self.ratios]
        if not any(is_open):
            return super().execute()
        for number in range(DEFAULT_ROUNDS):
            self.measure(self.trials, number)
        visible_from = re.search(r"≥ ([\d.]+) %", of_run(read_trials(self.run.folder).records))
        visible = float(visible_from[1]) / 100 if visible_from else math.nan
        self.ratios = [
            (1 + visible if visible_from else 2.0) if is_open[k] else ratio for k, ratio in enumerate(self.ratios)
        ]
        self.draw.bit_generator.state = state  # the same rounds, with that row's speed
        for number in range(DEFAULT_ROUNDS):
            self.measure(self.trials, number)
        seen = self.read_verdicts(read_trials(self.run.folder))[-1] == FASTER
        go_on(self.study, self.run, self.trials, {}, self.measure, Progress(quiet=True))
        return replace(self.judge(), visible=visible, seen=seen)


class RealStudy(KnownStudy):
    """A study of processes of one engine, some slowed down by known shares."""

    def __init__(self, folder: Path, slowdowns: Sequence[float]) -> None:
        study = Study(models=(TEST_MODEL,), backends=("onnxruntime",), precisions=("fp32",), batches=(1,),
                      boundaries=("model",), turns=True, **OF_MODEL, **REAL)  # fmt: skip
        (planned,) = expand(study)
        plans = [replace(planned.trial.plan, max_samples=Plan.max_samples + row) for row in range(len(slowdowns))]
        rows = sorted((replace(planned.trial, plan=plan) for plan in plans), key=lambda trial: trial.id)
        super().__init__(folder, study, rows, [(1 + slowdowns[0]) / (1 + share) for share in slowdowns])
        self.slowdowns = {trial.id: share for trial, share in zip(rows, slowdowns, strict=True)}
        artifact = Files(Progress(quiet=True), study.build_timeout_s).get(planned.trial, 0)
        assert isinstance(artifact, Artifact)
        self.artifact = artifact

    def measure(self, trials: Sequence[Trial], number: int, boundaries: Sequence[str] = ()) -> None:
        """See `KnownStudy.measure`."""
        members = []
        for trial in trials:
            options = {SLOWDOWN_OPTION: self.slowdowns[trial.id]}  # round 0 would also evaluate
            job = Job("run", trial.runtime, trial, artifact=self.artifact, round=number + 1, options=options)
            members.append(InterleavedJob(job, self.run.create_round(trial, number), number))
        progress = Progress(quiet=True)
        with hold_device(trials[0].runtime, progress.show_waiting):
            InterleavedGroup(members, f"round {number}", progress, lambda _: None).run()
        failed = [member.record.reason for member in members if member.record and member.record.status != "ok"]
        assert not failed, failed


def _is_wrong(verdict: str, ratio: float) -> bool:
    return (verdict == FASTER and ratio <= 1) or (verdict == SLOWER and ratio >= 1)


def _is_wrongly_equal(verdict: str, ratio: float) -> bool:
    margin = math.log1p(Study(models=("file.onnx",)).equivalent / 100)
    return verdict == EQUIVALENT and abs(math.log(ratio)) >= margin * (1 - 1e-9)


def run_study(make: Callable[[Path], KnownStudy]) -> StudyOutcome:
    """Run one study in a temporary folder; return its outcome."""
    folder = Path(tempfile.mkdtemp(prefix="dyno-known-truth-"))
    try:
        return make(folder / "run").execute()
    finally:
        shutil.rmtree(folder)


def simulate_study(case: str, spread: float, disturbed: float, minutes: float, seed: int) -> StudyOutcome:
    """Run one simulated study; return its outcome."""
    seeds = seed, [*CASES].index(case), round(1e6 * spread)
    return run_study(lambda folder: SimulatedStudy(folder, CASES[case], Machine(spread, disturbed), seeds, minutes))


def exact(hits: int, count: int) -> str:
    """Return a share with its exact 95 % interval (Clopper and Pearson 1934), as text."""
    from scipy.stats import binomtest

    if not count:
        return ""
    found = binomtest(hits, count).proportion_ci(method="exact")
    return f"{100 * hits / count:.1f} % [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def outcome_row(case: str, how: str, outcomes: Sequence[StudyOutcome]) -> dict[str, str]:
    """Return the table's row for the studies of one case and one source of latencies."""

    def rate(is_hit: Callable[[StudyOutcome], bool], among: Sequence[StudyOutcome] = outcomes) -> str:
        return exact(sum(map(is_hit, among)), len(among))

    told = [one for one in outcomes if not math.isnan(one.visible)]
    rounds = sorted(one.rounds for one in outcomes)
    most = statistics.median(rounds), rounds[int(0.9 * (len(rounds) - 1))], rounds[-1]
    covered = [each for one in outcomes for each in one.covered]
    return {
        "rows": case, "latencies": how, "studies": str(len(outcomes)),
        "a wrong direction": rate(lambda one: one.wrong_row), "a wrong equivalent": rate(lambda one: one.wrong_equal),
        "a wrong lead": rate(lambda one: one.wrong_winner), "fastest not named": rate(lambda one: one.missed_winner),
        "intervals that hold the truth": show_percent(statistics.fmean(covered)),
        "studies in which all do": rate(lambda one: all(one.covered)),
        "said to be visible": show_percent(statistics.median(one.visible for one in told)) if told else "",
        "seen in five rounds": rate(lambda one: one.seen, told),
        "seen when decided": rate(lambda one: one.verdicts[-1] == FASTER, told),
        "winner decided": rate(lambda one: one.decided),
        "rounds: median, 90 %, most": ", ".join(f"{each:g}" for each in most),
    }  # fmt: skip


def list_outcomes(
    path: Path, count: int, ends: float, measure: Callable[[Sequence[int]], Iterable[StudyOutcome]]
) -> list[StudyOutcome]:
    """Return the outcomes stored in a file, and store further outcomes until the time is over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    outcomes = [from_json(StudyOutcome, json.loads(line)) for line in lines[:count]]
    while len(outcomes) < count and time.monotonic() < ends:
        more = [*measure(range(len(outcomes), min(count, len(outcomes) + SET)))]
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(to_json(each))}\n" for each in more)
        outcomes += more
    return outcomes


def simulate(asked: argparse.Namespace, folder: Path, ends: float) -> Iterator[dict[str, str]]:
    """Yield a row for each case and spread."""
    disturbed = 0.0 if asked.calm else DISTURBED
    minutes = SHORT if asked.short else Study.minutes
    with ProcessPoolExecutor(asked.processes) as pool:
        for case, spread in product(CASES, map(float, asked.spread.split(","))):
            if asked.case not in case:
                continue
            path = folder / f"{case.replace(' ', '-')}-{spread:g}-{disturbed:g}.jsonl"
            one = partial(simulate_study, case, spread, disturbed, minutes)
            if outcomes := list_outcomes(path, asked.studies, ends, partial(pool.map, one)):
                how = f"drawn: spread {show_percent(spread)}, {show_percent(disturbed)} of rounds disturbed"
                how += ", short" * asked.short
                yield outcome_row(case, how, outcomes)


def measure_real(asked: argparse.Namespace, folder: Path, ends: float) -> Iterator[dict[str, str]]:
    """Yield a row of real studies, on the machine as it is or beside a person's programs."""
    how = BESIDE if asked.beside else ALONE

    def measure(numbers: Sequence[int]) -> Iterator[StudyOutcome]:
        for _ in numbers[:1]:
            yield run_study(lambda path: RealStudy(path, SLOWDOWNS))

    with company(SHARE if asked.beside else 0.0, os.getpid()):
        outcomes = list_outcomes(folder / f"real-{how.split()[0]}.jsonl", asked.studies, ends, measure)
    if outcomes:
        slowed = ", ".join(f"{100 * share:g}" for share in SLOWDOWNS)
        yield outcome_row(f"slowed by {slowed} %", f"measured: {how}", outcomes)


def main() -> None:
    """Measure or simulate, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--studies", type=int, default=400, help="of each case and spread")
    parser.add_argument("--spread", default="0.003,0.01,0.02", help="of a round's log ratio, between processes")
    parser.add_argument("--case", default="", help=f"part of a name: {', '.join(CASES)}")
    parser.add_argument("--calm", action="store_true", help="no disturbed rounds")
    parser.add_argument("--short", action="store_true", help="too short for five rounds of every row")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--real", action="store_true", help="processes of one engine, some of them slowed down")
    parser.add_argument("--beside", action="store_true", help="real studies beside a person's programs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which what is left is left out")
    parser.add_argument("--store", type=Path, help="folder to keep the outcomes in")
    parser.add_argument("--csv", type=Path, help="a file for benchmarks/results/data, which gets further rows")
    parser.add_argument("--run", default="", help="the run's name there")
    asked = parser.parse_args()
    list_rows, ends = measure_real if asked.real else simulate, time.monotonic() + 60 * asked.minutes
    with tempfile.TemporaryDirectory() as folder:
        rows = list(list_rows(asked, asked.store or Path(folder), ends))
    assert rows, "no study in these minutes"
    print(markdown_table([*rows[0]], [[*each.values()] for each in rows], [False, False, *[True] * (len(rows[0]) - 2)]))
    if asked.csv:
        is_new = not asked.csv.is_file()
        with asked.csv.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], "run"], lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows({**each, "run": asked.run} for each in rows)


if __name__ == "__main__":
    main()
