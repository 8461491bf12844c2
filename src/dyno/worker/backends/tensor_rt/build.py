"""From an ONNX file to an engine: parse, fix shapes or add profiles, choose types, build, list and check the layers.

`model.engine` is a plain plan that trtexec loads too; `layers.json` lies in the same folder.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import artifact_of
from dyno.worker.backends.tensor_rt import layers, library
from dyno.worker.backends.tensor_rt import settings as tensor_rt_settings
from dyno.worker.backends.tensor_rt.settings import Settings
from dyno.worker.facts.files import GpuFacts, MakerFacts, TimingUse
from dyno.worker.inputs.calibration import CalibrationImages
from dyno.worker.makers.precision import INHERITED_FACTS
from dyno.worker.record import TIMING_VARIABLE, lock, replace_file
from dyno.worker.sessions.gpu import Device, call
from dyno.worker.spec import Artifact, Recipe, Tensor, Unavailable, UserError

# TensorRT's INT8 calibrators (up to version 10), fed with real images; unused by the graph route


def make_calibrator(trt: Any, device: Any, method: str, images: CalibrationImages, folder: Path) -> Any:
    """Return a calibrator (entropy: IInt8EntropyCalibrator2, minmax: IInt8MinMaxCalibrator) fed with the images.

    `failure` is the exception that stopped it: the library swallows exceptions of callbacks and would go on with the
    ranges so far. It reads no cache, so an engine's scales depend only on the recipe. The ranges are stored as
    FOLDER/calibration.cache.
    """
    kind: Any = library.calibrator_class(trt, method)
    feeds = images.feeds(0, len(images))
    address: list[int] = []

    class Calibrator(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            kind.__init__(self)
            self.failure: Exception | None = None

        def get_batch_size(self) -> int:
            return images.batch

        def get_batch(self, names: list[str]) -> list[int] | None:
            try:
                feed = next(feeds, None)
                return None if feed is None else self.placed(np.ascontiguousarray(feed[names[0]], np.float32))
            except Exception as e:  # raised again at the end of the build
                self.failure = e
                return None

        def placed(self, array: np.ndarray) -> list[int]:
            if not address:
                address.append(device.allocate(array.nbytes))
            call(device.cuda.cuMemcpyHtoD, address[0], array.ctypes.data, array.nbytes)
            return address

        def read_calibration_cache(self) -> None:
            return None

        def write_calibration_cache(self, cache: Any) -> None:
            (folder / "calibration.cache").write_bytes(bytes(cache))

    return Calibrator()


def images_for(recipe: Recipe, parent: Artifact, shape: tuple[int, ...]) -> CalibrationImages:
    """Return the recipe's calibration images in batches of the network's calibration shape.

    Raise a `UserError` for a model with several inputs.
    """
    if len(parent.inputs) != 1:
        raise UserError("a calibrator feeds one image input; give route=graph for a model with several")
    tensor = replace(parent.inputs[0], shape=shape)
    return CalibrationImages(recipe, replace(parent, inputs=(tensor,)))


# The timing cache: seconds of each tactic in earlier builds with this version on this GPU


def _measure_size(config: Any, content: bytes) -> int:
    cache = config.create_timing_cache(content)
    return 0 if cache is None else len(bytes(cache.serialize()))


def _set_cache(trt: Any, config: Any, content: bytes) -> bool:
    return library.timing_cache(trt, config, content) is not None


@dataclass
class TimingCache:
    """The timing cache's file for a version and GPU, and its content when this build began.

    `is_used` says whether the builder accepted it: a damaged one, or one of another build of the library, is replaced.
    `complaint` is the library's error on it.
    """

    path: Path | None
    before: bytes = b""
    is_used: bool = False
    complaint: str = ""

    @classmethod
    def open(cls, trt: Any, config: Any, gpu: str, is_wanted: bool) -> TimingCache:
        """Load earlier builds' timings into the builder; an unused cache without a folder or library support."""
        folder = os.environ.get(TIMING_VARIABLE, "")
        if not (folder and is_wanted and gpu) or library.is_rtx(trt):
            return cls(None)
        name = re.sub(r"[^\w.-]+", "-", f"{trt.__name__}-{trt.__version__}-{gpu}")
        cache = cls(Path(folder) / f"{name}.timing")
        cache.before = cache._read_file()
        # 8.6 silently treats unreadable content as an empty cache.
        cache.is_used = _measure_size(config, cache.before) > _measure_size(config, b"") and _set_cache(
            trt, config, cache.before
        )
        if not cache.is_used:
            _set_cache(trt, config, b"")
        return cache

    def _read_file(self) -> bytes:
        try:
            return self.path.read_bytes() if self.path else b""
        except FileNotFoundError:
            return b""

    def save(self, config: Any) -> None:
        """Merge this build's timings into the file, which another build may have changed meanwhile."""
        cache = config.get_timing_cache() if self.path else None
        if self.path is None or cache is None:
            return
        with lock(self.path.with_suffix(".lock")):
            content = self._read_file()
            if content and content != self.before:
                other_cache = config.create_timing_cache(content)
                if other_cache is not None:
                    cache.combine(other_cache, False)
            with replace_file(self.path) as f:
                f.write(bytes(cache.serialize()))

    def to_record(self, log: Any) -> TimingUse:
        """Return whether earlier timings were used, the reason if not, and the number of tactics timed here."""
        file = self.path.name if self.path else ""
        return TimingUse(self.is_used, file, log.timed, self.complaint)


