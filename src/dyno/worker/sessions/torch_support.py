"""Common code of the PyTorch backends: settings, outputs by name, conversion of PyTorch's errors."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import system
from dyno.worker.extras import load_library
from dyno.worker.facts.engine import OUTSIDE_NOTE
from dyno.worker.inputs.specs import make_arguments
from dyno.worker.spec import INFERENCE_PARTS, InputSpec, Tensor, Trial, Unavailable, UserError, digest, shorten
from dyno.worker.system import PROBES_VARIABLE

NO_COMPILER = "{} needs a C++ compiler and found no {}; install one (Debian: apt-get install g++)"
NO_HEADERS = "torch.compile needs Python's headers; install them (Debian: apt-get install python3-dev)"
NOTEWORTHY_S = 0.5
SCRIPTED_ERROR = re.compile(r"^(?:\w*Error:\s+)+(\S.*)$", re.MULTILINE)  # the message after TorchScript's traceback
NO_MEMORY = (
    "can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "bad_alloc",
)


def configure(torch: Any, trial: Trial, benchmark: bool) -> None:
    """Set the threads and the arithmetic of fp32: IEEE, unless the trial's precision is tf32."""
    torch.set_num_threads(trial.runtime.threads)
    if torch.get_num_interop_threads() != 1:
        # Only settable once, before the first parallel work; operators run one at a time here anyway.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(1)
    is_tf32 = trial.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = is_tf32
    torch.backends.cudnn.allow_tf32 = is_tf32
    torch.backends.cudnn.benchmark = benchmark
    # "high" would also let a CPU compute float32 products in bfloat16.
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")


@contextlib.contextmanager
def settings_kept(torch: Any) -> Iterator[None]:
    """Restore process-wide settings after the block: threads, gradients, default type and device, fp32 arithmetic.

    A model's file may set them for its own use, but a measurement needs the same settings for every backend.
    """
    backends, cudnn, matmul = torch.backends, torch.backends.cudnn, torch.backends.cuda.matmul
    # The first two also set the values of single operators, which `allow_tf32` restores.
    owners = [(owner, "fp32_precision") for owner in (backends, cudnn) if hasattr(owner, "fp32_precision")]
    owners += [(cudnn, "allow_tf32"), (matmul, "allow_tf32"), (cudnn, "benchmark")]
    values = [(owner, name, getattr(owner, name)) for owner, name in owners]
    threads, gradients, dtype = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        torch.set_float32_matmul_precision(precision)
        for owner, name, value in values:
            setattr(owner, name, value)


@contextlib.contextmanager
def one_thread(torch: Any) -> Iterator[None]:
    """Run the block without gradients and in one thread, for reference values.

    With torch 2.2 (MKL of 2022), some float64 convolutions are wrong with eight or more threads, by several times the
    outputs' standard deviation.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


def make_positional(torch: Any, module: Any, specs: Sequence[InputSpec], flat: bool = False) -> Any:
    """Return a wrapper of a module with described inputs that takes their tensors in order.

    With `flat` it returns a tuple of tensors.
    """
    names = [spec.name for spec in specs if spec.dtype] or ["input"]

    class Positional(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, *values: Any) -> Any:
            args, keywords = make_arguments(specs, dict(zip(names, values, strict=True)))
            result = self.model(*args, **keywords)
            return tuple(walk_tensors(result)) if flat else result

    wrapper = Positional()
    wrapper.training = module.training
    return wrapper


def set_eval(module: Any) -> Any:
    """Return the module in eval mode; a program of torch.export has a fixed mode and refuses to change it."""
    with contextlib.suppress(NotImplementedError):
        module.eval()
    return module


@contextlib.contextmanager
def silence_warnings() -> Iterator[None]:
    """Run the block without Python's warnings: exporters and compilers warn about their own internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def named_outputs(result: Any) -> dict[str, Any]:
    """Return a module's result as tensors by name: output, output_1, output_2… in the order of its tuples and dicts.

    Complex tensors get their real and imaginary parts along a last axis, as in graphs: NumPy's and PyTorch's casts to a
    real type drop the imaginary part. Raise a `UserError` for a result without tensors or with a non-dense tensor.
    """
    tensors = [*walk_tensors(result)]
    for tensor in tensors:
        if tensor.is_nested or str(tensor.layout) != "torch.strided":
            kind, call = ("nested", "to_padded_tensor(0)") if tensor.is_nested else ("sparse", "to_dense()")
            raise UserError(f"the model returns a {kind} tensor, which no engine does; let its forward return .{call}")
    outputs = [real_view(tensor) for tensor in tensors]
    if not outputs:
        raise UserError(f"the model returns a {type(result).__name__} without tensors; it must return at least one")
    return {f"output_{i}" if i else "output": tensor for i, tensor in enumerate(outputs)}


