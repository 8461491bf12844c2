"""Weights from a file, read without running code from it."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dyno.worker.extras import load_library
from dyno.worker.facts.files import AVERAGED_WARNING
from dyno.worker.nets.local_code import list_shards
from dyno.worker.spec import UserError

# Files of torch.save, read safely: no class is imported, and no function of the pickle is called
#
# The file is a zip of a pickle and its tensors' bytes. A name in the pickle is a plain container, part of a tensor, or
# becomes a `Stub`: an object that keeps its arguments and state and does nothing. Sizes are checked against the zip's
# entries before anything is read. torch is needed only to create tensors.

WEIGHTS, MODULE, PROGRAM, OTHER = "weights", "module", "program", "other"
YOLO_PACKAGE = "ultralytics.nn."  # package of the classes in a YOLO checkpoint
MAX_PICKLE_BYTES = 1 << 26  # bytes of a pickle without tensors; half a megabyte for a large YOLO
MAX_DEPTH = 100  # modules inside one another
MODULE_KEYS = ("ema", "model", "net", "state_dict", "model_state_dict")  # keys of modules in training checkpoints
# Types and bytes per element by torch's storage names; untyped ones hold bytes
STORAGE_TYPES = {
    "Double": ("float64", 8), "Float": ("float32", 4), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2), "Char": ("int8", 1), "Byte": ("uint8", 1),
    "Bool": ("bool", 1), "Untyped": ("uint8", 1),
}  # fmt: skip
CONTAINER_TYPES = {
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.list": list,
    "builtins.dict": dict,
}
REFUSED_OPCODES = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}


class Stub:
    """An object of a class that isn't imported: its constructor's `args`, its `state`, and the `items` added to it."""

    path = ""  # the class's module and name
    args: tuple[Any, ...]
    state: dict[Any, Any]
    items: list[Any]

    def __new__(cls, *args: Any, **_: Any) -> Stub:
        stub = object.__new__(cls)
        stub.args, stub.state, stub.items = args, {}, []
        return stub

    def __call__(self, *args: Any, **options: Any) -> Stub:
        return Stub(*args)

    def __setstate__(self, state: Any) -> None:
        # With slots, the state is a pair.
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        self.state = {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """Add an item, as to a list."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """Add items, as to a list."""
        self.items.extend(values)

    add = append
    __hash__ = object.__hash__


@dataclass(frozen=True)
class ArchivedTensor:
    """A tensor in the file: `read` returns the bytes of its storage, the other fields describe its view of them."""

    dtype: str
    read: Callable[[], bytes]
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def make_tensor(self) -> Any:
        """Return the torch tensor, on the CPU; raise RuntimeError if it reaches beyond its storage."""
        import torch

        content = bytearray(self.read())
        dtype = getattr(torch, self.dtype)
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return torch.as_strided(flat, self.shape, self.stride, self.offset)


class Archive:
    """A file of torch.save; a `UserError` is raised if it isn't one, is damaged, or has contradictory sizes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._zip = _open_zip(self.path)
        names = self._zip.namelist()
        self._root = next((name.partition("/")[0] for name in names if name.endswith("/data.pkl")), "")
        self.program = any(name.startswith(f"{self._root}/code/") or name.endswith("/constants.pkl") for name in names)
        if not self._root:
            raise UserError(f"{path} is a zip file, but not of torch.save: it has no data.pkl")
        entries = self._zip.infolist()
        is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if not self.program and (is_packed or sum(e.file_size for e in entries) > self.path.stat().st_size):
            raise UserError(f"{path} is not a file of torch.save: its entries are packed, or larger than the file")

    @property
    def names(self) -> list[str]:
        """The classes and functions named in the pickle, without plain containers and tensors."""
        prefixes = ("torch.", "_codecs.")
        return [name for name in self._global_names if not (name in CONTAINER_TYPES or name.startswith(prefixes))]

    @property
    def kind(self) -> str:
        """WEIGHTS (tensors and plain containers), MODULE (a pickled nn.Module), PROGRAM (TorchScript) or OTHER."""
        if self.program:
            return PROGRAM
        if self.yolo or any(name.startswith("torch.nn.modules.") for name in self._global_names):
            return MODULE
        return OTHER if self.names else WEIGHTS

    @property
    def yolo(self) -> bool:
        """Whether it is an ultralytics checkpoint."""
        return not self.program and any(name.startswith(YOLO_PACKAGE) for name in self.names)

    def load(self) -> Any:
        """Load the saved object: containers as they are, tensors as `ArchivedTensor`, everything else as a `Stub`.

        Raise a `UserError` for a damaged file.
        """
        assert self._global_names is not None  # checks every opcode
        try:
            return _ArchiveUnpickler(self._pickle, self._find_storage).load()
        except UserError:
            raise
        # Errors that a pickle can cause with stubs
        except (pickle.UnpicklingError, ValueError, TypeError, AttributeError, KeyError, IndexError, EOFError) as e:
            reason = (str(e) or type(e).__name__).splitlines()[0]
            raise UserError(f"{self.path} is damaged, or not a file of torch.save: {reason}") from e

    @cached_property
    def _global_names(self) -> list[str]:
        return _global_names(self._pickle)

    @cached_property
    def _pickle(self) -> bytes:
        info = self._zip.getinfo(f"{self._root}/data.pkl")
        if info.file_size > MAX_PICKLE_BYTES:
            raise UserError(f"{self.path} holds a pickle of {info.file_size / 1e6:,.0f} MB, too large to be a model's")
        return self._read_bytes(info.filename)

    def _read_bytes(self, name: str) -> bytes:
        try:
            return self._zip.read(name)
        except (zipfile.BadZipFile, EOFError, OSError) as e:
            raise UserError(f"{self.path} is cut short or damaged: {e}") from e

    def _find_storage(self, key: str, size: int) -> Callable[[], bytes]:
        name = f"{self._root}/data/{key}"
        entry = self._zip.NameToInfo.get(name)
        if entry is None or entry.file_size != size:
            raise UserError(f"{self.path} is damaged: the size of the tensor {key!r} is not what its entry says")
        return lambda: self._read_bytes(name)


