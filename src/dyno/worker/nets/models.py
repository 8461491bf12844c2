"""Modules from any source, or from a function, with random, published or stored weights."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.extras import load_library
from dyno.worker.inspection import Purpose
from dyno.worker.nets import darknet, local_code, saved_modules
from dyno.worker.nets.checkpoint import apply, by_own_names, head_classes, read_checkpoint
from dyno.worker.nets.model_source import ModelSource, check_unchanged, list_sources
from dyno.worker.sessions.torch_support import make_eager, set_eval
from dyno.worker.spec import Dims, ModelSpec, Preprocess, UserError

FUNCTION_SOURCES = ("python", "module")  # sources without a prefix: FILE.py:FUNCTION and MODULE:FUNCTION
WEIGHT_FACTS = ("weights_sha256", "parameters")  # facts inherited by files made from a module


def parse(source: str) -> tuple[str, str]:
    """Parse a source into its kind (a name in `list_sources`, or `file`) and the rest: a name, a path, or the source.

    The function follows the last colon, so a path may contain colons. Raise a `UserError` for any other text.
    """
    prefix, _, rest = source.partition(":")
    if rest and prefix in {*list_sources().keys() - FUNCTION_SOURCES, "file"}:
        return prefix, rest
    location, _, function = source.rpartition(":")
    if not rest or not location:
        problem = "nothing after the colon" if location else "no source prefix, such as torchvision:"
        raise _bad_source(f"model {source!r} has {problem}")
    if not all(part.isidentifier() for part in split_call(function)[0].split(".")):
        raise _bad_source(f"model {source!r}: {function!r} is not the name of a function")
    if location.endswith(".py"):
        return "python", source
    if not all(part.isidentifier() for part in location.split(".")):
        raise _bad_source(f"model {source!r}: {location!r} is neither a module nor a .py file")
    return "module", source


def _bad_source(reason: str) -> UserError:
    forms = [source.form for source in sorted(list_sources().values(), key=lambda source: not source.library)]
    return UserError(f"{reason}; a model is one of {', '.join(forms)} or file:PATH")


def find_source(model: ModelSpec) -> tuple[ModelSource, str]:
    """Return the kind of the model's source, and the text after its colon."""
    kind, rest = parse(model.source)
    return list_sources()[kind], rest


def find_library(model: ModelSpec) -> str:
    """Return the library that has the model by name; "" if none."""
    source = list_sources().get(parse(model.source)[0])
    return source.library if source else ""


def split_call(function: str) -> tuple[str, dict[str, Any]]:
    """Split `build(width=16)` into name and literal arguments; raise a `UserError` for other text."""
    name, bracket, rest = function.partition("(")
    try:
        call: Any = ast.parse(f"f({rest}" if bracket else "f()", mode="eval").body
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AttributeError):
        call, arguments = None, {}
    if call is None or call.args or None in arguments:
        raise UserError(f"{function!r} is not FUNCTION(NAME=VALUE, …) with plain values, such as build(width=16)")
    return name, arguments


def load(model: ModelSpec, dims: Dims | None = None) -> Any:
    """Return the model as a `torch.nn.Module` in eval mode, with the weights of the specification.

    Without a checkpoint and `pretrained`, weights are random, equal for equal `seed`, and initialised for measurement
    (`ModelSource.init_random`), unlike those of `build`. `dims` sets the image size of models built for one size
    (timm's vision transformers). The number of classes is `model.classes`, else the checkpoint's, else the library's.
    Raise `UserError` or `Unavailable`.
    """
    module = build(model, dims)
    source, rest = find_source(model)
    if dims:
        saved_modules.check_guards(module, model, model.inputs, dims)
    if not (model.weights or model.pretrained or source.has_weights(rest)):
        source.init_random(model, rest, module, dims)
    return module


