"""The GitHub Action: its steps, run here as a runner would, on a model that a commit made slower."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest

from dyno.regression.commands import compare  # noqa: F401  (what the action calls)

ONLINE = ("Install Dyno",)


class Runner:
    """Does of a composite action what needs no network: the `run` steps, with expressions filled in."""

    def __init__(self, root: Path, folder: Path, **inputs: str) -> None:
        yaml = pytest.importorskip("yaml")
        self.action = yaml.safe_load((root / "action" / "action.yml").read_text())
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
        """The exit code of each step that was run, by its name; a failed one ends it, but for those that always run."""
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


@pytest.mark.rare
def test_the_steps_of_the_action(root: Path, chain: Any, tmp_path: Path, git: Any) -> None:
    repository = tmp_path / "repository"
    model = chain(repository / "nets" / "m.onnx", 2)
    git(repository)
    chain(model, 100)
    before = model.read_bytes()
    inputs = {"a": "nets/m.onnx@HEAD", "b": "nets/m.onnx", "options": "--rounds 3 --seconds 0.1 --threads 1"}
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
def test_the_verdict_of_the_action(root: Path, tmp_path: Path, code: str, cant_tell: str, ends: int) -> None:
    runner = Runner(root, tmp_path, a="none", **{"cant-tell": cant_tell})
    runner.action["runs"]["steps"] = [s for s in runner.action["runs"]["steps"] if s["name"] == "Verdict"]
    runner.values["steps.gate.outputs.code"] = code
    assert runner.run(tmp_path) == {"Verdict": ends}


def test_the_workflow_in_the_documents_gives_inputs_that_there_are(root: Path) -> None:
    yaml = pytest.importorskip("yaml")
    blocks = re.findall(r"^```yaml\n(.*?)^```", (root / "docs" / "ci.md").read_text(), re.M | re.S)
    known = yaml.safe_load((root / "action" / "action.yml").read_text())["inputs"].keys()
    steps = [s for block in blocks for job in yaml.safe_load(block)["jobs"].values() for s in job["steps"]]
    given = [s["with"] for s in steps if "/action@" in s.get("uses", "")]
    assert given and all(each.keys() <= known and "a" in each for each in given)
