"""Darknet's files: architectures of the YOLOv3 and YOLOv4 family, narrower than published, with random weights."""

import re
from pathlib import Path

import numpy as np

CLASSES = 2
ANCHORS = "10,14, 23,27, 37,58, 81,82, 135,169, 344,319"


def conv(filters: int, size: int = 3, stride: int = 1, activation: str = "leaky", **more: object) -> str:
    """Return a convolution with batch norm."""
    return section("convolutional", batch_normalize=1, filters=filters, size=size, stride=stride, pad=1,
                   activation=activation, **more)  # fmt: skip


def section(kind: str, **options: object) -> str:
    """Return a section of a .cfg file."""
    return f"[{kind}]\n" + "".join(f"{name}={value}\n" for name, value in options.items()) + "\n"


def head(mask: str, activation: str = "linear", classes: int = CLASSES, **more: object) -> str:
    """Return the last convolution of a scale and its yolo layer with three anchors."""
    last = section("convolutional", size=1, stride=1, pad=1, filters=3 * (5 + classes), activation=activation)
    return last + section("yolo", mask=mask, anchors=ANCHORS, classes=classes, num=6, **more)


def csp(filters: int) -> str:
    """Return YOLOv4-Tiny's block: half of the channels pass through it and are concatenated with the rest."""
    half = filters // 2
    return (conv(filters) + section("route", layers=-1, groups=2, group_id=1) + conv(half) + conv(half)
            + section("route", layers="-1,-2") + conv(filters, 1) + section("route", layers="-6,-1")
            + section("maxpool", size=2, stride=2))  # fmt: skip


NET = section("net", batch=1, width=96, height=64, channels=3)
# YOLOv4-Tiny: three blocks, two scales.
TINY4 = (
    "# a comment\r\n" + NET.replace("\n", "\r\n") + conv(8, stride=2) + conv(16, stride=2) + csp(16) + csp(32)
    + csp(64) + conv(64) + conv(32, 1) + conv(64) + head("3,4,5", scale_x_y=1.05) + section("route", layers=-4)
    + conv(16, 1) + section("upsample", stride=2) + section("route", layers="-1, 23") + conv(32)
    + head("1,2,3", scale_x_y=1.05)
)  # fmt: skip
# YOLOv3-Tiny, with a pool of stride 1 that reaches over the right and lower edge.
TINY3 = (
    NET + "".join(conv(8 << k) + section("maxpool", size=2, stride=2) for k in range(4)) + conv(64)
    + section("maxpool", size=2, stride=1) + conv(64) + conv(32, 1) + head("3,4,5") + section("route", layers=-3)
    + conv(16, 1) + section("upsample", stride=2) + section("route", layers="-1,6") + conv(32) + head("0,1,2")
)  # fmt: skip
# YOLOv4's parts: Mish, residual sums, groups, pooling at three sizes over one map, swish, dropout.
LARGE = (
    NET + conv(16, activation="mish") + conv(16, stride=2, activation="mish") + conv(16, 1, activation="mish")
    + conv(16, activation="swish", groups=4) + section("shortcut", **{"from": -3, "activation": "linear"})
    + conv(32, stride=2, activation="mish") + conv(32, stride=2) + section("maxpool", stride=1, size=5)
    + section("route", layers=-2) + section("maxpool", stride=1, size=9) + section("route", layers="-1,-3,-4")
    + conv(32, 1) + section("dropout", probability=0.5) + head("0,1,2", scale_x_y=1.2)
)  # fmt: skip
# A classifier.
PLAIN = NET + conv(8, stride=2) + section("maxpool", size=2, stride=2) + conv(16) + conv(5, 1, activation="linear")
PLAIN += section("avgpool") + section("softmax")
EVERY = {"yolov4-tiny": TINY4, "yolov3-tiny": TINY3, "yolov4": LARGE, "classifier": PLAIN}


def write(folder: Path, name: str, text: str = "", seed: int = 0) -> tuple[Path, Path]:
    """Write a .cfg file and random weights that keep activations in range."""
    cfg, stored = folder / f"{name}.cfg", folder / f"{name}.weights"
    text = text or EVERY[name]
    cfg.write_bytes(text.encode())
    rng = np.random.default_rng(seed)
    values = [np.array([0, 2, 5], "<i4").tobytes(), np.array([32], "<i8").tobytes()]
    for filters, channels, size, norm in convolutions(text):
        draw = [rng.normal(0, 0.2, filters)]
        draw += [rng.uniform(0.8, 1.2, filters), rng.normal(0, 0.2, filters), rng.uniform(0.5, 1.5, filters)] * norm
        values += [part.astype("<f4").tobytes() for part in draw]
        weight = rng.normal(0, 1.3 / np.sqrt(channels * size * size), (filters, channels, size, size))
        values.append(weight.astype("<f4").tobytes())
    stored.write_bytes(b"".join(values))
    return cfg, stored


def convolutions(text: str) -> list[tuple[int, int, int, bool]]:
    """Return each convolution's filters, channels per group, kernel size and batch norm, read from the text."""
    wide, found = list[int](), []
    for kind, body in re.findall(r"\[(\w+)\]([^\[]*)", text.replace("\r", ""))[1:]:
        options = dict(line.split("=", 1) for line in body.split("\n") if "=" in line)
        before = wide[-1] if wide else 3
        if kind == "convolutional":
            filters, groups = int(options["filters"]), int(options.get("groups", 1))
            found.append((filters, before // groups, int(options["size"]), "batch_normalize" in options))
            wide.append(filters)
        elif kind == "route":
            named = [int(part) for part in options["layers"].split(",")]
            wide.append(sum(wide[k] for k in named) // int(options.get("groups", 1)))
        else:
            wide.append(before)
    return found
