"""Decoding of JPEGs by threads and by processes, with as many of them as are given.

Crops of a photograph that comes with scikit-image, 500 x 375 pixels each, are decoded for 224 x 224. Wall time says
something on a machine that does nothing else; processor time, start of the processes included, is changed less by
other programs. Every way must give the same pixels.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import numpy as np
from PIL import Image
from skimage import data

from dyno.data import decode
from dyno.data.decode import Transform
from dyno.data.rows import DecodedRow
from dyno.worker.spec import Preprocess

WIDTH, HEIGHT, SIZE = 500, 375, (224, 224)


def photographs(folder: Path, count: int) -> list[Path]:
    """Write `count` different JPEGs; return their paths."""
    photo = Image.fromarray(data.astronaut()).resize((2 * WIDTH, 2 * HEIGHT), Image.Resampling.LANCZOS)
    rng, paths = np.random.default_rng(0), [folder / f"{i:05}.jpg" for i in range(count)]
    for path in paths:
        x, y = int(rng.integers(WIDTH)), int(rng.integers(HEIGHT))
        photo.crop((x, y, x + WIDTH, y + HEIGHT)).save(path, quality=90)
    return paths


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its ended children."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def run(name: str, count: int, rows: Iterable[DecodedRow]) -> str:
    """Print a line of the table; return a hash of all pixels."""
    before, began, sha = processor_seconds(), time.perf_counter(), hashlib.sha256()
    for row in rows:
        sha.update(row.seal.encode())
    wall = time.perf_counter() - began
    used = processor_seconds() - before
    words = f"{name:<14} {wall:7.2f} s  {count / wall:7,.0f} images/s   processor {used:6.2f} s,"
    print(f"{words} {used / count * 1e3:5.2f} ms an image, {used / wall:4.1f} of them busy", flush=True)
    return sha.hexdigest()


def main() -> int:
    """Print the table; return 1 if pixels differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", default=",".join(str(n) for n in (1, 2, 4, 8, 16, 32) if n <= cores))
    args = parser.parse_args()
    transform, hashes = Transform(SIZE, Preprocess(), 3), set()
    with tempfile.TemporaryDirectory() as scratch:
        paths = photographs(Path(scratch), args.images)
        for number in [int(n) for n in args.workers.split(",")] * args.rounds:
            with mock.patch.object(decode, "count_threads", lambda number=number: number):
                hashes.add(run(f"{number} threads", len(paths), decode._decode_in_threads(paths, transform, 0)))
            slots = decode._count_in_flight(number, transform)
            rows = decode.decode_rows(paths, transform.made_of, transform.shape, 0, number, slots)
            hashes.add(run(f"{number} processes", len(paths), rows))
        hashes.add(run("as Dyno does it", len(paths), decode.decode_images(paths, transform)))
    return int(len(hashes) != 1)


if __name__ == "__main__":
    sys.exit(main())
