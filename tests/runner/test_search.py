"""Searches: layers kept in float where int8 fails the budget, and other routes to a faster file."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dyno import Study, UserError
from dyno.jobs.progress import Progress
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results import notes, stats, trial_result
from dyno.results.correctness import OUTPUTS_AGREE
from dyno.results.notes import ROUTE_FAILED, Attempt, read_attempts
from dyno.runner import search
from dyno.study.plan import expand
from dyno.worker.spec import Dims, ModelSpec, Trial

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

QUICK = "--rounds 1 --seconds 0.05 --block 0.01 --warmup 0.02 --boundaries model --threads 1 --confirm 0".split()


def test_run_finds_the_layer_that_needs_higher_precision(
    hostile: Path, dyno: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", hostile, "--data", "digits", "--channels", 1, "--backend", "onnxruntime", "--precision",
             "fp32,int8", "--batch", "1,4", "--budget", "top1=2", "--out", tmp_path / "run", *QUICK]  # fmt: skip
    dyno(*words, code=0)
    frame = trial_table.read_trials(trial_result.load_run(tmp_path / "run")).frame.set_index(
        ["precision", "options", "batch"]
    )
    assert frame.loc[("int8", "", 1), "budget"] == "over"
    assert frame.loc[("int8", "keep=1", 1), "budget"] == "within"
    assert ("int8", "keep=1", 4) in frame.index, "what holds is measured at every batch"
    tried = {t.batch: t.rounds[0].folder for t in trial_result.load_run(tmp_path / "run") if t.options}
    first, last = ((tried[batch] / "record.json").stat().st_mtime_ns for batch in (1, 4))
    assert first < last, "it is searched for what fails, at the smallest batch"
    made_by = next(t for t in trial_result.load_run(tmp_path / "run") if t.options).made_by
    assert made_by.kept[0].op == "Conv" and made_by.kept[0].sqnr_db < 10
    assert made_by.ranked == 4
    assert [step.maker for step in made_by.steps][-2:] == ["onnx_sensitivity", "onnx_precision"]
    monkeypatch.setattr(verdict, "cpu_contention", lambda *_, **__: None)  # ignores other programs on this machine
    loaded = trial_result.load_run(tmp_path / "run")
    said = "\n".join(verdict.list_sentences(trial_table.read_trials(loaded)))
    assert f"with 1 of 4 layers in a higher precision ({made_by.kept[0].node}) it is within" in said
    assert "chosen on the test images themselves" in said
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/trials/*/*/record.json")}
    assert dyno(*words).returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/trials/*/*/record.json")}


def steps_of(needed: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int | None, list[int]]:
    """Return the result and the steps of a search in which `needed` layers are needed."""
    found = search._PrecisionSearch(Study(models=("fake:x",)), Path(), None, [], [], lambda *_: None)  # type: ignore[arg-type]
    found.p_values = {}

    def holds(self: Any, count: int) -> bool:
        self.p_values[count] = count >= needed
        return count >= needed

    monkeypatch.setattr(search._PrecisionSearch, "_is_within_budget", holds)
    monkeypatch.setattr(search._PrecisionSearch, "_count_layers", lambda self: layers)
    return found._find_fewest(), list(found.p_values)


@pytest.mark.parametrize(
    ("needed", "layers", "fewest", "tried"),
    [
        (1, 20, 1, [1]),
        (2, 20, 2, [1, 2]),
        (3, 20, 3, [1, 2, 4, 3]),
        (7, 54, 7, [1, 2, 4, 8, 6, 7]),
        (10, 20, 10, [1, 2, 4, 8, 10, 9]),
        (11, 20, None, [1, 2, 4, 8, 10]),
        (5, 2, None, [1]),
        (5, 0, None, [1]),
        (300, 700, 303, [1, 2, 4, 8, 16, 32, 64, 128, 256, 350]),
    ],
)
def test_the_fewest_kept_layers_are_found_by_doubling_and_halving(
    needed: int, layers: int, fewest: int | None, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seen = steps_of(needed, layers, monkeypatch)
    assert seen == tried[: search.MAX_CANDIDATES]
    assert found == (fewest if needed < 300 else 350), "at the limit the last one that holds counts"


def test_choosing_among_many_candidates_keeps_the_error_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 images lose exactly the budget, a point, however many layers are kept."""
    rng, images, limit = np.random.default_rng(0), 2000, -0.01
    chances: dict[int, float] = {}
    monkeypatch.setattr(search._PrecisionSearch, "_find_chance", lambda self, layers: chances[layers])
    monkeypatch.setattr(search._PrecisionSearch, "_count_layers", lambda self: 100)
    wrong, alone = 0, 0
    for _ in range(1000):
        common, changed = rng.binomial(images, 0.01), rng.binomial(images, 0.02, (51, 2))
        for k, (lost, gained) in enumerate(changed.tolist()):
            chances[k] = stats.paired_chance(gained, common + lost, images, limit)
        one = search._PrecisionSearch(Study(models=("fake:x",)), Path(), None, [], [], lambda *_: None)  # type: ignore[arg-type]
        one.p_values = {}
        one._find_fewest()
        wrong += bool(one.list_confirmed())
        alone += any(chances[k] <= 0.025 for k in one.p_values)
    assert wrong <= 25 + 3 * math.sqrt(25), "2.5 %"
    assert alone > 60, "each by itself"


