"""Does a ratio depend on what else is measured? Two engines in turns, beside a third one, and without a break.

    python benchmarks/neighbours.py [--model torchvision:resnet18] [--batch 8] [--rounds 6] [--sustained 5]
        [--pair onnxruntime,openvino] [--beside pytorch] [--device cuda:0 --precision fp16] [--python NAME=PATH]

The third engine should need much power or cache, as eager PyTorch does. Prints the pair's ratio in each case with its
95 % interval over rounds, and its change from the first case with Welch's interval. The change should be at most
0.5 %, or its interval should show that the measurement can't resolve it; beyond the margin `dyno run` warns by itself.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dyno import Study
from dyno.formatting import markdown_table
from dyno.jobs.progress import Progress
from dyno.results.blocks import block_ratios, log_ratios
from dyno.results.trial_result import TrialResult, clock_of, load_run
from dyno.runner.execute import execute

BOUNDARY = "model"


def measure_pair(study: Study, pair: list[str], folder: Path) -> tuple[TrialResult, TrialResult]:
    """Run the study; return the trials of the pair, in the pair's order."""
    execute(study, folder, Progress())
    trials = {trial.backend: trial for trial in load_run(folder)}
    return trials[pair[0]], trials[pair[1]]


def read_sustained(pair: tuple[TrialResult, TrialResult], clock: str) -> list[float]:
    """Return the log ratio of each block under sustained load."""
    a, b = (replace(trial, rounds=trial.sustained, companions=[]) for trial in pair)
    sets = block_ratios(a, b, BOUNDARY, clock, settled=True)
    return [float(log) for each in sets for log in each.logs]


def describe(logs: list[float]) -> str:
    """Return the geometric mean ratio with its 95 % interval, Student's t over the log ratios."""
    mean, error = float(np.mean(logs)), float(stats.sem(logs)) if len(logs) > 1 else math.nan
    half = float(stats.t.ppf(0.975, max(len(logs) - 1, 1))) * error
    low, high = math.exp(mean - half), math.exp(mean + half)
    return f"{math.exp(mean):.4f} [{low:.4f}, {high:.4f}]"


def describe_move(logs: list[float], first: list[float]) -> str:
    """Return the ratio's change from the first case in percent, with Welch's 95 % interval."""
    found = stats.ttest_ind(logs, first, equal_var=False).confidence_interval()
    moved = float(np.mean(logs) - np.mean(first))
    return " ".join(f"{100 * math.expm1(value):+.2f}" for value in (moved, found.low, found.high))


def main() -> None:
    """Measure the three cases, one study after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="torchvision:resnet18")
    parser.add_argument("--pair", default="onnxruntime,openvino")
    parser.add_argument("--beside", default="pytorch")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--sustained", type=float, default=5.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--python", action="append", default=[])
    given = parser.parse_args()
    pair = given.pair.split(",")
    pythons = {name: {"python": path} for name, _, path in (one.partition("=") for one in given.python)}
    study = Study(
        models=(given.model,),
        backends=tuple(pair),
        precisions=(given.precision,),
        batches=(given.batch,),
        boundaries=(BOUNDARY,),
        rounds=given.rounds,
        seconds=given.seconds,
        sustained=given.sustained,
        device=given.device,
        routes=("usual",),
        runtime=pythons,
    )
    with tempfile.TemporaryDirectory() as folder:
        quiet = measure_pair(study, pair, Path(folder) / "pair")
        beside = replace(study, backends=(*pair, given.beside), sustained=0.0)
        three = measure_pair(beside, pair, Path(folder) / "three")
        clock = clock_of(BOUNDARY, *quiet)
        first = log_ratios(*quiet, BOUNDARY, clock)
        cases = {
            "the pair, in turns": first,
            f"beside {given.beside}, in turns": log_ratios(*three, BOUNDARY, clock),
            f"the pair, {given.sustained:g} s without a break": read_sustained(quiet, clock),
        }
        rows = [
            [name, str(len(logs)), describe(logs), describe_move(logs, first) if logs is not first else ""]
            for name, logs in cases.items()
        ]
        title = f"{pair[0]} / {pair[1]}"
        print(
            markdown_table(
                [title, "observations", "ratio of seconds", "moved by % [95 %]"], rows, [False, True, False, False]
            )
        )


if __name__ == "__main__":
    main()
