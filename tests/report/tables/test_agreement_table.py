"""What `dyno agree` compares, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

import synthetic
from dyno.report.tables import accuracy_tables
from dyno.results.trial_result import Results, load_run
from dyno.worker.spec import UserError
from synthetic import Way


def _run(folder: Path, inputs: str, weights: str) -> Results:
    facts = {"inputs_sha256": inputs * 64, "weights_sha256": weights * 64}
    return load_run(synthetic.write_run(folder, [Way("onnxruntime", "fp32", facts=facts)]))


def test_outputs_of_other_inputs_are_not_compared(tmp_path: Path) -> None:
    first = _run(tmp_path / "first", "a", "c")
    same, other = _run(tmp_path / "same", "a", "d"), _run(tmp_path / "other", "b", "d")
    table, _, failed = accuracy_tables.compare_with_first([first, same], 1e-3, 1e-8)
    assert len(table.rows) == 1 and not failed
    with pytest.raises(UserError, match=r"was fed other inputs than .*; give both the same: --input"):
        accuracy_tables.compare_with_first([first, other], 1e-3, 1e-8)
