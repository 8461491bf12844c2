"""The console output of a training: a line per epoch while it runs, its curves as a chart afterwards."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

HISTORY, CURVES = "history.csv", "curves.png"
BEGUN = ("epoch", "evaluate")  # stages whose name begins so come after every refusal

Row = dict[str, float]


def history(folder: Path) -> tuple[Row, ...]:
    """Read the rows of history.csv: epoch, lr, train_loss, test_loss, top1 (percent), seconds, images_per_s."""
    try:
        with open(folder / HISTORY, encoding="utf-8", newline="") as f:
            return tuple({name: float(value) for name, value in row.items()} for row in csv.DictReader(f))
    except FileNotFoundError:
        return ()


class TrainingView:
    """Lines on the console: one per epoch, and on a terminal a bar below them; nothing when quiet."""

    def __init__(self, folder: Path, epochs: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self.folder, self.epochs, self.quiet = folder, epochs, quiet
        self.console = console or Console(stderr=True, quiet=quiet)
        self._shown = 0
        self._modified = 0.0
        self._opening: list[str] = []
        self._bar: Progress | None = None
        self._task = TaskID(0)

    @contextmanager
    def running(self, opening: str = "") -> Iterator[None]:
        """Show the training while the block runs.

        What is trained, and how many epochs were done before, is printed once nothing can be refused any more, so that
        a refusal is one line.
        """
        done = history(self.folder)
        self._shown = len(done)
        self._opening = [opening] if opening else []
        if done and len(done) < self.epochs:
            self._opening.append(f"resuming after epoch {len(done)} of {self.epochs}")
        if self.quiet or not self.console.is_terminal:
            yield
            self._print_epochs()
            return
        columns = (BarColumn(30), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as self._bar:
            self._task = self._bar.add_task("start", total=self.epochs, completed=self._shown)
            yield
            self._print_epochs()
        self._bar = None

    def tick(self, stage: str, elapsed: float) -> None:
        """Update the display; called about twenty times a second while the job runs."""
        if stage.startswith(BEGUN):
            self._print_opening()
        if self._bar is not None:
            self._bar.update(self._task, description=escape(stage), completed=self._shown)
        try:
            modified = (self.folder / HISTORY).stat().st_mtime
        except OSError:
            return
        if modified != self._modified:
            self._modified = modified
            self._print_epochs()

    def waiting(self, owner: str) -> None:
        """Show that the training waits for another process's job."""
        self.say(f"waiting for process {owner}, another dyno on this GPU")

    def say(self, line: str) -> None:
        """Print one line, unless quiet."""
        if not self.quiet:
            self.console.print(escape(line), soft_wrap=True, highlight=False)

    def _print_opening(self) -> None:
        for line in self._opening:
            self.say(line)
        self._opening = []

    def _print_epochs(self) -> None:
        rows = history(self.folder)
        if len(rows) > self._shown:
            self._print_opening()
        for row in rows[self._shown :]:
            self.say(line(row, self.epochs))
        self._shown = max(self._shown, len(rows))


def line(row: Row, epochs: int) -> str:
    """Format an epoch as one line."""
    width = len(str(epochs))
    return (
        f"epoch {row['epoch']:{width}.0f}/{epochs}  lr {row['lr']:.2e}  loss {row['train_loss']:.4f}  "
        f"test loss {row['test_loss']:.4f}  top-1 {row['top1']:6.2f} %  {row['seconds']:.1f} s  "
        f"{row['images_per_s']:,.0f} images/s"
    )


def chart(rows: tuple[Row, ...], path: Path) -> None:
    """Draw losses, top-1 and learning rate over the epochs, as PNG."""
    from dyno.analysis.style import COLORS, WIDTH, save, styled

    epochs = [row["epoch"] for row in rows]
    panels = (
        ("loss", (("train_loss", "training", "pytorch"), ("test_loss", "test", "onnxruntime"))),
        ("top-1, %", (("top1", "test", "onnxruntime"),)),
        ("learning rate", (("lr", "at the end of the epoch", "openvino"),)),
    )
    with styled() as figure_of:
        figure = figure_of(figsize=(WIDTH, 2.9), layout="constrained")
        for axes, (title, lines) in zip(figure.subplots(1, 3), panels, strict=True):
            for name, label, color in lines:
                axes.plot(epochs, [row[name] for row in rows], "o-", ms=3, color=COLORS[color], label=label)
            axes.set_title(title)
            axes.set_xlabel("epoch")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend()
        save(figure, path)
