"""Modules in memory, stored as a file for other processes by PyTorch itself: no code is pickled."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import logging
import re
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dyno.store import cache_dir
from dyno.worker.inputs import modules
from dyno.worker.inputs.modules import ModuleInputs
from dyno.worker.nets import models, saved_modules
from dyno.worker.nets.saved_modules import INPUTS_MEMBER
from dyno.worker.sessions.torch_support import first_line, import_torch, make_positional, set_eval, unwrap_module
from dyno.worker.spec import Dims, InputSpec, ModelSpec, UserError, shorten, to_json

Specs = tuple[InputSpec, ...]

DEFAULT_SIZE = 224  # image size if the module has no description
MANGLED_NAME = re.compile(rb"___torch_mangle_\d+")  # names of scripted classes differ between processes
ONE_AT_A_TIME = threading.RLock()  # torch.export can't run in two threads at once


def save_module(
    value: Any, overrides: Mapping[str, Mapping[str, Any]], channels: int, sizes: Sequence[tuple[int, int]]
) -> str:
    """Store the module, or the (module, example inputs) pair, in the cache; return the file, named after its class.

    `sizes` are the image sizes of its inputs, () for its own. The folder is named after the content, so that the same
    module gives the same file. It is stored by torch.export if that accepts the module and gives the same answers, else
    as TorchScript. Raises `UserError` if both fail, or if its inputs are unknown.
    """
    with ONE_AT_A_TIME:
        if threading.current_thread() is not threading.main_thread():
            _enter_fake_mode()
        return _save_module(value, overrides, channels, sizes)


@cache
def _enter_fake_mode() -> None:
    """Enter PyTorch's fake mode for the first time in a thread that never ends.

    Without a GPU, PyTorch 2.11 keeps memory of the first thread to enter; an export after that thread's end is a
    segmentation fault.
    """
    import_torch()
    from torch._subclasses.fake_tensor import FakeTensorMode

    event = threading.Event()

    def enter() -> None:
        try:
            with FakeTensorMode():
                pass
        finally:
            event.set()
        threading.Event().wait()

    threading.Thread(target=enter, daemon=True).start()
    event.wait()


def _save_module(
    value: Any, overrides: Mapping[str, Mapping[str, Any]], channels: int, sizes: Sequence[tuple[int, int]]
) -> str:
    module, examples = value if isinstance(value, tuple) else (value, None)
    if isinstance(module, type) or not hasattr(module, "named_buffers"):
        name = getattr(module, "__name__", type(module).__name__)
        raise UserError(f"the model {name} is not a torch.nn.Module; call it, or name it as FILE.py:FUNCTION")
    torch = import_torch()
    if (runnable := saved_modules.make_runnable(module)) is not module:
        module, examples = runnable, saved_modules.program_examples(module) if examples is None else examples
    module = unwrap_module(torch, module)
    name = getattr(module, "original_name", type(module).__name__)
    devices = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
    if "meta" in devices:
        raise UserError(f"{name} has no weights yet (device meta); give it some first, by to_empty() and a state_dict")
    if devices - {"cpu"}:
        module = copy.deepcopy(module).cpu()
    model = ModelSpec(name, "", channels=channels)
    with _hold_eval_mode(module):
        module_inputs = modules.describe_inputs(module, model, examples, overrides)
        first_size = sizes[0] if sizes else (DEFAULT_SIZE, DEFAULT_SIZE)
        dims = Dims(module_inputs.batch, *(module_inputs.size if all(module_inputs.size) else first_size))
        first_name = next(iter(modules.signature_of(module).required), "input")
        image = InputSpec(first_name, "float32", ("batch", channels, "height", "width"))
        specs = module_inputs.inputs or (image,)
        if not module_inputs.batch or any(spec.shape[:1] == (0,) for spec in specs):
            raise UserError(f"an example input of {name} has no elements; give one of at least one item")
        try:
            verified, _ = modules.verify_inputs(module, model, replace(module_inputs, inputs=specs), dims)
        except UserError:
            raise
        except Exception as e:  # any exception of the user's module means that it refuses the input
            advice = "" if examples is not None else modules.advise_on_inputs(model)
            hint = modules.advice_on_reason(module, _shorten_error(e), "give") or advice
            message = f"{name} refuses {modules.list_inputs(specs, dims)}: {_shorten_error(e)}"
            raise UserError(f"{message}; {hint}" if hint else message) from e
    with _hold_eval_mode(module):  # again, with the original buffers
        return _store_module(module, model, verified, replace(dims, batch=verified.batch), sizes)


@dataclass(frozen=True)
class Storage:
    """A way to store a module: the file's suffix, and its name in messages.

    `make` returns text that identifies the module, a function that writes the file, and the inputs of the stored
    module.
    """

    suffix: str
    name: str
    make: Callable[[Any, ModelSpec, Specs, Dims], tuple[str, Callable[..., Any], Specs]]


def _store_module(
    module: Any, model: ModelSpec, module_inputs: ModuleInputs, dims: Dims, sizes: Sequence[tuple[int, int]]
) -> str:
    import torch

    reasons = []
    candidates = _list_dims(module_inputs, dims, sizes)
    for candidate in candidates:
        saved_modules.check_guards(module, model, module_inputs.inputs, replace(candidate, batch=dims.batch))
    for storage in STORAGE_KINDS[-1:] if isinstance(module, torch.jit.ScriptModule) else STORAGE_KINDS:
        try:
            with _silence_torch():
                text, write, specs = storage.make(module, model, module_inputs.inputs, dims)
                inputs = [*map(to_json, specs)]
                description = json.dumps({"inputs": inputs, "batch": module_inputs.batch, "size": module_inputs.size})
                weights = models.weights_sha256(module)
                identity = "\n".join((storage.suffix, torch.__version__, weights, text, description))
                key = hashlib.sha256(identity.encode()).hexdigest()[:24]
                path = cache_dir() / "modules" / key / f"{model.name}{storage.suffix}"
                if not path.is_file():
                    _write_file(path, write, description)
                with _hold_eval_mode(module):
                    saved_modules.compare_answers(module, str(path), model, (module_inputs.inputs, specs), candidates)
                return str(path)
        except (MemoryError, OSError):
            raise
        except Exception as e:  # each has its own exceptions, which all mean "try the next"
            reasons.append(f"{storage.name}: {_shorten_error(e)}")
    raise UserError(
        f"{model.name} can't be handed to other processes ({'; '.join(dict.fromkeys(reasons))}); "
        "put a function that returns it into a file and give that as FILE.py:FUNCTION"
    )


def _list_dims(module_inputs: ModuleInputs, dims: Dims, sizes: Sequence[tuple[int, int]]) -> list[Dims]:
    """Return the dims for comparing the stored module: at each size, one row and several."""
    all_sizes = dict.fromkeys([(dims.height, dims.width), *(sizes if module_inputs.image else ())])
    batches = dict.fromkeys(
        [1, _widen_batch(module_inputs.inputs, dims).batch] if module_inputs.has_free_batch else [dims.batch]
    )
    return [Dims(batch, height, width) for height, width in all_sizes for batch in batches]


def _export_program(module: Any, model: ModelSpec, specs: Specs, dims: Dims) -> tuple[str, Callable[..., Any], Specs]:
    """Export the module with torch.export, with a free batch if its inputs have one."""
    args, keywords = modules.make_example(model, specs, _widen_batch(specs, dims))
    names = [*modules.signature_of(module).required]
    positional_axes = [_find_free_axes(spec) for spec in specs if not spec.keyword]
    if len(positional_axes) > len(names):
        raise UserError("forward takes *args")  # the flat program supports *args
    shapes = dict(zip(names, positional_axes, strict=False)) | {s.name: _find_free_axes(s) for s in specs if s.keyword}
    program = _export_module(module, tuple(args), keywords, shapes if _has_free_axis(specs) else None)
    return _identify_program(program), _make_writer(program), specs


def _flat_program(module: Any, model: ModelSpec, specs: Specs, dims: Dims) -> tuple[str, Callable[..., Any], Specs]:
    """Export a wrapper that returns a tuple of tensors, for results unknown to torch.export, e.g. dataclasses."""
    import torch

    args, keywords = modules.make_example(model, specs, _widen_batch(specs, dims))
    values, positional_args = dict(keywords), iter(args)
    values |= {spec.name: next(positional_args) for spec in specs if not spec.keyword}
    arrays = tuple(replace(spec, keyword=False) for spec in specs if spec.dtype)
    wrapper = make_positional(torch, module, specs, flat=True)
    shapes = (tuple(_find_free_axes(spec) for spec in arrays),) if _has_free_axis(specs) else None
    program = _export_module(wrapper, tuple(values[spec.name] for spec in arrays), {}, shapes)
    return _identify_program(program), _make_writer(program), arrays


def _export_module(module: Any, args: tuple[Any, ...], keywords: dict[str, Any], shapes: Any) -> Any:
    import torch

    return torch.export.export(module, args, keywords, dynamic_shapes=shapes)


def _identify_program(program: Any) -> str:
    """Return the code and a hash of tensors outside the state dict: constants and non-persistent buffers."""
    return f"{program.graph_module.code}\n{models.hash_tensors(program.constants)}"


def _make_writer(program: Any) -> Callable[..., Any]:
    import torch

    return lambda path, extra: torch.export.save(program, path, extra_files=extra)


def _widen_batch(specs: Specs, dims: Dims) -> Dims:
    """Return dims with a batch that torch.export doesn't specialise to a constant."""
    return replace(dims, batch=max(dims.batch, 2)) if _has_free_axis(specs) else dims


