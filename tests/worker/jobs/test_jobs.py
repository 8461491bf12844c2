"""The jobs of a worker: cold starts, inspections, servers, and trials that measure in turns."""

import builtins
import importlib
import os
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drawn import photographs
from dyno.worker import journal, measure
from dyno.worker.facts.job import ServeFacts, ServeStep
from dyno.worker.jobs import cold_start, turns
from dyno.worker.jobs.cold_start import ColdStartClock
from dyno.worker.jobs.inspect_model import inspect_model
from dyno.worker.jobs.serve import _ServeJob
from dyno.worker.jobs.turns import Interleaved, Uninterleaved
from dyno.worker.journal import Journal
from dyno.worker.main import perform
from dyno.worker.nets import saved_modules
from dyno.worker.serving.options import ServeOptions
from dyno.worker.serving.rates import Arrivals
from dyno.worker.spec import Artifact, Dims, Job, ModelSpec, Plan, Runtime, Trial, Unanswered, Unavailable, UserError

NAP_S = 0.3


@pytest.fixture
def slow_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_outer.py").write_text(f"import time, slow_inner\ntime.sleep({NAP_S})\n")
    (tmp_path / "slow_inner.py").write_text(f"import time\ntime.sleep({NAP_S})\n")
    (tmp_path / "slow_by_name.py").write_text(f"import time\ntime.sleep({NAP_S})\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("slow_modules")
def test_import_time_is_counted_once_and_separately() -> None:
    clock, usual = ColdStartClock(), (builtins.__import__, importlib.import_module)
    begin = time.monotonic()
    with clock.imports_apart(), clock.time_part("load"):
        import slow_outer  # type: ignore[import-not-found]  # noqa: F401

        importlib.import_module("slow_by_name")
        time.sleep(NAP_S)
    whole = time.monotonic() - begin
    assert clock.imported >= 3 * NAP_S, "two nested ones, and one by name"
    assert clock.parts["load"] >= NAP_S
    assert 4 * NAP_S <= clock.imported + clock.parts["load"] <= whole
    assert (builtins.__import__, importlib.import_module) == usual


def test_a_failed_import_ends_the_import_timing() -> None:
    clock = ColdStartClock()
    with clock.imports_apart(), clock.time_part("load"):
        for _ in range(2):
            with pytest.raises(ImportError):
                importlib.import_module("no_such_module_at_all")
    assert clock.imported > 0 and not clock._importing


def test_files_of_a_cold_start_are_those_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("net.onnx", "made.xml", "relative.py", "read.py"):
        Path(name).touch()
    planted = {"__file__": str(tmp_path / "read.py"), "__cached__": "/no/such.pyc"}
    for name, own in (("planted", planted), ("other", {"__file__": "relative.py", "__cached__": None})):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**own))
    trial = Trial(ModelSpec("net", f"file:{tmp_path}/net.onnx"), "onnxruntime", "fp32", Dims(1, 8, 8))
    made = Artifact("openvino", str(tmp_path / "made.xml"), "", 0, "fp32", (), (), 0.0)
    for artifact, own in ((None, "net.onnx"), (made, "made.xml")):
        found = cold_start._list_code_files(trial, artifact)
        assert all(path.startswith("/") and Path(path).is_file() for path in found) and [*found] == sorted({*found})
        assert {str(tmp_path / name) for name in ("read.py", own)} == {p for p in found if Path(p).parent == tmp_path}


def test_a_context_is_created_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    created = list[tuple[str, int]]()

    class Device:
        def __init__(self, name: str) -> None:
            if name == "cuda:9":
                raise Unavailable("no such device")
            self.name = name

        def allocate(self, size: int) -> None:
            created.append((self.name, size))

    monkeypatch.setattr("dyno.worker.sessions.gpu.Device", Device)
    assert [cold_start._create_context(name) is not None for name in ("cpu", "cuda:9", "cuda:1")] == [
        False,
        False,
        True,
    ]
    assert created == [("cuda:1", 1)]


torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("batch", "free"), [(1, False), (2, False), (2, True)])
def test_a_program_keeps_the_batch_of_its_example_unless_free(batch: int, free: bool, tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).eval()
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},) if free else None
    torch.export.save(torch.export.export(net, (torch.randn(batch, 3, 8, 8),), dynamic_shapes=shapes), path)
    model = ModelSpec("net", f"saved:{path}")
    found = inspect_model(Trial(model, "pytorch", "fp32", Dims(1, 0, 0), runtime=Runtime()), [], {})
    assert (found.size, found.usual_batch, found.batch) == ((8, 8), batch, 0 if free else batch)
    assert found.outputs == 4 and found.flops == {"8": 2 * 27 * 4 * 36}, "of one image"


@pytest.mark.slow
class Scaled(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any, scale: float = 2.0, *, shift: Any) -> Any:
        return torch.nn.functional.dropout(x, training=self.training) * scale + shift


