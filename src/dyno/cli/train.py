"""`dyno train`: its flags; what they do is in `training`."""

from __future__ import annotations

from typing import Annotated

import typer

from dyno.cli import options
from dyno.worker.training.options import AUGMENTATIONS, MIXED, OPTIMIZERS, SCHEDULES, TrainOptions

USUAL = TrainOptions()
Folder = Annotated[str, typer.Argument(help="Folder of class folders, with or without train/ and test/; or 'digits'.")]
PLAIN = "model size holdout weights pretrained channels unreadable threads resume".split()
SETTINGS = (
    "epochs batch optimizer lr momentum weight_decay schedule warmup_epochs augment label_smoothing mixed_precision "
    "freeze workers seed device"
).split()


def train(
    ctx: typer.Context,
    data: Folder,
    model: Annotated[str, typer.Option(help="torchvision:NAME, timm:NAME, MODULE:FUNCTION or FILE.py:FUNCTION")],
    size: Annotated[str, typer.Option(help="Image size: 224, or HEIGHTxWIDTH (default: the model's own).")] = "",
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = USUAL.epochs,
    batch: Annotated[int, typer.Option(help="Images per step.")] = USUAL.batch,
    optimizer: Annotated[str, typer.Option(help=", ".join(OPTIMIZERS))] = USUAL.optimizer,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate (default: the optimiser's usual).")] = None,
    momentum: Annotated[float, typer.Option(help="Of sgd and rmsprop.")] = USUAL.momentum,
    weight_decay: Annotated[float | None, typer.Option(help="Default: the optimiser's usual.")] = None,
    schedule: Annotated[str, typer.Option(help="Of the learning rate: " + ", ".join(SCHEDULES))] = USUAL.schedule,
    warmup_epochs: Annotated[float, typer.Option(help="Epochs in which the rate rises.")] = USUAL.warmup_epochs,
    augment: Annotated[
        str, typer.Option(help=", ".join(AUGMENTATIONS) + "; shift never mirrors (default for digits).")
    ] = USUAL.augment,
    label_smoothing: Annotated[float, typer.Option(help="0 to 1.")] = USUAL.label_smoothing,
    mixed_precision: Annotated[str, typer.Option(help=", ".join(MIXED))] = USUAL.mixed_precision,
    freeze: Annotated[bool, typer.Option("--freeze", help="Train the classifier layer alone.")] = False,
    workers: Annotated[int, typer.Option(help="Processes that read images (0: the training's own).")] = USUAL.workers,
    weights: options.Weights = "",
    pretrained: options.Pretrained = False,
    holdout: Annotated[float | None, typer.Option(help="Share to test on where there is no test/ (0.2).")] = None,
    channels: options.Channels = 3,
    mean: options.Mean = "",
    std: options.Std = "",
    unreadable: options.Unreadable = "refuse",
    seed: Annotated[int, typer.Option(help="Of weights, split, order and augmentation.")] = USUAL.seed,
    device: options.Device = "cpu",
    threads: options.Threads = 0,
    then: Annotated[str, typer.Option(help="Backends to measure the trained weights under, comma-separated.")] = "",
    python: options.Pythons = [],  # noqa: B006  (typer copies it)
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a training; refuse to begin one.")] = False,
    out: Annotated[str, typer.Option("--out", "-o", help="Folder (default: runs/train-NAME).")] = "",
) -> None:
    """Train a classifier on class folders, evaluate it; the same command again goes on where it was stopped."""
    from dyno.cli.commands import finish, numbers, pythons
    from dyno.training import session

    settings = {name: ctx.params[name] for name in SETTINGS}
    if data == "digits" and (source := ctx.get_parameter_source("augment")) and source.name != "COMMANDLINE":
        settings["augment"] = "shift"  # a mirrored digit is another digit
    result = session.train(
        data,
        out=out or None,
        mean=numbers(mean),
        std=numbers(std),
        then=tuple(name.strip() for name in then.split(",") if name.strip()),
        runtime=pythons(python),
        **{name: ctx.params[name] for name in PLAIN},
        **settings,
    )
    if result.engines:
        raise typer.Exit(finish(result.engines.folder))
