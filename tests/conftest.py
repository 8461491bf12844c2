"""Shared fixtures: a separate cache, fast scripted trials, the command line, a second interpreter."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # `import yolo_small` works in every import mode of pytest


import durations
import hostile_net
import onnx_text
import preloaded as forked
import synthetic
from dyno import Study
from dyno.cli import app, schemas
from dyno.jobs import launcher
from dyno.report import report
from dyno.results.trial_result import Results, load_run
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Plan, Runtime, Trial
from dyno.worker.system import SILENCING_VARIABLES
from yolo_small import TrainedModel, trained

# No usage data from OpenVINO's converter, for tests that import it before Dyno does.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
# Without MPLBACKEND, as a notebook would show no plot.
os.environ |= {name: value for name, value in SILENCING_VARIABLES.items() if name != "MPLBACKEND"}
# No deadline, as run times depend on the machine; the same examples everywhere, so that a failure repeats.
settings.register_profile("dyno", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dyno")
ROOT = Path(__file__).resolve().parents[1]
QUICK = Plan(boundaries=("model", "all"), warmup_s=0.02, seconds=0.04, min_samples=5, rounds=1, timeout_s=1200.0)
PROCESSORS = os.sched_getaffinity(0)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Restore Ctrl-C: a shell ignores SIGINT in background jobs, and a test that interrupts an endless job would fill
    the memory."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a temporary cache in the tests and their child processes, never the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYNO_CACHE", str(tmp_path_factory.mktemp("cache")))
        # torch.compile spends half of a cold compile on testing the compiler's vector instructions.
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
        # Precompiled headers, shared by all trials.
        if not os.environ.get(forked.RUNNING):
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setattr(os, "fsync", forked.unflushed)
        yield


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Freeze imported objects: each timing starts with a garbage collection, which would scan a million of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _all_processors() -> Iterator[None]:
    """Restore CPU affinity after each test: a job that runs in this process pins it."""
    yield
    os.sched_setaffinity(0, PROCESSORS)


@pytest.fixture(autouse=True)
def _no_self_test() -> Iterator[None]:
    """Delete stored self-tests after each test, as the cache is shared."""
    yield
    shutil.rmtree(Path(os.environ["DYNO_CACHE"], "self-tests"), ignore_errors=True)


@pytest.fixture(scope="session")
def _server() -> Iterator[str]:
    """Socket of the process that jobs and commands are forked from; see `preloaded.py`."""
    if running := os.environ.get(forked.RUNNING):
        yield forked.ready(running)
        return
    server = forked.Server()
    yield server.path
    server.stop()


@pytest.fixture(scope="module")
def preloaded(_server: str) -> Iterator[str]:
    """Fork this module's jobs and commands from a process with the libraries imported; yields its socket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "subprocess", forked.Processes(_server))
        patch.setenv(forked.FORKS, _server)
        yield _server


@pytest.fixture(scope="session")
def fake_trial() -> Callable[..., Trial]:
    """Factory of trials of the scripted backend, which take no time; keyword arguments are backend options."""

    def make(backend: str = "fake", *, plan: Plan = QUICK, runtime: Runtime | None = None, **options: Any) -> Trial:
        model = ModelSpec("net", "fake:net", channels=1)
        options = {"latency_ms": 0.1, **options}
        runtime = runtime or Runtime(threads=1)
        return Trial(
            model, backend, "fp32", Dims(2, 4, 4), options=options, data=DataSpec(count=5), runtime=runtime, plan=plan
        )

    return make


@pytest.fixture(scope="session")
def fake_study() -> Callable[..., Study]:
    """Factory of studies of the scripted backend, which take no time; keyword arguments are fields of `Study`."""

    def make(**fields: Any) -> Study:
        short = {"rounds": 1, "turns": False, "seconds": 0.04, "warmup": 0.02, "threads": 1, "boundaries": ("model",)}
        what = {"models": ("fake:net",), "channels": 1, "backends": ("fake@latency_ms=0.1",)}
        return Study(**{**what, **short, **fields})

    return make


def check_json(words: list[str], out: str) -> None:
    """Validate a command's JSON output against the schema that `--schema` prints."""
    if " --format json" in f" {' '.join(words)}" and out.startswith("{"):
        make_validator(" ".join(words[: 1 + (words[0] in app.COMMAND_GROUPS)])).validate(json.loads(out))


@lru_cache
def make_validator(command: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schemas.describe_command(command))


@pytest.fixture(scope="session")
def dyno() -> Any:
    """Command line in a separate process: `dyno("run", "fake:net", cwd=..., env=...)`. `code`: expected exit code, None
    for any."""

    def run(
        *words: object, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 1200.0,
        code: int | None = None,
    ) -> Any:  # fmt: skip
        every = {**os.environ, **(env or {})}
        if server := every.pop(forked.FORKS, ""):
            done = forked.command(server, [*map(str, words)], cwd or Path.cwd(), every, timeout)
        else:
            command = [sys.executable, "-m", "dyno", *map(str, words)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=every, timeout=timeout)
        assert code in (None, done.returncode), done.stdout + done.stderr
        check_json([*map(str, words)], done.stdout)
        return done

    return run


