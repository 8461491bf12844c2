"""Every command of the README's tour, the tour and the tutorial, typed in order in an empty folder.

Only how long things are measured and trained is shortened. A block below `<!-- needs: … -->` is left out where that is
missing, and says so.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "A tour", "docs/tour.md": "", "docs/tutorial.md": ""}
FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>[^\n]*) -->\n)?```(?P<kind>bash|toml|python)\n(?P<text>.*?)^```", re.M | re.S
)
HERE = {"ultralytics": find_spec("ultralytics") is not None}  # what a block may need that a machine may have
SHORT = {
    "--rounds": ("1", ("run",)),
    "--seconds": ("0.05", ("run", "time", "eval")),
    "--warmup": ("0.05", ("run", "time")),
    "--epochs": ("1", ("train",)),
    "--confirm": ("0", ("run",)),
}
# 1: a slow machine's second run may be slower than its first, and weights of one epoch fit no budget.
FINE = {"compare": (0, 1), "run": (0, 1), "eval": (0, 1)}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, and what it needs besides what the page makes, or ""."""

    kind: str
    text: str
    needs: str

    @property
    def lacks(self) -> str:
        return "" if HERE.get(self.needs.partition(" ")[0], not self.needs) else self.needs

    def commands(self) -> list[list[str]]:
        split = (shlex.split(line, comments=True) for line in self.text.replace("\\\n", " ").splitlines())
        return [words for words in split if words]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    if title := PAGES[page]:
        found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert found, f"{page} has no section {title}"
        text = found[1]
    return [Block(m["kind"], m["text"], m["needs"] or "") for m in FENCE.finditer(text)]


def shortened(words: list[str]) -> list[str]:
    """The command with short measurements and trainings, whatever it asked for."""
    kept = list(words)
    for flag, (value, commands) in SHORT.items():
        if flag in kept:
            kept[kept.index(flag) + 1] = value
        elif words[1] in commands:
            kept += [flag, value]
    return [*kept, "--no-search"] if "--budget" in kept and words[1] == "run" else kept


def typed(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """One command line; `dyno` and `python` are this interpreter's."""
    program, *rest = shortened(words) if words[0] == "dyno" else words
    if rest[0] == "rm" and len(rest) > 2:  # a trial's id is of the machine and the version
        rest[2] = next((folder / rest[1] / "trials").iterdir()).name
    command = {"dyno": [sys.executable, "-m", "dyno.cli"], "python": [sys.executable]}.get(program, [program])
    return subprocess.run(
        [*command, *rest],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "BROWSER": "true"},
        timeout=1200,
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page: str, tmp_path: Path) -> None:
    for name in ("torch", "onnx", "onnxruntime", "openvino", "skimage", "sklearn", "matplotlib"):
        pytest.importorskip(name)
    for name in ("examples", "studies"):  # what lies in a checkout
        (tmp_path / name).symlink_to(ROOT / name)
    ran = 0
    for block in blocks(page):
        if block.lacks:
            continue
        if block.kind != "bash":
            if name := re.match(r"# (\S+\.\w+)\n", block.text):
                (tmp_path / name[1]).write_text(block.text, encoding="utf-8")
            continue
        for words in block.commands():
            print(shlex.join(shortened(words)), flush=True)
            done = typed(words, tmp_path)
            fine = FINE.get(words[1], (0,)) if words[0] == "dyno" else (0,)
            assert done.returncode in fine, f"{shlex.join(words)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
            assert "Traceback" not in done.stderr, f"{shlex.join(words)}\n{done.stderr[-3000:]}"
            ran += 1
    assert ran >= 6


@pytest.mark.parametrize("block", [pytest.param(b, id=f"{p}: {b.needs}") for p in PAGES for b in blocks(p) if b.needs])
def test_what_is_left_out_says_what_it_needs(block: Block) -> None:
    assert block.kind == "bash" and block.commands()
    if block.lacks:
        pytest.skip(f"needs {block.lacks}")


def test_a_command_is_shortened_but_otherwise_what_it_is() -> None:
    words = shlex.split("dyno run m.onnx --rounds 5 --batch 1,8")
    assert shortened(words) == shlex.split(
        "dyno run m.onnx --rounds 1 --batch 1,8 --seconds 0.05 --warmup 0.05 --confirm 0"
    )
    assert shortened(["dyno", "show", "runs/x"]) == ["dyno", "show", "runs/x"]
