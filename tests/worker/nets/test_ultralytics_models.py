"""YOLO networks give outputs fit for post-processing, from random, stored and trained weights, without printing."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("ultralytics", reason="ultralytics is not installed (pip install 'inference-dyno[ultralytics]')")

from dyno.worker.inspection import Inspection
from dyno.worker.jobs.inspect_model import inspect_model
from dyno.worker.nets import models, ultralytics_models
from dyno.worker.spec import Dims, ModelSpec, Preprocess, Trial, UserError, digest
from refusals import refuses

PROBE = """
from dyno.worker.nets import models
from dyno.worker.spec import ModelSpec
models.build(ModelSpec("y", "ultralytics:yolov8n-cls.yaml", classes=3))
"""


def spec(name: str, **options: Any) -> ModelSpec:
    return ModelSpec("yolo", f"ultralytics:{name}", **options)


def facts(model: ModelSpec, size: int = 64, task: str = "") -> Inspection:
    return inspect_model(Trial(model, "", "fp32", Dims(1, 0, 0)), [[size, size]], {}, task)


def test_detectors_give_predictions_in_pixels_and_scores() -> None:
    module = models.load(spec("yolov8n.yaml", classes=5))
    with torch.inference_mode():
        found = module(torch.rand(2, 3, 64, 96))
    assert not module.training
    assert found.shape == (2, 4 + 5, (8 * 12 + 4 * 6 + 2 * 3))
    assert found[:, :4].max() > 32
    assert 0 <= found[:, 4:].min() <= found[:, 4:].max() <= 1


def test_segmenters_give_prototypes_too() -> None:
    with torch.inference_mode():
        predictions, prototypes = models.load(spec("yolo11n-seg.yaml", classes=2))(torch.rand(1, 3, 64, 64))
    assert predictions.shape == (1, 4 + 2 + 32, 84)
    assert prototypes.shape == (1, 32, 16, 16)


def test_classifiers_give_probabilities() -> None:
    with torch.inference_mode():
        found = models.load(spec("yolov8n-cls.yaml", classes=7))(torch.rand(3, 3, 48, 48))
    torch.testing.assert_close(found.sum(1), torch.ones(3))
    assert found.shape == (3, 7)


def test_inspection_finds_task_classes_keypoints_and_preprocessing() -> None:
    found = facts(spec("yolov8n-pose.yaml"))
    assert (found.task, found.classes, found.keypoints) == ("pose", 1, (17, 3))
    assert found.size == (640, 640)
    assert found.preprocess.letterbox
    assert found.preprocess.mean == (0.0, 0.0, 0.0)
    assert facts(spec("yolov8n-pose.yaml", classes=2, keypoints=(4, 2))).keypoints == (4, 2)
    classifier = facts(spec("yolov8n-cls.yaml", channels=1))
    assert (classifier.task, classifier.classes, classifier.size) == ("classify", 1000, (224, 224))
    assert replace(classifier.preprocess, std=()) == Preprocess((0.0,), (), 1.0, "bilinear", False)


def test_the_seed_determines_the_weights() -> None:
    first, again, other = (models.weights_sha256(models.load(spec("yolov8n-cls.yaml", seed=n))) for n in (1, 1, 2))
    assert first == again != other


def test_classes_and_keypoints_are_read_from_the_weights(tmp_path: Path) -> None:
    trained = models.load(spec("yolov8n-pose.yaml", classes=3, keypoints=(4, 3), seed=7))
    save_file(trained.state_dict(), tmp_path / "pose.safetensors")
    again = models.load(spec("yolov8n-pose.yaml", weights=str(tmp_path / "pose.safetensors")))
    found = models.read_purpose(spec("yolov8n-pose.yaml"), again)
    assert (found.classes, found.keypoints) == (3, (4, 3))
    assert models.weights_sha256(again) == models.weights_sha256(trained)
    refuses("don't fit the model", models.load, spec("yolov8s-pose.yaml", weights=str(tmp_path / "pose.safetensors")))
    with pytest.raises(UserError, match=r"pose.safetensors are of 3 classes, not 80; give --classes 3$"):
        models.load(spec("yolov8n-pose.yaml", classes=80, weights=str(tmp_path / "pose.safetensors")))


def test_an_ultralytics_checkpoint_is_read(tmp_path: Path) -> None:
    from ultralytics import YOLO

    YOLO("yolov8n-cls.yaml").save(tmp_path / "best.pt")
    assert facts(spec(str(tmp_path / "best.pt"))).task == "classify"
    refuses(r"are of 1000 classes, not 5; give --classes 1000", models.load, spec(str(tmp_path / "best.pt"), classes=5))
    (tmp_path / "cut.pt").write_bytes((tmp_path / "best.pt").read_bytes()[:5000])
    refuses(r"cut\.pt is cut short", models.load, spec(str(tmp_path / "cut.pt")))


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    code = f"""
import os, torch
class Trap:
    def __reduce__(self): return os.system, ("touch {tmp_path}/ran",)
