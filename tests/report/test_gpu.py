"""GPU trials: the clock used, telemetry, and effects of throttling and other processes on the card."""

import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pynvml
import pytest

import printed
import synthetic
from dyno.regression import compare_table
from dyno.report import report
from dyno.report.charts import over_time
from dyno.report.tables import gpu_table, trial_table
from dyno.report.verdict import verdict
from dyno.results import remarks, timeline
from dyno.results.timeline import CLOCK_REASONS, THROTTLING_BITS, Trace, find_clean
from dyno.results.trial_result import Results, TrialResult, clock_of, load_run
from synthetic import Way
from synthetic_card import Card

HOT = 0x40


def results(path: Path, *ways: Way, samples: int = 200) -> Results:
    return load_run(synthetic.write_run(path / "run", list(ways), samples=samples, count=20))


def one(path: Path, card: Card, seconds: float = 0.004, **more: object) -> TrialResult:
    return results(path, Way("pytorch", seconds=seconds, card=card, **more)).trials[0]  # type: ignore[arg-type]


def said(found: Results) -> str:
    return "\n".join(verdict.list_sentences(trial_table.read_trials(found)))


def trace(reasons: list[int], step: float = 1.0, **columns: list[float]) -> Trace:
    at = 100 + step * np.arange(1, len(reasons) + 1)
    found = {"gpu_throttle": np.asarray(reasons, float), **{k: np.asarray(v, float) for k, v in columns.items()}}
    return Trace(at, found, 100.0, 1e9, 0.0)


def test_clock_reasons_match_nvml() -> None:
    named = {
        "idle": "GpuIdle", "application clocks": "ApplicationsClocksSetting", "power cap": "SwPowerCap",
        "hardware slowdown": "HwSlowdown", "sync boost": "SyncBoost", "thermal limit (driver)": "SwThermalSlowdown",
        "thermal limit (hardware)": "HwThermalSlowdown", "power brake": "HwPowerBrakeSlowdown",
        "display clock": "DisplayClockSetting",
    }  # fmt: skip
    assert {words: bit for bit, words in CLOCK_REASONS.items()} == {
        words: getattr(pynvml, f"nvmlClocksEventReason{name}") for words, name in named.items()
    }
    assert [words for bit, words in CLOCK_REASONS.items() if bit & THROTTLING_BITS] == [
        "hardware slowdown", "thermal limit (driver)", "thermal limit (hardware)", "power brake"]  # fmt: skip


def test_tables_show_gpu_times_where_available(tmp_path: Path) -> None:
    found = results(tmp_path, Way("pytorch", card=Card(gap=0.002)), Way("tensorrt", seconds=0.002, card=Card()))
    table = trial_table.read_trials(found).frame.set_index("backend")
    for t in found:
        gpu = [np.median(r.raw_samples("latency", "model", "gpu")) for r in t.good]
        assert table.loc[t.backend, "latency_model_ms_median"] == pytest.approx(1e3 * statistics.geometric_mean(gpu))
        assert [np.median(r.raw_samples("latency", "model")) for r in t.good] == gpu, "also where no clock is named"
    assert set(table["clock"]) == {"gpu"}
    assert table.loc["pytorch", "outside_gpu_ms"] == pytest.approx(2, rel=0.05)
    assert table.loc["tensorrt", "speedup"] == pytest.approx(5, rel=0.1)  # GPU clock: 10 against 2 ms, not 12


def test_one_engine_without_gpu_events_makes_the_group_use_host_times(tmp_path: Path) -> None:
    found = results(
        tmp_path, Way("pytorch", card=Card(gap=0.010)), Way("other", seconds=0.010, card=Card(events=False))
    )
    table = trial_table.read_trials(found).frame.set_index("backend")
    assert set(table["clock"]) == {"host"}
    assert table.loc["other", "speedup"] == pytest.approx(2, rel=0.1)
    assert table.loc["pytorch", "latency_ms"] == pytest.approx(20, rel=0.1)
    assert table.loc["pytorch", "latency_model_ms_median"] == pytest.approx(10, rel=0.1)
    assert math.isnan(table.loc["other", "outside_gpu_ms"])
    assert "compared by the host's clock" in said(found)
    assert [clock_of("model", t) for t in found] == ["gpu", "host"]


def test_two_runs_are_compared_by_their_common_clock(tmp_path: Path) -> None:
    a = results(tmp_path / "a", Way("pytorch", card=Card(gap=0.010)))
    b = results(tmp_path / "b", Way("pytorch", seconds=0.020, card=Card(events=False)))
    c = results(tmp_path / "c", Way("pytorch", card=Card(gap=0.020)))
    assert compare_table.compare_runs(a, b).rows[0]["ratio"] == pytest.approx(1, rel=0.05)
    assert compare_table.compare_runs(a, c).rows[0]["ratio"] == pytest.approx(1, rel=0.05)


