"""Networks of torchvision and timm, by the libraries' names."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dyno.worker import tasks
from dyno.worker.extras import load_library
from dyno.worker.inspection import Purpose, order_class_names
from dyno.worker.nets import random_weights
from dyno.worker.nets.huggingface import CONFIG_FILE
from dyno.worker.nets.model_source import BuildCode, ImageConfig, ModelSource
from dyno.worker.sessions.torch_support import one_thread
from dyno.worker.spec import TIMM_FOLDER, Dims, ModelSpec, Preprocess, UserError

FOLDER_PREFIX = TIMM_FOLDER.partition(":")[2]
OUTER_KEYS = ("num_classes", "label_names")  # keys of timm's configuration outside the weights' part
MIN_NAME_SIMILARITY = 0.75  # lower similarities match any of a thousand names
# torchvision's detectors normalise, resize and suppress internally
TAKES_ONE_IMAGE = "torchvision's detectors return other numbers of boxes per image, so they run one image at a time"
SMALL_DETECTOR = 320, 320  # pixels, by default
SCORE_SPREAD = 1.0  # standard deviation of random logits: most scores are low, some high


class Torchvision(ModelSource):
    """`torchvision:NAME`, a network of `torchvision.models`."""

    name = "torchvision"
    form = "torchvision:NAME"
    library = "torchvision"
    takes_image = True

    def build(self, model: ModelSpec, rest: str, dims: Dims | None, state: Mapping[str, Any] | None) -> Any:
        library = _find_library("torchvision", rest).models
        if model.channels != 3:
            problem = f"{model.source} has 3 input channels, not {model.channels}"
            raise UserError(f"{problem}; write a function, give it as FILE.py:FUNCTION")
        options: dict[str, Any] = {} if model.classes is None else {"num_classes": model.classes}
        if "init_weights" in inspect.signature(library.get_model_builder(rest)).parameters:
            options["init_weights"] = True  # explicit default: avoids a warning
        options |= _choose_torchvision_options(rest, dims)
        weights = "DEFAULT" if model.pretrained else None
        return _load_published(model, lambda: library.get_model(rest, weights=weights, **options))

    def read_image_config(self, model: ModelSpec, rest: str) -> ImageConfig:
        torchvision = _find_library("torchvision", rest)
        if rest in list_detectors(torchvision):
            return tasks.find_task("detect").preprocess(3), read_detector_size(torchvision, rest)
        weights = torchvision.models.get_model_weights(rest)
        transforms: Any = weights.DEFAULT.transforms() if len(weights) else None
        if not hasattr(transforms, "mean") or not hasattr(transforms, "crop_size"):
            return None, None  # segmentation models resize internally
        crop = transforms.crop_size[0]
        size = (crop, crop) if len(transforms.crop_size) == 1 else tuple(transforms.crop_size)
        resize = transforms.resize_size[0] / crop
        return Preprocess(tuple(transforms.mean), tuple(transforms.std), resize, transforms.interpolation.value), size

    def init_random(self, model: ModelSpec, rest: str, module: Any, dims: Dims | None) -> None:
        if not is_torchvision_detector(model):
            super().init_random(model, rest, module, dims)
            return
        init_detector(load_library("torch"), module, *((dims.height, dims.width) if dims else SMALL_DETECTOR))

    def write_code(self, model: ModelSpec, rest: str, network: Any, dims: Dims, classes: int | None) -> BuildCode:
        options = {**({} if classes is None else {"num_classes": classes}), **_list_branch_options(network)}
        options |= _choose_torchvision_options(rest, dims)
        call = f"torchvision.models.get_model({rest!r}, weights=None{_format_options(options)})"
        return BuildCode(("torchvision",), "import torchvision\n", f"return {call}")


TORCHVISION = Torchvision()


class Timm(ModelSource):
    """`timm:NAME`, a network of timm, or `timm:local-dir:FOLDER`, a folder stored by timm."""

    name = "timm"
    form = "timm:NAME, timm:hf-hub:ORG/NAME or timm:local-dir:FOLDER"
    library = "timm"
    takes_image = True

    def build(self, model: ModelSpec, rest: str, dims: Dims | None, state: Mapping[str, Any] | None) -> Any:
        timm = _find_library("timm", _read_timm_config(model, rest)[0])
        options = _choose_timm_options(model, rest, dims, model.classes)
        try:
            return _load_published(model, lambda: timm.create_model(rest, pretrained=model.pretrained, **options))
        except TypeError as e:
            raise UserError(f"{model.source} can't be built with {options}: {e}") from e

    def read_image_config(self, model: ModelSpec, rest: str) -> ImageConfig:
        settings = _read_timm_settings(model, rest)
        if not settings:
            return None, None
        squash = settings["crop_mode"] == "squash"
        resize = max(1.0, 1 / settings["crop_pct"])
        height, width = settings["input_size"][1:]
        mean, std = tuple(settings["mean"]), tuple(settings["std"])
        return Preprocess(mean, std, resize, settings["interpolation"], squash=squash), (height, width)

    def check_images(self, model: ModelSpec, rest: str, letterboxed: bool) -> tuple[str, str]:
        settings = _read_timm_settings(model, rest)
        has_border = bool(settings) and (settings["crop_mode"] == "border" or settings["crop_pct"] > 1)
        return "with a border around them" if has_border else "", ""

    def read_purpose(self, model: ModelSpec, rest: str, module: Any) -> Purpose:
        names = _read_timm_config(model, rest)[1].get("label_names") or ()
        return dataclasses.replace(super().read_purpose(model, rest, module), class_names=order_class_names(names))

    def write_code(self, model: ModelSpec, rest: str, network: Any, dims: Dims, classes: int | None) -> BuildCode:
        options, name = _choose_timm_options(model, rest, dims, classes), _read_timm_config(model, rest)[0]
        return BuildCode(("timm",), "import timm\n", f"return timm.create_model({name!r}{_format_options(options)})")


TIMM = Timm()


def _read_timm_config(model: ModelSpec, name: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the network's name, timm's configuration, and the arguments that it was built with.

    A configuration stored by timm in the model's folder, or next to its weights, takes precedence over the library's,
    which describes other weights. Missing ones are {}.
    """
    is_folder = name.startswith(FOLDER_PREFIX)
    path = Path(name.removeprefix(FOLDER_PREFIX) if is_folder else Path(model.weights).parent, CONFIG_FILE)
    if (is_folder or model.weights) and path.is_file():
        try:
            settings = dict(json.loads(path.read_text(encoding="utf-8")))
            config = dict(settings.get("pretrained_cfg", settings))  # older ones are flat
            architecture, arguments = str(settings["architecture"]), dict(settings.get("model_args") or {})
        except (ValueError, TypeError, KeyError) as e:
            raise UserError(f"{path} can't be read as a configuration of timm: {e!r}") from e
        if is_folder or architecture == name.partition(".")[0]:
            return architecture, config | {key: settings[key] for key in OUTER_KEYS if settings.get(key)}, arguments
    library_config = _find_library("timm", name).get_pretrained_cfg(name)
    return name, dataclasses.asdict(library_config) if library_config else {}, {}


