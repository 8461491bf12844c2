"""`dyno bench serve` compares every engine's answers with a reference's before ranking."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

import dyno
import planted_backends
from dyno.report.verdict import verdict
from dyno.serving import tables

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("preloaded")

QUICK = ("--rate", 40, "--p50", "9s", "--duration", "0.5s", "--seconds", 0.05, "--warmup", 0.02, "-o", "run")
SMALL = ("net.py:net", "--size", 16, "--batch", 4, "--rounds", 1, *QUICK)


@pytest.fixture(autouse=True)
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(planted_backends.__file__).parent))  # jobs find that backend
    (tmp_path / "net.py").write_text(planted_backends.NET)


def test_an_engine_with_wrong_outputs_is_never_ranked(call: Any, tmp_path: Path) -> None:
    wrong = "planted_backends:ChangedWeight"
    code, out, errors = call("bench", "serve", *SMALL, "--backend", f"{wrong},onnxruntime")
    assert code == 3 and "Traceback" not in errors, errors
    run = dyno.load(tmp_path / "run")
    right, bad = run.table("serve").rows
    assert right["outputs"] == "agree" and right["output_error"] < 1e-4 and right["verdict"] == "reference"
    assert bad["outputs"] == "wrong outputs" and bad["output_error"] > 0.01 and "speedup" not in bad
    assert bad["verdict"].startswith("wrong outputs: off by") and "(fp32 allows 0.01)" in bad["verdict"]
    assert "Outputs agree with those of pytorch fp32, to 0.001 %." in out
    said = out[out.index(f"\nnet {wrong} fp32 b4 16:\n") :].splitlines()[2]
    assert said.startswith("Wrong outputs: off by") and "they are not ranked." in " ".join(out.split())
    assert len([*tmp_path.glob("run/reference/trials/*/r*")]) == 1, "one job, and nothing of it is a row"
    assert [t.backend for t in run.records] == ["onnxruntime", wrong]
    assert "(fp32 allows 0.01) against pytorch fp32, so they are not ranked" in verdict.list_sentences(run.data)[0]
    shown = {name: call("show", "run", "--table", "serve", "--format", name)[1] for name in ("json", "csv")}
    figure = tables.draw_latency_by_rate(run.data)
    labels = {text.get_text().partition(wrong)[2] for text in figure.legends[0].get_texts()}
    assert labels == {"", " fp32 b4 16, p50, wrong outputs"}
    assert [row["outputs"] for row in json.loads(shown["json"])["tables"]["serve"]["rows"]] == [
        "agree",
        "wrong outputs",
    ]
    assert [float(row["output_error"]) > 0.01 for row in csv.DictReader(io.StringIO(shown["csv"]))] == [False, True]


def test_an_engine_wrong_in_smaller_batches_is_never_ranked(call: Any, tmp_path: Path) -> None:
    code, out, errors = call("bench", "serve", *SMALL, "--backend", "planted_backends:WrongPairs,onnxruntime")
    assert code == 3 and "the outputs for one input change by" in errors, errors
    (row,) = dyno.load(tmp_path / "run").table("serve").rows
    assert row["outputs"] == "agree" and "WrongPairs" not in out


def test_a_single_wrong_engine_is_not_the_reference(call: Any, tmp_path: Path) -> None:
    _, out, _ = call("bench", "serve", *SMALL, "--backend", "planted_backends:ChangedWeight", code=3)
    (row,) = dyno.load(tmp_path / "run").table("serve").rows
    assert row["verdict"].startswith("wrong outputs: off by") and "against pytorch fp32; they are not ranked" in out


def test_a_reference_among_the_engines_needs_no_extra_job(call: Any, tmp_path: Path) -> None:
    _, out, _ = call("bench", "serve", *SMALL, "--backend", "onnxruntime,pytorch", code=0)
    reference, other = dyno.load(tmp_path / "run").table("serve").rows
    assert reference["verdict"] == "reference" and "outputs" not in reference and other["outputs"] == "agree"
    assert not (tmp_path / "run/reference").exists() and "compared with none" not in out


def test_padding_does_not_change_fixed_batch_answers(call: Any, onnx_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    words = ("bench", "serve", onnx_file, "--backend", "openvino", "--compared", 5, *QUICK)
    _, out, errors = call(*words, code=0)
    assert "Outputs agree with those of onnxruntime fp32" in out and "fewer requests are padded to the next" in out
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/**/record.json")}
    assert len(written) == 2 and call(*words)[0] == 0
    assert all(path.stat().st_mtime_ns == at for path, at in written.items()), "nothing is answered twice"
    code, out, errors = call("runs", "list", tmp_path)
    assert code == 0 and "reference" not in out, errors
    assert call("runs", "rm", "run")[0] == 0 and not (tmp_path / "run").exists()


def test_random_outputs_are_not_compared(call: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(planted_backends.NET.replace("return self.head(", "x = x + torch.rand_like(x)\n"
                                                                  "        return self.head("))  # fmt: skip
    _, out, _ = call("bench", "serve", *SMALL, "--backend", "pytorch@precision=bf16", code=0)
    assert "Outputs are compared with none: outputs change from call to call." in out
    assert "outputs" not in dyno.load(tmp_path / "run").table("serve").rows[0]


def test_a_failing_reference_fails_no_other_engine(call: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        planted_backends.NET.replace(
            "x = torch.relu", "assert len(x) < 4 or x.dtype != torch.float32\n        x = torch.relu", 1
        )
    )
    _, out, _ = call("bench", "serve", *SMALL, "--backend", "pytorch@precision=bf16", code=0)
    assert "Outputs are compared with none: pytorch fp32 gave none (failed: first call: net refuses" in out
