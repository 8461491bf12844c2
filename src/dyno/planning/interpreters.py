"""Where a backend runs: the interpreter, environment and device of its jobs, and which libraries it lacks."""

from __future__ import annotations

from dataclasses import replace

from dyno.store import versions
from dyno.study import Choice, Study, runtimes
from dyno.worker import registry
from dyno.worker.spec import Recipe, Runtime

HERE = Runtime()


def installed(device: str) -> list[str]:
    """Return the backends that run on the device and whose libraries this Python has."""
    kind = device.split(":")[0]
    return [name for name in registry.names() if kind in registry.find(name).devices and not missing(name)]


def missing(name: str, runtime: Runtime = HERE) -> str:
    """Return the first library that the backend needs and that the runtime lacks, or ""."""
    requires = registry.find(name).requires
    present = versions(runtime, requires)
    return next((either.split("|")[0] for either in requires if not present.keys() & set(either.split("|"))), "")


def placed(recipe: Recipe | None, study: Study) -> Recipe | None:
    """Return the recipe with each step in the interpreter that the study has for its runtime's name."""
    if recipe is None:
        return None
    runtime = recipe.runtime
    if runtime.name in study.runtime:
        configured = runtime_of(study, Choice(runtime.name))
        runtime = replace(runtime, python=configured.python, env=configured.env)
    return replace(
        recipe, parent=placed(recipe.parent, study), fallback=placed(recipe.fallback, study), runtime=runtime
    )


def runtime_of(study: Study, choice: Choice) -> Runtime:
    """Return the interpreter, environment and device that the study has for a backend."""
    table = runtimes(study, choice)
    return Runtime(
        name=choice.runtime or "main",
        python=str(table.get("python", "")),
        env={str(k): str(v) for k, v in table.get("env", {}).items()},
        device=study.device,
    )
