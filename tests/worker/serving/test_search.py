"""The search for the highest rate within the limits, and the options of `dyno bench serve`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.worker.jobs.serve import find_highest_rate
from dyno.worker.serving.options import ServeOptions
from dyno.worker.serving.rates import read_trace
from refusals import refuses


@pytest.mark.parametrize("limit", [3.1, 40.0, 60.0, 99.0, 180.0])
def test_the_search_ends_within_a_step_below_the_limit(limit: float) -> None:
    tried: list[float] = []

    def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = find_highest_rate(holds, 100.0, 0.05)
    assert limit / 1.05 <= found <= limit
    assert len(tried) < 16 and tried.count(found) == 2, "the result is tried once more"


def test_the_rate_is_0_if_none_holds() -> None:
    assert find_highest_rate(lambda rate: False, 100.0, 0.05) == 0.0


def test_no_rate_below_the_lowest_is_tried() -> None:
    tried: list[float] = []

    def holds(rate: float) -> bool:
        tried.append(rate)
        return False

    assert find_highest_rate(holds, 100.0, 0.05, lowest=20.0) == 0.0 and tried == [50.0, 25.0, 20.0]
    assert 300 / 1.05 <= find_highest_rate(lambda rate: rate <= 300, 100.0, 0.05, lowest=200.0) <= 300


def test_after_sixteen_steps_down_no_rate_holds() -> None:
    tried: list[float] = []

    def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= 60 and tried.count(rate) == 1

    assert find_highest_rate(holds, 100.0, 0.05) == 0.0
    repeated = [rate for rate in dict.fromkeys(tried) if tried.count(rate) == 2]
    assert len(repeated) == 17 and repeated[0] / repeated[-1] == pytest.approx(1.05**16)


@pytest.mark.parametrize(
    ("real", "by_luck", "lowest", "least"), [(20, 30, {"lowest": 20.0}, 20.0), (60, 70, {}, 60 / 1.05)]
)
def test_a_rate_that_held_once_by_luck_is_not_the_result(
    real: float, by_luck: float, lowest: dict[str, float], least: float
) -> None:
    tried: list[float] = []

    def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= real or (rate <= by_luck and tried.count(rate) == 1)

    assert least <= find_highest_rate(holds, 100.0, 0.05, **lowest) <= real


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"p99": "20ms", "p50": "5ms"}, "p99|p50 .*give one"),
        ({"p99": "0ms"}, "it must be more than 0"),
        ({"rate": (0.0,)}, "rate must be more than 0"),
        ({"p99": "20ms", "instances": 0}, "instances is 0; it must be at least 1"),
        (
            {"rate": (5.0, 0.01), "duration": "9s"},
            "at 0.01 requests per second, 9s bring no request; give 100s or more",
        ),
        ({"trace": "t.txt", "rate": (5.0,)}, "omit --rate"),
        ({"p99": "1s", "resolution": 0.0}, "resolution is 0"),
        ({"p99": "1s", "engine_batches": (0,)}, "engine_batches"),
        ({"p99": 20}, "p99 is 20; write a number with its unit"),
        ({"p99": "1s", "max_wait": None}, "max_wait is None; write a number with its unit"),
        ({"rate": "50"}, "rate is '50'; it must be a number, or a list of such"),
        ({"p99": "1s", "instances": 1.5}, "instances is 1.5; it must be a whole number"),
    ],
)
def test_an_invalid_option_is_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    refuses(said, ServeOptions, **options)


def test_latency_bounds_are_parsed() -> None:
    options = ServeOptions(p999="1.5s", max_wait="500us")
    assert (options.bounded, options.quantile, options.bound_s, options.max_wait_s) == ("p999", 0.999, 1.5, 0.0005)
    assert ServeOptions(rate=(5.0,)).bound_s == 0


def test_the_default_wait_leaves_most_of_the_bound_to_the_engine() -> None:
    given = ({"p99": "2ms"}, {"p99": "20ms"}, {"rate": (5.0,)}, {"p99": "2ms", "max_wait": "0ms"})
    assert [ServeOptions(**each).max_wait_s for each in given] == [0.0005, 0.002, 0.002, 0.0]


def test_single_numbers_and_numpy_numbers_are_accepted() -> None:
    options = ServeOptions(rate=50, instances=np.int64(2), engine_batches=np.array([1, 4]))  # type: ignore[arg-type]
    assert (options.rate, options.instances, options.engine_batches) == ((50,), 2, (1, 4))
    assert json.loads(json.dumps(dataclasses.asdict(options)))["instances"] == 2


def test_a_trace_begins_with_its_first_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text("# seconds\n100.5\n100.75\n102\n", encoding)
        assert read_trace(path).tolist() == [0.0, 0.25, 1.5]


@pytest.mark.parametrize(
    ("text", "said"),
    [("1\ntwo\n", "is not a trace"), ("2\n1\n", "ascending"), ("1\n", "at least two"), ("1 2\n3 4\n", "one on each"),
     ("1\nnan\n", "ascending"), ("1\n1\n", "ascending"), ("0\n1e300\n", "takes 1e\\+300 s; write")],
)  # fmt: skip
def test_an_invalid_trace_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    refuses(said, read_trace, path)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    refuses(r"^there is no trace .*none\.txt$", read_trace, tmp_path / "none.txt")
