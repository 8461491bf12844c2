"""Outputs beyond a precision's tolerance: wrong results told apart from rounding."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

import synthetic
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results import ranking
from dyno.results.correctness import TOLERANCES, Correctness, check_correctness
from dyno.results.stats.intervals import MAX_SAMPLES, estimate_needed
from dyno.results.trial_result import Results, TrialResult, load_run
from dyno.worker.facts.files import MakerFacts
from dyno.worker.spec import Artifact
from synthetic import Way


def _run(folder: Path, *ways: Way) -> Results:
    return load_run(synthetic.write_run(folder, [Way("pytorch", "fp32", 0.004), *ways]))


def _change(trial: TrialResult, change: Any) -> None:
    """Rewrite the outputs stored by a trial's rounds: by a function, to an array, or to several named outputs."""
    for path in [stored.folder / "outputs.npz" for stored in trial.rounds]:
        arrays = dict(np.load(path))
        new = change(arrays["output:output"]) if callable(change) else change
        np.savez(path, **(new if isinstance(new, dict) else {**arrays, "output:output": new}))


def _judge(folder: Path, precision: str, own: Any, reference: Any = lambda a: a, finite: bool = False) -> Correctness:
    """Return the agreement of an engine's changed outputs with its reference's; `finite` records which are finite."""
    for trial, change in zip(_run(folder, Way("onnxruntime", precision, 0.001)), (reference, own), strict=True):
        _change(trial, change)
        for path in [stored.folder / "record.json" for stored in trial.rounds] if finite else ():
            record = json.loads(path.read_text())
            outputs = np.load(path.with_name("outputs.npz"))["output:output"]
            path.write_text(
                json.dumps({**record, "facts": record["facts"] | {"finite": bool(np.isfinite(outputs).all())}})
            )
    held = check_correctness(*reversed(load_run(folder).trials))
    assert held is not None
    return held


@pytest.mark.parametrize("precision", TOLERANCES)
def test_a_wrong_graph_is_never_ranked(tmp_path: Path, precision: str) -> None:
    exported = Way("onnxruntime", precision, 0.00001, facts={"exporter": "dynamo", "opset": 18})
    results = _run(tmp_path / "run", exported, Way("openvino", "fp32", 0.002))
    planted = next(t for t in results if t.backend == "onnxruntime")
    _change(planted, lambda a: np.roll(a - a.mean(), 1, axis=1))  # another branch: other numbers for every input
    results = load_run(tmp_path / "run")
    frame = trial_table.read_trials(results).frame.set_index("backend")
    row = frame.loc["onnxruntime"]
    assert (row["outputs"], row["verdict"].split(":")[0]) == ("wrong outputs", "wrong outputs")
    assert np.isnan(row["speedup"]) and frame.loc["openvino", "outputs"] == "agree"
    assert "onnxruntime" not in set(ranking.list_usable(frame.reset_index())["backend"])
    first, *others = verdict.list_sentences(trial_table.read_trials(results))
    assert f"onnxruntime {precision} (batch 1) gave wrong outputs" in first and "against pytorch fp32" in first
    assert f"dyno diff MODEL onnxruntime/{precision} --layers" in first
    assert any("fastest is openvino fp32" in sentence for sentence in others)
    assert trial_table.exit_code(trial_table.read_trials(results).frame) == 3


def test_one_input_taking_another_branch_fails_fp32(tmp_path: Path) -> None:
    held = _judge(tmp_path, "fp32", lambda a: np.concatenate([a[:7], a[7:8, ::-1], a[8:]]))
    assert not held.ok and "fp32 allows 0.01" in held.reason


def test_changed_classes_decide_between_the_two_limits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    # Noise of a fifth of the outputs' size that keeps every class, then noise that changes classes.
    noise = lambda a: (a * (1 + 0.25 * rng.choice([-1, 1], (len(a), 1)))).astype(np.float32)  # noqa: E731
    held = _judge(tmp_path / "run", "int8", noise)
    assert held.ok and 0.1 < held.error < 0.6 and held.changed == 0
    moved = lambda a: np.where(rng.random((len(a), 1)) < 0.3, np.roll(a - 29, 1, 1), a - 29)  # noqa: E731
    held = _judge(tmp_path / "other", "int8", moved, lambda a: a - 29)
    assert not held.ok and held.changed is not None and held.changed > 0.1


