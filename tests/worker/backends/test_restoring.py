"""PyTorch: inputs overwritten by a module are restored before each run, and torch 2.2 works like the newest version.

DYNO_TORCH22_PYTHON names an interpreter that has torch 2.2, torchvision 0.17 and numpy 1.26.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dyno.worker import main
from dyno.worker.backend import Session, answer_feeds
from dyno.worker.record import Record, read_record, write_json
from dyno.worker.registry import find
from dyno.worker.spec import DataSpec, Dims, Job, ModelSpec, Plan, Runtime, Trial, to_json

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
    return answer_feeds(session, feed)["output"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_inputs_modified_by_the_module_are_restored(net: Path, precision: str) -> None:
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


def test_a_profile_restores_inputs_before_each_run(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_unmodified_inputs_are_not_restored() -> None:
    session = loaded("torchvision:squeezenet1_1", size=32)
    feed = feeds(session)
    feed["input"][0, 0, 0, 0] = np.nan
    first = answer(session, feed)
    assert session.restoring(feed) is None
    session.run()
    assert np.array_equal(session.fetch()["output"], first, equal_nan=True)


PYTHON = os.environ.get("DYNO_TORCH22_PYTHON", "")

PLAN = Plan(boundaries=("model", "all"), warmup_s=0.05, seconds=0.05, rounds=1)
MODELS = (
    ModelSpec("resnet18", "torchvision:resnet18"),
    ModelSpec("mobilenet", "torchvision:mobilenet_v3_small"),
    ModelSpec("swin", "torchvision:swin_t"),  # truncated normal weights, attention
    ModelSpec("digits", "dyno.worker.nets.digits:resnet18", channels=1),
)


def run(
    python: str, folder: Path, model: ModelSpec, backend: str = "pytorch", precision: str = "fp32", threads: int = 1
) -> Record:
    """Run the trial as a separate job in that interpreter."""
    runtime = Runtime(python=python, threads=threads)
    trial = Trial(model, backend, precision, Dims(2, 64, 64), data=DataSpec(count=2), runtime=runtime, plan=PLAN)
    folder.mkdir()
    write_json(folder / "job.json", to_json(Job("run", trial.runtime, trial)))
    subprocess.run([python, main.__file__, str(folder)], check=True, timeout=1200)
    record = read_record(folder)
    assert record is not None
    return record


@pytest.mark.skipif(not PYTHON, reason="DYNO_TORCH22_PYTHON names no interpreter with torch 2.2")
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_same_seed_gives_the_same_weights_and_outputs(tmp_path: Path, model: ModelSpec) -> None:
    old, new = run(PYTHON, tmp_path / "old", model), run(sys.executable, tmp_path / "new", model)
    assert (old.status, old.reason) == ("ok", "")
    assert old.system["versions"]["torch"].startswith("2.2.")
    for fact in ("weights_sha256", "inputs_sha256", "parameters", "layers_by_type"):
        assert getattr(old.facts, fact) == getattr(new.facts, fact), fact
    with np.load(tmp_path / "old" / "outputs.npz") as a, np.load(tmp_path / "new" / "outputs.npz") as b:
        worst = np.abs(a["output:output"] - b["output:output"]).max() / np.abs(b["output:output"]).max()
    assert worst < 1e-4


@pytest.mark.skipif(not PYTHON, reason="DYNO_TORCH22_PYTHON names no interpreter with torch 2.2")
@pytest.mark.slow
def test_the_number_of_threads_does_not_change_the_weights(tmp_path: Path) -> None:
    # With eight threads and more, some of its float64 convolutions are wrong.
    one, many = (run(PYTHON, tmp_path / str(n), MODELS[0], threads=n).facts.weights_sha256 for n in (1, 16))
    assert one == many


@pytest.mark.skipif(not PYTHON, reason="DYNO_TORCH22_PYTHON names no interpreter with torch 2.2")
@pytest.mark.slow
def test_lower_precision_runs_in_its_type(tmp_path: Path) -> None:
    record = run(PYTHON, tmp_path / "bf16", MODELS[3], precision="bf16")
    assert (record.status, record.facts.layers_by_type) == ("ok", {"bfloat16": 21})


@pytest.mark.skipif(not PYTHON, reason="DYNO_TORCH22_PYTHON names no interpreter with torch 2.2")
@pytest.mark.slow
def test_compile_runs_or_names_the_missing_dependency(tmp_path: Path) -> None:
    record = run(PYTHON, tmp_path / "compile", MODELS[3], "compile")
    if record.status == "ok":
        assert record.facts.graphs == 1
    else:
        assert record.status == "skipped" and "install" in record.reason
