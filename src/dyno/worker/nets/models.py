"""Modules from torchvision, timm, ultralytics, Darknet or a function, with random, published or stored weights."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import tasks
from dyno.worker.extras import load_library
from dyno.worker.inspection import Purpose, order_class_names
from dyno.worker.nets import (
    darknet,
    file_facts,
    huggingface,
    local_code,
    random_weights,
    saved_modules,
    ultralytics_models,
)
from dyno.worker.nets.checkpoint import apply, by_own_names, head_classes, read_checkpoint
from dyno.worker.nets.random_weights import init_batch_norm, undo_zero_init
from dyno.worker.sessions.torch_support import eager, evaluating, one_thread
from dyno.worker.spec import NETWORK_FOLDER, Dims, ModelSpec, Preprocess, UserError

# torchvision's detectors: they normalise, resize and suppress inside; the number of boxes differs per image.

TAKES_ONE_IMAGE = "torchvision's detectors give each image another number of boxes, so they run one image at a time"
SMALL_DETECTOR = 320, 320  # pixels, where no size is asked for
SPREAD = 1.0  # standard deviation of random scores before the sigmoid or softmax: most are low, and some are sure


def list_detectors(torchvision: Any) -> list[str]:
    """Return the detectors' names for `torchvision.models.get_model`."""
    listed: list[str] = torchvision.models.list_models(torchvision.models.detection)
    return listed


def read_detector_size(torchvision: Any, name: str) -> tuple[int, int]:
    """Return the height and width at which the network works by itself, for square images."""
    with torchvision.torch.device("meta"):
        transform = torchvision.models.get_model(name, weights=None, weights_backbone=None).transform
    width, height = transform.fixed_size or (transform.min_size[-1],) * 2
    return height, width


def init_detector(torch: Any, module: Any, height: int, width: int) -> None:
    """Set random weights that find objects, in place: with a library's initial ones no score is above its threshold.

    The backbone gets statistics of noise, and each layer that scores is scaled by the power of two that brings its
    results for noise nearest to a standard deviation of 1.
    """
    random_weights.undo_zero_init(torch, module)
    random_weights.init_batch_norm(torch, module.backbone, 3, (height, width))
    measured: dict[Any, float] = {}

    def measure_deviation(
        layer: Any, _: Any, out: Any
    ) -> None:  # a head that serves several scales is held to the widest
        measured[layer] = max(measured.get(layer, 0.0), float(out.double().std()))

    image = (0.5 + random_weights.noise(torch, 3, height, width)[:1].float() / 4).clamp(0, 1)
    with ExitStack() as hooks, torch.no_grad(), one_thread(torch):
        for layer in _find_scoring_layers(torch, module):
            hooks.enter_context(layer.register_forward_hook(measure_deviation))
        module.eval()(image)
    with torch.no_grad():
        for layer, deviation in measured.items():
            layer.weight.mul_(2.0 ** round(torch.tensor(SPREAD / max(deviation, 1e-9)).log2().item()))


def _find_scoring_layers(torch: Any, module: Any) -> list[Any]:
    """Return the layers whose results are the scores of classes."""
    if hasattr(module, "roi_heads"):
        return [module.roi_heads.box_predictor.cls_score]
    head = module.head.classification_head
    if hasattr(head, "cls_logits"):
        return [head.cls_logits]
    return [part[-1] if isinstance(part, torch.nn.Sequential) else part for part in head.module_list]


LIBRARIES = ("torchvision", "timm")
# Sources whose networks say what they are for (`facts`) and which images they take (`image_config`).
DESCRIBED: dict[str, Any] = {"ultralytics": ultralytics_models, "darknet": darknet}
NEAR = 0.75  # similarity at which a name is suggested; among a thousand names something is always half alike
SHA256 = 64  # hexadecimal digits
FORMS = (
    "torchvision:NAME, timm:NAME, hf:ORG/NAME or hf:FOLDER, ultralytics:NAME.yaml, darknet:FILE.cfg, MODULE:FUNCTION, "
    "FILE.py:FUNCTION, saved:PATH or file:PATH"
)


