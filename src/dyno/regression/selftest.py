"""`dyno.selftest`: test of Dyno's measurements on this machine, with processes of known difference."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from dyno import __version__
from dyno.jobs.progress import Progress
from dyno.report.self_test import list_sentences
from dyno.results.blocks import compare_blocks
from dyno.results.files import read_npz
from dyno.results.rounds import Round
from dyno.results.self_test import POWER_CURVE_ROUNDS, ProcessPair, SelfTest, StoredSelfTest, TestRound
from dyno.runner import self_test
from dyno.runner.device_lock import hold_device
from dyno.runner.execute import Files
from dyno.runner.turns import InterleavedGroup, InterleavedJob
from dyno.store import find_versions
from dyno.study.defaults import SELF_TEST_MINUTES, check_device
from dyno.study.interpreters import list_installed
from dyno.study.plan import expand
from dyno.study.study import Study
from dyno.worker import registry
from dyno.worker.option_values import check_types, native
from dyno.worker.record import Record
from dyno.worker.spec import DEFAULT_ROUNDS, SLOWDOWN_OPTION, Artifact, Job, Trial, UserError

TEST_MODEL = "dyno.worker.nets.digits:resnet18"  # the demo's network with random weights
OF_MODEL: dict[str, Any] = {"channels": 1, "sizes": ("64",)}
TEST_BACKENDS = ("onnxruntime", "tensorrt", "openvino", "pytorch")  # the first one installed for the device
TEST_SETTINGS: dict[str, Any] = {"seconds": 0.8, "warmup": 0.3, "timeout": 120.0}
MIN_STUDY_ROUNDS = POWER_CURVE_ROUNDS[0]  # fewest rounds of a self-test
MAX_BUILDS = 10**6  # more than any self-test makes, so that no build is used twice


@dataclass(frozen=True)
class Layout:
    """Processes of a round, by the share that slows each one down, and their pairs by index."""

    slowdowns: tuple[float, ...]
    pairs: tuple[tuple[int, int], ...]


# Each is compared with the first, as trials of a study are with their reference.
AGAINST_THE_FIRST = Layout((0.0, 0.0, 0.01, 0.02, 0.05), ((0, 1), (0, 2), (0, 3), (0, 4)))


class CalibrationResult(SelfTest):
    """A self-test of this machine that prints as its sentences."""

    def __str__(self) -> str:
        return "\n".join(list_sentences(self))


def selftest(
    model: str = "",
    *,
    minutes: float = SELF_TEST_MINUTES,
    rounds: int = 0,
    backend: str = "",
    device: str = "cpu",
    rebuild: bool = False,
    layout: Layout = AGAINST_THE_FIRST,
    keep: bool = True,
    quiet: bool = False,
    **fields: Any,
) -> SelfTest:
    """Test Dyno's measurements on this machine for `minutes`, or for at most `rounds` rounds (0: no limit).

    In each round fresh processes of one trial are measured interleaved: equal ones, and some that are slowed down by 1,
    2 and 5 %. With `rebuild` each round builds the engine twice, for the first process and for the others, so that the
    difference between builds is part of the noise. `model` is a source as in `Study` (default: a small network of
    Dyno's), `fields` are other fields of `Study`. The result has the figures; studies on this machine keep a summary of
    it, unless `keep` is False or engines are rebuilt. Raises `UserError` if the minutes are too few, if the trial does
    not run, or if builds of its engine don't differ.
    """
    minutes, rounds = native((minutes, rounds))
    check_types({"minutes": minutes, "rounds": rounds}, {"minutes": float, "rounds": int})
    progress = Progress(quiet=quiet)
    study = _build_study(model, backend, device, fields)
    if rounds and rounds < MIN_STUDY_ROUNDS:
        raise UserError(f"{rounds} rounds are too few for a self-test; give {MIN_STUDY_ROUNDS} or more")
    if not minutes * 60 >= (min_seconds := MIN_STUDY_ROUNDS * len(layout.slowdowns) * study.seconds):
        raise _too_short(minutes, min_seconds)
    trial = _plan_trial(study, rebuild)
    engines = _Engines(trial, Files(progress, study.build_timeout_s), rebuild)
    engines.pair(0)  # failures to build end the self-test before its time counts
    with progress.show_study([]):
        test_rounds = tuple(_iter_rounds(engines, layout, minutes, rounds, progress))
    result = StoredSelfTest(
        datetime.now().astimezone().isoformat(timespec="seconds"),
        __version__, self_test.identify_machine(device), device, trial.label,
        trial.runtime.threads, study.seconds, study.block, DEFAULT_ROUNDS, test_rounds,
        find_versions(trial.runtime, registry.find(trial.backend).requires), builds=rebuild,
    )  # fmt: skip
    if keep and not rebuild:
        result = self_test.keep(result)
    return CalibrationResult(result)


def _build_study(model: str, backend: str, device: str, fields: dict[str, Any]) -> Study:
    """Return the study of the single trial, on the given backend or the first one installed."""
    settings = {**TEST_SETTINGS, **({} if model else OF_MODEL), **fields}
    study = Study(models=(model or TEST_MODEL,), device=device, boundaries=("model",), **settings)
    check_device(study)
    backends = [backend] if backend else [name for name in TEST_BACKENDS if name in list_installed(device)]
    return replace(study, backends=tuple(backends[:1]), turns=True)


@dataclass(frozen=True)
class _Engines:
    """Files that a round's processes load: one file for all rounds, or two builds per round."""

    trial: Trial
    files: Files
    builds: bool

    def pair(self, number: int) -> tuple[Artifact | None, Artifact | None]:
        """Return the file of the round's first process and the file of the others; None if the trial needs no file."""
        if not self.builds:
            return self._build_file(0), self._build_file(0)
        return self._build_file(2 * number), self._build_file(2 * number + 1)

    def _build_file(self, build_index: int) -> Artifact | None:
        artifact = self.files.get(self.trial, build_index)
        if isinstance(artifact, Record):
            raise UserError(f"{self.trial.label}: {artifact.reason}")
        return artifact


def _plan_trial(study: Study, builds: bool) -> Trial:
    entries = expand(replace(study, builds=MIN_STUDY_ROUNDS) if builds else study)
    if len(entries) > 1:
        names = ", ".join(entry.trial.label for entry in entries[:3])
        problem = f"these options make {len(entries)} trials ({names}…)"
        raise UserError(f"{problem}, and a self-test measures one; give one of each")
    if entries[0].refusal:
        raise UserError(entries[0].refusal)
    trial = entries[0].trial
    return replace(trial, plan=replace(trial.plan, builds=MAX_BUILDS)) if builds else trial


def _too_short(minutes: float, least_s: float) -> UserError:
    tenths = math.ceil(least_s / 6) / 10
    return UserError(
        f"--minutes {minutes:g} is too short for {MIN_STUDY_ROUNDS} rounds, the fewest of a self-test; "
        f"give --minutes {tenths:g} or more"
    )


def _iter_rounds(
    engines: _Engines, layout: Layout, minutes: float, max_rounds: int, progress: Progress
) -> Iterator[TestRound]:
    """Yield rounds of fresh processes until the time is up or `max_rounds` are done (0: no limit)."""
    start, longest_s, round_index = time.monotonic(), 0.0, 0
    with tempfile.TemporaryDirectory(prefix="dyno-self-test-") as folder:
        while round_index < MIN_STUDY_ROUNDS or time.monotonic() - start + longest_s <= minutes * 60:
            round_start = time.monotonic()
            progress.show_step(
                f"self-test, round {round_index + 1}, after {(round_start - start) / 60:.1f} of {minutes:g} minutes"
            )
            round_folder = Path(folder) / str(round_index)
            yield _measure_round(engines, layout, round_folder, round_index, progress)
            shutil.rmtree(round_folder, ignore_errors=True)
            longest_s = max(longest_s, time.monotonic() - round_start)
            if not round_index and longest_s * MIN_STUDY_ROUNDS > minutes * 60:
                raise _too_short(minutes, longest_s * MIN_STUDY_ROUNDS)
            round_index += 1
            if round_index == max_rounds:
                return


def _measure_round(engines: _Engines, layout: Layout, folder: Path, round_index: int, progress: Progress) -> TestRound:
    """Measure one round: a fresh process for each slow-down, all interleaved."""
    members, trial = [], engines.trial
    first_file, other_file = engines.pair(round_index)
    for index, share in enumerate(layout.slowdowns):
        artifact = other_file if index else first_file
        # Counted from 1, as round 0 of a trial also evaluates.
        job = Job(
            "run", trial.runtime, trial, artifact=artifact, round=round_index + 1, options={SLOWDOWN_OPTION: share}
        )
        members.append(InterleavedJob(job, folder / str(index), round_index))
        members[-1].folder.mkdir(parents=True)
    before = psutil.cpu_times()
    with hold_device(trial.runtime, progress.show_waiting):
        InterleavedGroup(members, f"self-test {round_index}", Progress(quiet=True), lambda _: None).run()
    rounds = [_read_round(member, len(members)) for member in members]
    medians = [process.block_medians("latency", "model") for process in rounds]
    pairs = [
        ProcessPair(layout.slowdowns[b], tuple(map(float, compare_blocks(medians[a], medians[b]))))
        for a, b in layout.pairs
    ]
    busy_counts = [float(process.facts.others_busy.get("model", 0.0)) for process in rounds]
    first_s, stolen_share = statistics.median(medians[0].values()), _compute_stolen_share(before)
    return TestRound(first_s, tuple(pairs), statistics.fmean(busy_counts), stolen_share, _read_clocks(rounds))


def _read_round(member: InterleavedJob, count: int) -> Round:
    """Return the round that the member's process measured; raise `UserError` if the process failed."""
    record = member.record
    if record is None:
        raise UserError(f"not enough memory for {count} processes of {member.trial.label}; use a smaller model")
    if record.status != "ok":
        raise UserError(f"{member.trial.label} can't be measured: {record.status} at {record.stage}: {record.reason}")
    return Round(member.folder, member.round_index, record, member.trial.runtime.device)


def _compute_stolen_share(before: Any) -> float:
    """Return the share of all processors' time since `before` that the host gave to other guests; 0 if unknown."""
    after = psutil.cpu_times()
    span = sum(after) - sum(before)
    return max(0.0, getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / span if span > 0 else 0.0


def _read_clocks(rounds: Sequence[Round]) -> tuple[float, ...]:
    """Return the mean clock of each process in MHz (the GPU's if it ran on one); () if the system reports none."""
    clocks = []
    for process in rounds:
        name = "gpu_clock" if process.device.startswith("cuda") else "frequency"
        try:
            values = read_npz(process.folder / "telemetry.npz", (name,)).get(name)
        except (OSError, ValueError):
            values = None
        samples = [float(v) for v in values if v == v] if values is not None else []
        clocks += [statistics.fmean(samples)] if samples else []
    return tuple(clocks)
