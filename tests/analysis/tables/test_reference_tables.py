"""Tables side by side: a row per model, size and batch, a column per way, and the same numbers for machines."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest
import synthetic
from synthetic import Way

from dyno.analysis.metrics import work
from dyno.analysis.records.results import Results, load
from dyno.analysis.report import report
from dyno.analysis.tables import reference_tables, trial_table
from dyno.analysis.tables.reference_tables import Sheet, sheets
from dyno.worker.record import write_json
from dyno.worker.spec import UserError

GFLOP, PEAK = 2.0, 1e12


def study(folder: Path, models: tuple[str, ...] = ("one", "two")) -> Path:
    """Two models at two sizes and two batches in three ways, one of which has no memory for the largest."""
    ways = []
    for model in models:
        for size in (64, 128):
            for batch in (1, 8):
                at = {"model": model, "size": size, "batch": batch}
                slow = (size / 64) ** 1.5
                full = {"statuses": ("oom",), "reason": "no room"} if (size, batch) == (128, 8) else {}
                ways += [Way("pytorch", "fp32", 0.004 * slow, **at), Way("onnxruntime", "fp32", 0.002 * slow, **at),
                         Way("openvino", "int8", 0.001 * slow, flips=0.05, **at, **full),
                         Way("tensorrt", "fp16", statuses=("skipped",), reason="no tensorrt", **at)]  # fmt: skip
    synthetic.write_run(folder, ways, count=20, samples=40)
    rows = [{"model": m, "size": str(s), "flops": int(GFLOP * 1e9 * (s / 64) ** 2)} for m in models for s in (64, 128)]
    write_json(folder / "models.json", {"schema": 1, "models": rows})
    return folder


def with_peak(folder: Path, status: str = "ok") -> Path:
    (folder / "peak").mkdir()
    found = {"fp32": {"flops_per_s": PEAK, "side": 512, "window": [0, 1]}, "int8": {"missing": "no kernel"}}
    facts = {"peak": found} if status == "ok" else {}
    record = {"schema": 1, "status": status, "reason": "no torch", "facts": facts}
    write_json(folder / "peak" / "record.json", record)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load(with_peak(study(tmp_path_factory.mktemp("runs") / "pair")))


@pytest.fixture(scope="module")
def frame(results: Results) -> pd.DataFrame:
    return trial_table.frame(results)


@pytest.fixture(scope="module")
def every(results: Results, frame: pd.DataFrame) -> dict[str, Sheet]:
    return {sheet.name: sheet for sheet in sheets(results, frame)}


def test_every_table_of_the_references_is_there(every: dict[str, Sheet]) -> None:
    assert list(every) == ["latency-model", "latency-all", "throughput", "speedup", "accuracy", "equality", "layers",
                           "memory", "sizes", "flops", "saturation", "best"]  # fmt: skip


def test_a_pivot_has_the_frame_s_numbers(every: dict[str, Sheet], frame: pd.DataFrame) -> None:
    data = every["latency-model"].data
    assert list(data.columns) == ["statistic", "model", "size", "batch", "pytorch fp32", "onnxruntime fp32",
                                  "openvino int8"]  # fmt: skip
    assert set(data["statistic"]) == {"mean", "median", "p90", "p95", "p99", "max", "trimmed", "trimmed std"}
    for statistic, column in (("max", "latency_model_ms_max"), ("trimmed std", "latency_model_ms_trimmed_std")):
        row = data.query(f"statistic == '{statistic}' and model == 'two' and size == '64' and batch == 8")
        wanted = frame.query("model == 'two' and size == '64' and batch == 8 and backend == 'openvino'")[column]
        assert row["openvino int8"].item() == wanted.item() > 0


def test_a_trial_without_a_number_says_how_it_ended(every: dict[str, Sheet]) -> None:
    title, heads, rows = next(every["latency-model"].parts())
    assert title == "Latency/model, ms per batch: mean"
    assert {tuple(row[:3]): row[-1] for row in rows}["one", "128", "8"] == "oom"
    assert heads[-1] == "openvino int8"
    assert pd.isna(every["latency-model"].data["openvino int8"]).any(), "the machine's twin has numbers alone"
    assert every["latency-model"].notes == ["tensorrt fp16 was skipped: no tensorrt"]
    assert "oom" in list(every["sizes"].data["verdict"])


def test_equality_is_against_the_reference(every: dict[str, Sheet]) -> None:
    data = every["equality"].data
    assert "pytorch fp32" not in data
    assert (data["onnxruntime fp32"] > data["openvino int8"]).where(data["openvino int8"].notna(), True).all()


def test_tflops_and_their_share_are_of_the_type_that_ran(frame: pd.DataFrame, every: dict[str, Sheet]) -> None:
    r = frame.query("model == 'one' and size == '128' and batch == 8 and backend == 'onnxruntime'").iloc[0]
    assert r["gflops"] == 4 * GFLOP
    assert r["tflops"] == pytest.approx(8 * 4 * GFLOP / r["latency_model_ms_median"])
    assert (r["peak_tflops"], r["peak_share"]) == (1.0, pytest.approx(r["tflops"]))
    assert frame.query("precision == 'int8'")["peak_share"].isna().all(), "no peak was found in int8"
    notes = " ".join(every["flops"].notes)
    assert "Peak in fp32: 1.00 TFLOPS" in notes
    assert "More than 100 %" in notes


@pytest.mark.parametrize(("status", "words"), [("", "with --peak measures it"), ("skipped", "measured: no torch.")])
def test_without_a_peak_the_table_says_why(status: str, words: str, tmp_path: Path) -> None:
    run = study(tmp_path / "run", ("one",))
    loaded = load(with_peak(run, status) if status else run)
    assert words in work.missing(loaded)
    (flops,) = reference_tables.named(loaded, trial_table.frame(loaded), "flops")
    assert words in flops.notes[-1]
    assert "peak TFLOPS" not in flops.data


def test_the_best_batch_and_size_are_named(every: dict[str, Sheet]) -> None:
    best = every["best"]
    row = best.data.query("model == 'one' and way == 'onnxruntime fp32' and size == '128'").iloc[0]
    assert row["best batch"] == 8
    assert row["megapixels/s"] == pytest.approx(row["images/s"] * 128 * 128 / 1e6)
    assert any(note.startswith("one: most images/s, ") and "size 64, batch 8" in note for note in best.notes)
    assert any(note.startswith("one: most megapixels/s, ") for note in best.notes)


def test_each_format_holds_the_table(every: dict[str, Sheet]) -> None:
    sheet = [every["layers"]]
    assert reference_tables.render(sheet) == reference_tables.render(sheet, "markdown")
    lines = [line for line in reference_tables.render(sheet).splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines[:4]}) == 1, "columns are aligned"
    assert " 701,466 |" in reference_tables.render(sheet)
    read = pd.read_csv(io.StringIO(reference_tables.render(sheet, "csv")))
    assert list(read.columns) == list(every["layers"].data.columns)
    assert json.loads(reference_tables.render(sheet, "json"))[0]["statistic"] == "file, MB"
    assert list(json.loads(reference_tables.render(list(every.values()), "json"))) == list(every)
    with pytest.raises(UserError, match="unknown format"):
        reference_tables.render(sheet, "xml")


def test_an_unknown_table_names_those_there_are(results: Results, frame: pd.DataFrame) -> None:
    assert len(reference_tables.named(results, frame, "all")) == 12
    with pytest.raises(UserError, match=r"has no table 'latency'; it has latency-model, latency-all, .* or all"):
        reference_tables.named(results, frame, "latency")


@pytest.mark.slow
def test_the_report_writes_and_shows_them(tmp_path: Path) -> None:
    one = load(with_peak(study(tmp_path / "pair", models=("one",))))
    page = report.write([one], tmp_path).read_text(encoding="utf-8")
    assert "<summary>Latency/model, ms per batch: mean</summary>" in page
    assert (tmp_path / "tables.md").read_text(encoding="utf-8").startswith("# Tables of pair\n")
    assert len(list((tmp_path / "tables").glob("*.csv"))) == 12
    assert {"speedup-size.png", "tflops-batch.png"} <= {p.name for p in tmp_path.glob("charts/*")}


def test_names_that_want_to_break_markdown_stay_text(hostile: Results) -> None:
    frame = trial_table.frame(hostile)
    assert "<script>" not in reference_tables.render(sheets(hostile, frame))


def test_a_run_of_one_row_has_no_page_of_pivots(tmp_path: Path) -> None:
    one = load(synthetic.write_run(tmp_path / "a", [Way("pytorch")], samples=5, count=5))
    frame = trial_table.frame(one)
    every = sheets(one, frame)
    assert reference_tables.pages(every, frame) == []
    assert [sheet.name for sheet in every][:2] == ["latency-model", "latency-all"]


def test_a_run_in_which_nothing_ran_has_none(tmp_path: Path) -> None:
    none = load(synthetic.write_run(tmp_path / "b", [Way("x", statuses=("failed",))]))
    assert sheets(none, trial_table.frame(none)) == []
