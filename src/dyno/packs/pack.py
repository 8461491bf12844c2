"""A pack: a run's records, samples and verdict in one file, and the check that the verdict follows from the samples."""

from __future__ import annotations

import getpass
import json
import math
import platform
import re
import shlex
import stat
import struct
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dyno import __version__
from dyno.formatting import counting
from dyno.results.files import read_npz, read_table
from dyno.results.run_data import RunData
from dyno.results.trial_result import PLACEMENTS, SELF_TEST, Results, load_run
from dyno.runner import self_test
from dyno.runner.run_folder import earlier
from dyno.store import check_writable, sha256_of
from dyno.study.study import Study
from dyno.worker.facts.json_values import LARGEST
from dyno.worker.record import parse_json, read_json, replacing, save_arrays, write_json, write_text
from dyno.worker.spec import UserError, shorten

FORMAT, SCHEMA = "dyno pack", 1
HEAD, VERDICT, RUN = "pack.json", "verdict.json", "run"  # members: what it is, the verdict, the folder of the run
SUFFIX = ".pack.zip"
STUDY = "study.toml"
# What the verdict is computed from; other files of a run folder are logs, and tables that can be made again.
FILES = ("environment.json", "models.json", SELF_TEST, "devices.json", "routes.json")
FOLDERS = ("trials", "truth", "peak", "idle", "anchors", "blocks", PLACEMENTS, "routes", "reference")
NAMES = ("job.json", "record.json", "samples.npz", "outputs.npz", "telemetry.npz")  # of a job
# Limits on a pack, which may come from anywhere.
MOST_BYTES, MOST_MEMBERS, MOST_DIRECTORY_BYTES, MOST_DEPTH = 1 << 30, 20_000, 4 << 20, 64
MOST_BYTES_OF = {".npz": 256 << 20, ".json": 8 << 20, ".toml": 64 << 10, "samples.npz": 32 << 20}
MOST_TEXT_BYTES = 64 << 20  # of all JSON files: as objects they take many times the memory
BLOCK = 1 << 20
END, END_BYTES, ZIP64, ZIP64_BYTES = b"PK\x05\x06", 22, b"PK\x06\x07", 20  # the last record of a zip file
MEMBER = re.compile(rf"{HEAD}|{VERDICT}|{RUN}(/[\w+=@][\w.+=@-]*)+\.(json|npz|toml)")
STRING = re.compile(r"""(?!\"{3}|'{3})(?:"(?:\\.|[^"\\\n])*"|'[^'\n]*')|#.*""")  # of TOML, or a comment
RELATIVE = 1e-9  # difference of two computations of a number on two processors
MOST_SHOWN = 5  # differences

Json = Any


# Personal names: what a stranger need not know of the machine.

ROOTS = (
    "Users Volumes bin boot data dev etc home lib lib64 media mnt opt private proc root run scratch srv sys tmp usr "
    "var work workspace"
).split()
PATHS = {"source", "path", "folder", "weights", "python", "data", "calibration", "models", "file"}  # keys with a path


# UUIDs, as of GPUs, and MAC addresses.
IDENTIFIER = re.compile(
    r"(?i)(?:GPU-|MIG-)*\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}\b"
)


