"""Networks of Hugging Face's transformers: `hf:FOLDER`, written by `save_pretrained`, or `hf:ORG/NAME` on the hub.

Only the library's own classes are built: code in a folder is not run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.extras import load_library
from dyno.worker.facts.files import RANDOM_WARNING
from dyno.worker.inputs.specs import size_before_crop
from dyno.worker.inspection import Purpose
from dyno.worker.nets.model_source import BuildCode, ImageConfig, ModelSource
from dyno.worker.sessions.torch_support import make_eager
from dyno.worker.spec import NETWORK_FOLDER, TIMM_FOLDER, Dims, ModelSpec, Preprocess, UserError, add_noun

CONFIG_FILE, ADAPTER_FILE = "config.json", "adapter_config.json"
PROCESSOR_FILE, PROCESSORS_FILE = "preprocessor_config.json", "processor_config.json"  # the latter has several
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
TIMM_HUB = "timm:hf-hub:", "timm:hf_hub:"
SAVING_FUNCTIONS = {"transformers": "save_pretrained", "timm": "timm.models.save_for_hf"}
SOURCE_EXAMPLES = {"transformers": "hf:google/vit-base-patch16-224", "timm": "timm:hf-hub:timm/resnet18.a1_in1k"}
STRETCH_NOTE = "stretches them to the size"
OWN_CODE = "it needs its own code, which is not run"
INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # as in Pillow
UNCROPPED_SIZE = 384  # from this size on, ConvNeXt's processor ignores `crop_pct`
EXAMPLE_TOKENS, EXAMPLE_SAMPLES = 128, 16_000  # largest length of an example
SPECTROGRAM_INPUT = "input_features"  # a speech encoder's spectrogram
PROBE_SIZE, PROBE_GREY = (500, 375), 128  # width and height of a gradient; value of its third channel
MAX_PIXEL_ERROR, MAX_CROP_SHIFT = 0.01, 1.5  # tolerances: share of the value range; a crop's shift in pixels


def split_folder(source: str) -> tuple[str, str]:
    """Split a source into the prefix of a stored folder and its name: a path, or ORG/NAME on the hub.

    Both are "" for a source that isn't a folder of transformers or timm.
    """
    for prefix in (f"{NETWORK_FOLDER}:", TIMM_FOLDER, *TIMM_HUB):
        if source.startswith(prefix):
            return prefix, source.removeprefix(prefix)
    is_folder = os.path.isfile(f"{source}/{CONFIG_FILE}")  # noqa: PTH113 - a name may be too long for a path
    return (f"{NETWORK_FOLDER}:", source) if is_folder else ("", "")


def locate(prefix: str, name: str, pretrained: bool) -> Path:
    """Return the folder of a model: a local one, or the hub's in its cache, downloaded if missing.

    `name` is a path, or ORG/NAME on the hub, with @REVISION for another than the latest. Weights are fetched only with
    `pretrained`. Raise a `UserError` if the hub can't be reached or lacks the model.
    """
    library = "timm" if prefix in (TIMM_FOLDER, *TIMM_HUB) else "transformers"
    if prefix == TIMM_FOLDER and not Path(name).is_dir():
        raise UserError(f"there is no folder {name}; a model of the hub is given as {SOURCE_EXAMPLES[library]}")
    if name and Path(name).is_dir():
        if Path(name, ADAPTER_FILE).is_file():
            raise UserError(
                f"{name} has an adapter of peft, which is not applied; "
                "save the network that merge_and_unload() returns, and give that folder"
            )
        if not Path(name, CONFIG_FILE).is_file():
            raise UserError(
                f"{name} has no {CONFIG_FILE}, so it is no model of {library}; save it with {SAVING_FUNCTIONS[library]}"
            )
        return Path(name).absolute()
    if name.count("/") != 1:
        raise UserError(f"{prefix}{name} is neither a folder nor ORG/NAME, such as {SOURCE_EXAMPLES[library]}")
    repository, _, revision = name.partition("@")
    download = load_library("huggingface_hub", error=UserError).snapshot_download
    options = {"allow_patterns": ["*.json", *(WEIGHT_PATTERNS if pretrained else ())], "revision": revision or None}
    with contextlib.suppress(Exception):  # not completely cached
        folder = Path(download(repository, local_files_only=True, **options))
        if (folder / CONFIG_FILE).is_file() and (not pretrained or weight_files(folder)):
            return folder
    try:
        return Path(download(repository, **options))
    except Exception as e:  # hub and network raise many types of errors
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise UserError(
            f"{prefix}{name} is not in the hub's cache and can't be downloaded: {reason}; "
            f"give a local folder, {TIMM_FOLDER if prefix in TIMM_HUB else prefix}FOLDER"
        ) from e


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the folder's weights: safetensors, else PyTorch's."""
    matches = (sorted(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS)
    return next((files for files in matches if files), [])


def describe_random(model: ModelSpec) -> str:
    """Return a warning if a network's folder has no weights; else ""."""
    prefix, folder = split_folder(model.source)
    if not prefix or model.pretrained or model.weights or weight_files(Path(folder)):
        return ""
    files = " or ".join(WEIGHT_PATTERNS)
    return f"{RANDOM_WARNING}: its folder has no {files}; save the model there, or fetch the hub's with --pretrained"


def _read_processor(folder: str) -> dict[str, Any]:
    """Return the settings of the folder's image processor; a file of several takes precedence, as in the library."""
    settings = _read_settings(Path(folder, PROCESSORS_FILE)).get("image_processor")
    return settings if isinstance(settings, dict) else _read_settings(Path(folder, PROCESSOR_FILE))


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (ValueError, TypeError) as e:
        raise UserError(f"{path} can't be read: {e}") from e


def _read_pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, dict):
        value = (value["height"], value["width"]) if {"height", "width"} <= value.keys() else None
    if isinstance(value, int):
        value = (value, value)
    return (int(value[0]), int(value[1])) if isinstance(value, (list, tuple)) and len(value) == 2 else None


