"""Tables of a run: agreement, payback of preparation, variance, and the text of any table."""

import math
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

import detected
import printed
import synthetic
from detected import Arrays
from dyno.formatting import MAX_LINE_LENGTH, find_width, images_tested, wrap_text
from dyno.report import tables
from dyno.report.charts import charts
from dyno.report.export import export
from dyno.report.tables import accuracy_tables, frontier_table, trial_table, variance_tables
from dyno.results.metrics.agreement import Rank
from dyno.results.trial_result import Results, load_run
from dyno.table import ALL_COLUMNS, TEXT, Column, Table, is_missing
from dyno.worker.record import read_json, write_json
from dyno.worker.spec import UserError
from synthetic import Way


def _run(folder: Path, inputs: str, weights: str) -> Results:
    facts = {"inputs_sha256": inputs * 64, "weights_sha256": weights * 64}
    return load_run(synthetic.write_run(folder, [Way("onnxruntime", "fp32", facts=facts)]))


def test_outputs_of_other_inputs_are_not_compared(tmp_path: Path) -> None:
    first = _run(tmp_path / "first", "a", "c")
    same, other = _run(tmp_path / "same", "a", "d"), _run(tmp_path / "other", "b", "d")
    table, _, failed = accuracy_tables.compare_with_first([first, same], 1e-3, 1e-8)
    assert len(table.rows) == 1 and not failed
    with pytest.raises(
        UserError, match=r"fed other inputs than .*; give both the same, several under the same names: --i"
    ):
        accuracy_tables.compare_with_first([first, other], 1e-3, 1e-8)


@pytest.mark.parametrize(("values", "shown"), [(3, ("0.00", "")), (0, ("", "0"))])
def test_undefined_errors_are_not_shown_as_zero(tmp_path: Path, values: int, shown: tuple[str, str]) -> None:
    """A zero reference has no relative error; without values nothing is close or far."""
    run = load_run(synthetic.write_run(tmp_path / "run", [Way("pytorch"), Way("one")]))
    for trial in run:
        for path in (one.folder / "outputs.npz" for one in trial.rounds):
            outputs = np.full((5, values), trial.backend == "one", np.float32)
            np.savez(path, **{**dict(np.load(path)), "output:output": outputs})
    table, _, _ = accuracy_tables.compare_with_first([run], 1e-3, 1e-8)
    cells = {column.name: column.text(table.rows[0]) for column in table.columns}
    assert (cells["close"], cells["max_rel"]) == shown


def test_random_or_constant_outputs_have_a_note(tmp_path: Path) -> None:
    same = "the outputs are the same for every input: that they agree with another engine's proves little"
    ways = [Way("a", facts={"random_outputs": 0.4}), Way("b", warnings=(same,)), Way("c")]
    run = load_run(synthetic.write_run(tmp_path / "run", ways))
    table, _, _ = accuracy_tables.compare_with_first([run], 1e-3, 1e-8)
    assert table.notes[1:] == (
        "digits a fp32: its outputs change from call to call, so they can't be compared",
        "digits b fp32: the outputs are the same for every input, so agreement proves little",
    )


def test_flipped_images_are_listed_and_drawn(tmp_path: Path) -> None:
    """int8 loses one of ten cached images and gains one; with another data set in the cache there is no file."""
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch"), Way("a", "int8")], samples=5, count=10)
    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "images.npy", np.full((10, 3, 200, 120), 90, np.uint8))
    write_json(data / "meta.json", {"sha256": "d" * 64})
    write_json(data / "names.json", {"names": [f"{k}.jpg" for k in range(10)]})
    label, right = np.arange(10), np.stack([np.arange(10), (np.arange(10) + 1) % 10], 1).astype(np.int32)
    for path in folder.glob("trials/*/r*"):
        job = read_json(path / "job.json")
        job["trial"]["data"]["folder"] = str(data)
        write_json(path / "job.json", job)
        wrong = {"int8": 4, "fp32": 7}[job["trial"]["precision"]]
        index = right.copy()
        index[wrong] = index[wrong, ::-1]
        stored = dict(np.load(path / "outputs.npz"))
        np.savez(path / "outputs.npz", **stored | {
            "label": label, "topk_index": index, "topk_score": np.tile(np.float32([30, 20]), (10, 1))})  # fmt: skip
    run = trial_table.read_trials(folder)
    lost, gained = accuracy_tables.FLIPS.table(run).rows
    assert [lost[k] for k in ("change", "image", "file", "class", "reference", "answer")] == [
        "lost", 4, "4.jpg", "class 4", "class 4", "class 5"]  # fmt: skip
    assert [gained[k] for k in ("change", "file", "reference", "answer")] == ["gained", "7.jpg", "class 8", "class 7"]
    (row,) = [r for r in accuracy_tables.CLASSIFICATION.table(run).rows if r.get("lost")]
    assert (row["lost"], row["gained"], row["score_shift"], row["score_shift_high"]) == (1, 1, 0, 0)
    figure = charts.draw_flips(run)
    pictures = [axes for part in figure.subfigs for axes in part.axes]
    assert [axes.get_title("left") for axes in pictures] == ["lost", "gained"]
    assert pictures[0].images[0].get_array().shape == (67, 40, 3), "every third pixel of 200 x 120"
    assert "1 lost, 1 gained" in figure.subfigs[0].get_suptitle()
    write_json(data / "names.json", {"names": [f"{k}.jpg" for k in range(7)]})
    assert [r["file"] for r in accuracy_tables.FLIPS.table(run).rows] == ["4.jpg", ""], "image 7 has no name"
    write_json(data / "meta.json", {"sha256": "e" * 64})
    assert charts.draw_flips(run) is None
    assert [r["file"] for r in accuracy_tables.FLIPS.table(run).rows] == ["", ""]


