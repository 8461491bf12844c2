"""Kernels' layers and hardware counters: real counters, and values at the limits between verdicts."""

import json
import math
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import counted_backend
import ncu_files
from dyno.jobs import launcher
from dyno.jobs.progress import Progress
from dyno.layers import counters
from dyno.layers.align import FormSet
from dyno.layers.counters import Kernel, NcuReport
from dyno.study import defaults
from dyno.worker.facts.job import LAYERS, MODULES, Layer, LayerGraph
from dyno.worker.record import Record
from dyno.worker.spec import Trial, UserError

PYTORCH, TENSORRT = (counters.read_ncu(ncu_files.text(name)) for name in (ncu_files.PYTORCH, ncu_files.TENSORRT))
PARTS = ("conv1", "bn1", "relu", "maxpool", *(f"layer1.{k}.{part}" for k in (0, 1) for part in
         ("conv1", "bn1", "relu", "conv2", "bn2", "relu")), "layer1.0", "avgpool", "fc")  # fmt: skip
MODULE = LayerGraph(form=MODULES, library="PyTorch", layers=tuple(Layer(name=name) for name in PARTS))
ENGINE = LayerGraph(
    form=LAYERS,
    library="TensorRT",
    layers=tuple(
        Layer(name=name, nodes=() if "CopyNode" in name else tuple(name.split(" + ")))
        for name in dict.fromkeys(kernel.ranges[-1] for kernel in TENSORRT.kernels)
    ),
)


def test_kernels_belong_to_their_innermost_layer() -> None:
    owners = counters.find_owners(MODULE, PYTORCH.kernels)
    named = ["" if owner is None else PARTS[owner] for owner in owners]
    assert named[:10] == ["conv1"] * 4 + ["bn1"] * 3 + ["relu", "maxpool", "layer1.0.conv1"] and named[-1] == "fc"
    adds = [k for k, kernel in enumerate(PYTORCH.kernels) if "CUDAFunctor_add" in kernel.name]
    assert named[adds[0]] == "layer1.0", "the block's own addition, outside its parts"


def test_engine_kernels_belong_to_the_layer_named_by_tensorrt() -> None:
    owners = counters.find_owners(ENGINE, TENSORRT.kernels)
    names = ["" if owner is None else ENGINE.layers[owner].name for owner in owners]
    assert names == [kernel.ranges[-1] for kernel in TENSORRT.kernels]


def test_calls_of_a_module_that_runs_twice_are_distinguished() -> None:
    form = LayerGraph(form=MODULES, layers=(Layer(name="relu"), Layer(name="conv"), Layer(name="relu"), Layer()))
    kernels = [Kernel("k", ranges) for ranges in (("(model)", "relu"), ("(model)", "relu#2"), ("(model)",), ("x",))]
    assert counters.find_owners(form, kernels) == [0, 2, 3, None]


def test_the_counters_table_has_both_forms() -> None:
    forms, reports = (MODULE, ENGINE), {0: PYTORCH, 1: TENSORRT}
    table = counters.make_counters_table(FormSet(forms), reports, "time", 5)
    for k, report in reports.items():
        rows = [row for row in table.rows if row["form"] == forms[k].library]
        times = [row["time_us"] for row in rows[:-1]]
        assert times == sorted(times, reverse=True) and len(rows) == 6
        assert rows[-1]["modules"] == f"{len(report.kernels) - 5} more kernels" and "finding" not in rows[-1]
        assert sum(row["share"] for row in rows) == pytest.approx(100)
        assert sum(row["time_us"] for row in rows) == pytest.approx(sum(1e6 * one.seconds for one in report.kernels))
        assert sum(row["dram_mb"] for row in rows) == pytest.approx(sum(one.dram_bytes / 1e6 for one in report.kernels))
    first = table.rows[0]
    assert (first["modules"], first["finding"]) == ("maxpool", "compute-bound: SMs at 82 % of their peak")
    assert next(table.parts()).rows[0] == first
    in_order = counters.make_counters_table(FormSet(forms[:1]), {0: PYTORCH}, "graph", 0).rows
    assert [row["kernel"] for row in in_order] == [kernel.name for kernel in PYTORCH.kernels]
    last = in_order[-1]
    assert last["modules"] == "fc" and last["finding"] == "too small a grid: 64 blocks for 132 SMs"


