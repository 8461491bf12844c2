"""Extension points, found by name: a backend runs models, a maker makes files, a file format reads them."""

from __future__ import annotations

import hashlib
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.worker import system
from dyno.worker.facts.engine import QUANTISED_PRECISIONS, WEIGHT_PRECISIONS, EngineFacts, Probe
from dyno.worker.facts.files import MakerFacts
from dyno.worker.facts.job import Function, LayerGraph
from dyno.worker.inspection import Purpose
from dyno.worker.option_values import Check, check_values
from dyno.worker.spec import Artifact, Option, Recipe, Tensor, Trial, Unavailable, UserError, check_known

if TYPE_CHECKING:
    import numpy as np

Arrays = Mapping[str, "np.ndarray"]
Ends = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # inputs and outputs


@dataclass(frozen=True)
class GpuWork:
    """The work of the GPU and the host in each watched run.

    `busy` has the seconds with a kernel or a copy on the GPU, `calls` the host's seconds in CUDA calls other than
    waits, and `kernels` the number of launches.
    """

    busy: np.ndarray
    calls: np.ndarray
    kernels: np.ndarray


@dataclass(frozen=True)
class LayerTimes:
    """The times of the layers in `graph`, measured by the engine itself, which slows it down.

    `layers` has seconds, a row per repeat and a column per layer (0: the layer doesn't run). `run_seconds` has the
    seconds of each watched run by the host's clock. `note` is a sentence on how the engine counts. `work` is the GPU's
    work and `functions` the time of each function, if the engine reports them.
    """

    graph: LayerGraph
    layers: np.ndarray
    run_seconds: np.ndarray
    note: str = ""
    work: GpuWork | None = None
    functions: tuple[Function, ...] = ()


class Session(ABC):
    """A loaded model that the timing loop drives: bind inputs, run, wait, fetch outputs.

    `slots` is the number of batches in flight (throughput uses all, latency only slot 0). `run` may return before the
    work is done; `wait` may not. `stream` is the GPU stream of the work, None on a CPU. With `takes_frames` (set after
    measurements), video frames become inputs on the GPU by default.
    """

    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    slots: int = 1
    stream: Any = None
    takes_frames: bool = False

    def on_device(self) -> DeviceBinding | None:
        """Return a binding of PyTorch tensors on the device; None if PyTorch can't reach the session's memory."""
        return None

    def stage(self, feeds: Arrays) -> Arrays:
        """Return the feeds in memory that `bind` reads fastest (on a GPU: page-locked).

        Called once, before any timing.
        """
        return feeds

    @abstractmethod
    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Put the inputs (host arrays by name) into the slot; on a GPU, copy them to the device."""

    def restoring(self, feeds: Arrays) -> Callable[[], None] | None:
        """Return a function that restores slot 0's inputs to `feeds`, its bound values.

        Return None if the last run didn't change them; engines never do.
        """
        return None

    @abstractmethod
    def run(self, slot: int = 0) -> None:
        """Start one inference on the bound inputs."""

    def wait(self, slot: int = 0) -> None:  # noqa: B027 - nothing to do if `run` returns when it is done
        """Return only when the slot's inference is done."""

    def complete(self, slot: int = 0) -> None:
        """Run one inference on the bound inputs to its end, in the calling thread if the engine can.

        On a CPU, every slot may do this at the same time, each in its own thread.
        """
        self.run(slot)
        self.wait(slot)

    @abstractmethod
    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """Return the slot's outputs as host arrays by name; valid until the slot runs again."""

    def parts(self, feeds: Arrays) -> dict[str, float]:
        """Return the seconds of each part of one inference, host to host; empty if parts can't be measured."""
        return {}

    @property
    def batches(self) -> tuple[int, int, int] | None:
        """Smallest, best and largest batch of the session; None without limits."""
        return None

    def reshape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Take inputs of these shapes from now on; raise a `UserError` if the shapes are fixed."""
        raise UserError("this engine's shapes are fixed; load it with a free batch")

    def limit_threads(self, count: int) -> bool:
        """Compute with this number of threads from now on; return whether the engine can change it."""
        return False

    def device_memory(self) -> int:
        """Return the bytes in use on the session's GPU, by all processes; 0 on a CPU."""
        return 0

    def facts(self) -> EngineFacts:
        """Return the engine's own facts, read after timing."""
        return EngineFacts()

    def profile(self, runs: int) -> LayerTimes:
        """Time every layer in about `runs` runs of slot 0's inputs; nothing is timed afterwards."""
        raise Unavailable("this engine reports no layer times")

    def run_for_counters(self) -> None:
        """Run slot 0's inputs once within CUDA's profiler, an NVTX range per layer; nothing is timed afterwards."""
        raise Unavailable("this engine's kernels can't be told apart for hardware counters")

    def close(self) -> None:  # noqa: B027 - nothing to do if Python frees it
        """Free all resources."""