def test_images_with_differing_detections_are_listed_and_drawn(tmp_path: Path) -> None:
    """Of three objects in images of 100 x 50, the trial loses one, renames one and shifts one; it adds a fourth."""
    sides = np.array([[0, 0, 20, 20], [50, 0, 70, 20], [0, 20, 20, 40], [60, 20, 90, 50]], np.float32)

    def detections(rows: list[int], images: list[int], classes: list[int], scores: list[float], shift: float) -> Arrays:
        return {"sample": np.arange(5), "detection_image": np.array(images), "detection_box": sides[rows] + shift,
                "detection_class": np.array(classes), "detection_score": np.float32(scores)}  # fmt: skip

    ways = {
        "pytorch": detections([0, 1, 2, 3], [1, 1, 3, 4], [0, 1, 2, 0], [0.9, 0.8, 0.7, 0.26], 0),
        "openvino": detections([1, 2, 3, 3, 3], [1, 3, 2, 4, 0], [2, 2, 0, 0, 1], [0.8, 0.7, 0.6, 0.2, 0.24], 3),
    }
    folder = detected.write_run(tmp_path / "run", "detect", ways, detected.truth(5))
    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "images.npy", np.full((5, 3, 64, 64), 90, np.uint8))
    np.save(data / "sizes.npy", np.tile([50, 100], (5, 1)))
    write_json(data / "meta.json", {"sha256": detected.SHA})
    write_json(data / "names.json", {"names": [f"images/val/{k}.jpg" for k in range(5)]})
    for path in folder.glob("trials/*/r0/job.json"):
        job = read_json(path)
        job["trial"]["data"]["folder"] = str(data)
        write_json(path, job)
    run = trial_table.read_trials(folder)
    table = accuracy_tables.BOX_FLIPS.table(run)
    assert [[row[k] for k in ("image", "file", "lost", "gained", "renamed")] for row in table.rows] == [
        [1, "images/val/1.jpg", 1, 0, 1], [2, "images/val/2.jpg", 0, 1, 0]]  # fmt: skip
    low, high = (100 * limit for limit in binomtest(2, 5).proportion_ci(method="wilson"))
    counts = f"2 of 5 images differ, 40.0 % [{low:.1f}, {high:.1f}]: 1 lost, 1 gained, 1 of another class"
    assert table.notes[1].endswith(f": {counts}.")
    (part,) = charts.draw_flips(run).subfigs
    assert part.get_suptitle().endswith(counts)
    first, second = part.axes
    assert (first.get_title("left"), first.get_xlabel()) == ("1.jpg", "1 lost\n1 other class")
    assert [line.get_linestyle() for line in (*first.lines, *second.lines)] == ["-", "-", "--", "--"]
    corner = first.lines[0].get_xydata()[0]  # (0, 0) of 100 x 50 lies 16 pixels down in 64 x 64
    np.testing.assert_allclose(corner, (-0.5, 15.5))


def test_pickled_tables_print_the_same(root: Path) -> None:
    """Text output has every column, including those with closures, and the notes below each part."""
    every = tables.make_tables(trial_table.read_trials(root / "tests/golden/run"), "all")
    assert any(table.below for table in every) and any(c.cell for table in every for c in table.columns)
    for table in every:
        again = pickle.loads(pickle.dumps(table))
        for format in ("text", "markdown", "csv", "json"):
            assert export([again], format) == export([table], format), table.name
        assert export([again], subset=ALL_COLUMNS) == export([table], subset=ALL_COLUMNS)
        assert again.to_pandas().equals(table.to_pandas())


