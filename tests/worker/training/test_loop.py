"""Training resumes after a kill with the same result, writes loadable weights, and refuses unfit input."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from dyno.worker.nets import models
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Preprocess, Unavailable, UserError
from dyno.worker.training import network
from dyno.worker.training.loop import Training
from dyno.worker.training.options import AUGMENTATIONS, OPTIMIZERS, TrainOptions, make_options
from refusals import refuses

NET = ModelSpec("digits", "dyno.worker.nets.digits:resnet18", channels=1, preprocess=Preprocess((0.5,), (0.5,), 0.0))
SIZE = 32
DIMS = Dims(16, SIZE, SIZE)
QUICK = {"epochs": 3, "batch": 16, "lr": 0.005, "augment": "shift"}

NETS = """
from torch import nn

class Two(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, 4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3))
        self.head, self.extra = nn.Linear(256, num_classes), nn.Linear(256, num_classes)
    def forward(self, x):
        x = self.body(x)
        return (self.head(x), self.extra(x)) if self.training else self.head(x)

def two(num_classes=10): return Two(num_classes)
def seven(): return nn.Sequential(nn.Flatten(), nn.Linear(1024, 7))
def picture(): return nn.Conv2d(1, 10, 3)
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    """128 of scikit-learn's digits to train on and 64 to test on, as `dyno.data` stores them."""
    from sklearn.datasets import load_digits

    grey, labels = load_digits(return_X_y=True)
    small = (grey[:192].reshape(-1, 8, 8) * 255 / 16).round().astype(np.uint8)
    images = np.stack([np.asarray(Image.fromarray(i).resize((SIZE, SIZE), Image.Resampling.BILINEAR)) for i in small])
    return stored(tmp_path_factory.mktemp("digits"), images[:, None], labels[:192], 128)


def stored(folder: Path, images: np.ndarray, labels: np.ndarray, train: int) -> DataSpec:
    """Store a decoded data set: the first `train` images to train on, the others to test on."""
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels.astype(np.int64))
    np.save(folder / "train.npy", np.arange(train))
    np.save(folder / "test.npy", np.arange(train, len(labels)))
    (folder / "meta.json").write_text(json.dumps({"classes": [str(i) for i in range(10)]}))
    return DataSpec(folder.name, str(folder), sha256="of-" + folder.name)


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("nets") / "nets.py"
    path.write_text(NETS)
    return str(path)


@pytest.fixture(scope="module")
def model(nets: str) -> ModelSpec:
    """Return a small network with dropout."""
    return dataclasses.replace(NET, source=f"{nets}:two")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def fit(data: DataSpec, folder: Path, model: ModelSpec = NET, tell=lambda text: None, dims: Dims = DIMS, **settings):
    """Train on the data set's own split and test on the other one."""
    folder.mkdir(exist_ok=True)
    training = dataclasses.replace(data, split="train")
    return Training(make_options({**QUICK, **settings}), training, data, model, dims, folder, tell).run()


def interrupt(at: str):
    """Return a `tell` that stops the training there, like a kill."""

    def tell(text: str) -> None:
        if text.startswith(at):
            raise KeyboardInterrupt

    return tell


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw", "schedule": "onecycle"},
        {"optimizer": "sgd", "schedule": "cosine", "warmup_epochs": 1.0, "lr": 0.02},
        {"optimizer": "rmsprop", "schedule": "step", "lr": 1e-3, "weight_decay": 1e-4},
        {"optimizer": "adam", "schedule": "constant", "warmup_epochs": 0.5, "mixed_precision": "bf16"},
    ],
    ids=lambda s: s["optimizer"],
)
def test_a_resumed_training_ends_with_the_same_bytes(settings, digits, model, tmp_path):
    whole = fit(digits, tmp_path / "whole", model, **settings)
    for stage in ("epoch 2/3, batch", "epoch 3/3, test"):
        with pytest.raises(KeyboardInterrupt):
            fit(digits, tmp_path / "parts", model, interrupt(stage), **settings)
    assert fit(digits, tmp_path / "parts", model, **settings).sha256 == whole.sha256
    for name in (network.BEST_FILE, network.LAST_FILE):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_network_with_batch_norm_resumes_exactly(digits, tmp_path):
    whole = fit(digits, tmp_path / "whole", epochs=2)
    with pytest.raises(KeyboardInterrupt):
        fit(digits, tmp_path / "parts", tell=interrupt("epoch 2/2, test"), epochs=2)
    assert fit(digits, tmp_path / "parts", epochs=2).sha256 == whole.sha256


