"""`dyno inspect`: what a model is made of, in one form or in several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dyno.jobs.progress import Progress
from dyno.layers import files, forms, tables
from dyno.layers.files import FormsResult
from dyno.study.defaults import one_model
from dyno.study.study import model_name
from dyno.table import Table
from dyno.worker.option_values import at_least
from dyno.worker.spec import UserError


class InspectionResult(FormsResult):
    """Forms of a model, whose layers are listed or aligned."""

    @cached_property
    def tables(self) -> list[Table]:
        """The layers of one form, or several side by side and the conversions that engines put in."""
        if len(self.shown) == 1:
            return [tables.list_layers(self.forms[self.shown[0]])]
        aligned = tables.align_forms(self, self.shown)
        return [table for table in (aligned, tables.describe_conversions(self.forms, self.shown)) if table.rows]


def inspect(
    model: Any,
    *others: Any,
    batch: int = 1,
    save: str | Path | Sequence[str | Path] = (),
    quiet: bool = True,
    **settings: Any,
) -> InspectionResult:
    """List the layers of a model, beside those of other models or of its other forms.

    `model` is anything that a study takes: the calls of a module's parts are listed, the nodes of an ONNX file, or the
    layers of an engine. Each of `others` is such a model, or a form of the first: `onnx`, or a backend as in a study
    with a precision behind a slash, `openvino` or `onnxruntime@optimization=basic/int8`. `save` names files to write,
    whose names are checked first (see `InspectionResult.save`). `settings` are fields of `dyno.Study`. Forms that
    can't be made or read are left out; raises `UserError` if no form is left.
    """
    (batch,) = at_least(1, batch=batch)
    study = one_model(model, settings)
    reading = forms.FormReader(study, batch, Progress(quiet=quiet))
    sides = forms.list_forms(study, others)
    paths = files.list_paths(save)
    files.check(paths, sides, timed=False)
    sides = reading.read_all(sides)
    if not any(reading.forms[k].layers for k in reading.shown):
        raise UserError(f"{model_name(study.models[0])} has no layers: it has no part that can run")
    inspected = InspectionResult(**reading.describe(sides))
    files.save_all(inspected, paths, quiet)
    return inspected
