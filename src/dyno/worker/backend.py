"""What a backend offers: recipes, files, sessions, and what of them it refuses; the registry finds one by its name."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.option_values import Check, check_values
from dyno.worker.spec import Artifact, Option, Recipe, Tensor, Trial, UserError, check_known

Arrays = Mapping[str, np.ndarray]


class Session:
    """A loaded model that the timing loop drives: bind inputs, run, wait, fetch outputs.

    `slots` is how many batches can be in flight at once (throughput uses them all, latency only slot 0). `run` may
    return before the work is done; `wait` may not. `stream` is the GPU stream the work is queued on, None on a CPU.
    """

    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    slots: int = 1
    stream: Any = None

    def stage(self, feeds: Arrays) -> Arrays:
        """The feeds where `bind` reads them fastest (on a GPU: page-locked memory); asked once, before any timing."""
        return feeds

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Put the inputs (host arrays by name) where `run` reads them; on a GPU this is the copy to the device."""
        raise NotImplementedError

    def run(self, slot: int = 0) -> None:
        """Start one inference on what is bound."""
        raise NotImplementedError

    def wait(self, slot: int = 0) -> None:
        """Return only when the slot's inference is done."""

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """The slot's outputs as host arrays by name; valid until the slot runs again."""
        raise NotImplementedError

    def parts(self, feeds: Arrays) -> dict[str, float]:
        """Seconds of one inference from host to host, part by part; empty where they can't be told apart."""
        return {}

    @property
    def batches(self) -> tuple[int, int, int] | None:
        """Smallest, best and largest batch that this session takes, None where nothing limits it."""
        return None

    def reshape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Take inputs of these shapes from now on; a `UserError` where they are fixed."""
        raise UserError("this engine's shapes are fixed; load it with a free batch")

    def device_memory(self) -> int:
        """Bytes in use on the session's GPU, by everyone; 0 on a CPU."""
        return 0

    def facts(self) -> dict[str, Any]:
        """What the engine says of itself, asked after timing: `layers`, `layers_by_type`, `nodes_by_provider`,
        `parameters`, `options`, `weights_sha256`, `build_s`… as far as it knows."""
        return {}

    def close(self) -> None:
        """Give everything back."""


class Backend:
    """One way to run models (`load`), or to make files (`make`), or both.

    `requires` are the distributions whose versions shape its results; `precisions`, `devices` and `options` what it can
    be asked for, `values` what an option may be (`option_values`), asked before anything runs, and `files` the suffixes
    of model files that it can run (None: it doesn't say). What a backend does with its library happens in the worker;
    `refuse` and `recipe` are pure.
    """

    name: str = ""
    requires: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    options: tuple[str, ...] = ()
    values: Mapping[str, Check] = {}
    files: tuple[str, ...] | None = None
    runs: bool = True

    def check_options(self, options: Mapping[str, Option]) -> None:
        """A `UserError` for an option that isn't this backend's, or a value that it never has."""
        for name in options:
            check_known(f"option of {self.name}", name, self.options)
        check_values(self.name, options, self.values)

    def refuse(self, trial: Trial) -> str:
        """One line why this backend can't run the trial, or "" when nothing speaks against trying."""
        on_cpu = trial.runtime.device == "cpu"
        if trial.precision == "tf32" and on_cpu:
            return "tf32 is a mode of NVIDIA GPUs; a CPU has none"
        here = [name for name in self.precisions if name != "tf32" or not on_cpu]
        if trial.precision not in here:
            return f"{self.name} has no {trial.precision} here (it has {', '.join(here)})"
        if trial.runtime.device.split(":")[0] not in self.devices:
            return f"{self.name} can't run on {trial.runtime.device} (it runs on {', '.join(self.devices)})"
        return ""

    def recipe(self, trial: Trial) -> Recipe | None:
        """How the file that `load` needs is made; None when it needs no file."""
        return None

    def probe(self) -> dict[str, Any]:
        """Import the library and run one operation: version and devices, or `Unavailable` with what to install."""
        raise NotImplementedError

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Load the model for the trial's dims, precision, threads and device. Raises `Unavailable` or `UserError`."""
        raise NotImplementedError

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Make the recipe's file in the folder."""
        raise NotImplementedError


def derived(parent: Artifact, path: Path, precision: str, made_by: Mapping[str, Any], began: float) -> Artifact:
    """The file at `path`, made from the parent's since `began` (of `perf_counter`)."""
    content = path.read_bytes()
    return replace(
        parent,
        path=str(path),
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        precision=precision,
        seconds=time.perf_counter() - began,
        parent_sha256=parent.sha256,
        made_by=dict(made_by),
    )