def parse(source: str) -> tuple[str, str]:
    """Parse a source into its kind and the rest, without importing anything.

    Kinds are `torchvision`, `timm` and `ultralytics` (rest: the name), `darknet`, `file`, `saved` and `hf` (the path),
    `python` (FILE.py:FUNCTION) and `module` (MODULE:FUNCTION). The function follows the last colon, so that a path may
    contain colons. Raises `UserError` for any other text.
    """
    head, _, rest = source.partition(":")
    if head in (*LIBRARIES, *DESCRIBED, NETWORK_FOLDER, "saved", "file"):
        if not rest:
            raise UserError(f"model {source!r} has nothing after the colon; a model is one of {FORMS}")
        return head, rest
    location, _, function = source.rpartition(":")
    if not location:
        raise UserError(f"model {source!r} has no source prefix, such as torchvision:; a model is one of {FORMS}")
    if not all(part.isidentifier() for part in split_call(function)[0].split(".")):
        raise UserError(f"model {source!r}: {function!r} is not the name of a function; a model is one of {FORMS}")
    if location.endswith(".py"):
        return "python", source
    if not all(part.isidentifier() for part in location.split(".")):
        raise UserError(f"model {source!r}: {location!r} is neither a module nor a .py file; a model is one of {FORMS}")
    return "module", source


def split_call(function: str) -> tuple[str, dict[str, Any]]:
    """Split `build(width=16)` into the name and the arguments, which are literals; raise `UserError` for other text."""
    name, bracket, rest = function.partition("(")
    try:
        call: Any = ast.parse(f"f({rest}" if bracket else "f()", mode="eval").body
        arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AttributeError):
        call, arguments = None, {}
    if call is None or call.args or None in arguments:
        raise UserError(f"{function!r} is not FUNCTION(NAME=VALUE, …) with plain values, such as build(width=16)")
    return name, arguments


def load(model: ModelSpec, dims: Dims | None = None) -> Any:
    """Return the model as a `torch.nn.Module` in eval mode, with the weights requested in the specification.

    Without a checkpoint and without `pretrained`, the weights are random and the same for the same `seed`; a library's
    network then gets branches that contribute (`undo_zero_init`) and batch norm statistics of noise
    (`init_batch_norm`), which `build` leaves out. `dims` sets the image size of models that are built for one size
    (vision transformers of timm). The number of classes is `model.classes`, else that of the checkpoint, else the
    library's. Raises `UserError` and `Unavailable`.
    """
    module = build(model, dims)
    stored = parse(model.source)[0] == "saved" or model.source.endswith(ultralytics_models.CHECKPOINTS)
    random = not (model.weights or model.pretrained or stored)
    if random and is_torchvision_detector(model):
        wanted = (dims.height, dims.width) if dims else SMALL_DETECTOR
        init_detector(load_library("torch"), module, *wanted)
    elif random and (size := image_size(model)):
        undo_zero_init(load_library("torch"), module)
        init_batch_norm(load_library("torch"), module, model.channels, size)
    return module


def read_purpose(model: ModelSpec, module: Any) -> Purpose:
    """Return what a folder of transformers, a file of TorchScript or a network says of task, classes and images."""
    kind, path = parse(model.source)
    if kind == "saved" and (attached := file_facts.read_attached(path)):
        return file_facts.read_purpose(attached)
    own = _library_config(model)[0] if kind == NETWORK_FOLDER else None
    return Purpose(class_names=name_classes(module), preprocess=own)


def name_classes(module: Any) -> tuple[str, ...]:
    """Return the class names that a network of transformers or ultralytics carries; () where it has none."""
    if type(module).__module__.startswith("ultralytics."):
        return order_class_names(getattr(module, "names", ()))
    return order_class_names(getattr(getattr(module, "config", None), "id2label", ()))


def is_torchvision_detector(model: ModelSpec) -> bool:
    """Return whether the source names one of torchvision's detectors (see `torchvision_detectors`)."""
    kind, name = parse(model.source) if model.source and not model.file else ("", "")
    return kind == "torchvision" and name in list_detectors(load_library("torchvision"))


