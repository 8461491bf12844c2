"""Mixed precision is searched for where int8 fails the budget: the fewest sensitive layers stay in float."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dyno import Study, UserError
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results import trial_result
from dyno.runner import search
from dyno.study.plan import expand

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

Command = Callable[..., "subprocess.CompletedProcess[str]"]
QUICK = "--rounds 1 --seconds 0.05 --block 0.01 --warmup 0.02 --threads 1 --confirm 0".split()


@pytest.mark.slow
def test_the_command_line_finds_the_layer_that_must_stay_higher(
    hostile: Path, dyno: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", hostile, "--data", "digits", "--channels", 1, "--backends", "onnxruntime", "--precision",
             "fp32,int8", "--batch", "1,4", "--budget", "top1=2", "--out", tmp_path / "run", *QUICK]  # fmt: skip
    done = dyno(*words)
    assert done.returncode == 0, done.stderr
    frame = trial_table.read_trials(trial_result.load_run(tmp_path / "run")).frame.set_index(
        ["precision", "options", "batch"]
    )
    assert frame.loc[("int8", "", 1), "budget"] == "over"
    assert frame.loc[("int8", "keep=1", 1), "budget"] == "within"
    assert ("int8", "keep=1", 4) in frame.index, "what holds is measured at every batch"
    made_by = next(t for t in trial_result.load_run(tmp_path / "run") if t.options).made_by
    assert made_by.kept[0].op == "Conv" and made_by.kept[0].sqnr_db < 10
    assert made_by.ranked == 4
    assert [step.maker for step in made_by.steps][-2:] == ["onnx_sensitivity", "onnx_precision"]
    monkeypatch.setattr(verdict, "cpu_contention", lambda *_, **__: None)  # whatever else runs here
    loaded = trial_result.load_run(tmp_path / "run")
    said = "\n".join(verdict.list_sentences(trial_table.read_trials(loaded)))
    assert f"with 1 of 4 layers in a higher precision ({made_by.kept[0].node}) it is within" in said
    assert "chosen on the test images themselves" in said
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/trials/*/*/record.json")}
    assert dyno(*words).returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/trials/*/*/record.json")}


def steps_of(needed: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int | None, list[int]]:
    """What a search tries and finds where so many layers are needed."""
    found = search._PrecisionSearch(Study(models=("fake:x",)), Path(), None, [], [], lambda *_: None)  # type: ignore[arg-type]
    found.tried = {}

    def holds(self: Any, count: int) -> bool:
        self.tried[count] = count >= needed
        return count >= needed

    monkeypatch.setattr(search._PrecisionSearch, "_is_within_budget", holds)
    monkeypatch.setattr(search._PrecisionSearch, "_count_layers", lambda self: layers)
    return found._find_fewest(), list(found.tried)


@pytest.mark.parametrize(
    ("needed", "layers", "fewest", "tried"),
    [
        (1, 20, 1, [1]),
        (2, 20, 2, [1, 2]),
        (3, 20, 3, [1, 2, 4, 3]),
        (7, 54, 7, [1, 2, 4, 8, 6, 7]),
        (10, 20, 10, [1, 2, 4, 8, 10, 9]),
        (11, 20, None, [1, 2, 4, 8, 10]),
        (5, 2, None, [1]),
        (5, 0, None, [1]),
        (300, 700, 303, [1, 2, 4, 8, 16, 32, 64, 128, 256, 350]),
    ],
)
def test_the_fewest_layers_are_found_by_doubling_and_halving(
    needed: int, layers: int, fewest: int | None, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seen = steps_of(needed, layers, monkeypatch)
    assert seen == tried[: search.MOST]
    assert found == (fewest if needed < 300 else 350), "at the limit the last one that holds counts"


def test_only_what_has_layers_to_keep_is_tried(hostile: Path) -> None:
    study = Study(models=(str(hostile),), channels=1, data="digits", precisions=("fp16", "int8"),
                  backends=("onnxruntime", "openvino"))  # fmt: skip
    can = {(p.trial.backend, p.trial.precision): search.with_kept_layers(study, p.trial, 2) for p in expand(study)}
    assert can[("openvino", "fp16")] is None, "it lowers types itself, whatever the file says"
    made = can[("openvino", "int8")]
    assert made is not None and made.options == {"keep": 2} and made.recipe is not None
    assert made.recipe.parent.options["keep"] == 2  # type: ignore[union-attr]
    assert made.recipe.parent.parent.maker == "onnx_sensitivity"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"search": True}, "needs a budget to hold"),
        ({"confirm": -1}, "confirm is -1; it must be at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        Study(models=("fake:x",), **fields)


def test_a_budget_switches_both_on() -> None:
    plain = Study(models=("fake:x",))
    study = Study(models=("fake:x",), data="digits", budget={"top1": 1.0})
    assert (plain.confirmations, plain.searches) == (0, False)
    assert (study.confirmations, study.searches) == (3, True)
    off = Study(models=("fake:x",), data="digits", budget={"top1": 1.0}, search=False, confirm=0)
    assert (off.confirmations, off.searches) == (0, False)
    assert json.loads(json.dumps(off.to_table()))["search"] is False
