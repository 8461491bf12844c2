"""The cross-check with trtexec: a gap splits into parts that add up to it, and unlike things are refused."""

import dataclasses
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

import engine_run
from dyno.results.trial_result import TrialResult, load_run
from dyno.runner import device_lock
from dyno.store import cache_dir, lock
from dyno.trtexec import cross_check
from dyno.trtexec.log import TrtexecReport
from refusals import refuses

LOGS = Path(__file__).parent


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, and an empty PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    engine_run.write(tmp_path / "run", engine_run.MEDIANS)
    return tmp_path / "run"


def tool(run: Path, script: str) -> Path:
    """Put a `trtexec` on the PATH that writes its arguments to the file `words` beside the run; return that file."""
    path = run.parent / "bin" / "trtexec"
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> "{run.parent}/words"\n{script}\n', encoding="utf-8")
    path.chmod(0o755)
    return run.parent / "words"


def trials(run: Path) -> list[TrialResult]:
    """Return the run's trials that trtexec can repeat."""
    return [trial for trial in load_run(run).trials if cross_check.is_engine(trial)]


def test_a_log_is_compared_with_the_run(run: Path) -> None:
    text = "\n".join(cross_check.cross_check(trials(run), LOGS / "8.6.log"))
    assert "In trtexec's terms" in text
    assert "--loadEngine=/cache/net b8.engine" in text
    assert "CUDA graph −0.040 ms (only Dyno used one)" in text
    assert "not on the PATH" not in text


def test_without_trtexec_the_command_is_printed(run: Path) -> None:
    *_, first, second, last = cross_check.cross_check(trials(run))
    assert first.startswith("  trtexec ") and first.endswith("# for latency/model")
    assert second.endswith("# for latency/all") and "--noDataTransfers" not in second
    assert last.startswith("trtexec is not on the PATH")


def test_trtexec_runs_for_each_boundary(run: Path) -> None:
    log = LOGS / "10.log"
    words = tool(run, f'while IFS= read -r line; do echo "$line"; done < "{log}"')
    text = cross_check.cross_check(trials(run))
    assert "trtexec was run for latency/model:" in text and "trtexec was run for latency/all:" in text
    assert any("trtexec 0.170 ms: +0.0010 ms (+0.6 %); they agree" in line for line in text)
    called = words.read_text().splitlines()
    assert called.count("--loadEngine=/cache/net b8.engine") == 2  # one word, blank included
    assert called.count("--noDataTransfers") == 1


def test_trtexec_waits_for_a_gpu_held_by_another_dyno(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = types.SimpleNamespace(uuid="GPU-of-a-test", close=lambda: None)
    monkeypatch.setattr(device_lock, "find_gpu", lambda device, environment: card)
    words, said = tool(run, "exit 0"), ""
    thread = threading.Thread(target=cross_check.cross_check, args=(trials(run),))
    with lock(cache_dir() / "gpus" / "GPU-of-a-test.lock", pytest.fail):
        thread.start()
        deadline = time.monotonic() + 600
        while "waiting for process" not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
        assert "trtexec is waiting for process" in said and not words.exists()
    thread.join()
    assert words.exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('echo "&&&& FAILED x"; echo "[01/02/2026-03:04:05] [E] no such file"; exit 1', "failed: no such file"),
        ("echo nothing useful", "neither a trtexec log"),
        ("printf '\\377\\376'", "neither a trtexec log"),
    ],
)
def test_a_failing_trtexec_loses_only_its_comparison(run: Path, script: str, reason: str) -> None:
    tool(run, script)
    text = cross_check.cross_check(trials(run))
    assert "In trtexec's terms" in text[0]
    assert [line for line in text if reason in line]


def test_a_hanging_trtexec_is_stopped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(run, "while :; do :; done")
    monkeypatch.setattr(cross_check, "LOAD_TIMEOUT_S", -5.5)  # 2 x (1 s of warm-up + 2 s) - 5.5 s
    assert [line for line in cross_check.cross_check(trials(run)) if "was stopped: not finished after 0 s" in line]


def test_an_unreadable_file_is_an_error(run: Path) -> None:
    refuses("neither a trtexec log", cross_check.cross_check, trials(run), Path(__file__))