def _import_library() -> Any:
    transformers = load_library("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _read_config(folder: str) -> Any:
    try:
        config = _import_library().AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as e:
        reason = (str(e) or type(e).__name__).splitlines()[0]
        if "auto_map" in Path(folder, CONFIG_FILE).read_text(encoding="utf-8"):
            reason = OWN_CODE
        raise UserError(f"{folder} can't be read by transformers: {reason}") from e
    if config.model_type == "timm_wrapper":  # transformers would ignore its classes
        raise UserError(f"{folder} is a model of timm; give {TIMM_FOLDER}{folder}")
    return config


def _name_class(config: Any) -> str:
    return str((config.architectures or [f"{type(config).__name__.removesuffix('Config')}Model"])[0])


class HuggingFace(ModelSource):
    """`hf:FOLDER`, a folder of transformers."""

    name = NETWORK_FOLDER
    form = "hf:ORG/NAME or hf:FOLDER"
    stores_preprocess = True

    def build(self, model: ModelSpec, rest: str, dims: Dims | None, state: Mapping[str, Any] | None) -> Any:
        """Build the network named in config.json, with the folder's weights or random ones.

        Raise `Unavailable` without the library, and a `UserError` if it lacks the network or the weights don't fit.
        """
        torch, transformers, config = load_library("torch"), _import_library(), _read_config(rest)
        if model.classes is not None:
            config.num_labels = model.classes
        if model.channels != getattr(config, "num_channels", model.channels):
            raise UserError(
                f"{model.name} has {config.num_channels} input channels; give --channels {config.num_channels}"
            )
        kind = getattr(transformers, _name_class(config), None)
        if kind is None:
            raise UserError(
                f"{model.name} is a {_name_class(config)}, which transformers {transformers.__version__} lacks"
            )
        if hasattr(config, "use_cache"):
            config.use_cache = False  # else the key-value cache is an output
        if not model.pretrained:
            return make_eager(torch, kind(config))
        dtype = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # transformers before 4.56
        options = {"config": config, "local_files_only": True, dtype: "float32", "output_loading_info": True}
        try:
            network, report = kind.from_pretrained(rest, **options, ignore_mismatched_sizes=True)
        except (OSError, ValueError, RuntimeError, ImportError) as e:
            reason = (str(e) or type(e).__name__).strip().splitlines()[0]
            raise UserError(f"the weights of {rest} can't be loaded: {reason}") from e
        if misfits := sorted(report["mismatched_keys"]):
            name, *shapes = misfits[0]
            file_shape, model_shape = ("x".join(map(str, shape)) for shape in shapes)
            raise UserError(
                f"{rest} has weights of other shapes than its {kind.__name__} for {add_noun(len(misfits), 'tensor')}, "
                f"e.g. {name}, {file_shape} instead of {model_shape}; correct config.json, or omit --classes"
            )
        if missing := sorted(report["missing_keys"]):
            tensors_text = f"{add_noun(len(missing), 'tensor')} of its {kind.__name__}, e.g. {missing[0]}"
            raise UserError(
                f"{rest} has no weights for {tensors_text}, so they would be random; "
                "save the trained model again, or correct architectures in config.json"
            )
        return make_eager(torch, network)

    def read_image_config(self, model: ModelSpec, rest: str) -> ImageConfig:
        """Return the folder's preprocessing of images, and their height and width; None if unknown."""
        settings, size = _read_processor(rest), _read_pair(getattr(_read_config(rest), "image_size", None))
        if not settings:
            return None, size
        target = settings.get("size") or {}
        target = {"height": target, "width": target} if isinstance(target, int) else target
        short_side = target.get("shortest_edge")
        crop = _read_pair(settings.get("crop_size")) if settings.get("do_center_crop") else None
        full_size = _read_pair(target)
        size = crop or full_size or ((short_side, short_side) if short_side else size)
        is_normalised = settings.get("do_normalize", True) and settings.get("image_mean") and settings.get("image_std")
        mean, std = (settings["image_mean"], settings["image_std"]) if is_normalised else ([0.0] * 3, [1.0] * 3)
        # The processor computes (pixel x factor - mean) / std, Dyno (pixel / 255 - mean) / std.
        factor = float(settings.get("rescale_factor") or 1 / 255) if settings.get("do_rescale", True) else 1.0
        mean, std = ([value / (255 * factor) for value in values] for values in (mean, std))
        squash = bool(crop and full_size and crop != full_size)
        resize = short_side / min(size) if short_side and size else 0.0
        if squash and crop and full_size:
            resize = full_size[0] / crop[0]
        if short_side and settings.get("crop_pct"):
            resize = 1 / settings["crop_pct"] if short_side < UNCROPPED_SIZE else 0.0
        method = INTERPOLATIONS.get(settings.get("resample", 2), "bilinear")
        return Preprocess(tuple(map(float, mean)), tuple(map(float, std)), float(resize), method, squash=squash), size

    def check_images(self, model: ModelSpec, rest: str, is_letterboxed: bool) -> tuple[str, str]:
        """Return the folder's preparation of images if Dyno can't match it, and why that wasn't checked; else "".

        Both get a gradient image, and their pixels are compared within a tolerance. If Dyno letterboxes a detector's
        images, the second text describes the processor's method.
        """
        preprocess, size = self.read_image_config(model, rest)
        if _read_processor(rest).get("do_flip_channel_order"):
            return "with red and blue swapped (do_flip_channel_order)", ""
        if preprocess is None or size is None or len(preprocess.mean) != 3:
            return "", ""
        (width, height), (crop_height, crop_width) = PROBE_SIZE, size
        image = np.full((height, width, 3), PROBE_GREY, np.uint8)
        image[..., 0], image[..., 1] = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]
        try:
            processor = _import_library().AutoImageProcessor.from_pretrained(rest, local_files_only=True)
            actual = np.asarray(processor(image, return_tensors="np")["pixel_values"])
        except Exception as e:  # it may need own code, another library version, or further inputs
            reason = (str(e).strip() or type(e).__name__).splitlines()[0]
            reason = OWN_CODE if "auto_map" in _read_processor(rest) else reason
            return "", f"couldn't be run to check that ({reason})" if is_letterboxed else reason
        sides = size_before_crop(PROBE_SIZE, (crop_width, crop_height), preprocess)
        crops = zip((crop_width, crop_height), sides, strict=True)
        columns, rows = ((np.arange(n) + 0.5 + (side - n) / 2) / side for n, side in crops)
        expected = np.broadcast_arrays(columns, rows[:, None], np.float64(PROBE_GREY / 255))
        mean, std = (np.reshape(values, (3, 1, 1)) for values in (preprocess.mean, preprocess.std))
        is_alike = actual.shape == (1, 3, crop_height, crop_width) and (
            np.abs(actual[0] * std + mean - np.stack(expected)).max() < MAX_PIXEL_ERROR + MAX_CROP_SHIFT / min(sides)
        )
        if not is_alike:
            return "prepared by steps other than resize, centre crop and normalisation", ""
        return "", STRETCH_NOTE if is_letterboxed else ""

    def make_examples(self, model: ModelSpec, rest: str) -> Any:
        """Return inputs of one row by name for a network of text (perhaps with images), sound or video; else None."""
        torch = load_library("torch")
        transformers, config = _import_library(), _read_config(rest)
        input_name = str(getattr(getattr(transformers, _name_class(config), None), "main_input_name", ""))
        generator = torch.Generator().manual_seed(model.seed)
        if input_name == "input_ids":
            text_config = config.get_text_config()
            length = min(EXAMPLE_TOKENS, int(getattr(text_config, "max_position_embeddings", 0) or EXAMPLE_TOKENS))
            ids = torch.randint(int(text_config.vocab_size), (1, length), generator=generator)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            vision_config = getattr(config, "vision_config", None)
            if size := vision_config and (
                self.read_image_config(model, rest)[1] or _read_pair(getattr(vision_config, "image_size", None))
            ):
                inputs["pixel_values"] = torch.randn(1, model.channels, *size, generator=generator)
            return inputs
        if input_name == "input_values":
            channels = getattr(config, "audio_channels", 0)  # a codec
            shape = (channels, EXAMPLE_SAMPLES) if channels else (EXAMPLE_SAMPLES,)
            if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # a spectrogram, as of AST
                shape = int(config.max_length), int(config.num_mel_bins)
            return {"input_values": torch.randn(1, *shape, generator=generator)}
        if input_name == "pixel_values" and (frames := getattr(config, "num_frames", 0)):
            size = self.read_image_config(model, rest)[1] or _read_pair(getattr(config, "image_size", None))
            return size and {input_name: torch.randn(1, int(frames), model.channels, *size, generator=generator)}
        if input_name == SPECTROGRAM_INPUT and hasattr(config, "num_mel_bins"):
            frames = 2 * int(getattr(config, "max_source_positions", EXAMPLE_TOKENS))
            return {SPECTROGRAM_INPUT: torch.randn(1, int(config.num_mel_bins), frames, generator=generator)}
        return None

    def read_purpose(self, model: ModelSpec, rest: str, module: Any) -> Purpose:
        return replace(super().read_purpose(model, rest, module), preprocess=self.read_image_config(model, rest)[0])

    def write_code(self, model: ModelSpec, rest: str, network: Any, dims: Dims, classes: int | None) -> BuildCode:
        class_names = type(network).__name__, type(network.config).__name__
        body = f"return transformers.{class_names[0]}(transformers.{class_names[1]}.from_dict(CONFIG))"
        constants = {"CONFIG": network.config.to_diff_dict()}
        return BuildCode(("transformers",), "import transformers\n", body, constants)


HUGGING_FACE = HuggingFace()
