"""Stored self-tests, one per machine and device; studies there store a summary."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno.jobs.nvml import find_gpu
from dyno.report import self_test
from dyno.results.self_test import SelfTest, SelfTestSummary, StoredSelfTest, read
from dyno.results.trial_result import SELF_TEST_FILE, Results
from dyno.store import cache_dir
from dyno.worker import system
from dyno.worker.record import read_json, write_json
from dyno.worker.spec import to_json


def _read_test(path: Path) -> StoredSelfTest | None:
    try:
        return read(read_json(path))
    except (OSError, ValueError):
        return None


def identify_machine(device: str) -> dict[str, Any]:
    """Return the facts that identify this machine and device; self-tests of other machines are invalid here."""
    about = system.describe()
    host = {"host": platform.node(), "cpu": about["cpu"], "cores": about["cores"], "machine": about["machine"]}
    if device == "cpu":
        return host
    gpu = find_gpu(device, os.environ)
    if gpu is None:
        return {**host, "gpu": "", "gpu_uuid": ""}
    gpu.close()
    return {**host, "gpu": gpu.name, "gpu_uuid": gpu.uuid}


def find_place(device: str) -> Path:
    """Return the path of a device's self-test on this host."""
    key = hashlib.sha256(f"{platform.node()} {device}".encode()).hexdigest()[:24]
    return cache_dir() / "self-tests" / f"{key}.json"


def keep(stored: StoredSelfTest) -> StoredSelfTest:
    """Store the self-test in place of an earlier one; return it with the latencies of earlier ones of its kind."""
    path = find_place(stored.device)
    earlier = _read_test(path)
    if earlier is not None and earlier.is_like(stored):
        stored = replace(stored, sessions=SelfTest(earlier).sessions)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, to_json(stored))
    return stored


def find(device: str) -> tuple[SelfTest | None, str]:
    """Return the self-test of this machine and device; if invalid, None and why: "" (never tested) or the fault."""
    path = find_place(device)
    if (stored := _read_test(path)) is None:
        return None, "it can't be read" if path.is_file() else ""
    now = identify_machine(device)
    changed = [name for name in sorted(now.keys() | stored.machine.keys()) if now.get(name) != stored.machine.get(name)]
    if changed:
        what = ", ".join(
            f"{name} was {stored.machine.get(name) or 'unknown'} and is {now.get(name)}" for name in changed
        )
        return None, f"the machine has changed since {stored.date[:10]}: {what}"
    return SelfTest(stored), ""


def list_states() -> list[dict[str, Any]]:
    """Return the state of the self-test of the CPU and of every other tested device.

    Each has `device`, `grade`, `date` ("" without a valid test) and its `state` as text.
    """
    kept = (cache_dir() / "self-tests").glob("*.json")
    devices = sorted(
        {"cpu", *(one.device for path in kept if (one := _read_test(path)) and find_place(one.device) == path)}
    )
    return [_describe_state(device) for device in devices]


def _describe_state(device: str) -> dict[str, Any]:
    test, wrong = find(device)
    again = f"dyno selftest{'' if device == 'cpu' else f' --device {device}'}"
    if test is None:
        state = f"not valid: {wrong}; run `{again}` again" if wrong else f"none yet; run `{again}`"
        return {"device": device, "grade": "", "date": "", "state": state}
    date = test.stored.date
    return {
        "device": device,
        "grade": test.grade,
        "date": date,
        "state": f"{self_test.grade_self_test(test)} ({date[:10]})",
    }


def summarise_self_test(device: str) -> SelfTestSummary | None:
    """Return the self-test's summary for a run on this machine and device; None without a valid self-test."""
    test, _ = find(device)
    return test.summary() if test else None


def keep_in(folder: Path, device: str) -> None:
    """Store the summary of this machine's self-test, if any, in the run folder."""
    if stored := summarise_self_test(device):
        write_json(folder / SELF_TEST_FILE, to_json(stored))


def renew(results: Results) -> Results:
    """Return the results with this machine's latest self-test, if theirs is an earlier one from this machine."""
    for device in {t.device for t in results}:
        here = summarise_self_test(device)
        if here and results.self_test and here.machine == results.self_test.machine:
            results.self_test = here
    return results


def attach(results: Results) -> Results:
    """Add this machine's self-test to results without one that were measured on this machine.

    Results lack a self-test if they are older than it.
    """
    here, there = system.describe(), results.environment
    devices = {t.device for t in results}
    same = all(here[name] == there.get(name) for name in ("cpu", "cores", "memory_bytes", "os"))
    if not results.self_test and len(devices) == 1 and same:
        (device,) = devices
        results.self_test = summarise_self_test(device)
    return results
