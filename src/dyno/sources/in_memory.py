"""A module in memory becomes a file that other processes read, stored by PyTorch itself: no code is pickled."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dyno.store import cache_dir
from dyno.worker.inputs import modules
from dyno.worker.inputs.modules import ModuleInputs
from dyno.worker.nets import models
from dyno.worker.nets.saved_modules import INPUTS
from dyno.worker.sessions.torch_support import positional
from dyno.worker.spec import Dims, InputSpec, ModelSpec, UserError, to_json

Specs = tuple[InputSpec, ...]

SIZE = 224  # of an image that nobody described


def saved(value: Any, asked: Mapping[str, Mapping[str, Any]], channels: int, size: tuple[int, int] | None) -> str:
    """Path of a file with the module, or the (module, example inputs) pair, in the cache folder; named after its class.

    Its folder is named after the content, so that the same module is the same file again. Stored by torch.export where
    that takes the module, else as TorchScript. Raises `UserError` where neither does, or its inputs can't be known.
    """
    module, examples = value if isinstance(value, tuple) else (value, None)
    if any(each.device.type != "cpu" for each in (*module.parameters(), *module.buffers())):
        module = copy.deepcopy(module).cpu()
    name = getattr(module, "original_name", type(module).__name__)
    model = ModelSpec(name, f"saved:{name}", channels=channels)
    with _evaluating(module):
        found = modules.describe_inputs(module, model, examples, asked)
        dims = Dims(found.batch, *(found.size if all(found.size) else size or (SIZE, SIZE)))
        first = next(iter(modules.signature_of(module).required), "input")
        image = InputSpec(first, "float32", ("batch", channels, "height", "width"))
        specs = found.inputs or (image,)
        try:
            settled, _ = modules.verify_inputs(module, model, replace(found, inputs=specs), dims)
        except UserError:
            raise
        except Exception as e:  # the module is anyone's code: whatever it raises is its word on the input
            said = f"{name} refuses {modules.listed(specs, dims)}: {_line(e)}"
            raise UserError(f"{said}; give example inputs too: models=(module, inputs)") from e
        return _stored(module, model, settled, dims)


@dataclass(frozen=True)
class Way:
    """A way to store a module: its file's suffix and its name in messages; `made` gives text that tells modules apart,
    how the file is written, and the inputs that the stored module takes."""

    suffix: str
    name: str
    made: Callable[[Any, ModelSpec, Specs, Dims], tuple[str, Callable[..., Any], Specs]]


def _stored(module: Any, model: ModelSpec, found: ModuleInputs, dims: Dims) -> str:
    import torch

    reasons = []
    for way in WAYS[-1:] if isinstance(module, torch.jit.ScriptModule) else WAYS:
        try:
            with _quiet():
                text, write, taken = way.made(module, model, found.inputs, dims)
        except MemoryError:
            raise
        except Exception as e:  # each way has its own families of errors, and all of them mean "not this one"
            reasons.append(f"{way.name}: {_line(e)}")
            continue
        told = json.dumps({"inputs": [*map(to_json, taken)], "batch": found.batch, "size": found.size})
        identity = "\n".join((way.suffix, torch.__version__, models.weights_sha256(module), text, told))
        key = hashlib.sha256(identity.encode()).hexdigest()[:24]
        path = cache_dir() / "modules" / key / f"{model.name}{way.suffix}"
        if not path.is_file():
            _put(path, write, told)
        return str(path)
    raise UserError(
        f"{model.name} can't be handed to other processes ({'; '.join(dict.fromkeys(reasons))}); "
        "put a function that returns it into a file and give that as FILE.py:FUNCTION"
    )


def _program(module: Any, model: ModelSpec, specs: Specs, dims: Dims) -> tuple[str, Callable[..., Any], Specs]:
    """The module as torch.export has it, with a free batch where its inputs have one."""
    args, keywords = modules.example(model, specs, _wide(specs, dims))
    names = [*modules.signature_of(module).required]
    positional_axes = [_axes(spec) for spec in specs if not spec.keyword]
    if len(positional_axes) > len(names):
        raise UserError("forward takes *args")  # which the flat way stores
    shapes = dict(zip(names, positional_axes, strict=False)) | {s.name: _axes(s) for s in specs if s.keyword}
    made = _exported(module, tuple(args), keywords, shapes if _free(specs) else None)
    return made.graph_module.code, _saving(made), specs


def _flat_program(module: Any, model: ModelSpec, specs: Specs, dims: Dims) -> tuple[str, Callable[..., Any], Specs]:
    """The same around a module whose results torch.export doesn't know, a dataclass for one: a tuple of tensors."""
    import torch

    args, keywords = modules.example(model, specs, _wide(specs, dims))
    given, positional_args = dict(keywords), iter(args)
    given |= {spec.name: next(positional_args) for spec in specs if not spec.keyword}
    arrays = tuple(replace(spec, keyword=False) for spec in specs if spec.dtype)
    flat = positional(torch, module, specs, flat=True)
    shapes = (tuple(_axes(spec) for spec in arrays),) if _free(specs) else None
    made = _exported(flat, tuple(given[spec.name] for spec in arrays), {}, shapes)
    return made.graph_module.code, _saving(made), arrays


def _exported(module: Any, args: tuple[Any, ...], keywords: dict[str, Any], shapes: Any) -> Any:
    import torch

    return torch.export.export(module, args, keywords, dynamic_shapes=shapes)


def _saving(made: Any) -> Callable[..., Any]:
    import torch

    return lambda place, extra: torch.export.save(made, place, extra_files=extra)


def _wide(specs: Specs, dims: Dims) -> Dims:
    """Dims with a batch that torch.export doesn't take for a constant."""
    return replace(dims, batch=max(dims.batch, 2)) if _free(specs) else dims


def _free(specs: Specs) -> bool:
    return any(isinstance(axis, str) for spec in specs for axis in spec.shape)


def _axes(spec: InputSpec) -> Any:
    """The free axes as torch.export wants them told: the batch must be free, the size is where the module allows it."""
    import torch

    if not spec.dtype:
        return None
    dim, auto = torch.export.Dim, torch.export.Dim.AUTO
    found = {k: dim("batch") if axis == "batch" else auto for k, axis in enumerate(spec.shape) if isinstance(axis, str)}
    return found or None


def _script(module: Any, model: ModelSpec, specs: Specs, dims: Dims) -> tuple[str, Callable[..., Any], Specs]:
    import torch

    made = torch.jit.script(module)
    parts = sorted(each.code for each in made.modules() if hasattr(each, "forward"))
    return "\n".join(parts), lambda place, extra: torch.jit.save(made, place, _extra_files=extra), specs


WAYS = (
    Way(".pt2", "torch.export", _program),
    Way(".pt2", "torch.export", _flat_program),
    Way(".torchscript", "torch.jit.script", _script),
)


def _put(path: Path, write: Callable[..., Any], told: str) -> None:
    """Written beside and renamed into place: another process may look for it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch, _quiet():
        made = Path(scratch) / path.name
        write(str(made), {INPUTS: told})
        made.replace(path)


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """In eval mode meanwhile, and as it was afterwards: the module is the user's."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch prints and logs whole graphs of what it refuses."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _line(e: Exception) -> str:
    return next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)[:200]
