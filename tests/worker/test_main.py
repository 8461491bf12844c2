"""Jobs in a worker: measurements, facts and warnings reach the record in any case."""

import errno
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.worker import main, registry
from dyno.worker.backend import Backend, Maker
from dyno.worker.backends import fake
from dyno.worker.backends.fake import Fake, FakeSession
from dyno.worker.facts.engine import EngineFacts, PrecisionTruth, Probe
from dyno.worker.facts.files import MakerFacts
from dyno.worker.facts.job import AnsweredImages
from dyno.worker.jobs import run_trial
from dyno.worker.jobs.turns import Uninterleaved
from dyno.worker.journal import Journal
from dyno.worker.main import perform
from dyno.worker.record import Record, read_record, write_json
from dyno.worker.spec import (
    SCHEMA,
    Artifact,
    DataSpec,
    Dims,
    Job,
    ModelSpec,
    Recipe,
    Tensor,
    Trial,
    Unavailable,
    UserError,
    to_json,
)

TENSORS = (Tensor("input", "float32", (1, 1, 4, 4)),)


def done(job: Job, folder: Path) -> Record:
    return perform(job, Journal(folder, job), Uninterleaved())


def use(monkeypatch: pytest.MonkeyPatch, name: str, made: Backend | Maker) -> None:
    """Register this backend or maker in addition to those in the folder."""
    lookup = "_load_makers" if isinstance(made, Maker) else "_load_backends"
    known = {**getattr(registry, lookup)(), name: made}
    monkeypatch.setattr(registry, lookup, lambda: known)


def test_a_run_measures_every_boundary(fake_trial: Any, tmp_path: Path) -> None:
    trial = fake_trial(latency_ms=1)
    trial = replace(trial, plan=replace(trial.plan, boundaries=("model", "all", "throughput")))
    record = done(Job("run", trial.runtime, trial), tmp_path)
    assert (record.status, record.stage) == ("ok", "done")
    kept = {(m.tag, m.boundary): m for m in record.measurements}
    assert [*kept][:6] == [
        ("import", ""), ("load", ""), ("first_call", ""), ("latency", "model"), ("latency", "all"),
        ("throughput", "throughput"),
    ]  # fmt: skip
    assert {m.unit for m in kept.values()} == {"s", "1/s", "B", "1"}
    with np.load(tmp_path / "samples.npz") as samples:
        for boundary in ("model", "all"):
            m = kept["latency", boundary]
            assert m.stopped in ("interval", "seconds") and m.value is None
            assert samples[m.samples].min() >= 1e-3
        rate = kept["throughput", "throughput"]
        assert samples[rate.samples].dtype == np.float64
        assert 0 < (rate.value or 0) <= 2 / 1e-3


def test_only_the_boundaries_of_the_plan_are_measured(fake_trial: Any, tmp_path: Path) -> None:
    trial = fake_trial()
    record = done(Job("run", trial.runtime, replace(trial, plan=replace(trial.plan, boundaries=()))), tmp_path)
    assert record.status == "ok"
    assert not [m for m in record.measurements if m.samples]
    assert (tmp_path / "outputs.npz").exists()


