"""Inputs of a PyTorch module: from examples, its signature and the command line, checked by running it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dyno.worker.inputs import input_data as feeds
from dyno.worker.inputs.specs import (
    INPUT_ALIAS,
    check_values,
    find_axes,
    has_batch,
    image_of,
    is_image,
    list_tensors,
    make_arguments,
)
from dyno.worker.spec import BATCH_AXIS, DataSpec, Dims, InputSpec, ModelSpec, Tensor, UserError

SIZE_AXES = ("height", "width")
NUMBER_TYPES = (int, float, bool, str)
NEEDS_GRADIENTS = re.compile("requires?.grad|[Ii]nference tensor")  # PyTorch's messages
MIXED_BATCH_ERROR = 0.02  # relative change of a row's outputs that shows dependence on other rows
NESTED_TYPE = re.compile(
    "(typing\\.)?(dict|list|tuple|mapping|sequence)\\b", re.IGNORECASE
)  # types with several tensors
TOKEN_NAME = re.compile("ids|mask|token")  # names of integer inputs


@dataclass(frozen=True)
class Signature:
    """Parameters of a forward and whether each is required; keyword-only ones; `more`: *args or **kw."""

    required: dict[str, bool]
    keyword_only: frozenset[str] = frozenset()
    more: bool = False


@dataclass(frozen=True)
class ModuleInputs:
    """A module's inputs, () for a single image.

    `batch` and `size` (height, width) are those of the description, 0 if it has none. `has_free_batch`: another batch
    is accepted. `has_named_batch`: the user named the batch axis. `ranged` are the inputs with a range from the user.
    """

    inputs: tuple[InputSpec, ...] = ()
    batch: int = 1
    size: tuple[int, int] = (0, 0)
    has_free_batch: bool = True
    has_named_batch: bool = False
    ranged: frozenset[str] = frozenset()

    @property
    def image(self) -> bool:
        """Whether an input has the trial's image size."""
        return not self.inputs or any(SIZE_AXES[0] in spec.shape for spec in self.inputs)

    @property
    def signature(self) -> Signature:
        """A signature with these inputs' names, for a module without them."""
        keyword = frozenset(spec.name for spec in self.inputs if spec.keyword)
        return Signature({spec.name: True for spec in self.inputs}, keyword)


def describe_inputs(
    module: Any, model: ModelSpec, examples: Any, overrides: Mapping[str, Mapping[str, Any]]
) -> ModuleInputs:
    """Describe the module's inputs, before it is run.

    `examples` were saved with the module, are a tensor, tuple or dict, or None; `overrides` are the command line's
    settings by input name. A single parameter without a description is an image. Raise a `UserError` if the inputs
    can't be determined.
    """
    stored_inputs = examples if isinstance(examples, ModuleInputs) else None
    signature = stored_inputs.signature if stored_inputs else signature_of(module)
    described_specs = stored_inputs.inputs if stored_inputs else _of_examples(examples, signature, model)
    specs = {spec.name: spec for spec in described_specs}
    specs = {spec.name: spec for spec in _with_overrides(specs, signature, overrides, model)}
    missing = [name for name, required in signature.required.items() if required and name not in specs]
    if not specs and not missing:
        missing = [*signature.required][:1]
    if len(missing) > 1:
        names = ", ".join(missing)
        raise UserError(
            f"{model.name} takes {names}, whose shapes and types are unknown; {advise_on_inputs(model, missing)}"
        )
    if missing:
        is_keyword = bool(specs) or missing[0] in signature.keyword_only
        specs[missing[0]] = InputSpec(
            missing[0], "float32", (BATCH_AXIS, model.channels, *SIZE_AXES), keyword=is_keyword
        )
    order = [*signature.required]
    ordered = sorted(specs.values(), key=lambda s: order.index(s.name) if s.name in order else len(order))
    description = replace(
        _insert_symbols(tuple(ordered)), ranged=frozenset(n for n, override in overrides.items() if "low" in override)
    )
    if stored_inputs:
        size = description.size if all(description.size) else stored_inputs.size
        description = replace(description, batch=stored_inputs.batch, size=size, has_named_batch=False)
    return replace(description, inputs=()) if _is_image(description.inputs, signature, model) else description


