"""Storage: run folders with their lock, and the cache of built files, keyed by everything that shaped them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from dyno.jobs.nvml import find_gpu
from dyno.worker import registry, system
from dyno.worker.nets.local_code import list_shards
from dyno.worker.record import LOCK_FILE, Record, lock, read_json, read_record, write_json, write_record
from dyno.worker.spec import Artifact, Job, Recipe, Runtime, Trial, Unfinished, UserError, digest, to_json

cache_dir = system.cache_dir
SLURM_DIR = "slurm"  # messages between Slurm jobs and the host that started them, during a study
# Dyno's files and folders in a run folder; all others are the user's.
RUN_FOLDERS = (
    "trials", "archive", "charts", "tables", "truth", "peak", "idle", "blocks", "anchors", "placements", "routes",
    "reference", "explained", "stress", "tensorboard", SLURM_DIR,
)  # fmt: skip
RUN_FILES = (
    "study.toml", "environment.json", "models.json", "self-test.json", "devices.json", "routes.json",
    "fewer-rounds.json", "serve.json", "video.json", "results.csv", "tables.md", "report.html", LOCK_FILE,
)  # fmt: skip
# Files of a folder before anything was planned.
UNMEASURED_FILES = {"serve.json", "video.json", "application.json", "application.npz", LOCK_FILE}
# files of a folder with an interrupted study
UNFINISHED_FILES = {*UNMEASURED_FILES, "trials", "stress", "data", SLURM_DIR, "study.toml.part"}
TRAINING_FILE, REPORT_FILE = "training.json", "report.html"
REPORT_TITLE = b"<title>Dyno: "  # near the beginning of each report
# Prefixes of round folders: selection, confirmation after the selection, companion of interleaved trials, sustained
# load.
ROUND, CONFIRMATION, COMPANION, SUSTAINED = "r", "c", "t", "s"


def good_record(folder: Path) -> Record | None:
    """Return the record of a successful job; None without one, or if it is damaged or from another Dyno."""
    try:
        record = read_record(folder)
    except UserError:
        return None
    return record if record is not None and record.status == "ok" else None


def find_remembered(kind: str, key: str) -> Path:
    """Return the cache folder of a job of this kind, by its key: see `remember`."""
    return cache_dir() / kind / key


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder; raise a single `OSError` on a full disk, for which shutil lists an error per file."""
    try:
        shutil.copytree(source, target)
    except shutil.Error as e:
        system.raise_if_disk_full(e, target)
        raise


def remember(job: Path, kind: str, key: str) -> None:
    """Store the folder of a successful job in the cache, whole or not at all."""
    target = find_remembered(kind, key)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{key}.", dir=target.parent, ignore_cleanup_errors=True) as scratch:
        copy_folder(job, Path(scratch) / key)
        with lock(target.parent / ".lock"):
            shutil.rmtree(target, ignore_errors=True)
            (Path(scratch) / key).rename(target)


