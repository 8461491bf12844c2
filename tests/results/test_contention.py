"""Where other programs disturbed most jobs the verdict says that first, and names no winner."""

from __future__ import annotations

from pathlib import Path

import pytest

import synthetic
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results.correctness import WRONG
from dyno.results.ranking import cpu_contention
from dyno.results.trial_result import Results, load_run
from synthetic import Way

BUSY, QUIET = ({"others_busy": {"model": busy}, "contention_threshold": 0.2} for busy in (1.5, 0.1))


def run(path: Path, *facts: dict[str, object]) -> Results:
    ways = [Way(f"way{k}", seconds=0.01 / (k + 1), facts=dict(each)) for k, each in enumerate(facts)]
    return load_run(synthetic.write_run(path / "run", ways, samples=50))


def said(results: Results) -> list[str]:
    return verdict.list_sentences(trial_table.read_trials(results))


def printed(results: Results) -> list[str]:
    return verdict.read_verdict(trial_table.read_trials(results)).lines


def test_a_quiet_study_has_nothing_to_say(tmp_path: Path) -> None:
    results = run(tmp_path, QUIET, QUIET)
    assert cpu_contention(results) is None
    assert "fastest is way1" in said(results)[0]
    assert f"  next: take it: dyno take {results.folder}" in printed(results)


def test_a_few_disturbed_jobs_are_a_warning(tmp_path: Path) -> None:
    lines = said(run(tmp_path, BUSY, QUIET, QUIET))
    assert "fastest is" in lines[0]
    assert any(
        "during 3 of 9 jobs: those latencies are inflated and their order may be wrong" in line for line in lines
    )


def test_most_jobs_disturbed_leave_no_winner(tmp_path: Path) -> None:
    results = run(tmp_path, BUSY, BUSY, QUIET)
    lines = said(results)
    assert lines[0].startswith("No winner is named: other programs kept up to 1.5 processors busy during 6 of 9 jobs, ")
    assert lines[1].startswith("real: what the table calls faster or slower holds beside those programs")
    text = "\n".join(lines[2:])
    assert not any(word in text for word in ("fastest", "runner-up", "most images", "Other programs", "faster"))
    assert "Precision: " in text
    next_step = f"  next: measure again on a quiet machine, or choose: dyno take {results.folder} BACKEND/PRECISION"
    assert next_step in printed(results)


def test_a_lone_configuration_has_no_winner_to_withhold(tmp_path: Path) -> None:
    """At however many batches."""
    text = "\n".join(said(run(tmp_path, BUSY)))
    assert "way0 fp32 takes 10." in text and "winner" not in text
    assert "during 3 of 3 jobs: those latencies are inflated; measure again on a quiet machine." in text
    ways = [Way("way0", batch=batch, seconds=0.01 * batch, facts=dict(BUSY)) for batch in (1, 2)]
    text = "\n".join(said(load_run(synthetic.write_run(tmp_path / "batches", ways, samples=50))))
    assert "way0 fp32 takes 10." in text and "No winner" not in text and "during 6 of 6 jobs" in text


def test_in_turns_a_winner_is_named_beside_whatever_disturbs_all_alike(tmp_path: Path) -> None:
    in_turns = {**BUSY, "turns": {"set": "abc", "place": 0}}
    results = run(tmp_path, in_turns, in_turns, in_turns)
    contention = cpu_contention(results)
    assert contention is not None and (contention.disturbed, contention.alone) == (9, 0)
    lines = said(results)
    assert "fastest is way2" in lines[0]
    assert "9 of 9 jobs ran beside other programs, which may slow engines unequally" in lines[1]
    assert any("rankings were measured interleaved and hold under this load" in line for line in lines)


def test_failures_are_told_all_the_same(tmp_path: Path) -> None:
    ways = [Way("a", facts=dict(BUSY)), Way("b", statuses=("crashed",), reason="killed by SIGSEGV")]
    text = "\n".join(said(load_run(synthetic.write_run(tmp_path / "run", ways, samples=50))))
    assert text.startswith("No winner is named") and "1 of 2 trials did not finish: 1 crashed" in text


def test_wrong_outputs_lead_however_busy_the_machine_was(tmp_path: Path) -> None:
    results = run(tmp_path, BUSY, BUSY, BUSY)
    read = trial_table.read_trials(results)
    read.frame.loc[1, ["outputs", "verdict"]] = [WRONG, f"{WRONG}: off by 1"]
    first, second, *_ = verdict.list_sentences(read)
    assert "way1" in first and f"gave {WRONG}: off by 1" in first and second.startswith("No winner is named")


@pytest.mark.slow
def test_the_page_leads_with_it(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from dyno.report import report

    text = report.write_report([trial_table.read_trials(run(tmp_path, BUSY, BUSY))], tmp_path / "page").read_text(
        encoding="utf-8"
    )
    assert "No winner is named" in text and "fastest is" not in text
