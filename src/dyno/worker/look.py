"""A first look at a model: does it exist, do its weights fit, what does it take, does it take what is asked?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dyno.worker import flops, models, onnx_file, task_facts, ultralytics_models
from dyno.worker.shapes import REFUSALS, static_shapes
from dyno.worker.spec import ENGINE_FILES, Dims, ModelSpec, Tensor, Trial, UserError, to_json
from dyno.worker.torch_support import tensors as tensors_of

DEFAULT_SIZE = 224


def look(trial: Trial, sizes: list[list[int]], shapes: dict[str, tuple[int, ...]], task: str = "") -> dict[str, Any]:
    """What Dyno needs to know before it lists trials.

    Returns `preprocess`, `size` [h, w] (the model's own), `batch` (0: any), `batches` (an engine's smallest, best and
    largest), `fixed_size` (a file that takes one only), `outputs` (how many classes a classifier's scores are of, else
    0), `flops` (of one image, by size: "224", "480x640"; nothing where they can't be counted) and, for a module,
    `parameters`; where it is known what the network is for, `task`, `classes` and `keypoints`. `task` is the user's own
    word for it. A model, checkpoint or size that doesn't work is a `UserError`.
    """
    return _file(trial, sizes, shapes, task) if trial.model.file else _module(trial.model, sizes, task)


def _module(model: ModelSpec, sizes: list[list[int]], task: str) -> dict[str, Any]:
    preprocess = models.preprocess(model)
    own = models.image_size(model) or (DEFAULT_SIZE, DEFAULT_SIZE)
    yolo = models.parse(model.source)[0] == "ultralytics"
    found: dict[str, Any] = {}
    counted = {}
    for height, width in sizes or [list(own)]:
        module = models.drawn(model, Dims(1, height, width))  # what is asked here, statistics would not change
        found["parameters"] = sum(p.numel() for p in module.parameters())
        said = ultralytics_models.facts(module) if yolo else {}
        if yolo:
            ultralytics_models.check_size(model.source, said["stride"], height, width)
        outputs = _try(module, model, height, width)
        found["outputs"] = _classes(outputs)
        counted[Dims(1, height, width).size] = _count(module, model, height, width)
        found |= said if yolo and task in ("", said["task"]) else task_facts.facts(model, task, said, outputs)
    found["flops"] = {size: n for size, n in counted.items() if n}
    return {"preprocess": to_json(preprocess), "size": list(own), "batch": 0, **found}


def _count(module: Any, model: ModelSpec, height: int, width: int) -> int:
    """Operations of one image, 0 where they can't be counted."""
    import torch

    try:
        return flops.of_module(module, torch.zeros(1, model.channels, height, width))
    except Exception:  # a module that runs but can't be watched by the counter has no count, and that is all
        return 0


def _try(module: Any, model: ModelSpec, height: int, width: int) -> list[tuple[int, ...]]:
    """Run the module once; the shapes of its outputs."""
    import torch

    try:
        with torch.inference_mode():
            result = module(torch.zeros(1, model.channels, height, width))
    except REFUSALS as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise UserError(f"the model refuses 1x{model.channels}x{height}x{width}: {reason}") from e
    return [tuple(tensor.shape) for tensor in tensors_of(result)]


def _classes(shapes: Sequence[Sequence[int | str]]) -> int:
    """How many classes a classifier's scores are of; 0 for any other output, or where a file doesn't say."""
    if not shapes or len(shapes[0]) != 2 or not isinstance(shapes[0][1], int):
        return 0
    return shapes[0][1] if shapes[0][1] > 1 else 0


def _file(trial: Trial, sizes: list[list[int]], shapes: dict[str, tuple[int, ...]], task: str) -> dict[str, Any]:
    model, reader = trial.model, _reader(trial)
    tensors, outputs = reader.read_io(model.file)
    if not tensors:
        raise UserError(f"{model.file} has no inputs, so there is nothing to run it on; export the model with one")
    image = next((t for t in tensors if len(t.shape) == 4), None)
    found: dict[str, Any] = {"preprocess": to_json(model.preprocess), "batch": _fixed(tensors, 0), "size": [0, 0]}
    found["outputs"], found["flops"] = _classes([tensor.shape for tensor in outputs]), {}
    found["precision"] = reader.read_precision(model.file)
    found["signature"] = [[list(tensor.shape) for tensor in side] for side in (tensors, outputs)]
    if image is not None:
        size = [_number(image.shape[2]), _number(image.shape[3])]
        found["size"] = [side or DEFAULT_SIZE for side in size]
        found["fixed_size"] = all(size)
    said = task_facts.read(model.file) if reader is onnx_file else {}
    found |= task_facts.facts(model, task, said, [t.shape for t in outputs])
    if hasattr(reader, "read_batches"):  # an engine knows which batches it was built for
        found["batches"] = list(reader.read_batches(model.file))
    if shapes:
        found["batch"] = next(iter(shapes.values()))[0]
    dims = Dims(found["batch"] or found.get("batches", [1, 1])[1], found["size"][0], found["size"][1], shapes)
    static_shapes(tensors, dims)
    if reader is onnx_file:
        sized = [dims] if found.get("fixed_size") or not sizes else [replace(dims, height=h, width=w) for h, w in sizes]
        counts = {one.size: flops.of_onnx(model.file, static_shapes(tensors, one)) // one.batch for one in sized}
        found["flops"] = {size: count for size, count in counts.items() if count}
    return found


def _reader(trial: Trial) -> Any:
    """What reads this kind of file: `read_io` and `read_precision` of its path."""
    path = trial.model.file
    if path.endswith(".xml"):
        from dyno.worker.backends import open_vino

        return open_vino
    if path.endswith(ENGINE_FILES):
        from dyno.worker.backends.tensor_rt.given import Reader

        return Reader(trial.backend, trial.runtime.device)
    return onnx_file


def _fixed(tensors: tuple[Tensor, ...], axis: int) -> int:
    """The fixed length of that axis in every input, 0 where it is free in any."""
    lengths = [_number(t.shape[axis]) for t in tensors if len(t.shape) > axis]
    return min(lengths, default=0)


def _number(length: int | str) -> int:
    return length if isinstance(length, int) else 0
