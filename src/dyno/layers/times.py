"""Times of layers by their original modules, and the share of the latency that they explain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dyno.formatting import format_count, show
from dyno.layers import align, roofline
from dyno.layers.align import Flow, FormSet
from dyno.layers.roofline import Ceilings, RooflineRating
from dyno.layers.tables import MODULE_NAMES, WHOLE_MODEL, format_shape
from dyno.report.tables import TableKind
from dyno.results.remarks import Launch
from dyno.results.stats import Interval, median_interval
from dyno.table import COUNT, PERCENT, TEXT, Column, Row, Table, limit_cells
from dyno.worker.facts.job import MODULES, NODES, Function, Layer, LayerGraph, Port

# Launch times: whether the GPU works or waits for the host during a run.

# idle shares of the latency: launch-bound from the first, busy up to the second
LAUNCH_BOUND_SHARE, BUSY_SHARE = 0.5, 0.2
LAUNCH_COLUMNS = (
    Column("queueing_ms", "median time of the host inside run()", "ms", title="queueing, ms", rank=4),
    Column("busy_ms", "median time in which the GPU ran a kernel or a copy", "ms", title="GPU busy, ms", rank=1),
    Column("idle", "share of the latency in which it ran none, at least 0", "%", PERCENT, title="GPU idle, %", rank=1),
    Column("kernels", "kernels of one watched run", kind=COUNT, rank=2),
    Column("calls_ms", "median time of the host in calls of CUDA, waits excluded, in a watched run", "ms",
           title="calls of CUDA, ms", rank=5),
)  # fmt: skip


@dataclass(frozen=True)
class LaunchTimes:
    """Launch times of one form, in seconds per run.

    Without profiling: `latency` by the GPU's clock, and `enqueue`, the host's time inside `run`. With profiling: `busy`
    time of the GPU, `calls`, the host's time in CUDA functions, and the number of kernels (empty if unreported).
    """

    latency: np.ndarray
    enqueue: np.ndarray
    busy: np.ndarray
    calls: np.ndarray
    kernels: np.ndarray

    def measure_idle(self, latency: float) -> float:
        """Return the idle share of the GPU in the latency (seconds), at least 0: a profiled run's clock may differ."""
        return max(0.0, 1 - float(np.median(self.busy)) / latency)

    def cells(self, latency: float) -> Row:
        """Return the cells of LAUNCH_COLUMNS."""
        cells: Row = {"queueing_ms": 1e3 * float(np.median(self.enqueue))} if self.enqueue.size else {}
        if self.busy.size:
            cells |= {
                "busy_ms": 1e3 * float(np.median(self.busy)), "idle": 100 * self.measure_idle(latency),
                "kernels": int(np.median(self.kernels)), "calls_ms": 1e3 * float(np.median(self.calls)),
            }  # fmt: skip
        return cells

    def sentence(self, latency: float) -> str:
        """Describe whether the run is launch-bound: by the kernels if recorded, else by the two clocks alone."""
        if self.busy.size:
            return self._describe_kernels(latency)
        if not self.latency.size:
            return ""
        enqueue = float(np.median(self.enqueue)) if self.enqueue.size else None
        launch = Launch(latency, float(np.median(self.latency)), enqueue)
        return launch.sentence or (
            f"not launch-bound: of {show(latency, 'duration')} the GPU needs {show(launch.gpu, 'duration')} from its "
            "first kernel to its last"
        )

    def _describe_kernels(self, latency: float) -> str:
        idle = self.measure_idle(latency)
        idle_text = f"the GPU ran no kernel in {100 * idle:.0f} % of the latency"
        if idle >= LAUNCH_BOUND_SHARE:
            return f"launch-bound: {idle_text}; it waits for the host between {int(np.median(self.kernels))} kernels"
        if idle > BUSY_SHARE:
            return f"launch-bound in part: {idle_text}"
        return f"compute-bound: the GPU ran kernels in {100 * (1 - idle):.0f} % of the latency"


def read_launches(samples: dict[str, np.ndarray]) -> LaunchTimes | None:
    """Build the GPU's times from the arrays of a `profile` job; None for a job on a CPU."""
    names = ("unprofiled_model_gpu", "enqueue", "gpu_busy", "cuda_calls", "kernels")
    if not any(name in samples for name in names):
        return None
    return LaunchTimes(*(samples.get(name, np.empty(0)) for name in names))


# Functions of the host and the GPU by their share of a run's critical path, as a table and a sentence.

CRITICAL_PATH = TableKind("critical-path", "Critical path",
                          "Critical path of a watched run: the time of each function of the host and the GPU on it.",
                          command="dyno profile --device cuda:0")  # fmt: skip
