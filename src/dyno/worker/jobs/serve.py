"""Requests to a trial's engine at given times: its capacity, then fixed rates or a search for the highest rate."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from dyno.worker import measure, system
from dyno.worker.backend import Arrays
from dyno.worker.extras import load_library
from dyno.worker.facts.engine import ORIGIN_FIELDS
from dyno.worker.facts.job import ServeFacts, ServeStep
from dyno.worker.inputs import input_data
from dyno.worker.jobs.run_trial import answer_all, keep_answers, make_failure, record_finite, repeat
from dyno.worker.journal import Journal
from dyno.worker.record import save_arrays
from dyno.worker.registry import find
from dyno.worker.serving import rates as serve_rates
from dyno.worker.serving.batching import (
    Batcher,
    BatchFormingSession,
    BatchingRules,
    Clock,
    Instances,
    Lane,
    answer_requests,
)
from dyno.worker.serving.loadgen import QueryQueue, ServerScenario
from dyno.worker.serving.options import ServeOptions
from dyno.worker.serving.rates import Arrivals, count_requests, draw_arrivals, read_trace
from dyno.worker.spec import ENDPOINT_PREFIX, Job, Trial, Unanswered, from_json

# Search for the highest rate that holds

MIN_RATE_DIVISOR = 256  # rates below this fraction of the capacity aren't tried
MAX_STEPS_DOWN = 16  # steps down after a rate failed its repetition


def find_highest_rate(holds: Callable[[float], bool], capacity: float, resolution: float, lowest: float = 0.0) -> float:
    """Return the highest of the tried rates that holds, 0 if none; the next is less than `resolution` higher.

    The search begins at half the `capacity` and moves by factors of two until one rate holds and another fails. It then
    halves the distance on a logarithmic scale, and repeats the result, since one of many tries holds by chance. If the
    repetition fails, it steps down until a rate has held twice. No rate below `lowest` is tried.
    """
    floor = max(lowest, capacity / MIN_RATE_DIVISOR)
    low, high = 0.0, math.inf
    rate = max(capacity / 2, floor)
    while not low or high == math.inf:
        if holds(rate):
            low, rate = rate, 2 * rate
        elif low or rate > floor:
            high, rate = rate, max(rate / 2, floor)
        else:
            return 0.0
    while high / low > 1 + resolution:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    is_confirmed, steps_left = holds(low), MAX_STEPS_DOWN
    while not is_confirmed and steps_left and low > floor:
        low, steps_left = max(low / (1 + resolution), floor), steps_left - 1
        is_confirmed = holds(low) and holds(low)
    return low if is_confirmed else 0.0


ARRAYS_FILE = "serve.npz"
SEEDS_PER_ROUND = 1000  # each rate has its own seed


def serve_requests(job: Job, journal: Journal) -> None:
    """Measure the capacity, then each rate.

    Options of the job: `settings` of `ServeOptions`, `least` (requests needed for the percentile), and `trace` (a file,
    "" for none).
    """
    assert job.trial is not None
    trial, backend = job.trial, find(job.trial.backend)
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    options = from_json(ServeOptions, job.options["settings"])
    instances = journal.time_stage("load", "load", lambda: Instances(
        trial, options.engine_batches or _list_powers(trial.dims.batch), lambda t: backend.load(t, job.artifact),
        lambda session, size: [*input_data.read_trial_batches(trial, session.inputs, batch=size)], options.instances,
    ))  # fmt: skip
    # without local inputs, outputs can't be compared
    if job.round == 0 and not trial.model.source.startswith(ENDPOINT_PREFIX):
        _answer_known(job, trial, instances, journal)
    serve_job = _ServeJob(trial, options, instances, journal, int(job.options["least"]), job.round)
    serve_job.measure_alone()
    serve_job.measure_rates(str(job.options["trace"]))
    journal.stage("inspect")
    journal.record = replace(
        journal.record, facts=journal.record.facts.merge(instances.call(instances.first.session.facts))
    )
    journal.stage("close")
    instances.close()


def _list_powers(limit: int) -> list[int]:
    """Return 1, 2, 4, … below `limit`, and `limit` itself."""
    return [*(2**k for k in range(limit.bit_length()) if 2**k < limit), limit]


def _answer_known(job: Job, trial: Trial, instances: Instances, journal: Journal) -> None:
    """Store the answers to every engine's common inputs, in round 0 only; fail if no value is finite.

    Batches are formed as for requests. Answers don't change between rounds.
    """
    journal.stage("evaluate")
    rung = instances.first
    feeds = [*input_data.read_trial_batches(trial, rung.session.inputs, batch=rung.size)]
    inherited = job.artifact.made_by.set_fields(ORIGIN_FIELDS) if job.artifact else {}
    journal.facts(inputs_sha256=input_data.hash_feeds(feeds, trial.model.preprocess), **inherited)
    has_finite = True
    try:
        first_outputs = instances.call(lambda: keep_answers(rung.session, feeds[0]))
        has_finite = instances.call(
            lambda: answer_all(BatchFormingSession(instances.ladder, trial.dims), trial, journal, should_time=False)
        )
        instances.call(lambda: repeat(rung.session, feeds[0], first_outputs, journal))
    except Unanswered as e:  # an overloaded server: its rate reports it
        journal.warn(f"{e}: not all outputs could be compared")
    if not has_finite:
        raise make_failure()


class _ServeJob:
    """One job: its instances, and the stored results of the rates."""

    def __init__(
        self,
        trial: Trial,
        options: ServeOptions,
        instances: Instances,
        journal: Journal,
        min_requests: int,
        round_index: int,
    ) -> None:
        self._trial, self._options, self._instances, self._journal = trial, options, instances, journal
        self._seed = trial.data.seed + SEEDS_PER_ROUND * round_index
        self._rules = BatchingRules(trial.dims.batch, options.max_wait_s, options.queue)
        self._arrays: dict[str, np.ndarray] = {}
        self._facts = ServeFacts(
            options.quantile, options.bound_s, min_requests, trial.dims.batch, options.max_wait_s, options.queue,
            options.instances, len(instances.lanes), instances.rungs, resolution=options.resolution,
            endpoint=options.endpoint,
        )  # fmt: skip
        if missing_sizes := sorted({*(options.engine_batches or _list_powers(trial.dims.batch))} - {*instances.rungs}):
            sizes = ", ".join(map(str, missing_sizes))
            journal.warn(f"the engine can't be loaded for batches of {sizes}; fewer requests are padded to the next")

    def measure_alone(self) -> None:
        """Measure full batches in sequence on every lane; store latency and throughput as in any record."""
        journal, plan, rung = self._journal, self._trial.plan, self._instances.first
        journal.stage("warm up")
        self._instances.warm_up(plan)
        self._check_answers()
        journal.stage("full batches")
        contention = system.CpuContention()
        run_step = measure.make_step(rung.session, "all", rung.feeds)
        journal.store_samples(
            "latency", "all", "s", "duration", self._instances.call(lambda: measure.measure_latency(run_step, plan))
        )
        rate = self._measure_capacity(plan.seconds)
        journal.store_samples("throughput", "throughput", "1/s", "rate", rate)
        journal.record_contention(
            "all", contention.count_busy(), self._trial.runtime.device, contention.count_withheld()
        )
        self._facts = replace(self._facts, capacity=float(rate.value or 0.0))

    def _check_answers(self) -> None:
        """Run each batch of each size once on every lane; fail if no value of an answer is finite."""
        answers: list[Arrays] = []

        def run_batches(lane: Lane) -> None:
            for rung in lane.rungs:
                for _ in rung.feeds:
                    with suppress(Unanswered):  # an overloaded server: its rate reports it
                        lane.answer(rung.size)
                        answers.append({name: np.array(a) for name, a in lane.answered.items()})

        self._instances.run_each(run_batches)
        self._check_finite(answers)

    def _check_last(self) -> None:
        """Fail if no value of any lane's last answer is finite."""
        self._check_finite([lane.answered for lane in self._instances.lanes])

    def _check_finite(self, answers: Sequence[Arrays]) -> None:
        """Fail if answers have no finite value and earlier answers were finite."""
        was_finite = self._journal.record.facts.finite
        finite_flags = [record_finite(arrays, self._journal) for arrays in answers]
        if was_finite and answers and not any(finite_flags):
            raise make_failure()

    def _measure_capacity(self, seconds: float) -> measure.Sampling:
        """Measure requests per second with full batches on every lane; a sample per lane and batch."""
        durations: list[float] = []
        errors: list[Unanswered] = []
        max_batch, clock = self._rules.max_batch, Clock()

        def time_batches(lane: Lane) -> None:
            start = clock.now()
            while start < seconds:
                try:
                    lane.answer(max_batch)
                except Unanswered as e:
                    errors.append(e)
                    start = clock.now()
                    continue
                start, previous = clock.now(), start
                durations.append(start - previous)

        self._instances.run_each(time_batches)
        total_seconds = clock.now()
        self._check_last()
        if not durations:
            raise errors[0]
        rates = max_batch * len(self._instances.lanes) / np.asarray(durations)
        return measure.Sampling(rates, "seconds", max_batch * len(durations) / total_seconds)

    def measure_rates(self, trace: str) -> None:
        """Test the trace, the requested rates, or the rates of a search."""
        options = self._options
        if trace:
            self._facts = replace(self._facts, trace=Path(options.trace).name)
            self._try_arrivals(Arrivals(read_trace(Path(trace))))
        try:
            for rate in options.rate:
                self._try_rate(rate)
            if not trace and not options.rate:
                self._search_rate()
        except Unanswered as e:
            if not self._facts.steps:
                raise
            self._journal.warn(f"{e}; the test ended there, and the rates before are kept")

    def _search_rate(self) -> None:
        """Search for the highest rate that holds; if the server ends the search, `highest` stays unknown."""
        options, min_requests = self._options, self._facts.least
        lowest = serve_rates.find_lowest(min_requests, options.duration_s)
        self._facts = replace(self._facts, searched=True, lowest=lowest)
        rate = find_highest_rate(self._can_hold_rate, self._facts.capacity, options.resolution, lowest)
        self._facts = replace(self._facts, highest=rate)
        self._journal.facts(serve=self._facts)

    def _can_hold_rate(self, rate: float) -> bool:
        """Try the rate, unless the previous one showed that even a request alone in its batch exceeds the bound.

        Its wait for other requests counts too, unless batches have at most one request.
        """
        facts = self._facts
        wait = facts.max_wait_s if facts.most > 1 else 0.0
        if facts.steps:
            began, ended, size = (self._arrays[f"{name}_{len(facts.steps) - 1}"] for name in ("began", "ended", "size"))
            single_seconds = (ended - began)[(size == 1) & np.isfinite(ended)]
            if single_seconds.size and wait + single_seconds.min() > facts.bound_s:
                return False
        return self._try_rate(rate).verdict == serve_rates.HOLDS

    def _try_rate(self, rate: float) -> ServeStep:
        """Send requests at a rate, drawn here or by LoadGen."""
        facts, duration, seed = self._facts, self._options.duration_s, self._seed + len(self._facts.steps)
        if not self._options.loadgen:
            return self._try_arrivals(draw_arrivals(rate, facts.least, duration, seed), rate)
        count = count_requests(rate, facts.least, duration)
        folder = self._journal.folder / f"loadgen-{len(facts.steps)}"
        scenario = ServerScenario(rate, count, facts.percentile, facts.bound_s, seed, folder)
        queue = QueryQueue(self._rules, Clock(), load_library("mlperf_loadgen", "LoadGen"))
        return self._answer_requests(queue, rate, count / rate, scenario=scenario)

    def _try_arrivals(self, arrivals: Arrivals, rate: float = 0.0) -> ServeStep:
        batcher = Batcher(arrivals, self._rules, Clock())
        return self._answer_requests(batcher, rate or arrivals.rate, arrivals.times[-1], arrivals.first)

    def _answer_requests(
        self, batcher: Batcher | QueryQueue, rate: float, seconds: float, first: int = 0,
        scenario: ServerScenario | None = None,
    ) -> ServeStep:  # fmt: skip
        """Answer the requests and store their facts and arrays; requests before number `first` don't count."""
        journal, facts, step_index = self._journal, self._facts, len(self._facts.steps)
        journal.stage(f"{rate:.3g} requests/s for {seconds:.3g} s")
        gc.collect()
        gc.freeze()  # a collection during the test would count as the model's time
        contention = system.CpuContention()
        with scenario.send_queries(batcher) if scenario and isinstance(batcher, QueryQueue) else nullcontext():
            self._instances.run_each(lambda lane: answer_requests(batcher, lane.answer))
        self._check_last()
        if batcher.complaint:
            if np.isnan(batcher.ended).all():
                # The server is gone and would answer no other rate.
                raise Unanswered(f"no request got an answer at {rate:.3g} requests/s: {batcher.complaint}")
            journal.warn(f"a request in vain: {batcher.complaint}")
        values = {"arrival": batcher.times, "began": batcher.began, "ended": batcher.ended, "size": batcher.size,
                  "refused": batcher.refused}  # fmt: skip
        grows = serve_rates.is_unstable(values["arrival"], values["began"], values["refused"], self._rules.max_batch)
        latencies = serve_rates.list_latencies(values["arrival"][first:], values["ended"][first:])
        verdict = serve_rates.judge_rate(latencies, facts.percentile, facts.bound_s, facts.least, grows)
        loadgen_latency = scenario.read_latency() if scenario else 0.0
        step = ServeStep(rate, verdict, first, grows, round(contention.count_busy(), 3), loadgen_latency)
        self._arrays |= {f"{name}_{step_index}": array for name, array in values.items()}
        save_arrays(journal.folder / ARRAYS_FILE, self._arrays)
        self._facts = replace(facts, steps=(*facts.steps, step))
        journal.facts(serve=self._facts)
        journal.record_contention(
            f"{rate:,.{0 if rate >= 1000 else 3}g} requests/s", step.others_busy, self._trial.runtime.device
        )
        return step
