"""How the command line ends: an error is one line on standard error and exit code 2."""

from __future__ import annotations

import codecs
import difflib
import errno
import io
import logging
import os
import resource
import shlex
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from dyno.worker import system
from dyno.worker.extras import EXTRAS, find_distribution, name_lacking
from dyno.worker.record import one_line, write_text
from dyno.worker.spec import Unavailable, Unfinished, UserError, check_utf8, clean_text

# Renamed and misspelt commands and options: advice in one line.

RENAMED = {
    "agree": "diff", "bisect": "compare --bisect", "build": "export", "calibrate": "selftest", "list": "runs list",
    "cold-start": "bench cold-start", "open": "report", "rm": "runs rm", "serve-test": "bench serve", "take": "export",
    "stress": "bench stress", "train": "data train", "video": "bench video",
}  # fmt: skip
RENAMED_OPTIONS = {
    "--again": "--remeasure", "--against": "--baseline-python", "--on": "--cluster",
    "--inputs": "--compared N (how many), or --input NAME=VALUE",
}  # fmt: skip
# Dyno's own signs in an encoding without them
PLAIN_SIGNS = {"─": "-", "…": "~", "µ": "u", "−": "-", "±": "+-", "≥": ">=", "≤": "<=", "×": "x", "·": "*", "→": "->"}
TYPE_NAMES = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}


def replace_renamed(words: Sequence[str]) -> list[str]:
    """Return the command line with the new name of a renamed command; print it on standard error."""
    replacement = RENAMED.get("".join(words[:1]))
    if replacement is None:
        return [*words]
    print(f"dyno: `dyno {words[0]}` is now `dyno {replacement}`", file=sys.stderr)
    return [*replacement.split(), *words[1:]]


def expand_home(words: Sequence[str]) -> list[str]:
    """Return the command line with `~` expanded in words like `--out=~/runs`, which a shell leaves unchanged."""
    home = os.environ.get("HOME", "~")
    return [word.replace("=~/", f"={home}/", 1) if word.startswith("--") else word for word in words]


def no_command(name: str, commands: Iterable[str], group: str) -> str:
    """Return the error message for an unknown command of a group, with a suggestion."""
    from dyno.worker import registry  # imports NumPy, which `dyno --help` doesn't need

    if name in ("help", "version"):
        return f"there is no command {name!r}; write dyno --{name}"
    matches = difflib.get_close_matches(name, list(commands), 1)
    if ":" in name or registry.format_of(name) or name.endswith(".toml"):
        return f"there is no command {name!r}; to measure it: dyno run {shlex.quote(name)}"
    if (Path(name) / "trials").is_dir():
        return f"there is no command {name!r}; to see that run: dyno show {shlex.quote(name)}"
    if matches:
        return f"there is no command {name!r}; did you mean {group} {matches[0]}?"
    return f"there is no command {name!r}; {group} --help lists them, and dyno run MODEL measures a model"


def hint_usage(error: Any, command: str) -> str:
    """Return the message of click's `UsageError`, with the nearest option and a pointer to the help."""
    option = getattr(error, "option_name", "")
    if option in RENAMED_OPTIONS:
        return f"{option} is now {RENAMED_OPTIONS[option]}; see {command} --help-all"
    if option in ("--model", "--models"):
        return f"no such option: {option}; give the model alone: {command} torchvision:resnet18; see {command} --help"
    for reason in getattr(error.__cause__, "errors", list)():  # errors of pydantic, which validates typer's arguments
        if kind := TYPE_NAMES.get(reason["type"]):
            error.message = f"{reason['input']!r} is not {kind}"
    candidates = getattr(error, "possibilities", None)
    matches = difflib.get_close_matches(option, candidates or (), 1, MIN_OPTION_SIMILARITY)
    line = " ".join((error.message if candidates else error.format_message()).split()).removesuffix(".")
    hint = f"did you mean {matches[0]}? See" if matches else "see"
    return f"{line[:1].lower()}{line[1:]}; {hint} {command} --help"


