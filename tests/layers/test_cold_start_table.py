"""Cold starts in a table: what is said of them has to fit what stands beside it."""

from __future__ import annotations

import math

from dyno.layers import cold_start
from dyno.worker.facts.job import ColdStart


def starts(title: str, *seconds: float) -> cold_start.ColdStartSamples:
    return cold_start.ColdStartSamples(
        title, cold_start.WARM, tuple(ColdStart({"load": s / 2}, s, (s / 100,)) for s in seconds)
    )


def test_a_wide_interval_has_its_lower_bound() -> None:
    """Of two rounds the direction may be certain where the interval is wider than a factor of two."""
    vague, clear = (math.exp(-1.063), math.exp(-0.937)), (math.exp(-1.001), math.exp(-0.999))
    for seconds, speedup, verdict in (
        (vague, "at least 1.22x", "faster"),
        (clear, "2.72x [2.68, 2.75]", "faster"),
    ):
        table = cold_start.make_cold_start_table([starts("first", 1.0, 1.0), starts("second", *seconds)])
        (part,) = table.parts()
        shown = {column.name: column.text(part.rows[1]) for column in part.columns}
        assert (shown["speedup"], shown["verdict"]) == (speedup, verdict)
        assert [row["verdict"] for row in table.rows] == ["reference", "faster"], "files have the word alone"