def test_trials_have_gpu_figures(tmp_path: Path) -> None:
    found = results(tmp_path, Way("pytorch", card=Card(reasons=0x4, held=(-0.1, 1.1))))
    r = trial_table.read_trials(found).frame.iloc[0]
    assert r["gpu_memory_mb"] == pytest.approx(2500)  # earlier memory is not counted
    assert r["gpu_util"] == pytest.approx(90)
    assert r["gpu_clock_mhz"] == 1200
    assert r["gpu_power_w"] == pytest.approx(412.5)
    assert r["gpu_temperature_c"] == pytest.approx(61)
    assert r["throttle"] == "power cap 100 %"
    assert (r["throttled_samples"], r["gpu_others"], r["warnings"]) == (0, 0, 0)
    assert "limited by its power cap for 100 % of the time" in " ".join(remarks.list_notes(found.trials[0]))


def test_cpu_trials_have_no_gpu_figures(demo: Results) -> None:
    table = trial_table.read_trials(demo).frame
    gpu = [c for c in table.columns if c.startswith("gpu_") or c in ("outside_gpu_ms", "throttled_samples")]
    assert len(gpu) == 8
    assert table[gpu].isna().all(axis=None)
    assert "gpu" not in printed.every(trial_table.read_trials(demo))
    assert over_time.over_time(trial_table.read_trials(demo)) is None
    assert set(table.loc[table["boundary"] != "", "clock"]) == {"host"}


@pytest.mark.parametrize("reason", [bit for bit in CLOCK_REASONS if bit & THROTTLING_BITS])
def test_throttled_samples_are_dropped_counted_and_reported(tmp_path: Path, reason: int) -> None:
    found = results(tmp_path, Way("pytorch", card=Card(reasons=reason, held=(0.5, 0.75), gap=0.001)))
    t = found.trials[0]
    for boundary in ("model", "all"):
        taken, hit, lost = t.good[0].count_throttled(boundary)
        assert taken == 200 and hit == lost
        assert 50 <= hit <= 50 + 2 * 200 * 0.1 / 2  # a quarter, and up to 0.1 s on each side of a window of 2 s
        kept = t.good[0].samples("latency", boundary)
        every = t.good[0].raw_samples("latency", boundary)
        assert np.array_equal(kept, np.concatenate([every[: (first := _first_gap(kept, every))], every[first + hit :]]))
        assert 80 <= first <= 100
    assert len(t.good[0].samples("throughput", "throughput")) == 10
    assert trial_table.read_trials(found).frame["throttled_samples"][0] == sum(
        r.count_throttled(b)[1] for r in t.good for b in ("model", "all")
    )
    warnings = remarks.list_warnings(t)
    assert len(warnings) == 2 and warnings[0].startswith("model: ") and CLOCK_REASONS[reason] in warnings[0]
    assert "600 samples were taken while the GPU was throttled" in warnings[0] and "dropped" in warnings[0]
    assert f"The GPU was throttled ({CLOCK_REASONS[reason]}) during 1 of 1 trial" in said(found)


def _first_gap(kept: np.ndarray, every: np.ndarray) -> int:
    """Return the index of the first missing sample."""
    return int(np.argmin(np.append(kept == every[: len(kept)], False)))


def test_a_permanently_throttled_gpu_keeps_its_samples_with_a_warning(tmp_path: Path) -> None:
    t = one(tmp_path, Card(reasons=HOT, held=(-1, 2)))
    assert len(t.samples("latency", "model")) == 600
    assert remarks.list_warnings(t)[0] == ("model: 600 of 600 samples were taken while the GPU was throttled "
                               "(thermal limit (hardware)) and are kept, since too few would be left")  # fmt: skip


def test_no_sample_is_dropped_without_windows_or_a_valid_trace(tmp_path: Path) -> None:
    t = one(tmp_path, Card(reasons=HOT, held=(0.5, 0.75)))
    for r in t.rounds:
        r.record = replace(r.record, facts=replace(r.record.facts, timed={}))
    assert len(t.samples("latency", "model")) == 600
    assert t.gpu is not None and t.gpu.memory == 2.5e9 and math.isnan(t.gpu.utilisation)
    for r in t.rounds:
        (r.folder / "telemetry.npz").write_bytes(b"PK")
    again = load_run(tmp_path / "run").trials[0]
    assert again.gpu is None and not remarks.list_warnings(again)
    assert len(again.samples("latency", "model")) == 600


