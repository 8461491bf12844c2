"""The trials' table as text: as wide as the terminal, broken between words, numbers whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import printed
import synthetic
from dyno.formatting import UNLIMITED, width, wrapped
from dyno.report.export import export
from dyno.report.tables import trial_table
from dyno.table import TEXT, Column, Table
from synthetic import Way


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_a_table_is_as_wide_as_the_terminal(tmp_path: Path, columns: int) -> None:
    ways = [Way("pytorch", seconds=0.00412), Way("onnxruntime", "int8", 0.00105), Way("openvino", "fp16", 0.00207)]
    run = trial_table.read_trials(synthetic.write_run(tmp_path / "run", ways, samples=40, count=30))
    text = printed.trials(run, width=columns)
    assert max(map(len, text.splitlines())) <= columns
    for value in run.frame["latency_model_ms_median"]:
        assert f"{value:.2f}" in text, "a number is never broken"
    assert "not shown at this width" not in printed.trials(run), "a pipe takes every column"


def test_sentences_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "the fastest is onnxruntime int8 " * 6
    monkeypatch.setenv("COLUMNS", "50")
    assert width() == 50 and max(map(len, wrapped(sentence).splitlines())) <= 50
    assert wrapped(sentence).split() == sentence.split()
    monkeypatch.delenv("COLUMNS")
    assert width() == UNLIMITED and "\n" not in wrapped(sentence)


def test_a_name_of_any_length_leaves_the_other_columns_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    columns = tuple(Column(name, kind=TEXT) for name in ("a", "b", "remark"))
    row = {"a": "encoder.layers." * 10, "b": "relu_nchwc", "remark": "batch norm folded, 2 fused into one"}
    words = export([Table("aligned", "Aligned", "", columns, [row])]).split()
    assert {"relu_nchwc", "folded,", "fused", "batch"} <= set(words)


def test_a_long_list_of_words_is_folded_on_a_page() -> None:
    columns = (Column("name", kind=TEXT), Column("in_b", kind=TEXT), Column("seconds"))
    rows = [
        {"name": "attn", "in_b": "2 Reshape, " * 10, "seconds": 1.0},
        {"name": "fc", "in_b": "Gemm", "seconds": 2.0},
    ]
    page = export([Table("parts", "Parts", "", columns, rows)], "html")
    assert page.count('class="wide"') == 1 and re.search(r'<td class="wide"[^>]*>2 Reshape', page)