def build(model: ModelSpec, dims: Dims | None = None) -> Any:
    """Build the model like `load`, but leave random weights as the library initialises them, for training."""
    if model.file:
        raise UserError(f"there is no PyTorch module in {model.file}; give the model it was exported from")
    state = None
    if model.weights:
        _check_unchanged(model.weights, model.weights_sha256, "checkpoint")
        state = None if darknet.is_supported(model) else read_checkpoint(model.weights)
    module = _from_source(model, dims, model.classes, state)
    if state is not None:
        state = dict(by_own_names(module, state, model.weights))
        classes = head_classes(module, state)
        if model.classes is None and classes is not None and parse(model.source)[0] in LIBRARIES:
            module = _from_source(model, dims, classes)
        apply(module, state, model.weights, _other_classes(model, classes) if classes is not None else "")
    return module if parse(model.source)[0] == "saved" else evaluating(module)


def examples(model: ModelSpec) -> Any:
    """Return example inputs, from FUNCTION_inputs() beside a model's function or saved with a module; else None."""
    kind, rest = parse(model.source)
    if kind == "saved":
        return saved_modules.examples(rest)
    if kind == NETWORK_FOLDER:
        return huggingface.examples(model, rest)
    if kind not in ("python", "module"):
        return None
    source = f"{model.source.partition('(')[0]}_inputs"
    if _find_attribute(source, model.source_sha256)[2] is None:
        return None
    torch = load_library("torch")
    torch.manual_seed(model.seed)
    np.random.seed(model.seed)
    example = replace(model, source=source)
    return _call_function(_find_function(example), example)


def _other_classes(model: ModelSpec, classes: int) -> str:
    """Return advice on weights of another number of classes than the model's."""
    own = parse(model.source)[0] in ("python", "module") and not _has_parameter(_find_function(model), "num_classes")
    first = "let the function take num_classes and give" if own else "give"
    return f"they are of {classes} classes: {first} --classes {classes}"


def weights_sha256(module: Any) -> str:
    """Return the sha256 over the state dict in sorted order: equal for the same weights.

    It covers names, types, shapes and bytes.
    """
    return hash_tensors(module.state_dict())


def describe_weights(module: Any) -> dict[str, Any]:
    """Return the facts of a file on the module's weights: their hash and their number."""
    return {"weights_sha256": weights_sha256(module), "parameters": sum(p.numel() for p in module.parameters())}


def hash_tensors(tensors: Mapping[str, Any]) -> str:
    """Return the sha256 over names, types, shapes and bytes; what isn't a tensor is left out."""
    import torch

    total = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        # Quantised layers keep their weight and bias in a tuple.
        for part in value if isinstance(value, tuple) else (value,):
            if not isinstance(part, torch.Tensor):
                continue
            total.update(f"{name} {part.dtype} {tuple(part.shape)}\n".encode())
            part = part.to_dense() if part.layout != torch.strided else part
            flat = (part.dequantize() if part.is_quantized else part).detach().cpu().contiguous().reshape(-1)
            total.update(memoryview(flat.view(torch.uint8).numpy()))
    return total.hexdigest()


def preprocess(model: ModelSpec) -> Preprocess:
    """Return the preprocessing of the model's library (mean, std, crop, interpolation), read without a download.

    Return `model.preprocess` if the library has none, and for sources without a library.
    """
    return _library_config(model)[0] or model.preprocess


def guesses_preprocess(model: ModelSpec) -> bool:
    """Return whether a stored network, which may say how images are normalised, doesn't."""
    kind = parse(model.source)[0]
    return kind == "saved" or (kind == NETWORK_FOLDER and _library_config(model)[0] is None)


def check_images(model: ModelSpec, letterboxed: bool = False) -> tuple[str, str]:
    """Return how the model's library prepares images where Dyno can't do it alike, and why that wasn't checked; of
    letterboxed ones, what the library does with them instead."""
    kind, name = parse(model.source)
    return huggingface.check_images(name, letterboxed) if kind == NETWORK_FOLDER else ("", "")


