"""A process that decodes images for another process, in forked workers that take one image at a time.

python -m dyno.data.decoding_process reads an order from standard input, imports the libraries once, and forks.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from dyno.data.decode import INDEX_BYTES, Transform, register_formats
from dyno.data.rows import seal_row
from dyno.worker.spec import Preprocess, from_json


def main() -> int:
    """Decode until the requests end; return exit code 1 if a worker died of an image."""
    order: dict[str, Any] = json.load(sys.stdin)
    register_formats()
    children = set()
    for _ in range(order["processes"]):
        child = os.fork()
        if not child:
            try:
                decode_requests(order)
            finally:
                os._exit(0)  # without the parent's exit handlers
        children.add(child)
    while children:
        child, status = os.wait()
        children.discard(child)
        if status:
            for sibling in children:
                os.kill(sibling, signal.SIGKILL)
            return 1
    return 0


def decode_requests(order: dict[str, Any]) -> None:
    """Read indices of paths from one pipe, write pixels into their slots, and report each in another pipe."""
    size, preprocess, channels, upright = order["transform"]
    transform = Transform(tuple(size), from_json(Preprocess, preprocess), channels, upright)
    memory = np.frombuffer(mmap.mmap(order["memory"], 0), np.uint8).reshape(order["slots"], *transform.shape)
    while message := os.read(order["tasks"], INDEX_BYTES):
        index = int.from_bytes(message, "little")
        start_time = time.perf_counter()
        row = transform.read(Path(order["paths"][index]))
        decoded = seal_row(row, time.perf_counter() - start_time)
        if not isinstance(row, str):
            memory[index % order["slots"]] = row
        line = [index, decoded.seconds, decoded.seal, row if isinstance(row, str) else ""]
        os.write(order["results"], json.dumps(line).encode() + b"\n")  # in one piece, as it is short enough for a pipe


if __name__ == "__main__":
    sys.exit(main())
