"""A small data set of real images for studies on machines without one: python studies/photos.py FOLDER

Crops of the photographs that ship with scikit-image, in one folder: they have no labels that a network would know.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data

PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "rocket")  # these are in the package, the others are downloaded
CROPS, SIDE = 64, 256


def main(folder: Path) -> None:
    """Write CROPS images of SIDE x SIDE pixels for every photograph."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name in PHOTOGRAPHS:
        photograph = getattr(data, name)()[..., :3]
        for k in range(CROPS):
            top, left = (int(rng.integers(0, n - SIDE + 1)) for n in photograph.shape[:2])
            crop = photograph[top : top + SIDE, left : left + SIDE]
            Image.fromarray(crop).save(folder / f"{name}-{k:03}.jpg", quality=95)
    print(f"{len(PHOTOGRAPHS) * CROPS} images in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
