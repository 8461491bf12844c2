"""Copies around PyTorch's compute stream: what is bound arrives, what is fetched was computed from it, in each slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dyno.worker.backend import Session
from dyno.worker.inputs.input_data import normalisation
from dyno.worker.registry import find
from dyno.worker.spec import PARTS, Dims, ModelSpec, Preprocess, Runtime, Trial

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no NVIDIA GPU"),
]
SHAPE = (4, 1, 64, 64)


def load(precision: str, **options: Any) -> Session:
    model = ModelSpec("digits", "dyno.worker.nets.digits:resnet18", channels=1)
    runtime = Runtime(device="cuda:0", threads=2)
    trial = Trial(model, "pytorch", precision, Dims(4, 64, 64), options=options, runtime=runtime)
    return find("pytorch").load(trial, None)


def images(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)


def once(session: Session, feed: np.ndarray, slot: int = 0) -> np.ndarray:
    session.bind({"input": feed}, slot)
    session.run(slot)
    session.wait(slot)
    return session.fetch(slot)["output"].copy()


@pytest.mark.parametrize(("precision", "channels_last"), [("fp32", False), ("fp16", False), ("fp16", True)])
def test_staged_arrays_and_any_others_give_the_same_in_every_slot(precision: str, channels_last: bool) -> None:
    session = load(precision, channels_last=channels_last)
    feeds = [images(i) for i in range(session.slots)]
    want = [once(session, feed) for feed in feeds]
    staged = [session.stage({"input": feed}) for feed in feeds]
    for slot, feed in enumerate(staged):
        session.bind(feed, slot)
        session.run(slot)
    for slot in range(session.slots):
        session.wait(slot)
        np.testing.assert_allclose(session.fetch(slot)["output"], want[slot], 1e-3, 1e-3 * np.abs(want[slot]).max())
    assert not np.allclose(want[0], want[1], 1e-2)
    backwards = staged[0]["input"][::-1]  # shares the staged memory, in another order
    np.testing.assert_allclose(once(session, backwards)[::-1], want[0], 1e-2, 1e-2 * np.abs(want[0]).max())
    session.close()


def test_pixels_arrive_as_they_are_and_a_quarter_as_large() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
    session, usual = load("fp16", input="uint8"), load("fp16")
    staged = session.stage({"input": pixels})["input"]
    assert staged.dtype == np.uint8
    mean, std = normalisation(Preprocess(), SHAPE[1])
    want = once(usual, (pixels.astype(np.float32) / 255 - mean) / std)
    for feed in (staged, pixels):
        np.testing.assert_allclose(once(session, feed), want, 1e-2, 1e-2 * np.abs(want).max())
    for each in (session, usual):
        each.close()


def test_binding_twice_in_a_row_runs_the_second() -> None:
    session = load("fp32")
    want = once(session, images(1))
    for _ in range(50):
        session.bind({"input": images(0)})
        np.testing.assert_allclose(once(session, images(1)), want, 1e-4, 1e-4 * np.abs(want).max())
    session.close()


def test_parts_are_told_apart() -> None:
    session = load("fp16")
    staged = session.stage({"input": images(0)})
    once(session, staged["input"])
    found = session.parts(staged)
    assert tuple(found) == PARTS
    assert all(seconds > 0 for seconds in found.values())
    session.close()
