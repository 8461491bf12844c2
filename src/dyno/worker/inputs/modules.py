"""What a PyTorch module takes: from example inputs, its signature and the command line, checked by running it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dyno.worker.inputs import input_data as feeds
from dyno.worker.inputs.specs import BATCH, arguments, has_batch, tensors
from dyno.worker.spec import DataSpec, Dims, InputSpec, ModelSpec, Tensor, UserError

SIZE = ("height", "width")
NUMBERS = (int, float, bool, str)
TOKENS = re.compile("ids|mask|token")  # names of inputs that are integers


@dataclass(frozen=True)
class Signature:
    """Parameters of a forward by name, and whether each is required; those by keyword alone; `more`: *args, **kw."""

    required: dict[str, bool]
    keyword_only: frozenset[str] = frozenset()
    more: bool = False


@dataclass(frozen=True)
class Taken:
    """A module's inputs, () for the one image; the batch and the size (height, width) that they were described with, 0
    where nothing says it; whether the batch may be another, whether the user named the axis that is the batch, and the
    inputs whose range the user gave."""

    inputs: tuple[InputSpec, ...] = ()
    batch: int = 1
    size: tuple[int, int] = (0, 0)
    free: bool = True
    named: bool = False
    ranged: frozenset[str] = frozenset()

    @property
    def image(self) -> bool:
        """Whether an input's size is the trial's."""
        return not self.inputs or any(SIZE[0] in spec.shape for spec in self.inputs)

    @property
    def signature(self) -> Signature:
        """What a module of these inputs takes, where its own signature doesn't have their names."""
        keyword = frozenset(spec.name for spec in self.inputs if spec.keyword)
        return Signature({spec.name: True for spec in self.inputs}, keyword)


def taken(module: Any, model: ModelSpec, examples: Any, asked: Mapping[str, Mapping[str, Any]]) -> Taken:
    """What the module takes, before it was run.

    `examples` are what was saved with a module, a tensor, tuple or dict, or None; `asked` is the command line's word on
    inputs by name. The only parameter of which nothing is said is the image. Raises `UserError` where the inputs can't
    be known.
    """
    told = examples if isinstance(examples, Taken) else None
    signature = told.signature if told else signature_of(module)
    specs = {spec.name: spec for spec in (told.inputs if told else _of_examples(examples, signature, model))}
    specs = {spec.name: spec for spec in _with_asked(specs, signature, asked, model)}
    missing = [name for name, required in signature.required.items() if required and name not in specs]
    if not specs and not missing:
        missing = [*signature.required][:1]
    if len(missing) > 1:
        names = ", ".join(missing)
        raise UserError(f"{model.name} takes {names}, and nothing says what they are; {advice(model, missing)}")
    if missing:
        by_keyword = bool(specs) or missing[0] in signature.keyword_only
        specs[missing[0]] = InputSpec(missing[0], "float32", (BATCH, model.channels, *SIZE), keyword=by_keyword)
    order = [*signature.required]
    ordered = sorted(specs.values(), key=lambda s: order.index(s.name) if s.name in order else len(order))
    found = replace(_symbolic(tuple(ordered)), ranged=frozenset(n for n, words in asked.items() if "low" in words))
    if told:
        size = found.size if all(found.size) else told.size
        found = replace(found, batch=told.batch, size=size, named=False)
    return replace(found, inputs=()) if _is_image(found.inputs, signature, model) else found


