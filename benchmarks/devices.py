"""A study over several devices against the same study on the first of them: seconds, and whether medians stay the same.

    python benchmarks/devices.py --device-list cuda:0,cuda:1 --out runs/devices [--threads 16]
    python benchmarks/devices.py … --only many; python benchmarks/devices.py … --only one     # in two calls
    python benchmarks/devices.py --models torchvision:squeezenet1_1 --size 64 --batch 1,2 --backend pytorch

Eight small classifiers at two batches in three configurations are 48 trials. Each half is a `dyno run`, first on all
devices, then on the first alone, with a separate cache: both make all files. What is timed is the whole command,
report included; other routes to an ONNX file, which only a study on one device tries, are left out. A half whose
seconds are stored in OUT isn't run again; one that was broken off begins anew.

Both halves give each job as many threads: one for each physical core of a device's share of them, unless `--threads`
says otherwise. Shares of the processor are `cpu:0,cpu:1`; the second half then runs on the cores of `cpu:0`, as if the
machine had no others. A GPU alone has all cores of the host to make files with.

Where a device is slower beside the others than alone by more than `--equivalent`, blocks are measured one at a
time, and the ratio says so.

Prints the seconds of both, their ratio against 1 / (0.9 N), and how far a round's median latency on one device is from
a round's of the same trial in the study on all: |log ratio| of all such pairs of rounds, its median and 95th percentile
over the trials' pairs in percent; and beside it the same between two rounds of the study on one device, its noise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations, product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dyno.devices.places import Place, parse_places, split_devices
from dyno.formatting import markdown_table
from dyno.results.notes import read_devices
from dyno.results.trial_result import load_run
from dyno.study.study import Study
from dyno.worker import system
from dyno.worker.record import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
MODELS = (
    "torchvision:resnet18,torchvision:mobilenet_v3_small,torchvision:squeezenet1_1,torchvision:shufflenet_v2_x0_5,"
    "torchvision:mnasnet0_5,torchvision:regnet_y_400mf,timm:resnet10t,timm:mobilenetv3_small_050"
)
MANY, ONE = "many", "one"
SHARE = 0.9  # required share of N times the speed of one device
GOOD = 0, 3  # exit codes of a study that was measured; 3: some trials failed


def half(asked: argparse.Namespace, which: str, found: list[Place]) -> float:
    """Return the study's seconds on all devices or on the first; measure them unless they are stored."""
    stored = asked.out / f"{which}.json"
    if stored.is_file():
        return float(read_json(stored)["seconds"])
    folder, cache = asked.out / which, asked.out / f"cache-{which}"
    for part in (folder, cache):  # a partial study doesn't tell the duration of the whole
        shutil.rmtree(part, ignore_errors=True)
    alone = found[0]
    cpu = alone.device == "cpu"
    device = asked.device_list if which == MANY else "cpu" if cpu else alone.name
    words = [
        "--batch",
        asked.batch,
        "--backend",
        asked.backends,
        "--precision",
        asked.precision,
        "--device",
        device,
        "--routes",
        "usual",
    ]
    words += ["--rounds", asked.rounds, "--seconds", asked.seconds, "--threads", asked.threads]
    words += ["--equivalent", asked.equivalent, "--out", folder]
    words += ["--size", asked.size] if asked.size else []
    command = [sys.executable, "-m", "dyno", "run", *asked.models.split(","), *map(str, words)]
    confine: Callable[[], None] | None = None
    if which == ONE and cpu:
        confine = partial(os.sched_setaffinity, 0, alone.cores)
    since = time.monotonic()
    code = subprocess.run(
        command, env={**os.environ, "DYNO_CACHE": str(cache), "PYTHONPATH": str(ROOT / "src")}, preexec_fn=confine
    ).returncode
    seconds = time.monotonic() - since
    if code not in GOOD:
        sys.exit(f"devices.py: the study on {device} ended with exit code {code}")
    write_json(stored, {"seconds": seconds, "device": device, "threads": asked.threads})
    return seconds


def rounds(folder: Path) -> dict[str, list[float]]:
    """Return the median latencies (s) of each successful trial's rounds, by trial id."""
    return {t.id: t.medians("model") for t in load_run(folder) if t.status == "ok" and t.medians("model")}


def apart(pairs: Iterable[tuple[float, float]]) -> tuple[int, str, str]:
    """Return the number of pairs, and the median and 95th percentile of their |log ratio|, in percent."""
    logs = np.abs([np.log(a / b) for a, b in pairs])
    if not logs.size:
        return 0, "", ""
    median, high = 100 * np.percentile(logs, (50, 95))
    return len(logs), f"{median:.2f}", f"{high:.2f}"


def report(asked: argparse.Namespace, seconds: dict[str, float]) -> None:
    """Print the comparison of both halves."""
    count = len(split_devices(asked.device_list))
    ratio, limit = seconds[MANY] / seconds[ONE], 1 / (SHARE * count)
    print(f"{count} devices: {seconds[MANY]:.1f} s; the first alone: {seconds[ONE]:.1f} s")
    print(f"ratio {ratio:.3f}, at most {limit:.3f} is asked for: {'reached' if ratio <= limit else 'missed'}\n")
    company = read_devices(asked.out / MANY)
    if company and not company.side_by_side:
        print(f"{company.slower}: blocks were measured one at a time, which {ratio:.3f} is the ratio of\n")
    many, one = (rounds(asked.out / which) for which in (MANY, ONE))
    both = sorted(many.keys() & one.keys())
    print(f"{len(both)} trials were measured in both studies ({len(many)} and {len(one)})\n")
    across = apart(pair for t in both for pair in product(many[t], one[t]))
    within = apart(pair for t in both for pair in combinations(one[t], 2))
    rows = [
        (what, *map(str, figures))
        for what, figures in (("all devices against one", across), ("two rounds on one device", within))
    ]
    head = ("rounds of one trial", "pairs", "median %", "95th percentile %")
    print(markdown_table(head, rows, (False, True, True, True)))


def main() -> None:
    """Measure both halves or the requested one; report when both are stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-list", default="cpu:0,cpu:1")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--size", default="")
    parser.add_argument(
        "--backend", dest="backends", help="default: pytorch, and on processors onnxruntime and openvino, too"
    )
    parser.add_argument("--precision", help="default: fp32, and on GPUs fp16 and bf16, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--threads", type=int, help="default: as many as a device's share of the physical cores has")
    parser.add_argument("--equivalent", type=float, default=Study.equivalent, help="percent of `dyno run --equivalent`")
    parser.add_argument("--only", choices=(MANY, ONE))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    found = parse_places(asked.device_list)
    if len(found) < 2:
        parser.error("--device-list needs two devices or more")
    cpu = found[0].device == "cpu"
    asked.backends = asked.backends or ("pytorch,onnxruntime,openvino" if cpu else "pytorch")
    asked.precision = asked.precision or ("fp32" if cpu else "fp32,fp16,bf16")
    asked.threads = asked.threads or max(1, system.physical_cores() // len(found))
    asked.out = asked.out.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    for which in (MANY, ONE):
        if asked.only in (None, which):
            print(f"{which}: {half(asked, which, found):.1f} s", flush=True)
    stored = {which: asked.out / f"{which}.json" for which in (MANY, ONE)}
    if all(path.is_file() for path in stored.values()):
        report(asked, {which: float(read_json(path)["seconds"]) for which, path in stored.items()})


if __name__ == "__main__":
    main()
