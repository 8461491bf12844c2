"""A run's verdict as data, and the check that a pack's verdict follows from its samples."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from dyno.formatting import format_count
from dyno.packs.opening import RUN_MEMBER, OpenPack, open_pack, walk_json
from dyno.results.run_data import RunData
from dyno.results.trial_result import Results, load_run
from dyno.store import sha256_of
from dyno.worker.record import parse_json
from dyno.worker.spec import UserError, shorten

MAX_RELATIVE_ERROR = 1e-9  # tolerance for the same computation on two processors
MAX_SHOWN = 5  # differences listed


def read_results(results: Results) -> RunData:
    """Return the run with its table, using only the stored self-test."""
    from dyno.report.tables import trial_table

    return trial_table.read_trials(results)


def describe_verdict(run: RunData, folder: Path) -> dict[str, Any]:
    """Return a run's verdict as data (decisions, sentences and rows), without its folder's name."""
    from dyno.report.export import export
    from dyno.report.tables.trial_table import TRIALS
    from dyno.report.verdict.verdict import describe_run

    text = export([TRIALS.table(run)], "json", head=describe_run(run))
    for name in (shlex.quote(str(folder)), str(folder)):  # a sentence names the folder in the next command
        pattern = re.escape(json.dumps(name, ensure_ascii=False)[1:-1])
        if "/" not in name:  # it may equal any word of the verdict, so only in commands
            pattern = rf"(?P<command>dyno [^;:]* ){pattern}(?![\w./-])"
        text = re.sub(pattern, lambda m: m.groupdict().get("command", "") + RUN_MEMBER.upper(), text)
    document = parse_json(text)
    document |= document["tables"]["trials"]
    return {name: document[name] for name in ("visible", "decisions", "verdict", "rows", "notes") if name in document}


def hash_files(run: Path) -> dict[str, str]:
    """Return the hash of each file in a run folder, by relative path."""
    return {path.relative_to(run).as_posix(): sha256_of(path) for path in sorted(run.rglob("*")) if path.is_file()}


class VerificationDescription(TypedDict):
    """A verification as data."""

    verified: bool
    numbers: int
    differences: list[str]


@dataclass(frozen=True)
class Verification:
    """Number of recomputed numbers in the verdict, and the differences: files of the run, parts of the verdict."""

    numbers: int
    differences: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if the verdict follows from the samples, else 1."""
        return 1 if self.differences else 0

    def to_dict(self) -> VerificationDescription:
        """Return the outcome as data, for JSON."""
        return {"verified": not self.differences, "numbers": self.numbers, "differences": [*self.differences]}

    @property
    def sentences(self) -> list[str]:
        """Sentences on the outcome, or on the first differences."""
        if not self.differences:
            return [f"verified: {format_count(self.numbers, 'number')} of the verdict follow from the samples"]
        rest_count = len(self.differences) - MAX_SHOWN
        lines = [*self.differences[:MAX_SHOWN], *([f"{rest_count} more"] if rest_count > 0 else [])]
        return [f"not verified: {format_count(len(self.differences), 'difference')}", *lines]


def verify(file: str | Path) -> Verification:
    """Compute the verdict of a pack again from its samples, and compare it with the stored one.

    Raises `UserError` for a file that is no pack, or can't be read. See `open_pack`.
    """
    with open_pack(file) as pack:
        return verify_opened(pack, Path(file))


def verify_opened(pack: OpenPack, file: Path) -> Verification:
    """Verify an open pack: see `verify`."""
    try:
        computed = describe_verdict(read_results(load_run(pack.run)), pack.run)
    except UserError as e:
        reason = str(e).replace(f"{pack.run}/", "").replace(str(pack.run), "the run")
        raise UserError(f"{file} is a damaged pack: {reason}") from e
    except Exception as e:  # as its values may be anything
        raise UserError(f"{file} is a damaged pack: no verdict can be computed from it ({type(e).__name__})") from e
    computed = json.loads(json.dumps(computed))
    expected, actual = pack.metadata["files"], hash_files(pack.run)
    changes = [f"{name} is not the file that was packed" for name in sorted({*expected, *actual})
               if expected.get(name) != actual.get(name)]  # fmt: skip
    numbers = sum(_is_number(value) for value, _ in walk_json(computed))
    return Verification(numbers, (*changes, *_list_differences(pack.verdict, computed)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list_differences(stored: Any, computed: Any, path: str = "") -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(computed, dict):
        for key in [*computed, *(key for key in stored if key not in computed)]:
            yield from _list_differences(stored.get(key), computed.get(key), f"{path}.{key}" if path else key)
    elif isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        for index, (a, b) in enumerate(zip(stored, computed, strict=True)):
            yield from _list_differences(a, b, f"{path}[{index}]")
    elif not _is_same(stored, computed):
        texts = [shorten(json.dumps(value, ensure_ascii=False)) for value in (stored, computed)]
        yield f"{path} is {texts[0]}, but the samples give {texts[1]}"


def _is_same(a: Any, b: Any) -> bool:
    if _is_number(a) and _is_number(b):
        return math.isclose(a, b, rel_tol=MAX_RELATIVE_ERROR, abs_tol=0.0)
    return type(a) is type(b) and bool(a == b)
