"""Figures of requests: percentiles with intervals, and the descriptions of a rate and of a trial."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dyno.serving import tables
from dyno.serving.figures import RateMeasurement, ServingRun
from dyno.video.figures import section_interval
from dyno.worker.facts.job import ServeFacts, ServeStep
from dyno.worker.serving.rates import find_percentile


def tried(
    seconds: np.ndarray, verdict: str = "yes", rate: float = 100.0, first: int = 0, **facts: Any
) -> RateMeasurement:
    """Build requests at regular times from latencies (NaN: unanswered), half of each in the queue, in pairs."""
    arrival = np.arange(1, len(seconds) + 1) / rate
    answered = np.isfinite(seconds)
    arrays = {
        "arrival": arrival, "began": arrival + seconds / 2, "ended": arrival + seconds,
        "size": np.where(answered, 2, 0), "refused": ~answered,
    }  # fmt: skip
    return RateMeasurement(ServeStep(rate, verdict, first), ServeFacts(**facts), arrays)


def test_request_times_split_into_queueing_and_computing() -> None:
    one = tried(np.full(1000, 0.01), first=100)
    assert (one.count, one.refused, one.unanswered, one.mean_batch) == (900, 0, 0, 2)
    assert one.queued == pytest.approx(0.005) and one.computed == pytest.approx(0.005)
    assert one.served == pytest.approx(100, rel=0.01)


def test_a_server_still_in_warm_up_is_rated_by_its_answers() -> None:
    number = np.arange(1, 1001)
    ended = np.where(number <= 50, number / 20, np.nan)  # 20 a second, of a thousand arriving
    arrays = {"arrival": number / 1000, "began": ended - 0.05, "ended": ended}
    assert RateMeasurement(ServeStep(1000.0, "unstable", 100), ServeFacts(), arrays).served == pytest.approx(20)


def test_the_rate_served_from_a_trace_never_exceeds_arrivals() -> None:
    """Three requests in two seconds are one per second, as are their answers but for the last latency."""
    due = np.arange(3.0)
    arrays = {"arrival": due, "began": due, "ended": due + 0.5, "size": np.ones(3), "refused": np.zeros(3, bool)}
    assert RateMeasurement(ServeStep(1.0, "too few requests", 0), ServeFacts(), arrays).served == pytest.approx(2 / 2.5)


def test_percentiles_need_enough_requests() -> None:
    few, enough = tried(np.full(661, 0.01)), tried(np.full(662, 0.01))
    assert few.find_percentile("p99") is None and enough.find_percentile("p999") is None
    found, median = enough.find_percentile("p99"), enough.find_percentile("p50")
    assert found and found.value == pytest.approx(0.01) and np.isnan(found.low), "ten sections need ten times as many"
    assert median and [median.low, median.high] == pytest.approx([0.01, 0.01])


def test_percentiles_on_unanswered_requests_have_no_value() -> None:
    seconds = np.full(1000, 0.01)
    seconds[:20] = np.nan
    one = tried(seconds)
    assert one.find_percentile("p99") is None and one.find_percentile("p90") is not None and one.refused == 20


def test_section_intervals_cover_percentiles_of_independent_requests() -> None:
    """About 95 % of 400 sets must hold it; fewer than 350 have a probability below one in a million."""
    rng = np.random.default_rng(0)
    truth = -np.log(0.1)
    found = [
        section_interval(rng.exponential(size=700), lambda part: find_percentile(part, 0.9), 10) for _ in range(400)
    ]
    assert sum(one.low <= truth <= one.high for one in found) > 350


def served(*each: RateMeasurement, highest: tuple[float | None, ...], **facts: Any) -> ServingRun:
    own = tuple(ServeFacts(bound_s=0.02, least=662, capacity=200.0, most=8, highest=h, **facts) for h in highest)
    return ServingRun(cast(Any, SimpleNamespace(label="net", backend="fake", good=())), own, each)


def test_the_highest_rate_is_stated_with_its_share_of_capacity() -> None:
    good, bad = tried(np.full(700, 0.01)), tried(np.full(700, 0.05), "no", 150.0)
    said = tables.list_sentences(served(good, bad, highest=(100.0,), searched=True, resolution=0.05))
    assert said[0].startswith("100 requests/s hold p99 <= 20.0 ms: 50.0 % of the 200 requests/s that full batches of 8")
    assert "waits 5.00 ms and is computed in 5.00 ms on average: 50.0 % of its time it waits" in said[1]


def test_the_lowest_rate_is_stated_when_none_holds() -> None:
    bad, worse = tried(np.full(700, 0.05), "no", 10.0), tried(np.full(700, 0.06), "no", 20.0)
    (said,) = tables.list_sentences(served(bad, worse, highest=(0.0,), searched=True))
    assert said == "No rate that was tried holds p99 <= 20.0 ms: at 10.0 requests/s, the lowest, p99 is 50.0 ms."
    (said,) = tables.list_sentences(served(bad, highest=(0.0,), searched=True))
    assert said == "No rate that was tried holds p99 <= 20.0 ms: at 10.0 requests/s p99 is 50.0 ms."


def test_the_lowest_rate_is_stated_with_its_worst_round() -> None:
    good, bad = tried(np.full(700, 0.01), "yes", 10.0), tried(np.full(700, 0.05), "no", 10.0)
    (said,) = tables.list_sentences(served(good, bad, highest=(None, None)))
    assert said == "No rate that was tried holds p99 <= 20.0 ms in every round: at 10.0 requests/s p99 is 50.0 ms."


def test_too_few_requests_leave_the_bound_unknown() -> None:
    said = tables.list_sentences(served(tried(np.full(70, 0.01), "too few requests", 10.0), highest=(None,)))
    assert said[0] == "Whether p99 <= 20.0 ms holds is unknown for this rate."
    few, bad = tried(np.full(70, 0.01), "too few requests", 10.0), tried(np.full(700, 0.05), "no", 150.0)
    said = tables.list_sentences(served(few, bad, highest=(None,)))
    assert said[0].startswith("Whether a rate that was tried holds p99 <= 20.0 ms is unknown: at 10.0 requests/s, ")


def test_unanswered_requests_are_attributed_to_the_server() -> None:
    seconds = np.full(700, 0.01)
    seconds[:20] = np.nan
    said = tables.list_sentences(served(tried(seconds, "no"), highest=(None,), endpoint="http://127.0.0.1:1"))
    assert "20 requests got no answer from the server and count as beyond every bound." in said
    assert any(s.endswith("at 100 requests/s p99 falls on requests without an answer.") for s in said)


def test_rounds_without_a_result_are_reported() -> None:
    good, bad = tried(np.full(700, 0.01)), tried(np.full(700, 0.05), "no", 50.0)
    (said,) = tables.list_sentences(served(good, bad, highest=(0.0, 100.0), searched=True))
    assert said == "1 of 2 rounds ended without a rate that holds p99 <= 20.0 ms twice."
