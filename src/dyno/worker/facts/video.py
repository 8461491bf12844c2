"""What a job found out about a video that went through a network."""

from __future__ import annotations

from dataclasses import dataclass, field

HOST, DEVICE = "host", "device"  # where frames become the network's input


@dataclass(frozen=True)
class VideoFacts:
    """A video as it was answered.

    `frames` were answered out of `expected` (0: the source doesn't say), and `dropped` of a `live` one; `height` and
    `width` are those of its first frame and `rate` the source's own, per second. With several `streams`, the same
    video so many times at once, `answered` counts the frames of all, and what else is of one is of the first.
    `seconds` is the wall time from the first frame's reading to the closed file, `processors` how many the job could
    use, `slots` how many batches its engine has in flight, `lanes` how many threads prepare frames, and how many
    post-process them, and `depth` how many items may wait for a stage. `cpu` is the processor time of each stage alone
    per frame, and `cpu_whole` that of the pipeline per frame, in seconds.
    While every processor works the stages but inference take `crowding` times that time, and inference
    `cpu_inference` (0: not measured); `hand_over` is that of handing something to a thread.
    `preloaded` is how many frames were decoded into memory before, and answered again and again (0: none).
    `prepared` says where they became the network's input: HOST, or DEVICE, where the engine computes.
    `tracker` is the method by which objects were followed ("": none), and `objects` how many there were of each class.
    `stopped` says that the user ended it. `output` and `boxes` are the files written, "" for none.
    """

    source: str = ""
    output: str = ""
    boxes: str = ""
    frames: int = 0
    answered: int = 0
    streams: int = 1
    expected: int = 0
    dropped: int = 0
    live: bool = False
    height: int = 0
    width: int = 0
    rate: float = 0.0
    seconds: float = 0.0
    processors: int = 1
    slots: int = 1
    lanes: int = 1
    depth: int = 4
    cpu: dict[str, float] = field(default_factory=dict)
    cpu_whole: float = 0.0
    crowding: float = 1.0
    cpu_inference: float = 0.0
    hand_over: float = 0.0
    preloaded: int = 0
    prepared: str = HOST
    tracker: str = ""
    objects: dict[str, int] = field(default_factory=dict)
    stopped: bool = False
