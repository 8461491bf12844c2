"""Training of a classifier on your own images, its evaluation, and optional measurement of the weights as engines."""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
import shutil
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dyno import data as dyno_data
from dyno.api import run
from dyno.data.data_format import ScanRequest
from dyno.data.folders import scan_folder
from dyno.jobs.launcher import launch
from dyno.jobs.progress import stderr_console
from dyno.runner import device_lock
from dyno.store import Run, cache_dir, guard_start, sha256_of
from dyno.study.defaults import check_device, check_threads, check_weights
from dyno.study.images import prepare_images, report_decoding, warn_unreadable
from dyno.study.model_info import inspect_model, list_sizes, model_spec
from dyno.study.model_names import model_name
from dyno.study.study import Choice, Study
from dyno.worker import registry, system
from dyno.worker.extras import name_lacking
from dyno.worker.facts.job import TrainingFacts
from dyno.worker.option_values import check_types, native
from dyno.worker.record import DamagedRecord, Record, read_record, write_json
from dyno.worker.spec import (
    FIXED,
    NETWORK_LIBRARIES,
    DataSpec,
    Dims,
    Job,
    ModelSpec,
    Runtime,
    Trial,
    UserError,
    to_json,
)
from dyno.worker.training.options import TrainOptions, make_options

if TYPE_CHECKING:
    import pandas as pd

    from dyno.api import Result

# Images of a training: layout, hold-out split, and decoding with room to crop.

HOLDOUT_SHARE = 0.2
RESIZE_FACTOR = 8 / 7  # 256 pixels for a crop of 224, unless the model resizes further
CROPPING_AUGMENTATIONS = ("light", "standard")


def find_source(data: str, holdout: float | None, out: Path, seed: int) -> str:
    """Return a folder with train/ and test/ (or val/): the given one, or one of links to its images below `out`.

    A folder of classes alone is split class by class, with the share `holdout` of each for testing; the same images and
    seed give the same split. `digits` is returned unchanged. Raises `UserError`.
    """
    folder = Path(data)
    if data == "digits":
        if holdout is not None:
            raise UserError("the digits already have test images; omit --holdout")
        return data
    if not folder.is_dir():
        raise UserError(f"no data folder {folder}" if not folder.exists() else f"{folder} is not a folder")
    if (kind := dyno_data.format_of(folder)).labels == "objects":
        raise UserError(f"{folder} is in {kind.described}; only classifiers are trained here, give class folders")
    if kind.suffixes:
        raise UserError(f"{folder} is in {kind.described}; training needs class folders")
    has_test = any(_has_classes(folder / name) for name in ("test", "val"))
    has_training = _has_classes(folder / "train")
    if has_test and not has_training:
        raise UserError(f"{folder} has no train/; put the training images there")
    if has_test:
        if holdout is not None:
            raise UserError(f"{folder} already has test images; omit --holdout")
        return data
    root = folder / "train" if has_training else folder
    share = HOLDOUT_SHARE if holdout is None else holdout
    if not 0 < share < 1:
        raise UserError(f"--holdout is {share:g}; it is a share of the images between 0 and 1, e.g. 0.2")
    return str(_link_folder(_split_images(root.resolve(), share, seed), out / "data" / folder.resolve().name, out))


def _has_classes(root: Path) -> bool:
    return root.is_dir() and any(p.is_dir() and not p.name.startswith(".") for p in root.iterdir())


def _split_images(root: Path, share: float, seed: int) -> dict[str, Path]:
    """Return every image by its path in the split folder: `train/CLASS/…` or `test/CLASS/…`."""
    listing = scan_folder(root, ScanRequest(0, seed))
    if not listing.classes:
        raise UserError(f"{root} holds images without class folders; put those of each class into a folder")
    rng = np.random.default_rng(seed)
    paths: dict[str, Path] = {}
    for label, name in enumerate(listing.classes):
        photos = [photo for photo in listing.photos if photo.label == label]
        if len(photos) < 2:
            raise UserError(f"class {name!r} has one image; it needs two, one to train on and one to test on")
        test_count = min(max(1, round(share * len(photos))), len(photos) - 1)
        test_indices = set(rng.permutation(len(photos))[:test_count].tolist())
        for i, photo in enumerate(photos):
            split = "test" if i in test_indices else "train"
            paths[f"{split}/{photo.path.relative_to(root).as_posix()}"] = photo.path
    return paths


