"""Command line: the table of commands and their functions, and their overview, which imports no library."""

from __future__ import annotations

import gc
import re
import shutil
import signal
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

SUMMARY = "Find the fastest way to run your model on this machine, and prove it."
EXAMPLES = (
    "dyno run torchvision:resnet18                # every engine that is installed",
    "dyno run net.py:build --data photos --precision fp32,int8 --budget top1=1",
    "dyno report                                  # the latest run, in the browser",
    "dyno export runs/resnet18 -o best            # its winner, and a script for it",
)
COMMAND_GROUPS = {
    "bench": "Measure a video, requests, an application, cold starts or stress.",
    "runs": "List runs, or remove them.",
    "data": "Train on class folders, or sort images into them.",
}
# Commands by heading of the overview: a command's function, or the functions of a group's commands.
COMMANDS: dict[str, dict[str, str | dict[str, str]]] = {
    "Measure": {
        "run": "dyno.cli.commands:run",
        "time": "dyno.cli.commands:time",
        "eval": "dyno.cli.commands:eval",
        "compare": "dyno.regression.commands:compare",
        "demo": "dyno.cli.application:demo",
        "bench": {
            "video": "dyno.video.commands:video",
            "serve": "dyno.serving.commands:serve",
            "app": "dyno.serving.commands:app",
            "cold-start": "dyno.layers.commands:cold_start",
            "stress": "dyno.cli.commands:stress",
        },
    },
    "Results": {
        "show": "dyno.cli.commands:show",
        "report": "dyno.cli.commands:report",
        "runs": {"list": "dyno.cli.run_folders:list_runs", "rm": "dyno.cli.run_folders:remove"},
    },
    "Files": {
        "export": "dyno.cli.files:export",
        "pack": "dyno.cli.files:pack",
        "verify": "dyno.cli.files:verify",
        "reproduce": "dyno.cli.files:reproduce",
        "site": "dyno.cli.files:site",
        "data": {"train": "dyno.training.commands:train", "imagenet-val": "dyno.cli.files:imagenet_val"},
    },
    "Inspect": {
        "profile": "dyno.layers.commands:profile",
        "explain": "dyno.layers.commands:explain",
        "inspect": "dyno.layers.commands:inspect",
        "diff": "dyno.cli.commands:diff",
        "doctor": "dyno.cli.application:doctor",
        "selftest": "dyno.cli.commands:selftest",
    },
}
MAX_WIDTH = 80


def write_overview() -> str:
    """Return the help of `dyno` alone: its purpose, examples, and each command with its first sentence.

    Sentences are read from the modules' source, as importing the modules takes three times as long as the rest.
    """
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH) - 2
    parts = ["Usage: dyno [OPTIONS] COMMAND [ARGS]...", f"  {SUMMARY}", _write_section("Examples", EXAMPLES)]
    for heading, commands in COMMANDS.items():
        name_width = max(map(len, commands)) + 2
        texts = [
            (name, COMMAND_GROUPS[name] if isinstance(target, dict) else _read_docstring(target))
            for name, target in commands.items()
        ]
        lines = [
            textwrap.fill(
                f"{name:{name_width}}{text.partition('. ')[0].removesuffix('.')}", width - 2,
                subsequent_indent=" " * name_width,
            ).replace("\n", "\n  ")
            for name, text in texts
        ]  # fmt: skip
        parts.append(_write_section(heading, lines))
    return "\n\n".join([*parts, "dyno COMMAND --help shows its common options, --help-all all."]) + "\n"


def _write_section(heading: str, lines: Any) -> str:
    return "\n".join([f"{heading}:", *(f"  {line}" for line in lines)])


def _read_docstring(location: str) -> str:
    """Return the first line of a function's docstring, from the source of its module."""
    module, _, function = location.partition(":")
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    match = re.search(
        rf'^def {function}\(.*?"""(.*?)(?:"""|\n)', path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return match[1] if match else ""


def make_app(only: str = "") -> typer.Typer:
    """Build the application with the named command alone, or with all commands, which imports all their modules."""
    from dyno.cli import application

    selection = {heading: {only: commands[only]} for heading, commands in COMMANDS.items() if only in commands}
    return application.make_app(selection or COMMANDS, COMMAND_GROUPS, write_overview)


def main() -> None:
    """Run the command line; a user's error becomes one line and exit code 2, an interrupt exit code 130."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        with suppress(OSError):  # a stream that can't be written to: `exits` reports it
            print(write_overview(), end="", flush=True)
            return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback during imports, before `exits` handles it
    from dyno.cli import exits

    gc.set_threshold(50_000)  # the tables of a large run are millions of objects without cycles
    sys.argv[1:] = exits.expand_home(exits.replace_renamed(sys.argv[1:]))
    exits.end(make_app("".join(sys.argv[1:2])))


if __name__ == "__main__":
    main()
