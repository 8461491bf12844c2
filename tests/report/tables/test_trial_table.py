"""The trials' data frame and its printed tables."""

import io
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import printed
import synthetic
from dyno.formatting import clean_text, escape_markdown, format_number, format_points, show
from dyno.report import tables
from dyno.report.export import export
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results.metrics.precision import read_truth
from dyno.results.run_data import RunData
from dyno.results.trial_result import Results, load_run
from dyno.worker.spec import SCHEMA, UserError
from refusals import refuses
from synthetic import Way

PROMISED = """model, backend, precision, batch, size, device, status, reason, latency_all_ms_mean,
latency_all_ms_median,
latency_all_ms_p90, latency_all_ms_p95, latency_all_ms_p99, latency_all_ms_max, latency_all_ms_std,
latency_all_ms_trimmed, latency_model_ms_mean, latency_model_ms_median, latency_model_ms_p90,
latency_model_ms_p95, latency_model_ms_p99, latency_model_ms_max, latency_model_ms_std,
latency_model_ms_trimmed, throughput_ips""".replace("\n", " ").split(", ")
METRICS = ("top1", "map50_95", "top5", "map50", "box_map50_95", "box_map50")
PROMISED += [
    f"{metric}{end}" for metric in METRICS for end in ("", "_low", "_high", "_diff", "_diff_low", "_diff_high")
]
PROMISED += """size_mb, layers, parameters, gpu_memory_mb, build_s, first_call_ms, speedup, speedup_low, speedup_high,
verdict""".replace("\n", " ").split(", ")


@pytest.fixture(scope="module")
def whole(demo: Results) -> RunData:
    return trial_table.read_trials(demo, budget={"top1": 1.2})


@pytest.fixture(scope="module")
def frame(whole: RunData) -> pd.DataFrame:
    return whole.frame


def one(frame: pd.DataFrame, way: str, batch: int = 1) -> pd.Series:
    backend, precision = way.split()
    fits = (frame["backend"] == backend) & (frame["precision"] == precision) & (frame["batch"] == batch)
    return frame[fits].iloc[0]


def run(path: Path, *ways: Way, **settings: int) -> RunData:
    return trial_table.read_trials(synthetic.write_run(path / "run", list(ways), samples=30, **settings))


def test_the_promised_columns_come_first(frame: pd.DataFrame) -> None:
    assert list(frame.columns)[: len(PROMISED)] == PROMISED
    assert len(frame) == len(synthetic.demo())


def test_numbers_match_the_samples(demo: Results, frame: pd.DataFrame) -> None:
    r = one(frame, "openvino int8")
    t = demo.trial(r["trial"])
    rounds = [1e3 * x.samples("latency", "model") for x in t.rounds]
    assert r["latency_model_ms_median"] == pytest.approx(statistics.geometric_mean(map(np.median, rounds)))
    assert r["latency_model_ms_median"] == pytest.approx(r["latency_ms"])
    assert r["latency_model_ms_p99"] == pytest.approx(statistics.geometric_mean(np.percentile(x, 99) for x in rounds))
    assert r["latency_model_ms_max"] == pytest.approx(max(map(max, rounds)))
    rates = [x.value("throughput", "throughput") for x in t.rounds]
    assert r["throughput_ips"] == pytest.approx(statistics.geometric_mean(rates))
    assert r["throughput_low"] < r["throughput_ips"] < r["throughput_high"]
    assert r["size_mb"] == 1.45
    assert (r["layers"], r["parameters"], r["images"]) == (21, 701_466, 360)
    assert r["top1_low"] < r["top1"] < r["top1_high"]
    assert r["latency_ms_low"] < r["latency_ms"] < r["latency_ms_high"]
    assert r["speedup_low"] < r["speedup"] < r["speedup_high"]
    assert r["verdict"] == "faster"
    assert r["reference"] == one(frame, "pytorch fp32")["trial"]


