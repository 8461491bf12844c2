"""The command `dyno bench serve`: how many requests per second an engine answers within a bound."""

from __future__ import annotations

import typer

from dyno.cli import options
from dyno.videos.commands import LOAD, exit_load, print_load
from dyno.worker.serve.options import ServeOptions


@options.takes(
    ServeOptions, f"{LOAD} rounds builds seconds warmup compared equivalent",
    backends="the one for this kind of model", batches="8; of a file 1, or its fixed batch",
    rounds="1, or 3 where engines are compared", seconds=1.0, warmup=0.5,
    compared="32, or four times --batch up to 512, or three times",
)  # fmt: skip
def serve(
    overrides: options.Overrides,
    model: options.Model,
    out: options.Out = "",
    format: options.Format = "text",
) -> None:
    """Find how many requests per second an engine answers in time. Give the limit, e.g. --p99 20ms."""
    from dyno.serving import session

    requests = options.take_options(ServeOptions, overrides)
    served = session.bench_serve(model, out=out or None, options=requests, quiet=False, **overrides)
    print_load(served, format)
    raise typer.Exit(exit_load(served))