def test_only_trials_that_support_kept_layers_are_searched(hostile: Path) -> None:
    study = Study(models=(str(hostile),), channels=1, data="digits", precisions=("fp16", "int8"),
                  backends=("onnxruntime", "openvino"))  # fmt: skip
    can = {(p.trial.backend, p.trial.precision): search.with_kept_layers(study, p.trial, 2) for p in expand(study)}
    assert can[("openvino", "fp16")] is None, "it lowers types itself, whatever the file says"
    made = can[("openvino", "int8")]
    assert made is not None and made.options == {"keep": 2} and made.recipe is not None
    assert made.recipe.parent.options["keep"] == 2  # type: ignore[union-attr]
    assert made.recipe.parent.parent.maker == "onnx_sensitivity"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "line"),
    [({"search": True}, "needs a budget to hold"), ({"confirm": -1}, "confirm is -1; it must be at least 0")],
)
def test_invalid_search_settings_are_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        Study(models=("fake:x",), **fields)


def test_a_budget_enables_both_searches() -> None:
    plain = Study(models=("fake:x",))
    study = Study(models=("fake:x",), data="digits", budget={"top1": 1.0})
    assert (plain.confirmations, plain.searches) == (0, False)
    assert (study.confirmations, study.searches) == (3, True)
    off = Study(models=("fake:x",), data="digits", budget={"top1": 1.0}, search=False, confirm=0)
    assert (off.confirmations, off.searches) == (0, False)
    assert json.loads(json.dumps(off.to_table()))["search"] is False


ROUTES = "--rounds 1 --seconds 0.05 --block 0.01 --warmup 0.02 --threads 1 --size 16 --boundaries model".split()
# When traced, a net does a tenth of the work with the same outputs; a net of `wrong` changes them.
NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.factor, self.first, self.last = factor, nn.Linear(768, 512), nn.Linear(512, 4)
        self.work = nn.ModuleList(nn.Linear(512, 512) for _ in range(24))
    def forward(self, x):
        x = torch.softmax(self.first(x.flatten(1)), 1).unsqueeze(1)
        y = x
        for layer in self.work[: 1 if torch.jit.is_tracing() else None]:
            y = torch.softmax(layer(y), 2)
        kept = x + 1e-9 * y
        return self.last(kept * (self.factor if torch.jit.is_tracing() else 1.0)).squeeze(1)

