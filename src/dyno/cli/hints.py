"""What to do next, in one line: which extra brings a library, and which command was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def no_command(name: str, commands: Iterable[str]) -> str:
    """What is wrong with a first word that is no command, and what may have been meant."""
    from dyno.worker import registry  # with NumPy, which `dyno --help` has no use for

    near = difflib.get_close_matches(name, list(commands), 1)
    if ":" in name or registry.format_of(name) or name.endswith(".toml"):
        return f"there is no command {name!r}; to measure it: dyno run {name}"
    if (Path(name) / "trials").is_dir():
        return f"there is no command {name!r}; to see that run: dyno show {name}"
    if near:
        return f"there is no command {name!r}; did you mean dyno {near[0]}?"
    return f"there is no command {name!r}; to measure a model: dyno run torchvision:{name} (dyno --help lists commands)"


def usage(wrong: Any, command: str) -> str:
    """What click's `UsageError` says of a missing argument or a wrong option, and where to see what is right."""
    near = difflib.get_close_matches(getattr(wrong, "option_name", ""), getattr(wrong, "possibilities", None) or (), 1)
    text = f"{wrong.message}; did you mean {near[0]}?" if near else wrong.format_message()
    line = " ".join(text.split()).removesuffix(".")
    return f"{line[:1].lower()}{line[1:]}; see {command} --help"
