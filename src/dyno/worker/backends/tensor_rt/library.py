"""TensorRT 8.6, 10 and 11 and TensorRT-RTX: all differences between versions in one place.

Functions are named by purpose; a missing feature raises `Unavailable` with the version's name.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from dyno.worker.backends.tensor_rt.settings import Settings
from dyno.worker.extras import install
from dyno.worker.spec import Unavailable, UserError, shorten

PRODUCT_NAMES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}  # by module
PACKAGE_NAMES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}
# Warnings of 8.6 for every exported file (INT64 shapes; unsuitable weights have another warning), and the lines after a
# warning with the number of weights
HARMLESS_WARNING = re.compile("generated with INT64 weights|^If this is not the desired behavior|^Check verbose logs")
OUT_OF_MEMORY_ERROR = re.compile(
    "out of ?memory|bad_alloc|MemoryAllocation|cudaError 2:|insufficient memory|memory .*could not be allocated|"
    "not enough (free |GPU )?memory",
    re.IGNORECASE,
)
THREE_LETTERS = re.compile("[A-Za-z]{3}")
NO_DRIVER = re.compile("cudaError (35|100):")  # RTX builds without a GPU and mentions that in every error
# Flags of a weakly typed network's builder by precision; 8-bit networks keep unquantisable layers in FP16.
BUILDER_FLAGS = {"fp16": ("FP16",), "bf16": ("BF16",), "int8": ("INT8", "FP16"), "fp8": ("FP8", "FP16")}
# Tactic sources that TensorRT 8 uses by default and newer versions don't; without them, memory and time are saved.
EXTERNAL_TACTICS = ("CUBLAS", "CUBLAS_LT", "CUDNN")
TENSOR_TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8", "FP4": "float4"}


@lru_cache(maxsize=2)
def load(product: str) -> Any:
    """Import the library's module (`tensorrt` or `tensorrt_rtx`); raise `Unavailable` with the package to install."""
    flags = sys.getdlopenflags()
    # TensorRT 8's plugin library refers to functions of cuBLAS and cuDNN that are never called here.
    sys.setdlopenflags(os.RTLD_LAZY)
    try:
        return importlib.import_module(product)
    except ImportError as e:
        if e.name == product:
            raise Unavailable(
                f"{PACKAGE_NAMES[product]} is not installed in this Python; {install(PACKAGE_NAMES[product])}"
            ) from e
        reason = shorten(e, 200)
        raise Unavailable(f"{product} can't be imported ({reason}); is its folder of libraries on the path?") from e
    finally:
        sys.setdlopenflags(flags)


def name_library(trt: Any) -> str:
    """Return the library's name and version, e.g. `TensorRT 8.6.0`."""
    return f"{PRODUCT_NAMES[trt.__name__]} {trt.__version__}"


def is_rtx(trt: Any) -> bool:
    """Return whether the library is TensorRT-RTX.

    It builds without a GPU and compiles kernels on the device that runs the engine.
    """
    return bool(trt.__name__ == "tensorrt_rtx")


class Log:
    """The library's messages: `Log(trt)` returns its only logger, emptied.

    All builders, parsers and runtimes of a process share the first logger given, so each library has one. `errors` and
    `warnings` are in order; `listing` is the last build's layer listing, if the library logs it; `timed` counts timed
    tactics. Nothing is printed.
    """

    errors: list[str]
    warnings: list[str]
    listing: str
    timed: int

    def __new__(cls, trt: Any) -> Any:
        """Return the library's only logger, emptied."""
        log = _make_logger(trt)
        log.clear()
        return log


@lru_cache(maxsize=2)
def _make_logger(trt: Any) -> Any:
    severity = trt.ILogger.Severity
    error_levels = (severity.INTERNAL_ERROR, severity.ERROR)

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.clear()

        def clear(self) -> None:
            self.errors: list[str] = []
            self.warnings: list[str] = []
            self.listing, self.timed = "", 0

        def log(self, level: Any, message: str) -> None:
            if level in error_levels:
                self.errors.append(message)
            elif level == severity.WARNING:
                self.warnings.append(message)
            elif message.startswith("Layers:"):
                self.listing = message
            elif message.startswith("Tactic") and " Time: " in message:
                self.timed += 1

        def reason(self) -> str:
            return find_reason(self.errors)

        def complaint(self) -> str:
            """Return the non-fatal errors so far in one line ("" if none), and clear them."""
            sentence, self.errors = find_reason(self.errors) if self.errors else "", []
            return sentence

    return Logger()


