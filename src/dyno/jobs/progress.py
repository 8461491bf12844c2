"""What a study shows while it runs: what runs now, what is left, how long it will take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dyno.worker.record import Record
from dyno.worker.spec import Recipe, Trial

OVERHEAD_S = 5.0  # a first guess at a job's start and load, until jobs of the same trial have been seen
SHOWN = 6
COLOURS = {"ok": "green", "skipped": "yellow"}


class Progress:
    """Live lines on a terminal, one plain line per finished job elsewhere, nothing when quiet."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.quiet = quiet
        self.console = console or Console(stderr=True)
        self.live: Live | None = None
        self.left: list[Trial] = []
        self.total = 0
        self.seconds: dict[str, float] = {}
        self.lines: list[Text] = []
        self.now = ""
        self.stage = ""
        self.since = time.monotonic()

    @contextmanager
    def running(self, jobs: list[Trial]) -> Iterator[None]:
        """Show the study while the block runs; `jobs` is the trial of each job, in the order they come."""
        self.left = list(jobs)
        self.total = len(self.left)
        if self.quiet or not self.console.is_terminal:
            yield
            return
        with Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True) as self.live:
            yield
        self.live = None

    def making(self, recipe: Recipe, wrong: str = "") -> None:
        """A file is being made; `wrong` says why the cached one was not taken."""
        what = "check" if recipe.model.file and recipe.parent is None else "export" if recipe.parent is None else "make"
        batch = f" b{recipe.dims.batch}" if recipe.dims.batch else ""
        self._begin(
            f"{what} {recipe.model.name} {recipe.format} {recipe.precision}{batch} {recipe.dims.shown}".rstrip()
        )
        if wrong:
            self._say(Text(f"{wrong}; making it again", "yellow"))
        if self.live is None:
            self._say(Text(self.now))

    def other(self, what: str) -> None:
        """Something that is neither a file nor a trial begins."""
        self._begin(what)
        if self.live is None:
            self._say(Text(what))

    def note(self, line: str) -> None:
        """Something that the user should know of, whatever begins next."""
        self._say(Text(line, "yellow"))

    def start(self, trial: Trial, number: int) -> None:
        """A job begins."""
        self._begin(f"{trial.label}  round {number + 1}")

    def tick(self, stage: str, elapsed: float) -> None:
        """The running job's stage."""
        self.stage = stage

    def waiting(self, owner: str) -> None:
        """The job waits for that process's; where nothing is drawn anew it gets a line, or it would pass for a hang."""
        self.stage = f"waits for process {owner}, another dyno on this GPU"
        if self.live is None:
            self._say(Text(f"{self.now}: {self.stage}"))

    def done(self, trial: Trial, record: Record, *, stored: bool = False) -> None:
        """A job ended, or was found stored."""
        if trial in self.left:
            self.left.remove(trial)
        if stored:
            return
        self.seconds[trial.id] = record.seconds
        text = Text.assemble(
            (f"{record.status:8}", COLOURS.get(record.status, "red")),
            f" {trial.label}",
            (f"  {record.reason}" if record.reason else f"  {record.seconds:.1f} s", "dim"),
        )
        self._say(text)

    def _begin(self, what: str) -> None:
        self.now, self.stage, self.since = what, "start", time.monotonic()

    def _say(self, line: Text) -> None:
        if self.quiet:
            return
        if self.live is None:
            self.console.print(line, soft_wrap=True)
        else:
            self.lines = [*self.lines[-SHOWN:], line]

    def remaining(self) -> float:
        """Estimated seconds until the study ends."""
        return max(0.0, sum(self._expected(trial) for trial in self.left) - (time.monotonic() - self.since))

    def _expected(self, trial: Trial) -> float:
        plan = trial.plan
        budget = OVERHEAD_S + len(plan.boundaries) * (plan.warmup_s / 2 + min(plan.seconds, 60.0) / 2)
        return self.seconds.get(trial.id, budget)

    def _render(self) -> Group:
        finished = self.total - len(self.left)
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            ProgressBar(max(1, self.total), finished, width=30),
            f"{finished}/{self.total} jobs",
            f"about {_clock(self.remaining())} left",
        )
        now = Text.assemble("now  ", (self.now, "bold"), f"  {self.stage}  {time.monotonic() - self.since:.0f} s")
        following = ", ".join(dict.fromkeys(trial.label for trial in self.left[1:3]))
        return Group(*self.lines, grid, now, Text(f"then {following}" if following else "", "dim"))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
