"""A person's machine: programs that come and go beside a measurement, the same ones for the same seed.

    python benchmarks/beside.py -- dyno run model.onnx --out runs/beside      any command beside them
    python benchmarks/beside.py --demos 20 [--share 0.3] [--seed 0]           how the demo's verdict holds beside them
    python benchmarks/beside.py --demos 3 --share 0                           the same on the machine as it is
    python benchmarks/beside.py --demos 8 --cores 2                           each on two processors, several at once
    python benchmarks/beside.py --device cuda:0 -- dyno run …                 beside another process of the GPU, too

The programs run in bursts of 0.2 to 20 s, on one or all of this process's processors, for about 30 % of the time. A
burst computes, copies memory, or writes and reads files; on a GPU it multiplies matrices. Each demo's row names the
winner at batch 1, its speed-up over the reference with the interval, the command's duration, and whether a decision
came within its time. The last lines count the demos whose winner was among the best of the first demo, whose interval
was within 15 %, and whose decision came within 5 minutes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dyno.formatting import markdown_table
from dyno.report.tables import trial_table
from dyno.results import ranking
from dyno.results.ranking import LATENCY
from dyno.results.stats import FASTER

SHARE = 0.3  # share of the time in which a program runs
SHORTEST_S, LONGEST_S = 0.2, 20.0  # length of a burst, log-uniform between them
MEAN_S = (LONGEST_S - SHORTEST_S) / math.log(LONGEST_S / SHORTEST_S)
MEMORY_MB, FILE_MB = 128, 32
NARROW, SOON_S = 1.15, 300.0
KINDS = ("compute", "memory", "disk")


@dataclass(frozen=True)
class Burst:
    """A program on some processors; `begin` and `end` are seconds since the start."""

    begin: float
    end: float
    cores: tuple[int, ...]
    kind: str


def bursts(seed: int, share: float, cores: list[int]) -> Iterator[Burst]:
    """Yield bursts for ever; together they fill `share` of the time."""
    draw, now = random.Random(seed), 0.0
    while True:
        now += draw.expovariate(share / ((1 - share) * MEAN_S))
        length = math.exp(draw.uniform(math.log(SHORTEST_S), math.log(LONGEST_S)))
        chosen = tuple(cores) if draw.random() < 0.5 else (draw.choice(cores),)
        yield Burst(now, now + length, chosen, draw.choice(KINDS))
        now += length


def work(kind: str, until: float, scratch: Path) -> None:
    """Keep a processor busy until the monotonic time `until`."""
    noise = np.random.default_rng(0).integers(0, 256, MEMORY_MB << 20, np.uint8)
    while time.monotonic() < until:
        if kind == "compute":
            zlib.compress(noise[: 1 << 20].tobytes(), 6)
        elif kind == "memory":
            noise.copy()
        else:
            path = scratch / f"{os.getpid()}.bin"
            path.write_bytes(noise[: FILE_MB << 20].tobytes())
            path.read_bytes()
            path.unlink()


def play_on_gpu(device: str, seed: int, share: float) -> None:
    """Multiply matrices on the GPU for ever, in the seed's bursts."""
    import torch

    matrix, start = torch.randn(4096, 4096, device=device), time.monotonic()
    for burst in bursts(seed, share, [0]):
        time.sleep(max(0.0, start + burst.begin - time.monotonic()))
        while time.monotonic() < start + burst.end:
            for _ in range(10):
                matrix @ matrix
            torch.cuda.synchronize(device)


def play(core: int, seed: int, share: float, cores: list[int], scratch: Path) -> None:
    """Run one processor's bursts for ever."""
    os.sched_setaffinity(0, cores)
    start = time.monotonic()
    for burst in bursts(seed, share, cores):
        if core in burst.cores:
            time.sleep(max(0.0, start + burst.begin - time.monotonic()))
            work(burst.kind, start + burst.end, scratch)


@contextmanager
def company(share: float, seed: int = 0, device: str = "") -> Iterator[None]:
    """Run a person's programs during the block, with `device` also one on a GPU; a share of 0 runs none."""
    cores = sorted(os.sched_getaffinity(0)) if share else []
    with tempfile.TemporaryDirectory() as scratch:
        players = [
            multiprocessing.Process(target=play, args=(core, seed, share, cores, Path(scratch)), daemon=True)
            for core in cores
        ]
        if share and device:
            players.append(multiprocessing.Process(target=play_on_gpu, args=(device, seed, share), daemon=True))
        for player in players:
            player.start()
        try:
            yield
        finally:
            for player in players:
                player.terminate()
                player.join()


@dataclass(frozen=True)
class Verdict:
    """A demo's outcome: the winner at batch 1, its equals, its speed-up, and the duration in seconds."""

    winner: str
    equals: frozenset[str]
    speedup: tuple[float, float, float]
    word: str
    rounds: int
    seconds: float

    @property
    def is_narrow(self) -> bool:
        value, low, high = self.speedup
        return max(value / low, high / value) <= NARROW


