"""Model inspection: checks the model and its weights, and finds its inputs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Union

from dyno.worker import registry, tasks
from dyno.worker.inputs import modules
from dyno.worker.inputs.modules import ModuleInputs
from dyno.worker.inputs.specs import find_axes, image_of, is_image, is_length, is_side, static_shapes
from dyno.worker.inspection import Inspection, Purpose
from dyno.worker.nets import file_facts, flops, libraries, local_code, models, saved_modules, ultralytics_models
from dyno.worker.nets.file_facts import DEFAULT_SIZE
from dyno.worker.sessions.torch_support import first_line, is_memory_error, named_outputs
from dyno.worker.spec import BATCH_AXIS, Dims, InputSpec, ModelSpec, Tensor, Trial, UserError
from dyno.worker.tasks import OutputShapes, classify

# Axes of a model file by name: the batch axis, and the lengths of the others, solved together

BATCH_NAME = re.compile("batch|^(n|b|bs|bsz)$", re.IGNORECASE)
AXIS_OPERATOR = re.compile(r"[+*/()]| - ")
AXIS_TERM = re.compile(r"\s*([+-]?)\s*(?:(\d+)\s*\*\s*)?([^\s+*/()]+)")
MADE_UP = re.compile(r"unk__|[sud]\d+$|.*(dynamic_axes|dim)_\d+$")  # exporters' names for nameless axes
# Parts of a single input, such as a graph or a point cloud: their axis is no batch.
COUNTED_AXIS = re.compile(r"(^|[_\W])(node|edge|atom|vert(ex|ice)|point|voxel|pillar)s?\d*($|[_\W])", re.IGNORECASE)
TOTAL_AXIS = re.compile("total|mask", re.IGNORECASE)  # past and new tokens together
PAST_AXIS = re.compile("past", re.IGNORECASE)
DECODER_TOKENS = "decoder_input_ids"

Axis = Union[int, str]
Shape = tuple[Axis, ...]


def batch_axes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, int | None]:
    """Return the batch axis of each input, None for an input without a batch.

    It is the axis named after the batch; a single letter is such a name only if no other axis has the full one. In a
    file without such a name it is the first axis, unless the name is that of a length, an image side or the parts of a
    graph or point cloud, or the outputs begin with another axis of the input and lack the first.
    """
    if names := {axis for tensor in inputs for axis in tensor.shape if names_batch(axis)}:
        names = {axis for axis in names if "batch" in str(axis).lower()} or names
        return {tensor.name: _named_axis(tensor, names) for tensor in inputs}
    if any(isinstance(axis, str) and COUNTED_AXIS.search(axis) for tensor in inputs for axis in tensor.shape[:1]):
        return dict.fromkeys(tensor.name for tensor in inputs)
    if states := _find_state_axes(inputs, outputs):
        return states
    return {tensor.name: _assumed_axis(tensor, outputs) for tensor in inputs}


def names_batch(axis: Axis) -> bool:
    """Return whether the axis is named after the batch."""
    return (
        isinstance(axis, str)
        and bool(BATCH_NAME.search(axis))
        and not AXIS_OPERATOR.search(axis)
        and not is_length(axis)
    )


def _named_axis(tensor: Tensor, names: Collection[Axis]) -> int | None:
    index = next((k for k, axis in enumerate(tensor.shape) if axis in names), None)
    return 0 if index is None and tensor.shape and _has_no_name(tensor, 0) else index


def _has_no_name(tensor: Tensor, k: int) -> bool:
    """Return whether an axis is free and has only a generated name."""
    axis = tensor.shape[k]
    return isinstance(axis, str) and (axis in ("", "?", f"{tensor.name}_{k}") or bool(MADE_UP.match(axis)))


def _find_state_axes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, int | None]:
    """Return the batch axes in a file with a stacked state (layers x batch x features) and a sequence; else {}.

    Its inputs' first axes differ, and one length is among the first two of every input and output.
    """
    first_axes = {tensor.shape[0] if tensor.shape else 1 for tensor in inputs}
    if len(first_axes) < 2 or 1 in first_axes or any(isinstance(n, str) and not is_length(n) for n in first_axes):
        return {}
    lengths = set.intersection(*({n for n in t.shape[:2] if isinstance(n, int)} for t in (*inputs, *outputs)))
    if len(lengths) != 1 or any(len(tensor.shape) != 3 for tensor in inputs):
        return {}
    return {tensor.name: tensor.shape.index(*lengths) for tensor in inputs}


def _assumed_axis(tensor: Tensor, outputs: Sequence[Tensor]) -> int | None:
    if not tensor.shape:
        return None
    first, indices = tensor.shape[0], range(1, len(tensor.shape))
    if isinstance(first, str):
        free_axes = {axis for output in outputs for axis in output.shape if isinstance(axis, str) and axis}
        first_axes = {output.shape[0] for output in outputs if output.shape} & free_axes
        index = next((k for k in indices if tensor.shape[k] in first_axes and not is_length(tensor.shape[k])), None)
        if is_length(first) or is_side(first):
            return index
        return 0 if index is None or first in free_axes else index
    lengths = {axis for output in outputs for axis in output.shape}
    if first < 2 or not all(isinstance(n, int) for n in lengths) or any(int(n) % first == 0 for n in lengths):
        return 0
    if len(tensor.shape) > 3:
        return None if outputs else 0  # for example the frames of one clip
    return next((k for k in indices if all(output.shape[:1] == (tensor.shape[k],) for output in outputs)), None)


def fixed_batch(inputs: Sequence[Tensor], axes: Mapping[str, int | None], user_shapes: Mapping[str, Shape]) -> int:
    """Return the batch fixed by the user's shapes or the file; 0 if it is free, 1 if no input has a batch."""
    batches = []
    for tensor in inputs:
        if (k := axes[tensor.name]) is not None:
            length = user_shapes.get(tensor.name, tensor.shape)[k]
            if isinstance(length, int) and tensor.name in user_shapes:
                return length
            length = tensor.shape[k] if length == BATCH_AXIS else length  # an array's rows are batches of the file's
            batches.append(length if isinstance(length, int) else 0)
    return min(batches, default=1)