def build(model: ModelSpec, dims: Dims | None = None) -> Any:
    """Build the model like `load`, but with the library's initial random weights, for training."""
    if model.file:
        raise UserError(f"there is no PyTorch module in {model.file}; give the model it was exported from")
    state, source = None, find_source(model)[0]
    if model.weights:
        check_unchanged(model.weights, model.weights_sha256, "checkpoint")
        state = None if darknet.is_supported(model) else read_checkpoint(model.weights)
    module = _build_seeded(model, dims, state)
    if state is not None:
        state = dict(by_own_names(module, state, model.weights))
        classes = head_classes(module, state)
        if model.classes is None and classes is not None and source.library:
            module = _build_seeded(replace(model, classes=classes), dims)
        apply(module, state, model.weights, _other_classes(model, classes) if classes is not None else "")
    return module if source is saved_modules.SAVED else set_eval(module)


def _build_seeded(model: ModelSpec, dims: Dims | None, state: Mapping[str, Any] | None = None) -> Any:
    _seed_generators(model.seed)
    source, rest = find_source(model)
    return source.build(model, rest, dims, state)


def _seed_generators(seed: int) -> None:
    """Seed every generator that the user's code may use, so that each process makes the same network."""
    load_library("torch").manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _other_classes(model: ModelSpec, classes: int) -> str:
    """Return advice on weights with another number of classes than the model's."""
    is_fixed = parse(model.source)[0] in FUNCTION_SOURCES and not _has_parameter(_find_function(model), "num_classes")
    action = "let the function take num_classes and give" if is_fixed else "give"
    return f"they are of {classes} classes: {action} --classes {classes}"


def weights_sha256(module: Any) -> str:
    """Return the sha256 of the state dict in sorted order: equal for equal weights.

    It covers names, types, shapes and bytes.
    """
    return hash_tensors(module.state_dict())


def describe_weights(module: Any) -> dict[str, Any]:
    """Return the facts on the module's weights: their hash and their number."""
    return dict(zip(WEIGHT_FACTS, (weights_sha256(module), count_parameters(module)), strict=True))


def count_parameters(module: Any) -> int:
    """Return the number of the module's weights, including those packed for int8 or frozen into a graph."""
    import torch

    methods = (module.named_parameters, module.named_buffers)
    names = {name for method in methods for name, _ in method(remove_duplicate=False)}  # a tied weight has two names
    state = [value for name, value in module.state_dict().items() if name not in names]
    entries = [part for value in state for part in _list_parts(value)]
    if not names and isinstance(module, torch.jit.ScriptModule):
        entries += [node.output().toIValue() for node in module.graph.findAllNodes("prim::Constant")]
    tensors = [value for value in entries if isinstance(value, torch.Tensor) and value.dim()]  # scales have none
    return sum(int(value.numel()) for value in (*module.parameters(), *{t.data_ptr(): t for t in tensors}.values()))


def _list_parts(value: Any) -> list[Any]:
    """Return the tensors of a state dict's entry: quantised layers pack weights and biases in tuples."""
    import torch

    if isinstance(value, torch.ScriptObject) and value._has_method("__getstate__"):  # a recurrent layer
        value = value.__getstate__()
    return [part for each in value for part in _list_parts(each)] if isinstance(value, (tuple, list)) else [value]


def hash_tensors(tensors: Mapping[str, Any]) -> str:
    """Return the sha256 of names, types, shapes and bytes; non-tensors are left out."""
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        parts = _list_parts(value)
        for part in parts:
            if not isinstance(part, torch.Tensor):
                continue
            if hasattr(part, "__tensor_flatten__"):  # torchao's weights consist of values and scales
                parts += [getattr(part, inner) for inner in part.__tensor_flatten__()[0]]
                continue
            digest.update(f"{name} {part.dtype} {tuple(part.shape)}\n".encode())
            part = part.to_dense() if part.layout != torch.strided else part
            flat = (part.dequantize() if part.is_quantized else part).detach().cpu().contiguous().reshape(-1)
            digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


