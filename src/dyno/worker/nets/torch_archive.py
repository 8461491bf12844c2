"""Files of torch.save, read without running them: no class is imported, no function of the pickle is called.

The file is a zip with a pickle beside the bytes of its tensors. A name in the pickle is a plain container, part of a
tensor, or becomes a `Stub`: an object that keeps its arguments and state and does nothing. Sizes are checked against
the zip's entries before anything is read. Needs torch only to create tensors.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dyno.worker.spec import UserError

WEIGHTS, MODULE, PROGRAM, OTHER = "weights", "module", "program", "other"
YOLO = "ultralytics.nn."  # the package of the classes in a YOLO's checkpoint
MAX_PICKLE_BYTES = 1 << 26  # bytes of a pickle without its tensors; that of a large YOLO has half a megabyte
MAX_DEPTH = 100  # modules inside one another
MODULE_KEYS = ("ema", "model", "net", "state_dict", "model_state_dict")  # where training programs put a module
# Storages as torch names them, with the type and the bytes of an element; untyped ones hold bytes.
STORAGES = {
    "Double": ("float64", 8), "Float": ("float32", 4), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2), "Char": ("int8", 1), "Byte": ("uint8", 1),
    "Bool": ("bool", 1), "Untyped": ("uint8", 1),
}  # fmt: skip
CONTAINERS = {"collections.OrderedDict": OrderedDict, "builtins.set": set, "builtins.list": list, "builtins.dict": dict}
REFUSED = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}


class Stub:
    """An object of a class that isn't imported: the `args` of its constructor, its `state`, and `items` added to it."""

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
        # The state of an object with slots is a pair.
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        self.state = {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """Add a list's item."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """Add a list's items."""
        self.items.extend(values)

    add = append
    __hash__ = object.__hash__


@dataclass(frozen=True)
class ArchivedTensor:
    """A tensor in the file: `read` gives the bytes of its storage, the other fields its view of them."""

    dtype: str
    read: Callable[[], bytes]
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Any:
        """Return the torch tensor, on the CPU; raise RuntimeError if it would reach beyond its storage."""
        import torch

        content = bytearray(self.read())
        dtype = getattr(torch, self.dtype)
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return torch.as_strided(flat, self.shape, self.stride, self.offset)


class Archive:
    """A file of torch.save; a `UserError` where it isn't one, is damaged, or its sizes contradict each other."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._zip = _open_zip(self.path)
        names = self._zip.namelist()
        self._root = next((name.partition("/")[0] for name in names if name.endswith("/data.pkl")), "")
        self.program = any(name.startswith(f"{self._root}/code/") or name.endswith("/constants.pkl") for name in names)
        if not self._root:
            raise UserError(f"{path} is a zip file, but not of torch.save: it has no data.pkl")
        entries = self._zip.infolist()
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if not self.program and (packed or sum(e.file_size for e in entries) > self.path.stat().st_size):
            raise UserError(f"{path} is not a file of torch.save: its entries are packed, or larger than the file")

    @property
    def names(self) -> list[str]:
        """The classes and functions that the pickle names, without those of plain containers and tensors."""
        plain = ("torch.", "_codecs.")
        return [name for name in self._global_names if not (name in CONTAINERS or name.startswith(plain))]

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
        """Whether it is a checkpoint of ultralytics."""
        return not self.program and any(name.startswith(YOLO) for name in self.names)

    def load(self) -> Any:
        """Load the saved object: containers as they are, tensors as `ArchivedTensor`, everything else as a `Stub`.

        Raises a `UserError` for a damaged file.
        """
        assert self._global_names is not None  # reading the names has checked every opcode
        try:
            return _ArchiveUnpickler(self._pickle, self._find_storage).load()
        except UserError:
            raise
        # Any error that a pickle can cause with stubs.
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


def advice(archive: Archive) -> str:
    """Return the content of a file that isn't a YOLO's checkpoint, and a way to run it: the end of a message."""
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


def tensors(module: Any) -> dict[str, Any]:
    """Return a stored module's torch tensors by name, as in its `state_dict()`; raise a `UserError` if damaged."""
    result = {}
    for name, stored in _find_stored(module, "", 0):
        try:
            result[name] = stored.tensor()
        except (RuntimeError, ValueError) as e:
            raise UserError(f"the tensor {name} reaches beyond the bytes that are stored of it") from e
    return result


def is_module(value: Any) -> bool:
    """Return whether it is a `Stub` of an nn.Module."""
    return isinstance(value, Stub) and {"_modules", "_parameters", "_buffers"} <= set(value.state)


def module_in(loaded: Any) -> Any:
    """Return the `Stub` of the module in a loaded object; None without one.

    It is the object itself, or under one of MODULE_KEYS, averaged weights first.
    """
    candidates = [loaded, *(loaded.get(key) for key in MODULE_KEYS)] if isinstance(loaded, dict) else [loaded]
    return next((candidate for candidate in candidates if is_module(candidate)), None)


def _find_stored(module: Any, prefix: str, depth: int) -> Iterator[tuple[str, ArchivedTensor]]:
    if not is_module(module) or depth > MAX_DEPTH:
        return
    state = module.state
    passing = state.get("_non_persistent_buffers_set") or ()
    for kind in ("_parameters", "_buffers"):
        for name, value in _list_items(state[kind]):
            if isinstance(value, ArchivedTensor) and not (kind == "_buffers" and name in passing):
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
    """Return the classes and functions that a pickle names, in order, from its opcodes alone; check these.

    Raises a `UserError` for a damaged pickle, or an opcode that no model needs.
    """
    texts: list[str] = []
    memo: dict[int, str] = {}
    names: dict[str, None] = {}
    last = ""  # the text on top of the stack, "" where something else is
    try:
        argument: Any
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            name = opcode.name
            # Python's reader makes room for as many memos as the highest number says.
            if name in REFUSED or (name.endswith("PUT") and not 0 <= argument <= count):
                raise UserError(f"the pickle has {name} {argument}, which no model needs; it isn't read")
            if name in ("GLOBAL", "INST"):
                names[_qualified_name(*argument.split(" ", 1))] = None
            elif name == "STACK_GLOBAL":
                names[_qualified_name(*texts[-2:])] = None
            elif name == "MEMOIZE" or name.endswith("PUT"):
                memo[len(memo) if name == "MEMOIZE" else argument] = last
                continue
            last = memo.get(argument, "") if name.endswith("GET") else argument if isinstance(argument, str) else ""
            texts += [last] if last else []
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
    """An unpickler that knows plain containers and the parts of tensors; `storage` finds the bytes of one."""

    def __init__(self, content: bytes, storage: Callable[[str, int], Callable[[], bytes]]) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8", errors="replace")
        self._storage = storage
        self._stubs: dict[str, type[Stub]] = {}

    def find_class(self, module: str, name: str) -> Any:
        path = _qualified_name(module, name)
        if path in CONTAINERS:
            return CONTAINERS[path]
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
        if name not in STORAGES or not isinstance(key, str) or type(count) is not int:
            raise pickle.UnpicklingError(f"it has a tensor of an unknown kind, {name or type(kind).__name__}")
        dtype, size = STORAGES[name]
        return dtype, self._storage(key, count * size)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> ArchivedTensor:
    numbers = [offset, *shape, *stride]
    if len(shape) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        raise pickle.UnpicklingError("a tensor has an invalid shape or stride")
    dtype, read = storage
    return ArchivedTensor(str(dtype), read, offset, tuple(shape), tuple(stride))
