"""`dyno compare --bisect` finds the first bad one of several Pythons, skips broken ones, says when it is undecided."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dyno.study import interpreters
from dyno.worker.spec import UserError

QUICK = ("--seconds", "0.1", "--warmup", "0.1", "--threads", "1", "--rounds", "3")


@pytest.mark.slow
def test_the_first_bad_python(call: Any, chain: Any, script: Any, slow_python: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = chain(tmp_path / "m.onnx", 20)
    broken = script(tmp_path / "broken", "exit 3")
    names = {"v1": sys.executable, "v2": sys.executable, "v3": broken, "v4": slow_python}
    pythons = ",".join(f"{name}={path}" for name, path in names.items())
    code, out, err = call(
        "compare", "--bisect", model, "--pythons", pythons, "--fail-on", "slower=100%", *QUICK, "--out", "found"
    )
    assert code == 1, (out, err)
    assert "skipped v3: the interpreter" in out
    assert "The first bad version is v4, or one of those that were skipped (v3); the last good one is v2." in out
    assert "Against v1: " in out and "the latency" in out and "Changed from v2 to v4" in out
    assert sorted(path.name for path in Path("found").iterdir()) == ["v2", "v4"], "a run folder for each"
    code, out, _ = call("compare", "--bisect", model, "--pythons", f"a={broken},b={slow_python}", *QUICK)
    assert code == 3 and "Undecided: fewer than two versions can be run." in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--library", "onnxruntime"], "give either"),
        (["n.onnx", "--versions", "1,2"], "--bisect compares versions with one model; omit B"),
        (["--summary", "s.md"], "--bisect compares versions with one model; omit --summary"),
        (["--python", f"onnxruntime={sys.executable}"], "--bisect chooses the interpreters; omit --python"),
        (["--library", "onnxruntime", "--versions", "1.0"], "two or more"),
        (["--library", "onnxruntime", "--versions", "1.0,1.0"], "twice"),
        (["--library", "nothing-at-all", "--versions", "1,2"], "no backend needs nothing-at-all"),
        (["--pythons", "old"], "is not NAME=PATH"),
        (["--pythons", "old=/nowhere/python,new=/nowhere"], "no Python interpreter at /nowhere/python; correct"),
        (["--pythons", f"a={sys.executable},a={__file__}"], "uses the name 'a' twice"),
        (["--library", "onnxruntime", "--versions", "1,2", "--fail-on", "status"], "needs a limit of slow-down"),
    ],
)
def test_what_makes_no_sense_is_one_line(refused: Any, words: list[str], said: str) -> None:
    assert said in refused("compare", "--bisect", "m.onnx", *words)
    assert refused("compare", "a", "b", "--with", "numpy") == "--with is for --bisect; add that, or omit it"


def test_uv_makes_an_environment_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uv")
    monkeypatch.setenv("DYNO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    about = "tiny-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: a\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    python = interpreters.python_with(["tiny==1.0"])
    assert Path(python).is_file() and interpreters.python_with(["tiny==1.0"]) == python
    with pytest.raises(UserError, match=r"tiny==2\.0"):
        interpreters.python_with(["tiny==2.0"])
    with pytest.raises(UserError, match="not a package with a version"):
        interpreters.python_with(["--index-url=x"])
    monkeypatch.setattr(interpreters.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="uv is not installed"):
        interpreters.python_with(["tiny==1.0"])
