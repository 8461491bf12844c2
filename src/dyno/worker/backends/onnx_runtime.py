"""ONNX Runtime: an .onnx file on its CPU provider or on a GPU, with input and output memory bound once.

`load` and `facts` need only numpy and onnxruntime, so they work in any Python from 3.10 on.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import system
from dyno.worker.backend import Arrays, Backend, LayerTimes, Session, refuse_requantising
from dyno.worker.extras import ONNX_RUNTIME_BUILDS, load_library
from dyno.worker.facts.engine import WEIGHT_PRECISIONS, EngineFacts, Probe, precision_truth, sum_operations
from dyno.worker.facts.job import LayerGraph
from dyno.worker.inputs.calibration import missing_data
from dyno.worker.inputs.specs import Shape, static_shapes
from dyno.worker.layers import graph
from dyno.worker.makers.onnx_format import route_recipe
from dyno.worker.makers.precision import OPTION_CHECKS, PREPARATION_OPTIONS
from dyno.worker.nets import flops
from dyno.worker.onnx_graph.check import HALF_CRASHES, error_line
from dyno.worker.onnx_graph.graph_facts import accuracy_levels, kernel_shapes
from dyno.worker.option_values import Check, flag, one_of, whole
from dyno.worker.sessions import onnx_runtime_session as cuda
from dyno.worker.sessions import products
from dyno.worker.sessions.onnx_runtime_session import OPTION_CHECKS as CUDA_VALUES
from dyno.worker.sessions.onnx_runtime_session import PACKED_OPERATOR, Kernel, Profile, Request, by_run, events_in
from dyno.worker.sessions.onnx_runtime_session import SESSION_OPTIONS as CUDA_OPTIONS
from dyno.worker.spec import Artifact, Option, Recipe, Tensor, Trial, Unavailable, UserError

ENGINE_NAME = "ONNX Runtime"
PROVIDER_SUFFIX = "ExecutionProvider"
PLUGIN_PROVIDERS = ("openvino", "webgpu", "mlx", "nv_tensorrt_rtx")  # onnxruntime-ep-NAME packages on PyPI
# Providers of all builds, from `get_all_providers` of releases up to 1.30
KNOWN_PROVIDERS = (
    "acl", "armnn", "azure", "cann", "coreml", "cpu", "cuda", "dml", "dnnl", "js", "migraphx", "nnapi",
    "nvtensorrtrtx", "openvino", "qnn", "rknpu", "rocm", "snpe", "tensorrt", "tvm", "vitisai", "vsinpu", "webgpu",
    "webnn", "xnnpack",
)  # fmt: skip
DEFAULT_PROVIDERS = ["CPUExecutionProvider"]
OPTIMIZATION_LEVELS = {
    "all": "ORT_ENABLE_ALL",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    "disable": "ORT_DISABLE_ALL",
}
NUMPY_TYPES = {"float": "float32", "double": "float64"}
RECURRENT_GATES = {"LSTM": 4, "DynamicQuantizeLSTM": 4, "GRU": 3, "RNN": 1}  # matrices per direction
PROFILED_RUNS = 6
DISCARDED_RUNS = 3  # the first run packs weights
# An ONNX file of one node, y = x + x on a float scalar, so that `probe` needs no onnx.
ONE_ADD = bytes.fromhex(
    "08083a2f0a0e0a01780a0178120179220341646412036164645a0b0a017812060a0408011200620b0a017912060a040801120042040a00100d"
)


class OnnxRuntime(Backend):
    """Backend for ONNX files.

    Options: `optimization` (all, extended, basic, disable), `spinning` (default true), `provider` (on a CPU the name of
    any provider of the build or a plug-in; on a GPU cuda or tensorrt) and, on a CPU, `streams` (batches in flight,
    default 1: all threads on one batch). On a GPU also: `slots` (batches in flight, default 3), `conv_search`
    (EXHAUSTIVE, HEURISTIC, DEFAULT) and `nhwc` (default false).
    """

    name = "onnxruntime"
    requires = (ONNX_RUNTIME_BUILDS,)
    precisions = ("fp32", "tf32", "fp16", "int8", *WEIGHT_PRECISIONS)
    file_precisions = ("fp8",)
    devices = ("cpu", "cuda")
    profiled = ("cpu",)
    options = ("optimization", "spinning", "streams", *CUDA_OPTIONS, *PREPARATION_OPTIONS)
    values: Mapping[str, Check] = {
        "optimization": one_of(*OPTIMIZATION_LEVELS), "spinning": flag, "streams": whole(1), **CUDA_VALUES,
        **OPTION_CHECKS,
    }  # fmt: skip
    files = (".onnx",)
    loads_onnx = True

    def refuse(self, trial: Trial) -> str:
        """See `Backend.refuse`; also options for another device, and int8 without data."""
        if reason := super().refuse(trial) or refuse_requantising(trial):
            return reason
        is_on_gpu, provider = trial.runtime.device != "cpu", trial.options.get("provider")
        if "streams" in trial.options and is_on_gpu:
            return "streams are of onnxruntime's CPU provider; on a GPU give slots"
        if provider is not None and not trial.runtime.python:
            _check_name(str(provider))
        if provider is not None and is_on_gpu != (provider in cuda.PROVIDERS):
            device = "cuda:0" if provider in cuda.PROVIDERS else "cpu, as it takes host memory"
            return f"provider={provider} is for --device {device}"
        return missing_data(trial)

    def recipe(self, trial: Trial) -> Recipe:
        """Return the recipe of an ONNX export, converted to the trial's precision for ONNX Runtime."""
        return route_recipe(trial, self.name, lambda file: file)

    def probe(self) -> Probe:
        """Add two numbers on the CPU provider, and on the first GPU, if any."""
        ort = import_library()
        session = ort.InferenceSession(ONE_ADD, _make_quiet_options(ort), providers=DEFAULT_PROVIDERS)
        (out,) = session.run(None, {"x": np.asarray(2, np.float32)})
        devices = ["cpu"] if out == 4 else []
        if cuda.CUDA_PROVIDER in ort.get_available_providers() and cuda.can_add(ort, ONE_ADD, _make_quiet_options(ort)):
            devices.append("cuda:0")
        return Probe(version=ort.__version__, devices=tuple(devices), detail=", ".join(ort.get_available_providers()))

    def prepare(self, trial: Trial) -> None:
        """Import ONNX Runtime."""
        import_library()

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Return a session with the trial's threads, and static shapes even if the file's batch is free.

        Raise `Unavailable` without the library or a kernel, a `UserError` for a missing, corrupt or unsuitable file,
        `MemoryError` when memory runs out.
        """
        ort = import_library()
        path = artifact.path if artifact else trial.model.file
        if not Path(path).is_file():
            raise UserError(f"{path or 'the ONNX file'} does not exist")
        if Path(path).stat().st_size == 0:
            raise UserError(f"{path} is empty, not an ONNX file")
        inputs = artifact.inputs if artifact else ()
        try:
            file = OnnxFile(ort, path, trial, inputs or _read_inputs(ort, path))
            return (
                cuda.CudaSession(file, trial, _read_tensor)
                if trial.runtime.device != "cpu"
                else OnnxRuntimeSession(file)
            )
        except _list_errors() as e:
            raise _loading_error(e, f"{path} can't be loaded") from e

    def layer_graph(self, trial: Trial, artifact: Artifact | None) -> LayerGraph:
        """Return the optimised graph, with the types and shapes of a profiled run; see `load`."""
        session = self.load(trial, artifact)
        try:
            return session.layer_graph()  # type: ignore[attr-defined, no-any-return]
        finally:
            session.close()


ONNX_RUNTIME = OnnxRuntime()


class OnnxFile:
    """An .onnx file with the trial's settings, and the facts on its optimised graph."""

    def __init__(self, ort: Any, path: str, trial: Trial, inputs: tuple[Tensor, ...]) -> None:
        self.ort, self.path, self.requested = ort, path, trial.precision
        # Batch 0: the batch stays free and may change between runs
        self.has_free_batch = trial.dims.batch == 0
        self.shapes = static_shapes(inputs, replace(trial.dims, batch=trial.dims.batch or 1))
        self.provider = find_provider(ort, trial)
        self.providers = [self.provider.name, *DEFAULT_PROVIDERS] if self.provider else DEFAULT_PROVIDERS
        self._overrides = {} if self.has_free_batch else find_overrides(inputs, self.shapes)
        self.settings = make_settings(trial)

    def open(
        self, providers: Any, profile: str = "", graph_path: str = "", assigned: bool = False, network: bytes = b""
    ) -> Any:
        """Return an InferenceSession of the file, or of another `network` with the same settings.

        `profile` is the prefix of the profile's file, `graph_path` the path of the written optimised graph. With
        `assigned`, the library records each node's provider.
        """
        options = _make_quiet_options(self.ort)
        options.intra_op_num_threads = self.settings["intra_op_threads"]
        options.inter_op_num_threads = self.settings["inter_op_threads"]
        options.execution_mode = self.ort.ExecutionMode.ORT_SEQUENTIAL
        level = OPTIMIZATION_LEVELS[self.settings["optimization"]]
        options.graph_optimization_level = getattr(self.ort.GraphOptimizationLevel, level)
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(self.settings["spinning"])))
        for name, size in self._overrides.items():
            options.add_free_dimension_override_by_name(name, size)
        if profile:
            options.enable_profiling, options.profile_file_prefix = True, profile
        if graph_path:
            options.optimized_model_filepath = graph_path
        if assigned:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        disabled_names = self.settings["disabled_optimizers"]
        if self.provider and self.provider.devices:
            options.add_provider_for_devices([*self.provider.devices], {})
            providers = None
        source = network or self.path
        return self.ort.InferenceSession(source, options, providers=providers, disabled_optimizers=disabled_names)

    def facts(self, providers: Any, feeds: Arrays) -> EngineFacts:
        """Return layers, types, providers and time by operator, from the profile of a second, short session."""
        with tempfile.TemporaryDirectory() as scratch:
            nodes = self.read_profile(self._record_profile(providers, feeds, scratch))
        node_counts = self._count_assigned(providers)
        operations, bits = _sum_operations(nodes, self.path), self._measure_bits(providers)
        return EngineFacts(
            layers=len(nodes.kernel_args),
            layers_by_type=nodes.by_type(),
            operations_by_type=operations,
            product_bits=bits,
            nodes_by_provider=node_counts or nodes.by_provider(),
            fallback=describe_fallback(_first_provider(providers), node_counts),
            operators=nodes.count_operators(),
            time_by_operator=nodes.time_by_operator(),
            precision_truth=precision_truth(self.requested, nodes.by_type(), ENGINE_NAME, operations, bits),
            threads=self.settings["intra_op_threads"],
            options=dict(self.settings),
            notes=tuple(nodes.notes()),
        )

    def _count_assigned(self, providers: Any) -> dict[str, int]:
        """Return the number of the graph's nodes by provider, as reported by the library.

        A provider may fuse many nodes into one, which a profile counts once. Empty for the CPU's own provider, and in
        versions without the report.
        """
        can_report = hasattr(self.ort.InferenceSession, "get_provider_graph_assignment_info")
        if _first_provider(providers) in DEFAULT_PROVIDERS or not can_report:
            return {}
        counts = Counter[str]()
        for subgraph in self.open(providers, assigned=True).get_provider_graph_assignment_info():
            counts[subgraph.ep_name] += len(subgraph.get_nodes())
        return dict(counts)

    def _measure_bits(self, providers: Any) -> int | None:
        """Return the bits that float32 products keep with these settings; None for another type or on an error."""
        if self.requested not in ("fp32", "tf32"):
            return None
        with suppress(*_list_errors()):
            return products.count_bits(
                self.open(providers, network=products.NETWORK_BYTES).run(None, products.make_factors())
            )
        return None

    def layer_graph(self, providers: Any, feeds: Arrays) -> LayerGraph:
        """Return the optimised graph, with each node's entry in a profile of its run."""
        with tempfile.TemporaryDirectory() as scratch:
            path = f"{scratch}/optimised.onnx"
            return self.read_optimised(path, self.read_profile(self._record_profile(providers, feeds, scratch, path)))

    def read_profile(self, events: list[dict[str, Any]]) -> Profile:
        """Return the profile, with the type of packed products' arithmetic, for which it needs onnx."""
        has_packed = any(e.get("args", {}).get("op_name") == PACKED_OPERATOR for e in events)
        return Profile(events, self.requested, accuracy_levels(self.path) if has_packed else None)

    def read_optimised(self, path: str, profile: Profile) -> LayerGraph:
        """Read the optimised graph at `path`, with each node's entry in the profile."""
        return graph.read_optimised_graph(path, self.path, profile, f"{ENGINE_NAME} {self.ort.__version__}")

    def _record_profile(self, providers: Any, feeds: Arrays, scratch: str, path: str = "") -> list[dict[str, Any]]:
        rng = np.random.default_rng(0)
        session = self.open(providers, f"{scratch}/profile", path)
        inputs = [_read_tensor(arg) for arg in session.get_inputs()]
        random_feeds = {t.name: rng.standard_normal(self.shapes[t.name]).astype(t.dtype) for t in inputs}
        for _ in range(PROFILED_RUNS):
            session.run(None, random_feeds | dict(feeds))
        return _end_profile(session)


