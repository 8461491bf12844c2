"""Writing of packs: a run's records, samples and verdict in one file that names no folder, user or host."""

from __future__ import annotations

import getpass
import platform
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dyno import __version__
from dyno.formatting import format_count
from dyno.packs import opening
from dyno.packs.card import PACK_SUFFIX, card_paths, write_card
from dyno.packs.opening import HEAD_MEMBER, RUN_MEMBER, STUDY_FILE, VERDICT_MEMBER
from dyno.packs.verification import describe_verdict, hash_files, read_results
from dyno.results.files import read_npz, read_table
from dyno.results.notes import MODELS_FILE, NOTE_TYPES, PLACEMENTS_DIR
from dyno.results.trial_result import SELF_TEST_FILE, Results, load_run
from dyno.runner import self_test
from dyno.runner.run_folder import read_earlier
from dyno.store import check_writable
from dyno.study.study import Study
from dyno.worker.option_values import check_types
from dyno.worker.record import read_json, replace_file, save_arrays, write_json, write_text
from dyno.worker.spec import UserError, to_json

# Files and folders behind the verdict; others in a run folder are logs, or tables that can be made again.
PACKED_FILES = ("environment.json", MODELS_FILE, SELF_TEST_FILE, *NOTE_TYPES)
PACKED_FOLDERS = ("trials", "truth", "peak", "idle", "anchors", "blocks", PLACEMENTS_DIR, "routes", "reference")
JOB_FILES = ("job.json", "record.json", "samples.npz", "outputs.npz", "telemetry.npz")  # files of a job
# Redaction of private names and paths.
HIDDEN_ROOTS = (
    "Users Volumes bin boot data dev etc home lib lib64 media mnt opt private proc root run scratch srv sys tmp usr "
    "var work workspace"
).split()
# keys with a path as value
PATH_KEYS = {"source", "path", "folder", "weights", "python", "data", "calibration", "models", "file"}
# UUIDs, such as GPUs', and MAC addresses.
IDENTIFIER = re.compile(
    r"(?i)(?:GPU-|MIG-)*\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}\b"
)


class Redaction:
    """Redaction of folders, device identifiers, the user's name and hosts' names (unless `names`) in texts."""

    def __init__(self, folders: Sequence[Path], hosts: Sequence[str] = (), *, with_names: bool = False) -> None:
        roots = {*HIDDEN_ROOTS, *(path.name for path in Path("/").iterdir() if path.is_dir())}
        root = "|".join(sorted(map(re.escape, roots), key=len, reverse=True))
        self.folders = sorted({f"{folder}/" for folder in folders if folder != folder.parent}, key=len, reverse=True)
        self.path = re.compile(rf"(?<![\w.])/+(?:{root})(?:/[^\s'\"`:,;()\[\]<>|]*)+")
        self.full_path = re.compile(rf"((?:\w+:)?)/+(?:{root})/(?:.*/)?([^/]*)")
        self.identifiers: dict[str, str] = {}
        aliases = {getpass.getuser(): "user", Path.home().name: "user"}
        for number, host in enumerate(() if with_names else dict.fromkeys((platform.node(), *hosts)), 1):
            alias = f"host-{number}" if number > 1 else "host"
            aliases |= {host: alias} | ({} if host.replace(".", "").isdigit() else {host.partition(".")[0]: alias})
        self.names = [
            (re.compile(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])"), alias)
            for name, alias in sorted(aliases.items(), key=lambda item: -len(item[0]))
            if name
        ]
        self.with_host = with_names

    def redact_value(self, value: Any, key: str = "") -> Any:
        """Return a JSON value with all its texts redacted."""
        if isinstance(value, str):
            return self._redact_text(value, key)
        if isinstance(value, Mapping):
            kept = {name: item for name, item in value.items() if name != "host" or self.with_host}
            # Fields are kept, as a user's name may equal one; but fields have no slash, colon or dash.
            names = {name: self._redact_text(name, "") if re.search("[/:-]", name) else name for name in map(str, kept)}
            return {names[str(name)]: self.redact_value(item, str(name)) for name, item in kept.items()}
        if isinstance(value, (list, tuple)):
            return [self.redact_value(item, key) for item in value]
        return value

    def _redact_text(self, text: str, key: str) -> str:
        if key in PATH_KEYS and (match := self.full_path.fullmatch(text)):
            text = match[1] + match[2]
        for folder in self.folders:
            text = text.replace(folder, "")
        text = self.path.sub(lambda m: m[0].rstrip("/").rpartition("/")[2], text)
        for name, alias in self.names:
            text = name.sub(alias, text)
        return IDENTIFIER.sub(lambda m: self.identifiers.setdefault(m[0], f"id-{len(self.identifiers) + 1}"), text)


