"""A against A: how far apart two processes of one session seem, measured in turns and one after the other.

    python benchmarks/turns.py [--rounds 20] [--seconds 2] [--blocks 0.02,0.1,0.3]
        [--backend pytorch --model torchvision:resnet18 --device cuda:0] [--python tensorrt=PATH]

Both processes run the same network from the same file, so every difference is noise; the default is a small network in
ONNX Runtime on a CPU. In each round every method starts two fresh processes; the methods follow in shuffled order, so
that they share the same hours. A process is timed for the same seconds in each method. Prints the standard deviation
of the log ratios over rounds, and the effect of turns on the latency: its median ratio to the latency without turns.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dyno import Study
from dyno.formatting import markdown_table
from dyno.jobs.launcher import launch
from dyno.jobs.progress import Progress
from dyno.results.blocks import compare_blocks
from dyno.results.rounds import Round
from dyno.runner.execute import Files
from dyno.runner.turns import InterleavedGroup, InterleavedJob
from dyno.study.plan import expand
from dyno.worker.record import read_record
from dyno.worker.spec import Artifact, Job, Plan, Trial

ALONE = "one after the other"
WHOLE, MEAN, MEDIAN = "medians of all samples", "mean over blocks", "median over blocks"
WALL, LEVEL = "wall seconds", "log of the latency"
NAMES = "a", "b"


def network(path: Path) -> None:
    """Write two convolutions of a 32 x 32 image as ONNX: under a millisecond on one core."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()
    torch.onnx.export(net, (torch.zeros(1, 3, 32, 32),), str(path), dynamo=False, input_names=["input"])


def job(model: str, asked: argparse.Namespace, block: float | None) -> Job:
    """Return the job of one process."""
    pythons = dict(pair.split("=", 1) for pair in asked.python)
    study = Study(
        models=(model,), backends=(asked.backend,), precisions=(asked.precision,), device=asked.device, threads=1,
        runtime={name: {"python": python} for name, python in pythons.items()}, boundaries=("model",),
        seconds=asked.seconds, warmup=0.5, interval=1e-9, turns=block is not None, block=block or Plan.block_s,
    )  # fmt: skip
    trial: Trial = expand(study)[0].trial
    made = Files(Progress(quiet=True)).make_file(trial.recipe) if trial.recipe else None
    assert made is None or isinstance(made, Artifact), made
    # Round 1: round 0 would also evaluate.
    return Job("run", trial.runtime, replace(trial, plan=replace(trial.plan, timeout_s=600)), 1, artifact=made)


def ratio(one: Job, folder: Path, seed: str) -> dict[str, float]:
    """Return the log ratio of two processes' latencies by statistic, and the wall seconds spent."""
    since = time.monotonic()
    order = random.Random(seed).sample(NAMES, 2)
    assert one.trial is not None
    if one.trial.plan.blocks:
        members = [InterleavedJob(one, folder / name, 1) for name in order]
        for member in members:
            member.folder.mkdir(parents=True)
        InterleavedGroup(members, seed, Progress(quiet=True), lambda _: None).run()
    else:
        for name in order:
            launch(one, folder / name, 600)
    took = time.monotonic() - since
    a, b = (read_record(folder / name) for name in NAMES)
    assert a is not None and b is not None and a.status == b.status == "ok", (a, b)
    left, right = (Round(folder / name, 1, record) for name, record in zip(NAMES, (a, b), strict=True))
    blocks = compare_blocks(*(each.block_medians("latency", "model") for each in (left, right)))
    logs = [float(np.log(each.median("model") or 1)) for each in (left, right)]
    of_round = {WALL: took, LEVEL: float(np.mean(logs)), WHOLE: logs[0] - logs[1]}
    return of_round | ({MEAN: float(blocks.mean()), MEDIAN: float(np.median(blocks))} if blocks.size else {})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--blocks", default="0.02,0.1,0.3")
    parser.add_argument("--model", default="")
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--python", action="append", default=[])
    asked = parser.parse_args()
    ways = {ALONE: None, **{f"in turns, blocks of {b} s": float(b) for b in asked.blocks.split(",")}}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model
        if not model:
            model = str(Path(folder) / "net.onnx")
            network(Path(model))
        jobs = {way: job(model, asked, block) for way, block in ways.items()}
        for number in range(asked.rounds):
            for place, way in enumerate(random.Random(number).sample(list(ways), len(ways))):
                found[way].append(ratio(jobs[way], Path(folder) / f"{number}-{place}", f"{number} {way}"))
            loads.append(os.getloadavg()[0])
            print(number + 1, *(f"{100 * found[way][-1][WHOLE]:.1f}%" for way in ways), file=sys.stderr, flush=True)
    alone = np.std([each[WHOLE] for each in found[ALONE]], ddof=1)
    level = np.array([each[LEVEL] for each in found[ALONE]])
    rows = []
    for way, each in found.items():
        for name in (name for name in (WHOLE, MEAN, MEDIAN) if name in each[0]):
            logs = np.array([one[name] for one in each])
            rows.append({
                "measured": way, "log ratio of": name, "spread": f"{100 * logs.std(ddof=1):.2f} %",
                "smaller by": f"{alone / logs.std(ddof=1):.1f} x", "farthest from 0": f"{100 * abs(logs).max():.2f} %",
                "median distance from 0": f"{100 * np.median(abs(logs)):.2f} %", "mean": f"{100 * logs.mean():+.2f} %",
                "latency": f"{np.exp(np.median([one[LEVEL] for one in each] - level)):.4f} x",
                "wall seconds of a round": f"{np.mean([one[WALL] for one in each]):.1f}",
            })  # fmt: skip
    what = f"{asked.model or 'two convolutions'} {asked.backend} {asked.precision} {asked.device}"
    print(f"{time.strftime('%Y-%m-%d')}, {what}, {asked.rounds} rounds, {asked.seconds:g} s each process, "
          f"load average {min(loads):.1f} to {max(loads):.1f} of {os.cpu_count()} processors\n")  # fmt: skip
    print(markdown_table([*rows[0]], [[*row.values()] for row in rows], [False, *[True] * (len(rows[0]) - 1)]), end="")


if __name__ == "__main__":
    main()
