"""Style of all charts: one colour per backend, one marker and hatch per precision."""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dyno.results.run_data import RunData
from dyno.worker.record import replace_file

# Okabe and Ito's palette, distinguishable for colour-blind readers.
COLORS = {
    "pytorch": "#0072B2",
    "compile": "#56B4E9",
    "onnxruntime": "#E69F00",
    "openvino": "#009E73",
    "tensorrt": "#D55E00",
    "torch_tensorrt": "#CC79A7",
    "aoti": "#B8A800",
    "torchao": "#7A5195",
    "litert": "#5C4B3B",
    "executorch": "#882255",
    "ncnn": "#332288",
    "fake": "#8A8A8A",
}
SPARE_COLORS = ("#CC79A7", "#B8A800", "#7A5195", "#5C4B3B", "#8A8A8A")
# Marker, hatch and line of each precision.
BACKEND_STYLES: dict[str, tuple[str, str, Any]] = {
    "fp32": ("o", "", "-"),
    "tf32": ("D", "..", (0, (1, 1))),
    "fp16": ("^", "//", (0, (5, 2))),
    "bf16": ("s", "\\\\", (0, (5, 1, 1, 1))),
    "int8": ("v", "xx", (0, (2, 1))),
    "fp8": ("P", "++", ":"),
    "int4": ("<", "--", (0, (1, 3))),
    "fp4": (">", "||", (0, (3, 1, 1, 1))),
    "int2": ("*", "oo", (0, (1, 5))),
}
MARKERS, HATCHES, LINES = ({name: look[k] for name, look in BACKEND_STYLES.items()} for k in range(3))
INK, FAINT, EDGE, PAPER = "#1c2430", "#d5dae1", "#9aa3af", "#ffffff"
# CSS variables of these colours; a page has other values for a dark screen.
PAGE_COLORS = {INK: "--ink", FAINT: "--line", EDGE: "--soft", PAPER: "--card", "#000000": "--ink"}
TOOLTIP_PREFIX = "tip: "  # prefix of ids of artists with a tooltip
WIDTH, DPI = 8.2, 150  # inches; dots per inch of a PNG
MATPLOTLIB_SETTINGS = {
    "font.family": ["DejaVu Sans"], "font.size": 9.5, "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.edgecolor": EDGE, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": FAINT, "grid.linewidth": 0.6, "axes.axisbelow": True, "hatch.linewidth": 0.7, "legend.frameon": False,
    "legend.fontsize": 8.5, "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "dyno",
    "figure.facecolor": "white", "savefig.facecolor": "white",
}  # fmt: skip


def choose_color(backend: str) -> str:
    """Return the backend's colour, the same in every chart and run."""
    return COLORS.get(backend) or SPARE_COLORS[hashlib.sha256(backend.encode()).digest()[0] % len(SPARE_COLORS)]


def choose_marker(precision: str) -> str:
    return MARKERS.get(precision, "X")


def add_tooltip(artist: Any, text: str) -> None:
    """Give the artist a tooltip in the page's SVG."""
    artist.set_gid(TOOLTIP_PREFIX + text)


def make_logarithmic(axes: Any, name: str, low: float, high: float) -> None:
    """Make axis "x" or "y" logarithmic from `low` to `high`, with ticks at 2 and 5 if there is room."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis = {"x": axes.xaxis, "y": axes.yaxis}[name]
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_major_formatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}")
    axis.set_minor_formatter(NullFormatter())


@contextmanager
def apply_style() -> Iterator[Any]:
    """Apply Dyno's matplotlib settings in a block, without matplotlib.pyplot; yields the Figure class."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(MATPLOTLIB_SETTINGS):
        yield Figure


@contextmanager
def _any_script() -> Iterator[None]:
    """Silence warnings about missing glyphs: class names come in any script."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def laid_out(figure: Any) -> Any:
    """Lay out the figure once for all output files; return its bounding box, in inches.

    Otherwise each file needs a layout and a drawing to find the size: half the time of a report.
    """
    import matplotlib as mpl

    with mpl.rc_context(MATPLOTLIB_SETTINGS), _any_script():
        figure.dpi = DPI
        if (engine := figure.get_layout_engine()) is not None:
            engine.execute(figure)
            figure.set_layout_engine(None)
        return figure.get_tightbbox().padded(mpl.rcParams["savefig.pad_inches"])


def save(figure: Any, path: Any, box: Any = "tight") -> None:
    """Write the figure, or its part inside the box, as a PNG of 150 dpi."""
    import matplotlib as mpl

    with mpl.rc_context(MATPLOTLIB_SETTINGS), _any_script(), replace_file(path) as f:
        figure.savefig(f, dpi=DPI, bbox_inches=box, format="png")


def render_svg(figure: Any, prefix: str, box: Any = "tight", on_paper: bool = False) -> str:
    """Return the figure as an <svg> element for a page; `prefix` makes its ids unique.

    It uses the page's colours, unless it is `on_paper`: dark on white.
    """
    import matplotlib as mpl

    stream = io.StringIO()
    with mpl.rc_context(MATPLOTLIB_SETTINGS), _any_script():
        figure.savefig(stream, format="svg", bbox_inches=box, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")  # fallback for phones
    text = re.sub(rf'<g id="{TOOLTIP_PREFIX}([^"]*)">', r"<g><title>\1</title>", text)
    if not on_paper:
        text = re.sub(r"(?<=: )#[0-9a-f]{6}\b", _page_color, text)
    text = re.sub(r'(?<=\bid=")', f"{prefix}-", text)
    text = re.sub(r'(?<=href="#)|(?<=url\(#)', f"{prefix}-", text)
    # Browsers scale by the viewBox; a fixed size would not fit a phone.
    return re.sub(r'(<svg[^>]*?) (?:height|width)="[^"]*"(.*?) (?:height|width)="[^"]*"', r"\1\2", text, count=1)


def _page_color(match: re.Match[str]) -> str:
    name = PAGE_COLORS.get(match[0])
    return f"var({name}, {match[0]})" if name else match[0]


# Declaration of a chart.


@dataclass(frozen=True)
class Chart:
    """A kind of chart, declared at the top of a module of `report/charts` or by an entry point (group `dyno.charts`).

    `name` is its file's name, `caption` the text below it. `draw` returns a matplotlib Figure, or None if the run has
    no data for it. The report draws all that apply, in the order of `position`.
    """

    name: str
    caption: str
    draw: Callable[[RunData], Any]
    position: int = 100
