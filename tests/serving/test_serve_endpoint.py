"""`dyno bench serve --endpoint`: a server of KServe's protocol v2 in place of an engine here."""

import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dyno
import kserve_server
from dyno.worker.backend import Session
from dyno.worker.backends import inference_server
from dyno.worker.backends.inference_server import ENDPOINT
from dyno.worker.serving.batching import Instances
from dyno.worker.serving.options import ServeOptions
from dyno.worker.spec import Dims, InputSpec, ModelSpec, Trial, Unanswered, Unavailable, UserError
from refusals import refuses

SHORT = ("--rate", 50, "--duration", "1s", "--seconds", 0.05, "--warmup", 0.02, "-o", "run")
NET = f"""
import torch

class Adder(torch.nn.Module):
    def forward(self, image): return image.sum((1, 2))

def {kserve_server.MODEL}():
    return Adder()
"""
needs_client = pytest.mark.skipif(
    find_spec("tritonclient") is None, reason="no tritonclient (pip install 'inference-dyno[serve]')"
)


@pytest.fixture
def bench(call: Any) -> Any:
    """`dyno bench serve` on the server's model for a short time; returns standard output and standard error."""

    def run(url: str, *words: object, model: str = kserve_server.MODEL, code: int = 0) -> tuple[str, str]:
        _, out, errors = call("bench", "serve", model, "--endpoint", url, *words, *SHORT, code=code)
        assert "Traceback" not in errors
        return out, errors

    return run


def tritonclient() -> Any:
    return import_module("tritonclient.http")


def trial(url: str, name: str = kserve_server.MODEL) -> Trial:
    return Trial(ModelSpec(name, f"endpoint:{name}"), "endpoint", "fp32", Dims(2, 0, 0), options={"url": url})


@needs_client
@pytest.mark.parametrize(("binary", "shape"), [(False, (-1, 3, 4)), (True, (-1, 3, 8, 8))])
def test_a_server_is_measured_like_an_engine(binary: bool, shape: tuple[int, ...], bench: Any, tmp_path: Path) -> None:
    with kserve_server.running(binary=binary, shape=shape) as (url, batches):
        out, _ = bench(url, "--batch", 2, "--instances", 2, "--p50", "9s")
    assert set(batches) == {1, 2} and len(batches) > 50
    assert f"{kserve_server.MODEL} endpoint@url={url} fp32 b2" in out
    assert f"Answered by {url}: times include the way there and back" in out
    assert "50.0 requests/s hold p50 <= 9.00 s" in out
    assert "the right answers of the server's model aren't known here; give its file as MODEL." in out
    (row,) = dyno.load(tmp_path / "run").table("serve").rows
    assert row["lanes"] == 2 and row["holds"] == "yes" and not row.get("outputs")


@needs_client
@pytest.mark.parametrize(("factor", "says"), [(1.0, "agree"), (1.5, "wrong outputs")])
def test_server_answers_are_compared_with_the_model(factor: float, says: str, bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "nets.py").write_text(NET)
    with kserve_server.running(factor=factor) as (url, _):
        words, code = ("--shapes", "image:batchx3x4", "--batch", 2), 0 if factor == 1 else 3
        out, _ = bench(url, *words, model=f"nets.py:{kserve_server.MODEL}", code=code)
    (row,) = dyno.load(tmp_path / "run").table("serve").rows
    assert row["outputs"] == says and row["output_error"] == pytest.approx(factor - 1, abs=1e-5)
    assert ("Outputs agree with those of pytorch fp32" in out) == (factor == 1)
    assert ("Wrong outputs: off by 0.50 of their size (fp32 allows 0.01) against pytorch fp32" in out) == (factor > 1)