PATH_COLUMNS = (
    Column("form", "which engine", kind=TEXT),
    Column("where", "the host outside of CUDA, a call of CUDA, or the GPU", kind=TEXT),
    Column("function", "its name, or the gap between two", kind=TEXT),
    Column("calls", "how often it ran", "1"),
    Column("time_us", "its time", "µs", title="time, µs"),
    Column("path_us", "its time on the critical path", "µs", title="on the path, µs"),
    Column("share", "share of the path", "%", PERCENT, title="share, %"),
    Column("waiting_us", "of a call: for the GPU; of a kernel: after its launch", "µs", title="waiting, µs", rank=1),
)
TABLE_NOTE = (
    "A mean over the watched runs. The critical path is the work that would end the run earlier if it were faster: "
    "the host where the GPU waits for it, and the GPU where work is queued."
)


MAX_SLOWDOWN = 1.1  # factor from which a slower profiled run may have another critical path
IN_WORDS = {"host": "the host outside of CUDA", "CUDA call": "calls of CUDA", "GPU": "the GPU"}


@dataclass(frozen=True)
class Path:
    """Functions of a form's profiled runs. `slowed` is the time of those runs over the others', `idle` the GPU's idle
    share of an unprofiled run."""

    functions: Sequence[Function]
    slowed: float = 1.0
    idle: float = 0.0

    @property
    def sentences(self) -> list[str]:
        """Division of the path, and, if profiling slowed the runs, the bounds of the host's share."""
        shares: dict[str, float] = {}
        total = sum(func.path for func in self.functions) or 1.0
        for func in self.functions:
            shares[func.where] = shares.get(func.where, 0.0) + func.path / total
        sorted_shares = sorted(shares.items(), key=lambda item: -item[1])
        parts = [f"{100 * share:.0f} % {IN_WORDS.get(where, where)}" for where, share in sorted_shares]
        sentences = ["the critical path is " + ", ".join(parts)]
        if self.slowed > MAX_SLOWDOWN:
            host = sum(share for where, share in shares.items() if where != "GPU")
            sentences.append(
                f"watching made the run {self.slowed:.1f} times as long: unwatched, the host with its calls has at "
                f"least {100 * min(self.idle, host):.0f} % of the path, the share in which the GPU is idle, and at "
                f"most {100 * host:.0f} %"
            )
        return sentences


def make_path_table(paths: Mapping[str, Path], top: int) -> Table:
    """Build rows for each form's `top` functions (0: all) by time on the critical path, and one for the rest."""
    rows: list[Row] = []
    for form, path in paths.items():
        functions = path.functions
        total = sum(func.path for func in functions) or 1.0
        top_functions = functions if not top or len(functions) <= top + 1 else functions[:top]
        rest = functions[len(top_functions) :]
        rows += [{"form": form, "where": func.where, "function": func.name, "calls": func.calls or None,
                  "time_us": 1e6 * func.time, "path_us": 1e6 * func.path, "share": 100 * func.path / total,
                  "waiting_us": 1e6 * func.waiting or None} for func in top_functions]  # fmt: skip
        if rest:
            on_path = sum(func.path for func in rest)
            rows.append({"form": form, "function": f"{len(rest)} more functions", "path_us": 1e6 * on_path,
                         "time_us": 1e6 * sum(func.time for func in rest), "share": 100 * on_path / total})  # fmt: skip
    sentences = (f"{form}: {sentence}." for form, path in paths.items() for sentence in path.sentences)
    return CRITICAL_PATH.build(PATH_COLUMNS, rows, notes=(TABLE_NOTE, *sentences), group=("form",))


ROW_ORDERS = ("time", "graph")
PROFILE = TableKind("profile", "Time by layer", "Time of each layer, by the modules that it came from.",
                    command="dyno profile")  # fmt: skip
RECONCILIATION = TableKind("reconciliation", "Layers and latency", "How much of the latency the layers' times explain.",
                           command="dyno profile")  # fmt: skip
COLUMNS = (
    Column("form", "whose layer it is", kind=TEXT, identity=True),
    Column("modules", "PyTorch modules that the layer came from, else nodes", kind=TEXT, cell=MODULE_NAMES),
    Column("layer", "the engine's own name of the layer", kind=TEXT, rank=4),
    Column("type", "module's class, operator or kind of layer", kind=TEXT, rank=1),
    Column("time_us", "median over the repeats with its 95 % interval", "µs", title="time, µs", interval=True),
    Column("share", "share of the time of all layers", "%", PERCENT, title="share, %"),
    Column("cumulative", "share of this row and those above it", "%", PERCENT, title="cumulative, %", rank=2),
    Column("output", "shape of the first output", kind=TEXT, rank=3),
    Column("computes_in", "type that it multiplies in", kind=TEXT, title="computes in", rank=5),
    Column("kernel", "kernel or provider", kind=TEXT, rank=6),
    Column("remark", "whether it only converts", kind=TEXT, rank=7),
)