def describe_file_inputs(
    file: Sequence[Tensor], overrides: Mapping[str, Mapping[str, Any]], saved_specs: Sequence[InputSpec]
) -> tuple[InputSpec, ...]:
    """Describe the file's inputs, with value ranges from the user or its metadata (`saved_specs`); () without ranges.

    Raise a `UserError` for an input or a type that the file doesn't have.
    """
    kinds = {tensor.name: tensor.dtype for tensor in file}
    for name, override in overrides.items():
        if name not in kinds:
            raise UserError(f"the model has no input {name!r}; its inputs: {', '.join(kinds)}")
        if "feeds" not in override and override.get("dtype", kinds[name]) != kinds[name]:
            raise UserError(f"the file's input {name!r} is {kinds[name]}, not {override['dtype']}; omit the type")
    specs = {spec.name: spec for spec in saved_specs}
    if not specs and not any("low" in override or "feeds" in override for override in overrides.values()):
        return ()
    keys = ("low", "high", "feeds", "feeds_sha256")
    ranges = {name: {key: override[key] for key in keys if key in override} for name, override in overrides.items()}
    base = [replace(specs.get(t.name, InputSpec(t.name)), dtype=t.dtype, shape=t.shape) for t in file]
    return tuple(check_values(replace(spec, **ranges.get(spec.name, {}))) for spec in base)


def signature_of(module: Any) -> Signature:
    """Return the signature of forward, also of a TorchScript module."""
    import torch

    if isinstance(module, torch.jit.ScriptModule):
        arguments = module.forward.schema.arguments[1:]  # without the module itself
        keyword = frozenset(a.name for a in arguments if a.kwarg_only)
        return Signature({a.name: not a.has_default_value() for a in arguments}, keyword)
    parameters = inspect.signature(module.forward).parameters.values()
    variadic = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    named_parameters = [p for p in parameters if p not in variadic]
    keyword = frozenset(p.name for p in named_parameters if p.kind is p.KEYWORD_ONLY)
    keyword |= _list_program_keywords(module)
    return Signature({p.name: p.default is p.empty for p in named_parameters}, keyword, bool(variadic))


def _list_program_keywords(module: Any) -> frozenset[str]:
    """Return the inputs of a torch.export program exported by keyword: it takes them only by keyword."""
    codegen = getattr(getattr(module, "graph", None), "_codegen", None)
    in_spec: Any = getattr(getattr(codegen, "pytree_info", None), "in_spec", None)
    # older versions of PyTorch have only the attribute; newer ones deprecate it
    children: list[Any] = in_spec.children() if hasattr(in_spec, "children") else getattr(in_spec, "children_specs", [])
    return frozenset(children[1].context or ()) if len(children) == 2 and children[1].type is dict else frozenset()


def advise_on_inputs(model: ModelSpec, names: Sequence[str] = ("x",)) -> str:
    """Return advice on inputs of unknown shape and type, as the end of a message."""
    if not model.source:
        return "give example inputs too: models=(module, inputs)"
    function = model.source.rpartition(":")[2].partition("(")[0]
    shapes = " ".join(
        f"--shapes {name}:{'1x128:int64' if TOKEN_NAME.search(name) else '1x3x224x224'}" for name in names
    )
    if model.source.startswith("saved:"):
        return f"give {shapes}"
    return f"give {shapes}, or write {function}_inputs() beside {function}, which returns example inputs"


def advice_on_reason(module: Any, reason: str, verb: str) -> str:
    """Return advice on a refusal not due to the inputs, as the end of a message; "" for other reasons.

    The reasons: the module computes gradients, or has weights other than float32, the inputs' type.
    """
    if NEEDS_GRADIENTS.search(reason):
        return (
            "it computes gradients, which are off while it is measured: let forward switch them on within "
            "`with torch.inference_mode(False), torch.enable_grad():`"
        )
    types = {str(weight.dtype).removeprefix("torch.") for weight in module.parameters() if weight.is_floating_point()}
    names = ", ".join(sorted(types))
    if types - {"float32"} and "type" in reason:
        return f"its weights are {names}: {verb} module.float(), since precisions say in which type it runs"
    return ""


