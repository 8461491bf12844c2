"""`dyno selftest`: measurement, output, storage and refusals, and studies that continue until decided."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from benchmarks.until import StudyOutcome, studies

import dyno
from dyno.jobs.progress import Progress
from dyno.regression import selftest as module
from dyno.report import sections
from dyno.report import self_test as report_self_test
from dyno.results import stats
from dyno.results.self_test import ProcessPair, SelfTest, StoredSelfTest, TestRound
from dyno.results.trial_result import Results, TrialResult
from dyno.runner import self_test
from dyno.runner.execute import execute
from dyno.worker import registry
from dyno.worker.record import write_json
from dyno.worker.spec import to_json
from refusals import refuses

# The fake backend's processes differ only by machine noise; a slowdown of 50 % is always visible.
COARSE = module.Layout((0.0, 0.0, 0.5), ((0, 1), (0, 2)))
FAKE: dict[str, Any] = {
    "backend": "fake@latency_ms=2", "channels": 1, "sizes": ("8",), "seconds": 0.1, "warmup": 0.02, "block": 0.02,
    "threads": 1, "minutes": 30.0, "rounds": 5, "layout": COARSE, "quiet": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache without a stored self-test."""
    monkeypatch.setenv("DYNO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the command: few short rounds of the fake backend."""
    given = {name: FAKE[name] for name in ("seconds", "warmup", "block", "threads", "layout")}
    whole = module.selftest

    def short(model: str, **more: Any) -> dyno.SelfTest:
        return whole(model, **{**given, **more})

    monkeypatch.setattr(module, "selftest", short)
    monkeypatch.setattr(registry, "list_backends", lambda: ["fake"])  # else `dyno doctor` would probe the others


def known() -> StoredSelfTest:
    """Return a self-test of this machine, as if measured."""
    rounds = tuple(TestRound(1e-3 + n * 1e-5, (ProcessPair(0.0, (0.001 * (n % 3), 0.002)),)) for n in range(4))
    return StoredSelfTest(
        "2026-11-23T10:00:00+00:00", "1", self_test.identify_machine("cpu"), "cpu", "net", 1, 0.2, 0.1, 3, rounds
    )


@pytest.mark.usefixtures("preloaded")
def test_selftest_distinguishes_equal_and_slowed_processes() -> None:
    found = dyno.selftest("fake:net", **FAKE)
    assert len(found.rounds) == 5
    assert found.slowdowns == [0.0, 0.5]
    (slowed,) = [one for one in found.verdicts if one.slowdown and one.rounds == 5]
    assert (slowed.slower.count, slowed.faster.hits) == (1, 0)
    # A busy machine preempts both; the slowdown is a share of a run's time and grows with it.
    assert sorted(1 / 2.718281828**pair.log for pair in found.list_pairs(0.5))[2] > 1.2
    assert found.grade in "ABCDE" and str(found).startswith("Grade ")
    kept, wrong = self_test.find("cpu")
    assert kept is not None and not wrong
    assert kept.stored == found.stored


@pytest.mark.usefixtures("preloaded")
def test_builds_are_part_of_the_noise(drawn_engine: Path, refused: Any) -> None:
    """A preempted run takes tens of milliseconds, so most of the short runs are not preempted."""
    given = {**FAKE, "backend": "drawn_engine:Engine@kind=a@uneven=true@latency_ms=0.1", "rounds": 3}
    found = dyno.selftest("fake:net", rebuild=True, **given)
    assert found.stored.builds and len(found.rounds) == 3
    logs = [pair.log for pair in found.list_pairs(0.0)]
    assert all(log < -1 for log in logs), "the second of a pair has its own, slow build"
    assert len(list((drawn_engine / "cache").rglob("engine.bin"))) == 6, "two for each round"
    assert "fresh builds and processes" in str(found)
    assert self_test.find("cpu")[0] is None, "studies of one build see more"
    said = refused("selftest", "fake:net", "--channels", 1, "--backend", "fake", "--rebuild")
    assert "the same in every build" in said


@pytest.mark.usefixtures("preloaded")
@pytest.mark.usefixtures("quick", "unreported")
def test_selftest_prints_and_runs_state_their_visible_difference(call: Any, tmp_path: Path) -> None:
    assert "none yet; run `dyno selftest`" in call("doctor")[1]
    asked = ("run", "fake:net", "--channels", 1, "--boundaries", "model", "--seconds", 0.04, "--warmup", 0.02)
    asked += ("--rounds", 2)
    backends = ("--backend", "fake@latency_ms=1,fake@latency_ms=2")
    assert call(*asked, *backends, "--out", "before")[0] == 0
    assert "This run can see" not in call("show", "before")[1]
    tested = ("selftest", "fake:net", "--backend", "fake@latency_ms=2", "--channels", 1, "--rounds", 3)
    _, out, _ = call(*tested, "--size", 8, code=0)
    assert "called slower" in out and "Grade " in out and "false alarm" in out
    _, out, _ = call(*tested, "--size", 8, "--format", "json")
    told = json.loads(out)
    assert told["grade"] in "ABCDE" and told["rounds"] == 3 and set(told["tables"]) == {"visible", "verdicts"}
    (state,) = json.loads(call("doctor", "--format", "json")[1])["self_tests"]
    assert state["grade"] == told["grade"]
    assert f"self-test of cpu: Grade {told['grade']}" in call("doctor")[1].replace("\n  ", " ")
    assert "This run can see" in call("show", "before")[1], "measured here, before the self-test"
    _, out, _ = call(*asked, *backends, "--turns", "--block", 0.01, "--out", "after")
    assert "This run can see" in out and "2 rounds in turns" in out.replace("\n  ", " ")
    assert "This run can see" in json.loads(call("show", "after", "--format", "json")[1])["visible"]
    kept = tmp_path / "after" / "self-test.json"
    assert json.loads(kept.read_text())["grade"] == told["grade"], "for another machine"
    kept.write_text("{}")
    assert dyno.load("after").records.self_test, "and a damaged one is the machine's again"
    assert call("runs", "rm", "after")[:2] == (0, "removed after\n")


@pytest.mark.usefixtures("preloaded")
def test_the_report_shows_the_self_test(fake_study: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    execute(fake_study(rounds=2), tmp_path / "run", Progress(quiet=True))
    run = dyno.load(tmp_path / "run")
    assert ("visible differences", report_self_test.SELF_TEST_HINT) in sections.list_terms(run.data)
    self_test.keep(known())
    page = dyno.load(tmp_path / "run").report(tmp_path / "with").read_text()
    assert page.count("This run can see") == 2, "below the verdict and in the method"


def test_self_tests_of_one_configuration_are_sessions() -> None:
    first = known()
    for factor in (1.0, 1.02, 0.99):
        rounds = tuple(replace(one, first_s=one.first_s * factor) for one in first.rounds)
        self_test.keep(replace(first, rounds=rounds))
    found, _ = self_test.find("cpu")
    assert found is not None
    logs = np.log([1.0, 1.02, 0.99])
    assert found.sessions == pytest.approx([*(np.log(1.015e-3) + logs)], abs=1e-4)
    assert found.session_spread == pytest.approx(logs.std(ddof=1))
    assert "The 3 self-tests of this kind differ by 1.5 %" in " ".join(report_self_test.list_sentences(found))
    trials = [cast(TrialResult, SimpleNamespace(device="cpu"))]
    renewed = self_test.renew(Results(Path("run"), trials, self_test=SelfTest(first).summary())).self_test
    assert renewed is not None and renewed.sessions == 3
    other = replace(renewed, machine={}, sessions=1)
    assert self_test.renew(Results(Path("run"), trials, self_test=other)).self_test == other
    self_test.keep(replace(first, configuration="another net"))
    found, _ = self_test.find("cpu")
    assert found is not None and len(found.sessions) == 1


@pytest.mark.usefixtures("preloaded")
def test_self_tests_of_other_machines_are_ignored(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, card = known(), SimpleNamespace(name="card", uuid="GPU-1", close=lambda: None)
    monkeypatch.setattr(self_test, "find_gpu", lambda *_: card)
    self_test.keep(replace(kept, device="cuda:0", machine=self_test.identify_machine("cuda:0")))
    assert self_test.find("cuda:0")[0] is not None
    card.uuid = "GPU-2"
    found, wrong = self_test.find("cuda:0")
    assert found is None and "gpu_uuid was GPU-1" in wrong
    assert [(one["device"], "gpu_uuid was" in one["state"]) for one in self_test.list_states()] == [
        ("cpu", False), ("cuda:0", True),
    ]  # fmt: skip
    self_test.find_place("cuda:0").unlink()
    self_test.keep(replace(kept, machine={**kept.machine, "cores": 999}))
    found, wrong = self_test.find("cpu")
    assert found is None and "cores was 999" in wrong
    (state,) = self_test.list_states()
    assert state["grade"] == "" and "cores was 999" in state["state"]
    execute(fake_study(), tmp_path / "run", Progress(quiet=True))
    assert not (tmp_path / "run" / "self-test.json").exists()
    write_json(self_test.find_place("cpu"), {**to_json(kept), "rounds": "none"})
    assert self_test.find("cpu") == (None, "it can't be read")


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--minutes", 0.01), "give --minutes 0.2 or more"),
        (("--minutes", "nan"), "too short"),
        (("--device", "cuda:0"), "cuda:0"),
        (("--batch", "1,2"), "make 2 trials"),
        (("--backend", "onnxruntme"), "did you mean 'onnxruntime'"),
        (("--format", "xml"), "unknown format"),
    ],
)
def test_invalid_options_are_refused_in_one_line(refused: Any, options: tuple[Any, ...], said: str) -> None:
    backend = () if "--backend" in options else ("--backend", "fake")
    line = partial(refused, "selftest", "fake:net", "--channels", 1)
    assert said in line(*backend, *options)


@pytest.mark.usefixtures("preloaded")
def test_a_failing_trial_is_reported_in_one_line(call: Any) -> None:
    code, out, err = call("selftest", "fake:net", "--channels", 1, "--backend", "fake@fail=exception")
    assert (code, out) == (2, "")
    assert "scripted failure" in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.usefixtures("preloaded")
def test_too_few_or_too_slow_rounds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses("3 or more", dyno.selftest, "fake:net", **{**FAKE, "rounds": 2})
    later = iter(range(0, 10**9, 100))  # the clock advances by 100 s per call
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(later))))
    monkeypatch.setattr(module, "_measure_round", lambda *_: None)
    refuses(r"give --minutes \d+", dyno.selftest, "fake:net", **{**FAKE, "minutes": 0.1, "rounds": 0})


