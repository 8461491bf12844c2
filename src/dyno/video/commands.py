"""The command `dyno bench video`: a video through one or several engines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dyno.cli import options
from dyno.cli.exits import INTERRUPTED, UNFINISHED
from dyno.study.options import MODEL_HELP
from dyno.worker.spec import UserError
from dyno.worker.video.options import VideoOptions

if TYPE_CHECKING:
    from dyno.video.session import LoadResult

LOAD_OPTIONS = (
    f"{options.CONFIGURATION_FIELDS} {options.MODEL_FIELDS} calibration unreadable build_timeout "
    f"{options.RUNTIME_FIELDS}"
)
SOURCE_HELP = "A video, an image, a folder of images, a URL, camera:0, or - for raw frames from standard input."


@options.accept_options(
    VideoOptions, f"{LOAD_OPTIONS} {options.EFFORT_FIELDS} equivalent",
    backends="the one for this kind of model", rounds="1, or 3 where engines are compared", seconds=1.0, warmup=0.5,
)  # fmt: skip
def video(
    overrides: options.Overrides,
    source: Annotated[str, typer.Argument(help=SOURCE_HELP, metavar="IN")],
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    output: Annotated[
        str, typer.Argument(help="Annotated video, image or folder to write.", metavar="OUT", show_default="none")
    ] = "",
    json: Annotated[str, typer.Option(help="File for the boxes: a line of JSON for each frame.")] = "",
    save: Annotated[str, typer.Option(help="File for the pipeline's trace: .trace.json, for Perfetto.")] = "",
    out: options.NewOut = "",
    format: options.Format = "text",
) -> None:
    """Detect objects in a video, and say which stage bounds its speed."""
    from dyno.video import session

    result = session.bench_video(
        source,
        output,
        model=model,
        boxes=json,
        save=save,
        out=out or None,
        options=options.take_options(VideoOptions, overrides),
        quiet=False,
        **overrides,
    )
    print_load(result, format)
    if result.refused:
        raise UserError(result.refused)
    code = exit_load(result)
    for path in result.unwritten:
        print(f"dyno: {path} is not written, as its round was measured before; give another --out", file=sys.stderr)
    raise typer.Exit(INTERRUPTED if result.stopped else code or UNFINISHED * bool(result.unwritten))


def print_load(result: LoadResult, format: str) -> None:
    """Print the tables of a load, and in text formats the sentences on them; `exit_load` prints the failures."""
    from dyno.report.export import export, with_sentences

    if result.tables and format in ("text", "markdown", "html"):
        sentences = [line for line in result.sentences if line not in result.failures]
        print(with_sentences(result.tables, sentences, format), end="")
    elif result.tables:
        print(export(result.tables, format), end="")


def exit_load(result: LoadResult) -> int:
    """Print the reasons of unfinished trials, and return the exit code."""
    from dyno.report.tables import trial_table

    for line in result.failures:
        print(f"dyno: {line}", file=sys.stderr)
    return trial_table.exit_code(result.data.frame)
