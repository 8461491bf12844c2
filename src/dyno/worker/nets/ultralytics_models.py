"""Networks of ultralytics (YOLOv8, YOLO11 and relatives) from a YAML or a checkpoint, with only their raw outputs.

The library is under the AGPL and an optional extra: only its public classes are called. It is imported without
telemetry, installations or banners, and its settings go to a temporary folder.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dyno.worker.extras import load_library
from dyno.worker.inspection import Purpose
from dyno.worker.nets import checkpoint as nets_checkpoint
from dyno.worker.nets.checkpoint import apply
from dyno.worker.nets.model_source import BuildCode, ImageConfig, ModelSource, check_unchanged, name_classes
from dyno.worker.spec import Dims, ModelSpec, UserError, shorten
from dyno.worker.tasks import find_task as find_task

QUIET_VARIABLES = {
    "YOLO_OFFLINE": "1",
    "YOLO_AUTOINSTALL": "False",
    "YOLO_VERBOSE": "False",
    "ULTRALYTICS_SAFE_LOAD": "1",  # only the library's own classes in checkpoints
}
BUILDER_CLASSES = {
    "detect": "DetectionModel",
    "segment": "SegmentationModel",
    "pose": "PoseModel",
    "classify": "ClassificationModel",
}
# Heads with output layouts that the tasks read
HEAD_TASKS = {"Classify": "classify", "Detect": "detect", "Segment": "segment", "Pose": "pose"}
CHECKPOINT_SUFFIXES = (".pt", ".pth")  # user's checkpoints (best.pt), read without running their code
MAX_SIDE = 8192  # limit of a checkpoint's training size, in pixels
MAX_VALUES = 10_000  # values in an architecture
ACTIVATION_CODE = re.compile(r"(?:torch\.)?nn\.([A-Z]\w*)\([\w., =-]*\)")  # evaluated as code by the library
NETWORK_CODE = """network = tasks.{kind}(CONFIG, ch={channels}, nc={classes}, verbose=False)
    network.model[-1].export = True
    network.model[-1].dynamic = False
    return network"""


def import_library() -> Any:
    """Import `ultralytics.nn.tasks`; raise `Unavailable` with the package to install."""
    if "ultralytics" in sys.modules:
        return load_library("ultralytics.nn.tasks")
    with tempfile.TemporaryDirectory() as settings:
        os.environ.update({**QUIET_VARIABLES, "YOLO_CONFIG_DIR": settings})
        return load_library("ultralytics.nn.tasks")


class Ultralytics(ModelSource):
    """`ultralytics:NAME.yaml` with random weights, or a checkpoint `ultralytics:FILE.pt`; only raw outputs."""

    name = "ultralytics"
    form = "ultralytics:NAME.yaml"
    takes_image = True
    says_purpose = True

    def build(self, model: ModelSpec, rest: str, dims: Dims | None, state: Mapping[str, Any] | None) -> Any:
        """Build the network; `state` gives the number of classes and keypoints if `model` doesn't.

        Without a batch in `dims` it can be exported for every batch. Raise a `UserError` for a missing network,
        unsuitable weights, or an unsupported YOLO.
        """
        check_unchanged(rest, model.source_sha256, "model file")
        tasks, source = import_library(), model.source
        if model.pretrained:
            raise UserError(f"{source} has no published weights here; get the file yourself and give it as "
                            "ultralytics:FILE.pt")  # fmt: skip
        module = (
            _from_checkpoint(tasks, model, rest) if self.has_weights(rest) else _from_yaml(tasks, model, rest, state)
        )
        head = module.model[-1]
        is_end_to_end = getattr(head, "one2one_cv2", None) is not None  # a second head for use without suppression
        if type(head).__name__ not in HEAD_TASKS or is_end_to_end:
            problem = "finds objects end to end" if is_end_to_end else f"ends in {type(head).__name__}"
            task_names = ", ".join(HEAD_TASKS.values())
            raise UserError(f"{source} {problem}, which can't be read here; take a YOLOv8 or YOLO11 ({task_names})")
        head.export = True  # the library's switch for only raw outputs
        # Else it caches anchors by shape, which fixes the batch in an exported graph.
        head.dynamic = dims is not None and not dims.batch
        return module

    def has_weights(self, rest: str) -> bool:
        return rest.endswith(CHECKPOINT_SUFFIXES)

    def read_image_config(self, model: ModelSpec, rest: str) -> ImageConfig:
        """Return the preprocessing of images, and the training size if a checkpoint has it, else the task's size.

        Raise a `UserError` for an unsupported task.
        """
        tasks = import_library()
        checkpoint = read_checkpoint(rest) if self.has_weights(rest) else None
        config = checkpoint.config if checkpoint else _read_config(tasks, model.source, rest)
        task = find_task(_find_task(tasks, model.source, config))
        return task.preprocess(model.channels), (
            checkpoint.size,
            checkpoint.size,
        ) if checkpoint and checkpoint.size else task.size

    def read_purpose(self, model: ModelSpec, rest: str, module: Any) -> Purpose:
        """Return a network's task, classes, keypoints' shape (() for none) and stride."""
        head = module.model[-1]
        task = HEAD_TASKS[type(head).__name__]
        is_classifier = hasattr(head, "linear")  # a head that sees the whole image, whatever its size
        return Purpose(
            task=task,
            classes=int(head.linear.out_features if is_classifier else head.nc),
            class_names=name_classes(module),
            keypoints=tuple(int(n) for n in getattr(head, "kpt_shape", ())),
            stride=1 if is_classifier else int(max(module.stride)),
        )

    def write_code(self, model: ModelSpec, rest: str, network: Any, dims: Dims, classes: int | None) -> BuildCode:
        config, kind = network.yaml, type(network).__name__
        channels = config.get("ch") or config.get("channels") or model.channels
        body = NETWORK_CODE.format(kind=kind, channels=channels, classes=config.get("nc"))
        return BuildCode(("ultralytics",), "from ultralytics.nn import tasks\n", body, {"CONFIG": config})


ULTRALYTICS = Ultralytics()


def _find_task(tasks: Any, source: str, config: dict[str, Any]) -> str:
    task = tasks.guess_model_task(config)
    if task not in HEAD_TASKS.values():
        raise UserError(
            f"{source} is a network for {task or 'an unknown task'}; supported are {', '.join(HEAD_TASKS.values())}"
        )
    return str(task)


def check_size(source: str, stride: int, height: int, width: int) -> None:
    """Raise a `UserError` for an image size that isn't a multiple of the network's stride."""
    if height % stride or width % stride:
        sides = [max(stride, round(side / stride) * stride) for side in (height, width)]
        size_text = f"{sides[0]}" if sides[0] == sides[1] else f"{sides[0]}x{sides[1]}"
        raise UserError(
            f"{source} takes sizes that are multiples of {stride}, not {height}x{width}; try --size {size_text}"
        )


def _from_yaml(tasks: Any, model: ModelSpec, name: str, state: Mapping[str, Any] | None) -> Any:
    config = _check_layers(tasks, model.source, _read_config(tasks, model.source, name))
    return _build_from_config(tasks, model if state is None else _fit_model(model, config, state), config)


def _build_from_config(tasks: Any, model: ModelSpec, config: dict[str, Any]) -> Any:
    task = _find_task(tasks, model.source, config)
    options: dict[str, Any] = {"ch": model.channels, "nc": model.classes, "verbose": False}
    if task == "pose" and model.keypoints:
        options["data_kpt_shape"] = list(model.keypoints)
    try:
        return getattr(tasks, BUILDER_CLASSES[task])(config, **options).eval()
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as e:
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise UserError(f"{model.source} can't be built: {reason}") from e


def _from_checkpoint(tasks: Any, model: ModelSpec, name: str) -> Any:
    checkpoint = read_checkpoint(name)
    weights = nets_checkpoint.read_tensors(checkpoint.module)
    config = _check_layers(tasks, model.source, checkpoint.config)
    config["channels"] = channels = config.get("channels", config.get("ch", model.channels))
    if channels != model.channels:
        raise UserError(f"{model.source} takes images of {channels} channels; give --channels {channels}")
    module = _build_from_config(tasks, _fit_model(replace(model, weights=name), config, weights), config)
    apply(module, weights, name, advise_on_checkpoint(name))
    module.names = checkpoint.module.state.get("names")
    return module


def _read_config(tasks: Any, source: str, name: str) -> dict[str, Any]:
    """Read the YAML as ultralytics does: the user's own file, or the library's by name."""
    if not Path(name).is_file():
        names = _network_names()
        if name not in names:
            stems = [file.removesuffix(".yaml") for file in names]  # with the suffix, all names would be similar
            near = difflib.get_close_matches(name.removesuffix(".yaml"), stems, 1, 0.75)
            hint = f"did you mean ultralytics:{near[0]}.yaml?" if near else "it is NAME.yaml, your own .yaml or a .pt"
            raise UserError(f"ultralytics has no network {name!r}; {hint}")
    try:
        config: dict[str, Any] = tasks.yaml_model_load(name)
        if not config.get("scale") and Path(name).is_file():  # the library takes the letter only from the file's name
            import yaml

            config["scale"] = (yaml.safe_load(Path(name).read_text(encoding="utf-8")) or {}).get("scale", "")
    except Exception as e:  # the library's YAML reader may raise anything
        raise UserError(f"{source} can't be read: {shorten(e, 200)}") from e
    return config


def _check_layers(tasks: Any, source: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the architecture; raise a `UserError` unless it names only layers.

    The library would call any function of its module by name.
    """
    import torch

    activation = config.get("activation")
    if activation and not (isinstance(activation, str) and ACTIVATION_CODE.fullmatch(activation)):
        raise UserError(f"{source}: the activation {str(activation)[:60]!r} is not a layer of torch.nn")
    parts = [config.get("backbone"), config.get("head")]
    if not all(isinstance(part, list) for part in parts):
        raise UserError(f"{source} lists no layers under backbone and head")
    for layer in (layer for part in parts for layer in part or ()):
        name = str(layer[2]) if isinstance(layer, (list, tuple)) and len(layer) == 4 else ""
        library, _, class_name = name.rpartition(".")
        namespace = {"": tasks, "nn": torch.nn, "torchvision.ops": sys.modules.get("torchvision.ops")}.get(library)
        layer_class = getattr(namespace, class_name, None)
        if not (isinstance(layer_class, type) and issubclass(layer_class, torch.nn.Module)):
            raise UserError(f"{source}: {name or layer} is not a layer that ultralytics has")
    return config


