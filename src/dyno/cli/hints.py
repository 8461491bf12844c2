"""What to do next, in one line: which extra brings a library, and which command was meant."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

KINDS = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}


def no_command(name: str, commands: Iterable[str]) -> str:
    """Return the error message for an unknown command, with a suggestion."""
    from dyno.worker import registry  # with NumPy, which `dyno --help` has no use for

    if name in ("help", "version"):
        return f"there is no command {name!r}; write dyno --{name}"
    similar = difflib.get_close_matches(name, list(commands), 1)
    if ":" in name or registry.format_of(name) or name.endswith(".toml"):
        return f"there is no command {name!r}; to measure it: dyno run {shlex.quote(name)}"
    if (Path(name) / "trials").is_dir():
        return f"there is no command {name!r}; to see that run: dyno show {shlex.quote(name)}"
    if similar:
        return f"there is no command {name!r}; did you mean dyno {similar[0]}?"
    return f"there is no command {name!r}; to measure a model: dyno run torchvision:{name} (dyno --help lists commands)"


def usage(error: Any, command: str) -> str:
    """Return the message of click's `UsageError`, with the nearest option and a pointer to the help."""
    option = getattr(error, "option_name", "")
    if option in ("--model", "--models"):
        return f"no such option: {option}; give the model alone: {command} torchvision:resnet18; see {command} --help"
    for reason in getattr(error.__cause__, "errors", list)():  # of pydantic, which checks what typer is given
        if kind := KINDS.get(reason["type"]):
            error.message = f"{reason['input']!r} is not {kind}"
    similar = difflib.get_close_matches(option, getattr(error, "possibilities", None) or (), 1)
    text = f"{error.message}; did you mean {similar[0]}?" if similar else error.format_message()
    line = " ".join(text.split()).removesuffix(".")
    return f"{line[:1].lower()}{line[1:]}; see {command} --help"