def _link_folder(split: dict[str, Path], folder: Path, out: Path) -> Path:
    """Return the folder of links, created if missing; refuse to change it once a training has begun."""
    link_targets = {name: os.fspath(path) for name, path in split.items()}
    if folder.is_dir():
        links = [path for path in folder.rglob("*") if path.is_symlink()]
        if {path.relative_to(folder).as_posix(): os.fspath(path.readlink()) for path in links} == link_targets:
            return folder
        if (out / "state.pt").exists():
            raise UserError(
                f"the training in {out} began with another split (the images, --holdout or --seed changed); "
                "give another --out, or remove that folder to start over"
            )
        shutil.rmtree(folder)
    scratch = folder.with_name(folder.name + ".part")
    shutil.rmtree(scratch, ignore_errors=True)
    for name, target in link_targets.items():
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).symlink_to(target)
    scratch.rename(folder)
    return folder


def decode_split(
    study: Study, model: ModelSpec, size: tuple[int, int], options: TrainOptions, console: Console | None = None
) -> tuple[DataSpec, DataSpec]:
    """Decode the training images, larger than `size` (height, width) if the augmentation crops, and the test images.

    Test images are decoded as for any other command, so that accuracies can be compared. Training images come first:
    they are read together with the test images, so that all unreadable images are named together.
    """
    if study.data == "digits":
        test = prepare_images(study, model, size, console=console)
        return replace(test, split="train"), test
    decoded_size, preprocess, channels = size, model.preprocess, model.channels
    if options.augment in CROPPING_AUGMENTATIONS:
        factor = max(RESIZE_FACTOR, preprocess.resize)
        decoded_size = (round(size[0] * factor), round(size[1] * factor))
        preprocess = replace(preprocess, resize=1.0 if preprocess.resize else 0.0)
    on_unreadable: dyno_data.OnUnreadable = "skip" if study.unreadable == "skip" else "refuse"
    images, cache = Path(study.data), cache_dir() / "datasets"
    with report_decoding(console) as progress:
        data = dyno_data.load(images, cache, decoded_size, preprocess, 0, on_unreadable, progress, channels, train=True)
    warn_unreadable(dyno_data.read_meta(data), console)
    training = replace(data, split="train", count=dyno_data.read_meta(data)["splits"].get("train", 0))
    if not training.count:
        raise UserError(f"every training image in {study.data} is also a test image; give other images")
    return training, prepare_images(study, model, size, console=console)


def list_classes(training: DataSpec) -> list[str]:
    """Return the names of the classes; raise `UserError` for a single class."""
    names: list[str] = dyno_data.read_meta(training)["classes"]
    if len(names) < 2:
        raise UserError(f"there is a single class, {names[0]!r}; a classifier needs two or more")
    return names


# Output of a training: a console line per epoch, and its curves as a chart afterwards.

HISTORY_FILE, CURVES_FILE = "history.csv", "curves.png"
TRAINING_STAGES = ("epoch", "evaluate")  # prefixes of stages after all checks

Row = dict[str, float]


def show_history(folder: Path) -> tuple[Row, ...]:
    """Read the rows of history.csv: epoch, lr, train_loss, test_loss, top1 (percent), seconds, images_per_s."""
    try:
        with open(folder / HISTORY_FILE, encoding="utf-8", newline="") as f:
            return tuple({name: float(value) for name, value in row.items()} for row in csv.DictReader(f))
    except FileNotFoundError:
        return ()


