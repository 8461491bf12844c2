"""A run's card: the verdict's words and numbers, the command to repeat it, and a badge."""

import hashlib
import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import synthetic
from dyno import Study
from dyno.packs import card
from synthetic import Way

STUDY = 'models = ["torchvision:digits"]\nbackends = ["pytorch", "a", "b"]\nsizes = ["64"]\n'
PYTORCH, FAST, SLOW = Way("pytorch"), Way("a", "int8", 0.004), Way("b", seconds=0.007)


def packed(call: Any, path: Path, ways: Sequence[Way], study: str = STUDY) -> tuple[str, ElementTree.Element]:
    """Pack a run; return its card and badge."""
    folder = synthetic.write_run(path / "net", list(ways))
    (folder / "study.toml").write_text(study)
    out = call("pack", folder, "--card", "-o", "mine.pack.zip", code=0)[1]
    assert out == "mine.pack.zip\nmine.card.md\nmine.svg\n"
    return Path("mine.card.md").read_text(encoding="utf-8"), ElementTree.parse("mine.svg").getroot()


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("\\", "") for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_a_card_has_the_verdict_and_the_fastest_of_each_batch(call: Any, tmp_path: Path) -> None:
    ways = [Way(w.backend, w.precision, w.seconds, batch=b) for w in (PYTORCH, FAST, SLOW) for b in (1, 8)]
    text, badge = packed(call, tmp_path, ways)
    shown = json.loads(call("show", tmp_path / "net", "--format", "json", code=0)[1])
    for decision in shown["decisions"]:
        assert f"- digits at size 64: {decision['text']}" in text.replace("\\", "")
    rows = {row["batch"]: row for row in shown["tables"]["trials"]["rows"] if row["backend"] == "a"}
    for (model, batch, fastest, latency, _, gain), row in zip(cells(text), rows.values(), strict=True):
        assert (model, int(batch), fastest) == ("digits at size 64", row["batch"], "a int8")
        assert float(latency.split()[0]) == pytest.approx(row["latency_ms"], rel=5e-3)
        ends = f"[{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
        assert gain == f"{row['speedup']:.2f}x {ends} (faster)"
    digest = hashlib.sha256(Path("mine.pack.zip").read_bytes()).hexdigest()
    assert f"sha256 `{digest}`" in text and "Synthetic CPU, 2 cores" in text and "torch 2.11.0" in text
    assert f"![dyno: {rows[1]['speedup']:.2f}x a int8](mine.svg)" in text
    assert "".join(badge.itertext()).split() == ["dyno:", *(won := [f"{rows[1]['speedup']:.2f}x", "a", "int8"]),
                                                 "dyno", *won]  # fmt: skip
    assert str(tmp_path) not in text
    call("verify", "mine.pack.zip", code=0)


@pytest.mark.parametrize(
    ("ways", "study", "words"),
    [
        ([PYTORCH, Way("a", seconds=0.005), Way("b", seconds=0.005, spread=0.2)], STUDY,
         "[ab] fp32 and [ab] fp32: undecided"),
        ([PYTORCH, Way("a", seconds=0.02)], STUDY, "pytorch fp32"),
        ([PYTORCH, FAST], STUDY + 'limit = {p50 = "1ms"}\n', "no winner"),
        ([Way("pytorch", statuses=("failed",))], STUDY, "no winner"),
        ([Way("a", statuses=("ok",)), Way("pytorch", statuses=("ok",))], STUDY, r"(pytorch|a) fp32( and .*)?: \w+"),
    ],
)  # fmt: skip
def test_a_badge_claims_no_more_than_the_verdict(
    call: Any, tmp_path: Path, ways: list[Way], study: str, words: str
) -> None:
    _, badge = packed(call, tmp_path, ways, study)
    title = badge.find("{http://www.w3.org/2000/svg}title")
    assert title is not None and re.fullmatch(f"dyno: {words}", title.text or ""), title.text


def test_names_are_not_markup_or_links(call: Any, tmp_path: Path) -> None:
    text, _ = packed(call, tmp_path, [*synthetic.hostile()][:2])
    assert "<script>" not in text.split("```")[0]
    assert ElementTree.fromstring(card.draw_badge('<b>&"', "#fff")).tag.endswith("svg")


@pytest.mark.parametrize(
    "settings",
    [
        {"backends": ("pytorch", "onnxruntime@optimization=basic"), "batches": (1, 8), "seconds": 0.5, "rounds": 2},
        {"limit": {"p99": "5ms", "size": "20MB"}, "data": "my photos", "budget": {"top1": 0.5, "top5": 1.0}},
        {"mean": (-0.5, 0.25, 1e-7), "std": (1.0, 1.0, 2.0), "turns": False, "energy": True, "search": None},
        {"inputs": ("ids=0..9", "sr=16000"), "shapes": ("ids:batchx128:int64",), "minutes": 1.5, "device": "cuda:0"},
    ],
)
def test_the_command_reproduces_the_study(call: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    from dyno.cli import commands

    asked = []
    monkeypatch.setattr(commands, "run_study", lambda study, *_, **__: asked.append(study) or 0)
    study = Study(models=("torchvision:resnet18",), **settings)
    call(*shlex.split(card.write_command(study))[1:], "--out", "r", code=0)
    assert [each.to_table() for each in asked] == [study.to_table()]


def test_a_comparison_has_no_card(refused: Any, tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "net", [PYTORCH, FAST])
    (folder / "study.toml").write_text(STUDY + 'baseline = {models = ["torchvision:resnet18"]}\n')
    line = refused("pack", folder, "--card", "-o", "mine.pack.zip")
    assert line.endswith("compares two sides, which a card can't show; omit --card")
    assert not list(tmp_path.glob("mine*"))
