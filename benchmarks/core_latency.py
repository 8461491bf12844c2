"""The cost for an engine's threads when their processors no longer share a cache.

    python benchmarks/core_latency.py [--minutes 4] [--threads 2]

Twice a second: a signal from one processor to another and back, then 0.1 s each of a small network in eager PyTorch
and in ONNX Runtime. On a virtual machine whose host moves its processors, the signals form two groups; prints both
groups and their ratio. A single group means that the processors stayed in place.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dyno.formatting import markdown_table
from dyno.results.blocks import CACHE_DISTANCE_RATIO
from dyno.runner.core_latency import CoreLatency
from dyno.worker.system import list_cores


def median_latency(run: Callable[[], Any], seconds: float = 0.1) -> float:
    """Call `run` repeatedly; return its median duration in seconds."""
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return float(np.median(found))


def main() -> None:
    """Measure, and print both groups."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    layers = [part for _ in range(8) for part in (torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.ReLU())]
    net, image = torch.nn.Sequential(*layers).eval(), torch.randn(1, 32, 32, 32)
    torch.set_num_threads(asked.threads)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = asked.threads
    with tempfile.TemporaryDirectory() as folder:
        torch.onnx.export(net, (image,), f"{folder}/net.onnx", input_names=["x"], verbose=False)
        session = onnxruntime.InferenceSession(f"{folder}/net.onnx", options)
    latency, rows, end = CoreLatency(list_cores()[: asked.threads]), [], time.monotonic() + 60 * asked.minutes
    with torch.inference_mode():
        while time.monotonic() < end:
            signal = latency.measure()
            eager = median_latency(lambda: net(image))
            rows.append((signal, eager * 1e3, median_latency(lambda: session.run(None, {"x": image.numpy()})) * 1e3))
            time.sleep(0.3)
    latency.close()
    known = np.array([row for row in rows if row[0]])
    apart = known[:, 0] > CACHE_DISTANCE_RATIO * known[:, 0].min()
    groups = {"near": known[~apart], "apart": known[apart]}
    lines = [[name, len(each), *(f"{value:.3g}" for value in np.median(each, axis=0))]
             for name, each in groups.items() if len(each)]  # fmt: skip
    headings = ["processors", "times", "signal and back, ns", "PyTorch, ms", "ONNX Runtime, ms"]
    print(markdown_table(headings, [[*map(str, line)] for line in lines], [False, *[True] * 4]))
    if len(lines) == 2:
        ratio = np.median(groups["apart"], axis=0) / np.median(groups["near"], axis=0)
        print("\napart over near: " + ", ".join(f"{value:.2f}" for value in ratio))


if __name__ == "__main__":
    main()