class TrainingView:
    """Console output: a line per epoch, and on a terminal a bar below them; nothing when quiet."""

    def __init__(self, folder: Path, epochs: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self.folder, self.epochs, self.quiet = folder, epochs, quiet
        self.console = console or stderr_console(quiet=quiet)
        self._shown_epochs = 0
        self._modified = 0.0
        self._opening: list[str] = []
        self._bar: Progress | None = None
        self._task = TaskID(0)

    @contextmanager
    def running(self, opening: str = "") -> Iterator[None]:
        """Show the training during the `with` block.

        The opening lines (what is trained, epochs done before) are printed once all checks have passed, so that a
        refusal is one line.
        """
        rows = show_history(self.folder)
        self._shown_epochs = len(rows)
        self._opening = [opening] if opening else []
        if rows and len(rows) < self.epochs:
            self._opening.append(f"resuming after epoch {len(rows)} of {self.epochs}")
        columns = (BarColumn(30), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        is_plain = self.quiet or not self.console.is_terminal
        with nullcontext() if is_plain else Progress(*columns, console=self.console, transient=True) as self._bar:
            if self._bar is not None:
                self._task = self._bar.add_task("start", total=self.epochs, completed=self._shown_epochs)
            yield
            self._print_epochs()
        self._bar = None

    def tick(self, stage: str, elapsed: float) -> None:
        """Update the display; called about twenty times a second while the job runs."""
        if stage.startswith(TRAINING_STAGES):
            self._print_opening()
        if self._bar is not None:
            self._bar.update(self._task, description=escape(stage), completed=self._shown_epochs)
        try:
            modified = (self.folder / HISTORY_FILE).stat().st_mtime
        except OSError:
            return
        if modified != self._modified:
            self._modified = modified
            self._print_epochs()

    def waiting(self, owner: str) -> None:
        """Show that the training waits for another process's job."""
        self.say(f"waiting for process {owner}, another dyno on this GPU")

    def say(self, line: str) -> None:
        """Print one line, unless quiet."""
        if not self.quiet:
            self.console.print(escape(line), soft_wrap=True, highlight=False)

    def _print_opening(self) -> None:
        for line in self._opening:
            self.say(line)
        self._opening = []

    def _print_epochs(self) -> None:
        rows = show_history(self.folder)
        if len(rows) > self._shown_epochs:
            self._print_opening()
        for row in rows[self._shown_epochs :]:
            self.say(format_epoch(row, self.epochs))
        self._shown_epochs = max(self._shown_epochs, len(rows))


def format_epoch(row: Row, epochs: int) -> str:
    """Format an epoch as one line."""
    width = len(str(epochs))
    return (
        f"epoch {row['epoch']:{width}.0f}/{epochs}  lr {row['lr']:.2e}  loss {row['train_loss']:.4f}  "
        f"test loss {row['test_loss']:.4f}  top-1 {row['top1']:6.2f} %  {row['seconds']:.1f} s  "
        f"{row['images_per_s']:,.0f} images/s"
    )


def draw_curves(rows: tuple[Row, ...], path: Path) -> None:
    """Draw losses, top-1 and learning rate over the epochs, as PNG."""
    from dyno.report.style import COLORS, WIDTH, apply_style, save

    epochs = [row["epoch"] for row in rows]
    panels = (
        ("loss", (("train_loss", "training", "pytorch"), ("test_loss", "test", "onnxruntime"))),
        ("top-1, %", (("top1", "test", "onnxruntime"),)),
        ("learning rate", (("lr", "at the end of the epoch", "openvino"),)),
    )
    with apply_style() as figure_class:
        figure = figure_class(figsize=(WIDTH, 2.9), layout="constrained")
        for axes, (title, lines) in zip(figure.subplots(1, 3), panels, strict=True):
            for name, label, color in lines:
                axes.plot(epochs, [row[name] for row in rows], "o-", ms=3, color=COLORS[color], label=label)
            axes.set_title(title)
            axes.set_xlabel("epoch")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend()
        save(figure, path)


OF_STUDY = ("weights", "pretrained", "channels", "mean", "std", "unreadable", "threads", "runtime")


@dataclass(frozen=True)
class TrainingResult:
    """A finished training: its folder, its best weights with their top-1 and top-5 on the test images (percent) and
    their epoch, a row per epoch, and the measurement of the engines in `then`."""

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
class TrainingPlan:
    """Definition of a training: the study of the untrained model, the model, size, images, settings."""

    study: Study
    model: ModelSpec
    size: tuple[int, int]
    training: DataSpec
    test: DataSpec
    options: TrainOptions
    classes: list[str]

    def make_job(self) -> Job:
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
    then: Sequence[str] = (),
    resume: bool = False,
    quiet: bool = False,
    advise: bool = True,
    **settings: Any,
) -> TrainingResult:
    """Train `model` (a source as in `Study`) on a folder of class folders, or `digits`, and evaluate the best weights.

    `settings` are the fields of `TrainOptions` (epochs, batch, optimizer, lr…), and the fields of `Study` in OF_STUDY
    (weights, pretrained, channels, mean, std, unreadable, threads, runtime). Everything is stored in `out` (default
    `runs/train-NAME`). A stopped training resumes after its last finished epoch; with `resume` a missing one is an
    error. `holdout` is the test share for a folder without test/. `then` names backends, in addition to PyTorch, that
    measure the trained weights. With `advise` the commands for that are printed. Raises `UserError`.
    """
    settings = native(settings)
    study_fields: dict[str, Any] = {name: settings.pop(name) for name in OF_STUDY if name in settings}
    types = {**typing.get_type_hints(train), **typing.get_type_hints(TrainOptions)}
    check_types({**settings, "data": data, "out": out, "holdout": holdout}, types)
    options = make_options(settings)
    study_fields["backends"] = then or "pytorch"  # a single name is accepted
    study = Study(models=(model,), sizes=(str(size),) if size else (), seed=options.seed, data=str(data),
                  device=options.device, **study_fields)  # fmt: skip
    for choice in map(Choice.parse, study.backends):
        registry.find(choice.name)
    check_threads(study)
    check_weights(study, study.models)
    check_device(study)
    folder = Path(out) if out else Path("runs") / f"train-{model_name(study.models[0])}"
    if resume and not (folder / "state.pt").is_file():
        raise UserError(f"there is no training to resume in {folder}; omit --resume to start one")
    view = TrainingView(folder, options.epochs, quiet=quiet)
    with guard_start(folder), Run(folder).hold_lock():
        plan = _plan_training(study, options, holdout, folder, view)
        record, is_new = _run_job(plan, folder, view)
    facts = record.facts.training
    assert facts is not None  # present after every successful job of this kind
    result = TrainingResult(
        folder, folder / facts.weights, facts.top1, facts.top5, facts.best_epoch, show_history(folder)
    )
    _print_outcome(plan, facts, result, view, is_new=is_new, advise=advise)
    return replace(result, engines=_measure_engines(plan, result, quiet)) if then else result


def _plan_training(
    study: Study, options: TrainOptions, holdout: float | None, folder: Path, view: TrainingView
) -> TrainingPlan:
    """Inspect the model, list and decode the images; all checks are made before a training begins."""
    source = study.models[0]
    if registry.format_of(source):
        raise UserError(f"{source} can't be trained; give the PyTorch model it was exported from")
    study = replace(study, data=find_source(study.data, holdout, folder, options.seed))
    requested = model_spec(study, source)
    unweighted = replace(requested, weights="", weights_sha256="", pretrained=False)
    inspected_model, inspection = inspect_model(unweighted, study)
    size = list_sizes(study, inspection)[0]
    model = replace(requested, preprocess=inspected_model.preprocess)
    training, test = decode_split(study, model, size, options, view.console)
    names = list_classes(training)
    return TrainingPlan(study, replace(model, classes=len(names)), size, training, test, options, names)


def _run_job(plan: TrainingPlan, folder: Path, view: TrainingView) -> tuple[Record, bool]:
    """Run the job and store its outcome next to the weights; return its record, and False if it was done before."""
    names = ", ".join(plan.classes[:5]) + (", …" if len(plan.classes) > 5 else "")
    opening = (
        f"training {plan.model.name} at {plan.size[0]}x{plan.size[1]} on {_count_images(plan.training)} images of "
        f"{len(plan.classes)} classes ({names}), testing on {_count_images(plan.test)}"
    )
    job = plan.make_job()
    if stored_record := _find_record(job, folder):
        view.say(f"{opening}: trained already")
        return stored_record, False
    start = datetime.now(UTC).isoformat(timespec="seconds")
    _write_description(plan, folder, {"status": "running", "started": start})
    with device_lock.hold_device(job.runtime, view.waiting), view.running(opening):
        record = launch(job, folder, math.inf, view.tick)
    if rows := show_history(folder):
        try:
            draw_curves(rows, folder / CURVES_FILE)
        except ModuleNotFoundError as e:
            view.say(f"no {CURVES_FILE}: {name_lacking([e.name or 'matplotlib'])}")
    outcome = {"status": record.status, "reason": record.reason, "started": start}
    _write_description(plan, folder, {**outcome, "result": to_json(record.facts.training), "system": record.system})
    if record.status != "ok":
        raise UserError(_explain_end(record, plan, len(rows)))
    return record, True


def _find_record(job: Job, folder: Path) -> Record | None:
    """Return the record of the same training if its weights are still there, else None.

    Raises `UserError` if the record is damaged.
    """
    try:
        is_same = json.loads((folder / "job.json").read_text(encoding="utf-8")) == json.loads(json.dumps(to_json(job)))
    except (OSError, ValueError):
        return None
    try:
        record = read_record(folder) if is_same else None
    except DamagedRecord as e:
        raise UserError(f"{e.description}; give another --out, or remove {folder} to train again") from e
    facts = record.facts.training if record is not None and record.status == "ok" else None
    return record if facts is not None and sha256_of(folder / facts.weights) == facts.sha256 else None


def _count_images(data: DataSpec) -> int:
    from dyno.data import read_meta

    return int(read_meta(data)["splits"][data.split])


def _write_description(plan: TrainingPlan, folder: Path, outcome: dict[str, Any]) -> None:
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
        {**outcome, "model": to_json(plan.model), "size": list(plan.size), "settings": settings, "data": data},
    )


