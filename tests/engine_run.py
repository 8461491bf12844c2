"""A run folder with one TensorRT trial on `cuda:0`, as a GPU run would leave it; `MEDIANS` has its medians."""

from pathlib import Path
from typing import Any

import numpy as np

from dyno.results.trial_result import TrialResult, load_run
from dyno.worker.facts.files import MakerFacts
from dyno.worker.facts.job import Facts
from dyno.worker.record import Measurement, Record, write_json, write_record
from dyno.worker.spec import Artifact, Dims, Job, ModelSpec, Plan, Runtime, Tensor, Trial, from_json, to_json

BATCH = 8
# Seconds, by tag, boundary and clock.
MEDIANS = {
    ("latency", "model", "gpu"): 171e-6,
    ("latency", "model", "host"): 186e-6,
    ("latency", "all", "host"): 262e-6,
    ("enqueue", "all", "host"): 12e-6,
    ("h2d", "all", "gpu"): 40e-6,
    ("compute", "all", "gpu"): 176e-6,
    ("d2h", "all", "gpu"): 6e-6,
}
RATE = BATCH / 180e-6
SHAPE = ("batch", 3, "height", "width")


def trial(folder: Path, medians: dict[tuple[str, str, str], float] | None = None, **changes: Any) -> TrialResult:
    """Write a run folder to `folder` and return its trial.

    `changes`: backend, precision, engine, graph, clock (MHz), device, version, shape (of the file's input), boundaries,
    made_by (of the engine), source (of the model).
    """
    write(folder, MEDIANS if medians is None else medians, **changes)
    return load_run(folder).trials[0]


def write(folder: Path, medians: dict[tuple[str, str, str], float], **changes: Any) -> None:
    """Write the run folder; see `trial`."""
    image = Tensor("input", "float32", changes.get("shape", SHAPE))
    precision = changes.get("precision", "fp16")
    path, made_by = changes.get("engine", "/cache/net b8.engine"), from_json(MakerFacts, changes.get("made_by", {}))
    engine = Artifact(
        changes.get("format", "engine"), path, "e" * 64, 10, precision, (image,), (), 1.0, made_by=made_by
    )
    ran = Trial(
        ModelSpec("net", changes.get("source", "torchvision:resnet18")),
        changes.get("backend", "tensorrt"),
        precision,
        Dims(BATCH, 64, 64),
        runtime=Runtime(device="cuda:1"),
        plan=Plan(boundaries=changes.get("boundaries", ("model", "all", "throughput"))),
    )
    there = folder / "trials" / ran.id / "r0"
    there.mkdir(parents=True)
    write_json(there / "job.json", to_json(Job("run", ran.runtime, ran, artifact=engine)))
    np.savez(there / "samples.npz", **{"_".join(key): np.full(9, value) for key, value in medians.items()})
    measured = [Measurement(k[0], "s", "duration", None, "_".join(k), k[1], k[2]) for k in medians]
    rate = Measurement("throughput", "1/s", "rate", RATE, "", "throughput", "host")
    said = {"options": {"graph": changes.get("graph", True), "slots": 3}, "timed": {"model": [100.0, 103.0]}}
    facts = from_json(Facts, said)
    system = {"versions": {"numpy": "2.3", "tensorrt": changes.get("version", "8.6.1")}}
    measurements = (*measured, rate) if medians else ()
    write_record(there, Record("ok", "done", trial=ran.id, measurements=measurements, facts=facts, system=system))
    telemetry(there, changes.get("clock", 1980.0), changes.get("device", "NVIDIA Example"))


def telemetry(folder: Path, clock: float, device: str, epoch: float = 99.0) -> None:
    """Write telemetry.npz: a GPU at that clock for five seconds."""
    at = np.arange(0, 5, 0.1)
    same = {"clock": clock, "memory": 1e9, "util": 90.0, "throttle": 0.0, "processes": 1.0, "own": 1.0}
    same |= {"memory_clock": 2619.0, "power": 300.0, "temperature": 40.0}
    columns = {f"gpu_{name}": np.full(len(at), value) for name, value in same.items()}
    before = {f"gpu_before_{name}": np.asarray(0.0) for name in ("memory", "util", "processes")}
    np.savez(folder / "telemetry.npz", at=at, epoch=np.asarray(epoch), gpu_name=np.asarray(device), **columns, **before)
