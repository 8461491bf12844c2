"""A model file's task and the layout of its outputs, from metadata and shapes.

ONNX files have them in their metadata: `task`, `names` and `kpt_shape` as ultralytics writes them, and `preprocess`
(JSON, a `Preprocess`) and `inputs` (JSON, a list of `InputSpec`) in files that Dyno exported. OpenVINO keeps them in an
IR that it makes of such a file.
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dyno.worker import tasks
from dyno.worker.inspection import Purpose
from dyno.worker.spec import InputSpec, ModelSpec, Preprocess, UserError, from_json, to_json
from dyno.worker.tasks.task import OutputShapes


def read(metadata: Mapping[str, str]) -> Purpose:
    """Return the facts on the network in a file's metadata, as far as it has any."""
    purpose = Purpose()
    if metadata.get("task") in tasks.names():
        purpose = replace(purpose, task=metadata["task"])
    names, points = _parse_literal(metadata.get("names")), _parse_literal(metadata.get("kpt_shape"))
    if isinstance(names, (dict, list, tuple)) and names:
        purpose = replace(purpose, classes=len(names))
    if isinstance(points, (list, tuple)) and points:
        purpose = replace(purpose, keypoints=tuple(int(n) for n in points))
    if "inputs" in metadata:
        with contextlib.suppress(ValueError, TypeError, AttributeError, UserError):  # another program's idea of the key
            inputs = tuple(from_json(InputSpec, spec) for spec in json.loads(metadata["inputs"]))
            purpose = replace(purpose, inputs=inputs)
    if "preprocess" in metadata:
        with contextlib.suppress(ValueError, TypeError, AttributeError, UserError):  # another program's idea of the key
            purpose = replace(purpose, preprocess=from_json(Preprocess, json.loads(metadata["preprocess"])))
    return purpose


def write(path: str, model: ModelSpec) -> None:
    """Write task, classes, preprocessing and inputs into an ONNX file's metadata, so that the file needs no options."""
    import onnx

    graph = onnx.load(path, load_external_data=False)
    onnx.helper.set_model_props(
        graph, {**{entry.key: entry.value for entry in graph.metadata_props}, **_make_metadata(model)}
    )
    onnx.save(graph, path)


def _make_metadata(model: ModelSpec) -> dict[str, str]:
    metadata = {"task": model.task, "preprocess": json.dumps(to_json(model.preprocess))}
    if model.classes is not None:
        metadata["names"] = str({number: str(number) for number in range(model.classes)})
    if model.keypoints:
        metadata["kpt_shape"] = str(list(model.keypoints))
    if specs := [replace(spec, feeds="", feeds_sha256="") for spec in model.inputs if spec.dtype]:
        metadata["inputs"] = json.dumps([*map(to_json, specs)])
    return metadata


def facts(model: ModelSpec, requested: str, metadata: Purpose, outputs: OutputShapes) -> Purpose:
    """Return for the inspection the task, and for detection and its kin classes, keypoints and preprocessing.

    `requested` is the user's --task, `metadata` the file's; `outputs` have free axes as text. Empty if neither names
    the task. Raises `UserError` if they contradict each other.
    """
    if requested and (metadata.task or requested) != requested:
        raise UserError(
            f"{model.name} is a network for {metadata.task}, not {requested}; omit --task, "
            f"or export it again with --task {requested}"
        )
    name = metadata.task or requested
    if not name:
        return Purpose()
    task = tasks.find(name)
    preprocess = metadata.preprocess or task.preprocess(model.channels)
    # A classifier by --task alone keeps its preprocessing.
    complete = bool(metadata.set_fields()) or task.labels == "objects"
    return replace(task.layout(model, metadata, outputs), task=name, preprocess=preprocess if complete else None)


def _parse_literal(text: str | None) -> Any:
    try:
        return ast.literal_eval(text) if text else None
    except (ValueError, SyntaxError):
        return None
