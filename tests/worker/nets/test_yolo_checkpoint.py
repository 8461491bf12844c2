"""A YOLO user's own checkpoint is a model by itself, and nothing in it is run."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ultralytics", reason="ultralytics is not installed (pip install 'inference-dyno[ultralytics]')")

from dyno import Study
from dyno.study.model_info import model_spec
from dyno.worker.jobs.inspect_model import inspect_model
from dyno.worker.nets import models, ultralytics_models
from dyno.worker.spec import Dims, ModelSpec, Trial, UserError
from trap import Trap

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that saves a checkpoint as ultralytics does, with random weights and individual statistics."""
    import yaml
    from ultralytics import YOLO

    tasks = ultralytics_models.import_library()

    def made(name: str, nc: int | None = None) -> Path:
        place = tmp_path_factory.mktemp("saved")
        config = tasks.yaml_model_load(f"{name}.yaml")
        (place / f"{name}.yaml").write_text(yaml.safe_dump({**config, "nc": nc or config["nc"]}))
        network = YOLO(place / f"{name}.yaml")
        torch.manual_seed(1)
        for value in network.model.state_dict().values():
            if value.is_floating_point():
                value.mul_(1 + 0.1 * torch.rand_like(value))
        network.save(place / "best.pt")
        return place / "best.pt"

    return made


def spec(path: Path, **settings: Any) -> ModelSpec:
    return model_spec(Study(models=(str(path),), **settings), str(path))


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Apply a change to the checkpoint's content; return its path."""
    found = torch.load(path, weights_only=False)
    change(found)
    torch.save(found, path)
    return path


@pytest.mark.parametrize(
    ("name", "task", "classes"),
    [("yolov8n", "detect", 80), ("yolo11n-seg", "segment", 80), ("yolov8n-pose", "pose", 1), ("yolo11n-cls", "classify",
     1000), ("yolo11n", "detect", 3)],
)  # fmt: skip
def test_checkpoint_outputs_match_the_library(saved: Any, name: str, task: str, classes: int) -> None:
    from ultralytics import YOLO

    path = saved(name, 3 if classes == 3 else None)
    model = spec(path)
    assert (model.name, model.source) == ("best", f"ultralytics:{path}")
    said = inspect_model(Trial(model, "", "fp32", Dims(1, 0, 0)), [[64, 64]], {}, "")
    assert (said.task, said.classes) == (task, classes)
    image = torch.rand(2, 3, 64, 96)
    theirs = YOLO(path).model.float().eval()
    theirs.model[-1].export = True
    with torch.inference_mode():
        own, wanted = (net(image) for net in (models.load(model), theirs))
    for a, b in zip(*(each if isinstance(each, (tuple, list)) else [each] for each in (own, wanted)), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b)


def test_averaged_weights_and_the_training_size_are_used(saved: Any) -> None:
    def training(content: dict[str, Any]) -> None:
        content["ema"] = copy.deepcopy(content["model"])
        content["model"].model[0].conv.weight.data.zero_()
        content["ema"].args["imgsz"] = 96

    path = changed(saved("yolov8n-cls", 4), training)
    assert float(models.load(spec(path)).model[0].conv.weight.abs().min()) > 0
    assert models.image_size(spec(path)) == (96, 96)


