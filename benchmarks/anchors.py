"""Dyno's latency/model against clocks that share no code with it, on the same file: a ratio within 1 % is wanted.

    python benchmarks/anchors.py [--rounds 5] [--model resnet18|digits] [--out FILE.csv]

OpenVINO's own benchmark_app times an IR, a plain loop that imports only onnxruntime and numpy an ONNX file, and
torch.utils.benchmark.Timer a module. Every measurement is a fresh process, all with the same threads on the same
cores; Dyno and its anchor take turns, each first in half of the rounds. The interval is of Student's t over the rounds'
log ratios. ResNet-18 at 224 and a digits network at 64 run at batch 1, in FP32.

benchmark_app takes OpenVINO's clock inside infer(), which leaves out the call from Python and releasing its results.
Dyno counts the call, as whoever calls from Python pays it. So Dyno's process also reads OpenVINO's clock in a loop of
infer() on the session that it timed: `inside` compares that with benchmark_app, and the difference between the two
ratios is the call. ONNX Runtime's wheel has neither onnxruntime_perf_test nor the headers for a loop in C++.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
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
from dyno.worker.makers.export import exported
from dyno.worker.registry import find, maker
from dyno.worker.spec import Artifact, Dims, ModelSpec, Plan, Recipe, Runtime, Trial, from_json, to_json

MODELS = {
    "resnet18": (ModelSpec("resnet18", "torchvision:resnet18"), 224),
    "digits": (ModelSpec("digits", "dyno.worker.nets.digits:resnet18", channels=1), 64),
}
ENGINES = {"openvino": "benchmark_app", "onnxruntime": "plain loop", "pytorch": "Timer"}
WARM_UP_S, SECONDS, WANTED = 1.0, 2, 0.01
PLAIN_LOOP = """
import sys, time, statistics, numpy, onnxruntime
path, threads, warm_up, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = threads
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
shape = [int(n) for n in sys.argv[5].split(",")]
feed = {session.get_inputs()[0].name: numpy.random.default_rng(0).standard_normal(shape, dtype=numpy.float32)}
def loop(seconds):
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter(); session.run(None, feed); times.append(time.perf_counter() - start)
    return times
loop(warm_up)
print(statistics.median(loop(seconds)))
"""


def make_trial(name: str, engine: str) -> Trial:
    """Return the trial of a model in an engine, in FP32 at batch 1 with a thread for each core."""
    model, size = MODELS[name]
    return Trial(model, engine, "fp32", Dims(1, size, size), runtime=Runtime(threads=system.physical_cores()))


def make_files(name: str, folder: Path) -> dict[str, Artifact | None]:
    """Write the model's ONNX file and its IR; return the file of each engine."""
    model, size = MODELS[name]
    onnx = maker("onnx_export").make(exported(model, Dims(0, size, size), Runtime()), None, folder)
    (folder / "ir").mkdir()
    recipe = Recipe("openvino", "openvino", "fp32", model, Dims(0, size, size))
    ir = maker("openvino").make(recipe, onnx, folder / "ir")
    return {"onnxruntime": onnx, "openvino": ir, "pytorch": None}


def time_with_dyno(name: str, engine: str, file: Artifact | None) -> dict[str, float]:
    """Return the median of Dyno's loop in seconds, and for OpenVINO the one of its clock inside infer()."""
    system.pin(system.physical_cores())
    trial = make_trial(name, engine)
    session = find(engine).load(trial, file)
    shape = (1, trial.model.channels, trial.dims.height, trial.dims.width)
    feed = {session.inputs[0].name: np.random.default_rng(0).standard_normal(shape, dtype=np.float32)}
    step = measure.step(session, "model", [session.stage(feed)])
    measure.warm_up(step, Plan(warmup_s=WARM_UP_S))
    samples = measure.latency(step, Plan(seconds=SECONDS, min_samples=10**7)).samples
    found = {"median": float(np.median(samples))}
    if engine == "openvino":
        request, inside = session._requests[0], []  # type: ignore[attr-defined]
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            request.infer()
            inside.append(request.latency / 1e3)
        found["inside"] = statistics.median(inside)
    return found


def time_with_timer(name: str) -> dict[str, float]:
    """Return the median of PyTorch's own timer, in seconds, on the module that Dyno loads."""
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
        return {"median": float(timer.blocked_autorange(min_run_time=SECONDS).median)}


