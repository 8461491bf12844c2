"""Layer errors: one job stores a reference's tensors, others compare an engine with them, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno.worker.backend import Session
from dyno.worker.facts.numerics import Difference, LayerError, LayerErrors
from dyno.worker.inputs import input_data
from dyno.worker.numerics import compare, reference, retest
from dyno.worker.numerics.compare import Limits, TensorComparison
from dyno.worker.numerics.engine import GraphEngine, StoredTensors, TensorWriter, cast, once
from dyno.worker.numerics.graph import Graph
from dyno.worker.onnx_graph.file import read_io
from dyno.worker.registry import find
from dyno.worker.spec import Job, Trial, UserError

if TYPE_CHECKING:
    from dyno.worker.journal import Journal

Report = Callable[[str], None]
REFERENCE = "onnxruntime"  # runs the reference's graph, with its optimisation off: node by node
SAME_SHAPE = 0.5  # of the tensors with a common name have the same shape, at least, in two forms of one network
PASSES = 3  # in which tensors are left out: a mismatched one may hide another behind it
TENSORS, ISOLATED, WITH_DELTAS = "tensors", "isolated", "with_deltas.onnx"  # files and folders in the job's folder


def perform(job: Job, journal: Journal) -> None:
    """Run the job of either kind: `reference` or `layer_errors`."""
    if job.kind == "reference":
        store_reference(job, journal.folder, journal.stage)
    else:
        journal.facts(layer_errors=compare_engine(job, journal.folder, journal.stage))


def store_reference(job: Job, folder: Path, report: Report) -> None:
    """Store the reference's tensors in FOLDER/tensors, on `runs` batches.

    With the option `calls` they are those of the module: rows of a part's name, which of its calls, and the tensor that
    the call's result is by the names in `graph`, the file of its export. Else they are those of the job's graph.
    """
    assert job.trial is not None
    trial, count, writer = job.trial, int(job.options["runs"]), TensorWriter(folder / TENSORS)
    report("run the reference")
    if "calls" in job.options:
        session: Any = find(trial.backend).load(trial, None)
        session.take_parts()
        graph, engine = Graph(job.options["graph"]), _make_reference(trial, folder)
        feeds = _make_feeds(trial, session.inputs, count)
        calls = {tensor: (name, number) for name, number, tensor in job.options["calls"]}
        reference.of_module(session, session.module, graph, engine, calls, feeds, writer)
        session.close()
        return
    assert job.artifact is not None
    inputs, _ = read_io(job.artifact.path)
    reference.of_graph(
        _make_reference(trial, folder), Graph(job.artifact.path), _make_feeds(trial, inputs, count), writer
    )


def _make_feeds(trial: Trial, inputs: Any, count: int) -> list[dict[str, np.ndarray]]:
    model = trial.model
    feeds = [*input_data.batches(trial.data, model.preprocess, inputs, trial.dims, count, model.inputs)]
    reference.check_finite(feeds)
    return feeds


def _make_reference(trial: Trial, folder: Path) -> GraphEngine:
    plain = replace(trial, backend=REFERENCE, precision="fp32", options={"optimization": "disable"},
                    runtime=replace(trial.runtime, device="cpu"))  # fmt: skip
    return GraphEngine(find(REFERENCE).load, plain, folder)


def compare_engine(job: Job, folder: Path, report: Report) -> LayerErrors:
    """Compare the trial's engine with the tensors in the folder of the option `reference`.

    `graph` is the ONNX file that the engine was made from, `reference_graph` the reference's own, `limits` are those of
    `Limits`, and `always` asks for suspects even where the outputs agree. Raises `UserError` for graphs that have no
    tensor in common, or of different networks.
    """
    assert job.trial is not None
    trial, options = job.trial, job.options
    comparison = TensorComparison(
        GraphEngine(find(trial.backend).load, trial, folder),
        Graph(options["graph"]),
        Graph(options["reference_graph"]),
        StoredTensors(Path(options["reference"])),
        Limits(*options["limits"]),
    )
    _check_common(comparison)
    report("run the unmodified engine")
    unmodified = comparison.outputs(_run_unmodified(find(trial.backend).load(trial, job.artifact), comparison))
    result = _compare_layers(comparison, folder, report, str(options["graph"]))
    report("find each layer's effect")
    layers = compare.with_effects(comparison, result.layers, folder / ISOLATED, folder / WITH_DELTAS)
    report("test the suspects again")
    result = replace(result, layers=layers, unmodified=unmodified)
    return _retest_suspects(result, comparison, _make_reference(trial, folder), bool(options["always"]))


def _check_common(comparison: TensorComparison) -> None:
    inner = {*comparison.graph.float_tensors} - {*comparison.graph.outputs}
    if not comparison.tensors or (inner and inner.isdisjoint(comparison.tensors)):
        raise UserError("it shares no layer's tensor with the reference, so layers can't be compared; "
                        "give two files of one graph, whose tensors have the same names")  # fmt: skip


def _check_shapes(comparison: TensorComparison, named: Collection[str], path: str) -> None:
    """Raise a `UserError` if most of the tensors with a common name have different shapes.

    Exporters number the tensors of every network alike.
    """
    inner = {*named} - {*comparison.graph.outputs}
    if len(inner & {*comparison.tensors}) < SAME_SHAPE * len(inner):
        raise UserError(f"most tensors of {path} have other shapes than the reference's of the same name, so these are "
                        "different networks; give two files of one graph")  # fmt: skip


def _run_unmodified(session: Session, comparison: TensorComparison) -> list[list[np.ndarray]]:
    """Return the outputs of the engine's own file, with nothing marked or cut."""
    kinds = {tensor.name: np.dtype(tensor.dtype) for tensor in session.inputs}
    feeds = comparison.stored.feeds([*kinds])
    try:
        return [once(session, {name: cast(array, kinds[name]) for name, array in feed.items()}) for feed in feeds]
    finally:
        session.close()


