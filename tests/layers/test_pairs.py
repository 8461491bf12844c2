"""A stored pair is read back as it was, and one whose times are none is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.layers import pairs
from dyno.layers.times import Times
from dyno.worker.facts.job import Layer, LayerGraph
from dyno.worker.spec import UserError


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    times = Times(np.full(4, 3e-6), np.full(2, 4e-6), np.full((2, 1), 1e-6), ("a warning",), None)
    forms = tuple(LayerGraph(form="nodes", library=name, layers=(Layer(name="n", type="Conv"),)) for name in "ab")
    pairs.write_pair(
        tmp_path / "p.json",
        pairs.FormPair(forms, pairs.PairSide(0, "fp32", (times,)), pairs.PairSide(1, "fp32", (times,))),
    )
    return tmp_path / "p.json"


def test_a_pair_is_read_back(stored: Path) -> None:
    found = pairs.read_pair(stored)
    assert found.titles == ("a", "b") and found.a.processes[0].layers.tolist() == [[1e-6], [1e-6]]


NONE = [
    ("unprofiled", []), ("unprofiled", [[1]]), ("profiled", 5), ("profiled", [-1]), ("layers", [[1e308]]),
    ("layers", [[float("nan")]]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NONE)
def test_times_that_are_none_are_refused(stored: Path, name: str, value: Any) -> None:
    content = json.loads(stored.read_text())
    content["b"]["processes"][0][name] = value
    stored.write_text(json.dumps(content))
    with pytest.raises(UserError, match="is damaged"):
        pairs.read_pair(stored)
