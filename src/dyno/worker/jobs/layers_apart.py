"""Where an engine parts from a reference: the reference's values in one job, and an engine against them in another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno.worker.backend import Session
from dyno.worker.facts.numerics import Apart, Parting, Point
from dyno.worker.inputs import input_data
from dyno.worker.numerics import compare, reference, retest
from dyno.worker.numerics.compare import Limits, Sides
from dyno.worker.numerics.engine import Engine, Keeping, Kept, cast, once
from dyno.worker.numerics.graph import Graph
from dyno.worker.onnx_graph.file import read_io
from dyno.worker.registry import find
from dyno.worker.spec import Job, Trial, UserError

if TYPE_CHECKING:
    from dyno.worker.journal import Journal

Report = Callable[[str], None]
REFERENCE = "onnxruntime"  # runs the reference's graph, with its optimisation off: node by node
TIMES = 3  # that tensors are left out: one that was matched wrongly may hide another behind it
LOCAL, PART = "local", "movable.onnx"


def perform(job: Job, journal: Journal) -> None:
    """The job of either kind: `values` or `part`."""
    if job.kind == "values":
        keep_values(job, journal.folder, journal.stage)
    else:
        journal.facts(parting=part(job, journal.folder, journal.stage))


def keep_values(job: Job, folder: Path, report: Report) -> None:
    """Keep the reference's tensors in FOLDER/values, on `runs` batches: of the module where `calls` say which tensor
    each of its calls stands for (rows of a part's name, which of its calls, tensor), else of the graph."""
    assert job.trial is not None
    trial, count, keeping = job.trial, int(job.options["runs"]), Keeping(folder / "values")
    report("run the reference")
    if "calls" in job.options:
        session: Any = find(trial.backend).load(trial, None)
        feeds = [*_feeds(trial, session.inputs, count)]
        calls = {(name, number): tensor for name, number, tensor in job.options["calls"]}
        reference.of_module(session, session.module, calls, feeds, keeping)
        session.close()
        return
    assert job.artifact is not None
    inputs, _ = read_io(job.artifact.path)
    graph = Graph(job.artifact.path)
    reference.of_graph(_reference(trial, folder), graph, [*_feeds(trial, inputs, count)], keeping)


def _feeds(trial: Trial, inputs: Any, count: int) -> list[dict[str, np.ndarray]]:
    model = trial.model
    feeds = [*input_data.batches(trial.data, model.preprocess, inputs, trial.dims, count, model.inputs)]
    reference.check_finite(feeds)
    return feeds


def _reference(trial: Trial, folder: Path) -> Engine:
    plain = replace(trial, backend=REFERENCE, precision="fp32", options={"optimization": "disable"},
                    runtime=replace(trial.runtime, device="cpu"))  # fmt: skip
    return Engine(find(REFERENCE).load, plain, folder)


def part(job: Job, folder: Path, report: Report) -> Parting:
    """Compare the trial's engine with the values in the folder of the option `values`.

    `graph` is the ONNX file behind the engine's own, `other` the reference's ("": none), `limits` are those of
    `Limits`, and `always` asks for suspects even where the outputs agree. Raises `UserError` for an engine that doesn't
    take graphs made on the way, and for graphs that have nothing in common.
    """
    assert job.trial is not None
    trial, options = job.trial, job.options
    engine, graph, kept = (
        Engine(find(trial.backend).load, trial, folder),
        Graph(options["graph"]),
        Kept(Path(options["values"])),
    )
    other = Graph(options["other"]) if options["other"] else None
    sides = Sides(engine, graph, kept, Limits(*options["limits"]), other)
    _check_common(sides, str(options["graph"]))
    sizes = reference.bytes_of(graph, {name: array.shape for name, array in sides.feeds[0].items()})
    report("run the engine as it is")
    whole = sides.outputs(_as_it_is(find(trial.backend).load(trial, job.artifact), sides))
    report("run the marked graph")
    apart, marked, parts = compare.marked(sides, sizes)
    report("run each layer alone")
    added, local = compare.alone(sides, sizes, folder / LOCAL)
    common = len(sides.points)
    for _ in range(TIMES):
        if not (others := compare.of_another_meaning(sides, apart, added)):
            break
        sides.points = [name for name in sides.points if name not in others]
        added, local = compare.alone(sides, sizes, folder / LOCAL)
    stops = {*sides.points}
    points = [Point(n, graph.reads(n, stops), apart[n], added[n]) for n in sides.points if n in added]
    report("find each layer's effect")
    points = compare.with_effects(sides, points, local, trial.runtime.threads, folder / PART)
    found = Parting(points=tuple(points), whole=whole, marked=marked, runs=kept.runs, parts=parts,
                    skipped=len(graph.floats) - common, mismatched=common - len(sides.points))  # fmt: skip
    report("test the finding again")
    return _retested(found, sides, _reference(trial, folder), bool(options["always"]))


def _check_common(sides: Sides, path: str) -> None:
    inner = {*sides.graph.floats} - {*sides.graph.outputs}
    if not sides.points or (inner and inner.isdisjoint(sides.points)):
        raise UserError(f"no layer of {path} has a tensor in common with the reference, so layers can't be compared; "
                        "give two files of one graph, whose tensors have the same names")  # fmt: skip


def _as_it_is(session: Session, sides: Sides) -> list[list[np.ndarray]]:
    """The outputs of the engine's own file, with nothing marked."""
    kinds = {tensor.name: np.dtype(tensor.dtype) for tensor in session.inputs}
    feeds = sides.kept.feeds([*kinds])
    try:
        return [once(session, {name: cast(array, kinds[name]) for name, array in feed.items()}) for feed in feeds]
    finally:
        session.close()


def _retested(found: Parting, sides: Sides, engine: Engine, always: bool) -> Parting:
    """With suspects and what the unmarked engine says of them, where the outputs disagree, or `always`."""
    limit = sides.limits.error
    hidden = _beyond(found.whole, limit) and not _beyond(found.marked, limit)
    if not (_beyond(found.whole, limit) or _beyond(found.marked, limit) or always):
        return found
    able = [point for point in found.points if sides.other and point.tensor in sides.other.floats]
    if hidden:
        found = replace(found, border=retest.border(sides))
        chosen = retest.fused(sides, found.border[1]) if able else []
    else:
        chosen = retest.suspects(able or found.points)
    found = replace(found, suspects=tuple(chosen))
    if not able or not chosen:
        return found
    plan = retest.stages(sides, chosen)
    return replace(found, cut=retest.staged(sides, plan, None), mended=retest.staged(sides, plan, engine))


def _beyond(apart: Apart | None, limit: float) -> bool:
    return apart is None or not apart.error <= limit
