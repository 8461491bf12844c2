"""The key of a cached file: everything that shaped it, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dyno.store import Cache, worker_code_sha256
from dyno.worker import registry
from dyno.worker.spec import Dims, ModelSpec, Recipe

OUTSIDE = """
from dyno.worker.backend import Maker

class Mine(Maker):
    def make(self, recipe, parent, folder):
        pass
"""


def test_the_key_holds_all_that_shapes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(
        "onnx_export", "onnx", "fp32", ModelSpec("a", "x:y", weights="/w", weights_sha256="1"), Dims(1, 8, 8)
    )
    cache = Cache(tmp_path)

    def key(**changes: Any) -> str:
        return cache.key(replace(recipe, **changes))

    same = ModelSpec("b", "x:y", weights="/elsewhere", weights_sha256="1")
    assert key() == key(model=same)
    assert key() == key(runtime=replace(recipe.runtime, threads=7)), "a file is made with all cores anyway"
    other = [key(), key(precision="fp16"), key(options={"a": 1}), key(dims=Dims(2, 8, 8)), key(parent=recipe)]
    other.append(key(model=ModelSpec("a", "x:y", weights_sha256="2")))
    monkeypatch.syspath_prepend(tmp_path)
    for change in ("# first", "# second"):  # a maker from outside, before and after a change
        (tmp_path / "outside_maker.py").write_text(f"{OUTSIDE}{change}")
        worker_code_sha256.cache_clear()
        other += [key(maker="outside_maker:Mine"), key(parent=replace(recipe, maker="outside_maker:Mine"))]
    monkeypatch.setattr(registry.maker("onnx_export"), "requires", ("numpy",))
    other.append(key())
    monkeypatch.setattr("dyno.store.worker_code_sha256", lambda *outside: "code of another Dyno")
    other.append(key())
    assert len(set(other)) == len(other)


def test_other_code_of_the_worker_is_another_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno.store.system.__file__", str(tmp_path / "system.py"))
    seen = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("backends/b.py", "1"), ("note.txt", "no code")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        seen.add(worker_code_sha256.__wrapped__())
    assert len(seen) == 3
