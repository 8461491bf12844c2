"""A module that writes into its inputs gets the same ones before each run, timed or watched; others are left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dyno.worker.backend import Session
from dyno.worker.registry import find
from dyno.worker.spec import Dims, ModelSpec, Runtime, Trial

NET = '''
from torch import nn

class Into(nn.Module):
    """Answers what it got, and writes into it."""
    def forward(self, x):
        total = x.sum((1, 2, 3))[:, None]
        x.mul_(2)
        return total
'''


@pytest.fixture
def net(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path / "net.py"


def loaded(source: str, precision: str = "fp32", size: int = 8) -> Session:
    asked = Trial(ModelSpec("net", source), "pytorch", precision, Dims(2, size, size), runtime=Runtime(threads=2))
    return find("pytorch").load(asked, None)


def feeds(session: Session) -> dict[str, np.ndarray]:
    shape = [int(n) for n in session.inputs[0].shape]
    return {"input": np.random.default_rng(1).standard_normal(shape, dtype=np.float32)}


def answer(session: Session, feed: dict[str, np.ndarray]) -> np.ndarray:
    session.bind(feed)
    session.run()
    session.wait()
    return session.fetch()["output"].copy()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_inputs_that_a_module_writes_into_are_put_back(net: Path, precision: str) -> None:
    session = loaded(f"{net}:Into", precision)
    feed = feeds(session)
    first = answer(session, feed)
    restore = session.restoring(feed)
    assert restore is not None
    for _ in range(2):
        restore()
        session.run()
        assert np.array_equal(session.fetch()["output"], first)
    session.run()
    assert not np.array_equal(session.fetch()["output"], first)


def test_a_profile_puts_inputs_back_too_before_each_run(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = loaded(f"{net}:Into")
    feed = feeds(session)
    first = answer(session, feed)
    assert session.restoring(feed) is not None
    answers, run = [], session.run

    def watched(slot: int = 0) -> None:
        run(slot)
        answers.append(session.fetch()["output"].copy())

    monkeypatch.setattr(session, "run", watched)
    session.profile(3)
    assert len(answers) > 3 and all(np.array_equal(answer, first) for answer in answers)


def test_inputs_that_nothing_writes_into_are_left_alone() -> None:
    session = loaded("torchvision:squeezenet1_1", size=32)
    feed = feeds(session)
    feed["input"][0, 0, 0, 0] = np.nan
    first = answer(session, feed)
    assert session.restoring(feed) is None
    session.run()
    assert np.array_equal(session.fetch()["output"], first, equal_nan=True)
