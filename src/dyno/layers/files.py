"""Layers of a model as files for other tools; the suffix chooses the tool."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno.jobs.progress import Progress
from dyno.layers import forms, graph_files, graph_page
from dyno.layers.align import FormSet
from dyno.layers.forms import FormRequest, GraphFile
from dyno.layers.graph_files import Note, Timeline, build_timelines
from dyno.layers.roofline import Ceilings, LayerWork, count_work
from dyno.layers.times import Times
from dyno.report import style
from dyno.report.style import INK, LINES, WIDTH, apply_style, choose_color, choose_marker, make_logarithmic
from dyno.runner.device_lock import launch_in_turn
from dyno.store import check_writable
from dyno.table import Table
from dyno.worker import registry
from dyno.worker.extras import name_lacking
from dyno.worker.record import write_text
from dyno.worker.spec import Job, UserError

if TYPE_CHECKING:
    import pandas as pd

# Roofline chart: each layer's arithmetic against its operations per byte, under the measured ceilings.

MARGIN_FACTOR = 2.0  # distance of the edge from the outermost layer, as a factor
MAX_AREA, MIN_AREA = 420.0, 6.0  # points² for a layer with all the time, and with no time


def draw_roofline(form_set: FormSet, times: Mapping[int, Times], ceilings: Ceilings) -> Any | None:
    """Draw the roofline as a matplotlib figure; None if no layer multiplies.

    A point's area is the layer's share of the time. Layers without products are left out, as they have no operations.
    """
    work = {k: count_work(form_set, k, timing.precision) for k, timing in times.items()}
    points = {k: group for k, timing in times.items() if (group := _compute_points(timing, work[k]))}
    if not points:
        return None
    all_points = np.array([point for group in points.values() for point in group])
    with apply_style() as figure_class:
        figure = figure_class((WIDTH, 5.2), layout="constrained")
        axes = figure.subplots()
        for k, group in points.items():
            x, y, share = np.array(group).T
            axes.scatter(x, y, s=MIN_AREA + MAX_AREA * share, color=choose_color(times[k].backend),
                         alpha=0.6, linewidth=0.4, edgecolor=INK, marker=choose_marker(times[k].precision),
                         label=form_set.forms[k].library)  # fmt: skip
        _draw_roofs(axes, ceilings, {layer.kind for k in points for layer in work[k] if layer.flops}, all_points[:, 0])
        axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOPS")
        make_logarithmic(axes, "x", *axes.get_xlim())
        make_logarithmic(axes, "y", *axes.get_ylim())
        figure.legend(loc="outside lower center", ncols=3, markerscale=0.6)
    return figure


def _compute_points(times: Times, work: Sequence[LayerWork]) -> list[tuple[float, float, float]]:
    """Return operations per byte, TFLOPS and share of the time of each multiplying layer."""
    seconds = np.median(times.layers, axis=0)
    return [
        (layer.flops / layer.bytes, layer.flops / seconds[i] / 1e12, float(seconds[i] / seconds.sum()))
        for i, layer in enumerate(work) if layer.flops and layer.bytes and seconds[i] > 0
    ]  # fmt: skip


def _draw_roofs(axes: Any, ceilings: Ceilings, kinds: set[str], intensities: np.ndarray) -> None:
    copy = ceilings.copy.bytes_per_s
    rates = {kind: rate for kind, rate in ceilings.rates.products.items() if kind in kinds}
    ridges = [rate / copy for rate in rates.values()]
    low = min([*intensities, *ridges]) / MARGIN_FACTOR
    high = max([*intensities, *ridges]) * MARGIN_FACTOR
    for kind, rate in rates.items():
        x = np.array([low, rate / copy, high])
        axes.plot(x, np.minimum(x * copy, rate) / 1e12, color=INK, lw=1.1, ls=LINES.get(kind, "-"))
        axes.annotate(f"{kind} {rate / 1e12:.3g} TFLOPS", (high, rate / 1e12), (-2, 3), textcoords="offset points",
                      ha="right", fontsize=8)  # fmt: skip
    axes.annotate(f"copy {copy / 1e9:.3g} GB/s", (low, low * copy / 1e12), (8, -2), textcoords="offset points",
                  fontsize=8)  # fmt: skip


EXPORTER_NAME = "dyno"
PAGE_SUFFIX, GRAPH_SUFFIX, LAYOUT_LIBRARY, CHART_LIBRARY = ".html", ".onnx", "squarify", "matplotlib"
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class FormsResult(FormSet):
    """Forms of a model; `requested` has the indices of the requested forms.

    `graphs` has each graph's file by index; `module_of` has only modules that are shown. `left_out` lists the forms
    that can't be made, read or timed, with reasons. If layers were timed, `times` has their times by index of the form,
    and `ceilings` the device's ceilings (None: not requested).
    """

    requested: tuple[int, ...] = ()
    graphs: Mapping[int, GraphFile] = field(default_factory=dict)
    name: str = ""
    left_out: tuple[str, ...] = ()
    times: Mapping[int, Times] = field(default_factory=dict)
    ceilings: Ceilings | None = None

    @property
    def tables(self) -> list[Table]:
        """The tables to print; the first one lists the layers."""
        raise NotImplementedError

    def save(self, path: str | Path) -> list[Path]:
        """Write a file for another tool, or a file per ONNX graph; return the written files.

        The suffix chooses the tool: see docs/layer-files.md. Raises `UserError` for an unknown suffix, and OSError if
        the file can't be written.
        """
        path, timelines = Path(path), make_timelines(self)
        kind = find_kind(path, bool(self.times))
        if kind.text is not None:
            write_text(path, kind.text(self, timelines) + "\n")
        elif kind.rated:
            _draw_roofline(self, path)
        else:
            return _write_graphs(self, dict(zip(self.requested, timelines, strict=True)), path)
        return [path]

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows of the first table."""
        return self.tables[0].to_pandas()