def image_size(model: ModelSpec) -> tuple[int, int] | None:
    """Return the height and width given by the model's library; None if it gives none."""
    return _library_config(model)[1]


def _library_config(model: ModelSpec) -> tuple[Preprocess | None, tuple[int, int] | None]:
    kind, name = parse(model.source)
    if kind == "torchvision":
        return _torchvision_config(name)
    if kind in DESCRIBED:
        config: tuple[Preprocess | None, tuple[int, int]] = DESCRIBED[kind].image_config(model, name)
        return config
    if kind == NETWORK_FOLDER:
        return huggingface.image_config(name)
    if kind == "saved":
        return None, file_facts.find_size(file_facts.read_attached(name))
    return _timm_config(name) if kind == "timm" else (None, None)


def _from_source(
    model: ModelSpec, dims: Dims | None, classes: int | None, state: Mapping[str, Any] | None = None
) -> Any:
    torch = load_library("torch")
    kind, rest = parse(model.source)
    torch.manual_seed(model.seed)
    if kind == "torchvision":
        return _build_torchvision(model, rest, dims, classes)
    if kind == "timm":
        return _build_timm(model, rest, dims, classes)
    if kind in DESCRIBED:
        if model.source_sha256:
            _check_unchanged(rest, model.source_sha256, "model file")
        return DESCRIBED[kind].build(model, rest, state, free_batch=dims is not None and not dims.batch)
    if kind == NETWORK_FOLDER:
        return eager(torch, huggingface.build(model, rest))
    if kind == "saved":
        if len(model.source_sha256) == SHA256:  # else it is the name of a folder in the cache
            _check_unchanged(rest, model.source_sha256, "saved module")
        return saved_modules.load(rest)
    value = _call_function(_find_function(model), model)
    module = saved_modules.runnable(_find_network(torch, value) if _has_stages(value) else value)
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"{model.source} returned a {type(value).__name__}; it must return a torch.nn.Module")
    return eager(torch, module)


def _build_torchvision(model: ModelSpec, name: str, dims: Dims | None, classes: int | None) -> Any:
    library = _find_library("torchvision", name).models
    if model.channels != 3:
        raise UserError(
            f"{model.source} has 3 input channels, not {model.channels}; write a function, give it as FILE.py:FUNCTION"
        )
    options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
    if "init_weights" in inspect.signature(library.get_model_builder(name)).parameters:
        options["init_weights"] = True  # the default, but without its warning
    options |= torchvision_options(name, dims)
    weights = "DEFAULT" if model.pretrained else None
    return _load_published(model, lambda: library.get_model(name, weights=weights, **options))


def torchvision_options(name: str, dims: Dims | None) -> dict[str, Any]:
    """Return the options of `torchvision.models.get_model`: a backbone without weights, and a detector's size."""
    torchvision = load_library("torchvision")
    builder = torchvision.models.get_model_builder(name)
    options: dict[str, Any] = {}
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None
    # Without a size a detector works at 800 pixels, whatever its input; SSDs have a fixed one.
    if dims is not None and name in list_detectors(torchvision) and not name.startswith("ssd"):
        options |= {"min_size": min(dims.height, dims.width), "max_size": max(dims.height, dims.width)}
    return options


def _build_timm(model: ModelSpec, name: str, dims: Dims | None, classes: int | None) -> Any:
    timm = _find_library("timm", name)
    options = timm_options(model, name, dims, classes)
    try:
        return _load_published(model, lambda: timm.create_model(name, pretrained=model.pretrained, **options))
    except TypeError as e:
        raise UserError(f"{model.source} can't be built with {options}: {e}") from e