def test_percentiles_lie_in_their_interval_despite_a_long_tailed_round(tmp_path: Path) -> None:
    """The round's median is undisturbed, so percentile and interval both include it."""
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch", statuses=("ok",) * 6)])
    [file] = folder.glob("trials/*/r3/samples.npz")
    arrays = dict(np.load(file))
    times = arrays["latency_model"]
    arrays["latency_model"] = np.where(times > np.percentile(times, 80), 9 * times, times)
    np.savez(file, **arrays)
    row = trial_table.read_trials(load_run(folder)).frame.iloc[0]
    for name in ("p90", "p95"):
        low, value, high = (row[f"latency_model_ms_{name}{end}"] for end in ("_low", "", "_high"))
        assert low < value < high and high > 1.5 * value


def test_failed_rows_have_a_reason_and_keep_their_good_rounds(frame: pd.DataFrame) -> None:
    crashed, timeout = one(frame, "fake fp32"), one(frame, "fake bf16")
    assert (crashed["status"], crashed["rounds"], crashed["verdict"]) == ("crashed", 2, "slower")
    assert crashed["latency_model_ms_median"] > 0
    assert (timeout["status"], timeout["reason"], timeout["verdict"]) == (
        "timeout",
        "run: no sign of life for 600 s",
        "",
    )
    assert np.isnan(timeout["latency_model_ms_median"])


def test_the_reference_row_is_its_own_accuracy_reference(frame: pd.DataFrame) -> None:
    r = one(frame, "pytorch fp32")
    assert (r["speedup"], r["verdict"], r["budget"], r["top1_diff"]) == (1.0, "reference", "within", 0.0)


def test_a_given_reference_overrides_that_of_the_study(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch"), Way("openvino", seconds=0.005)], samples=30)
    for name in ("openvino", "ov/float32", "OpenVINO:FP32"):
        own = trial_table.read_trials(load_run(folder), reference=name)
        assert one(own.frame, "openvino fp32")["verdict"] == "reference"
    (folder / "study.toml").write_text('reference = "openvino"\n[budget]\ntop1 = 2.0\n')
    own = trial_table.read_trials(folder)
    assert one(own.frame, "pytorch fp32")["verdict"] == "slower"
    assert one(own.frame, "pytorch fp32")["budget"] == "within"
    assert own.budget == "top1=2"


def test_one_round_gives_a_ratio_without_a_verdict(tmp_path: Path) -> None:
    r = one(run(tmp_path, Way("pytorch", statuses=("ok",)), Way("openvino", seconds=0.005)).frame, "openvino fp32")
    assert r["verdict"] == "one round only"
    assert r["speedup"] == pytest.approx(2, rel=0.1)
    assert np.isnan(r["speedup_low"])


@pytest.mark.parametrize("statuses", [("ok",), ("ok", "ok")])
def test_a_row_without_a_speed_up_explains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: tuple[str, ...]
) -> None:
    ways = Way("pytorch", statuses=statuses), Way("openvino", seconds=0.005), Way("onnxruntime", statuses=("oom",))
    assert "no speed-up" not in printed.trials(run(tmp_path / "quiet", *ways))
    fit = trial_table._fit_latencies
    monkeypatch.setattr(trial_table, "_fit_latencies", lambda s, _: fit(s, 1e9))
    found = run(tmp_path / "disturbed", *ways)
    assert np.isnan(one(found.frame, "openvino fp32")["speedup"])
    text = " ".join(printed.trials(found).split())
    assert " openvino fp32: no speed-up, as other programs disturbed the rounds so much" in text


