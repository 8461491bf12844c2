"""Jobs on the layers of a network: list, time, count, annotate, and compare their outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import measure, registry, system
from dyno.worker.backend import Session
from dyno.worker.facts.job import Difference, LayerError, LayerErrors, LayerGraph
from dyno.worker.inputs import input_data, modules
from dyno.worker.inputs.specs import static_shapes
from dyno.worker.jobs.inspect_model import inspect_model
from dyno.worker.journal import Journal
from dyno.worker.layers import graph, module
from dyno.worker.nets import models
from dyno.worker.nets.file_facts import DEFAULT_SIZE
from dyno.worker.numerics import compare
from dyno.worker.numerics.compare import Limits, TensorComparison
from dyno.worker.numerics.engine import Graph, GraphEngine, StoredTensors, TensorWriter, cast, run_once
from dyno.worker.onnx_graph import graph_facts
from dyno.worker.onnx_graph.file import import_onnx, read_io
from dyno.worker.registry import find
from dyno.worker.sessions.torch_support import import_torch, raise_refusals
from dyno.worker.spec import Artifact, Dims, Job, Trial, UserError

# An ONNX file with notes at its nodes for viewers such as Netron; its computation is unchanged

NAME_PREFIX = "dyno"  # prefix of keys in a node's metadata


def annotate(job: Job, journal: Journal) -> None:
    """Write the file `out` from `source`, with a note of the option `nodes` for each non-constant node, in order.

    A note's `lines` precede the node's description, its `facts` go into the node's metadata. External weights are
    copied, under the new name.
    """
    onnx = import_onnx()
    journal.stage("write")
    source, out, notes = job.options["source"], Path(job.options["out"]), job.options["nodes"]
    graph_facts.copy_with_weights(Path(source), out)
    model = onnx.load(out, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    if len(nodes) != len(notes):
        raise UserError(f"{source} has {len(nodes)} nodes, not {len(notes)} as when its layers were read; try again")
    for node, note in zip(nodes, notes, strict=True):
        _add_note(node, note)
    out.write_bytes(model.SerializeToString())


def _add_note(node: Any, note: Mapping[str, Any]) -> None:
    node.doc_string = "\n".join((*note["lines"], *([node.doc_string] if node.doc_string else [])))
    for name, text in note["facts"].items():
        entry = node.metadata_props.add()
        entry.key, entry.value = f"{NAME_PREFIX}: {name}", text


# One inference of a trial's engine, in a process under a profiler of kernels


def count(job: Job, journal: Journal) -> None:
    """Run the trial's engine once as it is, and once for the profiler; nothing is timed, since profiling slows all."""
    assert job.trial is not None
    trial = job.trial
    backend = find(trial.backend)
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    journal.stage("load")
    session = backend.load(trial, job.artifact)
    feeds = input_data.read_trial_batches(trial, session.inputs, 1)
    inputs = session.stage(next(feeds))
    session.bind(inputs)
    journal.stage("first call")
    session.run()
    session.wait()
    session.bind(inputs)  # the model may have written into them
    journal.stage("counters")
    session.run_for_counters()
    session.close()


# One form of a model for `dyno inspect`: a module's calls, a graph's nodes or an engine's layers

MODULE_BACKEND = "pytorch"  # backend that runs the module itself


def read(trial: Trial, artifact: Artifact | None, options: Mapping[str, Any]) -> LayerGraph:
    """Read the form that the trial's backend runs ("": the ONNX graph).

    For a module that has not been inspected yet, `options` contain the user's settings (see `inspect_model`) and the
    batch. Raise a `UserError` if it can't be read, `Unavailable` if it can't be read here.
    """
    if trial.backend == MODULE_BACKEND:
        return _inspect_module(trial, options)
    if trial.backend:
        return registry.find(trial.backend).layer_graph(trial, artifact)
    path = artifact.path if artifact else trial.model.file
    inputs, _ = read_io(path)
    return graph.read_graph(path, static_shapes(inputs, trial.dims))


