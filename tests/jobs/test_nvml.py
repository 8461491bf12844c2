"""Telemetry from a scripted NVML, from a real card if present, and from RAPL in a folder like the kernel's."""

# ruff: noqa: N802, N815  (the scripted NVML has the names of the real one)

import math
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.jobs import nvml as gpu_telemetry
from dyno.jobs import telemetry as jobs_telemetry
from dyno.jobs.nvml import NVML_COLUMNS, find_gpu
from dyno.jobs.telemetry import Telemetry, find_rapl
from dyno.results import timeline
from waiting import until

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")
BURN = """
import time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
end = time.time() + 6
while time.time() < end:
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
"""


class Nvml(types.ModuleType):
    """Fake pynvml: answers `gpu_telemetry` from `told`; a missing answer raises NVMLError."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, nvmlMemory_v2 = "sm", "memory", 0, 2

    class NVMLError(Exception):
        """Counterpart of pynvml's error."""

    def __init__(self, **told: Any) -> None:
        super().__init__("pynvml")
        self.told = {"memory": 5e9, "util": 93, "sm": 1755, "clock": 2619, "power": 412_500, "energy": 7_250_000,
                     "temperature": 61, "EventReasons": 4, "pids": [], **told}  # fmt: skip
        self.open = 0
        self.asked: list[int] = []

    def tell(self, name: str) -> Any:
        if name not in self.told or self.told[name] is None:
            raise self.NVMLError(name)
        return self.told[name]

    def nvmlInit(self) -> None:
        self.tell("util")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < len(UUIDS):
            raise self.NVMLError("invalid")
        self.asked.append(index)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return UUIDS[handle] if isinstance(handle, int) else str(handle)

    def nvmlDeviceGetName(self, handle: Any) -> bytes:
        return b"NVIDIA Test"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int = 1) -> Any:
        return types.SimpleNamespace(used=self.tell("memory" if version == 2 else "memory_v1"))

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return types.SimpleNamespace(gpu=self.tell("util"))

    def nvmlDeviceGetClockInfo(self, handle: Any, which: str) -> Any:
        return self.tell("sm" if which == "sm" else "clock")

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> Any:
        return self.tell("power")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> Any:
        return self.tell("energy")

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> Any:
        return self.tell("temperature")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> Any:
        return self.tell("EventReasons")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> Any:
        return self.tell("ThrottleReasons")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any:
        return [types.SimpleNamespace(pid=pid) for pid in self.tell("pids")]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    yield process
    process.kill()
    process.wait()


def looked(telemetry: Telemetry, times: int = 3) -> None:
    """Wait until the telemetry has that many samples."""
    until(lambda: len(telemetry._rows) >= times)


def sampled(pid: int, path: Path, device: str = "cuda:0") -> dict[str, np.ndarray]:
    telemetry = Telemetry(device, {})
    telemetry.watch(pid)
    looked(telemetry)
    telemetry.stop(path)
    with np.load(path) as stored:
        return dict(stored)


def test_samples_have_the_units_of_the_columns(nvml: Nvml) -> None:
    nvml.told["pids"] = [7, 8, 9]
    gpu = find_gpu("cuda:0", {})
    assert gpu is not None and (gpu.name, gpu.uuid) == ("NVIDIA Test", "GPU-aaaa-1")
    assert dict(zip(NVML_COLUMNS, gpu.sample({8}), strict=True)) == {
        "gpu_memory": 5e9, "gpu_util": 93, "gpu_clock": 1755, "gpu_memory_clock": 2619, "gpu_power": 412.5,
        "gpu_energy": 7250, "gpu_temperature": 61, "gpu_throttle": 4, "gpu_processes": 3, "gpu_own": 1,
    }  # fmt: skip


def test_values_missing_from_nvml_are_nan(nvml: Nvml) -> None:
    gpu = find_gpu("cuda:0", {})
    assert gpu is not None
    nvml.told = {"power": 1000}
    found = dict(zip(NVML_COLUMNS, gpu.sample(()), strict=True))
    assert found.pop("gpu_power") == 1
    assert all(map(math.isnan, found.values()))


