"""`dyno compare` measures what isn't stored, in turns, and is a gate with three answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest

import dyno

QUICK = ("--seconds", "0.1", "--warmup", "0.1", "--threads", "1")
pytestmark = pytest.mark.usefixtures("preloaded", "unreported")


def test_two_files_in_turns_with_a_gate(call: Any, chain: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    fast, slow = chain(tmp_path / "a" / "m.onnx", 2), chain(tmp_path / "b" / "m.onnx", 100)
    words = ("compare", fast, slow, "--rounds", "3", *QUICK, "--fail-on", "slower=20%", "--out", "run")
    code, out, err = call(*words, "--junit", "ci/junit.xml", "--summary", "summary.md")
    assert code == 1 and "Measured in turns, 6 rounds" in out, err
    assert "measured again before it is judged" in err, "suspects have fresh rounds before they fail"
    assert "% is caught in 80 % of comparisons" in out and "layers 2 to 100" in out and "agree" in out
    (suite,) = Xml.parse("ci/junit.xml").getroot()
    assert "slower" in suite.find("testcase/failure").get("message")  # type: ignore[union-attr]
    assert Path("summary.md").read_text().startswith("### Dyno: regression in 1 pair")
    records = len(list(tmp_path.glob("run/trials/*/r*/record.json")))
    assert call(*words)[0] == 1 and len(list(tmp_path.glob("run/trials/*/r*/record.json"))) == records, "it is stored"
    assert call("compare", "run", "--fail-on", "status")[0] == 0
    assert call("show", "run")[0] == 0 and "holds no comparison" not in call("compare", "run")[2]
    result = dyno.compare("run", fail_on=("slower=20%",))
    assert result.exit_code == 1 and result.rows[0]["ratio_low"] > 1.2 and result.rows[0]["measured"] == "in turns"
    assert result.result is not None and {t.side for t in result.result.records} == {"a", "b"}


def test_a_stored_run_is_measured_again_beside_a_file_with_other_outputs(call: Any, chain: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    base, other = chain(tmp_path / "base.onnx", 2), chain(tmp_path / "other.onnx", 3)
    assert call("time", base, *QUICK, "--boundaries", "model", "--out", "base")[0] == 0
    # Three rounds and an elevenfold limit, the largest: networks this small differ severalfold on a busy machine.
    words = ("compare", "base", other, "--rounds", "3", "--fail-on", "slower=1000%")
    code, out, _ = call(*words, "--out", "run")
    assert code == 3 and "wrong outputs" in out, "a speed that isn't judged passes no gate"
    code, out, _ = call("compare", "run", "--fail-on", "slower=1000%", "--any-outputs")
    assert code == 0 and "A is" in out
    chain(base, 4)
    code, _, err = call(*words, "--out", "again")
    assert code == 2 and "base.onnx has changed since base was measured" in err


def test_fields_that_say_nothing_of_a_comparison_are_refused() -> None:
    with pytest.raises(dyno.UserError, match="doesn't take until"):
        dyno.compare("fake:a", "fake:b", until="decided")


def test_two_pythons(call: Any, chain: Any, slow_python: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = chain(tmp_path / "m.onnx", 20)
    words = ("--rounds", "3", *QUICK, "--fail-on", "slower=10%")
    _, out, _ = call("compare", model, "--baseline-python", f"onnxruntime={slow_python}", *words, code=0)
    assert "faster" in out and f"under {slow_python}" in out


def test_one_after_the_other_is_said(call: Any) -> None:
    fake = ("fake:one", "fake:two", "--backend", "fake@latency_ms=0.5", "--channels", "1")
    code, out, _ = call("compare", *fake, "--rounds", "2", "--samples", "20")
    assert code == 0 and "Measured one after the other, 2 rounds" in out
    call("compare", *fake, "--rounds", "2", *QUICK, "--python", "fake=/nowhere", code=2)


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
def test_what_makes_no_sense_is_one_line(refused: Any, words: list[str], said: str) -> None:
    assert said in refused("compare", *words)
