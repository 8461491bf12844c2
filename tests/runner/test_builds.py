"""Rounds over several builds of an engine: equal engines with unequal builds are called neither faster nor slower."""

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno import Study, UserError
from dyno.jobs.progress import Progress
from dyno.regression import comparison
from dyno.regression.compare_table import compare_runs
from dyno.report import tables
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results import stats
from dyno.results.blocks import log_ratios
from dyno.results.trial_result import load_run
from dyno.runner.device_lock import launch_in_turn
from dyno.runner.execute import Files, execute
from dyno.study import plan
from dyno.study.plan import expand
from dyno.winner import export_winner
from dyno.worker import registry
from dyno.worker.backends.tensor_rt.settings import Settings
from dyno.worker.facts.job import Facts
from dyno.worker.record import Measurement, Record, write_json, write_record
from dyno.worker.spec import Job, Recipe, Runtime, to_json
from logged import Log

pytestmark = pytest.mark.usefixtures("preloaded")

A, B = "drawn_engine:Engine@kind=a@latency_ms=0.1", "drawn_engine:Engine@kind=b@latency_ms=0.1"
# Seconds of each build relative to the mean build: the same four values in another order.
DRAWN = {"a": (0.93, 1.04, 0.99, 1.05), "b": (1.05, 0.99, 1.04, 0.93)}


