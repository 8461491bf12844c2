"""A trial: load its engine, time every boundary of the plan, evaluate, and read the engine's facts."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np

from dyno.worker import measure, system
from dyno.worker.backend import Arrays, Session
from dyno.worker.evaluation import evaluate
from dyno.worker.facts.engine import ORIGIN_FIELDS, EngineFacts
from dyno.worker.facts.job import NO_VALUES, SAME_OUTPUTS, AnsweredImages, SustainedLoad
from dyno.worker.inputs import input_data
from dyno.worker.jobs.turns import Uninterleaved
from dyno.worker.journal import Journal
from dyno.worker.nets.checkpoint import describe_averaged
from dyno.worker.nets.huggingface import describe_random
from dyno.worker.record import CLOSE_STAGE, Measurement, describe_close, one_line, save_arrays
from dyno.worker.registry import find
from dyno.worker.spec import (
    BUILD_OPTIONS,
    ENERGY_OPTION,
    SLOWDOWN_OPTION,
    Job,
    ModelSpec,
    Plan,
    Trial,
    Unavailable,
    UserError,
)

# A session with a known, deliberate slowdown, for the self-test

now = time.perf_counter_ns


class SlowedSession(Session):
    """A session slowed by `share`, relative to its own runs.

    On a CPU, a busy wait of that share follows each run. On a GPU's stream, events time the queued work: the host waits
    before the launch, while the stream is empty, for that share of the previous run, so both clocks see the delay. With
    0 only the wrapper's own time is added, so the session it is compared with is wrapped too.
    """

    def __init__(self, session: Session, share: float) -> None:
        self.session, self.share = session, share
        self.inputs, self.outputs = session.inputs, session.outputs
        self.slots, self.stream = session.slots, session.stream
        self._began = self._took = 0

    def run(self, slot: int = 0) -> None:
        if self.stream is not None:
            _busy_for(int(self.share * self._took))
        self._began = now()
        self.session.run(slot)

    def wait(self, slot: int = 0) -> None:
        self.session.wait(slot)
        self._took = now() - self._began
        if self.stream is None:
            _busy_for(int(self.share * self._took))

    def stage(self, feeds: Arrays) -> Arrays:
        return self.session.stage(feeds)

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        self.session.bind(feeds, slot)

    def restoring(self, feeds: Arrays) -> Callable[[], None] | None:
        return self.session.restoring(feeds)

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        return self.session.fetch(slot)

    def parts(self, feeds: Arrays) -> dict[str, float]:
        return self.session.parts(feeds)

    @property
    def batches(self) -> tuple[int, int, int] | None:
        return self.session.batches

    def reshape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.session.reshape(shapes)

    def device_memory(self) -> int:
        return self.session.device_memory()

    def facts(self) -> EngineFacts:
        return self.session.facts()

    def close(self) -> None:
        self.session.close()


def _busy_for(nanoseconds: int) -> None:
    # Counted from here, so that the calls before it take as long with a share of 0: a run may take only 100 µs.
    # sleep() would be late by more than the share of a short run.
    deadline = now() + nanoseconds
    while now() < deadline:
        pass


# A network may output NaN or infinity by design; the host checks whether the reference has them at the same places
# (results/correctness.py). Without any finite value nothing can be compared, and the trial fails.


def not_finite(arrays: Arrays) -> list[str]:
    """Return the names of the arrays with NaN or infinity; text arrays have neither."""
    values = {name: np.asarray(array) for name, array in arrays.items()}
    return [name for name, array in values.items() if array.dtype.kind not in "OSU" and not np.isfinite(array).all()]


def record_finite(arrays: Arrays, journal: Journal) -> bool:
    """Record whether the outputs are finite and warn at the first exception; return whether any value is finite."""
    names = not_finite(arrays)
    if not names:
        return True
    floats = [a for a in map(np.asarray, arrays.values()) if a.dtype.kind not in "OSUbiu"]
    value_count, nan_count = sum(a.size for a in floats), sum(int(np.isnan(a).sum()) for a in floats)
    infinite_count = sum(int(np.isinf(a).sum()) for a in floats)
    if journal.record.facts.finite:
        counts = ((nan_count, "NaN"), (infinite_count, "infinite"))
        shares = " and ".join(f"{count / value_count:.2%} are {label}" for count, label in counts if count)
        caveat = "; that NaN agrees with another engine's proves nothing" if nan_count else ""
        journal.warn(f"output {', '.join(names)} has values that are not finite: {shares}{caveat}")
        journal.facts(finite=False, nan_share=nan_count / value_count)
    return nan_count + infinite_count < value_count


def make_failure() -> UserError:
    """Return the error for an engine without a single finite output value."""
    return UserError(
        "the outputs are not finite (NaN or infinity), not a single value of them: this engine is wrong, its precision "
        "overflows, or the model gives nothing else for these inputs; --input gives others"
    )


SETTLING_SHARE = 0.25  # lead time as a share of the energy time: power and clocks follow the load
MAX_CALL_DIFFERENCE = 1e-2  # relative difference of two calls explained by rounding
Kept = tuple[tuple[int, ...], np.ndarray]
MAX_KEPT_VALUES = 1 << 16  # values kept per output for comparing the first call with the last


def run_trial(job: Job, trial: Trial, journal: Journal, turns: Uninterleaved) -> None:
    """Load the engine, time every boundary of the plan, then evaluate.

    Outputs don't change between rounds, so only round 0 evaluates.
    """
    backend = find(trial.backend)
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    with suppress(ImportError, Unavailable):  # `load` says what is missing
        journal.time_stage("import", "import", lambda: backend.prepare(trial))
    turns.imported()
    if trial.runtime.device == "cpu" and (text := system.describe_mixed_cores()):
        journal.warn(text)
    session: Session = journal.time_stage("load", "load", lambda: backend.load(trial, job.artifact))
    if BUILD_OPTIONS in job.options:
        journal.facts(build=int(job.options[BUILD_OPTIONS]))
    if text := describe_averaged(trial.model.weights) if trial.model.weights else describe_random(trial.model):
        journal.warn(text)
    if SLOWDOWN_OPTION in job.options:
        session = _slow_session(session, float(job.options[SLOWDOWN_OPTION]), journal)
    model = trial.model
    host_feeds = list(input_data.read_trial_batches(trial, session.inputs))
    journal.facts(inputs_sha256=input_data.hash_feeds(host_feeds, model.preprocess), threads=trial.runtime.threads)
    feeds = [session.stage(feed) for feed in host_feeds]
    with _drawn_inputs_named(model, host_feeds[0]):
        journal.time_stage("first_call", "first call", measure.make_step(session, "model", feeds))
    first_outputs = _read_outputs(session) if job.round == 0 else {}
    turns.loaded()
    restore = measure.find_restore(session, feeds, journal.warn)
    _time_boundaries(session, job.plan, trial, feeds, journal, turns, restore)
    if job.round == 0 and "throughput" in job.plan.boundaries and (sentence := measure.find_slow_slot(session, feeds)):
        journal.warn(sentence)
    if ENERGY_OPTION in job.options:
        _sustain_load(session, trial, feeds, journal, float(job.options[ENERGY_OPTION]))
    journal.add(Measurement("peak_memory", "B", "bytes", float(system.peak_memory())))
    has_finite = True
    if job.round == 0:
        journal.stage("evaluate")
        has_finite = answer_all(session, trial, journal)
        repeat(session, feeds[0], first_outputs, journal)
    journal.stage("inspect")
    _inspect_engine(session, job, journal)
    if not has_finite:
        journal.stage("evaluate")
        session.close()
        raise make_failure()
    journal.stage(CLOSE_STAGE)
    try:
        session.close()
    except Exception as e:
        traceback.print_exc()
        journal.warn(describe_close(f"{type(e).__name__}: {one_line(e)}"))


@contextmanager
def _drawn_inputs_named(model: ModelSpec, feed: Arrays) -> Iterator[None]:
    """Add to an engine's error the inputs with random values that may be settings: a sampling rate can't be 0 or 1."""
    try:
        yield
    except (Unavailable, MemoryError):
        raise
    except Exception as e:
        described_names = {spec.name for spec in model.inputs if spec.low is not None or spec.feeds}
        arrays = {name: np.asarray(array) for name, array in feed.items() if name not in described_names}
        integers = [name for name, array in arrays.items() if array.dtype.kind in "iu" and array.dtype != np.uint8]
        suspects = integers or [name for name, array in arrays.items() if array.dtype.kind == "f" and array.ndim < 2]
        if not suspects or isinstance(e, UserError):
            raise
        traceback.print_exc()
        values = "zeros and ones" if integers else "numbers"
        advice = f"{', '.join(suspects)} held random {values}: --input {suspects[0]}=VALUE gives others"
        raise UserError(f"{type(e).__name__}: {one_line(e)}; {advice}") from e


def _slow_session(session: Session, share: float, journal: Journal) -> Session:
    journal.facts(slowdown=share)
    if share:
        journal.warn(f"slowed down on purpose, by {100 * share:g} %: for the self-test")
    return SlowedSession(session, share)


def _time_boundaries(
    session: Session,
    plan: Plan,
    trial: Trial,
    feeds: measure.Feeds,
    journal: Journal,
    turns: Uninterleaved,
    restore: measure.Restore,
) -> None:
    for boundary in plan.boundaries:
        reset = restore if boundary == "model" else None  # other boundaries bind their inputs anew
        timer = measure.watch(session, boundary, journal.warn)
        run_step = measure.make_step(session, "all" if boundary == "throughput" else boundary, feeds, timer)
        journal.stage(f"warm up {boundary}")
        if not measure.warm_up(run_step, plan, reset):
            journal.warn(f"{boundary}: the median was not steady after {plan.warmup_s:g} s of warm-up")
        journal.stage(f"time {boundary}")
        contention = system.CpuContention()
        turns.delays, turns.core_latencies = [], []
        blocks = contention.count_during(turns.blocks(boundary, plan)) if plan.blocks else None
        if boundary == "throughput":
            sampling = measure.measure_throughput(session, feeds, trial.dims.batch, plan, blocks)
            journal.store_samples("throughput", boundary, "1/s", "rate", sampling)
        else:
            sampling = measure.measure_latency(run_step, plan, timer, blocks, reset)
            journal.store_samples("latency", boundary, "s", "duration", sampling)
        journal.record_contention(
            boundary,
            contention.count_busy(),
            trial.runtime.device,
            contention.count_withheld(),
            contention.count_overheated(),
        )
        if turns.delays:
            journal.facts(delays={**journal.record.facts.delays, boundary: tuple(turns.delays)})
        if any(turns.core_latencies):
            latencies = journal.record.facts.core_latencies
            journal.facts(core_latencies={**latencies, boundary: tuple(turns.core_latencies)})
        if timer and not reset and (seconds := measure.measure_queued(session, timer, plan)) is not None:
            journal.store_queued(seconds)
    if "all" in plan.boundaries and (parts := measure.measure_parts(session, feeds, plan)):
        journal.store_parts(parts)


def _sustain_load(session: Session, trial: Trial, feeds: measure.Feeds, journal: Journal, seconds: float) -> None:
    """Keep every slot busy for `seconds`, so that the energy counters measure only this load."""
    journal.stage("run for the energy")
    plan = replace(trial.plan, max_samples=sys.maxsize)
    measure.measure_throughput(session, feeds, trial.dims.batch, replace(plan, seconds=SETTLING_SHARE * seconds))
    contention = system.CpuContention()
    sampling = measure.measure_throughput(session, feeds, trial.dims.batch, replace(plan, seconds=seconds))
    journal.facts(
        sustained=SustainedLoad(sampling.window, float(sampling.value or 0.0), round(contention.count_busy(), 3))
    )


def answer_all(session: Session, trial: Trial, journal: Journal, should_time: bool = True) -> bool:
    """Store the outputs for all inputs of the data, with warnings; return whether any value is finite."""
    evaluation = evaluate.evaluate(session, trial, should_time, system.CpuContention().count_busy)
    arrays = evaluation.arrays
    save_arrays(journal.folder / "outputs.npz", arrays)
    journal.store_evaluation(evaluation)
    # Hash of the photographs (equal at every size) and number set aside for calibration, if known
    metadata = input_data.read_metadata(trial.data)
    image_facts = str(metadata.get("photographs") or ""), int(metadata.get("set_aside") or 0)
    journal.facts(data=AnsweredImages(trial.data.name, trial.data.split, len(arrays["sample"]), *image_facts))
    for sentence in evaluation.warnings:
        journal.warn(sentence)
    outputs = [a for name, a in arrays.items() if name.startswith("output:")]
    multirow_outputs = [a for a in outputs if len(a) > 1]
    if outputs and not any(a.size for a in outputs):
        journal.warn(f"{NO_VALUES}: there is nothing to compare")
    elif multirow_outputs and all((a == a[:1]).all() for a in multirow_outputs):
        journal.warn(f"{SAME_OUTPUTS}: that they agree with another engine's proves little")
    return record_finite({name[7:]: a for name, a in arrays.items() if name.startswith("output:")}, journal)


def repeat(session: Session, feeds: Arrays, first: Mapping[str, Kept], journal: Journal) -> None:
    """Warn if the first call and another one on the same input differ by far more than rounding.

    The model then draws random numbers or keeps state. Two consecutive calls would show little of kept state.
    """
    last = keep_answers(session, feeds)
    distance = max((_compute_distance(first[name], last[name]) for name in last), default=0.0)
    if distance > MAX_CALL_DIFFERENCE:
        journal.facts(random_outputs=distance)
        journal.warn(f"the outputs change from call to call: two on one input are {distance:.2g} of their size apart")


def keep_answers(session: Session, feeds: Arrays) -> dict[str, Kept]:
    """Run one more call, and return the values of its outputs that `repeat` compares."""
    session.bind(feeds)
    session.run()
    session.wait()
    return _read_outputs(session)


def _read_outputs(session: Session) -> dict[str, Kept]:
    arrays = session.fetch()
    return {name: (a.shape, np.array(a.reshape(-1)[:: 1 + a.size // MAX_KEPT_VALUES])) for name, a in arrays.items()}


def _compute_distance(first: Kept, last: Kept) -> float:
    """Return |a - b| / |b| in the 2-norm, over finite values; 1 for different shapes, possible with a random choice."""
    (shape, a), (other_shape, b) = first, last
    if shape != other_shape:
        return 1.0
    a, b = (np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0) for values in (a, b))
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(np.float64).tiny))


def _inspect_engine(session: Session, job: Job, journal: Journal) -> None:
    inherited = job.artifact.made_by.set_fields(ORIGIN_FIELDS) if job.artifact else {}
    journal.facts(**inherited)
    try:
        facts = journal.record.facts.merge(session.facts())
    except Exception as e:  # timings are valid without the engine's facts
        traceback.print_exc()
        facts = journal.record.facts
        journal.warn(f"the engine's facts can't be read: {type(e).__name__}: {one_line(e)}")
    journal.record = replace(journal.record, facts=facts)
    counts = {"parameters": facts.parameters, "layers": facts.layers}
    journal.add(*(Measurement(tag, "1", "count", float(n)) for tag, n in counts.items() if n is not None))
    if facts.build_s is not None:
        journal.add(Measurement("build", "s", "duration", float(facts.build_s)))
    if job.artifact:
        journal.add(Measurement("file_size", "B", "bytes", float(job.artifact.bytes)))
    if (truth := facts.precision_truth) and not truth.ok:
        journal.warn(truth.sentence or "the engine does not run in the requested precision")