class Redaction:
    """Removes folders, identifiers of devices, the user's name and those of hosts (not with `names`) from texts."""

    def __init__(self, folders: Sequence[Path], hosts: Sequence[str] = (), *, names: bool = False) -> None:
        roots = {*ROOTS, *(path.name for path in Path("/").iterdir() if path.is_dir())}
        root = "|".join(sorted(map(re.escape, roots), key=len, reverse=True))
        self.folders = sorted({f"{folder}/" for folder in folders if folder != folder.parent}, key=len, reverse=True)
        self.path = re.compile(rf"(?<![\w.])/+(?:{root})(?:/[^\s'\"`:,;()\[\]<>|]*)+")
        self.whole = re.compile(rf"((?:\w+:)?)/+(?:{root})/(?:.*/)?([^/]*)")
        self.identifiers: dict[str, str] = {}
        hidden = {getpass.getuser(): "user", Path.home().name: "user"}
        for number, host in enumerate(() if names else dict.fromkeys((platform.node(), *hosts)), 1):
            word = f"host-{number}" if number > 1 else "host"
            hidden |= {host: word} | ({} if host.replace(".", "").isdigit() else {host.partition(".")[0]: word})
        self.names = [
            (re.compile(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])"), word)
            for name, word in sorted(hidden.items(), key=lambda item: -len(item[0]))
            if name
        ]
        self.with_host = names

    def apply(self, value: Json, key: str = "") -> Json:
        """Return the value of JSON with every text in it redacted."""
        if isinstance(value, str):
            return self._redact_text(value, key)
        if isinstance(value, Mapping):
            kept = {name: item for name, item in value.items() if name != "host" or self.with_host}
            # A user may be called like a field, but a field has no slash.
            names = {name: self._redact_text(name, "") if re.search("[/:-]", name) else name for name in map(str, kept)}
            return {names[str(name)]: self.apply(item, str(name)) for name, item in kept.items()}
        if isinstance(value, (list, tuple)):
            return [self.apply(item, key) for item in value]
        return value

    def _redact_text(self, text: str, key: str) -> str:
        if key in PATHS and (match := self.whole.fullmatch(text)):
            text = match[1] + match[2]
        for folder in self.folders:
            text = text.replace(folder, "")
        text = self.path.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], text)
        for name, word in self.names:
            text = name.sub(word, text)
        return IDENTIFIER.sub(lambda it: self.identifiers.setdefault(it[0], f"id-{len(self.identifiers) + 1}"), text)


# Writing a pack.


def pack(run: str | Path, out: str | Path | None = None, *, with_names: bool = False) -> Path:
    """Write a run with its samples and its verdict into one file, and return its path (default: NAME.pack.zip).

    No folder, user or host is named in it; `with_names` keeps the host's name. Raises `UserError` for a folder that is
    not a run, or that is too large.
    """
    folder = Path(run)
    results = self_test.attach(load_run(folder))
    folders = [folder.absolute(), folder.resolve(), Path.cwd(), Path.home()]
    redaction = Redaction(folders, _list_hosts(folder), names=with_names)
    name = redaction.apply(results.name)
    file = Path(out) if out else Path(f"{name}{SUFFIX}")
    check_writable(file)
    with tempfile.TemporaryDirectory() as scratch:
        copied = Path(scratch) / RUN
        _copy_run(folder, copied, results, redaction)
        _refuse_code(copied, f"{folder}, which can't become a pack,")
        verdict = compute_verdict(copied)
        if _list_choices(verdict) != _list_choices(_describe_verdict(read_results(results), folder)):
            raise UserError(f"{folder} has another verdict without its folders' and users' names; please report it")
        write_json(Path(scratch) / VERDICT, verdict)
        write_json(Path(scratch) / HEAD, _describe_pack(copied, name, with_names))
        _write_zip(Path(scratch), file)
    return file


def _copy_run(folder: Path, copied: Path, results: Results, redaction: Redaction) -> None:
    """Copy what the verdict is computed from, redacted."""
    copied.mkdir(parents=True)
    study = earlier(folder)
    if study is None:
        raise UserError(f"{folder} has no study.toml, so it can't be repeated; run the study again")
    table = {name: value for name, value in redaction.apply(study.to_table()).items() if name != "on"}
    table["runtime"] = {name: {"python": each.get("python", "")} for name, each in study.runtime.items()}
    write_text(copied / STUDY, Study(**redaction.apply(table)).to_toml())
    for path in _list_files(folder):
        target = copied / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.suffix == ".npz":
                _copy_arrays(path, target, redaction)
            else:
                write_json(target, redaction.apply(read_json(path)))
        except ValueError as e:
            raise UserError(f"{path} is damaged ({e}); the same `dyno run` measures it again") from e
    if results.self_test:
        write_json(copied / SELF_TEST, redaction.apply(results.self_test))


def _copy_arrays(path: Path, target: Path, redaction: Redaction) -> None:
    arrays = read_npz(path)
    if texts := {name: redaction.apply(a.tolist()) for name, a in arrays.items() if a.dtype.kind == "U"}:
        save_arrays(target, {**arrays, **{name: np.asarray(text, "U") for name, text in texts.items()}})
    else:
        target.write_bytes(path.read_bytes())


def _list_hosts(folder: Path) -> list[str]:
    """Return the hosts on which blocks of the run were measured."""
    notes = (read_table(path, [], {"host": str}) or {} for path in sorted((folder / PLACEMENTS).glob("*.json")))
    return [note["host"] for note in notes if note.get("host")]


