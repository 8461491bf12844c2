"""ONNX Runtime on a GPU: IO binding to Dyno's device memory, on Dyno's stream, without a wait per run."""

from __future__ import annotations

import json
import re
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dyno.worker.facts.engine import ARITHMETIC_TYPES, COMPUTE_LAYER, UNKNOWN_TYPE, EngineFacts, why_not_faster
from dyno.worker.facts.job import LayerGraph
from dyno.worker.inputs.specs import Shape, fit_feed
from dyno.worker.option_values import Check, flag, one_of, whole
from dyno.worker.sessions.gpu import Device, DeviceSession, slots_of
from dyno.worker.spec import Option, Tensor, Trial, Unavailable

CUDA_PROVIDER, TENSORRT_PROVIDER = "CUDAExecutionProvider", "TensorrtExecutionProvider"
PROVIDERS = {"cuda": CUDA_PROVIDER, "tensorrt": TENSORRT_PROVIDER}
SESSION_OPTIONS = ("provider", "slots", "conv_search", "nhwc")
CONV_SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")


def _check_provider(value: Option) -> str:
    is_name = isinstance(value, str) and re.fullmatch(r"[A-Za-z]\w*", value)
    return "" if is_name else f"{' or '.join(PROVIDERS)}, or on a CPU another provider's name, such as openvino"


OPTION_CHECKS: dict[str, Check] = {
    "provider": _check_provider, "slots": whole(1), "conv_search": one_of(*CONV_SEARCHES), "nhwc": flag,
}  # fmt: skip


def list_providers(trial: Trial, index: int, stream: int | None = None) -> list[tuple[str, dict[str, str]]]:
    """Return the trial's execution providers on GPU `index`, in the form of `InferenceSession`."""
    common = {"device_id": str(index)}
    if stream is not None:
        common["user_compute_stream"] = str(stream)
    options: Mapping[str, Option] = trial.options
    cuda = {
        **common,
        "use_tf32": str(int(trial.precision == "tf32")),
        "cudnn_conv_algo_search": str(options.get("conv_search", "EXHAUSTIVE")),
        "prefer_nhwc": str(int(bool(options.get("nhwc", False)))),
    }
    if _choose_provider(trial) == CUDA_PROVIDER:
        return [(CUDA_PROVIDER, cuda)]
    fp16, int8 = (str(trial.precision == name) for name in ("fp16", "int8"))
    return [(TENSORRT_PROVIDER, {**common, "trt_fp16_enable": fp16, "trt_int8_enable": int8}), (CUDA_PROVIDER, cuda)]


def _require_provider(ort: Any, trial: Trial) -> str:
    """Return the trial's execution provider; raise `Unavailable` if the library lacks it."""
    _preload_libraries(ort)
    provider = _choose_provider(trial)
    if provider not in ort.get_available_providers():
        raise Unavailable(f"this onnxruntime has no {provider}; pip install onnxruntime-gpu")
    return provider


def _preload_libraries(ort: Any) -> None:
    """Load the CUDA libraries of PyTorch and NVIDIA's wheels."""
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()


def _choose_provider(trial: Trial) -> str:
    return PROVIDERS[str(trial.options.get("provider", "cuda"))]


