"""A backend without a library: scripted latency, noise and failures, for tests of everything around backends."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from dyno.worker.backend import Arrays, Backend, Session
from dyno.worker.facts.engine import EngineFacts, Probe
from dyno.worker.inputs.specs import fit_feed
from dyno.worker.option_values import Check, number, one_of
from dyno.worker.spec import Artifact, Option, Tensor, Trial, Unavailable

CLASS_COUNT = 10
HEATED_S, COOLED_S = 0.2, 0.01  # load and rest after which an engine with `heat` slows down and recovers


class Fake(Backend):
    """A backend that sleeps and fails according to its options.

    Options: `latency_ms` per batch (default 1), `noise` (relative standard deviation), `drift` (relative difference
    between processes), `heat` (relative slow-down after HEATED_S seconds without a break), `fail` (exception, skip,
    segfault, exit, hang, oom, killed, nan) and `at` (import, load, run, close, or fetch: its second call, during
    measuring).
    """

    name = "fake"
    precisions = ("fp32", "fp16", "int8")
    options = ("latency_ms", "noise", "drift", "heat", "fail", "at")
    values: Mapping[str, Check] = {
        "latency_ms": number(0, 1e6), "noise": number(0, 10), "drift": number(0, 10),
        "heat": number(0, 10),
        "at": one_of("import", "load", "run", "fetch", "close"),
        "fail": one_of("exception", "skip", "segfault", "exit", "hang", "oom", "killed", "nan"),
    }  # fmt: skip

    def probe(self) -> Probe:
        return Probe(version="1", devices=("cpu",), detail="scripted")

    def prepare(self, trial: Trial) -> None:
        _cause_failure(trial.options, "import")

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        return FakeSession(trial)


FAKE = Fake()
FAKE.offered = False  # derived classes are offered


class FakeSession(Session):
    """A session with a fixed linear function of the inputs, rounded more coarsely at lower precision."""

    def __init__(self, trial: Trial) -> None:
        self.options = trial.options
        self.rng = np.random.default_rng()
        drift = 1 + float(self.options.get("drift", 0)) * self.rng.standard_normal()
        self.latency_s = float(self.options.get("latency_ms", 1)) / 1e3 * drift
        dims = trial.dims
        self.shape = (dims.batch, trial.model.channels, dims.height, dims.width)
        self.inputs = (Tensor("input", "float32", self.shape),)
        self.outputs = (Tensor("output", "float32", (dims.batch, CLASS_COUNT)),)
        features = trial.model.channels * dims.height * dims.width
        self.weights = np.random.default_rng(0).standard_normal((features, CLASS_COUNT)).astype(np.float32)
        self.answered = False
        self.running_since = self.ran_at = time.perf_counter()
        self.decimals = {"fp32": 7, "fp16": 3, "int8": 1}[trial.precision]
        _cause_failure(self.options, "load")

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        (tensor,) = self.inputs
        self.bound = fit_feed(feeds, tensor, self.shape)

    def run(self, slot: int = 0) -> None:
        _cause_failure(self.options, "run")
        noise = 1 + float(self.options.get("noise", 0)) * abs(self.rng.standard_normal())
        begin = time.perf_counter()
        if begin - self.ran_at > COOLED_S:
            self.running_since = begin
        heat = float(self.options.get("heat", 0)) * (begin - self.running_since > HEATED_S)
        end = begin + self.latency_s * noise * (1 + heat)
        while (now := time.perf_counter()) < end:  # sleep() would be late by more than a short latency
            pass
        self.ran_at = now

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        if self.answered:
            _cause_failure(self.options, "fetch")
        self.answered = True
        flat = self.bound.reshape(len(self.bound), -1)
        output = np.round(flat @ self.weights, self.decimals)
        return {"output": output * np.float32(np.nan) if self.options.get("fail") == "nan" else output}

    def close(self) -> None:
        _cause_failure(self.options, "close")

    def facts(self) -> EngineFacts:
        return EngineFacts(layers=1, layers_by_type={"float32": 1}, weights_sha256="0" * 64)


def _cause_failure(options: Mapping[str, Option], stage: str) -> None:
    kind = str(options.get("fail", ""))
    if kind and kind != "nan" and options.get("at", "run") == stage:
        FAILURE_KINDS[kind]()


def _raise_exception() -> None:
    raise RuntimeError("scripted failure")


def _raise_unavailable() -> None:
    raise Unavailable("scripted: this machine lacks it; install nothing")


FAILURE_KINDS: dict[str, Any] = {
    "exception": _raise_exception,
    "skip": _raise_unavailable,
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(7),
    "hang": lambda: time.sleep(3600),
    "oom": lambda: np.empty(2**60, np.uint8),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