def time_with_benchmark_app(name: str, file: Artifact) -> float:
    """Return the median that benchmark_app prints, in seconds."""
    trial = make_trial(name, "openvino")
    shape = f"[1,{trial.model.channels},{trial.dims.height},{trial.dims.width}]"
    app = Path(sys.executable).with_name("benchmark_app")
    options = f"-d CPU -api sync -hint none -nireq 1 -nstreams 1 -infer_precision f32 -t {SECONDS}".split()
    threads = str(trial.runtime.threads)
    done = run([str(app), "-m", file.path, "-shape", shape, "-nthreads", threads, *options])
    value, unit = re.findall(r"Median:\s+([\d.]+) (ms|us)", done)[-1]
    return float(value) / {"ms": 1e3, "us": 1e6}[unit]


def run(command: list[str]) -> str:
    """Return what a command prints; an error where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {(done.stderr or done.stdout)[-800:]}")
    return done.stdout


def run_itself(side: str, name: str, engine: str, file: Artifact | None) -> dict[str, float]:
    """Time one side in a fresh process of this script."""
    job = json.dumps([side, name, engine, to_json(file) if file else None])
    found: dict[str, float] = json.loads(run([sys.executable, __file__, "--job", job]).splitlines()[-1])
    return found


def time_anchor(name: str, engine: str, file: Artifact | None) -> float:
    """Return the anchor's median in seconds, from a fresh process."""
    trial = make_trial(name, engine)
    if engine == "pytorch" or file is None:
        return run_itself("anchor", name, engine, file)["median"]
    if engine == "openvino":
        return time_with_benchmark_app(name, file)
    shape = f"1,{trial.model.channels},{trial.dims.height},{trial.dims.width}"
    sizes = [str(trial.runtime.threads), str(WARM_UP_S), str(SECONDS), shape]
    return float(run([sys.executable, "-c", PLAIN_LOOP, file.path, *sizes]))


def interval(logs: list[float]) -> tuple[str, str]:
    """Return the mean ratio with its 95 % interval, and whether that lies within the limit, outside it or across."""
    mean, half = statistics.mean(logs), float("inf")
    if len(logs) > 1:
        half = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / len(logs) ** 0.5
    low, high = np.exp(mean - half), np.exp(mean + half)
    is_within = low >= 1 - WANTED and high <= 1 + WANTED
    outcome = "within 1 %" if is_within else "off" if low > 1 + WANTED or high < 1 - WANTED else "undecided"
    return f"{np.exp(mean):.4f} [{low:.4f}, {high:.4f}]", outcome


def main() -> int:
    """Print a row for each model and engine; 1 where a ratio isn't shown to be within the limit."""
    parser = argparse.ArgumentParser(description="Dyno's latency against independent clocks.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--out", type=Path, help="a CSV file of every median")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        side, name, engine, stored = json.loads(options.job)
        file = from_json(Artifact, stored) if stored else None
        print(json.dumps(time_with_dyno(name, engine, file) if side == "dyno" else time_with_timer(name)))
        return 0
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for name in options.model or MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            files = make_files(name, Path(scratch))
            for turn in range(options.rounds):
                for engine, file in files.items():
                    row = {} if turn % 2 else run_itself("dyno", name, engine, file)
                    anchor = time_anchor(name, engine, file)
                    found[name, engine].append({**(row or run_itself("dyno", name, engine, file)), "anchor": anchor})
    return report(found, options.out)


def report(found: dict[tuple[str, str], list[dict[str, float]]], out: Path | None) -> int:
    """Print the table and write the medians; 1 where a ratio isn't shown to be within the limit."""
    bad = 0
    for (name, engine), rows in found.items():
        anchor = statistics.median(row["anchor"] for row in rows)
        for clock in ("median", "inside"):
            if clock not in rows[0]:
                continue
            logs = [float(np.log(row[clock] / row["anchor"])) for row in rows]
            text, outcome = interval(logs)
            bad += outcome != "within 1 %" and (clock == "inside" or "inside" not in rows[0])
            ours = statistics.median(row[clock] for row in rows)
            label = f"{ENGINES[engine]}{', inside infer()' if clock == 'inside' else ''}"
            print(f"{name:9} {engine:12} {label:30} {1e3 * ours:8.4f} / {1e3 * anchor:8.4f} ms   {text}   {outcome}")
    if out:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["model", "engine", "round", "dyno_s", "inside_s", "anchor_s"])
            for (name, engine), rows in found.items():
                writer.writerows(
                    [name, engine, turn, row["median"], row.get("inside", ""), row["anchor"]]
                    for turn, row in enumerate(rows)
                )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