def find_reason(errors: list[str]) -> str:
    """Return one line from an action's errors: the first on memory, else the first, the cause of the others."""
    relevant = [e for e in errors if not NO_DRIVER.search(e) and THREE_LETTERS.search(e)] or errors
    first = next(
        (e for e in relevant if OUT_OF_MEMORY_ERROR.search(e)),
        relevant[0] if relevant else "the library gave no reason",
    )
    text = " ".join(first.split())
    text = re.sub(r"^(\d+: )?(\[\S+\] )?(I\w+::\w+: )?(Error Code \d+: )?", "", text)  # source locations and codes
    text = re.sub(r"\.? ?In \w+ at \S+?:\d+", "", text)
    return shorten(text)


def new_network(trt: Any, builder: Any, typed: bool) -> Any:
    """Return an empty network with an explicit batch: strongly typed (the graph's types) if `typed`."""
    flag_names = trt.NetworkDefinitionCreationFlag
    flags = 0
    if typed:
        flags |= 1 << int(flag_names.STRONGLY_TYPED)
    if hasattr(flag_names, "EXPLICIT_BATCH"):  # required before TensorRT 10, and removed in 11
        flags |= 1 << int(flag_names.EXPLICIT_BATCH)
    return builder.create_network(flags)


def is_typed(trt: Any, route: str) -> bool:
    """Return whether the route's network is strongly typed: not in TensorRT 8, and not with builder flags."""
    return route == "graph" and hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def allow_types(trt: Any, config: Any, precision: str, typed: bool) -> list[str]:
    """Set the builder's flags for a precision and return their names; TF32 is off unless requested.

    Raise `Unavailable` if the version has no such flag or can't compute in the precision.
    """
    flag = trt.BuilderFlag
    config.clear_flag(flag.TF32)
    if precision == "tf32":
        config.set_flag(flag.TF32)
        return ["TF32"]
    names = () if typed else BUILDER_FLAGS.get(precision, ())
    if not typed and precision == "fp8" and _read_major_version(trt) < 9:
        raise Unavailable(
            f"{name_library(trt)} has no fp8; use TensorRT 9 or newer, on a GPU of compute capability 8.9 or newer"
        )
    for name in names:
        if not hasattr(flag, name):
            advice = "" if _read_major_version(trt) < 9 and not is_rtx(trt) else "; give route=graph"
            raise Unavailable(f"{name_library(trt)} has no builder flag for {name.lower()}{advice}")
        config.set_flag(getattr(flag, name))
    return list(names)


def keep_types(trt: Any, config: Any, network: Any) -> int:
    """Prefer FP16 kernels for convolutions with FP16 weights in a weakly typed network; return their number.

    Matrix products stay free: a preference could remove them from the fused subgraphs that attention needs.
    """
    kinds = {trt.LayerType.CONVOLUTION: trt.IConvolutionLayer, trt.LayerType.DECONVOLUTION: trt.IDeconvolutionLayer}
    count = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type not in kinds:
            continue
        layer.__class__ = kinds[layer.type]  # access to this kind's attributes
        if getattr(layer.kernel, "dtype", None) in (np.float16, trt.float16):
            layer.precision = trt.float16
            count += 1
    if count:
        config.set_flag(trt.BuilderFlag.PREFER_PRECISION_CONSTRAINTS)
    return count


def _read_major_version(trt: Any) -> int:
    # RTX has its own version numbers, beginning with TensorRT 10's features.
    return 10 if is_rtx(trt) else int(trt.__version__.split(".")[0])


def configure(trt: Any, config: Any, settings: Settings) -> None:
    """Set all builder options except types and shapes."""
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.builder_optimization_level = settings.optimization
    if settings.workspace_mb:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_mb << 20)
    _set_tactic_sources(trt, config, settings.tactics)
    flags = {
        "VERSION_COMPATIBLE": settings.version_compatible,
        "REFIT": settings.refit,
        "WEIGHT_STREAMING": settings.weight_streaming,
    }
    for name in (name for name, is_enabled in flags.items() if is_enabled):
        if not hasattr(trt.BuilderFlag, name):
            raise Unavailable(f"{name_library(trt)} has no {name.lower()}")
        config.set_flag(getattr(trt.BuilderFlag, name))
    if settings.hardware_compatible:
        config.hardware_compatibility_level = _find_compatibility_level(trt, settings.hardware_compatible)
    if hasattr(trt, "PreviewFeature") and hasattr(trt.PreviewFeature, "PROFILE_SHARING_0806"):
        # Several contexts per dynamic engine; the default in newer versions.
        config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)


