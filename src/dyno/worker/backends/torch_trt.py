"""Torch-TensorRT: a module with TensorRT engines in place of its operators, called like the module."""

from __future__ import annotations

import importlib
import inspect
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from dyno.worker.backend import Session
from dyno.worker.backends.pytorch import PyTorch, TorchSession
from dyno.worker.backends.tensor_rt import layers
from dyno.worker.backends.tensor_rt.settings import STATIC_OPTION, batch_range, explain_outside
from dyno.worker.extras import load_library
from dyno.worker.facts.engine import MIN_MENTIONED_SHARE, Compilation, EngineFacts, Probe, precision_truth
from dyno.worker.makers.control_flow import check_control_flow, traced_values
from dyno.worker.option_values import Check, one_of, whole
from dyno.worker.record import TIMING_VARIABLE
from dyno.worker.sessions.torch_support import (
    count_weight_types,
    device_named,
    first_line,
    import_torch,
    is_memory_error,
    memory_errors,
)
from dyno.worker.spec import Artifact, Option, Trial, Unavailable, UserError

# The result of Torch-TensorRT's compilation: engines, and operators left to PyTorch
#
# A program is a `ScriptModule` (the TorchScript route), or an `ExportedProgram` or `GraphModule` (the Dynamo route, by
# version).

ENGINE_CLASS = "torch.classes.tensorrt.Engine"


def list_engines(program: Any) -> list[Any]:
    """Return the program's `torch.classes.tensorrt.Engine` objects."""
    if hasattr(program, "inlined_graph"):
        return [program._c.getattr(name) for name in list_attributes(program, ENGINE_CLASS)]
    by_id = {id(value): value for value in _iter_values(program) if hasattr(value, "get_engine_layer_info")}
    return list(by_id.values())


def list_attributes(program: Any, kind: str) -> list[str]:
    """Return the names of the script module's attributes of that type that its graph reads."""
    nodes = program.graph.findAllNodes("prim::GetAttr")
    return sorted({node.s("name") for node in nodes if str(node.output().type()).endswith(kind)})


def _iter_values(program: Any) -> Iterator[Any]:
    """Yield all values of a graph module and its parts: attributes, and arguments in the graph."""
    for module in _iter_parts(program):
        yield from vars(module).values()
        for node in _list_nodes(module):
            yield from node.args


def left_in_pytorch(program: Any) -> dict[str, int]:
    """Return the number of calls of each operator left in PyTorch; empty if the whole module became engines."""
    if hasattr(program, "inlined_graph"):
        kinds = (node.kind() for node in _iter_scripted_nodes(program.inlined_graph))
        return dict(Counter(kind for kind in kinds if kind.startswith("aten::")))
    targets = (node.target for m in _iter_parts(program) for node in _list_nodes(m) if node.op == "call_function")
    names = (target._schema.name for target in targets if hasattr(target, "_schema"))
    return dict(Counter(name for name in names if not name.startswith("tensorrt::")))


def _iter_scripted_nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner_block in node.blocks():
            yield from _iter_scripted_nodes(inner_block)


def _iter_parts(program: Any) -> Iterator[Any]:
    yield from getattr(program, "graph_module", program).modules()


def _list_nodes(module: Any) -> Any:
    return module.graph.nodes if hasattr(module, "graph") else ()


COMPILE_ROUTES = ("ts", "dynamo")
INSTALL_ADVICE = "pip install torch-tensorrt, and let LD_LIBRARY_PATH lead to TensorRT's libraries"
NO_INT8 = "torch_tensorrt has no int8 here: newer versions have no calibrator; use tensorrt for int8"
OPTIMIZATION_LEVELS = range(6)
TIMED_CALLS = 20  # their mean is the engine's own time
HEAD_START = 50_000_000  # GPU clock cycles (25 ms on an H200) for queueing those calls


def _check_profile(value: Option) -> str:
    try:
        is_valid = str(value) == STATIC_OPTION or batch_range(str(value)) is not None
    except UserError:
        is_valid = False
    return "" if is_valid else f"{STATIC_OPTION}, or batches MIN:OPT:MAX such as 1:8:16"