Report = Callable[[str], None]
VAGUE_ERROR = re.compile("any implementation|no further information")  # errors of a build without a usable kernel
SCARCE_MEMORY_B = 1 << 30  # with less free memory, a failure without a reason counts as lack of memory
MAX_SHOWN = 5  # names in a sentence, and warnings in a record
RTX_TIME = (
    "TensorRT-RTX compiles its kernels on the device that runs them: its build time can't be compared with TensorRT's"
)


@dataclass
class EngineBuild:
    """The state of a build."""

    trt: Any
    log: Any
    recipe: Recipe
    parent: Artifact
    folder: Path
    settings: Settings
    device: Device | None
    builder: Any
    network: Any
    config: Any
    typed: bool
    shapes: list[tensor_rt_settings.Profile] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    calibrator: Any = None

    @property
    def route(self) -> str:
        """The source of types: graph, flags or calibrator."""
        return "graph" if self.settings.route == "auto" else self.settings.route


def build(product: str, recipe: Recipe, parent: Artifact, folder: Path, report: Report | None = None) -> Artifact:
    """Build the recipe's engine from the parent's ONNX file into FOLDER/model.engine.

    `report` is called with the build's phase if the library supports it. Raise a `UserError` for an invalid file,
    shapes or options, and for an engine of another precision (unless option `allow_mixed`); `Unavailable` for a missing
    feature of this version or machine; `MemoryError`.
    """
    start = time.perf_counter()
    with _open_build(product, recipe, parent, folder) as job:
        _parse_network(job)
        job.shapes = tensor_rt_settings.parse_profiles(job.settings.profile, _list_inputs(job), recipe.dims)
        _set_shapes(job)
        library.configure(job.trt, job.config, job.settings)
        job.flags = library.allow_types(job.trt, job.config, recipe.precision, job.typed)
        _set_calibrator(job)
        gpu = job.device.model if job.device else ""
        timings = TimingCache.open(job.trt, job.config, gpu, job.settings.timing_cache)
        timings.complaint = job.log.complaint()
        path = folder / "model.engine"
        engine_layers, seconds = _build_and_list(job, path, report or (lambda text: None))
        timings.save(job.config)
        (folder / "layers.json").write_text(json.dumps(layers.as_json(engine_layers), indent=1), encoding="utf-8")
        made_by = replace(_made_by(job, engine_layers), build_s=seconds, timing_cache=timings.to_record(job.log))
        made_by = _check_precision(job, made_by, engine_layers)
        boundary = _list_tensors(job)
    return artifact_of(path, "engine", recipe.precision, boundary, made_by, start, parent.sha256)


@contextmanager
def _open_build(product: str, recipe: Recipe, parent: Artifact, folder: Path) -> Iterator[EngineBuild]:
    trt = library.load(product)
    settings = Settings.from_options(recipe.options)
    device = _open_device(trt, recipe.runtime.device)
    if settings.refit and device is None:
        raise Unavailable(
            f"{library.name_library(trt)} builds engines that can be refitted only on a machine with a GPU"
        )
    log = library.Log(trt)
    builder = trt.Builder(log)
    typed = library.is_typed(trt, "graph" if settings.route == "auto" else settings.route)
    network = library.new_network(trt, builder, typed)
    config = builder.create_builder_config()
    try:
        yield EngineBuild(trt, log, recipe, parent, folder, settings, device, builder, network, config, typed)
    finally:
        if device is not None:
            device.close()


def _open_device(trt: Any, name: str) -> Device | None:
    """Return the GPU for the build, or None if TensorRT-RTX builds without one."""
    try:
        return Device(name)
    except Unavailable:
        if library.is_rtx(trt):
            return None
        raise


def _parse_network(job: EngineBuild) -> None:
    path = Path(job.parent.path)
    if not path.is_file():
        raise UserError(f"the ONNX file {path} does not exist")
    if not path.stat().st_size:
        raise UserError(f"{path} is empty, not an ONNX file")
    parser = job.trt.OnnxParser(job.network, job.log)
    # By path, so that external weights are found.
    if not parser.parse_from_file(str(path)):
        reason = library.parse_error(parser, job.log)
        raise _make_error(job, f"{library.name_library(job.trt)} can't read {path.name}: {reason}", reason)
    if not job.network.num_outputs:
        raise UserError(f"{path.name} has no outputs: it is not a whole ONNX file; export it again")


