"""Eager PyTorch (`pytorch`), on the CPU and on NVIDIA GPUs."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from dyno.worker.backend import Arrays, Backend, DeviceBinding, LayerTimes, Session
from dyno.worker.facts.engine import EngineFacts, Probe, precision_truth
from dyno.worker.inputs import input_data
from dyno.worker.inputs.specs import list_tensors as tensors_of
from dyno.worker.layers import graph
from dyno.worker.layers import module as layers_module
from dyno.worker.nets import models
from dyno.worker.option_values import Check, flag, one_of
from dyno.worker.sessions import products
from dyno.worker.sessions.torch_support import (
    Copies,
    allocator_peaks,
    as_fetched,
    cast,
    compute_layers,
    configure,
    count_products,
    device_named,
    first_line,
    import_torch,
    is_memory_error,
    is_quantised,
    list_notes,
    make_positional,
    memory_errors,
    named_outputs,
    raise_refusals,
    takes_hooks,
    walk_tensors,
)
from dyno.worker.spec import BATCH_AXIS, Artifact, DataSpec, Dims, ModelSpec, Tensor, Trial, Unavailable, UserError

TORCH_TYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
MODULE_OPTIONS: Mapping[str, Check] = {
    "channels_last": flag, "cudnn_benchmark": flag, "input": one_of(*input_data.INPUT_TYPES),
}  # fmt: skip
NO_GRAPHS = "graph=true is for NVIDIA GPUs: a CPU has no CUDA graphs; omit it"
MAX_REPLAY_ERROR = 1e-2  # difference of a graph's outputs from the module's, as a share of the largest value
GPU_SLOTS = 3  # one computes, the next is copied in, the host reads the previous


class PyTorch(Backend):
    """Eager PyTorch: the reference for all comparisons.

    Options: `channels_last` (bool; default: on for a GPU in fp16 and bf16), `cudnn_benchmark` (bool, default off),
    `input` (float32, or uint8: raw pixels, normalised on the device before the module), `graph` (bool, default off; on
    a GPU: replay the module as a CUDA graph).
    """

    name = "pytorch"
    requires: tuple[str, ...] = ("torch",)
    precisions: tuple[str, ...] = ("fp32", "tf32", "fp16", "bf16")
    devices: tuple[str, ...] = ("cpu", "cuda")
    profiled: tuple[str, ...] = ("cpu", "cuda")
    options: tuple[str, ...] = ("channels_last", "cudnn_benchmark", "input", "graph")
    values: Mapping[str, Check] = {**MODULE_OPTIONS, "graph": flag}
    files: tuple[str, ...] | None = ()  # empty: the files hold no module

    def refuse(self, trial: Trial) -> str:
        """See `Backend.refuse`; also files, since they hold no module."""
        if trial.model.file:
            return f"there is no PyTorch module in {'an ONNX' if trial.model.file.endswith('.onnx') else 'that'} file"
        if trial.options.get("graph") is True and trial.runtime.device == "cpu":
            return NO_GRAPHS
        return super().refuse(trial)

    def probe(self) -> Probe:
        """Run one convolution on each device."""
        torch = import_torch()
        devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        for device in devices:
            self._run_convolution(torch, device)
        gpus = [torch.cuda.get_device_name(device) for device in devices[1:]]
        detail = ", ".join([f"CPU kernels for {torch.backends.cpu.get_cpu_capability()}", *gpus])
        return Probe(version=torch.__version__, devices=tuple(devices), detail=detail)

    def _run_convolution(self, torch: Any, device: str) -> None:
        x, weight = torch.randn(1, 3, 8, 8, device=device), torch.randn(4, 3, 3, 3, device=device)
        with torch.inference_mode():
            torch.nn.functional.conv2d(x, weight).cpu()

    def prepare(self, trial: Trial) -> None:
        """Import PyTorch and the model's library, if any."""
        import_torch()
        if library := models.find_library(trial.model):
            importlib.import_module(library)

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Load the module in the trial's type, on its device."""
        options = self.checked(trial)
        if options.get("graph") and trial.runtime.device == "cpu":
            raise UserError(NO_GRAPHS)
        with memory_errors():
            return (GraphSession if options.get("graph") else TorchSession)(trial, options)

    def checked(self, trial: Trial) -> dict[str, Any]:
        """Return the trial's options with defaults; raise a `UserError` for an unknown option or value."""
        self.check_options(trial.options)
        is_on_gpu = trial.runtime.device.startswith("cuda")
        defaults = {"channels_last": is_on_gpu and trial.precision in ("fp16", "bf16"), "cudnn_benchmark": False}
        return {**defaults, **trial.options}