def test_sentences_summarise_all_kernels_of_a_form() -> None:
    notes = counters.make_counters_table(FormSet((MODULE, ENGINE)), {0: PYTORCH, 1: TENSORRT}, "time", 5).notes
    assert "TensorRT: the tensor cores are idle (up to 2 %) in all 24 kernels." in notes
    (tensor,) = (note for note in notes if note.startswith("PyTorch: the tensor cores"))
    assert tensor.endswith("and are idle (up to 2 %) in the 2 longest kernels.")
    (bounds,) = (note for note in notes if note.startswith("TensorRT: the time of its 24 kernels is"))
    assert bounds.split(" is ")[1].split(" % ")[1].startswith("compute-bound")
    cut = counters.describe_counters(replace(PYTORCH, cut_short="ncu wasn't done after 900 s"), [0] * 45)
    assert cut[0] == "only the first 45 of its kernels were counted: ncu wasn't done after 900 s"
    lost = counters.describe_counters(NcuReport((Kernel("a", seconds=3.0), Kernel("b", seconds=1.0))), [0, None])
    assert lost == ["of no layer: 1 kernel, 25 % of the time"]


FULL = Kernel("k", sm=10.0, memory=10.0, dram=10.0, tensor=0.0, waves=2.0, blocks=264.0, sms=132.0, seconds=1.0)
FINDINGS = {
    "memory-bound: 83 % of DRAM bandwidth": {"memory": 83.0, "dram": 83.0, "sm": 70.0},
    "memory-bound: caches at 60 %, DRAM at 59 %": {"memory": 60.0, "dram": 59.0},
    "compute-bound: SMs at 60 % of their peak": {"sm": 60.0, "memory": 59.9},
    "compute-bound: tensor cores at 64 % of their peak": {"sm": 64.0, "tensor": 64.0},
    "too small a grid: 66 blocks for 132 SMs": {"blocks": 66.0, "waves": 0.5},
    "too small a grid: 1 block for 132 SMs": {"blocks": 1.0, "waves": 0.0},
    "too small a grid: 0.50 of a wave": {"waves": 0.5},
    "latency-bound: SMs at 10 %, memory at 10 %": {"waves": 0.51},
    "": {"sm": float("nan"), "memory": float("nan")},
}


@pytest.mark.parametrize(("said", "figures"), FINDINGS.items())
def test_each_kernel_has_a_sentence(said: str, figures: dict[str, float]) -> None:
    assert counters.describe_bound(replace(FULL, **figures)) == said  # type: ignore[arg-type]


def test_tensor_core_use_is_described_where_known() -> None:
    busy, idle = replace(FULL, tensor=50.0, seconds=3.0), replace(FULL, tensor=2.0, seconds=1.0)
    said = [counters.describe_counters(NcuReport(each), [0, 0])[-1] for each in ((busy, idle), (idle, busy))]
    assert said == ["the tensor cores work 38 % of the kernels' time"] * 2
    longest = (replace(idle, seconds=9.0), busy)
    last = counters.describe_counters(NcuReport(longest), [0, 0])[-1]
    assert last.endswith("and are idle (up to 2 %) in the longest kernel")
    unknown = replace(FULL, tensor=float("nan"))
    assert not any("tensor" in one for one in counters.describe_counters(NcuReport((unknown,)), [0]))


def test_kernels_have_figures_and_enclosing_ranges() -> None:
    kernels = PYTORCH.kernels
    assert len(kernels) == 45
    first, last = kernels[0], kernels[-1]
    assert first.name == "engines_precompiled::nchwToNhwcKernel<__half, __half, float, 0, 1, 0>"
    assert first.ranges == ("resnet", "conv1") and first.seconds == pytest.approx(65.792e-6)
    assert (first.sm, first.memory, first.dram, first.dram_bytes) == (77.34, 36.68, 7.84, 24_822_272)
    assert (first.warps, first.l2, first.waves, first.tensor) == (88.24, 64.24, 47.52, 0)
    assert (first.blocks, first.threads, first.registers, first.sms) == (50176, 256, 32, 132)
    assert last.ranges == ("resnet", "fc") and (last.blocks, last.tensor) == (64, 0.73)
    assert {"layer1.0.conv1", "layer1.1.conv1", "layer4.1.relu"} <= {kernel.ranges[-1] for kernel in kernels}


