"""Images of a study, decoded for a model and a size with a progress bar, and checked against the model's task."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno import data as dyno_data
from dyno.data import Progress
from dyno.data.data_format import ScanRequest, list_folders
from dyno.data.decode import EXAMINED_IMAGES, Transform, read_sizes
from dyno.data.photos import DEFAULT_COUNT
from dyno.store import cache_dir
from dyno.study.study import Choice, Study
from dyno.worker import registry, tasks
from dyno.worker.inspection import Inspection
from dyno.worker.spec import DataSpec, ModelSpec, UserError, add_noun, make_absolute

if TYPE_CHECKING:
    from rich import progress as bars
    from rich.console import Console

QUIET_S = 1.0  # faster decoding shows no progress
CALIBRATED_PRECISIONS = {"int8", "fp8"}  # precisions calibrated on images
RANKED_PRECISIONS = {"int8", "fp16"}  # precisions whose layers may be ranked on images


def prepare_images(
    study: Study, model: ModelSpec, size: tuple[int, int], outputs: int = 0, console: Console | None = None
) -> DataSpec:
    """Decode the study's images for this model and size; random inputs if it has no images, not even for calibration.

    `outputs` is the model's number of classes (0: unknown). All images outside the training split are test images,
    except those set aside for calibration if `calibrates(study)` and no others are given. Raises `UserError` if the
    data is for another task or has other classes.
    """
    if not study.data and not study.calibration:
        return DataSpec(count=study.compared, seed=study.seed)
    if not all(size):
        image = "image input (N x C x H x W, in floating point or bytes)"
        raise UserError(f"{model.name} has no {image} that images could be fed to; omit --data")
    cache, task = cache_dir() / "datasets", tasks.find_task(model.task)
    has_boxes = task.labels == "objects"
    if not study.data:
        folder = Path(study.calibration)
        options: dict[str, Any] = {"on_unreadable": study.unreadable, "channels": model.channels, "objects": has_boxes}
        with report_decoding(console) as progress:
            data = dyno_data.calibration_alone(folder, cache, size, model.preprocess, progress=progress, **options)
        warn_unreadable(dyno_data.read_meta(data), console)
        return data
    if study.data == "digits":
        return _prepare_digits(cache, model, size, outputs)
    path, outputs = Path(study.data), outputs or model.classes or 0
    data_format = dyno_data.format_of(path)
    if data_format.labels not in ("", task.labels):
        class_data = "class folders or a table of path,label"
        class_data += ", or --task detect if it gives boxes" * (not study.task)
        expected = "annotations in COCO's or YOLO's format, or one folder of images" if has_boxes else class_data
        described = data_format.describe(path)
        raise UserError(f"{study.data} is {described}, but {model.name} is for {model.task}; give {expected}")
    if study.budget and has_boxes and not data_format.labels:
        raise UserError(f"a budget needs boxes, and {study.data} has none; give annotations in COCO's or YOLO's format")
    settings: dict[str, Any] = {"calibration": Path(study.calibration)} if study.calibration else {}
    settings |= {"on_unreadable": study.unreadable, "channels": model.channels, "set_aside": calibrates(study)}
    settings |= {"objects": has_boxes, "needs": task.needs, "outputs": outputs}
    with report_decoding(console) as progress:
        data = dyno_data.load(path, cache, size, model.preprocess, progress=progress, **settings)
    meta = dyno_data.read_meta(data)
    _check_labels(study.data, meta, model, outputs)
    warn_unreadable(meta, console)
    return data


def remove_crop(study: Study, model: ModelSpec, inspection: Inspection, size: tuple[int, int]) -> ModelSpec:
    """Return the model without the guessed enlargement and crop if the images have its size already.

    A few images decide. CIFAR-10's, for example, would lose their borders.
    """
    is_guess = inspection.preprocess_guessed and not model.preprocess.letterbox
    if not is_guess or not all(size) or not study.data or study.data == "digits":
        return model
    try:
        photos = list_photos(study.data)
    except UserError:  # `prepare_images` reports it, knowing the network's classes
        return model
    sample = photos[:: max(1, len(photos) // EXAMINED_IMAGES)]
    if any(image_size != size for image_size in read_sizes(sample, Transform(size, model.preprocess, model.channels))):
        return model
    return replace(model, preprocess=replace(model.preprocess, resize=1.0))


def list_photos(path: str) -> list[Path]:
    """Return the files of a data set's test images; `UserError` if it has no files."""
    if path == "digits":
        raise UserError("digits are not files that an application can open; give a folder of images")
    data_format = dyno_data.format_of(Path(path))
    listing = data_format.scan(make_absolute(Path(path)), ScanRequest(0, objects=data_format.labels == "objects"))
    return [photo.path for photo in listing.photos if photo.split == "test"]


