"""How the command line ends: an error that the user can correct is one line on standard error and exit code 2."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from dyno.cli import hints
from dyno.worker.extras import EXTRAS, distribution, lacking
from dyno.worker.spec import Unavailable, Unfinished, UserError, check_utf8, plain

INTERRUPTED = 130
CONTINUES = ("run", "demo", "train")  # commands that go on in the folder of the time before
BAD_INPUT, UNFINISHED = 2, 3
ELSEWHERE = "give another path (--out; DYNO_CACHE for the cache)"
OS_ERRORS = {
    errno.ENOSPC: "the disk is full; free some space and run again, what was measured is stored",
    errno.EDQUOT: "the disk quota is used up; free some space and run again, what was measured is stored",
    errno.EFBIG: "no file may grow that large here (ulimit -f); allow more and run again, what was measured is stored",
    errno.EROFS: f"the file system is read-only; {ELSEWHERE}",
    errno.EACCES: f"permission denied; {ELSEWHERE}",
    errno.EPERM: f"writing is not permitted; {ELSEWHERE}",
    errno.ELOOP: "is a symbolic link, and nothing is written through one; remove it",
    errno.ENOENT: f"there is no such file or folder; {ELSEWHERE}",
    errno.EEXIST: "is a file where a folder is needed; give another path",
    errno.EISDIR: "is a folder where a file is needed; give another path",
    errno.ENOTDIR: "is a file where a folder is needed; give another path",
}
_USAGE: Any = typer.BadParameter.__base__  # UsageError of the click that typer brings with it


class _Stream(io.FileIO):
    """Standard output or error whose reader may go away: the rest of the output is dropped, and the command goes on."""

    lost = False

    def write(self, content: Any, /) -> int:
        """See io's."""
        if self.lost:
            return len(content)
        try:
            return super().write(content) or 0
        except OSError as e:
            self.lost = True
            if isinstance(e, BrokenPipeError):
                return len(content)
            raise


def _outlive_readers() -> None:
    """Have a closed or broken stdout or stderr cost neither files nor the exit code, and names of no encoding neither.

    A closed one is opened as nothing, or the next file that is opened would get what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        stream = getattr(sys, name)
        if number and stream is getattr(sys, f"__{name}__"):  # not where a test reads it
            encoding = stream.encoding if stream else "utf-8"
            raw = _Stream(number, "w", closefd=False)
            through = number == 2 or raw.isatty()
            wrapper = io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=through)
            setattr(sys, name, wrapper)


def end(app: typer.Typer) -> None:
    """Run the command line; the user's errors become one line and exit code 2, an interrupt 130."""
    _outlive_readers()
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # from `timeout` or a scheduler: it ends as after Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _check_words(sys.argv[1:])
        code = app(prog_name="dyno", standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of an interrupt
            raise KeyboardInterrupt
        sys.stdout.flush()
        sys.exit(code or 0)
    except _USAGE as e:
        if type(e).__name__ == "NoArgsIsHelpError":
            e.show()  # the help itself
            sys.exit(BAD_INPUT)
        _fail(hints.usage(e, e.ctx.command_path if e.ctx else "dyno"))
    except Unfinished as e:
        _fail(str(e), UNFINISHED)
    except (UserError, Unavailable) as e:
        _fail(str(e))
    except ModuleNotFoundError as e:
        if distribution(str(e.name)) not in EXTRAS:
            raise
        _fail(lacking([str(e.name)]))
    except (KeyboardInterrupt, typer.Abort):
        print("dyno: stopped; " + _left(sys.argv[1:]), file=sys.stderr)
        sys.exit(INTERRUPTED)
    except OSError as e:
        if e.errno not in OS_ERRORS:
            raise
        _fail(f"{e.filename or 'output'}: {OS_ERRORS[e.errno]}")


def _check_words(words: Sequence[str]) -> None:
    """Refuse names with bytes of no text, and empty words: an option that is empty would silently be left at its
    default, so that `--weights "$UNSET"` measured random weights."""
    for before, word in zip(("", *words), words, strict=False):
        check_utf8(word)
        name, equals, value = word.partition("=")
        if not word or (word.startswith("--") and equals and not value):
            what = before if not word and before.startswith("-") else name or "an argument"
            raise UserError(f"{what} is empty, perhaps for a variable that is not set; give a value, or omit it")


def _left(words: Sequence[str]) -> str:
    """What an interrupt left of the command; most commands begin a new folder each time, or store nothing."""
    if words and words[0] in CONTINUES:
        return "what was measured is stored, the same command continues from there"
    return "files and rounds that were finished are kept, in the cache and in the run folder"


def left_out(lines: Iterable[str]) -> int:
    """Say what is missing of what was asked for, on standard error; the exit code for that."""
    code = 0
    for line in lines:
        print("dyno: left out: " + plain(line), file=sys.stderr)
        code = UNFINISHED
    return code


def _fail(line: str, code: int = BAD_INPUT) -> None:
    print("dyno: " + plain(line), file=sys.stderr)
    sys.exit(code)
