"""One job folder in, one record out: `python main.py FOLDER` reads job.json there and writes record.json.

The launcher starts this file by its path, under any interpreter. The file finds its own package and leaves the
interpreter's path unchanged.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _import_package() -> None:
    """Make `dyno`, and nothing else in this file's folder, importable.

    Python put this file's folder first on the path: modules there would shadow libraries of the same name.
    """
    root = Path(__file__).resolve().parents[1]
    if sys.path[0] == str(Path(__file__).parent):  # false under PYTHONSAFEPATH
        del sys.path[0]
    spec = importlib.util.spec_from_file_location("dyno", root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["dyno"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _import_package()

import importlib
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

from dyno.worker import system
from dyno.worker.backend import Session
from dyno.worker.facts.engine import ORIGIN_FIELDS
from dyno.worker.facts.files import MakerFacts, MakerStep
from dyno.worker.facts.job import Turns
from dyno.worker.jobs.run_trial import run_trial
from dyno.worker.jobs.turns import Uninterleaved, find_conductor
from dyno.worker.journal import Journal, end_at_next_sample
from dyno.worker.record import Measurement, Record, one_line, read_json, save_arrays, write_record
from dyno.worker.registry import find
from dyno.worker.registry import get_maker as find_maker
from dyno.worker.spec import ELLIPSIS, SCHEMA, Artifact, DataSpec, Job, NoRoute, Unavailable, UserError, from_json

AS_THEY_ARE = ("probe", "cold_start")  # jobs that report the byte code as the user's own processes find it
MIN_FILE_B = 1 << 20


def stress_trial(job: Job, journal: Journal) -> None:
    """Run the stress test of a dynamic engine; every phase is on disk before the next begins."""
    from dyno.worker.jobs.stress import stress

    assert job.trial is not None
    trial, backend = job.trial, find(job.trial.backend)
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    session: Session = journal.time_stage("load", "load", lambda: backend.load(trial, job.artifact))
    journal.stage("first phase")
    for phase, seconds, figures in stress(session, trial, job.options["phases"], int(job.options["iterations"])):
        journal.facts(stress={**journal.record.facts.stress, phase: figures})
        name = f"latency_{phase}"
        journal.samples[name] = seconds
        save_arrays(journal.folder / "samples.npz", journal.samples)
        journal.add(Measurement("latency", "s", "duration", None, name, phase, "host", "samples"))
        journal.stage(f"after {phase}")
    session.close()


def make_file(job: Job, journal: Journal) -> None:
    """Make the recipe's file and describe it, including the steps that led to it."""
    assert job.recipe is not None
    maker = find_maker(job.recipe.maker)
    journal.record = replace(journal.record, system=system.describe(("numpy", *maker.requires)))
    journal.stage(f"make {job.recipe.format} {job.recipe.precision}")
    start = time.perf_counter()
    artifact: Artifact = maker.make(replace(job.recipe, runtime=job.runtime), job.artifact, journal.folder)
    seconds = time.perf_counter() - start
    step = MakerStep(job.recipe.maker, artifact.format, artifact.precision, seconds, artifact.bytes)
    parent_facts = job.artifact.made_by if job.artifact else MakerFacts()
    # The user's own file was read, not made: no step, no time.
    steps = [step] if Path(artifact.path).resolve().is_relative_to(journal.folder.resolve()) else []
    # Warnings on a file hold for every file made from it.
    warnings = tuple(dict.fromkeys([*parent_facts.warnings, *artifact.made_by.warnings]))
    made_by = MakerFacts(**parent_facts.set_fields(ORIGIN_FIELDS)).merge(artifact.made_by)
    made_by = replace(made_by, steps=(*parent_facts.steps, *steps), warnings=warnings)
    journal.record = replace(journal.record, artifact=replace(artifact, seconds=seconds, made_by=made_by))


def probe(job: Job, journal: Journal) -> None:
    """Run one real operation of the backend, and record its version and devices."""
    backend = find(job.backend)
    journal.stage("probe")
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    journal.facts(probe=backend.probe())
    modules, uncompiled = system.count_compiled()
    system_facts = {**journal.record.system, "modules": modules, "uncompiled": uncompiled}
    journal.record = replace(journal.record, system=system_facts)


def inspect_job(job: Job, journal: Journal) -> None:
    """Build the model once and record its inputs and outputs."""
    from dyno.worker.jobs.inspect_model import inspect_model

    assert job.trial is not None
    journal.stage("inspect the model")
    options = job.options
    inspection = inspect_model(job.trial, options["sizes"], options.get("overrides", {}), str(options.get("task", "")))
    journal.record = replace(journal.record, inspection=inspection)


def read_layers(job: Job, journal: Journal) -> None:
    """Read the layers of one form of a model."""
    from dyno.worker.jobs.layers import read

    assert job.trial is not None
    journal.stage("read the layers")
    journal.facts(inside=read(job.trial, job.artifact, job.options))


def train_model(job: Job, journal: Journal) -> None:
    """Train a model on the data set named in the job; the weights lie in the job's folder."""
    from dyno.worker.training.loop import Training
    from dyno.worker.training.options import make_options

    assert job.trial is not None
    trial = job.trial
    journal.record = replace(journal.record, system=system.describe(("torch", "torchvision", "timm")))
    options, images = make_options(job.options["settings"]), from_json(DataSpec, job.options["training"])
    training = Training(options, images, trial.data, trial.model, trial.dims, journal.folder, journal.stage)
    journal.facts(training=training.run(trial.runtime.threads))