def answer_feeds(session: Session, feeds: Arrays) -> dict[str, np.ndarray]:
    """Run one inference on the feeds in slot 0; return copies of its outputs."""
    session.bind(feeds)
    session.run()
    session.wait()
    return {name: array.copy() for name, array in session.fetch().items()}


class Backend(ABC):
    """One way to run models.

    `requires` are the distributions that shape its results by their versions. `precisions`, `devices` and `options` are
    the supported ones; `file_precisions` are further weight types that it runs from a given file and Dyno doesn't make.
    `values` checks option values (`option_values`) before anything runs. `files` are the suffixes of the model files
    that it runs (None: unknown). `profiled` are the devices on which its sessions can `profile`. With `loads_onnx`,
    `load` takes any ONNX file as it is, so that parts of a graph can be run.

    A backend that isn't `offered` runs only if named, such as a scripted one. With `compiles`, `load` takes as long as
    other backends' builds; with `builds_slowly`, making its file takes longest of all. `install_hint` says how to get
    its library if that must not share an environment with the others. Library calls happen in the worker; `refuse` and
    `recipe` are pure.
    """

    name: str = ""
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    precisions: tuple[str, ...] = ()
    file_precisions: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    profiled: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    values: Mapping[str, Check] = {}
    files: tuple[str, ...] | None = None
    loads_onnx: bool = False
    offered: bool = True
    compiles: bool = False
    builds_slowly: bool = False

    def check_options(self, options: Mapping[str, Option]) -> None:
        """Raise a `UserError` for an option that this backend lacks, or for a value that is never valid."""
        for name in options:
            check_known("option", name, self.options, f" of {self.name}")
        check_values(self.name, options, self.values)

    def refuse(self, trial: Trial) -> str:
        """Return the reason why this backend can't run the trial, in one line; "" if none is known."""
        on_cpu = trial.runtime.device == "cpu"
        if trial.precision == "tf32" and on_cpu:
            return "tf32 is a mode of NVIDIA GPUs; a CPU has none"
        if trial.precision in WEIGHT_PRECISIONS and trial.precision not in (trial.model.precision, *self.precisions):
            return f"{trial.precision} is only for files with such weights; Dyno doesn't quantise to it"
        precisions = [name for name in self.precisions if name != "tf32" or not on_cpu]
        is_file_precision = trial.precision == trial.model.precision and trial.precision in self.file_precisions
        if trial.precision not in precisions and not is_file_precision:
            is_default = not trial.model.file and trial.precision == (trial.model.precision or "fp32")
            advice = f"; give --precision {precisions[0]}" if is_default and precisions else ""
            return f"{self.name} has no {trial.precision} here (it has {', '.join(precisions)}){advice}"
        if trial.runtime.device.split(":")[0] not in self.devices:
            return f"{self.name} can't run on {trial.runtime.device} (it runs on {', '.join(self.devices)})"
        file = trial.model.file
        if file and self.files is not None and not file.endswith(self.files):
            suffixes = " and ".join(filter(None, (", ".join(self.files[:-1]), *self.files[-1:])))
            return f"{self.name} reads {suffixes or 'no model'} files, not {Path(file).name}"
        return ""

    def reads(self, path: str) -> bool:
        """Return whether the backend can run the model file, judged by its suffix."""
        return self.files is None or path.endswith(self.files)

    def recipe(self, trial: Trial) -> Recipe | None:
        """Return the recipe of the file that `load` needs; None if it needs no file."""
        return None

    @abstractmethod
    def probe(self) -> Probe:
        """Run one operation of the library and return version and devices; raise `Unavailable` with what to install."""

    def prepare(self, trial: Trial) -> None:  # noqa: B027 - nothing to do without a library
        """Import the libraries that `load` needs for the trial, using no GPU; `load` reports missing ones.

        Interleaved trials do this in parallel.
        """

    @abstractmethod
    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Load the model for the trial's dims, precision, threads and device; raise `Unavailable` or `UserError`."""

    def layer_graph(self, trial: Trial, artifact: Artifact | None) -> LayerGraph:
        """Return the engine's layers for the trial's model; raise `Unavailable` if the backend doesn't report them."""
        raise Unavailable(f"{self.name} doesn't say what its layers are")