def advice_after_refusal(module: Any, model: ModelSpec, function: str, image: bool) -> str:
    """Return advice on a module that refused its inputs, as the end of a message.

    `function` is the user's function that returns the module ("" if none), `image` whether the input was the default
    image.
    """
    if nested := _list_nested(module):
        names = " and ".join(f"{name!r} as a {kind}" for name, kind in nested.items())
        return f"it takes {names}: wrap it in a module whose forward takes tensors, and give that as FILE.py:FUNCTION"
    parameters = signature_of(module).required
    inputs = [name for name, required in parameters.items() if required] or [*parameters][:1] or ["input"]
    shapes = " ".join(f"--shapes {name}:SHAPE" for name in inputs)
    alternative = f", or by {function}_inputs() beside {function}" if function else ""
    conv_channels = next((layer.in_channels for layer in module.modules() if type(layer).__name__ == "Conv2d"), 0)
    channels = f"give --channels {conv_channels}, or " if conv_channels and conv_channels != model.channels else ""
    size = "give another --size, or " if conv_channels and image and len(inputs) == 1 and not channels else ""
    return f"{channels}{size}describe its inputs with {shapes} (followed by :int64 for token ids){alternative}"


def _list_nested(module: Any) -> dict[str, str]:
    """Return the inputs that forward declares as lists, tuples or dicts, with their types."""
    import torch

    if isinstance(module, torch.jit.ScriptModule):
        types = {a.name: a.type.annotation_str for a in module.forward.schema.arguments[1:]}
    else:
        parameters = inspect.signature(module.forward).parameters.values()
        types = {p.name: inspect.formatannotation(p.annotation).strip("'") for p in parameters}
    return {name: kind for name, kind in types.items() if NESTED_TYPE.match(kind)}


def _of_examples(examples: Any, signature: Signature, model: ModelSpec) -> list[InputSpec]:
    if examples is None:
        return []
    if isinstance(examples, Mapping):
        return [_make_spec(str(name), value, True, model) for name, value in examples.items()]
    values = [*examples] if isinstance(examples, (list, tuple)) else [examples]
    names = [*signature.required]
    if len(values) > len(names) and not signature.more:
        raise UserError(
            f"{model.name} has {len(values)} example inputs, but its forward takes {', '.join(names) or 'none'}"
        )
    names += [f"input_{i}" if i else "input" for i in range(len(names), len(values))]
    pairs = zip(names, values, strict=False)
    return [_make_spec(name, value, name in signature.keyword_only, model) for name, value in pairs]


def _make_spec(name: str, value: Any, is_keyword: bool, model: ModelSpec) -> InputSpec:
    import torch

    if value is None or isinstance(value, NUMBER_TYPES):
        return InputSpec(name, "", value=value, keyword=is_keyword)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.asarray(value, order="C"))
    if not isinstance(value, torch.Tensor) or value.is_complex() or value.is_quantized:
        kind = f" of {value.dtype}" if isinstance(value, torch.Tensor) else ""
        raise UserError(
            f"the example of {model.name}'s input {name!r} is a {type(value).__name__}{kind}; "
            "it must be a tensor, an array of real numbers or a number: wrap the module in one whose forward takes such"
        )
    dtype = "float32" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
    low, high = _find_range(value)
    return InputSpec(name, dtype, tuple(value.shape), low, high, keyword=is_keyword)


def _find_range(example: Any) -> tuple[float | None, float | None]:
    """Return the smallest and largest value; None for constants, zeros and ones, and images around zero."""
    import torch

    if example.dtype == torch.bool or not example.numel():
        return None, None
    values = (example.detach().double() if example.is_floating_point() else example).cpu().numpy()
    finite = values[np.isfinite(values)]
    low, high = (finite.min().item(), finite.max().item()) if finite.size else (0, 0)
    if example.is_floating_point():
        is_constant = low == high and example.numel() > 1
        return (None, None) if is_constant or (example.ndim == 4 and low < 0) else (low, high)
    return (None, None) if low >= 0 and high <= 1 else (low, high)


def _with_overrides(
    specs: dict[str, InputSpec], signature: Signature, overrides: Mapping[str, Mapping[str, Any]], model: ModelSpec
) -> list[InputSpec]:
    """Return the specs with the command line's settings applied; raise a `UserError` for an unknown input."""
    result = dict(specs)
    for name, override in overrides.items():
        is_alias = name == INPUT_ALIAS and len(signature.required) == 1
        if name not in {*signature.required, *specs} and not signature.more and not is_alias:
            names = ", ".join(signature.required) or "none"
            raise UserError(f"the model has no input {name!r}; its inputs: {names}")
        target = next(iter(signature.required)) if is_alias and name not in signature.required else name
        result[target] = _override_spec(target, result.get(target), override, model, target in signature.required)
    return [*result.values()]