def preprocess(model: ModelSpec) -> Preprocess:
    """Return the preprocessing of the model's library (mean, std, crop, interpolation), without a download.

    Return `model.preprocess` without a library, or if the library has none.
    """
    source, rest = find_source(model)
    return source.read_image_config(model, rest)[0] or model.preprocess


def image_size(model: ModelSpec) -> tuple[int, int] | None:
    """Return the height and width by the model's library; None if it has none."""
    source, rest = find_source(model)
    return source.read_image_config(model, rest)[1]


def read_purpose(model: ModelSpec, module: Any) -> Purpose:
    """Return the task, classes and images known to the module or its source."""
    source, rest = find_source(model)
    return source.read_purpose(model, rest, module)


class UserFunction(ModelSource):
    """FILE.py:FUNCTION or MODULE:FUNCTION, which returns a module, an application around one, or a program."""

    stores_preprocess = True

    def __init__(self, name: str, form: str) -> None:
        self.name, self.form = name, form

    def build(self, model: ModelSpec, rest: str, dims: Dims | None, state: Mapping[str, Any] | None) -> Any:
        torch = load_library("torch")
        value = _call_function(_find_function(model), model)
        module = saved_modules.make_runnable(_find_network(torch, value) if _has_stages(value) else value)
        if not isinstance(module, torch.nn.Module):
            raise UserError(f"{model.source} returned a {type(value).__name__}; it must return a torch.nn.Module")
        return make_eager(torch, module)

    def make_examples(self, model: ModelSpec, rest: str) -> Any:
        """Return the result of FUNCTION_inputs() in the function's module; None if that is missing."""
        source = f"{model.source.partition('(')[0]}_inputs"
        if _find_attribute(source, model.source_sha256)[2] is None:
            return None
        _seed_generators(model.seed)
        example = replace(model, source=source)
        return _call_function(_find_function(example), example)


MODULE, PYTHON = UserFunction("module", "MODULE:FUNCTION"), UserFunction("python", "FILE.py:FUNCTION")


def _find_function(model: ModelSpec) -> Callable[..., Any]:
    return _check_function(model, *_find_attribute(model.source, model.source_sha256))


def _check_function(model: ModelSpec, location: str, module: Any, attribute: Any) -> Callable[..., Any]:
    if attribute is None:
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        name = split_call(model.source.rpartition(":")[2])[0]
        matches = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {matches[0]}?" if matches else f"it has {', '.join(names) or 'none'}"
        raise UserError(f"{Path(location).name} has no function {name!r}; {hint}")
    if _has_stages(attribute):
        return lambda: attribute
    if not callable(attribute) or isinstance(attribute, load_library("torch").nn.Module):
        raise UserError(f"{model.source} is a {type(attribute).__name__}; it must be a function that returns a module")
    function: Callable[..., Any] = attribute
    return function


def _find_attribute(source: str, sha256: str) -> tuple[str, Any, Any]:
    """Return a source's location, imported module, and attribute there; None if the name is missing."""
    location, _, path = source.rpartition(":")
    is_file = location.endswith(".py")
    module = local_code.load_file(Path(location), sha256) if is_file else local_code.load_module(location, source)
    value = module
    for part in split_call(path)[0].split("."):
        value = getattr(value, part, None)
    return location, module, value


def hash_files_read(model: ModelSpec) -> dict[str, str]:
    """Return the sha256 of each file read or imported by a function's code, beyond the files of `source_sha256`."""
    location = model.source.rpartition(":")[0]
    if parse(model.source)[0] not in FUNCTION_SOURCES:
        return {}
    file = location if location.endswith(".py") else getattr(sys.modules.get(location), "__file__", None)
    return local_code.hash_files_read(Path(file) if file and model.source_sha256 else None)


