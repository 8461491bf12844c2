"""What a network is for and how its outputs are laid out, where its source doesn't say: from metadata and shapes.

ONNX files carry it in their metadata: `task`, `names` and `kpt_shape` as ultralytics writes them, and `preprocess`
(JSON, a `Preprocess`) and `inputs` (JSON, a list of `InputSpec`) in files that Dyno exported.
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dyno.worker import tasks
from dyno.worker.spec import InputSpec, ModelSpec, Preprocess, UserError, from_json, to_json
from dyno.worker.tasks.task import Shape


def read(path: str) -> dict[str, Any]:
    """`task`, `classes`, `keypoints`, `preprocess` and `inputs` of an ONNX file, those that its metadata has."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    said = {entry.key: entry.value for entry in model.metadata_props}
    found: dict[str, Any] = {}
    if said.get("task") in tasks.names():
        found["task"] = said["task"]
    names, points = _literal(said.get("names")), _literal(said.get("kpt_shape"))
    if isinstance(names, (dict, list, tuple)) and names:
        found["classes"] = len(names)
    if isinstance(points, (list, tuple)) and points:
        found["keypoints"] = [int(n) for n in points]
    if "inputs" in said:
        with contextlib.suppress(ValueError, TypeError, AttributeError, UserError):  # another program's idea of the key
            found["inputs"] = tuple(from_json(InputSpec, each) for each in json.loads(said["inputs"]))
    if "preprocess" in said:
        with contextlib.suppress(ValueError, TypeError, AttributeError, UserError):  # another program's idea of the key
            found["preprocess"] = to_json(from_json(Preprocess, json.loads(said["preprocess"])))
    return found


def write(path: str, model: ModelSpec) -> None:
    """Let an ONNX file know what it is for, so that nobody has to say it again."""
    import onnx

    graph = onnx.load(path, load_external_data=False)
    onnx.helper.set_model_props(graph, {**{entry.key: entry.value for entry in graph.metadata_props}, **_said(model)})
    onnx.save(graph, path)


def _said(model: ModelSpec) -> dict[str, str]:
    said = {"task": model.task, "preprocess": json.dumps(to_json(model.preprocess))}
    if model.classes is not None:
        said["names"] = str({number: str(number) for number in range(model.classes)})
    if model.keypoints:
        said["kpt_shape"] = str(list(model.keypoints))
    if specs := [replace(spec, feeds="", feeds_sha256="") for spec in model.inputs if spec.dtype]:
        said["inputs"] = json.dumps([*map(to_json, specs)])
    return said


def facts(model: ModelSpec, asked: str, said: dict[str, Any], outputs: Sequence[Shape]) -> dict[str, Any]:
    """Facts of a look: `task`, and for detection and its kin `classes`, `keypoints` and `preprocess`.

    `asked` is the user's --task, `said` what the file's metadata says, `outputs` the shapes of the outputs, free axes
    as text. Nothing where nobody says what the network is for. Raises `UserError` where they contradict each other.
    """
    if asked and said.get("task", asked) != asked:
        raise UserError(
            f"{model.name} is a network for {said['task']}, not {asked}; leave --task away, "
            f"or export it again with --task {asked}"
        )
    name = said.get("task") or asked
    if not name:
        return {}
    task = tasks.find(name)
    preprocess = said.get("preprocess") or to_json(task.preprocess(model.channels))
    sure = bool(said) or task.labels == "objects"  # a classifier that the user alone says so keeps what it had
    return {"task": name, **task.layout(model, said, outputs), **({"preprocess": preprocess} if sure else {})}


def _literal(text: str | None) -> Any:
    try:
        return ast.literal_eval(text) if text else None
    except (ValueError, SyntaxError):
        return None
