"""Export of tables: terminal text, Markdown, CSV, JSON or HTML, all from the same `Table`."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno import formatting
from dyno.formatting import MAX_LINE_LENGTH, clean_text, csv_cell, escape_markdown, markdown_table, shorten_text
from dyno.table import COUNT, FIRST_KEY, LINK_KEY, TEXT, Column, Row, Table, TablePart, is_missing
from dyno.worker.record import replace_file
from dyno.worker.spec import SCHEMA, check_known

MAX_NAME_WIDTH = 32  # characters of a name in a terminal; wider text is folded before a column is dropped
COLUMN_GAP = 2  # spaces between columns
WORD_BREAK_DIVISOR = 3  # words longer than width / this are broken
PIPED_WIDTH = 120  # characters per line in a file or pipe, for tables with a column limit
MORE_COLUMNS = "more columns: dyno show --columns all"

By = str | Sequence[str]


def export(
    tables: Sequence[Table], format: str = "text", by: By = (), head: Mapping[str, Any] | None = None, subset: str = ""
) -> str:
    """Return the tables in one of FORMATS, ending with a newline.

    `csv`, `json` and `html` (a page) hold plain values. csv and json have every column, other formats the printed ones,
    in one part per value of the columns `by`. `subset` selects columns (EVERY: all) in all formats but json. `head`
    starts the JSON object, which holds the `columns`, `rows` and `notes` of each table by name. UserError for an
    unknown format or column.
    """
    check_known("format", format, FORMATS)
    if format == "json":
        return _format_json(tables, head or {})
    return FORMATS[format](tables, by, subset)


def write_parquet(path: Path, table: Table, head: Mapping[str, Any] | None = None) -> None:
    """Write all columns of a table as a Parquet file: int64 for counts, string for text, double for other numbers.

    Missing values are null. Each field's metadata has the column's `unit`, `kind` and `meaning`. The schema's metadata
    has `dyno`, a JSON object as in the format `json`, without columns and rows.
    """
    import pyarrow as pa
    import pyarrow.parquet

    types = {COUNT: pa.int64(), TEXT: pa.string()}
    fields, arrays = [], []
    for column in table.columns:
        metadata = {"unit": column.unit, "kind": column.kind, "meaning": column.meaning}
        fields.append(pa.field(column.name, types.get(column.kind, pa.float64()), metadata=metadata))
        values = [_fill_missing(row.get(column.name)) for row in table.rows]
        convert = {COUNT: int, TEXT: str}.get(column.kind, float)
        arrays.append(pa.array([None if value == "" else convert(value) for value in values], fields[-1].type))
    details = {"table": table.name, "title": table.title, "description": table.description, "notes": list(table.notes)}
    header = json.dumps({"schema": SCHEMA, **(head or {}), **details}, ensure_ascii=False)
    with replace_file(path) as file:
        pyarrow.parquet.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields, {"dyno": header})), file)


def with_sentences(tables: Sequence[Table], sentences: Sequence[str], format: str) -> str:
    """Return the tables as text, Markdown or a page with sentences below them; as CSV without sentences."""
    if format == "html":
        return _format_page(tables, sentences=sentences)
    text = export(tables, format)
    if format == "csv":
        return text
    format_line = formatting.wrap_text if format == "text" else formatting.format_bullet
    return text + "\n" + "\n".join(map(format_line, sentences)) + "\n"


def _format_csv(tables: Sequence[Table], by: By, subset: str) -> str:
    text_file = io.StringIO()
    writer = csv.writer(text_file, lineterminator="\n")
    for index, table in enumerate(tables):
        text_file.write("\n" if index else "")
        columns = table.find_columns(subset) or table.columns
        writer.writerow([csv_cell(c.name) for c in columns])
        writer.writerows([csv_cell(_fill_missing(row.get(c.name))) for c in columns] for row in table.rows)
    return text_file.getvalue()


def _fill_missing(value: Any) -> Any:
    return "" if is_missing(value) else value


def _format_json(tables: Sequence[Table], head: Mapping[str, Any]) -> str:
    by_name = {table.name: _convert_table(table) for table in tables}
    document = {"schema": SCHEMA, **head, "tables": by_name}
    return json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _convert_table(table: Table) -> dict[str, Any]:
    head = {name: getattr(table, name) for name in ("title", "description")}
    columns = [{name: getattr(c, name) for name in ("name", "unit", "kind", "meaning")} for c in table.columns]
    rows = [{c.name: _convert_value(row.get(c.name)) for c in table.columns} for row in table.rows]
    return {**head, "columns": columns, "rows": rows, "notes": list(table.notes)}


def _convert_value(value: Any) -> Any:
    if is_missing(value) or value == "" or (isinstance(value, float) and math.isinf(value)):
        return None
    return value.item() if hasattr(value, "item") else value


def _make_heading(table: Table, part: TablePart, is_only: bool) -> str:
    """Return the part's heading, after the table's title if there are several parts or it names a statistic."""
    if not part.title:
        return table.title
    return part.title if is_only and "statistic" not in table.group else f"{table.title}: {part.title}"


def _format_markdown(tables: Sequence[Table], by: By, subset: str) -> str:
    blocks = []
    for table in tables:
        blocks += [f"## {table.name}\n"] if len(tables) > 1 else []
        for part in table.parts(by, subset):
            # Only text is escaped: numbers with intervals have no meaning in Markdown.
            cells = [
                [escape_markdown(c.text(r)) if c.kind == TEXT else c.text(r) for c in part.columns] for r in part.rows
            ]
            headings = [escape_markdown(c.heading) for c in part.columns]
            text = markdown_table(headings, cells, [c.right for c in part.columns])
            notes = "".join(f"\n- {escape_markdown(note)}" for note in part.notes)
            heading = escape_markdown(_make_heading(table, part, len(tables) == 1))
            blocks.append(f"### {heading}\n\n{text}" + (notes + "\n" if notes else ""))
    return "\n".join(blocks)


def _format_page(tables: Sequence[Table], by: By = (), subset: str = "", sentences: Sequence[str] = ()) -> str:
    body = make_parts(tables, by, subset) + make_list(sentences)
    return make_page(tables[0].title if tables else "", body, heading=False) + "\n"


def make_page(title: str, body: str, *, heading: bool = True, graph: str = "") -> str:
    """Return a page in the report's style around an HTML body, with a row filter for its tables.

    `heading` shows the title; `graph` holds the scripts of graphs in the body.
    """
    from markupsafe import Markup

    title_html = f"<h1>{html.escape(title)}</h1>\n" * heading
    content = Markup(f"<section>{title_html}{body}</section>")
    return render_page("base.html.j2", title=title or "Dyno", content=content, graph=graph)


def render_page(template: str, *, graph: str, **values: Any) -> str:
    """Render a page template with style and scripts, including the graph scripts."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FunctionLoader(_file_of_page), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    style, script, zoom = map(_file_of_page, ("page.css", "page.js", "svg-pan-zoom.min.js"))
    return environment.get_template(template).render(
        **values, style=Markup(style), script=Markup(script), zoom=Markup(zoom), graph=Markup(graph)
    )