def test_old_drivers_are_queried_through_the_old_api(nvml: Nvml) -> None:
    nvml.told |= {"memory": None, "memory_v1": 3e9, "EventReasons": None, "ThrottleReasons": 64}
    gpu = find_gpu("cuda:0", {})
    assert gpu is not None
    found = dict(zip(NVML_COLUMNS, gpu.sample(()), strict=True))
    assert (found["gpu_memory"], found["gpu_throttle"]) == (3e9, 64)


@pytest.mark.parametrize(
    ("device", "visible", "uuid"),
    [
        ("cuda:1", None, "GPU-aabb-2"),
        ("cuda", None, "GPU-aaaa-1"),
        ("cuda:0", "2,0", "GPU-cccc-3"),
        ("cuda:1", "2, 0", "GPU-aaaa-1"),
        ("cuda:0", "GPU-cccc-3,0", "GPU-cccc-3"),
        ("cuda:0", "GPU-aab", "GPU-aabb-2"),
        ("cuda:0", "MIG-1234", "MIG-1234"),
        ("cuda:0", "GPU-aa", None),  # matches two
        ("cuda:0", "", None),
        ("cuda:0", "-1", None),
        ("cuda:1", "0", None),
        ("cuda:9", None, None),
        ("cuda:x", None, None),
        ("cpu", None, None),
    ],
)
def test_the_gpu_of_the_job_is_queried(nvml: Nvml, device: str, visible: str | None, uuid: str | None) -> None:
    gpu = find_gpu(device, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert (gpu.uuid if gpu else None) == uuid
    assert nvml.open == (1 if gpu else 0)
    if gpu:
        gpu.close()
        assert nvml.open == 0


@pytest.mark.parametrize("broken", ["no library", "no driver"])
def test_jobs_run_without_nvml(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes], tmp_path: Path, broken: str
) -> None:
    if broken == "no library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml.told = {}
    found = sampled(child.pid, tmp_path / "t.npz")
    assert set(found) == {"at", "rss", "cpu", "others", "frequency", "cpu_energy", "epoch"}
    assert np.nanmax(found["rss"]) > 1e6


