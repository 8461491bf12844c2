"""`dyno COMMAND --schema`: the JSON Schema of a command's `--format json`, from columns of tables and result types."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from dyno.table import TEXT, Column
from dyno.worker.spec import SCHEMA

Schema = dict[str, Any]
Tables = Mapping[str, Sequence[Column]]  # columns by the table's name; empty: they depend on the measurement

DIALECT = "https://json-schema.org/draft/2020-12/schema"
JSON_TYPES: dict[Any, str | list[str]] = {
    str: "string", bool: "boolean", int: "integer", float: ["number", "null"], types.NoneType: "null",
}  # fmt: skip
# cells; JSON has no NaN and no infinity
WORD_TYPES, FIGURE_TYPES = ["string", "boolean", "null"], ["number", "boolean", "null"]
CELL_SCHEMA: Schema = {"type": ["string", "number", "boolean", "null"]}
COLUMN_PROPERTIES = {name: {"type": "string"} for name in ("name", "unit", "kind", "meaning")}


# Tables with columns that depend on the inspected model.
DYNAMIC_FIELDS: dict[str, tuple[str, ...]] = {
    "inspect": ("layers", "aligned", "conversions"),
    "profile": ("profile", "reconciliation", "critical-path", "ceilings", "counters"),
    "diff": ("agreement", "ranks", "layer-errors", "layer-findings"),
}


def describe_command(command: str) -> Schema:
    """Return the schema of a command, such as `bench video`."""
    schema = _describe_commands()[command]
    return {"$schema": DIALECT, "title": f"dyno {command} --format json", **schema, "unevaluatedProperties": False}


def _describe_commands() -> dict[str, Schema]:
    from dyno.cli import doctor, files
    from dyno.layers import cold_start
    from dyno.layers.explaining import ExplanationDescription
    from dyno.packs.reproduction import ReproductionDescription
    from dyno.packs.verification import VerificationDescription
    from dyno.regression import compare_table, history
    from dyno.report import self_test, tables
    from dyno.report.tables import gpu_table, trial_table
    from dyno.report.verdict.verdict import RunDescription
    from dyno.runner.stress import StressDescription
    from dyno.serving import application
    from dyno.serving import tables as serving
    from dyno.training import commands as training
    from dyno.video import tables as videos

    trials: Tables = {"trials": (*trial_table.COLUMNS, trial_table.LIMIT_COLUMN)}
    of_serving: Tables = {"serve": serving.SERVE_COLUMNS, "serve-rates": serving.RATE_COLUMNS}
    of_video: Tables = {"video": videos.VIDEO_COLUMNS, "video-stages": videos.STAGE_COLUMNS,
                        "video-streams": videos.STREAM_COLUMNS, "video-critical-path": videos.PATH_COLUMNS}  # fmt: skip
    app: Tables = {"app": application.COLUMNS}
    of_show = {kind.name: () for kind in tables.list_kinds()} | {**trials, **of_serving, **of_video, **app}
    compare_tables: Tables = {"compare": compare_table.COLUMNS, "video-comparison": videos.COMPARISON_COLUMNS}
    of_self_test: Tables = {"visible": self_test.VISIBLE_DIFFERENCE, "verdicts": self_test.VERDICTS}
    explain_tables = dict.fromkeys(("waterfall", "explained", "prescriptions"), ())
    build_schema = describe_tables({"builds": trial_table.COLUMNS}, files.ExportedFile, always=True)
    return {
        "run": describe_tables(trials, RunDescription, always=True),
        "time": describe_tables(trials, RunDescription),
        "eval": describe_tables(trials, RunDescription),
        "show": describe_tables(of_show | {"history": history.COLUMNS, "tables": tables.COLUMNS}, RunDescription),
        "compare": describe_tables(compare_tables),
        "bench video": describe_tables(of_video),
        "bench serve": describe_tables(of_serving),
        "bench app": describe_tables(app),
        "bench cold-start": describe_tables({"cold-start": cold_start.COLUMNS}),
        "bench stress": describe_tables({"stress": gpu_table.STRESS_COLUMNS}, StressDescription, always=True),
        "runs list": describe_tables({"runs": tables.RUN_COLUMNS}),
        **{name: describe_tables(dict.fromkeys(fields, ())) for name, fields in DYNAMIC_FIELDS.items()},
        "explain": describe_tables(explain_tables, ExplanationDescription, always=True),
        "doctor": describe_tables({"doctor": doctor.COLUMNS}, doctor.MachineDescription, always=True),
        "selftest": describe_tables(of_self_test, self_test.SelfTestDescription, always=True),
        "data train": describe_tables(
            {"epochs": training.COLUMNS, **trials}, training.TrainingDescription, always=True
        ),
        "export": {"anyOf": [describe_type(files.ExportedFile), build_schema]},
        "pack": describe_type(files.WrittenFiles),
        "verify": describe_type(VerificationDescription),
        "reproduce": describe_type(ReproductionDescription),
    }


def describe_type(kind: Any) -> Schema:
    """Return the schema of a type: of plain values, lists, mappings, dataclasses and typed dictionaries."""
    if kind in JSON_TYPES:
        return {"type": JSON_TYPES[kind]}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [describe_type(each) for each in arguments]}
    if origin in (list, tuple):
        return {"type": "array", "items": describe_type(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": describe_type(arguments[1])}
    if not (typing.is_typeddict(kind) or dataclasses.is_dataclass(kind)):
        return {}
    fields = {name: describe_type(hint) for name, hint in typing.get_type_hints(kind).items()}
    hints = typing.get_type_hints(kind, include_extras=True)  # `__required_keys__` doesn't know postponed annotations
    required = [name for name in sorted(fields) if typing.get_origin(hints[name]) is not typing.NotRequired]
    return {"type": "object", "description": (kind.__doc__ or "").strip(), "properties": fields, "required": required}


def describe_tables(tables: Tables, about: Any = None, *, always: bool = False) -> Schema:
    """Return the schema of a document of tables by name, after the fields of the type `about`.

    Without `always`, some documents have only the tables.
    """
    head = describe_type(about) if about else {"properties": {}, "required": []}
    schemas = {name: _describe_table(columns) for name, columns in tables.items()}
    by_name = {"type": "object", "properties": schemas, "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"schema": {"const": SCHEMA}, **head["properties"], "tables": by_name},
        "required": ["schema", "tables", *(head["required"] if always else ())],
    }


def _describe_table(columns: Sequence[Column]) -> Schema:
    cells = {
        column.name: {
            "type": WORD_TYPES if column.kind == TEXT else FIGURE_TYPES,
            "description": f"{column.meaning} [{column.unit}]" if column.unit else column.meaning,
        }
        for column in columns
    }
    row = {"type": "object", "properties": cells, "additionalProperties": False if columns else CELL_SCHEMA}
    column_schema = {
        "type": "array",
        "items": {"type": "object", "properties": COLUMN_PROPERTIES, "required": [*COLUMN_PROPERTIES]},
    }
    properties = {
        "title": {"type": "string"}, "description": {"type": "string"}, "columns": column_schema,
        "rows": {"type": "array", "items": row}, "notes": {"type": "array", "items": {"type": "string"}},
    }  # fmt: skip
    return {"type": "object", "properties": properties, "required": [*properties]}