@dataclass(frozen=True)
class Times:
    """Seconds of one form: unprofiled and profiled runs, and its layers [repeats, layers of the form]. `warnings` name
    disturbances. `gpu` has the GPU's times (None: none), and `clock` the SM clock behind the latency in MHz (NaN:
    unknown). `backend` and `precision` are the trial's; `functions` are those of the host and the GPU, if recorded."""

    unprofiled: np.ndarray
    profiled: np.ndarray
    layers: np.ndarray
    warnings: tuple[str, ...] = ()
    gpu: LaunchTimes | None = None
    clock: float = math.nan
    backend: str = ""
    precision: str = ""
    functions: tuple[Function, ...] = ()

    @property
    def latency(self) -> float:
        """Median seconds of an unprofiled run."""
        return float(np.median(self.unprofiled))

    @property
    def path(self) -> Path:
        """Critical path through the profiled runs."""
        idle = self.gpu.measure_idle(self.latency) if self.gpu and self.gpu.busy.size else 0.0
        return Path(self.functions, float(np.median(self.profiled)) / self.latency, idle)

    def list_ran(self, form: LayerGraph) -> list[int]:
        """Return the indices of the form's layers, without skipped layers that took no time."""
        medians = np.median(self.layers, axis=0)
        return [i for i, layer in enumerate(form.layers) if medians[i] > 0 or not layer.skipped]


def profile_table(
    form_set: FormSet, times: Mapping[int, Times], order: str, top: int, ceilings: Ceilings | None = None
) -> Table:
    """Build rows for each form's `top` layers (0: all), by time or as run (`graph`), and one for the rest.

    A layer's time is its median over the repeats; shares refer to the sum of these. With `ceilings` each layer is rated
    by them.
    """
    forms, rows, notes = form_set.forms, list[Row](), list[str]()
    for k, timing in times.items():
        rating = roofline.rate_layers(form_set, k, timing.precision, ceilings) if ceilings else None
        rows += _build_rows(forms[k], name_modules(form_set, k), timing, order, top, rating)
        notes += [*forms[k].notes, *(f"{forms[k].library}: {warning}" for warning in timing.warnings)]
    notes += roofline.list_roofline_notes(rows) if ceilings else []
    columns = (*COLUMNS, *(roofline.RATED_COLUMNS if ceilings else ()))
    return PROFILE.build(columns, rows, notes=tuple(dict.fromkeys(notes)), group=("form",))


def _build_rows(
    form: LayerGraph, names: Sequence[list[str]], times: Times, order: str, top: int, rating: RooflineRating | None
) -> list[Row]:
    """Build the rows of one form, without skipped layers that took no time."""
    seconds, run_layers = times.layers, times.list_ran(form)
    medians = np.median(seconds, axis=0)
    slowest = sorted(run_layers, key=lambda i: -medians[i])
    top_layers = slowest[: top or None]
    rest = sorted(set(run_layers) - set(top_layers))
    indices = sorted(top_layers) if order == "graph" else top_layers
    rows = [_build_row(form, form.layers[i], names[i], seconds[:, [i]]) for i in indices]
    if rest:
        rows.append(_build_row(form, Layer(), [format_count(len(rest), "more layer")], seconds[:, rest]))
    for row, layers in zip(rows, [*([i] for i in indices), *([rest] if rest else [])], strict=True):
        row |= rating.make_cells(layers, row["seconds"]) if rating else {}
    total, cumulative = medians[run_layers].sum() or 1.0, 0.0
    for row in rows:
        row["share"] = 100 * row["seconds"] / total
        cumulative += row["share"]
        row["cumulative"] = cumulative
    return rows


def _build_row(form: LayerGraph, layer: Layer, names: list[str], seconds: np.ndarray) -> Row:
    """Build the row of one layer with its interval, or of several as the sum of their medians, without interval."""
    value = float(np.median(seconds, axis=0).sum())
    interval = median_interval(seconds[:, 0]) if seconds.shape[1] == 1 else Interval(value, math.nan, math.nan)
    return {
        "form": form.library, "modules": " ".join(names), "modules_names": names,
        "layer": layer.name if form.form != MODULES else "", "type": layer.type, "seconds": value,
        **limit_cells("time_us", interval, 1e6),
        "output": format_shape(layer.outputs[0] if layer.outputs else Port("")), "computes_in": layer.computes_in,
        "kernel": layer.tactic, "remark": "only changes type or layout" if layer.moves else "",
    }  # fmt: skip


def name_modules(form_set: FormSet, k: int) -> list[list[str]]:
    """Return the module names of each layer of form `k`, in the order of their calls.

    Without known modules they are the graph's nodes; a conversion inserted by the engine has no names.
    """
    return [modules or nodes for modules, nodes in find_origins(form_set, k)]