def test_every_table_converts_to_a_frame_with_its_numbers(root: Path) -> None:
    """File sizes in MB share a column with integer layer counts."""
    for table in tables.make_tables(trial_table.read_trials(root / "tests/golden/run"), "all"):
        frame = table.to_pandas()
        assert repr(table) == f"Table({table.name!r}, {len(table.rows)} rows)"
        assert table._repr_html_().count("<tr") == 1 + len(table.rows), "what a notebook shows"
        for column in table.columns:
            values = [None if is_missing(row.get(column.name)) else row[column.name] for row in table.rows]
            assert [None if is_missing(value) else value for value in frame[column.name]] == values, table.name


def made(path: Path, *ways: Way) -> pd.DataFrame:
    run = trial_table.read_trials(synthetic.write_run(path / "run", list(ways), samples=400, count=20))
    return frontier_table.BREAK_EVEN.table(run).to_pandas().set_index("backend")


def test_break_even_is_build_seconds_over_gain(tmp_path: Path) -> None:
    found = made(tmp_path, Way("pytorch", seconds=0.010, spread=0), Way("a", seconds=0.005, spread=0, build=10.0))
    row = found.loc["a"]
    assert row["extra_s"] == pytest.approx(10.0)
    assert row["gain_us_per_image"] == pytest.approx(5000, rel=0.1)
    assert row["images"] == pytest.approx(2000, rel=0.1)
    assert row["images_low"] <= row["images"] <= row["images_high"]
    assert row["export_s"] == pytest.approx(0.9) and row["engine_s"] == pytest.approx(9.1)


def test_break_even_counts_images_and_not_batches(tmp_path: Path) -> None:
    ways = [Way("pytorch", seconds=0.01, spread=0, batch=8), Way("a", seconds=0.005, spread=0, build=10.0, batch=8)]
    assert made(tmp_path, *ways).loc["a"]["images"] == pytest.approx(10 / (0.005 * 5.9 / 8), rel=0.1)


def test_break_even_may_be_never_uncertain_or_immediate(tmp_path: Path) -> None:
    found = made(
        tmp_path,
        Way("pytorch", seconds=0.010),
        Way("slow", seconds=0.020, build=5.0),
        Way("same", seconds=0.0101, spread=0.2, build=5.0),
        Way("free", seconds=0.005),
        Way("failed", statuses=("failed",)),
    )
    assert {*found.reset_index().columns} == {column.name for column in frontier_table.BREAKEVEN_COLUMNS}
    assert found.loc["slow", "pays_off"] == "never" and math.isnan(found.loc["slow", "images"])
    assert found.loc["free", "pays_off"] == "at once" and found.loc["free", "images"] == 0
    same = found.loc["same"]
    assert math.isinf(same["images_high"])
    assert same["pays_off"].endswith("images, or never")
    assert "failed" not in found.index and "pytorch" not in found.index
    ways = [Way("pytorch", seconds=0.010, build=5.0), Way("same", seconds=0.0099, spread=0.2)]
    same = made(tmp_path / "cheaper", *ways).loc["same"]
    assert same["extra_s"] < 0 and same["pays_off"] == "no gain is shown", "it isn't shown to be faster"


def test_the_gain_per_image_never_exceeds_the_reference_latency(tmp_path: Path) -> None:
    found = made(tmp_path, Way("pytorch", seconds=0.010), Way("a", seconds=0.001, spread=0.9, build=10.0))
    assert found.loc["a", "images_low"] >= 10.0 / 0.012


def builds(*medians: list[float], layers: tuple[int, ...] = ()) -> list[Any]:
    counts = layers or (20,) * len(medians)
    return [
        SimpleNamespace(
            good=[1], options={"build": k + 1}, backend="tensorrt", medians=lambda boundary, ms=ms: ms,
            count=lambda tag, n=n: n if tag == "layers" else None,
        )
        for k, (ms, n) in enumerate(zip(medians, counts, strict=True))
    ]  # fmt: skip


def test_builds_that_differ() -> None:
    found = variance_tables.analyse_spread(builds([0.475, 0.476, 0.474], [0.577, 0.576, 0.578]))
    assert found is not None and found.real
    assert found.ratio == pytest.approx(0.577 / 0.475, rel=1e-3)