@pytest.mark.parametrize("write", range(4))
def test_training_recovers_from_a_kill_between_two_writes(write, digits, model, tmp_path, monkeypatch):
    whole = fit(digits, tmp_path / "whole", model, epochs=1)
    left, replace = [write], os.replace

    def killed(a, b):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(a, b)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(digits, tmp_path / "parts", model, epochs=1)
    monkeypatch.undo()
    assert fit(digits, tmp_path / "parts", model, epochs=1).sha256 == whole.sha256
    left = {path.name for path in (tmp_path / "parts").iterdir()}
    assert left == {network.STATE_FILE, network.BEST_FILE, network.LAST_FILE, network.HISTORY_FILE}


def test_workers_and_earlier_random_draws_do_not_change_the_result(digits, model, tmp_path):
    first = fit(digits, tmp_path / "a", model, epochs=2)
    torch.rand(7)
    assert fit(digits, tmp_path / "b", model, epochs=2, workers=2).sha256 == first.sha256
    assert fit(digits, tmp_path / "c", model, epochs=2, seed=1).sha256 != first.sha256


def test_changed_settings_or_data_are_named(digits, model, tmp_path):
    fit(digits, tmp_path / "run", model, epochs=1)
    with pytest.raises(
        UserError, match=r"began with lr 0\.005 \(now 0\.1\), training images of-digits\d+ \(now another"
    ):
        fit(dataclasses.replace(digits, sha256="another"), tmp_path / "run", model, epochs=1, lr=0.1)
    assert fit(digits, tmp_path / "run", model, epochs=1, workers=1).epochs == 1


def test_newer_preprocessing_fields_do_not_change_the_training_state(digits, model, tmp_path):
    """Training resumes, and the demo's is found, although newer versions know more ways to prepare images."""
    fit(digits, tmp_path, model, epochs=1)
    settings = json.loads(torch.load(tmp_path / network.STATE_FILE, weights_only=True)["about"])["settings"]
    first = ("mean", "std", "resize", "interpolation")
    fields = {name: value for name, value in dataclasses.asdict(model.preprocess).items() if name in first}
    assert settings["preprocess"] == hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def test_loading_the_state_runs_no_code_and_damage_is_reported(digits, model, tmp_path):
    fit(digits, tmp_path, model, epochs=1)
    path = tmp_path / network.STATE_FILE
    assert set(torch.load(path, weights_only=True)) == {"about", "module", "optimizer", "schedule", "scaler"}
    for content in (path.read_bytes()[:5000], b"", b"no state"):
        path.write_bytes(content)
        refuses("damaged or not the state of a training; give another --out", fit, digits, tmp_path, model, epochs=1)
    torch.save({"about": Path("x")}, path)  # would run code
    refuses("damaged or not the state", fit, digits, tmp_path, model, epochs=1)


def test_the_best_epoch_is_kept_when_the_loss_diverges(digits, model, tmp_path, monkeypatch):
    loss, calls = network.compute_loss, []

    def diverging(*given):
        calls.append(1)
        return loss(*given) * (float("nan") if len(calls) > 8 else 1)

    monkeypatch.setattr(network, "compute_loss", diverging)
    with pytest.raises(
        UserError, match=r"diverged in epoch 2 .* lower lr, now 0.005; the best weights, of epoch 1 with"
    ):
        fit(digits, tmp_path, model)
    assert all(bool(value.isfinite().all()) for value in load_file(tmp_path / network.BEST_FILE).values())