def calibrates(study: Study) -> bool:
    """Return whether any configuration in the study needs calibration images; all its trials share the data.

    They are int8, fp8, configurations with layers kept higher (`keep=N`), and candidates of a budget's search.
    """
    choices = [Choice.parse(text) for text in study.backends] or [Choice(name) for name in registry.list_backends()]
    for choice in choices:
        engine = registry.find(choice.name)
        can_read = any(engine.reads(source) for source in study.models if registry.format_of(source))
        is_added = study.adds_precisions and (can_read or not all(map(registry.format_of, study.models)))
        candidates = choice.precisions or study.precisions or (CALIBRATED_PRECISIONS if is_added else ())
        precisions = set(candidates) & set(engine.precisions)
        can_keep = "keep" in choice.options or (study.searches and "keep" in engine.options)
        if precisions & CALIBRATED_PRECISIONS or (can_keep and precisions & RANKED_PRECISIONS):
            return True
    return False


def warn_unreadable(meta: dict[str, Any], console: Console | None) -> None:
    """Print the names of unreadable images, which are left out."""
    if unreadable := meta.get("unreadable"):
        from dyno.formatting import format_count
        from dyno.jobs.progress import stderr_console

        sample = ", ".join(unreadable[:3]) + (", …" if len(unreadable) > 3 else "")
        line = f"{format_count(len(unreadable), 'image')} can't be read, left out: {sample}"
        (console or stderr_console()).print(line, markup=False, highlight=False, soft_wrap=True)


def _prepare_digits(cache: Path, model: ModelSpec, size: tuple[int, int], outputs: int) -> DataSpec:
    if size[0] != size[1]:
        raise UserError(f"digits are square, not {size[0]}x{size[1]}")
    data = dyno_data.prepare_digits(cache, size[0])
    _check_labels("digits", dyno_data.read_meta(data), model, outputs)
    if model.channels != 1:
        problem = f"digits are grey, but {model.name} takes {model.channels} channels"
        raise UserError(f"{problem}; give a model of one (with --channels 1), or other images")
    return data


def _check_labels(name: str, meta: dict[str, Any], model: ModelSpec, outputs: int) -> None:
    """Raise `UserError` for labels that don't fit the model's task or its number of classes."""
    annotations, classes = meta.get("has", []), len(meta["classes"])
    need = tasks.find_task(model.task).needs
    if need and annotations and need not in annotations:
        raise UserError(
            f"{model.name} is for {model.task}, but {name} has no {need} for all objects; "
            f"give data with {need}, or a network for detect"
        )
    if need == "keypoints" and annotations and model.keypoints and tuple(meta["keypoints"])[:1] != model.keypoints[:1]:
        expected, present = model.keypoints[0], meta["keypoints"][0]
        # values of a box; a file may not tell which are scores
        values = (model.classes or 1) + math.prod(model.keypoints)
        hint = f", or --classes {classes}" if classes and classes + math.prod(meta["keypoints"]) == values else ""
        raise UserError(
            f"{name} has {present} keypoints, but {model.name} gives {expected}; "
            f"give data with {expected}, or a network of {present}{hint}"
        )
    if not outputs or not classes or outputs == classes:
        return
    has_folders = meta.get("label_source") == "folders"
    classes_text = add_noun(classes, "class folder") if has_folders else add_noun(classes, "class", "classes")
    line = f"{name} has {classes_text}, but {model.name} has {add_noun(outputs, 'class', 'classes')}"
    subfolders = (Path(name, folder) for folder in meta["classes"] if has_folders and Path(name, folder).is_dir())
    if subfolder := next((folder for folder in subfolders if len(list_folders(folder)) == outputs), None):
        raise UserError(f"{line}; give {subfolder}, which has {outputs}")
    build = "" if registry.format_of(model.source) else f"build it with --classes {classes}"
    if annotations or classes > outputs:
        unused = meta.get("unused", [])
        examples = f" (without annotation: {', '.join(unused[:3])}{', …' if len(unused) > 3 else ''})" if unused else ""
        raise UserError(f"{line}; give the data that it was trained for{build and f', or {build}'}{examples}")
    table = f"{'give a table of path,label with' if has_folders else 'write'} the network's numbers as labels"
    synsets = f"name {'the folders' if has_folders else 'them'} by their ImageNet synsets (n01440764)"
    alone = "or put the images into one folder to use them without labels"
    raise UserError(f"{line}; {', '.join(filter(None, (build, table, synsets * (outputs == DEFAULT_COUNT), alone)))}")