def test_rounding_and_equal_infinities_agree(tmp_path: Path) -> None:
    held = _judge(tmp_path, "fp32", *[lambda a: np.where(np.arange(10) == 3, np.float32(-np.inf), a)] * 2)
    assert held.ok and held.error < 1e-4 and held.reason == ""


def test_values_non_finite_on_one_side_are_wrong(tmp_path: Path) -> None:
    def planted(name: str, own: float, reference: float) -> Correctness:
        changes = (lambda a, v=v: np.where(np.arange(10) == 3, np.float32(v), a) for v in (own, reference))
        return _judge(tmp_path / name, "fp16", *changes, finite=True)

    assert planted("same", np.nan, np.nan).ok and planted("minus", -np.inf, -np.inf).ok
    for name, own, reference in (("overflow", np.inf, 7e4), ("nan", np.nan, 1), ("sign", np.inf, -np.inf)):
        held = planted(name, own, reference)
        assert not held.ok and held.reason.startswith("the outputs are not finite (NaN or infinity)"), name
    assert planted("theirs", 1, np.nan).reason.startswith("the reference's outputs are NaN or infinite where")


def test_changed_classes_count_despite_equal_infinities(tmp_path: Path) -> None:
    def mask(a: np.ndarray) -> np.ndarray:
        return np.where(np.arange(10) == 3, np.float32(-np.inf), a - 29)

    def swap(a: np.ndarray) -> np.ndarray:  # swaps the best class of each second input with the next class
        a = mask(a)
        best = a[::2].argmax(axis=1)
        a[::2][np.arange(len(best)), best] -= 0.3 * np.abs(a[:, 4:]).max()
        return a

    held = _judge(tmp_path, "int8", swap, mask, finite=True)
    assert held.changed is None or held.changed > 0


def test_different_shapes_and_nan_are_wrong(tmp_path: Path) -> None:
    for name, change in (("shape", lambda a: a[:, :5]), ("nan", lambda a: np.where(a > 35, np.nan, a))):
        assert not _judge(tmp_path / name, "int8", change).ok, name


def test_outputs_near_zero_are_scaled_by_the_other_inputs(tmp_path: Path) -> None:
    changes = (lambda a, v=v: np.concatenate([np.full_like(a[:1], v), a[1:]]) for v in (2e-6, 1e-6))
    assert _judge(tmp_path, "fp16", *changes).ok


def test_four_numbers_and_a_value_are_not_taken_for_boxes(tmp_path: Path) -> None:
    def split(a: np.ndarray, number: int) -> dict[str, np.ndarray]:
        return {"output:output": a[:, :4] - a.mean(), "output:output_1": -np.abs(a[:, 0]) - number}

    held = _judge(tmp_path, "fp32", lambda a: split(a, 1), lambda a: split(a, 0))
    assert not held.ok and "of their size" in held.reason


@pytest.mark.parametrize(("shift", "ok"), [(1, True), (2, False)])
def test_boxes_may_be_off_by_the_limit(tmp_path: Path, shift: int, ok: bool) -> None:
    """Boxes of ten pixels: one is the tenth that fp16 allows."""
    left, rest = np.arange(7.0), np.ones(7)

    def rows(by: int) -> np.ndarray:
        image = np.stack([left + by, 0 * rest, left + by + 10, 10 * rest, 0.9 * rest, left], axis=1)
        return np.repeat(image[None], 9, axis=0).astype(np.float32)

    held = _judge(tmp_path, "fp16", rows(shift), rows(0))
    assert (held.ok, held.error, held.changed) == ((True, 0.1, 0) if ok else (False, 0, 1))
    assert ok or held.reason.startswith("100.0% of the boxes have no partner or are off by more than 0.1 of their size")


def test_scores_pair_boxes_at_the_same_place(tmp_path: Path) -> None:
    rows = np.array([[x, 0, x + 10, 10, score, 0] for x in (0, 20) for score in (0.9, 0.7, 0.5, 0.3)], np.float32)
    own, reference = (np.repeat(rows[order][None], 9, axis=0) for order in ([4, 2, 7, 0, 6, 1, 5, 3], [*range(8)]))
    held = _judge(tmp_path, "fp32", own, reference)
    assert (held.ok, held.error, held.changed) == (True, 0, 0)


