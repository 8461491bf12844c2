"""Cold starts: parts sum to the whole in real process starts, and their table."""

import csv
import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

import dyno
import onnx_text
from dyno.layers import cold_start
from dyno.layers.cold_start import COLD, WARM
from dyno.worker.facts.job import ColdStart
from dyno.worker.system import SILENCING_VARIABLES


def starts(title: str, *seconds: float) -> cold_start.ColdStartSamples:
    return cold_start.ColdStartSamples(
        title, cold_start.WARM, tuple(ColdStart({"load": s / 2}, s, (s / 100,)) for s in seconds)
    )


def test_wide_intervals_show_their_lower_bound() -> None:
    """With two rounds the direction may be certain while the interval is wider than a factor of two."""
    vague, clear = (math.exp(-1.063), math.exp(-0.937)), (math.exp(-1.001), math.exp(-0.999))
    for seconds, speedup, verdict in ((vague, "≥1.22x", "faster"), (clear, "2.72x [2.68, 2.75]", "faster")):
        table = cold_start.ColdStarts((starts("first", 1.0, 1.0), starts("second", *seconds))).table
        (part,) = table.parts()
        shown = {column.name: column.text(part.rows[1]) for column in part.columns}
        assert (shown["speedup"], shown["verdict"]) == (speedup, verdict)
        assert [row["verdict"] for row in table.rows] == ["reference", "faster"], "files have the word alone"


def test_a_later_call_is_a_share_of_the_printed_first_answer() -> None:
    (one,) = cold_start.ColdStarts((starts("first", 1.0, 4.0),)).starts  # a mean of 2 s; calls of 10 and 40 ms
    assert "a later call takes 1/80.0 of it." in one.describe()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = "(float[batch, 3, 8, 8] input) => (float[batch, 3, 8, 8] output) { output = Relu(input) }"
    return onnx_text.write(tmp_path_factory.mktemp("cold") / "small.onnx", text)


def test_the_parts_sum_to_the_first_answer(file: Path) -> None:
    started = dyno.bench_cold_start(str(file), "onnxruntime", "openvino", rounds=2, threads=1)
    assert [(one.title, one.files) for one in started.starts] == [
        ("onnxruntime fp32", WARM), ("onnxruntime fp32", COLD), ("openvino fp32", WARM), ("openvino fp32", COLD),
    ]  # fmt: skip
    for one in started.starts:
        assert len(one.rounds) == 2
        for start in one.rounds:
            assert list(start.parts) == ["start", "imports", "load", "inputs", "first_call"], "no GPU, no context"
            rest = start.first_answer - sum(start.parts.values())
            assert min(start.parts.values()) > 0 and rest >= 0
            assert start.parts["imports"] > start.parts["first_call"], "an engine's library is large, the model is not"
            assert len(start.later) > 5 and max(start.later) < start.first_answer
            assert any("site-packages/onnxruntime" in path or "openvino" in path for path in start.files)
    row = started.table.rows[0]
    whole = ("first_answer_ms", "later_ms")
    parts = [value for name, value in row.items() if name.endswith("_ms") and name not in whole]
    assert sum(parts) == pytest.approx(1e3 * started.starts[0].middle.first_answer)
    assert started.to_pandas()["verdict"].tolist()[:2] == ["reference", "reference"]
    assert all("of it is" in sentence for sentence in started.sentences)


def test_bench_cold_start_prints_its_table(file: Path, call: Any) -> None:
    _, out, err = call(
        "bench", "cold-start", file, "--rounds", 1, "--files", "memory", "--threads", 1, "--format", "csv", code=0
    )
    (row,) = csv.DictReader(io.StringIO(out))
    assert row["form"] == "onnxruntime fp32" and row["files"] == WARM and row["rounds"] == "1"
    assert float(row["first_answer_ms"]) > float(row["later_ms"]) > 0
    assert not err, "off a terminal only what went wrong has a line"


def test_libraries_without_byte_code_are_reported(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (str(file), "onnxruntime")
    usual = dyno.bench_cold_start(*asked, rounds=1, threads=1, files="memory")
    assert not any("byte-code" in sentence for sentence in usual.sentences)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "nothing"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (sentence,) = dyno.bench_cold_start(*asked, rounds=1, threads=1, files="memory").sentences[1:]
    assert "Python modules have no byte-code" in sentence and "compileall" in sentence


def test_invalid_cold_starts_are_refused(file: Path, refused: Any) -> None:
    assert "at least 1" in refused("bench", "cold-start", file, "--rounds", 0)
    assert "memory" in refused("bench", "cold-start", file, "--files", "memry")
    assert "name a backend" in refused("bench", "cold-start", "torchvision:resnet18", "onnx", "--size", 32)
    assert "gone.onnx" in refused("bench", "cold-start", "gone.onnx")


def test_a_job_run_by_hand_has_no_start_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dyno.worker import main
    from dyno.worker.spec import Dims, Job, ModelSpec, Trial, to_json

    monkeypatch.delenv("DYNO_STARTED", raising=False)
    for name in SILENCING_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MPLBACKEND", "svg")
    job = Job("cold_start", trial=Trial(ModelSpec("net", "net.py:net"), "onnxruntime", "fp32", Dims(1, 8, 8)))
    (tmp_path / "job.json").write_text(json.dumps(to_json(job)))
    assert main.main(tmp_path) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["status"] == "failed" and "dyno bench cold-start" in record["reason"]
    expected = {**SILENCING_VARIABLES, "MPLBACKEND": "svg"}
    assert {name: os.environ.get(name) for name in expected} == expected, "what the user has set stays"


def test_forms_refused_by_a_library_are_left_out(call: Any, refused: Any, half_known: Path) -> None:
    words = ("--rounds", 1, "--files", "memory", "--threads", 1)
    code, out, err = call("bench", "cold-start", half_known, "openvino", "onnxruntime", *words, "--format", "json")
    assert code == 3 and "dyno: left out: half openvino fp32: " in err
    assert re.search("OpenVINO (doesn't support Det-17|does not support .* operations: Det)", err)
    assert [row["form"] for row in json.loads(out)["tables"]["cold-start"]["rows"]] == ["onnxruntime fp32"]
    net = "from torch import nn\nclass Never(nn.Module):\n    def forward(self, x):\n        return None\n"
    (half_known.parent / "never.py").write_text(net, encoding="utf-8")
    assert "never.py" in refused("bench", "cold-start", "never.py:nothing", *words)
