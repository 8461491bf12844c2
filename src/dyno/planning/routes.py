"""Routes to an ONNX file as the command line names them: `--routes dynamo,torchscript+static`."""

from __future__ import annotations

from dataclasses import replace

from dyno.study import Choice
from dyno.worker import registry
from dyno.worker.facts.files import MakerFacts
from dyno.worker.spec import Option, UserError

NAMES = ("exporter", "opset", "static", "fold")  # options that say which route
PARTS = ("dynamo", "torchscript", "static", "fold", "opsetN")
ALL = ("dynamo", "torchscript", "dynamo+static+fold", "torchscript+static+fold")
USUAL = "usual"  # that one alone
# Operators that the exporters write alike: a graph of these has the same work to do by every route. What they write
# in many ways are attention, normalisation, and whatever depends on shapes.
ALIKE = frozenset(
    "Add AveragePool BatchNormalization Clip Concat Constant Conv ConvTranspose Div Elu Flatten Gemm GlobalAveragePool "
    "GlobalMaxPool HardSigmoid HardSwish Identity LeakyRelu MaxPool Mul PRelu ReduceMean Relu Reshape Sigmoid Softmax "
    "Squeeze Sub Tanh Unsqueeze".split()
)


def options_of(text: str) -> dict[str, Option]:
    """Parse a route, `torchscript+opset17+static+fold`, into backend options; raise `UserError` for an unknown one."""
    options: dict[str, Option] = {}
    if text == USUAL:
        return options
    for part in text.split("+"):
        if part in ("dynamo", "torchscript"):
            options["exporter"] = part
        elif part in ("static", "fold"):
            options[part] = True
        elif part.startswith("opset") and part[len("opset") :].isdecimal():
            options["opset"] = int(part[len("opset") :])
        else:
            known = f"{', '.join(PARTS)}, joined by +, or is {USUAL} or all"
            raise UserError(f"unknown route {text!r}; a route is made of {known}")
    return options


def routed(choices: list[Choice], routes: tuple[str, ...], *, file: bool = False) -> list[Choice]:
    """Return each backend that reads ONNX by each of the routes (`all`: those that differ most), others unchanged.

    For a `file`, which is exported already, only routes without an exporter apply.
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


def others(made_by: MakerFacts, folds: bool) -> tuple[str, ...]:
    """Return the routes that may give an engine another graph than the one exported first.

    `folds` tells whether the engine's usual route fixes and folds the shapes anyway.
    """
    if made_by.operators.keys() <= ALIKE:
        return ()
    other = () if made_by.exporter == "torchscript" else ("torchscript",)
    if folds:
        return tuple(f"{name}+static+fold" for name in other)
    return (*other, f"{made_by.exporter}+static+fold")
