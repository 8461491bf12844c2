"""The machine of a job, described by the standard library alone, and the processors that the job may use."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib.util
import math
import os
import platform
import pwd
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn, TextIO

CPU_FLAGS = tuple("avx2 avx512f avx512_vnni avx_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8 asimd".split())
HEAVY_LIBRARIES = ("numpy", "torch", "torchvision", "timm", "onnx", "openvino")  # libraries of many modules
PR_SET_PDEATHSIG = 1
PROBES_VARIABLE = "DYNO_PROBES"  # environment variable: folder of compiled processor probes
# Variables of one interpreter that would break another
PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")
USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")  # variables that name the user
# Variables that stop libraries from contacting update, hub or telemetry hosts
SILENCING_VARIABLES = {
    "YOLO_OFFLINE": "1",
    "YOLO_AUTOINSTALL": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "ORT_DISABLE_TELEMETRY": "1",  # since 1.29; after the import, disable_telemetry_events() is too late
    "NO_ALBUMENTATIONS_UPDATE": "1",
    "MPLBACKEND": "agg",  # no screen here; the user's own setting may need one
}


def cache_dir() -> Path:
    """Return the folder of all caches: DYNO_CACHE, or `dyno` in the user's cache folder, or else a temporary one."""
    if override := os.environ.get("DYNO_CACHE"):
        return Path(override)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative path is to be ignored, by the specification
    if base.is_absolute():
        return base / "dyno"
    try:
        default_dir = Path.home() / ".cache" / "dyno"
    except RuntimeError:  # no HOME and a numeric user, as in a container
        return temporary_home() / ".cache" / "dyno"
    return default_dir if default_dir.exists() or _can_be_written(default_dir) else temporary_home() / ".cache" / "dyno"


def temporary_home() -> Path:
    """Return a folder for a user without a home; raise a `PermissionError` if it belongs to another user."""
    path = Path(tempfile.gettempdir()) / f"dyno-{os.getuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


def missing_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a HOME and a USER if the system knows neither: some libraries fail without them.

    Containers with a numeric user id have this problem.
    """
    try:
        pwd.getpwuid(os.getuid())
        return {}
    except KeyError:
        pass
    variables = {} if any(map(environment.get, USER_VARIABLES)) else {"USER": f"user{os.getuid()}"}
    home = Path(environment.get("HOME") or "/nowhere")
    return variables if home.is_dir() and os.access(home, os.W_OK) else {**variables, "HOME": str(temporary_home())}


def count_compiled() -> tuple[int, int]:
    """Return the number of imported library modules in Python, and the number of them without stored byte-code.

    Each process compiles the latter, two to three times as slow as an import with byte-code.
    """
    modules = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] != "dyno"]
    specs = [spec for module in modules if (spec := getattr(module, "__dict__", {}).get("__spec__"))]
    cache_paths = [cached for spec in specs if isinstance(cached := getattr(spec, "cached", None), str)]
    return len(cache_paths), sum(not Path(path).exists() for path in cache_paths)


def keep_probes() -> None:
    """Share a C++ compiler's probes of this processor between the jobs of this process and its children."""
    os.environ[PROBES_VARIABLE] = str(cache_dir() / "probes")


def keep_byte_code() -> None:
    """Store byte-code in Dyno's cache if it can't be stored with the libraries: else every job compiles PyTorch.

    Each set of installed libraries has its folder: two versions of a file may have equal size and time.
    """
    cache_paths = [Path(spec.cached) for name in HEAVY_LIBRARIES if (spec := _find_module_spec(name)) and spec.cached]
    if all(path.exists() or (not sys.dont_write_bytecode and _can_be_written(path)) for path in cache_paths):
        return
    folder = cache_dir() / "byte-code" / _hash_packages()
    if folder.exists() or _can_be_written(folder):
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _find_module_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a foreign module finder may refuse a name
        return None


def _can_be_written(path: Path) -> bool:
    """Return whether the file can be created, together with its missing parent folders."""
    parent = next(parent for parent in path.parents if parent.exists())
    return parent.is_dir() and os.access(parent, os.W_OK)