def _inspect_module(trial: Trial, options: Mapping[str, Any]) -> LayerGraph:
    """Read the module, if possible without weights and arithmetic, which takes a tenth of the time."""
    torch = import_torch()
    torch.set_num_threads(trial.runtime.threads)
    model, dims = trial.model, trial.dims
    if options and not (models.find_library(model) and not options["overrides"]):
        inspection = inspect_model(trial, options["sizes"], options["overrides"])
        model = replace(model, inputs=inspection.inputs)
        dims = Dims(inspection.batch or dims.batch, *(options["sizes"] or [inspection.size])[0])
    elif options:
        size = models.image_size(model) or (DEFAULT_SIZE, DEFAULT_SIZE)
        dims = Dims(dims.batch, *(options["sizes"] or [size])[0])
    if models.find_library(model) and not (model.weights or model.pretrained):
        try:
            with torch.device("meta"):
                return _read_calls(torch, models.build(model, dims), model, dims)
        except Exception:  # the module itself reports it better below
            pass
    if (program := graph.list_program_parts(model, dims)) is not None:
        return _read_calls(torch, program, model, dims)
    network = models.build(model, dims)
    try:
        return _read_calls(torch, _without_values(network), model, dims)
    except Exception:  # a module that computes with values, or keeps own tensors, must run
        with raise_refusals(f"{model.name} can't be run once to see its layers"):
            return _read_calls(torch, models.build(model, dims), model, dims)


def _without_values(network: Any) -> Any:
    """Move the module with its weights to the meta device; `.to` alone would copy a shared weight several times."""
    shared: dict[int, list[tuple[Any, str]]] = {}
    for submodule in network.modules():
        for name, weight in submodule.named_parameters(recurse=False):
            shared.setdefault(id(weight), []).append((submodule, name))
    meta_network = network.to("meta")
    for (owner, name), *aliases in shared.values():
        for submodule, alias in aliases:
            setattr(submodule, alias, getattr(owner, name))
    return meta_network


def _read_calls(torch: Any, network: Any, model: Any, dims: Dims) -> LayerGraph:
    """Read the module's calls on an example of the model's inputs, on the device of its weights."""
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    if not model.inputs:
        return module.read(network, torch.zeros(dims.batch, model.channels, dims.height, dims.width, device=device))
    args, keywords = modules.make_example(model, model.inputs, dims)
    return module.read(network, *_move_tensors(list(args), device), **_move_tensors(keywords, device))


