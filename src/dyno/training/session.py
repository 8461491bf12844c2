"""Train a classifier on your own images, evaluate it, and optionally measure the trained weights as engines."""

from __future__ import annotations

import json
import math
import shlex
import typing
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.api.runnable import run
from dyno.engine import device_lock
from dyno.jobs.launcher import launch
from dyno.planning.checks import check_device, check_threads, check_weights
from dyno.planning.model_info import inspect_model, model_spec, sizes
from dyno.store import Run, begun, sha256_of
from dyno.study import Choice, Study, model_name
from dyno.training import split
from dyno.training.display import CURVES, Row, TrainingView, chart, history
from dyno.worker import registry, system
from dyno.worker.extras import lacking
from dyno.worker.facts.job import TrainingFacts
from dyno.worker.option_values import check_types, native
from dyno.worker.record import DamagedRecord, Record, read_record, write_json
from dyno.worker.spec import FIXED, DataSpec, Dims, Job, ModelSpec, Runtime, Trial, UserError, to_json
from dyno.worker.training.options import TrainOptions, options

if TYPE_CHECKING:
    import pandas as pd

    from dyno.api.result import Result

LIBRARIES = ("torchvision:", "timm:")


@dataclass(frozen=True)
class TrainingResult:
    """A finished training: its folder, its best weights, their top-1 and top-5 on the test images (percent) and their
    epoch, a row per epoch, and what was measured with the engines that `then` named."""

    folder: Path
    weights: Path
    top1: float
    top5: float
    best_epoch: int
    history: tuple[Row, ...]
    engines: Result | None = None

    def to_pandas(self) -> pd.DataFrame:
        """Return the history as a table."""
        import pandas as pd

        return pd.DataFrame(list(self.history))


@dataclass(frozen=True)
class Training:
    """Everything that defines a training: the study of the untrained model, the model, size, images, settings."""

    study: Study
    model: ModelSpec
    size: tuple[int, int]
    training: DataSpec
    test: DataSpec
    options: TrainOptions
    classes: list[str]

    def job(self) -> Job:
        """Build the job that trains the model."""
        runtime = Runtime(device=self.options.device, threads=self.study.threads or system.physical_cores())
        trial = Trial(self.model, "", "fp32", Dims(self.options.batch, *self.size), data=self.test, runtime=runtime)
        return Job(
            "train", runtime, trial, options={"settings": asdict(self.options), "training": asdict(self.training)}
        )


def train(
    data: str | Path,
    *,
    model: str,
    size: str | int = "",
    out: str | Path | None = None,
    holdout: float | None = None,
    weights: str | Path = "",
    pretrained: bool = False,
    channels: int = 3,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    unreadable: str = "refuse",
    threads: int = 0,
    then: Sequence[str] = (),
    runtime: dict[str, dict[str, Any]] | None = None,
    resume: bool = False,
    quiet: bool = False,
    advise: bool = True,
    **settings: Any,
) -> TrainingResult:
    """Train `model` (a source as of `Study`) on a folder of class folders, or `digits`, and evaluate the best weights.

    `settings` are the fields of `TrainOptions`: epochs, batch, optimizer, lr… Everything is stored in `out` (default
    `runs/train-NAME`); a training that was stopped resumes after its last finished epoch when it is started again, and
    with `resume` it is an error if there is none. `holdout` is the share of a folder without test/ that is tested on.
    `then` names backends in which the trained weights are measured, besides PyTorch. With `advise` the commands that
    measure them are printed. Raises `UserError`.
    """
    settings = native(settings)
    kinds = {**typing.get_type_hints(train), **typing.get_type_hints(TrainOptions)}
    check_types({**settings, "data": data, "out": out, "holdout": holdout, "weights": weights}, kinds)
    chosen = options(settings)
    given: dict[str, Any] = {"mean": mean, "std": std, "backends": then or "pytorch"}  # which may be one alone
    study = Study(
        models=(model,), sizes=(str(size),) if size else (), weights=str(weights), pretrained=pretrained,
        channels=channels, seed=chosen.seed, data=str(data), unreadable=unreadable, device=chosen.device,
        threads=threads, runtime=runtime or {}, **given,
    )  # fmt: skip
    for choice in map(Choice.parse, study.backends):
        registry.find(choice.name)
    check_threads(study)
    check_weights(study, study.models)
    check_device(study)
    folder = Path(out) if out else Path("runs") / f"train-{model_name(study.models[0])}"
    if resume and not (folder / "state.pt").is_file():
        raise UserError(f"there is no training to resume in {folder}; omit --resume to start one")
    view = TrainingView(folder, chosen.epochs, quiet=quiet)
    with begun(folder), Run(folder).locked():
        plan = _plan_training(study, chosen, holdout, folder, view)
        record, now = _run_job(plan, folder, view)
    result = _make_result(record, folder)
    _print_outcome(plan, record, result, view, now=now, advise=advise)
    return replace(result, engines=_measure_engines(plan, result, quiet)) if then else result