def test_throttling_reaches_from_the_last_clean_sample_to_the_next() -> None:
    assert trace([0, 4, HOT, HOT | 4, 1, 0x8]).throttled == [(102, 105), (105, math.inf)]
    assert trace([0x20, 0]).throttled == [(-math.inf, 102)]
    assert trace([0, 0]).throttled == []
    assert trace([]).throttled == []


def test_a_sample_is_clean_when_it_lies_outside_the_throttling() -> None:
    samples = np.full(10, 1.0)
    assert find_clean(samples, (0, 10), [(2.5, 4.5)]).tolist() == [True] * 2 + [False] * 3 + [True] * 5
    assert (
        find_clean(samples, (0, 20), [(4, 6)]).tolist() == [True, True, False] + [True] * 7
    )  # the loop took twice as long
    assert find_clean(samples, (0, 10), [(-math.inf, 1), (9, math.inf)]).sum() == 8
    assert find_clean(samples, (0, 10), [(20, 30)]).all()
    assert find_clean(np.empty(0), (0, 10), [(0, 1)]).size == 0


@pytest.mark.parametrize(
    ("card", "sentence"),
    [
        (Card(gap=0.001), r"launch-bound: 1.0"),
        (Card(gap=0.0001), ""),  # 2.5 % of 4 ms
        (Card(gap=0.0001, enqueue=0.0039), "launch-bound: run() returns after 3.90 ms"),
        (Card(gap=0.0001, enqueue=0.001), ""),
        (Card(events=False), None),
    ],
)
def test_launch_overhead_is_reported(tmp_path: Path, card: Card, sentence: str | None) -> None:
    found = results(tmp_path, Way("pytorch", seconds=0.004, card=card))
    launch = remarks.describe_launch(found.trials[0])
    assert (launch is None) == (sentence is None)
    if launch is not None:
        assert launch.sentence.startswith(str(sentence)) and bool(launch.sentence) == bool(sentence)
        assert (f"digits pytorch fp32 b1 64: {launch.sentence}." in said(found)) == bool(sentence)
        assert ("launch-bound" in " ".join(remarks.list_notes(found.trials[0]))) == bool(sentence)


def test_a_launch_gap_of_ten_microseconds_is_not_reported(tmp_path: Path) -> None:
    launch = remarks.describe_launch(one(tmp_path, Card(gap=9e-6), seconds=1e-4))
    assert launch is not None and launch.outside > 0.05 * launch.host and launch.sentence == ""


def test_85_percent_of_a_batch_are_the_bound() -> None:
    times = [(0.85, 0.84), (0.84, 0.84), (0.85, 0.85)]  # in copies and in the model
    assert [remarks.CopyTimes(1.0, model, copies).is_bound for copies, model in times] == [True, False, False]


@pytest.mark.parametrize(("copies", "is_bound"), [(0.012, True), (0.0039, False), (0.002, False), (0.0, False)])
def test_copies_that_bound_the_throughput_are_named(tmp_path: Path, copies: float, is_bound: bool) -> None:
    """The model takes 4 ms per batch; 12 ms of overlapping copies bound the throughput. Where copies and
    model take equally long, both do."""
    ways = [Way("tensorrt", "fp16", 0.004 / (0.3 + 0.7 * b), batch=b, card=Card(copies=copies)) for b in (1, 8)]
    found = results(tmp_path, *ways)
    measured = remarks.describe_copies(found.trials[-1])
    assert measured is not None and measured.is_bound is is_bound
    assert measured.model == pytest.approx(0.0041, rel=0.05)
    if is_bound:
        assert (measured.copies, measured.batch) == pytest.approx((0.012, 0.012), rel=0.05)
    advice = "the model 4.1"
    assert ("copies bound the throughput" in said(found)) is is_bound
    assert (measured.sentence in remarks.list_notes(found.trials[-1])) is is_bound
    assert (("tensorrt@input=uint8 copies a quarter" in said(found)) and advice in said(found)) is is_bound


@pytest.mark.parametrize(
    ("card", "words"),
    [
        (Card(), ""),
        (Card(others=1), "another process was on the GPU meanwhile"),
        (Card(others=3, busy=40), "3 other processes were on the GPU meanwhile; it was 40 % busy before the job began"),
        (Card(visible=False), ""),  # a single process must be the job's
        (Card(visible=False, others=1), "another process was on the GPU meanwhile"),
        (Card(busy=40), "others used the GPU: it was 40 % busy before the job began"),
        (Card(busy=3), ""),
    ],
)
def test_other_processes_on_the_gpu_are_reported(tmp_path: Path, card: Card, words: str) -> None:
    found = results(tmp_path, Way("pytorch", card=card), Way("tensorrt", card=Card()))
    t = next(t for t in found if t.backend == "pytorch")
    assert remarks.describe_others(t) == words
    assert remarks.list_warnings(t) == ([words] if words else [])
    assert ("Others used the GPU during 1 of 2 trials" in said(found)) == bool(words)
    assert trial_table.read_trials(found).frame.set_index("backend").loc["pytorch", "gpu_others"] == card.others


