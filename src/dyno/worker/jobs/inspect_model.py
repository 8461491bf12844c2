"""A first look at a model: does it exist, do its weights fit, what does it take, does it take what is asked?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dyno.worker import registry
from dyno.worker.inputs import modules
from dyno.worker.inputs.modules import ModuleInputs
from dyno.worker.inputs.shapes import static_shapes
from dyno.worker.inputs.specs import resolved
from dyno.worker.inspection import Inspection, Purpose
from dyno.worker.nets import file_images, flops, models, task_facts, torchvision_detectors, ultralytics_models
from dyno.worker.nets.file_images import DEFAULT_SIZE
from dyno.worker.sessions.torch_support import tensors as tensors_of
from dyno.worker.spec import Dims, ModelSpec, Tensor, Trial, UserError


def look(trial: Trial, sizes: list[list[int]], asked: Mapping[str, Mapping[str, Any]], task: str = "") -> Inspection:
    """What Dyno needs to know before it lists trials.

    `asked` is the user's word on inputs by name, `task` on what the network is for. A model, checkpoint, input or size
    that doesn't work is a `UserError`.
    """
    return _file(trial, sizes, asked, task) if trial.model.file else _module(trial.model, sizes, asked, task)


def _module(model: ModelSpec, sizes: list[list[int]], asked: Mapping[str, Mapping[str, Any]], task: str) -> Inspection:
    preprocess = models.preprocess(model)
    own = models.image_size(model) or (DEFAULT_SIZE, DEFAULT_SIZE)
    wanted = tuple(asked.get("input", {}).get("shape", ()))[2:]
    if len(wanted) == 2 and all(isinstance(n, int) for n in wanted):
        own = (wanted[0], wanted[1])
    height, width = sizes[0] if sizes else own
    module = models.build(model, Dims(1, height, width))  # what is asked here, statistics would not change
    takes = (
        modules.describe_inputs(module, model, models.examples(model), asked)
        if _may_differ(model, asked)
        else ModuleInputs()
    )
    own = takes.size if all(takes.size) else own if takes.image else (0, 0)
    _check_sizes(model, sizes, takes, asked)
    yolo = models.parse(model.source)[0] == "ultralytics"
    found, counted = Inspection(), {}
    for number, (height, width) in enumerate(sizes or [own]):
        dims = Dims(takes.batch, height, width)
        module = models.build(model, dims) if number else module
        said = ultralytics_models.facts(module) if yolo else Purpose()
        if yolo:
            ultralytics_models.check_size(model.source, said.stride or 1, height, width)
        takes, outputs = _try(module, model, takes, dims)
        counted[dims.size] = _count(module, model, takes, dims)
        purpose = said if yolo and task in ("", said.task) else task_facts.facts(model, task, said, outputs)
        found = replace(found, outputs=_classes(outputs), parameters=_parameters(module)).joined(purpose)
    one_image = models.is_torchvision_detector(model)
    return replace(
        found,
        preprocess=found.preprocess or preprocess,
        size=own,
        flops={size: n for size, n in counted.items() if n},
        inputs=takes.inputs,
        usual_batch=takes.batch,
        batch=1 if one_image else 0 if takes.free else takes.batch,
        batch_reason=torchvision_detectors.ONE_IMAGE if one_image else "",
    )


def _may_differ(model: ModelSpec, asked: Mapping[str, Any]) -> bool:
    """Whether the model may take something else than one image: a library's does only where it is said."""
    return bool(asked) or models.parse(model.source)[0] not in (*models.LIBRARIES, "ultralytics")


def _check_sizes(model: ModelSpec, sizes: list[list[int]], takes: ModuleInputs, asked: Mapping[str, Any]) -> None:
    if sizes and not takes.image:
        raise UserError(f"{model.name} takes no image, so a size doesn't apply to it; omit it")
    given = all(takes.size) and any("shape" in words for words in asked.values())
    wrong = [size for size in sizes if given and tuple(size) != takes.size]
    if wrong:
        shown = f"{takes.size[0]}x{takes.size[1]}"
        raise UserError(
            f"shapes give an input of {shown} pixels, and sizes {wrong[0][0]}x{wrong[0][1]}; omit one of them"
        )


def _parameters(module: Any) -> int:
    """Number of parameters; 0 where they can't be counted, as those of lazy modules."""
    try:
        return sum(int(p.numel()) for p in module.parameters())
    except (ValueError, RuntimeError):
        return 0


