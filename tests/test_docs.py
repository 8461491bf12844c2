"""The documents match the code: commands and options exist, tables are complete, examples run, links resolve."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import dyno
import pictures
import preloaded as forked
import site_pages
from dyno import Study
from dyno.cli import app
from dyno.data.data_format import DataFormat
from dyno.jobs import telemetry
from dyno.layers import files
from dyno.report import tables
from dyno.report.tables import trial_table
from dyno.results import remarks
from dyno.results.correctness import TOLERANCES
from dyno.runner import execute, run_folder
from dyno.runner import turns as conductor
from dyno.worker import main, measure, registry
from dyno.worker.backend import Backend, FileFormat, Maker, Session
from dyno.worker.facts.files import MakerFacts
from dyno.worker.facts.job import Facts
from dyno.worker.inspection import Inspection
from dyno.worker.jobs import stress, turns
from dyno.worker.record import STATUSES, Measurement, Record
from dyno.worker.spec import Artifact, DataSpec, Dims, Job, ModelSpec, Plan, Recipe, Trial
from dyno.worker.tasks import Task

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
NOTES = sorted((ROOT / "benchmarks/results").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, *NOTES]
OTHER_PROGRAMS = {"cp", "python"}
EXAMPLES = ROOT / "examples"


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def lines(block: str) -> list[list[str]]:
    """Return each command's words, without comments and leading variable assignments."""
    commands = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    return [words[next(i for i, w in enumerate(words) if "=" not in w) :] for words in commands if words]


@cache
def command(words: str) -> Any:
    """Return the command or group of that name, "" for the root; None if unknown."""
    found: Any = typer.main.get_command(app.make_app())
    for word in words.split():
        found = getattr(found, "commands", {}).get(word)
    return found


def options(words: str) -> set[str]:
    """Return a command's options; empty for an unknown command."""
    known = command(words)
    return {"--help", *(o for p in known.params for o in (*p.opts, *p.secondary_opts))} if known else set()


def commands() -> set[str]:
    """Return the commands listed by `dyno --help`."""
    return {name for name, each in command("").commands.items() if not each.hidden}


def wrong(words: list[str]) -> list[str]:
    """Return the unknown parts of a document's command line."""
    program, *rest = words
    if program == "make":
        return [target for target in rest if not re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)]
    if program != "dyno":
        return [] if program in OTHER_PROGRAMS else [program]
    if not rest or rest[0] not in commands():
        return [" ".join(words[:2])]
    if hasattr(command(rest[0]), "commands"):  # a command group
        rest = [" ".join(rest[:2]), *rest[2:]]
        if command(rest[0]) is None:
            return [f"dyno {rest[0]}"]
    asked = [word.partition("=")[0] for word in rest[1:] if re.match("--?[a-z]", word)]
    return [f"{rest[0]} {option}" for option in asked if option not in options(rest[0])]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "bash")], ids=name)
def test_commands_and_their_options_exist(page: Path) -> None:
    found = [words for block in blocks(page, "bash") for words in lines(block)]
    assert found
    assert [bad for words in found for bad in wrong(words)] == []


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("dyno runn torchvision:resnet18", ["dyno runn"]),
        ("A=1 dyno run net --bakends pytorch  # why", ["run --bakends"]),
        ("dyno show runs/x --seconds 3", ["show --seconds"]),
        ("make everything", ["everything"]),
        ("rm -rf runs", ["rm"]),
        ("dyno run net -o runs/x --batch=1 \\\n --size 64", []),
    ],
)
def test_a_wrong_command_is_detected(line: str, bad: list[str]) -> None:
    (words,) = lines(line)
    assert wrong(words) == bad


def test_every_command_is_on_a_page() -> None:
    shown = {w[1] for page in PAGES for block in blocks(page, "bash") for w in lines(block) if len(w) > 1}
    assert commands() and commands() <= shown
    pairs = {" ".join(w[1:3]) for page in PAGES for block in blocks(page, "bash") for w in lines(block)}
    below = {f"{group} {name}" for group in commands() for name in getattr(command(group), "commands", {})}
    assert below and below <= pairs


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name)
def test_python_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, name(page), "exec")