def described_shapes(
    inputs: Sequence[Tensor],
    axes: Mapping[str, int | None],
    shapes: Mapping[str, Shape],
    known: Mapping[str, int] | None = None,
) -> dict[str, Shape]:
    """Return the input shapes not determined by batch and image size, with `batch`, `height` and `width` as axes.

    `shapes` are the user's shapes, `known` the lengths of axes fixed by the file. Axes of equal name have equal length,
    and `past + new` is a sum. Raise a `UserError` that lists axes of unknown length, or lengths that contradict each
    other.
    """
    lengths = _Lengths(inputs, axes, shapes, known or {})
    named_shapes = {tensor.name: lengths.name_shape(tensor) for tensor in inputs}
    lengths.refuse_unknown()
    is_usual = {t.name: not axes[t.name] and named_shapes[t.name] == lengths.choose_shape(t) for t in inputs}
    return {t.name: named_shapes[t.name] for t in inputs if t.name in shapes or not is_usual[t.name]}


def _find_shared_names(inputs: Sequence[Tensor], axes: Mapping[str, int | None]) -> set[Axis]:
    """Return the names that the batch axis of an input shares with another of its axes."""
    batches = [(t, k) for t in inputs if (k := axes[t.name]) is not None]
    return {t.shape[k] for t, k in batches if t.shape.count(t.shape[k]) > 1}