@needs_client
def test_a_server_with_inputs_unlike_its_model_is_refused_in_one_line() -> None:
    given = (InputSpec("a", shape=("batch", 3)), InputSpec("b", shape=("batch", 3)))
    with kserve_server.running() as (url, _):
        other = replace(trial(url), model=ModelSpec(kserve_server.MODEL, f"nets:{kserve_server.MODEL}", inputs=given))
        refuses("'adder' takes x, and adder here a, b: not the same model", ENDPOINT.load, other, None)


@needs_client
def test_server_answers_are_fetched() -> None:
    with kserve_server.running() as (url, _):
        session = ENDPOINT.load(trial(url), None)
        assert [(t.name, t.dtype, t.shape) for t in session.inputs] == [("x", "float32", (2, 3, 4))]
        session.bind({"x": np.arange(24, dtype=np.float32).reshape(2, 3, 4)})
        session.run()
        session.wait()
        assert session.fetch()["y"].tolist() == [66.0, 210.0]
        session.close()


@needs_client
def test_missing_servers_and_models_are_reported_in_one_line() -> None:
    with kserve_server.running() as (url, _):
        refuses("has no model 'other'", ENDPOINT.load, trial(url, "other"), None)
    said = "no server of KServe's protocol v2 answers at {}: .*; check that it runs"
    with kserve_server.refusing() as url, pytest.raises(UserError, match=said.format(url)):
        ENDPOINT.load(trial(url), None)
    refuses("write http://HOST:PORT", ENDPOINT.load, trial("localhost:8000"), None)
    refuses(r"write http://HOST:PORT or .* \(Port out of range", ENDPOINT.load, trial("http://127.0.0.1:99999"), None)


