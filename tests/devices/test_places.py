"""Devices by name: shares of the processor without a core in common, and what isn't there."""

from __future__ import annotations

import pytest

from dyno import UserError
from dyno.devices import places
from dyno.worker import system

CORES = [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "core_threads", lambda: CORES)


def test_shares_have_whole_cores_and_none_in_common() -> None:
    found = places.parse_places("cpu:1,cpu:0")
    assert {place.name: place.cores for place in found} == {"cpu:0": (0, 4, 1, 5), "cpu:1": (2, 6, 3, 7)}
    assert {place.device for place in found} == {"cpu"}
    assert {place.threads for place in found} == {2}


def test_of_a_dozen_shares_each_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "core_threads", lambda: [(k,) for k in range(12)])
    found = places.parse_places(",".join(f"cpu:{k}" for k in range(12)))
    assert [place.cores for place in found] == [(k,) for k in range(12)]


def test_of_three_shares_each_is_as_large() -> None:
    found = places.parse_places("cpu:0,cpu:1,cpu:2")
    assert [place.cores for place in found] == [(0, 4), (1, 5), (2, 6)]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpu:0,cpu:0", "named twice"),
        ("cpu:0,cuda:0", "devices of one kind"),
        ("cpu:0,cpu:2", "2 of them are cpu:0,cpu:1"),
        ("cpu,cpu:1", "numbered from 0"),
        ("cpu:0,cpu:1,cpu:2,cpu:3,cpu:4", "as many physical cores, and there are 4 here"),
        ("cuda:98,cuda:99", "there is no cuda:98 here"),
        ("cuda:0,cuda:x", "cuda:"),
    ],
)
def test_devices_that_make_no_sense_are_refused(device: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        places.parse_places(device)


def test_gpus_have_cores_of_their_own_where_threads_leave_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job pins itself to the first processors that it may use: two GPUs' jobs would share them."""
    monkeypatch.setattr(places, "missing_gpu", lambda _: False)
    monkeypatch.setattr(places, "find_gpu", lambda *_: None)
    found = places.parse_places("cuda:1,cuda:0", threads=2)
    assert {place.name: place.cores for place in found} == {"cuda:0": (0, 4, 1, 5), "cuda:1": (2, 6, 3, 7)}
    assert [place.env for place in found] == [{places.VISIBLE: "1"}, {places.VISIBLE: "0"}]
    assert [place.cores for place in places.parse_places("cuda:0,cuda:1", threads=3)] == [(), ()]
    assert [place.cores for place in places.parse_places("cuda:0,cuda:1")] == [(), ()]