class _Lengths:
    """The lengths of axes by name, solved from the given shapes and the sums among the names."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        axes: Mapping[str, int | None],
        user_shapes: Mapping[str, Shape],
        fixed_lengths: Mapping[str, int],
    ) -> None:
        self._inputs, self._batched, self._requested = inputs, axes, user_shapes
        self._image = image_of(inputs)
        self._axes: dict[str, Axis] = {**fixed_lengths}
        shared = _find_shared_names(inputs, axes)
        for tensor in inputs:
            for k, axis in enumerate(tensor.shape):
                name, length = self._name_axis(tensor, k), self._given_length(tensor, k)
                if isinstance(axis, str) and length is not None and not (axis in shared and isinstance(length, str)):
                    self._axes.setdefault(name, length)
        self._solve_sums()

    def name_shape(self, tensor: Tensor) -> Shape:
        """Return the input's shape, with the names of axes of unknown length."""
        return tuple(self._find_length(tensor, k) for k in range(len(tensor.shape)))

    def choose_shape(self, tensor: Tensor) -> Shape:
        """Return the input's shape without a description: the batch first, and the size of an image."""
        sides = self._find_sides(tensor)
        return tuple(
            axis if isinstance(axis, int) else BATCH_AXIS if not k else sides.get(k, axis)
            for k, axis in enumerate(tensor.shape)
        )

    def refuse_unknown(self) -> None:
        """Raise a `UserError` for axes without a length, asking for the fewest shapes that determine all."""
        unknown_axes: dict[str, list[str]] = {}
        for tensor in self._inputs:
            for k, axis in enumerate(tensor.shape):
                if isinstance(axis, str) and self._find_length(tensor, k) == self._name_axis(tensor, k):
                    for name in self._parse_terms(axis) or {self._name_axis(tensor, k): 1}:
                        if name and name not in self._axes:
                            unknown_axes.setdefault(name, []).append(tensor.name)
        if not unknown_axes:
            return
        texts, shapes = [], dict[str, str]()
        for name, input_names in unknown_axes.items():
            examples = ", ".join(dict.fromkeys(input_names[:3])) + (", …" if len(input_names) > 3 else "")
            texts.append(examples if name.endswith("]") else f"{name} ({examples})")
            candidates = [t for t in self._inputs if t.name in input_names and (name in t.shape or name.endswith("]"))]
            candidate = next((t for t in candidates if t.name in shapes), None) or next(iter(candidates), None)
            if candidate is not None:
                shapes[candidate.name] = "x".join(map(self._format_axis, self.name_shape(candidate)))
        options = " ".join(f"--shapes {name}:{shape}" for name, shape in shapes.items())
        noun = "an axis" if len(unknown_axes) == 1 else "axes"
        raise UserError(
            f"the inputs have {noun} of unknown length: {'; '.join(texts)}; give numbers for the names in {options}"
        )

    def _format_axis(self, axis: Axis) -> str:
        return str(axis) if isinstance(axis, int) or axis in (BATCH_AXIS, "height", "width") else f"<{axis}>"

    def _find_sides(self, tensor: Tensor) -> dict[int, str]:
        """Return the axes of height and width, if the input is an image."""
        if self._image is None or not is_image(tensor):
            return {}
        _, height, width = find_axes(tensor.shape)
        return {height: "height", width: "width"}

    def _name_axis(self, tensor: Tensor, k: int) -> str:
        axis = tensor.shape[k]
        return axis if isinstance(axis, str) and axis not in ("", "?") else f"{tensor.name}[{k}]"

    def _given_length(self, tensor: Tensor, k: int) -> Axis | None:
        """Return the axis according to the user, the batch or the image size; None if they don't determine it."""
        shape = self._requested.get(tensor.name)
        if shape is not None and len(shape) == len(tensor.shape):
            return BATCH_AXIS if k == self._batched[tensor.name] else shape[k]
        return BATCH_AXIS if k == self._batched[tensor.name] else self._find_sides(tensor).get(k)

    def _find_length(self, tensor: Tensor, k: int) -> Axis:
        axis, user_shape = tensor.shape[k], self._requested.get(tensor.name)
        if user_shape is not None and len(user_shape) == len(tensor.shape):
            return BATCH_AXIS if k == self._batched[tensor.name] else user_shape[k]
        if isinstance(axis, int):  # a fixed first axis is checked against the batch when fed
            return BATCH_AXIS if k and k == self._batched[tensor.name] else axis
        if (length := self._given_length(tensor, k)) is not None:
            return length
        name = self._name_axis(tensor, k)
        if name in self._axes:
            return self._axes[name]
        terms = self._parse_terms(axis)
        values = {term: self._axes.get(term, 0) if term else 1 for term in terms}
        if not terms or any(term and not isinstance(self._axes.get(term), int) for term in terms):
            return name
        length = sum(terms[term] * int(values[term]) for term in terms)
        if length < 0:
            raise UserError(f"the shapes give {axis} of {tensor.name!r} a length of {length}; give others")
        return length

    def _parse_terms(self, axis: str) -> dict[str, int]:
        """Return the names in a sum with their factors (a number's under ""); {} if the axis isn't a sum."""
        terms: dict[str, int] = {}
        if not AXIS_OPERATOR.search(axis) or re.sub(AXIS_TERM, "", axis).strip():
            return {}
        for sign, factor, name in AXIS_TERM.findall(axis):
            value = (-1 if sign == "-" else 1) * int(factor or 1)
            key, value = ("", value * int(name)) if name.isdecimal() else (name, value)
            terms[key] = terms.get(key, 0) + value
        return terms

    def _solve_sums(self) -> None:
        """Solve the sums for names with a single possible length."""
        sums = self._find_sums()
        for _ in sums:
            for terms, length in sums:
                unknowns = [name for name in terms if name and name not in self._axes]
                values = [self._axes.get(name, 0) for name in terms if name]
                if any(isinstance(value, str) for value in values):
                    continue
                rest = length - sum(n * (int(self._axes.get(name, 0)) if name else 1) for name, n in terms.items())
                if not unknowns and rest:
                    lengths = ", ".join(f"{name} {self._axes[name]}" for name in terms if name)
                    suffix = f", for a sum of {length}" if length else ""
                    raise UserError(f"the lengths in the shapes don't add up: {lengths}{suffix}; give lengths that fit")
                if len(unknowns) == 1:
                    value, remainder = divmod(rest, terms[unknowns[0]])
                    if remainder or value < 0:
                        quotient = rest / terms[unknowns[0]]
                        raise UserError(f"the lengths in the shapes leave {quotient:g} for {unknowns[0]}; give others")
                    self._axes[unknowns[0]] = value

    def _find_sums(self) -> list[tuple[dict[str, int], int]]:
        """Return the sums with a known result; an axis named after the total is the sum of past and new."""
        sums = []
        for tensor in self._inputs:
            for k, axis in enumerate(tensor.shape):
                length = self._given_length(tensor, k)
                terms = self._parse_terms(axis) if isinstance(axis, str) else {}
                if terms and isinstance(length, int):
                    sums.append((terms, length))
        return sums + self._find_whole_sums()

    def _find_whole_sums(self) -> list[tuple[dict[str, int], int]]:
        names = {
            axis for t in self._inputs for axis in t.shape if isinstance(axis, str) and not AXIS_OPERATOR.search(axis)
        }
        total_names = [name for name in names if TOTAL_AXIS.search(name) and is_length(name)]
        past_names = [name for name in names if PAST_AXIS.search(name) and name not in total_names]
        new_names = [name for name in names if is_length(name) and name not in (*total_names, *past_names)]
        if len(past_names) != 1 or len(new_names) != 1:
            return []
        return [({past_names[0]: 1, new_names[0]: 1, name: -1}, 0) for name in sorted(total_names)]


