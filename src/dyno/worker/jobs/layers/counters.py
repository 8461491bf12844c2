"""One inference of a trial's engine for a profiler of kernels, under which the process of this job runs."""

from __future__ import annotations

from dataclasses import replace

from dyno.worker import system
from dyno.worker.inputs import input_data
from dyno.worker.journal import Journal
from dyno.worker.registry import find
from dyno.worker.spec import Job


def count(job: Job, journal: Journal) -> None:
    """Run the trial's engine once as it is, and once more for the profiler. Nothing is timed: it slows everything."""
    assert job.trial is not None
    trial = job.trial
    backend = find(trial.backend)
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    journal.stage("load")
    session = backend.load(trial, job.artifact)
    feeds = input_data.batches(trial.data, trial.model.preprocess, session.inputs, trial.dims, 1, trial.model.inputs)
    inputs = session.stage(next(feeds))
    session.bind(inputs)
    journal.stage("first call")
    session.run()
    session.wait()
    session.bind(inputs)  # the model may have written into them
    journal.stage("counters")
    session.run_for_counters()
    session.close()
