"""A trial's engine, timed as it is and then layer by layer, in one process."""

from __future__ import annotations

from dataclasses import replace

from dyno.worker import measure, system
from dyno.worker.inputs import input_data
from dyno.worker.journal import Journal
from dyno.worker.registry import find
from dyno.worker.spec import Job

UNPROFILED, PROFILED, LAYERS = "unprofiled", "profiled", "layers"  # tags; none is a latency, which others compare


def profile(job: Job, journal: Journal) -> None:
    """Time the trial's model boundary with nothing switched on, then its layers in `runs` (an option) watched runs.

    Store the samples of both, the layers' seconds with a row for each repeat, and on a GPU the parts of an inference
    without profiling, with the GPU's work in the profiled runs if the engine reports it.
    """
    assert job.trial is not None
    trial = job.trial
    backend = find(trial.backend)
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    session = journal.timed("load", "load", lambda: backend.load(trial, job.artifact))
    data = input_data.batches(
        trial.data, trial.model.preprocess, session.inputs, trial.dims, input_data.FEEDS, trial.model.inputs
    )
    feeds = [session.stage(feed) for feed in data]
    watch = measure.watch(session, "model", journal.warn)
    once = measure.step(session, "model", feeds, watch)
    journal.timed("first_call", "first call", once)
    restore = measure.restoring(session, feeds, journal.warn)
    journal.stage("warm up")
    if not measure.warm_up(once, trial.plan, restore):
        journal.warn(f"the median was not steady after {trial.plan.warmup_s:g} s of warm-up")
    journal.stage("time")
    contention = system.CpuContention()
    sampling = measure.latency(once, trial.plan, watch, restore=restore)
    parts = measure.parts(session, feeds, trial.plan)
    journal.stage("profile")
    times = session.profile(int(job.options["runs"]))
    journal.contended("model", contention.busy(), trial.runtime.device)
    journal.sampled(UNPROFILED, "model", "s", "duration", sampling)
    if parts:
        journal.parted(parts)
    journal.profiled(PROFILED, times.whole, LAYERS, times.layers)
    if times.work:
        journal.worked(times.work)
    if times.functions:
        journal.facts(functions=times.functions)
    journal.facts(inside=replace(times.inside, notes=tuple(filter(None, (*times.inside.notes, times.note)))))
    session.close()