def test_a_program_accepts_positional_and_keyword_inputs(call: Any, tmp_path: Path) -> None:
    free = {0: torch.export.Dim("batch", min=1, max=8)}
    example, keywords = (torch.randn(2, 6),), {"scale": 3.0, "shift": torch.randn(2, 6)}
    shapes = {"x": free, "scale": None, "shift": free}
    program = torch.export.export(Scaled().eval(), example, keywords, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "net.pt2")
    words = ("--backend", "pytorch,onnxruntime", "--routes", "usual", "--rounds", "1", "--seconds", "0.02")
    _, out, _ = call("run", "net.pt2", *words, "--warmup", "0.01", "--batch", "4", "--out", "run", code=0)
    assert "outputs agree with those of pytorch fp32" in " ".join(out.split())


@pytest.mark.slow
def test_torchscript_saved_in_training_mode_runs_in_eval_mode(tmp_path: Path) -> None:
    script = torch.jit.script(torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(6, 4)).train())
    script.save(tmp_path / "net.torchscript")
    loaded, x = saved_modules.load(str(tmp_path / "net.torchscript")), torch.randn(3, 6)
    assert torch.equal(loaded(x), script.eval()(x)) and not loaded.training


def test_a_module_from_another_pytorch_version_gets_advice(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "net.pt2", "w") as archive:
        archive.writestr("net/archive_version", "9999")
    with pytest.raises(UserError, match="if another version saved it, save it again with this one") as caught:
        saved_modules.load(str(tmp_path / "net.pt2"))
    assert torch.__version__ in str(caught.value)


@pytest.mark.slow
def test_torchscript_runs_in_bf16_and_is_skipped_by_compilers(call: Any, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).eval()
    torch.jit.trace(net, torch.rand(1, 3, 8, 8)).save(tmp_path / "net.torchscript")
    words = ("--backend", "pytorch,aoti,compile", "--precision", "fp32,bf16", "--size", "8", "--rounds", "1")
    words = (*words, "--seconds", "0.02", "--warmup", "0.01")
    said = " ".join(call("run", "net.torchscript", *words, "--out", "run", code=0)[1].split())
    assert "aoti bf16 skipped: torch.export can't read TorchScript" in said
    assert "compile bf16 skipped: torch.compile can't read TorchScript" in said


def test_dyno_eval_uses_the_batch_of_a_program(call: Any, tmp_path: Path) -> None:
    photographs(tmp_path / "pets", "a", "b", "c", "d")
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).eval()
    torch.export.save(torch.export.export(net, (torch.randn(2, 3, 8, 8),)), tmp_path / "net.pt2")
    _, out, _ = call("eval", "net.pt2", "--data", "pets", "--seconds", "0.02", "--out", "run", code=0)
    assert "batch 2" in out and "top-1" in out


ONE = "x.reshape(1, 3, -1).mean(-1) if len(x) == 1 else x.reshape(1, 3, 64)"
LARGE = "x.mean((2, 3)) + torch.empty(2**60 if len(x) > 1 else 1).sum()"  # too large for the memory with two images


@pytest.mark.parametrize(
    ("result", "described", "sizes", "batch"),
    [(ONE, False, [[8, 8]], 1), (LARGE, False, [], 0), (LARGE, True, [], 0)],
)
def test_a_refused_batch_means_batch_1_unless_memory_ran_out(
    result: str, described: bool, sizes: list[list[int]], batch: int, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(
        f"import torch\nclass Net(torch.nn.Module):\n    def forward(self, x): return {result}\n"
        "def net(): return Net()\n" + ("def net_inputs(): return torch.zeros(1, 3, 8, 8)\n" if described else "")
    )
    model = ModelSpec("net", f"{tmp_path / 'net.py'}:net")
    found = inspect_model(Trial(model, "pytorch", "fp32", Dims(1, 0, 0), runtime=Runtime()), sizes, {})
    assert found.batch == batch


def test_torchscript_errors_are_reported_with_their_reason(tmp_path: Path) -> None:
    """Its own message begins with a traceback."""
    path = tmp_path / "net.torchscript"
    torch.jit.script(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(27, 4))).save(path)
    trial = Trial(ModelSpec("net", f"saved:{path}"), "pytorch", "fp32", Dims(1, 0, 0), runtime=Runtime())
    with pytest.raises(
        UserError, match=r"the model refuses 1x3x8x8: (addmm: )?mat1 and mat2 shapes cannot be multiplied"
    ):
        inspect_model(trial, [(8, 8)], {})


