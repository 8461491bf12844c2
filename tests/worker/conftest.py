"""A small ONNX network that classifies digits, with its training and test data."""

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_text
import preloaded
from dyno.worker.backend import Session
from dyno.worker.facts.files import MakerFacts
from dyno.worker.spec import Artifact, DataSpec, Dims, ModelSpec, Preprocess, Runtime, Tensor, Trial

SIZE = 8
THREADS = 2


@dataclass(frozen=True)
class Digits:
    """scikit-learn's digits decoded as in Dyno, and a network trained on them."""

    data: DataSpec
    model: ModelSpec
    artifact: Artifact

    def trial(self, backend: str, precision: str = "fp32", batch: int = 1, **options: Any) -> Trial:
        """Return a trial of the network on its test images."""
        runtime = Runtime(threads=THREADS)
        return Trial(
            self.model, backend, precision, Dims(batch, SIZE, SIZE), options=options, data=self.data, runtime=runtime
        )

    def images(self, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
        """Return the split's normalised images and their labels."""
        folder = Path(self.data.folder)
        index = np.load(folder / f"{split}.npy")
        pixels = np.load(folder / "images.npy")[index].astype(np.float32)
        return (pixels / 255 - 0.5) / 0.5, np.load(folder / "labels.npy")[index]

    @staticmethod
    def outputs(session: Session, images: np.ndarray, slot: int = 0) -> dict[str, np.ndarray]:
        """Return the session's outputs of one batch."""
        session.bind({"input": images}, slot)
        session.run(slot)
        session.wait(slot)
        return session.fetch(slot)

    @staticmethod
    def described(path: Path, batch: int | str = "batch", precision: str = "fp32") -> Artifact:
        """Return the file's artifact, as the exporter describes it."""
        content = path.read_bytes()
        inputs = (Tensor("input", "float32", (batch, 1, SIZE, SIZE)),)
        made_outputs = (Tensor("output", "float32", (batch, 10)),)
        digest = hashlib.sha256(content).hexdigest()
        made_by = MakerFacts(backend="onnx_export", parameters=1234)
        return Artifact("onnx", str(path), digest, len(content), precision, inputs, made_outputs, 0.0, made_by=made_by)

    @staticmethod
    def export(net: Any, path: Path, shape: tuple[int, ...] = (1, SIZE, SIZE)) -> None:
        """Write the network as ONNX with a free batch."""
        import torch

        free = {"input": {0: "batch"}, "output": {0: "batch"}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                net, (torch.zeros(1, *shape),), path, input_names=["input"], output_names=["output"],
                dynamic_axes=free, opset_version=17, dynamo=False,
            )  # fmt: skip

    def accuracy(self, session: Session, batch: int) -> float:
        """Return the share of test images that the session classifies correctly."""
        images, labels = self.images()
        whole = len(images) // batch * batch
        scores = [self.outputs(session, images[i : i + batch])["output"].copy() for i in range(0, whole, batch)]
        return float((np.concatenate(scores).argmax(1) == labels[:whole]).mean())


@pytest.fixture(scope="session", autouse=True)
def _exporter() -> None:
    if find_spec("torch") and find_spec("onnxscript"):
        preloaded.remember_operators()


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    """The digits in three splits, and the network trained on the first."""
    folder = tmp_path_factory.mktemp("digits")
    data = _decoded(folder)
    model = ModelSpec("digits", "file:digits.onnx", channels=1, preprocess=Preprocess((0.5,), (0.5,), 0.0))
    made = Digits(data, model, Artifact("onnx", "", "", 0, "fp32", (), (), 0.0))
    path = folder / "digits.onnx"
    made.export(_trained(*made.images("train")), path)
    return replace(made, artifact=made.described(path), model=replace(model, source=f"file:{path}"))


@pytest.fixture(scope="session")
def static_file(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network in a file whose batch is fixed at 1."""
    import onnx

    model = onnx.load(digits.artifact.path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    path = tmp_path_factory.mktemp("static") / "static.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture
def onnx_file(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes an ONNX file from a text and weights."""
    return lambda text, **weights: onnx_text.write(tmp_path / "made.onnx", text, ir=10, **weights)


def _decoded(folder: Path) -> DataSpec:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    np.save(folder / "images.npy", np.rint(found.images * 255 / 16).astype(np.uint8)[:, None])
    np.save(folder / "labels.npy", found.target.astype(np.int64))
    for split, part in (("train", order[:1000]), ("calibration", order[1000:1200]), ("test", order[1200:])):
        np.save(folder / f"{split}.npy", part)
    return DataSpec("digits", str(folder), sha256="d161", split="test", count=len(order) - 1200)


def _trained(images: np.ndarray, labels: np.ndarray) -> Any:
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(width, width, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.conv(x))

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(
        *stem, nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), Residual(32), nn.Flatten(), nn.Linear(512, 10)
    )
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    for _ in range(8):
        for part in torch.randperm(len(x)).split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[part]), y[part]).backward()
            optimiser.step()
    return net.eval()