def test_a_run_without_a_tensorrt_trial_is_an_error(tmp_path: Path) -> None:
    engine_run.write(tmp_path / "run", engine_run.MEDIANS, backend="onnxruntime", format="onnx")
    refuses("no TensorRT trial", cross_check.cross_check, trials(tmp_path / "run"))


def test_only_measured_boundaries_are_repeated(tmp_path: Path) -> None:
    trial = engine_run.trial(tmp_path / "run", boundaries=("model",))
    assert cross_check.list_boundaries(trial) == ["model"]


US = 1e-6


def report(**changes: Any) -> TrtexecReport:
    """Return trtexec's report of the trial if it did everything as Dyno does, with hidden launches."""
    same: dict[str, Any] = {"compute": 171 * US, "latency": 217 * US, "enqueue": 12 * US, "h2d": 40 * US}
    same |= {"d2h": 6 * US, "rate": 1 / (180 * US), "graph": True, "transfers": True, "spin": True}
    same |= {"engine": "x/net b8.engine", "shapes": {"input": (8, 3, 64, 64)}, "device": "NVIDIA Example"}
    return TrtexecReport(**same | changes)


@pytest.fixture
def trial(tmp_path: Path) -> TrialResult:
    return engine_run.trial(tmp_path / "run")


def parts(trial: TrialResult, given: TrtexecReport, which: str) -> dict[str, float]:
    """Return the parts of the gap whose title begins with `which`, in microseconds by name; check their sum."""
    (gap,) = [g for g in cross_check.list_gaps(cross_check.read_medians(trial), given) if g.quantity.startswith(which)]
    assert sum(p.seconds for p in gap.parts) == pytest.approx(gap.seconds, abs=1e-12)
    return {p.name: round(p.seconds / US, 3) for p in gap.parts}


def test_medians_are_read_by_tag_boundary_and_clock(trial: TrialResult) -> None:
    own = cross_check.read_medians(trial)
    assert (own.model, own.model_host, own.total) == pytest.approx((171 * US, 186 * US, 262 * US))
    assert (own.latency, own.waiting) == pytest.approx((222 * US, 15 * US))
    assert own.rate == pytest.approx(1 / (180 * US))  # queries, not images
    assert (own.clock, own.device, own.graph) == (1980.0, "NVIDIA Example", True)


def test_the_explanation_has_every_term(trial: TrialResult) -> None:
    text = "\n".join(cross_check.explain_terms(trial))
    for term in ("Enqueue Time 0.012 ms", "H2D Latency 0.040 ms", "GPU Compute Time 0.176 ms", "D2H Latency 0.0060 ms"):
        assert term in text
    assert "Latency (H2D + GPU Compute + D2H) 0.222 ms" in text
    assert "5,555.6 qps (a query is a batch of 8)" in text
    for flag in ("--noDataTransfers", "--useCudaGraph", "--useSpinWait"):
        assert flag in text
    assert "0.040 ms more than trtexec's Latency" in text


def test_a_host_bottleneck_is_reported(tmp_path: Path) -> None:
    slow = engine_run.MEDIANS | {("enqueue", "all", "host"): 160 * US}
    text = "\n".join(cross_check.explain_terms(engine_run.trial(tmp_path / "run", slow, graph=False)))
    assert "Enqueue Time is 94% of that" in text and "a CUDA graph (--useCudaGraph) would help" in text


def test_a_record_without_parts_says_so(tmp_path: Path) -> None:
    plain = {("latency", "model", "host"): 186 * US}
    text = "\n".join(cross_check.explain_terms(engine_run.trial(tmp_path / "run", plain)))
    assert "no enqueue, H2D, compute and D2H times" in text


def test_equal_numbers_agree(trial: TrialResult) -> None:
    first, *_ = cross_check.compare_results(trial, report())
    assert first.startswith("GPU time") and first.endswith("they agree within 2 %.")


