"""What is compared is one block, and a block is on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dyno import Study
from dyno.devices.blocks import find_anchor, split_blocks
from dyno.study.plan import expand


def test_a_block_is_one_model_batch_and_size(fake_study: Callable[..., Study]) -> None:
    planned = expand(
        fake_study(
            models=("fake:one", "fake:two"), backends=("fake", "fake@fail=skip"), batches=(1, 2), sizes=("4", "8")
        )
    )
    found = split_blocks(planned)
    assert len(found) == len({block.id for block in found}) == 8
    for block in found:
        assert len({(t.model.name, t.dims.batch, t.dims.size) for t in block.trials}) == 1
        assert {str(t.options.get("fail", "")) for t in block.trials} == {"", "skip"}
    assert sorted(t.id for block in found for t in block.trials) == sorted(entry.trial.id for entry in planned)


def test_a_block_keeps_its_id_when_a_backend_is_added(fake_study: Callable[..., Study]) -> None:
    few, more = (
        split_blocks(expand(fake_study(backends=names))) for names in (("fake",), ("fake", "fake@latency_ms=2"))
    )
    assert [block.id for block in few] == [block.id for block in more]
    assert len(more[0].trials) == 2


def test_the_anchor_is_the_first_blocks_reference(fake_study: Callable[..., Study]) -> None:
    planned = expand(fake_study(batches=(2, 1), precisions=("fp8", "fp32")))
    chosen: Any = find_anchor(planned)
    assert (chosen.trial.dims.batch, chosen.trial.precision) == (2, "fp32"), "fp8 is refused"
    assert find_anchor([entry for entry in planned if entry.refusal]) is None
