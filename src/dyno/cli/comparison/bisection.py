"""`dyno bisect`: the first version of a library with which a model is slower."""

from __future__ import annotations

from typing import Annotated

import typer

from dyno.cli import options
from dyno.cli.comparison.compare import DEFAULTS, OMITTED
from dyno.study_options import ComparisonOptions, DataOptions, MeasurementOptions, ModelOptions, RuntimeOptions
from dyno.worker.spec import UserError


@options.takes(
    ComparisonOptions,
    ModelOptions,
    DataOptions,
    MeasurementOptions,
    RuntimeOptions,
    omit=f"{OMITTED} runtime",
    **DEFAULTS,
)
def bisect(
    overrides: options.Overrides,
    model: options.Model,
    library: Annotated[str, typer.Option(help="Distribution whose versions are tried, e.g. onnxruntime.")] = "",
    versions: Annotated[
        str, typer.Option(help="Its versions in order, the good one first: 1.20.1,1.22.1,1.23.2. uv installs them.")
    ] = "",
    add: Annotated[
        list[str], typer.Option("--with", help="Another package to install beside each. May be repeated.")
    ] = [],  # noqa: B006
    pythons: Annotated[
        str, typer.Option(help="Or interpreters in order: good=PATH,bad=PATH.", metavar="A=PATH,…")
    ] = "",
    fail_on: Annotated[str, typer.Option(help="The slow-down that makes a version bad.")] = "slower=5%",
    out: options.Out = "",
) -> None:
    """Find the first version of a library with which a model is slower: exit 1 with it, 0 if none, 3 if undecided."""
    from dyno.api import bisection as module
    from dyno.worker.spec import plain

    result = module.bisect(
        model, library=library, versions=_parse_items(versions), pythons=_parse_interpreters(pythons), add=add,
        fail_on=fail_on, out=out or None, quiet=False, **overrides,
    )  # fmt: skip
    print("\n".join(map(plain, result.verdicts)))
    raise typer.Exit(result.exit_code)


def _parse_items(text: str) -> list[str]:
    names = [item.strip() for item in text.split(",") if item.strip()]
    if len(set(names)) < len(names):
        raise UserError(f"{text!r} names a version twice; give each one once")
    return names


def _parse_interpreters(text: str) -> dict[str, str]:
    interpreters: dict[str, str] = {}
    for item in _parse_items(text):
        name, path = options.interpreter(item, "--pythons", "NAME=PATH, e.g. old=/opt/old/bin/python")
        if name in interpreters:
            raise UserError(f"--pythons uses the name {name!r} twice; give each interpreter its own name")
        interpreters[name] = path
    return interpreters
