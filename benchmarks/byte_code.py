"""Time that stored byte-code saves a job whose libraries have none: whole jobs with a writable and an unusable cache,
in alternation.

Prints the ratio of the medians: the job with stored byte-code over the job that compiles its libraries.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from dyno.jobs.launcher import launch
from dyno.worker.spec import Dims, Job, ModelSpec, Plan, Runtime, Trial

ROUNDS = 5


def job(folder: Path, cache: Path) -> float:
    """Return the wall time of a whole ResNet-18 job in PyTorch with this cache; the job times nothing."""
    os.environ["DYNO_CACHE"] = str(cache)
    model = ModelSpec("resnet18", "torchvision:resnet18")
    trial = Trial(model, "pytorch", "fp32", Dims(1, 32, 32), runtime=Runtime(threads=1), plan=Plan(boundaries=()))
    start = time.perf_counter()
    record = launch(Job("run", trial.runtime, trial, 1), folder, 120)
    assert record.status == "ok", record.reason
    return time.perf_counter() - start


def main() -> int:
    """Print the figures; return 1 if stored byte-code saves nothing."""
    stored, compiled = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": f"{scratch}/none"}
        no_cache = Path(scratch) / "file"
        no_cache.touch()
        for i in range(-1, ROUNDS):  # the first iteration only stores byte-code
            stored.append(job(Path(scratch) / f"stored{i}", Path(scratch) / "cache"))
            compiled.append(job(Path(scratch) / f"compiled{i}", no_cache))
    ratio = statistics.median(stored[1:]) / statistics.median(compiled[1:])
    print(f"stored byte-code {statistics.median(stored[1:]):.2f} s, the first time {stored[0]:.2f} s")
    print(f"compiled anew    {statistics.median(compiled[1:]):.2f} s")
    print(f"ratio            {ratio:.2f}")
    return int(ratio >= 1)


if __name__ == "__main__":
    sys.exit(main())