def inspect_model(
    trial: Trial, sizes: list[list[int]], overrides: Mapping[str, Mapping[str, Any]], task: str = ""
) -> Inspection:
    """Return the facts on a model that Dyno needs before it lists trials.

    `overrides` are the user's settings of inputs by name, `task` is the network's task. Raise a `UserError` for a
    model, checkpoint, input or size that doesn't work.
    """
    return (
        _inspect_file(trial, sizes, overrides, task)
        if trial.model.file
        else _inspect_module(trial.model, sizes, overrides, task)
    )


def _inspect_module(
    model: ModelSpec, sizes: list[list[int]], overrides: Mapping[str, Mapping[str, Any]], task: str
) -> Inspection:
    local_code.note_files()
    preprocess = models.preprocess(model)
    image_size = models.image_size(model) or (DEFAULT_SIZE, DEFAULT_SIZE)
    user_size = tuple(overrides.get("input", {}).get("shape", ()))[2:]
    if len(user_size) == 2 and all(isinstance(n, int) for n in user_size):
        image_size = (user_size[0], user_size[1])
    height, width = sizes[0] if sizes else image_size
    source, rest = models.find_source(model)
    module = models.build(model, Dims(1, height, width))  # batch-norm statistics don't change inputs or outputs
    inputs = (
        modules.describe_inputs(module, model, source.make_examples(model, rest), overrides)
        if _may_differ(model, overrides)
        else ModuleInputs()
    )
    image_size = inputs.size if all(inputs.size) else image_size if inputs.image else (0, 0)
    sizes = sizes if inputs.image else []
    _check_sizes(sizes, inputs, overrides)
    inspection, operations = Inspection(), {}
    for index, (height, width) in enumerate(sizes or [image_size]):
        dims = Dims(inputs.batch, height, width)
        module = models.build(model, dims) if index else module
        source_purpose = source.read_purpose(model, rest, module)
        if source.says_purpose:
            ultralytics_models.check_size(model.source, source_purpose.stride or 1, height, width)
        inputs, outputs = _try_inputs(module, model, inputs, dims)
        dims = replace(dims, batch=inputs.batch)
        operations[dims.size] = _count_operations(module, model, inputs, dims)
        purpose = (
            source_purpose
            if source.says_purpose and task in ("", source_purpose.task)
            else file_facts.find_task_facts(model, task, source_purpose, OutputShapes(outputs, (height, width)))
        )
        parameters = models.count_parameters(module)
        inspection = replace(inspection, outputs=_count_classes(outputs, purpose), parameters=parameters).merge(purpose)
    is_detector = libraries.is_torchvision_detector(model)
    max_batch = saved_modules.find_most_batch(module, inputs.inputs) if inputs.has_free_batch else 0
    limit_text = f"the program was exported for batches up to {max_batch}" if max_batch else ""
    is_letterboxed = bool(inspection.preprocess and inspection.preprocess.letterbox)
    unsupported, unchecked = source.check_images(model, rest, is_letterboxed) if all(image_size) else ("", "")
    return replace(
        inspection,
        preprocess=inspection.preprocess or preprocess,
        preprocess_guessed=source.stores_preprocess and not (source_purpose.task or source_purpose.preprocess),
        unsupported_images=unsupported,
        unchecked_images=unchecked,
        size=image_size,
        flops={size: n for size, n in operations.items() if n},
        inputs=inputs.inputs,
        shapes={spec.name: spec.shape for spec in inputs.inputs if BATCH_AXIS in spec.shape[1:]},
        usual_batch=inputs.batch,
        batch=1 if is_detector else 0 if inputs.has_free_batch else inputs.batch,
        batches=(1, inputs.batch, max_batch) if max_batch else None,
        batch_reason=libraries.TAKES_ONE_IMAGE if is_detector else limit_text,
        files=models.hash_files_read(model),
    )


