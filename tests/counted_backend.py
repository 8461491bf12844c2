"""A scripted backend with layer times and hardware counters, on a GPU that doesn't exist."""

import os
import time

import numpy as np

import ncu_files
from dyno.layers import counters
from dyno.worker.backend import LayerTimes, Session
from dyno.worker.backends.fake import Fake, FakeSession
from dyno.worker.facts.job import LAYERS, Layer, LayerGraph
from dyno.worker.spec import Artifact, Trial

HANG = "TEST_COUNTED_HANGS"


class Counted(Fake):
    name = "counted"
    devices = ("cpu", "cuda")
    profiled = ("cuda",)

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        return CountedSession(trial)


class CountedSession(FakeSession):
    def profile(self, runs: int) -> LayerTimes:
        kernels = counters.read_ncu(ncu_files.text(ncu_files.TENSORRT)).kernels
        names = dict.fromkeys(kernel.ranges[-1] for kernel in kernels)
        layers = tuple(Layer(name=name, nodes=tuple(name.split(" + "))) for name in names)
        inside = LayerGraph(form=LAYERS, library="Counted 1", layers=layers)
        return LayerTimes(inside, np.full((runs, len(layers)), 1e-6), np.full(runs, 1e-3))

    def run_for_counters(self) -> None:
        if HANG in os.environ:
            time.sleep(3600)
        self.run()
        print("ran for counters")


COUNTED = Counted()