def check_images(study: Study, model: ModelSpec, inspection: Inspection, data: DataSpec) -> None:
    """Raise `UserError` for images that Dyno can't prepare for the model, and for classes in another order."""
    if not data.folder:
        return
    if detail := inspection.unsupported_images:
        raise UserError(
            f"{model.name} takes images {detail}, which Dyno can't prepare; omit the images to measure speed alone, or "
            "give a function, FILE.py:FUNCTION, whose module takes usual images and does that itself"
        )
    meta = dyno_data.read_meta(data)
    indices = {_simplify_name(name): k for k, name in enumerate(inspection.class_names)}
    for index, name in enumerate(meta["classes"] if len(indices) == len(inspection.class_names) else ()):
        if (model_index := indices.get(_simplify_name(name), index)) != index:
            remedy = (
                "give the categories or names the network's numbers" if meta.get("has") else
                "give a table of path,label with the network's numbers as labels"
            )  # fmt: skip
            raise UserError(
                f"{name!r} is class {index} of {study.data} and class {model_index} of {model.name}, so its accuracy "
                f"would be wrong; {remedy}"
            )


def _simplify_name(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


@contextmanager
def report_decoding(
    console: Console | None = None, verbs: tuple[str, str] = ("decoding", "decoded")
) -> Iterator[Progress]:
    """Report decoding progress during the block: a bar on stderr after 1 s, or without a terminal a final line."""
    bar = _Bar(console, verbs)
    try:
        yield bar
    finally:
        bar.close()


class _Bar:
    def __init__(self, console: Console | None, verbs: tuple[str, str]) -> None:
        self._console, self._verbs = console, verbs
        self._bar: bars.Progress | None = None
        self._began, self._done_before, self._done = time.monotonic(), -1, 0

    def __call__(self, done: int, total: int) -> None:
        if self._done_before < 0:
            self._done_before = done - 1  # earlier ones were decoded by a stopped run
        self._done = done
        if self._bar is None and time.monotonic() - self._began > QUIET_S:
            self._bar = self._show_bar(total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)

    def _show_bar(self, total: int) -> bars.Progress:
        from rich import progress as bars

        from dyno.jobs.progress import stderr_console

        console = self._console = self._console or stderr_console()
        columns = bars.BarColumn(30), bars.MofNCompleteColumn(), bars.TimeRemainingColumn()
        label = bars.TextColumn(f"{self._verbs[0]} images")
        bar = bars.Progress(label, *columns, console=console, transient=True, disable=not console.is_terminal)
        bar.add_task("", total=total, completed=self._done_before)
        bar.start()
        return bar

    def close(self) -> None:
        if self._bar is not None and self._console is not None:
            self._bar.stop()
            suffix = f", {self._done_before:,} before" if self._done_before else ""
            line = (
                f"{self._verbs[1]} {self._done - self._done_before:,} images in {time.monotonic() - self._began:.1f} s"
            )
            self._console.print(line + suffix, highlight=False)