def _sum_operations(nodes: Profile, path: str) -> dict[str, int]:
    """Return the operations of one run by type; {} if unknown, or if all layers have one type."""
    if len(nodes.by_type()) < 2 or not nodes.kernel_args.keys() <= nodes.outer.keys():  # nested branches or loops
        return {}
    kernels = kernel_shapes(path)
    return sum_operations((kind, _count_operations(key, nodes, kernels)) for key, kind in nodes.computed_in.items())


def _count_operations(kernel: Kernel, nodes: Profile, kernels: Mapping[str, Shape]) -> int | None:
    """Return the operations of a compute node, from the shapes in the profile; None if unknown.

    The profile lacks packed weights: products don't need them, and convolutions take theirs from the file. Channels
    that the library pads count, since it computes them.
    """
    args = nodes.kernel_args[kernel]
    operator, shapes, results = args["op_name"], _list_shapes(args, "input"), _list_shapes(args, "output")
    if not shapes or not results:
        return None
    result = results[0]
    if "Conv" in operator:
        name = re.sub(r"_token_\d+$", "", kernel[0].removesuffix("_kernel_time"))
        weights = kernels.get(name) or next((shape for shape in shapes[1:] if len(shape) > 2), (0,))
        return flops.of_convolution(math.prod(weights), weights[0], shapes[0] if "Transpose" in operator else result)
    if operator in RECURRENT_GATES and len(result) > 2:  # [steps, batch, values] to [steps, directions, batch, hidden]
        gates = RECURRENT_GATES[operator] * result[-1] * result[-3]
        return 2 * math.prod(shapes[0][:2]) * gates * (shapes[0][-1] + result[-1])
    if "Gemm" in operator or "MatMul" in operator:
        factors = [shape for shape in shapes[1:] if len(shape) > 1 and "Gemm" not in operator]
        return flops.of_product(shapes[0], factors[0] if factors else (), result)
    return None


