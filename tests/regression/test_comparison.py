"""`dyno compare` measures missing trials interleaved, and is a gate with three answers."""

import re
import sys
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import numpy as np
import pytest

import dyno
import onnx_text
from dyno.study import interpreters
from refusals import refuses

QUICK = ("--seconds", "0.1", "--warmup", "0.1", "--threads", "1")
pytestmark = pytest.mark.usefixtures("preloaded", "unreported")


def test_two_files_are_compared_interleaved_with_a_gate(
    call: Any, chain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    fast, slow = chain(tmp_path / "a" / "m.onnx", 2), chain(tmp_path / "b" / "m.onnx", 100)
    words = ("compare", fast, slow, "--rounds", "3", *QUICK, "--fail-on", "slower=20%", "--out", "run")
    code, out, err = call(*words, "--junit", "ci/junit.xml", "--summary", "summary.md")
    assert code == 1 and "Measured in turns, 6 rounds" in out, err
    told = re.search(r"after round 2 of 3.*: a/m.onnx and b/m.onnx onnxruntime fp32 b1: (.*)\n", err)
    assert told and re.fullmatch(r"B takes [\d.]+x.* A's time \(slower\)\.", told[1]), err
    assert "measured again before it is judged" in err, "suspects have fresh rounds before they fail"
    assert "% is caught in 80 % of comparisons" in out and "layers 2 to 100" in out and "agree" in out
    (suite,) = Xml.parse("ci/junit.xml").getroot()
    assert "slower" in suite.find("testcase/failure").get("message")  # type: ignore[union-attr]
    assert Path("summary.md").read_text().startswith("### Dyno: regression in 1 pair")
    records = len(list(tmp_path.glob("run/trials/*/r*/record.json")))
    assert call(*words)[0] == 1 and len(list(tmp_path.glob("run/trials/*/r*/record.json"))) == records, "it is stored"
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, call("compare", "run", "--fail-on", "status", code=0)[1].splitlines())) <= 80
    assert call("show", "run")[0] == 0 and "holds no comparison" not in call("compare", "run")[2]
    result = dyno.compare("run", fail_on=("slower=20%",))
    assert result.exit_code == 1 and result.rows[0]["ratio_low"] > 1.2 and result.rows[0]["measured"] == "in turns"
    assert result.result is not None and {t.side for t in result.result.records} == {"a", "b"}


def test_a_stored_run_is_remeasured_against_a_file_with_other_outputs(call: Any, chain: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    base, other = chain(tmp_path / "base.onnx", 2), chain(tmp_path / "other.onnx", 3)
    assert call("time", base, *QUICK, "--boundaries", "model", "--out", "base")[0] == 0
    # Three rounds and the largest limit, as networks this small differ severalfold on a busy machine.
    words = ("compare", "base", other, "--rounds", "3", "--fail-on", "slower=1000%")
    code, out, err = call(*words, "--out", "run")
    assert "onnxruntime fp32 b1: B gives other outputs than A.\n" in err, "what that means, the gate decides"
    assert code == 3 and "wrong outputs" in out, "a speed that isn't judged passes no gate"
    assert "A is" in call("compare", "run", "--fail-on", "slower=1000%", "--any-outputs", code=0)[1]
    chain(base, 4)
    assert "base.onnx has changed since base was measured" in call(*words, "--out", "again", code=2)[2]


def test_fields_without_meaning_for_a_comparison_are_refused() -> None:
    refuses("doesn't take until", dyno.compare, "fake:a", "fake:b", until="decided")


def test_two_pythons(call: Any, chain: Any, slow_python: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = chain(tmp_path / "m.onnx", 20)
    words = ("--rounds", "3", *QUICK, "--fail-on", "slower=10%")
    _, out, _ = call("compare", model, "--baseline-python", f"onnxruntime={slow_python}", *words, code=0)
    assert "faster" in out and f"under {slow_python}" in out


def test_sequential_measurement_is_reported(call: Any) -> None:
    fake = ("fake:one", "fake:two", "--backend", "fake@latency_ms=0.5", "--channels", "1")
    code, out, _ = call("compare", *fake, "--rounds", "2", "--samples", "20")
    assert code == 0 and "Measured one after the other, 2 rounds" in out
    call("compare", *fake, "--rounds", "2", *QUICK, "--python", "fake=/nowhere", code=2)


def test_a_comparison_without_successful_pairs_is_reported(call: Any, tmp_path: Path) -> None:
    """A network that also failed before the change passes no gate."""
    words = ("fake:a", "fake:b", "--backend", "fake@fail=exception", "--rounds", "2", *QUICK)
    out = call("compare", *words, "--summary", str(tmp_path / "summary.md"), code=3)[1]
    assert "Nothing was compared: in no pair did both A and B run." in out
    assert (tmp_path / "summary.md").read_text().startswith("### Dyno: undecided in 1 pair")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fake:net"], "nothing to compare fake:net with"),
        (["fake:a", "fake:b", "--remeasure"], "--remeasure measures stored runs again"),
        (["fake:a", "fake:b", "--commits", "a..b"], "compare one model with itself"),
        (["fake:a", "--commits", "a..b"], "is not a file"),
        (["fake:a", "fake:b", "--fail-on", "slower=2%", "--rounds", "1"], "one round"),
        (["fake:a", "fake:b", "--fail-on", "slower=2"], "write slower=2%"),
        (["fake:a", "fake:b", "--fail-on", "slower=-1%"], "write slower=2%"),
        (["fake:a", "fake:b", "--fail-on", "status=2%"], "status takes no limit"),
        (["fake:a", "fake:b", "--fail-on", "less-accurate=2%"], "write less-accurate=0.5"),
        (["fake:a", "fake:b", "--fail-on", "slower=2%", "--tolerance", "0.1"], "contradict each other"),
        (["m.onnx@HEAD", "m.onnx"], "no git repository"),
        (["fake:a", "fake:b", "--junit", "."], "is a folder"),
        (["fake:a", "fake:b", "--junit", "/proc/none/j.xml"], "/proc/none/j.xml can't be written ("),
    ],
)
def test_invalid_options_are_refused_in_one_line(refused: Any, words: list[str], said: str) -> None:
    assert said in refused("compare", *words)