def _count(module: Any, model: ModelSpec, takes: ModuleInputs, dims: Dims) -> int:
    """Operations of one image, 0 where they can't be counted."""
    import torch

    try:
        if not takes.inputs:
            return flops.of_module(module, torch.zeros(1, model.channels, dims.height, dims.width))
        args, keywords = modules.example(model, takes.inputs, dims)
        return flops.of_module(module, *args, **keywords) // dims.batch
    except Exception:  # a module that runs but can't be watched by the counter has no count, and that is all
        return 0


def _try(module: Any, model: ModelSpec, takes: ModuleInputs, dims: Dims) -> tuple[ModuleInputs, list[tuple[int, ...]]]:
    """Run the module once; what it takes, and the shapes of its outputs."""
    import torch

    try:
        if takes.inputs:
            takes, result = modules.verify_inputs(module, model, takes, dims)
        else:
            with torch.inference_mode():
                result = module(torch.zeros(1, model.channels, dims.height, dims.width))
    except (UserError, MemoryError):
        raise
    except Exception as e:  # the module is anyone's code: whatever it raises is its word on the input
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        shown = modules.listed(takes.inputs, dims) or f"1x{model.channels}x{dims.height}x{dims.width}"
        raise UserError(f"the model refuses {shown}: {reason}{_hint(module, model)}") from e
    return takes, [tuple(tensor.shape) for tensor in tensors_of(result)]


def _hint(module: Any, model: ModelSpec) -> str:
    """What to do about a module that refuses its input; a library's network takes an image of some size."""
    if not _may_differ(model, {}):
        return ""
    return f"; {modules.advice_after_refusal(module, model)}"


def _classes(shapes: Sequence[Sequence[int | str]]) -> int:
    """How many classes a classifier's scores are of; 0 for any other output, or where a file doesn't say."""
    if not shapes or len(shapes[0]) != 2 or not isinstance(shapes[0][1], int):
        return 0
    return shapes[0][1] if shapes[0][1] > 1 else 0


def _file(trial: Trial, sizes: list[list[int]], asked: Mapping[str, Mapping[str, Any]], task: str) -> Inspection:
    model, kind = trial.model, registry.format_of(trial.model.file)
    if kind is None:  # a plug-in that is installed where the study runs, and not here
        raise UserError(f"nothing here reads {model.file}; known files: {', '.join(registry.suffixes())}")
    contents = kind.read(model.file, trial)
    tensors = contents.inputs
    if not tensors:
        raise UserError(f"{model.file} has no inputs, so there is nothing to run it on; export the model with one")
    shapes = {name: resolved(words["shape"], 1) for name, words in asked.items() if "shape" in words}
    found = file_images.image_facts(model, tensors, shapes, sizes, contents.image)
    model = replace(model, channels=found.channels or model.channels)
    outputs = [tensor.shape for tensor in contents.outputs]
    purpose = task_facts.facts(model, task, contents.task, outputs)
    lengths = [words["shape"][0] for words in asked.values() if words.get("shape")]
    fixed = lengths[0] if lengths and isinstance(lengths[0], int) else _fixed(tensors, 0)
    found = replace(
        found.joined(purpose),
        preprocess=purpose.preprocess or model.preprocess,
        batch=fixed,
        batches=contents.batches,  # an engine knows which ones it was built for
        outputs=_classes(outputs),
        precision=contents.precision,
        signature=tuple(tuple(tensor.shape for tensor in side) for side in (tensors, contents.outputs)),
        inputs=tuple(modules.describe_file_inputs(tensors, asked, contents.task.inputs)),
    )
    batch = fixed or (contents.batches[1] if contents.batches else found.usual_batch or 1)
    shapes = {name: resolved(words["shape"], batch) for name, words in asked.items() if "shape" in words}
    dims = Dims(batch, *found.size, shapes)
    static_shapes(tensors, dims)
    if contents.flops:
        sized = [dims] if found.fixed_size or not sizes else [replace(dims, height=h, width=w) for h, w in sizes]
        counts = {one.size: contents.flops(static_shapes(tensors, one)) // one.batch for one in sized}
        found = replace(found, flops={size: count for size, count in counts.items() if count})
    return found


def _fixed(tensors: tuple[Tensor, ...], axis: int) -> int:
    """The fixed length of that axis in every input, 0 where it is free in any."""
    lengths = [_number(t.shape[axis]) for t in tensors if len(t.shape) > axis]
    return min(lengths, default=0)


def _number(length: int | str) -> int:
    return length if isinstance(length, int) else 0
