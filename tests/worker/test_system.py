"""Facts of the machine, and the threads available to a job."""

import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from dyno.worker import system


def test_the_description_is_plain_data() -> None:
    found = system.describe(("numpy", "no-such-distribution"))
    assert json.loads(json.dumps(found)) == found
    assert found["versions"] == {"numpy": np.__version__}
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] == psutil.virtual_memory().total
    assert found["cpu"] and found["python"].startswith("3.")


def test_cpu_flags_match_proc_cpuinfo() -> None:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        pytest.skip("no /proc/cpuinfo here")
    words = set(info.read_text().split())
    assert set(system.describe()["cpu_flags"]) == words & set(system.CPU_FLAGS)


def test_pinning_uses_one_processor_per_thread_up_to_all() -> None:
    allowed = os.sched_getaffinity(0)
    assert sorted(system.list_cores()) == sorted(allowed)
    for threads in (10_000, len(allowed), 1):
        chosen = system.pin(threads)
        assert len(chosen) == min(threads, len(allowed))
        assert os.sched_getaffinity(0) == set(chosen)


def test_physical_cores_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = {0: "0,4", 1: "1,5", 2: "2-2", 4: "0,4", 5: "1,5"}
    for cpu, text in siblings.items():
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(text + "\n")
    monkeypatch.setattr(system, "CPUS_DIR", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(siblings))
    assert system.list_cores() == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("of_process", "files", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000\n"}, 1.5),  # a container with --cpus=1.5
        ("0::/app/job", {"app/cpu.max": "400000 100000", "app/job/cpu.max": "max 100000"}, 4.0),  # the one above limits
        ("0::/elsewhere", {"cpu.max": "50000 100000"}, 0.5),
        ("4:cpu,cpuacct:/docker/x\n3:memory:/", {"cpu,cpuacct/cpu.cfs_quota_us": "200000",
                                                 "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 2.0),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("0::/", {}, math.inf),
    ],
)  # fmt: skip
def test_the_cpu_quota_of_a_container_is_read(
    of_process: str, files: dict[str, str], quota: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unnoticed, eight threads under `--cpus=1.5` took 5 ms in the median and 27 in the mean."""
    (tmp_path / "cgroup").write_text(of_process)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    monkeypatch.setattr(system, "OWN_CGROUP_FILE", tmp_path / "cgroup")
    monkeypatch.setattr(system, "CGROUPS_DIR", tmp_path / "groups")
    monkeypatch.setattr(system, "core_threads", lambda: [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)])
    assert system.cpu_quota() == quota
    assert system.physical_cores() == min(8, max(1, int(min(quota, 8))))


def write_processors(folder: Path, name: str, values: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Write each processor's value to a file in a fake system folder; let this process use all processors."""
    for cpu, value in enumerate(values):
        file = folder / f"cpu{cpu}" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    monkeypatch.setattr(system, "CPUS_DIR", folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(values))))


def test_faster_cores_come_first_and_mixed_cores_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_processors(tmp_path, "cpu_capacity", [512, 1024, 512, 1024, 256], monkeypatch)
    assert system.list_cores() == [1, 3, 0, 2, 4]
    text = system.describe_mixed_cores()
    assert "2 at 100% and 2 at 50% and 1 at 25%" in text and "--threads 2" in text