def _list_files(folder: Path) -> Iterator[Path]:
    yield from (path for name in FILES if (path := folder / name).is_file())
    for name in FOLDERS:
        for path in sorted((folder / name).rglob("*")):
            of_job = path.parent.parent.parent.name == "trials" or name in ("peak", "idle", "anchors")
            fits = path.name in NAMES if of_job else path.suffix in (".json", ".npz")
            if fits and path.is_file() and not path.is_symlink():
                yield path


def _describe_pack(run: Path, name: str, with_names: bool) -> dict[str, Json]:
    """Return what the pack is of: the run's name, versions, and the hashes of models, data and the run's files."""
    models, data = {}, {}
    for t in load_run(run):
        model, images = t.spec["model"], t.spec.get("data") or {}
        models[model["source"]] = {key: model.get(key, "") for key in ("source", "source_sha256", "weights_sha256")}
        if images.get("sha256"):
            data[images["sha256"]] = {"name": images.get("name", ""), "sha256": images["sha256"]}
    host = {"host": platform.node()} if with_names else {}
    about = {"format": FORMAT, "schema": SCHEMA, "dyno": __version__, "run": name, **host}
    return {**about, "models": [*models.values()], "data": [*data.values()], "files": _hash_files(run)}


def _hash_files(run: Path) -> dict[str, str]:
    return {path.relative_to(run).as_posix(): sha256_of(path) for path in sorted(run.rglob("*")) if path.is_file()}


def _limit(path: Path) -> int:
    return MOST_BYTES_OF.get(path.name, MOST_BYTES_OF[path.suffix])


def _write_zip(folder: Path, file: Path) -> None:
    """Write the files of the folder as a zip file whose bytes depend on their content alone."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {path: path.stat().st_size for path in paths}
    too_large = any(size > _limit(path) for path, size in sizes.items())
    texts = sum(size for path, size in sizes.items() if path.suffix != ".npz")
    if too_large or len(paths) > MOST_MEMBERS or sum(sizes.values()) > MOST_BYTES or texts > MOST_TEXT_BYTES:
        total = f"{counting(len(paths), 'file')} of {sum(sizes.values()) >> 20:,} MiB"
        raise UserError(f"the run is too large for a pack ({total}); run it with fewer images or configurations")
    with replacing(file) as f, zipfile.ZipFile(f, "w") as packed:
        for path in paths:
            about = zipfile.ZipInfo(path.relative_to(folder).as_posix(), (1980, 1, 1, 0, 0, 0))
            about.compress_type, about.create_system, about.external_attr = zipfile.ZIP_DEFLATED, 3, 0o100644 << 16
            packed.writestr(about, path.read_bytes())


# The verdict as data.


def read_results(results: Results) -> RunData:
    """Return the run with its table, and with no self-test but the stored one."""
    from dyno.report.tables import trial_table

    return trial_table.read_trials(results)


def compute_verdict(folder: Path) -> dict[str, Json]:
    """Compute the verdict of a stored run as data: decisions, sentences and the trials' rows."""
    return _describe_verdict(read_results(load_run(folder)), folder)


def _describe_verdict(run: RunData, folder: Path) -> dict[str, Json]:
    from dyno.report.export import export
    from dyno.report.tables.trial_table import TRIALS
    from dyno.report.verdict.verdict import about

    text = export([TRIALS.table(run)], "json", about=about(run))
    for name in (shlex.quote(str(folder)), str(folder)):  # a sentence names the folder in the next command
        text = text.replace(json.dumps(name, ensure_ascii=False)[1:-1], RUN.upper())
    document = parse_json(text)
    return {name: document[name] for name in ("visible", "decisions", "verdict", "rows", "notes") if name in document}


def _list_choices(verdict: Mapping[str, Json]) -> list[Json]:
    return [[each[key] for key in ("by", "certainty", "candidates")] for each in verdict["decisions"]]


# Opening a pack, which may come from anywhere.


@dataclass(frozen=True)
class OpenPack:
    """An unpacked pack: what it is of, the verdict stored in it, and the folder of its run."""

    about: dict[str, Json]
    verdict: dict[str, Json]
    run: Path


