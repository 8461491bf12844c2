"""mAP equals COCOeval's, perfect detections reach 1, and intervals and budgets follow from the images."""

import contextlib
import io
import math
from pathlib import Path

import numpy as np
import pytest

import detected
import printed
from detected import Arrays, Truth
from dyno import evaluation as dyno_evaluation
from dyno.regression import compare_table
from dyno.regression.rules import LESS_ACCURATE, GateRules
from dyno.report.tables import accuracy_tables, trial_table
from dyno.report.verdict import findings, verdict
from dyno.results.metrics import accuracy, mean_ap
from dyno.results.metrics.metric import Change
from dyno.results.stats import Interval
from dyno.results.trial_result import load_run

KINDS = ("bbox", "segm", "keypoints")


def coco(arrays: Arrays, truth: Truth, kind: str, images: list[int]) -> np.ndarray:
    """Return COCOeval's accumulated precision [thresholds, recalls, classes] on these images, all object sizes."""
    evaluation = mean_ap._evaluate_detections(arrays, truth, kind, images)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.accumulate()
    return np.asarray(evaluation.eval["precision"])[:, :, :, 0, 0]


def mean(precision: np.ndarray) -> float:
    return float(precision[precision > -1].mean())


@pytest.fixture(scope="module")
def truth() -> Truth:
    return detected.truth()


@pytest.mark.parametrize("kind", KINDS)
def test_perfect_detections_have_a_map_of_1(truth: Truth, kind: str) -> None:
    found = mean_ap.score_detections(detected.found(truth), truth, kind)
    assert found.map50[0] == pytest.approx(1) and found.map50_95[0] == pytest.approx(1)
    assert found.by_class() == [(name, pytest.approx(1), pytest.approx(1)) for name in detected.NAMES]


def test_boxes_with_an_iou_of_two_thirds_count_up_to_0_65(truth: Truth) -> None:
    """A box shifted by a fifth of its width has an IoU of 0.8 / 1.2 with its object."""
    found = mean_ap.score_detections(detected.found(truth, shift=0.2), truth, "bbox")
    assert found.map50[0] == pytest.approx(1)
    assert found.map50_95[0] == pytest.approx(0.4), "0.50, 0.55, 0.60 and 0.65 of ten thresholds"
    assert mean_ap.score_detections(detected.found(truth, shift=0.2), truth, "segm").map50_95[0] < 0.4
    assert mean_ap.score_detections(detected.found(truth, shift=1.0), truth, "bbox").map50[0] == 0


def test_permuted_classes_are_reported(truth: Truth, tmp_path: Path) -> None:
    """A network without detections, or one that mistakes classes at random, gets no note."""
    right = detected.found(truth)
    ways = {
        "permuted": {**right, "detection_class": (right["detection_class"] + 1) % 3},
        "random": {**right, "detection_class": np.random.default_rng(1).integers(0, 3, len(right["detection_class"]))},
        "elsewhere": {**detected.found(truth, shift=1.0), "detection_class": (right["detection_class"] + 1) % 3},
        "right": right,
    }
    for name, arrays in ways.items():
        run = load_run(detected.write_run(tmp_path / name, "detect", {"pytorch": arrays}, truth))
        told = [found.text for found in findings.list_label_findings(run) if "seems to number" in found.text]
        assert bool(told) is (name == "permuted"), (name, told)
        printed = dyno_evaluation.describe_evaluation(run.trials[0])
        assert ("warning: the network seems to number" in printed) is (name == "permuted"), (name, printed)
        for text in told:
            assert "100% of its answers would be right instead of 0%" in text and "objects); give the cat" in text


@pytest.mark.parametrize("values", [2, 3])
def test_keypoints_have_a_tolerance_of_one_by_their_number(truth: Truth, values: int) -> None:
    """OKS of points that are all off by d is exp(-d² / (2 s² (2/K)²)); s² is the object's area.

    Visibility, the third value, has no effect.
    """
    arrays = detected.found(truth, shift=0.25)
    arrays["detection_keypoints"] = arrays["detection_keypoints"][..., :values]
    found = mean_ap.score_detections(arrays, truth, "keypoints")
    right = []
    for a in truth["annotations"]:
        similarity = math.exp(-((0.25 * a["bbox"][2]) ** 2) / (2 * a["area"] * (2 / 4) ** 2))
        right.append([similarity >= t for t in np.arange(0.5, 1, 0.05)])
    for k, shares in enumerate(np.array([a["category_id"] for a in truth["annotations"]]) == np.arange(3)[:, None]):
        alike = np.array(right)[shares].all(axis=0) | ~np.array(right)[shares].any(axis=0)
        np.testing.assert_allclose(found.precisions[0, k][alike], np.array(right)[shares].mean(axis=0)[alike])


