"""Sentences on the routes to the ONNX file that were tried beside the usual one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dyno.analysis.records.notes.routes_tried import KEPT, Attempt, RouteAttempt, attempts
from dyno.analysis.records.results import Results
from dyno.analysis.verdict.findings import BEST, NOTE, Finding


def findings(results: Results) -> Iterator[Finding]:
    """Yield a sentence for each configuration with a route that was kept, and one on all others that were tried."""
    models = {t.model for t in results}
    tried = [one for one in attempts(results.folder) if one.model in models]
    for one in tried:
        if one.kept is not None:
            text = (
                f"{_name_attempt(one)} by the route {one.kept.route} ran {one.kept.ratio:.2f} times as fast as by the"
            )
            rest = _format_routes(route for route in one.routes if route.outcome != KEPT)
            yield Finding(BEST, f"{text} usual one beside it at batch {one.batch}; it has separate rows{rest}.")
    if others := [f"{_name_attempt(one)}{_format_routes(one.routes)}" for one in tried if one.kept is None]:
        yield Finding(
            NOTE, f"No other route to the ONNX file that was tried is proven to be faster: {', '.join(others)}."
        )


def _name_attempt(one: Attempt) -> str:
    return f"{one.model} {one.configuration}"


def _format_routes(routes: Iterable[RouteAttempt]) -> str:
    said = [f"{one.route} {f'{one.ratio:.2f}x' if one.ratio else one.outcome}" for one in routes]
    return f" ({', '.join(said)})" if said else ""
