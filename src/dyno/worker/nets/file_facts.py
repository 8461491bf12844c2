"""Facts read from a model file: its image inputs, the meaning of its outputs, and its class names."""

from __future__ import annotations

import ast
import contextlib
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno.worker import tasks
from dyno.worker.inputs.specs import find_axes, image_of
from dyno.worker.inspection import METADATA_FILE, Inspection, Purpose, order_class_names
from dyno.worker.nets import ultralytics_models
from dyno.worker.spec import InputSpec, ModelSpec, Preprocess, Tensor, UserError, from_json, to_json
from dyno.worker.tasks import OutputShapes

# Layout, channels and size of a model file's images, from its inputs and its metadata

DEFAULT_SIZE = 224
ULTRALYTICS_KEYS = ("imgsz", "batch", "stride")  # keys of ultralytics' metadata
CLASS_NAME_KEYS = ("class_names", "classes", "labels", "id2label")  # class-list keys of other tools
# metadata inside TorchScript and .tflite files
METADATA_MEMBERS = ("extra/config.txt", "metadata.json", "temp_meta.txt")


def read_attached(path: str) -> dict[str, str]:
    """Return ultralytics' metadata inside a TorchScript or .tflite file, else next to an IR or a .pte file.

    Return {} without any, and for a metadata.yaml that is another program's or can't be read without PyYAML.
    """
    metadata: Any = None
    with contextlib.suppress(OSError, ValueError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.endswith(METADATA_MEMBERS)), "")
        text = archive.read(name).decode() if name else ""
        metadata = _parse_value(text) or json.loads(text)
    sidecar = Path(path).with_name(METADATA_FILE)
    if metadata is None and sidecar.is_file():
        with contextlib.suppress(ImportError, OSError, ValueError):
            import yaml

            with contextlib.suppress(yaml.YAMLError):
                metadata = yaml.safe_load(sidecar.read_text(encoding="utf-8"))
    is_known = isinstance(metadata, dict) and {"task", "names", "imgsz"} <= metadata.keys()
    return {str(key): str(value) for key, value in metadata.items()} if is_known else {}