def _file_of_page(name: str) -> str:
    from importlib import resources

    return (resources.files("dyno.report") / "page" / name).read_text(encoding="utf-8")


def make_list(sentences: Sequence[str]) -> str:
    """Return sentences as an HTML list, "" without any."""
    items = "".join(f"<li>{html.escape(sentence)}</li>\n" for sentence in sentences)
    return f"<ul>\n{items}</ul>\n" if items else ""


def make_parts(tables: Sequence[Table], by: By = (), subset: str = "") -> str:
    """Return the tables as HTML for embedding in a page."""
    return "\n".join(page_part(table, part) for table in tables for part in table.parts(by, subset))


def page_part(table: Table, part: TablePart, heading: str = "h3") -> str:
    """Return one part as HTML, with the sort key of each cell; everything is escaped.

    Columns omitted on a narrow terminal are `minor`; a page can hide them on a narrow screen. Columns beyond the
    table's limit are hidden until the reader selects them.
    """
    columns = part.columns
    hidden = [c for c in columns if c not in _choose_columns(part, MAX_LINE_LENGTH, table.max_columns)]
    heads = "".join(
        f'<th scope="col"{_format_classes(c)}{" hidden" * (c in hidden)} title="{html.escape(c.meaning)}">'
        f'<button type="button">{html.escape(c.heading)}</button></th>'
        for c in columns
    )
    rows = "\n".join(
        f"<tr{' class=first' * bool(r.get(FIRST_KEY))}>"
        f"{''.join(_html_cell(c, r, c in hidden, r.get(LINK_KEY, '') * (c is columns[0])) for c in columns)}</tr>"
        for r in part.rows
    )
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in part.notes)
    title = f"<{heading}>{html.escape(_make_heading(table, part, is_only=False))}</{heading}>\n" if heading else ""
    return (
        f'<div class="table">{title}<div class="box"><table class="sortable">\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>\n{notes}</div>\n"
    )


