"""Facts of a job in addition to its measurements: the engine's, the timing's, and the results of each kind of job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dyno.worker.facts.engine import EngineFacts, Probe
from dyno.worker.facts.json_values import EARLIER_NAME, Sparse

# A model in any of its forms: its layers, the tensors between them, and their origin

MODULES, NODES, LAYERS = "modules", "nodes", "layers"
UNWATCHED_ERROR = "whose modules can't be watched"  # error for TorchScript and torch.export programs


@dataclass(frozen=True)
class Port:
    """A tensor read or written by a layer; -1 is a dimension known only at run time, `format` the memory layout."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    format: str = ""


@dataclass(frozen=True, kw_only=True)
class Layer(Sparse):
    """One call of a module, one node of a graph, or one layer of an engine.

    `inputs` are computed tensors, not weights. `parameters` counts the layer's weights, `shared` the weights shared
    with an earlier layer; `flops` are its operations, two per multiply-add (None: unknown). `computes_in` is the type
    of an engine's products, `tactic` its kernel; `moves`: it only changes types or layouts. `modules` and `nodes` are
    the PyTorch modules and ONNX nodes that it came from, as far as known; a `skipped` layer is listed by the engine but
    not run.
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
        """The weights that no earlier layer has; their sum over all layers is the form's total."""
        return self.parameters - self.shared


@dataclass(frozen=True, kw_only=True)
class LayerGraph(Sparse):
    """One form of a model: the calls of its `modules`, the `nodes` of its graph, or an engine's `layers`.

    `library` is the form's library with its version. `parameters` counts each weight once, even if several layers share
    it; `notes` are sentences on missing information.
    """

    form: str = ""
    library: str = ""
    parameters: int = 0
    layers: tuple[Layer, ...] = ()
    notes: tuple[str, ...] = ()

    def count_calls(self) -> list[tuple[str, int]]:
        """Return each layer's name, and the number of earlier layers with that name."""
        counts: Counter[str] = Counter()
        calls = []
        for layer in self.layers:
            calls.append((layer.name, counts[layer.name]))
            counts[layer.name] += 1
        return calls


@dataclass(frozen=True, kw_only=True)
class Function(Sparse):
    """A function of the host or the GPU in one watched run: means, in seconds.

    `where` is the host, a CUDA call or the GPU. `path` is its contribution to the critical path. `waiting` is a call's
    time waiting for the GPU, or a kernel's time from launch to start.
    """

    name: str = ""
    where: str = ""
    calls: float = 0.0
    time: float = 0.0
    path: float = 0.0
    waiting: float = 0.0


# Layer errors: the distance of each layer's output in an engine from the reference's, and its causes

MIN_LABELS = 16  # number of labels from which one may differ by chance
MAX_CLASS_NUMBER = 1024  # limit of classes stored in floating point: larger whole numbers are quantities


@dataclass(frozen=True)
class Difference:
    """A tensor of an engine (a) compared with the reference's (b).

    `error` is |a - b| / |b| of the worst input (infinite: not finite). Then: the share of close values, the largest
    differences, and the numbers of non-finite values in a and b.
    """

    error: float
    close: float
    max_abs: float
    max_rel: float
    nonfinite: int
    reference_nonfinite: int


