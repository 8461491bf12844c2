"""Outputs beyond a precision's tolerance: what is wrong, and what is only rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic
from synthetic import Way

from dyno.analysis.ranking import frontier
from dyno.analysis.ranking.correctness import TOLERANCES, Correctness, check
from dyno.analysis.records.results import Results, TrialResult, load
from dyno.analysis.tables import trial_table
from dyno.analysis.verdict import verdict


def _run(folder: Path, *ways: Way) -> Results:
    return load(synthetic.write_run(folder, [Way("pytorch", "fp32", 0.004), *ways]))


def _change(trial: TrialResult, change: object) -> None:
    """Rewrite the stored outputs of a trial's rounds."""
    for stored in trial.rounds:
        path = stored.folder / "outputs.npz"
        if path.exists():
            arrays = dict(np.load(path))
            arrays["output:output"] = change(arrays["output:output"])  # type: ignore[operator]
            np.savez(path, **arrays)


@pytest.mark.parametrize("precision", TOLERANCES)
def test_a_wrong_graph_is_never_ranked_whatever_its_precision_and_speed(tmp_path: Path, precision: str) -> None:
    results = _run(tmp_path / "run", Way("onnxruntime", precision, 0.00001), Way("openvino", "fp32", 0.002))
    planted = next(t for t in results if t.backend == "onnxruntime")
    _change(planted, lambda a: np.roll(a - a.mean(), 1, axis=1))  # another branch: other numbers for every input
    results = load(tmp_path / "run")
    frame = trial_table.read(results).frame.set_index("backend")
    row = frame.loc["onnxruntime"]
    assert (row["outputs"], row["verdict"].split(":")[0]) == ("wrong outputs", "wrong outputs")
    assert np.isnan(row["speedup"]) and frame.loc["openvino", "outputs"] == "agree"
    assert "onnxruntime" not in set(frontier.usable(frame.reset_index())["backend"])
    first, *others = verdict.sentences(trial_table.read(results))
    assert f"onnxruntime {precision} (batch 1) gave wrong outputs" in first and "against pytorch fp32" in first
    assert any("fastest is openvino fp32" in sentence for sentence in others)
    assert trial_table.exit_code(trial_table.read(results).frame) == 3


def test_one_input_that_takes_another_branch_is_enough_in_fp32(tmp_path: Path) -> None:
    results = _run(tmp_path / "run", Way("onnxruntime", "fp32", 0.001))

    def swap_one(a: np.ndarray) -> np.ndarray:
        a = a.copy()
        a[7] = a[7][::-1]
        return a

    _change(results.trials[1], swap_one)
    held = check(*reversed(load(tmp_path / "run").trials))
    assert held is not None and not held.ok and "fp32 allows 0.01" in held.reason


def test_the_task_decides_between_the_two_limits(tmp_path: Path) -> None:
    results = _run(tmp_path / "run", Way("onnxruntime", "int8", 0.001))
    rng = np.random.default_rng(0)
    # Noise of a fifth of the outputs' size that leaves every class where it is, then noise that moves them.
    _change(results.trials[1], lambda a: (a * (1 + 0.25 * rng.choice([-1, 1], (len(a), 1)))).astype(np.float32))
    held = check(*reversed(load(tmp_path / "run").trials))
    assert held is not None and held.ok and 0.1 < held.error < 0.6 and held.changed == 0
    results = _run(tmp_path / "other", Way("onnxruntime", "int8", 0.001))
    _change(results.trials[0], lambda a: a - 29)
    _change(results.trials[1], lambda a: np.where(rng.random((len(a), 1)) < 0.3, np.roll(a - 29, 1, 1), a - 29))
    held = check(*reversed(load(tmp_path / "other").trials))
    assert held is not None and not held.ok and held.changed is not None and held.changed > 0.1


def test_rounding_agrees_and_equal_infinities_do(tmp_path: Path) -> None:
    results = _run(tmp_path / "run", Way("onnxruntime", "fp32", 0.001))

    def masked(a: np.ndarray) -> np.ndarray:
        a = a.copy()
        a[:, 3] = -np.inf
        return a

    for trial in results:
        _change(trial, masked)
    held = check(*reversed(load(tmp_path / "run").trials))
    assert held is not None and held.ok and held.error < 1e-4 and held.reason == ""