def test_a_speed_up_that_seems_to_contradict_the_latencies_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = Way("pytorch"), Way("openvino", seconds=0.005)
    assert "at other times" not in printed.trials(run(tmp_path / "quiet", *ways))
    monkeypatch.setattr(trial_table, "_fit_latencies", lambda s, _: replace(s, value=0.8))
    text = " ".join(printed.trials(run(tmp_path / "changed", *ways)).split())
    assert "openvino fp32: 0.80x is of measurements in turns with pytorch fp32, whose latency differed" in text


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_disturbed_latency_contradicted_by_a_quiet_one_gives_no_speed_up(tmp_path: Path, rounds: int) -> None:
    """latency/model is disturbed in every round and 30 times as long as the quiet latency/all."""
    facts = {"delays": {"model": [0.5] * 4, "all": [0.0] * 4}}
    ways = [Way("pytorch", statuses=("ok",) * rounds, facts=facts), Way("b", seconds=0.005, statuses=("ok",) * rounds)]
    folder = synthetic.write_run(tmp_path / "run", ways)
    for path in folder.glob(f"trials/{ways[0].trial.id}/r*/samples.npz"):
        with np.load(path) as stored:
            np.savez(path, **{name: each * (30 if name == "latency_model" else 1) for name, each in stored.items()})
    found = trial_table.read_trials(load_run(folder))
    row = one(found.frame, "b fp32")
    assert np.isnan(row["speedup"]) and row["verdict"] == ("one round only" if rounds == 1 else "undecided")
    assert "interleaved latencies differ by more than 2x" in " ".join(printed.trials(found).split())


def test_other_weights_are_refused_with_a_sentence(tmp_path: Path) -> None:
    r = one(run(tmp_path, Way("pytorch"), Way("openvino", facts={"weights_sha256": "f" * 64})).frame, "openvino fp32")
    assert r["verdict"] == "not comparable: different weights"
    assert np.isnan(r["speedup"])
    assert np.isnan(r["top1_diff"])


def test_the_precision_that_ran_is_shown_with_the_requested_one(whole: RunData, frame: pd.DataFrame) -> None:
    assert (one(frame, "openvino fp32")["ran_as"], one(frame, "openvino fp32")["precision_ok"]) == ("21 bf16", "no")
    assert (one(frame, "openvino int8")["ran_as"], one(frame, "openvino int8")["precision_ok"]) == (
        "20 int8, 1 fp32",
        "yes",
    )
    text = printed.trials(whole)
    assert "fp32 (ran bf16)" in text
    assert "int8 (43% int8)" in text


def test_the_precision_judgement_of_the_worker_wins(tmp_path: Path) -> None:
    judged = {"precision_truth": {"ok": False, "sentence": "says nothing"}, "layers_by_type": {}}
    found = run(tmp_path, Way("pytorch"), Way("compile", facts=judged))
    assert one(found.frame, "compile fp32")["precision_ok"] == "unconfirmed"
    assert "fp32 (unconfirmed)" in printed.trials(found)


def test_the_share_that_ran_as_requested_counts_operations(tmp_path: Path) -> None:
    most, least = ({"layers_by_type": {"int8": a, "float32": b}, "operations_by_type": {"int8": c, "float32": d}}
                   for a, b, c, d in ((2, 19, 94, 6), (19, 2, 6, 94)))  # fmt: skip
    ways = Way("openvino", "int8", 0.004, facts=most), Way("onnxruntime", "int8", 0.005, facts=least)
    found = run(tmp_path, Way("pytorch"), *ways)
    few, many = one(found.frame, "openvino int8"), one(found.frame, "onnxruntime int8")
    assert (few["ran_as"], few["asked_share"], few["precision_ok"]) == ("2 int8 (94%), 19 fp32 (6%)", 0.94, "yes")
    assert (many["ran_as"], many["asked_share"], many["precision_ok"]) == ("2 fp32 (94%), 19 int8 (6%)", 0.06, "no")
    assert "int8 (6% int8)" in printed.trials(found) and "int8 (94% int8)" not in printed.trials(found)
    words = {t.backend: ran.text for t in found.trials.values() if (ran := read_truth(t))}
    assert words["openvino"] == "ran mostly in the requested type (94% of its arithmetic)"
    assert words["onnxruntime"] == "did not run in the requested type (6% of its arithmetic)"