def of_file(
    file: Sequence[Tensor], asked: Mapping[str, Mapping[str, Any]], stored: Sequence[InputSpec] = ()
) -> tuple[InputSpec, ...]:
    """What the user, or the file's metadata (`stored`), said of its inputs' values; () where nothing.

    Raises `UserError` for an input or a type that the file doesn't have, and for a value without a type of its own.
    """
    kinds = {tensor.name: tensor.dtype for tensor in file}
    for name, words in asked.items():
        if name not in kinds:
            raise UserError(f"the model has no input {name!r}; its inputs: {', '.join(kinds)}")
        if "feeds" not in words and words.get("dtype", kinds[name]) != kinds[name]:
            raise UserError(f"the file's input {name!r} is {kinds[name]}, not {words['dtype']}; omit the type")
    known = {spec.name: spec for spec in stored}
    if not known and not any("low" in words or "feeds" in words for words in asked.values()):
        return ()
    keys = ("low", "high", "feeds", "feeds_sha256")
    said = {name: {key: words[key] for key in keys if key in words} for name, words in asked.items()}
    base = [replace(known.get(t.name, InputSpec(t.name)), dtype=t.dtype, shape=t.shape) for t in file]
    return tuple(replace(spec, **said.get(spec.name, {})) for spec in base)


def signature_of(module: Any) -> Signature:
    """What forward takes, of TorchScript too."""
    import torch

    if isinstance(module, torch.jit.ScriptModule):
        given = [a for a in module.forward.schema.arguments if a.name != "self"]
        keyword = frozenset(a.name for a in given if a.kwarg_only)
        return Signature({a.name: not a.has_default_value() for a in given}, keyword)
    parameters = inspect.signature(module.forward).parameters.values()
    many = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    named = [p for p in parameters if p not in many]
    keyword = frozenset(p.name for p in named if p.kind is p.KEYWORD_ONLY)
    return Signature({p.name: p.default is p.empty for p in named}, keyword, bool(many))


def advice(model: ModelSpec, names: Sequence[str] = ("x",)) -> str:
    """How to say what a module takes."""
    function = model.source.rpartition(":")[2]
    shapes = " ".join(f"--shapes {name}:{'1x128:int64' if TOKENS.search(name) else '1x3x224x224'}" for name in names)
    if model.source.startswith("saved:"):
        return f"give {shapes}"
    return f"give {shapes}, or write {function}_inputs() beside {function}, which returns example inputs"


def advice_after(module: Any, model: ModelSpec) -> str:
    """How to say what a module takes that refused what it was given."""
    name = next(iter(signature_of(module).required), "input")
    function = model.source.rpartition(":")[2]
    beside = "" if model.source.startswith("saved:") else f", or by {function}_inputs() beside {function}"
    return f"say what it takes by --shapes {name}:SHAPE, with :int64 behind it for token ids{beside}"


def _of_examples(examples: Any, signature: Signature, model: ModelSpec) -> list[InputSpec]:
    if examples is None:
        return []
    if isinstance(examples, Mapping):
        return [_spec(str(name), value, True, model) for name, value in examples.items()]
    given = [*examples] if isinstance(examples, (list, tuple)) else [examples]
    names = [*signature.required]
    if len(given) > len(names) and not signature.more:
        raise UserError(
            f"{model.name} has {len(given)} example inputs, but its forward takes {', '.join(names) or 'none'}"
        )
    names += [f"input_{i}" if i else "input" for i in range(len(names), len(given))]
    pairs = zip(names, given, strict=False)
    return [_spec(name, value, name in signature.keyword_only, model) for name, value in pairs]


def _spec(name: str, value: Any, keyword: bool, model: ModelSpec) -> InputSpec:
    import torch

    if value is None or isinstance(value, NUMBERS):
        return InputSpec(name, "", value=value, keyword=keyword)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.asarray(value, order="C"))
    if not isinstance(value, torch.Tensor) or value.is_complex() or value.is_quantized:
        raise UserError(
            f"the example of {model.name}'s input {name!r} is a {type(value).__name__}; "
            "it must be a tensor, an array of real numbers or a number"
        )
    dtype = "float32" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
    low, high = _range(value)
    return InputSpec(name, dtype, tuple(value.shape), low, high, keyword=keyword)