@dataclass(frozen=True)
class OutputFileKind:
    """Kind of file: the program that opens it, the function for its text (None: an ONNX graph or a chart), and whether
    it needs times of layers (`timed`) or the device's ceilings (`rated`)."""

    opens: str
    text: Callable[[FormsResult, list[Timeline]], str] | None
    timed: bool = False
    rated: bool = False


FILE_KINDS: dict[str, OutputFileKind] = {
    ".trace.json": OutputFileKind(
        "Perfetto", lambda _, lines: json.dumps(graph_files.chrome_trace(lines, EXPORTER_NAME)), timed=True),
    ".speedscope.json": OutputFileKind("speedscope", lambda found, lines: json.dumps(
        graph_files.build_speedscope_profile(lines, found.name, EXPORTER_NAME)), timed=True),
    ".explorer.json": OutputFileKind("Model Explorer", lambda found, lines: json.dumps(
        graph_files.build_explorer_graphs([found.forms[k] for k in found.requested], lines, found.name), indent=1)),
    ".node-data.json": OutputFileKind(
        "Model Explorer", lambda _, lines: json.dumps(graph_files.build_node_data(lines)), timed=True),
    GRAPH_SUFFIX: OutputFileKind("Netron", None),
    ".svg": OutputFileKind("a browser", None, timed=True, rated=True),
    ".png": OutputFileKind("a viewer of images", None, timed=True, rated=True),
    PAGE_SUFFIX: OutputFileKind("a browser", lambda found, lines: graph_page.profile_html(
        found.name, [found.forms[k] for k in found.requested], lines, found.tables), timed=True),
}  # fmt: skip