def test_a_gpu_job_records_its_columns_and_the_state_before_it(
    nvml: Nvml, child: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    nvml.told |= {"memory": 1e9, "util": 2, "pids": [1]}
    telemetry = Telemetry("cuda:0", {})
    nvml.told |= {"memory": 4e9, "util": 95, "pids": [1, child.pid]}
    begin = time.perf_counter()
    telemetry.watch(child.pid)
    watched = time.perf_counter()
    looked(telemetry)
    telemetry.stop(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz") as stored:
        found = dict(stored)
    assert set(NVML_COLUMNS) <= set(found)
    assert len(found["at"]) >= 3
    assert begin <= float(found["epoch"]) <= watched  # the clock of a record's windows
    assert (found["gpu_before_memory"], found["gpu_before_util"], found["gpu_before_processes"]) == (1e9, 2, 1)
    assert (found["gpu_memory"] == 4e9).all() and (found["gpu_own"] == 1).all() and (found["gpu_processes"] == 2).all()
    assert str(found["gpu_name"]) == "NVIDIA Test"
    assert nvml.open == 0


@pytest.mark.slow
def test_gpu_memory_is_counted_from_the_load_stage(nvml: Nvml, child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    mates = set[int]()
    nvml.told |= {"memory": 1e9, "pids": []}
    telemetry = Telemetry("cuda:0", {}, mates)
    telemetry.watch(child.pid)
    looked(telemetry)
    telemetry.pause()
    time.sleep(0.15)  # a look that had begun has ended
    seen = len(telemetry._rows)
    time.sleep(0.25)
    assert len(telemetry._rows) == seen, "a frozen job isn't looked at"
    nvml.told |= {"memory": 3e9, "pids": [1]}
    mates.update((1, child.pid))
    telemetry.note_loading()
    importing = len(telemetry._rows)
    nvml.told |= {"memory": 5e9, "pids": [1, child.pid]}
    telemetry.resume()
    looked(telemetry, importing + 3)
    telemetry.stop(tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz") as stored:
        memory, before = stored["gpu_memory"], (stored["gpu_before_memory"], stored["gpu_before_processes"])
    assert before == (3e9, 1), "what a process that loaded meanwhile took isn't this one's"
    assert np.isnan(memory[:importing]).all() and (memory[importing + 1 :] == 5e9).all()


def test_a_hanging_driver_does_not_block_the_study(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    monkeypatch.setattr("dyno.jobs.telemetry.SHUTDOWN_TIMEOUT_S", 0.2)
    running = set(threading.enumerate())
    telemetry = Telemetry("cuda:0", {})
    asked, answer = threading.Event(), threading.Event()
    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", lambda handle: asked.set() or answer.wait(1200))
    telemetry.watch(child.pid)
    assert asked.wait(600)
    telemetry.stop(tmp_path / "t.npz")
    assert not answer.is_set() and set(threading.enumerate()) - running, "it waits for no answer"
    with np.load(tmp_path / "t.npz") as stored:
        assert len(stored["gpu_power"]) == 0
    assert nvml.open == 1  # still used by the hanging thread
    answer.set()
    for thread in set(threading.enumerate()) - running:
        thread.join(600)


@pytest.mark.gpu
def test_a_real_gpu_is_monitored_at_work(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import pynvml

    assert gpu_telemetry.find_gpu("cuda:0", {}) is not None
    telemetry = Telemetry("cuda:0")
    process = subprocess.Popen([sys.executable, "-c", BURN])
    telemetry.watch(process.pid)
    assert process.wait(120) == 0
    telemetry.stop(tmp_path / "telemetry.npz")
    with np.load(tmp_path / "telemetry.npz") as stored:
        found = dict(stored)
    print({name: (np.nanmin(a), np.nanmax(a)) if a.size and a.ndim else a.item() for name, a in found.items()})
    at = found["epoch"] + found["at"]
    trace = timeline.read_timeline(tmp_path)
    assert trace is not None
    busy = timeline.summarise_timeline(trace, [(at[-1] - 3, at[-1] - 1)])
    assert busy.memory > 8192 * 8192 * 2 * 2
    assert busy.utilisation > 50
    assert 100 < busy.clock_min <= busy.clock < 4000
    assert busy.power > 50 and busy.temperature > 20
    assert np.median(np.diff(found["at"])) < 0.2
    assert (found["gpu_throttle"] == found["gpu_throttle"].astype(int)).all()
    pynvml.nvmlInit()
    assert str(found["gpu_name"]) == pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))


def zone(root: Path, name: str, kind: str, value: int, size: int = 1_000_000) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for file, text in (("name", kind), ("energy_uj", value), ("max_energy_range_uj", size)):
        (folder / file).write_text(f"{text}\n")
    return folder / "energy_uj"


def test_rapl_counts_every_socket_once(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 800_000)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 900_000)
    zone(tmp_path, "intel-rapl:1", "package-1", 500_000)
    zone(tmp_path, "intel-rapl:2", "psys", 999_000)
    found = find_rapl(tmp_path)
    before = found.joules()
    assert before == pytest.approx(1.4)
    first.write_text("100000\n")  # the counter wrapped
    assert found.joules() - before == pytest.approx(0.2)
    first.write_text("50000\n")
    assert found.joules() - before == pytest.approx(1.15)


def test_an_unreadable_energy_counter_gives_nan(tmp_path: Path) -> None:
    assert math.isnan(find_rapl(tmp_path).joules()), "a machine without any"
    one = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    (tmp_path / "intel-rapl:1").mkdir()
    assert math.isnan(find_rapl(tmp_path).joules()), "a part must not pass for the whole"
    (tmp_path / "intel-rapl:1").rmdir()
    found = find_rapl(tmp_path)
    one.unlink()
    assert math.isnan(found.joules())


def test_telemetry_records_the_energy_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
