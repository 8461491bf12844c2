"""Model inspection: whether the model exists, its weights fit, and which inputs it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dyno.worker import registry, tasks
from dyno.worker.inputs import modules
from dyno.worker.inputs.modules import ModuleInputs
from dyno.worker.inputs.specs import static_shapes
from dyno.worker.inputs.symbols import Shape, batch_axes, described_shapes, fixed_batch, names_batch
from dyno.worker.inspection import Inspection, Purpose
from dyno.worker.nets import file_facts, flops, models, ultralytics_models
from dyno.worker.nets.file_facts import DEFAULT_SIZE
from dyno.worker.sessions.torch_support import first_line, is_memory_error, named_outputs
from dyno.worker.spec import BATCH, Dims, ModelSpec, Tensor, Trial, UserError
from dyno.worker.tasks import classify
from dyno.worker.tasks.task import OutputShapes


def inspect_model(
    trial: Trial, sizes: list[list[int]], overrides: Mapping[str, Mapping[str, Any]], task: str = ""
) -> Inspection:
    """Return the facts of a model that Dyno needs before it lists trials.

    `overrides` are the user's settings of inputs by name, `task` is the network's task. A model, checkpoint, input or
    size that doesn't work is a `UserError`.
    """
    return (
        _inspect_file(trial, sizes, overrides, task)
        if trial.model.file
        else _inspect_module(trial.model, sizes, overrides, task)
    )


def _inspect_module(
    model: ModelSpec, sizes: list[list[int]], overrides: Mapping[str, Mapping[str, Any]], task: str
) -> Inspection:
    preprocess = models.preprocess(model)
    own = models.image_size(model) or (DEFAULT_SIZE, DEFAULT_SIZE)
    requested = tuple(overrides.get("input", {}).get("shape", ()))[2:]
    if len(requested) == 2 and all(isinstance(n, int) for n in requested):
        own = (requested[0], requested[1])
    height, width = sizes[0] if sizes else own
    module = models.build(model, Dims(1, height, width))  # batch-norm statistics don't change inputs or outputs
    inputs = (
        modules.describe_inputs(module, model, models.examples(model), overrides)
        if _may_differ(model, overrides)
        else ModuleInputs()
    )
    own = inputs.size if all(inputs.size) else own if inputs.image else (0, 0)
    sizes = sizes if inputs.image else []
    _check_sizes(sizes, inputs, overrides)
    described = models.DESCRIBED.get(models.parse(model.source)[0])
    inspection, operations = Inspection(), {}
    for number, (height, width) in enumerate(sizes or [own]):
        dims = Dims(inputs.batch, height, width)
        module = models.build(model, dims) if number else module
        declared = described.facts(module) if described else Purpose()
        if described:
            ultralytics_models.check_size(model.source, declared.stride or 1, height, width)
        inputs, outputs = _try_inputs(module, model, inputs, dims)
        dims = replace(dims, batch=inputs.batch)
        operations[dims.size] = _count_operations(module, model, inputs, dims)
        purpose = (
            declared
            if described and task in ("", declared.task)
            else file_facts.find_task_facts(model, task, declared, OutputShapes(outputs, (height, width)))
        )
        parameters = sum(int(p.numel()) for p in module.parameters())
        inspection = replace(inspection, outputs=_count_classes(outputs, purpose), parameters=parameters).joined(
            purpose
        )
    one_image = models.is_torchvision_detector(model)
    return replace(
        inspection,
        preprocess=inspection.preprocess or preprocess,
        preprocess_guessed=model.source.startswith("saved:"),
        size=own,
        flops={size: n for size, n in operations.items() if n},
        inputs=inputs.inputs,
        shapes={spec.name: spec.shape for spec in inputs.inputs if BATCH in spec.shape[1:]},
        usual_batch=inputs.batch,
        batch=1 if one_image else 0 if inputs.free else inputs.batch,
        batch_reason=models.TAKES_ONE_IMAGE if one_image else "",
    )


def _may_differ(model: ModelSpec, overrides: Mapping[str, Any]) -> bool:
    """Return whether the model may take something else than one image: a library's does only with overrides."""
    return bool(overrides) or models.parse(model.source)[0] not in (*models.LIBRARIES, *models.DESCRIBED)