def test_builds_within_process_noise_do_not_differ() -> None:
    found = variance_tables.analyse_spread(builds([0.50, 0.53, 0.47], [0.51, 0.48, 0.54], [0.49, 0.52, 0.50]))
    assert found is not None and not found.real


def test_too_few_builds_or_processes_give_no_spread() -> None:
    assert variance_tables.analyse_spread(builds([0.5], [0.6])) is None
    assert "could be timed" in variance_tables.describe_builds(builds([0.5, 0.5]))[0]  # type: ignore[arg-type]
    assert "two processes or more" in variance_tables.describe_builds(builds([0.5], [0.6]))[-1]  # type: ignore[arg-type]


def test_builds_are_described_with_the_fastest() -> None:
    four = builds([0.60, 0.61], [0.50, 0.51], [0.60, 0.59], [0.62, 0.61], layers=(191, 221, 197, 185))
    said = variance_tables.describe_builds(four)  # type: ignore[arg-type]
    assert said[0] == "layers differ: 191, 221, 197, 185"
    assert said[1] == "parameters: not reported by these engines"
    assert "beyond noise" in said[2] and "p = " in said[2]
    assert variance_tables.find_fastest(four).options == {"build": 2}  # type: ignore[arg-type,union-attr]


def in_turns(folder: Path, rounds: float, blocks: float, both: float) -> list[dict[str, Any]]:
    """Return the table's rows of two interleaved trials with the given deviations of rounds and blocks, and of blocks
    shared by `both`."""
    synthetic.write_run(folder, [Way("pytorch", statuses=("ok",) * 8), Way("a", statuses=("ok",) * 8)], samples=1)
    rng = np.random.default_rng(0)
    shared = both * rng.standard_normal((8, 12, 1))
    for trial in sorted((folder / "trials").iterdir()):
        own = 0.01 * np.exp(shared + rounds * rng.standard_normal((8, 1, 1)) + blocks * rng.standard_normal((8, 12, 1)))
        for number, taken in enumerate(own * np.exp(0.001 * rng.standard_normal((8, 12, 20)))):
            place = trial / f"r{number}"
            numbers = np.repeat(np.arange(12, dtype=np.int32), 20)
            np.savez(place / "samples.npz", latency_model=taken.ravel(), latency_model_block=numbers)
            record = read_json(place / "record.json")
            write_json(place / "record.json", {**record, "facts": {**record["facts"], "turns": {"set": f"s{number}"}}})
    (table,) = tables.make_tables(trial_table.read_trials(folder), "variance")
    return [row for row in table.rows if "a fp32" in row["label"]]


def test_variance_levels_of_interleaved_trials_give_advice(tmp_path: Path) -> None:
    latency, ratio = in_turns(tmp_path / "rounds", rounds=0.05, blocks=0.01, both=0.2)
    assert (latency["of"], ratio["of"]) == ("latency", "ratio to the reference")
    assert (latency["rounds"], latency["blocks"], latency["samples"]) == (8, 12, 20)
    assert latency["blocks_spread"] == pytest.approx(20, rel=0.3) and ratio["blocks_spread"] == pytest.approx(
        1.4, rel=0.3
    )
    assert ratio["rounds_share"] > 90 and "samples_share" not in ratio
    assert ratio["rounds_spread"] == pytest.approx(7, rel=0.6)
    assert latency["rounds_share"] + latency["blocks_share"] + latency["samples_share"] == pytest.approx(100)
    assert "more" in ratio["advice"]
    _, ratio = in_turns(tmp_path / "blocks", rounds=0.0005, blocks=0.2, both=0.0)
    assert ratio["blocks_share"] > 60 and ratio["advice"].startswith("longer rounds")


def test_rounds_without_blocks_are_cut_into_segments(tmp_path: Path) -> None:
    run = trial_table.read_trials(
        synthetic.write_run(tmp_path / "run", [Way("pytorch", spread=0.1), Way("a", statuses=("ok",))])
    )
    (row,) = tables.make_tables(run, "variance")[0].rows
    assert (row["rounds"], row["blocks"], row["of"]) == (3, 10, "latency") and row["rounds_share"] > 90


