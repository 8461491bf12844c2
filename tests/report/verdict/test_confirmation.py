"""What a confirmation says of the winner it confirms, or doesn't."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import synthetic
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results.trial_result import load_run
from synthetic import Way

REFERENCE, A, B = Way("pytorch", seconds=0.010), Way("a", seconds=0.005), Way("b", seconds=0.006)


def said(path: Path, selected: list[Way], again: list[Way]) -> str:
    folder = synthetic.write_run(path / "run", selected, samples=30, count=50)
    other = synthetic.write_run(path / "again", again, seed=1, samples=30, count=50)
    for way in again:
        for k, made in enumerate(sorted((other / "trials" / way.trial.id).iterdir())):
            shutil.copytree(made, folder / "trials" / way.trial.id / f"c{k}")
    loaded = load_run(folder)
    return "\n".join(verdict.list_sentences(trial_table.read_trials(loaded)))


def test_a_winner_that_holds_is_told_by_its_confirmations_alone(tmp_path: Path) -> None:
    text = said(tmp_path, [REFERENCE, A, B], [REFERENCE, replace(A, seconds=0.00502), B])
    assert "Measured again after the selection, in 3 fresh processes: 5." in text
    assert "x [1." in text.split("Measured again")[1].split("\n")[0]
    assert "as fast as pytorch fp32" in text
    assert "lucky" not in text and "is ahead" not in text


def test_a_lucky_winner_is_not_crowned(tmp_path: Path) -> None:
    text = said(tmp_path, [REFERENCE, A, B], [REFERENCE, replace(A, seconds=0.008), B])
    assert "Measured again, a fp32 is slower than in the rounds that selected it (0.6" in text
    assert "Measured again, the runner-up b fp32 is ahead, and the difference is real: 0.7" in text


def test_a_gain_that_is_gone_is_said(tmp_path: Path) -> None:
    text = said(tmp_path, [REFERENCE, A], [REFERENCE, replace(A, seconds=0.0101)])
    assert "Measured again, a fp32 is not shown to be faster than the reference." in text


def test_images_per_second_are_confirmed_too(tmp_path: Path) -> None:
    ways = [replace(way, batch=batch) for way in (REFERENCE, A, B) for batch in (1, 8)]
    text = said(tmp_path, ways, ways)
    after = text.split("most images per second with")[1]
    assert "fresh processes: 27" in after
    assert "images/s [" in after and "the images per second of pytorch fp32" in after


def test_a_confirmation_that_fails_is_a_warning(tmp_path: Path) -> None:
    text = said(tmp_path, [REFERENCE, A], [REFERENCE, replace(A, statuses=("ok", "crashed"), reason="killed")])
    assert "a fp32 failed when it was measured again: killed." in text
    assert "Measured again after the selection, in one fresh process" in text


def test_a_damaged_confirmation_is_a_problem_of_its_own(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", [A], samples=5, count=5)
    made = folder / "trials" / A.trial.id
    shutil.copytree(made / "r0", made / "c0")
    (made / "c0/record.json").write_text(json.dumps({"status": "odd", "schema": 2}))
    loaded = load_run(folder)
    assert loaded.trials[0].confirmations == [] and len(loaded.trials[0].rounds) == 3
    assert "c0/record.json is damaged (its status is 'odd')" in loaded.problems[0]