def test_rows_are_compared_only_where_counts_match(tmp_path: Path) -> None:
    results = _run(tmp_path / "run", Way("onnxruntime", "fp32", 0.001))
    counts = np.array([3, 0, 2, 5])

    def held(change: object) -> Correctness | None:
        for number, trial in enumerate(results.trials):
            rows = np.r_[counts[0], change(counts[1:])] if number else counts  # type: ignore[operator]
            values = np.concatenate([np.arange(n) + 10 * i + 0.5 for i, n in enumerate(rows)])
            _change(trial, {"output:output": values, "rows:output": rows})
        return check_correctness(*reversed(load_run(tmp_path / "run").trials))

    same, more, fewer = held(lambda n: n), held(lambda n: n + np.array([0, 0, 4])), held(lambda n: n * 0)
    assert same is not None and same.ok and same.error == 0
    assert more is not None and more.mismatch == "different numbers of rows for 25.0% of the inputs (fp32 allows 1%)"
    assert fewer is not None and not fewer.ok
    counts *= 0
    assert held(lambda n: n) is None  # without values nothing was compared


def test_the_wider_tolerance_applies(tmp_path: Path) -> None:
    _judge(tmp_path, "int8", lambda a: (a * 1.05).astype(np.float32))
    int8, fp32 = reversed(load_run(tmp_path).trials)
    both = [check_correctness(int8, fp32), check_correctness(fp32, int8)]
    assert all(held is not None and held.ok and held.precision == "int8" for held in both)


def test_an_int8_reference_gets_the_int8_tolerance(tmp_path: Path) -> None:
    for kind, ok in (("int8", True), ("float32", False)):
        ways = [Way("pytorch", "fp32", 0.004, facts={"layers_by_type": {kind: 4}}), Way("onnxruntime", "fp32", 0.001)]
        results = load_run(synthetic.write_run(tmp_path / kind, ways))
        _change(results.trials[1], lambda a: (a * 1.05).astype(np.float32))
        held = check_correctness(*reversed(load_run(tmp_path / kind).trials))
        assert held is not None and held.ok is ok


@pytest.mark.parametrize(("scheme", "error", "ok"), [("", 0.15, True), ("", 0.4, False), ("U8S8", 0.4, True)])
def test_two_engines_share_the_error_of_a_prequantised_file(
    tmp_path: Path, scheme: str, error: float, ok: bool
) -> None:
    """OpenVINO is 43 % off on MobileNetV2 as quantised by ONNX Runtime; files quantised by Dyno differ by engine."""
    ways = [Way("onnxruntime", "int8", 0.001), Way("openvino", "int8", 0.001)]
    results = load_run(synthetic.write_run(tmp_path, ways))
    _change(results.trials[1], lambda a: a * np.float32(1 + error))
    artifact = Artifact("onnx", "q.onnx", "", 0, "int8", (), (), 0.0, made_by=MakerFacts(scheme=scheme))
    first, second = (
        replace(t, spec=replace(t.spec, model=replace(t.spec.model, source="file:q.onnx")), job_artifact=artifact)
        for t in load_run(tmp_path).trials
    )
    held = check_correctness(second, first)
    assert held is not None and held.ok is ok
    assert ok or held.reason == "off by 0.40 of their size (one int8 file allows 0.2)"


def test_trials_of_other_weights_are_not_called_wrong(tmp_path: Path) -> None:
    other = replace(Way("onnxruntime", "fp32", 0.001), facts={"weights_sha256": "b" * 64})
    results = load_run(
        synthetic.write_run(tmp_path / "run", [Way("pytorch", "fp32", facts={"weights_sha256": "a" * 64}), other])
    )
    assert check_correctness(*reversed(results.trials)) is None


def _class_maps(
    folder: Path, precision: str, change: Callable[[np.ndarray], None], dtype: str = "int64"
) -> Correctness:
    """Judge a class map of 40 classes against a copy changed in place, as if by another engine."""
    reference = np.random.default_rng(1).integers(0, 40, (12, 64, 64)).astype(dtype)
    own = reference.copy()
    change(own)
    held = _judge(folder, precision, own, reference)
    assert held.labels_changed == pytest.approx((own != reference).mean())
    return held