def _hash_packages() -> str:
    """Return a hash of this interpreter's version and of all packages installed in it."""
    folders = [Path(entry) for entry in sys.path if entry.endswith("-packages") and Path(entry).is_dir()]
    info_paths = sorted(str(path) for folder in folders for path in folder.glob("*-info"))
    return hashlib.sha256("\n".join([sys.version, *info_paths]).encode()).hexdigest()[:16]


def list_cores() -> list[int]:
    """Return this process's logical processors: first one per physical core, fastest first, then the others."""
    allowed_cpus = sorted(os.sched_getaffinity(0))
    first_threads = [cpu for cpu in allowed_cpus if cpu == min(_find_siblings(cpu, allowed_cpus))]
    first_threads.sort(key=_read_capacity, reverse=True)
    return first_threads + [cpu for cpu in allowed_cpus if cpu not in first_threads]


def physical_cores() -> int:
    """Return the number of physical cores this process may keep busy: at most the whole part of `cpu_quota`."""
    return min(len(core_threads()), max(1, int(min(cpu_quota(), sys.maxsize))))


def cpu_quota() -> float:
    """Return the processors that this process's control groups let it keep busy; infinite without a limit.

    A container with `--cpus=1.5` sees every processor; more threads are stopped for part of each period.
    """
    return min(map(_read_quota, _list_control_groups()), default=math.inf)


def throttled_seconds() -> float:
    """Return the processor seconds withheld so far by control groups with a `cpu_quota`."""
    return sum(map(_read_throttled, _list_control_groups()))


def _list_control_groups() -> list[Path]:
    """Return the control groups that limit this process's processors, including their parents."""
    try:
        lines = OWN_CGROUP_FILE.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A container in its host's cgroup namespace sees its own group as the root, under another path.
        names = [Path(path.lstrip("/")), *Path(path.lstrip("/")).parents]
        groups += [CGROUPS_DIR / controllers / name for name in names]
    return groups


def _read_quota(group: Path) -> float:
    """Return the group's own limit, from control groups of version 1 or 2; infinite without one."""
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except (OSError, ValueError):  # `max`
        return math.inf


def _read_throttled(group: Path) -> float:
    fields = _read_proc_file(str(group / "cpu.stat"), " ")
    return float(fields.get("throttled_usec", 0)) / 1e6 + float(fields.get("throttled_time", 0)) / 1e9


def describe_mixed_cores() -> str:
    """Describe this process's kinds of cores if their capacities differ by over a tenth; else ""."""
    capacities = [_read_capacity(threads[0]) for threads in core_threads()]
    kinds = sorted(set(capacities), reverse=True)
    if not kinds or kinds[-1] >= SAME_CAPACITY_SHARE * kinds[0]:
        return ""
    counts = " and ".join(f"{capacities.count(kind)} at {kind / kinds[0]:.0%}" for kind in kinds)
    return (
        f"the threads run on cores of different speed ({counts} of the fastest's), and wait for the slowest; "
        f"--threads {capacities.count(kinds[0])} uses the fastest alone"
    )


def count_overheating() -> int:
    """Return how often this process's processors have lowered their clock against heat; 0 without a counter."""
    counters = (CPUS_DIR / f"cpu{cpu}/thermal_throttle/core_throttle_count" for cpu in os.sched_getaffinity(0))
    return sum(int(_first_line(str(file)) or 0) for file in counters)


def _read_capacity(cpu: int) -> int:
    return int(_first_line(str(CPUS_DIR / f"cpu{cpu}/cpu_capacity")) or 0)


def core_threads() -> list[tuple[int, ...]]:
    """Return the physical cores this process may use, each as its logical processors."""
    allowed_cpus = sorted(os.sched_getaffinity(0))
    return sorted({tuple(_find_siblings(cpu, allowed_cpus)) for cpu in allowed_cpus})


def last_cache() -> int:
    """Return the bytes of a processor's largest cache according to Linux; 0 if unknown."""
    sizes = [0]
    for file in (CPUS_DIR / "cpu0/cache").glob("index*/size"):
        try:
            sizes.append(int(file.read_text().strip().removesuffix("K")) * 1024)  # Linux always gives KiB
        except (OSError, ValueError):
            continue
    return max(sizes)