def call_options(model: ModelSpec, function: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Return the keyword arguments for the user's function."""
    arguments = split_call(model.source.rpartition(":")[2])[1]
    if model.classes is not None and _has_parameter(function or _find_function(model), "num_classes"):
        return {"num_classes": model.classes} | arguments
    return arguments


def _call_function(function: Callable[..., Any], model: ModelSpec) -> Any:
    options = call_options(model, function)
    _check_arguments(model.source, function, options)
    with local_code.run_user_code(model.source):
        return function(**options)


def _check_arguments(source: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise a `UserError` for a parameter of the user's function without a value, or a value without a parameter."""
    try:
        inspect.signature(function).bind(**options)
    except TypeError as e:
        parameters = inspect.signature(function).parameters.values()
        required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        call = ", ".join(f"{p.name}={options.get(p.name, 16)!r}" for p in required)
        label = source.partition("(")[0].rpartition("/")[2]
        verb = "is " if str(e).startswith("missing") else ""
        raise UserError(f"{label} {verb}{e}; give it, e.g. {label}({call})") from e
    except ValueError:  # built-in functions have no signature
        return


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


# An application: the user's object with the stages before and after the network

APPLICATION_FUNCTIONS = ("preprocess", "postprocess")
APPLICATION_NEEDS = "preprocess(request), postprocess(outputs) and a torch.nn.Module as its model"


@dataclasses.dataclass(frozen=True)
class Application:
    """The user's object, its network, and its file's NAME_requests() (None: no such function)."""

    name: str
    value: Any
    network: Any
    requests: Callable[[], Any] | None


def load_application(model: ModelSpec) -> Application:
    """Return the application at the source, or the result of the function there.

    Raise a `UserError` if it lacks a stage or a network.
    """
    torch = load_library("torch")
    kind, rest = parse(model.source)
    if kind not in FUNCTION_SOURCES:
        raise UserError(
            f"{model.source} is a network alone; give an application as FILE.py:NAME, with {APPLICATION_NEEDS}"
        )
    _seed_generators(model.seed)
    location, module, attribute = _find_attribute(model.source, model.source_sha256)
    value = _call_function(_check_function(model, location, module, attribute), model)
    name = rest.rpartition("/")[2]
    if missing_stages := [each for each in APPLICATION_FUNCTIONS if not callable(getattr(value, each, None))]:
        raise UserError(
            f"{name} is a {type(value).__name__} without {' and '.join(missing_stages)}; an application "
            f"has {APPLICATION_NEEDS}"
        )
    if coroutines := [
        each for each in (*APPLICATION_FUNCTIONS, "predict") if inspect.iscoroutinefunction(getattr(value, each, None))
    ]:
        raise UserError(f"{name} has an asynchronous {coroutines[0]}; give it as a method that returns its result")
    network = _find_network(torch, value)
    if network is None:
        raise UserError(f"{name} is a {type(value).__name__} without a model; an application has {APPLICATION_NEEDS}")
    eager_network = set_eval(make_eager(torch, network))
    if eager_network is not network and getattr(value, "model", None) is network:  # compiled by the user
        value.model = eager_network
    function = f"{rest.partition('(')[0].rpartition(':')[2].rpartition('.')[2]}_requests"
    return Application(name, value, eager_network, getattr(module, function, None))


def is_application(model: ModelSpec) -> bool:
    """Return whether the user's function returns an application that isn't itself the network."""
    value = _call_function(_find_function(model), model)
    return _has_stages(value) and _find_network(load_library("torch"), value) is not value


def _has_stages(value: Any) -> bool:
    """Return whether the value is an object with an application's stages, rather than a class."""
    return not isinstance(value, type) and any(hasattr(value, stage) for stage in APPLICATION_FUNCTIONS)


def _find_network(torch: Any, value: Any) -> Any:
    """Return an application's network: itself, its `model` or its `predict`; None without a network."""
    candidates = (value, *(getattr(value, name, None) for name in ("model", "predict")))
    return next((candidate for candidate in candidates if isinstance(candidate, torch.nn.Module)), None)