def refuse_requantising(trial: Trial) -> str:
    """Return why an already quantised file can't run in the trial's precision; "" if it can."""
    dtype = trial.model.precision
    if dtype not in QUANTISED_PRECISIONS or trial.precision == dtype:
        return ""
    return f"the file's weights are {dtype} already; run it as {dtype}, or give the float file for {trial.precision}"


class Maker(ABC):
    """One step on the way to a file, named by a recipe. `requires` is as in `Backend`."""

    name: str = ""
    requires: tuple[str, ...] = ()

    def describe(self, recipe: Recipe) -> MakerFacts:
        """Return the facts known before the file is made: maker, options, and versions of the libraries."""
        return MakerFacts(
            backend=self.name, options=dict(recipe.options), versions=system.find_versions(self.requires)
        )  # fmt: skip

    @abstractmethod
    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Make the recipe's file in the folder, from the parent's file if the recipe has one."""


@dataclass(frozen=True)
class FileContents:
    """The contents of a model file as Dyno needs them.

    `batches` is the smallest, best and largest batch of an engine with a profile; `task` Dyno's metadata on the task
    (`task_facts`); `image` the exporter's metadata on images (`imgsz`, `batch`, `stride`); `flops` counts the
    operations at static shapes; `parameters` is the number of weights (None: not counted). `lengths` holds the lengths
    of named free axes that a layer's weights fix. `largest_pixel` is 1 or 255 if the graph normalises its images.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    precision: str = "fp32"
    batches: tuple[int, int, int] | None = None
    task: Purpose = field(default_factory=Purpose)
    image: Mapping[str, Any] = field(default_factory=dict)
    flops: Callable[[Mapping[str, tuple[int, ...]]], int] | None = None
    parameters: int | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)
    largest_pixel: float = 0.0


class FileFormat(ABC):
    """One kind of model file: its suffixes, reader, companion files, and default backend.

    Dyno writes the first of the `suffixes`. `backend` and `device` run the file by default. Recipes of the backends in
    `builders` make it (`dyno export`). With `on_device`, only its backend on its device can read it.
    """

    name: str = ""
    suffixes: tuple[str, ...] = ()
    backend: str = ""
    device: str = "cpu"
    builders: tuple[str, ...] = ()
    on_device: bool = False

    def fits(self, path: Path) -> bool:
        """Return whether a file with one of the suffixes, which may not exist yet, is of this format."""
        return True

    def default_backend(self, path: Path) -> str:
        """Return the backend that runs this file by default."""
        return self.backend

    def companions(self, path: Path) -> list[Path]:
        """Return the other files that belong to the file, in a fixed order."""
        return []

    def copy(self, file: Path, out: Path) -> None:
        """Copy the file with its companions."""
        shutil.copyfile(file, out)
        for companion in self.companions(file):
            shutil.copyfile(companion, out.with_suffix(companion.suffix))

    def recipe(self, trial: Trial) -> Recipe | None:
        """Return the recipe by which `dyno export` makes such a file from the trial's model; None if it can't."""
        return None

    @abstractmethod
    def read(self, path: str, trial: Trial) -> FileContents:
        """Return the file's contents; raise a `UserError` for a missing or damaged file. Runs in a worker."""


