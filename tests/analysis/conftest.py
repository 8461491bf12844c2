"""Run folders for the tests of the analysis, written once per session by `synthetic`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `import synthetic` works in every import mode of pytest

import synthetic

from dyno.results.trial_result import Results, load_run


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A study like the demo's, with every way a trial can end."""
    return load_run(synthetic.write_run(tmp_path_factory.mktemp("runs") / "demo", synthetic.demo()))


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A study whose names want to break HTML, Markdown and SVG."""
    return load_run(synthetic.write_run(tmp_path_factory.mktemp("runs") / "hostile", synthetic.hostile()))
