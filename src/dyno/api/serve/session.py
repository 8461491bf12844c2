"""Send requests to each engine that is compared, in rounds, and read what that says."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.analysis.ranking.references import BESIDE
from dyno.api.result import Result
from dyno.api.serve.jobs import Requests
from dyno.engine.execute import execute
from dyno.engine.run_folder import measured
from dyno.jobs.progress import Progress
from dyno.planning.defaults import folder_for, reference_of, study_of_own_jobs
from dyno.store import Run, begun
from dyno.study import Study
from dyno.worker import registry
from dyno.worker.option_values import check_types
from dyno.worker.record import read_json, write_json
from dyno.worker.serve.options import ServeOptions
from dyno.worker.serve.rates import read_trace
from dyno.worker.spec import ENDPOINT, UserError

if TYPE_CHECKING:
    from dyno.analysis.presentation.table import Table

ABOUT = "serve.json"  # in the run folder: which requests it is of
INPUTS = 512  # that are compared at most, unless three times the largest batch is more


@dataclass(frozen=True)
class ServingResult(Result):
    """Requests that were sent to one or several engines: the run folder."""

    folder: Path

    @cached_property
    def tables(self) -> list[Table]:
        """The highest rate that holds by engine, and every rate that was tried."""
        return [self.table(name) for name in ("serve", "serve-rates")]

    @cached_property
    def sentences(self) -> list[str]:
        """For each engine the highest rate that holds, where the time goes there, and reasons for doubt."""
        from dyno.analysis.serve import runs, words

        return words.of_run(runs.of_run(self.data))


def serve_test(
    model: Any,
    *,
    out: str | Path | None = None,
    options: ServeOptions | None = None,
    quiet: bool = True,
    **settings: Any,
) -> ServingResult:
    """Find how many requests per second each engine answers within a bound, or measure given rates.

    `options` say the bound, when requests come and how they are batched, and `settings` (fields of `Study`) name the
    engines; `batches` are the largest batches. The run folder is `out`, or a new one below runs/serve-test. Raises
    `UserError`, one line.
    """
    from dyno.analysis.stats import samples_for

    check_types({"options": options}, {"options": ServeOptions | None})
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
    folder = folder_for(out, "serve-test", [name])
    progress = Progress(quiet=quiet)
    with begun(folder):
        _store_requests(requests, folder)
        execute(study, folder, progress, retry_failed=True, launch=requests.launch)
    if measured(folder) and (reference := reference_of(study)):
        _run_reference(reference, folder / BESIDE, progress)
    return ServingResult(folder)


def _count_inputs(most: int) -> int:
    """Return how many inputs are answered and compared.

    With three of the largest batches, every smaller power of two occurs as a batch; with four, nearly every one occurs
    full as well. Outputs are stored, so INPUTS limits the fourth batch.
    """
    return max(Study.compared, 3 * most, min(4 * most, INPUTS))


def _run_reference(reference: Study, folder: Path, progress: Progress) -> None:
    """Run the reference on the inputs that the engines got; if it can't run, a note says so."""
    progress.other(f"the answers of {reference.backends[0]}, with which the others' are compared")
    try:
        execute(reference, folder, progress, retry_failed=True)
    except UserError as e:
        progress.note(f"outputs are compared with none: {e}")


def _at_server(model: Any, url: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the model (if not local, its name on the server) and the settings with the server as the backend."""
    if settings.get("backends"):
        raise UserError("an endpoint takes the place of a backend; omit --backends")
    if expected := registry.find(ENDPOINT.rstrip(":")).values["url"](url):
        raise UserError(f"the endpoint is {url!r}; write {expected}")
    here = ":" in str(model) or Path(model).is_file()
    return str(model) if here else f"{ENDPOINT}{model}", {
        **settings,
        "backends": (f"{ENDPOINT.rstrip(':')}@url={url}",),
    }


def _check_options(options: ServeOptions, study: Study) -> None:
    """Raise `UserError` for options that can't work, before anything is started."""
    most = max(study.batches, default=1)
    if options.queue and options.queue < most:
        raise UserError(f"queue is {options.queue}; it must be at least the largest batch, {most}")
    if any(size > most for size in options.engine_batches):
        raise UserError(f"engine_batches has {max(options.engine_batches)}; --batch {most} is the most that comes")


def _store_requests(requests: Requests, folder: Path) -> None:
    """Store which requests the folder is of; a folder of others is refused."""
    about, path = requests.settings(), folder / ABOUT
    if path.is_file() and read_json(path) != about and measured(folder):
        raise UserError(f"{folder} is of other requests; give another --out")
    if (folder / "study.toml").is_file() and not path.is_file():
        raise UserError(f"{folder} is of a run without requests; give another --out")
    with Run(folder).locked():  # makes the folder Dyno's, too
        write_json(path, about)