def test_hidden_layers_leave_the_precision_unconfirmed(tmp_path: Path) -> None:
    judged = {"ok": False, "sentence": "parts that it doesn't open: 1, so fp16 is not confirmed"}
    facts = {"precision_truth": judged, "layers_by_type": {"float16": 1, "unknown": 1}}
    found = run(tmp_path, Way("pytorch", "fp16"), Way("tensorrt", "fp16", seconds=0.001, facts=facts))
    assert one(found.frame, "tensorrt fp16")["precision_ok"] == "unconfirmed"
    assert "fp16 (unconfirmed)" in printed.trials(found) and "50% fp16" not in printed.trials(found)


@pytest.mark.parametrize(
    ("layers", "answer", "name"),
    [({"int4": 37, "bfloat16": 22}, "yes", "int4"), ({"int4": 1, "bfloat16": 20}, "no", "int4 (5% int4)"),
     ({"bfloat16": 21}, "yes", "int4 (computed in bf16)")],
)  # fmt: skip
def test_four_bit_weights_are_named_with_their_compute_type(
    layers: dict[str, int], answer: str, name: str, tmp_path: Path
) -> None:
    found = run(tmp_path, Way("pytorch", "bf16"), Way("torchao", "int4", facts={"layers_by_type": layers}))
    assert one(found.frame, "torchao int4")["precision_ok"] == answer
    assert re.search(rf"torchao +{re.escape(name)} ", printed.trials(found))