def test_tensorrt_ranges_with_unescaped_quotes_are_read() -> None:
    kernels = TENSORRT.kernels
    assert len(kernels) == 24
    assert {kernel.ranges[0] for kernel in kernels} == {"ExecutionContext::enqueue"}
    assert [kernel.ranges[-1] for kernel in kernels[:3]] == [
        "node_Conv_292 + node_relu", "node_max_pool2d", "node_Conv_294 + node_relu_1",
    ]  # fmt: skip
    copies = [kernel for kernel in kernels if kernel.ranges[-1].startswith("Reformatting CopyNode for ")]
    assert {kernel.name.split("<")[0] for kernel in copies} <= {"cuInt8::nchwToNhwcKernel", "cuInt8::nhwcToNchwKernel"}
    assert not any(math.isnan(value) for kernel in kernels for value in (kernel.seconds, kernel.dram_bytes, kernel.l2))


def test_ranges_are_reduced_to_the_layer_name() -> None:
    around = '22435  ""TensorRT:conv (a) + relu:none:none:RGB:0xffffd700:REGISTERED:conv (a) + relu"" '
    line = next(line for line in ncu_files.text(ncu_files.PYTORCH).split("\n") if line.startswith('"0"'))
    begin, end = line.index('"19737  ') + 1, line.index(' ","","void') + 1
    text = ncu_files.text(ncu_files.PYTORCH).replace(line, line[:begin] + around + line[end:])
    first = counters.read_ncu(text).kernels[0]
    assert first.ranges == ("conv (a) + relu",) and first.seconds == pytest.approx(65.792e-6)


def test_missing_figures_are_nan_and_truncated_lines_are_skipped() -> None:
    lines = ncu_files.text(ncu_files.PYTORCH).rstrip("\n").split("\n")
    without = "\n".join([*lines[:5], lines[5].replace('"77.34"', '"n/a"'), lines[6][:90]])
    (kernel,) = counters.read_ncu(without).kernels
    assert math.isnan(kernel.sm) and kernel.memory == 36.68
    old = ncu_files.text(ncu_files.PYTORCH).replace("launch__sm_count", "another")
    assert math.isnan(counters.read_ncu(old).kernels[0].sms)


def test_ncu_errors_are_kept_and_empty_output_has_no_kernels() -> None:
    said = "==PROF== Connected to process 1 (/usr/bin/python3)\n==ERROR== ERR_NVGPUCTRPERM - no permission\nfoo\n"
    assert counters.read_ncu(said) == counters.NcuReport((), ("ERR_NVGPUCTRPERM - no permission",))
    assert counters.read_ncu("") == counters.NcuReport(())


TESTS = Path(counted_backend.__file__).parent
QUICK = ("--runs", 5, "--seconds", 0.02, "--warmup", 0.02)
REASONS = {
    "denied": "this user may not read the GPU's counters (ERR_NVGPUCTRPERM); run as root",
    "busy": "another program uses the GPU's counters, such as DCGM or another profiler; end it",
    "none": "ncu saw no kernel between the start and the stop of its profiling",
}
# The backend in a process that believes in the GPU.
ON_A_GPU = """
import sys
from counted_backend import COUNTED
if checks := sys.modules.get("dyno.study.defaults"):
    checks.missing_gpu = lambda device: False
"""
PART = 'ncu failed to profile "k" in process 7 (UnknownError); other programs may be using the GPU'