def test_python_names_exist() -> None:
    text = "\n".join(blocks(ROOT / "docs/python.md", "python"))
    used = set(re.findall(r"\bdyno\.(\w+)", text))
    assert used and used <= set(dyno.__all__)
    fields = {f.name for f in dataclasses.fields(Study)}
    asked = re.search(r"dyno\.Study\((.*?)\n\)", text, re.S)
    assert asked and set(re.findall(r"^    (\w+)=", asked[1], re.M)) <= fields
    columns = {c for names in re.findall(r"table?\[\[?([^\]]*)\]", text) for c in re.findall(r'"(\w+)"', names)}
    assert columns and columns <= {column.name for column in trial_table.COLUMNS}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "toml")], ids=name)
def test_study_files_are_valid(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "toml"):
        path = tmp_path / "study.toml"
        path.write_text(block, encoding="utf-8")
        assert Study.from_toml(path).models


def test_every_key_of_a_study_is_described() -> None:
    text = site_pages.study()
    assert first_cells(text) == {f.name for f in dataclasses.fields(Study)}
    flags = set(re.findall(r"`(--[a-z-]+)`", text))
    assert flags and flags <= options("run")
    assert "|  |\n" not in text, "every key has a meaning"


def test_every_column_and_table_is_described() -> None:
    text = site_pages.columns()
    table_part, _, column_part = text.partition("## results.csv")
    assert first_cells(column_part) == {column.name for column in trial_table.COLUMNS}
    assert re.findall(r"^\| `([\w-]+)` \|", table_part, re.M) == [kind.name for kind in tables.list_kinds()]
    assert [kind.name for kind in tables.list_kinds() if not kind.description] == []
    assert [column.name for column in trial_table.COLUMNS if not column.meaning] == []


def test_every_repeatable_setting_is_marked() -> None:
    rows = [[cell.strip(" `") for cell in line.split(" | ")] for line in site_pages.study().splitlines()]
    assert {row[0].strip("| `") for row in rows if row[3:4] == ["yes"]} == set(run_folder.REPEATABLE_SETTINGS)


def test_every_folder_of_the_cache_is_described() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    folders = set(re.findall(r'cache_dir\(\)\)? / "([\w-]+)"', source))
    rows = re.findall(r"^\| (`[^|]+)", section("docs/file-format.md", "The cache"), re.M)
    described = set(re.findall(r"`([\w-]+)/", " ".join(rows)))
    assert len(folders) > 8 and folders <= described


def test_every_kind_of_job_is_described() -> None:
    assert {"run", *main.OTHER_JOBS} <= set(re.findall(r"`(\w+)`", below(site_pages.records(), "Job")))


@pytest.mark.parametrize(
    "kind",
    [Job, Trial, Recipe, Artifact, ModelSpec, DataSpec, Dims, Plan, Record, Measurement, Facts, MakerFacts, Inspection],
)
def test_every_field_of_a_job_and_a_record_is_described(kind: type) -> None:
    text = below(site_pages.records(), kind.__name__)
    assert text.lstrip()[:1].isalpha(), "its docstring comes first"
    assert first_cells(text) == {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]