def _explain_end(record: Record, plan: TrainingPlan, epoch_count: int) -> str:
    if record.status == "oom":
        size = "x".join(map(str, plan.size))
        return (
            f"memory ran out at batch {plan.options.batch} and {size} pixels ({record.reason}); give a smaller --batch"
        )
    if record.status in ("failed", "skipped"):
        return record.reason
    return f"the training {record.status} after {epoch_count} epochs ({record.reason}); the same command resumes there"


def _print_outcome(
    plan: TrainingPlan, facts: TrainingFacts, result: TrainingResult, view: TrainingView, *, is_new: bool, advise: bool
) -> None:
    from dyno.formatting import show
    from dyno.results.stats import compute_wilson

    for note in facts.notes:
        view.say(f"note: {note}")
    interval = compute_wilson(facts.hits, facts.count)
    top5_text = f", top-5 {result.top5:.2f} %" if len(plan.classes) > 5 else ""
    time_text = f", trained in {show(facts.seconds, 'duration')}" if is_new else ""
    view.say(
        f"{result.weights}: epoch {result.best_epoch}, top-1 {result.top1:.2f} % [{100 * interval.low:.2f}, "
        f"{100 * interval.high:.2f}] on {facts.count} images in PyTorch fp32{top5_text}{time_text}"
    )
    for command in ("eval", "run") if advise else ():
        view.say(f"next: {next_command(command, plan, result.weights)}")


def next_command(command: str, plan: TrainingPlan, weights: Path) -> str:
    """Return a command line that measures the trained weights on the test images."""
    study, model = plan.study, plan.model
    command_line = ["dyno", command, study.models[0], "--weights", str(weights), "--data", study.data]
    command_line += ["--size", Dims(1, *plan.size).size]
    if model.source.partition(":")[0] not in NETWORK_LIBRARIES:
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


def _measure_engines(plan: TrainingPlan, result: TrainingResult, quiet: bool) -> Result:
    """Measure the trained weights with PyTorch and the other backends, in the folder `engines`."""
    other_backends = tuple(name for name in plan.study.backends if name != "pytorch")
    study = replace(
        plan.study, backends=("pytorch", *other_backends), weights=str(result.weights), pretrained=False,
        classes=plan.model.classes, sizes=(Dims(1, *plan.size).size,), rounds=1, until=FIXED, seconds=1.0,
    )  # fmt: skip
    return run(study, result.folder / "engines", quiet=quiet)
