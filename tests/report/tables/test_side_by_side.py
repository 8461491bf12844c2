"""Tables side by side: a row per model, size and batch, a column per configuration; the same numbers in files."""

import io
import json
from pathlib import Path

import pandas as pd
import pytest

import printed
import synthetic
from dyno.report import report, tables
from dyno.report.export import export
from dyno.report.tables import trial_table
from dyno.results.metrics import precision
from dyno.results.run_data import RunData
from dyno.results.trial_result import Results, load_run
from dyno.table import KINDS, Table, is_missing
from dyno.worker.record import write_json
from dyno.worker.spec import SCHEMA
from refusals import refuses
from synthetic import Way

GFLOP, PEAK = 2.0, 1e12


def study(folder: Path, models: tuple[str, ...] = ("one", "two")) -> Path:
    """Write two models at two sizes and batches, four configurations: one out of memory at the largest, one skipped."""
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
    write_json(folder / "models.json", {"schema": SCHEMA, "models": rows})
    return folder


def with_peak(folder: Path, status: str = "ok") -> Path:
    (folder / "peak").mkdir()
    found = {"fp32": {"flops_per_s": PEAK, "side": 512, "window": [0, 1]}, "int8": {"missing": "no kernel"}}
    facts = {"peak": found} if status == "ok" else {}
    record = {"schema": SCHEMA, "status": status, "reason": "no torch", "facts": facts}
    write_json(folder / "peak" / "record.json", record)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return trial_table.read_trials(with_peak(study(tmp_path_factory.mktemp("runs") / "pair")))


@pytest.fixture(scope="module")
def every(run: RunData) -> dict[str, Table]:
    return printed.every(run)


def test_every_expected_table_exists(every: dict[str, Table]) -> None:
    names = ["latency-model", "latency-all", "throughput", "speedup", "accuracy", "equality", "layers", "memory",
             "sizes", "flops", "best"]  # fmt: skip
    assert [name for name in every if name in names] == names and "saturation" in every


def test_pivots_have_the_numbers_of_the_frame(every: dict[str, Table], run: RunData) -> None:
    data = every["latency-model"].to_pandas()
    assert list(data.columns) == ["statistic", "model", "size", "batch", "pytorch fp32", "onnxruntime fp32",
                                  "openvino int8"]  # fmt: skip
    assert set(data["statistic"]) == {"mean", "median", "p90", "p95", "p99", "max", "trimmed", "trimmed std"}
    for statistic, column in (("max", "latency_model_ms_max"), ("trimmed std", "latency_model_ms_trimmed_std")):
        row = data.query(f"statistic == '{statistic}' and model == 'two' and size == '64' and batch == 8")
        wanted = run.frame.query("model == 'two' and size == '64' and batch == 8 and backend == 'openvino'")[column]
        assert row["openvino int8"].item() == wanted.item() > 0


def test_trials_without_numbers_show_their_status(every: dict[str, Table]) -> None:
    table = every["latency-model"]
    part = next(table.parts())
    assert part.title == "mean" and "Latency/model, ms per batch: mean" in export([table])
    row = next(r for r in part.rows if (r["model"], r["size"], r["batch"]) == ("one", "128", 8))
    assert part.columns[-1].heading == "openvino int8" and part.columns[-1].text(row) == "oom"
    assert table.to_pandas()["openvino int8"].isna().any(), "the machine's twin has numbers alone"
    assert table.notes == ("tensorrt fp16 was skipped: no tensorrt",)
    assert "oom" in [row["verdict"] for row in every["sizes"].rows]


def test_equality_is_against_the_reference(every: dict[str, Table]) -> None:
    data = every["equality"].to_pandas()
    assert "pytorch fp32" not in data
    assert (data["onnxruntime fp32"] > data["openvino int8"]).where(data["openvino int8"].notna(), True).all()


def test_tflops_and_their_share_are_of_the_type_that_ran(run: RunData, every: dict[str, Table]) -> None:
    r = run.frame.query("model == 'one' and size == '128' and batch == 8 and backend == 'onnxruntime'").iloc[0]
    assert r["gflops"] == 4 * GFLOP
    assert r["tflops"] == pytest.approx(8 * 4 * GFLOP / r["latency_model_ms_median"])
    assert (r["peak_tflops"], r["peak_share"]) == (1.0, pytest.approx(r["tflops"]))
    assert run.frame.query("precision == 'int8'")["peak_share"].isna().all(), "no peak was found in int8"
    notes = " ".join(every["flops"].notes)
    assert "Peak in fp32: 1.00 TFLOPS" in notes
    assert "More than 100 %" in notes


@pytest.mark.parametrize(("status", "words"), [("", "with --peak measures it"), ("skipped", "measured: no torch.")])
def test_a_missing_peak_is_explained(status: str, words: str, tmp_path: Path) -> None:
    folder = study(tmp_path / "run", ("one",))
    run = trial_table.read_trials(with_peak(folder, status) if status else folder)
    assert words in precision.explain_missing_work(run.records)
    (flops,) = tables.make_tables(run, "flops")
    assert words in flops.notes[-1]
    assert "peak TFLOPS" not in export([flops])


