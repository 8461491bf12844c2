"""Hooks of mkdocs that make the documentation's site out of what the repository has: `mkdocs build --strict`.

The first page is the README; the reference of commands is what `--help-all` prints, that of Python is read from the
docstrings. Links to the source and to folders, which the site doesn't have, become plain words.
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md",
         "CHANGELOG.md": "changelog.md"}  # fmt: skip
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
WIDTH = "86"  # columns of help: what a code block shows on a screen of 1,280 px without scrolling
SHIM = "https://unpkg.com/iframe-worker/shim"  # by which the search works in pages that are opened from a folder


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that aren't in docs/."""
    from mkdocs.structure.files import File

    made = {page: (ROOT / source).read_text(encoding="utf-8") for source, page in PAGES.items()}
    made |= {"reference/commands.md": commands(), "reference/python.md": python()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with links that lead to pages of the site, wherever in the repository its text is from."""
    return linked(markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The page with the shim from the site itself, so that nothing is fetched from outside."""
    return _with_own_shim(output, posixpath.dirname(page.url))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same of a page that has no text of its own."""
    return _with_own_shim(output_content, "")


def _with_own_shim(html: str, folder: str) -> str:
    return html.replace(SHIM, posixpath.relpath("assets/iframe-worker.js", folder or "."))


def linked(markdown: str, page: str) -> str:
    """The text of a page of the site with its links relative to where it is now."""
    sources = {shown: source for source, shown in PAGES.items()}
    folder = posixpath.dirname(sources.get(page, f"docs/{page}"))

    def replaced(match: re.Match[str]) -> str:
        image, text, path, anchor = match[1], match[2], match[3], match[4] or ""
        if not path or ":" in path:
            return match[0]
        place = posixpath.normpath(posixpath.join(folder, path))
        target = PAGES.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else "")
        if (ROOT / place).is_dir():
            target = f"{target}/README.md" if target and (ROOT / place / "README.md").is_file() else ""
        if not target:
            return text
        return f"{image}[{text}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{anchor})"

    return LINK.sub(replaced, markdown)


def commands() -> str:
    """What every command's --help-all prints."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from dyno.cli.app import app

    os.environ |= {"COLUMNS": WIDTH, "TERMINAL_WIDTH": WIDTH, "NO_COLOR": "1", "TERM": "dumb"}
    parts = ["# Commands\n\nWhat each command prints with `--help-all`; `--help` has the common options alone.\n"]
    for words, command in _leaves(get_command(app), ()):
        name = " ".join(("dyno", *words))
        every = "--help-all" if any("--help-all" in option.opts for option in command.params) else "--help"
        printed = CliRunner().invoke(app, [*words, every], prog_name="dyno").stdout
        lines = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
        parts.append(f"## {name}\n\n```text\n{lines.strip()}\n```\n")
    return "\n".join(parts)


def _leaves(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    below = getattr(command, "commands", {})
    for name, each in below.items():
        if not each.hidden:
            yield from _leaves(each, (*words, name))
    if not below:
        yield words, command


def python() -> str:
    """The names of the package, by where each is defined."""
    import dyno

    lines = ["# Python", "", "What `import dyno` has. [From Python](../python.md) shows how these go together.", ""]
    for name in dyno.__all__:
        one = getattr(dyno, name)
        place = f"{one.__module__}.{one.__qualname__}"
        if one is dyno.Study:  # whose docstring is made of its fields, which mkdocstrings doesn't see
            lines += [f"::: {place}", "    options:", "      members: false", "", *_fields(one)]
            lines += [f"::: {place}.run", "    options:", "      heading_level: 3", ""]
        else:
            lines += [f"::: {place}", ""]
    return "\n".join(lines)


def _fields(study: type) -> Iterator[str]:
    """The docstring of a study, with its fields as a list."""
    *paragraphs, fields = (inspect.getdoc(study) or "").split("\n\n")
    for paragraph in paragraphs:
        yield from (paragraph, "")
    yield from (f"- `{name}`: {what}" for name, _, what in (line.partition(": ") for line in fields.splitlines()))
    yield ""
