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
    facts = system.describe()
    host = {"host": platform.node(), "cpu": facts["cpu"], "cores": facts["cores"], "machine": facts["machine"]}
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


def keep(test: StoredSelfTest) -> StoredSelfTest:
    """Store the self-test in place of an earlier one; return it with the latencies of earlier ones of its kind."""
    path = find_place(test.device)
    previous_test = _read_test(path)
    if previous_test is not None and previous_test.is_like(test):
        test = replace(test, sessions=SelfTest(previous_test).sessions)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, to_json(test))
    return test


def find(device: str) -> tuple[SelfTest | None, str]:
    """Return the self-test of this machine and device; if invalid, None and why: "" (never tested) or the fault."""
    path = find_place(device)
    if (test := _read_test(path)) is None:
        return None, "it can't be read" if path.is_file() else ""
    facts = identify_machine(device)
    names = [name for name in sorted(facts.keys() | test.machine.keys()) if facts.get(name) != test.machine.get(name)]
    if names:
        changes = ", ".join(
            f"{name} was {test.machine.get(name) or 'unknown'} and is {facts.get(name)}" for name in names
        )
        return None, f"the machine has changed since {test.date[:10]}: {changes}"
    return SelfTest(test), ""


def list_states() -> list[dict[str, Any]]:
    """Return the state of the self-test of the CPU and of every other tested device.

    Each has `device`, `grade`, `date` ("" without a valid test) and its `state` as text.
    """
    paths = (cache_dir() / "self-tests").glob("*.json")
    devices = sorted(
        {"cpu", *(test.device for path in paths if (test := _read_test(path)) and find_place(test.device) == path)}
    )
    return [_describe_state(device) for device in devices]


def _describe_state(device: str) -> dict[str, Any]:
    test, fault = find(device)
    command = f"dyno selftest{'' if device == 'cpu' else f' --device {device}'}"
    if test is None:
        state = f"not valid: {fault}; run `{command}` again" if fault else f"none yet; run `{command}`"
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
    if summary := summarise_self_test(device):
        write_json(folder / SELF_TEST_FILE, to_json(summary))


def renew(results: Results) -> Results:
    """Return the results with this machine's latest self-test, if theirs is an earlier one from this machine."""
    for device in {t.device for t in results}:
        summary = summarise_self_test(device)
        if summary and results.self_test and summary.machine == results.self_test.machine:
            results.self_test = summary
    return results


def attach(results: Results) -> Results:
    """Add this machine's self-test to results without one that were measured on this machine.

    Results lack a self-test if they are older than it.
    """
    machine, run_machine = system.describe(), results.environment
    devices = {t.device for t in results}
    is_same_machine = all(machine[name] == run_machine.get(name) for name in ("cpu", "cores", "memory_bytes", "os"))
    if not results.self_test and len(devices) == 1 and is_same_machine:
        (device,) = devices
        results.self_test = summarise_self_test(device)
    return results