def pack(run: str | Path, out: str | Path | None = None, *, with_names: bool = False, card: bool = False) -> Path:
    """Write a run with its samples and its verdict into one file, and return its path (default: NAME.pack.zip).

    It names no folder, user or host; `with_names` keeps the host's name. `card` also writes a card in Markdown and a
    badge next to it, `NAME.card.md` and `NAME.svg`. Raises `UserError` for a folder that is no run or is too large, and
    for a file that doesn't end in .zip.
    """
    check_types({"run": run, "out": out}, {"run": str | Path, "out": str | Path | None})
    folder = Path(run)
    results = self_test.attach(load_run(folder))
    folders = [folder.absolute(), folder.resolve(), Path.cwd(), Path.home()]
    notes = (read_table(path, []) or {} for path in sorted((folder / PLACEMENTS_DIR).glob("*.json")))
    # Hosts of the run's blocks; also from damaged notes, which are copied unchanged.
    hosts = [host for note in notes if isinstance(host := note.get("host"), str) and host]
    redaction = Redaction(folders, hosts, with_names=with_names)
    name = redaction.redact_value(results.name)
    file = Path(out) if out else Path(f"{name}{PACK_SUFFIX}")
    for path in (file, *(card_paths(file) if card else ())):
        check_writable(path)
    if file.suffix != ".zip":
        raise UserError(f"{file} must end in .zip, by which `dyno site` finds packs; give {file.name}.zip")
    with tempfile.TemporaryDirectory() as scratch:
        run_copy = Path(scratch) / RUN_MEMBER
        _copy_run(folder, run_copy, results, redaction)
        opening.refuse_code(run_copy, f"{folder}, which can't become a pack,")
        study, run_data = read_earlier(run_copy), read_results(load_run(run_copy))
        if card and (study is None or study.baseline):
            raise UserError(f"{folder} compares two sides, which a card can't show; omit --card")
        verdict = describe_verdict(run_data, run_copy)
        if _list_choices(verdict) != _list_choices(describe_verdict(read_results(results), folder)):
            raise UserError(f"{folder} gets another verdict when folder and user names are removed; please report it")
        write_json(Path(scratch) / VERDICT_MEMBER, verdict)
        write_json(Path(scratch) / HEAD_MEMBER, _describe_pack(run_copy, name, with_names))
        _write_zip(Path(scratch), file)
        if card and study is not None:
            write_card(run_data, study, file)
    return file


def _copy_run(folder: Path, run_copy: Path, results: Results, redaction: Redaction) -> None:
    """Copy the files behind the verdict, redacted."""
    run_copy.mkdir(parents=True)
    study = read_earlier(folder)
    if study is None:
        raise UserError(f"{folder} has no study.toml, so it can't be repeated; run the study again")
    table = {name: value for name, value in redaction.redact_value(study.to_table()).items() if name != "on"}
    table["runtime"] = {name: {"python": each.get("python", "")} for name, each in study.runtime.items()}
    write_text(run_copy / STUDY_FILE, Study(**redaction.redact_value(table)).to_toml())
    for path in _list_files(folder):
        target = run_copy / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.suffix == ".npz":
                _copy_arrays(path, target, redaction)
            else:
                write_json(target, redaction.redact_value(read_json(path)))
        except ValueError as e:
            raise UserError(f"{path} is damaged ({e}); the same `dyno run` measures it again") from e
    if results.self_test:
        write_json(run_copy / SELF_TEST_FILE, redaction.redact_value(to_json(results.self_test)))


def _copy_arrays(path: Path, target: Path, redaction: Redaction) -> None:
    arrays = read_npz(path)
    if texts := {name: redaction.redact_value(a.tolist()) for name, a in arrays.items() if a.dtype.kind == "U"}:
        save_arrays(target, {**arrays, **{name: np.asarray(text, "U") for name, text in texts.items()}})
    else:
        target.write_bytes(path.read_bytes())


def _list_files(folder: Path) -> Iterator[Path]:
    yield from (path for name in PACKED_FILES if (path := folder / name).is_file())
    for name in PACKED_FOLDERS:
        for path in sorted((folder / name).rglob("*")):
            is_job_file = path.parent.parent.parent.name == "trials" or name in ("peak", "idle", "anchors")
            is_packed = path.name in JOB_FILES if is_job_file else path.suffix in (".json", ".npz")
            if is_packed and path.is_file() and not path.is_symlink():
                yield path


def _describe_pack(run: Path, name: str, with_names: bool) -> dict[str, Any]:
    """Return the pack's head: the run's name, versions, and hashes of models, data and the run's files."""
    models, data = {}, {}
    for trial in load_run(run):
        model, images = trial.spec.model, trial.spec.data
        models[model.source] = {key: getattr(model, key) for key in ("source", "source_sha256", "weights_sha256")}
        if images.sha256:
            data[images.sha256] = {"name": images.name, "sha256": images.sha256}
    host = {"host": platform.node()} if with_names else {}
    head = {"format": opening.PACK_FORMAT, "schema": opening.PACK_SCHEMA, "dyno": __version__, "run": name, **host}
    return {**head, "models": [*models.values()], "data": [*data.values()], "files": hash_files(run)}


def _write_zip(folder: Path, file: Path) -> None:
    """Write the folder's files as a zip file with reproducible bytes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {path: path.stat().st_size for path in paths}
    is_too_large = any(size > opening.find_limit(path) for path, size in sizes.items())
    totals = len(paths), sum(sizes.values()), sum(n for path, n in sizes.items() if path.suffix != ".npz")
    limits = opening.MAX_MEMBERS, opening.MAX_BYTES, opening.MAX_TEXT_BYTES
    if is_too_large or any(value > limit for value, limit in zip(totals, limits, strict=True)):
        total = f"{format_count(len(paths), 'file')} of {totals[1] >> 20:,} MiB"
        raise UserError(f"the run is too large for a pack ({total}); run it with fewer images or configurations")
    with replace_file(file) as f, zipfile.ZipFile(f, "w") as archive:
        for path in paths:
            member = zipfile.ZipInfo(path.relative_to(folder).as_posix(), (1980, 1, 1, 0, 0, 0))
            member.compress_type, member.create_system, member.external_attr = zipfile.ZIP_DEFLATED, 3, 0o100644 << 16
            archive.writestr(member, path.read_bytes())


def _list_choices(verdict: Mapping[str, Any]) -> list[Any]:
    return [[decision[key] for key in ("by", "certainty", "candidates")] for decision in verdict["decisions"]]