def advise_on_module(archive: Archive) -> str:
    """Return the end of a message: the contents of a file that isn't a YOLO checkpoint, and a way to run it."""
    path, classes = archive.path, ", ".join(archive.names[:2])
    if archive.kind == PROGRAM:
        return f"it is a TorchScript program: give it as the model, {path}"
    if archive.kind == MODULE:
        return (
            f"it is a pickled module ({classes or 'of torch.nn'}), which loads only by running its code: give the "
            f"function that builds it with its weights, FILE.py:FUNCTION --weights {path}; or, if you trust it, write "
            f"two lines into FILE.py, import torch and def net(): return torch.load({str(path)!r}, "
            "weights_only=False), and give FILE.py:net"
        )
    more = f" and objects ({classes})" if classes else ""
    return f"it holds weights{more} without their network: give that too, e.g. torchvision:resnet50 --weights {path}"


def read_tensors(module: Any) -> dict[str, Any]:
    """Return a stored module's torch tensors by name, as in `state_dict()`; raise a `UserError` if damaged."""
    result = {}
    for name, tensor in _find_stored(module, "", 0):
        try:
            result[name] = tensor.make_tensor()
        except (RuntimeError, ValueError) as e:
            raise UserError(f"the tensor {name} reaches beyond its stored bytes") from e
    return result


def is_module(value: Any) -> bool:
    """Return whether the value is a `Stub` of an nn.Module."""
    return isinstance(value, Stub) and {"_modules", "_parameters", "_buffers"} <= set(value.state)


def find_module_stub(contents: Any) -> Any:
    """Return the `Stub` of the module in a loaded object; None without a module.

    It is the object itself, or under one of MODULE_KEYS, averaged weights first.
    """
    candidates = [contents, *(contents.get(key) for key in MODULE_KEYS)] if isinstance(contents, dict) else [contents]
    return next((candidate for candidate in candidates if is_module(candidate)), None)


def _find_stored(module: Any, prefix: str, depth: int) -> Iterator[tuple[str, ArchivedTensor]]:
    if not is_module(module) or depth > MAX_DEPTH:
        return
    state = module.state
    transient_names = state.get("_non_persistent_buffers_set") or ()
    for kind in ("_parameters", "_buffers"):
        for name, value in _list_items(state[kind]):
            if isinstance(value, ArchivedTensor) and not (kind == "_buffers" and name in transient_names):
                yield f"{prefix}{name}", value
    for name, inner in _list_items(state["_modules"]):
        yield from _find_stored(inner, f"{prefix}{name}.", depth + 1)


def _list_items(value: Any) -> list[tuple[str, Any]]:
    return [(str(key), item) for key, item in value.items()] if isinstance(value, Mapping) else []


def _open_zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except (zipfile.BadZipFile, OSError, ValueError) as e:
        raise UserError(f"{path} is cut short, or not a torch.save file of PyTorch 1.6 or later; save it again") from e


