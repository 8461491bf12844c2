"""The demo's network is trained once, and anew when what shaped it is another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dyno import data
from dyno.cli import demo


def test_other_images_or_options_are_another_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(**changes: Any) -> Path:
        found: list[Path] = []
        with monkeypatch.context() as patch:
            patch.setattr(demo, "train", lambda *_, out, **__: found.append(out))
            for name, value in changes.items():
                patch.setattr(demo, name, value)
            demo.trained()
        return found[0]

    usual = folder()
    assert folder() == usual
    assert folder(TRAINING={"epochs": 9}) != usual
    # As another version of Dyno, or of Pillow, may decode them.
    other = replace(data.digits(demo.cache_dir() / "datasets", demo.SIZE), sha256="another")
    monkeypatch.setattr(data, "digits", lambda *_: other)
    assert folder() != usual
