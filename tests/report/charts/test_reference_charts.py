"""Charts over all models: what is drawn, and what two ways alike in colour look like."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_hex

import printed
import synthetic
from dyno.report import style
from dyno.report.charts import charts, round_charts
from dyno.report.tables import trial_table
from dyno.results.run_data import RunData
from dyno.worker.record import write_json
from dyno.worker.spec import SCHEMA
from synthetic import Way


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """Two models, two sizes, two batches, three ways of which two differ by an option alone."""
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


@pytest.mark.slow
def test_everything_is_drawn(run: RunData, tmp_path: Path) -> None:
    drawn = printed.drawn(run)
    assert {"inference-time", "speedup-size", "speedup-batch", "tflops-batch", "tflops-size"} <= set(drawn)
    style.save(drawn["inference-time"], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 10_000


def test_bars_are_grouped_by_model_on_a_log_axis(run: RunData) -> None:
    figure = round_charts.inference_time(run)
    assert [axes.get_title("left") for axes in figure.axes] == [
        f"size {s}, batch {b}" for s in (64, 128) for b in (1, 8)
    ]
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["large", "small"]
    assert len(axes.patches) == 6
    assert {to_hex(p.get_facecolor()) for p in axes.patches} == {"#0072b2", "#009e73"}
    assert "ms" in axes.get_ylabel()


def test_a_speed_up_that_has_no_bound_is_no_point(tmp_path: Path) -> None:
    ways = [
        Way(backend, "fp32", seconds, spread=spread if batch == 1 else 0.01, batch=batch)
        for backend, seconds, spread in (("pytorch", 0.01, 3.0), ("a", 0.004, 0.01), ("b", 0.002, 0.01))
        for batch in (1, 4, 8)
    ]
    run = trial_table.read_trials(synthetic.write_run(tmp_path / "r", ways, samples=10, count=5))
    (axes,) = round_charts.draw_speedups(run, "batch").axes
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) > 1 and line.get_marker() != "None"]
    assert [list(line.get_xdata()) for line in lines] == [[4, 8]] * 3
    panels = [axes.get_title("left") for axes in charts.draw_speedup(run).axes]
    assert panels == ["digits, size 64, batch 4", "digits, size 64, batch 8"]


def test_of_two_ways_alike_the_second_has_hollow_markers(run: RunData) -> None:
    axes = round_charts.draw_speedups(run, "size").axes[0]
    faces = [line.get_markerfacecolor() for line in axes.lines if line.get_marker() != "None"]
    assert [str(face).lower() for face in faces] == ["#0072b2", "#009e73", "white"]


def test_speedups_stand_at_their_sizes(run: RunData) -> None:
    figure = round_charts.draw_speedups(run, "size")
    assert [axes.get_title("left") for axes in figure.axes][:2] == ["large, batch 1", "large, batch 8"]
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["64", "128"]
    first = run.frame.query("model == 'large' and batch == 1 and backend == 'openvino' and options == ''")
    assert list(figure.axes[0].lines[1].get_ydata()) == pytest.approx(list(first["speedup"]))


def test_the_peak_is_drawn_above(run: RunData) -> None:
    axes = round_charts.draw_tflops(run, "batch").axes[0]
    assert [t.get_text() for t in axes.texts] == ["peak\nfp32"]
    assert axes.get_ylim()[1] > 5
    assert axes.get_ylabel() == "TFLOPS achieved"


def test_one_model_one_size_draws_nothing(tmp_path: Path) -> None:
    one = trial_table.read_trials(synthetic.write_run(tmp_path / "a", [Way("pytorch")], samples=5, count=5))
    assert not {"inference-time", "speedup-size", "tflops-batch"} & set(printed.drawn(one))


def test_panels_without_room_are_counted(tmp_path: Path) -> None:
    ways = [Way("pytorch", batch=b, size=s, statuses=("ok",)) for s in range(32, 32 * 15, 32) for b in (1, 2)]
    run = trial_table.read_trials(synthetic.write_run(tmp_path / "a", ways, samples=5, count=5))
    figure = charts.scaling_series(run, "batch")
    assert len(figure.axes) == 2 * charts.MOST_PANELS
    assert "2 more panels" in figure.legends[0].get_title().get_text()
