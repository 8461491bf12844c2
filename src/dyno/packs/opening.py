"""Opening of untrusted packs: allowed contents and limits of size."""

from __future__ import annotations

import re
import stat
import struct
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyno.results.files import read_npz
from dyno.worker.facts.json_values import INTEGER_LIMIT
from dyno.worker.option_values import check_types
from dyno.worker.record import read_json
from dyno.worker.spec import UserError, shorten

PACK_FORMAT, PACK_SCHEMA = "dyno pack", 1
# members of a pack: the head, the verdict, the run's folder
HEAD_MEMBER, VERDICT_MEMBER, RUN_MEMBER = "pack.json", "verdict.json", "run"
STUDY_FILE = "study.toml"
MAX_BYTES, MAX_MEMBERS, MAX_DIRECTORY_BYTES, MAX_DEPTH = 1 << 30, 20_000, 4 << 20, 64
MAX_MEMBER_BYTES = {".npz": 256 << 20, ".json": 8 << 20, ".toml": 64 << 10, "samples.npz": 32 << 20}
MAX_TEXT_BYTES = 64 << 20  # all JSON files together; parsed, they take many times the memory
BLOCK_BYTES = 1 << 20
# the last record of a zip file
END_SIGNATURE, END_BYTES, ZIP64_SIGNATURE, ZIP64_BYTES = b"PK\x05\x06", 22, b"PK\x06\x07", 20
MEMBER_NAME = re.compile(rf"{HEAD_MEMBER}|{VERDICT_MEMBER}|{RUN_MEMBER}(/[\w+=@][\w.+=@-]*)+\.(json|npz|toml)")
TOML_STRING = re.compile(r"""(?!\"{3}|'{3})(?:"(?:\\.|[^"\\\n])*"|'[^'\n]*')|#.*""")  # a TOML string or comment


@dataclass(frozen=True)
class OpenPack:
    """An unpacked pack: its head, its stored verdict, and the folder of its run."""

    metadata: dict[str, Any]
    verdict: dict[str, Any]
    run: Path


@contextmanager
def open_pack(file: str | Path) -> Iterator[OpenPack]:
    """Unpack a pack into a temporary folder during the `with` block.

    Raises `UserError` for a file that is no pack, is damaged, has another schema or exceeds the limits. Sizes are
    counted while reading; the file's own statements are not trusted.
    """
    check_types({"file": file}, {"file": str | Path})
    file = Path(file)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            _check_zip(file)
            with zipfile.ZipFile(file) as archive:
                _unpack(archive, folder, file)
            head = read_json(folder / HEAD_MEMBER)
            _check_schema(file, head)
            verdict = read_json(folder / VERDICT_MEMBER)
            for path in sorted(folder.rglob("*.npz")):
                _check_zip(path)
                arrays = read_npz(path).values()  # read without Python objects, so not larger than the file
                if any(max(a.shape, default=0) > max(a.size, MAX_MEMBERS) for a in arrays):
                    raise ValueError(f"{path} has an empty array of a huge shape")
            for path in sorted(folder.rglob("*.json")):
                _check_values(read_json(path))
            # Dyno writes no keys of many parts, on which the parser takes quadratic time, and no multi-line texts.
            study = TOML_STRING.sub("", (folder / RUN_MEMBER / STUDY_FILE).read_text(encoding="utf-8"))
            if re.search(r"['\"]|(?:\.[\w\s-]*){9}", study):
                raise ValueError(f"{STUDY_FILE} has a key or a text that Dyno doesn't write")
            refuse_code(folder / RUN_MEMBER, f"{file}")
        except UserError:
            raise
        except FileNotFoundError as e:
            problem = f"it has no {Path(e.filename).name}" if Path(e.filename) != file else "there is no such file"
            raise UserError(f"{file} is not a pack: {problem}; give a file that `dyno pack` wrote") from e
        except Exception as e:  # parsers raise nearly everything on bad data
            reason = shorten(str(e).replace(f"{folder}/", "")) or type(e).__name__
            raise UserError(f"{file} is a damaged pack ({reason}); get it again, or write it again") from e
        yield OpenPack(head, verdict, folder / RUN_MEMBER)


def find_limit(path: Path) -> int:
    """Return the largest size in bytes of a file with this name in a pack."""
    return MAX_MEMBER_BYTES.get(path.name, MAX_MEMBER_BYTES[path.suffix])


