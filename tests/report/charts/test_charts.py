"""Charts: what is drawn, when there is nothing to draw, and that names stay text."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from PIL import Image

import printed
import synthetic
from dyno.report import style
from dyno.report.charts import charts
from dyno.report.tables import trial_table
from dyno.results.run_data import RunData
from dyno.results.trial_result import Results
from dyno.worker.spec import PRECISIONS
from synthetic import Way


@pytest.fixture(scope="module")
def run(demo: Results) -> RunData:
    return trial_table.read_trials(demo)


def texts(figure: Figure) -> list[str]:
    return [t for axes in figure.axes for t in
            [*(x.get_text() for x in axes.texts), *(x.get_text() for x in axes.get_yticklabels())]]  # fmt: skip


def test_the_demo_has_every_chart_but_sizes(run: RunData) -> None:
    drawn = printed.drawn(run)
    names = [
        "latency",
        "speedup",
        "rounds",
        "accuracy-latency",
        "accuracy-throughput",
        "throughput-batch",
        "speedup-batch",
        "confusion",
    ]
    assert list(drawn) == names
    assert all(isinstance(f, Figure) for f in drawn.values())


def test_on_a_dark_page_no_area_of_a_chart_is_white(run: RunData) -> None:
    """What has no colour of the page's is a colour in the middle, which is seen on white and on dark, or is text."""
    for name, figure in printed.drawn(run).items():
        areas = set(re.findall(r'<path [^>]*style="fill: (#[0-9a-f]{6})', style.svg(figure, "x")))
        light = [c for c in areas if sum(int(c[k : k + 2], 16) for k in (1, 3, 5)) > 3 * 0xD0]
        assert not light, name


def test_bars_are_sorted_and_lengths_are_latencies(run: RunData) -> None:
    axes = charts.draw_latency(run).axes[0]
    lengths = [p.get_width() for p in axes.patches]
    assert lengths == sorted(lengths)
    assert len(lengths) == 9
    assert axes.get_yticklabels()[0].get_text() == "openvino int8"
    assert lengths[0] == pytest.approx(run.frame.query("precision == 'int8' and batch == 1")["latency_ms"].min())


def test_the_frontier_is_named(run: RunData) -> None:
    assert "frontier (ringed), fastest first: openvino int8, openvino bf16" in texts(charts.draw_accuracy(run))


def test_nothing_to_draw_is_none(tmp_path: Path) -> None:
    one = trial_table.read_trials(synthetic.write_run(tmp_path / "a", [Way("pytorch", labelled=False)], samples=5))
    assert list(printed.drawn(one)) == ["latency", "rounds"]
    none = trial_table.read_trials(synthetic.write_run(tmp_path / "b", [Way("x", statuses=("failed",))]))
    assert printed.drawn(none) == {}


def test_sizes_make_a_chart(tmp_path: Path) -> None:
    ways = [Way("pytorch", size=s, seconds=s / 1e4, statuses=("ok",)) for s in (224, 256, 384)]
    figure = charts.scaling_series(
        trial_table.read_trials(synthetic.write_run(tmp_path / "r", ways, samples=5, count=5)), "size"
    )
    throughput, fps = figure.axes
    assert [t.get_text() for t in fps.get_xticklabels()] == ["224", "256", "384"]
    assert list(fps.lines[0].get_xdata()) == [224, 256, 384]
    assert fps.lines[0].get_ydata()[0] == pytest.approx(1 / 0.0224, rel=0.1)
    assert "throughput" in throughput.get_ylabel()


def test_what_has_no_bound_is_named_and_not_drawn(tmp_path: Path) -> None:
    frame = trial_table.read_trials(
        synthetic.write_run(tmp_path / "r", [Way("pytorch"), Way("a"), Way("b")], samples=5)
    )
    rows = frame.frame.copy()
    rows.loc[rows["backend"] == "b", ["speedup", "speedup_low", "speedup_high"]] = 742.0, 38.0, 14260.0
    (axes,) = charts.draw_speedup(replace(frame, frame=rows)).axes
    assert "uncertain" in [t.get_text() for t in axes.texts]
    assert axes.get_xscale() == "linear" and axes.get_xlim()[1] < 10
    assert charts.draw_speedup(replace(frame, frame=rows[rows["backend"] != "a"])) is None


def test_many_trials_stay_a_picture_of_bounded_size(tmp_path: Path) -> None:
    ways = [Way(f"b{i}", size=s, statuses=("ok",), labelled=False) for i in range(30) for s in (1, 2, 3, 4)]
    figure = charts.draw_latency(trial_table.read_trials(synthetic.write_run(tmp_path / "r", ways, samples=3, count=2)))
    assert sum(len(a.patches) for a in figure.axes) <= charts.MOST_BARS
    assert figure.texts[0].get_text() == "2 more groups are in results.csv"


def test_one_backend_one_colour_one_precision_one_marker() -> None:
    assert len({style.color(b) for b in style.COLORS}) == len(style.COLORS)
    assert style.color("my_engine") == style.color("my_engine")
    assert len(set(style.MARKERS.values())) == len(set(style.HATCHES.values())) == len(PRECISIONS)


@pytest.mark.slow
def test_row_labels_do_not_overlap(run: RunData) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for figure in printed.drawn(run).values():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        for axes in figure.axes:
            low, high = sorted(axes.get_ylim())
            ticks = [t for at, t in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True) if low <= at <= high]
            shown = [t for t in [*ticks, *axes.texts, axes.xaxis.label, axes.yaxis.label] if t.get_text()]
            boxes = [t.get_window_extent(canvas.get_renderer()) for t in shown]
            bad = [(a.get_text(), b.get_text()) for i, a in enumerate(shown) for j, b in enumerate(shown)
                   if i < j and boxes[i].padded(-0.5).overlaps(boxes[j].padded(-0.5))]  # fmt: skip
            assert bad == []


def test_png_and_svg(run: RunData, tmp_path: Path) -> None:
    figure = charts.draw_speedup(run)
    style.save(figure, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        assert image.width > 800
        assert len(image.convert("RGB").getcolors(1 << 20)) > 20
    text = style.svg(figure, "p1")
    root = ElementTree.fromstring(text)
    assert root.get("viewBox")
    assert root.get("width") is None
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert ids and all(i.startswith("p1-") for i in ids)
    assert {h[1:] for h in re.findall(r'href="(#[^"]*)"', text)} <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)
    assert style.svg(charts.draw_speedup(run), "p1") == text


@pytest.mark.slow
def test_a_figure_that_is_laid_out_once_looks_as_if_each_file_did_it(run: RunData, tmp_path: Path) -> None:
    figures = printed.drawn(run)
    for name, other in printed.drawn(run).items():
        style.save(other, tmp_path / "own.png")
        style.save(figures[name], tmp_path / "once.png", style.laid_out(figures[name]))
        with Image.open(tmp_path / "own.png") as own, Image.open(tmp_path / "once.png") as once:
            assert own.size == once.size and own.tobytes() == once.tobytes()
            width, height = (round(pixels / style.DPI * 72) for pixels in own.size)
        box = ElementTree.fromstring(style.svg(figures[name], "p", style.laid_out(figures[name]))).get("viewBox")
        assert [round(float(x)) for x in box.split()] == pytest.approx([0, 0, width, height], abs=1)


def test_hostile_names_are_text_in_the_drawing(hostile_names: Results) -> None:
    for figure in printed.drawn(trial_table.read_trials(hostile_names)).values():
        text = style.svg(figure, "x")
        assert "<script" not in text
        assert any("<script>" in (e.text or "") for e in ElementTree.fromstring(text).iter())
