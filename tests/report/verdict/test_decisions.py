"""Decisions: one sentence each, its certainty and correctness, the next step, and the details."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import synthetic
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.report.verdict.findings import BEST, FAILURE, NOTE, WARNING, Decision
from dyno.results.correctness import Correctness
from dyno.results.trial_result import Results, load_run
from synthetic import Way

FAST, CLOSE = Way("a", seconds=0.005), Way("b", seconds=0.005, spread=0.1)


def decided(path: Path, *ways: Way, study: str = "", budget: dict[str, float] | None = None) -> list[Decision]:
    folder = synthetic.write_run(path / "run", list(ways), samples=50)
    (folder / "study.toml").write_text(f'models = ["digits"]\n{study}', encoding="utf-8")
    return list(verdict.read_verdict(trial_table.read_trials(load_run(folder), budget=budget)).decisions)


def test_a_winner_has_the_answers_real_right_and_next(tmp_path: Path) -> None:
    (one,) = decided(tmp_path, Way("pytorch"), FAST, Way("b", seconds=0.007))
    assert (one.kind, one.where) == (BEST, "digits at size 64")
    assert one.text.startswith("fastest is a fp32, 5.") and one.text.endswith("] as fast as pytorch fp32.")
    assert [name for name, _ in one.answers] == ["real", "right", "next"]
    real, right, step = (text for _, text in one.answers)
    assert "busy machine" not in real
    assert real.startswith("yes, in 3 rounds, measured one after the other; ahead of the runner-up, b fp32, by 1.3")
    assert (
        right.startswith("outputs agree with those of pytorch fp32, to 0.001 %; top-1 9")
        and "ran in the requested type" in right
    )
    assert step == f"take it: dyno export {tmp_path / 'run'}"
    assert {each.kind for each in one.findings} == {NOTE}


def test_decisions_are_data_too(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch"), FAST, Way("b", seconds=0.0051, spread=0.1)])
    run = trial_table.read_trials(load_run(folder))
    (latency,) = verdict.describe_run(run)["decisions"]
    names = {t.id: t.configuration for t in run.records}
    assert {names[id] for id in latency["candidates"]} == {"a fp32", "b fp32"} and latency["by"] == "latency"
    assert latency["certainty"] != "decided" and {"real", "right", "next"} <= latency["answers"].keys()


@pytest.mark.parametrize(
    ("study", "ways", "untried"),
    [
        ("", [Way("pytorch"), Way("onnxruntime")], "int8 (add --data)"),
        ('data = "photos"', [Way("openvino")], "int8 (add --precision fp32,int8 and --data)"),
        ('data = "photos"', [Way("openvino"), Way("openvino", "int8")], None),
        ("", [Way("pytorch")], None),
        ('precisions = ["fp32"]', [Way("openvino")], None),
        ('backends = ["openvino"]', [Way("openvino")], None),
    ],
)
def test_untried_precisions_are_named(study: str, ways: list[Way], untried: str | None, tmp_path: Path) -> None:
    (one,) = decided(tmp_path, *ways, study=study)
    assert dict(one.answers).get("not tried") == untried


def test_a_winner_with_an_equally_fast_runner_up_is_open(tmp_path: Path) -> None:
    (one,) = decided(tmp_path, Way("pytorch"), FAST, CLOSE)
    answers = dict(one.answers)
    assert one.kind == WARNING
    assert re.match(r"fastest is one of . fp32 and . fp32 \(undecided\); . fp32 takes ", one.text), one.text
    assert answers["real"].startswith("faster than pytorch fp32 in 3 rounds")
    assert "; not decided against a fp32 (" in answers["real"] and one.badge == "open"
    assert "more rounds" in answers["real"]
    assert answers["next"].startswith(("the same command without --rounds continues", "the difference is too small"))
    assert "; take b fp32, the first of them: dyno export " in answers["next"]


def test_a_run_until_decided_continues_with_more_minutes(tmp_path: Path) -> None:
    spread = Way("b", seconds=0.0055, spread=0.1)
    (one,) = decided(tmp_path, Way("pytorch"), FAST, spread, study='until = "decided"\nrounds = 2\n')
    assert re.match("the same command with more --minutes continues; take . fp32, the first", dict(one.answers)["next"])


def test_a_single_trial_has_no_winner(tmp_path: Path) -> None:
    (one,) = decided(tmp_path, FAST)
    assert one.kind == NOTE and one.text.startswith("a fp32 takes 5.") and one.text.endswith(" ms at batch 1.")
    assert {f.name: f.value for f in one.figures}["how sure"] == "not compared"
    (two,) = decided(tmp_path / "other", Way("pytorch"), Way("a", statuses=("failed",), reason="out of luck"))
    assert two.kind == NOTE and two.text.startswith("pytorch fp32 takes")


def test_doubtful_outputs_are_not_reported_as_agreeing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Correctness, "doubt", "can't tell with 32 whether more than 10% of the answers change")
    (one,) = decided(tmp_path, Way("pytorch"), FAST)
    right = dict(one.answers)["right"]
    assert right.startswith("outputs are to 0.001 % from those of pytorch fp32; can't tell with 32 whether more")
    assert "give more with --compared or --data" in right and "agree" not in right


def test_random_or_constant_outputs_are_not_called_right(tmp_path: Path) -> None:
    (one,) = decided(tmp_path / "changing", Way("a", facts={"random_outputs": 0.4}))
    assert dict(one.answers)["right"].startswith("its outputs change from call to call, so they can't be compared; ")
    warnings = ("the outputs are the same for every input: that they agree with another engine's proves little",)
    (one,) = decided(tmp_path / "same", *(replace(way, warnings=warnings) for way in (Way("pytorch"), FAST)))
    right = dict(one.answers)["right"]
    assert right.startswith("outputs agree with those of pytorch fp32")
    assert "; the outputs are the same for every input, so agreement proves little; " in right


def test_the_export_command_can_be_pasted(tmp_path: Path) -> None:
    (one,) = decided(tmp_path / "a run & <more>", FAST)
    assert dict(one.answers)["next"] == f"take it: dyno export '{tmp_path}/a run & <more>/run'"


def test_one_round_is_open_and_tells_the_number_of_rounds_needed(tmp_path: Path) -> None:
    (one,) = decided(tmp_path, *(replace(way, statuses=("ok",)) for way in (Way("pytorch"), FAST)))
    assert one.kind == WARNING and "measure with --rounds 3 or more" in dict(one.answers)["next"]


def test_a_gain_of_one_paired_round_proves_nothing(tmp_path: Path) -> None:
    (one,) = decided(tmp_path, Way("pytorch", statuses=("ok", "failed")), FAST)
    assert re.search(r": [\d.]+x as fast as pytorch fp32 in one round, which proves nothing\.$", one.text), one.text


def test_a_gain_with_a_wide_interval_has_its_lower_bound(tmp_path: Path) -> None:
    ways = [replace(Way(*way), spread=0.4, statuses=("ok",) * 6) for way in (("pytorch",), ("a", "fp32", 0.0001))]
    (one,) = decided(tmp_path, *ways)
    assert re.search(r": at least [\d.]+x as fast as pytorch fp32 \(best estimate [\d.]+x\)\.$", one.text), one.text
    assert "x [" not in one.text
    assert {f.name: f.value for f in one.figures}["speed-up"].startswith("at least ")


def test_a_gain_within_the_noise_is_undecided(tmp_path: Path) -> None:
    (one,) = decided(tmp_path, Way("pytorch", spread=0.3), Way("a", seconds=0.009, spread=0.3))
    assert dict(one.answers)["real"].startswith("undecided after 3 rounds")


def test_equal_speeds_are_a_tie(tmp_path: Path) -> None:
    (one,) = decided(tmp_path, Way("pytorch", spread=1e-3), Way("a", spread=1e-3, seconds=0.0099))
    answers = dict(one.answers)
    assert (one.kind, one.badge) == (WARNING, "tie")
    assert one.text.startswith("fastest is one of a fp32 and pytorch fp32 (equal within ±2 %); a fp32 takes ")
    assert answers["real"].startswith("no difference that matters") and answers["next"].startswith("choose by")


def test_images_per_second_are_a_tested_decision(tmp_path: Path) -> None:
    ways = [replace(way, batch=batch) for way in (Way("pytorch"), FAST, CLOSE) for batch in (1, 8)]
    _, rate = decided(tmp_path / "close", *ways)
    assert rate.kind == WARNING
    assert re.match(r"most images per second with one of . fp32 at batch 8, . fp32 at batch 8 and ", rate.text), (
        rate.text
    )
    assert "not decided against " in dict(rate.answers)["real"]
    _, rate = decided(tmp_path / "apart", *ways[:4])
    assert rate.kind == BEST and rate.text.startswith("most images per second with a fp32 at batch 8")
    assert dict(rate.answers)["real"].startswith("yes, in 3 rounds; ahead of the runner-up, a fp32 at batch 1")


def test_a_winner_alone_within_the_budget_is_reported(tmp_path: Path) -> None:
    (one,) = decided(tmp_path / "two", Way("pytorch"), Way("a", "int8", 0.001, flips=0.2), budget={"top1": 1.5})
    (lone,) = decided(tmp_path / "lone", Way("pytorch"), budget={"top1": 1.5})
    assert dict(one.answers)["real"] == "nothing else is within the budget"
    assert dict(lone.answers)["real"] == "there is nothing to compare it with"
    assert dict(one.answers)["right"].startswith("the others' outputs are compared with it; top-1 9")


def test_a_winner_is_open_while_a_faster_trial_may_keep_the_budget(tmp_path: Path) -> None:
    few = [Way("pytorch"), Way("a", "int8", 0.001)]
    folder = synthetic.write_run(tmp_path / "run", few, samples=50, count=20)
    (one,) = verdict.read_verdict(trial_table.read_trials(load_run(folder), budget={"top1": 1.5})).decisions
    answers = dict(one.answers)
    assert one.kind == WARNING and {f.name: f.value for f in one.figures}["how sure"] == "open"
    assert answers["real"] == "nothing else is shown to be within the budget"
    assert "whether a int8, which is faster, is within the budget" in answers["next"]


def test_an_over_budget_trial_with_an_unproven_lead_only_seems_faster(tmp_path: Path) -> None:
    ways = Way("pytorch", seconds=0.01, spread=0.3), Way("a", "int8", 0.006, spread=0.3, flips=0.2)
    (one,) = decided(tmp_path, *ways, budget={"top1": 1.5})
    assert any("a int8 seems faster (" in each.text for each in one.findings)


def test_winners_of_several_models_are_exported_by_id(tmp_path: Path) -> None:
    ways = [replace(way, model=model) for model in ("one", "two") for way in (Way("pytorch"), FAST)]
    first, second = decided(tmp_path, *ways)
    steps = [dict(each.answers)["next"] for each in (first, second)]
    assert [step.rpartition(" ")[2] for step in steps] == [ways[1].trial.id, ways[3].trial.id]


def test_a_stopped_run_continues_by_the_same_command(tmp_path: Path) -> None:
    one_round = [replace(way, statuses=("ok",)) for way in (Way("pytorch"), FAST)]
    (one,) = decided(tmp_path, *one_round, study="rounds = 3\n")
    assert dict(one.answers)["next"].startswith("the same command measures the other rounds; take it: ")
    decided(tmp_path / "none", unmeasured := Way("a", statuses=("failed",)), Way("b", statuses=("failed",)))
    (tmp_path / "none" / "run" / "trials" / unmeasured.trial.id / "r0" / "record.json").unlink()
    (none,) = verdict.read_verdict(trial_table.read_trials(load_run(tmp_path / "none" / "run"))).decisions
    assert none.kind == WARNING and none.text == "no trial has succeeded yet; 1 of 2 were not measured so far."
    assert dict(none.answers)["next"] == "the same `dyno run` continues"


def test_a_run_without_successful_trials_is_a_failure(tmp_path: Path) -> None:
    (one,) = decided(tmp_path, Way("a", statuses=("failed",), reason="no"))
    assert (one.kind, one.sentence) == (FAILURE, "digits at size 64: no trial succeeded.")
    (other,) = decided(tmp_path / "skipped", Way("a", statuses=("skipped",), reason="no int8 here"))
    assert (other.kind, other.text) == (FAILURE, "no trial was measured."), "none was tried, so none can fail"


@pytest.mark.parametrize("budget", [None, {"top1": 1.2}])
def test_terminal_text_has_the_same_order_without_notes(demo: Results, budget: dict[str, float] | None) -> None:
    verdicts = verdict.read_verdict(trial_table.read_trials(demo, budget=budget))
    lines = verdicts.lines
    assert lines[0] == verdicts.decisions[0].sentence and [line.split(":")[0] for line in lines[1:4]] == [
        "  real", "  right", "  next"]  # fmt: skip
    notes = [each.text for part in (verdicts, *verdicts.decisions) for each in part.findings if each.kind == NOTE]
    assert notes and not set(notes) & set(lines) and lines[-1] == f"{len(notes)} more notes in the report."
    others = [line for line in lines[:-1] if not line.startswith("  ")]
    assert set(others) <= set(verdicts.sentences)
    decided = [decision.sentence for decision in verdicts.decisions]
    assert others[: len(decided)] == decided, "details are below all decisions"


def test_a_noisy_third_trial_that_may_be_fastest_is_named(tmp_path: Path) -> None:
    """B is decided, C isn't: "fastest" is a claim against both (Hsu 1981)."""
    noisy = Way("c", seconds=0.006, spread=0.4)
    (one,) = decided(tmp_path, Way("pytorch"), FAST, Way("b", seconds=0.0055), noisy)
    answers = dict(one.answers)
    assert one.kind == WARNING and one.text.startswith("fastest is one of a fp32 and c fp32 (undecided); a fp32 takes ")
    assert one.text.endswith("as fast as pytorch fp32.")
    assert "not decided against c fp32" in answers["real"] and "b fp32" not in answers["real"]
    assert re.match(r"measure with --rounds \d+; take a fp32|the difference is too small", answers["next"])
    assert {f.name: f.value for f in one.figures}["how sure"] == "open"
