"""Specifications of jobs: frozen data that travels between processes as JSON.

A `Trial` describes itself completely, and its id is the hash of the description: equal trials of two studies have equal
ids. If a sha256 represents the content, the path isn't hashed.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import re
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union

from dyno.worker.facts.files import MakerFacts
from dyno.worker.facts.json_values import Misfit, Sparse, make_reader

SCHEMA = 2
BATCH_AXIS = "batch"  # name of the batch axis of a shape
# Beginnings of warnings that the verdict repeats
TEXT_ORDER = "classes are numbered in the order of their names as text"
AS_READ = "the boxes, read"
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8", "int4", "fp4", "int2")
BOUNDARIES = ("model", "all", "throughput")
ENDPOINT_PREFIX = "endpoint:"  # prefix of models on a server
NETWORK_LIBRARIES = ("torchvision", "timm")  # prefixes of a library's network names
NETWORK_FILES = ("ultralytics", "darknet")  # prefixes that a user's own file may follow
NETWORK_FOLDER = "hf"  # prefix of a folder of transformers
TIMM_FOLDER = "timm:local-dir:"  # timm's prefix of local folders
# Default number of rounds; with an adaptive rule, the rounds before the first decision. With three rounds (two degrees
# of freedom) a row in a family of seven needs a difference of ten spreads; with five rounds, of three.
DEFAULT_ROUNDS = 5
DECIDED, EVERY_ROW, FIXED = "decided", "every-row", "rounds"  # stopping rules of a study
ADAPTIVE_RULES = (DECIDED, EVERY_ROW)  # rules that add rounds after the planned ones
INFERENCE_PARTS = ("enqueue", "h2d", "compute", "d2h")  # parts of one inference on a GPU, host to host
SAVED_SUFFIXES = (".pt2", ".torchscript", ".jit")  # suffixes of torch.export.save and torch.jit.save
STRESS_PHASES = ("min", "opt", "max", "random")  # batches of the stress test, by name
BUILD_OPTIONS = (
    "build"  # option of backends with a builder that times kernels, so that equal builds differ; in a job: its build
)
TIMING_CACHE = "timing_cache"  # option of a backend: builds reuse the timings of earlier builds
PLAN_OPTION = "plan"  # job option: fields of the trial's plan changed by a further round
ENERGY_OPTION = "energy"  # job option: seconds at full load to measure energy
STARTED_VARIABLE = "DYNO_STARTED"  # environment variable of a job: CLOCK_MONOTONIC when its process started
SLOWDOWN_OPTION = "slowdown"  # job option of the self-test: deliberate slowdown of each run, as a share

ELLIPSIS = "…"  # marks a cut in a long message
SENTENCE_ENDS = re.compile(r"(?<=[.;!?])\s+(?=[A-Z\[(\"'])|,?\s+(?=Error\b)|(?=\[\w*Error\])")
WRONG_VALUE = re.compile(
    r"\b(?:[Ee]rror|must|should|expect|cannot|can't|not|un[a-z]+|[Ii]nvalid|in[a-z]+|mis[a-z]+|instead|[Ff]ail)"
)
Option = Union[str, int, float, bool]
T = TypeVar("T")


class UserError(Exception):
    """One line on an error in the user's input and its remedy (exit code 2)."""


class Unfinished(UserError):
    """One line on an interruption of the work in spite of good input (exit code 3)."""


class NoRoute(UserError):
    """A `UserError` about the model itself: every other route to a file would fail too."""


class Unanswered(UserError):
    """A request without an answer; the next request may get one."""


class Unavailable(Exception):
    """A backend, device or precision missing on this machine; the trial becomes *skipped* with this reason."""


# Aliases of backends and precisions
OTHER_NAMES = {
    "onnx": "onnxruntime", "ort": "onnxruntime", "ov": "openvino", "torch": "pytorch", "trt": "tensorrt",
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16",
}  # fmt: skip