@dataclass(frozen=True)
class LayerError:
    """The error of one layer's output, by its tensor's name in the graph.

    `reads` are the compared tensors that it is computed from. `total` is the difference when the layer reads the
    engine's values, `own` when it reads the reference's. `effect` is the error of the network's outputs when only `own`
    is added to the reference (None: not measured).
    """

    tensor: str
    reads: tuple[str, ...]
    total: Difference
    own: Difference
    effect: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerErrors(Sparse):
    """The layers of an engine compared with a reference, and the network's outputs under four conditions.

    The outputs are those of the unmodified engine (`unmodified`), with every compared tensor marked as an output
    (`marked`), of the graph cut around the `suspects` (`cut`), and cut with the reference computing the suspects
    (`substituted`). If marking hides the error, `boundary` is the last tensor at which a graph ending there agrees, and
    the first at which it doesn't. `runs` is the number of compared batches, `unmatched` the number of tensors that the
    reference lacks or that change their shape, `mismatched` of the tensors with another meaning in the reference,
    `reference_layers` of the reference's tensors, and `parts` of the pieces of the marked graph.
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
    """Return whether an output's values are labels (equal or not) rather than quantities (with distances).

    Booleans and integers are labels, except one-byte values with several channels (N x C, or N x C x H x W in either
    order): pixels, or scores that a quantised network doesn't convert back.
    """
    kind, shape = array.dtype.kind, array.shape
    if kind not in "iu" or array.dtype.itemsize > 1:
        return bool(kind in "biu")
    return not _has_channels(shape)


def have_labels(actual: Any, expected: Any) -> bool:
    """Return whether two outputs are labels, also as numbers in floating point.

    Such are a class map cast to float32, and the integers of an engine that returns float32.
    """
    if is_labels(expected):
        return True
    if expected.dtype.kind != "f":
        return False
    if is_labels(actual):
        return bool((expected % 1 == 0).all())
    return not _has_channels(expected.shape) and all(map(_holds_class_numbers, (expected, actual)))


def _has_channels(shape: Sequence[int]) -> bool:
    return len(shape) in (2, 4) and min(shape[1], shape[-1]) > 1


def _holds_class_numbers(array: Any) -> bool:
    """Return whether the values are whole numbers in the range of class numbers, and not all the same."""
    if not array.size or not (array.reshape(-1)[:100] % 1 == 0).all():
        return False
    low, high = array.min(), array.max()
    return bool(0 <= low < high < MAX_CLASS_NUMBER and (array % 1 == 0).all())


# Results of requests at given times


@dataclass(frozen=True)
class ServeStep:
    """One tested rate.

    `rate` is requested, in requests/s; `verdict` is whether it holds the bound (see `worker/serving/rates.py`), `first`
    the number of the first counted request; `unstable`: more requests came than were answered; `others_busy` are
    processors kept busy by other programs, `loadgen_s` LoadGen's percentile in seconds (0: without LoadGen).
    """

    rate: float
    verdict: str = ""
    first: int = 0
    unstable: bool = False
    others_busy: float = 0.0
    loadgen_s: float = 0.0


@dataclass(frozen=True)
class ServeFacts:
    """Requests and how they were answered.

    `percentile` of the latencies must be within `bound_s` seconds (0: no bound), which needs `least` requests. A batch
    has at most `most` requests, and its first waits at most `max_wait_s`; engines were loaded for the batch sizes
    `rungs`. `lanes` batches are answered in parallel, by `instances` sessions. `capacity` is the rate of full batches
    in requests/s. `highest` is the highest rate that holds (0: none, None: not searched). Rates below `lowest` weren't
    tried, as they give too few requests in the time (0: unlimited time). `trace` is the file of arrival times, and
    `endpoint` the server.
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


# Results of a video through a network

HOST, DEVICE = "host", "device"  # place where frames become the network's input


