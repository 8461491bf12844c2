"""The calls of a PyTorch module's parts, watched by hooks during one run."""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import GpuWork, LayerTimes
from dyno.worker.facts.engine import range_name
from dyno.worker.facts.job import MODULES, UNWATCHED_ERROR, Layer, LayerGraph, Port
from dyno.worker.layers import kernel_trace
from dyno.worker.nets import flops
from dyno.worker.sessions.torch_support import import_torch, takes_hooks, walk_tensors
from dyno.worker.spec import Unavailable, UserError

UNSEEN_ERROR = f"{UNWATCHED_ERROR}; look at its graph: dyno inspect MODEL onnx"
MakeHook = Callable[[str], Callable[..., None]]
PORT_ATTRIBUTE = "_dyno_port"  # attribute that identifies a tensor for its readers


def read(module: Any, *args: Any, **keywords: Any) -> LayerGraph:
    """Read the module's calls on these arguments; see `watch_run`."""
    return watch_run(module, lambda: module(*args, **keywords))


def watch_run(module: Any, run: Callable[[], Any]) -> LayerGraph:
    """Run the module once; return a row per call of a part, in the order in which calls end.

    Parts that only call others have no row, nor does a module of several parts without direct parameters or operations.
    Operations are counted by `torch.utils.flop_counter`. A call in which nothing runs, such as a Dropout's,
    is `skipped`, as is a part with parameters that was never called itself; it has no outputs. Raise a `UserError` for
    TorchScript and programs of torch.export, which take no hooks (see `list_program_parts`).
    """
    torch = import_torch()
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(f"it is TorchScript, {UNSEEN_ERROR}")
    with _make_dispatch_mode() as operators, flops.count_operations() as counter:
        watch = _ModuleWatch(torch, module, lambda: (counter.get_total_flops(), operators.count))
        with hold_hooks(torch, module, lambda _: watch.enter_part, watch.make_leave_hook):
            run()
    if isinstance(module, torch.fx.GraphModule) and not watch.called_parts:
        raise UserError(f"it is a program of torch.export, {UNSEEN_ERROR}")
    return LayerGraph(
        form=MODULES,
        library=f"PyTorch {torch.__version__.partition('+')[0]}",
        parameters=sum(int(p.numel()) for p in module.parameters()),
        layers=tuple(watch.list_rows()),
    )


