"""Every image goes through once, in order, whatever the batch; what is kept is what accuracy needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dyno.worker.backend import Session
from dyno.worker.evaluation import evaluate
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Preprocess, Tensor, Trial

CLASSES = 12


class Linear(Session):
    """A classifier of 1x2x2 images, with a second output that has no batch dimension."""

    def __init__(self, batch: int, classes: int = CLASSES) -> None:
        self.inputs = (Tensor("input", "float32", (batch, 1, 2, 2)),)
        self.weights = np.random.default_rng(0).standard_normal((4, classes)).astype(np.float32)
        self.seen: list[np.ndarray] = []

    def bind(self, feeds, slot=0):
        self.bound = feeds["input"]

    def run(self, slot=0):
        self.seen.append(self.bound)
        self.result = self.bound.reshape(len(self.bound), -1) @ self.weights

    def fetch(self, slot=0):
        return {"output": self.result, "scale": np.float32(3)}


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    np.save(tmp_path / "images.npy", np.random.default_rng(1).integers(0, 256, (20, 1, 2, 2), dtype=np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(20) % CLASSES)
    np.save(tmp_path / "test.npy", np.array([3, 1, 4, 15, 9, 2, 6]))
    return DataSpec("seven", str(tmp_path), count=7)


def trial(data: DataSpec, batch: int) -> Trial:
    model = ModelSpec("net", "fake:net", channels=1, preprocess=Preprocess((0.5,), (0.5,)))
    return Trial(model, "fake", "fp32", Dims(batch, 2, 2), data=data)


@pytest.mark.parametrize("batch", [1, 3, 7, 10])
def test_every_image_once_and_in_order_at_any_batch(data: DataSpec, batch: int) -> None:
    session = Linear(batch)
    found = evaluate.outputs(session, trial(data, batch))
    pixels = np.load(Path(data.folder) / "images.npy")[[3, 1, 4, 15, 9, 2, 6]].astype(np.float32)
    expected = ((pixels / 255 - 0.5) / 0.5).reshape(7, -1) @ session.weights
    np.testing.assert_allclose(found["output:output"], expected, rtol=1e-4, atol=1e-5)
    assert found["sample"].tolist() == [3, 1, 4, 15, 9, 2, 6]
    assert found["label"].tolist() == [3, 1, 4, 3, 9, 2, 6]
    assert all(len(bound) == batch for bound in session.seen), "every run is at the trial's own batch"


def test_the_best_ten_are_ranked(data: DataSpec) -> None:
    found = evaluate.outputs(Linear(2), trial(data, 2))
    assert found["topk_index"].shape == found["topk_score"].shape == (7, 10)
    assert (found["topk_index"].dtype, found["topk_score"].dtype) == (np.int32, np.float32)
    assert (np.diff(found["topk_score"]) <= 0).all()
    np.testing.assert_array_equal(found["topk_index"][:, 0], found["output:output"].argmax(1))


def test_fewer_classes_than_ten(data: DataSpec) -> None:
    assert evaluate.outputs(Linear(2, classes=4), trial(data, 2))["topk_index"].shape == (7, 4)
    assert "topk_index" not in evaluate.outputs(Linear(2, classes=1), trial(data, 2))


def test_ties_rank_alike_everywhere(data: DataSpec) -> None:
    session = Linear(1)
    session.weights[:] = 0
    found = evaluate.outputs(session, trial(data, 1))
    assert (found["topk_index"] == np.arange(10)).all()


def test_random_inputs_have_no_labels() -> None:
    found = evaluate.outputs(Linear(2), trial(DataSpec(count=5), 2))
    assert set(found) == {"output:output", "output:scale", "topk_index", "topk_score", "sample"}
    assert found["sample"].tolist() == [0, 1, 2, 3, 4]
    assert found["output:output"].shape == (5, CLASSES)


def test_raw_outputs_are_capped_and_answers_are_not(data: DataSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "RAW_BYTES", 2 * (2 * CLASSES + 1) * 4)
    found = evaluate.outputs(Linear(2), trial(data, 2))
    assert found["output:output"].shape == (4, CLASSES)
    assert len(found["topk_index"]) == len(found["label"]) == len(found["sample"]) == 7


def test_the_session_may_reuse_its_output(data: DataSpec) -> None:
    class Reusing(Linear):
        place = np.zeros((2, CLASSES), np.float32)

        def fetch(self, slot=0):
            self.place[:] = self.result
            return {"output": self.place}

    plain, reusing = evaluate.outputs(Linear(2), trial(data, 2)), evaluate.outputs(Reusing(2), trial(data, 2))
    np.testing.assert_array_equal(plain["output:output"], reusing["output:output"])


def test_real_images_are_timed_after_a_tenth_of_warm_up(data: DataSpec) -> None:
    session = Linear(2)
    found = evaluate.evaluate(session, trial(data, 2))
    assert (found.images, found.warm_up) == (7, 2)
    assert found.seconds > 0 and {m.tag: m.unit for m in found.measurements()} == {
        "preprocess": "s", "inference": "s", "postprocess": "s", "pipeline": "1/s",
    }  # fmt: skip
    assert found.facts() == {"images": 7, "seconds": found.seconds, "warm_up": 2}
    assert all(len(samples) >= 3 and (samples > 0).all() for samples in found.stages.values())
    for name, array in evaluate.outputs(Linear(2), trial(data, 2)).items():
        np.testing.assert_array_equal(array, found.arrays[name])


def test_random_inputs_are_not_timed() -> None:
    found = evaluate.evaluate(Linear(2), trial(DataSpec(count=5), 2))
    assert (found.measurements(), found.facts()) == ([], {})


def test_pixels_go_as_they_are_to_a_uint8_input(data: DataSpec) -> None:
    session = Linear(3)
    session.inputs = (Tensor("input", "uint8", (3, 1, 2, 2)),)
    evaluate.outputs(session, trial(data, 3))
    assert {bound.dtype for bound in session.seen} == {np.dtype(np.uint8)}


def test_what_the_data_set_knows_comes_along(data: DataSpec) -> None:
    about = '{"decode_s": 0.002, "classes": ["a", "б"], "warnings": ["class \'б\' is in no image"]}'
    (Path(data.folder) / "meta.json").write_text(about, encoding="utf-8")
    found = evaluate.evaluate(Linear(2), trial(data, 2))
    assert found.measurements()[0].tag == "decode" and found.decode == 0.002
    assert found.arrays["classes"].tolist() == ["a", "б"]
    assert found.oddities == ("class 'б' is in no image",)