def _list_shapes(args: Mapping[str, Any], side: str) -> list[Shape]:
    return [tuple(shape) for each in args.get(f"{side}_type_shape", ()) for shape in each.values()]


class OnnxRuntimeSession(Session):
    """One InferenceSession on the CPU and a request per stream; several streams have a thread each."""

    def __init__(self, file: OnnxFile, profile: str = "", graph_path: str = "") -> None:
        self._file = file
        self._session = file.open(file.providers, profile, graph_path)
        if file.provider and file.provider.name not in self._session.get_providers():
            raise Unavailable(f"ONNX Runtime left {file.provider.name} out: it has no device or library here")
        inputs = tuple(map(_read_tensor, self._session.get_inputs()))
        self.inputs = inputs if file.has_free_batch else tuple(replace(t, shape=file.shapes[t.name]) for t in inputs)
        self.outputs = tuple(_read_tensor(arg) for arg in self._session.get_outputs())
        self._errors = _list_errors()
        self.slots = file.settings["streams"]
        self._requests = [Request(self._session, self.outputs) for _ in range(self.slots)]
        self._threads = ThreadPoolExecutor(self.slots) if self.slots > 1 else None
        self._running: dict[int, Future[None]] = {}

    def reshape(self, shapes: Mapping[str, Shape]) -> None:
        """See `Session.reshape`."""
        if not self._file.has_free_batch and dict(shapes) != self._file.shapes:
            super().reshape(shapes)
        self._file.shapes = dict(shapes)

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Bind the feeds to the slot, held until its next `bind`; they are copied only to change their type."""
        self._requests[slot].bind(feeds, self.inputs, self._file.shapes)

    def run(self, slot: int = 0) -> None:
        """Run to the end, or with several streams start the run; raise `MemoryError` when memory runs out."""
        if self._threads is None:
            self._finish_run(self._requests[slot].run)
        else:
            self._running[slot] = self._threads.submit(self._requests[slot].run)

    def wait(self, slot: int = 0) -> None:
        """Wait until the slot has run; raise `MemoryError` when memory runs out."""
        if slot in self._running:
            self._finish_run(self._running.pop(slot).result)

    def complete(self, slot: int = 0) -> None:
        """See `Session.complete`; not in the slot's own thread."""
        self._finish_run(self._requests[slot].run)

    def _finish_run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except self._errors as e:
            _raise_if_memory(e, f"{self._file.path} stopped while running")
            raise

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """Return the slot's output arrays themselves, valid until it runs again."""
        return self._requests[slot].fetch()

    def facts(self) -> EngineFacts:
        """See `OnnxFile.facts`."""
        return self._file.facts(self._file.providers, self._requests[0].feeds)

    def layer_graph(self) -> LayerGraph:
        """See `OnnxFile.layer_graph`."""
        return self._file.layer_graph(self._file.providers, self._requests[0].feeds)

    def profile(self, runs: int) -> LayerTimes:
        """Time the nodes' kernels in a second, equal session, by ONNX Runtime's profiler."""
        with tempfile.TemporaryDirectory() as scratch:
            path = f"{scratch}/optimised.onnx"
            session = OnnxRuntimeSession(self._file, f"{scratch}/profile", path)
            session.bind(self._requests[0].feeds)
            run_times = []
            for _ in range(DISCARDED_RUNS + runs):
                start = time.perf_counter()
                session.run()
                session.wait()
                run_times.append(time.perf_counter() - start)
            events = _end_profile(session._session)
            session.close()
            layer_graph = self._file.read_optimised(path, self._file.read_profile(events))
        repeats = by_run(events)[DISCARDED_RUNS:]
        kernels = graph.list_kernels(layer_graph.layers, set().union(*repeats), self._file.path)
        layers = [[repeat.get(kernel, 0.0) if kernel else 0.0 for kernel in kernels] for repeat in repeats]
        note = f"{ENGINE_NAME} counts whole microseconds."
        return LayerTimes(layer_graph, np.array(layers), np.array(run_times[DISCARDED_RUNS:]), note)

    def close(self) -> None:
        """Free the session and its bindings."""
        if self._threads is not None:
            self._threads.shutdown()
        self._requests.clear()
        del self._session