def artifact_of(
    path: Path,
    format: str,
    precision: str,
    boundary: Ends,
    made_by: MakerFacts,
    began: float,
    parent_sha256: str = "",
    companions: Sequence[Path] = (),
) -> Artifact:
    """Return the artifact of the file at `path` and its companions in `companions`.

    `boundary` are its inputs and outputs. `began` is the start of its making, in seconds of `perf_counter`.
    """
    content = b"".join(file.read_bytes() for file in (path, *companions))
    sha256, seconds = hashlib.sha256(content).hexdigest(), time.perf_counter() - began
    return Artifact(format, str(path), sha256, len(content), precision, *boundary, seconds, parent_sha256, made_by)


def make_derived(parent: Artifact, path: Path, precision: str, made_by: MakerFacts, began: float) -> Artifact:
    """Return the artifact of the single file at `path`, made from `parent` since `began`.

    Format, inputs and outputs are the parent's.
    """
    boundary = (parent.inputs, parent.outputs)
    return artifact_of(path, parent.format, precision, boundary, made_by, began, parent.sha256)


def describe_given(file_format: FileFormat, recipe: Recipe, made_by: MakerFacts) -> Artifact:
    """Return the user's own file as an artifact with 0 seconds of making; its hash identifies its weights."""
    path = recipe.model.file
    contents = file_format.read(path, Trial(recipe.model, file_format.backend, recipe.precision, recipe.dims))
    made_by = replace(made_by, parameters=contents.parameters)
    boundary = (contents.inputs, contents.outputs)
    files = file_format.companions(Path(path))
    artifact = artifact_of(Path(path), file_format.name, contents.precision, boundary, made_by, 0.0, companions=files)
    return replace(artifact, seconds=0.0, made_by=replace(made_by, weights_sha256=artifact.sha256))


# Inputs and outputs as PyTorch tensors on the engine's device: video frames needn't pass through a host that is slower
# than the GPU.


@dataclass(frozen=True)
class DeviceBinding:
    """PyTorch tensors on the engine's device, in place of `Session.bind` and `Session.fetch`.

    `torch` is the library and `device` the tensors' device. On a CPU, calls return with the work done, without streams
    or events (None). `bind(tensors, ready, slot)` queues copies of the inputs into the slot, after the event `ready`.
    `outputs(slot)` are the outputs of the slot's finished run, valid until it runs again.
    """

    torch: Any
    device: Any
    bind: Callable[[Mapping[str, Any], Any, int], None]
    outputs: Callable[[int], dict[str, Any]]

    @property
    def on_gpu(self) -> bool:
        """Whether work is queued on a GPU."""
        return bool(self.device.type == "cuda")

    def stream(self) -> Any:
        """Return a further stream of the device; None on a CPU."""
        return self.torch.cuda.Stream(self.device) if self.on_gpu else None

    @contextmanager
    def working(self, stream: Any) -> Iterator[None]:
        """Run the block without gradients, on that stream."""
        with self.torch.inference_mode(), self.torch.cuda.stream(stream):
            yield

    def host(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a tensor in host memory; page-locked for a GPU, so that copies overlap with other work."""
        return self.torch.empty(shape, dtype=dtype, pin_memory=self.on_gpu)