def usual_name(name: str) -> str:
    """Return Dyno's name of a backend or precision, given an alias or another capitalisation."""
    lower_name = str(name).lower()
    return OTHER_NAMES.get(lower_name, lower_name if lower_name in (*PRECISIONS, *OTHER_NAMES.values()) else name)


def check_known(noun: str, name: str, names: Iterable[str], context: str = "") -> None:
    """Raise a `UserError` with the nearest spelling if the name is not known."""
    names = tuple(names)
    if name not in names:
        similar = difflib.get_close_matches(str(name), names, 1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"known: {', '.join(names) or 'none'}"
        raise UserError(f"unknown {noun} {name!r}{context}; {hint}")


def clean_text(text: object) -> str:
    """Return the text for one line of a terminal: control characters (escape sequences, line ends) become spaces."""
    return "".join(c if c.isprintable() else " " for c in str(text)).strip()


def shorten(text: object, max_length: int = 300) -> str:
    """Return the text as one line of at most `max_length` characters.

    Of a longer text, the last sentence that names an error comes first, then the beginning: libraries put that sentence
    after lists of nodes, types and places.
    """
    line = " ".join(str(text).split())
    if len(line) <= max_length:
        return line
    sentences = [each for each in SENTENCE_ENDS.split(line) if each]
    sentence = next((each for each in reversed(sentences) if WRONG_VALUE.search(each)), sentences[-1]).strip(" ,;")
    half = max_length // 2 - 4
    sentence = sentence if len(sentence) <= half else f"{sentence[: half // 2]} {ELLIPSIS} {sentence[-half // 2 :]}"
    return f"{sentence} ({line[:half].rstrip()} {ELLIPSIS})"


def add_noun(count: int, noun: str, plural: str = "") -> str:
    """Return `1 image` or `2 images`; `plural` is an irregular plural."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def make_absolute(path: Path) -> Path:
    """Return the absolute path without resolving links: a link's target may have another name and no suffix."""
    abs_path = Path(os.path.abspath(path))  # noqa: PTH100 - Path has nothing that leaves links alone
    # After a link to a folder, `..` is not the folder in the text.
    return path.resolve() if path.exists() and not (abs_path.exists() and abs_path.samefile(path)) else abs_path


def check_utf8(name: str) -> None:
    """Raise a `UserError` for a name that is not UTF-8: tables, TOML and terminals can't show it."""
    escaped_name = name.encode("utf-8", "backslashreplace").decode()
    if escaped_name != name:
        raise UserError(f"the name {escaped_name} is not UTF-8; rename it, or give a link with another name")


@dataclass(frozen=True)
class Tensor:
    """One input or output: `shape` holds a number per fixed dimension and a name per free one."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class InputSpec:
    """One argument of a PyTorch module's forward, described once for every backend, boundary and check.

    `shape` holds a number per fixed axis, and `batch`, `height` or `width` if the trial's dims decide. Values lie
    between `low` and `high` (both included), or are rows of the array of this name in `feeds`, an .npz file. With
    neither, images are random pixels, other floats standard normal, masks ones followed by zeros, 8-bit integers take
    every value, and other integers are 0 or 1. With `dtype` "", the argument is the Python value `value`. `keyword`:
    passed by keyword.
    """

    name: str
    dtype: str = "float32"
    shape: tuple[int | str, ...] = ()
    low: float | None = None
    high: float | None = None
    feeds: str = ""
    feeds_sha256: str = ""
    value: Option | None = None
    keyword: bool = False


@dataclass(frozen=True)
class Preprocess:
    """The conversion of 8-bit pixels to the model's input: resize, then `(pixel / 255 - mean) / std` per channel.

    `resize` is the length of the shorter side before the centre crop, as a multiple of the crop (0: straight to the
    crop's size, aspect ratio ignored); with `squash`, both sides get that length. With `letterbox`, the longer side
    gets the crop's size and grey (114) fills the rest, evenly on both sides, as detectors expect.
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    resize: float = 256 / 224
    interpolation: str = "bilinear"
    letterbox: bool = False
    squash: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A network and its weights.

    `source` is `torchvision:NAME`, `timm:NAME`, `hf:FOLDER`, `MODULE:FUNCTION`, `FILE.py:FUNCTION`, `saved:PATH` (a
    module saved by PyTorch: .pt2, .torchscript) or `file:PATH` (a model file; see `registry.list_formats`). `weights`
    is a checkpoint's path and `weights_sha256` the hash of its content; without them, `pretrained` selects the
    library's published weights, or else random weights are drawn from `seed`. `source_sha256` is the hash of a file
    source. `precision` is the type of a file's graph ("" for a module). `task` is the network's task (see `tasks`),
    `classes` its number of classes (None: the library's default), `keypoints` the number of points of a pose and of
    values per point, (17, 3).

    `inputs` are a module's arguments, () for a single image called `input`; of a file, () unless values were described.
    `outputs` are the outputs of a file that declare a batch axis, with `batch` at that axis. `files_sha256` is the hash
    of the files that the source's own code reads ("" for none).
    """

    name: str
    source: str
    source_sha256: str = ""
    weights: str = ""
    weights_sha256: str = ""
    pretrained: bool = False
    seed: int = 0
    channels: int = 3
    classes: int | None = None
    preprocess: Preprocess = Preprocess()
    precision: str = ""
    task: str = "classify"
    keypoints: tuple[int, ...] = ()
    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    files_sha256: str = ""

    @property
    def file(self) -> str:
        """Path of the model file, or "" if the model is a PyTorch module."""
        return self.source[len("file:") :] if self.source.startswith("file:") else ""


@dataclass(frozen=True)
class Dims:
    """Batch and image size of a run; `shapes` describes other inputs, with `batch`, `height` and `width` as axes."""

    batch: int
    height: int
    width: int
    shapes: dict[str, tuple[int | str, ...]] = field(default_factory=dict)

    def resolve(self, shape: Sequence[int | str]) -> tuple[int, ...]:
        """Return the shape with this batch and size in place of the named axes."""
        lengths = {BATCH_AXIS: self.batch, "height": self.height, "width": self.width}
        return tuple(lengths[axis] if isinstance(axis, str) else axis for axis in shape)

    def batch_axis(self, name: str, shape: Sequence[int | str]) -> int | None:
        """Return the batch axis of an input; None if it has no batch axis."""
        axes = self.shapes.get(name, shape)
        if BATCH_AXIS in axes:
            return [*axes].index(BATCH_AXIS)
        can_assume = bool(shape) and name not in self.shapes
        return 0 if can_assume and (isinstance(shape[0], str) or shape[0] == self.batch) else None

    @property
    def size(self) -> str:
        """The size as tables show it: `224`, or `480x640` (height x width)."""
        return str(self.height) if self.height == self.width else f"{self.height}x{self.width}"

    @property
    def label(self) -> str:
        """The size, or "" without image inputs."""
        return self.size if self.height else ""


@dataclass(frozen=True)
class DataSpec:
    """Inputs of a run: a decoded data set (see `dyno.data`), or `count` seeded random inputs if `folder` is empty.

    `folder` holds images.npy (uint8, N x C x H x W), labels.npy (int64) and one index array per split, `SPLIT.npy`; for
    detection, segmentation and pose also sizes.npy (int32, N x 2: height and width before the letterbox).
    """

    name: str = "random"
    folder: str = ""
    sha256: str = ""
    split: str = "test"
    count: int = 32
    seed: int = 0


@dataclass(frozen=True)
class Runtime:
    """The interpreter and device of a job: `python` "" is Dyno's own interpreter; `env` is added to its environment."""

    name: str = "main"
    python: str = ""
    env: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1


@dataclass(frozen=True)
class Plan:
    """The measuring time and its stopping rules; seconds are per boundary.

    Sampling stops early when the relative half-width of the median's 95 % interval is at most `interval`. `blocks` is
    the largest number of interleaved blocks of `block_s` seconds (0: one uninterrupted measurement). Rounds go through
    `builds` builds of the engine in turn (0: every build is the same). `rounds`, `builds` and the timeouts don't change
    a measurement, so they aren't hashed.
    """

    boundaries: tuple[str, ...] = BOUNDARIES
    warmup_s: float = 1.0
    seconds: float = 2.0
    min_samples: int = 30
    max_samples: int = 100_000
    interval: float = 0.005
    rounds: int = DEFAULT_ROUNDS
    timeout_s: float = 600.0
    build_timeout_s: float = 3600.0
    blocks: int = 0
    block_s: float = 0.1
    builds: int = 0


@dataclass(frozen=True)
class Recipe:
    """Instructions for a file: `maker` turns the model, or the parent's file, into `format`.

    `fallback` replaces it on failure.
    """

    maker: str
    format: str
    precision: str
    model: ModelSpec
    dims: Dims
    options: dict[str, Option] = field(default_factory=dict)
    data: DataSpec | None = None
    parent: Recipe | None = None
    runtime: Runtime = Runtime()
    fallback: Recipe | None = None

    @property
    def chain(self) -> list[Recipe]:
        """This recipe, its parent, and so on to the first."""
        return [self, *(self.parent.chain if self.parent else ())]


@dataclass(frozen=True)
class Artifact:
    """A made file with the facts needed to trust it; `path` is its present place.

    `parent_sha256` is the hash of its source file, `seconds` the time of making. A free dimension is a name.
    """

    format: str
    path: str
    sha256: str
    bytes: int
    precision: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    seconds: float
    parent_sha256: str = ""
    made_by: MakerFacts = field(default_factory=MakerFacts)


@dataclass(frozen=True)
class Trial:
    """One way to run one model: a row of every table. `side` is `a` (the baseline) or `b` in a comparison."""

    model: ModelSpec
    backend: str
    precision: str
    dims: Dims
    options: dict[str, Option] = field(default_factory=dict)
    recipe: Recipe | None = None
    data: DataSpec = DataSpec()
    runtime: Runtime = Runtime()
    plan: Plan = Plan()
    side: str = ""

    @property
    def id(self) -> str:
        """First 12 hex digits of the trial's hash; also the name of its folder."""
        return digest(self)[:12]

    @property
    def variant(self) -> str:
        """The backend as tables show it: name, options, and the runtime's name unless that is `main`."""
        settings = {**self.options, **({"runtime": self.runtime.name} if self.runtime.name != "main" else {})}
        return self.backend + "".join(f"@{key}={value}" for key, value in sorted(settings.items()))

    @property
    def label(self) -> str:
        """Short text for progress and messages, e.g. `resnet18 onnxruntime int8 b8 224`; a free batch is left out."""
        side = f"{self.side.upper()}: " if self.side else ""
        batch = f" b{self.dims.batch}" if self.dims.batch else ""
        return f"{side}{self.model.name} {self.variant} {self.precision}{batch} {self.dims.label}".rstrip()

    def build(self, round_index: int) -> int:
        """Return the engine build of round `round_index`, counted from 1; 0 if all rounds run the same build."""
        return 1 + round_index % self.plan.builds if self.plan.builds > 1 else 0


@dataclass(frozen=True)
class Job:
    """The specification of one process.

    `kind` is: `run` or `stress` a trial, `make` a file, `probe` a backend, `inspect` a model, read its `layers`,
    `profile` their times, read hardware `counters`, store the tensors of a `reference`, compare an engine's with them
    (`layer_errors`), `train`, find the device's `peak`, `annotate` a graph, `take` a trial home (export a script), run
    a `video`, `serve` requests, time an `application` around an engine, or measure its `cold_start`.

    `artifact` is the file to run or to start from, `recipe` the instructions of `make`, `backend` the backend to
    `probe`; `round` counts from 0. `options` are the kind's own, such as `runs` of a profile or `turns` of a run.
    """

    kind: str
    runtime: Runtime = Runtime()
    trial: Trial | None = None
    round: int = 0
    recipe: Recipe | None = None
    artifact: Artifact | None = None
    backend: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def plan(self) -> Plan:
        """The trial's plan with the changes of a further round."""
        assert self.trial is not None
        changes = self.options.get(PLAN_OPTION, {})
        boundaries = tuple(changes.get("boundaries", self.trial.plan.boundaries))
        return dataclasses.replace(self.trial.plan, **{**changes, "boundaries": boundaries})


# Fields that don't change a measurement: places, names and numbers of repeats
UNHASHED_FIELDS = {
    InputSpec: {"feeds"},
    ModelSpec: {"name", "weights", "outputs"},
    DataSpec: {"folder", "name"},
    Plan: {"rounds", "timeout_s", "build_timeout_s", "builds"},
    Recipe: {"fallback"},
    Runtime: {"name"},
}
# Fields added later: hashed only if set, so that the ids of earlier results hold
LATER_FIELDS = {
    ModelSpec: {"task", "keypoints", "inputs", "files_sha256"}, Preprocess: {"letterbox", "squash"},
    Plan: {"blocks", "block_s"}, Trial: {"side"},
}  # fmt: skip


def digest(value: Any) -> str:
    """Return the sha256 of the value's canonical JSON, without the fields that don't change a measurement."""
    return hashlib.sha256(json.dumps(_make_identity(value), sort_keys=True).encode()).hexdigest()


def _make_identity(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hidden = UNHASHED_FIELDS.get(type(value), set())
        later = {f.name: f.default for f in dataclasses.fields(value) if f.name in LATER_FIELDS.get(type(value), set())}
        hidden = hidden | {name for name, default in later.items() if getattr(value, name) == default}
        fields = {
            f.name: _make_identity(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name not in hidden
        }
        if isinstance(value, ModelSpec):
            fields["source"] = _strip_place(value.source, bool(value.source_sha256))
        return fields
    if isinstance(value, dict):
        return {k: _make_identity(v) for k, v in value.items()}
    return [_make_identity(v) for v in value] if isinstance(value, (tuple, list)) else value


def _strip_place(source: str, is_hashed: bool) -> str:
    """Return the source without the path of a file: its sha256 identifies the file."""
    location, _, function = source.rpartition(":")
    if source.startswith(("file:", "saved:", f"{NETWORK_FOLDER}:", TIMM_FOLDER)) or (
        is_hashed and source.partition(":")[0] in NETWORK_FILES
    ):
        return source.partition(":")[0]
    return function if location.endswith(".py") else source


def to_json(value: Any) -> Any:
    """Return the dataclass as plain dicts, lists, strings and numbers; of a `Sparse` one, only the set fields."""
    if isinstance(value, Sparse):
        set_fields = value.set_fields()
        return {name: to_json(item) for name, item in {**set_fields.pop("other", {}), **set_fields}.items()}
    if dataclasses.is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # a NumPy number
        return value.tolist()
    return [to_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def check_readable(value: Any) -> Any:
    """Return the result of `to_json`; raise a `UserError` for a value that `from_json` or JSON rejects."""
    data = to_json(value)
    try:
        from_json(type(value), json.loads(json.dumps(data)))
    except (TypeError, ValueError) as e:
        raise UserError(f"{type(value).__name__} can't be stored as JSON: {e}") from e
    return data


def from_json(cls: type[T], data: Any) -> T:
    """Rebuild a dataclass from the output of `to_json`; a `Sparse` one keeps unknown keys in `other`.

    Raise a `UserError` that names an unknown or missing key, or a value of another type.
    """
    kind: Any = cls
    try:
        return typing.cast(T, make_reader(kind)(data))
    except Misfit as e:
        raise UserError(f"{cls.__name__}{e.place}{e.what}") from e
