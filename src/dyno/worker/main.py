"""One job folder in, one record out: `python main.py FOLDER` reads job.json there and writes record.json.

The launcher starts this file by its path, under any interpreter, so it finds its own package without help from the
interpreter's path, and leaves that path as it would be without it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _enter() -> None:
    """Make `dyno` importable from beside this file, and only that.

    This file's folder is what Python put first on the path; modules named like a library's would shadow it from there.
    """
    root = Path(__file__).resolve().parents[1]
    if sys.path[0] == str(Path(__file__).parent):  # not so under PYTHONSAFEPATH
        del sys.path[0]
    spec = importlib.util.spec_from_file_location("dyno", root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["dyno"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _enter()

import errno
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from dyno.worker import measure, system
from dyno.worker.backend import Arrays, Session
from dyno.worker.evaluation import evaluate
from dyno.worker.facts.engine import Origin
from dyno.worker.facts.files import MadeBy, Step
from dyno.worker.facts.job import Answered, Turns
from dyno.worker.inputs import input_data
from dyno.worker.jobs.turns import Alone, conductor
from dyno.worker.journal import Journal
from dyno.worker.record import Measurement, Record, read_json, save_arrays, write_record
from dyno.worker.registry import find
from dyno.worker.registry import maker as find_maker
from dyno.worker.sessions import gpu, slowed
from dyno.worker.spec import BUILD, SCHEMA, SLOWDOWN, Artifact, Job, NoRoute, Trial, Unavailable, UserError, from_json

RANDOM = 1e-2  # of their size: outputs of two calls on one input that are further apart are drawn
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Facts that a file takes from the one it was made from: those of the model, and of the route to it.
INHERITED = [f.name for f in fields(Origin) if f.name != "other"]


def run_trial(job: Job, trial: Trial, journal: Journal, turns: Alone) -> None:
    """Load, time at every boundary of the plan, then evaluate (round 0 only: outputs don't change between rounds)."""
    backend = find(trial.backend)
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    session: Session = journal.timed("load", "load", lambda: backend.load(trial, job.artifact))
    if BUILD in job.options:
        journal.facts(build=int(job.options[BUILD]))
    if SLOWDOWN in job.options:
        session = _slowed(session, float(job.options[SLOWDOWN]), journal)
    model = trial.model
    host_feeds = list(
        input_data.batches(trial.data, model.preprocess, session.inputs, trial.dims, input_data.FEEDS, model.inputs)
    )
    journal.facts(inputs_sha256=input_data.fingerprint(host_feeds, model.preprocess), threads=trial.runtime.threads)
    feeds = [session.stage(feed) for feed in host_feeds]
    journal.timed("first_call", "first call", measure.step(session, "model", feeds))
    _time(session, job.boundaries, trial, feeds, journal, turns)
    journal.add(Measurement("peak_memory", "B", "bytes", float(system.peak_memory())))
    if job.round == 0:
        journal.stage("evaluate")
        _evaluate(session, trial, journal)
        _repeat(session, feeds[0], journal)
    journal.stage("inspect")
    _inspect(session, job, journal)
    journal.stage("close")  # an engine may still crash here: its facts are on disk by then
    session.close()
    if not journal.record.facts.finite:
        journal.stage("evaluate")
        raise UserError(
            "the outputs are not finite (NaN or infinity): this engine is wrong, or its precision overflows"
        )


def _slowed(session: Session, share: float, journal: Journal) -> Session:
    """The session with the self-test's delay, which is in the record."""
    journal.facts(slowdown=share)
    if share:
        journal.warn(f"slowed down on purpose, by {100 * share:g} %: for the self-test")
    return slowed.Slowed(session, share)


def _time(
    session: Session, boundaries: Sequence[str], trial: Trial, feeds: measure.Feeds, journal: Journal, turns: Alone
) -> None:
    for boundary in boundaries:
        watch = _watch(session, boundary, journal)
        once = measure.step(session, "all" if boundary == "throughput" else boundary, feeds, watch)
        journal.stage(f"warm up {boundary}")
        if not measure.warm_up(once, trial.plan):
            journal.warn(f"{boundary}: the median was not steady after {trial.plan.warmup_s:g} s of warm-up")
        journal.stage(f"time {boundary}")
        contention = system.CpuContention()
        blocks = contention.during(turns.blocks(boundary, trial.plan)) if trial.plan.blocks else None
        if boundary == "throughput":
            sampling = measure.throughput(session, feeds, trial.dims.batch, trial.plan, blocks)
            journal.sampled("throughput", boundary, "1/s", "rate", sampling)
        else:
            sampling = measure.latency(once, trial.plan, watch, blocks)
            journal.sampled("latency", boundary, "s", "duration", sampling)
        journal.contended(boundary, contention.busy(), trial.runtime.device)
    if "all" in boundaries and (parts := measure.parts(session, feeds, trial.plan)):
        journal.parted(parts)


def _watch(session: Session, boundary: str, journal: Journal) -> gpu.Stopwatch | None:
    """A clock of the GPU for what runs on its stream; without one the host's clock is used, with a warning."""
    if session.stream is None or boundary != "model":
        return None
    try:
        return gpu.Stopwatch(session.stream)
    except Unavailable as e:
        journal.warn(f"{boundary}: timed by the host's clock alone, because {e}")
        return None


def _evaluate(session: Session, trial: Trial, journal: Journal) -> None:
    evaluation = evaluate.evaluate(session, trial)
    arrays = evaluation.arrays
    save_arrays(journal.folder / "outputs.npz", arrays)
    journal.evaluated(evaluation)
    # The hash of the photographs, the same at every size, and the number set aside for calibration, where known.
    metadata = input_data.metadata(trial.data)
    photographs_and_set_aside = str(metadata.get("photographs") or ""), int(metadata.get("set_aside") or 0)
    journal.facts(data=Answered(trial.data.name, trial.data.split, len(arrays["sample"]), *photographs_and_set_aside))
    for sentence in evaluation.oddities:
        journal.warn(f"data: {sentence}")
    own = [a for name, a in arrays.items() if name.startswith("output:") and len(a) > 1]
    if own and all((a == a[:1]).all() for a in own):
        journal.warn("the outputs are the same for every input: that they agree with another engine's proves little")
    raw = [a for name, a in arrays.items() if name.startswith("output:")]
    if raw and not any(a.size for a in raw):
        journal.warn("the outputs have no rows for any input: there is nothing to compare")
    not_finite = [name[7:] for name, a in arrays.items() if name.startswith("output:") and not np.isfinite(a).all()]
    if not_finite:
        journal.warn(f"output {', '.join(not_finite)} has values that are not finite")
        journal.facts(finite=False)


def _repeat(session: Session, feeds: Arrays, journal: Journal) -> None:
    """Warn where two calls on the same input differ by far more than rounding: the model draws random numbers."""
    calls = []
    for _ in range(2):
        session.bind(feeds)
        session.run()
        session.wait()
        calls.append({name: np.array(array) for name, array in session.fetch().items()})
    distance = max((_distance(calls[0][name], calls[1][name]) for name in calls[0]), default=0.0)
    if distance > RANDOM:
        journal.facts(random_outputs=distance)
        journal.warn(f"the outputs are random: two calls on one input are {distance:.2g} of their size apart")


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b| / |b| in the 2-norm, where both are finite; 1 for other shapes, which a random choice may have."""
    if a.shape != b.shape:
        return 1.0
    a, b = (np.nan_to_num(each.astype(np.float64), posinf=0.0, neginf=0.0) for each in (a, b))
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(np.float64).tiny))


def _inspect(session: Session, job: Job, journal: Journal) -> None:
    inherited = job.artifact.made_by.set_fields(INHERITED) if job.artifact else {}
    journal.facts(**inherited)
    try:
        facts = journal.record.facts.joined(session.facts())
    except Exception as e:  # timings are valid whether or not the engine's facts can be read
        traceback.print_exc()
        facts = journal.record.facts
        journal.warn(f"the engine's facts can't be read: {type(e).__name__}: {_one_line(e)}")
    journal.record = replace(journal.record, facts=facts)
    counts = {"parameters": facts.parameters, "layers": facts.layers}
    journal.add(*(Measurement(tag, "1", "count", float(n)) for tag, n in counts.items() if n is not None))
    if facts.build_s is not None:
        journal.add(Measurement("build", "s", "duration", float(facts.build_s)))
    if job.artifact:
        journal.add(Measurement("file_size", "B", "bytes", float(job.artifact.bytes)))
    if (truth := facts.precision_truth) and not truth.ok:
        journal.warn(truth.sentence or "the engine does not run in the requested precision")


def stress_trial(job: Job, journal: Journal) -> None:
    """The stress test of a dynamic engine; every phase is on disk before the next begins."""
    from dyno.worker.jobs.stress import TOLERANCE, stress

    assert job.trial is not None
    trial, backend = job.trial, find(job.trial.backend)
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    session: Session = journal.timed("load", "load", lambda: backend.load(trial, job.artifact))
    journal.stage("first phase")
    for phase in stress(session, trial, job.options["phases"], int(job.options["iterations"])):
        result = phase.to_record(TOLERANCE[trial.precision])
        journal.facts(stress={**journal.record.facts.stress, phase.name: result})
        name = f"latency_{phase.name}"
        journal.samples[name] = phase.seconds
        save_arrays(journal.folder / "samples.npz", journal.samples)
        journal.add(Measurement("latency", "s", "duration", None, name, phase.name, "host", "samples"))
        journal.stage(f"after {phase.name}")
    session.close()


def make_file(job: Job, journal: Journal) -> None:
    """Make the recipe's file and describe it, with the steps that led to it."""
    assert job.recipe is not None
    maker = find_maker(job.recipe.maker)
    journal.record = replace(journal.record, system=system.describe(("numpy", *maker.requires)))
    journal.stage(f"make {job.recipe.format} {job.recipe.precision}")
    start = time.perf_counter()
    artifact: Artifact = maker.make(replace(job.recipe, runtime=job.runtime), job.artifact, journal.folder)
    seconds = time.perf_counter() - start
    step = Step(job.recipe.maker, artifact.format, artifact.precision, seconds, artifact.bytes)
    before = job.artifact.made_by if job.artifact else MadeBy()
    # A file that the user gave was read, not made, so there is no time for it.
    steps = [step] if Path(artifact.path).resolve().is_relative_to(journal.folder.resolve()) else []
    # A file's warnings hold for all that is made from it.
    warnings = tuple(dict.fromkeys([*before.warnings, *artifact.made_by.warnings]))
    made_by = MadeBy(**before.set_fields(INHERITED)).joined(artifact.made_by)
    made_by = replace(made_by, steps=(*before.steps, *steps), warnings=warnings)
    journal.record = replace(journal.record, artifact=replace(artifact, seconds=seconds, made_by=made_by))


def probe(job: Job, journal: Journal) -> None:
    """One real operation of the backend: its version and devices."""
    backend = find(job.backend)
    journal.stage("probe")
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    journal.facts(probe=backend.probe())


def inspect_job(job: Job, journal: Journal) -> None:
    """Build the model once and record its inputs and outputs."""
    from dyno.worker.jobs.inspect_model import inspect_model

    assert job.trial is not None
    journal.stage("inspect the model")
    options = job.options
    inspection = inspect_model(job.trial, options["sizes"], options.get("overrides", {}), str(options.get("task", "")))
    journal.record = replace(journal.record, inspection=inspection)


def read_layers(job: Job, journal: Journal) -> None:
    """The layers of one form of a model."""
    from dyno.worker.jobs.inspect_layers import read

    assert job.trial is not None
    journal.stage("read the layers")
    journal.facts(inside=read(job.trial, job.artifact, job.options))


def profile_layers(job: Job, journal: Journal) -> None:
    """How long each layer of a trial's engine takes."""
    from dyno.worker.jobs.layer_times import profile

    profile(job, journal)


def part_layers(job: Job, journal: Journal) -> None:
    """What every layer of a reference computes, or how far an engine's are from that."""
    from dyno.worker.jobs.layers_apart import perform

    perform(job, journal)


def train_model(job: Job, journal: Journal) -> None:
    """Train a model on the data set named in the job; the weights lie in the job's folder."""
    from dyno.worker.training import loop

    assert job.trial is not None
    trial = job.trial
    journal.record = replace(journal.record, system=system.describe(("torch", "torchvision", "timm")))
    options, images = loop.job(job.options)
    place = (journal.folder, journal.stage, trial.runtime.threads)
    journal.facts(training=loop.train(options, images, trial.data, trial.model, trial.dims, *place))


def find_peak(job: Job, journal: Journal) -> None:
    """The largest matrix products per second in each type; every type is on disk before the next begins."""
    from dyno.worker.jobs import peak

    journal.stage("peak")
    journal.record = replace(journal.record, system=system.describe(("numpy", "torch")))
    contention = system.CpuContention()
    for name, found in peak.measure(job.runtime):
        journal.facts(peak={**journal.record.facts.peak, name: found})
        journal.add()
    journal.contended("peak", contention.busy(), job.runtime.device)


def take_home(job: Job, journal: Journal) -> None:
    """Write a script that runs the trial in its own library, and what it needs besides the trial's file."""
    from dyno.worker import snippets

    assert job.trial is not None
    journal.stage("write")
    journal.facts(files=snippets.write(job.trial, job.artifact, job.options, journal.folder))


OTHER_JOBS = {"make": make_file, "probe": probe, "inspect": inspect_job, "layers": read_layers,
              "profile": profile_layers, "values": part_layers, "part": part_layers, "train": train_model,
              "stress": stress_trial, "peak": find_peak, "take": take_home}  # fmt: skip


def perform(job: Job, journal: Journal, turns: Alone) -> Record:
    """Do the job; every way it can fail inside Python becomes a status with one line of reason."""
    try:
        journal.facts(affinity=tuple(system.pin(job.runtime.threads)))
        journal.stage("import")
        if job.kind == "run":
            assert job.trial is not None
            if turns.conducted:
                journal.facts(turns=from_json(Turns, job.options["turns"]))
            run_trial(job, job.trial, journal, turns)
        else:
            OTHER_JOBS[job.kind](job, journal)
        return replace(journal.record, status="ok", stage="done")
    except Unavailable as e:
        return _ended(journal, "skipped", str(e))
    except UserError as e:
        if isinstance(e, NoRoute):
            journal.facts(no_route=True)
        return _ended(journal, "failed", str(e))
    except MemoryError as e:
        traceback.print_exc()
        return _ended(journal, "oom", f"out of memory: {_one_line(e)}" if str(e) else "out of memory")
    except OSError as e:
        if e.errno in DISK_FULL:
            raise
        traceback.print_exc()
        return _ended(journal, "failed", f"{type(e).__name__}: {_one_line(e)}")
    except Exception as e:  # the border: whatever a library raises is this row's reason, never the study's end
        traceback.print_exc()
        return _ended(journal, "failed", f"{type(e).__name__}: {_one_line(e)}")


def _ended(journal: Journal, status: str, reason: str) -> Record:
    return replace(journal.record, status=status, reason=reason)


def _one_line(e: BaseException) -> str:
    """The first line, and those that it announces: some libraries begin with where in their code it was."""
    said: list[str] = []
    for line in (line.strip() for line in str(e).splitlines() if line.strip()):
        said.append(line)
        if not line.endswith(":"):
            break
    return " ".join(said)[:300] or "(no message)"


def main(folder: Path) -> int:
    """Read the job, do it, write the record; 0 when a record was written, whatever it says."""
    begin = time.perf_counter()
    # Run by hand there is no launcher to name itself, and whoever is the parent now will do.
    system.die_with_parent(int(os.environ.pop("DYNO_LAUNCHER", os.getppid())))
    data = read_json(folder / "job.json")
    if data.get("schema") != SCHEMA:
        print(f"job.json has schema {data.get('schema')}, this worker reads {SCHEMA}", file=sys.stderr)
        return 2
    job = from_json(Job, data)
    journal, turns = Journal(folder, job), conductor()
    try:
        record = perform(job, journal, turns)
        write_record(folder, replace(record, seconds=time.perf_counter() - begin - turns.waited_s))
    except OSError as e:
        if e.errno not in DISK_FULL:
            raise
        print(f"dyno: {e}", file=sys.stderr)
        return os.EX_CANTCREAT  # says nothing about the trial: no record, so that it is measured once there is room
    (folder / "partial.json").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python main.py FOLDER   (the folder holds job.json; record.json is written there)")
    # The record is written, and what libraries do at their end only takes time (PyTorch 0.7 s) or crashes.
    system.end(main(Path(sys.argv[1])))
