"""Charts of a run, each an object in a module, and found by its name."""

from __future__ import annotations

import sys

from dyno.report.style import Chart
from dyno.worker import plugins

ENTRY_POINT_GROUP = "dyno.charts"
CHART_MODULES = ("dyno.video.tables", "dyno.serving.tables")  # modules of other packages that declare charts


def list_charts() -> list[Chart]:
    """Return every available chart in the report's order: Dyno's own, then those of installed distributions."""
    charts = plugins.list_declared((sys.modules[__name__], *CHART_MODULES), Chart, ENTRY_POINT_GROUP).values()
    return sorted(charts, key=lambda chart: (chart.position, chart.name))
