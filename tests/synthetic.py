"""Run folders with seeded synthetic samples, as `dyno run` would leave them."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from dyno.worker.facts.files import MakerFacts
from dyno.worker.facts.job import Facts
from dyno.worker.record import Measurement, Record, write_json, write_record
from dyno.worker.spec import Artifact, DataSpec, Dims, Job, ModelSpec, Plan, Runtime, Tensor, Trial, from_json, to_json
from synthetic_card import Card

CLASSES = 10
ENVIRONMENT = {  # as `system.describe` returns it
    "cpu": "Synthetic CPU", "cpu_flags": ["avx2"], "cores": 2, "memory_bytes": 8 << 30, "os": "Linux 6",
    "machine": "x86_64", "governor": "", "load_average": 0.1, "python": "3.11",
    "versions": {"torch": "2.11.0", "inference-dyno": "0.1.0"},
}  # fmt: skip
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}


@dataclass
class Way:
    """A trial to be written: `seconds` per batch of one image, `flips` is the share of differing answers."""

    backend: str
    precision: str = "fp32"
    seconds: float = 0.010
    flips: float = 0.0
    batch: int = 1
    size: int = 64
    model: str = "digits"
    statuses: tuple[str, ...] = ("ok", "ok", "ok")
    reason: str = ""
    stage: str = "run"
    options: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, int] | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    spread: float = 0.01
    build: float = 0.0
    labelled: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    card: Card | None = None

    @property
    def trial(self) -> Trial:
        return Trial(
            model=ModelSpec(name=self.model, source=f"torchvision:{self.model}", classes=CLASSES),
            backend=self.backend,
            precision=self.precision,
            dims=Dims(self.batch, self.size, self.size),
            options=self.options,
            data=DataSpec(name="digits", sha256="d" * 64, count=0),
            runtime=Runtime(threads=2, device="cuda:0" if self.card else "cpu"),
            plan=Plan(seconds=1.0, rounds=len(self.statuses)),
        )


def demo() -> list[Way]:
    """Return a study like the demo's: four backends, batches 1 and 8, and every trial status."""
    ways = []
    for batch in (1, 8):
        at = {"batch": batch}
        ways += [
            Way("pytorch", "fp32", 0.0040, **at),
            Way("pytorch", "bf16", 0.0031, flips=0.002, **at),
            Way("compile", "fp32", 0.0026, build=31.0, **at),
            Way("onnxruntime", "fp32", 0.0020, build=1.2, **at),
            Way("onnxruntime", "int8", 0.0022, flips=0.012, build=4.1, layers={"int8": 9, "float32": 12},
                notes=("11 of 20 convolutions were not fused into QLinearConv",), **at),
            Way("openvino", "fp32", 0.0018, layers={"bfloat16": 21}, build=1.4, **at),
            Way("openvino", "bf16", 0.0012, flips=0.002, build=1.4, **at),
            Way("openvino", "int8", 0.0008, flips=0.004, build=5.5, layers={"int8": 20, "float32": 1},
                warnings=("another process used 40 % of a core",), **at),
        ]  # fmt: skip
    return [
        *ways,
        Way("tensorrt", "fp16", statuses=("skipped",), reason="tensorrt isn't installed; pip install tensorrt"),
        Way("fake", "fp32", statuses=("ok", "crashed", "ok"), reason="killed by SIGSEGV", seconds=0.005),
        Way("fake", "bf16", statuses=("timeout",), reason="no sign of life for 600 s"),
        Way("fake", "int8", statuses=("oom",), reason="the kernel killed it: out of memory"),
    ]


def hostile() -> list[Way]:
    """Return trials with names that would break unescaped HTML, Markdown, XML and matplotlib."""
    model = '<script>alert("x")</script> | $\\frac{1}{2 _модель_&amp; "ъ"'
    return [
        Way("pytorch", "fp32", 0.004, model=model),
        Way("onnxruntime", "int8", 0.001, model=model, flips=0.01, warnings=("<b>bold</b> | 50 % & more\nnext",)),
        Way("fake", "fp32", model=model, statuses=("failed",), reason="<img src=x onerror=alert(1)> | нет"),
    ]


