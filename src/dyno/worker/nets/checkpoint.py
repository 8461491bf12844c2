"""Weights from a file, read without running code from it."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dyno.worker.extras import install
from dyno.worker.nets import torch_archive
from dyno.worker.spec import Unavailable, UserError

NESTED = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.")  # written by DataParallel and by torch.compile
SAVE_AGAIN = "save it again with torch.save or as .safetensors"
COUNTER = "num_batches_tracked"  # batch norm's counter, absent from old checkpoints and unused in eval mode
NAMED = 3  # entries that a message lists


def read_checkpoint(path: str) -> dict[str, Any]:
    """Return the state dict in a .safetensors, .pt or .pth file: tensors by name, on the CPU.

    Of a pickled module the tensors alone are read, without its class. A dict nested under state_dict, model_state_dict
    or model is unwrapped and the prefixes of wrappers are removed. Raises `UserError` for a file that is missing,
    empty, truncated, not a checkpoint, or that needs code to be unpickled.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"checkpoint {path} doesn't exist")
    if file.stat().st_size == 0:
        raise UserError(f"checkpoint {path} is empty")
    read = _load_safetensors if file.suffix == ".safetensors" else _load_pickle
    return _strip_prefixes(_find_state(read(file), path))


def apply(module: Any, state: Mapping[str, Any], path: str, advice: str = "") -> None:
    """Load the state dict into the module; a `UserError` names the first keys that don't fit and gives the advice."""
    own, state = module.state_dict(), by_own_names(module, state, path)
    missing = [k for k in own if k not in state and not k.endswith(COUNTER)]
    unexpected = [k for k in state if k not in own]
    shapes = [
        f"{k} (model {list(own[k].shape)}, file {list(state[k].shape)})"
        for k in own
        if k in state and own[k].shape != state[k].shape
    ]
    problems = [
        _list_names("missing", missing),
        _list_names("unexpected", unexpected),
        _list_names("of another shape", shapes),
    ]
    if any(problems):
        raise UserError(f"the weights in {path} don't fit the model: {'; '.join(filter(None, [*problems, advice]))}")
    module.load_state_dict(dict(state), strict=False)  # strict but for batch norm's counters: checked above


def by_own_names(module: Any, state: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the part of the state dict that is the module's, under the module's names.

    A trainer such as Lightning stores the network as an attribute, under `model.` for example, beside its losses. A
    `UserError` names two attributes that both fit.
    """
    own = {name for name in module.state_dict() if not name.endswith(COUNTER)}
    if not own or not own.isdisjoint(state):
        return state
    names = dict.fromkeys(name.partition(".")[0] for name in state)
    fitting = [name for name in names if all(f"{name}.{inner}" in state for inner in own)]
    if len(fitting) > 1:
        two = " and ".join(fitting[:2])
        raise UserError(f"checkpoint {path} has the model's weights more than once, as {two}; save one of them alone")
    if not fitting:
        return state
    start = f"{fitting[0]}."
    return {name[len(start) :]: value for name, value in state.items() if name.startswith(start)}


def head_classes(module: Any, state: Mapping[str, Any]) -> int | None:
    """Return the checkpoint's number of classes if its classifier alone differs from the module's, else None.

    The classifier is recognised by the effect of another number of classes: every shape that differs, differs in the
    first dimension only, and by the same pair of numbers.
    """
    pairs = set()
    for name, value in module.state_dict().items():
        stored = state.get(name)
        if stored is None or stored.shape == value.shape:
            continue
        if stored.dim() == 0 or value.dim() == 0 or stored.shape[1:] != value.shape[1:]:
            return None
        pairs.add((int(value.shape[0]), int(stored.shape[0])))
    return pairs.pop()[1] if len(pairs) == 1 else None


def _list_names(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{what} {', '.join(names[:NAMED])}{more}"


def _load_safetensors(file: Path) -> Any:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as e:
        raise Unavailable(f"safetensors can't be imported ({e}); {install('safetensors')}") from e
    try:
        return load_file(file)
    except SafetensorError as e:
        raise UserError(f"checkpoint {file} is not a whole .safetensors file: {e}; copy or save it again") from e


def _load_pickle(file: Path) -> Any:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TorchScript archives, which are refused below
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        if (tensors := _module_tensors(file)) is not None:
            return tensors
        raise UserError(_explain_refusal(file, str(e))) from e
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError) as e:
        if "TorchScript" in str(e):
            raise UserError(f"{file} is a TorchScript program; save the weights alone with state_dict()") from e
        kind = "cut short or damaged" if _is_zip(file) else "not a checkpoint that torch can read"
        raise UserError(f"checkpoint {file} is {kind}; {SAVE_AGAIN}") from e


def _module_tensors(file: Path) -> dict[str, Any] | None:
    """Return the tensors of a pickled module, without its class or an import of it; None if the file has no module."""
    try:
        archive = torch_archive.Archive(file)
        module = torch_archive.module_in(archive.load()) if archive.kind == torch_archive.MODULE else None
    except UserError:
        return None
    return None if module is None else torch_archive.tensors(module)


def _is_zip(file: Path) -> bool:
    """Return whether the file begins like those of torch.save."""
    with open(file, "rb") as f:
        return f.read(4) == b"PK\x03\x04"


def _explain_refusal(file: Path, reason: str) -> str:
    """Return the message for code in the pickle, or for bytes that aren't a pickle: torch raises one error for both."""
    # "Unsupported global: GLOBAL a.b", "unsupported GLOBAL a.b whose module…", a built-in without its module;
    # torch 2.2 has "Unsupported class a.b", and "Unsupported operand 118" for bytes that aren't a pickle
    match = re.search(r"[Uu]nsupported (?:(?:global: )?GLOBAL|class) ([\w.]*\w)", reason)
    runs_code = match is not None or any(
        text in reason for text in ("Trying to call", "Trying to instantiate", "blocked")
    )
    if not runs_code:
        return f"checkpoint {file} is not a checkpoint that torch can read; {SAVE_AGAIN}"
    name = f" ({match.group(1)})" if match else ""
    return f"checkpoint {file} runs code when it is read{name}, which is refused; save state_dict() alone"


def _find_state(loaded: Any, path: str) -> Mapping[str, Any]:
    import torch

    while isinstance(loaded, Mapping):
        inner = next((k for k in NESTED if isinstance(loaded.get(k), Mapping)), None)
        if inner is None:
            break
        loaded = loaded[inner]
    if not isinstance(loaded, Mapping):
        raise UserError(f"checkpoint {path} holds a {type(loaded).__name__}, not tensors by name")
    tensors = {str(k): v for k, v in loaded.items() if isinstance(v, torch.Tensor)}
    if not tensors:
        keys = ", ".join(str(k) for k in list(loaded)[:5]) or "nothing"
        raise UserError(f"checkpoint {path} has no weights under {', '.join(NESTED)}; it has {keys}")
    return tensors


def _strip_prefixes(state: Mapping[str, Any]) -> dict[str, Any]:
    names = dict(state)
    for prefix in PREFIXES * 2:  # either may be around the other
        if all(name.startswith(prefix) for name in names):
            names = {name[len(prefix) :]: value for name, value in names.items()}
    return names