class CudaSession(DeviceSession):
    """One InferenceSession with a binding per slot; `file` opens it, `tensor` converts ONNX Runtime's descriptions."""

    takes_frames = True

    def __init__(self, file: Any, trial: Trial, tensor: Callable[[Any], Tensor]) -> None:
        device, provider = Device(trial.runtime.device), _require_provider(file.ort, trial)
        super().__init__(device, slots_of(trial))
        self._file, self._providers = file, list_providers(trial, device.index)
        self._session = file.open(list_providers(trial, device.index, self.stream))
        if provider not in self._session.get_providers():
            raise Unavailable(
                f"ONNX Runtime left {provider} out: the libraries it needs are missing or of another version"
            )
        self.inputs = tuple(replace(t, shape=file.shapes[t.name]) for t in map(tensor, self._session.get_inputs()))
        self.outputs = tuple(tensor(arg) for arg in self._session.get_outputs())
        outputs = (t for t in self.outputs if t.shape)  # an output without dimensions is a scalar or of unknown rank
        self._static = {t.name: t for t in (*self.inputs, *outputs) if all(isinstance(n, int) for n in t.shape)}
        self.allocate(file.shapes, {name: _count_bytes(t) for name, t in self._static.items()})
        self._run_options = file.ort.RunOptions()
        # Else every run would end with a wait, and nothing could overlap.
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._bindings = [self._bind_slot(slot) for slot in range(self.slots)]

    def _bind_slot(self, slot: int) -> Any:
        binding, addresses = self._session.io_binding(), self._slots[slot].addresses
        for tensor in self.inputs:
            dtype, shape = np.dtype(tensor.dtype).type, list(tensor.shape)
            binding.bind_input(tensor.name, "cuda", self.device.index, dtype, shape, addresses[tensor.name])
        for tensor in self.outputs:
            if tensor.name in self._static:
                dtype, shape = np.dtype(tensor.dtype).type, list(tensor.shape)
                binding.bind_output(tensor.name, "cuda", self.device.index, dtype, shape, addresses[tensor.name])
            else:
                binding.bind_output(tensor.name, "cuda", self.device.index)
        return binding

    def enqueue(self, slot: int) -> None:
        """Queue one run; nodes on the CPU make it wait in between."""
        self._session.run_with_iobinding(self._bindings[slot], self._run_options)

    def results(self, slot: int) -> dict[str, tuple[Shape, str, int]]:
        """See `DeviceSession.results`; outputs allocated by ONNX Runtime have its address."""
        values = self._bindings[slot].get_outputs()
        results = {}
        for tensor, value in zip(self.outputs, values, strict=True):
            results[tensor.name] = (tuple(value.shape()), tensor.dtype, int(value.data_ptr()))
        return results

    def facts(self) -> EngineFacts:
        """See `OnnxFile.facts`; with a note on nodes that ran on the CPU."""
        facts: EngineFacts = self._file.facts(self._providers, {})
        cpu_nodes = facts.nodes_by_provider.get("CPUExecutionProvider", 0)
        note = f"{cpu_nodes} of {facts.layers} nodes ran on the CPU, with copies around them"
        return replace(
            facts,
            notes=(*facts.notes, note) if cpu_nodes else facts.notes,
            options={**facts.options, "slots": self.slots, **self._providers[0][1]},
        )

    def layer_graph(self) -> LayerGraph:
        """See `OnnxFile.layer_graph`."""
        graph: LayerGraph = self._file.layer_graph(self._providers, {})
        return graph

    def close(self) -> None:
        """Free the bindings and the session, then their memory."""
        self.device.synchronize()
        self._bindings.clear()
        del self._session
        super().close()


def can_add(ort: Any, model: bytes, options: Any) -> bool:
    """Return whether the CUDA provider can add two numbers."""
    _preload_libraries(ort)
    session = ort.InferenceSession(model, options, providers=[CUDA_PROVIDER])
    (out,) = session.run(None, {"x": np.asarray(2, np.float32)})
    return bool(CUDA_PROVIDER in session.get_providers() and out == 4)


def _count_bytes(tensor: Tensor) -> int:
    return int(np.prod([int(n) for n in tensor.shape], dtype=np.int64)) * np.dtype(tensor.dtype).itemsize


# Nodes and kernels of ONNX Runtime, from the events of its own profile

Kernel = tuple[str, Any]  # the event's name, and the index of its node
TYPE_NAMES = {"float": "float32", "uint8": "int8", "double": "float64"}
PACKED_OPERATOR = "MatMulNBits"
FUSED_LEVEL = 4  # `accuracy_level` of products fused with their DequantizeLinear
# activation type by `accuracy_level`
ACCURACY_LEVELS = {1: "float32", 2: "float16", 3: "bfloat16", 4: "int8"}
CPU_PROVIDER = "CPUExecutionProvider"
CONTROL_OPERATORS = ("If", "Loop", "Scan")  # operators with an inner graph; its nodes have events too
CONVERSION_OPERATORS = ("QuantizeLinear", "DequantizeLinear", "Cast", "ReorderInput", "ReorderOutput")
EVENT_TEXT = re.compile(r'("name"\s*:\s*)"(.*?)"(,"args"\s*:\s*\{)', re.DOTALL)