def _has_free_axis(specs: Specs) -> bool:
    return any(isinstance(axis, str) for spec in specs for axis in spec.shape)


def _find_free_axes(spec: InputSpec) -> Any:
    """Return the free axes for torch.export: the batch must be free, sizes are free if the module allows it."""
    import torch

    if not spec.dtype:
        return None
    dim, auto = torch.export.Dim, torch.export.Dim.AUTO
    axes = {k: dim("batch") if axis == "batch" else auto for k, axis in enumerate(spec.shape) if isinstance(axis, str)}
    return axes or None


def _script_module(module: Any, model: ModelSpec, specs: Specs, dims: Dims) -> tuple[str, Callable[..., Any], Specs]:
    import torch

    script = torch.jit.script(module)
    return _identify_script(script), lambda path, extra: torch.jit.save(script, path, _extra_files=extra), specs


def _identify_script(script: Any) -> str:
    """Return hashes of the file's entries, without source lines and PyTorch's numbers in class names."""
    with zipfile.ZipFile(io.BytesIO(script.save_to_buffer())) as archive:
        entries = [
            (n, archive.read(n)) for n in archive.namelist() if not n.endswith((".debug_pkl", "serialization_id"))
        ]
    return "\n".join(
        sorted(
            hashlib.sha256(MANGLED_NAME.sub(b"", n.encode() + b"\n" + content)).hexdigest() for n, content in entries
        )
    )