@pytest.fixture(scope="session")
def yolo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TrainedModel]:
    """YOLO trained on drawn shapes for a task, once per session: `yolo("detect")`. For tests marked `slow`.

    DYNO_TEST_YOLO: a folder that keeps the trained models for the next session.
    """
    pytest.importorskip("ultralytics", reason="no ultralytics (pip install 'inference-dyno[ultralytics]')")
    folder = Path(os.environ.get("DYNO_TEST_YOLO") or tmp_path_factory.mktemp("yolo"))
    return lru_cache(lambda task: trained(task, folder / task))


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ONNX file of a small network: right in float, wrong in int8."""
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("hostile") / "hostile.onnx"
    hostile_net.write(path)
    return path


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def other_python() -> str:
    """Path of another CPython with numpy and ONNX Runtime: `.venv-other`, or DYNO_OTHER_PYTHON."""
    python = os.environ.get("DYNO_OTHER_PYTHON", str(ROOT / ".venv-other/bin/python"))
    if not Path(python).exists():
        pytest.skip("no second CPython with numpy and onnxruntime (`make setup` makes .venv-other where it finds one)")
    tried = subprocess.run([python, "-c", "import numpy, onnxruntime"], capture_output=True, text=True, timeout=1200)
    if tried.returncode:
        pytest.skip(f"{python} lacks a library: {tried.stderr.strip().splitlines()[-1]}")
    return python


@lru_cache(maxsize=1)
def _no_gpu() -> str:
    """Return the reason why tests marked `gpu` can't run here, or ""."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return "" if pynvml.nvmlDeviceGetCount() else "no NVIDIA GPU"
    except pynvml.NVMLError as e:
        return f"no NVIDIA GPU ({e})"


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    taken = durations.read_durations()
    for item in items:
        seconds = taken.get(item.nodeid.partition("[")[0], 0.0)
        if seconds >= durations.RARE_S:
            item.add_marker(pytest.mark.rare)
        runs_studies = "preloaded" in getattr(item, "fixturenames", ())  # or runs real engines in jobs
        if runs_studies or seconds >= durations.SLOW_S or item.get_closest_marker("rare"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and _no_gpu():
            item.add_marker(pytest.mark.skip(reason=_no_gpu()))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Any]:
    """Command line in this process, in the test's folder: returns (exit code, standard output, standard error).

    Files that a command leaves must be named by its arguments or its output. An internal error fails the test unless
    `allowed`. `code`: expected exit code, None for any.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")  # as the command line sets it; a notebook of a later test has its own

    def run(*words: object, allowed: bool = False, code: int | None = None) -> tuple[int, str, str]:
        before = {path.name for path in tmp_path.iterdir()}
        monkeypatch.setattr(sys, "argv", ["dyno", *map(str, words)])
        capfd.readouterr()
        try:
            app.main()
            ended = 0
        except SystemExit as e:
            ended = int(e.code or 0)
        out, err = capfd.readouterr()
        if "internal error" in err and not allowed:
            raise AssertionError(err + Path(os.environ["DYNO_CACHE"], "last-error.log").read_text())
        check_json([*map(str, words)], out)
        named = " ".join([*map(str, words), "runs", "__pycache__", os.environ.get("DYNO_CACHE", ""), out, err])
        strays = [
            path.name
            for path in tmp_path.iterdir()
            if path.name not in before and re.split(r"[.-]", path.name)[0] not in named
        ]
        assert not strays, f"`dyno {' '.join(map(str, words))}` left {strays} in the user's folder"
        assert code in (None, ended), out + err
        return ended, out, err

    return run


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write reports as tables alone, here and in forked commands: charts take longer than the measurements of a test's
    study."""
    monkeypatch.setenv(forked.UNREPORTED, "1")
    monkeypatch.setattr(report, "write_report", forked.tables_only)


@pytest.fixture
def refused(call: Callable[..., Any]) -> Callable[..., str]:
    """Run a command with bad input; return its one-line error without the prefix."""

    def run(*words: object) -> str:
        code, out, err = call(*words)
        assert (code, out) == (2, "")
        assert err.startswith("dyno: ") and err.count("\n") == 1 and err.endswith("\n"), err
        return err[len("dyno: ") : -1]

    return run


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Write a module that this process and its jobs can import."""

    def write(name: str, text: str) -> Path:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        return tmp_path

    return write


@pytest.fixture
def drawn_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let jobs find the backend of `drawn_engine.py`, with an empty cache; return the test's folder."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("DYNO_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    """ONNX file of y = x + x for 2 x 3 x 8 x 8 images, all axes fixed."""
    pytest.importorskip("onnx")
    text = "(float[2, 3, 8, 8] input) => (float[2, 3, 8, 8] output) { output = Add(input, input) }"
    return onnx_text.write(tmp_path / "m.onnx", text, ir=9)


@pytest.fixture
def half_known(tmp_path: Path) -> Path:
    """ONNX file of two 3 x 3 determinants; ONNX Runtime has the operator, OpenVINO hasn't."""
    pytest.importorskip("onnx")
    text = "(float[2, 3, 3] x) => (float[2] y) { positive = Relu(x) y = Det(positive) }"
    return onnx_text.write(tmp_path / "half.onnx", text, ir=9)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results like the demo's, with every trial status."""
    return load_run(synthetic.write_run(tmp_path_factory.mktemp("runs") / "demo", synthetic.demo()))


@pytest.fixture(scope="session")
def hostile_names(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results with names that would break unescaped HTML, Markdown and SVG."""
    return load_run(synthetic.write_run(tmp_path_factory.mktemp("runs") / "hostile", synthetic.hostile()))