@pytest.fixture
def place(tmp_path: Path, onnx_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a model, a backend with counters, and a fake ncu on the PATH."""
    (tmp_path / "counted-1.dist-info").mkdir()
    (tmp_path / "counted-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: counted\nVersion: 1\n")
    (tmp_path / "counted-1.dist-info/entry_points.txt").write_text("[dyno.backends]\ncounted = on_a_gpu:COUNTED\n")
    (tmp_path / "on_a_gpu.py").write_text(ON_A_GPU)
    paths = [str(tmp_path), str(TESTS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    (tmp_path / "bin").mkdir()
    ncu_files.stand_in(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def profile(dyno: Any, place: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: object) -> Any:
        return dyno("profile", "m.onnx", "counted", *QUICK, "--counters", *words, cwd=place)

    return run


def test_counters_are_shown_with_layer_times(profile: Any, place: Path) -> None:
    done = profile("--device", "cuda:0", "--format", "json", "--top", 3, "--save", "p.html")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["tables"]
    assert list(found) == ["profile", "reconciliation", "counters"]
    rows = found["counters"]["rows"]
    assert rows[0]["modules"] == "node_Conv_292 node_relu" and rows[0]["layer"] == "node_Conv_292 + node_relu"
    assert rows[0]["time_us"] == pytest.approx(288.608) and rows[0]["dram_mb"] == pytest.approx(95.26, abs=0.01)
    assert rows[0]["finding"] == "memory-bound: caches at 86 %, DRAM at 7 %"
    assert len(rows) == 4 and rows[3]["modules"] == "21 more kernels" and rows[3]["finding"] is None
    assert any("not a latency" in note for note in found["counters"]["notes"])
    (line,) = found["reconciliation"]["rows"]
    assert line["unprofiled_ms"] < 50, "of a separate job, without ncu"
    page = (place / "p.html").read_text(encoding="utf-8")
    assert "Hardware counters" in page and "memory-bound: caches at 86 %" in page


@pytest.mark.parametrize("how", REASONS)
def test_missing_counters_are_reported_in_one_line(how: str, profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ncu_files.PRETEND, how)
    done = profile("--device", "cuda:0")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"dyno: no hardware counters: {REASONS[how]}")


def test_counts_before_an_ncu_failure_are_shown(profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ncu_files.PRETEND, "part")
    done = profile("--device", "cuda:0", "--format", "json", "--top", 0)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["tables"]["counters"]
    assert len(found["rows"]) == 20
    assert f"Counted 1: only the first 20 of its kernels were counted: {PART}." in found["notes"]


def test_counters_need_a_gpu_and_ncu(call: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = call("profile", "torchvision:resnet18", "--counters")
    assert (code, out) == (2, "") and "add --device cuda:0" in err and len(err.splitlines()) == 1
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setattr(defaults, "missing_gpu", lambda device: False)
    code, out, err = call("profile", "torchvision:resnet18", "--device", "cuda:0", "--counters")
    assert (code, out) == (2, "") and "there is no ncu on the PATH" in err and len(err.splitlines()) == 1


CRASHED = "The application returned an error code (11)."
ENDS = {
    CRASHED: "",
    'Failed to profile "k" in process 7': 'ncu failed to profile "k" in process 7; other programs may be using the GPU',
    "Failed to open/create lock file /tmp/nsight-compute-lock.": "",
}


@pytest.mark.parametrize(("error", "reason"), ENDS.items())
def test_only_uncounted_kernels_are_missing(error: str, reason: str) -> None:
    report = counters.NcuReport((counters.Kernel("k"),), (error,))
    assert counters.judge_counts(Record("ok"), report, 9.0).cut_short == reason


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [("crashed", CRASHED, "ncu says: The application returned"), ("crashed", "", "killed by SIGKILL"),
     ("failed", CRASHED, "killed by SIGKILL"), ("timeout", "", "ncu wasn't done after 9 s"),
     ("crashed", "InterprocessLockFailed", "set TMPDIR to a folder of your own")],
)  # fmt: skip
def test_without_kernels_the_reason_comes_from_ncu_or_the_job(status: str, error: str, said: str) -> None:
    with pytest.raises(UserError, match="no hardware counters: ") as raised:
        counters.judge_counts(
            Record(status, reason="killed by SIGKILL"), counters.NcuReport((), (error,) * bool(error)), 9.0
        )
    assert said in str(raised.value)


def count(place: Path, trial: Trial) -> counters.NcuReport:
    return counters.count_kernels(str(place / "bin/ncu"), trial, None, Progress(quiet=True))


def test_a_failed_job_reports_its_own_reason(place: Path, fake_trial: Any) -> None:
    nothing = place / "nothing.csv"
    nothing.write_text('"ID"')
    ncu_files.stand_in(place / "bin", nothing)
    with pytest.raises(UserError, match="no hardware counters: RuntimeError: scripted failure"):
        count(place, fake_trial("counted_backend:Counted", fail="exception", at="load"))


def test_an_engine_without_layer_ranges_has_no_counters(place: Path, fake_trial: Any) -> None:
    report = count(place, fake_trial("fake"))
    assert report.cut_short == "this engine's kernels can't be told apart for hardware counters"


class Seen(Progress):
    """Stores the job's current stage."""

    at = ""

    def tick(self, stage: str, elapsed: float) -> None:
        self.at = stage


def test_a_timeout_keeps_the_counts_and_leaves_no_process(
    place: Path, fake_trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, progress = fake_trial("counted_backend:Counted"), Seen(quiet=True)
    trial = replace(trial, runtime=replace(trial.runtime, env={counted_backend.HANG: "1"}))
    monkeypatch.setattr(
        launcher, "time", SimpleNamespace(monotonic=lambda: 7.0 * (progress.at == "counters"), sleep=time.sleep)
    )
    report = counters.count_kernels(str(place / "bin/ncu"), trial, None, progress, timeout_s=6.0)
    assert report.cut_short == "ncu wasn't done after 6 s" and len(report.kernels) == 10
    running = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert not [words for words in running if "main.py" in words]
