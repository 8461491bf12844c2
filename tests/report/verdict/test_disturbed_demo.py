"""A demo on a machine in use (2026-11-26): in one round of seven other programs took the processors.

The rounds' ratios are those of its records; eager PyTorch took 15.8 ms in the disturbed round and 1.5 in the others.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import synthetic
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results.run_data import RunData
from dyno.worker.record import write_json
from synthetic import Way

BLOCKS, SAMPLES = 8, 20
OPENVINO = (13.9, 12.5, 95.9, 13.2, 12.2, 12.9, 13.4)  # openvino int8 over pytorch fp32, batch 1
BF16 = (1.05, 1.07, 1.40, 1.08, 1.05, 1.06, 1.05)  # pytorch bf16 over pytorch fp32, batch 8
OTHERS = {"onnxruntime": 9.1, "compile": 1.9}  # further rows of the family
PYTORCH_S = np.array([1.5e-3, 1.5e-3, 15.8e-3, 1.5e-3, 1.5e-3, 1.5e-3, 1.5e-3])


def write_round(folder: Path, seconds: float, shared: np.ndarray, rng: np.random.Generator) -> None:
    """Give the round blocks whose medians follow `shared` [blocks], as processes that measured in turns have them."""
    medians = seconds * shared * np.exp(0.01 * rng.standard_normal(BLOCKS))
    taken = medians[:, None] * (1 + 0.01 * rng.random((BLOCKS, SAMPLES)))
    numbers = np.repeat(np.arange(BLOCKS, dtype=np.int32), SAMPLES)
    np.savez(folder / "samples.npz", latency_model=taken.ravel(), latency_model_block=numbers)
    record = json.loads((folder / "record.json").read_text())
    record["measurements"] = [m for m in record["measurements"] if m.get("samples") == "latency_model"]
    record["facts"] |= {"turns": {"set": folder.name}}
    write_json(folder / "record.json", record)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """Seven rounds in turns of five configurations at batch 1 and two at batch 8."""
    rng, rounds = np.random.default_rng(0), len(OPENVINO)
    near = [np.exp(np.log(value) + 0.02 * rng.standard_normal(rounds)) for value in OTHERS.values()]
    ok = {"statuses": ("ok",) * rounds}
    ways = [
        (Way("pytorch", **ok), np.ones(rounds)),
        (Way("openvino", "int8", **ok), np.array(OPENVINO)),
        *((Way(name, **ok), ratio) for name, ratio in zip(OTHERS, near, strict=True)),
        (Way("pytorch", batch=8, **ok), np.ones(rounds)),
        (Way("pytorch", "bf16", batch=8, **ok), np.array(BF16)),
    ]
    folder = synthetic.write_run(tmp_path_factory.mktemp("demo") / "run", [way for way, _ in ways], samples=5)
    for number in range(rounds):
        shared = {batch: np.exp(0.05 * rng.standard_normal(BLOCKS)) for batch in (1, 8)}
        for way, ratio in ways:
            place = folder / "trials" / way.trial.id / f"r{number}"
            write_round(place, way.batch * PYTORCH_S[number] / ratio[number], shared[way.batch], rng)
    return trial_table.read_trials(folder)


def row(run: RunData, backend: str, precision: str, batch: int) -> dict[str, object]:
    frame = run.frame
    (found,) = frame[(frame.backend == backend) & (frame.precision == precision) & (frame.batch == batch)].to_dict(
        "records"
    )
    return found


def test_the_disturbed_round_does_not_undo_the_others(demo: RunData) -> None:
    fastest = row(demo, "openvino", "int8", 1)
    assert fastest["verdict"] == "faster" and fastest["rounds_left_out"] == 1
    assert 11 < fastest["speedup_low"] < 12.8 < fastest["speedup"] < 13.3 < fastest["speedup_high"] < 15
    assert fastest["speedup_all_rounds"] == pytest.approx(np.exp(np.mean(np.log(OPENVINO))), rel=0.02)


def test_a_small_gain_is_decided(demo: RunData) -> None:
    bf16 = row(demo, "pytorch", "bf16", 8)
    assert bf16["verdict"] == "faster" and bf16["rounds_left_out"] == 1
    assert 1.02 < bf16["speedup_low"] < bf16["speedup"] < 1.09 and bf16["speedup_high"] < 1.1


def test_the_verdict_gives_the_ratio_with_its_limits(demo: RunData) -> None:
    said = " ".join(verdict.list_sentences(demo))
    assert "openvino int8" in said and "unclear" not in said and "more than 100 more rounds" not in said
    assert "1 of 7 rounds" in said or "1 round" in said, said