def test_build_time_covers_all_steps_and_ignores_cached_builds(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", [Way("compile", build=5.0)], samples=5)
    for number, path in enumerate(sorted(folder.glob("trials/*/r*/record.json"))):
        record = json.loads(path.read_text())
        record["measurements"].append(
            {"tag": "build", "unit": "s", "hint": "duration", "value": [0.4, 30.0, 0.5][number]}
        )
        record["facts"]["build_cached"] = number != 1
        path.write_text(json.dumps(record))
    assert trial_table.read_trials(load_run(folder)).frame["build_s"].iloc[0] == pytest.approx(35.0)


def test_trials_that_differ_in_options_are_distinguishable(tmp_path: Path) -> None:
    found = run(tmp_path, Way("pytorch"), Way("pytorch", options={"channels_last": True}))
    assert found.frame["verdict"].iloc[0] == "reference"
    assert found.frame["options"].tolist() == ["", "channels_last=True"]
    assert "channels_last=True" in printed.trials(found)


def test_exit_codes(demo: Results, tmp_path: Path) -> None:
    assert trial_table.exit_code(trial_table.read_trials(demo).frame) == 3
    good = [Way("pytorch"), Way("openvino"), Way("tensorrt", statuses=("skipped",), reason="no GPU")]
    results = load_run(synthetic.write_run(tmp_path / "good", good, samples=5))
    assert trial_table.exit_code(trial_table.read_trials(results, budget={"top1": 2.0}).frame) == 0
    bad = [Way("pytorch"), Way("openvino", "int8", flips=0.3)]
    results = load_run(synthetic.write_run(tmp_path / "bad", bad, samples=5))
    assert trial_table.exit_code(trial_table.read_trials(results).frame) == 0
    assert trial_table.exit_code(trial_table.read_trials(results, budget={"top1": 2.0}).frame) == 1


def test_an_unsupported_precision_added_by_dyno_is_only_a_note(tmp_path: Path) -> None:
    fails = {"statuses": ("failed",), "reason": "load: expected Float but found BFloat16"}
    ways = [Way("pytorch"), Way("pytorch", "bf16", **fails), Way("compile", "bf16", **fails)]
    folder = synthetic.write_run(tmp_path / "run", ways, samples=5)
    assert trial_table.read_trials(folder).records.failed_additions == [], "its backends were named"
    (folder / "study.toml").write_text('models = ["digits"]\n', encoding="utf-8")
    run = trial_table.read_trials(folder)
    added = [t.id for t in run.records.failed_additions]
    assert len(added) == 2 and trial_table.exit_code(run.frame, unasked=added) == 0
    lines = " ".join(verdict.read_verdict(run).sentences)
    assert "2 rows in bf16, which Dyno added, failed (" in lines and "did not finish" not in lines
    fp32 = [Way("pytorch"), Way("compile", **fails), Way("compile", "bf16", **fails)]
    folder = synthetic.write_run(tmp_path / "other", fp32, samples=5)
    (folder / "study.toml").write_text('models = ["digits"]\n', encoding="utf-8")
    assert load_run(folder).failed_additions == [], "compile fails in any precision"


def test_text_tables_fit_hide_empty_columns_and_name_failures(whole: RunData) -> None:
    text = printed.trials(whole, width=100)
    assert max(map(len, [line for line in text.splitlines() if not line.startswith("  ")])) <= 100
    assert "digits, size 64, batch 8" in text
    assert "latency ms" in text and "median" not in text
    assert "gpu" not in text
    assert "  fake bf16 timeout: run: no sign of life for 600 s" in text
    piped = printed.trials(whole)
    assert max(map(len, piped.splitlines())) <= 120 and len(re.split(" {2,}", piped.splitlines()[2])) == 8
    assert piped.count("more columns: dyno show --columns all") == 1
    assert "change, points" not in piped
    every = export([tables.make_tables(whole, "trials")[0]], subset="all")
    assert "change, points" in every.splitlines()[2] and "more columns" not in every
    chosen = export([tables.make_tables(whole, "trials")[0]], subset="backend, latency_ms").splitlines()[2]
    assert chosen.split() == ["backend", "latency", "ms"]
    refuses("there is no column 'latency'", export, [tables.make_tables(whole, "trials")[0]], subset="latency")


def test_rows_are_printed_by_speed_and_the_first_is_bold(whole: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [line.split() for line in printed.trials(whole).splitlines()[4:16]]
    assert [" ".join(row[:2]) for row in rows[:3]] == ["openvino bf16", "openvino fp32", "onnxruntime fp32"]
    assert rows[-1][-1] in ("skipped", "timeout", "oom", "crashed"), "what has no latency is last"
    open_row = next(row for row in rows if row[:2] == ["openvino", "int8"])
    assert "images" in open_row and "?" in open_row, "undecided under the budget, it can't come first"
    assert "\x1b" not in printed.trials(whole)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in printed.trials(whole, width=120)
    monkeypatch.setenv("TERM", "xterm")
    bold = [line for line in printed.trials(whole, width=120).splitlines() if line.startswith("\x1b[1m")]
    assert len(bold) == 2 and all(line.startswith("\x1b[1mopenvino") for line in bold), "one of each batch"
    assert "\x1b" not in printed.trials(whole, "markdown", width=120)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"verdict": "undecided", "more_rounds": 4.0}, "? 4 rounds"),
        ({"verdict": "undecided", "more_rounds": 1.0, "builds": 3}, "? 1 build"),
        ({"verdict": "undecided", "more_rounds": 101.0}, "? >100 rounds"),
        ({"verdict": "equivalent", "equivalent": 2.0}, "equal ±2 %"),
        ({"verdict": "one round only"}, "? one round"),
        ({"verdict": "wrong outputs: off by 20 %"}, "wrong outputs"),
        ({"verdict": "faster", "budget": "over"}, "over budget"),
        ({"verdict": "faster", "budget": "undecided", "more_images": 25}, "? 25 images"),
        ({"verdict": "faster", "budget": "within"}, "faster"),
        ({"status": "oom", "verdict": ""}, "oom"),
    ],
)
def test_outcomes_are_abbreviated(row: dict[str, object], text: str) -> None:
    assert trial_table.format_outcome({"status": "ok", **row}) == text


def test_tables_are_grouped_by_a_column(whole: RunData) -> None:
    text = printed.trials(whole, by="backend")
    assert re.findall(r"^backend (\w+)$", text, re.M)[:3] == ["pytorch", "compile", "fake"]
    assert "batch" in text.splitlines()[2]
    for name, near in (
        ("bakcend", "did you mean backend"),
        ("throughput", "throughput_ips"),
        ("engine", "--format csv"),
    ):
        with pytest.raises(UserError, match=near) as e:
            printed.trials(whole, by=name)
        assert len(str(e.value)) < 160
    refuses("unknown format 'xml'", printed.trials, whole, "xml")