def _may_differ(model: ModelSpec, overrides: Mapping[str, Any]) -> bool:
    """Return whether the model may take other inputs than one image: a library's network needs overrides for that."""
    return bool(overrides) or not models.find_source(model)[0].takes_image


def _check_sizes(sizes: list[list[int]], inputs: ModuleInputs, overrides: Mapping[str, Any]) -> None:
    is_fixed = all(inputs.size) and any("shape" in override for override in overrides.values())
    conflicts = [size for size in sizes if is_fixed and tuple(size) != inputs.size]
    if conflicts:
        size_text = f"{inputs.size[0]}x{inputs.size[1]}"
        height, width = conflicts[0]
        raise UserError(f"shapes give an input of {size_text} pixels, and sizes {height}x{width}; omit one of them")


def _count_operations(module: Any, model: ModelSpec, inputs: ModuleInputs, dims: Dims) -> int:
    """Return the operations of one image, 0 if they can't be counted."""
    import torch

    try:
        if not inputs.inputs:
            image = torch.zeros(dims.batch, model.channels, dims.height, dims.width)
            return flops.of_module(module, image) // dims.batch
        args, keywords = modules.make_example(model, inputs.inputs, dims)
        return flops.of_module(module, *args, **keywords) // dims.batch
    except Exception:  # a valid module may still fail in the counter
        return 0


def _try_inputs(
    module: Any, model: ModelSpec, inputs: ModuleInputs, dims: Dims
) -> tuple[ModuleInputs, dict[str, Shape]]:
    """Run the module once; return its inputs, and the shapes of its outputs by name."""
    import torch

    if any(weight.is_meta for weight in module.parameters()):
        raise UserError(
            "the model has no weights yet (device meta); give it some first, by to_empty() and a state_dict"
        )
    try:
        if inputs.inputs:
            inputs, result = modules.verify_inputs(module, model, inputs, dims, _no_memory)
        else:
            image = torch.zeros(dims.batch, model.channels, dims.height, dims.width)
            with torch.inference_mode():
                result = module(image)
                larger_batch = torch.cat([image, image[:1]])  # a program may be fixed at its example's batch
                if _may_differ(model, {}) and not modules.accepts(lambda: module(larger_batch), _no_memory):
                    inputs = replace(inputs, has_free_batch=False)
    except (UserError, MemoryError):
        raise
    except Exception as e:  # foreign code may raise anything for an unsuitable input
        reason = first_line(e)
        text = modules.list_inputs(inputs.inputs, dims) or f"{dims.batch}x{model.channels}x{dims.height}x{dims.width}"
        raise UserError(
            f"the model refuses {text}: {reason}{_advise_on_refusal(module, model, reason, inputs.inputs)}"
        ) from e
    saved_modules.check_guards(module, model, inputs.inputs, dims)
    return inputs, {name: tuple(tensor.shape) for name, tensor in named_outputs(result).items()}