class Run:
    """Folder of one study: its study file, and a job folder per round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def round_folder(self, trial: Trial, round_index: int, kind: str = ROUND) -> Path:
        """Return the folder of this round of the trial; `kind` is the prefix of its name."""
        return self.folder / "trials" / trial.id / f"{kind}{round_index}"

    def record(self, trial: Trial, round_index: int, kind: str = ROUND) -> Record | None:
        """Return the stored record of this round; None if it was not finished."""
        return read_record(self.round_folder(trial, round_index, kind))

    def create_round(self, trial: Trial, round_index: int, kind: str = ROUND) -> Path:
        """Create an empty folder for this round; remove files of an interrupted job."""
        folder = self.round_folder(trial, round_index, kind)
        if not self.folder.is_dir():  # a new folder would hold only a part of the study
            raise self._make_error()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def store(self, trial: Trial, round_index: int, record: Record, kind: str = ROUND) -> None:
        """Store a record that no job wrote (a refused trial, a file that could not be made)."""
        folder = self.create_round(trial, round_index, kind)
        write_json(folder / "job.json", to_json(Job("run", trial.runtime, trial, round_index)))
        write_record(folder, replace(record, trial=trial.id, round=round_index))

    @contextmanager
    def hold_lock(self, *, is_removal: bool = False) -> Iterator[None]:
        """Lock the folder for one study, refusing a second; raise `Unfinished` if the folder was removed meanwhile."""

        def raise_busy(owner: str) -> None:
            advice = "wait for it" if is_removal else "wait for it or give another --out"
            raise UserError(f"{self.folder} is in use by another dyno (process {owner}); {advice}")

        with lock(self.folder / LOCK_FILE, raise_busy):
            lock_stat = (self.folder / LOCK_FILE).stat()
            try:
                yield
            except (OSError, UserError) as e:  # reading a removed run raises `UserError` too
                if self._is_there(lock_stat):
                    raise
                raise self._make_error() from e
            if not is_removal and not self._is_there(lock_stat):
                raise self._make_error()

    def _is_there(self, lock_stat: os.stat_result) -> bool:
        """Return whether the folder is still the one that was locked."""
        try:
            return os.path.samestat(lock_stat, (self.folder / LOCK_FILE).stat())
        except OSError:
            return False

    def _make_error(self) -> Unfinished:
        return Unfinished(
            f"{self.folder} was removed or replaced while it was measured, so its contents are lost; run again"
        )


def is_run(folder: Path) -> bool:
    """Return whether a study was measured in the folder, or begun."""
    return (folder / "study.toml").is_file() and (folder / "trials").is_dir()


def check_own(folder: Path) -> None:
    """Raise `UserError` for a folder with files that Dyno did not write, as some may have the names of Dyno's.

    Dyno's folders are those of runs, trainings and reports, and those just begun by a killed command.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not names or is_run(folder) or _is_training(folder) or _is_report(folder):
        return
    if names <= UNFINISHED_FILES and LOCK_FILE in names and _is_lock(folder / LOCK_FILE):
        return
    name_list = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
    raise UserError(
        f"{folder} holds files that Dyno did not write ({name_list}); give a new or an empty folder with --out"
    )


def _is_training(folder: Path) -> bool:
    try:
        return {"status", "model", "settings"} <= read_json(folder / TRAINING_FILE).keys()
    except (OSError, ValueError):
        return False


def _is_report(folder: Path) -> bool:
    try:
        with open(folder / REPORT_FILE, "rb") as f:
            return REPORT_TITLE in f.read(2000)
    except OSError:
        return False


def _is_lock(path: Path) -> bool:
    """Return whether the file is a lock of Dyno's: it has a process id, or is empty if the process was killed first."""
    if path.is_symlink() or not path.is_file():
        return False
    content = path.read_bytes()[:20].strip()
    return content.isdigit() or not content


@contextmanager
def guard_start(folder: Path) -> Iterator[None]:
    """Guard the start of work in a folder during the `with` block; refuse a folder with other files.

    If the block raises `UserError`, a newly made folder is removed, so that a mistyped command leaves nothing.
    """
    check_own(folder)
    is_new = not folder.exists()
    try:
        yield
    except UserError:
        if is_new and folder.is_dir() and {path.name for path in folder.iterdir()} <= UNMEASURED_FILES:
            shutil.rmtree(folder)
        raise


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file with its companions: an OpenVINO .xml's .bin, a graph's or an index's weights."""
    hasher, kind = hashlib.sha256(), registry.format_of(path)
    for file in (path, *(kind.companions(path) if kind else list_shards(path))):
        if file.is_file():
            with open(file, "rb") as f:
                while block := f.read(1 << 20):
                    hasher.update(block)
    return hasher.hexdigest()


def beside_its_parts(path: Path, sha256: str) -> Path:
    """Return the file; if it or a companion file is a link, return a copy of all of them in the cache.

    Engines look for companion files next to the target of a link, or refuse links; onnx refuses hard links too.
    """
    kind = registry.format_of(path)
    files = [path, *(kind.companions(path) if kind else ())]
    names = [os.path.relpath(file, path.parent) for file in files]
    has_links = len(files) > 1 and any(file.is_symlink() for file in files) and all(file.is_file() for file in files)
    if not has_links or any(".." in Path(name).parts for name in names):
        return path
    folder = cache_dir() / "linked" / sha256[:24]
    for file, name in zip(files, names, strict=True):
        source, duplicate = file.resolve(), folder / name
        if duplicate.exists() and _is_like(duplicate, source):
            continue
        duplicate.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=duplicate.parent) as scratch:
            shutil.copy2(source, scratch_file := Path(scratch) / duplicate.name)
            scratch_file.replace(duplicate)
    return folder / path.name


