"""RAPL's counters, from a folder like the kernel's."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dyno.jobs import telemetry as jobs_telemetry
from dyno.jobs.telemetry import Telemetry, find_rapl


def zone(root: Path, name: str, kind: str, value: int, size: int = 1_000_000) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for file, text in (("name", kind), ("energy_uj", value), ("max_energy_range_uj", size)):
        (folder / file).write_text(f"{text}\n")
    return folder / "energy_uj"


def test_all_sockets_count_and_nothing_twice(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 800_000)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 900_000)
    zone(tmp_path, "intel-rapl:1", "package-1", 500_000)
    zone(tmp_path, "intel-rapl:2", "psys", 999_000)
    found = find_rapl(tmp_path)
    before = found.joules()
    assert before == pytest.approx(1.4)
    first.write_text("100000\n")  # it began anew
    assert found.joules() - before == pytest.approx(0.2)
    first.write_text("50000\n")
    assert found.joules() - before == pytest.approx(1.15)


def test_a_counter_that_can_not_be_read_is_not_known(tmp_path: Path) -> None:
    assert math.isnan(find_rapl(tmp_path).joules()), "a machine without any"
    one = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    (tmp_path / "intel-rapl:1").mkdir()
    assert math.isnan(find_rapl(tmp_path).joules()), "a part must not pass for the whole"
    (tmp_path / "intel-rapl:1").rmdir()
    found = find_rapl(tmp_path)
    one.unlink()
    assert math.isnan(found.joules())


def test_telemetry_has_the_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 2_500_000)
    monkeypatch.setattr(jobs_telemetry, "POWERCAP", tmp_path)
    telemetry = Telemetry()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        telemetry.watch(child.pid)
        while len(telemetry._rows) < 2:
            assert telemetry._thread is not None and telemetry._thread.is_alive()
    finally:
        child.kill()
        child.wait()
        telemetry.stop(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz") as stored:
        assert stored["cpu_energy"] == pytest.approx(np.full(len(stored["at"]), 2.5))
