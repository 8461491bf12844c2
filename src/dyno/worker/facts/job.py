"""Facts of a job beside its measurements: the engine's, the timing's, and the results of each kind of job."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dyno.worker.facts.engine import EngineFacts, Probe
from dyno.worker.facts.json_values import EARLIER_NAME, Sparse

# What a model is made of, in any of its forms: the layers, what flows between them, and where each came from.

MODULES, NODES, LAYERS = "modules", "nodes", "layers"
UNWATCHED_ERROR = "whose modules can't be watched"  # error for TorchScript and torch.export programs


@dataclass(frozen=True)
class Port:
    """One tensor that a layer reads or writes; -1 is a dimension that the run decides, `format` its memory layout."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    format: str = ""


@dataclass(frozen=True, kw_only=True)
class Layer(Sparse):
    """One call of a module, one node of a graph, or one layer of an engine.

    `inputs` are those that are computed, not weights. `parameters` counts the layer's own weights, of which an
    earlier layer has `shared` too, `flops` its operations with a multiply-add as two (None: unknown). `computes_in`
    is the type that an engine multiplies in, `tactic` its kernel, and `moves` says that it only changes types or
    layouts. `modules` and `nodes` are the PyTorch modules and the ONNX nodes that it came from, as far as its own
    form says; `skipped` is one that an engine keeps in its list and doesn't run.
    """

    name: str = ""
    type: str = ""
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    parameters: int = 0
    shared: int = 0
    flops: int | None = None
    computes_in: str = ""
    tactic: str = ""
    moves: bool = False
    skipped: bool = False
    modules: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    @property
    def added(self) -> int:
        """The weights that no earlier layer has: over all layers they add up to those of the form."""
        return self.parameters - self.shared


@dataclass(frozen=True, kw_only=True)
class LayerGraph(Sparse):
    """One form of a model: the calls of its `modules`, the `nodes` of its graph, or an engine's `layers`.

    `library` is whose form it is, with its version. `parameters` counts each weight once, however many layers use it;
    `notes` are sentences on what can't be seen.
    """

    form: str = ""
    library: str = ""
    parameters: int = 0
    layers: tuple[Layer, ...] = ()
    notes: tuple[str, ...] = ()

    def count_calls(self) -> list[tuple[str, int]]:
        """Return the name of each layer, and how many layers before it have that name."""
        seen: Counter[str] = Counter()
        found = []
        for layer in self.layers:
            found.append((layer.name, seen[layer.name]))
            seen[layer.name] += 1
        return found


@dataclass(frozen=True, kw_only=True)
class Function(Sparse):
    """A function of the host or the GPU in one watched run, on average, in seconds.

    `where` is the host, a call of CUDA or the GPU. `path` is what it contributes to the critical path. `waiting` is, of
    a call, how long it waited for the GPU, and of a kernel how long it waited after its launch.
    """

    name: str = ""
    where: str = ""
    calls: float = 0.0
    time: float = 0.0
    path: float = 0.0
    waiting: float = 0.0


# Layer errors: how far the output of each layer of an engine is from the reference's, and which layers make that.

MIN_LABELS = 16  # labels of which one may differ by chance


@dataclass(frozen=True)
class Difference:
    """A tensor of an engine (a) against the reference's (b): |a - b| / |b| of the input where that is largest
    (infinite: not finite), the share of values that are close, the largest differences, and values of a and of b that
    are not finite."""

    error: float
    close: float
    max_abs: float
    max_rel: float
    nonfinite: int
    reference_nonfinite: int


@dataclass(frozen=True)
class LayerError:
    """The output of one layer, by its tensor's name in the graph.

    `reads` are the compared tensors that it is computed from. `total` is the difference when the layer reads what the
    engine computed, `own` when it reads the reference's values. `effect` is the error of the network's outputs when
    nothing but `own` is added to the reference (None: not tried).
    """

    tensor: str
    reads: tuple[str, ...]
    total: Difference
    own: Difference
    effect: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerErrors(Sparse):
    """The layers of an engine against a reference, and the network's outputs under four conditions.

    The outputs are those of the unmodified engine (`unmodified`), with every compared tensor marked as an output
    (`marked`), of the graph cut around the `suspects` (`cut`), and cut there with the reference computing the suspects
    (`substituted`). Where marking hides the error, `boundary` is the last tensor at which a graph that ends there
    agrees, and the first at which it doesn't. `runs` are the batches that were compared, `unmatched` the tensors that
    the reference doesn't have, or that change their shape, `mismatched` those that it has with another meaning,
    `reference_layers` how many tensors the reference has, and `parts` how many pieces the marked graph was run in.
    """

    layers: tuple[LayerError, ...] = ()
    unmodified: Difference | None = None
    marked: Difference | None = None
    cut: Difference | None = None
    substituted: Difference | None = None
    suspects: tuple[str, ...] = ()
    boundary: tuple[str, ...] = ()
    runs: int = 0
    unmatched: int = 0
    mismatched: int = 0
    reference_layers: int = 0
    parts: int = 0


def is_labels(array: Any) -> bool:
    """Return whether an output's values are labels (equal or not) rather than quantities (near or far apart).

    Booleans and integers are labels, except those of one byte with several channels (N x C, or N x C x H x W in either
    order): pixels, or scores that a quantised network doesn't convert back.
    """
    kind, shape = array.dtype.kind, array.shape
    if kind not in "iu" or array.dtype.itemsize > 1:
        return bool(kind in "biu")
    return not (len(shape) in (2, 4) and min(shape[1], shape[-1]) > 1)


