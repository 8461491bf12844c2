"""A model's own code finds the modules beside it, and no library does."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dyno.worker.nets.local_code import load_file

NET = """
import importlib
import beside_part
from beside_pack.inner import TWO

def late():
    import beside_late
    return beside_late.THREE

def computed(name):
    return importlib.import_module(name)

def through(library, name):
    return library(name)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with modules; what is imported from there is forgotten afterwards."""
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "beside_pack").mkdir()
    for name, text in {
        "net": NET, "beside_part": "import beside_deep", "beside_deep": "ONE = 1", "beside_late": "THREE = 3",
        "beside_pack/__init__": "", "beside_pack/inner": "TWO = 2", "beside_any": "", "beside_other": "",
        "beside_library": "raise RuntimeError('taken for a library of that name')",
    }.items():  # fmt: skip
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("beside_", "dyno_model_"))]:
        del sys.modules[name]


def test_a_module_beside_a_model_is_found_for_its_code_alone(folder: Path) -> None:
    path = list(sys.path)
    net = load_file(folder / "net.py", "")
    assert (net.beside_part.beside_deep.ONE, net.TWO, net.late()) == (1, 2, 3)
    assert net.computed("beside_any").__file__ == str(folder / "beside_any.py")
    assert net.through(importlib.import_module, "beside_other").__file__ == str(folder / "beside_other.py")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("beside_library")
    assert importlib.util.find_spec("beside_library") is None and sys.path == path


def test_what_the_code_names_is_found_whoever_runs_it(folder: Path) -> None:
    """torch.compile imports what a traced function imports, in a frame of its own."""
    load_file(folder / "net.py", "")
    assert importlib.import_module("beside_late").THREE == 3