def light(): return Net()
def wrong(): return Net(3.0)
def plain(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
"""


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("nets") / "nets.py"
    file.write_text(NETS)
    return file


def tried(run: Path) -> Attempt:
    (one,) = read_attempts(run)
    return one


def test_a_faster_route_gets_its_own_rows_and_is_tried_once(nets: Path, dyno: Any, tmp_path: Path) -> None:
    words = ("run", f"{nets}:light", "--backend", "onnxruntime", "--batch", "1,2", "--out", tmp_path, *ROUTES)
    done = dyno(*words, code=0)
    one = tried(tmp_path)
    assert one.kept_route is not None and one.kept_route.route == "torchscript" and one.kept_route.ratio > 1.5, one
    rows = {(t.variant, t.batch) for t in trial_result.load_run(tmp_path) if t.good}
    usual = {("onnxruntime", 1), ("onnxruntime", 2)}
    assert rows == usual | {("onnxruntime@exporter=torchscript", 1), ("onnxruntime@exporter=torchscript", 2)}
    assert "by the route torchscript ran" in done.stdout
    assert "in round 1" in done.stderr and "after round 2" not in done.stderr, "the search shows no answers"
    inner = Study.from_toml(next((tmp_path / "routes").glob("*/study.toml")))
    assert (inner.search, inner.peak, inner.energy) == (False, False, False), "it measures nothing but latencies"
    written = {
        part: [p.stat().st_mtime_ns for p in (tmp_path / part).rglob("record.json")] for part in ("trials", "routes")
    }
    assert min(written["trials"]) < min(written["routes"]), "a first answer doesn't wait for other routes"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("record.json")}
    again = dyno(*words)
    assert again.returncode == 0 and "other routes" not in again.stderr
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("record.json")}


def test_a_route_with_other_outputs_is_never_kept(nets: Path, dyno: Any, tmp_path: Path) -> None:
    dyno("run", f"{nets}:wrong", "--backend", "onnxruntime", "--out", tmp_path, *ROUTES, code=0)
    assert {route.route: route.outcome for route in tried(tmp_path).routes}["torchscript"] == ROUTE_FAILED
    assert not any("torchscript" in t.variant for t in trial_result.load_run(tmp_path))


@pytest.mark.parametrize("words", [("plain",), ("light", "--routes", "usual")])
def test_no_route_is_tried_without_need(nets: Path, dyno: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    name, *options = words
    dyno("run", f"{nets}:{name}", *options, "--backend", "onnxruntime", "--out", tmp_path, *ROUTES, code=0)
    assert not (tmp_path / "routes.json").exists() and not (tmp_path / "routes").exists()
    assert [t.variant for t in trial_result.load_run(tmp_path)] == ["onnxruntime"]


@pytest.mark.parametrize(
    ("precision", "beside", "decides"),
    [
        ("fp32", ("int8",), "fp32"),
        ("bf16", ("fp32",), "bf16"),
        ("int8", (), "fp32"),
        ("int8", ("fp32", "fp16"), "fp16"),
        ("fp8", ("tf32",), "tf32"),
    ],
)
def test_one_float_type_decides_the_route_of_a_trial(precision: str, beside: tuple[str, ...], decides: str) -> None:
    model, dims = ModelSpec("net", "net.py:net"), Dims(1, 8, 8)
    own, *others = (Trial(model, "tensorrt", one, dims) for one in (precision, *beside))
    assert search._choose_float(own, [own, *others, Trial(model, "onnxruntime", "bf16", dims)]) == decides


@pytest.mark.parametrize(
    ("ratio", "verdict", "outputs", "status", "outcome"),
    [
        (1.05, stats.FASTER, OUTPUTS_AGREE, "ok", notes.ROUTE_KEPT),
        (1.049, stats.FASTER, OUTPUTS_AGREE, "ok", notes.ROUTE_NOT_FASTER),
        (1.5, stats.FASTER, "", "ok", notes.ROUTE_KEPT),
        (1.5, stats.UNDECIDED, "", "ok", notes.ROUTE_NOT_FASTER),
        (1.5, stats.FASTER, "differ", "ok", notes.ROUTE_WRONG),
        (math.nan, stats.UNDECIDED, "", "ok", notes.ROUTE_NOT_FASTER),
        (1.5, stats.FASTER, "", "crashed", ROUTE_FAILED),
    ],
)
def test_a_route_is_kept_for_a_proven_gain_of_a_twentieth(
    ratio: float, verdict: str, outputs: str, status: str, outcome: str
) -> None:
    trial = SimpleNamespace(id="t", good=status == "ok", status=status, reason="signal 11")
    found = stats.Speedup(ratio, ratio, ratio, verdict, "in turns")
    attempt = search._judge_route("static", trial, found, {"t": outputs})  # type: ignore[arg-type]
    assert attempt.outcome == outcome


@pytest.mark.parametrize(("seconds", "spent"), [(0.5, 0.5), (2.0, 1.0)])
def test_trials_of_other_routes_measure_for_at_most_a_second(tmp_path: Path, seconds: float, spent: float) -> None:
    name, asked = "torchvision:resnet18", list[float]()

    def measure(study: Study, _: Path) -> None:
        asked.append(study.seconds)
        raise UserError("nothing is measured")

    wanted = [
        search.Configuration(Trial(ModelSpec("resnet18", name), "onnxruntime", "fp32", Dims(1, 8, 8)), ("dynamo",))
    ]
    assert not search._try_routes(Study(name, seconds=seconds), tmp_path, wanted, Progress(quiet=True), measure)
    assert asked == [spent]


def test_a_damaged_routes_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "routes.json").write_text(json.dumps({"schema": 2, "attempts": [{"key": 3}]}))
    assert read_attempts(tmp_path) == ()
