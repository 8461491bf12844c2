"""The plug-in of examples/plugin, installed in a separate environment and used from the command line."""

import csv
import io
import os
import re
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import preloaded as forked

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "examples/plugin"
NET = f"{PLUGIN / 'dyno_example/numpy_net.py'}:net"
QUICK = ("--rounds", "1", "--seconds", "0.05", "--warmup", "0.02")
# Libraries that the commands need, except those hidden by a test.
LIBRARIES = ("pandas", "scipy.stats", "PIL.Image", "matplotlib.figure", "jinja2", "torch", "dyno.cli.app",
             "dyno.cli.commands", "dyno.report.report", "dyno.worker.main")  # fmt: skip
BROKEN = {"dyno.backends": "gone = no_such_module:X", "dyno.formats": "other = dyno_example.numpy_net:TYPES"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an environment of the tests' libraries, the plug-in, and broken entry points."""
    place = tmp_path_factory.mktemp("plugin")
    venv.create(place / "env", with_pip=False, symlinks=True)
    (own,) = (place / "env/lib").glob("python3*/site-packages")
    (own / "tests.pth").write_text("\n".join((str(ROOT / "src"), *site.getsitepackages())))
    words = ("-m", "uv", "pip", "install", "--offline", "--no-index", "--no-deps", "--python", place / "env/bin/python")
    done = subprocess.run([sys.executable, *words, PLUGIN], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (own / "broken-1.dist-info").mkdir()
    (own / "broken-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    points = "\n".join(f"[{group}]\n{line}" for group, line in BROKEN.items())
    (own / "broken-1.dist-info/entry_points.txt").write_text(points)
    (place / "photos").mkdir()
    rng = np.random.default_rng(0)
    for k in range(6):
        Image.fromarray(rng.integers(0, 256, (12, 12), np.uint8)).save(place / f"photos/{k}.png")
    table = "\n".join(("photo,class", *(f"{k}.png,{'ab'[k % 2]}" for k in range(6))))
    (place / "photos/labels.csv").write_text(table)
    return place


@pytest.fixture(scope="module")
def dyno(place: Path) -> Iterator[Any]:
    """Run a command in that environment; any exit code but `code` fails. With `env`, start it without forking."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**clean, "DYNO_CACHE": str(place / "cache")}
    python = place / "env/bin/python"
    server = forked.Server(LIBRARIES, {"PYTHONPATH": ""}, python)

    def call(*words: object, code: int = 0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        if env:
            command = [python, "-m", "dyno", *map(str, words)]
            own = {**environment, **env}
            done = subprocess.run(command, cwd=place, env=own, capture_output=True, text=True, timeout=1200)
        else:
            brief = {forked.UNREPORTED: "1"} if words[0] == "run" else {}  # `report` has its own test
            done = forked.command(server.path, [*map(str, words)], place, {**environment, **brief}, 1200)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    yield call
    server.stop()


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture(scope="module")
def built(dyno: Any, place: Path) -> Path:
    """A .npnet file; its format, maker and backend are the plug-in's."""
    dyno("export", NET, "-o", "net.npnet", "--channels", 1, "--size", 8, "--classes", 2)
    return place / "net.npnet"


def test_doctor_names_working_and_broken_plugins(dyno: Any, tmp_path: Path) -> None:
    for name in ("torch", "onnxruntime", "openvino"):  # slow trials, covered by another test
        (tmp_path / f"{name}.py").write_text("raise ImportError('hidden')")
    shown = dyno("doctor", "--format", "csv", env={"PYTHONPATH": str(tmp_path)})
    found = {row["backend"]: row for row in rows(shown.stdout)}
    assert found["pytorch"]["status"] != "ok"
    assert (found["numpy_net"]["status"], found["numpy_net"]["devices"]) == ("ok", "cpu")
    assert {name: found[name]["status"] for name in ("gone", "other")} == {"gone": "broken", "other": "broken"}
    assert "no_such_module" in found["gone"]["detail"] and "dyno.backends" in found["gone"]["detail"]
    assert "is dict, not FileFormat" in found["other"]["detail"]


def test_a_plugin_backend_runs_its_own_file_format(dyno: Any, built: Path) -> None:
    (row,) = rows(dyno("time", built, *QUICK, "--format", "csv").stdout)
    assert (row["backend"], row["status"], row["size"]) == ("numpy_net", "ok", "8")
    assert row["ran_as"] == "3 fp32"


def test_a_plugin_backend_runs_with_the_others(dyno: Any, place: Path) -> None:
    asked = ("--channels", 1, "--size", 8, "--compared", 3, "--precision", "fp32,int8", "--out", "run")
    dyno("run", NET, "--backend", "pytorch,numpy_net@order=F", *asked, *QUICK)
    shown = rows(dyno("show", "run", "--format", "csv").stdout)
    found = {(row["backend"], row["precision"]): row for row in shown}
    own = found["numpy_net", "fp32"]
    assert own["status"] == "ok" and own["outputs"] == "agree"
    assert "numpy_net has no int8" in found["numpy_net", "int8"]["reason"]


def test_plugin_tables_and_charts_are_shown(dyno: Any, built: Path, place: Path) -> None:
    dyno("time", built, *QUICK, "--out", "timed")
    assert "A row per trial: images per second." in dyno("show", "--list").stdout
    (row,) = rows(dyno("show", "timed", "--table", "speeds", "--format", "csv").stdout)
    assert float(row["fps"]) > 0
    page = Path(dyno("report", "timed").stdout.strip())
    assert "Images per second of each trial" in (place / page).read_text(encoding="utf-8")
    assert (place / "timed/charts/speeds.png").is_file() and (place / "timed/tables/speeds.csv").is_file()


def test_a_plugin_data_format_has_labels(dyno: Any, built: Path) -> None:
    (row,) = rows(dyno("eval", built, "--data", "photos", *QUICK, "--format", "csv").stdout)
    assert row["status"] == "ok" and 0 <= float(row["top1"]) <= 100


def test_a_plugin_task_stores_its_own_answers(dyno: Any, built: Path, place: Path) -> None:
    dyno("export", NET, "-o", "one.npnet", "--channels", 1, "--size", 8, "--classes", 1)
    dyno("run", "one.npnet", "--task", "grade", "--data", "photos", "--out", "graded", *QUICK)
    (path,) = (place / "graded/trials").glob("*/r0/outputs.npz")
    with np.load(path) as stored:
        assert stored["grade"].shape == (6,) and stored["label"].tolist().count(1) == 3
        np.testing.assert_allclose(stored["grade"], stored["output:output"][:, 0])
        stored_grade, stored_label = stored["grade"], stored["label"]
    (row,) = rows(dyno("show", "graded", "--format", "csv", "--budget", "nearest=100").stdout)
    right = np.rint(stored_grade) == stored_label
    assert float(row["nearest"]) == pytest.approx(100 * right.mean()) and float(row["nearest_high"]) > 0
    assert row["budget"] == "within" and float(row["nearest_diff"]) == 0
    assert "nearest grade %" in dyno("show", "graded", "--table", "classification").stdout
    wrong = dyno("run", built, "--task", "grade", "--data", "photos", code=2)
    assert "a network for grade gives batch x 1" in wrong.stderr


def test_the_plugin_backend_passes_the_contract_tests(place: Path) -> None:
    words = ["-m", "pytest", "-q", ROOT / "tests/test_contract.py", "-k", "numpy_net", "-p", "no:cacheprovider"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [place / "env/bin/python", *words], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 10 and "skipped" not in done.stdout