def _make_dispatch_mode() -> Any:
    """Return a mode that counts the operators that run inside it.

    Their results inherit the mark of the last part they read a result of, so that the part is known after `x + y` too.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class OperatorCounter(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
        supports_higher_order_operators = True  # torch.cond
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            result = func(*args, **(kwargs or {}))
            source = max(walk_tensors((args, kwargs or {})), key=_find_writer, default=None)
            for tensor in walk_tensors(result) if source is not None and _find_writer(source) >= 0 else ():
                if _find_writer(tensor) < 0:
                    setattr(tensor, PORT_ATTRIBUTE, getattr(source, PORT_ATTRIBUTE))
            return result

    return OperatorCounter()


@contextmanager
def hold_hooks(torch: Any, module: Any, make_enter_hook: MakeHook, make_leave_hook: MakeHook) -> Iterator[None]:
    """Set hooks before and after the calls of the module and its parts, made by name, during the block.

    Pure containers and parts that take no hooks are left out.
    """
    hooks = []
    for name, part in _skip_containers(torch, module):
        if takes_hooks(torch, part):
            hooks.append(part.register_forward_pre_hook(make_enter_hook(name)))
            hooks.append(part.register_forward_hook(make_leave_hook(name), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def hold_scopes(torch: Any, module: Any, make_scope: Callable[[str], Any]) -> Iterator[None]:
    """Run each call of the module and its parts inside a context from `make_scope`, by name."""
    stack: list[Any] = []

    def make_enter_hook(name: str) -> Callable[..., None]:
        def enter_part(*_: Any) -> None:
            stack.append(make_scope(name))
            stack[-1].__enter__()

        return enter_part

    def leave_part(*_: Any) -> None:
        stack.pop().__exit__(None, None, None)

    with hold_hooks(torch, module, make_enter_hook, lambda _: leave_part):
        yield


def _skip_containers(torch: Any, module: Any) -> list[tuple[str, Any]]:
    containers = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
    return [(name, part) for name, part in module.named_modules() if type(part) not in containers]


@dataclass
class _OpenCall:
    """A running call: operations and operators before it, those of its parts, and the number of earlier calls."""

    begin: tuple[int, int]
    first: int
    flops: int = 0
    operators: int = 0


class _ModuleWatch:
    """Hooks for every part of a module, and their observations."""

    def __init__(self, torch: Any, module: Any, read_counts: Callable[[], tuple[int, int]]) -> None:
        self._so_far, self._calls, self._open = read_counts, list[Layer](), list[_OpenCall]()
        self._parts = _skip_containers(torch, module)
        self._size_of = {name: sum(p.numel() for p in part.parameters(recurse=False)) for name, part in self._parts}
        self._outer = {name for name, part in self._parts if next(part.children(), None) is not None}
        self._names: dict[int, list[str]] = {}  # a part in several places has several names
        for name, part in module.named_modules(remove_duplicate=False):
            self._names.setdefault(id(part), []).append(name)

    def enter_part(self, part: Any, args: Any) -> None:
        self._open.append(_OpenCall(self._so_far(), len(self._calls)))

    def make_leave_hook(self, name: str) -> Callable[..., None]:

        def leave_part(part: Any, args: Any, keywords: Any, result: Any) -> None:
            call, counts = self._open.pop(), self._so_far()
            flop_count, operator_count = counts[0] - call.begin[0], counts[1] - call.begin[1]
            if self._open:
                self._open[-1].flops += flop_count
                self._open[-1].operators += operator_count
            index = len(self._calls)
            read_ports = [_make_port(t, "") for t in walk_tensors((args, keywords))]
            is_skipped = operator_count == call.operators
            # Tensors written by an inner part, or passed through, keep their mark.
            outputs = [
                _make_port(t, "" if is_skipped or _find_writer(t) >= call.first else f"{index}:{k}")
                for k, t in enumerate(walk_tensors(result))
            ]
            layer = Layer(name=name, type=type(part).__name__, outputs=tuple(outputs), flops=flop_count - call.flops)
            inputs = tuple(port for port in read_ports if port.name)
            self._calls.append(replace(layer, inputs=inputs, modules=tuple(self._names[id(part)]), skipped=is_skipped))

        return leave_part

    @property
    def called_parts(self) -> set[str]:
        """The called parts that have parameters, without the module itself."""
        return {call.name for call in self._calls if call.name and self._count_own_parameters()[call.name]}

    def list_rows(self) -> list[Layer]:
        """Return the calls, then parts that never ran; later calls share the parameters of their part's first."""
        new_counts, calls = self._count_own_parameters(), []
        for call in self._calls:
            size = self._size_of[call.name]
            row = replace(call, parameters=size, shared=size - new_counts.pop(call.name, 0))
            is_wrapper = call.skipped or not (call.name or row.flops)
            if row.parameters or not (is_wrapper and call.name in self._outer):
                calls.append(row)
        kinds = {name: getattr(part, "original_name", type(part).__name__) for name, part in self._parts}
        rest = [(name, count) for name, count in new_counts.items() if count]
        return calls + [Layer(name=n, type=kinds[n], parameters=count, modules=(n,), skipped=True) for n, count in rest]

    def _count_own_parameters(self) -> dict[str, int]:
        """Return each part's own parameters; a shared one counts for the first part."""
        seen_ids: set[int] = set()
        counts: dict[str, int] = {}
        for name, part in self._parts:
            new_parameters = [p for p in part.parameters(recurse=False) if id(p) not in seen_ids]
            seen_ids.update(map(id, new_parameters))
            counts[name] = sum(int(p.numel()) for p in new_parameters)
        return counts