@dataclass(frozen=True)
class Provider:
    """An execution provider by its full name, with a plug-in's devices on this machine."""

    name: str
    devices: tuple[Any, ...] = ()


def _shorten(provider: str) -> str:
    return provider.removesuffix(PROVIDER_SUFFIX).lower()


def _check_name(provider: str) -> None:
    """Raise a `UserError` for a provider unknown to all releases of ONNX Runtime and this Python's plug-ins."""
    key = _shorten(provider)
    if key in (*KNOWN_PROVIDERS, *PLUGIN_PROVIDERS) or importlib.util.find_spec(f"onnxruntime_ep_{key}"):
        return
    with suppress(Unavailable):  # later releases may have more
        os.environ.update(system.SILENCING_VARIABLES)
        if key in map(_shorten, import_library().get_all_providers()):
            return
    similar = difflib.get_close_matches(key, KNOWN_PROVIDERS, 1)
    raise UserError(
        f"provider={provider}: ONNX Runtime has no such provider, and the plug-in onnxruntime_ep_{key} is not "
        f"installed; " + (f"did you mean {similar[0]}?" if similar else f"known: {', '.join(KNOWN_PROVIDERS)}")
    )


def find_provider(ort: Any, trial: Trial) -> Provider | None:
    """Return the trial's provider for a CPU session; None for the default.

    A plug-in is the package `onnxruntime_ep_NAME`. Raise `Unavailable` if the library lacks the provider, or if it
    finds no device.
    """
    provider = trial.options.get("provider")
    if provider is None or trial.runtime.device != "cpu":
        return None
    key = _shorten(str(provider))
    providers = {_shorten(name): name for name in ort.get_available_providers()}
    if key in providers:
        return Provider(providers[key])
    package = f"onnxruntime_ep_{key}"
    try:
        plugin = importlib.import_module(package)
    except ImportError:
        known_names = ", ".join(sorted(providers))
        cure = f"pip install {package.replace('_', '-')}" if key in PLUGIN_PROVIDERS else "another build may have it"
        raise Unavailable(f"this onnxruntime has no provider {provider} (it has {known_names}); {cure}") from None
    if not hasattr(ort, "register_execution_provider_library"):
        raise Unavailable(f"onnxruntime {ort.__version__} takes no plug-ins; install 1.23 or newer")
    names = plugin.get_ep_names()
    if not any(device.ep_name in names for device in ort.get_ep_devices()):
        with suppress(*_list_errors()):  # already registered by an earlier session, without a device
            ort.register_execution_provider_library(package, str(plugin.get_library_path()))
    devices = tuple(device for device in ort.get_ep_devices() if device.ep_name in names)
    if not devices:
        raise Unavailable(f"{', '.join(names)} is registered, but finds no device here")
    return Provider(devices[0].ep_name, devices)