def _range(example: Any) -> tuple[float | None, float | None]:
    """Smallest and largest value; nothing of a constant, of zeros and ones, and of an image around zero."""
    import torch

    if example.dtype == torch.bool or not example.numel():
        return None, None
    finite = example[torch.isfinite(example)] if example.is_floating_point() else example
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0, 0)
    if example.is_floating_point():
        drawn = low == high and example.numel() > 1
        return (None, None) if drawn or (example.ndim == 4 and low < 0) else (low, high)
    return (None, None) if low >= 0 and high <= 1 else (low, high)


def _with_asked(
    specs: dict[str, InputSpec], signature: Signature, asked: Mapping[str, Mapping[str, Any]], model: ModelSpec
) -> list[InputSpec]:
    """The specs, less what the command line says otherwise."""
    made = dict(specs)
    for name, words in asked.items():
        alias = name == "input" and len(signature.required) == 1
        if name not in {*signature.required, *specs} and not signature.more and not alias:
            names = ", ".join(signature.required) or "none"
            raise UserError(f"the model has no input {name!r}; its inputs: {names}")
        own = next(iter(signature.required)) if alias and name not in signature.required else name
        made[own] = _one_asked(own, made.get(own), words, model, own in signature.required)
    return [*made.values()]


def _one_asked(
    name: str, known: InputSpec | None, words: Mapping[str, Any], model: ModelSpec, named: bool
) -> InputSpec:
    if known is None and "shape" not in words:
        if "value" in words:
            return InputSpec(name, "", value=words["value"], keyword=named)
        raise UserError(f"{model.name}'s input {name!r} has a range, but no shape; give --shapes {name}:1x128:int64")
    if known is not None and not known.dtype and "shape" not in words:
        return replace(known, value=words.get("value", known.value))
    base = known if known is not None and known.dtype else InputSpec(name, keyword=known.keyword if known else named)
    fields = {key: words[key] for key in ("dtype", "low", "high", "feeds", "feeds_sha256") if key in words}
    if "shape" in words:
        fields["shape"] = tuple(words["shape"])
    if fields.get("dtype", base.dtype) != base.dtype and "low" not in words:
        fields |= {"low": None, "high": None}
    return replace(base, **fields)


def _symbolic(specs: tuple[InputSpec, ...]) -> Taken:
    """The specs with the batch for the first axis of all that have the first one's length there, and the size of the
    first image for every image of that size."""
    arrays = [spec for spec in specs if spec.dtype and spec.shape]
    named = has_batch(arrays)
    first = next((spec.shape[0] for spec in arrays if isinstance(spec.shape[0], int)), 1)
    batch = 1 if named or any(spec.feeds for spec in arrays) or not isinstance(first, int) else first
    image = next((spec.shape[2:] for spec in arrays if _may_be_image(spec)), SIZE)
    height, width = (side if isinstance(side, int) else 0 for side in image)

    def symbols(spec: InputSpec) -> InputSpec:
        shape = spec.shape
        if spec in arrays and not named and shape[0] == first:
            shape = (BATCH, *shape[1:])
        if _may_be_image(spec) and shape[2:] == image:
            shape = (*shape[:2], *SIZE)
        return replace(spec, shape=shape)

    return Taken(tuple(map(symbols, specs)), batch, (height, width), named=named)


def _may_be_image(spec: InputSpec) -> bool:
    return len(spec.shape) == 4 and spec.dtype.startswith(("float", "uint8"))


def _is_image(specs: Sequence[InputSpec], signature: Signature, model: ModelSpec) -> bool:
    """Whether this is the one image that a model without description takes."""
    if not specs:
        return True
    usual = InputSpec(specs[0].name, "float32", (BATCH, model.channels, *SIZE))
    return len(specs) == 1 and replace(specs[0], keyword=False) == usual and usual.name not in signature.keyword_only


