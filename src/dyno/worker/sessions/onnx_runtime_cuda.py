"""ONNX Runtime on a GPU: IO binding to device memory of our own, on a stream of our own, without a wait per run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dyno.worker.facts.engine import EngineFacts
from dyno.worker.facts.inside import LayerGraph
from dyno.worker.inputs.shapes import Shape
from dyno.worker.option_values import Check, flag, one_of, whole
from dyno.worker.sessions.device_session import DeviceSession, slots_of
from dyno.worker.sessions.gpu import Device
from dyno.worker.spec import Option, Tensor, Trial, Unavailable, UserError

CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"
KINDS = {"cuda": CUDA, "tensorrt": TENSORRT}
OPTIONS = ("provider", "slots", "conv_search", "nhwc")
SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
VALUES: dict[str, Check] = {
    "provider": one_of(*KINDS), "slots": whole(1), "conv_search": one_of(*SEARCHES), "nhwc": flag,
}  # fmt: skip


class Providers:
    """The execution providers of a trial on a GPU, as ONNX Runtime takes them: a list of (name, options)."""

    def __init__(self, ort: Any, trial: Trial, device: Device) -> None:
        kind = _choose_provider(trial)
        if hasattr(ort, "preload_dlls"):  # finds the CUDA libraries that PyTorch and NVIDIA's wheels bring
            ort.preload_dlls()
        self.wanted, self._trial, self._index = KINDS[kind], trial, device.index
        if self.wanted not in ort.get_available_providers():
            raise Unavailable(f"this onnxruntime has no {self.wanted}; pip install onnxruntime-gpu")

    def list(self, stream: int | None = None) -> list[tuple[str, dict[str, str]]]:
        """Return the providers for a session that queues on `stream`, or on its own."""
        return providers(self._trial, self._index, stream)

    def check(self, session: Any) -> None:
        """Raise `Unavailable` if ONNX Runtime silently dropped the provider, because its libraries can't be loaded."""
        if self.wanted not in session.get_providers():
            raise Unavailable(
                f"ONNX Runtime left {self.wanted} out: the libraries it needs are missing or of another version"
            )


def providers(trial: Trial, index: int, stream: int | None = None) -> list[tuple[str, dict[str, str]]]:
    """Return the trial's execution providers on the GPU of that index, as `InferenceSession` takes them."""
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
    if KINDS[_choose_provider(trial)] == CUDA:
        return [(CUDA, cuda)]
    fp16, int8 = (str(trial.precision == name) for name in ("fp16", "int8"))
    return [(TENSORRT, {**common, "trt_fp16_enable": fp16, "trt_int8_enable": int8}), (CUDA, cuda)]


def _choose_provider(trial: Trial) -> str:
    provider = str(trial.options.get("provider", "cuda"))
    if provider not in KINDS:
        raise UserError(f"onnxruntime has no provider {provider!r} on a GPU; known: {', '.join(KINDS)}")
    return provider


class CudaSession(DeviceSession):
    """One InferenceSession with a binding per slot; `file` opens itself, `tensor` reads ONNX Runtime's descriptions."""

    takes_frames = True

    def __init__(self, file: Any, trial: Trial, tensor: Callable[[Any], Tensor]) -> None:
        device = Device(trial.runtime.device)
        providers = Providers(file.ort, trial, device)
        super().__init__(device, slots_of(trial))
        self._file, self._providers = file, providers.list()
        self._session = file.open(providers.list(self.stream))
        providers.check(self._session)
        self.inputs = tuple(replace(t, shape=file.shapes[t.name]) for t in map(tensor, self._session.get_inputs()))
        self.outputs = tuple(tensor(arg) for arg in self._session.get_outputs())
        ranked = (t for t in self.outputs if t.shape)  # without dimensions: a scalar, or of any number of them
        self._static = {t.name: t for t in (*self.inputs, *ranked) if all(isinstance(n, int) for n in t.shape)}
        self.place(file.shapes, {name: _count_bytes(t) for name, t in self._static.items()})
        self._run_options = file.ort.RunOptions()
        # Without this every run would end with a wait, and nothing could overlap.
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._bindings = [self._bind_slot(slot) for slot in range(self.slots)]

    def _bind_slot(self, slot: int) -> Any:
        binding, addresses = self._session.io_binding(), self._slots[slot].addresses
        for tensor in self.inputs:
            kind, shape = np.dtype(tensor.dtype).type, list(tensor.shape)
            binding.bind_input(tensor.name, "cuda", self.device.index, kind, shape, addresses[tensor.name])
        for tensor in self.outputs:
            if tensor.name in self._static:
                kind, shape = np.dtype(tensor.dtype).type, list(tensor.shape)
                binding.bind_output(tensor.name, "cuda", self.device.index, kind, shape, addresses[tensor.name])
            else:
                binding.bind_output(tensor.name, "cuda", self.device.index)
        return binding

    def enqueue(self, slot: int) -> None:
        """Queue one run; nodes that ONNX Runtime leaves to the CPU make it wait in between."""
        self._session.run_with_iobinding(self._bindings[slot], self._run_options)

    def results(self, slot: int) -> dict[str, tuple[Shape, str, int]]:
        """See `DeviceSession.results`; for outputs that ONNX Runtime allocated itself the address is its own."""
        values = self._bindings[slot].get_outputs()
        results = {}
        for tensor, value in zip(self.outputs, values, strict=True):
            results[tensor.name] = (tuple(value.shape()), tensor.dtype, int(value.data_ptr()))
        return results

    def facts(self) -> EngineFacts:
        """See `OnnxFile.facts`; also the nodes that ran on the CPU."""
        facts: EngineFacts = self._file.facts(self._providers, {})
        on_cpu = facts.nodes_by_provider.get("CPUExecutionProvider", 0)
        note = f"{on_cpu} of {facts.layers} nodes ran on the CPU, with copies around them"
        return replace(
            facts,
            notes=(*facts.notes, note) if on_cpu else facts.notes,
            options={**facts.options, "slots": self.slots, **self._providers[0][1]},
        )

    def inside(self) -> LayerGraph:
        """See `OnnxFile.inside`."""
        found: LayerGraph = self._file.inside(self._providers, {})
        return found

    def close(self) -> None:
        """Free the bindings and the session before the memory they use."""
        self.device.synchronize()
        self._bindings.clear()
        del self._session
        super().close()


def adds(ort: Any, model: bytes, options: Any) -> bool:
    """Return whether the CUDA provider adds two numbers here."""
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    session = ort.InferenceSession(model, options, providers=[CUDA])
    (out,) = session.run(None, {"x": np.asarray(2, np.float32)})
    return bool(CUDA in session.get_providers() and out == 4)


def _count_bytes(tensor: Tensor) -> int:
    return int(np.prod([int(n) for n in tensor.shape], dtype=np.int64)) * np.dtype(tensor.dtype).itemsize
