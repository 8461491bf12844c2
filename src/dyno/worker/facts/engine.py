"""What an engine says of itself after it was timed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from dyno.worker.facts.precision import PrecisionTruth
from dyno.worker.facts.sparse import Sparse


@dataclass(frozen=True)
class Calibration:
    """What INT8 was calibrated on: how many samples, by which method, and the sha256 of the data.

    For described inputs also where the values of each came from (`inputs`), and a sentence on them (`note`).
    """

    samples: int = 0
    method: str = ""
    data_sha256: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class SlowLayer:
    """One of the layers that take longest: its operator, the type it computes in, and its share of the layers' time."""

    name: str
    operator: str = ""
    dtype: str = ""
    tactic: str = ""
    share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Origin(Sparse):
    """The model behind a file or an engine, and the route from it: what all that is made from a file inherits.

    `weights_sha256` is of the state dict, or of a given file; two trials whose hashes differ are not compared.
    `fixed_batch` and `folded` are None where nothing was exported or no shapes were fixed.
    """

    weights_sha256: str = ""
    parameters: int | None = None
    exporter: str = ""
    opset: int | None = None
    fixed_batch: bool | None = None
    folded: bool | None = None
    calibration: Calibration | None = None

    @property
    def onnx_route(self) -> str:
        """Exporter, opset, fixed batch and folding of the ONNX graph; "" without any."""
        exported = f"{self.exporter} opset {self.opset}" if self.exporter else ""
        batch = "fixed batch" if self.fixed_batch else ""
        return ", ".join(filter(None, (exported, batch, "folded" if self.folded else "")))


ORIGIN = tuple(f.name for f in fields(Origin) if f.name != "other")  # what a file takes from the one it was made from


@dataclass(frozen=True, kw_only=True)
class Layers(Sparse):
    """The layers of an engine: how many, how many compute in each type, how many only change types or layouts.

    `operators` counts all layers by kind, `kept_float32` names those that stayed in float32 where a lower precision was
    asked for, and `engine_parameters` is the number of weights that the engine itself has.
    """

    layers: int | None = None
    layers_by_type: dict[str, int] = field(default_factory=dict)
    reformats: int | None = None
    operators: dict[str, int] = field(default_factory=dict)
    precision_truth: PrecisionTruth | None = None
    kept_float32: tuple[str, ...] = ()
    engine_parameters: int | None = None


@dataclass(frozen=True, kw_only=True)
class Compilation(Sparse):
    """A compilation inside the process: its seconds, whether it only read a cache, and what it made of the module.

    `engines` is how many engines Torch-TensorRT built, `operators_in_pytorch` what it left, `call_s`, `engine_s` and
    `call_overhead_s` the seconds of a call, of the engine alone, and of what lies between.
    """

    build_s: float | None = None
    build_cached: bool | None = None
    graph_breaks: int | None = None
    graphs: int | None = None
    engines: int | None = None
    operators_in_pytorch: dict[str, int] = field(default_factory=dict)
    call_s: float | None = None
    engine_s: float | None = None
    call_overhead_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class EngineFacts(Layers, Origin, Compilation):
    """All that a session says of itself (`Session.facts`), as far as its engine reports it.

    `options` and `threads` are as the engine has them; `time_by_operator` are shares (0 to 1) of a profile's time;
    `engine_memory` is in bytes; `allocated` and `reserved` are the most bytes that PyTorch's allocator gave out on the
    GPU and held for that; `notes` are sentences on what keeps the engine from being faster.
    """

    threads: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    nodes_by_provider: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    time_by_operator: dict[str, float] = field(default_factory=dict)
    slowest_layers: tuple[SlowLayer, ...] = ()
    engine_memory: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Probe(Sparse):
    """What a backend's probe reports: the library's version, the devices it works on, and a line about them."""

    version: str = ""
    devices: tuple[str, ...] = ()
    detail: str = ""