class TorchTensorRT(PyTorch):
    """Torch-TensorRT 2.2 and newer, compiled inside `load`.

    Options: `ir` (ts, dynamo), `profile` (static, or min:opt:max batches), `optimization` (builder level 0 to 5, only
    Dynamo), `workspace_mb`, `min_block_size` (smallest number of consecutive operators for an engine). Memory layout is
    no option: the runtime makes every input contiguous.
    """

    name = "torch_tensorrt"
    requires = ("torch", "torch_tensorrt", "tensorrt|tensorrt-cu12|tensorrt-cu13")
    precisions = ("fp32", "tf32", "fp16")
    devices = ("cuda",)
    profiled = ()
    options = ("ir", "profile", "optimization", "workspace_mb", "min_block_size")
    values: Mapping[str, Check] = {
        "ir": one_of(*COMPILE_ROUTES), "optimization": whole(OPTIMIZATION_LEVELS[0], OPTIMIZATION_LEVELS[-1]),
        "workspace_mb": whole(0), "min_block_size": whole(1), "profile": _check_profile,
    }  # fmt: skip

    def refuse(self, trial: Trial) -> str:
        """See `Backend.refuse`; also contradictory options, and batches outside the profile."""
        if trial.precision == "int8":
            return NO_INT8
        return super().refuse(trial) or _find_conflict(trial)

    def probe(self) -> Probe:
        """Compile one convolution and run it on the first GPU."""
        torch = import_torch()
        device = device_named(torch, "cuda:0")
        library = load_library("torch_tensorrt", cure=INSTALL_ADVICE)
        module = torch.nn.Conv2d(3, 4, 3).eval().to(device)
        x = torch.randn(1, 3, 8, 8, device=device)
        with torch.no_grad():
            engine = compile_module(
                library, module, x, "fp32", {"ir": COMPILE_ROUTES[0], "profile": STATIC_OPTION, "min_block_size": 1}
            )
            if not torch.allclose(engine(x), module(x), rtol=1e-3, atol=1e-3):
                raise UserError("Torch-TensorRT computes a convolution wrongly on this GPU")
        devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        gpus = ", ".join(torch.cuda.get_device_name(name) for name in devices)
        detail = f"TensorRT {importlib.import_module('tensorrt').__version__}, torch {torch.__version__}, {gpus}"
        return Probe(version=library.__version__, devices=tuple(devices), detail=detail)

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Compile for the trial's shape or profile; its seconds are `build_s` in the session's facts."""
        options = self.checked(trial)
        with memory_errors():
            return TorchTensorRTSession(trial, options)

    def checked(self, trial: Trial) -> dict[str, Any]:
        """See `PyTorch.checked`; raise a `UserError` for options that don't fit."""
        options = {"ir": COMPILE_ROUTES[0], "profile": STATIC_OPTION, **super().checked(trial), "channels_last": False}
        if reason := _find_conflict(trial):
            raise UserError(reason)
        return options


TORCH_TENSORRT = TorchTensorRT()


def _find_conflict(trial: Trial) -> str:
    """Return why the options can't be used, in one line; "" if they can."""
    options = trial.options
    route, level = options.get("ir", COMPILE_ROUTES[0]), options.get("optimization")
    if level is not None and route == "ts":
        return "the TorchScript route has no optimization level; give ir=dynamo, or omit optimization"
    return explain_outside(str(options.get("profile", STATIC_OPTION)), trial.dims.batch)


