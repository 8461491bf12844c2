"""Routes to an ONNX file as the command line names them: `--routes dynamo,torchscript+static`."""

from __future__ import annotations

from dataclasses import replace

from dyno.study import Choice
from dyno.worker import registry
from dyno.worker.spec import Option, UserError

PARTS = ("dynamo", "torchscript", "static", "fold", "opsetN")
ALL = ("dynamo", "torchscript", "dynamo+static+fold", "torchscript+static+fold")


def options_of(text: str) -> dict[str, Option]:
    """The backend's options that a route like `torchscript+opset17+static+fold` stands for; else a `UserError`."""
    options: dict[str, Option] = {}
    for part in text.split("+"):
        if part in ("dynamo", "torchscript"):
            options["exporter"] = part
        elif part in ("static", "fold"):
            options[part] = True
        elif part.startswith("opset") and part[len("opset") :].isdecimal():
            options["opset"] = int(part[len("opset") :])
        else:
            raise UserError(f"unknown route {text!r}; a route is made of {', '.join(PARTS)}, joined by +, or it is all")
    return options


def routed(choices: list[Choice], routes: tuple[str, ...], *, file: bool = False) -> list[Choice]:
    """Each backend that reads ONNX by each of the routes (`all`: those that differ most); the others as they are.

    Of a `file`, which is exported already, only routes without an exporter apply.
    """
    names = [name for route in routes for name in (ALL if route == "all" else (route,))]
    if file:
        names = [name for name in names if not {"dynamo", "torchscript"} & set(name.split("+"))]
        names = ["fold", *names] if "all" in routes else names
    by_route = []
    for choice in choices:
        reads = "exporter" in registry.find(choice.name).options
        by_route += (
            [replace(choice, options={**choice.options, **options_of(name)}) for name in names]
            if reads and names
            else [choice]
        )
    return by_route