def events_in(text: str) -> list[dict[str, Any]]:
    """Return the events of a profile; the library leaves quotes and backslashes in node names unescaped."""
    json_text = EVENT_TEXT.sub(lambda match: f"{match[1]}{json.dumps(match[2])}{match[3]}", text)
    events: list[dict[str, Any]] = json.loads(json_text)
    return events


class Profile:
    """The kernels of a profile without its first run, which allocates and packs weights.

    `levels` is the result of `graph_facts.accuracy_levels` for the file; None if it couldn't be read.
    """

    def __init__(self, events: list[dict[str, Any]], precision: str, levels: Mapping[str, int] | None = None) -> None:
        self._precision, self._levels = precision, levels
        runs = sorted(e["ts"] for e in events if e["name"] == "model_run")
        start = runs[1] if len(runs) > 1 else 0
        nodes = [e for e in events if e["cat"] == "Node" and e["ts"] >= start]
        kernels = [e for e in nodes if e["name"].endswith("_kernel_time")]
        self.kernel_args = {(e["name"], e["args"].get("node_index")): e["args"] for e in kernels}
        self.computed_in = self._find_types()  # types of the compute nodes
        self.outer = {(e["name"], e["args"].get("node_index")): e["args"] for e in _find_outer_kernels(kernels)}
        times: dict[Any, list[float]] = defaultdict(list)
        for event in kernels:
            times[event["args"]["op_name"], event["name"], event["args"].get("node_index")].append(event["dur"] * 1e-6)
        self.seconds: dict[str, float] = defaultdict(float)  # per run
        for (op, *_), samples in times.items():
            # The median is robust against runs interrupted by other programs.
            self.seconds[op] += statistics.median(samples)

    def by_type(self) -> dict[str, int]:
        """Return the number of compute nodes by the type of their products; 8-bit ones, signed or not, as `int8`."""
        return dict(Counter(self.computed_in.values()))

    def by_provider(self) -> dict[str, int]:
        """Return the number of nodes by execution provider."""
        return dict(Counter(node["provider"] for node in self.kernel_args.values()))

    def count_operators(self) -> dict[str, int]:
        """Return the number of nodes by operator, after optimisation."""
        return dict(Counter(node["op_name"] for node in self.kernel_args.values()).most_common())

    def time_by_operator(self) -> dict[str, float]:
        """Return each operator's share of the time in kernels, largest first."""
        total = sum(self.seconds.values()) or 1.0
        return {op: round(s / total, 4) for op, s in sorted(self.seconds.items(), key=lambda kv: -kv[1])}

    def notes(self) -> list[str]:
        """Return sentences on why a lowered precision isn't faster."""
        compute = [(self.kernel_args[kernel]["op_name"], kind) for kernel, kind in self.computed_in.items()]
        return why_not_faster(self._precision, compute, self.time_by_operator(), CONVERSION_OPERATORS)

    def _find_types(self) -> dict[Kernel, str]:
        """Return the type of each compute node (convolution, matrix product…); products of indices are left out."""
        types = {
            kernel: self._find_type(kernel)
            for kernel, args in self.kernel_args.items()
            if COMPUTE_LAYER.search(args["op_name"])
        }
        return {kernel: kind for kernel, kind in types.items() if kind in (*ARITHMETIC_TYPES, UNKNOWN_TYPE)}

    def _find_type(self, kernel: Kernel) -> str:
        """Return the type of the node's first input, or the type to which its operator converts it first."""
        args = self.kernel_args[kernel]
        # no effect on a GPU
        if args["op_name"] == PACKED_OPERATOR and args["provider"] == CPU_PROVIDER:
            if self._levels is None:
                return UNKNOWN_TYPE
            level = self._levels.get(kernel[0].removesuffix("_kernel_time"), 0 if self._levels else FUSED_LEVEL)
            if level in ACCURACY_LEVELS:
                return ACCURACY_LEVELS[level]
        if "Integer" in args["op_name"] or args["op_name"].startswith("DynamicQuantize"):
            return "int8"
        kind = next((name for entry in args.get("input_type_shape", []) for name in entry), UNKNOWN_TYPE)
        return TYPE_NAMES.get(kind, kind)


