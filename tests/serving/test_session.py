"""`dyno bench serve` on the command line and from Python, with real and scripted engines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dyno
from dyno.worker.facts.job import ServeFacts
from dyno.worker.record import read_record
from dyno.worker.serving.options import ServeOptions

pytestmark = pytest.mark.usefixtures("preloaded")

QUICK = ("--seconds", 0.05, "--warmup", 0.02, "-o", "run")
FAKE = ("fake:net", "--channels", 1, "--threads", 1, *QUICK)
NET = """
import torch

def net():
    torch.manual_seed(0)
    pool = torch.nn.AdaptiveAvgPool2d(1)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2), pool, torch.nn.Flatten(), torch.nn.Linear(8, 4))
"""


def facts(folder: Path) -> list[ServeFacts]:
    records = [read_record(path) for path in sorted(folder.glob("trials/*/r*"))]
    return [record.facts.serve for record in records if record is not None and record.facts.serve]


def test_given_rates_are_measured_and_shown_again(call: Any, tmp_path: Path) -> None:
    words = ("--backend", "fake@latency_ms=10", "--batch", 4, "--rate", "50,1000", "--duration", "1s", "--p99", "10s")
    _, out, _ = call("bench", "serve", *FAKE, *words, code=0)
    assert "p99 <= 10.0 s" in out and "was due, not from when it was sent" in out
    (found,) = facts(tmp_path / "run")
    assert [step.rate for step in found.steps] == [50, 1000] and found.rungs == (1, 2, 4)
    slow, fast = found.steps
    assert slow.verdict == "too few requests" and not slow.unstable
    assert "50.0 requests/s came for too short a time: 50 requests, and p99 needs 662, so at least 13 s" in out
    assert fast.verdict == "unstable" and fast.unstable, "a batch of four in 10 ms is 400 requests/s at most"
    assert "more requests come than are answered" in out
    code, shown, _ = call("show", "run")
    assert code == 0 and shown in out, "the same tables and sentences, without what the trials' table makes of it"
    code, out, _ = call("show", "run", "--table", "serve-rates", "--format", "json")
    rows = json.loads(out)["tables"]["serve-rates"]["rows"]
    assert code == 0 and [row["rate"] for row in rows] == [50, 1000]
    assert rows[0]["p99_s"] is None and rows[0]["p50_s"] >= 0.01 <= rows[0]["compute_s"]
    # The hundred uncounted requests come first, and are answered within two seconds even on a slow machine.
    assert rows[1]["served"] < 500 and rows[1]["mean_batch"] > 3, "400, and the batch that ends first"
    _, out, _ = call("report", "run", code=0)
    assert (tmp_path / "run/charts/serve-latency.png").is_file()
    assert "serve-rates" in "".join(p.name for p in (tmp_path / "run/tables").iterdir())


def test_loadgen_sends_the_requests_with_the_same_times(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("mlperf_loadgen")
    words = ("--backend", "fake@latency_ms=20", "--rate", 30, "--duration", "2s", "--p50", "500ms", "--loadgen")
    _, out, _ = call("bench", "serve", *FAKE, *words, code=0)
    (found,) = facts(tmp_path / "run")
    (step,) = found.steps
    (folder,) = (tmp_path / "run").glob("trials/*/r0")
    times = np.load(folder / "serve.npz")
    latencies = np.sort(times["ended_0"] - times["arrival_0"])
    assert len(latencies) == 60 and "by LoadGen" in out
    assert latencies[0] >= 0.02 and latencies[29] - 1e-6 <= step.loadgen_s <= latencies[31] + 1e-6
    assert (times["began_0"] >= times["arrival_0"] - 1e-3).all(), "due before it is issued"
    summary = (folder / "loadgen-0/mlperf_log_summary.txt").read_text()
    assert "SUT name" in summary and f": {round(1e9 * step.loadgen_s)}" in summary


def test_rates_without_a_bound_are_not_compared(call: Any) -> None:
    words = ("--backend", "fake@latency_ms=2,fake@latency_ms=4", "--rate", 50, "--duration", "0.2s", "--rounds", 1)
    _, out, _ = call("bench", "serve", *FAKE, *words, code=0)
    assert "full batches" in out and "reference" not in out and "speedup" not in out


def test_the_search_ends_below_the_full_batch_capacity(call: Any, tmp_path: Path) -> None:
    words = ("--backend", "fake@latency_ms=2,fake@latency_ms=4", "--batch", 2, "--p50", "1s", "--resolution", 0.5,
             "--duration", "0.5s", "--rounds", 1)  # fmt: skip
    _, out, _ = call("bench", "serve", *FAKE, *words, code=0)
    for found in facts(tmp_path / "run"):
        assert found.searched and found.highest and found.capacity > 0
        assert found.highest in [step.rate for step in found.steps if step.verdict == "yes"]
        assert any(step.verdict != "yes" for step in found.steps)
    assert "reference" in out and "hold p50 <= 1.00 s" in out
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("trials/*/r0/record.json")}
    assert len(written) == 2 and call("bench", "serve", *FAKE, *words)[0] == 0
    assert all(path.stat().st_mtime_ns == at for path, at in written.items()), "nothing is measured twice"
    code, _, errors = call("bench", "serve", *FAKE, "--backend", "fake@latency_ms=2", "--p50", "2s")
    assert code == 2 and "run is of other requests; give another --out" in errors


def test_the_search_ends_where_a_lone_request_misses_the_bound_by_waiting(call: Any, tmp_path: Path) -> None:
    words = ("--backend", "fake@latency_ms=20", "--batch", 8, "--p50", "30ms", "--max-wait", "25ms", "--rounds", 1)
    _, out, _ = call("bench", "serve", *FAKE, *words, "--duration", "1s", code=0)
    (found,) = facts(tmp_path / "run")
    assert found.highest == 0 and min(step.rate for step in found.steps) > 40, "lower rates would wait as long"
    assert "A request waits up to 25.0 ms of that for others; shorten --max-wait." in " ".join(out.split())


def test_real_engines_answer_requests(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    (tmp_path / "small.py").write_text(NET)
    backends = "pytorch,onnxruntime,onnxruntime@streams=2"
    _, out, _ = call(
        "bench", "serve", "small.py:net", "--size", 16, "--backend", backends, "--batch", 4, "--rate", 40,
        "--instances", 2, "--duration", "1s", "--rounds", 1, *QUICK, code=0,
    )  # fmt: skip
    found = facts(tmp_path / "run")
    assert sorted(f.lanes for f in found) == [2, 2, 4] and all(f.instances == 2 for f in found)
    assert all(f.rungs == (1, 2, 4) and not f.bound_s and f.highest is None for f in found)
    for path in (tmp_path / "run").glob("trials/*/r0/serve.npz"):
        arrays = np.load(path)
        assert np.isfinite(arrays["ended_0"]).all() and (arrays["ended_0"] > arrays["began_0"]).all()
        assert (arrays["began_0"] >= arrays["arrival_0"]).all(), "no request is answered before it was due"
    assert "40.0" in out and "hold" not in out.partition("Rates of requests")[0].partition("highest rate:")[0]


def test_padding_to_a_fixed_batch_is_reported(call: Any, onnx_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    _, out, _ = call("bench", "serve", onnx_file, "--rate", 100, "--duration", "0.5s", *QUICK, code=0)
    (found,) = facts(tmp_path / "run")
    assert found.most == 2 and found.rungs == (2,)
    assert "can't be loaded for batches of 1; fewer requests are padded to the next" in out


def test_a_trace_gives_the_arrival_times(call: Any, tmp_path: Path) -> None:
    times = np.sort(np.random.default_rng(0).uniform(5, 6, 700))
    (tmp_path / "trace.txt").write_text("\n".join(map(str, times)))
    words = ("--backend", "fake@latency_ms=0.1", "--trace", "trace.txt", "--p99", "9s")
    _, out, _ = call("bench", "serve", *FAKE, *words, code=0)
    (found,) = facts(tmp_path / "run")
    (step,) = found.steps
    assert found.trace == "trace.txt" and step.first == 0 and 600 < step.rate < 800
    assert step.verdict == "yes" and "It is the highest of the requested rates" in out


def test_a_full_queue_refuses_requests(call: Any, tmp_path: Path) -> None:
    _, out, _ = call(
        "bench", "serve", *FAKE, "--backend", "fake@latency_ms=5", "--batch", 1, "--rate", 2000, "--duration", "0.5s",
        "--queue", 3, "--p90", "1s", code=0,
    )  # fmt: skip
    (found,) = facts(tmp_path / "run")
    assert found.steps[0].verdict == "no" and not found.steps[0].unstable
    assert "found the queue full and count as beyond every bound" in out
    assert "holds p90 <= 1.00 s: at 2,000 requests/s p90 falls on requests without an answer" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "a search needs a bound; give --p99 20ms"),
        (("--p99", "20ms", "--loadgen", "--queue", 4), "LoadGen says when requests come, and waits for every answer"),
        (("--p99", "20"), "p99 is '20'; write a number with its unit"),
        (("--trace", "none.txt"), "there is no trace /"),
        (("--p99", "1s", "--batch", 8, "--queue", 2), "queue is 2; it must be at least the largest batch, 8"),
        (("--p99", "1s", "--batch", 4, "--engine-batches", "8"), "engine_batches has 8"),
    ],
)
def test_invalid_input_is_refused_in_one_line(refused: Any, words: tuple[object, ...], said: str) -> None:
    assert said in refused("bench", "serve", *FAKE, *words)


def test_a_search_too_short_for_the_percentile_is_reported(call: Any, tmp_path: Path) -> None:
    words = ("--backend", "fake@latency_ms=50", "--batch", 1, "--p99", "1us", "--duration", "0.5s")
    _, out, _ = call("bench", "serve", *FAKE, *words, code=0)
    (found,) = facts(tmp_path / "run")
    assert found.highest == 0 and [step.rate for step in found.steps] == [pytest.approx(662.1 / 0.5)]
    said = (
        "Below 1,320 requests/s fewer than the 662 requests that p99 needs come in 500 ms, so no lower rate was tried"
    )
    assert said in " ".join(out.split())


def test_a_bound_missed_by_a_lone_request_ends_the_search(call: Any, tmp_path: Path) -> None:
    """A search at ever lower rates would take ever longer."""
    words = ("--backend", "fake@latency_ms=50", "--batch", 1, "--p50", "1ms")
    _, out, _ = call("bench", "serve", *FAKE, *words, code=0)
    (found,) = facts(tmp_path / "run")
    assert found.highest == 0 and len(found.steps) == 1
    assert "No rate that was tried holds p50" in " ".join(out.split()) and "no lower rate was tried" not in out


def test_a_failing_engine_is_reported_without_a_traceback(call: Any) -> None:
    code, _, errors = call("bench", "serve", *FAKE, "--backend", "fake@fail=exception", "--p99", "1s")
    assert code == 3 and "scripted failure" in errors and "Traceback" not in errors


def test_engines_with_non_finite_outputs_are_not_measured(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "broken.py").write_text(
        NET.replace("Linear(8, 4))", "Linear(8, 4), torch.nn.Threshold(9e9, float('inf')))")
    )
    _, out, errors = call(
        "bench", "serve", "broken.py:net", "--size", 16, "--rate", 50, "--duration", "0.5s", *QUICK, code=3
    )
    assert "the outputs are not finite (NaN or infinity)" in errors and "Traceback" not in errors
    assert not facts(tmp_path / "run") and "requests/s" not in out


def test_serving_is_measured_from_python(tmp_path: Path) -> None:
    options = ServeOptions(p50="1s", rate=200, instances=np.int64(1), duration="0.5s")  # type: ignore[arg-type]
    served = dyno.bench_serve(
        "fake:net", channels=1, backends=("fake@latency_ms=1",), threads=1, seconds=0.05, warmup=0.02,
        out=tmp_path / "run", options=options,
    )  # fmt: skip
    first, rates = served.tables
    assert first.rows[0]["rate"] == pytest.approx(200) and rates.rows[0]["holds"] == "yes"
    assert served.sentences[0].startswith("200 requests/s hold p50 <= 1.00 s")


def test_the_report_starts_with_the_requests(call: Any, tmp_path: Path) -> None:
    call("bench", "serve", *FAKE, "--backend", "fake@latency_ms=1", "--rate", "200,400", "--duration",
                           "1s", "--p90", "9s", code=0)  # fmt: skip
    assert call("report", "run")[0] == 0
    page = (tmp_path / "run" / "report.html").read_text()
    top = page.split('-tables">Trials</h2>')[0]
    assert "requests/s hold p90 &lt;= 9.00 s" in top and "asked, requests/s" in top
    assert 'id="r0-serve-latency' in top and "fastest is" not in top and "mathdefault" not in page
    shown = dyno.load(tmp_path / "run")._repr_html_()
    assert "requests/s hold p90 &lt;= 9.00 s" in shown and 'alt="serve-latency"' in shown
