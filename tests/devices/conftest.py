"""Fixtures for tests of several places."""

import pytest

from dyno.devices import one_host


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip measuring whether the places disturb each other."""
    monkeypatch.setattr(one_host, "measure_devices", lambda *asked: one_host.StudyPlaces(asked[2]))
