"""No network access: a study with every installed backend looks up no host, in Python or in native code."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import preloaded as forked
from dyno.jobs.launcher import make_environment
from dyno.study.interpreters import list_installed
from dyno.worker.spec import Runtime
from dyno.worker.system import SILENCING_VARIABLES
from watched import Watch

ENGINES = ("onnxruntime", "openvino")

NET = """
from torch import nn

def net(num_classes=10):
    stem = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*stem, nn.Linear(16, num_classes))
"""


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.getaddrinfo('somewhere.invalid', 443)",
        "import urllib.request as r; r.urlopen('http://somewhere.invalid/')",
    ],
)
def test_python_lookups_are_detected(watch: Watch, code: str) -> None:
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **watch.env}, capture_output=True, timeout=1200)
    assert watch.hosts("python")
    assert "somewhere.invalid" in watch.hosts("python")[0]


def test_native_lookups_are_detected(watch: Watch) -> None:
    if watch.native:
        pytest.skip(watch.native)
    code = "import ctypes; ctypes.CDLL(None).getaddrinfo(b'somewhere.invalid', None, None, None)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **watch.env}, timeout=1200, check=True)
    assert watch.hosts("native") == ["getaddrinfo somewhere.invalid"]
    code = "import socket; s = socket.socket(); s.connect_ex(('192.0.2.1', 443))"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **watch.env}, timeout=1200, check=True)
    assert watch.hosts("native")[-1] == "connect an address"


def test_onnx_runtime_in_a_job_sends_nothing_and_stores_no_device_id(watch: Watch) -> None:
    """ONNX Runtime's look-up comes seconds later, but it writes a device id to the home at once."""
    onnxruntime = pytest.importorskip("onnxruntime")
    code = "import onnxruntime; print(onnxruntime.get_device())"
    talkative = {key: value for key, value in os.environ.items() if key not in ("CI", *SILENCING_VARIABLES)} | watch.env
    for env in (make_environment(Runtime(threads=1), talkative), talkative):
        kept = [path for path in Path(watch.env["HOME"]).rglob("*") if path.is_file()]
        assert not kept and not watch.hosts("native")
        subprocess.run([sys.executable, "-c", code], env=env, timeout=1200, check=True)
    if not list(Path(watch.env["HOME"]).rglob("deviceid")):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} sends nothing here anyway")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Watch]]:
    """Socket of a watched fork server, and the watch of the server itself.

    The server imports no engines: each job imports them itself, as in Dyno.
    """
    watch = Watch(tmp_path_factory.mktemp("watched"))
    server = forked.Server([name for name in forked.LIBRARIES if not name.startswith(ENGINES)], watch.env)
    yield server.path, watch
    server.stop()


@pytest.fixture
def offline(watched: tuple[str, Watch], watch: Watch, dyno: Any) -> Any:
    """Run a watched command, with its jobs; it must succeed."""

    def run(*words: object) -> Any:
        return dyno(*words, env={**watch.env, forked.FORKS: watched[0]}, code=0)

    return run


def nothing_is_looked_up(*watches: Watch) -> None:
    assert [watch.hosts("python") for watch in watches] == [[]] * len(watches)
    if why := watches[0].native:
        pytest.skip(why)
    assert [watch.hosts("native") for watch in watches] == [[]] * len(watches)


def test_a_yolo_network_makes_no_lookups_and_leaves_home_unchanged(
    watched: tuple[str, Watch], watch: Watch, offline: Any, tmp_path: Path
) -> None:
    for library in ("ultralytics", "onnxruntime"):
        pytest.importorskip(library)
    short = ("--size", 32, "--seconds", 0.03, "--block", 0.01, "--warmup", 0.02, "--rounds", 1)
    ways = ("--backend", "onnxruntime@exporter=torchscript")  # the faster exporter
    offline("run", "ultralytics:yolov8n-cls.yaml", *short, *ways, "--out", tmp_path / "run")
    assert "ltralytics" not in "".join(log.read_text() for log in (tmp_path / "run").rglob("std*.log"))
    assert not list((tmp_path / "home").rglob("*ltralytics*"))
    nothing_is_looked_up(watch, watched[1])


def test_a_study_over_every_backend_makes_no_lookups(
    watched: tuple[str, Watch], watch: Watch, offline: Any, tmp_path: Path
) -> None:
    for library in ("torch", "onnx", "sklearn"):
        pytest.importorskip(library)
    (tmp_path / "small.py").write_text(NET)
    model = (f"{tmp_path / 'small.py'}:net", "--channels", 1, "--size", 16)
    short = ("--rounds", 1, "--seconds", 0.03, "--block", 0.01, "--warmup", 0.02)
    every = list_installed("cpu")
    ways = [f"{name}@precision=int8" if name == "onnxruntime" else name for name in every]  # int8 also runs calibration
    words = ("run", *model, "--data", "digits", "--backend", ",".join(ways), *short, "--out", tmp_path / "run")
    for command in (words, ("doctor",), ("show", tmp_path / "run")):
        offline(*command)
    rows = [line.split(",") for line in (tmp_path / "run/results.csv").read_text().splitlines()[1:]]
    assert {row[1].partition("@")[0] for row in rows} == set(every)
    assert not list(Path(watch.env["HOME"]).rglob("deviceid")), "ONNX Runtime's telemetry was on"
    nothing_is_looked_up(watch, watched[1])
