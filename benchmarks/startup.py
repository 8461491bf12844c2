"""Dyno's own cost: `dyno --help`, `dyno show` on 1,000 stored trials, `dyno report` on 100 of four sizes, and a job
beyond importing its library.

Each alternates with the least that the same work could cost: an empty Python for the commands; for the job, a Python
that imports the same library and runs the same number of inferences. All find their bytecode, as installed programs
do.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dyno.jobs.launcher import launch
from dyno.worker.record import Measurement, Record, write_json, write_record
from dyno.worker.spec import Artifact, Dims, Job, ModelSpec, Plan, Runtime, Tensor, Trial, to_json

ROUNDS = 7
LIMITS = {"dyno --help": 0.3, "dyno show, 1,000 trials": 2.0, "dyno report, 100 trials": 10.0}
JOB_LIMIT = 0.3  # seconds beyond the import of the library
DYNO = (sys.executable, "-m", "dyno")
INNER = """import onnxruntime, numpy
session = onnxruntime.InferenceSession({path!r})
session.run(None, {{'x': numpy.zeros((1, 4), 'float32')}})
"""


def seconds(command: Sequence[str]) -> float:
    """Return the wall time of a command that must succeed."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def stored(folder: Path, sizes: Sequence[int], trials: int) -> Path:
    """Write a run folder with `trials` trials per image size, each of one round, with samples as in a study."""
    rng = np.random.default_rng(0)
    model = ModelSpec("network", "torchvision:resnet18")
    for size, i in itertools.product(sizes, range(trials)):
        trial = Trial(model, ("pytorch", "onnxruntime")[i % 2], "fp32", Dims(1 + i // 2, size, size))
        place = folder / "trials" / trial.id / "r0"
        place.mkdir(parents=True)
        write_json(place / "job.json", to_json(Job("run", trial=trial)))
        kinds = (("latency", "model", "s"), ("latency", "all", "s"), ("throughput", "throughput", "1/s"))
        samples = {f"{tag}_{at}" if tag != at else tag: rng.gamma(50, 1e-4, 300) for tag, at, _ in kinds}
        np.savez(place / "samples.npz", **samples)  # type: ignore[arg-type]
        found = [
            Measurement(tag, unit, "duration", 100.0, name, at, "host")
            for (tag, at, unit), name in zip(kinds, samples, strict=True)
        ]
        write_record(place, Record("ok", "done", trial=trial.id, measurements=tuple(found)))
    return folder


def tiny_onnx(folder: Path) -> Artifact:
    """Write an ONNX file with one addition, so that a job costs nothing but its own overhead."""
    import onnx
    from onnx import TensorProto, helper

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "tiny", ends[:1], ends[1:])
    path = folder / "tiny.onnx"
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), path)
    sides = [(Tensor(name, "float32", (1, 4)),) for name in ("x", "y")]
    return Artifact("onnx", str(path), "", path.stat().st_size, "fp32", sides[0], sides[1], 0.0)


def job(artifact: Artifact, folder: Path) -> float:
    """Return the wall time of a whole job without timing: start, load, first call, record."""
    model = ModelSpec("tiny", f"file:{artifact.path}")
    trial = Trial(model, "onnxruntime", "fp32", Dims(1, 1, 1), runtime=Runtime(threads=1), plan=Plan(boundaries=()))
    start = time.perf_counter()
    record = launch(Job("run", trial.runtime, trial, 1, artifact=artifact), folder, 60)
    assert record.status == "ok", record.reason
    return time.perf_counter() - start


def main() -> int:
    """Print the figures; return 1 if one is above its limit."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = f"{scratch}/bytecode"
        thousand = stored(Path(scratch) / "thousand", (224,), 1000)
        hundred = stored(Path(scratch) / "hundred", (160, 192, 224, 256), 25)
        artifact = tiny_onnx(Path(scratch))
        words = (("--help",), ("show", str(thousand)), ("report", str(hundred), "--out", f"{scratch}/report"))
        commands = dict(zip(LIMITS, words, strict=True))
        empty, jobs, bare = [], [], []
        times: dict[str, list[float]] = {name: [] for name in commands}
        for i in range(-1, ROUNDS):  # the first iteration only writes bytecode
            empty.append(seconds((sys.executable, "-c", "pass")))
            for name, own in commands.items():
                times[name].append(seconds((*DYNO, *own)))
            bare.append(seconds((sys.executable, "-c", INNER.format(path=artifact.path))))
            jobs.append(job(artifact, Path(scratch) / f"job{i}"))
    nothing, library = statistics.median(empty[1:]), statistics.median(bare[1:])
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}
    beyond = statistics.median(a - b for a, b in zip(jobs[1:], bare[1:], strict=True))
    print(f"empty Python            {nothing:.3f} s")
    for name, median in medians.items():
        print(f"{name:23} {median:.3f} s   {median / nothing:.1f} x an empty Python   limit {LIMITS[name]} s")
    print(f"the library alone       {library:.3f} s")
    whole = statistics.median(jobs[1:])
    print(f"job beyond its library  {beyond:.3f} s   job {whole:.3f} s   limit {JOB_LIMIT} s")
    return int(beyond > JOB_LIMIT or any(median > LIMITS[name] for name, median in medians.items()))


if __name__ == "__main__":
    sys.exit(main())
