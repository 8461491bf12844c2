"""Running a TensorRT engine: deserialise, check its tensors, replay it as a CUDA graph, a context per batch in flight.

It needs only numpy, cuda-bindings and TensorRT. A static engine keeps its shapes and graphs. A dynamic engine may
change its shapes between runs, within its profile; its graph is recorded again at the second run of a shape.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import LayerTimes
from dyno.worker.backends.tensor_rt import layers, library
from dyno.worker.facts.engine import EngineFacts
from dyno.worker.inputs.specs import Shape, static_shapes
from dyno.worker.sessions.gpu import CudaGraph, Device, DeviceSession, profiler_on, slots_of
from dyno.worker.spec import Artifact, Tensor, Trial, Unavailable, UserError


class TensorRTSession(DeviceSession):
    """One engine with `slots` execution contexts.

    Options of the trial: `graph` (default true: replay a CUDA graph) and `slots` (default 3). Raise a `UserError` for
    an engine that this library or GPU refuses, or with tensors other than the trial's.
    """

    def __init__(self, trial: Trial, artifact: Artifact | None, product: str) -> None:
        self._trt = library.load(product)
        self._trial, self._log = trial, library.Log(self._trt)
        device = Device(trial.runtime.device)
        self._runtime, self._engine = deserialise(self._trt, self._log, artifact.path if artifact else trial.model.file)
        self._graphed = bool(trial.options.get("graph", True))
        inputs = self._check_tensors(artifact)
        shapes = self._shapes_of(inputs, trial)
        super().__init__(device, slots_of(trial))
        self._contexts = self._new_contexts()
        self._profile = self._select_profile(shapes)
        self._allocators: list[dict[str, Any]] = [{} for _ in self._contexts]
        self._graphs: list[CudaGraph | None] = [None] * self.slots
        self._runs = [0] * self.slots
        self._results: list[dict[str, tuple[Shape, str, int]]] = [{} for _ in self._contexts]
        self.allocate(shapes, self._room_of(shapes))
        for slot in range(self.slots):
            self._allocators[slot] = self._set_addresses(self._contexts[slot], slot)
        self._graphed = self._graphed and not self._allocators[0]  # a graph can't allocate memory
        self.reshape(shapes)

    def _check_tensors(self, artifact: Artifact | None) -> tuple[Tensor, ...]:
        """Return the engine's inputs; raise a `UserError` if its tensors differ from the artifact's record."""
        sides = list_tensors(self._trt, self._engine)
        if artifact and artifact.inputs:
            artifact_tensors = {t.name: (t.dtype, len(t.shape)) for t in (*artifact.inputs, *artifact.outputs)}
            engine_tensors = {t.name: (t.dtype, len(t.shape)) for side in sides for t in side}
            for name in sorted(set(artifact_tensors) | set(engine_tensors)):
                if artifact_tensors.get(name) != engine_tensors.get(name):
                    actual, expected = _describe_tensor(engine_tensors, name), _describe_tensor(artifact_tensors, name)
                    raise UserError(f"tensor {name!r} of the engine is {actual}, not {expected}")
            names = list(artifact_tensors)  # outputs are compared by position, but an engine has another order
            inputs, outputs = (tuple(sorted(side, key=lambda t: names.index(t.name))) for side in sides)
            sides = inputs, outputs
        self.inputs, self.outputs = sides
        return sides[0]

    def _shapes_of(self, inputs: tuple[Tensor, ...], trial: Trial) -> dict[str, Shape]:
        """Return the trial's shapes; raise a `UserError` for a shape outside the engine's profiles."""
        dims = trial.dims
        if not dims.batch:  # any batch: begin with the profile's best
            axis = dims.batch_axis(inputs[0].name, inputs[0].shape) or 0
            dims = replace(dims, batch=int(self._engine.get_tensor_profile_shape(inputs[0].name, 0)[1][axis]))
        shapes = static_shapes(inputs, dims)
        for tensor in inputs:
            ranges = [self._engine.get_tensor_profile_shape(tensor.name, p) for p in range(self._profiles)]
            is_in_profile = any(_is_in_range(shapes[tensor.name], low, high) for low, _, high in ranges)
            if any(isinstance(n, str) for n in tensor.shape) and not is_in_profile:
                limits = " or ".join(f"{_format_shape(low)} to {_format_shape(high)}" for low, _, high in ranges)
                raise UserError(
                    f"{tensor.name!r} as {_format_shape(shapes[tensor.name])} is outside the engine's profile "
                    f"({limits}); build it with a wider one"
                )
        return shapes

    @property
    def _profiles(self) -> int:
        return max(1, int(self._engine.num_optimization_profiles))

    @property
    def batches(self) -> tuple[int, int, int]:
        """The batches of the profile in use; a static engine's only batch three times."""
        name, shape = next(iter(self._shapes.items()))
        axis = self._trial.dims.batch_axis(name, shape) or 0
        if not self._dynamic:
            return shape[axis], shape[axis], shape[axis]
        low, opt, high = (int(s[axis]) for s in self._engine.get_tensor_profile_shape(name, self._profile))
        return low, opt, high

    def _new_contexts(self) -> list[Any]:
        """Return a context per slot; fewer if memory runs out or a profile can't be shared."""
        contexts: list[Any] = []
        for _ in range(self.slots):
            context = self._engine.create_execution_context()
            if context is None:
                break
            contexts.append(context)
        if not contexts:
            self._raise_error(f"{self._trial.label}: no execution context can be made")
        self.slots = len(contexts)
        return contexts

    def _select_profile(self, shapes: Mapping[str, Shape]) -> int:
        """Set the first profile that has the shapes in every context, and return its number.

        If contexts can't share the profile, all but the first ones are dropped.
        """
        profile = next(p for p in range(self._profiles) if self._in_profile(p, shapes))
        if not self._dynamic:
            return profile
        for index, context in enumerate(self._contexts):
            if not context.set_optimization_profile_async(profile, self.stream):
                if not index:
                    self._raise_error(f"profile {profile} can't be used")
                self.slots = index  # the profile can't be shared by more contexts
                break
        self.device.synchronize()
        del self._contexts[self.slots :]
        return profile

    def _in_profile(self, profile: int, shapes: Mapping[str, Shape]) -> bool:
        if not self._dynamic:
            return True
        ranges = {name: self._engine.get_tensor_profile_shape(name, profile) for name in shapes}
        return all(_is_in_range(shapes[name], low, high) for name, (low, _, high) in ranges.items())

    @property
    def _dynamic(self) -> bool:
        return any(isinstance(n, str) for tensor in self.inputs for n in tensor.shape)

    def _room_of(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """Return the bytes of every tensor at its profile's largest shape: a change of shape needs no memory."""
        context = self._contexts[0]
        for name, shape in shapes.items():
            context.set_input_shape(name, self._find_largest_shape(name, shape))
        sizes = {}
        for tensor in (*self.inputs, *self.outputs):
            shape = tuple(context.get_tensor_shape(tensor.name))
            if min(shape, default=1) >= 0:  # else an allocator, as the size depends on the run
                sizes[tensor.name] = int(np.prod(shape, dtype=np.int64)) * np.dtype(tensor.dtype).itemsize
        return sizes

    def _find_largest_shape(self, name: str, shape: Shape) -> Shape:
        return tuple(self._engine.get_tensor_profile_shape(name, self._profile)[2]) if self._dynamic else shape

    def _set_addresses(self, context: Any, slot: int) -> dict[str, Any]:
        """Set the context's tensor addresses to the slot's memory; return allocators for outputs of unknown size."""
        addresses, allocators = self._slots[slot].addresses, {}
        for name, address in addresses.items():
            context.set_tensor_address(name, address)
        for tensor in self.outputs:
            if tensor.name not in addresses:
                allocators[tensor.name] = library.output_allocator(self._trt, self.device)
                context.set_output_allocator(tensor.name, allocators[tensor.name])
        return allocators

    def reshape(self, shapes: Mapping[str, Shape]) -> None:
        """Run with these input shapes from now on; raise a `UserError` outside the profile."""
        if dict(shapes) == self._shapes and self._runs[0]:
            return
        for tensor in self.inputs:
            shape = shapes[tensor.name]
            for context in self._contexts:
                if not context.set_input_shape(tensor.name, shape):
                    raise UserError(
                        f"the engine doesn't take {tensor.name!r} as {_format_shape(shape)}: {self._log.reason()}"
                    )
        self._shapes = dict(shapes)
        for slot in range(self.slots):
            self._drop_graph(slot)

    def _drop_graph(self, slot: int) -> None:
        graph, self._graphs[slot], self._runs[slot] = self._graphs[slot], None, 0
        self._results[slot] = {}
        if graph is not None:
            graph.close()

    def enqueue(self, slot: int) -> None:
        """Replay the slot's graph; a shape's first run is launched directly, the second records the graph."""
        graph = self._graphs[slot]
        if graph is None and self._graphed and self._runs[slot]:
            graph = self._graphs[slot] = CudaGraph(self._compute, lambda: self._launch_slot(slot))
        if graph is not None:
            graph.launch()
            return
        self._runs[slot] += 1
        self._launch_slot(slot)

    def _launch_slot(self, slot: int) -> None:
        self._execute_context(self._contexts[slot])

    def _execute_context(self, context: Any) -> None:
        if not context.execute_async_v3(self.stream):
            self._raise_error(f"{self._trial.label} can't be run")

    def results(self, slot: int) -> dict[str, tuple[Shape, str, int]]:
        """Return the context's output shapes for the input shapes; see `DeviceSession.results`."""
        if not self._results[slot]:
            self._results[slot] = self._result_tensors(slot)
        results = self._results[slot]
        if self._allocators[slot]:  # shapes depend on the run
            self._results[slot] = {}
        return results

    def _result_tensors(self, slot: int) -> dict[str, tuple[Shape, str, int]]:
        results = {}
        for tensor in self.outputs:
            allocator = self._allocators[slot].get(tensor.name)
            shape = allocator.shape if allocator else self._contexts[slot].get_tensor_shape(tensor.name)
            address = allocator.address if allocator else self._slots[slot].addresses[tensor.name]
            results[tensor.name] = (tuple(int(n) for n in shape), tensor.dtype, address)
        return results

    def _raise_error(self, message: str) -> None:
        reason = self._log.reason()
        if library.OUT_OF_MEMORY_ERROR.search(reason):
            raise MemoryError(f"{message}: the GPU's memory ran out ({reason[:160]})")
        raise UserError(f"{message}: {reason}")

    def facts(self) -> EngineFacts:
        """Return the engine's own facts: layers, their types and times, memory, and the options of its run.

        Nothing may be timed afterwards: the first slot's context keeps its profiler.
        """
        engine_layers = layers.inspect(self._trt, self._engine)
        seconds = layers.profile_layers(self._trt, self._contexts[0], lambda: self._run_directly(self._contexts[0]))
        shares = layers.share_by_operator(engine_layers, seconds)
        options = {
            "graph": any(self._graphs),
            "slots": self.slots,
            "profile": self._profile,
            "dynamic": self._dynamic,
            **{key: value for key, value in self._trial.options.items() if key not in ("graph", "slots")},
        }
        return EngineFacts(
            time_by_operator=shares,
            slowest_layers=layers.list_slowest(engine_layers, seconds),
            options=options,
            engine_memory=library.device_memory(self._engine),
            notes=tuple(layers.list_notes(engine_layers, self._trial.precision, shares)),
        ).merge(layers.summarise_layers(engine_layers, self._trial.precision))

    def _run_directly(self, context: Any) -> None:
        self._execute_context(context)
        self.device.synchronize()

    def profile(self, runs: int) -> LayerTimes:
        """Time the engine's layers with TensorRT's profiler, in a separate context if memory allows."""
        context, _allocators = self._new_context()  # kept as long as the context
        run_times = []

        def time_run() -> None:
            start = time.perf_counter()
            self._run_directly(context)
            run_times.append(time.perf_counter() - start)

        times = layers.watch_layers(self._trt, context, time_run, layers.DISCARDED_RUNS + runs)[layers.DISCARDED_RUNS :]
        if not any(times):
            raise Unavailable(f"{library.name_library(self._trt)} reported no layer's time")
        listing = layers.list_layers(layers.inspect(self._trt, self._engine), library.name_library(self._trt))
        graph, seconds = layers.read_layer_times(listing, times)
        return LayerTimes(graph, seconds, np.array(run_times[layers.DISCARDED_RUNS :]), layers.TIMES_NOTE)

    def run_for_counters(self) -> None:
        """Run with TensorRT's own ranges, named by the layers, in a separate context."""
        context, _allocators = self._new_context()
        # Else a range's name is JSON with all layer information, and ncu doesn't escape its quotes in CSV.
        context.nvtx_verbosity = self._trt.ProfilingVerbosity.LAYER_NAMES_ONLY
        self._run_directly(context)  # discard the work of a context's first run
        with profiler_on():
            self._run_directly(context)

    def _new_context(self) -> tuple[Any, dict[str, Any]]:
        """Return a context for the bound shapes in the first slot's memory, with its allocators.

        Fall back to the first slot's own context if memory runs out or its profile can't be shared.
        """
        context = self._engine.create_execution_context()
        if context is None:
            return self._contexts[0], {}
        if self._dynamic and not context.set_optimization_profile_async(self._profile, self.stream):
            return self._contexts[0], {}
        self.device.synchronize()
        for name, shape in self._shapes.items():
            context.set_input_shape(name, shape)
        return context, self._set_addresses(context, 0)

    def close(self) -> None:
        """Free graphs, contexts and the engine, then their memory."""
        self.device.synchronize()
        for slot in range(self.slots):
            self._drop_graph(slot)
        self._contexts.clear()
        self._allocators.clear()
        self._engine = self._runtime = None
        super().close()


def deserialise(trt: Any, log: Any, path: str) -> tuple[Any, Any]:
    """Return the runtime and the engine in the file; raise a `UserError` with TensorRT's reason for a refusal.

    An engine is executable content: callers pass files from the cache, after a check of their hash, and files named by
    the user.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{path or 'the engine file'} does not exist")
    content = file.read_bytes()
    if not content:
        raise UserError(f"{path} is empty, not an engine")
    runtime = library.new_runtime(trt, log)
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        reason = log.reason()
        if library.OUT_OF_MEMORY_ERROR.search(reason):
            raise MemoryError(f"{path} can't be loaded: the GPU's memory ran out ({reason[:160]})")
        raise UserError(
            f"{path} is not an engine for TensorRT {trt.__version__} on this GPU ({reason}); build it again here"
        )
    return runtime, engine


def list_tensors(trt: Any, engine: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return an engine's inputs and outputs; free dimensions are named by axis: `batch` first, else `dim1`…."""
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        shape = tuple(
            int(n) if n >= 0 else ("batch" if axis == 0 else f"dim{axis}")
            for axis, n in enumerate(engine.get_tensor_shape(name))
        )
        tensor = Tensor(name, library.dtype_name(engine.get_tensor_dtype(name)), shape)
        sides[engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT].append(tensor)
    return tuple(sides[0]), tuple(sides[1])


def _is_in_range(shape: Shape, low: Any, high: Any) -> bool:
    return len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))


def _format_shape(shape: Any) -> str:
    return "x".join(str(int(n)) for n in shape)


def _describe_tensor(tensors: Mapping[str, tuple[str, int]], name: str) -> str:
    return f"{tensors[name][0]} with {tensors[name][1]} dimensions" if name in tensors else "missing"
