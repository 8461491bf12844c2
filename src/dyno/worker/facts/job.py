"""What a job found out beside its measurements: what the engine says, how it was timed, and each kind's own result."""

from __future__ import annotations

from dataclasses import dataclass, field

from dyno.worker.facts.engine import EngineFacts, Probe
from dyno.worker.facts.inside import Function, LayerGraph
from dyno.worker.facts.json_values import EARLIER
from dyno.worker.facts.numerics import LayerErrors
from dyno.worker.facts.serve import ServeFacts
from dyno.worker.facts.sparse import Sparse
from dyno.worker.facts.video import VideoFacts

SAME_OUTPUTS = "the outputs are the same for every input"  # the beginning of a warning
Window = tuple[float, float]  # begin and end in seconds of CLOCK_MONOTONIC


@dataclass(frozen=True)
class Turns:
    """A job that measured in turns: the name of its set of processes, and the place in which it was started."""

    set: str = ""
    place: int = 0


@dataclass(frozen=True)
class ColdStart:
    """What passed from the start of a process to the first answer of its engine, in seconds by part, in order.

    `first_answer` is the whole, which the parts don't fill: no part is between two. `later` are further answers.
    `read_bytes` came from disk instead of from the kernel's cache (None where it doesn't say), and `files` are those
    that the process read code or the model from. Of its `modules` in Python so many were `uncompiled`: no byte-code.
    """

    parts: dict[str, float]
    first_answer: float
    later: tuple[float, ...] = ()
    read_bytes: int | None = None
    files: tuple[str, ...] = ()
    modules: int = 0
    uncompiled: int = 0


@dataclass(frozen=True)
class SustainedLoad:
    """Images that went through as fast as they could, for the energy: when, images/s, and how many processors other
    programs kept busy meanwhile."""

    window: Window
    images_per_s: float
    others_busy: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Timing(Sparse):
    """How a job was timed: the processors it was pinned to, windows and blocks by boundary, and who else was busy.

    `others_busy` is how many processors other programs kept busy by boundary; above `contention_threshold` a timing has
    a warning. `delays` has for each block the share of its time that the job's threads waited for a processor.
    `sustained` is of a job that also ran for the energy of an image. `build` is which build of its engine ran, where
    rounds go through several. `slowdown` is the share by which a self-test slowed the job down on purpose.
    """

    affinity: tuple[int, ...] = ()
    inputs_sha256: str = ""
    timed: dict[str, Window] = field(default_factory=dict)
    blocks: dict[str, tuple[Window, ...]] = field(default_factory=dict)
    turns: Turns | None = None
    others_busy: dict[str, float] = field(default_factory=dict)
    delays: dict[str, tuple[float, ...]] = field(default_factory=dict)
    contention_threshold: float | None = field(default=None, metadata={EARLIER: "others_bearable"})
    sustained: SustainedLoad | None = None
    build: int | None = None
    slowdown: float | None = None


@dataclass(frozen=True)
class AnsweredImages:
    """The images that were answered: the data's name, its split, how many, the hash over the photographs that were
    decoded ("": unknown), and how many of them calibration has."""

    name: str = ""
    split: str = ""
    count: int = 0
    photographs: str = ""
    set_aside: int = 0


@dataclass(frozen=True)
class PipelineFacts:
    """Images and seconds behind `pipeline`, and the images of warm-up before them."""

    images: int = 0
    seconds: float = 0.0
    warm_up: int = 0


@dataclass(frozen=True)
class StressPhase:
    """One phase of the stress test: batches [smallest, largest], outputs beyond the tolerance, the largest difference
    (relative), and growth of memory in bytes."""

    iterations: int = 0
    batches: tuple[int, int] = (0, 0)
    wrong: int = 0
    worst: float = 0.0
    tolerance: float = 0.0
    device_growth: int = 0
    host_growth: int = 0
    ok: bool = True


@dataclass(frozen=True)
class PeakOfType:
    """The fastest matrix product in one type: operations/s, the side of its matrices, operations/s by side, and when;
    or `missing`, why there is none."""

    flops_per_s: float | None = None
    side: int = 0
    sides: dict[str, float] = field(default_factory=dict)
    window: Window = (0.0, 0.0)
    missing: str = ""


@dataclass(frozen=True)
class CopyRate:
    """The rate of the fastest copy of `bytes` within the device's memory: bytes/s, read and written ones.

    `cache` are the bytes of the device's last cache (0: unknown).
    """

    bytes_per_s: float
    bytes: int
    cache: int = 0
    window: Window = (0.0, 0.0)


@dataclass(frozen=True)
class TrainingFacts:
    """What a training came to: accuracy in percent and loss of the best weights on `count` test images, its seconds,
    the file of the weights with its sha256, and sentences on the data."""

    top1: float
    top5: float
    test_loss: float
    hits: int
    count: int
    epochs: int
    best_epoch: int
    seconds: float
    images: int
    weights: str
    sha256: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts(EngineFacts, Timing):
    """All facts of a record. `data`, `evaluation`, `finite` and `random_outputs` are of round 0.

    `random_outputs` is how far two calls on one input are apart, relative to their size; `no_route` says that no other
    route to the file would lead on, and `printed` is the end of what making it printed. `stress`, `peak`, `copy`,
    `probe`, `training`, `inside`, `functions` (of a watched run), `layer_errors`, `files`, `video`, `serve` and
    `cold_start` are what jobs of other kinds found.
    """

    data: AnsweredImages | None = None
    evaluation: PipelineFacts | None = None
    finite: bool = True
    random_outputs: float | None = None
    no_route: bool = False
    printed: str = ""
    stress: dict[str, StressPhase] = field(default_factory=dict)
    peak: dict[str, PeakOfType] = field(default_factory=dict)
    copy: CopyRate | None = None
    probe: Probe | None = None
    training: TrainingFacts | None = None
    inside: LayerGraph | None = None
    functions: tuple[Function, ...] = ()
    layer_errors: LayerErrors | None = None
    files: tuple[str, ...] = ()
    video: VideoFacts | None = None
    serve: ServeFacts | None = None
    cold_start: ColdStart | None = None