def _set_tactic_sources(trt: Any, config: Any, requested: str) -> None:
    sources = dict(trt.TacticSource.__members__)
    if requested:
        source_names = [] if requested == "none" else requested.upper().split("+")
        if unknown_names := [name for name in source_names if name not in sources]:
            names = ", ".join(sources)
            raise UserError(f"{name_library(trt)} has no tactic source {unknown_names[0]}; it has {names} (or none)")
        config.set_tactic_sources(sum(1 << int(sources[name]) for name in source_names))
    elif _read_major_version(trt) < 10:
        mask = sum(1 << int(sources[name]) for name in EXTERNAL_TACTICS if name in sources)
        config.set_tactic_sources(config.get_tactic_sources() & ~mask)


def _find_compatibility_level(trt: Any, requested: str) -> Any:
    levels = dict(trt.HardwareCompatibilityLevel.__members__)
    if requested.upper() not in levels:
        names = ", ".join(name.lower() for name in levels)
        raise UserError(f"{name_library(trt)} has no hardware compatibility level {requested!r}; it has {names}")
    return levels[requested.upper()]


def calibrator_class(trt: Any, method: str) -> Any:
    """Return the library's calibrator class for the method (entropy, minmax).

    Raise `Unavailable` from TensorRT 11 on and in RTX.
    """
    name = {"entropy": "IInt8EntropyCalibrator2", "minmax": "IInt8MinMaxCalibrator"}[method]
    if not hasattr(trt, name):
        raise Unavailable(f"{name_library(trt)} has no calibrator; give route=graph")
    return getattr(trt, name)


def watch(trt: Any, config: Any, report: Callable[[str], None], is_stopped: Callable[[], bool]) -> bool:
    """Report the build's progress and end it when `is_stopped`; return False if unsupported (before TensorRT 10)."""
    if not hasattr(trt, "IProgressMonitor"):
        return False

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps
            report(phase)

        def step_complete(self, phase: str, step: int) -> bool:
            report(f"{phase} {step + 1}/{self.steps.get(phase, 0)}")
            return not is_stopped()

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    monitor = Monitor()
    config.progress_monitor = monitor
    return True


def parse_error(parser: Any, log: Any) -> str:
    """Return the parser's error in one line, with the node and its operator if known."""
    if not parser.num_errors:
        return str(log.reason())
    error, log_text = parser.get_error(0), "\n".join(log.errors)
    text = " ".join(str(error.desc()).split())
    match = re.search(r'While parsing node number (\d+) \[(\w+)(?: -> "([^"]*)")?', log_text)
    if match is None:
        return shorten(text)
    name = re.search(r'Node name: (.*)|^(?:.*\s)?name: "([^"]*)"', log_text, re.MULTILINE)
    node = next((group for group in (name.groups() if name else ()) if group), "") or f"number {match[1]}"
    if re.search("UNSUPPORTED_NODE$", str(error.code())) or "Plugin not found" in text or text == "false":
        return f"it doesn't support the operator {match[2]} of node {node!r}"
    return f"node {node!r} ({match[2]}): {shorten(text)}"


def dtype_name(kind: Any) -> str:
    """Return a tensor's type by its NumPy name, e.g. float16; types missing in NumPy by their usual name."""
    name = str(kind.name)
    return TENSOR_TYPES.get(name, name.lower())


def timing_cache(trt: Any, config: Any, content: bytes) -> Any:
    """Set a timing cache with that content in the config and return it.

    Return None if it doesn't fit or the library has no timing cache.
    """
    if is_rtx(trt):
        return None
    cache = config.create_timing_cache(content)
    return cache if cache is not None and config.set_timing_cache(cache, False) else None


def new_runtime(trt: Any, log: Any) -> Any:
    """Return a runtime that also accepts version-compatible engines, which contain code."""
    runtime = trt.Runtime(log)
    if hasattr(runtime, "engine_host_code_allowed"):
        runtime.engine_host_code_allowed = True
    return runtime


def device_memory(engine: Any) -> int:
    """Return the bytes of scratch memory that one execution context needs."""
    name = "device_memory_size_v2" if hasattr(engine, "device_memory_size_v2") else "device_memory_size"
    return int(getattr(engine, name))


def output_allocator(trt: Any, device: Any) -> Any:
    """Return an allocator for outputs of run-dependent size.

    `address` and `shape` describe the last run's output.
    """

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.address, self.size = 0, 0
            self.shape: tuple[int, ...] = ()

        def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:
            if size > self.size or not self.address:
                self.address, self.size = device.allocate(max(size, 1)), size
            return self.address

        def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(name, memory, size, alignment)

        def notify_shape(self, name: str, shape: Any) -> None:
            self.shape = tuple(int(n) for n in shape)

    return Allocator()
