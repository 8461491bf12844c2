"""Builds of one engine: what differs, and whether that is more than noise between processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dyno.analysis.tables import build_variance


def builds(*medians: list[float], layers: tuple[int, ...] = ()) -> list[Any]:
    counts = layers or (20,) * len(medians)
    return [
        SimpleNamespace(
            good=[1], options={"build": k + 1}, backend="tensorrt", medians=lambda boundary, ms=ms: ms,
            count=lambda tag, n=n: n if tag == "layers" else None,
        )
        for k, (ms, n) in enumerate(zip(medians, counts, strict=True))
    ]  # fmt: skip


def test_builds_that_differ() -> None:
    found = build_variance.spread(builds([0.475, 0.476, 0.474], [0.577, 0.576, 0.578]))
    assert found is not None and found.real
    assert found.ratio == pytest.approx(0.577 / 0.475, rel=1e-3)


def test_builds_within_the_noise_of_their_processes() -> None:
    found = build_variance.spread(builds([0.50, 0.53, 0.47], [0.51, 0.48, 0.54], [0.49, 0.52, 0.50]))
    assert found is not None and not found.real


def test_too_little_to_say() -> None:
    assert build_variance.spread(builds([0.5], [0.6])) is None
    assert "could be timed" in build_variance.sentences(builds([0.5, 0.5]))[0]  # type: ignore[arg-type]
    assert "two processes or more" in build_variance.sentences(builds([0.5], [0.6]))[-1]  # type: ignore[arg-type]


def test_the_sentences_and_the_fastest() -> None:
    four = builds([0.60, 0.61], [0.50, 0.51], [0.60, 0.59], [0.62, 0.61], layers=(191, 221, 197, 185))
    said = build_variance.sentences(four)  # type: ignore[arg-type]
    assert said[0] == "layers differ: 191, 221, 197, 185"
    assert said[1] == "parameters: not told by these engines"
    assert "beyond noise" in said[2] and "p = " in said[2]
    assert build_variance.fastest(four).options == {"build": 2}  # type: ignore[arg-type,union-attr]