@pytest.mark.parametrize("kind", KINDS)
def test_scores_match_cocoeval_with_and_without_a_group(truth: Truth, kind: str) -> None:
    arrays = detected.found(truth, shift=0.05, missed=0.3)
    rng = np.random.default_rng(1)
    arrays["detection_class"] = np.where(rng.random(len(arrays["detection_class"])) < 0.8, arrays["detection_class"], 0)
    found = mean_ap.score_detections(arrays, truth, kind)
    images = arrays["sample"].tolist()
    assert found.map50_95[0] == pytest.approx(mean(coco(arrays, truth, kind, images)), abs=1e-12)
    assert 0 < found.map50_95[0] <= found.map50[0] < 1
    shuffled = np.random.default_rng(0).permutation(len(images)) % mean_ap.JACKKNIFE_GROUPS
    for group in (0, 7):
        left = [image for image, of in zip(images, shuffled, strict=True) if of != group]
        assert found.map50_95[1 + group] == pytest.approx(mean(coco(arrays, truth, kind, left)), abs=1e-12)


def overlap(a: list[float], b: list[float]) -> float:
    """Return the intersection over union of two boxes given as corners."""
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(w, 0) * max(h, 0)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def count_by_hand(arrays: Arrays, truth: Truth, least: float, images: set[int]) -> tuple[int, int, int]:
    """Count right and wrong detections and objects: each detection, by score, takes the best remaining object."""
    left = [a for a in truth["annotations"] if a["image_id"] in images]
    wanted, right, wrong = len(left), 0, 0
    for n in np.argsort(-arrays["detection_score"], kind="stable"):
        if arrays["detection_image"][n] not in images or arrays["detection_score"][n] < least:
            continue
        own = [
            (overlap([x, y, x + w, y + h], arrays["detection_box"][n].tolist()), a)
            for a in left
            if (a["image_id"], a["category_id"]) == (arrays["detection_image"][n], arrays["detection_class"][n])
            for x, y, w, h in [a["bbox"]]
        ]
        best, taken = max(own, key=lambda pair: pair[0], default=(0.0, None))
        right, wrong = (right + 1, wrong) if best >= 0.5 else (right, wrong + 1)
        left = [a for a in left if a is not taken or best < 0.5]
    return right, wrong, wanted


def test_precision_recall_and_f1_are_counted_at_each_threshold(truth: Truth) -> None:
    arrays = detected.found(truth, shift=0.1, missed=0.2)
    arrays = {k: np.concatenate([a, a[::3]]) if k.startswith("detection") else a for k, a in arrays.items()}  # doubles
    rng = np.random.default_rng(1)
    arrays["detection_score"] = rng.uniform(0.1, 1, len(arrays["detection_score"])).astype(np.float32)
    arrays["detection_class"] = np.where(rng.random(len(arrays["detection_class"])) < 0.8, arrays["detection_class"], 0)
    rates = mean_ap.score_detections(arrays, truth, "bbox").rates
    group = np.random.default_rng(0).permutation(24) % mean_ap.JACKKNIFE_GROUPS
    for k in (0, 4, 9, 14):
        for place, images in ((0, set(range(24))), (1, set(np.flatnonzero(group != 0).tolist()))):
            right, wrong, wanted = count_by_hand(arrays, truth, mean_ap.SCORE_THRESHOLDS[k], images)
            assert 0 < right < wanted and wrong
            precision, recall = right / (right + wrong), right / wanted
            assert rates["precision"][k, place] == pytest.approx(precision)
            assert rates["recall"][k, place] == pytest.approx(recall)
            assert rates["f1"][k, place] == pytest.approx(2 / (1 / precision + 1 / recall))


def test_missing_detections_score_0_and_empty_classes_are_omitted(truth: Truth) -> None:
    nothing = {name: a if name == "sample" else a[:0] for name, a in detected.found(truth).items()}
    for kind in KINDS:
        assert mean_ap.score_detections(nothing, truth, kind).map50_95[0] == 0
    more = {**truth, "categories": [*truth["categories"], {"id": 3, "name": "none of it"}]}
    assert [name for name, _, _ in mean_ap.score_detections(detected.found(truth), more, "bbox").by_class()] == [
        *detected.NAMES
    ]


def test_the_jackknife_of_a_mean_is_the_t_interval() -> None:
    """Over groups of equal size, the delete-a-group jackknife gives Student's interval of the groups' means."""
    from scipy import stats

    x = np.random.default_rng(0).normal(0.5, 0.1, 20)
    found = mean_ap.jackknife_ap(np.r_[x.mean(), [np.delete(x, i).mean() for i in range(20)]])
    low, high = stats.t.interval(0.95, 19, x.mean(), stats.sem(x))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert math.isnan(mean_ap.jackknife_ap(np.array([0.5, 0.5])).low)