def read_image_facts(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return a file's metadata under ULTRALYTICS_KEYS as Python values."""
    values = {key: _parse_value(metadata[key]) for key in ULTRALYTICS_KEYS if key in metadata}
    return {key: value for key, value in values.items() if value}


def find_image_facts(
    model: ModelSpec,
    tensors: Sequence[Tensor],
    shapes: Mapping[str, Sequence[int | str]],
    sizes: Sequence[Sequence[int]],
    metadata: Mapping[str, Any],
) -> Inspection:
    """Return the inspection's image size (and whether it is fixed), channels and usual batch.

    The size, (0, 0) without an image, is that of the file's first image if fixed, else that of `shapes`, else the
    metadata's `imgsz`, else DEFAULT_SIZE. Raise a `UserError` for one of the user's `sizes` that contradicts `shapes`
    or isn't a multiple of the network's stride.
    """
    image = image_of(tensors)
    if image is None:
        return Inspection()
    channel, *sides = find_axes(image.shape)
    fixed = [_read_length(image.shape[side]) for side in sides]
    user_shape = shapes.get(image.name, ())
    requested = [_read_length(user_shape[side]) for side in sides] if len(user_shape) == 4 else [0, 0]
    metadata_size = _parse_size(metadata.get("imgsz"))
    default = metadata_size or [DEFAULT_SIZE, DEFAULT_SIZE]
    height, width = (side or shape or own for side, shape, own in zip(fixed, requested, default, strict=True))
    batch = metadata.get("batch")
    _check_sizes(model, sizes, requested, metadata.get("stride"))
    return Inspection(
        size=(height, width),
        fixed_size=all(fixed) or all(requested),
        size_guessed=not (metadata_size or all(side or own for side, own in zip(fixed, requested, strict=True))),
        channels=_read_length(image.shape[channel]) or None,
        usual_batch=batch if isinstance(batch, int) and not _read_length(image.shape[0]) else None,
    )


def is_normalised(tensors: Sequence[Tensor]) -> bool:
    """Return whether a file's image is fed as normalised numbers: uint8 inputs take raw pixels."""
    image = image_of(tensors)
    return image is not None and image.dtype != "uint8"


def _check_sizes(model: ModelSpec, sizes: Sequence[Sequence[int]], requested: Sequence[int], stride: Any) -> None:
    for height, width in sizes:
        if all(requested) and [height, width] != [*requested]:
            raise UserError(
                f"shapes give the image {requested[0]}x{requested[1]} pixels, and sizes {height}x{width}; "
                "omit one of them"
            )
        if isinstance(stride, int):
            ultralytics_models.check_size(model.name, stride, height, width)


def find_size(metadata: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the height and width in a file's metadata; None if missing."""
    size = _parse_size(read_image_facts(metadata).get("imgsz"))
    return (size[0], size[1]) if size else None


def _parse_size(size: Any) -> list[int] | None:
    """Return height and width from `[480, 640]` or 640; None for anything else."""
    pair = [size, size] if isinstance(size, int) else size
    is_valid = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(n, int) and n > 0 for n in pair)
    return [*pair] if is_valid else None


def _parse_value(text: str | None) -> Any:
    try:
        return ast.literal_eval(text) if text else None
    except (ValueError, SyntaxError):
        return None


def _parse_names(text: str | None) -> tuple[str, ...]:
    """Return class names from a list, a dict by number, or a text with commas or line breaks; else ()."""
    names = _parse_value(text)
    if names is None and text and not text.lstrip().startswith(("{", "[")):
        names = [part.strip() for part in text.strip().split("\n" if "\n" in text.strip() else ",")]
    return order_class_names(names) if isinstance(names, (dict, list, tuple)) and len(names) > 1 else ()


def _read_length(length: int | str) -> int:
    return length if isinstance(length, int) else 0


# A model file's task and the layout of its outputs, from metadata and shapes
#
# The metadata of ONNX files has them: `task`, `names` and `kpt_shape` as in ultralytics' files, and `preprocess` (JSON,
# a `Preprocess`) and `inputs` (JSON, a list of `InputSpec`) in Dyno's exports. OpenVINO keeps them in an IR made from
# the file.


def read_purpose(metadata: Mapping[str, str]) -> Purpose:
    """Return the facts on the network in a file's metadata."""
    purpose = Purpose()
    if metadata.get("task") in tasks.list_tasks():
        purpose = replace(purpose, task=metadata["task"])
    names, points = _parse_value(metadata.get("names")), _parse_value(metadata.get("kpt_shape"))
    if isinstance(names, (dict, list, tuple)) and names:
        purpose = replace(purpose, classes=len(names), class_names=order_class_names(names))
    elif class_names := next((parsed for key in CLASS_NAME_KEYS if (parsed := _parse_names(metadata.get(key)))), ()):
        purpose = replace(purpose, class_names=class_names)
    if isinstance(points, (list, tuple)) and points:
        purpose = replace(purpose, keypoints=tuple(int(n) for n in points))
    readers: dict[str, Callable[[Any], Any]] = {
        "inputs": lambda specs: tuple(from_json(InputSpec, spec) for spec in specs),
        "preprocess": lambda settings: from_json(Preprocess, settings),
    }
    for name in readers.keys() & metadata.keys():
        with contextlib.suppress(ValueError, TypeError, AttributeError, UserError):  # another program's use of the key
            purpose = replace(purpose, **{name: readers[name](json.loads(metadata[name]))})
    return purpose


def write_purpose(path: str, model: ModelSpec, class_names: Sequence[str] = ()) -> None:
    """Write task, classes, preprocessing and inputs into an ONNX file's metadata, so that it needs no options."""
    import onnx

    graph = onnx.load(path, load_external_data=False)
    onnx.helper.set_model_props(
        graph, {**{entry.key: entry.value for entry in graph.metadata_props}, **make_metadata(model, class_names)}
    )
    onnx.save(graph, path)


def make_metadata(model: ModelSpec, class_names: Sequence[str] = ()) -> dict[str, str]:
    """Return a model file's metadata for `read_purpose`: task, classes, preprocessing and inputs."""
    metadata = {"task": model.task, "preprocess": json.dumps(to_json(model.preprocess))}
    names = class_names if model.classes in (None, len(class_names)) else [*map(str, range(model.classes or 0))]
    if names:
        metadata["names"] = str(dict(enumerate(names)))
    if model.keypoints:
        metadata["kpt_shape"] = str(list(model.keypoints))
    if specs := [replace(spec, feeds="", feeds_sha256="") for spec in model.inputs if spec.dtype]:
        metadata["inputs"] = json.dumps([*map(to_json, specs)])
    return metadata


def find_task_facts(model: ModelSpec, requested: str, metadata: Purpose, outputs: OutputShapes) -> Purpose:
    """Return the inspection's task and, for detection, segmentation and pose, classes, keypoints and preprocessing.

    `requested` is the user's --task, `metadata` the file's; `outputs` have free axes as text. Without a task, only
    class names and preprocessing are returned. Raise a `UserError` if the two contradict each other.
    """
    if requested and (metadata.task or requested) != requested:
        raise UserError(
            f"{model.name} is a network for {metadata.task}, not {requested}; omit --task, "
            f"or export it again with --task {requested}"
        )
    name = metadata.task or requested
    purpose = Purpose(class_names=metadata.class_names, preprocess=metadata.preprocess)
    if not name:
        return purpose
    task = tasks.find_task(name)
    preprocess: Preprocess | None = metadata.preprocess or task.preprocess(model.channels)
    if preprocess and task.labels == "objects":
        preprocess = replace(preprocess, letterbox=True)
    elif not (metadata.task or metadata.preprocess):  # a classifier only by --task keeps its preprocessing
        preprocess = None
    return replace(purpose.merge(task.layout(model, metadata, outputs)), task=name, preprocess=preprocess)
