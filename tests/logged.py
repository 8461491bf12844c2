"""A study's progress that records its calls, for tests of what happened and when."""

from collections.abc import Callable

from dyno.jobs.progress import Progress
from dyno.worker.spec import Recipe, Trial


class Log(Progress):
    """Progress that stores started jobs, made files and every line; `then` is called after a block's line."""

    def __init__(self, then: Callable[[str, str], None] = lambda *_: None) -> None:
        super().__init__(quiet=True)
        self.then, self.said = then, list[str]()
        self.began, self.files = list[tuple[int, Trial]](), list[tuple[Recipe, str]]()

    def start(self, trial: Trial, number: int, what: str = "round") -> None:
        self.began.append((number, trial))
        super().start(trial, number, what)

    def show_making(self, recipe: Recipe, wrong: str = "") -> None:
        self.files.append((recipe, wrong))
        super().show_making(recipe, wrong)

    def relay(self, place: str, line: str) -> None:
        self.said.append(f"{place}: {line}")
        self.then(place, line)

    def note(self, line: str) -> None:
        self.said.append(line)

    def show_step(self, what: str) -> None:
        self.said.append(what)
