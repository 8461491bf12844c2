"""Test processes forked from one process with the libraries imported.

A Dyno job is a separate process that imports PyTorch or an engine, which takes two to ten seconds.
Under the fixture `preloaded`, jobs and commands are forked from a server, `python preloaded.py SOCKET`; they still have
a separate environment, folder and exit code. Tests of how processes start, are isolated, watched and killed, and of
what they import, start real processes without the fixture.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Without ultralytics: importing it changes PyTorch and NumPy for the whole process.
LIBRARIES = (
    "numpy", "pandas", "scipy.stats", "scipy.special", "sklearn.datasets", "PIL.Image", "matplotlib.figure",
    "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "jinja2", "rich.progress",
    "torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.onnx._internal.exporter._core",
    "torch.utils.flop_counter", "torchvision", "timm", "onnx", "onnxscript", "onnxruntime", "onnxruntime.quantization",
    "openvino", "av", "cv2", "dyno.cli.app", "dyno.cli.commands", "dyno.report.report", "dyno.worker.main",
    "dyno.worker.jobs.inspect_model", "dyno.worker.jobs.stress", "dyno.worker.video.alone",
)  # fmt: skip
PROGRAM = "-m", "dyno"
FORKS = "DYNO_TEST_FORKS"  # environment variable of forking tests: the socket
RUNNING = "DYNO_TEST_SERVER"  # environment variable under `one_server.py`: the socket of a running server
UNREPORTED = "DYNO_TEST_UNREPORTED"  # environment variable of commands that write reports without a page
MAX_FILES = 16  # inherited by a process: its output, its errors, and pipes to the conductor
MIN_MEMORY = 10_000_000  # bytes of a process
SIDES, PEAK_S = (128, 256), 0.1  # sides of the matrices for a CPU's peak, and seconds per measurement
ALONE, CHUNK = 24, 6  # frames for a video's stages measured alone, and frames per chunk
HUGE, COLLAPSE = 1 << 21, 25  # bytes of a large page, and Linux's MADV_COLLAPSE
PATIENCE_S = 900.0  # for a server's start
HIGH = 512  # file descriptors from here on are free


class Server:
    """Fork server: start it, request processes, `stop` it. It ends with its parent process.

    `libraries` are imported first, `env` extends this process's environment, `python` runs the server and its forks.
    With `wait=False` the caller must wait until the server is `ready`.
    """

    def __init__(
        self, libraries: Sequence[str] = LIBRARIES, env: Mapping[str, str] | None = None, python: object = "",
        wait: bool = True,
    ) -> None:  # fmt: skip
        self._folder = tempfile.TemporaryDirectory(prefix="dyno-", dir="/tmp")  # socket paths must be short
        self.path = str(Path(self._folder.name) / "socket")
        words = [str(python) or sys.executable, __file__, self.path, *libraries]
        from dyno.worker.system import SILENCING_VARIABLES  # for libraries that look up hosts on import

        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.env = {**os.environ, **SILENCING_VARIABLES, **threads, **(env or {})}
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.env)
        if wait:
            assert self._process.stdout is not None and self._process.stdout.readline() == b"ready\n"

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def ready(path: str) -> str:
    """Return the path of a server's socket once it answers."""
    until = time.monotonic() + PATIENCE_S
    while not Path(f"{path}.ready").exists():
        if time.monotonic() > until:
            raise RuntimeError("the server that processes are forked from did not start; its errors stand above")
        time.sleep(0.1)
    return path


