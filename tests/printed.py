"""Tables and charts of a run, as the command line prints them."""

import os
from typing import Any
from unittest import mock

from dyno.report import charts, tables
from dyno.report.export import By, export
from dyno.report.tables.trial_table import TRIALS
from dyno.results.run_data import RunData
from dyno.table import Table


def trials(run: RunData, format: str = "text", by: By = (), width: int = 0) -> str:
    """Return the trials' table, at file width or at the given `width`."""
    with mock.patch.dict(os.environ, {"COLUMNS": str(width)} if width else {}):
        return export([TRIALS.table(run)], format, by)


def drawn(run: RunData) -> dict[str, Any]:
    """Draw the run's charts; return figures by chart name."""
    return {chart.name: figure for chart in charts.list_charts() if (figure := chart.draw(run)) is not None}


def every(run: RunData) -> dict[str, Table]:
    """Return the run's non-empty tables by name."""
    return {table.name: table for table in tables.make_tables(run, "all")}
