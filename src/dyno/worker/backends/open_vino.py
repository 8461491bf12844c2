"""OpenVINO on the CPU: an IR (see `open_vino_files`), compiled for the trial's shape and precision."""

from __future__ import annotations

import importlib.metadata
import math
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import Arrays, Backend, LayerTimes, Session, refuse_requantising
from dyno.worker.extras import load_library
from dyno.worker.facts.engine import (
    ARITHMETIC_TYPES,
    QUANTISED_PRECISIONS,
    UNKNOWN_TYPE,
    WEIGHT_PRECISIONS,
    EngineFacts,
    Probe,
    precision_truth,
    sum_operations,
    why_not_faster,
)
from dyno.worker.facts.job import LAYERS, Layer, LayerGraph, Port
from dyno.worker.inputs.calibration import missing_data
from dyno.worker.inputs.specs import fit_feed, static_shapes
from dyno.worker.makers.onnx_format import route_recipe
from dyno.worker.makers.precision import OPTION_CHECKS, PREPARATION_OPTIONS
from dyno.worker.nets import flops
from dyno.worker.option_values import Check, flag, whole
from dyno.worker.sessions import products
from dyno.worker.spec import Artifact, Recipe, Runtime, Tensor, Trial, Unavailable, UserError, shorten

# OpenVINO's execution graph: fused layers with their type, layout and kernel

TYPE_NAMES = {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64", "i8": "int8", "u8": "int8", "i4": "int4",
    "u4": "int4", "nf4": "float4", "f4e2m1": "float4", "u2": "int2", "f8e4m3": "float8", "f8e5m2": "float8",
}  # fmt: skip
NARROW_TYPES = {"float16", "float8", "float4", "int8", "int4", "int2"}  # weight types that a kernel may widen
ENCLOSING_LAYERS = ("If", "Loop", "TensorIterator")  # layers with an inner graph, opaque in OpenVINO's listing
COMPUTE_KERNELS = re.compile(
    "Convolution|Deconvolution|FullyConnected|MatMul|MHA|ScaledDotProduct|QKVProj|LLMMLP|LSTM|GRU|RNN"
)
NOT_LAYERS = {"Const", "Input", "Output"}
PASSING_KERNELS = ("unknown", "undef", "reorder")  # kernel names of layers that only pass a tensor on
CONVERSION_LAYERS = ("FakeQuantize", "Convert", "Reorder")


