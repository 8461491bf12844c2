"""Only undecided trials get further rounds, within the time, and a killed study continues where it stopped."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno import Study
from dyno.jobs.progress import Progress
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results import stats
from dyno.results.blocks import log_ratios
from dyno.results.ranking import UndecidedPair, list_contenders, list_pending
from dyno.results.run_data import RunData
from dyno.results.trial_result import load_run
from dyno.runner import execute as run_execute
from dyno.runner.execute import execute
from dyno.runner.run_folder import read_earlier
from dyno.worker.record import Measurement, Record, read_json, write_json, write_record
from dyno.worker.spec import DEFAULT_ROUNDS, Job, Trial, UserError, from_json, to_json
from refusals import refuses

# The reference, a clearly slower trial, and one too similar to tell apart in runs of this length.
REFERENCE, CLEAR, LIKE = "fake@latency_ms=2", "fake@latency_ms=9", "fake@latency_ms=2@noise=0.1"
FIRST = 2


def launch(job: Job, folder: Path, *rest: Any) -> Record:
    """Write a measured job: seconds by the trial's options, varied from round to round as scripted."""
    assert job.trial is not None
    options, number = job.trial.options, job.round
    odd = options.get("noise", 0.001) * (-1) ** (number + number // 2)
    seconds = options["latency_ms"] / 1e3 * (1 + odd) * np.linspace(0.999, 1.001, 40)
    write_json(folder / "job.json", to_json(job))
    np.savez(folder / "samples.npz", latency_model=seconds)
    latency = Measurement("latency", "s", "duration", None, "latency_model", "model", "host", "seconds")
    record = Record("ok", "done", trial=job.trial.id, round=number, seconds=30.0, measurements=(latency,))
    write_record(folder, record)
    return record


class Stopped(Progress):
    """Records started rounds and notes, and ends the study at a job of round `rounds`."""

    def __init__(self, rounds: int = 1000) -> None:
        super().__init__(quiet=True)
        self.rounds, self.began, self.said = rounds, Counter[int](), list[str]()

    def start(self, trial: Trial, round_index: int, kind: str = "round") -> None:
        """See `Progress.start`."""
        if round_index >= self.rounds:
            raise KeyboardInterrupt
        self.began[round_index] += 1

    def note(self, line: str) -> None:
        """See `Progress.note`."""
        self.said.append(line)


@pytest.fixture
def study(fake_study: Any) -> Any:
    def make(**fields: Any) -> Study:
        # With a negligible margin nothing is equivalent.
        usual = {"rounds": FIRST, "until": "decided", "minutes": 1e6, "equivalent": 1e-9, "reference": REFERENCE}
        return fake_study(**{"backends": (REFERENCE, LIKE, CLEAR), **usual, **fields})

    return make


def rounds(folder: Path) -> dict[str, list[str]]:
    """Return each trial's rounds, by its backend and options."""
    return {trial.variant: sorted(r.folder.name for r in trial.rounds) for trial in load_run(folder)}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno.runner.execute.launch_in_turn", launch)


def test_further_rounds_are_for_undecided_pairs(study: Any, tmp_path: Path, scripted: None) -> None:
    both = ("model", "all")
    with pytest.raises(KeyboardInterrupt):
        execute(study(boundaries=both), tmp_path, Stopped(4))
    seen = {key: len(each) for key, each in rounds(tmp_path).items()}
    assert seen == {REFERENCE: 4, LIKE: 4, CLEAR: FIRST}
    timed = {
        path.parent.name: from_json(Job, read_json(path)).plan.boundaries
        for path in tmp_path.glob("trials/*/r*/job.json")
    }
    assert timed == {"r0": both, "r1": both, "r2": ("model",), "r3": ("model",)}, "no more than the pair is compared at"
    frame = (run := trial_table.read_trials(tmp_path)).frame
    assert run.rule.first == FIRST
    assert dict(zip(frame["options"], frame["verdict"], strict=True)) == {
        "latency_ms=2": "reference", "latency_ms=9": stats.SLOWER, "latency_ms=2 noise=0.1": stats.UNDECIDED,
    }  # fmt: skip
    execute(study(minutes=5.0, boundaries=both), tmp_path, progress := Stopped())  # ten jobs of half a minute
    assert not progress.began and "2 trials are left in pairs that 5 minutes could not decide" in progress.said[-1]
    execute(study(minutes=6.0, boundaries=both), tmp_path, progress := Stopped())
    assert not progress.began, "a round that fits is not begun where it is likely to decide nothing"
    with pytest.raises(KeyboardInterrupt):
        execute(study(boundaries=both), tmp_path, progress := Stopped(6))  # with more minutes it continues
    assert progress.began == {4: 2, 5: 2}
    execute(study(equivalent=500.0, boundaries=both), tmp_path, progress := Stopped())
    assert not progress.began and not progress.said, "with that margin everything is decided"


@pytest.mark.slow
def test_models_share_the_time_limit(
    study: Any, tmp_path: Path, scripted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of eight minutes are left after two rounds of jobs of half a minute: two for each model."""
    monkeypatch.setattr("dyno.runner.execute._fits", lambda *_: True)
    models = ("fake:net", "fake:other")
    execute(study(models=models, backends=(REFERENCE, LIKE), minutes=8.0), tmp_path, Stopped())
    assert [len(trial.rounds) for trial in load_run(tmp_path)] == [4] * 4


@pytest.mark.usefixtures("preloaded")
def test_further_rounds_interleave_undecided_trials_and_the_reference(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(folder: Path, trials: Sequence[Trial]) -> list[UndecidedPair]:
        like = frozenset(t.id for t in trials if t.options["latency_ms"] == 2)
        return [UndecidedPair(like, "model", 1)] if len(rounds(tmp_path)[LIKE]) < 4 else []

    monkeypatch.setattr(run_execute, "_find_pending", left)
    execute(study(turns=True, block=0.02, boundaries=("model", "throughput")), tmp_path, progress := Stopped())
    assert progress.began == {0: 12, 1: 11, 2: 6, 3: 6}, "to load, for each boundary, and to end: the last two together"
    reference, clear, like = (
        next(t for t in load_run(tmp_path) if t.variant == name) for name in (REFERENCE, CLEAR, LIKE)
    )
    assert [len(log_ratios(reference, t, "model", keep_disturbed=True)) for t in (clear, like)] == [FIRST, 4]
    assert not reference.companions
    assert [len([r for r in t.rounds if r.value("throughput", "throughput")]) for t in (clear, like)] == [FIRST, FIRST]
    found = trial_table.read_trials(tmp_path).frame.set_index("trial")
    assert found["measured"][clear.id] == stats.IN_TURNS and found["speedup"][clear.id] > 0


def test_contenders_are_the_finalists_and_trials_without_a_clear_loss(
    study: Any, tmp_path: Path, scripted: None
) -> None:
    latencies = {"reference": 9, "fast": 1, "runner-up": 1.01, "near": 1.3, "far": 3, "wild": 3.01}
    backends = {name: f"fake@latency_ms={each}" for name, each in latencies.items()}
    backends["wild"] += "@noise=0.6"
    execute(study(rounds=3, minutes=1e-6, backends=(*backends.values(),), reference=backends["reference"]), tmp_path,
            Stopped())  # fmt: skip
    run = trial_table.read_trials(tmp_path)
    names = {t.id: name for t in run.records for name, each in backends.items() if each == t.variant}
    assert {names[id] for id in list_contenders(run)} == {"reference", "fast", "runner-up", "near", "wild"}
    run.records.settings["until"] = "every-row"
    assert list_contenders(run) == {*names}


@pytest.mark.usefixtures("preloaded")
def test_short_of_time_planned_rounds_skip_non_contenders(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(run: RunData) -> set[str]:
        return {t.id for t in run.records if t.variant != CLEAR}

    monkeypatch.setattr("dyno.results.ranking.list_contenders", find)
    monkeypatch.setattr(run_execute, "_find_pending", lambda *_: [])

    def measure(minutes: float) -> dict[str, int]:
        short = study(rounds=5, minutes=minutes, turns=True, block=0.02, boundaries=("model",))
        execute(short, tmp_path, progress := Stopped())
        return dict(progress.began) | {"left": len(progress.remaining)}

    def count_rounds() -> dict[str, int]:
        return {key: len(each) for key, each in rounds(tmp_path).items()}

    def say() -> str:
        return " ".join(verdict.list_sentences(trial_table.read_trials(tmp_path)))

    assert measure(1e-6)["left"] == 0
    assert count_rounds() == {REFERENCE: 3, LIKE: 3, CLEAR: 2}
    assert "3 of 3 trials have 2 rounds only: --minutes are over" in say() and "Not all rounds" not in say()
    assert measure(1e-6) == {"left": 0}, "the same command changes nothing"
    # Five rounds of all would take more than half of 2.6 times the eight rounds' duration.
    seconds = sum(r.record.seconds for t in load_run(tmp_path) for r in t.rounds)
    assert measure(2.6 * seconds / 60)["left"] == 0
    assert count_rounds() == {REFERENCE: 5, LIKE: 5, CLEAR: 3}
    assert "1 of 3 trials has 3 rounds only: a winner leads clearly" in say() and "Not all rounds" not in say()
    assert measure(2.6 * seconds / 60) == {"left": 0}, "the same command changes nothing"
    measure(1e6)
    assert count_rounds() == {REFERENCE: 5, LIKE: 5, CLEAR: 5} and "rounds only" not in say()


def test_until_rounds_adds_no_rounds(study: Any, tmp_path: Path, scripted: None) -> None:
    execute(study(until="rounds"), tmp_path, progress := Stopped())
    assert progress.began == {0: 3, 1: 3}
    assert trial_table.read_trials(tmp_path).rule.first == 0
    # Further looks may follow the first, but repeated looks are never again judged as a single look.
    with pytest.raises(KeyboardInterrupt):
        execute(study(), tmp_path, Stopped(FIRST))
    refuses("until=decided, this command says until=rounds", execute, study(until="rounds"), tmp_path, Stopped())
    refuses("rounds=2, this command says rounds=3", execute, study(rounds=3), tmp_path, Stopped())


def test_the_verdict_is_the_same_when_it_is_shown_later(study: Any, tmp_path: Path, scripted: None) -> None:
    execute(study(backends=(REFERENCE, CLEAR)), tmp_path, progress := Stopped())
    assert progress.began == {0: 2, 1: 2} and not list_pending(trial_table.read_trials(tmp_path))
    frame = trial_table.read_trials(tmp_path).frame
    (row,) = frame[frame["verdict"] == stats.SLOWER].to_dict("records")
    slow, fast = (t.medians("model") for t in sorted(load_run(tmp_path), key=lambda t: -int(t.options["latency_ms"])))
    look = stats.decide_apart(slow, fast, stats.Rule(first=FIRST))
    assert (row["speedup_low"], row["speedup_high"]) == pytest.approx((look.low, look.high))
    assert look.low < stats.decide_apart(slow, fast).low, "a look costs a part of the error"


@pytest.mark.parametrize(("noise", "least", "most"), [(0.01, 4, 4), (0.06, 5, 11), (0.3, 12, 12)])
def test_rounds_continue_until_the_interval_is_narrow_up_to_threefold(
    study: Any, tmp_path: Path, scripted: None, noise: float, least: int, most: int
) -> None:
    fast = f"fake@latency_ms=2@noise={noise}"
    execute(study(rounds=4, backends=(CLEAR, fast), reference=CLEAR), tmp_path, progress := Stopped())
    found = {len(each) for each in rounds(tmp_path).values()}
    assert len(found) == 1 and least <= found.pop() <= most and not progress.said
    frame = trial_table.read_trials(tmp_path).frame
    (row,) = frame[frame["verdict"] == stats.FASTER].to_dict("records")
    is_narrow = row["speedup_high"] / row["speedup"] <= 1.15 and row["speedup"] / row["speedup_low"] <= 1.15
    assert is_narrow == (most < 12)


def test_pairs_with_a_trial_outside_the_study_get_no_rounds(study: Any, tmp_path: Path, scripted: None) -> None:
    execute(study(backends=(REFERENCE,)), tmp_path, Stopped())
    execute(study(backends=(LIKE,), reference=LIKE), tmp_path, progress := Stopped())
    assert progress.began == {0: 1, 1: 1} and list_pending(trial_table.read_trials(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        execute(study(backends=(REFERENCE, LIKE)), tmp_path, Stopped(3))
    assert {len(each) for each in rounds(tmp_path).values()} == {3}


def test_a_backend_keeps_its_own_number_of_rounds(study: Any, tmp_path: Path, scripted: None) -> None:
    execute(study(backends=(REFERENCE, f"{LIKE}@rounds=3")), tmp_path, progress := Stopped())
    assert progress.began == {0: 2, 1: 2, 2: 1}


def test_folders_of_earlier_versions_resume(study: Any, tmp_path: Path, scripted: None) -> None:
    """Earlier versions measured only the requested rounds, without turns, and study.toml didn't say so."""
    execute(study(until="rounds"), tmp_path, Stopped())
    path = tmp_path / "study.toml"
    path.write_text(path.read_text().replace('until = "rounds"\n', "").replace("turns = false\n", ""))
    before = read_earlier(tmp_path)
    assert before and (before.rounds, before.until, before.turns) == (FIRST, "rounds", False)
    assert trial_table.read_trials(tmp_path).rule.first == 0
    with pytest.raises(UserError, match="was measured with turns=False, this command says turns=True"):
        execute(study(turns=True), tmp_path, Stopped())
    execute(study(equivalent=1e6), tmp_path, progress := Stopped())
    assert not progress.began and 'until = "decided"' in path.read_text()


FIRST_LOOK = tuple(f"r{number}" for number in range(DEFAULT_ROUNDS))  # of a study without a number of rounds
COMMAND = "run fake:net --boundaries model --seconds 0.15 --block 0.05 --warmup 0.02 --threads 1 --out run".split()


def ran(folder: Path) -> set[tuple[str, ...]]:
    return {tuple(each) for each in rounds(folder / "run").values()}


@pytest.mark.usefixtures("unreported")
@pytest.mark.usefixtures("preloaded")
def test_a_clear_difference_ends_at_the_first_look(call: Any, tmp_path: Path) -> None:
    """The factor is a thousand, as no disturbance slows one of two runs so much in one of five rounds."""
    code, _, err = call(
        *COMMAND, "--backend", "fake@latency_ms=0.1,fake@latency_ms=100", "--reference", "fake@latency_ms=0.1"
    )
    assert code == 0 and "could not decide" not in err and ran(tmp_path) == {FIRST_LOOK}
    row = trial_table.read_trials(tmp_path / "run").frame.set_index("options").loc["latency_ms=100"]
    assert (row["verdict"], row["measured"]) == (stats.SLOWER, stats.IN_TURNS)


@pytest.mark.usefixtures("unreported")
@pytest.mark.usefixtures("preloaded")
def test_equal_speeds_end_as_equivalent_or_at_the_ceiling(call: Any, tmp_path: Path) -> None:
    backends = "--backend", "fake@latency_ms=1,fake@latency_ms=1.0@noise=0", "--reference", "fake@latency_ms=1"
    code, _, err = call(*COMMAND, *backends, "--equivalent", "1e-9", "--minutes", "0.001")
    assert code == 0 and "net: 2 trials are left in pairs that 0.001 minutes could not decide" in err
    assert ran(tmp_path) == {FIRST_LOOK[:3]}
    code, _, err = call(*COMMAND, *backends, "--equivalent", "1e6")  # margin: a factor of ten thousand
    assert code == 0 and "could not decide" not in err and ran(tmp_path) == {FIRST_LOOK}
    frame = trial_table.read_trials(tmp_path / "run").frame
    assert sorted(frame["verdict"]) == [stats.EQUIVALENT, "reference"]


@pytest.mark.parametrize("words", [["--backend", "fake"], ["--backend", "fake,fake@noise=0", "--rounds", "1"]])
@pytest.mark.usefixtures("unreported")
def test_a_study_without_pairs_adds_no_rounds(words: list[str], call: Any, tmp_path: Path) -> None:
    assert call(*COMMAND, *words, "--minutes", "1e6")[0] == 0
    assert ran(tmp_path) == {("r0",) if "--rounds" in words else FIRST_LOOK}


def test_invalid_settings_are_refused_in_one_line(study: Any) -> None:
    for fields, words in (
        ({"until": "done"}, "unknown until 'done'"),
        ({"rounds": 1}, "give --rounds 2 or more"),
        ({"minutes": 0.0}, "minutes is 0.0; it must be more than 0"),
        ({"equivalent": 0.0}, "equivalent is 0.0; it must be more than 0"),
    ):
        refuses(words, study, **fields)
