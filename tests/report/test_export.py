"""Tables as files: format by file ending, and Parquet read back by its own library."""

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dyno.study import defaults

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("format", ["text", "markdown", "csv", "json", "html"])
def test_exported_files_equal_printed_output(format: str, call: Any, tmp_path: Path) -> None:
    _, printed, _ = call("show", GOLDEN / "run", "--format", format, code=0)
    ending = next(ending for ending, name in defaults.SUFFIX_FORMATS.items() if name == format)
    _, out, err = call("show", GOLDEN / "run", "-o", f"table{ending}", code=0)
    assert (out, err) == ("", f"dyno: wrote table{ending}\n")
    assert (tmp_path / f"table{ending}").read_text() == printed and len(printed) > 300
    if format == "html":  # a whole page with sortable columns
        assert printed.startswith("<!doctype html>") and "<style>" in printed and "function sorted(" in printed
    call("show", GOLDEN / "run", "-o", "table.data", "--format", format, code=0)
    assert (tmp_path / "table.data").read_text() == printed


def test_csv_has_the_requested_columns(call: Any) -> None:
    words = ("show", GOLDEN / "run", "--format", "csv", "--columns")
    assert call(*words, "backend, batch", code=0)[1].splitlines()[:2] == ["backend,batch", "pytorch,1"]
    assert call(*words, "all", code=0)[1] == call(*words[:-1], code=0)[1]
    assert "there is no column 'speed'" in call(*words, "speed", code=2)[2]


def test_parquet_has_the_numbers_and_units_of_the_table(call: Any, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="no pyarrow (pip install 'inference-dyno[parquet]')")
    call("show", GOLDEN / "run", "-o", "table.parquet", code=0)
    table = parquet.read_table(tmp_path / "table.parquet")
    with (GOLDEN / "results.csv").open(newline="") as file:
        expected = [*csv.DictReader(file)]
    assert table.column_names == [*expected[0]]
    for row, stored in zip(table.to_pylist(), expected, strict=True):
        for name, text in stored.items():
            kind = str(table.schema.field(name).type)
            assert kind in ("int64", "double", "string")
            if kind == "string":
                assert row[name] == (text or None), name
            else:
                assert row[name] is None if not text else math.isclose(row[name], float(text)), name
    assert str(table.schema.field("batch").type) == "int64"
    latency = table.schema.field("latency_ms")
    assert latency.metadata[b"unit"] == b"ms" and str(latency.type) == "double"
    about = json.loads(table.schema.metadata[b"dyno"])
    assert about["table"] == "trials" and about["machine"]["cpu"] == "AMD EPYC" and about["study"]["rounds"] == 2


def test_unsupported_output_files_are_refused(refused: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = GOLDEN / "run"
    assert refused("show", run, "-o", "table.xlsx").startswith("table.xlsx has an unknown ending '.xlsx'; known: .txt")
    assert refused("show", run, "--format", "parquet") == "Parquet is not for a terminal; give a file: -o FILE.parquet"
    assert refused("show", run, "-o", "no/table.csv").startswith("no/table.csv can't be written")
    monkeypatch.setattr(defaults, "find_spec", lambda name: SimpleNamespace(origin=name))
    assert refused("show", run, "--table", "all", "-o", "t.parquet").startswith("a Parquet file has one table, not ")
    assert refused("show", run, "--table", "serve", "-o", "t.parquet").startswith(f"{run} has no table to write: ")
    assert refused("show", run, "--list", "-o", "t.parquet").startswith("--list can't be written as Parquet")
    monkeypatch.setattr(defaults, "find_spec", lambda name: None)
    assert refused("show", run, "-o", "t.parquet") == (
        "Parquet: this needs pyarrow, not installed here; pip install 'inference-dyno[parquet]'"
    )
    assert not [*tmp_path.iterdir()]