def _plan_training(
    study: Study, chosen: TrainOptions, holdout: float | None, folder: Path, view: TrainingView
) -> Training:
    """Inspect the model, list and decode the images: every check before a training begins."""
    source = study.models[0]
    if registry.format_of(source):
        raise UserError(f"{source} can't be trained; give the PyTorch model it was exported from")
    study = replace(study, data=split.source(study.data, holdout, folder, chosen.seed))
    requested = model_spec(study, source)
    unweighted = replace(requested, weights="", weights_sha256="", pretrained=False)
    inspected, seen = inspect_model(unweighted, study)
    size = sizes(study, seen)[0]
    model = replace(requested, preprocess=inspected.preprocess)
    training, test = split.decoded(study, model, size, chosen, view.console)
    names = split.classes(training)
    return Training(study, replace(model, classes=len(names)), size, training, test, chosen, names)


def _run_job(plan: Training, folder: Path, view: TrainingView) -> tuple[Record, bool]:
    """Run the job and store its outcome beside the weights; return its record, and False if it was done before."""
    names = ", ".join(plan.classes[:5]) + (", …" if len(plan.classes) > 5 else "")
    opening = (
        f"training {plan.model.name} at {plan.size[0]}x{plan.size[1]} on {_count_images(plan.training)} images of "
        f"{len(plan.classes)} classes ({names}), testing on {_count_images(plan.test)}"
    )
    job = plan.job()
    if stored := _find_record(job, folder):
        view.say(f"{opening}: trained already")
        return stored, False
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    _write_description(plan, folder, {"status": "running", "started": begun})
    with device_lock.held(job.runtime, view.waiting), view.running(opening):
        record = launch(job, folder, math.inf, view.tick)
    if rows := history(folder):
        try:
            chart(rows, folder / CURVES)
        except ModuleNotFoundError as e:
            view.say(f"no {CURVES}: {lacking([e.name or 'matplotlib'])}")
    about = {"status": record.status, "reason": record.reason, "started": begun}
    _write_description(plan, folder, {**about, "result": to_json(record.facts.training), "system": record.system})
    if record.status != "ok":
        raise UserError(_explain_end(record, plan, len(rows)))
    return record, True


def _find_record(job: Job, folder: Path) -> Record | None:
    """Return the record of the very same training if its weights are still there, else None.

    Raises `UserError` if the record is damaged.
    """
    try:
        same = json.loads((folder / "job.json").read_text(encoding="utf-8")) == json.loads(json.dumps(to_json(job)))
    except (OSError, ValueError):
        return None
    try:
        record = read_record(folder) if same else None
    except DamagedRecord as e:
        raise UserError(f"{e.what}; give another --out, or remove {folder} to train again") from e
    trained = record.facts.training if record is not None and record.status == "ok" else None
    return record if trained is not None and sha256_of(folder / trained.weights) == trained.sha256 else None


