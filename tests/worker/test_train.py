"""Training reaches the accuracy the demo promises, writes weights that load, and refuses what doesn't fit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dyno.worker import models
from dyno.worker.spec import DataSpec, ModelSpec, Preprocess, UserError
from dyno.worker.train import train

NET = ModelSpec(
    "digits", "dyno.worker.digits:resnet18", channels=1, classes=10, preprocess=Preprocess((0.5,), (0.5,), 0.0)
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> DataSpec:
    """scikit-learn's digits at 64 x 64, half to train on and half to test, as `dyno.datasets` stores them."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    folder = tmp_path_factory.mktemp("digits")
    grey, labels = load_digits(return_X_y=True)
    small = (grey.reshape(-1, 8, 8) * 255 / 16).round().astype(np.uint8)
    images = np.stack([np.asarray(Image.fromarray(i).resize((64, 64), Image.Resampling.BILINEAR)) for i in small])
    split = train_test_split(np.arange(len(labels)), test_size=0.5, stratify=labels, random_state=0)
    np.save(folder / "images.npy", images[:, None])
    np.save(folder / "labels.npy", labels.astype(np.int64))
    np.save(folder / "train.npy", split[0])
    np.save(folder / "test.npy", split[1])
    (folder / "meta.json").write_text(json.dumps({"classes": [str(i) for i in range(10)]}))
    return DataSpec("digits", str(folder))


@pytest.fixture(autouse=True)
def _two_threads():
    torch.set_num_threads(2)


@pytest.mark.slow
def test_digits_reach_98_percent_and_the_weights_load(digits, tmp_path):
    told: list[str] = []
    found = train({}, digits, NET, tmp_path, progress=told.append)
    assert found["top1"] >= 0.98
    assert found["images"] == 898
    assert len(told) == found["epochs"]
    weights = Path(found["weights"])
    assert [p.name for p in tmp_path.iterdir()] == [weights.name]
    assert found["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert _top1(digits, found["weights"]) == pytest.approx(found["top1"], abs=0.002)


def _top1(data: DataSpec, weights: str) -> float:
    """Accuracy counted anew, from the weights on disk."""
    net = models.load(ModelSpec("digits", NET.source, channels=1, weights=weights))
    index = np.load(Path(data.folder) / "test.npy")
    pixels = np.load(Path(data.folder) / "images.npy")[index]
    with torch.inference_mode():
        scores = net(torch.from_numpy((pixels / np.float32(255) - np.float32(0.5)) / np.float32(0.5)))
    return float((scores.argmax(1).numpy() == np.load(Path(data.folder) / "labels.npy")[index]).mean())


def test_the_same_seed_gives_the_same_weights(digits, tmp_path):
    few = _first(digits, tmp_path / "few", 64)
    runs = [train({"epochs": 1, "seed": seed}, few, NET, tmp_path / str(i)) for i, seed in enumerate((3, 3, 4))]
    assert runs[0]["sha256"] == runs[1]["sha256"] != runs[2]["sha256"]


def test_sgd_learns_too(digits, tmp_path):
    few = _first(digits, tmp_path / "few", 256)
    options = {"optimizer": "sgd", "lr": 0.03, "weight_decay": 5e-4, "epochs": 4, "shift": 2}
    assert train(options, few, NET, tmp_path)["top1"] > 0.3  # chance is 0.1


def _first(data: DataSpec, folder: Path, count: int) -> DataSpec:
    """The same data set with fewer images to train on."""
    folder.mkdir()
    for file in Path(data.folder).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "train.npy").unlink()
    np.save(folder / "train.npy", np.load(Path(data.folder) / "train.npy")[:count])
    return DataSpec("few", str(folder))


def test_a_last_batch_of_one_does_not_stop_batch_norm(digits, tmp_path):
    few = _first(digits, tmp_path / "few", 33)
    assert train({"epochs": 1, "batch": 32}, few, NET, tmp_path)["images"] == 33


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epoch": 1}, "did you mean 'epochs'"),
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"optimizer": "lion"}, "adamw or sgd"),
        ({"lr": 1e30, "optimizer": "sgd", "epochs": 1}, "training diverged in epoch 1"),
    ],
)
def test_options_that_can_not_work_are_refused(options, said, digits, tmp_path):
    with pytest.raises(UserError, match=said):
        train(options, _first(digits, tmp_path / "few", 64), NET, tmp_path)


def test_data_that_does_not_fit_is_refused(digits, tmp_path):
    def said(data: DataSpec, model: ModelSpec = NET) -> str:
        with pytest.raises(UserError) as caught:
            train({"epochs": 1}, data, model, tmp_path)
        return str(caught.value)

    assert "needs images with labels" in said(DataSpec())
    assert "10 classes and the model 7" in said(
        digits, ModelSpec("x", NET.source, channels=1, classes=7, preprocess=NET.preprocess)
    )
    assert "takes 3" in said(digits, ModelSpec("x", "torchvision:resnet18"))
    assert "it takes at least 2" in said(_first(digits, tmp_path / "one", 1))