def timm_options(model: ModelSpec, name: str, dims: Dims | None, classes: int | None) -> dict[str, Any]:
    """Return the options of `timm.create_model`: channels, classes, and the size of a model built for one size."""
    options: dict[str, Any] = {"in_chans": model.channels}
    if classes is not None:
        options["num_classes"] = classes
    config = load_library("timm").get_pretrained_cfg(name)
    size = (dims.height, dims.width) if dims else None
    if config and config.fixed_input_size and size and size != tuple(config.input_size[1:]):
        options["img_size"] = size
    return options


def _load_published(model: ModelSpec, create: Callable[[], Any]) -> Any:
    try:
        return create()
    except Exception as e:
        if not model.pretrained:
            raise
        # urllib, requests, httpx and the hub each have their own family of errors for "no network", and a weights
        # entry that is missing or doesn't fit is a ValueError or a RuntimeError: all of them end the same way.
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise UserError(
            f"the published weights of {model.source} can't be loaded: {reason}; give a checkpoint with --weights"
        ) from e


def _find_library(library: str, name: str) -> Any:
    """Return torchvision or timm; raise a `UserError` with the nearest name unless it has a model of that name."""
    imported, module = load_library(library), {"torchvision": "torchvision.models", "timm": "timm"}[library]
    names = load_library(module).list_models()
    if not (name in names or (library == "timm" and imported.is_model(name))):
        near = difflib.get_close_matches(name, names, 1, NEAR)
        listed = f'list them with: python -c "import {module} as m; print(*m.list_models())"'
        hint = f"did you mean {library}:{near[0]}?" if near else listed
        raise UserError(f"{library} has no model {name!r}; {hint}")
    return imported


def _find_function(model: ModelSpec) -> Callable[..., Any]:
    return _check_function(model, *_find_attribute(model.source, model.source_sha256))