def _override_spec(
    name: str, spec: InputSpec | None, override: Mapping[str, Any], model: ModelSpec, is_parameter: bool
) -> InputSpec:
    if spec is None and "shape" not in override:
        if "value" in override:
            return InputSpec(name, "", value=override["value"], keyword=is_parameter)
        raise UserError(f"{model.name}'s input {name!r} has a range, but no shape; give --shapes {name}:1x128:int64")
    if spec is not None and not spec.dtype and "shape" not in override:
        return replace(spec, value=override.get("value", spec.value))
    base = spec if spec is not None and spec.dtype else InputSpec(name, keyword=spec.keyword if spec else is_parameter)
    fields = {key: override[key] for key in ("dtype", "low", "high", "feeds", "feeds_sha256") if key in override}
    if "shape" in override:
        fields["shape"] = tuple(override["shape"])
    if fields.get("dtype", base.dtype) != base.dtype and "low" not in override:
        fields |= {"low": None, "high": None}
    spec = replace(base, **fields)
    if spec.dtype.startswith("float") and spec.dtype != "float32":
        raise UserError(f"a module's floating-point inputs are float32, and --precision says in which type it runs; "
                        f"omit the type {spec.dtype} of {name!r}")  # fmt: skip
    return check_values(spec)


def _insert_symbols(specs: tuple[InputSpec, ...]) -> ModuleInputs:
    """Return the specs with symbols for the batch and the size.

    The batch replaces the first axis of all inputs with the first input's length there; the size replaces the size of
    every image as large as the first.
    """
    arrays = [spec for spec in specs if spec.dtype and spec.shape]
    is_named = has_batch(arrays)
    first = next((spec.shape[0] for spec in arrays if isinstance(spec.shape[0], int)), 1)
    batch = 1 if is_named or any(spec.feeds for spec in arrays) or not isinstance(first, int) else first
    tensors = {spec.name: Tensor(spec.name, spec.dtype, spec.shape) for spec in arrays}
    first_image = image_of([*tensors.values()])
    sides = _find_sides(first_image.shape) if first_image else SIZE_AXES
    images = {name for name, tensor in tensors.items() if first_image and is_image(tensor)}
    height, width = (side if isinstance(side, int) else 0 for side in sides)

    def replace_axes(spec: InputSpec) -> InputSpec:
        shape = spec.shape
        if spec in arrays and not is_named and shape[0] == first:
            shape = (BATCH_AXIS, *shape[1:])
        if spec.name in images and _find_sides(shape) == sides:
            symbols = dict(zip(find_axes(shape)[1:], SIZE_AXES, strict=True))
            shape = tuple(symbols.get(axis, length) for axis, length in enumerate(shape))
        return replace(spec, shape=shape)

    return ModuleInputs(tuple(map(replace_axes, specs)), batch, (height, width), has_named_batch=is_named)


def _find_sides(shape: Sequence[int | str]) -> tuple[int | str, int | str]:
    _, height, width = find_axes(shape)
    return shape[height], shape[width]


def _is_image(specs: Sequence[InputSpec], signature: Signature, model: ModelSpec) -> bool:
    """Return whether the inputs are the single image assumed without a description."""
    if not specs:
        return True
    image = InputSpec(specs[0].name, "float32", (BATCH_AXIS, model.channels, *SIZE_AXES))
    return len(specs) == 1 and replace(specs[0], keyword=False) == image and image.name not in signature.keyword_only


