"""The facts on how a file was made, needed to trust it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dyno.worker.facts.engine import Layers, Origin
from dyno.worker.facts.json_values import Sparse

IN_SINGLE = "the graph was in float64, in part or as a whole, and is computed in float32"  # a warning
AVERAGED_WARNING = "the weights file has averaged weights too"  # start of a warning
AS_IN_TRAINING = "the graph runs as in training"  # the beginning of a warning
DRAWN_STEPS = "the number of steps is a random 0 or 1"  # the beginning of a warning
RANDOM_WARNING = "the weights are random"  # start of a warning
OTHER_SHAPE = "OpenVINO gives an output another shape than the ONNX file declares"  # the beginning of a warning
OTHER_VALUES = "OpenVINO gives outputs other values than ONNX Runtime"  # the beginning of a warning
ONE_OF = "one of the file's signatures was run"  # the beginning of a warning


@dataclass(frozen=True)
class MakerStep:
    """One step in the chain of files: its maker, its result's format and precision, its seconds and bytes."""

    maker: str
    format: str = ""
    precision: str = ""
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class ExportCheck:
    """An exported graph compared with its module.

    Batches compared, largest difference, largest output, tolerances, and `own_error`: the error of the module's FP32
    outputs against FP64 (None: not measured). For boxes, compared as sets: their number, and the number without a
    counterpart.
    """

    batches: tuple[int, ...] = ()
    max_abs_error: float = 0.0
    max_abs_output: float = 0.0
    rtol: float = 0.0
    atol: float = 0.0
    own_error: float | None = None
    boxes: int | None = None
    boxes_apart: int | None = None


@dataclass(frozen=True)
class OutputCheck:
    """A converted file compared with its parent on one input: largest difference and output, and how it ran.

    `ran` tells whether the file ran unchanged or emulated.
    """

    max_difference: float
    max_output: float
    ran: str = ""


@dataclass(frozen=True)
class RankedLayer:
    """A layer and the cost of lowering only it: the outputs' signal-to-noise ratio in dB, lowest first."""

    node: str
    op: str = ""
    sqnr_db: float = 0.0


@dataclass(frozen=True)
class PixelInput:
    """The normalisation inside the graph: `pixel * scale + offset`, per channel."""

    dtype: str = "uint8"
    scale: tuple[float, ...] = ()
    offset: tuple[float, ...] = ()


@dataclass(frozen=True)
class GpuFacts:
    """The GPU of an engine's build; empty without one."""

    model: str = ""
    capability: str = ""


@dataclass(frozen=True)
class TimingUse:
    """A build's use of its timing cache: whether earlier timings were used, the file, new tactics, and its error."""

    used: bool = False
    file: str = ""
    timed: int = 0
    complaint: str = ""


@dataclass(frozen=True, kw_only=True)
class Lowering(Sparse):
    """A conversion to a lower precision: its scheme, its target engine, its check, and layers kept higher.

    `kept` were chosen from `ranked` layers by sensitivity.
    """

    scheme: str = ""
    target: str = ""
    check: OutputCheck | None = None
    kept: tuple[RankedLayer, ...] = ()
    ranked: int | None = None


@dataclass(frozen=True, kw_only=True)
class BuildFacts(Sparse):
    """An engine's build: its source of types (graph, flags, calibrator), and strong or weak typing.

    `profiles` have the smallest, usual and largest shape of each input; `build_s` is in seconds.
    """

    route: str = ""
    typed: str = ""
    flags: tuple[str, ...] = ()
    profiles: tuple[dict[str, Any], ...] = ()
    gpu: GpuFacts | None = None
    build_s: float | None = None
    timing_cache: TimingUse | None = None


@dataclass(frozen=True, kw_only=True)
class MakerFacts(BuildFacts, Lowering, Layers, Origin):
    """A maker's facts on its file (`Artifact.made_by`).

    `steps` is the whole chain up to the file; `warnings` hold for every file made from it. `kept_float` counts nodes
    that INT8 left in float; `ranking` lists layers by sensitivity on `ranked_on` samples; `input` is the normalisation
    in the graph, and `input_check` its check.
    """

    backend: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    steps: tuple[MakerStep, ...] = ()
    verified: ExportCheck | None = None
    kept_float: int | None = None
    ranking: tuple[RankedLayer, ...] = ()
    ranked_on: int | None = None
    input: PixelInput | None = None
    input_check: OutputCheck | None = None