@pytest.mark.parametrize("columns", [30, 40, 60, 80, 100, 200])
def test_tables_fit_the_terminal_width(tmp_path: Path, columns: int) -> None:
    ways = [Way("pytorch", seconds=0.00412), Way("onnxruntime", "int8", 0.00105), Way("openvino", "fp16", 0.00207)]
    run = trial_table.read_trials(synthetic.write_run(tmp_path / "run", ways, samples=40, count=30))
    text = printed.trials(run, width=columns)
    assert max(map(len, text.splitlines())) <= columns
    for value in run.frame["latency_model_ms_median"]:
        assert f"{value:.2f}" in text, "a number is never broken"
    assert {"pytorch", "onnxruntime", "openvino", "reference"} <= set(text.split()), "nor is a word"
    assert "not shown at this width" not in printed.trials(run), "a pipe takes all eight columns"


def test_sentences_wrap_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "the fastest is onnxruntime int8 " * 6
    monkeypatch.setenv("COLUMNS", "50")
    assert find_width() == 50 and max(map(len, wrap_text(sentence).splitlines())) <= 50
    assert wrap_text(sentence).split() == sentence.split()
    command = "dyno export runs/two fe71c819a607"
    assert wrap_text(f"next: the same command goes on; take it: {command}").splitlines()[-1].strip() == command
    monkeypatch.delenv("COLUMNS")
    assert find_width() == MAX_LINE_LENGTH and "\n" not in wrap_text(sentence)


def test_long_names_do_not_cut_the_other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    columns = tuple(Column(name, kind=TEXT) for name in ("a", "b", "remark"))
    row = {"a": "encoder.layers." * 10, "b": "relu_nchwc", "remark": "batch norm folded, 2 fused into one"}
    words = export([Table("aligned", "Aligned", "", columns, [row])]).split()
    assert {"relu_nchwc", "folded,", "fused", "batch"} <= set(words)


def test_long_cells_wrap_on_a_page() -> None:
    columns = (Column("name", kind=TEXT), Column("in_b", kind=TEXT), Column("seconds"))
    rows = [
        {"name": "attn", "in_b": "2 Reshape, " * 10, "seconds": 1.0},
        {"name": "fc", "in_b": "Gemm", "seconds": 2.0},
    ]
    page = export([Table("parts", "Parts", "", columns, rows)], "html")
    assert page.count('class="wide"') == 1 and re.search(r'<td class="wide"[^>]*>2 Reshape', page)


def test_notes_are_printed_once_when_columns_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = (Column("name", kind=TEXT), Column("remark", kind=TEXT, rank=1))
    row = {"name": "encoder", "remark": "batch norm folded, 2 fused into one"}
    printed = export([Table("layers", "Layers", "", columns, [row], notes=("first note.", "second note."))])
    assert printed.count("first note.") == 1 and "second note; not shown at this" in printed


@pytest.mark.parametrize(("name", "slower"), [("model", 400.0), ("throughput", 1.0)])
def test_figures_contradicted_by_the_host_to_host_latency_are_reported(
    tmp_path: Path, name: str, slower: float
) -> None:
    """A single job without blocks, as from `dyno time`: other programs disturbed only one of its timings."""
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch", statuses=("ok",))], samples=40, count=30)
    (path,) = folder.glob("trials/*/r0/record.json")
    record = read_json(path)
    record["facts"] |= {"others_busy": {name: 1.4}, "contention_threshold": 0.2}
    for measured in record["measurements"]:
        if measured["tag"] == "throughput":
            measured["value"] /= 70 if name == "throughput" else 1
    write_json(path, record)
    with np.load(path.with_name("samples.npz")) as stored:
        samples = {**stored, "latency_model": stored["latency_model"] * slower}
    np.savez(path.with_name("samples.npz"), **samples)
    run = trial_table.read_trials(folder)
    text, (row,) = " ".join(printed.trials(run).split()), run.frame.to_dict("records")
    assert ("pytorch fp32: 4" in text and "ms is too long, as host to host, which includes it" in text) == (slower > 1)
    assert np.isnan(row["throughput_ips"]) == (name == "throughput")


def test_one_image_is_singular() -> None:
    assert (images_tested(1, 0), images_tested(2000, 0)) == ("1 image", "2,000 images")


def test_narrow_terminals_show_the_first_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = accuracy_tables.make_rank_table([("onnxruntime int8", [Rank(n, 0.123, 0.5) for n in range(1, 11)])])
    _, _, head, _, row, _, *note = export([table], "text").splitlines()
    assert head.split() == ["trial", "rank", "1", "rank", "2", "rank", "3", "rank", "4"]
    assert row.split()[:2] == ["onnxruntime", "int8"] and row.count("0.12 / 50.00 %") == 4
    assert " ".join(" ".join(note).split()).endswith("rank 5, rank 6, rank 7, rank 8, rank 9, rank 10")
