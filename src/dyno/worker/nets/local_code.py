"""A model's Python code: its content, including imported modules in its folder, and its execution."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType
from typing import Any

from dyno.worker.sessions.torch_support import import_torch, settings_kept
from dyno.worker.spec import Unavailable, UserError, make_absolute


def sha256_with_imports(file: Path) -> str:
    """Return the sha256 of a Python file and of the files that it imports from below its folder.

    Imports by computed names, or from elsewhere on the path, are not included.
    """
    file_hash = hash_file(file)
    imports = local_files(file)
    if not imports:
        return file_hash
    digest = hashlib.sha256(file_hash.encode())
    for path in imports:
        digest.update(f"\n{path.relative_to(_find_root(file)).as_posix()} {hash_file(path)}".encode())
    return digest.hexdigest()


def local_files(file: Path) -> list[Path]:
    """Return the files below the file's folder that it imports, directly or indirectly, in alphabetical order."""
    file = make_absolute(file)
    root, files, queue = _find_root(file), {file}, [file]
    while queue:
        for path in _find_imports(queue.pop(), root):
            if path not in files:
                files.add(path)
                queue.append(path)
    return sorted(files - {file})


def _find_root(file: Path) -> Path:
    """Return the folder from which absolute imports start: for a package, its parent."""
    folder = make_absolute(file).parent
    return folder.parent if file.name == "__init__.py" else folder


