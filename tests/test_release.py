"""What is released: the package builds, its description is valid, and the wheel alone is of use."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import dyno as package

ROOT = Path(__file__).resolve().parents[1]
Call = Callable[..., str]

pytestmark = pytest.mark.slow


def run(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "hatchling", "build", "-d", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Call:
    """Runs `dyno` of the wheel, in an environment with what it requires and nothing else."""
    place = tmp_path_factory.mktemp("bare")
    (wheel,) = built.glob("*.whl")
    uv = (sys.executable, "-m", "uv")
    assert run(*uv, "venv", "--python", sys.executable, place / "env").returncode == 0
    done = run(*uv, "pip", "install", "--offline", "--python", place / "env/bin/python", wheel)
    if done.returncode:
        pytest.skip(f"uv's cache lacks what the wheel requires: {done.stderr.splitlines()[-1]}")

    def call(*words: object, code: int = 0) -> str:
        done = run(place / "env/bin/dyno", *words, cwd=place)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    return call


def test_the_description_is_valid_and_the_version_the_same_everywhere(built: Path) -> None:
    done = run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())
    assert done.returncode == 0, done.stdout + done.stderr
    version = package.__version__
    assert {path.name for path in built.iterdir()} == {
        f"inference_dyno-{version}-py3-none-any.whl", f"inference_dyno-{version}.tar.gz",
    }  # fmt: skip
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_the_distributions_hold_what_they_need(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    pages = [path.name for path in (ROOT / "src/dyno/report/page").iterdir()]
    assert {"dyno/py.typed", *(f"dyno/report/page/{name}" for name in pages)} <= set(names)
    assert not [name for name in names if name.startswith("tests") or "__pycache__" in name]
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"SECURITY.md", "CITATION.cff", "CHANGELOG.md", "Makefile", "tests/test_release.py"} <= inside
    assert {"docker/Dockerfile.gpu", "docker/compose.yaml", "docker/runs/.gitignore", ".dockerignore"} <= inside


def test_the_wheel_alone_says_what_to_install(bare: Call) -> None:
    assert bare("--version").split()[-1] == package.__version__
    assert "run" in bare("--help")
    assert "pip install" in bare("doctor", code=3), "no backend can run"
    results = ROOT / "tests/golden/run"
    assert "fastest" in bare("show", results).lower()
    assert "inference-dyno[report]" in bare("report", results, "-o", "page", code=2)
    assert "inference-dyno[" in bare("run", "torchvision:resnet18", code=2)
    assert "inference-dyno[" in bare("demo", code=2)
