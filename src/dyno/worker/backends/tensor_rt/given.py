"""The user's engine files: the product that wrote one, and its deserialised contents."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyno.worker.backend import FileContents, FileFormat
from dyno.worker.backends.tensor_rt import layers, library
from dyno.worker.facts.engine import PRECISION_TYPES
from dyno.worker.facts.files import GpuFacts, MakerFacts
from dyno.worker.facts.job import LayerGraph
from dyno.worker.record import parse_json
from dyno.worker.sessions.gpu import Device
from dyno.worker.spec import Artifact, Recipe, Tensor, Trial, UserError

ENGINE_SUFFIXES = (".engine", ".plan", ".trt")
LAYERS_FILE = "layers.json"  # a cached engine's listing; a copy's is NAME.layers.json


class EngineFormat(FileFormat):
    """A plan of TensorRT or TensorRT-RTX, readable only by its library, on a GPU that it was built for."""

    name = "engine"
    suffixes = ENGINE_SUFFIXES
    backend = "tensorrt"
    device = "cuda:0"
    builders = ("tensorrt", "tensorrt_rtx")
    on_device = True

    def default_backend(self, path: Path) -> str:
        return product_of(path)

    def copy(self, file: Path, out: Path) -> None:
        """Copy the engine, and the layers listed at its build together with the engine's hash."""
        super().copy(file, out)
        listing = file.with_name(LAYERS_FILE)
        if listing.is_file():
            sha256 = hashlib.sha256(out.read_bytes()).hexdigest()
            content = {"engine_sha256": sha256, "layers": json.loads(listing.read_text(encoding="utf-8"))}
            out.with_suffix(f".{LAYERS_FILE}").write_text(json.dumps(content, indent=1), encoding="utf-8")

    def read(self, path: str, trial: Trial) -> FileContents:
        """Read the engine; its precision is the compute layers' most common, or fp32 if it reports no types."""
        engine = _open_engine(product_of(Path(path)), trial.runtime.device, path)
        types: Counter[str] = Counter(layers.by_type(engine.layers))
        most_common = next(iter(types.most_common(1)), ("float32", 0))[0]
        precision = next((name for name, type_ in PRECISION_TYPES.items() if type_ == most_common), "fp32")
        return FileContents(engine.inputs, engine.outputs, precision, engine.batches)


ENGINE_FORMAT = EngineFormat()


def product_of(path: Path) -> str:
    """Return the product that wrote the engine file, by its first bytes; TensorRT for any other file."""
    with open(path, "rb") as f:
        return "tensorrt_rtx" if f.read(4) == b"vtrt" else "tensorrt"


def describe_given(product: str, recipe: Recipe) -> Artifact:
    """Return the model's own engine as an artifact: its tensors, layers and hash.

    Raise a `UserError` with the library's reason for an engine of another version or GPU, or a file that isn't an
    engine; `Unavailable` without a GPU, which is needed to read an engine.
    """
    path = Path(recipe.model.file)
    engine = _open_engine(product, recipe.runtime.device, str(path))
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    summary = layers.summarise_layers(engine.layers, recipe.precision)
    truth = summary.precision_truth
    made_by = MakerFacts(
        backend=recipe.maker,
        versions={library.PACKAGE_NAMES[product]: engine.version},
        gpu=engine.gpu,
        weights_sha256=sha256,  # of unknown origin, so comparable only with itself
        warnings=() if truth is None or truth.ok else (truth.sentence,),
        notes=tuple(layers.list_notes(engine.layers, recipe.precision)),
    ).merge(summary)
    return Artifact(
        "engine", str(path), sha256, len(content), recipe.precision, engine.inputs, engine.outputs, 0.0, "", made_by
    )


def list_layers(product: str, path: str, device_name: str) -> LayerGraph:
    """Return an engine's layers from its listing, else from its inspector, which needs the GPU.

    Raise a `UserError` for an engine without layer information, and the errors of `describe_given`.
    """
    title = library.PRODUCT_NAMES[product]
    if (engine_layers := _read_listing(Path(path))) is not None:
        return layers.list_layers(engine_layers, title)
    engine = _open_engine(product, device_name, path)
    if not any(layer.type for layer in engine.layers):
        raise UserError(
            f"{path} was built without layer information; build it again with detailed profiling verbosity "
            "(trtexec --profilingVerbosity=detailed), or with dyno export"
        )
    return layers.list_layers(engine.layers, f"{title} {engine.version}")


def _read_listing(path: Path) -> list[layers.EngineLayer] | None:
    """Return the layers of the engine's listing; None without one, or if it belongs to another engine."""
    cache_listing, copy_listing = path.with_name(LAYERS_FILE), path.with_suffix(f".{LAYERS_FILE}")
    if path.is_file() and copy_listing.is_file():
        content = parse_json(copy_listing.read_bytes())
        if content.get("engine_sha256") == hashlib.sha256(path.read_bytes()).hexdigest():
            return layers.from_listing(content["layers"])
    if cache_listing.is_file():
        return layers.from_listing(json.loads(cache_listing.read_text(encoding="utf-8")))
    return None


@dataclass(frozen=True)
class EngineContents:
    """The contents of a deserialised engine."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    batches: tuple[int, int, int]
    layers: list[layers.EngineLayer]
    version: str
    gpu: GpuFacts


def _open_engine(product: str, device_name: str, path: str) -> EngineContents:
    """Return the file's tensors and layers; see `describe_given` for its errors."""
    from dyno.worker.backends.tensor_rt.run import deserialise, list_tensors

    trt, device = library.load(product), Device(device_name)
    try:
        runtime, engine = deserialise(trt, library.Log(trt), path)
        gpu = GpuFacts(device.model, device.capability)
        contents = EngineContents(
            *list_tensors(trt, engine), _read_batch_range(engine), layers.inspect(trt, engine), trt.__version__, gpu
        )
        del engine, runtime
    finally:
        device.close()
    return contents


def _read_batch_range(engine: Any) -> tuple[int, int, int]:
    """Return the smallest, best and largest batch over all profiles; the best is the first profile's.

    A static engine has its only batch three times.
    """
    name = engine.get_tensor_name(0)
    batch = int(engine.get_tensor_shape(name)[0]) if len(engine.get_tensor_shape(name)) else 1
    if batch >= 0:
        return batch, batch, batch
    ranges = [engine.get_tensor_profile_shape(name, k) for k in range(engine.num_optimization_profiles)]
    return min(int(r[0][0]) for r in ranges), int(ranges[0][1][0]), max(int(r[2][0]) for r in ranges)
