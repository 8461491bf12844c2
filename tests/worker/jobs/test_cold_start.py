"""What a cold start's clock counts as an import, and as the part around it."""

from __future__ import annotations

import builtins
import importlib
import time
from pathlib import Path

import pytest

from dyno.worker.jobs.cold_start import ColdStartClock

NAP_S = 0.3


@pytest.fixture
def slow_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_outer.py").write_text(f"import time, slow_inner\ntime.sleep({NAP_S})\n")
    (tmp_path / "slow_inner.py").write_text(f"import time\ntime.sleep({NAP_S})\n")
    (tmp_path / "slow_by_name.py").write_text(f"import time\ntime.sleep({NAP_S})\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("slow_modules")
def test_imports_are_counted_once_and_apart() -> None:
    clock, usual = ColdStartClock(), (builtins.__import__, importlib.import_module)
    begin = time.monotonic()
    with clock.imports_apart(), clock.part("load"):
        import slow_outer  # type: ignore[import-not-found]  # noqa: F401

        importlib.import_module("slow_by_name")
        time.sleep(NAP_S)
    whole = time.monotonic() - begin
    assert clock.imported >= 3 * NAP_S, "two nested ones, and one by name"
    assert clock.parts["load"] >= NAP_S
    assert 4 * NAP_S <= clock.imported + clock.parts["load"] <= whole
    assert (builtins.__import__, importlib.import_module) == usual


def test_an_import_that_fails_ends_the_counting_too() -> None:
    clock = ColdStartClock()
    with clock.imports_apart(), clock.part("load"):
        for _ in range(2):
            with pytest.raises(ImportError):
                importlib.import_module("no_such_module_at_all")
    assert clock.imported > 0 and not clock._importing