@contextmanager
def open_pack(file: str | Path) -> Iterator[OpenPack]:
    """Unpack a pack into a temporary folder for the time of the block.

    Raises `UserError` for anything that isn't a pack, is damaged, has another schema or is larger than a pack may be.
    Sizes are counted as they are read; nothing that the file says about itself is relied on.
    """
    file = Path(file)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            _check_zip(file)
            with zipfile.ZipFile(file) as packed:
                _unpack(packed, folder, file)
            about = read_json(folder / HEAD)
            _check_schema(file, about)
            verdict = read_json(folder / VERDICT)
            for path in sorted(folder.rglob("*.npz")):
                _check_zip(path)
                arrays = read_npz(path).values()  # no Python objects, and not larger than the file
                if any(max(a.shape, default=0) > max(a.size, MOST_MEMBERS) for a in arrays):
                    raise ValueError(f"{path} has an empty array of a huge shape")
            for path in sorted(folder.rglob("*.json")):
                _check_values(read_json(path))
            # A key of many parts takes the parser time by its square; Dyno writes none, and no text of many lines.
            study = STRING.sub("", (folder / RUN / STUDY).read_text(encoding="utf-8"))
            if re.search(r"['\"]|(?:\.[\w\s-]*){9}", study):
                raise ValueError(f"{STUDY} has a key or a text that Dyno doesn't write")
            _refuse_code(folder / RUN, f"{file}")
        except UserError:
            raise
        except FileNotFoundError as e:
            missing = f"it has no {Path(e.filename).name}" if Path(e.filename) != file else "there is no such file"
            raise UserError(f"{file} is not a pack: {missing}; give a file that `dyno pack` wrote") from e
        except Exception as e:  # parsers raise nearly everything on bad data
            why = shorten(str(e).replace(f"{folder}/", "")) or type(e).__name__
            raise UserError(f"{file} is a damaged pack ({why}); get it again, or write it again") from e
        yield OpenPack(about, verdict, folder / RUN)


def _check_zip(file: Path) -> None:
    """Raise `UserError` unless the file ends as a zip file with a small directory."""
    about = file.stat()
    not_pack = f"{file} is not a pack; give a file that `dyno pack` wrote"
    if not stat.S_ISREG(about.st_mode):
        raise UserError(f"{not_pack}, not a folder" if stat.S_ISDIR(about.st_mode) else not_pack)
    if about.st_size > MOST_BYTES:
        raise UserError(f"{file} is too large for a pack: {about.st_size >> 20:,} MiB, at most {MOST_BYTES >> 20:,}")
    with open(file, "rb") as f:
        begins = f.read(4)
        f.seek(max(0, about.st_size - END_BYTES - ZIP64_BYTES))
        tail = f.read()
    end = tail[-END_BYTES:]
    if begins != b"PK\x03\x04":
        raise UserError(not_pack)
    if len(end) < END_BYTES or end[:4] != END:
        raise UserError(f"{file} is a damaged pack: its end is missing; get it again, or write it again")
    count, size = struct.unpack("<HI", end[10:16])
    if count > MOST_MEMBERS or size > MOST_DIRECTORY_BYTES or tail[:4] == ZIP64:
        raise UserError(f"{file} is too large for a pack: it has more than {MOST_MEMBERS:,} files")


def _unpack(packed: zipfile.ZipFile, folder: Path, file: Path) -> None:
    members = packed.infolist()
    if len(members) > MOST_MEMBERS or len({m.filename for m in members}) < len(members):
        raise UserError(f"{file} is not a pack: it has too many files, or two of one name")
    total = texts = 0
    for member in members:
        is_link = stat.S_ISLNK(member.external_attr >> 16)
        if is_link or not MEMBER.fullmatch(member.filename) or member.flag_bits & 1:
            raise UserError(f"{file} is not a pack: it holds {shorten(member.filename)!r}, which no pack has")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(f"{file} is not a pack: {shorten(member.filename)!r} is compressed in another way")
        target, size = folder / member.filename, 0
        most = _limit(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with packed.open(member) as source, open(target, "xb") as out:
            while block := source.read(BLOCK):
                size, total = size + len(block), total + len(block)
                texts += 0 if target.suffix == ".npz" else len(block)
                if size > most or total > MOST_BYTES or texts > MOST_TEXT_BYTES:
                    raise UserError(f"{file} is too large for a pack: {shorten(member.filename)} unpacks to too much")
                out.write(block)


def _check_values(value: Json, depth: int = 0) -> None:
    """Raise a ValueError for values that Dyno doesn't write and that later steps would stumble over."""
    if depth > MOST_DEPTH:
        raise ValueError("its brackets are nested too deeply")
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise ValueError("a number is too large")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_values(item, depth + 1)


def _refuse_code(run: Path, what: str) -> None:
    """Raise `UserError` if a file of the run names a Python module as MODULE:NAME, which reading it would import."""
    study = tomllib.loads((run / STUDY).read_text(encoding="utf-8"))
    named = [*map(str, study.get("backends") or ()), str(study.get("task") or "")]
    named = [text.partition("@")[0] for text in named]
    for path in sorted(run.rglob("*.json")):
        named += _list_named(read_json(path))
    if found := next((name for name in named if ":" in name), ""):
        raise UserError(f"{what} names code in Python, {shorten(found)!r}, which isn't loaded from a pack")


def _list_named(value: Json) -> Iterator[str]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict):
        yield from (str(value[key]) for key in ("backend", "maker", "task") if key in value)
    for item in items:
        yield from _list_named(item)


