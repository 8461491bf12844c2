"""What was seen inside a model as files that other tools open, by the ending of a file's name."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dyno.analysis import style
from dyno.analysis.inside.roofline import chart as roofline_chart
from dyno.analysis.inside.roofline.ceilings import Ceilings
from dyno.analysis.inside.times import Times
from dyno.analysis.layer_files import explorer, node_notes, page, traces
from dyno.analysis.layer_files.node_notes import Note
from dyno.analysis.layer_files.steps import Timeline, timelines
from dyno.analysis.presentation.table import Table
from dyno.api.inside import forms
from dyno.api.inside.forms import FormRequest, GraphFile
from dyno.engine.device_lock import launch_in_turn
from dyno.jobs.progress import Progress
from dyno.store import check_writable
from dyno.worker import registry
from dyno.worker.extras import lacking
from dyno.worker.facts.job import LayerGraph
from dyno.worker.record import write_text
from dyno.worker.spec import Job, UserError

EXPORTER = "dyno"
PAGE, GRAPH, LAYOUT, CHARTS = ".html", ".onnx", "squarify", "matplotlib"
TIMEOUT_S = 600.0


class ModelForms(Protocol):
    """Forms of a model as `inspect` and `profile` found them."""

    @property
    def name(self) -> str: ...
    @property
    def forms(self) -> tuple[LayerGraph, ...]: ...
    @property
    def shown(self) -> tuple[int, ...]: ...
    @property
    def graph_of(self) -> Mapping[int, int]: ...
    @property
    def module_of(self) -> Mapping[int, int]: ...
    @property
    def graphs(self) -> Mapping[int, GraphFile]: ...
    @property
    def times(self) -> Mapping[int, Times]: ...
    @property
    def tables(self) -> list[Table]: ...
    @property
    def ceilings(self) -> Ceilings | None: ...


@dataclass(frozen=True)
class OutputFileKind:
    """One kind of file: what opens it, what makes its text (None: an ONNX graph or a chart), whether it is one of
    times, and whether it is the chart that needs the device's ceilings."""

    opens: str
    text: Callable[[ModelForms, list[Timeline]], str] | None
    timed: bool = False
    rated: bool = False


KINDS: dict[str, OutputFileKind] = {
    ".trace.json": OutputFileKind("Perfetto", lambda _, lines: json.dumps(traces.chrome(lines, EXPORTER)), timed=True),
    ".speedscope.json": OutputFileKind(
        "speedscope", lambda found, lines: json.dumps(traces.speedscope(lines, found.name, EXPORTER)), timed=True
    ),
    ".explorer.json": OutputFileKind("Model Explorer", lambda found, lines: json.dumps(
        explorer.graphs([found.forms[k] for k in found.shown], lines, found.name), indent=1)),
    ".node-data.json": OutputFileKind(
        "Model Explorer", lambda _, lines: json.dumps(explorer.node_data(lines)), timed=True
    ),
    GRAPH: OutputFileKind("Netron", None),
    ".svg": OutputFileKind("a browser", None, timed=True, rated=True),
    ".png": OutputFileKind("a viewer of images", None, timed=True, rated=True),
    PAGE: OutputFileKind("a browser", lambda found, lines: page.html(
        found.name, [found.forms[k] for k in found.shown], lines, found.tables), timed=True),
}  # fmt: skip