def walk_tensors(result: Any) -> Iterator[Any]:
    """Yield the tensors inside nested dicts, lists, tuples and dataclasses, in order.

    A strict export traces this, and refuses `hasattr` on most objects.
    """
    if getattr(type(result), "detach", None):
        yield result
    elif isinstance(result, (Mapping, list, tuple)):
        for item in result.values() if isinstance(result, Mapping) else result:
            yield from walk_tensors(item)
    elif getattr(type(result), "__dataclass_fields__", None):
        for field in dataclasses.fields(result):
            yield from walk_tensors(getattr(result, field.name))


def real_view(tensor: Any) -> Any:
    """Return the tensor; a complex one as real and imaginary parts along a last axis."""
    return import_torch().view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _is_whole(tensor: Any) -> bool:
    """Return whether the tensor holds whole numbers or booleans."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)


def host_type(tensor: Any) -> Any:
    """Return a tensor's type when fetched: its own for whole numbers and booleans, else float32."""
    return tensor.dtype if _is_whole(tensor) else import_torch().float32


def as_fetched(tensor: Any) -> Any:
    """Return the tensor in its `host_type`; without look-ups, since the boundary `all` times it."""
    return tensor if _is_whole(tensor) else tensor.float()


def describe_outputs(result: Any) -> tuple[Tensor, ...]:
    """Return name, type and shape of a module's outputs as fetched."""
    outputs = named_outputs(result).items()
    return tuple(Tensor(k, str(host_type(v)).removeprefix("torch."), tuple(v.shape)) for k, v in outputs)


def cast(module: Any, kind: str) -> Any:
    """Return the module with its floating-point weights in the named type.

    Complex weights keep their type: `.to` would drop their imaginary part.
    """
    name = {"float32": "float", "float16": "half", "bfloat16": "bfloat16"}[kind]
    torch = import_torch()
    owner = torch.nn.Module if isinstance(module, torch.jit.ScriptModule) else type(module)  # it lacks `bfloat16`
    return getattr(owner, name)(module)


def unwrap_module(torch: Any, module: Any) -> Any:
    """Return the module inside torch.compile and DataParallel: it runs eagerly on one device unless a backend differs.

    Raise a `UserError` for lazy weights: they have no values to compare.
    """
    while isinstance(module, torch.nn.DataParallel) or getattr(module, "_orig_mod", None) is not None:
        module = module.module if isinstance(module, torch.nn.DataParallel) else module._orig_mod
    if any(hasattr(tensor, "materialize") for tensor in (*module.parameters(), *module.buffers())):
        name = type(module).__name__
        raise UserError(f"{name} has lazy weights, which its first call makes; call it once on an input first")
    return module


def make_eager(torch: Any, module: Any) -> Any:
    """Return the module of `unwrap_module`, with its parts unwrapped in place."""
    module = unwrap_module(torch, module)
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        if getattr(part, "_compiled_call_impl", None) is not None:  # set by module.compile()
            part._compiled_call_impl = None
        for name, child in part._modules.items():
            part._modules[name] = child if child is None else unwrap_module(torch, child)
    return module