def _check_zip(file: Path) -> None:
    """Raise `UserError` unless the file has the end of a zip file with a small directory."""
    info = file.stat()
    message = f"{file} is not a pack; give a file that `dyno pack` wrote"
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"{message}, not a folder" if stat.S_ISDIR(info.st_mode) else message)
    if info.st_size > MAX_BYTES:
        raise UserError(f"{file} is too large for a pack: {info.st_size >> 20:,} MiB, at most {MAX_BYTES >> 20:,}")
    with open(file, "rb") as f:
        signature = f.read(4)
        f.seek(max(0, info.st_size - END_BYTES - ZIP64_BYTES))
        tail = f.read()
    end = tail[-END_BYTES:]
    if signature != b"PK\x03\x04":
        raise UserError(message)
    if len(end) < END_BYTES or end[:4] != END_SIGNATURE:
        raise UserError(f"{file} is a damaged pack: its end is missing; get it again, or write it again")
    count, size = struct.unpack("<HI", end[10:16])
    if count > MAX_MEMBERS or size > MAX_DIRECTORY_BYTES or tail[:4] == ZIP64_SIGNATURE:
        raise UserError(f"{file} is too large for a pack: it has more than {MAX_MEMBERS:,} files")


def _unpack(archive: zipfile.ZipFile, folder: Path, file: Path) -> None:
    members = archive.infolist()
    if len(members) > MAX_MEMBERS or len({m.filename for m in members}) < len(members):
        raise UserError(f"{file} is not a pack: it has too many files, or two with the same name")
    total = text_bytes = 0
    for member in members:
        is_link = stat.S_ISLNK(member.external_attr >> 16)
        if is_link or not MEMBER_NAME.fullmatch(member.filename) or member.flag_bits & 1:
            raise UserError(f"{file} is not a pack: it holds {shorten(member.filename)!r}, which no pack has")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(f"{file} is not a pack: {shorten(member.filename)!r} uses another compression")
        target, size = folder / member.filename, 0
        max_bytes = find_limit(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(member) as source, open(target, "xb") as out:
            while block := source.read(BLOCK_BYTES):
                size, total = size + len(block), total + len(block)
                text_bytes += 0 if target.suffix == ".npz" else len(block)
                if size > max_bytes or total > MAX_BYTES or text_bytes > MAX_TEXT_BYTES:
                    raise UserError(f"{file} is too large for a pack: {shorten(member.filename)} unpacks to too much")
                out.write(block)


def walk_json(value: Any, depth: int = 0) -> Iterator[tuple[Any, int]]:
    """Yield a JSON value and all values inside it, outer ones first, with their depth of brackets."""
    yield value, depth
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk_json(item, depth + 1)


def _check_values(value: Any) -> None:
    """Raise ValueError for values that Dyno doesn't write and that later steps can't handle."""
    for item, depth in walk_json(value):
        if depth > MAX_DEPTH:
            raise ValueError("its brackets are nested too deeply")
        if isinstance(item, int) and abs(item) >= INTEGER_LIMIT:
            raise ValueError("a number is too large")


def refuse_code(run: Path, subject: str) -> None:
    """Raise `UserError` if a file of the run names Python code as MODULE:NAME: reading it would import that."""
    study = tomllib.loads((run / STUDY_FILE).read_text(encoding="utf-8"))
    names = [*map(str, study.get("backends") or ()), str(study.get("task") or "")]
    names = [text.partition("@")[0] for text in names]
    for path in sorted(run.rglob("*.json")):
        tables = [value for value, _ in walk_json(read_json(path)) if isinstance(value, dict)]
        names += [str(table[key]) for table in tables for key in ("backend", "maker", "task") if key in table]
    if code_name := next((name for name in names if ":" in name), ""):
        raise UserError(f"{subject} names code in Python, {shorten(code_name)!r}, which isn't loaded from a pack")


def _check_schema(file: Path, head: Mapping[str, Any]) -> None:
    if head.get("format") != PACK_FORMAT:
        raise UserError(f"{file} is not a pack; give a file that `dyno pack` wrote")
    if head.get("schema") != PACK_SCHEMA:
        schema, version = shorten(str(head.get("schema"))), shorten(str(head.get("dyno")))
        raise UserError(
            f"{file} is a pack of schema {schema}, written by Dyno {version}; this Dyno reads {PACK_SCHEMA}"
        )
    if not isinstance(head.get("files"), dict):
        raise ValueError("it has no hashes of its files")