def test_engine_facts_become_record_facts_and_measurements(
    fake_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Built(FakeSession):
        def facts(self) -> EngineFacts:
            lie = PrecisionTruth(ok=False, sentence="asked for fp32: it ran 0 of 1 compute layers in float32")
            return EngineFacts(layers=21, build_s=2.5, precision_truth=lie, notes=("slow",), other={"mine": [1]})

    class Says(Fake):
        name = "says"

        def load(self, trial: Trial, artifact: Artifact | None) -> FakeSession:
            return Built(trial)

    use(monkeypatch, "says", Says())
    made_by = MakerFacts(backend="x", weights_sha256="ab", parameters=77)
    artifact = Artifact("onnx", "/x", "cd", 1234, "fp32", TENSORS, TENSORS, 1.0, made_by=made_by)
    trial = fake_trial("says")
    record = done(Job("run", trial.runtime, trial, artifact=artifact), tmp_path)
    values = {m.tag: m.value for m in record.measurements if m.value is not None}
    assert values.items() >= {"layers": 21.0, "build": 2.5, "parameters": 77.0, "file_size": 1234.0}.items()
    assert record.facts.weights_sha256 == "ab"
    assert record.facts.data == AnsweredImages("random", "test", 5)
    assert record.facts.other == {"mine": [1]}, "what a plug-in says besides is kept"
    assert "asked for fp32: it ran 0 of 1 compute layers in float32" in record.warnings


def test_a_made_file_records_its_whole_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer(Maker):
        name = "writer"

        def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
            path = folder / "made.bin"
            path.write_bytes(b"12345" * (2 if parent else 1))
            made_by = MakerFacts(backend="writer", weights_sha256="" if parent else "ab")
            size = path.stat().st_size
            return Artifact("bin", str(path), "ab", size, recipe.precision, TENSORS, TENSORS, 0.0, made_by=made_by)

    use(monkeypatch, "writer", Writer())
    from dyno.worker.spec import ModelSpec

    first = Recipe("writer", "bin", "fp32", ModelSpec("m", "fake:m"), Dims(1, 4, 4))
    parent = done(Job("make", recipe=first), tmp_path).artifact
    assert parent is not None
    second = replace(first, precision="int8", parent=first)
    record = done(Job("make", recipe=second, artifact=parent), tmp_path)
    made = record.artifact
    assert made is not None and made.seconds > 0
    assert [(s.maker, s.precision, s.bytes) for s in made.made_by.steps] == [
        ("writer", "fp32", 5), ("writer", "int8", 10),
    ]  # fmt: skip
    assert made.made_by.weights_sha256 == "ab", "what is known of the model goes down the chain"
    assert record.stage == "done" and (tmp_path / "stage").read_text() == "make bin int8"


def test_a_probe_record_contains_the_backend_probe(tmp_path: Path) -> None:
    record = done(Job("probe", backend="fake"), tmp_path)
    assert (record.status, record.facts.probe) == ("ok", Probe(version="1", devices=("cpu",), detail="scripted"))


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (Unavailable("no such card; install it"), "skipped", "no such card; install it"),
        (UserError("wrong size; give --size"), "failed", "wrong size; give --size"),
        (MemoryError(), "oom", "out of memory"),
        (MemoryError("8 TB\nmore"), "oom", "out of memory: 8 TB"),
        (ValueError("a\nb"), "failed", "ValueError: a"),
        (KeyError(), "failed", "KeyError: (no message)"),
        (FileNotFoundError(2, "No such file", "x"), "failed", "FileNotFoundError: [Errno 2] No such file: 'x'"),
        (RuntimeError("x" * 5000), "failed", f"RuntimeError: {'x' * 73} … {'x' * 73} ({'x' * 146} …)"),
    ],
)
def test_errors_become_one_line(
    fake_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: str, reason: str
) -> None:
    class Raises(Fake):
        def load(self, trial: Trial, artifact: Artifact | None) -> FakeSession:
            raise error

    use(monkeypatch, "raises", Raises())
    record = done(Job("run", trial=fake_trial("raises")), tmp_path)
    assert (record.status, record.stage, record.reason) == (status, "load", reason)