def test_the_interval_keeps_its_coverage() -> None:
    large = detected.truth(1500, seed=5)
    arrays = detected.found(large, shift=0.1, missed=0.3)
    of = {name: arrays[f"detection_{name}"] for name in ("image", "box", "score", "class")}
    whole = mean_ap.score_detections(arrays, large, "bbox").map50_95[0]
    hits = 0
    for part in np.array_split(np.random.default_rng(0).permutation(1500), 30):
        own = np.isin(of["image"], part)
        some = {"sample": part} | {f"detection_{name}": a[own] for name, a in of.items()}
        interval = mean_ap.jackknife_ap(mean_ap.score_detections(some, large, "bbox").map50_95)
        hits += interval.low <= whole <= interval.high
    assert hits >= 25


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, truth: Truth) -> Path:
    ways = {
        "pytorch": detected.found(truth, missed=0.1),
        "onnxruntime": detected.found(truth, missed=0.1),
        "openvino": detected.found(truth, missed=0.1, shift=0.2),
    }
    return detected.write_run(tmp_path_factory.mktemp("detected") / "run", "segment", ways, truth)


def test_the_table_has_masks_boxes_differences_and_the_budget(run: Path) -> None:
    frame = trial_table.read_trials(load_run(run), budget={"mAP": 2.0}).frame.set_index("backend")
    reference, same, shifted = (frame.loc[name] for name in ("pytorch", "onnxruntime", "openvino"))
    assert reference["map50_95_low"] < reference["map50_95"] < reference["map50_95_high"]
    assert 80 < reference["box_map50"] < 100 and reference["images"] == 24 and math.isnan(reference["top1"])
    assert (same["map50_95_diff"], same["map50_95_diff_low"], same["map50_95_diff_high"]) == (0, 0, 0)
    assert shifted["map50_95_diff"] < -30 and shifted["map50_95_diff_high"] < -2
    assert shifted["box_map50_95"] == pytest.approx(0.4 * reference["box_map50_95"])
    assert shifted["box_map50"] == pytest.approx(reference["box_map50"]) and shifted["map50"] > shifted["map50_95"]
    assert [*frame["budget"]] == ["within", "within", "over"]
    assert reference["pipeline_ips"] == 123 and reference["preprocess_ms"] == pytest.approx(1)


def test_smaller_sizes_are_compared_with_the_first(truth: Truth, tmp_path: Path) -> None:
    detected.write_run(tmp_path, "segment", {"pytorch": detected.found(truth, missed=0.1)}, truth)
    worse = detected.found(truth, missed=0.1, shift=0.2)
    detected.write_run(tmp_path, "segment", {"pytorch": worse, "openvino": worse}, truth, size=32)
    (tmp_path / "study.toml").write_text('models = ["net"]\nsizes = ["64", "32"]\n')
    frame = trial_table.read_trials(load_run(tmp_path), budget={"mAP": 2.0}).frame.set_index(["backend", "size"])
    first = frame.loc[("pytorch", "64")]
    assert set(frame["budget_reference"]) == {first["trial"]} and first["budget"] == "within"
    for backend in ("pytorch", "openvino"):
        row = frame.loc[(backend, "32")]
        assert row["budget"] == "over"
        assert row["map50_95_diff"] == pytest.approx(row["map50_95"] - first["map50_95"])


def test_map_is_printed_and_reported(run: Path) -> None:
    results = load_run(run)
    read = trial_table.read_trials(results, budget={"mAP": 2.0})
    text = printed.trials(read, width=200)
    assert "mAP50-95 %" in text and "top-1" not in text
    assert any("mAP50-95 is" in s for s in verdict.list_sentences(read))
    text = dyno_evaluation.describe_evaluation(results.trials[0], per_class=True)
    assert "mAP50-95 of masks" in text and "boxes' mAP50" in text and "circle" in text
    assert {"evaluation", "detection", "average-precision", "thresholds"} <= set(printed.every(read))


def test_the_change_of_f1_is_paired(run: Path) -> None:
    rows = accuracy_tables.THRESHOLDS.table(trial_table.read_trials(load_run(run))).rows
    at = {row["label"].split()[1]: row for row in rows if row["score"] == 0.25}
    reference, same, shifted = (at[name] for name in ("pytorch", "onnxruntime", "openvino"))
    assert reference["precision"] == 100 and 80 < reference["recall"] < 100 and "f1_diff" not in reference
    assert reference["f1_low"] < reference["f1"] < reference["f1_high"]
    assert (same["f1_diff_low"], same["f1_diff"], same["f1_diff_high"]) == (0, 0, 0)
    assert shifted["f1_diff"] == pytest.approx(shifted["f1"] - reference["f1"])