def _find_siblings(cpu: int, allowed_cpus: Container[int]) -> list[int]:
    try:
        text = (CPUS_DIR / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return [cpu]
    ranges = [part.split("-") for part in text.strip().split(",")]
    siblings = [n for r in ranges for n in range(int(r[0]), int(r[-1]) + 1)]
    return [n for n in siblings if n in allowed_cpus] or [cpu]


def pin(threads: int) -> list[int]:
    """Pin this process to a processor per thread; return the processors' numbers."""
    cpus = list_cores()[: max(1, threads)]
    os.sched_setaffinity(0, cpus)
    return cpus


CPUS_DIR = Path("/sys/devices/system/cpu")
STATISTICS_FILE = Path("/proc/stat")
SAME_CAPACITY_SHARE = 0.9  # share of the fastest core's capacity: the best cores of a kind boost higher
CGROUPS_DIR, OWN_CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def list_causes(error: BaseException, implicit: bool = False) -> list[BaseException]:
    """Return the error and its chain of causes, each once; with `implicit` also the errors being handled.

    PyTorch raises errors whose chain of causes is a cycle.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or (cause.__context__ if implicit else None)
    return causes


def raise_if_disk_full(error: BaseException, folder: Path, size: int = 0) -> None:
    """Raise an `OSError` if the folder's disk was full, which is not the fault of the failed job.

    Libraries wrap that error, rephrase it, or only report a failed stream and remove their output: so the folder must
    also have room for `size` bytes.
    """
    for cause in list_causes(error, implicit=True):
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            raise OSError(cause.errno, os.strerror(cause.errno), str(cause.filename or folder)) from error
    named_code = next((code for code in DISK_FULL if os.strerror(code) in str(error)), 0)
    if code := named_code or (_lacks_room(folder, size) if size else 0):
        raise OSError(code, os.strerror(code), str(folder)) from error


def _lacks_room(folder: Path, size: int) -> int:
    """Return the errno of a full disk when a file of that size is allocated in the folder, else 0."""
    try:
        with tempfile.TemporaryFile(dir=folder) as f:
            os.posix_fallocate(f.fileno(), 0, size)
    except OSError as e:
        return e.errno if e.errno in DISK_FULL else 0
    return 0


def can_draw(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that knows escape sequences."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


UNDER_TOOL = 0  # launcher's id for a job started by another program


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies: an orphan would disturb the next study.

    `parent` is the id of the parent process; if it died before this call, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def end_copy(*_: object) -> NoReturn:
    """End a copy of this process that the model's code forked: a job has one process."""
    os._exit(0)


def end(code: int) -> NoReturn:
    """End this process at once, without running exit handlers; buffered output is flushed first."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)  # C libraries have their own buffers
    finally:  # even if flushing fails on a full disk
        os._exit(code)


def contention_threshold(device: str) -> float:
    """Return the number of processors that other programs may keep busy before a timing has a warning.

    For a GPU it is half of the job's processors: its host has little to do, and idle processors don't slow it down.
    """
    return 0.2 if device == "cpu" else len(shared_processors()) / 2


def shared_processors() -> set[int]:
    """Return this process's processors and their siblings on the same physical cores."""
    return {n for cpu in os.sched_getaffinity(0) for n in _find_siblings(cpu, range(os.cpu_count() or 1))}


class CpuContention:
    """CPU contention since the start: processors kept busy by others, and processors withheld by control groups.

    Counted are this process's processors and their siblings; others are programs and guests of the hypervisor. The
    launcher doesn't count: its sampling of the GPU and of this process is part of every job.
    """

    def __init__(self) -> None:
        self._processors = shared_processors()
        self._last_reading: tuple[float, float, float] | None = None
        self._is_limited = cpu_quota() < math.inf
        self._overheated = count_overheating()
        self._start_interval()

    def _start_interval(self) -> None:
        self._started, self._all_at_start, self._own_at_start = (
            time.monotonic(),
            _busy_seconds(self._processors),
            _own_seconds(),
        )
        self._throttled = throttled_seconds() if self._is_limited else 0.0

    def count_during(self, blocks: Iterable[int]) -> Iterator[int]:
        """Yield the same blocks and count contention only within them: other processes run between blocks."""
        busy = throttled = span = 0.0
        for block in blocks:
            self._start_interval()
            yield block
            interval = self._measure_interval()
            busy, throttled, span = busy + interval[0], throttled + interval[1], span + interval[2]
            self._last_reading = busy, throttled, span

    def count_busy(self) -> float:
        """Return the mean number of processors kept busy by others; 0 if the system has no such figures."""
        busy, _, span = self._last_reading or self._measure_interval()
        # The system counts in ticks: over a short time the others' share may seem below 0 or above all processors.
        return min(max(0.0, busy / span), float(len(self._processors))) if span > 0 else 0.0

    def count_withheld(self) -> float:
        """Return the mean number of processors withheld from this process by a limit; 0 without a limit."""
        _, throttled, span = self._last_reading or self._measure_interval()
        return throttled / span if span > 0 else 0.0

    def count_overheated(self) -> int:
        """Return how often processors have lowered their clock against heat since the start."""
        return count_overheating() - self._overheated

    def _measure_interval(self) -> tuple[float, float, float]:
        busy = (_busy_seconds(self._processors) - self._all_at_start) - (_own_seconds() - self._own_at_start)
        throttled = throttled_seconds() - self._throttled if self._is_limited else 0.0
        return busy, throttled, time.monotonic() - self._started


def run_delay() -> float:
    """Return the total seconds that this process's threads waited for a processor; 0 if unknown (schedstat)."""
    threads = (_first_line(str(file)).split() for file in Path("/proc/self/task").glob("*/schedstat"))
    return sum(int(fields[1]) for fields in threads if len(fields) > 1) / 1e9


def _busy_seconds(processors: set[int]) -> float:
    """Return the total busy seconds of these processors so far; 0 if unknown."""
    names = {f"cpu{n}" for n in processors}
    try:
        lines = [line.split() for line in STATISTICS_FILE.read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return 0.0
    # user, nice, system, irq, softirq and steal; idle, iowait and guests (counted in user) left out.
    ticks = [int(line[i]) for line in lines if line[0] in names for i in (1, 2, 3, 6, 7, 8) if i < len(line)]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    return time.process_time() + _launcher_seconds()


def _launcher_seconds() -> float:
    """Return the processor seconds of the parent so far; 0 if unknown."""
    # Only the name, in brackets, may hold spaces.
    fields = _first_line(f"/proc/{os.getppid()}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0


def read_memory() -> int:
    """Return the resident set size of this process now, in bytes; 0 if unknown."""
    pages = _first_line("/proc/self/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def peak_memory() -> int:
    """Return the highest resident set size of this process so far, in bytes."""
    # VmHWM starts anew at exec; getrusage's maximum starts at the parent's size on Linux.
    mark = _read_proc_file("/proc/self/status").get("VmHWM", "")
    if mark:
        return int(mark.split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def find_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each distribution (`a|b`: either); absent distributions are left out."""
    installed = {}
    for name in (option for group in distributions for option in group.split("|")):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def describe(distributions: Iterable[str] = ()) -> dict[str, Any]:
    """Describe processor, memory, operating system, interpreter and the versions of the distributions."""
    info, flags = _read_proc_file("/proc/cpuinfo"), cpu_flags()
    return {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": find_versions(distributions),
    }


def cpu_flags() -> set[str]:
    """Return the processor's feature flags; empty if unknown."""
    info = _read_proc_file("/proc/cpuinfo")
    return set(info.get("flags", info.get("Features", "")).split())


NATIVE_FLAGS = {"bf16": ("avx512_bf16", "amx_bf16", "bf16"), "fp16": ("avx512_fp16", "amx_fp16", "fphp")}


def has_arithmetic(precision: str) -> bool:
    """Return whether this CPU computes in the precision; true if its features aren't listed."""
    flags = cpu_flags()
    return not flags or precision not in NATIVE_FLAGS or bool(flags & set(NATIVE_FLAGS[precision]))


def _read_proc_file(path: str, separator: str = ":") -> dict[str, str]:
    fields: dict[str, str] = {}
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return fields
    for line in lines:
        key, _, value = line.partition(separator)
        fields.setdefault(key.strip(), value.strip())
    return fields


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