def find_peak(job: Job, journal: Journal) -> None:
    """Measure the peak rate of matrix products in each type, or in the types of the option `types`.

    With the option `copy`, also measure the rate of a copy. Each result is on disk before the next measurement.
    """
    from dyno.worker.jobs import stress as jobs_stress

    journal.stage("peak")
    journal.record = replace(journal.record, system=system.describe(("numpy", "torch")))
    contention = system.CpuContention()
    for name, peak in jobs_stress.measure_peak(
        job.runtime, types=job.options.get("types", tuple(jobs_stress.PRODUCT_TYPES))
    ):
        journal.facts(peak={**journal.record.facts.peak, name: peak})
        journal.add()
    if job.options.get("copy"):
        journal.facts(copy=jobs_stress.copy(job.runtime))
    journal.record_contention("peak", contention.count_busy(), job.runtime.device, contention.count_withheld())


def take_home(job: Job, journal: Journal) -> None:
    """Write a script that runs the trial in its own library, and the script's other files."""
    from dyno.worker import snippets

    assert job.trial is not None
    journal.stage("write")
    journal.facts(files=snippets.write(job.trial, job.artifact, job.options, journal.folder))


# Job by kind: a function above, or MODULE:FUNCTION of `worker.jobs`, imported only for that kind
OTHER_JOBS: dict[str, Callable[[Job, Journal], None] | str] = {
    "make": make_file, "probe": probe, "inspect": inspect_job, "layers": read_layers, "train": train_model,
    "stress": stress_trial, "peak": find_peak, "take": take_home, "profile": "layers:profile",
    "annotate": "layers:annotate", "counters": "layers:count", "reference": "layers:perform",
    "layer_errors": "layers:perform", "video": "video:video", "serve": "serve:serve_requests",
    "cold_start": "cold_start:cold_start", "application": "application:run_application",
}  # fmt: skip


def _find_job(kind: str) -> Callable[[Job, Journal], None]:
    target = OTHER_JOBS[kind]
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    function: Callable[[Job, Journal], None] = getattr(importlib.import_module(f"dyno.worker.jobs.{module}"), name)
    return function


def perform(job: Job, journal: Journal, turns: Uninterleaved) -> Record:
    """Do the job; every failure inside Python becomes a status with one line of reason."""
    try:
        journal.facts(affinity=tuple(system.pin(job.runtime.threads)))
        journal.stage("import")
        if job.kind == "run":
            assert job.trial is not None
            if turns.conducted:
                turn_facts = from_json(Turns, job.options["turns"])
                turns.together = turn_facts.together
                journal.facts(turns=turn_facts)
            run_trial(job, job.trial, journal, turns)
        else:
            _find_job(job.kind)(job, journal)
        return replace(journal.record, status="ok", stage="done")
    except Unavailable as e:
        return _end_record(journal, "skipped", str(e))
    except UserError as e:
        _raise_if_disk_full(e, job, journal)
        if ELLIPSIS in str(e) and e.__cause__ is not None:
            traceback.print_exc()  # the log has the full text
        if isinstance(e, NoRoute):
            journal.facts(no_route=True)
        return _end_record(journal, "failed", str(e))
    except MemoryError as e:
        traceback.print_exc()
        return _end_record(journal, "oom", f"out of memory: {one_line(e)}" if str(e) else "out of memory")
    except Exception as e:  # any library's error is this row's reason, never the study's end
        _raise_if_disk_full(e, job, journal)
        traceback.print_exc()
        return _end_record(journal, "failed", f"{type(e).__name__}: {one_line(e)}")


def _raise_if_disk_full(error: Exception, job: Job, journal: Journal) -> None:
    """Raise an `OSError` if the job failed for a full disk; a made file is about as large as its source."""
    source = job.artifact.bytes if job.artifact else 0
    system.raise_if_disk_full(error, journal.folder, max(MIN_FILE_B, source) if job.kind == "make" else 0)


def _end_record(journal: Journal, status: str, reason: str) -> Record:
    return replace(journal.record, status=status, reason=reason)


def main(folder: Path) -> int:
    """Read the job, do it, write the record; return 0 if a record was written, whatever its status."""
    begin = time.perf_counter()
    # Without a launcher (run by hand), the current parent takes its place.
    launcher = int(os.environ.pop("DYNO_LAUNCHER", os.getppid()))
    for name, value in system.SILENCING_VARIABLES.items():
        os.environ.setdefault(name, value)
    if launcher != system.UNDER_TOOL:  # else the tool may end before the job
        system.die_with_parent(launcher)
    data = read_json(folder / "job.json")
    if data.get("schema") != SCHEMA:
        print(f"job.json has schema {data.get('schema')}, this worker reads {SCHEMA}", file=sys.stderr)
        return 2
    job = from_json(Job, data)
    if job.kind not in AS_THEY_ARE:
        system.keep_byte_code()
    if job.kind != "cold_start":
        system.keep_probes()
    journal, turns = Journal(folder, job), find_conductor()
    os.register_at_fork(after_in_child=end_at_next_sample)
    try:
        record = perform(job, journal, turns)
        journal.check_process()
        write_record(folder, replace(record, seconds=time.perf_counter() - begin - turns.waited_s))
    except OSError as e:
        if e.errno not in system.DISK_FULL:
            raise
        print(f"dyno: {e}", file=sys.stderr)
        return os.EX_CANTCREAT  # not the trial's fault: no record, so it is measured once there is room
    (folder / "partial.json").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python main.py FOLDER   (the folder holds job.json; record.json is written there)")
    if os.environ.get("DYNO_LAUNCHER") == str(system.UNDER_TOOL):  # a profiler may finish in exit handlers
        sys.exit(main(Path(sys.argv[1])))
    # The record is written; exit handlers of libraries only take time (PyTorch 0.7 s) or crash.
    system.end(main(Path(sys.argv[1])))