def _check_function(model: ModelSpec, location: str, module: Any, attribute: Any) -> Callable[..., Any]:
    if attribute is None:
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        wanted = split_call(model.source.rpartition(":")[2])[0]
        near = difflib.get_close_matches(wanted, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none'}"
        raise UserError(f"{Path(location).name} has no function {wanted!r}; {hint}")
    if _has_stages(attribute):
        return lambda: attribute
    if not callable(attribute) or isinstance(attribute, load_library("torch").nn.Module):
        raise UserError(f"{model.source} is a {type(attribute).__name__}; it must be a function that returns a module")
    function: Callable[..., Any] = attribute
    return function


def _find_attribute(source: str, sha256: str) -> tuple[str, Any, Any]:
    """Return a source's location and module, imported, and its attribute there; None if there is no such name."""
    location, _, path = source.rpartition(":")
    file = location.endswith(".py")
    module = local_code.load_file(Path(location), sha256) if file else local_code.load_module(location, source)
    value = module
    for part in split_call(path)[0].split("."):
        value = getattr(value, part, None)
    return location, module, value


def call_options(model: ModelSpec, function: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Return the keyword arguments for the user's function."""
    arguments = split_call(model.source.rpartition(":")[2])[1]
    if model.classes is not None and _has_parameter(function or _find_function(model), "num_classes"):
        return {"num_classes": model.classes} | arguments
    return arguments


def _call_function(function: Callable[..., Any], model: ModelSpec) -> Any:
    options = call_options(model, function)
    _check_arguments(model.source, function, options)
    with local_code.running(model.source):
        return function(**options)


def _check_arguments(source: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise `UserError` for a parameter of the user's function that has no value, or a value that has none."""
    try:
        inspect.signature(function).bind(**options)
    except TypeError as e:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        call = ", ".join(f"{p.name}={options.get(p.name, 16)!r}" for p in named)
        place = source.partition("(")[0].rpartition("/")[2]
        verb = "is " if str(e).startswith("missing") else ""
        raise UserError(f"{place} {verb}{e}; give it, e.g. {place}({call})") from e
    except ValueError:  # built-in functions have no signature
        return


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _check_unchanged(path: str, sha256: str, what: str) -> None:
    if sha256 and Path(path).is_file() and local_code.hash_file(path) != sha256:
        raise UserError(f"{what} {path} changed since the study was planned; run the same command again")


def _torchvision_config(name: str) -> tuple[Preprocess | None, tuple[int, int] | None]:
    torchvision = _find_library("torchvision", name)
    if name in list_detectors(torchvision):
        return tasks.find_task("detect").preprocess(3), read_detector_size(torchvision, name)
    weights = torchvision.models.get_model_weights(name)
    transforms: Any = weights.DEFAULT.transforms() if len(weights) else None
    if not hasattr(transforms, "mean") or not hasattr(transforms, "crop_size"):
        return None, None  # segmentation models resize inside
    crop = transforms.crop_size[0]
    size = (crop, crop) if len(transforms.crop_size) == 1 else tuple(transforms.crop_size)
    resize = transforms.resize_size[0] / crop
    return Preprocess(tuple(transforms.mean), tuple(transforms.std), resize, transforms.interpolation.value), size


def _timm_config(name: str) -> tuple[Preprocess | None, tuple[int, int] | None]:
    config = _find_library("timm", name).get_pretrained_cfg(name)
    if config is None:
        return None, None
    settings = load_library("timm.data").resolve_data_config(pretrained_cfg=dataclasses.asdict(config))
    resize = 0.0 if settings["crop_mode"] == "squash" else 1 / settings["crop_pct"]
    height, width = settings["input_size"][1:]
    return Preprocess(tuple(settings["mean"]), tuple(settings["std"]), resize, settings["interpolation"]), (
        height,
        width,
    )


# An application: the user's own object, with what happens to a request before and after the network.

STAGES = ("preprocess", "postprocess")
NEEDED = "preprocess(request), postprocess(outputs) and a torch.nn.Module as its model"


@dataclasses.dataclass(frozen=True)
class Application:
    """The user's object, the network in it, and NAME_requests() of its file (None: there is no such function)."""

    name: str
    value: Any
    network: Any
    requests: Callable[[], Any] | None


def load_application(model: ModelSpec) -> Application:
    """Return the application that is at the source, or that the function there returns.

    Raises `UserError` where it lacks a stage or a network.
    """
    torch = load_library("torch")
    kind, rest = parse(model.source)
    if kind not in ("python", "module"):
        raise UserError(f"{model.source} is a network alone; give an application as FILE.py:NAME, with {NEEDED}")
    torch.manual_seed(model.seed)
    location, module, attribute = _find_attribute(model.source, model.source_sha256)
    value = _call_function(_check_function(model, location, module, attribute), model)
    name = rest.rpartition("/")[2]
    if missing := [each for each in STAGES if not callable(getattr(value, each, None))]:
        raise UserError(
            f"{name} is a {type(value).__name__} without {' and '.join(missing)}; an application has {NEEDED}"
        )
    if delayed := [each for each in (*STAGES, "predict") if inspect.iscoroutinefunction(getattr(value, each, None))]:
        raise UserError(f"{name} has an asynchronous {delayed[0]}; give it as a method that returns its result")
    network = _find_network(torch, value)
    if network is None:
        raise UserError(f"{name} is a {type(value).__name__} without a model; an application has {NEEDED}")
    inner = evaluating(eager(torch, network))
    if inner is not network and getattr(value, "model", None) is network:  # compiled by the user
        value.model = inner
    function = f"{rest.partition('(')[0].rpartition(':')[2].rpartition('.')[2]}_requests"
    return Application(name, value, inner, getattr(module, function, None))


def is_application(model: ModelSpec) -> bool:
    """Return whether the user's function returns an application that isn't itself the network."""
    value = _call_function(_find_function(model), model)
    return _has_stages(value) and _find_network(load_library("torch"), value) is not value


def _has_stages(value: Any) -> bool:
    """Return whether this is an object with stages of an application, not a class of such."""
    return not isinstance(value, type) and any(hasattr(value, each) for each in STAGES)


def _find_network(torch: Any, value: Any) -> Any:
    """Return the network of an application: itself, its `model` or its `predict`; None without one."""
    places = (value, *(getattr(value, name, None) for name in ("model", "predict")))
    return next((each for each in places if isinstance(each, torch.nn.Module)), None)