def by_run(events: Sequence[dict[str, Any]]) -> list[dict[Kernel, float]]:
    """Return the seconds of each kernel in each run, by the event's name and the node's index.

    The library counts microseconds.
    """
    runs = sorted((e for e in events if e["name"] == "model_run"), key=lambda e: e["ts"])
    seconds: list[dict[Kernel, float]] = [{} for _ in runs]
    starts = [run["ts"] for run in runs]
    kernels = [e for e in events if e["cat"] == "Node" and e["name"].endswith("_kernel_time") and e["ts"] >= starts[0]]
    for event in _find_outer_kernels(kernels):
        kernel = event["name"], event["args"].get("node_index")
        seconds[bisect_right(starts, event["ts"]) - 1][kernel] = event["dur"] * 1e-6
    return seconds


def _find_outer_kernels(kernels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the kernels outside branches and loops.

    Inner kernels may have names and numbers of outer nodes.
    """
    outer_kernels, end = list[dict[str, Any]](), -1
    for event in sorted(kernels, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] >= end:
            outer_kernels.append(event)
            if event["args"].get("op_name") in CONTROL_OPERATORS:
                end = event["ts"] + event["dur"]
    return outer_kernels


# One batch of ONNX Runtime on the CPU: its inputs and outputs in host memory, without copies


class Request:
    """Inputs and outputs of one batch in flight; several of one session may run at the same time."""

    def __init__(self, session: Any, outputs: Sequence[Tensor]) -> None:
        self._session, self._tensors = session, outputs
        self.feeds: dict[str, np.ndarray] = {}
        self._binding = session.io_binding()
        self._outputs: dict[str, np.ndarray] = {}
        # The library allocates outputs of run-dependent shape, outputs without dimensions (scalars or of any rank), and
        # inputs that are outputs too. All are bound in the graph's order, which `get_outputs` keeps after a rebinding.
        input_names = {arg.name for arg in session.get_inputs()}
        for tensor in outputs:
            sizes = [size for size in tensor.shape if isinstance(size, int)]
            if sizes and len(sizes) == len(tensor.shape) and tensor.name not in input_names:
                array = self._outputs[tensor.name] = np.empty(sizes, tensor.dtype)
                self._binding.bind_output(tensor.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            else:
                self._binding.bind_output(tensor.name, "cpu")
        self._unplaced = [tensor.name for tensor in outputs if tensor.name not in self._outputs]
        # Outputs with other shapes than declared: onnxmltools declares [1] for LightGBM's labels of any batch.
        self._misdeclared: list[str] = []

    def bind(self, feeds: Mapping[str, np.ndarray], inputs: Sequence[Tensor], shapes: Mapping[str, Shape]) -> None:
        """Bind the feeds, held until the next `bind`; they are copied only to change their type."""
        for tensor in inputs:
            feed = fit_feed(feeds, tensor, shapes[tensor.name])
            self._binding.bind_input(tensor.name, "cpu", 0, feed.dtype.type, feed.shape, feed.ctypes.data)
            self.feeds[tensor.name] = feed
        for name in self._unplaced:  # shapes may change with the input
            self._binding.bind_output(name, "cpu")

    def run(self) -> None:
        """Run to the end; the library releases Python's lock meanwhile."""
        for name in self._misdeclared:  # the last run's outputs would be rejected
            self._binding.bind_output(name, "cpu")
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as e:  # the exception type depends on the version
            if not self._outputs or "shape" not in str(e):
                raise
            self._misdeclared, self._outputs = [*self._outputs], {}
            self._unplaced = [tensor.name for tensor in self._tensors]
            self.run()

    def fetch(self) -> dict[str, np.ndarray]:
        """Return the bound output arrays themselves, valid until the next run."""
        if not self._unplaced:
            return dict(self._outputs)
        values = self._binding.get_outputs()
        return {t.name: self._outputs.get(t.name, values[k].numpy()) for k, t in enumerate(self._tensors)}