def _is_like(duplicate: Path, source: Path) -> bool:
    """Return whether `duplicate` is an unchanged copy of the file, by its size and time."""
    return all(getattr(duplicate.stat(), key) == getattr(source.stat(), key) for key in ("st_size", "st_mtime_ns"))


def check_writable(path: Path, *, parents: bool = False) -> None:
    """Raise `UserError` if no file can be created there; with `parents`, its folders may be missing.

    It is tested with a temporary file, because permissions alone don't decide.
    """
    folder = path.absolute().parent
    while parents and not folder.exists():
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise UserError(f"{path} can't be written ({e.strerror}); give a file in another folder") from e
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file to save to")


def copy(source: Path, out: Path) -> None:
    """Copy a file with its companions to `out`, whole or not at all: a failure keeps earlier files."""
    out.parent.mkdir(parents=True, exist_ok=True)
    kind = registry.format_of(source)
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=out.parent) as scratch:
            scratch_file = Path(scratch) / out.name
            kind.copy(source, scratch_file) if kind else shutil.copyfile(source, scratch_file)
            for file in scratch_file.parent.iterdir():
                file.replace(out.with_name(file.name))
    except OSError as e:
        e.filename = str(out) if source.exists() else str(source)  # else a full disk would be reported for the source
        raise


def code_file(module: str) -> Path | None:
    """Return a module's own file, or None; its parent packages are imported, but not the module."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


def module_sha256(module: str) -> str:
    """Return the sha256 of a module's own file; "" without one."""
    file = code_file(module)
    return sha256_of(file) if file else ""


def find_versions(runtime: Runtime, distributions: tuple[str, ...]) -> dict[str, str]:
    """Return the installed version of each distribution (`a|b`: of either) in the Python of the runtime's jobs."""
    if not runtime.python and not runtime.env:
        return system.find_versions(distributions)
    return dict(_versions_there(runtime.python, tuple(sorted(runtime.env.items())), distributions))


