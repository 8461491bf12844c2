"""`dyno doctor` says whom it asks while it asks, beside a table that stays clean."""

from __future__ import annotations

import json

import pytest

from dyno.cli import doctor
from dyno.worker import registry


def test_each_answer_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(registry, "names", lambda: ["fake"])
    assert doctor.doctor({}, "json") == 0
    said = capsys.readouterr()
    assert [row["backend"] for row in json.loads(said.out)["rows"]] == ["fake"]
    assert said.err.startswith("1/1 fake: ok, ")
