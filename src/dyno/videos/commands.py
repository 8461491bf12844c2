"""The command `dyno video`: a video through one or several engines."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from dyno.cli import options
from dyno.cli.exits import INTERRUPTED, UNFINISHED
from dyno.study.options import (
    MODEL_HELP,
    ComparisonOptions,
    DataOptions,
    MeasurementOptions,
    ModelOptions,
    RuntimeOptions,
)
from dyno.worker.spec import UserError
from dyno.worker.video.options import VideoOptions

UNUSED = "routes reference compared budget search confirm boundaries turns block until minutes peak energy timeout data"
SOURCE = "A video, an image, a folder of images, a URL, camera:0, or - for raw frames from standard input."


@options.takes(
    ComparisonOptions, VideoOptions, ModelOptions, DataOptions, MeasurementOptions, RuntimeOptions, omit=UNUSED,
    backends="the one for this kind of model", rounds="1, or 3 where engines are compared", seconds=1.0, warmup=0.5,
)  # fmt: skip
def video(
    overrides: options.Overrides,
    source: Annotated[str, typer.Argument(help=SOURCE, metavar="IN")],
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    output: Annotated[
        str, typer.Argument(help="Annotated video, image or folder to write.", metavar="[OUT]", show_default="none")
    ] = "",
    json: Annotated[str, typer.Option(help="File for the boxes: a line of JSON for each frame.")] = "",
    save: Annotated[str, typer.Option(help="File for the pipeline's trace: .trace.json, for Perfetto.")] = "",
    out: options.Out = "",
    format: options.Format = "text",
) -> None:
    """Detect objects in a video as fast as its slowest stage allows, and say which stage that is."""
    from dyno.formatting import bullet, wrapped
    from dyno.report.export import export
    from dyno.report.tables import trial_table
    from dyno.study.defaults import check_format
    from dyno.videos import session

    check_format(format)
    filmed = session.video(
        source,
        output,
        model=model,
        boxes=json,
        save=save,
        out=out or None,
        options=_take_options(overrides),
        quiet=False,
        **overrides,
    )
    shown = [table for table in filmed.tables if table.rows]
    print(export(shown, format), end="") if shown else None
    if shown and format in ("text", "markdown"):
        print("\n" + "\n".join(map(wrapped if format == "text" else bullet, filmed.sentences)))
    if filmed.refused:
        raise UserError(filmed.refused)
    for failed in (t for t in filmed.records if t.status != "ok"):
        print(f"dyno: {failed.label}: {failed.reason}", file=sys.stderr)
    for path in filmed.unwritten:
        print(f"dyno: {path} is not written, as its round was measured before; give another --out", file=sys.stderr)
    code = trial_table.exit_code(filmed.data.frame)
    raise typer.Exit(INTERRUPTED if filmed.stopped else code or UNFINISHED * bool(filmed.unwritten))


def _take_options(overrides: options.Overrides) -> VideoOptions:
    """Take the video's own options out of the options that the user gave."""
    names: Any = VideoOptions.__dataclass_fields__
    return VideoOptions(**{name: overrides.pop(name) for name in names if name in overrides})
