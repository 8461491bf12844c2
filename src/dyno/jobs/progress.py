"""Progress of a study: current jobs, jobs left, and the remaining time."""

from __future__ import annotations

import math
import sys
import time
from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dyno.worker.record import Record
from dyno.worker.spec import Recipe, Trial, clean_text
from dyno.worker.system import can_draw

MAX_SHOWN_TRIALS = 6
MAX_ANSWER_ROWS = 12  # rows of the preliminary answer
LONG_S = 60.0  # time from which a file gets a line with its duration
STATUS_COLOURS = {"ok": "green", "skipped": "yellow"}


class Progress:
    """Live lines on a terminal; elsewhere a line per round and per problem; nothing when quiet.

    With `is_verbose`, each job and each file has a line elsewhere too.
    """

    is_verbose: ClassVar[bool] = False

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.quiet = quiet
        self.console = console or stderr_console()
        self.live: Live | None = None
        self.remaining: list[Trial] = []
        self.later: list[Trial] = []
        self.total = 0
        self.seconds: dict[str, float] = {}
        self.lines: list[Text] = []
        self.answer: list[RenderableType] = []
        self.printed: list[str] = []  # the last sentences printed without a terminal
        # seconds to read the run for an answer; the first reading, which also imports modules, is excluded
        self.answer_s: float | None = None
        self.job: Trial | None = None
        self.current = ""
        self.step = ""
        self.stage = ""
        self.is_building = False  # whether files are being made, which takes an unknown time
        self.is_sharing = False  # whether another study measures on the same processors
        self.started = time.monotonic()

    @contextmanager
    def show_study(self, jobs: list[Trial], later: Sequence[Trial] = ()) -> Iterator[None]:
        """Show the study during the `with` block; `jobs` is the trial of each job, in order.

        The jobs in `later`, after the block, count in the remaining time.
        """
        self.remaining, self.later = list(jobs), list(later)
        self.total = len(self.remaining)
        if self.quiet or not self.console.is_terminal:
            yield
            return
        with Live(
            get_renderable=self._render_view, console=self.console, refresh_per_second=4, transient=True
        ) as self.live:
            yield
        self.live = None

    @contextmanager
    def pause_estimate(self) -> Iterator[None]:
        """Show no remaining time during the `with` block, which makes files."""
        self.is_building = True
        try:
            yield
        finally:
            self.is_building = False

    @contextmanager
    def hidden_answers(self) -> Iterator[None]:
        """Show no answers during the `with` block: they belong to a study inside this one."""
        answer_s, self.answer_s = self.answer_s, math.inf
        try:
            yield
        finally:
            self.answer_s = answer_s

    def show_making(self, recipe: Recipe, reason: str = "") -> None:
        """Show that a file is being made; `reason` is the reason for not using the cached one."""
        verb = "check" if recipe.model.file and recipe.parent is None else "export" if recipe.parent is None else "make"
        batch = f"b{recipe.dims.batch}" if recipe.dims.batch else ""
        fields = (verb, recipe.model.name, recipe.format, recipe.precision, batch, recipe.dims.label)
        self._begin_work(" ".join(filter(None, (*fields, *_list_options(recipe)))))
        if reason:
            self._print_line(Text(f"{clean_text(reason)}; building it again", "yellow"))
        self._log_work()

    def report_duration(self) -> None:
        """Print the duration of a file that took LONG_S or more."""
        if (seconds := time.monotonic() - self.started) >= LONG_S:
            self._print_line(Text(f"{self.current}: {_format_clock(seconds)} minutes", "dim"))

    def show_step(self, step: str) -> None:
        """Show the start of a step that is neither a file nor a trial."""
        self._begin_work(step)
        self._log_work()

    def note(self, line: str) -> None:
        """Show a note to the user; it stays when the next step begins."""
        self._print_line(Text(clean_text(line), "yellow"))

    def show_answer(self, title: str, sentences: list[str], rows: list[tuple[str, str, str]]) -> None:
        """Show the study's preliminary answer.

        On a terminal it is above the progress, with a table of (configuration, median latency, speed-up). Elsewhere it
        is one line with the remaining time; unchanged sentences are not repeated.
        """
        lines = [Text(f"{clean_text(title)}: {clean_text(sentence)}", "bold") for sentence in sentences]
        if self.live is None:
            remaining_s = self.estimate_remaining()
            remaining = f", about {_format_clock(remaining_s)} left" if remaining_s and remaining_s >= 1 else ""
            texts = ["as before"] if sentences and sentences == self.printed else sentences
            self._print_line(
                Text(": ".join(filter(None, (f"{clean_text(title)}{remaining}", " ".join(map(clean_text, texts))))))
            )
            self.printed = sentences
            return
        table = Table("configuration", "median", "speed-up", box=None, padding=(0, 2), header_style="dim")
        for row in rows[:MAX_ANSWER_ROWS]:
            table.add_row(*map(clean_text, row))
        self.answer = [table, *lines, Text()]

    def relay(self, place: str, line: str) -> None:
        """Show a line of another process, which measures at the place."""
        self._print_line(Text.assemble((f"{clean_text(place)} ", "dim"), clean_text(line)))

    def start(self, trial: Trial, round_index: int, kind: str = "round") -> None:
        """Show the start of a job: the round (or confirmation) with this number, counted from 0."""
        step = _name_step(trial, round_index, kind)
        self._begin_work(f"{trial.label}  {step}")
        self.job, self.step = trial, step

    def tick(self, stage: str, elapsed: float) -> None:
        """Show the running job's stage."""
        self.stage = clean_text(stage)

    def show_waiting(self, owner: str) -> None:
        """Show that the job waits for another process; without a terminal as a line, lest it look like a hang."""
        self.stage = f"waiting for process {clean_text(owner)}, another dyno on this device"
        if self.live is None:
            self._print_line(Text(": ".join(filter(None, (self.current, self.stage)))))

    def report_sharing(self, owner: str) -> None:
        """Tell the user once that blocks are interleaved with another process's."""
        if not self.is_sharing:
            self.is_sharing = True
            self.note(
                f"another dyno (process {owner}) measures on these processors: both go on in turns, block by block"
            )

    def leave_out(self, trial: Trial) -> None:
        """Drop the further jobs of a trial."""
        self.remaining = [job for job in self.remaining if job != trial]

    def done(
        self, trial: Trial, record: Record, *,
        is_stored: bool = False, seconds: float | None = None, round_index: int | None = None,
    ) -> None:  # fmt: skip
        """Show that a job ended after `seconds` (default: since it began), or that its record was stored already.

        Give the round's `round_index` for jobs that run in parallel: the last one that began may be another.
        """
        if trial in self.remaining:
            self.remaining.remove(trial)
        if is_stored:
            return
        step = self.step if round_index is None else _name_step(trial, round_index)
        if step:  # otherwise the job did not start, as its file is missing
            # Includes the start of the process and imports.
            self.seconds[trial.id] = time.monotonic() - self.started if seconds is None else seconds
        width = len(str(self.total))
        text = Text.assemble(
            (f"{self.total - len(self.remaining):{width}}/{self.total} ", "dim"),
            (f"{record.status:8}", STATUS_COLOURS.get(record.status, "red")),
            f" {clean_text(trial.label)}",
            (f"  {step}" if step else "", "dim"),
            (f"  {clean_text(record.reason)}" if record.reason else f"  {record.seconds:.1f} s", "dim"),
        )
        if record.status != "ok" or self.live is not None or self.is_verbose:
            self._print_line(text)
        self.job, self.step = None, ""

    def _begin_work(self, label: str) -> None:
        self.current, self.stage, self.started = clean_text(label), "start", time.monotonic()
        self.job, self.step = None, ""

    def _log_work(self) -> None:
        """Print the step that begins, in a verbose log; a terminal shows it below the lines."""
        if self.live is None and self.is_verbose:
            self._print_line(Text(self.current))

    def _print_line(self, line: Text) -> None:
        if self.quiet:
            return
        if self.live is None:
            self.console.print(line, soft_wrap=True)
        else:
            self.lines = [*self.lines[-MAX_SHOWN_TRIALS:], line]

    def estimate_remaining(self) -> float | None:
        """Estimate the seconds until the study ends from the ended jobs.

        None before the first one has ended, and while files are made.
        """
        if not self.seconds or self.is_building:
            return None
        mean_s = sum(self.seconds.values()) / len(self.seconds)
        total_s = sum(self.seconds.get(trial.id, mean_s) for trial in (*self.remaining, *self.later))
        if self.job is None:
            return total_s
        return total_s - min(self.seconds.get(self.job.id, mean_s), time.monotonic() - self.started)

    def _render_view(self) -> Group:
        spent = _format_clock(time.monotonic() - self.started)
        line = Text.assemble(
            "now  ", (self.current, "bold"), f"  {spent} {self.stage}", no_wrap=True, overflow="ellipsis"
        )
        if not self.total:
            return Group(*self.answer, *self.lines, line)
        done_count, remaining = self.total - len(self.remaining), self.estimate_remaining()
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            ProgressBar(self.total, done_count, width=30),
            f"{done_count}/{self.total} jobs",
            # 0:00 might be shown for minutes
            f"about {_format_clock(remaining)} left" if remaining and remaining >= 1 else "",
        )
        next_jobs = self.remaining[1:] if self.job else self.remaining
        labels = ", ".join(dict.fromkeys(clean_text(trial.label) for trial in next_jobs[:2]))
        next_line = Text(f"then {labels}" if labels else "", "dim", no_wrap=True, overflow="ellipsis")
        return Group(*self.answer, *self.lines, grid, line, next_line)


def stderr_console(*, quiet: bool = False) -> Console:
    """Return a rich console for standard error; FORCE_COLOR alone draws no bars, as they would fill a file."""
    return Console(stderr=True, quiet=quiet, force_terminal=None if can_draw(sys.stderr) else False)


def _name_step(trial: Trial, round_index: int, kind: str = "round") -> str:
    return f"{kind} {round_index + 1} of {trial.plan.rounds}"


def _format_clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _list_options(recipe: Recipe) -> list[str]:
    """Return the file's options, including its parents', as OPTION=VALUE."""
    return [f"{key}={value}" for key, value in ChainMap(*(step.options for step in recipe.chain)).items()]