def test_running_out_of_memory_is_a_memory_error(digits, model, tmp_path, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(network, "compute_loss", full)
    with pytest.raises(MemoryError, match="Tried to allocate 9 GiB"):
        fit(digits, tmp_path, model)


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", ["none", "fp16", "bf16"])
def test_training_on_a_gpu_learns_and_resumes(mixed, digits, tmp_path):
    settings = {"device": "cuda:0", "mixed_precision": mixed, "epochs": 12, "workers": 2}
    with pytest.raises(KeyboardInterrupt):
        fit(digits, tmp_path, tell=interrupt("epoch 7/12, test"), **settings)
    assert fit(digits, tmp_path, **settings).top1 > 60  # chance is 10 %
    with pytest.raises(UserError, match=r"began with .*device cuda \(now cpu\)"):
        fit(digits, tmp_path, **{**settings, "device": "cpu", "mixed_precision": "none"})


def test_the_history_records_every_epoch(digits, model, tmp_path):
    stages: list[str] = []
    result = fit(digits, tmp_path, model, stages.append)
    assert stages[:2] == ["build the model", "epoch 1/3"], "before the first batch, which may take long"
    rows = (tmp_path / network.HISTORY_FILE).read_text().splitlines()
    assert rows[0] == "epoch,lr,train_loss,test_loss,top1,seconds,images_per_s"
    assert [row.split(",")[0] for row in rows[1:]] == ["1", "2", "3"]
    assert result.top1 == 100 * result.hits / 64 == max(float(row.split(",")[4]) for row in rows[1:])
    assert result.top5 >= result.top1 and result.images == 128


def test_weights_with_other_class_counts_get_a_new_head(digits, tmp_path):
    torch.manual_seed(5)
    state = models.load(dataclasses.replace(NET, classes=4, seed=9)).state_dict()
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "four.safetensors")
    given = dataclasses.replace(NET, weights=str(tmp_path / "four.safetensors"), classes=10)
    module, notes = network.build_network(given, DIMS)
    assert notes[0].endswith("has 4 classes and the data 10: fc.weight, fc.bias begin from random values")
    assert torch.equal(module.conv1.weight, state["conv1.weight"]) and module.fc.weight.shape[0] == 10
    result = fit(digits, tmp_path / "run", given, epochs=1, freeze=True)
    assert result.notes == (*notes, "only fc.weight, fc.bias are trained")
    after = load_file(tmp_path / "run" / network.BEST_FILE)
    assert all(torch.equal(after[name], state[name]) for name in state if not name.startswith("fc."))
    assert not torch.equal(after["fc.weight"], module.fc.weight)


def test_published_weights_keep_all_but_the_head(tmp_path, monkeypatch):
    state = models.load(ModelSpec("r", "torchvision:resnet18", seed=3)).state_dict()
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    torch.save(state, tmp_path / "hub/checkpoints/resnet18-f37072fd.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    net = ModelSpec("r", "torchvision:resnet18", pretrained=True, classes=3)
    module, notes = network.build_network(net, Dims(2, 32, 32))
    assert "has 1000" in notes[0].replace("published weights of torchvision:resnet18 ", "") and "the data 3" in notes[0]
    assert torch.equal(module.layer4[1].conv2.weight, state["layer4.1.conv2.weight"])


def test_a_checkpoint_of_another_network_is_refused(model, tmp_path):
    save_file(models.load(model).state_dict(), tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"don't fit the model: missing conv1\.weight"):
        network.build_network(dataclasses.replace(NET, weights=str(tmp_path / "x.safetensors"), classes=10), DIMS)


def test_auxiliary_classifiers_weigh_less():
    scores, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    alone = torch.nn.functional.cross_entropy(scores, labels)
    assert torch.isclose(network.compute_loss((scores, scores), labels, 0.0), 1.3 * alone)
    assert torch.isclose(network.compute_loss(scores, labels, 0.0), alone)


@pytest.mark.parametrize("kind", AUGMENTATIONS)
def test_augmentation_makes_images_of_the_training_size(kind, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 40, 50), np.uint8)
    split = network.Split.open(dataclasses.replace(stored(tmp_path, images, np.arange(6), 4), split="train"))
    size = (40, 50) if kind in ("none", "shift") else (32, 40)
    batched = network.BatchDataset(split, network.make_augmentation(kind, size))
    before = torch.default_generator.get_state()
    one, again, other = (batched[seed, np.arange(4)][0] for seed in (1, 1, 2))
    assert one.shape == (4, 3, *size) and one.dtype == torch.uint8
    assert torch.equal(one, again)
    assert torch.equal(one, other) == (kind == "none")
    assert torch.equal(torch.default_generator.get_state(), before)
    if kind == "light":  # a crop of the cached pixels, possibly mirrored
        crops = np.lib.stride_tricks.sliding_window_view(images[0], size, (1, 2))[0].reshape(-1, *size)
        assert any(np.array_equal(crop, seen) for seen in (one[0, 0], one[0, 0].flip(1)) for crop in crops)


