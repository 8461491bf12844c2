"""PyTorch compiled by inductor (`compile`), on the CPU and on NVIDIA GPUs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dyno.worker.backend import Session
from dyno.worker.backends.pytorch import MODULE_OPTIONS, PyTorch, TorchSession
from dyno.worker.facts.engine import EngineFacts, precision_truth
from dyno.worker.option_values import Check, flag, one_of
from dyno.worker.sessions.torch_support import (
    compiler_errors,
    count_weight_types,
    describe_probe,
    list_kernels,
    list_notes,
    memory_errors,
    need_compiler,
    probe_processor,
    refuse_script,
)
from dyno.worker.spec import Artifact, Trial

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # modes with CUDA graphs: the next run overwrites outputs


class Compile(PyTorch):
    """torch.compile with inductor, compiled inside `load` for the trial's shape.

    Options: those of `pytorch` without `graph`, `mode` (see `COMPILE_MODES`) and `freeze` (bool, default on for a CPU:
    weights become constants of the compiled code, folded and packed, which about halves the latency).
    """

    name = "compile"
    compiles = True
    precisions = ("fp32", "tf32", "fp16", "bf16")
    profiled = ()
    options = ("channels_last", "cudnn_benchmark", "input", "mode", "freeze")
    values: Mapping[str, Check] = {**MODULE_OPTIONS, "mode": one_of(*COMPILE_MODES), "freeze": flag}

    def _run_convolution(self, torch: Any, device: str) -> None:
        need_compiler()
        probe_processor()
        weight = torch.randn(4, 3, 3, 3, device=device)
        function = torch.compile(lambda x: torch.nn.functional.conv2d(x, weight).relu(), dynamic=False)
        with torch.inference_mode(), compiler_errors():
            function(torch.randn(1, 3, 8, 8, device=device)).cpu()

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Compile with random input of the trial's shape; its seconds are `build_s` in the session's facts."""
        options = self.checked(trial)
        need_compiler()
        with memory_errors():
            return CompiledSession(trial, options)

    def checked(self, trial: Trial) -> dict[str, Any]:
        """See `PyTorch.checked`."""
        defaults = {"mode": "default", "freeze": trial.runtime.device == "cpu"}
        return {**defaults, **super().checked(trial)}


COMPILE = Compile()


class CompiledSession(TorchSession):
    """A module behind torch.compile, compiled in the constructor."""

    def __init__(self, trial: Trial, options: dict[str, Any]) -> None:
        super().__init__(trial, options)
        self.try_eager()
        # The second call records a CUDA graph, the third replays it.
        self._compile_module(calls=3 if options["mode"] in GRAPH_MODES else 1)

    def _place_module(self, module: Any) -> Any:
        # Some versions of torch.compile refuse TorchScript, others return it unchanged.
        return super()._place_module(refuse_script(self._torch, module, "torch.compile"))

    def _slots_wanted(self) -> int:
        return 1 if self._options["mode"] in GRAPH_MODES else super()._slots_wanted()

    def _compile_module(self, calls: int) -> None:
        from torch._dynamo import reset
        from torch._dynamo.utils import counters
        from torch._inductor import config

        reset()
        counters.clear()
        config.freezing = bool(self._options["freeze"])
        mode = None if self._options["mode"] == "default" else self._options["mode"]
        self._call = self._torch.compile(self._eager, backend="inductor", dynamic=False, mode=mode)
        self._probe_s = 0.0 if self._on_gpu else probe_processor()
        old_kernels, start = list_kernels(), time.perf_counter()
        with compiler_errors():
            for _ in range(calls):
                self._run_once()
        self._build_s = time.perf_counter() - start
        self._counters = {key: dict(value) for key, value in counters.items()}
        self._cached = bool(old_kernels) and not list_kernels() - old_kernels

    def facts(self) -> EngineFacts:
        """Return the compilation's time and graph breaks; types are those of the compiled weights."""
        kinds = count_weight_types(self._torch, self._module)
        return replace(
            self._read_common_facts(),
            layers_by_type=kinds,
            precision_truth=precision_truth(self._trial.precision, kinds, "torch.compile"),
            build_s=self._build_s,
            build_cached=self._cached,
            graph_breaks=sum(self._counters.get("graph_break", {}).values()),
            graphs=self._counters.get("stats", {}).get("unique_graphs", 0),
            notes=(*list_notes(self._trial), *describe_probe(self._probe_s)),
        )