class ExecutionGraph:
    """OpenVINO's compiled model: fused layers with their type and kernel."""

    def __init__(self, runtime_model: Any, requested: str) -> None:
        self._requested, self._ops = requested, runtime_model.get_ordered_ops()
        self._infos = [{key: str(to_plain(value)) for key, value in op.get_rt_info().items()} for op in self._ops]
        # Operations folded into constants or memory layouts stay in the graph, marked as not executed.
        self.layers = [info for info in self._infos if _read_kind(info) not in NOT_LAYERS and not _is_skipped(info)]

    def compute(self) -> list[dict[str, str]]:
        """Return compute layers (convolution, matrix product…), and layers that may hide some.

        Products of indices and shapes are left out.
        """
        kinds = (*ARITHMETIC_TYPES, UNKNOWN_TYPE)
        return [layer for layer in self.layers if _is_compute_layer(layer) and _computed_in(layer) in kinds]

    def by_type(self) -> dict[str, int]:
        """Return the number of compute layers by their type at run time; 8-bit ones, signed or not, as `int8`."""
        return dict(Counter(_computed_in(layer) for layer in self.compute()))

    def operations_by_type(self) -> dict[str, int]:
        """Return the operations of one run by type; {} if unknown, or if all layers have one type."""
        if len(self.by_type()) < 2:
            return {}
        layers = [pair for pair in zip(self._ops, self._infos, strict=True) if pair[1] in self.compute()]
        return sum_operations((_computed_in(info), _count_operations(op, info["layerType"])) for op, info in layers)

    def time_by_operator(self) -> dict[str, float]:
        """Return each layer kind's share of the layers' time, largest first."""
        times: dict[str, float] = defaultdict(float)
        for layer in self.layers:
            times[layer["layerType"]] += _parse_number(layer.get("execTimeMcs", ""))
        total = sum(times.values()) or 1.0
        return {kind: round(t / total, 4) for kind, t in sorted(times.items(), key=lambda kv: -kv[1]) if t}

    def notes(self) -> list[str]:
        """Return sentences on why a lower precision isn't faster."""
        compute = [(layer["layerType"], _computed_in(layer)) for layer in self.compute()]
        return why_not_faster(self._requested, compute, self.time_by_operator(), CONVERSION_LAYERS)

    def layer_graph(self, library: str) -> LayerGraph:
        """Return the graph's layers without constants; layers that OpenVINO kept but doesn't run are `skipped`."""
        constants, layers, weight_counts = set[str](), list[Layer](), dict[str, int]()
        for op, info in zip(self._ops, self._infos, strict=True):
            sources = [port.get_source_output() for port in op.inputs()]
            inputs = [port for port in sources if _read_name(port) not in constants]
            weights = [port for port in sources if _read_name(port) in constants]
            if _read_kind(info) == "Const" or (sources and not inputs):
                constants.add(op.get_friendly_name())
            elif _read_kind(info) not in NOT_LAYERS:
                layer = self._build_layer(op, info, inputs, weights)
                old_count = sum(weight_counts.values())
                weight_counts |= {
                    _read_name(port): _count_weights(port) for port in weights if layer.type not in CONVERSION_LAYERS
                }
                layers.append(replace(layer, shared=layer.parameters + old_count - sum(weight_counts.values())))
        return LayerGraph(form=LAYERS, library=library, parameters=sum(weight_counts.values()), layers=tuple(layers))

    def _build_layer(self, op: Any, info: dict[str, str], inputs: list[Any], weights: list[Any]) -> Layer:
        name, kind = op.get_friendly_name(), _read_kind(info)
        layouts, types = info.get("outputLayouts", "").split(","), info.get("outputPrecisions", "").split(",")
        return Layer(
            name=name,
            type=kind,
            inputs=tuple(_read_port(port) for port in inputs),
            outputs=tuple(
                Port(_format_label(name, k), tuple(port.shape), TYPE_NAMES.get(kind, kind), layout)
                for k, (port, kind, layout) in enumerate(_iter_outputs(op.outputs(), types, layouts))
            ),
            parameters=0 if kind in CONVERSION_LAYERS else sum(map(_count_weights, weights)),
            computes_in=_computed_in(info) if COMPUTE_KERNELS.search(kind) else "",
            tactic=info.get("primitiveType", ""),
            moves=kind in ("Reorder", "Convert"),
            skipped=_is_skipped(info),
            nodes=tuple(filter(None, info.get("originalLayersNames", "").split(","))),
        )


def _count_operations(op: Any, kind: str) -> int | None:
    """Return the operations of a convolution or a matrix product; None for another layer."""
    first, second = (tuple(port.get_source_output().get_shape()) for port in op.inputs()[:2])
    result = tuple(op.outputs()[0].get_shape())
    if kind in ("Convolution", "Deconvolution"):
        values = first if kind == "Deconvolution" else result
        return flops.of_convolution(math.prod(second), values[1], values)
    return flops.of_product(first, second, result) if kind in ("FullyConnected", "MatMul") else None


def _count_weights(port: Any) -> int:
    """Return the number of weights in a constant; 0 for indices or a single number."""
    count = math.prod(port.shape)
    return count if count > 1 and _read_port(port).dtype in ARITHMETIC_TYPES else 0


def _read_kind(info: dict[str, str]) -> str:
    return info.get("layerType", "Const")


def _is_skipped(info: dict[str, str]) -> bool:
    """Return whether the layer runs nothing.

    OpenVINO also reports layers of less than a microsecond as not executed, but those have a kernel.
    """
    kernel = info.get("primitiveType", "")
    return info.get("execTimeMcs") == "not_executed" and (not kernel or kernel.startswith(PASSING_KERNELS))