def _compare_layers(comparison: TensorComparison, folder: Path, report: Report, path: str) -> LayerErrors:
    """Return each layer's total error and its own, without the tensors that mean something else in the reference."""
    graph = comparison.graph
    sizes = reference.bytes_of(graph, {name: array.shape for name, array in comparison.feeds[0].items()})
    report("run the marked graph")
    named = comparison.tensors
    total, marked, parts = compare.marked(comparison, sizes)
    _check_shapes(comparison, named, path)
    report("run each layer alone")
    own = compare.isolated(comparison, sizes, folder / ISOLATED)
    matched = len(comparison.tensors)
    for _ in range(PASSES):
        if not (others := compare.mismatched(comparison, total, own)):
            break
        comparison.tensors = [name for name in comparison.tensors if name not in others]
        own = compare.isolated(comparison, sizes, folder / ISOLATED)
    return LayerErrors(
        layers=_list_layer_errors(comparison, total, own), marked=marked, runs=comparison.stored.runs, parts=parts,
        unmatched=len(graph.float_tensors) - matched, mismatched=matched - len(comparison.tensors),
        reference_layers=len(comparison.stored),
    )  # fmt: skip


def _list_layer_errors(
    comparison: TensorComparison, total: Mapping[str, Difference], own: Mapping[str, Difference]
) -> tuple[LayerError, ...]:
    tensors = {*comparison.tensors}
    reads = {name: comparison.graph.reads(name, tensors) for name in comparison.tensors}
    return tuple(LayerError(name, reads[name], total[name], own[name]) for name in reads if name in own)


def _retest_suspects(
    result: LayerErrors, comparison: TensorComparison, reference: GraphEngine, always: bool
) -> LayerErrors:
    """Add the suspects and the results of the graph cut around them, if the outputs disagree or `always`."""
    limit = comparison.limits.error
    hidden = _is_beyond_limit(result.unmodified, limit) and not _is_beyond_limit(result.marked, limit)
    if not (_is_beyond_limit(result.unmodified, limit) or _is_beyond_limit(result.marked, limit) or always):
        return result
    able = [layer for layer in result.layers if layer.tensor in comparison.reference_graph.float_tensors]
    if hidden:
        result = replace(result, boundary=retest.boundary(comparison))
        suspects = retest.fused_suspects(comparison, result.boundary[1]) if able else []
    else:
        suspects = retest.suspects(able or result.layers)
    result = replace(result, suspects=tuple(suspects))
    if not able or not suspects:
        return result
    stages = retest.stages(comparison, suspects)
    return replace(result, cut=retest.run_stages(comparison, stages, None),
                   substituted=retest.run_stages(comparison, stages, reference))  # fmt: skip


def _is_beyond_limit(difference: Difference | None, limit: float) -> bool:
    return difference is None or not difference.error <= limit
