"""User data of a study: study files, images and labels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fault_campaign.campaign import STUDY, Campaign
from benchmarks.fault_campaign.changes import mutated, reset, retold, retyped
from benchmarks.fault_campaign.mutations import Subject
from benchmarks.fault_campaign.stored import SHORT

SYNSETS = "n01440764", "n01443537", "n01484850"
MORE = 'precisions = ["fp32"]\nbatches = [1]\nsizes = [8]\nmean = [0.5]\nstd = [0.5]\ntimeout = 60.0\nseed = 1\n'


def subjects(campaign: Campaign) -> Iterator[Subject]:
    """Yield study files, images of each format, and the labels of each data set format."""
    folder = campaign.folder / "data"
    folder.mkdir()
    study = folder / "study.toml"
    study.write_text(STUDY + MORE + '[runtime.fake]\nenv = {A = "b"}\n')
    dry = [["run", study, "--dry-run"]]
    yield Subject("study TOML", [study], dry, [mutated, reset, reset, reset], 14)
    yield from _photos(folder)
    yield from _labels(folder)
    yield from _flat(folder)
    yield from _video(folder)


def _photos(folder: Path) -> Iterator[Subject]:
    from PIL import Image

    files = []
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for number, suffix in enumerate((".png", ".jpg", ".bmp", ".webp", ".gif", ".tif")):
            files.append(folder / "photos" / name / f"{number}{suffix}")
            Image.new("RGB", (12, 9 + number), (40 * number, 30, 60)).save(files[-1])
    data = ["--data", folder / "photos", "--size", 8, "--channels", 3]
    words = ["eval", "fake:net", *data, "--backend", "fake@latency_ms=0.1", *SHORT, "--out", folder / "out"]
    for each in files[:6]:
        yield Subject(f"image {each.suffix}", [each], [words], [mutated], 3, [folder / "out"])


def _labels(folder: Path) -> Iterator[Subject]:
    import darknet_files
    import drawn

    cfg, weights = darknet_files.write(folder, "yolov4-tiny")
    base = ["run", cfg, "--weights", weights, "--backend", "pytorch", "--threads", 1, "--dry-run"]
    for split, images in (("val", range(4)), ("train", range(4, 8))):
        for number in images:
            drawn.draw(folder / "yolo/images" / split / f"{number:03}.jpg", number)
            label = folder / "yolo/labels" / split / f"{number:03}.txt"
            label.parent.mkdir(parents=True, exist_ok=True)
            label.write_text(drawn.line(number, "box"))
    about = folder / "yolo/data.yaml"
    about.write_text("path: .\ntrain: images/train\nval: images/val\nnames:\n  0: disc\n  1: triangle\n")
    yolo = [[*base, "--data", about]]
    yield Subject("YOLO data.yaml", [about], yolo, [mutated, retold, retold], 5)
    labels = sorted((folder / "yolo/labels/val").glob("*.txt"))[:1]
    yield Subject("YOLO labels", labels, yolo, [mutated, retold, retold], 4)
    (folder / "coco/annotations").mkdir(parents=True)
    shutil.copytree(folder / "yolo/images/val", folder / "coco/val2017")
    tables = folder / "coco/annotations/instances_val2017.json"
    tables.write_text(json.dumps(drawn.coco_file(4)))
    coco = [[*base, "--data", folder / "coco"]]
    yield Subject("COCO JSON", [tables], coco, [mutated, retyped, retyped, retyped], 8)


def _flat(folder: Path) -> Iterator[Subject]:
    """Write ImageNet's images into one folder, with a list of their classes; yield the list."""
    from PIL import Image

    flat, sorted_into = folder / "flat", folder / "sorted"
    flat.mkdir()
    lines = ["ImageId,PredictionString"]
    for number in range(1, 4):
        Image.new("RGB", (8, 8)).save(flat / f"ILSVRC2012_val_{number:08}.JPEG")
        lines.append(f"ILSVRC2012_val_{number:08},{SYNSETS[number - 1]} 1 2 3 4")
    labels = folder / "labels.csv"
    labels.write_text("\n".join(lines) + "\n")
    words: list[Any] = ["data", "imagenet-val", flat, "--labels", labels, "--out", sorted_into, "--copy"]
    yield Subject("labels CSV", [labels], [words], [mutated, retold, retold], 3, [sorted_into])


def _video(folder: Path) -> Iterator[Subject]:
    import av
    import numpy as np

    file = folder / "video.mp4"
    with av.open(str(file), "w") as made:
        stream = made.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 20 * number, np.uint8), format="rgb24")
            for packet in stream.encode(frame):
                made.mux(packet)
        for packet in stream.encode():
            made.mux(packet)
    words = ["bench", "video", file, "--model", folder / "yolov4-tiny.cfg", "--weights", folder / "yolov4-tiny.weights",
             "--threads", 1, "--backend", "pytorch", "--out", folder / "out"]  # fmt: skip
    yield Subject("video", [file], [words], [mutated], 1, [folder / "out"])
