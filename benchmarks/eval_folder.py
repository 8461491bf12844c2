"""`dyno eval` over a folder of JPEGs against a plain torchvision loop with the same network, side by side.

Photographs that come with scikit-image, cropped, mirrored and brightened by chance, become JPEGs of 500 x 375 pixels in
class folders. Then, in alternation:

- plain: `ImageFolder` and `DataLoader` (a worker per core), torchvision's usual transforms, the network in a loop,
  top-1 and top-5. The loop decodes every image each time.
- first: `dyno eval` without decoded images: every image is hashed, decoded and stored, latencies are timed, all images
  go through. The network was inspected before, on other images: that takes as long as importing its library, however
  many images there are, and the plain loop's seconds hold no import either. How long it took is printed, too.
- later: the same command again: the decoded images are there, everything else is done again.

Both read the network's weights from one file: random ones, with statistics of batch norm under which the images get
different answers, or agreement would mean nothing. The plain loop runs it in PyTorch; Dyno runs it in `--backend`, ONNX
Runtime unless another is named. With `--backend pytorch` nothing can be faster than the network itself, which is most
of the plain loop on a CPU: the last line says how fast that is.

`command` is the wall time from start to end of the process, as a user waits for it; `loop` is the plain loop alone,
for Dyno the evaluation's pipeline, and of a first pass also all that its command takes longer than the later one.
`processor` is the processor time of the command with all of its children, which other programs on the machine change
less than the wall time. The targets are for the loops: a command of Dyno also times latencies for some seconds, which
the plain loop has no part of, so how its whole time compares depends on the number of images.

On a GPU the pipeline's rate is compared with what `latency/model` allows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dyno.results import trial_result
from dyno.worker.record import write_json

WIDTH, HEIGHT = 500, 375
SOURCES = ("astronaut", "chelsea", "coffee", "rocket")
FEW = 8  # images for the network's inspection
WANTED = {"first": 1.0, "later": 3.0, "gpu": 0.9}
WEIGHTS = """
import sys
import torch, torchvision
from safetensors.torch import save_file
torch.manual_seed(0)
model = getattr(torchvision.models, sys.argv[1])(weights=None, num_classes=4)
for module in model.modules():
    if isinstance(module, torch.nn.BatchNorm2d):
        module.momentum = None  # the mean over all that it saw
with torch.inference_mode():
    for _ in range(4):
        model(torch.randn(32, 3, 224, 224))
save_file(model.state_dict(), sys.argv[2])
"""
PLAIN = """
import json, os, sys, time
import torch, torchvision
from safetensors.torch import load_file
from torchvision import transforms as t
folder, name, weights, device, batch, threads = *sys.argv[1:5], *map(int, sys.argv[5:])
torch.set_num_threads(threads)
model = getattr(torchvision.models, name)(weights=None, num_classes=4).eval()
model.load_state_dict(load_file(weights))
model.to(device)
usual = t.Compose([t.Resize(256), t.CenterCrop(224), t.ToTensor(),
                   t.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
data = torchvision.datasets.ImageFolder(folder, usual)
loader = torch.utils.data.DataLoader(data, batch, num_workers=threads, pin_memory=device != "cpu")
top1 = top5 = 0
begin = time.perf_counter()
with torch.inference_mode():
    for images, labels in loader:
        best = model(images.to(device, non_blocking=True)).topk(4).indices.cpu()
        hits = best == labels[:, None]
        top1, top5 = top1 + int(hits[:, 0].sum()), top5 + int(hits.sum())
print(json.dumps({"loop": time.perf_counter() - begin, "images": len(data), "top1": top1, "top5": top5}))
"""


@dataclass
class Side:
    """Seconds of one of the three sides, one value per round."""

    command: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)


def photographs(folder: Path, count: int) -> None:
    """Write `count` different JPEGs in one class folder per photograph; equal counts give equal images.

    They lie in FOLDER/val. FOLDER/train has one more image per class for the calibration.
    """
    from PIL import Image, ImageEnhance
    from skimage import data

    rng = np.random.default_rng(0)
    photos = {name: Image.fromarray(getattr(data, name)()) for name in SOURCES}
    photos = {name: photo.resize((2 * WIDTH, 2 * HEIGHT), Image.Resampling.LANCZOS) for name, photo in photos.items()}
    for name, photo in photos.items():
        for split in ("train", "val"):
            (folder / split / name).mkdir(parents=True)
        photo.resize((WIDTH, HEIGHT)).save(folder / "train" / name / "whole.jpg")

    def write(i: int, x: int, y: int, mirrored: bool, brightness: float) -> None:
        name = SOURCES[i % len(SOURCES)]
        one = photos[name].crop((x, y, x + WIDTH, y + HEIGHT))
        one = one.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else one
        ImageEnhance.Brightness(one).enhance(brightness).save(folder / "val" / name / f"{i:05}.jpg", quality=90)

    columns = (rng.integers(WIDTH, size=count), rng.integers(HEIGHT, size=count), rng.random(count) < 0.5)
    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(count), *(c.tolist() for c in columns), rng.uniform(0.7, 1.3, count).tolist()))


def run(command: Sequence[str], env: dict[str, str], side: Side) -> str:
    """Run the command, append its wall and processor time to the side, return its last printed line."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command[:4]}: {done.stderr[-2000:]}")
    side.command.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    side.processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return done.stdout.strip().splitlines()[-1]


def plain(photos: Path, weights: Path, args: argparse.Namespace, side: Side) -> dict[str, Any]:
    """Run the plain loop once; return its printed result."""
    words = (str(photos / "val"), args.model, str(weights), args.device, str(args.batch), str(args.threads))
    found: dict[str, Any] = json.loads(run((sys.executable, "-c", PLAIN, *words), dict(os.environ), side))
    side.loop.append(found["loop"])
    return found


def evaluate(
    photos: Path, weights: Path, place: Path, args: argparse.Namespace, side: Side
) -> trial_result.TrialResult:
    """Run `dyno eval` once into a new run folder; return its trial."""
    out = place / f"run-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "dyno", "eval", f"torchvision:{args.model}", "--data", str(photos),
               "--weights", str(weights), "--batch", str(args.batch),
               "--backend", args.backend, "--precision", args.precision, "--device", args.device,
               "--threads", str(args.threads), "--classes", "4", "--out", str(out)]  # fmt: skip
    run([*command, *args.dyno.split()], {**os.environ, "DYNO_CACHE": str(place / "cache")}, side)
    (trial,) = trial_result.load_run(out)
    assert trial.facts.evaluation is not None  # real images are timed
    side.loop.append(trial.facts.evaluation.seconds)
    return trial