NO_COPIES = {"transfers": False, "h2d": 0.0, "d2h": 0.0}
# By case: the trial's changes, trtexec's changes, the gap, its parts in microseconds, and words.
PARTS: dict[str, tuple[dict[Any, float], dict[str, Any], dict[str, Any], str, dict[str, float], str]] = {
    # 262 - 207 = 55: copies 10 longer; compute 176 - 171 = 5 is launch; waiting 15; 25 remain.
    "latency falls into copies, launch and synchronisation": (
        {}, {}, {"h2d": 30 * US, "latency": 207 * US}, "Latency",
        {"copies": 10, "launch": 5, "synchronisation": 15, "unexplained": 25}, "",
    ),
    "a graph accounts for the enqueue time that it saves and no more": (
        {}, {}, {"graph": False, "enqueue": 42 * US, "compute": 211 * US}, "GPU",
        {"CUDA graph": -30, "unexplained": -10}, "",
    ),
    "a graph that trtexec alone used": (
        {("latency", "model", "gpu"): 201 * US, ("enqueue", "all", "host"): 22 * US}, {"graph": False},
        {"enqueue": 4 * US}, "GPU", {"CUDA graph": 18, "launch": 12, "unexplained": 0}, "",
    ),
    "a graph never explains a gap of the other sign": (
        {}, {}, {"graph": False, "enqueue": 42 * US, "compute": 150 * US}, "GPU",
        {"CUDA graph": 0, "launch": 12, "unexplained": 9}, "",
    ),
    "a graph without enqueue times explains nothing": (
        {}, {}, {"graph": False, "enqueue": None, "compute": 211 * US}, "GPU",
        {"CUDA graph": 0, "unexplained": -40}, "its share is unknown",
    ),
    "clocks where both are known": (  # 136.8 x 2000 / 1600 = 171
        {}, {"clock": 1600.0}, {"compute": 136.8 * US, "clock": 2000.0}, "GPU",
        {"clocks": 34.2, "unexplained": 0}, "1600 MHz here, 2000 MHz there",
    ),
    "clocks that are unknown": (
        {}, {}, {"compute": 230 * US}, "GPU", {"unexplained": -59}, "clocks are not known",
    ),
    "throughput falls into compute, copies and the rest": (
        {("h2d", "all", "gpu"): 175 * US}, {}, {**NO_COPIES, "rate": 1 / (172 * US), "compute": 170 * US},
        "Time per query", {"GPU compute": 1, "copies": 4, "launch and synchronisation": 3}, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("medians", "ran", "theirs", "which", "expected", "said"), PARTS.values(), ids=PARTS)
def test_a_gap_is_split_into_parts(
    medians: dict[Any, float], ran: dict[str, Any], theirs: dict[str, Any], which: str, expected: dict[str, float],
    said: str, tmp_path: Path,
) -> None:  # fmt: skip
    trial, given = engine_run.trial(tmp_path / "run", engine_run.MEDIANS | medians, **ran), report(**theirs)
    assert parts(trial, given, which) == expected
    assert said in cross_check.compare_results(trial, given)[0]


def test_without_transfers_latency_is_not_compared(trial: TrialResult) -> None:
    text = cross_check.compare_results(trial, report(**NO_COPIES))
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
def test_incomparable_settings_are_refused_in_a_sentence(
    trial: TrialResult, changes: dict[str, Any], reason: str
) -> None:
    (sentence,) = cross_check.compare_results(trial, report(**changes))
    assert sentence.startswith("Not compared: ") and reason in sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "C:\\engines\\net b8.engine"},
        {"engine": "net b8.engine", "onnx": "net.onnx"},  # built, saved by this name and timed
        {"shapes": {}, "device": "", "engine": ""},
    ],
)
def test_possibly_equal_settings_are_compared(trial: TrialResult, changes: dict[str, Any]) -> None:
    assert cross_check.list_differences(trial, report(**changes)) == ""


def test_weaknesses_of_a_comparison_are_reported(trial: TrialResult) -> None:
    given = report(version="10.13.0", spin=False, warnings=("GPU compute time is unstable",), engine="", shapes={})
    notes = "\n".join(cross_check.compare_results(trial, given))
    said = "TensorRT 10.13.0, Dyno ran 8.6.1", "assumed to be the same", "slept", "trtexec warns: GPU compute time"
    assert all(words in notes for words in said)


def test_measurements_without_overlap_are_not_compared(tmp_path: Path) -> None:
    bare = engine_run.trial(tmp_path / "run", {})
    assert cross_check.compare_results(bare, dataclasses.replace(report(), rate=None)) == [
        "Not compared: the record and trtexec have no measurement in common."
    ]
