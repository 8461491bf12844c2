"""The command `dyno serve-test`: how many requests per second an engine answers within a bound."""

from __future__ import annotations

import sys
from typing import Any

import typer

from dyno.cli import options
from dyno.study.options import ComparisonOptions, DataOptions, MeasurementOptions, ModelOptions, RuntimeOptions
from dyno.worker.serve.options import ServeOptions

UNUSED = (
    "routes reference budget search confirm boundaries turns block until minutes peak energy timeout data "
    "samples interval"
)


@options.takes(
    ComparisonOptions, ServeOptions, ModelOptions, DataOptions, MeasurementOptions, RuntimeOptions, omit=UNUSED,
    backends="the one for this kind of model", batches="8; of a file 1, or its fixed batch",
    rounds="1, or 3 where engines are compared", seconds=1.0, warmup=0.5,
    compared="32, or four times --batch up to 512, or three times",
)  # fmt: skip
def serve_test(
    overrides: options.Overrides,
    model: options.Model,
    out: options.Out = "",
    format: options.Format = "text",
) -> None:
    """Requests at random times, batched with a deadline: how many per second hold a bound, such as --p99 20ms?"""
    from dyno.formatting import bullet, wrapped
    from dyno.report.export import export
    from dyno.report.tables import trial_table
    from dyno.serving import session
    from dyno.study.defaults import check_format

    check_format(format)
    served = session.serve_test(model, out=out or None, options=_take_options(overrides), quiet=False, **overrides)
    shown = [table for table in served.tables if table.rows]
    print(export(shown, format), end="") if shown else None
    if shown and format in ("text", "markdown"):
        print("\n" + "\n".join(map(wrapped if format == "text" else bullet, served.sentences)))
    for failed in (t for t in served.records if t.status != "ok"):
        print(f"dyno: {failed.label}: {failed.reason}", file=sys.stderr)
    raise typer.Exit(trial_table.exit_code(served.data.frame))


def _take_options(overrides: options.Overrides) -> ServeOptions:
    """Take the requests' own options out of the options that the user gave."""
    names: Any = ServeOptions.__dataclass_fields__
    return ServeOptions(**{name: overrides.pop(name) for name in names if name in overrides})