def _iter_outputs(ports: list[Any], types: list[str], layouts: list[str]) -> Iterator[tuple[Any, str, str]]:
    """Yield each output with its type and layout; the library lists equal ones once."""
    for k, port in enumerate(ports):
        yield port, types[min(k, len(types) - 1)], layouts[min(k, len(layouts) - 1)]


def _read_name(port: Any) -> str:
    return str(port.get_node().get_friendly_name())


def _format_label(name: str, index: int) -> str:
    return f"{name}:{index}" if index else name


def _read_port(source: Any) -> Port:
    info = {key: str(to_plain(value)) for key, value in source.get_node().get_rt_info().items()}
    kind = info.get("outputPrecisions", "").split(",")[0]
    label = _format_label(_read_name(source), source.get_index())
    return Port(label, tuple(source.shape), TYPE_NAMES.get(kind, kind), info.get("outputLayouts", "").split(",")[0])


def _computed_in(layer: dict[str, str]) -> str:
    """Return the type of a layer's products.

    If a kernel widens weights, the library reports the weights' type.
    """
    if layer["layerType"] in ENCLOSING_LAYERS:
        return UNKNOWN_TYPE
    kind = TYPE_NAMES.get(layer["runtimePrecision"], layer["runtimePrecision"])
    kernel = TYPE_NAMES.get(layer.get("primitiveType", "").lower().rpartition("_")[2], kind)
    return kernel if kind in NARROW_TYPES else kind


def _is_compute_layer(layer: dict[str, str]) -> bool:
    return layer["layerType"] in ENCLOSING_LAYERS or bool(COMPUTE_KERNELS.search(layer["layerType"]))


def _parse_number(text: str) -> float:
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def to_plain(value: Any) -> Any:
    """Return a property or rt_info value as a string, number or bool, for JSON."""
    value = getattr(value, "value", value)
    if isinstance(value, (bool, int, float, str)):
        return value
    return value.get_type_name() if hasattr(value, "get_type_name") else getattr(value, "name", str(value))


ENGINE_NAME = "OpenVINO"
# By default OpenVINO runs an FP32 model in bfloat16 if the CPU supports it, so every precision is set explicitly.
PRECISION_HINTS = {
    "fp32": "f32",
    "bf16": "bf16",
    "fp16": "f16",
    **dict.fromkeys(("int8", "fp8", *WEIGHT_PRECISIONS), "f32"),
}
# Capability of the CPU plugin without which a hint is ignored
PRECISION_CAPABILITIES = {"bf16": "BF16", "fp16": "FP16"}
# NumPy's types by element type
NUMPY_TYPES = {"boolean": "bool"} | {
    f"{np.dtype(name).kind}{8 * np.dtype(name).itemsize}": name
    for name in "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
}
PROFILED_RUNS = 3
# OpenVINO reports a layer's mean since compilation, in whole microseconds: each repeat of a profile compiles anew.
PROFILE_REPEATS, DISCARDED_RUNS = 5, 2
RECORDED_PROPERTIES = (
    "INFERENCE_PRECISION_HINT INFERENCE_NUM_THREADS NUM_STREAMS PERFORMANCE_HINT ENABLE_CPU_PINNING".split()
)


