"""Figures of requests at one rate, as pure functions of the stored times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from dyno.results import stats
from dyno.results.correctness import OUTPUTS_WRONG, find_mismatch, list_output_sources
from dyno.results.files import read_npz
from dyno.results.rounds import Round
from dyno.results.run_data import RunData
from dyno.results.stats import Interval, Rule, Speedup
from dyno.results.trial_result import TrialResult
from dyno.video import figures as videos
from dyno.video.figures import LoadRun
from dyno.worker.facts.job import ServeFacts, ServeStep
from dyno.worker.serving import rates
from dyno.worker.serving.options import PERCENTILES
from dyno.worker.spec import ENDPOINT_PREFIX


@dataclass(frozen=True)
class RateMeasurement:
    """One rate in one round; arrays hold a value per request, including warm-up, in seconds."""

    step: ServeStep
    facts: ServeFacts
    arrays: Mapping[str, np.ndarray]
    round: int = 0

    def _choose_counted(self, name: str) -> np.ndarray:
        return self.arrays[name][self.step.first :]

    @cached_property
    def latencies(self) -> np.ndarray:
        """Seconds from when each request was due until its answer, inf without an answer."""
        return rates.list_latencies(self._choose_counted("arrival"), self._choose_counted("ended"))

    @cached_property
    def _answered(self) -> np.ndarray:
        return np.asarray(np.isfinite(self.latencies))

    @property
    def count(self) -> int:
        """Number of requests that count."""
        return len(self.latencies)

    @property
    def refused(self) -> int:
        """Requests that found the queue full, or got no answer from a server."""
        return int(self._choose_counted("refused").sum())

    @property
    def unanswered(self) -> int:
        """Requests still waiting at the last answer."""
        return self.count - int(self._answered.sum()) - self.refused

    @property
    def backlog(self) -> int:
        """Requests waiting at the last arrival."""
        return rates.count_backlog(self.arrays["arrival"], self.arrays["began"], self.arrays["refused"])

    @property
    def served(self) -> float:
        """Requests answered per second, from the start of counted arrivals until the last answer.

        At a rate far too high, the server may answer only earlier requests.
        """
        first, ended, due = self.step.first, self.arrays["ended"], self.arrays["arrival"]
        start = float(due[first - 1]) if first else 0.0
        answered = ended[ended > start]  # NaN without an answer
        skips_first = not first and due[0] == start  # a trace's first request starts the clock, after no interval
        return float((len(answered) - skips_first) / (answered.max() - start)) if len(answered) else 0.0

    @property
    def mean_batch(self) -> float:
        """Mean requests per batch."""
        sizes = self._choose_counted("size")[self._answered]
        return float(len(sizes) / (1 / sizes).sum()) if len(sizes) else math.nan

    @property
    def queued(self) -> float:
        """Mean seconds from when a request was due until its batch began."""
        return self._compute_mean(self._choose_counted("began") - self._choose_counted("arrival"))

    @property
    def computed(self) -> float:
        """Mean seconds of a request's batch, from host memory to host memory."""
        return self._compute_mean(self._choose_counted("ended") - self._choose_counted("began"))

    def _compute_mean(self, seconds: np.ndarray) -> float:
        values = seconds[self._answered]
        return float(values.mean()) if len(values) else math.nan

    def find_percentile(self, name: str) -> Interval | None:
        """Return the percentile of the latencies; None with too few requests, or if it falls on unanswered ones."""
        if self.count < stats.samples_for(PERCENTILES[name]):
            return None
        q = PERCENTILES[name]
        interval = videos.section_interval(
            self.latencies, lambda section: rates.find_percentile(section, q), stats.samples_for(q)
        )
        return interval if math.isfinite(interval.value) else None


# Check of the answers to requests, from a run's table of trials.


@dataclass(frozen=True)
class Outputs:
    """Check of a trial's outputs against those of the trial named `against`.

    `word` is the table's ("" if not compared), `error` the relative error, `labels_changed` the percentage of labels
    that differ, `fault` the fault, and `missing_reason` why they weren't compared.
    """

    word: str = ""
    error: float = math.nan
    labels_changed: float = math.nan
    fault: str = ""
    against: str = ""
    missing_reason: str = ""


def list_outputs(run: RunData) -> dict[str, Outputs]:
    """Return the output check of each trial of the run, by id."""
    outputs = {}
    columns = [run.frame[name] for name in ("trial", "outputs", "output_error", "labels_changed", "verdict")]
    for id, word, error, labels, verdict in zip(*columns, strict=True):
        trial, reference = run.trials[id], run.compared.get(id)
        if word and reference:
            is_wrong = word == OUTPUTS_WRONG
            outputs[id] = Outputs(
                word, float(error), float(labels), verdict if is_wrong else "", reference.configuration
            )
        else:
            outputs[id] = Outputs(missing_reason=_explain_missing(trial, reference, run))
    return outputs