def _global_names(content: bytes) -> list[str]:
    """Return the classes and functions named in a pickle, in order, by its opcodes alone, which are checked.

    Raise a `UserError` for a damaged pickle, or an opcode that no model needs.
    """
    texts: list[str] = []
    memo: dict[int, str] = {}
    names: dict[str, None] = {}
    top = ""  # text on top of the stack; "" for other values
    try:
        argument: Any
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            name = opcode.name
            # Python's unpickler allocates memos up to the highest number.
            if name in REFUSED_OPCODES or (name.endswith("PUT") and not 0 <= argument <= count):
                raise UserError(f"the pickle has {name} {argument}, which no model needs; it isn't read")
            if name in ("GLOBAL", "INST"):
                names[_qualified_name(*argument.split(" ", 1))] = None
            elif name == "STACK_GLOBAL":
                names[_qualified_name(*texts[-2:])] = None
            elif name == "MEMOIZE" or name.endswith("PUT"):
                memo[len(memo) if name == "MEMOIZE" else argument] = top
                continue
            top = memo.get(argument, "") if name.endswith("GET") else argument if isinstance(argument, str) else ""
            texts += [top] if top else []
    except (ValueError, TypeError) as e:
        raise UserError(f"the pickle is cut short or damaged: {str(e).splitlines()[0] if str(e) else e!r}") from e
    return list(names)


def _qualified_name(module: str, name: str) -> str:
    return f"{'builtins' if module in ('__builtin__', 'builtins') else module}.{name}"


class _GuardedFunction:
    """A function that a pickle may call but not change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a function is given a state")


class _ArchiveUnpickler(pickle.Unpickler):
    """An unpickler restricted to plain containers and parts of tensors; `storage` finds a tensor's bytes."""

    def __init__(self, content: bytes, storage: Callable[[str, int], Callable[[], bytes]]) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8", errors="replace")
        self._storage = storage
        self._stubs: dict[str, type[Stub]] = {}

    def find_class(self, module: str, name: str) -> Any:
        path = _qualified_name(module, name)
        if path in CONTAINER_TYPES:
            return CONTAINER_TYPES[path]
        if path == "torch._utils._rebuild_tensor_v2":
            return _GuardedFunction(_rebuild_tensor)
        if path in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            return _GuardedFunction(lambda data, *_: data)
        if path == "torch.Size":
            return _GuardedFunction(lambda axes=(): tuple(axes))
        if path not in self._stubs:
            self._stubs[path] = type("Stub", (Stub,), {"path": path})
        return self._stubs[path]

    def persistent_load(self, pid: Any) -> Any:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise pickle.UnpicklingError("it refers to something other than a tensor")
        _, kind, key, _, count = pid
        name = getattr(kind, "path", "").rpartition(".")[2].removesuffix("Storage")
        if name not in STORAGE_TYPES or not isinstance(key, str) or type(count) is not int:
            raise pickle.UnpicklingError(f"it has a tensor of an unknown kind, {name or type(kind).__name__}")
        dtype, size = STORAGE_TYPES[name]
        return dtype, self._storage(key, count * size)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> ArchivedTensor:
    numbers = [offset, *shape, *stride]
    if len(shape) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        raise pickle.UnpicklingError("a tensor has an invalid shape or stride")
    dtype, read = storage
    return ArchivedTensor(str(dtype), read, offset, tuple(shape), tuple(stride))


NESTED_KEYS = ("state_dict", "model_state_dict", "model")
AVERAGE_KEYS = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")
AVERAGE_WORDS = {"ema", "swa", "avg", "average", "averaged", "teacher", "momentum", "target", "shadow"}
PARALLEL_PREFIX, COMPILED_PREFIX = "module.", "_orig_mod."  # by DataParallel and torch.compile
SAVE_AGAIN = "save it again with torch.save or as .safetensors"
BATCH_COUNTER = "num_batches_tracked"  # batch norm's counter, absent from old checkpoints and unused in eval mode
MAX_ENTRIES_NAMED = 3  # entries listed in a message