def test_documented_tolerances_match_the_code() -> None:
    text = section("docs/accuracy.md", "Is the output right?")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| `"]
    told = {name: tuple(cells) for first, *cells in rows for name in re.findall(r"`(\w+)`", first)}
    assert told == {
        name: (f"{t.close:g}", f"{t.limit:g}", f"{100 * t.changed:g} %", f"{100 * t.labels:g} %", shares(t.quantile))
        for name, t in TOLERANCES.items()
    }


def test_documented_timing_figures_match_the_code() -> None:
    words = {2: "two", 3: "three", 4: "four", 10: "ten"}
    text = (ROOT / "docs/timing.md").read_text(encoding="utf-8")
    for figure in (
        f"over a window of {measure.RATE_WINDOW_S:g} s",
        f"agree to {100 * measure.STEADY_CHANGE:g} %",
        f"at least {measure.MIN_SAMPLES} samples",
        f"at least {words[turns.MIN_BLOCKS]} blocks",
        f"Up to {words[measure.DISCARDED]} short runs",
        f"at least {conductor.HEADROOM:g} times what the largest process took",
        f"without a file after {execute.FIRST_ANSWER_AFTER_S:g} s",
        f"differ by more than {100 * remarks.MIN_GAP_SHARE:g} % and {1e6 * remarks.MIN_GAP_S:g} µs",
        f"{words[round(1 / telemetry.GPU_PERIOD_S)]} times a second",
        f"by more than {stress.MAX_GROWTH_B / 2**20:g} MiB after {stress.WARM_UP} runs",
    ):
        assert figure in text, figure


def shares(share: float) -> str:
    return "all" if share == 1 else f"{share:.0%}".replace("%", " %")


def test_every_status_is_described() -> None:
    assert set(STATUSES) <= first_cells(section("docs/file-format.md", "Statuses and exit codes"))


@cache
def option_tables() -> list[tuple[set[str], dict[str, str]]]:
    """Return backends and their option rows, from the sections of backends.md with backend names in the title."""
    parts = section("docs/backends.md", "Options").split("\n### ")[1:]
    rows = {part: {row.split("`")[1]: row for row in part.splitlines() if row.startswith("| `")} for part in parts}
    return [(set(re.findall(r"`(\w+)`", part.partition("\n")[0])), options) for part, options in rows.items()]


@pytest.mark.parametrize("backend_name", registry.list_backends())
def test_every_backend_is_in_the_matrix(backend_name: str) -> None:
    engine = registry.find(backend_name)
    described = {option for names, rows in option_tables() if engine.name in names for option in rows}
    assert set(engine.options) == described
    words = section("docs/backends.md", "The matrix")
    (row,) = [line for line in words.splitlines() if line.startswith(f"| `{engine.name}` |")]
    if engine.name != "compile":  # says "as pytorch"
        assert [p for p in engine.precisions if p not in row] == []


def test_every_layer_file_kind_is_described() -> None:
    rows = re.findall(r"^\| (`\..*?) \|", (ROOT / "docs/layer-files.md").read_text(encoding="utf-8"), re.M)
    assert {ending for row in rows for ending in re.findall(r"`(.*?)`", row)} == set(files.FILE_KINDS)


def test_documented_option_ranges_match_the_code() -> None:
    found = 0
    for names, rows in option_tables():
        for option, row in rows.items():
            if not (ends := re.match(r"\| `\w+` \| (\d+) to (\d+) \|", row)):
                continue
            low, high = int(ends[1]), int(ends[2])
            for backend in names:
                check = registry.find(backend).values[option]
                assert not check(low) and not check(high), row
                assert check(low - 1) and check(high + 1), row
                found += 1
    assert found > 8


def section(page: str, title: str) -> str:
    """Return the text of a page's second-level section."""
    return below((ROOT / page).read_text(encoding="utf-8"), title)


