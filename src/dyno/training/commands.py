"""`dyno data train`: its options; `training` does the work."""

from __future__ import annotations

from typing import Annotated, TypedDict

import typer

from dyno.cli import options
from dyno.table import COUNT, Column, Table
from dyno.worker.training.options import TrainOptions

Folder = Annotated[
    str, typer.Argument(help="Folder of class folders, with or without train/ and test/; or 'digits'.", metavar="DATA")
]
COLUMNS = (
    Column("epoch", "from 1", kind=COUNT),
    Column("lr", "learning rate at its end"),
    Column("train_loss", "on the training images"),
    Column("test_loss", "on the test images"),
    Column("top1", "on the test images", "%"),
    Column("seconds", "of the epoch", "s"),
    Column("images_per_s", "of training", "1/s"),
)


class TrainingDescription(TypedDict):
    """The head of the table of epochs in JSON: the best weights, and their accuracy in percent."""

    folder: str
    weights: str
    top1: float
    top5: float
    best_epoch: int


@options.accept_options(TrainOptions, "threads runtime weights pretrained channels mean std unreadable")
def train(
    overrides: options.Overrides,
    data: Folder,
    model: Annotated[str, typer.Option(help="torchvision:NAME, timm:NAME, MODULE:FUNCTION or FILE.py:FUNCTION")],
    size: Annotated[str, typer.Option(help="Image size: 224, or HEIGHTxWIDTH.", show_default="the model's own")] = "",
    holdout: Annotated[
        float | None, typer.Option(help="Share of the images to test on if there is no test/.", show_default="0.2")
    ] = None,
    then: Annotated[str, typer.Option(help="Backends to measure the trained network on, with commas.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Resume a training; fail if there is none.")] = False,
    out: Annotated[str, typer.Option("--out", "-o", help="Folder.", show_default="runs/train-NAME")] = "",
    format: options.Format = "text",
) -> None:
    """Train a classifier on class folders, and evaluate it. The same command again continues where it stopped."""
    from dyno.cli.commands import finish
    from dyno.report.export import export
    from dyno.report.tables import trial_table
    from dyno.training import session

    if data == "digits":
        overrides.setdefault("augment", "shift")  # a mirrored digit is another digit
    backends = tuple(name.strip() for name in then.split(",") if name.strip())
    result = session.train(
        data, model=model, size=size, holdout=holdout, then=backends, resume=resume, out=out or None, **overrides
    )
    engines = result.engines
    if format == "text":
        raise typer.Exit(finish(engines.folder) if engines else 0)
    description: TrainingDescription = {
        "folder": str(result.folder), "weights": str(result.weights), "top1": result.top1, "top5": result.top5,
        "best_epoch": result.best_epoch,
    }  # fmt: skip
    epochs = Table("epochs", "Training", "A row per epoch.", COLUMNS, list(result.history))
    tables = [epochs, *([trial_table.TRIALS.table(engines.data)] if engines else [])]
    print(export(tables, format, head=description), end="")
    raise typer.Exit(trial_table.exit_code(engines.data.frame) if engines else 0)