def same(found: dict[str, Any], trial: trial_result.TrialResult) -> str:
    """Return both counts of right top-1 answers, as text."""
    from dyno.results.metrics.accuracy import TOP1

    hits = TOP1.hits(trial)
    assert hits is not None and len(hits) == found["images"]
    return f"top-1: plain {found['top1']} of {found['images']} right, dyno {int(hits.sum())}"


def seconds(sides: dict[str, Side]) -> str:
    """Return each side's seconds in the last round, as text, so that an interrupted run has printed something."""
    return ", ".join(f"{name} {side.loop[-1]:.2f} s of {side.command[-1]:.1f}" for name, side in sides.items())


def on_gpu(trial: trial_result.TrialResult) -> tuple[float, float]:
    """Return the pipeline's images per second, and the rate that the model's latency alone allows."""
    return trial.value("pipeline") or 0.0, trial.batch / float(np.median(trial.samples("latency", "model")))


def main() -> int:
    """Print the table; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("images", 2000), ("batch", 32), ("rounds", 2), ("threads", len(os.sched_getaffinity(0)))):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in (("model", "mobilenet_v3_small"), ("device", "cpu"), ("backend", "onnxruntime"),
                        ("precision", "fp32"), ("dyno", ""), ("json", "")):  # fmt: skip
        parser.add_argument(f"--{name}", default=value, help="more flags for dyno eval" if name == "dyno" else None)
    args = parser.parse_args()
    sides, inspecting = {name: Side() for name in ("plain", "first", "later")}, Side()
    with tempfile.TemporaryDirectory() as scratch:
        photos, weights = Path(scratch, "photos"), Path(scratch, "weights.safetensors")
        photographs(photos, args.images)
        photographs(photos.with_name("few"), FEW)
        subprocess.run([sys.executable, "-c", WEIGHTS, args.model, str(weights)], check=True)
        for i in range(args.rounds):
            place = Path(scratch, f"round{i}")
            evaluate(photos.with_name("few"), weights, place, args, inspecting)
            evaluate(photos.with_name("few"), weights, place, args, inspecting)
            found = plain(photos, weights, args, sides["plain"])
            evaluate(photos, weights, place, args, sides["first"])
            trial = evaluate(photos, weights, place, args, sides["later"])
            sides["first"].loop[-1] += sides["first"].command[-1] - sides["later"].command[-1]
            print(f"round {i}: {same(found, trial)}; {seconds(sides)}", flush=True)
        rates = on_gpu(trial)
    took = [first - again for first, again in zip(inspecting.command[::2], inspecting.command[1::2], strict=True)]
    print(f"inspecting the network and decoding {FEW} images took {statistics.median(took):.2f} s")
    return report(args, sides, rates)


def report(args: argparse.Namespace, sides: dict[str, Side], rates: tuple[float, float]) -> int:
    """Print the table and the missed targets; return 1 if there is any."""
    print(f"{args.images} JPEGs, {args.model} {args.precision} on {args.device}, batch {args.batch}, {args.threads} "
          f"threads, {args.backend}; medians of {args.rounds} alternating rounds; ratios are plain / Dyno")  # fmt: skip
    ratios: dict[str, dict[str, float]] = {}
    for name, side in sides.items():
        ratios[name] = {}
        cells = []
        for kind in ("command", "processor", "loop"):
            pairs = zip(getattr(sides["plain"], kind), getattr(side, kind), strict=True)
            ratios[name][kind] = statistics.median(theirs / own for theirs, own in pairs)
            cells.append(f"{kind} {statistics.median(getattr(side, kind)):8.2f} s {ratios[name][kind]:6.2f}x")
        print(f"  {name:6} " + "   ".join(cells))
    pipeline, model = rates
    print(f"  pipeline {pipeline:,.0f} images/s; latency/model allows {model:,.0f}: {pipeline / model:.1%}")
    if args.json:
        write_json(Path(args.json), {"arguments": vars(args), "ratios": ratios, "pipeline": pipeline, "model": model})
    if args.device != "cpu":
        return int(pipeline < WANTED["gpu"] * model)
    return int(any(ratios[name]["loop"] < WANTED[name] for name in ("first", "later")))


if __name__ == "__main__":
    sys.exit(main())