@pytest.mark.parametrize("capacities", [[1024, 1024], [1024, 1009], []])
def test_equal_cores_are_not_reported_as_mixed(
    capacities: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_processors(tmp_path, "cpu_capacity", capacities, monkeypatch)
    assert system.describe_mixed_cores() == ""


def test_thermal_throttling_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = "thermal_throttle/core_throttle_count"
    write_processors(tmp_path, counter, [7, 9], monkeypatch)
    contention = system.CpuContention()
    assert contention.count_overheated() == 0
    write_processors(tmp_path, counter, [8, 12], monkeypatch)
    assert contention.count_overheated() == 4


@pytest.fixture
def tenth_of_a_processor() -> Iterator[Path]:
    """A control group limited to a tenth of a processor: less than a busy machine leaves it."""
    versions = {"cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "10000"}, "": {"cpu.max": "10000 100000"}}
    group = Path()
    for version, limits in versions.items():
        group = system.CGROUPS_DIR / version / f"dyno-test-{os.getpid()}"
        try:
            group.mkdir()
            for name, text in limits.items():
                (group / name).write_text(text)
            break
        except OSError:
            with suppress(OSError):
                group.rmdir()
    else:
        pytest.skip("no control group with a limit of processors can be made here")
    yield group
    group.rmdir()


def test_cpu_time_withheld_by_a_quota_is_counted(tenth_of_a_processor: Path) -> None:
    code = (
        f"import os, time; open({str(tenth_of_a_processor / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "from dyno.worker import system\n"
        "contention, end = system.CpuContention(), time.process_time() + 0.2\n"
        "while time.process_time() < end: pass\n"
        "print(system.cpu_quota(), contention.count_withheld())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=1200)
    quota, withheld = map(float, done.stdout.split())
    assert quota == 0.1 and 0.2 < withheld < 1.0


def test_a_timing_throttled_by_a_quota_has_a_warning(tenth_of_a_processor: Path, tmp_path: Path) -> None:
    code = (
        f"import os; open({str(tenth_of_a_processor / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "from dyno.worker.journal import Journal; from dyno.worker.spec import Job, Runtime; from pathlib import Path\n"
        f"journal = Journal(Path({str(tmp_path)!r}), Job('run', Runtime()))\n"
        "for withheld in (0.01, 0.4):\n"
        "    journal.record_contention('model', 0.0, 'cpu', withheld); print(journal.record.warnings)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=1200)
    few, more = done.stdout.splitlines()
    assert few == "()" and "limit of 0.1 processors" in more and "--threads" in more


def test_peak_memory_is_the_process_maximum_without_its_parent() -> None:
    code = (
        "from dyno.worker.system import peak_memory as peak; a = peak(); b = bytearray(50_000_000); "
        "b = None; print(a, peak())"
    )
    held = bytearray(300_000_000)  # memory of the parent: a fork starts with as much
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=1200)
    before, after = map(int, done.stdout.split())
    assert 5e6 < before < len(held) / 2
    assert after - before > 40e6


def test_a_process_without_its_parent_ends() -> None:
    code = "import sys; from dyno.worker.system import die_with_parent as die; die(int(sys.argv[1])); print('alive')"
    alive = subprocess.run([sys.executable, "-c", code, str(os.getpid())], capture_output=True, text=True, timeout=1200)
    assert (alive.returncode, alive.stdout) == (0, "alive\n")
    gone = subprocess.run([sys.executable, "-c", code, "999999999"], capture_output=True, text=True, timeout=1200)
    assert (gone.returncode, gone.stdout) == (-9, "")


def test_ending_flushes_output_and_skips_exit_handlers() -> None:
    code = (
        "import atexit, ctypes; from dyno.worker import system; atexit.register(print, 'at exit');"
        "ctypes.CDLL(None).puts(b'from C'); print('from Python'); system.end(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == ["from C", "from Python"]
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
            assert subprocess.run([sys.executable, "-c", code], stdout=full, env=buffered, timeout=1200).returncode == 3


def test_cpu_time_of_the_launcher_is_known() -> None:
    code = (
        "import time\nfrom dyno.worker.system import _launcher_seconds as seconds\n"
        "before = seconds(); print('ready', flush=True)\n"
        "while (found := seconds() - before) < 0.05: time.sleep(0.01)\nprint(found)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    while child.poll() is None:  # busy, like a sampling launcher
        pass
    assert float(child.stdout.read()) >= 0.05


def test_modules_without_byte_code_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one_with_code", "one_without"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    before = system.count_compiled()
    for name, writes in (("one_with_code", True), ("one_without", False)):
        monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
        importlib.import_module(name)
    modules, without = system.count_compiled()
    assert (modules - before[0], without - before[1]) == (2, 1)


def test_bytecode_goes_to_the_cache_only_if_not_stored_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heavy.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(system, "HEAVY_LIBRARIES", ("heavy", "no_such_library"))
    monkeypatch.setenv("DYNO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    for name, value in (("pycache_prefix", None), ("dont_write_bytecode", False)):
        monkeypatch.setattr(sys, name, value)
    system.keep_byte_code()
    assert sys.pycache_prefix is None, "it will lie beside the library"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("DYNO_CACHE", str(tmp_path / "heavy.py" / "cache"))
    system.keep_byte_code()
    assert sys.pycache_prefix is None, "nothing can be written into that cache"
    monkeypatch.setenv("DYNO_CACHE", str(tmp_path / "cache"))
    system.keep_byte_code()
    assert str(sys.pycache_prefix).startswith(str(tmp_path / "cache")) and not sys.dont_write_bytecode
    first = sys.pycache_prefix
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "site-packages" / "heavy-2.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    system.keep_byte_code()
    assert sys.pycache_prefix != first, "of another version of a library the byte-code is another"


def test_a_relative_cache_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNO_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for base, expected in (("relative", tmp_path / ".cache"), ("", tmp_path / ".cache"), ("/else", Path("/else"))):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert system.cache_dir() == expected / "dyno"


@pytest.mark.parametrize(("others", "busy"), [(0.5, 0.5), (99.0, 4.0), (-0.1, 0.0)])
def test_busy_processors_never_exceed_their_number(others: float, busy: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts in ticks of 10 ms, so short times may show more."""
    monkeypatch.setattr(system, "shared_processors", lambda: {0, 1, 2, 3})
    contention = system.CpuContention()
    monkeypatch.setattr(contention, "_measure_interval", lambda: (others, 0.0, 1.0))
    assert contention.count_busy() == busy
    monkeypatch.setattr(contention, "_measure_interval", lambda: (0.0, 0.0, 0.0))
    assert (contention.count_busy(), contention.count_withheld()) == (0.0, 0.0), "the clock has not moved"
    blocks = iter([(1.5, 0.25, 1.0), (0.5, 0.75, 1.0)])  # busy time of others, withheld time, and duration
    monkeypatch.setattr(contention, "_measure_interval", lambda: next(blocks))
    assert [*contention.count_during([0, 1])] == [0, 1] and (contention.count_busy(), contention.count_withheld()) == (
        1.0,
        0.5,
    )


def test_work_on_unrelated_processors_is_not_contention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job on processor 0, which shares a core with 2: in a second they were busy for 0.5 and 0.3 s, and 1 for all;
    the job for 0.2 s of it."""
    for cpu, text in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}.items():
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(text + "\n")
    clock = iter((0.0, 1.0, 1.0))
    monkeypatch.setattr(system, "CPUS_DIR", tmp_path)
    monkeypatch.setattr(system, "STATISTICS_FILE", tmp_path / "stat")
    own = iter((7.0, 7.2))
    monkeypatch.setattr(system, "_own_seconds", lambda: next(own))
    monkeypatch.setattr(system.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(system.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(system.time, "monotonic", lambda: next(clock))
    tick = os.sysconf("SC_CLK_TCK")
    line = "cpu{} 7 0 {} 900 5 0 0 0 0 0\n"
    (tmp_path / "stat").write_text("cpu  28 0 0 3600 20 0 0 0 0 0\n" + "".join(line.format(n, 0) for n in range(4)))
    contention = system.CpuContention()
    busy = (tick // 2, tick, 3 * tick // 10, 0)
    (tmp_path / "stat").write_text("cpu  9 9 9 9\n" + "".join(line.format(n, more) for n, more in enumerate(busy)))
    assert contention.count_busy() == pytest.approx(0.6)


def test_waiting_for_a_processor_is_counted() -> None:
    """This process and a spinning one share a processor: each waits about half of the time."""
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel counts no delays")
    shared = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{shared}]); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        os.sched_setaffinity(0, [shared])
        before, end = system.run_delay(), time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
        waited = system.run_delay() - before
        other.kill()
    assert waited > 0.1


def test_sleeping_is_not_waiting_for_a_processor() -> None:
    before = system.run_delay()
    time.sleep(0.5)
    assert system.run_delay() - before < 0.25