def test_each_round_is_in_one_study_and_looks_start_at_the_first() -> None:
    sure = [-0.05, -0.051, -0.049] * 2
    assert studies(sure, 3, 10) == [StudyOutcome(stats.SLOWER, 3), StudyOutcome(stats.SLOWER, 3)]
    assert studies([*sure, -0.05], 3, 10) == [StudyOutcome(stats.SLOWER, 3)] * 2, "a round that is left is no study"
    assert studies([0.001, -0.001, 0.0], 3, 10) == [StudyOutcome(stats.EQUIVALENT, 3)]
    wild = [0.5, -0.5, 0.4, -0.4] * 3
    assert studies(wild, 3, 6) == [StudyOutcome(stats.UNDECIDED, 6)] * 2
    assert studies(wild, 3, 13) == []


def test_repeated_looks_keep_the_error_in_simulation() -> None:
    draw = np.random.default_rng(0)
    equal = studies(draw.normal(0.0, 0.02, 20_000), 3, 60)
    wrong = [one for one in equal if one.verdict in (stats.FASTER, stats.SLOWER)]
    assert len(equal) > 300 and len(wrong) / len(equal) < 0.05
    slowed = studies(draw.normal(-np.log(1.02), 0.01, 20_000), 3, 60)
    assert np.mean([one.verdict == stats.SLOWER for one in slowed]) > 0.95
    assert np.median([one.rounds for one in slowed]) < 15
