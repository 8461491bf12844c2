"""What to do next, in one line: which extra brings a library, and which command was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from dyno.worker.spec import MODEL_FILES


def no_command(name: str, commands: Iterable[str]) -> str:
    """What is wrong with a first word that is no command, and what may have been meant."""
    near = difflib.get_close_matches(name, list(commands), 1)
    if ":" in name or name.endswith((*MODEL_FILES, ".toml")):
        return f"there is no command {name!r}; to measure it: dyno run {name}"
    if (Path(name) / "trials").is_dir():
        return f"there is no command {name!r}; to see that run: dyno show {name}"
    if near:
        return f"there is no command {name!r}; did you mean dyno {near[0]}?"
    return f"there is no command {name!r}; to measure a model: dyno run torchvision:{name} (dyno --help lists commands)"