def find_origins(form_set: FormSet, k: int) -> list[tuple[list[str], list[str]]]:
    """Return the original modules of each layer of form `k`, in the order of their calls, and the graph's nodes.

    Both are empty for a conversion inserted by the engine.
    """
    forms, graph, owner = form_set.forms, form_set.graph_of.get(k), form_set.module_of.get(k)
    form = forms[k]
    if form.form == MODULES:
        return [([layer.name or WHOLE_MODEL], []) for layer in form.layers]
    if form.form != NODES and graph is None:
        return [([], [*layer.nodes]) for layer in form.layers]
    pivot = k if form.form == NODES or graph is None else graph
    nodes = {i: [i] for i in range(len(form.layers))} if pivot == k else invert_link(align.link_layers(forms, pivot, k))
    calls = invert_link(align.link_layers(forms, owner, pivot)) if owner is not None else {}
    constant = Flow(forms[pivot].layers).constant

    def list_modules(node: int) -> list[str]:
        if owner is not None and node in calls:
            return [forms[owner].layers[call].name or WHOLE_MODEL for call in calls[node]]
        return [name or WHOLE_MODEL for name in forms[pivot].layers[node].modules]

    origins = []
    for i, layer in enumerate(form.layers):
        layer_nodes = nodes.get(i, ()) if not layer.moves else ()
        origin = [
            node for node in layer_nodes if node not in constant
        ] or layer_nodes  # submodules may share constant nodes
        modules = dict.fromkeys(name for node in origin for name in list_modules(node))
        origins.append(([*modules], [forms[pivot].layers[node].name for node in layer_nodes]))
    return origins


def invert_link(link: align.Link) -> dict[int, list[int]]:
    """Return the upper form's counterparts of each lower layer; for outer modules only sure pairs."""
    by_lower: dict[int, list[int]] = {}
    for upper, counterparts in sorted(link.pairs.items()):
        for lower in counterparts:
            if upper not in link.outer or (upper, lower) in link.sure:
                by_lower.setdefault(lower, []).append(upper)
    return by_lower


def reconcile(form_set: FormSet, times: Mapping[int, Times], ceilings: Ceilings | None = None) -> Table:
    """Build a row per form: the unprofiled latency, the sum of its layers, and the remainder.

    With `ceilings` the latency is also rated by them.
    """
    forms, rows, bounds = form_set.forms, list[Row](), list[str]()
    for k, timing in times.items():
        latency, layers = median_interval(timing.unprofiled), float(np.median(timing.layers, axis=0).sum())
        rows.append({
            "form": forms[k].library, **limit_cells("unprofiled_ms", latency, 1e3), "layers_ms": 1e3 * layers,
            "remainder_ms": 1e3 * (latency.value - layers), "profiled_ms": 1e3 * float(np.median(timing.profiled)),
            "repeats": len(timing.layers), "runs": len(timing.profiled), "clock": timing.clock,
            **(timing.gpu.cells(timing.latency) if timing.gpu else {}),
        })  # fmt: skip
        if ceilings:
            rating = roofline.rate_layers(form_set, k, timing.precision, ceilings)
            rows[-1] |= rating.of_latency(timing.list_ran(forms[k]), timing.latency)
            bounds.append(f"{forms[k].library}: {rating.sentence(np.median(timing.layers, axis=0))}.")
    columns = (
        Column("form", "which engine", kind=TEXT),
        Column("unprofiled_ms", "median latency with nothing switched on", "ms", title="unprofiled, ms", interval=True),
        Column("layers_ms", "sum of the layers' medians", "ms", title="all layers, ms"),
        Column("remainder_ms", "unprofiled less all layers", "ms", title="remainder, ms"),
        *LAUNCH_COLUMNS,
        *(roofline.OF_LATENCY if ceilings else ()),
        Column("profiled_ms", "median of the watched runs", "ms", title="watched, ms", rank=1),
        Column("clock", "median SM clock behind the latency", "MHz", title="clock, MHz", rank=4),
        Column("runs", "watched runs", kind=COUNT, rank=3),
        Column("repeats", "repeats behind a layer's median", kind=COUNT, rank=2),
    )
    note = (
        "The remainder is the unprofiled median less the sum of the layers' medians: time between layers or, if "
        "negative, the cost of watching. The time of a watched run is not a latency."
    )
    on_gpu = [(forms[k].library, timing.gpu.sentence(timing.latency)) for k, timing in times.items() if timing.gpu]
    notes = (note, *(f"{library}: {sentence}." for library, sentence in on_gpu if sentence), *bounds)
    return RECONCILIATION.build(columns, rows, notes=notes)