def compile_module(library: Any, module: Any, example: Any, precision: str, options: Mapping[str, Any]) -> Any:
    """Compile the module for inputs like `example`, a tensor or a tuple; handle differences between versions.

    Types are the module's own if the version allows it (from 2.5 on); else flags allow them to the builder.
    """
    import torch

    route = options["ir"]
    frontend = getattr(library, route, None)
    if frontend is None:
        raise UserError(f"Torch-TensorRT {library.__version__} was built without its {route} route; give the other ir")
    parameters = inspect.signature(frontend.compile).parameters
    examples = example if isinstance(example, tuple) else (example,)
    dtypes = {x.dtype for x in examples if x.is_floating_point()} or {torch.float32}
    keywords: dict[str, Any] = {"device": examples[0].device, "disable_tf32": precision != "tf32"}
    # TensorRT 8.6 lacks both types, used in constants such as shapes and scales.
    keywords |= {name: True for name in ("truncate_long_and_double", "truncate_double") if name in parameters}
    keywords |= {"use_explicit_typing": True} if "use_explicit_typing" in parameters else {"enabled_precisions": dtypes}
    keywords |= {"workspace_size": options["workspace_mb"] << 20} if options.get("workspace_mb") else {}
    keyword_names = {"min_block_size": "min_block_size", "optimization": "optimization_level"}
    keywords |= {name: options[option] for option, name in keyword_names.items() if option in options}
    # before tracing: a traced module has no signature
    keywords["inputs"] = [_make_input(library, module, x, options["profile"], k) for k, x in enumerate(examples)]
    with tempfile.TemporaryDirectory() as scratch, _layer_types_kept():
        if "timing_cache_path" in parameters:  # the default file is shared by all programs of the machine
            folder = os.environ.get(TIMING_VARIABLE, scratch)
            keywords["timing_cache_path"] = str(Path(folder) / f"torch_tensorrt-{library.__version__}.timing")
        if route == "ts":
            module = _trace_module(torch, module, examples)
        return library.compile(module, ir=route, **keywords)


def _trace_module(torch: Any, module: Any, examples: tuple[Any, ...]) -> Any:
    """Trace the module, as scripting refuses many; raise a `UserError` if that would fix one of several paths."""
    is_static = check_control_flow(torch, module, examples)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = torch.jit.trace(module, examples, strict=False, check_trace=False)
    if not is_static and (values := traced_values(torch, caught)):
        raise UserError(f"tracing turned a value of its example into a constant ({values}); give the option ir=dynamo")
    return trace


def _make_input(library: Any, module: Any, example: Any, profile: str, index: int) -> Any:
    batches = batch_range(profile) if profile != STATIC_OPTION and example.ndim else None
    if batches is None or batches[0] == batches[-1]:
        return library.Input(shape=tuple(example.shape), dtype=example.dtype)
    ranges = zip(("min_shape", "opt_shape", "max_shape"), batches, strict=True)
    shapes: dict[str, Any] = {name: (batch, *example.shape[1:]) for name, batch in ranges}
    names = [*inspect.signature(module.forward).parameters]  # Dynamo's key of a free dimension
    name = names[min(index, len(names) - 1)]
    return library.Input(**shapes, dtype=example.dtype, name=name)


@contextmanager
def _layer_types_kept() -> Iterator[None]:
    """Make engines store their layers' types during the block, whatever verbosity is set.

    Torch-TensorRT stores only names, except in its debug mode, which has other effects too. The TorchScript route sets
    the verbosity in C++, out of reach.
    """
    tensorrt = importlib.import_module("tensorrt")
    config, name = tensorrt.IBuilderConfig, "profiling_verbosity"
    original = vars(config).get(name)
    if not isinstance(original, property) or original.fset is None:
        yield
        return
    write = original.fset
    setattr(config, name, property(original.fget, lambda self, _: write(self, tensorrt.ProfilingVerbosity.DETAILED)))
    try:
        yield
    finally:
        setattr(config, name, original)