PYTORCH = PyTorch()


def weight_type(trial: Trial) -> str:
    """Return a module's weight type before quantisation: below 16 bits bfloat16 on a GPU, float32 on a CPU."""
    return TORCH_TYPES.get(trial.precision, "float32" if trial.runtime.device == "cpu" else "bfloat16")


def module_inputs(model: ModelSpec, dims: Dims) -> tuple[Tensor, ...]:
    """Return a module's input tensors at that batch and size."""
    image = dims.shapes.get("input", (BATCH_AXIS, model.channels, "height", "width"))
    return tensors_of(model.inputs, dims) or (Tensor("input", "float32", dims.resolve(image)),)


class TorchSession(Session):
    """A module on its device: inputs are copied into a tensor per slot, outputs stay as the module returned them."""

    takes_frames = True

    def __init__(self, trial: Trial, options: dict[str, Any]) -> None:
        self._torch = import_torch()
        self._trial, self._options = trial, options
        self._device = device_named(self._torch, trial.runtime.device)
        configure(self._torch, trial, bool(options["cudnn_benchmark"]))
        self._layout = self._torch.channels_last if options["channels_last"] else self._torch.contiguous_format
        dtype = self._dtype = getattr(self._torch, weight_type(trial))
        self._module, self._weights = self._load_module()
        self._pixels = input_data.wants_pixels(options)
        self.slots = self._slots_wanted()
        self._copies: Copies | None = None
        self._queue: Any = None
        self._allocate_inputs(dtype)
        self._eager = self._make_callable(dtype)
        self._call: Any = self._eager
        self._has_run = False
        self._restore: Callable[[], None] | None = None

    def _load_module(self) -> tuple[Any, dict[str, Any]]:
        """Return the module on its device, and the hash and number of its weights before the cast."""
        module = models.load(self._trial.model, self._trial.dims)
        weights = models.describe_weights(module)
        return self._place_module(module), weights

    def _place_module(self, module: Any) -> Any:
        return cast(module.to(self._device, memory_format=self._layout), weight_type(self._trial))

    def _slots_wanted(self) -> int:
        return GPU_SLOTS if self._on_gpu else 1

    @property
    def module(self) -> Any:
        """The running module, for hooks on its parts."""
        return self._module

    @property
    def _on_gpu(self) -> bool:
        return bool(self._device.type == "cuda")

    def _list_inputs(self) -> tuple[Tensor, ...]:
        return module_inputs(self._trial.model, self._trial.dims)

    def _allocate_inputs(self, dtype: Any) -> None:
        self.inputs = self._list_inputs()
        if self._pixels:
            self.inputs = (replace(self._find_image_input(), dtype="uint8"),)
        self._bound = [{t.name: self._allocate_tensor(t, dtype) for t in self.inputs} for _ in range(self.slots)]
        self._out: list[Any] = [None] * self.slots
        if self._on_gpu:
            self._copies = Copies(self._torch, self._bound)
            self._queue = self._copies.compute
            self.stream = self._queue.cuda_stream

    def _allocate_tensor(self, tensor: Tensor, dtype: Any) -> Any:
        torch, is_float = self._torch, tensor.dtype.startswith("float")
        layout = self._layout if len(tensor.shape) == 4 and is_float else torch.contiguous_format
        dtype = dtype if is_float else getattr(torch, tensor.dtype)
        return torch.empty(tensor.shape, dtype=dtype, device=self._device, memory_format=layout)

    def _find_image_input(self) -> Tensor:
        if len(self.inputs) != 1 or len(self.inputs[0].shape) != 4 or self.inputs[0].dtype != "float32":
            shapes = ", ".join(str(t.shape) for t in self.inputs)
            raise UserError(f"input=uint8 needs a model with one image input (N x C x H x W); this one has {shapes}")
        return self.inputs[0]

    def _make_callable(self, dtype: Any) -> Any:
        """Return the module as a function of the slot's tensors, in the inputs' order."""
        function = self._from_pixels(dtype) if self._pixels else self._module
        if self._pixels or not self._trial.model.inputs:
            return function
        return make_positional(self._torch, function, self._trial.model.inputs)

    def _from_pixels(self, dtype: Any) -> Callable[[Any], Any]:
        """Return the module preceded by the normalisation, computed in float32 as a host does."""
        scale_and_offset = input_data.pixel_scale(self._trial.model.preprocess, int(self.inputs[0].shape[1]))
        scale, offset = (self._torch.from_numpy(array).to(self._device) for array in scale_and_offset)
        specs = self._trial.model.inputs
        module = make_positional(self._torch, self._module, specs) if specs else self._module

        def call_module(pixels: Any) -> Any:
            return module((pixels * scale + offset).to(dtype))

        return call_module

    @contextmanager
    def _use_stream(self, stream: Any) -> Iterator[None]:
        """Run the block as inference on that stream; None (a CPU) changes nothing."""
        with self._torch.inference_mode(), self._torch.cuda.stream(stream):
            yield

    def stage(self, feeds: Arrays) -> Arrays:
        """Return the feeds; on a GPU, copies in page-locked memory, read by `bind` without another copy."""
        return feeds if self._copies is None else self._copies.stage(feeds)

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Copy the feeds to the device, converting type and layout there."""
        for tensor in self.inputs:
            if (feed := feeds[tensor.name]).shape != tensor.shape:
                raise UserError(f"input {tensor.name!r} wants {tensor.shape}, but got {feed.shape}")
        with self._use_stream(None):
            if self._copies is None:
                for name, target in self._bound[slot].items():
                    target.copy_(self._torch.from_numpy(np.asarray(feeds[name], order="C")))
            else:
                self._copies.bind(feeds, slot)

    def restoring(self, feeds: Arrays) -> Callable[[], None] | None:
        """See `Session.restoring`: a module may write into its inputs, which changes its next run."""
        with self._use_stream(self._queue):
            changed_inputs = [tensor.clone() for tensor in self._bound[0].values()]
        self._synchronize_device()  # inputs arrive on another stream
        self.bind(feeds)
        self._synchronize_device()
        with self._use_stream(self._queue):
            inputs = [*self._bound[0].values()]
            if not any(_has_difference(*pair) for pair in zip(changed_inputs, inputs, strict=True)):
                return None
            originals = [tensor.clone() for tensor in inputs]

        def restore_inputs() -> None:
            with self._use_stream(self._queue):
                for tensor, value in zip(inputs, originals, strict=True):
                    tensor.copy_(value)
            self._synchronize_device()

        self._restore = restore_inputs
        return restore_inputs

    def _synchronize_device(self) -> None:
        if self._on_gpu:
            self._torch.cuda.synchronize(self._device)

    def on_device(self) -> DeviceBinding:
        """See `Session.on_device`; also on a CPU."""
        return DeviceBinding(self._torch, self._device, self._bind_tensors, self._output_tensors)

    def _bind_tensors(self, tensors: Mapping[str, Any], ready: Any, slot: int) -> None:
        """Bind tensors on the device, as `bind` does with arrays, after the event `ready`."""
        with self._use_stream(None):
            if self._copies is not None:
                self._copies.bind_tensors(tensors, ready, slot)
                return
            for name, target in self._bound[slot].items():
                target.copy_(tensors[name])

    def run(self, slot: int = 0) -> None:
        """Run one forward pass; the module's exception about an unsuitable input becomes a `UserError`."""
        try:
            with self._use_stream(self._queue):
                if self._copies:
                    self._copies.arrive(slot)
                self._out[slot] = self._compute(slot)
                if self._copies:
                    self._copies.leave(slot)
        except Exception as e:  # foreign code may raise anything for an unsuitable input
            raise self._explain_error(e) from e
        self._has_run = True

    def _compute(self, slot: int) -> Any:
        """Run the module on the slot's inputs, on the current stream."""
        return self._call(*self._bound[slot].values())

    def _explain_error(self, e: Exception) -> Exception:
        if is_memory_error(e):
            return MemoryError(first_line(e))
        if self._has_run or isinstance(e, (UserError, Unavailable, MemoryError)) or "CUDA error" in str(e):
            return e
        shapes = ", ".join("x".join(map(str, t.shape)) or t.name for t in self.inputs)
        reason, precision = first_line(e), self._trial.precision
        is_half_type = precision in ("fp16", "bf16") and "type" in reason
        hint = "; let forward make numbers in the type of its weights, not in float32" if is_half_type else ""
        return UserError(f"{self._trial.model.name} refuses {shapes} in {precision}: {reason}{hint}")

    def wait(self, slot: int = 0) -> None:
        """Wait for the slot's work; on a CPU, it is done when `run` returns."""
        if self._copies:
            self._copies.wait(slot)

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """Return the outputs by name, floats as float32; dicts, lists and tuples are flattened in their order."""
        tensors = self._output_tensors(slot)
        with self._use_stream(None):
            if self._copies is None:
                outputs = {name: as_fetched(tensor).numpy() for name, tensor in tensors.items()}
            else:
                outputs = self._copies.fetch(tensors, slot)
        self.outputs = tuple(Tensor(name, str(a.dtype), a.shape) for name, a in outputs.items())
        return outputs

    def _output_tensors(self, slot: int) -> dict[str, Any]:
        """Return the slot's outputs as tensors, in the module's own types."""
        return named_outputs(self._out[slot])

    def limit_threads(self, count: int) -> bool:
        """See `Session.limit_threads`; compiled code has a fixed number of threads."""
        if self._on_gpu or type(self) is not TorchSession:
            return False
        self._torch.set_num_threads(count)
        return True

    def parts(self, feeds: Arrays) -> dict[str, float]:
        """See `Session.parts`; empty on a CPU."""
        if self._copies is None:
            return {}
        with self._use_stream(None):
            return self._copies.parts(lambda: self.bind(feeds), self.run, lambda: named_outputs(self._out[0]))

    def try_eager(self) -> None:
        """Run the uncompiled module on random input: later errors are then the compiler's."""
        self._bind_random()
        self._run_once()

    def _bind_random(self, seed: int = 0, slot: int = 0) -> None:
        model, data = self._trial.model, DataSpec(seed=seed)
        feeds = input_data.read_batches(data, model.preprocess, self.inputs, self._trial.dims, 1, model.inputs)
        self.bind(next(feeds), slot)

    def _run_once(self) -> None:
        self.run()
        self.wait()

    def facts(self) -> EngineFacts:
        """Return parameters, options, and layers by the type of their results, watched in one more forward pass.

        The number of layers is None if none was watched, as in TorchScript, which takes no hooks.
        """
        layers, kinds = self._count_layers()
        bits = self._measure_bits()
        truth = precision_truth(self._trial.precision, kinds, "PyTorch", bits=bits)
        facts = EngineFacts(layers=layers or None, layers_by_type=kinds, precision_truth=truth, product_bits=bits)
        return self._read_common_facts().merge(facts)

    def _measure_bits(self) -> int | None:
        """Return the bits that products keep with the session's settings and type; None if the operator is missing."""
        torch, tensors = self._torch, products.make_factors()
        with suppress(RuntimeError), torch.no_grad(), self._use_stream(self._queue):
            a, m, i, k = (torch.from_numpy(tensors[name]).to(self._device, self._dtype) for name in "amik")
            results = torch.matmul(a, m), torch.nn.functional.conv2d(i, k)
            return products.count_bits(result.float().cpu().numpy() for result in results)
        return None

    def _read_common_facts(self) -> EngineFacts:
        cuda = self._torch.backends.cuda.matmul
        return EngineFacts(
            **self._weights,
            options={**self._options, "allow_tf32": bool(cuda.allow_tf32)},
            threads=self._torch.get_num_threads(),
            **allocator_peaks(self._torch, self._device),
            notes=tuple(list_notes(self._trial)),
        )

    def _count_layers(self) -> tuple[int, dict[str, int]]:
        types: dict[Any, str] = {}
        classes = compute_layers(self._torch)

        def record_type(module: Any, args: Any, result: Any) -> None:
            tensor = next(iter(walk_tensors(result)), None)
            if is_quantised(module):
                types[module] = "int8"
                return
            types[module] = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")

        def run() -> None:
            with self._use_stream(self._queue):  # the module may write into its inputs
                self._eager(*(each.clone() for each in self._bound[0].values()))

        if isinstance(self._module, self._torch.jit.ScriptModule):  # TorchScript's parts take no hooks
            return 0, count_products(run)
        leaves = [  # a quantised layer may have its packed weights as a child
            m for m in self._module.modules() if isinstance(m, classes) or is_quantised(m) or not list(m.children())
        ]
        hooks = [m.register_forward_hook(record_type) for m in leaves if takes_hooks(self._torch, m)]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        kinds = Counter(kind for m, kind in types.items() if isinstance(m, classes) or is_quantised(m))
        return len(types), dict(kinds) or count_products(run)

    def profile(self, runs: int) -> LayerTimes:
        """Time the calls of the module's parts: by hooks on a CPU, by their kernels on a GPU.

        Inputs that the module overwrites, as found by `restoring`, are restored before each run.
        """
        if self._call is not self._eager:
            return super().profile(runs)
        self.take_parts()
        measure = layers_module.measure_kernels if self._on_gpu else layers_module.measure_modules
        restore = self._restore or (lambda: None)
        return measure(self._module, self._run_once, lambda: self._eager(*self._bound[0].values()), runs, restore)

    def run_for_counters(self) -> None:
        """Run once with a range around the call of each part of the module; on a GPU."""
        self.take_parts()
        layers_module.run_ranges(self._module, self._run_once)

    def take_parts(self) -> None:
        """Replace a program of torch.export by the modules it was made of, which hooks can watch."""
        if (module := graph.list_program_parts(self._trial.model, self._trial.dims)) is not None:
            self._module = self._place_module(module)
            self._call = self._eager = self._make_callable(self._dtype)

    def close(self) -> None:
        """Drop the module and the tensors, and free the GPU's memory."""
        self._module = self._eager = self._call = None
        self._out, self._bound, self._copies = [], [], None
        if self._on_gpu:
            self._torch.cuda.empty_cache()