@lru_cache(maxsize=64)
def _versions_there(
    python: str, env: tuple[tuple[str, str], ...], distributions: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    code = (  # -c puts the current folder first on the path, where a file may shadow an import
        "import sys\nif sys.path[0]=='': del sys.path[0]\n"
        "import json\nfrom importlib import metadata as m\nfound={}\nfor n in sys.argv[1:]:\n"
        " try: found[n]=m.version(n)\n except m.PackageNotFoundError: pass\nprint(json.dumps(found))"
    )
    # Our PYTHONPATH would show another interpreter our distributions, which its jobs don't see.
    hidden_variables = system.PYTHON_VARIABLES if python else ()
    environment = {name: value for name, value in os.environ.items() if name not in hidden_variables}
    names = [name for alternatives in distributions for name in alternatives.split("|")]
    try:
        process = subprocess.run(
            [python or sys.executable, "-c", code, *names],
            env={**environment, **dict(env)}, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        return tuple(json.loads(process.stdout).items())
    except subprocess.CalledProcessError as e:
        reason = (e.stderr.strip().splitlines() or [f"exit code {e.returncode}"])[-1]
        raise UserError(f"the interpreter {python} can't be used: {reason}") from e
    except (OSError, subprocess.TimeoutExpired, ValueError) as e:
        raise UserError(f"the interpreter {python} can't be used: it is not Python, or does not answer") from e


@lru_cache(maxsize=8)
def gpu_identity(device: str) -> str:
    """Return the GPU's model and driver, on which built engines depend; "" if NVML has no such GPU."""
    gpu = find_gpu(device, os.environ)
    if gpu is None:
        return ""
    try:
        return f"{gpu.name}, driver {gpu.driver}"
    finally:
        gpu.close()


@lru_cache(maxsize=8)
def worker_code_sha256(*plugin_modules: str) -> str:
    """Return the sha256 of the worker's source, which draws weights, exports, converts and builds.

    `plugin_modules` are modules of plug-ins: their own files count as well, but not their imports.
    """
    hasher = hashlib.sha256()
    folder = Path(system.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        hasher.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    for module in plugin_modules:
        hasher.update(f"{module} {module_sha256(module)}\n".encode())
    return hasher.hexdigest()


def list_plugin_modules(*objects: object) -> list[str]:
    """Return the modules of the objects that come from a plug-in."""
    modules = {type(each).__module__ for each in objects}
    return sorted(module for module in modules if not module.startswith("dyno."))


def _at_any_threads(recipe: Recipe) -> Recipe:
    """Return the recipe without its and its parents' threads: making a file uses all cores, unlike its engine."""
    parent = _at_any_threads(recipe.parent) if recipe.parent else None
    return replace(recipe, runtime=replace(recipe.runtime, threads=0), parent=parent)


class Cache:
    """Cache of made files by everything that shaped them: recipe, weights, data, code, versions, processor, GPU."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or cache_dir()) / "artifacts"
        self.timing = (folder or cache_dir()) / "timing"  # kernel timings kept by builders

    def make_key(self, recipe: Recipe) -> str:
        """Return the hash of recipe, makers' code, libraries' versions, PyTorch's kernels, and the processor or GPU.

        Makers of parents count too, as they shape the file as well.
        """
        device, chain = recipe.runtime.device, recipe.chain[::-1]
        makers = [registry.get_maker(each.maker) for each in chain]
        processor = [gpu_identity(device)] if device != "cpu" else system.describe()["cpu_flags"]
        kernels = os.environ.get("ATEN_CPU_CAPABILITY", "")  # PyTorch's kernels differ in their random weights
        key_data = {
            "recipe": digest(_at_any_threads(recipe)),
            "makers": worker_code_sha256(*list_plugin_modules(*makers)),
            "versions": [
                find_versions(each.runtime, maker.requires) for each, maker in zip(chain, makers, strict=True)
            ],
            "machine": [platform.machine(), kernels, *processor],
        }
        return hashlib.sha256(json.dumps(key_data, sort_keys=True).encode()).hexdigest()[:24]

    def has(self, key: str) -> bool:
        """Return whether a file is stored under this key, without reading it."""
        return (self.folder / key).is_dir()

    def find(self, key: str) -> tuple[Artifact | None, str]:
        """Return the file stored under this key and "", or None and the reason: "" (never built) or the fault."""
        try:
            record = read_record(self.folder / key)
        except UserError:
            return None, "the record in the cache is damaged"
        if record is None or record.artifact is None:
            return None, ""
        artifact = record.artifact
        path = self.folder / key / artifact.path if not Path(artifact.path).is_absolute() else Path(artifact.path)
        if not path.is_file():
            return None, f"{path.name} is missing from the cache"
        if sha256_of(path) != artifact.sha256:
            return None, f"{path.name} in the cache was changed or cut short after it was built"
        return replace(artifact, path=str(path)), ""

    @contextmanager
    def making(self, key: str) -> Iterator[Path]:
        """Hold a folder for making the file; it joins the cache if the block ends with a good record in it."""
        with self._hold_scratch(key) as scratch:
            folder = scratch / key
            folder.mkdir()
            yield folder
            record = read_record(folder)
            if record is None or record.status != "ok" or record.artifact is None:
                return
            write_record(folder, replace(record, artifact=_make_relative(record.artifact, folder)))
            if self.find(key)[0] is None:  # another study may have made it meanwhile, and be reading it
                shutil.rmtree(self.folder / key, ignore_errors=True)
                folder.rename(self.folder / key)

    @contextmanager
    def _hold_scratch(self, key: str) -> Iterator[Path]:
        """Hold a temporary folder during the `with` block; stale folders of killed processes are removed first."""
        with ExitStack() as stack:
            with lock(self.folder / ".lock"):  # so that no folder is removed before its maker locks it
                for leftover in self.folder.glob(".*.*"):
                    with suppress(UserError, OSError), lock(leftover / LOCK_FILE, _raise_held):
                        shutil.rmtree(leftover, ignore_errors=True)
                directory = tempfile.TemporaryDirectory(prefix=f".{key}.", dir=self.folder, ignore_cleanup_errors=True)
                scratch = Path(stack.enter_context(directory))
                stack.enter_context(lock(scratch / LOCK_FILE, _raise_held))
            yield scratch


def _raise_held(owner: str) -> None:
    raise UserError(f"process {owner} holds it")


def _make_relative(artifact: Artifact, folder: Path) -> Artifact:
    path = Path(artifact.path)
    is_inside = path.is_relative_to(folder) or path.is_relative_to(folder.resolve())
    return replace(artifact, path=path.name) if is_inside else artifact
