"""`dyno data train`'s loop against a plain PyTorch loop, side by side: at least 0.95 of its images per second.

    python benchmarks/train_loop.py [--device cuda:0] [--model torchvision:resnet18] [--size 224] [--batch 32] …

Both train the same network on the same decoded photographs with the same optimiser, schedule, crops and mirroring,
and the same number of DataLoader workers. The plain loop is what a torchvision tutorial has: a data set whose item is
one image, transformed and normalised, and the default collation. Blocks of batches alternate; the ratio is the
median over the blocks: of the wall's clock on a GPU or with workers, else of processor time, which other programs
disturb less. What Dyno writes after each epoch is timed apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from skimage import data as photographs
from torchvision.transforms import v2

from dyno.worker import system
from dyno.worker.nets import models
from dyno.worker.spec import ModelSpec, Preprocess
from dyno.worker.training import network
from dyno.worker.training import network as train_data
from dyno.worker.training.loop import Loop
from dyno.worker.training.options import TrainOptions

WANTED = 0.95
PREPROCESS = Preprocess()
CLASSES = 4


def decoded(count: int, size: int) -> train_data.Split:
    """Return crops of scikit-image's photographs, somewhat larger than `size`, memory-mapped as in Dyno's cache."""
    rng = np.random.default_rng(0)
    side = round(size * 8 / 7)
    sources = [getattr(photographs, name)() for name in ("astronaut", "chelsea", "coffee", "rocket")]
    folder = Path(tempfile.mkdtemp())
    pixels = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, (count, 3, side, side))
    for i in range(count):
        photo = np.pad(sources[i % CLASSES], ((0, side), (0, side), (0, 0)), "wrap")
        y, x = rng.integers(photo.shape[0] - side), rng.integers(photo.shape[1] - side)
        pixels[i] = photo[y : y + side, x : x + side].transpose(2, 0, 1)
    pixels.flush()
    mapped = np.load(folder / "images.npy", mmap_mode="r")
    return train_data.Split(mapped, np.arange(count) % CLASSES, np.arange(count), ("a", "b", "c", "d"))


class Plain(torch.utils.data.Dataset):  # type: ignore[misc]  # torch is Any to mypy
    """One image and its label, as torchvision's ImageFolder gives them."""

    def __init__(self, split: train_data.Split, size: int) -> None:
        self.split = split
        self.transform = v2.Compose(
            [
                v2.RandomCrop(size),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(PREPROCESS.mean, PREPROCESS.std),
            ]
        )

    def __len__(self) -> int:
        return len(self.split.index)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.transform(torch.from_numpy(np.array(self.split.pixels[i]))), int(self.split.labels[i])


def plain_epochs(split: train_data.Split, size: int, options: TrainOptions, loop: Loop) -> Iterator[int]:
    """Run a plain loop for ever; yield the number of images of each batch after its step is queued."""
    workers = options.workers
    loader = torch.utils.data.DataLoader(
        Plain(split, size), options.batch, shuffle=True, drop_last=True, num_workers=workers,
        persistent_workers=workers > 0, pin_memory=options.device != "cpu",
    )  # fmt: skip
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
    device = torch.device(options.device)
    running = torch.zeros((), device=device)
    while True:
        for images, labels in loader:
            x = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            y = labels.to(device, non_blocking=True)
            with loop.autocast():
                loss = loss_of(loop.module(x), y)
            loop.optimizer.zero_grad()
            loop.scaler.scale(loss).backward()
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
            loop.schedule.step()
            running += loss.detach()
            yield len(labels)


def dyno_epochs(split: train_data.Split, size: int, options: TrainOptions, loop: Loop) -> Iterator[int]:
    """Run Dyno's parts for ever, as `training.loop.Training._train_epoch` drives them; yield images per batch."""
    read = train_data.BatchReader(
        split, PREPROCESS, options, train_data.make_augmentation(options.augment, (size, size))
    )
    total = torch.zeros((), device=loop.device)
    epoch = 0
    while True:
        epoch += 1
        for x, y in read(train_data.load_batches(split, options, epoch)):
            total += loop.step(x, y).float() * len(y)
            yield len(y)


def seconds(steps: Iterator[int], batches: int, wait: Callable[[], None]) -> tuple[float, float]:
    """Return seconds per image over N batches, in wall time and in processor time of this process."""
    wait()
    start, busy = time.perf_counter(), time.process_time()
    images = sum(next(steps) for _ in range(batches))
    wait()
    return (time.perf_counter() - start) / images, (time.process_time() - busy) / images


def described(own: list[float], plain: list[float]) -> str:
    """Format both speeds and their ratio, with the range over the blocks."""
    ratios = sorted(theirs / ours for ours, theirs in zip(own, plain, strict=True))
    return (
        f"dyno {1 / statistics.median(own):,.1f} images/s, plain {1 / statistics.median(plain):,.1f}; "
        f"ratio {statistics.median(ratios):.3f} (blocks {ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


def compare(given: argparse.Namespace) -> float:
    """Print both speeds; return the ratio of Dyno's images per second to the plain loop's."""
    options = TrainOptions(
        epochs=1000, batch=given.batch, optimizer="sgd", augment="light", workers=given.workers, device=given.device,
        mixed_precision=given.mixed_precision,
    )  # fmt: skip
    split = decoded(given.batch * 8, given.size)
    cuda = given.device != "cpu"
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    torch.backends.cudnn.benchmark = cuda
    loops = []
    for _ in range(2):
        module = models.load(ModelSpec("net", given.model, classes=CLASSES))
        loops.append(Loop(module.to(given.device, memory_format=torch.channels_last).train(), options, 8))
    ours, theirs = dyno_epochs(split, given.size, options, loops[0]), plain_epochs(split, given.size, options, loops[1])
    for steps in (ours, theirs):
        seconds(steps, max(2, given.block // 4), wait)
    own: list[tuple[float, float]] = []
    plain: list[tuple[float, float]] = []
    for block in range(given.blocks):
        for steps, found in ((ours, own), (theirs, plain))[:: 1 if block % 2 else -1]:
            found.append(seconds(steps, given.block, wait))
    judged = 0 if cuda or given.workers else 1
    print(f"{given.model} {given.size} b{given.batch} {given.mixed_precision} {given.device} workers {given.workers}:")
    for clock, name in enumerate(("wall clock", "processor time")):
        print(f"  {name}: {described([o[clock] for o in own], [p[clock] for p in plain])}")
    ratio = statistics.median(p[judged] / o[judged] for o, p in zip(own, plain, strict=True))
    folder = Path(tempfile.mkdtemp())
    state = network.State({})
    state.add(dict.fromkeys(network.HISTORY_COLUMNS, 1.0))
    start = time.perf_counter()
    network.store_state(folder, state, loops[0].parts())
    print(f"state and weights after an epoch: {time.perf_counter() - start:.2f} s")
    return ratio


def main() -> int:
    """Return 0 if Dyno's loop is fast enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="torchvision:resnet18")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--mixed-precision", default="none")
    parser.add_argument("--block", type=int, default=6, help="batches in a block")
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--threads", type=int, default=system.physical_cores())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    ratio = compare(given)
    print(f"ratio {ratio:.3f}, at least {WANTED} wanted: {'good' if ratio >= WANTED else 'too slow'}")
    return int(ratio < WANTED)


if __name__ == "__main__":
    sys.exit(main())
