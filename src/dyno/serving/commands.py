"""The commands `dyno bench serve` (requests to an engine) and `dyno bench app` (requests to an application)."""

from __future__ import annotations

from typing import Annotated

import typer

from dyno.cli import options
from dyno.video.commands import LOAD_OPTIONS, exit_load, print_load
from dyno.worker.serving.options import ServeOptions
from dyno.worker.spec import DEFAULT_ROUNDS

APPLICATION_HELP = (
    "FILE.py:NAME or MODULE:NAME, an object or a function that returns one, with preprocess(request), "
    "postprocess(outputs) and a torch.nn.Module as its model."
)


@options.accept_options(
    ServeOptions, f"{LOAD_OPTIONS} rounds builds seconds warmup compared equivalent",
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
    print_load(served, format)
    raise typer.Exit(exit_load(served))


@options.accept_options(
    f"backends precisions data seed rounds builds seconds warmup {options.RUNTIME_FIELDS} equivalent timeout "
    "build_timeout",
    backends="pytorch", rounds=DEFAULT_ROUNDS, seconds=1.0, warmup=0.5,
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
    print_load(result, format)
    raise typer.Exit(exit_load(result))
