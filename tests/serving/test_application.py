"""`dyno bench app`: an application's own stages around each engine, with stages of known duration."""

import json
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import dyno
from dyno.results.stats import Rule
from dyno.serving import application, figures
from dyno.serving.application import ApplicationRun
from dyno.serving.figures import Outputs
from dyno.worker.facts.job import APPLICATION_STAGES, ApplicationFacts
from refusals import refuses

QUICK = ("--seconds", 0.3, "--warmup", 0.05)
# Sleeping stages; postprocess fails unless the engine returned NumPy's result in the module's form.
SLEEPING = """
import time
import numpy as np
import torch

WEIGHT = np.arange(8, dtype=np.float32).reshape(2, 4)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2, bias=False)
        self.layer.weight.data = torch.from_numpy(WEIGHT.copy())
    def forward(self, x):
        time.sleep(0.04)  # no exported graph has it
        return {"scores": self.layer(x), "ids": (torch.argmax(self.layer(x), 1),)}

class Pipeline:
    def __init__(self):
        self.model = Net()
    def preprocess(self, request):
        time.sleep(0.05)
        self.request = list(request)
        return np.array([[request.pop(0) for _ in range(4)]], np.float32)  # the next pass gets the request whole again
    def postprocess(self, outputs):
        time.sleep(0.01)
        expected = np.array([self.request], np.float32) @ WEIGHT.T
        np.testing.assert_allclose(outputs["scores"].numpy(), expected, rtol=1e-4)
        (ids,) = outputs["ids"]
        assert ids.dtype == torch.int64 and ids.tolist() == expected.argmax(1).tolist()

def pipeline(): return Pipeline()
def pipeline_requests(): return [[1, 2, 3, 4], [4, -3, 2, -1], [0, 0, 1, 0]]
"""
IMAGES = """
import numpy as np
import torch
from PIL import Image

class Pipeline(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size, self.layer = size, torch.nn.Conv2d(3, 2, 3)
    def forward(self, image): return self.layer(image).mean((2, 3))
    def preprocess(self, path): return Image.open(path).convert("RGB").resize((self.size, self.size))
    def predict(self, image):
        pixels = torch.from_numpy(np.asarray(image, np.float32) / 255).permute(2, 0, 1)
        return self(torch.stack([pixels, pixels.flip(2)])).mean(0)
    def postprocess(self, scores):
        yield scores.argmax().item()
"""
BROKEN = """
import numpy as np
import torch

class Base:
    def __init__(self): self.model = torch.nn.Linear(4, 2)
    def preprocess(self, request): return np.ones((1, 4), np.float32)
    def postprocess(self, outputs): return outputs.sum()

def helper(request): return {}["missing"] if request == 2 else np.ones((1, 4), np.float32)

class Raises(Base):
    def preprocess(self, request): return helper(request)
class Misfits(Base):
    def preprocess(self, request): return np.ones((1, 5), np.float32)
class Unread(Base):
    def postprocess(self, outputs): return outputs["boxes"]
class Changes(Base):
    def preprocess(self, request): return np.ones((request, 4), np.float32)
class Text(Base):
    def preprocess(self, request): return "text"
class Unset(Base):
    def preprocess(self, request): return np.full((1, 4), np.nan, np.float32)
class Idle(Base):
    def predict(self, inputs): return torch.zeros(1)
class Later(Base):
    async def postprocess(self, outputs): return outputs
class Modelless(Base):
    def __init__(self): self.model = 3
class Half:
    model = torch.nn.Linear(4, 2)
    def preprocess(self, request): return request
class Silent(Base): pass
class Empty(Base): pass

def Empty_requests(): return []
def requests(): return [1, 2]
for name in "Base Raises Misfits Unread Changes Text Unset Idle Later Modelless Half".split():
    globals()[f"{name}_requests"] = requests
here = Base()
"""


@pytest.fixture
def net(tmp_path: Path, preloaded: str) -> Path:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(SLEEPING)
    return tmp_path


