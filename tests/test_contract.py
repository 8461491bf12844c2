"""Assumptions of the timing loop, tested for every backend that runs models, new backends included."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno import Study
from dyno.jobs.progress import Progress
from dyno.runner.execute import Files
from dyno.study.interpreters import find_missing
from dyno.study.model_info import model_spec
from dyno.worker import registry
from dyno.worker.backend import Session, answer_feeds
from dyno.worker.facts.engine import EngineFacts, Probe
from dyno.worker.record import Record
from dyno.worker.spec import Dims, Option, Runtime, Tensor, Trial, Unavailable, UserError, from_json, to_json

CLASSES, SIZE, THREADS = 10, 32, 1
# Half a minute of C++ compilation per model, or an engine build.
COMPILES = ("compile", "aoti", "torchao", "litert", "tensorrt", "tensorrt_rtx", "torch_tensorrt")
PYTHONS = {"litert": os.environ.get("DYNO_TEST_LITERT_TORCH", "")}  # interpreters of file makers; "" is this one
# Backends without fp32: precision, options, and tolerance against the module's outputs.
LOWERED: dict[str, tuple[str, dict[str, Option], float]] = {"torchao": ("int8", {"scheme": "dynamic"}, 0.05)}
NET = """
from torch import nn

def net(num_classes=10, channels=3):
    stem = [nn.Conv2d(channels, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    body = [nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))
"""


PREPARED = """
import json, sys
from dyno.worker.registry import find
from dyno.worker.spec import Trial, from_json
trial = from_json(Trial, json.loads(sys.argv[1]))
find(trial.backend).prepare(trial)
print(*sys.modules)
if torch := sys.modules.get("torch"):
    assert not torch.cuda.is_initialized()
"""


def every() -> list[Any]:
    names = [*registry.list_backends(), "fake"]
    return [pytest.param(name, marks=pytest.mark.slow) if name in COMPILES else name for name in names]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("contract") / "small.py"
    path.write_text(NET)
    return f"{path}:net"


@pytest.fixture(scope="module", params=every())
def load(request: pytest.FixtureRequest, source: str) -> Iterator[Callable[..., tuple[Trial, Session]]]:
    """Load the backend's session for a batch size; skips with the reason where this machine lacks a part."""
    name = request.param
    if lacks := find_missing(name):
        pytest.skip(f"{name}: {lacks} is not installed")
    sessions: dict[int, tuple[Trial, Session]] = {}
    affinity = os.sched_getaffinity(0)

    def make(batch: int = 2) -> tuple[Trial, Session]:
        if batch not in sessions:
            precision, options, _ = LOWERED.get(name, ("fp32", {}, 0))
            trial = Trial(
                model_spec(Study(models=(source,)), source), name, precision, Dims(batch, SIZE, SIZE), options,
                runtime=Runtime(threads=THREADS),
            )  # fmt: skip
            recipe = registry.find(name).recipe(trial)
            if recipe and name in PYTHONS:
                recipe = replace(recipe, runtime=Runtime(python=PYTHONS[name]))
            made = Files(Progress(quiet=True)).make_file(recipe) if recipe else None
            if isinstance(made, Record):
                (pytest.skip if made.status == "skipped" else pytest.fail)(f"{name}: {made.reason}")
            try:
                sessions[batch] = (trial, registry.find(name).load(trial, made))
            except Unavailable as e:
                pytest.skip(f"{name}: {e}")
        return sessions[batch]

    yield make
    for _, session in sessions.values():
        session.close()
    os.sched_setaffinity(0, affinity)


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, SIZE, SIZE), dtype=np.float32)


def outputs(session: Session, batch: np.ndarray, slot: int = 0) -> np.ndarray:
    """Run one batch; return a copy of the first output."""
    session.bind({"input": batch}, slot)
    session.run(slot)
    session.wait(slot)
    (first, *_) = session.fetch(slot).values()
    return np.array(first)


def test_sessions_declare_their_inputs_and_outputs(load: Any) -> None:
    _, session = load()
    assert session.inputs == (Tensor("input", session.inputs[0].dtype, (2, 3, SIZE, SIZE)),)
    assert session.slots >= 1
    for out in session.outputs:  # empty where only a run can tell
        assert (out.name, out.shape) == ("output", (2, CLASSES))


def test_outputs_are_float32_by_name(load: Any) -> None:
    _, session = load()
    (got,) = answer_feeds(session, {"input": images(2)}).items()
    assert got[0] == "output"
    assert (got[1].shape, got[1].dtype) == ((2, CLASSES), np.float32)
    assert np.isfinite(got[1]).all() and got[1].std() > 0


def test_outputs_are_reproducible_and_depend_on_inputs(load: Any) -> None:
    _, session = load()
    first, other, again = (outputs(session, images(2, seed)) for seed in (0, 1, 0))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other, rtol=1e-3, atol=1e-4)
    swapped = outputs(session, np.ascontiguousarray(images(2)[::-1]))
    np.testing.assert_allclose(swapped, first[::-1], rtol=1e-4, atol=1e-4)