THREE = (*QUICK, "--rounds", "3")


def test_bisection_finds_the_first_slow_python(
    call: Any, chain: Any, script: Any, slow_python: Path, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    model = chain(tmp_path / "m.onnx", 20)
    broken = script(tmp_path / "broken", "exit 3")
    names = {"v1": sys.executable, "v2": sys.executable, "v3": broken, "v4": slow_python}
    pythons = ",".join(f"{name}={path}" for name, path in names.items())
    _, out, _ = call(
        "compare", "--bisect", model, "--pythons", pythons, "--fail-on", "slower=100%", *THREE, "--out", "found", code=1
    )
    assert "skipped v3: the interpreter" in out
    assert "The first bad version is v4, or one of the skipped ones (v3); the last good one is v2." in out
    assert "Against v1: " in out and "the latency" in out and "Changed from v2 to v4" in out
    assert sorted(path.name for path in Path("found").iterdir()) == ["v2", "v4"], "a run folder for each"
    code, out, _ = call("compare", "--bisect", model, "--pythons", f"a={broken},b={slow_python}", *THREE)
    assert code == 3 and "Undecided: fewer than two versions can be run." in out


ANOTHER = """
import onnxruntime

class Another(onnxruntime.InferenceSession):
    def __init__(self, model, *given, **how):
        super().__init__({path!r}, *given, **how)

onnxruntime.InferenceSession = Another
"""


@pytest.fixture
def other_model(script: Any, tmp_path: Path) -> Any:
    """Factory of Pythons with a faulty ONNX Runtime that runs the same file for every model."""

    def make(path: Path) -> Path:
        folder = tmp_path / "another"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(ANOTHER.format(path=str(path)))
        return script(folder / "python", f'PYTHONPATH="{folder}" exec "{sys.executable}" "$@"')

    return make


def test_bisection_finds_the_first_disagreeing_python(call: Any, chain: Any, other_model: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, wrong = chain(tmp_path / "m.onnx", 2), other_model(chain(tmp_path / "odd.onnx", 3))
    pythons = f"v1={sys.executable},v2={sys.executable},v3={wrong}"
    words = ("compare", "--bisect", model, "--pythons", pythons, "--rounds", "1", *QUICK)
    _, out, _ = call(*words, "--by", "agreement", "--least", "0.9", code=1)
    assert "The first bad version is v3; the last good one is v2." in out and "% of values agree" in out
    good = pythons.rpartition(",")[0]
    _, out, _ = call("compare", "--bisect", model, "--pythons", good, "--by", "agreement", *QUICK, code=0)
    assert out == "No version disagrees with v1.\n"


def test_bisection_finds_the_first_less_accurate_python(call: Any, other_model: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    means = np.stack([digits.data[digits.target == k].mean(0) for k in range(10)]) / 16
    text = "(float[batch, 1, 8, 8] x) => (float[batch, 10] y) { f = Flatten(x) p = MatMul(f, w) y = Add(p, b) }"
    w, b = means.T.astype(np.float32).copy(), (-(means**2).sum(1) / 2).astype(np.float32)  # nearest mean
    model = onnx_text.write(tmp_path / "m.onnx", text, w=w, b=b)
    wrong = other_model(onnx_text.write(tmp_path / "zero.onnx", text, w=0 * w, b=b))
    pythons = f"v1={sys.executable},v2={sys.executable},v3={wrong}"
    words = ("compare", "--bisect", model, "--pythons", pythons, "--by", "accuracy", "--rounds", "1", *QUICK)
    _, out, _ = call(*words, "--data", "digits", "--mean", "0", "--std", "1", "--fail-on", "less-accurate=1", code=1)
    assert "The first bad version is v3; the last good one is v2." in out and "less accurate, -" in out
    assert call(*words)[2] == "dyno: bisect by accuracy needs labelled images; give --data\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--by", "energy"], "unknown criterion 'energy'"),
        (["--by", "agreement", "--fail-on", "slower=5%"], "bisect by agreement needs a limit such as disagree"),
        (["--least", "0.9"], "--bisect compares versions with one model; omit --least"),
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
        (
            ["--library", "onnxruntime", "--versions", "1,2", "--fail-on", "status"],
            "bisect by speed needs a limit such as slower=5%",
        ),
    ],
)
def test_invalid_bisections_are_refused(refused: Any, words: list[str], said: str) -> None:
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
    refuses(r"tiny==2\.0", interpreters.python_with, ["tiny==2.0"])
    refuses("not a package with a version", interpreters.python_with, ["--index-url=x"])
    monkeypatch.setattr(interpreters.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    refuses("uv is not installed", interpreters.python_with, ["tiny==1.0"])
