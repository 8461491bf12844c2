"""The queue against theory, on a simulated clock: no number here depends on the machine."""

from collections.abc import Sequence

import numpy as np
import pytest

from dyno.serving.session import _count_inputs
from dyno.worker.backend import Arrays, Session, answer_feeds
from dyno.worker.jobs.serve import _list_powers
from dyno.worker.serving import rates
from dyno.worker.serving.batching import Batcher, BatchFormingSession, BatchingRules, Clock, Rung, answer_requests
from dyno.worker.serving.rates import Arrivals, draw_arrivals, find_lowest
from dyno.worker.spec import Dims, Tensor, Unanswered


class Simulated(Clock):
    """A clock advanced only by sleep and work."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, at: float) -> None:
        self.time = max(self.time, at)


def served(arrivals: Arrivals, rules: BatchingRules, seconds: float, each: float = 0.0) -> Batcher:
    """Answer the requests batch by batch, each in `seconds` plus `each` per request."""
    clock = Simulated()
    batcher = Batcher(arrivals, rules, clock)

    def answer(count: int) -> None:
        clock.time += seconds + each * count

    answer_requests(batcher, answer)
    return batcher


def at(*times: float) -> Arrivals:
    return Arrivals(np.array(times))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_the_mean_wait_matches_an_m_d_1_queue(load: float) -> None:
    """Pollaczek and Khinchine: with service time s and load r the mean wait is r s / (2 (1 - r))."""
    service = 0.01
    arrivals = draw_arrivals(load / service, 200_000, 0.0, seed=1)
    batcher = served(arrivals, BatchingRules(1), service)
    waits = (batcher.began - arrivals.times)[arrivals.first :]
    assert waits.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=0.04)
    assert (batcher.ended - batcher.began == pytest.approx(service)) and (batcher.size == 1).all()


def test_arrivals_follow_a_poisson_process() -> None:
    gaps = np.diff(draw_arrivals(50.0, 100_000, 0.0, seed=3).times)
    assert gaps.mean() == pytest.approx(0.02, rel=0.02) and gaps.std() == pytest.approx(0.02, rel=0.02)
    assert (draw_arrivals(50.0, 10, 0.0, 3).times == draw_arrivals(50.0, 10, 0.0, 3).times).all()
    assert (draw_arrivals(50.0, 10, 0.0, 3).times != draw_arrivals(50.0, 10, 0.0, 4).times).all()


def test_the_number_of_requests_suffices_for_the_percentile() -> None:
    slowest = draw_arrivals(find_lowest(662, 0.0), 662, 0.0, 0)
    assert 660 < len(slowest.times) - slowest.first < 664 and slowest.times[-1] < 150, "a search ends in minutes"
    short, given = draw_arrivals(5.0, 662, 0.0, 0), draw_arrivals(100.0, 662, 2.0, 0)
    assert len(short.times) - short.first == 662 and short.first == 66
    assert len(given.times) - given.first == 200


def test_the_arrival_rate_is_computed_from_the_intervals() -> None:
    assert Arrivals(np.arange(4.0)).rate == pytest.approx(1.0)


def test_a_stall_counts_in_every_request_due_during_it() -> None:
    """During a second without answers, a closed-loop client would see a single slow request."""
    arrivals = at(*np.arange(0.0, 2.0, 0.1))
    clock, first = Simulated(), [True]
    batcher = Batcher(arrivals, BatchingRules(1), clock)

    def answer(count: int) -> None:
        clock.time += 1.0 if first else 0.01
        first.clear()

    answer_requests(batcher, answer)
    seconds = rates.list_latencies(arrivals.times, batcher.ended)
    assert (seconds > 0.5).sum() == 6 and seconds[:3] == pytest.approx([1.0, 0.91, 0.82])


def test_a_batch_begins_when_full_or_after_the_maximum_wait() -> None:
    batcher = served(at(0.0, 0.001, 0.002, 0.003, 1.0, 1.001, 2.0), BatchingRules(4, max_wait=0.01), 0.1)
    assert batcher.size.tolist() == [4, 4, 4, 4, 2, 2, 1]
    assert batcher.began == pytest.approx([0.003] * 4 + [1.01] * 2 + [2.01])


def test_without_waiting_a_batch_takes_the_queued_requests() -> None:
    batcher = served(at(0.0, 0.01, 0.02, 0.03, 0.05), BatchingRules(8), 0.04)
    assert batcher.size.tolist() == [1, 3, 3, 3, 1]
    assert batcher.began == pytest.approx([0.0, 0.04, 0.04, 0.04, 0.08])


def test_requests_are_refused_when_the_queue_is_full() -> None:
    batcher = served(at(0.0, 0.1, 0.2, 0.3, 0.4, 1.1), BatchingRules(1, queue=2), 1.0)
    assert batcher.refused.tolist() == [False, False, False, True, True, False]
    assert np.isnan(batcher.ended[3:5]).all() and batcher.size[3:5].sum() == 0
    assert np.isinf(rates.list_latencies(at(0.3).times, batcher.ended[3:4])).all()


@pytest.mark.parametrize(("load", "grows"), [(0.5, False), (0.9, False), (1.2, True), (3.0, True)])
def test_a_rate_above_the_capacity_is_detected(load: float, grows: bool) -> None:
    arrivals = draw_arrivals(load / 0.01, 2000, 0.0, seed=2)
    batcher = served(arrivals, BatchingRules(1), 0.01)
    assert rates.is_unstable(arrivals.times, batcher.began, batcher.refused, 1) is grows
    assert bool(np.isnan(batcher.ended).any()) is (load == 3.0), "patience ends with a queue that would take for ever"
    verdict = rates.judge_rate(rates.list_latencies(arrivals.times, batcher.ended), 0.99, 1.0, 662, grows)
    assert verdict == (rates.UNSTABLE if grows else rates.HOLDS)


def test_a_stall_at_the_end_is_not_instability() -> None:
    """Half a second without answers, after nine and a half seconds at half of the capacity."""
    arrivals = draw_arrivals(1000.0, 0, 10.0, seed=2)
    clock = Simulated()
    batcher = Batcher(arrivals, BatchingRules(1), clock)
    stall = float(arrivals.times[-1]) - 0.5

    def answer(count: int) -> None:
        clock.time += 0.5 if stall < clock.time < stall + 0.4 else 0.0005

    answer_requests(batcher, answer)
    assert rates.count_backlog(arrivals.times, batcher.began, batcher.refused) > 400
    assert not rates.is_unstable(arrivals.times, batcher.began, batcher.refused, 1)


def test_batches_raise_the_capacity() -> None:
    """A batch of n takes 10 ms + n 0.1 ms: singly that is 99 requests/s, in eights 740."""
    arrivals = draw_arrivals(400.0, 4000, 0.0, seed=5)
    alone, eights = (served(arrivals, BatchingRules(most), 0.01, 0.0001) for most in (1, 8))
    assert rates.is_unstable(arrivals.times, alone.began, alone.refused, 1)
    assert not rates.is_unstable(arrivals.times, eights.began, eights.refused, 8)


@pytest.mark.parametrize(
    ("count", "bound", "expected"),
    [(1000, 0.992, rates.HOLDS), (1000, 0.98, rates.OVER), (500, 9.0, rates.TOO_FEW), (1000, 0.0, "")],
)
def test_a_rate_is_judged_against_its_latency_bound(count: int, bound: float, expected: str) -> None:
    assert rates.judge_rate(np.linspace(0, 1, count), 0.99, bound, 662, is_growing=False) == expected


def test_an_unanswered_request_exceeds_every_bound() -> None:
    seconds = np.full(1000, 0.001)
    seconds[:9] = np.inf
    assert rates.find_percentile(seconds, 0.99) == pytest.approx(0.001)
    seconds[:12] = np.inf
    assert np.isinf(rates.find_percentile(seconds, 0.99))


def test_an_error_in_an_answer_ends_the_run() -> None:
    batcher = Batcher(at(0.0, 0.1, 0.2), BatchingRules(1), Simulated())

    def answer(count: int) -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        answer_requests(batcher, answer)
    assert batcher.take() is None


def test_unanswered_requests_do_not_affect_the_others() -> None:
    arrivals, clock, number = at(*np.arange(0.0, 1.0, 0.1)), Simulated(), iter(range(10))
    batcher = Batcher(arrivals, BatchingRules(1), clock)

    def answer(_: int) -> None:
        clock.time += 0.01
        if (k := next(number)) % 2:
            raise Unanswered(f"503, of number {k}")

    answer_requests(batcher, answer)
    assert batcher.refused.tolist() == [False, True] * 5 and batcher.complaint == "503, of number 1"
    assert (np.isnan(batcher.ended) == batcher.refused).all() and (np.isnan(batcher.began) == batcher.refused).all()
    assert (rates.list_latencies(arrivals.times, batcher.ended) == np.inf).sum() == 5


class Doubles(Session):
    """A session that doubles its input; `seen` records its batches, and `pooled` sums a batch into one row."""

    def __init__(self, size: int, seen: list[list[int]], pooled: bool = False) -> None:
        self.inputs = (Tensor("x", "float32", (size, 1)), Tensor("factor", "float32", (1,)))
        self.outputs = (Tensor("y", "float32", (size, 1)),)
        self._seen, self._pooled = seen, pooled

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        self._bound = feeds

    def run(self, slot: int = 0) -> None:
        assert self._bound["x"].shape == self.inputs[0].shape
        self._seen.append([int(x) for x in self._bound["x"][:, 0]])

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        answer = self._bound["factor"] * self._bound["x"]
        return {"y": answer.sum(0, keepdims=True) if self._pooled else answer}


def answered(sizes: Sequence[int], times: int, pooled: bool = False) -> tuple[np.ndarray, list[list[int]]]:
    """Return the answers to requests 1, 2, 3, … in batches of at most sizes[-1], and the batches formed."""
    seen: list[list[int]] = []
    ladder = [Rung(size, Doubles(size, seen, pooled), ()) for size in sizes]
    formed, most, answers = BatchFormingSession(ladder, Dims(sizes[-1], 0, 0)), sizes[-1], []
    for number in range(times):
        x = np.arange(1 + number * most, 1 + (number + 1) * most, dtype=np.float32)[:, None]
        answers.append(answer_feeds(formed, {"x": x, "factor": np.full(1, 2, np.float32)})["y"])
    return np.concatenate(answers)[:, 0], seen


def test_full_and_partial_batches_of_each_size_are_formed() -> None:
    answers, seen = answered((1, 2, 4, 8), 4)
    assert answers.tolist() == [2 * x for x in range(1, 33)]
    assert [1, 2, 3, 4, 5, 6, 7, 8] in seen and [8] in seen, "seven requests fill up a batch of eight"
    assert [9, 10, 11, 12] in seen and [12, 13] in seen and [25, 26, 27, 28] in seen, "three requests, then two; four"
    assert {len(batch) for batch in seen} == {1, 2, 4, 8}


@pytest.mark.parametrize("most", [1, 2, 5, 8, 19, 32, 64, 100, 128, 257, 512])
def test_default_inputs_form_batches_of_every_size(most: int) -> None:
    sizes = _list_powers(most)
    answers, seen = answered(sizes, -(-_count_inputs(most) // most))
    assert {len(batch) for batch in seen} == {*sizes}
    assert answers.tolist() == [2 * x for x in range(1, len(answers) + 1)]


def test_smaller_batches_are_padded_to_the_only_loaded_size() -> None:
    answers, seen = answered((3,), 2)
    assert answers.tolist() == [2 * x for x in range(1, 7)]
    assert seen == [[1, 2, 3], [3, 1, 2], [4, 5, 6]]


def test_outputs_without_a_batch_axis_are_answered_in_one_batch() -> None:
    answers, seen = answered((1, 2, 4), 1, pooled=True)
    assert answers.tolist() == [20] and seen[-1] == [1, 2, 3, 4]