def _list_inputs(job: EngineBuild) -> tuple[Tensor, ...]:
    return tuple(_read_tensor(job, job.network.get_input(i)) for i in range(job.network.num_inputs))


def _list_tensors(job: EngineBuild) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    outputs = tuple(_read_tensor(job, job.network.get_output(i)) for i in range(job.network.num_outputs))
    return _list_inputs(job), outputs


def _read_tensor(job: EngineBuild, tensor: Any) -> Tensor:
    """Return a tensor of the network; a free dimension has its name in the ONNX file."""
    onnx_shape = {t.name: t.shape for t in (*job.parent.inputs, *job.parent.outputs)}.get(tensor.name, ())
    sizes = [int(n) for n in tensor.shape]
    names = [n if isinstance(n, str) and n else f"{tensor.name}_{axis}" for axis, n in enumerate(onnx_shape)]
    names += [f"{tensor.name}_{axis}" for axis in range(len(names), len(sizes))]
    shape = tuple(size if size >= 0 else name for size, name in zip(sizes, names, strict=False))
    return Tensor(tensor.name, library.dtype_name(tensor.dtype), shape)


def _set_shapes(job: EngineBuild) -> None:
    """Fix the sizes on which all profiles agree; the others stay free, for the profiles."""
    for index in range(job.network.num_inputs):
        tensor = job.network.get_input(index)
        if tensor.is_shape_tensor:
            raise UserError(
                f"input {tensor.name!r} decides the shapes of others (a shape tensor); export it as a constant"
            )
        shape = tensor_rt_settings.find_fixed_size(job.shapes, tensor.name)
        if tuple(tensor.shape) != shape:
            tensor.shape = shape
    if tensor_rt_settings.is_static(job.shapes):
        return
    for profile in job.shapes:
        optimisation_profile = job.builder.create_optimization_profile()
        for name, (low, opt, high) in profile.items():
            optimisation_profile.set_shape(name, low, opt, high)
        if job.config.add_optimization_profile(optimisation_profile) < 0:
            raise UserError(f"TensorRT doesn't take the profile: {job.log.reason()}")


def _set_calibrator(job: EngineBuild) -> None:
    if job.route != "calibrator":
        return
    if job.device is None:
        raise Unavailable("a calibrator needs a GPU")
    (ends,) = job.shapes[0].values()
    images = images_for(job.recipe, job.parent, ends[1])
    job.calibrator = make_calibrator(job.trt, job.device, job.settings.calibrator, images, job.folder)
    job.config.int8_calibrator = job.calibrator


def _build_and_list(job: EngineBuild, path: Path, report: Report) -> tuple[list[layers.EngineLayer], float]:
    """Write the engine; return its layers and the seconds of its build.

    A weakly typed builder chooses FP32 kernels if they are faster, whatever the graph's types. An engine that misses
    the graph's precision for that reason is built again with the graph's types preferred.
    """
    plan, seconds = _build_plan(job, report)
    path.write_bytes(plan)
    engine_layers = _list_layers(job, path)
    if job.typed or job.route != "graph" or job.settings.allow_mixed or not _is_refuted(job, engine_layers):
        return engine_layers, seconds
    if not library.keep_types(job.trt, job.config, job.network):
        return engine_layers, seconds
    job.flags.append("PREFER_PRECISION_CONSTRAINTS")
    plan, rebuild_s = _build_plan(job, report)
    path.write_bytes(plan)
    return _list_layers(job, path), seconds + rebuild_s


def _build_plan(job: EngineBuild, report: Report) -> tuple[bytes, float]:
    """Build the engine; return the serialised plan and the seconds of its build."""
    stop = threading.Event()
    is_watched = library.watch(job.trt, job.config, report, stop.is_set)
    begin = time.perf_counter()
    with _allow_interrupt(stop, is_watched):
        plan = job.builder.build_serialized_network(job.network, job.config)
    seconds = time.perf_counter() - begin
    if stop.is_set():
        raise KeyboardInterrupt
    if job.calibrator and job.calibrator.failure:
        raise job.calibrator.failure
    if plan is None:
        reason = job.log.reason()
        raise _make_error(job, f"{library.name_library(job.trt)} can't build {job.recipe.model.name}: {reason}", reason)
    return bytes(plan), seconds