def test_the_best_batch_and_size_are_named(every: dict[str, Table]) -> None:
    best = every["best"]
    row = next(
        r for r in best.rows if (r["model"], r["configuration"], r["size"]) == ("one", "onnxruntime fp32", "128")
    )
    assert row["batch"] == 8
    assert row["megapixels_per_s"] == pytest.approx(row["images_per_s"] * 128 * 128 / 1e6)
    assert any(note.startswith("one: most images/s, ") and "size 64, batch 8" in note for note in best.notes)
    assert any(note.startswith("one: most megapixels/s, ") for note in best.notes)


def test_without_images_the_best_batch_has_no_size_and_no_pixels(tmp_path: Path) -> None:
    ways = [synthetic.Way("pytorch", seconds=s, batch=n, size=0) for n, s in ((1, 0.010), (8, 0.020))]
    run = trial_table.read_trials(load_run(synthetic.write_run(tmp_path / "run", ways)))
    (best,) = tables.make_tables(run, "best")
    (row,) = best.rows
    assert is_missing(row["megapixels_per_s"]), "they were 0"
    (note,) = best.notes
    assert note.startswith("digits: most inputs/s, ") and note.endswith("at batch 1, with pytorch fp32.")


def test_a_missing_size_is_an_empty_cell(tmp_path: Path) -> None:
    ways = [synthetic.Way("pytorch", model=model, batch=n, size=size, seconds=0.01)
            for model, size in (("vectors", 0), ("images", 64)) for n in (1, 8)]  # fmt: skip
    run = trial_table.read_trials(load_run(synthetic.write_run(tmp_path / "run", ways)))
    for name in ("best", "saturation", "sizes"):
        (table,) = tables.make_tables(run, name)
        (part,) = table.parts()
        (size,) = (column for column in part.columns if column.name == "size")
        assert {(row["model"], size.text(row)) for row in part.rows} == {("vectors", ""), ("images", "64")}
        assert {row["size"] for row in table.rows} == {"0", "64"}, "files have it as ever"


def test_every_table_is_exported_in_every_format(every: dict[str, Table]) -> None:
    for name, table in every.items():
        assert table.title and table.description.endswith("."), name
        assert all(column.meaning and column.kind in KINDS for column in table.columns if "/" not in column.name), name
        lines = [line for line in export([table], "markdown").splitlines() if line.startswith("|")]
        assert lines and "─" in export([table]) and "|" not in export([table]).splitlines()[1]
        read = pd.read_csv(io.StringIO(export([table], "csv")))
        assert list(read.columns) == [column.name for column in table.columns] and len(read) == len(table.rows)
        assert json.loads(export([table], "json"))["tables"][table.name]["rows"][0].keys() == set(read.columns)
        assert export([table], "html").count("<tr") >= 1 + len(table.rows)
    assert list(json.loads(export(list(every.values()), "json"))["tables"]) == list(every)
    assert " 701,466 |" in export([every["layers"]], "markdown")
    refuses("unknown format", export, [every["layers"]], "xml")


def test_unknown_tables_get_suggestions(run: RunData) -> None:
    refuses("unknown table 'latency-modl'; did you mean 'latency-model'", tables.make_tables, run, "latency-modl")
    refuses("is not of a run; `dyno compare A B` prints it", tables.make_tables, run, "compare")


def test_every_table_is_listed_with_a_description() -> None:
    listed = {row["name"]: row for row in tables.list_tables().rows}
    assert {"trials", "frontier", "break-even", "latency-model", "compare", "builds", "stress"} <= set(listed)
    assert all(row["holds"].endswith(".") and row["command"] for row in listed.values())


def test_the_report_writes_and_shows_the_tables(tmp_path: Path) -> None:
    one = trial_table.read_trials(with_peak(study(tmp_path / "pair", models=("one",))))
    page = report.write_report([one], tmp_path).read_text(encoding="utf-8")
    assert "<option>Latency/model, ms per batch: mean</option>" in page
    assert (tmp_path / "tables.md").read_text(encoding="utf-8").startswith("# Tables of pair\n")
    assert {p.stem for p in (tmp_path / "tables").glob("*.csv")} == set(printed.every(one))
    assert {"speedup-size.png", "tflops-batch.png"} <= {p.name for p in tmp_path.glob("charts/*")}


def test_hostile_names_cannot_break_markdown(hostile_names: Results) -> None:
    assert "<script>" not in export(tables.make_tables(trial_table.read_trials(hostile_names), "all"), "markdown")


def test_a_run_without_successful_trials_has_only_the_trials_table(tmp_path: Path) -> None:
    none = trial_table.read_trials(synthetic.write_run(tmp_path / "b", [Way("x", statuses=("failed",))]))
    assert list(printed.every(none)) == ["trials"]