def test_a_missing_library_is_reported_by_load(
    fake_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing(Fake):
        def prepare(self, trial: Trial) -> None:
            raise ImportError("No module named 'engine'")

        def load(self, trial: Trial, artifact: Artifact | None) -> FakeSession:
            raise Unavailable("engine is not installed; install it")

    use(monkeypatch, "missing", Missing())
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    words = {
        "missing": "engine is not installed; install it",
        "onnxruntime": "onnxruntime is not installed in this Python; pip install 'inference-dyno[onnx]'",
    }
    for backend, reason in words.items():
        record = done(Job("run", trial=fake_trial(backend)), tmp_path)
        assert (record.status, record.stage, record.reason) == ("skipped", "load", reason)
        assert not record.measurements


def test_other_import_errors_fail_the_trial(fake_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Fake):
        def prepare(self, trial: Trial) -> None:
            raise OSError("libengine.so: undefined symbol")

    use(monkeypatch, "broken", Broken())
    record = done(Job("run", trial=fake_trial("broken")), tmp_path)
    assert (record.status, record.stage) == ("failed", "import")
    assert record.reason == "OSError: libengine.so: undefined symbol"


def test_a_full_disk_does_not_fail_the_trial(fake_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_trial, "save_arrays", full)
    with pytest.raises(OSError, match="No space"):
        done(Job("run", trial=fake_trial()), tmp_path)


def test_an_unknown_backend_fails_the_trial(fake_trial: Any, tmp_path: Path) -> None:
    record = done(Job("run", trial=fake_trial("fakee")), tmp_path)
    assert (record.status, record.stage) == ("failed", "import")
    assert record.reason.startswith("unknown backend 'fakee'")


def test_an_unsteady_model_is_reported(fake_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_trial.measure, "warm_up", lambda *_: False)
    record = done(Job("run", trial=fake_trial()), tmp_path)
    said = [f"{boundary}: the median was not steady after 0.02 s of warm-up" for boundary in ("model", "all")]
    assert [w for w in record.warnings if "other programs" not in w] == said


def test_inputs_modified_by_the_model_are_restored_before_every_run(fake_trial: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Into(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        f"        with open({str(tmp_path / 'got')!r}, 'a') as file:\n"
        "            print(float(x.sum()), file=file)\n"
        "        return x.add_(1).mean((2, 3))\n"
        "def into(): return Into()\n"
    )
    model = ModelSpec("into", f"{tmp_path / 'net.py'}:into")
    scripted = fake_trial("pytorch", plan=replace(fake_trial().plan, boundaries=("model",)))
    trial = replace(scripted, model=model, data=DataSpec(count=1), options={})
    record = done(Job("run", trial=trial), tmp_path)
    assert record.status == "ok", record.reason
    assert record.warnings[0].startswith("the model writes into its own inputs: at latency/model they are put back")
    got = (tmp_path / "got").read_text().split()
    assert len(got) > 10 and len({*got}) == 3, "the inputs that are timed, stored, and of the test of rows"


def test_outputs_that_drift_with_each_call_are_a_warning(
    fake_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, calls = FakeSession.fetch, 0

    def aging(self: FakeSession, slot: int = 0) -> dict[str, np.ndarray]:
        nonlocal calls
        calls += 1
        return {name: array * np.float32(1 + 5e-3 * calls) for name, array in fetch(self, slot).items()}

    assert done(Job("run", trial=fake_trial()), tmp_path).facts.random_outputs is None
    monkeypatch.setattr(FakeSession, "fetch", aging)
    record = done(Job("run", trial=fake_trial()), tmp_path)
    assert record.facts.random_outputs and record.facts.random_outputs > 0.01  # consecutive calls differ by 0.005
    assert any("the outputs change from call to call: two on one input" in warning for warning in record.warnings)


def test_cpu_contention_is_a_warning(fake_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.system.CpuContention, "count_busy", lambda _: 1.50049)
    record = done(Job("run", trial=fake_trial()), tmp_path)
    assert record.facts.others_busy == {"model": 1.5, "all": 1.5}
    count = len(main.system.shared_processors())
    assert record.warnings[-1] == f"all: other programs kept 1.5 of {count} processors busy meanwhile"


def test_outputs_that_do_not_depend_on_the_input_are_a_warning(
    fake_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same_for_all(record: Record) -> bool:
        return any("the same for every input" in warning for warning in record.warnings)

    assert not same_for_all(done(Job("run", trial=fake_trial()), tmp_path))
    fetched = fake.FakeSession.fetch
    monkeypatch.setattr(fake.FakeSession, "fetch", lambda *of: {name: a * 0 + 1 for name, a in fetched(*of).items()})
    assert same_for_all(done(Job("run", trial=fake_trial()), tmp_path))


def test_on_a_gpu_half_of_the_processors_may_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.system, "shared_processors", lambda: {*range(64)})
    assert (main.system.contention_threshold("cpu"), main.system.contention_threshold("cuda:1")) == (0.2, 32)


def by_hand(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, main.__file__, *map(str, words)], capture_output=True, text=True, timeout=1200, **more
    )


def test_usage_and_schema_are_checked(fake_trial: Any, tmp_path: Path) -> None:
    none = by_hand()
    assert none.returncode == 1 and none.stderr.startswith("usage: python main.py FOLDER")
    write_json(tmp_path / "job.json", {**to_json(Job("run", trial=fake_trial())), "schema": SCHEMA + 1})
    old = by_hand(tmp_path)
    assert (old.returncode, old.stderr.strip()) == (2, f"job.json has schema {SCHEMA + 1}, this worker reads {SCHEMA}")
    assert read_record(tmp_path) is None


def test_bytecode_that_would_not_be_stored_goes_to_the_cache(
    fake_trial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    kept = tmp_path / "cache" / "byte-code"
    write_json(tmp_path / "job.json", to_json(Job("run", trial=fake_trial())))
    assert by_hand(tmp_path).returncode == 0 and not kept.exists(), "libraries here have theirs beside them"
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "nothing"))
    assert by_hand(tmp_path).returncode == 0 and [*kept.rglob("*.pyc")]
    shutil.rmtree(kept)
    write_json(tmp_path / "job.json", to_json(Job("probe", backend="fake")))
    assert by_hand(tmp_path).returncode == 0 and not kept.exists(), "a probe tells of the user's own processes"