def verify_inputs(
    module: Any,
    model: ModelSpec,
    description: ModuleInputs,
    dims: Dims,
    no_memory: Callable[[Exception], bool] = lambda e: isinstance(e, MemoryError),
) -> tuple[ModuleInputs, Any]:
    """Run the module on the inputs; return the confirmed inputs, and the module's result.

    Token ids get the range of their embedding, unless a range was given. An axis taken as the batch only by its length
    is confirmed if the module accepts another length there, or has `no_memory` for it. If the first axis isn't the
    batch, since its rows have no separate outputs, the second is tried: recurrent networks take time x batch x
    features.
    """
    result, limits = _run_and_record(module, *make_example(model, description.inputs, dims), description.inputs)
    specs = tuple(
        replace(spec, low=0, high=limits[spec.name] - 1)
        if spec.name in limits and not spec.feeds and spec.name not in description.ranged
        else spec
        for spec in description.inputs
    )
    if description.has_named_batch or not has_batch(specs):
        return replace(description, inputs=specs, has_free_batch=has_batch(specs)), result
    larger_batch = replace(dims, batch=dims.batch + 1)
    for choice in dict.fromkeys(_iter_choices(specs, dims.batch)):
        if has_batch(choice) and accepts(partial(call, module, model, choice, larger_batch), no_memory):
            if description.image or not _has_mixed_rows(module, model, choice, larger_batch):
                return replace(description, inputs=choice), result
            use_second = _second_axis(module, model, _fix_batch(specs, dims.batch, lambda spec: True), dims)
            return use_second(description) if use_second else replace(description, inputs=choice), result
    fixed_specs = _fix_batch(specs, dims.batch, lambda spec: True)
    use_second = None if description.image else _second_axis(module, model, fixed_specs, dims)
    return use_second(description) if use_second else replace(
        description, inputs=fixed_specs, has_free_batch=False
    ), result


def _second_axis(
    module: Any, model: ModelSpec, specs: tuple[InputSpec, ...], dims: Dims
) -> Callable[[ModuleInputs], ModuleInputs] | None:
    """Return a function that makes the second axis (or an input's only axis) the batch in a description.

    Return None if the module refuses another length there, or its rows have no separate outputs.
    """
    length = next((spec.shape[1] for spec in specs if spec.dtype and len(spec.shape) > 1), 0)
    if not isinstance(length, int) or not length:
        return None

    def replace_axis(spec: InputSpec) -> InputSpec:
        axis = min(1, len(spec.shape) - 1)
        is_batched = spec.dtype and axis >= 0 and spec.shape[axis] == length
        return replace(spec, shape=(*spec.shape[:axis], BATCH_AXIS, *spec.shape[axis + 1 :])) if is_batched else spec

    moved_specs, larger_dims = tuple(map(replace_axis, specs)), replace(dims, batch=length + 1)
    if not accepts(partial(call, module, model, moved_specs, larger_dims), lambda e: False) or _has_mixed_rows(
        module, model, moved_specs, larger_dims
    ):
        return None
    return lambda description: replace(description, inputs=moved_specs, batch=length)


def _has_mixed_rows(module: Any, model: ModelSpec, specs: tuple[InputSpec, ...], dims: Dims) -> bool:
    """Return whether a row's outputs depend on other rows of the batch, or no output has a row for each.

    Outputs that change by themselves, such as random ones, prove nothing.
    """
    import torch
    from torch.utils import _pytree

    (arrays,) = feeds.read_batches(DataSpec(), model.preprocess, list_tensors(specs, dims), dims, 1, specs)
    batch_axes = {spec.name: spec.shape.index(BATCH_AXIS) for spec in specs if BATCH_AXIS in spec.shape}
    row, answers = dims.batch // 2, []
    for fed in (arrays, arrays, feeds.repeat_input(arrays, batch_axes, row)):
        args, keywords = make_arguments(specs, {name: torch.from_numpy(np.array(array)) for name, array in fed.items()})
        try:
            with torch.inference_mode():
                leaves = _pytree.tree_leaves(module(*args, **keywords))
        except Exception:  # unknown: a module may raise anything for unsuitable values
            return False
        answers.append([leaf.float().numpy() for leaf in leaves if isinstance(leaf, torch.Tensor)])
    changes = list[float]()
    for a, repeat, b in zip(*answers, strict=False):
        if a.shape != repeat.shape or feeds.relative_change(a, repeat) > MIXED_BATCH_ERROR:
            continue
        if a.shape == b.shape and a.size > 1 and not np.array_equal(a, b):
            axes = [k for k, n in enumerate(a.shape) if n == dims.batch]
            row_changes = [feeds.relative_change(a.take(row, k), b.take(row, k)) for k in axes]
            changes.append(min(row_changes, default=feeds.relative_change(a, b)))
    return min(changes, default=0.0) > MIXED_BATCH_ERROR