INTERRUPTED = 130
MIN_OPTION_SIMILARITY = 0.7  # similarity to suggest an option: --engines must not suggest --minutes
RESUMABLE_COMMANDS = (["run"], ["demo"], ["data", "train"])  # commands that resume in their earlier folder
READ_ONLY = ("show", "report", "runs", "doctor", "verify", "site")  # commands that measure nothing
BAD_INPUT, UNFINISHED = 2, 3
MIN_MEMORY_B = 1 << 29
TRACEBACK_VARIABLE = "DYNO_TRACEBACK"  # environment variable: print tracebacks of internal errors
INTERNAL_ERROR = "internal error"
OTHER_PATH_ADVICE = "give another path (--out; DYNO_CACHE for the cache, TMPDIR for temporary files)"
RESULTS_STORED = "what was measured is stored"
RUN_AGAIN = "run again"  # start of an advice that ends with RESULTS_STORED
NO_MEMORY = f"memory ran out; free some, or allow more (ulimit -v), and {RUN_AGAIN}"
NO_FILE = f"too many files are open; allow more (ulimit -n) and {RUN_AGAIN}"
NO_PROCESS = f"the limit on processes and threads is reached (ulimit -u); allow more and {RUN_AGAIN}"
OS_ERRORS = {
    errno.ENOSPC: f"the disk is full; free some space and {RUN_AGAIN}",
    errno.EDQUOT: f"the disk quota is used up; free some space and {RUN_AGAIN}",
    errno.EFBIG: f"the limit on file size is reached (ulimit -f); allow more and {RUN_AGAIN}",
    errno.EROFS: f"the file system is read-only; {OTHER_PATH_ADVICE}",
    errno.EACCES: f"permission denied; allow this user to read and write there, or {OTHER_PATH_ADVICE}",
    errno.EPERM: f"writing is not permitted; {OTHER_PATH_ADVICE}",
    errno.ELOOP: "is a symbolic link, which Dyno doesn't follow; remove it",
    errno.ENOENT: f"there is no such file or folder; {OTHER_PATH_ADVICE}",
    errno.EEXIST: "is a file, or a link to nothing, where a folder is needed; give another path",
    errno.EISDIR: "is a folder where a file is needed; give another path",
    errno.ENOTDIR: "is a file where a folder is needed; give another path",
    errno.ENAMETOOLONG: "the name is too long; give a shorter one",
    errno.EBADF: f"it is not open for writing; redirect it elsewhere and {RUN_AGAIN}",
    errno.ENOMEM: NO_MEMORY,
    errno.EAGAIN: NO_PROCESS,
    errno.EMFILE: NO_FILE,
}
# Advice by the wording of libraries' errors at a limit of this process.
LIMIT_ADVICE = {
    "can't start new thread": NO_PROCESS,
    "failed to map segment": NO_MEMORY,
    "cannot allocate memory": NO_MEMORY,
    "no usable temporary directory": "temporary files can't be written; free space, or give their folder in TMPDIR",
}
_USAGE: Any = typer.BadParameter.__base__  # UsageError of typer's own click


class _Stream(io.FileIO):
    """Standard output or error that survives the loss of its reader: the rest of the output is dropped.

    A failure to write standard output is an error; for standard error it isn't, as no message could be read there.
    """

    lost = False

    def write(self, content: Any, /) -> int:
        """Write the content, or drop it once the reader is lost."""
        if self.lost:
            return len(content)
        try:
            return super().write(content) or 0
        except OSError as e:
            self.lost = True
            if isinstance(e, BrokenPipeError) or self.fileno() == 2:
                return len(content)
            e.filename = "standard output"
            raise


def _encode_plainly(error: UnicodeError) -> tuple[str, int]:
    """Replace Dyno's signs by plain ones, and escape other characters; an error handler of codecs."""
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end]
    return "".join(PLAIN_SIGNS.get(s) or s.encode("ascii", "backslashreplace").decode() for s in signs), error.end


def _outlive_readers() -> None:
    """Replace the standard streams, so that closed or broken ones, or unencodable names, don't end the command.

    A closed stream is opened as the null device: otherwise the next opened file would receive the output.
    """
    codecs.register_error("plain", _encode_plainly)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        stream = getattr(sys, name)
        if fd and stream is getattr(sys, f"__{name}__"):  # unless a test has replaced it
            encoding = stream.encoding if stream else "utf-8"
            raw = _Stream(fd, "w", closefd=False)
            per_line = fd == 2 or raw.isatty()
            wrapper = io.TextIOWrapper(io.BufferedWriter(raw), encoding, "plain", line_buffering=per_line)
            setattr(sys, name, wrapper)