def test_the_previous_job_is_not_taken_for_another_process() -> None:
    """NVML's moving average still includes the previous job in the first samples."""
    found = trace([0] * 6, util=[0] * 6, gpu_util=[80, 30, 0, 0, 90, 95], gpu_memory=[1e9] * 4 + [3e9] * 2)
    assert timeline.summarise_timeline(found, []).busy_before == 0
    soon = trace([0] * 3, gpu_util=[80, 90, 95], gpu_memory=[1e9, 3e9, 3e9])
    assert math.isnan(timeline.summarise_timeline(soon, []).busy_before)


def test_memory_used_before_the_job_is_reported(tmp_path: Path) -> None:
    t = one(tmp_path, Card(before=20e9))
    assert "20.0 GB of the GPU's memory were in use before the job began" in remarks.list_notes(t)
    assert t.gpu is not None and t.gpu.memory == 2.5e9
    for place, is_first in ((0, True), (1, False)):  # the later jobs of a set find the earlier ones' memory
        turns = {"set": "s", "place": place, "together": 1}
        notes = remarks.list_notes(one(tmp_path / f"{place}", Card(before=20e9), facts={"turns": turns}))
        assert any("in use before" in note for note in notes) is is_first


def test_telemetry_without_its_start_is_no_timeline(tmp_path: Path) -> None:
    arrays = {"at": np.arange(3.0), "gpu_memory": np.full(3, 1e9), "epoch": np.float64(100)}
    for names in (["at", "gpu_memory"], ["at", "epoch"]):
        np.savez(tmp_path / "telemetry.npz", **{name: arrays[name] for name in names})
        assert timeline.read_timeline(tmp_path) is None


def test_nan_is_unknown_and_not_zero() -> None:
    empty = trace([0, 0], gpu_util=[math.nan] * 2, gpu_memory=[math.nan] * 2)
    found = timeline.summarise_timeline(empty, [(100, 103)])
    assert all(math.isnan(x) for x in (found.memory, found.utilisation, found.clock, found.power, found.temperature))
    assert (found.other_processes, found.reasons) == (0, {})
    assert timeline.join_timelines([]) is None
    joined = timeline.join_timelines([found, timeline.TelemetrySummary(utilisation=50, reasons={"heat": 0.4})])
    assert joined is not None and (joined.utilisation, joined.reasons) == (50, {"heat": 0.4})


def test_the_report_has_the_gpu_over_time(tmp_path: Path) -> None:
    ways = [Way(b, seconds=s, batch=n, card=Card(reasons=HOT, held=(0.5, 0.6), others=1))
            for b, s in (("pytorch", 0.004), ("tensorrt", 0.001), ("a", 0.002), ("b", 0.003), ("c", 0.005))
            for n in (1, 8)]  # fmt: skip
    found = results(tmp_path, *ways, samples=50)
    memory, utilisation, *_, strip = over_time.over_time(trial_table.read_trials(found)).axes
    names = [line.get_label() for line in memory.lines]
    assert names == ["pytorch fp32", "tensorrt fp32", "a fp32", "b fp32"]  # the reference, then the fastest trials
    assert memory.lines[0].get_ydata().max() == pytest.approx(2.5)
    assert memory.lines[0].get_xdata()[0] == pytest.approx(0.1)
    assert utilisation.lines[0].get_ydata().max() == 90
    assert len(strip.patches) == 3 * 4  # measurement windows
    page = report.write_report([trial_table.read_trials(found)], tmp_path / "out").read_text(encoding="utf-8")
    assert "SM utilisation, %" in page and "batch 8, cuda:0 (1 more in results.csv)" in page
    assert "GPU’s clock" in page and "were dropped" in page and "another process was on the GPU" in page
    assert (tmp_path / "out/charts/over-time.png").stat().st_size > 10_000
    rounds = gpu_table.rounds_of(found.trials[0])
    assert [row["clock"] for row in rounds[:3]] == ["gpu", "host", "host"] and rounds[0]["round"] == 1
    assert len(pd.read_csv(tmp_path / "out/results.csv")) == 10


def test_the_printed_table_shows_the_gpu(tmp_path: Path) -> None:
    found = results(tmp_path, Way("pytorch", card=Card(reasons=HOT, held=(0.5, 0.6))))
    text = printed.trials(trial_table.read_trials(found), "markdown")
    assert "GPU MB" in text and "2,500" in text and "thermal limit (hardware) " in text