STORAGE_KINDS = (
    Storage(".pt2", "torch.export", _export_program),
    Storage(".pt2", "torch.export", _flat_program),
    Storage(".torchscript", "torch.jit.script", _script_module),
)


def _write_file(path: Path, write: Callable[..., Any], description: str) -> None:
    """Write the file under a temporary name and rename it, because another process may read it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        scratch_file = Path(scratch) / path.name
        write(str(scratch_file), {INPUTS_MEMBER: description})
        saved_modules.load(str(scratch_file))  # text in a program's results can be written but not read
        scratch_file.replace(path)


@contextmanager
def _hold_eval_mode(module: Any) -> Iterator[None]:
    """Hold the user's module in eval mode during the block, then restore its modes and buffers."""
    modes = [(each, each.training) for each in module.modules() if hasattr(each, "training")]  # not for frozen modules
    buffers = [
        (each, name, buffer, buffer.detach().clone(), _read_version(buffer))
        for each in module.modules()
        for name, buffer in each.named_buffers(recurse=False)
    ]
    set_eval(module)
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training
        _restore_buffers(buffers)


def _read_version(buffer: Any) -> int:
    """Return the counter of in-place changes; -1 if the buffer has none."""
    return -1 if buffer.is_inference() else int(buffer._version)


def _restore_buffers(buffers: Sequence[tuple[Any, str, Any, Any, int]]) -> None:
    import torch

    for owner, name, buffer, value, version in buffers:
        if getattr(owner, name) is not buffer:
            setattr(owner, name, buffer)
        if version < 0 or _read_version(buffer) != version:
            with torch.inference_mode():
                buffer.copy_(value)


@contextmanager
def _silence_torch() -> Iterator[None]:
    """Silence PyTorch during the block: it prints and logs whole graphs that it refuses."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _shorten_error(e: Exception) -> str:
    return shorten(first_line(e), 200)