def test_inputs_are_not_modified(load: Any) -> None:
    _, session = load()
    batch = images(2)
    outputs(session, batch)
    np.testing.assert_array_equal(batch, images(2))


def test_inputs_may_be_non_contiguous(load: Any) -> None:
    _, session = load()
    turned = np.ascontiguousarray(images(2).transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert not turned.flags.c_contiguous
    np.testing.assert_allclose(outputs(session, turned), outputs(session, images(2)), rtol=1e-4, atol=1e-4)


def test_outputs_do_not_depend_on_the_batch(load: Any) -> None:
    _, two = load(2)
    _, three = load(3)
    both = np.concatenate([outputs(two, images(4)[:2]), outputs(two, images(4)[2:])])
    np.testing.assert_allclose(outputs(three, images(4)[:3]), both[:3], rtol=1e-4, atol=1e-4)


def test_every_slot_keeps_its_own_batch(load: Any) -> None:
    _, session = load()
    alone = [outputs(session, images(2, slot)) for slot in range(session.slots)]
    for slot in range(session.slots):
        session.bind({"input": images(2, slot)}, slot)
        session.run(slot)
    for slot, expected in enumerate(alone):
        session.wait(slot)
        np.testing.assert_allclose(session.fetch(slot)["output"], expected, rtol=1e-5, atol=1e-5)


def test_outputs_match_pytorch(load: Any, source: str) -> None:
    trial, session = load()
    if trial.backend == "fake":
        pytest.skip("fake computes another function")
    torch = pytest.importorskip("torch")
    from dyno.worker.nets import models

    module = models.load(model_spec(Study(models=(source,)), source))
    with torch.inference_mode():
        expected = module(torch.from_numpy(images(2))).numpy()
    atol = LOWERED[trial.backend][2] * np.abs(expected).max() if trial.backend in LOWERED else 1e-5
    np.testing.assert_allclose(outputs(session, images(2)), expected, rtol=1e-3, atol=atol)


@pytest.mark.parametrize(
    "shape", [(1, 3, SIZE, SIZE), (3, 3, SIZE, SIZE), (2, 3, SIZE, SIZE - 1), (2, 3 * SIZE * SIZE)]
)
def test_a_wrong_shape_is_a_harmless_user_error(load: Any, shape: tuple[int, ...]) -> None:
    _, session = load()
    before = outputs(session, images(2))
    with pytest.raises(UserError) as caught:
        session.bind({"input": np.ones(shape, np.float32)})
    assert "\n" not in str(caught.value)
    np.testing.assert_array_equal(outputs(session, images(2)), before)


def test_facts_describe_what_ran(load: Any) -> None:
    trial, session = load()
    before = outputs(session, images(2))
    facts = session.facts()
    assert from_json(EngineFacts, json.loads(json.dumps(to_json(facts)))) == facts, "facts travel as JSON"
    assert sum(facts.layers_by_type.values()) > 0
    assert "float32" in facts.layers_by_type
    if trial.backend not in LOWERED:
        assert set(facts.layers_by_type) == {"float32"}, "fp32 was asked for"
    if trial.backend in LOWERED:  # convolutions stay in float32, and the facts report it
        assert "1 of 3 compute layers in int8" in facts.precision_truth.sentence
        assert facts.threads == THREADS
    elif trial.backend != "fake":
        assert facts.precision_truth.ok, facts.precision_truth.sentence
        assert facts.threads == THREADS
    np.testing.assert_array_equal(outputs(session, images(2)), before)


def test_refusals_are_one_line(load: Any) -> None:
    trial, _ = load()
    engine = registry.find(trial.backend)
    assert engine.refuse(trial) == ""
    for wrong in (replace(trial, precision="fp3"), replace(trial, runtime=Runtime(device="abacus:0"))):
        reason = engine.refuse(wrong)
        assert reason and "\n" not in reason


def test_the_probe_works_where_loading_works(load: Any) -> None:
    trial, _ = load()
    found = registry.find(trial.backend).probe()
    assert found.version and "cpu" in found.devices
    assert from_json(Probe, json.loads(json.dumps(to_json(found)))) == found


@pytest.mark.parametrize("name", [name for name in registry.list_backends() if registry.find(name).requires])
def test_the_library_is_imported_before_loading(name: str, source: str) -> None:
    if lacks := find_missing(name):
        pytest.skip(f"{name}: {lacks} is not installed")
    precision, options, _ = LOWERED.get(name, ("fp32", {}, 0))
    trial = Trial(model_spec(Study(models=(source,)), source), name, precision, Dims(2, SIZE, SIZE), options)
    words = [sys.executable, "-c", PREPARED, json.dumps(to_json(trial))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert registry.find(name).requires[0].partition("|")[0].replace("-", "_") in done.stdout.split()


def test_every_backend_is_tested() -> None:
    assert {p if isinstance(p, str) else p.values[0] for p in every()} == {*registry.list_backends(), "fake"}
    assert Path(registry.backends.__path__[0], "fake.py").is_file()
