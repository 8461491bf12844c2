"""The content of a model's Python file and of the modules beside it that it imports."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path


def sha256_with_imports(file: Path) -> str:
    """sha256 of a Python file and of the files below its folder that its import statements lead to, if any.

    Imports by a name that is computed at run time, or from elsewhere on the path, are not included.
    """
    own = _sha256(file)
    beside = local_files(file)
    if not beside:
        return own
    total = hashlib.sha256(own.encode())
    for path in beside:
        total.update(f"\n{path.relative_to(_root(file)).as_posix()} {_sha256(path)}".encode())
    return total.hexdigest()


def local_files(file: Path) -> list[Path]:
    """The files below the file's own folder that it imports, directly or through each other, in alphabetical order."""
    root, seen, todo = _root(file), {file.resolve()}, [file.resolve()]
    while todo:
        for path in _imported(todo.pop(), root):
            if path not in seen:
                seen.add(path)
                todo.append(path)
    return sorted(seen - {file.resolve()})


def _root(file: Path) -> Path:
    """The folder that absolute imports start from: for a package, its parent."""
    folder = file.resolve().parent
    return folder.parent if file.name == "__init__.py" else folder


def _imported(file: Path, root: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # importing it reports what is wrong
        return
    package = file.parent.relative_to(root).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(root, tuple(alias.name.split(".")))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = (*above, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                yield from _files(root, (*base, alias.name))


def _files(root: Path, name: tuple[str, ...]) -> Iterator[Path]:
    """The files that importing the name runs: each package's on the way, and the module's (or none: an attribute)."""
    for depth in range(1, len(name) + 1):
        place = root.joinpath(*name[:depth])
        for path in (place / "__init__.py", place.with_name(place.name + ".py")):
            if path.is_file():
                yield path
                break


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