def _check_sizes(sizes: list[list[int]], inputs: ModuleInputs, overrides: Mapping[str, Any]) -> None:
    fixed_shape = all(inputs.size) and any("shape" in override for override in overrides.values())
    conflicting = [size for size in sizes if fixed_shape and tuple(size) != inputs.size]
    if conflicting:
        shown = f"{inputs.size[0]}x{inputs.size[1]}"
        height, width = conflicting[0]
        raise UserError(f"shapes give an input of {shown} pixels, and sizes {height}x{width}; omit one of them")


def _count_operations(module: Any, model: ModelSpec, inputs: ModuleInputs, dims: Dims) -> int:
    """Return the operations of one image, 0 if they can't be counted."""
    import torch

    try:
        if not inputs.inputs:
            image = torch.zeros(dims.batch, model.channels, dims.height, dims.width)
            return flops.of_module(module, image) // dims.batch
        args, keywords = modules.example(model, inputs.inputs, dims)
        return flops.of_module(module, *args, **keywords) // dims.batch
    except Exception:  # a module that runs may still fail in the counter: it has no count
        return 0


def _try_inputs(
    module: Any, model: ModelSpec, inputs: ModuleInputs, dims: Dims
) -> tuple[ModuleInputs, dict[str, Shape]]:
    """Run the module once; what it takes, and the shapes of its outputs by name."""
    import torch

    try:
        if inputs.inputs:
            inputs, result = modules.verify_inputs(module, model, inputs, dims, _no_memory)
        else:
            image = torch.zeros(dims.batch, model.channels, dims.height, dims.width)
            with torch.inference_mode():
                result = module(image)
                larger = torch.cat([image, image[:1]])  # a program may be fixed at the batch of its example, be it 1
                if _may_differ(model, {}) and not modules.accepts(lambda: module(larger), _no_memory):
                    inputs = replace(inputs, free=False)
    except (UserError, MemoryError):
        raise
    except Exception as e:  # the module is anyone's code, and may raise anything for an input that it doesn't take
        reason = first_line(e)
        shown = modules.listed(inputs.inputs, dims) or f"{dims.batch}x{model.channels}x{dims.height}x{dims.width}"
        raise UserError(
            f"the model refuses {shown}: {reason}{_advise_on_refusal(module, model, reason, not inputs.inputs)}"
        ) from e
    return inputs, {name: tuple(tensor.shape) for name, tensor in named_outputs(result).items()}


def _no_memory(e: Exception) -> bool:
    return isinstance(e, MemoryError) or is_memory_error(e)


def _advise_on_refusal(module: Any, model: ModelSpec, reason: str, image: bool) -> str:
    """Return advice on a module that refuses its input, or "" where it has no other input than an image of some size.

    Most of a library's networks are such.
    """
    several = sum(modules.signature_of(module).required.values()) > 1
    video = any(type(layer).__name__ == "Conv3d" for layer in module.modules())
    if not (_may_differ(model, {}) or several or video):
        return ""
    kind, rest = models.parse(model.source)
    function = rest.rpartition(":")[2] if kind in ("python", "module") else ""
    advice = modules.advice_on_reason(module, reason, "return")
    return f"; {advice or modules.advice_after_refusal(module, model, function, image)}"


def _count_classes(shapes: Mapping[str, Shape], purpose: Purpose) -> int:
    """Return the number of classes of a classifier's scores; 0 for any other output, where outputs of other numbers may
    be the scores, or if a file doesn't show it."""
    if purpose.task and tasks.find(purpose.task).labels == "objects":
        return 0
    counts = {classify.classes_of(shapes[name]) for name in classify.find_scores(shapes, purpose.classes or 0)}
    return counts.pop() if len(counts) == 1 else 0


