"""Ranking by parts is the stable sort that it stands for, ties, infinities and NaN included."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dyno.worker.spec import DataSpec, Dims, ModelSpec, Trial
from dyno.worker.tasks.classify import AMBIGUOUS, LEAST_PARTED, TOP, TopKCollector, classes_of, find_scores, ranked
from dyno.worker.tasks.task import EvaluationInputs


def sorted_whole(scores: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


# Few different values, so that most rows tie at the k-th place.
SCORES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.integers(2, 70)),
    elements=st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]), st.floats(-3, 3, width=32).map(np.round)
    ),
)


@settings(max_examples=60)
@given(SCORES, st.integers(1, 12))
def test_the_same_as_a_stable_sort(scores: np.ndarray, k: int) -> None:
    index, best = ranked(scores, k)
    expected = sorted_whole(scores, k)
    np.testing.assert_array_equal(index, expected)
    np.testing.assert_array_equal(best, np.take_along_axis(scores, expected, axis=1))
    assert index.dtype == np.int32


@pytest.mark.parametrize("classes", [LEAST_PARTED * TOP, LEAST_PARTED * TOP + 1, 1000])
def test_real_sizes(classes: int) -> None:
    scores = np.random.default_rng(0).standard_normal((256, classes)).astype(np.float32)
    scores[::7] = scores[::7].round(1)  # ties in some rows
    np.testing.assert_array_equal(ranked(scores, TOP)[0], sorted_whole(scores, TOP))


def test_no_batch_leaves_no_arrays() -> None:
    fed = EvaluationInputs(Trial(ModelSpec("net", "fake:net"), "fake", "fp32", Dims(2, 4, 4)), 2, 4)
    assert TopKCollector(fed).arrays([None, None]) == {}


@pytest.mark.parametrize(
    ("shape", "classes"),
    [
        (("N", 10), 10),
        ((8, 10, 1, 1), 10),
        ((8, 1), 0),
        ((8, 1, 10), 0),
        ((8, 10, 7, 7), 0),
        (("N", "C"), 0),
        ((8,), 0),
    ],
)
def test_class_scores_are_known_by_their_shape(shape: tuple[int | str, ...], classes: int) -> None:
    assert classes_of(shape) == classes


@pytest.mark.parametrize(
    ("shapes", "classes", "found"),
    [
        ({"feat": 64, "y": 10}, 10, "y"),
        ({"a": 10, "b": 10}, 10, "a b"),
        ({"a": 10, "logits": 10}, 10, "logits"),
        ({"pre_logits": 10, "out": 10}, 0, "out"),
        ({"a": 64, "b": 10}, 0, "a b"),
        ({"probabilities": 10, "logits": 10}, 0, "logits"),
        ({"a": 64, "b": 128}, 10, "a b"),
    ],
)
def test_class_scores_are_found_by_their_number_and_name(shapes: dict[str, int], classes: int, found: str) -> None:
    assert find_scores({name: ("N", n) for name, n in shapes.items()}, classes) == found.split()


def test_features_are_never_scored_in_place_of_class_scores(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(json.dumps({"classes": [str(k) for k in range(10)]}))
    data = DataSpec("digits", folder=str(tmp_path), count=4)
    trial = Trial(ModelSpec("net", "fake:net"), "fake", "fp32", Dims(4, 4, 4), data=data)
    rng = np.random.default_rng(0)
    features, scores, more = (rng.standard_normal((4, n)).astype(np.float32) for n in (64, 10, 10))
    collector = TopKCollector(EvaluationInputs(trial, 4, 4))
    answers = collector.arrays([collector.of(0, {"feat": features, "y": scores})])
    np.testing.assert_array_equal(answers["topk_index"][:, 0], scores.argmax(axis=1))
    assert collector.oddities([]) != [] and collector.of(0, {"a": scores, "b": more}) is None
    (line,) = collector.oddities([None])
    assert line.startswith(f"{AMBIGUOUS} a and b; rename that one logits")
