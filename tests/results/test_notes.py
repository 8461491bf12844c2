"""What devices do to each other is seen where it is real, and noise isn't taken for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dyno.report.verdict.whole_run import list_device_findings
from dyno.results.notes import AnchorDevice, AnchorDevices, devices, of_rounds
from dyno.results.trial_result import Results

ROUNDS = 3


def found(rng: np.random.Generator, effects: tuple[float, ...], noise: float = 0.003) -> AnchorDevices:
    """Devices that are slower beside the others by these logarithms; processes differ by 2 %, their ratios by noise."""
    rows = []
    for k, effect in enumerate(effects):
        alone = 0.005 * np.exp(0.02 * rng.standard_normal(ROUNDS))
        ratios = np.exp(effect + noise * rng.standard_normal(ROUNDS))
        rows.append(AnchorDevice(f"cuda:{k}", "card", tuple(alone), tuple(alone * ratios), tuple(ratios)))
    return AnchorDevices("net b1", tuple(rows))


def said(run: Path, what: AnchorDevices) -> str:
    rows = [vars(device) for device in what.devices]
    stored = {"schema": 2, "anchor": what.anchor, "side_by_side": not what.disturbed, "equivalent": 2, "devices": rows}
    (run / "devices.json").write_text(json.dumps(stored))
    return " ".join(finding.text for finding in list_device_findings(Results(run, [])))


def test_blocks_of_both_kinds_are_paired_by_where_they_lie() -> None:
    """A machine that slows down from block to block is in neither ratio, and a throttled block has no partner."""
    seconds = {0: 1.0, 1: 1.1, 2: 2.2, 3: 2.0, 4: 4.0, 5: 4.4, 6: 9.0}
    one = of_rounds("cpu:0", "card", [(seconds, [1, 2, 2, 1, 1, 2, 1, 2]), ({0: 1.0}, [1, 2])])
    assert one.ratios == pytest.approx([1.1]) and len(one.alone) == len(one.beside) == 1


def test_a_real_disturbance_is_seen_and_a_small_one_counts_as_equal(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    slow = found(rng, (0.0, 0.08))
    assert [*slow.disturbed] == ["cuda:1"]
    assert "one at a time" in said(tmp_path, slow) and "cuda:1 by 8" in said(tmp_path, slow)
    small = found(rng, (0.01, 0.01), noise=0.0005)
    assert not small.disturbed and "hardly slower so than alone" in said(tmp_path, small)
    none = found(rng, (0.0, 0.0))
    assert "none was measurably slower" in said(tmp_path, none) and "with 95 % confidence" in said(tmp_path, none)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_noise_is_rarely_taken_for_a_difference(count: int) -> None:
    """Of equal devices 5 % of studies may find one slower, however many there are; also where noise is large."""
    rng = np.random.default_rng(count)
    drawn = [found(rng, (0.0,) * count, noise=0.05) for _ in range(400)]
    assert sum(bool(one.disturbed) for one in drawn) <= 0.05 * 400
    assert sum(one.extremes is not None and one.extremes[2] for one in drawn) <= 0.07 * 400


def test_a_file_from_elsewhere_may_hold_anything(tmp_path: Path) -> None:
    row = {"place": None, "card": None, "alone": [0, -1.0, 1e999], "beside": None, "ratios": [0.0]}
    for rows in (None, [row, row], [{"place": "a", "alone": [1.0]}, {"place": "b", "alone": [2.0], "ratios": [1.0]}]):
        (tmp_path / "devices.json").write_text(json.dumps({"schema": 2, "devices": rows, "equivalent": -3}))
        assert devices(tmp_path) is not None
        assert list(list_device_findings(Results(tmp_path, [])))
