"""Sessions of requests to each compared engine, or to an application around it, in rounds."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dyno.jobs.launcher import launch
from dyno.jobs.progress import Progress
from dyno.results.correctness import REFERENCE_DIR
from dyno.runner.device_lock import launch_in_turn
from dyno.runner.execute import execute
from dyno.runner.run_folder import is_measured
from dyno.store import guard_start, sha256_of
from dyno.study.defaults import folder_for, reference_of, study_of_own_jobs
from dyno.study.images import list_photos
from dyno.study.model_info import model_spec
from dyno.study.study import Study, name_fields
from dyno.video.session import LoadResult, share_processors, store_about
from dyno.worker import registry, system
from dyno.worker.facts.job import ApplicationFacts
from dyno.worker.option_values import check_types
from dyno.worker.record import Record, read_json
from dyno.worker.serving.options import ServeOptions
from dyno.worker.serving.rates import read_trace
from dyno.worker.spec import (
    DEFAULT_ROUNDS,
    ENDPOINT_PREFIX,
    Dims,
    Job,
    ModelSpec,
    Runtime,
    Trial,
    UserError,
    digest,
    from_json,
    to_json,
)

# Jobs of requests: their launch, and the settings common to a run.


@dataclass(frozen=True)
class Requests:
    """Settings of arrivals and batches, and the `path` and sha256 of a trace ("" without a trace).

    `min_requests` is the number of requests that the percentile needs.
    """

    options: ServeOptions
    min_requests: int
    path: str = ""
    sha256: str = ""

    def settings(self) -> dict[str, Any]:
        """Return the settings stored in the run folder, which refuses requests with other settings."""
        settings = to_json(self.options)
        return {"options": {**settings, "trace": Path(self.options.trace).name}, "trace_sha256": self.sha256}

    def launch(self, job: Job, folder: Path, timeout_s: float, progress: Progress) -> Record:
        """Run the job and return its record; the rates decide its duration, so it has no timeout."""
        options = {"settings": to_json(self.options), "least": self.min_requests, "trace": self.path}
        serve_job = dataclasses.replace(job, kind="serve", options={**job.options, **options})
        extra = share_processors(serve_job) if self.options.instances > 1 else {}
        return launch_in_turn(serve_job, folder, math.inf, progress, extra)


SERVE_FILE = "serve.json"  # in the run folder: the measured requests
MAX_COMPARED_INPUTS = 512  # most inputs to compare, unless three batches need more


class ServingResult(LoadResult):
    """Results of requests to one or several engines."""


def bench_serve(
    model: Any,
    *,
    out: str | Path | None = None,
    options: ServeOptions | None = None,
    quiet: bool = True,
    **settings: Any,
) -> ServingResult:
    """Find how many requests per second each engine answers within a bound, or measure given rates.

    `options` hold the bound, the arrivals and the batching; `settings` (fields of `Study`) name the engines; `batches`
    are the largest batches. The run folder is `out`, or a new one below runs/serve. Raises `UserError`, one line.
    """
    from dyno.results.stats import samples_for

    check_types({"options": options}, {"options": ServeOptions | None})
    settings = name_fields(settings)
    options = options or ServeOptions(p99="20ms")
    if options.endpoint:
        model, settings = _at_server(model, options.endpoint, settings)
    study, _ = study_of_own_jobs(model, 8, settings)
    (name,) = study.models
    if "compared" not in settings:
        study = replace(study, compared=_count_inputs(max(study.batches, default=1)))
    _check_options(options, study)
    path = Path(options.trace).absolute() if options.trace else None
    sha256 = hashlib.sha256(read_trace(path).tobytes()).hexdigest() if path else ""
    requests = Requests(options, samples_for(options.quantile), str(path or ""), sha256)
    folder = folder_for(out, "serve", [name])
    progress = Progress(quiet=quiet)
    with guard_start(folder):
        store_about(folder, SERVE_FILE, requests.settings(), "of other requests", "without requests")
        execute(study, folder, progress, retry_failed=True, launch=requests.launch)
    if is_measured(folder) and (reference := reference_of(study)):
        _run_reference(reference, folder / REFERENCE_DIR, progress)
    return ServingResult(folder)


def _count_inputs(max_batch: int) -> int:
    """Return how many inputs are answered and compared.

    With three of the largest batches, every smaller power of two occurs as a batch; with four, nearly every one also
    occurs full. Outputs are stored, so MAX_COMPARED_INPUTS limits the fourth batch.
    """
    return max(Study.compared, 3 * max_batch, min(4 * max_batch, MAX_COMPARED_INPUTS))


def _run_reference(reference: Study, folder: Path, progress: Progress) -> None:
    """Run the reference on the engines' inputs; if it can't run, a note says so."""
    progress.show_step(f"the answers of {reference.backends[0]}, with which the others' are compared")
    try:
        execute(reference, folder, progress, retry_failed=True)
    except UserError as e:
        progress.note(f"outputs are compared with none: {e}")


def _at_server(model: Any, url: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the model (its name on the server, unless local) and the settings with the server as the backend."""
    if settings.get("backends"):
        raise UserError("an endpoint takes the place of a backend; omit --backend")
    if expected := registry.find(ENDPOINT_PREFIX.rstrip(":")).values["url"](url):
        raise UserError(f"the endpoint is {url!r}; write {expected}")
    is_local = ":" in str(model) or Path(model).is_file()
    return str(model) if is_local else f"{ENDPOINT_PREFIX}{model}", {
        **settings,
        "backends": (f"{ENDPOINT_PREFIX.rstrip(':')}@url={url}",),
    }