@pytest.mark.parametrize(
    ("inputs", "changed", "ok"),
    [
        (32, 0, True), (32, 1, True), (32, 2, False), (12, 1, True), (4, 1, False), (400, 4, True), (400, 8, True),
        (400, 9, False),
    ],
)  # fmt: skip
def test_one_changed_answer_does_not_make_an_engine_wrong(tmp_path: Path, inputs: int, changed: int, ok: bool) -> None:
    """In FP32 1 % of the answers may change: one answer of 32 is 3 %, and happens by chance in 27 % of studies."""
    reference = np.random.default_rng(1).normal(size=(inputs, 10)).astype(np.float32)
    first, second = np.argsort(-reference, axis=1)[:, :2].T
    rows = np.arange(inputs)
    reference /= np.sqrt(np.mean(reference**2, axis=1, keepdims=True))
    reference[rows, second] = reference[rows, first] - 0.012 * np.sqrt(np.mean(reference**2, axis=1)) - 0.003
    own = reference * (1 + 2e-3)
    own[rows[:changed], second[:changed]] = own[rows[:changed], first[:changed]] + 0.001
    held = _judge(tmp_path, "fp32", own, reference)
    assert 1e-3 < held.error < 1e-2
    assert held.changed == pytest.approx(changed / inputs) and held.ok == ok
    doubt = f"can't tell with {inputs} whether more than 1% of the answers change, which fp32 allows ({changed} did)"
    assert held.doubt.startswith(doubt) == (ok and changed / inputs > 0.01)


@pytest.mark.parametrize("inputs", [1, 8, 32, 100, 1000])
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_engines_at_the_limit_rarely_fail_and_wrong_ones_do(inputs: int, precision: str) -> None:
    """At most 5 % of studies, exactly; judged by the changed share it was 27 to 60 % of studies with 32 inputs."""
    tolerance = TOLERANCES[precision]
    middle, beyond = (tolerance.close + tolerance.limit) / 2, 2 * tolerance.limit
    of_answers = [Correctness(middle, k / inputs, tolerance, precision, answers=inputs, inputs=inputs)
                  for k in range(inputs + 1)]  # fmt: skip
    of_inputs = [Correctness(beyond, None, tolerance, precision, far=k, inputs=inputs) for k in range(inputs + 1)]
    for found, allowed in ((of_answers, tolerance.changed), (of_inputs, 1 - tolerance.quantile)):
        chances = binom.pmf(np.arange(inputs + 1), inputs, allowed)
        condemned = np.array([not each.ok for each in found])
        assert chances[condemned].sum() <= 0.05 + 1e-9
        assert condemned[inputs] or binom.pmf(inputs, inputs, allowed) > 0.05
        if inputs >= 100:
            assert binom.pmf(np.arange(inputs + 1), inputs, 3 * allowed + 0.05)[condemned].sum() > 0.8


