"""What is printed of a run, as the command line prints it."""

import os
from typing import Any
from unittest import mock

from dyno.report import charts, tables
from dyno.report.export import By, export
from dyno.report.tables.trial_table import TRIALS
from dyno.results.run_data import RunData
from dyno.table import Table


def trials(run: RunData, format: str = "text", by: By = (), width: int = 0) -> str:
    """The trials' table, as wide as in a file, or of a given width."""
    with mock.patch.dict(os.environ, {"COLUMNS": str(width)} if width else {}):
        return export([TRIALS.table(run)], format, by)


def drawn(run: RunData) -> dict[str, Any]:
    """The run's charts by name."""
    return {chart.name: figure for chart in charts.list_charts() if (figure := chart.draw(run)) is not None}


def every(run: RunData) -> dict[str, Table]:
    """The run's tables that hold something, by name."""
    return {table.name: table for table in tables.make_tables(run, "all")}