def test_code_planted_in_a_checkpoint_is_never_run(saved: Any, tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    def plant(content: dict[str, Any]) -> None:
        content["train_args"] = content["optimizer"] = Trap(mark)
        content["model"].names[0] = content["model"].args["model"] = Trap(mark)
        content["model"].model[0].conv.padding_mode = Trap(mark)

    path = saved("yolov8n-cls", 4)
    before = models.weights_sha256(models.load(spec(path)))
    torch.save(planted := torch.load(path, weights_only=False), path)
    plant(planted)
    torch.save(planted, path)
    assert models.weights_sha256(models.load(spec(path))) == before and not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the trap is a real one"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"activation": "__import__('os').system('touch ran')"}, "the activation .* is not a layer of torch.nn"),
        ({"activation": "nn.SiLU() or exit()"}, "is not a layer of torch.nn"),
        ({"head": [[-1, 1, "load_checkpoint", ["other.pt"]]]}, "load_checkpoint is not a layer that ultralytics has"),
        ({"head": [[-1, 1, "torch.hub.load", ["x"]]]}, "torch.hub.load is not a layer"),
        ({"head": [[-1, 1, "nn.init.ones_", [1]]]}, "nn.init.ones_ is not a layer"),
        ({"head": 3}, "lists no layers under backbone and head"),
    ],
)
def test_an_architecture_may_only_name_layers(
    saved: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = changed(saved("yolov8n-cls", 4), lambda content: content["model"].yaml.update(config))
    with pytest.raises(UserError, match=reason) as e:
        models.build(spec(path))
    assert "\n" not in str(e.value) and not Path("ran").exists()


def test_a_custom_activation_is_kept(saved: Any) -> None:
    path = changed(saved("yolov8n-cls", 4), lambda content: content["model"].yaml.update(activation="torch.nn.ReLU()"))
    assert isinstance(models.load(spec(path)).model[0].act, torch.nn.ReLU)


def test_unreadable_checkpoints_print_conversion_code(saved: Any, tmp_path: Path) -> None:
    path = changed(saved("yolov8n-cls", 4), lambda content: content["model"].yaml.clear())
    with pytest.raises(
        UserError, match=r"m = ultralytics.YOLO\('.*best.pt'\).*give ultralytics:net.yaml --weights net"
    ):
        ultralytics_models.read_checkpoint(str(path))


def test_the_printed_conversion_code_works(saved: Any, tmp_path: Path) -> None:
    """An architecture named net.yaml keeps the letter of its scale."""
    import safetensors.torch
    import ultralytics
    import yaml

    path = saved("yolov8s-cls", 4)
    m = ultralytics.YOLO(path).model.float()
    safetensors.torch.save_file(m.state_dict(), tmp_path / "net.safetensors")
    yaml.safe_dump(m.yaml, (tmp_path / "net.yaml").open("w"))
    own = ModelSpec("net", f"ultralytics:{tmp_path / 'net.yaml'}", weights=str(tmp_path / "net.safetensors"))
    assert models.weights_sha256(models.load(own)) == models.weights_sha256(models.load(spec(path)))


def test_other_torch_save_files_are_identified(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(1, 1).state_dict(), tmp_path / "w.pt")
    for source in (tmp_path / "w.pt", f"ultralytics:{tmp_path / 'w.pt'}"):
        with pytest.raises(UserError, match=r"it holds weights without their network: give that too, e\.g\. torchvis"):
            models.load(model_spec(Study(models=(str(source),)), str(source)))


def test_a_torchscript_program_loads_under_any_suffix(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    torch.jit.trace(net, torch.zeros(1, 3, 2, 2)).save(tmp_path / "net.pt")
    model = spec(tmp_path / "net.pt")
    assert (model.name, model.source) == ("net", f"saved:{tmp_path / 'net.pt'}")
    with torch.inference_mode():
        torch.testing.assert_close(models.load(model)(image := torch.rand(2, 3, 2, 2)), net(image))


def test_a_checkpoint_runs_from_the_command_line(saved: Any, tmp_path: Path, dyno: Any) -> None:
    path = saved("yolov8n", 3)
    short = "--rounds 1 --seconds 0.05 --block 0.01 --warmup 0.02 --boundaries model --routes usual".split()
    words = ("--backend", "pytorch,onnxruntime", "--size", 64, *short, "--out", "r")
    dyno("run", path, *words, cwd=tmp_path, code=0)
    shown = dyno("show", "r", "--format", "json", cwd=tmp_path)
    assert [(row["model"], row["status"]) for row in json.loads(shown.stdout)["tables"]["trials"]["rows"]] == [
        ("best", "ok")
    ] * 2


def test_the_class_names_of_a_checkpoint_are_read(saved: Any) -> None:
    def rename(found: dict[str, Any]) -> None:
        for key in ("model", "ema"):
            if found.get(key) is not None:
                found[key].names = {0: "disc", 1: "triangle"}

    path = changed(saved("yolov8n", 2), rename)
    assert inspect_model(Trial(spec(path), "", "fp32", Dims(1, 0, 0)), [[64, 64]], {}, "").class_names == (
        "disc",
        "triangle",
    )