def _no_memory(e: Exception) -> bool:
    return isinstance(e, MemoryError) or is_memory_error(e)


def _advise_on_refusal(module: Any, model: ModelSpec, reason: str, inputs: Sequence[InputSpec]) -> str:
    """Return advice on a module that refuses its input; "" if its only input is an image.

    Most networks of libraries take only an image.
    """
    has_several = sum(modules.signature_of(module).required.values()) > 1
    is_video = any(type(layer).__name__ == "Conv3d" for layer in module.modules())
    if not (_may_differ(model, {}) or has_several or is_video):
        return ""
    has_decoder = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    if has_decoder and DECODER_TOKENS not in {spec.name for spec in inputs}:
        return f"; add --shapes {DECODER_TOKENS}:batchx1:int64, the tokens that its decoder is given"
    kind, rest = models.parse(model.source)
    function = rest.rpartition(":")[2].partition("(")[0] if kind in models.FUNCTION_SOURCES else ""
    advice = modules.advice_on_reason(module, reason, "save" if kind == saved_modules.SAVED.name else "return")
    return f"; {advice or modules.advice_after_refusal(module, model, function, not inputs)}"


def _count_classes(shapes: Mapping[str, Shape], purpose: Purpose) -> int:
    """Return the number of classes of a classifier's scores; 0 for another, an ambiguous or an unknown output."""
    if purpose.task and tasks.find_task(purpose.task).labels == "objects":
        return 0
    counts = {classify.classes_of(shapes[name]) for name in classify.find_scores(shapes, purpose.classes or 0)}
    return counts.pop() if len(counts) == 1 else 0