def test_csv_and_json_match_the_table(whole: RunData, frame: pd.DataFrame) -> None:
    back = pd.read_csv(io.StringIO(printed.trials(whole, "csv")))
    assert list(back.columns) == list(frame.columns)
    assert back["speedup"].to_numpy() == pytest.approx(frame["speedup"].to_numpy(), nan_ok=True)
    assert back["layers"].dropna().unique().tolist() == [21]
    found = json.loads(printed.trials(whole, "json"), parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    rows = found["tables"]["trials"]["rows"]
    assert found["schema"] == SCHEMA and len(rows) == len(frame)
    assert [c["name"] for c in found["tables"]["trials"]["columns"]] == list(frame.columns)
    assert all(c["meaning"] and c["kind"] for c in found["tables"]["trials"]["columns"])
    assert next(r for r in rows if r["status"] == "oom")["latency_model_ms_median"] is None
    assert isinstance(rows[0]["batch"], int)


def test_hostile_names_stay_text(hostile_names: Results) -> None:
    found = trial_table.read_trials(hostile_names)
    assert "модель" in printed.trials(found, "json")
    own = export([], "html").count("<script")
    assert printed.trials(found, "html").count("<script") == own, "the page's own"
    text = printed.trials(found, "markdown")
    assert "<script" not in text
    assert "<img" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_terminal_text_has_no_control_characters() -> None:
    assert clean_text("a\x1b[31mb\nc\td") == "a [31mb c d"
    assert escape_markdown("snake_case _x_ `a|b` <i> [l](u)") == r"snake_case \_x\_ \`a\|b\` &lt;i&gt; \[l\](u)"


@pytest.mark.parametrize(
    ("value", "hint", "shown"),
    [(0.000816, "duration", "816 µs"), (0.0012249, "duration", "1.22 ms"), (35.0, "duration", "35.0 s"),
     (200.0, "duration", "3 min 20 s"), (1.45e6, "bytes", "1.45 MB"), (701_466.0, "count", "701,466"),
     (12_345.0, "rate", "12,300/s"), (0.9889, "percentage", "98.9 %"), (None, "duration", ""),
     (float("nan"), "rate", ""), (0.0, "duration", "0 ns"), (0.9996, "duration", "1,000 ms")],
)  # fmt: skip
def test_values_are_formatted_by_hint(value: float | None, hint: str, shown: str) -> None:
    assert show(value, hint) == shown


def test_significant_digits() -> None:
    assert [format_number(v) for v in (0.8126, 18.84, 1020.4, 9.996, 0.0123, -2.5)] == [
        "0.813", "18.8", "1,020", "10.0", "0.0123", "-2.50"]  # fmt: skip
    assert [format_number(v, 2) for v in (4.6e34, 99_900_000_000, -1e12)] == ["4.6e+34", "100,000,000,000", "-1.0e+12"]
    assert [format_points(v) for v in (-0.0028, 0.0, 0.00001, 0.0106)] == ["-0.28", "0.00", "0.00", "+1.06"]


def test_percentiles_of_few_samples_are_in_parentheses(tmp_path: Path) -> None:
    few, enough = (
        trial_table.read_trials(synthetic.write_run(tmp_path / str(n), [Way("pytorch"), Way("a")], samples=n))
        for n in (100, 150)
    )
    assert list(few.frame["samples_model"]) == [100, 100]
    for run, marked in ((few, True), (enough, False)):
        text = printed.trials(run, "markdown")
        assert bool(re.search(r"\(\d+\.\d+\)", text)) == marked and ("p95 needs 130" in text) == marked
        row = run.frame.iloc[0]
        for name in ("p90", "p95", "p99"):
            ends = [row[f"latency_model_ms_{name}{end}"] for end in ("_low", "", "_high")]
            assert ends[0] < ends[1] < ends[2]
    latencies = export(tables.make_tables(few, "latency-model"), "text")
    assert latencies.count("in parentheses") == 2, "of p95 and p99, not of p90"