@pytest.mark.parametrize("name", ["pipeline", "Pipeline"])
def test_the_model_share_matches_known_times(name: str, net: Path, call: Any) -> None:
    """50 + 40 + 10 ms: the model is 40 %, so at most 1.67x. A sleep may take milliseconds longer beside others."""
    pytest.importorskip("onnxruntime")
    (net / "net.py").write_text(SLEEPING + "\nPipeline_requests = pipeline_requests\n")
    words = ("app", f"net.py:{name}", "--backend", "pytorch,onnxruntime", "--rounds", 2, *QUICK, "-o", "run")
    _, out, errors = call("bench", *words, "--format", "json", code=0)
    assert "Traceback" not in errors
    eager, graph = json.loads(out)["tables"]["app"]["rows"]
    assert eager["requests"] == 3 and eager["rounds"] == 2
    assert eager["request_s"] >= 0.1 and eager["model_s"] >= 0.04 and eager["preprocess_s"] >= 0.05
    assert 30 < eager["share"] < 50 and 1.4 < eager["limit"] < 2
    assert graph["model_s"] < 0.02 and graph["outputs"] == "agree"
    assert 1.2 < graph["speedup"] < eager["limit"] + 0.4, "no engine gives more than the limit"
    for row in (eager, graph):
        stages = [row[f"{stage}_s"] for stage in ("preprocess", "model", "postprocess", "other")]
        assert min(stages) >= 0 and sum(stages) == pytest.approx(row["request_s"], rel=0.02)
    for path in (net / "run/trials").glob("*/r*/application.npz"):
        arrays = np.load(path)
        assert arrays["request"].shape[0] == 3
        assert (sum(arrays[stage] for stage in APPLICATION_STAGES[:-1]) <= arrays["request"]).all()
    _, shown, _ = call("show", "run", code=0)
    assert "a faster engine makes a request at most" in shown and "The longest stage is preprocess" in shown
    before = sorted(path.stat().st_mtime_ns for path in (net / "run").glob("trials/*/r*/record.json"))
    call("bench", *words, code=0)
    assert sorted(p.stat().st_mtime_ns for p in (net / "run").glob("trials/*/r*/record.json")) == before
    (net / "net.py").write_text(SLEEPING.replace("0.05", "0.06") + "\nPipeline_requests = pipeline_requests\n")
    _, _, errors = call("bench", *words, code=2)
    assert "run is of another application, or other requests; give another --out" in errors


def test_photos_are_requests_and_predict_may_call_the_model_freely(
    tmp_path: Path, preloaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "photos").mkdir()
    rng = np.random.default_rng(0)
    for number in range(40):
        image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)).save(tmp_path / f"photos/{number}.png")
    (tmp_path / "app.py").write_text(IMAGES)
    monkeypatch.chdir(tmp_path)
    found = dyno.bench_app(
        "app.py:Pipeline(size=12)", data="photos", backends=("onnxruntime",), rounds=1, seconds=0.1, warmup=0.02,
        out="run",
    )  # fmt: skip
    (row,) = found.table("app").rows
    assert row["requests"] == 32 and row["outputs"] == "agree"
    assert "b2 12" in row["label"], "predict makes a batch of two images of that size"
    stored = np.load(tmp_path / "run/application.npz")
    assert stored["image"].shape == (64, 3, 12, 12)
    assert (stored["image"][1] == stored["image"][0][..., ::-1]).all()


REUSED = """
import torch
class Reused:
    def __init__(self): self.model, self.buffer = torch.nn.Linear(4, 2), torch.zeros(1, 4)
    def preprocess(self, request): return self.buffer.fill_(request)
    def postprocess(self, outputs): return outputs
def Reused_requests(): return [1, 2, 3]
"""