def _format_classes(column: Column, text: str = "") -> str:
    """Return CSS classes; long lists of words are folded to keep later columns on the page."""
    is_folded = column.kind == TEXT and len(text) > 2 * MAX_NAME_WIDTH and " " in text
    classes = " ".join(["n"] * column.right + ["minor"] * (column.rank > 0) + ["wide"] * is_folded)
    return f' class="{classes}"' if classes else ""


def _html_cell(column: Column, row: Row, is_hidden: bool, link: str = "") -> str:
    key = html.escape(str(_fill_missing(row.get(column.name))))
    text = column.text(row)
    content = f'<a href="{html.escape(link)}">{html.escape(text)}</a>' if link else html.escape(text)
    return f'<td{_format_classes(column, text)}{" hidden" * is_hidden} data-v="{key}">{content}</td>'


def _format_text(tables: Sequence[Table], by: By, subset: str) -> str:
    return "\n".join(text for table in tables for text in _text_parts(table, by, subset, len(tables) == 1))


def _text_parts(table: Table, by: By, subset: str, is_only: bool) -> Iterator[str]:
    """Yield the table's parts as text; the last part's note tells how to see omitted columns."""
    width, max_columns = formatting.find_width(), 0 if subset else table.max_columns
    width = min(width, PIPED_WIDTH) if max_columns else width
    parts, hidden_headings = [*table.parts(by, subset)], dict[str, None]()
    for index, part in enumerate(parts, 1):
        columns = part.columns if subset else _choose_columns(part, width, max_columns)
        hidden_headings |= dict.fromkeys(clean_text(c.heading) for c in part.columns if c not in columns)
        notes = [*part.notes]
        if index == len(parts) and hidden_headings:
            hint = MORE_COLUMNS if max_columns else f"not shown at this width: {', '.join(hidden_headings)}"
            notes[len(notes) - bool(table.notes) :] = [
                "; ".join([*(note.rstrip(".") for note in table.notes[-1:]), hint])
            ]
        yield _text_part(_make_heading(table, part, is_only), replace(part, columns=columns, notes=notes), width)


def _choose_columns(part: TablePart, width: int, max_columns: int) -> list[Column]:
    """Return the columns that fit, at most `max_columns` (0: any number); the least important are dropped first."""
    columns, max_length = list(part.columns), MAX_NAME_WIDTH if width < MAX_LINE_LENGTH else MAX_LINE_LENGTH
    widths = {}
    for c in columns:
        texts = [clean_text(c.heading), *(_shorten_cell(c, r, max_length) for r in part.rows)]
        limit = max_length if c.kind == TEXT else MAX_LINE_LENGTH  # text can be folded
        widths[c.name] = min(max(map(_count_cells, texts)), limit)
    while any(c.rank for c in columns) and (
        sum(widths[c.name] + COLUMN_GAP for c in columns) - COLUMN_GAP > width
        or (max_columns and len(columns) > max_columns)
    ):
        columns.remove(max(reversed(columns), key=lambda c: c.rank))
    return columns


