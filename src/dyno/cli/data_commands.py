"""Behind `dyno data`: what makes a folder of images ready to be measured on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dyno.worker.spec import UserError

app = typer.Typer(help="Make folders of images ready.", no_args_is_help=True)
SHOWN = 3
UNFINISHED = 3


@app.callback()
def _several() -> None:
    """Make folders of images ready."""  # with it, typer keeps the command's name though there is only one


@app.command("imagenet-val")
def imagenet_val(
    flat: Annotated[Path, typer.Argument(help="Folder of ILSVRC2012_val_*.JPEG files.", metavar="FLAT")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder that gets val/<synset>/ inside.")],
    labels: Annotated[
        str, typer.Option(help="LOC_val_solution.csv, lines of a name and a synset, or a synset or number per line.")
    ] = "",
    order: Annotated[
        str, typer.Option(help="Numbers in --labels are places in the sorted synsets: synset, synset-0 or synset-1.")
    ] = "",
    copy: Annotated[bool, typer.Option("--copy", help="Copy instead of hard links.")] = False,
    move: Annotated[bool, typer.Option("--move", help="Move instead of hard links.")] = False,
) -> None:
    """Sort ImageNet's flat validation images into class folders; the same command again goes on."""
    from dyno.datasets import flat as module
    from dyno.planning.images import decoding

    if copy and move:
        raise UserError("--copy and --move are two ways; give one of them")
    with decoding(verbs=("sorting", "sorted")) as progress:
        transfer: module.Transfer = "copy" if copy else "move" if move else "link"
        found = module.sort(flat, out, Path(labels) if labels else None, order, transfer, progress)
    earlier = f", {found.there:,} of them before" if found.there else ""
    print(f"{found.images:,} images of {found.classes:,} classes are in {out / 'val'}{earlier}")
    if found.unlabelled:
        named = ", ".join(found.unlabelled[:SHOWN]) + (", …" if len(found.unlabelled) > SHOWN else "")
        print(f"dyno: {len(found.unlabelled):,} images have no label and stay where they are: {named}", file=sys.stderr)
        raise typer.Exit(UNFINISHED)