class TorchTensorRTSession(TorchSession):
    """A compiled module, called as by its users; its engine is also timed alone, for the facts."""

    def __init__(self, trial: Trial, options: dict[str, Any]) -> None:
        super().__init__(trial, options)
        self._library = load_library("torch_tensorrt", cure=INSTALL_ADVICE)
        self.try_eager()
        self._torch.cuda.empty_cache()  # room for the builder
        start = time.perf_counter()
        try:
            with self._torch.no_grad(), self._torch.cuda.device(self._device):
                example = tuple(self._bound[0].values())
                self._call = compile_module(self._library, self._eager, example, trial.precision, options)
            self._build_s = time.perf_counter() - start
            self._run_once()
        except Exception as e:  # compilers raise Python's, PyTorch's or TensorRT's errors
            raise self._explain_refusal(e) from e

    def _explain_refusal(self, e: Exception) -> Exception:
        if is_memory_error(e) or "out of memory" in str(e).lower():
            return MemoryError(first_line(e))
        if isinstance(e, (UserError, Unavailable, MemoryError)):
            return e
        shape = ", ".join("x".join(map(str, t.shape)) for t in self.inputs)
        return UserError(
            f"Torch-TensorRT {self._library.__version__} (ir={self._options['ir']}) can't compile "
            f"{self._trial.model.name} for {shape} in {self._trial.precision}: {first_line(e)}"
        )

    def facts(self) -> EngineFacts:
        """Return engines and operators left in PyTorch, layers, and the engine's own time in addition to a call's."""
        engines = list_engines(self._call)
        common, layer_facts, times = self._read_common_facts(), self._layers_of(engines), self._time_calls(engines)
        operators = left_in_pytorch(self._call)
        notes = (
            *common.notes,
            *layer_facts.notes,
            *_notes_on_calls(times),
            *_notes_on_operators(operators, len(engines)),
        )
        return replace(
            common.merge(layer_facts).merge(times),
            engines=len(engines),
            operators_in_pytorch=operators,
            build_s=self._build_s,
            notes=notes,
        )

    def _layers_of(self, engines: list[Any]) -> EngineFacts:
        """Return layers by type from the engines' own information, else from the types of the compiled weights."""
        engine_layers = [layer for engine in engines for layer in layers.from_json(engine.get_engine_layer_info())]
        if any(layer.type for layer in engine_layers):
            precision = self._trial.precision
            return EngineFacts(notes=tuple(layers.list_notes(engine_layers, precision))).merge(
                layers.summarise_layers(engine_layers, precision)
            )
        types = count_weight_types(self._torch, self._module)
        truth = precision_truth(self._trial.precision, types, "Torch-TensorRT")
        sentence = (
            f"asked for {self._trial.precision}: {sum(types.values())} compute layers were compiled for "
            f"{' and '.join(types)}; these engines don't report types, so the type of each layer is not confirmed"
        )
        truth = replace(truth, sentence=sentence)
        return EngineFacts(layers=len(engine_layers), layers_by_type=types, precision_truth=truth)

    def _time_calls(self, engines: list[Any]) -> Compilation:
        """Return a call's seconds by the host's clock and, for a single engine, the engine's own seconds."""
        calls = []
        for _ in range(TIMED_CALLS):
            start = time.perf_counter()
            self._run_once()
            calls.append(time.perf_counter() - start)
        if len(engines) != 1:
            return Compilation(call_s=median(calls))
        engine_s = self._engine_seconds(engines[0])
        return Compilation(call_s=median(calls), engine_s=engine_s, call_overhead_s=max(median(calls) - engine_s, 0.0))

    def _engine_seconds(self, engine: Any) -> float:
        """Return the mean GPU seconds of the engine alone.

        CUDA events enclose calls that were all queued before the first ran.
        """
        cuda, execute, feeds = self._torch.cuda, self._torch.ops.tensorrt.execute_engine, [*self._bound[0].values()]
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        with self._use_stream(self._queue):
            execute(feeds, engine)
            cuda._sleep(HEAD_START)
            begin.record(self._queue)
            for _ in range(TIMED_CALLS):
                execute(feeds, engine)
            end.record(self._queue)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / TIMED_CALLS


def _notes_on_calls(times: Compilation) -> list[str]:
    call, engine = times.call_s, times.engine_s
    if call is None or engine is None:
        return ["there is more than one engine, so the calls between them and PyTorch are not timed separately"]
    if call - engine <= MIN_MENTIONED_SHARE * engine:
        return []
    return [f"a call takes {call * 1e3:.3g} ms for an engine of {engine * 1e3:.3g} ms: the rest is launch overhead"]


def _notes_on_operators(operators: Mapping[str, int], count: int) -> list[str]:
    if not count:
        return ["nothing became an engine: all of it runs in PyTorch"]
    names = ", ".join(sorted(operators)[:3]) + (f" and {len(operators) - 3} more" if len(operators) > 3 else "")
    return [f"{sum(operators.values())} operators still run in PyTorch ({names})"] if operators else []
