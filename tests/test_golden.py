"""A stored run folder read by today's code: its printed results change only on purpose.

After a deliberate change, `tests/golden/make.py --expected` rewrites the expected files.
"""

import csv
import importlib.util
import io
import json
import math
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dyno.report.export import FORMATS, export
from dyno.report.tables import trial_table
from dyno.report.tables.trial_table import TRIALS
from dyno.report.verdict import verdict
from dyno.report.verdict.verdict import describe_run
from dyno.results.run_data import RunData
from dyno.results.trial_result import Results
from dyno.worker.record import STATUSES, Record, read_record, to_json
from dyno.worker.spec import SCHEMA, Job, from_json

GOLDEN = Path(__file__).parent / "golden"
RUN = GOLDEN / "run"
DOCS = Path(__file__).resolve().parents[1] / "docs"
# The last bits of sums, logarithms and distribution functions depend on processor and library.
RELATIVE = 1e-9
SAID = re.compile(r"(?i)schema\W{1,6}(?:(?:number|version|is|now|today)\W{1,6})*(\d+)\b")


@pytest.fixture(scope="module")
def run() -> RunData:
    return trial_table.read_trials(RUN)


@pytest.fixture(scope="module")
def results(run: RunData) -> Results:
    return run.records


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def same(found: Any, expected: Any) -> bool:
    """Compare as text, or as numbers up to rounding."""
    close = math.isclose(number(str(found)), number(str(expected)), rel_tol=RELATIVE)
    return bool(str(found) == str(expected) or close)


def differences(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    """Assert equal table shape; return every cell that differs from the stored one."""
    assert [list(row) for row in found] == [list(row) for row in expected]
    pairs = [(f, e) for f, e in zip(found, expected, strict=True)]
    return [f"{f['trial']} {k}: {f[k]!r}, not {e[k]!r}" for f, e in pairs for k in e if not same(f[k], e[k])]


def rows(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text)))


def json_rows(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["tables"]["trials"]["rows"]
    return found


def test_speed_ups_are_the_ratio_of_their_medians(run: RunData) -> None:
    frame = run.frame.set_index(["backend", "precision", "options"])
    medians = frame["latency_model_ms_median"]
    for way in (("onnxruntime", "fp32", ""), ("onnxruntime", "int8", "")):
        assert frame["speedup"][way] == pytest.approx(medians["pytorch", "fp32", ""] / medians[way])


def test_the_markdown_table_is_the_stored_one(make: ModuleType) -> None:
    found = make.printed()["results.md"]
    assert found == (GOLDEN / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "read"), [("results.csv", rows), ("results.json", json_rows)])
def test_machine_readable_tables_match_the_stored_ones(make: ModuleType, name: str, read: Any) -> None:
    found = make.printed()[name]
    assert differences(read(found), read((GOLDEN / name).read_text(encoding="utf-8"))) == []


def test_changed_numbers_are_detected() -> None:
    stored = rows((GOLDEN / "results.csv").read_text(encoding="utf-8"))
    changed = [dict(row) for row in stored]
    changed[0]["latency_ms"] = str(float(stored[0]["latency_ms"]) * (1 + 1e-6))
    changed[1]["status"] = "ok"
    assert len(differences(changed, stored)) == 2


def test_the_golden_run_has_every_kind_of_row(run: RunData, results: Results) -> None:
    """Guards the tests above against missing cases."""
    assert {t.status for t in results} == {"ok", "skipped", "crashed"}
    assert {"pytorch", "onnxruntime", "fake"} == {t.backend for t in results}
    assert {t.precision for t in results if t.good} == {"fp32", "int8"}
    assert results.problems == []
    assert results.settings["budget"] == {"top1": 5.0}
    assert {*STATUSES} > {t.status for t in results}
    frame = run.frame
    for column in ("speedup_low", "top1_diff_low", "build_s", "throughput_ips", "budget", "size_mb"):
        assert (frame[column].notna() & (frame[column] != "")).any(), column


def test_ids_are_still_the_hash_of_the_trial(results: Results) -> None:
    """Otherwise an older study would be measured again instead of resumed."""
    asked = [t.spec for t in results]
    assert [trial and trial.id for trial in asked] == [t.id for t in results]


