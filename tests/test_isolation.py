"""A worker needs only its job folder: it runs in another Python, by hand, and next to files named like its modules."""

import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_text
from dyno import Study, store
from dyno.jobs.launcher import WORKER_MAIN
from dyno.jobs.progress import Progress
from dyno.runner.execute import Files
from dyno.study.plan import expand
from dyno.worker.record import Record, read_record, write_json
from dyno.worker.spec import Artifact, Job, Runtime, to_json


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ONNX file of a small network with a free batch: convolution, pooling, ten classes."""
    pytest.importorskip("onnx")
    rng = np.random.default_rng(0)
    weights = {"w": (16, 3, 3, 3), "m": (16, 10)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    text = """(float[batch, 3, 16, 16] input) => (float[batch, 10] output) {
        c = Conv<pads = [1, 1, 1, 1]>(input, w) r = Relu(c) p = GlobalAveragePool(r) f = Flatten(p) output = Gemm(f, m)
    }"""
    return onnx_text.write(tmp_path_factory.mktemp("isolated") / "net.onnx", text, ir=9, **arrays)


def found(folder: Path) -> dict[str, tuple[dict[str, Any], Record, np.ndarray]]:
    """Return job, record and outputs of each trial's first round, by runtime name."""
    made = {}
    for path in folder.glob("trials/*/r0"):
        job, record = json.loads((path / "job.json").read_text()), read_record(path)
        assert record is not None and record.status == "ok", record
        with np.load(path / "outputs.npz") as arrays:
            made[job["runtime"]["name"]] = (job, record, arrays["output:output"])
    return made


def check(folder: Path, other_python: str) -> None:
    both = found(folder)
    (ours, record, outputs), (theirs, other, others) = both.pop("main"), both.popitem()[1]
    assert (ours["runtime"]["python"], theirs["runtime"]["python"]) == ("", other_python)
    assert record.system["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record.system["python"].split(".")[:2] != other.system["python"].split(".")[:2]
    assert record.system["versions"]["onnxruntime"] and other.system["versions"]["onnxruntime"]
    assert record.facts.inputs_sha256 == other.facts.inputs_sha256, "both were fed the same bytes"
    np.testing.assert_allclose(outputs, others, rtol=1e-4, atol=1e-4)
    for one in (record, other):
        assert len([m for m in one.measurements if m.tag == "latency"]) == 2
        assert one.facts.threads == 1


@pytest.fixture
def quick() -> dict[str, Any]:
    return {"batches": (2,), "rounds": 1, "seconds": 0.05, "block": 0.01, "warmup": 0.02, "threads": 1}


def test_two_pythons_in_one_study(other_python: str, onnx_file: Path, tmp_path: Path, quick: dict[str, Any]) -> None:
    backends = ("onnxruntime", "onnxruntime@runtime=elsewhere")
    tables = {"elsewhere": {"python": other_python}}
    study = Study(models=(str(onnx_file),), backends=backends, runtime=tables, **quick)
    study.run(tmp_path / "run", quiet=True)
    check(tmp_path / "run", other_python)


def test_another_python_from_flags(other_python: str, onnx_file: Path, tmp_path: Path, dyno: Any) -> None:
    usual = "--rounds 1 --seconds 0.05 --block 0.01 --warmup 0.02 --threads 1 --backend onnxruntime".split()
    dyno("run", onnx_file, *usual, "--python", f"onnxruntime={other_python}", "--out", tmp_path / "run", code=0)
    ((job, record, _),) = found(tmp_path / "run").values()
    assert job["runtime"]["python"] == other_python
    assert other_python_version(other_python) == record.system["python"]


def other_python_version(python: str) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_our_environment_does_not_reach_another_python(
    other_python: str, onnx_file: Path, tmp_path: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken numpy on this process's PYTHONPATH does not reach the other Python."""
    (tmp_path / "numpy.py").write_text("raise ImportError('the wrong numpy')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tables = {"onnxruntime": {"python": other_python}}
    study = Study(models=(str(onnx_file),), backends=("onnxruntime",), runtime=tables, boundaries=(), **quick)
    with monkeypatch.context() as patch:  # inspecting and checking the file are jobs of the main interpreter
        patch.delenv("PYTHONPATH")
        (planned,) = expand(study)
        assert planned.trial.recipe is not None
        assert isinstance(Files(Progress(quiet=True)).make_file(planned.trial.recipe), Artifact)
    study.run(tmp_path / "run", quiet=True)
    ((_, record, _),) = found(tmp_path / "run").values()
    assert record.system["python"] == other_python_version(other_python)


SHADOWS = "record types spec backend system measure json dataclasses numpy shapes main models".split()


def test_files_in_the_current_folder_do_not_disturb_a_job(fake_trial: Any, tmp_path: Path) -> None:
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} of the current folder')")
    (tmp_path / "job").mkdir()
    write_json(tmp_path / "job/job.json", to_json(Job("run", trial=fake_trial())))
    done = subprocess.run(
        [sys.executable, str(WORKER_MAIN), "job"], cwd=tmp_path, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "job")
    assert record is not None and record.status == "ok"


def test_files_in_the_current_folder_do_not_disturb_a_version_lookup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*SHADOWS, "csv", "email"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} of the current folder')")
    monkeypatch.chdir(tmp_path)
    there = Runtime(python=sys.executable, env={"DYNO_TEST": str(tmp_path)})
    assert store.find_versions(there, ("numpy",)) == {"numpy": np.__version__}


SPY = """
import sys
from dyno.worker.backends.fake import Fake

class Spy(Fake):
    name = "spy"
    def load(self, trial, artifact):
        self.path = list(sys.path)
        return super().load(trial, artifact)
    def probe(self):
        import json, os, record
        return {"path": sys.path, "record": record.__file__, "launcher": os.environ.get("DYNO_LAUNCHER", "")}
"""


@pytest.mark.parametrize("safe", [False, True])
def test_the_worker_does_not_change_sys_path(tmp_path: Path, safe: bool) -> None:
    """Import the user's `record`, not the worker's, also under PYTHONSAFEPATH (no script folder on the path)."""
    (tmp_path / "spy.py").write_text(SPY)
    (tmp_path / "record.py").write_text("")
    (tmp_path / "job").mkdir()
    write_json(tmp_path / "job/job.json", to_json(Job("probe", backend="spy:Spy")))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), **({"PYTHONSAFEPATH": "1"} if safe else {})}
    done = subprocess.run([sys.executable, str(WORKER_MAIN), str(tmp_path / "job")], env=env, timeout=1200, check=False)
    assert done.returncode == 0
    record = read_record(tmp_path / "job")
    assert record is not None and record.status == "ok", record
    assert record.facts.probe.other["record"] == str(tmp_path / "record.py")
    assert not [p for p in record.facts.probe.other["path"] if p.startswith(str(WORKER_MAIN.parent))]
    code = "import sys, json; print(json.dumps(sys.path))"
    plain = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert [p for p in json.loads(plain) if p] == record.facts.probe.other["path"]