def settled(module: Any, model: ModelSpec, found: Taken, dims: Dims) -> tuple[Taken, Any]:
    """The description after the module was run on it, and what the module returned.

    Token ids get the range of the embedding that they reach, unless a range was given. An axis that was taken for the
    batch only because of its length is one where the module takes another length too.
    """
    result, limits = _watched(module, *example(model, found.inputs, dims), found.inputs)
    specs = tuple(
        replace(spec, low=0, high=limits[spec.name] - 1)
        if spec.name in limits and not spec.feeds and spec.name not in found.ranged
        else spec
        for spec in found.inputs
    )
    if found.named or not has_batch(specs):
        return replace(found, inputs=specs, free=has_batch(specs)), result
    wider = replace(dims, batch=dims.batch + 1)
    for chosen in dict.fromkeys(_choices(specs, dims.batch)):
        if has_batch(chosen) and _takes(module, model, chosen, wider):
            return replace(found, inputs=chosen), result
    return replace(found, inputs=_fixed(specs, dims.batch, lambda spec: True), free=False), result


def _watched(
    module: Any, args: list[Any], keywords: dict[str, Any], specs: Sequence[InputSpec]
) -> tuple[Any, dict[str, int]]:
    """The module's result, and for each input that is looked up in an embedding how many rows that has."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    positional = iter(args)
    given = {spec.name: keywords[spec.name] if spec.keyword else next(positional) for spec in specs}
    names = {given[spec.name].data_ptr(): spec.name for spec in specs if spec.dtype}
    lookups = (torch.ops.aten.embedding.default, torch.ops.aten._embedding_bag_forward_only.default)
    limits: dict[str, int] = {}

    class Watch(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in lookups and (name := names.get(args[1].data_ptr())):
                limits[name] = min(limits.get(name, args[0].shape[0]), args[0].shape[0])
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(), Watch():
        return module(*args, **keywords), limits


def _choices(specs: tuple[InputSpec, ...], batch: int) -> Iterator[tuple[InputSpec, ...]]:
    """Which inputs may have the batch: all, those of more than one axis, the first alone."""
    first = next(spec.name for spec in specs if BATCH in spec.shape)
    yield specs
    yield _fixed(specs, batch, lambda spec: len(spec.shape) < 2)
    yield _fixed(specs, batch, lambda spec: spec.name != first)


def _fixed(specs: tuple[InputSpec, ...], batch: int, which: Callable[[InputSpec], bool]) -> tuple[InputSpec, ...]:
    def one(spec: InputSpec) -> InputSpec:
        return replace(spec, shape=tuple(batch if axis == BATCH else axis for axis in spec.shape))

    return tuple(one(spec) if which(spec) else spec for spec in specs)


def _takes(module: Any, model: ModelSpec, specs: tuple[InputSpec, ...], dims: Dims) -> bool:
    try:
        call(module, model, specs, dims)
    except MemoryError:
        raise
    except Exception:  # whatever a module raises at a batch that it doesn't take
        return False
    return True


def call(module: Any, model: ModelSpec, specs: tuple[InputSpec, ...], dims: Dims) -> Any:
    """The module's result for random inputs of these dims."""
    import torch

    args, keywords = example(model, specs, dims)
    with torch.inference_mode():
        return module(*args, **keywords)


def example(
    model: ModelSpec, specs: tuple[InputSpec, ...], dims: Dims, seed: int = 0
) -> tuple[list[Any], dict[str, Any]]:
    """Random arguments of forward: tensors in the described ranges."""
    import torch

    (fed,) = feeds.batches(DataSpec(seed=seed), model.preprocess, tensors(specs, dims), dims, 1, specs)
    return arguments(specs, {name: torch.from_numpy(np.asarray(array, order="C")) for name, array in fed.items()})


def shown(specs: Sequence[InputSpec], dims: Dims) -> str:
    """The inputs with their shapes and types, for messages."""
    return ", ".join(f"{t.name} {'x'.join(map(str, t.shape)) or 'scalar'} {t.dtype}" for t in tensors(specs, dims))
