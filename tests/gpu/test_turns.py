"""Measuring in turns on a GPU: processes that hold it together, one of them running."""

from __future__ import annotations

from pathlib import Path

import pytest

from dyno import Study

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_pytorch_and_tensorrt_take_turns(net: str, tensorrt_python: str, tmp_path: Path) -> None:
    study = Study(
        models=(net,), backends=("pytorch", "tensorrt"), precisions=("fp32",), sizes=("64",), batches=(8,), rounds=2,
        seconds=0.5, warmup=0.1, device="cuda:0", turns=True, runtime={"tensorrt": {"python": tensorrt_python}},
    )  # fmt: skip
    result = study.run(tmp_path / "run", quiet=True)
    frame = result.to_pandas()
    assert set(frame["status"]) == {"ok"}, frame[["backend", "status", "reason"]].to_string()
    engine = frame[frame["backend"] == "tensorrt"].iloc[0]
    assert engine["measured"] == "in turns"
    assert engine["speedup_low"] <= engine["speedup"] <= engine["speedup_high"]
    for trial in result.records:
        assert len(trial.rounds) == 2 and all(
            len(r.block_medians("latency", "model", "gpu")) >= 3 for r in trial.rounds
        )
        assert trial.gpu is None or not trial.gpu.others, "whoever takes turns is nobody else"