def test_doubts_tell_how_many_inputs_are_needed() -> None:
    doubtful = Correctness(5e-3, 1 / 32, TOLERANCES["fp32"], "fp32", answers=32, inputs=32)
    number = int(doubtful.doubt.rpartition("about ")[2].split()[0])
    settled = Correctness(5e-3, 1 / 32, TOLERANCES["fp32"], "fp32", answers=number, inputs=number)
    assert doubtful.ok and not settled.ok and 32 < number < 320
    for hits, inputs in ((1, 32), (2, 128), (11, 1000)):  # by binomial tests
        number = estimate_needed(hits, inputs, 0.01)
        enough, few = (binom.sf(round(hits / inputs * n) - 1, n, 0.01) for n in (number, number * 4 // 5))
        assert enough <= 0.05 < few
    assert estimate_needed(10, 1000, 0.01) == MAX_SAMPLES, "no number shows that a hundredth is more than a hundredth"


def _next_class(rows: int, columns: int) -> Callable[[np.ndarray], None]:
    """Return a change that raises the class number by one in a corner of each map."""

    def change(a: np.ndarray) -> None:
        a[:, :rows, :columns] += 1

    return change


@pytest.mark.parametrize(
    ("precision", "rows", "columns", "ok"),
    [
        ("fp32", 0, 0, True), ("fp32", 1, 1, True), ("fp32", 3, 8, False), ("fp16", 1, 16, True), ("fp16", 8, 8, False),
        ("int8", 8, 16, True), ("int8", 16, 16, True), ("int8", 24, 24, False), ("int8", 64, 22, False),
        ("bf16", 64, 22, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32"])
def test_class_maps_are_judged_by_their_share_of_changed_pixels(
    tmp_path: Path, precision: str, rows: int, columns: int, ok: bool, dtype: str
) -> None:
    held = _class_maps(tmp_path / "run", precision, _next_class(rows, columns), dtype)
    assert held.ok is ok and np.isnan(held.error)
    assert held.labels_changed == pytest.approx(rows * columns / 64**2)
    assert held.reason == "" if ok else f"{precision} allows" in held.reason and "of labels differ" in held.reason


def test_one_class_map_with_a_third_changed_is_wrong(tmp_path: Path) -> None:
    def change(a: np.ndarray) -> None:
        a[3, :22] += 1

    held = _class_maps(tmp_path / "run", "int8", change)
    assert not held.ok and "34 % of labels differ in one input" in held.reason


def test_labels_beyond_float32_integers_are_compared_exactly(tmp_path: Path) -> None:
    reference = np.full((12, 4), 2**53 + 1, np.int64)
    held = _judge(tmp_path, "fp32", reference - 1, reference)
    assert not held.ok and held.labels_changed == 1


def test_integers_returned_as_float32_by_pytorch_are_labels(tmp_path: Path) -> None:
    """A tenth differ, by less than a thousandth of their size; float32 rounds large numbers."""
    labels = 2**25 + 1 + np.arange(12 * 40).reshape(12, 40) % 7
    for name, own in (("same", labels), ("other", labels + 100 * (np.arange(40) % 10 == 0))):
        held = _judge(tmp_path / name, "fp32", own, labels.astype(np.float32))
        assert held.ok is (name == "same")
        assert held.labels_changed == pytest.approx(0 if name == "same" else 0.1)


def test_booleans_are_labels_and_pixels_are_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    mask, image = rng.random((12, 1, 32, 32)) < 0.5, rng.integers(0, 250, (12, 3, 32, 32)).astype(np.uint8)
    for name, reference, own, ok in (
        ("mask", mask, mask ^ (rng.random(mask.shape) < 0.1), False),
        ("image", image, image + rng.integers(0, 2, image.shape).astype(np.uint8), True),
        ("other image", image, rng.permuted(image, axis=3), False),
    ):
        held = _judge(tmp_path / name, "fp16", own, reference)
        assert held.ok is ok, name
        assert np.isnan(held.labels_changed) == (name != "mask")


def test_scores_and_labels_of_a_network_are_judged_separately(tmp_path: Path) -> None:
    def outputs(a: np.ndarray, number: int) -> dict[str, np.ndarray]:
        labels = np.arange(360) % 7 + (np.arange(360) < 100 * number)
        return {"output:output": a * (1 + 1e-3 * number), "output:classes": labels}

    held = _judge(tmp_path, "fp16", lambda a: outputs(a, 1), lambda a: outputs(a, 0))
    assert not held.ok and held.error == pytest.approx(1e-3, rel=1e-2)
    assert held.reason == "28 % of labels differ (fp16 allows 1 %)"


def test_only_indices_of_equal_scores_may_swap(tmp_path: Path) -> None:
    """FP32 allows a hundredth of the root mean square, 0.0596."""
    indices = np.tile(np.array([5, 3, 8, 2, 7]), (50, 1))
    for name, lead, ok in (("tied", 0.055, True), ("apart", 0.065, False)):
        scores, order = np.tile(np.array([9.0, 8.0, 4.0, 4.0 - lead, 1.0], np.float32), (50, 1)), [0, 1, 3, 2, 4]
        own, reference = ({"output:scores": scores, "output:indices": each} for each in (indices[:, order], indices))
        assert _judge(tmp_path / name, "fp32", own, reference).ok is ok, name


def test_the_verdict_states_the_share_of_differing_labels(tmp_path: Path) -> None:
    for rows, said in (
        (0, "no label differs"),
        (4, "6.2 % of labels differ"),
        (8, "12 % of labels differ (int8 allows 10 %)"),
    ):
        _class_maps(tmp_path / str(rows), "int8", _next_class(rows, 64))
        text = "\n".join(verdict.list_sentences(trial_table.read_trials(load_run(tmp_path / str(rows)))))
        assert said in text
        assert ("gave wrong outputs" in text) == (rows == 8)
