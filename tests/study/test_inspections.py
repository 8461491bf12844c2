"""A study's models are inspected in parallel and independently of each other."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dyno import Study, UserError
from dyno.study.plan import expand

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.usefixtures("preloaded"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors"),
]
MODELS = """
import os, time
from pathlib import Path
from torch import nn

FOLDER = Path({folder!r})

def model(name):
    (FOLDER / name).write_text(str(os.getpid()))
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def meets(name, other):
    made = model(name)
    (FOLDER / (name + ".cores")).write_text(" ".join(map(str, os.sched_getaffinity(0))))
    while not (FOLDER / other).exists():
        time.sleep(0.02)
    return made

def one(): return meets("one", "other")
def other(): return meets("other", "one")

def crashes():
    first = not (FOLDER / "crashes").exists()
    made = model("crashes")
    if first:
        os.abort()
    return made

def waits(): return meets("waits", "never")
def too(): return meets("too", "never")
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "nets.py"
    file.write_text(MODELS.format(folder=str(tmp_path)))
    return str(file)


def test_models_are_inspected_in_parallel(source: str) -> None:
    study = Study(models=(f"{source}:one", f"{source}:other"), backends=("pytorch",), sizes=("32",))
    assert [one.trial.model.name for one in expand(study)] == ["one", "other"]


def test_a_part_of_a_study_inspects_only_its_own_models(source: str, tmp_path: Path) -> None:
    models = f"{source}:crashes", "torchvision:squeezenet1_1", "timm:squeezenet1_1"
    study = Study(models=models, backends=("pytorch",), sizes=("32",), reference="pytorch")
    (planned,) = expand(study, [models[1]])
    assert (planned.source, planned.trial.model.name) == (models[1], models[1]), "named as in the whole study"
    assert not (tmp_path / "crashes").exists()


def test_inspections_have_separate_processors(source: str, tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    expand(Study(models=(f"{source}:one", f"{source}:other"), backends=("pytorch",), sizes=("32",), threads=1))
    one, other = ({*(tmp_path / f"{name}.cores").read_text().split()} for name in ("one", "other"))
    assert one and other and not one & other
    assert os.sched_getaffinity(0) == before, "the study itself keeps all"


def test_a_crashed_inspection_is_retried_alone(source: str) -> None:
    models = f"{source}:crashes", "torchvision:no_such_net", "torchvision:squeezenet1_1"
    planned = expand(Study(models=models, backends=("pytorch",), sizes=("32",)))
    assert [(one.trial.model.name, bool(one.refusal)) for one in planned] == [
        ("crashes", False),
        ("no_such_net", True),
        ("squeezenet1_1", False),
    ]
    with pytest.raises(UserError, match="no_such_net"):
        expand(Study(models=("torchvision:no_such_net",), backends=("pytorch",)))


def test_an_interrupt_ends_all_inspections(source: str, tmp_path: Path) -> None:
    words = (
        f"{source}:waits", f"{source}:too", "--backend", "pytorch", "--size", "32", "--out", str(tmp_path / "run"),
    )  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "dyno", "run", *words], stderr=subprocess.DEVNULL)
    begun = [tmp_path / name for name in ("waits", "too")]
    while not all(path.exists() and path.read_text() for path in begun):
        assert process.poll() is None
        time.sleep(0.05)
    pids = [int(path.read_text()) for path in begun]
    process.send_signal(signal.SIGINT)
    assert process.wait(600) == 130
    assert not any(psutil.pid_exists(pid) for pid in pids)