class OpenVino(Backend):
    """OpenVINO's backend. Options: `streams` (default 1: all threads on one batch), `pinning` (default: OpenVINO's)."""

    name = "openvino"
    requires = ("openvino",)
    precisions = ("fp32", "bf16", "fp16", "int8", *WEIGHT_PRECISIONS)
    file_precisions = ("fp8",)
    profiled = ("cpu",)
    options = ("streams", "pinning", *PREPARATION_OPTIONS)
    values: Mapping[str, Check] = {"streams": whole(1), "pinning": flag, **OPTION_CHECKS}
    files = (".onnx", ".xml")
    loads_onnx = True

    def refuse(self, trial: Trial) -> str:
        """See `Backend.refuse`; also int8 from an IR or without data."""
        if reason := super().refuse(trial) or refuse_requantising(trial):
            return reason
        if trial.model.file.endswith(".xml") and trial.precision == "int8" != trial.model.precision:
            return "an IR can't be quantised here; give the ONNX file or the module it was made from"
        return missing_data(trial)

    def recipe(self, trial: Trial) -> Recipe:
        """Return the recipe from ONNX to IR; an IR as model is used unchanged.

        FP32, BF16 and FP16 share one IR: the compilation chooses the type.
        """
        # The conversion runs in OpenVINO's Python, perhaps another one than the export's.
        runtime = Runtime(name=trial.runtime.name, python=trial.runtime.python, env=trial.runtime.env)
        precision = trial.precision if trial.precision in QUANTISED_PRECISIONS else "fp32"
        ir = Recipe(self.name, "openvino", precision, trial.model, replace(trial.dims, batch=0), runtime=runtime)
        if trial.model.file.endswith(".xml"):
            return ir
        return route_recipe(
            replace(trial, precision=precision), self.name, lambda file: replace(ir, dims=file.dims, parent=file)
        )

    def probe(self) -> Probe:
        """Add two numbers on the CPU device."""
        ov, core = import_library(), _create_core()
        x = ov.opset13.parameter([], np.float32)
        compiled = core.compile_model(ov.Model([ov.opset13.add(x, x)], [x]), "CPU")
        out = next(iter(compiled([np.asarray(2, np.float32)]).values()))
        capabilities = " ".join(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
        detail = f"{core.get_property('CPU', 'FULL_DEVICE_NAME')}: {capabilities}"
        return Probe(version=read_version(), devices=("cpu",) if out == 4 else (), detail=detail)

    def prepare(self, trial: Trial) -> None:
        """Import OpenVINO, without its telemetry."""
        import_library()

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Compile for the trial's static shapes, precision and threads.

        Raise `Unavailable` without the library or the instructions, a `UserError` for a missing, corrupt or unsuitable
        file, `MemoryError` when memory runs out.
        """
        ov = import_library()
        if not _computes_in(trial.precision) and trial.precision != trial.model.precision:
            names = _create_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
            raise Unavailable(f"OpenVINO doesn't compute in {trial.precision} on this CPU (it has {', '.join(names)})")
        model = read_model(ov, artifact.path if artifact else trial.model.file)
        try:
            return OpenVinoSession(ov, model, trial)
        except RuntimeError as e:
            raise _loading_error(e, f"{trial.model.name} can't be compiled") from e

    def layer_graph(self, trial: Trial, artifact: Artifact | None) -> LayerGraph:
        """Return the execution graph after a run with counters, which mark executed layers; see `load`."""
        session = self.load(trial, artifact)
        assert isinstance(session, OpenVinoSession)
        try:
            return ExecutionGraph(session.execution_graph(), trial.precision).layer_graph(f"OpenVINO {read_version()}")
        finally:
            session.close()


OPENVINO = OpenVino()


class OpenVinoSession(Session):
    """One compiled model and a request per stream; inputs are read in place."""

    def __init__(self, ov: Any, model: Any, trial: Trial) -> None:
        self._ov, self._model, self._requested = ov, model, trial.precision
        ports = tensors_of(model.inputs)
        self._shapes = static_shapes(ports, trial.dims)
        model.reshape({port: list(self._shapes[t.name]) for port, t in zip(model.inputs, ports, strict=True)})
        self._settings = make_settings(trial)
        self._compiled = _create_core().compile_model(model, "CPU", self._settings)
        self.inputs, self.outputs = tensors_of(model.inputs), tensors_of(model.outputs)
        self.slots = int(self._settings["NUM_STREAMS"])
        self._requests = [self._compiled.create_infer_request() for _ in range(self.slots)]
        # A shared tensor doesn't own its memory: the arrays are kept until the slot is bound again.
        self._bound: list[dict[str, tuple[np.ndarray, Any]]] = [{} for _ in range(self.slots)]

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Bind the feeds to the slot's request, held until its next `bind`; copied only to change their type."""
        for port, tensor in zip(self._compiled.inputs, self.inputs, strict=True):
            feed = fit_feed(feeds, tensor, self._shapes[tensor.name])
            view = self._ov.Tensor(feed, shared_memory=True)
            self._requests[slot].set_tensor(port, view)
            self._bound[slot][tensor.name] = (feed, view)

    def run(self, slot: int = 0) -> None:
        """Start the slot's request on OpenVINO's threads; raise `MemoryError` when memory runs out."""
        if self.slots > 1:
            self._requests[slot].start_async()
            return
        # Without overlap, the synchronous call does the same, 12 µs faster.
        try:
            self._requests[0].infer(share_outputs=True)
        except RuntimeError as e:
            _raise_if_memory(e, "the model stopped while running")
            raise

    def wait(self, slot: int = 0) -> None:
        """Wait until the slot's request is done; raise `MemoryError` when memory runs out."""
        if self.slots == 1:
            return
        try:
            self._requests[slot].wait()
        except RuntimeError as e:
            _raise_if_memory(e, "the model stopped while running")
            raise

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """Return the request's own output memory as arrays, valid until the slot runs again."""
        request = self._requests[slot]
        ports = zip(self._compiled.outputs, self.outputs, strict=True)
        return {tensor.name: request.get_tensor(port).data for port, tensor in ports}

    def facts(self) -> EngineFacts:
        """Return layers, types and times from the execution graph of a second compilation with counters."""
        graph = ExecutionGraph(self.execution_graph(), self._requested)
        settings = {name: to_plain(self._compiled.get_property(name)) for name in RECORDED_PROPERTIES}
        operations, bits = graph.operations_by_type(), self._measure_bits()
        return EngineFacts(
            layers=len(graph.layers),
            layers_by_type=graph.by_type(),
            operations_by_type=operations,
            product_bits=bits,
            nodes_by_provider={"CPU": len(graph.layers)},
            operators=dict(Counter(layer["layerType"] for layer in graph.layers).most_common()),
            kernels=dict(Counter(layer["primitiveType"] for layer in graph.compute()).most_common()),
            time_by_operator=graph.time_by_operator(),
            precision_truth=precision_truth(self._requested, graph.by_type(), ENGINE_NAME, operations, bits),
            threads=settings["INFERENCE_NUM_THREADS"],
            options=settings,
            notes=tuple(graph.notes()),
        )

    def _measure_bits(self) -> int | None:
        """Return the bits that float32 products keep with these settings; None for a quantised precision."""
        if self._requested in QUANTISED_PRECISIONS:
            return None
        ov, factors = self._ov.opset13, products.make_factors()
        rows, image = (ov.parameter(factors[name].shape, np.float32) for name in "ai")
        product = ov.matmul(rows, ov.constant(factors["m"]), False, False)
        convolved = ov.convolution(image, ov.constant(factors["k"]), [1, 1], [0, 0], [0, 0], [1, 1])
        model = self._ov.Model([product, convolved], [rows, image])
        request = _create_core().compile_model(model, "CPU", self._settings).create_infer_request()
        results = request.infer([factors["a"], factors["i"]])
        return products.count_bits(results[port] for port in range(2))

    def execution_graph(self) -> Any:
        """Return the runtime model of a second compilation, after runs with performance counters."""
        compiled, request = self._compile_with_counters()
        for _ in range(PROFILED_RUNS):
            request.infer()
        return compiled.get_runtime_model()

    def _compile_with_counters(self) -> tuple[Any, Any]:
        """Return a compilation with performance counters and its request, on the bound or random input."""
        compiled = _create_core().compile_model(self._model, "CPU", self._settings | {"PERF_COUNT": True})
        request = compiled.create_infer_request()
        rng = np.random.default_rng(0)
        for port, tensor in zip(compiled.inputs, self.inputs, strict=True):
            entry = self._bound[0].get(tensor.name)
            feed = entry[0] if entry else rng.standard_normal(self._shapes[tensor.name]).astype(tensor.dtype)
            request.set_tensor(port, self._ov.Tensor(feed))
        return compiled, request

    def profile(self, runs: int) -> LayerTimes:
        """Time the execution graph's layers with OpenVINO's counters.

        Each repeat is the mean over one compilation's runs, without its first ones.
        """
        runs_each = -(-runs // PROFILE_REPEATS)
        run_times, repeats = list[float](), list[dict[str, float]]()
        for _ in range(PROFILE_REPEATS):
            compiled, request = self._compile_with_counters()
            for _ in range(DISCARDED_RUNS):
                request.infer()
            before = _read_layer_times(request, DISCARDED_RUNS)
            for _ in range(runs_each):
                start = time.perf_counter()
                request.infer(share_outputs=True)
                run_times.append(time.perf_counter() - start)
            after = _read_layer_times(request, DISCARDED_RUNS + runs_each)
            repeats.append({name: max(0.0, after[name] - before[name]) / runs_each for name in after})
        graph = ExecutionGraph(compiled.get_runtime_model(), self._requested).layer_graph(
            f"{ENGINE_NAME} {read_version()}"
        )
        layers = [[repeat.get(layer.name, 0.0) for layer in graph.layers] for repeat in _named_as_last(repeats)]
        repeat = f"the mean of {runs_each} runs" if runs_each > 1 else "one run"
        note = f"{ENGINE_NAME} reports means in whole microseconds: a repeat is {repeat} of a new compilation."
        return LayerTimes(graph, np.array(layers), np.array(run_times), note)

    def close(self) -> None:
        """Free the requests, the compiled model and the bound feeds."""
        self._bound.clear()
        self._requests.clear()
        del self._compiled, self._model


def _read_layer_times(request: Any, runs: int) -> dict[str, float]:
    """Return each layer's total seconds over `runs`, all runs of its compilation so far."""
    return {layer.node_name: runs * layer.real_time.total_seconds() for layer in request.get_profiling_info()}


def _named_as_last(repeats: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return the repeats under the layer names of the last one.

    The library numbers the layers that it creates. The numbers differ between compilations in a process; their order
    doesn't.
    """
    common = set(repeats[0]).intersection(*repeats[1:])
    unique_names = [[name for name in repeat if name not in common] for repeat in repeats]
    stems = [[re.sub(r"\d+", "", name) for name in names] for names in unique_names]
    mappings = [
        dict(zip(names, unique_names[-1], strict=True)) if stem == stems[-1] else {}
        for names, stem in zip(unique_names, stems, strict=True)
    ]
    return [
        {mapping.get(name, name): seconds for name, seconds in repeat.items()}
        for repeat, mapping in zip(repeats, mappings, strict=True)
    ]


def import_library() -> Any:
    """Import OpenVINO; raise `Unavailable` without it."""
    # openvino.tools sends usage data if openvino_telemetry can be imported, and works without it. Only this switches it
    # off without a question or a file in the user's home.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return load_library("openvino")


@lru_cache(maxsize=1)
def _create_core() -> Any:
    """Return the process's only Core, which is never released.

    The CPU plugin lends the main thread a signal stack while its Core lives. With two Cores, the first release unmaps
    its stack, the second gives that stack back to the thread, and the next signal ends the process (2026.4).
    """
    return import_library().Core()


def read_version() -> str:
    """Return OpenVINO's version."""
    return importlib.metadata.version("openvino")


def read_model(ov: Any, path: str) -> Any:
    """Read the model in an IR or an ONNX file; raise a `UserError` for a missing or unreadable file."""
    if not Path(path).is_file():
        raise UserError(f"{path or 'the model file'} does not exist")
    weights = Path(path).with_suffix(".bin")
    if path.endswith(".xml") and not weights.is_file():
        raise UserError(f"{path} needs its weights beside it: {weights.name} is missing")
    try:
        # convert_model reads a path with commas as a list of paths.
        model = None if path.endswith(".xml") or "," in path else ov.convert_model(path)
        # A graph with an input among its outputs would get an extra, never fed input by the conversion.
        return model if model and not _returns_inputs(model) else _create_core().read_model(path)
    # convert_model wraps its front ends' errors in its own class, derived directly from Exception.
    except Exception as e:
        raise _loading_error(e, f"{path} can't be read") from e


def _returns_inputs(model: Any) -> bool:
    return any(output.get_node().input_value(0).get_node().get_type_name() == "Parameter" for output in model.outputs)


def make_settings(trial: Trial) -> dict[str, Any]:
    """Return the properties for compiling the trial's model; raise a `UserError` for invalid streams."""
    streams = trial.options.get("streams", 1)
    max_streams = max(trial.runtime.threads, 1)
    if not isinstance(streams, int) or not 1 <= streams <= max_streams:
        raise UserError(f"openvino's streams must be from 1 to the number of threads ({max_streams}), not {streams!r}")
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": PRECISION_HINTS[trial.precision if _computes_in(trial.precision) else "fp32"],
        "INFERENCE_NUM_THREADS": trial.runtime.threads,
        "NUM_STREAMS": streams,
        "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
    }
    if "pinning" in trial.options:
        properties["ENABLE_CPU_PINNING"] = bool(trial.options["pinning"])
    return properties


def tensors_of(ports: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return each port's name, NumPy type and shape; a free dimension has no name in an IR.

    A port has the names of all tensors merged into it; its node has the file's name. Outputs of a network converted
    from PyTorch have none: they are named by position, like a module's outputs.
    """
    return tuple(_tensor_of(port, index) for index, port in enumerate(ports))


def _tensor_of(port: Any, index: int) -> Tensor:
    file_name, names = port.get_node().get_friendly_name().removesuffix("/sink_port_0"), port.get_names()
    if file_name in names:
        name = file_name
    elif names:
        name = port.get_any_name()
    elif port.get_node().get_type_name() == "Result":
        name = f"output_{index}" if index else "output"
    else:
        name = file_name
    shape = tuple("" if dim.is_dynamic else dim.get_length() for dim in port.get_partial_shape())
    kind = port.get_element_type().get_type_name()  # its to_dtype() confuses bf16 with float16
    if kind not in NUMPY_TYPES:
        raise UserError(f"{name!r} is {'text' if kind == 'string' else kind}, which isn't numeric; convert the model "
            f"with inputs and outputs of float32")  # fmt: skip
    if port.get_node().get_type_name() == "Parameter" and port.get_partial_shape().rank.is_dynamic:
        raise UserError(f"input {name!r} may have any number of axes; convert the model with a shape or an example")
    return Tensor(name, NUMPY_TYPES[kind], shape)


def _computes_in(precision: str) -> bool:
    """Return whether the CPU has instructions for the precision; else a half-precision file runs in float32."""
    capability = PRECISION_CAPABILITIES.get(precision)
    return not capability or capability in _create_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _raise_if_memory(error: Exception, message: str) -> None:
    if isinstance(error, MemoryError) or re.search("bad_alloc|[Ff]ailed to allocate|[Oo]ut of memory", str(error)):
        raise MemoryError(f"{message}: OpenVINO could not allocate memory") from error


def _loading_error(error: Exception, message: str) -> Exception:
    """Return a loading error of the library as a Dyno error, in one line: usually its last."""
    _raise_if_memory(error, message)
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    if refusal := next((line for line in lines if "No conversion rule found" in line), ""):
        return UserError(f"{message}: OpenVINO doesn't support {shorten(refusal.rpartition('operations: ')[2])}")
    text = next((line for line in reversed(lines) if not line.startswith("Exception from")), str(error))
    return UserError(f"{message}: {shorten(text)}")
