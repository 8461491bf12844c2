"""Files that Dyno stores and reads again: run folders, the cache, self-tests, explained pairs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fault_campaign.campaign import Campaign
from benchmarks.fault_campaign.changes import mutated, planted, rearranged, reset, retyped
from benchmarks.fault_campaign.mutations import Subject

from dyno.results.self_test import ProcessPair, StoredSelfTest, TestRound
from dyno.runner import self_test
from dyno.worker.record import write_json
from dyno.worker.spec import to_json

ROOT = Path(__file__).resolve().parents[2]
SHORT = "--seconds 0.02 --warmup 0.01 --threads 1".split()
FAKE = ["run", "fake:net", "--channels", 1, "--backend", "fake@latency_ms=0.1", "--rounds", 1, *SHORT]
TIMES = [1.01e-3, 1.02e-3, 1.03e-3]


def subjects(campaign: Campaign) -> Iterator[Subject]:
    """Yield every kind of file in a run folder, then the files that a study or a job reads back."""
    run = campaign.folder / "stored" / "run"
    shutil.copytree(ROOT / "tests/golden/run", run)
    _more(run, campaign.folder / "stored")
    page = campaign.folder / "stored" / "page"
    look: list[list[Any]] = [
        ["show", run], ["show", run, "--table", "all", "--format", "json"], ["report", run, "--out", page],
        ["compare", run, ROOT / "tests/golden/run", "--fail-on", "status"], ["runs", "list", run.parent],
    ]  # fmt: skip
    ids = ",".join(
        sorted(path.parents[1].name for path in run.glob("trials/*/r0/record.json") if _status(path) == "ok")
    )
    over_time = [["show", run, "--over-time", page.with_name("time.svg"), "--trials", ids]]

    def of(kind: str, pattern: str, share: int, *changes: Any, others: Sequence[Any] = ()) -> Subject:
        files = sorted(run.glob(pattern))
        made = [page, page.with_name("time.svg")]
        return Subject(kind, files, [*others, *look], changes, share, made)

    yield of("record.json", "trials/*/r*/record.json", 280, mutated, retyped, retyped)
    yield of("job.json", "trials/*/r0/job.json", 180, mutated, retyped, retyped)
    yield of("samples.npz", "trials/*/r*/samples.npz", 220, mutated, rearranged, planted)
    yield of("outputs.npz", "trials/*/r*/outputs.npz", 100, mutated, rearranged, planted)
    yield of("telemetry.npz", "trials/*/r*/telemetry.npz", 20, mutated, rearranged, planted, others=over_time)
    yield of("study.toml of a run", "study.toml", 2, mutated, reset)
    for name in ("environment", "models", "devices", "routes", "self-test"):
        yield of(f"{name}.json", f"{name}.json", 2, mutated, retyped, retyped)
    yield of("placements/ID.json", "placements/*.json", 2, mutated, retyped, retyped)
    yield from _continued(campaign)
    yield from _kept(campaign)


def _status(record: Path) -> str:
    return str(json.loads(record.read_text())["status"])


def _more(run: Path, beside: Path) -> None:
    """Add the files that the stored run lacks, and three copies of each trial at other batches."""
    for trial in sorted((run / "trials").iterdir()):
        for copy, letter in enumerate("abc", 1):
            other = trial.with_name(f"{letter}{trial.name[1:]}")
            shutil.copytree(trial, other)
            for job in other.glob("*/job.json"):
                content = json.loads(job.read_text())
                content["trial"]["dims"]["batch"] += 8 * copy
                job.write_text(json.dumps(content))
    ids = sorted(path.name for path in (run / "trials").iterdir())
    card = {"place": "cuda:0", "card": "GPU 1"}
    place = {**card, "host": "a", "lost": ["cuda:1 (killed)"], "trials": ids, "done": "a"}
    measured = {
        "anchor": ids[0],
        "side_by_side": True,
        "devices": [{**card, "alone": TIMES, "beside": TIMES, "ratios": [1.0, 1.1]}],
    }
    tried = [{"route": "exporter=torchscript", "ratio": 1.2, "outcome": "kept", "reason": ""}]
    attempt = {"key": "a", "model": "net", "configuration": "onnxruntime fp32", "batch": 1, "routes": tried}
    test = {"date": "2026-11-24", "grade": "A", "configuration": "onnxruntime fp32", "seconds": 1.0}
    seen = {"turns": {"3": 0.01, "5": 0.008}, "apart": {"3": 0.02}}
    row = {"model": "net", "size": "28", "flops": 1e6, "parameters": 1000, "file": ""}
    (run / "placements").mkdir()
    files: dict[str, dict[str, Any]] = {
        "placements/0.json": place, "devices.json": measured, "routes.json": {"attempts": [attempt]},
        "self-test.json": {**test, **seen}, "models.json": {"models": [row]},
    }  # fmt: skip
    for path, content in files.items():
        (run / path).write_text(json.dumps({"schema": 2, **content}))


def _continued(campaign: Campaign) -> Iterator[Subject]:
    """Yield the files of a study that continues in a damaged folder."""
    run = campaign.folder / "continued" / "run"
    again = [*FAKE, "--out", run]
    campaign.prepare(*again)
    first = min(run.glob("trials/*/r0"))
    for file in (first / "record.json", first / "job.json", first / "samples.npz", run / "study.toml",
                 run / "environment.json", run / "models.json"):  # fmt: skip
        if not file.exists():
            continue
        of = {".json": [mutated, retyped], ".npz": [mutated, rearranged, planted], ".toml": [mutated, reset]}
        kind = f"{file.name}, the study continued"
        yield Subject(kind, [file], [again], of[file.suffix], 1, kept=run)


def _kept(campaign: Campaign) -> Iterator[Subject]:
    """Yield cached files: a self-test and an explained pair."""
    place = campaign.folder / "kept"
    place.mkdir()
    cache = place / "cache"
    run = place / "run"
    campaign.prepare(*FAKE, "--out", run, cache=cache)
    test = cache / "self-tests" / self_test.find_place("cpu").name
    test.parent.mkdir(parents=True)
    write_json(test, to_json(_self_test()))
    show = [["show", run]]
    yield Subject("self-test in the cache", [test], show, [mutated, retyped, retyped], 3, cache=cache)
    model = write_onnx(place / "m.onnx")
    pair = place / "pair.json"
    sides = ["onnxruntime", "onnxruntime@optimization=disable", "--rounds", 2, "--runs", 5]
    campaign.prepare("explain", model, *sides, "--save", pair, cache=cache)
    explain = [["explain", pair], ["explain", pair, "--format", "json"]]
    yield Subject("explained pair", [pair], explain, [mutated, retyped, retyped], 6)
    timed = [["time", model, *SHORT, "--backend", "onnxruntime@precision=fp16+fp32", "--out", place / "out",
              "--data", _photos(place / "photos"), "--size", 8]]  # fmt: skip
    campaign.prepare(*timed[0], cache=cache)
    shutil.rmtree(place / "out", ignore_errors=True)
    for file in sorted(path for path in cache.rglob("*") if path.is_file() and path.stat().st_size):
        of = {".json": [mutated, retyped], ".npz": [mutated, rearranged, planted], ".npy": [mutated, planted]}
        if file.suffix in (*of, ".onnx") and not {"self-tests", "telemetry.npz", "job.json"} & {*file.parts}:
            kind = f"{file.relative_to(cache).parts[0]}/{file.name} in the cache"
            changes = of.get(file.suffix, [mutated])
            yield Subject(kind, [file], timed, changes, 1, [place / "out"], cache, cache)


def _self_test() -> StoredSelfTest:
    """Return a self-test as a machine stores it."""
    pairs = (ProcessPair(0.0, (0.001, -0.001, 0.002)), ProcessPair(0.02, (0.021, 0.019, 0.02)))
    rounds = tuple(TestRound(1e-3, pairs, 0.1, 0.0, (3000.0, 3000.0)) for _ in range(5))
    versions = {"numpy": "2.0"}
    about = (
        "2026-11-24T10:00:00+00:00",
        "0.2.0",
        self_test.identify_machine("cpu"),
        "cpu",
        "fake fp32 of net",
        1,
        0.1,
        0.05,
        3,
    )
    return StoredSelfTest(*about, rounds, versions)


def write_onnx(path: Path, size: int = 8) -> Path:
    """Write a small ONNX file of a convolution and a classifier, at batch 2."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper, save

    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(4, 3, 3, 3)), "v": rng.normal(size=(4, 2)), "b": rng.normal(size=2)}
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]), helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["m"]), helper.make_node("Add", ["m", "b"], ["output"]),
    ]  # fmt: skip
    ends = [helper.make_tensor_value_info("input", TensorProto.FLOAT, [2, 3, size, size])]
    ends.append(helper.make_tensor_value_info("output", TensorProto.FLOAT, [2, 2]))
    initial = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initial)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def _photos(folder: Path) -> Path:
    from PIL import Image

    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (12, 12), (60 * number, 30, 60)).save(folder / name / f"{number}.png")
    return folder
