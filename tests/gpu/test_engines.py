"""TensorRT through the command line: build, time, compare, stress, and every kind of failure."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dyno import Study
from dyno.store import cache_dir
from dyno.study.study import Choice

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
SIZE = 64
QUICK = ("--seconds", 0.1, "--warmup", 0.1, "--rounds", 1)


# Allocates 400 GB, only on a GPU: inspection runs on the CPU.
HUNGRY = """
import torch

class Hungry(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
    def forward(self, x): return (x * self.scale).flatten(1).repeat(8_000_000 if x.is_cuda else 1, 1)[:1, :10]

def net(): return Hungry()
"""


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.stdout.strip(), done.stderr
    first, *_ = json.loads(done.stdout)["tables"].values()
    rows: list[dict[str, Any]] = first["rows"]
    return rows


def line(done: subprocess.CompletedProcess[str]) -> str:
    """Assert exit code 2 and return the one-line error."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    last = [text for text in done.stderr.splitlines() if text.startswith("dyno: ")]
    assert len(last) == 1 and "Traceback" not in done.stderr, done.stderr
    return last[0]


@pytest.fixture(scope="module")
def study(net: str, tensorrt_python: str) -> Any:
    def make(*backends: str, **fields: Any) -> Study:
        usual = {"sizes": (str(SIZE),), "rounds": 1, "seconds": 0.2, "warmup": 0.1, "device": "cuda:0", "compared": 8}
        named = {Choice.parse(one).name for one in backends}
        tables = {name: {"python": tensorrt_python} for name in named if name == "tensorrt"}
        return Study(**{"models": (net,), "backends": backends, "runtime": tables, **usual, **fields})

    return make


def test_every_precision_runs_as_requested(study: Any, tmp_path: Path) -> None:
    ways = (
        "pytorch@precision=fp32",
        "tensorrt@precision=fp32+tf32+fp16",
        "tensorrt@precision=fp16@route=flags@allow_mixed=true",
    )
    result = study(*ways, batches=(2,)).run(tmp_path / "run", quiet=True)
    frame = result.to_pandas()
    assert set(frame["status"]) == {"ok"}, frame[["backend", "precision", "status", "reason"]].to_string()
    # With flags the builder may choose faster FP32 kernels; `allow_mixed` accepts them.
    strict = [t for t in result.records if t.facts.precision_truth and not t.options.get("allow_mixed")]
    truths = {(t.backend, t.precision): t.facts.precision_truth for t in strict}
    assert all(truth.ok for truth in truths.values()), truths
    assert truths["tensorrt", "fp16"].share.get("float16", 0) >= 0.5
    shares = [t.facts.time_by_operator for t in result.records if t.backend == "tensorrt"]
    assert all(sum(share.values()) == pytest.approx(1, abs=0.01) for share in shares), shares
    assert not any("unknown" in share for share in shares), "the profiler's names are the inspector's"
    outputs = {(t.backend, t.precision): next(iter(t.outputs().values())) for t in result.records}
    want = outputs["pytorch", "fp32"]
    scale = abs(want).max()
    assert abs(outputs["tensorrt", "fp32"] - want).max() < 1e-4 * scale
    assert abs(outputs["tensorrt", "fp16"] - want).max() < 2e-2 * scale
    for trial in result.records:
        samples = trial.samples("latency", "model", "gpu"), trial.samples("latency", "model", "host")
        assert all(len(s) for s in samples)
        assert (
            min(samples[0]) > 1e-6
            and sorted(samples[0])[len(samples[0]) // 2] < sorted(samples[1])[len(samples[1]) // 2]
        )
    assert (frame["layers"] > 0).all() and (frame["gpu_memory_mb"] > 0).all()


def test_int8_by_graph_and_by_calibrator(study: Any, net: str, tmp_path: Path) -> None:
    ways = ("pytorch@precision=fp32", "tensorrt@precision=int8", "tensorrt@precision=int8@route=calibrator",
            "tensorrt@precision=int8@route=calibrator@calibrator=minmax")  # fmt: skip
    gray = {"models": (net.replace(":net", ":gray"),), "channels": 1, "data": "digits", "batches": (4,)}
    result = study(*ways, **gray).run(tmp_path / "run", quiet=True)
    frame = result.to_pandas()
    assert set(frame["status"]) == {"ok"}, frame[["backend", "status", "reason"]].to_string()
    int8 = [t.facts.precision_truth.share.get("int8", 0) for t in result.records if t.precision == "int8"]
    assert len(int8) == 3 and min(int8) >= 0.5, int8


def test_dynamic_and_static_agree(trt: Any, onnx: Path, engine: Path, tmp_path: Path) -> None:
    static = tmp_path / "static.engine"
    assert trt("export", onnx, "-o", static, "--precision", "fp16", "--min", 4, "--opt", 4, "--max", 4).returncode == 0
    done = trt(
        "diff", static, engine, "--batch", 4, "--rtol", 1e-2, "--atol", 1e-2, "--least", 0.99, "--format", "json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (fixed, _) = (trt("time", path, "--batch", 4, *QUICK, "--format", "json") for path in (static, engine))
    assert rows(fixed)[0]["status"] == "ok"
    assert "outside the engine's profile, 4 to 4" in line(trt("time", static, "--batch", 2))


def test_time_explains_trtexec_terms(trt: Any, engine: Path) -> None:
    done = trt("time", engine, "--batch", 8, *QUICK)
    assert done.returncode == 0, done.stderr
    assert "trtexec" in done.stdout and "--loadEngine" in done.stdout and "Enqueue" in done.stdout


def test_stress(trt: Any, engine: Path) -> None:
    done = trt("bench", "stress", engine, "--phases", "min,opt,max,random", "--iterations", 300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every output right") == 4


def test_builds_are_compared(trt: Any, onnx: Path, tmp_path: Path) -> None:
    done = trt("export", onnx, "-o", tmp_path / "best.engine", "--repeat", 2, "--batch", 2, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "p = " in done.stdout and (tmp_path / "best.engine").stat().st_size > 1000


def test_graphs_and_slots_do_not_change_outputs(study: Any, tmp_path: Path) -> None:
    ways = ("tensorrt", "tensorrt@graph=false", "tensorrt@slots=1", "tensorrt@profile=1:2:8")
    result = study(*ways, batches=(2,)).run(tmp_path / "run", quiet=True)
    outputs = [next(iter(t.outputs().values())) for t in result.records if t.good]
    assert len(outputs) == 4
    for other in outputs[1:]:
        assert abs(other - outputs[0]).max() < 1e-4 * abs(outputs[0]).max()


def test_a_batch_outside_the_profile(trt: Any, engine: Path) -> None:
    assert "outside the engine's profile" in line(trt("time", engine, "--batch", 16))
    assert "outside the engine's profile" in trt("bench", "stress", engine, "--phases", "9", "--iterations", 1).stdout
    assert rows(trt("time", engine, *QUICK, "--format", "json"))[0]["batch"] == 4, "the batch it was tuned for"


@pytest.mark.parametrize("damage", ["cut", "flipped", "text"])
def test_invalid_engines_are_refused(trt: Any, engine: Path, tmp_path: Path, damage: str) -> None:
    content = engine.read_bytes()
    bad = tmp_path / "bad.engine"
    bad.write_bytes(
        {"cut": content[: len(content) // 2], "flipped": b"\xff" * 64 + content[64:], "text": b"no engine"}[damage]
    )
    assert "is not an engine for TensorRT" in line(trt("time", bad))


def test_a_truncated_cache_file_is_rebuilt(study: Any, tmp_path: Path) -> None:
    study("tensorrt", batches=(3,)).run(tmp_path / "a", quiet=True)
    kept = list((cache_dir() / "artifacts").glob("*/model.engine"))
    for path in kept:
        path.write_bytes(path.read_bytes()[:1000])
    result = study("tensorrt", batches=(3,)).run(tmp_path / "b", quiet=True)
    assert [t.status for t in result.records] == ["ok"]


def test_an_unknown_operator_is_named(trt: Any, onnx: Path, tmp_path: Path) -> None:
    import onnx as library

    model = library.load(str(onnx))
    model.graph.node[0].op_type, model.graph.node[0].name = "Unheard", "the_first_node"
    path = tmp_path / "odd.onnx"
    library.save(model, str(path))
    said = trt("export", path, "-o", tmp_path / "odd.engine")
    assert said.returncode == 2 and "Unheard" in said.stderr


def test_a_static_file_refuses_other_shapes(dyno: Any, trt: Any, net: str, tmp_path: Path) -> None:
    fixed = tmp_path / "fixed.onnx"
    assert dyno("export", net, "-o", fixed, "--size", SIZE, "--batch", 2).returncode == 0
    assert "export it with --batch dynamic" in line(trt("export", fixed, "-o", tmp_path / "x.engine", "--max", 8))
    assert trt("export", fixed, "-o", tmp_path / "y.engine", "--batch", 2).returncode == 0


def test_out_of_memory_is_a_row_and_memory_is_freed(study: Any, tmp_path: Path) -> None:
    free = free_memory()
    (tmp_path / "hungry.py").write_text(HUNGRY)
    running = study("pytorch@precision=fp32", models=(f"{tmp_path}/hungry.py:net",), batches=(1,))
    running = running.run(tmp_path / "running", quiet=True)
    with hogged():
        building = study("tensorrt@profile=1:64:4096", batches=(64,), sizes=("128",))
        building = building.run(tmp_path / "building", quiet=True)
    for result in (running, building):
        assert [t.status for t in result.records] == ["oom"], [t.reason for t in result.records]
    after = study("tensorrt", batches=(2,)).run(tmp_path / "after", quiet=True)
    assert [t.status for t in after.records] == ["ok"]
    assert free_memory() > free - 2**30


def free_memory() -> int:
    """Return the GPU's free bytes from nvidia-smi, as a CUDA context in this process would disturb other tests."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 2**20


@contextmanager
def hogged() -> Iterator[None]:
    """Let another process hold all GPU memory except a context's share."""
    code = (
        "import torch; free = torch.cuda.mem_get_info()[0] - 900 * 2**20;"
        "kept = torch.empty(free, dtype=torch.uint8, device='cuda'); print('held', flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield
    finally:
        process.kill()
        process.wait()


def test_a_job_past_its_timeout_is_a_timeout_row(study: Any, tmp_path: Path) -> None:
    result = study("pytorch@precision=fp32", batches=(1,), timeout=0.5).run(tmp_path / "run", quiet=True)
    assert [t.status for t in result.records] == ["timeout"]


def test_onnx_runtime_on_the_gpu(net: str, ortgpu_python: str, tmp_path: Path) -> None:
    asked = Study(
        models=(net,), backends=("onnxruntime@precision=fp32+fp16+tf32", "pytorch@precision=fp32"), sizes=(str(SIZE),),
        batches=(4,), device="cuda:0", rounds=1, seconds=0.2, warmup=0.1, compared=8,
        runtime={"onnxruntime": {"python": ortgpu_python}},
    )  # fmt: skip
    result = asked.run(tmp_path / "run", quiet=True)
    assert {t.status for t in result.records} == {"ok"}, [t.reason for t in result.records]
    outputs = {(t.backend, t.precision): next(iter(t.outputs().values())) for t in result.records}
    want = outputs["pytorch", "fp32"]
    assert abs(outputs["onnxruntime", "fp32"] - want).max() < 1e-4 * abs(want).max()
    bits = {(t.backend, t.precision): t.facts.product_bits for t in result.records}
    assert bits["pytorch", "fp32"] == bits["onnxruntime", "fp32"] == 24
    assert bits["onnxruntime", "tf32"] == 11, "measured: TF32 rounds factors"
    for trial in result.records:
        if trial.backend == "onnxruntime":
            assert set(trial.facts.nodes_by_provider) == {"CUDAExecutionProvider"}, trial.facts


def test_pytorch_and_tensorrt_are_interleaved(net: str, tensorrt_python: str, tmp_path: Path) -> None:
    study = Study(
        models=(net,), backends=("pytorch", "tensorrt"), precisions=("fp32",), sizes=("64",), batches=(8,), rounds=2,
        seconds=0.5, warmup=0.1, device="cuda:0", turns=True, runtime={"tensorrt": {"python": tensorrt_python}},
    )  # fmt: skip
    result = study.run(tmp_path / "run", quiet=True)
    frame = result.to_pandas()
    assert set(frame["status"]) == {"ok"}, frame[["backend", "status", "reason"]].to_string()
    engine = frame[frame["backend"] == "tensorrt"].iloc[0]
    assert engine["measured"] == "in turns"
    assert engine["speedup_low"] <= engine["speedup"] <= engine["speedup_high"]
    for trial in result.records:
        assert len(trial.rounds) == 2 and all(
            len(r.block_medians("latency", "model", "gpu")) >= 3 for r in trial.rounds
        )
        assert trial.gpu is None or not trial.gpu.other_processes, "members of a turn don't count as others"