def _check_options(options: ServeOptions, study: Study) -> None:
    """Raise `UserError` for impossible options, before anything is started."""
    max_batch = max(study.batches, default=1)
    if options.queue and options.queue < max_batch:
        raise UserError(f"queue is {options.queue}; it must be at least the largest batch, {max_batch}")
    if any(size > max_batch for size in options.engine_batches):
        raise UserError(
            f"engine_batches has {max(options.engine_batches)}; --batch {max_batch} is the largest batch that comes"
        )


# Application: its own preprocess and postprocess around each engine.

APPLICATION_FILE = "application.json"  # in the run folder: the recorded requests
APPLICATION_ARRAYS_FILE = "application.npz"  # in the run folder: the network's inputs of each request
INPUTS_FILE = "inputs.npz"  # in the job's folder: the same
MAX_PHOTOS = 32


class ApplicationResult(LoadResult):
    """Results of an application's requests with one or several engines."""


def bench_app(
    application: str, *, data: str | Path = "", out: str | Path | None = None, quiet: bool = True, **settings: Any
) -> ApplicationResult:
    """Time the requests of an application by stage, with each engine in place of its network.

    `application` is FILE.py:NAME or MODULE:NAME: an object, or a function that returns one, with the methods preprocess
    and postprocess, and a `torch.nn.Module` as its model. Requests are paths of images in `data`, or come from
    NAME_requests() next to it. `settings` (fields of `Study`) name the engines. The run folder is `out`, or a new one
    below runs/app. Raises `UserError`, one line.
    """
    check_types({"application": application, "data": data}, {"application": str, "data": str | Path})
    study, _ = study_of_own_jobs(application, 1, {"rounds": DEFAULT_ROUNDS, **name_fields(settings)})
    (name,) = study.models
    model = model_spec(study, name)
    photos = list_photos(str(data)) if data else []
    subset = [photos[k * len(photos) // MAX_PHOTOS] for k in range(MAX_PHOTOS)] if photos[MAX_PHOTOS:] else photos
    folder = folder_for(out, "app", [name])
    progress = Progress(quiet=quiet)
    setup = {"application": digest(model), "images": len(photos),
             "photos": digest([(photo.name, sha256_of(photo)) for photo in subset])}  # fmt: skip
    with guard_start(folder), tempfile.TemporaryDirectory() as scratch:
        inputs, file = folder / APPLICATION_ARRAYS_FILE, folder / APPLICATION_FILE
        previous = read_json(file) if file.is_file() and inputs.is_file() else {}
        is_same = all(previous.get(key) == value for key, value in setup.items())
        facts = (
            from_json(ApplicationFacts, previous["facts"])
            if is_same
            else _record_inputs(study, model, subset, Path(scratch) / "job", progress)
        )
        setup["facts"] = to_json(facts)
        store_about(folder, file.name, setup, "of another application, or other requests", "without an application")
        if not is_same:
            shutil.copyfile(Path(scratch) / "job" / INPUTS_FILE, inputs)
        study = replace(
            study, inputs=(str(inputs),), batches=(facts.batch,), compared=facts.requests * facts.calls * facts.batch
        )

        def launch_application(job: Job, job_folder: Path, timeout_s: float, progress: Progress) -> Record:
            options = {**job.options, "requests": [*map(str, subset)], "count": facts.requests}
            app_job = dataclasses.replace(job, kind="application", options=options)
            return launch_in_turn(app_job, job_folder, timeout_s, progress)

        execute(study, folder, progress, retry_failed=True, launch=launch_application)
    if is_measured(folder) and (reference := reference_of(study)):
        _run_reference(reference, folder / REFERENCE_DIR, progress)
    return ApplicationResult(folder)


def _record_inputs(
    study: Study, model: ModelSpec, photos: Sequence[Path], folder: Path, progress: Progress
) -> ApplicationFacts:
    """Answer each request once with the network itself, which leaves its inputs in INPUTS_FILE in the job's folder."""
    progress.show_step("each request once, for the network's inputs")
    runtime = Runtime(threads=study.threads or system.physical_cores())
    job = Job("application", runtime, Trial(model, "pytorch", "fp32", Dims(1, 0, 0), runtime=runtime),
              options={"requests": [*map(str, photos)]})  # fmt: skip
    record = launch(job, folder, study.timeout, progress.tick)
    if record.facts.application is None or record.status != "ok":
        raise UserError(record.reason or f"the application ended: {record.status}")
    return record.facts.application
