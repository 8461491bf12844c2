"""The gate of a comparison: beyond the limit, within it, or undecided; its sentences; its detectable slowdown."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import numpy as np
import pytest
from scipy.stats import t

import dyno
import synthetic
from dyno.regression import comparison
from dyno.regression.commands import compare  # noqa: F401  (what the action calls)
from dyno.regression.rules import GateRules, smallest_slowdown
from dyno.results import stats
from dyno.worker.record import write_json
from refusals import refuses
from synthetic import Way

BASE = Way("pytorch", seconds=0.004, spread=0.001)


@pytest.fixture
def gate(tmp_path: Path) -> Any:
    """Compare BASE as run A with a changed BASE as run B, against a limit."""

    def run(limit: str = "slower=5%", edit: Callable[[Path], None] | None = None, **changes: Any) -> dyno.Comparison:
        for name in "ab":
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        a, b = (synthetic.write_run(tmp_path / name, [way], samples=40, count=50)
                for name, way in (("a", BASE), ("b", replace(BASE, **changes))))  # fmt: skip
        if edit:
            edit(b)
        return dyno.compare(a, b, fail_on=(limit,))

    return run


def test_gates_pass_fail_or_stay_undecided(gate: Any) -> None:
    assert gate().exit_code == 0
    slower = gate(seconds=0.0048)
    assert slower.exit_code == 1 and "failed: " in " ".join(slower.verdicts)
    within = gate("slower=30%", seconds=0.0048)
    assert within.exit_code == 0 and 30 < within.rows[0]["smallest"] < 35, "slower, but less than is allowed"
    wide = gate("slower=1%", spread=0.05)
    assert wide.exit_code == 3 and "too few rounds for this spread" in wide.rows[0]["undecided"]
    assert any("undecided: digits pytorch fp32" in line for line in wide.verdicts)
    assert any("one after the other" in line for line in wide.verdicts)


def test_meaningless_digits_are_left_out(gate: Any) -> None:
    """With two very different rounds the interval may reach 1e40 %."""
    found = gate("slower=2%", seconds=0.05, spread=3.0, statuses=("ok", "ok"))
    (undecided,) = (line for line in found.verdicts if line.startswith("undecided"))
    (caught,) = (line for line in found.verdicts if "is caught" in line)
    assert "the interval reaches more than 1,000 %, and 2 % are allowed" in undecided
    assert "a slow-down of more than 1,000 % is caught" in caught


def test_contradicting_limits_are_refused() -> None:
    refuses("slower=2%, slower=5% contradict each other", GateRules, fail_on=("slower=2%", "slower=5%"))
    with pytest.raises(dyno.UserError, match=r"less-accurate=0\.5, less-accurate=1 contradict each other"):
        GateRules(fail_on=("less-accurate=0.5", "less-accurate=1"))
    assert GateRules(fail_on=("slower=5%", "status", "slower=5.0%")).tolerance == 0.05


def test_a_gate_without_conditions_is_refused() -> None:
    refuses("fail_on is empty, so nothing would fail; give one or several of slower", GateRules, fail_on=())
    assert GateRules(fail_on=(), least=0.9).fail_on == ("disagree",)


def test_rules_of_the_wrong_type_are_refused() -> None:
    assert GateRules(fail_on="slower=5%", tolerance=np.float64(0.05)).fail_on == ("slower",)  # type: ignore[arg-type]
    with pytest.raises(dyno.UserError, match=r"tolerance is .* must be a number"):
        GateRules(tolerance="2%")  # type: ignore[arg-type]


def elsewhere(run: Path) -> None:
    environment = json.loads((run / "environment.json").read_text())
    write_json(run / "environment.json", {**environment, "cpu": "Another CPU"})


def disturbed(run: Path) -> None:
    for path in run.parent.glob("*/trials/*/r*/record.json"):
        record = json.loads(path.read_text())
        record["facts"] |= {"others_busy": {"model": 1.5}, "contention_threshold": 0.2}
        write_json(path, record)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"statuses": ("ok",)}, "one round only"),
        ({"statuses": ("failed",), "reason": "no"}, "B is failed"),
        ({"edit": elsewhere}, "another machine (cpu Synthetic CPU against Another CPU)"),
        ({"edit": elsewhere, "seconds": 0.04}, "measure it again here with --remeasure"),
        ({"edit": disturbed, "seconds": 0.04}, "1.5 processors busy"),
    ],
)
def test_insufficient_evidence_is_undecided(gate: Any, changes: dict[str, Any], words: str) -> None:
    found = gate(**changes)
    assert found.exit_code == 3 and words in found.rows[0]["undecided"]
    assert not found.rows[0]["failed"]


@pytest.mark.parametrize(("rounds", "pairs"), [(3, 1), (5, 1), (10, 1), (5, 8)])
def test_the_smallest_slowdown_is_caught_in_80_percent(rounds: int, pairs: int) -> None:
    error, tolerance, rng = 0.01, 0.02, np.random.default_rng(0)
    level = 0.05 / pairs
    smallest = smallest_slowdown(error, rounds - 1, level, tolerance)
    logs = np.log1p(smallest) + error * np.sqrt(rounds) * rng.standard_normal((40_000, rounds))
    seen = logs.std(axis=1, ddof=1) / np.sqrt(rounds) * t.ppf(1 - level / 2, rounds - 1)
    assert np.mean(logs.mean(axis=1) - seen > np.log1p(tolerance)) == pytest.approx(0.8, abs=0.01)


def test_pairs_are_judged_as_one_family(tmp_path: Path) -> None:
    """A significant difference may be chance among many pairs; the sentences name the correction."""
    others = [Way(f"like{k}", seconds=0.004) for k in range(12)]
    comparisons = []
    for name, more in (("alone", []), ("among", others)):
        for run, seconds in (("a", 0.004), ("b", 0.00418)):
            synthetic.write_run(tmp_path / name / run, [Way("x", seconds=seconds), *more], samples=40, count=300)
        comparisons.append(dyno.compare(tmp_path / name / "a", tmp_path / name / "b", tolerance=0.0))
    alone, among = (one.to_pandas().set_index("backend").loc["x"] for one in comparisons)
    assert (alone["verdict"], among["verdict"]) == (stats.SLOWER, stats.UNDECIDED)
    assert among["p_value"] == pytest.approx(13 * alone["p_value"])
    assert among["ratio_low"] < alone["ratio_low"] and among["smallest"] > alone["smallest"]
    sentences = [" ".join(one.verdicts) for one in comparisons]
    assert "family" not in sentences[0] and "The 13 pairs are one family (Holm)" in sentences[1]


@pytest.mark.parametrize(
    ("smallest", "span"), [((2.01, 2.04), "2.0"), ((2.0, 4.4, 3.0), "2.0 to 4.4"), ((3.0,), "3.0")]
)
def test_equal_ends_of_a_range_are_written_once(smallest: tuple[float, ...], span: str) -> None:
    (said,) = comparison._describe_power([{"smallest": each} for each in smallest])
    assert f"a slow-down of {span} % is caught" in said


ONLINE = ("Install Dyno",)


class Runner:
    """Runs the offline `run` steps of a composite action, with expressions filled in."""

    def __init__(self, root: Path, folder: Path, **inputs: str) -> None:
        self.action = pytest.importorskip("yaml").safe_load((root / "action" / "action.yml").read_text())
        known = {name: str(each.get("default", "")) for name, each in self.action["inputs"].items()}
        assert inputs.keys() <= known.keys()
        self.values = {f"inputs.{name}": value for name, value in {**known, **inputs}.items()}
        self.temp = folder / "temp"
        self.temp.mkdir()
        self.values["runner.temp"] = str(self.temp)
        for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"):
            (self.temp / name).touch()
        (self.temp / "bin").mkdir()
        (self.temp / "bin" / "dyno").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dyno "$@"\n')
        (self.temp / "bin" / "dyno").chmod(0o755)

    def filled(self, text: str) -> str:
        return re.sub(r"\$\{\{ *(.+?) *\}\}", lambda found: self.values[found[1]], text)

    def run(self, cwd: Path) -> dict[str, int]:
        """Run the steps; return exit codes by name. A failure ends the action, except steps that always run."""
        codes: dict[str, int] = {}
        for step in self.action["runs"]["steps"]:
            if "run" not in step or step["name"] in ONLINE:
                continue
            env = {name: self.filled(value) for name, value in step.get("env", {}).items()}
            own = {name: str(self.temp / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
            path = f"{self.temp / 'bin'}{os.pathsep}{os.environ['PATH']}"
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            done = subprocess.run(command, cwd=cwd, env={**os.environ, **own, **env, "PATH": path}, timeout=1200)
            codes[step["name"]] = done.returncode
            told = [line.partition("=") for line in Path(own["GITHUB_OUTPUT"]).read_text().splitlines()]
            if "id" in step:
                self.values |= {f"steps.{step['id']}.outputs.{name}": value for name, _, value in told}
        return codes


def test_the_action_fails_on_a_regression_and_leaves_the_checkout(
    root: Path, chain: Any, tmp_path: Path, git: Any
) -> None:
    repository = tmp_path / "repository"
    model = chain(repository / "nets" / "m.onnx", 2)
    git(repository)
    chain(model, 100)
    before = model.read_bytes()
    inputs = {"a": "nets/m.onnx@HEAD", "b": "nets/m.onnx", "options": "--rounds 3\n--seconds 0.1 --threads 1\n"}
    runner = Runner(root, tmp_path, **inputs, **{"fail-on": "slower=20%"})
    (runner.temp / "GITHUB_STEP_SUMMARY").write_text("# of another step\n")
    assert runner.run(repository) == {"Compare": 0, "Report": 0, "Verdict": 1}
    (suite,) = Xml.parse(runner.temp / "dyno" / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "1", "0")
    summary = (runner.temp / "GITHUB_STEP_SUMMARY").read_text()
    assert summary.startswith("# of another step\n### Dyno: regression in 1 pair") and "| slower" in summary
    assert (runner.temp / "dyno" / "report" / "report.html").is_file()
    status = subprocess.run(["git", "status", "--short"], cwd=repository, capture_output=True, text=True).stdout
    assert status == " M nets/m.onnx\n" and model.read_bytes() == before, "the checkout is left alone"


@pytest.mark.parametrize(
    ("code", "cant_tell", "ends"),
    [("0", "fail", 0), ("1", "pass", 1), ("3", "fail", 3), ("3", "pass", 0), ("2", "pass", 2)],
)
def test_the_exit_code_of_the_action_follows_cant_tell(
    root: Path, tmp_path: Path, code: str, cant_tell: str, ends: int
) -> None:
    runner = Runner(root, tmp_path, a="none", **{"cant-tell": cant_tell})
    runner.action["runs"]["steps"] = [s for s in runner.action["runs"]["steps"] if s["name"] == "Verdict"]
    runner.values["steps.gate.outputs.code"] = code
    assert runner.run(tmp_path) == {"Verdict": ends}


def test_the_documented_workflow_uses_existing_inputs(root: Path) -> None:
    yaml = pytest.importorskip("yaml")
    blocks = re.findall(r"^```yaml\n(.*?)^```", (root / "docs" / "ci.md").read_text(), re.M | re.S)
    known = yaml.safe_load((root / "action" / "action.yml").read_text())["inputs"].keys()
    steps = [s for block in blocks for job in yaml.safe_load(block)["jobs"].values() for s in job["steps"]]
    given = [s["with"] for s in steps if "/action@" in s.get("uses", "")]
    assert given and all(each.keys() <= known and "a" in each for each in given)


@pytest.mark.parametrize(("fail_on", "ends"), [("status", 0), ("less-accurate=9%", 2)])
def test_the_gitlab_template_runs_its_job(root: Path, tmp_path: Path, fail_on: str, ends: int) -> None:
    yaml = pytest.importorskip("yaml")
    (name, job), *others = yaml.safe_load((root / "action" / "gitlab.yml").read_text()).items()
    assert (name, others) == (".dyno", []) and job["artifacts"]["reports"] == {"junit": "dyno/junit.xml"}
    options = "--backend fake@latency_ms=0.5 --channels 1\n--rounds 2 --samples 5"
    given = {
        "DYNO_A": "fake:a", "DYNO_B": "fake:b", "DYNO_FAIL_ON": fail_on, "DYNO_OPTIONS": options, "DYNO_INSTALL": "",
    }  # fmt: skip
    assert given.keys() <= job["variables"].keys() and all(isinstance(v, str) for v in job["variables"].values())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dyno").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dyno "$@"\n')
    (tmp_path / "bin" / "dyno").chmod(0o755)
    env = {**os.environ, **job["variables"], **given, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    codes = [
        subprocess.run(["bash", "-eo", "pipefail", "-c", line], cwd=tmp_path, env=env, timeout=1200).returncode
        for line in (*job["before_script"], *job["script"], *job["after_script"])
    ]
    assert codes == [0, ends, 0]
    if ends == 0:
        assert dyno.Study.from_toml(tmp_path / "dyno/run/study.toml").rounds == 2, "the second line of the options"
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("dyno/*"))
    assert written == ([f"dyno/{each}" for each in ("junit.xml", "report", "run", "summary.md")] if ends == 0 else [])