@needs_client
@pytest.mark.parametrize(("mute", "says"), [
    ("/v2", "no server of KServe's protocol v2 answers at {url}: nothing came within 0.2 s; check that it runs"),
    (f"/v2/models/{kserve_server.MODEL}", "{url} did not answer about 'adder' within 0.2 s; check that it is loaded"),
])  # fmt: skip
def test_a_hanging_server_is_detected_at_the_first_contact(
    mute: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    class Client(tritonclient().InferenceServerClient):  # type: ignore[misc]
        def __init__(self, *words: Any, **settings: Any) -> None:
            limits.append(settings)
            super().__init__(*words, **settings)

    monkeypatch.setattr(tritonclient(), "InferenceServerClient", Client)
    with kserve_server.running() as (url, _):
        ENDPOINT.load(trial(url), None).close()
    first, own = limits
    assert set(first.values()) == {inference_server.FIRST_ANSWER_TIMEOUT_S} and not own, (
        "requests of the load have another limit"
    )
    monkeypatch.setattr(inference_server, "FIRST_ANSWER_TIMEOUT_S", 0.2)
    with kserve_server.running(mute=mute) as (url, _), pytest.raises(UserError) as caught:
        ENDPOINT.load(trial(url), None)
    assert str(caught.value) == says.format(url=url)


def test_a_failed_load_is_not_retried() -> None:
    tried = []

    def load(of: Trial) -> Session:
        tried.append(of.dims.batch)
        raise UserError("nothing came")

    with pytest.raises(UserError, match="nothing came"):
        Instances(replace(trial("http://127.0.0.1:1"), dims=Dims(8, 0, 0)), [1, 2, 4, 8], load, lambda *_: (), 1)
    assert tried == [8]


@needs_client
def test_requests_refused_by_a_server_count_and_do_not_end_the_test(bench: Any, tmp_path: Path) -> None:
    with kserve_server.running(most=1, takes=0.05) as (url, _):
        out, _ = bench(url, "--batch", 1, "--instances", 2, "--p50", "9s")
    assert "requests got no answer from the server and count as beyond every bound" in out
    assert f"a request in vain: {url} did not answer: [503] too many requests" in out
    (row,) = dyno.load(tmp_path / "run").table("serve-rates").rows
    assert 0 < row["refused"] < row["requests"] and not row["left"]


@needs_client
@pytest.mark.parametrize("good", [0, 60])
def test_a_server_with_non_finite_answers_fails(good: int, bench: Any, tmp_path: Path) -> None:
    with kserve_server.running(binary=True, takes=0.01, good=good) as (url, batches):
        out, errors = bench(url, "--batch", 1, code=3)
    assert len(batches) > good, "the check at the beginning takes fewer than 60 batches"
    assert "the outputs are not finite (NaN or infinity)" in errors
    run = dyno.load(tmp_path / "run")
    assert "requests/s" not in out and not run.to_pandas()["latency_all_ms_median"].notna().any()


@needs_client
def test_non_finite_answers_at_one_batch_size_are_reported(bench: Any, tmp_path: Path) -> None:
    """Where the requests form hardly one: each size is asked for before."""
    with kserve_server.running(overflowing=2) as (url, _):
        bench(url, "--batch", 4)
    (trial,) = dyno.load(tmp_path / "run").records
    assert "output y has values that are not finite: 100.00% are infinite" in trial.good[0].warnings


@needs_client
def test_rates_measured_before_a_server_fails_are_kept(call: Any, tmp_path: Path) -> None:
    with kserve_server.running(takes=0.005, alive=200) as (url, _):
        words = ("--endpoint", url, "--batch", 1, "--p50", "9s")
        _, out, _ = call("bench", "serve", kserve_server.MODEL, *words, *SHORT[2:], code=0)
    assert "did not answer: [500] out of memory; the test ended there, and the rates before are kept" in out
    assert dyno.load(tmp_path / "run").table("serve-rates").rows


@needs_client
@pytest.mark.parametrize("described", [[1, 2], {"name": "adder"}, {"inputs": [{}], "outputs": []}])
def test_an_invalid_model_description_is_reported_in_one_line(described: object) -> None:
    with kserve_server.running(described=described) as (url, _), pytest.raises(UserError) as caught:
        ENDPOINT.load(trial(url), None)
    assert f"{url} doesn't describe 'adder' as KServe's protocol v2 says" in str(caught.value)


@needs_client
@pytest.mark.parametrize(("settings", "said"), [
    ({"most": 0}, r"did not answer: \[503\] too many requests"), ({"lacking": True}, "answered without y"),
    ({"beyond": 1}, r"answered what isn't KServe's protocol v2: cannot reshape .* into shape \(3,\)"),
])  # fmt: skip
def test_a_failed_request_is_reported_in_one_line(settings: dict[str, Any], said: str) -> None:
    with kserve_server.running(**settings) as (url, _):
        session = ENDPOINT.load(trial(url), None)
        session.bind({"x": np.zeros((2, 3, 4), np.float32)})
        with pytest.raises(Unanswered, match=f"{url} {said}"):
            _ = session.run(), session.fetch()
        session.close()


@needs_client
def test_unreachable_servers_are_reported(bench: Any) -> None:
    with kserve_server.refusing() as url:
        assert f"protocol v2 answers at {url}" in bench(url, model="net", code=3)[1]


def test_missing_tritonclient_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tritonclient.http", None)
    with pytest.raises(Unavailable, match=r"an endpoint needs tritonclient, which .*'inference-dyno\[serve\]'"):
        ENDPOINT.load(trial("http://127.0.0.1:1"), None)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host:1", "http://", "http://h:99999", "http://a@b:1", "http:/h"]
)
def test_invalid_addresses_are_refused_before_measuring(url: str, refused: Any, tmp_path: Path) -> None:
    line = refused("bench", "serve", "net", "--endpoint", url, *SHORT)
    assert line.startswith(f"the endpoint is {url!r}; write http://HOST:PORT") and not [*tmp_path.iterdir()]


def test_an_endpoint_replaces_the_backends(tmp_path: Path) -> None:
    options = ServeOptions(p99="1s", endpoint="http://127.0.0.1:1")
    with pytest.raises(UserError, match="takes the place of a backend; omit --backend"):
        dyno.bench_serve("net", backends=("pytorch",), out=tmp_path / "run", options=options)