def test_a_stored_job_runs_again_by_hand(fake_study: Any, tmp_path: Path) -> None:
    fake_study().run(tmp_path / "run", quiet=True)
    (folder,) = tmp_path.glob("run/trials/*/r0")
    before = (folder / "record.json").stat().st_mtime_ns
    digest = hashlib.sha256((folder / "job.json").read_bytes()).hexdigest()
    done = subprocess.run([sys.executable, str(WORKER_MAIN), str(folder)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert (folder / "record.json").stat().st_mtime_ns > before
    assert hashlib.sha256((folder / "job.json").read_bytes()).hexdigest() == digest
    record = read_record(folder)
    assert record is not None and record.status == "ok" and record.trial == folder.parent.name and record.seconds > 0
    assert not (folder / "partial.json").exists()


def test_a_full_disk_is_not_a_failed_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO then reports "basic_ios::clear: iostream error" and deletes its output; once, another route followed."""
    pytest.importorskip("onnx")
    pytest.importorskip("openvino")
    weights = np.random.default_rng(0).random((64, 20_000), np.float32)
    onnx_text.write(
        tmp_path / "m.onnx", "(float[1, 64] x) => (float[1, 20000] y) { y = MatMul(x, w) }", ir=9, w=weights
    )
    monkeypatch.setenv("DYNO_CACHE", str(tmp_path / "cache"))
    (planned,) = expand(Study(models=(str(tmp_path / "m.onnx"),), backends=("openvino",)))
    files = Files(Progress(quiet=True))
    recipe = planned.trial.recipe
    assert recipe is not None
    if recipe.parent:
        assert not isinstance(files.make_file(recipe.parent), Record)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large|No space left"):
            files.make_file(recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not isinstance(files.make_file(recipe), Record), "with room again it is made"