torch.save({{"model": Trap()}}, "{tmp_path}/trap.pt")
from dyno.worker.nets import models
from dyno.worker.spec import ModelSpec, UserError
try:
    models.build(ModelSpec("y", "ultralytics:{tmp_path}/trap.pt"))
except UserError as e:
    print("refused:", e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    assert done.stdout.startswith("refused:"), done.stderr
    assert not (tmp_path / "ran").exists()


def test_the_path_of_a_checkpoint_does_not_change_its_digest() -> None:
    one, other = (ModelSpec("y", f"ultralytics:/{place}/best.pt", source_sha256="ab") for place in "xy")
    assert digest(one) == digest(other)
    assert digest(spec("yolov8n.yaml")) != digest(spec("yolov8s.yaml"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("yolov8n", "did you mean ultralytics:yolov8n.yaml"),
        ("yolov8n-sge.yaml", "did you mean ultralytics:yolov8n-seg.yaml"),
        ("yolov9sc.yaml", r"has no network 'yolov9sc.yaml'; did you mean ultralytics:yolov9s.yaml\?"),
        ("yolov3n.yaml", r"has no network 'yolov3n.yaml'; did you mean ultralytics:yolov3.yaml\?"),
        ("qqq", "it is NAME.yaml, your own .yaml or a .pt"),
        ("https://somewhere.invalid/yolov8n.yaml", "has no network"),
        ("yolov8n.pt", "there is no checkpoint yolov8n.pt"),
        ("yolov8n-obb.yaml", "network for obb; supported are classify, detect"),
        ("yolov10n.yaml", "end to end"),
        ("yolo26n.yaml", "end to end"),
        ("rtdetr-l.yaml", "unknown task"),
    ],
)
def test_networks_that_cannot_be_measured_are_refused_in_one_line(name: str, reason: str) -> None:
    refuses(reason, models.load, spec(name))


def test_every_network_that_is_suggested_exists() -> None:
    tasks, names = ultralytics_models.import_library(), ultralytics_models._network_names()
    assert {"yolov8n.yaml", "yolov8x-pose-p6.yaml", "yolo11-cls-resnet18.yaml", "yolov9c-seg.yaml"} < set(names)
    files = {path.name for path in (Path(tasks.__file__).parents[1] / "cfg/models").rglob("*.yaml")}
    for name in sorted({*names} - files)[::4]:
        found = tasks.yaml_model_load(name)
        assert found["scale"] in found["scales"], name


def test_published_weights_are_not_fetched() -> None:
    refuses("get the file yourself", models.load, spec("yolov8n.yaml", pretrained=True))


def test_invalid_sizes_are_refused_with_the_nearest_valid_one() -> None:
    refuses(r"multiples of 32, not 100x100; try --size 96", facts, spec("yolov8n.yaml"), 100)
    refuses("is a network for detect, not pose", facts, spec("yolov8n.yaml"), 64, "pose")
    assert facts(spec("yolov8n-cls.yaml"), 50).task == "classify"


def test_the_library_is_silent_and_leaves_nothing_behind(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("YOLO_", "XDG_"))}
    home = {"HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={**env, **home}, capture_output=True, text=True, timeout=1200
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "ltralytics" not in done.stderr
    assert not list(tmp_path.rglob("*ltralytics*"))
