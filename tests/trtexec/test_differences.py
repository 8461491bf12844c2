"""A gap to trtexec falls into parts that add up to it, none larger than its cause; unlike things are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import engine_run
from dyno.results.trial_result import TrialResult
from dyno.trtexec import command, cross_check
from dyno.trtexec.log import MetricSpread, TrtexecReport

US = 1e-6


def spread(us: float) -> MetricSpread:
    return MetricSpread(us * US, us * US, us * US, us * US)


def report(**changes: Any) -> TrtexecReport:
    """What trtexec would say of the trial if it did everything as Dyno does, launches hidden."""
    same: dict[str, Any] = {"compute": spread(171), "latency": spread(217), "enqueue": spread(12), "h2d": spread(40)}
    same |= {"d2h": spread(6), "rate": 1 / (180 * US), "graph": True, "transfers": True, "spin": True}
    same |= {"engine": "x/net b8.engine", "shapes": {"input": (8, 3, 64, 64)}, "device": "NVIDIA Example"}
    return TrtexecReport(**same | changes)


@pytest.fixture
def trial(tmp_path: Path) -> TrialResult:
    return engine_run.trial(tmp_path / "run")


def parts(trial: TrialResult, given: TrtexecReport, which: str) -> dict[str, float]:
    """Microseconds by name of the gap whose title begins so; checked to add up to it."""
    (gap,) = [g for g in cross_check.list_gaps(command.read_medians(trial), given) if g.what.startswith(which)]
    assert sum(p.seconds for p in gap.parts) == pytest.approx(gap.seconds, abs=1e-12)
    return {p.name: round(p.seconds / US, 3) for p in gap.parts}


def test_medians_are_read_by_tag_boundary_and_clock(trial: TrialResult) -> None:
    own = command.read_medians(trial)
    assert (own.model, own.model_host, own.whole) == pytest.approx((171 * US, 186 * US, 262 * US))
    assert (own.latency, own.waiting) == pytest.approx((222 * US, 15 * US))
    assert own.rate == pytest.approx(1 / (180 * US))  # queries, not images
    assert (own.clock, own.device, own.graph) == (1980.0, "NVIDIA Example", True)


def test_the_explanation_has_every_term(trial: TrialResult) -> None:
    text = "\n".join(command.explain_terms(trial))
    for term in ("Enqueue Time 0.012 ms", "H2D Latency 0.040 ms", "GPU Compute Time 0.176 ms", "D2H Latency 0.0060 ms"):
        assert term in text
    assert "Latency (H2D + GPU Compute + D2H) 0.222 ms" in text
    assert "5,555.6 qps (a query is a batch of 8)" in text
    for flag in ("--noDataTransfers", "--useCudaGraph", "--useSpinWait"):
        assert flag in text
    assert "0.040 ms more than trtexec's Latency" in text


def test_a_host_that_sets_the_pace_is_said(tmp_path: Path) -> None:
    slow = engine_run.MEDIANS | {("enqueue", "all", "host"): 160 * US}
    text = "\n".join(command.explain_terms(engine_run.trial(tmp_path / "run", slow, graph=False)))
    assert "Enqueue Time is 94% of that" in text and "a CUDA graph (--useCudaGraph) would help" in text


def test_a_record_without_parts_says_so(tmp_path: Path) -> None:
    plain = {("latency", "model", "host"): 186 * US}
    text = "\n".join(command.explain_terms(engine_run.trial(tmp_path / "run", plain)))
    assert "no enqueue, H2D, compute and D2H times" in text


def test_equal_numbers_agree(trial: TrialResult) -> None:
    first, *_ = cross_check.compare_results(trial, report())
    assert first.startswith("GPU time") and first.endswith("they agree within 2 %.")


def test_latency_falls_into_copies_launch_and_synchronisation(trial: TrialResult) -> None:
    found = parts(trial, report(h2d=spread(30), latency=spread(207)), "Latency")
    # 262 - 207 = 55: copies 10 longer; compute 176 - 171 = 5 is launch; waiting 15; 25 stay.
    assert found == {"copies": 10, "launch": 5, "synchronisation": 15, "unexplained": 25}


def test_a_graph_accounts_for_the_enqueue_time_it_saves_and_no_more(trial: TrialResult) -> None:
    without = report(graph=False, enqueue=spread(42), compute=spread(211))
    assert parts(trial, without, "GPU") == {"CUDA graph": -30, "unexplained": -10}


def test_a_graph_that_trtexec_alone_used(tmp_path: Path) -> None:
    medians = engine_run.MEDIANS | {("latency", "model", "gpu"): 201 * US, ("enqueue", "all", "host"): 22 * US}
    found = parts(engine_run.trial(tmp_path / "run", medians, graph=False), report(enqueue=spread(4)), "GPU")
    assert found == {"CUDA graph": 18, "launch": 12, "unexplained": 0}


def test_a_graph_never_explains_a_gap_of_the_other_sign(trial: TrialResult) -> None:
    found = parts(trial, report(graph=False, enqueue=spread(42), compute=spread(150)), "GPU")
    assert found == {"CUDA graph": 0, "launch": 12, "unexplained": 9}


def test_a_graph_without_enqueue_times_explains_nothing(trial: TrialResult) -> None:
    given = report(graph=False, enqueue=None, compute=spread(211))
    assert parts(trial, given, "GPU") == {"CUDA graph": 0, "unexplained": -40}
    assert "its share is unknown" in cross_check.compare_results(trial, given)[0]


def test_clocks_where_both_are_known(tmp_path: Path) -> None:
    slow = engine_run.trial(tmp_path / "run", clock=1600.0)
    given = report(compute=spread(136.8), clock=2000.0)  # 136.8 x 2000 / 1600 = 171
    assert parts(slow, given, "GPU") == {"clocks": 34.2, "unexplained": 0}
    assert "1600 MHz here, 2000 MHz there" in cross_check.compare_results(slow, given)[0]


def test_without_clocks_what_is_left_says_that_they_are_unknown(trial: TrialResult) -> None:
    assert "clocks are not known" in cross_check.compare_results(trial, report(compute=spread(230)))[0]


def test_throughput_falls_into_compute_copies_and_the_rest(tmp_path: Path) -> None:
    medians = engine_run.MEDIANS | {("h2d", "all", "gpu"): 175 * US}
    given = report(transfers=False, h2d=spread(0), d2h=spread(0), rate=1 / (172 * US), compute=spread(170))
    found = parts(engine_run.trial(tmp_path / "run", medians), given, "Time per query")
    assert found == {"GPU compute": 1, "copies": 4, "launch and synchronisation": 3}


def test_without_transfers_latency_is_not_compared(trial: TrialResult) -> None:
    text = cross_check.compare_results(trial, report(transfers=False, h2d=spread(0), d2h=spread(0)))
    assert not [line for line in text if line.startswith("Latency")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": "/other/resnet.engine"}, "trtexec ran resnet.engine, Dyno net b8.engine"),
        ({"engine": "C:\\x\\resnet.engine"}, "trtexec ran resnet.engine"),
        ({"engine": "", "onnx": "m/net.onnx"}, "built a separate engine from net.onnx"),
        ({"shapes": {"input": (1, 3, 64, 64)}}, "trtexec ran input:1x3x64x64, Dyno input:8x3x64x64"),
        ({"shapes": {"image": (8, 3, 64, 64)}}, "trtexec ran image:8x3x64x64"),
        ({"device": "NVIDIA Other"}, "trtexec ran on NVIDIA Other, Dyno on NVIDIA Example"),
        ({"streams": 2}, "2 inferences side by side"),
    ],
)
def test_unlike_things_are_refused_in_a_sentence(trial: TrialResult, changes: dict[str, Any], reason: str) -> None:
    (sentence,) = cross_check.compare_results(trial, report(**changes))
    assert sentence.startswith("Not compared: ") and reason in sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "C:\\engines\\net b8.engine"},
        {"engine": "net b8.engine", "onnx": "net.onnx"},  # built, saved under this name and timed
        {"shapes": {}, "device": "", "engine": ""},
    ],
)
def test_what_may_be_the_same_is_compared(trial: TrialResult, changes: dict[str, Any]) -> None:
    assert cross_check.list_differences(trial, report(**changes)) == ""


def test_what_makes_a_comparison_weaker_is_said(trial: TrialResult) -> None:
    given = report(version="10.13.0", spin=False, warnings=("GPU compute time is unstable",), engine="", shapes={})
    notes = "\n".join(cross_check.compare_results(trial, given))
    for words in (
        "TensorRT 10.13.0, Dyno ran 8.6.1",
        "assumed to be the same",
        "slept",
        "trtexec warns: GPU compute time",
    ):
        assert words in notes


def test_no_number_in_common(tmp_path: Path) -> None:
    bare = engine_run.trial(tmp_path / "run", {})
    assert cross_check.compare_results(bare, dataclasses.replace(report(), rate=None)) == [
        "Not compared: the record and trtexec have no measurement in common."
    ]