def _network_names() -> list[str]:
    """Return the library's networks, with every letter of scale."""
    import ultralytics

    names = []
    for path in (Path(ultralytics.__file__).parent / "cfg/models").rglob("*.yaml"):
        names.append(path.name)
        # The letter of yolov9c.yaml isn't a scale, and yolov3.yaml has one size.
        if match := re.fullmatch(r"(yolo(?:e-)?v?\d+)(?![a-z])(.*)", path.name):
            scales = re.findall(r"^ +([nsmlx]): *\[", path.read_text(encoding="utf-8"), re.MULTILINE)
            names += [f"{match[1]}{scale}{match[2]}" for scale in scales]
    return sorted(names)


def _fit_model(model: ModelSpec, config: Mapping[str, Any], state: Mapping[str, Any]) -> ModelSpec:
    """Return the model with the weights' number of classes and keypoints, unless it sets them itself.

    Raise a `UserError` for another number of classes.
    """
    head_index = max((int(key.split(".")[1]) for key in state if re.match(r"model\.\d+\.", key)), default=0)

    def count_rows(name: str) -> int:
        tensor = state.get(f"model.{head_index}.{name}")
        return 0 if tensor is None else int(tensor.shape[0])

    classes, value_count = count_rows("cv3.0.2.weight") or count_rows("linear.weight"), count_rows("cv4.0.2.weight")
    if model.classes is None and classes:
        model = replace(model, classes=classes)
    elif classes and model.classes != classes:
        raise UserError(
            f"the weights in {model.weights} are of {classes} classes, not {model.classes}; give --classes {classes}"
        )
    shape = config.get("kpt_shape")
    if shape and value_count and not model.keypoints and value_count != shape[0] * shape[1]:
        point_size = next(n for n in (shape[1], 3, 2, 1) if value_count % n == 0)
        model = replace(model, keypoints=(value_count // point_size, point_size))
    return model


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its architecture `config` in the YAML's form, its `module` stub, and its training size.

    `size` is the longest side of training images (0: unknown); the stub holds the tensors.
    """

    config: dict[str, Any]
    module: nets_checkpoint.Stub
    size: int


def read_checkpoint(path: str) -> Checkpoint:
    """Read the checkpoint, with averaged weights (EMA) if present; raise a `UserError` that names alternatives."""
    archive = nets_checkpoint.Archive(path)
    if not archive.yolo:
        raise UserError(f"{path} is not a checkpoint of ultralytics; {nets_checkpoint.advise_on_module(archive)}")
    contents = archive.load()
    module = nets_checkpoint.find_module_stub(contents)
    config = module.state.get("yaml") if module is not None else None
    if not isinstance(config, dict) or not {"backbone", "head"} <= set(config):
        raise UserError(f"{path} holds no module with its architecture; {advise_on_checkpoint(path)}")
    return Checkpoint(
        _copy_config(config, path), module, _find_longest_side(module.state.get("args") or contents.get("train_args"))
    )


def _find_longest_side(arguments: Any) -> int:
    """Return the longest side in the training settings; 0 if missing."""
    size = arguments.get("imgsz") if isinstance(arguments, dict) else None
    sides = size if isinstance(size, (list, tuple)) else [size]
    return max((side for side in sides if isinstance(side, int) and 0 < side <= MAX_SIDE), default=0)


def advise_on_checkpoint(path: str) -> str:
    """Return the two lines of Python that split a trusted checkpoint."""
    return (
        f"if you trust it, run m = ultralytics.YOLO({path!r}).model.float(); "
        "safetensors.torch.save_file(m.state_dict(), 'net.safetensors') and yaml.safe_dump(m.yaml, open('net.yaml', "
        "'w')), then give ultralytics:net.yaml --weights net.safetensors"
    )


def _copy_config(config: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a copy of the architecture; raise a `UserError` unless it has only text, numbers, lists and tables."""
    remaining = MAX_VALUES

    def copy_value(value: Any, depth: int) -> Any:
        nonlocal remaining
        remaining -= 1
        if remaining < 0 or depth > 10:
            raise UserError(f"the architecture in {path} is too large to be a network's; {advise_on_checkpoint(path)}")
        if isinstance(value, dict):
            return {copy_value(key, depth + 1): copy_value(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [copy_value(item, depth + 1) for item in value]
        if value is None or isinstance(value, (str, int, float, bool)):
            return value
        raise UserError(
            f"{path} has something in its architecture that is neither text nor a number; {advise_on_checkpoint(path)}"
        )

    copy: dict[str, Any] = copy_value(config, 0)
    return copy
