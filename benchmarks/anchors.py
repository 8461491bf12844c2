"""Dyno's latency/model against independent clocks on the same file; the ratio should lie within 1 %.

    python benchmarks/anchors.py [--rounds 12] [--model resnet18|digits] [--out FILE.csv]

The anchor of an ONNX file is a plain loop that imports only onnxruntime and numpy; of an IR, OpenVINO's benchmark_app;
of a module, torch.utils.benchmark.Timer. In each round Dyno and its anchor run in two fresh processes, with the same
threads on the same cores. They alternate in blocks of BLOCK_S, the idle process being stopped: fresh processes that
run one after the other differ by half on a virtual machine. The interval is Student's t over the rounds' log ratios.
ResNet-18 at 224 and a digits network at 64 run at batch 1, in FP32.

benchmark_app reads OpenVINO's clock inside infer(), which excludes the call from Python and the release of results.
Dyno counts the call, because a Python program pays for it. So Dyno's process also reads OpenVINO's clock in a loop of
infer() on the timed session: `inside` compares that with benchmark_app, and the difference between the two ratios is
the call. ONNX Runtime's wheel has neither onnxruntime_perf_test nor the headers for a loop in C++.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dyno.worker import measure, system
from dyno.worker.makers.export import export_recipe
from dyno.worker.registry import find, get_maker
from dyno.worker.spec import Artifact, Dims, ModelSpec, Plan, Recipe, Runtime, Trial, from_json, to_json

MODELS = {
    "resnet18": (ModelSpec("resnet18", "torchvision:resnet18"), 224),
    "digits": (ModelSpec("digits", "dyno.worker.nets.digits:resnet18", channels=1), 64),
}
ENGINES = {"openvino": "benchmark_app", "onnxruntime": "plain loop", "pytorch": "Timer"}
WARM_UP_S, BLOCK_S, BLOCKS, WANTED = 1.0, 0.3, 12, 0.01
APP_S = 2 * WARM_UP_S + BLOCKS * BLOCK_S  # seconds of benchmark_app, extended by its stops between blocks
PLAIN_LOOP = """
import sys, time, statistics, numpy, onnxruntime
path, threads, warm_up, block = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = threads
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
shape = [int(n) for n in sys.argv[5].split(",")]
feed = {session.get_inputs()[0].name: numpy.random.default_rng(0).standard_normal(shape, dtype=numpy.float32)}
def loop(seconds):
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter(); session.run(None, feed); times.append(time.perf_counter() - start)
    return statistics.median(times)
loop(warm_up)
print("ready", flush=True)
for _ in sys.stdin:
    print(loop(block), flush=True)
"""


def make_trial(name: str, engine: str) -> Trial:
    """Return the trial of a model in an engine, in FP32 at batch 1 with one thread per core."""
    model, size = MODELS[name]
    return Trial(model, engine, "fp32", Dims(1, size, size), runtime=Runtime(threads=system.physical_cores()))


def make_files(name: str, folder: Path) -> dict[str, Artifact | None]:
    """Write the model's ONNX file and its IR; return each engine's file."""
    model, size = MODELS[name]
    onnx = get_maker("onnx_export").make(export_recipe(model, Dims(0, size, size), Runtime()), None, folder)
    (folder / "ir").mkdir()
    recipe = Recipe("openvino", "openvino", "fp32", model, Dims(0, size, size))
    ir = get_maker("openvino").make(recipe, onnx, folder / "ir")
    return {"onnxruntime": onnx, "openvino": ir, "pytorch": None}


def answer_with_dyno(name: str, engine: str, file: Artifact | None) -> None:
    """Time a block in Dyno's loop per line of standard input; in OpenVINO also a block by its own clock."""
    system.pin(system.physical_cores())
    trial = make_trial(name, engine)
    session = find(engine).load(trial, file)
    shape = (1, trial.model.channels, trial.dims.height, trial.dims.width)
    feed = {session.inputs[0].name: np.random.default_rng(0).standard_normal(shape, dtype=np.float32)}
    step = measure.make_step(session, "model", [session.stage(feed)])
    measure.warm_up(step, Plan(warmup_s=WARM_UP_S))
    print("ready", flush=True)
    for _ in sys.stdin:
        found = [float(np.median(measure.measure_latency(step, Plan(seconds=BLOCK_S, min_samples=10**7)).samples))]
        if engine == "openvino":
            request, inside = session._requests[0], []  # type: ignore[attr-defined]
            end = time.perf_counter() + BLOCK_S
            while time.perf_counter() < end:
                request.infer()
                inside.append(request.latency / 1e3)
            found.append(statistics.median(inside))
        print(*found, flush=True)