def test_other_shapes_and_nan_are_wrong(tmp_path: Path) -> None:
    for name, change in (("shape", lambda a: a[:, :5]), ("nan", lambda a: np.where(a > 35, np.nan, a))):
        results = _run(tmp_path / name, Way("onnxruntime", "int8", 0.001))
        _change(results.trials[1], change)
        held = check(*reversed(load(tmp_path / name).trials))
        assert held is not None and not held.ok, name


def test_an_output_near_zero_for_one_input_is_held_to_the_others(tmp_path: Path) -> None:
    results = _run(tmp_path / "run", Way("onnxruntime", "fp16", 0.001))

    def nearly(value: float) -> object:
        def change(a: np.ndarray) -> np.ndarray:
            a = a.copy()
            a[0] = value
            return a

        return change

    _change(results.trials[0], nearly(1e-6))
    _change(results.trials[1], nearly(2e-6))
    held = check(*reversed(load(tmp_path / "run").trials))
    assert held is not None and held.ok


def test_four_numbers_and_a_value_of_an_input_are_not_taken_for_its_boxes(tmp_path: Path) -> None:
    results = _run(tmp_path / "run", Way("onnxruntime", "fp32", 0.001))
    for number, trial in enumerate(results.trials):
        for stored in trial.rounds:
            scores = np.load(stored.folder / "outputs.npz")["output:output"]
            four, value = scores[:, :4] - scores.mean(), -np.abs(scores[:, 0]) - number
            np.savez(stored.folder / "outputs.npz", **{"output:output": four, "output:output_1": value})
    held = check(*reversed(load(tmp_path / "run").trials))
    assert held is not None and not held.ok and "of their size" in held.reason


def test_rows_are_compared_only_where_both_left_as_many(tmp_path: Path) -> None:
    results = _run(tmp_path / "run", Way("onnxruntime", "fp32", 0.001))
    counts = np.array([3, 0, 2, 5])

    def held(change: object) -> Correctness | None:
        for number, trial in enumerate(results.trials):
            rows = np.r_[counts[0], change(counts[1:])] if number else counts  # type: ignore[operator]
            values = np.concatenate([np.arange(n) + 10.0 * i for i, n in enumerate(rows)])
            for stored in trial.rounds:
                np.savez(stored.folder / "outputs.npz", **{"output:output": values, "rows:output": rows})
        return check(*reversed(load(tmp_path / "run").trials))

    same, more, fewer = held(lambda n: n), held(lambda n: n + np.array([0, 0, 4])), held(lambda n: n * 0)
    assert same is not None and same.ok and same.error == 0
    assert more is not None and more.mismatch == "other numbers of rows for 25.0% of the inputs (fp32 allows 1%)"
    assert fewer is not None and not fewer.ok
    counts *= 0
    assert held(lambda n: n) is None  # no values: nothing was compared


def test_the_wider_of_two_tolerances_counts(tmp_path: Path) -> None:
    results = _run(tmp_path / "run", Way("onnxruntime", "int8", 0.001))
    _change(results.trials[1], lambda a: (a * 1.05).astype(np.float32))
    int8, fp32 = reversed(load(tmp_path / "run").trials)
    both = [check(int8, fp32), check(fp32, int8)]
    assert all(held is not None and held.ok and held.precision == "int8" for held in both)


def test_a_reference_that_ran_in_eight_bits_has_the_tolerance_of_eight_bits(tmp_path: Path) -> None:
    for kind, ok in (("int8", True), ("float32", False)):
        ways = [Way("pytorch", "fp32", 0.004, facts={"layers_by_type": {kind: 4}}), Way("onnxruntime", "fp32", 0.001)]
        results = load(synthetic.write_run(tmp_path / kind, ways))
        _change(results.trials[1], lambda a: (a * 1.05).astype(np.float32))
        held = check(*reversed(load(tmp_path / kind).trials))
        assert held is not None and held.ok is ok


def test_trials_of_other_weights_are_not_called_wrong(tmp_path: Path) -> None:
    other = replace(Way("onnxruntime", "fp32", 0.001), facts={"weights_sha256": "b" * 64})
    results = load(
        synthetic.write_run(tmp_path / "run", [Way("pytorch", "fp32", facts={"weights_sha256": "a" * 64}), other])
    )
    assert check(*reversed(results.trials)) is None