@contextmanager
def _allow_interrupt(stop: threading.Event, is_watched: bool) -> Iterator[None]:
    """Let an interrupt end the build.

    The builder calls back into Python, where an exception would abort the process from inside the library. So the build
    is asked to stop if the library supports that; else the interrupt ends the process, as for a C program.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, (lambda *_: stop.set()) if is_watched else signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _make_error(job: EngineBuild, sentence: str, reason: str) -> Exception:
    if "Unable to load library" in reason:  # an optional part of the library
        return Unavailable(sentence)
    if library.OUT_OF_MEMORY_ERROR.search(reason):
        return MemoryError(sentence)
    # Lack of memory is logged as a warning; the error then says that no kernel is left, or has no reason.
    if VAGUE_ERROR.search(reason) or not library.THREE_LETTERS.search(reason):
        free, total = job.device.memory() if job.device else (SCARCE_MEMORY_B, SCARCE_MEMORY_B)
        if free < SCARCE_MEMORY_B:
            return MemoryError(f"{sentence}; {free / 1e9:.2f} of the GPU's {total / 1e9:.1f} GB were free")
        if any(library.OUT_OF_MEMORY_ERROR.search(w) for w in job.log.warnings):
            return MemoryError(f"{sentence}; the tactics did not fit into the GPU's memory")
    return UserError(sentence)


def _list_layers(job: EngineBuild, path: Path) -> list[layers.EngineLayer]:
    if library.is_rtx(job.trt):
        return layers.from_log(job.log.listing)
    from dyno.worker.backends.tensor_rt.run import deserialise

    _, engine = deserialise(job.trt, job.log, str(path))
    return layers.inspect(job.trt, engine)


def _made_by(job: EngineBuild, engine_layers: Sequence[layers.EngineLayer]) -> MakerFacts:
    summary = layers.summarise_layers(engine_layers, job.recipe.precision)
    inherited_facts = {"parameters": summary.engine_parameters, **job.parent.made_by.set_fields(INHERITED_FACTS)}
    is_rtx = library.is_rtx(job.trt)
    return MakerFacts(
        backend=job.recipe.maker,
        route=job.route,
        typed="strongly" if job.typed else "weakly",
        flags=tuple(job.flags),
        options=dict(job.recipe.options),
        profiles=tuple(tensor_rt_settings.format_profiles(job.shapes)),
        versions={library.PACKAGE_NAMES[job.trt.__name__]: job.trt.__version__},
        gpu=GpuFacts(job.device.model, job.device.capability) if job.device else None,
        warnings=tuple(_summarise_warnings(job)),
        notes=(*([RTX_TIME] if is_rtx else []), *layers.list_notes(engine_layers, job.recipe.precision)),
        **inherited_facts,
    ).merge(summary)


def _summarise_warnings(job: EngineBuild) -> list[str]:
    """Return the library's warnings, each kind once, without the warnings of every build."""
    messages = dict.fromkeys(" ".join(w.split())[:200] for w in job.log.warnings)
    relevant = [
        w for w in messages if not library.OUT_OF_MEMORY_ERROR.search(w) and not library.HARMLESS_WARNING.search(w)
    ]
    count = sum(bool(library.OUT_OF_MEMORY_ERROR.search(w)) for w in job.log.warnings)
    warnings = (
        [f"{count} tactics were skipped for lack of GPU memory; a larger workspace may be faster"] if count else []
    )
    return (
        warnings
        + relevant[:MAX_SHOWN]
        + ([f"and {len(relevant) - MAX_SHOWN} more warnings"] if len(relevant) > MAX_SHOWN else [])
    )


def _is_refuted(job: EngineBuild, engine_layers: Sequence[layers.EngineLayer]) -> bool:
    """Return whether the engine ran in another type, apart from layers that `keep` leaves in float32."""
    kept_nodes = {layer.node for layer in job.parent.made_by.kept}
    rest = [layer for layer in engine_layers if kept_nodes.isdisjoint(layer.nodes or layers.named_nodes(layer.name))]
    truth = layers.summarise_layers(rest, job.recipe.precision).precision_truth
    return truth is not None and truth.refuted


def _check_precision(job: EngineBuild, made_by: MakerFacts, engine_layers: Sequence[layers.EngineLayer]) -> MakerFacts:
    """Raise a `UserError` for an engine of another precision than requested, unless mixed ones are allowed.

    An allowed mixed engine, or one of unknown types, gets a warning.
    """
    truth = made_by.precision_truth
    if truth is None or truth.ok:
        return made_by
    if job.settings.allow_mixed or not _is_refuted(job, engine_layers):
        return replace(made_by, warnings=(truth.sentence, *made_by.warnings))
    wide_names = made_by.kept_float32
    names = f" ({', '.join(wide_names[:MAX_SHOWN])}{' …' if len(wide_names) > MAX_SHOWN else ''})" if wide_names else ""
    raise UserError(f"{truth.sentence}{names}; give allow_mixed=true to accept the engine as it is")