def test_training_inputs_match_those_of_other_commands(digits):
    from dyno.worker.inputs.input_data import Images

    split = network.Split.open(digits)
    (x, y), *_ = network.BatchReader(split, NET.preprocess, TrainOptions())(network.plain_batches(split, 8))
    assert np.array_equal(x.numpy(), Images(digits, NET.preprocess).read_batch(0, 8))
    assert y.tolist() == split.labels[split.index[:8]].tolist()


@pytest.mark.parametrize(("images", "sizes"), [(128, [16] * 8), (33, [16, 17]), (3, [3])])
def test_every_image_is_in_one_batch_of_at_least_two(images, sizes, tmp_path):
    data = stored(tmp_path, np.zeros((images + 2, 1, 4, 4), np.uint8), np.zeros(images + 2), images)
    split = network.Split.open(dataclasses.replace(data, split="train"))
    keys = network.load_batches(split, TrainOptions(batch=16), 1)
    assert [len(rows) for _, rows in keys] == sizes
    assert sorted(np.concatenate([rows for _, rows in keys])) == list(range(images))
    other = network.load_batches(split, TrainOptions(batch=16), 2)
    assert images < 5 or [list(rows) for _, rows in keys] != [list(rows) for _, rows in other]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 1}, "did you mean 'epochs'"),
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"batch": 1}, "batch is 1; it must be at least 2"),
        ({"lr": -1.0}, "lr is -1; it must be more than 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"momentum": 1.0}, "momentum is 1; it must be at least 0 and less than 1"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'; known: sgd, adamw, adam, rmsprop"),
        ({"schedule": "up"}, "unknown schedule 'up'; known: onecycle"),
        ({"augment": "all"}, "unknown augment 'all'"),
        ({"mixed_precision": "fp16"}, "fp16 needs a GPU; on a CPU give bf16 or none"),
        ({"warmup_epochs": 20}, "warmup_epochs is 20 of 20 epochs; it must be fewer"),
    ],
)
def test_impossible_options_are_refused(settings, message):
    refuses(message, make_options, settings)


def test_every_optimiser_has_a_default_learning_rate():
    for name, (lr, decay) in OPTIMIZERS.items():
        chosen = make_options({"optimizer": name})
        assert (chosen.peak, chosen.decay) == (lr, decay)
        assert make_options({"optimizer": name, "lr": 0.5, "weight_decay": 0.0}).settings()["lr"] == 0.5


def test_unsuitable_data_and_models_are_refused(digits, nets, tmp_path):
    def refusal(data: DataSpec, source: str = NET.source, dims: Dims = DIMS, **settings) -> str:
        channels = 3 if source.startswith("torchvision") else 1
        with pytest.raises((UserError, Unavailable)) as caught:
            fit(data, tmp_path / "x", ModelSpec("x", source, channels=channels), dims=dims, **settings)
        return str(caught.value)

    assert "needs images with labels" in refusal(DataSpec())
    assert "1 channels and the model takes 3" in refusal(digits, "torchvision:resnet18")
    assert "trained at 48" in refusal(digits, dims=Dims(2, 48, 48))
    assert "has 7 classes and the data has 10" in refusal(digits, f"{nets}:seven")
    assert "only classifiers can be trained" in refusal(digits, f"{nets}:picture")
    assert "needs a GPU" in refusal(digits, device="cuda:99")