def test_scores_are_cached_until_their_inputs_change(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = [mean_ap.read_detections(t) for t in load_run(run)]
    monkeypatch.setattr(mean_ap, "score_detections", lambda *_: pytest.fail("worked out again"))
    again = [mean_ap.read_detections(t) for t in load_run(run)]
    for a, b in zip(first, again, strict=True):
        assert a and b
        np.testing.assert_array_equal(a.own.precisions, b.own.precisions)
    monkeypatch.setattr(mean_ap, "SCORES_VERSION", mean_ap.SCORES_VERSION + 1)
    with pytest.raises(pytest.fail.Exception, match="again"):
        _ = mean_ap.read_detections(load_run(run).trials[0])


def test_undecided_budgets_tell_how_many_images_are_needed(truth: Truth) -> None:
    budget = accuracy.Budget("mAP", 1.0)

    def decided(images: int, *interval: float) -> accuracy.BudgetDecision:
        return accuracy.decide_accuracy(Change(images, Interval(*interval)), budget)

    open_ = decided(100, -0.005, -0.025, 0.015)
    assert (open_.verdict, open_.more) == ("undecided", 1500), "four times too wide: sixteen times as many images"
    assert decided(100, -0.01, -0.02, 0.0).more is None
    assert decided(1, 0.0, math.nan, math.nan).verdict == "undecided"
    assert decided(9, -0.05, -0.06, -0.04).verdict == "over"
    lost = Change(400, Interval(-0.02, -0.03, -0.01))
    chances = [lost.chance(limit) for limit in (-0.04, -0.03, -0.02, -0.01)]
    assert chances == pytest.approx([0.5 * math.erfc(2 * 1.959964 / 2**0.5), 0.025, 0.5, 0.975])
    sure = Change(400, Interval(-0.02, -0.02, -0.02))
    assert [sure.chance(limit) for limit in (-0.03, -0.02, -0.01)] == [0.0, 1.0, 1.0]
    few, enough = (mean_ap.JackknifedChange(n, Interval(-0.002, -0.004, -0.001)) for n in (32, 300))
    assert accuracy.decide_accuracy(few, budget) == accuracy.BudgetDecision(accuracy.UNDECIDED, 268)
    assert accuracy.decide_accuracy(enough, budget).verdict == accuracy.WITHIN
    near, far = (mean_ap.JackknifedChange(32, Interval(*i)) for i in ((-0.03, -0.05, -0.012), (-0.06, -0.08, -0.04)))
    assert accuracy.decide_accuracy(near, budget) == accuracy.BudgetDecision(accuracy.UNDECIDED, 268)
    assert accuracy.decide_accuracy(far, budget).verdict == accuracy.OVER
    same = mean_ap.JackknifedChange(32, Interval(0.0, 0.0, 0.0))
    assert accuracy.decide_accuracy(same, budget).verdict == accuracy.WITHIN, "nothing changed at all"
    assert [str(b) for b in accuracy.make_budgets({"mAP": 0.5, "top1": 1.0})] == ["mAP=0.5", "top1=1"]


def test_the_interval_of_map_ends_at_one(truth: Truth, tmp_path: Path) -> None:
    folder = detected.write_run(tmp_path / "run", "detect", {"pytorch": detected.found(truth, missed=0.04)}, truth)
    (trial,) = load_run(folder).trials
    result, value = mean_ap.read_detections(trial), mean_ap.MeanAveragePrecision50().compute(trial)
    assert result is not None and value is not None
    assert mean_ap.jackknife_ap(result.own.map50).high > value.interval.high == 1


def test_map_needs_ground_truth(truth: Truth, tmp_path: Path) -> None:
    folder = detected.write_run(tmp_path / "run", "detect", {"pytorch": detected.found(truth)}, truth)
    (folder / "truth" / f"{detected.SHA[:12]}.json").unlink()
    assert mean_ap.read_detections(load_run(folder).trials[0]) is None
    assert math.isnan(trial_table.read_trials(load_run(folder)).frame["map50"].iloc[0])


def test_compare_reports_a_worse_detector_as_less_accurate(truth: Truth, tmp_path: Path) -> None:
    good, bad = (detected.found(truth, shift=shift) for shift in (0.0, 0.2))
    runs = [
        load_run(detected.write_run(tmp_path / name, "detect", {"pytorch": arrays}, truth))
        for name, arrays in (("a", good), ("b", bad))
    ]
    (row,) = compare_table.compare_runs(*runs, GateRules((LESS_ACCURATE,))).rows
    assert (row["accuracy"], row["failed"]) == ("less accurate", LESS_ACCURATE)
    assert (row["map50_95_a"], row["map50_95_b"]) == (pytest.approx(100), pytest.approx(40))
