"""Layer times on a GPU: PyTorch's from its kernels, TensorRT's from its profiler."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
QUICK = ("--runs", 20, "--seconds", 0.3, "--warmup", 0.2, "--top", 0, "--device", "cuda:0")
# `body` has far more operations than all others together.
NET = """
from torch import nn

def net():
    first = nn.Sequential(nn.Conv2d(3, 64, 1), nn.ReLU())
    body = nn.Sequential(nn.Conv2d(64, 64, 15, padding=7), nn.ReLU())
    return nn.Sequential(first, body, nn.Conv2d(64, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
"""
# The host works for over 0.1 ms before each kernel of a few microseconds, a launch-bound network. In usual small
# networks the two differ by less than a factor of three, and a GPU that has just woken up is slower than that: its
# clock runs at a fifth of the maximum.
WAITING = """
from torch import nn

class Step(nn.Module):
    def forward(self, x):
        for _ in range(10_000):
            pass
        return x.relu()

def net(): return nn.Sequential(*(Step() for _ in range(20)), nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
"""


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("net") / "heavy.py"
    path.write_text(NET)
    return f"{path}:net"


def tables(run: Any, *words: object) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]], list[str]]:
    """Return layer rows by form, one summary row per form, and the notes."""
    done = run("profile", *words, *QUICK, "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["tables"]
    by_form: dict[str, list[dict[str, Any]]] = {}
    for row in found["profile"]["rows"]:
        by_form.setdefault(row["form"], []).append(row)
    return by_form, found["reconciliation"]["rows"], found["reconciliation"]["notes"]


def test_pytorch_profiles_list_the_kernels_of_each_module(dyno: Any, heavy: str) -> None:
    by_form, (line,), notes = tables(dyno, heavy, "--batch", 16, "--size", 128)
    (rows,) = by_form.values()
    assert rows[0]["modules"] == "1.0" and rows[0]["kernel"] and rows[0]["share"] > 30, rows
    parts = {"0.0", "0.1", "1.0", "1.1", "2", "3", "5"}
    ran = {row["modules"]: row for row in rows if row["time_us"]}
    assert parts <= set(ran) and all(ran[part]["kernel"] for part in parts), rows
    total = sum(row["time_us"] for row in rows) / 1e3
    assert line["layers_ms"] == pytest.approx(total)
    assert line["busy_ms"] == pytest.approx(total, rel=0.05), "one stream: the kernels don't overlap"
    assert 0 <= line["idle"] < 100 and line["kernels"] >= len(parts) and line["calls_ms"] > 0
    # The kernels' times fit into the latency, whatever the profiling overhead.
    assert line["layers_ms"] < 1.1 * line["unprofiled_ms"]
    assert any("of the latency" in note and ("launch-bound" in note or "compute-bound" in note) for note in notes), (
        notes
    )


def test_a_network_with_a_slow_host_is_launch_bound(dyno: Any, tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    _, (line,), notes = tables(dyno, f"{tmp_path / 'waiting.py'}:net", "--size", 16)
    assert line["idle"] > 50 and any("launch-bound: the GPU ran no kernel" in note for note in notes), (line, notes)


def test_half_precision_is_profiled(dyno: Any, heavy: str) -> None:
    by_form, _, _ = tables(dyno, heavy, "pytorch/fp16", "--size", 64)
    assert len(by_form) == 2 and sum("fp16" in form for form in by_form) == 1, [*by_form]


def test_tensorrt_layers_have_times_types_and_module_names(trt: Any, heavy: str) -> None:
    by_form, lines, notes = tables(trt, heavy, "tensorrt", "tensorrt/fp16", "--size", 128, "--batch", 4)
    engines = {form: rows for form, rows in by_form.items() if form.startswith("TensorRT")}
    assert len(engines) == 2 and len(lines) == 3
    products = {"0.0", "1.0", "2", "5"}
    for form, rows in engines.items():
        assert products <= set(" ".join(row["modules"] or "" for row in rows).split()), (form, rows)
        assert (rows[0]["modules"] or "").split()[0] == "1.0" and rows[0]["kernel"], (form, rows[0])
        assert sum(row["share"] for row in rows) == pytest.approx(100)
        assert all(row["type"] for row in rows), "the profiler's names are the inspector's"
    half = next(rows for form, rows in engines.items() if "fp16" in form)
    assert {row["computes_in"] for row in half if row["computes_in"]} & {"float16"}
    assert all(line["unprofiled_ms"] > 0 and line["queueing_ms"] > 0 for line in lines)
    assert sum(note.startswith("TensorRT") and "launch-bound" in note for note in notes) == 2, notes


def test_engine_files_are_profiled(trt: Any, engine: Path) -> None:
    by_form, (line,), _ = tables(trt, engine, "--batch", 2)
    (rows,) = by_form.values()
    assert rows[0]["time_us"] > 0 and line["layers_ms"] > 0
    done = trt("profile", engine, "--batch", 2, "--runs", 5, "--seconds", 0.2)  # on the engine's device
    assert done.returncode == 0, done.stderr


def test_int8_profiles_show_types_and_conversions(trt: Any, net: str) -> None:
    words = (net.replace(":net", ":gray"), "tensorrt/int8", "--channels", 1, "--data", "digits", "--size", 32)
    by_form, _, _ = tables(trt, *words, "--batch", 4)
    rows = next(rows for form, rows in by_form.items() if form.startswith("TensorRT"))
    assert "int8" in {row["computes_in"] for row in rows}, rows


def test_inspect_reads_engines_on_the_gpu(trt: Any, heavy: str) -> None:
    done = trt("inspect", heavy, "onnx", "tensorrt/fp16", "--size", 128, "--device", "cuda:0", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tables"]["aligned"]["rows"]


@pytest.mark.skipif(not shutil.which("ncu"), reason="no ncu on the PATH")
@pytest.mark.parametrize("form", [(), ("tensorrt/fp16",)], ids=["pytorch", "tensorrt"])
def test_the_heavy_layer_has_hardware_counters(dyno: Any, heavy: str, form: tuple[str, ...]) -> None:
    if form and not importlib.util.find_spec("tensorrt"):
        pytest.skip("no TensorRT in this Python")
    words = (heavy, *form, "--batch", 16, "--size", 128, *QUICK, "--counters", "--format", "json")
    done = dyno("profile", *words)
    if "ERR_NVGPUCTRPERM" in done.stderr or "another program uses" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["tables"]["counters"]
    for name in {row["form"] for row in found["rows"]}:
        rows = [row for row in found["rows"] if row["form"] == name]
        assert rows[0]["modules"].split()[0] == "1.0" and rows[0]["share"] > 30, rows
        assert all(row["time_us"] > 0 and 0 <= row["sm"] <= 100 and row["blocks"] > 0 for row in rows), rows
    assert not any("of no layer" in note for note in found["notes"]), found["notes"]