class Silent(_ServeJob):
    """A serve job that answers at the first `answered` rates, then at none."""

    def __init__(self, answered: int, options: ServeOptions) -> None:
        self._options, self._facts, self._seed = options, ServeFacts(least=10, capacity=100), 0
        self._answered = answered
        self.warnings: list[str] = []
        self._journal: Any = self
        self._arrays: dict[str, np.ndarray] = {}

    def warn(self, sentence: str) -> None:
        self.warnings.append(sentence)

    def _try_arrivals(self, arrivals: Arrivals, asked: float = 0.0) -> ServeStep:
        if len(self._facts.steps) == self._answered:
            raise Unanswered(f"no request got an answer at {asked:g} requests/s")
        number = len(self._facts.steps)
        self._arrays |= {f"{name}_{number}": np.array([k]) for k, name in enumerate(("began", "ended", "size"))}
        self._facts = replace(self._facts, steps=(*self._facts.steps, step := ServeStep(asked, "yes")))
        return step


GIVEN, SEARCH = ServeOptions(rate=(10, 20, 30)), ServeOptions(p99="1s")


@pytest.mark.parametrize(("options", "tried", "end"), [(GIVEN, [10], 20), (SEARCH, [50, 100], 200)])
def test_rates_before_a_server_failure_are_kept(options: ServeOptions, tried: list[float], end: float) -> None:
    work = Silent(len(tried), options)
    work.measure_rates("")
    assert [step.rate for step in work._facts.steps] == tried and work._facts.highest is None
    (warning,) = work.warnings
    assert (
        warning == f"no request got an answer at {end} requests/s; the test ended there, and the rates before are kept"
    )


@pytest.mark.parametrize("options", [GIVEN, SEARCH])
def test_a_server_that_answers_no_request_fails(options: ServeOptions) -> None:
    with pytest.raises(Unanswered, match="no request got an answer"):
        Silent(0, options).measure_rates("")


AGES = 1e6  # seconds that the conductor lets the worker wait


class Slow:
    """A conductor with listed answers that take ages by the worker's clock."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.heard, self.waited = words, list[str](), 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self.waited

    def write(self, text: str) -> None:
        self.heard += text.split()

    def readline(self) -> str:
        self.waited += AGES
        return self.words.pop(0) + "\n" if self.words else ""


def test_an_uninterleaved_job_measures_three_blocks_or_uses_its_time() -> None:
    plans = [Plan(seconds=seconds, blocks=5) for seconds in (0.0, 60.0)]
    assert [[*Uninterleaved().blocks("model", plan)] for plan in plans] == [[0, 1, 2], [0, 1, 2, 3, 4]]


def test_a_block_s_delay_is_a_share_of_the_processors_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, times = iter([5.0, 5.5, 7.0, 7.0]), iter([10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(turns.system, "run_delay", lambda: next(waited))
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(turns.os, "sched_getaffinity", lambda _: {0, 1})
    job = Uninterleaved()
    assert [*job._iter_watched(0), *job._iter_watched(1)] == [0, 1] and job.delays == [0.125, 0.0]


@pytest.fixture
def conducted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Slow, Interleaved]]:
    ends = os.pipe()

    def make(*words: str) -> tuple[Slow, Interleaved]:
        slow = Slow([*words])
        clock = SimpleNamespace(**{**vars(time), "perf_counter": slow.perf_counter})
        for module in (turns, journal, measure):
            monkeypatch.setattr(module, "time", clock)
        made = Interleaved(*ends)
        monkeypatch.setattr(made, "_commands", slow)
        monkeypatch.setattr(made, "_replies", slow)
        return slow, made

    return make


def test_measurements_exclude_waiting(fake_trial: Any, tmp_path: Path, conducted: Any) -> None:
    slow, made = conducted("go", "go", "go", "end", "end")
    trial = fake_trial()
    trial = replace(trial, plan=replace(trial.plan, blocks=3))
    job = Job("run", trial.runtime, trial, options={"turns": {"set": "s", "place": 0}})
    record = perform(job, Journal(tmp_path, job), made)
    assert record.status == "ok", record.reason
    *words, delay, before_last, last = slow.heard
    assert [*words, before_last, last] == "ready import ready load ready model done ready all".split()
    assert float(delay) >= 0 and made.waited_s >= 5 * AGES
    seconds = {m.tag: m.value for m in record.measurements if m.unit == "s" and m.value is not None}
    assert {"import", "load", "first_call"} <= {*seconds}
    assert all(value < AGES for value in seconds.values()), seconds


def test_load_time_is_divided_among_concurrent_loads(conducted: Any) -> None:
    slow, made = conducted("go", "go")
    made.together, before = 4, slow.perf_counter()
    made.imported()
    waited = made.waited_s
    slow.waited += 8.0  # loading
    own = slow.perf_counter() - before - waited
    made.loaded()
    assert made.waited_s - waited - AGES == pytest.approx(0.75 * own, abs=0.2)


def test_a_job_without_a_conductor_does_not_load(fake_trial: Any, tmp_path: Path, conducted: Any) -> None:
    _, made = conducted()
    trial = fake_trial()
    job = Job("run", trial.runtime, trial, options={"turns": {"set": "s", "place": 0}})
    record = perform(job, Journal(tmp_path, job), made)
    assert (record.status, record.stage) == ("failed", "import")
    assert [m.tag for m in record.measurements] == ["import"]