def _first_provider(providers: Any) -> str:
    """Return the name of a session's first provider, given with or without options."""
    first = providers[0]
    return first if isinstance(first, str) else str(first[0])


def describe_fallback(provider: str, node_counts: Mapping[str, int]) -> str:
    """Return a sentence if most nodes went to other providers; "" if `provider` has at least half."""
    count, total = node_counts.get(provider, 0), sum(node_counts.values())
    return "" if 2 * count >= total else f"{count} of {total} nodes on {provider}: this is the CPU's speed"


def _end_profile(session: Any) -> list[dict[str, Any]]:
    return events_in(Path(session.end_profiling()).read_text(encoding="utf-8"))


def import_library() -> Any:
    """Import ONNX Runtime; raise `Unavailable` with the command to install it."""
    return load_library("onnxruntime")


def _make_quiet_options(ort: Any) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def make_settings(trial: Trial) -> dict[str, Any]:
    """Return the session's settings for the trial, by Dyno's names; raise a `UserError` for invalid options."""
    level: Option = trial.options.get("optimization", "all")
    streams, max_streams = int(trial.options.get("streams", 1)), max(trial.runtime.threads, 1)
    if not 1 <= streams <= max_streams:
        raise UserError(f"onnxruntime's streams must be from 1 to the number of threads ({max_streams}), not {streams}")
    if level not in OPTIMIZATION_LEVELS:
        raise UserError(f"unknown optimization {level!r} of onnxruntime; known: {', '.join(OPTIMIZATION_LEVELS)}")
    return {
        "optimization": level,
        "spinning": bool(trial.options.get("spinning", True)),
        "streams": streams,
        "intra_op_threads": trial.runtime.threads - streams + 1,  # with the streams' own threads, `threads` in all
        "inter_op_threads": 1,
        "execution_mode": "sequential",
        "disabled_optimizers": [*HALF_CRASHES] if trial.precision == "fp16" and trial.runtime.device == "cpu" else [],
    }


