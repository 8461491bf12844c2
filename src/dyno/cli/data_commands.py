"""`dyno data`: make a folder of images ready to be measured on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dyno.cli.exits import UNFINISHED
from dyno.worker.spec import UserError

app = typer.Typer(help="Make folders of images ready.", no_args_is_help=True)
SHOWN = 3


@app.callback()
def _group_commands() -> None:
    """Make folders of images ready."""  # a callback makes typer keep the command's name though there is only one


@app.command("imagenet-val")
def imagenet_val(
    flat: Annotated[Path, typer.Argument(help="Folder of ILSVRC2012_val_*.JPEG files.", metavar="FLAT")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder that gets val/<synset>/ inside.")],
    labels: Annotated[
        str, typer.Option(help="LOC_val_solution.csv, lines of a name and a synset, or a synset or number per line.")
    ] = "",
    order: Annotated[
        str, typer.Option(help="How --labels numbers the sorted synsets: synset, synset-0 or synset-1.")
    ] = "",
    copy: Annotated[bool, typer.Option("--copy", help="Copy instead of hard links.")] = False,
    move: Annotated[bool, typer.Option("--move", help="Move instead of hard links.")] = False,
) -> None:
    """Sort ImageNet's flat validation images into class folders; the same command again continues."""
    from dyno.data import flat as module
    from dyno.formatting import counting
    from dyno.study.images import decoding

    if copy and move:
        raise UserError("--copy and --move can't be used together")
    with decoding(verbs=("sorting", "sorted")) as progress:
        transfer: module.Transfer = "copy" if copy else "move" if move else "link"
        result = module.sort(flat, out, Path(labels) if labels else None, order, transfer, progress)
    earlier = f", {result.there:,} of them before" if result.there else ""
    print(f"{result.images:,} images of {result.classes:,} classes are in {out / 'val'}{earlier}")
    if result.unlabelled:
        names = ", ".join(result.unlabelled[:SHOWN]) + (", …" if len(result.unlabelled) > SHOWN else "")
        print(
            f"dyno: left {counting(len(result.unlabelled), 'image')} without a label in {flat}: {names}",
            file=sys.stderr,
        )
        raise typer.Exit(UNFINISHED)