def launch(job: Job, folder: Path, *rest: Any) -> Record:
    """Make files as usual; for a round, write the build's seconds with the round's noise instead of measuring."""
    if job.trial is None:
        return launch_in_turn(job, folder, *rest)
    assert job.artifact is not None
    options, number = job.trial.options, job.round
    build = job.options.get("build")
    assert (f"'build', {build}" in Path(job.artifact.path).read_text()) == (build is not None)
    seconds = 0.01 * DRAWN[str(options["kind"])][(build or 1) - 1] * (1 + 0.001 * (-1) ** (number + number // 2))
    write_json(folder / "job.json", to_json(job))
    np.savez(folder / "samples.npz", latency_model=seconds * np.linspace(0.999, 1.001, 40))
    latency = Measurement("latency", "s", "duration", None, "latency_model", "model", "host", "seconds")
    record = Record(
        "ok", "done", trial=job.trial.id, round=number, seconds=30.0, measurements=(latency,), facts=Facts(build=build)
    )
    write_record(folder, record)
    return record


def builds_of(log: Log) -> list[Any]:
    """Return kind, build and timing cache of each engine made."""
    made = [recipe.options for recipe, _ in log.files]
    return [(options["kind"], options.get("build"), options.get("timing_cache")) for options in made]


@pytest.fixture
def measured(drawn_engine: Path, fake_study: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("dyno.runner.execute.launch_in_turn", launch)

    def run(name: str, **fields: Any) -> tuple[Any, Log]:
        execute(fake_study(**{"backends": (A, B), "rounds": 8, **fields}), drawn_engine / name, log := Log())
        return trial_table.read_trials(drawn_engine / name), log

    return run


def test_equal_engines_differ_in_one_build_and_not_over_builds(measured: Any) -> None:
    one, log = measured("one")
    assert sorted(builds_of(log)) == [("a", None, None), ("b", None, None)]
    other = one.frame.iloc[1]
    assert (other["verdict"], other["builds"], other["rounds"]) == (stats.SLOWER, 1, 8)
    said = " ".join(verdict.list_sentences(one))
    assert "of one build: another build may differ" in said and "builds" not in said

    four, log = measured("four", builds=4)
    assert Counter(builds_of(log)) == Counter((kind, build, False) for kind in "ab" for build in (1, 2, 3, 4))
    other = four.frame.iloc[1]
    assert (other["verdict"], other["builds"], other["rounds"]) == (stats.UNDECIDED, 4, 8)
    assert other["speedup"] == pytest.approx(1, abs=0.002) and other["speedup_high"] > 1.05
    assert other["latency_ms_high"] - other["latency_ms_low"] > 1  # Student's t over four builds with a spread of 5 %
    assert [r.facts.build for r in four.records.trials[0].rounds] == [1, 2, 3, 4] * 2
    said = " ".join(verdict.read_verdict(four).lines)
    assert "over 4 builds" in said and "one build" not in said
    (variance,) = tables.make_tables(four, "variance")
    assert all(row["builds_share"] > 90 and row["advice"].startswith("more builds") for row in variance.rows)
    again, log = measured("four", builds=4)
    assert not log.files and not log.began and len(again.frame) == 2


def test_verdicts_over_builds_are_labelled_as_such(measured: Any) -> None:
    four, _ = measured("equal", builds=4, equivalent=30.0)
    assert four.frame.iloc[1]["verdict"] == stats.EQUIVALENT
    assert "holds for builds, of which 4 were measured" in " ".join(verdict.list_sentences(four))
    open_still = trial_table.read_trials(four.records.folder, equivalent=8.0)
    more = int(open_still.frame.iloc[1]["more_rounds"])
    assert 0 < more < 100
    said = " ".join(verdict.read_verdict(open_still).lines)
    assert f"about {more} more build" in said and f"next: measure with --builds {4 + more} and another --out" in said


def test_rounds_until_decided_cycle_through_the_builds(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno.runner.execute._fits", lambda *_: True)  # more builds than fit the minutes would decide
    run, log = measured("decided", builds=4, rounds=4, until="decided", minutes=6.0)  # jobs of half a minute
    assert [r.facts.build for r in run.records.trials[0].rounds] == [1, 2, 3, 4, 1, 2] and len(log.files) == 8
    row = run.frame.iloc[1]
    assert row["verdict"] == stats.UNDECIDED and "more build" in " ".join(verdict.list_sentences(run))


def test_the_fastest_build_is_exported(measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(job: Job, folder: Path, *_: Any) -> Record:
        (folder / "script.py").write_text("")
        return Record("ok", "done", facts=Facts(files=("script.py",)))

    monkeypatch.setattr("dyno.winner.launch", script)  # this backend has no script
    run, _ = measured("taken", builds=4)
    fastest = {"a": 1, "b": 4}  # the fastest builds of DRAWN
    for trial in run.records:
        kind = trial.spec.options["kind"]
        taken = export_winner(run, trial.id, tmp_path / kind)
        assert f"'build', {fastest[kind]}" in taken.file.read_text()
        assert taken.notes[0].startswith(f"build {fastest[kind]} of 4, the fastest")


def test_a_requested_build_is_the_only_build(measured: Any) -> None:
    run, _ = measured("named", builds=2, backends=(A, "drawn_engine:Engine@kind=b@latency_ms=0.1@build=3"))
    builds = {t.spec.options["kind"]: [r.build for r in t.rounds] for t in run.records}
    assert builds == {"a": [1, 2] * 4, "b": [0] * 8}
    assert {t.spec.options["kind"]: t.builds for t in run.records} == {"a": 2, "b": 1}
    assert "of one build" in " ".join(verdict.list_sentences(run))


def test_a_failed_build_fails_its_rounds(measured: Any) -> None:
    run, _ = measured("failing", builds=2, rounds=2, backends=(A, "drawn_engine:Engine@kind=b@fails=2"))
    failing = next(t for t in run.records if t.options.get("fails"))
    assert [r.status for r in failing.rounds] == ["ok", "failed"]
    assert failing.reason.startswith("make bin fp32: ValueError: this build failed (1 of 2 rounds good)")


def test_interleaved_processes_run_their_own_build(drawn_engine: Path, dyno: Any) -> None:
    words = ("--seconds", 0.1, "--warmup", 0.02, "--block", 0.01, "--boundaries", "model", "--channels", 1)
    both = ",".join([A, B, "fake@latency_ms=0.2"])
    out = drawn_engine / "r"
    dyno("run", "fake:net", "--backend", both, "--builds", 2, "--rounds", 4, *words, "--out", out, code=0)
    run = trial_table.read_trials(out)
    drawn = [t for t in run.records if t.backend == "drawn_engine:Engine"]
    other = next(t for t in run.records if t.backend == "fake")
    assert [[r.build for r in t.rounds] for t in drawn] == [[1, 2, 1, 2]] * 2
    assert not any(r.build for r in other.rounds) and other.builds == 0
    ratios = [log_ratios(*pair, "model", keep_disturbed=True) for pair in (drawn, (other, drawn[0]))]
    assert [len(each) for each in ratios] == [2, 2]
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert {row["builds"] for row in rows if row["reference"] != row["trial"]} == {"2"}
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "2 of each engine tuned by timing; a build is one observation" in report


def test_invalid_builds_are_refused(
    drawn_engine: Path, fake_study: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused("run", "fake:net", "--builds", 0) == "builds is 0; it must be at least 1"
    few = "builds is 5, but a round runs one build, and rounds is 3; give --rounds 5 or more"
    assert refused("run", "fake:net", "--builds", 5, "--rounds", 3) == few
    assert Study(models="fake:net", builds=5).rounds == 5, "unless the number of rounds is open"
    same = refused("run", "fake:net", "--backend", "fake", "--builds", 2, "--channels", 1)
    assert same.startswith("builds is 2, but the engines here (fake) are the same in every build")
    with pytest.raises(UserError, match=r"has rounds=1, too few for --builds 2"):
        expand(fake_study(backends=(f"{A}@rounds=1",), builds=2, rounds=2))
    monkeypatch.setattr("dyno.runner.execute.launch_in_turn", launch)
    execute(fake_study(backends=(A,), rounds=2), drawn_engine / "other", Log())
    with pytest.raises(UserError, match="was measured with builds=1, this command says builds=2"):
        execute(fake_study(backends=(A,), rounds=2, builds=2), drawn_engine / "other", Log())


def test_the_number_of_builds_does_not_change_the_trial_id(drawn_engine: Path, fake_study: Any) -> None:
    (one,) = expand(fake_study(backends=(A,), builds=1))
    assert one.trial.plan.builds == 1 and one.trial.build(3) == 0
    (two,) = expand(fake_study(backends=(A,), builds=2, rounds=2))
    assert [two.trial.build(number) for number in range(4)] == [1, 2, 1, 2] and two.trial.id == one.trial.id


@pytest.mark.parametrize(("builds", "said"), [(1, "One build of each engine"), (4, "Over 4 builds")])
def test_a_comparison_names_its_builds(measured: Any, drawn_engine: Path, builds: int, said: str) -> None:
    for name in ("before", "after"):
        measured(name, builds=builds)
    table = compare_runs(*(load_run(drawn_engine / name) for name in ("before", "after")))
    assert {row["builds"] for row in table.rows} == {builds}
    (line,) = [line for line in comparison.list_comparison(table) if "build" in line]
    assert line.startswith(said)


def test_tensorrt_builds_skip_the_timing_cache_and_engines_have_none(
    fake_trial: Any, fake_study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = fake_trial("tensorrt", runtime=Runtime(device="cuda:0"))
    trial = replace(trial, options={}, recipe=registry.find("tensorrt").recipe(trial))
    trial = replace(trial, plan=replace(trial.plan, builds=3))
    recipes: list[Recipe] = []
    monkeypatch.setattr(Files, "make_file", lambda files, recipe: recipes.append(recipe))
    Files(Progress(quiet=True)).make_files([trial])
    for build, recipe in enumerate(recipes, 1):
        settings = [Settings.from_options(each.options) for each in (recipe, recipe.fallback) if each is not None]
        assert {(each.build, each.timing_cache) for each in settings} == {(build, False)}
        assert recipe.parent == recipes[0].parent, "the graph is made once"
    assert len(recipes) == 3
    monkeypatch.setattr(type(registry.find("tensorrt")), "refuse", lambda *_: "")
    monkeypatch.setattr(plan, "explain_missing", lambda *_: "")
    for source, builds in (("fake:net", 3), ("file:/here/net.engine", 0)):
        study = fake_study(backends=("tensorrt",), builds=3, rounds=3)
        one = replace(trial, model=replace(trial.model, source=source))
        assert plan._check_trial(study, one).trial.plan.builds == builds
