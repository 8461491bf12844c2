"""The documentation's site builds without a warning, works without a network, and has every page and command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dyno

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", place],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return place


def test_every_page_of_the_documentation_is_in_the_menu(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    menu = set(re.findall(r"[\w/-]+(?=\.md$)", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert {page for page in pages if page != "measured/README"} <= menu
    assert all((site / f"{page}.html").is_file() for page in menu if page != "measured/README")


def test_nothing_is_fetched_from_outside(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|iframe)[^>]*\bsrc="?(https?:[^" >]*)', page.read_text())
        fetched += re.findall(r'<link[^>]*rel="?stylesheet"?[^>]*href="?(https?:[^" >]*)', page.read_text())
        assert not fetched, page.name
    assert (site / "assets/iframe-worker.js").is_file()


def test_the_references_are_made_from_the_code(site: Path) -> None:
    commands = (site / "reference/commands.html").read_text()
    for command in ("dyno run", "dyno video", "dyno data imagenet-val"):
        assert f">{command}<" in commands
    assert "--rounds" in commands and "--help-all" in commands
    python = (site / "reference/python.html").read_text()
    assert all(f'id="{getattr(dyno, name).__module__}.{name}"' in python for name in ("Study", "load", "explain"))
    assert "Exactly this many rounds" in python and 'id="dyno.api.Study.run"' in python
