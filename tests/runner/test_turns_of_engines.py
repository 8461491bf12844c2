"""Engines that measure in turns, from the command line to the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("preloaded")


def test_the_command_line_with_engines(dyno: Any, tmp_path: Path) -> None:
    for name in ("onnx", "onnxruntime", "openvino"):
        pytest.importorskip(name)
    import onnx

    weights = ", ".join(f"{(k % 7 - 3) / 9:.3f}" for k in range(8 * 3 * 9))
    graph = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> small (float[n, 3, 32, 32] image) => (float[n, 8, 30, 30] y) '
        f"<float[8, 3, 3, 3] w = {{{weights}}}> {{ y = Conv(image, w) }}"
    )
    onnx.save(graph, tmp_path / "small.onnx")
    words = "small.onnx --backends openvino,onnxruntime --rounds 2 --seconds 0.3 --warmup 0.1"
    boundaries = "--boundaries model,throughput --threads 1 --turns"
    done = dyno("run", *words.split(), *boundaries.split(), "--out", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = dyno("show", tmp_path / "run", "--format", "json")
    rows = {row["backend"]: row for row in json.loads(shown.stdout)["rows"]}
    assert {row["status"] for row in rows.values()} == {"ok"}
    other = rows["openvino"]
    assert other["measured"] == "in turns" and other["speedup_low"] < other["speedup"] < other["speedup_high"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "log ratios, paired, each the median over blocks" in page, "the report says how these were compared"
    again = dyno("run", *words.split(), *boundaries.split(), "--out", tmp_path / "run", cwd=tmp_path)
    assert again.returncode == 0 and not list(tmp_path.glob("run/trials/*/t*")), "nothing is measured twice"
