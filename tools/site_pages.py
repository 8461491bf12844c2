"""Hooks of mkdocs that build the documentation's site from the repository: `mkdocs build --strict`.

The first page is the README. The references come from the code: commands from `--help-all`, Python from docstrings,
keys of a study file from its options, tables and columns from their descriptions, and JSON files from the dataclasses
stored in them. Links to the source and to folders, absent from the site, become plain words.

python tools/site_pages.py study                     # print a reference: commands, python, study, columns or records
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import posixpath
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md",
         "CHANGELOG.md": "changelog.md"}  # fmt: skip
NOTES = sorted((ROOT / "benchmarks/results").glob("*.md"))  # linked from docs/results.md, not in the menu
PAGES |= {note.relative_to(ROOT).as_posix(): f"results/{note.name}" for note in NOTES}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
WIDTH = "86"  # columns of help that a code block shows on a screen of 1,280 px without scrolling
SHIM = "https://unpkg.com/iframe-worker/shim"  # lets the search work in pages opened from a folder


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that aren't in docs/."""
    from mkdocs.structure.files import File

    made = {page: (ROOT / source).read_text(encoding="utf-8") for source, page in PAGES.items()}
    made |= {f"reference/{name}.md": make() for name, make in REFERENCES.items()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with its links pointing to the site's pages."""
    return linked(markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return the page with the shim from the site itself, so that nothing is fetched from outside."""
    return _with_own_shim(output, posixpath.dirname(page.url))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Return a page made from a template alone, with the shim from the site itself."""
    return _with_own_shim(output_content, "")


def _with_own_shim(html: str, folder: str) -> str:
    return html.replace(SHIM, posixpath.relpath("assets/iframe-worker.js", folder or "."))


def linked(markdown: str, page: str) -> str:
    """Return the text of a page with its links relative to its place on the site."""
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
    """Return the --help-all output of every command."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from dyno.cli.app import make_app

    app = make_app()
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
    """Return the public names of the package, each by the module that defines it."""
    import dyno

    lines = ["# Python", "", "What `import dyno` has. [From Python](../python.md) shows how these go together.", ""]
    for name in dyno.__all__:
        one = getattr(dyno, name)
        place = f"{one.__module__}.{one.__qualname__}"
        if one is dyno.Study:  # its docstring is made of its fields, which mkdocstrings doesn't see
            lines += [f"::: {place}", "    options:", "      members: false", "", *_fields(one)]
            lines += [f"::: {place}.run", "    options:", "      heading_level: 3", ""]
        else:
            lines += [f"::: {place}", ""]
    return "\n".join(lines)


def _fields(study: type) -> Iterator[str]:
    """Yield the docstring of a study, with its fields as a list."""
    *paragraphs, fields = (inspect.getdoc(study) or "").split("\n\n")
    for paragraph in paragraphs:
        yield from (paragraph, "")
    yield from (f"- `{name}`: {what}" for name, _, what in (line.partition(": ") for line in fields.splitlines()))
    yield ""


def study() -> str:
    """Describe every key of a study file: default, flag, help, and whether a later command may change it."""
    from dyno.runner.run_folder import REPEATABLE_SETTINGS, STUDY_AXES
    from dyno.study.study import Study

    rows = []
    for field in dataclasses.fields(Study):
        flag = field.metadata.get("flags", "")
        flag = "" if flag is None else (flag.partition(" ")[0] or f"--{field.name.replace('_', '-')}")
        usual = field.metadata.get("usual") or field.default
        silent = usual in ("", (), None, dataclasses.MISSING)
        change = (
            "adds" if field.name in (*STUDY_AXES, "runtime") else "yes" if field.name in REPEATABLE_SETTINGS else "no"
        )
        rows.append([f"`{field.name}`", "" if silent else _toml(usual), f"`{flag}`" * bool(flag), change,
                     field.metadata["help"]])  # fmt: skip
    return "\n".join([
        "# Study file", "",
        "The keys of `study.toml` are the fields of `dyno.Study`. Flags of `dyno run` override the file. An unknown "
        "key is an error with the nearest spelling. A single value may replace a list of one.", "",
        "*Later* says what a later command for the same folder may do: *adds* new values to the earlier ones, *yes* "
        "changes the setting, *no* is refused unless nothing was measured yet. In a folder with `until = \"decided\"` "
        "`until` and `rounds` are fixed too.", "",
        *_table(("key", "default", "flag", "later", "meaning"), rows), "",
    ])  # fmt: skip


def _toml(value: Any) -> str:
    """Return a default as a study file has it."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def columns() -> str:
    """List every table with its content, and every column of results.csv with its unit and meaning."""
    from dyno.report import tables
    from dyno.report.tables import trial_table

    kinds = [[f"`{kind.name}`", kind.title, kind.description] for kind in tables.list_kinds()]
    rows = [[f"`{column.name}`", column.unit, column.meaning] for column in trial_table.COLUMNS]
    return "\n".join([
        "# Tables and columns", "", "`dyno show RUN --table NAME` prints a table. [Tables and charts](../tables.md) "
        "explains them.", "", *_table(("table", "title", "holds"), kinds), "", "## results.csv", "",
        "One row per trial, also from `dyno show --format csv` and `Result.to_pandas()`. A cell is empty where the "
        "column doesn't apply. JSON has the same names, with null for empty.", "",
        *_table(("column", "unit", "meaning"), rows), "",
    ])  # fmt: skip


def records() -> str:
    """List the dataclasses that job.json, record.json and their parts store, field by field."""
    from dyno.worker.record import Record
    from dyno.worker.spec import SCHEMA, Job

    parts = [
        "# Jobs and records", "",
        f"`job.json` is a [Job](#job), `record.json` a [Record](#record); schema {SCHEMA}. Values are in SI units. "
        "Facts at their default are not stored, and a plug-in's further keys are read into `other`. "
        "[Files](../file-format.md) says where they lie.", "",
    ]  # fmt: skip
    for kind in _parts_of(Job, Record):
        parts += [f"## {kind.__name__}", "", *_described(kind)]
        rows = [[f"`{f.name}`", f"`{f.type}`", _default(f)] for f in dataclasses.fields(kind)]
        parts += [*_table(("field", "type", "default"), rows), ""]
    return "\n".join(parts)


def _parts_of(*kinds: Any) -> list[Any]:
    """Return the dataclasses and all types of their fields, each once, in reading order."""
    found: dict[Any, None] = {}

    def add(kind: Any) -> None:
        if dataclasses.is_dataclass(kind):
            if kind in found:
                return
            found[kind] = None
            for hint in typing.get_type_hints(kind).values():
                add(hint)
        for part in typing.get_args(kind):
            add(part)

    for kind in kinds:
        add(kind)
    return list(found)


def _described(kind: Any) -> Iterator[str]:
    """Yield the docstring of a dataclass, and those of the dataclasses from which it inherits fields."""
    from dyno.worker.facts.json_values import Sparse

    for each in kind.__mro__:
        if each not in (object, Sparse) and each.__doc__:
            yield from (inspect.cleandoc(each.__doc__), "")


def _default(field: dataclasses.Field[Any]) -> str:
    """Return a field's default, "" for an empty one and "required" if there is no default."""
    if field.default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else ""
    plain = isinstance(field.default, str | int | float) and field.default != ""
    return f"`{field.default}`" if plain else ""


def _table(heads: tuple[str, ...], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    yield from (f"| {' | '.join(cell.replace(chr(10), ' ') for cell in row)} |" for row in rows)


REFERENCES: dict[str, Callable[[], str]] = {
    "commands": commands, "python": python, "study": study, "columns": columns, "records": records,
}  # fmt: skip

if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(REFERENCES[wanted]())