def _move_tensors(value: Any, device: Any) -> Any:
    if isinstance(value, dict):
        return {key: _move_tensors(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_move_tensors(each, device) for each in value]
    return value.to(device) if hasattr(value, "detach") else value


# Layer errors: one job stores a reference's tensors, others compare an engine with them, layer by layer

Report = Callable[[str], None]
REFERENCE_BACKEND = "onnxruntime"  # runs the reference's graph unoptimised, node by node
MIN_SAME_SHAPE_SHARE = 0.5  # share of tensors of equal name with equal shapes in two forms of a network
MATCHING_PASSES = 3  # a mismatched tensor may hide a later one
# files and folders in the job's folder
TENSORS_DIR, ISOLATED_DIR, DELTAS_FILE = "tensors", "isolated", "with_deltas.onnx"


def perform(job: Job, journal: Journal) -> None:
    """Run a `reference` or `layer_errors` job."""
    if job.kind == "reference":
        store_reference(job, journal.folder, journal.stage)
    else:
        journal.facts(layer_errors=compare_engine(job, journal.folder, journal.stage))


def store_reference(job: Job, folder: Path, report: Report) -> None:
    """Store the reference's tensors in FOLDER/tensors, on `runs` batches.

    With the option `calls` they are the module's: rows of a part's name, the number of its call, and the tensor's name
    in `graph`, the exported file. Otherwise they are the job's graph's.
    """
    assert job.trial is not None
    trial, count, writer = job.trial, int(job.options["runs"]), TensorWriter(folder / TENSORS_DIR)
    report("run the reference")
    if "calls" in job.options:
        session: Any = find(trial.backend).load(trial, None)
        session.take_parts()
        graph, engine = Graph(job.options["graph"]), _make_reference(trial, folder)
        feeds = _make_feeds(trial, session.inputs, count)
        calls = {tensor: (name, call_number) for name, call_number, tensor in job.options["calls"]}
        compare.run_module_reference(session, session.module, graph, engine, calls, feeds, writer)
        session.close()
        return
    assert job.artifact is not None
    inputs, _ = read_io(job.artifact.path)
    compare.run_graph_reference(
        _make_reference(trial, folder), Graph(job.artifact.path), _make_feeds(trial, inputs, count), writer
    )


def _make_feeds(trial: Trial, inputs: Any, count: int) -> list[dict[str, np.ndarray]]:
    feeds = [*input_data.read_trial_batches(trial, inputs, count)]
    compare.check_finite(feeds)
    return feeds


def _make_reference(trial: Trial, folder: Path) -> GraphEngine:
    plain = replace(trial, backend=REFERENCE_BACKEND, precision="fp32", options={"optimization": "disable"},
                    runtime=replace(trial.runtime, device="cpu"))  # fmt: skip
    return GraphEngine(find(REFERENCE_BACKEND).load, plain, folder)


def compare_engine(job: Job, folder: Path, report: Report) -> LayerErrors:
    """Compare the trial's engine with the tensors in the folder of the option `reference`.

    `graph` is the engine's ONNX file, `reference_graph` the reference's; `limits` are the fields of `Limits`. With
    `always`, suspects are tested even if the outputs agree. Raise a `UserError` for graphs without a common tensor, or
    of different networks.
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
    layers = compare.with_effects(comparison, result.layers, folder / ISOLATED_DIR, folder / DELTAS_FILE)
    report("test the suspects again")
    result = replace(result, layers=layers, unmodified=unmodified)
    return _retest_suspects(result, comparison, _make_reference(trial, folder), bool(options["always"]))


def _check_common(comparison: TensorComparison) -> None:
    inner_tensors = {*comparison.graph.float_tensors} - {*comparison.graph.outputs}
    if not comparison.tensors or (inner_tensors and inner_tensors.isdisjoint(comparison.tensors)):
        raise UserError("it shares no layer's tensor with the reference, so layers can't be compared; "
                        "give two files of one graph, whose tensors have the same names")  # fmt: skip


def _check_shapes(comparison: TensorComparison, names: Collection[str], path: str) -> None:
    """Raise a `UserError` if most tensors with a common name have different shapes.

    Exporters number the tensors of different networks alike.
    """
    inner_tensors = {*names} - {*comparison.graph.outputs}
    if len(inner_tensors & {*comparison.tensors}) < MIN_SAME_SHAPE_SHARE * len(inner_tensors):
        raise UserError(f"most tensors of {path} have other shapes than the reference's of the same name, so these are "
                        "different networks; give two files of one graph")  # fmt: skip


def _run_unmodified(session: Session, comparison: TensorComparison) -> list[list[np.ndarray]]:
    """Return the outputs of the engine's own file, without marked or cut tensors."""
    dtypes = {tensor.name: np.dtype(tensor.dtype) for tensor in session.inputs}
    feeds = comparison.stored.feeds([*dtypes])
    try:
        return [run_once(session, {name: cast(array, dtypes[name]) for name, array in feed.items()}) for feed in feeds]
    finally:
        session.close()


def _compare_layers(comparison: TensorComparison, folder: Path, report: Report, path: str) -> LayerErrors:
    """Return each layer's total and own error, without tensors that have another meaning in the reference."""
    graph = comparison.graph
    sizes = compare.count_bytes(graph, {name: array.shape for name, array in comparison.feeds[0].items()})
    report("run the marked graph")
    names = comparison.tensors
    total, marked, parts = compare.mark_tensors(comparison, sizes)
    _check_shapes(comparison, names, path)
    report("run each layer alone")
    isolated = compare.isolate_layers(comparison, sizes, folder / ISOLATED_DIR)
    match_count = len(comparison.tensors)
    for _ in range(MATCHING_PASSES):
        if not (mismatches := compare.find_mismatched(comparison, total, isolated)):
            break
        comparison.tensors = [name for name in comparison.tensors if name not in mismatches]
        isolated = compare.isolate_layers(comparison, sizes, folder / ISOLATED_DIR)
    return LayerErrors(
        layers=_list_layer_errors(comparison, total, isolated), marked=marked, runs=comparison.stored.runs, parts=parts,
        unmatched=len(graph.float_tensors) - match_count, mismatched=match_count - len(comparison.tensors),
        reference_layers=len(comparison.stored),
    )  # fmt: skip


def _list_layer_errors(
    comparison: TensorComparison, total: Mapping[str, Difference], isolated: Mapping[str, Difference]
) -> tuple[LayerError, ...]:
    tensors = {*comparison.tensors}
    reads = {name: comparison.graph.reads(name, tensors) for name in comparison.tensors}
    return tuple(LayerError(name, reads[name], total[name], isolated[name]) for name in reads if name in isolated)


def _retest_suspects(
    result: LayerErrors, comparison: TensorComparison, reference: GraphEngine, is_forced: bool
) -> LayerErrors:
    """Add suspects and the results of the graph cut around them, if the outputs disagree or with `is_forced`."""
    limit = comparison.limits.error
    is_hidden = _is_beyond_limit(result.unmodified, limit) and not _is_beyond_limit(result.marked, limit)
    if not (_is_beyond_limit(result.unmodified, limit) or _is_beyond_limit(result.marked, limit) or is_forced):
        return result
    candidates = [layer for layer in result.layers if layer.tensor in comparison.reference_graph.float_tensors]
    if is_hidden:
        result = replace(result, boundary=compare.find_boundary(comparison))
        suspects = compare.list_fused_suspects(comparison, result.boundary[1]) if candidates else []
    else:
        suspects = compare.list_suspects(candidates or result.layers)
    result = replace(result, suspects=tuple(suspects))
    if not candidates or not suspects:
        return result
    stages = compare.list_stages(comparison, suspects)
    return replace(result, cut=compare.run_stages(comparison, stages, None),
                   substituted=compare.run_stages(comparison, stages, reference))  # fmt: skip


def _is_beyond_limit(difference: Difference | None, limit: float) -> bool:
    return difference is None or not difference.error <= limit


# A trial's engine, timed as it is and then layer by layer, in one process

UNPROFILED, PROFILED, LAYERS = "unprofiled", "profiled", "layers"  # tags; not latencies to compare


def profile(job: Job, journal: Journal) -> None:
    """Time the trial's model boundary unprofiled, then its layers in `runs` (an option) profiled runs.

    Store the samples of both and the layers' seconds with a row per repeat. On a GPU, also store the parts of an
    unprofiled inference and, if the engine reports it, the GPU's work in the profiled runs.
    """
    assert job.trial is not None
    trial = job.trial
    backend = find(trial.backend)
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    session = journal.time_stage("load", "load", lambda: backend.load(trial, job.artifact))
    feeds = [session.stage(feed) for feed in input_data.read_trial_batches(trial, session.inputs)]
    timer = measure.watch(session, "model", journal.warn)
    run_step = measure.make_step(session, "model", feeds, timer)
    journal.time_stage("first_call", "first call", run_step)
    restore = measure.find_restore(session, feeds, journal.warn)
    journal.stage("warm up")
    if not measure.warm_up(run_step, trial.plan, restore):
        journal.warn(f"the median was not steady after {trial.plan.warmup_s:g} s of warm-up")
    journal.stage("time")
    contention = system.CpuContention()
    sampling = measure.measure_latency(run_step, trial.plan, timer, restore=restore)
    parts = measure.measure_parts(session, feeds, trial.plan)
    journal.stage("profile")
    times = session.profile(int(job.options["runs"]))
    journal.record_contention("model", contention.count_busy(), trial.runtime.device, contention.count_withheld())
    journal.store_samples(UNPROFILED, "model", "s", "duration", sampling)
    if parts:
        journal.store_parts(parts)
    journal.store_profile(PROFILED, times.run_seconds, LAYERS, times.layers)
    if times.work:
        journal.store_gpu_work(times.work)
    if times.functions:
        journal.facts(functions=times.functions)
    journal.facts(inside=replace(times.graph, notes=tuple(filter(None, (*times.graph.notes, times.note)))))
    session.close()