def _read_timm_settings(model: ModelSpec, name: str) -> dict[str, Any]:
    """Return timm's complete settings of image preprocessing; {} if the network has none."""
    config = _read_timm_config(model, name)[1]
    return dict(load_library("timm.data").resolve_data_config(pretrained_cfg=config)) if config else {}


def _choose_torchvision_options(name: str, dims: Dims | None) -> dict[str, Any]:
    """Return options of `torchvision.models.get_model`: a backbone without weights, and a detector's size."""
    torchvision = load_library("torchvision")
    builder = torchvision.models.get_model_builder(name)
    options: dict[str, Any] = {}
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None
    # By default a detector works at 800 pixels, whatever its input; SSDs have a fixed size.
    if dims is not None and name in list_detectors(torchvision) and not name.startswith("ssd"):
        options |= {"min_size": min(dims.height, dims.width), "max_size": max(dims.height, dims.width)}
    return options


def _list_branch_options(network: Any) -> dict[str, Any]:
    """Return options with defaults that torchvision derives from pretrained weights.

    They are auxiliary outputs and input scaling.
    """
    options: dict[str, Any] = {
        name: bool(getattr(network, name)) for name in ("aux_logits", "transform_input") if hasattr(network, name)
    }
    if hasattr(network, "aux_classifier"):
        options["aux_loss"] = network.aux_classifier is not None
    return options