def _inspect_file(
    trial: Trial, sizes: list[list[int]], overrides: Mapping[str, Mapping[str, Any]], task: str
) -> Inspection:
    model, file_format = trial.model, registry.format_of(trial.model.file)
    if file_format is None:  # a plug-in installed only on the study's side
        raise UserError(f"no backend here reads {model.file}; known files: {', '.join(registry.list_suffixes())}")
    contents = file_format.read(model.file, trial)
    tensors = contents.inputs
    if not tensors:
        raise UserError(f"{model.file} has no inputs, so there is nothing to run it on; export the model with one")
    inputs = tuple(modules.describe_file_inputs(tensors, overrides, contents.task.inputs))
    axes, user_shapes = _given_shapes(tensors, contents.outputs, overrides)
    fixed_tensors = [replace(t, shape=tuple(contents.lengths.get(str(n), n) for n in t.shape)) for t in tensors]
    inspection = file_facts.find_image_facts(model, fixed_tensors, user_shapes, sizes, contents.image)
    model = replace(model, channels=inspection.channels or model.channels)
    outputs = {tensor.name: tensor.shape for tensor in contents.outputs}
    purpose = file_facts.find_task_facts(model, task, contents.task, OutputShapes(outputs, inspection.size))
    only_batch = fixed_batch(tensors, axes, user_shapes)
    inspection = replace(
        inspection.merge(purpose),
        preprocess=purpose.preprocess or model.preprocess,
        preprocess_guessed=not (contents.task.task or contents.task.preprocess) and file_facts.is_normalised(tensors),
        largest_pixel=contents.largest_pixel,
        batch=only_batch,
        batch_reason=_batch_reason(tensors, axes, user_shapes),
        batches=contents.batches,  # of an engine's profile
        shapes=described_shapes(tensors, axes, user_shapes, contents.lengths),
        declared=_find_batched_outputs(tensors, contents.outputs, axes),
        outputs=_count_classes(outputs, purpose),
        precision=contents.precision,
        parameters=contents.parameters,
        signature=tuple(tuple(tensor.shape for tensor in group) for group in (tensors, contents.outputs)),
        inputs=inputs,
    )
    batch = only_batch or (contents.batches[1] if contents.batches else inspection.usual_batch or 1)
    dims = Dims(batch, *inspection.size, inspection.shapes)
    static_shapes(tensors, dims)
    if contents.flops:
        cases = [dims] if inspection.fixed_size or not sizes else [replace(dims, height=h, width=w) for h, w in sizes]
        counts = {d.size: contents.flops(static_shapes(tensors, d)) // d.batch for d in cases}
        inspection = replace(inspection, flops={size: count for size, count in counts.items() if count})
    return inspection


def _given_shapes(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], overrides: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, int | None], dict[str, Shape]]:
    """Return the batch axis of each input (None: no batch), and the user's shapes.

    If a user's shape has `batch`, these shapes decide: inputs without it have no batch. An array names no axis, so for
    it the file's names decide. Raise a `UserError` for a shape that doesn't fit.
    """
    axes, user_shapes = batch_axes(inputs, outputs), dict[str, Shape]()
    for tensor in inputs:
        settings = overrides.get(tensor.name, {})
        if "shape" not in settings:
            continue
        shape, index = tuple(settings["shape"]), axes[tensor.name]
        sides = dict(zip(find_axes(tensor.shape)[1:], ("height", "width"), strict=True)) if is_image(tensor) else {}
        if invalid_axes := [
            axis for k, axis in enumerate(shape) if isinstance(axis, str) and axis not in (BATCH_AXIS, sides.get(k))
        ]:
            raise UserError(
                f"shape has {invalid_axes[0]!r}; the axes of a file's input are numbers, or {BATCH_AXIS} for the batch"
            )
        if len(shape) != len(tensor.shape):
            shape_text = "x".join(map(str, shape))
            raise UserError(f"input {tensor.name!r} has {len(tensor.shape)} dimensions, not {shape_text}")
        if "array" in settings and shape[:1] == (BATCH_AXIS,) and index != 0 and any(map(names_batch, tensor.shape)):
            shape = tuple(BATCH_AXIS if k == index else n for k, n in enumerate(settings["array"]))
        user_shapes[tensor.name] = shape
    if any(BATCH_AXIS in shape for shape in user_shapes.values()):
        axes |= {name: shape.index(BATCH_AXIS) if BATCH_AXIS in shape else None for name, shape in user_shapes.items()}
        return axes, user_shapes
    image = [t for t in inputs if t == image_of(inputs) and t.name not in user_shapes and axes[t.name] is not None]
    batch = fixed_batch(image or inputs, axes, user_shapes) or fixed_batch(inputs, axes, user_shapes)
    # An assumed batch that contradicts another input isn't a batch: the first axis of a 2 x 1 x n state.
    for tensor in inputs:
        k = axes[tensor.name]
        if tensor.name in user_shapes and k is not None and (rows := user_shapes[tensor.name][k]) != batch:
            if names_batch(axis := tensor.shape[k]):
                raise UserError(f"the shapes give batches of {batch} and {rows}; give all inputs one batch")
            siblings = [t.name for t in inputs if axis not in ("", "?") and t.shape[:1] == (axis,)]
            axes |= dict.fromkeys([tensor.name, *siblings] if isinstance(axis, str) else [tensor.name])
    return axes, user_shapes


def _batch_reason(inputs: Sequence[Tensor], axes: Mapping[str, int | None], user_shapes: Mapping[str, Shape]) -> str:
    """Return why the batch is fixed by more than the file; "" if the file fixes it or leaves it free."""
    if all(axis is None for axis in axes.values()):
        return "no axis of the inputs is the batch (--shapes NAME:50xbatchx16 names one)"
    is_free = any(axis is not None and isinstance(t.shape[axis], str) for t in inputs for axis in [axes[t.name]])
    return f"--shapes gives a batch of {n}" if is_free and (n := fixed_batch(inputs, axes, user_shapes)) else ""


def _find_batched_outputs(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], axes: Mapping[str, int | None]
) -> tuple[Tensor, ...]:
    """Return the outputs with a batch axis by the file's names, with `batch` at that axis."""
    names = {t.shape[k] for t in inputs for k in [axes[t.name]] if k is not None}
    names -= {"", "?", *_find_shared_names(inputs, axes)}
    tensors = [
        replace(o, shape=tuple(BATCH_AXIS if isinstance(n, str) and n in names else n for n in o.shape))
        for o in outputs
    ]
    return tuple(output for output in tensors if BATCH_AXIS in output.shape)
