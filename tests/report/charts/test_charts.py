"""Charts: content, missing data, names kept as text, and distinguishable colours."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

import printed
import synthetic
from dyno.report import style
from dyno.report.charts import charts
from dyno.report.tables import trial_table
from dyno.results.run_data import RunData
from dyno.results.trial_result import Results
from dyno.worker.record import write_json
from dyno.worker.spec import PRECISIONS, SCHEMA
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
        "latency", "speedup", "rounds", "accuracy-latency", "accuracy-throughput", "throughput-batch",
        "speedup-batch", "confusion",
    ]  # fmt: skip
    assert list(drawn) == names
    assert all(isinstance(f, Figure) for f in drawn.values())


def test_no_chart_area_is_white_on_a_dark_page(run: RunData) -> None:
    """Fixed colours are mid-tones, visible on white and on dark; all others follow the page or are text."""
    for name, figure in printed.drawn(run).items():
        areas = set(re.findall(r'<path [^>]*style="fill: (#[0-9a-f]{6})', style.render_svg(figure, "x")))
        assert not [c for c in areas if sum(int(c[k : k + 2], 16) for k in (1, 3, 5)) > 3 * 0xD0], name


def test_bars_are_sorted_and_lengths_are_latencies(run: RunData) -> None:
    axes = charts.draw_latency(run).axes[0]
    lengths = [p.get_width() for p in axes.patches]
    assert lengths == sorted(lengths)
    assert len(lengths) == 9
    assert axes.get_yticklabels()[0].get_text() == "openvino int8"
    assert lengths[0] == pytest.approx(run.frame.query("precision == 'int8' and batch == 1")["latency_ms"].min())


def test_the_frontier_is_named(run: RunData) -> None:
    assert "frontier (ringed), fastest first: openvino int8, openvino bf16" in texts(charts.draw_accuracy(run))


def test_charts_without_data_are_omitted(tmp_path: Path) -> None:
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


def test_bars_beyond_the_axis_end_in_an_arrow(tmp_path: Path) -> None:
    frame = trial_table.read_trials(
        synthetic.write_run(tmp_path / "r", [Way("pytorch"), Way("a"), Way("b")], samples=5)
    )
    rows = frame.frame.copy()
    rows.loc[rows["backend"] == "b", ["speedup", "speedup_low", "speedup_high"]] = 742.0, 38.0, 14260.0
    (axes,) = charts.draw_speedup(replace(frame, frame=rows)).axes
    assert {"≥38.00x", "speed-up"} <= {t.get_text() for t in axes.texts}
    arrows = [line for line in axes.lines if line.get_marker() == ">"]
    assert arrows and all(line.get_xdata()[0] == axes.get_xlim()[1] for line in arrows)
    assert axes.get_xscale() == "linear" and axes.get_xlim()[1] < 10
    assert charts.draw_speedup(replace(frame, frame=rows[rows["backend"] != "a"])) is None


def test_charts_of_many_trials_have_a_bounded_size(tmp_path: Path) -> None:
    ways = [Way(f"b{i}", size=s, statuses=("ok",), labelled=False) for i in range(30) for s in (1, 2, 3, 4)]
    figure = charts.draw_latency(trial_table.read_trials(synthetic.write_run(tmp_path / "r", ways, samples=3, count=2)))
    assert sum(len(a.patches) for a in figure.axes) <= charts.MAX_BARS
    assert figure.texts[0].get_text() == "2 more groups are in results.csv"


def test_each_backend_has_a_colour_and_each_precision_a_marker() -> None:
    assert len({style.choose_color(b) for b in style.COLORS}) == len(style.COLORS)
    assert style.choose_color("my_engine") == style.choose_color("my_engine")
    assert len(set(style.MARKERS.values())) == len(set(style.HATCHES.values())) == len(PRECISIONS)


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
    text = style.render_svg(figure, "p1")
    root = ElementTree.fromstring(text)
    assert root.get("viewBox")
    assert root.get("width") is None
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert ids and all(i.startswith("p1-") for i in ids)
    assert {h[1:] for h in re.findall(r'href="(#[^"]*)"', text)} <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)
    assert style.render_svg(charts.draw_speedup(run), "p1") == text


def test_a_shared_layout_gives_the_same_files(run: RunData, tmp_path: Path) -> None:
    figures = printed.drawn(run)
    for name, other in printed.drawn(run).items():
        style.save(other, tmp_path / "own.png")
        style.save(figures[name], tmp_path / "once.png", style.laid_out(figures[name]))
        with Image.open(tmp_path / "own.png") as own, Image.open(tmp_path / "once.png") as once:
            assert own.size == once.size and own.tobytes() == once.tobytes()
            width, height = (round(pixels / style.DPI * 72) for pixels in own.size)
        box = ElementTree.fromstring(style.render_svg(figures[name], "p", style.laid_out(figures[name]))).get("viewBox")
        assert [round(float(x)) for x in box.split()] == pytest.approx([0, 0, width, height], abs=1)


def test_hostile_names_are_plain_text_in_charts(hostile_names: Results) -> None:
    for figure in printed.drawn(trial_table.read_trials(hostile_names)).values():
        text = style.render_svg(figure, "x")
        assert "<script" not in text
        assert any("<script>" in (e.text or "") for e in ElementTree.fromstring(text).iter())


@pytest.fixture(scope="module")
def run_of_models(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """Two models, two sizes, two batches, three trials each; two of the three differ only by an option."""
    ways = [
        Way(backend, "fp32", seconds * factor, batch=batch, size=size, model=model, options=options)
        for model, seconds in (("small", 0.001), ("large", 0.1)) for size in (64, 128) for batch in (1, 8)
        for backend, factor, options in (("pytorch", 1.0, {}), ("openvino", 0.5, {}), ("openvino", 0.4, {"streams": 2}))
    ]  # fmt: skip
    folder = synthetic.write_run(tmp_path_factory.mktemp("runs") / "r", ways, samples=10, count=5)
    rows = [{"model": m, "size": str(s), "flops": 10**9} for m in ("small", "large") for s in (64, 128)]
    write_json(folder / "models.json", {"schema": SCHEMA, "models": rows})
    (folder / "peak").mkdir()
    peak = {"fp32": {"flops_per_s": 5e12, "side": 512, "window": [0, 1]}}
    write_json(folder / "peak" / "record.json", {"schema": SCHEMA, "status": "ok", "facts": {"peak": peak}})
    return trial_table.read_trials(folder)


def test_everything_is_drawn(run_of_models: RunData, tmp_path: Path) -> None:
    drawn = printed.drawn(run_of_models)
    assert {"inference-time", "speedup-size", "speedup-batch", "tflops-batch", "tflops-size"} <= set(drawn)
    style.save(drawn["inference-time"], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 10_000


def test_bars_are_grouped_by_model_on_a_log_axis(run_of_models: RunData) -> None:
    figure = charts.inference_time(run_of_models)
    assert [axes.get_title("left") for axes in figure.axes] == [
        f"size {s}, batch {b}" for s in (64, 128) for b in (1, 8)
    ]
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["large", "small"]
    assert len(axes.patches) == 6
    assert {to_hex(p.get_facecolor()) for p in axes.patches} == {"#0072b2", "#009e73"}
    assert "ms" in axes.get_ylabel()


def test_unbounded_speed_ups_are_not_drawn(tmp_path: Path) -> None:
    ways = [
        Way(backend, "fp32", seconds, spread=spread if batch == 1 else 0.01, batch=batch)
        for backend, seconds, spread in (("pytorch", 0.01, 3.0), ("a", 0.004, 0.01), ("b", 0.002, 0.01))
        for batch in (1, 4, 8)
    ]
    run_of_models = trial_table.read_trials(synthetic.write_run(tmp_path / "r", ways, samples=10, count=5))
    (axes,) = charts.draw_speedups(run_of_models, "batch").axes
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) > 1 and line.get_marker() != "None"]
    assert [list(line.get_xdata()) for line in lines] == [[4, 8]] * 3
    panels = [axes.get_title("left") for axes in charts.draw_speedup(run_of_models).axes]
    assert panels == ["digits, size 64, batch 4", "digits, size 64, batch 8"]


def test_the_second_of_two_like_styled_lines_has_hollow_markers(run_of_models: RunData) -> None:
    axes = charts.draw_speedups(run_of_models, "size").axes[0]
    faces = [line.get_markerfacecolor() for line in axes.lines if line.get_marker() != "None"]
    assert [str(face).lower() for face in faces] == ["#0072b2", "#009e73", "white"]


def test_speedups_are_drawn_at_their_sizes(run_of_models: RunData) -> None:
    figure = charts.draw_speedups(run_of_models, "size")
    assert [axes.get_title("left") for axes in figure.axes][:2] == ["large, batch 1", "large, batch 8"]
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["64", "128"]
    first = run_of_models.frame.query("model == 'large' and batch == 1 and backend == 'openvino' and options == ''")
    assert list(figure.axes[0].lines[1].get_ydata()) == pytest.approx(list(first["speedup"]))


def test_the_peak_is_drawn_above(run_of_models: RunData) -> None:
    axes = charts.draw_tflops(run_of_models, "batch").axes[0]
    assert [t.get_text() for t in axes.texts] == ["peak\nfp32"]
    assert axes.get_ylim()[1] > 5
    assert axes.get_ylabel() == "TFLOPS achieved"


def test_one_model_at_one_size_has_no_scaling_charts(tmp_path: Path) -> None:
    one = trial_table.read_trials(synthetic.write_run(tmp_path / "a", [Way("pytorch")], samples=5, count=5))
    assert not {"inference-time", "speedup-size", "tflops-batch"} & set(printed.drawn(one))


def test_omitted_panels_are_counted(tmp_path: Path) -> None:
    ways = [Way("pytorch", batch=b, size=s, statuses=("ok",)) for s in range(32, 32 * 15, 32) for b in (1, 2)]
    run_of_models = trial_table.read_trials(synthetic.write_run(tmp_path / "a", ways, samples=5, count=5))
    figure = charts.scaling_series(run_of_models, "batch")
    assert len(figure.axes) == 2 * charts.MAX_PANELS
    assert "2 more panels" in figure.legends[0].get_title().get_text()