def _check_schema(file: Path, about: Mapping[str, Json]) -> None:
    if about.get("format") != FORMAT:
        raise UserError(f"{file} is not a pack; give a file that `dyno pack` wrote")
    if about.get("schema") != SCHEMA:
        theirs, version = shorten(str(about.get("schema"))), shorten(str(about.get("dyno")))
        raise UserError(f"{file} is a pack of schema {theirs}, written by Dyno {version}; this Dyno reads {SCHEMA}")
    if not isinstance(about.get("files"), dict):
        raise ValueError("it has no hashes of its files")


# Checking the verdict.


@dataclass(frozen=True)
class Verification:
    """The numbers of the verdict that were computed again, and what differs: files of the run, parts of the verdict."""

    numbers: int
    differences: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if the verdict follows from the samples, else 1."""
        return 1 if self.differences else 0

    @property
    def sentences(self) -> list[str]:
        """The outcome, or the first differences."""
        if not self.differences:
            return [f"verified: {counting(self.numbers, 'number')} of the verdict follow from the samples"]
        more = len(self.differences) - MOST_SHOWN
        shown = [*self.differences[:MOST_SHOWN], *([f"{more} more"] if more > 0 else [])]
        return [f"not verified: {counting(len(self.differences), 'difference')}", *shown]


def verify(file: str | Path) -> Verification:
    """Compute the verdict of a pack again from the samples in it, and compare it with the one stored in it.

    Raises `UserError` for a file that is no pack, or can't be read. See `open_pack`.
    """
    with open_pack(file) as opened:
        return verify_opened(opened, Path(file))


def verify_opened(opened: OpenPack, file: Path) -> Verification:
    """Verify a pack that is open: see `verify`."""
    try:
        computed = compute_verdict(opened.run)
    except UserError as e:
        why = str(e).replace(f"{opened.run}/", "").replace(str(opened.run), "the run")
        raise UserError(f"{file} is a damaged pack: {why}") from e
    except Exception as e:  # its values may be anything
        raise UserError(f"{file} is a damaged pack: no verdict can be computed from it ({type(e).__name__})") from e
    computed = json.loads(json.dumps(computed))
    packed, found = opened.about["files"], _hash_files(opened.run)
    changed = [f"{name} is not the file that was packed" for name in sorted({*packed, *found})
               if packed.get(name) != found.get(name)]  # fmt: skip
    return Verification(_count_numbers(computed), (*changed, *_list_differences(opened.verdict, computed)))


def _count_numbers(value: Json) -> int:
    if isinstance(value, (dict, list)):
        return sum(map(_count_numbers, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list_differences(stored: Json, computed: Json, place: str = "") -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(computed, dict):
        for key in [*computed, *(key for key in stored if key not in computed)]:
            yield from _list_differences(stored.get(key), computed.get(key), f"{place}.{key}" if place else key)
    elif isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        for number, (a, b) in enumerate(zip(stored, computed, strict=True)):
            yield from _list_differences(a, b, f"{place}[{number}]")
    elif not _is_same(stored, computed):
        shown = [shorten(json.dumps(value, ensure_ascii=False)) for value in (stored, computed)]
        yield f"{place} is {shown[0]}, but the samples give {shown[1]}"


def _is_same(a: Json, b: Json) -> bool:
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))
    return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=0.0) if numbers else type(a) is type(b) and a == b