def _run_and_record(
    module: Any, args: list[Any], keywords: dict[str, Any], specs: Sequence[InputSpec]
) -> tuple[Any, dict[str, int]]:
    """Return the module's result, and for each input of an embedding the embedding's number of rows."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    positional = iter(args)
    values = {spec.name: keywords[spec.name] if spec.keyword else next(positional) for spec in specs}
    names = {values[spec.name].data_ptr(): spec.name for spec in specs if spec.dtype}
    input_names = {values[spec.name].data_ptr(): spec.name for spec in specs if spec.dtype and not spec.feeds}
    bag = torch.ops.aten.embedding_bag  # programs have its decomposition
    bags = (bag.padding_idx, bag.default, torch.ops.aten._embedding_bag_forward_only.default)
    lookups = (torch.ops.aten.embedding.default, *bags)
    limits: dict[str, int] = {}
    errors: list[Exception] = []

    class EmbeddingWatch(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
        supports_higher_order_operators = True  # torch.cond

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                return self.dispatch(func, args, kwargs or {})
            except Exception as e:
                errors.append(e)
                raise

        def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
            if func in bags and args[2].numel() > 1 and args[2].data_ptr() in input_names:
                raise UserError(  # PyTorch may hang on unsorted offsets
                    f"{input_names[args[2].data_ptr()]!r} are the offsets of an EmbeddingBag, which random values "
                    "don't fit; let forward take ids of N x L without offsets, or make the offsets"
                )
            if func in lookups and (name := names.get(args[1].data_ptr())):
                limits[name] = min(limits.get(name, args[0].shape[0]), args[0].shape[0])
            return func(*args, **kwargs)

    try:
        with torch.inference_mode(), EmbeddingWatch():
            return module(*args, **keywords), limits
    except RuntimeError as e:
        if errors and isinstance(module, torch.jit.ScriptModule):
            raise errors[-1] from e  # TorchScript drops the message of a mode's error
        raise


def _iter_choices(specs: tuple[InputSpec, ...], batch: int) -> Iterator[tuple[InputSpec, ...]]:
    """Yield possible choices of batched inputs: all, all with several axes, only the first."""
    first_name = next(spec.name for spec in specs if BATCH_AXIS in spec.shape)
    yield specs
    yield _fix_batch(specs, batch, lambda spec: len(spec.shape) < 2)
    yield _fix_batch(specs, batch, lambda spec: spec.name != first_name)


def _fix_batch(specs: tuple[InputSpec, ...], batch: int, selects: Callable[[InputSpec], bool]) -> tuple[InputSpec, ...]:
    def fix_spec(spec: InputSpec) -> InputSpec:
        return replace(spec, shape=tuple(batch if axis == BATCH_AXIS else axis for axis in spec.shape))

    return tuple(fix_spec(spec) if selects(spec) else spec for spec in specs)


def accepts(run: Callable[[], object], no_memory: Callable[[Exception], bool]) -> bool:
    """Return whether a module runs on a larger batch than before; running out of memory is no refusal."""
    try:
        run()
    except Exception as e:  # a module may raise anything for an unsuitable batch
        return no_memory(e)
    return True


def call(module: Any, model: ModelSpec, specs: tuple[InputSpec, ...], dims: Dims) -> Any:
    """Return the module's result for random inputs of these dims."""
    import torch

    args, keywords = make_example(model, specs, dims)
    with torch.inference_mode():
        return module(*args, **keywords)


def make_example(model: ModelSpec, specs: tuple[InputSpec, ...], dims: Dims) -> tuple[list[Any], dict[str, Any]]:
    """Return random arguments of forward: tensors in the described ranges."""
    import torch

    (arrays,) = feeds.read_batches(DataSpec(), model.preprocess, list_tensors(specs, dims), dims, 1, specs)
    return make_arguments(
        specs, {name: torch.from_numpy(np.asarray(array, order="C")) for name, array in arrays.items()}
    )


def list_inputs(specs: Sequence[InputSpec], dims: Dims) -> str:
    """Return the inputs' names, shapes and types, for messages."""
    return ", ".join(f"{t.name} {'x'.join(map(str, t.shape)) or 'scalar'} {t.dtype}" for t in list_tensors(specs, dims))
