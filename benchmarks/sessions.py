"""Sessions, rounds and blocks: how much each adds to the variance of a latency and of a ratio in turns.

    python benchmarks/sessions.py --store FOLDER [--times 20] [--every 180]   measure sessions, then report all stored
    python benchmarks/sessions.py --store FOLDER --times 0                    report alone

A session is a study at a separate time: the demo's network at batch 1 in ONNX Runtime and OpenVINO, in turns, in
ROUNDS rounds of fresh processes. Each begins `--every` seconds after the one before began, or at once where that took
longer; the store may be filled on several days. The components are estimated by nested analysis of variance
(`stats.estimate_levels`). Disturbed blocks are left out of ratios, as verdicts leave them out.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dyno import Study
from dyno.formatting import markdown_table
from dyno.jobs.progress import Progress
from dyno.results import stats
from dyno.results.blocks import block_ratios
from dyno.results.trial_result import TrialResult, load_run
from dyno.runner.execute import execute

ROUNDS, SECONDS = 4, 0.5
BACKENDS = "onnxruntime", "openvino"
Session = list[list[np.ndarray]]  # per round: the samples of each block, as logs


def measure_session(folder: Path) -> None:
    """Measure one session into a new run folder."""
    study = Study(
        models=("dyno.worker.nets.digits:resnet18",), backends=BACKENDS, precisions=("fp32",), sizes=("64",),
        channels=1, rounds=ROUNDS, until="rounds", seconds=SECONDS, boundaries=("model",), routes=("usual",),
    )  # fmt: skip
    execute(study, folder, Progress(quiet=True))


def read_latencies(trial: TrialResult) -> Session:
    """Return the logs of a trial's latencies, in seconds."""
    rounds = [r.block_samples("latency", "model", "host") for r in trial.good]
    return [[np.log(samples) for samples in each.values()] for each in rounds if each]


def read_ratios(a: TrialResult, b: TrialResult) -> Session:
    """Return the log ratios of the blocks that both measured in turns, one value per pair of samples."""
    return [[np.array([log]) for log in each.logs] for each in block_ratios(a, b, "model", "host")]


def describe_levels(name: str, sessions: Sequence[Session]) -> tuple[str, ...] | None:
    """Return a row of the table: the standard deviation added by each level, in percent."""
    pairs = [(number, each) for number, session in enumerate(sessions) for each in session]
    found = stats.estimate_levels([each for _, each in pairs], [number for number, _ in pairs])
    if found is None or found.builds is None:
        return None
    parts = (found.builds, found.rounds, found.blocks, found.samples)
    shown = tuple(f"{100 * math.sqrt(part):.2f}" for part in parts)
    return (name, str(len(sessions)), *shown[:3], shown[3] if found.counts[2] > 1 else "")


def report(store: Path) -> None:
    """Print the table of all sessions in the store."""
    runs = [load_run(folder) for folder in sorted(store.glob("session-*")) if (folder / "study.toml").is_file()]
    both = [sorted(run.trials, key=lambda trial: BACKENDS.index(trial.backend)) for run in runs]
    complete = [pair for pair in both if all(len(trial.good) == ROUNDS for trial in pair)]
    rows = [
        describe_levels(f"latency, {name}", [read_latencies(pair[k]) for pair in complete])
        for k, name in enumerate(BACKENDS)
    ]
    rows.append(describe_levels("ratio in turns", [read_ratios(*pair) for pair in complete]))
    headings = ("standard deviation in %", "sessions", "of sessions", "of rounds", "of blocks", "of samples")
    print(markdown_table(headings, [row for row in rows if row], [False, *[True] * 5]))


def main() -> None:
    """Measure the requested sessions, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--every", type=float, default=180.0, help="seconds from one session's begin to the next")
    asked = parser.parse_args()
    asked.store.mkdir(parents=True, exist_ok=True)
    for number in range(asked.times):
        began = time.monotonic()
        measure_session(asked.store / f"session-{time.strftime('%Y%m%d-%H%M%S')}")
        if number < asked.times - 1:
            time.sleep(max(0.0, asked.every - (time.monotonic() - began)))
    report(asked.store)


if __name__ == "__main__":
    main()
