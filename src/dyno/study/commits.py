"""Models at a git commit, `FILE@COMMIT`: files are checked out into the cache, the user's checkout stays as it is."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from dyno.store import cache_dir
from dyno.worker import registry
from dyno.worker.spec import SAVED_SUFFIXES, UserError

HASH_LENGTH = 12  # hex digits of a short commit id


def split_commit(source: str) -> tuple[str, str]:
    """Split a source into itself and its commit, "" if it has none.

    Only files have commits. A file whose whole name contains the @ has none.
    """
    base, separator, commit = source.rpartition("@")
    file, _, _ = _split_source(base)
    is_known = file.endswith((".py", *SAVED_SUFFIXES)) or registry.format_of(file) is not None
    if not (separator and commit and is_known) or Path(source).exists():
        return source, ""
    return base, commit


def fix_commit(source: str) -> str:
    """Return the source with its commit as a hash, which stays valid when a branch moves on."""
    base, commit = split_commit(source)
    return f"{base}@{_resolve_commit(_find_root(_split_source(base)[0]), commit)[:HASH_LENGTH]}" if commit else source


def checked_out(source: str) -> str:
    """Return the source with its file at the commit, checked out into the cache with all other files of the commit.

    Git LFS files are fetched by git; submodules are left out. Raises `UserError` without git, the repository, the
    commit or the file.
    """
    base, commit = split_commit(source)
    if not commit:
        return source
    file, colon, function = _split_source(base)
    root = _find_root(file)
    commit = _resolve_commit(root, commit)
    relative_path = os.path.relpath(Path(file).absolute(), root)
    if _run_git(root, "cat-file", "-e", f"{commit}:{Path(relative_path).as_posix()}").returncode:
        raise UserError(f"there is no {relative_path} at commit {commit[:HASH_LENGTH]} of {root}")
    return f"{_check_out_commit(root, commit) / relative_path}{colon}{function}"


def find_head() -> str:
    """Return the checked-out commit of the current folder, with "+" if its files were changed; "" without a repository.

    Untracked files, such as run folders, don't count.
    """
    with suppress(UserError):
        head = _run_git(Path.cwd(), "rev-parse", "--verify", "--quiet", "HEAD")
        if not head.returncode:
            status = _run_git(Path.cwd(), "status", "--porcelain", "--untracked-files=no", "--ignore-submodules")
            return head.stdout.strip()[:HASH_LENGTH] + "+" * bool(status.stdout.strip())
    return ""


def _split_source(source: str) -> tuple[str, str, str]:
    """Split `FILE.py:FUNCTION`, or any other file, into file, colon and function."""
    file, colon, function = source.rpartition(":")
    return (file, colon, function) if file.endswith(".py") else (source, "", "")


def _find_root(file: str) -> Path:
    """Return the top folder of the repository that contains or contained the file."""
    folder = Path(file).absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    process = _run_git(folder, "rev-parse", "--show-toplevel")
    if process.returncode:
        raise UserError(f"{file} is in no git repository that can be read: {_find_last_line(process)}")
    top = Path(process.stdout.strip())
    # As the user wrote it, if the path goes through a link.
    return next((each for each in (folder, *folder.parents) if each.resolve() == top.resolve()), top)


def _resolve_commit(root: Path, commit: str) -> str:
    process = _run_git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
    if process.returncode:
        raise UserError(f"there is no commit {commit!r} in {root}; fetch it first, such as by `git fetch --unshallow`")
    return process.stdout.strip()


def _check_out_commit(root: Path, commit: str) -> Path:
    """Check out every file of the commit into a folder of the cache, and return the folder."""
    folder = cache_dir() / "commits" / commit
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as scratch:
        # A separate index, because the repository's holds the user's staged files.
        index = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        tree = Path(scratch) / "tree"
        tree.mkdir()
        for args in (["read-tree", commit], ["checkout-index", "--all", f"--prefix={tree}/"]):
            if (process := _run_git(root, *args, env=index)).returncode:
                raise UserError(
                    f"the files of commit {commit[:HASH_LENGTH]} can't be taken from {root}: {_find_last_line(process)}"
                )
        with suppress(OSError):  # another process was faster
            tree.rename(folder)
    return folder


def _run_git(folder: Path, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(folder), "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", *args]
    try:
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    except FileNotFoundError:
        raise UserError("git is not installed, and a model's commit needs it; install git") from None


def _find_last_line(process: subprocess.CompletedProcess[str]) -> str:
    return (process.stderr.strip().splitlines() or ["git gave no message"])[-1]
