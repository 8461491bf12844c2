"""Photographs in class folders, to try the tutorial without one's own: python examples/photographs.py FOLDER

Crops of four photographs that ship with scikit-image. A photograph is cut into tiles first and a tile is either learnt
from or tested on, so that no pixel is in both.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")  # these are in the package, the others are downloaded
COUNTS = {"train": 80, "test": 40}  # crops of each photograph
TILE, SIDE = 96, 72


def main(folder: Path) -> None:
    """Write FOLDER/{train,test}/CLASS/NUMBER.jpg."""
    rng = np.random.default_rng(0)
    for name in PHOTOGRAPHS:
        photograph = getattr(data, name)()[..., :3]
        rows, columns = (n // TILE for n in photograph.shape[:2])
        tiles = [(row, column) for row in range(rows) for column in range(columns)]
        for split, count in COUNTS.items():
            mine = [(r, c) for r, c in tiles if ((r + c) % 3 == 0) == (split == "test")]
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for k in range(count):
                row, column = mine[int(rng.integers(len(mine)))]
                top, left = (n * TILE + int(rng.integers(TILE - SIDE + 1)) for n in (row, column))
                crop = Image.fromarray(photograph[top : top + SIDE, left : left + SIDE])
                crop.save(folder / split / name / f"{k:03}.jpg", quality=95)
    print(f"{sum(COUNTS.values()) * len(PHOTOGRAPHS)} images in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