def _find_imports(file: Path, root: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the import reports the error
        return
    package = file.parent.relative_to(root).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _find_files(root, tuple(alias.name.split(".")))
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else ()
            base = (*parents, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                yield from _find_files(root, (*base, alias.name))


def _find_files(root: Path, name: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files run by importing the name: each parent package's, and the module's (none for an attribute)."""
    for depth in range(1, len(name) + 1):
        base = root.joinpath(*name[:depth])
        for path in (base / "__init__.py", base.with_name(base.name + ".py")):
            if path.is_file():
                yield path
                break


def hash_file(path: str | Path) -> str:
    """Return the sha256 of the file's content, including the files of an index of weights."""
    digest = hashlib.sha256()
    for file_path in (Path(path), *filter(Path.is_file, list_shards(Path(path)))):
        with open(file_path, "rb") as f:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def list_shards(path: Path) -> list[Path]:
    """Return the files named by an index of weights (`model.safetensors.index.json`) in its folder; else []."""
    if not path.name.endswith(".index.json"):
        return []
    try:
        names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
        is_valid = all(Path(name).name == name and not name.endswith(".json") for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [path.with_name(name) for name in names] if is_valid else []


def load_module(location: str, source: str) -> Any:
    """Import the named module; raise a `UserError` if that fails."""
    subject = f"model {source!r}"
    try:
        with run_user_code(f"{subject}: importing {location}", ModuleNotFoundError):
            return importlib.import_module(location)
    except ModuleNotFoundError as e:
        raise UserError(
            f"{subject}: {e}; install it, put its folder on PYTHONPATH, or give the file as FILE.py:FUNCTION"
        ) from e


def load_file(path: Path, sha256: str) -> Any:
    """Import the file as a module; raise a `UserError` if that fails or its content has another sha256."""
    if not path.is_file():
        raise UserError(f"model file {path} doesn't exist")
    if sha256 and sha256_with_imports(path) != sha256:
        subject = f"model file {path}, or one that it imports,"
        raise UserError(f"{subject} changed since the study was planned; run the same command again")
    name = f"dyno_model_{hashlib.sha256(str(make_absolute(path)).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # true for every .py path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for dataclasses and pickling in the file
    sys.meta_path.append(_SiblingFinder(path, name))  # last, so that it shadows nothing
    with run_user_code(f"model file {path}"):
        spec.loader.exec_module(module)
    return module


class _SiblingFinder(importlib.abc.MetaPathFinder):
    """An import finder for modules in a model file's folder: those named in its imports, and any for its own code.

    Other importers get none: PyTorch tries to import z3, which need not be installed, and would get the user's z3.py.
    """

    def __init__(self, file: Path, name: str) -> None:
        self._folder = str(make_absolute(file).parent)
        self._local_names = {
            path.relative_to(_find_root(file)).parts[0].removesuffix(".py") for path in local_files(file)
        }
        self._loaded_names = {name}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if path is not None or not (fullname in self._local_names or self._wanted_by_own()):
            return None  # submodules are found by their package's path
        spec = PathFinder.find_spec(fullname, [self._folder])
        if spec is not None:
            self._loaded_names.add(fullname)
        return spec

    def _wanted_by_own(self) -> bool:
        """Return whether the file's own code, or a module from its folder, is running, perhaps through a library."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).partition(".")[0] in self._loaded_names:
                return True
            frame = frame.f_back
        return False


@contextlib.contextmanager
def run_user_code(subject: str, allowed_error: type[Exception] = UserError) -> Iterator[None]:
    """Convert exceptions of the user's code in the block to a one-line `UserError` that begins with `subject`.

    Errors of the type `allowed_error` pass unchanged. PyTorch's process-wide settings are restored at the end.
    """
    try:
        with settings_kept(import_torch()), _OPENED.noting():
            yield
    except (UserError, Unavailable, allowed_error):
        raise
    except SystemExit as e:
        raise UserError(
            f"{subject} called sys.exit({'' if e.code is None else repr(e.code)}); put what a script does into "
            "`if __name__ == '__main__':`, and let the function take no arguments from the command line"
        ) from e
    except Exception as e:
        raise UserError(f"{subject} failed: {type(e).__name__}: {(str(e).splitlines() or [''])[0]}") from e


# Files read by the user's code while it makes a network, such as weights, and its imported modules

CODE_SUFFIXES = (".py", ".pyc", ".pyi", ".so")
DYNO_PACKAGE = Path(__file__).parents[2]  # Dyno's package
OF_THE_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/lib/", "/usr/share/")


class _OpenedFiles:
    """Files opened by the user's code, from Python's audit events; the hook lasts as long as the process.

    Files that the code writes itself are left out.
    """

    def __init__(self) -> None:
        self.hooked, self.running = False, 0
        self.imported_before: frozenset[str] = frozenset()
        self.read: set[str] = set()
        self.written: set[str] = set()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        """Record one opened file; never raise, since that would fail the opening."""
        if event == "open" and self.running and isinstance(args[0], (str, bytes, os.PathLike)):
            with contextlib.suppress(OSError, ValueError):
                is_write = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                (self.written if is_write else self.read).add(str(make_absolute(Path(os.fsdecode(args[0])))))


_OPENED = _OpenedFiles()


def note_files() -> None:
    """Record from now on the files that the user's code reads; safetensors gets the audit event that it lacks."""
    if _OPENED.hooked:
        return
    _OPENED.hooked, _OPENED.imported_before = True, frozenset(sys.modules)
    sys.addaudithook(_OPENED.note)
    with contextlib.suppress(ImportError):
        library = importlib.import_module("safetensors.torch")
        package, opener = importlib.import_module("safetensors"), library.safe_open

        def safe_open(filename: Any, *args: Any, **options: Any) -> Any:
            sys.audit("open", filename, "r", os.O_RDONLY)
            return opener(filename, *args, **options)

        library.safe_open = package.safe_open = safe_open  # type: ignore[attr-defined]


def hash_files_read(source: Path | None) -> dict[str, str]:
    """Return the sha256 of each recorded file and imported module, without libraries and the system.

    The source's own file and its imports are also left out: see `sha256_with_imports`.
    """
    libraries = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    modules = [module for name, module in [*sys.modules.items()] if name not in _OPENED.imported_before]
    code = {str(make_absolute(Path(file))) for module in modules if (file := getattr(module, "__file__", None))}
    code = {name for name in code if name.endswith(".py") and not Path(name).is_relative_to(DYNO_PACKAGE)}
    code -= {str(make_absolute(path)) for path in (source, *local_files(source))} if source else set()
    data = {name for name in _OPENED.read - _OPENED.written if not name.endswith(CODE_SUFFIXES)}
    hashes = {}
    for name in sorted(code | data):
        if not name.startswith((*libraries, *OF_THE_SYSTEM)) and Path(name).is_file():
            with contextlib.suppress(OSError):
                hashes[name] = hash_file(name)
    return hashes
