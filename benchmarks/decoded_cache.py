"""Reading the decoded-image cache against decoding the same JPEGs again, side by side: at least ten times as fast.

Photographs from scikit-image are tiled into a few hundred JPEGs of 500 x 375 pixels (the usual size in ImageNet).
Rounds alternate, and both sides produce the same result: every image once, as an array in memory, in batches.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data as photographs

from dyno.data import load
from dyno.data.decode import Transform, decode_images
from dyno.worker.spec import Preprocess

COUNT, WIDTH, HEIGHT, SIZE, BATCH, ROUNDS = 300, 500, 375, (224, 224), 32, 5
WANTED = 10.0


def tile(folder: Path) -> None:
    """Write COUNT different crops of the photographs, in one class folder per photograph."""
    sources = {name: getattr(photographs, name)() for name in ("astronaut", "chelsea", "coffee", "rocket")}
    rng = np.random.default_rng(0)
    for name, pixels in sources.items():
        photo = Image.fromarray(pixels).resize((2 * WIDTH, 2 * HEIGHT), Image.Resampling.LANCZOS)
        (folder / name).mkdir(parents=True)
        for i in range(COUNT // len(sources)):
            x, y = int(rng.integers(WIDTH)), int(rng.integers(HEIGHT))
            photo.crop((x, y, x + WIDTH, y + HEIGHT)).save(folder / name / f"{i:03}.jpg", quality=90)


def decode_again(paths: list[Path]) -> int:
    """Decode and resize every image with all cores, in batches; return a checksum."""
    rows = (one.row for one in decode_images(paths, Transform(SIZE, Preprocess(), 3)))
    total = 0
    while batch := list(islice(rows, BATCH)):
        total += int(np.stack(batch)[:, :, ::16, ::16].sum())
    return total


def read_cache(folder: Path) -> int:
    """Read every image from the memory-mapped array, in batches; return the same checksum."""
    pixels = np.load(folder / "images.npy", mmap_mode="r")
    total = 0
    for start in range(0, len(pixels), BATCH):
        total += int(np.array(pixels[start : start + BATCH])[:, :, ::16, ::16].sum())
    return total


def seconds(work: Callable[[], int]) -> tuple[float, int]:
    """Return the duration of the work in seconds, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> int:
    """Print the table; return 1 if the cache is less than ten times as fast."""
    with tempfile.TemporaryDirectory() as name:
        photos = Path(name, "photos")
        tile(photos)
        paths = sorted(photos.glob("*/*.jpg"))
        built, _ = seconds(lambda: load(photos, Path(name, "cache"), SIZE, Preprocess(), 0).count)
        found, _ = seconds(lambda: load(photos, Path(name, "cache"), SIZE, Preprocess(), 0).count)
        cached = Path(load(photos, Path(name, "cache"), SIZE, Preprocess(), 0).folder)
        times: dict[str, list[float]] = {"decode again": [], "read the cache": []}
        for _ in range(ROUNDS):
            again, one = seconds(lambda: decode_again(paths))
            read, other = seconds(lambda: read_cache(cached))
            if one != other:
                raise SystemExit("the cache holds other pixels than decoding gives")
            times["decode again"].append(again)
            times["read the cache"].append(read)
    medians = {what: statistics.median(values) for what, values in times.items()}
    print(f"{len(paths)} JPEGs of {WIDTH} x {HEIGHT} to {SIZE[0]} x {SIZE[1]}, median of {ROUNDS} alternating rounds")
    for what, median in medians.items():
        print(f"  {what:<15} {median * 1e3:9.1f} ms  {len(paths) / median:10,.0f} images/s")
    print(f"  {'build it once':<15} {built * 1e3:9.1f} ms\n  {'find it again':<15} {found * 1e3:9.1f} ms")
    ratio = medians["decode again"] / medians["read the cache"]
    print(f"ratio {ratio:.1f} (wanted: at least {WANTED:.0f})")
    return 0 if ratio >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