def named(save: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that `save` names: one or several."""
    return [Path(path) for path in ([save] if isinstance(save, (str, Path)) else save)]


def kind_of(path: Path, timed: bool) -> OutputFileKind:
    """Return the kind of a file by its suffix.

    Raises `UserError` for an unknown suffix, and for a file of times if nothing is `timed`.
    """
    kind = next((kind for ending, kind in KINDS.items() if path.name.endswith(ending)), None)
    if kind is not None and (timed or not kind.timed):
        return kind
    known = ", ".join(f"{ending} ({kind.opens})" for ending, kind in KINDS.items() if timed or not kind.timed)
    if kind is None:
        raise UserError(f"{str(path)!r} can't be saved; end its name in one of {known}")
    raise UserError(f"{path.name} needs times of layers; `dyno profile` saves it, `dyno inspect` saves {known}")


def check(paths: Sequence[Path], sides: Sequence[FormRequest], timed: bool, rated: bool = False) -> None:
    """Raise `UserError`, before anything is read, for a file that can't be written or made from these forms."""
    for path in paths:
        kind = kind_of(path, timed)
        if kind is KINDS[PAGE]:
            check_library(LAYOUT)
        if kind.rated and not rated:
            raise UserError(f"{path.name} needs the device's ceilings; add --roofline")
        if kind.rated:
            check_library(CHARTS)
        check_writable(path)
        if any(path.exists() and Path(s.source).is_file() and path.samefile(s.source) for s in sides):
            raise UserError(f"{path} is the model itself; give another file to save to")
        if kind is KINDS[GRAPH] and not any(map(_has_graph, sides)):
            raise UserError(f"{path.name} needs an ONNX graph, but no form is made from one; "
                            f"add onnxruntime, or another that is")  # fmt: skip


def _has_graph(side: FormRequest) -> bool:
    """Return whether the form is an ONNX graph, or may be made from one."""
    kind = registry.format_of(side.source)
    return kind.name == forms.ONNX if kind else side.choice.name != forms.MODULE


def save(found: ModelForms, path: Path) -> list[Path]:
    """Write the file, or one for each of several ONNX graphs; return the written files.

    Raises `UserError` for an unknown suffix, and OSError if the file can't be written.
    """
    kind = kind_of(path, bool(found.times))
    lines = _make_timelines(found)
    if kind.text is not None:
        write_text(path, kind.text(found, lines) + "\n")
        return [path]
    if kind.rated:
        _draw_roofline(found, path)
        return [path]
    return _write_graphs(found, dict(zip(found.shown, lines, strict=True)), path)


def save_all(found: ModelForms, paths: Sequence[Path], quiet: bool) -> None:
    """Write the files, and unless `quiet` print the programs that open them."""
    for path in paths:
        for written in save(found, path):
            if not quiet:
                print(f"saved {written}, for {kind_of(path, bool(found.times)).opens}", file=sys.stderr)


def check_library(name: str) -> None:
    """Raise `UserError`, before anything is measured, if the library that draws or lays out is missing."""
    if importlib.util.find_spec(name) is None:
        raise UserError(lacking([name]))


def fragment(found: ModelForms) -> str:
    """Return the tree maps and the tables as a part of a page."""
    return page.fragment(_make_timelines(found), found.tables)


def _draw_roofline(found: ModelForms, path: Path) -> None:
    if found.ceilings is None:
        raise UserError("the chart needs the device's ceilings; profile with roofline=True")
    figure = roofline_chart.draw(found.forms, found.times, found.graph_of, found.ceilings)
    if figure is None:
        raise UserError("no layer multiplies, so a roofline chart has nothing to show")
    if path.suffix == ".png":
        style.save(figure, path)
    else:
        write_text(path, style.svg(figure, "roofline"))


def _make_timelines(found: ModelForms) -> list[Timeline]:
    return timelines(found.forms, found.graph_of, found.module_of, found.times, found.shown)


def _write_graphs(found: ModelForms, lines: Mapping[int, Timeline], path: Path) -> list[Path]:
    """Write each graph, annotated with the forms made from it; file names from the second on have a number."""
    written: list[Path] = []
    for graph, file in found.graphs.items():
        made = {k: line for k, line in lines.items() if found.graph_of.get(k) == graph}
        module = next((found.module_of[k] for k in (*made, graph) if k in found.module_of), None)
        if module is not None and module in lines:
            made = {module: lines[module], **made}
        notes = node_notes.notes(found.forms, graph, made, module)
        out = path.with_name(f"{path.stem}-{len(written) + 1}{path.suffix}") if written else path
        _annotate_graph(file, out, notes)
        written.append(out)
    if not written:
        raise UserError(f"{path.name} needs an ONNX graph, but no form was made from one; add onnxruntime")
    return written


def _annotate_graph(file: GraphFile, out: Path, notes: Sequence[Note]) -> None:
    options = {"source": file.path, "out": str(out.absolute()), "nodes": [vars(note) for note in notes]}
    job = Job("annotate", file.runtime, options=options)
    with tempfile.TemporaryDirectory() as scratch:
        record = launch_in_turn(job, Path(scratch) / "job", TIMEOUT_S, Progress(quiet=True))
    if record.status != "ok":
        raise UserError(f"{out} can't be written: {record.reason}")