class Forked:
    """Counterpart of `subprocess.Popen`, as far as the launcher needs it, for a forked process."""

    def __init__(
        self,
        path: str,
        words: Sequence[str],
        cwd: str,
        env: Mapping[str, str],
        output: tuple[int, int],
        inherited: Sequence[int] = (),
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        request = {"words": [*words], "cwd": cwd, "env": {**env}, "path": path, "inherited": [*inherited],
                   "cores": [*os.sched_getaffinity(0)]}  # fmt: skip
        asked = json.dumps(request).encode()
        socket.send_fds(self._socket, [len(asked).to_bytes(8, "big")], [*output, *inherited])
        self._socket.sendall(asked)
        self._said = self._socket.makefile("r")
        self.pid = int(self._said.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired("forked", timeout or 0)
            self.returncode = int(self._said.readline() or -signal.SIGKILL)
            self._said.close()
            self._socket.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode


class Processes:
    """Replacement of `subprocess` in `dyno.jobs.launcher`: forks jobs for this interpreter, starts any others."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self, path: str) -> None:
        self._path = path

    def Popen(self, words: Sequence[str], **how: Any) -> Any:  # noqa: N802
        if words[0] != sys.executable:
            return subprocess.Popen(words, **how)
        output = how["stdout"].fileno(), how["stderr"].fileno()
        return Forked(self._path, words[1:], str(Path.cwd()), how["env"], output, how.get("pass_fds", ()))


def command(
    path: str, words: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float, program: Sequence[str] = PROGRAM
) -> Any:
    """Run the command line in a forked process; return a `CompletedProcess` with captured text.

    `program`: Python's arguments in front of `words`: `-m dyno`, or `-c` and code.
    """
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        code = Forked(path, [*program, *words], str(cwd), env, (out.fileno(), err.fileno())).wait(timeout)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess([*words], code, *said)


def unflushed(_: int) -> None:
    """Replace `os.fsync` and skip the disk: syncing only guards against a crash of the machine."""


def tables_only(runs: Sequence[Any], out: Path) -> Path:
    """Replace `write_report` in `dyno.report.report`: write the report's tables without charts and page."""
    from dyno.report import report, tables

    report.write_tables(runs, [tables.make_tables(run, "all") for run in runs], Path(out))
    return Path(out) / "report.html"


def _serve(path: str, libraries: Sequence[str]) -> None:
    os.fsync = unflushed
    if "openvino" in libraries:  # as in Dyno's own imports of it
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    for name in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _warm()
    _share()
    own, ends = os.pipe()
    os.set_blocking(ends, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ends, warn_on_full_buffer=False)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(64)
    Path(f"{path}.ready").touch()
    print("ready", flush=True)
    running: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    for what in (server, own, sys.stdin):
        selector.register(what, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for pid in running:
                    _kill(pid)
                return
            if key.fileobj is server:
                client, _ = server.accept()
                running[_fork(client, server)] = client
                selector.register(client, selectors.EVENT_READ)
            elif key.fileobj == own:
                os.read(own, 4096)
                _reap(running, selector)
            elif key.fileobj in running.values():  # the client is gone: kill its process unless it has just ended
                selector.unregister(key.fileobj)
                _kill(next(pid for pid, client in running.items() if client is key.fileobj))


def _warm() -> None:
    """Compute once what every process would find out again: the list of backends, inductor's vector instructions, and
    the first export's work in PyTorch's exporter."""
    from dyno.worker import registry

    assert registry.list_backends() and registry.list_formats() and registry.get_maker("onnx_export")
    if peak := sys.modules.get("dyno.worker.jobs.stress"):  # else the CPU's peak takes a quarter of a minute
        peak.PRODUCT_SIDES["cpu"] = SIDES
        peak.measure_peak.__defaults__ = PEAK_S, *peak.measure_peak.__defaults__[1:]
        peak.copy.__defaults__ = (PEAK_S,)
    if alone := sys.modules.get("dyno.worker.video.alone"):
        alone.TIMED_FRAMES, alone.CHUNK_FRAMES = ALONE, CHUNK
    if compiler := sys.modules.get("torch._inductor.cpu_vec_isa"):
        # Inductor starts a Python with PyTorch per vector instruction set, to test loading the compiled library.
        compiler.subprocess = types.SimpleNamespace(check_call=_load, DEVNULL=subprocess.DEVNULL)
        with contextlib.suppress(Exception):
            compiler.valid_vec_isa_list()
        compiler.subprocess = subprocess
    if "torch.onnx._internal.exporter._core" in sys.modules and "onnxscript" in sys.modules:
        remember_operators()
        with contextlib.suppress(Exception):
            _export()


def _share() -> None:
    """Make forks cheap: freeze loaded objects for the garbage collector, skip their finalizers at a forked process's
    exit, and use large memory pages where the system has them."""
    gc.collect()
    gc.freeze()
    for each in list(getattr(weakref.finalize, "_registry", ())):
        each.atexit = False
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None or not Path("/proc/self/maps").exists():
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, file, *name = line.split()
        if rights != "rw-p" or file != "0" or (name and name[0].startswith("[stack")):
            continue
        start, end = (int(each, 16) for each in place.split("-"))
        for page in range(-(-start // HUGE) * HUGE, end // HUGE * HUGE, HUGE):
            advise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE), COLLAPSE)  # errors of older kernels are ignored


def _load(words: Sequence[str], **_: object) -> None:
    """Load the library named in the last argument's code, in this process."""
    ctypes.CDLL(words[-1].split('"')[1])


def remember_operators() -> None:
    """Cache the operator table of PyTorch's exporter, which otherwise parses their source on each export."""
    with contextlib.suppress(ImportError, AttributeError):  # not a public interface of PyTorch
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        if not hasattr(ONNXRegistry.from_torchlib, "cache_info"):
            ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))


def _export() -> None:
    import torch
    from torch import nn

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    free = ({0: torch.export.Dim("batch")},)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        example = (torch.zeros(2, 3, 8, 8),)
        torch.onnx.export(net.eval(), example, io.BytesIO(), dynamo=True, opset_version=18, dynamic_shapes=free)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _reap(running: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if (client := running.pop(pid, None)) is None:
            continue
        with contextlib.suppress(KeyError):
            selector.unregister(client)
        with contextlib.suppress(OSError):
            client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        client.close()


def _fork(client: socket.socket, server: socket.socket) -> int:
    length, files, _, _ = socket.recv_fds(client, 8, MAX_FILES)
    count, told = int.from_bytes(length, "big"), b""
    while len(told) < count and (more := client.recv(count - len(told))):  # else the client is gone
        told += more
    if pid := os.fork():
        for file in files:
            os.close(file)
        with contextlib.suppress(BrokenPipeError):
            client.sendall(b"%d\n" % pid)
        return pid
    code = 1
    try:
        server.close()
        client.close()
        code = _become(json.loads(told), files)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become(asked: dict[str, Any], files: Sequence[int]) -> int:
    """Turn this forked process into `python WORDS`, with that environment, folder and files; return the exit code."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    # By way of high numbers, as a received file's number may be another file's target.
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for file in (nothing, *files)]
    for file in (nothing, *files):
        os.close(file)
    for file, number in zip(high, (0, 1, 2, *asked["inherited"]), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None  # recomputed from this environment's TMPDIR
    os.sched_setaffinity(0, asked["cores"])  # the CPU affinity of the client's thread
    faulthandler.enable()
    sys.path[:0] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", *sys.path)]
    kind, text, *words = asked["words"]
    if kind in ("-c", "-m"):
        return _command("from dyno.cli import app\napp.main()" if kind == "-m" else text, words, asked["path"])
    return _job(kind, text)


def _job(main: str, folder: str) -> int:
    from dyno.worker import system
    from dyno.worker.main import main as work

    sys.argv = [main, folder]
    os.environ["DYNO_LAUNCHER"] = str(os.getppid())
    # Minus the memory shared by all forks: peaks bound the number of parallel processes.
    peak, shared = system.peak_memory, system.peak_memory()
    system.peak_memory = lambda: max(MIN_MEMORY, peak() - shared)
    code = work(Path(folder))
    system.end(code)
    return code


def _command(code: str, words: Sequence[str], path: str) -> int:
    import dyno.jobs.launcher

    dyno.jobs.launcher.subprocess = Processes(path)
    if os.environ.pop(UNREPORTED, ""):
        from dyno.report import report

        report.write_report = tables_only
    sys.argv = ["dyno", *words]
    status = 0
    try:
        exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    atexit._run_exitfuncs()
    return status


if __name__ == "__main__":
    sys.path.pop(0)  # drop this folder, which Python adds for a script started by its path
    _serve(sys.argv[1], sys.argv[2:])