def answer_with_timer(name: str) -> None:
    """Time a block with PyTorch's Timer per line of standard input, on the module that Dyno loads."""
    import torch
    from torch.utils.benchmark import Timer

    from dyno.worker.nets import models

    system.pin(system.physical_cores())
    trial = make_trial(name, "pytorch")
    module = models.load(trial.model, trial.dims).eval()
    x = torch.randn(1, trial.model.channels, trial.dims.height, trial.dims.width)
    timer = Timer("module(x)", globals={"module": module, "x": x}, num_threads=trial.runtime.threads)
    with torch.inference_mode():
        timer.blocked_autorange(min_run_time=WARM_UP_S)
        print("ready", flush=True)
        for _ in sys.stdin:
            print(float(timer.blocked_autorange(min_run_time=BLOCK_S).median), flush=True)


class Clock:
    """A process that times one block per request and otherwise waits."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def time_block(self) -> list[float]:
        """Return the medians of one block, in seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("block\n")
        self._process.stdin.flush()
        return [float(word) for word in self._read().split()]

    def end(self) -> None:
        """Close standard input and wait for the process to end."""
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"a clock ended with exit code {self._process.wait()}")
        return line


class BenchmarkApp:
    """OpenVINO's benchmark_app, running while Dyno waits and stopped while Dyno runs.

    One latency per block contains a stop, which the median over all latencies hides.
    """

    def __init__(self, name: str, file: Artifact) -> None:
        shape, trial = MODELS[name][1], make_trial(name, "openvino")
        app = Path(sys.executable).with_name("benchmark_app")
        options = "-d CPU -api sync -hint none -nireq 1 -nstreams 1 -infer_precision f32".split()
        dims = f"[1,{trial.model.channels},{shape},{shape}]"
        seconds = str(round(APP_S + BLOCKS * 2 * BLOCK_S))  # the stops count, too
        self._process = subprocess.Popen(
            [app, "-m", file.path, "-shape", dims, "-nthreads", str(trial.runtime.threads), "-t", seconds, *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "[Step 10/11]" in line:
                break
        time.sleep(WARM_UP_S)
        self._process.send_signal(signal.SIGSTOP)

    def time_block(self) -> list[float]:
        """Let the process run for one block; return nothing, as it prints its median only at its end."""
        self._process.send_signal(signal.SIGCONT)
        time.sleep(BLOCK_S)
        self._process.send_signal(signal.SIGSTOP)
        return []

    def end(self) -> float:
        """Return the printed median, in seconds."""
        self._process.send_signal(signal.SIGCONT)
        text, _ = self._process.communicate()
        value, unit = re.findall(r"Median:\s+([\d.]+) (ms|us)", text)[-1]
        return float(value) / {"ms": 1e3, "us": 1e6}[unit]


def measure_round(name: str, engine: str, file: Artifact | None) -> dict[str, float]:
    """Time one round in turns; return each side's median over blocks (s) and the log of their ratio."""
    trial = make_trial(name, engine)
    job = [sys.executable, __file__, "--job", json.dumps(["dyno", name, engine, to_json(file) if file else None])]
    dyno = Clock(job)
    if engine == "openvino":
        assert file is not None
        app = BenchmarkApp(name, file)
        blocks = np.array([(dyno.time_block(), app.time_block())[0] for _ in range(BLOCKS)])
        dyno.end()
        found = {
            "anchor": app.end(),
            "median": float(np.median(blocks[:, 0])),
            "inside": float(np.median(blocks[:, 1])),
        }
        return found | {f"log_{clock}": math.log(found[clock] / found["anchor"]) for clock in ("median", "inside")}
    if file is None:
        anchor = Clock([*job[:3], json.dumps(["anchor", name, engine, None])])
    else:
        shape = f"1,{trial.model.channels},{trial.dims.height},{trial.dims.width}"
        sizes = [str(trial.runtime.threads), str(WARM_UP_S), str(BLOCK_S), shape]
        anchor = Clock([sys.executable, "-c", PLAIN_LOOP, file.path, *sizes])
    sides = [dyno, anchor]
    pairs = []
    for number in range(BLOCKS):
        order = sides if number % 2 else sides[::-1]
        times = {side: side.time_block()[0] for side in order}
        pairs.append([times[dyno], times[anchor]])
    for side in sides:
        side.end()
    both = np.array(pairs)
    ratio = float(np.median(np.log(both[:, 0] / both[:, 1])))
    return {"median": float(np.median(both[:, 0])), "anchor": float(np.median(both[:, 1])), "log_median": ratio}


def interval(logs: list[float]) -> tuple[str, str]:
    """Return the mean ratio with its 95 % interval, and "within 1 %", "off" or "undecided"."""
    mean, half = statistics.mean(logs), float("inf")
    if len(logs) > 1:
        half = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / len(logs) ** 0.5
    low, high = np.exp(mean - half), np.exp(mean + half)
    is_within = low >= 1 - WANTED and high <= 1 + WANTED
    outcome = "within 1 %" if is_within else "off" if low > 1 + WANTED or high < 1 - WANTED else "undecided"
    return f"{np.exp(mean):.4f} [{low:.4f}, {high:.4f}]", outcome


def main() -> int:
    """Print a row for each model and engine; return 1 unless every ratio is shown to be within the limit."""
    parser = argparse.ArgumentParser(description="Dyno's latency against independent clocks.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--out", type=Path, help="a CSV file of every median")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        side, name, engine, stored = json.loads(options.job)
        file = from_json(Artifact, stored) if stored else None
        answer_with_dyno(name, engine, file) if side == "dyno" else answer_with_timer(name)
        return 0
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for name in options.model or MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            files = make_files(name, Path(scratch))
            for _ in range(options.rounds):
                for engine, file in files.items():
                    found[name, engine].append(measure_round(name, engine, file))
    return report(found, options.out)


def report(found: dict[tuple[str, str], list[dict[str, float]]], out: Path | None) -> int:
    """Print the table and write the medians; return 1 unless every ratio is shown to be within the limit."""
    bad = 0
    for (name, engine), rows in found.items():
        anchor = statistics.median(row["anchor"] for row in rows)
        for clock in ("median", "inside"):
            if clock not in rows[0]:
                continue
            text, outcome = interval([row[f"log_{clock}"] for row in rows])
            bad += outcome != "within 1 %" and (clock == "inside" or "inside" not in rows[0])
            ours = statistics.median(row[clock] for row in rows)
            label = f"{ENGINES[engine]}{', inside infer()' if clock == 'inside' else ''}"
            print(f"{name:9} {engine:12} {label:30} {1e3 * ours:8.4f} / {1e3 * anchor:8.4f} ms   {text}   {outcome}")
    if out:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["model", "engine", "round", "dyno_s", "inside_s", "anchor_s", "log_ratio"])
            for (name, engine), rows in found.items():
                writer.writerows(
                    [name, engine, turn, row["median"], row.get("inside", ""), row["anchor"], row["log_median"]]
                    for turn, row in enumerate(rows)
                )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
