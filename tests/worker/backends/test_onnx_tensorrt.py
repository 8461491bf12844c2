"""Files written for TensorRT are accepted: TensorRT-RTX builds them in the requested types."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dyno.worker.makers.precision import convert_recipe
from dyno.worker.registry import find, get_maker
from dyno.worker.spec import Artifact, DataSpec, Dims, ModelSpec, Recipe, Runtime, Tensor, Trial, digest
from refusals import refuses

NAME = "tensorrt_rtx"
needs_builder = pytest.mark.skipif(not importlib.util.find_spec(NAME), reason="tensorrt-rtx is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns a recipe's file and makes each file on the way once."""
    kept: dict[str, Artifact] = {}

    def make(recipe: Recipe | None) -> Artifact:
        assert recipe is not None
        if (key := digest(recipe)) not in kept:
            parent = make(recipe.parent) if recipe.parent else None
            kept[key] = get_maker(recipe.maker).make(recipe, parent, tmp_path_factory.mktemp("made"))
        return kept[key]

    return make


def trial(model: ModelSpec, precision: str, size: int, data: DataSpec, **options: Any) -> Trial:
    return Trial(model, NAME, precision, Dims(2, size, size), options, data=data, runtime=Runtime(device="cuda:0"))


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    folder = tmp_path_factory.mktemp("noise")
    np.save(folder / "images.npy", np.random.default_rng(0).integers(0, 256, (8, 3, 64, 64), dtype=np.uint8))
    np.save(folder / "labels.npy", np.arange(8) % 2)
    for split in ("calibration", "test"):  # exports are compared with the module on the test split
        np.save(folder / f"{split}.npy", np.arange(8))
    return DataSpec("noise", str(folder), "n015e", count=8)


@needs_builder
@pytest.mark.parametrize(("precision", "kind"), [("fp16", "float16"), ("bf16", "bfloat16"), ("int8", "int8")])
def test_raw_pixel_inputs_build_in_lower_precisions(digits: Any, made: Any, precision: str, kind: str) -> None:
    engine = made(find(NAME).recipe(trial(digits.model, precision, 8, digits.data, input="uint8")))
    assert engine.inputs == (Tensor("input", "uint8", (2, 1, 8, 8)),)
    assert engine.made_by.layers_by_type == {kind: 4}, "three convolutions and a matrix product"


@needs_builder
@pytest.mark.parametrize(
    ("source", "size", "convolutions", "products"),
    [
        ("timm:test_resnet", 64, 15, 1),
        pytest.param("timm:test_efficientnet", 64, 17, 1, marks=pytest.mark.rare),
        pytest.param("timm:test_vit", 160, 1, 25, marks=pytest.mark.rare),
    ],
)
def test_every_layer_with_weights_is_int8(
    noise: DataSpec, made: Any, tmp_path: Path, source: str, size: int, convolutions: int, products: int
) -> None:
    if size != 64:
        noise = grown(noise, size, tmp_path)
    model = ModelSpec(source.rpartition(":")[2], source)
    engine = made(find(NAME).recipe(trial(model, "int8", size, noise, exporter="dynamo")))
    assert engine.made_by.layers_by_type["int8"] == convolutions + products


def grown(data: DataSpec, size: int, folder: Path) -> DataSpec:
    place = folder / "grown"
    place.mkdir()
    for path in Path(data.folder).iterdir():
        np.save(place / path.name, np.load(path))
    np.save(place / "images.npy", np.random.default_rng(0).integers(0, 256, (8, 3, size, size), dtype=np.uint8))
    return replace(data, folder=str(place))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("source", ["timm:test_resnet", "timm:test_efficientnet"])
def test_networks_are_exported_in_the_opset_of_tensorrt_8_6(
    noise: DataSpec, made: Any, source: str, exporter: str
) -> None:
    model = ModelSpec(source.rpartition(":")[2], source)
    file = made(convert_recipe(trial(model, "fp32", 64, noise, exporter=exporter), "tensorrt"))
    assert (file.made_by.exporter, file.made_by.opset) == (exporter, 17)
    onnx.checker.check_model(file.path, full_check=True)


@pytest.mark.parametrize("precision", ["int8"])
@pytest.mark.parametrize(
    ("images", "calibration", "said"),
    [
        (None, 4, "nines has no images except test images; int8 needs others: give --calibration"),
        ((4, 1, 8, 8), 0, "the calibration split of nines is empty; int8 needs real calibration images: give --data"),
        ((4, 1, 9, 9), 4, "nines are 1x9x9, but the model reads 1x8x8"),
        ((4, 3, 8, 8), 4, "nines are 3x8x8, but the model reads 1x8x8"),
    ],
)
def test_missing_or_mismatched_calibration_data_is_refused(
    digits: Any, tmp_path: Path, precision: str, images: tuple[int, ...] | None, calibration: int, said: str
) -> None:
    if images:
        np.save(tmp_path / "images.npy", np.zeros(images, np.uint8))
        np.save(tmp_path / "labels.npy", np.arange(4))
        np.save(tmp_path / "calibration.npy", np.arange(calibration))
    data = DataSpec("nines", str(tmp_path), "9")
    step = convert_recipe(replace(digits.trial("tensorrt", precision), data=data), "tensorrt")
    refuses(said, get_maker(step.maker).make, step, digits.artifact, tmp_path)
