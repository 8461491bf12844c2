"""Sentences of a comparison."""

from __future__ import annotations

import pytest

from dyno.regression import verdict


@pytest.mark.parametrize(
    ("smallest", "span"), [((2.01, 2.04), "2.0"), ((2.0, 4.4, 3.0), "2.0 to 4.4"), ((3.0,), "3.0")]
)
def test_a_span_of_one_number_is_that_number(smallest: tuple[float, ...], span: str) -> None:
    (said,) = verdict._describe_power([{"smallest": each} for each in smallest])
    assert f"a slow-down of {span} % is caught" in said