def holds(whole: Any, part: Any) -> bool:
    """Return whether `whole` contains everything in `part`; added fields are allowed."""
    if isinstance(part, dict):
        return all(key in whole and holds(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(holds(a, b) for a, b in zip(whole, part, strict=True))
    return bool(whole == part)


def renamed(stored: Any) -> Any:
    """Return the stored value with today's names of renamed fields."""
    names = {"others_bearable": "contention_threshold", "asked": "requested"}
    if isinstance(stored, dict):
        return {names.get(key, key): renamed(value) for key, value in stored.items()}
    return [renamed(value) for value in stored] if isinstance(stored, list) else stored


def test_records_and_jobs_are_read_without_loss(results: Results) -> None:
    stored = sorted(RUN.glob("trials/*/r*"))
    assert len(stored) >= 8
    for folder in stored:
        raw, job = (renamed(json.loads((folder / name).read_text())) for name in ("record.json", "job.json"))
        record = read_record(folder)
        assert isinstance(record, Record)
        assert json.loads(json.dumps(to_json(record))) == raw
        assert holds(json.loads(json.dumps(to_json(from_json(Job, job)))), job)
        assert raw["schema"] == job["schema"] == SCHEMA


def test_records_of_a_newer_schema_are_reported_in_one_line(tmp_path: Path, dyno: Any) -> None:
    copy = Path(shutil.copytree(RUN, tmp_path / "run"))
    path = next(iter(sorted(copy.glob("trials/*/r1/record.json"))))
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": SCHEMA + 1, "unheard": "of"}))
    done = dyno("show", copy, code=0)
    assert done.stdout.count("fp32") >= 3
    assert done.stderr.splitlines() == [
        f"dyno: {path} was written by a newer Dyno (schema {SCHEMA + 1}, this one reads {SCHEMA}); update Dyno"
    ]


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("format", FORMATS)
def test_the_command_prints_what_the_library_renders(run: RunData, dyno: Any, format: str) -> None:
    done = dyno("show", RUN, "--format", format)
    assert (done.returncode, done.stderr) == (0, "")
    found = describe_run(run) if format == "json" else {}
    tables, said = export([TRIALS.table(run)], format, head=found), verdict.read_verdict(run).lines
    told = done.stdout.removeprefix(tables)
    assert told != done.stdout
    plain = told.replace("\\[", "[").replace("\\]", "]")  # Markdown escapes the brackets of an interval
    lines = [re.sub("^( *)- ", r"\1", line) for line in plain.split("\n") if line]
    assert lines == (said if format in ("text", "markdown") else [])


def test_stored_files_contain_no_absolute_paths() -> None:
    texts = [path for path in GOLDEN.rglob("*") if path.suffix in (".json", ".toml", ".csv", ".md")]
    assert len(texts) > 20
    found = [(str(path), m.group()) for path in texts if (m := re.search(r'"(/|[A-Z]:\\)[^"]*"', path.read_text()))]
    assert found == []
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 300_000


def test_machine_details_are_scrubbed(make: ModuleType) -> None:
    stored = {"folder": "/some/where/data", "list": ["/a/b", "c/d"], "os": "Linux 6", "number": 3, "source": "file:x"}
    assert make.scrubbed(stored) == {"folder": "data", "list": ["b", "c/d"], "number": 3, "source": "file:x"}


@pytest.mark.parametrize(
    "text", ["schema 7", '"schema": 7,', "`schema` is `7`", "Schema number: **7**", "schema (now 7)"]
)
def test_a_schema_number_is_found_in_prose(text: str) -> None:
    assert SAID.findall(f"before {text} after") == ["7"]
    assert SAID.findall("the schema of Python 3.10") == []


def test_the_documented_schema_is_the_current_one() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
    if not texts:
        pytest.skip("docs/ has no pages yet")
    said = [(name, int(n)) for name, text in texts.items() for n in SAID.findall(text)]
    assert said, 'no page in docs/ says which schema records have; write "schema number 1" or `"schema": 1`'
    assert {n for _, n in said} == {SCHEMA}, said