def write_run(folder: Path, ways: list[Way], seed: int = 0, count: int = 360, samples: int = 200) -> Path:
    """Write the run folder and return it; `count` test images, `samples` timings per round."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    scores = _scores(rng, labels)
    for way in ways:
        for number, status in enumerate(way.statuses):
            path = folder / "trials" / way.trial.id / f"r{number}"
            _write_round(path, way, number, status, rng, labels, scores, samples)
    gpu = {"gpu": "Synthetic GPU, driver 1"} if any(way.card for way in ways) else {}
    write_json(folder / "environment.json", ENVIRONMENT | gpu)
    (folder / "study.toml").write_text('models = ["digits"]\nbackends = ["pytorch"]\n', encoding="utf-8")
    return folder


def _scores(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    scores = rng.normal(0, 1, (len(labels), CLASSES)).astype(np.float32)
    scores[np.arange(len(labels)), labels] += np.where(rng.random(len(labels)) < 0.99, 9, 0)
    return scores + 30  # so large that a changed class is no wrong output


def _write_round(folder: Path, way: Way, number: int, status: str, rng: np.random.Generator, labels: np.ndarray,
                 scores: np.ndarray, samples: int) -> None:  # fmt: skip
    folder.mkdir(parents=True)
    trial = way.trial
    write_json(folder / "job.json", to_json(Job(kind="run", runtime=trial.runtime, trial=trial, round=number)))
    seconds = 3.2 + 1e-14 * crc32(bytes(folder))  # equal only for a copy of the folder
    record = Record(status=status, stage=way.stage, trial=trial.id, round=number, started="2026-01-02T03:04:05",
                    seconds=seconds, warnings=way.warnings, system={"cpu": "Synthetic CPU"})  # fmt: skip
    if status != "ok":
        write_record(folder, replace(record, reason=way.reason))
        return
    arrays = _timings(way, rng, samples)
    facts = _facts(way)
    if way.card:
        facts["timed"] = _on_card(folder, way.card, number, arrays)
    np.savez(folder / "samples.npz", **arrays)
    np.savez(folder / "outputs.npz", **_outputs(way, rng, labels, scores))
    done = replace(record, stage="done", measurements=_measurements(way, arrays), facts=from_json(Facts, facts))
    write_record(folder, replace(done, artifact=_artifact(way) if way.build else None))


def _timings(way: Way, rng: np.random.Generator, samples: int) -> dict[str, np.ndarray]:
    seconds = way.seconds * (0.3 + 0.7 * way.batch) * np.exp(rng.normal(0, way.spread))
    noise = 1 + rng.exponential(0.03, (2, samples))
    return {"latency_model": seconds * noise[0], "latency_all": (seconds + 2e-4) * noise[1],
            "throughput": way.batch / seconds * (1 + rng.normal(0, 0.01, 10))}  # fmt: skip


def _on_card(folder: Path, card: Card, number: int, arrays: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """Add the GPU's clock to the timings and telemetry to the folder; return the windows."""
    if card.events:
        arrays["latency_model_gpu"] = arrays["latency_model"].copy()
        arrays["latency_model"] += card.gap
    if card.copies:
        arrays["latency_all"] = arrays["latency_model"] + card.copies
        arrays["throughput"] *= min(1.0, float(np.median(arrays["latency_model"])) / card.copies)
    if card.enqueue:
        arrays["enqueue_all"] = np.full(20, card.enqueue)
    spans = {b: 1.02 * float(arrays[f"latency_{b}"].sum()) for b in ("model", "all")} | {"throughput": 0.5}
    timed = card.timed(spans, number)
    np.savez(folder / "telemetry.npz", **card.telemetry(timed, number))
    return timed


def _outputs(way: Way, rng: np.random.Generator, labels: np.ndarray, scores: np.ndarray) -> dict[str, np.ndarray]:
    noisy = (scores + rng.normal(0, 1e-5 + 4 * way.flips, scores.shape)).astype(np.float32)
    wrong = rng.random(len(labels)) < way.flips
    noisy[wrong] = np.roll(noisy[wrong], 1, axis=1)
    order = np.argsort(-noisy, axis=1, kind="stable")[:, :10].astype(np.int32)
    found = {"output:output": noisy, "topk_index": order, "topk_score": np.take_along_axis(noisy, order, 1),
             "sample": np.arange(len(labels))}  # fmt: skip
    return found | ({"label": labels} if way.labelled else {})


def _measurements(way: Way, arrays: dict[str, np.ndarray]) -> tuple[Measurement, ...]:
    gpu = {
        "latency_model_gpu": Measurement("latency", "s", "duration", None, "latency_model_gpu", "model", "gpu"),
        "enqueue_all": Measurement("enqueue", "s", "duration", None, "enqueue_all", "all", "host"),
    }
    return (
        *(measurement for name, measurement in gpu.items() if name in arrays),
        Measurement("latency", "s", "duration", None, "latency_model", "model", "host", "interval"),
        Measurement("latency", "s", "duration", None, "latency_all", "all", "host", "seconds"),
        Measurement("throughput", "1/s", "rate", float(np.median(arrays["throughput"])), "throughput", "throughput"),
        Measurement("load", "s", "duration", 0.2),
        Measurement("first_call", "s", "duration", way.seconds * 4),
        Measurement("file_size", "B", "bytes", 1_450_000.0 if way.precision == "int8" else 2_900_000.0),
        Measurement("parameters", "1", "count", 701_466.0),
        Measurement("layers", "1", "count", 21.0),
        Measurement("peak_memory", "B", "bytes", 4.1e8),
    )


def _facts(way: Way) -> dict[str, Any]:
    layers = way.layers or {NAMES.get(way.precision, "float32"): 21}
    return {"layers_by_type": layers, "threads": 2, "options": way.options, "notes": list(way.notes),
            "weights_sha256": "a" * 64, "inputs_sha256": "b" * 64,
            "data": {"name": "digits", "split": "test", "count": 360}} | way.facts  # fmt: skip


def _artifact(way: Way) -> Artifact:
    steps = [{"maker": "onnx_export", "format": "onnx", "precision": "fp32", "seconds": 0.9, "bytes": 2_900_000},
             {"maker": way.backend, "format": way.backend, "precision": way.precision, "seconds": way.build - 0.9,
              "bytes": 1_450_000}]  # fmt: skip
    image = Tensor("input", "float32", (way.batch, 3, way.size, way.size))
    how = {"backend": way.backend, "options": {}, "versions": {}, "warnings": [], "steps": steps}
    made = from_json(MakerFacts, how)
    return Artifact("onnx", "model.onnx", "c" * 64, 1_450_000, way.precision, (image,),
                    (Tensor("output", "float32", (way.batch, CLASSES)),), way.build, "", made)  # fmt: skip
