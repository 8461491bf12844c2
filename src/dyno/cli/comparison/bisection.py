"""`dyno bisect`: the first version of a library with which a model is slower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dyno.cli import options
from dyno.cli.comparison.compare import DEFAULTS, OMITTED
from dyno.study_options import Compared, DataOptions, Measurement, ModelOptions, RuntimeOptions
from dyno.worker.spec import UserError


@options.takes(Compared, ModelOptions, DataOptions, Measurement, RuntimeOptions, omit=f"{OMITTED} runtime", **DEFAULTS)
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
        model, library=library, versions=_items(versions), pythons=_interpreters(pythons), add=add, fail_on=fail_on,
        out=out or None, quiet=False, **overrides,
    )  # fmt: skip
    print("\n".join(map(plain, result.verdicts)))
    raise typer.Exit(result.exit_code)


def _items(text: str) -> list[str]:
    names = [item.strip() for item in text.split(",") if item.strip()]
    if len(set(names)) < len(names):
        raise UserError(f"{text!r} names a version twice")
    return names


def _interpreters(text: str) -> dict[str, str]:
    interpreters: dict[str, str] = {}
    for item in _items(text):
        name, _, path = item.partition("=")
        if not name or not path or name in interpreters:
            raise UserError(
                f"--pythons {item!r} is not NAME=PATH with a name used once, such as old=/opt/old/bin/python"
            )
        if not Path(path).is_file():
            raise UserError(f"--pythons {name}: there is no interpreter {path}")
        interpreters[name] = str(Path(path).absolute())
    return interpreters