def _explain_missing(trial: TrialResult, reference: TrialResult | None, run: RunData) -> str:
    """Return why the outputs were not compared; "" for the reference itself."""
    if trial.spec.model.source.startswith(ENDPOINT_PREFIX):
        return "the right answers of the server's model aren't known here; give its file as MODEL"
    if reference is None or reference is trial:
        failures = (t for t in list_output_sources(run.records) if t.group == trial.group and not t.good)
        return next((f"{t.configuration} gave none ({t.status}: {t.reason})" for t in failures), "")
    return find_mismatch(trial, reference) or "one of both left none"


@dataclass(frozen=True)
class CheckedRun(LoadRun):
    """A trial under load with a check of its outputs against the reference's."""

    outputs: Outputs = field(default_factory=Outputs, kw_only=True)

    @property
    def is_ranked(self) -> bool:
        """Whether it is compared with the reference: its outputs are not wrong."""
        return not self.outputs.fault


# Requests of a run: rates tried with each trial, and the highest that holds.

ARRAYS_FILE = "serve.npz"
Checked = TypeVar("Checked", bound=CheckedRun)


@dataclass(frozen=True)
class ServingRun(CheckedRun):
    """A trial with the rates tried in each round."""

    facts: tuple[ServeFacts, ...]
    measurements: tuple[RateMeasurement, ...]

    @property
    def is_ranked(self) -> bool:
        return self.highest is not None and super().is_ranked

    @property
    def bounded(self) -> str:
        """Name of the percentile with the bound."""
        return next(name for name, q in PERCENTILES.items() if q == self.facts[0].percentile)

    @cached_property
    def by_round(self) -> list[float]:
        """Highest rate of each round that holds, 0 if none does."""
        return [max((t.step.rate for t in self._list_holding(k)), default=0.0) if f.highest is None else f.highest
                for k, f in enumerate(self.facts)]  # fmt: skip

    def _list_holding(self, round_index: int) -> list[RateMeasurement]:
        return [t for t in self.measurements if t.round == round_index and t.step.verdict == rates.HOLDS]

    @cached_property
    def highest(self) -> Interval | None:
        """The highest rate that holds: the rounds' geometric mean with its 95 % interval.

        None without a bound, or if a round has no rate that holds.
        """
        if not self.facts[0].bound_s or not all(self.by_round):
            return None
        return stats.find_center(self.by_round)

    @cached_property
    def at_highest(self) -> RateMeasurement | None:
        """Measurement at the highest rate of the median round; of several at that rate, the last."""
        if self.highest is None:
            return None
        median_rate = sorted(self.by_round)[(len(self.by_round) - 1) // 2]
        candidates = [t for k, rate in enumerate(self.by_round) if rate == median_rate for t in self._list_holding(k)]
        return next((t for t in reversed(candidates) if t.step.rate == median_rate), None)

    @property
    def capacity(self) -> Interval:
        """Requests per second with full batches: the rounds' geometric mean with its 95 % interval."""
        return stats.find_center([f.capacity for f in self.facts])

    @property
    def seconds(self) -> list[float]:
        return [1 / rate for rate in self.by_round]


def list_served(run: RunData) -> list[ServingRun]:
    """Return each trial that answered requests, in the order of the trials."""
    runs = []
    for trial in run.records:
        rounds = [(r, r.facts.serve) for r in trial.good if r.facts.serve and (r.folder / ARRAYS_FILE).is_file()]
        measurements = tuple(t for k, (r, facts) in enumerate(rounds) for t in _list_tried(r, facts, k))
        if measurements:
            runs.append(ServingRun(trial, tuple(facts for _, facts in rounds), measurements))
    outputs = list_outputs(run) if runs else {}
    return [replace(each, outputs=outputs[each.trial.id]) for each in runs]


def _list_tried(round_data: Round, facts: ServeFacts, round_index: int) -> list[RateMeasurement]:
    arrays = read_npz(round_data.folder / ARRAYS_FILE)
    names = ("arrival", "began", "ended", "size", "refused")
    return [
        RateMeasurement(step, facts, {name: arrays[f"{name}_{k}"] for name in names}, round_index)
        for k, step in enumerate(facts.steps)
    ]


def list_speedups(runs: Sequence[Checked], rule: Rule) -> list[Speedup | None]:
    """Return the speed-up of each run over the reference, with a verdict.

    The reference is PyTorch, else the first. None for the reference itself, and if either isn't ranked.
    """
    if not find_reference(runs).is_ranked:
        return [None] * len(runs)
    ranked_runs = [each for each in runs if each.is_ranked]
    speedups = dict(zip((each.trial.id for each in ranked_runs), videos.list_speedups(ranked_runs, rule), strict=True))
    return [speedups.get(each.trial.id) for each in runs]


def find_reference(runs: Sequence[Checked]) -> Checked:
    """Return the reference run; one with wrong outputs only if all have them."""
    return videos.find_reference([each for each in runs if not each.outputs.fault] or runs)
