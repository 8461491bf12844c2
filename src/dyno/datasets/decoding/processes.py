"""Many images decoded by processes, in order, through memory that they share."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dyno.datasets.rows import DecodedRow

MODULE = "dyno.datasets.decoding.worker"
INDEX_BYTES = 8
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
END_S = 10.0
MOST_SLOTS = 4096  # so that all their indices fit into a pipe


class DecoderDied(Exception):
    """The processes ended before all was decoded."""


def rows(
    paths: Sequence[Path], transform: list[Any], shape: tuple[int, ...], start: int, processes: int, slots: int
) -> Iterator[DecodedRow]:
    """Yield each file's pixels, or why it can't be read, in order from `start` on, with its seconds and seal.

    `transform` holds the arguments of a `Transform`; `slots` is the number of images that shared memory holds in
    transit. Raises `DecoderDied`, and OSError if such memory or processes can't be had.
    """
    slots = min(slots, MOST_SLOTS)
    size = int(np.prod(shape))
    memory = os.memfd_create("dyno-images")
    os.ftruncate(memory, slots * size)
    pixels = np.frombuffer(mmap.mmap(memory, 0), np.uint8).reshape(slots, *shape)
    (tasks, ask), (results, say) = os.pipe(), os.pipe()
    order = {
        "processes": processes, "transform": transform, "paths": [*map(str, paths)],
        "memory": memory, "slots": slots, "tasks": tasks, "results": say,
    }  # fmt: skip
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=(memory, tasks, say), start_new_session=True,
            env={**os.environ, **ONE_THREAD},
        )  # fmt: skip
    except OSError:
        os.close(ask)
        os.close(results)
        raise
    finally:
        for handed_on in (memory, tasks, say):
            os.close(handed_on)
    try:
        with open(results, "rb") as lines:
            _hand_over(process, order)
            yield from _in_order(pixels, ask, lines, range(start, len(paths)))
    finally:
        os.close(ask)  # at which the processes end
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def _hand_over(process: subprocess.Popen[bytes], order: dict[str, Any]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # it ended already; there will be no line
        process.stdin.write(json.dumps(order).encode())


def _in_order(pixels: np.ndarray, ask: int, lines: Any, wanted: range) -> Iterator[DecodedRow]:
    """Have as many decoded at a time as there are slots; a slot is used again once its row has left it."""
    asked, ready = iter(wanted), dict[int, DecodedRow]()

    def ask_for_next() -> None:
        if (index := next(asked, None)) is not None:
            with suppress(BrokenPipeError):  # they died: the lines end
                os.write(ask, index.to_bytes(INDEX_BYTES, "little"))

    for _ in range(len(pixels)):
        ask_for_next()
    for index in wanted:
        while index not in ready:
            line = lines.readline()
            if not line.endswith(b"\n"):
                raise DecoderDied
            done, seconds, seal, reason = json.loads(line)
            ready[done] = DecodedRow(reason or pixels[done % len(pixels)], seconds, seal)
        next_one = ready.pop(index)
        if not isinstance(next_one.row, str):  # the receiver may keep it
            next_one = next_one._replace(row=next_one.row.copy())
        ask_for_next()
        yield next_one