@dataclass(frozen=True)
class VideoFacts:
    """The results of a video.

    `frames` were answered out of `expected` (0: unknown), and `dropped` of a `live` source; `height` and `width` are
    the first frame's and `rate` the source's, per second. With several `streams`, concurrent copies of the video,
    `answered` counts all frames, and other facts are of the first stream. `seconds` is the wall time from reading the
    first frame to closing the file; `processors` is the number available to the job, `slots` of batches in flight in
    the engine, `lanes` of threads that prepare frames (and as many that post-process), and `depth` the queue length of
    a stage. `cpu` is each isolated stage's processor time per frame, and `cpu_whole` the pipeline's, in seconds.

    Under full CPU load, stages other than inference take `crowding` times that time, and inference takes
    `cpu_inference` (0: not measured); `hand_over` is the processor time of passing an item to a thread. `preloaded`
    frames were decoded into memory in advance and answered repeatedly (0: none). `prepared` is where they became the
    network's input: HOST, or DEVICE, the engine's. `tracker` is the tracking method ("": none), and `objects` the
    number of tracked objects by class. `stopped`: the user ended it. `output` and `boxes` are the files written ("":
    none).
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


# Stages of an application's request; the last is the whole request
APPLICATION_STAGES = ("preprocess", "model", "postprocess", "request")


@dataclass(frozen=True)
class ApplicationFacts:
    """An application's requests.

    `requests` were answered in turn; each calls the network `calls` times, with `batch`. `given` is the number of
    requests that the application offered (0: unknown).
    """

    requests: int = 0
    calls: int = 1
    batch: int = 1
    given: int = 0


SAME_OUTPUTS = "the outputs are the same for every input"  # the beginning of a warning
NO_VALUES = "the outputs have no values for any input"  # the beginning of a warning
Window = tuple[float, float]  # begin and end in seconds of CLOCK_MONOTONIC


@dataclass(frozen=True)
class Turns:
    """An interleaved job: the name of its set of processes, and its position in the starting order.

    `together` is the number of jobs that loaded at the same time: if it isn't 1, the seconds of loading are shared by
    all.
    """

    set: str = ""
    place: int = 0
    together: int = 1


@dataclass(frozen=True)
class ColdStart:
    """The time from the start of a process to its engine's first answer, in seconds by part, in order.

    `first_answer` is the total, more than the sum of the parts. `later` are further answers. `read_bytes` came from
    disk rather than the kernel's cache (None: unknown), and `files` are the process's code and model. `uncompiled`
    counts the Python `modules` without byte-code.
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
    """Full load for measuring energy: its time window, rate in images/s, and processors busy with other programs."""

    window: Window
    images_per_s: float
    others_busy: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Timing(Sparse):
    """A job's timing: its pinned processors (`affinity`), windows and blocks by boundary, and contention.

    `timed` and `blocks` are begins and ends in seconds of CLOCK_MONOTONIC, as in telemetry.npz; `inputs_sha256` is of
    the timed batches. `others_busy` is the number of processors kept busy by other programs, by boundary; above
    `contention_threshold` a timing has a warning. `delays` has each block's share of time that the job's threads waited
    for a processor, and `core_latencies` the nanoseconds of a round trip between two of its processors just before (0:
    unknown). `sustained` belongs to a job that also ran for energy. `build` is the number of the engine's build, if
    rounds use several. `slowdown` is a self-test's deliberate slowdown, as a share.
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
    """The answered images: the data's name, its split, and their number.

    `photographs` is the hash of the decoded photographs ("": unknown), and `set_aside` the number reserved for
    calibration.
    """

    name: str = ""
    split: str = ""
    count: int = 0
    photographs: str = ""
    set_aside: int = 0


@dataclass(frozen=True)
class PipelineFacts:
    """Images and seconds of the rate `pipeline`, and the warm-up images before."""

    images: int = 0
    seconds: float = 0.0
    warm_up: int = 0


@dataclass(frozen=True)
class StressPhase:
    """One phase of the stress test.

    `batches` are the smallest and largest; `wrong` counts outputs beyond the tolerance, `worst` is the largest relative
    difference, and the growths of memory are in bytes.
    """

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
    """The fastest matrix product in one type.

    Operations/s, the side of its matrices, operations/s by side, and the time window; or `missing`, the reason for its
    absence.
    """

    flops_per_s: float | None = None
    side: int = 0
    sides: dict[str, float] = field(default_factory=dict)
    window: Window = (0.0, 0.0)
    missing: str = ""


@dataclass(frozen=True)
class CopyRate:
    """The rate of the fastest copy of `bytes` within the device's memory: bytes/s, reads plus writes.

    `cache` is the size of the device's last cache in bytes (0: unknown).
    """

    bytes_per_s: float
    bytes: int
    cache: int = 0
    window: Window = (0.0, 0.0)


@dataclass(frozen=True)
class TrainingFacts:
    """The result of a training.

    Accuracy in percent and loss of the best weights on `count` test images, its seconds, the weights' file with its
    sha256, and sentences on the data.
    """

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
    """All facts of a record; `data`, `evaluation`, `finite`, `nan_share` and `random_outputs` only in round 0.

    `finite`: all output values are finite; `nan_share` is the share of NaN; `random_outputs` is the difference of two
    calls on one input, relative to their size. `no_route`: no other route to the file would succeed. `printed` is the
    end of the output while the file was made. `stress`, `peak`, `copy`, `probe`, `training`, `inside`, `functions` (of
    a watched run), `layer_errors`, `files`, `video`, `serve`, `application` and `cold_start` are results of other kinds
    of jobs.
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