def list_paths(save: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the paths in `save`: one or several."""
    return [Path(path) for path in ([save] if isinstance(save, (str, Path)) else save)]


def find_kind(path: Path, timed: bool) -> OutputFileKind:
    """Return the kind of a file by its suffix.

    Raises `UserError` for an unknown suffix, or if the kind needs times and nothing is `timed`.
    """
    kind = next((kind for ending, kind in FILE_KINDS.items() if path.name.endswith(ending)), None)
    if kind is not None and (timed or not kind.timed):
        return kind
    endings = ", ".join(f"{ending} ({kind.opens})" for ending, kind in FILE_KINDS.items() if timed or not kind.timed)
    if kind is None:
        raise UserError(f"{str(path)!r} can't be saved; end its name in one of {endings}")
    raise UserError(f"{path.name} needs times of layers; `dyno profile` saves it, `dyno inspect` saves {endings}")


def check(paths: Sequence[Path], requests: Sequence[FormRequest], timed: bool, rated: bool = False) -> None:
    """Raise `UserError` for a file that can't be written or made from these forms. Nothing is read or measured yet."""
    for path in paths:
        kind = find_kind(path, timed)
        if kind is FILE_KINDS[PAGE_SUFFIX]:
            check_library(LAYOUT_LIBRARY)
        if kind.rated and not rated:
            raise UserError(f"{path.name} needs the device's ceilings; add --roofline")
        if kind.rated:
            check_library(CHART_LIBRARY)
        check_writable(path)
        if any(path.exists() and Path(s.source).is_file() and path.samefile(s.source) for s in requests):
            raise UserError(f"{path} is the model itself; give another file to save to")
        if kind is FILE_KINDS[GRAPH_SUFFIX] and not any(map(_has_graph, requests)):
            raise UserError(f"{path.name} needs an ONNX graph, but no form is made from one; "
                            f"add onnxruntime, or another that is")  # fmt: skip


def _has_graph(request: FormRequest) -> bool:
    """Return whether the form is an ONNX graph, or may be made from one."""
    file_format = registry.format_of(request.source)
    return file_format.name == forms.ONNX_FORM if file_format else request.choice.name != forms.MODULE_FORM


def save_all(result: FormsResult, paths: Sequence[Path], quiet: bool) -> None:
    """Write the files; unless `quiet`, print the programs that open them."""
    for path in paths:
        for file in result.save(path):
            if not quiet:
                print(f"saved {file}, for {find_kind(path, bool(result.times)).opens}", file=sys.stderr)


def check_library(name: str) -> None:
    """Raise `UserError`, before measuring, if a library for drawing or layout is missing."""
    if importlib.util.find_spec(name) is None:
        raise UserError(name_lacking([name]))


def _draw_roofline(result: FormsResult, path: Path) -> None:
    if result.ceilings is None:
        raise UserError("the chart needs the device's ceilings; profile with roofline=True")
    figure = draw_roofline(result, result.times, result.ceilings)
    if figure is None:
        raise UserError("no layer multiplies, so a roofline chart has nothing to show")
    if path.suffix == ".png":
        style.save(figure, path)
    else:
        write_text(path, style.render_svg(figure, "roofline"))


def make_timelines(result: FormsResult) -> list[Timeline]:
    """Return the timelines of the requested forms."""
    return build_timelines(result, result.times, result.requested)


def _write_graphs(result: FormsResult, timelines: Mapping[int, Timeline], path: Path) -> list[Path]:
    """Write each graph, annotated with the forms made from it; number the file names from the second on."""
    paths: list[Path] = []
    for graph, file in result.graphs.items():
        form_timelines = {k: timeline for k, timeline in timelines.items() if result.graph_of.get(k) == graph}
        module = next((result.module_of[k] for k in (*form_timelines, graph) if k in result.module_of), None)
        if module is not None and module in timelines:
            form_timelines = {module: timelines[module], **form_timelines}
        notes = graph_files.list_node_notes(result.forms, graph, form_timelines, module)
        out = path.with_name(f"{path.stem}-{len(paths) + 1}{path.suffix}") if paths else path
        _annotate_graph(file, out, notes)
        paths.append(out)
    if not paths:
        raise UserError(f"{path.name} needs an ONNX graph, but no form was made from one; add onnxruntime")
    return paths


def _annotate_graph(file: GraphFile, out: Path, notes: Sequence[Note]) -> None:
    options = {"source": file.path, "out": str(out.absolute()), "nodes": [vars(note) for note in notes]}
    job = Job("annotate", file.runtime, options=options)
    with tempfile.TemporaryDirectory() as scratch:
        record = launch_in_turn(job, Path(scratch) / "job", TIMEOUT_S, Progress(quiet=True))
    if record.status != "ok":
        raise UserError(f"{out} can't be written: {record.reason}")