def _read_inputs(ort: Any, path: str) -> tuple[Tensor, ...]:
    """Read the inputs of a file: an unoptimised session is the cheapest way to read them without onnx."""
    options = _make_quiet_options(ort)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return tuple(_read_tensor(arg) for arg in session.get_inputs())


def _read_tensor(arg: Any) -> Tensor:
    kind = re.fullmatch(r"tensor\((\w+)\)", arg.type)
    if kind is None or kind[1] in ("string", "bfloat16"):
        raise UserError(f"{arg.name!r} is a {arg.type}, which can't be fed from or read into an array")
    # A nameless free dimension is None; a batch of 0 is free, too.
    shape = tuple("" if size is None or (size == 0 and not axis) else size for axis, size in enumerate(arg.shape))
    return Tensor(arg.name, NUMPY_TYPES.get(kind[1], kind[1]), shape)


def find_overrides(inputs: tuple[Tensor, ...], shapes: dict[str, Shape]) -> dict[str, int]:
    """Return the size of each named free dimension; raise a `UserError` for a name with two sizes.

    Some tools give all free dimensions one name, such as PaddlePaddle's `?`. If an input's batch and another of its
    axes share a name, it gets a size only if they have equal sizes.
    """
    sizes: dict[str, list[int]] = {}
    for tensor in inputs:
        for name, size in zip(tensor.shape, shapes[tensor.name], strict=True):
            if isinstance(name, str) and name and size not in (name_sizes := sizes.setdefault(name, [])):
                name_sizes.append(size)
    shared_names = {"?", *(t.shape[0] for t in inputs if t.shape[:1] and t.shape[0] in t.shape[1:])}
    for name, (size, *rest) in sizes.items():
        if rest and name not in shared_names:
            raise UserError(f"dimension {name!r} can't be both {size} and {rest[0]}; make the --shapes agree")
    return {name: size for name, (size, *rest) in sizes.items() if not rest}


def _list_errors() -> tuple[type[Exception], ...]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = "Fail InvalidArgument NoSuchFile InvalidProtobuf InvalidGraph NotImplemented RuntimeException EPFail"
    # With IO binding, a run's errors are plain RuntimeErrors.
    return (RuntimeError, *(getattr(state, name) for name in names.split() if hasattr(state, name)))


def _raise_if_memory(error: Exception, message: str) -> None:
    if re.search("[Ff]ailed to allocate memory|bad_alloc|[Oo]ut of memory", str(error)):
        text = " ".join(str(error).split())
        raise MemoryError(f"{message}: ONNX Runtime could not allocate memory ({text[-120:]})") from error


def _loading_error(error: Exception, message: str) -> Exception:
    """Return a loading error of the library as a Dyno error, in one line."""
    _raise_if_memory(error, message)
    text = error_line(error)
    if type(error).__name__ == "NotImplemented":
        return Unavailable(f"{message}: ONNX Runtime has no kernel for it here ({text})")
    return UserError(f"{message}: {text}")
