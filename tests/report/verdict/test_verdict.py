"""The sentences: who wins, how sure that is, and what did not run as requested."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import synthetic
from dyno.formatting import ratio
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results.ranking import estimate_speedup
from dyno.results.trial_result import Results, load_run
from synthetic import Way


def said(results: Results, budget: dict[str, float] | None = None) -> str:
    return "\n".join(verdict.list_sentences(trial_table.read_trials(results, budget=budget)))


def study(path: Path, *ways: Way, budget: dict[str, float] | None = None, count: int = 360) -> str:
    return said(load_run(synthetic.write_run(path / "run", list(ways), samples=50, count=count)), budget)


def test_the_demo_in_words(demo: Results) -> None:
    text = said(demo, {"top1": 1.2})
    first = text.splitlines()[0]
    assert first.startswith("digits at size 64: fastest within the budget top1=1.2 is openvino bf16, 1.2")
    assert "at batch 1: 3.3" in first
    assert first.endswith("as fast as pytorch fp32.")
    assert "real: yes, in 3 rounds, measured one after the other" in text
    assert "ahead of the runner-up, openvino fp32 (ran bf16), by 1.5" in text
    assert "right: outputs agree with those of pytorch fp32, off by 0.041 %; top-1 98.89 %, 0.00 points [" in text
    assert "openvino int8 is faster (816 µs) but whether it is within top1=1.2 is undecided" in text
    assert "more images would settle it" in text
    assert "Precision: 13 of 17 trials ran in the requested type." in text
    assert "openvino fp32 (batch 1, 8) did not run as requested: asked for fp32: openvino ran 0 of 21 compute" in text
    assert "onnxruntime int8 is not faster than onnxruntime fp32 (batch 1, 8: 0.9" in text
    assert "11 of 20 convolutions were not fused into QLinearConv." in text
    assert "3 of 20 trials did not finish: 1 crashed, 1 timeout, 1 oom" in text
    assert "1 of 20 trials was skipped" in text
    assert "2 of 20 trials have warnings" in text


def test_without_a_budget_the_fastest_wins(demo: Results) -> None:
    assert "fastest is openvino int8" in said(demo).splitlines()[0]
    assert "most images per second with openvino int8 at batch 8" in said(demo)


def test_what_ran_in_another_type_is_not_crowned_under_the_type_asked_for(tmp_path: Path) -> None:
    other = Way("onnxruntime", "fp16", 0.002, layers={"float32": 21}, batch=8)
    partly = Way("a", "int8", 0.003, layers={"int8": 5, "float32": 15})
    text = study(tmp_path, Way("pytorch"), replace(other, batch=1), partly, Way("pytorch", batch=8), other)
    assert "fastest is onnxruntime fp16 (ran fp32), " in text
    assert "the runner-up, a int8 (25% int8)" in text
    assert "most images per second with onnxruntime fp16 (ran fp32) at batch 8" in text
    silent = Way("a", "fp16", 0.001, facts={"layers_by_type": {}, "precision_truth": {"ok": False, "sentence": "?"}})
    assert "fastest is a fp16 (unconfirmed), " in study(tmp_path / "silent", Way("pytorch"), silent)


def test_a_close_race_is_called_one(tmp_path: Path) -> None:
    text = study(tmp_path, Way("pytorch", seconds=0.01), Way("a", spread=0.05, seconds=0.005), Way("b", seconds=0.0051))
    assert re.search(
        r"whether it is faster than the runner-up, . fp32, is undecided \(.*\): about \d+ more rounds", text
    )
    alike = [Way(name, spread=1e-4, seconds=0.005) for name in "ab"]
    text = study(tmp_path / "alike", Way("pytorch", seconds=0.01), *alike)
    assert re.search(r"it is equivalent to the runner-up, . fp32, within ±2 % \(", text)


@pytest.mark.parametrize(
    ("spread", "why"),
    [
        (1e-4, r"it gains \d+ % at most, and the engine gives no reason"),
        (0.2, "the spread between processes hides any"),
    ],
)
def test_no_gain_and_a_hidden_one_are_told_apart(tmp_path: Path, spread: float, why: str) -> None:
    ways = Way("onnxruntime", "fp32", 0.004, spread=spread), Way("onnxruntime", "int8", 0.004, spread=spread)
    assert re.search(
        f"onnxruntime int8 is not shown to be faster than onnxruntime fp32 .*: {why}", study(tmp_path, *ways)
    )


def test_a_reference_that_comes_second_is_told_once(tmp_path: Path) -> None:
    text = study(tmp_path, Way("pytorch", seconds=0.0056), Way("a", spread=0.05, seconds=0.005))
    assert text.count("whether it is faster than pytorch fp32 is undecided") == 1 and "runner-up" not in text


def test_one_round_proves_nothing(tmp_path: Path) -> None:
    ways = Way("pytorch"), Way("a", seconds=0.005), Way("b", seconds=0.006)
    text = study(tmp_path, *(replace(way, statuses=("ok",)) for way in ways))
    headline = (
        r"fastest is a fp32, 5\.\d\d ms at batch 1; one round can't prove that it is faster than pytorch fp32\.\n"
    )
    assert re.search(headline, text), text
    assert "real: not known from 1 round, measured one after the other: it may be noise" in text


def test_a_fast_engine_that_lost_its_accuracy_does_not_win(tmp_path: Path) -> None:
    ways = Way("pytorch"), Way("openvino", "int8", 0.001, flips=0.2)
    text = study(tmp_path, *ways, budget={"top1": 1.5})
    assert "fastest within the budget top1=1.5 is pytorch fp32" in text
    assert "openvino int8 is faster (1.0" in text
    assert "loses more than top1=1.5 allows (-" in text


def test_preparation_is_counted_in_images(tmp_path: Path) -> None:
    text = study(tmp_path, Way("pytorch", seconds=0.010, spread=0), Way("a", seconds=0.005, spread=0, build=10.0))
    assert re.search(r"Making it takes 10.0 s, which pays off after about (1,9|2,0)00 images\.", text)


def test_preparation_that_may_buy_nothing_is_said_to(tmp_path: Path) -> None:
    text = study(tmp_path, Way("pytorch", seconds=0.010), Way("a", seconds=0.005, spread=0.4, build=10.0))
    assert re.search(r"a fp32, .*; whether it is faster than pytorch fp32 is undecided", text)
    assert re.search(r"pays off after about \S+ images, or never, as the gain is not proven\.", text)


def test_nothing_that_ended_well_is_said_first(tmp_path: Path) -> None:
    text = study(tmp_path, Way("a", statuses=("failed",), reason="no"))
    assert text.splitlines()[0] == "digits at size 64: no trial succeeded."


def test_unreadable_records_are_findings(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch")], samples=5)
    next(folder.glob("trials/*/r1/record.json")).write_text("{")
    assert "r1/record.json is damaged" in said(load_run(folder))


@pytest.mark.parametrize("budget", [None, {"top1": 1.0}])
def test_outputs_without_timings_have_no_winner(tmp_path: Path, budget: dict[str, float] | None) -> None:
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch"), Way("a")], samples=5)
    for path in folder.glob("trials/*/r*/samples.npz"):
        path.unlink()
    text = said(load_run(folder), budget)
    assert "fastest" not in text
    assert "no trial" not in text


def test_names_cannot_drive_the_terminal(tmp_path: Path) -> None:
    assert "\x1b" not in study(tmp_path, Way("pytorch", model="\x1b[2Jx"))


def test_what_has_other_weights_is_no_winner(tmp_path: Path) -> None:
    other = Way("openvino", seconds=0.001, facts={"weights_sha256": "f" * 64})
    text = study(tmp_path, Way("pytorch"), Way("onnxruntime", seconds=0.005), other)
    assert "fastest is onnxruntime fp32" in text and "runner-up is openvino" not in text and "nan" not in text
    assert "openvino fp32 not ranked, not comparable: different weights." in text


def test_eight_bits_are_held_against_sixteen_where_they_beat_fp32(tmp_path: Path) -> None:
    at = [{"batch": batch, "statuses": ("ok",)} for batch in (8, 1)]
    ways = [Way("tensorrt", precision, seconds, facts={"notes": [f"{share[row['batch']]} % in reformats"]}, **row)
            for row in at
            for precision, seconds, share in (("fp32", 0.004, {1: 1, 8: 2}), ("fp16", 0.002, {1: 3, 8: 4}),
                                              ("int8", 0.003, {1: 5, 8: 6}))]  # fmt: skip
    text = study(tmp_path, *ways)
    assert "tensorrt int8 is not faster than tensorrt fp16 (batch 1, 8: 0.6" in text
    assert ", one round only, so unproven): at batch 1, 5 % in reformats." in text
    assert "not faster than tensorrt fp32" not in text


def test_what_a_row_says_of_a_precision_is_what_the_sentence_says(tmp_path: Path) -> None:
    ways = [
        Way("onnxruntime"),
        Way("onnxruntime", "int8", 0.0103),
        Way("openvino", seconds=0.01),
        Way("tensorrt", seconds=0.01),
    ]
    run = trial_table.read_trials(load_run(synthetic.write_run(tmp_path / "run", ways, samples=50)))
    (row,) = (r for r in run.frame.to_dict("records") if r["precision"] == "int8")
    shown = ratio(row["speedup"], row["speedup_low"], row["speedup_high"])
    alone = estimate_speedup(run.trials[row["trial"]], run.references[row["trial"]], "model")
    assert ratio(alone.value, alone.low, alone.high) != shown, "by itself the pair has a narrower interval"
    assert f"than onnxruntime fp32 (batch 1: {shown})" in "\n".join(verdict.list_sentences(run))


def test_each_of_several_networks_is_named_where_a_precision_gains_nothing(tmp_path: Path) -> None:
    ways = [Way("a", p, s, model=m) for m in ("one", "two") for p, s in (("fp32", 0.002), ("bf16", 0.003))]
    text = study(tmp_path, *ways)
    assert "one at size 64: a bf16 is not faster than a fp32" in text
    assert "two at size 64: a bf16 is not faster than a fp32" in text


def test_a_network_without_images_has_no_size_in_any_sentence(tmp_path: Path) -> None:
    ways = [Way("a", p, s, model=m, size=0) for m in ("one", "two") for p, s in (("fp32", 0.002), ("bf16", 0.003))]
    text = study(tmp_path, *ways)
    assert "one: a bf16 is not faster than a fp32" in text
    assert "size 0" not in text


def test_an_engine_that_names_no_types_is_not_called_untrue(tmp_path: Path) -> None:
    silent = {"precision_truth": {"ok": False, "sentence": "an engine says nothing"}, "layers_by_type": {}}
    text = study(tmp_path, Way("pytorch"), Way("compile", facts=silent))
    assert "Precision: 1 of 1 trial ran" in text
    assert "compile fp32 (batch 1): an engine says nothing." in text and "as requested" not in text