def _count_images(data: DataSpec) -> int:
    from dyno.datasets import meta

    return int(meta(data)["splits"][data.split])


def _write_description(plan: Training, folder: Path, about: dict[str, Any]) -> None:
    """Write training.json: settings, model, data and the outcome."""
    data = {
        "source": plan.study.data,
        "classes": plan.classes,
        "training": {"sha256": plan.training.sha256, "images": _count_images(plan.training)},
        "test": {"sha256": plan.test.sha256, "images": _count_images(plan.test)},
    }
    settings = {**plan.options.settings(), "workers": plan.options.workers}
    write_json(
        folder / "training.json",
        {**about, "model": to_json(plan.model), "size": list(plan.size), "settings": settings, "data": data},
    )


def _explain_end(record: Record, plan: Training, done: int) -> str:
    """Return how the job ended, in one line."""
    if record.status == "oom":
        size = "x".join(map(str, plan.size))
        return (
            f"memory ran out at batch {plan.options.batch} and {size} pixels ({record.reason}); give a smaller --batch"
        )
    if record.status in ("failed", "skipped"):
        return record.reason
    return f"the training {record.status} after {done} epochs ({record.reason}); the same command resumes there"


def _read_trained(record: Record) -> TrainingFacts:
    assert record.facts.training is not None  # every job of this kind that ended well leaves it
    return record.facts.training


def _make_result(record: Record, folder: Path) -> TrainingResult:
    found = _read_trained(record)
    return TrainingResult(folder, folder / found.weights, found.top1, found.top5, found.best_epoch, history(folder))


def _print_outcome(
    plan: Training, record: Record, result: TrainingResult, view: TrainingView, *, now: bool, advise: bool
) -> None:
    """Print the best weights' accuracy with its interval, and what to do with them."""
    from dyno.analysis.formatting import show
    from dyno.analysis.stats import wilson

    facts = _read_trained(record)
    for note in facts.notes:
        view.say(f"note: {note}")
    share = wilson(facts.hits, facts.count)
    five = f", top-5 {result.top5:.2f} %" if len(plan.classes) > 5 else ""
    took = f", trained in {show(facts.seconds, 'duration')}" if now else ""
    view.say(
        f"{result.weights}: epoch {result.best_epoch}, top-1 {result.top1:.2f} % [{100 * share.low:.2f}, "
        f"{100 * share.high:.2f}] on {facts.count} images in PyTorch fp32{five}{took}"
    )
    for command in ("eval", "run") if advise else ():
        view.say(f"next: {next_command(command, plan, result.weights)}")


def next_command(command: str, plan: Training, weights: Path) -> str:
    """Return a command line that measures the trained weights on the test images."""
    study, model = plan.study, plan.model
    command_line = ["dyno", command, study.models[0], "--weights", str(weights), "--data", study.data]
    command_line += ["--size", Dims(1, *plan.size).size]
    if not model.source.startswith(LIBRARIES):
        command_line += ["--classes", str(model.classes)]
    if study.channels != 3:
        command_line += ["--channels", str(study.channels)]
    if study.mean:
        command_line += [f"--mean={','.join(map(str, study.mean))}", f"--std={','.join(map(str, study.std))}"]
    if study.unreadable != "refuse":
        command_line += ["--unreadable", study.unreadable]
    if command == "run" and study.device != "cpu":
        command_line += ["--device", study.device]
    return shlex.join(command_line)


def _measure_engines(plan: Training, result: TrainingResult, quiet: bool) -> Result:
    """Measure the trained weights under PyTorch and the backends, in the folder `engines`."""
    others = tuple(name for name in plan.study.backends if name != "pytorch")
    study = replace(
        plan.study, backends=("pytorch", *others), weights=str(result.weights), pretrained=False,
        classes=plan.model.classes, sizes=(Dims(1, *plan.size).size,), rounds=1, until=FIXED, seconds=1.0,
    )  # fmt: skip
    return run(study, result.folder / "engines", quiet=quiet)
