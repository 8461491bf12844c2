"""Make the tables of benchmarks/results from the CSV files in its folder data, so that a figure stands in one place.

python tools/measured.py                             # write the tables into the pages
python tools/measured.py --check                     # exit code 1 where a page isn't what the files say
python tools/measured.py --add FILE.csv --machine b  # replace networks' rows by those of benchmarks/matrix.py

The rows of data/NAME.csv follow `<!-- table NAME key=value … -->` in a page, and the commands of all its tables follow
`<!-- runs -->`; the text up to `<!-- end -->` is generated. Without keys a table is the whole file.
`rows=a,b columns=c,d cell=e` pivots: values of c and d become columns (`_` in e is a space). `where=a:x` keeps the rows
with a equal to x. The column `run` names rows of data/runs.csv: machine, date and command.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.matrix import networks

from dyno.formatting import format_number, markdown_table

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, str]
MATRIX = "matrix-cpu"
MAX_WORDS = 1200  # words of a page beside tables and code
BLOCK = re.compile(r"(<!-- (table [^>]*|runs) -->\n).*?(<!-- end -->)", re.S)
NUMBER = re.compile(r"(\*\*)?[-+]?[\d,.]+(e-?\d+)?( ?(x|s|ms|%))?\*{0,2}")


class Book:
    """The pages of one folder and the data files of their tables."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read: dict[str, list[Row]] = {}

    def rows(self, name: str) -> list[Row]:
        """Return the rows of data/NAME.csv."""
        if name not in self.read:
            with (self.folder / "data" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
                self.read[name] = list(csv.DictReader(file))
        return self.read[name]

    def pages(self) -> list[Path]:
        """Return every page with generated parts."""
        return sorted(self.folder.glob("*.md"))

    def page(self, path: Path) -> str:
        """Return the page's text with its tables regenerated."""
        text = path.read_text(encoding="utf-8")
        used = [run for _, spec, _ in BLOCK.findall(text) if spec != "runs" for run in self.runs_of(spec)]
        return BLOCK.sub(lambda m: f"{m[1]}\n{self.block(m[2], used)}\n\n{m[3]}", text)

    def block(self, spec: str, used: list[str]) -> str:
        """Return the text of one marker; `used` are the page's runs."""
        if spec == "runs":
            return self.commands(used)
        _, name, *options = spec.split()
        keys = dict(option.split("=", 1) for option in options)
        rows = self.chosen(name, keys)
        if name == MATRIX:
            return self.matrix(rows) if keys.get("as") != "summary" else summary(rows)
        if "cell" in keys:
            table = pivot(rows, keys["rows"].split(","), keys["columns"].split(","), keys["cell"].replace("_", " "))
            return f"{table}\n\n{run_line(self.runs_of(spec))}"
        if "run" in rows[0] and len({row["run"] for row in rows}) == 1:
            table = plain([{k: v for k, v in row.items() if k != "run"} for row in rows])
            return f"{table}\n\n{run_line(self.runs_of(spec))}"
        return plain(rows)

    def chosen(self, name: str, keys: Row) -> list[Row]:
        """Return the rows of a file that `where` selects."""
        column, _, value = keys.get("where", "").partition(":")
        return [row for row in self.rows(name) if not column or row[column] == value]

    def runs_of(self, spec: str) -> list[str]:
        """Return the runs behind a table's figures, each once."""
        _, name, *options = spec.split()
        rows = self.chosen(name, dict(option.split("=", 1) for option in options))
        names = [f"matrix-{row['machine']}" if name == MATRIX else row.get("run", "") for row in rows]
        return list(dict.fromkeys(one for names_ in names for one in names_.split()))

    def commands(self, used: list[str]) -> str:
        """Return the runs' machines in words, then each run's machine, date and command."""
        known = {row["run"]: row for row in self.rows("runs")}
        machines = {row["machine"]: row["what it is"] for row in self.rows("machines")}
        runs = [known[name] for name in dict.fromkeys(used) if name in known]
        lines = [f"- **{one}**: {machines[one]}" for one in dict.fromkeys(row["machine"] for row in runs)]
        for row in runs:
            what = f" ({row['note']})" if row["note"] else ""
            lines += ["", f"`{row['run']}`, {row['machine']}, {row['date']}{what}:", ""]
            lines += [f"    {line}" for line in row["command"].splitlines()]
        return "\n".join(lines)

    def matrix(self, rows: list[Row]) -> str:
        """Return a line per network with a column per backend and precision, then the problems with their reasons."""
        ways = ways_of(rows)
        notes = self.rows(f"{MATRIX}-notes")
        lines: dict[str, list[str]] = {}
        for row in rows:
            label = row["model"] + ("†" if any(is_older(row, note) for note in notes) else "")
            own = lines.setdefault(row["model"], [label, row["machine"], row["date"], *[""] * len(ways)])
            for index, way in enumerate(ways):
                if way == way_of(row) or not row["backend"]:
                    own[3 + index] = cell(row)
        table = markdown_table(["network", "machine", "date", *ways], list(lines.values()), [False] * (3 + len(ways)))
        bad = [row for row in rows if outcome(row) not in ("right", "reference", "skipped")]
        marks = [f"† {note['note']}" for note in notes if note["before"] and any(is_older(row, note) for row in rows)]
        missing = ", ".join(name for name in networks() if name not in {row["network"] for row in rows}) or "none"
        parts = [
            table.rstrip(),
            "",
            *dict.fromkeys(marks),
            "",
            "Wrong, failed or not compared:",
            "",
            *reasons(bad, notes),
        ]
        return "\n".join([*parts, "", f"Of the list in benchmarks/matrix.py not run yet: {missing}."])

    def add(self, path: Path, machine: str, date: str, without: list[str]) -> None:
        """Replace the rows of the networks in a matrix.csv by its rows."""
        with path.open(newline="", encoding="utf-8") as file:
            new = [{"machine": machine, "date": date, **row} for row in csv.DictReader(file)]
        new = [row for row in new if row["model"] not in without]
        names, fields = {row["network"] for row in new}, list(self.rows(MATRIX)[0])
        rows = [row for row in self.rows(MATRIX) if row["network"] not in names] + new
        rows.sort(key=lambda row: row["network"])
        self.read[MATRIX] = rows
        with (self.folder / "data" / f"{MATRIX}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fields, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def problems(self) -> Iterator[str]:
        """Yield outdated or overlong pages, figures without a command, and unused files."""
        used: set[str] = set()
        runs: set[str] = {f"matrix-{row['machine']}" for row in self.rows(MATRIX)}
        known = {row["run"]: row for row in self.rows("runs")}
        machines = {row["machine"] for row in self.rows("machines")}
        for path in self.pages():
            text = path.read_text(encoding="utf-8")
            used |= {spec.split()[1] for _, spec, _ in BLOCK.findall(text) if spec != "runs"}
            changed = list(difflib.unified_diff(text.splitlines(), self.page(path).splitlines(), lineterm="", n=0))
            if changed:
                yield f"{path.name} isn't what its files say (run python tools/measured.py): {changed[3]}"
            if (count := len(own_text(text).split())) > MAX_WORDS:
                yield f"{path.name} has {count} words beside tables and code, {MAX_WORDS} are enough"
        for path in sorted((self.folder / "data").glob("*.csv")):
            if path.stem in ("runs", "machines", f"{MATRIX}-notes"):
                continue
            if path.stem not in used:
                yield f"no page has a table of {path.name}"
            for number, row in enumerate(self.rows(path.stem), 2):
                if None in row or None in row.values():
                    yield f"{path.name}, line {number} has more or fewer cells than the first line"
                elif path.stem != MATRIX and not row.get("where") and not row.get("run"):
                    yield f"{path.name}, line {number} names no run"
                runs |= set((row.get("run") or "").split())
        yield from (f"runs.csv has no run {name}" for name in sorted(runs - set(known)))
        yield from (f"no figure is of the run {name}" for name in sorted(set(known) - runs))
        for name, row in known.items():
            if not row["command"] or not re.match(r"20\d\d-\d\d-\d\d", row["date"]) or row["machine"] not in machines:
                yield f"runs.csv: {name} lacks its command, its date or a machine that machines.csv has"


def run_line(runs: list[str]) -> str:
    """Return the line under a table that names its runs."""
    return f"Run{'s' * (len(runs) > 1)}: {', '.join(f'`{one}`' for one in runs)}."


def plain(rows: list[Row]) -> str:
    """Return the rows as a table, with numbers right-aligned."""
    columns = list(rows[0])
    right = [
        column != "run" and all(NUMBER.fullmatch(row[column]) for row in rows if row[column]) for column in columns
    ]
    body = [
        [", ".join(f"`{one}`" for one in row[c].split()) if c == "run" else row[c] for c in columns] for row in rows
    ]
    return markdown_table(columns, body, right).rstrip()


def pivot(rows: list[Row], index: list[str], columns: list[str], cell: str) -> str:
    """Return a line per value of `index` and a column per value of `columns`, both in the file's order."""
    heads = list(dict.fromkeys(" ".join(row[c] for c in columns).strip() for row in rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        own = lines.setdefault(tuple(row[c] for c in index), {})
        own[" ".join(row[c] for c in columns).strip()] = row[cell]
    body = [[*key, *(own.get(head, "") for head in heads)] for key, own in lines.items()]
    return markdown_table([*index, *heads], body, [False] * len(index) + [True] * len(heads)).rstrip()


def way_of(row: Row) -> str:
    """Return the backend and precision of a row of the matrix."""
    return f"{row['backend']} {row['precision']}".strip()


def ways_of(rows: list[Row]) -> list[str]:
    """Return the backends and precisions tried with any network, in the matrix's order."""
    order = [f"{b} {p}" for b in ("pytorch", "onnxruntime", "openvino") for p in ("fp32", "fp16", "int8")]
    tried = {way_of(row) for row in rows if row["status"] != "skipped"}
    return [way for way in order if way in tried]


def outcome(row: Row) -> str:
    """Return the outcome of a row of the matrix, in a word or two."""
    if row["status"] != "ok":
        return row["status"]
    if row["outputs"] == "wrong outputs":
        return "wrong"
    if row["verdict"].startswith("not comparable"):
        return "not comparable"
    return "right" if row["outputs"] == "agree" else "reference"


def cell(row: Row) -> str:
    """Format a trial of the matrix: its time and error, or its status."""
    if row["status"] != "ok":
        return row["status"]
    error = "" if row["output_error"] in ("", "nan") else f" ({float(row['output_error']):.0e})"
    bad = "" if outcome(row) in ("right", "reference") else f"**{outcome(row)}** "
    return f"{bad}{format_number(float(row['latency_ms']))} ms{error}"


def why(row: Row) -> str:
    """Return the row's own reason, or its output error."""
    said = row["reason"] if row["status"] != "ok" else row["verdict"]
    return said or f"wrong outputs: off by {float(row['output_error']):.1g} of their size"


def is_older(row: Row, note: Row) -> bool:
    """Return whether the row is older than the day of the note."""
    return bool(note["before"]) and note["model"] == row["model"] and row["date"] < note["before"]


def cause(row: Row, notes: list[Row]) -> str:
    """Return the reason from matrix-cpu-notes.csv."""
    for note in notes:
        ways = ("", way_of(row)) if row["status"] == "ok" else (way_of(row),)
        if not note["before"] and note["model"] == row["model"] and note["way"] in ways:
            return f" ({note['note']})"
    return " (cause not looked into)" if row["status"] == "ok" else ""


def reasons(bad: list[Row], notes: list[Row]) -> Iterator[str]:
    """Yield a line for each network and cause: its rows, their messages, and the known cause."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in bad:
        said = found.setdefault((row["model"], cause(row, notes)), {})
        said.setdefault(why(row), []).append(way_of(row))
    for (model, known), said in found.items():
        parts = [f"{', '.join(ways)}: {text}" for text, ways in said.items()]
        yield f"- `{model}` {'; '.join(parts)}{known}"


def summary(rows: list[Row]) -> str:
    """Return the number of networks per outcome, by backend and precision."""
    counts = {way: Counter(outcome(row) for row in rows if way_of(row) == way) for way in ways_of(rows)}
    ends = [end for end in ("reference", "right", "wrong") if any(count[end] for count in counts.values())]
    ends += sorted({end for count in counts.values() for end in count} - set(ends))
    body = [[way, *(str(count[end] or "") for end in ends)] for way, count in counts.items()]
    return markdown_table(["", *ends], body, [False, *[True] * len(ends)]).rstrip()


def own_text(text: str) -> str:
    """Return a page's text without generated parts and code."""
    return re.sub(r"^    .*$", "", BLOCK.sub("", text), flags=re.M)


def main() -> int:
    """Write the pages, or with --check print the problems."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 where something is not as it should be"
    )
    parser.add_argument("--add", type=Path, help="a matrix.csv of benchmarks/matrix.py")
    parser.add_argument("--machine", default="", help="of --add: a (16 cores) or b (2 cores)")
    parser.add_argument(
        "--date", default=f"{datetime.now(UTC):%Y-%m-%d}", help="of --add: the day it was measured (today)"
    )
    parser.add_argument("--without", default="", help="of --add: networks to leave out, comma-separated")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results")
    asked = parser.parse_args()
    book = Book(asked.folder)
    if asked.add:
        if not any(row["run"] == f"matrix-{asked.machine}" for row in book.rows("runs")):
            parser.error(f"--machine {asked.machine!r}: data/runs.csv has no run of that name; name one as --machine a")
        book.add(asked.add, asked.machine, asked.date, asked.without.split(","))
    if not asked.check:
        for path in book.pages():
            path.write_text(book.page(path), encoding="utf-8")
    found = list(book.problems())
    print("\n".join(found), end="\n" * bool(found), file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