def _choose_timm_options(model: ModelSpec, rest: str, dims: Dims | None, classes: int | None) -> dict[str, Any]:
    """Return options of `timm.create_model`: channels, classes, and the size of a model built for one size."""
    name, config, arguments = _read_timm_config(model, rest)
    parameters = inspect.signature(load_library("timm").create_model).parameters  # for example a file to load
    options: dict[str, Any] = {key: value for key, value in arguments.items() if key not in parameters}
    options["in_chans"] = model.channels
    if classes is None and rest.startswith(FOLDER_PREFIX):
        classes = config.get("num_classes")
    if classes is not None:
        options["num_classes"] = classes
    library_config = load_library("timm").get_pretrained_cfg(name)
    size = (dims.height, dims.width) if dims else None
    has_other = library_config and library_config.fixed_input_size and size != tuple(library_config.input_size[1:])
    if size and (has_other or "img_size" in options):
        options["img_size"] = size
    return options


def _format_options(options: Mapping[str, Any]) -> str:
    return "".join(f", {key}={value!r}" for key, value in options.items())


def _load_published(model: ModelSpec, create: Callable[[], Any]) -> Any:
    try:
        return create()
    except Exception as e:
        if not model.pretrained:
            raise
        # urllib, requests, httpx and the hub have various errors for "no network"; missing or unsuitable weights
        # raise a ValueError or a RuntimeError. All are handled alike.
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise UserError(
            f"the published weights of {model.source} can't be loaded: {reason}; give a checkpoint with --weights"
        ) from e


def _find_library(library: str, name: str) -> Any:
    """Return torchvision or timm; raise a `UserError` with the nearest name if it lacks the model."""
    package, module = load_library(library), {"torchvision": "torchvision.models", "timm": "timm"}[library]
    names = load_library(module).list_models()
    if not (name in names or (library == "timm" and package.is_model(name))):
        matches = difflib.get_close_matches(name, names, 1, MIN_NAME_SIMILARITY)
        advice = f'list them with: python -c "import {module} as m; print(*m.list_models())"'
        hint = f"did you mean {library}:{matches[0]}?" if matches else advice
        raise UserError(f"{library} has no model {name!r}; {hint}")
    return package


def is_torchvision_detector(model: ModelSpec) -> bool:
    """Return whether the source is one of torchvision's detectors."""
    kind, _, name = model.source.partition(":")
    return kind == "torchvision" and not model.file and name in list_detectors(load_library("torchvision"))


def list_detectors(torchvision: Any) -> list[str]:
    """Return the detectors' names in `torchvision.models.get_model`."""
    names: list[str] = torchvision.models.list_models(torchvision.models.detection)
    return names


def read_detector_size(torchvision: Any, name: str) -> tuple[int, int]:
    """Return the network's default height and width for square images."""
    with torchvision.torch.device("meta"):
        transform = torchvision.models.get_model(name, weights=None, weights_backbone=None).transform
    width, height = transform.fixed_size or (transform.min_size[-1],) * 2
    return height, width


def init_detector(torch: Any, module: Any, height: int, width: int) -> None:
    """Set random weights that find objects, in place: with a library's initial ones, no score reaches its threshold.

    The backbone gets statistics of noise. Each layer that scores is scaled by the power of two that brings its results
    for noise nearest to a standard deviation of 1.
    """
    random_weights.undo_zero_init(torch, module)
    random_weights.init_batch_norm(torch, module.backbone, 3, (height, width))
    deviations: dict[Any, float] = {}

    def measure_deviation(layer: Any, _: Any, out: Any) -> None:
        # the widest scale of a shared head counts
        deviations[layer] = max(deviations.get(layer, 0.0), float(out.double().std()))

    image = (0.5 + random_weights.make_noise(torch, 3, height, width)[:1].float() / 4).clamp(0, 1)
    with ExitStack() as hooks, torch.no_grad(), one_thread(torch):
        for layer in _find_scoring_layers(torch, module):
            hooks.enter_context(layer.register_forward_hook(measure_deviation))
        module.eval()(image)
    with torch.no_grad():
        for layer, deviation in deviations.items():
            layer.weight.mul_(2.0 ** round(torch.tensor(SCORE_SPREAD / max(deviation, 1e-9)).log2().item()))


def _find_scoring_layers(torch: Any, module: Any) -> list[Any]:
    if hasattr(module, "roi_heads"):
        return [module.roi_heads.box_predictor.cls_score]
    head = module.head.classification_head
    if hasattr(head, "cls_logits"):
        return [head.cls_logits]
    return [part[-1] if isinstance(part, torch.nn.Sequential) else part for part in head.module_list]
