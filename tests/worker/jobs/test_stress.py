"""The stress test finds outputs that depend on the batch, and memory that grows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dyno.worker.backend import Session
from dyno.worker.jobs.stress import GROWTH, stress
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Tensor, Trial, UserError

TRIAL = Trial(ModelSpec("net", "fake:net", channels=1), "fake", "fp32", Dims(0, 4, 4), data=DataSpec(count=1))


class Doubler(Session):
    """y = 2 x; wrong by `error` at batch `bad`, and `leak` bytes of device memory lost at every run."""

    inputs = (Tensor("input", "float32", ("batch", 1, 4, 4)),)
    outputs = (Tensor("output", "float32", ("batch", 1, 4, 4)),)

    def __init__(self, bad: int = 0, error: float = 0.0, leak: int = 0, limits: Any = (1, 2, 8)) -> None:
        self.bad, self.error, self.leak, self.lost, self.limits = bad, error, leak, 0, limits
        self.shapes: list[int] = []

    @property
    def batches(self) -> Any:
        return self.limits

    def reshape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes.append(shapes["input"][0])

    def bind(self, feeds: Mapping[str, np.ndarray], slot: int = 0) -> None:
        self.x = feeds["input"]

    def run(self, slot: int = 0) -> None:
        self.lost += self.leak

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        return {"output": 2 * self.x + (self.error if len(self.x) == self.bad else 0.0)}

    def device_memory(self) -> int:
        return self.lost


def test_a_good_engine_holds() -> None:
    session = Doubler()
    found = list(stress(session, TRIAL, ["min", "opt", "max", "random", "3"], 40))
    assert [s.name for s in found] == ["min", "opt", "max", "random", "3"]
    assert [s.batches for s in found] == [(1, 1), (2, 2), (8, 8), (1, 8), (3, 3)]
    assert all(s.wrong == 0 and len(s.seconds) == 40 and (s.seconds > 0).all() for s in found)
    assert all(s.to_record(1e-4).ok for s in found)
    assert len(set(session.shapes[-400:])) == 8, "random means every size between min and max"


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_an_output_that_depends_on_the_batch_is_found(error: float) -> None:
    good, bad = stress(Doubler(bad=8, error=error), TRIAL, ["opt", "max"], 10)
    assert good.wrong == 0 and bad.wrong == 10 and not bad.to_record(1e-4).ok


def test_memory_that_grows_is_found() -> None:
    (found,) = stress(Doubler(leak=GROWTH // 5), TRIAL, ["opt"], 10)
    assert found.wrong == 0 and found.device_growth == 2 * GROWTH // 10 * 10 and not found.to_record(1e-4).ok


def test_a_batch_outside_the_profile_or_no_profile() -> None:
    with pytest.raises(UserError, match="batch 9 is outside the engine's profile, 1 to 8"):
        list(stress(Doubler(), TRIAL, ["9"], 1))
    with pytest.raises(UserError, match=r"no profile .* give numbers"):
        list(stress(Doubler(limits=None), TRIAL, ["min"], 1))