def read_checkpoint(path: str) -> dict[str, Any]:
    """Return the state dict of a .safetensors, .pt or .pth file, or of an index's files: CPU tensors by name.

    Only the tensors of a pickled module are read, without its class. A dict nested under state_dict, model_state_dict
    or model is unwrapped, and prefixes of wrappers are removed. Raise a `UserError` for a file that is missing, empty,
    truncated, not a checkpoint, or needs code to be unpickled.
    """
    file = Path(path)
    shards = list_shards(file)
    if file.suffix == ".json" and not shards:
        raise UserError(f"checkpoint {path} doesn't exist, or is no index of weight files in its folder")
    state: dict[str, Any] = {}
    for shard in shards or [file]:
        if not shard.is_file():
            raise UserError(f"checkpoint {shard} doesn't exist")
        if shard.stat().st_size == 0:
            raise UserError(f"checkpoint {shard} is empty")
        read = _load_safetensors if shard.suffix == ".safetensors" else _load_pickle
        tensors = _find_state(read(shard), str(shard))
        if duplicates := sorted(state.keys() & tensors.keys()):
            raise UserError(f"{shard} has {duplicates[0]}, as another file of {path} does; save the weights again")
        state |= tensors
    return _strip_prefixes(state)


def describe_averaged(path: str) -> str:
    """Return a warning if a checkpoint has averaged weights (EMA) in addition to the loaded weights; else "".

    Only tensors that may be a copy are read.
    """
    try:
        archive = Archive(path)
        contents = archive.load() if archive.kind in (WEIGHTS, OTHER) else None
    except UserError:  # other formats have no averages; loading refuses damaged files
        return ""
    if not isinstance(contents, Mapping):
        return ""
    raw_key = next((key for key in NESTED_KEYS if isinstance(contents.get(key), Mapping)), "")
    ema_key = next((key for key in AVERAGE_KEYS if isinstance(contents.get(key), Mapping)), "")
    if not (raw_key and ema_key):
        raw_key, ema_key = _find_copy(contents[raw_key] if raw_key else contents)
    if not ema_key:
        return ""
    return (
        f"{AVERAGED_WARNING}, under {ema_key}; those under {raw_key} were taken: to measure the others, save them alone"
    )


def _find_copy(state: Mapping[str, Any]) -> tuple[str, str]:
    """Return the attribute of the loaded weights and the place of their averaged copy; empty texts without a copy.

    The copy has other values and lies deeper inside an attribute named by AVERAGE_WORDS. A trainer such as Lightning
    stores both `model.NAME` and `model_ema.module.NAME`; `by_own_names` takes the first.
    """
    groups = dict[str, dict[str, ArchivedTensor]]()
    for name, value in _strip_prefixes({str(name): value for name, value in state.items()}).items():
        if isinstance(value, ArchivedTensor) and not name.endswith(BATCH_COUNTER):
            first, _, inner = name.partition(".")
            groups.setdefault(first, {})[inner] = value
    averages = {name: tensors for name, tensors in groups.items() if AVERAGE_WORDS & {*name.lower().split("_")}}
    for attribute, weights in groups.items():
        first = next(iter(weights))
        for copy_name, tensors in averages.items():
            for prefix in (name.removesuffix(first) for name in tensors if name.endswith(f".{first}")):
                pairs = [(value, tensors.get(prefix + inner)) for inner, value in weights.items()]
                is_copy = copy_name != attribute and all(b and b.shape == a.shape for a, b in pairs)
                if is_copy and any(b and b.read() != a.read() for a, b in pairs):  # else it is the same network
                    return attribute, f"{copy_name}.{prefix}".rstrip(".")
    return "", ""


def apply(module: Any, state: Mapping[str, Any], path: str, advice: str = "") -> None:
    """Load the state dict into the module; raise a `UserError` with the first misfits and the advice."""
    model, state = module.state_dict(), by_own_names(module, state, path)
    missing = [k for k in model if k not in state and not k.endswith(BATCH_COUNTER)]
    unexpected = [k for k in state if k not in model]
    shapes = [
        f"{k} (model {list(model[k].shape)}, file {list(state[k].shape)})"
        for k in model
        if k in state and model[k].shape != state[k].shape
    ]
    if integers := [
        k for k in model if k in state and model[k].is_floating_point() and not state[k].is_floating_point()
    ]:
        dtype = str(state[integers[0]].dtype).removeprefix("torch.")
        raise UserError(
            f"{integers[0]} in {path} is {dtype}, and floating point in the model: quantised weights can't be read "
            "without their scales; give the original weights"
        )
    problems = [
        _list_names("missing", missing),
        _list_names("unexpected", unexpected),
        _list_names("of another shape", shapes),
    ]
    if any(problems):
        raise UserError(f"the weights in {path} don't fit the model: {'; '.join(filter(None, [*problems, advice]))}")
    module.load_state_dict(dict(state), strict=False)  # checked above, except batch norm's counters