def _make_port(tensor: Any, name: str) -> Port:
    """Return a tensor as a port and mark it with the name; without a name, use the mark of its last writer."""
    if name:
        setattr(tensor, PORT_ATTRIBUTE, name)
    mark = getattr(tensor, PORT_ATTRIBUTE, "")
    return Port(mark, tuple(int(n) for n in tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _find_writer(tensor: Any) -> int:
    """Return the number of the call that wrote the tensor; -1 if none."""
    return int(getattr(tensor, PORT_ATTRIBUTE, "-1:").partition(":")[0])


# CPU time of each call of a PyTorch module's parts, by the clock at its begin and end

DISCARDED_RUNS = 3  # of a profile
HOOKS_NOTE = "PyTorch's rows time a module's own work and the calls of its parts; hooks read the clock."
Mark = tuple[str | None, int]  # name of the part whose call ends (None: a call begins), and the clock in ns


def measure_modules(
    module: Any,
    run_step: Callable[[], None],
    call: Callable[[], Any],
    runs: int,
    restore: Callable[[], None] = lambda: None,
) -> LayerTimes:
    """Measure the seconds of each call of a part, without its own parts', in `runs` runs of `run_step`.

    `call` calls the module for `watch_run`, outside inference mode, in which operations aren't counted. `restore` is
    called before each run, untimed. Hooks cost less than PyTorch's profiler, which watches every operator. Raise a
    `UserError` as `watch_run` does.
    """
    graph = watch_whole(module, call, restore)
    marks: list[Mark] = []
    clock = time.perf_counter_ns

    def make_enter_hook(_: str) -> Callable[..., None]:
        return lambda *_: marks.append((None, clock()))

    def make_leave_hook(name: str) -> Callable[..., None]:
        return lambda *_: marks.append((name, clock()))

    rows = list_modules(graph)
    layers, totals = [], []
    with hold_hooks(import_torch(), module, make_enter_hook, make_leave_hook):
        for _ in range(DISCARDED_RUNS + runs):
            restore()
            marks.clear()
            start = clock()
            run_step()
            totals.append((clock() - start) / 1e9)
            layers.append(sum_own_seconds(marks, rows, len(graph.layers)))
    return LayerTimes(graph, np.array(layers[DISCARDED_RUNS:]), np.array(totals[DISCARDED_RUNS:]), HOOKS_NOTE)


def watch_whole(module: Any, call: Callable[[], Any], restore: Callable[[], None]) -> LayerGraph:
    """Return the calls of the module's parts by `watch_run`, and the module itself."""
    restore()
    with import_torch().no_grad():
        return add_whole(watch_run(module, call), module)


def add_whole(graph: LayerGraph, module: Any) -> LayerGraph:
    """Add a row for the module itself: its code outside submodules."""
    if any(not layer.name for layer in graph.layers):
        return graph
    return replace(graph, layers=(*graph.layers, Layer(type=type(module).__name__, flops=0, modules=("",))))


def list_modules(graph: LayerGraph) -> dict[tuple[str, int], int]:
    """Return the row of each call, by the part's name and the call's number, counted from 0."""
    return {call: row for row, call in enumerate(graph.count_calls())}


def sum_own_seconds(marks: Sequence[Mark], rows: Mapping[tuple[str, int], int], count: int) -> list[float]:
    """Return the seconds of each row in one run, from the marks in order.

    The own time of a call without a row counts for the enclosing call.
    """
    seconds, counts = [0.0] * count, Counter[str]()
    stack: list[tuple[int, list[int]]] = []  # begin of each open call, and nanoseconds of the calls inside it
    for name, clock_ns in marks:
        if name is None:
            stack.append((clock_ns, []))
            continue
        begin, inner_ns = stack.pop()
        row = rows.get((name, counts[name]))
        counts[name] += 1
        call_ns = clock_ns - begin if row is not None else sum(inner_ns)
        if row is not None:
            seconds[row] += (call_ns - sum(inner_ns)) / 1e9
        if stack:
            stack[-1][1].append(call_ns)
    return seconds


# GPU time of the kernels of each call of a PyTorch module's parts, by PyTorch's profiler

KERNELS_NOTE = (
    "PyTorch's rows have the time of the kernels and copies that a module launched itself, by torch.profiler; idle "
    "time is in no row."
)


def measure_kernels(
    module: Any,
    run_step: Callable[[], None],
    call: Callable[[], Any],
    runs: int,
    restore: Callable[[], None] = lambda: None,
) -> LayerTimes:
    """Measure the kernels' seconds of each call of a part, without its own parts', in `runs` runs of `run_step`.

    `run_step` returns when the GPU is done; `call` and `restore` are as in `measure_modules`. Raise a `UserError` as
    `watch_run` does, and `Unavailable` if the profiler sees no kernel.
    """
    graph = watch_whole(module, call, restore)
    import_torch().cuda.synchronize()
    events, totals = trace_kernels(module, run_step, DISCARDED_RUNS + runs, restore)
    traced_runs = kernel_trace.read_runs(events, list_modules(graph), len(graph.layers))[DISCARDED_RUNS:]
    if len(traced_runs) != runs or not any(run.kernels for run in traced_runs):
        raise Unavailable("torch.profiler saw no kernel on the GPU; CUPTI may be missing or forbidden here")
    labels = kernel_trace.list_kernels(traced_runs, len(graph.layers))
    layers = tuple(replace(layer, tactic=label) for layer, label in zip(graph.layers, labels, strict=True))
    work = GpuWork(*(np.array([getattr(run, name) for run in traced_runs]) for name in ("busy", "calls", "kernels")))
    seconds = np.array([run.seconds for run in traced_runs])
    return LayerTimes(replace(graph, layers=layers), seconds, np.array(totals[DISCARDED_RUNS:]), KERNELS_NOTE, work,
                      kernel_trace.list_functions(events, DISCARDED_RUNS))  # fmt: skip


def trace_kernels(
    module: Any, run_step: Callable[[], None], runs: int, restore: Callable[[], None] = lambda: None
) -> tuple[list[dict[str, Any]], list[float]]:
    """Trace `runs` runs; return the trace's events and the host's seconds of each run.

    The events include the ranges of `kernel_trace`.
    """
    torch = import_torch()
    from torch.profiler import ProfilerActivity, profile, record_function

    def make_scope(name: str) -> Any:
        return record_function(f"{kernel_trace.CALL_RANGE}{name}")

    totals = []
    with hold_scopes(torch, module, make_scope), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about other uses
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(runs):
                restore()
                start = time.perf_counter()
                with record_function(kernel_trace.RUN_RANGE):
                    run_step()
                totals.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"), strict=False)["traceEvents"], totals


# A PyTorch module run once for a profiler of kernels, with an NVTX range around each call of a part


def run_ranges(module: Any, run_step: Callable[[], None]) -> None:
    """Call `run_step`, which returns when the GPU is done, between start and stop of CUDA's profiler.

    Ranges are named by `range_name`. TorchScript parts have none: their hooks wouldn't be called.
    """
    torch = import_torch()
    counts: Counter[str] = Counter()

    @contextmanager
    def open_range(name: str) -> Iterator[None]:
        counts[name] += 1
        torch.cuda.nvtx.range_push(range_name(name, counts[name]))
        yield
        torch.cuda.nvtx.range_pop()

    with hold_scopes(torch, module, open_range), torch.cuda.profiler.profile():
        run_step()
