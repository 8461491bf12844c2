"""Instances of a model, each loaded and driven by its own thread, for several batch sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from dyno.worker import measure
from dyno.worker.backend import Arrays, Session
from dyno.worker.spec import Plan, Trial, Unavailable, UserError

Load = Callable[[Trial], Session]
Feed = Callable[[Session, int], Sequence[Arrays]]  # batches of so many requests, as the session takes them


@dataclass(frozen=True)
class Rung:
    """A session for batches of `size` requests, and such batches."""

    size: int
    session: Session
    feeds: tuple[Arrays, ...]


class Lane:
    """One batch at a time, from host memory to host memory, in a slot of the sessions of an instance."""

    def __init__(self, rungs: Sequence[Rung], slot: int) -> None:
        self.rungs, self._slot = rungs, slot
        self._turns = itertools.count()
        self.answered: Arrays = {}  # the last batch's outputs

    def answer(self, count: int) -> None:
        """Answer `count` requests as the smallest batch that holds them."""
        rung = next(rung for rung in self.rungs if rung.size >= count)
        session, slot = rung.session, self._slot
        session.bind(rung.feeds[next(self._turns) % len(rung.feeds)], slot)
        session.run(slot)
        session.wait(slot)
        self.answered = session.fetch(slot)


class Instances:
    """So many copies of a trial's model; several lanes of one where its sessions have several slots on a CPU.

    A GPU's slots share a stream and belong to one thread, so there an instance has one lane, and instances overlap.
    Close it in the end. Raises what loading raises.
    """

    def __init__(self, trial: Trial, sizes: Sequence[int], load: Load, feed: Feed, count: int) -> None:
        self._threads: list[ThreadPoolExecutor] = []
        self.lanes: list[Lane] = []
        self._owners: list[tuple[ThreadPoolExecutor, list[Rung]]] = []
        for _ in range(count):
            thread = self._start_thread()
            rungs = thread.submit(_load_ladder, trial, sizes, load, feed).result()
            self._owners.append((thread, rungs))
            whole = rungs[-1].session
            slots = whole.slots if whole.stream is None and trial.runtime.device == "cpu" else 1
            self.lanes += [Lane(rungs, slot) for slot in range(slots)]
            for _ in range(slots - 1):
                self._start_thread()
        self.rungs = tuple(rung.size for rung in self._owners[0][1])

    def _start_thread(self) -> ThreadPoolExecutor:
        self._threads.append(ThreadPoolExecutor(1))
        return self._threads[-1]

    @property
    def ladder(self) -> Sequence[Rung]:
        """The first instance's batches, the largest last."""
        return self._owners[0][1]

    @property
    def first(self) -> Rung:
        """The first instance's largest batch."""
        return self.ladder[-1]

    def call(self, action: Callable[[], Any]) -> Any:
        """Call it in the first instance's thread, to which its session belongs."""
        return self._threads[0].submit(action).result()

    def warm_up(self, plan: Plan) -> None:
        """Warm up every session until it is steady, for `plan.warmup_s` seconds at most, one after the other."""
        for thread, rungs in self._owners:
            for rung in rungs:
                thread.submit(measure.warm_up, measure.step(rung.session, "all", rung.feeds), plan).result()

    def each(self, work: Callable[[Lane], None]) -> None:
        """Do it with every lane at once, in its thread; raises what the first one raises."""
        futures: list[Future[None]] = [t.submit(work, lane) for t, lane in zip(self._threads, self.lanes, strict=True)]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.result()

    def close(self) -> None:
        """Free everything."""
        for thread, rungs in self._owners:
            for rung in rungs:
                thread.submit(rung.session.close).result()
        for thread in self._threads:
            thread.shutdown()


def _load_ladder(trial: Trial, sizes: Sequence[int], load: Load, feed: Feed) -> list[Rung]:
    """Load a session for each size that the engine takes; the largest is the trial's batch, and must load.

    It comes first: an engine that can't be loaded at all is tried once.
    """
    rungs: list[Rung] = []
    for size in sorted({*sizes, trial.dims.batch}, reverse=True):
        try:
            session = load(replace(trial, dims=replace(trial.dims, batch=size)))
        except (UserError, Unavailable):
            if not rungs:
                raise
            continue
        rungs.append(Rung(size, session, tuple(session.stage(batch) for batch in feed(session, size))))
    return rungs[::-1]
