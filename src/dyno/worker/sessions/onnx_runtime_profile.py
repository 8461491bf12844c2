"""The nodes and kernels that ONNX Runtime ran, from the events of its own profile."""

from __future__ import annotations

import json
import re
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from dyno.worker.facts.precision import COMPUTE, COMPUTED, UNKNOWN, why_not_faster

Kernel = tuple[str, Any]  # the event's name, and the index of its node
TYPE_NAMES = {"float": "float32", "uint8": "int8", "double": "float64"}
PACKED = "MatMulNBits"
FUSED_LEVEL = 4  # `accuracy_level` of the products that ONNX Runtime fuses with their DequantizeLinear
LEVELS = {1: "float32", 2: "float16", 3: "bfloat16", 4: "int8"}  # what that attribute has activations converted to
CPU = "CPUExecutionProvider"
CONTROL = ("If", "Loop", "Scan")  # operators that run a graph of their own, whose nodes have events too
CONVERTERS = ("QuantizeLinear", "DequantizeLinear", "Cast", "ReorderInput", "ReorderOutput")
EVENT = re.compile(r'("name"\s*:\s*)"(.*?)"(,"args"\s*:\s*\{)', re.DOTALL)


def events_in(text: str) -> list[dict[str, Any]]:
    """Return the events of a profile; the library writes node names without escaping quotes and backslashes."""
    escaped = EVENT.sub(lambda found: f"{found[1]}{json.dumps(found[2])}{found[3]}", text)
    read: list[dict[str, Any]] = json.loads(escaped)
    return read


class Profile:
    """The kernels of a profile; the first run is left out, as it allocates and packs weights.

    `levels` are the file's `graph_facts.accuracy_levels`, None where it couldn't be read.
    """

    def __init__(self, events: list[dict[str, Any]], precision: str, levels: Mapping[str, int] | None = None) -> None:
        self._precision, self._levels = precision, levels
        runs = sorted(e["ts"] for e in events if e["name"] == "model_run")
        since = runs[1] if len(runs) > 1 else 0
        nodes = [e for e in events if e["cat"] == "Node" and e["ts"] >= since]
        kernels = [e for e in nodes if e["name"].endswith("_kernel_time")]
        self.seen = {(e["name"], e["args"].get("node_index")): e["args"] for e in kernels}
        self.computed_in = self._find_types()  # of the compute nodes
        self.outer = {(e["name"], e["args"].get("node_index")): e["args"] for e in _find_outer_kernels(kernels)}
        taken: dict[Any, list[float]] = defaultdict(list)
        for event in kernels:
            taken[event["args"]["op_name"], event["name"], event["args"].get("node_index")].append(event["dur"] * 1e-6)
        self.seconds: dict[str, float] = defaultdict(float)  # of one run
        for (op, *_), each in taken.items():
            # The median leaves out runs in which another program interrupted the node.
            self.seconds[op] += statistics.median(each)

    def by_type(self) -> dict[str, int]:
        """Compute nodes by the type that they multiply in, 8-bit ones signed or not as `int8`."""
        return dict(Counter(self.computed_in.values()))

    def by_provider(self) -> dict[str, int]:
        """Return the number of nodes by execution provider."""
        return dict(Counter(node["provider"] for node in self.seen.values()))

    def operators(self) -> dict[str, int]:
        """Return the number of nodes by operator, after optimisation."""
        return dict(Counter(node["op_name"] for node in self.seen.values()).most_common())

    def time_by_operator(self) -> dict[str, float]:
        """Return each operator's share of the time in kernels, largest first."""
        total = sum(self.seconds.values()) or 1.0
        return {op: round(s / total, 4) for op, s in sorted(self.seconds.items(), key=lambda kv: -kv[1])}

    def notes(self) -> list[str]:
        """Return sentences on why a lowered precision isn't faster."""
        compute = [(self.seen[kernel]["op_name"], kind) for kernel, kind in self.computed_in.items()]
        return why_not_faster(self._precision, compute, self.time_by_operator(), CONVERTERS)

    def _find_types(self) -> dict[Kernel, str]:
        """Return the type of each convolution, matrix product and the like, without products of indices and shapes."""
        types = {
            kernel: self._find_type(kernel) for kernel, args in self.seen.items() if COMPUTE.search(args["op_name"])
        }
        return {kernel: kind for kernel, kind in types.items() if kind in (*COMPUTED, UNKNOWN)}

    def _find_type(self, kernel: Kernel) -> str:
        """Return the type of the node's first input, unless its operator converts that before it multiplies."""
        args = self.seen[kernel]
        if args["op_name"] == PACKED and args["provider"] == CPU:  # on a GPU the attribute changes nothing
            if self._levels is None:
                return UNKNOWN
            level = self._levels.get(kernel[0].removesuffix("_kernel_time"), 0 if self._levels else FUSED_LEVEL)
            if level in LEVELS:
                return LEVELS[level]
        if "Integer" in args["op_name"] or args["op_name"].startswith("DynamicQuantize"):
            return "int8"
        kind = next((name for typed in args.get("input_type_shape", []) for name in typed), UNKNOWN)
        return TYPE_NAMES.get(kind, kind)


def by_run(events: Sequence[dict[str, Any]]) -> list[dict[Kernel, float]]:
    """Return the seconds of each kernel in each run, by the event's name and the node's index.

    The library counts microseconds.
    """
    runs = sorted((e for e in events if e["name"] == "model_run"), key=lambda e: e["ts"])
    seconds: list[dict[Kernel, float]] = [{} for _ in runs]
    starts = [run["ts"] for run in runs]
    kernels = [e for e in events if e["cat"] == "Node" and e["name"].endswith("_kernel_time") and e["ts"] >= starts[0]]
    for event in _find_outer_kernels(kernels):
        kernel = event["name"], event["args"].get("node_index")
        seconds[bisect_right(starts, event["ts"]) - 1][kernel] = event["dur"] * 1e-6
    return seconds


def _find_outer_kernels(kernels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the kernels without those inside a branch or a loop.

    Their names and numbers may be those of nodes around it.
    """
    kept, end = list[dict[str, Any]](), -1
    for event in sorted(kernels, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] >= end:
            kept.append(event)
            if event["args"].get("op_name") in CONTROL:
                end = event["ts"] + event["dur"]
    return kept