def _inspect_file(
    trial: Trial, sizes: list[list[int]], overrides: Mapping[str, Mapping[str, Any]], task: str
) -> Inspection:
    model, kind = trial.model, registry.format_of(trial.model.file)
    if kind is None:  # a plug-in that is installed where the study runs, and not here
        raise UserError(f"nothing here reads {model.file}; known files: {', '.join(registry.suffixes())}")
    contents = kind.read(model.file, trial)
    tensors = contents.inputs
    if not tensors:
        raise UserError(f"{model.file} has no inputs, so there is nothing to run it on; export the model with one")
    inputs = tuple(modules.describe_file_inputs(tensors, overrides, contents.task.inputs))
    batched, given = _given_shapes(tensors, contents.outputs, overrides)
    inspection = file_facts.find_image_facts(model, tensors, given, sizes, contents.image)
    model = replace(model, channels=inspection.channels or model.channels)
    outputs = {tensor.name: tensor.shape for tensor in contents.outputs}
    purpose = file_facts.find_task_facts(model, task, contents.task, OutputShapes(outputs, inspection.size))
    fixed = fixed_batch(tensors, batched, given)
    inspection = replace(
        inspection.joined(purpose),
        preprocess=purpose.preprocess or model.preprocess,
        preprocess_guessed=purpose.preprocess is None and file_facts.is_normalised(tensors),
        batch=fixed,
        batch_reason=_batch_reason(tensors, batched, given),
        batches=contents.batches,  # an engine knows which ones it was built for
        shapes=described_shapes(tensors, batched, given),
        declared=_find_batched_outputs(tensors, contents.outputs, batched),
        outputs=_count_classes(outputs, purpose),
        precision=contents.precision,
        parameters=contents.parameters,
        signature=tuple(tuple(tensor.shape for tensor in side) for side in (tensors, contents.outputs)),
        inputs=inputs,
    )
    batch = fixed or (contents.batches[1] if contents.batches else inspection.usual_batch or 1)
    dims = Dims(batch, *inspection.size, inspection.shapes)
    static_shapes(tensors, dims)
    if contents.flops:
        sized = [dims] if inspection.fixed_size or not sizes else [replace(dims, height=h, width=w) for h, w in sizes]
        counts = {d.size: contents.flops(static_shapes(tensors, d)) // d.batch for d in sized}
        inspection = replace(inspection, flops={size: count for size, count in counts.items() if count})
    return inspection


def _given_shapes(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], overrides: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, int | None], dict[str, Shape]]:
    """Return the batch's axis of each input (None: it has none), and the shapes given by the user.

    A `batch` among the user's axes decides, and an input beside it without one has no batch. An array names no axis:
    for it, the file's names decide. Raises a `UserError` for a shape that doesn't fit.
    """
    batched, given = batch_axes(inputs, outputs), dict[str, Shape]()
    for tensor in inputs:
        words = overrides.get(tensor.name, {})
        if "shape" not in words:
            continue
        shape, own = tuple(words["shape"]), batched[tensor.name]
        if wrong := [axis for axis in shape if isinstance(axis, str) and axis != BATCH]:
            raise UserError(f"shape has {wrong[0]!r}; the axes of a file's input are numbers, or {BATCH} for the batch")
        if len(shape) != len(tensor.shape):
            shown = "x".join(map(str, shape))
            raise UserError(f"input {tensor.name!r} has {len(tensor.shape)} dimensions, not {shown}")
        if "array" in words and shape[:1] == (BATCH,) and own != 0 and any(map(names_batch, tensor.shape)):
            shape = tuple(BATCH if k == own else n for k, n in enumerate(words["array"]))
        given[tensor.name] = shape
    if any(BATCH in shape for shape in given.values()):
        batched |= {name: shape.index(BATCH) if BATCH in shape else None for name, shape in given.items()}
    return batched, given


def _batch_reason(inputs: Sequence[Tensor], batched: Mapping[str, int | None], given: Mapping[str, Shape]) -> str:
    """Return why the batch is one, if the file alone doesn't fix it; "" if it does, or leaves it free."""
    if all(axis is None for axis in batched.values()):
        return "no axis of the inputs is the batch (--shapes NAME:50xbatchx16 names one)"
    free = any(axis is not None and isinstance(t.shape[axis], str) for t in inputs for axis in [batched[t.name]])
    return f"--shapes gives a batch of {n}" if free and (n := fixed_batch(inputs, batched, given)) else ""


def _find_batched_outputs(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], batched: Mapping[str, int | None]
) -> tuple[Tensor, ...]:
    """Return the outputs in whose shapes the file has the batch's name, with `batch` at its axes."""
    names = {t.shape[k] for t in inputs for k in [batched[t.name]] if k is not None} - {"", "?"}
    marked = [
        replace(o, shape=tuple(BATCH if isinstance(n, str) and n in names else n for n in o.shape)) for o in outputs
    ]
    return tuple(output for output in marked if BATCH in output.shape)