def by_own_names(module: Any, state: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the module's part of the state dict, under the module's names.

    A trainer such as Lightning stores the network as an attribute, for example under `model.`, next to its losses.
    Raise a `UserError` if two attributes fit.
    """
    model_names = {name for name in module.state_dict() if not name.endswith(BATCH_COUNTER)}
    if not model_names or not model_names.isdisjoint(state):
        return state
    names = dict.fromkeys(name.partition(".")[0] for name in state)
    matches = [name for name in names if all(f"{name}.{inner}" in state for inner in model_names)]
    if len(matches) > 1:
        pair = " and ".join(matches[:2])
        raise UserError(f"checkpoint {path} has the model's weights more than once, as {pair}; save one of them alone")
    if not matches:
        return state
    prefix = f"{matches[0]}."
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def head_classes(module: Any, state: Mapping[str, Any]) -> int | None:
    """Return the checkpoint's number of classes if only its classifier differs from the module's; else None.

    All differing shapes must then differ only in the first dimension, and by the same pair of numbers.
    """
    pairs = set()
    for name, value in module.state_dict().items():
        tensor = state.get(name)
        if tensor is None or tensor.shape == value.shape:
            continue
        if tensor.dim() == 0 or value.dim() == 0 or tensor.shape[1:] != value.shape[1:]:
            return None
        pairs.add((int(value.shape[0]), int(tensor.shape[0])))
    return pairs.pop()[1] if len(pairs) == 1 else None


def _list_names(label: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MAX_ENTRIES_NAMED} more" if len(names) > MAX_ENTRIES_NAMED else ""
    return f"{label} {', '.join(names[:MAX_ENTRIES_NAMED])}{more}"


def _load_safetensors(file: Path) -> Any:
    try:
        return load_library("safetensors.torch").load_file(file)
    except load_library("safetensors").SafetensorError as e:
        raise UserError(f"checkpoint {file} is not a whole .safetensors file: {e}; copy or save it again") from e


def _load_pickle(file: Path) -> Any:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript archives are refused below
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        if (tensors := _module_tensors(file)) is not None:
            return tensors
        raise UserError(_explain_refusal(file, str(e))) from e
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError) as e:
        if "TorchScript" in str(e):
            raise UserError(f"{file} is a TorchScript program; save the weights alone with state_dict()") from e
        if zipfile.is_zipfile(file):
            Archive(file)  # raises for another program's zip file
        problem = "cut short or damaged" if _is_zip(file) else "not a checkpoint that torch can read"
        raise UserError(f"checkpoint {file} is {problem}; {SAVE_AGAIN}") from e


def _module_tensors(file: Path) -> dict[str, Any] | None:
    """Return a pickled module's tensors without importing its class; None if the file has no module."""
    try:
        archive = Archive(file)
        module = find_module_stub(archive.load()) if archive.kind == MODULE else None
    except UserError:
        return None
    return None if module is None else read_tensors(module)


def _is_zip(file: Path) -> bool:
    """Return whether the file begins like a file of torch.save."""
    with open(file, "rb") as f:
        return f.read(4) == b"PK\x03\x04"


def _explain_refusal(file: Path, reason: str) -> str:
    """Return the message for code in a pickle, or for other bytes: torch raises one error for both."""
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


def _find_state(contents: Any, path: str) -> Mapping[str, Any]:
    import torch

    while isinstance(contents, Mapping):
        key = next((k for k in NESTED_KEYS if isinstance(contents.get(k), Mapping)), None)
        if key is None:
            break
        contents = contents[key]
    if not isinstance(contents, Mapping):
        raise UserError(f"checkpoint {path} holds a {type(contents).__name__}, not tensors by name")
    tensors = {str(k): v for k, v in contents.items() if isinstance(v, torch.Tensor)}
    if not tensors:
        keys = ", ".join(str(k) for k in list(contents)[:5]) or "nothing"
        raise UserError(f"checkpoint {path} has no weights under {', '.join(NESTED_KEYS)}; it has {keys}")
    return tensors


def _strip_prefixes(state: Mapping[str, Any]) -> dict[str, Any]:
    # any part may have been compiled
    tensors = {name.replace(COMPILED_PREFIX, ""): value for name, value in state.items()}
    result = tensors if len(tensors) == len(state) else dict(state)
    while result and all(name.startswith(PARALLEL_PREFIX) for name in result):
        result = {name.removeprefix(PARALLEL_PREFIX): value for name, value in result.items()}
    return result