def read(folder: Path, seconds: float) -> Verdict:
    """Return the outcome of the demo in the folder."""
    run = trial_table.read_trials(folder)
    rows = next(iter(ranking.rank_goals(run))).rank_by(LATENCY)
    ordered = rows.to_dict("records")
    names = [f"{row['backend']} {row['precision']} b{row['batch']}" for row in ordered]
    best = ordered[0]
    return Verdict(
        names[0],
        frozenset(name for name, row in zip(names, ordered, strict=True) if row["speedup_high"] >= best["speedup_low"]),
        (best["speedup"], best["speedup_low"], best["speedup_high"]), best["verdict"],
        len(run.trials[best["trial"]].good), seconds,
    )  # fmt: skip


def demo(share: float, seed: int, keep: Path | None = None, *flags: str) -> Verdict | str:
    """Run the demo beside the programs; return its last line if it failed. `keep` is a folder for its records."""
    with tempfile.TemporaryDirectory() as scratch, company(share, seed):
        begin = time.monotonic()
        command = [sys.executable, "-m", "dyno", "demo", "--out", "demo", *flags]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        seconds = time.monotonic() - begin
        if keep:
            shutil.copytree(Path(scratch, "demo"), keep / str(seed), ignore=shutil.ignore_patterns("*.png"))
        if done.returncode not in (0, 1):
            return done.stderr.strip().rpartition("\n")[2]
        return read(Path(scratch, "demo"), seconds)


def keep_to(groups: multiprocessing.Queue[list[int]]) -> None:
    """Pin this process and its children to a group of processors that no other process has."""
    os.sched_setaffinity(0, groups.get())


def row(number: int, one: Verdict | str) -> list[str]:
    """Return a row of the table."""
    if isinstance(one, str):
        return [str(number), "failed", one, "", "", ""]
    value, low, high = one.speedup
    ends = f"{value:.3g} [{low:.3g}, {high:.3g}]"
    return [str(number), one.winner, ends, one.word, str(one.rounds), f"{one.seconds / 60:.1f}"]


def measure(asked: argparse.Namespace) -> list[Verdict | str]:
    """Run the demos, one at a time on each group of processors; return their outcomes."""
    print(demo(0.0, 0, None, "--quick"), file=sys.stderr, flush=True)  # trains; later demos find the files in the cache
    processors = sorted(os.sched_getaffinity(0))
    width = asked.cores or len(processors)
    groups = [processors[k : k + width] for k in range(0, len(processors) - width + 1, width)]
    queue: multiprocessing.Queue[list[int]] = multiprocessing.Queue()
    for group in groups:
        queue.put(group)
    ended: list[Verdict | str] = []
    with ProcessPoolExecutor(len(groups), initializer=keep_to, initargs=(queue,)) as pool:
        seeds = range(asked.seed, asked.seed + asked.demos)
        for one in pool.map(demo, itertools.repeat(asked.share), seeds, itertools.repeat(asked.keep)):
            ended.append(one)
            print(" ".join(row(len(ended), one)), file=sys.stderr, flush=True)
    return ended


def main() -> None:
    """Run the command or the demos beside the programs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--share", type=float, default=SHARE, help="of the time in which a program runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", type=int, default=0, help="of each demo (default: all, one demo after the other)")
    parser.add_argument("--device", default="", help="a GPU on which a program runs beside the command")
    parser.add_argument("--demos", type=int, default=0, help="number of demos, each beside other bursts")
    parser.add_argument("--keep", type=Path, help="folder for the demos' records")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND…")
    asked = parser.parse_args()
    if not asked.demos:
        command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
        if not command:
            parser.error("give --demos, or a command behind --")
        with company(asked.share, asked.seed, asked.device):
            sys.exit(subprocess.run([shutil.which(command[0]) or command[0], *command[1:]]).returncode)
    ended = measure(asked)
    headings = ["demo", "fastest at batch 1", "speed-up", "verdict", "rounds", "minutes"]
    rows = [row(n + 1, one) for n, one in enumerate(ended)]
    print(markdown_table(headings, rows, [True, False, True, False, True, True]))
    verdicts = [one for one in ended if isinstance(one, Verdict)]
    best = verdicts[0].equals if verdicts else frozenset()
    right, narrow = sum(one.winner in best for one in verdicts), sum(one.is_narrow for one in verdicts)
    print(f"\nthe winner is among the best of the first demo in {right} of {len(ended)}")
    print(f"its interval is within 15 % in {narrow} of {len(ended)}")
    soon = sum(one.word == FASTER and one.seconds <= SOON_S for one in verdicts)
    print(f"decided within 5 minutes, starting and the report included, in {soon} of {len(ended)}")


if __name__ == "__main__":
    main()