def _text_part(title: str, part: TablePart, width: int) -> str:
    """Return the part as text; if it is too wide, cells are folded between words, or each row becomes a list."""
    max_length, columns = MAX_NAME_WIDTH if width < MAX_LINE_LENGTH else MAX_LINE_LENGTH, part.columns
    cells = [[clean_text(c.heading), *(_shorten_cell(c, r, max_length) for r in part.rows)] for c in columns]
    notes = [
        textwrap.fill(clean_text(note), width, initial_indent="  ", subsequent_indent="    ") for note in part.notes
    ]
    widths = _choose_widths(cells, width - COLUMN_GAP * (len(columns) - 1))
    if not widths:
        lists = [_format_list(cells, i + 1, bool(r.get(FIRST_KEY))) for i, r in enumerate(part.rows)]
        return "\n".join([title, "─" * width, *lists, "─" * width, *notes]) + "\n"
    head, *rows = (
        _format_row([texts[i] for texts in cells], widths, [c.right for c in columns])
        for i in range(len(part.rows) + 1)
    )
    rows = [formatting.format_bold(text) if r.get(FIRST_KEY) else text for text, r in zip(rows, part.rows, strict=True)]
    rule = "─" * (sum(widths) + COLUMN_GAP * (len(columns) - 1))
    return "\n".join([title, rule, head, rule, *rows, rule, *notes]) + "\n"


def _shorten_cell(column: Column, row: Row, max_length: int) -> str:
    """Return the cell on one line; names, which have any length, are cut."""
    return shorten_text(column.text(row), max_length if column.identity else MAX_LINE_LENGTH)


def _choose_widths(columns: Sequence[list[str]], total: int) -> list[int]:
    """Return each column's width, at least its longest word; columns that lack least get spare space first.

    Words longer than a third of the width are broken. Empty if the columns don't fit even then.
    """
    full_widths = [max(map(_count_cells, texts)) for texts in columns]
    if sum(full_widths) <= total:
        return full_widths
    widths = [max((_count_cells(word) for text in texts for word in text.split()), default=1) for texts in columns]
    if sum(min(width, max(1, total // WORD_BREAK_DIVISOR)) for width in widths) > total:
        return []
    while sum(widths) > total:
        widths[widths.index(max(widths))] -= 1
    for index in sorted(range(len(widths)), key=lambda i: full_widths[i] - widths[i]):
        widths[index] += max(0, min(full_widths[index] - widths[index], total - sum(widths)))
    return widths


def _format_row(texts: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    """Return a table row: one line, or several if cells are folded."""
    cells = [_fold_text(text, width) for text, width in zip(texts, widths, strict=True)]
    height = max(map(len, cells), default=1)
    columns = [[*lines, *[""] * (height - len(lines))] for lines in cells]
    return "\n".join(
        (" " * COLUMN_GAP).join(map(_pad_text, [lines[i] for lines in columns], widths, right)).rstrip()
        for i in range(height)
    )


def _format_list(columns: Sequence[list[str]], index: int, is_first: bool) -> str:
    """Return row `index` as lines of `heading: cell`, without empty cells; row 0 is the header."""
    name, *rest = [f"{texts[0]}: {texts[index]}" for texts in columns if texts[index]] or [""]
    name = formatting.wrap_text(name)
    return "\n".join(
        [formatting.format_bold(name) if is_first else name, *(formatting.wrap_text(f"  {each}") for each in rest)]
    )


def _fold_text(text: str, width: int) -> list[str]:
    if _count_cells(text) <= width:
        return [text]
    from rich.console import Console
    from rich.text import Text

    return [line.plain.rstrip() for line in Text(text).wrap(Console(width=width), width, overflow="fold")]


def _count_cells(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _pad_text(text: str, width: int, right: bool) -> str:
    gap = " " * (width - _count_cells(text))
    return gap + text if right else text + gap


FORMATS: dict[str, Callable[[Sequence[Table], By, str], str]] = {
    "text": _format_text, "markdown": _format_markdown, "csv": _format_csv,
    "json": lambda tables, *_: _format_json(tables, {}),
    "html": _format_page,
}  # fmt: skip


# Chrome's trace event format, which Perfetto opens.
#
# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

Event = dict[str, Any]


def trace_document(events: Iterable[Event], exporter: str, note: str) -> dict[str, Any]:
    """Return the whole trace file; `note` explains how times were measured."""
    return {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": {"exporter": exporter, "note": note}}


def process_event(pid: int, name: str) -> Iterator[Event]:
    """Yield a process's name, and its position among the processes."""
    thread = {"pid": pid, "tid": 1}
    yield {"ph": "M", "name": "process_name", **thread, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", **thread, "args": {"sort_index": pid}}


def track_event(pid: int, tid: int, name: str) -> Event:
    """Return the event that names a track of a process."""
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