def refuse_script(torch: Any, module: Any, reader: str = "torch.export") -> Any:
    """Return the module; raise `Unavailable` for TorchScript, unreadable to the reader."""
    if isinstance(module, torch.jit.ScriptModule):
        raise Unavailable(f"{reader} can't read TorchScript; give the module itself, or a program of torch.export")
    return module


def count_weight_types(torch: Any, module: Any) -> dict[str, int]:
    """Return the number of compute layers by the type of their weights."""
    layers: list[Any] = [part for part in module.modules() if isinstance(part, compute_layers(torch))]
    weights = [next(layer.parameters(), None) for layer in layers]
    return dict(Counter(str(w.dtype).removeprefix("torch.") for w in weights if w is not None))


def takes_hooks(torch: Any, part: Any) -> bool:
    """Return whether hooks can watch a part's calls; false for a scripted part, even in an eager module."""
    return not isinstance(part, torch.jit.RecursiveScriptModule)


def compute_layers(torch: Any) -> tuple[type, ...]:
    """Return the module classes of a network's arithmetic: convolution, matrix product, attention, recurrence."""
    nn = torch.nn
    return (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


PRODUCT_OPERATOR = re.compile("conv|linear")  # names of quantised operators


def count_products(run: Callable[[], Any]) -> dict[str, int]:
    """Return the number of a run's operators that multiply, by the type of their results.

    These are the operators with FLOPs in PyTorch's counter and, as int8, quantised layers. Return {} for a run with
    unobservable operators, such as branches of a program.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    kinds: Counter[str] = Counter()

    class Products(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), options: Any = None) -> Any:
            is_quantised = operator.namespace == "quantized" and PRODUCT_OPERATOR.match(
                operator.overloadpacket.__name__
            )
            is_product = is_quantised or operator.overloadpacket in flop_registry
            if not is_product:
                with self:  # its parts
                    result = operator.decompose(*args, **(options or {}))
                if result is not NotImplemented:
                    return result
            result = operator(*args, **(options or {}))
            if is_product:
                kinds["int8" if is_quantised else str(next(walk_tensors(result)).dtype).removeprefix("torch.")] += 1
            return result

    try:
        with Products():
            run()
    except (NotImplementedError, RuntimeError):
        return {}
    return dict(kinds)


def is_quantised(module: Any) -> bool:
    """Return whether the module is a quantised layer of torch.ao, with packed 8-bit weights.

    These are not parameters; a method `weight`, or `get_weight` of a recurrent layer, returns them.
    """
    methods = (getattr(module, name, None) for name in ("weight", "get_weight"))
    return ".quantized" in type(module).__module__ and any(map(callable, methods))


def list_notes(trial: Trial) -> list[str]:
    """Return why a lower precision isn't faster on this CPU, judged by its feature flags."""
    if trial.runtime.device != "cpu" or system.has_arithmetic(trial.precision):
        return []
    return [f"this CPU has no {trial.precision} arithmetic: PyTorch computes in float32 and converts around it"]


def list_kernels() -> set[str]:
    """Return the compiled kernels in inductor's cache folder."""
    from torch._inductor.codecache import cache_dir

    folder = Path(cache_dir())
    return {str(p) for p in folder.rglob("*") if p.suffix in (".so", ".cubin", ".hsaco")}


def probe_processor() -> float:
    """Probe the C++ compiler's instruction sets for this processor; return the seconds of the original probe.

    Inductor probes in each process: it compiles a file per instruction set and starts a Python that imports PyTorch, 27
    s on two cores. Successes are cached for this PyTorch, compiler and processor, except in cold starts, which measure
    the user's own processes.
    """
    try:
        from torch._inductor import cpu_vec_isa

        check_build, describe = cpu_vec_isa.VecISA.check_build, cpu_vec_isa._get_isa_dry_compile_fingerprint
    except (ImportError, AttributeError):  # other internal names in another version
        return 0.0
    durations: list[float] = []
    folder, flags = os.environ.get(PROBES_VARIABLE, ""), system.describe()["cpu_flags"]

    def remember(isa: Any, code: str) -> bool:
        key = digest([describe(isa._arch_flags), code, flags])
        cache_file = Path(folder, key) if folder else None
        with contextlib.suppress(OSError, ValueError):
            if cache_file:
                durations.append(float(cache_file.read_text()))
                return True
        start = time.perf_counter()
        can_build = bool(check_build(isa, code))
        durations.append(time.perf_counter() - start)
        if can_build and cache_file:
            with contextlib.suppress(OSError):
                cache_file.parent.mkdir(parents=True, exist_ok=True)
                cache_file.write_text(str(durations[-1]))
        return can_build

    cpu_vec_isa.VecISA.check_build = remember
    try:
        cpu_vec_isa.pick_vec_isa()
    finally:
        cpu_vec_isa.VecISA.check_build = check_build
    return sum(durations)


def describe_probe(seconds: float) -> list[str]:
    """Return a note on the seconds of `probe_processor`, from NOTEWORTHY_S on."""
    if seconds < NOTEWORTHY_S:
        return []
    return [f"{OUTSIDE_NOTE} every process also probes what g++ can build for this processor: {seconds:.0f} s here"]


def first_line(e: BaseException) -> str:
    """Return the first line of the error's message, without its full stop.

    TorchScript's message begins with the place: return its error instead.
    """
    text = str(e)
    if "TorchScript interpreter" in text and (errors := SCRIPTED_ERROR.findall(text)):
        return shorten(errors[-1])
    message = next((line.strip() for line in text.splitlines() if line.strip()), type(e).__name__)
    return shorten(message).removesuffix(".")


def allocator_peaks(torch: Any, device: Any) -> dict[str, Any]:
    """Return the facts `allocated` and `reserved` of PyTorch's allocator on the GPU, in bytes; {} on a CPU.

    They are the peaks so far of memory given out and of memory held.
    """
    if device.type != "cuda":
        return {}
    peaks = {"allocated": torch.cuda.max_memory_allocated, "reserved": torch.cuda.max_memory_reserved}
    return {name: int(peak(device)) for name, peak in peaks.items()}


def is_memory_error(e: BaseException) -> bool:
    """Return whether the device or the host ran out of memory; PyTorch has an error type only for the device."""
    text = str(e)
    return type(e).__name__ == "OutOfMemoryError" or any(pattern in text for pattern in NO_MEMORY)


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Convert PyTorch's various out-of-memory errors in the block to `MemoryError`."""
    try:
        yield
    except RuntimeError as e:
        if is_memory_error(e):
            raise MemoryError(first_line(e)) from e
        raise


@contextlib.contextmanager
def raise_refusals(sentence: str, advice: str = "") -> Iterator[None]:
    """Convert errors of the block to a `UserError`: the sentence, the error's first line, and the advice.

    It is for libraries and modules without a common error type. Running out of memory stays a `MemoryError`.
    """
    try:
        yield
    except (UserError, Unavailable, MemoryError):
        raise
    except Exception as e:
        if is_memory_error(e):
            raise MemoryError(first_line(e)) from e
        raise UserError(f"{sentence}: {first_line(e)}{advice}") from e


@contextlib.contextmanager
def compiler_errors() -> Iterator[None]:
    """Convert inductor's errors about missing software to `Unavailable`.

    Missing may be a C++ compiler, Python's headers, or a library that inductor imports.
    """
    try:
        yield
    except Exception as e:  # inductor's error types change between versions
        text = f"{type(e).__name__} {e}"
        if "InvalidCxxCompiler" in text:
            raise Unavailable(NO_COMPILER.format("torch.compile", _find_compiler())) from e
        if "Python.h" in text:
            raise Unavailable(NO_HEADERS) from e
        match = re.search(r"ModuleNotFoundError: No module named '(\w+)'", text)
        if match:  # torch 2.2 needs setuptools to compile for a CPU
            raise Unavailable(f"torch.compile needs {match[1]} here; install it with: pip install {match[1]}") from e
        cause = getattr(e, "inner_exception", None)  # the wrapper's own message has no reason
        if cause is not None:
            compiler_error = re.search(r" error: (.*)", text)  # errors of the C++ compiler
            reason = first_line(cause) + (f": {compiler_error[1]}" if compiler_error else "")
            raise RuntimeError(f"inductor failed: {type(cause).__name__}: {reason}") from e
        raise


def _find_compiler() -> str:
    return os.environ.get("CXX", "g++")


def need_compiler(user: str = "torch.compile") -> None:
    """Raise `Unavailable` without a C++ compiler: inductor needs it for CPU code and for its GPU launchers."""
    if not shutil.which(_find_compiler().split()[0]):
        raise Unavailable(NO_COMPILER.format(user, _find_compiler()))


def import_torch() -> Any:
    """Import the library; raise `Unavailable` with the package to install."""
    return load_library("torch")


def device_named(torch: Any, name: str) -> Any:
    """Return the `torch.device`, and make a GPU PyTorch's current one.

    Raise `Unavailable` if PyTorch doesn't see it. Streams and events belong to the current device: those of another
    can't time it.
    """
    if name.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = int(name.partition(":")[2] or 0)
        if index >= count:
            gpus = f"{count} CUDA devices" if count else "no CUDA device"
            raise Unavailable(f"PyTorch {torch.__version__} sees {gpus}; {name} needs a GPU, a driver and a CUDA build")
        torch.cuda.set_device(index)
    return torch.device(name)


# Copies between host and GPU around PyTorch's compute stream, overlapping with other slots' work


class Copies:
    """Copies of inputs to the slots' tensors on the device and of outputs back, on a stream per direction.

    Host memory is page-locked at both ends. Types and layouts change on the device, where that is cheapest. `bound` has
    each slot's input tensors by name.
    """

    def __init__(self, torch: Any, bound: list[dict[str, Any]]) -> None:
        sample = next(iter(bound[0].values()))
        self._torch, self._bound = torch, bound
        self._in, self.compute, self._out = (torch.cuda.Stream(sample.device) for _ in range(3))
        self._uploaded, self._computed = ([torch.cuda.Event() for _ in bound] for _ in range(2))
        self._fresh = [False for _ in bound]
        # Floating-point inputs arrive as float32, whatever the module's type; others in their own type.
        self._fed = {n: torch.float32 if t.is_floating_point() else t.dtype for n, t in bound[0].items()}
        self._landed = [{name: self._choose_target(name, tensor) for name, tensor in slot.items()} for slot in bound]
        self._hosts: list[dict[str, Any]] = [{} for _ in bound]
        self._staged: dict[int, Any] = {}
        self._fetched: list[dict[str, Any]] = [{} for _ in bound]
        torch.cuda.synchronize(sample.device)  # weights and buffers were made on the default stream

    def _choose_target(self, name: str, tensor: Any) -> Any:
        """Return the target of a copy from the host: the module's own tensor if type and layout fit."""
        if tensor.dtype == self._fed[name] and tensor.is_contiguous():
            return tensor
        return self._torch.empty(tensor.shape, dtype=self._fed[name], device=tensor.device)

    def stage(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return copies of the arrays in page-locked memory; `bind` reads them without another copy.

        They live as long as this object.
        """
        return {name: self._stage_feed(feed, self._fed[name]) for name, feed in feeds.items() if name in self._fed}

    def _stage_feed(self, feed: np.ndarray, dtype: Any) -> np.ndarray:
        host = self._allocate_locked(feed.shape, dtype)
        array: np.ndarray = host.numpy()
        np.copyto(array, feed)
        self._staged[array.ctypes.data] = host
        return array

    def _allocate_locked(self, shape: Any, dtype: Any) -> Any:
        return self._torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def bind(self, feeds: Mapping[str, np.ndarray], slot: int) -> None:
        """Queue the copies to the device; the slot's next run waits for them."""
        hosts = {name: self._find_host_tensor(name, feeds[name], slot) for name in self._bound[slot]}
        with self._torch.cuda.stream(self._in):
            for name, host in hosts.items():
                target, tensor = self._landed[slot][name], self._bound[slot][name]
                target.copy_(host, non_blocking=True)
                if target is not tensor:
                    tensor.copy_(target)
            self._uploaded[slot].record(self._in)
        self._fresh[slot] = True

    def bind_tensors(self, feeds: Mapping[str, Any], ready: Any, slot: int) -> None:
        """Bind tensors on the device, as `bind` does with arrays, after the event `ready`."""
        with self._torch.cuda.stream(self._in):
            self._in.wait_event(ready)
            for name, tensor in self._bound[slot].items():
                tensor.copy_(feeds[name])
            self._uploaded[slot].record(self._in)
        self._fresh[slot] = True

    def _find_host_tensor(self, name: str, feed: np.ndarray, slot: int) -> Any:
        host = self._staged.get(feed.ctypes.data) if feed.flags.c_contiguous else None
        return host if host is not None and tuple(host.shape) == feed.shape else self._copy_to_locked(name, feed, slot)

    def _copy_to_locked(self, name: str, feed: np.ndarray, slot: int) -> Any:
        """Copy the feed to the slot's page-locked memory and return that."""
        if name not in self._hosts[slot]:
            self._hosts[slot][name] = self._allocate_locked(feed.shape, self._fed[name])
        self._uploaded[slot].synchronize()  # an earlier copy may still read it
        np.copyto(self._hosts[slot][name].numpy(), feed)
        return self._hosts[slot][name]

    def arrive(self, slot: int) -> None:
        """Make the compute stream wait for the slot's input, if it is new."""
        if self._fresh[slot]:
            self.compute.wait_event(self._uploaded[slot])
            self._fresh[slot] = False

    def leave(self, slot: int) -> None:
        """Mark the end of the slot's work on the compute stream."""
        self._computed[slot].record(self.compute)

    def wait(self, slot: int) -> None:
        """Return when the slot's work is done."""
        self._computed[slot].synchronize()

    def fetch(self, outputs: Mapping[str, Any], slot: int) -> dict[str, np.ndarray]:
        """Return the tensors as arrays in page-locked memory, valid until the slot is fetched again."""
        arrays = self._read_outputs(outputs, slot)
        self._out.synchronize()
        return arrays

    def _read_outputs(self, outputs: Mapping[str, Any], slot: int) -> dict[str, np.ndarray]:
        with self._torch.cuda.stream(self._out):
            self._out.wait_event(self._computed[slot])
            for name, tensor in outputs.items():
                source = as_fetched(tensor).contiguous()
                self._reserve_buffer(name, source, slot).copy_(source, non_blocking=True)
        return {name: self._fetched[slot][name].numpy() for name in outputs}

    def _reserve_buffer(self, name: str, tensor: Any, slot: int) -> Any:
        buffer = self._fetched[slot].get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._fetched[slot][name] = self._allocate_locked(tensor.shape, tensor.dtype)
        return buffer

    def parts(
        self, bind: Callable[[], None], run: Callable[[], None], outputs: Callable[[], Mapping[str, Any]]
    ) -> dict[str, float]:
        """Return the seconds of one inference in slot 0, by `INFERENCE_PARTS`.

        `enqueue` is the host's time to queue it; the others are GPU times, by CUDA events. Changes of type and layout
        belong to the copies.
        """
        _, h2d = self._time_action(self._in, bind)
        enqueue, compute = self._time_action(self.compute, run)
        tensors = outputs()
        _, d2h = self._time_action(self._out, lambda: self._read_outputs(tensors, 0))
        return dict(zip(INFERENCE_PARTS, (enqueue, h2d, compute, d2h), strict=True))

    def _time_action(self, stream: Any, action: Callable[[], Any]) -> tuple[float, float]:
        """Return the host's seconds until the action is queued and the GPU's until it is done."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        start = time.perf_counter_ns()
        action()
        host_s = (time.perf_counter_ns() - start) / 1e9
        end.record(stream)
        end.synchronize()
        return host_s, begin.elapsed_time(end) / 1e3