# What a job found out about requests that came at given times.


@dataclass(frozen=True)
class ServeStep:
    """One rate that was tried: requests/s asked for, whether it holds the bound (see `worker/serving/rates.py`), the
    number of the first request that counts, whether more came than were answered, how many processors other programs
    kept busy, and the percentile's seconds by LoadGen (0 without it)."""

    rate: float
    verdict: str = ""
    first: int = 0
    unstable: bool = False
    others_busy: float = 0.0
    loadgen_s: float = 0.0


@dataclass(frozen=True)
class ServeFacts:
    """Requests and how they were answered.

    `percentile` of the latencies must be within `bound_s` seconds (0: there is no bound), for which `least` requests
    are needed. At most `most` are a batch, for which the first waits at most `max_wait_s`; engines were loaded for
    the `rungs`. `lanes` batches are answered at once, by `instances` sessions. `capacity` is how many requests per
    second full batches allow. `highest` is the highest rate that holds, 0 for none, None where none was searched.
    Rates below `lowest` weren't tried, as the time for a rate brings too few requests (0: any time).
    `trace` is the name of the file that says when requests came, and `endpoint` the server.
    """

    percentile: float = 0.99
    bound_s: float = 0.0
    least: int = 0
    most: int = 1
    max_wait_s: float = 0.0
    queue: int = 0
    instances: int = 1
    lanes: int = 1
    rungs: tuple[int, ...] = ()
    capacity: float = 0.0
    searched: bool = False
    resolution: float = 0.0
    highest: float | None = None
    lowest: float = 0.0
    trace: str = ""
    endpoint: str = ""
    steps: tuple[ServeStep, ...] = field(default=())


# What a job found out about a video that went through a network.

HOST, DEVICE = "host", "device"  # place where frames become the network's input


@dataclass(frozen=True)
class VideoFacts:
    """A video as it was answered.

    `frames` were answered out of `expected` (0: the source doesn't say), and `dropped` of a `live` one; `height` and
    `width` are those of its first frame and `rate` the source's own, per second. With several `streams`, the same
    video that many times at once, `answered` counts the frames of all, and what else is of one is of the first.
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


# Of an application's request; the last is all of it, with what lies between the others.
APPLICATION_STAGES = ("preprocess", "model", "postprocess", "request")


@dataclass(frozen=True)
class ApplicationFacts:
    """An application's requests: how many were answered, in turn; how often one calls the network, with which `batch`;
    and how many the application gave (0: not asked)."""

    requests: int = 0
    calls: int = 1
    batch: int = 1
    given: int = 0


SAME_OUTPUTS = "the outputs are the same for every input"  # the beginning of a warning
NO_VALUES = "the outputs have no values for any input"  # the beginning of a warning
Window = tuple[float, float]  # begin and end in seconds of CLOCK_MONOTONIC


@dataclass(frozen=True)
class Turns:
    """A job that measured in turns: the name of its set of processes, and the place in which it was started.

    `together` is the number of jobs that loaded at the same time: where it is not 1, the seconds of loading are those
    of all of them.
    """

    set: str = ""
    place: int = 0
    together: int = 1


@dataclass(frozen=True)
class ColdStart:
    """The time from the start of a process to the first answer of its engine, in seconds by part, in order.

    `first_answer` is the whole, which the parts don't fill: no part is between two. `later` are further answers.
    `read_bytes` came from disk instead of from the kernel's cache (None where it doesn't say), and `files` are those
    that the process read code or the model from. `uncompiled` counts the Python `modules` without byte-code.
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
    """How a job was timed: the processors it was pinned to (`affinity`), windows and blocks by boundary, and who else
    was busy.

    `timed` and `blocks` are begins and ends in seconds of CLOCK_MONOTONIC, as in telemetry.npz; `inputs_sha256` is of
    the batches that timing was fed.
    `others_busy` is how many processors other programs kept busy by boundary; above `contention_threshold` a timing has
    a warning. `delays` has for each block the share of its time that the job's threads waited for a processor, and
    `core_latencies` the nanoseconds from one of its processors to another and back just before (0: unknown).
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
    core_latencies: dict[str, tuple[int, ...]] = field(default_factory=dict)
    contention_threshold: float | None = field(default=None, metadata={EARLIER_NAME: "others_bearable"})
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
    """The result of a training: accuracy in percent and loss of the best weights on `count` test images, its seconds,
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
    """All facts of a record. `data`, `evaluation`, `finite`, `nan_share` and `random_outputs` are of round
    0.

    `finite` is whether all values of the outputs are, `nan_share` the share of those that are NaN;
    `random_outputs` is how far two calls on one input are apart, relative to their size; `no_route` says that no other
    route to the file would lead on, and `printed` is the end of what making it printed. `stress`, `peak`, `copy`,
    `probe`, `training`, `inside`, `functions` (of a watched run), `layer_errors`, `files`, `video`, `serve`,
    `application` and `cold_start` are what jobs of other kinds found.
    """

    data: AnsweredImages | None = None
    evaluation: PipelineFacts | None = None
    finite: bool = True
    nan_share: float = 0.0
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
    application: ApplicationFacts | None = None
    cold_start: ColdStart | None = None