class GraphSession(TorchSession):
    """A module recorded as a CUDA graph per slot; a replay reads the slot's input tensors."""

    def __init__(self, trial: Trial, options: dict[str, Any]) -> None:
        self._graphs: list[Any] = []
        self._addresses: list[list[int]] = []
        super().__init__(trial, options)
        self.try_eager()
        recordings = []
        for slot in range(self.slots):
            self._bind_random(slot=slot)
            recordings.append(self._record(slot))
        self._graphs, self._out = [graph for graph, _ in recordings], [result for _, result in recordings]
        self._recorded = [*self._out]
        self._addresses = [self._find_addresses(slot) for slot in range(self.slots)]
        self._check_replay()

    def _record(self, slot: int) -> tuple[Any, Any]:
        """Return the slot's graph and its outputs; raise a `UserError` for a module that can't be recorded."""
        torch, graph = self._torch, self._torch.cuda.CUDAGraph()
        values = [*self._bound[slot].values()]
        with raise_refusals(f"{self._trial.model.name} can't be recorded as a CUDA graph", "; omit graph=true"):
            with self._use_stream(self._queue):
                self._eager(*values)  # libraries choose their algorithms before the recording
            torch.cuda.synchronize(self._device)
            with torch.inference_mode(), torch.cuda.graph(graph, stream=self._queue):
                result = self._eager(*values)
        return graph, result

    def _find_addresses(self, slot: int) -> list[int]:
        return [tensor.data_ptr() for tensor in self._bound[slot].values()]

    def _check_replay(self) -> None:
        """Raise a `UserError` if a replay on other inputs differs from the module's outputs."""
        for slot in range(self.slots):
            self._bind_random(1 + slot, slot)
            self.run(slot)
            self.wait(slot)
            actual = [tensor.clone() for tensor in self._output_tensors(slot).values()]
            self._bind_random(1 + slot, slot)  # a module may write into its inputs
            self._synchronize_device()
            with self._use_stream(self._queue):
                expected = [*named_outputs(self._eager(*self._bound[slot].values())).values()]
            self._synchronize_device()
            if not all(_is_close(*pair) for pair in zip(actual, expected, strict=True)):
                name = self._trial.model.name
                raise UserError(f"{name} as a CUDA graph gives other outputs for other inputs; omit graph=true")

    def _compute(self, slot: int) -> Any:
        """Replay the slot's graph, which reads the recorded addresses."""
        if not self._graphs:
            return super()._compute(slot)
        if self._addresses and self._find_addresses(slot) != self._addresses[slot]:
            raise UserError("the inputs of a CUDA graph moved after it was recorded")
        self._graphs[slot].replay()
        return self._recorded[slot]

    def profile(self, runs: int) -> LayerTimes:
        """Time the module's parts without the graph: a graph has no parts."""
        self._graphs = []
        return super().profile(runs)

    def run_for_counters(self) -> None:
        self._graphs = []
        super().run_for_counters()

    def close(self) -> None:
        self._graphs, self._recorded = [], []
        super().close()


def _is_close(a: Any, b: Any) -> bool:
    """Return whether the tensors differ only by rounding; NaN equals NaN."""
    a, b = a.float().nan_to_num(), b.float().nan_to_num()
    return not a.numel() or bool((a - b).abs().max() <= MAX_REPLAY_ERROR * max(float(b.abs().max()), 1e-30))


def _has_difference(a: Any, b: Any) -> bool:
    """Return whether any value differs; NaN equals NaN."""
    return bool(((a != b) & ~((a != a) & (b != b))).any())