def test_inputs_in_a_buffer_that_is_used_again_are_kept(
    tmp_path: Path, preloaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app.py").write_text(REUSED)
    monkeypatch.chdir(tmp_path)
    dyno.bench_app("app.py:Reused", backends=("pytorch",), rounds=1, seconds=0.05, warmup=0.01, out="run")
    assert np.load("run/application.npz")["input"][:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(("name", "says"), [
    ("Raises", "preprocess of app.py:Raises failed at app.py:10, request 2: KeyError: 'missing'"),
    ("Misfits", "model of app.py:Misfits failed on 1x5 float32, request 1: RuntimeError: "),
    ("Unread", "postprocess of app.py:Unread failed at app.py:17 on 1x2 float32, request 1: IndexError: "),
    ("Changes", "the network gets inputs of 2 shapes or types, such as input 1x4 float32 and input 2x4 float32"),
    ("Text", "the network's input 'input' is a str; an engine takes tensors and arrays alone"),
    ("Unset", "the network's input 'input' has values that are not numbers (NaN); correct preprocess"),
    ("Idle", "predict of app.py:Idle doesn't call its model, so no engine can replace it"),
    ("Later", "app.py:Later has an asynchronous postprocess"),
    ("Modelless", "app.py:Modelless is a Modelless without a model; an application has preprocess(request)"),
    ("Half", "app.py:Half is a Half without postprocess; an application has preprocess(request)"),
    ("Silent", "there are no requests; give photos with --data, or write Silent_requests(), which returns a list"),
    ("Empty", "Empty_requests() returned nothing; it must return a list of requests"),
    ("here", "there are no requests; give photos with --data, or write here_requests()"),
    ("Missing", "app.py has no function 'Missing'"),
])  # fmt: skip
def test_unsuitable_applications_are_refused_in_one_line(
    name: str, says: str, tmp_path: Path, preloaded: str, refused: Any
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "app.py").write_text(BROKEN)
    assert refused("bench", "app", f"app.py:{name}", "-o", "run").startswith(says)
    assert not (tmp_path / "run").exists()


def test_other_invalid_input_is_refused_in_one_line(net: Path, refused: Any) -> None:
    assert "torchvision:resnet18 is a network alone" in refused("bench", "app", "torchvision:resnet18")
    assert "digits are not files" in refused("bench", "app", "net.py:pipeline", "--data", "digits")
    refuses("application is 3; it must be text", dyno.bench_app, 3)


def test_an_engine_without_a_result_has_a_sentence_that_says_why(
    net: Path, preloaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(net)
    settings: dict[str, Any] = {"rounds": 1, "seconds": 0.05, "warmup": 0.02, "out": "run"}
    refused = dyno.bench_app("net.py:pipeline", backends=("pytorch",), precisions=("int8",), **settings)
    (reason,) = refused.sentences
    assert reason.endswith("pytorch has no int8 here (it has fp32, fp16, bf16)"), reason
    partly = dyno.bench_app("net.py:pipeline", backends=("pytorch",), precisions=("fp32", "int8"), **settings)
    assert len(partly.sentences) > 1 and partly.sentences[-1] == reason


def run_of(*rounds: tuple[float, float, float, float], backend: str = "pytorch", **more: Any) -> ApplicationRun:
    """Build a trial from rounds, each given as the seconds of preprocess, model, postprocess and the whole request."""
    trial = cast(Any, SimpleNamespace(id=backend, label=backend, backend=backend, good=()))
    named = tuple(dict(zip(APPLICATION_STAGES, each, strict=True)) for each in rounds)
    return ApplicationRun(trial, ApplicationFacts(4), named, **more)


def test_the_speed_up_limit_follows_amdahl() -> None:
    run = run_of(*[(0.06, 0.03, 0.006, 0.1)] * 3)
    assert run.share.value == pytest.approx(0.3) and run.limit.value == pytest.approx(1 / 0.7)
    assert run.between == pytest.approx(0.004)
    said = " ".join(application.list_sentences(run))
    assert "The model is 30.0 [30.0, 30.0] % of a request (30.0 ms of 100 ms)" in said
    assert "at most 1.43 [1.43, 1.43] times as fast" in said
    assert "The longest stage is preprocess, 60.0 %: twice as fast, it would make a request 1.43x as fast." in said
    assert "% of a request is in no stage" not in said


def test_the_interval_of_the_share_is_over_rounds() -> None:
    """By hand: the rest's logarithms 0.7, 0.68, 0.72, their mean and Student's t with two degrees of freedom."""
    run = run_of((0.06, 0.3, 0.2, 1.0), (0.06, 0.32, 0.2, 1.0), (0.06, 0.28, 0.2, 1.0))
    logs = np.log([0.7, 0.68, 0.72])
    half = 4.302653 * logs.std(ddof=1) / np.sqrt(3)
    ends = np.exp([logs.mean() - half, logs.mean() + half])
    assert [run.share.low, run.share.high] == pytest.approx(1 - ends[::-1], rel=1e-5)
    assert [run.limit.low, run.limit.high] == pytest.approx(1 / ends[::-1], rel=1e-5)
    once = run_of((0.06, 0.3, 0.2, 1.0))
    assert np.isnan(once.share.low) and np.isnan(once.limit.high) and once.share.value == pytest.approx(0.3)
    assert "% of a request is in no stage" in " ".join(application.list_sentences(once))


def test_wrong_outputs_have_no_speed_up() -> None:
    first = run_of(*[(0.05, 0.04, 0.01, 0.1)] * 3)
    fast = run_of(*[(0.05, 0.01, 0.01, 0.07)] * 3, backend="fast")
    wrong = run_of(
        *[(0.05, 0.001, 0.01, 0.06)] * 3, backend="wrong", outputs=Outputs("wrong outputs", 1.0, fault="off")
    )
    gain = figures.list_speedups([first, fast, wrong], Rule())
    assert gain[0] is None and gain[2] is None
    assert gain[1] is not None and gain[1].value == pytest.approx(1 / 0.7) and gain[1].verdict == "faster"


def test_disturbed_passes_are_left_out_of_every_stage() -> None:
    """Two requests in eight passes, one of them ten times as long."""
    slow = np.array([1, 1, 10, 1, 1, 1, 1, 1])
    seconds = {"preprocess": 0.1, "model": 0.2, "postprocess": 0.1, "request": 0.5}
    arrays = {name: np.outer([1, 3], each * slow) for name, each in seconds.items()}
    assert application._average_stages(arrays) == pytest.approx({name: 2 * each for name, each in seconds.items()})


def test_requests_are_answered_in_turn_for_the_time_and_in_whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from dyno.worker.jobs import application as job

    for whole_passes, answers in ((False, 11), (True, 12)):
        answered = list[int]()
        monkeypatch.setattr(job, "now", lambda: len(answered) * 100_000_000)  # noqa: B023
        requests = SimpleNamespace(answer=lambda index: answered.append(index) or (1, 2, 3, 2_000_000_000))  # noqa: B023
        seconds = job._answer_requests(requests, 4, 1.05, whole_passes)
        assert answered == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3][:answers]
        assert seconds.shape == (answers, 4) and (seconds[:, 3] == 2).all()


def test_a_single_request_is_answered_by_the_network_then_by_the_engine() -> None:
    torch = pytest.importorskip("torch")
    from dyno.worker.jobs.application import _InstrumentedApplication
    from dyno.worker.nets.models import Application

    answers, nothing = list[Any](), lambda *_: None
    stages = SimpleNamespace(preprocess=lambda request: request, postprocess=answers.append)
    requests = _InstrumentedApplication(
        Application("app.py:Own", stages, torch.nn.Identity(), lambda: [torch.ones(2)]), []
    )
    engine = SimpleNamespace(inputs=[SimpleNamespace(name="input")], bind=nothing, run=nothing, wait=nothing,
                             fetch=lambda: {"output": np.array([5, 6], np.float32)})  # fmt: skip
    requests.use(cast("Any", engine))
    requests.answer(0)
    assert [answer.tolist() for answer in answers] == [[1, 1], [5, 6]]


Pair = namedtuple("Pair", "first second")


@dataclass
class Answer:
    boxes: Any
    count: int


def test_engine_arrays_take_the_structure_of_the_network_result() -> None:
    torch = pytest.importorskip("torch")
    from dyno.worker.jobs.application import _fill_in

    example = {
        "a": Answer(torch.zeros(2), 7),
        "b": Pair(torch.zeros(1, dtype=torch.int64), [torch.zeros(2, dtype=torch.complex64)]),
    }
    arrays = [np.array([1.5, 2.5], np.float32), np.array([3], np.float32), np.array([[1, 2], [3, 4]], np.float32)]
    made = _fill_in(torch, example, iter(arrays))
    assert made["a"].boxes.tolist() == [1.5, 2.5] and made["a"].count == 7
    assert made["b"].first.dtype == torch.int64 and made["b"].first.tolist() == [3]
    assert made["b"].second[0].tolist() == [1 + 2j, 3 + 4j]
    arrays[0][:] = 0
    assert made["a"].boxes.tolist() == [1.5, 2.5], "the engine's next run leaves it as it is"
