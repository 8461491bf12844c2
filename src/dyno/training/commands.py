"""`dyno data train`: its options; `training` does the work."""

from __future__ import annotations

from typing import Annotated

import typer

from dyno.cli import options
from dyno.worker.training.options import TrainOptions

Folder = Annotated[str, typer.Argument(help="Folder of class folders, with or without train/ and test/; or 'digits'.")]


@options.takes(TrainOptions, "threads runtime weights pretrained channels mean std unreadable")
def train(
    overrides: options.Overrides,
    data: Folder,
    model: Annotated[str, typer.Option(help="torchvision:NAME, timm:NAME, MODULE:FUNCTION or FILE.py:FUNCTION")],
    size: Annotated[str, typer.Option(help="Image size: 224, or HEIGHTxWIDTH.", show_default="the model's own")] = "",
    holdout: Annotated[
        float | None, typer.Option(help="Share of the images to test on where there is no test/.", show_default="0.2")
    ] = None,
    then: Annotated[str, typer.Option(help="Backends to measure the trained weights under, comma-separated.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Continue a training; fail where there is none.")] = False,
    out: Annotated[str, typer.Option("--out", "-o", help="Folder.", show_default="runs/train-NAME")] = "",
) -> None:
    """Train a classifier on class folders, and evaluate it. The same command again continues where it stopped."""
    from dyno.cli.commands import finish
    from dyno.training import session

    if data == "digits":
        overrides.setdefault("augment", "shift")  # a mirrored digit is another digit
    backends = tuple(name.strip() for name in then.split(",") if name.strip())
    result = session.train(
        data, model=model, size=size, holdout=holdout, then=backends, resume=resume, out=out or None, **overrides
    )
    if result.engines:
        raise typer.Exit(finish(result.engines.folder))