def below(text: str, title: str) -> str:
    """Return the text between a second-level heading and the next one."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"no section {title}"
    return found[1]


def first_cells(text: str) -> set[str]:
    """Return the names in the first cells of a section's tables."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {found for cell in rows for found in re.findall(r"`(\w+)`", cell)}


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def links(page: Path) -> Iterator[str]:
    """Yield the page's local link and image targets."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    yield from (t for t in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", t))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} is not there"
        assert there.is_relative_to(ROOT), f"{target} leads out of the repository"
        if anchor:
            headings = re.findall(r"(?:\A|\n\n)#+ (.*)$", there.read_text(encoding="utf-8"), re.M)
            assert anchor in map(slug, headings), f"{target}: no such heading"


def test_the_code_on_extending_comes_from_the_example() -> None:
    """Every code line stands in the plug-in, which tests/test_plugin.py installs and uses."""
    files = [*(EXAMPLES / "plugin").rglob("*.py"), EXAMPLES / "plugin/pyproject.toml"]
    known = {line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()}
    shown = [block for kind in ("python", "ini") for block in blocks(ROOT / "docs/extending.md", kind)]
    assert shown
    assert sorted({line.strip() for block in shown for line in block.splitlines()} - known - {"..."}) == []


@pytest.mark.parametrize("kind", [Backend, Session, Maker, FileFormat, DataFormat, Task])
def test_every_member_of_an_extension_is_described(kind: type) -> None:
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    members = {name for name in vars(kind) if not name.startswith("_")}
    assert sorted(name for name in members if not re.search(rf"\b{name}\b", text)) == []


def test_paths_on_the_architecture_page_exist() -> None:
    text = section("docs/architecture.md", "Where is it decided …")
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / "src/dyno" / path).exists()] == []


def test_the_verdict_picture_shows_the_lines_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    drawn = pictures.draw_verdict(readme)
    assert drawn == (ROOT / "docs/images/verdict.svg").read_text(encoding="utf-8"), "run python tools/pictures.py"
    assert drawn.count('class="label"') > 12 and "docs/images/verdict.svg" in readme
    with pytest.raises(ValueError, match="has no '73\\.4 µs"):
        pictures.draw_verdict(readme.replace("12.12x [11.92, 12.32] as", "13x as"))


def measured(*words: str) -> subprocess.CompletedProcess[str]:
    return python(str(ROOT / "tools/measured.py"), *words, cwd=ROOT)


def test_measured_tables_match_their_files() -> None:
    done = measured("--check")
    assert done.returncode == 0, done.stderr


def test_figures_come_from_files_and_have_a_command(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "benchmarks/results", tmp_path / "results")
    where = ("--folder", str(folder))
    page = folder / "two-cores.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace(" 17.3 |", " 16.3 |"), encoding="utf-8")
    assert "two-cores.md" in measured("--check", *where).stderr
    assert measured(*where).returncode == 0
    assert page.read_text(encoding="utf-8") == text
    figures = folder / "data/two-core-resnet18.csv"
    figures.write_text(figures.read_text(encoding="utf-8").replace(",r18-cpu", ",another-run"), encoding="utf-8")
    done = measured(*where)
    assert done.returncode == 1 and "another-run" in done.stderr


def test_new_matrix_rows_replace_earlier_ones(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "benchmarks/results", tmp_path / "results")
    rows = tmp_path / "matrix.csv"
    head = "network,model,backend,options,precision,status,outputs,output_error,answers_changed,ran_as,route,latency_ms"
    new = [
        "torchvision:resnet18,resnet18,pytorch,,fp32,ok,,nan,nan,21 fp32,,98.7654,reference,",
        "torchvision:resnet18,resnet18,openvino,,int8,ok,wrong outputs,0.9,nan,21 int8,,4.3,wrong outputs: off by 0.9,",
        "torchvision:resnet50,resnet50,pytorch,,fp32,ok,,nan,nan,54 fp32,,1234,reference,",
    ]
    rows.write_text("\n".join([f"{head},verdict,reason", *new]) + "\n", encoding="utf-8")
    words = ("--add", str(rows), "--date", "2026-12-01", "--without", "resnet50", "--folder", str(folder))
    assert measured(*words, "--machine", "nowhere").returncode == 2
    done = measured(*words, "--machine", "b")
    assert done.returncode == 0, done.stderr
    page = (folder / "matrix-cpu.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("| resnet18 ")]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2:5] == ["b", "2026-12-01", "98.8 ms"] and "wrong" in cells[-2]
    assert "`resnet18` openvino int8: wrong outputs: off by 0.9" in page and "1,230 ms" not in page


def test_the_python_example_runs(preloaded: str, tmp_path: Path) -> None:
    short = (
        "import dyno; study = dyno.Study; dyno.Study = lambda **asked: study(**asked | dict(seconds=0.05, warmup=0.02))"
    )
    start = f"{short}; import runpy; runpy.run_path({str(EXAMPLES / 'compare_backends.py')!r}, run_name='__main__')"
    done = forked.command(preloaded, [], tmp_path, os.environ, 1200, ("-c", start))
    assert done.returncode == 0, done.stderr
    assert "reference" in done.stdout and "samples, fastest" in done.stdout
    assert (tmp_path / "runs/example/report.html").is_file()


def python(*words: str, cwd: Path, path: Path = EXAMPLES) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=cwd, env=environment, timeout=1200
    )
