"""The commands that put engines under load: `dyno bench video`, `dyno bench serve`, and `dyno bench app`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dyno.cli import options
from dyno.cli.exits import INTERRUPTED, UNFINISHED
from dyno.study.options import MODEL_HELP
from dyno.worker.serve.options import ServeOptions
from dyno.worker.spec import ROUNDS, UserError
from dyno.worker.video.options import VideoOptions

if TYPE_CHECKING:
    from dyno.videos.session import LoadResult

LOAD = f"{options.CONFIGURATION} {options.MODEL} calibration unreadable build_timeout {options.RUNTIME}"
SOURCE = "A video, an image, a folder of images, a URL, camera:0, or - for raw frames from standard input."
APPLICATION_HELP = (
    "FILE.py:NAME or MODULE:NAME, an object or what returns one, with preprocess(request), postprocess(outputs) and a "
    "torch.nn.Module as its model."
)


@options.takes(
    VideoOptions, f"{LOAD} {options.EFFORTS} equivalent",
    backends="the one for this kind of model", rounds="1, or 3 where engines are compared", seconds=1.0, warmup=0.5,
)  # fmt: skip
def video(
    overrides: options.Overrides,
    source: Annotated[str, typer.Argument(help=SOURCE, metavar="IN")],
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
    from dyno.videos import session

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
    _print_load(result, format)
    if result.refused:
        raise UserError(result.refused)
    code = _exit_load(result)
    for path in result.unwritten:
        print(f"dyno: {path} is not written, as its round was measured before; give another --out", file=sys.stderr)
    raise typer.Exit(INTERRUPTED if result.stopped else code or UNFINISHED * bool(result.unwritten))


@options.takes(
    ServeOptions, f"{LOAD} rounds builds seconds warmup compared equivalent",
    backends="the one for this kind of model", batches="8; of a file 1, or its fixed batch",
    rounds="1, or 3 where engines are compared", seconds=1.0, warmup=0.5,
    compared="32, or four times --batch up to 512, or three times",
)  # fmt: skip
def serve(
    overrides: options.Overrides, model: options.Model, out: options.NewOut = "", format: options.Format = "text"
) -> None:
    """Find how many requests per second an engine answers in time. Give the limit, e.g. --p99 20ms."""
    from dyno.serving import session

    requests = options.take_options(ServeOptions, overrides)
    served = session.bench_serve(model, out=out or None, options=requests, quiet=False, **overrides)
    _print_load(served, format)
    raise typer.Exit(_exit_load(served))


@options.takes(
    f"backends precisions data seed rounds builds seconds warmup {options.RUNTIME} equivalent timeout build_timeout",
    backends="pytorch", rounds=ROUNDS, seconds=1.0, warmup=0.5,
    data="none: the requests of NAME_requests()",
)  # fmt: skip
def app(
    overrides: options.Overrides,
    application: Annotated[str, typer.Argument(help=APPLICATION_HELP, metavar="APPLICATION")],
    out: options.NewOut = "",
    format: options.Format = "text",
) -> None:
    """Time the requests of your own application by stage. Say how much of their time a faster engine would save."""
    from dyno.serving import session

    result = session.bench_app(application, out=out or None, quiet=False, **overrides)
    _print_load(result, format)
    raise typer.Exit(_exit_load(result))


def _print_load(result: LoadResult, format: str) -> None:
    """Print the tables of a load and, for people, the sentences on them."""
    from dyno.report.export import export, with_sentences

    if result.tables and format in ("text", "markdown", "html"):
        print(with_sentences(result.tables, result.sentences, format), end="")
    elif result.tables:
        print(export(result.tables, format), end="")


def _exit_load(result: LoadResult) -> int:
    """Print why trials did not finish, and return the exit code."""
    from dyno.report.tables import trial_table

    for failed in (t for t in result.records if t.status != "ok"):
        print(f"dyno: {failed.label}: {failed.reason}", file=sys.stderr)
    return trial_table.exit_code(result.data.frame)