def end(app: typer.Typer) -> None:
    """Run the command line; every error becomes one line and exit code 2 (3 if work is left), an interrupt 130."""
    _outlive_readers()
    with suppress(OSError):  # reported where the folder is needed
        os.environ.update(system.missing_variables(os.environ))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # enough here; OpenBLAS raises SIGINT if it can't start more
    os.environ["MPLBACKEND"] = "agg"  # charts are files; the user's own setting may need a display
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns if HOME isn't writable
    for signum in (signal.SIGINT, signal.SIGTERM):  # `timeout` and schedulers send SIGTERM: end as after Ctrl-C
        if signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, signal.default_int_handler)
    try:
        _check_words(sys.argv[1:])
        _check_memory()
        _check_folder()
        code = app(prog_name="dyno", standalone_mode=False)
        if code == INTERRUPTED:  # typer's exit code after an interrupt
            raise KeyboardInterrupt
        sys.stdout.flush()
        sys.exit(code or 0)
    except _USAGE as e:
        if type(e).__name__ == "NoArgsIsHelpError":
            e.show()  # the help itself
            sys.exit(BAD_INPUT)
        # The parser doesn't know its command.
        _fail_command(hint_usage(e, e.ctx.command_path if e.ctx else " ".join(("dyno", *sys.argv[1:2]))))
    except Unfinished as e:
        _fail_command(str(e), UNFINISHED)
    except (UserError, Unavailable) as e:
        _fail_command(str(e))
    except (KeyboardInterrupt, typer.Abort):
        print("dyno: stopped" + _describe_leftovers(sys.argv[1:]), file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as e:  # any other error, as its exit code 1 would mean a regression
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        line = _describe_error(e)
        if line.endswith(RUN_AGAIN) and _continues(sys.argv[1:]):
            line += f": {RESULTS_STORED}"
        elif getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            line += f", or {OTHER_PATH_ADVICE}"
        _fail_command(line)


def _describe_error(e: Exception) -> str:
    """Return one line on an unexpected error: a remedy, or the place of its details."""
    if isinstance(e, ModuleNotFoundError) and find_distribution(str(e.name)) in EXTRAS:
        return name_lacking([str(e.name)])
    if isinstance(e, MemoryError):
        return NO_MEMORY
    for phrase, advice in LIMIT_ADVICE.items():
        if phrase in str(e).lower():
            return advice
    if isinstance(e, OSError) and e.errno is not None:
        advice = OS_ERRORS.get(e.errno, f"{e.strerror or os.strerror(e.errno)}; {OTHER_PATH_ADVICE}")
        return advice if advice in (NO_MEMORY, NO_FILE, NO_PROCESS) else f"{e.filename or 'output'}: {advice}"
    line = f"{INTERNAL_ERROR}, {type(e).__name__}: {one_line(e)}"
    if _continues(sys.argv[1:]):
        line += f"; {RESULTS_STORED}"
    return f"{line}; please report it with {_keep_details(e)}"


def _keep_details(e: Exception) -> str:
    """Store the traceback in the cache; return its place, or how to print it if it can't be stored."""
    try:
        path = system.cache_dir() / "last-error.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(traceback.format_exception(e)))
    except (OSError, RuntimeError):
        return f"what {TRACEBACK_VARIABLE}=1 prints"
    return f"its details in {path}"


def _check_memory() -> None:
    """Refuse a memory limit at which libraries hang or end the process while they are imported."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < MIN_MEMORY_B:
        raise UserError(
            f"memory is limited to {limit >> 20:,} MiB (ulimit -v), which is too little; "
            f"allow {MIN_MEMORY_B >> 20:,} MiB or more"
        )


def _check_folder() -> None:
    """Refuse a removed current folder, in which jobs fail while importing their libraries."""
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd() is the same call
    except FileNotFoundError as e:
        raise UserError("the current folder no longer exists; change to another one (cd)") from e


BLANKS = " \t\n,"  # may stand between the values of a list


def _check_words(words: Sequence[str]) -> None:
    """Refuse names with undecodable bytes, and words of nothing but blanks and commas.

    An empty option would silently keep its default: `--weights "$UNSET"` would measure random weights, and
    `--limit "$UNSET,$UNSET"` would limit nothing.
    """
    for before, word in zip(("", *words), words, strict=False):
        check_utf8(word)
        name, equals, value = word.partition("=")
        is_empty = not word.strip(BLANKS)
        if is_empty or (word.startswith("--") and equals and not value.strip(BLANKS)):
            subject = name if not is_empty else before if before.startswith("-") else "an argument"
            raise UserError(f"{subject} is empty, perhaps for a variable that is not set; give a value, or omit it")


def _describe_leftovers(words: Sequence[str]) -> str:
    """Return what an interrupted command leaves; most commands begin a new folder each time, or store nothing."""
    if _continues(words):
        return f"; {RESULTS_STORED}, the same command continues from there"
    if "".join(words[:1]) in READ_ONLY:
        return ""
    return "; files and rounds that were finished are kept, in the cache and in the run folder"


def _continues(words: Sequence[str]) -> bool:
    return any(list(words[: len(command)]) == command for command in RESUMABLE_COMMANDS)


def left_out(lines: Iterable[str]) -> int:
    """Print the missing requested parts on standard error; return the exit code for them."""
    code = 0
    for line in lines:
        print("dyno: left out: " + clean_text(line), file=sys.stderr)
        code = UNFINISHED
    return code


def _fail_command(line: str, code: int = BAD_INPUT) -> None:
    print("dyno: " + clean_text(line), file=sys.stderr)
    sys.exit(code)
