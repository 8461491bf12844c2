"""Runtimes of backends: interpreter, environment and device of their jobs, and missing libraries."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from dyno.store import cache_dir, find_versions
from dyno.study.study import Choice, Study, find_runtime
from dyno.worker import registry
from dyno.worker.extras import install
from dyno.worker.record import lock
from dyno.worker.spec import Recipe, Runtime, UserError, clean_text

THIS_RUNTIME = Runtime()


def list_installed(device: str, extra_names: Collection[str] = ()) -> list[str]:
    """Return the backends that run on the device and are installed in this Python, or are in `extra_names`."""
    kind = device.split(":")[0]
    names = [name for name in registry.list_backends() if kind in registry.find(name).devices]
    return [name for name in names if name in extra_names or not find_missing(name)]


def find_missing(name: str, runtime: Runtime = THIS_RUNTIME) -> str:
    """Return the backend's first library that is missing in the runtime, or ""."""
    requires = registry.find(name).requires
    versions = find_versions(runtime, requires)
    return next((either.split("|")[0] for either in requires if not versions.keys() & set(either.split("|"))), "")


def explain_missing(name: str, runtime: Runtime = THIS_RUNTIME) -> str:
    """Return the backend's missing library and how to install it, in one line, or ""."""
    library = find_missing(name, runtime)
    if not library:
        return ""
    if runtime.python:
        return f"{library} is not installed in {runtime.python}; pip install {library}"
    cure = registry.find(name).install_hint or f"{install(library)}, or pass a Python that has it: --python {name}=PATH"
    return f"{library} is not installed in this Python; {cure}"


def place_recipe(recipe: Recipe | None, study: Study) -> Recipe | None:
    """Return the recipe with each step in the study's interpreter for its runtime's name."""
    if recipe is None:
        return None
    runtime = recipe.runtime
    if runtime.name in study.runtime:
        replacement = runtime_of(study, Choice(runtime.name))
        runtime = replace(runtime, python=replacement.python, env=replacement.env)
    return replace(
        recipe,
        parent=place_recipe(recipe.parent, study),
        fallback=place_recipe(recipe.fallback, study),
        runtime=runtime,
    )


def runtime_of(study: Study, choice: Choice) -> Runtime:
    """Return the study's interpreter, environment and device for a backend."""
    table = find_runtime(study, choice)
    return Runtime(
        name=choice.runtime or "main",
        python=str(table.get("python", "")),
        env={str(k): str(v) for k, v in table.get("env", {}).items()},
        device=study.device,
    )


# Environments with chosen library versions, made once by uv in the cache.

INSTALL_TIMEOUT_S = 3600.0  # limit for downloads of several GB
REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.\-]*(\[[\w,\-]+\])?((==|>=|<=|~=|<|>|!=)[\w.*+!]+,?)*")
INSTALLED_FILE = "packages.txt"  # marks a complete environment


def python_with(packages: Sequence[str]) -> str:
    """Return the interpreter of an environment with these packages, in this Python's version.

    uv uses its configured index. Raises `UserError` if uv is missing, or, with uv's message, if the packages can't be
    installed.
    """
    for package in packages:
        if not REQUIREMENT.fullmatch(package):
            raise UserError(f"{package!r} is not a package with a version, such as onnxruntime==1.20.1")
    uv = _find_uv()
    content = "\n".join([*packages, sys.version, sys.executable])
    folder = cache_dir() / "environments" / hashlib.sha256(content.encode()).hexdigest()[:16]
    python = folder / "bin" / "python"
    with lock(folder.with_suffix(".lock")):
        if not (folder / INSTALLED_FILE).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            _run_uv([uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
            try:
                _run_uv([uv, "pip", "install", "--quiet", "--python", str(python), *packages])
            except UserError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            (folder / INSTALLED_FILE).write_text(content, encoding="utf-8")
    return str(python)


def _find_uv() -> str:
    candidate = Path(sys.executable).with_name("uv")
    uv = str(candidate) if candidate.is_file() else shutil.which("uv")
    if uv is None:
        raise UserError("uv is not installed; it makes an environment for each version: pip install uv")
    return uv


def _run_uv(command: list[str]) -> None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"{Path(command[0]).name} {command[1]} did not end within {INSTALL_TIMEOUT_S:g} s") from None
    if process.returncode:
        lines = [
            clean_text(line).lstrip("×╰─▶├│ ").strip() for line in process.stderr.partition("hint:")[0].splitlines()
        ]
        raise UserError(" ".join(filter(None, lines)) or f"uv ended with exit code {process.returncode}")
